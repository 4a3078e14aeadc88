"""A live table of what joins do, from the metrics that a query serves (``spark.gpu_ops.prometheus.port``)."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gpu_ops.errors import GpuJoinError, NotBuiltError
from gpu_ops.memory import size_text

_TIMEOUT_S: Final = 5.0
_NUMBERS: Final = (
    "micro-batch", "rows in/s", "rows out/s", "state rows", "state", "batch s", "late", "lag s", "retries",
)  # fmt: skip

Values = Mapping[str, float]
"""Of one join, by a sample's name; what differs in another label only is added up."""


class UnservedError(GpuJoinError, OSError):
    """Nothing serves metrics where they were asked for."""


class Scrape(NamedTuple):
    """What was served at one moment.

    Attributes:
        at: seconds of the monotonic clock.
        joins: by query and join.
    """

    at: float
    joins: dict[tuple[str, str], Values]


def scrape(url: str) -> Scrape:
    """Asks once.

    Args:
        url: of the metrics.

    Raises:
        UnservedError: nothing answers there.
        NotBuiltError: there is no prometheus-client.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - optional
    except ImportError as error:
        raise NotBuiltError("gpu-join top needs prometheus-client: pip install 'gpu-join[metrics]'") from error
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the user's own address
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        raise UnservedError(
            f"nothing serves metrics at {url}: {error}. A query does where its application was started with "
            "spark.gpu_ops.prometheus.port=PORT, or gpu-join run with --metrics-port PORT"
        ) from error
    joins: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels: dict[str, Any] = sample.labels
            if sample.name.startswith("gpu_join_") and {"query", "join"} <= labels.keys() and "le" not in labels:
                values = joins.setdefault((labels["query"], labels["join"]), defaultdict(float))
                values[sample.name.removeprefix("gpu_join_")] += sample.value
    return Scrape(time.monotonic(), dict(joins))


def show(now: Scrape, before: Scrape | None = None) -> Table:
    """The joins as a table.

    Args:
        now: what was served last.
        before: and a while before, for rates; None for none.
    """
    table = Table(box=None, header_style="bold")
    table.add_column("query")
    table.add_column("join")
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    for (query, join), values in sorted(now.joins.items()):
        last = before.joins.get((query, join), {}) if before is not None else {}
        seconds = now.at - before.at if before is not None and last else 0.0
        more = {name: value - last.get(name, 0.0) for name, value in values.items()}
        batches = more.get("micro_batch_seconds_count", 0.0)
        lag = values.get("watermark_lag_seconds")
        table.add_row(
            query,
            join,
            f"{values['micro_batch']:,.0f}" if "micro_batch" in values else "ended",
            _rate(more.get("rows_in_total", 0.0), seconds),
            _rate(more.get("rows_out_total", 0.0), seconds),
            f"{values.get('state_rows', 0):,.0f}",
            size_text(int(values.get("state_bytes", 0))),
            f"{more['micro_batch_seconds_sum'] / batches:.2f}" if batches else "-",
            f"{values.get('late_rows_total', 0):,.0f}",
            "-" if lag is None else f"{lag:,.0f}",
            f"{values.get('retries_total', 0):,.0f}",
        )
    return table


def watch(url: str, console: Console, *, every_s: float, once: bool = False) -> None:
    """Shows the joins until Ctrl-C.

    Args:
        url: of the metrics.
        console: where.
        every_s: seconds between two looks.
        once: look twice, print, and end.

    Raises:
        UnservedError: nothing answers there.
    """
    before = scrape(url)
    if once:
        time.sleep(every_s)
        console.print(show(scrape(url), before))
        return
    with Live(show(before), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(every_s)
            now = scrape(url)
            live.update(show(now, before), refresh=True)
            before = now


def _rate(more: float, seconds: float) -> str:
    return f"{more / seconds:,.0f}" if seconds else "-"
