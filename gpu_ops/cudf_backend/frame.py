"""Row-aligned named columns in GPU memory, and the few things done to single columns.

A column is a ``pylibcudf.Column`` that begins at its buffers' start (offset 0): slices are copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pylibcudf as plc

from gpu_ops.cudf_backend.storage import from_storage, storage_type, to_storage
from gpu_ops.kernels import Array

Column = Any
"""A ``pylibcudf.Column``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Columns of equal length, with the Arrow types they stand for; there may be none."""

    length: int
    columns: dict[str, Column]
    types: dict[str, pa.DataType]

    def take(self, rows: Array, columns: Sequence[str]) -> Frame:
        """Rows by position (int64, -1 for a row of nulls)."""
        types = {name: self.types[name] for name in columns}
        taken = gather([self.columns[name] for name in types], rows, list(types.values()))
        return Frame(int(rows.size), dict(zip(types, taken, strict=True)), types)


def from_arrow(array: pa.Array) -> Column:
    """A column from host memory."""
    return plc.Column.from_arrow(to_storage(array))


def to_arrow(column: Column, kind: pa.DataType) -> pa.Array:
    """A column in host memory, in the Arrow type it stands for."""
    if column.size() == 0:
        return pa.array([], kind)
    return from_storage(column.to_arrow(), kind)


def nulls(kind: pa.DataType, length: int) -> Column:
    """A column of nulls."""
    return plc.Column.from_arrow(pa.nulls(length, storage_type(kind)))


def values(column: Column, dtype: npt.DTypeLike, *, lanes: int = 1) -> Array:
    """The values of a fixed-width column, not copied; nulls hold whatever is there.

    Args:
        column: its buffer stays alive with the array.
        dtype: what the buffer holds.
        lanes: numbers per row: 2 for decimal128 as int64.
    """
    size, kind = column.size() * lanes, np.dtype(dtype)
    if size == 0:
        return cp.empty(0, kind)
    span = column.data()
    memory = cp.cuda.UnownedMemory(span.ptr, span.size, column)
    return cp.ndarray(size, kind, cp.cuda.MemoryPointer(memory, column.offset() * lanes * kind.itemsize))


def from_values(array: Array) -> Column:
    """A column over an array's memory, without nulls; the column keeps the array alive."""
    return plc.Column.from_cuda_array_interface(cp.ascontiguousarray(array))


def valid_mask(column: Column) -> Array | None:
    """Mask of values that are not null; None for all."""
    return values(plc.unary.is_valid(column), np.bool_) if column.null_count() else None


def with_valid(column: Column, valid: Array | None) -> Column:
    """The column with other nulls."""
    if valid is None:
        return column.with_mask(None, 0)
    mask, missing = plc.transform.bools_to_mask(from_values(valid))
    return column.with_mask(mask, missing) if missing else column.with_mask(None, 0)


def gather(columns: Sequence[Column], rows: Array, kinds: Sequence[pa.DataType]) -> list[Column]:
    """Rows of columns by position (int64, -1 for null); ``kinds`` are the Arrow types."""
    if not columns:
        return []
    length = columns[0].size()
    if length == 0:
        return [nulls(kind, int(rows.size)) for kind in kinds]
    # libcudf counts negative positions from the end; one past the end is out of bounds, and made null
    places = cp.where(rows < 0, length, rows).astype(np.int32)
    policy = plc.copying.OutOfBoundsPolicy.NULLIFY
    return list(plc.copying.gather(plc.Table(list(columns)), from_values(places), policy).columns())


def choose(mask: Array, first: Column, second: Column, kind: pa.DataType) -> Column:
    """First's value where the mask is set, else second's, of any type; columns of length 1 count for all rows."""
    both = plc.concatenate.concatenate([first, second])
    places = cp.arange(mask.size, dtype=np.int64)
    a = places if first.size() == mask.size else cp.zeros_like(places)
    b = places if second.size() == mask.size else cp.zeros_like(places)
    return gather([both], cp.where(mask, a, first.size() + b), [kind])[0]
