"""The row of a key that is nearest in time, for ASOF and temporal joins.

Each run of the index is ordered by (hash, time, what orders ties, arrival). A bisection finds where a probe row stands
in it, and its row is the next one before it that is alive and has its key: the newest of its time. Looking forward, the
next one says which time it is, and the last one of that time is the probe row's row. For nearly all probe rows that is
one step, however many rows there are of one time. Where rows that are gone lie in the way, those that still walk after
some steps jump over them, which reads that part of the run. A run all of whose times are farther than what a probe row
has found already is not looked at: where rows come about in the order of their times, most probe rows look at one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.kernels import Among, Columns, Kernels, TimeLimits
from gpu_ops.state.time_index import TimeIndex, TimeRun

SearchDirection = Literal["backward", "forward"]

_STEPS = 8
"""After so many, probe rows jump over what is gone."""


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Looks up nearest rows in one index.

    Attributes:
        kernels: the backend.
        index: of the rows that are looked for.
        types: what keys are compared as; none where there is no key.
        stored: the key columns of these rows, by slot.
        alive: the rows that are there; or a function that gives, of n slots, a mask of those.
        newer: what the index orders rows of one time by (int64, by slot), the greatest is taken; None for arrival.
        staged: whether rows of this micro-batch are looked at.
    """

    kernels: Kernels
    index: TimeIndex
    types: Sequence[pa.DataType]
    stored: Columns
    alive: Among | Callable[[Slots], Array]
    newer: Array | None = None
    staged: bool = True

    def search(
        self,
        keys: tuple[Columns, Array],
        hashes: Hashes,
        times: Array,
        direction: SearchDirection,
        *,
        exact: bool = True,
        farthest: Array | None = None,
    ) -> Slots:
        """The nearest row of each probe row's key, the newest of those of one time.

        Args:
            keys: the key columns of probe rows, and the row of each of n probe rows in them.
            hashes: n hashes of keys.
            times: n times.
            direction: whether rows before or after these times are looked for.
            exact: whether a row of just the time is one.
            farthest: n times, the last at which a row is wanted, inclusive; None for any.

        Returns:
            N slots, -1 for none.
        """
        xp, back, probe_rows = self.kernels.xp, direction == "backward", (keys, hashes)
        runs = [*self.index.runs, *([self.index.staged] if self.staged and self.index.staged is not None else [])]

        runs.sort(key=lambda run: -run.span[1] if back else run.span[0])
        if isinstance(self.alive, Among) and all(run.home is self.kernels for run in runs):
            own = keys[0]._replace(rows=keys[1] if keys[0].rows is None else keys[0].rows[keys[1]])
            limits = TimeLimits(times, back, exact, farthest)
            columns, newer = (own, self.stored), self.newer
            found = self.kernels.nearest(
                runs, self.types, columns, hashes, among=self.alive, limits=limits, newer=newer
            )
            if found is not None:
                return found
        best, best_time = xp.full(times.size, -1, np.int64), xp.zeros(times.size, np.int64)

        def near(probe_row: Positions, time: Array) -> Array:
            """No farther than what was found, and than what is wanted."""
            so_far = best_time[probe_row]
            mask = (best[probe_row] < 0) | ((time >= so_far) if back else (time <= so_far))
            if farthest is not None:
                mask &= (time >= farthest[probe_row]) if back else (time <= farthest[probe_row])
            return mask

        for run in runs:
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
            at = self.index.bisect(run, hashes[looking], times[looking], after=exact == back)
            probe_row, at = self._walk(run, probe_rows, (looking, at - 1 if back else at), near, back=back)
            if not back and probe_row.size:
                probe_row, at = self._last_of_time(run, probe_rows, probe_row, at)
            _, time, slot = self.index.read(run, at)
            self._keep(probe_row, slot, time, best, best_time)
        return best

    def _walk(
        self,
        run: TimeRun,
        probe_rows: tuple[tuple[Columns, Array], Hashes],
        standing: tuple[Positions, Array],
        near: Callable[[Positions, Array], Array],
        *,
        back: bool,
    ) -> tuple[Positions, Array]:
        """From where probe rows stand in a run to the first row that is theirs.

        Args:
            run: it.
            probe_rows: key columns and rows, and hashes, of all probe rows.
            standing: those that walk, and where they stand.
            near: gives, of probe rows and times, a mask of those that are not too far.
            back: in which direction.

        Returns:
            Those of the probe rows that find one, and where.
        """
        xp, (keys, hashes) = self.kernels.xp, probe_rows
        step, (walking, at), steps = -1 if back else 1, standing, 0
        pieces: list[tuple[Positions, Array]] = []
        while True:
            inside = (at >= 0) & (at < run.entries.size)
            walking, at = walking[inside], at[inside]
            if walking.size and steps and steps % _STEPS == 0:
                at = self._jumped(run, at, back=back)
            if walking.size:
                hashed, time, slot = self.index.read(run, at)
                mask = near(walking, time) & (hashed == hashes[walking] >> np.uint64(32))
                walking, at, slot = walking[mask], at[mask], slot[mask]
            if not walking.size:
                break
            mine = self._there(slot)
            if self.types:
                mine = mine & self.kernels.equal_at(self.types, (keys[0], keys[1][walking]), (self.stored, slot), mine)
            pieces.append((walking[mine], at[mine]))
            walking, at, steps = walking[~mine], at[~mine] + step, steps + 1
        if len(pieces) == 1:
            return pieces[0]
        nothing = xp.empty(0, np.int64)
        return xp.concatenate([nothing, *(n for n, _ in pieces)]), xp.concatenate([nothing, *(a for _, a in pieces)])

    def _last_of_time(
        self, run: TimeRun, probe_rows: tuple[tuple[Columns, Array], Hashes], probe_row: Positions, at: Array
    ) -> tuple[Positions, Array]:
        """Moves on from the rows that were found to the newest of the same key and time.

        Arguments and result are those of `_walk`.
        """
        xp, index = self.kernels.xp, self.index
        hashed, time, _ = index.read(run, at)
        after = xp.minimum(at + 1, run.entries.size - 1)
        next_hash, next_time, _ = index.read(run, after)
        more = (after > at) & (next_hash == hashed) & (next_time == time)
        one, many = xp.flatnonzero(~more), xp.flatnonzero(more)
        if not many.size:
            return probe_row, at
        last = index.bisect(run, probe_rows[1][probe_row[many]], time[many], after=True) - 1
        # the row that was found is one of them, so there is one
        others, places = self._walk(run, probe_rows, (probe_row[many], last), lambda n, _: n >= 0, back=True)
        return xp.concatenate([probe_row[one], others]), xp.concatenate([at[one], places])

    def _keep(self, probe_row: Positions, slot: Slots, time: Array, best: Slots, best_time: Array) -> None:
        """Take rows that are no farther than what was found, where they are as far only newer ones."""
        before = best[probe_row]
        if self.newer is None:
            later = slot > before
        else:
            order, other = self.newer[slot], self.newer[self.kernels.xp.maximum(before, 0)]
            later = (order > other) | ((order == other) & (slot > before))
        right = (before < 0) | (time != best_time[probe_row]) | later
        best[probe_row[right]], best_time[probe_row[right]] = slot[right], time[right]

    def _there(self, slots: Slots) -> Array:
        """Mask of the rows that are there."""
        if not isinstance(self.alive, Among):
            return self.alive(slots)
        states, least, most = self.alive.states[slots], self.alive.least, self.alive.most
        return states == least if least == most else (states >= least) & (states <= most)

    def _jumped(self, run: TimeRun, at: Array, *, back: bool) -> Array:
        """Each position, moved on over entries whose rows are gone: to one that is alive, or of the next hash."""
        xp, index, size = self.kernels.xp, self.index, int(run.entries.size)
        low, high, width = int(at.min()), int(at.max()) + 1, 64
        while True:
            low, high = (max(low - width, 0), high) if back else (low, min(high + width, size))
            hashes, _, slots = index.read(run, xp.arange(low, high, dtype=np.int64))
            stop = self._there(slots)
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
