"""Sources whose schema changes while a query runs, and between its runs: what it does not read is no matter of its."""

from __future__ import annotations

import io
import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import slow_but
from rich.console import Console

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import StateError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.spark.api import static
from gpu_ops.spark.server.inspection import describe
from spark.support import Sink, drain, fold, start

pytestmark = pytest.mark.spark

NARROW = "id LONG, item STRING, qty INT"
WIDE = "vat DOUBLE, qty INT, item STRING, id LONG, s STRUCT<a: INT>"
PRICES = "item STRING, price INT"


def put(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / f".{name}"
    if name.endswith("delta"):
        feed = {"delta.enableChangeDataFeed": "true"}
        table = pa.Table.from_pylist(list(rows))
        deltalake.write_deltalake(str(folder), table, mode="append", configuration=feed, schema_mode="merge")
        return
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    time.sleep(0.002)  # Spark takes files by their time
    file.rename(folder / name)


def wide(number: int) -> dict[str, Any]:
    return {"vat": 0.5, "qty": number, "item": "ab"[number % 2], "id": number, "s": {"a": 1}}


def narrow(number: int) -> dict[str, Any]:
    return {"id": number, "item": "ab"[number % 2], "qty": number}


@pytest.mark.thorough
@pytest.mark.parametrize("reader", slow_but(["arrow", "spark"], "arrow"))
def test_a_query_goes_on_from_its_state_over_a_wider_schema(spark: Any, tmp_path: Path, reader: str) -> None:
    """Columns that the query does not name come, go and change places, while it runs and between its runs."""
    orders, sink = tmp_path / "orders", Sink()
    prices = spark.createDataFrame([("a", 1), ("b", 2)], PRICES)
    query = """
        SELECT o.item, sum(o.qty * p.price) AS total, max(x.id) AS last FROM orders o
        JOIN prices p ON o.item = p.item JOIN orders x ON x.id = o.id GROUP BY o.item
    """

    def read(schema: str) -> Any:
        if reader == "arrow":
            return gpu_ops.read_files(spark, str(orders), "json", schema, maxFilesPerTrigger=1)
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(orders))

    put(orders, "0.json", *map(narrow, range(4)))
    for number, schema in enumerate((NARROW, WIDE, "id LONG, qty INT, more DATE, item STRING")):
        put(orders, f"{number + 1}.json", *(make(10 * number + n) for n, make in enumerate([narrow, wide, wide], 4)))
        changes = gpu_ops.sql(query, orders=read(schema), prices=prices, state=str(tmp_path / "state"))
        drain(changes, sink, tmp_path / "checkpoint")
        sold = [n for file in range(number + 1) for n in range(10 * file + 4, 10 * file + 7)] + list(range(4))
        wanted = [
            (item, price * sum(n for n in sold if n % 2 == rest), max(n for n in sold if n % 2 == rest))
            for rest, (item, price) in enumerate([("a", 1), ("b", 2)])
        ]
        assert sink.table == wanted
    console = Console(width=200, record=True, file=io.StringIO())
    for number in (1, 2, 3):
        describe(str(tmp_path / "state" / str(number)), console, rows=False)
    assert "__" not in console.export_text() + gpu_ops.explain(changes)


@pytest.mark.slow
def test_a_join_whose_columns_are_all_in_its_state_says_what_to_select(spark: Any, tmp_path: Path) -> None:
    orders, prices, sink = tmp_path / "orders", tmp_path / "prices", Sink()
    put(prices, "0.json", {"item": "a", "price": 1}, {"item": "b", "price": 2})
    put(orders, "0.json", narrow(1))

    def run(schema: str, *columns: str) -> None:
        left = spark.readStream.schema(schema).json(str(orders))
        left = left.select(*columns) if columns else left
        right = spark.readStream.schema(PRICES).json(str(prices))
        joined = gpu_ops.join(stream(left, name="orders"), right, on="item", state=str(tmp_path / "state"))
        drain(joined, sink, tmp_path / "checkpoint")

    run(NARROW)
    put(orders, "1.json", wide(2))
    with pytest.raises(StateError, match=r"column 'vat' \(double\) that it had not.*select id, item, qty"):
        run(WIDE)
    with pytest.raises(StateError, match=r"another order, qty, item, id: select id, item, qty"):
        run(WIDE, "qty", "item", "id")
    with pytest.raises(StateError, match=r"column 'qty' was int32, now int64"):
        run(NARROW.replace("INT", "LONG"))
    with pytest.raises(StateError, match=r"had a column 'qty' \(int32\), now it has none"):
        run(NARROW, "id", "item")
    run(WIDE, "id", "item", "qty")
    assert sink.table == [("a", 2, 2, 1), ("b", 1, 1, 2)]
    every = "SELECT * FROM orders JOIN prices USING (item)"
    for schema in (NARROW, WIDE):
        sides = (spark.readStream.schema(x).json(str(y)) for x, y in ((schema, orders), (PRICES, prices)))
        changes = gpu_ops.sql(every, **dict(zip(("orders", "prices"), sides, strict=True)), state=str(tmp_path / "sql"))
        if schema == NARROW:
            drain(changes, Sink(), tmp_path / "sql_checkpoint")
            continue
        with pytest.raises(StateError, match=r"column 'vat'.*select id, orders\.item, qty"):
            drain(changes, Sink(), tmp_path / "sql_checkpoint")


@pytest.mark.thorough
@pytest.mark.parametrize("how", slow_but(["join", "sql"], "join"))
def test_a_static_table_that_gets_columns(
    spark: Any, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    orders, sink = tmp_path / "orders", Sink()
    rows = [("a", 1, "old", 7), ("b", 2, "old", 7)]

    def run(*columns: str, price: str = "INT", query: str = "SELECT o.id, o.item, p.price, p.name") -> None:
        prices = spark.createDataFrame(rows, f"item STRING, price {price}, name STRING, more INT").select(*columns)
        left = spark.readStream.schema("id LONG, item STRING").json(str(orders))
        state = str(tmp_path / "state")
        if how == "join":
            joined = gpu_ops.join(left, stream(prices, name="prices"), on="item", state=state)
        else:
            query = f"{query} FROM orders o JOIN prices p ON o.item = p.item"
            joined = gpu_ops.sql(query, orders=left, prices=prices, state=state)
        drain(joined.select("row_kind", "id", "item", "price", "name"), sink, tmp_path / "checkpoint")

    put(orders, "0.json", narrow(1))
    run("item", "price", "name")
    put(orders, "1.json", narrow(2))
    run("more", "name", "price", "item")
    assert sink.table == [(1, "b", 2, "old"), (2, "a", 1, "old")]
    (line,) = [x.getMessage() for x in caplog.records if x.name == static.__name__ and x.levelno == logging.WARNING]
    assert "'prices' is static" in line
    assert "columns more: they are left out" in line
    with pytest.raises(StateError, match=r"'prices' is static.*name string; now it has item string, price int:"):
        run("item", "price", query="SELECT o.id, o.item, p.price, p.item AS name")
    with pytest.raises(StateError, match=r"'prices' is static.*price int.*now it has.*price bigint"):
        run("item", "price", "name", price="LONG")
    if how == "sql":
        with pytest.raises(gpu_ops.SqlError, match="more"):
            run("item", "price", "name", "more", query="SELECT o.id, o.item, p.price, p.name, p.more")
        with pytest.raises(gpu_ops.SqlError, match="name"):
            run("item", "price")


@pytest.mark.slow
def test_a_refreshed_table_goes_on_when_it_gets_columns(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New ones are left out, with one line; without one of its columns it is not read, and the rows stay."""
    orders, sink = tmp_path / "orders", Sink()
    put(orders, "0.json", narrow(1), narrow(2))
    now = [spark.createDataFrame([("a", 1), ("b", 2)], PRICES)]

    def joined() -> Any:
        prices = stream(lambda: now[0], name="prices", unique_key="item", refresh=100)
        left = spark.readStream.schema("id LONG, item STRING").json(str(orders))
        query = "SELECT o.id, p.price FROM orders o JOIN prices p ON o.item = p.item"
        return gpu_ops.sql(query, orders=left, prices=prices, state=str(tmp_path / "state"))

    def until(*wanted: Any) -> None:
        end = time.monotonic() + 60
        while sink.table != list(wanted) and time.monotonic() < end:
            time.sleep(0.05)
        assert sink.table == list(wanted)

    def lines(level: int) -> list[str]:
        return [x.getMessage() for x in caplog.records if x.name == static.__name__ and x.levelno == level]

    query = start(joined(), sink, tmp_path / "checkpoint", processingTime="50 milliseconds")
    try:
        until((1, 2), (2, 1))
        for price in (5, 6):
            now[0] = spark.createDataFrame([(0.5, price, "a"), (0.5, 2, "b")], "vat DOUBLE, price INT, item STRING")
            until((1, 2), (2, price))
        assert lines(logging.WARNING) == ["input 'prices' has new columns, which are left out: vat"]
        now[0] = spark.createDataFrame([("a", 7)], "item STRING, price LONG")
        end = time.monotonic() + 60
        while not lines(logging.ERROR) and time.monotonic() < end:
            time.sleep(0.05)
        assert lines(logging.ERROR)[0].endswith("its column 'price' was int and is bigint now")
        assert sink.table == [(1, 2), (2, 6)]
    finally:
        query.stop()
    now[0] = spark.createDataFrame([(0.5, 8, "a"), (0.5, 2, "b")], "vat DOUBLE, price INT, item STRING")
    query = start(joined(), sink, tmp_path / "checkpoint", processingTime="50 milliseconds")
    try:
        until((1, 2), (2, 8))
    finally:
        query.stop()


@pytest.mark.slow
def test_a_result_at_the_end_over_a_wider_schema(spark: Any, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    query = "SELECT item, sum(qty) AS qty FROM orders GROUP BY item"
    for number, schema in enumerate((NARROW, WIDE)):
        put(orders, f"{number}.json", narrow(number), wide(number + 2))
        df = spark.readStream.schema(schema).json(str(orders))
        changes = gpu_ops.sql(query, orders=df, emit="at_end", state=str(tmp_path / "state"))
        drain(changes, Sink(), tmp_path / "checkpoint")
    df = spark.readStream.schema("item STRING, qty LONG").json(str(orders))
    with pytest.raises(StateError, match="over other tables"):
        gpu_ops.sql(query, orders=df, emit="at_end", state=str(tmp_path / "state"))
    found = sorted(tuple(row) for row in gpu_ops.finish(spark, state=str(tmp_path / "state")).collect())
    assert [row[-2:] for row in found] == [("a", 2), ("b", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "reader"),
    [*itertools.product(("parquet", "json"), ("arrow", "spark")), ("delta", "arrow")],
)
def test_a_job_takes_the_columns_of_files_as_they_are_when_it_starts(
    spark: Any, tmp_path: Path, form: str, reader: str
) -> None:
    """Whichever file Spark takes them from, others lack some; a job that does not use those goes on."""
    job = tmp_path / "job.sql"
    text = f"""
        CREATE TABLE orders WITH ('connector' = '{form}', 'path' = 'orders', 'reader' = '{reader}'
          {", 'option.mergeSchema' = 'true'" if form == "parquet" else ""});
        CREATE TABLE changes WITH ('connector' = 'parquet', 'path' = 'changes');
        SET state = 'state'; SET checkpoint = 'checkpoint';
        INSERT INTO changes SELECT item, sum(qty) AS qty FROM orders GROUP BY item;
    """
    job.write_text(text)

    def run() -> list[Any]:
        runner.run(load(job), Console(quiet=True), once=True)
        rows = pq.read_table(tmp_path / "changes").select(["row_kind", "item", "qty"]).to_pylist()
        return fold([tuple(row.values()) for row in sorted(rows, key=lambda x: x["row_kind"][0] != "+")])

    put(tmp_path / "orders", f"5.{form}", narrow(1), narrow(2))
    assert run() == [("a", 2), ("b", 1)]
    put(tmp_path / "orders", f"1.{form}", wide(3))
    put(tmp_path / "orders", f"2.{form}", narrow(4))
    assert run() == [("a", 6), ("b", 4)]
    if form == "delta":
        return  # in which a column keeps its type
    put(tmp_path / "orders", f"0.{form}", {"id": 6, "item": "a", "qty": 0.5, "late": "x"})
    with pytest.raises(Exception, match=r"(?i)cannot_merge|column 'qty' was int64, now double"):
        run()
