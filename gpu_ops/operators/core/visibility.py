"""When a row by itself is part of the result: unmatched rows of outer joins, rows of semi and anti joins.

A row's association count is how many rows of the other side match it now. An unmatched row (and a row of an
anti join) is visible while its row lives and the count is zero, a row of a semi join while it lives
and the count is not. So the changelog's part about single rows is: where visibility changes.

``per_event``: the count over the micro-batch is the count before it plus the running sum of the pairs that come and go,
sorted by row and logical time: a segmented cumulative sum. What happens to a row at one logical time is one *moment*:
for a row with count 1 whose only match goes at logical time 4 and whose next one comes at 7,

    moments   (row, 4)  (row, 7)
    before       1         0
    after        0         1

``per_batch``: the counts before and after. A row that an upsert of the other side hides and shows again within one
change was visible all along. Matches are counted by key (`gpu_ops.operators.core.key_counts`),
and pair by pair only where each pair has to be looked at.

``NOT IN`` (a null-aware anti join) adds a barrier: with a null on the right no row is visible, and a
row whose own key is null is visible only while the right is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, LogicalTimes, Positions, Slots, value_changes
from gpu_ops.kernels import Flagged, Kernels, as_slots
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.emission import NetPairs, TimedPairs
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DYING

# What happens to a row at a logical time; its own birth sorts first, its death last.
_BORN, _BEGIN, _END, _BARRIER, _DIES = range(5)

_DELTA = np.array([0, 1, -1, 0, 0], np.int64)


@dataclasses.dataclass(frozen=True)
class Moments:
    """n moments: something happens to a row at a logical time. Sorted by both; arrays of n, but for `opening`, `base`.

    Attributes:
        start: position of the moment's first event.
        last: position of its last event.
        rows: whose moment it is.
        logical_times: when.
        opening: which of the moments are the first ones of their rows.
        after: the row's count after it.
        row: number of its row among those that anything happens to.
        base: the count before the micro-batch, of each of these rows.
    """

    start: Positions
    last: Positions
    rows: Array
    logical_times: LogicalTimes
    opening: Positions
    after: Array
    row: Array
    base: Array

    def switches(self, xp: Any, state: Array, initial: Array) -> Positions:
        """Moments at which something about the row switches.

        Args:
            xp: numpy or cupy.
            state: n flags, how it is after each moment.
            initial: how it was before, of each row.
        """
        before = xp.empty(state.size, bool)
        before[1:] = state[:-1]
        before[self.opening] = initial
        return xp.flatnonzero(state != before)


def moments(xp: Any, owned: Array, deltas: Array, base: Callable[[Positions], Array]) -> Moments:
    """Counts after each moment.

    Args:
        xp: numpy or cupy.
        owned: n events, ascending: whose count each moves and when, in one number of `gpu_ops.layouts.owned`.
        deltas: n numbers by which.
        base: gives the counts before the micro-batch, of the rows of some events.
    """
    start = xp.flatnonzero(value_changes(xp, owned))
    rows, logical_times = layouts.unowned(owned[start])
    opens = value_changes(xp, rows)
    opening = xp.flatnonzero(opens)
    last = xp.empty(start.size, np.int64)
    last[:-1] = start[1:] - 1
    last[-1:] = owned.size - 1
    moved = xp.cumsum(deltas)
    row_starts = start[opening]
    before = base(row_starts).astype(np.int64)
    offset = before - xp.where(row_starts > 0, moved[row_starts - 1], 0)
    row = xp.cumsum(opens) - 1
    return Moments(start, last, rows, logical_times, opening, moved[last] + offset[row], row, before)


def flickers(xp: Any, rows: Array, changes: Array) -> Array:
    """Mask of switches, by row and time, that undo each other within one change (an upsert takes and gives back).

    Args:
        xp: numpy or cupy.
        rows: n, whose switch it is.
        changes: n, the change that did it; negative where it does not count, whatever the other one is.
    """
    twin = (rows[1:] == rows[:-1]) & (changes[1:] == changes[:-1]) & (changes[1:] >= 0)
    mask = xp.zeros(rows.size, bool)
    mask[1:] |= twin
    mask[:-1] |= twin
    return mask


@dataclasses.dataclass
class Crossings:
    """Events at which association counts become zero or stop being zero: parallel arrays.

    Attributes:
        first: position of one of the events that do it.
        appears: 1 where the unmatched row comes, -1 where it goes.
        hidden: ascending owners whose unmatched row would come and go within a micro-batch of which only the net change
            comes out.
    """

    first: Positions
    appears: Array
    hidden: Slots


def crossings(
    kernels: Kernels, events: tuple[Array, Array, Array], before: Array, owner_changes: Array | None, *, net: bool
) -> Crossings:
    """Finds the events at which counts become zero or stop being zero.

    Args:
        kernels: the backend.
        events: n owners (numbers), whose count each moves; n logical times; n times 1 or -1.
        before: n counts before the micro-batch, of each event's owner.
        owner_changes: n flags: the owner itself comes or goes; moves its count, without output. None for none.
        net: leave out what comes and goes; otherwise only within one change (an upsert does both).
    """
    xp = kernels.xp
    owner, logical_times, deltas = events
    owned = layouts.owned(owner, logical_times)
    order = kernels.argsort(owned)
    all_moments = moments(xp, owned[order], deltas[order], lambda at: before[order[at]])
    first = order[all_moments.start]
    at = all_moments.switches(xp, all_moments.after == 0, all_moments.base == 0)
    if owner_changes is not None:
        at = at[xp.flatnonzero(~owner_changes[first[at]])]
    owners = owner[first[at]]
    twin = flickers(xp, owners, xp.zeros(at.size, np.int64) if net else logical_times[first[at]] >> 1)
    hidden = xp.empty(0, np.int64)
    if bool(twin.any()):
        hidden = owners[twin] if net else hidden
        at = at[xp.flatnonzero(~twin)]
    return Crossings(first[at], xp.where(all_moments.after[at] == 0, 1, -1).astype(np.int8), hidden)


@dataclasses.dataclass
class VisibilityChanges:
    """Changes of rows' visibility: parallel arrays.

    Attributes:
        appears: whether the row becomes visible, or stops being.
        by_own_change: whether a change of the row itself did it, or one of the other side.
    """

    slots: Slots
    logical_times: LogicalTimes
    appears: Array
    by_own_change: Array


@dataclasses.dataclass
class Barrier:
    """The number of rows of the other side that hide rows of this one without matching them, over time.

    Attributes:
        before: the number before the micro-batch.
        logical_times: when it changes, ascending.
        after: the number from then on.
    """

    before: int
    logical_times: LogicalTimes
    after: Array

    @property
    def last(self) -> int:
        """The number in the end."""
        return int(self.after[-1]) if self.after.size else self.before

    def at(self, table: KeyedTable, logical_times: LogicalTimes) -> Array:
        """The number at (the end of) each logical time."""
        xp = table.kernels.xp
        steps = xp.concatenate([xp.full(1, self.before, np.int64), self.after])
        return steps[xp.searchsorted(self.logical_times, logical_times, side="right")]

    def crossings(self, table: KeyedTable) -> LogicalTimes:
        """Logical times at which it becomes zero or stops being zero."""
        xp = table.kernels.xp
        zero = xp.concatenate([xp.full(1, self.before, np.int64), self.after]) == 0
        return self.logical_times[zero[1:] != zero[:-1]]


@dataclasses.dataclass(frozen=True)
class When:
    """When rows are visible.

    Attributes:
        alone: while the count is zero (unmatched rows, anti), or while it is not (semi).
        barriers: for ``NOT IN``: nulls on the right, which hide rows with a key; all rows of the right, which hide
            rows without one.
    """

    alone: bool
    barriers: tuple[Barrier, Barrier] | None = None

    def barrier_moves(self, table: KeyedTable) -> bool:
        """Tells whether a barrier rises or falls in the micro-batch."""
        return self.barriers is not None and any(b.crossings(table).size for b in self.barriers)


@dataclasses.dataclass
class Spells:
    """While rows have matches: parallel arrays, any number of spells a row. A pair is one for each of its rows.

    Attributes:
        comes: positions of those that begin within the micro-batch.
        goes: positions of those that end within it.
        before: how many each of some rows had before the micro-batch.
    """

    slots: Slots
    begin: LogicalTimes
    end: LogicalTimes
    comes: Positions
    goes: Positions
    before: Callable[[Slots], Array]


def visible_per_event(
    table: KeyedTable, change: Lifetimes, pairs: TimedPairs, side: int, when: When
) -> VisibilityChanges:
    """Every change of visibility in order of logical time, where pairs are counted; moves the association counts.

    Args:
        table: the rows' state.
        change: their lifetimes.
        pairs: the micro-batch's pairs.
        side: which of a pair's rows they are.
        when: rows are visible.
    """
    slots, counts = pairs.slots[side], table.count
    table.fetch(slots)
    spells = Spells(slots, pairs.begin, pairs.end, pairs.comes, pairs.goes, lambda rows: counts[rows])
    changes = changes_per_event(table, change, spells, when)
    table.add_counts(slots, pairs.deltas)
    return changes


def changes_per_event(table: KeyedTable, change: Lifetimes, spells: Spells, when: When) -> VisibilityChanges:
    """Every change of visibility in order of logical time.

    Args:
        table: the rows' state.
        change: their lifetimes.
        spells: the spells that the micro-batch begins or ends, and all those of rows that it touches.
        when: rows are visible; where a barrier rises or falls there are spells of all rows.
    """
    kernels, xp = table.kernels, table.kernels.xp
    slots, begins, ends = spells.slots, spells.comes, spells.goes
    own_slots, own_at, sign = change.events(kernels)
    packed_of = kernels.fused(layouts.moments)
    events = [
        packed_of(slots[begins], spells.begin[begins], _BEGIN),
        packed_of(slots[ends], spells.end[ends], _END),
        packed_of(own_slots, own_at, xp.where(sign > 0, _BORN, _DIES)),
    ]
    barriers = when.barriers
    if barriers is not None:
        events.extend(_barrier_events(table, change, barriers))
    # One packed number per event: sorting the numbers sorts by row, logical time and order within it.
    packed = kernels.sort(xp.concatenate(events))
    owned, code = kernels.fused(layouts.without_codes)(packed)
    all_moments = moments(xp, owned, xp.asarray(_DELTA)[code], lambda at: spells.before(layouts.unowned(owned[at])[0]))
    rows, logical_times = all_moments.rows, all_moments.logical_times
    dies = code[all_moments.last] == _DIES
    visible = ((all_moments.after == 0) == when.alone) & ~dies
    was_visible = (all_moments.base == 0) == when.alone
    opening = rows[all_moments.opening]
    if barriers is not None:
        keyless = _keyless(table, opening)
        here = xp.where(
            keyless[all_moments.row], barriers[1].at(table, logical_times), barriers[0].at(table, logical_times)
        )
        visible &= here == 0
        was_visible &= xp.where(keyless, barriers[1].before, barriers[0].before) == 0
    was_visible &= opening < change.first_new
    at = all_moments.switches(xp, visible, was_visible)
    own_change = (code[all_moments.start] == _BORN) | dies
    by_others = xp.where(own_change[at], -1, logical_times[at] >> 1)
    flicker = flickers(xp, rows[at], by_others)
    if bool(flicker.any()):
        at = at[xp.flatnonzero(~flicker)]
    return VisibilityChanges(rows[at], logical_times[at], visible[at], own_change[at])


NetVisibility = tuple[list[Flagged], list[Flagged]]
"""The slots of rows that stop being visible, and of those that become it, of whom some are wanted."""


def visible_per_batch(table: KeyedTable, change: Lifetimes, pairs: NetPairs, side: int, when: When) -> NetVisibility:
    """The net changes of visibility, where pairs are counted; moves the counts. Arguments as `visible_per_event`."""
    kernels, xp = table.kernels, table.kernels.xp
    slots, count = pairs.slots[side], table.count
    table.fetch(slots)
    before, died = count[slots], change.killed
    killed_before = count[died]
    table.add_counts(slots, pairs.deltas, before)
    # without a pair that goes, no count falls to zero
    falls = pairs.goes is not None
    after = count[slots] if falls else None
    flags = kernels.fused(_crosses if pairs.whole else _crosses_of_some)(
        before, after, slots, change.first_new, pairs.states[side]
    )
    crossing = [Flagged(mask, [slots]) for mask in flags[: 1 + falls]]
    if not pairs.sole[side]:
        # a row that crosses may do so in several pairs
        found, _, _ = kernels.flagged(crossing)
        rows = [kernels.sort(slots_of) for (slots_of,) in found]
        crossing = [Flagged(value_changes(xp, slots_of), [slots_of]) for slots_of in rows]
    met, left = crossing[:1], crossing[1:]
    born = count[change.first_new :]
    hides, shows = (met, left) if when.alone else (left, met)
    new = Flagged(born == 0 if when.alone else born != 0, [change.first_new])
    gone = [Flagged(killed_before == 0 if when.alone else killed_before != 0, [died])] if died.size else []
    return [*gone, *hides], [*shows, new]


def changes_per_batch(
    table: KeyedTable, change: Lifetimes, staying: tuple[Slots, Array, Array], touched: tuple[Array, Array], when: When
) -> NetVisibility:
    """The net changes of visibility. Arguments as `changes_per_event`, but for the counts.

    Args:
        table: the rows' state.
        change: their lifetimes.
        staying: rows that were there and stay, all whose visibility may change; their counts before and after.
        touched: the counts of the new rows, after; and of those that die, before.
        when: rows are visible.
    """
    xp, (rows, before, after), (born, died) = table.kernels.xp, staying, touched
    new = as_slots(table.kernels, change.first_new, change.new)

    def visible(counts: Array, which: Slots, moment: str) -> Array:
        shown = counts == 0 if when.alone else counts != 0
        if when.barriers is not None:
            numbers = [b.last if moment == "after" else b.before for b in when.barriers]
            shown &= xp.where(_keyless(table, which), numbers[1], numbers[0]) == 0
        return shown

    was, is_now = visible(before, rows, "before"), visible(after, rows, "after")
    born, died = visible(born, new, "after"), visible(died, change.killed, "before")
    hides = [Flagged(died, [change.killed]), Flagged(was > is_now, [rows])]
    return hides, [Flagged(is_now > was, [rows]), Flagged(born, [change.first_new])]


def _crosses(
    before: Array, after: Array | None, slots: Slots, first_new: int, states: Array | None
) -> tuple[Array, Array]:
    """Flags the rows that were there and stay whose count stops being zero, and those whose count becomes it.

    ``after``: None where it only grows.
    """
    stays = slots < first_new if states is None else (slots < first_new) & (states != DYING)
    none, some = before == 0, before != 0
    return (none & stays, some & stays) if after is None else (none & stays & (after != 0), some & stays & (after == 0))


def _crosses_of_some(
    before: Array, after: Array | None, slots: Slots, first_new: int, states: Array | None
) -> tuple[Array, Array]:
    """Flags the same as `_crosses` where some slots are -1."""
    met, left = _crosses(before, after, slots, first_new, states)
    return met & (slots >= 0), left & (slots >= 0)


def _keyless(table: KeyedTable, slots: Slots) -> Array:
    """Mask of rows whose key has a null."""
    xp = table.kernels.xp
    valid = table.kernels.valid(table.store.take(slots, table.strict, present=True), table.strict)
    return xp.zeros(slots.size, bool) if valid is None else ~valid


def _barrier_events(table: KeyedTable, change: Lifetimes, barriers: tuple[Barrier, Barrier]) -> list[Array]:
    """A marker for every row at every logical time at which its barrier rises or falls while it lives."""
    xp = table.kernels.xp
    crossings = [b.crossings(table) for b in barriers]
    if not any(c.size for c in crossings):
        return []
    rows = xp.flatnonzero(table.status.values)
    keyless = _keyless(table, rows)
    events = []
    for logical_times_at, which in zip(crossings, (rows[~keyless], rows[keyless]), strict=True):
        slots, logical_times = xp.repeat(which, logical_times_at.size), xp.tile(logical_times_at, which.size)
        born, died = change.born(xp, slots), change.died(xp, slots)
        live = xp.flatnonzero((born < logical_times) & (logical_times < died))
        events.append(layouts.moments(slots[live], logical_times[live], _BARRIER))
    return events
