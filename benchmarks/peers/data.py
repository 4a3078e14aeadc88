"""Inputs of the peers' queries in the forms that each can read, and what their results must hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from pyarrow import csv

from benchmarks import changes

ORDERS = {"order_id": "BIGINT", "customer": "BIGINT", "amount": "BIGINT", "note": "VARCHAR"}
PRICES = {"order_id": "BIGINT", "price": "DOUBLE", "source": "VARCHAR"}
INPUTS = {"orders": ORDERS, "prices": PRICES}
JOINED = {**ORDERS, "price": "DOUBLE", "source": "VARCHAR"}
TOTALS = {"customer": "BIGINT", "n": "BIGINT", "total": "DOUBLE"}

QUERIES = {"changes": JOINED, "inserts": JOINED, "totals": TOTALS}
"""By name, with the columns of the result: a left join of changes; an inner join of rows that only come; an aggregate
of that join."""

SQL = {
    "changes": f"SELECT {', '.join(f'o.{c}' for c in ORDERS)}, price, source"
    " FROM orders o LEFT JOIN prices p ON o.order_id = p.order_id",
    "inserts": f"SELECT {', '.join(f'o.{c}' for c in ORDERS)}, price, source"
    " FROM orders o JOIN prices p ON o.order_id = p.order_id",
    "totals": "SELECT customer, count(*) AS n, sum(price) AS total"
    " FROM orders o JOIN prices p ON o.order_id = p.order_id GROUP BY customer",
}
"""Each query over the rows that are there."""

Folded = tuple[int, int]
"""Rows of a folded result, and the sum of their hashes: retractions count -1."""


def write(folder: Path, rows: int, files: int) -> dict[str, Folded]:
    """Write the inputs, `rows` of both together, and say what each query must fold to.

    `changes` and `inserts` have a folder per input; the second has no column `op`. The same with `_headed` are for
    readers that want a first line of names; there changes have a number `seq` besides.
    """
    con = duckdb.connect()
    expected = {}
    changed = changes.generate(rows)
    counts = changes.write(changed, folder / "changes", files)
    only = changes.generate(rows, share=0.0).inputs
    inserts = {name: table.drop_columns(["op"]) for name, table in only.items()}
    for header in (False, True):
        _write(folder / f"inserts{'_headed' * header}", inserts, files, header=header)
    numbered = {name: table.add_column(0, "seq", _numbers(table)) for name, table in changed.inputs.items()}
    _write(folder / "changes_headed", numbered, files, header=True)
    for name, tables in (("changes", changed.inputs), ("inserts", inserts)):
        for each, table in tables.items():
            con.register("given", table)
            con.execute(f"CREATE OR REPLACE TABLE {each} AS {folded_input('given', each, 'op' in table.column_names)}")
        for query in ("changes",) if name == "changes" else ("inserts", "totals"):
            expected[query] = folded(SQL[query], QUERIES[query], con=con)
    if expected["changes"][0] != counts.rows:
        raise RuntimeError(f"DuckDB folds the changes to {expected['changes'][0]} rows, arithmetic to {counts.rows}")
    return expected


def folded_input(relation: str, name: str, changelog: bool) -> str:
    """SQL for the rows of an input that are there once all its changes are applied."""
    columns = ", ".join(INPUTS[name])
    if not changelog:
        return f"SELECT {columns} FROM {relation}"
    return f"SELECT {columns} FROM {relation} GROUP BY ALL HAVING sum({sign('op')}) > 0"


def sign(kind: str) -> str:
    """SQL for what a row of a kind adds."""
    return f"CASE WHEN {kind} IN ('+I', '+U') THEN 1 ELSE -1 END"


def folded(
    relation: str, columns: Mapping[str, str], weight: str = "1", con: duckdb.DuckDBPyConnection | None = None
) -> Folded:
    """The rows that a result folds to.

    Args:
        relation: a query in SQL.
        columns: of the result, with their types.
        weight: SQL for what a row counts.
        con: where the relation's tables are.
    """
    cast = ", ".join(f"CAST({column} AS {kind})" for column, kind in columns.items())
    query = f"SELECT coalesce(sum({weight}), 0), coalesce(sum({weight} * hash({cast})::HUGEINT), 0) FROM ({relation})"
    found = (con or duckdb.connect()).execute(query).fetchall()
    return int(found[0][0]), int(found[0][1])


def _numbers(table: pa.Table) -> pa.Array:
    return pa.array(np.arange(table.num_rows))


def _write(folder: Path, tables: Mapping[str, pa.Table], files: int, *, header: bool) -> None:
    for name, table in tables.items():
        (folder / name).mkdir(parents=True)
        edges = np.linspace(0, table.num_rows, files + 1).astype(int)
        for number in range(files):
            path = folder / name / f"part-{number:05d}.csv"
            part = table.slice(edges[number], edges[number + 1] - edges[number])
            csv.write_csv(part, path, csv.WriteOptions(include_header=header, quoting_style="none"))
            os.utime(path, (1_700_000_000 + number,) * 2)  # a streaming source takes files by their time
