"""Rows on their way out: which state rows they are made of, of what kind, and in what order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.core.groups import Groups, within

# Order within one instant: a pad's retraction comes before the rows that replace it, a pad after
# the rows it replaces.
PAD_GOES, JOINED, PAD_COMES = 0, 1, 2


@dataclasses.dataclass
class Rows:
    """Output rows: parallel arrays. A slot of -1 stands for a row of nulls."""

    kinds: Array
    left: Slots
    right: Slots
    instants: Instants
    removed: int | None = None
    """Of a net change: so many rows leave, and stand first; the others come."""

    @property
    def size(self) -> int:
        """How many."""
        return int(self.kinds.size)

    def pick(self, positions: Positions) -> Rows:
        """Some of the rows, in the order given."""
        return Rows(self.kinds[positions], self.left[positions], self.right[positions], self.instants[positions])


def join_rows(kernels: Kernels, parts: Sequence[Rows]) -> Rows:
    """Several groups of rows, one after the other."""
    fields = ("kinds", "left", "right", "instants")
    return Rows(*(kernels.xp.concatenate([getattr(p, f) for p in parts]) for f in fields))


def net_rows(xp: Any, left: Slots, right: Slots, removed: int) -> Rows:
    """The rows of a net change, of which so many, the first, leave; all at one instant."""
    kinds = xp.full(left.size, INSERT, np.int8)
    kinds[:removed] = DELETE
    return Rows(kinds, left, right, xp.zeros(left.size, np.int64), removed)


def in_order(kernels: Kernels, rows: Rows, rank: Array) -> Rows:
    """Rows by the event that caused them, then by rank within it, else as they stand."""
    return rows.pick(layouts.sorted_positions(kernels.xp, (rows.instants << layouts.RANK_BITS) | rank))


def fold(
    kernels: Kernels, frame: Frame, removes: Array, columns: tuple[str, ...], types: tuple[pa.DataType, ...]
) -> Positions:
    """Positions of the rows that are left when equal rows added and removed cancel each other.

    Args:
        kernels: the backend.
        frame: the rows' values.
        removes: mask of rows that remove; the others add.
        columns: the columns compared.
        types: their types.
    """
    xp = kernels.xp
    hashes = kernels.hash_rows(frame, columns, types)
    groups = Groups(kernels, frame, columns, types, hashes)
    number = int(groups.leader.size)
    sign = xp.where(removes[groups.order], -1, 1)
    net = xp.zeros(number, np.int64)
    kernels.scatter_add(net, groups.group, sign)
    # of each group, the first |net| rows that point the net's way
    right_way = sign * net[groups.group] > 0
    kept = xp.flatnonzero(right_way & (within(xp, groups, right_way) < xp.abs(net)[groups.group]))
    return xp.sort(groups.order[kept])
