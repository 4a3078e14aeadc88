"""The inner, left, right and full join of two inputs by key, after Flink's ``StreamingJoinOperator``.

Law: the changelog is the pairs that come and go (`core.emission`), and for an outer side the unmatched rows that come
and go (`core.visibility`).

Row kinds (``per_event``), as Flink 2.3.0 has them: an inner join forwards the kind of the change that
caused the row; with an outer side, insertions are ``+I``; a retraction is ``-D`` if the retracted
row's own side is outer, else it keeps its kind (so a left join can emit ``-U`` and then ``+I``,
FLINK-17337). Unmatched rows are ``+I`` and ``-D``. ``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_ops.arrays import Array, Positions
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.join import Join
from gpu_ops.kernels import Flagged, Frame, Kernels
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.emission import (
    JOINED,
    UNMATCHED_COMES,
    UNMATCHED_GOES,
    NetPairs,
    OutputRows,
    Pairs,
    TimedPairs,
    in_order,
    net_rows,
    row_parts,
    with_nulls,
)
from gpu_ops.operators.core.visibility import When
from gpu_ops.operators.keyed import KeyedOperator, TwoWayJoin
from gpu_ops.operators.semi_anti import make_semi_anti


class RegularJoin(TwoWayJoin):
    """See `gpu_ops.operators.keyed.TwoWayJoin`."""

    def __init__(self, description: Join, kernels: Kernels) -> None:
        super().__init__(description, kernels, description.outer)
        self.null_sides = description.outer[1], description.outer[0]

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> Pairs:
        """The pairs that the micro-batch makes and unmakes."""
        pairs = self.pairs(sides, net=net, needed=True)
        assert pairs is not None
        return pairs

    def rows(self, matches: Pairs, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Pairs and unmatched rows; association counts are moved here."""
        if isinstance(matches, NetPairs):
            return self._net_rows(matches, sides)
        assert isinstance(matches, TimedPairs)
        assert event_kinds is not None
        xp, outer, (left, right) = self.kernels.xp, self.description.outer, matches.slots
        come_at, go_at = matches.begin[matches.comes], matches.end[matches.goes]
        if any(outer):
            come_kinds = xp.full(come_at.size, INSERT, np.int8)
            left_dies = matches.deaths[0][matches.goes] == go_at
            own_outer = xp.where(left_dies, outer[0], outer[1])
            go_kinds = xp.where(own_outer, np.int8(DELETE), event_kinds[go_at])
        else:
            come_kinds, go_kinds = event_kinds[come_at], event_kinds[go_at]
        parts = [
            (OutputRows(go_kinds, (left[matches.goes], right[matches.goes]), go_at), JOINED),
            (OutputRows(come_kinds, (left[matches.comes], right[matches.comes]), come_at), JOINED),
        ]
        for side in (0, 1):
            if not outer[side]:
                continue
            unmatched = self.visible(side, sides, matches, When(alone=True), net=False)
            both = [Flagged(unmatched.appears, [0]), Flagged(None, [0], unmatched.appears)]
            (comes,), (goes,) = self.kernels.flagged(both)[0]
            for rank, kind, at in ((UNMATCHED_COMES, INSERT, comes), (UNMATCHED_GOES, DELETE, goes)):
                kinds = xp.full(at.size, kind, np.int8)
                parts.append(
                    (OutputRows(kinds, with_nulls(xp, side, unmatched.slots[at]), unmatched.logical_times[at]), rank)
                )
        return in_order(self.kernels, parts)

    def _net_rows(self, matches: NetPairs, sides: Sequence[Lifetimes]) -> OutputRows:
        """Lists the rows that go, unmatched rows first, then those that come, unmatched rows last."""
        leaving, coming = [], [Flagged(matches.comes, matches.slots)]
        for side in (0, 1):
            if self.description.outer[side]:
                hides, shows = self.visible(side, sides, matches, When(alone=True), net=True)
                leaving += row_parts(side, hides)
                coming += row_parts(side, shows)
        if matches.goes is not None:
            leaving.append(Flagged(matches.goes, matches.slots))
        return net_rows(self.kernels, leaving, coming, present=True)

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """All rows or none.

        With equal rows in a multiset, one instance's pair may go while another's comes. And an unmatched row equals
        a pair whose other row is null in every column shown, which a key compared by ``=`` rules out.
        """
        return self.kernels.xp.arange(rows.size, dtype=np.int64) if self._any_cancels(rows, sides) else self._nothing

    def _any_cancels(self, rows: OutputRows, sides: Sequence[Lifetimes]) -> bool:
        description, tables, xp = self.description, self.tables, self.kernels.xp
        if any(t.source.unique_key is None for t in tables) and any(s.any_death for s in sides):
            return True
        for other, outer in ((1, description.outer[0]), (0, description.outer[1])):
            shown = [c.column for c in description.output if c.side == other]
            if not outer or any(k.column(other) in shown and not k.null_safe for k in description.keys):
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
    if described.how in ("semi", "anti"):
        return make_semi_anti(described, kernels)
    return RegularJoin(described, kernels)
