"""Topics that tasks fetch from and send to themselves, with librdkafka's stand-in for a broker in this process."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from messages.broker import PARTITIONS, Broker
from rich.console import Console

import gpu_ops
from gpu_ops.errors import DescriptionError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.jobs.text import JobError
from spark.support import Sink, Source, drain, slow_join
from spark.views import COLUMNS, Shop

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SCHEMA = "id BIGINT NOT NULL, item STRING"
ITEMS = ("book", "pen", "cup")


@pytest.fixture(scope="module")
def broker() -> Broker:
    return Broker()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").rstrip("]")


def order(number: int) -> dict[str, Any]:
    return {"id": number, "item": ITEMS[number % 3]}


def send(broker: Broker, topic: str, *numbers: int) -> None:
    broker.send(topic, *((number % 2, json.dumps(order(number))) for number in numbers))


def read(spark: Any, broker: Broker, topic: str | None, **how: Any) -> Any:
    options = {"startingOffsets": "earliest", **how.pop("options", {})}
    given = {"format": "json", "schema": SCHEMA, "client": "librdkafka", **how}
    return gpu_ops.read_kafka(spark, broker.servers, topic, options=options, **given)


def test_each_message_is_read_once(spark: Any, broker: Broker, topic: str, tmp_path: Path) -> None:
    rows = read(spark, broker, topic, include=["partition", "offset", "topic"], options={"maxOffsetsPerTrigger": "4"})
    assert rows.columns == ["id", "item", "partition", "offset", "topic"]
    sink = Sink()
    send(broker, topic, *range(9))
    drain(rows, sink, tmp_path / "checkpoint")
    assert len(sink.batches) == 3
    send(broker, topic, *range(9, 20))
    broker.send(topic, (3, json.dumps(order(30))))  # a partition without any before
    drain(rows, sink, tmp_path / "checkpoint")
    drain(rows, sink, tmp_path / "checkpoint")
    assert all(len(batch) <= 4 for batch in sink.batches.values())
    expected = [(n, ITEMS[n % 3], n % 2, n // 2, topic) for n in range(20)]
    assert sorted(sink.changes) == [*expected, (30, "book", 3, 0, topic)]
    for partition in range(PARTITIONS):
        offsets = [row[3] for row in sink.changes if row[2] == partition]
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("starting", ["latest", "given"])
def test_where_a_query_begins(spark: Any, broker: Broker, topic: str, tmp_path: Path, starting: str) -> None:
    send(broker, topic, *range(10))
    given = json.dumps({topic: {"0": 3, "1": -1, "2": -2, "3": -1}})
    rows, sink = (
        read(spark, broker, topic, options={"startingOffsets": given if starting == "given" else "latest"}),
        Sink(),
    )
    drain(rows, sink, tmp_path / "checkpoint")
    send(broker, topic, 10, 11)
    drain(rows, sink, tmp_path / "checkpoint")
    assert sorted(row[0] for row in sink.changes) == ([6, 8, 10, 11] if starting == "given" else [10, 11])


def test_several_tasks_read_a_partition(spark: Any, broker: Broker, topic: str, tmp_path: Path) -> None:
    send(broker, topic, *range(0, 40, 2), 1)  # a partition of 20 and one of 1
    rows, sink = read(spark, broker, topic, include=["partition", "offset"], options={"minPartitions": "4"}), Sink()
    query = drain(rows, sink, tmp_path / "checkpoint")
    assert query.lastProgress["numInputRows"] == 5  # ranges
    assert [row[3] for row in sink.changes if row[2] == 0] == [*range(20)]
    assert [row[0] for row in sink.changes if row[2] == 1] == [1]


def test_a_join_of_topics_into_a_topic(spark: Any, broker: Broker, topic: str, tmp_path: Path) -> None:
    prices = Source(spark, tmp_path / "prices", "item STRING, price DOUBLE")
    prices.add({"item": "book", "price": 9.5}, {"item": "pen", "price": 1.0})
    orders = read(spark, broker, None, name="orders", options={"subscribePattern": f"{topic}_[ab]"})

    def run() -> None:
        joined = gpu_ops.join(orders, prices.df, "item", "left", state=str(tmp_path / "state"))
        assert "messages of orders (json)" in gpu_ops.explain(joined)
        query = gpu_ops.write_kafka(
            joined, broker.servers, f"{topic}_out", key="id", checkpoint=str(tmp_path / "checkpoint"), availableNow=True
        )
        query.awaitTermination()

    send(broker, f"{topic}_a", *range(8))
    send(broker, f"{topic}_b", *range(8, 12))
    run()
    send(broker, f"{topic}_b", *range(12, 15))
    run()
    found, sequences = [], list[tuple[int, ...]]()
    for messages in broker.received(f"{topic}_out"):
        for message in messages:
            row = json.loads(message.value())
            assert message.key() == b"%d" % row["id"]
            found.append(tuple(row.values()))
            ((name, sequence),) = message.headers()
            assert name == "sequence"
            sequences.append(tuple(json.loads(sequence)))
    sides = [(n, ITEMS[n % 3]) for n in range(15)], [("book", 9.5), ("pen", 1.0)]
    expected = slow_join("left", *sides, 2, on=1)
    assert sorted((row[2], row[1], row[3]) for row in found) == sorted((row[0], row[1], row[-1]) for row in expected)
    assert {row[0] for row in found} == {"+I"}
    assert len(set(sequences)) == 15
    assert {sequence[0] for sequence in sequences} == {0, 1}


def test_a_changelog_as_messages(spark: Any, broker: Broker, topic: str, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path)
    changes = shop.changes.where("quantity IS NOT NULL")
    for files in (1, 2, 3):
        shop.more()
        query = gpu_ops.write_kafka(
            changes, broker.servers, topic, key="ID", headers=False, checkpoint=str(tmp_path / "c"), availableNow=True
        )
        query.awaitTermination()
        table: dict[Any, list[Any]] = {}
        for messages in broker.received(topic):
            for message in messages:  # those of a key are in one partition, in their order
                assert message.headers() is None
                kind, *row = json.loads(message.value()).values()
                there = table.setdefault(message.key(), [])
                there.append(row) if kind in ("+I", "+U") else there.remove(row)
        wanted = [list(row) for row in shop.expected(files) if row[COLUMNS.index("quantity")] is not None]
        assert sorted(repr(row) for rows in table.values() for row in rows) == sorted(map(repr, wanted))


def test_a_bad_message_is_named(spark: Any, broker: Broker, topic: str, tmp_path: Path) -> None:
    broker.send(topic, (1, '{"id": 1}'), (1, "{no"))
    with pytest.raises(Exception, match=rf"a message at topic {topic}, partition 1, offset 1: .*no"):
        drain(read(spark, broker, topic), Sink(), tmp_path / "checkpoint")
    sink = Sink()
    drain(read(spark, broker, topic, bad_rows="drop"), sink, tmp_path / "dropped")
    assert sink.changes == [(1, None)]


@pytest.mark.parametrize("lost", [False, True])
def test_messages_that_are_gone(spark: Any, broker: Broker, topic: str, tmp_path: Path, lost: bool) -> None:
    send(broker, topic, *range(4))
    given = json.dumps({topic: {"0": 7, "1": 0, "2": 0, "3": 0}})
    rows, sink = read(spark, broker, topic, options={"startingOffsets": given, "failOnDataLoss": str(not lost)}), Sink()
    if not lost:
        with pytest.raises(Exception, match=f"topic {topic}, partition 0: offset 7 was reached before.*failOnDataLoss"):
            drain(rows, sink, tmp_path / "checkpoint")
        return
    drain(rows, sink, tmp_path / "checkpoint")
    assert sorted(row[0] for row in sink.changes) == [1, 3]


@pytest.mark.parametrize("lost", [False, True])
def test_a_topic_that_is_gone(spark: Any, broker: Broker, topic: str, tmp_path: Path, lost: bool) -> None:
    """The stand-in deletes no topics; one that a pattern does not match any more is as good."""
    sink = Sink()
    for pattern in ("[ab]", "a"):
        send(broker, f"{topic}_a", *range(4))
        send(broker, f"{topic}_b", *range(4, 6))
        options = {"subscribePattern": f"{topic}_{pattern}", "failOnDataLoss": str(not lost)}
        rows = read(spark, broker, None, name="orders", options=options)
        if pattern == "a" and not lost:
            with pytest.raises(Exception, match=f"topic {topic}_b, partition 0: it is not there any more.* offset 1 "):
                drain(rows, sink, tmp_path / "checkpoint")
        else:
            drain(rows, sink, tmp_path / "checkpoint")
    assert sorted(row[0] for row in sink.changes) == (sorted([*range(6), *range(4)]) if lost else [*range(6)])


def test_a_job(spark: Any, broker: Broker, topic: str, tmp_path: Path) -> None:
    at = f"'connector' = 'kafka', 'bootstrap_servers' = '{broker.servers}', 'client' = 'librdkafka'"
    text = f"""
        CREATE TABLE orders (id BIGINT NOT NULL, item STRING, PRIMARY KEY (id) NOT ENFORCED)
            WITH ({at}, 'topic' = '{topic}_in', 'format' = 'debezium-json', 'starting_offsets' = 'earliest',
                'kafka.fetch.wait.max.ms' = '5');
        CREATE TABLE counts (item STRING, n BIGINT) WITH ({at}, 'topic' = '{topic}_out', 'key' = 'item');
        SET state = 'state'; SET checkpoint = 'checkpoint';
        INSERT INTO counts SELECT item, count(*) FROM orders GROUP BY item;
    """
    path = tmp_path / "job.sql"
    path.write_text(text)
    expected: dict[str, int] = {}
    for first in (0, 10):
        new = [order(number) for number in range(first, first + 10)]
        for row in new:
            expected[row["item"]] = expected.get(row["item"], 0) + 1
        broker.send(f"{topic}_in", *((0, json.dumps({"op": "c", "before": None, "after": row})) for row in new))
        runner.run(load(path), Console(file=io.StringIO()), once=True)
    table: dict[str, int] = {}
    for messages in broker.received(f"{topic}_out"):
        for message in messages:
            row = json.loads(message.value())
            if row["row_kind"] == "+I":
                table[row["item"]] = row["n"]
            else:
                assert table.pop(row["item"]) == row["n"]
    assert table == expected
    path.write_text(text.replace("kafka.fetch.wait.max.ms", "kafka.fetch.min.records"))
    with pytest.raises(JobError, match=r"job.sql:2:22: .*fetch.min.records"):
        runner.run(load(path), Console(file=io.StringIO()), once=True)


def test_what_cannot_be_read(spark: Any, broker: Broker) -> None:
    def refused(match: str, topic: str | None = "t", **how: Any) -> None:
        with pytest.raises(DescriptionError, match=match):
            read(spark, broker, topic, **how)

    refused("no option 'groupIdPrefix'", options={"groupIdPrefix": "x"})
    refused("minPartitions='two'", options={"minPartitions": "two"})
    refused("No such configuration property", options={"kafka.key.deserializer": "x"})
    refused("takes a topic, or options with subscribePattern", None)
    refused("takes a topic, or options with subscribePattern", options={"subscribePattern": "x"})
    refused("startingOffsets='soon'", options={"startingOffsets": "soon"})
    refused("maxOffsetsPerTrigger='0'", options={"maxOffsetsPerTrigger": "0"})
    refused("include names 'headers'", include=["headers"])
    refused("there are 'spark' and 'librdkafka'", client="aiokafka")
    static = spark.createDataFrame([(1,)], "id INT")
    with pytest.raises(DescriptionError, match="takes a streaming DataFrame"):
        gpu_ops.write_kafka(static, broker.servers, "t")
    with pytest.raises(DescriptionError, match="'nothing' is no column"):
        gpu_ops.write_kafka(read(spark, broker, "t"), broker.servers, "t", key="nothing")
    with pytest.raises(DescriptionError, match="No such configuration property"):
        gpu_ops.write_kafka(read(spark, broker, "t"), broker.servers, "t", options={"kafka.buffer.memory": "1"})
