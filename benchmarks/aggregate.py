"""Aggregates kept up to date: the CPU engine alone, on one core, beside polars' ``group_by`` of the same rows at once.

Sales of few products and of many: ``count(*)``, ``sum`` and ``avg`` of integers, ``sum`` of doubles, ``min``, ``max``.
The engine takes them in micro-batches (``per_batch``) and puts out its changelog; polars groups all rows at once, by
one thread. The folded changelog is polars' result. The process has the environment of a state server. Where rows are
taken back it is a tenth of each micro-batch, in the next; polars is given what is left, and in a second case the same
changes as the engine, which it groups by all columns first to find what is left. Beside wall time stands the time
outside the kernel: a virtual machine takes freed pages back, and what first touches them again waits for its host.

    python -m benchmarks.aggregate [--rows 5000000] [--batches 10] [--rounds 7] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from benchmarks.common import Summary, as_state_servers_run, interleave, ratio, summarise, write_results
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.inputs import Input
from gpu_ops.join_engine import JoinEngine

T = TypeVar("T")

SALES = pa.schema([("product", pa.int64()), ("quantity", pa.int64()), ("price", pa.float64())])
CALLS = {
    "n": "count(*)", "quantity": "sum(quantity)", "mean": "avg(quantity)", "worth": "sum(price)", "least": "min(price)",
    "most": "max(quantity)",
}  # fmt: skip


def sales(size: int, products: int) -> pa.Table:
    """Rows of the input."""
    rng = np.random.default_rng(products)
    return pa.table(
        [rng.integers(0, products, size), rng.integers(0, 100, size), rng.integers(0, 1000, size)], schema=SALES
    )


def timed(case: Callable[[], T]) -> tuple[float, float, T]:
    """Seconds of wall time and outside the kernel that something takes, and what comes of it."""
    before, user = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    found = case()
    return time.perf_counter() - before, resource.getrusage(resource.RUSAGE_SELF).ru_utime - user, found


def beside_polars(size: int, products: int, batches: int, rounds: int, *, retractions: bool) -> dict[str, Any]:
    """Seconds of the engine and of polars, in turns."""
    import polars as pl

    table, step = sales(size, products), -(-size // batches)
    parts = [table.slice(at, step) for at in range(0, size, step)]
    left = table
    if retractions:
        gone = [part.slice(0, len(part) // 10) for part in parts[:-1]]
        left = pa.concat_tables([part.slice(len(part) // 10) for part in parts[:-1]] + parts[-1:])
        changes = []
        for number, part in enumerate(parts):
            back = gone[number - 1] if number else part.slice(0, 0)
            kinds = pa.array(["+I"] * len(part) + ["-D"] * len(back), pa.string())
            changes.append(pa.concat_tables([part, back]).append_column("op", kinds).combine_chunks())
        parts = changes
    source = Input("sales", SALES, row_kind="op" if retractions else None)
    described = Aggregate.of(source, ("product",), CALLS, "per_batch")
    frame, changed = pl.from_arrow(left), pl.from_arrow(pa.concat_tables(parts))
    assert isinstance(frame, pl.DataFrame)
    assert isinstance(changed, pl.DataFrame)

    def polars() -> pl.DataFrame:
        return frame.group_by("product").agg(
            n=pl.len(), quantity=pl.sum("quantity"), mean=pl.mean("quantity").alias("m"), worth=pl.sum("price"),
            least=pl.min("price"), most=pl.max("quantity").alias("t"),
        )  # fmt: skip

    def polars_of_changes() -> pl.DataFrame:
        counted = changed.with_columns(c=pl.when(pl.col("op") == "+I").then(1).otherwise(-1))
        rows, c = counted.group_by(SALES.names).agg(pl.sum("c")).filter(pl.col("c") > 0), pl.col("c")
        found = rows.group_by("product").agg(
            n=pl.sum("c"), quantity=(pl.col("quantity") * c).sum().alias("q"), worth=(pl.col("price") * c).sum(),
            least=pl.min("price"), most=pl.max("quantity").alias("t"),
        )  # fmt: skip
        return found.with_columns(m=pl.col("quantity") / pl.col("n"))

    def by_polars(case: Callable[[], pl.DataFrame]) -> tuple[float, float, tuple[int, ...]]:
        took, user, found = timed(case)
        return (
            took,
            user,
            (found.height, int(found["n"].sum()), int(found["quantity"].sum()), int(found["worth"].sum())),
        )

    def engine() -> tuple[float, float, tuple[int, ...]]:
        running = JoinEngine(described, "cpu")
        took, user, changelogs = timed(lambda: [running.process(part) for part in parts])
        running.close()
        found = np.zeros(4, np.int64)
        for changelog in changelogs:
            signs = np.where(np.asarray(changelog["row_kind"].to_pandas() == "+I"), 1, -1)
            sums = [int((signs * changelog[name].to_numpy()).sum()) for name in ("n", "quantity", "worth")]
            found += np.array([int(signs.sum()), *sums])
        return took, user, tuple(int(x) for x in found)

    cases = {"polars": functools.partial(by_polars, polars), "engine": engine}
    if retractions:
        cases["polars_of_changes"] = functools.partial(by_polars, polars_of_changes)
    runs = interleave(cases, rounds, warmup=1)
    if len({found for results in runs.values() for *_, found in results}) != 1:
        raise SystemExit(f"results differ: { {name: results[0][2] for name, results in runs.items()} }")
    seconds = {name: summarise(took for took, *_ in results) for name, results in runs.items()}
    user = {name: summarise(took for _, took, _ in results) for name, results in runs.items()}

    def times(of: dict[str, Summary], peer: str) -> dict[str, float]:
        return {name: round(each, 2) for name, each in ratio(of["engine"], of[peer]).items()}

    return {
        "products": products, "rows": size, "micro_batches": batches, "retractions": retractions,
        "polars_s": round(seconds["polars"].median, 3), "engine_s": round(seconds["engine"].median, 3),
        "times_polars": times(seconds, "polars"), "times_polars_user": times(user, "polars"),
        **({"times_polars_of_changes": times(seconds, "polars_of_changes")} if retractions else {}),
    }  # fmt: skip


def main() -> None:
    """Measure, print, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "aggregate.json")
    given = parser.parse_args()
    as_state_servers_run()
    rows, rounds = (200_000, 2) if given.quick else (given.rows, given.rounds)
    results = [
        beside_polars(rows, products, batches, rounds, retractions=back)
        for products in (1_000, max(1, rows // 10))
        for batches in (1, given.batches)
        for back in ((False, True) if batches > 1 else (False,))
    ]
    print(json.dumps(results, indent=1))
    write_results(given.out, "aggregate", {"beside_polars": results})


if __name__ == "__main__":
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    main()
