"""Lookups in sorted runs by CUDA kernels; see `gpu_ops.kernels.Kernels.search` and ``bisect``.

A search is two of them, over all runs at once: the first finds where each probe row's entries are in each run, the
second writes the pairs, a thread for each: a hot key's are written by as many threads as it has. In between, the host
learns how many there are.

Sorted runs are made by a CUDA kernel each, too: entries, merges, and directories of hash prefixes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.device import LIMITS, address, launch
from gpu_ops.kernels import SearchedRun, TooMany


def made_entries(
    hashes: Array, first: int, rows: Array | None = None, given: tuple[Array, Array] | None = None
) -> Array:
    """Makes index entries of hashes; see `gpu_ops.kernels.Kernels.entries`."""
    unread = hashes.view(np.int64)
    in_front = (unread, unread, np.int64(0)) if given is None else (*given, np.int64(given[0].size))
    of = (unread, np.bool_(True)) if rows is None else (rows, np.bool_(False))
    size = int(in_front[2] + of[0].size)
    out = cp.empty(size, np.uint64)
    if size:
        launch("make_entries", size, hashes, *in_front, *of, np.int64(first), np.int64(size), out)
    return out


def merged(first: Array, second: Array) -> Array:
    """One ascending array of two, of uint64: a pass over both, where a sort would be eight."""
    out = cp.empty(first.size + second.size, np.uint64)
    if out.size:
        launch("merge_entries", out.size, first, np.int64(first.size), second, np.int64(out.size), out)
    return out


def directory(entries: Array, shift: int, others: Array | None = None) -> Array:
    """Finds the first entry of each hash prefix by bisection, however many entries share one.

    See `gpu_ops.kernels.Kernels.directory`.
    """
    prefixes = 1 << (32 - shift)
    begins = cp.empty(prefixes + 1, np.int32)
    sizes = np.int64(entries.size), np.int64(shift), np.int64(prefixes)
    added = (begins, np.bool_(False)) if others is None else (others, np.bool_(True))  # the first is not read
    launch("begin_prefixes", prefixes + 1, entries, *sizes, *added, begins)
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
    probe_rows: Array,
    times: tuple[Array, Array] | None,
    *,
    by_candidate: bool,
    at_most: int | None = None,
) -> Array:
    """Arguments and result as `gpu_ops.kernels.Kernels.search`."""
    found = [
        _search(runs[at : at + MOST_RUNS], probe_rows, times, by_candidate=by_candidate, at_most=at_most)
        for at in range(0, len(runs), MOST_RUNS)
    ]
    return found[0] if len(found) == 1 else cp.concatenate([cp.empty(0, np.int64), *found])


def _search(
    runs: Sequence[SearchedRun],
    probe_rows: Array,
    times: tuple[Array, Array] | None,
    *,
    by_candidate: bool,
    at_most: int | None,
) -> Array:
    if not probe_rows.size * len(runs):
        return cp.empty(0, np.int64)
    shape, begins, counts = _entry_ranges(runs, probe_rows, times)
    ends = cp.cumsum(counts)
    total = int(ends[-1])
    if at_most is not None and total > at_most:
        raise TooMany
    pairs = cp.empty(total, np.int64)
    if total:
        launch("write_pairs", total, *shape, begins, ends, np.int64(total), np.bool_(by_candidate), pairs)
    return pairs


def count_candidates(runs: Sequence[SearchedRun], probe_rows: Array, times: tuple[Array, Array] | None) -> int:
    """Counts the candidates of probe rows; arguments as `gpu_ops.kernels.Kernels.search`.

    Without times, of runs that have some, of any time.
    """
    parts = [runs[at : at + MOST_RUNS] for at in range(0, len(runs), MOST_RUNS)] if probe_rows.size else []
    return sum(int(_entry_ranges(part, probe_rows, times)[2].sum()) for part in parts)


def _entry_ranges(
    runs: Sequence[SearchedRun], probe_rows: Array, times: tuple[Array, Array] | None
) -> tuple[tuple[Any, ...], Array, Array]:
    """Finds where in each run the entries of each probe row begin, and how many there are.

    First in the result is what the kernels get.
    """
    lookups = probe_rows.size * len(runs)
    shape = (run_table(runs, by_time=times is not None), np.int64(probe_rows.size), np.int64(lookups), probe_rows)
    scratch = cp.empty(3 * lookups, np.int32)  # of both at once: each of its own is a call
    counts, begins = scratch[: 2 * lookups].view(np.int64), scratch[2 * lookups :]
    span = times or (probe_rows.view(np.int64), probe_rows.view(np.int64))  # of runs without times nobody reads it
    launch("find", lookups, *shape, *span, begins, counts)
    return shape, begins, counts


def run_table(runs: Sequence[SearchedRun], *, by_time: bool = True) -> np.ndarray[Any, Any]:
    """The addresses that kernels get; those of times only if they matter."""
    table = np.zeros(1, RUNS)
    for at, run in enumerate(runs):
        beside = 0 if run.times is None or not by_time else address(run.times)
        table["run"][0, at] = address(run.entries), beside, address(run.directory), run.shift
    return table


def bisect_run(run: SearchedRun, probe_rows: Array, times: Array, *, after: bool) -> Array:
    """Arguments and result as `gpu_ops.kernels.Kernels.bisect`."""
    positions = cp.empty(probe_rows.size, np.int64)
    if probe_rows.size:
        shape = run_table([run]), np.int64(probe_rows.size), probe_rows, times
        launch("bisect_run", probe_rows.size, *shape, np.bool_(after), positions)
    return positions
