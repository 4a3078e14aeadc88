"""State tables of aggregates: keys, each once, with numbers beside them (groups, the values of a group); and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.kernels import Among, Columns, Frame, Kernels, as_slots
from gpu_ops.operators.core.groups import Groups
from gpu_ops.operators.core.match import sole_match
from gpu_ops.state.columns import LIVE
from gpu_ops.state.index import HashIndex
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import StateTable


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
    """

    def __init__(self, kernels: Kernels, schema: pa.Schema, columns: Mapping[str, npt.DTypeLike], name: str) -> None:
        super().__init__(kernels, Input(name, schema), columns)
        self._names = tuple(schema.names)
        self._types = tuple(schema.types)
        self.indexes = {"0": HashIndex(kernels)}

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
        among = None if self.live == len(self) else Among(self.status.values, LIVE, LIVE)
        slots = sole_match(kernels, types, pairs, columns, among, size=int(leader.size))
        fresh = xp.flatnonzero(slots < 0)
        if fresh.size:
            # in the order in which they came: what comes out follows slots, and must not follow hashes
            fresh = fresh[kernels.argsort(leader[fresh])]
            first, rows = len(self), leader[fresh]
            self.append(kernels.take(frame, rows, names, present=True))
            slots[fresh] = as_slots(kernels, first, int(fresh.size))
            index.stage_entries(kernels.entries(hashes, first, rows))
        order = kernels.argsort(slots)
        place = xp.empty(order.size, np.int64)
        place[order] = xp.arange(order.size, dtype=np.int64)
        number = xp.empty(size, np.int64)
        number[groups.order] = place[groups.group]
        return Located(slots[order], number, groups.order)

    # --- the stored form ---------------------------------------------------------------------

    def restore(self, table: pa.Table, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot; arguments and errors as `StateTable._restore`."""

        def take_in(frame: Frame, _: Mapping[str, npt.NDArray[Any]]) -> None:
            first = len(self)
            if self.append(frame):
                hashes = self.kernels.hash_rows(frame, self._names, self._types)
                cast("HashIndex", self.indexes["0"]).stage_entries(self.kernels.entries(hashes, first))

        self._restore(table, settle, take_in)


class Followed(StateTable):
    """A table to which the numbers of another one lead."""

    follow: Callable[[Slots], None] | None = None
    """Called before a compaction with each slot's new one, -1 for none."""

    def _renumber(self, new_slots: Slots) -> None:
        if self.follow is not None:
            self.follow(new_slots)


class ValueTable(Followed):
    """Rows that the numbers of another table lead to; no index."""

    def restore(self, table: pa.Table, settle: Callable[[], None]) -> None:
        """Fill an empty table from a snapshot; arguments and errors as `StateTable._restore`."""
        self._restore(table, settle, lambda frame, _: self.append(frame))


class InputRows(Followed, KeyedTable):
    """The rows of an input, which numbers beside groups lead to."""
