"""`gpu_ops.read_state`: the rows of a state folder at a version, also while its query runs."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
import gpu_ops.spark
from gpu_ops import stream
from gpu_ops.errors import DescriptionError, StateError
from spark.support import Sink, Source, drain

pytestmark = pytest.mark.spark

ORDERS, PRICES = "op STRING, id INT, item STRING", "item STRING, price INT, _matches INT"


def query(orders: Source, prices: Source, state: str) -> Any:
    left, right = stream(orders.df, row_kind="op", name="orders"), stream(prices.df, name="prices", ttl="1 day")
    return gpu_ops.join(left, right, "item", "left", state=state, partitions=2)


def read(spark: Any, state: str, **options: Any) -> Counter[Any]:
    return Counter(tuple(row) for row in gpu_ops.read_state(spark, state, **options).collect())


def test_rows_with_counts_times_and_partition_at_each_version(spark: Any, tmp_path: Path) -> None:
    orders, prices = Source(spark, tmp_path / "orders", ORDERS), Source(spark, tmp_path / "prices", PRICES)
    state, began = str(tmp_path / "state"), dt.datetime.now()
    orders.add({"op": "+I", "id": 1, "item": "x"}, {"op": "+I", "id": 2, "item": "y"}, {"op": "+I", "id": 3})
    prices.add({"item": "x", "price": 5, "_matches": 7}, {"item": "x", "price": 6})
    orders.add({"op": "-D", "id": 2, "item": "y"}, {"op": "+I", "id": 4, "item": "x"})
    prices.add({"item": "z", "price": 1})
    drain(query(orders, prices, state), Sink(), tmp_path / "checkpoint")

    rows = gpu_ops.read_state(spark, state, input="orders")
    assert rows.columns == ["id", "item", "_matches", "_partition", "_version"]
    assert sorted(tuple(row[:3]) for row in rows.collect()) == [(1, "x", 2), (3, None, 0), (4, "x", 2)]
    of_item = {row["item"]: row["_partition"] for row in rows.collect()}
    assert set(of_item.values()) <= {0, 1}
    assert {row["_version"] for row in rows.collect()} == {2}

    before = gpu_ops.read_state(spark, state, input="orders", version=1).collect()
    assert sorted(tuple(row[:3]) for row in before) == [(1, "x", 2), (2, "y", 0), (3, None, 0)]
    assert gpu_ops.read_state(spark, state, input="orders", version=0).count() == 0

    times = gpu_ops.read_state(spark, state, input="prices")
    assert times.columns == ["item", "price", "_matches", "_written", "_partition", "_version"]
    written = {row["_written"] for row in times.collect()}
    assert all(began - dt.timedelta(seconds=1) < one < dt.datetime.now() for one in written)
    assert sorted(tuple(row[:3]) for row in times.collect()) == [("x", 5, 7), ("x", 6, None), ("z", 1, None)]

    gpu_ops.spark.register_state_source(spark)
    by_format = spark.read.format("gpu_join_state").option("input", "prices").load(state)
    assert by_format.schema == times.schema
    assert Counter(by_format.collect()) == Counter(times.collect())

    for options, said in (
        ({}, r"'left' \(orders\), 'right' \(prices\): input= names one of them"),
        ({"input": "nope"}, "input='nope' names none"),
    ):
        with pytest.raises(DescriptionError, match=said):
            gpu_ops.read_state(spark, state, **options)
    with pytest.raises(StateError, match="no version 3: it keeps those from 0 to 2"):
        gpu_ops.read_state(spark, state, input="orders", version=3)
    with pytest.raises(StateError, match="no state folder"):
        gpu_ops.read_state(spark, str(tmp_path / "orders"))


@pytest.mark.thorough
def test_while_the_query_runs(spark: Any, tmp_path: Path) -> None:
    """Whatever version it is at, the rows are those of this version, in all partitions."""
    orders, prices = Source(spark, tmp_path / "orders", ORDERS), Source(spark, tmp_path / "prices", PRICES)
    batches, size = 25, 50
    for batch in range(batches):
        orders.add(*({"op": "+I", "id": batch * size + n, "item": f"i{n % 9}"} for n in range(size)))
    prices.add(*({"item": f"i{n}", "price": n} for n in range(5)))
    state, failures, versions = str(tmp_path / "state"), list[BaseException](), set[int]()
    running = threading.Event()

    def look() -> None:
        while running.is_set():
            try:
                rows = gpu_ops.read_state(spark, state, input="orders").collect()
                ids = sorted(row["id"] for row in rows)
                version = {row["_version"] for row in rows} or {0}
                assert len(version) == 1
                assert ids == list(range(next(iter(version)) * size))
                versions.update(version)
            except StateError as error:
                if "no state folder" not in str(error):  # before the first micro-batch
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

    running.set()
    looks = threading.Thread(target=look)
    looks.start()
    try:
        drain(query(orders, prices, state), Sink(), tmp_path / "checkpoint")
    finally:
        running.clear()
        looks.join()
    assert not failures, failures[0]
    assert len(versions) > 2


@pytest.mark.thorough
def test_groups_and_operators_of_one_engine(spark: Any, tmp_path: Path) -> None:
    orders, prices = Source(spark, tmp_path / "orders", ORDERS), Source(spark, tmp_path / "prices", PRICES)
    orders.add({"op": "+I", "id": 1, "item": "x"}, {"op": "+I", "id": 2, "item": "y"})
    prices.add({"item": "x", "price": 5}, {"item": "x", "price": 6})
    state = str(tmp_path / "state")
    tables = {"orders": stream(orders.df, row_kind="op"), "prices": prices.df}
    text = "SELECT o.item, max(price) AS m FROM orders o JOIN prices p ON o.item = p.item GROUP BY o.item"
    drain(gpu_ops.sql(text, tables=tables, state=state, partitions=1), Sink(), tmp_path / "checkpoint")

    with pytest.raises(StateError, match="there are state folders below it: 2"):
        gpu_ops.read_state(spark, state)
    state += "/2"
    with pytest.raises(DescriptionError, match="the state has the tables") as error:
        gpu_ops.read_state(spark, state)
    names = str(error.value)
    assert "'operator_1.left' (o), 'operator_1.right' (p), 'operator_2.o_p', 'operator_2.groups of o_p'" in names
    assert sorted(row[0] for row in gpu_ops.read_state(spark, state, input="o").collect()) == ["x", "y"]
    assert gpu_ops.read_state(spark, state, input="operator_1.right").count() == 2
    assert gpu_ops.read_state(spark, state, input="operator_2.groups of o_p").count() == 1
