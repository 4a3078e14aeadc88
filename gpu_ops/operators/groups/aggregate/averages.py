"""Averages of decimals as Spark has them: of ``decimal(p, s)`` a ``decimal(p + 4, s + 4)``, rounded half up.

The sum's digits and four more are one number of 160 bits, which is divided by the count as on paper, in digits of 32
bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array

_WORDS: Final = 5
_WORD: Final = 32
_MASK: Final = np.uint64((1 << _WORD) - 1)
_MOST: Final = 10**38 - 1
"""The greatest number that 38 digits have."""


def divided(xp: Any, low: Array, high: Array, counts: Array, places: int) -> tuple[Array, Array, Array]:
    """Sums over counts, with some digits more, rounded half up.

    Args:
        xp: numpy or cupy.
        low: the lower 64 bits of n sums (int64).
        high: the upper 64 bits.
        counts: n counts; 0 where there is no average.
        places: how many digits more.

    Returns:
        Lower and upper 64 bits, and a mask of those that are there: sum and average have at most 38 digits.
    """
    some = counts > 0
    by = xp.where(some, counts, 1).astype(np.uint64)
    negative = high < 0
    below, above = _magnitude(xp, low.view(np.uint64), high.view(np.uint64), negative)
    some &= ~_beyond(below, above)
    shift = np.uint64(_WORD)
    words, carry, factor = [], by, np.uint64(2 * 10**places)
    for word in (below & _MASK, below >> shift, above & _MASK, above >> shift, xp.zeros_like(below)):
        total = word * factor + carry  # twice the sum, and one count: half up
        words.append(total & _MASK)
        carry = total >> shift
    quotient = _quotient(xp, words, by * np.uint64(2))
    below, above = quotient[0] | (quotient[1] << shift), quotient[2] | (quotient[3] << shift)
    some &= (quotient[4] == 0) & ~_beyond(below, above)
    below, above = _magnitude(xp, below, above, negative)
    return below.view(np.int64), above.view(np.int64), some


def _quotient(xp: Any, words: list[Array], by: Array) -> list[Array]:
    """Numbers of words, the lowest first, over others, as words."""
    # what is left of a step and the next bits have to fit in 64 bits
    width = _WORD if not by.size or int(by.max()) >> _WORD == 0 else 1
    rest, found = xp.zeros_like(by), []
    for word in reversed(words):
        made = xp.zeros_like(by)
        for at in range(_WORD - width, -1, -width):
            digit = (word >> np.uint64(at)) & np.uint64((1 << width) - 1)
            rest = (rest << np.uint64(width)) | digit
            made = (made << np.uint64(width)) | (rest // by)
            rest = rest % by
        found.append(made)
    return found[::-1]


def fits(xp: Any, low: Array, high: Array) -> Array:
    """Mask of numbers, given by their lower and upper 64 bits (int64), that have at most 38 digits."""
    return ~_beyond(*_magnitude(xp, low.view(np.uint64), high.view(np.uint64), high < 0))


def _magnitude(xp: Any, low: Array, high: Array, negative: Array) -> tuple[Array, Array]:
    """Numbers of 128 bits, some of them with the other sign."""
    return (
        xp.where(negative, ~low + np.uint64(1), low),
        xp.where(negative, ~high + (low == 0).astype(np.uint64), high),
    )


def _beyond(low: Array, high: Array) -> Array:
    """Mask of numbers without a sign that have more than 38 digits."""
    most = np.uint64(_MOST >> 64)
    return (high > most) | ((high == most) & (low > np.uint64(_MOST & ((1 << 64) - 1))))


def as_decimals(low: Any, high: Any, known: Any, kind: pa.DataType) -> pa.Array:
    """Decimals of n numbers of 128 bits on the host, null where they are not known.

    Args:
        low: the lower 64 bits.
        high: the upper 64 bits.
        known: n flags.
        kind: a decimal128 of any precision that has their digits.
    """
    words, valid = np.stack([low, high], axis=1), pa.py_buffer(np.packbits(known, bitorder="little"))
    made = pa.Array.from_buffers(pa.decimal128(38, kind.scale), len(low), [valid, pa.py_buffer(words)])
    return made.cast(kind)
