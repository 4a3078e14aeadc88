"""The same changelogs in files by state servers with an emulated card and by tasks; writes what was found as JSON.

``test_files_by_card.py`` runs ``python files_by_card.py FOLDER``.
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
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

import gpu_ops
from benchmarks.spark_queries import local_session
from gpu_ops import stream
from gpu_ops.spark.driver import process

ORDERS = "op STRING, id BIGINT, note STRING, at TIMESTAMP, day DATE, price DECIMAL(9,2), raw BINARY, f FLOAT"
STOCKS = "op STRING, id BIGINT, n INT, tags ARRAY<STRING>"
BATCHES = 2


def write(folder: Path) -> None:
    """Changes of orders and stocks, a file of each for a micro-batch."""
    for number in range(BATCHES):
        ids = list(range(number * 40, number * 40 + 60))  # some again
        at = [None if n % 7 == 0 else n * 1_000_003 for n in ids]
        orders = pa.table({
            "op": ["+I"] * 60, "id": ids, "note": [f"ä{n % 5}" if n % 3 else None for n in ids],
            "at": pa.array(at, pa.timestamp("us", "UTC")), "day": pa.array(ids, pa.int32()).cast(pa.date32()),
            "price": pa.array([Decimal(n) / 4 for n in ids], pa.decimal128(9, 2)),
            "raw": [bytes([n % 256, 255]) for n in ids], "f": pa.array([n / 8 for n in ids], pa.float32()),
        })  # fmt: skip
        stocks = pa.table({
            "op": ["+I"] * 50, "id": ids[:50], "n": pa.array(ids[:50], pa.int32()), "tags": [["a", None]] * 50,
        })  # fmt: skip
        for name, table in (("orders", orders), ("stocks", stocks)):
            (folder / name).mkdir(exist_ok=True)
            pq.write_table(table, folder / name / f"{number}.parquet")
            os.utime(folder / name / f"{number}.parquet", (1_700_000_000 + number,) * 2)


def joined(spark: Any, folder: Path, work: Path, columns: list[str], **options: Any) -> Any:
    """The changelog of a left join."""
    read = {
        name: gpu_ops.read_files(spark, str(folder / name), "parquet", schema, maxFilesPerTrigger=1)
        for name, schema in (("orders", ORDERS), ("stocks", STOCKS))
    }
    return gpu_ops.join(
        stream(read["orders"], row_kind="op", unique_key="id", name="orders"),
        stream(read["stocks"].select(columns), row_kind="op", unique_key="id", name="stocks"),
        on="id", how="left", state=str(work / "state"), partitions=1, **options,
    )  # fmt: skip


PLAIN = ["op", "id", "n"]
CASES: dict[str, tuple[list[str], Callable[[Any], Any], dict[str, Any]]] = {
    "parquet": (PLAIN, lambda changes: changes, {}),
    "delta": (PLAIN, lambda changes: changes, {"format": "delta"}),
    "filtered": (
        PLAIN,
        lambda changes: changes.where("row_kind IN ('+I', '+U', '-D') AND id > 50").select("row_kind", "price", "id"),
        {"compression": "zstd"},
    ),
    "sticky": (PLAIN, lambda changes: changes, {"file_bytes": 1000}),
    "written": (PLAIN, lambda changes: changes, {"file_bytes": 1000, "format": "delta"}),
    "computed": (PLAIN, lambda changes: changes.selectExpr("row_kind", "id + 1 AS id"), {}),
    "nested": ([*PLAIN, "tags"], lambda changes: changes, {}),
    "folders": (PLAIN, lambda changes: changes, {"partition_by": "n"}),
}

FAULTS = ("sticky", "written")
"""Cases in which a server fails so, see `kernels.emulated_server`."""
ON_HOST = ("computed", "nested", "folders")
"""What the card does not write: what comes of it has tests of its own."""


def said(out: Path) -> dict[str, Any]:
    """The files of a folder as DuckDB reads them."""
    files = sorted(str(path) for path in out.rglob("part-*.parquet"))
    if (out / "_delta_log").exists():  # those that are no commit's are not read
        files = sorted(str(out / file) for file in DeltaTable(str(out)).file_uris())
    con = duckdb.connect()
    con.execute("SET TimeZone = 'UTC'")
    rows = con.sql(f"FROM read_parquet({files}, hive_partitioning = true)")
    told = con.sql(f"SELECT file_name FROM parquet_kv_metadata({files}) WHERE key = 'created_by'").fetchall()
    codecs = con.sql(f"SELECT DISTINCT compression FROM parquet_metadata({files})").fetchall()
    return {
        "types": [[name, str(kind)] for name, kind in zip(rows.columns, rows.types, strict=True)],
        "rows": sorted(map(repr, rows.fetchall())),
        "by_card": len(told),
        "codecs": codecs,
        "files": len(files),
        "staged": len(list(out.rglob("_staging/*/*"))),
    }


def main(folder: Path) -> None:
    """Runs each case both ways."""
    write(folder)
    process._MODULE = "kernels.emulated_server"
    process.find_gpus = lambda: (["GPU-x"], "1 GPU: Emulated Card")  # type: ignore[assignment]
    os.environ["CARD_FAULT"] = str(folder / "none")
    spark, found = local_session(2, **{"spark.gpu_ops.tasks": "3"}), dict[str, Any]()
    for name, (columns, taken, options) in CASES.items():
        for backend in ("gpu",) if name in ON_HOST else ("gpu", "cpu"):
            work = folder / f"{name}-{backend}"
            changes = taken(joined(spark, folder, work, columns, backend=backend))
            lines = gpu_ops.explain(changes).splitlines()
            if name in FAULTS and backend == "gpu":
                Path(os.environ["CARD_FAULT"]).write_text(name)  # the server of this micro-batch is replaced
            query = gpu_ops.write_files(
                changes, str(work / "out"), checkpoint=str(work / "checkpoint"), availableNow=True, **options
            )
            query.awaitTermination()
            found[f"{name} {backend}"] = {
                **said(work / "out"),
                "explain": next((line.split(None, 1)[1] for line in lines if line.startswith("  files ")), None),
            }
    (folder / "found.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
