"""Metrics of a join: what is counted, and how partitions add up, in Spark's own progress or beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from gpu_ops.conditions import backquoted

if TYPE_CHECKING:
    from pyspark.sql import Column

METRICS_COLUMN: Final = "__gpu_join_metrics"
"""The hidden column: null in every row of the changelog, one list per partition and micro-batch.

It has a longer name where the changelog has a column of this one.
"""

METRICS_FIELD: Final = "metrics"
"""The one column of what a join's name stands for in ``observedMetrics``."""

METRICS_TYPE: Final = pa.list_(pa.int64())
"""One list costs a row four bytes where it is null; a struct of as many numbers costs it two hundred."""

_OF_INPUT: Final = ("rows_in", "state_rows", "state_bytes", "cold_bytes", "unknown_retractions", "expired", "bad_rows")
_OF_TIMED_INPUT: Final = ("late", "evicted")
_ROWS_OUT: Final = ("rows_out_insert", "rows_out_update_before", "rows_out_update_after", "rows_out_delete")
_TIMES: Final = ("probe_ms", "update_ms", "emit_ms", "commit_ms")
_TASKS: Final = ("retries", "gpu_partitions", "partitions")
_MARKS: Final = ("watermark_ms", "output_watermark_ms", "watermark_lag_ms")

OF_AN_INPUT: Final = re.compile(f"(.*)_({'|'.join((*_OF_INPUT, *_OF_TIMED_INPUT))})", re.DOTALL)
"""A metric of an input: the input's name, and what."""

ALWAYS: Final = frozenset((*_ROWS_OUT, *_TIMES, *_TASKS))
"""What every join counts."""


def metric_names(sides: Sequence[str], *, by_time: bool = False) -> tuple[str, ...]:
    """What is counted of a join, in the order in which it travels.

    Counts are summed over the partitions; of times, the slowest partition's is shown. Those of an input begin with
    ``left_`` or ``right_``, in a multi-way join with the input's name. ``retries`` counts exchanges that
    were repeated because a state server was gone; ``gpu_partitions`` says how many of the ``partitions`` ran on a
    GPU. A join by time has watermarks, too, in milliseconds since the epoch, with the micro-batch's clock
    less the watermark as ``watermark_lag_ms``; None while there is none.

    Args:
        sides: what the join calls its inputs.
        by_time: whether rows come and go with time.
    """
    of_input = (*_OF_INPUT, *_OF_TIMED_INPUT) if by_time else _OF_INPUT
    counts = [f"{side}_{what}" for what in of_input for side in sides]
    return (*counts, *_ROWS_OUT, *_TIMES, *_TASKS, *(_MARKS if by_time else ()))


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


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """A name for a column of our own beside a user's: the one that is wanted, or a longer one. Spark heeds no case."""
    names = {name.lower() for name in taken}
    while wanted.lower() in names:
        wanted += "_"
    return wanted


def observed(names: Sequence[str], column: str) -> Column:
    """What ``DataFrame.observe`` is given: one column `METRICS_FIELD`, with a field per metric.

    Spark updates every aggregate in every row of a changelog. One per metric took up to a fifth of a query's
    throughput, so there is one in all: the partitions' lists are collected, and added up on the driver.

    Args:
        names: of the metrics.
        column: the hidden column.
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - a worker that only packs needs none

    def field(index: int, name: str) -> str:
        number = f"get(found.{'most' if name in _MARKS or name in _TIMES else 'sum'}, {index})"
        return f"{f'coalesce({number}, 0) / 1000D' if name in _TIMES else number} AS {backquoted(name)}"

    def over_partitions(nothing: str, both: str) -> str:
        start = f"array_repeat(CAST({nothing} AS BIGINT), {len(names)})"
        return f"aggregate(partitions, {start}, (before, more) -> zip_with(before, more, (x, y) -> {both}))"

    total, most = over_partitions("0", "x + coalesce(y, 0)"), over_partitions("NULL", "greatest(x, y)")
    fields = ", ".join(field(index, name) for index, name in enumerate(names))
    # As text: of calls into the JVM there would be thousands, which take a second. What an array of one is
    # transformed from is computed once, and the fields are short, as Spark analyses them in every micro-batch.
    collected = (
        f"transform(array(collect_list({backquoted(column)})), partitions -> struct({total} AS sum, {most} AS most))"
    )
    return f.expr(f"get(transform({collected}, found -> struct({fields})), 0)").alias(METRICS_FIELD)


def added_up(names: Sequence[str], partitions: Sequence[Sequence[int | None]]) -> dict[str, int | float | None]:
    """What `observed` makes of partitions, without Spark.

    Args:
        names: of the metrics.
        partitions: for each what `pack` made.
    """
    found: dict[str, int | float | None] = {}
    for name, *numbers in zip(names, *partitions, strict=True):
        there = [n for n in numbers if n is not None]
        if name in _MARKS:
            found[name] = max(there, default=None)
        else:
            found[name] = max(there, default=0) / 1000 if name in _TIMES else sum(there)
    return found
