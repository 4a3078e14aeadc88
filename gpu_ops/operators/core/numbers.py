"""Values of Arrow as integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.values import one_array

Ints = npt.NDArray[np.int64]


def float_codes(values: npt.NDArray[np.float64]) -> Ints:
    """Numbers that are in the order of n double numbers: one zero, and one NaN behind infinity."""
    values = values + 0.0
    wrong = np.isnan(values)
    if wrong.any():
        values[wrong] = np.nan
    bits = values.view(np.int64)
    bits ^= (bits >> 63) & np.int64(np.iinfo(np.int64).max)  # of negative numbers all but the sign
    return bits


def one_zero(column: pa.Array) -> pa.Array:
    """A column in which zero is one value."""
    if not pa.types.is_floating(column.type):
        return column
    zero = pa.scalar(0.0, column.type)
    return pc.if_else(pc.equal(column, zero), zero, column) if column.type == pa.float16() else pc.add(column, zero)


def one_nan(column: pa.Array) -> pa.Array:
    """A column in which NaN is one value, whatever its bits are."""
    if not pa.types.is_floating(column.type) or not pc.any(nan := pc.is_nan(column)).as_py():
        return column
    return pc.if_else(nan, pa.scalar(np.nan, column.type), column)


def order_codes(column: pa.Array) -> Ints:
    """Numbers that are in the order of values: null is the least, NaN the greatest, zero one value."""
    t, kind = pa.types, column.type
    own = _own_codes(column)
    if own is not None:
        return own
    if not len(column) or t.is_null(kind):
        return np.zeros(len(column), np.int64)
    if t.is_duration(kind):
        column = column.cast(pa.int64())
    if t.is_floating(kind):
        column = one_zero(column)
        nan = pc.fill_null(pc.is_nan(column), False)
        codes = _dense(pc.if_else(nan, pa.scalar(None, kind), column))
        return np.where(nan.to_numpy(zero_copy_only=False), np.int64(len(column) + 1), codes)
    return _dense(column)


def order_codes_of(held: pa.ChunkedArray, fresh: pa.Array) -> tuple[Ints, Ints]:
    """`order_codes` of values that lie in two columns."""
    parts = [_own_codes(one_array(held)), _own_codes(fresh)]
    if parts[0] is not None and parts[1] is not None:
        return parts[0], parts[1]
    codes = order_codes(one_array(pa.chunked_array([*held.chunks, fresh], held.type)))
    return codes[: len(held)], codes[len(held) :]


def _own_codes(column: pa.Array) -> Ints | None:
    """`order_codes` where those of a value do not depend on the others; else None."""
    t, kind = pa.types, column.type
    if column.null_count:
        return None
    if t.is_floating(kind):
        return float_codes(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    if t.is_timestamp(kind) or t.is_duration(kind) or t.is_date64(kind) or t.is_time64(kind):
        return column.cast(pa.int64()).to_numpy()
    if (t.is_integer(kind) and kind != pa.uint64()) or t.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return None


def _dense(column: pa.Array) -> Ints:
    ranks = pc.rank(column, "ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    return np.where(column.is_valid().to_numpy(zero_copy_only=False), ranks, 0)


def decimal_halves(column: pa.Array) -> tuple[Ints, Ints]:
    """The lower and the upper 64 bits of n decimals, 0 for null."""
    kind = column.type
    if not pa.types.is_decimal128(kind):
        column = column.cast(pa.decimal128(kind.precision, kind.scale))
    words = np.frombuffer(column.buffers()[1], np.int64)[2 * column.offset :][: 2 * len(column)].reshape(-1, 2)
    if column.null_count:
        words = np.where(column.is_valid().to_numpy(zero_copy_only=False)[:, None], words, 0)
    return np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])
