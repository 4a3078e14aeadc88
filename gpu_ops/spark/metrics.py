"""Metrics of a join: what is counted, and how partitions add up, in Spark's own progress or beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

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

OF_AN_INPUT: Final = re.compile(f"(.*)_({'|'.join(_OF_INPUT)})", re.DOTALL)
"""A metric of an input: the input's name, and what."""

ALWAYS: Final = frozenset((*_ROWS_OUT, *_TIMES, *_TASKS))
"""What every join counts."""


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


def added_up(partitions: Sequence[Mapping[str, int | None]]) -> dict[str, int | float | None]:
    """What `observed` makes of partitions, without Spark.

    Args:
        partitions: for each what `pack` made, by name; at least one.
    """
    found: dict[str, int | float | None] = {}
    for name in partitions[0]:
        there = [n for n in (numbers[name] for numbers in partitions) if n is not None]
        if name in _MARKS:
            found[name] = max(there, default=None)
        else:
            found[name] = max(there, default=0) / 1000 if name in _TIMES else sum(there)
    return found
