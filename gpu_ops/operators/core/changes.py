"""From changes to lifetimes: which row each change of a micro-batch brings or takes.

Laws:
- multiset input: the j-th effective retraction of a value takes the j-th instance of it, the oldest
  first; a retraction is *unknown* when as many instances as there ever were are gone, which is when
  the running count falls to a new minimum below zero.
- unique key: a key holds at most one row; an insertion of a present key replaces it (FLINK-40681 is
  what Flink 2.3.0 does instead), a retraction of an absent one is unknown. The key decides, not the
  other columns (Flink: ``InputSideHasUniqueKey.retractRecord``).

A row lives from its birth to its death. Time within a micro-batch is the *logical time*: change number s
(its sequence: the place in the micro-batch's total order, over all inputs) takes a row at logical time 2s and brings
one at 2s + 1, so that an upsert (one change that does both) first takes, then brings. Rows from
before the micro-batch were born at `ALWAYS`; rows that stay die at `NEVER`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, LogicalTimes, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, UPDATE_AFTER, UPDATE_BEFORE, adds
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Among, Columns, Flagged, Frame, Kernels, TooMany, as_slots
from gpu_ops.layouts import LOGICAL_TIME_BITS
from gpu_ops.operators.core.first_rows import FirstRows, most_candidates
from gpu_ops.operators.core.looks import Asked, Steps, side_by_side
from gpu_ops.operators.core.match import match_among
from gpu_ops.operators.core.order import Groups, within
from gpu_ops.state.keyed_table import TIES_COLUMN, TIME_COLUMN, KeyedTable
from gpu_ops.state.numbers import Growing
from gpu_ops.state.table import DYING, LIVE

ALWAYS = -1
NEVER = 1 << LOGICAL_TIME_BITS
"""Later than any logical time: a micro-batch holds at most `gpu_ops.layouts.MAX_CHANGES`."""


@dataclasses.dataclass
class Lifetimes:
    """The births and deaths of one input's rows in a micro-batch.

    The new rows get the slots from ``first_new`` on.

    Attributes:
        new: how many new rows there are.
        deaths: logical times, one per new row; None when none of them dies.
        killed: slots of committed rows that die, ascending.
        unknown: how many retractions were of rows that were not there; a number, or an array of no dimensions.
        refreshed: slots of committed rows that the micro-batch writes without changing them, for their TTL.
        gone: changes that have the hashes of the killed rows, and the slots of these, in one order, if they are known.
        net: of a net change: when everything happens.
        logical_times: see `births` and `killed_at`; of a net change made when asked for.
    """

    first_new: int
    new: int
    deaths: LogicalTimes | None
    killed: Slots
    unknown: Array | int
    refreshed: Slots | None = None
    gone: tuple[Positions, Slots] | None = None
    net: NetChange | None = None
    logical_times: tuple[LogicalTimes, LogicalTimes] | None = None

    @classmethod
    def of_new(cls, xp: Any, first_new: int, new: int, births: LogicalTimes | None) -> Lifetimes:
        """New rows and no others; ``births``: None of a net change."""
        nothing = xp.empty(0, np.int64)
        return cls(first_new, new, None, nothing, 0, logical_times=None if births is None else (births, nothing))

    @property
    def any_death(self) -> bool:
        """Tells whether any row dies."""
        return self.deaths is not None or bool(self.killed.size)

    @property
    def births(self) -> LogicalTimes:
        """Logical times, one per new row, ascending."""
        return self._logical_times()[0]

    @property
    def killed_at(self) -> LogicalTimes:
        """Logical times, one per killed row."""
        return self._logical_times()[1]

    def _logical_times(self) -> tuple[LogicalTimes, LogicalTimes]:
        if self.logical_times is None:
            assert self.net is not None
            full = self.net.xp.full
            births = full(self.new, self.net.births, np.int64)
            self.logical_times = births, full(self.killed.size, self.net.deaths, np.int64)
        return self.logical_times

    def happens(self, *, deaths: int, births: int) -> None:
        """Puts all deaths of a net change at one logical time, and all births at one."""
        assert self.net is not None
        self.net, self.logical_times = dataclasses.replace(self.net, deaths=deaths, births=births), None

    def events(self, kernels: Kernels) -> tuple[Slots, LogicalTimes, Array]:
        """Each row that comes and each that goes, in no order: its slot, when, and 1 or -1."""
        xp, new = kernels.xp, as_slots(kernels, self.first_new, self.new)
        slots, logical_times = [new, self.killed], [self.births, self.killed_at]
        if self.deaths is not None:
            dying = xp.flatnonzero(self.deaths != NEVER)
            slots.append(new[dying])
            logical_times.append(self.deaths[dying])
        all_slots = xp.concatenate(slots)
        signs = xp.full(all_slots.size, -1, np.int8)
        signs[: new.size] = 1
        return all_slots, xp.concatenate(logical_times), signs

    def states(self, slots: Slots) -> Array | None:
        """Gives, in a net change, the states of the rows at these slots, `DYING` of some; None if none dies.

        Not after its commit.
        """
        assert self.net is not None
        return self.net.status.values[slots] if self.killed.size else None

    def born(self, xp: Any, slots: Slots) -> LogicalTimes:
        """When the rows at these slots were born."""
        if self.new == 0:
            return xp.full(slots.size, ALWAYS, np.int64)
        if self.net is not None:
            return xp.where(slots >= self.first_new, self.net.births, ALWAYS)
        new = slots - self.first_new
        return xp.where(new >= 0, self.births[xp.maximum(new, 0)], ALWAYS)

    def died(self, xp: Any, slots: Slots) -> LogicalTimes:
        """When the rows at these slots die."""
        if self.net is not None and self.killed.size:
            return xp.where(self.states(slots) == DYING, self.net.deaths, NEVER)
        times = xp.full(slots.size, NEVER, np.int64)
        if self.deaths is not None:
            new = slots - self.first_new
            times = xp.where(new >= 0, self.deaths[xp.maximum(new, 0)], times)
        if self.killed.size:
            at = xp.minimum(xp.searchsorted(self.killed, slots), self.killed.size - 1)
            times = xp.where(self.killed[at] == slots, self.killed_at[at], times)
        return times


@dataclasses.dataclass(frozen=True)
class NetChange:
    """When a net change happens, and the states of rows, in which those that die are marked.

    Attributes:
        xp: numpy or cupy.
    """

    xp: Any
    status: Growing
    deaths: int = 0
    births: int = 1


_FEW: Final = 3
"""Where of so many changes one is a retraction, the others are not looked at."""
_SPARSE: Final = 16
"""Of so many places one is marked, so that few changes look like retracted ones."""


class DeviceChanges(NamedTuple):
    """The changes of one input in the backend's memory, as `apply_changes` takes them.

    Attributes:
        inserts: mask of those that bring a row; None where all do, and none looks for a row that is there.
        kinds: their row kinds; None of a net change.
        sequence: their positions in the micro-batch's total order; None of a net change.
        beside: what stands beside the rows they bring, by name; see `gpu_ops.state.keyed_table`.
    """

    inserts: Array | None
    kinds: Array | None
    sequence: Array | None
    beside: Mapping[str, Array] = {}


def on_device(tables: Sequence[KeyedTable], changes: Sequence[Ingested], *, net: bool) -> list[DeviceChanges]:
    """Moves the changes of several inputs to the backend's memory together.

    Args:
        tables: of each input.
        changes: of each input.
        net: only the net change counts.
    """
    kernels = tables[0].kernels
    looking = [_looking(table, change.kinds) for table, change in zip(tables, changes, strict=True)]
    flags = [mask.view(np.int8) for mask in looking if mask is not None]
    moved = iter(_moved(kernels, [*flags, *([] if net else [change.kinds for change in changes])]))
    inserts = [None if mask is None else next(moved).view(bool) for mask in looking]
    beside = [
        {
            name: kernels.asarray(numbers)
            for name, numbers in ((TIME_COLUMN, change.times), (TIES_COLUMN, change.ties))
            if numbers is not None
        }
        for change in changes
    ]
    if net:
        return [DeviceChanges(mask, None, None, its) for mask, its in zip(inserts, beside, strict=True)]
    sequences = _moved(kernels, [change.sequence for change in changes])
    return [DeviceChanges(*of_input) for of_input in zip(inserts, moved, sequences, beside, strict=True)]


def _looking(table: KeyedTable, kinds: Array) -> Array | None:
    """Mask of changes that bring a row; None where all do, and none looks for a row that is there."""
    if table.identity_index is None or not kinds.size:
        return None
    inserts = adds(kinds)
    # With a TTL even an insertion is looked up: it refreshes the equal rows there are.
    looks = table.source.unique_key is not None or table.written is not None or not inserts.all()
    return inserts if looks else None


def _moved(kernels: Kernels, arrays: Sequence[Array]) -> list[Array]:
    """Host arrays of one type in the backend's memory: each way there is a wait, so they go together."""
    if kernels.host is None or not arrays:
        return list(arrays)
    moved, ends = kernels.asarray(np.concatenate(arrays)), np.cumsum([array.size for array in arrays]).tolist()
    return [moved[end - array.size : end] for array, end in zip(arrays, ends, strict=True)]


def apply_changes(
    table: KeyedTable, frame: Frame, change: DeviceChanges, event_kinds: Array | None, *, net: bool
) -> Lifetimes:
    """Resolve one input's changes and prepare its table for them; arguments as of `applied`."""
    (lifetimes,) = side_by_side(table.kernels, [applied(table, frame, change, event_kinds, net=net)])
    return lifetimes


def applied(
    table: KeyedTable, frame: Frame, change: DeviceChanges, event_kinds: Array | None, *, net: bool
) -> Steps[Lifetimes]:
    """Resolve one input's changes and prepare its table for them, beside the other inputs of the micro-batch.

    Args:
        table: the input's state.
        frame: n changed rows, by ascending sequence.
        change: what they do.
        event_kinds: one row kind per logical time, filled in for this input's logical times; None if ``net``.
        net: fold the micro-batch to its net change: what is born and dies within it is left out,
            every death is at logical time 0, every birth at logical time 1.
    """
    kernels, xp = table.kernels, table.kernels.xp
    size, inserts, sequence = kernels.num_rows(frame), change.inserts, change.sequence
    if sequence is not None:
        assert event_kinds is not None
        takes = 2 * sequence
        event_kinds[takes] = UPDATE_BEFORE if inserts is None else xp.where(inserts, UPDATE_BEFORE, change.kinds)
        event_kinds[takes + 1] = change.kinds if inserts is None else xp.where(inserts, change.kinds, DELETE)
    identity = table.hash_identity(frame) if table.identity_index is not None else None
    if inserts is None:
        lifetimes, rows = Lifetimes.of_new(xp, len(table), size, None if sequence is None else 2 * sequence + 1), None
    else:
        assert identity is not None
        batch = _InputChanges(table, frame, identity, inserts, sequence, event_kinds)
        if table.source.unique_key is None:
            some = yield from _retracted(batch)
            rows, lifetimes = yield from (_by_value(batch) if some is None else _among_all(batch, some))
        elif sequence is not None:
            rows, lifetimes = yield from _by_unique_key(batch)
        else:
            rows, lifetimes = yield from _by_unique_key_net(batch)
    if net:
        lifetimes.net = NetChange(xp, table.status)
    beside = change.beside
    if rows is not None:
        frame = kernels.take(frame, rows, table.source.schema.names, present=True)
        beside = {name: numbers[rows] for name, numbers in beside.items()}
    table.prepare(frame, identity, lifetimes.killed, lifetimes.refreshed, rows=rows, beside=beside, gone=lifetimes.gone)
    if lifetimes.deaths is not None:
        table.end_stillborn(lifetimes.first_new + xp.flatnonzero(lifetimes.deaths < NEVER))
    return lifetimes


@dataclasses.dataclass(frozen=True)
class _InputChanges:
    """The changes of one input, on their way to lifetimes; arrays by row of the frame.

    Attributes:
        sequence: None for a net change.
    """

    table: KeyedTable
    frame: Frame
    hashes: Hashes
    inserts: Array
    sequence: Array | None
    event_kinds: Array | None

    @functools.cached_property
    def groups(self) -> Groups:
        """The changes in groups of equal identity."""
        table = self.table
        return Groups(table.kernels, self.frame, table.identity, table.identity_types, self.hashes)


class _Candidates(NamedTuple):
    """Committed rows that rows of the micro-batch may equal; see `gpu_ops.kernels.Kernels.matches`."""

    types: Sequence[pa.DataType]
    pairs: Array
    columns: tuple[Columns, Columns]
    among: Among | None


def present(
    table: KeyedTable, frame: Frame, rows: Positions, hashes: Hashes, *, at_most: int | None = None
) -> tuple[Array, Slots]:
    """Committed live rows with the identity of some rows of a frame: numbers of these rows, slots, sorted.

    Args:
        table: the input's state.
        frame: n rows.
        rows: positions, in the order of `Groups`.
        hashes: n hashes of the table's identity.
        at_most: how many candidates there may be.

    Raises:
        TooMany: there are more than there may be.
    """
    return match_among(table.kernels, *_candidates(table, frame, rows, hashes, at_most))


def _candidates(
    table: KeyedTable, frame: Frame, rows: Positions, hashes: Hashes, at_most: int | None = None
) -> _Candidates:
    """Looks up candidates for rows in the order of their groups; a row is known by its number in that order."""
    index = table.identity_index
    assert index is not None
    # groups are in the order of their hashes, as entries are
    pairs = index.meet(table.kernels.entries(hashes, 0, rows), staged=False, at_most=at_most)
    return _Candidates(table.identity_types, pairs, *_compared(table, frame, rows))


def _instances(batch: _InputChanges, counts: Array | None) -> tuple[Array, Slots]:
    """Committed live rows equal to those of groups: group numbers, slots, sorted.

    Args:
        batch: the changes.
        counts: of each group how many are wanted, the oldest, if there are more; None for all.
    """
    table, leader = batch.table, batch.groups.leader
    if counts is None:
        return present(table, batch.frame, leader, batch.hashes)
    numbers = table.kernels.xp.flatnonzero(counts)
    looks = leader[numbers]
    try:
        most = most_candidates(table, int(looks.size))
        probe_row, slots = present(table, batch.frame, looks, batch.hashes, at_most=most)
    except TooMany:
        assert table.identity_index is not None
        first = FirstRows(table, table.identity_index, table.identity, table.identity_types)
        probe_columns = Columns(batch.frame, table.identity, looks)
        probe_row, slots = first.search(probe_columns, batch.hashes[looks], counts[numbers])
    return numbers[probe_row], slots


def _retracted(batch: _InputChanges) -> Steps[Positions | None]:
    """The changes of values that are retracted, and perhaps some more; None where it pays to look at all."""
    table, inserts = batch.table, batch.inserts
    xp = table.kernels.xp
    (retractions,) = (yield Asked([Flagged(None, [0], inserts)])).rows
    if table.written is not None or int(retractions.size) * _FEW > int(inserts.size):
        return None  # with a TTL even an insertion writes the equal rows
    bits = int(retractions.size * _SPARSE).bit_length()
    marks, place = xp.zeros(1 << bits, bool), (batch.hashes >> np.uint64(64 - bits)).view(np.int64)
    marks[place[retractions]] = True
    (some,) = (yield Asked([Flagged(marks[place], [0])])).rows
    return some


def _among_all(batch: _InputChanges, some: Positions) -> Steps[tuple[Positions, Lifetimes]]:
    """Applies changes like `_by_value`, looking at some of them only: each of the others brings a row that stays."""
    table, inserts, sequence = batch.table, batch.inserts, batch.sequence
    xp, frame = table.kernels.xp, table.kernels.take(batch.frame, some, table.identity, present=True)
    when = None if sequence is None else sequence[some]
    positions, lifetimes = yield from _by_value(
        _InputChanges(table, frame, batch.hashes[some], inserts[some], when, batch.event_kinds)
    )
    comes = inserts.copy()
    comes[some] = False
    comes[some[positions]] = True
    (rows,) = (yield Asked([Flagged(comes, [0])])).rows
    if lifetimes.deaths is not None:
        deaths = xp.full(inserts.size, NEVER, np.int64)
        deaths[some[positions]] = lifetimes.deaths
        lifetimes.deaths = deaths[rows]
    lifetimes.new = int(rows.size)
    if sequence is not None:
        lifetimes.logical_times = 2 * sequence[rows] + 1, lifetimes.killed_at
    return rows, lifetimes


class _Takes(NamedTuple):
    """The row that each known retraction takes: the oldest instance of its value first.

    Attributes:
        old: of those that take a committed row, their positions among the grouped changes.
        killed: one per `old`, the slot that it takes.
        young: of those that take a row of the micro-batch, their positions.
        dying: one per `young`, which of the grouped insertions it takes back.
    """

    old: Positions
    killed: Slots
    young: Positions
    dying: Positions


def _by_value(batch: _InputChanges) -> Steps[tuple[Positions, Lifetimes]]:
    """Matches retractions of a multiset input with instances of the same value.

    With two committed rows of value x, in slots 4 and 7, and none of y, ten changes:

        change (order)           0   1   4   5   6   9     2   3   7   8
        what it does            -x  +x  -x  -x  -x  +x    -y  +y  +y  -y
        running number           1   2   1   0  -1   0    -1   0   1   0
        least before it          0   0   0   0   0  -1     0  -1  -1  -1
        unknown                                  *         *
        instance that it takes   0       1   2                         0
        which row that is   slot 4  slot 7  change 1            change 3

    So slots 4 and 7 die, the rows of changes 1 and 3 die within the micro-batch, those of 7 and 9 stay.
    """
    table, groups, sequence = batch.table, batch.groups, batch.sequence
    xp, order, group = table.kernels.xp, groups.order, groups.group
    total, insert = int(groups.leader.size), batch.inserts[order]  # a flag per grouped change
    (born, taking), retracted = (yield Asked([Flagged(insert, [0]), Flagged(None, [group], insert)])).rows, None
    if table.written is None:
        retracted = xp.bincount(taking, minlength=total)  # a number per value
    owner, slots = _instances(batch, retracted)  # of each committed row its value, and its slot
    # one per value; more than are retracted need not be known
    present = xp.bincount(owner, minlength=total)
    held = present[group]
    retracts = ~insert & ~_unknown_retractions(batch, insert, held, int(slots.size))
    takes = yield from _oldest_first(batch, born, retracts, (slots, present, held))
    unknown = int(taking.size - takes.old.size - takes.young.size)
    if sequence is None:
        rows, lifetimes = yield from _net_by_value(batch, born, takes, unknown)
    else:
        deaths = xp.full(order.size, NEVER, np.int64)  # one per change
        deaths[order[born[takes.dying]]] = 2 * sequence[order[takes.young]]
        killed = takes.killed, 2 * sequence[order[takes.old]]
        (rows,) = (yield Asked([Flagged(batch.inserts, [0])])).rows
        late = deaths[rows]
        died = late if late.size and bool((late < NEVER).any()) else None
        lifetimes = _lifetimes(batch, rows, died, killed, unknown)
    if table.written is not None:
        # Flink keeps equal rows in one entry: writing one writes them all (a retraction of none does not)
        written = xp.zeros(total, bool)
        written[group[insert | retracts]] = True
        lifetimes.refreshed = slots[written[owner]]
    return rows, lifetimes


def _unknown_retractions(batch: _InputChanges, insert: Array, held: Array, committed: int) -> Array:
    """Mask of grouped changes that retract a row which is not there.

    Args:
        batch: the changes.
        insert: a flag per grouped change.
        held: of each of them how many committed rows its value has.
        committed: how many rows those are in all.
    """
    table, groups = batch.table, batch.groups
    xp, group = table.kernels.xp, groups.group
    step = xp.where(insert, np.int64(1), np.int64(-1))
    running = held + within(xp, groups, step) + step  # one per change, after it
    # a minimum that begins anew with each value: the numbers of a later one are all below those of an earlier one
    wide = int(insert.size) + committed + 2
    lowest = table.kernels.cumulative_min(xp.minimum(running, 0) - group * wide) + group * wide
    before = xp.concatenate([xp.zeros(1, np.int64), lowest[:-1]])
    before[groups.starts] = 0
    return ~insert & (running < before)


def _oldest_first(
    batch: _InputChanges, born: Positions, retracts: Array, committed: tuple[Slots, Array, Array]
) -> Steps[_Takes]:
    """The rows that retractions take.

    Args:
        batch: the changes.
        born: positions of grouped insertions.
        retracts: a flag per grouped change, of retractions that are not unknown.
        committed: the slots of rows, by value, the oldest first; and how many there are, of each value, and of that of
            each change.
    """
    groups, xp, (slots, present, held) = batch.groups, batch.table.kernels.xp, committed
    instance, value = within(xp, groups, retracts), groups.group  # one per change, like the next one
    is_old = instance < held
    old, young = (yield Asked([Flagged(retracts & is_old, [0]), Flagged(retracts, [0], is_old)])).rows
    first_slot = xp.cumsum(present) - present  # one per value, like the next two
    births = xp.bincount(groups.group[born], minlength=present.size)
    first_birth = xp.cumsum(births) - births
    killed = slots[first_slot[value[old]] + instance[old]]
    dying = first_birth[value[young]] + instance[young] - held[young]
    return _Takes(old, killed, young, dying)


def _net_by_value(
    batch: _InputChanges, born: Positions, takes: _Takes, unknown: int
) -> Steps[tuple[Positions, Lifetimes]]:
    """Without what is born and dies within the micro-batch; ``born``: positions of grouped insertions."""
    table, groups = batch.table, batch.groups
    xp, total = table.kernels.xp, int(groups.leader.size)
    dies, killed = xp.zeros(born.size, bool), takes.killed
    dies[takes.dying] = True
    (born,) = (yield Asked([Flagged(None, [born], dies)])).rows
    rows = groups.order[born]
    if not table.arrival_counts:
        # an instance that goes and one that comes, equal by value: neither
        of_born, of_killed = groups.group[born], groups.group[takes.old]  # their values
        come, gone = xp.bincount(of_born, minlength=total), xp.bincount(of_killed, minlength=total)
        cancel = xp.minimum(gone, come)  # one per value
        left = _beyond(xp, of_born, come, cancel), _beyond(xp, of_killed, gone, cancel)
        rows, killed = (yield Asked([Flagged(left[0], [rows]), Flagged(left[1], [killed])])).rows
    return _net(batch, table.kernels.xp.sort(rows), killed, unknown)


def _beyond(xp: Any, group: Array, sizes: Array, skipped: Array) -> Array:
    """Flags grouped rows (of so many a group) without the first so many of each group."""
    begins = xp.cumsum(sizes) - sizes + skipped
    flags: Array = xp.arange(group.size, dtype=np.int64) >= begins[group]
    return flags


def _by_unique_key(batch: _InputChanges) -> Steps[tuple[Positions, Lifetimes]]:
    table, groups, sequence, event_kinds = batch.table, batch.groups, batch.sequence, batch.event_kinds
    assert sequence is not None
    assert event_kinds is not None
    xp, order, starts = table.kernels.xp, groups.order, groups.starts
    insert = batch.inserts[order]
    stored = _stored(batch, groups.leader)
    present = stored >= 0
    before = _present_before(batch, insert, present)
    when = 2 * sequence[order]
    # the row that a change brings is taken by the key's next change, whatever that is
    deaths = xp.full(order.size, NEVER, np.int64)
    deaths[order[:-1]] = xp.where(groups.group[1:] != groups.group[:-1], NEVER, when[1:])
    dies = (deaths < NEVER) & batch.inserts
    wanted = [Flagged(present, [0]), Flagged(insert & before, [0]), Flagged(batch.inserts, [0])]
    seen = yield Asked(wanted, [(insert | before).sum(), dies.sum()])
    (gone, updates, rows), (known, dying) = seen.rows, seen.numbers
    event_kinds[when[updates] + 1] = UPDATE_AFTER
    killed = stored[gone], when[starts[gone]]
    return rows, _lifetimes(batch, rows, deaths[rows] if dying else None, killed, order.size - known)


def _by_unique_key_net(batch: _InputChanges) -> Steps[tuple[Positions, Lifetimes]]:
    """Applies a net change of an input with a unique key: the last change of each key and the row before it count."""
    found = _side_by_side(batch)
    seen = None if found is None else (yield _asked(batch, found)).rows
    if seen is None or seen.pop().size:  # unlike keys whose hashes look alike
        seen = (yield _asked(batch, _grouped(batch))).rows
    rows, killed, unknown, *more = seen
    gone = (more.pop(), killed) if batch.table.one_a_key else None
    rows, lifetimes = _net(batch, rows, killed, unknown.size)
    lifetimes.gone = gone
    if more:
        (lifetimes.refreshed,) = more
    return rows, lifetimes


class _NetChanges(NamedTuple):
    """The changes of each key, of whom the last counts; arrays by change, or by key where only one is looked at.

    Attributes:
        rows: their rows; all, in another order, where it is said which are unlike.
        comes: flags of last changes that insert.
        stored: the slot of the key's row, -1 for none.
        leaves: flags of the last changes of keys that have a row.
        both: flags of those that insert and have one.
        known: flags of all changes that are no unknown retractions.
        unlike: flags of those that have a hash which looks like that of the key before it, which is another one; None
            where there are none.
    """

    rows: Positions
    comes: Array
    stored: Slots
    leaves: Array
    both: Array
    known: Array
    unlike: Array | None


def _side_by_side(batch: _InputChanges) -> _NetChanges | None:
    """All changes by key, where the backend can put them so; of each key's row each of them is told."""
    table, kernels = batch.table, batch.table.kernels
    columns = Columns(batch.frame, table.identity)
    beside = kernels.neighbours(table.identity_types, columns, batch.hashes, batch.inserts)
    if beside is None:
        return None
    stored = _stored(batch, beside.order)
    flags = kernels.fused(_net_flags)(beside.flags, beside.before, beside.last, stored)
    comes, leaves, both, known, unlike = flags
    return _NetChanges(beside.order, comes, stored, leaves, both, known, unlike)


def _net_flags(insert: Array, before: Array, last: Array, stored: Slots) -> tuple[Array, Array, Array, Array, Array]:
    """Flags last changes that insert, those of keys that have a row, and those that do both; the known, the unlike."""
    there = stored >= 0
    known = insert | (before > 0) | ((before < 0) & there)
    return last & insert, last & there, last & insert & there, known, before < -1


def _grouped(batch: _InputChanges) -> _NetChanges:
    """The last change of each key, by groups of which the host knows the number."""
    last = batch.groups.last
    insert, stored = batch.inserts[batch.groups.order], _stored(batch, last)
    comes, leaves = batch.inserts[last], stored >= 0
    known = insert | _present_before(batch, insert, leaves)
    return _NetChanges(last, comes, stored, leaves, leaves & comes, known, None)


def _asked(batch: _InputChanges, found: _NetChanges) -> Asked:
    """The rows that come; the slots whose rows go; unknown retractions; what is written again as it is, with a TTL.

    And, where keys are looked up by it, the changes that those that go have their hash from; unlike ones in the end.
    """
    table, kernels, (rows, comes, stored, leaves, both, known, unlike) = batch.table, batch.table.kernels, found
    parts, again = [], None
    if not table.arrival_counts:
        # the same row again, value for value, is no change
        names, types = table.source.schema.names, [f.type for f in table.source.schema]
        now, before = Columns(batch.frame, names), Columns(table.store, names)
        again = kernels.equal_at(types, (now, rows), (before, stored), both)
        if table.written is not None:
            parts.append(Flagged(again, [stored]))
    if table.one_a_key:
        parts.append(Flagged(leaves, [rows], again))
    # by row: so they come in order, without a sort
    if unlike is not None:
        parts.append(Flagged(unlike, [0]))
        coming = Flagged(comes, [0], again, rows)
    else:
        new = kernels.xp.zeros(batch.inserts.size, bool)
        new[rows] = comes if again is None else comes > again
        coming = Flagged(new, [0])
    return Asked([coming, Flagged(leaves, [stored], again), Flagged(None, [0], known), *parts])


def _stored(batch: _InputChanges, rows: Positions) -> Slots:
    """The slot of each key's row, -1 for none; ``rows``: one row of each group."""
    table, kernels = batch.table, batch.table.kernels
    index = table.identity_index
    assert index is not None
    if all(run.home is kernels for run in index.runs):
        columns, among = _compared(table, batch.frame, rows)
        found = kernels.sole(index.runs, table.identity_types, columns, batch.hashes, among)
        if found is not None:
            return found
    return kernels.sole_matches(*_candidates(table, batch.frame, rows, batch.hashes), size=rows.size)


def _compared(table: KeyedTable, frame: Frame, rows: Positions) -> tuple[tuple[Columns, Columns], Among | None]:
    """The columns by which rows equal committed ones, and those of these that are there."""
    columns = Columns(frame, table.identity, rows), Columns(table.store, table.identity)
    return columns, None if table.all_alive else Among(table.status.values, LIVE, LIVE)


def _present_before(batch: _InputChanges, insert: Array, present: Array) -> Array:
    """Flags changes whose key has a row when they come; ``present``: of each key, before the first."""
    before = batch.table.kernels.xp.concatenate([insert[:1], insert[:-1]])
    before[batch.groups.starts] = present
    return before


def _lifetimes(
    batch: _InputChanges,
    rows: Positions,
    deaths: LogicalTimes | None,
    killed: tuple[Slots, LogicalTimes],
    unknown: Array | int,
) -> Lifetimes:
    """All insertions with their rows' deaths, None if none dies; and killed slots, put in ascending order."""
    assert batch.sequence is not None
    slots, logical_times = killed
    by_slot = batch.table.kernels.argsort(slots)
    times = 2 * batch.sequence[rows] + 1, logical_times[by_slot]
    return Lifetimes(len(batch.table), rows.size, deaths, slots[by_slot], unknown, logical_times=times)


def _net(batch: _InputChanges, rows: Positions, killed: Slots, unknown: Array | int) -> tuple[Positions, Lifetimes]:
    """Rows that come, ascending, and slots that go, which are put in this order."""
    return rows, Lifetimes(len(batch.table), rows.size, None, batch.table.kernels.xp.sort(killed), unknown)


class TouchedGroups(NamedTuple):
    """The groups of which a micro-batch brings or takes rows, in the order of their first changes.

    Attributes:
        leaders: of each a row, with the columns of the group.
        hashes: of each.
        new: slots of the rows that it brings.
        of_new: the number of the group of each of these.
    """

    leaders: Frame
    hashes: Hashes
    new: Slots
    of_new: Array


def touched_groups(table: KeyedTable, side: Lifetimes, by: tuple[str, ...]) -> TouchedGroups | None:
    """Finds the groups of the rows that a micro-batch brings or takes; None where it does neither.

    Args:
        table: the input's state, whose key is the group.
        side: the lifetimes of its rows.
        by: the columns of a group; none for one group.
    """
    kernels, xp = table.kernels, table.kernels.xp
    new = as_slots(kernels, side.first_new, len(table) - side.first_new)
    changed = xp.concatenate([side.killed, new])
    if not changed.size:
        return None
    names = by or tuple(table.source.schema.names[:1])  # without columns there are no rows
    values = table.store.take(changed, names, present=True)
    hashes = kernels.hash_rows(values, by, table.key_types)
    grouped = Groups(kernels, values, by, table.key_types, hashes)
    # numbered by their first change, as the order of the output must not follow from hashes
    by_change = kernels.argsort(grouped.leader)
    leader, number = grouped.leader[by_change], xp.empty(by_change.size, np.int64)
    number[by_change] = xp.arange(by_change.size, dtype=np.int64)
    group = xp.empty(changed.size, np.int64)
    group[grouped.order] = number[grouped.group]
    leaders = kernels.take(values, leader, names, present=True)
    return TouchedGroups(leaders, hashes[leader], new, group[side.killed.size :])
