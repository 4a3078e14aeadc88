"""Lookups in sorted runs by CUDA kernels; see `gpu_ops.kernels.Kernels.search` and ``bisect``.

A search is two of them, over all runs at once: the first finds where each needle's entries are in each run, the second
writes the pairs, a thread for each: a hot key's are written by as many threads as it has. In between, the host learns
how many there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.device import address, launch
from gpu_ops.cudf_backend.runs import directory
from gpu_ops.kernels import SearchedRun, TooMany

MOST_RUNS = 64
"""Runs that one launch searches: their addresses travel with it, and it takes 4 KB of arguments."""

RUN = np.dtype([("entries", np.uint64), ("times", np.uint64), ("directory", np.uint64), ("shift", np.int64)])
RUNS = np.dtype([("run", RUN, MOST_RUNS)])
"""What the kernels get of the runs."""

SOURCE = (
    f"#define MOST_RUNS {MOST_RUNS}"
    """
typedef unsigned long long u64;
typedef long long i64;

struct Run {
  const u64* entries;  // ascending: upper half a hash, lower half a slot
  const i64* times;  // null where entries have none
  const int* directory;  // where each hash prefix begins
  i64 shift;
};
struct Runs { Run run[MOST_RUNS]; };

// Within [low, high) the first entry of a run not before (or, with `after`, beyond) a hash and a time.
__device__ int bisected(const Run& run, u64 hash, i64 time, int low, int high, bool after) {
  while (low < high) {
    int middle = low + (high - low) / 2;
    u64 other = run.entries[middle] >> 32;
    bool before = other < hash;
    if (other == hash) {
      if (!run.times) before = after;
      else before = after ? run.times[middle] <= time : run.times[middle] < time;
    }
    if (before) low = middle + 1; else high = middle;
  }
  return low;
}

// Where in each run the entries of each needle begin, and how many there are: one thread for a run and a needle.
extern "C" __global__ void find(
    Runs runs, i64 size, i64 lookups, const u64* needles, const i64* earliest, const i64* latest,
    int* begins, i64* counts) {
  i64 lookup = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (lookup >= lookups) return;
  const Run& run = runs.run[lookup / size];
  i64 needle = lookup % size;
  u64 hash = needles[needle] >> 32;
  int low = run.directory[hash >> run.shift], high = run.directory[(hash >> run.shift) + 1];
  int begin = bisected(run, hash, run.times ? earliest[needle] : 0, low, high, false);
  int end = bisected(run, hash, run.times ? latest[needle] : 0, begin, high, true);
  begins[lookup] = begin;
  counts[lookup] = end - begin;
}

// Where each needle stands in the first run, which has times: one thread for a needle.
extern "C" __global__ void bisect_run(
    Runs runs, i64 size, const u64* needles, const i64* times, bool after, i64* positions) {
  i64 needle = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (needle >= size) return;
  const Run& run = runs.run[0];
  u64 hash = needles[needle] >> 32;
  int low = run.directory[hash >> run.shift], high = run.directory[(hash >> run.shift) + 1];
  positions[needle] = bisected(run, hash, times[needle], low, high, after);
}

// All pairs of slots: one thread for a pair. `ends` has how many pairs there are up to and with each lookup's.
extern "C" __global__ void write_pairs(
    Runs runs, i64 size, i64 lookups, const u64* needles, const int* begins, const i64* ends, i64 total,
    bool by_candidate, i64* pairs) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= total) return;
  i64 low = 0, high = lookups;
  while (low < high) {
    i64 middle = low + (high - low) / 2;
    if (ends[middle] <= at) low = middle + 1; else high = middle;
  }
  i64 before = low ? ends[low - 1] : 0;
  i64 slot = runs.run[low / size].entries[begins[low] + (at - before)] & 0xFFFFFFFFu;
  i64 own = needles[low % size] & 0xFFFFFFFFu;
  pairs[at] = by_candidate ? slot << 32 | own : own << 32 | slot;
}
"""
)


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
        launch(SOURCE, "write_pairs", total, *shape, begins, ends, np.int64(total), np.bool_(by_candidate), pairs)
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
    launch(SOURCE, "find", lookups, *shape, *span, begins, counts)
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
        launch(SOURCE, "bisect_run", needles.size, *shape, np.bool_(after), positions)
    return positions
