"""Metrics of a join in Spark's own progress: what is counted, how partitions add up, who may listen."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column

METRICS_COLUMN: Final = "__gpu_join_metrics"
"""The hidden column: null in every row of the changelog, one list per partition and micro-batch."""

METRICS_TYPE: Final = pa.list_(pa.int64())
"""One list costs a row four bytes where it is null; a struct of as many numbers costs it two hundred."""

_COUNTS: Final = (
    "left_rows_in",
    "right_rows_in",
    "rows_out_insert",
    "rows_out_update_before",
    "rows_out_update_after",
    "rows_out_delete",
    "left_state_rows",
    "right_state_rows",
    "left_state_bytes",
    "right_state_bytes",
    "left_unknown_retractions",
    "right_unknown_retractions",
    "left_expired",
    "right_expired",
    "left_bad_rows",
    "right_bad_rows",
    "left_late",
    "right_late",
    "left_evicted",
    "right_evicted",
)
_TIMES: Final = ("probe_ms", "update_ms", "emit_ms", "commit_ms")

_MARKS: Final = ("watermark_ms", "output_watermark_ms", "watermark_lag_ms")

METRICS: Final = (*_COUNTS, *_TIMES, "retries", "gpu_partitions", "partitions", *_MARKS)
"""Counts are summed over the partitions; of times, the slowest partition's is shown.

``retries`` counts exchanges that were repeated because a state server was gone; ``gpu_partitions``
says how many of the ``partitions`` ran on a GPU. The watermarks are an interval join's, in milliseconds
since the epoch, with the micro-batch's clock less the watermark as ``watermark_lag_ms``; None while
there is none.
"""


def pack(metrics: Mapping[str, float | None], *, backend: str, retries: int) -> list[int | None]:
    """A partition's metrics as whole numbers in the order of `METRICS`; times in microseconds."""
    watermark, clock = metrics.get("watermark_ms"), metrics.get("clock_ms")
    lag = None if watermark is None or clock is None else clock - watermark
    own = {"retries": retries, "gpu_partitions": int(backend == "gpu"), "partitions": 1, "watermark_lag_ms": lag}
    return [_whole(n, own[n] if n in own else metrics.get(n)) for n in METRICS]


def _whole(name: str, value: float | None) -> int | None:
    if value is None:
        return None if name in _MARKS else 0
    return round(value * 1000) if name in _TIMES else int(value)


def observed() -> list[Column]:
    """What ``DataFrame.observe`` is given, one aggregate per metric, named like it."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - a worker that only packs needs none

    column, aggregates = f.col(METRICS_COLUMN), []
    for place, name in enumerate(METRICS):
        value = f.get(column, f.lit(place))
        if name in _MARKS:
            aggregates.append(f.max(value).alias(name))
            continue
        total = f.max(value) / 1000.0 if name in _TIMES else f.sum(value)
        aggregates.append(f.coalesce(total, f.lit(0)).alias(name))
    return aggregates


@dataclasses.dataclass(frozen=True)
class JoinProgress:
    """What one join did in one micro-batch.

    Attributes:
        name: the join's name.
        query_id: Spark's id of the query.
        query_name: its name, or None.
        batch_id: the micro-batch.
        timestamp: when the trigger began, ISO 8601.
        metrics: see `METRICS`; a watermark that there is none of is left out.
    """

    name: str
    query_id: str
    query_name: str | None
    batch_id: int
    timestamp: str
    metrics: dict[str, int | float]

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
        One entry per join of this pack; other observed metrics are left alone.
    """

    def value(name: str) -> Any:
        return progress[name] if isinstance(progress, Mapping) else getattr(progress, name)

    found = []
    for name, row in (value("observedMetrics") or {}).items():
        numbers = row.asDict() if hasattr(row, "asDict") else dict(row)
        if set(METRICS) <= numbers.keys():
            found.append(
                JoinProgress(
                    name=name,
                    query_id=str(value("id")),
                    query_name=value("name"),
                    batch_id=int(value("batchId")),
                    timestamp=str(value("timestamp")),
                    metrics={n: numbers[n] for n in METRICS if numbers[n] is not None},
                )
            )
    return found


def _listener_base() -> type:
    try:
        from pyspark.sql.streaming.listener import StreamingQueryListener  # noqa: PLC0415 - pyspark is optional
    except ImportError:
        return object
    return StreamingQueryListener  # type: ignore[no-any-return]


class ProgressListener(_listener_base()):  # type: ignore[misc]
    """Collects the progress of every join of a Spark session.

    Register it with ``spark.streams.addListener(ProgressListener())``.

    Args:
        on_progress: called with each `JoinProgress` as it comes, on Spark's listener thread.
        prometheus: keep Prometheus gauges ``gpu_join_<metric>`` with the labels ``join`` and
            ``query`` (needs the package prometheus-client, extra ``[metrics]``).
        registry: the Prometheus registry, by default the global one.
        keep: how many entries to hold on to.

    Raises:
        ImportError: ``prometheus=True`` without prometheus-client.
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
        self._gauges: dict[str, Any] = {}
        if prometheus:
            from prometheus_client import REGISTRY, Gauge  # noqa: PLC0415 - optional

            self._gauges = {
                name: Gauge(
                    f"gpu_join_{name}",
                    f"{name.replace('_', ' ')} of the last micro-batch",
                    ["join", "query"],
                    registry=registry or REGISTRY,
                )
                for name in (*METRICS, "batch_id")
            }

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
        labels = {"join": entry.name, "query": entry.query_name or entry.query_id}
        for name, gauge in self._gauges.items():
            value = entry.batch_id if name == "batch_id" else entry.metrics.get(name)
            if value is not None:
                gauge.labels(**labels).set(value)
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
        """Nothing to do."""
