"""128-bit integers as two arrays of 64 bits: decimals, whose scale is part of their type and not stored.

cupy has no such type. Numbers are two's complement: ``high`` int64, ``low`` uint64; results wrap around.
Shapes broadcast.
"""

from __future__ import annotations

import dataclasses

import cupy as cp
import numpy as np

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


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """High and low 64 bits of the product of two uint64."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low, mid, other, high = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    middle = (low >> _HALF) + (mid & _LOW) + (other & _LOW)
    return high + (mid >> _HALF) + (other >> _HALF) + (middle >> _HALF), a * b
