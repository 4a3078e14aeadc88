"""The ASOF join with retractions: each left row and the right row of its key that is nearest in time.

Law: a left row is in the result once while it lives: with its best right row among those that are alive, or, where
there is none and ``how`` is left, with nulls (`gpu_ops.descriptions.by_time` says what is best). So a
micro-batch can change the result for its own left rows, and for those whose best right row comes or goes.

``per_batch``: the match of each of these rows before and after. Which rows from before they are is found through the
right rows that come and go (`gpu_ops.operators.by_time.asof_lookup`).

``per_event``: the match of each of these rows at every event (`gpu_ops.operators.by_time.asof_over_time`).

Row kinds (``per_event``): a left row comes and goes with the row kind of its own change. When its match changes it is
``-U`` and ``+U``; in an inner join the first match is ``+I`` and the loss of the last one ``-D``. A match by a row that
shows the same values is no change. ``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gpu_ops.arrays import Array, Positions, Slots, value_changes
from gpu_ops.descriptions.by_time import AsofJoin
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.kernels import Among, Columns, Flagged, Kernels, as_slots
from gpu_ops.operators.by_time.asof_lookup import AsofLookup
from gpu_ops.operators.by_time.asof_over_time import Spans, matches_over_time
from gpu_ops.operators.core.changes import NEVER, Lifetimes
from gpu_ops.operators.core.emission import JOINED, OutputRows, in_order, net_rows
from gpu_ops.operators.keyed import KeyedOperator, side_table
from gpu_ops.state.keyed_table import TIES_COLUMN, TIME_COLUMN, KeyedTable
from gpu_ops.state.table import DYING, LIVE


@dataclasses.dataclass(frozen=True)
class NetMatches:
    """Left rows with their right rows, -1 for none, before and after a micro-batch.

    Attributes:
        gone: left rows that go, and what they met.
        changed: left rows that stay, what they met, and what they meet.
        new: left rows that come, and what they meet.
    """

    gone: tuple[Slots, Slots]
    changed: tuple[Slots, Slots, Slots]
    new: tuple[Slots, Slots]


class AsofOperator(KeyedOperator):
    """An ASOF join over one partition; see `gpu_ops.operators.keyed.KeyedOperator`."""

    description: AsofJoin
    tables: tuple[KeyedTable, KeyedTable]

    def __init__(self, description: AsofJoin, kernels: Kernels) -> None:
        super().__init__(description, kernels)
        self.null_sides = False, description.how == "left"

        def table(side: int) -> KeyedTable:
            beside = [TIME_COLUMN, *([TIES_COLUMN] if description.ties_by(side) is not None else [])]
            return side_table(description, kernels, side, beside=beside, arrival_counts=side == 1)

        self.tables = table(0), table(1)
        self._lookup = AsofLookup(description, self.tables)
        shown = [c.column for c in description.output if c.side == 1]
        self._shown = shown, [description.right.schema.field(name).type for name in shown]

    # --- what changes ------------------------------------------------------------------------

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> NetMatches | Spans:
        """The matches of left rows that the micro-batch may change."""
        kernels, xp, right = self.kernels, self.kernels.xp, self.tables[1]
        new_right = as_slots(kernels, sides[1].first_new, sides[1].new)
        near = self._lookup.near(xp.concatenate([sides[1].killed, new_right]))
        new, gone = as_slots(kernels, sides[0].first_new, sides[0].new), sides[0].killed
        if not net:
            return matches_over_time(self._lookup, self.tables, sides, xp.concatenate([near, gone, new]))
        status = right.status.values
        before = self._lookup.best(xp.concatenate([gone, near]), Among(status, LIVE, DYING), staged=False)
        after = self._lookup.best(xp.concatenate([near, new]), Among(status, LIVE, LIVE), staged=True)
        met, meets = before[gone.size :], after[: near.size]
        other = xp.flatnonzero(~self._alike(met, meets))
        return NetMatches(
            (gone, before[: gone.size]), (near[other], met[other], meets[other]), (new, after[near.size :])
        )

    def _alike(self, one: Slots, other: Slots) -> Array:
        """Mask of n pairs of right rows, -1 for none, that look the same in the output."""
        xp, store = self.kernels.xp, self.tables[1].store
        same = one == other
        both = xp.flatnonzero(~same & (one >= 0) & (other >= 0))
        names, types = self._shown
        if both.size:
            columns = Columns(store, names)
            same[both] = self.kernels.equal_at(types, (columns, one[both]), (columns, other[both])) if names else True
        if self.description.how == "left":
            alone = xp.flatnonzero(~same & ((one < 0) ^ (other < 0)))
            rows = xp.maximum(one[alone], other[alone])
            values, empty = store.take(rows, names or list(self.description.right.schema.names[:1]), present=True), None
            for name in names if rows.size else ():
                valid = self.kernels.valid(values, [name])
                null = xp.zeros(rows.size, bool) if valid is None else ~valid
                empty = null if empty is None else empty & null
            if rows.size:
                same[alone] = True if empty is None else empty
        return same

    # --- what comes out ----------------------------------------------------------------------

    def rows(self, matches: NetMatches | Spans, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The rows of the changelog."""
        if isinstance(matches, NetMatches):
            left, met, meets = matches.changed
            leaving, coming = [matches.gone, (left, met)], [(left, meets), matches.new]
            return net_rows(self.kernels, *(list(map(self._shown_rows, part)) for part in (leaving, coming)))
        assert event_kinds is not None
        return in_order(self.kernels, [(self._events(matches, sides[0], event_kinds), JOINED)])

    def _shown_rows(self, rows: tuple[Slots, Slots]) -> Flagged:
        """Left rows and what they meet, as far as they are in the result."""
        return Flagged(None if self.description.how == "left" else rows[1] >= 0, rows)

    def _events(self, spans: Spans, left: Lifetimes, event_kinds: Array) -> OutputRows:
        """Births, deaths, and what takes the place of a match; row by row of the left, each in time.

        Each span, a left row with what it meets from some state on, may put out three rows, in this order:

            row                 when         if                        kind
            the match before    it begins    another takes its place   -U; of an inner join without the next -D
            its own match       it begins    likewise, or a birth      +U; of a first inner match +I; of a birth its own
            its own match       it ends      a death                   its own

        An inner join puts out none of them that has no match.
        """
        xp, inner = self.kernels.xp, self.description.how == "inner"
        opens = value_changes(xp, spans.left)  # a flag per span, like all that follow: the first of its left row
        closes = xp.ones(opens.size, bool)
        closes[:-1] = opens[1:]
        before = xp.full(opens.size, -1, np.int64)
        before[1:] = spans.right[:-1]
        on = xp.flatnonzero(~opens)
        switch = xp.zeros(opens.size, bool)
        switch[on] = ~self._alike(before[on], spans.right[on])
        born, died = left.born(xp, spans.left), left.died(xp, spans.left)
        had, has = before >= 0, spans.right >= 0
        birth, death, begins, ends, at_birth, at_death = self.kernels.fused(_span_events)(
            opens, closes, born, died, spans.begin
        )

        leaving, coming = xp.full(opens.size, UPDATE_BEFORE, np.int8), xp.full(opens.size, UPDATE_AFTER, np.int8)
        if inner:
            leaving = xp.where(has, leaving, np.int8(DELETE))
            coming = xp.where(had, coming, np.int8(INSERT))
        coming = xp.where(birth, event_kinds[at_birth], coming)
        ending = event_kinds[at_death]  # of none it is anything
        shown = switch, switch | birth, death
        if inner:
            shown = shown[0] & had, shown[1] & has, shown[2] & has
        # three to a span, side by side
        kept: Positions = xp.flatnonzero(xp.stack(shown, axis=1).ravel())
        kinds, rights, when = (
            xp.stack(of_three, axis=1).ravel()[kept]
            for of_three in ((leaving, coming, ending), (before, spans.right, spans.right), (begins, begins, ends))
        )
        return OutputRows(kinds, (xp.repeat(spans.left, 3)[kept], rights), when)


def _span_events(
    opens: Array, closes: Array, born: Array, died: Array, begin: Array
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Flags spans that begin with a birth or end with a death; when they begin and end; and when the two are, or 0."""
    birth, death = opens & (born >= 0), closes & (died < NEVER)
    # the state after an event begins with what that brings
    return birth, death, 2 * begin - 1, died - (died == NEVER), born * birth, died * death


make = AsofOperator
