"""Aggregates of groups of a changelog, kept up to date, after Flink's ``GroupAggFunction``.

Law: a group is in the result while a row of it is alive; its row is the aggregates over the folded input. So a group
has a count of its rows (Flink's ``RecordCounter``), and is there while that is not zero; without group columns there is
one group, which is there while any row is; or, as in SQL (``Aggregate.always``), from the first micro-batch on.

Row kinds (``per_event``): the first row of a group gives ``+I``, the last that goes ``-D``, any other ``-U`` and ``+U``
if the aggregates are other ones then, else nothing. ``per_batch`` emits ``-D`` for what leaves and ``+I`` for what
comes, and nothing for a group that is as it was.

With a TTL a group that nothing has changed for so long is forgotten with all that is kept for it, and nothing is said
of it; the next row begins it anew, with ``+I``. Of ``per_event`` every change comes out then, be the row as it was or
not, so that what is below does not forget it: ``GroupAggFunction`` does so, too.

State: a row per group, with numbers beside it that rows move (`sums`). An input that can take rows back keeps its rows,
too, as a retraction counts only where its row is there, and an upsert takes the row that it replaces; of one that only
grows nothing is kept but what an aggregate needs: best rows (`extremes`) and different values (`sums`).

**At the watermark**, of windows: a group's row is final when the watermark reaches the end of its window. Law: of the
changes that were not late, folded, each group whose window the watermark has passed has come out once, as ``+I``;
nothing takes it back, and nothing of it is kept. A change is late if the watermark in force has reached the end of its
window: it is dropped and counted, be it a row or a retraction; with ``late="tag"``, of insertions, it comes out as it
is. The watermark advances before a micro-batch's changes. So do Spark's window aggregates in output mode ``append``,
and Flink's (``WindowOperator`` without allowed lateness), which take no retractions of what they gave either.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.aggregate import COLLECTS, MOMENTS, Aggregate
from gpu_ops.descriptions.changelog import DELETE, INSERT, LATE_ROW_KIND, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import BEFORE_ALL, as_integers
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Flagged, Kernels, as_slots
from gpu_ops.operators.core.changes import NEVER, apply_changes, on_device
from gpu_ops.operators.core.key_table import InputRows, ValueTable
from gpu_ops.operators.core.looks import Steps, side_by_side
from gpu_ops.operators.core.order import one_zero
from gpu_ops.operators.groups.aggregate import moments, sums
from gpu_ops.operators.groups.aggregate.collected import Collected
from gpu_ops.operators.groups.aggregate.extremes import Extreme, OwnFunction, best_schema
from gpu_ops.operators.groups.aggregate.state import GroupState, group_table, one_key
from gpu_ops.operators.groups.aggregate.step import AggregateStep, EventRows, Events, Kept, Running, Timeline
from gpu_ops.operators.operator import (
    AT_WATERMARK,
    Clock,
    Cut,
    Operator,
    Parts,
    Targets,
    TimedOperator,
    latest_times,
)
from gpu_ops.output import Beside, Output, no_output
from gpu_ops.state.index import OrderIndex
from gpu_ops.state.pieces import FromSnapshot, Storable
from gpu_ops.state.table import LIVE, KeySet, StateTable
from gpu_ops.state.time_index import TimeQueue


class ContinuousAggregate(Operator):
    """Groups of one input over one partition.

    Args:
        description: the description.
        kernels: the backend.
    """

    description: Aggregate
    tables: Sequence[Any]

    def __init__(self, description: Aggregate, kernels: Kernels) -> None:
        self.description, self.kernels = description, kernels
        schema = description.source.schema
        self._ttl = description.source.ttl_ms
        self._rows: InputRows | None = None
        if not description.source.insert_only:
            keys = [KeySet.of_group(schema, description.by)]
            arrival = any(m.function in ("first", "last") for m in description.measures)
            own_rows = dataclasses.replace(description.source, ttl_ms=None)  # a group goes as one
            self._rows = InputRows(kernels, own_rows, keys, findable=True, arrival_counts=arrival)
        columns: dict[str, npt.DTypeLike] = {"rows": np.int64}
        extremes: list[Extreme | OwnFunction] = []
        parts: dict[str, StateTable] = {}
        self._moved: list[Callable[[AggregateStep], Running | Steps[Running]]] = []
        """Gives, of a micro-batch, each aggregate at each moment."""
        for number, described in enumerate(description.measures):
            measure = described
            place = -1 if measure.column is None else schema.names.index(measure.column)
            kind = None if measure.column is None else schema.field(place).type
            moved: Callable[[AggregateStep], Running | Steps[Running]]
            if measure.function in COLLECTS:
                result = description.output[len(description.by) + number].type
                measure = measure._replace(own=Collected(measure, kind, result))
            if measure.function == "count_distinct":
                columns |= {sums.GROUP_NUMBER: np.int64, f"different_{number}": np.int64}
                forgets = description.by_time or self._ttl is not None
                table = parts[f"values {number}"] = sums.value_table(kernels, kind, measure.name, forgets=forgets)
                moved = functools.partial(sums.different, name=f"different_{number}", table=table, measure=measure)
            elif measure.own is not None:
                states = ValueTable(kernels, Input(measure.name, measure.own.state), {})
                parts[f"states {number}"] = states
                extremes.append(own := OwnFunction(measure, f"state_{number}", states))
                columns[own.name], moved = np.int64, own.moved
            elif measure.function in ("min", "max", "first", "last"):
                order = description.source.sequence_by if measure.function in ("first", "last") else None
                best: Any = self._rows
                if best is None:
                    own_rows = Input(measure.name, best_schema(measure, schema, order))
                    best = parts[f"rows {number}"] = ValueTable(kernels, own_rows, {})
                extremes.append(one := Extreme(measure, f"best_{number}", best, order, exclusive=self._rows is None))
                if self._rows is not None:
                    self._rows.indexes[one.name] = OrderIndex(kernels)
                columns[one.name], moved = np.int64, one.moved
            elif measure.function in MOMENTS:
                key = moments.key_of(measure, schema)
                columns.update(dict.fromkeys(moments.columns_of(key), np.int64))
                moved = functools.partial(moments.moved, measure=measure, key=key)
            else:
                columns.update(dict.fromkeys(sums.columns_of(measure, kind, place), np.int64))
                result = description.output[len(description.by) + number].type
                moved = functools.partial(sums.moved, measure=measure, kind=kind, number=place, result=result)
            self._moved.append(moved)
        self._groups = group_table(kernels, description.source, description.by, columns)
        self._state = GroupState(description.source, self._groups, self._rows, parts, extremes)
        self.tables = (self._state.main,)
        self._next_number = self._given = 1

    # --- a micro-batch -----------------------------------------------------------------------

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; no watermark matters."""
        return self._prepare(changes[0], clock_ms, net=self.description.emit == "per_batch")

    def prepare_net(self, changes: tuple[Ingested, ...], clock_ms: int) -> Output:
        """Computes one micro-batch like `prepare`, but only its net change, whatever ``emit`` is."""
        return self._prepare(changes[0], clock_ms, net=True)

    def _prepare(self, change: Ingested, clock_ms: int, *, net: bool) -> Output:
        started = time.perf_counter()
        expired = self._groups.expired(clock_ms)
        self._state.forget(expired)
        begins = self.description.always and not self._groups.live_after()
        step, unknown = self._step(change, net=net)
        if step is None and begins:
            found = self._groups.locate(one_key(self.kernels, 1))
            self._number(found.slots)
            step = AggregateStep.without_events(self._groups, found.slots, self.description.source.schema)
        updated = time.perf_counter()
        if step is None:
            kinds, sequence = np.empty(0, np.int8), np.empty(0, np.int64)
            table = self.description.values_schema.empty_table()
        else:
            count, running = self._applied(step)
            self._groups.touch(step.line.slots, clock_ms)
            kinds, table, sequence = self._changelog(step, count, running)
        metrics = self._metrics(unknown, started, updated, expired=int(expired.size))
        return Output(table, kinds, sequence, metrics)

    def _metrics(self, unknown: int, started: float, updated: float, *, expired: int = 0) -> dict[str, int | float]:
        source = self.description.source.name
        return {
            f"{source}_unknown_retractions": unknown,
            f"{source}_expired": expired,
            "update_ms": (updated - started) * 1e3,
            "probe_ms": 0.0,
            "emit_ms": (time.perf_counter() - updated) * 1e3,
        }

    def _applied(self, step: AggregateStep) -> tuple[tuple[Array, Array], list[Running]]:
        """The number of rows and the aggregates of each group, moved."""
        count = step.counted()
        running = side_by_side(self.kernels, [_running(moved, step) for moved in self._moved])
        step.write()
        if not self.description.always:
            self._groups.end(step.line.slots[step.line.final(count[1]) == 0])
        return count, running

    def _step(self, change: Ingested, *, net: bool) -> tuple[AggregateStep | None, int]:
        """The micro-batch by groups, None where nothing happens; and how many retractions were of no row."""
        kernels, xp, schema, rows = self.kernels, self.kernels.xp, self.description.source.schema, self._rows
        kept: Kept | None = None
        unknown = 0
        sign: Array | None = None
        column: Callable[[str], pa.ChunkedArray]
        if rows is None:
            frame, column, new = change.frame(kernels), change.column, int(change.kinds.size)
            row: Any = xp.arange(new, dtype=np.int64)
            logical_times: Any = row if net else 2 * kernels.asarray(change.sequence) + 1
            total = new
        else:
            event_kinds = None if net else xp.zeros(2 * int(change.kinds.size) + 2, np.int8)
            (what,) = on_device([rows], [change], net=net)
            side = apply_changes(rows, change.frame(kernels), what, event_kinds, net=net)
            unknown = int(side.unknown)
            slots, logical_times, signs = side.events(kernels)  # of new rows, of killed ones, and of new ones that die
            new, killed = side.new, side.killed
            row = xp.arange(new + int(killed.size), dtype=np.int64)
            if side.deaths is not None:  # the same rows again
                row = xp.concatenate([row, xp.flatnonzero(side.deaths != NEVER)])
            sign = None if not side.any_death else signs.astype(np.int64)
            taking_part = xp.concatenate([slots[:new], killed])
            frame = rows.store.take(taking_part, schema.names, present=True)
            kept, total = Kept(rows, side), new + int(killed.size)

            def column(name: str) -> pa.ChunkedArray:
                one = kernels.combine([(name, frame, name)])
                return kernels.to_arrow(one, pa.schema([schema.field(name)]))[0]

        if not total:
            return None, unknown
        found = self._groups.locate(frame if self.description.by else one_key(kernels, total))
        self._number(found.slots)
        # of a net change an event is a row
        line = Timeline(kernels, found.slots, found.number if net else found.number[row], logical_times, net=net)
        events = Events(row, logical_times, sign)
        return AggregateStep(self._groups, line, events, EventRows(frame, column, found.number, new, kept)), unknown

    def _number(self, slots: Array) -> None:
        """Give new groups numbers, where their values need them."""
        column = self._groups.beside.get(sums.GROUP_NUMBER)
        if column is None:
            return
        xp = self.kernels.xp
        fresh = slots[slots >= self._groups.first_new]
        column.values[fresh] = xp.arange(fresh.size, dtype=np.int64) + self._next_number
        self._given = self._next_number + int(fresh.size)

    # --- the changelog -----------------------------------------------------------------------

    def _changelog(
        self, step: AggregateStep, count: tuple[Array, Array], running: Sequence[Running], *, come: bool = False
    ) -> tuple[npt.NDArray[np.int8], pa.Table, npt.NDArray[np.int64]]:
        """Row kinds, rows without these, and the change that caused each; ``come``: as if no group had been there."""
        kernels, xp, line = self.kernels, self.kernels.xp, step.line
        was, now = count[0] > 0, count[1] > 0
        if self.description.always:
            now = xp.ones(now.size, bool)
            was = now.copy()
            was[line.starts[line.slots >= self._groups.first_new]] = False
        if come:
            was = xp.zeros(now.size, bool)
        changed = was ^ now
        if self._ttl is not None and not line.net:
            changed = was | now  # what is below has a TTL, too
        for aggregate in running:
            for before, after in list(zip(aggregate.before, aggregate.after, strict=True))[: aggregate.compared]:
                changed |= before != after
        (minus,), (plus,) = kernels.flagged([Flagged(was & changed, [0]), Flagged(now & changed, [0])])[0]
        replaced = now[minus] if not line.net else xp.zeros(minus.size, bool)
        replaces = was[plus] if not line.net else xp.zeros(plus.size, bool)
        kinds = xp.concatenate(
            [
                xp.where(replaced, np.int8(UPDATE_BEFORE), np.int8(DELETE)),
                xp.where(replaces, np.int8(UPDATE_AFTER), np.int8(INSERT)),
            ]
        )
        group = line.slots[line.group[xp.concatenate([minus, plus])]]
        looks = [kinds]  # all that the host is told, at once
        for aggregate in running:
            pairs = list(zip(aggregate.before, aggregate.after, strict=True))[aggregate.first_made :]
            looks += [xp.concatenate([before[minus], after[plus]]) for before, after in pairs]
        if not line.net:
            at = line.logical_times()
            logical_times = xp.concatenate([at[minus], at[plus]])
            rank = 2 * logical_times
            rank[minus.size :] += 1
            looks += [kernels.argsort(rank), logical_times]
        found, *told = kernels.on_host(looks)
        order = sequence = None
        if not line.net:
            order, logical_times = told[-2:]
            sequence = (logical_times >> 1)[order]
        data: list[Any] = []
        if self.description.by:
            taken = self._groups.store.take(group, self.description.by, present=True)
            types = [c.type for c in self.description.output[: len(self.description.by)]]
            keys = kernels.to_arrow(taken, pa.schema(list(zip(self.description.by, types, strict=True))))
            data = [pa.chunked_array([one_zero(chunk) for chunk in c.chunks], c.type) for c in keys.columns]
        for aggregate, column in zip(running, self.description.output[len(self.description.by) :], strict=True):
            count_of = len(aggregate.before) - aggregate.first_made
            numbers, told = told[:count_of], told[count_of:]
            made = aggregate.to_arrow(*numbers)
            data.append(made if made.type == column.type else made.cast(column.type))
        table = pa.Table.from_arrays(data, schema=self.description.values_schema)
        if order is not None:
            found, table = found[order], table.take(pa.array(order))
        return found, table, np.zeros(found.size, np.int64) if sequence is None else sequence

    def present_result(self) -> Output:
        """The row of each group, as insertions."""
        groups = self._groups
        slots = as_slots(self.kernels, 0, len(groups))
        slots = slots[groups.status.values[slots] == LIVE]
        if not slots.size:
            return no_output(self.description, {})
        step = AggregateStep.without_events(groups, slots, self.description.source.schema)
        count, running = self._applied(step)
        kinds, table, sequence = self._changelog(step, count, running, come=True)
        return Output(table, kinds, sequence, {})

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        self._next_number = self._given
        super().commit(clock_ms)

    def discard(self) -> None:
        """Forget the prepared micro-batch."""
        self._given = self._next_number
        super().discard()

    # --- the stored form ---------------------------------------------------------------------

    def kept(self) -> dict[str, Storable]:
        """The input's rows, the groups, and what else there is of them."""
        return self._state.kept()

    def cut(
        self, parts: Parts, targets: Sequence[Sequence[Targets]], to: Callable[[pa.Table], Targets], count: int
    ) -> Cut:
        """The groups and what there is of them, for other partitions; see `gpu_ops.operators.operator.Operator`."""
        return self._state.cut(parts, targets[0], to, count)

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot; see `gpu_ops.operators.operator.Operator`."""
        self._state.restore(state, settle)
        numbers = self._groups.beside.get(sums.GROUP_NUMBER)
        if numbers is not None and len(numbers):
            self._next_number = self._given = int(numbers.values.max()) + 1


_CLOSES = "closes"


class AggregateAtWatermark(TimedOperator[Clock], ContinuousAggregate):
    """Groups of one input over one partition, each until its window ends.

    Args:
        description: the description.
        kernels: the backend.
    """

    description: Aggregate

    def __init__(self, description: Aggregate, kernels: Kernels) -> None:
        self._described = description
        description = dataclasses.replace(description, late="drop")  # late rows are put behind what that gives
        ContinuousAggregate.__init__(self, description, kernels)
        TimedOperator.__init__(self, description, kernels, Clock(seen=(None,) * len(description.watermarked)))
        self.stored_clock = f"time of {description.source.name}"
        self._groups.queues[_CLOSES] = TimeQueue(kernels)

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; see `gpu_ops.operators.operator.Operator`."""
        started, (change,) = time.perf_counter(), changes
        now = self._advanced(watermark_ms)
        advances = now > self.clock.watermark
        self._next = dataclasses.replace(self.clock, watermark=now)
        kinds, table, evicted = self._closed(now) if advances else self._nothing()
        assert change.times is not None
        self._see_parts(change)
        late = self._ends(change.column(self._closes)) <= now if now > BEFORE_ALL else np.zeros(change.kinds.size, bool)
        sequence = np.full(kinds.size, AT_WATERMARK, np.int64)
        beside: tuple[Beside, ...] = ()
        if self._described.late == "tag":
            more = list(self._described.values_schema)[table.num_columns :]  # which late rows alone have
            for field in more:
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
            beside = (Beside(0, change.pick(late).table, LATE_ROW_KIND),)
            sequence = np.concatenate([sequence, change.sequence[late]])
        change = dataclasses.replace(change, times=None)  # no row is found by its time
        step, unknown = self._step(change.pick(~late) if late.any() else change, net=True)
        updated = time.perf_counter()
        if step is not None:
            self._applied(step)
            self._expect(as_slots(self.kernels, self._groups.first_new, len(self._groups) - self._groups.first_new))
        source = self.description.source.name
        metrics = self._metrics(unknown, started, updated) | self._times(0)
        metrics |= {f"{source}_late": int(late.sum()), f"{source}_evicted": evicted}
        return Output(table, kinds, sequence, metrics, beside=beside)

    @property
    def _closes(self) -> str:
        assert self.description.closes is not None
        return self.description.closes

    def _ends(self, column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
        return as_integers(column, self.description.time_type)

    def _nothing(self) -> tuple[Any, pa.Table, int]:
        return np.empty(0, np.int8), self.description.values_schema.empty_table(), 0

    def _closed(self, now: int) -> tuple[Any, pa.Table, int]:
        """Groups whose windows end: row kinds, rows, and how many."""
        xp, groups = self.kernels.xp, self._groups
        due = groups.queues[_CLOSES].take(now)
        due = due[groups.status.values[due] == LIVE]
        if not due.size:
            return self._nothing()
        step = AggregateStep.without_events(groups, due, self.description.source.schema)
        rows, running = self._applied(step)
        kinds, table, _ = self._changelog(step, (xp.zeros(due.size, np.int64), rows[1]), running)
        self._state.forget(due)
        return kinds, table, int(due.size)

    def _expect(self, slots: Slots) -> None:
        """Groups that are to come out when the watermark reaches the ends of their windows."""
        self._groups.queues[_CLOSES].add(self._ends_of(slots), slots)

    def _ends_of(self, slots: Slots) -> Array:
        field = self.description.source.schema.field(self._closes)
        taken = self._groups.store.take(slots, [field.name], present=True)
        return self.kernels.asarray(self._ends(self.kernels.to_arrow(taken, pa.schema([field]))[0]))

    # --- the stored form ---------------------------------------------------------------------

    def cut(
        self, parts: Parts, targets: Sequence[Sequence[Targets]], to: Callable[[pa.Table], Targets], count: int
    ) -> Cut:
        """The groups, for other partitions; what is known of time goes to all."""
        made = super().cut(parts, targets, to, count)
        return [{**tables, self.stored_clock: latest_times(parts, self.stored_clock)} for tables in made]

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot; see `gpu_ops.operators.operator.Operator`."""
        self._restore_clock(state)
        ContinuousAggregate.restore(self, state, settle)
        self._expect(as_slots(self.kernels, 0, len(self._groups)))
        self._groups.queues[_CLOSES].commit()


def _running(moved: Callable[[AggregateStep], Running | Steps[Running]], step: AggregateStep) -> Steps[Running]:
    """An aggregate at each moment, whether or not it looks at anything on its way."""
    made = moved(step)
    return made if isinstance(made, Running) else (yield from made)


def make(described: Aggregate, kernels: Kernels) -> ContinuousAggregate:
    """See `gpu_ops.operators.operator.Make`."""
    kind = AggregateAtWatermark if described.emit == "at_watermark" else ContinuousAggregate
    return kind(described, kernels)
