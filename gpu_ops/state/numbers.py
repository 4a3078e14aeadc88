"""Numbers beside the rows of a state table: columns of one number a slot, which change.

In the backend's memory each column is an array. Those that go to local disk go together, and lie side by side there:
what a micro-batch changes of a row is one page to read and to write, however many columns there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.arrays import Array, Slots
from gpu_ops.files.disk import Disk, File, NoRoomError
from gpu_ops.kernels import Kernels
from gpu_ops.state.pieces import RowNumbers

_AT_ONCE = 1 << 20
"""Slots whose numbers are copied from or to disk at once."""
_PAGES_AT_ONCE = 1 << 11
"""Slots, each in another page, in which one column is written before the next one is."""


class Growing:
    """One mutable number per slot.

    Args:
        xp: the backend's arrays.
        dtype: of the numbers.
        room: for so many at first.

    Attributes:
        records: where they lie on disk; None where they are in memory.
        field: their name there.
    """

    def __init__(self, xp: Any, dtype: npt.DTypeLike, room: int = 64) -> None:
        self.xp, self.dtype = xp, np.dtype(dtype)
        self._data = xp.zeros(room, dtype)
        # All from `_untouched` on are `_spare`: what comes next is written already, as a rule.
        self._untouched = self._spare = 0
        self.records: Records | None = None
        self.field = ""
        self.length = 0

    def __len__(self) -> int:
        return self.length

    @property
    def _all(self) -> Array:
        """The whole array, with the room that is not in use yet."""
        return self._data if self.records is None else self.records.data[self.field]

    @property
    def values(self) -> Array:
        """A view of all of them; writing to it writes through, until the next `extend`. On disk they have a stride."""
        return self._all[: self.length]

    @property
    def nbytes(self) -> int:
        """Bytes that are in use."""
        return self.length * self.dtype.itemsize

    @property
    def disk_bytes(self) -> int:
        """Bytes in use on disk."""
        return 0 if self.records is None else self.nbytes

    def extend(self, count: int, value: int) -> None:
        """``count`` more, all ``value``."""
        more, size = self.length + count, self._all.size
        if self.records is not None:
            if more > size:
                self.records.map(max(size + size // 4, more))
            self._all[self.length : more] = value
        elif more > size:
            room = max(2 * size, more)
            grown = self.xp.full(room, value, self.dtype) if value else self.xp.zeros(room, self.dtype)
            grown[: self.length] = self.values
            self._data, self._untouched, self._spare = grown, more, value
        else:
            begins = min(self._untouched, more) if value == self._spare else more
            if begins > self.length:
                self._data[self.length : begins] = value
            self._untouched = max(self._untouched, more)
        self.length = more

    def place(self, records: Records, field: str, length: int) -> None:
        """From now on they lie there."""
        self.records, self.field, self.length = records, field, length
        self._data = self.xp.empty(0, self.dtype)

    def put(self, values: Array) -> None:
        """From now on they are these."""
        self._data, self.length = values, int(values.size)
        self._untouched = self.length


class Records:
    """Numbers of some columns side by side in a file, which is mapped into memory.

    Args:
        file: where; it has some already, or none.
        dtype: of a record.

    Attributes:
        data: a record for each slot that there is room for, once that is said (`map`).
    """

    def __init__(self, file: File, dtype: np.dtype[Any]) -> None:
        self.file = file
        self.data: Any = np.empty(0, dtype)

    def map(self, size: int) -> None:
        """Have room for so many.

        Raises:
            NoRoomError: there is none.
        """
        dtype = self.data.dtype
        self.data = self.file.changeable(size * dtype.itemsize).view(dtype)

    def retained(self, slots: Any) -> Records:
        """Others, with only these slots, which ascend."""
        dtype, kept = self.data.dtype, Records(self.file.disk.file(), self.data.dtype)
        parts = self.file.parts((int(slots[-1]) + 1) * dtype.itemsize, _AT_ONCE * dtype.itemsize)
        for number, part in enumerate(parts):
            first, last = np.searchsorted(slots, [number * _AT_ONCE, (number + 1) * _AT_ONCE])
            kept.file.append(part.view(dtype)[slots[first:last] - number * _AT_ONCE])
        kept.map(int(slots.size))
        return kept

    def copied(self, fields: Iterable[str], length: int) -> list[npt.NDArray[Any]]:
        """The first numbers of some fields as they are now, in files of their own, and not to be written to.

        Raises:
            NoRoomError: there is no room for them.
        """
        dtype = self.data.dtype
        files = {field: self.file.disk.file() for field in fields}
        for part in self.file.parts(length * dtype.itemsize, _AT_ONCE * dtype.itemsize):
            for field, file in files.items():
                file.append(part.view(dtype)[field])
        return [file.mapped("MADV_SEQUENTIAL").view(dtype[field]) for field, file in files.items()]


def cool(columns: Sequence[Growing], disk: Disk) -> int:
    """Move columns of one length that are in memory to disk, side by side; the bytes freed.

    Raises:
        NoRoomError: there is no room for them.
    """
    columns = [column for column in columns if column.records is None and column.length]
    if not columns:
        return 0
    (length,) = {column.length for column in columns}
    kinds = sorted((-column.dtype.itemsize, number) for number, column in enumerate(columns))
    fields = {str(number): columns[number] for _, number in kinds}
    dtype = np.dtype([(field, column.dtype) for field, column in fields.items()], align=True)
    records = Records(disk.file(), dtype)
    for first in range(0, length, _AT_ONCE):
        part = np.empty(min(_AT_ONCE, length - first), dtype)
        for field, column in fields.items():
            part[field] = column.values[first : first + _AT_ONCE]
        records.file.append(part)
    records.map(length)
    for field, column in fields.items():
        column.place(records, field, length)
    return sum(column.nbytes for column in columns)


def retained(columns: Mapping[str, Growing], slots: Slots) -> dict[str, Growing]:
    """Others, with only these slots; what lies side by side still does."""
    found = {name: Growing(column.xp, column.dtype) for name, column in columns.items()}
    if not slots.size:
        return found
    for records, names in _together(columns).items():
        if records is None:
            for name in names:
                found[name].put(columns[name].values[slots])
        else:
            kept = records.retained(slots)
            for name in names:
                found[name].place(kept, columns[name].field, int(slots.size))
    return found


def fetch(columns: Mapping[str, Growing], slots: Slots) -> None:
    """Numbers of some slots are going to be looked at: those on disk are read together."""
    for records in _together(columns):
        if records is not None and slots.size:
            records.file.fetch(slots * records.data.itemsize)


def on_disk(columns: Mapping[str, Growing], slots: Slots) -> dict[str, Array]:
    """The numbers of some slots in the columns that lie on disk, in one pass over those that lie side by side."""
    found: dict[str, Array] = {}
    for records, names in _together(columns).items():
        if records is not None:
            taken = records.data[slots]
            found |= {name: taken[columns[name].field].copy() for name in names}
    return found


def write(columns: Mapping[str, Growing], slots: Slots, values: Mapping[str, Array]) -> None:
    """Set numbers of different slots in some columns; a page of those side by side is there for all of them."""
    size = int(slots.size)
    step = _PAGES_AT_ONCE if any(columns[name].records is not None for name in values) else max(1, size)
    for first in range(0, size, step):
        part = slots[first : first + step]
        for name, own in values.items():
            columns[name].values[part] = own[first : first + step]


def copied(kernels: Kernels, columns: Mapping[str, Growing]) -> RowNumbers:
    """Columns as they are now, which later changes leave alone; copies of what is on disk are there, if it has room."""
    found: dict[str, npt.NDArray[Any]] = {}
    for records, names in _together(columns).items():
        if records is not None:
            with contextlib.suppress(NoRoomError):
                fields, length = [columns[name].field for name in names], columns[names[0]].length
                found.update(zip(names, records.copied(fields, length), strict=True))
    return {
        name: found[name] if name in found else _narrow(kernels.asnumpy(column.values))
        for name, column in columns.items()
    }


def _together(columns: Mapping[str, Growing]) -> dict[Records | None, list[str]]:
    """The names of columns, by where they lie."""
    found: dict[Records | None, list[str]] = {}
    for name, column in columns.items():
        found.setdefault(column.records, []).append(name)
    return found


def _narrow(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy; of counts, of which each row has one, in as few bytes as they need."""
    if numbers.dtype != np.int32 or not numbers.size:
        return numbers.copy()
    return numbers.astype(np.promote_types(*map(np.min_scalar_type, (numbers.min(), numbers.max()))))
