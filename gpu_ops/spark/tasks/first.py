"""Rows of a task without those that a top-N of them cannot have, before they are shuffled.

A row that n others of its group come before is not among the first n, whatever other tasks have. Only the first column
of the order is looked at: rows that are equal in it are all kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Order, Top
from gpu_ops.operators.groups.top import sort_keys
from gpu_ops.spark.tasks.arrow import together

_MOST_BYTES: Final = 1 << 28
"""So many are looked at together: they have to be in memory at once."""


class FirstRows(NamedTuple):
    """Which rows are kept.

    Attributes:
        by: the columns that make a group.
        order: by what rows are ordered first.
        n: how many of each group are wanted.
    """

    by: tuple[str, ...]
    order: Order
    n: int

    @classmethod
    def wanted(cls, operator: Description) -> Self | None:
        """What an operator needs of rows that nothing retracts; None where it needs them all."""
        if not isinstance(operator, Top) or operator.emit == "per_event" or not operator.source.insert_only:
            return None
        if any(pa.types.is_nested(operator.source.schema.field(column).type) for column in operator.by):
            return None  # Arrow does not number those
        return cls(operator.by, operator.order[0], operator.n)

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that are kept, in their order."""
        for some in together(batches, lambda batch: batch.nbytes, _MOST_BYTES):
            yield from self._kept(some)

    def _kept(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches(batches)
        group, groups = self._groups(rows)
        keys = sort_keys(rows[self.order.column], self.order)
        last = np.full(groups, np.iinfo(np.int64).max)
        if self.n == 1:
            np.minimum.at(last, group, keys)
        else:
            ranked = np.lexsort((keys, group))
            begins = np.searchsorted(group[ranked], np.arange(groups))
            full = np.flatnonzero(np.bincount(group, minlength=groups) >= self.n)
            last[full] = keys[ranked[begins[full] + self.n - 1]]
        kept, start = keys <= last[group], 0
        for batch in batches:  # nothing is copied but what is kept
            chosen = batch.filter(pa.array(kept[start : start + batch.num_rows]))
            start += batch.num_rows
            if chosen.num_rows:
                yield chosen

    def _groups(self, rows: pa.Table) -> tuple[npt.NDArray[np.int64], int]:
        """Of each row a number of its group, and how many numbers there are. One group may have several."""
        found, count = np.zeros(rows.num_rows, np.int64), 1
        for name in self.by:
            codes = pc.dictionary_encode(rows[name].combine_chunks(), null_encoding="encode")
            size = max(1, len(codes.dictionary))
            pairs = found * size + codes.indices.to_numpy().astype(np.int64)
            numbers, found = np.unique(pairs, return_inverse=True) if count > 1 else (np.arange(size), pairs)
            count = len(numbers)
        return found, count
