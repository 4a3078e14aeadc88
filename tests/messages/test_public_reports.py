"""Public reports of other systems about messages of Kafka, tried here; docs/contributing/tried.md has them, by name."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from gpu_ops.messages.rows import MessageFormat
from messages.test_round_trip import bits

pytestmark = pytest.mark.thorough

T, C = "io.debezium.time.", "org.apache.kafka.connect.data."
UTC, LONG = pa.timestamp("us", "UTC"), pa.int64()
ID = pa.schema([("id", LONG)])


def wrapped(value: Any, kind: str, name: str = "", **more: Any) -> dict[str, Any]:
    field = {"field": "c", "type": kind, **({"name": name} if name else {}), **more}
    return {"schema": {"type": "struct", "fields": [field]}, "payload": {"c": value}}


def read(form: MessageFormat, *values: Any, keys: Any = None) -> list[Any]:
    """Of each message its rows, or what is wrong with it; nothing where it says nothing."""
    texts = [one if isinstance(one, bytes | None) else json.dumps(one).encode() for one in values]
    found = form.read(pa.array(texts, pa.binary()), None if keys is None else pa.array(keys, pa.binary()))
    rows = zip(*(bits(column) for column in found.rows.columns), strict=True)
    said = [(int(at), row if len(row) > 1 else row[0]) for at, row in zip(found.at, rows, strict=True)]
    return [one for _, one in sorted([*said, *((one.at, one.problem) for one in found.bad)], key=lambda x: x[0])]


def column(kind: pa.DataType, value: Any) -> Any:
    return read(MessageFormat("json", pa.schema([("c", kind)])), value)[0]


@pytest.mark.parametrize(
    ("value", "name", "right"),
    [
        pytest.param(-6795364578871000, "MicroTimestamp", -6795364578871000, id="kafka-connect-bigquery 401"),
        pytest.param(2**63 - 1, "MicroTimestamp", 2**63 - 1, id="DBZ-2565, infinity"),
        pytest.param(253402300800000, "Timestamp", 253402300800000000, id="artie 1551, the year 10000"),
        pytest.param(-62135596800000, "Timestamp", -62135596800000000, id="risingwave 16895, the year 1"),
        pytest.param(-1, "Timestamp", -1000, id="DBZ-694"),
    ],
)
def test_times_far_from_1970(value: int, name: str, right: int) -> None:
    assert column(UTC, wrapped(value, "int64", T + name)) == right


@pytest.mark.parametrize("text", ["infinity", "-infinity"])
def test_infinity_of_postgres_as_a_text(text: str) -> None:
    """Altinity 1231: other systems have an empty text of it."""
    assert f"Failed to parse string: '{text}'" in column(UTC, wrapped(text, "string", f"{T}ZonedTimestamp"))


def test_a_scale_of_127() -> None:
    """kafka-connect-jdbc 716: Oracle's NUMBER without a precision; the value is right where the type has its digits."""
    unscaled = base64.b64encode((5 * 10**125).to_bytes(56, "big")).decode()
    message = wrapped(unscaled, "bytes", f"{C}Decimal", parameters={"scale": "127"})
    assert str(column(pa.decimal128(10, 2), message)) == "0.05"


def test_a_decimal_is_no_bigint() -> None:
    """FLINK-39832: NUMBER(19) comes as a decimal; its bytes read as a number gave one key to all rows."""
    message = wrapped("fQ==", "bytes", f"{C}Decimal", parameters={"scale": "0"})
    assert column(LONG, message) == f"column 'c' is {C}Decimal in its schema, and not int64"


def test_a_time_as_a_struct() -> None:
    """dbz 2119: Debezium's structured times have names that are not known here."""
    message = wrapped({"year": 2026}, "struct", f"{T}StructuredTimestamp", fields=[{"field": "year", "type": "int32"}])
    assert column(UTC, message) == f"column 'c' is {T}StructuredTimestamp in its schema, and not timestamp[us, tz=UTC]"


ENVELOPES = MessageFormat("debezium-json", ID, row_kind="row_kind")


def test_what_debezium_sends_besides_changes() -> None:
    """airbyte 41647, hazelcast 26005: logical messages say nothing, heartbeats and schema changes are no changes."""
    change = {"op": "c", "before": None, "after": {"id": 1}, "transaction": {"id": "571", "total_order": 1}}
    logical = {"op": "m", "ts_ms": 1720724527278, "source": {}, "message": {"prefix": "datastream", "content": "Y2Rj"}}
    ended = {"status": "END", "id": "571:53195832", "event_count": 2, "data_collections": []}
    altered = {"source": {}, "databaseName": "shop", "ddl": "ALTER TABLE orders ADD x INT", "tableChanges": []}
    truncated = {"op": "t", "before": None, "after": None, "source": {}}
    found = read(ENVELOPES, change, logical, {"ts_ms": 1720724527278}, ended, altered, truncated, None)
    assert found[:4] == [("+I", 1), "has no op", "has no op", "has no op"]
    assert found[4].startswith("a truncate (op t)")
    assert len(found) == 5


def test_rows_in_avros_own_json() -> None:
    """hudi 2149: ``{"year": {"int": 2020}}`` is no row, and no null."""
    found = read(
        ENVELOPES,
        {"op": "r", "before": None, "after": {"Value": {"id": 12}}},
        {"op": "c", "after": {"id": {"long": 3}}},
    )
    assert found[0] == ("+I", None)
    assert "Column(/after/id) changed from" in found[1]
    required = MessageFormat("debezium-json", ID, ("id",), "row_kind")
    assert read(required, {"op": "r", "after": {"Value": {"id": 12}}}) == ["column 'id' is null or missing"]


def test_tombstones() -> None:
    """feldera 6707, paimon 3113, schema-registry 1174, faststream 2932: null deletes, an empty value is no message."""
    table = MessageFormat("json", ID, (), "row_kind", ("id",))
    keys = [b'{"id":1}', b'{"id":1}', None, b'{"id":null}', None]
    found = read(table, {"id": 1}, None, None, None, b"", keys=keys)
    assert found[:3] == [("u", 1), ("-D", 1), "a message with neither key nor value"]
    assert "its key has no 'id', or null" in found[3]
    assert found[4] == "is no JSON object"
    assert read(MessageFormat("json", ID), None, {"id": 1}) == [1]


def avro(fields: list[dict[str, Any]], row: dict[str, Any]) -> tuple[str, bytes]:
    schema = {"type": "record", "name": "Row", "fields": fields}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), row)
    return json.dumps(schema), out.getvalue()


def test_a_logical_type_beside_the_type() -> None:
    """ClickHouse 47621: on a field, not on its type, it says nothing, with a default or without."""
    for more in ({}, {"default": 0}):
        schema, message = avro([{"name": "c", "type": "long", "logicalType": "timestamp-millis", **more}], {"c": 5})
        assert read(MessageFormat("avro", pa.schema([("c", LONG)]), avro_schema=schema), message) == [5]
        as_time = MessageFormat("avro", pa.schema([("c", UTC)]), avro_schema=schema)
        assert read(as_time, message) == ["column 'c' is long in its schema, and not timestamp[us, tz=UTC]"]


def test_schemas_that_evolve() -> None:
    """redpanda 4120, hudi 6611, fastavro 225: a message is read by the schema it was written with.

    A field that this does not have is null, whatever default or alias a later schema has; to `NOT NULL` that is bad.
    """
    wanted = pa.schema([("id", LONG), ("ten", pa.bool_())])
    first, message = avro([{"name": "id", "type": "long"}], {"id": 1})
    assert read(MessageFormat("avro", wanted, avro_schema=first), message) == [(1, None)]
    required = MessageFormat("avro", wanted, ("ten",), avro_schema=first)
    assert read(required, message) == ["column 'ten' is null or missing"]
    kind = {"type": "enum", "name": "E", "symbols": ["A"], "default": "A"}
    later = [
        {"name": "id", "type": ["null", "long"], "default": None, "aliases": ["number"]},
        {"name": "ten", "type": "boolean", "default": True},
        {"name": "other", "type": ["null", kind], "default": None},
    ]  # fmt: skip
    schema, message = avro(later, {"id": 2, "ten": False, "other": "A"})
    assert read(MessageFormat("avro", wanted, avro_schema=schema), message) == [(2, False)]
