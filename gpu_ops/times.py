"""Times and dates written as text, as CSV and JSON files have them: in columns, and within lists and structs."""

from __future__ import annotations

import re
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_ZONED: Final = r"(Z|[+-]\d{2}(:?\d{2})?)$"
_CLOCK: Final = r":\d{2}"
_BELOW_MICROSECONDS: Final = r"(\.\d{6})\d+"
_WITH_MICROSECONDS: Final = len("2026-01-01T00:00:00.000000")


def as_text(kind: pa.DataType) -> pa.DataType:
    """A type, but with text for its times and dates, and for those within its lists and structs."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(as_text(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(as_text(field.type)) for field in kind])
    return kind


def from_text(values: pa.Array, kind: pa.DataType, zone: str) -> pa.Array:
    """Values of the type `as_text`, as the type itself.

    Args:
        values: whole, not a slice.
        kind: what they are.
        zone: of times that name none and are to be instants.

    Raises:
        ArrowInvalid: a text that is no such time, or names a zone where there is none.
    """
    if values.type == kind:
        return values
    if pa.types.is_list(kind):
        items = from_text(values.values, kind.value_type, zone)
        return pa.ListArray.from_arrays(values.offsets, items, type=kind, mask=values.is_null())
    if pa.types.is_struct(kind):
        children = [from_text(values.field(place), kind.field(place).type, zone) for place in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=values.is_null())
    if not pa.types.is_timestamp(kind):
        return values.cast(kind)
    longest = pc.max(pc.binary_length(values)).as_py()
    if longest is not None and longest > _WITH_MICROSECONDS and kind.unit != "ns":
        values = pc.replace_substring_regex(values, _BELOW_MICROSECONDS, r"\1")  # Spark cuts them, too
    return values.cast(kind) if kind.tz is None else instants(values, kind, zone)


def instants(texts: pa.Array, kind: pa.TimestampType, zone: str) -> pa.Array:
    """Times written as text, as instants.

    Args:
        texts: ISO 8601, each with a zone's offset or without.
        kind: a timestamp with a zone.
        zone: of those without an offset.

    Raises:
        ArrowInvalid: a text that is no time.
    """
    clocked = pc.match_substring_regex(texts, _CLOCK)
    has_zone = pc.and_(clocked, pc.match_substring_regex(texts, _ZONED))
    if pc.all(has_zone).as_py():  # also of nothing, and of nulls only
        return texts.cast(kind)
    local = pc.if_else(has_zone, pa.scalar(None, pa.string()), texts).cast(pa.timestamp(kind.unit))
    found = _in_zone(local, zone).cast(kind)
    if not pc.any(has_zone).as_py():
        return found
    other = pc.if_else(has_zone, texts, pa.scalar(None, pa.string())).cast(kind)
    return pc.coalesce(found, other)


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


def _in_zone(local: pa.Array, zone: str) -> Any:
    """Local times as instants, as Java has it: where clocks skip an hour, by the offset before."""
    found = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="earliest")
    return pc.add(found, pc.subtract(local, pc.local_timestamp(found)))
