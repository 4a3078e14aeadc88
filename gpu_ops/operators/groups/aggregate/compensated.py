"""Sums of double numbers, each kept as a pair of numbers: about 106 bits (Dekker 1971, Knuth's two-sum).

A sum's second number is what its first one is short of. Parts are added as a tree, so that one pass per power of two of
the longest part is all there is, and the result does not depend on how an array is cut over threads.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import numpy as np

from gpu_ops.arrays import Array, Positions
from gpu_ops.kernels import Kernels

Pairs: TypeAlias = tuple[Array, Array]
"""N sums: their values (float64), and what these are short of."""


_FAR: Final = 800
"""An exponent within which a power of two times a number is exact."""

_HALF: Final = 32


def added(xp: Any, one: Pairs, other: Pairs) -> Pairs:
    """Sums of n pairs and n others. One that is infinite stays so."""
    with np.errstate(all="ignore"):
        total, short = _two_sum(one[0], other[0])
        less, lost = _two_sum(one[1], other[1])
        finite = xp.abs(total) <= np.finfo(np.float64).max
        near, rest = _short_of(total, short + less)
        near, rest = _short_of(near, rest + lost)
        return xp.where(finite, near, total), xp.where(finite, rest, 0.0)


def totals(xp: Any, start: Array, values: Array) -> Pairs:
    """The sum of each part.

    Args:
        xp: numpy or cupy.
        start: n flags, where a part begins; the first is set.
        values: n finite numbers.
    """
    sums, exact = (values, xp.zeros(values.size, np.float64)), True
    while True:
        place = _places(xp, start)
        odd = xp.flatnonzero(place & 1)
        if not odd.size:
            return sums
        sums, start = _halved(xp, sums, start, (odd, place), exact=exact)
        exact = False


def sliced(kernels: Kernels, group: Array, values: Array, groups: int) -> Pairs | None:
    """The sum of each group where two slices of the numbers' bits have all of them, added as integers; else None.

    Rows stay as they stand: nothing is sorted, and the sums of integers are exact.

    Args:
        kernels: the backend.
        group: of n numbers, which of the groups it is of.
        values: n finite numbers.
        groups: how many there are.
    """
    xp, zeros = kernels.xp, kernels.xp.zeros
    most = float(xp.abs(values).max()) if values.size else 0.0
    if most == 0:
        return zeros(groups, np.float64), zeros(groups, np.float64)
    exponent = math.frexp(most)[1]
    # so many bits of a slice that sums of n fit in 64 bits, and a slice is a double number
    width = min(52, 62 - int(values.size).bit_length())
    if abs(exponent) > _FAR:
        return None
    found: Pairs | None = None
    rest = values
    for number in (1, 2):
        scale = math.ldexp(1.0, number * width - exponent)
        back = 1 / scale  # both are powers of two
        whole = xp.rint(rest * scale)
        sums = zeros(groups, np.int64)
        kernels.scatter_add(sums, group, whole.astype(np.int64))
        rest = rest - whole * back
        high = (sums >> _HALF).astype(np.float64) * (math.ldexp(1.0, _HALF) * back)
        low = (sums & ((1 << _HALF) - 1)).astype(np.float64) * back
        part = _exact(xp, high, low)
        found = part if found is None else added(xp, found, part)
        if not bool(rest.any()):
            return found
    return None


def running(xp: Any, start: Array, values: Array) -> Pairs:
    """The running sum of each part; arguments as `totals`."""
    levels: list[tuple[Pairs, Array]] = []
    sums = values, xp.zeros(values.size, np.float64)
    while True:
        place = _places(xp, start)
        odd = xp.flatnonzero(place & 1)
        if not odd.size:
            break
        levels.append((sums, place))
        sums, start = _halved(xp, sums, start, (odd, place), exact=not levels[1:])
    for below, place in reversed(levels):
        # of two neighbours the second has the sum of the pair, the first that of the pair before and itself
        pair = xp.cumsum((place & 1) == 0) - 1
        even = xp.flatnonzero(((place & 1) == 0) & (place > 0))
        both = added(xp, (sums[0][pair[even] - 1], sums[1][pair[even] - 1]), (below[0][even], below[1][even]))
        odd = xp.flatnonzero(place & 1)
        made = below[0].copy(), below[1].copy()
        for part, own, of_pair in zip(made, both, sums, strict=True):
            part[even] = own
            part[odd] = of_pair[pair[odd]]
        sums = made
    return sums


def _places(xp: Any, start: Array) -> Array:
    """The place of each element in its part."""
    begins = xp.flatnonzero(start)
    return xp.arange(start.size, dtype=np.int64) - begins[xp.cumsum(start) - 1]


def _halved(xp: Any, sums: Pairs, start: Array, at: tuple[Positions, Array], *, exact: bool) -> tuple[Pairs, Array]:
    """Neighbours added, of each part the first and second, third and fourth, and so on.

    Args:
        xp: numpy or cupy.
        sums: of n elements.
        start: n flags, where a part begins.
        at: where the second of two neighbours is, and the place of each element in its part.
        exact: whether no sum is short of anything.
    """
    odd, place = at
    first = odd - 1
    if exact:
        both = _exact(xp, sums[0][first], sums[0][odd])
    else:
        both = added(xp, (sums[0][first], sums[1][first]), (sums[0][odd], sums[1][odd]))
    made = sums[0].copy(), sums[1].copy()
    made[0][first], made[1][first] = both
    left = xp.flatnonzero((place & 1) == 0)
    return (made[0][left], made[1][left]), start[left]


def _exact(xp: Any, one: Array, other: Array) -> Pairs:
    """`added` of numbers that are short of nothing."""
    with np.errstate(all="ignore"):
        total, short = _two_sum(one, other)
        return total, xp.where(xp.abs(total) <= np.finfo(np.float64).max, short, 0.0)


def _two_sum(a: Array, b: Array) -> Pairs:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _short_of(a: Array, b: Array) -> Pairs:
    """As `_two_sum`, where a is not smaller than b."""
    total = a + b
    return total, b - (total - a)
