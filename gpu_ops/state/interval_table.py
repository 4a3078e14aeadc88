"""The state of one input of an interval join in one partition: its rows by time, gone when their time is over.

Rows sit in a `Store` by slot, as in `gpu_ops.state.table`; beside them stand time, status and, on an
outer side, whether the row has met a match. What expires is found in queues ordered by time, so expiry costs what it
evicts, and nothing is scanned when nothing expires. A micro-batch is *prepared*, then committed or
discarded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.inputs import Input
from gpu_ops.intervals import shifted
from gpu_ops.kernels import Array, Frame, Kernels, as_slots
from gpu_ops.state.cold import postponed
from gpu_ops.state.columns import (
    DEAD,
    LIVE,
    Growing,
    kept_slots,
    parts,
    put_behind,
    stored_rows,
    taken_apart,
    too_many_dead,
)
from gpu_ops.state.index import MAX_SLOTS
from gpu_ops.state.time_index import TimeIndex

GHOST = 3
"""Removed from the results by an early clean-up, but its key's timer still goes by it; see `operators.interval`."""

TIME_COLUMN, SWEEP_COLUMN, MATCHED_COLUMN, STATUS_COLUMN = "__time", "__sweep", "__matched", "__status"


@dataclasses.dataclass(frozen=True)
class _Chunk:
    times: Array
    """Ascending."""
    slots: Array


class TimeQueue:
    """Slots by time, earliest first; taking what is due costs what is due."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._chunks: list[_Chunk] = []
        self._left: list[_Chunk] | None = None
        self._added: _Chunk | None = None

    def take(self, until: int) -> Array:
        """All slots of times up to ``until``, inclusive; for good with `commit`, not at all with `discard`."""
        xp = self._kernels.xp
        found, left = [xp.empty(0, np.int64)], []
        for chunk in self._chunks:
            due = int(xp.searchsorted(chunk.times, until, side="right"))
            found.append(chunk.slots[:due])
            if due < chunk.slots.size:
                left.append(_Chunk(chunk.times[due:], chunk.slots[due:]) if due else chunk)
        self._left = left
        return xp.concatenate(found)

    def add(self, times: Array, slots: Array) -> None:
        """More slots, in any order; they count from the next micro-batch on."""
        if slots.size:
            order = self._kernels.xp.argsort(times)
            self._added = _Chunk(times[order], slots[order])

    def commit(self) -> None:
        """Make the last `take` and `add` final; a `MemoryError` on the way leaves them to be committed again."""
        if self._left is None and self._added is None:
            return
        chunks = self._chunks if self._left is None else self._left
        if self._added is not None:
            chunks = [*chunks, self._added]
            while len(chunks) > 1 and chunks[-2].slots.size <= chunks[-1].slots.size:
                chunks[-2:] = [self._merged(*chunks[-2:])]
        self._chunks = chunks
        self.discard()

    def _merged(self, older: _Chunk, newer: _Chunk) -> _Chunk:
        xp = self._kernels.xp
        times = xp.concatenate([older.times, newer.times])
        order = self._kernels.argsort(times)
        return _Chunk(times[order], xp.concatenate([older.slots, newer.slots])[order])

    def discard(self) -> None:
        """Forget the last `take` and `add`."""
        self._left = self._added = None

    def renumbered(self, new_slots: Array) -> TimeQueue:
        """Another queue that follows a compaction; slots that went are -1."""
        queue = TimeQueue(self._kernels)
        for chunk in self._chunks:
            slots = new_slots[chunk.slots]
            kept = slots >= 0
            if bool(kept.any()):
                queue._chunks.append(_Chunk(chunk.times[kept], slots[kept]))
        return queue


@dataclasses.dataclass
class _Prepared:
    first_new: int
    matched: list[Array]
    moved: list[tuple[Array, int, int]]
    """Committed slots with the status they had and the one they have now."""
    passing: Array
    """New slots that are not kept."""
    stale: Array


class IntervalTable:
    """All rows of one input that may still match, in one partition.

    Args:
        kernels: the backend.
        source: the input's description.
        keys: its key columns, in the join's order.
        key_types: the types they are compared in.
        strict: those of the key columns in which null matches nothing.
        outer: whether rows without a match are padded.
        lazy: rows are swept by their key's timer, not by their own time; see `operators.interval`.
    """

    def __init__(
        self,
        kernels: Kernels,
        source: Input,
        keys: tuple[str, ...],
        key_types: tuple[pa.DataType, ...],
        strict: tuple[str, ...],
        *,
        outer: bool,
        lazy: bool,
    ) -> None:
        xp = kernels.xp
        self.kernels, self.source = kernels, source
        self.keys, self.key_types, self.strict = keys, key_types, strict
        self.store = kernels.store(source.schema)
        self.index = TimeIndex(kernels)
        self.status = Growing(xp, np.int8)
        self.time = Growing(xp, np.int64)
        self.sweep = Growing(xp, np.int64) if lazy else None
        self.matched = Growing(xp, np.int8) if outer else None
        self.due = TimeQueue(kernels)
        self.early = TimeQueue(kernels)
        self.stale: Array = xp.empty(0, np.int64)
        self.live = self.ghosts = 0
        self._prepared: _Prepared | None = None

    def __len__(self) -> int:
        return len(self.store)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, index and the columns beside them, wherever they lie."""
        return self.store.nbytes + self.index.nbytes + sum(c.nbytes for c in self._columns())

    @property
    def host_bytes(self) -> int:
        """Those in host memory."""
        return self.nbytes if self.kernels.host is None else self.store.host_bytes + self.index.host_bytes

    def hash_keys(self, frame: Frame) -> Array:
        """Key hashes of a frame's rows."""
        return self.kernels.hash_rows(frame, self.keys, self.key_types)

    def matchable(self, frame: Frame) -> Array | None:
        """Mask of a frame's rows whose key can match at all, None for all."""
        return self.kernels.valid(frame, self.strict) if self.strict else None

    # --- a micro-batch -----------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare a micro-batch."""
        xp = self.kernels.xp
        self._prepared = _Prepared(len(self.store), [], [], xp.empty(0, np.int64), self.stale)

    @property
    def first_new(self) -> int:
        """The slot of the prepared micro-batch's first row."""
        return self._open.first_new

    @property
    def _open(self) -> _Prepared:
        if self._prepared is None:
            raise StateError("no micro-batch is prepared")
        return self._prepared

    def move(self, slots: Array, old: int, new: int) -> None:
        """Give committed rows of one status another."""
        if slots.size:
            self.status.values[slots] = new
            self._open.moved.append((slots, old, new))

    def match(self, slots: Array) -> None:
        """Note that these rows, repeated ones included, have met a match."""
        if self.matched is not None and slots.size:
            fresh = slots[self.matched.values[slots] == 0]
            self.matched.values[fresh] = 1
            self._open.matched.append(fresh)

    def add(self, frame: Frame, hashes: Array, times: Array, kept: Array | None, sweep: Array | None) -> Array:
        """Stage new rows.

        Args:
            frame: the n rows.
            hashes: n key hashes.
            times: n int64.
            kept: mask of rows that may still match later ones; None for all. The others pass through.
            sweep: n int64, the times their keys' timers go by, where the table is lazy.

        Returns:
            Their slots.
        """
        first, added = len(self.store), self.kernels.num_rows(frame)
        if first + added > MAX_SLOTS:
            raise StateError(
                f"input '{self.source.name}': a partition holds at most {MAX_SLOTS} rows; use more partitions"
            )
        slots = as_slots(self.kernels, first, added)
        if not added:
            return slots
        self.store.append(frame)
        self.status.extend(added, LIVE)
        for column, values in ((self.time, times), (self.sweep, sweep), (self.matched, None)):
            if column is not None:
                column.extend(added, 0)
                if values is not None:
                    column.values[first:] = values
        stays = slots
        if kept is not None:
            stays = slots[kept]
            self._open.passing = slots[~kept]
            hashes, times = hashes[kept], times[kept]
            sweep = None if sweep is None else sweep[kept]
        self.index.stage(hashes, stays, times)
        self.due.add(times if sweep is None else sweep, stays)
        return slots

    def live_after(self) -> int:
        """Rows there are once the prepared micro-batch is committed."""
        done = self._prepared
        if done is None:
            return self.live
        return self.live + self._moved(LIVE) + len(self.store) - done.first_new - int(done.passing.size)

    def _moved(self, status: int) -> int:
        """How many more rows of a status the prepared micro-batch makes, new ones left out."""
        moved = self._open.moved
        return sum(int(slots.size) * ((new == status) - (old == status)) for slots, old, new in moved)

    def commit(self) -> None:
        """Make the prepared micro-batch final; without one, nothing happens.

        A `MemoryError` on the way leaves a micro-batch that can be committed again.
        """
        if self._prepared is None:
            return
        self.status.values[self._open.passing] = DEAD
        self.index.commit()
        self.due.commit()
        self.early.commit()
        # from here on nothing is allocated
        self.live, self.ghosts = self.live_after(), self.ghosts + self._moved(GHOST)
        self._prepared = None
        dead = len(self.store) - self.live - self.ghosts
        if too_many_dead(self.kernels, dead, self.live):
            with postponed(self.kernels, "dropping dead rows"):
                self.compact()

    def discard(self) -> None:
        """Undo the prepared micro-batch."""
        undo = self._prepared
        if undo is None:
            return
        self._prepared = None
        for slots, old, _ in reversed(undo.moved):
            self.status.values[slots] = old
        if self.matched is not None:
            for slots in undo.matched:
                self.matched.values[slots] = 0
        self.store.truncate(undo.first_new)
        for column in self._columns():
            column.length = undo.first_new
        self.stale = undo.stale
        self.index.discard()
        self.due.discard()
        self.early.discard()

    def compact(self) -> None:
        """Drop dead rows; done when they outnumber the others, so each costs once."""
        slots, new_slots = kept_slots(self.kernels.xp, self.status.values)
        store, index, stale = self.store.retained(slots), self.index.renumbered(new_slots), new_slots[self.stale]
        columns = {name: column.retained(slots) for name, column in self._named().items()}
        due, early = self.due.renumbered(new_slots), self.early.renumbered(new_slots)
        # from here on nothing is allocated
        self.store, self.index, self.due, self.early, self.stale = store, index, due, early, stale
        self.status, self.time = columns[STATUS_COLUMN], columns[TIME_COLUMN]
        self.sweep, self.matched = columns.get(SWEEP_COLUMN), columns.get(MATCHED_COLUMN)

    # --- two memories ------------------------------------------------------------------------

    def cool_rows(self) -> int:
        """Move the oldest rows in GPU memory to the host's; see `gpu_ops.state.cold`."""
        return self.store.cool()

    def cool_indexes(self) -> int:
        """Move the oldest part of the index to host memory."""
        return self.index.cool()

    def warm(self) -> None:
        """Move everything back."""
        self.store.warm()
        self.index.warm()

    # --- the stored form ---------------------------------------------------------------------

    def snapshot(self) -> pa.Table:
        """The rows there are, with time and whatever stands beside them."""
        slots = self.kernels.xp.flatnonzero(self.status.values)
        table = stored_rows(self.kernels, self.store, self.source.schema, slots)
        asnumpy, beside = self.kernels.asnumpy, self._named()
        return put_behind(table, {n: pa.array(asnumpy(c.values[slots]).astype(np.int64)) for n, c in beside.items()})

    def restore(self, table: pa.Table, over: int, cleanup: int, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot.

        Args:
            table: as `snapshot` gives it.
            over: the latest time at which a row's time is over.
            cleanup: how much longer rows are kept at least.
            settle: called after each part of it: there may be more than the GPU has room for.

        Raises:
            StateError: it lacks a column.
        """
        for part in parts(self.kernels, table):
            self._restore(part, over, cleanup)
            settle()
        _, beside = taken_apart(self.source, table, list(self._named()))
        for name, column in self._named().items():
            column.values[:] = self.kernels.asarray(beside[name].to_numpy())
        self.ghosts = int((self.status.values == GHOST).sum())
        self.live = len(self.store) - self.ghosts

    def _restore(self, part: pa.Table, over: int, cleanup: int) -> None:
        asarray, (rows, beside) = self.kernels.asarray, taken_apart(self.source, part, list(self._named()))
        frame = self.kernels.frame(rows)
        times = asarray(beside[TIME_COLUMN].to_numpy())
        sweep = None if self.sweep is None else asarray(beside[SWEEP_COLUMN].to_numpy())
        self.begin()
        slots = self.add(frame, self.hash_keys(frame), times, None, sweep)
        if sweep is not None:
            rows = self.kernels.xp.flatnonzero((shifted(self.kernels.xp, sweep, cleanup) > times) & (times > over))
            self.early.add(times[rows], slots[rows])
        self.commit()

    def _named(self) -> dict[str, Growing]:
        columns: dict[str, Growing | None] = {
            STATUS_COLUMN: self.status,
            TIME_COLUMN: self.time,
            SWEEP_COLUMN: self.sweep,
            MATCHED_COLUMN: self.matched,
        }
        return {name: column for name, column in columns.items() if column is not None}

    def _columns(self) -> list[Growing]:
        return list(self._named().values())

    def take_keys(self, slots: Array) -> Frame:
        """The keys of rows."""
        return self.store.take(slots, self.keys, present=True)
