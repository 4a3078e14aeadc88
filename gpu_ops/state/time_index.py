"""The index of an interval join's state: from the hash of a key and a span of time to the slots of its rows.

It too is made of sorted runs (`gpu_ops.state.runs`). Entries are sorted by hash, within a hash by time, and within a
time by what orders ties, if anything does, and by arrival: so the rows of a key inside an interval are one range, whose
ends a bisection finds without a look at the key's other rows, and the newest row of a time is the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.kernels import Kernels
from gpu_ops.state.cold import Both
from gpu_ops.state.index import prefix_shift
from gpu_ops.state.runs import Runs

_SPAN = 1 << 32
"""Times that lie within this many units are sorted together with a hash, as one number."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimeRun:
    """Entries by hash, then by time; their times beside them."""

    entries: Array
    """uint64: the upper half of a row's hash, then its slot."""
    times: Array
    """int64."""
    directory: Array
    shift: int
    span: tuple[int, int]
    """No entry is earlier than the first or later than the second."""
    home: Kernels
    """The backend in whose memory it lies."""
    ties: Array | None = None
    """int64: what orders entries of one hash and time, the last counts; None for their arrival."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        ties = 0 if self.ties is None else self.ties.nbytes
        return int(self.entries.nbytes + self.times.nbytes + self.directory.nbytes + ties)


class TimeIndex(Runs[TimeRun]):
    """Slots by hash and time."""

    growth = 1

    def stage(self, hashes: Hashes, slots: Slots, times: Array, ties: Array | None = None) -> None:
        """Make rows findable, until `commit` for good or `discard` not at all.

        Args:
            hashes: n uint64.
            slots: n int64.
            times: n int64.
            ties: n int64 that order rows of one hash and time; None for their slots; always or never.
        """
        if slots.size:
            self.staged = _run(self._kernels, layouts.entries(hashes, slots), times, ties)

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
        runs = [*(self.runs if committed else []), *([self.staged] if staged and self.staged is not None else [])]
        pairs = self.found(runs, self._kernels.entries(hashes, 0), (earliest, latest))
        pairs.sort()
        return layouts.unpaired(pairs)

    def first(self, hashes: Hashes, earliest: Array) -> list[tuple[Positions, Slots]]:
        """Of each run the first committed entry of a needle's hash that is not too early, if there is one.

        Args:
            hashes: n uint64.
            earliest: n int64.

        Returns:
            For each run positions of needles, no more than once each, and slots (int64).
        """
        found = []
        for run in self.runs:
            at = self.bisect(run, hashes, earliest, after=False)
            needle = self._xp.flatnonzero(at < run.entries.size)
            hashed, _, slots = self.read(run, at[needle])
            same = hashed == hashes[needle] >> np.uint64(32)
            found.append((needle[same], slots[same]))
        return found

    def bisect(self, run: TimeRun, hashes: Hashes, times: Array, *, after: bool) -> Array:
        """Where needles stand in a run, wherever it lies; see `gpu_ops.kernels.Kernels.bisect`."""
        needles, times_ = Both(self._kernels, self._kernels.entries(hashes, 0)), Both(self._kernels, times)
        at = run.home.bisect(run, needles.at(run.home), times_.at(run.home), after=after)
        return at if run.home is self._kernels else self._kernels.asarray(at)

    def read(self, run: TimeRun, at: Array) -> tuple[Array, Array, Slots]:
        """Entries of a run, wherever it lies: upper halves of hashes, times, slots."""
        there = Both(self._kernels, at).at(run.home)
        entries, times = run.entries[there], run.times[there]
        if run.home is not self._kernels:
            entries, times = self._kernels.asarray(entries), self._kernels.asarray(times)
        return layouts.entry_hashes(entries), times, layouts.entry_slots(entries)

    @staticmethod
    def _merged(older: TimeRun, newer: TimeRun) -> TimeRun:
        xp = older.home.xp
        entries, times = (xp.concatenate([getattr(r, n) for r in (older, newer)]) for n in ("entries", "times"))
        both = older.ties is not None and newer.ties is not None
        return _run(older.home, entries, times, xp.concatenate([older.ties, newer.ties]) if both else None)

    @staticmethod
    def _moved(run: TimeRun, copy: Callable[[Array], Array], home: Kernels) -> TimeRun:
        ties = None if run.ties is None else copy(run.ties)
        return TimeRun(copy(run.entries), copy(run.times), copy(run.directory), run.shift, run.span, home, ties)

    def renumbered(self, new_slots: Slots) -> TimeIndex:
        """Another index that follows a compaction."""
        index, everywhere = TimeIndex(self._kernels), Both(self._kernels, new_slots)
        for run in self.runs:
            slots = everywhere.at(run.home)[layouts.entry_slots(run.entries)]
            alive = slots >= 0
            entries = layouts.entries(run.entries[alive], slots[alive])
            if entries.size:
                ties = None if run.ties is None else run.ties[alive]
                index.runs.append(_with_directory(run.home, entries, run.times[alive], run.span, ties))
        return index


def _run(home: Kernels, entries: Array, times: Array, ties: Array | None) -> TimeRun:
    """Entries in their order; those of one hash and time stay in the order they have."""
    low = times.min()
    span = int(low), int(times.max())
    if bool((times[1:] >= times[:-1]).all()):
        order = home.argsort(layouts.entry_hashes(entries))
    elif span[1] - span[0] < _SPAN:
        # hash and time in one number; a stable sort of two runs is a merge (timsort)
        order = home.argsort(layouts.by_hash_and(entries, times - low))
    else:
        by_time = home.argsort(times)
        order = by_time[home.argsort(layouts.entry_hashes(entries[by_time]))]
    if ties is not None:
        order = _by_ties(home, order, layouts.entry_hashes(entries[order]), times[order], ties)
        ties = ties[order]
    return _with_directory(home, entries[order], times[order], span, ties)


def _by_ties(home: Kernels, order: Positions, hashes: Array, times: Array, ties: Array) -> Positions:
    """An order by hash and time, those of one hash and time by their ties."""
    xp = home.xp
    follows = xp.zeros(order.size + 1, bool)
    follows[1:-1] = (hashes[1:] == hashes[:-1]) & (times[1:] == times[:-1])
    tied = xp.flatnonzero(follows[:-1] | follows[1:])
    rows, group = order[tied], xp.cumsum(~follows[:-1])[tied]
    by_tie = home.argsort(ties[rows])
    order[tied] = rows[by_tie[home.argsort(group[by_tie])]]
    return order


def _with_directory(home: Kernels, entries: Array, times: Array, span: tuple[int, int], ties: Array | None) -> TimeRun:
    shift = prefix_shift(entries.size, 1)
    return TimeRun(entries, times, home.directory(entries, shift), shift, span, home, ties)
