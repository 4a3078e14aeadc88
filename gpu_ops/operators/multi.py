"""The multi-way join: inner and left steps over many inputs, after Flink's ``StreamingMultiJoinOperator``.

Law: each change is completed to tuples with the rows alive at its logical time, input by input, and where a
change of a left step's input makes or ends the last match of what is to its left, an unmatched row comes or goes and is
completed likewise. There is no intermediate state: only the inputs' rows, and counts.

``per_batch`` is the same with other logical times: what dies goes first, input by input, then what is born comes, the
last input's first. So a row of the result is hardly ever made and unmade, and what is left of that is folded.

Row kinds (``per_event``), as Flink 2.3.0 has them: a joined row carries the kind of the change that caused it,
after a left step, too; unmatched rows are ``-D`` before and ``+I`` after it.

**Unmatched rows.** An unmatched row stands for the rows that match nothing in a step's input. Their count is how many
match; the unmatched row comes where it falls to zero and goes where it leaves zero, by a change of the step's input
(what a change of the row itself does comes out when that change is completed).

A step that looks at one input only keeps a count beside each row of it, moved by one scatter-add per micro-batch: a
change costs its own matches. A step that looks at several has no single row to keep a count at; it counts afresh, for
the rows its changes meet, as Flink's ``StreamingMultiJoinOperator`` does for every change.

**Tuples** on their way to the output: a change, completed input by input. Each holds a change's logical time and one
slot of each input found so far. It meets the rows that are alive at that logical time, so any number of changes are
completed together, each as if it had come alone.

What is looked up by what, in what order: a row of the result is a *tuple*: one row of each input, or none where a left
step found none. A change of input i is completed to tuples in two parts:

- *bind*: the inputs that step i's ``=`` leads to, and those that their own steps' ``=`` lead to, down to the first.
  They must all be there, so what ``=`` makes equal can be looked up from either end: a change of the third input
  finds its rows of the first by all columns they share, however many rows of the first have the same common key.
- *extend*: every other input, in the join's order, by its own step: rows that match, or for a left step none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, LogicalTimes, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.keys import InputColumn, equal_classes
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.kernels import Columns, Frame, Kernels, as_slots
from gpu_ops.operators.core.changes import ALWAYS, NEVER, Lifetimes
from gpu_ops.operators.core.emission import JOINED, UNMATCHED_COMES, UNMATCHED_GOES, OutputRows
from gpu_ops.operators.core.match import MatchedSlots, fulfilling, in_one, in_pieces, match
from gpu_ops.operators.core.visibility import crossings
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.state.keyed_table import COUNT_COLUMN, KeyedTable
from gpu_ops.state.table import DEAD, DYING, LIVE, KeySet

EqualColumns = tuple[str, tuple[int, str]]
"""A column of the input that is looked up, and the (input, column) it equals."""

NO_ROW = -1


def step_count(step: int) -> str:
    """The column beside rows that counts their matches in one step."""
    return f"{COUNT_COLUMN}_{step}"


def _turns(xp: Any, begin: LogicalTimes, end: LogicalTimes) -> tuple[Positions, LogicalTimes, Array]:
    """Lists when pairs come and go within the micro-batch: the pair, the logical time, and 1 or -1."""
    lives = begin < end
    comes, goes = xp.flatnonzero(lives & (begin != ALWAYS)), xp.flatnonzero(lives & (end != NEVER))
    signs = xp.full(comes.size + goes.size, -1, np.int8)
    signs[: comes.size] = 1
    return xp.concatenate([comes, goes]), xp.concatenate([begin[comes], end[goes]]), signs


def counted_changes(
    finder: Finder, input_index: int, owner: int, own_lookup: InputLookup, back: InputLookup, *, net: bool
) -> tuple[Tuples, Slots]:
    """The changes of a left step's input with the rows they match, and what they do to those rows' unmatched rows.

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
    both, logical_times, signs = _turns(xp, xp.maximum(*births), xp.minimum(*deaths))
    own = xp.where(signs > 0, births[1][both], deaths[1][both]) == logical_times
    owners = slots[both]
    table.fetch(owners)
    found = crossings(
        kernels, (owners, logical_times, signs), table.beside[step_count(input_index)].values[owners], own, net=net
    )
    table.add(step_count(input_index), owners, signs)
    changes = fresh(kernels, {p: s[both] for p, s in pairs.items()}, logical_times, signs)
    changes.unmatched[found.first] = found.appears
    return changes.pick(xp.flatnonzero(~own)), found.hidden


def mark_afresh(finder: Finder, input_index: int, lookup: InputLookup, tuples: Tuples, seen: frozenset[int]) -> None:
    """Set what the changes of a left step's input do to unmatched rows, for a step that looks at several inputs.

    Args:
        finder: the micro-batch's.
        input_index: the step's input.
        lookup: the step's.
        tuples: its changes, completed to the left; their ``unmatched`` are set.
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
    both, logical_times, signs = _turns(xp, births, deaths)
    owners = which[both]
    # Nothing hides an unmatched row here, so what comes and goes between two inputs' changes comes out, and is folded
    # later.
    found = crossings(kernels, (owners, logical_times, signs), before[owners], None, net=False)
    if not found.first.size:
        return
    # one change stands for all of its logical time
    chosen_event = both[found.first]
    wanted = kernels.sort(layouts.owned(owners[found.first], logical_times[found.first]))
    order = kernels.argsort(layouts.owned(owners[found.first], logical_times[found.first]))
    keys = layouts.owned(number, tuples.logical_times)
    at = xp.minimum(xp.searchsorted(wanted, keys), wanted.size - 1)
    chosen = (wanted[at] == keys) & (slots[chosen_event[order[at]]] == tuples.slots[input_index])
    tuples.unmatched[:] = xp.where(chosen, found.appears[order[at]], 0)


class MultiWayJoin(KeyedOperator):
    """A multi-way join; see `gpu_ops.operators.operator.Operator`.

    Args:
        description: its description.
        kernels: the backend.
    """

    def __init__(self, description: MultiJoin, kernels: Kernels) -> None:
        super().__init__(description, kernels)
        self._plan = make_plan(description)
        self.null_sides = [may_be_null(description, number) for number in range(len(description.inputs))]
        counted = self._plan.counted
        self.tables = tuple(
            KeyedTable(
                kernels,
                source,
                self._plan.key_sets[input_index],
                counts=[step_count(step) for step, owner in enumerate(counted) if owner == input_index],
                findable=not source.insert_only or source.ttl_ms is not None,
            )
            for input_index, source in enumerate(description.inputs)
        )

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> Tuples:
        """All tuples that the micro-batch's changes make or unmake."""
        if net:
            for number, side in enumerate(sides):
                side.happens(deaths=number, births=2 * len(sides) - 1 - number)
        finder = Finder(self.description, self.kernels, self.tables, sides, self.check_output)
        found = self._complete(finder, net=net)
        self._counters["candidates"] = finder.candidates
        return found

    def rows(self, matches: Tuples, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The tuples by the change that caused them; unmatched rows go before, and come after, the others."""
        xp = self.kernels.xp
        kinds = xp.where(matches.signs > 0, np.int8(INSERT), np.int8(DELETE))
        if event_kinds is None:
            order = self.kernels.argsort(matches.signs)
        else:
            kinds = xp.where(matches.ranks == JOINED, event_kinds[matches.logical_times], kinds)
            order = self.kernels.argsort((matches.logical_times << layouts.RANK_BITS) | matches.ranks)
        self._unmatched = bool((matches.ranks != JOINED).any())
        slots = tuple(matches.slots[number] for number in range(len(sides)))
        return OutputRows(kinds, slots, matches.logical_times).pick(order)

    def count_expired(self) -> None:
        """Rows that have expired match nothing any more; no row comes of it (Flink counts only what is there)."""
        for input_index, owner in enumerate(self._plan.counted):
            gone = self.tables[input_index].expired
            if owner is None or not gone.size:
                continue
            nothing = [_untouched(self.kernels, t) for t in self.tables]
            finder = Finder(self.description, self.kernels, self.tables, nothing, self.check_output)
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
            number = operation.input_index
            if operation.lookup is not None:
                tuples = tuples if number in tuples.slots else finder.bind(tuples, operation.lookup)
            elif operation.kind == "extend":
                tuples = finder.extend(tuples, plan.steps[number], hidden[number])
            elif number != input_index or plan.counted[input_index] is None:
                # else it was checked while counting
                tuples = finder.check(tuples, number)
        if input_index and self.description.steps[input_index - 1].how == "left":
            if plan.counted[input_index] is None:
                mark_afresh(
                    finder, input_index, plan.steps[input_index], tuples, self.description.references[input_index - 1]
                )
            tuples = self._with_unmatched(tuples, input_index)
        for later in range(input_index + 1, len(self.tables)):
            tuples = finder.extend(tuples, plan.steps[later], hidden[later])
        return tuples

    def _with_unmatched(self, tuples: Tuples, input_index: int) -> Tuples:
        """The tuples, and the unmatched rows that come and go with them."""
        xp = self.kernels.xp
        marked = xp.flatnonzero(tuples.unmatched)
        if not marked.size:
            return tuples
        unmatched = tuples.pick(marked)
        unmatched.slots[input_index] = xp.full(marked.size, NO_ROW, np.int64)
        unmatched.signs = unmatched.unmatched
        unmatched.ranks = xp.where(unmatched.signs > 0, UNMATCHED_COMES, UNMATCHED_GOES).astype(np.int8)
        return join_tuples(self.kernels, [tuples, unmatched])

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """Positions of rows among which one that goes may equal one that comes.

        With equal rows in a multiset one instance's tuple may go while another's comes, anywhere. All else has to do
        with unmatched rows: what one input's change makes of an unmatched row another's undoes, and an unmatched row
        may equal a row whose columns are all null.
        """
        xp = self.kernels.xp
        if any(t.source.unique_key is None and s.any_death for t, s in zip(self.tables, sides, strict=True)):
            return xp.arange(rows.size, dtype=np.int64)
        if not self._unmatched:
            return self._nothing
        is_unmatched = xp.zeros(rows.size, bool)
        for input_index, step in enumerate(self.description.steps, start=1):
            if step.how == "left":
                is_unmatched |= rows.slots[input_index] == NO_ROW
                is_unmatched |= self._looks_unmatched(input_index, frame, rows.size)
        return xp.flatnonzero(is_unmatched)

    def _looks_unmatched(self, input_index: int, frame: Frame, size: int) -> Array | bool:
        """Mask of rows all of whose columns of one input are null; False where none can be."""
        never = {k.own for k in self.description.steps[input_index - 1].on if not k.null_safe}
        never |= set(self.description.inputs[input_index].unique_key or ())
        shown = [c for c in self.description.output if c.side == input_index]
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


def _back(path: tuple[Operation, ...]) -> InputLookup:
    """From a counted step's input to the rows that count it: its path's first lookup."""
    assert path[0].lookup is not None
    return path[0].lookup


def _untouched(kernels: Kernels, table: KeyedTable) -> Lifetimes:
    """No change of any row."""
    return Lifetimes.of_new(kernels.xp, len(table), 0, kernels.xp.empty(0, np.int64))


@dataclasses.dataclass(frozen=True)
class InputLookup:
    """Rows of one input by columns of others.

    Attributes:
        input_index: the input.
        key_set: which of its key sets.
        pairs: its columns, and the (input, column) each must equal; the first of a column is hashed.
    """

    input_index: int
    key_set: int
    pairs: tuple[EqualColumns, ...]


class Operation(NamedTuple):
    """One step on a tuple's path: it binds an input, extends the tuple, or checks a condition.

    Attributes:
        kind: *bind*: find rows of an input that must be there; *extend*: find an input's rows by its own step, or none;
            *check*: evaluate the residual condition of a step, whose inputs are all known.
        input_index: which input's.
        lookup: by what rows that must be there are found.
    """

    kind: Literal["bind", "extend", "check"]
    input_index: int
    lookup: InputLookup | None = None


@dataclasses.dataclass(frozen=True)
class LookupPlan:
    """The lookups by which tuples are found.

    Attributes:
        key_sets: per input, by what its rows are looked up.
        steps: per input but the first, the lookup of its own step (index 0 is unused).
        paths: per input, from its row to the tuple of everything to its left.
        counted: per input, the input whose rows count their matches in it; None if the step is no left join, or
            looks at several inputs.
    """

    key_sets: tuple[tuple[KeySet, ...], ...]
    steps: tuple[InputLookup, ...]
    paths: tuple[tuple[Operation, ...], ...]
    counted: tuple[int | None, ...]


def make_plan(description: MultiJoin) -> LookupPlan:
    """The plan of a join."""
    key_sets: list[list[KeySet]] = [[] for _ in description.inputs]

    def lookup(input_index: int, pairs: list[EqualColumns]) -> InputLookup:
        names = description.inputs[input_index].schema.names
        columns = tuple(sorted({column for column, _ in pairs}, key=names.index))
        keys = KeySet(columns, tuple(description.key_types[input_index, c] for c in columns), columns)
        if keys not in key_sets[input_index]:
            key_sets[input_index].append(keys)
        ordered = sorted(pairs, key=lambda p: names.index(p[0]))
        return InputLookup(input_index, key_sets[input_index].index(keys), tuple(ordered))

    steps = [InputLookup(0, 0, ())]
    for input_index, step in enumerate(description.steps, start=1):
        steps.append(lookup(input_index, [(k.own, (k.input, k.column)) for k in step.on if not k.null_safe]))
    counted: list[int | None] = [None]
    for input_index, step in enumerate(description.steps, start=1):
        seen = description.references[input_index - 1]
        counted.append(next(iter(seen)) if step.how == "left" and len(seen) == 1 else None)
    paths = [(), *(_path(description, number, counted[number], lookup) for number in range(1, len(description.inputs)))]
    return LookupPlan(tuple(tuple(k) for k in key_sets), tuple(steps), tuple(paths), tuple(counted))


def _path(
    description: MultiJoin,
    input_index: int,
    counted: int | None,
    lookup: Callable[[int, list[EqualColumns]], InputLookup],
) -> tuple[Operation, ...]:
    """From an input's row to the tuple of everything to its left: first what must be there, then the rest."""
    path: list[Operation] = []
    closure = _closure(description, input_index)
    # columns that the steps of the closure make equal
    group = equal_classes(
        ((k.input, k.column), (number, k.own))
        for number in sorted(closure - {0})
        for k in description.steps[number - 1].on
        if not k.null_safe
    )
    compared, bound = set[int](), {input_index}
    unchecked = [p for p in sorted(closure) if p and description.conditions[p - 1] is not None]

    def now(operation: Operation) -> None:
        path.append(operation)
        bound.add(operation.input_index)
        for number in list(unchecked):
            condition = description.conditions[number - 1]
            assert condition is not None
            if {p for p, i in enumerate(description.inputs) if condition.columns.get(i.name)} <= bound:
                path.append(Operation("check", number))
                unchecked.remove(number)

    while bound < closure:
        options = {p: _pairs(group, compared, bound, p) for p in closure - bound}
        best = max(options, key=lambda p: _rank(description, options[p], p))
        chosen = counted if len(bound) == 1 and counted is not None else best
        compared |= {group[chosen, column] for column, _ in options[chosen]}
        now(Operation("bind", chosen, lookup(chosen, options[chosen])))
    for other in range(1, input_index):
        if other not in bound:
            now(Operation("extend", other))
    return tuple(path)


def _closure(description: MultiJoin, input_index: int) -> set[int]:
    """The inputs that are there whenever a row of this one is part of a tuple, itself included."""
    found, todo = {input_index}, [input_index]
    while todo:
        number = todo.pop()
        for key in description.steps[number - 1].on if number else ():
            if not key.null_safe and key.input not in found:
                found.add(key.input)
                todo.append(key.input)
    return found


def _pairs(group: dict[InputColumn, int], compared: set[int], bound: set[int], input_index: int) -> list[EqualColumns]:
    """The columns of an input that equal columns of bound ones.

    Args:
        group: which columns are equal, see `gpu_ops.descriptions.keys.equal_classes`.
        compared: groups whose bound columns have been compared with each other: one of them stands for all.
        bound: the inputs that are known.
        input_index: the input.
    """
    pairs = []
    for (owner, column), number in group.items():
        if owner == input_index:
            ends = sorted(c for c, its in group.items() if its == number and c[0] in bound)
            pairs += [(column, end) for end in (ends[:1] if number in compared else ends)]
    return pairs


def _rank(description: MultiJoin, pairs: list[EqualColumns], input_index: int) -> tuple[bool, int, int]:
    """Ranks an input to be looked up next: by a unique key first, else by as many columns as possible."""
    columns = {column for column, _ in pairs}
    unique = description.inputs[input_index].unique_key
    return bool(columns) and unique is not None and set(unique) <= columns, len(columns), -input_index


@dataclasses.dataclass
class Tuples:
    """n tuples in the making: parallel arrays.

    Attributes:
        slots: per input found so far n slots, -1 where a left step found none.
        logical_times: when the change happens.
        signs: 1 for what comes, -1 for what goes.
        ranks: order within a logical time, see `gpu_ops.operators.core.emission`.
        unmatched: what the change does to the unmatched row beside it: 1 it comes, -1 it goes, 0 neither.
    """

    slots: dict[int, Slots]
    logical_times: LogicalTimes
    signs: Array
    ranks: Array
    unmatched: Array

    @property
    def size(self) -> int:
        """The number of tuples."""
        return int(self.logical_times.size)

    def pick(self, positions: Positions) -> Tuples:
        """Gathers the tuples at some positions; a position may repeat."""
        rest = (a[positions] for a in (self.logical_times, self.signs, self.ranks, self.unmatched))
        return Tuples({p: s[positions] for p, s in self.slots.items()}, *rest)


def join_tuples(kernels: Kernels, parts: Sequence[Tuples]) -> Tuples:
    """Several groups of tuples with the same inputs, one after the other."""
    cat = kernels.xp.concatenate
    slots = {input_index: cat([p.slots[input_index] for p in parts]) for input_index in parts[0].slots}
    fields = ("logical_times", "signs", "ranks", "unmatched")
    return Tuples(slots, *(cat([getattr(p, f) for p in parts]) for f in fields))


@dataclasses.dataclass
class Finder:
    """Looks rows up for one micro-batch.

    Attributes:
        description: the description.
        kernels: the backend.
        tables: one per input, prepared.
        sides: their rows' lifetimes.
        refuse: told now and then how many rows there are; it may refuse them.
        candidates: how many were looked at.
    """

    description: MultiJoin
    kernels: Kernels
    tables: Sequence[KeyedTable]
    sides: Sequence[Lifetimes]
    refuse: Callable[[int], None]
    candidates: int = 0

    def matches(
        self,
        slots: Mapping[int, Slots],
        lookup: InputLookup,
        *,
        step: int | None = None,
        logical_times: LogicalTimes | None = None,
        committed: bool = False,
    ) -> tuple[Positions, Slots]:
        """Rows of one input whose key equals columns of the tuples'.

        Args:
            slots: the tuples' rows.
            lookup: what is equal to what.
            step: the input whose step has a residual condition that must be true, too; None for no condition.
            logical_times: rows alive then; without it, rows alive at any time of the micro-batch.
            committed: only rows that the micro-batch leaves alone.

        Returns:
            Positions of tuples, and slots, by tuple.
        """
        kernels, xp = self.kernels, self.kernels.xp
        table, side = self.tables[lookup.input_index], self.sides[lookup.input_index]
        sources = self._columns(slots, [source for _, source in lookup.pairs])
        names = [f"{number}" for number in range(len(lookup.pairs))]
        types = [self.description.key_types[lookup.input_index, column] for column, _ in lookup.pairs]
        # of a column that must equal several, one is enough to look it up by
        first = [n for n, (c, _) in enumerate(lookup.pairs) if c not in {c for c, _ in lookup.pairs[:n]}]
        hashed, hashed_types = [names[n] for n in first], [types[n] for n in first]
        hashes = kernels.hash_rows(sources, hashed, hashed_types)
        valid = kernels.valid(sources, names)
        rows = None if valid is None else xp.flatnonzero(valid)
        index, probe_rows = table.index(lookup.key_set), kernels.sort(kernels.entries(hashes, 0, rows))

        def matched(piece: Array) -> MatchedSlots:
            found, slot = layouts.unpaired(kernels.sort(piece))
            self.candidates += int(slot.size)
            return match(
                kernels,
                (found if rows is None else rows[found], slot),
                types,
                (Columns(sources, names), Columns(table.store, [c for c, _ in lookup.pairs])),
                alive=lambda found, others: self._alive(
                    table, side, others, None if logical_times is None else logical_times[found], committed=committed
                ),
                residual=lambda found, others: self._fulfilling(
                    step,
                    lambda number: others if number == lookup.input_index else slots[number][found],
                    int(others.size),
                ),
            )

        pieces = in_pieces(kernels, probe_rows, lambda some, most: index.meet(some, staged=not committed, at_most=most))
        return in_one(xp, map(matched, pieces), self.refuse)

    def _alive(
        self, table: KeyedTable, side: Lifetimes, slots: Slots, logical_times: LogicalTimes | None, *, committed: bool
    ) -> Array | None:
        """Mask of rows that are there; None for all."""
        xp = self.kernels.xp
        if committed:
            return table.status.values[slots] == LIVE
        if table.all_alive and not side.any_death and len(table) == side.first_new:
            return None
        status = table.status.values[slots]
        gone = status == DEAD
        if logical_times is not None:
            new = xp.flatnonzero(slots >= side.first_new)
            if new.size:
                row, when = slots[new] - side.first_new, logical_times[new]
                gone[new] = side.births[row] >= when
                if side.deaths is not None:
                    gone[new] |= side.deaths[row] <= when
            if side.killed.size:
                dying = xp.flatnonzero(status == DYING)
                gone[dying] = side.killed_at[xp.searchsorted(side.killed, slots[dying])] <= logical_times[dying]
        return ~gone

    def _fulfilling(self, step: int | None, slots: Callable[[int], Slots], length: int) -> Positions | None:
        """Positions of n tuples for which a step's residual condition is true; None for all. ``slots``: of an input."""
        condition = None if step is None else self.description.conditions[step - 1]
        if step is None or condition is None:
            return None
        rows = {
            source.name: (self.tables[number].store, slots(number))
            for number, source in enumerate(self.description.inputs[: step + 1])
            if condition.columns.get(source.name)
        }
        return fulfilling(self.kernels, condition, rows, length, present=False)

    def bind(self, tuples: Tuples, lookup: InputLookup) -> Tuples:
        """The tuples with the rows of one more input; without any, a tuple is dropped."""
        found, slots = self.matches(tuples.slots, lookup, logical_times=tuples.logical_times)
        made = tuples.pick(found)
        made.slots[lookup.input_index] = slots
        return made

    def check(self, tuples: Tuples, input_index: int) -> Tuples:
        """The tuples for which a step's residual condition is true."""
        kept = self._fulfilling(input_index, tuples.slots.__getitem__, tuples.size)
        return tuples if kept is None else tuples.pick(kept)

    def extend(self, tuples: Tuples, lookup: InputLookup, hidden: tuple[int, Slots] | None) -> Tuples:
        """The tuples with the rows of one more input by its own step.

        Args:
            tuples: of all inputs before it.
            lookup: the step's.
            hidden: for a left step: an input, and ascending slots of rows of it that have no unmatched row although
                they have no match just now.
        """
        xp, input_index = self.kernels.xp, lookup.input_index
        found, slots = self.matches(tuples.slots, lookup, step=input_index, logical_times=tuples.logical_times)
        if self.description.steps[input_index - 1].how == "left":
            alone = xp.ones(tuples.size, bool)
            alone[found] = False
            if hidden is not None and hidden[1].size:
                alone &= ~is_in(xp, tuples.slots[hidden[0]], hidden[1])
            rest = xp.flatnonzero(alone)
            if rest.size:
                found = xp.concatenate([found, rest])
                slots = xp.concatenate([slots, xp.full(rest.size, NO_ROW, np.int64)])
        made = tuples.pick(found)
        made.slots[input_index] = slots
        return made

    def _columns(self, slots: Mapping[int, Slots], sources: Sequence[tuple[int, str]]) -> Frame:
        """Columns of several inputs' rows side by side, named by position."""
        wanted: dict[int, dict[str, None]] = {}
        for input_index, column in sources:
            wanted.setdefault(input_index, {})[column] = None
        frames = {
            p: self.tables[p].store.take(slots[p], list(columns), present=not may_be_null(self.description, p))
            for p, columns in wanted.items()
        }
        return self.kernels.combine([(f"{n}", frames[p], column) for n, (p, column) in enumerate(sources)])

    def events(self, input_index: int) -> Tuples:
        """The changes of one input: each row that comes, each that goes."""
        slots, logical_times, signs = self.sides[input_index].events(self.kernels)
        return fresh(self.kernels, {input_index: slots}, logical_times, signs)


def may_be_null(description: MultiJoin, input_index: int) -> bool:
    """Tells whether nulls may stand for rows of an input: those of a left step."""
    return input_index > 0 and description.steps[input_index - 1].how == "left"


def fresh(kernels: Kernels, slots: dict[int, Slots], logical_times: LogicalTimes, signs: Array) -> Tuples:
    """Tuples of changes, joined rows all of them."""
    xp, size = kernels.xp, int(logical_times.size)
    return Tuples(slots, logical_times, signs, xp.ones(size, np.int8), xp.zeros(size, np.int8))


def is_in(xp: Any, values: Array, among: Array) -> Array:
    """Mask of values that are among ascending ones (at least one)."""
    at = xp.minimum(xp.searchsorted(among, values), among.size - 1)
    return among[at] == values
