"""The queries, read from their files, and what a pipeline without a join needs to know of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import duckdb
import sqlglot
from sqlglot import exp

from gpu_ops.demo.tpch import difference

FOLDER = Path(__file__).parent / "queries"
NAMES = ("q3", "q4", "q9", "q20", "q23")


@dataclass(frozen=True)
class Side:
    """One input of a query.

    Attributes:
        table: person, auction or bid.
        key: the column that is joined on.
        columns: those that the query reads.
        where: what the query asks of this input alone, SQL text, or None.
    """

    table: str
    key: str
    columns: tuple[str, ...]
    where: str | None


@dataclass(frozen=True)
class Query:
    """A join query of Nexmark.

    Attributes:
        name: as in Nexmark.
        text: one SELECT; gpu_ops, Spark and DuckDB take it as it is.
        sides: its inputs, in its order.
    """

    name: str
    text: str
    sides: tuple[Side, ...]


@functools.cache
def query(name: str) -> Query:
    """A query by its name.

    Raises:
        SystemExit: there is none of this name.
    """
    if name not in NAMES:
        raise SystemExit(f"no query {name!r}; there are {', '.join(NAMES)}")
    text = (FOLDER / f"{name}.sql").read_text()
    tree = sqlglot.parse_one(text, read="spark")
    aliases = {table.alias: table.name for table in tree.find_all(exp.Table)}
    where = tree.args.get("where")
    parts = list(where.this.flatten()) if where is not None and isinstance(where.this, exp.And) else []
    parts = parts or ([where.this] if where is not None else [])
    sides = []
    for alias, table in aliases.items():
        columns = {column.name for column in tree.find_all(exp.Column) if column.table == alias}
        keys = {
            column.name
            for join in tree.find_all(exp.Join)
            for column in join.args["on"].find_all(exp.Column)
            if column.table == alias
        }
        assert len(keys) == 1, f"{name}: {alias} is joined on {keys}"
        own = [part for part in parts if {column.table for column in part.find_all(exp.Column)} == {alias}]
        bare = [f"({part.transform(_without_table).sql('spark')})" for part in own]
        sides.append(Side(table, keys.pop(), tuple(sorted(columns)), " AND ".join(bare) or None))
    return Query(name, text, tuple(sides))


def _without_table(node: exp.Expression) -> exp.Expression:
    return exp.column(node.name) if isinstance(node, exp.Column) else node


def compared(query: Query, data: Path, changelog: list[Path]) -> tuple[int, int, list[str]]:
    """The changes in a changelog, the rows of DuckDB's result, and in what they differ.

    Args:
        query: the query.
        data: the folder of `benchmarks.nexmark.generator.write`.
        changelog: Parquet files, all together the changelog.
    """
    with duckdb.connect() as db:
        for side in query.sides:
            db.read_parquet(str(data / side.table / "*.parquet")).create_view(side.table)
        db.read_parquet([str(path) for path in changelog]).create_view("changelog_changes")
        db.execute(f"CREATE TEMP TABLE answer AS {query.text}")
        changes, rows = (len(db.table(name)) for name in ("changelog_changes", "answer"))
        return changes, rows, difference(db, "FROM answer")
