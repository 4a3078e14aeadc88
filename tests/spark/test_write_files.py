"""`gpu_ops.write_files`: each change once, through restarts and repeated micro-batches, by any reader."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import slow_but
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.sinks import files as sink
from gpu_ops.spark.sinks.files import SparkLog
from gpu_ops.spark.tasks.arrow import TaskIdentity
from gpu_ops.spark.tasks.file import FileWriter
from gpu_ops.state.address import StateAddress
from spark.support import Row, fold
from spark.views import COLUMNS, Shop

pytestmark = pytest.mark.spark

CHANGES = ["row_kind", *COLUMNS]


class Written:
    """A join's changelog in files.

    Args:
        spark: the session.
        folder: of everything.
        format: of the files.
        options: of `gpu_ops.write_files`.
    """

    def __init__(self, spark: Any, folder: Path, format: str, **options: Any) -> None:  # noqa: A002
        self.spark, self.shop, self.format, self.options = spark, Shop(spark, folder), format, options
        self.folder, self.checkpoint = folder / "out", folder / "checkpoint"
        self.changes = self.shop.changes

    def run(self, files: int = 0) -> Any:
        """So many micro-batches more; gives the query."""
        for _ in range(files):
            self.shop.more()
        query = gpu_ops.write_files(
            self.changes, str(self.folder), format=self.format, checkpoint=str(self.checkpoint), availableNow=True,
            **self.options,
        )  # fmt: skip
        query.awaitTermination()
        return query

    def forget(self, number: int) -> None:
        """Spark's note that a micro-batch is done, so that it comes again."""
        for file in (self.checkpoint / "commits").glob(f"*{number}*"):
            file.unlink()

    def by_spark(self) -> list[Row]:
        if self.format == "arrow":
            schema = ", ".join(f"{x.name} {x.dataType.simpleString()}" for x in self.changes.schema)
            rows = gpu_ops.read_files(self.spark, str(self.folder), "arrow", schema)
            query = rows.writeStream.format("memory").queryName("arrow_files").trigger(availableNow=True).start()
            query.awaitTermination()
            found = self.spark.table("arrow_files")
        else:
            found = self.spark.read.parquet(str(self.folder))
        return [tuple(row) for row in found.select(*CHANGES).collect()]

    def by_polars(self) -> list[Row]:
        read = pl.scan_ipc if self.format == "arrow" else pl.scan_parquet
        return read(f"{self.folder}/**/part-*.{self.format}", hive_partitioning=True).select(CHANGES).collect().rows()

    def by_duckdb(self) -> list[Row]:
        names = ", ".join(CHANGES)
        return duckdb.sql(
            f"SELECT {names} FROM read_parquet('{self.folder}/**/*.parquet', hive_partitioning=true)"
        ).fetchall()

    def by_delta(self) -> list[Row]:
        return pl.read_delta(str(self.folder)).select(CHANGES).rows()


def folded(rows: Iterable[Row]) -> list[Row]:
    """The table that changes make; files have no order among each other."""
    return fold(sorted(rows, key=lambda row: str(row[0][0])))


def same(rows: list[Row], *others: list[Row]) -> None:
    for other in others:
        assert Counter(rows) == Counter(other)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("parquet", {}),
        pytest.param("parquet", {"partition_by": "item", "file_bytes": 1}, marks=pytest.mark.slow),
        pytest.param("arrow", {}, marks=pytest.mark.slow),
        pytest.param("delta", {}, marks=pytest.mark.thorough),
    ],
)
def test_every_change_once_through_restarts_and_repeated_micro_batches(
    spark: Any,
    tmp_path: Path,
    format: str,  # noqa: A002
    options: dict[str, Any],
) -> None:
    if format == "delta":
        pytest.importorskip("deltalake")
    written = Written(spark, tmp_path, format, **options)
    readers: list[Callable[[], list[Row]]] = {
        "parquet": [written.by_duckdb, written.by_polars, written.by_spark],
        "arrow": [written.by_polars, written.by_spark],
        "delta": [written.by_delta],
    }[format]
    query = written.run(2)
    assert query.lastProgress["observedMetrics"]["shop"]["metrics"]["partitions"] > 0
    first, *others = [read() for read in readers]
    assert len(first) > 10
    same(first, *others)
    assert folded(first) == written.shop.expected()
    written.forget(1)  # done, and Spark does not know it
    written.run()
    same(first, *(read() for read in readers))
    written.run(11 if format == "parquet" and not options else 1)  # Spark's log is compacted
    rows = [read() for read in readers]
    same(*rows)
    assert folded(rows[0]) == written.shop.expected()
    if options:
        folders = {path.name for path in written.folder.glob("item=*")}
        assert len(folders) > 2
        assert "item=__HIVE_DEFAULT_PARTITION__" in folders
        assert len(list(written.folder.rglob("*.parquet"))) == len(rows[0])  # one row each


@pytest.mark.thorough
def test_folders_and_files_are_open_as_the_umask_says(spark: Any, tmp_path: Path) -> None:
    """As Spark's own sinks have it: a reader may be another user."""
    written = Written(spark, tmp_path, "parquet", partition_by="item")
    before = os.umask(0o022)
    try:
        written.run(1)
    finally:
        os.umask(before)
    made = [written.folder, *written.folder.rglob("*")]
    assert len(made) > 4
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_log", "_move", "tidy"])
def test_a_commit_that_breaks_off_is_made_again(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between files moved, between the last one and the log, and behind the log."""
    written = Written(spark, tmp_path, "parquet")
    written.run(1)
    calls = Counter[str]()

    def broken(*args: Any) -> Any:
        calls["all"] += 1
        if moment != "_move" or calls["all"] > 1:
            raise OSError("the machine goes down")
        return kept(*args)

    owner, name = (SparkLog, "add") if moment == "_log" else (sink._LogCommit, moment)
    kept = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(StreamingQueryException, match="the machine goes down"):
            written.run(1)
    written.run(1)
    rows = written.by_spark()
    same(rows, written.by_duckdb())
    assert folded(rows) == written.shop.expected()
    assert not list(written.folder.glob("_staging/*"))


@pytest.mark.slow
def test_selected_rows_and_columns_are_arrows_too(spark: Any, tmp_path: Path) -> None:
    written = Written(spark, tmp_path, "parquet")
    whole = written.changes
    written.changes = whole.where("quantity > 1 OR price IS NULL").select(
        f.col("row_kind"), f.col("id").alias("order id"), "item", "quantity", "price"
    )
    assert "write_files()" not in gpu_ops.explain(written.changes)
    written.run(3)
    found = written.spark.read.parquet(str(written.folder)).withColumnRenamed("order id", "id").select(*CHANGES)
    wanted = [row for row in written.shop.expected() if (row[2] is not None and row[2] > 1) or row[3] is None]
    assert folded(tuple(row) for row in found.collect()) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("by_arrow", slow_but([True, False], False))
def test_computed_columns_are_written(spark: Any, tmp_path: Path, by_arrow: bool) -> None:
    """Arrow's, or through Spark's rows where only Spark computes them."""
    written = Written(spark, tmp_path, "parquet")
    twice = "quantity * 2" if by_arrow else "shiftleft(quantity, 1)"
    written.changes = written.changes.withColumn("quantity", f.expr(twice))
    told = "write_files() would take Spark's rows, not Arrow's: only Spark evaluates shiftleft("
    assert (told in gpu_ops.explain(written.changes)) is not by_arrow
    written.run(2)
    doubled = [(i, k, None if n is None else 2 * n, p) for i, k, n, p in written.shop.expected()]
    assert folded(written.by_spark()) == sorted(doubled, key=repr)


def test_a_folder_belongs_to_one_query(spark: Any, tmp_path: Path) -> None:
    written = Written(spark, tmp_path, "parquet")
    written.run(1)
    owner = written.folder / "_gpu_ops.json"
    mine = owner.read_text()
    owner.write_text(json.dumps({"query": "another"}))
    with pytest.raises(StreamingQueryException, match="has the files of query another, and this is query"):
        written.run(1)
    owner.unlink()
    with pytest.raises(StreamingQueryException, match="has the files of another of Spark's queries"):
        written.run()
    owner.write_text(mine)
    written.run()
    assert folded(written.by_spark()) == written.shop.expected()


def test_a_table_with_other_columns_is_refused(spark: Any, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    written = Written(spark, tmp_path, "delta", partition_by="item")
    deltalake.write_deltalake(str(written.folder), pl.DataFrame({"row_kind": ["+I"], "id": [1]}))
    with pytest.raises(StreamingQueryException, match=re.escape("out has the columns row_kind")):
        written.run(1)


def test_what_cannot_be_written_is_refused(spark: Any, tmp_path: Path) -> None:
    changes = Shop(spark, tmp_path).changes
    for options, message in (
        ({"format": "csv"}, "there are 'parquet', 'delta' and 'arrow'"),
        ({"partition_by": "of"}, "partition_by names 'of'; there are row_kind, item"),
        ({"partition_by": ["item", "price"]}, "partition_by='price' is double; integers"),
    ):
        with pytest.raises(DescriptionError, match=message):
            gpu_ops.write_files(changes, str(tmp_path / "out"), **options)
    with pytest.raises(DescriptionError, match="takes a streaming DataFrame"):
        gpu_ops.write_files(spark.range(1), str(tmp_path / "out"))
    with pytest.raises(DescriptionError, match="names all columns"):
        gpu_ops.write_files(changes.select("item"), str(tmp_path / "out"), partition_by="item")


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [1000, 10_000])  # too few of them tell nothing
def test_only_values_that_repeat_go_into_parquets_dictionaries(tmp_path: Path, rows: int) -> None:
    numbers = pa.array(range(rows))
    (batch,) = pa.table(
        {"id": numbers, "text": numbers.cast("string"), "kind": ["+I"] * rows, "p": [1] * rows}
    ).to_batches()
    writer = FileWriter(StateAddress.of(tmp_path), "parquet", batch.schema, ("p",), False, 1 << 20, "snappy")
    (file,) = writer.write(iter([batch]), TaskIdentity("query", "run", 0, 0, 0))
    group = pq.read_metadata(tmp_path / file.lies).row_group(0)
    found = {group.column(n).path_in_schema: group.column(n).has_dictionary_page for n in range(group.num_columns)}
    assert found == {"id": rows < 4096, "text": rows < 4096, "kind": True}
    assert pq.read_table(tmp_path / file.lies, partitioning=None).equals(pa.table(batch.select(["id", "text", "kind"])))
