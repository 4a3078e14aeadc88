"""Aggregates kept up to date through Spark: chains of join, aggregate and join, state folders, and what is refused."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from kernels.own_functions import Bits

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.server.rescale import rescale
from spark.support import Sink, Source, drain

pytestmark = pytest.mark.spark

ORDERS, ITEMS = "op string, id long, item string, quantity int", "op string, item string, price double, shop string"


class Feed:
    """Orders and items that come and go, and what is left of them."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.choice = random.Random(7)
        self.orders = Source(spark, folder / "orders", ORDERS)
        self.items = Source(spark, folder / "items", ITEMS)
        self.left: dict[str, list[tuple[Any, ...]]] = {"orders": [], "items": []}

    def more(self, rows: int = 25) -> None:
        choice = self.choice
        for name, source in (("orders", self.orders), ("items", self.items)):
            left, changes = self.left[name], []
            columns = ("id", "item", "quantity") if name == "orders" else ("item", "price", "shop")
            for _ in range(rows):
                if left and choice.random() < 0.3:
                    op, row = "-D", left.pop(choice.randrange(len(left)))
                else:
                    item = choice.choice(["a", "b", "c", None])
                    row = (choice.randrange(9), item, choice.randrange(4)) if name == "orders" else (
                        item, choice.randrange(8) / 4, choice.choice("xy")
                    )  # fmt: skip
                    op = "+I"
                    left.append(row)
                changes.append({"op": op, **dict(zip(columns, row, strict=True))})
            source.add(*changes)

    def inputs(self) -> tuple[Any, Any]:
        return stream(self.orders.df, name="orders", row_kind="op"), stream(self.items.df, name="items", row_kind="op")

    def duckdb(self, sql: str) -> Counter[tuple[Any, ...]]:
        orders, items = self.left["orders"], self.left["items"]
        with duckdb.connect() as connection:
            kinds = (pa.int64(), pa.string(), pa.int32()), (pa.string(), pa.float64(), pa.string())
            names = ("id", "item", "quantity"), ("item", "price", "shop")
            for name, rows, types, columns in zip(("orders", "items"), (orders, items), kinds, names, strict=True):
                arrays = [pa.array([row[n] for row in rows], kind) for n, kind in enumerate(types)]
                connection.register(name, pa.table(arrays, names=list(columns)))
            return Counter(connection.sql(sql).fetchall())


CALLS = {"n": "count(*)", "total": "sum(quantity)", "top": "max(id)", "kinds": "count(distinct quantity)"}
TOTALS = "SELECT item, count(*), sum(quantity), max(id), count(DISTINCT quantity) FROM orders GROUP BY item"


@pytest.mark.parametrize("emit", ["per_batch", pytest.param("per_event", marks=pytest.mark.slow)])
def test_an_aggregate_goes_on_over_restarts(spark: Any, tmp_path: Path, emit: Any) -> None:
    feed, sink = Feed(spark, tmp_path), Sink()
    for _ in range(3):
        feed.more()
        totals = gpu_ops.aggregate(
            feed.inputs()[0], by="ITEM", aggregates=CALLS, state=str(tmp_path / "state"), name="totals", emit=emit,
        )  # fmt: skip
        drain(totals, sink, tmp_path / "checkpoint")
        assert Counter(sink.table) == feed.duckdb(TOTALS)
    assert "group by    item" in gpu_ops.explain(totals)
    before = rescale(str(tmp_path / "state"), 3)
    assert before.after == 3
    for _ in range(2):
        feed.more()
        totals = gpu_ops.aggregate(feed.inputs()[0], by="ITEM", aggregates=CALLS, state=str(tmp_path / "state"),
                                   name="totals", emit=emit)  # fmt: skip
        drain(totals, sink, tmp_path / "checkpoint")
        assert Counter(sink.table) == feed.duckdb(TOTALS)


@pytest.mark.slow
def test_sums_of_intervals_as_sparks_batch(spark: Any, tmp_path: Path) -> None:
    """After every micro-batch, of rows that come and go, over a restart; in `sql` and in `aggregate`."""
    choice, left = random.Random(3), list[tuple[Any, ...]]()
    source, sinks = Source(spark, tmp_path / "in", "op string, g string, ms bigint"), (Sink(), Sink())
    spans = "*", "make_dt_interval(0, 0, 0, CAST(ms / 1000 AS DECIMAL(18, 6))) AS d"
    query = """SELECT g, sum(d) AS total, avg(d) AS mean, sum(d) FILTER (WHERE d > INTERVAL '1' SECOND) AS long
        FROM t GROUP BY g HAVING count(*) > 1"""
    for number in range(2):
        changes = []
        for _ in range(24):
            if left and choice.random() < 0.4:
                row, op = left.pop(choice.randrange(len(left))), "-D"
            else:
                row, op = (choice.choice("ab"), choice.choice([None, -86_400_001, 7, 1500, 10**12])), "+I"
                left.append(row)
            changes.append({"op": op, "g": row[0], "ms": row[1]})
        source.add(*changes)
        rows = stream(source.df.selectExpr(*spans), row_kind="op", name="t")
        sums = gpu_ops.aggregate(
            rows, by="g", aggregates={"total": "sum(d)", "mean": "avg(d)"}, state=str(tmp_path / "2"), name="sums"
        )
        drain(gpu_ops.sql(query, t=rows, state=str(tmp_path / "1"), name="q"), sinks[0], tmp_path / "c1")
        drain(sums, sinks[1], tmp_path / "c2")
        spark.createDataFrame(left, "g string, ms bigint").selectExpr(*spans).createOrReplaceTempView("t")
        assert Counter(sinks[0].table) == Counter(map(tuple, spark.sql(query).collect())), number
        wanted = spark.sql("SELECT g, sum(d), avg(d) FROM t GROUP BY g").collect()
        assert Counter(sinks[1].table) == Counter(map(tuple, wanted)), number
    spark.catalog.dropTempView("t")


@pytest.mark.slow
def test_a_chain_of_join_aggregate_join_and_aggregate(spark: Any, tmp_path: Path) -> None:
    """Each is an input of the next, null groups among them."""
    feed, sink = Feed(spark, tmp_path), Sink()
    for _ in range(3):
        feed.more(15)
        orders, items = feed.inputs()
        joined = gpu_ops.join(orders, items, on="item", how="left", state=str(tmp_path / "1"), name="joined",
                              suffixes=("", "_r"))  # fmt: skip
        shops = gpu_ops.aggregate(
            joined,
            by="shop",
            aggregates={"n": "count(*)", "worth": "sum(price)"},
            state=str(tmp_path / "2"),
            name="shops",
        )
        busy = shops.filter("n > 4")
        back = gpu_ops.join(
            busy, items, on="shop", how="inner", state=str(tmp_path / "3"), name="back", suffixes=("", "_i"),
            null_safe=True,
        )  # fmt: skip
        last = gpu_ops.aggregate(
            back, aggregates={"rows": "count(*)", "shops": "count(distinct shop)", "most": "max(worth)"},
            state=str(tmp_path / "4"), name="last",
        )  # fmt: skip
        drain(last, sink, tmp_path / "checkpoint")
        assert Counter(sink.table) == feed.duckdb(
            "WITH shops AS (SELECT shop, count(*) AS n, sum(price) AS worth FROM orders LEFT JOIN items USING (item) "
            "GROUP BY shop HAVING count(*) > 4) SELECT count(*), count(DISTINCT s.shop), max(worth) "
            "FROM shops s JOIN items i ON s.shop IS NOT DISTINCT FROM i.shop HAVING count(*) > 0"
        )


@pytest.mark.thorough
def test_upserts_are_distributed_by_the_group(spark: Any, tmp_path: Path) -> None:
    source, sink = Source(spark, tmp_path / "in", ORDERS), Sink()
    source.add({"op": "+I", "id": 1, "item": "a", "quantity": 2}, {"op": "+I", "id": 2, "item": "a", "quantity": 3})
    source.add({"op": "+U", "id": 1, "item": "b", "quantity": 5}, {"op": "-D", "id": 9, "item": "b", "quantity": 5})
    upserts = stream(source.df, row_kind="op", unique_key="id", name="orders")
    totals = gpu_ops.aggregate(upserts, by="item", aggregates={"total": "sum(quantity)"}, state=str(tmp_path / "state"))
    assert "latest row" in gpu_ops.explain(totals) or "latest" in gpu_ops.explain(totals)
    drain(totals, sink, tmp_path / "checkpoint")
    assert Counter(sink.table) == Counter({("a", 3): 1, ("b", 5): 1})


@pytest.mark.slow
def test_averages_of_decimals_and_filters_are_sparks_own(spark: Any, tmp_path: Path) -> None:
    """Kept up to date, in SQL as well, and at once, over what is left; also with a condition that is null."""
    schema = "op string, g string, d decimal(10, 2), w decimal(38, 20), x int"
    source, choice, left = Source(spark, tmp_path / "in", schema), random.Random(3), list[tuple[Any, ...]]()
    for _ in range(3):
        changes = []
        for _ in range(20):
            if left and choice.random() < 0.3:
                op, row = "-D", left.pop(choice.randrange(len(left)))
            else:
                op, row = "+I", (
                    choice.choice("ab"), choice.choice(["1.25", "-99999999.99", "0.01", None]),
                    choice.choice(["12345678901.5", "0.00000000000000000001", None]),
                    choice.choice([1, 2, 3, None]),
                )  # fmt: skip
                left.append(row)
            changes.append({"op": op, **dict(zip(("g", "d", "w", "x"), row, strict=True))})
        source.add(*changes)
    calls = {
        "d": "avg(d)", "w": "avg(w)", "some": "avg(d) FILTER (WHERE x > 1)", "n": "count(*) filter (where x = 1)",
        "most": "max(x) FILTER (WHERE coalesce(d, 0) < 1)", "of": "count(distinct x) FILTER (WHERE w IS NOT NULL)",
    }  # fmt: skip
    static = spark.createDataFrame(left, "g string, d string, w string, x int").selectExpr(
        "g", "CAST(d AS decimal(10, 2)) d", "CAST(w AS decimal(38, 20)) w", "x"
    )
    static.createOrReplaceTempView("left_over")
    shown = ", ".join(f"{call} AS {name}" for name, call in calls.items())
    theirs = spark.sql(f"SELECT g, {shown} FROM left_over GROUP BY g")
    wanted = Counter(map(tuple, theirs.collect()))
    rows = stream(source.df, row_kind="op", name="rows")
    own = gpu_ops.aggregate(rows, "g", calls, state=str(tmp_path / "1"), name="own")
    in_sql = gpu_ops.sql(f"SELECT g, {shown} FROM rows GROUP BY g", rows=rows, state=str(tmp_path / "2"))
    for number, frame in enumerate((own, in_sql)):
        assert [x.dataType for x in frame.schema.fields[1:]] == [x.dataType for x in theirs.schema.fields]
        sink = Sink()
        drain(frame, sink, tmp_path / f"c{number}")
        assert Counter(sink.table) == wanted
    at_once = gpu_ops.aggregate(static, "g", calls)
    assert Counter(tuple(row)[1:] for row in at_once.collect()) == wanted


@pytest.mark.thorough
def test_functions_of_ones_own_are_imported_by_state_servers(spark: Any, tmp_path: Path) -> None:
    """Over restarts, with retractions; the manifest names the class."""
    feed, sink = Feed(spark, tmp_path), Sink()
    for _ in range(2):
        feed.more()
        bits = gpu_ops.aggregate(
            feed.inputs()[0], by="item", aggregates={"bits": Bits("ID"), "n": "count(*)"}, name="bits",
            state=str(tmp_path / "state"),
        )  # fmt: skip
        drain(bits, sink, tmp_path / "checkpoint")
        assert Counter(sink.table) == feed.duckdb("SELECT item, bit_or(id), count(*) FROM orders GROUP BY item")
    assert "bits = Bits(id)" in gpu_ops.explain(bits)
    at_end = str(tmp_path / "at_end")
    ended = gpu_ops.aggregate(feed.inputs()[0], by="item", aggregates={"bits": Bits("id")}, emit="at_end", state=at_end)
    drain(ended, sink, tmp_path / "at_end_checkpoint")
    wanted = feed.duckdb("SELECT item, bit_or(id) FROM orders GROUP BY item")
    assert Counter(tuple(row)[1:] for row in gpu_ops.finish(spark, state=at_end).collect()) == wanted
    table = spark.createDataFrame(gpu_ops.finish(spark, state=at_end).collect())
    at_once = gpu_ops.aggregate(
        table.drop("row_kind"), by="item", aggregates={"all": Bits("bits"), "last": "last(item)"}
    )
    assert Counter(tuple(row)[1:3] for row in at_once.collect()) == wanted


@pytest.mark.thorough
def test_groups_are_forgotten_after_a_ttl(spark: Any, tmp_path: Path) -> None:
    """Nothing is said of them, and the next row begins a group anew; of a top-N as well."""
    source, sinks = Source(spark, tmp_path / "in", ORDERS), (Sink(), Sink())
    source.add({"op": "+I", "id": 1, "item": "a", "quantity": 2})
    for run in range(2):
        orders = stream(source.df, row_kind="op", ttl="1 second", name="orders")
        totals = gpu_ops.aggregate(orders, "item", {"total": "sum(quantity)"}, state=str(tmp_path / "1"), name="totals")
        first = gpu_ops.top(orders, "item", order_by="quantity", n=2, state=str(tmp_path / "2"), name="first")
        assert "1 second after the last write" in gpu_ops.explain(totals)
        for frame, sink, name in ((totals, sinks[0], "1"), (first, sinks[1], "2")):
            drain(frame, sink, tmp_path / f"checkpoint{name}")
        if run == 0:
            time.sleep(1.1)
            source.add({"op": "+I", "id": 2, "item": "a", "quantity": 5})
    assert sinks[0].changes == [("+I", "a", 2), ("+I", "a", 5)]
    assert sinks[1].changes == [("+I", 1, "a", 2), ("+I", 2, "a", 5)]


def test_what_is_refused(spark: Any, tmp_path: Path) -> None:
    orders, _ = Feed(spark, tmp_path).inputs()
    n = {"n": "count(*)"}
    for make, message in [
        (lambda: gpu_ops.aggregate(orders, "item", {"n": "median(id)"}), "no aggregate 'median'"),
        (lambda: gpu_ops.aggregate(orders, "item", n, emit="now"), "emit='now'"),
        (lambda: gpu_ops.aggregate(orders, "item", {"n": "sum(id) filter (where op > '')"}), "op.* cannot be resolved"),
        (lambda: gpu_ops.aggregate(orders, "item", {"n": "sum(id) filter (where rand() > 1)"}), "has another value"),
    ]:
        with pytest.raises(DescriptionError, match=message):
            make()


def test_what_spark_would_count_twice_is_said(spark: Any, tmp_path: Path) -> None:
    orders, items = Feed(spark, tmp_path).inputs()
    joined = gpu_ops.join(orders, items, on="item", suffixes=("", "_r"), state=str(tmp_path / "state"), name="joined")
    assert "WARNING" not in gpu_ops.explain(joined)
    text = gpu_ops.explain(joined.groupBy("shop").count())
    assert "WARNING: Spark aggregates the changelog of 'joined' without its row_kind: a row that is taken back" in text
    assert "Take gpu_ops.aggregate()" in text
    signed = joined.groupBy("shop").agg({"row_kind": "max"})
    assert "WARNING" not in gpu_ops.explain(signed)
