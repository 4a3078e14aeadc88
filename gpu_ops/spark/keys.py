"""The unique key that a join's changelog has, from the unique keys of its inputs.

A row of the changelog is one of the first input's, at most one of each further input. So the inputs' keys together are
one, and an input that has at most one row per join key adds nothing to it. What could be null is never part
of a key: not the columns of an input that may be padded.

A key is of use only if the changes of one row reach the next join in their order. The partitions of a join
give theirs side by side, so what rows are distributed by is made part of the key: then all changes
of a key come from one partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpu_ops.bounded import Aggregate, CoGroup, Description
from gpu_ops.joins import Join
from gpu_ops.multi import Equality, MultiJoin

_Column = tuple[int, str]
"""An input's number and one of its columns."""


class _Chain(NamedTuple):
    """A join as a chain of steps, each of which joins one more input."""

    keys: tuple[tuple[str, ...] | None, ...]
    """The unique key of each input."""
    lefts: tuple[bool, ...]
    """Of each step: whether it is a left join."""
    on: tuple[tuple[Equality, ...], ...]
    """Of each step."""
    single: tuple[bool, ...]
    """Of each input: whether it has at most one row per join key."""
    shuffled: tuple[tuple[str, ...], ...]
    """What rows are distributed by: of each value, its column in every input."""
    shown: dict[_Column, str]
    """Columns of the changelog by what they show."""


def unique_key(join: Description) -> tuple[str, ...] | None:
    """Columns of a join's changelog that identify a row of it and are never null; None where none is known.

    None as well where a TTL makes the join forget rows that it does not retract.
    """
    if any(source.ttl_ms is not None for source in join.inputs):
        return None
    if isinstance(join, CoGroup):
        return None
    if isinstance(join, Aggregate):
        # Null is a group, and no part of a key: the input's own key alone is sure to have none.
        return join.by if join.by and set(join.by) <= set(join.source.unique_key or ()) else None
    if isinstance(join, MultiJoin):
        return _of_chain(_multi_way(join))
    if join.interval is not None or join.how == "full":
        return None
    return _of_left_rows(join) if join.how in ("semi", "anti") else _of_chain(_two_way(join))


def _of_left_rows(join: Join) -> tuple[str, ...] | None:
    """Of a semi or anti join, whose rows are the left input's."""
    key = join.left.unique_key
    if key is None:
        return None
    more: list[str] = []
    for position in join.distribution:
        by = join.keys[position]
        if by.left in (*key, *more):
            continue
        if join.how == "anti" or by.null_safe:
            return None  # may be null
        more.append(by.left)
    return (*key, *more)


def _two_way(join: Join) -> _Chain:
    order = (1, 0) if join.how == "right" else (0, 1)
    on = tuple(Equality(0, k.column(order[0]), k.column(order[1]), k.null_safe) for k in join.keys)
    return _Chain(
        keys=tuple(join.inputs[n].unique_key for n in order),
        lefts=(join.how != "inner",),
        on=(on,),
        single=tuple(join.layout(n) == "join_key_contains_unique_key" for n in order),
        shuffled=tuple(tuple(by.columns[n] for n in order) for by in join.shuffled_by),
        shown={(order.index(c.side), c.column): c.name for c in join.output},
    )


def _multi_way(join: MultiJoin) -> _Chain:
    return _Chain(
        keys=tuple(source.unique_key for source in join.inputs),
        lefts=tuple(step.how == "left" for step in join.steps),
        on=tuple(step.on for step in join.steps),
        single=tuple(join.layout(n) == "join_key_contains_unique_key" for n in range(len(join.inputs))),
        shuffled=tuple(by.columns for by in join.shuffled_by),
        shown={(c.side, c.column): c.name for c in join.output},
    )


def _of_chain(chain: _Chain) -> tuple[str, ...] | None:
    key = _identity(chain)
    if key is None:
        return None
    equal = _equal_columns(chain)
    padded = {number for number, left in enumerate(chain.lefts, start=1) if left}
    for columns in chain.shuffled:
        # A step that is an inner join leaves no row whose common key is null.
        never_null = columns[0] in (chain.keys[0] or ()) or any(
            not left and _strict(chain.on[step], columns, step + 1) for step, left in enumerate(chain.lefts)
        )
        if not never_null:
            return None
        key.append((0, columns[0]))
    names: list[str] = []
    taken: set[frozenset[_Column]] = set()
    for column in key:
        same = equal.get(column, frozenset([column]))
        if same in taken:
            continue
        taken.add(same)
        candidates = [column, *sorted(c for c in same if c[0] not in padded)]
        name = next((chain.shown[c] for c in candidates if c in chain.shown), None)
        if name is None:
            return None
        names.append(name)
    return tuple(dict.fromkeys(names))


def _identity(chain: _Chain) -> list[_Column] | None:
    """Columns that identify a row of a chain, none of an input that may be padded."""
    key = None if chain.keys[0] is None else [(0, c) for c in chain.keys[0]]
    for number, (left, on) in enumerate(zip(chain.lefts, chain.on, strict=True), start=1):
        own = None if chain.keys[number] is None else [(number, c) for c in chain.keys[number] or ()]
        led_to = {(k.input, k.column) for k in on}
        if chain.single[number] and key is not None:
            continue
        if left:
            return None
        if own is not None and key is not None and set(key) <= led_to:
            key = own  # at most one row before it per row of this input
        else:
            key = None if own is None or key is None else [*key, *own]
    return key


def _strict(on: Sequence[Equality], columns: tuple[str, ...], number: int) -> bool:
    """Whether a step compares its own column of a common key by ``=``."""
    return any(not k.null_safe and k.own == columns[number] and k.column == columns[k.input] for k in on)


def _equal_columns(chain: _Chain) -> dict[_Column, frozenset[_Column]]:
    """For each column that an inner step compares by ``=`` those that are equal to it in every row.

    What a left step compares is equal only where it has found a match.
    """
    classes: list[set[_Column]] = []
    for number, (left, on) in enumerate(zip(chain.lefts, chain.on, strict=True), start=1):
        for key in on:
            if left or key.null_safe:
                continue
            pair = {(key.input, key.column), (number, key.own)}
            met = [c for c in classes if c & pair]
            classes = [c for c in classes if not c & pair] + [pair.union(*met)]
    return {column: frozenset(c) for c in classes for column in c}
