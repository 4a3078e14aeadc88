"""Flink's per-key timers of an interval join, without timers: what they come to, worked out by arrays.

See `gpu_ops.operators.by_time.interval` for what they do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Hashes, Positions, Slots, value_changes
from gpu_ops.kernels import Columns, Frame, Kernels
from gpu_ops.operators.core.groups import Groups
from gpu_ops.operators.core.match import equal
from gpu_ops.state.columns import DEAD
from gpu_ops.state.interval_table import IntervalTable

_FOREVER = np.iinfo(np.int64).max


def looks(xp: Any, reach: Array, cleaned: int, over: int) -> tuple[Array, int]:
    """Which of a side's new rows look for rows of the other side, and clean up as they go.

    Args:
        xp: numpy or cupy.
        reach: n latest times of the other side that each row may match, by sequence.
        cleaned: the time up to which the other side was last cleaned up, of any key.
        over: the time up to which its rows' time is over.

    Returns:
        Mask of the rows that look, and the time up to which the other side is cleaned up then.
    """
    reaching = xp.flatnonzero(reach > cleaned)
    if not reaching.size:
        return xp.zeros(reach.size, bool), cleaned
    first = int(reaching[0])
    mask = reach > over
    mask[:first] = False
    mask[first] = True
    return mask, over


def first_equal(
    kernels: Kernels,
    wanted: tuple[Frame, Hashes, tuple[str, ...]],
    others: tuple[Frame, Hashes, tuple[str, ...]],
    types: tuple[Any, ...],
) -> Positions:
    """For each of n keys the position of the first of m others that is equal to it, null to null; -1 for none.

    Args:
        kernels: the backend.
        wanted: n keys: frame, hashes, columns.
        others: m keys, likewise.
        types: the types they are compared in.
    """
    xp = kernels.xp
    order = kernels.argsort(others[1])
    sorted_ = others[1][order]
    at = xp.searchsorted(sorted_, wanted[1], side="left")
    end = xp.searchsorted(sorted_, wanted[1], side="right")
    found = xp.full(wanted[1].size, -1, np.int64)
    first, second = (Columns(frame, names) for frame, _, names in (wanted, others))
    open_ = xp.flatnonzero(at < end)
    while open_.size:
        candidate = order[at[open_]]
        same = equal(kernels, types, (first, open_), (second, candidate))
        found[open_[same]] = candidate[same]
        # another key of the same hash: the next one may be it
        open_ = open_[~same]
        at[open_] += 1
        open_ = open_[at[open_] < end[open_]]
    return found


def sweep_times(table: IntervalTable, keys: Frame, hashes: Hashes, times: Array, alive: int, *, ghosts: bool) -> Array:
    """The time by which each new row is swept: its own, or that of its key's timer if that is later.

    Args:
        table: their side's state.
        keys: the keys of n new rows, by sequence, all of which are kept.
        hashes: n.
        times: n.
        alive: rows of this time and later have not been swept.
        ghosts: whether rows from then on may have been taken away early all the same.

    Returns:
        n times.
    """
    kernels, xp = table.kernels, table.kernels.xp
    if not times.size:
        return times
    groups = Groups(kernels, keys, table.keys, table.key_types, hashes)
    leaders = groups.leader
    timer = xp.full(leaders.size, _FOREVER, np.int64)
    if len(table):
        lead = kernels.take(keys, leaders, table.keys, present=True)
        since = xp.full(leaders.size, alive, np.int64)
        unsure = xp.arange(leaders.size, dtype=np.int64)
        if not ghosts:
            runs = table.index.first(hashes[leaders], since)
            # of another key of the same half hash there may be more before the one that is looked for
            wrong = [_lower(table, lead, timer, found, once=True) for found in runs]
            unsure = xp.unique(xp.concatenate([xp.empty(0, np.int64), *wrong]))
        if unsure.size:
            needle, slots = table.index.probe(
                hashes[leaders[unsure]], since[unsure], xp.full(unsure.size, _FOREVER, np.int64), staged=False
            )
            _lower(table, lead, timer, (unsure[needle], slots), once=False)
    timer = xp.where(timer == _FOREVER, times[leaders], timer)
    swept = xp.empty(times.size, np.int64)
    swept[groups.order] = xp.maximum(times[groups.order], timer[groups.group])
    return swept


def _lower(table: IntervalTable, keys: Frame, timer: Array, found: tuple[Positions, Slots], *, once: bool) -> Positions:
    """Lower each key's timer to the earliest sweep time found; gives the needles whose find was another key.

    Args:
        table: the state.
        keys: the keys.
        timer: theirs.
        found: keys, by number, and slots.
        once: whether no number comes twice.
    """
    kernels, xp = table.kernels, table.kernels.xp
    needle, slots = found
    own, stored = Columns(keys, table.keys), Columns(table.store, table.keys)
    same = equal(kernels, table.key_types, (own, needle), (stored, slots))
    right = same & (table.status.values[slots] != DEAD)
    at, swept = needle[right], table.sweep[slots[right]]
    if not once:
        by_time = kernels.argsort(swept)
        order = by_time[kernels.argsort(at[by_time])]
        lowest = order[value_changes(xp, at[order])]
        at, swept = at[lowest], swept[lowest]
    timer[at] = xp.minimum(timer[at], swept)
    return needle[~same]
