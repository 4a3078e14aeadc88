"""128-bit integers as two arrays of 64 bits: decimals, whose scale is part of their type and not stored.

cupy has no such type. Numbers are two's complement: ``high`` int64, ``low`` uint64; results wrap around.
Shapes broadcast.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from gpu_ops.arrays import Array

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclasses.dataclass(frozen=True, slots=True)
class Wide:
    """128-bit integers."""

    high: Array
    low: Array

    def __add__(self, other: Wide) -> Wide:
        low = self.low + other.low
        carry = (low < self.low).astype(np.int64)
        return Wide(self.high + other.high + carry, low)

    def __neg__(self) -> Wide:
        low = ~self.low + np.uint64(1)
        return Wide(~self.high + (low == 0).astype(np.int64), low)

    def __sub__(self, other: Wide) -> Wide:
        borrow = (self.low < other.low).astype(np.int64)
        return Wide(self.high - other.high - borrow, self.low - other.low)

    def __mul__(self, other: Wide) -> Wide:
        high, low = _product(self.low, other.low)
        cross = self.low * other.high.view(np.uint64) + self.high.view(np.uint64) * other.low
        return Wide((high + cross).view(np.int64), low)

    def __abs__(self) -> Wide:
        return choose(self.negative, -self, self)

    @property
    def negative(self) -> Array:
        """Mask of numbers below zero."""
        return self.high < 0

    def equal(self, other: Wide) -> Array:
        """Mask of equal numbers."""
        return (self.high == other.high) & (self.low == other.low)

    def less(self, other: Wide) -> Array:
        """Mask of smaller numbers."""
        return (self.high < other.high) | ((self.high == other.high) & (self.low < other.low))


def constant(number: int) -> Wide:
    """One number, of shape (1,)."""
    bits = number & ((1 << 128) - 1)
    high, low = np.array([bits >> 64], np.uint64), np.array([bits & ((1 << 64) - 1)], np.uint64)
    return Wide(cp.asarray(high.view(np.int64)), cp.asarray(low))


def from_lanes(lanes: Array) -> Wide:
    """From a decimal128 buffer as int64: low, high, low, high, ..."""
    return Wide(cp.ascontiguousarray(lanes[1::2]), cp.ascontiguousarray(lanes[::2]).view(np.uint64))


def to_lanes(wide: Wide) -> Array:
    """As a decimal128 buffer."""
    lanes = cp.empty(2 * wide.low.size, np.int64)
    lanes[::2], lanes[1::2] = wide.low.view(np.int64), wide.high
    return lanes


def from_integers(values: Array) -> Wide:
    """From signed or unsigned integers of any width."""
    if values.dtype == np.uint64:
        return Wide(cp.zeros(values.shape, np.int64), values)
    wide = values.astype(np.int64)
    return Wide(wide >> 63, wide.view(np.uint64))


def choose(mask: Array, first: Wide, second: Wide) -> Wide:
    """First's numbers where the mask is set, else second's."""
    return Wide(cp.where(mask, first.high, second.high), cp.where(mask, first.low, second.low))


def scale_up(wide: Wide, digits: int) -> Wide:
    """Times 10^digits."""
    return wide * constant(10**digits) if digits else wide


def scale_down(wide: Wide, digits: int) -> Wide:
    """Divided by 10^digits, cut off towards zero."""
    return _divide(wide, digits)[0] if digits else wide


def round_down(wide: Wide, digits: int) -> Wide:
    """Divided by 10^digits and rounded, half away from zero: the first digit that goes decides."""
    if not digits:
        return wide
    shorter = scale_down(wide, digits - 1)
    quotient, last = _divide(shorter, 1)
    up = from_integers((last >= 5).astype(np.int64))
    return choose(wide.negative, quotient - up, quotient + up)


def to_float(wide: Wide, scale: int, dtype: npt.DTypeLike) -> Array:
    """The number over 10^scale, rounded as Arrow does it.

    ``arrow/util/decimal.cc``, ``Decimal128RealConversion::ToRealPositive``: whole and fraction apart, unless the
    number has no more bits than the float.
    """
    kind: Any = np.dtype(dtype).type
    size = abs(wide)
    exact = (size.high == 0) & (size.low <= np.uint64(1 << (np.finfo(kind).nmant + 1)))
    power = kind(float(f"1e{-scale}"))
    plain = _real(size, kind) * power
    if scale > 0:
        whole = scale_down(size, scale)
        fraction = size - scale_up(whole, scale)
        plain = cp.where(exact, plain, _real(whole, kind) + _real(fraction, kind) * power)
    return cp.where(wide.negative, -plain, plain)


def _real(wide: Wide, kind: Any) -> Array:
    return wide.high.astype(kind) * kind(2.0**64) + wide.low.astype(kind)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """High and low 64 bits of the product of two uint64."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low, mid, other, high = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    middle = (low >> _HALF) + (mid & _LOW) + (other & _LOW)
    return high + (mid >> _HALF) + (other >> _HALF) + (middle >> _HALF), a * b


def _divide(wide: Wide, digits: int) -> tuple[Wide, Array]:
    """Quotient by 10^digits towards zero, and the last remainder's size: long division in 32-bit limbs."""
    size = abs(wide)
    high = size.high.view(np.uint64)
    limbs = [high >> _HALF, high & _LOW, size.low >> _HALF, size.low & _LOW]
    rest = cp.zeros_like(size.low)
    while digits:
        step = min(digits, 9)
        divisor, digits = np.uint64(10**step), digits - step
        rest = cp.zeros_like(size.low)
        for place, limb in enumerate(limbs):
            value = (rest << _HALF) | limb
            limbs[place], rest = value // divisor, value % divisor
    quotient = Wide(((limbs[0] << _HALF) | limbs[1]).view(np.int64), (limbs[2] << _HALF) | limbs[3])
    return choose(wide.negative, -quotient, quotient), rest
