"""What a running job reports of each micro-batch, on the terminal."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_ops.jobs.datagen import beyond_end
from gpu_ops.jobs.sinks import KINDS, OBSERVED
from gpu_ops.memory import size_text
from gpu_ops.spark.metrics.progress import JoinProgress, join_progress, observed_metrics


@dataclasses.dataclass(frozen=True)
class Batch:
    """A micro-batch that is done.

    Attributes:
        rows_in: of all sources. Of files that Arrow reads Spark counts the files: then what joins took in counts, less
            what they took from each other, as far as the changes show that.
        rows_out: changes that went to the sink. None where Spark cannot count them, see `gpu_ops.spark.settings`.
        line: what to print of it.
    """

    rows_in: int
    rows_out: int | None
    line: str

    @classmethod
    def of(cls, progress: Mapping[str, Any], last: str | None = None) -> Batch | None:
        """A micro-batch of Spark's progress; None for one that did nothing.

        Args:
            progress: of the query.
            last: the join whose changes go to the sink, see `gpu_ops.spark.plan.column_metadata.join_written`.
        """
        joins = join_progress(progress)
        counts = _counted(progress, joins, last)

        def total(end: str) -> int:
            return sum(int(n) for join in joins for name, n in join.metrics.items() if name.endswith(end))

        rows_in = int(progress["numInputRows"]) - beyond_end(progress)
        of_joins = sum(int(n) for join in joins for name, n in join.metrics.items() if name.startswith("rows_out_"))
        rows_out = None if counts is None else sum(counts.values())
        if len(joins) == 1:
            rows_in = max(rows_in, total("_rows_in"))
        elif rows_out is not None:
            rows_in = max(rows_in, total("_rows_in") - max(0, of_joins - rows_out))
        if not rows_in and not (of_joins if rows_out is None else rows_out):
            return None

        out = ""
        if counts is not None:
            kinds = ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n)
            out = f", {rows_out:,} changes out" + (f" ({kinds})" if kinds else "")
        seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
        parts = [
            f"micro-batch {progress['batchId']}: {rows_in:,} rows in{out}",
            f"{seconds:.1f} s, {rows_in / seconds if seconds else 0:,.0f} rows/s",
            f"state {total('_state_rows'):,} rows, {size_text(total('_state_bytes'))}",
        ]
        watermarks = [join.metrics["watermark_ms"] for join in joins if "watermark_ms" in join.metrics]
        if watermarks:
            parts.append(f"watermark {dt.datetime.fromtimestamp(min(watermarks) / 1000, dt.UTC):%Y-%m-%d %H:%M:%S} UTC")
        backends = {join.backend for join in joins}
        if backends:
            parts.append(backends.pop() if len(backends) == 1 else "mixed")
        return cls(rows_in, rows_out, "; ".join(parts))


def _counted(progress: Mapping[str, Any], joins: Sequence[JoinProgress], last: str | None) -> dict[str, int] | None:
    """The changes that went to the sink by row kind, or None."""
    observed = observed_metrics(progress).get(OBSERVED)
    if observed is not None:
        return {kind: int(observed[name] or 0) for name, kind in KINDS.items()}
    metrics = next((join.metrics for join in joins if join.name == last), None)
    return None if metrics is None else {kind: int(metrics[f"rows_out_{name}"]) for name, kind in KINDS.items()}
