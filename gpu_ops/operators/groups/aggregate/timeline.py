"""What happens to groups within a micro-batch, moment by moment.

An *event* brings a row to a group or takes one away. With ``per_event`` each event is a moment; they stand by group and
instant, so what a group comes to at each moment is a segmented running sum. With ``per_batch`` a group has one moment,
after all of its events.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.kernels import Kernels

Moves: TypeAlias = tuple[Any, Array]
"""By how much events have moved a number of their group before and after each moment; before: perhaps 0 for all."""


class Timeline:
    """The events of groups, and the moments they make.

    Args:
        kernels: the backend.
        slots: of g groups, each with an event at least.
        group: of n events, which of the groups it is of.
        instants: when each is; one group has no two at an instant.
        net: whether only what they come to together counts.
    """

    def __init__(
        self,
        kernels: Kernels,
        slots: Slots,
        group: Array,
        instants: Instants,
        *,
        net: bool,
    ) -> None:
        xp = kernels.xp
        self._kernels, self.slots, self.net = kernels, slots, net
        self.event_group = group
        groups = int(slots.size)
        self.groups = groups
        if net:
            self._instants = None
            self.size = groups
            self.group: Array = xp.arange(groups, dtype=np.int64)
            self.starts: Positions = self.group
            self.last: Positions = self.group
        else:
            self._instants = instants
            self.size = int(group.size)
            self.group = group[self.order]
            self.starts = xp.searchsorted(self.group, xp.arange(groups, dtype=np.int64))
            self.last = xp.concatenate([self.starts[1:], xp.full(1, self.size, np.int64)])[:groups] - 1

    @functools.cached_property
    def order(self) -> Positions:
        """The events by group, within a group by instant; of a net change as they stand."""
        kernels = self._kernels
        if self._instants is None:
            return kernels.argsort(self.event_group)
        return kernels.argsort(layouts.owned(self.event_group, self._instants))

    @functools.cached_property
    def moment(self) -> Positions:
        """Of each event, its moment."""
        xp = self._kernels.xp
        if self.net:
            return self.event_group
        place = xp.empty(self.size, np.int64)
        place[self.order] = xp.arange(self.size, dtype=np.int64)
        return place

    def instants(self) -> Instants:
        """When the moments are; of no net change."""
        assert self._instants is not None
        return self._instants[self.order]

    def moment_at(self, group: Array, instants: Instants) -> Positions:
        """The moments of some groups' events at some instants; of no net change."""
        return self._kernels.xp.searchsorted(layouts.owned(self.group, self.instants()), layouts.owned(group, instants))

    def moves(self, deltas: Array) -> Moves:
        """By how much numbers are moved, of n numbers (int64), one per event."""
        xp = self._kernels.xp
        if self.net:
            moved = xp.zeros(self.groups, np.int64)
            self._kernels.scatter_add(moved, self.event_group, deltas)
            return 0, moved
        deltas = deltas[self.order]
        after = xp.cumsum(deltas)
        after -= (after - deltas)[self.starts][self.group]
        return after - deltas, after

    def summed(self, moves: Moves | None, base: Array) -> tuple[Array, Array]:
        """Numbers that events move, before and after each moment.

        Args:
            moves: by how much; None where nothing moves them.
            base: g numbers, before the micro-batch.
        """
        of_moments = base if self.net else base[self.group]
        if moves is None:
            return of_moments, of_moments
        return of_moments if self.net else of_moments + moves[0], of_moments + moves[1]

    def final(self, after: Array) -> Array:
        """Of each group what is there after its last moment."""
        return after if self.net else after[self.last]

    def shifted(self, after: Array, base: Array) -> Array:
        """What was before each moment, by what was after each, and before the first of each group."""
        if self.net:
            return base
        before = self._kernels.xp.empty(after.size, after.dtype)
        before[1:] = after[:-1]
        before[self.starts] = base
        return before
