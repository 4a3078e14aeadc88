"""Matching: candidates of an index become matches.

An index finds rows by a hash (and perhaps a range of times); a candidate is a match if its row is alive at the logical
time asked for, really equal in the key, and the residual condition is true of the pair. The first two are asked of all
candidates and looked at together: each look is a wait for the GPU. Every operator's matches come from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.conditions import Condition
from gpu_ops.kernels import Among, Columns, Frame, Kernels, Store, TooMany
from gpu_ops.state.index import run_of
from gpu_ops.state.interval_table import IntervalTable
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import LIVE

PIECE: Final = 1 << 21
"""Candidates looked at together."""

MatchedSlots = tuple[Array, Slots]
"""n positions (or slots) of the rows that look, and n slots of rows they find: parallel int64 arrays."""

PairFilter = Callable[[Array, Slots], Positions | None]
"""Gives, of pairs, the positions of those for which a residual condition is true; None for all."""


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
    candidates: MatchedSlots,
    types: Sequence[pa.DataType],
    columns: tuple[Columns, Columns],
    *,
    alive: Callable[[Array, Slots], Array | None] | None = None,
    residual: PairFilter | None = None,
) -> MatchedSlots:
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
        same = kernels.equal_at(types, (columns[0], pairs[0]), (columns[1], pairs[1]))
        mask = same if mask is None else mask & same
    kept = None if mask is None else kernels.xp.flatnonzero(mask)
    if kept is not None and kept.size < pairs[0].size:
        pairs = pairs[0][kept], pairs[1][kept]
    return fulfilled(pairs, residual)


def match_among(
    kernels: Kernels,
    types: Sequence[pa.DataType],
    candidates: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    by_candidate: bool = False,
    residual: PairFilter | None = None,
) -> MatchedSlots:
    """Finds the candidates that match like `match`, by the state of rows: the backend looks at all of it at once.

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
    return fulfilled(kernels.matches(types, candidates, columns, among, by_candidate=by_candidate), residual)


def live_matches(table: KeyedTable | IntervalTable, candidates: MatchedSlots, probe_columns: Columns) -> MatchedSlots:
    """The candidates that match among a table's rows that are there and stay.

    Args:
        table: whose index found them.
        candidates: of it.
        probe_columns: the key columns of the rows that look.
    """
    status, stored = table.status.values, Columns(table.store, table.keys)
    return match(
        table.kernels,
        candidates,
        table.key_types,
        (probe_columns, stored),
        alive=lambda _, slots: status[slots] == LIVE,
    )


def first_equal(
    kernels: Kernels,
    keys: tuple[Frame, Hashes, tuple[str, ...]],
    others: tuple[Frame, Hashes, tuple[str, ...]],
    types: tuple[Any, ...],
    *,
    different: bool = False,
) -> Positions:
    """For each of n keys the position of the first of m others that is equal to it, null to null; -1 for none.

    Args:
        kernels: the backend.
        keys: n keys: frame, hashes, columns.
        others: m keys, likewise.
        types: the types they are compared in.
        different: no two of the others are equal.
    """
    xp, (first, second) = kernels.xp, (Columns(frame, names) for frame, _, names in (keys, others))
    if different and kernels.host is not None:
        run = run_of(kernels, kernels.sort(kernels.entries(others[1], 0)))
        found = kernels.sole([run], types, (first, second), keys[1], None)
        if found is not None:
            return cast("Positions", found)  # the others are entries by position
    order = kernels.argsort(others[1])
    sorted_ = others[1][order]
    at = xp.searchsorted(sorted_, keys[1], side="left")
    end = xp.searchsorted(sorted_, keys[1], side="right")
    positions = xp.full(keys[1].size, -1, np.int64)
    open_ = xp.flatnonzero(at < end)
    while open_.size:
        candidate = order[at[open_]]
        same = kernels.equal_at(types, (first, open_), (second, candidate))
        positions[open_[same]] = candidate[same]
        # another key of the same hash: the next one may be it
        open_ = open_[~same]
        at[open_] += 1
        open_ = open_[at[open_] < end[open_]]
    return positions


def in_pieces(
    kernels: Kernels, probe_rows: Array, candidates: Callable[[Array, int | None], Array], least: int = 0
) -> Iterator[Array]:
    """Candidates of probe rows, no more of them at a time than `PIECE`, or than one probe row has.

    Args:
        kernels: the backend.
        probe_rows: entries of an index.
        candidates: gives those of some of them, if they are not more than so many.
        least: so many may be looked at together, whatever `PIECE` is.
    """
    most, waiting = 64 if kernels.tiny_segments else max(PIECE, least), [probe_rows]
    while waiting:
        part = waiting.pop()
        try:
            piece = candidates(part, most if part.size > 1 else None)
        except TooMany:
            waiting += [part[part.size // 2 :], part[: part.size // 2]]
        else:
            yield piece


def in_one(
    xp: Any, parts: Iterable[MatchedSlots], check: Callable[[int], None], *, by_candidate: bool = False
) -> MatchedSlots:
    """Matches of candidates that were looked at piece by piece, as if in one piece.

    Args:
        xp: numpy or cupy.
        parts: of each piece.
        check: told after each how many there are so far; it may refuse them.
        by_candidate: they are ordered by the rows found.
    """
    pieces, total = [], 0
    for part in parts:
        pieces.append(part)
        total += int(part[0].size)
        check(total)
    if len(pieces) == 1:
        return pieces[0]
    rows, slots = (xp.concatenate(both) for both in zip(*pieces, strict=True))
    first, second = (slots, rows) if by_candidate else (rows, slots)
    first, second = layouts.unpaired(xp.sort(layouts.pairs(first, second)))
    return (second, first) if by_candidate else (first, second)


def fulfilled(pairs: MatchedSlots, residual: PairFilter | None) -> MatchedSlots:
    """Pairs for which a residual condition is true, which need not be there."""
    kept = residual(*pairs) if residual is not None and pairs[0].size else None
    return pairs if kept is None else (pairs[0][kept], pairs[1][kept])
