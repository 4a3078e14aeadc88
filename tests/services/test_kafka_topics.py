"""What happens to topics under a query, and rows of all types and zones by way of a real Kafka."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from spark.support import Sink, drain
from spark.test_sink_messages import SCHEMA, SEED, by_id, changelog, random_rows, spark_schema, table

import gpu_ops
from gpu_ops import sinks
from gpu_ops.errors import StateError
from services.conftest import listens

pytestmark = [pytest.mark.spark, pytest.mark.services]

BROKER = "localhost:19092"
COMPACTED = {
    "cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01", "delete.retention.ms": "100",
}  # fmt: skip


class Topic:
    """A topic of a test's own."""

    def __init__(self, **config: str) -> None:
        if not listens("kafka"):
            pytest.skip("no Kafka on port 19092")
        self.name, self._config = f"t{uuid.uuid4().hex[:8]}", config
        self.admin = AdminClient({"bootstrap.servers": BROKER})

    def create(self, partitions: int = 1) -> None:
        done(self.admin.create_topics([NewTopic(self.name, partitions, 1, config=self._config)]))

    def delete(self) -> None:
        done(self.admin.delete_topics([self.name]))

    def send(self, *values: Any, partition: int = 0, key: Any = None, **more: Any) -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": BROKER})  # it knows partitions from when it began
        for value in values:
            text = None if value is None else value if isinstance(value, str | bytes) else json.dumps(value)
            producer.produce(self.name, text, key=key, partition=partition, **more)
        producer.flush()

    def rows(self, spark: Any, schema: str = "id INT", form: Any = "json", **given: Any) -> Any:
        options = {"startingOffsets": "earliest"} | given.pop("options", {})
        named = not {"assign", "subscribePattern"} & options.keys()
        return gpu_ops.read_kafka(spark, BROKER, self.name if named else None, form, schema, options=options, **given)


def done(futures: dict[str, Any]) -> None:
    for future in futures.values():
        future.result()


@pytest.fixture
def topic() -> Iterator[Callable[..., Topic]]:
    made: list[Topic] = []

    def make(partitions: int = 1, **config: str) -> Topic:
        made.append(Topic(**config))
        made[-1].create(partitions)
        return made[-1]

    yield make
    for one in made:
        one.delete()


def numbers(sink: Sink, before: int = 0) -> list[int]:
    """What came behind so many rows."""
    return sorted(row[0] for row in sink.changes[before:])


def ids(numbers_: Iterable[int]) -> list[dict[str, int]]:
    return [{"id": number} for number in numbers_]


def test_partitions_that_come_under_a_query_are_read_from_their_beginning(
    spark: Any, tmp_path: Path, topic: Any
) -> None:
    """Also where it began at the latest offsets (FLINK-32019, KAFKA-12261, KAFKA-20539, quickwit 758)."""
    one = topic()
    one.send(*ids(range(5)))
    sink, options = Sink(), {"startingOffsets": "latest"}
    drain(one.rows(spark, options=options), sink, tmp_path / "checkpoint")
    assert numbers(sink) == []
    done(one.admin.create_partitions([NewPartitions(one.name, 3)]))
    time.sleep(1)
    for partition in range(3):
        one.send(*ids(range(10 * partition + 10, 10 * partition + 13)), partition=partition)
    drain(one.rows(spark, options=options), sink, tmp_path / "checkpoint")
    assert numbers(sink) == [10, 11, 12, 20, 21, 22, 30, 31, 32]


@pytest.mark.parametrize(("again", "how"), [(3, "subscribe"), (5, "assign"), (9, "subscribe"), (9, "subscribePattern")])
def test_a_topic_made_anew_is_noticed_by_its_id(spark: Any, tmp_path: Path, topic: Any, again: int, how: str) -> None:
    """With fewer messages than the old offset, as many and more: Spark's reader would notice the first alone."""
    one, sink, checkpoint = topic(), Sink(), tmp_path / "checkpoint"
    ways = {"assign": json.dumps({one.name: [0]}), "subscribePattern": f"{one.name[:-1]}."}
    options = {how: ways[how]} if how in ways else {}
    one.send(*ids(range(5)))
    drain(one.rows(spark, options=options), sink, checkpoint)
    drain(one.rows(spark, options=options), sink, checkpoint)
    assert numbers(sink) == [0, 1, 2, 3, 4]
    one.delete()
    time.sleep(2)
    one.create()
    one.send(*ids(range(100, 100 + again)))
    for _ in range(2):
        with pytest.raises(StateError, match=f"topic '{one.name}' was deleted and made anew since the query's last"):
            drain(one.rows(spark, options=options), sink, checkpoint)
    drain(one.rows(spark, options={**options, "failOnDataLoss": "false"}), sink, checkpoint)
    one.send({"id": 200})
    drain(one.rows(spark, options=options), sink, checkpoint)
    assert numbers(sink, 5)[-1] == 200


def test_a_compacted_topic_is_its_table(spark: Any, tmp_path: Path, topic: Any) -> None:
    """Offsets have gaps, rows of earlier values are not there (risingwave 9267, materialize 4024, druid 5404)."""
    one = topic(**COMPACTED)
    for version in range(4):
        for number in range(6):
            one.send({"id": number, "v": version}, key=json.dumps({"id": number}))
    one.send(None, key='{"id": 5}')
    low = 0
    for _ in range(60):
        time.sleep(1)
        one.send({"id": 99, "v": 0}, key='{"id": 99}')  # a new segment, so that the ones before may be compacted
        low = len(messages(one))
        if low < 20:
            break
    assert low < 20
    sink = Sink()
    rows = one.rows(spark, "id INT, v INT", key="id", options={"maxOffsetsPerTrigger": "4"})
    drain(rows, sink, tmp_path / "checkpoint")
    last = {row[1]: row for row in sink.changes}
    assert {key: row[2] for key, row in last.items() if row[0] != "-D"} == {**dict.fromkeys(range(5), 3), 99: 0}


def messages(one: Topic) -> list[int]:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": BROKER, "group.id": uuid.uuid4().hex})
    consumer.assign([confluent_kafka.TopicPartition(one.name, 0, confluent_kafka.OFFSET_BEGINNING)])
    _, end = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(one.name, 0))
    found: list[int] = []
    while not found or found[-1] < end - 1:
        message = consumer.poll(5)
        if message is None:
            break
        found.append(message.offset())
    consumer.close()
    return found


def test_headers_and_messages_that_are_no_rows(spark: Any, tmp_path: Path, topic: Any) -> None:
    """Tombstones without a key, of Debezium's deletes, heartbeats by logical messages, headers of any bytes."""
    one = topic()
    row = {"id": 1}
    one.send({"op": "c", "before": None, "after": row}, headers=[("trace", b"\xff\x00"), ("trace", None)])
    one.send({"op": "d", "before": row, "after": None}, key='{"id":1}')
    one.send(None, key='{"id":1}')
    one.send(None)
    one.send({"op": "m", "source": {}, "message": {"prefix": "p", "content": "aGk="}})
    sink = Sink()
    rows = one.rows(spark, form="debezium-json", include=["headers"], options={"includeHeaders": "true"})
    drain(rows.selectExpr("row_kind", "id", "size(headers) AS headers"), sink, tmp_path / "checkpoint")
    assert [tuple(row) for row in sink.changes] == [("+I", 1, 2), ("-D", 1, None)]


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "America/New_York"])
def test_rows_of_all_types_by_way_of_kafka(spark: Any, tmp_path: Path, topic: Any, zone: str) -> None:
    """Out by `kafka_upsert` and `kafka_debezium`, in by `read_kafka`, to the bit; years 1 to 9999 and beyond."""
    before, choice = spark.conf.get("spark.sql.session.timeZone"), random.Random(f"{SEED} {zone} services")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        old, new = (table(random_rows(choice, range(200))) for _ in range(2))
        kept = new.filter(pa.array([number % 3 > 0 for number in range(200)]))
        for form, sink, key in (("json", sinks.kafka_upsert, "id"), ("debezium-json", sinks.kafka_debezium, None)):
            one, found = topic(2), list[pa.Table]()
            view = sink(BROKER, one.name, "id")
            view(changelog(spark, ("+I", old)), 0)
            view(changelog(spark, ("-U", old), ("+U", kept)), 1)
            given = spark_schema(list(zip(SCHEMA.names, SCHEMA.types, strict=True)))
            rows = one.rows(spark, given, form, key=key, encoded={"data": "base64"})
            query = rows.writeStream.foreachBatch(lambda batch, _, found=found: found.append(batch.toArrow()))
            query = query.option("checkpointLocation", str(tmp_path / form)).trigger(availableNow=True).start()
            query.awaitTermination()
            read = pa.concat_tables(found)
            kinds = read["row_kind"].to_pylist()
            if form == "json":
                assert sorted(set(kinds)) == ["-D", "u"]
                last = {number: n for n, number in enumerate(read["id"].to_pylist()) if kinds[n] == "u"}
                gone = {number for n, number in enumerate(read["id"].to_pylist()) if kinds[n] == "-D"}
                assert gone == {number for number in range(200) if number % 3 == 0}
                there = [n for number, n in last.items() if number not in gone]
                assert by_id(read.take(there)) == by_id(kept)
            else:
                for some, wanted in ((("+I",), old), (("-U", "-D"), old), (("+U",), kept)):
                    assert by_id(read.filter(pa.array([kind in some for kind in kinds]))) == by_id(wanted)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_topic_that_a_query_names_twice_is_read_once(spark: Any, tmp_path: Path, topic: Any, partitions: int) -> None:
    one, choice, sent = topic(2), random.Random(partitions), list[dict[str, int]]()
    query = "SELECT t.k, t.v, n.top FROM t JOIN (SELECT k, max(v) AS top FROM t GROUP BY k) n ON t.k = n.k"
    rows: Counter[tuple[Any, ...]] = Counter()

    def fold(batch: Any, _: int) -> None:
        for kind, *row in batch.collect():
            rows[tuple(row)] += 1 if kind in ("+I", "+U") else -1

    for _ in range(3):
        new = [{"k": choice.randrange(4), "v": choice.randrange(30)} for _ in range(25)]
        for number in range(2):
            one.send(*new[number::2], partition=number)
        sent += new
        tables = {"t": one.rows(spark, "k INT, v INT")}
        changes = gpu_ops.sql(query, tables=tables, state=str(tmp_path / "state"), partitions=partitions)
        assert gpu_ops.explain(changes).count("read once for 2 inputs") == 2
        writer = changes.writeStream.foreachBatch(fold).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        top = {k: max(x["v"] for x in sent if x["k"] == k) for k in {x["k"] for x in sent}}
        assert +rows == Counter((x["k"], x["v"], top[x["k"]]) for x in sent)
        assert not -rows
    offsets = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert len(offsets.read_text().splitlines()) == 3
