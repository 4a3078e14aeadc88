"""The rows of one input in GPU memory: a short list of segments, merged geometrically.

An append adds a segment; a later one merges the small ones before it, so a row is copied a logarithmic number of
times. The newest segment stays by itself until then: undoing a micro-batch drops it, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.cudf_backend.frame import Frame, gather, nulls
from gpu_ops.cudf_backend.storage import storage_type
from gpu_ops.kernels import Array

# A segment is merged into the one before while that one is less than this many times as large; as in
# `gpu_ops.state.index`, where it was measured (on a CPU).
_GROWTH = 4
_MAX_ROWS = (1 << 31) - 2
"""Rows in one libcudf column."""


class CudfStore:
    """All columns of one input; see `gpu_ops.kernels.Store`.

    Args:
        schema: its columns.
        tiny_segments: merge as late as possible, so that there are many segments.

    Raises:
        BackendError: a type that the GPU cannot hold.
    """

    def __init__(self, schema: pa.Schema, *, tiny_segments: bool = False) -> None:
        for field in schema:
            storage_type(field.type)
        self.types = {field.name: field.type for field in schema}
        self.segments: list[plc.Table] = []
        self.length = 0
        self._growth = 0 if tiny_segments else _GROWTH

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(int(c.device_buffer_size()) for s in self.segments for c in s.columns())

    def append(self, frame: Frame) -> None:
        """Add the frame's rows at the end."""
        if frame.length:
            self._merge(frame.length)
            self.segments.append(plc.Table([frame.columns[name] for name in self.types]))
            self.length += frame.length

    def _merge(self, size: int) -> None:
        """Make the segments there are larger than what is about to come."""
        pending: list[plc.Table] = []
        total = 0
        while self.segments:
            rows = self.segments[-1].num_rows()
            if rows > self._growth * (size + total) or rows + total > _MAX_ROWS:
                break
            pending.insert(0, self.segments.pop())
            total += rows
        if len(pending) > 1:
            pending = [plc.concatenate.concatenate(pending)]
        self.segments.extend(pending)

    def truncate(self, length: int) -> None:
        """Drop all slots from ``length`` on."""
        while self.length > length:
            last = self.segments.pop()
            start = self.length - last.num_rows()
            if start < length:
                (kept,) = plc.copying.slice(last, [0, length - start])
                self.segments.append(kept.copy())
            self.length = max(start, length)

    def take(self, slots: Array, columns: Sequence[str]) -> Frame:
        """The rows at ``slots``; -1 gives nulls."""
        types = {name: self.types[name] for name in columns}
        taken = self._gather(slots, list(types))
        return Frame(int(slots.size), dict(zip(types, taken, strict=True)), types)

    def _gather(self, slots: Array, names: list[str]) -> list[plc.Column]:
        kinds = [self.types[name] for name in names]
        if not names:
            return []
        if not self.segments:
            return [nulls(kind, int(slots.size)) for kind in kinds]
        places = [list(self.types).index(name) for name in names]
        parts = [[segment.columns()[i] for i in places] for segment in self.segments]
        if len(parts) == 1:
            return gather(parts[0], slots, kinds)
        ends = np.cumsum([segment.num_rows() for segment in self.segments])
        owner = cp.searchsorted(cp.asarray(ends), slots, side="right")  # -1 goes to the first segment
        positions, taken = [], []
        for number, part in enumerate(parts):
            here = cp.flatnonzero(owner == number)
            if here.size:
                start = int(ends[number - 1]) if number else 0
                positions.append(here)
                taken.append(gather(part, slots[here] - start, kinds))
        if not taken:
            return gather(parts[0], slots, kinds)
        if len(taken) == 1:
            return taken[0]
        rows = plc.concatenate.concatenate([plc.Table(columns) for columns in taken])
        order = cp.empty(slots.size, np.int64)
        order[cp.concatenate(positions)] = cp.arange(slots.size, dtype=np.int64)
        return gather(list(rows.columns()), order, kinds)

    def retain(self, slots: Array) -> None:
        """Keep only these slots, renumbered from 0."""
        kept = self._gather(slots, list(self.types))
        self.length = int(slots.size)
        self.segments = [plc.Table(kept)] if self.length else []
