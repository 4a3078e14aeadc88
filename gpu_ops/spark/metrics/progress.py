"""What the joins of a query did in each micro-batch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from gpu_ops.spark.metrics.metrics import ALWAYS, METRICS_FIELD
from gpu_ops.spark.metrics.task_metrics import TASK_METRICS

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
