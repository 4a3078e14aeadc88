"""The ASOF join with retractions: each left row and the right row of its key that is nearest in time.

Law: a left row is in the result once while it lives: with its best right row among those that are alive, or, where
there is none and ``how`` is left, with nulls (`gpu_ops.descriptions.by_time` says what is best). So a
micro-batch can change the result for its own left rows, and for those whose best right row comes or goes.

``per_batch``: the match of each of these rows before and after. Which rows from before they are is found through the
right rows that come and go, each of which has a span of time between its neighbours (`AsofLookup`).
Cost: a constant number of bisections for each change, and what is read is the left rows in these spans, never others of
a key.

``per_event``: the match of each of these rows at every event (`matches_over_time`, below).

Row kinds (``per_event``): a left row comes and goes with the row kind of its own change. When its match changes it is
``-U`` and ``+U``; in an inner join the first match is ``+I`` and the loss of the last one ``-D``. A match by a row that
shows the same values is no change. ``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes.

**Matches at every event**, as if each were a micro-batch of its own. State 0 is before the micro-batch, state s + 1
after event s. A right row is there from one state to another, and of the rows of a key there is one order, from worse
to better, whatever left row asks: by time (backward; forward the other way round), then by tie. A left row meets the
best row within its reach that is there.

So the right rows that come or go are put in that order, and each left row's life is painted from the best one down:
the last row, among those within reach, that is there at some state of a part of that life not painted yet takes those
states, and leaves up to two shorter parts and only worse rows. Below all of them is the best row that stays throughout:
it takes what is left. All left rows do this side by side, round by round.

Cost: each round is a search in a tree with the first birth and the last death of each of its nodes, O(log n) steps on
arrays. There is one search for each match that a left row has in the micro-batch and one for each gap between them,
never one for each pair of rows. "nearest" is backward and forward, put side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots, distinct, value_changes
from gpu_ops.descriptions.by_time import AsofJoin
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, shifted
from gpu_ops.kernels import Columns, Kernels, as_slots, sorted_by
from gpu_ops.operators.core.changes import NEVER, Lifetimes
from gpu_ops.operators.core.emission import JOINED, OutputRows, in_order, net_rows
from gpu_ops.operators.core.match import first_equal, live_matches
from gpu_ops.operators.core.nearest import Nearest, SearchDirection
from gpu_ops.operators.core.order import Groups
from gpu_ops.operators.keyed import KeyedOperator, side_table
from gpu_ops.state.keyed_table import TIES_COLUMN, TIME_COLUMN, KeyedTable
from gpu_ops.state.table import DEAD, LIVE

Alive = Callable[[Slots], Array]
"""Gives, of slots, a mask of the rows that are there."""


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
        join: its description.
        tables: left and right state.
    """

    def __init__(self, join: AsofJoin, tables: tuple[KeyedTable, KeyedTable]) -> None:
        self._tables, self.exact = tables, join.asof.exact
        self._kernels: Kernels = tables[0].kernels
        self.tolerance = join.asof.tolerance(join.time_type)
        both: tuple[SearchDirection, ...] = ("backward", "forward")
        self._seen = 0
        self._span: tuple[int, int] | None = None
        self.directions: tuple[SearchDirection, ...] = (
            both if join.asof.direction == "nearest" else (join.asof.direction,)
        )

    def farthest(self, times: Array, direction: SearchDirection) -> Array | None:
        """The last times, in a direction, at which left rows of some times match; None for any."""
        if self.tolerance is None:
            return None
        return shifted(self._kernels.xp, times, -self.tolerance if direction == "backward" else self.tolerance)

    def found(self, rows: MatchableRows, direction: SearchDirection, alive: Alive, *, staged: bool) -> Slots:
        """The right row in one direction that each of n left rows meets, -1 for none."""
        nearest = self._among(1, alive, staged=staged)
        farthest = self.farthest(rows.times, direction)
        own = rows.key, rows.slots
        return nearest.search(own, rows.hashes, rows.times, direction, exact=self.exact, farthest=farthest)

    def best(self, slots: Slots, alive: Alive, *, staged: bool) -> Slots:
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
            found = [self.found(rows, direction, alive, staged=staged) for direction in self.directions]
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

    def _among(self, side: int, alive: Alive, *, staged: bool) -> Nearest:
        table = self._tables[side]
        ties = ties_of(table)
        return Nearest(
            self._kernels,
            table.time_index,
            table.key_types,
            Columns(table.store, table.keys),
            alive,
            newer=None if ties is None else ties.__getitem__,
            staged=staged,
        )

    def _times_seen(self) -> tuple[int, int] | None:
        """A span in which the times of all left rows from before the micro-batch are; None where there are none.

        It only ever grows: by rows that have gone since, and by those of micro-batches that were discarded.
        """
        left, before = self._tables[0], None
        times, first = times_of(left), left.first_new
        for begin, end in ((0 if self._seen == 0 else first, first), (first, len(left))):
            known = times[begin:end][times[begin:end] != BEFORE_ALL]
            if known.size:
                low, high = int(known.min()), int(known.max())
                span = self._span or (low, high)
                self._span = min(span[0], low), max(span[1], high)
            if end == first and before is None:
                before = self._span
        self._seen = len(left)
        return before

    def near(self, changed: Slots) -> Slots:
        """Left rows from before the micro-batch, which it leaves, whose match it may change; ascending.

        Law: with U the right rows that are there at any instant of the micro-batch, a left row whose best row in U is
        one that neither comes nor goes meets it all the time. So the rows looked for are those whose best row in U is
        one of the changed ones: between its neighbours in U each has a span of time of its own, and nothing else is
        read.

        Args:
            changed: right rows that come or go.
        """
        left, right = self._tables
        seen = self._times_seen()
        if not changed.size or not left.live_before or seen is None:
            return self._kernels.xp.empty(0, np.int64)
        rows = self._best_of_their_time(self._waited_for(MatchableRows(right, changed), seen))
        return self._left_rows_in(rows, *self._spans(rows)) if rows.slots.size else rows.slots

    def _stays(self, slots: Slots) -> Array:
        """Mask of left rows that the micro-batch leaves."""
        return self._tables[0].status.values[slots] == LIVE

    def _beside(self, rows: MatchableRows, direction: SearchDirection, *, exact: bool) -> Slots:
        """The neighbour in U of each of n right rows, -1 for none; ``exact``: itself, or a newer one of its time."""
        right = self._tables[1]
        there = self._among(1, lambda slots: right.status.values[slots] != DEAD, staged=True)
        return there.search((rows.key, rows.slots), rows.hashes, rows.times, direction, exact=exact)

    def _waited_for(self, rows: MatchableRows, seen: tuple[int, int]) -> MatchableRows:
        """Right rows that a left row would meet if there were no others.

        Most new rows are the last ones of their key and nobody waits for them: that is one lookup.
        """
        xp = self._kernels.xp
        if len(self.directions) == 1:
            late = self.directions[0] == "forward"
            rows = rows.pick(xp.flatnonzero(rows.times >= seen[0] if late else rows.times <= seen[1]))
        reached, lefts = xp.zeros(rows.slots.size, bool), self._among(0, self._stays, staged=False)
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
        return distinct(self._kernels.xp, live_matches(left, (rows.slots[probe_row], slots), rows.key)[1])


_BEYOND = 1 << (layouts.INSTANT_BITS - 1)
"""After all states but that of rows that stay."""
_ANY_LEVEL = 63


@dataclasses.dataclass(frozen=True)
class Spans:
    """Left rows with what they meet from some state on: parallel arrays, by left row and state.

    Attributes:
        right: -1 for none.
    """

    left: Slots
    begin: Array
    right: Slots


def matches_over_time(
    lookup: AsofLookup, tables: tuple[KeyedTable, KeyedTable], sides: Sequence[Lifetimes], lefts: Slots
) -> Spans:
    """Finds the right rows that left rows meet while they live.

    Args:
        lookup: of the join.
        tables: left and right state, prepared.
        sides: the lifetimes of their rows.
        lefts: n left rows.
    """
    kernels, xp, (left, right) = tables[0].kernels, tables[0].kernels.xp, tables
    lefts = xp.sort(lefts)
    rows = MatchableRows(left, lefts)
    life = _states(sides[0].born(xp, lefts)), _states(sides[0].died(xp, lefts))
    first, status = right.first_new, right.status.values
    changed = MatchableRows(right, xp.concatenate([sides[1].killed, as_slots(kernels, first, len(right) - first)]))
    moves, painted = bool(changed.slots.size) and bool(rows.slots.size), []
    painting = _Painting(lookup, tables, sides[1], rows, changed) if moves else None
    for direction in lookup.directions:
        met = lookup.found(rows, direction, lambda s: (status[s] == LIVE) & (s < first), staged=False)
        owner, begin = xp.arange(rows.slots.size, dtype=np.int64), life[0][rows.at]
        if painting is not None:
            owner, begin, met = painting.paint(direction, met, owner, begin, life[1][rows.at])
        order = kernels.argsort(layouts.owned(owner, begin))
        painted.append((owner[order], begin[order], met[order]))
    owner, begin, met = painted[0]
    if len(painted) == 2:
        owner, begin, met = _side_by_side(kernels, lookup, rows.times, painted[0], painted[1])
    alone = xp.ones(lefts.size, bool)
    alone[rows.at] = False
    without = xp.flatnonzero(alone)
    owner = xp.concatenate([rows.at[owner], without])
    begin = xp.concatenate([begin, life[0][without]])
    met = xp.concatenate([met, xp.full(without.size, -1, np.int64)])
    order = kernels.argsort(layouts.owned(owner, begin))
    return Spans(lefts[owner[order]], begin[order], met[order])


def _states(instants: Array) -> Array:
    """The first state that what happens at some instants makes a difference to."""
    return (instants >> 1) + 1


def _side_by_side(
    kernels: Kernels,
    lookup: AsofLookup,
    times: Array,
    back: tuple[Array, Array, Slots],
    ahead: tuple[Array, Array, Slots],
) -> tuple[Array, Array, Slots]:
    """Merges what rows meet before and after their times into the nearer of both, state by state."""
    xp = kernels.xp
    owner, begin, met = (xp.concatenate(parts) for parts in zip(back, ahead, strict=True))
    when = layouts.owned(owner, begin)
    order = kernels.argsort(when)
    place, is_back = xp.arange(order.size, dtype=np.int64), order < back[0].size
    last = xp.ones(order.size, bool)
    last[:-1] = value_changes(xp, when[order])[1:]
    # A row's first state stands in both, so the latest of either is its own.
    latest = [-kernels.cumulative_min(-xp.where(mask, place, -1)) for mask in (is_back, ~is_back)]
    before, after = (met[order[at[last]]] for at in latest)
    owner = owner[order[last]]
    return owner, begin[order[last]], lookup.nearer(times[owner], before, after)


class _Painting:
    """Left rows and the right rows that come or go."""

    def __init__(
        self,
        lookup: AsofLookup,
        tables: tuple[KeyedTable, KeyedTable],
        right: Lifetimes,
        rows: MatchableRows,
        changed: MatchableRows,
    ) -> None:
        self._lookup, self._tables, self._rows, self._changed = lookup, tables, rows, changed
        self._kernels, self._xp = tables[0].kernels, tables[0].kernels.xp
        self._group, self._bounds, self._own = self._grouped(rows, changed)
        self._born = _states(right.born(self._xp, changed.slots))
        self._died = _states(right.died(self._xp, changed.slots))

    def _grouped(self, rows: MatchableRows, changed: MatchableRows) -> tuple[Array, Array, Array]:
        """The number of each right row's key, where numbers begin; and of each left row's key, -1 for none."""
        kernels, xp, (left, right) = self._kernels, self._xp, self._tables
        if not right.keys:
            bounds = xp.asarray(np.array([0, changed.slots.size], np.int64))
            return xp.zeros(changed.slots.size, np.int64), bounds, xp.zeros(rows.slots.size, np.int64)
        frame = right.store.take(changed.slots, right.keys, present=True)
        groups = Groups(kernels, frame, right.keys, right.key_types, changed.hashes)
        number = xp.empty(changed.slots.size, np.int64)
        number[groups.order] = groups.group
        own = first_equal(
            kernels,
            (left.store.take(rows.slots, left.keys, present=True), rows.hashes, left.keys),
            (kernels.take(frame, groups.leader, right.keys, present=True), changed.hashes[groups.leader], right.keys),
            right.key_types,
        )
        return number, groups.bounds, own

    def paint(
        self, direction: SearchDirection, stays: Slots, owner: Array, begin: Array, end: Array
    ) -> tuple[Array, Array, Slots]:
        """Finds the right rows that each left row meets from its first state to before its last.

        Args:
            direction: where it looks.
            stays: the best right row of each of n rows among those that stay throughout.
            owner: the numbers of these rows.
            begin: first states of n rows.
            end: their last ones.

        Returns:
            Rows, states from which on they meet something else, and what: in any order.
        """
        xp = self._xp
        order, reach = self._within_reach(direction, stays)
        slots, tree = self._changed.slots[order], _Tree(xp, self._born[order], self._died[order])
        bound, out = reach[1], []
        while owner.size:
            found = tree.last(reach[0][owner], bound, begin, end)
            none, some = xp.flatnonzero(found < 0), xp.flatnonzero(found >= 0)
            out.append((owner[none], begin[none], stays[owner[none]]))
            owner, begin, end, found = owner[some], begin[some], end[some], found[some]
            comes, goes = xp.maximum(begin, tree.born(found)), xp.minimum(end, tree.died(found))
            out.append((owner, comes, slots[found]))
            early, late = xp.flatnonzero(begin < comes), xp.flatnonzero(goes < end)
            begin, end = xp.concatenate([begin[early], goes[late]]), xp.concatenate([comes[early], end[late]])
            owner, bound = (xp.concatenate([part[early], part[late]]) for part in (owner, found))
        owners, begins, mets = zip(*out, strict=True)
        return xp.concatenate(owners), xp.concatenate(begins), xp.concatenate(mets)

    def _within_reach(self, direction: SearchDirection, stays: Slots) -> tuple[Positions, tuple[Positions, Positions]]:
        """The right rows from worse to better, key by key; where those begin and end that a left row may meet."""
        kernels, xp, changed, rows = self._kernels, self._xp, self._changed, self._rows
        lookup, stored, ties = self._lookup, times_of(self._tables[1]), ties_of(self._tables[1])
        back = direction == "backward"

        def rising(times: Array) -> Array:
            return times if back else ~times

        time = rising(changed.times)
        tie = changed.slots if ties is None else ties[changed.slots]
        order = sorted_by(kernels, self._group, time, tie)
        time, tie, slots = time[order], tie[order], changed.slots[order]
        low = xp.where(self._own >= 0, self._bounds[self._own], 0)
        high = xp.where(self._own >= 0, self._bounds[self._own + 1], 0)

        wanted, exact = rising(rows.times), lookup.exact
        end = _bisect(xp, low, high, lambda n, at: (time[at] <= wanted[n]) if exact else (time[at] < wanted[n]))
        there, best = stays >= 0, xp.maximum(stays, 0)
        its_time = xp.where(there, rising(stored[best]), np.iinfo(np.int64).min)
        its_tie = best if ties is None else ties[best]
        farthest = lookup.farthest(rows.times, direction)
        limit = None if farthest is None else rising(farthest)

        def worse(n: Array, at: Array) -> Array:
            older = (tie[at] < its_tie[n]) | ((tie[at] == its_tie[n]) & (slots[at] < best[n]))
            found = (time[at] < its_time[n]) | ((time[at] == its_time[n]) & older)
            return found if limit is None else found | (time[at] < limit[n])

        return order, (_bisect(xp, low, high, worse), end)


def _bisect(xp: Any, low: Array, high: Array, before: Callable[[Array, Array], Array]) -> Array:
    """For each of n ranges the first position that is not before what is looked for.

    Args:
        xp: numpy or cupy.
        low: where they begin.
        high: where they end.
        before: gives, of probe rows and positions, a mask of the positions that are.
    """
    low, high = low.copy(), high.copy()
    open_ = xp.flatnonzero(low < high)
    while open_.size:
        middle = (low[open_] + high[open_]) >> 1
        less = before(open_, middle)
        low[open_] = xp.where(less, middle + 1, low[open_])
        high[open_] = xp.where(less, high[open_], middle)
        open_ = open_[low[open_] < high[open_]]
    return low


class _Tree:
    """From and up to which states n rows are there, and of the rows below each node the first and the last of these."""

    def __init__(self, xp: Any, born: Array, died: Array) -> None:
        self._xp = xp
        self._width = 1 << int(born.size - 1).bit_length()
        self._powers = np.int64(1) << xp.arange(int(self._width).bit_length(), dtype=np.int64)
        self._born, self._died = xp.full(2 * self._width, 2 * _BEYOND, np.int64), xp.zeros(2 * self._width, np.int64)
        self._born[self._width : self._width + born.size] = born
        self._died[self._width : self._width + born.size] = died
        level = self._width >> 1
        while level:
            for values, of_two in ((self._born, xp.minimum), (self._died, xp.maximum)):
                values[level : 2 * level] = of_two(
                    values[2 * level : 4 * level : 2], values[2 * level + 1 : 4 * level : 2]
                )
            level >>= 1

    def born(self, rows: Positions) -> Array:
        """The first state of rows."""
        return self._born[self._width + rows]

    def died(self, rows: Positions) -> Array:
        """The state from which on they are gone."""
        return self._died[self._width + rows]

    def last(self, low: Positions, high: Positions, begin: Array, end: Array) -> Positions:
        """The last row in each of n ranges that is there at a state of a span; -1 for none.

        Args:
            low: where the ranges begin.
            high: where they end.
            begin: first states of the spans.
            end: the states after their last ones.
        """
        xp = self._xp
        found, at = xp.full(low.size, -1, np.int64), high.copy()
        most = xp.full(low.size, _ANY_LEVEL, np.int64)
        open_ = xp.flatnonzero(low < at)
        while open_.size:
            # the largest node that ends here, or, where that has such a row, the right half of it
            to = at[open_]
            level = xp.minimum(xp.searchsorted(self._powers, to & ~(to - 1)), most[open_])
            node = ((self._width + to) >> level) - 1
            has = (self._born[node] < end[open_]) & (self._died[node] > begin[open_])
            hit = has & (level == 0)
            found[open_[hit]] = to[hit] - 1
            most[open_] = xp.where(has, level - 1, _ANY_LEVEL)
            at[open_] = xp.where(has, to, to - (np.int64(1) << level))
            open_ = open_[~hit & (at[open_] > low[open_])]
        return found


@dataclasses.dataclass(frozen=True)
class NetMatches:
    """Left rows with their right rows, -1 for none, before and after a micro-batch.

    Attributes:
        gone: left rows that go, and what they met.
        changed: left rows that stay, what they met, and what they meet.
        new: left rows that come, and what they meet.
    """

    gone: tuple[Slots, Slots]
    changed: tuple[Slots, Slots, Slots]
    new: tuple[Slots, Slots]


class AsofOperator(KeyedOperator):
    """An ASOF join over one partition; see `gpu_ops.operators.keyed.KeyedOperator`."""

    join: AsofJoin
    tables: tuple[KeyedTable, KeyedTable]

    def __init__(self, join: AsofJoin, kernels: Kernels) -> None:
        super().__init__(join, kernels)
        self.null_sides = False, join.how == "left"

        def table(side: int) -> KeyedTable:
            beside = [TIME_COLUMN, *([TIES_COLUMN] if join.ties_by(side) is not None else [])]
            return side_table(join, kernels, side, beside=beside, arrival_counts=side == 1)

        self.tables = table(0), table(1)
        self._lookup = AsofLookup(join, self.tables)
        shown = [c.column for c in join.output if c.side == 1]
        self._shown = shown, [join.right.schema.field(name).type for name in shown]

    # --- what changes ------------------------------------------------------------------------

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> NetMatches | Spans:
        """The matches of left rows that the micro-batch may change."""
        kernels, xp, right = self.kernels, self.kernels.xp, self.tables[1]
        new_right = as_slots(kernels, sides[1].first_new, sides[1].new)
        near = self._lookup.near(xp.concatenate([sides[1].killed, new_right]))
        new, gone = as_slots(kernels, sides[0].first_new, sides[0].new), sides[0].killed
        if not net:
            return matches_over_time(self._lookup, self.tables, sides, xp.concatenate([near, gone, new]))
        first, status = sides[1].first_new, right.status.values
        before = self._lookup.best(
            xp.concatenate([gone, near]), lambda slots: (status[slots] != DEAD) & (slots < first), staged=False
        )
        after = self._lookup.best(xp.concatenate([near, new]), lambda slots: status[slots] == LIVE, staged=True)
        met, meets = before[gone.size :], after[: near.size]
        other = xp.flatnonzero(~self._alike(met, meets))
        return NetMatches(
            (gone, before[: gone.size]), (near[other], met[other], meets[other]), (new, after[near.size :])
        )

    def _alike(self, one: Slots, other: Slots) -> Array:
        """Mask of n pairs of right rows, -1 for none, that look the same in the output."""
        xp, store = self.kernels.xp, self.tables[1].store
        same = one == other
        both = xp.flatnonzero(~same & (one >= 0) & (other >= 0))
        names, types = self._shown
        if both.size:
            columns = Columns(store, names)
            same[both] = self.kernels.equal_at(types, (columns, one[both]), (columns, other[both])) if names else True
        if self.join.how == "left":
            alone = xp.flatnonzero(~same & ((one < 0) ^ (other < 0)))
            rows = xp.maximum(one[alone], other[alone])
            values, empty = store.take(rows, names or list(self.join.right.schema.names[:1]), present=True), None
            for name in names if rows.size else ():
                valid = self.kernels.valid(values, [name])
                null = xp.zeros(rows.size, bool) if valid is None else ~valid
                empty = null if empty is None else empty & null
            if rows.size:
                same[alone] = True if empty is None else empty
        return same

    # --- what comes out ----------------------------------------------------------------------

    def rows(self, found: NetMatches | Spans, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The rows of the changelog."""
        if isinstance(found, NetMatches):
            left, met, meets = found.changed
            leaving, coming = [found.gone, (left, met)], [(left, meets), found.new]
            return net_rows(self.kernels.xp, *(list(map(self._shown_rows, part)) for part in (leaving, coming)))
        assert event_kinds is not None
        return in_order(self.kernels, [(self._events(found, sides[0], event_kinds), JOINED)])

    def _shown_rows(self, rows: tuple[Slots, Slots]) -> tuple[Slots, Slots]:
        """Left rows and what they meet, as far as they are in the result."""
        if self.join.how == "left":
            return rows
        there = self.kernels.xp.flatnonzero(rows[1] >= 0)
        return rows[0][there], rows[1][there]

    def _events(self, found: Spans, left: Lifetimes, event_kinds: Array) -> OutputRows:
        """Births, deaths, and what takes the place of a match; row by row of the left, each in time.

        Each span, a left row with what it meets from some state on, may put out three rows, in this order:

            row                 when         if                        kind
            the match before    it begins    another takes its place   -U; of an inner join without the next -D
            its own match       it begins    likewise, or a birth      +U; of a first inner match +I; of a birth its own
            its own match       it ends      a death                   its own

        An inner join puts out none of them that has no match.
        """
        xp, inner = self.kernels.xp, self.join.how == "inner"
        opens = value_changes(xp, found.left)  # a flag per span, like all that follow: the first of its left row
        closes = xp.ones(opens.size, bool)
        closes[:-1] = opens[1:]
        before = xp.full(opens.size, -1, np.int64)
        before[1:] = found.right[:-1]
        on = xp.flatnonzero(~opens)
        switch = xp.zeros(opens.size, bool)
        switch[on] = ~self._alike(before[on], found.right[on])
        born, died = left.born(xp, found.left), left.died(xp, found.left)
        birth, death = opens & (born >= 0), closes & (died < NEVER)
        had, has = before >= 0, found.right >= 0

        leaving = xp.full(opens.size, UPDATE_BEFORE, np.int8)
        coming = xp.full(opens.size, UPDATE_AFTER, np.int8)
        if inner:
            leaving = xp.where(has, leaving, np.int8(DELETE))
            coming = xp.where(had, coming, np.int8(INSERT))
        coming[birth] = event_kinds[born[birth]]
        ending = xp.zeros(opens.size, np.int8)
        ending[death] = event_kinds[died[death]]

        begins = 2 * found.begin - 1  # the state after an event begins with what that brings
        ends = xp.minimum(died, NEVER - 1)
        shown = switch, switch | birth, death
        if inner:
            shown = shown[0] & had, shown[1] & has, shown[2] & has
        # three to a span, side by side
        kept: Positions = xp.flatnonzero(xp.stack(shown, axis=1).ravel())
        kinds, rights, when = (
            xp.stack(of_three, axis=1).ravel()[kept]
            for of_three in ((leaving, coming, ending), (before, found.right, found.right), (begins, begins, ends))
        )
        return OutputRows(kinds, (xp.repeat(found.left, 3)[kept], rights), when)


make = AsofOperator
