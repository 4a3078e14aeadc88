"""What state tables have in common: numbers beside rows, dead rows, and rows on their way in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.kernels import Kernels, Store
from gpu_ops.values import with_types

DEAD, LIVE, DYING = 0, 1, 2


class KeySet(NamedTuple):
    """Columns by which rows are looked up.

    Attributes:
        names: the columns.
        types: the types they are compared in.
        strict: those of them in which null matches nothing.
    """

    names: tuple[str, ...]
    types: tuple[pa.DataType, ...]
    strict: tuple[str, ...]


class Growing:
    """One mutable number per slot."""

    def __init__(self, xp: Any, dtype: npt.DTypeLike) -> None:
        self._xp = xp
        self._data = xp.zeros(64, dtype)
        self.length = 0

    def __len__(self) -> int:
        return self.length

    @property
    def values(self) -> Array:
        """A view of all of them; writing to it writes through, until the next `extend`."""
        return self._data[: self.length]

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return int(self.values.nbytes)

    def extend(self, count: int, value: int) -> None:
        """``count`` more, all ``value``."""
        if self.length + count > self._data.size:
            grown = self._xp.empty(max(2 * self._data.size, self.length + count), self._data.dtype)
            grown[: self.length] = self.values
            self._data = grown
        self._data[self.length : self.length + count] = value
        self.length += count

    def retained(self, slots: Slots) -> Growing:
        """Another one with only these slots."""
        kept = Growing(self._xp, self._data.dtype)
        if slots.size:
            kept._data, kept.length = self.values[slots], int(slots.size)
        return kept


def rows_at_once(kernels: Kernels) -> int:
    """Rows that go from or to a GPU in one piece, when all of them may be more than it has room for."""
    return 3 if kernels.tiny_segments else 1 << 22


def stored_rows(kernels: Kernels, store: Store, schema: pa.Schema, slots: Slots) -> pa.Table:
    """Rows of a store as a table."""
    step = rows_at_once(kernels) if kernels.host is not None else max(1, int(slots.size))
    taken = (store.take(slots[at : at + step], schema.names) for at in range(0, int(slots.size), step))
    return pa.concat_tables([schema.empty_table(), *(kernels.to_arrow(frame, schema) for frame in taken)])


def put_behind(rows: pa.Table, beside: Mapping[str, pa.Array]) -> pa.Table:
    """Rows with what stands beside them, as a snapshot has them.

    What is ours is known by its position behind the user's columns: those may have any name.
    """
    names = [*rows.column_names, *beside]
    return pa.Table.from_arrays([*rows.columns, *beside.values()], names=names)


def taken_apart(source: Input, table: pa.Table, names: Sequence[str]) -> tuple[pa.Table, dict[str, pa.ChunkedArray]]:
    """The inverse of `put_behind`.

    Args:
        source: whose rows they are.
        table: as a snapshot has it.
        names: what must stand beside them; anything else there is left out.

    Raises:
        StateError: a column is missing.
    """
    own = len(source.schema)
    behind = {name: own + number for number, name in enumerate(table.column_names[own:])}
    missing = {n for n, m in zip_longest(source.schema.names, table.column_names[:own]) if n != m}
    missing |= {name for name in names if name not in behind}
    if missing:
        raise StateError(f"the snapshot of input '{source.name}' lacks {', '.join(sorted(missing))}")
    rows = with_types(table.select(list(range(own))), source.schema)
    return rows, {name: table.column(behind[name]) for name in names}
