"""Rows on local disk, one after the other: a row that is asked for costs one page, whatever columns it has.

The rows in memory lie column by column; of these, one row would cost a page a column. A row on disk is its values of
fixed width, with a bit for each null and the length of each text, and behind them its texts. Where a row begins is
counted where all are equally long; else a number says it, in memory: 2 bytes a row, and 8 bytes for sixteen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cpu_fallback.hashing import raw_values, valid_mask
from gpu_ops.arrays import Ints
from gpu_ops.files.disk import Disk, cut_out, side_by_side

_BLOCK: Final = 16
_STEP: Final = 2 << 20
"""Bytes that are copied at a time."""
_KEPT: Final = 32 << 20
"""Bytes of rows that a micro-batch has read and keeps: keys are compared, then rows come out."""
_VARIABLE: Final = frozenset({pa.string(), pa.large_string(), pa.binary(), pa.large_binary()})
_BINARY: Final = pa.large_binary()


def can_lie_on_disk(kind: pa.DataType) -> bool:
    """Tells whether values of a type can lie on disk; those of lists, maps and structs stay in memory."""
    return kind in _VARIABLE or pa.types.is_null(kind) or (pa.types.is_primitive(kind) or _is_fixed(kind))


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind))


class RowsOnDisk:
    """Rows of some columns.

    Args:
        types: of the columns, by name; as `can_lie_on_disk` allows.
        disk: where they lie.
        growing: makes an array that grows, of a type.
    """

    def __init__(self, types: dict[str, pa.DataType], disk: Disk, growing: Callable[[npt.DTypeLike], Any]) -> None:
        self.types, self.disk, self._growing = types, disk, growing
        self._texts = [name for name, kind in types.items() if kind in _VARIABLE]
        self._places = {name: place for place, name in enumerate(types)}
        fields: list[Any] = [("nulls", np.uint8, (-(-len(types) // 8),))]
        for name, kind in types.items():
            if name in self._texts:
                fields.append((f"c{self._places[name]}", np.uint32))
            elif not pa.types.is_null(kind):
                width = 1 if pa.types.is_boolean(kind) else kind.byte_width
                fields.append((f"c{self._places[name]}", f"V{width}"))
        self._row = np.dtype(fields)
        self._file = disk.file()
        self._bases, self._beyond = growing(np.int64), growing(np.uint16)
        self._micro_batch = disk.micro_batch
        self._lately: tuple[Ints, npt.NDArray[np.uint8], Ints] | None = None
        """Rows read, ascending, their bytes, and where each begins among these."""
        self.with_nulls: set[str] = set()
        self.length = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes that lie on disk."""
        return self._file.size

    @property
    def nbytes(self) -> int:
        """Bytes on disk, and those in memory that say where each row is."""
        return int(self._file.size + self._bases.nbytes + self._beyond.nbytes)

    def append(self, columns: dict[str, pa.Array]) -> None:
        """Write rows behind the others.

        Raises:
            NoRoomError: the disk is full; nothing is written.
        """
        count = len(next(iter(columns.values())))
        rows = np.zeros(count, self._row)
        nulls = np.zeros((count, len(columns)), bool)
        for name, column in columns.items():
            place = self._places[name]
            if column.null_count:
                self.with_nulls.add(name)
                nulls[:, place] = ~valid_mask(column)
            if name in self._texts:
                lengths = pc.binary_length(column)
                rows[f"c{place}"] = (pc.fill_null(lengths, 0) if lengths.null_count else lengths).to_numpy()
            elif pa.types.is_boolean(column.type):
                filled = column.fill_null(False) if column.null_count else column
                rows[f"c{place}"] = filled.to_numpy(zero_copy_only=False).view("V1")
            elif not pa.types.is_null(column.type):
                rows[f"c{place}"] = raw_values(column, np.dtype(f"V{column.type.byte_width}"))
        rows["nulls"] = np.packbits(nulls, axis=1, bitorder="little")
        if not self._texts:
            self._write(rows.view(np.uint8), None, count)
            return
        width = self._row.itemsize
        offsets = np.arange(0, (count + 1) * width, width, dtype=np.int64)
        fixed = pa.Array.from_buffers(_BINARY, count, [None, pa.py_buffer(offsets), pa.py_buffer(rows)])
        texts = [_as_bytes(columns[name]) for name in self._texts]
        nothing = pa.scalar(b"", _BINARY)
        joined = pc.binary_join_element_wise(fixed, *texts, nothing, null_handling="replace", null_replacement=b"")
        data, bounds = side_by_side([joined])
        self._write(data, bounds[:-1], count)

    def _write(self, data: npt.NDArray[np.uint8], starts: Ints | None, count: int) -> None:
        """Write rows, and note where each begins among them; None where that is counted."""
        begin = self._file.size
        self._file.append(data)
        if starts is not None:
            slots = np.arange(self.length, self.length + count)
            self._bases.extend(begin + starts[slots % _BLOCK == 0])
            beyond = begin + starts - self._bases.data[slots // _BLOCK]
            if int(beyond.max(initial=0)) > np.iinfo(self._beyond.data.dtype).max:
                wider = self._growing(np.int64)
                wider.extend(self._beyond.data[: self._beyond.length].astype(np.int64))
                self._beyond = wider
            self._beyond.extend(beyond.astype(self._beyond.data.dtype))
        self.length += count

    def truncate(self, length: int) -> None:
        """Drop rows from ``length`` on, of which there are some."""
        begin, _ = self._ends(np.array([length]))
        self._file.truncate(int(begin[0]))
        if self._texts:
            self._bases.length, self._beyond.length = -(-length // _BLOCK), length
        self.length, self._lately = length, None

    def _ends(self, slots: Ints) -> tuple[Ints, Ints]:
        """The places in the file where rows begin, and where the next ones do."""
        if not self._texts:
            begin = slots * self._row.itemsize
            return begin, begin + self._row.itemsize
        bases, beyond = self._bases.data, self._beyond.data
        begin = bases[slots // _BLOCK] + beyond[slots]
        after = np.minimum(slots + 1, self.length - 1)
        end = bases[after // _BLOCK] + beyond[after]
        return begin, np.where(slots + 1 == self.length, self._file.size, end)

    def _read(self, slots: Ints) -> tuple[npt.NDArray[np.uint8], Ints]:
        """Rows side by side in memory, and where each begins and the last ends.

        Args:
            slots: n rows, ascending.
        """
        return self._file.gather(*self._ends(slots))

    def _read_once(self, slots: Ints) -> tuple[npt.NDArray[np.uint8], Ints]:
        """Reads rows like `_read`, but none twice in a micro-batch; gives also where each row begins, in any order."""
        if self._micro_batch != self.disk.micro_batch:
            self._lately, self._micro_batch = None, self.disk.micro_batch
        known, data, starts = self._lately or (slots[:0], np.empty(0, np.uint8), slots[:0])
        at = np.searchsorted(known, slots)
        new = slots[known[np.minimum(at, known.size - 1)] != slots] if known.size else slots
        if new.size:
            more, bounds = self._read(new)
            if data.size + more.size > _KEPT:  # the older ones go
                if new.size < slots.size:
                    more, bounds, new = *self._read(slots), slots
                self._lately = (new, more, bounds[:-1]) if more.size <= _KEPT else None
                return more, bounds[:-1]
            before = np.searchsorted(known, new)
            known, starts = np.insert(known, before, new), np.insert(starts, before, bounds[:-1] + data.size)
            data = np.concatenate([data, more])
            self._lately = known, data, starts
            at = np.searchsorted(known, slots)
        return data, starts[at]

    def take(self, slots: Ints, names: Sequence[str]) -> dict[str, pa.Array]:
        """Rows by number, none of them -1; text with large offsets.

        Args:
            slots: n numbers, one at least.
            names: the columns.
        """
        back: Ints | slice = slice(None)
        if not bool((slots[1:] > slots[:-1]).all()):
            slots, back = np.unique(slots, return_inverse=True)  # each page is read once, and in order
        data, starts = self._read_once(slots)
        order, width = np.argsort(starts, kind="stable"), self._row.itemsize
        starts, places = starts[order], np.empty(order.size, np.int64)
        places[order] = np.arange(order.size)
        at = places[back]
        windows: Any = np.ndarray((data.size - width + 1,), f"V{width}", data, strides=(1,))
        raw = windows[starts]
        rows, every, ends = raw.view(self._row), raw[at].view(self._row), starts + width
        taken = {}
        for name, kind in self.types.items():
            place = self._places[name]
            field = f"c{place}"
            start = ends
            if name in self._texts:
                ends = start + rows[field]
            if name not in names:
                continue
            valid = None
            if name in self.with_nulls:
                bits = (every["nulls"][:, place // 8] >> (place % 8)) & 1
                valid = pa.py_buffer(np.packbits(bits == 0, bitorder="little"))
            if name in self._texts:
                text = pa.large_string() if kind in (pa.string(), pa.large_string()) else _BINARY
                buffers = cut_out(data, start, ends, at).buffers()
                taken[name] = pa.Array.from_buffers(text, at.size, [valid, *buffers[1:]])
            elif pa.types.is_null(kind):
                taken[name] = pa.nulls(at.size)
            else:
                values = np.ascontiguousarray(every[field])
                if pa.types.is_boolean(kind):
                    values = np.packbits(values.view(bool), bitorder="little")
                taken[name] = pa.Array.from_buffers(kind, at.size, [valid, pa.py_buffer(values)])
        return taken

    def retained(self, slots: Ints, onto: RowsOnDisk | None = None) -> RowsOnDisk | None:
        """Other rows on disk, these slots (ascending) at the end, written some at a time; None where there are none.

        Args:
            slots: of the rows.
            onto: what earlier ones have gone to.
        """
        if not slots.size:
            return onto
        kept = onto or RowsOnDisk(self.types, self.disk, self._growing)
        kept.with_nulls |= self.with_nulls
        step = max(1, _STEP // max(1, self._file.size // self.length))
        for first in range(0, int(slots.size), step):
            data, bounds = self._read(slots[first : first + step])
            kept._write(data, bounds[:-1] if self._texts else None, bounds.size - 1)
        return kept


def _as_bytes(column: pa.Array) -> pa.Array:
    """Text as bytes with large offsets; only offsets are copied."""
    return column if column.type == _BINARY else column.cast(_BINARY)
