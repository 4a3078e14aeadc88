"""A temporal join of orders and rates on two cores, from the same CSV files: ours on Spark against Flink SQL.

    SELECT o.id, o.amount, r.rate FROM orders o JOIN rates FOR SYSTEM_TIME AS OF o.t r ON o.currency = r.currency

Times are from the start of the job to its end, planning included, in a JVM that has run it `--warmup` times before; the
rows go to a sink that drops them. Flink has its state on the heap and no checkpoints, ours writes its state durably.
Spark's watermark moves between micro-batches, so two more micro-batches with a row each, a day later, bring out what is
left; Flink ends its watermark by itself. Before that, each writes its result once, and count and sums are those of
DuckDB's ASOF join. Rows per second are those of both inputs; both have the same two cores.

    python -m benchmarks.flink.temporal [--rows 4000000] [--batch 1000000] [--rounds 3] [--warmup 2]
        [--parallelism 1 2]
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from pyarrow import csv
from pyspark.sql import DataFrame, SparkSession

import gpu_ops
from benchmarks.common import again, arguments, interleave, ratio, record, summarise
from benchmarks.flink.run import FLINK_VERSION, run_sql
from benchmarks.spark_queries import Reader, fresh, local_session

COLUMNS = {
    "orders": {"id": "BIGINT", "currency": "BIGINT", "t": "TIMESTAMP", "amount": "BIGINT"},
    "rates": {"currency": "BIGINT", "u": "TIMESTAMP", "rate": "BIGINT"},
}
KEYS = 10_000
START_MS = 1_767_225_600_000  # 2026-01-01
DAY_MS = 86_400_000
Sums = tuple[int, ...]
"""Rows, and the sums of their ids, amounts and rates."""

FLINK = """
CREATE TABLE orders (id BIGINT, currency BIGINT, t TIMESTAMP(3), amount BIGINT,
  WATERMARK FOR t AS t - INTERVAL '2' SECOND) WITH (
  'connector' = 'filesystem', 'format' = 'csv', 'path' = '{data}/orders.csv')

CREATE TABLE rates (currency BIGINT, u TIMESTAMP(3), rate BIGINT, WATERMARK FOR u AS u - INTERVAL '2' SECOND,
  PRIMARY KEY (currency) NOT ENFORCED) WITH (
  'connector' = 'filesystem', 'format' = 'csv', 'path' = '{data}/rates.csv')

CREATE TABLE valued (id BIGINT, amount BIGINT, rate BIGINT) WITH ({sink})

INSERT INTO valued SELECT o.id, o.amount, r.rate FROM orders o
  JOIN rates FOR SYSTEM_TIME AS OF o.t AS r ON o.currency = r.currency
"""


def write(folder: Path, rows: int, files: int) -> Sums:
    """Orders and rates, as many of each, a thousand a second and up to a second out of order; what their join has."""
    rng, half, con = np.random.default_rng(7), rows // 2, duckdb.connect()
    plain = csv.WriteOptions(include_header=False, quoting_style="none")
    for name, columns in COLUMNS.items():
        times = START_MS + np.arange(half) + rng.integers(-1000, 0, half)
        values: dict[str, Any] = {"id": np.arange(half), "currency": rng.integers(0, KEYS, half)}
        values |= {"t": pa.array(times, pa.timestamp("ms")), "amount": rng.integers(0, 1000, half)}
        if name == "rates":
            # of one time of a currency there is one rate, or which counts would depend on the order of reading
            _, once = np.unique(values["currency"] * 2**40 + (times - START_MS), return_index=True)
            values = {"currency": values["currency"], "u": values["t"], "rate": rng.integers(0, 1000, half)}
            table = pa.table(values).take(np.sort(once))
        else:
            table = pa.table(values)
        assert table.column_names == list(columns)
        con.register(name, table)
        csv.write_csv(table, folder / f"{name}.csv", plain)
        (folder / name).mkdir()
        last = pa.table([pa.array([-1] * 2, c.type) if pa.types.is_integer(c.type) else
                         pa.array([START_MS + DAY_MS, START_MS + DAY_MS + 1], c.type) for c in table.columns],
                        table.column_names)  # fmt: skip
        edges = np.linspace(0, table.num_rows, files + 1).astype(int)
        parts = [table.slice(a, b - a) for a, b in itertools.pairwise(edges)] + [last[:1], last[1:]]
        for number, part in enumerate(parts):
            csv.write_csv(part, folder / name / f"part-{number:04d}.csv", plain)
            time.sleep(0.005)  # Spark takes files by their time
    return _sums(
        con, "SELECT id, amount, rate FROM orders o ASOF JOIN rates r ON o.currency = r.currency AND o.t >= r.u"
    )


def _sums(con: duckdb.DuckDBPyConnection, rows: str) -> Sums:
    sums = "SELECT count(*), sum(id), sum(amount), sum(rate)"
    found = con.sql(f"{sums} FROM ({rows}) WHERE id >= 0").fetchall()
    return tuple(map(int, found[0]))


def our_join(spark: SparkSession, data: Path, work: Path, reader: Reader) -> DataFrame:
    """The join, streaming, a file of each input in a micro-batch."""
    inputs = []
    for (name, columns), event_time in zip(COLUMNS.items(), ("t", "u"), strict=True):
        path, ddl = str(data / name), ", ".join(f"{column} {kind}" for column, kind in columns.items())
        if reader == "arrow":
            df = gpu_ops.read_files(spark, path, "csv", ddl, maxFilesPerTrigger=1)
        else:
            df = spark.readStream.schema(ddl).option("multiLine", True).option("maxFilesPerTrigger", 1).csv(path)
        inputs.append(gpu_ops.stream(df, name=name, event_time=event_time, delay="2 seconds"))
    joined = gpu_ops.temporal_join(*inputs, on="currency", state=str(work / "state"))
    return joined.select("id", "amount", "rate")


def main() -> None:
    """Run, check, print, record."""
    parser = arguments(__doc__, "vs_flink_temporal", rounds=3)
    parser.add_argument("--rows", type=int, default=4_000_000, help="of both inputs")
    parser.add_argument("--batch", type=int, default=1_000_000, help="rows in one of our micro-batches")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--parallelism", type=int, nargs="+", default=[1, 2], help="of Flink")
    options = parser.parse_args()
    spark = local_session(**{"spark.sql.session.timeZone": "UTC"})
    data = Path(tempfile.mkdtemp(prefix="gpu-join-data-"))
    try:
        expected = write(data, options.rows, round(options.rows / options.batch))
        cases: dict[str, Callable[[], float]] = {}
        for reader in ("arrow", "spark"):
            check_ours(spark, data, reader, expected)
            cases[f"ours_{reader}"] = lambda reader=reader: our_seconds(spark, data, reader)  # type: ignore[misc]
        check_flink(data, expected)
        for parallelism in options.parallelism:
            cases[f"flink_{parallelism}"] = lambda tasks=parallelism: flink_seconds(data, tasks, options.warmup)  # type: ignore[misc]
        for _ in range(options.warmup - 1):
            for name in ("ours_arrow", "ours_spark"):
                cases[name]()
        for name in ("ours_arrow", "ours_spark"):
            cases[name] = again(cases[name])
        runs = interleave(cases, options.rounds)
    finally:
        shutil.rmtree(data, ignore_errors=True)
        spark.stop()
    rates = {name: summarise(options.rows / seconds for seconds in found) for name, found in runs.items()}
    best = max((name for name in rates if name.startswith("flink")), key=lambda name: rates[name].median)
    over = {name: ratio(rates[name], rates[best]) for name in rates if name.startswith("ours")}
    results = {"rows_per_second": rates, "flink_best": best, "over_flink": over, "result": expected, "runs": runs}
    record(options, "vs_flink_temporal", results, master="local[2]", flink=FLINK_VERSION, keys=KEYS)


def check_ours(spark: SparkSession, data: Path, reader: Reader, expected: Sums) -> None:
    """Our result, written once, is right.

    Raises:
        SystemExit: it is not.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-join-work-") as work:
        joined = our_join(spark, data, Path(work), reader)
        gpu_ops.write_files(
            joined, f"{work}/out", checkpoint=f"{work}/checkpoint", availableNow=True
        ).awaitTermination()
        found = _sums(duckdb.connect(), f"FROM read_parquet('{work}/out/**/*.parquet')")
    if found != expected:
        raise SystemExit(f"ours, {reader}: {found}, {expected} expected")


def check_flink(data: Path, expected: Sums) -> None:
    """Flink's result, written once, is right.

    Raises:
        SystemExit: it is not.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-join-work-") as work:
        sink = f"'connector' = 'filesystem', 'format' = 'csv', 'path' = '{work}/out'"
        run_sql([FLINK.format(data=data, sink=sink).strip()], 2)
        columns = "{id: 'BIGINT', amount: 'BIGINT', rate: 'BIGINT'}"
        parts = [str(part) for part in Path(work, "out").rglob("*") if part.is_file() and part.stat().st_size]
        found = _sums(duckdb.connect(), f"FROM read_csv({parts}, header=false, columns={columns})")
    if found != expected:
        raise SystemExit(f"Flink: {found}, {expected} expected")


def our_seconds(spark: SparkSession, data: Path, reader: Reader) -> float:
    """From the building of the query to its end."""
    before = time.perf_counter()
    fresh(lambda work: our_join(spark, data, work, reader))
    return time.perf_counter() - before


def flink_seconds(data: Path, parallelism: int, warmup: int) -> float:
    """The last of several runs in one JVM."""
    script = FLINK.format(data=data, sink="'connector' = 'blackhole'").strip()
    return run_sql([script] * (warmup + 1), parallelism)[-1]["seconds"]


if __name__ == "__main__":
    main()
