"""Streaming queries on `local[2]` that the benchmarks compare: ours, and the same plan without a join.

All read the CSV change files of `benchmarks.changes`, a fixed number of files per micro-batch, and write to
Spark's no-op sink. What is measured is the time from the start of the first micro-batch to the end of the
last (Spark's own progress); session, Python workers and state servers are up before, as Flink's peer is.
"""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import gpu_ops
import gpu_ops.spark
from benchmarks.changes import read_counts

ORDERS = "op STRING, order_id BIGINT, customer BIGINT, amount BIGINT, note STRING"
PRICES = "op STRING, order_id BIGINT, price DOUBLE, source STRING"


def read_changes(spark: SparkSession, data: Path, files_per_trigger: int) -> tuple[DataFrame, DataFrame]:
    """Both inputs as streams, `files_per_trigger` files of each in a micro-batch."""
    inputs = []
    for name, schema in (("orders", ORDERS), ("prices", PRICES)):
        # multiLine: a file stays in one source partition, in its order (the files have no sequence column), and
        # Spark parses it as a stream, not line by line
        reader = spark.readStream.schema(schema).option("multiLine", True)
        reader = reader.option("maxFilesPerTrigger", files_per_trigger)
        inputs.append(reader.csv(str(data / name)))
    return inputs[0], inputs[1]


def our_join(spark: SparkSession, data: Path, work: Path, files_per_trigger: int, **options: Any) -> DataFrame:
    """The left join, with durable state."""
    orders, prices = read_changes(spark, data, files_per_trigger)
    key = "order_id" if read_counts(data).unique_key else None
    return gpu_ops.join(
        gpu_ops.stream(orders, row_kind="op", unique_key=key, updates="retract", name="orders"),
        gpu_ops.stream(prices, row_kind="op", unique_key=key, updates="retract", name="prices"),
        on=[("order_id", "order_id")],
        how="left",
        suffixes=("", "_price"),
        state=str(work / "state"),
        **options,
    )


def no_op(spark: SparkSession, data: Path, files_per_trigger: int, partitions: int) -> DataFrame:
    """Scan, union, shuffle by key and `mapInArrow`, but the function hands back what it gets."""
    from pyspark.sql import functions as f

    orders, prices = read_changes(spark, data, files_per_trigger)
    left = orders.select(f.lit(0).alias("side"), "op", "order_id", "customer", "amount", "note")
    none = f.lit(None).cast("bigint")
    right = prices.select(
        f.lit(1).alias("side"), "op", "order_id", none.alias("customer"), none.alias("amount"),
        f.col("source").alias("note"),
    )  # fmt: skip
    left = left.withColumn("price", f.lit(None).cast("double"))
    right = right.withColumn("price", f.lit(0.0))
    rows = left.unionAll(right).repartition(partitions, "order_id")

    def same(batches: Any) -> Any:
        yield from batches

    return rows.mapInArrow(same, rows.schema)


def run(df: DataFrame, work: Path) -> dict[str, Any]:
    """Run a query over all files there are; what Spark says of it.

    Returns:
        `seconds` from the start of the first micro-batch to the end of the last, `rows_in`,
        `micro_batches`, `batch_seconds` of each, `durations_ms` summed by Spark's phase, and for a join
        `folded_rows`, rows of the result at the end, and `last_metrics` of the last micro-batch.
    """
    checkpoint = work / "checkpoint"
    query = (
        df.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    begins = [dt.datetime.fromisoformat(p["timestamp"]).timestamp() for p in progress]
    ends = [b + p["durationMs"]["triggerExecution"] / 1e3 for b, p in zip(begins, progress, strict=True)]
    phases: dict[str, int] = {}
    for p in progress:
        for phase, ms in p["durationMs"].items():
            phases[phase] = phases.get(phase, 0) + ms
    metrics: dict[str, Any] = {}
    folded = 0
    for p in progress:
        for row in p["observedMetrics"].values():
            metrics = row.asDict()
            folded += metrics["rows_out_insert"] + metrics["rows_out_update_after"]
            folded -= metrics["rows_out_delete"] + metrics["rows_out_update_before"]
    return {
        "seconds": max(ends) - min(begins),
        "rows_in": sum(p["numInputRows"] for p in progress),
        "micro_batches": len(progress),
        "batch_seconds": [round(e - b, 3) for b, e in zip(begins, ends, strict=True)],
        "durations_ms": phases,
        "folded_rows": folded,
        "last_metrics": metrics,
    }


def fresh(case: Callable[[Path], DataFrame]) -> dict[str, Any]:
    """Run a case in a new working folder, removed afterwards."""
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    try:
        return run(case(work), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def local_session(cores: int = 2, **settings: str) -> SparkSession:
    """The session that all cases share."""
    pa.set_cpu_count(1)
    config = {
        "spark.sql.shuffle.partitions": str(cores),
        "spark.driver.memory": "4g",
        "spark.ui.showConsoleProgress": "false",
        # a file stays in one source partition, and no other with it
        "spark.sql.files.maxPartitionBytes": "1g",
        "spark.sql.files.openCostInBytes": "1g",
        **settings,
    }
    session: SparkSession = gpu_ops.spark.session("gpu-join benchmark", master=f"local[{cores}]", config=config)
    session.sparkContext.setLogLevel("ERROR")
    return session
