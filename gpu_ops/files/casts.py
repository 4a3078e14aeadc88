"""Columns of files in the types they are declared with: nothing is lost or guessed at on the way.

Arrow's own cast would read a number as text or as true, and a time as its day. Here a type becomes another of its kind.

Times of CSV, JSON and ORC files are written as text, or without the zone that they are of.
"""

from __future__ import annotations

import contextlib
import re
from typing import Final

import numpy as np
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


def fits(there: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a file's type is of the kind that was declared.

    Lists, maps and structs are by what they hold; a struct may lack fields, which are null then. A time without a zone
    may become an instant, but no instant a time without a zone.
    """
    t = pa.types
    if there == wanted or t.is_null(there):
        return True
    if t.is_dictionary(there):
        return fits(there.value_type, wanted)
    if t.is_struct(wanted):
        fields = {field.name: field.type for field in wanted}
        return bool(t.is_struct(there)) and all(fits(x.type, fields[x.name]) for x in there if x.name in fields)
    if t.is_map(wanted):
        return bool(t.is_map(there)) and all(map(fits, (there.key_type, there.item_type), _map_types(wanted)))
    if t.is_list(wanted):
        lists = t.is_list(there) or t.is_large_list(there) or t.is_fixed_size_list(there)
        return bool(lists) and fits(there.value_type, wanted.value_type)
    if t.is_floating(wanted):
        return bool(t.is_floating(there)) and there.bit_width <= wanted.bit_width
    if t.is_string(wanted) or t.is_binary(wanted):
        return bool(_is_bytes(there) or t.is_string(there) or t.is_large_string(there) or t.is_string_view(there))
    if t.is_timestamp(wanted):
        # so Spark has a time without a zone in ORC
        counted = t.is_int64(there) and wanted.tz is None
        return bool(counted or (t.is_timestamp(there) and (there.tz is None or wanted.tz is not None)))
    kinds = (t.is_integer, t.is_decimal, t.is_date, t.is_time)
    # and so Spark has an interval in ORC and Parquet
    lasting = t.is_duration(wanted) and (t.is_duration(there) or t.is_int64(there))
    return bool(lasting or any(kind(there) and kind(wanted) for kind in kinds))


def keeps(there: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a type that `fits` another surely has no value that the other has no place for."""
    t = pa.types
    if rebuilt(there, lambda x: x, bare=True) == rebuilt(wanted, lambda x: x, bare=True):
        return True
    if t.is_signed_integer(there) and t.is_signed_integer(wanted):
        return bool(there.bit_width <= wanted.bit_width)
    if t.is_timestamp(there) and t.is_timestamp(wanted):
        return bool(there.unit == wanted.unit)
    return bool(t.is_floating(there) and t.is_floating(wanted))


def cast(values: pa.Array, kind: pa.DataType, zone: str) -> pa.Array:
    """Values of a type that `fits`, or texts of times (`gpu_ops.files.casts.as_text`), as the type itself.

    Args:
        values: n of them.
        kind: what they are to be.
        zone: of times that name none and are to be instants.

    Returns:
        n values.

    Raises:
        ArrowInvalid: a value that the type cannot hold, or a text that is none of its values.
    """
    t = pa.types
    if values.type == kind:
        return values
    if t.is_dictionary(values.type):
        return cast(values.dictionary_decode(), kind, zone)
    if t.is_null(values.type):
        return pa.nulls(len(values), kind)
    if t.is_nested(kind):
        return _nested(values, kind, zone)
    return cast_plain(values, kind, zone)


def cast_plain(values: pa.Array, kind: pa.DataType, zone: str) -> pa.Array:
    """Values that hold no others; arguments and errors as those of `cast`."""
    t = pa.types
    if t.is_timestamp(kind):
        if t.is_string(values.type):
            return parsed(values, kind, zone)
        if t.is_timestamp(values.type) and values.type.tz is None and kind.tz is not None and zone != "UTC":
            return in_zone(values.cast(pa.timestamp(kind.unit)), kind, zone)
    return values.cast(kind)


def _nested(values: pa.Array, kind: pa.DataType, zone: str) -> pa.Array:
    if values.offset:
        values = values.take(pa.array(np.arange(len(values))))  # its parts would not begin where it does
    if pa.types.is_struct(kind):
        children = []
        for field in kind:
            index = values.type.get_field_index(field.name)
            there = pa.nulls(len(values), field.type) if index < 0 else values.field(index)
            children.append(cast(there, field.type, zone))
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=values.is_null())
    if pa.types.is_map(kind):
        keys, items = (
            cast(part, x, zone) for part, x in zip((values.keys, values.items), _map_types(kind), strict=True)
        )
        return pa.MapArray.from_arrays(values.offsets, keys, items, type=kind, mask=values.is_null())
    if not pa.types.is_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    items = cast(values.values, kind.value_type, zone)
    return pa.ListArray.from_arrays(values.offsets, items, type=kind, mask=values.is_null())


def _map_types(kind: pa.MapType) -> tuple[pa.DataType, pa.DataType]:
    return kind.key_type, kind.item_type


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
