"""Local times as instants: Arrow's functions, and the rules of zones where Arrow has none, after 2037.

Arrow reads a zone's changes from a list that ends in 2037, and has none later: to it the summer of 2050 has the time of
winter. The calendar repeats every 400 years, to the day of the week, and so do the rules of zones.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from typing import Final, Literal, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Seconds = npt.NDArray[np.int64]

_SECOND: Final = 1_000_000
_LATE: Final = int(dt.datetime(2037, 1, 1, tzinfo=dt.UTC).timestamp())
_CYCLE: Final = 146_097 * 86_400
"""Seconds in 400 years."""
_LISTED: Final = _LATE + 100 * 365 * 86_400
"""All that zones list of changes ahead is before; later they have a rule for every year."""
_STEP: Final = 14 * 86_400
_DAY: Final = 86_400


class Offsets(NamedTuple):
    """The offsets from UTC of a zone's clocks over time.

    Attributes:
        begins: of n offsets, the second from 1970 (UTC) from which each holds.
        seconds: n offsets.
    """

    begins: Seconds
    seconds: Seconds


def in_zone(
    local: pa.Array, kind: pa.TimestampType, zone: str, which: Literal["earliest", "latest"] = "earliest"
) -> pa.Array:
    """Local times as instants, as Java has it: by the offset before, where clocks skip an hour or repeat one.

    Args:
        local: n of them, in the unit of ``kind``.
        kind: of the instants.
        zone: Arrow's name of it.
        which: of two instants, where clocks repeat an hour.
    """
    if zone == "UTC":  # Arrow would look for the offset of each
        return local.cast(kind)
    ends = pa.array(list(pc.min_max(local).values()), local.type)
    first, last = ends.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).to_pylist()
    if last is None or last < _LATE or zone[:1] in {"+", "-"}:
        of_a_day = last is not None and 0 <= first >= last - _DAY
        shifted = _by_one_offset(local, ends, kind, zone, which) if of_a_day else None
        return _by_arrow(local, kind, zone, which) if shifted is None else shifted
    is_late = pc.greater_equal(local.cast(pa.timestamp("s"), safe=False), pa.scalar(_LATE).cast(pa.timestamp("s")))
    early = _by_arrow(pc.if_else(is_late, pa.scalar(None, local.type), local), kind, zone, which)
    return pc.if_else(is_late, _by_rule(local, kind, zone, which), early)


def _by_one_offset(local: pa.Array, ends: pa.Array, kind: pa.TimestampType, zone: str, which: str) -> pa.Array | None:
    """Converts times of a day, of which the first and the last are given; None where clocks change between these.

    They do not change twice in a day: where both ends have one offset, so has all between.
    """
    there, utc = (values.cast(pa.timestamp(kind.unit)) for values in (ends, _by_arrow(ends, kind, zone, which)))
    shift = pc.subtract(utc, there)
    return pc.add(local.cast(there.type), shift[0]).cast(kind) if shift[0] == shift[1] else None


def _by_arrow(local: pa.Array, kind: pa.TimestampType, zone: str, which: str) -> pa.Array:
    with contextlib.suppress(pa.ArrowInvalid):  # raised where one falls into an hour that is skipped
        return pc.assume_timezone(local, zone, ambiguous=which).cast(kind)
    found = pc.assume_timezone(local, zone, ambiguous=which, nonexistent="earliest")
    return pc.add(found, pc.subtract(local, pc.local_timestamp(found))).cast(kind)


def _by_rule(local: pa.Array, kind: pa.TimestampType, zone: str, which: str) -> pa.Array:
    """Converts times from 2037 on like `in_zone`; what others become does not matter."""
    begins, offsets = offsets_of(zone, _LATE - _STEP, _LISTED + _CYCLE)
    seconds = local.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).fill_null(0).to_numpy()
    before = np.append(offsets[:1], offsets[:-1])
    changes = begins + (np.maximum(before, offsets) if which == "earliest" else offsets)
    seconds = np.where(seconds < _LISTED, seconds, _LISTED + (seconds - _LISTED) % _CYCLE)
    place = np.searchsorted(changes, seconds, side="right") - 1
    shift = pa.array(offsets[np.maximum(place, 0)]).cast(pa.duration("s")).cast(pa.duration(kind.unit))
    return pc.subtract(local.cast(pa.timestamp(kind.unit)), shift).cast(kind)


@functools.lru_cache(maxsize=64)
def offsets_of(zone: str, first: int, last: int) -> Offsets:
    """Finds a zone's offsets between two seconds from 1970; one that holds for less than two weeks may be missed."""
    clock = ZoneInfo(zone)

    def offset(second: int) -> int:
        at = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=second)
        found = at.astimezone(clock).utcoffset()
        assert found is not None
        return found.days * 86_400 + found.seconds

    begins, seconds = [first], [offset(first)]
    for end in range(first + _STEP, last + _STEP, _STEP):
        if (now := offset(end)) != seconds[-1]:
            low, high = end - _STEP, end
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset(middle) == seconds[-1] else (low, middle)
            begins.append(high)
            seconds.append(now)
    return Offsets(np.array(begins), np.array(seconds))


def seconds_from_utc(zone: str) -> list[int]:
    """The offsets from UTC that a zone's clocks have had since 1970, and will have.

    Args:
        zone: Arrow's name of it.
    """
    if zone[:1] in {"+", "-"}:
        hours, minutes = map(int, zone[1:].split(":"))
        return [(hours * 60 + minutes) * (-60 if zone[0] == "-" else 60)]
    return sorted(set(offsets_of(zone, 0, _LATE + _STEP).seconds.tolist()))


def first_change(zone: str) -> int | None:
    """The microsecond from 1970 in which a zone's clocks ran otherwise for the first time; None for never."""
    if zone[:1] in {"+", "-"}:
        return None
    begins = offsets_of(zone, -5_000_000_000, _LATE).begins
    return int(begins[1]) * _SECOND if len(begins) > 1 else None
