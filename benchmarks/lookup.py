"""A stream against a static table on `local[2]`: `gpu_ops.lookup_join` beside Spark's stream-static broadcast join.

Both read the same Parquet files by Spark's reader, keep all rows of the stream, and write to Spark's no-op sink. What
is measured is the whole of it: from the call that builds the query to the end of its last micro-batch, with the table
read and loaded (by us into the state, once; by Spark into a broadcast, in each micro-batch). `stream_only_seconds` is
the time of our micro-batches behind the first, which loads the table.

`--table 20000000 --memory 1g` (Spark's own default) is what does not fit: each case runs in a process of its own then,
and what fails is recorded with its error.

    python -m benchmarks.lookup [--rows 1000000] [--table 10000000] [--batches 4] [--rounds 3] [--memory 8g] [--alone]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import gpu_ops
from benchmarks.common import arguments, interleave, ratio, record, summarise
from benchmarks.spark_queries import local_session

CLICKS = "id bigint, item bigint, amount double"
CASES = ("lookup_join", "broadcast_join")
FILES = 4
"""Of the table."""


def write(folder: Path, rows: int, table: int, batches: int) -> int:
    """The stream's files, one a micro-batch, and the table's; how many rows of the stream find one."""
    rng, found = np.random.default_rng(3), 0
    for name in ("clicks", "items"):
        (folder / name).mkdir()
    for number in range(batches):
        items = rng.integers(0, table + table // 10, rows // batches)
        found += int((items < table).sum())
        ids = np.arange(items.size) + number * items.size
        clicks = pa.table({"id": ids, "item": items, "amount": rng.random(items.size)})
        pq.write_table(clicks, folder / "clicks" / f"{number:04d}.parquet")
    for number, items in enumerate(np.array_split(rng.permutation(table), FILES)):
        columns = {"item": items, "price": items / 7, "shop": items % 1000}
        pq.write_table(pa.table(columns), folder / "items" / f"{number}.parquet")
    return found


def enriched(spark: SparkSession, case: str, data: Path, work: Path) -> DataFrame:
    """The stream with the table's rows."""
    clicks = spark.readStream.schema(CLICKS).option("maxFilesPerTrigger", 1).parquet(str(data / "clicks"))
    items = spark.read.parquet(str(data / "items"))
    if case == "broadcast_join":
        return clicks.join(f.broadcast(items), "item", "left")
    return gpu_ops.lookup_join(clicks, items, "item", how="left", state=str(work / "state"), name="enriched")


def once(spark: SparkSession, case: str, data: Path, found: int | None = None) -> dict[str, Any]:
    """Seconds of a query, and of its micro-batches; ``found`` is how many rows have to have a price."""
    with tempfile.TemporaryDirectory(prefix="gpu-join-bench-") as work:
        begun = time.perf_counter()
        rows = enriched(spark, case, data, Path(work))
        rows = rows.observe("counted", f.count("price").alias("found"), f.count("*").alias("rows"))
        writer = rows.writeStream.format("noop").option("checkpointLocation", f"{work}/checkpoint")
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        seconds = time.perf_counter() - begun
        progress = [p for p in query.recentProgress if p["numInputRows"]]
    counted = [p["observedMetrics"]["counted"] for p in progress]
    if found is not None and sum(row["found"] for row in counted) != found:
        raise SystemExit(f"{case}: {counted}, {found} with a price expected")
    batches = [p["durationMs"]["triggerExecution"] / 1e3 for p in progress]
    return {"seconds": seconds, "batch_seconds": batches}


def alone(case: str, data: Path, found: int, memory: str) -> dict[str, Any]:
    """Runs the measurement in a process of its own; the error if it fails."""
    command = [sys.executable, "-m", "benchmarks.lookup", "--one", case, "--data", str(data), "--memory", memory]
    done = subprocess.run([*command, "--found", str(found)], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said
    lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line or "Exception" in line]
    memory_lines = [line for line in lines if "memory" in line.lower()]
    return {"failed": (memory_lines or lines or done.stderr.splitlines())[-1][:300]}


def main() -> None:
    """Run, check, print, record."""
    parser = arguments(__doc__, "lookup", rounds=3)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the stream")
    parser.add_argument("--table", type=int, default=10_000_000, help="rows of the table")
    parser.add_argument("--batches", type=int, default=4, help="micro-batches of the stream")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--memory", default="8g", help="of the JVM")
    parser.add_argument("--alone", action="store_true", help="each case once, in a process of its own")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = {"spark.driver.memory": options.memory}
    if options.one:
        print(json.dumps(once(local_session(**settings), options.one, options.data, options.found)))
        return
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data = Path(folder)
        found = write(data, options.rows, options.table, options.batches)
        results: dict[str, Any] = {}
        if options.alone:
            results = {case: alone(case, data, found, options.memory) for case in CASES}
        else:
            spark = local_session(**settings)
            cases = {case: (lambda case=case: once(spark, case, data, found)) for case in CASES}
            runs = interleave(cases, options.rounds, options.warmup)
            spark.stop()
            rates = {case: summarise(options.rows / run["seconds"] for run in done) for case, done in runs.items()}
            streamed = [sum(run["batch_seconds"][1:]) for run in runs["lookup_join"]]
            results = {
                "stream_rows_per_second": rates,
                "lookup_over_broadcast": ratio(rates["lookup_join"], rates["broadcast_join"]),
                "stream_only_seconds": summarise(streamed),
                "runs": runs,
            }
    record(options, "lookup", results, "one", "data", "found", master="local[2]")


if __name__ == "__main__":
    main()
