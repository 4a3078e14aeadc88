"""Gathers that read several segments at once: one look per number, wherever in GPU memory it lies.

Addresses of one GPU are one space. Seen as one array from the lowest of the segments' addresses to the highest, a row's
number has a position that follows from its slot, and only what belongs to the segments is ever read. So nothing has to
be sorted by segment, and no number copied more than once.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.frame import Places, lanes_of


class Reach:
    """The fixed-width columns without nulls of some segments.

    Args:
        segments: at least one, none of them empty; kept alive.
        types: the Arrow types of their columns.
    """

    def __init__(self, segments: list[plc.Table], types: dict[str, pa.DataType]) -> None:
        self._segments, self._types = segments, types
        lengths = [segment.num_rows() for segment in segments]
        self._starts = np.cumsum([0, *lengths[:-1]])
        self._spans: dict[str, tuple[Array, np.ndarray] | None] = {}
        self._tables: dict[tuple[str, ...], Array] = {}

    def is_of(self, segments: Sequence[plc.Table]) -> bool:
        """Whether these are the segments, and no others."""
        same = zip(self._segments, segments, strict=False)
        return len(segments) == len(self._segments) and all(a is b for a, b in same)

    def gather(self, names: Sequence[str], places: Places) -> dict[str, plc.Column]:
        """The rows at slots, of those of the columns that can be gathered this way."""
        for name in names:
            if name not in self._spans:
                self._spans[name] = self._span(name)
        spans = {name: found for name in names if (found := self._spans[name]) is not None}
        if not spans:
            return {}
        able = tuple(spans)
        if able not in self._tables:
            self._tables[able] = cp.asarray(np.stack([self._starts, *(offsets for _, offsets in spans.values())]))
        table, slots = self._tables[able], places.inside
        owner = cp.searchsorted(table[0][1:], slots, side="right")
        at = cp.take(table[1:], owner, axis=1) + slots
        return {name: places.column(span[at[number]]) for number, (name, (span, _)) in enumerate(spans.items())}

    def _span(self, name: str) -> tuple[Array, np.ndarray] | None:
        """An array that reaches over a column of all segments, and what to add to a segment's slots; None for none."""
        lanes, place = lanes_of(self._types[name]), list(self._types).index(name)
        columns = [segment.columns()[place] for segment in self._segments]
        if lanes is None or any(column.null_count() for column in columns):
            return None
        dtype, width = np.dtype(lanes[0]), lanes[1]
        row = dtype.itemsize * width
        at = np.array([column.data().ptr + column.offset() * row for column in columns], np.int64)
        base = int(at.min())
        if bool(((at - base) % row).any()):
            return None
        end = max(int(first) + column.size() * row for first, column in zip(at, columns, strict=True))
        memory = cp.cuda.UnownedMemory(base, end - base, columns)
        rows = (end - base) // row
        span = cp.ndarray(rows if width == 1 else (rows, width), dtype, cp.cuda.MemoryPointer(memory, 0))
        return span, (at - base) // row - self._starts
