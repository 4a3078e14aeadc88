"""Hashes and equality of rows, for Arrow columns of any type, nested ones included.

Equality is Spark's for keys: NaN equals NaN, -0.0 equals 0.0; here null also equals null (callers
that want ``=`` leave out rows with nulls first). Equal rows have equal hashes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Ints, Mask
from gpu_ops.values import as_bytes

UInt64s = npt.NDArray[np.uint64]

_MUL1, _MUL2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# Hashes at a time: they stay in the second-level cache from one step to the next.
_BLOCK = 1 << 13
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xA5A5_5A5A_1234_4321)
_EMPTY = np.uint64(0x1B87_3593_CC9E_2D51)


def mix(values: UInt64s) -> UInt64s:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection that spreads every bit."""
    mixed = values + _GOLDEN
    shifted = np.empty(min(mixed.size, _BLOCK), np.uint64)
    for start in range(0, mixed.size, _BLOCK):
        x = mixed[start : start + _BLOCK]
        y = shifted[: x.size]
        x ^= np.right_shift(x, np.uint64(30), out=y)
        x *= _MUL1
        x ^= np.right_shift(x, np.uint64(27), out=y)
        x *= _MUL2
        x ^= np.right_shift(x, np.uint64(31), out=y)
    return mixed


def hash_columns(columns: list[pa.Array], length: int) -> UInt64s:
    """One hash per row over all columns, in order; in stored state rows are where these hashes have sent them."""
    if not columns:
        return np.full(length, mix(np.array([_EMPTY]))[0], np.uint64)
    total = hash_array(columns[0])
    for column in columns[1:]:
        total = mix(total * np.uint64(31) + hash_array(column))
    return total


def hash_rows(columns: list[pa.Array], length: int) -> UInt64s:
    """Hashes rows like `hash_columns`, but in fewer steps, where nothing stored depends on the hash."""
    if len(columns) < 2:
        return hash_columns(columns, length)
    total = hash_array(columns[0])
    for column in columns[1:]:
        total *= np.uint64(31)
        total += _unmixed(column)
        total = mix(total)
    return total


def _unmixed(column: pa.Array) -> UInt64s:
    """A number per value, the same for equal ones."""
    kind = column.type
    if not pa.types.is_primitive(kind) or kind.bit_width > 64:
        return hash_array(column)
    (lane,) = _lanes(column)
    return np.where(valid_mask(column), lane, _NULL) if column.null_count else lane


def hash_array(column: pa.Array) -> UInt64s:
    """One hash per value; all nulls have the same."""
    kind = column.type
    if pa.types.is_struct(kind):
        hashes = hash_columns(_struct_children(column), len(column))
    elif _is_list(kind):
        hashes = _hash_lists(column)
    elif pa.types.is_null(kind):
        return np.full(len(column), _NULL, np.uint64)
    elif _is_text(kind):
        # categorize=False: keys are mostly distinct, a factorization first would cost more
        filled = pc.fill_null(column, "" if "string" in str(kind) else b"") if column.null_count else column
        # as bytes, whose hashes are those of the text: below a null struct text may be no UTF-8
        hashes = pd.util.hash_array(as_bytes(filled).to_numpy(zero_copy_only=False), categorize=False)
    else:
        lanes = _lanes(column)
        hashes = mix(lanes[0])
        for lane in lanes[1:]:
            hashes = mix(hashes + lane)
    if column.null_count:
        hashes = np.where(valid_mask(column), hashes, _NULL)
    return hashes


def equal_arrays(left: pa.Array, right: pa.Array) -> Mask:
    """Mask of positions with equal values (see the module text); types are the same but for width."""
    kind = left.type
    if pa.types.is_null(kind):
        return np.ones(len(left), bool)
    if pa.types.is_struct(kind):
        equal = np.ones(len(left), bool)
        for a, b in zip(_struct_children(left), _struct_children(right), strict=True):
            equal &= equal_arrays(a, b)
    elif _is_list(kind):
        equal = _equal_lists(left, right)
    elif _is_text(kind):
        if right.type != kind:
            right = right.cast(kind)
        equal = pc.fill_null(pc.equal(left, right), False).to_numpy(zero_copy_only=False)
    else:
        parts = [a == b for a, b in zip(_lanes(left), _lanes(right), strict=True)]
        equal = parts[0]
        for part in parts[1:]:
            equal &= part
    if left.null_count or right.null_count:
        a, b = valid_mask(left), valid_mask(right)
        equal = (equal & a & b) | ~(a | b)
    return equal


def valid_mask(column: pa.Array) -> Mask:
    """Mask of values that are not null."""
    if column.null_count == 0:
        return np.ones(len(column), bool)
    mask: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return mask


def _lanes(column: pa.Array) -> list[UInt64s]:
    """The values as one or more uint64 per row, equal exactly when the values are; nulls anything."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return [pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(np.uint64)]
    if pa.types.is_floating(kind):
        values = raw_values(column, np.dtype(f"f{kind.bit_width // 8}")).astype(np.float64)
        values += 0.0  # -0.0 becomes 0.0
        nan = np.isnan(values)
        if nan.any():
            values[nan] = np.nan
        return [values.view(np.uint64)]
    width = kind.byte_width
    if width <= 8 and width in (1, 2, 4, 8):
        sign = "u" if pa.types.is_unsigned_integer(kind) else "i"
        return [raw_values(column, np.dtype(f"{sign}{width}")).astype(np.int64, copy=False).view(np.uint64)]
    # decimals and fixed-size binaries: their bytes, padded to whole lanes
    size = -(-width // 8) * 8
    data = raw_values(column, np.dtype((np.void, width)))
    padded = np.zeros((len(column), size), np.uint8)
    padded[:, :width] = data.view(np.uint8).reshape(len(column), width)
    return list(padded.view(np.uint64).reshape(len(column), size // 8).T)


def raw_values(column: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The value buffer of a fixed-width array, without a copy; nulls hold whatever is there."""
    data = column.buffers()[1]
    if data is None or len(column) == 0:
        return np.zeros(len(column), dtype)
    return np.frombuffer(data, dtype, count=len(column), offset=column.offset * dtype.itemsize)


def _is_text(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_map(kind) or t.is_fixed_size_list(kind))


def _struct_children(column: pa.StructArray) -> list[pa.Array]:
    return [column.field(i) for i in range(column.type.num_fields)]


def _list_parts(column: pa.Array) -> tuple[Ints, Ints, list[pa.Array]]:
    """Start and length of each list, and the element columns they point into."""
    length = len(column)
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        starts = (np.arange(length, dtype=np.int64) + column.offset) * size
        lengths = np.full(length, size, np.int64)
        children = [column.values]
    else:
        wide = pa.types.is_large_list(column.type)
        offsets = np.frombuffer(
            column.buffers()[1] if length else b"\0" * 8,
            np.int64 if wide else np.int32,
            count=length + 1 if length else 1,
            offset=column.offset * (8 if wide else 4) if length else 0,
        ).astype(np.int64)
        starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
        children = [column.keys, column.items] if pa.types.is_map(column.type) else [column.values]
    if column.null_count:
        lengths = np.where(valid_mask(column), lengths, 0)
    return starts, lengths, children


def expand(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Ranges written out: range numbers and positions, range by range."""
    before = np.cumsum(count) - count
    number = np.repeat(np.arange(count.size, dtype=np.int64), count)
    return number, np.arange(number.size, dtype=np.int64) + (first - before)[number]


def _hash_lists(column: pa.Array) -> UInt64s:
    starts, lengths, children = _list_parts(column)
    rows, positions = expand(starts, lengths)
    total, place = mix(lengths.astype(np.uint64)), positions - starts[rows]
    for child in children:
        hashes = mix(hash_array(child.take(pa.array(positions))) + mix(place.astype(np.uint64)))
        np.add.at(total, rows, hashes)
    return mix(total)


def _equal_lists(left: pa.Array, right: pa.Array) -> Mask:
    left_starts, left_lengths, left_children = _list_parts(left)
    right_starts, right_lengths, right_children = _list_parts(right)
    equal: Mask = left_lengths == right_lengths
    lengths = np.where(equal, left_lengths, 0)
    rows, ours = expand(left_starts, lengths)
    theirs = expand(right_starts, lengths)[1]
    for a, b in zip(left_children, right_children, strict=True):
        same = equal_arrays(a.take(pa.array(ours)), b.take(pa.array(theirs)))
        equal[rows[~same]] = False
    return equal
