"""What leads to the rows of a state table: indexes from hashes to slots, and queues of slots by time.

An index is a list of **sorted runs**, merged geometrically like the levels of an LSM tree (O'Neil et al. 1996), so that
a micro-batch costs what it adds, amortised, never a pass over the state. A micro-batch's run is *staged* until it is
committed. The oldest runs may have moved to host memory; they are searched and merged there. Merges of entries with
times, which cost the most, go on some entries with each micro-batch (`_Merges`).

`HashIndex` leads from the hash of a key to the slots of its rows. An entry is one uint64: the upper half of the row's
hash, then its slot; sorting entries sorts by hash and, within a hash, by slot. Each run has a directory of hash
prefixes, so a lookup is one jump and a short scan, without a search. Hashes may collide: callers verify candidates by
real equality.

`TimeIndex` leads from the hash of a key and a span of time to the slots of its rows. Entries are sorted by hash, within
a hash by time, and within a time by what orders ties, if anything does, and by arrival: so the rows of a key inside an
interval are one range, whose ends a bisection finds without a look at the key's other rows, and the newest row of a
time is the last one.

**Three places**: what a GPU's budget has no room for lies in host memory, and is probed there; what the host's has no
room for lies on local disk, and is read from there.

The newest rows are the likeliest to be asked for, so the oldest go first; and rows before indexes, because every lookup
reads the indexes, but only a match reads rows; then the numbers beside rows. Directories do not go to disk. What lies
where changes no answer.

In a `TimeQueue` what is due is found without a look at the rest.

When a compaction gives rows new slots, the runs of an index and of a queue follow one after the other, some entries
with each micro-batch (`Following`). They are looked into as they are until all have.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.errors import out_of_memory
from gpu_ops.files.disk import LEAST, Disk, File, NoRoomError
from gpu_ops.kernels import Kernels, SearchedRun

_log = logging.getLogger("gpu_ops")


class Both:
    """An array in the backend's memory, copied to the host's when first asked for there.

    Args:
        kernels: the backend.
        array: its array.
    """

    def __init__(self, kernels: Kernels, array: Array) -> None:
        self._kernels, self._array = kernels, array
        self._copy: Array = None

    def at(self, home: Kernels) -> Array:
        """The array in the memory of ``home``: the backend itself, or its ``host``."""
        if home is self._kernels:
            return self._array
        if self._copy is None:
            self._copy = self._kernels.asnumpy(self._array)
        return self._copy


@contextlib.contextmanager
def postponed(kernels: Kernels, what: str) -> Iterator[None]:
    """Leaves out for now what only makes later work cheaper, if the GPU has no memory for it, or the disk no room.

    The work within must leave everything as it was when it fails.
    """
    try:
        yield
    except NoRoomError as error:
        _log.warning("%s is postponed: %s", what, error)
    except Exception as error:
        if kernels.host is None or not out_of_memory(error):
            raise
        _log.info("%s is postponed for want of GPU memory: %s", what, error)


class Sorted(Protocol):
    """Immutable entries in some order, and what stands beside them."""

    @property
    def entries(self) -> Array:
        """N uint64, see `gpu_ops.layouts.entries`."""

    @property
    def held(self) -> object:
        """What these are in, which nothing else is."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    @property
    def home(self) -> Kernels:
        """The backend in whose memory it lies, or which reads it from disk."""

    @property
    def file(self) -> File | None:
        """Where all its arrays but the directory lie, if on disk."""


class AnyRun(Sorted, SearchedRun, Protocol):
    """The same by hash, so that it can be searched."""


_PART = 1 << 15
"""So many entries of a run are merged at a time."""
_ENTRIES_A_CHANGE = 8
"""So many are merged for each that comes: before as many have come again as there are in a run, it is merged."""

S = TypeVar("S", bound=Sorted)
R = TypeVar("R", bound=AnyRun)


def _on_disk(run: Sorted) -> int:
    return 0 if run.file is None else run.file.size


@dataclasses.dataclass
class _Followed(Generic[S]):
    """What of a run has followed a compaction."""

    held: object
    """What the run's entries are in."""
    size: int
    """How many these are."""
    looked: int = 0
    """At how many of them."""
    arrays: list[Array] | None = None
    """Those that stay in new slots, and what stands beside them, with room for the rest: memory that is never touched
    costs nothing."""
    kept: int = 0
    """How many there are."""
    made: list[S] | None = None
    """Once that is all: the new run, or none."""

    @property
    def nbytes(self) -> int:
        """Bytes of what has followed."""
        return sum(run.nbytes for run in self.made or ()) + self.kept * sum(a.itemsize for a in self.arrays or ())

    def add(self, pieces: Sequence[Array], xp: Any) -> None:
        """Put more behind what stays."""
        if self.arrays is None:
            self.arrays = [xp.empty(self.size, piece.dtype) for piece in pieces]
        first, self.kept = self.kept, self.kept + int(pieces[0].size)
        for array, piece in zip(self.arrays, pieces, strict=True):
            array[first : self.kept] = piece


class _Merging(Generic[S]):
    """Runs that become one, part by part: what is sorted stays in the processor's cache. On a GPU all is one part.

    Args:
        runs: those, of one memory.
        arrays: of each, the first of them ascending.
        whole: gives for numbers of the first array those before which a part may end.
        in_order: puts arrays of several runs, one behind the other, in the order of one.

    Attributes:
        made: as much of the new run's arrays as is done; the rest is room, and memory that is never touched costs
            nothing.
    """

    def __init__(
        self,
        runs: Sequence[S],
        arrays: Sequence[Sequence[Array]],
        whole: Callable[[Array], Array],
        in_order: Callable[..., Sequence[Array]],
    ) -> None:
        self.runs, self._arrays, self._in_order = runs, arrays, in_order
        self._home = home = runs[0].home
        step = layouts.MAX_SLOTS if home.host is not None else 3 if home.tiny_segments else _PART
        cuts = whole(home.xp.concatenate([own[0][step::step] for own in arrays]))
        cuts.sort()
        bounds = [[0, *home.xp.searchsorted(own[0], cuts).tolist(), int(own[0].size)] for own in arrays]
        self._parts = list(zip(*map(itertools.pairwise, bounds), strict=True))[::-1]
        size = sum(last for *_, last in bounds)
        self.made = [home.xp.empty(size, array.dtype) for array in arrays[0]]
        self._done = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is done."""
        return sum(self._done * int(array.itemsize) for array in self.made)

    def go_on(self, most: int | None) -> bool:
        """Do so many entries more, or a few more than that; all for None. Whether that is all."""
        stop = None if most is None else self._done + most
        while self._parts and (stop is None or self._done < stop):
            pieces = [
                [array[slice(*part)] for array in own] for own, part in zip(self._arrays, self._parts[-1], strict=True)
            ]
            last = self._done + sum(int(own[0].size) for own in pieces)
            if last > self._done:
                columns = (self._home.xp.concatenate(column) for column in zip(*pieces, strict=True))
                for array, values in zip(self.made, self._in_order(self._home, *columns), strict=True):
                    array[self._done : last] = values
            self._done = last
            self._parts.pop()
        return not self._parts


def merged_at_once(kernels: Kernels, coming: int) -> int | None:
    """Entries that a merge does with a micro-batch in which so many come; None for all, as on a GPU."""
    few, more = (4, 2) if kernels.tiny_segments else (_PART, _ENTRIES_A_CHANGE)
    return None if kernels.host is not None else more * coming + few


class _Merges(Generic[S]):
    """Merges of runs, which go on some entries with each micro-batch; until one is done, its runs are looked into.

    Args:
        grows: whether a run and those after it become one.
        begun: the merge of some runs.
        ended: the run of one that is done, or none.
    """

    def __init__(
        self,
        grows: Callable[[S, Sequence[S]], bool],
        begun: Callable[[Sequence[S]], _Merging[S]],
        ended: Callable[[_Merging[S], Sequence[S]], list[S]],
    ) -> None:
        self._grows, self._begun, self._ended = grows, begun, ended
        self._under_way: list[_Merging[S]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what is done."""
        return sum(merging.nbytes for merging in self._under_way)

    def go_on(self, runs: list[S], most: int | None) -> list[S]:
        """Begin those that there are, and go on with all.

        Args:
            runs: oldest first.
            most: entries of each.

        Returns:
            The runs that there are then.
        """
        taken = {id(run.held) for merging in self._under_way for run in merging.runs}
        number = len(runs) - 1
        while number > 0 and id(runs[number - 1].held) not in taken and self._grows(runs[number - 1], runs[number:]):
            number -= 1
        if len(runs) - number > 1:
            self._under_way.append(self._begun(runs[number:]))
        for merging in [*self._under_way]:
            first = next((n for n, run in enumerate(runs) if run.held is merging.runs[0].held), len(runs))
            own = runs[first : first + len(merging.runs)]
            if [id(run.held) for run in own] != [id(run.held) for run in merging.runs]:
                self._under_way.remove(merging)  # one has moved, or all of it was taken
            elif merging.go_on(most):
                runs = [*runs[:first], *self._ended(merging, own), *runs[first + len(own) :]]
                self._under_way.remove(merging)
        return runs


Ahead: TypeAlias = Mapping[int, _Followed[S]]
"""What has followed a compaction, by the `id` of what a run's entries are in."""


class Following(abc.ABC, Generic[S]):
    """Runs, oldest first, that follow a compaction some entries at a time.

    Args:
        kernels: the backend.

    Attributes:
        ahead: what has followed the compaction that is under way. These runs are not merged meanwhile.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._xp: Any = kernels.xp
        self.runs: list[S] = []
        self.ahead: Ahead[S] = {}

    @property
    @abc.abstractmethod
    def coming(self) -> int:
        """Entries that the next `commit` brings."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Make what is prepared final."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Forget it."""

    @staticmethod
    @abc.abstractmethod
    def _arrays(run: S) -> tuple[Array, ...]:
        """Its entries, and what stands beside them."""

    @abc.abstractmethod
    def _like(self, run: S, arrays: Sequence[Array]) -> S:
        """A run like another one, of some of its entries in new slots."""

    def _as_now(self, run: S, made: list[S]) -> list[S]:
        """What was made of a run, without what has left that since."""
        del run
        return made

    def left(self, ahead: Ahead[S]) -> int:
        """How many entries are still to follow, given what has."""
        looked = (ahead[id(run.held)].looked if id(run.held) in ahead else 0 for run in self.runs)
        return sum(int(run.entries.size) for run in self.runs) - sum(looked)

    def follow(self, new_slots: Slots, before: Ahead[S], most: int | None) -> Ahead[S]:
        """What has followed a compaction, and some entries more.

        A run that was merged or moved since begins again. One on disk follows at once: a half of it has no place.

        Args:
            new_slots: int64, the new slot of each old one, ascending, -1 for slots that go.
            before: what has followed.
            most: entries to be looked at now; None for all.
        """
        everywhere, ahead, left = Both(self._kernels, new_slots), dict[int, _Followed[S]](), most
        for run in self.runs:
            if left is not None and left <= 0:
                break
            known = before.get(id(run.held)) or _Followed[S](run.held, int(run.entries.size))
            ahead[id(run.held)] = known
            if known.made is not None:
                continue
            arrays, size = self._arrays(run), known.size
            stop = size if left is None or run.file is not None else min(known.looked + left, size)
            part = slice(known.looked, stop)
            entries, there = layouts.renumbered(arrays[0][part], everywhere.at(run.home))
            pieces = [entries, *(array[part][there] for array in arrays[1:])]
            if stop - known.looked < size:
                known.add(pieces, run.home.xp)
                pieces = [array[: known.kept] for array in known.arrays or ()]
            left = None if left is None else left - (stop - known.looked)
            known.looked = stop
            if stop == size:
                known.made, known.arrays = [self._like(run, pieces)] if pieces[0].size else [], None
        return ahead

    def renumbered(self, new_slots: Slots, before: Ahead[S] | None = None) -> Self:
        """Another one, in new slots; arguments as `follow`."""
        ahead, other = self.follow(new_slots, before or {}, None), type(self)(self._kernels)
        for run in self.runs:
            other.runs += self._as_now(run, ahead[id(run.held)].made or [])
        return other


class Runs(Following[R]):
    """An index as a short list of runs, oldest first.

    Args:
        kernels: the backend.
    """

    growth: int
    """A run is merged into the one before while that one is at most this many times as large."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.staged: R | None = None

    @staticmethod
    @abc.abstractmethod
    def _merged(older: R, newer: R) -> R:
        """One run of two of one memory; nothing may be left of the first."""

    @abc.abstractmethod
    def _merge(self, coming: int) -> None:
        """Merge what is to be merged, given how many entries have come."""

    @staticmethod
    @abc.abstractmethod
    def _moved(run: R, copy: Callable[[Array], Array], home: Kernels) -> R:
        """The run in another memory; ``copy`` takes an array there."""

    @staticmethod
    @abc.abstractmethod
    def _written(run: R, disk: Disk) -> R:
        """The run as it is on disk."""

    @staticmethod
    @abc.abstractmethod
    def _made(run: R, arrays: Sequence[Array]) -> R:
        """As `_like`, in memory."""

    def _like(self, run: R, arrays: Sequence[Array]) -> R:
        made = self._made(run, arrays)
        return made if run.file is None else self._written(made, run.file.disk)

    @property
    def coming(self) -> int:
        """Entries that the next `commit` brings."""
        return 0 if self.staged is None else int(self.staged.entries.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, and of what has followed a compaction."""
        there = [*self.runs, *([self.staged] if self.staged else [])]
        return sum(r.nbytes for r in there) + sum(known.nbytes for known in self.ahead.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the runs that lie in host memory."""
        return sum(r.nbytes - _on_disk(r) for r in self.runs if r.home.host is None)

    @property
    def disk_bytes(self) -> int:
        """Bytes of those on disk."""
        return sum(map(_on_disk, [*self.runs, *(run for known in self.ahead.values() for run in known.made or ())]))

    def commit(self) -> None:
        """Keep the staged rows."""
        if self.staged is None:
            return
        coming = self.coming
        self.runs.append(self.staged)
        self.staged = None
        with postponed(self._kernels, "merging an index"):
            self._merge(coming)

    def _grows(self, run: R, added: Sequence[R]) -> bool:
        """Whether a run and those after it become one."""
        most = self._kernels.piece_bytes
        small = most is None or run.nbytes + sum(one.nbytes for one in added) <= most
        here = run.home is self._kernels and run.file is None and id(run.held) not in self.ahead
        return small and here and self._near(run, *added)

    def _near(self, run: R, *added: R) -> bool:
        return bool(run.entries.size <= self.growth * sum(int(one.entries.size) for one in added))

    def found(
        self,
        runs: Sequence[R],
        needles: Array,
        times: tuple[Array, Array] | None = None,
        *,
        by_candidate: bool = False,
        at_most: int | None = None,
    ) -> Array:
        """Candidates in some of the runs, in whichever memory each lies; see `gpu_ops.kernels.Kernels.search`."""
        pairs = []
        given = [Both(self._kernels, array) for array in (needles, *(times or ()))]
        for home in (self._kernels.host, self._kernels):
            there = [run for run in runs if run.home is home]
            if home is not None and there:
                own, *span = (array.at(home) for array in given)
                within = (span[0], span[1]) if times is not None else None
                found = home.search(there, own, within, by_candidate=by_candidate, at_most=at_most)
                at_most = None if at_most is None else at_most - int(found.size)
                pairs.append(found if home is self._kernels else self._kernels.asarray(found))
        if len(pairs) == 1:
            return pairs[0]
        return self._xp.concatenate([self._xp.empty(0, np.int64), *pairs])

    def discard(self) -> None:
        """Forget the staged rows."""
        self.staged = None

    def cool(self, wanted: int, disk: Disk | None = None) -> int:
        """Move the oldest run in GPU memory to the host's, or with a disk the oldest in host memory there.

        Args:
            wanted: bytes to be freed; a run goes whole.
            disk: see `gpu_ops.kernels.Store.cool`.

        Returns:
            The bytes freed, 0 if there is none that can go.

        Raises:
            NoRoomError: the disk has no room; the run stays.
        """
        if disk is not None:
            return self._cool_to(disk)
        del wanted
        host = self._kernels.host
        number = sum(r.home is host for r in self.runs)
        if host is None or number == len(self.runs):
            return 0
        run = self.runs[number]
        self.runs[number] = self._moved(run, self._kernels.asnumpy, host)
        while number and self._near(self.runs[number - 1], self.runs[number]):
            number -= 1
            self.runs[number : number + 2] = [self._merged(*self.runs[number : number + 2])]
        return run.nbytes

    def _cool_to(self, disk: Disk) -> int:
        least = 1 if self._kernels.tiny_segments else LEAST
        there = [r.home.host is None and r.file is None and r.nbytes >= least for r in self.runs]
        if True not in there:
            return 0
        number, before = there.index(True), self.host_bytes
        self.ahead = {key: known for key, known in self.ahead.items() if known.held is not self.runs[number].held}
        self.runs[number] = self._written(self.runs[number], disk)
        # Runs of one size become one: an entry is written again no oftener than their size can double.
        while number and self._alike(*self.runs[number - 1 : number + 1]):
            number -= 1
            self.runs[number : number + 2] = [self._written(self._merged(*self.runs[number : number + 2]), disk)]
        return before - self.host_bytes

    @staticmethod
    def _alike(older: R, newer: R) -> bool:
        return older.file is not None and bool(older.entries.size <= newer.entries.size)

    def warm(self) -> None:
        """Move all runs back to GPU memory."""
        for number, run in enumerate(self.runs):
            if run.home is not self._kernels:
                self.runs[number] = self._moved(run, self._kernels.asarray, self._kernels)


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
    made: Array | None = None
    """The directory, once a lookup has needed it: most runs are merged before."""
    file: File | None = None

    @property
    def entries(self) -> Array:
        """The entries; whoever keeps them makes the next merge copy all that there are."""
        return self.home.beginning(self.buffer, self.size)

    @property
    def held(self) -> object:
        """The buffer."""
        return self.buffer

    @property
    def directory(self) -> Array:
        """Where each hash prefix begins."""
        if self.made is None:
            self.made = self.home.directory(self.entries, self.shift)
        return self.made

    @property
    def times(self) -> None:
        """Entries of a hash are in the order of their slots."""

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.entries.nbytes + (0 if self.made is None else self.made.nbytes))


class HashIndex(Runs[Run]):
    """Slots by hash."""

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
        """The same, of n entries (uint64), which are sorted in place."""
        if entries.size:
            entries.sort()
            self.staged = _hash_run(self._kernels, entries)

    def put(self, entries: Array) -> None:
        """Make rows findable from the next `commit` on, of n ascending entries; on the CPU `unite` has to follow."""
        if entries.size:
            run = _hash_run(self._kernels, entries)
            if self._kernels.host is None:
                self.runs.append(run)
            else:
                self.staged = run

    def unite(self) -> None:
        """Make one run of those that were put and are in memory."""
        if len(there := [run for run in self.runs if run.file is None]) > 1:
            entries = self._xp.concatenate([run.entries for run in there])
            entries.sort(kind="stable")  # timsort, which merges ascending parts
            self.runs = [*(run for run in self.runs if run.file is not None), _hash_run(self._kernels, entries)]

    def probe(self, hashes: Hashes, *, staged: bool) -> tuple[Positions, Slots]:
        """Candidates for each of n hashes.

        Args:
            hashes: n uint64, in any order.
            staged: whether staged rows are candidates too.

        Returns:
            Positions of needles and candidate slots (int64), ordered by needle, then by slot.
        """
        needles = self._kernels.entries(hashes, 0)
        needles.sort()
        pairs = self.meet(needles, staged=staged)
        pairs.sort()
        return layouts.unpaired(pairs)

    def meet(self, needles: Array, *, staged: bool, by_candidate: bool = False, at_most: int | None = None) -> Array:
        """Candidates for each of n entries, of another index perhaps.

        Args:
            needles: n uint64, ascending, so that what they look at lies in the order in which they look.
            staged: whether staged rows are candidates too.
            by_candidate: give the candidate's slot first.
            at_most: how many there may be.

        Returns:
            Pairs (int64, see `gpu_ops.layouts.pairs`) of the needle's and the candidate's slot, in any order.

        Raises:
            TooMany: there are more than there may be.
        """
        runs = [*self.runs, self.staged] if staged and self.staged is not None else self.runs
        return self.found(runs, needles, by_candidate=by_candidate, at_most=at_most)

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
        return Run(entries, run.size, run.shift, run.home, run.made, file)

    @staticmethod
    def _moved(run: Run, copy: Callable[[Array], Array], home: Kernels) -> Run:
        entries = copy(run.entries)
        return Run(entries, run.size, run.shift, home, None if run.made is None else copy(run.made))

    @staticmethod
    def _arrays(run: Run) -> tuple[Array, ...]:
        return (run.entries,)

    @staticmethod
    def _made(run: Run, arrays: Sequence[Array]) -> Run:
        return _hash_run(run.home, arrays[0])


def _hash_run(home: Kernels, entries: Array) -> Run:
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
    if shift == run.shift and run.made is not None:
        # Where a prefix begins is how many entries come before it, in one part and in the other.
        directory = home.directory(added.entries, shift)
        directory += run.made
    return Run(buffer, size, shift, home, directory)


def prefix_shift(size: int, bucket: int) -> int:
    """How far a 32-bit hash is shifted to be a prefix shared by at most ``bucket`` of ``size`` entries on average."""
    return 32 - max(1, int(size // bucket).bit_length())


_HASH_BITS = 32
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

    @property
    def held(self) -> object:
        """The entries."""
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
        self._merges = _Merges[TimeRun](self._grows, _time_merging, lambda merging, _: [_time_run_of(merging)])

    def _merge(self, coming: int) -> None:
        self.runs = self._merges.go_on(self.runs, merged_at_once(self._kernels, coming))

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, and of what has followed a compaction or is merged."""
        return super().nbytes + self._merges.nbytes

    def stage(self, hashes: Hashes, slots: Slots, times: Array, ties: Array | None = None) -> None:
        """Make rows findable, until `commit` for good or `discard` not at all.

        Args:
            hashes: n uint64.
            slots: n int64.
            times: n int64.
            ties: n int64 that order rows of one hash and time; None for their slots; always or never.
        """
        if slots.size:
            self.staged = _time_run(self._kernels, layouts.entries(hashes, slots), times, ties)

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
        merging = _time_merging((older, newer))
        merging.go_on(None)
        return _time_run_of(merging)

    @staticmethod
    def _written(run: TimeRun, disk: Disk) -> TimeRun:
        ties = () if run.ties is None else (run.ties,)
        file, (entries, times, *more) = disk.keep(run.entries, run.times, *ties)
        return dataclasses.replace(run, entries=entries, times=times, ties=more[0] if more else None, file=file)

    @staticmethod
    def _moved(run: TimeRun, copy: Callable[[Array], Array], home: Kernels) -> TimeRun:
        ties = None if run.ties is None else copy(run.ties)
        return TimeRun(copy(run.entries), copy(run.times), copy(run.directory), run.shift, run.span, home, ties)

    @staticmethod
    def _arrays(run: TimeRun) -> tuple[Array, ...]:
        return run.entries, run.times, *(() if run.ties is None else (run.ties,))

    @staticmethod
    def _made(run: TimeRun, arrays: Sequence[Array]) -> TimeRun:
        entries, times, *ties = arrays
        return _with_directory(run.home, entries, times, run.span, ties[0] if ties else None)


def _time_merging(runs: Sequence[TimeRun]) -> _Merging[TimeRun]:
    arrays = [TimeIndex._arrays(run) for run in runs]
    return _Merging(runs, arrays, lambda cuts: cuts >> np.uint64(32) << np.uint64(32), _in_order)


def _time_run_of(merging: _Merging[TimeRun]) -> TimeRun:
    """The run of a merge that is done."""
    runs, made = merging.runs, merging.made
    span = min(run.span[0] for run in runs), max(run.span[1] for run in runs)
    return _with_directory(runs[0].home, made[0], made[1], span, *made[2:])


def _time_run(home: Kernels, entries: Array, times: Array, ties: Array | None) -> TimeRun:
    """Entries in their order; those of one hash and time stay in the order they have."""
    span = int(times.min()), int(times.max())
    arrays = _in_order(home, entries, times, *(() if ties is None else (ties,)))
    return _with_directory(home, arrays[0], arrays[1], span, *arrays[2:])


def _in_order(home: Kernels, entries: Array, times: Array, *ties: Array) -> list[Array]:
    """Entries, their times and ties, in the order of a run."""
    hashes, low = layouts.entry_hashes(entries), times.min()
    bits = (int(times.max()) - int(low)).bit_length()
    if bits > _HASH_BITS:
        hashes -= hashes.min()  # those of a part of a run are close together
    fits = bits <= _HASH_BITS or int(hashes.max()).bit_length() + bits < 2 * _HASH_BITS
    if fits and not bool((times[1:] >= times[:-1]).all()):
        # hash and time in one number; a stable sort of a few runs is a merge (timsort)
        order = home.argsort(hashes << np.uint64(bits) | (times - low).view(np.uint64))
    else:
        order = _among_alike(home, home.argsort(hashes), (hashes,), times)
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
    home: Kernels, entries: Array, times: Array, span: tuple[int, int], ties: Array | None = None
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
        """The entries."""
        return self.entries

    @property
    def size(self) -> int:
        """Of how many slots it still is."""
        return int(self.entries.size) - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.times.nbytes + self.entries.nbytes)


def _chunk_merging(runs: Sequence[_Chunk]) -> _Merging[_Chunk]:
    arrays = [(chunk.times[chunk.first :], chunk.entries[chunk.first :]) for chunk in runs]
    return _Merging(runs, arrays, lambda cuts: cuts, _by_first)


def _by_first(home: Kernels, *arrays: Array) -> list[Array]:
    order = home.argsort(arrays[0])
    return [array[order] for array in arrays]


class TimeQueue(Following[_Chunk]):
    """Slots by time, earliest first; taking what is due costs what is due."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._left: list[_Chunk] | None = None
        self._added: _Chunk | None = None
        self._merges = _Merges(self._grows, _chunk_merging, self._ended)

    @property
    def coming(self) -> int:
        """Entries that the next `commit` brings."""
        return 0 if self._added is None else self._added.size

    def take(self, until: int) -> Slots:
        """All slots of times up to ``until``, inclusive; for good with `commit`, not at all with `discard`."""
        found, left = [self._xp.empty(0, np.int64)], []
        for chunk in self.runs:
            due = max(chunk.first, int(self._xp.searchsorted(chunk.times, until, side="right")))
            found.append(chunk.entries[chunk.first : due].view(np.int64))
            if due < chunk.entries.size:
                left.append(dataclasses.replace(chunk, first=due))
        self._left = left
        return self._xp.concatenate(found)

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
            chunks = self._merges.go_on([*chunks, self._added], merged_at_once(self._kernels, self._added.size))
        self.runs = chunks
        self.discard()

    def _grows(self, run: _Chunk, added: Sequence[_Chunk]) -> bool:
        return run.size <= sum(chunk.size for chunk in added) and id(run.held) not in self.ahead

    def _ended(self, merging: _Merging[_Chunk], runs: Sequence[_Chunk]) -> list[_Chunk]:
        times, entries = merging.made
        made, earliest = _Chunk(times, entries, runs[0].home), min(runs, key=lambda run: run.times[run.first])
        return self._as_now(earliest, [made])

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
        earliest = int(run.times[run.first])  # all that was taken is earlier
        now = [dataclasses.replace(one, first=int(self._xp.searchsorted(one.times, earliest))) for one in made]
        return [one for one in now if one.size]
