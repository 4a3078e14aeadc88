"""Queries on Spark, over small files: the folded result is the query over the folded inputs, in DuckDB."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops import stream
from gpu_ops.query.plan import Table
from oracle.drive import canonical, difference
from spark.support import Sink, Source, drain, in_memory
from sql.run_plan import Reference

pytestmark = pytest.mark.spark

TABLES = {
    "orders": Table(
        "orders", pa.schema([("id", pa.int64()), ("uid", pa.int64()), ("amount", pa.float64())]), row_kind="op"
    ),
    "prices": Table(
        "prices", pa.schema([("id", pa.int64()), ("price", pa.float64())]), row_kind="op", unique_key=("id",)
    ),
    "users": Table("users", pa.schema([("uid", pa.int64()), ("name", pa.string())])),
    "payments": Table("payments", pa.schema([("uid", pa.int64()), ("paid", pa.int64())])),
}
CHANGES = {
    "orders": [
        [("+I", (1, 7, 10.0)), ("+I", (2, 8, 20.0)), ("+I", (3, None, 5.0))],
        [("-D", (2, 8, 20.0)), ("+I", (2, 9, 40.0)), ("+I", (None, 7, 1.0))],
    ],
    "prices": [[("+I", (1, 3.0)), ("+I", (2, 9.0))], [("+U", (1, 12.0)), ("-D", (2, 9.0)), ("+I", (3, 1.0))]],
    "users": [[("+I", (7, "ann")), ("+I", (8, "bob"))], [("+I", (9, "cy")), ("+I", (None, "nobody"))]],
    "payments": [[("+I", (7, 100))], [("+I", (7, 50)), ("+I", (9, 70))]],
}
DDL = {pa.int64(): "long", pa.float64(): "double", pa.string(): "string"}
QUERIES = {
    "left": "SELECT o.id, p.price FROM orders o LEFT JOIN prices p ON o.id = p.id",
    "inner, and an upsert input with a filter": """
        SELECT o.id, o.amount * p.price AS total, concat('#', CAST(o.id AS STRING)) AS tag
        FROM orders o, prices p WHERE o.id = p.id AND p.price < 10 AND o.amount > 4""",
    "full, coalesced": "SELECT id, amount, price FROM orders FULL JOIN prices USING (id)",
    "right, computed key": "SELECT o.amount, u.name FROM orders o RIGHT JOIN users u ON o.uid + 1 = u.uid",
    "semi and anti": """
        SELECT id, uid FROM orders o WHERE EXISTS (SELECT 1 FROM prices p WHERE p.id = o.id AND p.price > o.amount / 9)
        AND o.uid NOT IN (SELECT uid FROM payments WHERE paid > 90)""",
    "not in": "SELECT id, uid FROM orders WHERE uid NOT IN (SELECT uid FROM users)",
    "multi-way": """
        SELECT u.name, o.id, y.paid FROM users u LEFT JOIN orders o ON u.uid = o.uid AND o.amount >= 5
        JOIN payments y ON y.uid = u.uid AND (y.paid > 60 OR o.id = 1)""",
    "chain": """
        WITH rich AS (SELECT uid, name, upper(name) AS big FROM users WHERE name <> 'bob')
        SELECT r.big, o.id, p.price FROM rich r JOIN orders o ON o.uid = r.uid LEFT JOIN prices p ON p.id = o.id""",
}


def sources(spark: Any, folder: Path, names: list[str]) -> dict[str, Source]:
    """The inputs a query names, as folders of files."""
    found = {}
    for name in names:
        table = TABLES[name]
        columns = [f"{x.name} {DDL[x.type]}" for x in table.schema]
        found[name] = Source(spark, folder / name, ", ".join([*columns, *(["op string"] if table.row_kind else [])]))
        for rows in CHANGES[name]:
            kinds = [{"op": kind} if table.row_kind else {} for kind, _ in rows]
            found[name].add(
                *({**dict(zip(table.schema.names, row, strict=True)), **kind} for (_, row), kind in zip(rows, kinds, strict=True))
            )
    return found


def inputs(found: dict[str, Source]) -> dict[str, Any]:
    """The inputs as `gpu_ops.sql` takes them."""
    return {
        name: stream(source.df, row_kind=TABLES[name].row_kind, unique_key=TABLES[name].unique_key)
        for name, source in found.items()
    }


@pytest.mark.parametrize("what", QUERIES)
def test_a_query(spark: Any, tmp_path: Path, what: str) -> None:
    sql = QUERIES[what]
    names = [name for name in TABLES if f" {name}" in sql]
    changes = gpu_ops.sql(sql, state=str(tmp_path / "state"), name="query", **inputs(sources(spark, tmp_path, names)))
    assert changes.columns[0] == "row_kind"
    sink = Sink()
    drain(changes, sink, tmp_path / "checkpoint")
    with contextlib.closing(Reference(sql, {name: TABLES[name] for name in names})) as reference:
        for name in names:
            for rows in CHANGES[name]:
                reference.apply({name: rows})
        expected = reference.rows()
    found = Counter(tuple(map(canonical, row)) for row in sink.table)
    assert not difference(expected, found)
    assert expected, "a query that says nothing tests nothing"
