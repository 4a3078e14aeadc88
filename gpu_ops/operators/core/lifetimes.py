"""When the rows of one input live, over a micro-batch.

A row lives from its birth to its death. Time within a micro-batch is the *instant*: change number s
(its position in the micro-batch's total order, over both inputs) takes a row at instant 2s and brings
one at 2s + 1, so that an upsert (one change that does both) first takes, then brings. Rows from
before the micro-batch were born at `ALWAYS`; rows that stay die at `NEVER`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Instants, Slots
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.layouts import INSTANT_BITS
from gpu_ops.state.columns import DYING, Growing

ALWAYS = -1
NEVER = 1 << INSTANT_BITS
"""Later than any instant: a micro-batch holds at most `gpu_ops.layouts.MAX_CHANGES`."""


@dataclasses.dataclass
class Lifetimes:
    """What a micro-batch does to one input, by row.

    The new rows get the slots from ``first_new`` on.
    """

    first_new: int
    new: int
    """How many new rows there are."""
    deaths: Instants | None
    """Instants, one per new row; None when none of them dies."""
    killed: Slots
    """Slots of committed rows that die, ascending."""
    unknown: Array | int
    """How many retractions were of rows that were not there; a number, or an array of no dimensions."""
    refreshed: Slots | None = None
    """Slots of committed rows that the micro-batch writes without changing them, for their TTL."""
    net: NetChange | None = None
    """Of a net change: when everything happens."""
    instants: tuple[Instants, Instants] | None = None
    """See `births` and `killed_at`; of a net change made when asked for."""

    @classmethod
    def of_new(cls, xp: Any, first_new: int, new: int, births: Instants | None) -> Lifetimes:
        """New rows and no others; ``births``: None of a net change."""
        nothing = xp.empty(0, np.int64)
        return cls(first_new, new, None, nothing, 0, instants=None if births is None else (births, nothing))

    @property
    def any_death(self) -> bool:
        """Whether any row dies."""
        return self.deaths is not None or bool(self.killed.size)

    @property
    def births(self) -> Instants:
        """Instants, one per new row, ascending."""
        return self._instants()[0]

    @property
    def killed_at(self) -> Instants:
        """Instants, one per killed row."""
        return self._instants()[1]

    def _instants(self) -> tuple[Instants, Instants]:
        if self.instants is None:
            assert self.net is not None
            full = self.net.xp.full
            births = full(self.new, self.net.births, np.int64)
            self.instants = births, full(self.killed.size, self.net.deaths, np.int64)
        return self.instants

    def happens(self, *, deaths: int, births: int) -> None:
        """Of a net change: put all deaths, and all births, at one instant."""
        assert self.net is not None
        self.net, self.instants = dataclasses.replace(self.net, deaths=deaths, births=births), None

    def events(self, kernels: Kernels) -> tuple[Slots, Instants, Array]:
        """Each row that comes and each that goes, in no order: its slot, when, and 1 or -1."""
        xp, new = kernels.xp, as_slots(kernels, self.first_new, self.new)
        slots, instants = [new, self.killed], [self.births, self.killed_at]
        if self.deaths is not None:
            dying = xp.flatnonzero(self.deaths != NEVER)
            slots.append(new[dying])
            instants.append(self.deaths[dying])
        found = xp.concatenate(slots)
        signs = xp.full(found.size, -1, np.int8)
        signs[: new.size] = 1
        return found, xp.concatenate(instants), signs

    def dying(self, slots: Slots) -> Array | None:
        """Of a net change: mask of the rows at these slots that die; None if none does. Not after its commit."""
        assert self.net is not None
        return self.net.status.values[slots] == DYING if self.killed.size else None

    def born(self, xp: Any, slots: Slots) -> Instants:
        """When the rows at these slots were born."""
        if self.new == 0:
            return xp.full(slots.size, ALWAYS, np.int64)
        if self.net is not None:
            return xp.where(slots >= self.first_new, self.net.births, ALWAYS)
        new = slots - self.first_new
        return xp.where(new >= 0, self.births[xp.maximum(new, 0)], ALWAYS)

    def died(self, xp: Any, slots: Slots) -> Instants:
        """When the rows at these slots die."""
        if self.net is not None and self.killed.size:
            return xp.where(self.dying(slots), self.net.deaths, NEVER)
        times = xp.full(slots.size, NEVER, np.int64)
        if self.deaths is not None:
            new = slots - self.first_new
            times = xp.where(new >= 0, self.deaths[xp.maximum(new, 0)], times)
        if self.killed.size:
            at = xp.minimum(xp.searchsorted(self.killed, slots), self.killed.size - 1)
            times = xp.where(self.killed[at] == slots, self.killed_at[at], times)
        return times


@dataclasses.dataclass(frozen=True)
class NetChange:
    """When a net change happens, and the states of rows, in which those that die are marked."""

    xp: Any
    """numpy or cupy."""
    status: Growing
    deaths: int = 0
    births: int = 1
