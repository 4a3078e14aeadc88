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

from gpu_ops.cudf_backend.frame import Places, lanes_of
from gpu_ops.kernels import Array


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
        self._later_starts: Array | None = None
        self._columns: dict[str, tuple[Array, Array] | None] = {}

    def is_of(self, segments: Sequence[plc.Table]) -> bool:
        """Whether these are the segments, and no others."""
        same = zip(self._segments, segments, strict=False)
        return len(segments) == len(self._segments) and all(a is b for a, b in same)

    def gather(self, names: Sequence[str], places: Places) -> dict[str, plc.Column]:
        """The rows at slots, of those of the columns that can be gathered this way."""
        self._add([name for name in names if name not in self._columns])
        found = {name: self._columns[name] for name in names}
        able = {name: column for name, column in found.items() if column is not None}
        if not able:
            return {}
        slots = places.inside
        owner = cp.searchsorted(self._later_starts, slots, side="right")
        return {n: places.column(span[slots + offsets[owner]]) for n, (span, offsets) in able.items()}

    def _add(self, names: Sequence[str]) -> None:
        """Find out where columns lie; all that goes to the GPU goes in one copy."""
        spans, rows = {}, [self._starts]
        for name in names:
            self._columns[name] = None
            found = self._span(name)
            if found is not None:
                spans[name] = found[0]
                rows.append(found[1])
        if not spans:
            return
        table = cp.asarray(np.stack(rows))
        self._later_starts = table[0][1:]
        for number, (name, span) in enumerate(spans.items(), 1):
            self._columns[name] = span, table[number]

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
