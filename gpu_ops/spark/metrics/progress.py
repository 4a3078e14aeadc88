"""What the joins of a query did in each micro-batch."""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from gpu_ops.spark.failures import message_in
from gpu_ops.spark.metrics.metrics import ALWAYS, METRICS_FIELD, TASK_METRICS
from gpu_ops.spark.metrics.prometheus import Prometheus

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

_POLL_S: Final = 0.2


@dataclasses.dataclass(frozen=True)
class JoinProgress:
    """What one join did in one micro-batch.

    Attributes:
        name: the join's name.
        query_id: Spark's id of the query.
        query_name: its name, or None.
        batch_id: the micro-batch.
        timestamp: when the trigger began, ISO 8601.
        metrics: see `metric_names`; a watermark that there is none of is left out.
        trigger_ms: how long the trigger took, all joins and Spark's own work; None where that is not known.
    """

    name: str
    query_id: str
    query_name: str | None
    batch_id: int
    timestamp: str
    metrics: dict[str, int | float]
    trigger_ms: int | None = None

    @property
    def backend(self) -> Literal["cpu", "gpu", "mixed"]:
        """Where the partitions ran."""
        on_gpu = self.metrics["gpu_partitions"]
        return "cpu" if on_gpu == 0 else "gpu" if on_gpu == self.metrics["partitions"] else "mixed"


def join_progress(progress: Any) -> list[JoinProgress]:
    """The joins of a micro-batch.

    Args:
        progress: ``query.lastProgress``, or the progress a listener is given.

    Returns:
        One entry per join of this pack; other observed metrics are left alone. What tasks reported to the
        driver, because the RAPIDS plugin is on, is among them.
    """

    def fact(name: str) -> Any:
        return progress[name] if isinstance(progress, Mapping) else getattr(progress, name)

    query_id, batch_id = str(fact("id")), int(fact("batchId"))
    joins: dict[str, Mapping[str, Any]] = dict(TASK_METRICS.of(query_id, batch_id))
    for name, row in observed_metrics(progress).items():
        values = _fields(row)
        if values.keys() == {METRICS_FIELD} and (numbers := _fields(values[METRICS_FIELD])).keys() >= ALWAYS:
            joins[name] = numbers
    return [
        JoinProgress(
            name=name,
            query_id=query_id,
            query_name=fact("name"),
            batch_id=batch_id,
            timestamp=str(fact("timestamp")),
            metrics={n: value for n, value in numbers.items() if value is not None},
            trigger_ms=_trigger_ms(progress),
        )
        for name, numbers in joins.items()
    ]


def observed_metrics(progress: Any) -> Mapping[str, Any]:
    """By name, what was observed in a micro-batch; Spark 3.5 leaves it out where it is nothing."""
    if not isinstance(progress, Mapping):
        return dict(progress.observedMetrics or {})
    return dict(progress["observedMetrics"] or {}) if "observedMetrics" in progress else {}


def followed(query: StreamingQuery, stop: threading.Event | None = None) -> Generator[Mapping[str, Any], None, None]:
    """What Spark reports of each trigger, until the query ends or is to stop; in the end it is stopped.

    Args:
        query: that runs.
        stop: set from elsewhere, ends it.

    Raises:
        StreamingQueryException: it failed.
    """
    seen, ended = (-1, ""), False
    try:
        while not ended:
            ended = bool(query.awaitTermination(_POLL_S))
            if stop is not None and stop.is_set():
                query.stop()
                ended = True
            last: Any = query.lastProgress
            if last is None or (last["batchId"], last["timestamp"]) == seen:
                continue
            for progress in query.recentProgress:
                number = progress["batchId"], progress["timestamp"]  # a trigger without rows has the next one's batchId
                if number > seen:
                    seen = number
                    yield progress
    finally:
        query.stop()


def _trigger_ms(progress: Any) -> int | None:
    found = progress.get("durationMs") if isinstance(progress, Mapping) else getattr(progress, "durationMs", None)
    return None if found is None or "triggerExecution" not in found else int(found["triggerExecution"])


def _fields(row: Any) -> dict[str, Any]:
    """Of a row, or of the JSON of one; nothing of anything else."""
    if hasattr(row, "asDict"):
        return dict(row.asDict())
    return dict(row) if isinstance(row, Mapping) else {}


_log = logging.getLogger(__name__)


def _listener_base() -> type:
    try:
        from pyspark.sql.streaming.listener import StreamingQueryListener  # noqa: PLC0415 - pyspark is optional
    except ImportError:
        return object
    return StreamingQueryListener  # type: ignore[no-any-return]


class ProgressListener(_listener_base()):  # type: ignore[misc]
    """Collects the progress of every join of a Spark session, and logs why a query failed.

    Where OpenTelemetry's API is installed each entry is a span, see `gpu_ops.spark.metrics.progress`.

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


def trace(entry: JoinProgress) -> None:
    """A span ``gpu_join.micro_batch`` of what one join did in one micro-batch, with its metrics as attributes.

    It begins and ends with Spark's trigger; milliseconds of the join's steps are among the attributes.
    """
    try:
        from opentelemetry.trace import get_tracer  # noqa: PLC0415 - optional
    except ImportError:
        return
    begun = dt.datetime.fromisoformat(entry.timestamp)
    start = round(begun.timestamp() * 1e3) * 1_000_000
    attributes: dict[str, str | int | float] = {
        "gpu_join.join": entry.name,
        "gpu_join.query_id": entry.query_id,
        "gpu_join.micro_batch": entry.batch_id,
        "gpu_join.backend": entry.backend,
        **{f"gpu_join.{name}": value for name, value in entry.metrics.items()},
    }
    if entry.query_name is not None:
        attributes["gpu_join.query"] = entry.query_name
    span = get_tracer("gpu_ops").start_span("gpu_join.micro_batch", attributes=attributes, start_time=start)
    span.end(start + round((entry.trigger_ms or 0) * 1e6))
