"""One of TPC-H's queries as a view that is shown while it changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpu_ops.backends import Backend
from gpu_ops.demo import tpch
from gpu_ops.demo.queries import Answers, Query, changelog, columns_of, query, view
from gpu_ops.demo.runner import MICRO_BATCHES, chosen_backend, demo_session, scale_for, working_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SHOWN: Final = 12
"""Rows of the view, or changes of a micro-batch, at most."""


def run(
    console: Console,
    name: str,
    *,
    scale: float | None = None,
    rows: int | None = None,
    backend: Backend = "auto",
    keep: Path | None = None,
) -> bool:
    """Streams changes of TPC-H's tables through a query, shows its result, and checks it after every micro-batch.

    Args:
        console: where to show it: a table that changes on a terminal, else some lines for each micro-batch.
        name: of the query, one of `gpu_ops.demo.queries.NAMES`.
        scale: as in `gpu_ops.demo.runner.run`, like those that follow.
        rows: likewise.
        backend: likewise.
        keep: likewise.

    Returns:
        Whether the view was right after every micro-batch.

    Raises:
        BackendError: no GPU where one was asked for, or no Java.
        DataError: the data cannot be made.
    """
    one = query(name)
    chosen_backend(console, backend)
    with working_folder(keep) as folder:
        with console.status("TPC-H's tables become streams of changes"):
            inputs = tpch.streams(
                folder, columns_of([one]), scale=scale_for(scale, rows), files=MICRO_BATCHES, limit=rows
            )
        console.rule(f"TPC-H {name.upper()}: {one.title}", align="left")
        console.print(one.text.strip(), markup=False)
        arriving = [
            sum(inputs[t].counts[n] for t in one.columns if n < len(inputs[t].counts)) for n in range(MICRO_BATCHES)
        ]
        with demo_session(console) as spark, _screen(console, one, arriving) as screen:
            changes = changelog(spark, one, inputs, state=str(folder / "state"), backend=backend, name=name)
            writer = changes.writeStream.foreachBatch(screen.take)
            writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
            writer.start().awaitTermination()
        return _check(console, Answers(one, inputs), screen.changes)


def _check(console: Console, answers: Answers, changes: list[pa.Table]) -> bool:
    """Compares each state of the view with DuckDB's answer."""
    with console.status("DuckDB folds the inputs, and answers the query itself"):
        for number in range(1, len(changes) + 1):
            wrong = answers.differences(pa.concat_tables(changes[:number]), number)
            if wrong:
                console.print(f"[red]wrong[/] after micro-batch {number}: {len(wrong)} rows differ")
                for row in wrong[:5]:
                    console.print(f"  {row}", markup=False, soft_wrap=True)
                return False
    console.print(
        f"[green]right[/]: after each of {len(changes)} micro-batches the view was DuckDB's answer over the folded "
        "inputs"
    )
    return True


class _Screen:
    """Shows a view.

    Args:
        console: where.
        one: the query.
        arriving: changes of the inputs in each micro-batch.
        live: the part of a terminal that is drawn anew; None where there is no terminal.
    """

    def __init__(self, console: Console, one: Query, arriving: list[int], live: Live | None) -> None:
        self.console, self.query, self.arriving, self.live = console, one, arriving, live
        self.changes: list[pa.Table] = []
        self.before: set[tuple[str, ...]] = set()
        self.began = time.perf_counter()

    def take(self, rows: DataFrame, batch: int) -> None:
        """One micro-batch of the changelog; one that comes again replaces what it was."""
        self.changes[batch:] = [rows.toArrow()]
        number = len(self.changes)
        there = _rows(view(self.query, pa.concat_tables(self.changes)))
        total = sum(self.arriving[:number])
        said = (
            f"micro-batch {number} of {len(self.arriving)}: {total:,} changes in, "
            f"{sum(part.num_rows for part in self.changes):,} out, {len(there):,} rows in the view, "
            f"{total / (time.perf_counter() - self.began):,.0f} changes/s"
        )
        if self.live is None:
            self.console.print(said, markup=False)
            for row in _rows(self.changes[-1])[:_SHOWN]:
                self.console.print(f"  {' '.join(row)}", markup=False, soft_wrap=True)
        else:
            self.live.update(Group(self._table(there), Text(said)), refresh=True)
        self.before = set(there)

    def _table(self, there: list[tuple[str, ...]]) -> Table:
        shown = Table(box=box.SIMPLE_HEAD)
        for name in self.changes[0].schema.names[1:]:
            shown.add_column(name)
        for row in there[:_SHOWN]:
            shown.add_row(*row, style=None if row in self.before else "green")
        if len(there) > _SHOWN:
            shown.add_row(f"and {len(there) - _SHOWN:,} more")
        return shown


@contextlib.contextmanager
def _screen(console: Console, one: Query, arriving: list[int]) -> Iterator[_Screen]:
    if not console.is_terminal:
        yield _Screen(console, one, arriving, None)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _Screen(console, one, arriving, live)


def _rows(table: pa.Table) -> list[tuple[str, ...]]:
    """Rows as text."""
    columns = [["null" if value is None else str(value) for value in column.to_pylist()] for column in table.columns]
    return list(zip(*columns, strict=True))
