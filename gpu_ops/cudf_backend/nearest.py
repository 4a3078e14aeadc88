"""Lookups by time, of unique keys and in ranges, each by one CUDA kernel, a thread for a probe row.

They find what `gpu_ops.operators.core.nearest` and `cpu_fallback.search` find step by step for all probe rows together,
where the host learns after each step how many are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array, ArrowTypes, Hashes, Positions, Slots
from gpu_ops.cudf_backend.compare import COMPARED, compared, states_of
from gpu_ops.cudf_backend.device import LIMITS, launch
from gpu_ops.cudf_backend.probe import choose
from gpu_ops.cudf_backend.search import RUN, run_table
from gpu_ops.kernels import Among, Columns, Probe, SearchedRun, SoleLookup, TimeLimits

FEW_RUNS = LIMITS["FEW_RUNS"]
"""Of one launch."""
FEW = np.dtype([("number", np.int64), ("run", RUN, FEW_RUNS), ("index", np.int64, FEW_RUNS)])
FOLDED_LEVELS = LIMITS["FOLDED_LEVELS"]
"""Of one launch."""
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
    size = int(hashes.size if rows is None else rows.size)
    if not runs or not size:
        found: Slots = cp.full(size, -1, np.int64)
        return found
    by = compared(types, columns) if _searched(way, runs, size) else None
    if by is None:
        return None
    out: Slots = cp.empty(size, np.int64)
    of = (hashes.view(np.int64), np.bool_(True)) if rows is None else (rows, np.bool_(False))
    _look_for_sole(by, [runs], (hashes, *of), states_of(among, hashes), out, paired=None)
    return out


def sole_pairs(way: Probe, lookups: Sequence[SoleLookup]) -> Array | None:
    """Looks for each row's match in each of some indexes, without a wait; see `gpu_ops.kernels.Kernels.sole_pairs`."""
    asked: list[tuple[SoleLookup, Any, list[Sequence[SearchedRun]]]] = []
    for lookup in lookups:
        size, known = int(lookup.probe_rows.size), [runs for runs in lookup.indexes if runs]
        if not size or not known:
            continue
        rows = lookup.probe_rows.view(np.int64)  # slots in the lower half
        searched = _searched(way, [run for runs in known for run in runs], size)
        by = compared(lookup.types, (lookup.columns[0]._replace(rows=rows), lookup.columns[1])) if searched else None
        if by is None:
            return None
        asked.append((lookup, by, known))
    if not asked:
        return None
    out: Array = cp.empty(sum(len(known) * int(lookup.probe_rows.size) for lookup, _, known in asked), np.int64)
    end = 0
    for lookup, by, known in asked:
        rows = lookup.probe_rows.view(np.int64)
        told, own = states_of(lookup.among, rows), (lookup.probe_rows, rows, np.bool_(True))
        begin, end = end, end + len(known) * int(rows.size)
        _look_for_sole(by, known, own, told, out[begin:end], paired=lookup.side)
    return out


def _searched(way: Probe, runs: Sequence[SearchedRun], size: int) -> bool:
    ways = choose(way, [int(run.entries.size) for run in runs], size)
    return not ways.joined and not ways.kept


def _look_for_sole(
    by: Any,
    indexes: Sequence[Sequence[SearchedRun]],
    probe_rows: tuple[Array, Array, Any],
    told: tuple[Any, ...],
    out: Array,
    *,
    paired: int | None,
) -> None:
    """``paired``: the side that looks; None where its slots are not wanted."""
    lookups, size = int(out.size), int(out.size) // len(indexes)
    runs = [(number, run) for number, index in enumerate(indexes) for run in index]
    for first in range(0, len(runs), FEW_RUNS):
        some = runs[first : first + FEW_RUNS]
        table = np.zeros(1, FEW)
        table["number"][0], table["index"][0, : len(some)] = len(some), [number for number, _ in some]
        table["run"][0] = run_table([run for _, run in some], by_time=False)["run"][0, :FEW_RUNS]
        how = np.bool_(paired is not None), np.bool_(paired), np.bool_(not first)
        shape = table, np.int64(size), np.int64(lookups), *probe_rows, *how
        launch("sole_in_runs", lookups, by, *shape, *told, out)


def bisect_ranges(
    columns: Sequence[Array], ranges: tuple[Positions, Positions], wanted: Sequence[Array], *, after: bool = False
) -> Positions:
    """Bisects each range by itself; see `gpu_ops.kernels.Kernels.bisect_ranges`."""
    low, high = ranges
    out: Positions = cp.empty(low.size, np.int64)
    if low.size:
        stored, than = ([*given, *(3 - len(given)) * [given[-1]]] for given in (columns, wanted))
        launch("bisect_ranges", low.size, *stored, *than, np.int64(low.size), low, high, np.bool_(after), out)
    return out


def lives(born: Array, died: Array) -> tuple[Array, Array]:
    """Folds some levels of two trees at a time; see `gpu_ops.kernels.Kernels.lives`."""
    size, width = np.int64(born.size), 1 << int(born.size - 1).bit_length()
    both = cp.empty(4 * width, np.int64)
    trees, level = (both[: 2 * width], both[2 * width :]), width
    while True:
        up = min(FOLDED_LEVELS, level.bit_length() - 1)
        told = np.int64(level), np.int64(up), np.bool_(level == width)
        launch("fold_lives", level >> up, born, died, size, *told, *trees)
        level >>= up
        if level == 1:
            return trees


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
