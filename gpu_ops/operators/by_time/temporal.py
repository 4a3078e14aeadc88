"""The temporal join, after Flink's ``TemporalRowTimeJoinOperator``.

Law: a row of the right input is a version of its key, valid from its time until that of the key's next version; a
retraction is a version, too, of which nothing is valid. When the watermark reaches a left row's time, the row comes out
once, beside the version of its key that is valid at its time. Where there is none, or the condition is not true of the
pair, it comes out with nulls (left) or not at all (inner). Of versions of one time the last to come counts. A version
is forgotten when the watermark has passed the next one.

Within a micro-batch the watermark stands still; it advances before the micro-batch's rows. Rows of a micro-batch
wait for the next advance, late ones as well: they meet the versions that are still there then.

What is still there is Flink's, to the row. There a key has one timer: the earliest time of the rows that have come and
of the left rows that wait. When it fires, the key's left rows up to the watermark come out, its versions before the
valid one go, and only left rows that still wait set it anew. So a version has registered its key's timer if the
key has not fired since the version came; versions that the watermark passes without that stay until something else
makes the key fire.

**State TTL**, after Flink's ``BaseTwoInputStreamOperatorWithStateRetention``: a key has one clean-up time. What comes
for the key, and a firing of its timer that leaves anything of it, set that time to 1.5 TTL from now, unless it is a TTL
away or more as it is: so it is moved once in half a TTL at most. A firing that leaves nothing takes it away. When the
clock reaches it, all that there is of the key goes: left rows that wait, without coming out, and versions. The clock is
that of the micro-batch, and moves before the watermark.

Not taken over: in Flink the timer of a key that went so stays registered, and when it fires it counts for the
rows that the key has by then.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, Slots
from gpu_ops.descriptions.by_time import AsofJoin, TemporalJoin
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_BEFORE
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, clipped
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Among, Columns, Flagged, Frame, Kernels, as_slots, distinct
from gpu_ops.operators.core.emission import OutputRows
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.operators.core.match import first_equal, fulfilling, live_matches
from gpu_ops.operators.core.nearest import Nearest, SearchDirection
from gpu_ops.operators.core.order import Groups
from gpu_ops.operators.keyed import side_keys
from gpu_ops.operators.operator import AT_WATERMARK, SIDES, Clock, TimedOperator
from gpu_ops.output import Output
from gpu_ops.state.index import HashIndex
from gpu_ops.state.interval_table import IntervalTable
from gpu_ops.state.keyed_table import WRITTEN_COLUMN
from gpu_ops.state.numbers import Growing
from gpu_ops.state.pieces import FromSnapshot, Storable
from gpu_ops.state.table import DEAD, LIVE

_ENDS, _TIMER = "__ends", "__timer"
_PASSED = "passed"
CLEANUP = "__cleanup"
"""Beside the rows of a snapshot: the clean-up time of their key."""


class Retention:
    """The clean-up times of keys, ms since the epoch.

    Args:
        kernels: the backend.
        types: what keys are compared as.
        ttl_ms: the TTL.

    Attributes:
        keys: those that have a clean-up time, which stands beside them as the time they were last touched at.
    """

    def __init__(self, kernels: Kernels, types: Sequence[pa.DataType], ttl_ms: int) -> None:
        self.kernels, self.ttl = kernels, ttl_ms
        self.schema = pa.schema([(f"key_{number}", kind) for number, kind in enumerate(types)])
        self.keys = KeyTable(kernels, self.schema, {}, "keys", ttl_ms=0)

    def begin(self, clock_ms: int) -> Slots:
        """Prepare a micro-batch: the keys whose clean-up time has come, which are gone from here on."""
        slots = self.keys.expired(clock_ms)
        self.forget(slots)
        return slots

    def columns(self, slots: Slots) -> tuple[Columns, Hashes]:
        """Keys, and their hashes."""
        names = self.schema.names
        frame = self.keys.store.take(slots, names, present=True)
        return Columns(frame, names), self.kernels.hash_rows(frame, names, self.schema.types)

    def find(self, columns: Columns) -> Slots:
        """Finds the keys, in the columns of an input, that have a clean-up time."""
        pairs = zip(self.schema.names, columns.names, strict=True)
        slots = self.keys.find(self.kernels.combine([(name, columns.source, column) for name, column in pairs]))
        return slots[slots >= 0]

    def forget(self, slots: Slots) -> None:
        """Take away clean-up times."""
        self.keys.move(slots, LIVE, DEAD)

    def touch(self, frames: Iterable[tuple[Frame, tuple[str, ...], pa.Schema]], fired: Slots, clock_ms: int) -> None:
        """Set the clean-up times of keys, where they are not far enough away, or further than any (of a clock ahead).

        Args:
            frames: keys of rows that came, in the columns of their input.
            fired: keys that have fired, and of which something is left.
            clock_ms: now.
        """
        rows = pa.concat_tables([self._plain(*each) for each in frames])
        slots = self.keys.locate(self.kernels.frame(rows)).slots if rows.num_rows else fired[:0]
        slots = distinct(self.kernels, self.kernels.xp.concatenate([slots, fired]))
        times, latest = self.keys.beside[WRITTEN_COLUMN].values[slots], clipped(clock_ms + 3 * self.ttl // 2)
        moves = times < clipped(clock_ms + self.ttl)
        if clock_ms:  # 0 while none is known
            moves |= times > latest
        self.keys.touch(slots[moves], latest)

    def times(self, frame: Frame, columns: tuple[str, ...], schema: pa.Schema) -> Array:
        """The clean-up time of each row's key, for a snapshot."""
        slots = self.keys.find(self.kernels.frame(self._plain(frame, columns, schema)))
        times = self.kernels.xp.zeros(slots.size, np.int64)
        known = slots >= 0
        times[known] = self.keys.beside[WRITTEN_COLUMN].values[slots[known]]
        return times

    def restore(self, frames: Iterable[tuple[Frame, tuple[str, ...], pa.Schema, Array]]) -> None:
        """Take over what a snapshot has of it: keys in the columns of their input, and what `times` gave of them."""
        given = list(frames)
        rows = pa.concat_tables([self._plain(*each[:3]) for each in given])
        if rows.num_rows:
            located = self.keys.locate(self.kernels.frame(rows))
            times = self.kernels.xp.zeros(located.slots.size, np.int64)
            times[located.number] = self.kernels.xp.concatenate([each[3] for each in given])
            self.keys.touch(located.slots, times)
        self.keys.commit(0)

    def _plain(self, frame: Frame, columns: tuple[str, ...], schema: pa.Schema) -> pa.Table:
        """Keys in the types they are compared in."""
        found = self.kernels.to_arrow(frame, pa.schema([schema.field(name) for name in columns]))
        return found.rename_columns(self.schema.names).cast(self.schema)


def rows_of(table: IntervalTable, own: Columns, hashes: Hashes) -> Slots:
    """The committed rows of n different keys."""
    earliest, latest = (table.kernels.xp.full(hashes.size, time, np.int64) for time in (BEFORE_ALL, AFTER_ALL))
    return live_matches(table, table.index.probe(hashes, earliest, latest, staged=False), own)[1]


@dataclasses.dataclass(frozen=True)
class Keys:
    """Rows of one side, and their keys."""

    side: int
    slots: Slots
    frame: Frame
    hashes: Hashes


class TemporalOperator(TimedOperator[Clock]):
    """A temporal join over one partition.

    Args:
        description: its description.
        kernels: the backend.

    Attributes:
        beside: what stands beside a version: whether it ends what was valid, without being valid; whether it has a
            timer.
        held: how far behind the watermark rows may still come out, in the unit of times; None for any distance.
    """

    description: TemporalJoin | AsofJoin
    tables: tuple[IntervalTable, IntervalTable]
    beside: Mapping[str, npt.DTypeLike] = {_ENDS: np.int8, _TIMER: np.int8}
    held: int | None = 0

    def __init__(self, description: TemporalJoin | AsofJoin, kernels: Kernels) -> None:
        super().__init__(description, kernels, Clock())
        left = IntervalTable(kernels, description.left, side_keys(description, 0))
        right = IntervalTable(kernels, description.right, side_keys(description, 1), beside=self.beside)
        right.indexes[_PASSED] = HashIndex(kernels)
        self.tables = left, right
        ttl = description.ttl_ms if isinstance(description, TemporalJoin) else None
        self.retention = None if ttl is None else Retention(kernels, description.key_types, ttl)
        if self.retention is not None:
            left.attached.append(self.retention.keys)
            for table in self.tables:
                table.beside[CLEANUP] = Growing(kernels.xp, np.int64)

    def prepare(self, changes: tuple[Ingested, ...], clock_ms: int, watermark_ms: int | None) -> Output:
        """Compute one micro-batch; see `gpu_ops.operators.operator.Operator`."""
        started = time.perf_counter()
        for table in self.tables:
            table.begin()
        forgotten = self._clean_up(clock_ms)
        now = self._advanced(watermark_ms)
        advances = now > self.clock.watermark
        self._next = dataclasses.replace(self.clock, watermark=now)
        rows, gone = self._advance(now) if advances else (self._beside(self._none, self._none), (0, 0))
        changes, late, metrics = self._admitted(changes, () if self.description.late == "join" else (0,))
        for side, change in enumerate(changes):
            self._add(side, change)
        self._touch(clock_ms)
        metrics |= self._times(self.held)
        evicted = gone[0] + forgotten[0], gone[1] + forgotten[1]
        return self._output(rows, late if self.description.late == "tag" else (), metrics, evicted, started)

    @property
    def _none(self) -> Slots:
        return self.kernels.xp.empty(0, np.int64)

    # --- what a watermark ends ---------------------------------------------------------------

    def _advance(self, now: int) -> tuple[OutputRows, tuple[int, int]]:
        """Rows of the keys that fire: the output, and how many rows of either side went."""
        left, right = self.tables
        due, passing = (table.due.take(now) for table in self.tables)
        there, timed = right.status.values[passing] == LIVE, right.beside[_TIMER].values[passing] != 0
        ((due,), (fires,), (quiet,)), _, _ = self.kernels.flagged(
            [
                Flagged(left.status.values[due] == LIVE, [due]),
                Flagged(there & timed, [passing]),
                Flagged(there, [passing], timed),
            ]
        )
        firing = [self._keys(0, due), self._keys(1, fires)]
        rows = self._answers(firing[0])
        gone = self._forget(firing, quiet, now) if len(right) else self._none
        left.move(due, LIVE, DEAD)
        right.move(gone, LIVE, DEAD)
        right.put(_TIMER, fires, 0)
        if self.retention is not None:
            self._fired = self._left_of(firing, self.retention)
        return rows, (int(due.size), int(gone.size))

    def _keys(self, side: int, slots: Slots) -> Keys:
        table = self.tables[side]
        frame = table.store.take(slots, _columns(table), present=True)
        return Keys(side, slots, frame, table.hash_keys(frame))

    def _newer(self) -> Array | None:
        """The order of versions of one time; None for their arrival."""
        return None

    def _nearest(self, side: int, newer: Array | None = None) -> Nearest:
        """Looks up rows of one side by key and time."""
        table = self.tables[side]
        return Nearest(
            self.kernels,
            table.index,
            table.key_types,
            Columns(table.store, table.keys),
            Among(table.status.values, LIVE, LIVE),
            newer=newer,
        )

    def _search(self, own: Keys, times: Array, direction: SearchDirection = "backward", **how: Any) -> Slots:
        """The version of each row's key that is nearest to a time, -1 for none.

        Args:
            own: the rows.
            times: n times.
            direction: whether the last before or the first after it.
            how: options of `gpu_ops.operators.core.nearest.Nearest.search`.
        """
        columns = Columns(own.frame, self.tables[own.side].keys)
        rows = self.kernels.xp.arange(own.slots.size, dtype=np.int64)
        return self._nearest(1, self._newer()).search((columns, rows), own.hashes, times, direction, **how)

    def _answers(self, own: Keys) -> OutputRows:
        """Left rows, each beside the version that is valid at its time."""
        kernels, xp, (left, right) = self.kernels, self.kernels.xp, self.tables
        left.fetch(own.slots)
        found = self._search(own, left.time[own.slots]) if len(right) else xp.full(own.slots.size, -1, np.int64)
        matchable = left.matchable(own.frame)
        if matchable is not None:
            found = xp.where(matchable, found, -1)
        if len(right):
            right.fetch(xp.maximum(found, 0))
            found = xp.where(right.beside[_ENDS].values[xp.maximum(found, 0)] != 0, -1, found)
        if self.description.condition is not None:
            pairs = xp.flatnonzero(found >= 0)
            rows = {
                self.description.left.name: (left.store, own.slots[pairs]),
                self.description.right.name: (right.store, found[pairs]),
            }
            true = fulfilling(kernels, self.description.condition, rows, int(pairs.size))
            if true is not None:
                meets = xp.zeros(found.size, bool)
                meets[pairs[true]] = True
                found = xp.where(meets, found, -1)
        if self.description.how == "left":
            return self._beside(own.slots, found)
        kept = xp.flatnonzero(found >= 0)
        return self._beside(own.slots[kept], found[kept])

    def _beside(self, left: Slots, right: Slots) -> OutputRows:
        xp = self.kernels.xp
        kinds, logical_times = xp.full(left.size, INSERT, np.int8), xp.full(left.size, AT_WATERMARK, np.int64)
        return OutputRows(kinds, (left, right), logical_times)

    def _forget(self, firing: list[Keys], passing: Slots, now: int) -> Slots:
        """Versions of keys that fire, up to the watermark, but the last; ascending.

        Versions after it have no timer registered any more.

        Args:
            firing: rows of either side whose keys fire.
            passing: versions that the watermark passes now without a timer.
            now: the watermark.
        """
        kernels, xp, right = self.kernels, self.kernels.xp, self.tables[1]
        passed = cast("HashIndex", right.indexes[_PASSED])
        quiet = self._keys(1, passing)
        fires = xp.zeros(passing.size, bool)  # a flag per version that passes without a timer: its key fires
        old, needed = [firing[1].slots], [self._none]  # versions up to the watermark; those that stay
        for own in firing:
            if not own.slots.size:
                continue
            keys = self._each_once(own)
            needed += self._needed(keys, now)
            old.append(self._of_keys(keys, passed.probe(keys.hashes, staged=False)))
            if passing.size:
                wanted, others = ((k.frame, k.hashes, self.tables[k.side].keys) for k in (quiet, keys))
                fires |= first_equal(kernels, wanted, others, right.key_types) >= 0
            if _TIMER in right.beside and now < AFTER_ALL:
                later = xp.full(keys.slots.size, now + 1, np.int64), xp.full(keys.slots.size, AFTER_ALL, np.int64)
                ahead = self._of_keys(keys, right.index.probe(keys.hashes, *later, staged=False))
                right.put(_TIMER, ahead[right.beside[_TIMER].values[ahead] != 0], 0)
        still = xp.concatenate(needed)
        gone = distinct(kernels, xp.concatenate([*old, passing[fires]]))
        # what stays of those that were passed now is looked at when its key fires again
        both = (firing[1].hashes, firing[1].slots), (quiet.hashes, passing)
        stays = xp.isin(firing[1].slots, still), ~fires | xp.isin(passing, still)
        parts = [Flagged(flags, columns) for flags, columns in zip(stays, both, strict=True)]
        ((hashes, slots),), _, _ = kernels.flagged(parts, chained=True)
        passed.stage(hashes.view(np.uint64), slots)
        return gone[~xp.isin(gone, still)]

    def _each_once(self, own: Keys) -> Keys:
        """One row of each key."""
        table = self.tables[own.side]
        lead = Groups(self.kernels, own.frame, table.keys, table.key_types, own.hashes).leader
        frame = self.kernels.take(own.frame, lead, _columns(table), present=True)
        return Keys(own.side, own.slots[lead], frame, own.hashes[lead])

    def _needed(self, keys: Keys, now: int) -> list[Slots]:
        """Finds the versions of each key, up to the watermark, that left rows may still meet; -1 for none."""
        return [self._search(keys, self.kernels.xp.full(keys.slots.size, now, np.int64))]

    def _of_keys(self, keys: Keys, candidates: tuple[Array, Slots]) -> Slots:
        """Keeps the candidates of an index of versions that are live and of their probe row's key."""
        return live_matches(self.tables[1], candidates, Columns(keys.frame, self.tables[keys.side].keys))[1]

    # --- state TTL ---------------------------------------------------------------------------

    def _clean_up(self, clock_ms: int) -> tuple[int, int]:
        """Forget the keys whose clean-up time has come; how many rows of either side went."""
        self._fired, gone = self._none, [0, 0]
        if self.retention is None:
            return 0, 0
        keys = self.retention.begin(clock_ms)
        for side, table in enumerate(self.tables if keys.size else ()):
            slots = rows_of(table, *self.retention.columns(keys))
            table.move(slots, LIVE, DEAD)
            gone[side] = int(slots.size)
        return gone[0], gone[1]

    def _left_of(self, firing: list[Keys], retention: Retention) -> Slots:
        """Keeps the keys that have fired of which a row is left; the others lose their clean-up time."""
        xp = self.kernels.xp
        found = [retention.find(Columns(own.frame, self.tables[own.side].keys)) for own in firing]
        keys = distinct(self.kernels, xp.concatenate(found))
        columns, hashes = retention.columns(keys)
        rows, last = xp.arange(keys.size, dtype=np.int64), xp.full(keys.size, AFTER_ALL, np.int64)
        left = xp.zeros(keys.size, bool)
        for side in (0, 1):
            left |= self._nearest(side).search((columns, rows), hashes, last, "backward") >= 0
        retention.forget(keys[~left])
        return keys[left]

    def _touch(self, clock_ms: int) -> None:
        """Keys that have fired, and those of new rows, have been of use."""
        if self.retention is None:
            return
        left, right = (as_slots(self.kernels, t.first_new, len(t) - t.first_new) for t in self.tables)
        matchable = self.tables[1].matchable(self.tables[1].take_keys(right))
        new = left, right if matchable is None else right[matchable]
        self.retention.touch(self._keys_of(new), self._fired, clock_ms)

    def _keys_of(self, slots: Iterable[Slots]) -> Iterator[tuple[Frame, tuple[str, ...], pa.Schema]]:
        """The keys of rows of either side, as `Retention` takes them."""
        for table, own in zip(self.tables, slots, strict=True):
            yield table.take_keys(own), table.keys, table.source.schema

    # --- what comes --------------------------------------------------------------------------

    def _add(self, side: int, change: Ingested) -> None:
        """Take in the new rows of one side; of an update only what comes."""
        if side == 1 and bool((change.kinds == UPDATE_BEFORE).any()):
            assert change.times is not None
            self._see(side, change.times)
            change = change.pick(change.kinds != UPDATE_BEFORE)
        slots = self._stage(side, change)
        right = self.tables[1]
        if side == 1 and slots.size:
            right.beside[_ENDS].values[slots] = self.kernels.asarray(change.kinds == DELETE)
            right.beside[_TIMER].values[slots] = 1

    def _stage(self, side: int, change: Ingested) -> Slots:
        """Put new rows of one side into its table; their slots."""
        assert change.times is not None
        self._see(side, change.times)
        kernels, table = self.kernels, self.tables[side]
        frame, times = change.frame(kernels), kernels.asarray(change.times)
        # a version of a key that nothing equals is of no use
        kept = table.matchable(frame) if side == 1 else None
        ties = None if change.ties is None else kernels.asarray(change.ties)
        return table.stage(frame, table.hash_keys(frame), times, kept, None, ties=ties)

    # --- the stored form ---------------------------------------------------------------------

    def kept(self) -> dict[str, Storable]:
        """The rows of both sides, the clean-up times of their keys beside them, and the clock."""
        if self.retention is not None:
            slots = [self.kernels.xp.flatnonzero(table.status.values) for table in self.tables]
            for table, own, keys in zip(self.tables, slots, self._keys_of(slots), strict=True):
                table.beside[CLEANUP].values[own] = self.retention.times(*keys)
        return super().kept()

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot.

        Raises:
            StateError: it lacks something.
        """
        self._restore_clock(state)
        for table, name in zip(self.tables, SIDES, strict=True):
            table.restore(state[name], self.clock.watermark, 0, settle)
        if self.retention is not None:
            slots = [self.kernels.xp.flatnonzero(table.status.values) for table in self.tables]
            each = zip(self.tables, slots, self._keys_of(slots), strict=True)
            self.retention.restore((*keys, table.beside[CLEANUP].values[own]) for table, own, keys in each)


make = TemporalOperator


def _columns(table: IntervalTable) -> tuple[str, ...]:
    """The key columns of a table's rows, or any: a frame without columns has no rows."""
    return table.keys or tuple(table.source.schema.names[:1])
