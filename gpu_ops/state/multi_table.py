"""The state table of one input of a multi-way join: found by several keys, counted for several steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from gpu_ops.inputs import Input
from gpu_ops.kernels import Array, Frame, Kernels
from gpu_ops.state.columns import Growing
from gpu_ops.state.index import HashIndex
from gpu_ops.state.table import Prepared, StateTable

KeySet = tuple[tuple[str, pa.DataType], ...]
"""Columns by which rows are looked up, with the types they are compared in. Null matches nothing."""


class MultiTable(StateTable):
    """All live rows of one input in one partition.

    Args:
        kernels: the backend.
        source: the input's description.
        key_sets: by what its rows are looked up; at least one.
        counted: steps for which a row's matches are counted.
    """

    def __init__(self, kernels: Kernels, source: Input, key_sets: tuple[KeySet, ...], counted: tuple[int, ...]) -> None:
        names, types = tuple(n for n, _ in key_sets[0]), tuple(t for _, t in key_sets[0])
        findable = not source.insert_only or source.ttl_ms is not None
        super().__init__(kernels, source, names, types, names, counted=False, findable=findable)
        self.key_sets = key_sets
        self._further = [HashIndex(kernels) for _ in key_sets[1:]]
        self.step_counts = {step: Growing(kernels.xp, np.int32) for step in counted}
        self._moved: list[tuple[int, Array, Array]] = []

    def index(self, key_set: int) -> HashIndex:
        """The index of one key set."""
        return self._further[key_set - 1] if key_set else self.key_index

    @property
    def nbytes(self) -> int:
        """Bytes of rows, indexes and mutable columns, wherever they lie."""
        return super().nbytes + sum(column.nbytes for column in self.step_counts.values())

    def _indexes(self) -> list[HashIndex]:
        return [*super()._indexes(), *self._further]

    @property
    def expired_slots(self) -> Array | None:
        """Slots of the rows that expired before the prepared micro-batch."""
        return self._expired[1] if self._expired is not None else None

    def move_counts(self, step: int, slots: Array, deltas: Array) -> None:
        """Move the counts of one step by one scatter-add, undoably."""
        if slots.size:
            deltas = deltas.astype(np.int32)
            self.kernels.scatter_add(self.step_counts[step].values, slots, deltas)
            self._moved.append((step, slots, deltas))

    def prepare(
        self, frame: Frame, hashes: Array, matchable: Array | None, identity: Array | None, killed: Array
    ) -> Prepared:
        """Stage new rows and mark rows that die; see `StateTable.prepare`."""
        first = len(self)
        done = super().prepare(frame, hashes, matchable, identity, killed)
        added = len(self) - first
        if added:
            slots = self.kernels.xp.arange(first, first + added, dtype=np.int64)
            for index, keys in zip(self._further, self.key_sets[1:], strict=True):
                names = [n for n, _ in keys]
                own = self.kernels.hash_rows(frame, names, [t for _, t in keys])
                valid = self.kernels.valid(frame, names)
                index.stage(*((own, slots) if valid is None else (own[valid], slots[valid])))
            for column in self.step_counts.values():
                column.extend(added, 0)
        return done

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        super().commit(clock_ms)
        self._moved = []

    def discard(self) -> None:
        """Undo the prepared micro-batch, and what expired before it."""
        for step, slots, deltas in self._moved:
            self.kernels.scatter_add(self.step_counts[step].values, slots, -deltas)
        self._moved = []
        super().discard()
        for column in self.step_counts.values():
            column.length = len(self)

    def _compacted(self, slots: Array, new_slots: Array) -> Callable[[], None]:
        rest = super()._compacted(slots, new_slots)
        counts = {step: column.retained(slots) for step, column in self.step_counts.items()}
        further = [index.renumbered(new_slots) for index in self._further]

        def put() -> None:
            rest()
            self.step_counts, self._further = counts, further

        return put

    def _stored_beside(self) -> dict[str, Growing]:
        counts = {count_column(step): column for step, column in self.step_counts.items()}
        return {**super()._stored_beside(), **counts}


def count_column(step: int) -> str:
    """What a snapshot calls the counts of one step."""
    return f"__count_{step}"
