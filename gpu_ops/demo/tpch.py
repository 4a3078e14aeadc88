"""TPC-H's tables as streams of changes, the same ones every time; its queries over them; and DuckDB's answers.

The tables come from ``tpchgen-cli`` (the PyPI package). Every row is inserted, some are later updated
(``-U`` and ``+U``), some deleted; a lineitem may come before its order, an order before its customer. What happens
to a row, and when, follows from the place of its key among the others, so the order of the rows plays no part. Nations
and regions stay as they are.

Is a changelog right? DuckDB folds it, joins the folded inputs itself or answers the query over them, and compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import gpu_ops
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN, UPDATE_AFTER, decode_row_kinds, encode_row_kinds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UPDATED, DELETED = 0.13, 0.07
"""Shares of the rows that are updated once, and that are deleted."""

KEYS: Final = {
    "orders": ("o_orderkey",),
    "lineitem": ("l_orderkey", "l_linenumber"),
    "customer": ("c_custkey",),
    "supplier": ("s_suppkey",),
    "nation": ("n_nationkey",),
    "region": ("r_regionkey",),
}
"""The unique key of each table."""

_UPDATED_COLUMNS: Final = {
    "orders": ("o_totalprice", "o_orderpriority"),
    "lineitem": ("l_quantity", "l_extendedprice"),
    "customer": ("c_nationkey", "c_mktsegment", "c_acctbal"),
    "supplier": ("s_nationkey",),
}
"""The columns that updates change, as far as a query reads them."""

# Of the whole span: how much earlier than its order a lineitem may come, and how much it is spread.
_EARLY, _SPREAD = 0.02, 0.12

Integers = npt.NDArray[np.int64]
ROW_KIND: Final = "op"
"""The row-kind column of the inputs."""

OrderRows: TypeAlias = "Sequence[str] | pa.Table"
"""Parquet files, or a table in memory."""

# The multiplicity of each distinct row; rows that come and go again have none.
_FOLD: Final = """
CREATE TEMP TABLE {name}_now AS
SELECT * EXCLUDE ({kind}), sum(CASE WHEN {kind} IN ('+I', '+U') THEN 1 ELSE -1 END)::BIGINT AS {name}_n
FROM {name}_changes GROUP BY ALL HAVING {name}_n <> 0
"""

_DIFFERENT: Final = """
SELECT * EXCLUDE (n), sum(n)::BIGINT AS surplus FROM (
    SELECT * EXCLUDE (changelog_n), changelog_n AS n FROM changelog_now
    UNION ALL BY NAME
    SELECT * EXCLUDE (n), -n AS n FROM expected
) GROUP BY ALL HAVING surplus <> 0
"""

NAMES: Final = ("q3", "q4", "q5", "q10", "q12", "q13", "q18")
JOIN: Final = "orders_lineitem"
"""The demonstration's own query, a left join."""

_READ: Final = {  # by the queries, by table
    "customer": "c_custkey c_name c_address c_nationkey c_phone c_acctbal c_mktsegment c_comment",
    "orders": "o_orderkey o_custkey o_orderstatus o_totalprice o_orderdate o_orderpriority o_shippriority o_comment",
    "lineitem": "l_orderkey l_linenumber l_suppkey l_quantity l_extendedprice l_discount l_returnflag l_shipdate "
    "l_commitdate l_receiptdate l_shipmode",
    "supplier": "s_suppkey s_nationkey",
    "nation": "n_nationkey n_name n_regionkey",
    "region": "r_regionkey r_name",
}


class DataError(RuntimeError):
    """Raised where the generator of the data is missing or fails."""


@dataclasses.dataclass(frozen=True)
class ChangeStream:
    """A stream of changes in files, one for each micro-batch.

    Attributes:
        table: of `KEYS`.
        folder: where the Parquet files lie.
        schema: their columns, the row kind first, if there are any.
        unique_key: columns that identify a row among the live ones.
        counts: changes in each file, in order.
        inserts: rows that appear.
        updates: ``-U``/``+U`` pairs.
        deletes: rows that go.
    """

    table: str
    folder: Path
    schema: pa.Schema
    unique_key: tuple[str, ...]
    counts: tuple[int, ...]
    inserts: int
    updates: int
    deletes: int

    @property
    def total(self) -> int:
        """Changes in all files."""
        return sum(self.counts)

    @property
    def files(self) -> list[str]:
        """The files, in order."""
        return [str(path) for path in sorted(self.folder.glob("*.parquet"))]


def generate(folder: Path, *, scale: float, files: int, limit: int | None = None) -> tuple[ChangeStream, ChangeStream]:
    """Orders and lineitems as streams of changes, as far as `JOIN` reads them; see `streams`."""
    made = streams(folder, columns_of([query(JOIN)]), scale=scale, files=files, limit=limit)
    return made["orders"], made["lineitem"]


def streams(
    folder: Path, columns: Mapping[str, Sequence[str]], *, scale: float, files: int, limit: int | None = None
) -> dict[str, ChangeStream]:
    """Writes tables as Parquet files of changes below a folder.

    Args:
        folder: gets ``tables/`` (as generated), and a folder for each table's changes.
        columns: of each table; orders and lineitem are among them.
        scale: TPC-H scale factor; 0.1 makes about a million changes of orders and lineitems.
        files: files, and so micro-batches, per stream; at least 1. Nations and regions are one file each.
        limit: stop at about this many changes of orders and lineitems together, or None.

    Returns:
        The streams by table.

    Raises:
        DataError: there is no generator, it failed, or made fewer changes than ``limit``.
    """
    tables = tpch_tables(folder / "tables", scale, columns)
    keys = _numpy(tables["orders"]["o_orderkey"])
    last = int(keys.max())
    moving: dict[str, pa.Table] = {name: change_stream(name, tables[name], last) for name in ("orders", "lineitem")}
    made = sum(stream.num_rows for stream in moving.values())
    if limit is not None and limit < made:
        # Fewer orders, not fewer changes: every row's story stays whole.
        last = int(np.quantile(keys, limit / made, method="lower"))
        for name in moving:
            kept = tables[name].filter(pc.less_equal(tables[name][KEYS[name][0]], last))
            moving[name] = change_stream(name, kept, last)
    elif limit is not None and limit > made * 1.05:
        raise DataError(f"scale {scale:g} makes {made:,} changes, not {limit:,}; choose a larger scale")
    for name in (tables.keys() - moving.keys()) & _UPDATED_COLUMNS.keys():
        moving[name] = change_stream(name, tables[name], int(_numpy(tables[name][KEYS[name][0]]).max()))
    return {
        name: write(name, moving[name], folder / name, files) if name in moving else fixed(name, table, folder / name)
        for name, table in tables.items()
    }


def tpch_tables(folder: Path, scale: float, columns: Mapping[str, Sequence[str]]) -> dict[str, pa.Table]:
    """Tables of TPC-H, fresh from the generator.

    Args:
        folder: where the generator writes.
        scale: TPC-H scale factor.
        columns: of each table.

    Raises:
        DataError: there is no generator, or it failed.
    """
    program = shutil.which("tpchgen-cli", path=sysconfig.get_path("scripts")) or shutil.which("tpchgen-cli")
    if program is None:
        raise DataError("no tpchgen-cli here: pip install 'gpu-join[demo]'")
    command = [program, "parquet", f"--scale-factor={scale:g}", f"--tables={','.join(columns)}"]
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(  # noqa: S603 (fixed program, numbers and our own folder as arguments)
        [*command, f"--output-dir={folder}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DataError(f"tpchgen-cli failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return {name: _plain(pq.read_table(folder / f"{name}.parquet", columns=list(c))) for name, c in columns.items()}


def change_stream(name: str, rows: pa.Table, last: int) -> pa.Table:
    """The changes of one table, in the order in which they happen.

    Args:
        name: of the table.
        rows: n rows of it.
        last: the largest order key there is; an order's key is the time at which it is placed. Of customers and
            suppliers the largest key of their own.

    Returns:
        The rows' columns behind the row kind, n inserts and what follows them. ``-U`` and ``+U`` of an
        update are neighbours, and every retraction names the row as it is at that time.
    """
    n = rows.num_rows
    key, *rest = (_numpy(rows[column]) for column in KEYS[name])
    chance = np.empty((5, n))  # numbers in [0, 1), in the order of the keys
    chance[:, np.lexsort((*rest, key))] = np.random.default_rng(list(KEYS).index(name)).random((n, 5)).T

    inserted = key / (last + 1) * (1.0 - _SPREAD) + (_EARLY if name == "orders" else _SPREAD * chance[0])
    updated = inserted + (1.0 - inserted) * chance[1]
    is_updated, is_deleted = chance[2] < UPDATED, chance[3] < DELETED
    before = np.where(is_updated, updated, inserted)
    deleted = before + (1.0 - before) * chance[4]

    every = np.arange(n)
    changed, gone = every[is_updated], every[is_deleted]
    # Rows as inserted come first in `source`, as updated behind them.
    source = pa.concat_tables([rows, _updated(rows, _UPDATED_COLUMNS[name])])
    last_form = np.where(is_updated, every + n, every)
    index = np.concatenate([every, changed, changed + n, last_form[gone]])
    time = np.concatenate([inserted, updated[changed], updated[changed], deleted[gone]])
    lengths = [n, changed.size, changed.size, gone.size]
    kind = np.repeat(np.arange(4, dtype=np.int8), lengths)  # the codes of row kinds, in this order
    row = index % n if n else index
    order = np.lexsort((kind, row, time))
    result = source.take(pa.array(index[order]))
    return result.add_column(0, pa.field(ROW_KIND, pa.string(), nullable=False), encode_row_kinds(kind[order]))


def write(name: str, changes: pa.Table, folder: Path, files: int) -> ChangeStream:
    """Writes a stream of changes as ``files`` Parquet files of nearly equal length."""
    kinds = decode_row_kinds(changes[ROW_KIND], input_name=name, column_name=ROW_KIND, has_unique_key=True)
    cuts = np.linspace(0, changes.num_rows, files + 1).astype(np.int64)
    cuts[1:-1] += kinds[cuts[1:-1]] == UPDATE_AFTER  # an update stays whole
    parts = [changes.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
    write_files(parts, folder)
    inserts, updates, _, deletes = (int(c) for c in np.bincount(kinds, minlength=4))
    counts = tuple(part.num_rows for part in parts)
    return ChangeStream(name, folder, changes.schema, KEYS[name], counts, inserts, updates, deletes)


def fixed(name: str, rows: pa.Table, folder: Path) -> ChangeStream:
    """Writes a table that stays as it is, as one Parquet file without row kinds."""
    write_files([rows], folder)
    return ChangeStream(name, folder, rows.schema, KEYS[name], (rows.num_rows,), rows.num_rows, 0, 0)


def write_files(parts: Sequence[pa.Table], folder: Path) -> None:
    """Writes one Parquet file for each micro-batch.

    Spark's file source takes the oldest file first, so their times of modification are a second apart.
    Each is a single row group, which Spark never splits: the order of the changes is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        path = folder / f"{number:05d}.parquet"
        pq.write_table(part, path, row_group_size=max(part.num_rows, 1))
        modified = 1_600_000_000 + number
        os.utime(path, (modified, modified))


def read_changes(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of the Parquet files in a folder, one for each micro-batch."""
    schema = spark.read.parquet(str(folder)).schema
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def _updated(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Changes the values of some columns of rows, where the rows have these columns."""
    for column in columns:
        if column in rows.column_names:
            field = rows.schema.field(column)
            rows = rows.set_column(rows.schema.get_field_index(column), field, _another(rows[column]))
    return rows


def _another(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replaces each value by another one: a decimal by one larger by 1, any other by the next value of the column."""
    if pa.types.is_decimal(values.type):
        return pc.add(values, pa.scalar(Decimal(1), values.type)).cast(values.type)
    distinct = pc.unique(values).sort()
    at = _numpy(pc.index_in(values, distinct))
    return pa.chunked_array([distinct.take(pa.array((at + 1) % len(distinct)))])


def _plain(table: pa.Table) -> pa.Table:
    """Removes types and ids of the generator's Parquet files that Spark does not know: string views, field ids."""
    fields = []
    for field in table.schema:
        text = not (pa.types.is_integer(field.type) or pa.types.is_decimal(field.type) or pa.types.is_date(field.type))
        fields.append(pa.field(field.name, pa.string() if text else field.type, field.nullable))
    return table.cast(pa.schema(fields)).combine_chunks()


def _numpy(column: pa.ChunkedArray) -> Integers:
    values: Integers = column.to_numpy()
    return values


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of comparing a folded changelog with DuckDB's join.

    Attributes:
        rows: rows of the folded changelog.
        expected: rows of DuckDB's join.
        pads: rows of DuckDB's join without a match, null where the right's columns would be.
        changes: changes in the changelog, by row kind.
        missing: rows that the changelog lacks.
        surplus: rows that it has and should not.
        sample: some missing and surplus rows, as text.
    """

    rows: int
    expected: int
    pads: int
    changes: Mapping[str, int]
    missing: int
    surplus: int
    sample: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if the folded changelog equals the join."""
        return not (self.missing or self.surplus)


def check(changelog: OrderRows, inputs: Mapping[str, OrderRows], query: str, pad: str) -> Comparison:
    """Compares a changelog with DuckDB's answer to a query over the folded inputs.

    Args:
        changelog: the query's output; its row kinds in ``row_kind``.
        inputs: changes by table, their row kinds in `ROW_KIND`; or rows without any.
        query: a left join.
        pad: a column of it that is null in unmatched rows only.

    Returns:
        Equal or not, and the numbers.
    """
    with duckdb.connect() as db:
        _fold_inputs(db, inputs)
        _register(db, "changelog", changelog)
        sample = difference(db, query)[:5]
        return Comparison(
            rows=_number(db, "SELECT sum(changelog_n) FROM changelog_now"),
            expected=_number(db, "SELECT sum(n) FROM expected"),
            pads=_number(db, f"SELECT sum(n) FROM expected WHERE {pad} IS NULL"),  # noqa: S608 (our column)
            changes=dict(db.execute("SELECT row_kind, count(*) FROM changelog_changes GROUP BY 1").fetchall()),
            missing=_number(db, "SELECT -sum(surplus) FROM different WHERE surplus < 0"),
            surplus=_number(db, "SELECT sum(surplus) FROM different WHERE surplus > 0"),
            sample=tuple(sample),
        )


def _register(db: duckdb.DuckDBPyConnection, name: str, rows: OrderRows) -> None:
    if isinstance(rows, pa.Table):
        db.register(f"{name}_changes", rows)
    else:
        db.read_parquet(list(rows)).create_view(f"{name}_changes")


def _fold_inputs(db: duckdb.DuckDBPyConnection, inputs: Mapping[str, OrderRows]) -> None:
    """Makes a view of each table with its live rows."""
    for table, rows in inputs.items():
        _register(db, table, rows)
        changes = db.table(f"{table}_changes")
        if ROW_KIND in changes.columns:
            fold(db, table, ROW_KIND)
            changes = db.table(f"{table}_now").project(f"* EXCLUDE ({table}_n)")
        changes.create_view(table)


def fold(db: duckdb.DuckDBPyConnection, name: str, kind: str) -> None:
    """Makes ``<name>_now`` of ``<name>_changes``: each live row, and in ``<name>_n`` its number."""
    db.execute(_FOLD.format(name=name, kind=kind))


def difference(db: duckdb.DuckDBPyConnection, query: str) -> list[str]:
    """Finds the rows in which the folded ``changelog_changes`` differ from the answer to a query, as text.

    Args:
        db: has a table or view of that name.
        query: it.
    """
    fold(db, "changelog", ROW_KIND_COLUMN)
    db.execute(f"CREATE TEMP TABLE expected AS SELECT *, 1 AS n FROM ({query})")  # noqa: S608 (our text)
    db.execute(f"CREATE TEMP TABLE different AS {_DIFFERENT}")
    return [str(row) for row in db.execute("SELECT * FROM different").fetchall()]


def _number(db: duckdb.DuckDBPyConnection, sql: str) -> int:
    row = db.execute(sql).fetchone()
    return int(row[0] or 0) if row else 0


@dataclasses.dataclass(frozen=True)
class Query:
    """A query of TPC-H.

    Attributes:
        name: as TPC-H counts them.
        title: what it asks.
        text: one SELECT; gpu_ops, Flink and DuckDB take it as it is.
        columns: that it reads, by table; unique keys are among them.
    """

    name: str
    title: str
    text: str
    columns: Mapping[str, tuple[str, ...]]


def query(name: str) -> Query:
    """A query by its name, one of `NAMES` or `JOIN`."""
    text = (Path(__file__).parent / "queries" / f"{name}.sql").read_text()
    comment, select = text.split("\n", maxsplit=1)
    words = set(re.findall(r"\w+", select))
    columns = {
        table: tuple(c for c in names.split() if c in words or c in KEYS[table])
        for table, names in _READ.items()
        if table in words
    }
    title = comment.removeprefix("-- ").split(". ", maxsplit=1)[0]
    return Query(name, title, select, columns)


def columns_of(queries: Sequence[Query]) -> dict[str, tuple[str, ...]]:
    """The columns that several queries read, by table; orders and lineitems are always among the tables."""
    found = {table: [c for c in names.split() if c in KEYS[table]] for table, names in _READ.items()}
    for one in queries:
        for table, columns in one.columns.items():
            found[table] += [c for c in columns if c not in found[table]]
    read = {table for one in queries for table in one.columns} | {"orders", "lineitem"}
    return {table: tuple(columns) for table, columns in found.items() if table in read}


def changelog(spark: SparkSession, one: Query, inputs: Mapping[str, ChangeStream], **options: Any) -> DataFrame:
    """The changelog of a query's result, a file of each input in a micro-batch.

    Args:
        spark: the session.
        one: the query.
        inputs: by table, of `streams`.
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


class Answers:
    """DuckDB's answers to a query after each micro-batch.

    Args:
        one: the query.
        inputs: its tables.
    """

    def __init__(self, one: Query, inputs: Mapping[str, ChangeStream]) -> None:
        self.query = one
        self.files = {table: inputs[table].files for table in one.columns}

    def after(self, micro_batches: int) -> pa.Table:
        """Runs the query over the folded files of so many micro-batches."""
        with duckdb.connect() as db:
            self._fold(db, micro_batches)
            return db.sql(self.query.text).to_arrow_table()

    def differences(self, changes: pa.Table, micro_batches: int) -> list[str]:
        """Finds the rows in which a folded changelog is wrong after so many micro-batches, as text."""
        with duckdb.connect() as db:
            self._fold(db, micro_batches)
            db.register("changelog_changes", changes)
            return difference(db, self.query.text)

    def _fold(self, db: duckdb.DuckDBPyConnection, micro_batches: int) -> None:
        _fold_inputs(db, {table: files[:micro_batches] for table, files in self.files.items()})
