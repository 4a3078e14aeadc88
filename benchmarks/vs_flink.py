"""Left join with 20 % updates and deletes: our query on Spark `local[2]` against Flink 2.3.0, same CSV files.

Both read the files, join, and write to a sink that only counts. Flink does so twice: `flink_sql` reads them by
its own file connector and CSV format, as ours by Spark's; `flink_lean` by a parser of the benchmark that makes
Flink's internal rows out of bytes, which no user has. Start-up is left out on both sides: Flink is measured
from the first row read to the last row written, ours from the start of the first micro-batch to the end of the
last; each in a JVM that has read the same changes `--warmup` times before. Flink runs without checkpoints and
with its state on the heap; ours writes its state durably. Both folded results are checked against the counts
the generator knows.

    python -m benchmarks.vs_flink [--rows 2000000] [--batch 500000] [--rounds 3] [--warmup 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks import changes
from benchmarks.common import interleave, ratio, summarise, write_results
from benchmarks.flink.run import run_flink
from benchmarks.spark_queries import fresh, local_session, our_join

Source = Literal["sql", "lean"]
SOURCES: Final[tuple[Source, ...]] = ("sql", "lean")
EMITS: Final = ("per_batch", "per_event")


def main() -> None:
    """Run, check, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="changes, both inputs together")
    parser.add_argument("--batch", type=int, default=500_000, help="changes in one of our micro-batches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="runs in a JVM before the one that counts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "vs_flink.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data = Path(folder)
        counts = changes.write(changes.generate(options.rows), data, files=round(options.rows / options.batch))
        spark = local_session()

        def ours(emit: str) -> dict[str, Any]:
            result = fresh(lambda work: our_join(spark, data, work, 1, emit=emit))
            if result["folded_rows"] != counts.rows:
                raise SystemExit(f"wrong result: {result['folded_rows']} rows, {counts.rows} expected")
            return result

        def flink(source: Source, parallelism: int, *, mini_batch: bool = False) -> dict[str, Any]:
            result = run_flink(data, parallelism, mini_batch, source=source, repeat=options.warmup + 1)
            return {
                "seconds": result["seconds"][-1],
                "cpu_seconds": result["cpu_seconds"][-1],
                "rows_in": result["rows_in"],
                "folded": result["folded"],
            }

        cases: dict[str, Callable[[], dict[str, Any]]] = {}
        for emit in EMITS:
            cases[emit] = partial(ours, emit)
        for source in SOURCES:
            cases[f"flink_{source}_1"] = partial(flink, source, 1)
            cases[f"flink_{source}_2"] = partial(flink, source, 2)
            cases[f"flink_{source}_2_mini_batch"] = partial(flink, source, 2, mini_batch=True)
        for _ in range(options.warmup):
            for emit in EMITS:
                ours(emit)
        runs = interleave(cases, options.rounds)
        spark.stop()
    rates = {name: summarise(r["rows_in"] / r["seconds"] for r in rs) for name, rs in runs.items()}
    results: dict[str, Any] = {"changes_per_second": rates}
    for source in SOURCES:
        # Flink's best parallelism and mode
        best = max((name for name in rates if name.startswith(f"flink_{source}")), key=lambda name: rates[name].median)
        results[f"flink_{source}"] = {"best": best} | {emit: ratio(rates[emit], rates[best]) for emit in EMITS}
    results["runs"] = runs
    settings = {k: v for k, v in vars(options).items() if k != "out"} | {"master": "local[2]"}
    record = write_results(options.out, "vs_flink", results, settings=settings)
    json.dump({k: v for k, v in record["results"].items() if k != "runs"}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
