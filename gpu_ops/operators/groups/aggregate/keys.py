"""State tables of aggregates to which the numbers of groups lead: best rows, and the input's rows."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from gpu_ops.arrays import Slots
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import StateTable


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
