"""Variances, covariances and correlations, of exact sums of values and of products.

Law, with n values that are not null: the variance is ``(n * sum(x * x) - sum(x) ** 2) / n ** 2``, that of a sample has
``n * (n - 1)`` below; a covariance has ``sum(x * y)`` and ``sum(x) * sum(y)``, of rows in which neither is null. A
correlation is the covariance over the root of both variances.

The sums are exact, as 32-bit parts of their bits, each summed in 64 bits (`sums`), and so are the products and the
difference: only what comes after that is rounded, a few times. So a result depends neither on the order of rows, nor on
how they come in micro-batches, and a value that is taken back leaves nothing. Spark adds up differences from a running
mean (``CentralMomentAgg``), whose last digits depend on the order.

As in Spark a variance of one value is 0, that of a sample of one is null; NaN and infinities give NaN. A correlation
with values that all are the same is null, as it is in Spark without ANSI mode, where that divides by 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array
from gpu_ops.descriptions.aggregate import TWO_COLUMNS, Measure
from gpu_ops.operators.groups.aggregate import sums
from gpu_ops.operators.groups.aggregate.step import AggregateStep, Running

_PART: Final = 32
_LOW: Final = (1 << _PART) - 1
_DIGITS: Final = 53
"""Bits of a double number."""
_BIAS: Final = 1075
_HALF: Final = 27
_PLACES: Final = range(-72, 72)
"""Of the parts of products."""

Words: TypeAlias = tuple[int, list[Array]]
"""N integers in 32-bit words, the lowest first, and the place of the lowest; the highest has the sign."""
Sums: TypeAlias = dict[str, Words]
"""By the letters of what is multiplied: x, y, xx, xy, yy."""


def key_of(measure: Measure, schema: pa.Schema) -> str:
    """Names the numbers beside a group by the columns that an aggregate takes.

    Args:
        measure: the aggregate.
        schema: of its input.
    """
    return "_".join(str(schema.names.index(column)) for column in measure.columns)


def columns_of(key: str) -> Iterator[str]:
    """The numbers that stand beside a group from the start; parts of sums come as they are needed."""
    yield from (f"count_{key}", f"odd_{key}")


def moved(step: AggregateStep, measure: Measure, key: str) -> Running:
    """A variance, covariance or correlation at each moment.

    Args:
        step: the micro-batch.
        measure: which.
        key: as of `key_of`.
    """
    xp, shown = step.xp, []
    taken = _taken(step, measure, key)
    count = step.summed(f"count_{key}", lambda: step.moves(taken.known))
    odd = step.summed(f"odd_{key}", lambda: step.moves(taken.odd) if bool(taken.odd.any()) else None)
    both = {name: _sums(step, f"{sums.PART_OF_DOUBLES}{key}_{name}_at_", taken, name) for name in _names(measure)}
    for side in (0, 1):
        of_side = {name: (low, parts[side]) for name, (low, parts) in both.items()}
        shown.append(_result(xp, measure, of_side, count[side], odd[side]))
    return Running(shown[0], shown[1], sums.doubles)


def added_up(measure: Measure, columns: Sequence[pa.Array]) -> dict[str, npt.NDArray[np.int64]]:
    """Splits columns into integers that add up to an aggregate, for `of_totals`: by name, of each row.

    Args:
        measure: which.
        columns: the values of each of its columns.
    """
    taken = _Taken.of(columns)
    found = {"count": taken.known, "odd": taken.odd}
    for name in _names(measure):
        low, parts = taken.parts(name)
        found |= {f"{name}_{place}": part for place, part in enumerate(parts, low)}
    return found


def of_totals(measure: Measure, totals: Mapping[str, npt.NDArray[np.int64]]) -> pa.Array:
    """The aggregate of n groups.

    Args:
        measure: which.
        totals: of each group those of `added_up`.
    """
    found: Sums = {}
    for name in _names(measure):
        own = {int(key.removeprefix(f"{name}_")): of for key, of in totals.items() if key.startswith(f"{name}_")}
        zeros = np.zeros_like(totals["count"])
        low = min(own, default=0)
        parts = [own.get(place, zeros) for place in range(low, max(own, default=0) + 1)]
        found[name] = low, sums.carried([*parts, zeros, zeros])
    return sums.doubles(*_result(np, measure, found, totals["count"], totals["odd"]))


def _names(measure: Measure) -> tuple[str, ...]:
    if measure.function == "corr":
        return ("x", "y", "xx", "xy", "yy")
    return ("x", "y", "xy") if measure.function in TWO_COLUMNS else ("x", "xx")


# --- sums ----------------------------------------------------------------------------------------


class _Taken(NamedTuple):
    """The values of n rows.

    Attributes:
        xp: numpy or cupy.
        known: 1 where none of the values is null (int64).
        odd: 1 where one of those that are known is no finite number.
        values: of each column n double numbers, 0 where a value is null or not finite.
    """

    xp: Any
    known: Array
    odd: Array
    values: dict[str, Array]

    @classmethod
    def of(cls, columns: Sequence[pa.Array]) -> _Taken:
        """The values of some columns, on the host."""
        known = np.ones(len(columns[0]), bool)
        for column in columns:
            known &= column.is_valid().to_numpy(zero_copy_only=False)
        numbers = [_doubles(column) for column in columns]
        finite = np.logical_and.reduce([np.isfinite(values) for values in numbers])
        there = known & finite
        values = {name: np.where(there, own, 0.0) for name, own in zip("xy", numbers, strict=False)}
        return cls(np, known.astype(np.int64), (known & ~finite).astype(np.int64), values)

    def parts(self, name: str) -> Words:
        """Values, or their products, in parts of 32 bits, each of them with the sign."""
        xp, (size, exponent) = self.xp, _split(self.xp, self.values[name[0]])
        negative, terms = self.values[name[0]] < 0, [(size, 0)]
        if len(name) == 2:
            other, more = _split(xp, self.values[name[1]])
            negative, exponent = negative ^ (self.values[name[1]] < 0), exponent + more
            below = (1 << _HALF) - 1
            a, b, c, d = size >> _HALF, size & below, other >> _HALF, other & below
            terms = [(b * d, 0), (a * d + b * c, _HALF), (a * c, 2 * _HALF)]
        there = xp.flatnonzero((self.values[name[0]] != 0) & (self.values[name[-1]] != 0))
        if not there.size:
            return 0, []
        negative, exponent = negative[there], exponent[there]
        low = int(exponent.min()) >> 5
        width = (int(exponent.max()) >> 5) - low + 6
        found, row = xp.zeros((width, int(there.size)), np.int64), xp.arange(there.size)
        for term, above in terms:  # a term has at most 55 bits
            at = (exponent & 31) + above
            place, shift = (exponent >> 5) - low + (at >> 5), at & 31
            own = term[there]
            first = (own & _LOW) << shift
            second = (first >> _PART) + ((own >> _PART) << shift)
            for number, word in enumerate((first & _LOW, second & _LOW, second >> _PART)):
                found[place + number, row] += word
        parts = []
        for words in range(width):
            part = xp.zeros(self.known.size, np.int64)
            part[there] = xp.where(negative, -found[words], found[words])
            parts.append(part)
        while parts and not bool(parts[-1].any()):
            parts.pop()
        return low, parts


def _doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    """A column's numbers as double numbers; whole numbers beyond 53 bits are rounded, as a CAST does."""
    if pa.types.is_integer(column.type):
        return column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    return sums.doubles_of(column)


def _split(xp: Any, values: Array) -> tuple[Array, Array]:
    """Finite double numbers, without their signs, as whole numbers of 53 bits times a power of two."""
    bits = values.view(np.int64)
    exponent = (bits >> (_DIGITS - 1)) & 0x7FF
    digits = bits & ((1 << (_DIGITS - 1)) - 1)
    return digits + ((exponent > 0).astype(np.int64) << (_DIGITS - 1)), xp.maximum(exponent, 1) - _BIAS


def _taken(step: AggregateStep, measure: Measure, key: str) -> _Taken:
    if key not in step.taken:
        of_rows = _Taken.of([step.column(column) for column in measure.columns])
        there = {name: step.kernels.asarray(values) for name, values in of_rows.values.items()}
        known, odd = step.kernels.asarray(of_rows.known), step.kernels.asarray(of_rows.odd)
        step.taken[key] = _Taken(step.xp, known, odd, there)
    found: _Taken = step.taken[key]
    return found


def _sums(step: AggregateStep, prefix: str, taken: _Taken, name: str) -> tuple[int, tuple[list[Array], list[Array]]]:
    """A sum before and after each moment, as words, and the place of the lowest."""
    if prefix in step.words:
        return step.words[prefix]
    line, groups, (first, parts) = step.line, step.groups, taken.parts(name)
    moves = {place: step.moves(part) for place, part in enumerate(parts, first)}
    places = [*moves, *(place for place in _PLACES if f"{prefix}{place}" in groups.beside)]
    if not places:
        step.words[prefix] = 0, ([], [])
        return step.words[prefix]
    low, high = min(places), max(places) + 2 * bool(moves)  # what is carried, and the sign
    names = [f"{prefix}{place}" for place in range(low, high + 1)]
    groups.have(names)
    bases = [step.base(own) for own in names]
    both = [line.summed(moves.get(place), base) for place, base in enumerate(bases, low)]
    before, after = (sums.carried([pair[side] for pair in both]) for side in (0, 1))
    if moves:
        for own, total, base in zip(names, after, bases, strict=True):
            step.keep(own, line.final(total), base)
    step.words[prefix] = low, (before, after)
    return step.words[prefix]


# --- what becomes of them -------------------------------------------------------------------------


def _result(xp: Any, measure: Measure, of: Sums, count: Array, odd: Array) -> tuple[Array, Array]:
    """The aggregate, of n groups: the bits of double numbers, and a mask of those that are there."""
    function, known = measure.function, count > 0
    if function.endswith("_samp"):
        known = count > 1
    some = xp.where(known, count, 2)
    by = some.astype(np.float64) * (some - function.endswith("_samp")).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if function == "corr":
            size, exponent = _spread(xp, of, "x", "y", count)
            below = [_root(xp, *_spread(xp, of, letter, letter, count)) for letter in "xy"]
            known &= (count > 1) & ((odd > 0) | ((below[0][0] > 0) & (below[1][0] > 0)))
            value = size / (below[0][0] * below[1][0])
            value = xp.ldexp(value, _small(xp, exponent - below[0][1] - below[1][1]))
            value = xp.where(value > 1.0, 1.0, xp.where(value < -1.0, -1.0, value))
        else:
            size, exponent = _spread(xp, of, "x", "y" if function in TWO_COLUMNS else "x", count)
            size = size / by
            if function.startswith("stddev"):
                size, exponent = _root(xp, size, exponent)
            value = xp.ldexp(size, _small(xp, exponent))
        value = xp.where((odd > 0) | xp.isnan(value), np.nan, value)  # one NaN
    return (value + 0.0).view(np.int64), known


def _root(xp: Any, size: Array, exponent: Array) -> tuple[Array, Array]:
    """Square roots of numbers times powers of two."""
    return xp.sqrt(xp.ldexp(size, (exponent & 1).astype(np.int32))), exponent >> 1


def _small(xp: Any, exponent: Array) -> Array:
    return xp.minimum(xp.maximum(exponent, -5000), 5000).astype(np.int32)


def _spread(xp: Any, of: Sums, one: str, other: str, count: Array) -> tuple[Array, Array]:
    """``n * sum(x * y) - sum(x) * sum(y)``, exact and then rounded once: numbers, and powers of two."""
    zeros = xp.zeros(count.size, np.int64)
    numbers = 0, [count & _LOW, count >> _PART, zeros]
    first, second = _times(xp, of[one + other], numbers), _times(xp, of[one], of[other])
    low = min(first[0], second[0])
    high = max(part[0] + len(part[1]) for part in (first, second))
    words = []
    for place in range(low, high):
        pair = [
            part[1][place - part[0]] if part[0] <= place < part[0] + len(part[1]) else zeros for part in (first, second)
        ]
        words.append(pair[0] - pair[1])
    size, exponent = sums.rounded(xp, sums.carried([*words, zeros, zeros]))
    return size, exponent + _PART * low


def _times(xp: Any, one: Words, other: Words) -> Words:
    """Products of integers, exact; words of n signed parts each."""
    (low, signs), (more, others) = _magnitudes(xp, one), _magnitudes(xp, other)
    if not signs[1] or not others[1]:
        return low + more, []
    negative = signs[0] ^ others[0]
    found = [xp.zeros_like(signs[1][0]) for _ in range(len(signs[1]) + len(others[1]))]
    for place, word in enumerate(signs[1]):
        for number, factor in enumerate(others[1], place):
            product = word.view(np.uint64) * factor.view(np.uint64)
            found[number] += (product & np.uint64(_LOW)).view(np.int64)
            found[number + 1] += (product >> np.uint64(_PART)).view(np.int64)
    return low + more, [xp.where(negative, -word, word) for word in sums.carried(found)]


def _magnitudes(xp: Any, words: Words) -> tuple[int, tuple[Array, list[Array]]]:
    """Integers without their signs, of words below 2 to the power of 32, and a mask of the negative ones."""
    low, parts = words
    if not parts:
        return low, (xp.zeros(0, bool), [])
    negative = parts[-1] < 0
    found = sums.carried([xp.where(negative, -part, part) for part in parts])
    top = found[-1]  # of many groups one may be large
    found = [*found[:-1], top & _LOW, top >> _PART]
    while found and not bool(found[-1].any()):
        found.pop()
    while found and not bool(found[0].any()):
        found.pop(0)
        low += 1
    return low, (negative, found)
