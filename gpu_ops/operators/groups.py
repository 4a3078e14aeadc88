"""Rows grouped by equal values, and running numbers within groups."""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels import Array, Frame, Kernels


class Groups:
    """The rows of a frame grouped by equal columns; within a group, in their own order.

    Attributes:
        order: n row positions, group by group.
        group: n group numbers, for the rows in that order.
        first: n flags: first of its group.
        leader: one row position per group.
    """

    def __init__(
        self, kernels: Kernels, frame: Frame, columns: tuple[str, ...], types: tuple[Any, ...], hashes: Array
    ) -> None:
        xp = kernels.xp
        order = kernels.argsort(hashes)
        first = value_changes(xp, hashes[order])
        while True:
            group = xp.cumsum(first) - 1
            leader = order[xp.flatnonzero(first)]
            kept, lead = kernels.take(frame, order, columns), kernels.take(frame, leader[group], columns)
            same = kernels.equal_rows(kept, columns, lead, columns, types)
            if bool(same.all()):
                break
            # Equal hashes, unequal rows: within such a group, put those unlike its leader last.
            refine = kernels.argsort(2 * group + ~same)
            order, mark = order[refine], (2 * group + ~same)[refine]
            first = value_changes(xp, mark)
        self.order, self.group, self.first, self.leader = order, group, first, leader


def value_changes(xp: Any, values: Array) -> Array:
    """Flags of values that differ from the one before."""
    flags = xp.ones(values.size, bool)
    flags[1:] = values[1:] != values[:-1]
    return flags


def within(xp: Any, group: Array, flags: Array) -> Array:
    """For grouped rows, how many flags stand before each row in its group."""
    before = xp.cumsum(flags) - flags
    starts = before[xp.flatnonzero(value_changes(xp, group))] if group.size else before
    return before - starts[group]
