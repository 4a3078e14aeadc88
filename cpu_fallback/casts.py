"""Casts and case mapping of conditions on Arrow columns, as Spark does them with ANSI off."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.conditions.expressions import STRING, kind
from gpu_ops.conditions.literals import shifts

Datum = Any
"""A pyarrow Array, or a Scalar where a node is constant."""


def values(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers of a fixed-width array, without a copy; under nulls anything."""
    type_ = np.dtype(f"i{array.type.bit_width // 8}") if kind(array.type) != "float" else array.type.to_pandas_dtype()
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), dtype=type_)
    return np.frombuffer(buffer, dtype=type_)[array.offset : array.offset + len(array)]


def like(numbers: npt.NDArray[Any], type_: pa.DataType, *sources: Datum) -> pa.Array:
    """An array of these numbers, null where one of the sources is."""
    array = pa.Array.from_buffers(type_, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])
    for source in sources:
        if isinstance(source, pa.Array) and source.null_count:
            array = pc.if_else(source.is_valid(), array, pa.scalar(None, type_))
    return array


def cast(datum: Datum, type_: pa.DataType) -> Datum:
    """CAST; the pairs of types are those of `gpu_ops.conditions.functions.cast`."""
    if isinstance(datum, pa.Scalar):
        if not datum.is_valid:
            return pa.scalar(None, type_)
        return cast(broadcast(datum), type_)[0]
    match kind(datum.type), kind(type_):
        case "float", "integer":
            return _saturated(datum, type_)
        case "integer" | "decimal", "decimal":
            return _to_decimal(datum, type_)
        case "string", "boolean":
            return _to_boolean(datum)
        case "string", "integer":
            return to_integer(datum, type_, whole=False)
        case "string", "float":
            return _to_float(datum, type_)
        case "timestamp", "timestamp":
            return _to_timestamp(datum, type_)
        case "date", "string":
            return _written(datum)
        case _:
            return pc.cast(datum, type_, safe=False)


def _written(dates: pa.Array) -> pa.Array:
    """Dates as text; a year of five digits has a sign, as Java writes it."""
    text, late = pc.cast(dates, STRING), pc.greater(dates, pa.scalar(_LAST_DAY, dates.type))
    return pc.if_else(late, pc.binary_join_element_wise("+", text, ""), text) if pc.any(late).as_py() else text


_LAST_DAY = 2_932_896  # 9999-12-31


def _saturated(array: pa.Array, type_: pa.DataType) -> pa.Array:
    wide = values(array).astype(np.float64)
    low, high = float(-(1 << (type_.bit_width - 1))), float(1 << (type_.bit_width - 1))
    inside = (wide > low - 1) & (wide < high)
    result = np.where(inside, wide, 0).astype(type_.to_pandas_dtype())
    limits = np.iinfo(result.dtype)
    result[wide >= high] = limits.max
    result[wide <= low] = limits.min
    return like(result, type_, array)


_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


def _to_decimal(array: pa.Array, new: pa.DataType) -> pa.Array:
    """To another precision and scale, rounding half up; what has too many digits before the point is null."""
    whole = new.precision - new.scale
    if kind(array.type) == "integer":
        if whole >= _DIGITS[array.type.bit_width]:
            return pc.cast(array, new)
        array = pc.cast(array, pa.decimal128(19, 0))
    old = array.type
    if whole >= old.precision - old.scale and new.scale >= old.scale:
        return pc.cast(array, new)
    wide = pa.decimal256(76, max(old.scale, new.scale))
    exact = pc.cast(array, wide)
    if new.scale < old.scale:
        exact = pc.round(exact, new.scale, "half_towards_infinity")
    if whole <= old.precision - old.scale:
        fits = pc.less(pc.abs(exact), pa.scalar(Decimal(10) ** whole, wide))
        exact = pc.if_else(fits, exact, pa.scalar(None, wide))
    return pc.cast(exact, new, safe=False)


_SPACE = "".join(map(chr, range(33)))  # what Spark trims from text before a cast
_TRUE, _FALSE = ("t", "true", "y", "yes", "1"), ("f", "false", "n", "no", "0")


def _where(test: pa.Array, array: Datum) -> pa.Array:
    """The array where the test is true, else null."""
    return pc.if_else(test, array, pa.scalar(None, array.type))


def _to_boolean(array: pa.Array) -> pa.Array:
    text = pc.ascii_lower(pc.utf8_trim(array, characters=_SPACE))
    yes = pc.is_in(text, value_set=pa.array(_TRUE))
    return _where(pc.or_(yes, pc.is_in(text, value_set=pa.array(_FALSE))), yes)


def to_integer(datum: Datum, type_: pa.DataType, *, whole: bool) -> Datum:
    """Text to an integer, else null; digits after a point are cut off, or unless ``whole`` make null."""
    if isinstance(datum, pa.Scalar):
        return to_integer(broadcast(datum), type_, whole=whole)[0]
    text = pc.utf8_trim(datum, characters=_SPACE)
    pattern = r"^[+-]?[0-9]+$" if whole else r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]*)$"
    text = _where(pc.match_substring_regex(text, pattern), text)
    text = pc.replace_substring_regex(text, r"^([+-]?)0*([0-9]*).*$", r"\10\2")  # group 1, a zero, group 2
    # A sign, a zero and 19 digits at most fit in 64 bits, or nearly: the decimal between decides.
    exact = pc.cast(_where(pc.less_equal(pc.binary_length(text), 21), text), pa.decimal128(38, 0))
    bound = 1 << (type_.bit_width - 1)
    low, high = (pa.scalar(Decimal(limit), exact.type) for limit in (-bound, bound))
    inside = pc.and_(pc.greater_equal(exact, low), pc.less(exact, high))
    return pc.cast(_where(inside, exact), type_)


def _to_float(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Text to a float as Java reads it, hexadecimal floats excepted (they make null)."""
    text = pc.utf8_trim(array, characters=_SPACE)
    digits = pc.replace_substring_regex(text, r"^(.*[0-9.])[dDfF]$", r"\1")
    plain = pc.match_substring_regex(digits, r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$")
    number = pc.cast(pc.replace_substring_regex(_where(plain, digits), r"^\+", ""), type_)
    special = pc.and_kleene(pc.invert(plain), pc.match_substring_regex(text, "^(?i:[+-]?inf(inity)?|nan)$|^[+-]NaN$"))
    if not pc.any(special).as_py():
        return number
    return pc.if_else(special, pc.cast(_where(special, text), type_), number)


def _to_timestamp(array: pa.Array, new: pa.DataType) -> pa.Array:
    """To another unit, zone, or between instants and the wall clock; one of these at a time."""
    old = array.type
    if old.unit == "us" and new.unit == "ns":
        # What nanoseconds cannot reach becomes the farthest they do: so comparisons still come out right.
        limit = ((1 << 63) - 1) // 1000
        return like(np.clip(values(array), -limit, limit) * 1000, new, array)
    if old.tz and not new.tz:
        return pc.local_timestamp(array)
    if old.tz or not new.tz or not shifts(new.tz):
        return pc.cast(array, new, safe=False) if old.tz or not new.tz else pc.assume_timezone(array, new.tz)
    early = pc.assume_timezone(array, new.tz, ambiguous="earliest", nonexistent="earliest")
    wall = pc.local_timestamp(early)
    if pc.all(pc.equal(wall, array)).as_py() is not False:
        return early
    # In a gap java.time keeps the offset from before it, and Arrow has found the last instant before it.
    offset = pc.subtract(wall, pc.cast(early, old))
    return pc.cast(pc.subtract(array, offset), new)


def broadcast(datum: pa.Scalar) -> pa.Array:
    """An array of this one value."""
    return pc.if_else(pa.array([True]), datum, datum)


# --- case mapping ----------------------------------------------------------------------------


def lower(text: Datum) -> Datum:
    """LOWER, with the full mapping of Unicode, as Java."""
    return _mapped(text, pc.utf8_lower, "lower")


def upper(text: Datum) -> Datum:
    """UPPER, with the full mapping of Unicode, as Java: 'ß' becomes 'SS'."""
    return _mapped(text, pc.utf8_upper, "upper")


def _mapped(text: Datum, function: Callable[[Datum], Datum], method: str) -> Datum:
    if isinstance(text, pa.Scalar):
        return _mapped(broadcast(text), function, method)[0]
    mapped = function(text)
    special = pc.match_substring_regex(text, _special(method))
    if not pc.any(special).as_py():
        return mapped
    # Arrow maps character by character. Words that need more are rare: each distinct one goes through Python.
    words = pc.dictionary_encode(text.filter(special))
    by_word = pa.array([getattr(word, method)() for word in words.dictionary.to_pylist()], STRING)
    return pc.replace_with_mask(mapped, pc.fill_null(special, False), by_word.take(words.indices))


@functools.cache
def _special(method: str) -> str:
    """A regular expression for the characters whose mapping depends on others, or is several characters."""
    if method == "lower":
        return "[\u0130\u03a3]"
    return "[" + "".join(char for char in map(chr, range(0x80, sys.maxunicode + 1)) if len(char.upper()) > 1) + "]"
