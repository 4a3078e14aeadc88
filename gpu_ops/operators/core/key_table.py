"""Keys, each once, with numbers beside them: the groups of an aggregate or a top-N, the values of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Positions, Slots, distinct
from gpu_ops.descriptions.by_time.intervals import AFTER_ALL, BEFORE_ALL
from gpu_ops.descriptions.inputs import Input
from gpu_ops.kernels import Among, Columns, Frame, Kernels, as_slots
from gpu_ops.operators.core.groups import Groups
from gpu_ops.operators.core.match import match, sole_match
from gpu_ops.state.columns import DEAD, LIVE
from gpu_ops.state.index import HashIndex
from gpu_ops.state.keyed_table import WRITTEN_COLUMN, KeyedTable
from gpu_ops.state.queue import TimeQueue
from gpu_ops.state.table import StateTable
from gpu_ops.state.time_index import TimeIndex

_EXPIRY = "expiry"


class Located(NamedTuple):
    """The keys of n rows.

    Attributes:
        slots: of each of g different keys, ascending.
        number: of each row, which of these keys is its own.
        order: the rows, those of one key side by side, in their own order.
    """

    slots: Slots
    number: Array
    order: Positions


class KeyTable(StateTable):
    """Keys, each once.

    Args:
        kernels: the backend.
        schema: the columns of a key.
        columns: the numbers beside them.
        name: for errors.
        by_first: keys are looked up by their first column alone, too (`of_first`).
        ttl_ms: milliseconds after its last `touch` at which a key has expired; None for never.
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
    ) -> None:
        beside = dict(columns) if ttl_ms is None else {**columns, WRITTEN_COLUMN: np.int64}
        super().__init__(kernels, Input(name, schema), beside)
        self._ttl = ttl_ms
        if ttl_ms is not None:
            self.queues[_EXPIRY] = TimeQueue(kernels)
        self._names = tuple(schema.names)
        self._types = tuple(schema.types)
        self.indexes = {"0": HashIndex(kernels)}
        if by_first:
            self.indexes["1"] = HashIndex(kernels)

    def locate(self, frame: Frame) -> Located:
        """Where the keys of some rows are; those that are not there yet are staged, all numbers 0.

        Args:
            frame: n rows with the columns of a key.
        """
        kernels, xp, names, types = self.kernels, self.kernels.xp, self._names, self._types
        size = kernels.num_rows(frame)
        hashes = kernels.hash_rows(frame, names, types)
        groups = Groups(kernels, frame, names, types, hashes)
        leader = groups.leader
        index = cast("HashIndex", self.indexes["0"])
        pairs = index.meet(kernels.entries(hashes, 0, leader), staged=False)
        columns = Columns(frame, names, leader), Columns(self.store, names)
        among = None if self.live_after() == len(self) else Among(self.status.values, LIVE, LIVE)
        slots = sole_match(kernels, types, pairs, columns, among, size=int(leader.size))
        fresh = xp.flatnonzero(slots < 0)
        if fresh.size:
            # in the order in which they came: what comes out follows slots, and must not follow hashes
            fresh = fresh[kernels.argsort(leader[fresh])]
            first, rows = len(self), leader[fresh]
            new = kernels.take(frame, rows, names, present=True)
            self.append(new)
            slots[fresh] = as_slots(kernels, first, int(fresh.size))
            index.stage_entries(kernels.entries(hashes, first, rows))
            self._stage_first(new, first)
        order = kernels.argsort(slots)
        place = xp.empty(order.size, np.int64)
        place[order] = xp.arange(order.size, dtype=np.int64)
        number = xp.empty(size, np.int64)
        number[groups.order] = place[groups.group]
        return Located(slots[order], number, groups.order)

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
        slots = distinct(xp, self.queues[_EXPIRY].take(clock_ms - self._ttl))
        written = self.beside[WRITTEN_COLUMN].values[slots]
        return slots[(self.status.values[slots] == LIVE) & (written + self._ttl <= clock_ms)]

    def touch(self, slots: Slots, clock_ms: int) -> None:
        """Note that something of these different keys was written, if keys expire."""
        if self._ttl is not None:
            self.put(WRITTEN_COLUMN, slots, clock_ms)
            self.queues[_EXPIRY].add(self.kernels.xp.full(slots.size, clock_ms, np.int64), slots)

    # --- the stored form ---------------------------------------------------------------------

    def restore(self, table: pa.Table, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot; arguments and errors as `StateTable._restore`."""

        def take_in(frame: Frame, _: Mapping[str, npt.NDArray[Any]]) -> None:
            first = len(self)
            if self.append(frame):
                hashes = self.kernels.hash_rows(frame, self._names, self._types)
                cast("HashIndex", self.indexes["0"]).stage_entries(self.kernels.entries(hashes, first))
                self._stage_first(frame, first)

        self._restore(table, settle, take_in)
        if self._ttl is not None:
            queue = self.queues[_EXPIRY] = TimeQueue(self.kernels)
            queue.add(self.beside[WRITTEN_COLUMN].values.copy(), as_slots(self.kernels, 0, len(self)))
            queue.commit()


def forget_rows(table: KeyedTable, frame: Frame) -> int:
    """Forget all rows of some different keys before the micro-batch's changes, as `KeyedTable.expire` does; how many.

    Args:
        table: the rows.
        frame: the keys, in the columns that rows are looked up by.
    """
    kernels, xp, status = table.kernels, table.kernels.xp, table.status.values
    hashes, index = kernels.hash_rows(frame, table.keys, table.key_types), table.indexes["0"]
    if isinstance(index, TimeIndex):
        first, last = (xp.full(hashes.size, time, np.int64) for time in (BEFORE_ALL, AFTER_ALL))
        candidates = index.probe(hashes, first, last, staged=False)
    else:
        candidates = table.key_index.probe(hashes, staged=False)
    columns = Columns(frame, table.keys), Columns(table.store, table.keys)
    _, slots = match(kernels, candidates, table.key_types, columns, alive=lambda _, slots: status[slots] == LIVE)
    table.expired = slots
    table.move(slots, LIVE, DEAD)
    return int(slots.size)
