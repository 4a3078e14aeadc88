"""Rows grouped by equal values, and running numbers within groups."""

from __future__ import annotations

import functools
from typing import Any

from gpu_ops.arrays import Array, Hashes, Positions, value_changes
from gpu_ops.kernels import Columns, Frame, Kernels
from gpu_ops.operators.core.match import equal


class Groups:
    """The rows of a frame grouped by equal columns; within a group, in their own order.

    Attributes:
        order: n row positions, group by group.
        group: n group numbers, for the rows in that order.
        bounds: where groups begin in that order, ascending, and at the end n.
    """

    def __init__(
        self, kernels: Kernels, frame: Frame, columns: tuple[str, ...], types: tuple[Any, ...], hashes: Hashes
    ) -> None:
        own = Columns(frame, columns)
        self.order, self.bounds, self.group, alike = kernels.grouped(types, own, hashes)
        if not alike:
            self._part(kernels, types, own)

    def _part(self, kernels: Kernels, types: tuple[Any, ...], own: Columns) -> None:
        """Hashes that look equal, unequal rows: within such a group, put those unlike its leader last."""
        xp, order, first = kernels.xp, self.order, value_changes(kernels.xp, self.group)
        while True:
            group = xp.cumsum(first) - 1
            leader, rest = order[xp.flatnonzero(first)], xp.flatnonzero(~first)
            same = equal(kernels, types, (own, order[rest]), (own, leader[group[rest]]))
            if bool(same.all()):
                break
            mark = 2 * group
            mark[rest] += ~same
            refine = kernels.argsort(mark)
            order, mark = order[refine], mark[refine]
            first = value_changes(xp, mark)
        self.order, self.group = order, group
        self.bounds = xp.flatnonzero(xp.concatenate([first, xp.ones(1, bool)]))

    @property
    def starts(self) -> Positions:
        """Where groups begin in their order."""
        return self.bounds[:-1]

    @functools.cached_property
    def leader(self) -> Positions:
        """The first row of each group."""
        return self.order[self.starts]

    @functools.cached_property
    def last(self) -> Positions:
        """The last row of each group."""
        return self.order[self.bounds[1:] - 1]


def within(xp: Any, groups: Groups, flags: Array) -> Array:
    """For grouped rows, how many flags stand before each row in its group."""
    before = xp.cumsum(flags) - flags
    return before - before[groups.starts][groups.group]
