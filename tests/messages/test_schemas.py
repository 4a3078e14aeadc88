"""What schemas say of values: random ones in Avro beside fastavro's own reader, and each type that has a name."""

from __future__ import annotations

import base64
import datetime as dt
import io
import itertools
import json
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_ops.messages.rows import MessageFormat

pytestmark = pytest.mark.thorough

EPOCH = dt.datetime(1970, 1, 1)


class Kind(NamedTuple):
    """A type in Avro, and what it is declared as."""

    schema: Any
    declared: pa.DataType
    values: st.SearchStrategy[Any]
    told: Callable[[Any], Any] = lambda value: value
    """Of what fastavro's own reader has, what is read."""


def micros(value: dt.datetime) -> dt.datetime:
    return value.replace(tzinfo=dt.UTC)


def number(value: dt.time) -> int:
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


def logical(kind: str, name: str, /, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def named(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "name": f"N{next(NAMES)}", **more}


def fixed(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


INT, LONG = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
WHEN = st.integers(-(10**15), 10**15)
TIMES = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))
NAMES = itertools.count()
SIMPLE = [
    lambda: Kind("boolean", pa.bool_(), st.booleans()),
    lambda: Kind("int", pa.int32(), INT),
    lambda: Kind("int", pa.int64(), INT),
    lambda: Kind("long", pa.int64(), LONG),
    lambda: Kind("long", pa.decimal128(38, 0), LONG, Decimal),
    lambda: Kind("float", pa.float64(), st.floats(width=32, allow_nan=False)),
    lambda: Kind("double", pa.float64(), st.floats(allow_nan=False)),
    lambda: Kind("string", pa.string(), st.text(max_size=5)),
    lambda: Kind("bytes", pa.binary(), st.binary(max_size=5)),
    lambda: Kind(named("enum", symbols=["A", "B"]), pa.string(), st.sampled_from("AB")),
    lambda: Kind(named("fixed", size=3), pa.binary(), fixed(3)),
    lambda: Kind(
        logical("bytes", "decimal", precision=12, scale=3), pa.decimal128(14, 3),
        st.decimals(-(10**8), 10**8, places=3),
    ),
    lambda: Kind(
        named("fixed", size=5, logicalType="decimal", precision=6, scale=2), pa.decimal128(10, 2),
        st.decimals(-9999, 9999, places=2),
    ),
    lambda: Kind(logical("int", "date"), pa.date32(), st.dates()),
    lambda: Kind(logical("int", "time-millis"), pa.int32(), st.times(), lambda x: number(x) // 1000),
    lambda: Kind(logical("long", "time-micros"), pa.int64(), st.times(), number),
    lambda: Kind(logical("long", "timestamp-millis"), pa.timestamp("us", "UTC"), TIMES.map(micros)),
    lambda: Kind(logical("long", "timestamp-micros"), pa.timestamp("us", "UTC"), TIMES.map(micros)),
    lambda: Kind(logical("long", "timestamp-micros"), pa.timestamp("us"), TIMES.map(micros),
                 lambda x: x.replace(tzinfo=None)),
    lambda: Kind(logical("long", "timestamp-nanos"), pa.timestamp("us", "UTC"), LONG,
                 lambda x: micros(EPOCH) + dt.timedelta(microseconds=x // 1000)),
    lambda: Kind(logical("long", "local-timestamp-millis"), pa.timestamp("us"), TIMES),
    lambda: Kind(logical("long", "local-timestamp-micros"), pa.timestamp("us"), TIMES),
    lambda: Kind(logical("long", "local-timestamp-nanos"), pa.timestamp("us"), LONG,
                 lambda x: EPOCH + dt.timedelta(microseconds=x // 1000)),
    lambda: Kind(logical("string", "uuid"), pa.string(), st.uuids(), str),
    lambda: Kind(named("fixed", size=16, logicalType="uuid"), pa.string(), fixed(16),
                 lambda x: str(uuid.UUID(bytes=x))),
    lambda: Kind(named("fixed", size=12, logicalType="duration"), pa.binary(), fixed(12)),
    lambda: Kind(named("fixed", size=3, logicalType="uuid"), pa.binary(), fixed(3)),
    lambda: Kind(logical("bytes", "big-decimal"), pa.binary(), st.binary(max_size=5)),
    lambda: Kind(logical("string", "timestamp-millis"), pa.string(), st.text(max_size=5)),
    lambda: Kind(logical("long", "of our own"), pa.int64(), LONG),
]  # fmt: skip


@st.composite
def kinds(draw: Any, depth: int = 2) -> Kind:
    way = draw(st.integers(0, 9 if depth else 5))
    if way <= 5:
        return draw(st.sampled_from(SIMPLE))()
    if way == 6:
        inner = draw(kinds(depth - 1))
        return Kind(
            {"type": "array", "items": inner.schema}, pa.list_(inner.declared), st.lists(inner.values, max_size=3),
            lambda values: [inner.told(value) for value in values],
        )  # fmt: skip
    if way == 7:
        inner = draw(kinds(depth - 1))
        if isinstance(inner.schema, list):
            return inner
        return Kind(
            draw(st.sampled_from([["null", inner.schema], [inner.schema, "null"]])), inner.declared,
            st.none() | inner.values, lambda value: None if value is None else inner.told(value),
        )  # fmt: skip
    name, parts = f"R{next(NAMES)}", [draw(kinds(depth - 1)) for _ in range(draw(st.integers(1, 3)))]
    fields = [{"name": f"f{n}", "type": part.schema} for n, part in enumerate(parts)]
    known = {f"f{n}": part for n, part in enumerate(parts)}
    values: Any = st.fixed_dictionaries({x: part.values for x, part in known.items()})
    if way == 9:  # it holds itself, in a field that is not read, or in one whose own is not
        holds = draw(
            st.sampled_from([["null", name], {"type": "array", "items": name}, {"type": "map", "values": name}])
        )
        fields.insert(draw(st.integers(0, len(fields))), {"name": "more", "type": holds})
        wrap: Any = {"null": lambda x: x, "array": lambda x: [x, x], "map": lambda x: {"a": x}}
        made = wrap["null" if isinstance(holds, list) else holds["type"]]
        empty = made(None) if isinstance(holds, list) else ([] if holds["type"] == "array" else {})
        values = st.recursive(
            values.map(lambda row: {**row, "more": empty}),
            lambda below: st.tuples(values, below).map(lambda both: {**both[0], "more": made(both[1])}), max_leaves=4,
        )  # fmt: skip
    read = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, unique=True))
    return Kind(
        {"type": "record", "name": name, "fields": fields},
        pa.struct([(x, known[x].declared) for x in read] + ([("absent", pa.int32())] if draw(st.booleans()) else [])),
        values, lambda row: {x: known[x].told(row[x]) for x in read},
    )  # fmt: skip


@given(st.data())
def test_random_schemas_are_read_as_fastavro_reads_them(data: Any) -> None:
    columns = data.draw(st.lists(kinds(), min_size=1, max_size=4))
    schema = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": f"c{n}", "type": c.schema} for n, c in enumerate(columns)],
    }
    parsed = fastavro.parse_schema(schema)
    messages, wanted = [], []
    for row in data.draw(st.lists(st.tuples(*(column.values for column in columns)), max_size=4)):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, {f"c{n}": value for n, value in enumerate(row)})
        messages.append(out.getvalue())
        own = fastavro.schemaless_reader(io.BytesIO(out.getvalue()), parsed, None)
        wanted.append([column.told(own[f"c{n}"]) for n, column in enumerate(columns)])
    form = MessageFormat(
        "avro", pa.schema([(f"c{n}", c.declared) for n, c in enumerate(columns)]), avro_schema=json.dumps(schema)
    )
    found = form.read(pa.array(messages, pa.binary()))
    found.rows.validate(full=True)
    assert found.bad == []
    assert [without_absent(list(row.values())) for row in found.rows.to_pylist()] == wanted


def without_absent(value: Any) -> Any:
    if isinstance(value, list):
        return [without_absent(x) for x in value]
    if isinstance(value, dict):
        assert value.get("absent") is None
        return {name: without_absent(x) for name, x in value.items() if name != "absent"}
    return value


TIME, DATE, INTEGER, TEXT, DATA = pa.timestamp("us", "UTC"), pa.date32(), pa.int64(), pa.string(), pa.binary()
LOCAL = pa.timestamp("us")
REFUSED = object()
AT, BEFORE = (
    dt.datetime(2023, 11, 14, 22, 13, 20, 123456, dt.UTC),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999, dt.UTC),
)
IN_US, IN_MS = 1_700_000_000_123_456, AT.replace(microsecond=123000)
POINT = pa.struct([("x", pa.float64()), ("wkb", DATA)])
SCALED = pa.struct([("scale", pa.int32()), ("value", DATA)])
SHAPE = {"x": 1.5, "wkb": b"\x01"}
PRICE = pa.decimal128(10, 2)


def semantic(kind: str, name: str, value: Any, **declared: Any) -> tuple[Any, ...]:
    return kind, name, value, declared


T, C, D = "io.debezium.time.", "org.apache.kafka.connect.data.", "io.debezium.data."
NUMBERS = {"time": REFUSED, "text": REFUSED, "date": REFUSED}
SEMANTIC = [
    semantic("int32", f"{T}Date", 19000, date=dt.date(2022, 1, 8), integer=19000, time=REFUSED, text=REFUSED),
    semantic("int32", f"{C}Date", -1, date=dt.date(1969, 12, 31), time=REFUSED, text=REFUSED),
    semantic("int64", f"{T}Timestamp", 1_700_000_000_123, time=IN_MS, local=IN_MS.replace(tzinfo=None), date=REFUSED),
    semantic("int64", f"{T}MicroTimestamp", IN_US, time=AT, integer=IN_US, text=REFUSED),
    semantic("int64", f"{T}NanoTimestamp", 1_700_000_000_123_456_789, time=AT, integer=1_700_000_000_123_456_789),
    semantic("int64", f"{T}NanoTimestamp", -1, time=BEFORE, local=BEFORE.replace(tzinfo=None)),
    semantic("int64", f"{C}Timestamp", 1_700_000_000_123, time=IN_MS, text=REFUSED),
    semantic("string", f"{T}ZonedTimestamp", "2023-11-14T23:13:20.123456+01:00", time=AT, date=REFUSED,
             text="2023-11-14T23:13:20.123456+01:00"),
    semantic("string", f"{T}IsoTimestamp", "2023-11-14T22:13:20.123456Z", time=AT, text="2023-11-14T22:13:20.123456Z"),
    semantic("int32", f"{T}Time", 3_600_000, integer=3_600_000, **NUMBERS),
    semantic("int64", f"{T}MicroTime", 3_600_000_000, integer=3_600_000_000, **NUMBERS),
    semantic("int64", f"{T}NanoTime", 3_600_000_000_000, integer=3_600_000_000_000, **NUMBERS),
    semantic("int32", f"{C}Time", 3_600_000, integer=3_600_000, **NUMBERS),
    semantic("string", f"{T}ZonedTime", "10:00:00Z", text="10:00:00Z", integer=REFUSED),
    semantic("string", f"{T}IsoDate", "2023-11-14Z", text="2023-11-14Z", integer=REFUSED),
    semantic("string", f"{T}IsoTime", "10:00:00Z", text="10:00:00Z", integer=REFUSED),
    semantic("string", f"{T}Interval", "P1Y2M3DT4H5M6.78S", text="P1Y2M3DT4H5M6.78S", integer=REFUSED, time=REFUSED),
    semantic("int64", f"{T}MicroDuration", 5, integer=5, **NUMBERS),
    semantic("int64", f"{T}NanoDuration", 5, integer=5, **NUMBERS),
    semantic("int32", f"{T}Year", 2026, integer=2026, **NUMBERS),
    semantic("bytes", f"{D}Bits", b"\x05\x01", data=b"\x05\x01", text=REFUSED, integer=REFUSED),
    *(semantic("string", f"{D}{name}", "as it is", text="as it is", data=REFUSED, integer=REFUSED)
      for name in ("Json", "Xml", "Uuid", "Enum", "EnumSet", "Ltree", "TsVector")),
    semantic("bytes", f"{C}Decimal", b"\xfb\x2e", price=Decimal("-12.34"), data=REFUSED, number=REFUSED, text=REFUSED),
    semantic("struct", f"{D}VariableScaleDecimal", {"scale": 1, "value": b"\x7b"}, price=Decimal("12.30"),
             scaled={"scale": 1, "value": b"\x7b"}, number=REFUSED, text=REFUSED),
    *(semantic("struct", f"{D}geometry.{name}", SHAPE, point=SHAPE, data=REFUSED)
      for name in ("Point", "Geometry", "Geography")),
    semantic("array", f"{D}DoubleVector", [1.5], floats=[1.5], text=REFUSED),
    semantic("array", f"{D}FloatVector", [1.5], floats=[1.5], number=REFUSED),
    semantic("string", "com.shop.Own", "as it is", text="as it is", integer=REFUSED),
    semantic("int64", "com.shop.Own", 7, integer=7, number=7.0, time=REFUSED),
]  # fmt: skip
DECLARED = {
    "date": DATE, "integer": INTEGER, "time": TIME, "local": LOCAL, "text": TEXT, "data": DATA, "price": PRICE,
    "number": pa.float64(), "scaled": SCALED, "point": POINT, "floats": pa.list_(pa.float64()), "bytes": DATA,
    "string": TEXT,
}  # fmt: skip
CASES = [(kind, name, value, as_what, told) for kind, name, value, of in SEMANTIC for as_what, told in of.items()]
PARTS = {"scale": "int32", "value": "bytes", "x": "double", "wkb": "bytes"}
AVRO = {"int32": "int", "int64": "long"}


def connect_schema(kind: str, name: str, value: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind, "name": name, "optional": True, "version": 1}
    if kind == "struct":
        schema["fields"] = [{"field": part, "type": PARTS[part]} for part in value]
    if kind == "array":
        schema["items"] = {"type": "double"}
    return schema | ({"parameters": {"scale": "2"}} if name.endswith(".Decimal") else {})


def avro_schema(kind: str, name: str, value: Any) -> dict[str, Any]:
    """As Confluent's ``AvroData`` makes it of the same."""
    schema: dict[str, Any] = {"type": AVRO.get(kind, kind), "connect.name": name, "connect.version": 1}
    if kind == "struct":
        fields = [{"name": part, "type": AVRO.get(PARTS[part], PARTS[part])} for part in value]
        return schema | {"type": "record", "name": name, "fields": fields}
    if kind == "array":
        return schema | {"items": "double"}
    return schema | ({"logicalType": "decimal", "scale": 2, "precision": 10} if name.endswith(".Decimal") else {})


def plain(value: Any) -> Any:
    """A value as Kafka Connect's converter writes it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return {name: plain(x) for name, x in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1].rpartition('.')[2]}-{case[3]}")
def test_each_semantic_type_is_read_or_refused_by_name(case: tuple[Any, ...], deep: bool) -> None:
    """In JSON with its schema and in Avro, in a column and in a list; what is read is the value."""
    kind, name, value, as_what, told = case
    wanted = pa.schema([("c", DECLARED[as_what])])
    there, avro_there, connect = value, avro_schema(kind, name, value), connect_schema(kind, name, value)
    if deep:
        wanted = pa.schema([("c", pa.list_(pa.struct([("d", DECLARED[as_what])])))])
        there = [{"d": value}, {"d": value}]
        inner = {"type": "record", "name": "Inner", "fields": [{"name": "d", "type": ["null", avro_there]}]}
        avro_there = {"type": "array", "items": inner}
        connect = {"type": "array", "items": {"type": "struct", "fields": [{"field": "d", **connect}]}}
        told = told if told is REFUSED else [{"d": told}] * 2
    row = {"type": "record", "name": "Row", "fields": [{"name": "c", "type": avro_there}]}
    parsed, out = fastavro.parse_schema(json.loads(json.dumps(row).replace("logicalType", "x"))), io.BytesIO()
    fastavro.schemaless_writer(out, parsed, {"c": there})
    message = {"schema": {"type": "struct", "fields": [{"field": "c", **connect}]}, "payload": {"c": to_json(there)}}
    for form, text in (
        (MessageFormat("avro", wanted, avro_schema=json.dumps(row)), out.getvalue()),
        (MessageFormat("json", wanted), json.dumps(message).encode()),
    ):
        found = form.read(pa.array([text], pa.binary()))
        if told is not REFUSED:
            assert (found.bad, found.rows["c"].to_pylist()) == ([], [told])
            continue
        problem = found.bad[0].problem
        shown = "decimal" if form.is_avro and name.endswith(".Decimal") else name
        assert f"column {'c[].d' if deep else 'c'!r} is {shown} in its schema, and not" in problem, problem


def to_json(value: Any) -> Any:
    return [plain(x) for x in value] if isinstance(value, list) else plain(value)


def test_values_within_a_column_may_be_written_in_several_ways() -> None:
    """Times of two units and a decimal in one struct, and another unit in a list beside them."""
    kinds = {"ms": ("int64", f"{T}Timestamp"), "us": ("int64", f"{T}MicroTimestamp"), "price": ("bytes", f"{C}Decimal")}
    declared = pa.struct([("ms", LOCAL), ("us", LOCAL), ("price", PRICE), ("days", pa.list_(DATE))])
    inner = [{"field": part, **connect_schema(kind, name, None)} for part, (kind, name) in kinds.items()]
    inner.append({"field": "days", "type": "array", "items": connect_schema("int32", f"{T}Date", None)})
    fields = [{"name": part, "type": avro_schema(kind, name, None)} for part, (kind, name) in kinds.items()]
    fields.append({"name": "days", "type": {"type": "array", "items": avro_schema("int32", f"{T}Date", None)}})
    row = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "c", "type": {"type": "record", "name": "I", "fields": fields}}],
    }
    out = io.BytesIO()
    said = {"ms": 1, "us": 1, "price": b"\x01", "days": [0, 1]}
    plain_row = json.loads(json.dumps(row).replace("logicalType", "x"))
    fastavro.schemaless_writer(out, fastavro.parse_schema(plain_row), {"c": said})
    message = {"schema": {"type": "struct", "fields": [{"field": "c", "type": "struct", "fields": inner}]}}
    message["payload"] = {"c": plain(said)}
    wanted = pa.schema([("c", declared)])
    for form, text in (
        (MessageFormat("avro", wanted, avro_schema=json.dumps(row)), out.getvalue()),
        (MessageFormat("json", wanted), json.dumps(message).encode()),
    ):
        found = form.read(pa.array([text], pa.binary()))
        assert found.bad == []
        assert found.rows["c"].to_pylist() == [
            {"ms": EPOCH.replace(microsecond=1000), "us": EPOCH.replace(microsecond=1), "price": Decimal("0.01"),
             "days": [dt.date(1970, 1, 1), dt.date(1970, 1, 2)]}
        ]  # fmt: skip
