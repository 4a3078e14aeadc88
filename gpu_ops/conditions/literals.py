"""Literals of Spark SQL text: strings, numbers, dates, timestamps, intervals, as plain values.

Dates are days since 1970-01-01, timestamps and intervals microseconds. Each reader raises ValueError with
what is wrong.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc

_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "0": "\0", "Z": "\x1a", "%": "\\%", "_": "\\_"}
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([01][0-7]{2})|\\(.)|''|\"\"", re.DOTALL)


def string(quoted: str) -> str:
    """A quoted string's text: backslash escapes and doubled quotes, as Spark's unescapeSQLString."""
    if quoted[0] in "rR":
        return quoted[2:-1]
    quote = quoted[0]

    def plain(match: re.Match[str]) -> str:
        if match[1] or match[2]:
            code = int(match[1] or match[2], 16)
            if code > sys.maxunicode:
                raise ValueError(f"{match[0]} is out of range")
            return chr(code)
        if match[3]:
            return chr(int(match[3], 8))
        if match[4]:
            return _ESCAPES.get(match[4], match[4])
        return quote if match[0][0] == quote else match[0]

    return _ESCAPED.sub(plain, quoted[1:-1])


_NUMBER = re.compile(r"(-?(?:\d+\.?\d*|\.\d+))(e[+-]?\d+)?(bd|[lsyfd])?$", re.IGNORECASE)
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
_WIDTHS = {"y": pa.int8(), "s": pa.int16(), "l": pa.int64()}


def number(text: str) -> tuple[int | float | Decimal, pa.DataType]:
    """A number and its type: INT, BIGINT or DECIMAL; DECIMAL with a point, DOUBLE with an exponent."""
    match = _NUMBER.match(text)
    if not match:
        raise ValueError(f"{text!r} is not a number")
    digits, exponent, suffix = match[1], match[2] or "", (match[3] or "").lower()
    if suffix in ("f", "d") or (exponent and not suffix):
        value = float(digits + exponent)
        if abs(value) > (_LARGEST_FLOAT if suffix == "f" else sys.float_info.max):
            raise ValueError(f"{text} is out of range")
        return value, pa.float32() if suffix == "f" else pa.float64()
    if suffix == "bd" or "." in digits:
        return decimal(digits + exponent)
    if exponent:
        raise ValueError(f"{text!r} is not a number")
    whole = int(digits)
    types = [_WIDTHS[suffix]] if suffix else [pa.int32(), pa.int64()]
    for type_ in types:
        if -(1 << (type_.bit_width - 1)) <= whole < 1 << (type_.bit_width - 1):
            return whole, type_
    if suffix:
        raise ValueError(f"{text} is out of range")
    return decimal(digits)


def decimal(text: str) -> tuple[Decimal, pa.DataType]:
    """A decimal in the narrowest type that holds its digits."""
    value = Decimal(text)
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    scale = max(-exponent, 0)
    precision = max(len(digits) + max(exponent, 0), scale)
    if precision > 38:
        raise ValueError(f"{text} has more than 38 digits")
    return value, pa.decimal128(precision, scale)


_DAY = r"\s*(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})"
_DATE = re.compile(_DAY + r"(?:[T ].*)?)?)?\s*$", re.DOTALL)
_TIME = re.compile(
    _DAY + r"(?:[T ]\s*(\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?)?)?\s*"
    r"(Z|UTC|GMT|[+-]\d{1,2}(?::\d{1,2})?|[+-]\d{4}|[A-Za-z]+/[A-Za-z0-9_/+-]+)?)?)?\s*$"
)  # fmt: skip


def date(text: str) -> int:
    """Days since 1970-01-01 of ``yyyy[-m[-d]]``; a time of day after it is ignored, as in Spark."""
    match = _DATE.match(text)
    if not match:
        raise ValueError(f"{text!r} is not a date")
    try:
        day = dt.date(*(int(part or 1) for part in match.groups()))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a date: {error}") from None
    return day.toordinal() - _EPOCH.toordinal()


def timestamp(text: str) -> tuple[int, str | None]:
    """Microseconds on the wall clock of ``yyyy-m-d[ h:m[:s[.fraction]]][zone]``, and the zone if any."""
    match = _TIME.match(text)
    if not match:
        raise ValueError("it takes yyyy-MM-dd HH:mm:ss")
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    moment = dt.datetime(int(year), int(month or 1), int(day or 1), int(hour or 0), int(minute or 0), int(second or 0))
    return (moment - _EPOCH) // _MICROSECOND + int((fraction or "").ljust(6, "0")[:6]), zone


_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{1,2}))?$")
_UTC = ("UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z", "UCT", "Zulu", "UT", "Etc/UCT", "Etc/Zulu", "+00:00")


def zone_name(name: str) -> str:
    """A time zone as Arrow writes it: ``GMT+8`` is ``+08:00``, and UTC has one name.

    Raises:
        ValueError: none that Java, Arrow and this machine's time zone database all know.
    """
    if name in _UTC:
        return "UTC"
    offset = _OFFSET.match(name)
    if offset:
        sign, hours, minutes = offset[1], int(offset[2]), int(offset[3] or 0)
        if minutes < 60 and hours * 60 + minutes <= 18 * 60:
            return f"{sign}{hours:02}:{minutes:02}" if hours or minutes else "UTC"
    elif not name.startswith(("posix/", "right/")):
        with contextlib.suppress(KeyError, ValueError, OSError, pa.ArrowInvalid):
            ZoneInfo(name)
            pc.assume_timezone(pa.array([0], pa.timestamp("us")), name)
            return name
    raise ValueError(
        f"the time zone {name!r} is not known here: write one of the time zone database, such as 'Europe/Paris', or an "
        "offset such as '+05:30'"
    )


def shifts(zone: str | None) -> bool:
    """Whether the zone's offset changes over time, so that a day there is not always 24 hours."""
    return zone is not None and zone not in _UTC and not _OFFSET.match(zone)


@functools.cache
def _zone(name: str) -> dt.tzinfo:
    name = zone_name(name)
    if name == "UTC":
        return dt.UTC
    offset = _OFFSET.match(name)
    if not offset:
        return ZoneInfo(name)
    span = dt.timedelta(hours=int(offset[2]), minutes=int(offset[3] or 0))
    return dt.timezone(-span if offset[1] == "-" else span)


def to_utc(wall: int, zone: str) -> int:
    """Microseconds in UTC of those on a wall clock, as java.time.

    Of a time that comes twice the first is meant; one that is skipped is read with the offset from before.
    """
    offset = (_EPOCH + wall * _MICROSECOND).replace(tzinfo=_zone(zone)).utcoffset()
    assert offset is not None
    return wall - offset // _MICROSECOND


def to_wall(utc: int, zone: str) -> int:
    """Microseconds on the zone's wall clock."""
    low, high = ((edge.replace(microsecond=0) - _EPOCH) // _MICROSECOND for edge in (dt.datetime.min, dt.datetime.max))
    day = _SPANS["day"]  # from the edges of what datetime knows, where a zone would lead out of it
    moment = (_EPOCH + min(max(utc, low + day), high - day) * _MICROSECOND).replace(tzinfo=dt.UTC)
    offset = moment.astimezone(_zone(zone)).utcoffset()
    assert offset is not None
    return utc + offset // _MICROSECOND


_SPANS = {
    "microsecond": 1, "millisecond": 1_000, "second": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000,
    "day": 86_400_000_000, "week": 7 * 86_400_000_000,
}  # fmt: skip
_MONTHS = {"month": 1, "year": 12}
_FIELDS = ["day", "hour", "minute", "second"]


def unit(word: str) -> str | None:
    """The interval unit a word names, singular; None when it names none."""
    name = word.lower().removesuffix("s")
    return name if name in _SPANS or name in _MONTHS else None


def interval(pairs: Sequence[tuple[str, str]]) -> tuple[int, bool]:
    """The sum of amounts and units: microseconds, or months (then True); as in Spark these do not mix."""
    months = {name in _MONTHS for _, name in pairs}
    if len(months) != 1:
        raise ValueError("an interval of years or months cannot have days or hours too")
    total = 0
    for amount, name in pairs:
        value = amount.strip()
        if not re.match(r"[+-]?\s*\d+(\.\d*)?$", value) or ("." in value and name != "second"):
            raise ValueError(f"{amount!r} is not a number of {name}s")
        total += int(Decimal(value.replace(" ", "")) * (_MONTHS.get(name) or _SPANS[name]))
    if abs(total) >= 1 << (31 if months == {True} else 63):
        raise ValueError("the interval is out of range")
    return total, months == {True}


def interval_fields(text: str, first: str, last: str) -> tuple[int, bool]:
    """The interval ``'...' first TO last``, for example ``'1 02:03' DAY TO MINUTE``."""
    fields = ["year", "month"] if first == "year" else _FIELDS
    sign = -1 if text.strip().startswith("-") else 1
    parts = re.split(r"-" if first == "year" else r"[ :]", text.strip().lstrip("+-"))
    if first not in fields or last not in fields or fields.index(last) <= fields.index(first):
        raise ValueError(f"there is no interval {first.upper()} TO {last.upper()}")
    names = fields[fields.index(first) : fields.index(last) + 1]
    if len(parts) != len(names):
        raise ValueError(f"{text!r} is not an interval {first.upper()} TO {last.upper()}")
    total, months = interval(list(zip(parts, names, strict=True)))
    return sign * total, months


def interval_text(text: str) -> tuple[int, bool]:
    """The interval that a string alone says, for example ``'1 day 2 hours'``."""
    found = re.findall(r"([+-]?\s*[\d.]+)\s+([A-Za-z]+)", text)
    pairs = [(amount, unit(word) or "") for amount, word in found]
    if not pairs or any(not name for _, name in pairs) or re.sub(r"([+-]?\s*[\d.]+)\s+([A-Za-z]+)", "", text).strip():
        raise ValueError(f"{text!r} is not an interval, such as '1 day 2 hours'")
    return interval(pairs)
