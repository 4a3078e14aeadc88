"""Aggregates of windows: a group's row is final when the watermark reaches the end of its window, and comes out then.

Law: of the changes that were not late, folded, each group whose window the watermark has passed has come out once, as
``+I``; nothing takes it back, and nothing of it is kept. A change is late if the watermark in force has reached the end
of its window: it is dropped and counted, be it a row or a retraction; with ``late="tag"``, of insertions, it comes out
as it is. The watermark advances before a micro-batch's changes. So do Spark's window aggregates in output mode
``append``, and Flink's (``WindowOperator`` without allowed lateness), which take no retractions of what they gave
either.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.changelog import LATE_ROW_KIND
from gpu_ops.descriptions.times import BEFORE_ALL, as_integers
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.operators.by_time.timed import AT_WATERMARK, Clock, TimedOperator
from gpu_ops.operators.groups.aggregate.continuous import ContinuousAggregate
from gpu_ops.operators.groups.aggregate.step import Step
from gpu_ops.operators.operator import Cut, Output, Parts, Targets
from gpu_ops.output import Changelog, append_rows
from gpu_ops.state.columns import LIVE
from gpu_ops.state.queue import TimeQueue

_CLOSES = "closes"


class AggregateAtWatermark(TimedOperator[Clock], ContinuousAggregate):
    """Groups of one input over one partition, each until its window ends.

    Args:
        join: the description.
        kernels: the backend.
    """

    join: Aggregate

    def __init__(self, join: Aggregate, kernels: Kernels) -> None:
        self._described = join
        join = dataclasses.replace(join, late="drop")  # late rows are put behind what that gives
        ContinuousAggregate.__init__(self, join, kernels)
        TimedOperator.__init__(self, join, kernels, Clock(seen=(None,)))
        self.stored_clock = f"time of {join.source.name}"
        self._groups.queues[_CLOSES] = TimeQueue(kernels)

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; see `gpu_ops.operators.operator.Operator`."""
        del clock_ms
        started, (change,) = time.perf_counter(), changes
        now = self._advanced(watermark_ms)
        advances = now > self.clock.watermark
        self._next = dataclasses.replace(self.clock, watermark=now)
        kinds, table, evicted = self._closed(now) if advances else self._nothing()
        assert change.times is not None
        self._see(0, change.times)
        late = self._ends(change.column(self._closes)) <= now if now > BEFORE_ALL else np.zeros(change.kinds.size, bool)
        sequence = np.full(kinds.size, AT_WATERMARK, np.int64)
        if self._described.late == "tag":
            table = self._with_late(table, change.pick(late).table)
            sequence = np.concatenate([sequence, change.sequence[late]])
        change = dataclasses.replace(change, times=None)  # no row is found by its time
        step, unknown = self._step(change.pick(~late) if late.any() else change, net=True)
        updated = time.perf_counter()
        if step is not None:
            self._applied(step)
            self._expect(as_slots(self.kernels, self._groups.first_new, len(self._groups) - self._groups.first_new))
        source = self.join.source.name
        metrics = self._metrics(unknown, started, updated) | self._times(0)
        metrics |= {f"{source}_late": int(late.sum()), f"{source}_evicted": evicted}
        return Output(table, sequence, kinds, metrics)

    def _with_late(self, table: pa.Table, late: pa.Table) -> Changelog:
        """Rows of groups, and late rows behind them, with the columns that they alone have."""
        described = self._described
        more = [pa.nulls(table.num_rows, column.type) for column in described.output[len(self.join.output) :]]
        table = pa.Table.from_arrays([*table.columns, *more], schema=described.output_schema)
        return append_rows(described, self.kernels, 0, table, rows=late, kind=LATE_ROW_KIND)

    @property
    def _closes(self) -> str:
        assert self.join.closes is not None
        return self.join.closes

    def _ends(self, column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
        return as_integers(column, self.join.time_type)

    def _nothing(self) -> tuple[Any, pa.Table, int]:
        return np.empty(0, np.int8), self.join.output_schema.empty_table(), 0

    def _closed(self, now: int) -> tuple[Any, pa.Table, int]:
        """Groups whose windows end: row kinds, rows, and how many."""
        xp, groups = self.kernels.xp, self._groups
        due = groups.queues[_CLOSES].take(now)
        # in the order in which groups came, whatever the queue's is
        due = xp.sort(due[groups.status.values[due] == LIVE])
        if not due.size:
            return self._nothing()
        step = Step.without_events(groups, due, self.join.source.schema)
        rows, running = self._applied(step)
        kinds, table, _ = self._changelog(step, (xp.zeros(due.size, np.int64), rows[1]), running)
        self._state.forget(due)
        return kinds, table, int(due.size)

    def _expect(self, slots: Slots) -> None:
        """Groups that are to come out when the watermark reaches the ends of their windows."""
        self._groups.queues[_CLOSES].add(self._ends_of(slots), slots)

    def _ends_of(self, slots: Slots) -> Array:
        field = self.join.source.schema.field(self._closes)
        taken = self._groups.store.take(slots, [field.name], present=True)
        return self.kernels.asarray(self._ends(self.kernels.to_arrow(taken, pa.schema([field]))[0]))

    # --- the stored form ---------------------------------------------------------------------

    def cut(self, parts: Parts, targets: Sequence[Targets], to: Callable[[pa.Table], Targets], count: int) -> Cut:
        """The groups, for other partitions; what is known of time goes to all."""
        made = super().cut(parts, targets, to, count)
        facts = pa.concat_tables([part[self.stored_clock] for part in parts])
        latest = pa.table({name: [pc.max(facts[name])] for name in facts.column_names}, schema=facts.schema)
        return [{**tables, self.stored_clock: latest} for tables in made]

    def restore(self, state: Mapping[str, pa.Table], settle: Callable[[], None]) -> None:
        """Take over a snapshot; see `gpu_ops.operators.operator.Operator`."""
        facts = self._stored_facts(state)
        self.clock = self._next = Clock(facts["watermark"], (facts["left_seen"],))
        ContinuousAggregate.restore(self, state, settle)
        self._expect(as_slots(self.kernels, 0, len(self._groups)))
        self._groups.queues[_CLOSES].commit()


make = AggregateAtWatermark
