"""Spans of micro-batches for OpenTelemetry, where its API is installed; without its SDK they go nowhere."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_ops.spark.metrics.progress import JoinProgress


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
