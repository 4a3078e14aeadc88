"""Joins of two inputs by key: inner, left, right and full, semi and anti, ``NOT IN`` included, and lookups.

**Inner and outer**, after Flink's ``StreamingJoinOperator``. Law: the changelog is the pairs that come and go
(`core.emission`), and for an outer side the unmatched rows that come and go (`core.visibility`).

Row kinds (``per_event``), as Flink 2.3.0 has them: an inner join forwards the kind of the change that
caused the row; with an outer side, insertions are ``+I``; a retraction is ``-D`` if the retracted
row's own side is outer, else it keeps its kind (so a left join can emit ``-U`` and then ``+I``,
FLINK-17337). Unmatched rows are ``+I`` and ``-D``. ``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes.

**Semi and anti**, after Flink's ``StreamingSemiAntiJoinOperator``. Law: a left row is in a semi join's result while it
lives and its association count is not zero, in an anti join's while it lives and the count is zero (`core.visibility`).

Row kinds (``per_event``): a change of the left row itself keeps its kind. A change of the right gives
its own kind to a semi join's rows, and ``-D`` and ``+I`` to an anti join's.

``NOT IN`` over nullable columns (null-aware anti): a null on the right makes the comparison unknown for
every left row, so none is in the result while there is one; a left row whose own key is null is in
the result only while the right is empty.

**Lookup**, after Flink's ``TemporalProcessTimeJoinOperator``. Law: a left row comes out once, in its micro-batch, with
each row of its key that the table has when the micro-batch's changes of the table are done; or, of a left join, with
nulls if there is none. Nothing changes what came out. All rows are ``+I``, in the order of the left rows, which are
gone once the micro-batch is committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.conditions import backquoted, of_tree, parse
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.join import Join, LookupJoin
from gpu_ops.descriptions.keys import Key
from gpu_ops.kernels import Frame, Kernels, as_slots
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.emission import (
    JOINED,
    UNMATCHED_COMES,
    UNMATCHED_GOES,
    NetPairs,
    OutputRows,
    Pairs,
    TimedPairs,
    Wanted,
    in_order,
    net_rows,
    probe,
    with_nulls,
)
from gpu_ops.operators.core.visibility import Barrier, VisibilityChanges, When
from gpu_ops.operators.keyed import KeyedOperator, TwoWayJoin, side_table
from gpu_ops.state.keyed_table import KeyedTable

_Visible = VisibilityChanges | tuple[Slots, Slots]
"""Each change of visibility; or rows that stop being visible, and those that become it."""


class RegularJoin(TwoWayJoin):
    """See `gpu_ops.operators.keyed.TwoWayJoin`."""

    def __init__(self, join: Join, kernels: Kernels) -> None:
        super().__init__(join, kernels, join.outer)
        self.null_sides = join.outer[1], join.outer[0]

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> Pairs:
        """The pairs that the micro-batch makes and unmakes."""
        found = self.pairs(sides, net=net, needed=True)
        assert found is not None
        return found

    def rows(self, found: Pairs, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Pairs and unmatched rows; association counts are moved here."""
        if isinstance(found, NetPairs):
            return self._net_rows(found, sides)
        assert isinstance(found, TimedPairs)
        assert event_kinds is not None
        xp, outer, (left, right) = self.kernels.xp, self.join.outer, found.slots
        come_at, go_at = found.begin[found.comes], found.end[found.goes]
        if any(outer):
            come_kinds = xp.full(come_at.size, INSERT, np.int8)
            left_dies = found.deaths[0][found.goes] == go_at
            own_outer = xp.where(left_dies, outer[0], outer[1])
            go_kinds = xp.where(own_outer, np.int8(DELETE), event_kinds[go_at])
        else:
            come_kinds, go_kinds = event_kinds[come_at], event_kinds[go_at]
        parts = [
            (OutputRows(go_kinds, (left[found.goes], right[found.goes]), go_at), JOINED),
            (OutputRows(come_kinds, (left[found.comes], right[found.comes]), come_at), JOINED),
        ]
        for side in (0, 1):
            if not outer[side]:
                continue
            unmatched = self.visible(side, sides, found, When(alone=True), net=False)
            for rank, kind, mask in (
                (UNMATCHED_COMES, INSERT, unmatched.appears),
                (UNMATCHED_GOES, DELETE, ~unmatched.appears),
            ):
                at = xp.flatnonzero(mask)
                kinds = xp.full(at.size, kind, np.int8)
                parts.append(
                    (OutputRows(kinds, with_nulls(xp, side, unmatched.slots[at]), unmatched.instants[at]), rank)
                )
        return in_order(self.kernels, parts)

    def _net_rows(self, found: NetPairs, sides: Sequence[Lifetimes]) -> OutputRows:
        """Lists the rows that go, unmatched rows first, then those that come, unmatched rows last."""
        xp, (left, right) = self.kernels.xp, found.slots
        leaving, coming = [], [(left[found.comes], right[found.comes])]
        for side in (0, 1):
            if self.join.outer[side]:
                hides, shows = self.visible(side, sides, found, When(alone=True), net=True)
                leaving.append(with_nulls(xp, side, hides))
                coming.append(with_nulls(xp, side, shows))
        return net_rows(xp, [*leaving, (left[found.goes], right[found.goes])], coming)

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """All rows or none.

        With equal rows in a multiset, one instance's pair may go while another's comes. And an unmatched row equals
        a pair whose other row is null in every column shown, which a key compared by ``=`` rules out.
        """
        return self.kernels.xp.arange(rows.size, dtype=np.int64) if self._any_cancels(rows, sides) else self._nothing

    def _any_cancels(self, rows: OutputRows, sides: Sequence[Lifetimes]) -> bool:
        join, tables, xp = self.join, self.tables, self.kernels.xp
        if any(t.source.unique_key is None for t in tables) and any(s.any_death for s in sides):
            return True
        for other, outer in ((1, join.outer[0]), (0, join.outer[1])):
            shown = [c.column for c in join.output if c.side == other]
            if not outer or any(k.column(other) in shown and not k.null_safe for k in join.keys):
                continue
            if not all(tables[other].store.may_be_null(c) for c in shown):
                continue
            joined = xp.flatnonzero((rows.slots[0] >= 0) & (rows.slots[1] >= 0))
            values = tables[other].store.take(rows.slots[other][joined], shown, present=True)
            if all(self.kernels.valid(values, [c]) is not None for c in shown):
                return True
        return False


def make(described: Join, kernels: Kernels) -> KeyedOperator:
    """See `gpu_ops.operators.operator.Make`."""
    if isinstance(described, LookupJoin):
        return LookupOperator(described, kernels)
    if described.how not in ("semi", "anti"):
        return RegularJoin(described, kernels)
    # NOT IN with more than one column or a residual condition has no key to look rows up by. With a TTL every match
    # is counted, those by null too: what they hid stays hidden when they expire, and is never taken back.
    expires = any(source.ttl_ms is not None for source in described.inputs)
    rewritten = described.null_aware and (len(described.keys) > 1 or described.where is not None or expires)
    return SemiAntiJoin(null_aware_as_condition(described) if rewritten else described, kernels, (True, False))


class SemiAntiJoin(TwoWayJoin):
    """See `gpu_ops.operators.keyed.TwoWayJoin`."""

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> _Visible:
        """Left rows that become visible or stop being it; association counts are moved here."""
        pairs = self.pairs(sides, net=net, needed=False)
        barriers = _barriers(self.tables[1], sides[1]) if self.join.null_aware else None
        found: _Visible = self.visible(0, sides, pairs, When(self.join.how == "anti", barriers), net=net)
        return found

    def rows(self, found: _Visible, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Makes output rows of the changes of visibility that `find` gives."""
        xp = self.kernels.xp
        if isinstance(found, tuple):
            hides, shows = found
            return net_rows(xp, [with_nulls(xp, 0, hides)], [with_nulls(xp, 0, shows)])
        assert event_kinds is not None
        kinds = event_kinds[found.instants]
        if self.join.how == "anti":
            kinds = xp.where(found.own, kinds, xp.where(found.appears, np.int8(INSERT), np.int8(DELETE)))
        return in_order(self.kernels, [(OutputRows(kinds, with_nulls(xp, 0, found.slots), found.instants), JOINED)])


def _barriers(right: KeyedTable, change: Lifetimes) -> tuple[Barrier, Barrier]:
    """Counts right rows without a key, and all right rows, over the micro-batch."""
    kernels, xp = right.kernels, right.kernels.xp
    rows, when, step = change.events(kernels)
    order = kernels.argsort(when)
    rows, when, step = rows[order], when[order], step[order]
    valid = kernels.valid(right.store.take(rows, right.strict, present=True), right.strict)
    keyless = xp.zeros(rows.size, bool) if valid is None else ~valid
    at = xp.flatnonzero(keyless)
    return (_steps(xp, right.null_keys, when[at], step[at]), _steps(xp, right.live_before, when, step))


def _steps(xp: Any, before: int, instants: Instants, steps: Array) -> Barrier:
    """The step function, one step per instant."""
    after = before + xp.cumsum(steps, dtype=np.int64)
    last = xp.ones(instants.size, bool)
    last[:-1] = instants[1:] != instants[:-1]
    return Barrier(before, instants[last], after[last])


def null_aware_as_condition(join: Join) -> Join:
    """``NOT IN`` written out: no key, but a condition that is not false where it is unknown.

    It compares every pair, which a lookup by key avoids; needed only for several columns, a residual condition
    or a TTL (Flink plans it so always: ``OR(IS NULL(k), IS NULL(k0), =(k, k0))``). What is compared null-safely
    is never unknown.
    """
    left, right = join.left.name, join.right.name

    def not_false(key: Key) -> str:
        a, b = (".".join(map(backquoted, names)) for names in ((left, key.left), (right, key.right)))
        return f"({a} <=> {b})" if key.null_safe else f"({a} IS NULL OR {b} IS NULL OR {a} = {b})"

    schemas, text = {source.name: source.schema for source in join.inputs}, " AND ".join(map(not_false, join.keys))
    found, where = parse(text, schemas, ansi=join.ansi), join.condition
    if where is not None:  # its tree: not all of what Spark has read can be read from its text again
        roots, matters = [found.root, where.root], found.mode_matters or where.mode_matters
        found = of_tree(f"{text} AND ({where})", roots, schemas, ansi=join.ansi, mode_matters=matters)
    return dataclasses.replace(join, keys=(), null_aware=False, where=found)


class LookupOperator(KeyedOperator):
    """Left rows with the rows that a table has now.

    Args:
        join: the description.
        kernels: the backend.
    """

    join: LookupJoin
    tables: tuple[KeyedTable, KeyedTable]

    def __init__(self, join: LookupJoin, kernels: Kernels) -> None:
        super().__init__(join, kernels)
        self.null_sides = (False, join.how == "left")
        self.tables = side_table(join, kernels, 0, findable=False), side_table(join, kernels, 1)

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> tuple[Slots, Slots]:
        """Left and right slots of the pairs."""
        wanted = Wanted(self.join.condition, (self.join.left.name, self.join.right.name), self.check_output)
        return probe(self.tables, (sides[0], sides[1]), 0, wanted, dying=False)

    def rows(self, found: tuple[Slots, Slots], sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The pairs, and left rows without one, in the order of the left rows."""
        (left, right), xp, (side, _) = found, self.kernels.xp, sides
        new = as_slots(self.kernels, side.first_new, side.new)
        self.tables[0].end_stillborn(new)
        if self.join.how == "left":
            alone = xp.ones(new.size, bool)
            alone[left - side.first_new] = False
            unmatched = new[xp.flatnonzero(alone)]
            left, right = (
                xp.concatenate([left, unmatched]),
                xp.concatenate([right, xp.full(unmatched.size, -1, np.int64)]),
            )
        # the number of a right row, one higher, so that there is room for none
        order = self.kernels.argsort(layouts.pairs(left, right + 1))
        left, right = left[order], right[order]
        return OutputRows(np.full(left.size, INSERT, np.int8), (left, right), xp.zeros(left.size, np.int64))
