"""Counts, sums, averages and different values: numbers beside a group that rows move.

Integers add up as bigint and wrap around. Decimals and double numbers add up exactly, as 32-bit parts of their bits,
each summed in 64 bits: so a result depends neither on the order of rows, nor on how they come in micro-batches. NaN and
both infinities are counted apart, so that taking one back gives the finite sum again.

What adds up, and what becomes of the totals, is the same when the input has ended (`added_up`, `of_totals`): there the
backend's ``groupby`` adds up.

**Different values**: each value of a group is kept once, with the number of its rows. That is Flink's
``DistinctAggregate`` over its ``MapView``. A value counts while that number is not zero, so the count moves where it
crosses zero.

**Averages** of decimals are as Spark has them: of ``decimal(p, s)`` a ``decimal(p + 4, s + 4)``, rounded half up; those
of durations are rounded so to their own unit.
The sum's digits and four more are one number of 160 bits, which is divided by the count as on paper, in digits of 32
bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array
from gpu_ops.descriptions.aggregate import Measure
from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.operators.core.order import decimal_halves
from gpu_ops.operators.groups.aggregate.step import AggregateStep, Moves, Running, Timeline
from gpu_ops.state.table import put_behind

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


_PART: Final = 32
_LOW: Final = (1 << _PART) - 1
_FITS: Final = 1 << 62
ODD: Final[dict[str, Callable[[Any], Any]]] = {
    "nan": np.isnan,
    "most": lambda values: values == np.inf,
    "least": lambda values: values == -np.inf,
}
"""What is no finite number; counted beside a group by these names."""
_LEAST_EXPONENT: Final = -1022
_PLACES: Final = range(-34, 34)
PART_OF_DOUBLES: Final = "bits_"
"""Beside a group, with a column's number and a place behind it: a part of a sum of double numbers."""


def columns_of(measure: Measure, kind: pa.DataType | None, number: int) -> Iterator[str]:
    """The numbers that stand beside a group for a count, sum or average.

    Args:
        measure: which.
        kind: the type of its column; None for ``count(*)``.
        number: of its column in the input.
    """
    if kind is None:
        return
    yield f"count_{number}"
    if measure.function == "count":
        return
    if pa.types.is_floating(kind):  # the parts of the sum come as they are needed
        yield from (f"{part}_{number}" for part in ("sum", *ODD))
    elif _in_parts(measure, kind):
        yield from (f"part{part}_{number}" for part in range(_parts(kind)))
    else:
        yield f"sum_{number}"


def moved(step: AggregateStep, measure: Measure, kind: pa.DataType | None, number: int, result: pa.DataType) -> Running:
    """A count, sum or average at each moment.

    Args:
        step: the micro-batch.
        measure: which.
        kind: the type of its column; None for ``count(*)``.
        number: of its column in the input.
        result: its own type.
    """
    column = measure.column
    if column is None:
        return counted(step.counted())
    assert kind is not None
    known = step.known(number, column)
    if measure.function == "count":
        return counted(known)
    if pa.types.is_floating(kind):
        return _floats(step, measure, number, known)
    if _in_parts(measure, kind):
        return _parted(step, measure, (kind, number), known, result)
    totals = step.summed(f"sum_{number}", lambda: _whole(step, column)[0])
    before, after = ((total, count > 0) for total, count in zip(totals, known, strict=True))
    return Running(before, after, _integers_or_null)


def _whole(step: AggregateStep, column: str) -> tuple[Moves, bool]:
    """By how much integers move their sum, and whether that is exact: it fits in 64 bits whatever their order is."""
    if column not in step.wholes:
        values = integers(step.column(column))
        most = max(int(values.max()), -int(values.min())) if values.size else 0
        exact = most * int(step.row.size) < _FITS and step.column(column).type != pa.uint64()
        step.wholes[column] = step.moves(step.kernels.asarray(values)), exact
    return step.wholes[column]


def counted(numbers: tuple[Array, Array]) -> Running:
    """A count, from its numbers before and after each moment."""
    return Running((numbers[0],), (numbers[1],), pa.array)


def _integers_or_null(values: npt.NDArray[np.int64], known: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(values, mask=~known)


def integers(column: pa.Array) -> npt.NDArray[np.int64]:
    """A column's integers, 0 for null; those beyond int64 wrap around."""
    values = column.cast(pa.int64(), safe=False)
    return (pc.fill_null(values, 0) if column.null_count else values).to_numpy(zero_copy_only=False)


# --- in parts of 32 bits: decimals, durations, and integers of which an average is wanted ------


def _in_parts(measure: Measure, kind: pa.DataType) -> bool:
    return pa.types.is_decimal(kind) or pa.types.is_duration(kind) or measure.function == "avg"


def _parts(kind: pa.DataType) -> int:
    return 4 if pa.types.is_decimal(kind) and kind.precision > 18 else 2


def _parted(
    step: AggregateStep, measure: Measure, of: tuple[pa.DataType, int], known: tuple[Array, Array], result: pa.DataType
) -> Running:
    column, (kind, number) = measure.column, of
    assert column is not None
    parts: list[npt.NDArray[np.int64]] = []

    def part(place: int) -> Moves:
        if not pa.types.is_decimal(kind):
            (before, after), exact = _whole(step, column)
            if exact:
                return (before >> _PART, after >> _PART) if place else (before & _LOW, after & _LOW)
        if not parts:
            parts.extend(cut(step.column(column)))
        return step.moves(step.kernels.asarray(parts[place]))

    names = [f"part{place}_{number}" for place in range(_parts(kind))]
    sums = [step.summed(name, functools.partial(part, place)) for place, name in enumerate(names)]
    before, after = (carried([pair[side] for pair in sums]) for side in (0, 1))
    for name, total in zip(names, after, strict=True):
        step.keep(name, step.line.final(total), step.base(name))  # in place of what `summed` has kept
    shown = [
        of_parts(step.xp, measure, parts, count, (kind, result))
        for parts, count in zip((before, after), known, strict=True)
    ]
    return Running(shown[0], shown[1], functools.partial(made_of_parts, (kind, result)))


def of_parts(
    xp: Any, measure: Measure, parts: list[Array], counts: Array, types: tuple[pa.DataType, pa.DataType]
) -> tuple[Array, ...]:
    """A sum or an average of decimals or durations, or an average of integers, as numbers; see `made_of_parts`.

    Args:
        xp: numpy or cupy.
        measure: which.
        parts: of n sums, the lowest first, none but the highest beyond 32 bits (`carried`).
        counts: how many values each is of.
        types: of the column and of the result.
    """
    kind, result = types
    if pa.types.is_duration(kind):
        low, high, known = parts[0] | (parts[1] << _PART), parts[1] >> _PART, counts > 0
        if measure.function == "avg":
            low, high, known = divided(xp, low, high, counts, 0)
        known = known & (high == low >> 63)
        return xp.where(known, low, 0), known
    if not pa.types.is_decimal(kind):
        return ((nearest(xp, parts, 0) / xp.maximum(counts, 1)).view(np.int64), counts > 0)
    low, high = parts[0] | (parts[1] << _PART), parts[1] >> _PART
    if len(parts) == 4:
        high = parts[2] | (parts[3] << _PART)
        counts = xp.where((parts[3] >= -(1 << 31)) & (parts[3] < 1 << 31), counts, 0)
    if measure.function == "avg":
        low, high, known = divided(xp, low, high, counts, result.scale - kind.scale)
    else:
        known = (counts > 0) & fits(xp, low, high)
    return xp.where(known, low, 0), xp.where(known, high, 0), known


def made_of_parts(types: tuple[pa.DataType, pa.DataType], *numbers: npt.NDArray[Any]) -> pa.Array:
    """In Arrow what `of_parts` gave, on the host."""
    kind, result = types
    if pa.types.is_duration(kind):
        return _integers_or_null(*numbers).cast(result)
    if not pa.types.is_decimal(kind):
        return doubles(*numbers)
    low, high, known = numbers
    return as_decimals(low, high, known, result)


def cut(column: pa.Array) -> list[npt.NDArray[np.int64]]:
    """Integers, durations or decimals in parts of 32 bits, the lowest first; the highest has the sign."""
    if not pa.types.is_decimal(column.type):
        if column.type == pa.uint64():
            values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
            return [(values & np.uint64(_LOW)).astype(np.int64), (values >> np.uint64(_PART)).astype(np.int64)]
        values = integers(column)
        return [values & _LOW, values >> _PART]
    low, high = decimal_halves(column)
    if _parts(column.type) == 2:
        return [low & _LOW, low >> _PART]
    return [low & _LOW, (low >> _PART) & _LOW, high & _LOW, high >> _PART]


def carried(parts: list[Array]) -> list[Array]:
    """Parts with what is beyond 32 bits of each added to the next, so that equal sums have equal parts."""
    found, carry = [], 0
    for part in parts[:-1]:
        total = part + carry
        found.append(total & _LOW)
        carry = total >> _PART
    return [*found, parts[-1] + carry]


def added_up(measure: Measure, column: pa.Array) -> dict[str, npt.NDArray[np.int64]]:
    """Splits a column into integers that add up to a sum or an average, for `of_totals`: by name, of each row.

    Args:
        measure: which.
        column: its values.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        values = doubles_of(column)
        plain = finite(values)
        parts = {str(place): part for place, part in parts_of(np, plain)}
        odd = {} if plain is values else {name: test(values).astype(np.int64) for name, test in ODD.items()}
        return parts | odd
    if _in_parts(measure, kind):
        return {str(place): part for place, part in enumerate(cut(column))}
    return {"sum": integers(column)}


def of_totals(
    measure: Measure,
    totals: dict[str, npt.NDArray[np.int64]],
    counts: npt.NDArray[np.int64],
    types: tuple[pa.DataType, pa.DataType],
) -> pa.Array:
    """The sums or averages of n groups.

    Args:
        measure: which.
        totals: of each group those of `added_up`; what is not there is 0.
        counts: how many values groups have that are not null.
        types: of the column and of the result.
    """
    kind, zeros = types[0], np.zeros(counts.size, np.int64)
    if pa.types.is_floating(kind):
        odd = [totals.pop(name, zeros) for name in ODD]
        places = [int(place) for place in totals]
        low = min(places, default=0)
        parts = [totals.get(str(place), zeros) for place in range(low, max(places, default=0) + 2)]
        return doubles(*of_doubles(np, measure, nearest(np, carried(parts), low), counts, odd))
    if "sum" in totals:
        return _integers_or_null(totals["sum"], counts > 0)
    parts = carried([totals[str(place)] for place in range(len(totals))])
    return made_of_parts(types, *of_parts(np, measure, parts, counts, types))


# --- double numbers ----------------------------------------------------------------------------


def _floats(step: AggregateStep, measure: Measure, number: int, known: tuple[Array, Array]) -> Running:
    name = measure.column
    assert name is not None
    cached: list[npt.NDArray[np.float64]] = []

    def values() -> npt.NDArray[np.float64]:
        if not cached:
            cached.append(doubles_of(step.column(name)))
        return cached[0]

    plain = bool(np.isfinite(values()).all())

    def counted(test: Callable[[Any], Any]) -> Moves | None:
        return None if plain else step.moves(step.kernels.asarray(test(values()).astype(np.int64)))

    odd = [step.summed(f"{of}_{number}", functools.partial(counted, test)) for of, test in ODD.items()]
    shown = []
    for side, (total, count) in enumerate(zip(_finite(step, number, values), known, strict=True)):
        shown.append(of_doubles(step.xp, measure, total, count, [pair[side] for pair in odd]))
    return Running(shown[0], shown[1], doubles)


def doubles_of(column: pa.Array) -> npt.NDArray[np.float64]:
    """A column's numbers, 0 for null."""
    column = column.cast(pa.float64())
    filled = pc.fill_null(column, 0.0) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False)


def of_doubles(xp: Any, measure: Measure, total: Array, count: Array, odd: list[Array]) -> tuple[Array, Array]:
    """A sum or an average of double numbers: its bits, where zero is one value, and which there are.

    Args:
        xp: numpy or cupy.
        measure: which.
        total: n sums of finite values.
        count: how many values each is of, others among them.
        odd: how many of these each of `ODD` are.
    """
    nans, mosts, leasts = odd
    value = total / xp.maximum(count, 1) if measure.function == "avg" else total
    if bool((nans | mosts | leasts).any()):
        infinite = xp.where(mosts > 0, xp.full(1, np.inf), xp.full(1, -np.inf))
        value = xp.where((mosts > 0) | (leasts > 0), infinite, value)
        value = xp.where((nans > 0) | ((mosts > 0) & (leasts > 0)), xp.full(1, np.nan), value)
    return (value + 0.0).view(np.int64), count > 0  # of a negative one an average may be -0.0


def _finite(step: AggregateStep, number: int, given: Callable[[], npt.NDArray[np.float64]]) -> tuple[Array, Array]:
    """The sums of finite values before and after each moment."""
    if number in step.floats:
        return step.floats[number]
    xp, line, groups, name = step.xp, step.line, step.groups, f"{PART_OF_DOUBLES}{number}_at_"
    moved = {place: step.moves(part) for place, part in parts_of(xp, step.kernels.asarray(finite(given())))}
    places = [*moved, *(place for place in _PLACES if f"{name}{place}" in groups.beside)]
    of_groups = step.base(f"sum_{number}").view(np.float64)
    if not moved:
        step.floats[number] = (of_groups if line.net else of_groups[line.group],) * 2
        return step.floats[number]
    low, high = min(places), max(places)
    high += high in moved  # a part above those that rows have, for what is carried
    names = [f"{name}{place}" for place in range(low, high + 1)]
    groups.have(names)
    bases = [step.base(own) for own in names]
    parts = carried([line.summed(moved.get(place), base)[1] for place, base in enumerate(bases, low)])
    for own, total, base in zip(names, parts, bases, strict=True):
        step.keep(own, line.final(total), base)
    after = nearest(xp, parts, low)
    step.keep(f"sum_{number}", line.final(after).view(np.int64), of_groups.view(np.int64))
    step.floats[number] = line.shifted(after, of_groups), after
    return step.floats[number]


def with_parts(groups: pa.Table, own: int) -> pa.Table:
    """Groups of a snapshot; in those of earlier versions a sum of double numbers is two of them.

    Args:
        groups: with numbers beside them.
        own: how many columns are those of the group.
    """
    behind = dict(zip(groups.column_names[own:], groups.columns[own:], strict=True))
    for number in [name.removeprefix("short_") for name in behind if name.startswith("short_")]:
        for column in (behind[f"sum_{number}"], behind.pop(f"short_{number}")):
            values = finite(column.to_numpy().view(np.float64))
            for place, part in parts_of(np, values):
                name = f"{PART_OF_DOUBLES}{number}_at_{place}"
                behind[name] = pa.array(part + (behind[name].to_numpy() if name in behind else 0))
    return put_behind(groups.select(range(own)), behind)


def finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Numbers, 0 for NaN and infinities."""
    there = np.isfinite(values)
    return values if there.all() else np.where(there, values, 0.0)


def parts_of(xp: Any, values: Array) -> Iterator[tuple[int, Array]]:
    """Finite double numbers in parts of 32 bits, the highest first, without those that all are 0.

    Args:
        xp: numpy or cupy.
        values: n of them.

    Yields:
        The place of a part and n integers: they count for 2 to the power of 32 times the place.
    """
    rest = values
    while rest.size and (most := float(xp.abs(rest).max())):
        place = (math.frexp(most)[1] - 1) // _PART
        part = xp.trunc(_scaled(rest, -_PART * place))
        rest = rest - _scaled(part, _PART * place)
        yield place, part.astype(np.int64)


def _scaled(values: Array, exponent: int) -> Array:
    """Numbers times a power of two."""
    if abs(exponent) < -_LEAST_EXPONENT:
        return values * math.ldexp(1.0, exponent)
    return values * math.ldexp(1.0, exponent // 2) * math.ldexp(1.0, exponent - exponent // 2)


def nearest(xp: Any, parts: list[Array], low: int) -> Array:
    """The double numbers that are nearest to some numbers, of two the even one; infinite beyond their range.

    Args:
        xp: numpy or cupy.
        parts: of n numbers, the lowest first.
        low: the place of the lowest.
    """
    top = [part >> 31 for part in parts[1:]]
    small = all(bool((part == sign).all()) for part, sign in zip(parts[2:], top[:-1], strict=True))
    if small and not bool(((top[0] + 1) >> 1).any()):  # in 64 bits
        with np.errstate(over="ignore"):
            return _scaled((parts[0] | (parts[1] << _PART)).astype(np.float64), _PART * low)
    numbers, exponents = rounded(xp, parts)
    with np.errstate(over="ignore"):
        return xp.ldexp(numbers, (exponents + _PART * low).astype(np.int32))


def rounded(xp: Any, parts: list[Array]) -> tuple[Array, Array]:
    """The double numbers that are nearest to some whole numbers, of any size: numbers, and powers of two.

    Args:
        xp: numpy or cupy.
        parts: as of `nearest`.
    """
    sign, size = parts[-1] >> 63, int(parts[0].size)
    digits = xp.empty((len(parts) + 3, size), np.int64)  # two of nothing below, and the top in two
    digits[:2] = 0
    for number, part in enumerate([*parts[:-1], parts[-1] & _LOW, (parts[-1] >> _PART) & _LOW], 2):
        digits[number] = part
    # the first that says more than the sign, and the next two
    says = digits != (sign & _LOW)
    says[2] = True
    lead = len(digits) - 1 - xp.argmax(says[::-1], axis=0)
    here = lead * size + xp.arange(size)
    first, second, third = (digits.ravel()[here - back * size] for back in range(3))
    # how many bits of the first do not, by the exponent that it has as a double number
    free = xp.minimum(_PART + 1022 - ((first ^ (sign & _LOW)).astype(np.float64).view(np.int64) >> 52), _PART)
    # 64 bits, of which the last one stands for all below, too
    bits = ((first | (sign << _PART)) << (free + 31)) + ((second << free) >> 1) + (third >> (33 - free))
    below = ((second << free) & 1) | (third & ((1 << (33 - free)) - 1))
    if len(digits) > 5:
        below |= xp.argmax(digits != 0, axis=0) < lead - 2
    bits |= below != 0
    return bits.astype(np.float64), _PART * (lead - 3) - free + 1


def doubles(bits: npt.NDArray[np.int64], known: npt.NDArray[np.bool_]) -> pa.Array:
    """In Arrow what `of_doubles` gave, on the host."""
    return pa.array(bits.view(np.float64), mask=~known)


GROUP_NUMBER = "number"
"""Beside a group: what its values know it by, from 1; slots change."""
GROUP, _ROWS = "group", "rows"


def value_table(kernels: Kernels, kind: pa.DataType, name: str, *, forgets: bool) -> KeyTable:
    """An empty table of values.

    Args:
        kernels: the backend.
        kind: their type.
        name: for errors.
        forgets: whether groups are forgotten, and their values with them.
    """
    schema = pa.schema([(GROUP, pa.int64()), (name if name != GROUP else f"{name}_", kind)])
    return KeyTable(kernels, schema, {_ROWS: np.int64}, name, by_first=forgets)


def different(step: AggregateStep, name: str, table: KeyTable, measure: Measure) -> Running:
    """The number of different values at each moment, which has a name beside the groups; others as of `crossings`."""
    assert measure.column is not None
    column = measure.column
    return counted(step.summed(name, lambda: step.line.moves(crossings(step, table, column))))


def crossings(step: AggregateStep, table: KeyTable, column: str) -> Array:
    """By how much each event moves the number of different values: 1, -1 or 0; moves the values' own numbers.

    Args:
        step: the micro-batch.
        table: the values there are.
        column: whose values they are.
    """
    kernels, xp, rows = step.kernels, step.xp, step.rows
    deltas = xp.zeros(step.row.size, np.int64)
    there = step.not_null(column)
    known = xp.arange(rows.group.size, dtype=np.int64) if there is None else xp.flatnonzero(there)
    if not known.size:
        return deltas
    numbers = step.base(GROUP_NUMBER)[rows.group[known]]
    own = kernels.frame(pa.table({GROUP: pa.array(kernels.asnumpy(numbers))}))
    values = kernels.take(rows.frame, known, [column], present=True)
    name = table.source.schema.names[1]
    found = table.locate(kernels.combine([(GROUP, own, GROUP), (name, values, column)]))
    place = xp.full(rows.group.size, -1, np.int64)
    place[known] = found.number
    value = place[step.row]
    events = xp.flatnonzero(value >= 0)
    line = Timeline(kernels, found.slots, value[events], step.logical_times[events], net=False)
    signs = xp.ones(events.size, np.int64) if step.sign is None else step.sign[events]
    before, after = line.summed(line.moves(signs), base := table.beside[_ROWS].values[found.slots])
    left = line.final(after)
    table.put(_ROWS, found.slots, left, base)
    table.end(found.slots[left == 0])
    deltas[events[line.order]] = (after > 0).astype(np.int64) - (before > 0)
    return deltas
