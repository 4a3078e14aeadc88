"""The first rows of groups that were there before a micro-batch, from the index by group and order.

Each run of the index is ordered by (hash, number of the order, arrival), so the first rows of a group are read from
where the group begins in it: as many as are wanted, and more where some of them are gone.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.descriptions.times import BEFORE_ALL
from gpu_ops.kernels import Columns
from gpu_ops.operators.core.match import equal
from gpu_ops.operators.groups.top.order import FIRST, LAST
from gpu_ops.state.columns import DEAD
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.time_index import TimeRun

_MARGIN: Final = 4
"""Read beyond what is wanted, at first."""


class FirstRows:
    """Looks up the first rows of groups.

    Args:
        table: the state, with the order's numbers as times.
        decides: whether rows with different values have different numbers, those between `FIRST` and `LAST`. Of other
            numbers all rows are found that have the last one's.
    """

    def __init__(self, table: KeyedTable, *, decides: bool) -> None:
        self._table, self._kernels, self._decides = table, table.kernels, decides
        self.read = 0
        """How many entries of the index were read."""

    def search(self, own: Columns, hashes: Hashes, wanted: Array) -> tuple[Array, Slots]:
        """The first committed rows of each group, those that this micro-batch takes among them.

        Args:
            own: the columns of a row of each of n groups.
            hashes: n.
            wanted: how many of each, n positive numbers.

        Returns:
            Numbers of groups and slots, by group and order (as far as the number decides).
        """
        xp, none = self._kernels.xp, self._kernels.xp.empty(0, np.int64)
        found = [(none, none, none)]
        for run in self._table.time_index.runs:
            found += self._from_run(run, own, hashes, wanted)
        groups, times, slots = (xp.concatenate(part) for part in zip(*found, strict=True))
        order = self._kernels.argsort(slots)
        for part in (times, groups):
            order = order[self._kernels.argsort(part[order])]
        groups, times, slots = groups[order], times[order], slots[order]
        starts = xp.searchsorted(groups, xp.arange(hashes.size, dtype=np.int64))
        place = xp.arange(groups.size, dtype=np.int64) - starts[groups]
        kept = place < wanted[groups]
        if groups.size:
            last = xp.minimum(starts + wanted - 1, groups.size - 1)[groups]
            kept |= (groups[last] == groups) & (times == times[last]) & self._undecided(times)
        kept = xp.flatnonzero(kept)
        return groups[kept], slots[kept]

    def _from_run(self, run: TimeRun, own: Columns, hashes: Hashes, wanted: Array) -> list[tuple[Array, Array, Slots]]:
        """The first rows in one run: numbers of groups, times, slots."""
        xp, index, found = self._kernels.xp, self._table.time_index, []
        at = index.bisect(run, hashes, xp.full(hashes.size, BEFORE_ALL, np.int64), after=False)
        groups, left, width = xp.arange(hashes.size, dtype=np.int64), wanted, wanted + _MARGIN
        while groups.size:
            ends = xp.minimum(at + width, run.entries.size)
            read, more = self._read(run, own, hashes, (groups, at, ends))
            found.append(read)
            left = left - xp.bincount(xp.searchsorted(groups, read[0]), minlength=groups.size)
            done = xp.flatnonzero(more & (left <= 0))
            if done.size:
                last = index.read(run, ends[done] - 1)[1]
                undecided = xp.flatnonzero(self._undecided(last))
                done, last = done[undecided], last[undecided]
                behind = index.bisect(run, hashes[groups[done]], last, after=True)
                found.append(self._read(run, own, hashes, (groups[done], ends[done], behind))[0])
            on = xp.flatnonzero(more & (left > 0))
            groups, at, left, width = groups[on], ends[on], left[on], 2 * width[on]
        return found

    def _undecided(self, numbers: Array) -> Array:
        """Mask of numbers that rows with different values may have."""
        ends = (numbers == FIRST) | (numbers == LAST)
        return ends if self._decides else ends | True

    def _read(
        self, run: TimeRun, own: Columns, hashes: Hashes, spans: tuple[Array, Positions, Positions]
    ) -> tuple[tuple[Array, Array, Slots], Array]:
        """The rows of groups in spans of a run that are there; and whether each span ends in entries of its hash."""
        xp, table, (groups, begins, ends) = self._kernels.xp, self._table, spans
        sizes = ends - begins
        behind = xp.cumsum(sizes)
        self.read += (total := int(behind[-1]) if behind.size else 0)
        here = xp.arange(total, dtype=np.int64)
        number = xp.searchsorted(behind, here, side="right")
        hashed, times, slots = table.time_index.read(run, here - (behind - sizes)[number] + begins[number])
        same = hashed == (hashes >> np.uint64(32))[groups][number]
        read = xp.flatnonzero(sizes > 0)
        more = xp.zeros(sizes.size, bool)
        more[read] = same[behind[read] - 1]
        there = xp.flatnonzero(same & (table.status.values[slots] != DEAD))
        number, times, slots = groups[number[there]], times[there], slots[there]
        if table.keys:
            found = Columns(table.store, table.keys)
            mine = xp.flatnonzero(equal(self._kernels, table.key_types, (own, number), (found, slots)))
            number, times, slots = number[mine], times[mine], slots[mine]
        return (number, times, slots), more
