"""What a further operator costs within one engine: a join, and aggregates one above the other, one to five operators.

Two questions, by CPU time of one process:
- a micro-batch of 2,000 rows, by the number of operators (through Spark, an operator a stage, each cost 70 to 120 ms);
- a join and an aggregate over 1M rows in micro-batches of 250,000, beside polars, which reads all rows at once.

    python -m benchmarks.chain [--rounds 5] [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("POLARS_MAX_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import polars as pl
import pyarrow as pa

import gpu_ops
from benchmarks.common import arguments, interleave, ratio, record, summarise
from gpu_ops.join_engine import JoinEngine

MOST = 5
"""Operators of the longest chain."""


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
    return JoinEngine(engine.join, "cpu")


def ours(operators: int, tables: tuple[pa.Table, pa.Table], batch: int, *, per_batch: bool) -> float:
    """CPU seconds: of one micro-batch, or of all."""
    engine, (left, right) = chained(operators), tables
    begin = time.process_time()
    for start in range(0, left.num_rows, batch):
        engine.process(left.slice(start, batch), right.slice(start, batch))
    spent = time.process_time() - begin
    engine.close()
    return spent / (left.num_rows / batch) if per_batch else spent


def polars(tables: tuple[pa.Table, pa.Table]) -> float:
    """CPU seconds of the same join and aggregate over all rows."""
    left, right = (pl.DataFrame(table) for table in tables)
    begin = time.process_time()
    left.join(right, on="k").group_by("c").agg(pl.len(), pl.col("v").sum())
    return time.process_time() - begin


def main() -> None:
    """Measure, and write the results."""
    parser = arguments(__doc__, "chain", rounds=5)
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
    further = (found[f"{MOST} operators"].median - found["1 operators"].median) / (MOST - 1)
    results = {
        "seconds_a_micro_batch": found,
        "seconds_of_a_further_operator": further,
        "seconds_join_and_aggregate": whole,
        "join_and_aggregate_over_polars": ratio(whole["dataflow"], whole["polars"]),
    }
    record(options, "chain", results, rows=[few, many])


if __name__ == "__main__":
    main()
