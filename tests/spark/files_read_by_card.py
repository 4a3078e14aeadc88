"""The same Parquet files read by state servers with an emulated card, and by tasks; writes what was found as JSON.

``test_files_read_by_card.py`` runs ``python files_read_by_card.py FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gpu_ops
from benchmarks.spark_queries import local_session
from gpu_ops import stream
from gpu_ops.spark.driver import process
from gpu_ops.state import blocks

ORDERS = "op STRING, id BIGINT, note STRING, at TIMESTAMP, day DATE, price DECIMAL(9,2), raw BINARY, f FLOAT"
STOCKS = "id BIGINT, n INT, tags ARRAY<STRING>"
ROWS = 3000
BATCHES = 4


def write(folder: Path, batches: range) -> None:
    """Changes of orders and stocks, a file of each for a micro-batch; one of each is not what was declared."""
    for number in batches:
        rng = np.random.default_rng(number)
        ids = [*map(int, rng.permutation(ROWS) + number * ROWS // 3)]  # some again
        at = [None if n % 7 == 0 else n * 1_000_003 for n in ids]
        orders = pa.table({
            "op": ["+I"] * ROWS, "id": ids, "note": [f"ä{n % 5} {n}" if n % 3 else None for n in ids],
            "at": pa.array(at, pa.timestamp("us", "UTC")), "day": pa.array(ids, pa.int32()).cast(pa.date32()),
            "price": pa.array([Decimal(n) / 4 for n in ids], pa.decimal128(9, 2)),
            "raw": [bytes([n % 256, 255]) for n in ids], "f": pa.array([n / 8 for n in ids], pa.float32()),
        })  # fmt: skip
        size = pa.int16() if number == 1 else pa.int32()  # which Arrow makes of it
        stocks = pa.table({"id": ids, "n": pa.array([n % 1000 for n in ids], size), "tags": [["a", None]] * ROWS})
        for name, table in (("orders", orders), ("stocks", stocks), ("plain", stocks.drop_columns("tags"))):
            (folder / name).mkdir(exist_ok=True, parents=True)
            pq.write_table(table, folder / name / f"{number}.parquet", row_group_size=1000)
            os.utime(folder / name / f"{number}.parquet", (1_700_000_000 + number,) * 2)


def joined(spark: Any, data: Path, work: Path, stocks: str, backend: str) -> Any:
    """A left join."""
    read = {
        name: gpu_ops.read_files(spark, str(data / name), "parquet", schema, maxFilesPerTrigger=1)
        for name, schema in (("orders", ORDERS), ("stocks", STOCKS), ("plain", STOCKS.partition(", tags")[0]))
    }
    return gpu_ops.join(
        stream(read["orders"], row_kind="op", unique_key="id", name="orders"),
        stream(read[stocks], unique_key="id", name="stocks"),
        on="id", how="left", state=str(work / "state"), partitions=1, backend=backend,
    )  # fmt: skip


def summed(spark: Any, data: Path, work: Path, stocks: str, backend: str) -> Any:
    """A sum over a join, in one engine with it."""
    changes = joined(spark, data, work, stocks, backend)
    called = {"rows": "count(*)", "n": "sum(n)", "price": "sum(price)"}
    state = str(work / "sums")
    return gpu_ops.aggregate(changes, by=["day"], aggregates=called, state=state, partitions=1, backend=backend)


def filtered(spark: Any, data: Path, work: Path, stocks: str, backend: str) -> Any:
    """A join of rows that Arrow filters."""
    orders = gpu_ops.read_files(spark, str(data / "orders"), "parquet", ORDERS, maxFilesPerTrigger=1)
    plain = gpu_ops.read_files(spark, str(data / stocks), "parquet", "id BIGINT, n INT", maxFilesPerTrigger=1)
    return gpu_ops.join(
        stream(orders.where("price > 3"), row_kind="op", unique_key="id", name="orders"),
        stream(plain.selectExpr("id AS key", "n"), unique_key="key", name="stocks"),
        on=[("id", "key")], how="left", state=str(work / "state"), partitions=1, backend=backend,
    )  # fmt: skip


CASES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "all": (joined, "plain", ""),
    "sums": (summed, "plain", ""),
    "filtered": (filtered, "plain", ""),
    "nested": (joined, "stocks", ""),
    "read": (joined, "plain", "read"),
    "recorded": (joined, "plain", "recorded"),
    "gone": (joined, "plain", "gone"),
}
"""Of each the query, its other source, and how a server of the second run fails, see `kernels.emulated_server`."""


def main(folder: Path) -> None:
    """Runs each case both ways, in two runs; between them the files of the first are written over."""
    blocks.LEAST_BYTES = 64  # type: ignore[misc]
    process._MODULE = "kernels.emulated_server"
    process.find_gpus = lambda: (["GPU-x"], "1 GPU: Emulated Card")  # type: ignore[assignment]
    fault = folder / "fault"
    os.environ["CARD_FAULT"] = str(fault)
    spark, found = local_session(2, **{"spark.gpu_ops.tasks": "3"}), dict[str, Any]()
    for name, (made, stocks, fails) in CASES.items():
        for backend in ("auto",) if fails else ("auto", "cpu"):
            work = folder / f"{name}-{backend}"
            data, lines = work / "in", list[str]()
            for run in (range(BATCHES // 2), range(BATCHES // 2, BATCHES)):
                write(data, run)
                changes = made(spark, data, work, stocks, backend)
                lines = gpu_ops.explain(changes).splitlines()
                if run.start and fails:
                    fault.write_text(fails)
                query = gpu_ops.write_files(
                    changes, str(work / "out"), checkpoint=str(work / "checkpoint"), availableNow=True
                )
                query.awaitTermination()
                fault.unlink(missing_ok=True)
                for file in data.rglob("*.parquet"):
                    file.write_bytes(b"written over")
            con = duckdb.connect()
            con.execute("SET TimeZone = 'UTC'")
            rows = con.sql(f"FROM read_parquet('{work}/out/part-*.parquet')").fetchall()
            kept = [path.read_bytes()[:4] == b"PAR1" for path in work.glob("s*/p/0/*.block")]
            (manifest,) = work.glob("s*/manifest.json")
            found[f"{name} {'cpu' if backend == 'cpu' else 'gpu'}"] = {
                "rows": sorted(map(repr, rows)),
                "copies": sum(kept),
                "format": json.loads(manifest.read_text())["format"],
                "explain": [line.strip() for line in lines if "read by" in line and "files of" in line],
            }
    (folder / "found.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
