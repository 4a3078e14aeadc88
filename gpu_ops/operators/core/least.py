"""The least of what is there, moment by moment: which rows are the first n while rows come and go.

A segment tree over the moments (Bentley 1977): a row that is there from one moment to another is written at the few
nodes that make up this span, of each node only the n least are kept, and each node's are handed to the two below it.
Rows of one group have their moments side by side, so that one tree serves all groups.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpu_ops.arrays import Array, Positions, value_changes
from gpu_ops.kernels import Kernels

NONE: Final = np.iinfo(np.int64).max
"""Stands where fewer than n are there."""


def least(kernels: Kernels, begins: Positions, ends: Positions, ranks: Array, *, size: int, n: int = 1) -> Array:
    """The n least ranks at each moment.

    Args:
        kernels: the backend.
        begins: m moments from which on a rank is there.
        ends: m moments from which on it is not any more.
        ranks: m different numbers (int64) from 0, below 2**31.
        size: how many moments there are, at most 2**31.
        n: how many are wanted.

    Returns:
        An array of ``size`` rows and n columns (int64): each row ascending, `NONE` behind the last.
    """
    xp, levels = kernels.xp, max(0, size - 1).bit_length()
    nodes: list[tuple[Array, Array]] = []
    low, high = begins, ends
    for _ in range(levels + 1):
        # a span's ends that are no ends of a node of the next level have a node of this one
        inside = xp.flatnonzero(low < high)
        low, high, ranks = low[inside], high[inside], ranks[inside]
        first, last = xp.flatnonzero(low & 1), xp.flatnonzero(high & 1)
        nodes.append((xp.concatenate([low[first], high[last] - 1]), xp.concatenate([ranks[first], ranks[last]])))
        low, high = (low + 1) >> 1, high >> 1
    found = xp.full((1, n), NONE, np.int64)
    for level in range(levels, -1, -1):
        width = ((size - 1) >> level) + 1
        found = found[xp.arange(width, dtype=np.int64) >> 1]
        _write(xp, found, *nodes[level], n)
    return found


def _write(xp: Any, found: Array, nodes: Positions, ranks: Array, n: int) -> None:
    """Take ranks into the n least of their nodes, which are rows of what was found."""
    if not nodes.size:
        return
    made = xp.sort((nodes << 32) | ranks)
    nodes, ranks = made >> 32, made & 0xFFFFFFFF
    opens = value_changes(xp, nodes)
    starts = xp.flatnonzero(opens)
    own = xp.cumsum(opens) - 1
    place = xp.arange(nodes.size, dtype=np.int64) - starts[own]
    few = xp.flatnonzero(place < n)
    added = xp.full((starts.size, n), NONE, np.int64)
    added[own[few], place[few]] = ranks[few]
    where = nodes[starts]
    if n == 1:
        found[where] = xp.minimum(found[where], added)
    else:
        found[where] = xp.sort(xp.concatenate([found[where], added], axis=1), axis=1)[:, :n]
