"""Each type of numbers and times that Kafka Connect and Debezium have, at its ends: the right value, or a bad message.

The types are those of ``org.apache.kafka.connect.data`` and ``io.debezium.time``, ``io.debezium.data``: what they are
written as (``SchemaBuilder.int32()``, ``string()``, ...) and what of; in JSON with the schema, and in Avro as
Confluent's ``AvroData`` makes it of the same.
"""

from __future__ import annotations

import base64
import decimal as exact
import fractions
import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.messages.decimals import unscaled
from gpu_ops.messages.rows import MessageFormat
from messages.test_round_trip import bits

pytestmark = pytest.mark.thorough

T, C, D = "io.debezium.time.", "org.apache.kafka.connect.data.", "io.debezium.data."
UTC, NTZ, DATE, INT, LONG, TEXT = (
    pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.date32(), pa.int32(), pa.int64(), pa.string(),
)  # fmt: skip
INT_MIN, INT_MAX, LONG_MIN, LONG_MAX = -(2**31), 2**31 - 1, -(2**63), 2**63 - 1
BAD = object()
YEAR_1, YEAR_9999, YEAR_10000 = -62135596800000000, 253402300799999999, 253402300800000000
"""In microseconds: the first of year 1, the last of year 9999, and one more."""

DAYS = [(number, number) for number in (INT_MIN, -719528, -719162, -1, 0, 2932896, 2932897, INT_MAX)]
MILLIS = [
    (LONG_MIN, BAD), (-9223372036854776, BAD), (-9223372036854775, -9223372036854775000), (YEAR_1 // 1000, YEAR_1),
    (-1, -1000), (0, 0), (YEAR_9999 // 1000, YEAR_9999 - 999), (YEAR_10000 // 1000, YEAR_10000),
    (9223372036854775, 9223372036854775000), (9223372036854776, BAD), (LONG_MAX, BAD),
]  # fmt: skip
MICROS = [
    (number, number) for number in (LONG_MIN, YEAR_1, -1, 0, YEAR_9999, YEAR_10000, 9223372036825200000, LONG_MAX)
]
NANOS = [
    (LONG_MIN, -9223372036854776), (-1001, -2), (-1000, -1), (-999, -1), (-1, -1), (0, 0), (999, 0), (1000, 1),
    (LONG_MAX, 9223372036854775),
]  # fmt: skip
ZONED = [
    ("0001-01-01T00:00:00Z", YEAR_1), ("0000-12-31T23:59:59.999999Z", YEAR_1 - 1),
    ("-0001-01-01T00:00:00Z", -62198755200000000),
    ("1969-12-31T23:59:59.999999999Z", -1), ("1970-01-01T00:00Z", 0), ("1970-01-01T01:00:00+01:00", 0),
    ("9999-12-31T23:59:59.999999Z", YEAR_9999), ("9999-12-31T23:59:59.999999-05:00", YEAR_9999 + 5 * 3_600_000_000),
    ("+10000-01-01T00:00:00Z", YEAR_10000), ("+294247-01-10T04:00:54.775807Z", LONG_MAX),
    ("+294247-01-10T04:00:54.775808Z", BAD), ("+292278994-08-16T23:00:00Z", BAD), ("infinity", BAD), ("-infinity", BAD),
    ("2026-02-29T00:00:00Z", BAD), ("2026-01-01T24:00:00Z", BAD), ("2016-12-31T23:59:60Z", BAD), ("", BAD),
]  # fmt: skip
WHOLE = [(number, number) for number in (INT_MIN, -1, 0, INT_MAX)]
WIDE = [(number, number) for number in (LONG_MIN, -1, 0, LONG_MAX)]
AS_IT_IS = [(text, text) for text in ("", "P-178956970Y-8M", "23:59:59.999999999+14:00", "24:00:00Z", "-0001-01-01Z")]
IN_TEXT = (f"{T}ZonedTimestamp", f"{T}IsoTimestamp")
OF_THE_DAY = (f"{T}Time", f"{C}Time", f"{T}Year")
COUNTED = ("MicroTime", "NanoTime", "MicroDuration", "NanoDuration", "MicroTimestamp", "NanoTimestamp", "Timestamp")
TABLE = [
    *((f"{owner}Date", "int32", kind, DAYS) for owner in (T, C) for kind in (DATE, INT, LONG)),
    *((name, "int64", kind, MILLIS) for name in (f"{T}Timestamp", f"{C}Timestamp") for kind in (UTC, NTZ)),
    *((f"{T}MicroTimestamp", "int64", kind, MICROS) for kind in (UTC, NTZ)),
    *((f"{T}NanoTimestamp", "int64", kind, NANOS) for kind in (UTC, NTZ)),
    *((name, "string", kind, ZONED) for name in IN_TEXT for kind in (UTC, NTZ)),
    *((name, "string", TEXT, [(text, text) for text, _ in ZONED]) for name in IN_TEXT),
    *((name, "int32", kind, WHOLE) for name in OF_THE_DAY for kind in (INT, LONG)),
    *((f"{T}{name}", "int64", LONG, WIDE) for name in COUNTED),
    *((f"{T}{name}", "string", TEXT, AS_IT_IS) for name in ("ZonedTime", "IsoTime", "IsoDate", "Interval")),
    *((f"{D}{name}", "string", TEXT, AS_IT_IS) for name in ("Uuid", "Json", "Enum", "EnumSet", "Xml")),
    (f"{D}Bits", "bytes", pa.binary(), [(x, x) for x in (b"", b"\x00", b"\xff" * 20)]),
]  # fmt: skip
CASES = [(*row[:3], value, right) for row in TABLE for value, right in row[3]]
AVRO = {"int32": "int", "int64": "long", "string": "string", "bytes": "bytes"}


def decimal(scale: Any, value: bytes, kind: pa.DataType, right: Any) -> tuple[Any, ...]:
    return scale, value, kind, right


def of(number: int) -> bytes:
    """As ``BigInteger.toByteArray`` has it."""
    return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)


MOST = 10**38 - 1
DECIMALS = [
    decimal("-2", of(1), pa.decimal128(20, 2), "100.00"), decimal(-2, of(-1), pa.decimal128(20, 0), "-100"),
    decimal("-37", of(1), pa.decimal128(38, 0), str(10**37)), decimal("-38", of(1), pa.decimal128(38, 0), BAD),
    decimal("-21", of(-1), pa.decimal128(37, 37), BAD),
    decimal("-33", of(-5 * 10**31), pa.decimal128(38, 0), BAD),
    decimal("-84", of(1), pa.decimal128(38, 0), BAD), decimal("-84", of(0), pa.decimal128(38, 0), "0"),
    decimal("-2147483648", of(1), pa.decimal128(38, 0), BAD), decimal("2147483647", of(1), pa.decimal128(38, 0), BAD),
    decimal("2147483647", of(0), pa.decimal128(38, 2), "0.00"), decimal("0", of(MOST), pa.decimal128(38, 0), str(MOST)),
    decimal("0", of(-MOST), pa.decimal128(38, 0), str(-MOST)), decimal("0", of(MOST + 1), pa.decimal128(38, 0), BAD),
    decimal("38", of(MOST), pa.decimal128(38, 38), "0." + "9" * 38),
    decimal("39", of(MOST), pa.decimal128(38, 38), BAD),
    decimal("127", of(5 * 10**125), pa.decimal128(10, 2), "0.05"), decimal("127", of(1), pa.decimal128(38, 38), BAD),
    decimal("2", b"\0" * 20 + of(125), pa.decimal128(10, 2), "1.25"),
    decimal("2", b"\xff" * 20, pa.decimal128(10, 2), "-0.01"),
    decimal("2", of(12345), pa.decimal128(5, 2), "123.45"), decimal("2", of(12345), pa.decimal128(5, 1), BAD),
    decimal("2", of(12340), pa.decimal128(5, 1), "123.4"), decimal("2", of(123456), pa.decimal128(5, 2), BAD),
    decimal("0", b"", pa.decimal128(5, 2), BAD), decimal("0", b"\x7f" * 300, pa.decimal128(38, 0), BAD),
    decimal(None, of(1), pa.decimal128(5, 2), BAD), decimal("", of(1), pa.decimal128(5, 2), BAD),
    decimal("two", of(1), pa.decimal128(5, 2), BAD), decimal("1.0", of(1), pa.decimal128(5, 2), BAD),
    decimal(True, of(1), pa.decimal128(5, 2), BAD),
]  # fmt: skip


def outcomes(connect: dict[str, Any], avro: Any, value: Any, kind: pa.DataType) -> list[Any]:
    """What both formats make of a value: it, or `BAD`."""
    schema = pa.schema([("c", kind)])
    shown = base64.b64encode(value).decode() if isinstance(value, bytes) else value
    if isinstance(value, dict):
        shown = {x: base64.b64encode(y).decode() if isinstance(y, bytes) else y for x, y in value.items()}
    message = {"schema": {"type": "struct", "fields": [{"field": "c", **connect}]}, "payload": {"c": shown}}
    row = {"type": "record", "name": "Row", "fields": [{"name": "c", "type": avro}]}
    out = io.BytesIO()
    fastavro.schemaless_writer(
        out, fastavro.parse_schema(json.loads(json.dumps(row).replace("logicalType", "x"))), {"c": value}
    )
    found = [
        MessageFormat("json", schema).read(pa.array([json.dumps(message).encode()], pa.binary())),
        MessageFormat("avro", schema, avro_schema=json.dumps(row)).read(pa.array([out.getvalue()], pa.binary())),
    ]
    for one in found:
        assert len(one.bad) + one.rows.num_rows == 1
    return [BAD if one.bad else bits(one.rows.column(0))[0] for one in found]


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_each_type_at_its_ends(name: str) -> None:
    """Read as the number or text that it is, or a bad message: never as another value."""
    for _, kind, declared, value, right in (case for case in CASES if case[0] == name):
        connect = {"type": kind, "name": name, "version": 1, "optional": True}
        avro = {"type": AVRO[kind], "connect.name": name, "connect.version": 1}
        assert outcomes(connect, avro, value, declared) == [right, right], (value, str(declared))


@pytest.mark.parametrize(
    "name", [f"{C}Date", f"{T}Date", f"{T}Time", f"{T}Year", f"{T}Timestamp", f"{T}MicroTimestamp"]
)
def test_what_is_wider_than_the_type_is_bad(name: str) -> None:
    kind = "int64" if "stamp" in name else "int32"
    schema = {"type": "struct", "fields": [{"field": "c", "type": kind, "name": name}]}
    for beyond in (2**63, -(2**63) - 1, 1.5, 10**400, "1", True, [1]):
        text = json.dumps({"schema": schema, "payload": {"c": beyond}})
        for declared in (NTZ, LONG) if kind == "int64" else (INT,):
            assert len(MessageFormat("json", pa.schema([("c", declared)])).read(pa.array([text.encode()])).bad) == 1


def test_decimals_at_their_ends() -> None:
    """With scales that are negative, huge, absent or none, and bytes of more digits than a decimal has."""
    for scale, value, kind, right in DECIMALS:
        parameters = {} if scale is None else {"parameters": {"scale": scale}}
        connect = {"type": "bytes", "name": f"{C}Decimal", "version": 1, **parameters}
        avro = {"type": "bytes", "connect.name": f"{C}Decimal", "logicalType": "decimal", "precision": 64}
        avro |= {} if scale is None else {"connect.parameters": {"scale": scale}}
        found = outcomes(connect, avro, value, kind)
        assert [one if one is BAD else str(one) for one in found] == [right, right], (scale, value, str(kind))


def test_decimals_with_a_scale_of_their_own() -> None:
    """Debezium's ``VariableScaleDecimal``."""
    fields = {"scale": "int32", "value": "bytes"}
    name = f"{D}VariableScaleDecimal"
    connect = {"type": "struct", "name": name, "fields": [{"field": x, "type": kind} for x, kind in fields.items()]}
    parts = [{"name": x, "type": AVRO[kind]} for x, kind in fields.items()]
    avro = {"type": "record", "name": name, "connect.name": name, "fields": parts}
    for scale, value, kind, right in DECIMALS:
        if isinstance(scale, str) and scale.lstrip("-").isdecimal():
            found = outcomes(connect, avro, {"scale": int(scale), "value": value}, kind)
            assert [one if one is BAD else str(one) for one in found] == [right, right], (scale, value, str(kind))


def test_decimals_of_avro_with_a_scale_that_avro_does_not_have_are_bytes() -> None:
    """A logical type that is not valid says nothing (Avro 1.12): the value is bytes, and no decimal."""
    for more in ({"scale": -2, "precision": 4}, {"scale": 5, "precision": 4}, {"scale": "2", "precision": 4, "x": 1}):
        row = {
            "type": "record",
            "name": "R",
            "fields": [{"name": "c", "type": {"type": "bytes", "logicalType": "decimal", **more}}],
        }
        message = pa.array([b"\x02\x01"], pa.binary())
        as_decimal = MessageFormat("avro", pa.schema([("c", pa.decimal128(9, 2))]), avro_schema=json.dumps(row)).read(
            message
        )
        if more["scale"] != "2":
            assert "column 'c' is bytes in its schema" in as_decimal.bad[0].problem
            as_bytes = MessageFormat("avro", pa.schema([("c", pa.binary())]), avro_schema=json.dumps(row)).read(message)
            assert as_bytes.rows.to_pylist() == [{"c": b"\x01"}]


EXACT = exact.Context(prec=100)
NUMBERS = st.integers(-(10**38) + 1, 10**38 - 1) | st.integers(-300, 300) | st.integers(-(10**60), 10**60)


@given(st.lists(st.none() | NUMBERS, max_size=4), st.integers(-60, 60), st.integers(1, 38), st.data())
def test_decimals_are_what_python_has(numbers: list[int | None], scale: int, precision: int, data: Any) -> None:
    kind = pa.decimal128(precision, data.draw(st.integers(0, precision)))
    padding = data.draw(st.integers(0, 3))
    rights = []
    for number in numbers:
        shifted = (
            None if number is None else fractions.Fraction(number) / fractions.Fraction(10) ** scale * 10**kind.scale
        )
        fits = shifted is None or (shifted.denominator == 1 and abs(shifted) < 10**precision)
        rights.append(None if shifted is None else int(shifted) if fits else BAD)
    texts = [None if one is None else (b"\xff" if one < 0 else b"\0") * padding + of(one) for one in numbers]
    values = pa.array(texts, pa.binary())
    if BAD in rights:
        with pytest.raises(pa.ArrowInvalid):
            unscaled(values, scale, kind)
        return
    found = unscaled(values, scale, kind)
    found.validate(full=True)
    assert [None if x is None else int(x.scaleb(kind.scale, EXACT)) for x in found.to_pylist()] == rights


F32, F64, D38, D5, INFINITE = pa.float32(), pa.float64(), pa.decimal128(38, 0), pa.decimal128(5, 2), float("inf")
BOTH = pa.struct([("a", F64), ("b", F32)])


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (F64, "1e400", None),
        (F64, "-1.8e308", None),
        (F64, "1.7976931348623159e308", None),
        (F64, "1.7976931348623157e308", 1.7976931348623157e308),
        (F64, "1e-400", 0.0),
        (F32, "1e39", None),
        (F32, "-1e39", None),
        (F32, "3.4028235e38", 3.4028234663852886e38),
        (F64, "Infinity", INFINITE),
        (F64, '"Infinity"', INFINITE),
        (F64, "1" + "0" * 400, None),
        (pa.list_(F32), '[1, "Infinity", 1e39]', None),
        (pa.list_(F32), "[1, Infinity, 1e39]", None),
        (pa.list_(F32), '[1, "Infinity", Infinity, null, 2.5]', [1, INFINITE, INFINITE, None, 2.5]),
        (pa.list_(F64), '[1, "x"]', None),
        (pa.list_(F64), '["-Infinity", -0.0]', [-INFINITE, -0.0]),
        (BOTH, '{"a": Infinity, "b": 1e39}', None),
        (BOTH, '{"a": 1e39, "b": Infinity}', {"a": 1e39, "b": INFINITE}),
        (LONG, "9223372036854775808", None),
        (LONG, "-9223372036854775809", None),
        (LONG, "1e3", None),
        (pa.int8(), "128", None),
        (LONG, "1" + "0" * 400, None),
        (D38, "1" + "0" * 38, None),
        (D38, "1" + "0" * 400, None),
        (D5, "1000", None),
        (D5, "0.001", None),
        (D38, "9" * 38, exact.Decimal("9" * 38)),
        (D5, "1e400", None),
    ],
)
@pytest.mark.parametrize("form", ["json", "debezium-json", "wrapped"])
def test_numbers_that_their_type_does_not_hold(kind: pa.DataType, text: str, value: Any, form: str) -> None:
    """They are bad messages, and no infinities; one beside them is read."""
    around = {"json": "%s", "debezium-json": '{"op":"c","after":%s}', "wrapped": '{"schema":null,"payload":%s}'}[form]
    messages = [around % f'{{"x":{one}}}' for one in (text, "null", text)]
    options: dict[str, Any] = {"row_kind": "row_kind"} if form == "debezium-json" else {}
    name: Any = "json" if form == "wrapped" else form
    found = MessageFormat(name, pa.schema([("x", kind)]), **options).read(pa.array([x.encode() for x in messages]))
    assert [one.at for one in found.bad] == ([0, 2] if value is None else [])
    assert found.rows["x"].to_pylist() == ([None] if value is None else [value, None, value])
