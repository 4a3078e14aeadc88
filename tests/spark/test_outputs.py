"""Several outputs of one query: each is right after every micro-batch, and what they share is computed once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow.dataset as ds
import pytest
from conftest import slow_but
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import sinks, stream
from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.spark.api import apply
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.plan import changes as of_changes
from gpu_ops.spark.plan.column_metadata import known_key
from spark.feeds import Feed, sql_join
from spark.support import Row, drain, fold, in_memory

pytestmark = pytest.mark.spark

ITEMS = (1, 2, 3, 4, 5, None)
JOINED = "SELECT item, id, quantity, price FROM orders LEFT JOIN prices USING (item)"
ORDERS = ("item", "id", "quantity", "price")


class Shop:
    """Orders with prices, and totals of these: two outputs that share a join by item.

    Args:
        spark: the session.
        folder: for files, state and checkpoint.
        by: what totals are by: ``item``, so that the keys of both operators agree, or another column.
        emit: of both operators.
    """

    def __init__(self, spark: Any, folder: Path, by: str = "item", emit: Any = "per_batch") -> None:
        self.folder, self.emit, self.by, self.how = folder, emit, by, "left"
        orders = {"id": ("long", None), "item": ("int", ITEMS), "quantity": ("int", (1, 2, None))}
        prices = {"item": ("int", None), "price": ("double", (1.5, 2.5))}
        self.feeds = [Feed(spark, folder, "orders", orders), Feed(spark, folder, "prices", prices)]

    def frames(self) -> dict[str, Any]:
        orders, prices = (
            stream(feed.df, name=feed.name, row_kind="op", unique_key=next(iter(feed.columns)), updates="retract")
            for feed in self.feeds
        )
        joined = gpu_ops.join(
            orders, prices, on="item", how=self.how, emit=self.emit, state=str(self.folder / "joined"), name="joined"
        )
        totals = gpu_ops.aggregate(
            joined,
            self.by,
            {"n": ("count", "*"), "ids": ("sum", "id")},
            emit=self.emit,
            state=str(self.folder / "totals"),
            name="totals",
        )
        return {"orders": joined.select("row_kind", *ORDERS), "totals": totals}

    def more(self, batches: int = 1) -> None:
        for _ in range(batches):
            for feed in self.feeds:
                feed.more(12)

    def run(self, both: Any, sink: Callable[[Any, int], None]) -> Any:
        return drain(both, sink, self.folder / "checkpoint")

    def expected(self, name: str, files: int | None = None) -> list[Row]:
        files = len(self.feeds[0].files) if files is None else files
        joined = JOINED.replace("LEFT", self.how)
        totals = f"SELECT {self.by}, COUNT(*), SUM(id)::LONG FROM ({joined}) GROUP BY {self.by}"
        return sql_join({"orders": joined, "totals": totals}[name], self.feeds, files)


def rows_of(df: Any) -> list[Row]:
    return sorted((tuple(row) for row in df.collect()), key=repr)


class Broken:
    """A view that fails in one micro-batch, as often as it is told to.

    Args:
        view: what it fails before.
        number: the micro-batch.
        errors: what it raises, one after the other.
    """

    def __init__(self, view: Callable[[Any, int], None], number: int, *errors: Exception) -> None:
        self._view, self._number, self._errors = view, number, list(errors)

    def __call__(self, batch: Any, number: int) -> None:
        if number == self._number and self._errors:
            raise self._errors.pop(0)
        self._view(batch, number)


@pytest.fixture
def shop(spark: Any, tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """``engine``: one engine has both operators, in two partitions as their keys agree.

    ``card``: in one partition, of which three tasks have shares; ``task``: one task has both; ``stages``: each is a
    stage of Spark's.
    """
    way = getattr(request, "param", "engine")
    if way == "card":
        monkeypatch.setattr(apply, "default_partitions", lambda *_: (1, "one"))
        monkeypatch.setattr(apply, "_shares", lambda *_: 3)
    if way == "stages":
        monkeypatch.setattr(of_changes, "MOST_IN_ONE_TASK", 0)
    by = "item" if way in ("engine", "card") else "quantity"
    made = Shop(spark, tmp_path, by, "per_event" if way in ("card", "stages") else "per_batch")
    for feed in made.feeds:
        feed.read_by_arrow = way != "stages"
    return made


@pytest.mark.slow
@pytest.mark.parametrize("shop", ["engine", "card", "task", "stages"], indirect=True)
def test_two_views_of_one_query_are_right_after_every_micro_batch(shop: Shop) -> None:
    """Also after one that the second view fails in: the first has it, and skips it when it comes again."""
    views = {name: sinks.memory_view(f"outputs_{name}") for name in ("orders", "totals")}
    seen = []

    def is_right(**batches: int) -> bool:
        return all(rows_of(views[name].table) == shop.expected(name, files) for name, files in batches.items())

    broken = Broken(views["totals"], 1, ValueError("no room"))

    def checked(batch: Any, number: int) -> None:
        sinks.each(orders=views["orders"], totals=broken)(batch, number)
        assert is_right(orders=number + 1, totals=number + 1)
        seen.append(number)

    shop.more(3)
    both = gpu_ops.outputs(**shop.frames())
    assert both.columns == ["orders", "totals"]
    with pytest.raises(StreamingQueryException) as failed:
        shop.run(both, checked)
    assert gpu_ops.why(failed.value) == "output 'totals': ValueError: no room"
    assert is_right(orders=2, totals=1)
    query = shop.run(gpu_ops.outputs(**shop.frames()), checked)
    assert seen == [0, 1, 2]
    assert set(query.lastProgress["observedMetrics"]) == {"joined", "totals"}


@pytest.mark.parametrize("shop", slow_but(["engine", "task", "stages"], "engine"), indirect=True)
def test_what_two_outputs_share_is_computed_once(spark: Any, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partition of an operator is asked once in a micro-batch; all rows are counted once, and are in one order."""
    asked: Counter[tuple[str, int, int]] = Counter()
    locate = Directory.locate

    def counted(directory: Directory, request: Any) -> Any:
        answer = locate(directory, request)
        asked[request.join_id, request.batch_id, request.partition] += answer.location is not None
        return answer

    monkeypatch.setattr(Directory, "locate", counted)
    shop.more(2)
    rows, kept = {"orders": 0, "totals": 0}, set(spark.sparkContext._jsc.getPersistentRDDs())

    def view(name: str) -> Callable[[Any, int], None]:
        def write(batch: Any, _: int) -> None:
            rows[name] += batch.count()

        return write

    both, in_task = gpu_ops.outputs(**shop.frames()), of_changes.MOST_IN_ONE_TASK > 0
    query = shop.run(both, sinks.each(**{name: view(name) for name in rows}))
    assert set(spark.sparkContext._jsc.getPersistentRDDs()) <= kept
    text = gpu_ops.explain(both)
    assert "outputs: orders, totals" in text
    assert "changes of 'joined'" in text
    assert "write_files()" not in text
    way = "engine" if shop.by == "item" else "Spark task"
    assert (f"with        joined, in the same {way}" in text) == in_task
    assert (shop.folder / "joined" / "p").exists() == (way != "engine")
    assert len({join for join, *_ in asked}) == (1 if way == "engine" else 2)
    assert set(asked.values()) == ({1} if in_task else {1, 2})
    came = {"joined": 0, "totals": 0}
    for number, progress in enumerate(query.recentProgress):
        found = {join.name: join.metrics for join in gpu_ops.spark.join_progress(progress)}
        assert found["joined"]["left_rows_in"] == len(shop.feeds[0].files[number])
        assert found["joined"]["right_rows_in"] == len(shop.feeds[1].files[number])
        out = {name: sum(int(n) for what, n in found[name].items() if what.startswith("rows_out")) for name in came}
        assert found["totals"]["input_rows_in"] == out["joined"] > 0
        assert found["totals"]["partitions"] == found["joined"]["partitions"] == 2
        came = {name: count + out[name] for name, count in came.items()}
    assert list(rows.values()) == list(came.values())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "arrow", "delta"])
def test_files_and_a_view_of_one_query_are_right_though_the_view_fails(spark: Any, shop: Shop, form: Any) -> None:
    """Files have each change once and the view each micro-batch, whether the one or the other has it before."""
    totals, path = sinks.memory_view("outputs_beside_files"), str(shop.folder / "files")
    files = sinks.changelog_files(path, format=form, partition_by="item")
    broken = Broken(totals, 1, ValueError("no room"), BadInputError("totals", "n", "is strange", 7))
    broken_files = Broken(files, 2, OSError("no disk"))

    def read() -> list[Row]:
        if form == "delta":
            table = deltalake.DeltaTable(path).to_pyarrow_table()
        else:
            table = ds.dataset(path, format=form, partitioning="hive", exclude_invalid_files=False).to_table()
        rows = [tuple(row[name] for name in ("row_kind", *ORDERS)) for row in table.to_pylist()]
        return fold(sorted(rows, key=lambda row: row[0] in ("-U", "-D")))  # a table's files have no order

    def run(sink: Any) -> Any:
        return shop.run(gpu_ops.outputs(**shop.frames()), sink)

    shop.more(3)
    with pytest.raises(StreamingQueryException) as failed:
        run(sinks.each(orders=files, totals=broken))
    assert gpu_ops.why(failed.value) == "output 'totals': ValueError: no room"
    assert read() == shop.expected("orders", 2)
    assert rows_of(totals.table) == shop.expected("totals", 1)
    with pytest.raises(StreamingQueryException) as failed:
        run(sinks.each(orders=files, totals=broken))
    assert gpu_ops.why(failed.value) == "input 'totals', column 'n': is strange (for example 7)\nin output 'totals'"
    with pytest.raises(StreamingQueryException) as failed:
        run(sinks.each(totals=broken, orders=broken_files))
    assert gpu_ops.why(failed.value) == "output 'orders': OSError: no disk"
    assert read() == shop.expected("orders", 2)
    assert rows_of(totals.table) == shop.expected("totals", 3)
    shop.more()
    run(sinks.each(orders=sinks.changelog_files(path, format=form, partition_by="item"), totals=totals))
    assert read() == shop.expected("orders")
    assert rows_of(totals.table) == shop.expected("totals")


@pytest.mark.slow
def test_outputs_of_one_operator_and_of_sparks_rows(spark: Any, shop: Shop) -> None:
    """Outputs may be selections of one changelog, plain streams, and what only Spark computes of a changelog."""
    shop.how = "inner"  # so that orders and totals have unique keys
    doubled = f.udf(lambda n: None if n is None else 2 * n, "int")

    def outputs() -> Any:
        frames = shop.frames()
        orders = frames["orders"]
        return gpu_ops.outputs(
            cheap=orders.where("price < 2"),
            other=orders.where("price >= 2").select("id", "row_kind"),
            doubled=orders.select("row_kind", doubled("quantity").alias("twice")),
            plain=shop.feeds[1].df,
            totals=frames["totals"],
            counted=frames["totals"].select("row_kind", doubled("n").alias("twice")),
        )

    several = outputs()
    text = gpu_ops.explain(several)
    assert "doubled     Spark's rows, as only Spark evaluates" in text
    folded: dict[str, list[Row]] = {name: [] for name in several.columns}
    keys = {}

    def batch(rows: Any, number: int) -> None:
        for name in folded:
            own = gpu_ops.side(rows, name)
            keys[name] = known_key(own)
            folded[name] += [tuple(row) for row in own.collect()]

    shop.more(2)
    shop.run(several, batch)
    shop.more()
    query = shop.run(outputs(), batch)
    expected = shop.expected("orders")
    assert fold(folded["cheap"]) == [row for row in expected if row[3] < 2]
    other = [(kind, key) for key, kind in folded["other"]]
    assert fold(other) == sorted(((row[1],) for row in expected if row[3] >= 2), key=repr)
    assert fold(folded["doubled"]) == sorted(((row[2] and 2 * row[2],) for row in expected), key=repr)
    assert sorted(folded["plain"]) == sorted((c["op"], c["item"], c["price"]) for c in shop.feeds[1].changes)
    assert fold(folded["totals"]) == shop.expected("totals")
    assert fold(folded["counted"]) == sorted((2 * row[1],) for row in shop.expected("totals"))
    assert keys == {
        "cheap": ("id", "item"),
        "other": None,
        "doubled": None,
        "plain": None,
        "totals": ("item",),
        "counted": None,
    }
    assert set(query.lastProgress["observedMetrics"]) == {"joined", "totals"}


def test_what_cannot_be_outputs_is_refused_by_name(spark: Any, shop: Shop) -> None:
    frames = shop.frames()
    orders = frames["orders"]
    static = spark.createDataFrame([("+I", 1)], "row_kind STRING, id INT")

    def refused(words: str, **changelogs: Any) -> None:
        with pytest.raises(DescriptionError, match=re.escape(words)):
            gpu_ops.outputs(**changelogs)

    refused("outputs() takes the changelogs under their names")
    refused("'a b' is no name", **{"a b": orders})
    refused("'a' and 'A' are one name to Spark", a=orders, A=orders)
    refused("'b' is static", a=orders, b=static)
    refused("output 'b' of outputs() is a DataFrame of Spark's", a=orders, b=7)
    refused("'b' has column 'id' twice", a=orders, b=orders.selectExpr("row_kind", "id", "item AS ID"))
    refused("'b' has outputs itself", a=orders, b=gpu_ops.outputs(a=orders))
    again = in_memory(gpu_ops.latest, stream(shop.feeds[0].df, row_kind="op", unique_key="id"), name="joined")
    refused("two operators are called 'joined'", a=orders, b=again)
    with pytest.raises(DescriptionError, match="there is no output 'c'; there are a, b"):
        gpu_ops.side(gpu_ops.outputs(a=orders, b=frames["totals"]), "c")
    same = stream(shop.feeds[0].df, row_kind="op", unique_key="id")
    refused(
        "is that of 'joined' and of 'other'",
        a=orders,
        b=gpu_ops.latest(same, state=str(shop.folder / "joined"), name="other"),
    )
    kept = gpu_ops.aggregate(orders, "item", {"n": ("count", "*")}, emit="at_end", state=str(shop.folder / "end"))
    refused("has no output before its input ends", a=orders, b=kept)
    with pytest.raises(DescriptionError, match="a view for each output"):
        sinks.each()
    with pytest.raises(DescriptionError, match="'csv'; there are 'parquet'"):
        sinks.changelog_files("x", format="csv")  # type: ignore[arg-type]
    shop.more()
    for views in ({"orders": print}, {"orders": print, "totals": print, "more": print}):
        with pytest.raises(StreamingQueryException) as failed:
            shop.run(gpu_ops.outputs(**frames), sinks.each(**views))  # type: ignore[arg-type]
        assert "the outputs of the query are orders, totals" in str(gpu_ops.why(failed.value))
