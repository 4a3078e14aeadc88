"""Operators without output until their input ends, after Flink's FLIP-331: joins with ``emit="at_end"``.

Until then an input is only kept: no index, no association counts, no output. At the end it is joined once, as a batch
operator would, and the result comes as insertions. What arrives is parted by its keys' hashes at once, so that the end
joins some parts at a time, few enough for the caches, or for a GPU's memory; a budget moves what is kept to disk
meanwhile.

The law is the other operators' own: a part is one micro-batch of ``per_batch``, from an empty state; where
rows are found by keys, it is joined without any state (`gpu_ops.operators.merge_join`).
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_ops import layouts, operators
from gpu_ops.errors import out_of_memory
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels
from gpu_ops.operators.kept_input import KeptInput, in_turn, keep, moves_between_parts, part_keys
from gpu_ops.operators.merge_join import merge_join
from gpu_ops.operators.operator import Operator
from gpu_ops.output import (
    Changelog,
    Output,
    changelog,
    together,
)

_log = logging.getLogger("gpu_ops")

# Rows joined at a time, all inputs together: enough to be worth the fixed cost, few enough for the caches. A GPU takes
# as many as its memory has room for, a part of it: each row as it came, sorted, and gathered for the output twice, its
# hash, slot, entry, place in a hash table and pair.
_ROWS_AT_ONCE = 400_000
_MEMORY_SHARE, _COPIES, _BESIDE = 0.5, 4, 128


class AtEnd(Operator):
    """An operator that keeps its input and has its output at the end; see `gpu_ops.operators.operator.Operator`.

    Args:
        description: its description.
        kernels: the backend.
    """

    tables: tuple[KeptInput, ...]

    def __init__(self, description: Any, kernels: Kernels) -> None:
        self.description, self.kernels = description, kernels
        self._clock_ms = 0
        self.tables = tuple(KeptInput(kernels, s, part_keys(description, i)) for i, s in enumerate(description.inputs))

    @abc.abstractmethod
    def result(self, changes: tuple[Ingested, ...]) -> Changelog:
        """Computes the result of one part of the input, in rows of the ``output_schema``.

        Args:
            changes: of each input, all that have the part's keys.
        """

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Keep the changes; there is no output yet."""
        return keep(self.description, self.tables, changes)

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        self._clock_ms = clock_ms
        super().commit(clock_ms)

    def finish(self) -> Iterator[Changelog]:
        """The result, part by part, as insertions."""
        sizes = np.sum([t.sizes() for t in self.tables], axis=0)
        at_once = self._rows_at_once(int(sizes.sum()))
        if any(moves_between_parts(self.description, input_index) for input_index in range(len(self.tables))):
            at_once = 0
        first = 0
        while first < sizes.size:
            last, rows = first + 1, int(sizes[first])
            while last < sizes.size and rows + int(sizes[last]) <= at_once:
                rows += int(sizes[last])
                last += 1
            if rows or sizes.size == 1:
                try:
                    found = self.result(self._changes(first, last))
                except Exception as error:
                    if self.kernels.host is None or last - first == 1 or not out_of_memory(error):
                        raise
                    _log.info("GPU memory ran out over %d rows at the end of input (%s): now half as many", rows, error)
                    at_once = rows // 2
                    continue
                yield found
                del found  # its memory is the next one's
            first = last

    def _rows_at_once(self, rows: int) -> int:
        """Chooses how many of an input's rows are joined at a time, if their parts are no larger."""
        if self.kernels.tiny_segments:
            return 4
        limit = self.kernels.memory_limit
        if self.kernels.host is None or limit is None:
            return _ROWS_AT_ONCE
        bytes_a_row = _BESIDE + _COPIES * sum(table.nbytes for table in self.tables) / max(1, rows)
        return max(_ROWS_AT_ONCE, min(layouts.MAX_CHANGES, int(_MEMORY_SHARE * limit / bytes_a_row)))

    def _changes(self, first: int, last: int) -> tuple[Ingested, ...]:
        return in_turn(self.description, (kept.part(first, last) for kept in self.tables))

    def close(self) -> None:
        """Give back what is on disk."""
        for table in self.tables:
            table.close()


class JoinAtEnd(AtEnd):
    """A join that emits only at the end of its input; arguments as `AtEnd`."""

    def result(self, changes: tuple[Ingested, ...]) -> Changelog:
        """The join of a part, as insertions: at once, or by the operator that joins live."""
        if self.description.merges:
            return merge_join(self.description, self.kernels, changes, self.room)
        live = "per_batch" if "per_batch" in self.description.emits else "at_watermark"
        operator = operators.make(dataclasses.replace(self.description, emit=live), self.kernels, self.room)
        parts = [operator.prepare(changes, self._clock_ms, None)]
        if operator.last_watermark_ms is not None:
            operator.commit(self._clock_ms)
            nothing = tuple(c.pick(np.zeros(c.kinds.size, np.bool_)) for c in changes)
            parts.append(operator.prepare(nothing, self._clock_ms, operator.last_watermark_ms))
        made = [changelog(self.description, self.kernels, part) for part in parts]
        return together(self.description.output_schema, self.kernels, made)


make = JoinAtEnd
