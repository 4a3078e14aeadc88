"""Which way candidates are found: by libcudf's hash join, or by a search of the sorted runs.

Both find the same pairs. A search looks at a few sectors of memory for each needle and run, however large the run is; a
join passes over all of a run, but builds its table once for all of them. So what is small beside the needles is joined.

The constants below are a model, not measured: ``benchmarks/gpu``, part ``probe``, has the figures that correct them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cupy as cp
import numpy as np
import pylibcudf as plc

from gpu_ops import layouts
from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.frame import from_values, values
from gpu_ops.cudf_backend.search import count_candidates, search_runs
from gpu_ops.kernels import Probe, SearchedRun, TooMany

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
