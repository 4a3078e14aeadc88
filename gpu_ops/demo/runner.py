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

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from gpu_ops.backends import Backend, gpu_available
from gpu_ops.demo import orders_prices, streaming, tpch
from gpu_ops.demo.check import Check, check
from gpu_ops.errors import BackendError
from gpu_ops.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from gpu_ops.spark.metrics.progress import JoinProgress

DEFAULT_SCALE: Final = 0.1
MICRO_BATCHES: Final = 12

_LOGGING: Final = Path(__file__).resolve().parent / "log4j2.properties"
_SETTINGS: Final = {
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": " ".join(
        (
            # In a run this short the JVM's second compiler costs a quarter more CPU time than it saves.
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
        )
    ),
    "spark.ui.showConsoleProgress": "false",
}


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
    found, why = gpu_available() if backend != "cpu" else (False, "asked for")
    if backend == "gpu" and not found:
        raise BackendError(f"no GPU answers: {why}")
    console.print(f"backend [bold]{'gpu' if found else 'cpu'}[/]: {why}")
    with _folder(keep) as folder:
        with _spark(console) as spark:
            console.rule("orders LEFT JOIN prices, event by event as Flink emits it", align="left")
            small = orders_prices.run(spark, folder / "orders_prices", backend=backend, console=console)
            _verdict(console, small)
            console.rule("TPC-H: orders LEFT JOIN lineitem, with updates and deletes", align="left")
            folders = streaming.Folders(folder / "tpch")
            chosen = scale or (DEFAULT_SCALE if rows is None else math.ceil(rows / 9_000) / 1_000)
            inputs = _generate(console, folders.root, chosen, rows, micro_batches)
            large = _Tpch(console, inputs, folders, backend)
            large.stream(spark, stop_after=micro_batches // 2)
        console.print(
            f"stopped after micro-batch {large.done}, Spark and the state servers as well; "
            "now from the checkpoint and the state folder"
        )
        with _spark(console) as spark:
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
        folders: for the changelog, the state and the checkpoint.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
    """

    def __init__(
        self,
        console: Console,
        inputs: tuple[tpch.Changes, tpch.Changes],
        folders: streaming.Folders,
        backend: Backend,
    ) -> None:
        self.console, self.inputs, self.folders, self.backend = console, inputs, folders, backend
        self.counts = [a + b for a, b in zip(inputs[0].counts, inputs[1].counts, strict=True)]
        self.seconds = 0.0
        self.last: JoinProgress | None = None

    @property
    def done(self) -> int:
        """Micro-batches that are known to be done."""
        return 0 if self.last is None else self.last.batch_id + 1

    def stream(self, spark: SparkSession, *, stop_after: int | None = None) -> None:
        """Starts or resumes the query; follows it to the end, or until so many micro-batches are done."""
        until_now = [0, *accumulate(self.counts)]
        before, began = self.seconds, time.perf_counter()
        with _progress_bar(self.console) as bar:
            task = bar.add_task(
                "",
                total=until_now[-1],
                completed=until_now[self.done],
                batch=self.done,
                batches=len(self.counts),
                rate=0.0,
            )

            def show(entry: JoinProgress) -> None:
                self.last = entry
                rows = until_now[self.done]
                rate = rows / (before + time.perf_counter() - began)
                bar.update(task, completed=rows, batch=self.done, rate=rate)

            query = streaming.start(spark, *self.inputs, self.folders, backend=self.backend)
            streaming.follow(query, show, until=None if stop_after is None else stop_after - 1)
        self.seconds += time.perf_counter() - began

    def check(self, spark: SparkSession) -> Check:
        """Compares what Spark's sink has committed with DuckDB's join."""
        with self.console.status("DuckDB folds the changelog, and joins the folded inputs itself"):
            return check(
                streaming.written(spark, self.folders),
                *([str(path) for path in sorted(c.folder.glob("*.parquet"))] for c in self.inputs),
                how="LEFT",
                condition="ON o_orderkey = l_orderkey",
                pad="l_orderkey",
            )

    def summarise(self, result: Check, *, kept: bool) -> None:
        """Prints the numbers."""
        assert self.last is not None, "a query without a micro-batch"
        metrics, total = self.last.metrics, sum(self.counts)
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(result.changes.items()))
        shown = Table(box=box.SIMPLE, show_header=False)
        shown.add_row("changes in", f"{total:,} in {self.done} micro-batches")
        shown.add_row("changelog", f"{sum(result.changes.values()):,} changes: {kinds}")
        rate = f"{total / self.seconds:,.0f} rows/s over {self.seconds:.1f} s"
        shown.add_row("speed", f"{rate}, both starts of the query included")
        shown.add_row("backend", f"{self.last.backend}, {metrics['partitions']} partitions")
        for side, changes in zip(("left", "right"), self.inputs, strict=True):
            rows, size = metrics[f"{side}_state_rows"], metrics[f"{side}_state_bytes"]
            shown.add_row(f"state of {changes.table}", f"{rows:,} rows, {size / 2**20:,.1f} MiB in memory")
        shown.add_row("state folder", f"{self.folders.state}" + ("" if kept else " (temporary)"))
        self.console.print(shown)
        if kept:
            self.console.print(f"gpu-join inspect {self.folders.state}", soft_wrap=True)


def _verdict(console: Console, result: Check) -> None:
    if result.equal:
        console.print(
            f"[green]right[/]: the changelog folds to {result.rows:,} rows, {result.pads:,} of them null "
            "pads; DuckDB's LEFT JOIN of the folded inputs has the very same"
        )
        return
    console.print(
        f"[red]wrong[/]: the changelog folds to {result.rows:,} rows, DuckDB's LEFT JOIN of the folded "
        f"inputs has {result.expected:,}; {result.missing:,} are missing, {result.surplus:,} too many"
    )
    for row in result.sample:
        console.print(f"  {row}", markup=False, soft_wrap=True)


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("micro-batch {task.fields[batch]} of {task.fields[batches]}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
        TextColumn("{task.fields[rate]:,.0f} rows/s"),
        console=console,
    )


@contextlib.contextmanager
def _spark(console: Console) -> Iterator[SparkSession]:
    with console.status("Spark starts"):
        spark = session("gpu-join demo", config=_SETTINGS)
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gpu-join-demo-") as folder:
        yield Path(folder)
