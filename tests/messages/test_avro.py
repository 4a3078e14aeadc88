"""Messages in Avro, with a registry of our own on a local port."""

from __future__ import annotations

import datetime as dt
import io
import json
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from gpu_ops.errors import BackendError, DescriptionError
from gpu_ops.messages.avro import SchemaRegistry
from gpu_ops.messages.rows import MessageFormat
from messages.registry import FakeRegistry

pytestmark = pytest.mark.thorough

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("data", pa.binary()),
        ("tags", pa.list_(pa.struct([("n", pa.float64())]))),
    ]
)
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
ROW = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "price", "type": ["null", DECIMAL], "default": None},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": None},
        {"name": "local", "type": {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}},
        {"name": "day", "type": {"type": "int", "connect.name": "io.debezium.time.Date"}},
        {"name": "data", "type": "bytes"},
        {"name": "tags", "type": {"type": "array", "items": {"type": "record", "name": "Tag", "fields": [
            {"name": "n", "type": "int"}, {"name": "more", "type": {"type": "map", "values": "string"}}]}}},
        {"name": "other", "type": "boolean"},
    ],
}  # fmt: skip
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "shop.orders",
    "fields": [
        {"name": "before", "type": ["null", ROW], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
    ],
}
KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}
TEXT = {"type": "record", "name": "Text", "fields": [{"name": "id", "type": "string"}]}
AT = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def said(number: int, **more: Any) -> dict[str, Any]:
    """A row as it is sent."""
    row = {"id": number, "name": "é", "price": Decimal("1.50"), "at": AT, "local": 1_700_000_000_123_456, "day": 19000}
    return row | {"data": b"\x00\xff", "tags": [{"n": 1, "more": {"a": "b"}}], "other": True} | more


def told(number: int, **more: Any) -> dict[str, Any]:
    """A row as it is read."""
    local = dt.datetime(2023, 11, 14, 22, 13, 20, 123456)
    row = {**said(number), "local": local, "day": dt.date(2022, 1, 8), "tags": [{"n": 1.0}]}
    return {name: (row | more)[name] for name in COLUMNS.names}


def written(schema: Any, value: Any, number: int | None = None) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return (b"" if number is None else b"\0" + number.to_bytes(4, "big")) + out.getvalue()


@pytest.fixture(scope="module")
def registry() -> Iterator[SchemaRegistry]:
    with FakeRegistry() as fake:
        for schema in (ENVELOPE, ROW, KEY, TEXT):
            fake.add(schema)
        fake.answers["/schemas/ids/5"] = {"schema": "", "schemaType": "PROTOBUF"}
        fake.answers["/schemas/ids/6"] = {"schema": '{"type": "none"}'}
        fake.answers["/schemas/ids/7"] = None
        yield SchemaRegistry.of(fake.url)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.messages.avro._PAUSE_S", 0.0)


def test_envelopes(registry: SchemaRegistry) -> None:
    form = MessageFormat("debezium-avro", COLUMNS, ("name",), "row_kind", registry=registry)
    values = [
        written(ENVELOPE, {"op": "c", "after": said(1)}, 1),
        None,
        written(ENVELOPE, {"op": "u", "before": said(1), "after": said(1, price=None)}, 1),
        written(TEXT, {"id": "x"}, 4),
        written(ENVELOPE, {"op": "c", "after": said(2, name=None)}, 1),
        written(ENVELOPE, {"op": "d", "before": said(1)}, 1),
        b"\x00\x00",
        written(ENVELOPE, {"op": "c", "after": said(3)}, 1)[:-3],
        written(ENVELOPE, {"op": "c", "after": said(3)}, 1) + b"\x00",
        written(ENVELOPE, {"op": "t"}, 1),
    ]
    found = form.read(pa.array(values, pa.binary()))
    found.rows.validate(full=True)
    assert found.rows.to_pylist() == [
        {"row_kind": "+I", **told(1)}, {"row_kind": "-U", **told(1)}, {"row_kind": "+U", **told(1, price=None)},
        {"row_kind": "-D", **told(1)},
    ]  # fmt: skip
    assert list(found.at) == [0, 2, 2, 5]
    problems = dict(found.bad)
    assert list(problems) == [3, 4, 6, 7, 8, 9]
    assert problems[3] == "has no op"
    assert problems[4] == "column 'name' is null or missing"
    assert problems[6] == "has no header of a schema registry"
    assert problems[7].startswith("is no Avro of its schema")
    assert problems[8] == "is longer than its schema says"
    assert problems[9].startswith("a truncate")


def test_rows_by_key(registry: SchemaRegistry) -> None:
    form = MessageFormat("avro", COLUMNS, (), "row_kind", ("id",), registry=registry)
    keys = [written(KEY, {"id": 1}, 3)] * 2
    found = form.read(pa.array([written(ROW, said(1), 2), None], pa.binary()), pa.array(keys, pa.binary()))
    nothing = dict.fromkeys(COLUMNS.names) | {"id": 1}
    assert found.rows.to_pylist() == [{"row_kind": "u", **told(1)}, {"row_kind": "-D", **nothing}]


def test_a_schema_without_a_registry() -> None:
    form = MessageFormat("avro", COLUMNS, avro_schema=json.dumps(ROW))
    found = form.read(pa.array([written(ROW, said(7))], pa.binary()))
    assert (found.rows.to_pylist(), found.bad) == ([told(7)], [])


@pytest.mark.parametrize(
    ("column", "kind", "problem"),
    [
        ("id", pa.timestamp("us"), "column 'id' is long in its schema, and not timestamp[us]"),
        ("id", pa.string(), "column 'id' is long in its schema, and not string"),
        ("other", pa.int64(), "column 'other' is boolean in its schema, and not int64"),
        ("at", pa.int64(), "column 'at' is timestamp-millis in its schema, and not int64"),
        ("price", pa.float64(), "column 'price' is decimal in its schema, and not double"),
        ("day", pa.timestamp("us"), "column 'day' is io.debezium.time.Date in its schema, and not timestamp[us]"),
        ("tags", pa.list_(pa.struct([("n", pa.string())])), "column 'tags[].n' is int in its schema, and not string"),
        ("price", pa.decimal128(3, 1), "column 'price'"),
    ],
)
def test_a_value_of_another_type(column: str, kind: pa.DataType, problem: str) -> None:
    form = MessageFormat("avro", pa.schema([(column, kind)]), avro_schema=json.dumps(ROW))
    price = Decimal("1234.55")
    found = form.read(pa.array([written(ROW, said(1, price=price))], pa.binary()))
    assert not found.rows.num_rows
    if kind != pa.decimal128(3, 1):
        assert problem in found.bad[0].problem


def test_what_cannot_be_is_refused(registry: SchemaRegistry) -> None:
    for options, problem in (
        ({}, "Avro needs schema_registry=, or avro_schema="),
        ({"avro_schema": '{"type": "x"}'}, "no schema of Avro"),
        ({"registry": registry, "encoded": (("id", "ms"),)}, "encoded= is for JSON"),
        ({"name": "json", "registry": registry}, "are for Avro, not for json"),
    ):
        with pytest.raises(DescriptionError, match=problem):
            MessageFormat(**{"name": "avro", "schema": COLUMNS} | options)


def test_a_schema_that_the_registry_does_not_know_is_a_bad_message(registry: SchemaRegistry) -> None:
    """Not the end of a query that drops those; a registry that is not there is."""
    form = MessageFormat("avro", COLUMNS, registry=registry)
    values = [written(ROW, said(1), 2), b"\0\0\0\0\x09", written(ROW, said(2), 2), b"\0\0\0\0\x05", b"\0\0\0\0\x06"]
    found = form.read(pa.array(values))
    assert found.rows.to_pylist() == [told(1), told(2)]
    assert [at for at, _ in found.bad] == [1, 3, 4]
    assert found.bad[0].problem.startswith("has schema 9, which the schema registry does not know: http://")
    assert "is of type PROTOBUF" in found.bad[1].problem
    assert "is no schema of Avro" in found.bad[2].problem
    gone = MessageFormat("avro", COLUMNS, registry=SchemaRegistry("http://localhost:1"))
    with pytest.raises(BackendError, match=r"the schema registry gives no schema: .*/schemas/ids/2: "):
        gone.read(pa.array(values))
    with pytest.raises(BackendError, match=r"schemas/ids/7: .*500"):
        form.read(pa.array([b"\0\0\0\0\x07"]))


MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
CENTS = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}


@pytest.mark.parametrize(
    ("union", "kind", "outcome"),
    [
        ([MILLIS, "null"], pa.timestamp("us"), (b"\x00\x02", dt.datetime(1970, 1, 1, 0, 0, 0, 1000))),
        ([MILLIS, "null"], pa.timestamp("us"), (b"\x02", None)),
        (["int", "null", "long"], pa.int64(), (b"\x04\x0a", 5)),
        (["string", {"type": "enum", "name": "E", "symbols": ["A"]}], pa.string(), (b"\x02\x00", "A")),
        ({"type": MILLIS}, pa.timestamp("us"), (b"\x02", dt.datetime(1970, 1, 1, 0, 0, 0, 1000))),
        (["int", MILLIS], pa.timestamp("us"), "column 'x' is int in its schema, and not timestamp"),
        (["string", "long"], pa.string(), "column 'x' is long in its schema, and not string"),
        ([MILLIS, {"type": "array", "items": MILLIS}], pa.timestamp("us"), "column 'x' is array in its schema"),
        (
            [CENTS, {"type": "fixed", "size": 2, "name": "F", "logicalType": "decimal", "precision": 4, "scale": 1}],
            pa.decimal128(9, 2), "column 'x' is written in ways base64:2, base64:1",
        ),
        (["long", CENTS], pa.decimal128(9, 2), "column 'x' is written in ways text, base64:2"),
        ({"type": "map", "values": "string"}, pa.struct([("a", pa.string())]), "column 'x' is map in its schema"),
        ("double", pa.float32(), "column 'x' is double in its schema, and not float"),
    ],
)  # fmt: skip
def test_unions_are_read_where_all_of_them_are_read_alike(union: Any, kind: pa.DataType, outcome: Any) -> None:
    row = {"type": "record", "name": "R", "fields": [{"name": "x", "type": union}]}
    form = MessageFormat("avro", pa.schema([("x", kind)]), avro_schema=json.dumps(row))
    if isinstance(outcome, str):
        found = form.read(pa.array([b"\x00\x00"] * 3))
        assert [outcome in one.problem for one in found.bad] == [True] * 3
    else:
        found = form.read(pa.array([outcome[0]]))
        assert (found.rows["x"].to_pylist(), found.bad) == ([outcome[1]], [])


@pytest.mark.parametrize("depth", [1, 300, 3000, 300_000])
def test_a_message_that_nests_deeply_ends_no_process(depth: int) -> None:
    """fastavro's compiled reader runs out of the process's stack."""
    node = {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}
    row = {"type": "record", "name": "R", "fields": [{"name": "x", "type": node}, {"name": "id", "type": "long"}]}
    form = MessageFormat("avro", pa.schema([("id", pa.int64())]), avro_schema=json.dumps(row))
    found = form.read(pa.array([b"\x02" * depth + b"\x00\x0a"]))
    assert found.rows.to_pylist() == [{"id": 5}] if depth < 1000 else "RecursionError" in found.bad[0].problem


def long(number: int) -> bytes:
    """A number as Avro has it."""
    rest, out = (number << 1) ^ (number >> 63), b""
    while rest > 127:
        out, rest = out + bytes([rest & 127 | 128]), rest >> 7
    return out + bytes([rest])


EMPTY = {"type": "record", "name": "Empty", "fields": []}
NOTHING = {
    "null": "null",
    "a null with a logical type": {"type": "null", "logicalType": "date"},
    "bytes of length 0": {"type": "fixed", "name": "F", "size": 0},
    "an empty record": EMPTY,
    "a record of nulls": {"type": "record", "name": "N", "fields": [{"name": "x", "type": "null"}]},
    "a record of one by its name": {"type": "record", "name": "N", "fields": [
        {"name": "x", "type": EMPTY}, {"name": "y", "type": "Empty"}]},
}  # fmt: skip


@pytest.mark.parametrize("items", NOTHING)
def test_arrays_of_values_that_take_no_bytes_end_soon(items: str) -> None:
    """Nine bytes say that there are 2 ** 36 of them (the family of CVE-2023-37475); a thousand are taken."""
    array = {"type": "array", "items": NOTHING[items]}
    within = {"type": "record", "name": "W", "fields": [{"name": "a", "type": array}]}
    arrays = {
        "itself": (array, b"%s"),
        "union": (["null", array], b"\x02%s"),
        "array": ({"type": "array", "items": array}, b"\x02%s\x00"),
        "map": ({"type": "map", "values": array}, b"\x02\x02k%s\x00"),
        "record in an array": ({"type": "array", "items": within}, b"\x02%s\x00"),
    }
    huge = (
        long(1 << 36) + b"\0",
        long(-(1 << 36)) + long(3) + b"\0",
        long(900) * 9 + b"\0",
        long(1 << 62) + b"\0",
    )
    for kind, message in arrays.values():
        row = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}, {"name": "x", "type": kind}]}
        form = MessageFormat("avro", pa.schema([("id", pa.int64())]), avro_schema=json.dumps(row))
        begin = time.process_time()
        found = form.read(pa.array([b"\x02" + message % count for count in (*huge, long(300) + b"\0")], pa.binary()))
        assert [one.at for one in found.bad] == [0, 1, 2, 3]
        assert all("more values without bytes than a message of this size has" in one.problem for one in found.bad)
        assert found.rows.to_pylist() == [{"id": 1}]
        assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "kind", ["string", "bytes", {"type": "array", "items": "int"}, {"type": "map", "values": "null"}]
)
@pytest.mark.parametrize("length", [1 << 40, (1 << 63) - 1, -1, -(1 << 40), -(1 << 63), 100])
def test_lengths_beyond_the_message_are_bad(kind: Any, length: int) -> None:
    row = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}, {"name": "x", "type": kind}]}
    form = MessageFormat("avro", pa.schema([("id", pa.int64())]), avro_schema=json.dumps(row))
    found = form.read(pa.array([b"\x02" + long(length) + b"abc"], pa.binary()))
    assert found.bad[0].problem.startswith("is no Avro of its schema")


def test_a_record_that_always_holds_itself_ends_no_process() -> None:
    """It takes no bytes, and has no end."""
    inner = {"type": "record", "name": "B", "fields": [{"name": "a", "type": "A"}]}
    for name, field in (("A", "A"), ("A", inner)):
        schema = {"type": "record", "name": name, "fields": [{"name": "x", "type": field}]}
        with pytest.raises(DescriptionError, match="a record in it that always holds itself has no end"):
            MessageFormat("avro", pa.schema([("x", pa.struct([("y", pa.int64())]))]), avro_schema=json.dumps(schema))


def test_schemas_that_hold_each_other() -> None:
    row = {"type": "record", "name": "A", "namespace": "n", "fields": [
        {"name": "v", "type": "int"},
        {"name": "b", "type": {"type": "record", "name": "B", "fields": [
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "parts", "type": {"type": "array", "items": "A"}}]}},
    ]}  # fmt: skip
    schema = pa.schema(
        [("b", pa.struct([("at", pa.timestamp("us")), ("parts", pa.list_(pa.struct([("v", pa.int32())])))]))]
    )
    leaf = {"v": 2, "b": {"at": dt.datetime(1970, 1, 1), "parts": []}}
    message = written(row, {"v": 1, "b": {"at": dt.datetime(1970, 1, 1, 0, 0, 1), "parts": [leaf, leaf]}})
    found = MessageFormat("avro", schema, avro_schema=json.dumps(row)).read(pa.array([message]))
    assert found.rows.to_pylist() == [{"b": {"at": dt.datetime(1970, 1, 1, 0, 0, 1), "parts": [{"v": 2}, {"v": 2}]}}]
