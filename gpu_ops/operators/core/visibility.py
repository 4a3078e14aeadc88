"""When a row by itself is part of the result: unmatched rows of outer joins, rows of semi and anti joins.

A row's association count is how many rows of the other side match it now. An unmatched row (and a row of an
anti join) is visible while its row lives and the count is zero, a row of a semi join while it lives
and the count is not. So the changelog's part about single rows is: where visibility changes.

``per_event``: the count over the micro-batch is the count before it plus the running sum of the pairs that come and go,
sorted by row and instant: a segmented cumulative sum. What happens at one instant is one *moment*: for a row with count
1 whose only match goes at instant 4 and whose next one comes at instant 7,

    moments   (row, 4)  (row, 7)
    before       1         0
    after        0         1

``per_batch``: the counts before and after. A row that an upsert of the other side hides and shows again within one
change was visible all along. Matches are counted by key (`KeyCounts`), and pair by pair only where each pair has to be
looked at.

``NOT IN`` (a null-aware anti join) adds a barrier: with a null on the right no row is visible, and a
row whose own key is null is visible only while the right is empty.

**Association counts by key.** Where no residual condition is, a row's count is the number of live rows of its key. So
it is kept by key, never by pair: a micro-batch costs its changes and the rows that appear or disappear. While its
key has rows on the other side, a row has a *spell* of matches. To `changes_per_event` spells are what pairs are where
each pair must be looked at. For a key that has rows until instant 4 and again from instant 7, and a row born at 3:

    spells of the key    [ALWAYS, 4)  [7, NEVER)
    spells of the row    [3, 4)       [7, NEVER)

With a TTL a row's count is kept beside it: the matches that have expired still count for the rows that they met. It is
moved by what its key's count is moved by, so a micro-batch costs the rows of the keys that it touches. A row that has
counted more than its key has now can never fall to zero again, and has no spells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots, distinct, value_changes, written_out
from gpu_ops.kernels import Among, Columns, Frame, Kernels, as_slots
from gpu_ops.operators.core.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.operators.core.emission import NetPairs, TimedPairs
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.operators.core.match import match_among
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DEAD, LIVE, rows_at_once

# What happens to a row at an instant; its own birth sorts first, its death last.
_BORN, _BEGIN, _END, _BARRIER, _DIES = range(5)

_DELTA = np.array([0, 1, -1, 0, 0], np.int64)
_MARK = 1 << layouts.SLOT_BITS
_ROWS: Final = "rows"
_TIME_BITS: Final = layouts.INSTANT_BITS + 2
"""Room for instants from `ALWAYS` to `NEVER`, in one number with a key's slot."""


@dataclasses.dataclass(frozen=True)
class Moments:
    """n instants at which something happens to a row, by row and instant: arrays of n, but for `opening`, `base`.

    Attributes:
        start: position of the moment's first event.
        last: position of its last event.
        rows: whose moment it is.
        instants: when.
        opening: which of the moments are the first ones of their rows.
        after: the row's count after it.
        row: number of its row among those that anything happens to.
        base: the count before the micro-batch, of each of these rows.
    """

    start: Positions
    last: Positions
    rows: Array
    instants: Instants
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
    rows, instants = layouts.unowned(owned[start])
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
    return Moments(start, last, rows, instants, opening, moved[last] + offset[row], row, before)


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
    kernels: Kernels, events: tuple[Array, Array, Array], before: Array, own: Array | None, *, net: bool
) -> Crossings:
    """Finds the events at which counts become zero or stop being zero.

    Args:
        kernels: the backend.
        events: n owners (numbers), whose count each moves; n instants; n times 1 or -1.
        before: n counts before the micro-batch, of each event's owner.
        own: n flags: the owner itself comes or goes; moves its count, without output. None for none.
        net: leave out what comes and goes; otherwise only within one change (an upsert does both).
    """
    xp = kernels.xp
    owner, instants, deltas = events
    owned = layouts.owned(owner, instants)
    order = kernels.argsort(owned)
    found = moments(xp, owned[order], deltas[order], lambda at: before[order[at]])
    first = order[found.start]
    at = found.switches(xp, found.after == 0, found.base == 0)
    if own is not None:
        at = at[xp.flatnonzero(~own[first[at]])]
    owners = owner[first[at]]
    twin = flickers(xp, owners, xp.zeros(at.size, np.int64) if net else instants[first[at]] >> 1)
    hidden = xp.empty(0, np.int64)
    if bool(twin.any()):
        hidden = owners[twin] if net else hidden
        at = at[xp.flatnonzero(~twin)]
    return Crossings(first[at], xp.where(found.after[at] == 0, 1, -1).astype(np.int8), hidden)


@dataclasses.dataclass
class VisibilityChanges:
    """Changes of rows' visibility: parallel arrays.

    Attributes:
        appears: whether the row becomes visible, or stops being.
        own: whether a change of the row itself did it, or one of the other side.
    """

    slots: Slots
    instants: Instants
    appears: Array
    own: Array


@dataclasses.dataclass
class Barrier:
    """The number of rows of the other side that hide rows of this one without matching them, over time.

    Attributes:
        before: the number before the micro-batch.
        instants: when it changes, ascending.
        after: the number from then on.
    """

    before: int
    instants: Instants
    after: Array

    @property
    def last(self) -> int:
        """The number in the end."""
        return int(self.after[-1]) if self.after.size else self.before

    def at(self, table: KeyedTable, instants: Instants) -> Array:
        """The number at (the end of) each instant."""
        xp = table.kernels.xp
        steps = xp.concatenate([xp.full(1, self.before, np.int64), self.after])
        return steps[xp.searchsorted(self.instants, instants, side="right")]

    def crossings(self, table: KeyedTable) -> Instants:
        """Instants at which it becomes zero or stops being zero."""
        xp = table.kernels.xp
        zero = xp.concatenate([xp.full(1, self.before, np.int64), self.after]) == 0
        return self.instants[zero[1:] != zero[:-1]]


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
    begin: Instants
    end: Instants
    comes: Positions
    goes: Positions
    before: Callable[[Slots], Array]


def visible_per_event(
    table: KeyedTable, change: Lifetimes, pairs: TimedPairs, side: int, when: When
) -> VisibilityChanges:
    """Every change of visibility, instant by instant, where pairs are counted; moves the association counts.

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
    found = changes_per_event(table, change, spells, when)
    table.add_counts(slots, pairs.deltas)
    return found


def changes_per_event(table: KeyedTable, change: Lifetimes, spells: Spells, when: When) -> VisibilityChanges:
    """Every change of visibility, instant by instant.

    Args:
        table: the rows' state.
        change: their lifetimes.
        spells: the spells that the micro-batch begins or ends, and all those of rows that it touches.
        when: rows are visible; where a barrier rises or falls there are spells of all rows.
    """
    kernels, xp = table.kernels, table.kernels.xp
    slots, begins, ends = spells.slots, spells.comes, spells.goes
    own, own_at, sign = change.events(kernels)
    packed_of = kernels.fused(layouts.moments)
    events = [
        packed_of(slots[begins], spells.begin[begins], _BEGIN),
        packed_of(slots[ends], spells.end[ends], _END),
        packed_of(own, own_at, xp.where(sign > 0, _BORN, _DIES)),
    ]
    barriers = when.barriers
    if barriers is not None:
        events.extend(_barrier_events(table, change, barriers))
    # One packed number per event: sorting the numbers sorts by row, instant and order within it.
    packed = xp.sort(xp.concatenate(events))
    owned, code = kernels.fused(layouts.without_codes)(packed)
    found = moments(xp, owned, xp.asarray(_DELTA)[code], lambda at: spells.before(layouts.unowned(owned[at])[0]))
    rows, instants = found.rows, found.instants
    dies = code[found.last] == _DIES
    visible = ((found.after == 0) == when.alone) & ~dies
    was_visible = (found.base == 0) == when.alone
    opening = rows[found.opening]
    if barriers is not None:
        keyless = _keyless(table, opening)
        here = xp.where(keyless[found.row], barriers[1].at(table, instants), barriers[0].at(table, instants))
        visible &= here == 0
        was_visible &= xp.where(keyless, barriers[1].before, barriers[0].before) == 0
    was_visible &= opening < change.first_new
    at = found.switches(xp, visible, was_visible)
    own_change = (code[found.start] == _BORN) | dies
    by_others = xp.where(own_change[at], -1, instants[at] >> 1)
    flicker = flickers(xp, rows[at], by_others)
    if bool(flicker.any()):
        at = at[xp.flatnonzero(~flicker)]
    return VisibilityChanges(rows[at], instants[at], visible[at], own_change[at])


def visible_per_batch(
    table: KeyedTable, change: Lifetimes, pairs: NetPairs, side: int, when: When
) -> tuple[Slots, Slots]:
    """The net changes of visibility, where pairs are counted; moves the counts. Arguments as `visible_per_event`.

    Returns:
        Slots of the rows that stop being visible, and of those that become it.
    """
    kernels, xp = table.kernels, table.kernels.xp
    slots, count = pairs.slots[side], table.count
    table.fetch(slots)
    before, died = count[slots], change.killed
    killed_before = count[died]
    table.add_counts(slots, pairs.deltas)
    # without a pair that goes, no count falls to zero
    after = count[slots] if pairs.goes.size else None
    moved, marked = kernels.fused(_crosses)(before, after, slots, change.first_new, pairs.dying[side])
    rows = distinct(xp, xp.compress(moved, marked))
    number = int((rows < _MARK).sum()) if pairs.goes.size else rows.size
    met, left = rows[:number], rows[number:] - _MARK
    born = count[change.first_new :]
    hides, shows = (met, left) if when.alone else (left, met)
    born = xp.flatnonzero(born == 0 if when.alone else born != 0) + change.first_new
    if died.size:
        died = xp.compress(killed_before == 0 if when.alone else killed_before != 0, died)
    return xp.concatenate([died, hides]), xp.concatenate([shows, born])


def changes_per_batch(
    table: KeyedTable, change: Lifetimes, staying: tuple[Slots, Array, Array], touched: tuple[Array, Array], when: When
) -> tuple[Slots, Slots]:
    """The net changes of visibility. Arguments as `changes_per_event`, but for the counts.

    Args:
        table: the rows' state.
        change: their lifetimes.
        staying: rows that were there and stay, all whose visibility may change; their counts before and after.
        touched: the counts of the new rows, after; and of those that die, before.
        when: rows are visible.

    Returns:
        Slots of the rows that stop being visible, and of those that become it.
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
    hides, shows = xp.compress(was > is_now, rows), xp.compress(is_now > was, rows)
    born, died = visible(born, new, "after"), visible(died, change.killed, "before")
    return (xp.concatenate([xp.compress(died, change.killed), hides]), xp.concatenate([shows, xp.compress(born, new)]))


def _crosses(
    before: Array, after: Array | None, slots: Slots, first_new: int, dies: Array | None
) -> tuple[Array, Array]:
    """Flags the rows that were there and stay whose count becomes zero or stops being it; gives their slots, too.

    Slots are `_MARK` higher where the count was not zero. ``after``: None where it only grows.
    """
    moved = (before == 0 if after is None else (before == 0) ^ (after == 0)) & (slots < first_new)
    return moved if dies is None else moved & ~dies, slots + ((before != 0).astype(np.int64) << layouts.SLOT_BITS)


def _keyless(table: KeyedTable, slots: Slots) -> Array:
    """Mask of rows whose key has a null."""
    xp = table.kernels.xp
    valid = table.kernels.valid(table.store.take(slots, table.strict, present=True), table.strict)
    return xp.zeros(slots.size, bool) if valid is None else ~valid


def _barrier_events(table: KeyedTable, change: Lifetimes, barriers: tuple[Barrier, Barrier]) -> list[Array]:
    """A marker for every row at every instant at which its barrier rises or falls while it lives."""
    xp = table.kernels.xp
    crossings = [b.crossings(table) for b in barriers]
    if not any(c.size for c in crossings):
        return []
    rows = xp.flatnonzero(table.status.values)
    keyless = _keyless(table, rows)
    events = []
    for instants_at, which in zip(crossings, (rows[~keyless], rows[keyless]), strict=True):
        slots, instants = xp.repeat(which, instants_at.size), xp.tile(instants_at, which.size)
        born, died = change.born(xp, slots), change.died(xp, slots)
        live = xp.flatnonzero((born < instants) & (instants < died))
        events.append(layouts.moments(slots[live], instants[live], _BARRIER))
    return events


@dataclasses.dataclass(frozen=True)
class _Touched:
    """The changes that a micro-batch makes to the numbers of rows of g keys.

    Attributes:
        slots: of the keys, ascending.
        before: g numbers of rows.
        after: likewise.
        events: of each row that comes or goes: which of the keys, when, and 1 or -1.
    """

    slots: Slots
    before: Array
    after: Array
    events: tuple[Array, Instants, Array]


class KeyCounts:
    """Counts the live rows of one input by key, for the rows of the other.

    Args:
        kernels: the backend.
        own: the rows whose count that is.
        counted: the rows that are counted; the keys are part of this table. Those of before the micro-batch, which
            may be prepared, are counted at once.
        beside: whether what counts for a row is what stands beside it.
    """

    def __init__(self, kernels: Kernels, own: KeyedTable, counted: KeyedTable, *, beside: bool) -> None:
        self._kernels, self._own, self._counted, self._beside = kernels, own, counted, beside
        self._names = tuple(f"{number}" for number in range(len(counted.keys)))
        kinds = [counted.source.schema.field(column).type for column in counted.keys]
        # without a key all rows have the same
        schema = pa.schema(list(zip(self._names, kinds, strict=True)) or [("all", pa.int8())])
        types = counted.key_types or None
        self._keys = KeyTable(kernels, schema, {_ROWS: np.int32}, f"keys of {counted.source.name}", types=types)
        self.fill(lambda: None)
        counted.attached.append(self._keys)
        self.expire()  # undone with the micro-batch that is prepared, as what expired in it is

    # --- keys --------------------------------------------------------------------------------

    def _frame(self, table: KeyedTable, slots: Slots) -> tuple[Frame, Positions | None]:
        """The keys of some rows, and which of the rows can match at all, None for all."""
        kernels = self._kernels
        if not table.keys:
            return kernels.frame(pa.table({"all": np.zeros(slots.size, np.int8)})), None
        taken = table.store.take(slots, table.keys, present=True)
        valid = kernels.valid(taken, table.strict) if table.strict else None
        frame = kernels.combine([(name, taken, own) for name, own in zip(self._names, table.keys, strict=True)])
        if valid is None or bool(valid.all()):
            return frame, None
        able = kernels.xp.flatnonzero(valid)
        return kernels.take(frame, able, self._names, present=True), able

    def _found(self, table: KeyedTable, slots: Slots) -> Slots:
        """The key of each of some rows, -1 for one that no live row of the counted input has, or none can have."""
        xp = self._kernels.xp
        if not slots.size or not len(self._keys):
            return xp.full(slots.size, -1, np.int64)
        frame, able = self._frame(table, slots)
        keys = self._keys.find(frame)
        if able is None:
            return keys
        all_keys = xp.full(slots.size, -1, np.int64)
        all_keys[able] = keys
        return all_keys

    def _numbers(self, keys: Slots) -> Array:
        """The number of rows that each of some keys has now; 0 for a key that is not there."""
        xp, rows = self._kernels.xp, self._keys.beside[_ROWS].values
        return xp.where(keys >= 0, rows[keys], 0) if rows.size else xp.zeros(keys.size, np.int32)

    def _rows_of(self, keys: Slots) -> tuple[Array, Slots]:
        """The rows of some keys that were there and stay: which of the keys, and their slots."""
        kernels, xp, own = self._kernels, self._kernels.xp, self._own
        if not keys.size or not own.first_new:
            return xp.empty(0, np.int64), xp.empty(0, np.int64)
        frame = self._keys.store.take(keys, self._keys.source.schema.names, present=True)
        probe_rows = kernels.entries(kernels.hash_rows(frame, self._names, own.key_types), 0)
        probe_rows.sort()
        candidates = own.key_index.meet(probe_rows, staged=False, by_candidate=True)
        columns = Columns(frame, self._names), Columns(own.store, own.keys)
        among = None if own.all_alive and not own.killed.size else Among(own.status.values, LIVE, LIVE)
        return match_among(kernels, own.key_types, candidates, columns, among, by_candidate=True)

    # --- a micro-batch -----------------------------------------------------------------------

    def _touched(self, change: Lifetimes) -> _Touched:
        """The keys that the counted input's changes touch; those that are new are staged, without rows."""
        kernels, xp = self._kernels, self._kernels.xp
        rows, instants, signs = change.events(kernels)
        signs = signs.astype(np.int64)
        if not rows.size:
            nothing = xp.empty(0, np.int64)
            return _Touched(nothing, nothing, nothing, (nothing, instants, signs))
        frame, able = self._frame(self._counted, rows)
        if able is not None:
            instants, signs = instants[able], signs[able]
        found = self._keys.locate(frame)
        before = self._keys.beside[_ROWS].values[found.slots].astype(np.int64)
        after = before.copy()
        kernels.scatter_add(after, found.number, signs)
        return _Touched(found.slots, before, after, (found.number, instants, signs))

    def _move(self, touched: _Touched, own: Lifetimes) -> None:
        """Make the counts what they are after the micro-batch; where they stand beside rows, that is a write."""
        kernels, table = self._kernels, self._own
        self._keys.put(_ROWS, touched.slots, touched.after, touched.before)
        self._keys.end(touched.slots[touched.after == 0])
        if self._beside:
            number, rows = self._rows_of(touched.slots)
            table.add_counts(rows, (touched.after - touched.before)[number])
            new = as_slots(kernels, own.first_new, own.new)
            table.add_counts(new, self._numbers(self._found(table, new)))

    def expire(self) -> None:
        """The counted input's rows that have expired are there no more."""
        gone, xp = self._counted.expired, self._kernels.xp
        if gone.size:
            keys = self._found(self._counted, gone)
            keys = keys[keys >= 0]
            self._keys.add(_ROWS, keys, xp.full(keys.size, -1, np.int32))
            keys = distinct(xp, keys)
            self._keys.move(keys[self._keys.beside[_ROWS].values[keys] == 0], LIVE, DEAD)

    def per_batch(self, own: Lifetimes, other: Lifetimes, when: When) -> tuple[Slots, Slots]:
        """The net changes of visibility; moves the counts. Arguments as `per_event`.

        Returns:
            Slots of the rows that stop being visible, and of those that become it.
        """
        xp, table = self._kernels.xp, self._own
        touched = self._touched(other)
        if when.barrier_moves(table):
            # every row may appear or disappear: nothing less than a pass tells which
            rows = xp.flatnonzero(table.status.values[: own.first_new] == LIVE)
            keys = self._found(table, rows)
            before = self._numbers(keys)
        else:
            crosses = (touched.before == 0) ^ (touched.after == 0)
            at = xp.flatnonzero(crosses)
            number, rows = self._rows_of(touched.slots[at])
            keys, before = touched.slots[at[number]], touched.before[at[number]]
        died = self._numbers(self._found(table, own.killed))
        if self._beside:
            table.fetch(rows)
            before, died = table.count[rows], table.count[own.killed]
        self._move(touched, own)
        after = table.count[rows] if self._beside else self._numbers(keys)
        new = as_slots(self._kernels, own.first_new, own.new)
        born = self._numbers(self._found(table, new))
        return changes_per_batch(table, own, (rows, before, after), (born, died), when)

    def per_event(self, own: Lifetimes, other: Lifetimes, when: When) -> VisibilityChanges:
        """Every change of visibility, instant by instant; moves the counts.

        Args:
            own: the lifetimes of the rows whose count that is.
            other: those of the rows that are counted.
            when: rows are visible.
        """
        xp, table = self._kernels.xp, self._own
        touched = self._touched(other)
        switches = self._switches(touched)
        rows = xp.concatenate([own.killed, as_slots(self._kernels, own.first_new, own.new)])
        if when.barrier_moves(table):
            rows = xp.flatnonzero(table.status.values)
            keys = self._found(table, rows)
        else:
            crossing = distinct(xp, switches[0])
            number, staying = self._rows_of(crossing)
            keys = xp.concatenate([self._found(table, rows), crossing[number]])
            rows = xp.concatenate([rows, staying])
        matched = self._numbers(keys)
        begins, ends = self._spells(touched, switches, distinct(xp, keys[matched > 0]))
        born, died = own.born(xp, rows), own.died(xp, rows)
        first = xp.searchsorted(ends, _packed(keys, born), side="right")
        count = xp.searchsorted(begins, _packed(keys, died)) - first
        was = matched > 0
        if self._beside:
            table.fetch(rows)
            was = table.count[rows] > 0
            count[(table.count[rows] > matched) & (rows < own.first_new)] = 0
        number, at = written_out(xp, first, count)
        begin, end = xp.maximum(born[number], _time(begins[at])), xp.minimum(died[number], _time(ends[at]))
        order = self._kernels.argsort(rows)
        was &= rows < own.first_new
        spells = Spells(
            rows[number],
            begin,
            end,
            xp.flatnonzero(begin != ALWAYS),
            xp.flatnonzero(end != NEVER),
            lambda asked: was[order][xp.searchsorted(rows[order], asked)],
        )
        found = changes_per_event(table, own, spells, when)
        self._move(touched, own)
        return found

    def _switches(self, touched: _Touched) -> tuple[Slots, Instants, Array]:
        """Finds when keys get their first row and lose their last: slots, by slot and logical time; times; ends or not.

        What an upsert takes and gives back within one change is left out.
        """
        number, instants, _ = touched.events
        found = crossings(self._kernels, touched.events, touched.before[number], None, net=False)
        return touched.slots[number[found.first]], instants[found.first], found.appears > 0

    def _spells(
        self, touched: _Touched, switches: tuple[Slots, Instants, Array], standing: Slots
    ) -> tuple[Array, Array]:
        """When keys begin and cease to have rows, as `_packed` has it: ascending, and the n-th end is the n-th begin's.

        Args:
            touched: the keys that the micro-batch touches.
            switches: what becomes of them.
            standing: keys that had rows before it, ascending; touched ones may be among them.
        """
        xp, (slots, instants, ceases) = self._kernels.xp, switches
        others = standing
        if standing.size and touched.slots.size:
            at = xp.minimum(xp.searchsorted(touched.slots, standing), touched.slots.size - 1)
            others = standing[touched.slots[at] != standing]
        before = xp.concatenate([touched.slots[touched.before > 0], others])
        after = xp.concatenate([touched.slots[touched.after > 0], others])
        begins = xp.concatenate([_packed(before, ALWAYS), _packed(slots[~ceases], instants[~ceases])])
        ends = xp.concatenate([_packed(after, NEVER), _packed(slots[ceases], instants[ceases])])
        return xp.sort(begins), xp.sort(ends)

    # --- the stored form ---------------------------------------------------------------------

    def fill(self, settle: Callable[[], None]) -> None:
        """Count the rows that there were before the micro-batch; ``settle``: called now and then."""
        kernels, counted = self._kernels, self._counted
        live = kernels.xp.flatnonzero(counted.status.values[: counted.first_new])
        rows = kernels.xp.concatenate([live, counted.expired])
        step = rows_at_once(kernels) if kernels.host is not None else max(1, int(rows.size))
        for at in range(0, int(rows.size), step):
            found = self._keys.locate(self._frame(self._counted, rows[at : at + step])[0])
            slots = found.slots[found.number]
            self._keys.add(_ROWS, slots, kernels.xp.ones(slots.size, np.int32))
            self._keys.commit(0)
            settle()

    def write_out(self) -> None:
        """Put beside the rows what a snapshot has there: the counts of all of them."""
        own = self._own
        if not self._beside:
            rows = self._kernels.xp.flatnonzero(own.status.values)
            own.count[rows] = self._numbers(self._found(own, rows))


def _packed(keys: Slots, instants: Instants | int) -> Array:
    """Keys and instants in one number that is sorted by both; of no key (-1) it is less than all others."""
    return (keys << _TIME_BITS) | (instants + 1)


def _time(packed: Array) -> Instants:
    return (packed & ((1 << _TIME_BITS) - 1)) - 1
