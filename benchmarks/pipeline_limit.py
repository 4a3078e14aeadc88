"""How near the whole query comes to the same Spark pipeline with a no-op `mapInArrow`, on `local[2]`.

And how near, or beyond, where Arrow reads its files (`gpu_ops.read_files`); the no-op pipeline has Spark's reader. Then
with `read_files` into Parquet files: by `gpu_ops.write_files`, and by Spark's own sink.

python -m benchmarks.pipeline_limit [--rows 4000000] [--batch 1000000] [--rounds 3] [--warmup 3]
       [--cases query query_arrow parquet_by_tasks parquet_by_spark no_op scan]

With ``--rows 80000 --batch 2000 --cases query query_arrow no_op scan`` it tells what a small micro-batch costs, over
Spark's scan of it alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyspark.sql import DataFrame

from benchmarks import changes
from benchmarks.common import arguments, interleave, ratio, record, summarise
from benchmarks.spark_queries import fresh, local_session, no_op, our_join, scan


def main() -> None:
    """Runs the benchmark, prints and records its results."""
    parser = arguments(__doc__, "pipeline_limit", rounds=3)
    parser.add_argument("--rows", type=int, default=4_000_000, help="changes, both inputs together")
    parser.add_argument("--batch", type=int, default=1_000_000, help="changes in a micro-batch")
    parser.add_argument("--warmup", type=int, default=3, help="runs of each before; the JVM compiles for long")
    parser.add_argument("--emit", default="per_batch", choices=["per_batch", "per_event"])
    parser.add_argument("--cases", nargs="+", help="only these")
    options = parser.parse_args()
    batches = max(1, round(options.rows / options.batch))
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data = Path(folder)
        # one file of each input in a micro-batch: one source partition for each core
        changes.write(changes.generate(options.rows), data, files=batches)
        spark = local_session()

        def arrow(work: Path) -> DataFrame:
            return our_join(spark, data, work, 1, emit=options.emit, reader="arrow")

        cases = {
            "query": lambda: fresh(lambda work: our_join(spark, data, work, 1, emit=options.emit)),
            "query_arrow": lambda: fresh(arrow),
            "parquet_by_tasks": lambda: fresh(arrow, "write_files"),
            "parquet_by_spark": lambda: fresh(arrow, "parquet"),
            "no_op": lambda: fresh(lambda _: no_op(spark, data, 1, 2)),
            "scan": lambda: fresh(lambda _: scan(spark, data, 1)),
        }
        chosen = {name: case for name, case in cases.items() if name in (options.cases or cases)}
        runs = interleave(chosen, options.rounds, warmup=options.warmup)
        spark.stop()
    rates = {name: summarise(r["rows_in"] / r["seconds"] for r in rs) for name, rs in runs.items()}
    ratios = {
        "query_over_no_op": ("query", "no_op"),
        "query_arrow_over_no_op": ("query_arrow", "no_op"),
        "write_files_over_spark_parquet": ("parquet_by_tasks", "parquet_by_spark"),
        **{f"{name}_times_scan": ("scan", name) for name in ("query", "query_arrow", "no_op")},
    }
    results = {
        "rows_per_second": rates,
        **{name: ratio(rates[a], rates[b]) for name, (a, b) in ratios.items() if a in rates and b in rates},
        "runs": runs,
    }
    record(options, "pipeline_limit", results, master="local[2]")


if __name__ == "__main__":
    main()
