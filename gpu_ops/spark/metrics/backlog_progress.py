"""A progress bar for a backlog: rows taken in, rows per second, the share that is done."""

from __future__ import annotations

import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from gpu_ops.spark.metrics.progress import JoinProgress, ProgressListener


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
        counts = TextColumn("{task.completed:,.0f} rows, {task.fields[rate]}/s")
        share = (TaskProgressColumn(), TimeRemainingColumn()) if self._total is not None else ()
        bar = Progress(TextColumn("{task.description}"), BarColumn(), counts, *share, console=self._console)
        self._bar = bar, bar.add_task(entry.name, total=self._total, rate="0")
        bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
        self._bar = None
