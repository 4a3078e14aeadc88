"""Streaming queries on `local[2]` that the benchmarks compare: ours, and the same plan without a join.

All read the CSV change files of `benchmarks.changes`, or the same as Parquet, a fixed number of files per micro-batch,
by Spark's reader or by Arrow's, and write to Spark's no-op sink. What is measured is the time from the start of the
first micro-batch to the end of the last (Spark's own progress); session, Python workers and state servers are up
before, as Flink's peer is.
"""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import gpu_ops
import gpu_ops.spark
from benchmarks.changes import read_counts
from gpu_ops.spark import join_progress

ORDERS = "op STRING, order_id BIGINT, customer BIGINT, amount BIGINT, note STRING"
PRICES = "op STRING, order_id BIGINT, price DOUBLE, source STRING"
STOCKS = "op STRING, order_id BIGINT, quantity BIGINT, place STRING"


Reader = Literal["spark", "arrow", "parquet"]
"""Whose reader files go through: `spark.readStream` or `gpu_ops.read_files`, of CSV or of the same as Parquet."""


def read_changes(spark: SparkSession, data: Path, files_per_trigger: int, reader: Reader = "spark") -> list[DataFrame]:
    """The inputs that were written as streams, `files_per_trigger` files of each in a micro-batch."""
    inputs = []
    for name, schema in (("orders", ORDERS), ("prices", PRICES), ("stocks", STOCKS)):
        if not (data / name).exists():
            continue
        if reader != "spark":
            path, kind = str(data / name), "csv" if reader == "arrow" else "parquet"
            inputs.append(gpu_ops.read_files(spark, path, kind, schema, maxFilesPerTrigger=files_per_trigger))
            continue
        # multiLine: a file stays in one source partition, in its order (the files have no sequence column), and
        # Spark parses it as a stream, not line by line
        stream = spark.readStream.schema(schema).option("multiLine", True)
        inputs.append(stream.option("maxFilesPerTrigger", files_per_trigger).csv(str(data / name)))
    return inputs


def our_join(
    spark: SparkSession, data: Path, work: Path, files_per_trigger: int, *, reader: Reader = "spark", **options: Any
) -> DataFrame:
    """The left join, with durable state."""
    orders, prices = read_changes(spark, data, files_per_trigger, reader)[:2]
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


def our_multi_join(
    spark: SparkSession, data: Path, work: Path, files_per_trigger: int, *, reader: Reader = "spark", **options: Any
) -> DataFrame:
    """The left join of three inputs in one operator, with durable state."""
    key = "order_id" if read_counts(data).unique_key else None
    frames = read_changes(spark, data, files_per_trigger, reader)
    names = ("orders", "prices", "stocks")
    inputs = [
        gpu_ops.stream(df, row_kind="op", unique_key=key, updates="retract", name=name)
        for df, name in zip(frames, names, strict=True)
    ]
    return gpu_ops.multi_join(
        inputs,
        on=[("orders.order_id", "order_id"), ("orders.order_id", "order_id")],
        how="left",
        suffixes=("", "_price", "_stock"),
        state=str(work / "state"),
        **options,
    )


def our_chain(spark: SparkSession, data: Path, work: Path, files_per_trigger: int, **options: Any) -> DataFrame:
    """Our join of three inputs, as a chain of two joins."""
    orders, prices, stocks = read_changes(spark, data, files_per_trigger)
    key = "order_id" if read_counts(data).unique_key else None
    first = gpu_ops.join(
        gpu_ops.stream(orders, row_kind="op", unique_key=key, updates="retract", name="orders"),
        gpu_ops.stream(prices, row_kind="op", unique_key=key, updates="retract", name="prices"),
        on=[("order_id", "order_id")], how="left", suffixes=("", "_price"), state=str(work / "first"), name="1_priced",
        **options,
    )  # fmt: skip
    return gpu_ops.join(
        gpu_ops.stream(first, unique_key=key, updates="retract", name="priced"),
        gpu_ops.stream(stocks, row_kind="op", unique_key=key, updates="retract", name="stocks"),
        on=[("order_id", "order_id")], how="left", suffixes=("", "_stock"), state=str(work / "second"),
        name="2_stocked",
        **options,
    )  # fmt: skip


def scan(spark: SparkSession, data: Path, files_per_trigger: int) -> DataFrame:
    """Scan and union alone."""
    from pyspark.sql import functions as f

    none = f.lit(None).cast("bigint")
    sides = []
    for side, df in enumerate(read_changes(spark, data, files_per_trigger)):
        text = next(c for c in ("note", "source", "place") if c in df.columns)
        number = "quantity" if "quantity" in df.columns else "amount" if "amount" in df.columns else None
        sides.append(
            df.select(
                f.lit(side).alias("side"),
                "op",
                "order_id",
                (f.col("customer") if "customer" in df.columns else none).alias("customer"),
                (none if number is None else f.col(number)).alias("amount"),
                f.col(text).alias("note"),
                (f.col("price") if "price" in df.columns else f.lit(None).cast("double")).alias("price"),
            )
        )
    union = sides[0]
    for other in sides[1:]:
        union = union.unionAll(other)
    return union


def no_op(spark: SparkSession, data: Path, files_per_trigger: int, partitions: int) -> DataFrame:
    """`scan`, shuffle by key and `mapInArrow`, but the function hands back what it gets."""
    rows = scan(spark, data, files_per_trigger).repartition(partitions, "order_id")

    def same(batches: Any) -> Any:
        yield from batches

    return rows.mapInArrow(same, rows.schema)


Sink = Literal["noop", "parquet", "write_files"]
"""Spark's no-op sink, its Parquet sink, or Parquet by `gpu_ops.write_files`."""


def _start(df: DataFrame, work: Path, sink: Sink) -> StreamingQuery:
    checkpoint, path = str(work / "checkpoint"), str(work / "out")
    if sink == "write_files":
        return gpu_ops.write_files(df, path, checkpoint=checkpoint, availableNow=True)
    writer = df.writeStream.format(sink).option("checkpointLocation", checkpoint).trigger(availableNow=True)
    return (writer if sink == "noop" else writer.option("compression", "snappy").option("path", path)).start()


def run(df: DataFrame, work: Path, sink: Sink = "noop") -> dict[str, Any]:
    """Run a query over all files there are; what Spark says of it.

    Returns:
        `seconds` from the start of the first micro-batch to the end of the last, `rows_in`,
        `micro_batches`, `batch_seconds` of each, `durations_ms` summed by Spark's phase, and for a join
        `folded_rows`, rows of the result at the end, and `last_metrics` of the last micro-batch; of several joins
        the one whose name sorts last. `state_bytes` of each join's inputs at the end.
    """
    query = _start(df, work, sink)
    query.awaitTermination()
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    begins = [dt.datetime.fromisoformat(p["timestamp"]).timestamp() for p in progress]
    ends = [b + p["durationMs"]["triggerExecution"] / 1e3 for b, p in zip(begins, progress, strict=True)]
    phases: dict[str, int] = {}
    for p in progress:
        for phase, ms in p["durationMs"].items():
            phases[phase] = phases.get(phase, 0) + ms
    metrics: dict[str, dict[str, Any]] = {}
    folded: dict[str, int | float] = {}
    for p in progress:
        for join in join_progress(p):
            name, row = join.name, join.metrics
            metrics[name] = row
            came = row["rows_out_insert"] + row["rows_out_update_after"]
            gone = row["rows_out_delete"] + row["rows_out_update_before"]
            folded[name] = folded.get(name, 0) + came - gone
    last = max(folded, default="")
    return {
        "seconds": max(ends) - min(begins),
        "rows_in": _rows_in(progress),
        "micro_batches": len(progress),
        "batch_seconds": [round(e - b, 3) for b, e in zip(begins, ends, strict=True)],
        "durations_ms": phases,
        "folded_rows": folded.get(last, 0),
        "last_metrics": metrics.get(last, {}),
        "state_bytes": {
            f"{name}.{key.removesuffix('_state_bytes')}": value
            for name, row in metrics.items()
            for key, value in row.items()
            if key.endswith("_state_bytes")
        },
    }


def _rows_in(progress: list[Any]) -> int:
    """Rows of all inputs: what a single join counts, as Spark counts files where Arrow reads them."""
    counted = [join_progress(p) for p in progress]
    if any(len(joins) != 1 for joins in counted):
        return sum(p["numInputRows"] for p in progress)
    return sum(int(n) for (join,) in counted for name, n in join.metrics.items() if name.endswith("_rows_in"))


def fresh(
    case: Callable[[Path], DataFrame], sink: Sink = "noop", look: Callable[[Path], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Run a case in a new working folder, removed afterwards; what is seen in it stands beside what was measured."""
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    try:
        said = run(case(work), work, sink)
        return said if look is None else said | look(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def local_session(cores: int = 2, *, arrow_rows: bool = False, **settings: str) -> SparkSession:
    """The session that all cases share; `arrow_rows` as of `gpu_ops.spark.recommended_conf`."""
    pa.set_cpu_count(1)
    config = {
        "spark.sql.shuffle.partitions": str(cores),
        "spark.driver.memory": "4g",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.numRecentProgressUpdates": "10000",  # what is measured is read from these
        # a file stays in one source partition, and no other with it
        "spark.sql.files.maxPartitionBytes": "1g",
        "spark.sql.files.openCostInBytes": "1g",
        **gpu_ops.spark.recommended_conf(arrow_rows=arrow_rows),
        **settings,
    }
    session: SparkSession = gpu_ops.spark.session("gpu-join benchmark", master=f"local[{cores}]", config=config)
    session.sparkContext.setLogLevel("ERROR")
    return session
