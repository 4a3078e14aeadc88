"""When a left step's pad comes and goes: association counts of a multi-way join.

A pad stands for the rows that match nothing in a step's input. Their count is how many match; the pad comes where it
falls to zero and goes where it leaves zero, by a change of the step's input (what a change of the row itself
does comes out when that change is completed).

A step that looks at one input only keeps a count beside each row of it, moved by one scatter-add per micro-batch: a
change costs its own matches. A step that looks at several has no single row to keep a count at; it counts afresh, for
the rows its changes meet, as Flink's ``StreamingMultiJoinOperator`` does for every change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.operators.core.counts import flickers, moments
from gpu_ops.operators.core.lifetimes import ALWAYS, NEVER
from gpu_ops.operators.multi.lookups import Lookup
from gpu_ops.operators.multi.tuples import Finder, Tuples, fresh
from gpu_ops.state.keyed_table import COUNT_COLUMN


def step_count(step: int) -> str:
    """The column beside rows that counts their matches in one step."""
    return f"{COUNT_COLUMN}_{step}"


@dataclasses.dataclass
class Crossings:
    """Where counts become zero or stop being zero: parallel arrays."""

    first: Positions
    """Position of one of the events that do it."""
    appears: Array
    """1 where the pad comes, -1 where it goes."""
    hidden: Slots
    """Ascending owners whose pad would come and go within a micro-batch of which only the net change comes out."""


def crossings(
    kernels: Kernels, events: tuple[Array, Array, Array], before: Array, own: Array | None, *, net: bool
) -> Crossings:
    """Where counts cross zero.

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


def _turns(xp: Any, begin: Instants, end: Instants) -> tuple[Positions, Instants, Array]:
    """Where pairs come and go within the micro-batch: which pair, when, and 1 or -1."""
    lives = begin < end
    comes, goes = xp.flatnonzero(lives & (begin != ALWAYS)), xp.flatnonzero(lives & (end != NEVER))
    signs = xp.full(comes.size + goes.size, -1, np.int8)
    signs[: comes.size] = 1
    return xp.concatenate([comes, goes]), xp.concatenate([begin[comes], end[goes]]), signs


def counted_changes(
    finder: Finder, input_index: int, owner: int, own_lookup: Lookup, back: Lookup, *, net: bool
) -> tuple[Tuples, Slots]:
    """The changes of a left step's input with the rows they match, and what they do to those rows' pads.

    Moves the counts.

    Args:
        finder: the micro-batch's.
        input_index: the step's input.
        owner: the one input it looks at.
        own_lookup: the step's own lookup.
        back: from its input to the owner's.
        net: see `crossings`.

    Returns:
        The changes, with the slots of both inputs; and `Crossings.hidden`.
    """
    kernels, xp = finder.kernels, finder.kernels.xp
    table, side, owner_side = finder.tables[owner], finder.sides[input_index], finder.sides[owner]
    # new rows of the owner find what they match, and stays
    new = as_slots(kernels, owner_side.first_new, owner_side.new)
    if new.size:
        rows, _ = finder.matches({owner: new}, own_lookup, step=input_index, committed=True)
        table.add(step_count(input_index), new[rows], xp.ones(rows.size, np.int32))
    touched = xp.concatenate([side.killed, as_slots(kernels, side.first_new, side.new)])
    rows, slots = finder.matches({input_index: touched}, back, step=input_index)
    pairs = {input_index: touched[rows], owner: slots}
    births = side.born(xp, pairs[input_index]), owner_side.born(xp, slots)
    deaths = side.died(xp, pairs[input_index]), owner_side.died(xp, slots)
    both, instants, signs = _turns(xp, xp.maximum(*births), xp.minimum(*deaths))
    own = xp.where(signs > 0, births[1][both], deaths[1][both]) == instants
    owners = slots[both]
    found = crossings(
        kernels, (owners, instants, signs), table.beside[step_count(input_index)].values[owners], own, net=net
    )
    table.add(step_count(input_index), owners, signs)
    changes = fresh(kernels, {p: s[both] for p, s in pairs.items()}, instants, signs)
    changes.pads[found.first] = found.appears
    return changes.pick(xp.flatnonzero(~own)), found.hidden


def mark_afresh(finder: Finder, input_index: int, lookup: Lookup, tuples: Tuples, seen: frozenset[int]) -> None:
    """Set what the changes of a left step's input do to pads, for a step that looks at several inputs.

    Args:
        finder: the micro-batch's.
        input_index: the step's input.
        lookup: the step's.
        tuples: its changes, completed to the left; their ``pads`` are set.
        seen: the inputs the step looks at.
    """
    kernels, xp = finder.kernels, finder.kernels.xp
    if not tuples.size:
        return
    number = xp.zeros(tuples.size, np.int64)
    for other in sorted(seen):
        wide = len(finder.tables[other]) + 1
        number = xp.unique(number * wide + tuples.slots[other] + 1, return_inverse=True)[1]
    one = xp.unique(number, return_index=True)[1]
    left = {p: s[one] for p, s in tuples.slots.items() if p != input_index}
    which, slots = finder.matches(left, lookup, step=input_index)
    side = finder.sides[input_index]
    births, deaths = side.born(xp, slots), side.died(xp, slots)
    before = xp.bincount(which[births == ALWAYS], minlength=int(one.size))
    both, instants, signs = _turns(xp, births, deaths)
    owners = which[both]
    # Nothing hides a pad here, so what comes and goes between two inputs' changes comes out, and is folded later.
    found = crossings(kernels, (owners, instants, signs), before[owners], None, net=False)
    if not found.first.size:
        return
    # one change stands for all of its instant
    chosen_event = both[found.first]
    wanted = xp.sort(layouts.owned(owners[found.first], instants[found.first]))
    order = kernels.argsort(layouts.owned(owners[found.first], instants[found.first]))
    keys = layouts.owned(number, tuples.instants)
    at = xp.minimum(xp.searchsorted(wanted, keys), wanted.size - 1)
    chosen = (wanted[at] == keys) & (slots[chosen_event[order[at]]] == tuples.slots[input_index])
    tuples.pads[:] = xp.where(chosen, found.appears[order[at]], 0)
