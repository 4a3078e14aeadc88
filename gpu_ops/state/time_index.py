"""The index of an interval join's state: from the hash of a key and a span of time to the slots of its rows.

It too is made of sorted runs (`gpu_ops.state.runs`). Entries are
sorted by hash and, within a hash, by time, so the rows of a key inside an interval are one range: where a
key is hot, a bisection finds its ends and none of the key's other rows is looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.kernels import Kernels
from gpu_ops.state.cold import Both
from gpu_ops.state.index import make_directory
from gpu_ops.state.runs import Runs

_SPAN = 1 << 32
"""Times that lie within this many units are sorted together with a hash, as one number."""

# Buckets of up to this many entries are read in full: cheaper than bisecting them.
_SCAN = 12


@dataclasses.dataclass(frozen=True, slots=True)
class TimeRun:
    """Entries by hash, then by time; their times beside them."""

    entries: Array
    """uint64: the upper half of a row's hash, then its slot."""
    times: Array
    """int64."""
    directory: Array
    shift: int
    home: Kernels
    """The backend in whose memory it lies."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.entries.nbytes + self.times.nbytes + self.directory.nbytes)


class TimeIndex(Runs[TimeRun]):
    """Slots by hash and time."""

    growth = 1

    def stage(self, hashes: Hashes, slots: Slots, times: Array) -> None:
        """Make rows findable, until `commit` for good or `discard` not at all.

        Args:
            hashes: n uint64.
            slots: n int64.
            times: n int64.
        """
        if slots.size:
            self.staged = _run(self._kernels, layouts.entries(hashes, slots), times, merge=False)

    def probe(
        self, hashes: Hashes, earliest: Array, latest: Array, *, committed: bool = True, staged: bool = True
    ) -> tuple[Positions, Slots]:
        """Candidates for each of n needles: of its hash, and no earlier or later than it wants.

        Args:
            hashes: n uint64, in any order.
            earliest: n int64.
            latest: n int64, inclusive.
            committed: whether committed rows are candidates.
            staged: whether staged ones are.

        Returns:
            Positions of needles and candidate slots (int64), by needle, then by slot. Hashes may
            collide: callers verify candidates by real equality.
        """
        xp = self._xp
        upper = layouts.entry_hashes(hashes)
        runs = [*(self.runs if committed else []), *([self.staged] if staged and self.staged is not None else [])]
        wanted = [Both(self._kernels, array) for array in (upper, earliest, latest)]
        found = [self._here(run, _search(run, *(w.at(run.home) for w in wanted))) for run in runs]
        needles = xp.concatenate([xp.empty(0, np.int64), *(f[0] for f in found)])
        slots = xp.concatenate([xp.empty(0, np.int64), *(f[1] for f in found)])
        return layouts.unpaired(xp.sort(layouts.pairs(needles, slots)))

    def first(self, hashes: Hashes, earliest: Array) -> list[tuple[Positions, Slots]]:
        """Of each run the first committed entry of a needle's hash that is not too early, if there is one.

        Args:
            hashes: n uint64.
            earliest: n int64.

        Returns:
            For each run positions of needles, no more than once each, and slots (int64).
        """
        wanted = [Both(self._kernels, array) for array in (layouts.entry_hashes(hashes), earliest)]
        found = []
        for run in self.runs:
            xp, (upper, since) = run.home.xp, (w.at(run.home) for w in wanted)
            first, last = _bucket(run, upper)
            at = _bisect(xp, run, (upper, since), (first, last), after=False)
            there = xp.flatnonzero(at < last)
            there = there[layouts.entry_hashes(run.entries[at[there]]) == upper[there]]
            found.append(self._here(run, (there, layouts.entry_slots(run.entries[at[there]]))))
        return found

    def _here(self, run: TimeRun, found: tuple[Array, Array]) -> tuple[Array, Array]:
        """What was found in a run, as arrays of the backend."""
        if run.home is self._kernels:
            return found
        return self._kernels.asarray(found[0]), self._kernels.asarray(found[1])

    @staticmethod
    def _merged(older: TimeRun, newer: TimeRun) -> TimeRun:
        xp = older.home.xp
        entries = xp.concatenate([older.entries, newer.entries])
        return _run(older.home, entries, xp.concatenate([older.times, newer.times]), merge=True)

    @staticmethod
    def _moved(run: TimeRun, copy: Callable[[Array], Array], home: Kernels) -> TimeRun:
        return TimeRun(copy(run.entries), copy(run.times), copy(run.directory), run.shift, home)

    def renumbered(self, new_slots: Slots) -> TimeIndex:
        """Another index that follows a compaction."""
        index, everywhere = TimeIndex(self._kernels), Both(self._kernels, new_slots)
        for run in self.runs:
            slots = everywhere.at(run.home)[layouts.entry_slots(run.entries)]
            alive = slots >= 0
            entries = layouts.entries(run.entries[alive], slots[alive])
            if entries.size:
                made = make_directory(run.home.xp, entries)
                index.runs.append(TimeRun(entries, run.times[alive], *made, run.home))
        return index


def _run(home: Kernels, entries: Array, times: Array, *, merge: bool) -> TimeRun:
    """Entries in their order; ``merge`` where they are two runs, one after the other."""
    argsort = home.argsort if merge else home.xp.argsort
    low = times.min()
    if int(times.max()) - int(low) < _SPAN:
        # hash and time in one number; a stable sort of two runs is a merge (timsort)
        order = argsort(layouts.by_hash_and(entries, times - low))
    else:
        by_time = home.argsort(times)
        order = by_time[home.argsort(layouts.entry_hashes(entries[by_time]))]
    entries = entries[order]
    return TimeRun(entries, times[order], *make_directory(home.xp, entries), home)


def _search(run: TimeRun, upper: Array, earliest: Array, latest: Array) -> tuple[Array, Array]:
    """Needles and slots of a run, in the memory where it lies."""
    xp = run.home.xp
    first, last = _bucket(run, upper)
    count = last - first
    large = xp.flatnonzero(count > _SCAN)
    if large.size:
        part = upper[large]
        ends = first[large], last[large]
        first[large] = _bisect(xp, run, (part, earliest[large]), ends, after=False)
        last = _bisect(xp, run, (part, latest[large]), ends, after=True)
        count[large] = xp.maximum(last - first[large], 0)
    needle, place = run.home.expand(first, count)
    time = run.times[place]
    entry = run.entries[place]
    fits = (layouts.entry_hashes(entry) == upper[needle]) & (time >= earliest[needle]) & (time <= latest[needle])
    found = xp.flatnonzero(fits)
    return needle[found], layouts.entry_slots(entry[found])


def _bucket(run: TimeRun, upper: Array) -> tuple[Array, Array]:
    """Where the entries of each needle's bucket begin and end."""
    bucket = (upper >> np.uint64(run.shift)).view(np.int64)
    return run.directory[bucket].astype(np.int64), run.directory[bucket + 1].astype(np.int64)


def _bisect(xp: Any, run: TimeRun, needles: tuple[Array, Array], ends: tuple[Array, Array], *, after: bool) -> Array:
    """Within ``[ends[0], ends[1])``, the first entry not before (or, `after`, beyond) a needle's hash and time."""
    upper, times = needles
    low, high = ends[0].copy(), ends[1].copy()
    open_ = xp.flatnonzero(low < high)
    while open_.size:
        middle = (low[open_] + high[open_]) >> 1
        hashes, time = layouts.entry_hashes(run.entries[middle]), run.times[middle]
        wanted, limit = upper[open_], times[open_]
        before = (hashes < wanted) | ((hashes == wanted) & ((time <= limit) if after else (time < limit)))
        low[open_] = xp.where(before, middle + 1, low[open_])
        high[open_] = xp.where(before, high[open_], middle)
        open_ = open_[low[open_] < high[open_]]
    return low
