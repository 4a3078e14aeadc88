"""Lookup joins through Spark: of a static table, of one that is read again, of a changelog, of a function; in SQL."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError
from spark.support import Sink, Source, drain

pytestmark = pytest.mark.spark

CLICKS = "id long, item string"
TABLE = {"a": 1, "b": 2}


@pytest.fixture
def clicks(spark: Any, tmp_path: Path) -> Source:
    source = Source(spark, tmp_path / "clicks", CLICKS)
    source.add({"id": 1, "item": "a"}, {"id": 2, "item": "x"}, {"id": 3, "item": None})
    return source


def test_a_static_table(spark: Any, tmp_path: Path, clicks: Source) -> None:
    items, sink = spark.createDataFrame(list(TABLE.items()), "item string, price int"), Sink()
    for _ in range(2):
        changes = gpu_ops.lookup_join(clicks.df, items, on="item", how="left", state=str(tmp_path / "state"))
        drain(changes.select("row_kind", "id", "price"), sink, tmp_path / "checkpoint")
        clicks.add({"id": 4, "item": "b"})
    assert sink.changes == [("+I", 1, 1), ("+I", 2, None), ("+I", 3, None), ("+I", 4, 2)]
    text = gpu_ops.explain(changes)
    assert "lookup join" in text.splitlines()[0]
    assert "not kept beyond its micro-batch" in text


@pytest.mark.thorough
def test_an_aggregate_of_what_is_looked_up(spark: Any, tmp_path: Path, clicks: Source) -> None:
    """One engine has both, and the table, which is read before the first micro-batch and never again."""
    items, sink = spark.createDataFrame(list(TABLE.items()), "item string, price int"), Sink()
    for _ in range(2):
        looked_up = gpu_ops.lookup_join(clicks.df, items, on="item", state=str(tmp_path / "first"), partitions=1)
        totals = {"n": "count(*)", "paid": "sum(price)"}
        changes = gpu_ops.aggregate(looked_up, "item", totals, state=str(tmp_path / "state"), partitions=1)
        assert "in the same engine" in gpu_ops.explain(changes)
        drain(changes, sink, tmp_path / "checkpoint")
        clicks.add({"id": 4, "item": "b"}, {"id": 5, "item": "a"}, {"id": 6, "item": "c"})
        items = items.withColumn("price", items.price * 100)
    assert sink.changes[:1] == [("+I", "a", 1, 1)]
    assert sorted(sink.changes[1:]) == [("+I", "a", 2, 2), ("+I", "b", 1, 2), ("-D", "a", 1, 1)]


@pytest.mark.thorough
def test_a_changelog_in_sql(spark: Any, tmp_path: Path, clicks: Source) -> None:
    items, sink = Source(spark, tmp_path / "items", "op string, item string, price int"), Sink()
    query = """
        SELECT c.id, i.price, upper(c.item) AS name FROM clicks c
        LEFT JOIN items FOR SYSTEM_TIME AS OF PROCTIME() AS i ON c.item = i.item
    """
    items.add({"op": "+I", "item": "a", "price": 1})
    given = {"clicks": clicks.df, "items": stream(items.df, row_kind="op", unique_key="item")}
    for price in (5, 7):
        changes = gpu_ops.sql(query, **given, state=str(tmp_path / "state"))
        drain(changes, sink, tmp_path / "checkpoint")
        items.add({"op": "+U", "item": "a", "price": price})
        clicks.add({"id": price, "item": "a"})
    drain(gpu_ops.sql(query, **given, state=str(tmp_path / "state")), sink, tmp_path / "checkpoint")
    said = sorted(sink.changes)
    assert said == [
        ("+I", 1, 1, "A"),
        ("+I", 2, None, "X"),
        ("+I", 3, None, None),
        ("+I", 5, 5, "A"),
        ("+I", 7, 7, "A"),
    ]
    assert "lookup: LEFT JOIN, each row with the table as it is in the row's micro-batch" in gpu_ops.explain(changes)


@pytest.mark.thorough
@pytest.mark.parametrize("option", slow_but(["backlog", "wait_for_table"], "backlog"))
def test_left_rows_wait_for_the_tables_history(spark: Any, tmp_path: Path, clicks: Source, option: Any) -> None:
    items, sink = Source(spark, tmp_path / "items", "op string, item string, price int"), Sink()
    table = stream(items.df, row_kind="op", unique_key="item")

    def changes() -> Any:
        joined = gpu_ops.lookup_join(clicks.df, table, on="item", state=str(tmp_path / "state"), **{option: True})
        return joined.select("row_kind", "id", "price")

    items.add({"op": "+I", "item": "a", "price": 1})
    drain(changes(), sink, tmp_path / "checkpoint")
    items.add({"op": "+U", "item": "a", "price": 2})
    drain(changes(), sink, tmp_path / "checkpoint")
    assert sink.changes == []
    clicks.add({"id": 9, "item": "a"})
    query = changes().writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.processAllAvailable()
    query.stop()
    assert sink.changes == [("+I", 1, 2), ("+I", 9, 2)]
    static, found = spark.createDataFrame([("a", 1)], "item string, price int"), Sink()
    at_once = gpu_ops.lookup_join(clicks.df, static, on="item", wait_for_table=True, state=str(tmp_path / "static"))
    drain(at_once.select("row_kind", "id", "price"), found, tmp_path / "static_checkpoint")
    assert found.changes == [("+I", 1, 1), ("+I", 9, 1)]


def service(asked: Path, *, fails: bool = False) -> Any:
    """A function that writes down what it was asked for; it fails the first time, where it is to."""
    table = dict(TABLE)

    def look_up(keys: pa.Table) -> pa.Table:
        calls = asked.read_text().splitlines() if asked.exists() else []
        with asked.open("a") as file:
            file.write(",".join(sorted(keys["item"].to_pylist())) + "\n")
        if fails and not calls:
            raise ConnectionError("the service is away")
        rows = pa.table({"item": list(table), "price": pa.array(table.values(), pa.int32())})
        return rows.filter(pc.is_in(rows["item"], keys["item"].combine_chunks()))

    return look_up


def test_a_function_is_asked_once_for_each_key(spark: Any, tmp_path: Path, clicks: Source) -> None:
    sink, asked = Sink(), tmp_path / "asked"
    clicks.add({"id": 4, "item": "b"}, {"id": 5, "item": "b"}, {"id": 6, "item": "a"})
    found = gpu_ops.lookup(
        clicks.df.coalesce(1), service(asked, fails=True), "item", schema="item string, price int", how="left",
        cache="1 hour",
    )  # fmt: skip
    assert found.columns == ["row_kind", "item", "id", "price"]
    query = drain(found.select("row_kind", "id", "price"), sink, tmp_path / "checkpoint")
    assert query.isActive is False
    prices = [(1, 1), (2, None), (3, None), (4, 2), (5, 2), (6, 1)]
    assert sorted(sink.changes) == [("+I", *row) for row in prices]
    assert asked.read_text().splitlines() in (["a,x", "a,x", "b"], ["a,x", "a,x", "a,b"])  # workers may differ


@pytest.mark.thorough
def test_what_a_function_gives_is_joined_again(spark: Any, tmp_path: Path, clicks: Source) -> None:
    found = gpu_ops.lookup(clicks.df, service(tmp_path / "asked"), "item", schema="item string, price int")
    names, sink = spark.createDataFrame([("a", "apple")], "item string, name string"), Sink()
    joined = gpu_ops.join(found, names, on="item", state=str(tmp_path / "state"))
    drain(joined.select("row_kind", "id", "price", "name"), sink, tmp_path / "checkpoint")
    assert sink.changes == [("+I", 1, 1, "apple")]


def test_answers_grow_old(tmp_path: Path) -> None:
    from gpu_ops.descriptions.inputs import Input
    from gpu_ops.descriptions.join import LookupJoin
    from gpu_ops.descriptions.keys import Key
    from gpu_ops.spark.tasks.engine import Lookups, LookupTask

    left = pa.schema([("id", pa.int64()), ("item", pa.string())])
    right = pa.schema([("item", pa.string()), ("price", pa.int32())])
    join = LookupJoin("left", Input("l", left), Input("r", right), (Key("item", "item", using=True),))
    asked = tmp_path / "asked"
    task = LookupTask(join.to_json(), Lookups(service(asked), 3.0, 2, 0), "old")

    def ask(*items: str) -> list[Any]:
        rows = pa.record_batch([pa.array(range(len(items))), pa.array(items)], schema=left)
        return [row["price"] for batch in task(iter([rows])) for row in batch.to_pylist()]

    assert ask("a", "b") == [1, 2]
    assert ask("b", "a", "c") == [2, 1, None]
    assert asked.read_text().splitlines() == ["a,b", "c"]
    ask("c", "b")  # of three answers the newest two are kept
    time.sleep(3.1)
    assert ask("a") == [1]
    assert asked.read_text().splitlines()[-1] == "a"


def test_what_is_refused(spark: Any, clicks: Source) -> None:
    def refused(message: str, **options: Any) -> None:
        given = {"left": clicks.df, "function": print, "on": "item", "schema": "item string, price int", **options}
        with pytest.raises(DescriptionError, match=message):
            gpu_ops.lookup(**given)

    refused("takes a function of an Arrow table, not int", function=3)
    refused("keys of one type, and nulls find nothing: left.item is string, 'item' of schema= string",
            on=[gpu_ops.Key("item", "item", null_safe=True)], suffixes=("", "_r"))  # fmt: skip
    refused("no schema", schema="nonsense")
    refused("how='right'; a lookup join is one of inner, left", how="right")
    refused("retries=-1", retries=-1)
    with pytest.raises(TypeError, match=r"lookup_join\(\) has no option emit="):
        gpu_ops.lookup_join(clicks.df, clicks.df, on="item", emit="per_event")  # type: ignore[call-arg]
