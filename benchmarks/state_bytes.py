"""What a row of join state takes: ours, Spark's stores, Flink's heap, and a table of DuckDB's, for three kinds of rows.

Two inputs of insertions with keys that never meet are read as Parquet (Flink: CSV) and joined by an inner join, so that
all rows are state and none comes out. Bytes are those that each reports, by the rows of both inputs:

- ours: the metrics `state_bytes` of both inputs (memory of the state servers), and the state folder (stored);
- Spark: ``memoryUsedBytes`` of its default store, and ``rocksdbSstFileSize`` of RocksDB (format 3 or newer);
- Flink: live objects on the heap at the end (after a collection), less those of the same job over a hundred rows;
- DuckDB: the used blocks of a database file with both inputs as tables, after a checkpoint.

    python -m benchmarks.state_bytes [--rows 1000000] [--kinds int text wide]
        [--stores ours default rocksdb flink duckdb]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from pyspark.sql import SparkSession

import gpu_ops
from benchmarks.common import arguments, write_results
from benchmarks.flink.run import FLINK_VERSION, run_sql
from benchmarks.spark_queries import local_session, run
from benchmarks.vs_spark import FORMAT, STORES

KINDS = {
    "int": {"v": "bigint"},
    "text": {"v": "string"},
    "wide": {**{f"n{n}": "bigint" for n in range(8)}, "a": "string", "b": "string"},
}
"""The columns besides the key ``k bigint``; texts have 16 to 24 bytes."""


def schema(kind: str) -> str:
    """The schema of an input, as SQL writes it."""
    return ", ".join(f"{name} {type_}" for name, type_ in {"k": "bigint", **KINDS[kind]}.items())


def write(folder: Path, kind: str, rows: int) -> int:
    """Both inputs as Parquet and CSV; the bytes of their rows in Arrow."""
    rng, size = np.random.default_rng(3), 0
    for side in range(2):
        keys = rng.permutation(rows // 2) * 2 + side
        columns: dict[str, Any] = {"k": keys}
        for number, (name, type_) in enumerate(KINDS[kind].items()):
            values = rng.integers(0, 1 << 40, keys.size)
            columns[name] = (
                values if type_ == "bigint" else [f"{'x' * (value % 9)}{value:015d}{number}" for value in values]
            )
        table = pa.table(columns)
        size += table.nbytes
        name = "lr"[side]
        (folder / name).mkdir(parents=True)
        pq.write_table(table, folder / name / "0.parquet")
        plain = csv.WriteOptions(include_header=False, quoting_style="none")
        for part, suffix in ((table, ""), (table.slice(0, 50), "_small")):
            csv.write_csv(part, folder / f"{name}{suffix}.csv", plain)
    return size


def ours(spark: SparkSession, data: Path, kind: str, rows: int) -> dict[str, float]:
    """Memory and files of our state."""
    with tempfile.TemporaryDirectory(prefix="gpu-join-bench-") as folder:
        work = Path(folder)
        left, right = (gpu_ops.read_files(spark, str(data / side), "parquet", schema(kind)) for side in "lr")
        done = run(gpu_ops.join(left, right, on="k", suffixes=("", "_r"), state=str(work / "state")), work)
        stored = sum(path.stat().st_size for path in (work / "state").rglob("*") if path.is_file())
    return {"memory": sum(done["state_bytes"].values()) / rows, "stored": stored / rows}


def sparks(spark: SparkSession, data: Path, kind: str, rows: int, store: str) -> dict[str, float]:
    """The bytes of state that Spark's own join reports."""
    rocksdb = store == "rocksdb"
    provider = "RocksDBStateStoreProvider" if rocksdb else "HDFSBackedStateStoreProvider"
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", STORES + provider)
    spark.conf.set("spark.sql.streaming.join.stateFormatVersion", FORMAT if rocksdb else "2")
    spark.conf.set("spark.sql.streaming.stateStore.rocksdb.compactOnCommit", "true")
    left, right = (spark.readStream.schema(schema(kind)).parquet(str(data / side)) for side in "lr")
    with tempfile.TemporaryDirectory(prefix="gpu-join-bench-") as folder:
        writer = left.join(right, "k").writeStream.format("noop").option("checkpointLocation", folder)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        state = query.recentProgress[-1]["stateOperators"][0]
    if rocksdb:
        return {"stored": state["customMetrics"]["rocksdbSstFileSize"] / rows}
    return {"memory": state["memoryUsedBytes"] / rows}


FLINK = """
CREATE TABLE l ({columns}) WITH ('connector' = 'filesystem', 'format' = 'csv', 'path' = '{data}/l{small}.csv')

CREATE TABLE r ({columns}) WITH ('connector' = 'filesystem', 'format' = 'csv', 'path' = '{data}/r{small}.csv')

CREATE TABLE o ({columns}) WITH ('connector' = 'blackhole')

INSERT INTO o SELECT l.* FROM l JOIN r ON l.k = r.k
"""


def flink(data: Path, kind: str, rows: int) -> dict[str, float]:
    """The bytes by which Flink's heap grows beyond that with a few rows."""
    live = []
    for small in ("_small", ""):
        script = FLINK.format(columns=schema(kind), data=data, small=small).strip()
        live.append(run_sql([script], 1, heap="6g", heap_at_end=True)[0]["live_bytes"])
    return {"memory": (live[1] - live[0]) / rows}


def duck(data: Path, rows: int) -> dict[str, float]:
    """The bytes of a DuckDB database file with the rows."""
    with tempfile.TemporaryDirectory() as folder, duckdb.connect(f"{folder}/db") as connection:
        for side in "lr":
            connection.sql(f"CREATE TABLE {side} AS FROM '{data}/{side}/0.parquet'")
        connection.sql("CHECKPOINT")
        block, used = connection.sql("SELECT block_size, used_blocks FROM pragma_database_size()").fetchall()[0]
    return {"stored": block * used / rows}


def measured(spark: SparkSession, kind: str, rows: int, stores: Sequence[str]) -> dict[str, dict[str, float]]:
    """Bytes per row, by store."""
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data = Path(folder)
        arrow = {"memory": write(data, kind, rows) / rows}
        cases: dict[str, Callable[[], dict[str, float]]] = {
            "ours": lambda: ours(spark, data, kind, rows),
            "default": lambda: sparks(spark, data, kind, rows, "default"),
            "rocksdb": lambda: sparks(spark, data, kind, rows, "rocksdb"),
            "flink": lambda: flink(data, kind, rows),
            "duckdb": lambda: duck(data, rows),
        }
        return {"arrow": arrow, **{store: cases[store]() for store in stores}}


def main() -> None:
    """Runs the benchmark, prints and records its results."""
    parser = arguments(__doc__, "state_bytes")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of both inputs together")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    stores = ("ours", "default", "rocksdb", "flink", "duckdb")
    parser.add_argument("--stores", nargs="+", default=stores, choices=stores)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    spark = local_session()
    for kind in options.kinds:
        results[kind] = measured(spark, kind, options.rows, options.stores)
        print(kind, json.dumps(results[kind]), file=sys.stderr, flush=True)
    spark.stop()
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    settings |= {"flink": FLINK_VERSION, "columns": {kind: schema(kind) for kind in KINDS}, "join_state_format": FORMAT}
    write_results(options.out, "state_bytes", results, settings=settings)


if __name__ == "__main__":
    main()
