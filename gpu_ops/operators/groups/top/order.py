"""The order of rows as numbers: what an index goes by, and what decides where that is not enough.

Of the first column of an order each value becomes an integer (`sort_keys`), lower for rows in front. Text, binary and
long decimals lose something on the way, but never change places: rows with equal numbers are compared by `places`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.descriptions.groups import Order
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL
from gpu_ops.operators.core.numbers import decimal_halves, float_codes

FIRST: Final = BEFORE_ALL + 2
LAST: Final = AFTER_ALL - 1
"""The numbers of values; nulls have one below or above. What is beyond counts as one of these."""

_PREFIX: Final = 8
"""Bytes of a text that its number has."""


def exact(kind: pa.DataType) -> bool:
    """Whether different values of a type have different numbers, those between `FIRST` and `LAST`."""
    t = pa.types
    if t.is_decimal(kind):
        return bool(kind.precision <= 18)
    return not (t.is_string(kind) or t.is_large_string(kind) or _is_binary(kind))


def sort_keys(column: pa.ChunkedArray, order: Order) -> npt.NDArray[np.int64]:
    """A number for each row; rows with a lower one come before others.

    Args:
        column: n values of the order's column.
        order: by what.

    Returns:
        N int64, none of them `BEFORE_ALL`.
    """
    numbers = _numbers(column)
    found = np.clip(~numbers if order.descending else numbers, FIRST, LAST)
    if column.null_count:
        found[column.is_null().to_numpy()] = FIRST - 1 if order.nulls_first else LAST + 1
    return found


def places(
    columns: Sequence[pa.ChunkedArray], order: Sequence[Order], arrival: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The positions of n rows in their order.

    Args:
        columns: n values of each of the order's columns.
        order: by what.
        arrival: n numbers, of rows that are equal in the order the least comes first.

    Returns:
        N positions (int64): where each of the rows stands.
    """
    keys: list[npt.NDArray[np.generic]] = []
    for column, by in zip(columns, order, strict=True):
        nulls = column.is_null().to_numpy()
        if exact(column.type):
            values = _numbers(column)
        else:
            values = pc.rank(column, "ascending", tiebreaker="dense").to_numpy().astype(np.int64)
        values = np.where(nulls, 0, ~values if by.descending else values)
        keys += [~nulls if by.nulls_first else nulls, values]
    sorted_ = np.lexsort((arrival, *reversed(keys)))
    found = np.empty(sorted_.size, np.int64)
    found[sorted_] = np.arange(sorted_.size)
    return found


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Values as ascending numbers, NaN behind infinity; anything for nulls."""
    kind, t = column.type, pa.types
    if t.is_decimal(kind) and kind.precision > 18:
        column, kind = column.cast(pa.float64(), safe=False), pa.float64()
    if t.is_floating(kind):
        return float_codes(column.cast(pa.float64()).fill_null(0).to_numpy())
    if t.is_decimal(kind):
        # the lower halves of short ones are the whole
        return np.concatenate([np.empty(0, np.int64), *(decimal_halves(chunk)[0] for chunk in column.chunks)])
    if t.is_string(kind) or t.is_large_string(kind) or _is_binary(kind):
        chunks = [_text_numbers(chunk.cast(pa.large_binary())) for chunk in column.chunks]
        return np.concatenate([np.empty(0, np.int64), *chunks])
    if kind == pa.uint64():
        values = column.fill_null(0).to_numpy().view(np.int64)
        return np.asarray(values ^ np.int64(BEFORE_ALL))
    if t.is_boolean(kind):
        column = column.cast(pa.int8())
    elif t.is_date32(kind) or t.is_time32(kind):
        column = column.cast(pa.int32())
    whole: npt.NDArray[np.int64] = column.cast(pa.int64()).fill_null(0).to_numpy()
    return whole


def _text_numbers(values: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """The first bytes of each value as one number."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    found = np.zeros(len(values), np.uint64)
    if data is None or not data.size:
        return found.view(np.int64) ^ np.int64(BEFORE_ALL)
    content = np.frombuffer(data, np.uint8)
    for number in range(_PREFIX):
        at = ends[:-1] + number
        byte = np.where(at < ends[1:], content[np.minimum(at, content.size - 1)], np.uint8(0))
        found = (found << np.uint64(8)) | byte
    return found.view(np.int64) ^ np.int64(BEFORE_ALL)


def _is_binary(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind))
