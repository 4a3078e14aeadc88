"""How values of declared types are written in messages, by their schema or else as declared, and their decoding.

The rules are those of Avro 1.12 ("Logical Types"), of ``org.apache.kafka.connect.data`` and Kafka Connect's JSON
converter, of Debezium's "Data types" (``time.precision.mode``, ``decimal.handling.mode``, ``binary.handling.mode``),
and of Spark's ``to_json``. A name that is in none of them says nothing: the value is what it is without it, as Avro has
it for unknown ones.

**Values that a change does not carry** are large ones that did not change, for which Debezium has a placeholder. What
stands for them is that of Debezium's connector for Postgres (``UnchangedToastedPlaceholder``): the text itself, its
bytes, a map of it to itself; in arrays one element of it, or its bytes as that many numbers; of a UUID the one that
Java makes of its bytes. Geometries have points that nobody has.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.errors import DescriptionError
from gpu_ops.messages.decimals import of_scales, unscaled
from gpu_ops.messages.times import instants, read_times
from gpu_ops.values import cast_plain

Place = tuple[str, ...]
"""A column, and what it is within that: names of fields, and `ELEMENT` for what lists hold."""

Encodings = Mapping[Place, str]
"""How values are written, each one of `gpu_ops.messages.encodings.ENCODINGS`, or what follows below."""

ELEMENT: Final = "[]"
UUID: Final = "uuid"
"""The 16 bytes of a UUID."""

SCALED: Final = "scaled"
"""An object of a scale and the unscaled bytes of a decimal, whose scale is each value's own."""

IN_UTC: Final = "in utc"
"""Texts of instants, for a type without a zone: as numbers since 1970 they are the times in UTC then."""

_DEBEZIUM: Final = "io.debezium.time."
_CONNECT: Final = "org.apache.kafka.connect.data."
_INSTANTS: Final = {
    "timestamp-millis": "ms", "timestamp-micros": "us", "timestamp-nanos": "ns",
    "local-timestamp-millis": "ms", "local-timestamp-micros": "us", "local-timestamp-nanos": "ns",
    f"{_DEBEZIUM}Timestamp": "ms", f"{_DEBEZIUM}MicroTimestamp": "us", f"{_DEBEZIUM}NanoTimestamp": "ns",
    f"{_CONNECT}Timestamp": "ms",
}  # fmt: skip

_DATES: Final = ("date", f"{_DEBEZIUM}Date", f"{_CONNECT}Date")
CONNECT_DECIMAL: Final = f"{_CONNECT}Decimal"
_DECIMALS: Final = ("decimal", CONNECT_DECIMAL)
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
TIMES: Final = ("ms", "us", "ns")
"""Times as numbers since 1970, in UTC, or in no zone where the type has none."""

_OF_BYTES: Final[Mapping[str, tuple[str, Callable[[str], bytes]]]] = {
    "base64": ("^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$", binascii.a2b_base64),
    "base64-url-safe": ("^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$", base64.urlsafe_b64decode),
    "hex": ("^([0-9a-fA-F]{2})*$", binascii.unhexlify),
}
"""How bytes are written as text: its shape, and what reads it."""

ENCODINGS: Final = (*TIMES, "days", *_OF_BYTES, "text")
"""Besides: dates as days since 1970; bytes as base64 or hex; decimals as base64 of their unscaled bytes, ``base64:2``
with that scale where it is not the declared one; and what is the default, ISO 8601 or a number or text."""

NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")
"""How the floating-point numbers are written that JSON has none for: as texts."""

EncodingOf = Callable[[Place], str]
"""How a value in some place is written."""

PLACEHOLDER: Final = "__debezium_unavailable_value"
"""The default of Debezium's ``unavailable.value.placeholder``."""

_SHAPES: Final = tuple(
    bytes.fromhex(text)
    for text in (
        "0101000020e6100000000000fc83d797c1000000fc83d797c1",
        "0101000020e61000000c21e7fdff7f66401842cefbff7f5640",
        "0101000000000000fc83d797c1000000fc83d797c1",
    )
)

_HEX: Final = "hex:"
Lost = npt.NDArray[np.bool_]


class ValueSchema(NamedTuple):
    """The description that a schema gives of a value.

    Attributes:
        kind: Avro's name of its type, or ``struct``.
        name: what it means: the logical or semantic type, or nothing.
        scale: of a decimal; None if the schema has none that is a number.
        fields: of a struct, the schemas of each.
        item: the schema of what a list or map holds.
    """

    kind: str
    name: str = ""
    scale: int | None = None
    fields: Mapping[str, Any] = {}
    item: Any = None


Look = Callable[[Any], Sequence[ValueSchema]]
"""What a schema says; several things where it is a union, of which null is left out."""


def scale_of(value: object) -> int | None:
    """The scale that a schema gives, as a number or as Java's ``Integer.parseInt`` reads a text; None if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,10}", value) else None


class MisfitError(ValueError):
    """Values of a schema that are none of the declared type."""


def encodings_of(
    rows: Iterable[Any], look: Look, wanted: pa.StructType, declared: Mapping[str, str], *, json: bool
) -> Encodings:
    """Finds how the values of rows are written.

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


def _way(one: ValueSchema, wanted: pa.DataType, given: str | None, *, json: bool) -> str | None:
    """Finds how a value is written that is to be of a type; None where it cannot be."""
    t, kind, name = pa.types, one.kind, one.name
    if name in _INSTANTS:
        zoned = t.is_timestamp(wanted) and (wanted.tz is None or not name.startswith("local-"))
        return _INSTANTS[name] if zoned else _plain(one, wanted)
    if name in _DATES:
        return "days" if t.is_date(wanted) else _plain(one, wanted)
    if name in _DECIMALS:
        return f"base64:{one.scale}" if t.is_decimal(wanted) and one.scale is not None else None
    if name == _VARIABLE:
        return SCALED if t.is_decimal(wanted) else None
    if name == UUID and kind == "fixed":
        return UUID if t.is_string(wanted) else _as_it_is(one, wanted, given, json=json)
    if name in _NUMBERS:
        return "text" if t.is_integer(wanted) else None
    if name in _BYTES:
        return _as_it_is(one, wanted, given, json=json) if _is_bytes(wanted) else None
    if name in _TEXTS_OF_TIMES and t.is_timestamp(wanted):
        return "text" if wanted.tz else IN_UTC
    if kind == "string" and name.startswith(_OF_TEXTS):
        return "text" if t.is_string(wanted) else None
    return _as_it_is(one, wanted, given, json=json)


def _plain(one: ValueSchema, wanted: pa.DataType) -> str | None:
    """Debezium's times as the numbers they are; those of Avro are times to everyone."""
    return "text" if pa.types.is_integer(wanted) and "." in one.name else None


def _as_it_is(one: ValueSchema, wanted: pa.DataType, given: str | None, *, json: bool) -> str | None:
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


def holds(kind: pa.DataType) -> bool:
    """Tells whether messages have values of a type."""
    t = pa.types
    if t.is_list(kind) or t.is_struct(kind):
        return all(holds(kind.field(part).type) for part in range(kind.num_fields))
    return not (t.is_nested(kind) or t.is_duration(kind) or t.is_time(kind) or t.is_null(kind))


def fits(encoding: str, kind: pa.DataType) -> bool:
    """Tells whether values of a type, or of one within it, may be written in an encoding."""
    t = pa.types
    if t.is_list(kind) or t.is_struct(kind):
        return any(fits(encoding, kind.field(part).type) for part in range(kind.num_fields))
    if encoding == "text":
        return True
    if encoding == "days":
        return bool(t.is_date(kind))
    if encoding in TIMES:
        return bool(t.is_timestamp(kind))
    return _is_bytes(kind) or (encoding == "base64" and bool(t.is_decimal(kind)))


def written(
    kind: pa.DataType, place: Place, ways: EncodingOf, path: str, texts: Set[str], *, json: bool
) -> pa.DataType:
    """The type in which Arrow has values before they are decoded.

    Args:
        kind: the declared one.
        place: where they are.
        ways: how they are written.
        path: their name, behind those of what they are in, as Arrow's errors have it.
        texts: paths of floating-point numbers that are texts, and of decimals in base64 that are numbers.
        json: whether Arrow reads them from JSON, and not from Python's own values.
    """
    t, encoding = pa.types, ways(place)
    if t.is_struct(kind):
        return pa.struct(
            [
                pa.field(x.name, written(x.type, (*place, x.name), ways, f"{path}/{x.name}", texts, json=json))
                for x in kind
            ]
        )
    if t.is_list(kind):
        return pa.list_(written(kind.value_type, (*place, ELEMENT), ways, f"{path}/[]", texts, json=json))
    data = pa.string() if json else pa.binary()
    if encoding == SCALED:
        return pa.struct([("scale", pa.int32()), ("value", data)])
    if encoding == UUID:
        return data
    if t.is_timestamp(kind):
        return pa.int64() if encoding in TIMES else pa.string()
    if t.is_date(kind):
        return pa.int32() if encoding == "days" else pa.string()
    if t.is_decimal(kind) and encoding.startswith("base64"):
        return kind if path in texts else data
    if _is_bytes(kind):
        return data
    return pa.string() if t.is_floating(kind) and path in texts else kind


class Decoding(NamedTuple):
    """The options by which values are decoded.

    Attributes:
        ways: how they are written.
        zone: of texts of times that name none, where they are to be instants.
        unavailable: the text that stands for bytes which a message does not carry, whatever bytes are written as.
    """

    ways: EncodingOf
    zone: str
    unavailable: str


def decoded(values: pa.Array, kind: pa.DataType, place: Place, how: Decoding) -> pa.Array:
    """Values as they were declared.

    Args:
        values: n of them, of the type that `written` says.
        kind: the declared one.
        place: where they are.
        how: see there.

    Raises:
        ArrowInvalid: one that is not written so, or that the type cannot hold.
    """
    t, encoding, unavailable = pa.types, how.ways(place), how.unavailable
    if t.is_nested(kind):
        if values.offset:
            values = values.take(pa.array(np.arange(len(values))))  # its parts would not begin where it does
        if t.is_list(kind):
            items = decoded(values.values, kind.value_type, (*place, ELEMENT), how)
            return pa.ListArray.from_arrays(values.offsets, items, type=kind, mask=values.is_null())
        below = dict(zip(values.type.names, values.flatten(), strict=True))  # null where the struct is
        parts = [decoded(below[x.name], x.type, (*place, x.name), how) for x in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=values.is_null())
    if encoding == SCALED:
        scales, data = values.flatten()
        return of_scales(values.is_valid(), scales, _bytes_of(data), kind)
    if t.is_timestamp(kind) and t.is_integer(values.type):
        return instants(values, encoding, kind)
    if t.is_date(kind) and t.is_integer(values.type):
        return values.cast(pa.date32()).cast(kind)
    if t.is_decimal(kind) and (t.is_string(values.type) or t.is_binary(values.type)) and encoding.startswith("base64"):
        _, _, scale = encoding.partition(":")
        return unscaled(_bytes_of(values), int(scale) if scale else kind.scale, kind)
    if encoding == UUID:
        return _uuids(values)
    if _is_bytes(kind) and t.is_string(values.type):
        missing = pc.fill_null(pc.equal(values, unavailable), fill_value=False)
        known = from_text(pc.if_else(missing, pa.scalar(None, pa.string()), values), encoding)
        return pc.if_else(missing, pa.scalar(unavailable.encode(), pa.binary()), known).cast(kind)
    if t.is_floating(kind) and t.is_string(values.type):
        texts = values.filter(pc.invert(pc.is_in(values, pa.array((*NOT_FINITE, None), pa.string()))))
        if len(texts):
            raise pa.ArrowInvalid(f"a text where a number is expected: {texts[0]}")
    if t.is_decimal(values.type):
        values.validate(full=True)  # Arrow's reader lets some through that have a digit too many
    if encoding == IN_UTC:
        return read_times(values, pa.timestamp(kind.unit, "UTC"), "UTC").cast(pa.timestamp(kind.unit))
    if t.is_string(values.type) and (t.is_timestamp(kind) or t.is_date(kind)):
        return read_times(values, kind, how.zone)
    return values if values.type == kind else cast_plain(values, kind, how.zone)


def _uuids(values: pa.BinaryArray) -> pa.StringArray:
    """UUIDs of n times 16 bytes, as RFC 9562 writes them."""
    return _each(values, lambda value: str(uuid.UUID(bytes=value)), pa.string())


def _bytes_of(values: pa.Array) -> pa.BinaryArray:
    return from_base64(values) if pa.types.is_string(values.type) else values


def from_text(texts: pa.StringArray, encoding: str) -> pa.BinaryArray:
    """Bytes of n texts.

    Args:
        texts: n of them.
        encoding: ``hex``, ``base64`` (RFC 4648, padded) or ``base64-url-safe``; else base64 where that is sure, as a
            text such as ``deadbeef`` may as well be hex (Debezium's ``binary.handling.mode``).

    Raises:
        ArrowInvalid: a text that is none, or may be either.
    """
    if encoding not in _OF_BYTES:
        either = texts.filter(pc.match_substring_regex(texts, "^([0-9a-f]{2})+$"))
        if len(either):
            raise pa.ArrowInvalid(f"hex or base64? Say by encoded= which it is: {either[0]}")
        encoding = "base64"
    shape, read = _OF_BYTES[encoding]
    wrong = texts.filter(pc.invert(pc.match_substring_regex(texts, shape)))
    if len(wrong):
        raise pa.ArrowInvalid(f"no {encoding}: {wrong[0]}")
    return _each(texts, read, pa.binary())


def from_base64(texts: pa.StringArray) -> pa.BinaryArray:
    """Bytes of n texts in base64; errors as `from_text`."""
    return from_text(texts, "base64")


def to_base64(values: pa.BinaryArray) -> pa.StringArray:
    """Texts in base64 (RFC 4648, padded) of n values of bytes."""
    return _each(values, functools.partial(binascii.b2a_base64, newline=False), pa.binary()).view(pa.string())


def _each(values: pa.Array, change: Callable[[Any], Any], kind: pa.DataType) -> pa.Array:
    """Values changed one by one, null for null: as quick as all at once where they are short, else quicker."""
    return pa.array([None if value is None else change(value) for value in values.to_pylist()], kind)


def text_of(placeholder: str) -> str:
    """A placeholder as it is in messages: Debezium takes its bytes in hex, too.

    Raises:
        DescriptionError: none, or bytes that are no text.
    """
    try:
        text = bytes.fromhex(placeholder.removeprefix(_HEX)).decode() if placeholder.startswith(_HEX) else placeholder
    except ValueError:
        text = ""
    if not text:
        raise DescriptionError(
            f"unavailable_value={placeholder!r} is no text, nor hex: and a text's bytes, as Debezium's "
            "unavailable.value.placeholder is"
        )
    return text


def unavailable(before: pa.Array, values: pa.Array, placeholder: str) -> Lost | None:
    """Flags the values that a message does not carry; None if all are there.

    Args:
        before: n values before they were decoded: of a struct with a member more, which a map of the placeholder has.
        values: the same, decoded.
        placeholder: Debezium's.
    """
    lost = _lost(values, placeholder)
    if pa.types.is_struct(before.type):
        member = before.type.get_field_index(placeholder)
        if member >= 0 and pa.types.is_struct(values.type):
            lost |= pc.and_(before.is_valid(), before.field(member).is_valid()).to_numpy(zero_copy_only=False)
    return lost if lost.any() else None


def _lost(values: pa.Array, placeholder: str) -> Lost:
    t, kind = pa.types, values.type
    if t.is_string(kind):
        made = uuid.UUID(bytes=hashlib.md5(placeholder.encode(), usedforsecurity=False).digest(), version=3)
        map_text = json.dumps({placeholder: placeholder}, separators=(",", ":"), ensure_ascii=False)
        return _among(values, [placeholder, map_text, str(made)])
    if t.is_binary(kind) or t.is_large_binary(kind):
        return _among(values, [placeholder.encode(), *_SHAPES])
    found = np.zeros(len(values), bool)
    if t.is_struct(kind):
        for part in values.flatten():
            found |= _lost(part, placeholder)
    if t.is_list(kind):
        sizes = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
        element, own = kind.value_type, placeholder.encode()
        number = t.is_integer(element) or t.is_floating(element) or t.is_decimal(element) or t.is_boolean(element)
        maybe = np.flatnonzero(sizes == (len(own) if number else 1))
        if maybe.size:
            parts = values.take(pa.array(maybe)).flatten()
            found[maybe] = _are_bytes(parts, own) if number else _lost(parts, placeholder)
    return found


def _are_bytes(numbers: pa.Array, own: bytes) -> Lost:
    """Flags lists of as many numbers as there are bytes that are these bytes; of decimals, in their units."""
    wanted = np.frombuffer(own, np.int8)
    if pa.types.is_boolean(numbers.type):
        return np.asarray(_floats(numbers).reshape(-1, wanted.size).all(axis=1))
    rows = _floats(numbers).reshape(-1, wanted.size)
    unit = rows[:, :1] / wanted[0]
    powers = 10.0 ** -np.arange(39 if pa.types.is_decimal(numbers.type) else 1)
    scaled = np.isclose(unit, powers, rtol=1e-9, atol=0).any(axis=1)
    return np.asarray(scaled & np.isclose(rows, wanted * unit, rtol=1e-9, atol=0).all(axis=1))


def _floats(numbers: pa.Array) -> npt.NDArray[np.float64]:
    plain = numbers.cast(pa.int8()) if pa.types.is_boolean(numbers.type) else numbers
    return np.asarray(pc.fill_null(plain.cast(pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False))


def _among(values: pa.Array, known: list[str] | list[bytes]) -> Lost:
    found: Lost = pc.is_in(values, pa.array(known, values.type)).to_numpy(zero_copy_only=False)
    return found.copy()
