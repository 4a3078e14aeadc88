"""What a running job says of each micro-batch; with ``gpu-join run --show`` its result while it changes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpu_ops.jobs.datagen import beyond_end
from gpu_ops.jobs.tables import KINDS, OBSERVED
from gpu_ops.memory import size_text
from gpu_ops.spark.metrics.progress import JoinProgress, join_progress, observed_metrics
from gpu_ops.spark_types import arrow_rows

_MOST: Final = 20
"""Rows of the result, or changes of a micro-batch, at most."""

_AROUND: Final = 9
"""Lines of a screen that are no rows, with one result."""

_ABOVE: Final = 6
"""Lines that a further result has besides its rows."""

_COPIES, _CHANGED = "copies", "changed"


class ShownResult:
    """A result as its changes add up to it, and how many there were.

    Args:
        title: what stands above it.
        screen: where it is shown.
    """

    def __init__(self, title: str, screen: Screen) -> None:
        self.title, self._screen = title, screen
        self.kinds: dict[str, int] = {}
        self.number = -1
        self._names: list[str] = []
        self._rows: pa.Table | None = None

    def take(self, changes: DataFrame, number: int) -> None:
        """One micro-batch of the changelog, for ``foreachBatch``; a repeated one is not counted twice."""
        self.add(arrow_rows(changes), number)

    def add(self, arrived: pa.Table, number: int) -> None:
        """Adds rows of Arrow's to the table."""
        if number <= self.number or not arrived.num_rows:
            return
        self.number = number
        kinds = arrived.column(0)
        for one in pc.value_counts(kinds).to_pylist():
            self.kinds[one["values"]] = self.kinds.get(one["values"], 0) + one["counts"]
        self._names = arrived.column_names[1:]
        columns = [_plain(column) for column in arrived.columns[1:]]
        added, gone = (pc.is_in(kinds, pa.array(both)).cast(pa.int64()) for both in (["+I", "+U"], ["-U", "-D"]))
        keys = [str(n) for n in range(len(columns))]
        changed = pa.chunked_array([pa.array([number] * arrived.num_rows, pa.int64())])
        rows = pa.Table.from_arrays([*columns, pc.subtract(added, gone), changed], [*keys, _COPIES, _CHANGED])
        if self._rows is not None:
            rows = pa.concat_tables([self._rows, rows])
        found = rows.group_by(keys).aggregate([(_COPIES, "sum"), (_CHANGED, "max")])
        found = found.rename_columns([name.removesuffix("_sum").removesuffix("_max") for name in found.column_names])
        self._rows = found.filter(pc.greater(found[_COPIES], 0)).select(rows.column_names)
        self._screen.changed(self, arrived)

    def drawn(self, most: int, seconds: float) -> tuple[Table, Text]:
        """The result as it is, those rows that changed last, in the order of their columns; and a line about it.

        Args:
            most: the number of rows that there is room for.
            seconds: since the first change may have come.
        """
        table = Table(box=box.SIMPLE_HEAD, title=self.title, title_justify="left", title_style="bold")
        for name, column in zip(self._names, self._rows.columns if self._rows is not None else (), strict=False):
            table.add_column(Text(name), justify="right" if _is_number(column.type) else "left")
        total = 0
        if self._rows is not None:
            keys = [str(n) for n in range(len(self._names))]
            total = pc.sum(self._rows[_COPIES]).as_py() or 0
            last = self._rows.take(pc.select_k_unstable(self._rows, most, sort_keys=[(_CHANGED, "descending")]))
            last = last.sort_by([(name, "ascending") for name in keys])
            left = most
            for row in last.to_pylist():
                copies = min(left, row.pop(_COPIES))
                style = "green" if row.pop(_CHANGED) == self.number else None
                for _ in range(copies):
                    table.add_row(*(Text(_text(value)) for value in row.values()), style=style)
                left -= copies
        more = f", {most:,} of them shown" if total > most else ""
        counts = ", ".join(f"{self.kinds[kind]:,} {kind}" for kind in ("+I", "-U", "+U", "-D") if kind in self.kinds)
        changes = sum(self.kinds.values())
        said = f"{total:,} rows{more}; {changes:,} changes ({counts or 'none'}), {changes / seconds:,.0f} a second"
        return table, Text(said, style="bold")


class Screen:
    """A terminal, or lines of text, on which results are shown while they change.

    Args:
        console: where they are shown.
        titles: what stands above each.
        live: the part of a terminal that is drawn anew; None where there is no terminal, which gets lines.
    """

    def __init__(self, console: Console, titles: Sequence[str], live: Live | None = None) -> None:
        self.console, self.live = console, live
        self.line = "Spark starts its first micro-batch"
        self.results = [ShownResult(title, self) for title in titles]
        self._began = time.perf_counter()

    @property
    def views(self) -> list[Callable[[DataFrame, int], None]]:
        """For each result the function that takes its changes, for ``foreachBatch``."""
        return [one.take for one in self.results]

    def changed(self, result: ShownResult, arrived: pa.Table) -> None:
        """Shows what has come to a result."""
        if self.live is not None:
            self.live.update(self.drawn(), refresh=True)
            return
        label = f"{result.title} " if len(self.results) > 1 else ""
        for row in arrived.slice(0, _MOST).to_pylist():
            text = " ".join(_text(value) for value in row.values())
            self.console.print(f"  {label}{text}", markup=False, soft_wrap=True)
        if arrived.num_rows > _MOST:
            self.console.print(f"  {label}and {arrived.num_rows - _MOST:,} changes more", markup=False)

    def report(self, line: str) -> None:
        """Prints a line for a micro-batch."""
        self.line = line
        if self.live is not None:
            self.live.update(self.drawn(), refresh=True)
        else:
            self.console.print(line, markup=False, soft_wrap=True)

    def drawn(self) -> Group:
        """All results, and the line of the last micro-batch."""
        count = len(self.results)
        most = min(_MOST, max(1, (self.console.height - _AROUND - (count - 1) * _ABOVE) // count))
        seconds = time.perf_counter() - self._began
        parts = [part for one in self.results for part in one.drawn(most, seconds)]
        return Group(*parts, Text(self.line, style="dim"), Text("Ctrl-C ends it", style="dim"))


@contextlib.contextmanager
def screen(console: Console, *titles: str) -> Iterator[Screen]:
    """A screen for results with these titles; on a terminal its last picture stays."""
    if not console.is_terminal:
        yield Screen(console, titles)
        return
    with Live(console=console, auto_refresh=False) as live:
        shown = Screen(console, titles, live)
        live.update(shown.drawn(), refresh=True)
        yield shown


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Nested values as text, as Arrow does not group by such."""
    if not pa.types.is_nested(column.type):
        return column
    texts = [None if value is None else str(value) for value in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.string())])


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1e15 else f"{value:g}"
    return "null" if value is None else str(value)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A micro-batch that is done.

    Attributes:
        rows_in: of all sources. Of files that Arrow reads Spark counts the files: then what operators took in counts,
            but for what they took of each other.
        rows_out: changes that went to the sink. None where Spark cannot count them, see `gpu_ops.spark.settings`.
        line: what to print of it.
    """

    rows_in: int
    rows_out: int | None
    line: str

    @classmethod
    def of(
        cls, progress: Mapping[str, Any], last: str | None = None, outside: Mapping[str, Sequence[str]] | None = None
    ) -> Batch | None:
        """A micro-batch of Spark's progress; None for one that did nothing.

        Args:
            progress: of the query.
            last: the join whose changes go to the sink, see `gpu_ops.spark.plan.column_metadata.join_written`.
            outside: for each operator by its name the inputs that are no changes of others.
        """
        joins = join_progress(progress)
        counts = _counted(progress, joins, last)

        def total(end: str) -> int:
            return sum(int(n) for join in joins for name, n in join.metrics.items() if name.endswith(end))

        rows_in = int(progress["numInputRows"]) - beyond_end(progress)
        of_joins = sum(int(n) for join in joins for name, n in join.metrics.items() if name.startswith("rows_out_"))
        rows_out = None if counts is None else sum(counts.values())
        taken = [(join.metrics, side) for join in joins for side in (outside or {}).get(join.name, ())]
        rows_in = max(rows_in, sum(int(metrics[f"{side}_rows_in"]) for metrics, side in taken))
        if not rows_in and not (of_joins if rows_out is None else rows_out):
            return None

        out = ""
        if counts is not None:
            kinds = ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n)
            out = f", {rows_out:,} changes out" + (f" ({kinds})" if kinds else "")
        seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
        parts = [
            f"micro-batch {progress['batchId']}: {rows_in:,} rows in{out}",
            f"{seconds:.1f} s, {rows_in / seconds if seconds else 0:,.0f} rows/s",
            f"state {total('_state_rows'):,} rows, {size_text(total('_state_bytes'))}",
        ]
        watermarks = [join.metrics["watermark_ms"] for join in joins if "watermark_ms" in join.metrics]
        if watermarks:
            parts.append(f"watermark {dt.datetime.fromtimestamp(min(watermarks) / 1000, dt.UTC):%Y-%m-%d %H:%M:%S} UTC")
        backends = {join.backend for join in joins}
        if backends:
            parts.append(backends.pop() if len(backends) == 1 else "mixed")
        return cls(rows_in, rows_out, "; ".join(parts))


def _counted(progress: Mapping[str, Any], joins: Sequence[JoinProgress], last: str | None) -> dict[str, int] | None:
    """The changes that went to the sink by row kind, or None."""
    observed = observed_metrics(progress).get(OBSERVED)
    if observed is not None:
        return {kind: int(observed[name] or 0) for name, kind in KINDS.items()}
    metrics = next((join.metrics for join in joins if join.name == last), None)
    return None if metrics is None else {kind: int(metrics[f"rows_out_{name}"]) for name, kind in KINDS.items()}
