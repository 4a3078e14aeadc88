"""The state of one input of an interval join in one partition: its rows by time, gone when their time is over.

Beside a row stand its time and, where the operator goes by it, whether it has met a match. What expires is found in
queues ordered by time, so expiry costs what it evicts, and nothing is scanned when nothing expires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gpu_ops.arrays import Array, Hashes, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import shifted
from gpu_ops.kernels import Frame, Kernels, as_slots
from gpu_ops.state.keyed_table import TIES_COLUMN, TIME_COLUMN
from gpu_ops.state.numbers import Growing
from gpu_ops.state.pieces import STATUS_COLUMN, FromSnapshot
from gpu_ops.state.table import LIVE, KeySet, StateTable
from gpu_ops.state.time_index import TimeIndex, TimeQueue

GHOST = 3
"""Removed from the results by an early clean-up, but its key's timer still goes by it; see the operator."""

SWEEP_COLUMN, MATCHED_COLUMN = "__sweep", "__matched"


class IntervalTable(StateTable):
    """All rows of one input that may still match, in one partition.

    Args:
        kernels: the backend.
        source: the input's description.
        keys: by what its rows are looked up.
        notes_matches: whether it is noted which rows have met a match.
        lazy: rows are swept by their key's timer, not by their own time; see `operators.by_time.interval`.
        beside: more numbers beside each row, by name.

    Attributes:
        stale: slots of rows that stay longer than their time.
    """

    def __init__(
        self,
        kernels: Kernels,
        source: Input,
        keys: KeySet,
        *,
        notes_matches: bool = False,
        lazy: bool = False,
        beside: Mapping[str, npt.DTypeLike] | None = None,
    ) -> None:
        columns: dict[str, npt.DTypeLike] = {TIME_COLUMN: np.int64, **(beside or {})}
        if lazy:
            columns[SWEEP_COLUMN] = np.int64
        if notes_matches:
            columns[MATCHED_COLUMN] = np.int8
        super().__init__(kernels, source, columns)
        self.keys, self.key_types, self.strict = keys
        self.indexes["key"] = TimeIndex(kernels)
        self.queues |= {"due": TimeQueue(kernels), "early": TimeQueue(kernels)}
        self.stale: Slots = kernels.xp.empty(0, np.int64)
        self._stale_before: Slots = self.stale
        self._ghosts = self._more_ghosts = 0

    @property
    def index(self) -> TimeIndex:
        """Rows by key and time."""
        return cast("TimeIndex", self.indexes["key"])

    @property
    def due(self) -> TimeQueue:
        """Rows by the time they are swept at."""
        return self.queues["due"]

    @property
    def early(self) -> TimeQueue:
        """Rows that are swept later than their own time, by that."""
        return self.queues["early"]

    @property
    def time(self) -> Array:
        """The time of each row, by slot."""
        return self.beside[TIME_COLUMN].values

    @property
    def sweep(self) -> Array:
        """The time each row is swept at, where the table is lazy."""
        return self.beside[SWEEP_COLUMN].values

    @property
    def matched(self) -> Array | None:
        """Flags of the rows that have met a match; None where that is not needed."""
        column = self.beside.get(MATCHED_COLUMN)
        return None if column is None else column.values

    def hash_keys(self, frame: Frame) -> Hashes:
        """Key hashes of a frame's rows."""
        return self.kernels.hash_rows(frame, self.keys, self.key_types)

    def matchable(self, frame: Frame) -> Array | None:
        """Mask of a frame's rows whose key can match at all, None for all."""
        return self.kernels.valid(frame, self.strict) if self.strict else None

    def take_keys(self, slots: Slots) -> Frame:
        """The keys of rows."""
        return self.store.take(slots, self.keys, present=True)

    # --- a micro-batch -----------------------------------------------------------------------

    def begin(self) -> None:
        """Begins to prepare a micro-batch."""
        _ = self.journal
        self._stale_before = self.stale

    def move(self, slots: Slots, old: int, new: int) -> None:
        """Give committed rows of one status another, undoably."""
        super().move(slots, old, new)
        self._more_ghosts += int(slots.size) * ((new == GHOST) - (old == GHOST))

    def match(self, slots: Slots) -> None:
        """Note that these rows, repeated ones included, have met a match."""
        if self.matched is not None and slots.size:
            self.fetch(slots)
            self.put(MATCHED_COLUMN, slots[self.matched[slots] == 0], 1)

    def stage(
        self,
        frame: Frame,
        hashes: Hashes,
        times: Array,
        kept: Array | None,
        sweep: Array | None,
        *,
        ties: Array | None = None,
    ) -> Slots:
        """Stages new rows, and makes those findable that may still match later ones.

        Args:
            frame: the n rows.
            hashes: n key hashes.
            times: n int64.
            kept: mask of rows that may still match later ones; None for all. The others pass through.
            sweep: n int64, the times their keys' timers go by, where the table is lazy.
            ties: n int64 that order rows of one key and time, where the table has a column of them.

        Returns:
            Their slots.
        """
        slots = as_slots(self.kernels, len(self), self.append(frame))
        if not slots.size:
            return slots
        self.time[self.first_new :] = times
        if sweep is not None:
            self.sweep[self.first_new :] = sweep
        if ties is not None:
            self.beside[TIES_COLUMN].values[self.first_new :] = ties
        stays = slots
        if kept is not None:
            stays = slots[kept]
            self.end(slots[~kept])
            hashes, times = hashes[kept], times[kept]
            sweep = None if sweep is None else sweep[kept]
            ties = None if ties is None else ties[kept]
        self.index.stage(hashes, stays, times, ties)
        self.due.add(times if sweep is None else sweep, stays)
        return slots

    def discard(self) -> None:
        """Undo the prepared micro-batch."""
        if self._journal is not None:
            self.stale, self._more_ghosts = self._stale_before, 0
        super().discard()

    def _settle(self) -> None:
        self._ghosts, self._more_ghosts = self._ghosts + self._more_ghosts, 0

    def _dead(self) -> int:
        return super()._dead() - self._ghosts

    def _renumber(self, new_slots: Slots) -> None:
        self.stale = new_slots[self.stale]

    # --- the stored form ---------------------------------------------------------------------

    def _stored(self) -> dict[str, Growing]:
        return {STATUS_COLUMN: self.status, **self.beside}

    def restore(self, stored: FromSnapshot, over: int, cleanup: int, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot.

        Args:
            stored: as `snapshot` gives it, or in pieces.
            over: the latest time at which a row's time is over.
            cleanup: how much longer rows are kept at least.
            settle: called after each part of it: there may be more than the GPU has room for.

        Raises:
            StateError: it lacks a column.
        """
        asarray, xp = self.kernels.asarray, self.kernels.xp

        def take_in(frame: Frame, beside: Mapping[str, npt.NDArray[Any]]) -> None:
            times = asarray(beside[TIME_COLUMN])
            sweep, ties = (asarray(beside[n]) if n in beside else None for n in (SWEEP_COLUMN, TIES_COLUMN))
            self.begin()
            slots = self.stage(frame, self.hash_keys(frame), times, None, sweep, ties=ties)
            if sweep is not None:
                rows = xp.flatnonzero((shifted(xp, sweep, cleanup) > times) & (times > over))
                self.early.add(times[rows], slots[rows])

        self._restore(stored, settle, take_in)
        self.live = int((self.status.values == LIVE).sum())
        self._ghosts = len(self) - self.live
