"""From changes to lifetimes: which row each change of a micro-batch brings or takes.

A row lives from its birth to its death. Time within a micro-batch is the *instant*: change number s
(its place in the micro-batch's total order, over both inputs) takes a row at instant 2s and brings
one at 2s + 1, so that an upsert (one change that does both) first takes, then brings. Rows from
before the micro-batch were born at `ALWAYS`; rows that stay die at `NEVER`.

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

from gpu_ops.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.kernels import Array, Frame
from gpu_ops.operators.groups import Groups, value_changes, within
from gpu_ops.state.columns import LIVE
from gpu_ops.state.table import StateTable

ALWAYS = -1
NEVER = 1 << 28
"""Later than any instant; a micro-batch holds fewer than 2^27 changes."""


@dataclasses.dataclass
class Lifetimes:
    """What a micro-batch does to one input, by row.

    The n new rows get the slots from ``first_new`` on.
    """

    first_new: int
    births: Array
    """Instants, one per new row, ascending."""
    deaths: Array | None
    """Instants, one per new row; None when none of them dies."""
    killed: Array
    """Slots of committed rows that die, ascending."""
    killed_at: Array
    """Instants, one per killed row."""
    unknown: int
    """Retractions of rows that were not there."""
    refreshed: Array | None = None
    """Slots of committed rows that the micro-batch writes without changing them, for their TTL."""

    @property
    def any_death(self) -> bool:
        """Whether any row dies."""
        return self.deaths is not None or bool(self.killed.size)

    def born(self, xp: Any, slots: Array) -> Array:
        """When the rows at these slots were born."""
        if self.births.size == 0:
            return xp.full(slots.size, ALWAYS, np.int64)
        if self.births[0] == self.births[-1]:  # a net change: all at once
            return xp.where(slots >= self.first_new, self.births[0], ALWAYS)
        new = slots - self.first_new
        return xp.where(new >= 0, self.births[xp.maximum(new, 0)], ALWAYS)

    def died(self, xp: Any, slots: Array) -> Array:
        """When the rows at these slots die."""
        times = xp.full(slots.size, NEVER, np.int64)
        if self.deaths is not None:
            new = slots - self.first_new
            times = xp.where(new >= 0, self.deaths[xp.maximum(new, 0)], times)
        if self.killed.size:
            place = xp.minimum(xp.searchsorted(self.killed, slots), self.killed.size - 1)
            times = xp.where(self.killed[place] == slots, self.killed_at[place], times)
        return times


def apply_changes(
    table: StateTable, frame: Frame, kinds: Array, sequence: Array, event_kinds: Array, *, net: bool
) -> Lifetimes:
    """Resolve one input's changes and prepare its table for them.

    Args:
        table: the input's state.
        frame: n changed rows, by ascending sequence.
        kinds: n row-kind codes.
        sequence: n places in the micro-batch's total order.
        event_kinds: one row kind per instant, filled in for this input's instants, unless ``net``.
        net: fold the micro-batch to its net change: what is born and dies within it is left out,
            every death is at instant 0, every birth at instant 1.
    """
    kernels, xp = table.kernels, table.kernels.xp
    inserts = (kinds == INSERT) | (kinds == UPDATE_AFTER)
    if not net:
        event_kinds[2 * sequence] = xp.where(inserts, UPDATE_BEFORE, kinds)
        event_kinds[2 * sequence + 1] = xp.where(inserts, kinds, DELETE)
    nothing = xp.empty(0, np.int64)
    # With a TTL even an insertion is looked up: it refreshes the equal rows there are.
    plain = table.source.unique_key is None and table.written is None and bool(inserts.all())
    if table.identity_index is None or plain or not inserts.size:
        identity = table.hash_identity(frame) if table.identity_index is not None else None
        found = Lifetimes(len(table), 2 * sequence + 1, None, nothing, nothing, 0)
        rows = None
    else:
        identity = table.hash_identity(frame)
        groups = Groups(kernels, frame, table.identity, table.identity_types, identity)
        batch = _Batch(table, frame, groups, identity, inserts, sequence, event_kinds, net)
        rows, found = _by_value(batch) if table.source.unique_key is None else _by_unique_key(batch)
    if net:
        found.births = xp.ones(found.births.size, np.int64)
        found.killed_at = xp.zeros(found.killed.size, np.int64)
    if rows is not None:
        frame = kernels.take(frame, rows, table.source.schema.names)
        identity = identity[rows] if identity is not None else None
    hashes, matchable = table.hash_keys(frame, identity)
    prepared = table.prepare(frame, hashes, matchable, identity, found.killed)
    prepared.refreshed = found.refreshed
    if found.deaths is not None:
        prepared.stillborn = found.first_new + xp.flatnonzero(found.deaths < NEVER)
    return found


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The changes of one input, on their way to lifetimes; arrays by row of the frame."""

    table: StateTable
    frame: Frame
    groups: Groups
    hashes: Array
    inserts: Array
    sequence: Array
    event_kinds: Array
    net: bool


def _instances(batch: _Batch, wanted: Array) -> tuple[Array, Array]:
    """Committed live rows equal to the leaders of the wanted groups: group numbers, slots, sorted."""
    table, frame, kernels, xp = batch.table, batch.frame, batch.table.kernels, batch.table.kernels.xp
    assert table.identity_index is not None
    numbers = xp.flatnonzero(wanted)
    leaders = batch.groups.leader[numbers]
    needle, slots = table.identity_index.probe(batch.hashes[leaders], staged=False)
    alive = xp.flatnonzero(table.status.values[slots] == LIVE)
    needle, slots = needle[alive], slots[alive]
    columns, types = table.identity, table.identity_types
    equal = xp.flatnonzero(
        kernels.equal_rows(
            kernels.take(frame, leaders[needle], columns),
            columns,
            table.store.take(slots, columns),
            columns,
            types,
        )
    )
    return numbers[needle[equal]], slots[equal]


def _by_value(batch: _Batch) -> tuple[Array, Lifetimes]:
    table, groups, sequence = batch.table, batch.groups, batch.sequence
    xp, order, group = table.kernels.xp, groups.order, groups.group
    total, insert = int(groups.leader.size), batch.inserts[order]
    retracted = xp.zeros(total, bool)
    retracted[group[~insert]] = True
    keeps_time = table.written is not None
    owner, slots = _instances(batch, xp.ones(total, bool) if keeps_time else retracted)
    present = xp.bincount(owner, minlength=total)

    # running number of instances, and its minimum before each change, group by group
    step = xp.where(insert, 1, -1).astype(np.int64)
    running = present[group] + within(xp, group, step) + step
    wide = order.size + int(present.max()) + 2
    lowest = table.kernels.cumulative_min(xp.minimum(running, 0) - group * wide) + group * wide
    before = xp.concatenate([xp.zeros(1, np.int64), lowest[:-1]])
    before[groups.first] = 0
    unknown = ~insert & (running < before)

    retracts = ~insert & ~unknown
    instance = within(xp, group, retracts.astype(np.int64))[retracts]
    target = group[retracts]
    when = 2 * sequence[order[retracts]]
    old = instance < present[target]
    first_slot = xp.cumsum(present) - present
    killed, killed_at, killed_group = slots[(first_slot[target] + instance)[old]], when[old], target[old]

    born = xp.flatnonzero(insert)
    births_in_group = xp.bincount(group[born], minlength=total)
    first_birth = xp.cumsum(births_in_group) - births_in_group
    dying = (first_birth[target] + instance - present[target])[~old]
    deaths = xp.full(born.size, NEVER, np.int64)
    deaths[dying] = when[~old]
    rows = order[born]
    if batch.net:
        stay = deaths == NEVER
        rows, of = rows[stay], group[born][stay]
        # an instance that goes and one that comes, equal by value: neither
        gone = xp.bincount(killed_group, minlength=total)
        come = xp.bincount(of, minlength=total)
        cancel = xp.minimum(gone, come)
        ones = xp.ones(of.size, np.int64)
        rows = rows[_within_any(xp, of, ones) >= cancel[of]]
        kept = _within_any(xp, killed_group, xp.ones(killed.size, np.int64)) >= cancel[killed_group]
        killed, killed_at = killed[kept], killed_at[kept]
        deaths = xp.empty(0, np.int64)
    resolved = _lifetimes(batch, rows, deaths, (killed, killed_at), unknown)
    if keeps_time:
        # Flink keeps equal rows in one entry: writing one writes them all (a retraction of none does not)
        written = xp.zeros(total, bool)
        written[group[insert | retracts]] = True
        resolved[1].refreshed = slots[written[owner]]
    return resolved


def _within_any(xp: Any, group: Array, ones: Array) -> Array:
    """Rank within its group, for grouped rows whose group numbers may have gaps."""
    if not group.size:
        return ones
    dense = xp.cumsum(value_changes(xp, group)) - 1
    return within(xp, dense, ones)


def _by_unique_key(batch: _Batch) -> tuple[Array, Lifetimes]:
    table, groups, sequence = batch.table, batch.groups, batch.sequence
    xp, order, group = table.kernels.xp, groups.order, groups.group
    total, insert, first = int(groups.leader.size), batch.inserts[order], groups.first
    owner, slots = _instances(batch, xp.ones(total, bool))
    stored = xp.full(total, -1, np.int64)
    stored[owner] = slots
    before = xp.empty(order.size, bool)
    before[1:] = insert[:-1]
    before[first] = stored[group[first]] >= 0
    unknown = ~insert & ~before
    when = 2 * sequence[order]

    from_state = before & first
    killed, killed_at = stored[group[from_state]], when[from_state]
    # the row that change i takes is the one that change i - 1 brought
    taken = xp.flatnonzero(before & ~first)
    deaths_by_change = xp.full(order.size, NEVER, np.int64)
    deaths_by_change[taken - 1] = when[taken]
    replaced = insert & before
    batch.event_kinds[when[replaced] + 1] = UPDATE_AFTER
    born = xp.flatnonzero(insert)
    deaths, rows = deaths_by_change[born], order[born]
    if batch.net:
        stay = deaths == NEVER
        rows, of = rows[stay], group[born][stay]
        deaths = xp.empty(0, np.int64)
        # the same row again, value for value, is no change
        dies = xp.full(total, -1, np.int64)
        dies[group[from_state]] = killed
        pairs = xp.flatnonzero(dies[of] >= 0)
        names = table.source.schema.names
        types = [f.type for f in table.source.schema]
        same = table.kernels.equal_rows(
            table.kernels.take(batch.frame, rows[pairs], names),
            names,
            table.store.take(dies[of[pairs]], names),
            names,
            types,
        )
        unchanged = pairs[same]
        refreshed = dies[of[unchanged]]
        dies[of[unchanged]] = -1
        keep = xp.ones(rows.size, bool)
        keep[unchanged] = False
        rows = rows[keep]
        killed = dies[dies >= 0]
        killed_at = xp.zeros(killed.size, np.int64)
    else:
        refreshed = None
    resolved = _lifetimes(batch, rows, deaths, (killed, killed_at), unknown)
    resolved[1].refreshed = refreshed
    return resolved


def _lifetimes(
    batch: _Batch, rows: Array, deaths: Array, killed: tuple[Array, Array], unknown: Array
) -> tuple[Array, Lifetimes]:
    """Rows back in their own order (they come group by group), killed slots ascending."""
    argsort = batch.table.kernels.argsort
    by_row = argsort(rows)
    rows = rows[by_row]
    slots, instants = killed
    by_slot = argsort(slots)
    late = deaths[by_row] if deaths.size and bool((deaths < NEVER).any()) else None
    births = 2 * batch.sequence[rows] + 1
    first = len(batch.table)
    return rows, Lifetimes(first, births, late, slots[by_slot], instants[by_slot], int(unknown.sum()))
