"""What `kafka_upsert` and `kafka_debezium` send, read by the reader of messages: random rows, sessions of all zones."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import os
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from messages.test_round_trip import EDGES_DAYS, EDGES_US, FLOATS, FLOATS32, bits, made
from pyspark.sql.types import StructField, StructType

from gpu_ops import sinks
from gpu_ops.errors import DescriptionError
from gpu_ops.messages.rows import MessageFormat
from gpu_ops.spark.sinks import changes
from gpu_ops.spark_types import spark_type

pytestmark = pytest.mark.spark

SEED = int(os.environ.get("GPU_JOIN_SEED", "0"))
ZONES = ("Asia/Shanghai", "America/New_York", "Africa/Monrovia", "+05:45")
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("number", pa.float64()),
        ("small", pa.float32()),
        ("price", pa.decimal128(38, 10)),
        ("text", pa.string()),
        ("data", pa.binary()),
        ("parts", pa.list_(pa.struct([("x", pa.float64()), ("at", pa.timestamp("us", "UTC"))]))),
    ]
)
FIRST, LAST = -62135596800000000, 253402300799999999
"""The years 1 to 9999, which Spark's own functions take."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[pa.Table]:
    """What would be sent, a table of keys and values for each micro-batch."""
    tables: list[pa.Table] = []
    monkeypatch.setattr(changes, "_send", lambda rows, *_: tables.append(rows.toArrow()))
    return tables


def random_rows(choice: random.Random, ids: range) -> list[dict[str, Any]]:
    def when() -> int:
        return choice.choice(
            [choice.randrange(FIRST, LAST), choice.choice(EDGES_US), choice.randrange(-(2**63), 2**63)]
        )

    def number() -> float:
        return choice.choice([choice.choice(FLOATS), choice.uniform(-1e9, 1e9)])

    def row(number_: int) -> dict[str, Any]:
        digits = str(choice.randrange(10 ** choice.randrange(39)))
        return {
            "id": number_, "at": when(), "local": when(),
            "day": choice.choice([choice.choice(EDGES_DAYS), choice.randrange(-719162, 2932897)]),
            "number": number(), "small": choice.choice(FLOATS32),
            "price": Decimal((choice.randrange(2), tuple(map(int, digits)), -10)),
            "text": choice.choice(["", '"', "\\", "\n\x1f", "}\n{", "ünï", "NaN", "null"]),
            "data": choice.randbytes(choice.randrange(4)),
            "parts": [choice.choice([None, {"x": number(), "at": when()}]) for _ in range(choice.randrange(3))],
        }  # fmt: skip

    rows = [row(number_) for number_ in ids]
    for one in rows:
        for name in SCHEMA.names[1:]:
            one[name] = one[name] if choice.randrange(8) else None
    return rows


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table([made([row[field.name] for row in rows], field.type) for field in SCHEMA], schema=SCHEMA)


def changelog(spark: Any, *parts: tuple[str, pa.Table]) -> Any:
    tables = [rows.add_column(0, "row_kind", [[kind] * len(rows)]) for kind, rows in parts]
    schema = spark_schema([("row_kind", pa.string()), *zip(SCHEMA.names, SCHEMA.types, strict=True)])
    return spark.createDataFrame(pa.concat_tables(tables), schema)


def spark_schema(fields: list[tuple[str, pa.DataType]]) -> StructType:
    return StructType([StructField(name, spark_type(kind)) for name, kind in fields])


def by_id(rows: pa.RecordBatch | pa.Table) -> dict[int, list[Any]]:
    batch = pa.table(rows.columns, rows.schema.names).combine_chunks()
    columns = [
        bits(batch[name].combine_chunks() if batch[name].num_chunks != 1 else batch[name].chunk(0))
        for name in SCHEMA.names
    ]
    return {row[0]: list(row) for row in zip(*columns, strict=True)}


def read(form: str, messages: pa.Table, zone: str, **more: Any) -> pa.RecordBatch:
    how = MessageFormat(form, SCHEMA, (), "row_kind", encoded=(("data", "base64"),), zone=zone, **more)
    key, value = (messages[name].combine_chunks().cast(pa.binary()) for name in ("key", "value"))
    found = how.read(value, key)
    assert found.bad == []
    return found.rows


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
def test_what_is_sent_is_read(spark: Any, sent: list[pa.Table], zone: str) -> None:
    """Two micro-batches: rows come, and each then changes, or goes; to the bit, in values and in keys."""
    choice, before = random.Random(f"{SEED} {zone}"), spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        old, new = (table(random_rows(choice, range(120))) for _ in range(2))
        kept = new.filter(pa.array([n % 3 > 0 for n in range(120)]))
        for sink in (sinks.kafka_upsert, sinks.kafka_debezium):
            view = sink("nobody:1", "topic", "id")
            view(changelog(spark, ("+I", old)), 0)
            view(changelog(spark, ("-U", old), ("+U", kept)), 1)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    first, second, *envelopes = sent
    assert by_id(read("json", first, zone, key=("id",))) == by_id(old)
    rows = read("json", second, zone, key=("id",))
    there = rows.filter(pa.array([kind == "u" for kind in rows["row_kind"].to_pylist()]))
    assert by_id(there) == by_id(kept)
    assert len(rows) == 120
    rows = read("debezium-json", pa.concat_tables(envelopes), zone)
    for kinds, wanted in ((("+I",), old), (("-U", "-D"), old), (("+U",), kept)):
        assert by_id(rows.filter(pa.array([kind in kinds for kind in rows["row_kind"].to_pylist()]))) == by_id(wanted)
    keys = [json.loads(key) for messages in sent for key in messages["key"].to_pylist()]
    assert sorted(key["id"] for key in keys) == sorted(itertools.chain(*[range(120)] * 4))


def test_keys_that_are_times_and_rows_without_a_key(spark: Any, sent: list[pa.Table]) -> None:
    """43 seconds of Shanghai in 1900, and the year 10000 west of Greenwich, in keys and in whole rows as keys."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Shanghai")
    try:
        rows = spark.sql(
            "SELECT '+I' AS row_kind, 1 AS id, TIMESTAMP'1900-01-01 12:00:00' AS at UNION ALL "
            "SELECT '+I', 2, TIMESTAMP'9999-12-31 23:59:59 America/New_York'"
        )
        sinks.kafka_upsert("nobody:1", "topic", "at")(rows, 0)
        sinks.kafka_debezium("nobody:1", "topic")(rows, 0)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    upserts, envelopes = sent
    times = ["+10000-01-01T04:59:59.000000Z", "1900-01-01T03:54:17.000000Z"]
    assert sorted(upserts["key"].to_pylist()) == [f'{{"at":"{time}"}}' for time in times]
    assert sorted(envelopes["key"].to_pylist()) == [f'{{"id":{n},"at":"{times[2 - n]}"}}' for n in (1, 2)]


@pytest.mark.slow
def test_zeros_of_both_signs(spark: Any, sent: list[pa.Table]) -> None:
    """They are one key, and two values: a change from one to the other is one."""
    rows = [("+I", 1, 0.0, [-0.0]), ("+I", 2, -0.0, [0.0]), ("+I", 3, -0.0, None)]
    changed = [("-U", 1, 0.0, [-0.0]), ("+U", 1, -0.0, [0.0]), ("-D", 3, -0.0, None), ("+I", 3, -0.0, None)]
    schema = "row_kind string, id int, x double, xs array<double>"
    view = sinks.kafka_upsert("nobody:1", "topic", "id")
    for number, batch in enumerate((rows, changed)):
        view(spark.createDataFrame(batch, schema), number)
    assert [sorted(one["value"].to_pylist()) for one in sent] == [
        ['{"id":1,"x":0,"xs":[-0.0]}', '{"id":2,"x":-0.0,"xs":[0]}', '{"id":3,"x":-0.0,"xs":null}'],
        ['{"id":1,"x":-0.0,"xs":[0]}'],
    ]
    view = sinks.kafka_upsert("nobody:1", "topic", "x")
    view(spark.createDataFrame([("+I", 1, -0.0, None)], schema), 0)
    view(spark.createDataFrame([("-U", 1, -0.0, None), ("+U", 1, 0.0, None)], schema), 1)
    assert [one["key"].to_pylist() for one in sent[2:]] == [['{"x":0}'], ['{"x":0}']]


def test_zeros_of_both_signs_within_a_key_are_one_message_key(spark: Any, sent: list[pa.Table]) -> None:
    kind = "struct<`x.y`: float, inner: struct<z: double>, of: array<struct<x: double>>, n: int>"
    schema = f"row_kind string, s {kind}, xs array<array<double>>, v int"

    def row(change: str, zero: float, v: int) -> tuple[Any, ...]:
        return (change, (zero, (zero,), [(zero,), None, (1.5,)], 7), [[zero, None, math.nan], None], v)

    empty = (None, (None,), None, None)
    for sink in (sinks.kafka_upsert, sinks.kafka_debezium):
        sent.clear()
        view = sink("nobody:1", "topic", ["s", "xs"])
        view(spark.createDataFrame([row("+I", -0.0, 1), ("+I", None, None, 3), ("+I", empty, [], 4)], schema), 0)
        view(spark.createDataFrame([row("-U", -0.0, 1), row("+U", 0.0, 2)], schema), 1)
        first, second = (one["key"].to_pylist() for one in sent)
        zeros = '{"s":{"x.y":0,"inner":{"z":0},"of":[{"x":0},null,{"x":1.5}],"n":7},"xs":[[0,null,"NaN"],null]}'
        nulls = ['{"s":null,"xs":null}', '{"s":{"x.y":null,"inner":{"z":null},"of":null,"n":null},"xs":[]}']
        assert sorted(first) == sorted([zeros, *nulls])
        assert second == [zeros]


def test_maps_of_floats_in_a_key_are_refused_by_name(spark: Any, sent: list[pa.Table]) -> None:
    rows = spark.sql("SELECT '+I' AS row_kind, map('a', -0.0D) AS m")
    with pytest.raises(DescriptionError, match=r"in key 'm' there is map<string,double>"):
        sinks.kafka_upsert("nobody:1", "topic", "m")(rows, 0)
    assert sent == []


@pytest.mark.thorough
def test_what_has_no_json_text_is_refused_before_anything_is_sent(spark: Any, sent: list[pa.Table]) -> None:
    rows = spark.sql("SELECT '+I' AS row_kind, 1 AS id, INTERVAL '1' DAY AS took")
    for sink in (sinks.kafka_upsert, sinks.kafka_debezium):
        with pytest.raises(DescriptionError, match="column 'took' is interval day, which has no JSON text: cast it"):
            sink("nobody:1", "topic", "id")(rows, 0)
    assert sent == []


@pytest.mark.thorough
def test_the_same_text_as_json_messages(spark: Any, sent: list[pa.Table]) -> None:
    at = dt.datetime(1900, 1, 1, tzinfo=dt.UTC)
    rows = spark.createDataFrame([(1, at, -0.0, math.nan)], "id int, at timestamp, x double, y double")
    changed = rows.selectExpr("'+I' AS row_kind", "*")
    sinks.kafka_upsert("nobody:1", "topic", "id")(changed, 0)
    ((value,),) = sinks.json_messages(rows, headers=False).collect()
    assert sent[0]["value"].to_pylist() == [value]
