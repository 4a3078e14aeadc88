"""How a multi-way join looks rows up: for a change of each input, which inputs are found by what, in what order.

A row of the result is a *tuple*: one row of each input, or none where a left step found none. A change of input i is
completed to tuples in two parts:

- *bind*: the inputs that step i's ``=`` leads to, and those that their own steps' ``=`` lead to, down to the first.
  They must all be there, so what ``=`` makes equal can be looked up from either end: a change of the third input
  finds its rows of the first by all columns they share, however many rows of the first have the same common key.
- *extend*: every other input, in the join's order, by its own step: rows that match, or for a left step none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gpu_ops.descriptions.keys import InputColumn, equal_classes
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.state.columns import KeySet

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
