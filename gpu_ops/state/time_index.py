"""What leads to the rows of a state table by time: an index by key and time, and queues.

`TimeIndex` leads from the hash of a key and a span of time to the slots of its rows. Entries are sorted by hash, within
a hash by time, and within a time by what orders ties, if anything does, and by arrival: so the rows of a key inside an
interval are one range, whose ends a bisection finds without a look at the key's other rows, and the newest row of a
time is the last one.

In a `TimeQueue` what is due is found without a look at the rest.

Both are made of sorted runs (`gpu_ops.state.runs`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.descriptions.times import BEFORE_ALL
from gpu_ops.files.disk import Disk, File
from gpu_ops.kernels import Kernels, looked_at
from gpu_ops.state.runs import Both, Following, Merges, Merging, Passed, Runs, fetch, prefix_shift

_HASH_BITS = 64 - layouts.SLOT_BITS
"""Of a hash in an entry."""


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
    """The backend in whose memory it lies, or which reads it from disk."""
    ties: Array | None = None
    """int64: what orders entries of one hash and time, the last counts; None for their arrival."""
    file: File | None = None
    passed: Passed = dataclasses.field(default_factory=Passed)

    @property
    def held(self) -> object:
        """The entries, by which runs know each other."""
        return self.entries

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        ties = 0 if self.ties is None else self.ties.nbytes
        return int(self.entries.nbytes + self.times.nbytes + self.directory.nbytes + ties)


class TimeIndex(Runs[TimeRun]):
    """Slots by hash and time."""

    growth = 1

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._merges = Merges[TimeRun](kernels)

    def _merge(self, coming: int) -> None:
        self.runs = self._merges.go_on(
            self.runs, coming, self._grows, _time_merging, lambda merging, _: [_time_run_of(merging)]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, and of what has followed a compaction or is merged."""
        return super().nbytes + self._merges.nbytes

    def stage(
        self,
        hashes: Hashes,
        slots: Slots,
        times: Array,
        ties: Array | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        """Make rows findable, until `commit` for good or `discard` not at all.

        Args:
            hashes: n uint64.
            slots: n int64.
            times: n int64.
            ties: n int64 that order rows of one hash and time; None for their slots; always or never.
            span: the least and the greatest of the times, where they are known.
        """
        if slots.size:
            self.staged = _time_run(self._kernels, layouts.entries(hashes, slots), times, ties, span)

    def probe(
        self, hashes: Hashes, earliest: Array, latest: Array, *, committed: bool = True, staged: bool = True
    ) -> tuple[Positions, Slots]:
        """Candidates for each of n probe rows: of its hash, and no earlier or later than it wants.

        Args:
            hashes: n uint64, in any order.
            earliest: n int64.
            latest: n int64, inclusive.
            committed: whether committed rows are candidates.
            staged: whether staged ones are.

        Returns:
            Positions of probe rows and candidate slots (int64), by probe row, then by slot. Hashes may
            collide: callers verify candidates by real equality.
        """
        runs = [*(self.runs if committed else []), *([self.staged] if staged and self.staged is not None else [])]
        pairs = self.candidates(runs, self._kernels.entries(hashes, 0), (earliest, latest))
        return layouts.unpaired(self._kernels.sort(pairs))

    def first(self, hashes: Hashes, earliest: Array) -> list[tuple[Positions, Slots]]:
        """Finds in each run the first committed entry of a probe row's hash that is not too early.

        Args:
            hashes: n uint64.
            earliest: n int64.

        Returns:
            For each run positions of probe rows, no more than once each, and slots (int64).
        """
        found = []
        for run in self.runs:
            at = self.bisect(run, hashes, earliest, after=False)
            probe_row = self._xp.flatnonzero(at < run.entries.size)
            hashed, _, slots = self.read(run, at[probe_row])
            same = hashed == hashes[probe_row] >> np.uint64(32)
            found.append((probe_row[same], slots[same]))
        return found

    def begin(self, run: TimeRun, hashes: Hashes) -> Positions:
        """The place in a run, wherever it lies, where the entries of each of n hashes begin, or would."""
        return self.bisect(run, hashes, self._xp.full(hashes.size, BEFORE_ALL, np.int64), after=False)

    def bisect(self, run: TimeRun, hashes: Hashes, times: Array, *, after: bool) -> Array:
        """The place of each probe row in a run, wherever it lies; see `gpu_ops.kernels.Kernels.bisect`."""
        probe_rows, times_ = Both(self._kernels, self._kernels.entries(hashes, 0)), Both(self._kernels, times)
        fetch(run, probe_rows.at(run.home))
        at = run.home.bisect(run, probe_rows.at(run.home), times_.at(run.home), after=after)
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
        merging = _time_merging((older, newer))
        merging.go_on(None)
        return _time_run_of(merging)

    @staticmethod
    def _written(run: TimeRun, disk: Disk) -> TimeRun:
        file, (entries, times, *more) = disk.keep(*TimeIndex._arrays(run))
        return dataclasses.replace(run, entries=entries, times=times, ties=more[0] if more else None, file=file)

    @staticmethod
    def _moved(run: TimeRun, copy: Callable[[Array], Array], home: Kernels) -> TimeRun:
        ties = None if run.ties is None else copy(run.ties)
        return TimeRun(copy(run.entries), copy(run.times), copy(run.directory), run.shift, run.span, home, ties)

    @staticmethod
    def _arrays(run: TimeRun) -> tuple[Array, ...]:
        return run.entries, run.times, *(() if run.ties is None else (run.ties,))

    @staticmethod
    def _rebuilt(run: TimeRun, arrays: Sequence[Array]) -> TimeRun:
        return _with_directory(run.home, run.span, *arrays)


def _time_merging(runs: Sequence[TimeRun]) -> Merging[TimeRun]:
    arrays, in_order = [TimeIndex._arrays(run) for run in runs], _in_order
    if runs[0].home.host is not None:  # all is one part, whose span is known
        in_order = functools.partial(_in_order, span=_span_of(runs))
    return Merging(runs, arrays, lambda cuts: cuts >> np.uint64(32) << np.uint64(32), in_order)


def _span_of(runs: Sequence[TimeRun]) -> tuple[int, int]:
    return min(run.span[0] for run in runs), max(run.span[1] for run in runs)


def _time_run_of(merging: Merging[TimeRun]) -> TimeRun:
    """The run of a merge that is done."""
    return _with_directory(merging.runs[0].home, _span_of(merging.runs), *merging.merged)


def _time_run(home: Kernels, entries: Array, times: Array, ties: Array | None, span: tuple[int, int] | None) -> TimeRun:
    """Entries in their order; those of one hash and time stay in the order they have."""
    if span is None:
        low, high = looked_at(home, [times.min(), times.max()])
        span = low, high
    arrays = _in_order(home, entries, times, *(() if ties is None else (ties,)), span=span)
    return _with_directory(home, span, *arrays)


def _in_order(
    home: Kernels, entries: Array, times: Array, *ties: Array, span: tuple[int, int] | None = None
) -> list[Array]:
    """Entries, their times and ties, in the order of a run; the span of the times where it is known."""
    hashes, (low, high) = layouts.entry_hashes(entries), span or (int(times.min()), int(times.max()))
    bits = (high - low).bit_length()
    if bits > _HASH_BITS:
        hashes -= hashes.min()  # those of a part of a run are close together
    fits = bits <= _HASH_BITS or int(hashes.max()).bit_length() + bits < 2 * _HASH_BITS
    ascending = home.host is None and bool((times[1:] >= times[:-1]).all())  # to look costs a GPU more than to sort
    if fits and not ascending:
        # hash and time in one number; a stable sort of a few runs is a merge (timsort)
        order = home.argsort(layouts.by_hash_and(hashes, times - low, bits))
    else:
        order = home.argsort(hashes)
        if not ascending:
            order = _among_alike(home, order, (hashes,), times)
    for tie in ties:
        order = _among_alike(home, order, (hashes, times), tie)
    return [array[order] for array in (entries, times, *ties)]


def _among_alike(home: Kernels, order: Positions, by: Sequence[Array], then: Array) -> Positions:
    """An order by some numbers, and of those in which they are the same by another one."""
    xp, follows = home.xp, home.xp.ones(order.size, bool)
    follows[0] = False
    for numbers in by:
        ordered = numbers[order]
        follows[1:] &= ordered[1:] == ordered[:-1]
    ordered = then[order]
    late = xp.flatnonzero(follows[1:] & (ordered[1:] < ordered[:-1])) + 1
    if not late.size:
        return order
    group = xp.cumsum(~follows)
    affected = xp.zeros(int(group[-1]) + 1, bool)
    affected[group[late]] = True
    there = xp.flatnonzero(affected[group])
    rows = order[there]
    by_other = home.argsort(then[rows])
    order[there] = rows[by_other[home.argsort(group[there][by_other])]]
    return order


def _with_directory(
    home: Kernels, span: tuple[int, int], entries: Array, times: Array, ties: Array | None = None
) -> TimeRun:
    shift = prefix_shift(entries.size, 1)
    return TimeRun(entries, times, home.directory(entries, shift), shift, span, home, ties)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    times: Array
    """Ascending."""
    entries: Array
    """Slots, as entries of a hash of 0."""
    home: Kernels
    first: int = 0
    """Those before have been taken."""
    file: None = None

    @property
    def held(self) -> object:
        """The entries, by which runs know each other."""
        return self.entries

    @property
    def size(self) -> int:
        """The number of slots that are still in the chunk."""
        return int(self.entries.size) - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.times.nbytes + self.entries.nbytes)


def _chunk_merging(runs: Sequence[_Chunk]) -> Merging[_Chunk]:
    arrays = [(chunk.times[chunk.first :], chunk.entries[chunk.first :]) for chunk in runs]
    return Merging(runs, arrays, lambda cuts: cuts, _by_first)


def _by_first(home: Kernels, *arrays: Array) -> list[Array]:
    order = home.argsort(arrays[0])
    return [array[order] for array in arrays]


class TimeQueue(Following[_Chunk]):
    """Slots by time, earliest first; taking what is due costs what is due."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._left: list[_Chunk] | None = None
        self._added: _Chunk | None = None
        self._merges = Merges[_Chunk](kernels)

    @property
    def coming(self) -> int:
        """Entries that the next `commit` brings."""
        return 0 if self._added is None else self._added.size

    def take(self, until: int) -> Slots:
        """All slots of times up to ``until``, inclusive, ascending, so that merges do not matter.

        For good with `commit`, not at all with `discard`.
        """
        found, left = [self._xp.empty(0, np.int64)], []
        ends = [self._xp.searchsorted(chunk.times, until, side="right") for chunk in self.runs]
        for chunk, end in zip(self.runs, looked_at(self._kernels, ends), strict=True):
            stop = max(chunk.first, end)
            found.append(chunk.entries[chunk.first : stop].view(np.int64))
            if stop < chunk.entries.size:
                left.append(dataclasses.replace(chunk, first=stop))
        self._left, due = left, self._xp.concatenate(found)
        due.sort()
        return due

    def add(self, times: Array, slots: Slots) -> None:
        """More slots, in any order; they count from the next micro-batch on."""
        if slots.size:
            order = self._xp.argsort(times)
            self._added = _Chunk(times[order], slots[order].view(np.uint64), self._kernels)

    def commit(self) -> None:
        """Make the last `take` and `add` final; a `MemoryError` on the way leaves them to be committed again."""
        if self._left is None and self._added is None:
            return
        chunks = self.runs if self._left is None else self._left
        if self._added is not None:
            chunks = [*chunks, self._added]
            chunks = self._merges.go_on(chunks, self.coming, self._grows, _chunk_merging, self._ended)
        self.runs = chunks
        self.discard()

    def _grows(self, run: _Chunk, added: Sequence[_Chunk]) -> bool:
        return run.size <= sum(chunk.size for chunk in added) and id(run.held) not in self.followed

    def _ended(self, merging: Merging[_Chunk], runs: Sequence[_Chunk]) -> list[_Chunk]:
        times, entries = merging.merged
        firsts = looked_at(self._kernels, [run.times[run.first] for run in runs])
        return self._from(min(firsts), [_Chunk(times, entries, runs[0].home)])

    def discard(self) -> None:
        """Forget the last `take` and `add`."""
        self._left = self._added = None

    @staticmethod
    def _arrays(run: _Chunk) -> tuple[Array, ...]:
        return run.entries, run.times

    def _like(self, run: _Chunk, arrays: Sequence[Array]) -> _Chunk:
        entries, times = arrays
        return _Chunk(times, entries, run.home)

    def _as_now(self, run: _Chunk, made: list[_Chunk]) -> list[_Chunk]:
        return self._from(int(run.times[run.first]), made)

    def _from(self, earliest: int, made: list[_Chunk]) -> list[_Chunk]:
        """Chunks without what is earlier: all that was taken is."""
        firsts = looked_at(self._kernels, [self._xp.searchsorted(one.times, earliest) for one in made])
        now = [dataclasses.replace(one, first=first) for one, first in zip(made, firsts, strict=True)]
        return [one for one in now if one.size]
