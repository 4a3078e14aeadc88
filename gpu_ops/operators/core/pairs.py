"""The delta law of a join: which pairs a micro-batch makes and unmakes.

With ΔL, ΔR the micro-batch's changes, ``Δ(L ⋈ R) = ΔL ⋈ R + L ⋈ ΔR + ΔL ⋈ ΔR``. Rows have
lifetimes (`gpu_ops.operators.core.changes`), so the law becomes: every pair of matching rows, one of which the
micro-batch touches, lives while both rows live: from the later birth to the earlier death. Two probes find them:
touched left rows against all right rows (``ΔL ⋈ R`` and ``ΔL ⋈ ΔR``), touched right rows against
untouched left rows (``L ⋈ ΔR``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.conditions import Condition
from gpu_ops.kernels import Among, Columns
from gpu_ops.operators.core.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.operators.core.match import fulfilling, in_one, in_pieces, match_among
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DYING, LIVE

Tables = tuple[KeyedTable, KeyedTable]
Sides = tuple[Lifetimes, Lifetimes]


class Wanted(NamedTuple):
    """Which pairs are looked for.

    Attributes:
        condition: the residual condition.
        names: of the inputs in it.
        check: told now and then how many pairs there are so far; it may refuse them.
        at_most: how many candidates there may be.
    """

    condition: Condition | None
    names: tuple[str, str]
    check: Callable[[int], None]
    at_most: int | None = None


@dataclasses.dataclass
class Pairs:
    """Matching pairs that a micro-batch makes or unmakes: parallel arrays."""

    slots: tuple[Slots, Slots]
    comes: Positions | slice
    """Positions of those that the micro-batch makes, or a slice."""
    goes: Positions
    """Positions of those that it unmakes."""
    deltas: Array
    """By how much each pair moves the association counts of its two rows."""


@dataclasses.dataclass
class NetPairs(Pairs):
    """The pairs of a net change. Those of a row that comes with one that goes are among them, and count for nothing."""

    dying: tuple[Array | None, Array | None]
    """Masks of pairs whose left, whose right row dies; None for none."""


@dataclasses.dataclass
class TimedPairs(Pairs):
    """All pairs that live at some instant of the micro-batch, with their times (int64)."""

    comes: Positions
    births: tuple[Instants, Instants]
    """When the left and the right row were born."""
    deaths: tuple[Instants, Instants]
    """When they die."""
    begin: Instants
    """The later birth; `ALWAYS` if the pair is older than the micro-batch."""
    end: Instants
    """The earlier death; `NEVER` if the pair outlives it."""


def net_pairs(tables: Tables, sides: Sides, wanted: Wanted) -> NetPairs:
    """The pairs one of whose rows the micro-batch touches, by its net change."""
    xp = tables[0].kernels.xp
    slots = _candidates(tables, sides, wanted)
    dying = sides[0].dying(slots[0]), sides[1].dying(slots[1])
    if dying[0] is None and dying[1] is None:  # then all pairs have a new row
        return NetPairs(slots, slice(None), xp.empty(0, np.int64), xp.ones(slots[0].size, np.int32), dying)
    deltas, comes, goes = tables[0].kernels.fused(_net)(*slots, sides[0].first_new, sides[1].first_new, *dying)
    return NetPairs(slots, xp.flatnonzero(comes), xp.flatnonzero(goes), deltas, dying)


def _net(  # noqa: PLR0917 - what is fused takes no keywords
    left: Array, right: Array, new_left: int, new_right: int, left_dies: Array | None, right_dies: Array | None
) -> tuple[Array, Array, Array]:
    """What pairs of slots do to counts; masks of those that come, and of those that go."""
    new = (left >= new_left) | (right >= new_right)
    dies: Array = right_dies if left_dies is None else left_dies if right_dies is None else left_dies | right_dies
    return new.astype(np.int32) - dies, new & ~dies, dies & ~new


def timed_pairs(tables: Tables, sides: Sides, wanted: Wanted) -> TimedPairs:
    """All pairs one of whose rows the micro-batch touches and that live at some instant of it."""
    xp = tables[0].kernels.xp
    slots = _candidates(tables, sides, wanted)
    births = sides[0].born(xp, slots[0]), sides[1].born(xp, slots[1])
    deaths = sides[0].died(xp, slots[0]), sides[1].died(xp, slots[1])
    begin, end = xp.maximum(*births), xp.minimum(*deaths)
    if any(side.any_death for side in sides):
        live = xp.flatnonzero(begin < end)
        if live.size < begin.size:
            slots = slots[0][live], slots[1][live]
            births, deaths = (births[0][live], births[1][live]), (deaths[0][live], deaths[1][live])
            begin, end = begin[live], end[live]
    deltas, comes, goes = tables[0].kernels.fused(_timed)(begin, end)
    return TimedPairs(slots, xp.flatnonzero(comes), xp.flatnonzero(goes), deltas, births, deaths, begin, end)


def _timed(begin: Instants, end: Instants) -> tuple[Array, Array, Array]:
    """What pairs of these times do to counts; masks of those that come, and of those that go."""
    comes, goes = begin != ALWAYS, end != NEVER
    return comes.astype(np.int32) - goes, comes, goes


def _candidates(tables: Tables, sides: Sides, wanted: Wanted) -> tuple[Slots, Slots]:
    """Left and right slots of all pairs one of whose rows the micro-batch touches."""
    xp = tables[0].kernels.xp
    left, right = probe(tables, sides, 0, wanted, dying=True)
    other_right, other_left = probe(tables, sides, 1, wanted, dying=False)
    return xp.concatenate([left, other_left]), xp.concatenate([right, other_right])


def probe(tables: Tables, sides: Sides, side: int, wanted: Wanted, *, dying: bool) -> tuple[Slots, Slots]:
    """Touched rows of one side with their matches: slots of that side, slots of the other.

    The left's touched rows meet new rows, too, and those that are ``dying`` or not; the right's only rows that the
    micro-batch leaves alone, so no pair is found twice. What is looked at before it is known to match is looked at in
    pieces of a bounded size.

    Raises:
        TooMany: there are more candidates than there may be.
    """
    own, other = tables[side], tables[1 - side]
    kernels, xp = own.kernels, own.kernels.xp
    touched = own.touched()
    if touched.size == 0 or len(other) == 0:
        return xp.empty(0, np.int64), xp.empty(0, np.int64)

    every = other.all_alive and not sides[1 - side].killed.size
    among = None if every else Among(other.status.values, LIVE, DYING if dying else LIVE)
    columns = Columns(own.store, own.keys), Columns(other.store, other.keys)

    def residual(found: Slots, slots: Slots) -> Positions | None:
        rows = {wanted.names[side]: (own.store, found), wanted.names[1 - side]: (other.store, slots)}
        return fulfilling(kernels, wanted.condition, rows, int(slots.size))

    def candidates(rows: Array, at_most: int | None) -> Array:
        # The other side's rows are read in the order in which they lie, the touched ones are few and near.
        return other.key_index.meet(rows, staged=side == 0, by_candidate=True, at_most=at_most)

    few = wanted.at_most is not None
    pieces = [candidates(touched, wanted.at_most)] if few else in_pieces(kernels, touched, candidates)
    parts = (
        match_among(kernels, own.key_types, piece, columns, among, by_candidate=True, residual=residual)
        for piece in pieces
    )
    return in_one(xp, parts, wanted.check, by_candidate=True)
