"""Joins that speak at the end of their input, on one core: against per_batch, and against a one-shot polars join.

The same Parquet files, 100k changes a micro-batch. `left` is a left join, `co_group` hands a function both inputs' rows
by key, in order. Questions:
- how many times as fast as the same query in `per_batch`? (A co-group has no such query; the full join stands for it.)
- how many times as long as polars, single-threaded, reading the files and joining them at once?

The yardstick for the first is FLIP-331's own table: Flink's stream mode 56, its batch mode 564, the optimised
end-of-input operator 1,492 records a millisecond at 20M records: 27 times.

    python -m benchmarks.at_end [--rows 10000000] [--rounds 3] [--quick]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import arguments, interleave, ratio, summarise, write_results
from benchmarks.engine import LEFT, RIGHT, random_rows
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import CoGroup, Join, JoinType
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.join_engine import JoinEngine

CHANGES = 100_000
"""Changes in a micro-batch, both inputs together."""
FLIP_331 = {"stream": 56, "batch": 564, "optimised": 1492}
"""Records a millisecond at 20M records."""


def micro_batches(folder: Path) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Both files, read as they are needed."""
    files = [pq.ParquetFile(folder / f"{name}.parquet") for name in ("left", "right")]
    yield from zip(*(f.iter_batches(batch_size=CHANGES // 2, use_threads=False) for f in files), strict=True)


def sums(left: pa.Table, right: pa.Table) -> pa.Table:
    """The co-group's function: of each key, the sum of both sides' values, all keys at once."""
    keys = [t["k"].to_numpy() for t in (left, right)]
    every = np.sort(np.concatenate(keys))
    every = every[np.append(True, every[1:] != every[:-1])] if every.size else every
    totals = [
        np.bincount(np.searchsorted(every, k), weights=t[c].to_numpy(), minlength=every.size)
        for k, t, c in zip(keys, (left, right), ("a", "b"), strict=True)
    ]
    return pa.table({"k": every, "a": totals[0], "b": totals[1]})


def run(description: Description, folder: Path) -> dict[str, float]:
    """One query from files to result: seconds, and of these after the last row had come."""
    engine = JoinEngine(description, "cpu")
    begin = time.perf_counter()
    rows = sum(engine.process(*batch).num_rows for batch in micro_batches(folder))
    ended = time.perf_counter()
    for part in engine.finish_parts():
        rows += (sums(*description.split(part)) if isinstance(description, CoGroup) else part).num_rows
    done = time.perf_counter()
    engine.close()
    return {"seconds": done - begin, "seconds_after_end": done - ended, "rows_out": float(rows)}


def run_polars(folder: Path) -> dict[str, float]:
    """Read and join at once."""
    begin = time.perf_counter()
    left, right = (pl.read_parquet(folder / f"{name}.parquet") for name in ("left", "right"))
    joined = left.join(right, on="k", how="left")
    return {"seconds": time.perf_counter() - begin, "rows_out": float(joined.height)}


def main() -> None:
    """Runs the benchmark, prints and records its results."""
    parser = arguments(__doc__, "at_end", rounds=3)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of each input")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rows = 200_000 if options.quick else options.rows
    pa.set_cpu_count(1)
    inputs, on = (Input("left", LEFT), Input("right", RIGHT)), normalize_on("k")

    def join(how: JoinType, emit: Any) -> Join:
        return Join(how, *inputs, on, emit=emit)

    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as temporary:
        folder = Path(temporary)
        for name, table in zip(("left", "right"), random_rows(np.random.default_rng(1), rows), strict=True):
            pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
        cases: dict[str, Callable[[], dict[str, float]]] = {
            "left_at_end": partial(run, join("left", "at_end"), folder),
            "co_group": partial(run, CoGroup(*inputs, on), folder),
            "polars": partial(run_polars, folder),
            "left_per_batch": partial(run, join("left", "per_batch"), folder),
            "full_per_batch": partial(run, join("full", "per_batch"), folder),
        }
        runs = interleave(cases, options.rounds)
    taken = {name: summarise(r["seconds"] for r in rs) for name, rs in runs.items()}
    results: dict[str, Any] = {
        "rows_per_input": rows,
        "rows_out": {name: rs[0]["rows_out"] for name, rs in runs.items()},
        "records_per_millisecond": {name: 2 * rows / t.median / 1e3 for name, t in taken.items()},
        "left_times_per_batch": ratio(taken["left_per_batch"], taken["left_at_end"]),
        "left_times_polars": ratio(taken["left_at_end"], taken["polars"]),
        "co_group_times_per_batch": ratio(taken["full_per_batch"], taken["co_group"]),
        "co_group_times_polars": ratio(taken["co_group"], taken["polars"]),
        "flip_331": FLIP_331,
        "seconds": taken,
        "runs": runs,
    }
    settings = {"rows": rows, "changes_per_micro_batch": CHANGES, "rounds": options.rounds, "threads": 1}
    record = write_results(options.out, "at_end", results, settings=settings)
    json.dump({k: v for k, v in record["results"].items() if k != "runs"}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
