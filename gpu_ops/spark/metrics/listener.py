"""A listener that hands on what each join did in a micro-batch: to whoever asks, to Prometheus, to OpenTelemetry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from gpu_ops.spark.failures import message_in
from gpu_ops.spark.metrics.progress import JoinProgress, join_progress
from gpu_ops.spark.metrics.prometheus import Prometheus
from gpu_ops.spark.metrics.traces import trace

_log = logging.getLogger(__name__)


def _listener_base() -> type:
    try:
        from pyspark.sql.streaming.listener import StreamingQueryListener  # noqa: PLC0415 - pyspark is optional
    except ImportError:
        return object
    return StreamingQueryListener  # type: ignore[no-any-return]


class ProgressListener(_listener_base()):  # type: ignore[misc]
    """Collects the progress of every join of a Spark session, and logs why a query failed.

    Where OpenTelemetry's API is installed each entry is a span, see `gpu_ops.spark.metrics.traces`.

    Register it with ``spark.streams.addListener(ProgressListener())``.

    Args:
        on_progress: called with each `JoinProgress` as it comes, on Spark's listener thread.
        prometheus: keep metrics for Prometheus, `gpu_ops.spark.metrics.prometheus.METRICS`, with the labels ``join``
            and ``query`` (needs the package prometheus-client). ``spark.gpu_ops.prometheus.port`` does so by itself.
        registry: the Prometheus registry, by default the global one.
        keep: how many entries to hold on to.

    Raises:
        NotBuiltError: ``prometheus=True`` without prometheus-client.
    """

    def __init__(
        self,
        on_progress: Callable[[JoinProgress], object] | None = None,
        *,
        prometheus: bool = False,
        registry: Any = None,
        keep: int = 1000,
    ) -> None:
        super().__init__()
        self._on_progress, self._keep = on_progress, keep
        self._lock, self._entries = threading.Lock(), list[JoinProgress]()
        self._prometheus = Prometheus.of(registry) if prometheus else None

    @property
    def entries(self) -> list[JoinProgress]:
        """What came so far, oldest first."""
        with self._lock:
            return list(self._entries)

    def add(self, entry: JoinProgress) -> None:
        """Takes an entry in."""
        with self._lock:
            self._entries.append(entry)
            del self._entries[: -self._keep]
        if self._prometheus is not None:
            self._prometheus.add(entry)
        trace(entry)
        if self._on_progress is not None:
            self._on_progress(entry)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's interface
        """Nothing to do."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Takes in the joins of a micro-batch."""
        for entry in join_progress(event.progress):
            self.add(entry)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Nothing to do."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Logs why a query failed: the message alone."""
        if self._prometheus is not None:
            self._prometheus.ended(str(event.id))
        if event.exception:
            _log.error("query %s failed: %s", event.id, message_in(str(event.exception)))
