"""When a row by itself is part of the result: pads of outer joins, rows of semi and anti joins.

A row's association count is how many rows of the other side match it now. A pad (and a row of an
anti join) is visible while its row lives and the count is zero, a row of a semi join while it lives
and the count is not. So the changelog's part about single rows is: where visibility changes.

``per_event``: the count over the micro-batch is the count before it plus the running sum of the
pairs that come and go, sorted by row and instant: a segmented cumulative sum. ``per_batch``: the
counts before and after, moved by one scatter-add. A row that an upsert of the other side hides and
shows again within one change was visible all along.

``NOT IN`` (a null-aware anti join) adds a barrier: with a null on the right no row is visible, and a
row whose own key is null is visible only while the right is empty.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gpu_ops.kernels import Array, as_slots, distinct
from gpu_ops.operators.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.operators.pairs import Pairs, count_deltas
from gpu_ops.state.columns import LIVE
from gpu_ops.state.table import StateTable

# What happens to a row's count, in the order in which it happens within one instant.
_OWN_BEGIN, _BORN, _BEGIN, _END, _BARRIER, _DIES, _OWN_END = range(7)
_DELTA = np.array([1, 0, 1, -1, 0, 0, -1], np.int64)
_INSTANT_BITS, _CODE_BITS = 28, 3


@dataclasses.dataclass
class Changes:
    """Where visibility changes: parallel arrays."""

    slots: Array
    instants: Array
    appears: Array
    """Whether the row becomes visible, or stops being."""
    own: Array
    """Whether a change of the row itself did it, or one of the other side."""


@dataclasses.dataclass
class Barrier:
    """How many rows of the other side hide rows of this one without matching them, over time.

    Attributes:
        before: the number before the micro-batch.
        instants: when it changes, ascending.
        after: the number from then on.
    """

    before: int
    instants: Array
    after: Array

    def at(self, table: StateTable, instants: Array) -> Array:
        """The number at (the end of) each instant."""
        xp = table.kernels.xp
        steps = xp.concatenate([xp.full(1, self.before, np.int64), self.after])
        return steps[xp.searchsorted(self.instants, instants, side="right")]

    def crossings(self, table: StateTable) -> Array:
        """Instants at which it becomes zero or stops being zero."""
        xp = table.kernels.xp
        zero = xp.concatenate([xp.full(1, self.before, np.int64), self.after]) == 0
        return self.instants[zero[1:] != zero[:-1]]


def visible_per_event(
    table: StateTable,
    change: Lifetimes,
    pairs: Pairs,
    side: int,
    *,
    when_alone: bool,
    barriers: tuple[Barrier, Barrier] | None = None,
) -> Changes:
    """Every change of visibility, instant by instant; moves the association counts.

    Args:
        table: the rows' state.
        change: their lifetimes.
        pairs: the micro-batch's pairs.
        side: which of a pair's rows they are.
        when_alone: visible while the count is zero (pads, anti) or while it is not (semi).
        barriers: for ``NOT IN``: nulls on the right, which hide rows with a key; all rows of the
            right, which hide rows without one.
    """
    kernels, xp = table.kernels, table.kernels.xp
    assert table.count is not None
    slots, births, deaths = pairs.slots[side], pairs.births[side], pairs.deaths[side]
    begins, ends = xp.flatnonzero(pairs.begin != ALWAYS), xp.flatnonzero(pairs.end != NEVER)
    new = as_slots(kernels, change.first_new, len(table) - change.first_new)
    events = [
        _pack(
            slots[begins],
            pairs.begin[begins],
            xp.where(births[begins] == pairs.begin[begins], _OWN_BEGIN, _BEGIN),
        ),
        _pack(slots[ends], pairs.end[ends], xp.where(deaths[ends] == pairs.end[ends], _OWN_END, _END)),
        _pack(new, change.births, _BORN),
        _pack(change.killed, change.killed_at, _DIES),
    ]
    if change.deaths is not None:
        stillborn = xp.flatnonzero(change.deaths != NEVER)
        events.append(_pack(new[stillborn], change.deaths[stillborn], _DIES))
    if barriers is not None:
        events.extend(_barrier_events(table, change, barriers))
    # One packed number per event: sorting the numbers sorts by row, instant and order within it.
    packed = xp.sort(xp.concatenate(events))
    code = packed & ((1 << _CODE_BITS) - 1)
    instant = (packed >> _CODE_BITS) & ((1 << _INSTANT_BITS) - 1)
    slot = packed >> (_CODE_BITS + _INSTANT_BITS)
    first = xp.ones(slot.size, bool)
    first[1:] = slot[1:] != slot[:-1]
    group = xp.cumsum(first) - 1
    starts = xp.flatnonzero(first)
    moved = xp.cumsum(xp.asarray(_DELTA)[code])
    base = table.count.values[slot[starts]].astype(np.int64)
    offset = base - xp.where(starts > 0, moved[starts - 1], 0)
    count = moved + offset[group]
    visible = (count == 0) == when_alone
    was_visible = (base == 0) == when_alone
    if barriers is not None:
        keyless = _keyless(table, slot[starts])
        here = xp.where(keyless[group], barriers[1].at(table, instant), barriers[0].at(table, instant))
        visible &= here == 0
        was_visible &= xp.where(keyless, barriers[1].before, barriers[0].before) == 0
    visible &= (code != _OWN_BEGIN) & (code != _DIES) & (code != _OWN_END)
    was_visible &= slot[starts] < change.first_new
    previous = xp.empty(slot.size, bool)
    previous[1:] = visible[:-1]
    previous[starts] = was_visible
    changed = xp.flatnonzero(visible != previous)
    found = Changes(
        slot[changed], instant[changed], visible[changed], (code[changed] == _BORN) | (code[changed] == _DIES)
    )
    deltas = count_deltas(pairs)
    table.add_counts(slots, deltas)
    return _without_flicker(table, found)


def visible_per_batch(
    table: StateTable,
    change: Lifetimes,
    pairs: Pairs,
    side: int,
    *,
    when_alone: bool,
    barriers: tuple[Barrier, Barrier] | None = None,
) -> Changes:
    """The net changes of visibility; moves the association counts. Arguments as `visible_per_event`."""
    kernels, xp = table.kernels, table.kernels.xp
    assert table.count is not None
    slots, deltas = pairs.slots[side], count_deltas(pairs)
    new = as_slots(kernels, change.first_new, len(table) - change.first_new)
    count = table.count.values
    staying = slots < change.first_new
    if change.any_death:
        staying &= pairs.deaths[side] == NEVER
    old = slots[xp.flatnonzero(staying)]
    before = count[old]
    table.add_counts(slots, deltas)
    moved = before == 0
    if not bool((deltas > 0).all()):
        moved ^= count[old] == 0
    touched = xp.flatnonzero(moved)
    # whether the count was zero, packed beside the row
    packed = distinct(xp, (old[touched] << 1) | (before[touched] != 0))
    rows, before = packed >> 1, packed & 1
    if barriers is not None and any(b.crossings(table).size for b in barriers):
        # every row may appear or disappear: nothing less than a pass tells which
        stays = table.status.values[: change.first_new] == LIVE
        rows = xp.flatnonzero(stays)
        before = count[rows].copy()
        for touched, delta in table.prepared.counted if table.prepared else []:
            old = xp.zeros(len(table), np.int32)
            kernels.scatter_add(old, touched, delta)
            before -= old[rows]
    killed_before = count[change.killed].copy()
    if change.killed.size:
        # their pairs have just left their counts; they count as they were
        gone = xp.flatnonzero((slots < change.first_new) & (pairs.deaths[side] != NEVER))
        place = xp.searchsorted(change.killed, slots[gone])
        kernels.scatter_add(killed_before, place, (-deltas[gone]).astype(np.int32))

    def visible(counts: Array, which: Array, moment: str) -> Array:
        shown = (counts == 0) == when_alone
        if barriers is not None:
            numbers = [
                b.before if moment == "before" else int(b.after[-1]) if b.after.size else b.before for b in barriers
            ]
            shown &= xp.where(_keyless(table, which), numbers[1], numbers[0]) == 0
        return shown

    was, is_now = visible(before, rows, "before"), visible(count[rows], rows, "after")
    changed = xp.flatnonzero(was != is_now)
    born = new[visible(count[new], new, "after")]
    died = change.killed[visible(killed_before, change.killed, "before")]
    parts = [died, rows[changed], born]
    appears = xp.concatenate([xp.zeros(died.size, bool), is_now[changed], xp.ones(born.size, bool)])
    own = xp.ones(appears.size, bool)
    own[died.size : died.size + changed.size] = False
    return Changes(xp.concatenate(parts), appears.astype(np.int64), appears, own)


def _pack(slots: Array, instants: Array, codes: Array | int) -> Array:
    return (((slots << _INSTANT_BITS) | instants) << _CODE_BITS) | codes


def _keyless(table: StateTable, slots: Array) -> Array:
    """Mask of rows whose key has a null."""
    xp = table.kernels.xp
    valid = table.kernels.valid(table.store.take(slots, table.strict), table.strict)
    return xp.zeros(slots.size, bool) if valid is None else ~valid


def _barrier_events(table: StateTable, change: Lifetimes, barriers: tuple[Barrier, Barrier]) -> list[Array]:
    """A marker for every row at every instant at which its barrier rises or falls while it lives."""
    xp = table.kernels.xp
    crossings = [b.crossings(table) for b in barriers]
    if not any(c.size for c in crossings):
        return []
    rows = xp.flatnonzero(table.status.values)
    keyless = _keyless(table, rows)
    events = []
    for moments, which in zip(crossings, (rows[~keyless], rows[keyless]), strict=True):
        slots, instants = xp.repeat(which, moments.size), xp.tile(moments, which.size)
        born, died = change.born(xp, slots), change.died(xp, slots)
        live = xp.flatnonzero((born < instants) & (instants < died))
        events.append(_pack(slots[live], instants[live], _BARRIER))
    return events


def _without_flicker(table: StateTable, found: Changes) -> Changes:
    """Without rows that one change of the other side takes and gives back (an upsert does both)."""
    xp = table.kernels.xp
    if found.slots.size < 2:
        return found
    change = found.instants >> 1
    twin = (found.slots[1:] == found.slots[:-1]) & (change[1:] == change[:-1]) & ~found.own[1:] & ~found.own[:-1]
    if not bool(twin.any()):
        return found
    keep = xp.ones(found.slots.size, bool)
    keep[1:] &= ~twin
    keep[:-1] &= ~twin
    kept = xp.flatnonzero(keep)
    return Changes(found.slots[kept], found.instants[kept], found.appears[kept], found.own[kept])
