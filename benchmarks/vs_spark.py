"""Interval join, inner and left: our query against Spark's own stream-stream join, same Parquet files, `local[2]`.

Spark runs with its default state store, and with RocksDB and its newest join state format (4 from Spark 4.3 on).
Both sides have a watermark of 10 s and bounds of plus and minus 10 s; a micro-batch is one file of each input.
Measured is the time from the start of the first full micro-batch to the end of the last, after a small query of
each kind; both keep their state durably. The rows that come
out are compared: their number and the exclusive or of their hashes.

With `--cold` each run has a process of its own with a plain `SparkSession`, without a query before it: measured is the
time from the start of the query to its end, the first micro-batch with all that it starts and compiles included.

Our join reads by Spark's Parquet reader, and once more by `gpu_ops.read_files`.

    python -m benchmarks.vs_spark [--files 12] [--rows 500000] [--rounds 3] [--rocksdb-rounds 1] [--cold]
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import gpu_ops
from benchmarks import interval_data
from benchmarks.common import interleave, ratio, summarise, write_results
from benchmarks.spark_queries import local_session

COLUMNS = ("lk", "lt", "lv", "rk", "rt", "rv")
BOUND = "10 seconds"
DELAY = "10 seconds"
FORMAT = "4" if tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3) else "3"
"""Of the join state in RocksDB: the newest that this Spark has."""
PEERS = ("ours", "ours_read_files", "default")
"""By Spark's reader, by ours, and Spark's own join."""
STORES = "org.apache.spark.sql.execution.streaming.state."
"""Spark's package of state stores."""


def read(spark: SparkSession, data: Path) -> tuple[DataFrame, DataFrame]:
    """Both streams, a file of each in a micro-batch."""
    inputs = []
    for side in ("left", "right"):
        schema = f"{side[0]}k BIGINT, {side[0]}t TIMESTAMP, {side[0]}v BIGINT"
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        inputs.append(reader.parquet(str(data / side)).withWatermark(f"{side[0]}t", DELAY))
    return inputs[0], inputs[1]


def read_files(spark: SparkSession, data: Path) -> list[gpu_ops.Stream]:
    """Reads the inputs by `gpu_ops.read_files`."""
    inputs = []
    for side in ("left", "right"):
        schema = f"{side[0]}k BIGINT, {side[0]}t TIMESTAMP, {side[0]}v BIGINT"
        files = gpu_ops.read_files(spark, str(data / side), "parquet", schema, maxFilesPerTrigger=1)
        inputs.append(gpu_ops.stream(files, event_time=f"{side[0]}t", delay=DELAY))
    return inputs


def ours(spark: SparkSession, data: Path, work: Path, how: str, reader: Any = read) -> DataFrame:
    """The interval join of this pack; late rows are dropped, as Spark does."""
    left, right = reader(spark, data)
    return gpu_ops.interval_join(
        left, right, on=[("lk", "rk")], how=how, lower=f"-{BOUND}", upper=BOUND, late="drop", state=str(work / "state")
    )


def sparks(spark: SparkSession, data: Path, how: str) -> DataFrame:
    """Spark's own join of the inputs."""
    left, right = read(spark, data)
    close = f"rt >= lt - INTERVAL {BOUND} AND rt <= lt + INTERVAL {BOUND}"
    return left.join(right, f.expr(f"lk = rk AND {close}"), "leftOuter" if how == "left" else how)


def run(df: DataFrame, work: Path, least: int) -> dict[str, Any]:
    """Run a query over all files; micro-batches of fewer than ``least`` rows are not timed."""
    measured = df.observe("out", f.count("*").alias("rows"), f.bit_xor(f.xxhash64(*COLUMNS)).alias("hash"))
    writer = measured.writeStream.format("noop").option("checkpointLocation", str(work / "checkpoint"))
    begun = time.perf_counter()
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    whole = time.perf_counter() - begun
    rows, mixed = 0, 0
    for p in query.recentProgress:
        found = p["observedMetrics"].get("out")
        if found is not None:
            rows, mixed = rows + found["rows"], mixed ^ (found["hash"] or 0)
    full = [p for p in query.recentProgress if rows_in(p) >= least]
    begins = [dt.datetime.fromisoformat(p["timestamp"]).timestamp() for p in full]
    ends = [b + p["durationMs"]["triggerExecution"] / 1e3 for b, p in zip(begins, full, strict=True)]
    return {
        "seconds": max(ends) - min(begins),
        "whole_seconds": whole,
        "rows_in": sum(map(rows_in, full)),
        "batch_seconds": [round(e - b, 3) for b, e in zip(begins, ends, strict=True)],
        "rows_out": rows,
        "hash": mixed,
    }


def rows_in(progress: Any) -> int:
    """Rows that a micro-batch took; Spark counts files where `gpu_ops.read_files` reads them."""
    ours = [found["metrics"] for name, found in progress["observedMetrics"].items() if name != "out"]
    taken = [value for found in ours for name, value in found.items() if name.endswith("_rows_in")]
    return sum(taken) if ours else int(progress["numInputRows"])


def case(spark: SparkSession, data: Path, how: str, peer: str, least: int) -> dict[str, Any]:
    """One run in a working folder of its own."""
    store = "RocksDBStateStoreProvider" if peer == "rocksdb" else "HDFSBackedStateStoreProvider"
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", STORES + store)
    spark.conf.set("spark.sql.streaming.join.stateFormatVersion", FORMAT if peer == "rocksdb" else "2")
    work = Path(tempfile.mkdtemp(prefix="gpu-join-bench-"))
    try:
        readers = {"ours": read, "ours_read_files": read_files}
        made = ours(spark, data, work, how, readers[peer]) if peer in readers else sparks(spark, data, how)
        return run(made, work, least)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def cold(data: Path, how: str, peer: str, least: int) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vs_spark", "--one", str(data), how, peer, str(least)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"seconds": found["whole_seconds"]}


def one(data: str, how: str, peer: str, least: str) -> None:
    """Runs one measurement for `cold`, with the result on standard output."""
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", "2")
    spark = builder.config("spark.driver.memory", "4g").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    print(json.dumps(case(spark, Path(data), how, peer, int(least))))
    spark.stop()


def main() -> None:
    """Run, compare, print, record."""
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--rows", type=int, default=500_000, help="in a file; a micro-batch has two")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rocksdb-rounds", type=int, default=1, help="0 leaves RocksDB out")
    parser.add_argument("--how", nargs="+", default=["inner", "left"])
    parser.add_argument("--rocksdb-how", nargs="*", default=["inner", "left"], help="those also run on RocksDB")
    parser.add_argument("--cold", action="store_true", help="start-up included, in processes of their own")
    parser.add_argument("--out", type=Path, help="by default results/vs_spark.json, with --cold vs_spark_cold.json")
    options = parser.parse_args()
    name = "vs_spark_cold" if options.cold else "vs_spark"
    out = options.out or Path(__file__).parent / "results" / f"{name}.json"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data, small = Path(folder, "data"), Path(folder, "small")
        interval_data.write(data, files=options.files, rows=options.rows, keys=options.keys)
        interval_data.write(small, files=4, rows=options.rows // 5, keys=options.keys // 5)
        spark = None if options.cold else local_session()
        for how in options.how:
            # what is measured is a query that has been running: processes up, code compiled
            for peer in PEERS if spark is not None else ():
                case(spark, small, how, peer, 2)
            results[how] = compare(spark, data, how, options)
        if spark is not None:
            spark.stop()
    settings = {
        "files": options.files, "rows_per_micro_batch": 2 * options.rows, "keys": options.keys,
        "bound": BOUND, "watermark": DELAY, "rounds": options.rounds, "rocksdb_rounds": options.rocksdb_rounds,
        "format": FORMAT, "master": "local[2]", "cold": options.cold,
    }  # fmt: skip
    record = write_results(out, name, results, settings=settings)
    shown = {how: {k: v for k, v in found.items() if k != "runs"} for how, found in record["results"].items()}
    json.dump(shown, sys.stdout, indent=2)
    print()


def compare(spark: SparkSession | None, data: Path, how: str, options: argparse.Namespace) -> dict[str, Any]:
    """One join type: our runs and Spark's in turns; without a session each in a process of its own.

    Raises:
        SystemExit: they say different rows.
    """
    least = options.rows

    def once(peer: str) -> dict[str, Any]:
        found = cold(data, how, peer, least) if spark is None else case(spark, data, how, peer, least)
        print(f"{how} {peer}: {found['seconds']:.1f} s", file=sys.stderr, flush=True)
        return found

    runs = interleave({peer: lambda peer=peer: once(peer) for peer in PEERS}, options.rounds)
    if options.rocksdb_rounds and how in options.rocksdb_how:
        more = interleave({peer: lambda peer=peer: once(peer) for peer in ("rocksdb", "ours")}, options.rocksdb_rounds)
        runs["rocksdb"], runs["ours"] = more["rocksdb"], [*runs["ours"], *more["ours"]]
    said = {(r["rows_out"], r["hash"]) for found in runs.values() for r in found}
    if len(said) > 1:
        raise SystemExit(f"different rows: {said}")
    rates = {peer: summarise(r["rows_in"] / r["seconds"] for r in found) for peer, found in runs.items()}
    result: dict[str, Any] = {"rows_per_second": rates, "rows_out": next(iter(said))[0]}
    for peer in ("default", "rocksdb"):
        if peer in rates:
            result[f"times_{peer}"] = ratio(rates["ours"], rates[peer])
            result[f"read_files_times_{peer}"] = ratio(rates["ours_read_files"], rates[peer])
    return result | {"runs": runs}


if __name__ == "__main__":
    main()
