"""Left join with 20 % updates and deletes: our query on Spark `local[2]` against Flink 2.3.0, same CSV files.

Both read the files, join, and write to a sink that only counts. Start-up is left out on both sides: Flink is
measured from the first row read to the last row written, in a JVM that has run the job before; ours from the
start of the first micro-batch to the end of the last, in a session that has run the query before. Flink runs
without checkpoints and with its state on the heap; ours writes its state durably. Both folded results are
checked against the counts the generator knows.

    python -m benchmarks.vs_flink [--rows 2000000] [--batch 500000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import changes
from benchmarks.common import interleave, ratio, summarise, write_results
from benchmarks.flink.run import run_flink
from benchmarks.spark_queries import fresh, local_session, our_join


def main() -> None:
    """Run, check, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="changes, both inputs together")
    parser.add_argument("--batch", type=int, default=500_000, help="changes in one of our micro-batches")
    parser.add_argument("--rounds", type=int, default=3)
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

        def flink(parallelism: int, *, mini_batch: bool) -> dict[str, Any]:
            # the first run in a JVM compiles, the second is the one that counts
            result = run_flink(data, parallelism, mini_batch, repeat=2)
            return {
                "seconds": result["seconds"][-1],
                "rows_in": result["rows_in"],
                "folded": result["folded"],
            }

        cases = {
            "per_batch": lambda: ours("per_batch"),
            "flink_1": lambda: flink(1, mini_batch=False),
            "per_event": lambda: ours("per_event"),
            "flink_2": lambda: flink(2, mini_batch=False),
            "flink_2_mini_batch": lambda: flink(2, mini_batch=True),
        }
        ours("per_batch")  # starts workers and servers
        runs = interleave(cases, options.rounds)
        spark.stop()
    rates = {name: summarise(r["rows_in"] / r["seconds"] for r in rs) for name, rs in runs.items()}
    best = max((name for name in rates if name.startswith("flink")), key=lambda name: rates[name].median)
    results = {
        "changes_per_second": rates,
        "flinks_best": best,
        "per_batch_over_flink": ratio(rates["per_batch"], rates[best]),
        "per_event_over_flink": ratio(rates["per_event"], rates[best]),
        "runs": runs,
    }
    settings = {k: v for k, v in vars(options).items() if k != "out"} | {"master": "local[2]"}
    record = write_results(options.out, "vs_flink", results, settings=settings)
    json.dump({k: v for k, v in record["results"].items() if k != "runs"}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
