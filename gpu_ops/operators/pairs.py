"""The delta law of a join: which pairs a micro-batch makes and unmakes.

With ΔL, ΔR the micro-batch's changes, ``Δ(L ⋈ R) = ΔL ⋈ R + L ⋈ ΔR + ΔL ⋈ ΔR``. Rows have
lifetimes (`changes`), so the law becomes: every pair of matching rows, one of which the micro-batch
touches, lives while both rows live: from the later birth to the earlier death. Two probes find them:
touched left rows against all right rows (``ΔL ⋈ R`` and ``ΔL ⋈ ΔR``), touched right rows against
untouched left rows (``L ⋈ ΔR``).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gpu_ops.conditions import Condition
from gpu_ops.kernels import Array
from gpu_ops.operators.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.state.columns import DEAD, LIVE
from gpu_ops.state.table import StateTable

Tables = tuple[StateTable, StateTable]
Sides = tuple[Lifetimes, Lifetimes]


@dataclasses.dataclass
class Pairs:
    """Matching pairs that a micro-batch makes or unmakes: parallel int64 arrays."""

    slots: tuple[Array, Array]
    births: tuple[Array, Array]
    """When the left and the right row were born."""
    deaths: tuple[Array, Array]
    """When they die."""
    begin: Array
    """The later birth; `ALWAYS` if the pair is older than the micro-batch."""
    end: Array
    """The earlier death; `NEVER` if the pair outlives it."""


def find_pairs(tables: Tables, sides: Sides, condition: Condition | None, names: tuple[str, str]) -> Pairs:
    """All pairs one of whose rows the micro-batch touches and that live at some instant of it."""
    xp = tables[0].kernels.xp
    left, right = _probe(tables, sides, 0, condition, names)
    other_right, other_left = _probe(tables, sides, 1, condition, names)
    slots = xp.concatenate([left, other_left]), xp.concatenate([right, other_right])
    births = sides[0].born(xp, slots[0]), sides[1].born(xp, slots[1])
    deaths = sides[0].died(xp, slots[0]), sides[1].died(xp, slots[1])
    begin, end = xp.maximum(*births), xp.minimum(*deaths)
    if any(side.any_death for side in sides):
        live = xp.flatnonzero(begin < end)
        if live.size < begin.size:
            slots = slots[0][live], slots[1][live]
            births, deaths = (births[0][live], births[1][live]), (deaths[0][live], deaths[1][live])
            begin, end = begin[live], end[live]
    return Pairs(slots, births, deaths, begin, end)


def _probe(
    tables: Tables, sides: Sides, side: int, condition: Condition | None, names: tuple[str, str]
) -> tuple[Array, Array]:
    """Touched rows of one side with their matches: slots of that side, slots of the other.

    The left's touched rows meet every row; the right's only rows that the micro-batch leaves alone,
    so no pair is found twice.
    """
    own, other = tables[side], tables[1 - side]
    kernels, xp = own.kernels, own.kernels.xp
    nothing = xp.empty(0, np.int64)
    touched = own.touched()
    if touched.size == 0 or len(other) == 0:
        return nothing, nothing
    everything = side == 0
    # The other side's rows are read in the order in which they lie, the touched ones are few and near.
    found, slots = other.key_index.meet(touched, staged=everything, by_candidate=True)
    if other.live < sides[1 - side].first_new or sides[1 - side].killed.size:
        status = other.status.values[slots]
        alive = status != DEAD if everything else status == LIVE
        if not bool(alive.all()):
            kept = xp.flatnonzero(alive)
            found, slots = found[kept], slots[kept]
    if own.keys:
        equal = kernels.equal_rows(
            own.store.take(found, own.keys), own.keys, other.store.take(slots, other.keys), other.keys, own.key_types
        )
        if not bool(equal.all()):
            kept = xp.flatnonzero(equal)
            found, slots = found[kept], slots[kept]
    if condition is not None and slots.size:
        frames = {
            names[s]: tables[s].store.take(found if s == side else slots, condition.columns[names[s]])
            for s in (0, 1)
            if condition.columns.get(names[s])
        }
        kept = xp.flatnonzero(kernels.evaluate(condition, frames, int(slots.size)))
        found, slots = found[kept], slots[kept]
    return found, slots


def count_deltas(pairs: Pairs) -> Array:
    """By how much each pair moves the association counts of its two rows."""
    return (pairs.begin != ALWAYS).astype(np.int64) - (pairs.end != NEVER)
