"""The progress of a query's joins: read from Spark's progress, passed to listeners, traces and Prometheus.

Prometheus gets counters of rows, histograms of times, and gauges of the present state.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from gpu_ops.errors import DescriptionError, optional_module
from gpu_ops.kernels import LOOKUPS
from gpu_ops.spark.failures import message_in
from gpu_ops.spark.metrics.metrics import ALWAYS, METRICS_FIELD, OF_AN_INPUT, TASK_METRICS

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

_POLL_S: Final = 0.2
_log = logging.getLogger(__name__)
_LABELS: Final = ("join", "query")
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclasses.dataclass(frozen=True)
class JoinProgress:
    """The metrics of one join in one micro-batch.

    Attributes:
        name: the join's name.
        query_id: Spark's id of the query.
        query_name: the query's name, or None.
        batch_id: the micro-batch.
        timestamp: when the trigger began, ISO 8601.
        metrics: the metrics by name, see `metric_names`; without watermarks that do not exist yet.
        trigger_ms: milliseconds that the trigger took, with all joins and Spark's own work; None if unknown.
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
        """The backend of the partitions: ``"cpu"``, ``"gpu"``, or ``"mixed"`` where some ran on each."""
        on_gpu = self.metrics["gpu_partitions"]
        return "cpu" if on_gpu == 0 else "gpu" if on_gpu == self.metrics["partitions"] else "mixed"


def join_progress(progress: Any) -> list[JoinProgress]:
    """Reads the metrics of each join from Spark's progress of a micro-batch.

    Args:
        progress: ``query.lastProgress``, or the progress that a listener gets.

    Returns:
        One entry per join of this package, also where tasks reported to the driver because the RAPIDS plugin is on;
        other observed metrics are ignored.

    Example:
        >>> for join in gpu_ops.spark.join_progress(query.lastProgress):  # doctest: +SKIP
        ...     print(join.name, join.metrics["left_state_rows"])
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
    """The observed metrics of a micro-batch, by name; Spark 3.5 leaves the attribute out where there are none."""
    if not isinstance(progress, Mapping):
        return dict(progress.observedMetrics or {})
    return dict(progress["observedMetrics"] or {}) if "observedMetrics" in progress else {}


def followed(query: StreamingQuery, stop: threading.Event | None = None) -> Generator[Mapping[str, Any], None, None]:
    """Yields Spark's progress of each trigger until the query ends or ``stop`` is set; then the query is stopped.

    Args:
        query: a running query.
        stop: ends the query when another thread sets it.

    Raises:
        StreamingQueryException: the query failed.
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
    durations = progress.get("durationMs") if isinstance(progress, Mapping) else getattr(progress, "durationMs", None)
    return None if durations is None or "triggerExecution" not in durations else int(durations["triggerExecution"])


def _fields(row: Any) -> dict[str, Any]:
    """The fields of a Spark row, or of the JSON of one, by name; empty for anything else."""
    if hasattr(row, "asDict"):
        return dict(row.asDict())
    return dict(row) if isinstance(row, Mapping) else {}


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
        prometheus: keep metrics for Prometheus, `gpu_ops.spark.metrics.progress.METRICS`, with the labels ``join``
            and ``query`` (needs the package prometheus-client). ``spark.gpu_ops.prometheus.port`` does so by itself.
        registry: the Prometheus registry, by default the global one.
        keep: the number of entries to keep.

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
        """The entries so far, oldest first."""
        with self._lock:
            return list(self._entries)

    def add(self, entry: JoinProgress) -> None:
        """Adds an entry, and passes it to Prometheus, the trace and ``on_progress``."""
        with self._lock:
            self._entries.append(entry)
            del self._entries[: -self._keep]
        if self._prometheus is not None:
            self._prometheus.add(entry)
        trace(entry)
        if self._on_progress is not None:
            self._on_progress(entry)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's interface
        """Does nothing when a query starts."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Adds an entry for each join of a micro-batch."""
        for entry in join_progress(event.progress):
            self.add(entry)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Does nothing when a query is idle."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Logs why a query failed, in one message."""
        if self._prometheus is not None:
            self._prometheus.ended(str(event.id))
        if event.exception:
            _log.error("query %s failed: %s", event.id, message_in(str(event.exception)))


def trace(entry: JoinProgress) -> None:
    """Writes a span ``gpu_join.micro_batch`` for one join in one micro-batch, with its metrics as attributes.

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


class _Metric(NamedTuple):
    """A metric in Prometheus: its class in prometheus_client, name, text, further label, and factor."""

    kind: str
    name: str
    text: str
    label: str | None = None
    factor: float = 1.0


_OF_INPUT: Final = {
    "rows_in": _Metric("Counter", "rows_in", "rows taken in", "input"),
    "unknown_retractions": _Metric("Counter", "unknown_retractions", "retractions of rows that are not there", "input"),
    "expired": _Metric("Counter", "expired_rows", "rows forgotten after their TTL", "input"),
    "bad_rows": _Metric("Counter", "bad_rows", "rows that could not be joined", "input"),
    "late": _Metric("Counter", "late_rows", "rows behind the watermark", "input"),
    "evicted": _Metric("Counter", "evicted_rows", "rows that the watermark ended", "input"),
    "state_rows": _Metric("Gauge", "state_rows", "rows of state", "input"),
    "state_bytes": _Metric("Gauge", "state_bytes", "bytes of state", "input"),
    "cold_bytes": _Metric("Gauge", "cold_bytes", "bytes of state moved from GPU to host memory", "input"),
    "disk_bytes": _Metric("Gauge", "disk_bytes", "bytes of state moved to local disk", "input"),
}
"""The metrics of inputs, by their name without the input's."""
_OF_JOIN: Final = {
    **{
        f"rows_out_{kind}": _Metric("Counter", "rows_out", "changes given out", "kind")
        for kind in ("insert", "update_before", "update_after", "delete")
    },
    **{
        f"{step}_ms": _Metric("Histogram", "step_seconds", "time of the slowest partition", "step", 1e-3)
        for step in ("probe", "update", "emit", "commit")
    },
    **{
        f"lookups_{way}": _Metric("Counter", "lookups", "probe rows looked up in a run of an index", "way")
        for way in LOOKUPS
    },
    "disk_written_bytes": _Metric("Counter", "disk_written_bytes", "bytes of state written to local disk"),
    "disk_pages_read": _Metric("Counter", "disk_pages_read", "pages of state read back from local disk"),
    "snapshot_written_bytes": _Metric("Counter", "snapshot_written_bytes", "bytes that snapshots wrote"),
    "replay_ms": _Metric(
        "Gauge", "replay_seconds", "what the log since the last snapshot takes to replay", factor=1e-3
    ),
    "snapshot_age_ms": _Metric(
        "Gauge", "snapshot_age_seconds", "since a server began or the last snapshot was written", factor=1e-3
    ),
    "retries": _Metric("Counter", "retries", "exchanges repeated because a state server was gone"),
    "partitions": _Metric("Gauge", "partitions", "partitions"),
    "gpu_partitions": _Metric("Gauge", "gpu_partitions", "partitions that run on a GPU"),
    "watermark_ms": _Metric("Gauge", "watermark_seconds", "the watermark, since 1970", factor=1e-3),
    "output_watermark_ms": _Metric("Gauge", "output_watermark_seconds", "that of the output, since 1970", factor=1e-3),
    "watermark_lag_ms": _Metric("Gauge", "watermark_lag_seconds", "the clock less the watermark", factor=1e-3),
}
_BATCH: Final = _Metric("Gauge", "micro_batch", "the number of the last micro-batch")
_TIME: Final = _Metric("Histogram", "micro_batch_seconds", "time of a micro-batch, all of Spark's work included")
METRICS: Final = tuple({x.name: x for x in (*_OF_INPUT.values(), *_OF_JOIN.values(), _BATCH, _TIME)}.values())
"""All metrics in Prometheus, each called ``gpu_join_<name>``; a counter's name ends in ``_total``."""


class Prometheus:
    """The metrics of all joins in a registry of Prometheus.

    Args:
        registry: a registry of ``prometheus_client``.
    """

    _of_registry: ClassVar[weakref.WeakKeyDictionary[Any, Prometheus]] = weakref.WeakKeyDictionary()

    def __init__(self, registry: Any) -> None:
        import prometheus_client  # noqa: PLC0415 - optional

        self._made: dict[str, Any] = {}
        for metric in METRICS:
            labels = (*_LABELS, *([] if metric.label is None else [metric.label]))
            more = {"buckets": _BUCKETS} if metric.kind == "Histogram" else {}
            make = getattr(prometheus_client, metric.kind)
            self._made[metric.name] = make(f"gpu_join_{metric.name}", metric.text, labels, registry=registry, **more)
        self._gauges: dict[str, set[tuple[str, tuple[str, ...]]]] = {}

    @classmethod
    def of(cls, registry: Any = None) -> Prometheus:
        """Returns the metrics in a registry, by default the global one, and makes them at the first call.

        Raises:
            NotBuiltError: prometheus-client is not installed.
        """
        needed = "metrics for Prometheus need prometheus-client: pip install 'gpu-join[metrics]'"
        package = optional_module("prometheus_client", needed)
        registry = package.REGISTRY if registry is None else registry
        if registry not in cls._of_registry:
            cls._of_registry[registry] = cls(registry)
        return cls._of_registry[registry]

    def add(self, entry: JoinProgress) -> None:
        """Adds the metrics of a join's micro-batch."""
        for name, value in entry.metrics.items():
            of_input = OF_AN_INPUT.fullmatch(name)
            if of_input is not None:
                self._put(_OF_INPUT[of_input[2]], entry, of_input[1], value)
            elif name in _OF_JOIN:
                self._put(_OF_JOIN[name], entry, _label(name), value)
        self._put(_BATCH, entry, "", entry.batch_id)
        if entry.trigger_ms is not None:
            self._put(_TIME, entry, "", entry.trigger_ms / 1e3)

    def ended(self, query_id: str) -> None:
        """Removes the gauges of a query that has ended; its counters stay."""
        for name, labels in self._gauges.pop(query_id, ()):
            self._made[name].remove(*labels)

    def _put(self, metric: _Metric, entry: JoinProgress, label: str, value: float) -> None:
        labels = (entry.name, entry.query_name or entry.query_id, *([] if metric.label is None else [label]))
        one, value = self._made[metric.name].labels(*labels), value * metric.factor
        if metric.kind == "Counter":
            one.inc(value)
        elif metric.kind == "Histogram":
            one.observe(value)
        else:
            one.set(value)
            self._gauges.setdefault(entry.query_id, set()).add((metric.name, labels))


def _label(name: str) -> str:
    """The label in a metric's name: a kind of rows, a step, or a way of lookups."""
    return name.removeprefix("rows_out_").removeprefix("lookups_").removesuffix("_ms")


def serve(address: tuple[str, int]) -> Any:
    """Serves the global registry's metrics at ``http://host:port/metrics``; ``shutdown()`` of the result ends it.

    Args:
        address: host and port.

    Raises:
        NotBuiltError: prometheus-client is not installed.
        DescriptionError: the address cannot be listened on.
    """
    Prometheus.of()
    from prometheus_client import start_http_server  # noqa: PLC0415 - optional

    host, port = address
    try:
        server, _ = start_http_server(port, host)
    except (OSError, OverflowError) as error:
        raise DescriptionError(
            f"metrics cannot be served on {host}:{port}: {error}; give spark.gpu_ops.prometheus.port another"
        ) from error
    return server
