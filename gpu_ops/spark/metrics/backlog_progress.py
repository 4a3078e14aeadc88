"""Progress bars: of a running query, and of a backlog: rows taken in, rows per second, the share that is done."""

from __future__ import annotations

import threading
import time
from typing import Any

from pyspark.sql.streaming import StreamingQuery
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from gpu_ops.spark.metrics.listener import ProgressListener
from gpu_ops.spark.metrics.progress import JoinProgress


def progress(query: StreamingQuery, total: int | None = None, *, console: Console | None = None) -> None:
    """Draws a bar of a running query from Spark's own progress, until it has ended.

    Args:
        query: what ``start()`` gave. To interrupt the bar (a notebook's cell, Ctrl-C) leaves it running.
        total: rows that will come, of all sources together; without it there is no share done.
        console: where to draw; by default standard error, or the notebook's cell.

    Raises:
        StreamingQueryException: the query has failed.
    """
    rows, last, began = 0, -1, time.monotonic()
    with _bar(total, console) as bar:
        task = bar.add_task(query.name or "query", total=total, rate="0")
        while True:
            ended = not query.isActive
            for each in query.recentProgress:
                if each["batchId"] > last:
                    rows, last = rows + each["numInputRows"], each["batchId"]
            bar.update(task, completed=rows, rate=f"{rows / (time.monotonic() - began):,.0f}")
            if ended:
                break
            time.sleep(0.2)
    query.awaitTermination()  # raises what it has failed with


def _bar(total: int | None, console: Console | None) -> Progress:
    counts = TextColumn("{task.completed:,.0f} rows, {task.fields[rate]}/s")
    share = (TaskProgressColumn(), TimeRemainingColumn()) if total is not None else ()
    return Progress(TextColumn("{task.description}"), BarColumn(), counts, *share, console=console)


class BacklogProgress(ProgressListener):
    """Shows how far the runs of a join have come, micro-batch by micro-batch.

    For a long history that is taken in with ``trigger(availableNow=True)``, as a backlog or with ``emit="at_end"``::

        spark.streams.addListener(BacklogProgress(total=60_000_000))

    Args:
        total: rows of all inputs together; without it there is no share done.
        name: the join, of those in the query; by default the first that reports.
        console: where to draw; by default standard error.
    """

    def __init__(self, total: int | None = None, *, name: str | None = None, console: Console | None = None) -> None:
        super().__init__(self._show)
        self._total, self._name = total, name
        self._console = console or Console(stderr=True)
        self._guard = threading.Lock()
        self._bar: tuple[Progress, TaskID] | None = None
        self._query, self._began = "", 0.0
        self.rows = 0
        """Taken in by the run, all inputs together."""

    @property
    def rows_per_second(self) -> float:
        """Since the run began."""
        return self.rows / max(time.monotonic() - self._began, 1e-9) if self.rows else 0.0

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's interface
        """A run begins; whose it is shows with its first micro-batch."""
        with self._guard:
            if self._bar is None:
                self._began = time.monotonic()

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """The bar of a run that is over stays as it is."""
        super().onQueryTerminated(event)
        with self._guard:
            if str(event.id) == self._query:
                self._stop()

    def _show(self, entry: JoinProgress) -> None:
        with self._guard:
            if self._name is None:
                self._name = entry.name
            if entry.name != self._name:
                return
            if self._bar is None:
                self._start(entry)
            assert self._bar is not None
            bar, task = self._bar
            self.rows += sum(int(n) for what, n in entry.metrics.items() if what.endswith("_rows_in"))
            bar.update(task, completed=self.rows, rate=f"{self.rows_per_second:,.0f}")

    def _start(self, entry: JoinProgress) -> None:
        self.rows, self._query = 0, entry.query_id
        self._began = self._began or time.monotonic()
        bar = _bar(self._total, self._console)
        self._bar = bar, bar.add_task(entry.name, total=self._total, rate="0")
        bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
        self._bar = None
