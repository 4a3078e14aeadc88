"""Topics that our own sinks wrote, read back: stopped in the middle, partitions of the topic split among tasks."""

from __future__ import annotations

import datetime as dt
import json
import math
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from spark.support import Row, Sink, Source, drain, fold, slow_join
from spark.views import COLUMNS, Shop

import gpu_ops
from gpu_ops import sinks, stream
from services.conftest import listens

pytestmark = [pytest.mark.spark, pytest.mark.services]

BROKER = "localhost:19092"
SCHEMA = (
    "id BIGINT NOT NULL, item STRING, price DECIMAL(12, 3), at TIMESTAMP, local TIMESTAMP_NTZ, day DATE, data BINARY, "
    "score DOUBLE, parts ARRAY<STRUCT<n: INT, data: BINARY>>"
)


@pytest.fixture(autouse=True)
def broker() -> None:
    if not listens("kafka"):
        pytest.skip("no Kafka on port 19092")


def row(number: int, version: int) -> Row:
    at = dt.datetime(2026, 1, 1, 12, 30, version, 123456 + number)
    score = (None, 0.1, math.nan, -math.inf)[(number + version) % 4]
    return (
        number, ("book", "pen", 'quoted "}\n{"', None)[(number * 3 + version) % 4], Decimal(number) / 8 - version,
        at.astimezone(dt.UTC), at, at.date(), bytes([number, 255, version]), score,
        [(version, b"\x00"), None] if number % 2 else None,
    )  # fmt: skip


def changes(step: int) -> list[tuple[str, Row]]:
    """Of 24 rows: all come, all but a third change, half go."""
    if step == 0:
        return [("+I", row(n, 0)) for n in range(24)]
    if step == 1:
        return [change for n in range(24) if n % 3 for change in (("-D", row(n, 0)), ("+I", row(n, 1)))]
    return [("-D", row(n, 1 if n % 3 else 0)) for n in range(0, 24, 2)]


def plain(rows: list[Row]) -> list[str]:
    """Rows as they compare: NaN with itself, bytes and times whatever they are held in."""
    return sorted(repr([bytes(x) if isinstance(x, bytearray) else x for x in row]) for row in rows)


@pytest.mark.parametrize("sink", ["kafka_debezium", "kafka_upsert"])
def test_what_was_written_is_read(spark: Any, tmp_path: Path, sink: str) -> None:
    topic = f"t{uuid.uuid4().hex[:8]}"
    write = getattr(sinks, sink)(BROKER, topic, key="id")
    stored = f"row_kind STRING, {SCHEMA}".replace(" NOT NULL", "")

    def written(step: int) -> None:
        write(spark.createDataFrame([(kind, *values) for kind, values in changes(step)], stored), step)

    def read() -> Any:
        options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "30", "minPartitions": "7"}
        form: Any = ("debezium-json", None) if sink == "kafka_debezium" else ("json", "id")
        return gpu_ops.read_kafka(spark, BROKER, topic, form[0], SCHEMA, key=form[1], options=options)

    prices = Source(spark, tmp_path / "prices", "item STRING, price DOUBLE")
    prices.add({"item": "book", "price": 9.5}, {"item": "pen", "price": 1.0})

    def joined() -> Any:
        orders = stream(read().select("row_kind", "id", "item"), row_kind="row_kind", unique_key="id")
        return gpu_ops.join(orders, prices.df, "item", "left", state=str(tmp_path / "state"), emit="per_event")

    rows, table = Sink(), Sink()
    for step in range(3):
        written(step)
        if step:  # the first two at once: a micro-batch has several changes of a row
            drain(read(), rows, tmp_path / "rows")
            drain(joined().select("row_kind", "id", "item", "price"), table, tmp_path / "joined")
    current = [row(n, 1 if n % 3 else 0) for n in range(1, 24, 2)]
    expected = slow_join("left", [values[:2] for values in current], [("book", 9.5), ("pen", 1.0)], 2, on=1)
    assert table.table == expected
    if sink == "kafka_debezium":
        assert plain(fold(map(held, rows.changes))) == plain([tuple(map(comparable, values)) for values in current])
        return
    last = {values[1]: values for values in rows.changes}
    there = [held(values)[1:] for values in last.values() if values[0] != "-D"]
    assert plain(there) == plain([tuple(map(comparable, values)) for values in current])


def held(values: Row) -> Row:
    return tuple(map(comparable, values))


def comparable(value: Any) -> Any:
    """A value that equals itself, whatever it is held in."""
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC).replace(tzinfo=None)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    return value


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_transactions(spark: Any, tmp_path: Path, isolation: str) -> None:
    """Each transaction ends with a record that is no message: offsets have gaps, also at the end."""
    topic = f"t{uuid.uuid4().hex[:8]}"
    producer = confluent_kafka.Producer({"bootstrap.servers": BROKER, "transactional.id": topic})
    producer.init_transactions()
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "9", "kafka.isolation.level": isolation}
    sink, expected = Sink(), []
    for step in range(3):
        for commits in (True, False, True):
            producer.begin_transaction()
            begin = len(expected) if commits else 1000 * step + 1000
            numbers = range(begin, begin + 5)
            for number in numbers:
                producer.produce(topic, json.dumps({"id": number}), partition=number % 2)
            producer.flush()
            producer.commit_transaction() if commits else producer.abort_transaction()
            expected += numbers if commits or isolation == "read_uncommitted" else []
        rows = gpu_ops.read_kafka(spark, BROKER, topic, "json", "id INT", options=options)
        drain(rows, sink, tmp_path / "checkpoint")
        assert sorted(row[0] for row in sink.changes) == sorted(expected)


def test_a_bad_message_is_named(spark: Any, tmp_path: Path) -> None:
    topic = f"t{uuid.uuid4().hex[:8]}"
    values = spark.createDataFrame([('{"id": 1}',), ("{no",)], "value STRING").coalesce(1)
    values.write.format("kafka").option("kafka.bootstrap.servers", BROKER).option("topic", topic).save()
    options = {"startingOffsets": "earliest"}
    rows = gpu_ops.read_kafka(spark, BROKER, topic, "json", "id INT", include=["offset", "timestamp"], options=options)
    assert rows.columns == ["id", "offset", "timestamp"]
    with pytest.raises(Exception, match=f"a message at topic {topic}, partition [01], offset [01]: is no JSON object"):
        drain(rows, Sink(), tmp_path / "checkpoint")


def test_a_consumer_drops_what_a_repeated_micro_batch_sends_again(spark: Any, tmp_path: Path) -> None:
    topic, shop, checkpoint = f"t{uuid.uuid4().hex[:8]}", Shop(spark, tmp_path), tmp_path / "checkpoint"
    messages = sinks.json_messages(shop.changes, "id")

    def run() -> None:
        writer = messages.writeStream.format("kafka").option("kafka.bootstrap.servers", BROKER).option("topic", topic)
        writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()

    for number in range(3):
        shop.more()
        run()
        (checkpoint / "commits" / str(number)).unlink()  # as if the query had been killed before
        (checkpoint / "commits" / f".{number}.crc").unlink(missing_ok=True)
        run()
    read = spark.read.format("kafka").option("kafka.bootstrap.servers", BROKER).option("subscribe", topic)
    found = read.option("includeHeaders", "true").load().orderBy("partition", "offset")
    last: dict[tuple[int, int], list[int]] = {}
    changes = []
    for row in found.selectExpr(
        "partition", "string(value) AS value", "string(headers[0].value) AS sequence"
    ).collect():
        batch, task, message = json.loads(row.sequence)
        if [batch, message] > last.get((row.partition, task), [-1]):
            last[row.partition, task] = [batch, message]
            said = json.loads(row.value)
            changes.append((said["row_kind"], *(said[name] for name in COLUMNS)))
    assert 0 < 2 * len(changes) == found.count()
    assert fold(changes) == shop.expected()
