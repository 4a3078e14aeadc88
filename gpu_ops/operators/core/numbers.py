"""Values of Arrow as integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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


def decimal_halves(column: pa.Array) -> tuple[Ints, Ints]:
    """The lower and the upper 64 bits of n decimals, 0 for null."""
    kind = column.type
    if not pa.types.is_decimal128(kind):
        column = column.cast(pa.decimal128(kind.precision, kind.scale))
    words = np.frombuffer(column.buffers()[1], np.int64)[2 * column.offset :][: 2 * len(column)].reshape(-1, 2)
    if column.null_count:
        words = np.where(column.is_valid().to_numpy(zero_copy_only=False)[:, None], words, 0)
    return np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])
