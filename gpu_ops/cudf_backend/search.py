"""Lookups in sorted runs by CUDA kernels; see `gpu_ops.kernels.Kernels.search` and ``bisect``.

A search is two of them, over all runs at once: the first finds where each needle's entries are in each run, the second
writes the pairs, a thread for each: a hot key's are written by as many threads as it has. In between, the host learns
how many there are.

Sorted runs are made by a CUDA kernel each, too: entries, merges, and directories of hash prefixes.

Candidates are found by libcudf's hash join, or by such a search. Both find the same pairs. A search looks at a few
sectors of memory for each needle and run, however large the run is; a join passes over all of a run, but builds its
table once for all of them. So what is small beside the needles is joined.

The constants below are a model, not measured: ``benchmarks/gpu``, part ``probe``, has the figures that correct them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import numpy as np
import pylibcudf as plc

from gpu_ops import layouts
from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.device import LIMITS, address, launch
from gpu_ops.cudf_backend.frame import from_values, values
from gpu_ops.kernels import Probe, SearchedRun, TooMany


def made_entries(hashes: Array, first: int, rows: Array | None) -> Array:
    """As `gpu_ops.kernels.Kernels.entries`."""
    size = int(hashes.size if rows is None else rows.size)
    out = cp.empty(size, np.uint64)
    if size:
        given = (
            (hashes.view(np.int64), np.bool_(True)) if rows is None else (rows, np.bool_(False))
        )  # all: none is read
        launch("make_entries", size, hashes, *given, np.int64(first), np.int64(size), out)
    return out


def merged(first: Array, second: Array) -> Array:
    """One ascending array of two, of uint64: a pass over both, where a sort would be eight."""
    out = cp.empty(first.size + second.size, np.uint64)
    if out.size:
        launch("merge_entries", out.size, first, np.int64(first.size), second, np.int64(out.size), out)
    return out


def directory(entries: Array, shift: int) -> Array:
    """As `gpu_ops.kernels.Kernels.directory`: a bisection for each prefix, however many entries share one."""
    prefixes = 1 << (32 - shift)
    begins = cp.empty(prefixes + 1, np.int32)
    sizes = np.int64(entries.size), np.int64(shift), np.int64(prefixes)
    launch("begin_prefixes", prefixes + 1, entries, *sizes, begins)
    return begins


MOST_RUNS = LIMITS["MOST_RUNS"]
"""Runs that one launch searches."""

RUN = np.dtype([("entries", np.uint64), ("times", np.uint64), ("directory", np.uint64), ("shift", np.int64)])
RUNS = np.dtype([("run", RUN, MOST_RUNS)])
"""What the kernels get of the runs."""


@dataclasses.dataclass(frozen=True)
class SortedRun:
    """Entries in ascending order with a directory of two halves: what is looked up once is bisected."""

    entries: Array
    directory: Array
    shift: int = 31
    times: None = None


def sorted_run(entries: Array) -> SortedRun:
    """A run of entries in any order."""
    entries = cp.sort(entries)
    return SortedRun(entries, directory(entries, SortedRun.shift))


def search_runs(
    runs: Sequence[SearchedRun],
    needles: Array,
    times: tuple[Array, Array] | None,
    *,
    by_candidate: bool,
    at_most: int | None = None,
) -> Array:
    """Arguments and result as `gpu_ops.kernels.Kernels.search`."""
    found = [
        _search(runs[at : at + MOST_RUNS], needles, times, by_candidate=by_candidate, at_most=at_most)
        for at in range(0, len(runs), MOST_RUNS)
    ]
    return found[0] if len(found) == 1 else cp.concatenate([cp.empty(0, np.int64), *found])


def _search(
    runs: Sequence[SearchedRun],
    needles: Array,
    times: tuple[Array, Array] | None,
    *,
    by_candidate: bool,
    at_most: int | None,
) -> Array:
    if not needles.size * len(runs):
        return cp.empty(0, np.int64)
    shape, begins, counts = _found(runs, needles, times)
    ends = cp.cumsum(counts)
    total = int(ends[-1])
    if at_most is not None and total > at_most:
        raise TooMany
    pairs = cp.empty(total, np.int64)
    if total:
        launch("write_pairs", total, *shape, begins, ends, np.int64(total), np.bool_(by_candidate), pairs)
    return pairs


def count_candidates(runs: Sequence[SearchedRun], needles: Array, times: tuple[Array, Array] | None) -> int:
    """How many candidates there are; arguments as `gpu_ops.kernels.Kernels.search`."""
    parts = [runs[at : at + MOST_RUNS] for at in range(0, len(runs), MOST_RUNS)] if needles.size else []
    return sum(int(_found(part, needles, times)[2].sum()) for part in parts)


def _found(
    runs: Sequence[SearchedRun], needles: Array, times: tuple[Array, Array] | None
) -> tuple[tuple[Any, ...], Array, Array]:
    """What the kernels get; where in each run the entries of each needle begin; and how many there are."""
    lookups = needles.size * len(runs)
    shape = (_table(runs), np.int64(needles.size), np.int64(lookups), needles)
    begins, counts = cp.empty(lookups, np.int32), cp.empty(lookups, np.int64)
    span = times or (needles.view(np.int64), needles.view(np.int64))  # of runs without times nobody reads it
    launch("find", lookups, *shape, *span, begins, counts)
    return shape, begins, counts


def _table(runs: Sequence[SearchedRun]) -> np.ndarray[Any, Any]:
    """The addresses that kernels get."""
    table = np.zeros(1, RUNS)
    for at, run in enumerate(runs):
        beside = 0 if run.times is None else address(run.times)
        table["run"][0, at] = address(run.entries), beside, address(run.directory), run.shift
    return table


def bisect_run(run: SearchedRun, needles: Array, times: Array, *, after: bool) -> Array:
    """Arguments and result as `gpu_ops.kernels.Kernels.bisect`."""
    positions = cp.empty(needles.size, np.int64)
    if needles.size:
        shape = _table([run]), np.int64(needles.size), needles, times
        launch("bisect_run", needles.size, *shape, np.bool_(after), positions)
    return positions


BYTES_PER_SECOND = 4.0e12
"""Of an H200's memory: 4.8 TB/s by its data sheet, of which a copy reaches some five sixths."""
CALL_SECONDS = 6e-6
"""Of a library call from Python, however little it does."""
SEARCH_BYTES = 128
"""For a needle and a run: a sector (32 bytes) of the directory and one of the entries, in each of two passes."""
SEARCH_CALLS = 6
"""For all runs together: two kernels, a running sum, three allocations."""
JOIN_BYTES = 48
"""For an entry, or for a needle: 8 read and 4 written to have its hash alone, 4 read by the join, and a sector of its
table built or probed."""
JOIN_CALLS = 18
"""For all runs together: the hashes alone of both sides, libcudf's join (it counts, then writes), the pairs."""


def search_seconds(runs: int, needles: int) -> float:
    """What a search of so many runs costs, by the model."""
    return runs * needles * SEARCH_BYTES / BYTES_PER_SECOND + SEARCH_CALLS * CALL_SECONDS if runs else 0.0


def join_seconds(entries: int, needles: int) -> float:
    """What a join with so many entries costs, by the model."""
    return (entries + needles) * JOIN_BYTES / BYTES_PER_SECOND + JOIN_CALLS * CALL_SECONDS


def joined(sizes: Sequence[int], needles: int) -> set[int]:
    """The runs that a join costs less for, by position; the others are searched.

    Args:
        sizes: entries of each run.
        needles: how many there are.
    """
    small = {at for at, size in enumerate(sizes) if size * JOIN_BYTES < needles * SEARCH_BYTES}
    parted = join_seconds(sum(sizes[at] for at in small), needles) + search_seconds(len(sizes) - len(small), needles)
    return small if parted < search_seconds(len(sizes), needles) else set()


def probe_runs(
    way: Probe,
    runs: Sequence[SearchedRun],
    needles: Array,
    times: tuple[Array, Array] | None,
    *,
    by_candidate: bool,
    at_most: int | None = None,
) -> Array:
    """Candidates of runs, each by the way wanted; other arguments and result as `gpu_ops.kernels.Kernels.search`.

    `auto` takes the way that costs less, run by run. Within a range of time that is always the search: a join would
    list all rows of a key before it drops those of other times.
    """
    some: set[int] = set()
    if way == "hash_join":
        some = set(range(len(runs)))
    elif way == "auto" and times is None:
        some = joined([run.entries.size for run in runs], needles.size)
    pairs = []
    if some:
        own = [runs[at] for at in sorted(some)]
        # a join writes all pairs; a search counts them first
        if at_most is not None and needles.size * sum(run.entries.size for run in own) > at_most:
            at_most -= count_candidates(own, needles, times)
            if at_most < 0:
                raise TooMany
        pairs.append(join_runs(own, needles, times, by_candidate=by_candidate))
    if len(some) < len(runs):
        others = [run for at, run in enumerate(runs) if at not in some]
        pairs.append(search_runs(others, needles, times, by_candidate=by_candidate, at_most=at_most))
    return pairs[0] if len(pairs) == 1 else cp.concatenate([cp.empty(0, np.int64), *pairs])


def join_runs(
    runs: Sequence[SearchedRun], needles: Array, times: tuple[Array, Array] | None, *, by_candidate: bool
) -> Array:
    """Candidates by one hash join of all runs with the needles; arguments and result as `probe_runs`."""
    entries = [run.entries for run in runs]
    if times is None:
        return join_entries(needles, entries, by_candidate=by_candidate)
    stored: list[Array] = [run.times for run in runs]

    def fits(needle: Array, place: Array) -> Array:
        time = (stored[0] if len(stored) == 1 else cp.concatenate(stored))[place]
        return (time >= times[0][needle]) & (time <= times[1][needle])

    return join_entries(needles, entries, fits, by_candidate=by_candidate)


def join_entries(
    needles: Array,
    entries: Sequence[Array],
    fits: Callable[[Array, Array], Array] | None = None,
    *,
    by_candidate: bool = False,
) -> Array:
    """Pairs of slots of entries with the same upper half of a hash, in any order, by libcudf's hash join.

    libcudf builds its table of the smaller side. The upper half of a hash takes 4 bytes, less than any key; a pair
    of other keys, one in 4 billion, is sorted out by the comparison of keys that follows anyway.

    Args:
        needles: n entries (uint64).
        entries: arrays of others, which are joined as one.
        fits: gives, of positions of needles and of entries, a mask of the pairs that are wanted.
        by_candidate: give the slot of the other entry first.
    """
    if not needles.size or not any(part.size for part in entries):
        return cp.empty(0, np.int64)
    left, right = (plc.Table([from_values(_halves(side, 1))]) for side in ([needles], entries))
    found = plc.join.inner_join(left, right, plc.types.NullEquality.UNEQUAL)
    if not found[0].size():
        return cp.empty(0, np.int64)
    needle, place = (values(positions, np.int32) for positions in found)
    if fits is not None:
        kept = cp.flatnonzero(fits(needle, place))
        needle, place = needle[kept], place[kept]
    own = _halves([needles], 0)[needle].astype(np.int64)
    slot = _halves(entries, 0)[place].astype(np.int64)
    return layouts.pairs(slot, own) if by_candidate else layouts.pairs(own, slot)


def _halves(entries: Sequence[Array], number: int) -> Array:
    """The lower (0) or upper (1) halves of entries, one array after the other."""
    halves = [array.view(np.uint32)[number::2] for array in entries]
    return cp.ascontiguousarray(halves[0]) if len(halves) == 1 else cp.concatenate(halves)
