"""The demonstration from beginning to end."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlparse

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import gpu_ops
from gpu_ops.backends import Backend, gpu_available
from gpu_ops.demo import orders_prices, tpch
from gpu_ops.demo.check import ROW_KIND, Check, check
from gpu_ops.demo.orders_prices import read_changes
from gpu_ops.errors import BackendError
from gpu_ops.memory import size_text
from gpu_ops.spark import session
from gpu_ops.spark.api.session import FIRST_COMPILER
from gpu_ops.spark.metrics.progress import JoinProgress, followed, join_progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

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


def chosen_backend(console: Console, backend: Backend) -> None:
    """Says which backend it will be, and why.

    Raises:
        BackendError: no GPU where one was asked for.
    """
    found, why = gpu_available() if backend != "cpu" else (False, "asked for")
    if backend == "gpu" and not found:
        raise BackendError(f"no GPU answers: {why}")
    reason = why if found or backend == "cpu" else f"no GPU answers: {why}"
    console.print(f"backend [bold]{'gpu' if found else 'cpu'}[/] ({reason})")


@contextlib.contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for all that is written: this one, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gpu-join-demo-") as root:
        yield Path(root)


def scale_for(scale: float | None, rows: int | None) -> float:
    """TPC-H's scale factor: the one given, or what so many changes need."""
    return scale or (DEFAULT_SCALE if rows is None else math.ceil(rows / 9_000) / 1_000)


def run(
    console: Console,
    *,
    scale: float | None = None,
    rows: int | None = None,
    backend: Backend = "auto",
    keep: Path | None = None,
    micro_batches: int = MICRO_BATCHES,
) -> bool:
    """Shows both joins and checks them.

    Args:
        console: where to print.
        scale: TPC-H scale factor; by default what ``rows`` needs, or 0.1.
        rows: about how many changes to stream, or None for all that the scale factor makes.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        keep: an empty folder for everything that is written; by default a temporary one.
        micro_batches: into how many the changes are cut; at least 2.

    Returns:
        Whether both changelogs are right.

    Raises:
        BackendError: no GPU where one was asked for, or no Java.
        DataError: the data cannot be made.
    """
    chosen_backend(console, backend)
    with working_folder(keep) as folder:
        with demo_session(console) as spark:
            console.rule("orders LEFT JOIN prices, event by event as Flink emits it", align="left")
            small = orders_prices.run(spark, folder / "orders_prices", backend=backend, console=console)
            _verdict(console, small)
            console.rule("TPC-H: orders LEFT JOIN lineitem, with updates and deletes", align="left")
            inputs = _generate(console, folder / "tpch", scale_for(scale, rows), rows, micro_batches)
            large = _Tpch(console, inputs, folder / "tpch", backend)
            large.stream(spark, until=micro_batches // 2)
        console.print(
            f"stopped after micro-batch {large.done}, Spark and the state servers as well; "
            "now from the checkpoint and the state folder"
        )
        with demo_session(console) as spark:
            large.stream(spark)
            result = large.check(spark)
        large.summarise(result, kept=keep is not None)
        _verdict(console, result)
    return small.equal and result.equal


def _generate(
    console: Console, folder: Path, scale: float, rows: int | None, micro_batches: int
) -> tuple[tpch.Changes, tpch.Changes]:
    began = time.perf_counter()
    with console.status("TPC-H's tables become streams of changes"):
        inputs = tpch.generate(folder, scale=scale, files=micro_batches, limit=rows)
    for changes in inputs:
        console.print(
            f"{changes.table}: {changes.total:,} changes: {changes.inserts:,} inserts, "
            f"{changes.updates:,} updates (-U and +U), {changes.deletes:,} deletes"
        )
    seconds = time.perf_counter() - began
    console.print(f"scale factor {scale:g}, {micro_batches} micro-batches, made in {seconds:.1f} s")
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
        self, console: Console, inputs: tuple[tpch.Changes, tpch.Changes], folder: Path, backend: Backend
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
        left, right = (
            gpu_ops.stream(
                read_changes(spark, changes.folder),
                unique_key=changes.unique_key,
                row_kind=ROW_KIND,
                updates="retract",
                name=changes.table,
            )
            for changes in self.inputs
        )
        changelog = gpu_ops.join(
            left,
            right,
            on=[("o_orderkey", "l_orderkey")],
            how="left",
            state=str(self.folder / "state"),
            backend=self.backend,
            name="orders_lineitem",
        )
        writer = changelog.writeStream.format("parquet").option("path", str(self.folder / "changelog"))
        return writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(availableNow=True).start()

    def check(self, spark: SparkSession) -> Check:
        """Compares what Spark's sink has committed with DuckDB's join."""
        # inputFiles() goes by the sink's log, _spark_metadata, which names no file of a micro-batch cut short.
        uris = spark.read.parquet(str(self.folder / "changelog")).inputFiles()
        with self.console.status("DuckDB folds the changelog, and joins the folded inputs itself"):
            return check(
                [unquote(urlparse(uri).path) for uri in uris],
                *([str(path) for path in sorted(c.folder.glob("*.parquet"))] for c in self.inputs),
                how="LEFT",
                condition="ON o_orderkey = l_orderkey",
                pad="l_orderkey",
            )

    def summarise(self, result: Check, *, kept: bool) -> None:
        """Prints the numbers."""
        assert self.last is not None, "a query without a micro-batch"
        metrics, total = self.last.metrics, self.rows[-1]
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(result.changes.items()))
        rate = f"{total / self.seconds:,.0f} rows/s over {self.seconds:.1f} s"
        shown = Table(box=box.SIMPLE, show_header=False)
        shown.add_row("changes in", f"{total:,} in {self.done} micro-batches")
        shown.add_row("changelog", f"{sum(result.changes.values()):,} changes: {kinds}")
        shown.add_row("speed", f"{rate}, both starts of the query included")
        shown.add_row("backend", f"{self.last.backend}, {metrics['partitions']} partitions")
        for side, changes in zip(("left", "right"), self.inputs, strict=True):
            size = size_text(int(metrics[f"{side}_state_bytes"]))
            shown.add_row(f"state of {changes.table}", f"{metrics[f'{side}_state_rows']:,} rows, {size} in memory")
        shown.add_row("state folder", f"{self.folder / 'state'}" + ("" if kept else " (temporary)"))
        self.console.print(shown)
        if kept:
            self.console.print(f"gpu-join inspect {self.folder / 'state'}", soft_wrap=True)


def _verdict(console: Console, result: Check) -> None:
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
