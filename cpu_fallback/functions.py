"""Functions of text and time for projections, as Spark computes them; of `cpu_fallback.conditions`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.conditions.expressions import Call, Op
from gpu_ops.errors import EvaluationError

Numbers = npt.NDArray[np.int64]

_SECOND: Final = 1_000_000
_UNITS: Final = {"SECOND": _SECOND, "MINUTE": 60 * _SECOND, "HOUR": 3600 * _SECOND}
"""Parts of a day in microseconds."""
_DAY: Final = 24 * _UNITS["HOUR"]
_LAST_DAY: Final = ((1 << 63) - 1) // _DAY - 1


def _like(args: list[Any], _: Call) -> Any:
    pattern: str = args[1].as_py()
    if not pattern.endswith("\\\\"):
        return pc.match_like(args[0], pattern)
    # Arrow (26.0) does not find a backslash at the end
    pieces = re.findall(r"\\(.)|(%)|(_)|(.)", pattern, re.DOTALL)
    regex = "".join(".*" if many else "." if one else re.escape(escaped or own) for escaped, many, one, own in pieces)
    return pc.match_substring_regex(args[0], f"(?s)^{regex}$")


def _substring(args: list[Any], _: Call) -> Any:
    """`UTF8String.substringSQL`: what stands before the first character counts as taken."""
    first, count = (arg.as_py() for arg in args[1:])
    start = first - 1 if first > 0 else first
    stop = None if first < 0 <= start + count else start + count
    if count <= 0:
        start = stop = 0
    return pc.utf8_slice_codeunits(args[0], start, stop)


_TRIMS: Final = {"BOTH": pc.utf8_trim, "LEADING": pc.utf8_ltrim, "TRAILING": pc.utf8_rtrim}


def _counts(datum: pa.Array) -> Numbers:
    """Dates as days, timestamps as microseconds; any number where there is none."""
    own = pa.int32() if pa.types.is_date32(datum.type) else pa.int64()
    return np.asarray(pc.fill_null(pc.cast(datum, own), 0)).astype(np.int64)


def _days(datum: pa.Array) -> Numbers:
    return _counts(datum) if pa.types.is_date32(datum.type) else _counts(datum) // _DAY


def _microseconds(datum: pa.Array) -> Numbers:
    return _first_microsecond(_counts(datum)) if pa.types.is_date32(datum.type) else _counts(datum)


def _first_microsecond(days: Numbers) -> Numbers:
    farthest = int(np.abs(days).max(initial=0))
    if farthest > _LAST_DAY:
        raise EvaluationError(f"a DATE {farthest:,} days from 1970-01-01 is taken as a TIMESTAMP, and is beyond all")
    return days * _DAY


def _as(days: Numbers, unit: str) -> Numbers:
    """Months or years since 1970."""
    return days.astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.int64)


def _first_day(count: Numbers, unit: str) -> Numbers:
    return count.astype(f"datetime64[{unit}]").astype("datetime64[D]").astype(np.int64)


def _week_of_year(days: Numbers) -> Numbers:
    thursday = days - (days + 3) % 7 + 3  # a week is one of the year that its Thursday is in: ISO 8601
    return (thursday - _first_day(_as(thursday, "Y"), "Y")) // 7 + 1


_OF_DAYS: Final[dict[str, Callable[[Numbers], Numbers]]] = {
    "YEAR": lambda days: _as(days, "Y") + 1970,
    "QUARTER": lambda days: _as(days, "M") % 12 // 3 + 1,
    "MONTH": lambda days: _as(days, "M") % 12 + 1,
    "DAY": lambda days: days - _first_day(_as(days, "M"), "M") + 1,
    "DAYOFYEAR": lambda days: days - _first_day(_as(days, "Y"), "Y") + 1,
    "DAYOFWEEK": lambda days: (days + 4) % 7 + 1,
    "WEEKDAY": lambda days: (days + 3) % 7,
    "WEEK": _week_of_year,
}  # fmt: skip
_OF_TIME: Final[dict[str, Callable[[Numbers], Numbers]]] = {
    "HOUR": lambda micros: micros // _UNITS["HOUR"] % 24,
    "MINUTE": lambda micros: micros // _UNITS["MINUTE"] % 60,
    "SECOND": lambda micros: micros // _SECOND % 60,
}
_STARTS: Final[dict[str, Callable[[Numbers], Numbers]]] = {
    "YEAR": lambda days: _first_day(_as(days, "Y"), "Y"),
    "QUARTER": lambda days: _first_day(_as(days, "M") // 3 * 3, "M"),
    "MONTH": lambda days: _first_day(_as(days, "M"), "M"),
    "WEEK": lambda days: days - (days + 3) % 7,
    "DAY": lambda days: days,
}


def _of_array(compute: Callable[[pa.Array, str, pa.DataType], pa.Array]) -> Callable[[list[Any], Call], Any]:
    """An operation of an array, or of a constant as an array of one."""

    def evaluate(args: list[Any], node: Call) -> Any:
        constant = isinstance(args[0], pa.Scalar)
        found = compute(pa.repeat(args[0], 1) if constant else args[0], args[1].as_py(), node.type)
        return found[0] if constant else found

    return evaluate


def _counted(counts: Numbers, of: pa.Array, type_: pa.DataType) -> pa.Array:
    """Numbers, days or microseconds in their type, null where there is no value."""
    mask = np.asarray(of.is_null()) if of.null_count else None
    return pa.array(counts.astype(np.int64 if type_.bit_width == 64 else np.int32), mask=mask).cast(type_)


def _numbers(datum: pa.Array, name: str) -> Numbers:
    of_time = _OF_TIME.get(name)
    return _OF_DAYS[name](_days(datum)) if of_time is None else of_time(_microseconds(datum))


def _part(datum: pa.Array, name: str, type_: pa.DataType) -> pa.Array:
    return _counted(_numbers(datum, name), datum, type_)


def _trunc(datum: pa.Array, unit: str, type_: pa.DataType) -> pa.Array:
    if unit in _UNITS:
        counts = _microseconds(datum)
        return _counted(counts - counts % _UNITS[unit], datum, type_)
    days = _STARTS[unit](_days(datum))
    return _counted(days if pa.types.is_date32(type_) else _first_microsecond(days), datum, type_)


_LETTERS: Final = {"y": "YEAR", "M": "MONTH", "d": "DAY", "H": "HOUR", "m": "MINUTE", "s": "SECOND"}


def _format(datum: pa.Array, pattern: str, type_: pa.DataType) -> pa.Array:
    """Java's ``DateTimeFormatter``: years beyond four digits have a sign, as `SignStyle.EXCEEDS_PAD` says."""
    written: list[Any] = [pc.if_else(datum.is_valid(), "", pa.scalar(None, type_))]
    for letter, marks in re.findall(r"([a-zA-Z])\1*|([^a-zA-Z]+)", pattern):
        if marks:
            written.append(marks)
            continue
        counts, places = _numbers(datum, _LETTERS[letter]), 4 if letter == "y" else 2
        if letter == "y":
            written.append(pc.if_else(pa.array(counts < 0), "-", pc.if_else(pa.array(counts > 9999), "+", "")))
        written.append(pc.utf8_lpad(pc.cast(pa.array(np.abs(counts)), type_), places, "0"))
    return pc.binary_join_element_wise(*written, "")


FUNCTIONS: Final[dict[Op, Callable[[list[Any], Call], Any]]] = {
    Op.LIKE: _like,
    Op.TEXT: lambda args, node: pc.cast(args[0], node.type),
    Op.LENGTH: lambda args, _: pc.utf8_length(args[0]),
    Op.SUBSTRING: _substring,
    Op.CONCAT: lambda args, _: pc.binary_join_element_wise(*args, "", null_handling="emit_null"),
    Op.TRIM: lambda args, _: _TRIMS[args[2].as_py()](args[0], args[1].as_py()),
    Op.REPLACE: lambda args, _: pc.replace_substring(args[0], args[1].as_py(), args[2].as_py()),
    Op.PART: _of_array(_part),
    Op.TRUNC: _of_array(_trunc),
    Op.FORMAT: _of_array(_format),
}
"""The operations of `gpu_ops.conditions.expressions.ON_HOST`: each takes its operands and its node."""
