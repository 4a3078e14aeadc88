"""What leads from keys to the rows of a state table.

`HashIndex` leads from the hash of a key to the slots of its rows. An entry is one uint64: the upper half of the row's
hash, then its slot; sorting entries sorts by hash and, within a hash, by slot. Each run (`gpu_ops.state.runs`) has a
directory of hash prefixes, so a lookup is one jump and a short scan, without a search. Hashes may collide: callers
verify candidates by real equality.

`OrderIndex` has the rows of a hash in another order: the least first, or the greatest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.files.disk import Disk, File
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.state.runs import FollowedRuns, Passed, Runs, prefix_shift


@dataclasses.dataclass(slots=True)
class Run:
    """Entries in ascending order and where each hash prefix begins among them."""

    buffer: Array
    """What the entries are the beginning of; the rest is room for more. See `gpu_ops.kernels.Kernels.merge`."""
    size: int
    """How many entries there are."""
    shift: int
    home: Kernels
    """The backend in whose memory it lies, or which reads it from disk."""
    cached_directory: Array | None = None
    """The directory, once a lookup has needed it: most runs are merged before."""
    file: File | None = None
    passed: Passed = dataclasses.field(default_factory=Passed)

    @property
    def entries(self) -> Array:
        """The entries; whoever keeps them makes the next merge copy all that there are."""
        return self.home.beginning(self.buffer, self.size)

    @property
    def held(self) -> object:
        """The buffer, by which runs that share it know each other."""
        return self.buffer

    @property
    def directory(self) -> Array:
        """The place of the first entry of each hash prefix; computed when first asked for."""
        if self.cached_directory is None:
            self.cached_directory = self.home.directory(self.entries, self.shift)
        return self.cached_directory

    @property
    def times(self) -> None:
        """Entries of a hash are in the order of their slots."""

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.entries.nbytes + (0 if self.cached_directory is None else self.cached_directory.nbytes))


class HashIndex(Runs[Run]):
    """An index of a table's slots by the hash of a key."""

    # In 100k-change micro-batches up to 12M rows 4, 10 and 16 took 6.1, 5.3 and 5.4 s of CPU: the more merges, the
    # fewer runs a lookup looks in.
    growth = 10

    def stage(self, hashes: Hashes, slots: Slots) -> None:
        """Make rows findable, until `commit` for good or `discard` not at all.

        Args:
            hashes: n uint64.
            slots: n int64, ascending.
        """
        self.stage_entries(layouts.entries(hashes, slots))

    def stage_entries(self, entries: Array) -> None:
        """Makes rows findable like `stage`, given n entries (uint64), which may be sorted in place."""
        if entries.size:
            self.staged = run_of(self._kernels, self._kernels.sort(entries))

    def put(self, entries: Array) -> None:
        """Make rows findable from the next `commit` on, of n ascending entries; on the CPU `unite` has to follow."""
        if entries.size:
            run = run_of(self._kernels, entries)
            if self._kernels.host is None:
                self.runs.append(run)
            else:
                self.staged = run

    def unite(self) -> None:
        """Make one run of those that were put and are in memory."""
        if len(there := [run for run in self.runs if run.file is None]) > 1:
            entries = self._xp.concatenate([run.entries for run in there])
            entries.sort(kind="stable")  # timsort, which merges ascending parts
            self.runs = [*(run for run in self.runs if run.file is not None), run_of(self._kernels, entries)]

    def probe(self, hashes: Hashes, *, staged: bool, at_most: int | None = None) -> tuple[Positions, Slots]:
        """Candidates for each of n hashes.

        Args:
            hashes: n uint64, in any order.
            staged: whether staged rows are candidates too.
            at_most: how many there may be.

        Returns:
            Positions of probe rows and candidate slots (int64), ordered by probe row, then by slot.

        Raises:
            TooMany: there are more than there may be.
        """
        probe_rows = self._kernels.sort(self._kernels.entries(hashes, 0))
        pairs = self.meet(probe_rows, staged=staged, at_most=at_most)
        return layouts.unpaired(self._kernels.sort(pairs))

    def meet(self, probe_rows: Array, *, staged: bool, by_candidate: bool = False, at_most: int | None = None) -> Array:
        """Candidates for each of n entries, of another index perhaps.

        Args:
            probe_rows: n uint64, ascending, so that what they look at lies in the order in which they look.
            staged: whether staged rows are candidates too.
            by_candidate: give the candidate's slot first.
            at_most: how many there may be.

        Returns:
            Pairs (int64, see `gpu_ops.layouts.pairs`) of the probe row's and the candidate's slot, in any order.

        Raises:
            TooMany: there are more than there may be.
        """
        runs = [*self.runs, self.staged] if staged and self.staged is not None else self.runs
        return self.candidates(runs, probe_rows, by_candidate=by_candidate, at_most=at_most)

    def _merge(self, coming: int) -> None:
        del coming  # it costs little
        while len(self.runs) > 1 and self._grows(self.runs[-2], self.runs[-1:]):
            self.runs[-2:] = [self._merged(*self.runs[-2:])]

    @staticmethod
    def _merged(older: Run, newer: Run) -> Run:
        return _merge_two(older, newer)

    @staticmethod
    def _written(run: Run, disk: Disk) -> Run:
        file, (entries,) = disk.keep(run.entries)
        return Run(entries, run.size, run.shift, run.home, run.directory, file)

    @staticmethod
    def _moved(run: Run, copy: Callable[[Array], Array], home: Kernels) -> Run:
        entries = copy(run.entries)
        return Run(
            entries, run.size, run.shift, home, None if run.cached_directory is None else copy(run.cached_directory)
        )

    @staticmethod
    def _arrays(run: Run) -> tuple[Array, ...]:
        return (run.entries,)

    @staticmethod
    def _rebuilt(run: Run, arrays: Sequence[Array]) -> Run:
        return run_of(run.home, arrays[0])


class OrderIndex(HashIndex):
    """Slots by hash, within a hash in an order that only the rows tell.

    It follows from the rows, and is made when it is first asked for: each time of those that have come since, together
    with the newest runs as long as these are no larger, so that a row is ordered no oftener than their size can double.
    When memory is short it is forgotten.

    Attributes:
        rows: of so many slots, from the first, those that were there are in it.
        looked: rows that were looked at without it since it was last made.
    """

    growth = 1

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.rows = self.looked = 0

    def pays(self, rows: int, more: int) -> bool:
        """Tells whether bringing the index up to date costs no more than what was looked at without it.

        Args:
            rows: how many committed slots there are.
            more: rows that would be looked at now.
        """
        self.looked += more
        return self.looked >= rows - self.rows

    def update(self, rows: int, ordered: Callable[[Slots], Array]) -> None:
        """Bring it up to date.

        Args:
            rows: how many committed slots there are.
            ordered: gives, of slots, ascending, the entries of those whose rows are there, by hash and in the order.
        """
        number, size = len(self.runs), rows - self.rows
        if size:
            while number and self.runs[number - 1].size <= self.growth * size:
                number -= 1
                size += self.runs[number].size
            parts = [layouts.entry_slots(run.entries) for run in self.runs[number:]]
            slots = self._xp.concatenate([*parts, as_slots(self._kernels, self.rows, rows - self.rows)])
            slots.sort()
            entries = ordered(slots)
            made = [run_of(self._kernels, entries)] if entries.size else []
            self.runs = [*self.runs[:number], *made]
        self.rows, self.looked = rows, 0

    def renumbered(self, new_slots: Slots, before: FollowedRuns[Run] | None = None) -> Self:
        """Another one, in new slots."""
        other = super().renumbered(new_slots, before)
        other.rows, other.looked = int((new_slots[: self.rows] >= 0).sum()), self.looked
        return other

    def cool(self, wanted: int, disk: Disk | None = None) -> int:
        """Forget all of it where it lies in the memory that is short; the bytes freed."""
        if (disk is None) == (self._kernels.host is None):
            return 0
        freed, self.runs, self.followed, self.rows = self.nbytes, [], {}, 0
        return freed


def run_of(home: Kernels, entries: Array) -> Run:
    """Makes a run of ascending entries in a backend's memory."""
    return Run(entries, int(entries.size), _shift(home, entries.size), home)


def _shift(home: Kernels, size: int) -> int:
    """In steps of two, so that a run that grows by merges keeps its prefixes for a while."""
    shift = prefix_shift(size, home.bucket)
    return shift - shift % 2


def _merge_two(run: Run, added: Run) -> Run:
    """A run with the entries of another, in its own buffer if they fit: then nothing is left of it."""
    home, size = run.home, run.size + added.size
    buffer = home.merge(run.buffer, run.size, added.entries)
    shift, directory = _shift(home, size), None
    if shift == run.shift and run.cached_directory is not None:
        # Where a prefix begins is how many entries come before it, in one part and in the other.
        directory = home.directory(added.entries, shift, run.cached_directory)
    return Run(buffer, size, shift, home, directory)
