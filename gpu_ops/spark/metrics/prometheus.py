"""Metrics of joins as Prometheus has them: counters of rows, histograms of times, gauges of what is there now."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.kernels import LOOKUPS
from gpu_ops.spark.metrics.metrics import OF_AN_INPUT

if TYPE_CHECKING:
    from gpu_ops.spark.metrics.progress import JoinProgress

_LABELS: Final = ("join", "query")
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Metric(NamedTuple):
    """A metric: its class in prometheus_client, name, text, the label beside `_LABELS`, and a factor."""

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
}
"""By what an input's metric is called behind the input's name."""

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
"""All there are, each called ``gpu_join_<name>``; a counter's ends in ``_total``."""


class Prometheus:
    """The metrics of all joins in a registry.

    Args:
        registry: of ``prometheus_client``.
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
        """Those in a registry, by default the global one; made when first asked for.

        Raises:
            NotBuiltError: there is no prometheus-client.
        """
        try:
            from prometheus_client import REGISTRY  # noqa: PLC0415 - optional
        except ImportError as error:
            raise NotBuiltError(
                "metrics for Prometheus need prometheus-client: pip install 'gpu-join[metrics]'"
            ) from error
        registry = REGISTRY if registry is None else registry
        if registry not in cls._of_registry:
            cls._of_registry[registry] = cls(registry)
        return cls._of_registry[registry]

    def add(self, entry: JoinProgress) -> None:
        """Takes a join's micro-batch in."""
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
        """What a query's gauges say is no more; its counters stay."""
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
    """A kind of rows, a step, or a way of lookups, out of a metric's name."""
    return name.removeprefix("rows_out_").removeprefix("lookups_").removesuffix("_ms")


def serve(address: tuple[str, int]) -> Any:
    """A server of the global registry's metrics, at ``http://host:port/metrics``; its ``shutdown()`` ends it.

    Args:
        address: host and port.

    Raises:
        NotBuiltError: there is no prometheus-client.
        DescriptionError: it cannot listen there.
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
