"""Times as CSV, JSON and ORC files have them: written as text, or without the zone that they are of."""

from __future__ import annotations

import contextlib
import re
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.values import rebuilt

_ZONED: Final = r"(Z|[+-]\d{2}(:?\d{2})?)$"
_CLOCK: Final = r":\d{2}"
_BELOW_MICROSECONDS: Final = r"(\.\d{6})\d+"
_WITH_MICROSECONDS: Final = len("2026-01-01T00:00:00.000000")


def as_text(kind: pa.DataType) -> pa.DataType:
    """A type, but with text for its times and dates, and for those within its lists and structs."""
    is_time = (pa.types.is_timestamp, pa.types.is_date)
    return rebuilt(kind, lambda part: pa.string() if any(is_one(part) for is_one in is_time) else part)


def parsed(texts: pa.Array, kind: pa.TimestampType, zone: str) -> pa.Array:
    """Times written as text.

    Args:
        texts: n of them, ISO 8601. What is less than a microsecond is cut, as Spark does.
        kind: with a zone or without.
        zone: of texts that name none, where they are to be instants.

    Raises:
        ArrowInvalid: a text that is no such time, or names a zone where there is none.
    """
    longest = pc.max(pc.binary_length(texts)).as_py()
    if longest is not None and longest > _WITH_MICROSECONDS and kind.unit != "ns":
        texts = pc.replace_substring_regex(texts, _BELOW_MICROSECONDS, r"\1")
    return texts.cast(kind) if kind.tz is None else _instants(texts, kind, zone)


def in_zone(local: pa.Array, kind: pa.TimestampType, zone: str) -> pa.Array:
    """Local times as instants, as Java has it: by the offset before, where clocks skip an hour or repeat one.

    Args:
        local: n of them, in the unit of ``kind``.
        kind: of the instants.
        zone: Arrow's name of it.
    """
    with contextlib.suppress(pa.ArrowInvalid):  # raised where one falls into an hour that is skipped
        return pc.assume_timezone(local, zone, ambiguous="earliest").cast(kind)
    found = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="earliest")
    return pc.add(found, pc.subtract(local, pc.local_timestamp(found))).cast(kind)


def arrow_zone(name: str) -> str:
    """Arrow's spelling of a zone that Spark knows: ``GMT+2`` is ``+02:00``.

    Raises:
        ArrowInvalid: no such zone.
    """
    offset = re.fullmatch(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2}))?", name)
    if offset is not None:
        name = f"{offset.group(1)}{int(offset.group(2)):02}:{offset.group(3) or '00'}"
    name = {"Z": "UTC", "UT": "UTC"}.get(name, name)
    pc.assume_timezone(pa.array([0], pa.timestamp("us")), name)
    return name


def _instants(texts: pa.Array, kind: pa.TimestampType, zone: str) -> pa.Array:
    local = pa.timestamp(kind.unit)
    # All or none name a zone, as a rule. A cast that fails words an error for each text, ten times what one takes
    # that does not.
    first = pc.first(texts).as_py()
    if first is None or re.search(_ZONED, first) is None:
        with contextlib.suppress(pa.ArrowInvalid):
            return in_zone(texts.cast(local), kind, zone)
    else:
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(kind)
    # some name a zone and some do not, or one is no time
    has_zone = pc.and_(pc.match_substring_regex(texts, _CLOCK), pc.match_substring_regex(texts, _ZONED))
    nothing = pa.scalar(None, pa.string())
    found = in_zone(pc.if_else(has_zone, nothing, texts).cast(local), kind, zone)
    return pc.coalesce(found, pc.if_else(has_zone, texts, nothing).cast(kind))
