"""The rows of one input in GPU memory: a short list of segments, merged geometrically.

An append adds a segment; a later one merges the small ones before it, so a row is copied a logarithmic number of
times. The newest segment stays by itself until then: undoing a micro-batch drops it, and copies nothing.

Under a budget the oldest rows may lie in host memory, in a store of the host's backend, and are gathered there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cupy as cp
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.cudf_backend.frame import Frame, gather, nulls
from gpu_ops.cudf_backend.storage import storage_type
from gpu_ops.kernels import Array, Kernels, Store
from gpu_ops.state.cold import postponed

_Source: TypeAlias = Callable[[Array], list[plc.Column]]

# A segment is merged into the one before while that one is less than this many times as large; as in
# `gpu_ops.state.index`, where it was measured (on a CPU).
_GROWTH = 4
_MAX_ROWS = (1 << 31) - 2
"""Rows in one libcudf column."""
_ROWS_BACK = 1 << 22
"""Rows in one segment that comes back from the host."""


class CudfStore:
    """All columns of one input; see `gpu_ops.kernels.Store`.

    Args:
        schema: its columns.
        kernels: the GPU backend.

    Raises:
        BackendError: a type that the GPU cannot hold.
    """

    def __init__(self, schema: pa.Schema, kernels: Kernels) -> None:
        for field in schema:
            storage_type(field.type)
        self.schema, self._kernels = schema, kernels
        self.types = {field.name: field.type for field in schema}
        self.cold: Store | None = None
        self.segments: list[plc.Table] = []
        self.length = 0
        self._growth = 0 if kernels.tiny_segments else _GROWTH

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, and of the rows in host memory."""
        return self.host_bytes + sum(_bytes(segment) for segment in self.segments)

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows in host memory."""
        return 0 if self.cold is None else self.cold.nbytes

    def append(self, frame: Frame) -> None:
        """Add the frame's rows at the end."""
        if frame.length:
            segment = plc.Table([frame.columns[name] for name in self.types])
            with postponed(self._kernels, "merging rows"):
                self._merge(segment)
            self.segments.append(segment)
            self.length += frame.length

    def _merge(self, coming: plc.Table) -> None:
        """Make the segments there are larger than what is about to come."""
        total, size, count, most = 0, 0, 0, self._kernels.piece_bytes
        for segment in reversed(self.segments):
            rows = segment.num_rows()
            if rows > self._growth * (coming.num_rows() + total) or rows + total > _MAX_ROWS:
                break
            size += _bytes(segment)
            if most is not None and size > most:
                break
            total += rows
            count += 1
        if count > 1:
            self.segments[-count:] = [plc.concatenate.concatenate(self.segments[-count:])]

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
        sources = self._sources(names, kinds)
        if len(sources) == 1:
            return sources[0](slots)
        if not sources:
            return [nulls(kind, int(slots.size)) for kind in kinds]
        ends = np.cumsum(self._lengths())
        owner = cp.searchsorted(cp.asarray(ends), slots, side="right")
        owner = cp.where(slots < 0, len(sources) - 1, owner)  # no row is nowhere; the last part is not on the host
        positions, taken = [], []
        for number, source in enumerate(sources):
            here = cp.flatnonzero(owner == number)
            if here.size:
                start = int(ends[number - 1]) if number else 0
                positions.append(here)
                taken.append(source(cp.maximum(slots[here] - start, -1)))
        if len(taken) == 1:
            return taken[0]
        if not taken:
            return sources[-1](slots)
        rows = plc.concatenate.concatenate([plc.Table(columns) for columns in taken])
        order = cp.empty(slots.size, np.int64)
        order[cp.concatenate(positions)] = cp.arange(slots.size, dtype=np.int64)
        return gather(list(rows.columns()), order, kinds)

    def _lengths(self) -> list[int]:
        """Rows of each part, oldest first."""
        return [*([] if self.cold is None else [len(self.cold)]), *(s.num_rows() for s in self.segments)]

    def _sources(self, names: list[str], kinds: list[pa.DataType]) -> list[_Source]:
        """How to gather columns from each part, oldest first."""
        places = [list(self.types).index(name) for name in names]

        def here(segment: plc.Table) -> _Source:
            columns = segment.columns()
            return lambda rows: gather([columns[i] for i in places], rows, kinds)

        def there(rows: Array) -> list[plc.Column]:
            assert self.cold is not None
            table = self._to_table(self.cold.take(self._kernels.asnumpy(rows), names), names)
            return list(self._kernels.frame(table).columns.values())

        return [*([] if self.cold is None else [there]), *map(here, self.segments)]

    def _to_table(self, frame: Any, names: list[str]) -> pa.Table:
        """Rows of the host's backend as Arrow."""
        assert self._kernels.host is not None
        return self._kernels.host.to_arrow(frame, pa.schema([self.schema.field(name) for name in names]))

    def retained(self, slots: Array) -> CudfStore:
        """Another store with only these slots (ascending), renumbered from 0, each where it lies in this one."""
        store = CudfStore(self.schema, self._kernels)
        names, start = list(self.types), 0
        sources = self._sources(names, list(self.types.values()))
        for number, (length, source) in enumerate(zip(self._lengths(), sources, strict=True)):
            bounds = cp.searchsorted(slots, cp.asarray([start, start + length]))
            kept = slots[int(bounds[0]) : int(bounds[1])] - start
            start += length
            if not kept.size:
                continue
            if number == 0 and self.cold is not None:
                store.cold = self.cold.retained(self._kernels.asnumpy(kept))
            else:
                segment = plc.Table(source(kept))
                store._merge(segment)
                store.segments.append(segment)
        store.length = int(slots.size)
        return store

    def cool(self) -> int:
        """Move the oldest segment to host memory; the bytes freed, 0 if none is there."""
        host = self._kernels.host
        if not self.segments or host is None:
            return 0
        segment = self.segments[0]
        frame = Frame(segment.num_rows(), dict(zip(self.types, segment.columns(), strict=True)), self.types)
        table = self._kernels.to_arrow(frame, self.schema)
        if self.cold is None:
            self.cold = host.store(self.schema)
        self.cold.append(host.frame(table))
        del self.segments[0]
        return _bytes(segment)

    def warm(self) -> None:
        """Move all rows back to GPU memory."""
        if self.cold is None:
            return
        step = max(1, min(len(self.cold), _ROWS_BACK))
        back = []
        for at in range(0, len(self.cold), step):
            rows = np.arange(at, min(at + step, len(self.cold)))
            table = self._to_table(self.cold.take(rows, list(self.types)), list(self.types))
            back.append(plc.Table(list(self._kernels.frame(table).columns.values())))
        self.cold, self.segments = None, [*back, *self.segments]


def _bytes(segment: plc.Table) -> int:
    return sum(int(column.device_buffer_size()) for column in segment.columns())
