"""Lookups in an ASOF join: the right row that a left row meets, and the left rows near right rows.

The left rows from before a micro-batch whose match it may change are found through the right rows that come and go,
each of which has a span of time between its neighbours. Cost: a constant number of bisections for each change, and
what is read is the left rows in these spans, never others of a key.
"""

from __future__ import annotations

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.descriptions.by_time import AsofJoin
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, shifted
from gpu_ops.kernels import Among, Columns, Kernels, distinct, looked_at
from gpu_ops.operators.core.match import live_matches
from gpu_ops.operators.core.nearest import Nearest, SearchDirection
from gpu_ops.state.keyed_table import TIES_COLUMN, TIME_COLUMN, KeyedTable
from gpu_ops.state.table import DYING, LIVE


def times_of(table: KeyedTable) -> Array:
    """The time of each row, by slot; `BEFORE_ALL` for none."""
    return table.beside[TIME_COLUMN].values


def ties_of(table: KeyedTable) -> Array | None:
    """The numbers that order rows of one time, by slot; None where only their arrival does."""
    column = table.beside.get(TIES_COLUMN)
    return None if column is None else column.values


class MatchableRows:
    """Rows of one input that can match: of a key that can, and with a time.

    Args:
        table: the input's state.
        slots: any of its rows.

    Attributes:
        at: which of the slots are theirs.
        slots: n of them.
        hashes: n hashes of keys.
        times: n.
    """

    def __init__(self, table: KeyedTable, slots: Slots) -> None:
        kernels, xp = table.kernels, table.kernels.xp
        names = table.keys or tuple(table.source.schema.names[:1])  # without columns there are no rows
        table.fetch(slots)
        keys, times = table.store.take(slots, names, present=True), times_of(table)[slots]
        able = times != BEFORE_ALL
        matchable = kernels.valid(keys, table.strict) if table.strict else None
        self.at: Positions = xp.flatnonzero(able if matchable is None else able & matchable)
        self.hashes: Hashes = kernels.hash_rows(keys, table.keys, table.key_types)[self.at]
        self.slots, self.times, self.key = slots[self.at], times[self.at], Columns(table.store, table.keys)

    def pick(self, some: Positions) -> MatchableRows:
        """Gathers some of the rows."""
        picked = object.__new__(MatchableRows)
        picked.at, picked.slots, picked.key = self.at[some], self.slots[some], self.key
        picked.hashes, picked.times = self.hashes[some], self.times[some]
        return picked


class AsofLookup:
    """Lookups between the two inputs of an ASOF join.

    Args:
        description: its description.
        tables: left and right state.
    """

    def __init__(self, description: AsofJoin, tables: tuple[KeyedTable, KeyedTable]) -> None:
        self._tables, self.exact = tables, description.asof.exact
        self._kernels: Kernels = tables[0].kernels
        self.tolerance = description.asof.tolerance(description.time_type)
        both: tuple[SearchDirection, ...] = ("backward", "forward")
        self._seen = 0
        self._span: tuple[int, int] | None = None
        self.directions: tuple[SearchDirection, ...] = (
            both if description.asof.direction == "nearest" else (description.asof.direction,)
        )

    def farthest(self, times: Array, direction: SearchDirection) -> Array | None:
        """The last times, in a direction, at which left rows of some times match; None for any."""
        if self.tolerance is None:
            return None
        return shifted(self._kernels.xp, times, -self.tolerance if direction == "backward" else self.tolerance)

    def nearest(self, rows: MatchableRows, direction: SearchDirection, alive: Among, *, staged: bool) -> Slots:
        """The right row in one direction that each of n left rows meets, -1 for none."""
        nearest = self._among(1, alive, staged=staged)
        farthest = self.farthest(rows.times, direction)
        own = rows.key, rows.slots
        return nearest.search(own, rows.hashes, rows.times, direction, exact=self.exact, farthest=farthest)

    def best(self, slots: Slots, alive: Among, *, staged: bool) -> Slots:
        """The right row that each of n left rows meets, -1 for none.

        Args:
            slots: of the left rows.
            alive: right rows that count.
            staged: whether those of this micro-batch are among them.
        """
        xp = self._kernels.xp
        met = xp.full(slots.size, -1, np.int64)
        if slots.size and len(self._tables[1]):
            rows = MatchableRows(self._tables[0], slots)
            # what they read lies in the order in which they look
            rows = rows.pick(self._kernels.argsort(layouts.entry_hashes(rows.hashes)))
            found = [self.nearest(rows, direction, alive, staged=staged) for direction in self.directions]
            met[rows.at] = found[0] if len(found) == 1 else self.nearer(rows.times, found[0], found[1])
        return met

    def nearer(self, times: Array, before: Slots, after: Slots) -> Slots:
        """Chooses the nearer of two right rows, before and after each of n times, -1 for none; the first if as near."""
        xp, stored = self._kernels.xp, times_of(self._tables[1])
        if not stored.size:
            return before
        for found in (before, after):
            self._tables[1].fetch(xp.maximum(found, 0))
        # Two times may be farther apart than int64 holds, never than uint64 does.
        back = times.view(np.uint64) - stored[xp.maximum(before, 0)].view(np.uint64)
        ahead = stored[xp.maximum(after, 0)].view(np.uint64) - times.view(np.uint64)
        return xp.where((after < 0) | ((before >= 0) & (back <= ahead)), before, after)

    def _among(self, side: int, alive: Among, *, staged: bool) -> Nearest:
        table = self._tables[side]
        stored, ties = Columns(table.store, table.keys), ties_of(table)
        return Nearest(self._kernels, table.time_index, table.key_types, stored, alive, newer=ties, staged=staged)

    def _times_seen(self) -> tuple[int, int] | None:
        """A span in which the times of all left rows from before the micro-batch are; None where there are none.

        It only ever grows: by rows that have gone since, and by those of micro-batches that were discarded.
        """
        left, before = self._tables[0], None
        times, first = times_of(left), left.first_new
        for begin, end in ((0 if self._seen == 0 else first, first), (first, len(left))):
            if begin < end:
                own, xp = times[begin:end], self._kernels.xp
                # without a time is before all
                earliest = xp.where(own == BEFORE_ALL, AFTER_ALL, own).min()
                low, high = looked_at(self._kernels, [earliest, own.max()])
                if low <= high:
                    span = self._span or (low, high)
                    self._span = min(span[0], low), max(span[1], high)
            if end == first and before is None:
                before = self._span
        self._seen = len(left)
        return before

    def near(self, changed: Slots) -> Slots:
        """Left rows from before the micro-batch, which it leaves, whose match it may change; ascending.

        Law: let U be all right rows that are there at some logical time of the micro-batch. A left row whose best row
        in U neither comes nor goes meets it all the time. So the rows looked for are those whose best row in U is one
        of the changed ones: between its neighbours in U each has a span of time of its own, and nothing else is read.

        Args:
            changed: right rows that come or go.
        """
        left, right = self._tables
        seen = self._times_seen()
        if not changed.size or not left.live_before or seen is None:
            return self._kernels.xp.empty(0, np.int64)
        rows = self._best_of_their_time(self._waited_for(MatchableRows(right, changed), seen))
        return self._left_rows_in(rows, *self._spans(rows)) if rows.slots.size else rows.slots

    def _beside(self, rows: MatchableRows, direction: SearchDirection, *, exact: bool) -> Slots:
        """The neighbour in U of each of n right rows, -1 for none; ``exact``: itself, or a newer one of its time."""
        right = self._tables[1]
        there = self._among(1, Among(right.status.values, LIVE, DYING), staged=True)
        return there.search((rows.key, rows.slots), rows.hashes, rows.times, direction, exact=exact)

    def _waited_for(self, rows: MatchableRows, seen: tuple[int, int]) -> MatchableRows:
        """Right rows that a left row would meet if there were no others.

        Most new rows are the last ones of their key and nobody waits for them: that is one lookup.
        """
        xp = self._kernels.xp
        if len(self.directions) == 1:
            late = self.directions[0] == "forward"
            rows = rows.pick(xp.flatnonzero(rows.times >= seen[0] if late else rows.times <= seen[1]))
        stay = Among(self._tables[0].status.values, LIVE, LIVE)
        reached, lefts = xp.zeros(rows.slots.size, bool), self._among(0, stay, staged=False)
        for direction in self.directions:
            back: SearchDirection = "forward" if direction == "backward" else "backward"
            own, farthest = (rows.key, rows.slots), self.farthest(rows.times, back)
            reached |= lefts.search(own, rows.hashes, rows.times, back, exact=self.exact, farthest=farthest) >= 0
        return rows.pick(xp.flatnonzero(reached))

    def _best_of_their_time(self, rows: MatchableRows) -> MatchableRows:
        """Keeps the rows to which no other row in U of their key and time is preferred."""
        return rows.pick(self._kernels.xp.flatnonzero(self._beside(rows, "backward", exact=True) == rows.slots))

    def _spans(self, rows: MatchableRows) -> tuple[Array, Array]:
        """The first and the last time at which left rows have one of n right rows as their best one in U."""
        xp, stored = self._kernels.xp, times_of(self._tables[1])
        earliest = latest = rows.times
        if not self.exact:
            earliest, latest = shifted(xp, earliest, 1), shifted(xp, latest, -1)
        # A neighbour's own time is beyond the span; but where equal times do not match, there may be nothing for it.
        off = int(self.exact and len(self.directions) == 1)
        if "backward" in self.directions:
            after = self._beside(rows, "forward", exact=False)
            latest = xp.where(after >= 0, stored[xp.maximum(after, 0)] - off, AFTER_ALL)
            if self.tolerance is not None:
                latest = xp.minimum(latest, shifted(xp, rows.times, self.tolerance))
        if "forward" in self.directions:
            before = self._beside(rows, "backward", exact=False)
            earliest = xp.where(before >= 0, stored[xp.maximum(before, 0)] + off, BEFORE_ALL + 1)
            if self.tolerance is not None:
                earliest = xp.maximum(earliest, shifted(xp, rows.times, -self.tolerance))
        return earliest, latest

    def _left_rows_in(self, rows: MatchableRows, earliest: Array, latest: Array) -> Slots:
        """Left rows that stay, of the keys of n right rows and in a span of time of each; ascending."""
        left = self._tables[0]
        probe_row, slots = left.time_index.probe(rows.hashes, earliest, latest, staged=False)
        return distinct(self._kernels, live_matches(left, (rows.slots[probe_row], slots), rows.key)[1])
