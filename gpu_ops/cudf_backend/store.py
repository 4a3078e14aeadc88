"""The rows of one input in GPU memory: a short list of segments, merged geometrically.

An append adds a segment; a later one merges the small ones before it, so a row is copied a logarithmic number of
times. The newest segment stays by itself until then: undoing a micro-batch drops it, and copies nothing.

Under a budget the oldest rows may lie in host memory, in a store of the host's backend, and are gathered there; that
store moves its own to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cupy as cp
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.frame import MOST_SEGMENTS, Frame, GatherMap, gather, lanes_of, nulls
from gpu_ops.cudf_backend.storage import has_offsets, storage_type
from gpu_ops.files.disk import Disk
from gpu_ops.kernels import Kernels, Store
from gpu_ops.state.runs import postponed

_Source: TypeAlias = Callable[[Array], list[plc.Column]]

# A segment is merged into the one before while that one is less than this many times as large; as in
# `gpu_ops.state.index`, where it was measured (on a CPU).
_GROWTH = 4
_MAX_ROWS = (1 << 31) - 2
"""Rows in one libcudf column, elements of all its lists, and bytes of its text where Arrow is to take it back."""
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
        self._offsets = any(map(has_offsets, self.types.values()))
        self._growth = 0 if kernels.tiny_segments else _GROWTH

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, and of the rows in host memory and on disk."""
        return (0 if self.cold is None else self.cold.nbytes) + sum(_bytes(segment) for segment in self.segments)

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows in host memory."""
        return 0 if self.cold is None else self.cold.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the rows on disk."""
        return 0 if self.cold is None else self.cold.disk_bytes

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
        if self._offsets:  # an element takes a byte at least
            most = min(most or _MAX_ROWS, _MAX_ROWS)
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
            last = self.segments[-1]
            start = self.length - last.num_rows()
            kept = plc.copying.slice(last, [0, length - start]) if start < length else []
            self.segments[-1:] = [part.copy() for part in kept]
            self.length = max(start, length)

    def take(self, slots: Array, columns: Sequence[str], *, present: bool = False, nulls: int | None = None) -> Frame:
        """The rows at ``slots``; -1 gives nulls."""
        types = {name: self.types[name] for name in columns}
        taken = self._gather(slots, list(types), 0 if present else nulls)
        return Frame(int(slots.size), dict(zip(types, taken, strict=True)), types)

    def may_be_null(self, column: str) -> bool:
        """Tells whether any row may have a null in a column."""
        if self.cold is not None and self.cold.may_be_null(column):
            return True
        place = list(self.types).index(column)
        return any(segment.columns()[place].null_count() for segment in self.segments)

    def _gather(self, slots: Array, names: list[str], missing: int | None) -> list[plc.Column]:
        kinds = [self.types[name] for name in names]
        if not names:
            return []
        if self.cold is None and not self.segments:
            return [nulls(kind, int(slots.size)) for kind in kinds]
        if self.cold is None and len(self.segments) == 1:
            columns = self.segments[0].columns()
            return gather([columns[place] for place in self._places(names)], slots, kinds, missing=missing)
        places = GatherMap(slots, missing)
        taken = {} if self.cold is not None else self._gather_fixed(places, names)
        others = [name for name in names if name not in taken]
        if others:
            taken |= zip(others, self._gather_by_part(places, others), strict=True)
        return [taken[name] for name in names]

    def _gather_fixed(self, places: GatherMap, names: list[str]) -> dict[str, plc.Column]:
        """The rows of those of the columns that have a fixed width and no nulls."""
        if len(self.segments) > MOST_SEGMENTS:
            return {}
        fixed: dict[str, tuple[Any, int]] = {}
        for name, at in zip(names, self._places(names), strict=True):
            lanes = lanes_of(self.types[name])
            if lanes is not None and not any(segment.columns()[at].null_count() for segment in self.segments):
                fixed[name] = lanes
        segments, starts = self.columns_by_segment(list(fixed))
        return dict(zip(fixed, places.fixed(segments, starts, list(fixed.values())), strict=True))

    def columns_by_segment(self, names: Sequence[str]) -> tuple[list[list[plc.Column]], list[int]]:
        """Gives some columns of each segment, and its first slot; of a store without rows in host memory."""
        at_ = self._places(names)
        columns = [segment.columns() for segment in self.segments]
        starts = np.cumsum([0, *self._lengths()[:-1]]).tolist()
        return [[own[at] for at in at_] for own in columns], starts

    def _gather_by_part(self, places: GatherMap, names: list[str]) -> list[plc.Column]:
        """Part by part, then put in order."""
        sources, ends = self._sources(names), np.cumsum(self._lengths())
        if len(sources) == 1:
            return sources[0](places.rows)
        # What is not there is read in the last part: it is not on the host.
        slots = cp.where(places.rows < 0, int(ends[-1]) - 1, places.rows) if places.missing else places.rows
        owner = cp.searchsorted(cp.asarray(ends), slots, side="right")
        order = cp.argsort(owner)
        sorted_slots = slots[order]
        bounds = cp.asnumpy(cp.searchsorted(owner[order], cp.arange(len(ends) + 1)))
        taken = []
        for number, source in enumerate(sources):
            first, last = int(bounds[number]), int(bounds[number + 1])
            if last > first:
                taken.append(plc.Table(source(sorted_slots[first:last] - (int(ends[number - 1]) if number else 0))))
        if not taken:
            return [nulls(self.types[name], 0) for name in names]
        back = cp.empty(slots.size, np.int64)
        back[order] = cp.arange(slots.size, dtype=np.int64)
        if places.missing:
            back = cp.where(places.rows < 0, -1, back)
        rows = taken[0] if len(taken) == 1 else plc.concatenate.concatenate(taken)
        return gather(list(rows.columns()), back, [self.types[n] for n in names], missing=places.missing)

    def _places(self, names: Sequence[str]) -> list[int]:
        every = list(self.types)
        return [every.index(name) for name in names]

    def _lengths(self) -> list[int]:
        """Rows of each part, oldest first."""
        return [*([] if self.cold is None else [len(self.cold)]), *(s.num_rows() for s in self.segments)]

    def _sources(self, names: list[str]) -> list[_Source]:
        """Makes a function for each part, oldest first, that gathers columns by position; the host's also by -1."""
        places, kinds = self._places(names), [self.types[name] for name in names]

        def here(segment: plc.Table) -> _Source:
            columns = segment.columns()
            return lambda rows: gather([columns[i] for i in places], rows, kinds, missing=0)

        def there(rows: Array) -> list[plc.Column]:
            assert self.cold is not None
            slots: Array = self._kernels.asnumpy(rows)
            table = self._to_table(self.cold.take(slots, names), names)
            return list(self._kernels.frame(table).columns.values())

        return [*([] if self.cold is None else [there]), *map(here, self.segments)]

    def _to_table(self, frame: Any, names: list[str]) -> pa.Table:
        """Rows of the host's backend as Arrow."""
        assert self._kernels.host is not None
        return self._kernels.host.to_arrow(frame, pa.schema([self.schema.field(name) for name in names]))

    def retained(self, slots: Array, onto: Store | None = None) -> CudfStore:
        """Another store with only these slots (ascending), renumbered from 0, each where it lies in this one."""
        assert onto is None  # a GPU does all at once
        store = CudfStore(self.schema, self._kernels)
        names, start = list(self.types), 0
        sources = self._sources(names)
        for number, (length, source) in enumerate(zip(self._lengths(), sources, strict=True)):
            bounds = cp.searchsorted(slots, cp.asarray([start, start + length]))
            kept = slots[int(bounds[0]) : int(bounds[1])] - start
            start += length
            if not kept.size:
                continue
            if number == 0 and self.cold is not None:
                on_host: Array = self._kernels.asnumpy(kept)
                store.cold = self.cold.retained(on_host)
            else:
                segment = plc.Table(source(kept))
                store._merge(segment)
                store.segments.append(segment)
        store.length = int(slots.size)
        return store

    def cool(self, wanted: int, disk: Disk | None = None, committed: int | None = None) -> int:
        """Move the oldest segment to host memory, or what lies there to disk; see `gpu_ops.kernels.Store`."""
        del committed  # what lies in host memory always is
        if disk is not None:
            return 0 if self.cold is None else self.cold.cool(wanted, disk)
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
            rows: Array = np.arange(at, min(at + step, len(self.cold)))
            table = self._to_table(self.cold.take(rows, list(self.types)), list(self.types))
            back.append(plc.Table(list(self._kernels.frame(table).columns.values())))
        self.cold, self.segments = None, [*back, *self.segments]


def _bytes(segment: plc.Table) -> int:
    return sum(int(column.device_buffer_size()) for column in segment.columns())
