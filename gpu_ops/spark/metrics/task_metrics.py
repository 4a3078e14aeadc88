"""Metrics that tasks report to the driver themselves, where Spark's progress cannot have them.

NVIDIA's plugin cannot plan ``DataFrame.observe`` (NVIDIA/cudf-spark#14152: a query with an aggregate in it fails).
Where the plugin is on, a task reports to the directory what it counted, and
`gpu_ops.spark.metrics.progress.join_progress` finds it here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpu_ops.spark.metrics.metrics import added_up

Packed = Sequence[int | None]
"""What `gpu_ops.spark.metrics.metrics.pack` makes of a partition's metrics."""

Total = Mapping[str, int | float | None]
"""A join's metrics of one micro-batch, by name."""

_KEPT: Final = 1000


class Run(NamedTuple):
    """A join in a run of a query.

    Attributes:
        query_id: Spark's id of the query.
        run_id: of its run.
        join: the join's name.
    """

    query_id: str
    run_id: str
    join: str


class _Latest(NamedTuple):
    """A join's latest micro-batch; by partition, as a task may be repeated."""

    run_id: str
    batch_id: int
    names: tuple[str, ...]
    partitions: dict[int, Packed]


class TaskMetrics:
    """The metrics of micro-batches whose tasks have reported; the oldest are forgotten.

    Args:
        kept: how many micro-batches, all joins of all queries together, besides the latest of each that runs.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._lock, self._kept = threading.Lock(), kept
        self._latest: dict[tuple[str, str], _Latest] = {}
        self._totals: OrderedDict[tuple[str, str, int], Total] = OrderedDict()

    def take(self, run: Run, batch_id: int, partition: int, names: tuple[str, ...], numbers: Packed) -> None:
        """Takes in what one partition counted; again is as good as once.

        Args:
            run: whose it is.
            batch_id: the micro-batch; of one that the run is done with nothing more is taken.
            partition: which.
            names: of the metrics.
            numbers: them.
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
        """A run of a query has ended: what its partitions counted is kept as a sum."""
        with self._lock:
            for key in [key for key in self._latest if key[0] == query_id]:
                self._fold(key)

    def of(self, query_id: str, batch_id: int) -> dict[str, Total]:
        """The metrics of a micro-batch's joins, by the join's name; none for one that nothing is known of."""
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
"""Of this driver. Ids of queries are unique, so all its applications share it."""
