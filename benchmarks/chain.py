"""What a further operator costs: a join, and aggregates one above the other, one to five operators.

Three questions:
- a micro-batch of 2,000 rows within one engine, by the number of operators, by CPU time of the process;
- the same through Spark, by the CPU time of the whole machine: in one engine (one partition each), in one task and as a
  stage for each operator (two partitions each);
- a join and an aggregate over 1M rows in micro-batches of 250,000, beside polars, which reads all rows at once.

    python -m benchmarks.chain [--rounds 5] [--batches 60] [--quick]
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("POLARS_MAX_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import polars as pl
import pyarrow as pa

import gpu_ops
from benchmarks.common import arguments, busy_seconds, interleave, ratio, record, summarise
from benchmarks.spark_queries import local_session
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.plan import changes

MOST = 5
"""Operators of the longest chain."""

_WARM = 20
"""Micro-batches before it is measured: Java compiles for a while."""


def rows(count: int) -> tuple[pa.Table, pa.Table]:
    """Left and right rows, each key once on either side."""
    rng = np.random.default_rng(0)
    left = pa.table({"k": rng.permutation(count), "c": rng.integers(0, 5000, count)})
    return left, pa.table({"k": rng.permutation(count), "v": rng.integers(0, 100, count)})


def chained(operators: int) -> JoinEngine:
    """A join below, and aggregates above it: of the join's groups, of these groups by their sizes, and so on."""
    left, right = rows(1)
    engine = gpu_ops.engine(left=left, right=right, on="k", backend="cpu")
    by, of = "c", "v"
    for number in range(1, operators):
        measures = {f"n{number}": "count(*)", f"t{number}": f"sum({of})"}
        engine = gpu_ops.engine(**{f"o{number}": engine}, by=by, aggregates=measures, backend="cpu")
        by, of = f"n{number}", f"t{number}"
    return JoinEngine(engine.description, "cpu")


def ours(operators: int, tables: tuple[pa.Table, pa.Table], batch: int, *, per_batch: bool) -> float:
    """CPU seconds: of one micro-batch, or of all."""
    engine, (left, right) = chained(operators), tables
    begin = time.process_time()
    for start in range(0, left.num_rows, batch):
        engine.process(left.slice(start, batch), right.slice(start, batch))
    spent = time.process_time() - begin
    engine.close()
    return spent / (left.num_rows / batch) if per_batch else spent


_WAYS = {"one engine": (4, 64, 1), "one task": (4, 64, 2), "stages": (0, 0, 2)}
"""The most partitions of an operator that shares a task, of one below others, and the partitions of each."""


def through_spark(operators: int, batches: int, *, way: str) -> float:
    """CPU seconds of the machine in one micro-batch of a query, after some that are not counted."""
    changes.MOST_IN_ONE_TASK, changes.MOST_BELOW, partitions = _WAYS[way]
    spark = local_session(2)
    left, right = (
        spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000).load().selectExpr(*columns)
        for columns in (("value AS k", "value % 5000 AS c"), ("value AS k", "value % 100 AS v"))
    )
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    df = gpu_ops.join(left, right, on="k", state=f"{work}/1", name="o1", partitions=partitions)
    by, of = "c", "v"
    for number in range(2, operators + 1):
        measures = {f"n{number}": "count(*)", f"t{number}": f"sum({of})"}
        own = {"state": f"{work}/{number}", "name": f"o{number}", "partitions": partitions}
        df = gpu_ops.aggregate(df, by=by, aggregates=measures, **own)
        by, of = f"n{number}", f"t{number}"
    query = df.writeStream.format("noop").option("checkpointLocation", f"{work}/checkpoint").start()

    def reached(batch: int) -> int:
        while (last := query.lastProgress) is None or last["batchId"] < batch:
            assert query.isActive, query.exception()
            time.sleep(0.01)
        return int(last["batchId"])

    try:
        first, begin = reached(_WARM), busy_seconds()
        last = reached(first + batches)
        return (busy_seconds() - begin) / (last - first)
    finally:
        query.stop()
        shutil.rmtree(work, ignore_errors=True)


def polars(tables: tuple[pa.Table, pa.Table]) -> float:
    """CPU seconds of the same join and aggregate over all rows."""
    left, right = (pl.DataFrame(table) for table in tables)
    begin = time.process_time()
    left.join(right, on="k").group_by("c").agg(pl.len(), pl.col("v").sum())
    return time.process_time() - begin


def main() -> None:
    """Measure, and write the results."""
    parser = arguments(__doc__, "chain", rounds=5)
    parser.add_argument("--batches", type=int, default=60, help="micro-batches through Spark that are measured")
    parser.add_argument("--quick", action="store_true", help="few rows: that it runs")
    options = parser.parse_args()
    few, many = (10_000, 20_000) if options.quick else (100_000, 1_000_000)
    small, large = rows(few), rows(many)
    cases: dict[str, Callable[[], float]] = {
        f"{n} operators": partial(ours, n, small, 1000, per_batch=True) for n in range(1, MOST + 1)
    }
    found = {name: summarise(x) for name, x in interleave(cases, options.rounds, warmup=1).items()}
    pair = {"dataflow": partial(ours, 2, large, many // 4, per_batch=False), "polars": partial(polars, large)}
    whole = {name: summarise(x) for name, x in interleave(pair, options.rounds, warmup=1).items()}
    counts = (1, 2) if options.quick else (1, 2, 3, MOST)
    queries = {
        f"{n} operators, {way}": partial(through_spark, n, options.batches, way=way)
        for n in counts
        for way in _WAYS
        if n > 1 or way != "stages"
    }
    spark = {name: summarise(x) for name, x in interleave(queries, options.rounds, warmup=1).items()}
    alone = {way: spark[f"1 operators, {'one task' if way == 'stages' else way}"].median for way in _WAYS}
    further_in_spark = {
        way: (spark[f"{counts[-1]} operators, {way}"].median - alone[way]) / (counts[-1] - 1) for way in _WAYS
    }
    further = (found[f"{MOST} operators"].median - found["1 operators"].median) / (MOST - 1)
    results = {
        "seconds_a_micro_batch": found,
        "seconds_of_a_further_operator": further,
        "seconds_a_micro_batch_through_spark": spark,
        "seconds_of_a_further_operator_through_spark": further_in_spark,
        "seconds_join_and_aggregate": whole,
        "join_and_aggregate_over_polars": ratio(whole["dataflow"], whole["polars"]),
    }
    record(options, "chain", results, rows=[few, many])


if __name__ == "__main__":
    main()
