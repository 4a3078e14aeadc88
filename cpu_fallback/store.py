"""The rows of one input in growing Arrow buffers: appends cost what they append, gathers copy nothing else.

Every column lies in one piece, with spare room at its end (the buffers double, and pages never
touched cost no memory), so a gather is one Arrow ``take`` over the whole state, without chunks.

The oldest rows may have gone to local disk (`cpu_fallback.rows_on_disk`), and are gathered there.

A frame is row-aligned named Arrow columns.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cpu_fallback.hashing import raw_values, valid_mask
from cpu_fallback.rows_on_disk import RowsOnDisk, can_lie_on_disk
from gpu_ops.arrays import Array, Mask
from gpu_ops.files.disk import LEAST, Disk
from gpu_ops.kernels import Store
from gpu_ops.values import beyond_offsets

# Types of the same width as a value, which numpy gathers faster than bytes.
_LANES = {width: np.dtype(name) for width, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))}


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Columns of equal length; there may be none."""

    length: int
    columns: dict[str, pa.Array]

    def batch(self) -> pa.RecordBatch:
        """The columns as one record batch."""
        return pa.RecordBatch.from_arrays(list(self.columns.values()), names=list(self.columns))

    def slice(self, start: int, length: int) -> Frame:
        """Rows side by side, without a copy."""
        return Frame(length, {name: column.slice(start, length) for name, column in self.columns.items()})

    def take(self, rows: Array, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Rows by position; -1 gives nulls, ``present`` if none is."""
        missing = None if present else rows < 0
        if missing is not None and not missing.any():
            missing = None
        wanted, taken = pa.array(rows, mask=missing), {}
        for name in columns:
            column, kind = self.columns[name], self.columns[name].type
            if pa.types.is_primitive(kind) and not pa.types.is_boolean(kind) and len(column) > column.null_count == 0:
                values = raw_values(column, np.dtype((np.void, kind.byte_width)))
                taken[name] = gathered(values, kind, rows, missing)
            else:
                taken[name] = column.take(wanted)
        return Frame(rows.size, taken)


def gathered(values: npt.NDArray[Any], kind: pa.DataType, rows: Array, missing: Mask | None) -> pa.Array:
    """Values of a fixed width by position, nulls where ``missing``: faster than Arrow's ``take``.

    Args:
        values: one at least, none of them null.
        kind: their type.
        rows: n positions, -1 for any other.
        missing: n flags; None for none.
    """
    lane = _LANES.get(values.itemsize)
    data = (values if lane is None else values.view(lane)).take(rows)
    validity = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, rows.size, [validity, pa.py_buffer(data)])


_MAPPED: Final = 4 << 20
"""Bytes from which an array lies in pages of its own: those grow without being copied (`mremap(2)`)."""
_MANY: Final = 1 << 12
"""So many rows side by side are taken as they lie."""
_STEP: Final = 2 << 20
"""Bytes of rows that are made ready for the disk at a time."""


def _side_by_side(slots: Array) -> bool:
    """Tells whether each slot is that behind the one before it; few are looked at where the last one is not."""
    parts = (slots[at : at + _MANY + 1] for at in range(0, slots.size - 1, _MANY))
    return bool(slots[-1] - slots[0] == slots.size - 1) and all((np.diff(part) == 1).all() for part in parts)


class Growable:
    """A one-dimensional numpy array with spare room."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.data: npt.NDArray[Any] = np.empty(64, dtype)
        self.length = 0
        self._pages: mmap.mmap | None = None

    def reserve(self, extra: int) -> None:
        """Make room for ``extra`` more values."""
        needed, dtype = self.length + extra, self.data.dtype
        if needed <= self.data.size:
            return
        size = max(2 * self.data.size, needed)
        if size * dtype.itemsize >= _MAPPED and hasattr(mmap, "MAP_ANONYMOUS"):
            self._map(size)
        else:
            self._moved_to(np.empty(size, dtype))

    def _map(self, size: int) -> None:
        dtype, pages = self.data.dtype, self._pages
        if pages is not None:
            self.data = np.empty(0, dtype)  # pages that an array lies in do not move
            try:
                pages.resize(size * dtype.itemsize)
            except (BufferError, SystemError):  # someone else holds the array; no such call on this system
                self.data, pages = np.frombuffer(pages, dtype), None
        if pages is None:
            pages = mmap.mmap(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._moved_to(np.frombuffer(pages, dtype))
        else:
            self.data = np.frombuffer(pages, dtype)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
        self._pages = pages

    def _moved_to(self, grown: npt.NDArray[Any]) -> None:
        grown[: self.length] = self.data[: self.length]
        self.data = grown

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Add values at the end."""
        self.reserve(values.size)
        self.data[self.length : self.length + values.size] = values
        self.length += values.size

    @property
    def stays(self) -> bool:
        """Tells whether values stay for who holds them: pages of their own do not move, or go, while they are held."""
        return self._pages is not None

    def can_drop(self) -> bool:
        """Tells whether `drop` may be used: nobody else holds the pages that the values lie in."""
        pages, dtype = self._pages, self.data.dtype
        if pages is None:
            return True
        self.data = np.empty(0, dtype)
        try:
            pages.resize(len(pages))
        except (BufferError, SystemError):  # as in `_map`
            return False
        finally:
            self.data = np.frombuffer(pages, dtype)
        return True

    def drop(self, count: int) -> None:
        """Drop the first values, and give pages back; nothing is allocated."""
        dtype, address = self.data.dtype, self.data.ctypes.data
        self.length -= count
        ctypes.memmove(address, address + count * dtype.itemsize, self.nbytes)
        if self._pages is not None:
            self.data = np.empty(0, dtype)
            self._pages.resize(max(_MAPPED // dtype.itemsize, self.length) * dtype.itemsize)
            self.data = np.frombuffer(self._pages, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, spare room left out."""
        return self.length * self.data.itemsize

    def buffer(self) -> pa.Buffer:
        """The values as an Arrow buffer; valid until the next change."""
        return pa.py_buffer(self.data)


class Bits:
    """An Arrow bitmap that grows."""

    def __init__(self) -> None:
        self.bytes = Growable(np.uint8)
        self.length = 0

    def extend(self, values: npt.NDArray[np.bool_]) -> None:
        """Add bits at the end."""
        partial = self.length % 8
        if partial:
            last = np.unpackbits(
                self.bytes.data[self.bytes.length - 1 : self.bytes.length], count=partial, bitorder="little"
            )
            values = np.concatenate([last.view(bool), values])
            self.bytes.length -= 1
            self.length -= partial
        self.bytes.extend(np.packbits(values, bitorder="little"))
        self.length += values.size

    def truncate(self, length: int) -> None:
        """Drop all bits from ``length`` on."""
        self.length, self.bytes.length = length, -(-length // 8)


class GrowingColumn:
    """A growing Arrow column of any type. ``wide`` keeps 64-bit offsets, for top-level text."""

    def __init__(self, kind: pa.DataType, *, wide: bool = True) -> None:
        self.kind = kind
        self.length = 0
        self.validity: Bits | None = None
        self.bits: Bits | None = None
        self.values: Growable | None = None
        self.offsets: Growable | None = None
        self.children: list[GrowingColumn] = []
        t = pa.types
        self.stored = kind
        if t.is_boolean(kind):
            self.bits = Bits()
        elif t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind):
            if wide:
                self.stored = pa.large_string() if "string" in str(kind) else pa.large_binary()
            large = t.is_large_string(self.stored) or t.is_large_binary(self.stored)
            self.offsets = Growable(np.int64 if large else np.int32)
            self.values = Growable(np.uint8)
        elif t.is_list(kind) or t.is_large_list(kind) or t.is_map(kind):
            self.offsets = Growable(np.int64 if t.is_large_list(kind) else np.int32)
            child = pa.struct([kind.key_field, kind.item_field]) if t.is_map(kind) else kind.value_type
            self.children = [GrowingColumn(child, wide=False)]
        elif t.is_fixed_size_list(kind):
            self.children = [GrowingColumn(kind.value_type, wide=False)]
        elif t.is_struct(kind):
            self.children = [GrowingColumn(kind.field(i).type, wide=False) for i in range(kind.num_fields)]
        elif not t.is_null(kind):
            self.values = Growable(np.dtype((np.void, kind.byte_width)))
        if self.offsets is not None:
            self.offsets.extend(np.zeros(1, self.offsets.data.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, spare room left out."""
        own = sum(b.nbytes for b in (self.values, self.offsets) if b is not None)
        own += sum(b.bytes.nbytes for b in (self.validity, self.bits) if b is not None)
        return own + sum(c.nbytes for c in self.children)

    def append(self, array: pa.Array) -> None:
        """Add an array's values at the end."""
        if array.type != self.stored:
            array = array.cast(self.stored)
        if array.null_count and self.validity is None:
            self.validity = Bits()
            self.validity.extend(np.ones(self.length, bool))
        if self.validity is not None:
            self.validity.extend(valid_mask(array))
        if self.bits is not None:
            filled = array.fill_null(False) if array.null_count else array
            self.bits.extend(filled.to_numpy(zero_copy_only=False))
        elif self.offsets is not None:
            self._append_ranges(array)
        elif self.values is not None:
            self.values.extend(raw_values(array, self.values.data.dtype))
        elif pa.types.is_struct(self.kind):
            for i, child in enumerate(self.children):
                child.append(array.field(i))
        elif pa.types.is_fixed_size_list(self.kind):
            size = self.kind.list_size
            self.children[0].append(array.values.slice(array.offset * size, len(array) * size))
        self.length += len(array)

    def _append_ranges(self, array: pa.Array) -> None:
        """Text, lists and maps: their offsets, then what lies between the first and the last."""
        assert self.offsets is not None
        if len(array) == 0:
            return
        dtype = self.offsets.data.dtype
        offsets = np.frombuffer(array.buffers()[1], dtype, count=len(array) + 1, offset=array.offset * dtype.itemsize)
        first, last = int(offsets[0]), int(offsets[-1])
        shift = int(self.offsets.data[self.offsets.length - 1]) - first
        if dtype == np.int32 and last + shift > np.iinfo(np.int32).max:
            raise OverflowError(f"more than 2^31 elements of {self.kind} in one partition; use more partitions")
        self.offsets.extend(offsets[1:] + dtype.type(shift))
        if self.values is not None:
            data = array.buffers()[2]
            if last > first:
                self.values.extend(np.frombuffer(data, np.uint8, count=last - first, offset=first))
        elif pa.types.is_map(self.kind):
            pairs = pa.StructArray.from_arrays(
                [array.keys, array.items], fields=[self.kind.key_field, self.kind.item_field]
            )
            self.children[0].append(pairs.slice(first, last - first))
        else:
            self.children[0].append(array.values.slice(first, last - first))

    def truncate(self, length: int) -> None:
        """Drop all values from ``length`` on."""
        for bitmap in (self.validity, self.bits):
            if bitmap is not None:
                bitmap.truncate(length)
        if self.offsets is not None:
            self.offsets.length = length + 1
            end = int(self.offsets.data[length])
            if self.values is not None:
                self.values.length = end
            else:
                self.children[0].truncate(end)
        elif self.values is not None:
            self.values.length = length
        else:
            size = self.kind.list_size if pa.types.is_fixed_size_list(self.kind) else 1
            for child in self.children:
                child.truncate(length * size)
        self.length = length

    def can_drop(self, count: int) -> bool:
        """Tells whether `drop` may take the first ``count`` values: whole bytes of bitmaps, and no nested ones."""
        if self.children or (count % 8 and (self.validity is not None or self.bits is not None)):
            return False
        bitmaps = (bitmap.bytes for bitmap in (self.validity, self.bits) if bitmap is not None)
        return all(part.can_drop() for part in (self.offsets, self.values, *bitmaps) if part is not None)

    def drop(self, count: int) -> None:
        """Drop the first values in place, as `can_drop` allows; it cannot fail."""
        for bitmap in (self.validity, self.bits):
            if bitmap is not None:
                bitmap.bytes.drop(count // 8)
                bitmap.length -= count
        gone = count
        if self.offsets is not None:
            offsets = self.offsets
            offsets.drop(count)
            gone = int(offsets.data[0])
            there = offsets.data[: offsets.length]
            np.subtract(there, there.dtype.type(gone), out=there)
        if self.values is not None:
            self.values.drop(gone)
        self.length -= count

    def view(self) -> pa.Array:
        """All values, without a copy; valid until the next change."""
        if pa.types.is_null(self.kind):
            return pa.nulls(self.length)
        validity = self.validity.bytes.buffer() if self.validity is not None else None
        buffers: list[pa.Buffer | None] = [validity]
        parts = (self.offsets, self.bits.bytes if self.bits else None, self.values)
        buffers.extend(part.buffer() for part in parts if part is not None)
        children = [c.view() for c in self.children] or None
        return pa.Array.from_buffers(self.stored, self.length, buffers, -1 if validity else 0, 0, children)

    def take(self, slots: pa.Array) -> pa.Array:
        """The values at these slots; a null slot gives a null. Text that is too much for its type comes as stored."""
        return self.in_type(self.view().take(slots))

    def in_type(self, values: pa.Array) -> pa.Array:
        """Values in the column's type, if that has room for them."""
        return values if values.type == self.kind or beyond_offsets(values) else values.cast(self.kind)

    def part(self, first: int, count: int | None = None) -> GrowingColumn:
        """Another one, of rows side by side, to the end if no count is given; what was seen of this one stays."""
        part = GrowingColumn(self.kind)
        part.append(self.view().slice(first, count))
        return part

    @property
    def plain(self) -> bool:
        """Tells whether `gather` can be used: values of a fixed width, none of them null."""
        return self.values is not None and self.offsets is None and self.validity is None and self.length > 0

    def gather(self, slots: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_] | None) -> pa.Array:
        """Takes the values at some slots, nulls where ``missing``, of a `plain` column: faster than Arrow's `take`."""
        assert self.values is not None
        return gathered(self.values.data[: self.length], self.kind, slots, missing)


class CpuStore:
    """All columns of one input; see `gpu_ops.kernels.Store`.

    Args:
        schema: its columns.
        tiny: test setting: the least there is goes to disk.
    """

    def __init__(self, schema: pa.Schema, *, tiny: bool = False) -> None:
        self.schema, self._tiny = schema, tiny
        self.columns = {f.name: GrowingColumn(f.type) for f in schema}
        self._movable = {f.name: self.columns[f.name].stored for f in schema if can_lie_on_disk(f.type)}
        self._far: RowsOnDisk | None = None
        """The oldest rows, of what can lie on disk; the columns of these begin behind them."""
        self.length = 0

    def __len__(self) -> int:
        return self.length

    @property
    def _first(self) -> int:
        """The first row in memory."""
        return 0 if self._far is None else self._far.length

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, spare room left out."""
        return sum(c.nbytes for c in self.columns.values()) + (0 if self._far is None else self._far.nbytes)

    @property
    def host_bytes(self) -> int:
        """Bytes that are not on disk."""
        return self.nbytes - self.disk_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes that lie on disk."""
        return 0 if self._far is None else self._far.disk_bytes

    def append(self, frame: Frame) -> None:
        """Add the frame's rows at the end."""
        for name, column in self.columns.items():
            column.append(frame.columns[name])
        self.length += frame.length

    def truncate(self, length: int) -> None:
        """Drop all slots from ``length`` on."""
        for name, column in self.columns.items():
            column.truncate(length - self._first if name in self._movable else length)
        self.length = length

    def take(self, slots: Array, columns: Sequence[str], *, present: bool = False, nulls: int | None = None) -> Frame:
        """The rows at ``slots``; -1 gives nulls."""
        present = present or nulls == 0
        missing: npt.NDArray[np.bool_] | None = None if present else slots < 0
        if missing is not None and not missing.any():
            missing = None
        far = self._far
        if present and slots.size >= _MANY and slots[0] >= self._first and _side_by_side(slots):
            return Frame(slots.size, {name: self._as_they_lie(name, int(slots[0]), slots.size) for name in columns})
        if far is not None and self._movable.keys() & set(columns):
            on_disk = slots < far.length
            if missing is not None:
                on_disk &= ~missing
            if on_disk.any():
                return self._take_apart(slots, columns, on_disk, missing)
            near = np.maximum(slots - far.length, -1)
        else:
            near = slots
        wanted = pa.array(slots, mask=missing)
        here = wanted if near is slots else pa.array(near, mask=missing)
        taken = {}
        for name in columns:
            column = self.columns[name]
            if name not in self._movable:
                taken[name] = column.take(wanted)
            else:
                taken[name] = column.gather(near, missing) if column.plain else column.take(here)
        return Frame(slots.size, taken)

    def _as_they_lie(self, name: str, first: int, count: int) -> pa.Array:
        """Rows of a column that lie side by side."""
        column = self.columns[name]
        first -= self._first if name in self._movable else 0
        if column.plain and column.values is not None and column.values.stays:
            return column.view().slice(first, count)
        return column.in_type(column.part(first, count).view())

    def _take_apart(self, slots: Array, columns: Sequence[str], on_disk: Mask, missing: Mask | None) -> Frame:
        """The rows at slots some of which are on disk."""
        assert self._far is not None
        names = [name for name in columns if name in self._movable]
        far = self._far.take(slots[on_disk], names)
        wanted, taken = pa.array(slots, mask=missing), {}
        order = None
        if not on_disk.all():
            in_memory = ~on_disk if missing is None else ~on_disk & ~missing
            near = pa.array(slots[in_memory] - self._first)
            places = np.empty(slots.size, np.int64)
            count = int(np.count_nonzero(on_disk))
            places[on_disk], places[in_memory] = np.arange(count), np.arange(count, count + len(near))
            order = pa.array(places, mask=missing)
        for name in columns:
            column = self.columns[name]
            if name not in far:
                taken[name] = column.take(wanted)
                continue
            values = far[name]
            if order is not None:
                values = pa.concat_arrays([values, column.view().take(near)]).take(order)
            taken[name] = column.in_type(values)
        return Frame(slots.size, taken)

    def may_be_null(self, column: str) -> bool:
        """Tells whether any row may have a null in a column."""
        found = self.columns[column]
        on_disk = self._far is not None and column in self._far.with_nulls
        return on_disk or found.validity is not None or pa.types.is_null(found.kind)

    def retained(self, slots: Array, onto: Store | None = None) -> CpuStore:
        """Another store with only these slots, each where it lies in this one; see `gpu_ops.kernels.Store`."""
        store = CpuStore(self.schema, tiny=self._tiny) if onto is None else onto
        assert isinstance(store, CpuStore)
        behind = store.length > store._first  # rows in memory come after those on disk
        on_disk = 0 if behind or self._far is None else int(np.searchsorted(slots, self._first))
        if self._far is not None and on_disk:
            store._far = self._far.retained(slots[:on_disk], store._far)
            for name in self.columns.keys() - self._movable.keys():
                store.columns[name].append(self.columns[name].take(pa.array(slots[:on_disk])))
            store.length += on_disk
        if slots.size > on_disk:
            store.append(self.take(slots[on_disk:], list(self.columns), present=True))
        return store

    def cool(self, wanted: int, disk: Disk | None = None, committed: int | None = None) -> int:
        """Move the oldest of the committed rows to disk; the bytes freed, 0 without one or for what is little."""
        first = self._first
        there = (self.length if committed is None else committed) - first
        size = sum(self.columns[name].nbytes for name in self._movable)
        if disk is None or there <= 0 or size < (1 if self._tiny else LEAST):
            return 0
        count = self.length - first
        rows = min(there, -(-count * max(wanted, 0 if self._tiny else LEAST) // size))
        step = max(1, count * _STEP // size)
        if step > 8:  # whole bytes of bitmaps, which can lose rows in place
            step, rows = step // 8 * 8, min(there, -(-rows // 8) * 8)
        made = self._far or RowsOnDisk(self._movable, disk, Growable)
        before = self.host_bytes
        try:
            for at in range(0, rows, step):
                part = min(step, rows - at)
                made.append({name: self.columns[name].view().slice(at, part) for name in self._movable})
        finally:
            if made.length > first:
                self._begin_behind(made, first)
        return before - self.host_bytes

    def _begin_behind(self, far: RowsOnDisk, first: int) -> None:
        """Columns lose the rows from ``first`` on that are on disk now, all of them or, on an error, none.

        In place where that can be: a copy of what stays takes as much memory as that.
        """
        count = far.length - first
        columns = {name: self.columns[name] for name in self._movable}
        in_place = [column for column in columns.values() if column.can_drop(count)]
        try:
            rest = {name: column.part(count) for name, column in columns.items() if column not in in_place}
        except BaseException:
            far.truncate(first)
            raise
        for column in in_place:
            column.drop(count)
        self.columns, self._far = self.columns | rest, far

    def warm(self) -> None:
        """Nothing to move: what is looked at on disk is in memory while there is room."""
