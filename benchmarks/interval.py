"""The interval join's CPU engine alone: what a hot key costs, and whether memory stays flat.

- `hot_key`: a key with 100,000 rows in state of which 10 are inside a new row's interval, against as many
  new rows of ordinary keys with 10 rows inside theirs: matches held equal.
- `soak`: 200 micro-batches; rows and bytes of state and the process's memory after each, plotted. State may hold what
  is inside the interval and one micro-batch more. Where late rows join (Flink's rule), rows that came out of order
  wait for their key's timer, so there may be a few more; that is measured beside.

    python -m benchmarks.interval [--rounds 15] [--batches 200] [--quick]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import arguments, interleave, plot_path, ratio, summarise, write_results
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import JoinType
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.descriptions.times import Late
from gpu_ops.join_engine import JoinEngine

LEFT = pa.schema([("k", pa.int64()), ("lt", pa.timestamp("us")), ("a", pa.int64())])
RIGHT = pa.schema([("k", pa.int64()), ("rt", pa.timestamp("us")), ("b", pa.float64())])
SECOND = 1_000_000
HOT = -1


def make_engine(
    how: JoinType, lower_ms: int, upper_ms: int, delay_ms: int | None = None, late: Late = "join"
) -> JoinEngine:
    """A CPU engine for the benchmark's join."""
    left = Input("left", LEFT, event_time="lt", delay_ms=delay_ms)
    right = Input("right", RIGHT, event_time="rt", delay_ms=delay_ms)
    interval = Interval(lower_ms, upper_ms, late=late)
    return JoinEngine(IntervalJoin(how, left, right, normalize_on("k"), interval=interval), "cpu")


def table(schema: pa.Schema, keys: np.ndarray, times: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Rows of one input."""
    return pa.table([keys, pa.array(times, pa.timestamp("us")), rng.integers(0, 1000, keys.size)], schema.names).cast(
        schema
    )


def hot_key(state: int, changes: int, rounds: int) -> dict[str, Any]:
    """One micro-batch on a state with and without the hot key."""
    rng = np.random.default_rng(5)
    hot_rows, hot_changes, inside = 100_000, changes // 100, 10
    keys = state // inside
    engines = {}
    for name in ("without", "with"):
        # Ten rows per key, one a millisecond; the hot key's rows one a second, so ten in ten seconds.
        rows = np.repeat(np.arange(keys), inside), np.tile(np.arange(inside) * 1000, keys)
        if name == "with":
            hot = np.full(hot_rows, HOT), np.arange(hot_rows) * SECOND
            rows = np.concatenate([rows[0], hot[0]]), np.concatenate([rows[1], hot[1]])
        mixed = rng.permutation(rows[0].size)
        engine = make_engine("inner", 0, 9_500)
        for part in np.array_split(mixed, 8):
            engine.process(right=table(RIGHT, rows[0][part], rows[1][part], rng))
        engines[name] = engine
    ordinary = rng.integers(0, keys, changes)
    hot_times = rng.integers(0, hot_rows - inside, hot_changes) * SECOND

    def micro_batch(name: str) -> float:
        wanted, times = ordinary.copy(), np.zeros(changes, np.int64)
        if name == "with":
            wanted[:hot_changes], times[:hot_changes] = HOT, hot_times
        batch = table(LEFT, wanted, times, rng)
        engine = engines[name]
        before = time.perf_counter()
        found = engine.prepare(left=batch)
        took = time.perf_counter() - before
        engine.discard()
        if found.changelog.num_rows != changes * inside:
            raise SystemExit(f"{found.changelog.num_rows} rows, {changes * inside} expected")
        return took

    runs = interleave({n: lambda n=n: micro_batch(n) for n in ("without", "with")}, rounds, warmup=2)
    seconds = {name: summarise(values) for name, values in runs.items()}
    return {
        "state_rows": state,
        "hot_key_rows": hot_rows,
        "new_rows": changes,
        "new_rows_of_the_hot_key": hot_changes,
        "matches_per_row": inside,
        "seconds": seconds,
        "times": ratio(seconds["with"], seconds["without"]),
    }


def soak(
    engine: JoinEngine, batches: int, changes: int, *, kept_ms: int, more: int = 0, over_bound: float = 1.0
) -> dict[str, Any]:
    """2 s of event time a micro-batch, up to 4 s out of order; what the state holds after each.

    Args:
        engine: of inputs like `LEFT` and `RIGHT`.
        batches: micro-batches.
        changes: of each.
        kept_ms: how far before the latest time of the input that is behind rows are kept.
        more: rows that may be kept besides.
        over_bound: how much more than that may be there.

    Raises:
        SystemExit: more rows in state than these and one micro-batch.
    """
    rng = np.random.default_rng(6)
    half, span = changes // 2, 2 * SECOND
    record: dict[str, list[float]] = {"state_rows": [], "state_bytes": [], "resident_bytes": [], "bound_rows": []}
    times: list[np.ndarray] = []
    for number in range(batches):
        batch = []
        for schema in (LEFT, RIGHT):
            when = number * span + rng.integers(0, span, half) - rng.integers(0, 4 * SECOND, half)
            times.append(when)
            batch.append(table(schema, rng.integers(0, 100_000, half), when, rng))
        engine.process(*batch)
        # The watermark in force came from the micro-batches before this one.
        latest = min(max(int(t.max()) for t in times[s:-2:2]) for s in (0, 1)) if number else 0
        over = latest // 1000 * 1000 - kept_ms * 1000 if number else -(1 << 60)  # watermarks are whole milliseconds
        bound = sum(int((t >= over).sum()) for t in times[:-2]) + changes + more
        size = engine.state_size()
        rows = size["left_rows"] + size["right_rows"]
        if rows > bound * over_bound:
            raise SystemExit(f"micro-batch {number}: {rows} rows in state, at most {bound} may be")
        for name, value in (
            ("state_rows", rows),
            ("state_bytes", size["left_bytes"] + size["right_bytes"]),
            ("resident_bytes", resident()),
            ("bound_rows", bound),
        ):
            record[name].append(float(value))
        times = [t for t in times if t.max() >= over]
    quarter = len(record["resident_bytes"]) // 4
    flat = {n: max(v[-quarter:]) / max(v[quarter : 2 * quarter]) for n, v in record.items()}
    return {"batches": batches, "changes": changes, "last_quarter_over_second": flat, **record}


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def interval_soak(batches: int, changes: int, late: Late) -> dict[str, Any]:
    """Full join, bounds of plus and minus 10 s, watermark 5 s behind."""
    engine = make_engine("full", -10_000, 10_000, delay_ms=5_000, late=late)
    return soak(engine, batches, changes, kept_ms=15_000, over_bound=1.02 if late == "join" else 1.0)


def plot(records: Mapping[str, dict[str, Any]], target: Path, bound: str) -> None:
    """State and memory by micro-batch; a column for each soak, by its title."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    shape = {"sharex": True, "sharey": "row", "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(2, len(records), figsize=(3 + 5 * len(records), 5), **shape)
    for (title, record), (rows, size) in zip(records.items(), axes.T, strict=True):
        rows.set_title(title)
        rows.plot(record["bound_rows"], label=bound, color="0.7")
        rows.plot(record["state_rows"], label="rows in state")
        size.plot(np.array(record["resident_bytes"]) / 2**20, label="process", color="C1")
        size.plot(np.array(record["state_bytes"]) / 2**20, label="state")
        size.set_xlabel("micro-batch")
        for part in (rows, size):
            part.set_ylim(bottom=0)
            part.legend(loc="lower right")
    axes[0][0].set_ylabel("rows")
    axes[1][0].set_ylabel("MiB")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Run both, print and record them."""
    parser = arguments(__doc__, "interval", rounds=15)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    pa.set_cpu_count(1)
    changes = 10_000 if options.quick else 100_000
    results = {
        "hot_key": hot_key(10 * changes, changes, options.rounds),
        "soak": interval_soak(options.batches, changes, "drop"),
        "soak_late_rows_join": interval_soak(options.batches, changes, "join"),
    }
    settings = {"rounds": options.rounds, "batches": options.batches, "threads": 1}
    record = write_results(options.out, "interval", results, settings=settings)
    plot({"": results["soak"]}, plot_path(options.out), "inside the interval, and one micro-batch")
    shown = {"hot_key": record["results"]["hot_key"]}
    for name in ("soak", "soak_late_rows_join"):
        shown[name] = record["results"][name]["last_quarter_over_second"]
    json.dump(shown, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
