"""The ASOF join with retractions: each left row and the right row of its key that is nearest in time.

Law: a left row is in the result once while it lives: with its best right row among those that are alive, or, where
there is none and ``how`` is left, with nulls (`gpu_ops.descriptions.by_time` says what is best). So a
micro-batch can change the result for its own left rows, and for those whose best right row comes or goes.

``per_batch``: the match of each of these rows before and after. Which rows from before they are is found through the
right rows that come and go, each of which has a span of time between its neighbours (`lookup.py`).
Cost: a constant number of bisections for each change, and what is read is the left rows in these spans, never others of
a key.

``per_event``: the match of each of these rows at every event (`gpu_ops.operators.by_time.asof.over_time`).

Row kinds (``per_event``): a left row comes and goes with the row kind of its own change. When its match changes it is
``-U`` and ``+U``; in an inner join the first match is ``+I`` and the loss of the last one ``-D``. A match by a row that
shows the same values is no change. ``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gpu_ops.arrays import Array, Instants, Positions, Slots, value_changes
from gpu_ops.descriptions.by_time import AsofJoin
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.kernels import Columns, Kernels, as_slots
from gpu_ops.operators.by_time.asof.lookup import Lookup
from gpu_ops.operators.by_time.asof.over_time import Spans, matches_over_time
from gpu_ops.operators.core.emission import JOINED, OutputRows, in_order, net_rows
from gpu_ops.operators.core.lifetimes import NEVER, Lifetimes
from gpu_ops.operators.core.match import equal
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.state.columns import DEAD, LIVE, KeySet
from gpu_ops.state.keyed_table import TIES_COLUMN, TIME_COLUMN, KeyedTable


@dataclasses.dataclass(frozen=True)
class NetMatches:
    """Left rows with their right rows, -1 for none, before and after a micro-batch."""

    gone: tuple[Slots, Slots]
    """Left rows that go, and what they met."""
    changed: tuple[Slots, Slots, Slots]
    """Left rows that stay, what they met, and what they meet."""
    new: tuple[Slots, Slots]
    """Left rows that come, and what they meet."""


class Asof(KeyedOperator):
    """An ASOF join over one partition; see `gpu_ops.operators.keyed.KeyedOperator`."""

    join: AsofJoin
    tables: tuple[KeyedTable, KeyedTable]

    def __init__(self, join: AsofJoin, kernels: Kernels) -> None:
        super().__init__(join, kernels)
        self.padded = False, join.how == "left"

        def table(side: int) -> KeyedTable:
            keys = KeySet(join.key_columns(side), join.key_types, join.key_columns(side, strict=True))
            beside = [TIME_COLUMN, *([TIES_COLUMN] if join.ties_by(side) is not None else [])]
            source = join.inputs[side]
            return KeyedTable(
                kernels, source, [keys], findable=not source.insert_only, beside=beside, arrival_counts=side == 1
            )

        self.tables = table(0), table(1)
        self._lookup = Lookup(join, self.tables)
        shown = [c.column for c in join.output if c.side == 1]
        self._shown = shown, [join.right.schema.field(name).type for name in shown]

    # --- what changes ------------------------------------------------------------------------

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> NetMatches | Spans:
        """The matches of left rows that the micro-batch may change."""
        kernels, xp, right = self.kernels, self.kernels.xp, self.tables[1]
        new_right = as_slots(kernels, sides[1].first_new, sides[1].new)
        near = self._lookup.near(xp.concatenate([sides[1].killed, new_right]))
        new, gone = as_slots(kernels, sides[0].first_new, sides[0].new), sides[0].killed
        if not net:
            return matches_over_time(self._lookup, self.tables, sides, xp.concatenate([near, gone, new]))
        first, status = sides[1].first_new, right.status.values
        before = self._lookup.best(
            xp.concatenate([gone, near]), lambda slots: (status[slots] != DEAD) & (slots < first), staged=False
        )
        after = self._lookup.best(xp.concatenate([near, new]), lambda slots: status[slots] == LIVE, staged=True)
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
            same[both] = equal(self.kernels, types, (columns, one[both]), (columns, other[both])) if names else True
        if self.join.how == "left":
            alone = xp.flatnonzero(~same & ((one < 0) ^ (other < 0)))
            rows = xp.maximum(one[alone], other[alone])
            values, empty = store.take(rows, names or list(self.join.right.schema.names[:1]), present=True), None
            for name in names if rows.size else ():
                valid = self.kernels.valid(values, [name])
                null = xp.zeros(rows.size, bool) if valid is None else ~valid
                empty = null if empty is None else empty & null
            if rows.size:
                same[alone] = True if empty is None else empty
        return same

    # --- what comes out ----------------------------------------------------------------------

    def rows(self, found: NetMatches | Spans, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The rows of the changelog."""
        if isinstance(found, NetMatches):
            left, met, meets = found.changed
            leaving, coming = [found.gone, (left, met)], [(left, meets), found.new]
            return net_rows(self.kernels.xp, *(list(map(self._shown_rows, part)) for part in (leaving, coming)))
        assert event_kinds is not None
        return in_order(self.kernels, [(self._events(found, sides[0], event_kinds), JOINED)])

    def _shown_rows(self, rows: tuple[Slots, Slots]) -> tuple[Slots, Slots]:
        """Left rows and what they meet, as far as they are in the result."""
        if self.join.how == "left":
            return rows
        there = self.kernels.xp.flatnonzero(rows[1] >= 0)
        return rows[0][there], rows[1][there]

    def _events(self, found: Spans, left: Lifetimes, event_kinds: Array) -> OutputRows:
        """Births, deaths, and what takes the place of a match; row by row of the left, each in time."""
        xp, inner = self.kernels.xp, self.join.how == "inner"
        opens = value_changes(xp, found.left)
        closes = xp.ones(opens.size, bool)
        closes[:-1] = opens[1:]
        before = xp.full(found.right.size, -1, np.int64)
        before[1:] = found.right[:-1]
        on = xp.flatnonzero(~opens)
        switch = xp.zeros(opens.size, bool)
        switch[on] = ~self._alike(before[on], found.right[on])
        born, died = left.born(xp, found.left), left.died(xp, found.left)
        new, gone = opens & (born >= 0), closes & (died < NEVER)
        had, has = before >= 0, found.right >= 0
        # What each span may put out, in this order: the match before it, its own as it comes, and as it goes.
        out: list[tuple[Array, Slots, Array, Instants]] = []
        now = 2 * found.begin - 1  # the state after an event begins with what that brings
        kinds = xp.full(opens.size, UPDATE_BEFORE, np.int8)
        kinds = xp.where(has, kinds, np.int8(DELETE)) if inner else kinds
        out.append((switch & (had | (not inner)), before, kinds, now))
        kinds = xp.full(opens.size, UPDATE_AFTER, np.int8)
        kinds = xp.where(had, kinds, np.int8(INSERT)) if inner else kinds
        at = xp.flatnonzero(new)
        kinds[at] = event_kinds[born[at]]
        out.append(((switch | new) & (has | (not inner)), found.right, kinds, now))
        kinds = xp.zeros(opens.size, np.int8)
        at = xp.flatnonzero(gone)
        kinds[at] = event_kinds[died[at]]
        out.append((gone & (has | (not inner)), found.right, kinds, xp.minimum(died, NEVER - 1)))
        kept: Positions = xp.flatnonzero(xp.stack([mask for mask, *_ in out], axis=1).ravel())
        lefts = xp.repeat(found.left, len(out))[kept]
        rights, shown, when = (xp.stack(parts, axis=1).ravel()[kept] for parts in list(zip(*out, strict=True))[1:])
        return OutputRows(shown, (lefts, rights), when)


make = Asof
