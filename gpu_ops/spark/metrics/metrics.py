"""The metrics of a join: their names, their sums over partitions, and their way into Spark's own progress."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from gpu_ops.conditions import backquoted
from gpu_ops.kernels import LOOKUPS

if TYPE_CHECKING:
    from pyspark.sql import Column

METRICS_COLUMN: Final = "__gpu_join_metrics"
"""The hidden column: null in every row of the changelog, but in one or more rows of a micro-batch its metrics as JSON.

It has a longer name where the changelog has a column of this name.
"""

METRICS_FIELD: Final = "metrics"
"""The one column under a join's name in ``observedMetrics``."""

METRICS_TYPE: Final = pa.string()
"""The type of the hidden column: a null text takes four bytes, a null struct of as many numbers two hundred."""

_OF_INPUT: Final = (
    "rows_in", "state_rows", "state_bytes", "cold_bytes", "disk_bytes", "unknown_retractions", "expired", "bad_rows",
)  # fmt: skip
_OF_TIMED_INPUT: Final = ("late", "evicted")
_ROWS_OUT: Final = ("rows_out_insert", "rows_out_update_before", "rows_out_update_after", "rows_out_delete")
_DISK: Final = ("disk_written_bytes", "disk_pages_read", "snapshot_written_bytes")
_TIMES: Final = ("probe_ms", "update_ms", "emit_ms", "commit_ms", "replay_ms", "snapshot_age_ms")
_LOOKUPS: Final = tuple(f"lookups_{way}" for way in LOOKUPS)
_TASKS: Final = ("retries", "gpu_partitions", "partitions")
_MARKS: Final = ("watermark_ms", "output_watermark_ms", "watermark_lag_ms")

OF_AN_INPUT: Final = re.compile(f"(.*)_({'|'.join((*_OF_INPUT, *_OF_TIMED_INPUT))})", re.DOTALL)
"""Matches the name of an input's metric: the input's name, and the metric."""

ALWAYS: Final = frozenset((*_ROWS_OUT, *_DISK, *_TIMES, *_LOOKUPS, *_TASKS))
"""The metrics that every join has."""


def metric_names(sides: Sequence[str], *, by_time: bool = False) -> tuple[str, ...]:
    """The names of a join's metrics, in the order in which they are sent.

    Counts are summed over the partitions; times are those of the slowest one. Names of an input's metrics begin with
    ``left_`` or ``right_``, in a multi-way join with the input's name. ``lookups_`` counts those of a probe row in a
    run of an index, by way: a hash join, a table that one has built and kept, or a search. ``retries`` counts
    exchanges that were repeated because a state server was gone; ``gpu_partitions`` says how many of the
    ``partitions`` ran on a GPU. A join by time has watermarks, too, in milliseconds since the epoch, with the
    micro-batch's clock less the watermark as ``watermark_lag_ms``; None while there is none.

    Args:
        sides: the join's names of its inputs.
        by_time: whether it is a join by time, which has watermarks.
    """
    of_input = (*_OF_INPUT, *_OF_TIMED_INPUT) if by_time else _OF_INPUT
    counts = [f"{side}_{what}" for what in of_input for side in sides]
    return (*counts, *_ROWS_OUT, *_DISK, *_TIMES, *_LOOKUPS, *_TASKS, *(_MARKS if by_time else ()))


def pack(names: Sequence[str], metrics: Mapping[str, float | None], *, backend: str, retries: int) -> list[int | None]:
    """Packs a partition's metrics as whole numbers in the order of `metric_names`; times in microseconds."""
    watermark, clock = metrics.get("watermark_ms"), metrics.get("clock_ms")
    lag = None if watermark is None or clock is None else clock - watermark
    of_task = {"retries": retries, "gpu_partitions": int(backend == "gpu"), "partitions": 1, "watermark_lag_ms": lag}
    return [_whole(n, of_task[n] if n in of_task else metrics.get(n)) for n in names]


def _whole(name: str, value: float | None) -> int | None:
    if value is None:
        return None if name in _MARKS else 0
    return round(value * 1000) if name in _TIMES else int(value)


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """A name that no other column has, in upper or lower case: the given one, or a longer one."""
    names = {name.lower() for name in taken}
    while wanted.lower() in names:
        wanted += "_"
    return wanted


def observed(names: Sequence[str], column: str, number: int = 0) -> Column:
    """The aggregate for ``DataFrame.observe``: one column `METRICS_FIELD`, with a field per metric.

    Spark analyses, optimises and compiles it for every operator in every micro-batch, and updates every aggregate in
    every row. So partitions are added up elsewhere, see `total`, and one function makes all fields.

    Args:
        names: the names of the metrics.
        column: the hidden column.
        number: the number of the row with them, among the rows with metrics.
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - a worker that only packs needs none
    from pyspark.sql import types as st  # noqa: PLC0415

    fields = [st.StructField(name, st.DoubleType() if name in _TIMES else st.LongType()) for name in names]
    said = f.get(f.collect_list(f.col(backquoted(column))), f.lit(number))
    return f.from_json(said, st.StructType(fields)).alias(METRICS_FIELD)


def of_operators(
    names: Sequence[Sequence[str]], partitions: Sequence[Sequence[int | None]]
) -> list[list[Sequence[int | None]]]:
    """Takes apart what several operators of one engine counted, one after the other.

    Args:
        names: for each operator the names of its metrics.
        partitions: for each partition the numbers of all operators.

    Returns:
        For each operator and partition its numbers.
    """
    ends = list(itertools.accumulate(map(len, names)))
    return [[numbers[end - len(own) : end] for numbers in partitions] for own, end in zip(names, ends, strict=True)]


def total(names: Sequence[str], partitions: Sequence[Sequence[int | None]]) -> str:
    """The text of the hidden column in one row of a micro-batch: `added_up` as JSON."""
    return json.dumps(added_up(names, partitions))


def added_up(names: Sequence[str], partitions: Sequence[Sequence[int | None]]) -> dict[str, int | float | None]:
    """Adds up a join's metrics over all its partitions.

    Args:
        names: the names of the metrics.
        partitions: for each partition the numbers that `pack` returned.
    """
    totals: dict[str, int | float | None] = {}
    for name, *numbers in zip(names, *partitions, strict=True):
        known = [n for n in numbers if n is not None]
        if name in _MARKS:
            totals[name] = max(known, default=None)
        else:
            totals[name] = max(known, default=0) / 1000 if name in _TIMES else sum(known)
    return totals


Packed = Sequence[int | None]
"""A partition's metrics as `pack` returns them."""

Total = Mapping[str, int | float | None]
"""A join's metrics of one micro-batch, by name."""

_KEPT: Final = 1000


class JoinRun(NamedTuple):
    """A join in one run of a query.

    Attributes:
        query_id: Spark's id of the query.
        run_id: Spark's id of the run.
        join: the join's name.
    """

    query_id: str
    run_id: str
    join: str


class _Latest(NamedTuple):
    """The metrics of a join's latest micro-batch, by partition, as a task may be repeated."""

    run_id: str
    batch_id: int
    names: tuple[str, ...]
    partitions: dict[int, Packed]


class TaskMetrics:
    """The metrics of micro-batches whose tasks have reported; the oldest are forgotten.

    Args:
        kept: the number of micro-batches to keep, of all joins of all queries together, besides the latest of each.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._lock, self._kept = threading.Lock(), kept
        self._latest: dict[tuple[str, str], _Latest] = {}
        self._totals: OrderedDict[tuple[str, str, int], Total] = OrderedDict()

    def take(self, run: JoinRun, batch_id: int, partition: int, names: tuple[str, ...], numbers: Packed) -> None:
        """Records one partition's metrics of a micro-batch; idempotent.

        Args:
            run: the join and its run.
            batch_id: the micro-batch; an earlier one than the run's latest is ignored.
            partition: the partition's number.
            names: the names of the metrics.
            numbers: their values, as `pack` returned them.
        """
        key = run.query_id, run.join
        with self._lock:
            latest = self._latest.get(key)
            if latest is not None and latest.run_id == run.run_id and latest.batch_id > batch_id:
                return
            if latest is None or (latest.run_id, latest.batch_id) != (run.run_id, batch_id):
                self._fold(key)
                latest = self._latest[key] = _Latest(run.run_id, batch_id, names, {})
            latest.partitions[partition] = tuple(numbers)

    def over(self, query_id: str) -> None:
        """Ends a run of a query: the metrics of its partitions are kept as sums."""
        with self._lock:
            for key in [key for key in self._latest if key[0] == query_id]:
                self._fold(key)

    def of(self, query_id: str, batch_id: int) -> dict[str, Total]:
        """The metrics of a micro-batch's joins, by the join's name; empty for an unknown micro-batch."""
        with self._lock:
            totals = {
                j: total for (query, j, batch), total in self._totals.items() if (query, batch) == (query_id, batch_id)
            }
            latest = {
                join: added_up(known.names, list(known.partitions.values()))
                for (query, join), known in self._latest.items()
                if query == query_id and known.batch_id == batch_id
            }
        return {**totals, **latest}

    def _fold(self, key: tuple[str, str]) -> None:
        latest = self._latest.pop(key, None)
        if latest is None:
            return
        self._totals[(*key, latest.batch_id)] = added_up(latest.names, list(latest.partitions.values()))
        while len(self._totals) > self._kept:
            self._totals.popitem(last=False)


TASK_METRICS: Final = TaskMetrics()
"""The metrics of this driver's queries; ids of queries are unique, so all its applications share it."""
