"""Metrics of a join in Spark's own progress: what is counted, how partitions add up, who may listen."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column

    from gpu_ops.bounded import Description

METRICS_COLUMN: Final = "__gpu_join_metrics"
"""The hidden column: null in every row of the changelog, one list per partition and micro-batch."""

METRICS_TYPE: Final = pa.list_(pa.int64())
"""One list costs a row four bytes where it is null; a struct of as many numbers costs it two hundred."""

_OF_INPUT: Final = ("rows_in", "state_rows", "state_bytes", "cold_bytes", "unknown_retractions", "expired", "bad_rows")
_OF_TIMED_INPUT: Final = ("late", "evicted")
_ROWS_OUT: Final = ("rows_out_insert", "rows_out_update_before", "rows_out_update_after", "rows_out_delete")
_TIMES: Final = ("probe_ms", "update_ms", "emit_ms", "commit_ms")
_TASKS: Final = ("retries", "gpu_partitions", "partitions")
_MARKS: Final = ("watermark_ms", "output_watermark_ms", "watermark_lag_ms")

_OF_AN_INPUT: Final = re.compile(f"(.*)_({'|'.join(_OF_INPUT)})", re.DOTALL)
_ALWAYS: Final = frozenset((*_ROWS_OUT, *_TIMES, *_TASKS))


def metric_names(sides: Sequence[str], *, interval: bool = False) -> tuple[str, ...]:
    """What is counted of a join, in the order in which it travels.

    Counts are summed over the partitions; of times, the slowest partition's is shown. Those of an input begin with
    ``left_`` or ``right_``, in a multi-way join with the input's name. ``retries`` counts exchanges that
    were repeated because a state server was gone; ``gpu_partitions`` says how many of the ``partitions`` ran on a
    GPU. An interval join has watermarks, too, in milliseconds since the epoch, with the micro-batch's clock
    less the watermark as ``watermark_lag_ms``; None while there is none.

    Args:
        sides: what the join calls its inputs.
        interval: whether it is an interval join.
    """
    of_input = (*_OF_INPUT, *_OF_TIMED_INPUT) if interval else _OF_INPUT
    counts = [f"{side}_{what}" for what in of_input for side in sides]
    return (*counts, *_ROWS_OUT, *_TIMES, *_TASKS, *(_MARKS if interval else ()))


def pack(names: Sequence[str], metrics: Mapping[str, float | None], *, backend: str, retries: int) -> list[int | None]:
    """A partition's metrics as whole numbers, by `metric_names`; times in microseconds."""
    watermark, clock = metrics.get("watermark_ms"), metrics.get("clock_ms")
    lag = None if watermark is None or clock is None else clock - watermark
    own = {"retries": retries, "gpu_partitions": int(backend == "gpu"), "partitions": 1, "watermark_lag_ms": lag}
    return [_whole(n, own[n] if n in own else metrics.get(n)) for n in names]


def _whole(name: str, value: float | None) -> int | None:
    if value is None:
        return None if name in _MARKS else 0
    return round(value * 1000) if name in _TIMES else int(value)


def known_metrics(join: Description, partitions: int, *, on_cpu: bool) -> dict[str, int]:
    """The metrics that can have one value only.

    Spark updates every aggregate of `observed` in every row of a changelog: 25 of them took 45 % of the processor time
    of its task threads where Arrow read the files.

    Args:
        join: the description.
        partitions: how many.
        on_cpu: whether no partition can run on a GPU.
    """
    known = {"partitions": partitions}
    if on_cpu:
        known["gpu_partitions"] = 0
    if join.emit != "per_event":
        known |= {"rows_out_update_before": 0, "rows_out_update_after": 0}
    for side, source in zip(join.sides, join.inputs, strict=True):
        if on_cpu:
            known[f"{side}_cold_bytes"] = 0
        if source.ttl_ms is None:
            known[f"{side}_expired"] = 0
        if source.bad_rows == "fail":
            known[f"{side}_bad_rows"] = 0
        if source.insert_only:
            known[f"{side}_unknown_retractions"] = 0
    return known


def observed(names: Sequence[str], known: Mapping[str, int]) -> list[Column]:
    """What ``DataFrame.observe`` is given, one aggregate or known value per metric, named like it."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - a worker that only packs needs none

    column, aggregates = f.col(METRICS_COLUMN), []
    for place, name in enumerate(names):
        if name in known:
            aggregates.append(f.lit(known[name]).cast("bigint").alias(name))
            continue
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
        metrics: see `metric_names`; a watermark that there is none of is left out.
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

    def fact(name: str) -> Any:
        return progress[name] if isinstance(progress, Mapping) else getattr(progress, name)

    found = []
    for name, row in (fact("observedMetrics") or {}).items():
        numbers = row.asDict() if hasattr(row, "asDict") else dict(row)
        if numbers.keys() >= _ALWAYS:
            found.append(
                JoinProgress(
                    name=name,
                    query_id=str(fact("id")),
                    query_name=fact("name"),
                    batch_id=int(fact("batchId")),
                    timestamp=str(fact("timestamp")),
                    metrics={n: value for n, value in numbers.items() if value is not None},
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
            ``query``, for an input of a multi-way join ``gpu_join_input_<metric>`` with the label ``input`` as
            well (needs the package prometheus-client, extra ``[metrics]``).
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
        self._make_gauge: Callable[[str, list[str]], Any] | None = None
        if prometheus:
            from prometheus_client import REGISTRY, Gauge  # noqa: PLC0415 - optional

            def make_gauge(name: str, labels: list[str]) -> Any:
                text = f"{name.replace('_', ' ')} of the last micro-batch"
                return Gauge(f"gpu_join_{name}", text, labels, registry=registry or REGISTRY)

            self._make_gauge = make_gauge

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
        if self._make_gauge is not None:
            for name, value in (*entry.metrics.items(), ("batch_id", entry.batch_id)):
                self._gauge(name, entry, self._make_gauge).set(value)
        if self._on_progress is not None:
            self._on_progress(entry)

    def _gauge(self, metric: str, entry: JoinProgress, make: Callable[[str, list[str]], Any]) -> Any:
        labels = {"join": entry.name, "query": entry.query_name or entry.query_id}
        found = _OF_AN_INPUT.fullmatch(metric)
        if found is not None and found[1] not in ("left", "right"):
            # an input may be called what is no name in Prometheus
            metric, labels["input"] = f"input_{found[2]}", found[1]
        if metric not in self._gauges:
            self._gauges[metric] = make(metric, list(labels))
        return self._gauges[metric].labels(**labels)

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
