"""The ASOF join whose output is final: rows come out as the watermark passes them, and nothing changes them any more.

Law: both inputs only grow. A left row comes out once, when the watermark has passed every time at which a better right
row than the best so far could come:

- *backward*: its own time;
- *forward*: that of the first right row from its time on, or else the end of its tolerance;
- *nearest*: that of the first right row after it that is nearer than the last one before it, or else the last time at
  which such a row could come.

It comes out beside its best right row; where there is none, with nulls (left) or not at all (inner).

A right row is forgotten when no left row that waits, or comes in time, can meet it: *forward*, when the watermark has
passed it; else when the watermark has passed the next one of its key, as a version of a temporal join
(`operators.by_time.temporal`). Where equal times do not match, the next one may stand at the time of a left row that
waits, or at the watermark: then the one before it stays.
Late left rows meet what is still there at the next watermark.

A left row that waits for a right row is found through that: right rows that the watermark passes look for the left
rows of their key up to their time. All of these come out, so each is found once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.by_time import AsofJoin
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL, shifted
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Columns, Kernels, as_slots, distinct
from gpu_ops.operators.by_time.temporal import Keys, TemporalOperator
from gpu_ops.operators.core.emission import OutputRows
from gpu_ops.operators.core.match import live_matches
from gpu_ops.state.keyed_table import TIES_COLUMN
from gpu_ops.state.pieces import FromSnapshot
from gpu_ops.state.table import DEAD, LIVE


class AsofAtWatermark(TemporalOperator):
    """An ASOF join with ``emit="at_watermark"`` over one partition.

    Args:
        description: its description.
        kernels: the backend.
    """

    description: AsofJoin

    def __init__(self, description: AsofJoin, kernels: Kernels) -> None:
        self._ties = description.ties_by(1) is not None
        self.beside = {TIES_COLUMN: np.int64} if self._ties else {}
        super().__init__(description, kernels)
        self._tolerance = description.asof.tolerance(self.description.time_type)
        self._exact = description.asof.exact
        self._before, self._after = description.asof.direction != "forward", description.asof.direction != "backward"
        self.held = self._tolerance if self._after else 0

    def _newer(self) -> Array | None:
        """The input's own order, if it has one."""
        return self.tables[1].beside[TIES_COLUMN].values if self._ties else None

    def _advance(self, now: int) -> tuple[OutputRows, tuple[int, int]]:
        """Left rows that are final: the output, and how many rows of either side went."""
        xp, (left, right) = self.kernels.xp, self.tables
        due = left.due.take(now)
        passing = right.due.take(now)
        passing = passing[right.status.values[passing] == LIVE]
        looking = due
        if self._after:
            ends = left.early.take(now)
            ends = ends[left.status.values[ends] == LIVE]
            looking = distinct(self.kernels, xp.concatenate([due, ends, self._waiting(passing)]))
        own = self._keys(0, looking)
        found, final = self._best(own, now)
        if self._after:
            waits = xp.flatnonzero(final > now)
            left.early.add(final[waits], looking[waits])
            out = xp.flatnonzero(final <= now)
            looking, found = looking[out], found[out]
        left.move(looking, LIVE, DEAD)
        gone = self._past(looking, passing, now)
        right.move(gone, LIVE, DEAD)
        if self.description.how == "inner":
            kept = xp.flatnonzero(found >= 0)
            return self._beside(looking[kept], found[kept]), (int(looking.size), int(gone.size))
        return self._beside(looking, found), (int(looking.size), int(gone.size))

    def _waiting(self, passing: Slots) -> Slots:
        """Left rows that may meet one of the right rows which the watermark passes, repeated ones among them."""
        xp, (left, right) = self.kernels.xp, self.tables
        if not passing.size or not len(left):
            return self._none
        keys, times = self._keys(1, passing), right.time[passing]
        earliest = xp.full(times.size, BEFORE_ALL, np.int64)
        latest = times if self._exact else shifted(xp, times, -1)
        if self._before:  # one that comes late may be the last before a row that waits already
            latest = xp.where(times <= self.clock.watermark, self._next.watermark, latest)
        if self._tolerance is not None:
            earliest = shifted(xp, times, -self._tolerance)
            latest = xp.minimum(latest, shifted(xp, times, self._tolerance))
        candidates = left.index.probe(keys.hashes, earliest, latest, staged=False)
        return live_matches(left, candidates, Columns(keys.frame, right.keys))[1]

    def _best(self, own: Keys, now: int) -> tuple[Slots, Array]:
        """Each left row's best right row of those that the watermark has passed, and when that is final.

        Returns:
            N slots, -1 for none, and n times: where one is after the watermark, a better row may still come.
        """
        xp, (left, right) = self.kernels.xp, self.tables
        left.fetch(own.slots)
        times = left.time[own.slots]
        found = xp.full(times.size, -1, np.int64)
        last = xp.full(times.size, AFTER_ALL, np.int64)
        first = None
        if self._tolerance is not None:
            first, last = shifted(xp, times, -self._tolerance), shifted(xp, times, self._tolerance)
        if self._before and len(right):
            found = self._search(own, times, "backward", exact=self._exact, farthest=first)
        if self._after and len(right):
            # a row after it has to be nearer than the one before it
            right.fetch(xp.maximum(found, 0))
            nearer = xp.minimum(last, _nearer(xp, times, right.time[xp.maximum(found, 0)]))
            last = xp.where(found >= 0, nearer, last)
            ahead = self._search(own, times, "forward", exact=self._exact, farthest=xp.minimum(last, now))
            found = xp.where(ahead >= 0, ahead, found)
            last = xp.where(ahead >= 0, BEFORE_ALL, last)
        matchable = left.matchable(own.frame)
        if matchable is not None:
            found, last = xp.where(matchable, found, -1), xp.where(matchable, last, BEFORE_ALL)
        return found, last

    def _past(self, out: Slots, passing: Slots, now: int) -> Slots:
        """Right rows that no left row will meet which waits or comes in time.

        Args:
            out: left rows that have come out.
            passing: right rows that the watermark passes.
            now: the watermark.
        """
        right = self.tables[1]
        if not self._before:
            over = self.kernels.xp.sort(right.early.take(now - 1))
            return over[right.status.values[over] == LIVE]
        if self._exact:
            firing = [self._none, passing]
        else:
            # what a left row that came out has kept, and what the last watermark has, may go now
            again = right.early.take(now)
            edge = passing[right.time[passing] == now]
            right.early.add(right.time[edge], edge)
            again = again[right.status.values[again] == LIVE]
            firing = [out if self._after and len(right) else self._none, passing, again]
        keys = [self._keys(int(number > 0), slots) for number, slots in enumerate(firing)]
        return self._forget(keys, self._none, now)

    def _needed(self, keys: Keys, now: int) -> list[Slots]:
        """Finds the right rows of each key, up to the watermark, that left rows may still meet."""
        xp, left = self.kernels.xp, self.tables[0]
        found = super()._needed(keys, now)
        if self._exact:
            return found
        times = xp.full(keys.slots.size, now, np.int64)
        found.append(self._search(keys, times, exact=False))
        if self._after and len(left):
            # none has passed after the first that waits, or that would have come out
            columns = Columns(keys.frame, self.tables[keys.side].keys), xp.arange(times.size, dtype=np.int64)
            first = xp.full(times.size, BEFORE_ALL, np.int64)
            waits = self._nearest(0).search(columns, keys.hashes, first, "forward", farthest=times)
            times = xp.where(waits >= 0, left.time[xp.maximum(waits, 0)], times)
            found.append(self._search(keys, times, exact=False))
        return found

    def _add(self, side: int, change: Ingested) -> None:
        """Take in the new rows of one side."""
        slots = self._stage(side, change)
        right = self.tables[1]
        if side == 1 and slots.size and not self._before:
            right.early.add(right.time[slots], slots)

    # --- the stored form ---------------------------------------------------------------------

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Take over a snapshot; left rows that wait are looked at again at the next watermark."""
        super().restore(state, settle)
        right = self.tables[1]
        if not self._before and len(right):
            right.early.add(right.time, as_slots(self.kernels, 0, len(right)))
            right.early.commit()


def _nearer(xp: Any, times: Array, before: Array) -> Array:
    """The last times at which a row is nearer to n times than one before it.

    Two times may be farther apart than int64 holds, never than uint64 does.
    """
    own, rest = times.view(np.uint64), np.uint64(AFTER_ALL)
    return (own + xp.minimum(own - before.view(np.uint64), rest + np.uint64(1) - own) - np.uint64(1)).view(np.int64)


make = AsofAtWatermark
