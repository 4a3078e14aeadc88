"""Sorted runs, of which indexes and queues are made: how they are merged, moved, and follow a compaction.

An index is a list of **sorted runs**, merged geometrically like the levels of an LSM tree (O'Neil et al. 1996), so that
a micro-batch costs what it adds, amortised, never a pass over the state. A micro-batch's run is *staged* until it is
committed. The oldest runs may have moved to host memory; they are searched and merged there. Merges of entries with
times, which cost the most, go on some entries with each micro-batch (`Merges`).

**Three places**: what a GPU's budget has no room for lies in host memory, and is probed there; what the host's has no
room for lies on local disk, and is read from there.

The newest rows are the likeliest to be asked for, so the oldest go first; and rows before indexes, because every lookup
reads the indexes, but only a match reads rows; then the numbers beside rows. Directories do not go to disk. What lies
where changes no answer.

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
from gpu_ops.files.disk import LEAST, PAGES, Disk, File, NoRoomError
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
        """An object that holds the entries and identifies the run: no other run shares it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    @property
    def home(self) -> Kernels:
        """The backend in whose memory it lies, or which reads it from disk."""

    @property
    def file(self) -> File | None:
        """The file of all arrays but the directory; None for a run in memory."""


class Passed:
    """Places in a run where the entries of dead rows at the beginning of a hash end: no lookup reads them again."""

    def __init__(self) -> None:
        self._begins: Array = None
        self._ends: Array = None

    def beyond(self, xp: Any, begins: Positions) -> Positions:
        """The places from where n hashes are to be read, given where each begins."""
        if self._begins is None:
            return begins
        place = xp.minimum(xp.searchsorted(self._begins, begins), self._begins.size - 1)
        return xp.where(self._begins[place] == begins, self._ends[place], begins)

    def note(self, xp: Any, begins: Positions, ends: Positions) -> None:
        """From now on what begins at n places, repeated ones included, is read from n others on, for good."""
        if self._begins is not None:
            begins, ends = xp.concatenate([begins, self._begins]), xp.concatenate([ends, self._ends])
        order = xp.argsort(layouts.pairs(begins, ends))
        begins, ends = begins[order], ends[order]
        last = xp.ones(begins.size, bool)
        last[:-1] = begins[1:] != begins[:-1]
        self._begins, self._ends = xp.compress(last, begins), xp.compress(last, ends)


class AnyRun(Sorted, SearchedRun, Protocol):
    """A run sorted by hash, so that it can be searched."""

    @property
    def passed(self) -> Passed:
        """The dead entries that lookups of first rows have passed over."""


_PART = 1 << 15
"""So many entries of a run are merged at a time."""
_ENTRIES_A_CHANGE = 8
"""So many are merged for each that comes: before as many have come again as there are in a run, it is merged."""

S = TypeVar("S", bound=Sorted)
R = TypeVar("R", bound=AnyRun)


def _in_order(run: Sorted) -> contextlib.AbstractContextManager[None]:
    """Meanwhile all of a run is looked at."""
    return contextlib.nullcontext() if run.file is None else run.file.in_order()


def _on_disk(run: Sorted) -> int:
    return 0 if run.file is None else run.file.size


@dataclasses.dataclass
class _FollowedRun(Generic[S]):
    """The progress of one run in following a compaction."""

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
    new_runs: list[S] | None = None
    """Once that is all: the new run, or none."""

    @property
    def nbytes(self) -> int:
        """Bytes of what has followed."""
        return sum(run.nbytes for run in self.new_runs or ()) + self.kept * sum(a.itemsize for a in self.arrays or ())

    def add(self, pieces: Sequence[Array], xp: Any) -> None:
        """Put more behind what stays."""
        if self.arrays is None:
            self.arrays = [xp.empty(self.size, piece.dtype) for piece in pieces]
        first, self.kept = self.kept, self.kept + int(pieces[0].size)
        for array, piece in zip(self.arrays, pieces, strict=True):
            array[first : self.kept] = piece


class Merging(Generic[S]):
    """Runs that become one, part by part: what is sorted stays in the processor's cache. On a GPU all is one part.

    Args:
        runs: those, of one memory.
        arrays: of each, the first of them ascending.
        whole: gives for numbers of the first array those before which a part may end.
        in_order: puts arrays of several runs, one behind the other, in the order of one.

    Attributes:
        merged: as much of the new run's arrays as is done; the rest is room, and memory that is never touched costs
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
        bounds = [[0, int(own[0].size)] for own in arrays]
        if home.host is None:
            step = 3 if home.tiny_segments else _PART
            cuts = np.sort(whole(np.concatenate([own[0][step::step] for own in arrays])))
            bounds = [[0, *np.searchsorted(own[0], cuts).tolist(), own[0].size] for own in arrays]
        self._parts = list(zip(*map(itertools.pairwise, bounds), strict=True))[::-1]
        self._size = sum(last for *_, last in bounds)
        self.merged: list[Array] = []
        self._done = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is done."""
        return sum(self._done * int(array.itemsize) for array in self.merged)

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
                ordered = self._in_order(self._home, *columns)
                if last - self._done == self._size:
                    self.merged = list(ordered)
                else:
                    self.merged = self.merged or [self._home.xp.empty(self._size, values.dtype) for values in ordered]
                    for array, values in zip(self.merged, ordered, strict=True):
                        array[self._done : last] = values
            self._done = last
            self._parts.pop()
        return not self._parts


class Merges(Generic[S]):
    """Merges of runs, which go on some entries with each micro-batch; until one is done, its runs are looked into.

    Args:
        kernels: the backend; a GPU does all at once.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._few, self._more = (4, 2) if kernels.tiny_segments else (_PART, _ENTRIES_A_CHANGE)
        self._at_once = kernels.host is not None
        self._under_way: list[Merging[S]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what is done."""
        return sum(merging.nbytes for merging in self._under_way)

    def go_on(
        self,
        runs: list[S],
        coming: int,
        grows: Callable[[S, Sequence[S]], bool],
        begun: Callable[[Sequence[S]], Merging[S]],
        ended: Callable[[Merging[S], Sequence[S]], list[S]],
    ) -> list[S]:
        """Begin those that there are, and go on with all.

        Args:
            runs: oldest first.
            coming: how many entries have come.
            grows: whether a run and those after it become one.
            begun: the merge of some runs.
            ended: the run of one that is done, or none.

        Returns:
            The runs that there are then.
        """
        most = None if self._at_once else self._more * coming + self._few
        taken = {id(run.held) for merging in self._under_way for run in merging.runs}
        number = len(runs) - 1
        while number > 0 and id(runs[number - 1].held) not in taken and grows(runs[number - 1], runs[number:]):
            number -= 1
        if len(runs) - number > 1:
            self._under_way.append(begun(runs[number:]))
        for merging in [*self._under_way]:
            first = next((n for n, run in enumerate(runs) if run.held is merging.runs[0].held), len(runs))
            own = runs[first : first + len(merging.runs)]
            if [id(run.held) for run in own] != [id(run.held) for run in merging.runs]:
                self._under_way.remove(merging)  # one has moved, or all of it was taken
            elif merging.go_on(most):
                runs = [*runs[:first], *ended(merging, own), *runs[first + len(own) :]]
                self._under_way.remove(merging)
        return runs


FollowedRuns: TypeAlias = Mapping[int, _FollowedRun[S]]
"""What has followed a compaction, by the `id` of what a run's entries are in."""


class Following(abc.ABC, Generic[S]):
    """Runs, oldest first, that follow a compaction some entries at a time.

    Args:
        kernels: the backend.

    Attributes:
        followed: what has followed the compaction that is under way. These runs are not merged meanwhile.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._xp: Any = kernels.xp
        self.runs: list[S] = []
        self.followed: FollowedRuns[S] = {}

    @property
    @abc.abstractmethod
    def coming(self) -> int:
        """Entries that the next `commit` brings."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Make what is prepared final."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Forgets what is staged."""

    @staticmethod
    @abc.abstractmethod
    def _arrays(run: S) -> tuple[Array, ...]:
        """Its entries, and what stands beside them."""

    @abc.abstractmethod
    def _like(self, run: S, arrays: Sequence[Array]) -> S:
        """A run like another one, of some of its entries in new slots."""

    def _as_now(self, run: S, made: list[S]) -> list[S]:
        """Drops from the runs made of a followed run what has left it since."""
        del run
        return made

    def left(self, followed: FollowedRuns[S]) -> int:
        """The number of entries that are still to follow a compaction, given what has."""
        looked = (followed[id(run.held)].looked if id(run.held) in followed else 0 for run in self.runs)
        return sum(int(run.entries.size) for run in self.runs) - sum(looked)

    def follow(self, new_slots: Slots, before: FollowedRuns[S], most: int | None) -> FollowedRuns[S]:
        """Moves some entries more to their new slots after a compaction.

        A run that was merged or moved since begins again. One on disk follows at once: a half of it has no place.

        Args:
            new_slots: int64, the new slot of each old one, ascending, -1 for slots that go.
            before: what has followed.
            most: entries to be looked at now; None for all.
        """
        everywhere, followed, left = Both(self._kernels, new_slots), dict[int, _FollowedRun[S]](), most
        for run in self.runs:
            if left is not None and left <= 0:
                break
            known = before.get(id(run.held)) or _FollowedRun[S](run.held, int(run.entries.size))
            followed[id(run.held)] = known
            if known.new_runs is not None:
                continue
            arrays, size = self._arrays(run), known.size
            stop = size if left is None or run.file is not None else min(known.looked + left, size)
            part = slice(known.looked, stop)
            with _in_order(run):
                entries, there = layouts.renumbered(arrays[0][part], everywhere.at(run.home))
                pieces = [entries, *(array[part][there] for array in arrays[1:])]
            if stop - known.looked < size:
                known.add(pieces, run.home.xp)
                pieces = [array[: known.kept] for array in known.arrays or ()]
            left = None if left is None else left - (stop - known.looked)
            known.looked = stop
            if stop == size:
                known.new_runs, known.arrays = [self._like(run, pieces)] if pieces[0].size else [], None
        return followed

    def renumbered(self, new_slots: Slots, before: FollowedRuns[S] | None = None) -> Self:
        """Another one, in new slots; arguments as `follow`."""
        followed, other = self.follow(new_slots, before or {}, None), type(self)(self._kernels)
        for run in self.runs:
            other.runs += self._as_now(run, followed[id(run.held)].new_runs or [])
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
    def _rebuilt(run: R, arrays: Sequence[Array]) -> R:
        """Makes a run in memory of some arrays, else like a given one."""

    def _like(self, run: R, arrays: Sequence[Array]) -> R:
        made = self._rebuilt(run, arrays)
        return made if run.file is None else self._written(made, run.file.disk)

    @property
    def coming(self) -> int:
        """Entries that the next `commit` brings."""
        return 0 if self.staged is None else int(self.staged.entries.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, and of what has followed a compaction."""
        there = [*self.runs, *([self.staged] if self.staged else [])]
        return sum(r.nbytes for r in there) + sum(known.nbytes for known in self.followed.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the runs that lie in host memory."""
        return sum(r.nbytes - _on_disk(r) for r in self.runs if r.home.host is None)

    @property
    def disk_bytes(self) -> int:
        """Bytes of those on disk."""
        return sum(
            map(_on_disk, [*self.runs, *(run for known in self.followed.values() for run in known.new_runs or ())])
        )

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
        """Tells whether a run and those after it are to be merged."""
        most = self._kernels.piece_bytes
        small = most is None or run.nbytes + sum(one.nbytes for one in added) <= most
        here = run.home is self._kernels and run.file is None and id(run.held) not in self.followed
        return small and here and self._near(run, *added)

    def _near(self, run: R, *added: R) -> bool:
        return bool(run.entries.size <= self.growth * sum(int(one.entries.size) for one in added))

    def candidates(
        self,
        runs: Sequence[R],
        probe_rows: Array,
        times: tuple[Array, Array] | None = None,
        *,
        by_candidate: bool = False,
        at_most: int | None = None,
    ) -> Array:
        """Candidates in some of the runs, in whichever memory each lies; see `gpu_ops.kernels.Kernels.search`."""
        pairs = []
        given = [Both(self._kernels, array) for array in (probe_rows, *(times or ()))]
        for home in (self._kernels.host, self._kernels):
            there = [run for run in runs if run.home is home]
            if home is not None and there:
                own, *span = (array.at(home) for array in given)
                for run in there:
                    fetch(run, own)
                within = (span[0], span[1]) if times is not None else None
                found = home.search(there, own, within, by_candidate=by_candidate, at_most=at_most)
                at_most = None if at_most is None else at_most - int(found.size)
                pairs.append(found if home is self._kernels else self._kernels.asarray(found))
        if len(pairs) == 1:
            return pairs[0]
        return self._xp.concatenate([self._xp.empty(0, np.int64), *pairs])

    def begin(self, run: R, hashes: Hashes) -> Positions:
        """The place in a run, wherever it lies, where the entries of each of n hashes begin, or would."""
        probe_rows = Both(self._kernels, layouts.entries(hashes, self._xp.zeros(hashes.size, np.int64)))
        own = probe_rows.at(run.home)
        fetch(run, own)
        at = run.home.xp.searchsorted(run.entries, own)
        return at if run.home is self._kernels else self._kernels.asarray(at)

    def entries_at(self, run: R, at: Positions) -> Array:
        """Entries of a run, wherever it lies."""
        entries = run.entries[Both(self._kernels, at).at(run.home)]
        return entries if run.home is self._kernels else self._kernels.asarray(entries)

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
        self.followed = {key: known for key, known in self.followed.items() if known.held is not self.runs[number].held}
        self.runs[number] = self._written(self.runs[number], disk)
        # Runs of one size become one: an entry is written again no oftener than their size can double.
        while number and self._alike(*self.runs[number - 1 : number + 1]):
            number -= 1
            with _in_order(self.runs[number]), _in_order(self.runs[number + 1]):
                merged = self._merged(*self.runs[number : number + 2])
            self.runs[number : number + 2] = [self._written(merged, disk)]
        return before - self.host_bytes

    @staticmethod
    def _alike(older: R, newer: R) -> bool:
        return older.file is not None and bool(older.entries.size <= newer.entries.size)

    def warm(self) -> None:
        """Move all runs back to GPU memory."""
        for number, run in enumerate(self.runs):
            if run.home is not self._kernels:
                self.runs[number] = self._moved(run, self._kernels.asarray, self._kernels)


def fetch(run: AnyRun, probe_rows: Array) -> None:
    """Reads together the pages of a run on disk on which the entries of some probe rows would be."""
    file = run.file
    if file is None or not probe_rows.size:
        return

    def bounds(some: Array) -> Any:
        bucket = (some >> np.uint64(32 + run.shift)).view(np.int64)
        found = 8 * np.concatenate([run.directory[bucket], run.directory[bucket + 1]]).astype(np.int64)
        return found if run.times is None else np.concatenate([found, found + run.entries.nbytes])

    if not file.has(bounds(probe_rows[:: 1 + probe_rows.size // PAGES])):
        file.fetch(bounds(probe_rows))


def prefix_shift(size: int, bucket: int) -> int:
    """The shift that makes of a 32-bit hash a prefix of at most ``bucket`` of ``size`` entries on average."""
    return 32 - max(1, int(size // bucket).bit_length())
