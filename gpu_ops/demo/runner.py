"""The demonstration from beginning to end: a join small enough to follow by eye, TPC-H's, a query as a live view."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import gpu_ops
from gpu_ops.backends import Backend, gpu_available
from gpu_ops.demo import tpch
from gpu_ops.errors import BackendError
from gpu_ops.jobs.screen import Screen, screen
from gpu_ops.memory import size_text
from gpu_ops.spark import session
from gpu_ops.spark.api.session import FIRST_COMPILER
from gpu_ops.spark.metrics.progress import JoinProgress, followed, join_progress
from gpu_ops.spark_types import arrow_rows

DEFAULT_SCALE: Final = 0.1
MICRO_BATCHES: Final = 12
_COLUMNS: Final = (
    TextColumn("micro-batch {task.fields[batch]} of {task.fields[batches]}"),
    BarColumn(),
    TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
    TextColumn("{task.fields[rate]:,.0f} rows/s"),
)

_SETTINGS: Final = {
    "spark.driver.memory": "2g",
    # as long as a demonstration runs, for Spark's rows too
    "spark.driver.extraJavaOptions": FIRST_COMPILER,
}

SMALL: Final = "SELECT order_id, movie_id, set_price FROM orders LEFT JOIN prices USING (order_id)"
ORDERS: Final = pa.schema([(tpch.ROW_KIND, pa.string()), ("order_id", pa.int32()), ("movie_id", pa.int32())])
PRICES: Final = pa.schema([(tpch.ROW_KIND, pa.string()), ("order_id", pa.int32()), ("set_price", pa.int32())])
_Row = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a demonstration.

    Attributes:
        scale: the TPC-H scale factor; by default the one that ``rows`` needs, or 0.1.
        rows: the number of changes to stream, about, or None for all that the scale factor makes.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        keep: an empty folder for everything that is written; by default a temporary one.
    """

    scale: float | None = None
    rows: int | None = None
    backend: Backend = "auto"
    keep: Path | None = None

    @property
    def factor(self) -> float:
        """TPC-H's scale factor: the one given, or what so many changes need."""
        return self.scale or (DEFAULT_SCALE if self.rows is None else math.ceil(self.rows / 9_000) / 1_000)

    @contextlib.contextmanager
    def begun(self, console: Console) -> Iterator[Path]:
        """Says which backend it will be, and why; gives the folder for all that is written.

        Raises:
            BackendError: no GPU where one was asked for.
        """
        found, why = gpu_available() if self.backend != "cpu" else (False, "asked for")
        reason = why if found or self.backend == "cpu" else f"no GPU answers: {why}"
        if self.backend == "gpu" and not found:
            raise BackendError(reason)
        console.print(f"backend [bold]{'gpu' if found else 'cpu'}[/] ({reason})")
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            yield self.keep.resolve()
            return
        with tempfile.TemporaryDirectory(prefix="gpu-join-demo-") as root:
            yield Path(root)


def run(console: Console, options: Options, *, micro_batches: int = MICRO_BATCHES) -> bool:
    """Shows both joins and checks them.

    Args:
        console: where to print.
        options: see there.
        micro_batches: into how many the changes are cut; at least 2.

    Returns:
        Whether both changelogs are right.

    Raises:
        BackendError: no GPU where one was asked for, or no Java.
        DataError: the data cannot be made.
    """
    with options.begun(console) as folder:
        with demo_session(console) as spark:
            console.rule("orders LEFT JOIN prices, event by event as Flink emits it", align="left")
            small = run_small(spark, folder / "orders_prices", backend=options.backend, console=console)
            _verdict(console, small)
            console.rule("TPC-H: orders LEFT JOIN lineitem, with updates and deletes", align="left")
            inputs = _generate(console, folder / "tpch", options, micro_batches)
            large = _Tpch(console, inputs, folder / "tpch", options.backend)
            large.stream(spark, until=micro_batches // 2)
        console.print(
            f"stopped after micro-batch {large.done}, Spark and the state servers as well; "
            "now from the checkpoint and the state folder"
        )
        with demo_session(console) as spark:
            large.stream(spark)
            result = large.check(spark)
        large.summarise(result, kept=options.keep is not None)
        _verdict(console, result)
    return small.equal and result.equal


def _generate(
    console: Console, folder: Path, options: Options, micro_batches: int
) -> tuple[tpch.ChangeStream, tpch.ChangeStream]:
    began = time.perf_counter()
    with console.status("TPC-H's tables become streams of changes"):
        inputs = tpch.generate(folder, scale=options.factor, files=micro_batches, limit=options.rows)
    for changes in inputs:
        console.print(
            f"{changes.table}: {changes.total:,} changes: {changes.inserts:,} inserts, "
            f"{changes.updates:,} updates (-U and +U), {changes.deletes:,} deletes"
        )
    seconds = time.perf_counter() - began
    console.print(f"scale factor {options.factor:g}, {micro_batches} micro-batches, made in {seconds:.1f} s")
    return inputs


class _Tpch:
    """The TPC-H join over both runs of its query.

    Args:
        console: where to print.
        inputs: the changes of orders and of lineitems.
        folder: gets the changelog, the state and the checkpoint.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
    """

    def __init__(
        self, console: Console, inputs: tuple[tpch.ChangeStream, tpch.ChangeStream], folder: Path, backend: Backend
    ) -> None:
        self.console, self.inputs, self.folder, self.backend = console, inputs, folder, backend
        self.rows = [0, *accumulate(sum(counts) for counts in zip(*(c.counts for c in inputs), strict=True))]
        self.done, self.seconds = 0, 0.0
        self.last: JoinProgress | None = None

    def stream(self, spark: SparkSession, *, until: int | None = None) -> None:
        """Starts or resumes the query; follows it to the end, or until so many micro-batches are done."""
        before, began = self.seconds, time.perf_counter()
        with Progress(*_COLUMNS, console=self.console) as bar, contextlib.closing(followed(self._start(spark))) as seen:
            batches, rows = len(self.rows) - 1, self.rows[self.done]
            task = bar.add_task("", total=self.rows[-1], completed=rows, batch=self.done, batches=batches, rate=0.0)
            for progress in seen:
                for self.last in join_progress(progress):
                    self.done = self.last.batch_id + 1
                    self.seconds = before + time.perf_counter() - began
                    rows = self.rows[self.done]
                    bar.update(task, completed=rows, batch=self.done, rate=rows / self.seconds)
                if until is not None and self.done >= until:
                    break
        self.seconds = before + time.perf_counter() - began

    def _start(self, spark: SparkSession) -> StreamingQuery:
        state, inputs = str(self.folder / "state"), {changes.table: changes for changes in self.inputs}
        query = tpch.query(tpch.JOIN)
        changelog = tpch.changelog(spark, query, inputs, state=state, backend=self.backend, name=query.name)
        writer = changelog.writeStream.format("parquet").option("path", str(self.folder / "changelog"))
        return writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(availableNow=True).start()

    def check(self, spark: SparkSession) -> tpch.Comparison:
        """Compares what Spark's sink has committed with DuckDB's join."""
        # inputFiles() goes by the sink's log, _spark_metadata, which names no file of a micro-batch cut short.
        uris = spark.read.parquet(str(self.folder / "changelog")).inputFiles()
        with self.console.status("DuckDB folds the changelog, and joins the folded inputs itself"):
            return tpch.check(
                [unquote(urlparse(uri).path) for uri in uris],
                {changes.table: changes.files for changes in self.inputs},
                tpch.query(tpch.JOIN).text,
                pad="l_orderkey",
            )

    def summarise(self, result: tpch.Comparison, *, kept: bool) -> None:
        """Prints the result of the check, and the join's metrics."""
        assert self.last is not None, "a query without a micro-batch"
        metrics, total = self.last.metrics, self.rows[-1]
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(result.changes.items()))
        rate = f"{total / self.seconds:,.0f} rows/s over {self.seconds:.1f} s"
        table = Table(box=box.SIMPLE, show_header=False)
        table.add_row("changes in", f"{total:,} in {self.done} micro-batches")
        table.add_row("changelog", f"{sum(result.changes.values()):,} changes: {kinds}")
        table.add_row("speed", f"{rate}, both starts of the query included")
        table.add_row("backend", f"{self.last.backend}, {metrics['partitions']} partitions")
        for side, changes in zip(("left", "right"), self.inputs, strict=True):
            size = size_text(int(metrics[f"{side}_state_bytes"]))
            table.add_row(f"state of {changes.table}", f"{metrics[f'{side}_state_rows']:,} rows, {size} in memory")
        table.add_row("state folder", f"{self.folder / 'state'}" + ("" if kept else " (temporary)"))
        self.console.print(table)
        if kept:
            self.console.print(f"gpu-join inspect {self.folder / 'state'}", soft_wrap=True)


def _verdict(console: Console, result: tpch.Comparison) -> None:
    if result.equal:
        console.print(
            f"[green]right[/]: the changelog folds to {result.rows:,} rows, {result.pads:,} of them "
            "without a match; DuckDB's LEFT JOIN of the folded inputs has the same"
        )
        return
    console.print(
        f"[red]wrong[/]: the changelog folds to {result.rows:,} rows, DuckDB's LEFT JOIN of the folded "
        f"inputs has {result.expected:,}; {result.missing:,} are missing, {result.surplus:,} too many"
    )
    for row in result.sample:
        console.print(f"  {row}", markup=False, soft_wrap=True)


def demo_session(console: Console) -> SparkSession:
    """The session of a demonstration."""
    with console.status("Spark starts"):
        return session("gpu-join demo", config=_SETTINGS)


@dataclasses.dataclass(frozen=True)
class DemoBatch:
    """The rows of one micro-batch of the small demonstration: ``(row kind, order_id, movie_id or set_price)``."""

    what: str
    orders: tuple[_Row, ...] = ()
    prices: tuple[_Row, ...] = ()


STEPS: Final = (
    DemoBatch("two orders, and no price yet", orders=(("+I", 1, 1), ("+I", 2, 40))),
    DemoBatch("order 1 gets its price; a third order", orders=(("+I", 3, 3),), prices=(("+I", 1, 40),)),
    DemoBatch(
        "the price of order 1 is corrected, order 3 gets one", prices=(("-U", 1, 40), ("+U", 1, 45), ("+I", 3, 80))
    ),
    DemoBatch("order 2 is cancelled, the price of order 3 withdrawn", orders=(("-D", 2, 40),), prices=(("-D", 3, 80),)),
)


def run_small(spark: SparkSession, folder: Path, *, backend: Backend, console: Console) -> tpch.Comparison:
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
        tpch.write_files(tables, folder / name)
    orders, prices = (tpch.read_changes(spark, folder / name) for name in inputs)
    changes = gpu_ops.sql(
        SMALL,
        orders=gpu_ops.stream(orders, row_kind=tpch.ROW_KIND),
        prices=gpu_ops.stream(prices, row_kind=tpch.ROW_KIND),
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
        console.print(_step_table(number, step, changelogs[number]))
    changelog = pa.concat_tables(changelogs[batch] for batch in sorted(changelogs))
    rows = {name: pa.concat_tables(tables) for name, tables in inputs.items()}
    return tpch.check(changelog, rows, SMALL, pad="set_price")


def _tables(schema: pa.Schema, steps: Sequence[Sequence[_Row]]) -> list[pa.Table]:
    return [pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema) for rows in steps]


def _step_table(number: int, step: DemoBatch, changelog: pa.Table) -> Table:
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


def run_query(console: Console, name: str, options: Options) -> bool:
    """Streams changes of TPC-H's tables through a query, shows its result, and checks it after every micro-batch.

    Args:
        console: where to show it: a table that changes on a terminal, else some lines for each micro-batch.
        name: of the query, one of `tpch.NAMES`.
        options: see there.

    Returns:
        Whether the view was right after every micro-batch.

    Raises:
        BackendError: no GPU where one was asked for, or no Java.
        DataError: the data cannot be made.
    """
    one = tpch.query(name)
    with options.begun(console) as folder:
        with console.status("TPC-H's tables become streams of changes"):
            columns = tpch.columns_of([one])
            inputs = tpch.streams(folder, columns, scale=options.factor, files=MICRO_BATCHES, limit=options.rows)
        console.rule(f"TPC-H {name.upper()}: {one.title}", align="left")
        console.print(one.text.strip(), markup=False)
        arriving = list(accumulate(map(sum, zip_longest(*(inputs[t].counts for t in one.columns), fillvalue=0))))
        changelogs: list[pa.Table] = []
        with demo_session(console) as spark, screen(console, one.title) as shown:
            state = str(folder / "state")
            changes = tpch.changelog(spark, one, inputs, state=state, backend=options.backend, name=name)
            writer = changes.writeStream.foreachBatch(showing(shown, arriving, changelogs))
            writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
            writer.start().awaitTermination()
        return _check(console, tpch.Answers(one, inputs), changelogs)


def showing(shown: Screen, arriving: Sequence[int], changelogs: list[pa.Table]) -> Callable[[DataFrame, int], None]:
    """A function for ``foreachBatch`` that shows a view.

    Args:
        shown: where.
        arriving: changes of the inputs up to each micro-batch.
        changelogs: gets that of each micro-batch; one that comes again replaces what it was.
    """
    began = time.perf_counter()

    def take(rows: DataFrame, batch: int) -> None:
        changelogs[batch:] = [arrow_rows(rows)]
        shown.results[0].add(changelogs[batch], batch)
        rate = arriving[batch] / (time.perf_counter() - began)
        what = f"micro-batch {batch + 1} of {len(arriving)}: {arriving[batch]:,} changes in"
        shown.report(f"{what}, {sum(map(len, changelogs)):,} out, {rate:,.0f} a second")

    return take


def _check(console: Console, answers: tpch.Answers, changes: list[pa.Table]) -> bool:
    """Compares each state of the view with DuckDB's answer after the same micro-batch."""
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
