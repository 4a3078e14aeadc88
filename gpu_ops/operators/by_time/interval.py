"""The interval join: inner, outer, semi and anti, after Flink's ``TimeIntervalJoin`` and ``IntervalJoinOperator``.

Law: inputs only grow. A new row meets the rows of the other side with its key and a time inside the
bounds that have come before it and are still there; every such pair that meets the condition is put out once, by
the later of the two. A row of an outer side that has met no match when its time is over comes out
with a null pad. Its time is over when the watermark passes the last time at which a partner that is not late
could come: its own time plus ``upper`` for a left row, minus ``lower`` for a right one. (By the keyed rules: when the
watermark reaches it.)

A semi join puts out the left row of its first pair, instead of the pairs; an anti join the left rows that a left join
would pad, when it would. Neither has anything of the right.

Within a micro-batch the watermark stands still; it advances before the micro-batch's rows. So what it
ends comes out first, at instant -1.

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
up to 0 without a pad.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, Slots
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.changelog import LATE_ROW_KIND
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, clipped, shifted
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.by_time.interval_match import IntervalMatch, NewRows, looks, sweep_times
from gpu_ops.operators.by_time.timed import AT_WATERMARK, Clock, TimedOperator
from gpu_ops.operators.core.emission import JOINED, PAD_COMES, OutputRows, chained, in_order
from gpu_ops.operators.core.match import first_equal
from gpu_ops.operators.operator import SIDES, Output
from gpu_ops.output import append_rows, changelog_table, gathered, later_times
from gpu_ops.state.interval_table import GHOST, IntervalTable
from gpu_ops.state.pieces import FromSnapshot
from gpu_ops.state.table import DEAD, LIVE, KeySet

_ONCE = {-(1 << 62): BEFORE_ALL, 1 << 62: AFTER_ALL}
"""What snapshots had for these before event times could fill int64: those that do not say `_BITS`."""
_BITS = "time_bits"


@dataclasses.dataclass(frozen=True)
class IntervalClock(Clock):
    """What an interval join knows of time; by processing time in milliseconds.

    Attributes:
        cleaned: per side, the time up to which rows were last cleaned up, of any key.
    """

    cleaned: tuple[int, int] = (BEFORE_ALL, BEFORE_ALL)


class IntervalOperator(TimedOperator[IntervalClock]):
    """An interval join over one partition.

    Args:
        join: its description.
        kernels: the backend.
    """

    join: IntervalJoin
    tables: tuple[IntervalTable, IntervalTable]

    def __init__(self, join: IntervalJoin, kernels: Kernels) -> None:
        super().__init__(join, kernels, IntervalClock())
        self.interval = join.interval
        lower, upper = join.interval.units(join.time_type)
        self.keep = upper, -lower
        """How long after its time a left and a right row may meet a match that is not late."""
        self.cleanup = join.interval.min_cleanup_ms * self.per_ms
        self.lazy = join.interval.late == "join" and join.interval.time == "event"

        def table(side: int) -> IntervalTable:
            keys = KeySet(join.key_columns(side), join.key_types, join.key_columns(side, strict=True))
            counts = join.outer[side] or (side == 0 and join.how == "semi")
            return IntervalTable(kernels, join.inputs[side], keys, notes_matches=counts, lazy=self.lazy)

        self.tables = table(0), table(1)
        self._match = IntervalMatch(join, kernels, self.tables)

    # --- a micro-batch -----------------------------------------------------------------------

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; see `gpu_ops.operators.operator.Operator`."""
        started = time.perf_counter()
        pads, gone = self.advance(self._advanced(watermark_ms))
        metrics: dict[str, int | float] = {}
        late: list[tuple[int, pa.Table, npt.NDArray[np.int64]]] = []
        admitted = []
        for side, (name, change) in enumerate(zip(SIDES, changes, strict=True)):
            below = self._late(change)
            metrics[f"{name}_late"] = 0 if below is None else int(below.sum())
            metrics[f"{name}_evicted"] = gone[side]
            if below is None or self.interval.late == "join":
                admitted.append(change)
                continue
            if self.interval.late == "tag" and (side == 0 or not self.join.one_sided):
                late.append((side, change.pick(below).table, change.sequence[below]))
            admitted.append(change.pick(~below))
        parts = [*((rows, PAD_COMES) for rows in pads), *self.apply((admitted[0], admitted[1]), clock_ms)]
        if self.join.emit == "per_batch":
            rows = chained(self.kernels, [part for part, _ in parts])
        else:
            rows = in_order(self.kernels, parts)
        joined = time.perf_counter()
        frame, kinds = gathered(self.join, self.kernels, self.tables, rows.slots), self.kernels.asnumpy(rows.kinds)
        later = None
        if self.interval.timestamp is not None:
            later = later_times(self.kernels.xp, rows.slots, [table.time for table in self.tables])
        output = changelog_table(self.join, self.kernels, frame, kinds, later)
        sequences = [self.kernels.asnumpy(rows.instants) >> 1]
        for side, table, sequence in late:
            output = append_rows(self.join, self.kernels, side, output, rows=table, kind=LATE_ROW_KIND)
            sequences.append(sequence)
        metrics |= self._times(0 if self.interval.keyed else max(*self.keep, 0))
        metrics |= {"probe_ms": (joined - started) * 1e3, "emit_ms": (time.perf_counter() - joined) * 1e3}
        return Output(output, np.concatenate(sequences), kinds, metrics)

    def advance(self, now: int) -> tuple[list[OutputRows], tuple[int, int]]:
        """Begin a micro-batch: let the watermark advance.

        Args:
            now: the watermark in force from here on.

        Returns:
            Pads, and how many rows of either side went.
        """
        for table in self.tables:
            table.begin()
        cleaned, pads, gone = list(self.clock.cleaned), [], [0, 0]
        if now > self.clock.watermark:
            for side in (0, 1):
                slots, fired = self._expire(side, now)
                gone[side] = int(slots.size)
                pads.append(self._match.pads(side, slots, AT_WATERMARK))
                if fired:
                    cleaned[side] = self._over(side, now)
        self._next = IntervalClock(now, self.clock.seen, (cleaned[0], cleaned[1]))
        return pads, (gone[0], gone[1])

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
            slots = xp.sort(table.due.take(over))
            slots = slots[table.status.values[slots] == LIVE]
            table.move(slots, LIVE, DEAD)
            return slots, bool(slots.size)
        fired = xp.sort(table.due.take(over if watermark == AFTER_ALL else clipped(over - self.cleanup)))
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
            The output, and the rank of each part within one instant.
        """
        xp, outer = self.kernels.xp, self.join.outer
        new = self._add(0, changes[0], clock_ms), self._add(1, changes[1], clock_ms)
        over = [self._over(side, self._next.watermark) for side in (0, 1)]
        pairs = [self._match.pairs(side, new, over[1 - side]) for side in (0, 1)]
        parts: list[tuple[OutputRows, int]] = []
        if self.lazy:
            for side in (0, 1):
                met, pads = self._clean_up(side, new[side], over[1 - side])
                pairs.append(met)
                parts.append((pads, PAD_COMES))
        if self.join.one_sided:
            first = self._match.first(pairs)
            shown = first if self.join.how == "semi" else first.pick(xp.empty(0, np.int64))
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
                parts.append((self._match.pads(side, new[side].slots[passing], new[side].instants[passing]), PAD_COMES))
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
        instants = 2 * kernels.asarray(change.sequence) + 1
        return NewRows(slots, frame, hashes, table.matchable(frame), times, instants, kept)

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
        """Pairs and pads of the other side's stale rows that new rows take away."""
        other, cleaned = self.tables[1 - side], list(self._next.cleaned)
        reach = shifted(self.kernels.xp, own.times, self.keep[side])
        looking, cleaned[1 - side] = looks(self.kernels.xp, reach, cleaned[1 - side], over)
        self._next = dataclasses.replace(self._next, cleaned=(cleaned[0], cleaned[1]))
        found = self._match.clean_up(side, own, looking)
        if not self.cleanup:
            other.stale = other.stale[other.status.values[other.stale] == LIVE]
        return found

    # --- watermarks, and the stored form -----------------------------------------------------

    def watermark_ms(self, clock_ms: int) -> int | None:
        """The watermark that follows from what was seen in committed micro-batches, ms; None if none does.

        By processing time, the clock.
        """
        if self.interval.time == "processing":
            return clock_ms
        return super().watermark_ms(clock_ms)

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
