"""A top-N through Spark: of upserts, of a join's changelog, over restarts; and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import duckdb
import pytest

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError
from spark.support import Row, Sink, Source, drain, in_memory, slow_join

pytestmark = pytest.mark.spark

ORDERS, ITEMS = "op string, id long, item string, amount long", "op string, item string, region string"


class Shop:
    """Orders by id and items by name; each change replaces the row of its key, or takes it away."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.choice = random.Random(4)
        self.orders, self.items = Source(spark, folder / "orders", ORDERS), Source(spark, folder / "items", ITEMS)
        self.kept: tuple[dict[Any, Row], dict[Any, Row]] = ({}, {})

    def more(self, rows: int = 30) -> None:
        for number, source in enumerate((self.orders, self.items)):
            changes = []
            for _ in range(rows):
                op, item = self.choice.choice(["+I", "+U", "+U", "-D"]), self.choice.choice("abcde")
                if number:
                    row: dict[str, Any] = {"item": item, "region": self.choice.choice(["n", "s"])}
                else:
                    amount = self.choice.choice([None, *range(1000)])
                    row = {"id": self.choice.randrange(25), "item": item, "amount": amount}
                key = next(iter(row.values()))
                self.kept[number].pop(key, None)
                if op != "-D":
                    self.kept[number][key] = tuple(row.values())
                changes.append({"op": op, **row})
            source.add(*changes)

    def inputs(self) -> tuple[Any, Any]:
        orders = stream(self.orders.df, name="orders", row_kind="op", unique_key="id")
        return orders, stream(self.items.df, name="items", row_kind="op", unique_key="item")


def firsts(rows: list[Row], by: int, amount: int, n: int) -> list[Row]:
    found: list[Row] = []
    for group in {row[by] for row in rows}:
        own = [row for row in rows if row[by] == group]
        found += sorted(own, key=lambda row: (row[amount] is None, -(row[amount] or 0), row[0]))[:n]
    return sorted(found, key=repr)


@pytest.mark.parametrize("emit", ["per_batch", pytest.param("per_event", marks=pytest.mark.slow)])
def test_of_upserts_by_another_column(spark: Any, tmp_path: Path, emit: Any) -> None:
    shop, state, sink = Shop(spark, tmp_path), str(tmp_path / "state"), Sink()
    for _ in range(3):
        shop.more()
        changes = gpu_ops.top(
            shop.inputs()[0], "item", order_by="amount DESC, id", n=2, emit=emit, state=state, name="best"
        )
        query = drain(changes, sink, tmp_path / "checkpoint")
        assert sink.table == firsts(list(shop.kept[0].values()), 1, 2, 2)
        assert query.lastProgress["observedMetrics"]["best"]["metrics"]["partitions"] == 2
    text = gpu_ops.explain(changes)
    assert "latest row of each key: orders" in text
    assert "first 2 rows of each group: orders  (metrics 'best')" in text
    assert "  order       amount DESC, id, then arrival" in text


@pytest.mark.thorough
def test_of_a_join_and_a_join_of_it(spark: Any, tmp_path: Path) -> None:
    shop, sink = Shop(spark, tmp_path), Sink()
    for _ in range(3):
        shop.more()
    sold = gpu_ops.join(*shop.inputs(), on="item", state=str(tmp_path / "join"))
    best = gpu_ops.top(sold, "region", order_by=["amount DESC", "id"], n=3, number="place", state=str(tmp_path / "top"))
    assert best.columns == ["row_kind", "item", "id", "amount", "region", "place"]
    other = stream(shop.items.df, name="items", row_kind="op", unique_key="item")
    named = gpu_ops.join(
        stream(best, name="best"), other, on="item", how="left", suffixes=("", "_now"), state=str(tmp_path / "last")
    )
    drain(named, sink, tmp_path / "checkpoint")
    rows = [(i, item, amount) for i, item, amount in shop.kept[0].values()]
    joined = slow_join("inner", [(item, i, amount) for i, item, amount in rows], list(shop.kept[1].values()), 2)
    wanted = []
    for region in ("n", "s"):
        own = firsts([(i, item, amount, r) for item, i, amount, r in joined if r == region], 3, 2, 3)
        own.sort(key=lambda row: (row[2] is None, -(row[2] or 0), row[0]))
        wanted += [(item, i, amount, r, at, r) for at, (i, item, amount, r) in enumerate(own, 1)]
    assert sink.table == sorted(wanted, key=repr)


@pytest.mark.thorough
def test_in_sql(spark: Any, tmp_path: Path) -> None:
    shop, sink = Shop(spark, tmp_path), Sink()
    query = """
        SELECT id, item, best.place * 10 AS place, total FROM (
            SELECT o.id, o.item, i.region, o.amount + 1 AS total,
                   row_number() OVER (PARTITION BY i.region ORDER BY o.amount + 1 DESC, o.id) AS place
            FROM orders o JOIN items i ON o.item = i.item
        ) AS best WHERE 3 > best.place AND total IS NOT NULL
    """
    for _ in range(3):
        shop.more()
        orders, items = shop.inputs()
        changes = gpu_ops.sql(query, orders=orders, items=items, state=str(tmp_path / "state"))
        drain(changes, sink, tmp_path / "checkpoint")
        rows = [(item, i, amount) for i, item, amount in shop.kept[0].values()]
        joined = slow_join("inner", rows, list(shop.kept[1].values()), 2)
        wanted = []
        for region in ("n", "s"):
            own = [(i, item, amount) for item, i, amount, r in joined if r == region]
            own.sort(key=lambda row: (row[2] is None, -(row[2] or 0), row[0]))
            wanted += [(i, item, 10 * at, a + 1) for at, (i, item, a) in enumerate(own[:2], 1) if a is not None]
        assert sink.table == sorted(wanted, key=repr)
    text = gpu_ops.explain(changes)
    assert "rankRange=[1..2]" in text
    numbered = "SELECT *, row_number() OVER (PARTITION BY region ORDER BY item) n FROM items"
    latest = f"SELECT item, region FROM ({numbered}) WHERE n = 1"
    changes, sink = gpu_ops.sql(latest, items=items, state=str(tmp_path / "other")), Sink()
    drain(changes, sink, tmp_path / "other_checkpoint")
    found = {region: min(i for i, r in shop.kept[1].values() if r == region) for _, region in shop.kept[1].values()}
    assert sink.table == sorted((item, region) for region, item in found.items())


@pytest.mark.thorough
def test_insertions_keep_the_first_rows_only(spark: Any, tmp_path: Path) -> None:
    source, sink = Source(spark, tmp_path / "in", "item string, amount long"), Sink()
    choice = random.Random(1)
    rows = [(choice.choice("ab"), choice.randrange(10_000)) for _ in range(200)]
    for start in range(0, 200, 50):
        source.add(*({"item": item, "amount": amount} for item, amount in rows[start : start + 50]))
    changes = gpu_ops.top(source.df, "item", order_by="amount", state=str(tmp_path / "state"), name="least")
    query = drain(changes, sink, tmp_path / "checkpoint")
    assert sink.table == sorted((item, min(a for i, a in rows if i == item)) for item in "ab")
    metrics = query.lastProgress["observedMetrics"]["least"]["metrics"]
    assert metrics["input_state_rows"] == 2


@pytest.mark.thorough
def test_of_a_static_input(spark: Any) -> None:
    choice = random.Random(2)
    rows = [(choice.choice("abc"), choice.choice([1, 2, None]), number) for number in range(300)]
    table = spark.createDataFrame(rows, "item string, amount int, id int").repartition(3).sortWithinPartitions("id")
    wanted = duckdb.connect().sql(
        "SELECT * FROM (SELECT unnest($rows, recursive := true)) QUALIFY row_number() OVER (PARTITION BY item "
        "ORDER BY amount NULLS FIRST, id DESC) <= 2",
        params={"rows": [dict(zip(("item", "amount", "id"), row, strict=True)) for row in rows]},
    )
    found = gpu_ops.top(table, "item", order_by="amount, id DESC", n=2)
    assert not found.isStreaming
    assert sorted(tuple(row) for row in found.collect()) == sorted(("+I", *row) for row in wanted.fetchall())


def test_what_is_refused(spark: Any, tmp_path: Path) -> None:
    source = Source(spark, tmp_path / "in", "item string, amount long")
    source.add({"item": "a", "amount": 1})
    with pytest.raises(DescriptionError, match="input 'input': order_by names 'price'; there are item, amount"):
        in_memory(gpu_ops.top, source.df, "item", order_by="price")
    with pytest.raises(DescriptionError, match="input 'sold': by names 'region'; there are item, amount"):
        in_memory(gpu_ops.top, stream(source.df, name="sold"), "region", order_by="amount")
    with pytest.raises(TypeError, match=r"top\(\) has no option orderby=; order_by= is the order"):
        in_memory(gpu_ops.top, source.df, "item", order_by="amount", orderby="amount")
