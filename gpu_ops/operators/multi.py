"""The multi-way join: inner and left steps over many inputs, after Flink's ``StreamingMultiJoinOperator``.

Law: each change is completed to tuples with the rows alive at its instant, input by input (`multi_tuples`), and where a
change of a left step's input makes or ends the last match of what is to its left, a pad comes or goes and is completed
likewise. There is no intermediate state: only the inputs' rows, and counts.

``per_batch`` is the same with other instants: what dies goes first, input by input, then what is born comes, the last
input's first. So a row of the result is hardly ever made and unmade, and what is left of that is folded.

Row kinds (``per_event``), as Flink 2.3.0 has them: a joined row carries the kind of the change that caused it,
after a left step, too; pads are ``-D`` before and ``+I`` after it.

**Pads.** A pad stands for the rows that match nothing in a step's input. Their count is how many match; the pad comes
where it falls to zero and goes where it leaves zero, by a change of the step's input (what a change of the row itself
does comes out when that change is completed).

A step that looks at one input only keeps a count beside each row of it, moved by one scatter-add per micro-batch: a
change costs its own matches. A step that looks at several has no single row to keep a count at; it counts afresh, for
the rows its changes meet, as Flink's ``StreamingMultiJoinOperator`` does for every change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.kernels import Frame, Kernels, as_slots
from gpu_ops.operators.core.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.operators.core.emission import JOINED, PAD_COMES, PAD_GOES, OutputRows
from gpu_ops.operators.core.visibility import flickers, moments
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.operators.multi_tuples import (
    NO_ROW,
    Bind,
    Extend,
    Finder,
    Lookup,
    Operation,
    Tuples,
    fresh,
    join_tuples,
    make_plan,
)
from gpu_ops.state.keyed_table import COUNT_COLUMN, KeyedTable


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


class MultiWayJoin(KeyedOperator):
    """A multi-way join; see `gpu_ops.operators.operator.Operator`.

    Args:
        join: its description.
        kernels: the backend.
    """

    def __init__(self, join: MultiJoin, kernels: Kernels) -> None:
        super().__init__(join, kernels)
        self._plan = make_plan(join)
        counted = self._plan.counted
        self.tables = tuple(
            KeyedTable(
                kernels,
                source,
                self._plan.key_sets[input_index],
                counts=[step_count(step) for step, owner in enumerate(counted) if owner == input_index],
                findable=not source.insert_only or source.ttl_ms is not None,
            )
            for input_index, source in enumerate(join.inputs)
        )

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> Tuples:
        """All tuples that the micro-batch's changes make or unmake."""
        if net:
            for number, side in enumerate(sides):
                side.happens(deaths=number, births=2 * len(sides) - 1 - number)
        finder = Finder(self.join, self.kernels, self.tables, sides, check=self.check_output)
        found = self._complete(finder, net=net)
        self._counters["candidates"] = finder.candidates
        return found

    def rows(self, found: Tuples, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The tuples by the change that caused them, a pad's going before and its coming after the others."""
        xp = self.kernels.xp
        kinds = xp.where(found.signs > 0, np.int8(INSERT), np.int8(DELETE))
        if event_kinds is None:
            order = layouts.sorted_positions(xp, (found.signs > 0).astype(np.int64))
        else:
            kinds = xp.where(found.ranks == JOINED, event_kinds[found.instants], kinds)
            order = layouts.sorted_positions(xp, (found.instants << layouts.RANK_BITS) | found.ranks)
        self._pads = bool((found.ranks != JOINED).any())
        slots = tuple(found.slots[number] for number in range(len(sides)))
        return OutputRows(kinds, slots, found.instants).pick(order)

    def count_expired(self) -> None:
        """Rows that have expired match nothing any more; no row comes of it (Flink counts only what is there)."""
        for input_index, owner in enumerate(self._plan.counted):
            gone = self.tables[input_index].expired
            if owner is None or not gone.size:
                continue
            nothing = [_untouched(self.kernels, t) for t in self.tables]
            finder = Finder(self.join, self.kernels, self.tables, nothing, check=self.check_output)
            slots = finder.matches({input_index: gone}, _back(self._plan.paths[input_index]), step=input_index)[1]
            self.tables[owner].add(step_count(input_index), slots, self.kernels.xp.full(slots.size, -1, np.int32))

    def _complete(self, finder: Finder, *, net: bool) -> Tuples:
        """All tuples that the micro-batch's changes make or unmake."""
        plan = self._plan
        begun: list[Tuples] = []
        hidden: list[tuple[int, Slots] | None] = []
        for input_index, owner in enumerate(plan.counted):
            if owner is None:
                begun.append(finder.events(input_index))
                hidden.append(None)
            else:
                changes, rows = counted_changes(
                    finder, input_index, owner, plan.steps[input_index], _back(plan.paths[input_index]), net=net
                )
                begun.append(changes)
                hidden.append((owner, self.kernels.xp.unique(rows)))
        found = [self._completed(finder, input_index, tuples, hidden) for input_index, tuples in enumerate(begun)]
        return join_tuples(self.kernels, found)

    def _completed(
        self, finder: Finder, input_index: int, begun: Tuples, hidden: Sequence[tuple[int, Slots] | None]
    ) -> Tuples:
        """The changes of one input, completed: to the left along its path, then to the right step by step."""
        plan, tuples = self._plan, begun
        for operation in plan.paths[input_index]:
            if isinstance(operation, Bind):
                if operation.lookup.input_index not in tuples.slots:
                    tuples = finder.bind(tuples, operation.lookup)
            elif isinstance(operation, Extend):
                tuples = finder.extend(tuples, plan.steps[operation.input_index], hidden[operation.input_index])
            elif operation.input_index != input_index or plan.counted[input_index] is None:
                # else it was checked while counting
                tuples = finder.check(tuples, operation.input_index)
        if input_index and self.join.steps[input_index - 1].how == "left":
            if plan.counted[input_index] is None:
                mark_afresh(finder, input_index, plan.steps[input_index], tuples, self.join.references[input_index - 1])
            tuples = self._with_pads(tuples, input_index)
        for later in range(input_index + 1, len(self.tables)):
            tuples = finder.extend(tuples, plan.steps[later], hidden[later])
        return tuples

    def _with_pads(self, tuples: Tuples, input_index: int) -> Tuples:
        """The tuples, and the pads that come and go with them."""
        xp = self.kernels.xp
        marked = xp.flatnonzero(tuples.pads)
        if not marked.size:
            return tuples
        pads = tuples.pick(marked)
        pads.slots[input_index] = xp.full(marked.size, NO_ROW, np.int64)
        pads.signs = pads.pads
        pads.ranks = xp.where(pads.signs > 0, PAD_COMES, PAD_GOES).astype(np.int8)
        return join_tuples(self.kernels, [tuples, pads])

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """Positions of rows among which one that goes may equal one that comes.

        With equal rows in a multiset one instance's tuple may go while another's comes, anywhere. All else has to do
        with pads: what one input's change makes of a pad another's undoes, and a pad may equal a row whose
        columns are all null.
        """
        xp = self.kernels.xp
        if any(t.source.unique_key is None and s.any_death for t, s in zip(self.tables, sides, strict=True)):
            return xp.arange(rows.size, dtype=np.int64)
        if not self._pads:
            return self._nothing
        padded = xp.zeros(rows.size, bool)
        for input_index, step in enumerate(self.join.steps, start=1):
            if step.how == "left":
                padded |= rows.slots[input_index] == NO_ROW
                padded |= self._looks_padded(input_index, frame, rows.size)
        return xp.flatnonzero(padded)

    def _looks_padded(self, input_index: int, frame: Frame, size: int) -> Array | bool:
        """Mask of rows all of whose columns of one input are null; False where none can be."""
        never = {k.own for k in self.join.steps[input_index - 1].on if not k.null_safe}
        never |= set(self.join.inputs[input_index].unique_key or ())
        shown = [c for c in self.join.output if c.side == input_index]
        if any(c.column in never for c in shown):
            return False
        mask = self.kernels.xp.ones(size, bool)
        for column in shown:
            valid = self.kernels.valid(frame, [column.name])
            if valid is None:
                return False
            mask &= ~valid
        return mask


make = MultiWayJoin


def _back(path: tuple[Operation, ...]) -> Lookup:
    """From a counted step's input to the rows that count it: its path's first lookup."""
    first = path[0]
    assert isinstance(first, Bind)
    return first.lookup


def _untouched(kernels: Kernels, table: KeyedTable) -> Lifetimes:
    """No change of any row."""
    return Lifetimes.of_new(kernels.xp, len(table), 0, kernels.xp.empty(0, np.int64))
