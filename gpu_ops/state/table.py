"""The state table of one input in one partition: its live rows, with association counts.

Rows sit in a `Store` by slot and never move but for compaction; beside them stand small mutable
columns: status, association count, last write. A micro-batch first *prepares* (rows staged, rows
marked as dying, counts moved, all of it undoable) and is then committed or discarded.

State TTL follows Flink (``StateTtlConfig``: OnCreateAndWrite, NeverReturnExpired): a row is gone once
``last write + ttl <= now``; a change of its association count is a write. What expires is found in a
queue of earlier micro-batches' writes, so nothing is scanned when nothing expires.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.inputs import Input
from gpu_ops.kernels import Array, Frame, Kernels, as_slots, distinct
from gpu_ops.state.cold import postponed
from gpu_ops.state.columns import (
    DEAD,
    DYING,
    LIVE,
    Growing,
    kept_slots,
    parts,
    put_behind,
    stored_rows,
    taken_apart,
    too_many_dead,
)
from gpu_ops.state.index import MAX_SLOTS, HashIndex, to_entries

COUNT_COLUMN = "__count"
WRITTEN_COLUMN = "__written"


@dataclasses.dataclass
class Prepared:
    """What a prepared micro-batch did to a table, so that it can be undone."""

    first_new: int
    killed: Array
    """Committed slots that die, ascending."""
    stillborn: Array
    """New slots that die within the micro-batch."""
    counted: list[tuple[Array, Array]]
    """Scatter-adds done to the association counts."""
    refreshed: Array | None = None
    """Committed slots that are written without a change."""
    null_keys: int = 0
    """Change of the number of live rows without a (complete) key."""


class StateTable:
    """All live rows of one input in one partition.

    Args:
        kernels: the backend.
        source: the input's description.
        keys: its key columns, in the join's order.
        key_types: the types they are compared in.
        strict: those of the key columns in which null matches nothing.
        counted: keep association counts.
        findable: rows can be retracted, so they must be found by value or by unique key.
        track_null_keys: keep `null_keys`, which only ``NOT IN`` asks for.
    """

    def __init__(
        self,
        kernels: Kernels,
        source: Input,
        keys: tuple[str, ...],
        key_types: tuple[pa.DataType, ...],
        strict: tuple[str, ...],
        *,
        counted: bool,
        findable: bool,
        track_null_keys: bool = False,
    ) -> None:
        self.kernels, self.source = kernels, source
        self.keys, self.key_types, self.strict = keys, key_types, strict
        # A unique key that is the join key needs no index of its own: nothing in it is ever null.
        self.one_index = findable and set(source.unique_key or ()) == set(keys) != set()
        self.identity = keys if self.one_index else source.unique_key or tuple(source.schema.names)
        self.identity_types = key_types if self.one_index else tuple(source.schema.field(c).type for c in self.identity)
        self.store = kernels.store(source.schema)
        self.key_index = HashIndex(kernels)
        self.identity_index = self.key_index if self.one_index else HashIndex(kernels) if findable else None
        self.status = Growing(kernels.xp, np.int8)
        self.count = Growing(kernels.xp, np.int32) if counted else None
        self.written = Growing(kernels.xp, np.int64) if source.ttl_ms is not None else None
        self.live = 0
        self.null_keys = 0
        self._track_null_keys = track_null_keys
        self._queue: deque[tuple[int, Array]] = deque()
        self._expired: tuple[int, Array, int] | None = None
        self.prepared: Prepared | None = None

    def __len__(self) -> int:
        return len(self.store)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, indexes and mutable columns, wherever they lie."""
        beside = (self.status, self.count, self.written)
        found = sum(index.nbytes for index in self._indexes())
        return self.store.nbytes + found + sum(c.nbytes for c in beside if c is not None)

    @property
    def host_bytes(self) -> int:
        """Those in host memory."""
        if self.kernels.host is None:
            return self.nbytes
        return self.store.host_bytes + sum(index.host_bytes for index in self._indexes())

    def _indexes(self) -> list[HashIndex]:
        if self.identity_index is None or self.one_index:
            return [self.key_index]
        return [self.key_index, self.identity_index]

    def live_after(self) -> int:
        """Live rows once the prepared micro-batch is committed."""
        done = self.prepared
        if done is None:
            return self.live
        return self.live + len(self.store) - done.first_new - int(done.stillborn.size) - int(done.killed.size)

    def hash_keys(self, frame: Frame, identity: Array | None = None) -> tuple[Array, Array | None]:
        """Key hashes of a frame's rows, and the mask of those that can match at all (None: all).

        Args:
            frame: n rows.
            identity: their n identity hashes, if known: they may be the same.
        """
        same = (self.keys, self.key_types) == (self.identity, self.identity_types)
        known = identity if same else None
        hashes = self.kernels.hash_rows(frame, self.keys, self.key_types) if known is None else known
        return hashes, self.kernels.valid(frame, self.strict) if self.strict else None

    def hash_identity(self, frame: Frame) -> Array:
        """Hashes by which a row to be retracted is found."""
        return self.kernels.hash_rows(frame, self.identity, self.identity_types)

    # --- a micro-batch -----------------------------------------------------------------------

    def prepare(
        self, frame: Frame, hashes: Array, matchable: Array | None, identity: Array | None, killed: Array
    ) -> Prepared:
        """Stage new rows and mark rows that die.

        Args:
            frame: the n new rows.
            hashes: n key hashes.
            matchable: mask of new rows whose key can match; None for all.
            identity: n identity hashes, if rows are findable.
            killed: committed slots that die, ascending.
        """
        first, added = len(self.store), self.kernels.num_rows(frame)
        if first + added > MAX_SLOTS:
            raise StateError(
                f"input '{self.source.name}': a partition holds at most {MAX_SLOTS} rows; use more partitions"
            )
        self.prepared = Prepared(first, killed, self.kernels.xp.empty(0, np.int64), [])
        if added:
            self.store.append(frame)
            self.status.extend(added, LIVE)
            if self.count is not None:
                self.count.extend(added, 0)
            if self.written is not None:
                self.written.extend(added, 0)
            slots = as_slots(self.kernels, first, added)
            if matchable is None:
                self.key_index.stage(hashes, slots)
            else:
                self.key_index.stage(hashes[matchable], slots[matchable])
                self.prepared.null_keys = added - int(matchable.sum()) if self._track_null_keys else 0
            if self.identity_index is not None and identity is not None and not self.one_index:
                self.identity_index.stage(identity, slots)
        if killed.size:
            self.status.values[killed] = DYING
            self.prepared.null_keys -= self._without_key(killed)
        return self.prepared

    def touched(self) -> Array:
        """Index entries, ascending, of the rows that the prepared micro-batch brings or takes and that can match."""
        assert self.prepared is not None
        staged, killed = self.key_index.staged, self.prepared.killed
        new = staged.entries if staged is not None else self.kernels.xp.empty(0, np.uint64)
        if not killed.size:
            return new
        hashes, matchable = self.hash_keys(self.store.take(killed, self.keys))
        if matchable is not None:
            hashes, killed = hashes[matchable], killed[matchable]
        entries = self.kernels.xp.concatenate([to_entries(hashes, killed), new])
        entries.sort()
        return entries

    def add_counts(self, slots: Array, deltas: Array) -> None:
        """Move association counts, undoably."""
        assert self.count is not None
        assert self.prepared is not None
        if slots.size:
            deltas = deltas.astype(np.int32)
            self.kernels.scatter_add(self.count.values, slots, deltas)
            self.prepared.counted.append((slots, deltas))

    def commit(self, clock_ms: int) -> None:
        """Make the prepared micro-batch final; without one, nothing happens.

        A `MemoryError` on the way leaves a micro-batch that can be committed again.
        """
        done = self.prepared
        if done is None:
            return
        added = len(self.store) - done.first_new
        null_keys = done.null_keys - self._without_key(done.stillborn)
        self.status.values[done.killed] = DEAD
        self.status.values[done.stillborn] = DEAD
        for index in self._indexes():
            index.commit()
        written = self._write(done, added, clock_ms)
        # from here on nothing is allocated
        self.prepared = None
        if self._expired is not None:
            for _ in range(self._expired[0]):
                self._queue.popleft()
            self._expired = None
        if written is not None:
            self._queue.append((clock_ms, written))
        self.live += added - int(done.stillborn.size) - int(done.killed.size)
        self.null_keys += null_keys
        if too_many_dead(self.kernels, len(self.store) - self.live, self.live):
            with postponed(self.kernels, "dropping dead rows"):
                self.compact()

    def _write(self, done: Prepared, added: int, clock_ms: int) -> Array | None:
        """Note when rows were written; those rows, or None."""
        if self.written is None:
            return None
        touched = [as_slots(self.kernels, done.first_new, added), *(slots for slots, _ in done.counted)]
        if done.refreshed is not None:
            touched.append(done.refreshed)
        slots = distinct(self.kernels.xp, self.kernels.xp.concatenate(touched))
        if not slots.size:
            return None
        self.written.values[slots] = clock_ms
        return slots

    def discard(self) -> None:
        """Undo the prepared micro-batch, and what expired before it."""
        if self._expired is not None:
            _, slots, null_keys = self._expired
            self.status.values[slots] = LIVE
            self.live += int(slots.size)
            self.null_keys += null_keys
            self._expired = None
        undo = self.prepared
        if undo is None:
            return
        self.prepared = None
        if self.count is not None:
            for slots, deltas in undo.counted:
                self.kernels.scatter_add(self.count.values, slots, -deltas)
        self.status.values[undo.killed] = LIVE
        self.store.truncate(undo.first_new)
        for column in (self.status, self.count, self.written):
            if column is not None:
                column.length = undo.first_new
        for index in self._indexes():
            index.discard()

    # --- expiry and compaction ---------------------------------------------------------------

    def expire(self, clock_ms: int) -> int:
        """Forget rows last written a TTL or more ago, and say how many. Costs what was written then.

        Part of a micro-batch: `commit` makes it final, `discard` brings the rows back.
        """
        ttl = self.source.ttl_ms
        if ttl is None or self.written is None:
            return 0
        due = [slots for when, slots in self._queue if when + ttl <= clock_ms]
        if not due:
            return 0
        # a row written more than once stands in the queue more than once
        slots = distinct(self.kernels.xp, self.kernels.xp.concatenate(due))
        old = (self.status.values[slots] == LIVE) & (self.written.values[slots] + ttl <= clock_ms)
        slots = slots[old]
        null_keys = self._without_key(slots)
        self.status.values[slots] = DEAD
        self.live -= int(slots.size)
        self.null_keys -= null_keys
        self._expired = len(due), slots, null_keys
        return int(slots.size)

    def compact(self) -> None:
        """Drop dead rows; done when they outnumber the live, so each dead row costs once."""
        self._compacted(*kept_slots(self.kernels.xp, self.status.values))()

    def _compacted(self, slots: Array, new_slots: Array) -> Callable[[], None]:
        """Does the work of `compact`; what comes back puts it in place, and cannot fail."""
        store, status = self.store.retained(slots), self.status.retained(slots)
        count = None if self.count is None else self.count.retained(slots)
        written = None if self.written is None else self.written.retained(slots)
        keys = self.key_index.renumbered(new_slots)
        identities = keys if self.one_index else None
        if self.identity_index is not None and identities is None:
            identities = self.identity_index.renumbered(new_slots)
        queue = ((when, new_slots[old]) for when, old in self._queue)
        kept = deque((when, new[new >= 0]) for when, new in queue)

        def put() -> None:
            self.store, self.status, self.count, self.written = store, status, count, written
            self.key_index, self.identity_index, self._queue = keys, identities, kept

        return put

    # --- two memories ------------------------------------------------------------------------

    def cool_rows(self) -> int:
        """Move the oldest rows in GPU memory to the host's; see `gpu_ops.state.cold`."""
        return self.store.cool()

    def cool_indexes(self) -> int:
        """Move the oldest part of each index to host memory."""
        return sum(index.cool() for index in self._indexes())

    def warm(self) -> None:
        """Move everything back."""
        self.store.warm()
        for index in self._indexes():
            index.warm()

    # --- the stored form ---------------------------------------------------------------------

    def snapshot(self) -> pa.Table:
        """Live rows, with association count and last write."""
        slots = self.kernels.xp.flatnonzero(self.status.values)
        table = stored_rows(self.kernels, self.store, self.source.schema, slots)
        asnumpy, beside = self.kernels.asnumpy, self._stored_beside()
        return put_behind(table, {n: pa.array(asnumpy(c.values[slots]).astype(np.int64)) for n, c in beside.items()})

    def _stored_beside(self) -> dict[str, Growing]:
        """The columns that a snapshot has behind the rows, by name."""
        columns = {COUNT_COLUMN: self.count, WRITTEN_COLUMN: self.written}
        return {name: column for name, column in columns.items() if column is not None}

    def restore(self, table: pa.Table, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot.

        Args:
            table: as `snapshot` gives it.
            settle: called after each part of it: there may be more than the GPU has room for.

        Raises:
            StateError: it lacks a column.
        """
        xp = self.kernels.xp
        rows, beside = taken_apart(self.source, table, list(self._stored_beside()))
        for part in parts(self.kernels, rows):
            frame = self.kernels.frame(part)
            identity = self.hash_identity(frame) if self.identity_index is not None else None
            hashes, matchable = self.hash_keys(frame, identity)
            self.prepare(frame, hashes, matchable, identity, xp.empty(0, np.int64))
            self.commit(0)
            settle()
        self._queue.clear()
        for name, column in self._stored_beside().items():
            column.values[:] = self.kernels.asarray(beside[name].to_numpy().astype(column.values.dtype))
        if self.written is not None:
            written = beside[WRITTEN_COLUMN].to_numpy()
            order = np.argsort(written, kind="stable")
            times, starts = np.unique(written[order], return_index=True)
            groups = np.split(order, starts[1:]) if times.size else []
            self._queue.extend((int(t), self.kernels.asarray(np.sort(g))) for t, g in zip(times, groups, strict=True))

    def _without_key(self, slots: Array) -> int:
        """How many of these rows have a null where null matches nothing."""
        if not self._track_null_keys or not slots.size:
            return 0
        valid = self.kernels.valid(self.store.take(slots, self.strict), self.strict)
        return 0 if valid is None else int(slots.size - valid.sum())
