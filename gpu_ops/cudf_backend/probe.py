"""Which way a GPU finds candidates, and the hash joins among the ways. All find the same pairs.

- **Hash join**: ``pylibcudf.join.inner_join`` of the hashes alone. It builds its table of the smaller side, which
  the probe rows are as a rule, and passes over all entries of the runs.
- **Kept table**: ``pylibcudf.join.HashJoin`` of a run, where the installed version has it (NVIDIA/cudf#24241). A run
  never changes, so its table is built once, and dropped with the run when that is merged. A lookup costs what the
  probe rows cost.
- **Search** (`gpu_ops.cudf_backend.search`): some sectors of memory for each probe row and run, however large that is.

`auto` takes whichever of join and search costs less; `choose` has the rule. On the card that it was measured on that is
nearly always the search, which passes over nothing.

The constants are medians of ``benchmarks/gpu``, part ``probe``, on an H100 of 80 GB with libcudf 26.10.2 (2026-11-26):
1M probe rows in runs of 1M to 1G rows take 0.16 to 0.21 ms to search and 0.53 to 29 ms to join; 10,000 take 0.12 ms,
and 0.39 to 27.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
import pylibcudf as plc

from gpu_ops import layouts
from gpu_ops.arrays import Array
from gpu_ops.cudf_backend import device
from gpu_ops.cudf_backend.frame import from_values, values
from gpu_ops.cudf_backend.search import count_candidates, search_runs, sorted_run
from gpu_ops.kernels import Probe, SearchedRun, TooMany

_log = logging.getLogger("gpu_ops")

SEARCH_SECONDS = 0.115e-3
"""Of a search of all runs, however few probe rows there are: two kernels, a running sum, three allocations, a wait."""
SEARCHED_SECONDS = 0.08e-9
"""Of a probe row in a run: a sector (32 bytes) of the directory and one of the entries, in each of two passes."""
JOIN_SECONDS = 0.36e-3
"""Of a join, however small: libcudf's own 0.2, the hashes alone of both sides, and the pairs."""
PROBED_SECONDS = 0.027e-9
"""Of a row of a join's larger side."""
BUILT_SECONDS = 0.2e-9
"""Of a row of a join's smaller side, and of an entry that a kept table is built of."""

LEAST_KEPT = 1 << 20
"""Entries of a run that has a table of its own: below, a pass over it costs less than one more call."""
KEPT_SHARE = 0.2
"""Of the GPU memory limit that kept tables may take. They are the first to go when memory runs out."""
KEPT_BYTES = 20
"""For an entry: its hash, and twice the 8 bytes that libcudf's table has for it at half its load."""
_LIFE = 10
"""A run of n entries lives until n / 10 have been added (`gpu_ops.state.index.HashIndex.growth`)."""

_FAILED = "runs are searched, as a hash join of them failed: %s"

PAIRS_A_PROBE_ROW, FEW_PAIRS = 8, 1 << 22
"""Pairs by hash alone, for each probe row and besides, with which an interval is still joined and then filtered."""


def search_seconds(runs: int, probe_rows: int) -> float:
    """Estimates the cost of a search of so many runs, in seconds."""
    return runs * probe_rows * SEARCHED_SECONDS + SEARCH_SECONDS if runs else 0.0


def join_seconds(entries: int, probe_rows: int) -> float:
    """Estimates the cost of a join with so many entries, in seconds."""
    larger, smaller = max(entries, probe_rows), min(entries, probe_rows)
    return larger * PROBED_SECONDS + smaller * BUILT_SECONDS + JOIN_SECONDS if entries else 0.0


class ProbeWays(NamedTuple):
    """Runs, by position: those with a table that is kept, those joined together, and those searched."""

    kept: list[int]
    joined: list[int]
    searched: list[int]


def choose(
    way: Probe, sizes: Sequence[int], probe_rows: int, tables: Sequence[bool] | None = None, room: int = 0
) -> ProbeWays:
    """Chooses the way in which each run is looked up.

    - ``index``: all are searched.
    - ``auto``: all are searched, all are joined together, or those are joined that are small for so many probe rows,
      whichever costs least.
    - ``hash_join``: a large run has a table of its own where the installed version has those, if it is there, or if to
      build it, spread over the lookups that the run lives for, costs less than a join's pass over the run. The others
      are joined together.

    Args:
        way: as asked for.
        sizes: entries of each run.
        probe_rows: how many there are.
        tables: whether each run has a table; None where the installed version has none.
        room: entries that new tables may have, together.
    """
    numbers = list(range(len(sizes)))
    if way == "index":
        return ProbeWays([], [], numbers)
    if way == "auto":
        small = [at for at in numbers if sizes[at] * PROBED_SECONDS < probe_rows * SEARCHED_SECONDS]

        def cost(joined: list[int]) -> float:
            entries = sum(sizes[at] for at in joined)
            return join_seconds(entries, probe_rows) + search_seconds(len(sizes) - len(joined), probe_rows)

        joined = min([], small, numbers, key=cost)
        return ProbeWays([], joined, [at for at in numbers if at not in joined])
    kept = []
    for at in sorted(numbers, key=sizes.__getitem__, reverse=True) if tables is not None else ():
        if tables is not None and not tables[at]:
            share = BUILT_SECONDS * min(sizes[at], _LIFE * probe_rows)
            if not LEAST_KEPT <= sizes[at] <= room or share > PROBED_SECONDS * sizes[at]:
                continue
            room -= sizes[at]
        kept.append(at)
    return ProbeWays(kept, [at for at in numbers if at not in kept], [])


def probe_runs(
    way: Probe,
    runs: Sequence[SearchedRun],
    probe_rows: Array,
    times: tuple[Array, Array] | None,
    *,
    by_candidate: bool,
    at_most: int | None = None,
    limit: int = 0,
    lookups: MutableMapping[str, int] | None = None,
) -> Array:
    """Candidates of runs, each by the way chosen; other arguments and result as `gpu_ops.kernels.Kernels.search`.

    Where a key has so many rows that a join by hash alone would list too many pairs of other times, and where a join
    finds no memory or has more pairs than libcudf counts, all runs are searched.

    Args:
        way: as asked for.
        runs: as given.
        probe_rows: as given.
        times: as given.
        by_candidate: as given.
        at_most: as given.
        limit: bytes of GPU memory that there are for all, of which kept tables take a part.
        lookups: counts of `gpu_ops.kernels.LOOKUPS`, added to.
    """
    if not probe_rows.size or not runs:
        return cp.empty(0, np.int64)
    sizes = [int(run.entries.size) for run in runs]
    tables = None if table_class() is None else [run.entries in TABLES for run in runs]
    ways = choose(way, sizes, int(probe_rows.size), tables, TABLES.room(limit))
    pairs: list[Array] = []
    hashed, most = [*ways.kept, *ways.joined], at_most
    own = [runs[at] for at in hashed]
    many = PAIRS_A_PROBE_ROW * probe_rows.size + FEW_PAIRS
    if hashed and times is not None and way == "auto" and count_candidates(own, probe_rows, None) > many:
        hashed = []
    if hashed and most is not None and probe_rows.size * sum(sizes[at] for at in hashed) > most:
        # a join writes all pairs; a search counts them first
        most -= count_candidates(own, probe_rows, times)
        if most < 0:
            raise TooMany
    if hashed:
        try:
            pairs = by_hash(runs, ways, probe_rows, times, by_candidate=by_candidate)
        except (MemoryError, OverflowError) as error:
            _log.info(_FAILED, error)
            hashed, most = [], at_most
    others = [run for at, run in enumerate(runs) if at not in hashed]
    if others:
        pairs.append(search_runs(others, probe_rows, times, by_candidate=by_candidate, at_most=most))
    if lookups is not None:
        for name, count in zip(("kept_table", "hash_join"), (len(ways.kept), len(ways.joined)), strict=True):
            lookups[name] += count * int(probe_rows.size) if hashed else 0
        lookups["index"] += len(others) * int(probe_rows.size)
    return pairs[0] if len(pairs) == 1 else cp.concatenate(pairs)


def join_sets(
    way: Probe, left: Array, right: Array, *, at_most: int | None = None, lookups: MutableMapping[str, int]
) -> Array:
    """Joins two sets of hashes by libcudf's hash join; see `gpu_ops.kernels.Kernels.join`.

    With ``probe="index"`` the right one is sorted and searched; so it is to count the pairs where ``at_most`` is given.
    """
    if at_most is not None and count_candidates([sorted_run(right)], cp.sort(left), None) > at_most:
        raise TooMany
    if not left.size or not right.size:
        return cp.empty(0, np.int64)
    if way != "index":
        try:
            found = plc.join.inner_join(_keys([left]), _keys([right]), plc.types.NullEquality.UNEQUAL)
            pairs = _pairs(found, left, [right], None, by_candidate=False)
        except (MemoryError, OverflowError) as error:
            _log.info(_FAILED, error)
        else:
            lookups["hash_join"] += int(left.size)
            return pairs
    lookups["index"] += int(left.size)
    return search_runs([sorted_run(right)], cp.sort(left), None, by_candidate=False)


Fits = Callable[[Array, Array], Array]
"""Gives, of positions of probe rows and of entries, a mask of the pairs that are wanted."""


def by_hash(
    runs: Sequence[SearchedRun],
    ways: ProbeWays,
    probe_rows: Array,
    times: tuple[Array, Array] | None,
    *,
    by_candidate: bool,
) -> list[Array]:
    """Candidates of the runs that are not searched, as pairs: of each run with a table, then of the others.

    The upper half of a hash takes 4 bytes, less than any key; a pair of other keys, one in 4 billion, is sorted out by
    the comparison of keys that follows anyway.
    """
    keys, pairs = _keys([probe_rows]), []
    groups = [[runs[at]] for at in ways.kept] + ([[runs[at] for at in ways.joined]] if ways.joined else [])
    for number, group in enumerate(groups):
        entries = [run.entries for run in group]
        if number < len(ways.kept):
            found = TABLES.of(entries[0]).inner_join(keys)
        else:
            found = plc.join.inner_join(keys, _keys(entries), plc.types.NullEquality.UNEQUAL)
        fits = None if times is None else functools.partial(_in_time, group, times)
        pairs.append(_pairs(found, probe_rows, entries, fits, by_candidate=by_candidate))
    return pairs


def _in_time(runs: Sequence[SearchedRun], times: tuple[Array, Array], probe_row: Array, place: Array) -> Array:
    time = _whole([run.times for run in runs])[place]
    return (time >= times[0][probe_row]) & (time <= times[1][probe_row])


def _pairs(found: Any, probe_rows: Array, entries: Sequence[Array], fits: Fits | None, *, by_candidate: bool) -> Array:
    """Pairs of slots, of a join's two columns of positions."""
    if not found[0].size():
        return cp.empty(0, np.int64)
    probe_row, place = (values(positions, np.int32) for positions in found)
    if fits is not None:
        kept = cp.flatnonzero(fits(probe_row, place))
        probe_row, place = probe_row[kept], place[kept]
    own, other = probe_rows.view(np.int64)[probe_row], _whole(entries).view(np.int64)[place]
    return _of_slots()(other, own) if by_candidate else _of_slots()(own, other)


@functools.cache
def _of_slots() -> Callable[[Array, Array], Array]:
    made: Callable[[Array, Array], Array] = cp.fuse(_slots_paired)
    return made


def _slots_paired(first: Array, second: Array) -> Array:
    return layouts.pairs(first & 0xFFFFFFFF, second & 0xFFFFFFFF)


def _whole(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else cp.concatenate(arrays)


def _keys(entries: Sequence[Array]) -> Any:
    """The upper halves of entries, one array after the other, as a table for a join."""
    halves = [array.view(np.uint32)[1::2] for array in entries]
    return plc.Table([from_values(cp.ascontiguousarray(halves[0]) if len(halves) == 1 else cp.concatenate(halves))])


@functools.cache
def table_class() -> Any:
    """``pylibcudf.join.HashJoin``, where there is one that is built and asked as it is here; else None."""
    made = getattr(plc.join, "HashJoin", None)
    if made is None:
        return None
    try:
        right, left = (plc.Table([from_values(cp.asarray(np.array(x, np.uint32)))]) for x in ([5, 7, 5], [6, 7, 5]))
        found = made(right, plc.types.NullEquality.UNEQUAL).inner_join(left)
        pairs = [cp.asnumpy(values(positions, np.int32)).tolist() for positions in found]
        if sorted(zip(*pairs, strict=True)) == [(1, 1), (2, 0), (2, 2)]:
            return made
        _log.warning("pylibcudf.join.HashJoin finds %s: no tables are kept", pairs)
    except Exception as error:
        _log.warning("pylibcudf.join.HashJoin is not what is known of it: no tables are kept: %s", error)
    return None


class KeptTable:
    """A hash table of the entries of a run."""

    def __init__(self, entries: Array) -> None:
        self._keys = _keys([entries])  # libcudf's object has a view of them only
        self._join = table_class()(self._keys, plc.types.NullEquality.UNEQUAL)

    def inner_join(self, probe_rows: Any) -> Any:
        """Positions of probe rows and of entries, two columns."""
        return self._join.inner_join(probe_rows)


class KeptTables:
    """The hash tables that are kept, of all engines of this process: they share its card. Safe for threads.

    A table belongs to the array of a run's entries, and goes when that goes.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[KeptTable, int]] = {}
        self._most: int | None = None

    def __contains__(self, entries: Array) -> bool:
        return id(entries) in self._made

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the tables take, about."""
        return KEPT_BYTES * sum(size for _, size in list(self._made.values()))

    def room(self, limit: int) -> int:
        """Entries of new tables that there is room for; a part of the limit, and less once memory has run out."""
        most = int(KEPT_SHARE * limit)
        return max(0, (most if self._most is None else min(most, self._most)) - self.nbytes) // KEPT_BYTES

    def of(self, entries: Array) -> KeptTable:
        """The table of a run's entries, made if it is not there."""
        found = self._made.get(id(entries))
        if found is not None:
            return found[0]
        table = KeptTable(entries)
        self._made[id(entries)] = table, int(entries.size)
        weakref.finalize(entries, self._made.pop, id(entries), None).atexit = False
        return table

    def drop(self) -> bool:
        """Give up all tables, and keep half as much from now on; whether there were any."""
        there = self.nbytes
        if there:
            self._most = there // 2
            self._made.clear()
        return there > 0


TABLES = KeptTables()
"""Of this process."""
device.SPARE.append(TABLES.drop)
