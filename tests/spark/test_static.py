"""A static DataFrame beside streams: loaded once, before all streams; read again where that is asked for."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from conftest import slow_but
from pyspark.sql import functions as f
from rich.console import Console

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.jobs.sql_text import JobError
from gpu_ops.query.catalyst import items
from gpu_ops.spark.api import query_frames, static
from gpu_ops.state.address import StateAddress
from spark.support import Sink, Source, drain, in_memory, slow_join, start

pytestmark = pytest.mark.spark

ORDERS = "op string, id long, item string"


def orders(spark: Any, folder: Path) -> Source:
    source = Source(spark, folder / "orders", ORDERS)
    source.add(*({"op": "+I", "id": number, "item": "abcd"[number % 4]} for number in range(8)))
    return source


def changing(source: Source) -> Any:
    return stream(source.df, name="orders", row_kind="op", unique_key="id")


@pytest.mark.parametrize(
    "how", ["left", pytest.param("full", marks=pytest.mark.thorough), pytest.param("anti", marks=pytest.mark.slow)]
)
def test_a_join_of_a_stream_and_a_table(spark: Any, tmp_path: Path, how: Any) -> None:
    source, sink, state = orders(spark, tmp_path), Sink(), str(tmp_path / "state")
    reads = spark.sparkContext.accumulator(0)

    def read(batches: Any) -> Any:
        for batch in batches:
            reads.add(batch.num_rows)
            yield batch

    items = spark.createDataFrame([("a", 1), ("b", 2), ("z", 3)], "item string, price int")
    items = items.mapInArrow(read, items.schema)
    for number in range(3):
        changes = gpu_ops.join(changing(source), items, on="item", how=how, emit="per_event", state=state)
        columns = ["row_kind", "item", "id", *(["price"] if how != "anti" else [])]
        changes = changes.select(*columns)
        drain(changes, sink, tmp_path / "checkpoint")
        source.add({"op": "-D", "id": number, "item": "abcd"[number % 4]}, {"op": "+U", "id": 20 + number, "item": "a"})
    assert reads.value == 3, "it was read once"
    table = [("a", 1), ("b", 2), ("z", 3)]
    left = [(row[1], row[0]) for row in source.table(("id", "item"), files=3)]
    pads = [("z", None, 3)] if how == "full" else []
    wanted = slow_join("left" if how == "full" else how, left, table, 2) + pads
    assert sink.table == sorted(wanted, key=repr)
    if how == "left":  # the table was there before: no pad is ever taken back
        assert [row for row in sink.batches[0] if row[0] != "+I"] == []
    assert "static: read once, before the first micro-batch" in gpu_ops.explain(changes)


@pytest.mark.thorough
def test_in_sql_in_a_multi_way_join_and_of_files_that_arrow_reads(spark: Any, tmp_path: Path) -> None:
    source, sink = orders(spark, tmp_path), Sink()
    source.read_by_arrow = True
    items = spark.createDataFrame([("a", 1), ("b", 2)], "item string, price int")
    shops = spark.createDataFrame([("a", "north"), ("c", "south")], "item string, shop string")
    query = """
        SELECT o.id, o.item, i.price, s.shop FROM orders o LEFT JOIN items i ON o.item = i.item
        LEFT JOIN shops s ON o.item = s.item
    """
    given = {"orders": changing(source), "items": stream(items, unique_key="item"), "shops": shops}
    by_query = gpu_ops.sql(query, **given, state=str(tmp_path / "state"))
    drain(by_query, sink, tmp_path / "checkpoint")
    wanted = slow_join("left", [(row[1], row[0]) for row in source.table(("id", "item"))], [("a", 1), ("b", 2)], 2)
    wanted = [(i, item, price, {"a": "north", "c": "south"}.get(item)) for item, i, price in wanted]
    assert sink.table == sorted(wanted, key=repr)
    by_list, listed = (
        gpu_ops.multi_join([changing(source), items, shops], on="item", how="left", state=str(tmp_path / "other")),
        Sink(),
    )
    drain(by_list, listed, tmp_path / "other_checkpoint")
    assert sorted((i, item, price, shop) for item, i, price, shop in listed.table) == sorted(wanted)


@pytest.mark.thorough
def test_what_finish_gives_goes_on_beside_a_stream(spark: Any, tmp_path: Path) -> None:
    source, sink = orders(spark, tmp_path), Sink()
    names = spark.createDataFrame([("a", "apple"), ("b", "bread")], "item string, name string")
    counts = gpu_ops.join(changing(source), names, on="item", emit="at_end", state=str(tmp_path / "a"))
    drain(counts, Sink(), tmp_path / "a_checkpoint")
    ended = gpu_ops.finish(spark, state=str(tmp_path / "a"))
    live = Source(spark, tmp_path / "live", "item string, day int")
    live.add({"item": "a", "day": 1}, {"item": "x", "day": 2})
    changes = gpu_ops.join(live.df, ended, on="item", how="left", state=str(tmp_path / "b"))
    drain(changes, sink, tmp_path / "b_checkpoint")
    assert sink.table == [("a", 1, 0, "apple"), ("a", 1, 4, "apple"), ("x", 2, None, None)]


@pytest.mark.thorough
@pytest.mark.parametrize("how", slow_but(["aggregate", "query"], "aggregate"))
def test_a_result_at_the_end_beside_a_stream(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In one program: what it is of is run to its end when the join is first built, and then is a table."""
    sales, live, sink = Source(spark, tmp_path / "sales", "item string, amount long"), orders(spark, tmp_path), Sink()
    for amount in (1, 2):
        sales.add({"item": "a", "amount": amount}, {"item": "b", "amount": 10 * amount})

    def joined() -> Any:
        at_end: dict[str, Any] = {"emit": "at_end", "state": str(tmp_path / "totals")}
        if how == "aggregate":
            totals = gpu_ops.aggregate(sales.df, "item", {"total": "sum(amount)"}, **at_end)
            changes = gpu_ops.join(changing(live), totals, on="item", how="left", state=str(tmp_path / "state"))
            return changes.select("row_kind", "id", "item", "total")
        query = "SELECT item, sum(amount) AS total FROM sales GROUP BY item HAVING sum(amount) > 0"
        totals = gpu_ops.sql(query, sales=sales.df, **at_end)
        query = "SELECT o.id, o.item, t.total FROM orders o LEFT JOIN totals t ON o.item = t.item"
        return gpu_ops.sql(query, orders=changing(live), totals=totals, state=str(tmp_path / "state"))

    def cut(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for name in ("begin", "_put"):
        with monkeypatch.context() as patch:
            patch.setattr(static._Folder, name, cut)
            with pytest.raises(KeyboardInterrupt):
                joined()
    for number in range(3):
        drain(joined(), sink, tmp_path / "checkpoint")
        sales.add({"item": "c", "amount": 7})  # its end was before
        live.add({"op": "-D", "id": number, "item": "abcd"[number]}, {"op": "+U", "id": 20 + number, "item": "b"})
    rows = live.table(("id", "item"), files=3)
    assert sink.table == sorted(((*row, {"a": 3, "b": 30}.get(row[1])) for row in rows), key=repr)
    assert {row[0] for row in sink.batches[0]} == {"+I"}
    # Spark's UI names the jobs that were run on the way
    jobs = items(spark._jsc.sc().statusStore().jobsList(None))
    named = "\n".join(str(job.description().get()) for job in jobs if job.description().isDefined())
    assert " of gpu_ops: a static table is loaded, once" in named
    assert ": run to its end" in named


@pytest.mark.thorough
def test_what_is_made_of_a_result_at_the_end_is_refused(spark: Any, tmp_path: Path) -> None:
    live = orders(spark, tmp_path)
    totals = gpu_ops.aggregate(live.df, "item", {"n": "count(*)"}, emit="at_end", state=str(tmp_path / "totals"))
    with pytest.raises(DescriptionError, match="has no output before its input ends: join it as it is"):
        gpu_ops.join(changing(live), totals.where("n > 1"), on="item", state=str(tmp_path / "state"))


HISTORY = [(number % 4, f"{number % 4}", number * 10) for number in range(40)]
MIXED = """SELECT o.id, o.item, h.total, h.best FROM orders o LEFT JOIN (
        SELECT t.item, sum(s.amount) AS total, max(s.amount) AS best FROM sales s JOIN things t ON s.k = t.k
        GROUP BY t.item HAVING count(*) > 5) h ON o.item = h.item"""


@pytest.mark.thorough
@pytest.mark.parametrize("begun_live", slow_but([False, True], True))
def test_operators_over_tables_alone_are_done_before_the_stream(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun_live: bool
) -> None:
    """A chain whose lower part has ended; a folder in which that part was begun as a stream goes on so."""
    source, sink, state = orders(spark, tmp_path), Sink(), tmp_path / "state"
    sales = spark.createDataFrame(HISTORY, "k int, text string, amount long")
    things = spark.createDataFrame([(0, "a"), (1, "b"), (2, "b")], "k int, item string")
    for number in range(3):
        with monkeypatch.context() as patch:
            if begun_live and number == 0:
                patch.setattr(query_frames.QueryRunner, "takes", lambda *_: False)
            changes = gpu_ops.sql(
                MIXED, orders=changing(source), sales=sales, things=things, emit="per_event", state=str(state)
            )
        drain(changes, sink, tmp_path / "checkpoint")
        source.add({"op": "-D", "id": number, "item": "abcd"[number % 4]}, {"op": "+U", "id": 20 + number, "item": "b"})
        if number == 0 and not begun_live:
            assert [row[0] for row in sink.batches[0]] == ["+I"] * 8, "the result of an input that has ended, once"
    assert sorted(x.name for x in state.iterdir() if x.name.isdigit()) == (["1", "2", "3"] if begun_live else ["3"])
    with duckdb.connect() as connection:
        connection.register(
            "sales", pa.table([list(column) for column in zip(*HISTORY, strict=True)], ["k", "text", "amount"])
        )
        connection.register("things", pa.table({"k": [0, 1, 2], "item": ["a", "b", "b"]}))
        live = source.table(("id", "item"), files=3)
        connection.register("orders", pa.table({"id": [r[0] for r in live], "item": [r[1] for r in live]}))
        assert sink.table == sorted(connection.sql(MIXED).fetchall(), key=repr)


@pytest.mark.thorough
@pytest.mark.parametrize("rows", slow_but([0, 3], 0))
def test_an_aggregate_of_all_rows_counts_0_in_an_empty_table(spark: Any, tmp_path: Path, rows: int) -> None:
    """Of a static table as of a stream that has not begun, in a query that has a stream, as in a batch query."""
    query = "SELECT o.id, t.n FROM orders o LEFT JOIN (SELECT count(*) AS n, sum(k) AS s FROM sales) t ON o.id = t.n"
    source, schema, tables = orders(spark, tmp_path), "k int", list[Any]()
    table = spark.createDataFrame([(k,) for k in range(rows)], schema)
    live = Source(spark, tmp_path / "sales", schema)
    live.add(*({"k": k} for k in range(rows)))
    for name, sales in (("static", table), ("live", live.df)):
        sink = Sink()
        changes = gpu_ops.sql(query, orders=changing(source), sales=sales, state=str(tmp_path / name))
        drain(changes, sink, tmp_path / f"{name}_checkpoint")
        tables.append(sink.table)
    wanted = [(number, rows if number == rows else None) for number in range(8)]
    assert tables == [sorted(wanted, key=repr)] * 2
    ended = spark.createDataFrame([(0,), (3,)], "id int")
    batch = gpu_ops.sql(query, orders=ended, sales=table)
    assert sorted(tuple(row)[1:] for row in batch.collect()) == [(0, 0 if rows == 0 else None), (3, rows or None)]


@pytest.mark.thorough
def test_an_aggregate_of_a_table_beside_a_stream(spark: Any, tmp_path: Path) -> None:
    source, sink = orders(spark, tmp_path), Sink()
    sales = spark.createDataFrame([("a", 1), ("a", 2), ("b", None)], "item string, amount int")
    totals = gpu_ops.aggregate(sales, "item", {"total": "sum(amount)"})
    changes = gpu_ops.join(changing(source), totals, on="item", state=str(tmp_path / "state"))
    drain(changes.select("row_kind", "id", "total"), sink, tmp_path / "checkpoint")
    assert sink.table == [(0, 3), (1, None), (4, 3), (5, None)]


@pytest.mark.thorough
def test_versions_that_do_not_change(spark: Any, tmp_path: Path) -> None:
    trades, sink = Source(spark, tmp_path / "trades", "item string, at long"), Sink()
    trades.add({"item": "a", "at": 5}, {"item": "a", "at": 15}, {"item": "b", "at": 20})
    prices = spark.createDataFrame([("a", 0, 1), ("a", 10, 2)], "item string, since long, price int")
    left = stream(trades.df, event_time="at", delay=0)
    right = stream(prices, event_time="since", delay=0)
    for _ in range(2):
        changes = gpu_ops.temporal_join(left, right, on="item", how="left", state=str(tmp_path / "state"))
        drain(changes.select("row_kind", "item", "at", "price"), sink, tmp_path / "checkpoint")
        trades.add({"item": "c", "at": 30})
    assert sink.table == [("a", 15, 2), ("a", 5, 1), ("b", 20, None)]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["item", pytest.param(None, marks=pytest.mark.slow)])
def test_a_table_that_is_read_again(spark: Any, tmp_path: Path, key: str | None) -> None:
    source, sink, state = orders(spark, tmp_path), Sink(), str(tmp_path / "state")
    table, prices = tmp_path / "items", {"a": 1, "b": 2, "c": None}

    def write() -> None:
        spark.createDataFrame(list(prices.items()), "item string, price int").write.mode("overwrite").parquet(
            str(table)
        )

    def query(trigger: dict[str, Any]) -> Any:
        items = stream(spark.read.parquet(str(table)), name="items", unique_key=key, refresh="300 milliseconds")
        changes = gpu_ops.join(changing(source), items, on="item", how="left", state=state)
        return start(changes, sink, tmp_path / "checkpoint", **trigger)

    def wanted() -> list[Any]:
        left = [(row[1], row[0]) for row in source.table(("id", "item"))]
        return slow_join("left", left, list(prices.items()), 2)

    write()
    running = query({"processingTime": "100 milliseconds"})
    try:
        until(lambda: sink.table == wanted(), running)
        prices |= {"c": 3, "d": 4}
        write()
        until(lambda: sink.table == wanted(), running)
        prices |= {"b": 7}
        prices.pop("a")
        write()
        until(lambda: sink.table == wanted(), running)
        if key is not None:  # what comes then is the same without one
            running.stop()
            running = query({"processingTime": "100 milliseconds"})  # over a restart, and no row of the stream comes
            prices |= {"c": 5}
            write()
            until(lambda: sink.table == wanted(), running)
    finally:
        running.stop()
    source.add({"op": "-D", "id": 0, "item": "a"})
    query({"availableNow": True}).awaitTermination()
    assert sink.table == wanted()


@pytest.mark.thorough
def test_a_run_that_takes_what_is_there_is_given_one_refresh(spark: Any, tmp_path: Path) -> None:
    source, sink, state = orders(spark, tmp_path), Sink(), tmp_path / "state"
    readings, written = 0, list[int]()

    def version(number: int) -> list[Any]:
        """In one micro-batch Spark reads the largest file first: that of version 3, before that of version 2."""
        if number < 3:
            return [("a", number), ("b", 1)]
        return [("a", number), ("b", number), *((str(n), number) for n in range(3000))]

    def table() -> Any:
        nonlocal readings
        readings += 1
        return spark.createDataFrame(version(readings), "item string, price int")

    for number in range(7):
        source.add({"op": "+U", "id": 0, "item": "abcd"[number % 4]})
    for _ in range(2):
        items = stream(table, name="items", unique_key="item", refresh="100 milliseconds")
        changes = gpu_ops.join(changing(source), items, on="item", how="left", state=str(state))
        drain(changes.select("row_kind", "item", "id", "price"), sink, tmp_path / "checkpoint")
        written.append(len(list((state / "static" / "items" / "changes").iterdir())))
        source.add({"op": "+U", "id": 0, "item": "a"})
    left = [(row[1], row[0]) for row in source.table(("id", "item"), files=9) if row[0]]
    possible = [slow_join("left", left, version(n + 1), 2) for n in range(readings)]
    assert [row for row in sink.table if row[1]] in possible
    assert written in ([2, 2], [2, 3]), "each run had at most one, and the first of them had time for it"


def until(true: Any, query: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert query.isActive, query.exception()
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.thorough
def test_what_was_begun_and_killed_is_finished_or_done_again(spark: Any, tmp_path: Path) -> None:
    source, state = orders(spark, tmp_path), tmp_path / "state"
    items = spark.createDataFrame([("a", 1)], "item string, price int")
    half = state / "static" / "right" / "_next" / "changes"
    half.mkdir(parents=True)
    (half / "part-0.parquet").write_bytes(b"cut short")
    sink = Sink()
    drain(gpu_ops.join(changing(source), items, on="item", state=str(state)), sink, tmp_path / "checkpoint")
    assert sink.table == [("a", 0, 1), ("a", 4, 1)]
    assert not half.exists()


def test_what_is_refused(spark: Any, tmp_path: Path) -> None:
    source, state = orders(spark, tmp_path), str(tmp_path / "state")
    items = spark.createDataFrame([("a", 1)], "item string, price int")
    gpu_ops.join(changing(source), stream(items, name="items"), on="item", state=state)
    fewer = stream(items.drop("price"), name="items")
    with pytest.raises(StateError, match="input 'items' is static and was loaded with the columns item string, price"):
        gpu_ops.join(changing(source), fewer, on="item", state=state)
    with pytest.raises(DescriptionError, match="input 'stream': refresh= is for a static DataFrame, this one streams"):
        stream(source.df, refresh="1 hour")
    with pytest.raises(DescriptionError, match="input 'items': a function that gives a table takes refresh="):
        stream(lambda: items, name="items")
    kinds = stream(items.withColumn("op", f.lit("+I")), row_kind="op", refresh="1 hour")
    with pytest.raises(DescriptionError, match="input 'right': refresh= compares a table's rows; one with row kinds"):
        in_memory(gpu_ops.join, source.df, kinds, on="item")


def test_an_input_of_any_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    names = ("..", ".", "a/../../b", "a.b", "%2E%2E", "/")
    folders = {
        str(StateAddress.of(str(tmp_path)).below("static").below(static._folder_name(name)).path) for name in names
    }
    assert len(folders) == len(names)
    assert all(Path(folder).resolve().parent == tmp_path / "static" for folder in folders)
    assert static._folder_name("orders 1") == "orders%201"  # as folders have it that are there


@pytest.mark.slow
def test_in_a_job(spark: Any, tmp_path: Path) -> None:
    orders(spark, tmp_path)
    spark.createDataFrame([("a", 1), ("b", 2)], "item string, price int").write.json(str(tmp_path / "items"))
    text = """
        SET 'state' = 'state'; SET 'checkpoint' = 'checkpoint'; SET 'emit' = 'per_event';
        CREATE TABLE orders (id BIGINT, item STRING, PRIMARY KEY (id) NOT ENFORCED)
            WITH ('connector' = 'json', 'path' = 'orders', 'row_kind' = 'op');
        CREATE TABLE items (item STRING, price INT)
            WITH ('connector' = 'json', 'path' = 'items'{more});
        CREATE TABLE sold WITH ('connector' = 'json', 'path' = 'sold');
        INSERT INTO sold SELECT o.id, i.price FROM orders o LEFT JOIN items i ON o.item = i.item;
    """
    job = tmp_path / "job.sql"
    job.write_text(text.format(more=", 'scan' = 'once', 'refresh' = '1 hour'"))
    runner.run(load(job), Console(file=io.StringIO()), once=True)
    sold = spark.read.json(str(tmp_path / "sold"))
    rows = sorted(tuple(row) for row in sold.select("row_kind", "id", "price").collect())
    prices = {"a": 1, "b": 2}
    assert rows == [("+I", number, prices.get("abcd"[number % 4])) for number in range(8)]
    job.write_text(text.format(more=", 'refresh' = '1 hour'"))
    with pytest.raises(JobError, match="refresh is for a table that is read before the stream begins"):
        load(job)
    for connector, message in (("rate", "rate has no end"), ("jdbc", "a table of a database is no stream")):
        scan = "'scan' = 'once'" if connector == "rate" else "'url' = 'x', 'table' = 'y'"
        read = text.format(more="").replace("JOIN items", "JOIN t")
        job.write_text(f"CREATE TABLE t WITH ('connector' = '{connector}', {scan});{read}")
        with pytest.raises(JobError, match=message):
            load(job)
