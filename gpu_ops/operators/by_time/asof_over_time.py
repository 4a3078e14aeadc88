"""Matches of an ASOF join at every event of a micro-batch, as if each event were a micro-batch of its own.

State 0 is before the micro-batch, state s + 1 after event s. A right row is there from one state to another, and of the
rows of a key there is one order, from worse to better, whatever left row asks: by time (backward; forward the other way
round), then by tie. A left row meets the best row within its reach that is there.

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
from collections.abc import Sequence

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Positions, Slots, value_changes
from gpu_ops.kernels import Among, Flagged, Kernels, as_slots, sorted_by
from gpu_ops.operators.by_time.asof_lookup import AsofLookup, MatchableRows, ties_of, times_of
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.match import first_equal
from gpu_ops.operators.core.nearest import SearchDirection
from gpu_ops.operators.core.order import Groups
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import LIVE


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
    states = kernels.fused(_states)
    life = states(sides[0].born(xp, lefts)), states(sides[0].died(xp, lefts))
    first, status = right.first_new, right.status.values
    changed = MatchableRows(right, xp.concatenate([sides[1].killed, as_slots(kernels, first, len(right) - first)]))
    moves, painted = bool(changed.slots.size) and bool(rows.slots.size), []
    painting = _Painting(lookup, tables, sides[1], rows, changed) if moves else None
    for direction in lookup.directions:
        met = lookup.nearest(rows, direction, Among(status, LIVE, LIVE), staged=False)
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


def _states(logical_times: Array) -> Array:
    """The first state that what happens at some logical times makes a difference to."""
    return (logical_times >> 1) + 1


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
        states = self._kernels.fused(_states)
        self._born, self._died = (states(at(self._xp, changed.slots)) for at in (right.born, right.died))

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
            different=True,
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
        slots, born, died = self._changed.slots[order], self._born[order], self._died[order]
        lives = self._kernels.lives(born, died)
        low, bound, out = reach[0], reach[1], []
        while owner.size:
            found = self._kernels.last_there(lives, (low, bound), (begin, end))
            # of none (-1) what is read is not used
            comes, goes, early, late = self._kernels.fused(_painted)(found, begin, end, born[found], died[found])
            out.append((owner, comes, found))
            # what is left: the parts before, then those after
            left = Flagged(early, [owner, low, found, begin, comes]), Flagged(late, [owner, low, found, goes, end])
            ((owner, low, bound, begin, end),) = self._kernels.flagged(left, chained=True)[0]
        owners, begins, founds = (xp.concatenate(parts) for parts in zip(*out, strict=True))
        return owners, begins, xp.where(founds >= 0, slots[founds], stays[owners])

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
        end = kernels.bisect_ranges([time], (low, high), [wanted], after=exact)
        there, best = stays >= 0, xp.maximum(stays, 0)
        its_time = xp.where(there, rising(stored[best]), np.iinfo(np.int64).min)
        its_tie = best if ties is None else ties[best]
        farthest = lookup.farthest(rows.times, direction)
        better = kernels.bisect_ranges([time, tie, slots], (low, high), [its_time, its_tie, best])
        if farthest is not None:
            better = xp.maximum(better, kernels.bisect_ranges([time], (low, high), [rising(farthest)]))
        return order, (better, end)


def _painted(found: Array, begin: Array, end: Array, born: Array, died: Array) -> tuple[Array, Array, Array, Array]:
    """The states that the rows found take of spans, all where none is found (-1); and whether any are left."""
    early, late = (found >= 0) & (born > begin), (found >= 0) & (died < end)
    return begin + (born - begin) * early, end + (died - end) * late, early, late
