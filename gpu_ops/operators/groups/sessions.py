"""Aggregates of sessions of a changelog, kept up to date or final at the watermark.

Law: of the folded input, the rows of a group are cut into sessions where one comes more than the gap after the one
before it; the result has a row for each: its first event time, its last one plus the gap, and the aggregates of its
rows. Rows of one time are in one session.

Each row stands in the state under its group and event time, with the start of its session beside it. A change can move
the starts of rows only from where it is on: to the next row that began a session before and still does. So for a
micro-batch the rows that it brings and takes, and the rows within the gap behind these, are put in order (*points*),
and each is given a start: its own time where no row is within the gap before it; else the start of the row before it,
which is that of the point before it, unless a session began between the two. What then follows a point has the point's
start, up to the next point or session; where it has another one so far, it moves. The aggregates are those of
`ContinuousAggregate` by group and start: it is given what comes and goes, and what moves from one session to another.

Cost: a constant number of bisections for each change, and the rows that move: a row at the end of a session moves none.

**At the watermark** a session comes out once, as ``+I``, when the watermark reaches its end, and its rows are
forgotten. The watermark advances before a micro-batch's changes. A change is late if the watermark has reached the end
of a session of this row alone; one that is not late never belongs to a session that has come out, but begins one of its
own where it would have. So do Spark's session windows in output mode ``append``. A retraction may leave a session whose
end the watermark has passed: it comes out at once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array, Positions, Slots, value_changes
from gpu_ops.descriptions.changelog import DELETE, INSERT, LATE_ROW_KIND
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, as_integers, from_integers, shifted
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Among, Columns, Kernels, as_slots, distinct, sorted_by
from gpu_ops.operators.core.changes import Lifetimes, apply_changes, on_device
from gpu_ops.operators.core.match import live_matches
from gpu_ops.operators.core.nearest import Nearest, SearchDirection
from gpu_ops.operators.core.order import Groups
from gpu_ops.operators.groups.aggregate.continuous import ContinuousAggregate
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
from gpu_ops.output import Beside, Output
from gpu_ops.state.keyed_table import TIME_COLUMN, KeyedTable
from gpu_ops.state.pieces import FromSnapshot
from gpu_ops.state.table import DEAD, LIVE, KeySet, rows_at_once
from gpu_ops.state.time_index import TimeQueue

_START: Final = "__start"
"""Beside each row the start of its session."""
_CLOSES: Final = "closes"


@dataclasses.dataclass(frozen=True)
class _MovedRows:
    """Rows of the state that go from one session to another.

    Attributes:
        slots: n rows.
        before: the starts of their sessions so far.
    """

    slots: Slots
    before: Array


class Sessions(Operator):
    """The sessions of one input over one partition.

    Args:
        description: the description.
        kernels: the backend.
    """

    description: SessionAggregate

    def __init__(self, description: SessionAggregate, kernels: Kernels) -> None:
        self.description, self.kernels = description, kernels
        source = description.source
        keys, beside = KeySet.of_group(source.schema, description.by), [TIME_COLUMN, _START]
        self._rows = KeyedTable(kernels, source, [keys], findable=not source.insert_only, beside=beside)
        self.tables = (self._rows,)
        used = {*description.by, str(source.event_time), *(c for m in description.measures for c in m.columns)}
        self._names = [name for name in source.schema.names if name in used]
        """The columns that the aggregates look at."""

    def _inner(self, row_kind: str | None) -> ContinuousAggregate:
        """The aggregates of rows that have the start of their session."""
        fields = [self.description.source.schema.field(name) for name in self._names]
        kind = self.description.source.schema.field(str(self.description.source.event_time)).type
        schema = pa.schema([*fields, pa.field(self.description.start, kind)])
        source = dataclasses.replace(
            self.description.source,
            schema=schema,
            unique_key=None,
            row_kind=row_kind,
            sequence_by=None,
            delay_ms=None,
            idle_timeout_ms=None,
            parts=None,
            bad_rows="fail",
        )
        return ContinuousAggregate(self.description.of_rows(source), self.kernels)

    # --- the starts of sessions --------------------------------------------------------------

    def _begins(self, slots: Slots) -> Array:
        """Mask of rows that are there after the micro-batch, and whose time is the start of their session."""
        beside = self._rows.beside
        return (self._rows.status.values[slots] == LIVE) & (
            beside[_START].values[slots] == beside[TIME_COLUMN].values[slots]
        )

    def _starts(self, side: Lifetimes) -> _MovedRows:
        """Give each new row the start of its session, and other rows another one; gives these."""
        rows, kernels, xp = self._rows, self.kernels, self.kernels.xp
        start = rows.beside[_START].values
        new = as_slots(kernels, side.first_new, side.new)
        changed = _ProbeRows(rows, xp.concatenate([side.killed, new]))
        if not changed.slots.size:
            return _MovedRows(changed.slots, changed.slots)
        behind = self._follower(changed)
        points = _ProbeRows(rows, distinct(kernels, xp.concatenate([changed.slots, behind[behind >= 0]])))
        points = points.by_group()
        first = points.opens(xp)  # of their group
        times = points.times
        there = self._search(points, "backward", exact=True, farthest=times) >= 0
        before = self._search(points, "backward", exact=False, farthest=shifted(xp, times, -self.description.gap))
        held = xp.where(before >= 0, start[xp.maximum(before, 0)], times)
        # the row before is of the session of the point before, but where a session of old rows begins between them
        own = (there & (before < 0)) | first
        between = ~own[1:] & (before[1:] >= 0) & (before[1:] < side.first_new) & (held[1:] > times[:-1])
        own[1:] |= between
        value = xp.where(before < 0, times, held)
        begins = value[_last(kernels, own)]
        moved = self._follow(points, begins)
        place = points.place[points.place.size - side.new :] if side.new else points.place[:0]
        rows.put(_START, moved[0], moved[1])
        rows.put(_START, new, begins[place])
        return _MovedRows(moved[0], moved[2])

    def _follow(self, points: _ProbeRows, begins: Array) -> tuple[Slots, Array, Array]:
        """Rows of before that are of another session now: their slots, and its start now and before.

        Args:
            points: by group and time.
            begins: the start of the session of each.
        """
        rows, xp = self._rows, self.kernels.xp
        start, times = rows.beside[_START].values, points.times
        until = xp.full(times.size, AFTER_ALL, np.int64)
        until[:-1] = xp.where(points.opens(xp)[1:], AFTER_ALL, times[1:] - 1)
        spans = xp.flatnonzero(until >= times)
        some = points.pick(spans)
        follows = self._search(some, "forward", exact=True, staged=False, farthest=until[spans])
        held = start[xp.maximum(follows, 0)]
        moves = xp.flatnonzero((follows >= 0) & (held <= some.times) & (held != begins[spans]))
        some, until, begins = some.pick(moves), until[spans][moves], begins[spans][moves]
        if not moves.size:
            return moves, begins, begins
        other = self._search(some, "forward", exact=False, staged=False, farthest=until, alive=self._begins)
        until = xp.where(other >= 0, rows.beside[TIME_COLUMN].values[xp.maximum(other, 0)] - 1, until)
        probe_row, slots = self._between(some, some.times, until)
        by_slot = self.kernels.argsort(slots)  # the order of what comes out must not follow from hashes
        probe_row, slots = probe_row[by_slot], slots[by_slot]
        return slots, begins[probe_row], start[slots]

    def _between(self, probe_rows: _ProbeRows, earliest: Array, latest: Array) -> tuple[Positions, Slots]:
        """The rows of before that stay, of the groups of n probe_rows and in a span of time of each."""
        candidates = self._rows.time_index.probe(probe_rows.hashes, earliest, latest, staged=False)
        own = Columns(self._rows.store, self._rows.keys, probe_rows.slots)
        return live_matches(self._rows, candidates, own)

    def _follower(self, probe_rows: _ProbeRows) -> Slots:
        """The next row within the gap of each of n rows, of a later time; -1 for none."""
        farthest = shifted(self.kernels.xp, probe_rows.times, self.description.gap)
        return self._search(probe_rows, "forward", exact=False, farthest=farthest)

    def _search(
        self,
        probe_rows: _ProbeRows,
        direction: SearchDirection,
        *,
        exact: bool,
        farthest: Array,
        staged: bool = True,
        alive: Callable[[Slots], Array] | None = None,
    ) -> Slots:
        """Searches like `Nearest.search`, among rows that are there."""
        rows = self._rows
        among = Nearest(
            self.kernels,
            rows.time_index,
            rows.key_types,
            Columns(rows.store, rows.keys),
            alive or Among(rows.status.values, LIVE, LIVE),
            staged=staged,
        )
        own = Columns(rows.store, rows.keys), probe_rows.slots
        return among.search(own, probe_rows.hashes, probe_rows.times, direction, exact=exact, farthest=farthest)

    # --- the aggregates ----------------------------------------------------------------------

    def _session_changes(self, goes: tuple[Slots, Array], comes: tuple[Slots, Array]) -> Ingested:
        """Rows with the starts of their sessions as changes of these: those that go, then those that come."""
        kernels, xp = self.kernels, self.kernels.xp
        slots, starts = (xp.concatenate(both) for both in zip(goes, comes, strict=True))
        kinds = np.full(int(slots.size), INSERT, np.int8)
        kinds[: int(goes[0].size)] = DELETE
        frame = self._rows.store.take(slots, self._names, present=True)
        schema = pa.schema([self.description.source.schema.field(name) for name in self._names])
        event_time = self.description.source.schema.field(str(self.description.source.event_time))
        rows = kernels.to_arrow(frame, schema)
        made = from_integers(kernels.asnumpy(starts), self.description.time_type).cast(event_time.type)
        rows = rows.append_column(pa.field(self.description.start, event_time.type), made)
        return Ingested(rows, kinds, np.arange(kinds.size, dtype=np.int64), kinds.size, 0, None)

    def _shown(self, output: Output) -> pa.Table:
        """Returns the aggregates' results, with the ends of sessions for their last event times."""
        table: Any = output.values
        assert isinstance(table, pa.Table)
        place = len(self.description.by) + 1
        field, times = table.field(place), as_integers(table.column(place), self.description.time_type)
        ends = from_integers(shifted(np, times, self.description.gap), self.description.time_type).cast(field.type)
        return table.set_column(place, field, ends)

    def _metrics(self, side: Lifetimes, moved: int, started: float, found: float) -> dict[str, int | float]:
        source = self.description.source.name
        return {
            f"{source}_unknown_retractions": int(side.unknown),
            f"{source}_expired": 0,
            f"{source}_moved": moved,
            "update_ms": (found - started) * 1e3,
            "probe_ms": 0.0,
            "emit_ms": (time.perf_counter() - found) * 1e3,
        }

    def _apply(self, change: Ingested) -> tuple[Lifetimes, _MovedRows]:
        """Take changes into the rows and their sessions."""
        (what,) = on_device([self._rows], [change], net=True)
        side = apply_changes(self._rows, change.frame(self.kernels), what, None, net=True)
        return side, self._starts(side)


class SessionsKeptUpToDate(Sessions):
    """Sessions that grow, become one and part; arguments as `Sessions`."""

    def __init__(self, description: SessionAggregate, kernels: Kernels) -> None:
        super().__init__(description, kernels)
        self._groups = self._inner(f"{max(self.description.source.schema.names, key=len)}_")  # none of the columns
        self._rows.attached += self._groups.tables

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; no watermark matters."""
        started, (change,) = time.perf_counter(), changes
        side, moved = self._apply(change)
        found, xp, start = time.perf_counter(), self.kernels.xp, self._rows.beside[_START].values
        new = as_slots(self.kernels, side.first_new, side.new)
        goes = xp.concatenate([side.killed, moved.slots]), xp.concatenate([start[side.killed], moved.before])
        comes = (slots := xp.concatenate([new, moved.slots])), start[slots]
        made = self._groups.prepare((self._session_changes(goes, comes),), clock_ms, None)
        metrics = self._metrics(side, int(moved.slots.size), started, found)
        return dataclasses.replace(made, values=self._shown(made), metrics=metrics)

    def prepare_net(self, changes: tuple[Ingested, ...], clock_ms: int) -> Output:
        """Compute one micro-batch, whose result is a net change in any case."""
        return self.prepare(changes, clock_ms, None)

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final."""
        self._groups.commit(clock_ms)
        super().commit(clock_ms)

    def discard(self) -> None:
        """Forget the prepared micro-batch."""
        self._groups.discard()
        super().discard()

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot, from whose rows the aggregates follow; see `gpu_ops.operators.operator.Operator`."""
        super().restore(state, settle)
        rows, xp = self._rows, self.kernels.xp
        slots = xp.flatnonzero(rows.status.values != DEAD)
        nothing = slots[:0], slots[:0]
        for at in range(0, int(slots.size), rows_at_once(self.kernels)):
            some = slots[at : at + rows_at_once(self.kernels)]
            self._groups.prepare((self._session_changes(nothing, (some, rows.beside[_START].values[some])),), 0, None)
            self._groups.commit(0)
            settle()


class SessionsAtWatermark(TimedOperator[Clock], Sessions):
    """Sessions each of which comes out once; arguments as `Sessions`."""

    def __init__(self, description: SessionAggregate, kernels: Kernels) -> None:
        Sessions.__init__(self, description, kernels)
        TimedOperator.__init__(self, description, kernels, Clock(seen=(None,) * len(description.watermarked)))
        self.stored_clock = f"time of {description.source.name}"
        self._rows.queues[_CLOSES] = TimeQueue(kernels)

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; see `gpu_ops.operators.operator.Operator`."""
        started, (change,), xp, rows = time.perf_counter(), changes, self.kernels.xp, self._rows
        assert change.times is not None
        now = self._advanced(watermark_ms)
        out = xp.empty(0, np.int64)
        if now > self.clock.watermark:
            due = rows.queues[_CLOSES].take(self._last_that_ends(now))
            rows.expired = out = self._closed(due[rows.status.values[due] == LIVE])
            rows.move(out, LIVE, DEAD)
        self._next = dataclasses.replace(self.clock, watermark=now)
        self._see_parts(change)
        late = change.times <= self._last_that_ends(now)
        side, moved = self._apply(change.pick(~late) if late.any() else change)
        found = time.perf_counter()
        new = as_slots(self.kernels, side.first_new, side.new)
        rows.queues[_CLOSES].add(rows.beside[TIME_COLUMN].values[new].copy(), new)
        left = self._left(side, now)
        rows.move(left, LIVE, DEAD)
        out = xp.concatenate([out, left])
        made = self._result(out, clock_ms)
        table, beside = made[0], tuple[Beside, ...]()
        sequence = np.full(table.num_rows, AT_WATERMARK, np.int64)
        if self.description.late == "tag":
            for field in list(self.description.values_schema)[table.num_columns :]:  # which late rows alone have
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
            beside = (Beside(0, change.pick(late).table, LATE_ROW_KIND),)
            sequence = np.concatenate([sequence, change.sequence[late]])
        source = self.description.source.name
        held = 0 if self.description.source.insert_only else self.description.gap
        metrics = self._metrics(side, int(moved.slots.size), started, found) | self._times(held)
        metrics |= {f"{source}_late": int(late.sum()), f"{source}_evicted": int(out.size)}
        return Output(table, made[1], sequence, metrics, beside=beside)

    def _last_that_ends(self, now: int) -> int:
        """The last event time whose own session ends by a watermark."""
        return now if now in (BEFORE_ALL, AFTER_ALL) else max(now - self.description.gap, BEFORE_ALL)

    def _closed(self, slots: Slots) -> Slots:
        """The rows of sessions that end with one of some rows; ascending."""
        xp, rows = self.kernels.xp, self._rows
        if not slots.size:
            return slots
        ends = _ProbeRows(rows, slots)
        ends = ends.pick(xp.flatnonzero(self._follower(ends) < 0))
        # of the last rows of a session one is enough
        ends = ends.pick(xp.flatnonzero(self._search(ends, "backward", exact=True, farthest=ends.times) == ends.slots))
        starts = rows.beside[_START].values[ends.slots]
        return distinct(self.kernels, self._between(ends, starts, ends.times)[1])

    def _left(self, side: Lifetimes, now: int) -> Slots:
        """The rows of sessions that the watermark has passed since rows behind them were taken."""
        xp, rows = self.kernels.xp, self._rows
        if not side.killed.size or now == BEFORE_ALL:
            return side.killed[:0]
        gone = _ProbeRows(rows, side.killed)
        before = self._search(gone, "backward", exact=False, farthest=shifted(xp, gone.times, -self.description.gap))
        last = distinct(self.kernels, before[before >= 0])
        return self._closed(last[rows.beside[TIME_COLUMN].values[last] <= self._last_that_ends(now)])

    def _result(self, out: Slots, clock_ms: int) -> tuple[pa.Table, Any]:
        """The sessions of some rows, all of each: rows and row kinds."""
        if not out.size:
            drop = dataclasses.replace(self.description, late="drop")
            return drop.values_schema.empty_table(), np.empty(0, np.int8)
        nothing_goes = out[:0], out[:0]
        made = self._inner(None).prepare(
            (self._session_changes(nothing_goes, (out, self._rows.beside[_START].values[out])),), clock_ms, None
        )
        return self._shown(made), made.kinds

    # --- the stored form ---------------------------------------------------------------------

    def cut(
        self, parts: Parts, targets: Sequence[Sequence[Targets]], to: Callable[[pa.Table], Targets], count: int
    ) -> Cut:
        """Gives the latest times to all partitions; see `gpu_ops.operators.operator.Operator`."""
        return [{self.stored_clock: latest_times(parts, self.stored_clock)} for _ in range(count)]

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot; see `gpu_ops.operators.operator.Operator`."""
        self._restore_clock(state)
        Sessions.restore(self, state, settle)
        rows = self._rows
        queue = rows.queues[_CLOSES] = TimeQueue(self.kernels)
        queue.add(rows.beside[TIME_COLUMN].values.copy(), as_slots(self.kernels, 0, len(rows)))
        queue.commit()


class _ProbeRows:
    """Rows that look for others of their group.

    Args:
        rows: the table.
        slots: n of its rows.

    Attributes:
        hashes: n hashes of groups.
        times: n event times.
        place: where each of the rows is, in the order they were given in.
    """

    def __init__(self, rows: KeyedTable, slots: Slots) -> None:
        self._table, kernels = rows, rows.kernels
        self.slots = slots
        rows.fetch(slots)
        self.times = rows.beside[TIME_COLUMN].values[slots]
        names = rows.keys or tuple(rows.source.schema.names[:1])  # without columns there are no rows
        self._keys = rows.store.take(slots, names, present=True)
        self.hashes = kernels.hash_rows(self._keys, rows.keys, rows.key_types)
        self.place: Positions = kernels.xp.arange(slots.size, dtype=np.int64)
        self._group: Array | None = None

    def pick(self, some: Positions) -> _ProbeRows:
        """The probe rows at some positions."""
        picked = object.__new__(_ProbeRows)
        picked._table, picked.slots = self._table, self.slots[some]
        picked.times, picked.hashes = self.times[some], self.hashes[some]
        picked._group = None if self._group is None else self._group[some]
        return picked

    def by_group(self) -> _ProbeRows:
        """The probe rows in the order of their groups and times."""
        rows, kernels = self._table, self._table.kernels
        groups = Groups(kernels, self._keys, rows.keys, rows.key_types, self.hashes)
        self._group = kernels.xp.empty(self.slots.size, np.int64)
        self._group[groups.order] = groups.group
        order = sorted_by(kernels, self._group, self.times)
        made = self.pick(order)
        made.place = kernels.xp.empty(order.size, np.int64)
        made.place[order] = kernels.xp.arange(order.size, dtype=np.int64)
        return made

    def opens(self, xp: Any) -> Array:
        """Mask of those that are the first of their group; of an order by group."""
        assert self._group is not None
        return value_changes(xp, self._group)


def _last(kernels: Kernels, flags: Array) -> Positions:
    """The last position up to each of n places where a flag is set; the first one is."""
    xp = kernels.xp
    size = int(flags.size)
    back = size - xp.where(flags, xp.arange(size, dtype=np.int64), 0)
    return size - kernels.cumulative_min(back)


def make(described: SessionAggregate, kernels: Kernels) -> Sessions:
    """See `gpu_ops.operators.operator.Make`."""
    kind = SessionsAtWatermark if described.emit == "at_watermark" else SessionsKeptUpToDate
    return kind(described, kernels)
