"""Rows grouped by equal values, and running numbers within groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Hashes, Positions, value_changes
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.core.match import Columns, equal


class Groups:
    """The rows of a frame grouped by equal columns; within a group, in their own order.

    Attributes:
        order: n row positions, group by group.
        group: n group numbers, for the rows in that order.
        first: n flags: first of its group.
        starts: where they are, one per group.
        leader: one row position per group.
    """

    def __init__(
        self, kernels: Kernels, frame: Frame, columns: tuple[str, ...], types: tuple[Any, ...], hashes: Hashes
    ) -> None:
        xp = kernels.xp
        # Positions in the lower bits: one sort of values, and few hashes are alike in what is left of them.
        bits = np.uint64(hashes.size.bit_length())
        lower = (np.uint64(1) << bits) - np.uint64(1)
        packed = hashes & ~lower
        packed |= xp.arange(hashes.size, dtype=np.uint64)
        packed.sort()
        order = (packed & lower).view(np.int64)
        packed >>= bits
        first, own = value_changes(xp, packed), Columns.of_frame(kernels, frame, columns)
        while True:
            group = xp.cumsum(first) - 1
            starts = xp.flatnonzero(first)
            leader = order[starts]
            if starts.size == order.size:
                break
            rest = xp.flatnonzero(~first)
            same = equal(kernels, types, (own, order[rest]), (own, leader[group[rest]]))
            if bool(same.all()):
                break
            # Hashes that look equal, unequal rows: within such a group, put those unlike its leader last.
            mark = 2 * group
            mark[rest] += ~same
            refine = kernels.argsort(mark)
            order, mark = order[refine], mark[refine]
            first = value_changes(xp, mark)
        self.order: Positions = order
        self.starts: Positions = starts
        self.leader: Positions = leader
        self.group, self.first = group, first


def within(xp: Any, groups: Groups, flags: Array) -> Array:
    """For grouped rows, how many flags stand before each row in its group."""
    before = xp.cumsum(flags) - flags
    return before - before[groups.starts][groups.group]
