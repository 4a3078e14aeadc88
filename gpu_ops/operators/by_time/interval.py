"""The interval join: inner, outer, semi and anti, after Flink's ``TimeIntervalJoin`` and ``IntervalJoinOperator``.

Law: inputs only grow. A new row meets the rows of the other side with its key and a time inside the
bounds that have come before it and are still there; every such pair that meets the condition is put out once, by
the later of the two. A row of an outer side that has met no match when its time is over comes out
unmatched, with nulls. Its time is over when the watermark passes the last time at which a partner that is not late
could come: its own time plus ``upper`` for a left row, minus ``lower`` for a right one. (By the keyed rules: when the
watermark reaches it.)

A semi join puts out the left row of its first pair, instead of the pairs; an anti join the left rows that a left join
would come out unmatched, when it would. Neither has anything of the right.

Within a micro-batch the watermark stands still; it advances before the micro-batch's rows. So what it
ends comes out first, at logical time -1.

By processing time a row's time is the clock of its micro-batch, and so is the watermark. A clock that is set back takes
the watermark back with it: rows that came before keep their times, and go when the clock passes their end.

Late rows (``late="join"``) make the rest of this file. Flink's SQL join lets them meet what is there, and what is
there depends on its timers:

- A key has one timer per side. It is set by the first row that finds none, at the end of that row's time, and when
  it fires, all rows of the key whose time is over go, and it is set anew by the earliest that is left. So a row
  that is earlier than the one that set the timer stays longer than its time: it is *stale*. Here each
  row gets a *sweep time* when it comes, the later of its own and that of its key's timer; by that it is queued.
- A row that comes looks at all rows of its key on the other side and cleans up as it goes: the first one takes the
  stale rows away, a match or not. (Their timer stays as it is: they leave `GHOST` rows.)
- It looks only if rows that could match may be left, for which Flink goes by when rows of *any* key were
  last cleaned up (``leftExpirationTime``, ``rightExpirationTime``).

Not taken over, as they only touch times before 1970: Flink counts a watermark below 0 as 0, and drops rows of times
up to 0 without an unmatched row.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Hashes, LogicalTimes, Positions, Slots, value_changes
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.changelog import INSERT
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, clipped, shifted
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Columns, Frame, Kernels, sorted_by
from gpu_ops.operators.core.emission import (
    JOINED,
    UNMATCHED_COMES,
    OutputRows,
    chained,
    in_order,
    left_right,
    with_nulls,
)
from gpu_ops.operators.core.match import first_equal, fulfilling, match
from gpu_ops.operators.core.order import Groups
from gpu_ops.operators.keyed import side_keys
from gpu_ops.operators.operator import AT_WATERMARK, Clock, TimedOperator
from gpu_ops.output import Output, later_times
from gpu_ops.state.interval_table import GHOST, IntervalTable
from gpu_ops.state.pieces import FromSnapshot
from gpu_ops.state.table import DEAD, LIVE

_ONCE = {-(1 << 62): BEFORE_ALL, 1 << 62: AFTER_ALL}
"""What snapshots had for these before event times could fill int64: those that do not say `_BITS`."""

_BITS = "time_bits"
_FOREVER = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class IntervalClock(Clock):
    """The clock of an interval join; by processing time in milliseconds.

    Attributes:
        cleaned: per side, the time up to which rows were last cleaned up, of any key.
    """

    cleaned: tuple[int, int] = (BEFORE_ALL, BEFORE_ALL)


def looks(xp: Any, reach: Array, cleaned: int, over: int) -> tuple[Array, int]:
    """Finds the new rows of a side that look for rows of the other side, and clean up as they go.

    Args:
        xp: numpy or cupy.
        reach: n latest times of the other side that each row may match, by sequence.
        cleaned: the time up to which the other side was last cleaned up, of any key.
        over: the time up to which its rows' time is over.

    Returns:
        Mask of the rows that look, and the time up to which the other side is cleaned up then.
    """
    reaching = xp.flatnonzero(reach > cleaned)
    if not reaching.size:
        return xp.zeros(reach.size, bool), cleaned
    first = int(reaching[0])
    mask = reach > over
    mask[:first] = False
    mask[first] = True
    return mask, over


def sweep_times(table: IntervalTable, keys: Frame, hashes: Hashes, times: Array, alive: int, *, ghosts: bool) -> Array:
    """The time by which each new row is swept: its own, or that of its key's timer if that is later.

    Args:
        table: their side's state.
        keys: the keys of n new rows, by sequence, all of which are kept.
        hashes: n.
        times: n.
        alive: rows of this time and later have not been swept.
        ghosts: whether rows from then on may have been taken away early all the same.

    Returns:
        n times.
    """
    kernels, xp = table.kernels, table.kernels.xp
    if not times.size:
        return times
    groups = Groups(kernels, keys, table.keys, table.key_types, hashes)
    leaders = groups.leader
    timer = xp.full(leaders.size, _FOREVER, np.int64)
    if len(table):
        lead = kernels.take(keys, leaders, table.keys, present=True)
        since = xp.full(leaders.size, alive, np.int64)
        unsure = xp.arange(leaders.size, dtype=np.int64)
        if not ghosts:
            runs = table.index.first(hashes[leaders], since)
            # of another key of the same half hash there may be more before the one that is looked for
            wrong = [_lower(table, lead, timer, found, once=True) for found in runs]
            unsure = xp.unique(xp.concatenate([xp.empty(0, np.int64), *wrong]))
        if unsure.size:
            probe_row, slots = table.index.probe(
                hashes[leaders[unsure]], since[unsure], xp.full(unsure.size, _FOREVER, np.int64), staged=False
            )
            _lower(table, lead, timer, (unsure[probe_row], slots), once=False)
    timer = xp.where(timer == _FOREVER, times[leaders], timer)
    swept = xp.empty(times.size, np.int64)
    swept[groups.order] = xp.maximum(times[groups.order], timer[groups.group])
    return swept


def _lower(table: IntervalTable, keys: Frame, timer: Array, found: tuple[Positions, Slots], *, once: bool) -> Positions:
    """Lower each key's timer to the earliest sweep time found; gives the probe rows whose find was another key.

    Args:
        table: the state.
        keys: the keys.
        timer: theirs.
        found: keys, by number, and slots.
        once: whether no number comes twice.
    """
    kernels, xp = table.kernels, table.kernels.xp
    probe_row, slots = found
    own, stored = Columns(keys, table.keys), Columns(table.store, table.keys)
    same = kernels.equal_at(table.key_types, (own, probe_row), (stored, slots))
    right = same & (table.status.values[slots] != DEAD)
    table.fetch(slots)
    at, swept = probe_row[right], table.sweep[slots[right]]
    if not once:
        order = sorted_by(kernels, at, swept)
        lowest = order[value_changes(xp, at[order])]
        at, swept = at[lowest], swept[lowest]
    timer[at] = xp.minimum(timer[at], swept)
    return probe_row[~same]


@dataclasses.dataclass(frozen=True)
class NewRows:
    """The new rows of one side; arrays by row, by ascending sequence.

    Attributes:
        keys: the key columns, others beside them.
        matchable: mask of rows whose key can match at all, None for all.
        kept: mask of rows that later ones may meet, None for all.
    """

    slots: Slots
    keys: Frame
    hashes: Hashes
    matchable: Array | None
    times: Array
    logical_times: LogicalTimes
    kept: Array | None


class IntervalOperator(TimedOperator[IntervalClock]):
    """An interval join over one partition.

    Args:
        description: its description.
        kernels: the backend.
    """

    description: IntervalJoin
    tables: tuple[IntervalTable, IntervalTable]

    def __init__(self, description: IntervalJoin, kernels: Kernels) -> None:
        super().__init__(description, kernels, IntervalClock())
        self.interval = description.interval
        lower, upper = description.interval.units(description.time_type)
        self.keep = upper, -lower
        """How long after its time a left and a right row may meet a match that is not late."""
        self.cleanup = description.interval.min_cleanup_ms * self.per_ms
        self.lazy = description.interval.late == "join" and description.interval.time == "event"

        def table(side: int) -> IntervalTable:
            counts = description.outer[side] or (side == 0 and description.how == "semi")
            return IntervalTable(
                kernels, description.inputs[side], side_keys(description, side), notes_matches=counts, lazy=self.lazy
            )

        self.tables = table(0), table(1)

    # --- a micro-batch -----------------------------------------------------------------------

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; see `gpu_ops.operators.operator.Operator`."""
        started = time.perf_counter()
        unmatched, gone = self.advance(self._advanced(watermark_ms))
        changes, late, metrics = self._admitted(changes, () if self.interval.late == "join" else (0, 1))
        parts = [*((rows, UNMATCHED_COMES) for rows in unmatched), *self.apply((changes[0], changes[1]), clock_ms)]
        if self.description.emit == "per_batch":
            rows = chained(self.kernels, [part for part, _ in parts])
        else:
            rows = in_order(self.kernels, parts)
        later = None
        if self.interval.timestamp is not None:
            later = later_times(self.kernels.xp, rows.slots, [table.time for table in self.tables])
        tagged = [
            one for one in late if self.interval.late == "tag" and (one[0] == 0 or not self.description.one_sided)
        ]
        metrics |= self._times(0 if self.interval.keyed else max(*self.keep, 0))
        return self._output(rows, tagged, metrics, gone, started, later=later)

    def advance(self, now: int) -> tuple[list[OutputRows], tuple[int, int]]:
        """Begin a micro-batch: let the watermark advance.

        Args:
            now: the watermark in force from here on.

        Returns:
            Unmatched rows, and how many rows of either side went.
        """
        for table in self.tables:
            table.begin()
        cleaned, unmatched, gone = list(self.clock.cleaned), [], [0, 0]
        if now > self.clock.watermark:
            for side in (0, 1):
                slots, fired = self._expire(side, now)
                gone[side] = int(slots.size)
                unmatched.append(self._unmatched(side, slots, AT_WATERMARK))
                if fired:
                    cleaned[side] = self._over(side, now)
        self._next = IntervalClock(now, self.clock.seen, (cleaned[0], cleaned[1]))
        return unmatched, (gone[0], gone[1])

    def _over(self, side: int, watermark: int) -> int:
        """The latest time at which a row's time is over."""
        if watermark in (BEFORE_ALL, AFTER_ALL):
            return watermark
        if self.interval.keyed:
            return clipped(watermark - max(self.keep[side], 0))
        return clipped(watermark - self.keep[side] - 1)

    def _expire(self, side: int, watermark: int) -> tuple[Slots, bool]:
        """Rows that a watermark ends, ascending, and whether a timer went off."""
        table, xp = self.tables[side], self.kernels.xp
        over = self._over(side, watermark)
        if not self.lazy:
            slots = table.due.take(over)
            slots = slots[table.status.values[slots] == LIVE]
            table.move(slots, LIVE, DEAD)
            return slots, bool(slots.size)
        fired = table.due.take(over if watermark == AFTER_ALL else clipped(over - self.cleanup))
        status = table.status.values[fired]
        ghosts, slots = fired[status == GHOST], fired[status == LIVE]
        table.move(ghosts, GHOST, DEAD)
        table.move(slots, LIVE, DEAD)
        stale = xp.concatenate([table.stale, table.early.take(over)])
        stale = stale[table.status.values[stale] != DEAD]
        if self.cleanup and stale.size and ghosts.size + slots.size:
            # a timer takes all of its key's rows whose time is over, also those that would have another one
            due = table.take_keys(xp.concatenate([ghosts, slots]))
            keys = table.take_keys(stale)
            found = first_equal(
                self.kernels,
                (keys, table.hash_keys(keys), table.keys),
                (due, table.hash_keys(due), table.keys),
                table.key_types,
            )
            swept = stale[found >= 0]
            status = table.status.values[swept]
            table.move(swept[status == GHOST], GHOST, DEAD)
            more = swept[status == LIVE]
            table.move(more, LIVE, DEAD)
            slots = xp.sort(xp.concatenate([slots, more]))
            stale = stale[found < 0]
        table.stale = stale
        return slots, bool(ghosts.size + slots.size)

    def apply(self, changes: tuple[Ingested, ...], clock_ms: int) -> list[tuple[OutputRows, int]]:
        """Join the micro-batch's rows, of which none is to be left out.

        Args:
            changes: insertions, in order.
            clock_ms: the time of rows by processing time.

        Returns:
            The output, and the rank of each part within one logical time.
        """
        xp, outer = self.kernels.xp, self.description.outer
        new = self._add(0, changes[0], clock_ms), self._add(1, changes[1], clock_ms)
        over = [self._over(side, self._next.watermark) for side in (0, 1)]
        pairs = [self._pairs(side, new, over[1 - side]) for side in (0, 1)]
        parts: list[tuple[OutputRows, int]] = []
        if self.lazy:
            for side in (0, 1):
                met, unmatched = self._clean_up(side, new[side], over[1 - side])
                pairs.append(met)
                parts.append((unmatched, UNMATCHED_COMES))
        if self.description.one_sided:
            first = self._first(pairs)
            shown = first if self.description.how == "semi" else first.pick(xp.empty(0, np.int64))
            parts.append((shown, JOINED))
            if not self.lazy:  # nothing goes by a left row any more that has met its match
                self._end(first.slots[0], new[0].kept)
        else:
            parts += [(pair, JOINED) for pair in pairs]
        for pair in pairs:
            for table, slots in zip(self.tables, pair.slots, strict=True):
                table.match(slots)
        for side in (0, 1):
            kept = new[side].kept
            if outer[side] and kept is not None:
                passing = xp.flatnonzero(~kept)
                parts.append(
                    (self._unmatched(side, new[side].slots[passing], new[side].logical_times[passing]), UNMATCHED_COMES)
                )
        return parts

    # --- its parts ---------------------------------------------------------------------------

    def _add(self, side: int, change: Ingested, clock_ms: int) -> NewRows:
        """Take in the new rows of one side."""
        kernels, xp, table = self.kernels, self.kernels.xp, self.tables[side]
        watermark = self._next.watermark
        host = change.times if change.times is not None else np.full(change.kinds.size, clock_ms, np.int64)
        self._see(side, host)
        frame, times = change.frame(kernels), kernels.asarray(host)
        hashes = table.hash_keys(frame)
        kept = None
        if not self.interval.keyed and watermark > BEFORE_ALL:
            # Flink's SQL join keeps no row whose time ends at the watermark: after it no match is expected.
            # But where late rows are left out, one that is just at the watermark is not late.
            flink = self.lazy or self.interval.time == "processing"
            kept = times > (clipped(watermark - self.keep[side]) if flink else self._over(side, watermark))
            kept = None if bool(kept.all()) else kept
        sweep = self._sweep(side, frame, hashes, times, kept) if self.lazy else None
        slots = table.stage(frame, hashes, times, kept, sweep)
        if sweep is not None:
            early = shifted(xp, sweep, self.cleanup) > times
            rows = xp.flatnonzero(early if kept is None else early & kept)
            table.early.add(times[rows], slots[rows])
        logical_times = 2 * kernels.asarray(change.sequence) + 1
        return NewRows(slots, frame, hashes, table.matchable(frame), times, logical_times, kept)

    def _sweep(self, side: int, keys: Frame, hashes: Hashes, times: Array, kept: Array | None) -> Array:
        table, xp = self.tables[side], self.kernels.xp
        rows = xp.arange(times.size, dtype=np.int64) if kept is None else xp.flatnonzero(kept)
        alive = clipped(self._over(side, self._next.watermark) + 1 - self.cleanup)
        swept = times.copy()
        swept[rows] = sweep_times(
            table,
            keys if kept is None else self.kernels.take(keys, rows, table.keys, present=True),
            hashes[rows],
            times[rows],
            alive,
            ghosts=self.cleanup > 0,
        )
        return swept

    def _end(self, slots: Slots, kept: Array | None) -> None:
        """Left rows go with this micro-batch; those that only pass through it do so anyway."""
        xp, table = self.kernels.xp, self.tables[0]
        if kept is not None:
            new = slots - table.first_new
            slots = slots[(new < 0) | kept[xp.maximum(new, 0)]]
        table.end(slots)

    def _clean_up(self, side: int, own: NewRows, over: int) -> tuple[OutputRows, OutputRows]:
        """Pairs and unmatched rows of the other side's stale rows that new rows take away."""
        other, cleaned = self.tables[1 - side], list(self._next.cleaned)
        reach = shifted(self.kernels.xp, own.times, self.keep[side])
        looking, cleaned[1 - side] = looks(self.kernels.xp, reach, cleaned[1 - side], over)
        self._next = dataclasses.replace(self._next, cleaned=(cleaned[0], cleaned[1]))
        found = self._taken_away(side, own, looking)
        if not self.cleanup:
            other.stale = other.stale[other.status.values[other.stale] == LIVE]
        return found

    # --- matches -----------------------------------------------------------------------------

    def _window(self, side: int, times: Array) -> tuple[Array, Array]:
        """The earliest and the latest time of the other side that rows of these times match."""
        return shifted(self.kernels.xp, times, -self.keep[1 - side]), shifted(self.kernels.xp, times, self.keep[side])

    def _pairs(self, side: int, new: tuple[NewRows, NewRows], over: int) -> OutputRows:
        """New rows of one side with the rows they meet.

        The left's meet all rows, the right's those that were there, so no pair is found twice. Rows that pass
        through have to be met while they come: only by what came before them.

        Args:
            side: which side's.
            new: of both sides.
            over: rows of the other side up to this time have been left behind.
        """
        xp, own, others = self.kernels.xp, new[side], new[1 - side]
        probe_row, slots = self._matches(side, own, None, over, (True, side == 0))
        if side == 1 and own.kept is not None:
            passing = xp.flatnonzero(~own.kept)
            more = self._matches(side, own, passing, over, (False, True))
            probe_row, slots = xp.concatenate([probe_row, more[0]]), xp.concatenate([slots, more[1]])
        first = self.tables[1 - side].first_new
        came = (
            others.logical_times[xp.maximum(slots - first, 0)]
            if others.logical_times.size
            else xp.zeros(slots.size, np.int64)
        )
        came = xp.where(slots >= first, came, BEFORE_ALL)
        logical_times = own.logical_times[probe_row]
        if own.kept is not None:
            right = own.kept[probe_row] | (came < logical_times)
            probe_row, slots, came, logical_times = probe_row[right], slots[right], came[right], logical_times[right]
        return self._joined(side, own.slots[probe_row], slots, xp.maximum(logical_times, came))

    def _matches(
        self, side: int, own: NewRows, rows: Positions | None, over: int, among: tuple[bool, bool]
    ) -> tuple[Positions, Slots]:
        """Matches of new rows, among committed and staged ones: their positions, and slots of the other side."""
        kernels, xp = self.kernels, self.kernels.xp
        table, other = self.tables[side], self.tables[1 - side]
        if own.matchable is not None:
            able = xp.flatnonzero(own.matchable)
            rows = able if rows is None else rows[own.matchable[rows]]
        times = own.times if rows is None else own.times[rows]
        hashes = own.hashes if rows is None else own.hashes[rows]
        if not times.size or not len(other):
            return xp.empty(0, np.int64), xp.empty(0, np.int64)
        earliest, latest = self._window(side, times)
        if not self.interval.keyed:
            earliest = xp.maximum(earliest, clipped(over + 1))
        probe_row, slots = other.index.probe(hashes, earliest, latest, committed=among[0], staged=among[1])
        return match(
            kernels,
            (probe_row if rows is None else rows[probe_row], slots),
            table.key_types,
            (Columns(own.keys, table.keys), Columns(other.store, other.keys)),
            alive=lambda _, slots: self._open(1 - side, slots),
            residual=lambda probe_row, slots: self._fulfilling(side, own.slots[probe_row], slots),
        )

    def _open(self, side: int, slots: Slots) -> Array:
        """Mask of rows that may be matched: of a semi or anti join's left, those that have not been."""
        table = self.tables[side]
        live: Array = table.status.values[slots] == LIVE
        if self.description.one_sided and side == 0 and table.matched is not None:
            table.fetch(slots)
            live &= table.matched[slots] == 0
        return live

    def _first(self, pairs: Sequence[OutputRows]) -> OutputRows:
        """The left rows of pairs that had met no match before, each at the logical time of its first one."""
        kernels, xp, matched = self.kernels, self.kernels.xp, self.tables[0].matched
        assert matched is not None
        rows = chained(kernels, pairs)
        self.tables[0].fetch(rows.slots[0])
        rows = rows.pick(xp.flatnonzero(matched[rows.slots[0]] == 0))
        order = sorted_by(kernels, rows.slots[0], rows.logical_times)
        found = rows.pick(order[value_changes(xp, rows.slots[0][order])])
        return dataclasses.replace(found, slots=with_nulls(xp, 0, found.slots[0]))

    def _fulfilling(self, side: int, own: Slots, others: Slots) -> Positions | None:
        """Positions of pairs that meet the residual condition, None for all."""
        each = zip(self.description.inputs, self.tables, left_right(side, own, others), strict=True)
        rows = {source.name: (table.store, at) for source, table, at in each}
        return fulfilling(self.kernels, self.description.condition, rows, int(own.size))

    def _taken_away(self, side: int, own: NewRows, looking: Array) -> tuple[OutputRows, OutputRows]:
        """The other side's stale rows, which the first new row of their key that looks takes away.

        Args:
            side: the new rows'.
            own: they.
            looking: mask of those that look.

        Returns:
            Pairs with them, and unmatched rows of those that never had one.
        """
        kernels, xp = self.kernels, self.kernels.xp
        table, other = self.tables[side], self.tables[1 - side]
        earliest, latest = self._window(side, own.times)
        stale = other.stale[other.status.values[other.stale] == LIVE]
        rows = xp.flatnonzero(looking)
        if not stale.size or not rows.size:
            nothing = xp.empty(0, np.int64)
            none = self._joined(side, nothing, nothing, nothing)
            return none, none
        keys = other.take_keys(stale)
        found = first_equal(
            kernels,
            (keys, other.hash_keys(keys), other.keys),
            (kernels.take(own.keys, rows, table.keys, present=True), own.hashes[rows], table.keys),
            table.key_types,
        )
        stale, by = stale[found >= 0], rows[found[found >= 0]]
        times = other.time[stale]
        meets = (earliest[by] <= times) & (times <= latest[by])
        if own.matchable is not None:
            meets &= own.matchable[by]
        met, row = stale[meets], by[meets]
        fits = self._fulfilling(side, own.slots[row], met)
        alone = ~meets
        if fits is not None:
            met, row = met[fits], row[fits]
            alone = xp.ones(stale.size, bool)
            alone[xp.flatnonzero(meets)[fits]] = False
        pairs = self._joined(side, own.slots[row], met, own.logical_times[row])
        unmatched = self._unmatched(1 - side, stale[alone], own.logical_times[by[alone]])
        other.move(stale, LIVE, GHOST)
        return pairs, unmatched

    def _joined(self, side: int, own: Slots, others: Slots, logical_times: LogicalTimes) -> OutputRows:
        kinds = self.kernels.xp.full(own.size, INSERT, np.int8)
        return OutputRows(kinds, left_right(side, own, others), logical_times)

    def _unmatched(self, side: int, slots: Slots, logical_times: LogicalTimes | int) -> OutputRows:
        """Makes unmatched rows of those that have met no match; none if it is no outer side."""
        xp, matched = self.kernels.xp, self.tables[side].matched
        shown = slots[:0] if matched is None or not self.description.outer[side] else matched[slots] == 0
        alone = slots[shown]
        when = xp.full(alone.size, logical_times, np.int64) if isinstance(logical_times, int) else logical_times[shown]
        return OutputRows(xp.full(alone.size, INSERT, np.int8), with_nulls(xp, side, alone), when)

    # --- watermarks, and the stored form -----------------------------------------------------

    def watermark_ms(self, clock_ms: int) -> int | None:
        """The watermark that follows from what was seen in committed micro-batches, ms; None if none does.

        By processing time, the clock.
        """
        if self.interval.time == "processing":
            return clock_ms
        return super().watermark_ms(clock_ms)

    def _advanced(self, watermark_ms: int | None) -> int:
        """The watermark in force from here on; by processing time the clock of the micro-batch, also one set back."""
        if self.interval.time == "processing" and watermark_ms is not None:
            return clipped(watermark_ms * self.per_ms)
        return super()._advanced(watermark_ms)

    def _facts(self) -> dict[str, int | None]:
        left, right = self.clock.cleaned
        return {**super()._facts(), "left_cleaned": left, "right_cleaned": right, _BITS: 64}

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot.

        Raises:
            StateError: it lacks something.
        """
        facts: dict[str, Any] = self._stored_facts(state)
        watermark, *cleaned = (
            facts[name] if _BITS in facts else _ONCE.get(facts[name], facts[name])
            for name in ("watermark", "left_cleaned", "right_cleaned")
        )
        seen = facts["left_seen"], facts["right_seen"]
        self.clock = self._next = IntervalClock(watermark, seen, (cleaned[0], cleaned[1]))
        for table, side, name in zip(self.tables, (0, 1), ("left", "right"), strict=True):
            over = self._over(side, self.clock.watermark)
            table.restore(state[name], over, self.cleanup, settle)
            if self.lazy:
                table.stale = self.kernels.xp.flatnonzero(table.time <= over)


make = IntervalOperator
