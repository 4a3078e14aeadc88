"""Messages as inputs of joins: `gpu_ops.debezium` and what `gpu_ops.read_kafka` makes of a topic, without a broker.

A folder of text files stands for the topic: each line is a message, each file a micro-batch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from pyspark.sql import types as st

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError
from gpu_ops.jobs.job import JobSource as Job
from gpu_ops.jobs.tables import decode, kept
from gpu_ops.spark.sources.kafka import MessageSource
from spark.support import Sink, Source, drain, fold, in_memory, slow_join

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SCHEMA = "id BIGINT NOT NULL, item STRING, at TIMESTAMP"


class Topic:
    """A folder of messages."""

    def __init__(self, spark: Any, folder: Path) -> None:
        folder.mkdir()
        self._spark, self._folder, self._files = spark, folder, 0

    @property
    def df(self) -> Any:
        lines = self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._folder))
        return lines.selectExpr(
            "CAST(nullif(get_json_object(value, '$.k'), 'none') AS BINARY) AS key",
            "CAST(nullif(get_json_object(value, '$.v'), 'none') AS BINARY) AS value",
            "'shop' AS topic", "7 AS partition", "CAST(get_json_object(value, '$.n') AS BIGINT) AS offset",
        )  # fmt: skip

    def add(self, *messages: Any) -> None:
        """One micro-batch of values, or of pairs of key and value."""
        lines = []
        for number, message in enumerate(messages):
            key, value = message if isinstance(message, tuple) else (None, message)
            texts = ["none" if x is None else x if isinstance(x, str) else json.dumps(x) for x in (key, value)]
            lines.append(json.dumps({"k": texts[0], "v": texts[1], "n": number}))
        self._files += 1
        path = self._folder / f".{self._files:04d}"
        path.write_text("\n".join(lines))
        path.rename(self._folder / f"{self._files:04d}.txt")
        time.sleep(0.002)


def envelope(op: str, before: Any, after: Any) -> dict[str, Any]:
    return {"op": op, "before": before, "after": after, "source": {"ts_ms": 1}}


@pytest.fixture
def topic(spark: Any, tmp_path: Path) -> Topic:
    return Topic(spark, tmp_path / "topic")


def test_envelopes_are_an_input(spark: Any, topic: Topic, tmp_path: Path) -> None:
    prices = Source(spark, tmp_path / "prices", "op string, item string, price double")
    a, b, c = ({"id": n, "item": x, "at": "2026-01-01T00:00:00Z"} for n, x in ((1, "book"), (1, "pen"), (2, "book")))
    connect = {"type": "struct", "fields": []}
    topic.add(envelope("r", None, a), None, {"schema": connect, "payload": envelope("c", None, c)})
    prices.add({"op": "+I", "item": "book", "price": 9.5})
    topic.add(envelope("u", a, b), envelope("m", None, None))
    prices.add({"op": "+I", "item": "pen", "price": 1.0})
    topic.add(envelope("d", c, None), None)
    orders = gpu_ops.debezium(topic.df, SCHEMA, include=["offset"])
    assert orders.columns == ["row_kind", "id", "item", "at", "offset"]
    orders = orders.drop("at", "offset")
    changes = in_memory(
        gpu_ops.join, stream(orders, row_kind="row_kind"), stream(prices.df, row_kind="op"), "item", "left",
        emit="per_event",
    )  # fmt: skip
    sink = Sink()
    drain(changes.select("row_kind", "id", "item", "price"), sink, tmp_path / "checkpoint")
    assert sink.table == slow_join("left", [(1, "pen")], [("pen", 1.0), ("book", 9.5)], 2, on=1)
    assert fold(sink.batches[0]) == [(1, "book", 9.5), (2, "book", 9.5)]


def test_upserts_and_tombstones_are_an_input(spark: Any, topic: Topic, tmp_path: Path) -> None:
    """The key of the topic is not the one of the join: a tombstone has no item."""
    prices = Source(spark, tmp_path / "prices", "item string, price double")
    prices.add({"item": "book", "price": 9.5})
    topic.add(*(({"id": n}, {"id": n, "item": "book"}) for n in range(4)))
    topic.add(({"id": 1}, {"id": 1, "item": "pen"}), ({"id": 2}, None), ({"id": 3}, None), ({"id": 9}, None))
    topic.add(({"id": 3}, {"id": 3, "item": "pen"}))
    orders = MessageSource("orders", "json", "id BIGINT, item STRING", key="id").rows(topic.df)
    sink = Sink()

    def joined(**declared: Any) -> Any:
        return in_memory(gpu_ops.join, stream(orders, row_kind="row_kind", **declared), prices.df, "item", "left")

    drain(joined(unique_key="id").select("row_kind", "id", "item", "price"), sink, tmp_path / "checkpoint")
    assert sink.table == [(0, "book", 9.5), (1, "pen", None), (3, "pen", None)]
    with pytest.raises(Exception, match="an update without its old row needs unique_key="):
        drain(joined(), Sink(), tmp_path / "without")


def test_bad_messages(spark: Any, topic: Topic, tmp_path: Path) -> None:
    good = envelope("c", None, {"id": 1, "item": "a"})
    topic.add(good, "{no", envelope("c", None, {"item": "b"}), envelope("t", None, None), good)

    def rows(bad_rows: Any) -> tuple[Sink, Any]:
        df = gpu_ops.debezium(topic.df, SCHEMA, bad_rows=bad_rows, name="shop")
        sink = Sink()
        return sink, drain(df.drop("at"), sink, tmp_path / bad_rows)

    with pytest.raises(Exception, match="BadInputError") as caught:
        rows("fail")
    where = "input 'shop': a message at topic shop, partition 7, offset 1: is no JSON object (for example '{no')"
    assert where in str(caught.value)
    sink, query = rows("drop")
    assert sink.changes == [("+I", 1, "a")] * 2
    assert query.lastProgress["observedMetrics"]["shop"]["bad_messages"] == 3
    sink, _ = rows("tag")
    assert [row[:3] for row in sink.changes] == [("+I", 1, "a"), *[("bad", None, None)] * 3, ("+I", 1, "a")]
    assert [row[3] and row[3].partition(": ")[2][:30] for row in sink.changes] == [
        None, "is no JSON object: {no", "column 'id' is null or missing", "a truncate (op t) empties its ", None,
    ]  # fmt: skip


def test_tagged_messages_come_out_of_a_join(spark: Any, topic: Topic, tmp_path: Path) -> None:
    prices = Source(spark, tmp_path / "prices", "item string, price double")
    prices.add({"item": "a", "price": 9.5})
    topic.add(envelope("c", None, {"id": 1, "item": "a"}), "{no")
    orders = gpu_ops.debezium(topic.df, SCHEMA, bad_rows="tag").drop("at")
    changes = in_memory(gpu_ops.join, stream(orders, row_kind="row_kind", bad_rows="tag"), prices.df, "item", "left")
    sink = Sink()
    drain(changes.select("row_kind", "id", "bad_message"), sink, tmp_path / "checkpoint")
    assert sorted(sink.changes) == [
        ("+I", 1, None), ("bad", None, "a message at topic shop, partition 7, offset 1: is no JSON object: {no"),
    ]  # fmt: skip


LARGE = "__debezium_unavailable_value"


@pytest.mark.parametrize("by_job", slow_but([False, True], False))
def test_a_large_value_that_did_not_change_is_the_one_from_before(
    spark: Any, topic: Topic, tmp_path: Path, by_job: bool
) -> None:
    """In the same micro-batch, in a later one, and after the query was started again."""
    schema, state = "id BIGINT, item STRING, body STRING, tags ARRAY<STRING>", tmp_path / "state"
    prices = Source(spark, tmp_path / "prices", "item string, price double")
    prices.add({"item": "a", "price": 9.5})

    def row(number: int, item: str, body: Any = LARGE, tags: Any = (LARGE,)) -> dict[str, Any]:
        return {"id": number, "item": item, "body": body, "tags": list(tags)}

    def changes() -> Any:
        if by_job:
            columns = tuple((x.name, x.dataType.simpleString()) for x in st.StructType.fromDDL(schema).fields)
            source = Job(
                "orders", connector="kafka", columns=columns, options={}, at=0, format="debezium-json",
                unavailable="keep", unique_key=("id",),
            )  # fmt: skip
            opened, df = decode(topic.df, source)
            kept_state = str(state / "latest" / "source_0")
            orders = kept(stream(df, row_kind=opened.row_kind, unique_key="id"), source, state=kept_state)
        else:
            df = gpu_ops.debezium(topic.df, schema, unavailable="gone")
            assert df.columns == ["row_kind", "id", "item", "body", "tags", "gone"]
            whole = stream(df, row_kind="row_kind", unique_key="id")
            orders = gpu_ops.latest(whole, unavailable="gone", state=str(tmp_path / "whole"))
        joined = gpu_ops.join(orders, prices.df, "item", "left", state=str(state))
        return joined.selectExpr("row_kind", "id", "item", "body", "array_join(tags, ',') AS tags", "price")

    topic.add(envelope("r", None, row(1, "a", "long", ["x", "y"])), envelope("u", None, row(1, "b")))
    sink = Sink()
    drain(changes(), sink, tmp_path / "checkpoint")
    assert sink.table == [(1, "b", "long", "x,y", None)]
    topic.add(envelope("c", None, row(2, "b", "other", [])), envelope("u", None, row(1, "a", tags=["z"])))
    topic.add(envelope("u", {"id": 2, "item": None}, row(2, "a")))
    drain(changes(), sink, tmp_path / "checkpoint")
    assert sink.table == [(1, "a", "long", "z", 9.5), (2, "a", "other", "", 9.5)]
    topic.add(envelope("d", row(2, None), None), envelope("u", None, row(1, "c")))
    drain(changes(), sink, tmp_path / "checkpoint")
    assert sink.table == [(1, "c", "long", "z", None)]
    topic.add(envelope("u", None, row(2, "a")))
    with pytest.raises(Exception, match=r"column 'body': a change does not bring it.*REPLICA IDENTITY FULL.*'id': 2"):
        drain(changes(), sink, tmp_path / "checkpoint")


def test_a_large_value_that_did_not_change_is_a_bad_message(spark: Any, topic: Topic, tmp_path: Path) -> None:
    topic.add(envelope("c", None, {"id": 1, "item": "a"}), envelope("u", None, {"id": 1, "item": LARGE}))
    with pytest.raises(Exception, match="BadInputError") as caught:
        drain(gpu_ops.debezium(topic.df, SCHEMA, name="shop"), Sink(), tmp_path / "checkpoint")
    assert "offset 1: column 'item' is not in the message, which has __debezium_unavailable_value" in str(caught.value)
    assert "REPLICA IDENTITY FULL" in str(caught.value)


def test_a_tombstone_whose_key_lacks_the_column(spark: Any, topic: Topic, tmp_path: Path) -> None:
    """The error says where it is; with "drop" it is counted."""
    topic.add(({"id": 1}, {"id": 1, "item": "a"}), ({"ID": 1}, None))

    def rows(bad_rows: Any) -> tuple[Sink, Any]:
        df = MessageSource("orders", "json", "id BIGINT, item STRING", key="id", bad_rows=bad_rows).rows(topic.df)
        sink = Sink()
        return sink, drain(df, sink, tmp_path / bad_rows)

    with pytest.raises(
        Exception, match="input 'orders': a message at topic shop, partition 7, offset 1: deletes a row"
    ):
        rows("fail")
    sink, query = rows("drop")
    assert sink.changes == [("u", 1, "a")]
    assert query.lastProgress["observedMetrics"]["orders"]["bad_messages"] == 1


def test_a_password_of_a_registry_is_in_no_plan(spark: Any, topic: Topic, tmp_path: Path) -> None:
    prices = Source(spark, tmp_path / "prices", "item string, price double")
    registry = {"url": "http://me:hidden1@localhost:1", "ssl.key.password": "hidden2"}
    source = MessageSource("orders", "avro", "id BIGINT, item STRING", schema_registry=registry)
    changes = in_memory(gpu_ops.join, source.rows(topic.df), prices.df, "item", "left")
    plan = changes._jdf.queryExecution()
    shown = [gpu_ops.explain(changes), plan.toString(), plan.logical().toJSON(), changes.schema.json(), repr(source)]
    assert "messages of orders (avro)" in shown[0]
    assert "bad_messages" not in shown[0]
    assert [text for text in shown if "hidden" in text] == []
    topic.add({"id": 1})
    with pytest.raises(Exception, match="has no header of a schema registry") as caught:
        drain(changes, Sink(), tmp_path / "checkpoint")
    assert "hidden" not in str(caught.value)


def test_write_kafka_names_what_to_use_instead() -> None:
    with pytest.raises(AttributeError, match=r"json_messages\(changes, key=...\).writeStream.format\('kafka'\)"):
        gpu_ops.write_kafka  # noqa: B018


def test_what_cannot_be_is_refused(spark: Any) -> None:
    df = spark.createDataFrame([("x",)], "value STRING")
    for options, problem in (
        ({"value": "body"}, "value names 'body'; there are value"),
        ({"include": ["offset"]}, "include names 'offset'; there are value"),
        ({"include": ["value"], "row_kind": "Value"}, "there would be two columns 'Value'"),
        ({"bad_rows": "skip"}, "bad_rows='skip'; it is one of fail, drop, tag"),
    ):
        with pytest.raises(DescriptionError, match=problem):
            gpu_ops.debezium(df, SCHEMA, **options)
    with pytest.raises(DescriptionError, match="plain rows have none"):
        MessageSource("x", "json", SCHEMA, bad_rows="tag").rows(df)
    for given in ({}, {"subscribePattern": "a.*"}):
        with pytest.raises(DescriptionError, match="takes a topic, or options with subscribePattern"):
            gpu_ops.read_kafka(spark, "localhost:1", "t" if given else None, "json", SCHEMA, options=given)
