"""The CPU engine alone, on one core: against one polars join, by state size, and in bytes per row.

Answers three questions:
- `engine`: 5M rows an input in 100k-change micro-batches, left join on an int64 key; how many times
  as long as one single-threaded polars join of the same rows (which sees all at once and keeps no state)?
- `state_growth`: one 100k-change micro-batch at 10M state rows against the same at 100k, matches held equal.
- `state_memory`: bytes of state per row over the Arrow size of the row.

    python -m benchmarks.engine [--rows 5000000] [--rounds 3] [--quick]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("POLARS_MAX_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import polars as pl
import pyarrow as pa

from benchmarks.common import arguments, interleave, ratio, summarise, write_results
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.join_engine import JoinEngine

LEFT = pa.schema([("k", pa.int64()), ("a", pa.int64())])
RIGHT = pa.schema([("k", pa.int64()), ("b", pa.float64())])
ARROW_BYTES = 16
"""Bytes of one row of either schema in Arrow, without nulls."""
CHANGES = 100_000
"""Changes in a micro-batch, both inputs together."""


def make_engine(emit: Emit, how: JoinType = "left") -> JoinEngine:
    """A CPU engine for the benchmark's join."""
    join = Join(how, Input("left", LEFT), Input("right", RIGHT), normalize_on("k"), emit=emit)
    return JoinEngine(join, "cpu")


def random_rows(rng: np.random.Generator, rows: int) -> tuple[pa.Table, pa.Table]:
    """Two tables of `rows` rows, every key once on each side, in another order."""
    left = pa.table({"k": rng.permutation(rows), "a": rng.integers(0, 1000, rows)}, schema=LEFT)
    right = pa.table({"k": rng.permutation(rows), "b": rng.random(rows)}, schema=RIGHT)
    return left, right


def run_engine(emit: Emit, left: pa.Table, right: pa.Table) -> dict[str, float]:
    """All rows through an engine, half of each micro-batch from either input; seconds and state bytes."""
    engine = make_engine(emit)
    half = CHANGES // 2
    seconds, out, slowest = 0.0, 0, 0.0
    for start in range(0, left.num_rows, half):
        batch = left.slice(start, half), right.slice(start, half)
        before = time.perf_counter()
        out += engine.process(*batch).num_rows
        took = time.perf_counter() - before
        seconds, slowest = seconds + took, max(slowest, took)
    size = engine.state_size()
    return {
        "seconds": seconds,
        "rows_out": float(out),
        "slowest_micro_batch_seconds": slowest,
        "state_bytes": float(size["left_bytes"] + size["right_bytes"]),
    }


def run_polars(left: pa.Table, right: pa.Table) -> dict[str, float]:
    """Runs the same join at once in polars."""
    a, b = pl.from_arrow(left), pl.from_arrow(right)
    assert isinstance(a, pl.DataFrame)
    assert isinstance(b, pl.DataFrame)
    before = time.perf_counter()
    joined = a.join(b, on="k", how="left")
    return {"seconds": time.perf_counter() - before, "rows_out": float(joined.height)}


def against_polars(rows: int, rounds: int) -> dict[str, object]:
    """Engine and polars in turns."""
    left, right = random_rows(np.random.default_rng(1), rows)
    cases: dict[str, Callable[[], dict[str, float]]] = {
        "per_batch": lambda: run_engine("per_batch", left, right),
        "polars": lambda: run_polars(left, right),
        "per_event": lambda: run_engine("per_event", left, right),
    }
    runs = interleave(cases, rounds)
    polars = summarise(r["seconds"] for r in runs["polars"])
    results: dict[str, object] = {"rows_per_input": rows, "polars_seconds": polars}
    for emit in ("per_batch", "per_event"):
        ours = summarise(r["seconds"] for r in runs[emit])
        results[emit] = {
            "seconds": ours,
            "changes_per_second": 2 * rows / ours.median,
            "times_polars": ratio(ours, polars),
            "slowest_micro_batch_seconds": max(r["slowest_micro_batch_seconds"] for r in runs[emit]),
        }
    state = runs["per_batch"][0]["state_bytes"]
    results["state_memory"] = {
        "bytes_per_row": state / (2 * rows),
        "over_arrow_size": state / (2 * rows) - ARROW_BYTES,
    }
    return results


def state_growth(small: int, large: int, rounds: int) -> dict[str, object]:
    """One micro-batch with the same matches, at two sizes of the state."""
    rng = np.random.default_rng(2)
    engines = {}
    for name, rows in (("small", small), ("large", large)):
        engine = make_engine("per_batch")
        left, right = random_rows(rng, rows // 2)
        for start in range(0, rows // 2, 500_000):
            engine.process(left.slice(start, 500_000), right.slice(start, 500_000))
        engines[name] = engine
    half = CHANGES // 2

    def micro_batch(name: str, rows: int) -> float:
        # keys in the state, each matching one row: the same number of matches at both sizes
        keys = rng.permutation(rows // 2)[: min(half, rows // 2)]
        left = pa.table({"k": keys, "a": keys}, schema=LEFT)
        right = pa.table({"k": keys[::-1], "b": rng.random(keys.size)}, schema=RIGHT)
        engine = engines[name]
        before = time.perf_counter()
        engine.prepare(left, right)
        took = time.perf_counter() - before
        engine.discard()  # the state stays as large as it was
        return took

    runs = interleave(
        {"small": lambda: micro_batch("small", small), "large": lambda: micro_batch("large", large)},
        rounds,
        warmup=2,
    )
    at = {name: summarise(values) for name, values in runs.items()}
    return {
        "small_state_rows": small,
        "large_state_rows": large,
        "small_seconds": at["small"],
        "large_seconds": at["large"],
        "times": ratio(at["large"], at["small"]),
    }


def main() -> None:
    """Run all three, print and record them."""
    parser = arguments(__doc__, "engine", rounds=3)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    pa.set_cpu_count(1)
    rows = 200_000 if options.quick else options.rows
    large = 400_000 if options.quick else 10_000_000
    results = {
        "engine": against_polars(rows, options.rounds),
        "state_growth": state_growth(100_000, large, 5 * options.rounds),
    }
    settings = {"rows": rows, "changes_per_micro_batch": CHANGES, "rounds": options.rounds, "threads": 1}
    record = write_results(options.out, "engine", results, settings=settings)
    json.dump(record["results"], sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
