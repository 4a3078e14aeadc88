"""The index of an interval join's state: from the hash of a key and a span of time to the slots of its rows.

Like `gpu_ops.state.index` it is a short list of immutable sorted runs, merged geometrically. Entries are
sorted by hash and, within a hash, by time, so the rows of a key inside an interval are one range: where a
key is hot, a bisection finds its ends and none of the key's other rows is looked at.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gpu_ops.kernels import Array, Kernels
from gpu_ops.state.index import make_directory

_HASH = np.uint64(0xFFFFFFFF00000000)
_SLOT = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_SPAN = 1 << 32

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

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.entries.nbytes + self.times.nbytes + self.directory.nbytes)


class TimeIndex:
    """Slots by hash and time.

    Args:
        kernels: the backend.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._xp: Any = kernels.xp
        self.runs: list[TimeRun] = []
        self.staged: TimeRun | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return sum(r.nbytes for r in self.runs) + (self.staged.nbytes if self.staged else 0)

    def stage(self, hashes: Array, slots: Array, times: Array) -> None:
        """Make rows findable, until `commit` for good or `discard` not at all.

        Args:
            hashes: n uint64.
            slots: n int64.
            times: n int64.
        """
        if slots.size:
            self.staged = self._run((hashes & _HASH) | slots.view(np.uint64), times, merge=False)

    def commit(self) -> None:
        """Keep the staged rows."""
        if self.staged is None:
            return
        merged, self.staged = self.staged, None
        while self.runs and self.runs[-1].entries.size <= merged.entries.size:
            older = self.runs.pop()
            entries = self._xp.concatenate([older.entries, merged.entries])
            merged = self._run(entries, self._xp.concatenate([older.times, merged.times]), merge=True)
        self.runs.append(merged)

    def discard(self) -> None:
        """Forget the staged rows."""
        self.staged = None

    def probe(
        self, hashes: Array, earliest: Array, latest: Array, *, committed: bool = True, staged: bool = True
    ) -> tuple[Array, Array]:
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
        upper = hashes >> _HIGH
        runs = [*(self.runs if committed else []), *([self.staged] if staged and self.staged is not None else [])]
        found = [self._search(run, upper, earliest, latest) for run in runs]
        needles = xp.concatenate([xp.empty(0, np.int64), *(f[0] for f in found)])
        slots = xp.concatenate([xp.empty(0, np.int64), *(f[1] for f in found)])
        keys = xp.sort((needles << 32) | slots)
        return keys >> 32, keys & (_SPAN - 1)

    def first(self, hashes: Array, earliest: Array) -> list[tuple[Array, Array]]:
        """Of each run the first committed entry of a needle's hash that is not too early, if there is one.

        Args:
            hashes: n uint64.
            earliest: n int64.

        Returns:
            For each run positions of needles, no more than once each, and slots (int64).
        """
        xp = self._xp
        upper = hashes >> _HIGH
        found = []
        for run in self.runs:
            first, last = _bucket(run, upper)
            at = _bisect(xp, run, (upper, earliest), (first, last), after=False)
            there = xp.flatnonzero(at < last)
            there = there[(run.entries[at[there]] >> _HIGH) == upper[there]]
            found.append((there, (run.entries[at[there]] & _SLOT).view(np.int64)))
        return found

    def renumber(self, new_slots: Array) -> None:
        """Follow a compaction.

        Args:
            new_slots: int64, the new slot of each old one, ascending, -1 for slots that went.
        """
        kept = []
        for run in self.runs:
            slots = new_slots[(run.entries & _SLOT).view(np.int64)]
            alive = slots >= 0
            entries = (run.entries[alive] & _HASH) | slots[alive].view(np.uint64)
            if entries.size:
                kept.append(TimeRun(entries, run.times[alive], *make_directory(self._xp, entries)))
        self.runs = kept

    def _run(self, entries: Array, times: Array, *, merge: bool) -> TimeRun:
        """Entries in their order; ``merge`` where they are two runs, one after the other."""
        xp, argsort = self._xp, self._kernels.argsort if merge else self._xp.argsort
        low = times.min()
        if int(times.max()) - int(low) < _SPAN:
            # hash and time in one number; a stable sort of two runs is a merge (timsort)
            order = argsort((entries & _HASH) | (times - low).view(np.uint64))
        else:
            by_time = self._kernels.argsort(times)
            order = by_time[self._kernels.argsort(entries[by_time] >> _HIGH)]
        entries = entries[order]
        return TimeRun(entries, times[order], *make_directory(xp, entries))

    def _search(self, run: TimeRun, upper: Array, earliest: Array, latest: Array) -> tuple[Array, Array]:
        xp = self._xp
        first, last = _bucket(run, upper)
        count = last - first
        large = xp.flatnonzero(count > _SCAN)
        if large.size:
            part = upper[large]
            ends = first[large], last[large]
            first[large] = _bisect(xp, run, (part, earliest[large]), ends, after=False)
            last = _bisect(xp, run, (part, latest[large]), ends, after=True)
            count[large] = xp.maximum(last - first[large], 0)
        needle, place = self._kernels.expand(first, count)
        time = run.times[place]
        entry = run.entries[place]
        fits = ((entry >> _HIGH) == upper[needle]) & (time >= earliest[needle]) & (time <= latest[needle])
        found = xp.flatnonzero(fits)
        return needle[found], (entry[found] & _SLOT).view(np.int64)


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
        hashes, time = run.entries[middle] >> _HIGH, run.times[middle]
        wanted, limit = upper[open_], times[open_]
        before = (hashes < wanted) | ((hashes == wanted) & ((time <= limit) if after else (time < limit)))
        low[open_] = xp.where(before, middle + 1, low[open_])
        high[open_] = xp.where(before, high[open_], middle)
        open_ = open_[low[open_] < high[open_]]
    return low
