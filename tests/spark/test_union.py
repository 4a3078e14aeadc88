"""UNION ALL of changelogs: after every micro-batch the folded result is Spark's over the folded inputs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.spark.plan.column_metadata import known_key
from spark.support import Sink, Source, drain, in_memory

pytestmark = pytest.mark.spark

ORDERS = "op STRING, id LONG, item STRING"
PRICES = "op STRING, item STRING, price LONG"
QUERY = """WITH dear AS (SELECT item, price FROM prices WHERE price > 5)
SELECT o.id, p.price FROM orders o LEFT JOIN dear p ON o.item = p.item
UNION ALL
SELECT o.id, max(p.price) FROM orders o JOIN prices p ON o.item = p.item GROUP BY o.id
UNION ALL
SELECT o.id, -p.price FROM orders o JOIN prices p ON o.item = p.item WHERE o.id > 2"""


class Feeds:
    """Orders and prices that come and go."""

    def __init__(self, spark: Any, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.spark = spark
        self.orders, self.prices = Source(spark, folder / "orders", ORDERS), Source(spark, folder / "prices", PRICES)

    def arrive(self) -> None:
        """A micro-batch of each."""
        for source, columns in ((self.orders, ("id", "item")), (self.prices, ("item", "price"))):
            live = source.table(columns)
            changes = []
            for _ in range(self.random.randint(1, 6)):
                if live and self.random.random() < 0.4:
                    gone = live.pop(self.random.randrange(len(live)))
                    changes.append({"op": "-D", **dict(zip(columns, gone, strict=True))})
                else:
                    item = self.random.choice(["book", "pen", "cup", None])
                    number = self.random.randint(1, 9)
                    row = (number, item) if columns[0] == "id" else (item, number)
                    live.append(row)
                    changes.append({"op": "+I", **dict(zip(columns, row, strict=True))})
            source.add(*changes)

    def streams(self) -> dict[str, Any]:
        return {
            "orders": stream(self.orders.df, row_kind="op", name="orders"),
            "prices": stream(self.prices.df, row_kind="op", name="prices"),
        }

    def expected(self, query: str) -> list[tuple[Any, ...]]:
        """Spark's answer over the folded inputs."""
        orders = self.spark.createDataFrame(self.orders.table(("id", "item")), "id LONG, item STRING")
        prices = self.spark.createDataFrame(self.prices.table(("item", "price")), "item STRING, price LONG")
        orders.createOrReplaceTempView("orders")
        prices.createOrReplaceTempView("prices")
        return sorted((tuple(row) for row in self.spark.sql(query).collect()), key=repr)


@pytest.fixture
def feeds(spark: Any, tmp_path: Path) -> Feeds:
    return Feeds(spark, tmp_path, seed=40)


def test_union_all_in_sql_is_as_in_spark_and_goes_on(feeds: Feeds, tmp_path: Path) -> None:
    sink = Sink()
    for _ in range(3):  # each time it goes on from its state folder
        feeds.arrive()
        feeds.arrive()
        changes = gpu_ops.sql(QUERY, **feeds.streams(), state=str(tmp_path / "state"), partitions=2, name="both")
        drain(changes, sink, tmp_path / "checkpoint")
        assert sink.table == feeds.expected(QUERY)
    assert sorted(path.name for path in (tmp_path / "state" / "union").iterdir()) == ["1", "2", "3"]


BELOW = {
    "joined": """SELECT u.id, u.n, p.price FROM (SELECT id, item, 1 AS n FROM orders
        UNION ALL SELECT max(id), item, count(*) FROM orders GROUP BY item) u LEFT JOIN prices p ON u.item = p.item""",
    "twice, in WITH": """WITH u AS (SELECT o.id, p.price FROM orders o JOIN prices p ON o.item = p.item
        UNION ALL SELECT id, NULL FROM orders WHERE id > 3)
        SELECT a.id, a.price, b.n FROM u a JOIN (SELECT id, count(*) AS n FROM u GROUP BY id) b ON a.id = b.id""",
    "without equal rows, the first": """SELECT item, id FROM orders UNION SELECT item, price FROM prices
        ORDER BY item, id LIMIT 4""",
    "a part that is an input as it is": """SELECT o.id, p.price FROM orders o JOIN prices p ON o.item = p.item
        UNION ALL SELECT id, NULL FROM orders WHERE id < 7""",
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", slow_but(BELOW))
def test_union_below_other_operators_is_as_in_spark_and_goes_on(feeds: Feeds, tmp_path: Path, what: str) -> None:
    sink = Sink()
    for _ in range(3):
        feeds.arrive()
        feeds.arrive()
        used = {name: given for name, given in feeds.streams().items() if name in BELOW[what]}
        changes = gpu_ops.sql(BELOW[what], **used, state=str(tmp_path / "state"), partitions=2)
        drain(changes, sink, tmp_path / "checkpoint")
        assert sink.table == feeds.expected(BELOW[what])
    assert changes.columns[0] == "row_kind"
    assert "Union(all=[true])" in gpu_ops.explain(changes)


def test_union_of_upserts_takes_the_old_rows_back(feeds: Feeds, tmp_path: Path) -> None:
    """An upsert replaces the row of its own input, whatever rows of another one have the same key."""
    upserts = {
        name: stream(getattr(feeds, name).df, row_kind="op", unique_key=key, name=name)
        for name, key in (("orders", "id"), ("prices", "item"))
    }
    feeds.orders.add({"op": "+I", "id": 1, "item": "pen"}, {"op": "+I", "id": 2, "item": "cup"})
    feeds.prices.add({"op": "+I", "item": "pen", "price": 5}, {"op": "+I", "item": "cup", "price": 6})
    sink, query = Sink(), "SELECT item, count(*) AS n FROM (SELECT item FROM orders UNION ALL SELECT item FROM prices) "
    query += "GROUP BY item"
    for number, change in enumerate(({"id": 1, "item": "cup"}, {"id": 2, "item": "pen"}, {"id": 1, "item": "pen"})):
        changes = gpu_ops.sql(query, **upserts, state=str(tmp_path / "state"), partitions=2)
        drain(changes, sink, tmp_path / "checkpoint")
        wanted = [[("cup", 2), ("pen", 2)], [("cup", 3), ("pen", 1)], [("cup", 2), ("pen", 2)]]
        assert sink.table == wanted[number]
        feeds.orders.add({"op": "+U", **change})


def test_union_of_static_inputs_is_done_at_once(spark: Any, feeds: Feeds) -> None:
    feeds.arrive()
    query = BELOW["joined"]
    expected = feeds.expected(query)
    orders, prices = spark.table("orders"), spark.table("prices")
    found = gpu_ops.sql(query, orders=orders, prices=prices)
    assert sorted((tuple(row)[1:] for row in found.collect()), key=repr) == expected


def test_union_of_two_joins_and_of_one_twice(feeds: Feeds, tmp_path: Path) -> None:
    feeds.arrive()
    feeds.arrive()
    streams = feeds.streams()
    both_inputs = streams["orders"], streams["prices"]
    left = in_memory(gpu_ops.join, *both_inputs, on="item", how="left", partitions=2)
    inner = in_memory(gpu_ops.join, *both_inputs, on="item", partitions=2)
    left, inner = left.select("row_kind", "id", "price"), inner.select("row_kind", "id", "price")
    both = gpu_ops.union(left, inner, left.where("price > 4"))
    assert known_key(both) is None
    sink = Sink()
    drain(both, sink, tmp_path / "checkpoint")
    joined = "SELECT o.id, p.price FROM orders o {} JOIN prices p ON o.item = p.item"
    parts = [joined.format("LEFT"), joined.format(""), joined.format("LEFT") + " WHERE p.price > 4"]
    assert sink.table == feeds.expected(" UNION ALL ".join(parts))


def test_what_is_refused(feeds: Feeds) -> None:
    feeds.arrive()
    streams = feeds.streams()
    one, other = (
        in_memory(gpu_ops.join, streams["orders"], streams["prices"], on="item", partitions=2, name="priced")
        for _ in range(2)
    )
    with pytest.raises(DescriptionError, match="two joins are called 'priced'"):
        gpu_ops.union(one, other)
    with pytest.raises(DescriptionError, match="the first changelog has 3 columns, number 2 1: id"):
        gpu_ops.union(one, one.select("row_kind", "id"))
    with pytest.raises(DescriptionError, match="two changelogs or more"):
        gpu_ops.union(one)
    with pytest.raises(DescriptionError, match="some of them are static and some stream"):
        gpu_ops.union(one, one.sparkSession.range(3))
    query = "SELECT id FROM orders a JOIN orders b USING (id) UNION ALL SELECT 1 FROM orders"
    with pytest.raises(DescriptionError, match="does not name the input 'prices'"):
        in_memory(gpu_ops.sql, query, **streams)
    with pytest.raises(NotBuiltError, match="emit 'at_end' of a UNION ALL"):
        gpu_ops.sql(QUERY, **streams, emit="at_end", state="s")
    joined = "FROM orders o JOIN prices p ON o.item = p.item"
    with pytest.raises(gpu_ops.SqlError, match=r"(?s)line 3, column 8.*SELECT o.nme"):
        in_memory(gpu_ops.sql, f"SELECT o.id {joined}\nUNION ALL\nSELECT o.nme {joined}", **streams)
