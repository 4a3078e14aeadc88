"""Durations and event times: as users write them, and as integers."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import DescriptionError
from gpu_ops.fields import MAX_MS

if TYPE_CHECKING:
    from gpu_ops.arrays import Array

Late = Literal["join", "drop", "tag"]
"""What happens to a row whose event time is below the watermark.

* *join*: it joins what is still there, as in Flink's SQL.
* *drop*: it is left out.
* *tag*: likewise, and it comes out beside the changelog with the row kind ``late``.

It is counted every time.
"""

LATES: Final[Mapping[Late, str]] = {
    "join": "late rows join what is still there",
    "drop": "late rows are dropped and counted",
    "tag": "late rows come out with the row kind 'late'",
}
"""In words."""

Time = Literal["event", "processing"]
"""Whose time counts: the one in the rows, or the clock when their micro-batch is applied."""

UNITS_MS: Final[Mapping[str, int]] = {
    "millisecond": 1,
    "second": 1000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
}
_DURATION: Final = re.compile(r"\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", re.IGNORECASE)
MAX_BOUND: Final = 1 << 60
"""Bounds, in the unit of the event times, are smaller than this, so that their sums are int64."""
BEFORE_ALL: Final = -(1 << 63)
"""A time before all others, in any unit."""
AFTER_ALL: Final = (1 << 63) - 1
"""A time after all others."""

_PER_SECOND: Final = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}

WatermarkMs = int | Mapping[str, int | None] | None
"""A watermark, ms; of a dataflow those of its operators by event time, by their names. None while there is none."""

Duration = str | int | dt.timedelta
"""``"-5 minutes"``, milliseconds, or a timedelta."""


def parse_duration(text: str | int) -> int:
    """Milliseconds of ``"7 days"``, ``"90 seconds"`` or a plain number of milliseconds.

    Raises:
        DescriptionError: no such unit, or not a positive duration.
    """
    ms = _milliseconds(text, "'7 days' or '90 seconds'")
    if not 0 < ms < MAX_MS or round(ms) == 0:
        raise DescriptionError(f"a duration is positive and reaches for less than millions of years: {text!r}")
    return round(ms)


def parse_bound(bound: Duration) -> int:
    """Milliseconds of a duration with a sign.

    Raises:
        DescriptionError: no such unit, or less than a millisecond.
    """
    if isinstance(bound, dt.timedelta):
        whole, rest = divmod(bound, dt.timedelta(milliseconds=1))
        ms = whole + 0.5 if rest else whole
    else:
        ms = _milliseconds(bound, "'-5 minutes' or '4 hours'")
    if abs(ms) >= MAX_MS:
        raise DescriptionError("a bound of an interval reaches for less than millions of years")
    if ms != round(ms):
        raise DescriptionError(f"{bound!r} is no whole number of milliseconds")
    return round(ms)


def _milliseconds(given: object, example: str) -> float:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    found = _DURATION.fullmatch(given) if isinstance(given, str) else None
    unit = found[3].lower() if found else ""
    if found is None or unit not in UNITS_MS:
        raise DescriptionError(f"no duration: {given!r}; write for example {example}")
    return float(found[1] + found[2]) * UNITS_MS[unit]


def places(count: int) -> tuple[str, ...]:
    """The names under which latest times are stored: of left and right, or of so many parts of the only input."""
    return ("left", "right", *(f"part_{number}" for number in range(2, count)))[:count]


def show_ms(ms: int) -> str:
    """Milliseconds in the largest unit that fits."""
    for unit, size in sorted(UNITS_MS.items(), key=lambda item: -item[1]):
        if ms and ms % size == 0:
            number = ms // size
            return f"{number} {unit}{'s' if abs(number) != 1 else ''}"
    return "0"


def check_event_time(name: str, field: pa.Field) -> None:
    """Refuses a column that is no event time.

    Raises:
        DescriptionError: it is neither a timestamp nor int64 (milliseconds since the epoch).
    """
    if not (pa.types.is_timestamp(field.type) or field.type == pa.int64()):
        raise DescriptionError(
            f"input '{name}': event time {field.name!r} is {field.type}; "
            "it is a timestamp, or int64 milliseconds since the epoch"
        )


def time_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The type both event times are compared in: the finer one's.

    Raises:
        DescriptionError: one has a time zone and the other none.
    """
    if left == right:
        return pa.timestamp("ms", left.tz) if pa.types.is_timestamp(left) and left.unit == "s" else left
    stamps = [t for t in (left, right) if pa.types.is_timestamp(t)]
    if len({t.tz is None for t in stamps}) > 1:
        raise DescriptionError(f"one event time has a time zone and the other none ({left}, {right}); CAST one of them")
    finest = max((t.unit for t in stamps), key=list(_PER_SECOND).index)
    return pa.timestamp("ms" if finest == "s" else finest, stamps[0].tz)


def units_per_ms(kind: pa.DataType) -> int:
    """The number of units of a `time_type` in a millisecond."""
    return _per_second(kind) // 1000


def _per_second(kind: pa.DataType) -> int:
    return _PER_SECOND[kind.unit] if pa.types.is_timestamp(kind) else 1000


def as_integers(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> npt.NDArray[np.int64]:
    """Event times as integers in the unit of a `time_type`; no nulls among them.

    Raises:
        OverflowError: a time that is not between `BEFORE_ALL` and `AFTER_ALL`; its argument is the position.
    """
    far = too_far(column, kind)
    if far is not None:
        raise OverflowError(int(np.flatnonzero(far)[0]))
    step = _per_second(kind) // _per_second(column.type)
    values: npt.NDArray[np.int64] = column.cast(pa.int64()).to_numpy()
    return values * step if step != 1 else values


def too_far(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> npt.NDArray[np.bool_] | None:
    """Flags times that are not between `BEFORE_ALL` and `AFTER_ALL` in a unit that is no coarser; None for none."""
    limit = farthest(column.type, kind)
    values = column.cast(pa.int64())
    ends = pc.min_max(values).as_py()
    if ends["min"] is None or (ends["min"] >= -limit and ends["max"] <= limit):
        return None
    far = pc.or_(pc.less(values, -limit), pc.greater(values, limit))
    mask: npt.NDArray[np.bool_] = far.fill_null(False).to_numpy()
    return mask


def farthest(own: pa.DataType, kind: pa.DataType) -> int:
    """The greatest time of a type, as an integer, that is between `BEFORE_ALL` and `AFTER_ALL` in a unit no coarser."""
    return (AFTER_ALL - 1) // (_per_second(kind) // _per_second(own))


def clipped(time: int) -> int:
    """A time that int64 holds; one that is beyond it counts as `BEFORE_ALL` or `AFTER_ALL`."""
    return min(max(time, BEFORE_ALL), AFTER_ALL)


def shifted(xp: Any, times: Array, by: int) -> Array:
    """Times (int64) moved by so many units, up to `BEFORE_ALL` or `AFTER_ALL`: sums of nanoseconds do not fit.

    Args:
        xp: numpy or cupy.
        times: n times.
        by: smaller than 2^62, either way.
    """
    return xp.minimum(times, AFTER_ALL - by) + by if by >= 0 else xp.maximum(times, BEFORE_ALL - by) + by


def from_integers(values: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """The inverse of `as_integers`."""
    return pa.array(values, pa.int64()).cast(kind)
