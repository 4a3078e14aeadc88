"""Rows that a top-N cannot have are left out before they are shuffled; all it has are among the others, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_ops.spark
from gpu_ops import stream
from gpu_ops.descriptions.groups import Order, Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.join_engine import JoinEngine
from gpu_ops.operators.groups.top import FirstOfGroup
from gpu_ops.spark.tasks import rows as first
from gpu_ops.spark.tasks.rows import first_of_groups
from spark.support import Sink, drain

SCHEMA = pa.schema([("k", pa.string()), ("g", pa.int64()), ("v", pa.float64()), ("t", pa.string()), ("at", pa.int64())])
LONG = "a long text, 1", "a long text, 2"
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]), st.sampled_from([0, 1, None]),
        st.sampled_from([0.0, -0.0, 1.5, -math.inf, math.nan, None]), st.sampled_from(["", *LONG, None]),
    ),
    max_size=30,
)  # fmt: skip
ORDERS = st.sampled_from(["v", "v DESC, at DESC", "t", "t DESC NULLS FIRST", "t, v", "at DESC", "v NULLS LAST"])


def folded(described: Top, batches: Sequence[pa.RecordBatch]) -> list[Any]:
    running = JoinEngine(described, "cpu")
    found = running.process(pa.Table.from_batches(batches, SCHEMA)).to_pylist()
    running.close()
    return sorted(repr(row) for row in found)


@pytest.mark.thorough
@given(ROWS, ORDERS, st.integers(1, 3), st.sampled_from([(), ("k",), ("k", "g")]), st.integers(1, 30))
def test_the_first_rows_are_kept(rows: list[Any], order: str, n: int, by: tuple[str, ...], cut: int) -> None:
    described = Top(Input("t", SCHEMA), by, parse_order(order), n)
    wanted = FirstOfGroup.for_operator(described)
    assert wanted is not None
    table = pa.Table.from_pylist(
        [dict(zip(SCHEMA.names, (*row, at), strict=True)) for at, row in enumerate(rows)], SCHEMA
    )
    kept = list(first_of_groups(wanted, iter(table.to_batches(max_chunksize=cut))))
    numbers = [at for batch in kept for at in batch["at"].to_pylist()]
    assert numbers == sorted(set(numbers))
    assert folded(described, kept) == folded(described, table.to_batches())


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "_MOST_BYTES", 4000)
    table = pa.table({"k": [n % 5 for n in range(1000)], "v": range(1000)})
    wanted = FirstOfGroup(("k",), Order("v", descending=True), 2)
    kept = list(first_of_groups(wanted, iter(table.to_batches(max_chunksize=100))))
    assert sum(batch.num_rows for batch in kept) == 10 * 4  # of four times 300 rows, the last of 100


def test_which_operators_need_all_rows() -> None:
    def wanted(n: int = 1, emit: Any = "per_batch", **options: Any) -> FirstOfGroup | None:
        source = Input("t", SCHEMA, **options)
        return FirstOfGroup.for_operator(Top(source, ("k",), (Order("v"),), n, emit))

    assert wanted() == FirstOfGroup(("k",), Order("v"), 1)
    assert wanted(emit="at_end") is not None
    assert wanted(emit="per_event") is None
    assert wanted(unique_key=("g",)) is None


@pytest.mark.thorough
@pytest.mark.spark
def test_a_top_of_a_joins_changes(spark: Any, tmp_path: Path) -> None:
    def source(name: str, schema: str, *files: list[str]) -> Any:
        (tmp_path / name).mkdir()
        for number, rows in enumerate(files):
            (tmp_path / name / f"{number}.csv").write_text("\n".join(rows) + "\n")
        read = gpu_ops.read_files(spark, str(tmp_path / name), "csv", schema, maxFilesPerTrigger=1)
        return stream(read, name=name)

    items = source("items", "item INT, name STRING", [f"{n},n{n}" for n in range(5)], ["5,n5"])
    bids = source(
        "bids", "item INT, price INT", *([f"{n % 7},{(n * 37 + file) % 101}" for n in range(200)] for file in (0, 1))
    )
    joined = gpu_ops.join(items, bids, "item", state=str(tmp_path / "state"))
    # by another column than the join, or one engine would have both, and take all changes as they are
    best = gpu_ops.top(
        joined.drop("row_kind"), "name", order_by="price DESC", state=str(tmp_path / "best"), name="best"
    )
    sink = Sink()
    query = drain(best, sink, tmp_path / "checkpoint")
    highest: dict[int, int] = {}
    for file in (0, 1):
        for n in range(200):
            if n % 7 < 6:
                highest[n % 7] = max(highest.get(n % 7, 0), (n * 37 + file) % 101)
    assert sink.table == sorted((item, f"n{item}", price) for item, price in highest.items())
    took = [
        sum(value for name, value in join.metrics.items() if name.endswith("_rows_in"))
        for progress in query.recentProgress
        for join in gpu_ops.spark.join_progress(progress)
        if join.name == "best"
    ]
    assert took == [5, 6]  # an item is in one of the join's partitions
