"""Matching: candidates of an index become matches.

An index finds rows by a hash (and perhaps a range of times); a candidate is a match if its row is alive at the instant
asked for, really equal in the key, and the residual condition is true of the pair. The first two are asked of all
candidates and looked at together: each look is a wait for the GPU. Every operator's matches come from here, and
nothing else compares keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.conditions import Condition
from gpu_ops.kernels import Among, Columns, Kernels, Store, TooMany

PIECE: Final = 1 << 21
"""Candidates looked at together."""

Pairs = tuple[Array, Slots]
"""n positions (or slots) of the rows that look, and n slots of rows they find: parallel int64 arrays."""

Residual = Callable[[Array, Slots], Positions | None]
"""Gives, of pairs, the positions of those for which a residual condition is true; None for all."""


def equal(
    kernels: Kernels,
    types: Sequence[pa.DataType],
    one: tuple[Columns, Array],
    other: tuple[Columns, Array],
    where: Array | None = None,
) -> Array:
    """Mask of pairs whose rows are equal in every column, null to null; see `gpu_ops.kernels.Kernels.equal_at`."""
    return kernels.equal_at(types, one, other, where)


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
    residual: Residual | None = None,
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
    kept = None if mask is None else kernels.xp.flatnonzero(mask)
    if kept is not None and kept.size < pairs[0].size:
        pairs = pairs[0][kept], pairs[1][kept]
    return _fulfilling(pairs, residual)


def match_among(
    kernels: Kernels,
    types: Sequence[pa.DataType],
    candidates: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    by_candidate: bool = False,
    residual: Residual | None = None,
) -> Pairs:
    """As `match`, where the rows that are there are known by their state: the backend looks at all of it at once.

    Args:
        kernels: the backend.
        types: what keys are compared as; none where there is no key.
        candidates: n pairs, each one number; may be changed.
        columns: the key columns of the rows that look, and of those found.
        among: the rows that are there; None for all.
        by_candidate: the rows found come first in the pairs.
        residual: as of `match`.

    Returns:
        The matches, ordered as the pairs are.
    """
    return _fulfilling(kernels.matches(types, candidates, columns, among, by_candidate=by_candidate), residual)


def sole_match(
    kernels: Kernels,
    types: Sequence[pa.DataType],
    candidates: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    size: int,
) -> Slots:
    """As `match_among`, where each of ``size`` rows that look matches one at most: its slot, -1 for none, of each."""
    return kernels.sole_matches(types, candidates, columns, among, size=size)


def in_pieces(kernels: Kernels, needles: Array, candidates: Callable[[Array, int | None], Array]) -> Iterator[Array]:
    """Candidates of needles, no more of them at a time than `PIECE`, or than one needle has.

    Args:
        kernels: the backend.
        needles: entries of an index.
        candidates: gives those of some of them, if they are not more than so many.
    """
    most, waiting = 64 if kernels.tiny_segments else PIECE, [needles]
    while waiting:
        part = waiting.pop()
        try:
            found = candidates(part, most if part.size > 1 else None)
        except TooMany:
            waiting += [part[part.size // 2 :], part[: part.size // 2]]
        else:
            yield found


def _fulfilling(pairs: Pairs, residual: Residual | None) -> Pairs:
    kept = residual(*pairs) if residual is not None and pairs[0].size else None
    return pairs if kept is None else (pairs[0][kept], pairs[1][kept])
