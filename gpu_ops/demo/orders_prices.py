"""A join small enough to follow by eye: orders and their prices, four micro-batches of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table

import gpu_ops
from gpu_ops.backends import Backend
from gpu_ops.demo.check import ROW_KIND, Check, check
from gpu_ops.demo.tpch import write_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDERS: Final = pa.schema([(ROW_KIND, pa.string()), ("order_id", pa.int32()), ("movie_id", pa.int32())])
PRICES: Final = pa.schema([(ROW_KIND, pa.string()), ("order_id", pa.int32()), ("set_price", pa.int32())])

_Row = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one micro-batch brings: ``(row kind, order_id, movie_id or set_price)``."""

    what: str
    orders: tuple[_Row, ...] = ()
    prices: tuple[_Row, ...] = ()


STEPS: Final = (
    Step("two orders, and no price yet", orders=(("+I", 1, 1), ("+I", 2, 40))),
    Step("order 1 gets its price; a third order", orders=(("+I", 3, 3),), prices=(("+I", 1, 40),)),
    Step(
        "the price of order 1 is corrected, order 3 gets one",
        prices=(("-U", 1, 40), ("+U", 1, 45), ("+I", 3, 80)),
    ),
    Step(
        "order 2 is cancelled, the price of order 3 withdrawn",
        orders=(("-D", 2, 40),),
        prices=(("-D", 3, 80),),
    ),
)


def run(spark: SparkSession, folder: Path, *, backend: Backend, console: Console) -> Check:
    """Streams the steps through ``orders LEFT JOIN prices`` and prints the changelog of each.

    Args:
        spark: the session.
        folder: for the inputs, the state and the checkpoint.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        console: where to print.

    Returns:
        Whether the changelog is right.
    """
    inputs = {
        "orders": _tables(ORDERS, [s.orders for s in STEPS]),
        "prices": _tables(PRICES, [s.prices for s in STEPS]),
    }
    for name, tables in inputs.items():
        write_files(tables, folder / name)
    orders, prices = (read_changes(spark, folder / name) for name in inputs)
    changes = gpu_ops.join(
        gpu_ops.stream(orders, row_kind=ROW_KIND, name="orders"),
        gpu_ops.stream(prices, row_kind=ROW_KIND, name="prices"),
        on="order_id",
        how="left",
        emit="per_event",
        state=str(folder / "state"),
        backend=backend,
        name="orders_prices",
    )
    changelogs: dict[int, pa.Table] = {}

    def take(rows: DataFrame, batch: int) -> None:
        changelogs[batch] = rows.toArrow()  # a batch may come twice; the later one counts

    query = changes.writeStream.foreachBatch(take).option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    for number, step in enumerate(STEPS):
        console.print(_table(number, step, changelogs[number]))
    changelog = pa.concat_tables(changelogs[batch] for batch in sorted(changelogs))
    left, right = (pa.concat_tables(tables) for tables in inputs.values())
    return check(changelog, left, right, how="LEFT", condition="USING (order_id)", pad="set_price")


def read_changes(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of the Parquet files in a folder, one for each micro-batch."""
    schema = spark.read.parquet(str(folder)).schema
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def _tables(schema: pa.Schema, steps: Sequence[Sequence[_Row]]) -> list[pa.Table]:
    return [pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema) for rows in steps]


def _table(number: int, step: Step, changelog: pa.Table) -> Table:
    shown = Table(title=f"micro-batch {number + 1}: {step.what}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("orders", "prices", "changelog", "order_id", "movie_id", "set_price"):
        shown.add_column(heading, justify="right" if "_id" in heading or heading == "set_price" else "left")
    out = [
        [_kind(kind), *("null" if value is None else str(value) for value in values)]
        for kind, *values in (row.values() for row in changelog.to_pylist())
    ]
    for orders, prices, row in zip_longest(map(_change, step.orders), map(_change, step.prices), out):
        shown.add_row(orders, prices, *(row or ()))
    return shown


def _change(change: _Row) -> str:
    kind, *values = change
    return f"{_kind(kind)} ({', '.join(map(str, values))})"


def _kind(kind: str) -> str:
    return f"[{'green' if kind.startswith('+') else 'red'}]{kind}[/]"
