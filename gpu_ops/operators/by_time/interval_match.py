"""The match of an interval join: pairs of one micro-batch, pads of rows that never met a match, and Flink's timers.

Timers are worked out by arrays; see `gpu_ops.operators.by_time.interval` for what they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Hashes, Instants, Positions, Slots, value_changes
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.changelog import INSERT
from gpu_ops.descriptions.times import BEFORE_ALL, clipped, shifted
from gpu_ops.kernels import Columns, Frame, Kernels
from gpu_ops.operators.core.emission import OutputRows, chained, left_right, with_nulls
from gpu_ops.operators.core.match import first_equal, fulfilling, match
from gpu_ops.operators.core.order import Groups
from gpu_ops.state.interval_table import GHOST, IntervalTable
from gpu_ops.state.table import DEAD, LIVE

_FOREVER = np.iinfo(np.int64).max


def looks(xp: Any, reach: Array, cleaned: int, over: int) -> tuple[Array, int]:
    """Which of a side's new rows look for rows of the other side, and clean up as they go.

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
            needle, slots = table.index.probe(
                hashes[leaders[unsure]], since[unsure], xp.full(unsure.size, _FOREVER, np.int64), staged=False
            )
            _lower(table, lead, timer, (unsure[needle], slots), once=False)
    timer = xp.where(timer == _FOREVER, times[leaders], timer)
    swept = xp.empty(times.size, np.int64)
    swept[groups.order] = xp.maximum(times[groups.order], timer[groups.group])
    return swept


def _lower(table: IntervalTable, keys: Frame, timer: Array, found: tuple[Positions, Slots], *, once: bool) -> Positions:
    """Lower each key's timer to the earliest sweep time found; gives the needles whose find was another key.

    Args:
        table: the state.
        keys: the keys.
        timer: theirs.
        found: keys, by number, and slots.
        once: whether no number comes twice.
    """
    kernels, xp = table.kernels, table.kernels.xp
    needle, slots = found
    own, stored = Columns(keys, table.keys), Columns(table.store, table.keys)
    same = kernels.equal_at(table.key_types, (own, needle), (stored, slots))
    right = same & (table.status.values[slots] != DEAD)
    at, swept = needle[right], table.sweep[slots[right]]
    if not once:
        by_time = kernels.argsort(swept)
        order = by_time[kernels.argsort(at[by_time])]
        lowest = order[value_changes(xp, at[order])]
        at, swept = at[lowest], swept[lowest]
    timer[at] = xp.minimum(timer[at], swept)
    return needle[~same]


@dataclasses.dataclass(frozen=True)
class NewRows:
    """The new rows of one side; arrays by row, by ascending sequence."""

    slots: Slots
    keys: Frame
    """The key columns, others beside them."""
    hashes: Hashes
    matchable: Array | None
    """Mask of rows whose key can match at all, None for all."""
    times: Array
    instants: Instants
    kept: Array | None
    """Mask of rows that later ones may meet, None for all."""


class IntervalMatch:
    """Finds pairs between new rows and those in state.

    Args:
        join: its description.
        kernels: the backend.
        tables: left and right state.
    """

    def __init__(self, join: IntervalJoin, kernels: Kernels, tables: tuple[IntervalTable, IntervalTable]) -> None:
        self._kernels, self._tables, self._inputs = kernels, tables, join.inputs
        self._lower, self._upper = join.interval.units(join.time_type)
        self._keyed, self._condition = join.interval.keyed, join.condition
        self._outer, self._one_sided = join.outer, join.one_sided

    def _window(self, side: int, times: Array) -> tuple[Array, Array]:
        """The earliest and the latest time of the other side that rows of these times match."""
        if side == 0:
            return shifted(self._kernels.xp, times, self._lower), shifted(self._kernels.xp, times, self._upper)
        return shifted(self._kernels.xp, times, -self._upper), shifted(self._kernels.xp, times, -self._lower)

    def pairs(self, side: int, new: tuple[NewRows, NewRows], over: int) -> OutputRows:
        """New rows of one side with the rows they meet.

        The left's meet all rows, the right's those that were there, so no pair is found twice. Rows that pass
        through have to be met while they come: only by what came before them.

        Args:
            side: which side's.
            new: of both sides.
            over: rows of the other side up to this time have been left behind.
        """
        xp, own, others = self._kernels.xp, new[side], new[1 - side]
        needle, slots = self._matches(side, own, None, over, (True, side == 0))
        if side == 1 and own.kept is not None:
            passing = xp.flatnonzero(~own.kept)
            more = self._matches(side, own, passing, over, (False, True))
            needle, slots = xp.concatenate([needle, more[0]]), xp.concatenate([slots, more[1]])
        first = self._tables[1 - side].first_new
        came = others.instants[xp.maximum(slots - first, 0)] if others.instants.size else xp.zeros(slots.size, np.int64)
        came = xp.where(slots >= first, came, BEFORE_ALL)
        instants = own.instants[needle]
        if own.kept is not None:
            right = own.kept[needle] | (came < instants)
            needle, slots, came, instants = needle[right], slots[right], came[right], instants[right]
        return self._joined(side, own.slots[needle], slots, xp.maximum(instants, came))

    def _matches(
        self, side: int, own: NewRows, rows: Positions | None, over: int, among: tuple[bool, bool]
    ) -> tuple[Positions, Slots]:
        """Matches of new rows, among committed and staged ones: their positions, and slots of the other side."""
        kernels, xp = self._kernels, self._kernels.xp
        table, other = self._tables[side], self._tables[1 - side]
        if own.matchable is not None:
            able = xp.flatnonzero(own.matchable)
            rows = able if rows is None else rows[own.matchable[rows]]
        times = own.times if rows is None else own.times[rows]
        hashes = own.hashes if rows is None else own.hashes[rows]
        if not times.size or not len(other):
            return xp.empty(0, np.int64), xp.empty(0, np.int64)
        earliest, latest = self._window(side, times)
        if not self._keyed:
            earliest = xp.maximum(earliest, clipped(over + 1))
        needle, slots = other.index.probe(hashes, earliest, latest, committed=among[0], staged=among[1])
        return match(
            kernels,
            (needle if rows is None else rows[needle], slots),
            table.key_types,
            (Columns(own.keys, table.keys), Columns(other.store, other.keys)),
            alive=lambda _, slots: self._open(1 - side, slots),
            residual=lambda needle, slots: self._fulfilling(side, own.slots[needle], slots),
        )

    def _open(self, side: int, slots: Slots) -> Array:
        """Mask of rows that may be matched: of a semi or anti join's left, those that have not been."""
        table = self._tables[side]
        live: Array = table.status.values[slots] == LIVE
        if self._one_sided and side == 0 and table.matched is not None:
            live &= table.matched[slots] == 0
        return live

    def first(self, pairs: Sequence[OutputRows]) -> OutputRows:
        """The left rows of pairs that had met no match before, each at the instant of its first one."""
        kernels, xp, matched = self._kernels, self._kernels.xp, self._tables[0].matched
        assert matched is not None
        rows = chained(kernels, pairs)
        rows = rows.pick(xp.flatnonzero(matched[rows.slots[0]] == 0))
        by_time = kernels.argsort(rows.instants)
        order = by_time[kernels.argsort(rows.slots[0][by_time])]
        found = rows.pick(order[value_changes(xp, rows.slots[0][order])])
        return dataclasses.replace(found, slots=with_nulls(xp, 0, found.slots[0]))

    def _fulfilling(self, side: int, own: Slots, others: Slots) -> Positions | None:
        """Positions of pairs that meet the residual condition, None for all."""
        rows = zip(self._inputs, self._tables, left_right(side, own, others), strict=True)
        return fulfilling(self._kernels, self._condition, {s.name: (t.store, at) for s, t, at in rows}, int(own.size))

    def clean_up(self, side: int, own: NewRows, looking: Array) -> tuple[OutputRows, OutputRows]:
        """The other side's stale rows, which the first new row of their key that looks takes away.

        Args:
            side: the new rows'.
            own: they.
            looking: mask of those that look.

        Returns:
            Pairs with them, and pads of those that never had one.
        """
        kernels, xp = self._kernels, self._kernels.xp
        table, other = self._tables[side], self._tables[1 - side]
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
        pairs = self._joined(side, own.slots[row], met, own.instants[row])
        pads = self.pads(1 - side, stale[alone], own.instants[by[alone]])
        other.move(stale, LIVE, GHOST)
        return pairs, pads

    def _joined(self, side: int, own: Slots, others: Slots, instants: Instants) -> OutputRows:
        kinds = self._kernels.xp.full(own.size, INSERT, np.int8)
        return OutputRows(kinds, left_right(side, own, others), instants)

    def pads(self, side: int, slots: Slots, instants: Instants | int) -> OutputRows:
        """Those of these rows that have met no match, with nulls for the other side; none if it is no outer side."""
        xp, matched = self._kernels.xp, self._tables[side].matched
        if matched is None or not self._outer[side]:
            slots = slots[:0]
            instants = instants if isinstance(instants, int) else instants[:0]
        else:
            alone = matched[slots] == 0
            slots = slots[alone]
            instants = instants if isinstance(instants, int) else instants[alone]
        when = xp.full(slots.size, instants, np.int64) if isinstance(instants, int) else instants
        return OutputRows(xp.full(slots.size, INSERT, np.int8), with_nulls(xp, side, slots), when)
