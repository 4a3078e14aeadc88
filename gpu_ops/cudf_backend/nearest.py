"""Lookups by time, of unique keys and in ranges, each by one CUDA kernel, a thread for a probe row.

They find what `gpu_ops.operators.core.nearest` and `cpu_fallback.search` find step by step for all probe rows together,
where the host learns after each step how many are left.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array, ArrowTypes, Hashes, Positions, Slots
from gpu_ops.cudf_backend.compare import COMPARED, compared, states_of
from gpu_ops.cudf_backend.device import launch
from gpu_ops.cudf_backend.probe import choose
from gpu_ops.cudf_backend.search import run_table
from gpu_ops.kernels import Among, Columns, Probe, SearchedRun, TimeLimits

WANTED = np.dtype([("back", bool), ("exact", bool), ("any", bool), ("arrival", bool)])


def nearest(
    runs: Sequence[SearchedRun],
    types: ArrowTypes,
    columns: tuple[Columns, Columns],
    hashes: Hashes,
    *,
    among: Among,
    limits: TimeLimits,
    newer: Array | None,
) -> Slots | None:
    """Looks into one run after the other; see `gpu_ops.kernels.Kernels.nearest`. The host learns that it is done."""
    times, farthest = limits.times, limits.farthest
    best = cp.full(times.size, -1, np.int64)
    found: Slots = best
    by = compared(types, columns) if types else np.zeros(1, COMPARED)
    if not runs or not times.size:
        return found
    if by is None:
        return None
    wanted = np.zeros(1, WANTED)
    wanted[0] = limits.back, limits.exact, farthest is None, newer is None
    told = times if farthest is None else farthest, among.states, np.int64(among.least), np.int64(among.most)
    best_times = cp.empty(times.size, np.int64)
    for run in runs:
        shape = (
            run_table([run])["run"][:, 0].copy(),
            wanted,
            np.int64(run.entries.size),
            np.int64(times.size),
            hashes,
            times,
        )
        order = best if newer is None else newer  # nobody reads the first
        launch("nearest_in_run", times.size, by, *shape, *told, order, best, best_times)
    return None if int(best.min()) < -1 else found


def sole(
    way: Probe,
    runs: Sequence[SearchedRun],
    types: ArrowTypes,
    columns: tuple[Columns, Columns],
    hashes: Hashes,
    *,
    among: Among | None,
) -> Slots | None:
    """Looks for each row's match in one run after the other, without a wait; see `gpu_ops.kernels.Kernels.sole`."""
    rows = columns[0].rows
    assert rows is not None
    size = int(rows.size)
    if not runs or not size:
        found: Slots = cp.full(size, -1, np.int64)
        return found
    by, ways = compared(types, columns), choose(way, [int(run.entries.size) for run in runs], size)
    if by is None or ways.joined or ways.kept:
        return None
    out: Slots = cp.empty(size, np.int64)
    told = states_of(among, hashes)
    for number, run in enumerate(runs):
        shape = run_table([run])["run"][:, 0].copy(), np.int64(run.entries.size), np.int64(size), hashes, rows
        launch("sole_in_run", size, by, *shape, np.bool_(not number), *told, out)
    return out


def bisect_ranges(
    columns: Sequence[Array], ranges: tuple[Positions, Positions], wanted: Sequence[Array], *, after: bool
) -> Positions:
    """Bisects each range by itself; see `gpu_ops.kernels.Kernels.bisect_ranges`."""
    low, high = ranges
    out: Positions = cp.empty(low.size, np.int64)
    if low.size:
        stored, than = ([*given, *(3 - len(given)) * [given[-1]]] for given in (columns, wanted))
        launch("bisect_ranges", low.size, *stored, *than, np.int64(low.size), low, high, np.bool_(after), out)
    return out


def last_there(
    lives: tuple[Array, Array], ranges: tuple[Positions, Positions], spans: tuple[Array, Array]
) -> Positions:
    """Descends for each range by itself; see `gpu_ops.kernels.Kernels.last_there`."""
    (born, died), (low, high) = lives, ranges
    out: Positions = cp.empty(low.size, np.int64)
    if low.size:
        width = np.int64(born.size // 2)
        launch("last_there", low.size, born, died, width, np.int64(low.size), low, high, *spans, out)
    return out
