"""Counts, sums and averages: numbers beside a group that rows move.

Integers add up as bigint and wrap around; decimals exactly, as 32-bit parts of their digits, each summed in 64 bits;
double numbers as `compensated.py` has it, with NaN and both infinities counted apart, so that
taking one back gives the finite sum again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array
from gpu_ops.descriptions.groups.aggregate import Measure
from gpu_ops.operators.core.numbers import decimal_halves
from gpu_ops.operators.groups.aggregate.averages import as_decimals, divided
from gpu_ops.operators.groups.aggregate.step import Running, Step
from gpu_ops.operators.groups.aggregate.timeline import Moves

_PART: Final = 32
_LOW: Final = (1 << _PART) - 1
_FITS: Final = 1 << 62
_NAN: Final = int(np.float64("nan").view(np.int64))


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
    if pa.types.is_floating(kind):
        yield from (f"{part}_{number}" for part in ("sum", "short", "nan", "most", "least"))
    elif pa.types.is_decimal(kind) or measure.function == "avg":
        yield from (f"part{part}_{number}" for part in range(_parts(kind)))
    else:
        yield f"sum_{number}"


def moved(step: Step, measure: Measure, kind: pa.DataType | None, number: int, result: pa.DataType) -> Running:
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
    if pa.types.is_decimal(kind) or measure.function == "avg":
        return _parted(step, measure, (kind, number), known, result)
    totals = step.summed(f"sum_{number}", lambda: _whole(step, column)[0])
    before, after = ((total, count > 0) for total, count in zip(totals, known, strict=True))
    return Running(before, after, _integers_or_null)


def _whole(step: Step, column: str) -> tuple[Moves, bool]:
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
    filled = pc.fill_null(column, 0) if column.null_count else column
    return filled.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)


# --- in parts of 32 bits: decimals, and integers of which an average is wanted -----------------


def _parts(kind: pa.DataType) -> int:
    return 4 if pa.types.is_decimal(kind) and kind.precision > 18 else 2


def _parted(
    step: Step,
    measure: Measure,
    of: tuple[pa.DataType, int],
    known: tuple[Array, Array],
    result: pa.DataType,
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
            parts.extend(_cut(step.column(column), _parts(kind)))
        return step.moves(step.kernels.asarray(parts[place]))

    names = [f"part{place}_{number}" for place in range(_parts(kind))]
    sums = [step.summed(name, functools.partial(part, place)) for place, name in enumerate(names)]
    before, after = (_carried([pair[side] for pair in sums]) for side in (0, 1))
    for name, total in zip(names, after, strict=True):
        step.groups.beside[name].values[step.line.slots] = step.line.final(total)  # `summed` has noted what was there
    if measure.function == "avg" and pa.types.is_decimal(kind):
        places, sides = result.scale - kind.scale, zip((before, after), known, strict=True)
        means = [_decimal_averages(step.xp, parts, counts, places) for parts, counts in sides]
        return Running(means[0], means[1], functools.partial(as_decimals, kind=result))
    if measure.function == "avg":
        return Running(_averages(step.xp, before, known[0]), _averages(step.xp, after, known[1]), _doubles)

    def made(*numbers: npt.NDArray[Any]) -> pa.Array:
        return _decimals(numbers[:-1], numbers[-1], result)

    return Running((*before, known[0] > 0), (*after, known[1] > 0), made)


def _cut(column: pa.Array, parts: int) -> list[npt.NDArray[np.int64]]:
    """Integers or decimals in parts of 32 bits, the lowest first; the highest has the sign."""
    if not pa.types.is_decimal(column.type):
        if column.type == pa.uint64():
            values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
            return [(values & np.uint64(_LOW)).astype(np.int64), (values >> np.uint64(_PART)).astype(np.int64)]
        values = integers(column)
        return [values & _LOW, values >> _PART]
    low, high = decimal_halves(column)
    if parts == 2:
        return [low & _LOW, low >> _PART]
    return [low & _LOW, (low >> _PART) & _LOW, high & _LOW, high >> _PART]


def _carried(parts: list[Array]) -> list[Array]:
    """Parts with what is beyond 32 bits of each added to the next, so that equal sums have equal parts."""
    found, carry = [], 0
    for part in parts[:-1]:
        total = part + carry
        found.append(total & _LOW)
        carry = total >> _PART
    return [*found, parts[-1] + carry]


def _decimals(parts: tuple[npt.NDArray[np.int64], ...], known: npt.NDArray[np.bool_], kind: pa.DataType) -> pa.Array:
    """Decimals of parts; null where no digit is known, or there are more than the type has."""
    low = parts[0] | (parts[1] << _PART)
    if len(parts) == 2:
        high = parts[1] >> _PART
    else:
        high = parts[2] | (parts[3] << _PART)
        known = known & (parts[3] >= -(1 << 31)) & (parts[3] < 1 << 31)
    words = np.stack([low, high], axis=1)
    valid = pa.py_buffer(np.packbits(known, bitorder="little"))
    made = pa.Array.from_buffers(pa.decimal128(38, kind.scale), len(low), [valid, pa.py_buffer(words)])
    if len(parts) == 4:
        # the range of 38 digits is smaller than that of 128 bits
        most = pa.scalar("9" * 38).cast(pa.decimal128(38, 0)).as_py()
        whole = pa.Array.from_buffers(pa.decimal128(38, 0), len(low), [valid, pa.py_buffer(words)])
        inside = pc.and_(pc.less_equal(whole, most), pc.greater_equal(whole, -most))
        made = pc.if_else(inside, made, pa.scalar(None, made.type))
    return made.cast(kind)


def _averages(xp: Any, parts: list[Array], counts: Array) -> tuple[Array, Array]:
    """Of integers: the bits of double numbers, and which there are."""
    total = parts[1].astype(np.float64) * float(1 << _PART) + parts[0].astype(np.float64)
    return (total / xp.maximum(counts, 1) + 0.0).view(np.int64), counts > 0


def _decimal_averages(xp: Any, parts: list[Array], counts: Array, places: int) -> tuple[Array, Array, Array]:
    """Of decimals: lower and upper bits, and which there are."""
    low = parts[0] | (parts[1] << _PART)
    high, whole = parts[1] >> _PART, counts
    if len(parts) == 4:
        high = parts[2] | (parts[3] << _PART)
        whole = xp.where((parts[3] >= -(1 << 31)) & (parts[3] < 1 << 31), counts, 0)
    low, high, known = divided(xp, low, high, whole, places)
    return xp.where(known, low, 0), xp.where(known, high, 0), known


# --- double numbers ----------------------------------------------------------------------------


def _floats(step: Step, measure: Measure, number: int, known: tuple[Array, Array]) -> Running:
    xp, name = step.xp, measure.column
    assert name is not None
    cached: list[npt.NDArray[np.float64]] = []

    def given() -> npt.NDArray[np.float64]:
        if not cached:
            column = step.column(name).cast(pa.float64())
            filled = pc.fill_null(column, 0.0) if column.null_count else column
            cached.append(filled.to_numpy(zero_copy_only=False))
        return cached[0]

    finite = bool(np.isfinite(given()).all())

    def counted(mask: Callable[[], Any]) -> Moves | None:
        return None if finite else step.moves(step.kernels.asarray(mask().astype(np.int64)))

    nan = step.summed(f"nan_{number}", lambda: counted(lambda: np.isnan(given())))
    most = step.summed(f"most_{number}", lambda: counted(lambda: given() == np.inf))
    least = step.summed(f"least_{number}", lambda: counted(lambda: given() == -np.inf))
    if finite and not bool((nan[0] | most[0] | least[0]).any()):
        plain = zip(_finite(step, number, given, list(known)), known, strict=True)
        before, after = ((_bits(step, measure, total, count), count > 0) for total, count in plain)
        return Running(before, after, _doubles)
    sums = _finite(step, number, given, [k - n - m - v for k, n, m, v in zip(known, nan, most, least, strict=True)])
    found = []
    for total, count, nans, mosts, leasts in zip(sums, known, nan, most, least, strict=True):
        bits = _bits(step, measure, total, count)
        bits = xp.where((nans > 0) | ((mosts > 0) & (leasts > 0)), _NAN, bits)
        infinite = xp.where(mosts > 0, xp.full(1, np.inf), xp.full(1, -np.inf)).view(np.int64)
        bits = xp.where((nans == 0) & ((mosts > 0) ^ (leasts > 0)), infinite, bits)
        found.append((bits, count > 0))
    return Running(found[0], found[1], _doubles)


def _bits(step: Step, measure: Measure, total: Array, count: Array) -> Array:
    """The bits of a sum or an average, where zero is one value and NaN another."""
    xp = step.xp
    with np.errstate(all="ignore"):
        value = total / xp.maximum(count, 1) if measure.function == "avg" else total
    return xp.where(xp.isnan(value), _NAN, (value + 0.0).view(np.int64))


def _finite(step: Step, number: int, given: Any, left: list[Array]) -> tuple[Array, Array]:
    """The sums of finite values before and after each moment; exactly 0 where no value is left."""
    xp, names = step.xp, (f"sum_{number}", f"short_{number}")
    if names[0] not in step.floats:
        values, there = given(), np.isfinite(given())
        if not there.all():
            values = np.where(there, values, 0.0)
        deltas = step.signed(step.kernels.asarray(values))
        base = step.base(names[0]).view(np.float64), step.base(names[1]).view(np.float64)
        after = tuple(xp.where(left[1] > 0, part, 0.0) for part in step.line.compensated(deltas, base))
        before = tuple(step.line.shifted(part, of) for part, of in zip(after, base, strict=True))
        for name, part in zip(names, after, strict=True):
            step.keep(name, step.line.final(part).view(np.int64))
        step.floats[names[0]] = before[0] + before[1], after[0] + after[1]
    return step.floats[names[0]]


def _doubles(bits: npt.NDArray[np.int64], known: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(bits.view(np.float64), mask=~known)
