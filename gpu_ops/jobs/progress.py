"""What a running job reports of each micro-batch, on the terminal."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_ops.jobs.sinks import KINDS, OBSERVED
from gpu_ops.memory import readable
from gpu_ops.spark.metrics.progress import JoinProgress, join_progress, observed_metrics


@dataclasses.dataclass(frozen=True)
class Batch:
    """A micro-batch that is done.

    Attributes:
        number: from 0.
        rows_in: of all sources. Of files that Arrow reads Spark counts the files: then what joins took in counts, less
            what they took from each other, as far as that can be told from the changes.
        changes: that went to the sink, by row kind; kinds without any are left out. None where Spark cannot count
            them, see `gpu_ops.spark.plan.plugin`.
        seconds: from its trigger to its commit.
        state_rows: of all joins and inputs.
        state_bytes: likewise.
        watermark_ms: the first join's, milliseconds since the epoch; None where there is none.
        backend: cpu, gpu or mixed; empty for a query without a join.
    """

    number: int
    rows_in: int
    changes: Mapping[str, int] | None
    seconds: float
    state_rows: int
    state_bytes: int
    watermark_ms: int | None
    backend: str

    @property
    def rows_out(self) -> int | None:
        """All changes, or None."""
        return None if self.changes is None else sum(self.changes.values())

    @classmethod
    def of(cls, progress: Mapping[str, Any], last: str | None = None) -> Batch | None:
        """A micro-batch of Spark's progress; None for one that did nothing.

        Args:
            progress: of the query.
            last: the join whose changes are what goes to the sink, see `gpu_ops.spark.plan.recognition.join_written`.
        """
        joins = join_progress(progress)
        counts = _counted(progress, joins, last)

        def total(end: str) -> int:
            return sum(int(n) for join in joins for name, n in join.metrics.items() if name.endswith(end))

        rows_out = sum(int(n) for join in joins for name, n in join.metrics.items() if name.startswith("rows_out_"))
        rows_in = int(progress["numInputRows"])
        if len(joins) == 1:
            rows_in = max(rows_in, total("_rows_in"))
        elif counts is not None:
            rows_in = max(rows_in, total("_rows_in") - max(0, rows_out - sum(counts.values())))
        if not rows_in and not (rows_out if counts is None else any(counts.values())):
            return None

        watermarks = [join.metrics["watermark_ms"] for join in joins if "watermark_ms" in join.metrics]
        backends = {join.backend for join in joins}
        return cls(
            number=int(progress["batchId"]),
            rows_in=rows_in,
            changes=None if counts is None else {kind: n for kind, n in counts.items() if n},
            seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
            state_rows=total("_state_rows"),
            state_bytes=total("_state_bytes"),
            watermark_ms=int(min(watermarks)) if watermarks else None,
            backend=backends.pop() if len(backends) == 1 else "mixed" if backends else "",
        )

    def __str__(self) -> str:
        rate = self.rows_in / self.seconds if self.seconds else 0.0
        parts = [
            f"micro-batch {self.number}: {self.rows_in:,} rows in{self._out()}",
            f"{self.seconds:.1f} s, {rate:,.0f} rows/s",
            f"state {self.state_rows:,} rows, {readable(self.state_bytes)}",
        ]
        if self.watermark_ms is not None:
            at = dt.datetime.fromtimestamp(self.watermark_ms / 1000, dt.UTC)
            parts.append(f"watermark {at:%Y-%m-%d %H:%M:%S} UTC")
        if self.backend:
            parts.append(self.backend)
        return "; ".join(parts)

    def _out(self) -> str:
        if self.changes is None:
            return ""
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in self.changes.items())
        return f", {self.rows_out:,} changes out" + (f" ({kinds})" if kinds else "")


def _counted(progress: Mapping[str, Any], joins: Sequence[JoinProgress], last: str | None) -> dict[str, int] | None:
    """The changes that went to the sink by row kind, or None."""
    observed = observed_metrics(progress).get(OBSERVED)
    if observed is not None:
        return {kind: int(observed[name] or 0) for name, kind in KINDS.items()}
    metrics = next((join.metrics for join in joins if join.name == last), None)
    return None if metrics is None else {kind: int(metrics[f"rows_out_{name}"]) for name, kind in KINDS.items()}
