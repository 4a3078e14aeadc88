"""TPC-H's queries over streams of changes, each as its text has it, and DuckDB's answer over the folded inputs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa

import gpu_ops
from gpu_ops.demo.check import ROW_KIND, difference, fold
from gpu_ops.demo.orders_prices import read_changes
from gpu_ops.demo.tpch import KEYS, Changes
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMES: Final = ("q3", "q4", "q5", "q10", "q12", "q13", "q18")

_COLUMNS: Final = {
    "customer": "c_custkey c_name c_address c_nationkey c_phone c_acctbal c_mktsegment c_comment",
    "orders": "o_orderkey o_custkey o_orderstatus o_totalprice o_orderdate o_orderpriority o_shippriority o_comment",
    "lineitem": "l_orderkey l_linenumber l_suppkey l_quantity l_extendedprice l_discount l_returnflag l_shipdate "
    "l_commitdate l_receiptdate l_shipmode",
    "supplier": "s_suppkey s_nationkey",
    "nation": "n_nationkey n_name n_regionkey",
    "region": "r_regionkey r_name",
}


@dataclasses.dataclass(frozen=True)
class Query:
    """A query of TPC-H.

    Attributes:
        name: as TPC-H counts them.
        title: what it asks.
        text: one SELECT; gpu_ops, Flink and DuckDB take it as it is.
        order: by what TPC-H orders the result.
        columns: that it reads, by table; unique keys are among them.
    """

    name: str
    title: str
    text: str
    order: str
    columns: Mapping[str, tuple[str, ...]]


def query(name: str) -> Query:
    """A query by its name, one of `NAMES`."""
    text = (Path(__file__).parent / f"{name}.sql").read_text()
    comment, select = text.split("\n", maxsplit=1)
    words = set(re.findall(r"\w+", select))
    columns = {
        table: tuple(c for c in names.split() if c in words or c in KEYS[table])
        for table, names in _COLUMNS.items()
        if table in words
    }
    title = comment.removeprefix("-- ").split(". ", maxsplit=1)[0]
    return Query(name, title, select, text.rsplit("ORDER BY ", maxsplit=1)[1].splitlines()[0], columns)


def columns_of(queries: Sequence[Query]) -> dict[str, tuple[str, ...]]:
    """What several queries read, by table; orders and lineitems always."""
    found = {table: [c for c in names.split() if c in KEYS[table]] for table, names in _COLUMNS.items()}
    for one in queries:
        for table, columns in one.columns.items():
            found[table] += [c for c in columns if c not in found[table]]
    read = {table for one in queries for table in one.columns} | {"orders", "lineitem"}
    return {table: tuple(columns) for table, columns in found.items() if table in read}


def changelog(spark: SparkSession, one: Query, inputs: Mapping[str, Changes], **options: Any) -> DataFrame:
    """The changelog of a query's result, a file of each input in a micro-batch.

    Args:
        spark: the session.
        one: the query.
        inputs: by table, of `gpu_ops.demo.tpch.streams`.
        options: of `gpu_ops.sql`.
    """
    tables: dict[str, Any] = {}
    for table in one.columns:
        changes = inputs[table]
        rows, changing = read_changes(spark, changes.folder), ROW_KIND in changes.schema.names
        key = changes.unique_key if changing else None
        kind = ROW_KIND if changing else None
        tables[table] = gpu_ops.stream(rows, unique_key=key, row_kind=kind, updates="retract")
    return gpu_ops.sql(one.text, tables=tables, **options)


def view(one: Query, changes: pa.Table) -> pa.Table:
    """The rows that a changelog folds to, in the query's order."""
    with duckdb.connect() as db:
        db.register("changelog_changes", changes)
        fold(db, "changelog", ROW_KIND_COLUMN)
        return db.table("changelog_now").project("* EXCLUDE (changelog_n)").order(one.order).to_arrow_table()


class Answers:
    """What DuckDB answers after each micro-batch.

    Args:
        one: the query.
        inputs: its tables.
    """

    def __init__(self, one: Query, inputs: Mapping[str, Changes]) -> None:
        self.query = one
        self.files = {table: sorted(inputs[table].folder.glob("*.parquet")) for table in one.columns}

    def after(self, micro_batches: int) -> pa.Table:
        """The query over the folded first files of each input."""
        with duckdb.connect() as db:
            for table, files in self.files.items():
                db.read_parquet([str(path) for path in files[:micro_batches]]).create_view(f"{table}_changes")
                if ROW_KIND in db.table(f"{table}_changes").columns:
                    fold(db, table, ROW_KIND)
                    db.table(f"{table}_now").project(f"* EXCLUDE ({table}_n)").create_view(table)
                else:
                    db.table(f"{table}_changes").create_view(table)
            return db.sql(self.query.text).to_arrow_table()

    def differences(self, changes: pa.Table, micro_batches: int) -> list[str]:
        """In what a folded changelog differs after so many micro-batches, as text; nothing where it is right."""
        with duckdb.connect() as db:
            db.register("changelog_changes", changes)
            db.register("answer", self.after(micro_batches))
            return difference(db, "SELECT *, 1 AS n FROM answer")
