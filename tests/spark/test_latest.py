"""Upserts whose unique key is not in the join key: normalised first, then distributed by the join key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.server.rescale import rescale
from spark.support import Row, Sink, Source, drain, slow_join

pytestmark = pytest.mark.spark

ORDERS, PRICES = "op string, id long, item string, quantity int", "op string, item string, price double"


class Upserts:
    """Orders by id, prices by item; each change replaces the row of its key, or takes it away."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.choice = random.Random(5)
        self.orders = Source(spark, folder / "orders", ORDERS)
        self.prices = Source(spark, folder / "prices", PRICES)
        self.kept: dict[str, dict[Any, Row]] = {"orders": {}, "prices": {}}

    def more(self, rows: int = 25) -> None:
        for name, source, keys in (("orders", self.orders, range(12)), ("prices", self.prices, "abcde")):
            changes = []
            for _ in range(rows):
                key, op = self.choice.choice(list(keys)), self.choice.choice(["+I", "+U", "+U", "-D"])
                item = self.choice.choice("abcdef")
                row = (key, item, self.choice.randrange(3)) if name == "orders" else (key, self.choice.random())
                names = ("id", "item", "quantity") if name == "orders" else ("item", "price")
                changes.append({"op": op, **dict(zip(names, row, strict=True))})
                self.kept[name].pop(key, None)
                if op != "-D":
                    self.kept[name][key] = row
            source.add(*changes)

    def inputs(self) -> tuple[Any, Any]:
        orders = stream(self.orders.df, name="orders", row_kind="op", unique_key="id")
        return orders, stream(self.prices.df, name="prices", row_kind="op", unique_key="item")

    def expected(self) -> list[Row]:
        left = [(row[1], row[0], row[2]) for row in self.kept["orders"].values()]
        return slow_join("left", left, list(self.kept["prices"].values()), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("emit", slow_but(["per_batch", "per_event"], "per_event"))
def test_a_join_of_upserts_by_another_column_is_distributed_by_it(spark: Any, tmp_path: Path, emit: Any) -> None:
    feed, state, sink = Upserts(spark, tmp_path), tmp_path / "state", Sink()
    for partitions in (2, 3, 2):
        if state.exists():
            assert rescale(str(state), partitions).after == partitions
        for _ in range(2):
            feed.more()
        changes = gpu_ops.join(*feed.inputs(), on="item", how="left", emit=emit, state=str(state), name="shop")
        text = gpu_ops.explain(changes)
        assert text.count(f"partitions  {partitions} (") == 2
        assert "latest row of each key: orders  (metrics 'shop_orders')" in text
        assert "input       orders: row kinds in 'row_kind', unique key id (retract)" in text
        query = drain(changes.select("row_kind", "item", "id", "quantity", "price"), sink, tmp_path / "checkpoint")
        assert sink.table == feed.expected()
        rows = [query.lastProgress["observedMetrics"][name]["metrics"] for name in ("shop", "shop_orders")]
        assert [row["partitions"] for row in rows] == [partitions, partitions]
    assert sorted(path.name for path in state.iterdir() if path.is_dir()) == ["g2", "latest"]
    assert [path.name for path in (state / "latest").iterdir()] == ["0"]


@pytest.mark.thorough
def test_three_inputs_and_sql(spark: Any, tmp_path: Path) -> None:
    feed, sink = Upserts(spark, tmp_path), Sink()
    for _ in range(3):
        feed.more()
    orders, prices = feed.inputs()
    query = "SELECT o.item, id, quantity, price FROM o LEFT JOIN p ON o.item = p.item"
    drain(gpu_ops.sql(query, o=orders, p=prices, state=str(tmp_path / "sql")), sink, tmp_path / "by_sql")
    assert sink.table == feed.expected()
    sink, again = (
        Sink(),
        stream(feed.prices.df.withColumnRenamed("price", "again"), name="again", row_kind="op", unique_key="item"),
    )
    many = gpu_ops.multi_join([orders, prices, again], on="item", how="left", state=str(tmp_path / "multi"))
    drain(many.select("row_kind", "item", "id", "quantity", "price"), sink, tmp_path / "by_multi")
    assert sink.table == feed.expected()
    assert "latest row of each key: orders" in gpu_ops.explain(many)


@pytest.mark.thorough
def test_a_folder_that_was_begun_in_one_partition_stays_so(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, state, sink = Upserts(spark, tmp_path), str(tmp_path / "state"), Sink()
    from gpu_ops.spark.api import apply

    def changes() -> Any:
        joined = gpu_ops.join(*feed.inputs(), on="item", how="left", state=state)
        return joined.select("row_kind", "item", "id", "quantity", "price")

    feed.more()
    with monkeypatch.context() as patch:
        patch.setattr(apply, "_in_partitions", lambda description, sides, *_: (description, sides))
        drain(changes(), sink, tmp_path / "checkpoint")
    feed.more()
    assert "latest row" not in gpu_ops.explain(changes())
    drain(changes(), sink, tmp_path / "checkpoint")
    assert sink.table == feed.expected()


@pytest.mark.thorough
def test_a_join_of_upserts_in_one_partition_is_one_engine(spark: Any, tmp_path: Path) -> None:
    """With the operator that finds their old rows, over restarts."""
    feed, state, sink = Upserts(spark, tmp_path), tmp_path / "state", Sink()
    for _ in range(3):
        feed.more()
        changes = gpu_ops.join(*feed.inputs(), on="item", how="left", state=str(state), name="shop", partitions=1)
        assert "shop_orders, in the same engine" in gpu_ops.explain(changes)
        drain(changes.select("row_kind", "item", "id", "quantity", "price"), sink, tmp_path / "checkpoint")
        assert sink.table == feed.expected()
    with pytest.raises(gpu_ops.DescriptionError, match="2 operators share this folder's one engine"):
        rescale(str(state), 2)


def test_latest_alone(spark: Any, tmp_path: Path) -> None:
    feed, sink = Upserts(spark, tmp_path), Sink()
    orders, _ = feed.inputs()
    for _ in range(3):
        feed.more()
        latest = gpu_ops.latest(orders, state=str(tmp_path / "state"))
        drain(latest, sink, tmp_path / "checkpoint")
        assert sink.table == sorted(feed.kept["orders"].values(), key=repr)
    assert json.loads(latest.schema.json())["fields"][0]["metadata"]["gpu_ops.uniqueKey"] == ["id"]
    columns = feed.orders.df.select("id", "quantity", "item")
    first = gpu_ops.latest(
        columns, "id", order_by="QUANTITY", keep="first", state=str(tmp_path / "first"), name="early"
    )
    assert "first row of each key: input" in gpu_ops.explain(first)
    sink = Sink()
    drain(first.select("row_kind", "id", "quantity"), sink, tmp_path / "by_quantity")
    seen = [(change["id"], change["quantity"]) for change in feed.orders.changes]
    assert sorted(sink.table) == [(key, min(n for k, n in seen if k == key)) for key in sorted({k for k, _ in seen})]
    with pytest.raises(DescriptionError, match="the latest row of what"):
        gpu_ops.latest(feed.orders.df)
    with pytest.raises(DescriptionError, match="key names 'of'; there are op, id, item, quantity"):
        gpu_ops.latest(feed.orders.df, "of")
    with pytest.raises(DescriptionError, match=r"latest\(\) takes a stream"):
        gpu_ops.latest(spark.range(1), "id")


@pytest.mark.slow
def test_rows_that_move_between_partitions_of_a_join_below_another(spark: Any, tmp_path: Path) -> None:
    """A row's -D and +I come from the partitions of its old and its new item, in any order."""
    source, sink, choice = Source(spark, tmp_path / "orders", "id long, item string"), Sink(), random.Random(2)
    orders = stream(source.df, name="orders", unique_key="id")
    prices = spark.createDataFrame([(item, number) for number, item in enumerate("abcdef")], "item string, price int")
    words = spark.createDataFrame([(0, "no"), (1, "one")], "number int, word string")
    query = """
        SELECT o.id, o.item, p.price, w.word FROM orders o JOIN prices p ON o.item = p.item
        LEFT JOIN words w ON p.price * 0 = w.number
    """
    for _ in range(3):
        kept = {number: choice.choice("abcdef") for number in range(60)}
        source.add(*({"id": number, "item": item} for number, item in kept.items()))
        changes = gpu_ops.sql(
            query, orders=orders, prices=stream(prices, unique_key="item"), words=words,
            state=str(tmp_path / "state"), partitions=3,
        )  # fmt: skip
        drain(changes, sink, tmp_path / "checkpoint")
        wanted = [(number, item, "abcdef".index(item), "no") for number, item in kept.items()]
        assert sink.table == sorted(wanted, key=repr)
