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

from gpu_ops.descriptions.keys import Equality, InputColumn, equal_classes


class Chain(NamedTuple):
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
    shown: dict[InputColumn, str]
    """Columns of the changelog by what they show."""


def of_chain(chain: Chain) -> tuple[str, ...] | None:
    """The unique key of a chain's changelog, by the names of its columns; None where none is known."""
    key = _identity(chain)
    if key is None:
        return None
    # what a left step compares is equal only where it has found a match
    equal = equal_classes(
        ((k.input, k.column), (number, k.own))
        for number, (left, on) in enumerate(zip(chain.lefts, chain.on, strict=True), start=1)
        for k in on
        if not left and not k.null_safe
    )
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
    taken: set[int | InputColumn] = set()
    for column in key:
        its = equal.get(column, column)
        if its in taken:
            continue
        taken.add(its)
        candidates = [column, *sorted(c for c, number in equal.items() if number == its and c[0] not in padded)]
        name = next((chain.shown[c] for c in candidates if c in chain.shown), None)
        if name is None:
            return None
        names.append(name)
    return tuple(dict.fromkeys(names))


def _identity(chain: Chain) -> list[InputColumn] | None:
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
