"""A query as three streaming pipelines over the same files: ours, Spark's own join, and one without a join."""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

import gpu_ops
from benchmarks.nexmark.queries import Query, Side
from benchmarks.spark_queries import Reader

PARTITIONS = 2


def read(spark: SparkSession, data: Path, table: str, reader: Reader = "spark") -> DataFrame:
    """A table as a stream, a file in a micro-batch."""
    folder = str(data / table)
    schema = spark.read.parquet(folder).schema
    if reader == "arrow":
        return gpu_ops.read_files(spark, folder, "parquet", schema, maxFilesPerTrigger=1)
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(folder)


def ours(
    spark: SparkSession, data: Path, query: Query, work: Path, *, reader: Reader = "spark", **options: Any
) -> DataFrame:
    """The changelog of the query, with durable state."""
    tables = {side.table: read(spark, data, side.table, reader) for side in query.sides}
    return gpu_ops.sql(query.text, **tables, state=str(work / "state"), partitions=PARTITIONS, **options)


def sparks(spark: SparkSession, data: Path, query: Query) -> DataFrame:
    """Spark's own stream-stream joins."""
    for side in query.sides:
        read(spark, data, side.table).createOrReplaceTempView(side.table)
    return spark.sql(query.text)


def no_op(spark: SparkSession, data: Path, query: Query) -> DataFrame:
    """Scan, filter, union, shuffle by key and `mapInArrow`, but the function hands back what it gets."""
    read_in = [_narrow(read(spark, data, side.table), side) for side in query.sides]
    # inputs share columns by their types, as they do on the way to a join
    width: dict[str, int] = {}
    for df in read_in:
        types = [kind for _, kind in df.dtypes]
        width |= {kind: max(width.get(kind, 0), types.count(kind)) for kind in types}
    rows = None
    for number, df in enumerate(read_in):
        columns = [f.lit(number).alias("side")]
        for kind, most in width.items():
            names = [name for name, own in df.dtypes if own == kind]
            lanes: list[Column] = [f.col(name) for name in names]
            lanes += [f.lit(None).cast(kind)] * (most - len(names))
            columns += [lane.alias(f"{kind}_{place}") for place, lane in enumerate(lanes)]
        rows = df.select(columns) if rows is None else rows.unionAll(df.select(columns))
    assert rows is not None, "a query without an input"
    key = f"{read_in[0].dtypes[0][1]}_0"

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    rows = rows.repartition(PARTITIONS, key)
    return rows.mapInArrow(same, rows.schema)


def _narrow(df: DataFrame, side: Side) -> DataFrame:
    """The rows and columns that the query asks for, the key first."""
    df = df if side.where is None else df.where(side.where)
    return df.select(side.key, *(c for c in side.columns if c != side.key))


def run(df: DataFrame, work: Path, *, sink: str = "noop") -> dict[str, Any]:
    """Run a query over all files there are.

    Args:
        df: the query.
        work: a folder for the checkpoint, and the result if ``sink`` is a file format.
        sink: Spark's name of it.

    Returns:
        `seconds` from the start of the first micro-batch to the end of the last, `rows_in` (files, where Arrow
        reads them), `rows_out`,
        `micro_batches`, and `batch_seconds` of each.
    """
    counted = df.observe("out", f.count("*").alias("rows"))
    writer = counted.writeStream.format(sink).option("checkpointLocation", str(work / "checkpoint"))
    if sink != "noop":
        writer = writer.option("path", str(work / "result"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    begins = [dt.datetime.fromisoformat(p["timestamp"]).timestamp() for p in progress]
    ends = [b + p["durationMs"]["triggerExecution"] / 1e3 for b, p in zip(begins, progress, strict=True)]
    return {
        "seconds": max(ends) - min(begins),
        "rows_in": sum(p["numInputRows"] for p in progress),
        "rows_out": sum(p["observedMetrics"]["out"]["rows"] for p in progress),
        "micro_batches": len(progress),
        "batch_seconds": [round(e - b, 3) for b, e in zip(begins, ends, strict=True)],
    }


def fresh(case: Callable[[Path], DataFrame]) -> dict[str, Any]:
    """Run a case in a new working folder, removed afterwards."""
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    try:
        return run(case(work), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
