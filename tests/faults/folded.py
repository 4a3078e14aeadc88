"""What files of changes come to, beside what DuckDB says they should."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import duckdb

ORDERS_PRICES = {
    "orders": "op STRING, order_id BIGINT, customer BIGINT, amount BIGINT, note STRING",
    "prices": "op STRING, order_id BIGINT, price DOUBLE, source STRING",
}
"""The changes of `benchmarks.changes`."""

TYPES = {"BIGINT": "BIGINT", "STRING": "VARCHAR", "TIMESTAMP": "TIMESTAMP"}


def read(con: duckdb.DuckDBPyConnection, data: Path, schemas: Mapping[str, str]) -> None:
    """Tables of folders of JSON files, with the number of its ``file`` in each row."""
    for name, schema in schemas.items():
        columns = {column.split()[0]: TYPES[column.split()[1]] for column in schema.split(", ")}
        con.sql(
            f"CREATE TABLE {name} AS SELECT * EXCLUDE filename, parse_filename(filename, true)::BIGINT AS file "
            f"FROM read_json('{data}/{name}/*.json', columns={columns}, filename=true)"
        )


def lines(folder: Path, number: int, rows: list[dict[str, object]]) -> None:
    """A file of such a folder, younger by a second than the one before: Spark knows no order within a millisecond."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{number:04d}.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    os.utime(file, (1_700_000_000 + number,) * 2)


def micro_batches(checkpoint: Path) -> list[tuple[str, int, int]]:
    """By Spark's checkpoint, in which micro-batch each file came: its folder, its number, and the micro-batch.

    It need not be one file after the other: Spark notes a source's files before it notes the micro-batch, and if it is
    killed in between, the next one has the files after them, too.
    """
    offsets = {int(p.name): p.read_text().splitlines()[2:] for p in (checkpoint / "offsets").glob("[0-9]*")}
    found = []
    for source in (checkpoint / "sources").iterdir():
        ends = {
            json.loads(lines[int(source.name)])["logOffset"]: batch for batch, lines in sorted(offsets.items())[::-1]
        }
        noted = {line for log in source.glob("[0-9]*") for line in log.read_text().splitlines()[1:]}
        for entry in map(json.loads, noted):
            file = Path(entry["path"])
            batch = min(batch for end, batch in ends.items() if end >= entry["batchId"])
            found.append((file.parent.name, int(file.stem), batch))
    return found


def came(con: duckdb.DuckDBPyConnection, checkpoint: Path) -> None:
    """A table of `micro_batches`."""
    con.sql("CREATE TABLE came (name VARCHAR, file BIGINT, batch BIGINT)")
    con.executemany("INSERT INTO came VALUES (?, ?, ?)", micro_batches(checkpoint))


def compare_left_join(given: Mapping[str, str], files: list[str]) -> tuple[int, int]:
    """As `compare`, of the left join of orders and prices; ``given``: by input all of its changes, in DuckDB's SQL."""
    con = duckdb.connect()
    for name, schema in ORDERS_PRICES.items():
        columns = ", ".join(column.split()[0] for column in schema.split(", ")[1:])
        con.sql(
            f"CREATE TABLE {name} AS SELECT {columns} FROM {given[name]} "
            "GROUP BY ALL HAVING sum(CASE WHEN op IN ('+I', '+U') THEN 1 ELSE -1 END) > 0"
        )
    expected = "SELECT orders.*, price, source FROM orders LEFT JOIN prices ON orders.order_id = prices.order_id"
    return compare(con, "left", expected, files)


def compare(con: duckdb.DuckDBPyConnection, name: str, expected: str, files: list[str]) -> tuple[int, int]:
    """Asserts that the folded changes are the rows of a query; how many those are, and how many were taken back.

    Args:
        con: where the query's tables are.
        name: for the error.
        expected: the query.
        files: Parquet files with a row kind and at least the query's columns.
    """
    con.sql(f"CREATE OR REPLACE TEMP TABLE expected AS SELECT *, 1 AS __times FROM ({expected})")
    columns = ", ".join(con.table("expected").columns[:-1])
    con.sql(f"CREATE OR REPLACE TEMP TABLE changed AS SELECT row_kind, {columns} FROM read_parquet({files})")
    con.sql(
        "CREATE OR REPLACE TEMP TABLE folded AS "
        f"SELECT {columns}, sum(CASE WHEN row_kind IN ('+I', '+U') THEN 1 ELSE -1 END) AS __times "
        "FROM changed GROUP BY ALL HAVING __times <> 0"
    )
    difference = con.sql("(FROM expected EXCEPT ALL FROM folded) UNION ALL (FROM folded EXCEPT ALL FROM expected)")
    rows = difference.fetchall()
    assert not rows, f"{name}: {len(rows)} rows differ, as {rows[:5]}"
    (count,), *_ = con.sql("SELECT count(*) FROM folded").fetchall()
    (taken,), *_ = con.sql("SELECT count(*) FROM changed WHERE row_kind NOT IN ('+I', '+U')").fetchall()
    return count, taken
