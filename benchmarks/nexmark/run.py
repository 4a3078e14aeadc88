"""Nexmark's join queries (q3, q4, q9, q20, q23) through `gpu_ops.sql`, on `local[2]`.

    python -m benchmarks.nexmark [--events 1000000] [--queries q3,q20] [--rounds 3]

The tables are Parquet files, one of each in a micro-batch. Each query runs once by each reader with a Parquet sink, and
its folded changelog is compared with DuckDB's result; then, in turns and with Spark's no-op sink, as ours (the files
read by Spark, and by `gpu_ops.read_files`), as Spark's own join (they are inner joins of insert-only streams; no
watermark, as in Nexmark), and as the same pipeline without a join. Events are the rows of the tables that a query
reads; those of other tables are not counted. All state is durable.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.common import interleave, ratio, summarise, write_results
from benchmarks.nexmark import generator, pipelines
from benchmarks.nexmark.queries import NAMES, Query, compared, query
from benchmarks.spark_queries import Reader, local_session

READERS: tuple[Reader, ...] = ("spark", "arrow")


def main() -> None:
    """Run, check, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="of all three tables")
    parser.add_argument("--files", type=int, default=4, help="micro-batches")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--queries", default=",".join(NAMES), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="runs of each before")
    parser.add_argument("--emit", default="per_batch", choices=["per_batch", "per_event"])
    parser.add_argument("--no-spark", action="store_true", help="leave Spark's own join out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "nexmark.json")
    options = parser.parse_args()
    queries = [query(name.strip()) for name in options.queries.split(",")]
    settings = {k: getattr(options, k) for k in ("events", "files", "seed", "emit")} | {"master": "local[2]"}
    results = earlier(options.out, settings)
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data = Path(folder)
        rows = generator.write(data, events=options.events, files=options.files, seed=options.seed)
        spark = local_session(**{"spark.sql.session.timeZone": "UTC"})
        for one in queries:
            results[one.name] = measure(spark, data, one, options)
        spark.stop()
    results = {name: results[name] for name in NAMES if name in results}
    record = write_results(options.out, "nexmark", results, settings=settings | {"rows": rows})
    shown = {name: {k: v for k, v in found.items() if k != "runs"} for name, found in record["results"].items()}
    json.dump(shown, sys.stdout, indent=2)
    print()


def earlier(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results of queries that a file has from earlier runs with the same settings."""
    if not path.is_file():
        return {}
    record: dict[str, Any] = json.loads(path.read_text())
    same = all(record["settings"].get(name) == value for name, value in settings.items())
    return dict(record["results"]) if same else {}


def measure(spark: SparkSession, data: Path, one: Query, options: argparse.Namespace) -> dict[str, Any]:
    """One query: checked, then all pipelines in turns.

    Raises:
        SystemExit: the changelog is wrong, or Spark's own join has another number of rows.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-join-bench-") as folder:
        work = Path(folder)
        for reader in READERS:
            own = work / reader
            changes = pipelines.ours(spark, data, one, own, reader=reader, emit=options.emit)
            pipelines.run(changes, own, sink="parquet")
            found, rows, different = compared(one, data, sorted((own / "result").glob("*.parquet")))
            print(f"{one.name}: {found:,} changes, {rows:,} rows by DuckDB", file=sys.stderr, flush=True)
            if different:
                raise SystemExit(f"{one.name}: the folded changelog is not DuckDB's result: {different[:5]}")

    def once(name: str, case: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            measured = case()
            print(f"{one.name} {name}: {measured['seconds']:.1f} s", file=sys.stderr, flush=True)
            return measured

        return run

    def query_by(reader: Reader) -> Callable[[], dict[str, Any]]:
        options_of_ours: dict[str, Any] = {"reader": reader, "emit": options.emit}
        return lambda: pipelines.fresh(lambda work: pipelines.ours(spark, data, one, work, **options_of_ours))

    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "ours": query_by("spark"),
        "ours_arrow": query_by("arrow"),
        "no_op": lambda: pipelines.fresh(lambda _: pipelines.no_op(spark, data, one)),
    }
    if not options.no_spark:
        cases["spark"] = lambda: pipelines.fresh(lambda _: pipelines.sparks(spark, data, one))
    runs = interleave({name: once(name, case) for name, case in cases.items()}, options.rounds, warmup=options.warmup)
    if "spark" in runs and {r["rows_out"] for r in runs["spark"]} != {rows}:
        raise SystemExit(f"{one.name}: Spark's own join has {runs['spark'][0]['rows_out']} rows, DuckDB {rows}")
    events = runs["ours"][0]["rows_in"]  # Spark counts files where Arrow reads them
    rates = {name: summarise(events / r["seconds"] for r in rs) for name, rs in runs.items()}
    result: dict[str, Any] = {
        "events_per_second": rates,
        "rows_out": rows,
        "over_no_op": ratio(rates["ours"], rates["no_op"]),
        "arrow_over_no_op": ratio(rates["ours_arrow"], rates["no_op"]),
    }
    if "spark" in rates:
        result["over_spark"] = ratio(rates["ours"], rates["spark"])
        result["arrow_over_spark"] = ratio(rates["ours_arrow"], rates["spark"])
    result |= {"rounds": options.rounds, "warmup": options.warmup}
    return result | {"load_1_minute": round(os.getloadavg()[0], 2), "runs": runs}


if __name__ == "__main__":
    main()
