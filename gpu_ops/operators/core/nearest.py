"""The row of a key that is nearest in time: what ASOF and temporal joins look up.

Each run of the index is ordered by (hash, time, arrival). A bisection finds where a needle stands in it, and its row is
the next one before (or after) it that is alive and has its key. For nearly all needles that is one step. Where rows
that are gone lie in the way, those that still walk after some steps jump over them, which reads that part of the run.
A run all of whose times are farther than what a needle has found already is not looked at: where rows come about in the
order of their times, most needles look at one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.kernels import Columns, Kernels
from gpu_ops.operators.core.match import equal
from gpu_ops.state.time_index import TimeIndex, TimeRun

Direction = Literal["backward", "forward"]

_STEPS = 8
"""After so many, needles jump over what is gone."""


class Nearest:
    """Looks up nearest rows in one index.

    Args:
        kernels: the backend.
        index: of the rows that are looked for.
        types: what keys are compared as; none where there is no key.
        found: the key columns of these rows, by slot.
        alive: gives, of n slots, a mask of those that are there.
        newer: gives, of n slots, what orders rows of one time (int64), the greatest is taken; None for arrival.
        staged: whether rows of this micro-batch are looked at.
    """

    def __init__(
        self,
        kernels: Kernels,
        index: TimeIndex,
        types: Sequence[pa.DataType],
        found: Columns,
        alive: Callable[[Slots], Array],
        *,
        newer: Callable[[Slots], Array] | None = None,
        staged: bool = True,
    ) -> None:
        self._kernels, self._index, self._types, self._found = kernels, index, types, found
        self._alive, self._newer = alive, newer
        self._runs = [*index.runs, *([index.staged] if staged and index.staged is not None else [])]

    def search(
        self,
        own: tuple[Columns, Array],
        hashes: Hashes,
        times: Array,
        direction: Direction,
        *,
        exact: bool = True,
        farthest: Array | None = None,
    ) -> Slots:
        """The nearest row of each needle's key, the newest of those of one time.

        Args:
            own: the key columns of needles, and the row of each of n needles in them.
            hashes: n hashes of keys.
            times: n times.
            direction: whether rows before or after these times are looked for.
            exact: whether a row of just the time is one.
            farthest: n times, the last at which a row is wanted, inclusive; None for any.

        Returns:
            N slots, -1 for none.
        """
        xp = self._kernels.xp
        best, best_time = xp.full(times.size, -1, np.int64), xp.zeros(times.size, np.int64)
        back = direction == "backward"
        for run in sorted(self._runs, key=lambda run: -run.span[1] if back else run.span[0]):
            first, last = run.span
            if back:
                worth = (times >= first) & ((best < 0) | (best_time <= last))
            else:
                worth = (times <= last) & ((best < 0) | (best_time >= first))
            if farthest is not None:
                worth &= (farthest <= last) if back else (farthest >= first)
            looking = xp.flatnonzero(worth)
            if not looking.size:
                continue
            at = self._index.bisect(run, hashes[looking], times[looking], after=exact == back)
            if back:
                at = at - 1
            self._walk(run, (own, hashes, farthest), (looking, at), best, best_time, back=back)
        return best

    def _walk(
        self,
        run: TimeRun,
        needles: tuple[tuple[Columns, Array], Hashes, Array | None],
        standing: tuple[Positions, Array],
        best: Slots,
        best_time: Array,
        *,
        back: bool,
    ) -> None:
        """From where needles stand in a run to the first row that is theirs, and on through those of its time."""
        xp, (own, hashes, farthest) = self._kernels.xp, needles
        step, (walking, at), steps = -1 if back else 1, standing, 0
        while True:
            inside = (at >= 0) & (at < run.entries.size)
            walking, at = walking[inside], at[inside]
            if not walking.size:
                return
            hashed, time, slot = self._index.read(run, at)
            taken = best[walking]
            # no farther than what was found; within its time, on to the newest
            near = (taken < 0) | ((time >= best_time[walking]) if back else (time <= best_time[walking]))
            near &= hashed == hashes[walking] >> np.uint64(32)
            if farthest is not None:
                near &= (time >= farthest[walking]) if back else (time <= farthest[walking])
            walking, at, time, slot = walking[near], at[near], time[near], slot[near]
            if not walking.size:
                return
            mine = self._alive(slot)
            if self._types:
                mine = mine & equal(self._kernels, self._types, (own[0], own[1][walking]), (self._found, slot), mine)
            hit = xp.flatnonzero(mine)
            self._keep(walking[hit], slot[hit], time[hit], best, best_time)
            if back and self._newer is None:
                # the first that is met is the newest of its time
                on = xp.flatnonzero(~mine)
                walking, at = walking[on], at[on]
            at, steps = at + step, steps + 1
            if steps % _STEPS == 0:
                inside = (at >= 0) & (at < run.entries.size)
                walking, at = walking[inside], at[inside]
                if walking.size:
                    at = self._jumped(run, at, back=back)

    def _keep(self, needle: Positions, slot: Slots, time: Array, best: Slots, best_time: Array) -> None:
        """Take rows that are no farther than what was found, where they are as far only newer ones."""
        before = best[needle]
        if self._newer is None:
            later = slot > before
        else:
            order, other = self._newer(slot), self._newer(self._kernels.xp.maximum(before, 0))
            later = (order > other) | ((order == other) & (slot > before))
        right = (before < 0) | (time != best_time[needle]) | later
        best[needle[right]], best_time[needle[right]] = slot[right], time[right]

    def _jumped(self, run: TimeRun, at: Array, *, back: bool) -> Array:
        """Each position, moved on over entries whose rows are gone: to one that is alive, or of the next hash."""
        xp, index, size = self._kernels.xp, self._index, int(run.entries.size)
        low, high, width = int(at.min()), int(at.max()) + 1, 64
        while True:
            low, high = (max(low - width, 0), high) if back else (low, min(high + width, size))
            hashes, _, slots = index.read(run, xp.arange(low, high, dtype=np.int64))
            stop = self._alive(slots)
            if back:
                stop[:-1] |= hashes[:-1] != hashes[1:]
                stop[0] |= low == 0
            else:
                stop[1:] |= hashes[1:] != hashes[:-1]
                stop[-1] |= high == size
            stops = xp.flatnonzero(stop) + low
            if stops.size and bool((stops[0] <= at.min()) if back else (stops[-1] >= at.max())):
                break
            width *= 2
        return stops[xp.searchsorted(stops, at, side="right") - 1 if back else xp.searchsorted(stops, at, side="left")]
