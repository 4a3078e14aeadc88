"""From changes to lifetimes: which row each change of a micro-batch brings or takes.

Laws:
- multiset input: the j-th effective retraction of a value takes the j-th instance of it, the oldest
  first; a retraction is *unknown* when as many instances as there ever were are gone, which is when
  the running count falls to a new minimum below zero.
- unique key: a key holds at most one row; an insertion of a present key replaces it (FLINK-40681 is
  what Flink 2.3.0 does instead), a retraction of an absent one is unknown. The key decides, not the
  other columns (Flink: ``InputSideHasUniqueKey.retractRecord``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Hashes, Instants, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Frame
from gpu_ops.operators.core.groups import Groups, within
from gpu_ops.operators.core.lifetimes import NEVER, Lifetimes, NetChange
from gpu_ops.operators.core.match import Columns, equal, match
from gpu_ops.state.columns import LIVE
from gpu_ops.state.keyed_table import KeyedTable


def apply_changes(
    table: KeyedTable, frame: Frame, change: Ingested, event_kinds: Array | None, *, net: bool
) -> Lifetimes:
    """Resolve one input's changes and prepare its table for them.

    Args:
        table: the input's state.
        frame: n changed rows, by ascending sequence.
        change: their row kinds, and their positions in the micro-batch's total order.
        event_kinds: one row kind per instant, filled in for this input's instants; None if ``net``.
        net: fold the micro-batch to its net change: what is born and dies within it is left out,
            every death is at instant 0, every birth at instant 1.
    """
    kernels, xp = table.kernels, table.kernels.xp
    size = int(change.kinds.size)
    nothing = xp.empty(0, np.int64)
    inserts = sequence = None
    if not net or table.identity_index is not None:
        inserts = (change.kinds == INSERT) | (change.kinds == UPDATE_AFTER)
    # With a TTL even an insertion is looked up: it refreshes the equal rows there are.
    plain = inserts is None or table.identity_index is None or not size
    if table.source.unique_key is None and table.written is None and inserts is not None:
        plain = plain or bool(inserts.all())
    if inserts is not None and not (net and plain):
        inserts = kernels.asarray(inserts)
    if not net:
        assert event_kinds is not None
        kinds, sequence = kernels.asarray(change.kinds), kernels.asarray(change.sequence)
        takes = 2 * sequence
        event_kinds[takes] = xp.where(inserts, UPDATE_BEFORE, kinds)
        event_kinds[takes + 1] = xp.where(inserts, kinds, DELETE)
    identity = table.hash_identity(frame) if table.identity_index is not None else None
    if plain:
        births = xp.empty(size, np.int64) if sequence is None else 2 * sequence + 1
        found, rows = Lifetimes(len(table), births, None, nothing, nothing, 0), None
    else:
        assert identity is not None
        groups = Groups(kernels, frame, table.identity, table.identity_types, identity)
        batch = _InputChanges(table, frame, groups, identity, inserts, sequence, event_kinds)
        if table.source.unique_key is None:
            rows, found = _by_value(batch)
        else:
            rows, found = _by_unique_key(batch) if sequence is not None else _by_unique_key_net(batch)
    if net:
        found.net = NetChange(table.status)
        found.happens(xp, deaths=0, births=1)
    if rows is not None:
        frame = kernels.take(frame, rows, table.source.schema.names, present=True)
        identity = identity[rows] if identity is not None else None
    table.prepare(frame, identity, found.killed, found.refreshed)
    if found.deaths is not None:
        table.end_stillborn(found.first_new + xp.flatnonzero(found.deaths < NEVER))
    return found


@dataclasses.dataclass(frozen=True)
class _InputChanges:
    """The changes of one input, on their way to lifetimes; arrays by row of the frame."""

    table: KeyedTable
    frame: Frame
    groups: Groups
    hashes: Hashes
    inserts: Array
    sequence: Array | None
    """None for a net change."""
    event_kinds: Array | None


def _instances(batch: _InputChanges, wanted: Array | None) -> tuple[Array, Slots]:
    """Committed live rows equal to the leaders of the wanted groups (None: all): group numbers, slots, sorted."""
    table, frame, kernels, xp = batch.table, batch.frame, batch.table.kernels, batch.table.kernels.xp
    assert table.identity_index is not None
    numbers = None if wanted is None else xp.flatnonzero(wanted)
    leaders = batch.groups.leader if numbers is None else batch.groups.leader[numbers]
    names = table.identity
    leading = Columns(lambda rows, _: kernels.take(frame, leaders[rows], names, present=True), names)
    needle, slots = match(
        kernels,
        table.identity_index.probe(batch.hashes[leaders], staged=False),
        table.identity_types,
        (leading, Columns.of_store(table.store, names)),
        alive=lambda _, slots: None if table.all_alive else table.status.values[slots] == LIVE,
    )
    return needle if numbers is None else numbers[needle], slots


def _by_value(batch: _InputChanges) -> tuple[Positions, Lifetimes]:
    table, groups, sequence = batch.table, batch.groups, batch.sequence
    xp, order, group = table.kernels.xp, groups.order, groups.group
    total, insert = int(groups.leader.size), batch.inserts[order]
    retracted = None
    if table.written is None:
        retracted = xp.zeros(total, bool)
        retracted[group[xp.flatnonzero(~insert)]] = True
    owner, slots = _instances(batch, retracted)
    present = xp.bincount(owner, minlength=total)

    # running number of instances, and its minimum before each change, group by group
    step = xp.where(insert, np.int64(1), np.int64(-1))
    running = present[group] + within(xp, groups, step) + step
    wide = int(order.size + owner.size) + 2
    lowest = table.kernels.cumulative_min(xp.minimum(running, 0) - group * wide) + group * wide
    before = xp.concatenate([xp.zeros(1, np.int64), lowest[:-1]])
    before[groups.starts] = 0
    unknown = ~insert & (running < before)

    retracts = ~insert & ~unknown
    retracting = xp.flatnonzero(retracts)
    instance = within(xp, groups, retracts)[retracting]
    target = group[retracting]
    is_old = instance < present[target]
    old, young = xp.flatnonzero(is_old), xp.flatnonzero(~is_old)
    first_slot = xp.cumsum(present) - present
    killed_group = target[old]
    killed = slots[first_slot[killed_group] + instance[old]]

    born = xp.flatnonzero(insert)
    births_in_group = xp.bincount(group[born], minlength=total)
    first_birth = xp.cumsum(births_in_group) - births_in_group
    of_young = target[young]
    dying = first_birth[of_young] + instance[young] - present[of_young]
    rows = order[born]
    if sequence is None:
        stays = xp.ones(born.size, bool)
        stays[dying] = False
        born = born[xp.flatnonzero(stays)]
        rows, of = order[born], group[born]
        # an instance that goes and one that comes, equal by value: neither
        gone = xp.bincount(killed_group, minlength=total)
        come = xp.bincount(of, minlength=total)
        cancel = xp.minimum(gone, come)
        rows = rows[_beyond(xp, of, come, cancel)]
        rows, found = _net(batch, rows, killed[_beyond(xp, killed_group, gone, cancel)], unknown.sum())
    else:
        when = 2 * sequence[order[retracting]]
        deaths = xp.full(order.size, NEVER, np.int64)
        deaths[rows[dying]] = when[young]
        rows, found = _lifetimes(batch, deaths, (killed, when[old]), unknown.sum())
    if table.written is not None:
        # Flink keeps equal rows in one entry: writing one writes them all (a retraction of none does not)
        written = xp.zeros(total, bool)
        written[group[insert | retracts]] = True
        found.refreshed = slots[written[owner]]
    return rows, found


def _beyond(xp: Any, group: Array, sizes: Array, skipped: Array) -> Positions:
    """Positions in grouped rows (of so many a group) without the first so many of each group."""
    begins = xp.cumsum(sizes) - sizes + skipped
    return xp.flatnonzero(xp.arange(group.size, dtype=np.int64) >= begins[group])


def _by_unique_key(batch: _InputChanges) -> tuple[Positions, Lifetimes]:
    table, groups, sequence, event_kinds = batch.table, batch.groups, batch.sequence, batch.event_kinds
    assert sequence is not None
    assert event_kinds is not None
    xp, order, starts = table.kernels.xp, groups.order, groups.starts
    insert = batch.inserts[order]
    stored = _stored(batch)
    there = stored >= 0
    before = _present_before(batch, insert, there)
    when = 2 * sequence[order]
    gone = xp.flatnonzero(there)
    killed, killed_at = stored[gone], when[starts[gone]]
    # the row that a change brings is taken by the key's next change, whatever that is
    deaths = xp.full(order.size, NEVER, np.int64)
    deaths[order[:-1]] = xp.where(groups.first[1:], NEVER, when[1:])
    event_kinds[when[xp.flatnonzero(insert & before)] + 1] = UPDATE_AFTER
    return _lifetimes(batch, deaths, (killed, killed_at), order.size - (insert | before).sum())


def _by_unique_key_net(batch: _InputChanges) -> tuple[Positions, Lifetimes]:
    """Of each key only the last change matters, and the row that was there before."""
    table, groups = batch.table, batch.groups
    kernels, xp, order, starts = table.kernels, table.kernels.xp, groups.order, groups.starts
    insert = batch.inserts[order]
    stored = _stored(batch)
    leaves = stored >= 0
    unknown = order.size - (insert | _present_before(batch, insert, leaves)).sum()
    last = xp.full(starts.size, order.size - 1, np.int64)
    last[:-1] = starts[1:] - 1
    last = order[last]
    comes = batch.inserts[last]
    refreshed = None
    both = xp.flatnonzero(leaves & comes)
    if both.size:
        # the same row again, value for value, is no change
        names, types = table.source.schema.names, [f.type for f in table.source.schema]
        now, before = Columns.of_frame(kernels, batch.frame, names), Columns.of_store(table.store, names)
        differs = ~equal(kernels, types, (now, last[both]), (before, stored[both]))
        leaves[both] = differs
        comes[both] = differs
        if table.written is not None:
            refreshed = stored[both[xp.flatnonzero(~differs)]]
    rows, killed = last[xp.flatnonzero(comes)], stored[xp.flatnonzero(leaves)]
    rows, found = _net(batch, rows, killed, unknown)
    found.refreshed = refreshed
    return rows, found


def _stored(batch: _InputChanges) -> Slots:
    """The slot of each key's row, -1 for none."""
    stored = batch.table.kernels.xp.full(batch.groups.leader.size, -1, np.int64)
    owner, slots = _instances(batch, None)
    stored[owner] = slots
    return stored


def _present_before(batch: _InputChanges, insert: Array, there: Array) -> Array:
    """Whether its key has a row when a change comes; ``there``: of each key, before the first."""
    before = batch.table.kernels.xp.empty(insert.size, bool)
    before[1:] = insert[:-1]
    before[batch.groups.starts] = there
    return before


def _lifetimes(
    batch: _InputChanges, deaths: Instants, killed: tuple[Slots, Instants], unknown: Array
) -> tuple[Positions, Lifetimes]:
    """All insertions with their rows' deaths, by change; and killed slots, put in ascending order."""
    xp = batch.table.kernels.xp
    assert batch.sequence is not None
    rows = xp.flatnonzero(batch.inserts)
    late = deaths[rows]
    slots, instants = killed
    by_slot = batch.table.kernels.argsort(slots)
    births = 2 * batch.sequence[rows] + 1
    return rows, Lifetimes(
        len(batch.table),
        births,
        late if late.size and bool((late < NEVER).any()) else None,
        slots[by_slot],
        instants[by_slot],
        unknown,
    )


def _net(batch: _InputChanges, rows: Positions, killed: Slots, unknown: Array) -> tuple[Positions, Lifetimes]:
    """Rows that come and slots that go, put in ascending order."""
    xp = batch.table.kernels.xp
    rows, killed = xp.sort(rows), xp.sort(killed)
    births, deaths = xp.empty(rows.size, np.int64), xp.empty(killed.size, np.int64)  # see `Lifetimes.happens`
    return rows, Lifetimes(len(batch.table), births, None, killed, deaths, unknown)
