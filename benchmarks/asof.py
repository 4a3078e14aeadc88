"""The ASOF join's CPU engine alone, on one core: beside polars' ``join_asof``, and what a hot key costs.

- `beside_polars`: trades against quotes, both in the order of their times, of few keys and of many. The engine takes
  them in micro-batches (``per_batch``, ``how="left"``) and puts out its changelog; polars joins all rows at once, by
  one thread. The folded changelog has as many matches as polars' result.
- `hot_key`: one micro-batch on a state in which a key has 1,000,000 versions, and on one without that key. In both as
  many trades and quotes come; one in a hundred is of the hot key.

    python -m benchmarks.asof [--rows 5000000] [--batches 10] [--sides 3] [--rounds 7] [--quick]
"""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import arguments, interleave, ratio, summarise, write_results
from gpu_ops.descriptions.by_time import Asof, AsofJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.join_engine import JoinEngine

TRADES = pa.schema([("symbol", pa.int64()), ("at", pa.int64()), ("id", pa.int64())])
QUOTES = pa.schema([("symbol", pa.int64()), ("at", pa.int64()), ("price", pa.float64())])
HOT = -1


def make_engine() -> JoinEngine:
    """A CPU engine for the benchmark's join."""
    left, right = Input("trades", TRADES, event_time="at"), Input("quotes", QUOTES, event_time="at")
    return JoinEngine(AsofJoin("left", left, right, normalize_on("symbol"), asof=Asof()), "cpu")


def rows(schema: pa.Schema, keys: np.ndarray, times: np.ndarray) -> pa.Table:
    """Rows of one input."""
    return pa.table([keys, times, np.arange(keys.size)], schema.names).cast(schema)


def beside_polars(size: int, keys: int, batches: int, rounds: int) -> dict[str, Any]:
    """Seconds of the engine and of polars for so many trades and quotes, in turns."""
    import polars as pl

    rng = np.random.default_rng(keys)
    both = [
        rows(schema, rng.integers(0, keys, size), np.sort(rng.integers(0, 10 * size, size)))
        for schema in (TRADES, QUOTES)
    ]
    frames = [pl.from_arrow(table) for table in both]
    edges = np.linspace(0, 10 * size, batches + 1).astype(np.int64)
    parts = [[t.slice(*_span(t, low, high)) for t in both] for low, high in itertools.pairwise(edges)]
    steps = {"update": 0.0, "probe": 0.0, "emit": 0.0, "commit": 0.0}

    def polars() -> tuple[float, int]:
        before = time.perf_counter()
        joined = frames[0].join_asof(frames[1], on="at", by="symbol", check_sortedness=False)
        took = time.perf_counter() - before
        return took, joined.height - joined["price"].null_count()

    def engine() -> tuple[float, int]:
        running, changelogs = make_engine(), []
        before = time.perf_counter()
        for trades, quotes in parts:
            batch = running.prepare(left=trades, right=quotes)
            begun = time.perf_counter()
            running.commit()
            steps["commit"] += (time.perf_counter() - begun) / (rounds + 1)
            for name in ("update", "probe", "emit"):
                steps[name] += batch.metrics[f"{name}_ms"] / 1e3 / (rounds + 1)
            changelogs.append(batch.changelog.select(["row_kind", "price"]))
        took = time.perf_counter() - before
        running.close()
        found = 0
        for changelog in changelogs:
            signs = np.where(np.asarray(changelog["row_kind"].to_pandas() == "+I"), 1, -1)
            found += int((signs * changelog["price"].is_valid().to_numpy()).sum())
        return took, found

    runs = interleave({"polars": polars, "engine": engine}, rounds, warmup=1)
    if len({found for results in runs.values() for _, found in results}) != 1:
        raise SystemExit(f"matches differ: {runs}")
    seconds = {name: summarise(took for took, _ in results) for name, results in runs.items()}
    return {
        "keys": keys, "rows": size, "micro_batches": batches,
        "polars_s": round(seconds["polars"].median, 3), "engine_s": round(seconds["engine"].median, 3),
        "parts_s": {name: round(each, 2) for name, each in steps.items()},
        "times_polars": {name: round(each, 2) for name, each in ratio(seconds["engine"], seconds["polars"]).items()},
    }  # fmt: skip


def _span(table: pa.Table, low: int, high: int) -> tuple[int, int]:
    first, last = np.searchsorted(table["at"].to_numpy(), [low, high])
    return int(first), int(last - first)


def hot_key(state: int, versions: int, changes: int, rounds: int) -> dict[str, Any]:
    """One micro-batch on a state with and without the hot key."""
    rng = np.random.default_rng(3)
    keys = max(1, state // 10)
    engines = {}
    for name in ("without", "with"):
        held, times = rng.integers(0, keys, state), rng.integers(0, 10 * versions, state)
        if name == "with":
            held, times = (
                np.concatenate([held, np.full(versions, HOT)]),
                np.concatenate([times, np.arange(versions) * 10]),
            )
        mixed = rng.permutation(held.size)
        engines[name] = make_engine()
        engines[name].process(right=rows(QUOTES, held[mixed], times[mixed]))
        left = rng.integers(0, keys, state), rng.integers(0, 10 * versions, state)
        engines[name].process(left=rows(TRADES, *left))
    ordinary, times = rng.integers(0, keys, 2 * changes), rng.integers(0, 10 * versions, 2 * changes)

    def micro_batch(name: str) -> float:
        wanted = ordinary.copy()
        if name == "with":
            wanted[::100] = HOT
        tables = [
            rows(s, w, t) for s, w, t in zip((TRADES, QUOTES), *(np.split(a, 2) for a in (wanted, times)), strict=True)
        ]
        before = time.perf_counter()
        engines[name].prepare(left=tables[0], right=tables[1])
        took = time.perf_counter() - before
        engines[name].discard()
        return took

    runs = interleave({n: lambda n=n: micro_batch(n) for n in ("without", "with")}, rounds, warmup=1)
    both = {name: summarise(values) for name, values in runs.items()}
    return {
        "state": state, "versions": versions, "changes": 2 * changes,
        "milliseconds": {name: round(1e3 * summary.median, 1) for name, summary in both.items()},
        "times_without": round(both["with"].median / both["without"].median, 3),
    }  # fmt: skip


def main() -> None:
    """Run both, print and record them."""
    pa.set_cpu_count(1)
    parser = arguments(__doc__, "asof")
    parser.add_argument("--rows", type=int, default=5_000_000, help="trades, and as many quotes")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--sides", type=int, default=3, help="rounds of engine and polars")
    parser.add_argument("--rounds", type=int, default=7, help="of the hot key's micro-batch")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    given = parser.parse_args()
    size = 20_000 if given.quick else given.rows
    sides = 1 if given.quick else given.sides
    results = {
        "beside_polars": [beside_polars(size, keys, given.batches, sides) for keys in (1000, max(1, size // 5))],
        "hot_key": hot_key(size // 5, size // 5, min(50_000, size // 10), 1 if given.quick else given.rounds),
    }
    print(json.dumps(results, indent=1))
    write_results(given.out, "asof", results)


if __name__ == "__main__":
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    main()
