"""Keys, each once, with numbers beside them: the groups of an aggregate or a top-N, the values of a group.

And tables to whose rows such numbers lead: best rows, states, the input's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Hashes, Positions, Slots, value_changes
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.times import AFTER_ALL, BEFORE_ALL
from gpu_ops.files.disk import Disk
from gpu_ops.kernels import Among, Columns, Frame, Kernels, as_slots, distinct
from gpu_ops.operators.core.match import live_matches, match
from gpu_ops.operators.core.order import Groups
from gpu_ops.state.index import HashIndex
from gpu_ops.state.keyed_table import WRITTEN_COLUMN, KeyedTable
from gpu_ops.state.numbers import Growing
from gpu_ops.state.pieces import FromSnapshot, RowNumbers
from gpu_ops.state.table import DEAD, LIVE, KeySet, StateTable
from gpu_ops.state.time_index import TimeIndex, TimeQueue

_EXPIRY = "expiry"
_DENSE = 4
"""Of so many keys one is a row's, and a pass over all of them costs less than sorting the rows."""

_MANY: Final = 1 << 18
"""Rows of which it pays to look whether most have the key of an earlier one, before they are sorted."""
_NEAR: Final = 1 << 16
"""Places by the first bits of a hash in which such an earlier one is looked for; they fit in a processor's cache."""


class Located(NamedTuple):
    """The keys of n rows.

    Attributes:
        slots: of each of g different keys, ascending.
        number: of each row, which of these keys is its own.
    """

    slots: Slots
    number: Array


class KeyTable(StateTable):
    """A table of distinct keys, with numbers beside each.

    Args:
        kernels: the backend.
        schema: the columns of a key.
        columns: the numbers beside them.
        name: for errors.
        by_first: keys are looked up by their first column alone, too (`of_first`).
        ttl_ms: milliseconds after its last `touch` at which a key has expired; None for never.
        types: what keys are compared as; None for the columns' own.
    """

    def __init__(
        self,
        kernels: Kernels,
        schema: pa.Schema,
        columns: Mapping[str, npt.DTypeLike],
        name: str,
        *,
        by_first: bool = False,
        ttl_ms: int | None = None,
        types: Sequence[pa.DataType] | None = None,
    ) -> None:
        beside = dict(columns) if ttl_ms is None else {**columns, WRITTEN_COLUMN: np.int64}
        super().__init__(kernels, Input(name, schema), beside)
        self._ttl = ttl_ms
        self.as_stored: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {}
        """Of some numbers, what a snapshot has in their place."""
        if ttl_ms is not None:
            self.queues[_EXPIRY] = TimeQueue(kernels)
        self._names = tuple(schema.names)
        self._types = tuple(schema.types if types is None else types)
        self.key_sets_of = {"0": KeySet(self._names, self._types, ())}
        if by_first:
            self.key_sets_of["1"] = KeySet(self._names[:1], self._types[:1], ())
        self.indexes = {name: HashIndex(kernels) for name in self.key_sets_of}
        self._places = self._no_places = kernels.xp.empty(0, np.int32)
        """By the first bits of a hash the slot of the last key found there, perhaps: fewer looks in the index."""
        self._spare = True
        """Whether there is memory for that."""
        self._discarded = False
        """Whether they may lead to keys of a micro-batch that was discarded."""

    def _forget_places(self) -> None:
        self._places, self._discarded = self._no_places, False

    @property
    def nbytes(self) -> int:
        """Bytes of all there is."""
        return super().nbytes + int(self._places.nbytes)

    def discard(self) -> None:
        """Undo the prepared micro-batch."""
        super().discard()
        self._discarded = True

    def _renumber(self, new_slots: Slots) -> None:
        self._forget_places()

    def cool_indexes(self, wanted: int, disk: Disk | None = None) -> int:
        """Move the oldest part of indexes one place further; to disk only after the places, which are not needed."""
        freed = 0
        if disk is not None and self.kernels.host is None:
            freed, self._spare = int(self._places.nbytes), False
            self._forget_places()
        return freed if freed >= wanted else freed + super().cool_indexes(wanted - freed, disk)

    def have(self, names: Iterable[str]) -> None:
        """Make columns of numbers beside the keys, all 0, that are not there yet; a snapshot has them from then on."""
        for name in names:
            if name not in self.beside:
                column = Growing(self.kernels.xp, np.int64)
                column.extend(len(self), 0)
                self.beside[name] = column

    def locate(self, frame: Frame) -> Located:
        """Finds the slots of some rows' keys; keys that are new are staged, all numbers 0.

        Args:
            frame: n rows with the columns of a key.
        """
        kernels, xp, names, types = self.kernels, self.kernels.xp, self._names, self._types
        hashes = kernels.hash_rows(frame, names, types)
        slots = self._guessed(frame, hashes)
        rest = xp.flatnonzero(slots < 0)
        if rest.size == hashes.size:
            slots = self._searched(frame, hashes)
        elif rest.size:
            slots[rest] = self._searched(kernels.take(frame, rest, names, present=True), hashes[rest])
        self.fetch(slots)
        if len(self) <= _DENSE * hashes.size:
            touched = xp.zeros(len(self), bool)
            touched[slots] = True
            touched_slots = xp.flatnonzero(touched)
            return Located(
                touched_slots, slots if touched_slots.size == touched.size else (xp.cumsum(touched) - 1)[slots]
            )
        order, number = kernels.argsort(slots), xp.empty(slots.size, np.int64)
        ascending = slots[order]
        first = value_changes(xp, ascending)
        number[order] = xp.cumsum(first) - 1
        return Located(xp.compress(first, ascending), number)

    def find(self, frame: Frame) -> Slots:
        """The slots of the keys of some rows, -1 for those that are not there; ``frame`` as of `locate`."""
        kernels, names, types = self.kernels, self._names, self._types
        hashes = kernels.hash_rows(frame, names, types)
        slots = self._guessed(frame, hashes)
        rest = kernels.xp.flatnonzero(slots < 0)
        if rest.size and len(self):
            probe_rows = kernels.sort(kernels.entries(hashes, 0, rest))
            pairs = cast("HashIndex", self.indexes["0"]).meet(probe_rows, staged=True)
            columns = Columns(frame, names, rest), Columns(self.store, names)
            slots[rest] = kernels.sole_matches(types, pairs, columns, self._among(), size=int(rest.size))
        return slots

    def _among(self) -> Among | None:
        """The keys that are there."""
        return None if self.live_after() == len(self) else Among(self.status.values, LIVE, LIVE)

    def _guessed(self, frame: Frame, hashes: Hashes) -> Slots:
        """The slot of each row's key, -1 where a look at its hash's place does not tell."""
        kernels, xp, names, types = self.kernels, self.kernels.xp, self._names, self._types
        if not self._places.size or not len(self):
            return xp.full(hashes.size, -1, np.int64)
        slots = self._places[self._place(hashes)].astype(np.int64)
        if self._discarded:  # what was staged is there no more, or another key is; the keys are compared anyway
            slots[slots >= len(self)] = -1
        # a row that is there is read in place of none, which spares a look
        held = self.store.take(xp.maximum(slots, 0), names, present=True)
        same = kernels.equal_rows(frame, names, held, names, types)
        same &= slots >= 0
        if self.live_after() < len(self):
            same &= self.status.values[slots] == LIVE
        return xp.where(same, slots, -1)

    def _place(self, hashes: Hashes) -> Positions:
        """The place in the cache of places where a key of each hash would be."""
        return _first_bits(hashes, int(self._places.size))

    def _searched(self, frame: Frame, hashes: Hashes) -> Slots:
        """The slot of each row's key, staged where it is not there yet; next time its place tells."""
        kernels, xp = self.kernels, self.kernels.xp
        first = self._first_alike(frame, hashes)
        if first is None:
            return self._sorted_out(frame, hashes)
        own = xp.flatnonzero(first == xp.arange(first.size))
        slots = xp.empty(first.size, np.int64)
        slots[own] = self._sorted_out(kernels.take(frame, own, self._names, present=True), hashes[own])
        found: Slots = slots[first]
        return found

    def _first_alike(self, frame: Frame, hashes: Hashes) -> Positions | None:
        """An earlier row with the key of each row, or the row itself; None where few would have one, or rows are few.

        Of rows with one key all have the first of them, or each itself.
        """
        kernels, xp, names = self.kernels, self.kernels.xp, self._names
        size = int(hashes.size)
        if size < _MANY or kernels.host is not None:  # of several rows in one place a card writes any
            return None
        place, rows = _first_bits(hashes, _NEAR), xp.arange(size)
        near = xp.zeros(_NEAR, np.int64)
        near[place[:_NEAR]] = 1
        if 4 * xp.count_nonzero(near) > _NEAR:
            return None
        near[place[::-1]] = rows[::-1]  # the last one written is the first
        first = near[place]
        same = kernels.equal_rows(frame, names, kernels.take(frame, first, names, present=True), names, self._types)
        return xp.where(same, first, rows)

    def _sorted_out(self, frame: Frame, hashes: Hashes) -> Slots:
        """The slots as of `_searched`, by sorting the rows."""
        kernels, xp, names, types = self.kernels, self.kernels.xp, self._names, self._types
        groups = Groups(kernels, frame, names, types, hashes)
        leader = groups.leader
        index = cast("HashIndex", self.indexes["0"])
        pairs = index.meet(kernels.entries(hashes, 0, leader), staged=False)
        columns = Columns(frame, names, leader), Columns(self.store, names)
        slots_of_leaders = kernels.sole_matches(types, pairs, columns, self._among(), size=int(leader.size))
        fresh = xp.flatnonzero(slots_of_leaders < 0)
        if fresh.size:
            # in the order in which they came: what comes out follows slots, and must not follow hashes
            fresh = fresh[kernels.argsort(leader[fresh])]
            first, rows = len(self), leader[fresh]
            new = kernels.take(frame, rows, names, present=True)
            self.append(new)
            slots_of_leaders[fresh] = as_slots(kernels, first, int(fresh.size))
            index.stage_entries(kernels.entries(hashes, first, rows))
            self._stage_first(new, first)
        if self._spare and 2 * len(self) > self._places.size:
            self._places = xp.full(1 << (4 * len(self)).bit_length(), -1, np.int32)
        if self._places.size:
            place = self._place(hashes[leader])  # ascending, as the groups' hashes are
            one = xp.flatnonzero(value_changes(xp, place))
            self._places[place[one]] = slots_of_leaders[one]
        slots = xp.empty(hashes.size, np.int64)
        slots[groups.order] = slots_of_leaders[groups.group]
        return slots

    def _stage_first(self, frame: Frame, first: int) -> None:
        if "1" in self.indexes:
            hashes = self.kernels.hash_rows(frame, self._names[:1], self._types[:1])
            cast("HashIndex", self.indexes["1"]).stage_entries(self.kernels.entries(hashes, first))

    def of_first(self, frame: Frame) -> Slots:
        """The committed keys whose first column has one of some different values; ``frame`` has that column."""
        names, types = self._names[:1], self._types[:1]
        index, status = cast("HashIndex", self.indexes["1"]), self.status.values
        _, slots = match(
            self.kernels,
            index.probe(self.kernels.hash_rows(frame, names, types), staged=False),
            types,
            (Columns(frame, names), Columns(self.store, names)),
            alive=lambda _, slots: status[slots] == LIVE,
        )
        return slots

    # --- state TTL ---------------------------------------------------------------------------

    def expired(self, clock_ms: int) -> Slots:
        """Keys that were touched a TTL or more ago, in order; costs what was touched then. They are still there."""
        xp = self.kernels.xp
        if self._ttl is None:
            return xp.empty(0, np.int64)
        # a key that was touched more than once stands in the queue more than once
        slots = distinct(self.kernels, self.queues[_EXPIRY].take(clock_ms - self._ttl))
        self.fetch(slots)
        written = self.beside[WRITTEN_COLUMN].values[slots]
        return slots[(self.status.values[slots] == LIVE) & (written <= clock_ms - self._ttl)]

    def touch(self, slots: Slots, clock_ms: int | Array) -> None:
        """Note that something of these different keys was written, if keys expire; then, or when it was of each."""
        if self._ttl is not None:
            self.put(WRITTEN_COLUMN, slots, clock_ms)
            self.queues[_EXPIRY].add(self.kernels.xp.zeros(slots.size, np.int64) + clock_ms, slots)

    # --- the stored form ---------------------------------------------------------------------

    def _numbers(self, columns: Mapping[str, Growing]) -> RowNumbers:
        numbers = super()._numbers(columns)
        return numbers | {name: changed(numbers[name]) for name, changed in self.as_stored.items()}

    def restore(self, stored: FromSnapshot, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot; arguments and errors as `StateTable._restore`."""
        self._restore(stored, settle)
        if self._ttl is not None:
            queue = self.queues[_EXPIRY] = TimeQueue(self.kernels)
            queue.add(self.beside[WRITTEN_COLUMN].values.copy(), as_slots(self.kernels, 0, len(self)))
            queue.commit()


def _first_bits(hashes: Hashes, places: int) -> Positions:
    """The place of each hash among places, whose number is a power of two."""
    return (hashes >> np.uint64(65 - places.bit_length())).view(np.int64)


def forget_rows(table: KeyedTable, frame: Frame) -> int:
    """Forget all rows of some different keys before the micro-batch's changes, as `KeyedTable.expire` does; how many.

    Args:
        table: the rows.
        frame: the keys, in the columns that rows are looked up by.
    """
    kernels, xp = table.kernels, table.kernels.xp
    hashes, index = kernels.hash_rows(frame, table.keys, table.key_types), table.indexes["0"]
    if isinstance(index, TimeIndex):
        first, last = (xp.full(hashes.size, time, np.int64) for time in (BEFORE_ALL, AFTER_ALL))
        candidates = index.probe(hashes, first, last, staged=False)
    else:
        candidates = table.key_index.probe(hashes, staged=False)
    table.expired = slots = live_matches(table, candidates, Columns(frame, table.keys))[1]
    table.move(slots, LIVE, DEAD)
    return int(slots.size)


class ReferencedTable(StateTable):
    """A table to which the numbers of another one lead.

    Attributes:
        follow: called before a compaction with each slot's new one, -1 for none.
    """

    follow: Callable[[Slots], None] | None = None

    def _renumber(self, new_slots: Slots) -> None:
        if self.follow is not None:
            self.follow(new_slots)


class ValueTable(ReferencedTable):
    """Rows that the numbers of another table lead to; no index."""

    def restore(self, stored: FromSnapshot, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot; arguments and errors as `StateTable._restore`."""
        self._restore(stored, settle)


class InputRows(ReferencedTable, KeyedTable):
    """The rows of an input, which numbers beside groups lead to."""
