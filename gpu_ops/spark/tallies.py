"""Metrics that tasks tell the driver themselves, where Spark's progress cannot have them.

NVIDIA's plugin cannot plan ``DataFrame.observe`` (NVIDIA/cudf-spark#14152: a query with an aggregate in it fails).
Where the plugin is on, a task tells the directory what it counted, and `gpu_ops.spark.progress.join_progress` finds
it here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from gpu_ops.spark.metrics import added_up

Packed = Mapping[str, int | None]
"""What `gpu_ops.spark.metrics.pack` makes of a partition's metrics, by name."""

Total = Mapping[str, int | float | None]
"""A join's metrics of one micro-batch, by name."""

_KEPT: Final = 1000


class _Latest(NamedTuple):
    """A join's latest micro-batch; by partition, as a task may be repeated."""

    batch_id: int
    partitions: dict[int, Packed]


class Tallies:
    """The metrics of micro-batches whose tasks have told them; the oldest are forgotten.

    Args:
        kept: how many micro-batches, all joins of all queries together, besides the latest of each.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._lock, self._kept = threading.Lock(), kept
        self._latest: OrderedDict[tuple[str, str], _Latest] = OrderedDict()
        self._totals: OrderedDict[tuple[str, str, int], Total] = OrderedDict()

    def take(self, query_id: str, join: str, batch_id: int, partition: int, numbers: Packed) -> None:
        """Takes in what one partition counted; again is as good as once.

        Args:
            query_id: Spark's id of the query.
            join: the join's name.
            batch_id: the micro-batch; of one that is over nothing more is taken.
            partition: whose numbers they are.
            numbers: its metrics.
        """
        key = query_id, join
        with self._lock:
            latest = self._latest.get(key)
            if latest is not None and latest.batch_id > batch_id:
                return
            if latest is None or latest.batch_id < batch_id:
                if latest is not None:
                    self._totals[(*key, latest.batch_id)] = added_up(list(latest.partitions.values()))
                latest = self._latest[key] = _Latest(batch_id, {})
                self._latest.move_to_end(key)
            latest.partitions[partition] = dict(numbers)
            for forgotten in (self._totals, self._latest):
                while len(forgotten) > self._kept:
                    forgotten.popitem(last=False)

    def of(self, query_id: str, batch_id: int) -> dict[str, Total]:
        """The metrics of a micro-batch's joins, by the join's name; none for one that nothing is known of."""
        with self._lock:
            found: dict[str, Total] = {
                join: added_up(list(latest.partitions.values()))
                for (query, join), latest in self._latest.items()
                if query == query_id and latest.batch_id == batch_id
            }
            for (query, join, batch), total in self._totals.items():
                if (query, batch) == (query_id, batch_id):
                    found[join] = total
        return found


TALLIES: Final = Tallies()
"""Of this driver. Ids of queries are unique, so all its applications share it."""
