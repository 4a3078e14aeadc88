"""Nexmark's queries through ``gpu_ops.sql`` on a small stream, against DuckDB and Spark's own join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import slow_but

import gpu_ops

pytest.importorskip("duckdb")

from benchmarks.nexmark import generator, pipelines, whole
from benchmarks.nexmark.queries import compared, query
from benchmarks.spark_queries import Reader

pytestmark = [pytest.mark.spark, pytest.mark.thorough]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nexmark")
    generator.write(folder, events=10_000, files=3, seed=7)
    return folder


@pytest.mark.parametrize(
    ("name", "reader"), slow_but([("q4", "spark"), ("q23", "spark"), ("q20", "arrow")], ("q20", "arrow"))
)
def test_our_changelog(spark: Any, data: Path, tmp_path: Path, name: str, reader: Reader) -> None:
    changes = pipelines.ours(spark, data, query(name), tmp_path, reader=reader)
    # q20 filters auctions by their category
    assert gpu_ops.explain(changes).count("filtered by category") == (reader == "arrow")
    measured = pipelines.run(changes, tmp_path, sink="parquet")
    found, rows, different = compared(query(name), data, sorted((tmp_path / "result").glob("*.parquet")))
    assert not different
    assert rows > (1_000 if name != "q20" else 500)
    assert measured["micro_batches"] == 3
    assert measured["rows_out"] == found


@pytest.mark.slow
def test_the_pipelines_read_the_same(spark: Any, data: Path, tmp_path: Path) -> None:
    one = query("q3")
    own = pipelines.run(pipelines.sparks(spark, data, one), tmp_path / "spark")
    bare = pipelines.run(pipelines.no_op(spark, data, one), tmp_path / "no_op")
    assert own["rows_in"] == bare["rows_in"] == 800
    assert own["rows_out"] > 10
    # all auctions of category 10, and all people of three states
    assert 150 < bare["rows_out"] < 300


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fewer events in a second, so that few of them fill several windows."""
    folder = tmp_path_factory.mktemp("slower")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "RATE", 250)
        generator.write(folder, events=9_000, files=3, seed=5)
    return folder


@pytest.mark.parametrize(
    ("name", "least"),
    [("q4", 5)] + [pytest.param(*x, marks=pytest.mark.slow) for x in (("q5", 15), ("q7", 3), ("q9", 400))],
)
def test_whole_queries(spark: Any, slower: Path, tmp_path: Path, name: str, least: int) -> None:
    tables = {table: pipelines.read(spark, slower, table) for table in whole.TABLES[name]}
    said: dict[int, pa.Table] = {}
    changes = gpu_ops.sql(whole.text(name), **tables, state=str(tmp_path / "state"), partitions=2)
    writer = changes.writeStream.foreachBatch(lambda rows, batch: said.__setitem__(batch, rows.toArrow()))
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    for batch in range(3):
        so_far = pa.concat_tables([said[n] for n in range(batch + 1)])
        assert not whole.differences(name, slower, so_far, batch + 1), f"after micro-batch {batch}"
    assert whole.answer(name, slower, 3).num_rows >= least
    assert "-D" in so_far["row_kind"].to_pylist()
