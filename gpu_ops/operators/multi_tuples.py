"""Tuples of a multi-way join on their way to the output: a change, completed input by input.

Each holds a change's instant and one slot per input found so far. It meets the rows that are alive at that
instant, so any number of changes are completed together, each as if it had come alone.

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
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.descriptions.keys import InputColumn, equal_classes
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.kernels import Columns, Frame, Kernels
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.match import Pairs, fulfilling, in_one, in_pieces, match
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DEAD, DYING, LIVE, KeySet

Pair = tuple[str, tuple[int, str]]
"""A column of the input that is looked up, and the (input, column) it equals."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows of one input by columns of others.

    Attributes:
        input_index: the input.
        key_set: which of its key sets.
        pairs: its columns, and the (input, column) each must equal; the first of a column is hashed.
    """

    input_index: int
    key_set: int
    pairs: tuple[Pair, ...]


@dataclasses.dataclass(frozen=True)
class Bind:
    """Find rows of an input that must be there."""

    lookup: Lookup


@dataclasses.dataclass(frozen=True)
class Extend:
    """Find an input's rows by its own step, or none."""

    input_index: int


@dataclasses.dataclass(frozen=True)
class CheckCondition:
    """Evaluate the residual condition of a step whose inputs are all known."""

    input_index: int


Operation = Bind | Extend | CheckCondition


@dataclasses.dataclass(frozen=True)
class LookupPlan:
    """How tuples are found.

    Attributes:
        key_sets: per input, by what its rows are looked up.
        steps: per input but the first, the lookup of its own step (index 0 is unused).
        paths: per input, from its row to the tuple of everything to its left.
        counted: per input, the input whose rows count their matches in it; None if the step is no left join, or
            looks at several inputs.
    """

    key_sets: tuple[tuple[KeySet, ...], ...]
    steps: tuple[Lookup, ...]
    paths: tuple[tuple[Operation, ...], ...]
    counted: tuple[int | None, ...]


def make_plan(join: MultiJoin) -> LookupPlan:
    """The plan of a join."""
    key_sets: list[list[KeySet]] = [[] for _ in join.inputs]

    def lookup(input_index: int, pairs: list[Pair]) -> Lookup:
        names = join.inputs[input_index].schema.names
        columns = tuple(sorted({column for column, _ in pairs}, key=names.index))
        keys = KeySet(columns, tuple(join.key_types[input_index, c] for c in columns), columns)
        if keys not in key_sets[input_index]:
            key_sets[input_index].append(keys)
        ordered = sorted(pairs, key=lambda p: names.index(p[0]))
        return Lookup(input_index, key_sets[input_index].index(keys), tuple(ordered))

    steps = [Lookup(0, 0, ())]
    for input_index, step in enumerate(join.steps, start=1):
        steps.append(lookup(input_index, [(k.own, (k.input, k.column)) for k in step.on if not k.null_safe]))
    counted: list[int | None] = [None]
    for input_index, step in enumerate(join.steps, start=1):
        seen = join.references[input_index - 1]
        counted.append(next(iter(seen)) if step.how == "left" and len(seen) == 1 else None)
    paths = [(), *(_path(join, number, counted[number], lookup) for number in range(1, len(join.inputs)))]
    return LookupPlan(tuple(tuple(k) for k in key_sets), tuple(steps), tuple(paths), tuple(counted))


def _path(
    join: MultiJoin, input_index: int, counted: int | None, lookup: Callable[[int, list[Pair]], Lookup]
) -> tuple[Operation, ...]:
    """From an input's row to the tuple of everything to its left: first what must be there, then the rest."""
    path: list[Operation] = []
    closure = _closure(join, input_index)
    # columns that the steps of the closure make equal
    group = equal_classes(
        ((k.input, k.column), (number, k.own))
        for number in sorted(closure - {0})
        for k in join.steps[number - 1].on
        if not k.null_safe
    )
    compared, bound = set[int](), {input_index}
    unchecked = [p for p in sorted(closure) if p and join.conditions[p - 1] is not None]

    def now(operation: Bind | Extend, found: int) -> None:
        path.append(operation)
        bound.add(found)
        for number in list(unchecked):
            condition = join.conditions[number - 1]
            assert condition is not None
            if {p for p, i in enumerate(join.inputs) if condition.columns.get(i.name)} <= bound:
                path.append(CheckCondition(number))
                unchecked.remove(number)

    while bound < closure:
        options = {p: _pairs(group, compared, bound, p) for p in closure - bound}
        best = max(options, key=lambda p: _rank(join, options[p], p))
        chosen = counted if len(bound) == 1 and counted is not None else best
        compared |= {group[chosen, column] for column, _ in options[chosen]}
        now(Bind(lookup(chosen, options[chosen])), chosen)
    for other in range(1, input_index):
        if other not in bound:
            now(Extend(other), other)
    return tuple(path)


def _closure(join: MultiJoin, input_index: int) -> set[int]:
    """The inputs that are there whenever a row of this one is part of a tuple, itself included."""
    found, todo = {input_index}, [input_index]
    while todo:
        number = todo.pop()
        for key in join.steps[number - 1].on if number else ():
            if not key.null_safe and key.input not in found:
                found.add(key.input)
                todo.append(key.input)
    return found


def _pairs(group: dict[InputColumn, int], compared: set[int], bound: set[int], input_index: int) -> list[Pair]:
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


def _rank(join: MultiJoin, pairs: list[Pair], input_index: int) -> tuple[bool, int, int]:
    """What is best looked up next: by a unique key, else by most columns."""
    columns = {column for column, _ in pairs}
    unique = join.inputs[input_index].unique_key
    return bool(columns) and unique is not None and set(unique) <= columns, len(columns), -input_index


NO_ROW = -1


@dataclasses.dataclass
class Tuples:
    """n tuples in the making: parallel arrays.

    Attributes:
        slots: per input found so far n slots, -1 where a left step found none.
        instants: when the change happens.
        signs: 1 for what comes, -1 for what goes.
        ranks: order within an instant, see `gpu_ops.operators.core.emission`.
        pads: what the change does to the pad beside it: 1 it comes, -1 it goes, 0 neither.
    """

    slots: dict[int, Slots]
    instants: Instants
    signs: Array
    ranks: Array
    pads: Array

    @property
    def size(self) -> int:
        """How many."""
        return int(self.instants.size)

    def pick(self, positions: Positions) -> Tuples:
        """Some of them, repeated where a position is."""
        rest = (a[positions] for a in (self.instants, self.signs, self.ranks, self.pads))
        return Tuples({p: s[positions] for p, s in self.slots.items()}, *rest)


def join_tuples(kernels: Kernels, parts: Sequence[Tuples]) -> Tuples:
    """Several groups of tuples with the same inputs, one after the other."""
    cat = kernels.xp.concatenate
    slots = {input_index: cat([p.slots[input_index] for p in parts]) for input_index in parts[0].slots}
    fields = ("instants", "signs", "ranks", "pads")
    return Tuples(slots, *(cat([getattr(p, f) for p in parts]) for f in fields))


class Finder:
    """Looks rows up for one micro-batch.

    Args:
        join: the description.
        kernels: the backend.
        tables: one per input, prepared.
        sides: their rows' lifetimes.
        check: told now and then how many rows there are; it may refuse them.
    """

    def __init__(
        self,
        join: MultiJoin,
        kernels: Kernels,
        tables: Sequence[KeyedTable],
        sides: Sequence[Lifetimes],
        *,
        check: Callable[[int], None],
    ) -> None:
        self._check = check
        self.join, self.kernels, self.tables, self.sides = join, kernels, tables, sides
        self.candidates = 0

    def matches(
        self,
        slots: Mapping[int, Slots],
        lookup: Lookup,
        *,
        step: int | None = None,
        instants: Instants | None = None,
        committed: bool = False,
    ) -> tuple[Positions, Slots]:
        """Rows of one input whose key equals columns of the tuples'.

        Args:
            slots: the tuples' rows.
            lookup: what is equal to what.
            step: the input whose step has a residual condition that must be true, too; None for no condition.
            instants: rows alive then; without it, rows alive at any time of the micro-batch.
            committed: only rows that the micro-batch leaves alone.

        Returns:
            Positions of tuples, and slots, by tuple.
        """
        kernels, xp = self.kernels, self.kernels.xp
        table, side = self.tables[lookup.input_index], self.sides[lookup.input_index]
        sources = self._columns(slots, [source for _, source in lookup.pairs])
        names = [f"{number}" for number in range(len(lookup.pairs))]
        types = [self.join.key_types[lookup.input_index, column] for column, _ in lookup.pairs]
        # of a column that must equal several, one is enough to look it up by
        first = [n for n, (c, _) in enumerate(lookup.pairs) if c not in {c for c, _ in lookup.pairs[:n]}]
        hashed, hashed_types = [names[n] for n in first], [types[n] for n in first]
        hashes = kernels.hash_rows(sources, hashed, hashed_types)
        valid = kernels.valid(sources, names)
        rows = None if valid is None else xp.flatnonzero(valid)
        index, needles = table.index(lookup.key_set), kernels.entries(hashes, 0, rows)
        needles.sort()

        def matched(piece: Array) -> Pairs:
            found, slot = layouts.unpaired(xp.sort(piece))
            self.candidates += int(slot.size)
            return match(
                kernels,
                (found if rows is None else rows[found], slot),
                types,
                (Columns(sources, names), Columns(table.store, [c for c, _ in lookup.pairs])),
                alive=lambda found, others: self._alive(
                    table, side, others, None if instants is None else instants[found], committed=committed
                ),
                residual=lambda found, others: self._fulfilling(
                    step,
                    lambda number: others if number == lookup.input_index else slots[number][found],
                    int(others.size),
                ),
            )

        pieces = in_pieces(kernels, needles, lambda some, most: index.meet(some, staged=not committed, at_most=most))
        return in_one(xp, map(matched, pieces), self._check)

    def _alive(
        self, table: KeyedTable, side: Lifetimes, slots: Slots, instants: Instants | None, *, committed: bool
    ) -> Array | None:
        """Mask of rows that are there; None for all."""
        xp = self.kernels.xp
        if committed:
            return table.status.values[slots] == LIVE
        if table.all_alive and not side.any_death and len(table) == side.first_new:
            return None
        status = table.status.values[slots]
        gone = status == DEAD
        if instants is not None:
            new = xp.flatnonzero(slots >= side.first_new)
            if new.size:
                row, when = slots[new] - side.first_new, instants[new]
                gone[new] = side.births[row] >= when
                if side.deaths is not None:
                    gone[new] |= side.deaths[row] <= when
            if side.killed.size:
                dying = xp.flatnonzero(status == DYING)
                gone[dying] = side.killed_at[xp.searchsorted(side.killed, slots[dying])] <= instants[dying]
        return ~gone

    def _fulfilling(self, step: int | None, slots: Callable[[int], Slots], length: int) -> Positions | None:
        """Positions of n tuples for which a step's residual condition is true; None for all. ``slots``: of an input."""
        condition = None if step is None else self.join.conditions[step - 1]
        if step is None or condition is None:
            return None
        rows = {
            source.name: (self.tables[number].store, slots(number))
            for number, source in enumerate(self.join.inputs[: step + 1])
            if condition.columns.get(source.name)
        }
        return fulfilling(self.kernels, condition, rows, length, present=False)

    def bind(self, tuples: Tuples, lookup: Lookup) -> Tuples:
        """The tuples with the rows of one more input; without any, a tuple is dropped."""
        found, slots = self.matches(tuples.slots, lookup, instants=tuples.instants)
        made = tuples.pick(found)
        made.slots[lookup.input_index] = slots
        return made

    def check(self, tuples: Tuples, input_index: int) -> Tuples:
        """The tuples for which a step's residual condition is true."""
        kept = self._fulfilling(input_index, tuples.slots.__getitem__, tuples.size)
        return tuples if kept is None else tuples.pick(kept)

    def extend(self, tuples: Tuples, lookup: Lookup, hidden: tuple[int, Slots] | None) -> Tuples:
        """The tuples with the rows of one more input by its own step.

        Args:
            tuples: of all inputs before it.
            lookup: the step's.
            hidden: for a left step: an input, and ascending slots of rows of it that have no pad although they
                have no match just now.
        """
        xp, input_index = self.kernels.xp, lookup.input_index
        found, slots = self.matches(tuples.slots, lookup, step=input_index, instants=tuples.instants)
        if self.join.steps[input_index - 1].how == "left":
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
        frames = {p: self.tables[p].store.take(slots[p], list(columns)) for p, columns in wanted.items()}
        return self.kernels.combine([(f"{n}", frames[p], column) for n, (p, column) in enumerate(sources)])

    def events(self, input_index: int) -> Tuples:
        """The changes of one input: each row that comes, each that goes."""
        slots, instants, signs = self.sides[input_index].events(self.kernels)
        return fresh(self.kernels, {input_index: slots}, instants, signs)


def fresh(kernels: Kernels, slots: dict[int, Slots], instants: Instants, signs: Array) -> Tuples:
    """Tuples of changes, joined rows all of them."""
    xp, size = kernels.xp, int(instants.size)
    return Tuples(slots, instants, signs, xp.ones(size, np.int8), xp.zeros(size, np.int8))


def is_in(xp: Any, values: Array, among: Array) -> Array:
    """Mask of values that are among ascending ones (at least one)."""
    at = xp.minimum(xp.searchsorted(among, values), among.size - 1)
    return among[at] == values
