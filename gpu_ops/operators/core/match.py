"""Matching: candidates of an index become matches.

An index finds rows by a hash (and perhaps a range of times); a candidate is a match if its row is alive at the instant
asked for, really equal in the key, and the residual condition is true of the pair. The first two are asked of all
candidates and looked at together: each look is a wait for the GPU. Every operator's matches come from `match`; nothing
else compares keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.conditions import Condition
from gpu_ops.kernels import Frame, Kernels, Store

Pairs = tuple[Array, Slots]
"""n positions (or slots) of the rows that look, and n slots of rows they find: parallel int64 arrays."""


class Columns(NamedTuple):
    """Columns that rows are compared by.

    Attributes:
        take: gives rows of these columns by position or slot, of which none is -1.
        names: the columns, in the order of their types.
    """

    take: Callable[[Array, Sequence[str]], Frame]
    names: Sequence[str]

    @classmethod
    def of_frame(cls, kernels: Kernels, frame: Frame, names: Sequence[str]) -> Columns:
        """Columns of a frame; rows by position."""
        return cls(lambda rows, columns: kernels.take(frame, rows, columns, present=True), names)

    @classmethod
    def of_store(cls, store: Store, names: Sequence[str]) -> Columns:
        """Columns of a store; rows by slot."""
        return cls(lambda rows, columns: store.take(rows, columns, present=True), names)


def equal(
    kernels: Kernels, types: Sequence[pa.DataType], one: tuple[Columns, Array], other: tuple[Columns, Array]
) -> Array:
    """Mask of pairs whose rows are equal in every column, null to null.

    Args:
        kernels: the backend.
        types: what the columns are compared as, one each.
        one: columns, and the n rows of each pair's first part.
        other: likewise of its second part.
    """
    (first, rows), (second, slots) = one, other
    return kernels.equal_rows(
        first.take(rows, first.names), first.names, second.take(slots, second.names), second.names, types
    )


def fulfilling(
    kernels: Kernels,
    condition: Condition | None,
    rows: Mapping[str, tuple[Store, Slots]],
    length: int,
    *,
    present: bool = True,
) -> Positions | None:
    """Positions of rows of several inputs, side by side, for which a residual condition is true; None for all.

    Args:
        kernels: the backend.
        condition: None for none.
        rows: by input, its store and n slots; inputs that the condition does not name may be left out.
        length: n.
        present: whether none of the slots is -1.
    """
    if condition is None or not length:
        return None
    frames = {
        name: store.take(slots, list(condition.columns[name]), present=present)
        for name, (store, slots) in rows.items()
        if condition.columns.get(name)
    }
    true = kernels.evaluate(condition, frames, length)
    return None if bool(true.all()) else kernels.xp.flatnonzero(true)


def match(
    kernels: Kernels,
    candidates: Pairs,
    types: Sequence[pa.DataType],
    columns: tuple[Columns, Columns],
    *,
    alive: Callable[[Array, Slots], Array | None] | None = None,
    residual: Callable[[Array, Slots], Positions | None] | None = None,
) -> Pairs:
    """The candidates that match, in their order.

    Args:
        kernels: the backend.
        candidates: what an index found.
        types: what keys are compared as; none where there is no key.
        columns: the key columns of the rows that look, and of those found.
        alive: gives, of pairs, a mask of those whose found row is there; None for all.
        residual: gives, of pairs, the positions of those for which the residual condition is true; None for all.
    """
    pairs, mask = candidates, None
    if alive is not None:
        mask = alive(*pairs)
    if types and pairs[0].size:
        same = equal(kernels, types, (columns[0], pairs[0]), (columns[1], pairs[1]))
        mask = same if mask is None else mask & same
    pairs = _kept(pairs, positions(kernels.xp, mask))
    if residual is not None and pairs[0].size:
        pairs = _kept(pairs, residual(*pairs))
    return pairs


def positions(xp: Any, mask: Array | None) -> Positions | None:
    """Where a mask is true; None where that is everywhere."""
    if mask is None:
        return None
    found = xp.flatnonzero(mask)
    return None if found.size == mask.size else found


def _kept(pairs: Pairs, at: Positions | None) -> Pairs:
    return pairs if at is None else (pairs[0][at], pairs[1][at])
