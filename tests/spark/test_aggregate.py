"""Aggregates kept up to date through Spark: chains of join, aggregate and join, state folders, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.spark.servers.rescale import rescale
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


TOTALS = "SELECT item, count(*) AS n, sum(quantity) AS total, max(id) AS top FROM orders GROUP BY item"


@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
def test_an_aggregate_goes_on_over_restarts(spark: Any, tmp_path: Path, emit: Any) -> None:
    feed, sink = Feed(spark, tmp_path), Sink()
    for _ in range(3):
        feed.more()
        totals = gpu_ops.aggregate(
            feed.inputs()[0], by="ITEM", aggregates={"n": "count(*)", "total": "sum(quantity)", "top": "max(id)"},
            state=str(tmp_path / "state"), name="totals", emit=emit,
        )  # fmt: skip
        drain(totals, sink, tmp_path / "checkpoint")
        assert Counter(sink.table) == feed.duckdb(TOTALS)
    assert "group by    item" in gpu_ops.explain(totals)
    with pytest.raises(NotBuiltError, match="keeps groups of orders beside its input, which is not cut anew yet"):
        rescale(str(tmp_path / "state"), 3)
    feed.more()
    drain(totals, sink, tmp_path / "checkpoint")
    assert Counter(sink.table) == feed.duckdb(TOTALS)


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


def test_upserts_are_distributed_by_the_group(spark: Any, tmp_path: Path) -> None:
    source, sink = Source(spark, tmp_path / "in", ORDERS), Sink()
    source.add({"op": "+I", "id": 1, "item": "a", "quantity": 2}, {"op": "+I", "id": 2, "item": "a", "quantity": 3})
    source.add({"op": "+U", "id": 1, "item": "b", "quantity": 5}, {"op": "-D", "id": 9, "item": "b", "quantity": 5})
    upserts = stream(source.df, row_kind="op", unique_key="id", name="orders")
    totals = gpu_ops.aggregate(upserts, by="item", aggregates={"total": "sum(quantity)"}, state=str(tmp_path / "state"))
    assert "latest row" in gpu_ops.explain(totals) or "latest" in gpu_ops.explain(totals)
    drain(totals, sink, tmp_path / "checkpoint")
    assert Counter(sink.table) == Counter({("a", 3): 1, ("b", 5): 1})


def test_what_is_refused(spark: Any, tmp_path: Path) -> None:
    orders, _ = Feed(spark, tmp_path).inputs()
    forgets, n = stream(orders.df, row_kind="op", ttl="1 day"), {"n": "count(*)"}
    for make, message in [
        (lambda: gpu_ops.aggregate(forgets, "item", n), "ttl= has no"),
        (lambda: gpu_ops.aggregate(orders, "item", {"n": "median(id)"}), "no aggregate 'median'"),
        (lambda: gpu_ops.aggregate(orders, "item", n, emit="now"), "emit='now'"),
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
