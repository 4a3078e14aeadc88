"""TPC-H's orders and lineitems as two streams of changes, the same ones every time.

The tables come from ``tpchgen-cli`` (the PyPI package). Every row is inserted, some are later updated
(``-U`` and ``+U``), some deleted; a lineitem may come before its order. What happens to a row, and
when, follows from a hash of its key, so neither a seed nor the order of the rows plays a part.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gpu_ops.demo.check import ROW_KIND
from gpu_ops.descriptions.changelog import UPDATE_AFTER, decode_row_kinds, encode_row_kinds

UPDATED, DELETED = 0.13, 0.07
"""Shares of the rows that are updated once, and that are deleted."""

CHANGES_PER_SCALE: Final = 10_000_000
"""Changes of both streams at scale factor 1, roughly."""

_COLUMNS: Final = {
    "orders": ["o_orderkey", "o_custkey", "o_orderstatus", "o_totalprice", "o_orderdate", "o_orderpriority"],
    "lineitem": [
        "l_orderkey",
        "l_linenumber",
        "l_partkey",
        "l_quantity",
        "l_extendedprice",
        "l_discount",
        "l_shipdate",
        "l_shipmode",
    ],
}
_KEYS: Final = {"orders": ("o_orderkey",), "lineitem": ("l_orderkey", "l_linenumber")}
_UPDATED_COLUMN: Final = {"orders": "o_totalprice", "lineitem": "l_quantity"}

# Of the whole span: how much earlier than its order a lineitem may come, and how much it is spread.
_EARLY, _SPREAD = 0.02, 0.12

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class DataError(RuntimeError):
    """The data cannot be made."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """A stream of changes in files, one for each micro-batch.

    Attributes:
        table: ``"orders"`` or ``"lineitem"``.
        folder: where the Parquet files lie.
        schema: their columns, the row kind first.
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


def generate(folder: Path, *, scale: float, files: int, limit: int | None = None) -> tuple[Changes, Changes]:
    """Writes both streams of changes as Parquet files below a folder.

    Args:
        folder: gets ``tables/`` (as generated), ``orders/`` and ``lineitem/`` (the changes).
        scale: TPC-H scale factor; 0.1 makes about a million changes.
        files: files, and so micro-batches, per stream; at least 1.
        limit: stop at about this many changes of both streams together, or None.

    Returns:
        Orders and lineitems.

    Raises:
        DataError: there is no generator, it failed, or made fewer changes than ``limit``.
    """
    tables = tpch_tables(folder / "tables", scale)
    keys = _numpy(tables["orders"]["o_orderkey"])
    last = int(keys.max())
    streams = {name: change_stream(name, table, last) for name, table in tables.items()}
    made = sum(stream.num_rows for stream in streams.values())
    if limit is not None and limit < made:
        # Changes of fewer orders, not fewer changes: every row's story stays whole.
        last = int(np.quantile(keys, limit / made, method="lower"))
        for name, table in tables.items():
            kept = table.filter(pc.less_equal(table[_KEYS[name][0]], last))
            streams[name] = change_stream(name, kept, last)
    elif limit is not None and limit > made * 1.05:
        raise DataError(f"scale {scale:g} makes {made:,} changes, not {limit:,}; choose a larger scale")
    orders, lineitem = (write(name, streams[name], folder / name, files) for name in tables)
    return orders, lineitem


def tpch_tables(folder: Path, scale: float) -> dict[str, pa.Table]:
    """TPC-H's ``orders`` and ``lineitem``, the columns used here, fresh from the generator.

    Args:
        folder: where the generator writes.
        scale: TPC-H scale factor.

    Raises:
        DataError: there is no generator, or it failed.
    """
    program = shutil.which("tpchgen-cli", path=sysconfig.get_path("scripts")) or shutil.which("tpchgen-cli")
    if program is None:
        raise DataError("no tpchgen-cli here: pip install tpchgen-cli")
    command = [program, "parquet", f"--scale-factor={scale:g}", "--tables=orders,lineitem"]
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(  # noqa: S603 (fixed program, numbers and our own folder as arguments)
        [*command, f"--output-dir={folder}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DataError(f"tpchgen-cli failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return {name: _plain(pq.read_table(folder / f"{name}.parquet", columns=c)) for name, c in _COLUMNS.items()}


def change_stream(name: str, rows: pa.Table, last: int) -> pa.Table:
    """The changes of one table, in the order in which they happen.

    Args:
        name: ``"orders"`` or ``"lineitem"``.
        rows: n rows of it.
        last: the largest order key there is; an order's key is the time at which it is placed.

    Returns:
        The rows' columns behind the row kind, n inserts and what follows them. ``-U`` and ``+U`` of an
        update are neighbours, and every retraction names the row as it is at that time.
    """
    n = rows.num_rows
    key, *rest = (_numpy(rows[column]) for column in _KEYS[name])
    identity: Any = np.uint64(0 if name == "orders" else 1)
    for part in (key, *rest):
        identity = _mix(identity ^ part.astype(np.uint64))
    chance = [_uniform(identity, draw) for draw in range(5)]

    inserted = key / (last + 1) * (1.0 - _SPREAD) + (_EARLY if name == "orders" else _SPREAD * chance[0])
    updated = inserted + (1.0 - inserted) * chance[1]
    is_updated, is_deleted = chance[2] < UPDATED, chance[3] < DELETED
    before = np.where(is_updated, updated, inserted)
    deleted = before + (1.0 - before) * chance[4]

    every = np.arange(n)
    changed, gone = every[is_updated], every[is_deleted]
    # Rows as inserted come first in `source`, as updated behind them.
    source = pa.concat_tables([rows, _updated(rows, _UPDATED_COLUMN[name])])
    last_form = np.where(is_updated, every + n, every)
    index = np.concatenate([every, changed, changed + n, last_form[gone]])
    time = np.concatenate([inserted, updated[changed], updated[changed], deleted[gone]])
    lengths = [n, changed.size, changed.size, gone.size]
    kind = np.repeat(np.arange(4, dtype=np.int8), lengths)  # the codes of row kinds, in this order
    row = index % n if n else index
    order = np.lexsort((kind, row, time))
    result = source.take(pa.array(index[order]))
    return result.add_column(0, pa.field(ROW_KIND, pa.string(), nullable=False), encode_row_kinds(kind[order]))


def write(name: str, changes: pa.Table, folder: Path, files: int) -> Changes:
    """Writes a stream of changes as ``files`` Parquet files of nearly equal length."""
    kinds = decode_row_kinds(changes[ROW_KIND], input_name=name, column_name=ROW_KIND, has_unique_key=True)
    cuts = np.linspace(0, changes.num_rows, files + 1).astype(np.int64)
    cuts[1:-1] += kinds[cuts[1:-1]] == UPDATE_AFTER  # an update stays whole
    parts = [changes.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
    write_files(parts, folder)
    inserts, updates, _, deletes = (int(c) for c in np.bincount(kinds, minlength=4))
    counts = tuple(part.num_rows for part in parts)
    return Changes(name, folder, changes.schema, _KEYS[name], counts, inserts, updates, deletes)


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


def _updated(rows: pa.Table, column: str) -> pa.Table:
    """The rows with another value in one decimal column."""
    kind = rows.schema.field(column).type
    values = pc.add(rows[column], pa.scalar(Decimal(1), kind)).cast(kind)
    return rows.set_column(rows.schema.get_field_index(column), rows.schema.field(column), values)


def _plain(table: pa.Table) -> pa.Table:
    """Without what the generator's Parquet brings and Spark does not know: string views, field ids."""
    fields = []
    for field in table.schema:
        text = not (pa.types.is_integer(field.type) or pa.types.is_decimal(field.type) or pa.types.is_date(field.type))
        fields.append(pa.field(field.name, pa.string() if text else field.type, field.nullable))
    return table.cast(pa.schema(fields)).combine_chunks()


def _mix(values: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) over n uint64."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _uniform(identity: npt.NDArray[np.uint64], draw: int) -> Floats:
    """Numbers in [0, 1), another set for each ``draw``."""
    bits = _mix(identity ^ _mix(np.full(1, draw, np.uint64)))
    result: Floats = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _numpy(column: pa.ChunkedArray) -> Integers:
    values: Integers = column.to_numpy()
    return values
