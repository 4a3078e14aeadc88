"""Decimals of unscaled bytes, as Java's ``BigDecimal`` has them: Connect's ``Decimal``, Avro's, Debezium's.

A scale may be negative (``new BigDecimal(BigInteger.ONE, -2)`` is 100), which Oracle's ``NUMBER(20, -2)`` is sent with.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BYTES: Final = 16
_DIGITS: Final = 38
_MOST_BYTES: Final = 256
_MOST_SHIFT: Final = 1000
"""What is beyond these has no place in a decimal, or is zero; and nothing small is to make a number of a gigabyte."""


def unscaled(values: pa.BinaryArray, scale: int, kind: pa.Decimal128Type) -> pa.Array:
    """Decimals of n numbers in big-endian two's complement, as Java's ``BigInteger`` has them.

    Args:
        values: n of them; null for null.
        scale: of all: 10 to the power of it is what a number is divided by.
        kind: what they are to be.

    Raises:
        ArrowInvalid: one of no bytes, or that the type cannot hold, because of its digits before or behind the point.
    """
    full = pc.fill_null(values, b"\0")
    lengths = pc.binary_length(full).to_numpy()
    if (lengths < 1).any():
        raise pa.ArrowInvalid("a decimal of no bytes")
    digits = _DIGITS - max(0, kind.scale - scale)  # with more of them Arrow's cast would wrap round
    if abs(scale) > _DIGITS or digits < 1 or (lengths > _BYTES).any():
        return pa.array([None if x is None else _exact(x, scale, kind) for x in values.to_pylist()], kind)
    negative = pc.greater_equal(full, b"\x80").to_numpy(zero_copy_only=False)
    signs = pa.array([sign * count for sign in (b"\0", b"\xff") for count in range(_BYTES)], pa.binary())
    signs = signs.take(pa.array(_BYTES * (1 + negative) - lengths))
    whole = pc.binary_join(pa.ListArray.from_arrays([0, len(full)], pc.binary_join_element_wise(signs, full, b"")), b"")
    made = np.frombuffer(whole[0].as_buffer(), np.uint8).reshape(-1, _BYTES)[:, ::-1]
    mask = pa.array(values.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    buffers = [mask, pa.py_buffer(np.ascontiguousarray(made))]
    decimals = pa.Array.from_buffers(pa.decimal128(digits, scale), len(values), buffers)
    try:
        decimals.validate(full=True)
    except pa.ArrowInvalid:  # of more digits, some of which may be zeros behind the point
        return pa.array([None if x is None else _exact(x, scale, kind) for x in values.to_pylist()], kind)
    return decimals.cast(kind)


def of_scales(valid: pa.BooleanArray, scales: pa.Array, data: pa.BinaryArray, kind: pa.Decimal128Type) -> pa.Array:
    """Decimals of n scales and unscaled bytes; of each scale together.

    Args:
        valid: which of them are not null.
        scales: of each, 32 bits.
        data: the bytes.
        kind: what they are to be.

    Raises:
        ArrowInvalid: one without its scale or its bytes; else as `unscaled`.
    """
    if pc.any(pc.and_(valid, pc.or_(scales.is_null(), data.is_null()))).as_py():
        raise pa.ArrowInvalid("a decimal without its scale or its bytes")
    found, places = [pa.nulls(1, kind)], np.zeros(len(scales), np.int64)
    for scale in pc.unique(scales.drop_null()).to_pylist():
        mine = np.flatnonzero(pc.fill_null(pc.equal(scales, scale), fill_value=False).to_numpy(zero_copy_only=False))
        places[mine] = sum(map(len, found)) + np.arange(mine.size)
        found.append(unscaled(data.take(pa.array(mine)), scale, kind))
    return pa.concat_arrays(found).take(pa.array(places))


def _exact(value: bytes, scale: int, kind: pa.Decimal128Type) -> Decimal:
    number, shift = int.from_bytes(value[:_MOST_BYTES], "big", signed=True), kind.scale - scale
    rest = 0
    if len(value) > _MOST_BYTES or (abs(shift) > _MOST_SHIFT and number):
        rest = 1
    elif shift >= 0:
        number *= 10 ** min(shift, _MOST_SHIFT)
    else:
        number, rest = divmod(number, 10 ** min(-shift, _MOST_SHIFT))
    if rest or abs(number) >= 10**kind.precision:
        raise pa.ArrowInvalid(f"0x{value[:_BYTES].hex()} with scale {scale} does not fit in {kind}")
    return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -kind.scale))
