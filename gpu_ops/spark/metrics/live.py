"""A live table of what joins do, from the metrics that a query serves (``spark.gpu_ops.prometheus.port``)."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pyspark.sql.streaming import StreamingQuery
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gpu_ops.errors import GpuJoinError, optional_module
from gpu_ops.kernels import LOOKUPS
from gpu_ops.memory import size_text
from gpu_ops.spark.metrics.progress import JoinProgress, ProgressListener

_TIMEOUT_S: Final = 5.0
_NUMBERS: Final = (
    "micro-batch", "rows in/s", "rows out/s", "state rows", "state", "on disk", "read back/s",
    "snapshot s", "batch s", "hash joins", "late", "lag s", "retries",
)  # fmt: skip

_WIDEST: Final = 10_000
_BETWEEN: Final = "   "

Values = Mapping[str, float]
"""The numbers of one join by name; lookups are told apart by way, samples that differ in other labels are added up."""


class UnservedError(GpuJoinError, OSError):
    """Raised where nothing serves metrics at the given address."""


class Scrape(NamedTuple):
    """The metrics of all joins at one moment.

    Attributes:
        at: the time, in seconds of the monotonic clock.
        joins: the numbers of each join, by query and join.
    """

    at: float
    joins: dict[tuple[str, str], Values]


def scrape(url: str) -> Scrape:
    """Reads the metrics of all joins once.

    Args:
        url: the address of the metrics.

    Raises:
        UnservedError: nothing answers there.
        NotBuiltError: prometheus-client is not installed.
    """
    needed = "gpu-join top needs prometheus-client: pip install 'gpu-join[metrics]'"
    parser = optional_module("prometheus_client.parser", needed)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the user's own address
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        raise UnservedError(
            f"nothing serves metrics at {url}: {error}. A query does where its application was started with "
            "spark.gpu_ops.prometheus.port=PORT, or gpu-join run with --metrics-port PORT"
        ) from error
    joins: dict[tuple[str, str], dict[str, float]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels: dict[str, Any] = sample.labels
            if sample.name.startswith("gpu_join_") and {"query", "join"} <= labels.keys() and "le" not in labels:
                values = joins.setdefault((labels["query"], labels["join"]), defaultdict(float))
                way = f"_{labels['way']}" if "way" in labels else ""
                values[sample.name.removeprefix("gpu_join_") + way] += sample.value
    return Scrape(time.monotonic(), dict(joins))


class JoinTable:
    """The metrics of all joins: a row for each where that fits, else a name above numbers for each.

    Args:
        now: the last metrics.
        before: earlier metrics, for rates; None to show none.
    """

    def __init__(self, now: Scrape, before: Scrape | None = None) -> None:
        self._joins = {
            name: _shown(now, values, before, before.joins.get(name, {}) if before is not None else {})
            for name, values in sorted(now.joins.items())
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines, for as many characters as there are."""
        table = Table(box=None, header_style="bold")
        for name in ("query", "join"):
            table.add_column(name, no_wrap=True)
        for name in _NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        for (query, join), numbers in self._joins.items():
            table.add_row(query, join, *numbers)
        if table.__rich_measure__(console, options.update(width=_WIDEST)).maximum <= options.max_width:
            yield table
            return
        for (query, join), numbers in self._joins.items():
            yield Text(f"{query}, {join}" if query != join else join, style="bold", overflow="fold")
            widest = max(len(name) + len(number) for name, number in zip(_NUMBERS, numbers, strict=True)) + 1
            cells = [f"{name}{number:>{widest - len(name)}}" for name, number in zip(_NUMBERS, numbers, strict=True)]
            each = max(1, (options.max_width - 2 + len(_BETWEEN)) // (widest + len(_BETWEEN)))
            for n in range(0, len(cells), each):
                yield Text("  " + _BETWEEN.join(cells[n : n + each]), overflow="fold")


def _shown(now: Scrape, values: Values, before: Scrape | None, last: Values) -> list[str]:
    """The numbers of a join as text, in the order of their names."""
    seconds = now.at - before.at if before is not None and last else 0.0
    more = {name: value - last.get(name, 0.0) for name, value in values.items()}
    batches = more.get("micro_batch_seconds_count", 0.0)
    lag = values.get("watermark_lag_seconds")
    return [
        f"{values['micro_batch']:,.0f}" if "micro_batch" in values else "ended",
        _rate(more.get("rows_in_total", 0.0), seconds),
        _rate(more.get("rows_out_total", 0.0), seconds),
        f"{values.get('state_rows', 0):,.0f}",
        size_text(int(values.get("state_bytes", 0))),
        size_text(int(values.get("disk_bytes", 0))),
        _rate(more.get("disk_pages_read_total", 0.0), seconds),
        f"{values['snapshot_age_seconds']:,.0f}" if "snapshot_age_seconds" in values else "-",
        f"{more['micro_batch_seconds_sum'] / batches:.2f}" if batches else "-",
        _share_of_hash_joins(more),
        f"{values.get('late_rows_total', 0):,.0f}",
        "-" if lag is None else f"{lag:,.0f}",
        f"{values.get('retries_total', 0):,.0f}",
    ]


def _share_of_hash_joins(more: Mapping[str, float]) -> str:
    """The share of lookups that went by a hash join, kept hash tables included, as a percentage."""
    counts = {way: more.get(f"lookups_total_{way}", 0.0) for way in LOOKUPS}
    total = sum(counts.values())
    return f"{1 - counts['index'] / total:.0%}" if total else "-"


def watch(url: str, console: Console, *, every_s: float, once: bool = False) -> None:
    """Shows the metrics of all joins until Ctrl-C.

    Args:
        url: the address of the metrics.
        console: the console to draw on.
        every_s: seconds between two readings.
        once: whether to read twice, print, and end.

    Raises:
        UnservedError: nothing answers there.
    """
    before = scrape(url)
    if once:
        time.sleep(every_s)
        console.print(JoinTable(scrape(url), before))
        return
    with Live(JoinTable(before), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(every_s)
            now = scrape(url)
            live.update(JoinTable(now, before), refresh=True)
            before = now


def _rate(more: float, seconds: float) -> str:
    return f"{more / seconds:,.0f}" if seconds else "-"


def progress(query: StreamingQuery, total: int | None = None, *, console: Console | None = None) -> None:
    """Draws a bar of a running query from Spark's own progress, until it has ended.

    Args:
        query: the query that ``start()`` returned. Interrupting the bar (a notebook's cell, Ctrl-C) leaves it running.
        total: rows that will come, of all sources together; without it no share is shown.
        console: where to draw; by default standard error, or the notebook's cell.

    Raises:
        StreamingQueryException: the query has failed.

    Example:
        >>> query = orders.writeStream.format("noop").trigger(availableNow=True).start()  # doctest: +SKIP
        >>> gpu_ops.progress(query, total=1_000_000)  # doctest: +SKIP
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
        total: rows of all inputs together; without it no share is shown.
        name: the name of the join in the query; by default the first one that reports.
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
        """Rows taken in by the run, of all inputs together."""

    @property
    def rows_per_second(self) -> float:
        """Rows taken in per second since the run began."""
        return self.rows / max(time.monotonic() - self._began, 1e-9) if self.rows else 0.0

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's interface
        """Starts the clock of a run, whose query is known with its first micro-batch."""
        with self._guard:
            if self._bar is None:
                self._began = time.monotonic()

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Stops the bar of a run that is over."""
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
