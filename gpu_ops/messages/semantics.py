"""How values are written that a schema describes: Avro's logical types, Kafka Connect's and Debezium's semantic ones.

The rules are those of Avro 1.12 ("Logical Types"), of ``org.apache.kafka.connect.data`` and of Debezium's "Data types".
A name that is in none of them says nothing: the value is what it is without it, as Avro has it for unknown ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

Place = tuple[str, ...]
"""A column, and what it is within that: names of fields, and `ELEMENT` for what lists hold."""

Encodings = Mapping[Place, str]
"""How values are written, each one of `gpu_ops.messages.encodings.ENCODINGS`, or what follows below."""

ELEMENT: Final = "[]"

UUID: Final = "uuid"
"""The 16 bytes of a UUID."""

SCALED: Final = "scaled"
"""An object of a scale and the unscaled bytes of a decimal, whose scale is each value's own."""

_DEBEZIUM: Final = "io.debezium.time."
_CONNECT: Final = "org.apache.kafka.connect.data."

_INSTANTS: Final = {
    "timestamp-millis": "ms", "timestamp-micros": "us", "timestamp-nanos": "ns",
    "local-timestamp-millis": "ms", "local-timestamp-micros": "us", "local-timestamp-nanos": "ns",
    f"{_DEBEZIUM}Timestamp": "ms", f"{_DEBEZIUM}MicroTimestamp": "us", f"{_DEBEZIUM}NanoTimestamp": "ns",
    f"{_CONNECT}Timestamp": "ms",
}  # fmt: skip
_DATES: Final = ("date", f"{_DEBEZIUM}Date", f"{_CONNECT}Date")
_DECIMALS: Final = ("decimal", f"{_CONNECT}Decimal")
_VARIABLE: Final = "io.debezium.data.VariableScaleDecimal"
_NUMBERS: Final = (
    "time-millis", "time-micros", f"{_CONNECT}Time", f"{_DEBEZIUM}Time", f"{_DEBEZIUM}MicroTime",
    f"{_DEBEZIUM}NanoTime", f"{_DEBEZIUM}Year", f"{_DEBEZIUM}MicroDuration", f"{_DEBEZIUM}NanoDuration",
)  # fmt: skip
"""Times of a day, durations and years, which are numbers where no type is declared for them."""
_BYTES: Final = ("duration", "big-decimal")
"""Bytes that mean something which no declared type holds: they may be had as they are."""
_OF_TEXTS: Final = ("io.debezium.", _CONNECT)
"""Texts of theirs are no times, numbers or bytes in disguise, but for the following."""
_TEXTS_OF_TIMES: Final = (f"{_DEBEZIUM}ZonedTimestamp", f"{_DEBEZIUM}IsoTimestamp")


class Written(NamedTuple):
    """What a schema says of a value.

    Attributes:
        kind: Avro's name of its type, or ``struct``.
        name: what it means: the logical or semantic type, or nothing.
        scale: of a decimal.
        fields: of a struct, the schemas of each.
        item: the schema of what a list or map holds.
    """

    kind: str
    name: str = ""
    scale: int = 0
    fields: Mapping[str, Any] = {}
    item: Any = None


Look = Callable[[Any], Sequence[Written]]
"""What a schema says; several things where it is a union, of which null is left out."""


class MisfitError(ValueError):
    """Values of a schema that are none of the declared type."""


def encodings_of(
    rows: Iterable[Any], look: Look, wanted: pa.StructType, declared: Mapping[str, str], *, json: bool
) -> Encodings:
    """How the values of rows are written.

    Args:
        rows: their schemas; several where they may be of several.
        look: reads a schema.
        wanted: the declared columns.
        declared: by column one of `gpu_ops.messages.encodings.ENCODINGS`, for what the schema gives no name.
        json: whether the values are JSON, where a text may be a time, a number or bytes.

    Raises:
        MisfitError: a column that the schema has in another type, or in several ways; says which.
    """
    found: dict[Place, str] = {}
    for row in rows:
        for one in look(row):
            for field in wanted:
                if one.kind == "struct" and field.name in one.fields:
                    given = declared.get(field.name) if json else None
                    for place, way in _ways(one.fields[field.name], look, field.type, (field.name,), given, json=json):
                        if found.setdefault(place, way) != way:
                            raise MisfitError(f"column {shown(place)!r} is written in ways {found[place]}, {way}")
    return found


def shown(place: Place) -> str:
    """A place as errors have it."""
    return ".".join(place).replace(f".{ELEMENT}", ELEMENT)


def _ways(
    schema: Any, look: Look, wanted: pa.DataType, place: Place, given: str | None, *, json: bool
) -> Iterator[tuple[Place, str]]:
    t = pa.types
    for one in look(schema):
        if t.is_struct(wanted) and one.kind in ("struct", "map") and (one.kind == "struct" or json):
            for field in wanted:
                part = one.item if one.kind == "map" else one.fields.get(field.name)
                if part is not None:
                    yield from _ways(part, look, field.type, (*place, field.name), given, json=json)
        elif t.is_list(wanted) and one.kind == "array":
            yield from _ways(one.item, look, wanted.value_type, (*place, ELEMENT), given, json=json)
        else:
            way = _way(one, wanted, given, json=json)
            if way is None:
                what = one.name or one.kind
                more = ""
                if json and one.kind == "string" and _is_bytes(wanted):
                    more = ": say whether it is hex, base64 or base64-url-safe, by encoded="
                raise MisfitError(f"column {shown(place)!r} is {what} in its schema, and not {wanted}{more}")
            yield place, way


def _way(one: Written, wanted: pa.DataType, given: str | None, *, json: bool) -> str | None:
    """How a value is written that is to be of a type; None where it cannot be."""
    t, kind, name = pa.types, one.kind, one.name
    if name in _INSTANTS:
        zoned = t.is_timestamp(wanted) and (wanted.tz is None or not name.startswith("local-"))
        return _INSTANTS[name] if zoned else _plain(one, wanted)
    if name in _DATES:
        return "days" if t.is_date(wanted) else _plain(one, wanted)
    if name in _DECIMALS:
        return f"base64:{one.scale}" if t.is_decimal(wanted) else None
    if name == _VARIABLE:
        return SCALED if t.is_decimal(wanted) else None
    if name == UUID and kind == "fixed":
        return UUID if t.is_string(wanted) else _as_it_is(one, wanted, given, json=json)
    if name in _NUMBERS:
        return "text" if t.is_integer(wanted) else None
    if name in _BYTES:
        return _as_it_is(one, wanted, given, json=json) if _is_bytes(wanted) else None
    if name in _TEXTS_OF_TIMES and t.is_timestamp(wanted):
        return "text"
    if kind == "string" and name.startswith(_OF_TEXTS):
        return "text" if t.is_string(wanted) else None
    return _as_it_is(one, wanted, given, json=json)


def _plain(one: Written, wanted: pa.DataType) -> str | None:
    """Debezium's times as the numbers they are; those of Avro are times to everyone."""
    return "text" if pa.types.is_integer(wanted) and "." in one.name else None


def _as_it_is(one: Written, wanted: pa.DataType, given: str | None, *, json: bool) -> str | None:
    t, kind = pa.types, one.kind
    numbers = t.is_integer(wanted) or t.is_floating(wanted) or t.is_decimal(wanted)
    if kind in ("int", "long"):
        if given in ("ms", "us", "ns", "days") and (t.is_timestamp(wanted) or t.is_date(wanted)):
            return given
        return "text" if numbers else None
    if kind in ("float", "double"):
        wide = t.is_floating(wanted) and (json or kind == "float" or wanted.bit_width == 64)
        return "text" if wide or (json and t.is_decimal(wanted)) else None
    if kind == "boolean":
        return "text" if t.is_boolean(wanted) else None
    if kind in ("string", "enum"):
        if json and (_is_bytes(wanted) or t.is_decimal(wanted)) and given is not None:
            return given
        parsed = json and (t.is_timestamp(wanted) or t.is_date(wanted) or t.is_decimal(wanted))
        return "text" if t.is_string(wanted) or parsed else None
    if kind in ("bytes", "fixed") and _is_bytes(wanted):
        return "base64" if json else "text"
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
