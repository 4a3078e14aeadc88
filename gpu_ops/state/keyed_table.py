"""The state table of a regular, semi, anti or multi-way join's input: rows by key, with association counts.

State TTL follows Flink (``StateTtlConfig``: OnCreateAndWrite, NeverReturnExpired): a row is gone once
``last write + ttl <= now``; a change of its association count is a write. What expires is found in a
queue of earlier micro-batches' writes, so nothing is scanned when nothing expires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import BEFORE_ALL
from gpu_ops.kernels import Frame, Kernels, as_slots, distinct, looked_at
from gpu_ops.state.index import HashIndex
from gpu_ops.state.pieces import FromSnapshot
from gpu_ops.state.table import DEAD, DYING, LIVE, Journal, KeySet, StateTable
from gpu_ops.state.time_index import TimeIndex, TimeQueue

COUNT_COLUMN = "__count"
WRITTEN_COLUMN = "__written"
TIME_COLUMN = "__time"
TIES_COLUMN = "__ties"
_IDENTITY, _EXPIRY = "identity", "expiry"


class KeyedTable(StateTable):
    """All live rows of one input in one partition.

    Args:
        kernels: the backend.
        source: the input's description.
        key_sets: by what its rows are looked up; at least one.
        counts: columns of association counts, by name.
        findable: rows can be retracted, so they must be found by value or by unique key.
        track_null_keys: keep `null_keys`, which only ``NOT IN`` asks for.
        beside: further columns, of what `gpu_ops.operators.core.changes` gives with new rows: `TIME_COLUMN`, their
            times, by which the index of the first key set is then ordered, and `TIES_COLUMN`.
        arrival_counts: a row that goes and comes again within a micro-batch has come later than others.

    Attributes:
        null_keys: live rows with a null where it matches nothing.
        killed: committed slots that die in the prepared micro-batch, ascending.
        expired: slots of rows that expired before it.
    """

    def __init__(
        self,
        kernels: Kernels,
        source: Input,
        key_sets: Sequence[KeySet],
        *,
        counts: Sequence[str] = (),
        findable: bool,
        track_null_keys: bool = False,
        beside: Sequence[str] = (),
        arrival_counts: bool = False,
    ) -> None:
        columns: dict[str, npt.DTypeLike] = dict.fromkeys(counts, np.int32)
        columns.update(dict.fromkeys(beside, np.int64))
        if source.ttl_ms is not None:
            columns[WRITTEN_COLUMN] = np.int64
        super().__init__(kernels, source, columns)
        self.key_sets = tuple(key_sets)
        self.keys, self.key_types, self.strict = key_sets[0]
        self.key_sets_of = {str(number): keys for number, keys in enumerate(key_sets)}
        timed = TIME_COLUMN in beside
        self._given, self.arrival_counts = tuple(beside), arrival_counts
        # A unique key that is the join key needs no index of its own: nothing in it is ever null.
        self._one_index = findable and set(source.unique_key or ()) == set(self.keys) != set() and not timed
        if self._one_index:
            self.identity, self.identity_types = self.keys, self.key_types
        else:
            self.identity = source.unique_key or tuple(source.schema.names)
            self.identity_types = tuple(source.schema.field(c).type for c in self.identity)
            if findable:
                self.key_sets_of[_IDENTITY] = KeySet(self.identity, self.identity_types, ())
        self.indexes = {name: HashIndex(kernels) for name in self.key_sets_of}
        if timed:
            self.indexes["0"] = TimeIndex(kernels)
        if timed or track_null_keys:
            self.key_sets_of = {}
        if source.ttl_ms is not None:
            self.queues[_EXPIRY] = TimeQueue(kernels)
        self.null_keys = 0
        self._track_null_keys = track_null_keys
        self._null_keys_after = 0
        self._written: list[Slots] = []
        self._no_slots: Slots = kernels.xp.empty(0, np.int64)
        self.killed = self.expired = self._no_slots
        self._touched: Array | None = None

    @property
    def live_before(self) -> int:
        """Live rows before the prepared micro-batch's changes: what expired is gone."""
        return self.live - int(self.expired.size)

    @property
    def all_alive(self) -> bool:
        """Tells whether every committed slot holds a live row."""
        return self.live_before == self.first_new

    @property
    def one_a_key(self) -> bool:
        """Tells whether at most one row of a key is there at a time: its unique key is the key it is looked up by."""
        return self._one_index

    @property
    def key_index(self) -> HashIndex:
        """The index of the first key set."""
        return self.index(0)

    @property
    def time_index(self) -> TimeIndex:
        """The index by key and time of a table with times; rows without a time are not in it."""
        return cast("TimeIndex", self.indexes["0"])

    def index(self, key_set: int) -> HashIndex:
        """The index of a key set, by its number."""
        return cast("HashIndex", self.indexes[str(key_set)])

    @property
    def identity_index(self) -> HashIndex | None:
        """The index that finds a row to be retracted; None where no row ever is."""
        found = self.key_index if self._one_index else self.indexes.get(_IDENTITY)
        return cast("HashIndex | None", found)

    @property
    def written(self) -> Array | None:
        """When each row was last written, ms since the epoch; None without a TTL."""
        column = self.beside.get(WRITTEN_COLUMN)
        return None if column is None else column.values

    @property
    def count(self) -> Array:
        """The association counts of a two-way join."""
        return self.beside[COUNT_COLUMN].values

    def hash_identity(self, frame: Frame) -> Hashes:
        """Hashes by which a row to be retracted is found."""
        return self.kernels.hash_rows(frame, self.identity, self.identity_types)

    # --- a micro-batch -----------------------------------------------------------------------

    def prepare(
        self,
        frame: Frame,
        identity: Hashes | None,
        killed: Slots,
        refreshed: Slots | None = None,
        *,
        rows: Positions | None = None,
        beside: Mapping[str, Array] | None = None,
        gone: tuple[Positions, Slots] | None = None,
    ) -> None:
        """Stage new rows and mark rows that die.

        Args:
            frame: the n new rows.
            identity: identity hashes, if rows are findable.
            killed: committed slots that die, ascending.
            refreshed: committed slots that are written without a change.
            rows: which of the hashes are theirs; None for all.
            beside: what stands beside them, by name.
            gone: which of the hashes are those of rows that die, and the slots of these; None where that is not known.
        """
        first = len(self)
        added = self.append(frame)
        if added:
            matchable = self.kernels.valid(frame, self.strict) if self.strict else None
            for name, values in (beside or {}).items():
                self.beside[name].values[first:] = values
            if TIME_COLUMN in self._given:
                self._stage_times(frame, first, matchable)
            elif identity is not None and gone is not None and rows is not None and matchable is None:
                entries, dying = self.kernels.entries(identity, first, rows, gone), int(gone[1].size)
                self.key_index.stage_entries(entries[dying:])
                self._touched = entries if self.kernels.host is not None else self._with_staged(entries[:dying])
            elif identity is not None and (self.keys, self.key_types) == (self.identity, self.identity_types):
                self._stage(self.key_index, identity, first, matchable, rows)
            else:
                self._stage(self.key_index, self.kernels.hash_rows(frame, self.keys, self.key_types), first, matchable)
            if matchable is not None and self._track_null_keys:
                self._null_keys_after += added - int(matchable.sum())
            for number, keys in enumerate(self.key_sets[1:], start=1):
                own = self.kernels.hash_rows(frame, keys.names, keys.types)
                self._stage(self.index(number), own, first, self.kernels.valid(frame, keys.strict))
            if self.identity_index is not None and identity is not None and not self._one_index:
                self._stage(self.identity_index, identity, first, None, rows)
            if self.written is not None:
                self._written.append(as_slots(self.kernels, first, added))
        if killed.size:
            self.journal.undo.append(lambda: self.status.values.__setitem__(killed, LIVE))
            self.status.values[killed] = DYING
            self.end(killed)
            self._null_keys_after -= self._without_key(killed)
        self.killed = killed
        if refreshed is not None:
            self._written.append(refreshed)

    def _stage(
        self, index: HashIndex, hashes: Hashes, first: int, matchable: Array | None, rows: Positions | None = None
    ) -> None:
        """Put new rows into an index, those that can match at all; ``rows``: which of the hashes are theirs."""
        if matchable is None:
            index.stage_entries(self.kernels.entries(hashes, first, rows))
        else:
            able = self.kernels.xp.flatnonzero(matchable)
            index.stage(hashes[able if rows is None else rows[able]], able + first)

    def _stage_times(self, frame: Frame, first: int, matchable: Array | None) -> None:
        """Put new rows that can match and have a time into the index by time."""
        times = self.beside[TIME_COLUMN].values[first:]
        able = times != BEFORE_ALL
        if matchable is not None:
            able &= matchable
        hashes, slots = (
            self.kernels.hash_rows(frame, self.keys, self.key_types),
            as_slots(self.kernels, first, times.size),
        )
        ties = self.beside[TIES_COLUMN].values[first:] if TIES_COLUMN in self._given else None
        number, *span = looked_at(self.kernels, [able.sum(), times.min(), times.max()])
        every = number == times.size
        if not every:
            hashes, slots, times = hashes[able], slots[able], times[able]
            ties = None if ties is None else ties[able]
        self.time_index.stage(hashes, slots, times, ties, (span[0], span[1]) if every else None)

    def touched(self) -> Array:
        """Index entries of the rows that the prepared micro-batch brings or takes and that can match.

        On the host they ascend: on a GPU two ascending parts are as near to each other as all of them.
        """
        if self._touched is not None:
            return self._touched
        killed = self.killed
        if not killed.size:
            return self._with_staged(None)
        keys = self.store.take(killed, self.keys, present=True)
        hashes = self.kernels.hash_rows(keys, self.keys, self.key_types)
        matchable = self.kernels.valid(keys, self.strict) if self.strict else None
        if matchable is not None:
            hashes, killed = hashes[matchable], killed[matchable]
        return self._with_staged(layouts.entries(hashes, killed))

    def _with_staged(self, entries: Array | None) -> Array:
        """Entries, ascending, together with those of the rows that the micro-batch brings."""
        staged = self.key_index.staged
        new = staged.entries if staged is not None else self.kernels.xp.empty(0, np.uint64)
        return new if entries is None else self.kernels.sort(self.kernels.xp.concatenate([entries, new]))

    def add_counts(self, slots: Slots, deltas: Array, before: Array | None = None) -> None:
        """Move association counts, undoably; a write, for the TTL. Arguments as of `StateTable.add`."""
        self.add(COUNT_COLUMN, slots, deltas, before)
        self._written.append(slots)

    def end_stillborn(self, slots: Slots) -> None:
        """New rows that die within the micro-batch."""
        self.end(slots)
        self._null_keys_after -= self._without_key(slots)

    def _finalize(self, done: Journal, clock_ms: int) -> None:
        written = self.written
        if written is not None and self._written:
            slots = distinct(self.kernels, self.kernels.xp.concatenate(self._written))
            self.fetch(slots)
            written[slots] = clock_ms
            self.queues[_EXPIRY].add(self.kernels.xp.full(slots.size, clock_ms, np.int64), slots)

    def _settle(self) -> None:
        self.null_keys += self._null_keys_after
        self._forget()

    def discard(self) -> None:
        """Undo the prepared micro-batch, and what expired before it."""
        super().discard()
        self._forget()

    def _forget(self) -> None:
        self._null_keys_after, self._written = 0, []
        self.killed = self.expired = self._no_slots
        self._touched = None

    def expire(self, clock_ms: int) -> int:
        """Forget rows last written a TTL or more ago; how many. Costs what was written then.

        Part of a micro-batch: `commit` makes it final, `discard` brings the rows back.
        """
        written, ttl = self.written, self.source.ttl_ms
        if ttl is None or written is None:
            return 0
        # a row written more than once stands in the queue more than once
        _ = self.journal
        slots = distinct(self.kernels, self.queues[_EXPIRY].take(clock_ms - ttl))
        self.fetch(slots)
        old = (self.status.values[slots] == LIVE) & (written[slots] <= clock_ms - ttl)
        self.expired = slots[old]
        self.move(self.expired, LIVE, DEAD)
        return int(self.expired.size)

    def _without_key(self, slots: Slots) -> int:
        """Counts the rows that have a null in a key column where null matches nothing."""
        if not self._track_null_keys or not slots.size:
            return 0
        valid = self.kernels.valid(self.store.take(slots, self.strict), self.strict)
        return 0 if valid is None else int(slots.size - valid.sum())

    # --- the stored form ---------------------------------------------------------------------

    def restore(self, stored: FromSnapshot, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot; arguments and errors as `StateTable._restore`."""

        def take_in(frame: Frame, numbers: Mapping[str, npt.NDArray[Any]]) -> None:
            identity = self.hash_identity(frame) if self.identity_index is not None else None
            beside = {name: self.kernels.asarray(numbers[name]) for name in self._given}
            self.prepare(frame, identity, self._no_slots, beside=beside)

        self._restore(stored, settle, None if self.key_sets_of else take_in)
        if self.written is not None:
            queue = self.queues[_EXPIRY] = TimeQueue(self.kernels)
            queue.add(self.written.copy(), as_slots(self.kernels, 0, len(self)))
            queue.commit()
