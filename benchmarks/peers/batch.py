"""The queries of `benchmarks.peers.data` as one batch of all rows: what they cost where nothing streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.data import INPUTS, SQL, folded_input


def timed(query: Callable[[], object]) -> float:
    """Seconds of a call."""
    begun = time.perf_counter()
    query()
    return time.perf_counter() - begun


def _files(query: str, data: Path, name: str) -> tuple[str, dict[str, str]]:
    changes = query == "changes"
    columns = {**({"op": "VARCHAR"} if changes else {}), **INPUTS[name]}
    return f"{data}/{'changes' if changes else 'inserts'}/{name}/*.csv", columns


def duckdb_batch(query: str, data: Path, out: Path) -> float:
    """All rows at once on DuckDB, to Parquet."""
    import duckdb

    def run() -> None:
        with duckdb.connect(config={"threads": 2}) as con:
            for name in INPUTS:
                files, columns = _files(query, data, name)
                rows = f"read_csv('{files}', header=false, columns={columns})"
                con.execute(f"CREATE VIEW {name} AS {folded_input(rows, name, 'op' in columns)}")
            con.execute(f"COPY ({SQL[query]}) TO '{out}/rows.parquet' (COMPRESSION snappy)")

    return timed(run)


def polars_batch(query: str, data: Path, out: Path) -> float:
    """All rows at once on polars, to Parquet."""
    import polars as pl

    kinds = {"BIGINT": pl.Int64, "DOUBLE": pl.Float64, "VARCHAR": pl.String}

    def run() -> None:
        inputs = []
        for name in INPUTS:
            files, columns = _files(query, data, name)
            frame = pl.scan_csv(files, has_header=False, schema={c: kinds[kind]() for c, kind in columns.items()})
            if "op" in columns:
                # the last change of each key says whether and what row is there
                last = frame.unique("order_id", keep="last")
                frame = last.filter(pl.col("op").is_in(["+I", "+U"])).drop("op")
            inputs.append(frame)
        joined = inputs[0].join(inputs[1], on="order_id", how="left" if query == "changes" else "inner")
        if query == "totals":
            joined = joined.group_by("customer").agg(n=pl.len(), total=pl.col("price").sum())
        joined.sink_parquet(out / "rows.parquet", compression="snappy")

    return timed(run)
