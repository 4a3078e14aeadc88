"""The latest row of each key, after Flink's ``ProcTimeDeduplicateKeepLastRowFunction``.

Law: of each key the row that the last change brought is in the result, unless that change took it away.

With ``order_by`` or ``keep="first"`` the input has insertions only, and a row counts where it is chosen over all that
came before it: with the last one kept, by an order not below theirs (``order_by``; Flink's
``RowTimeDeduplicateFunction``: of equal ones the later is kept); with the first one, by an order below theirs, or,
without ``order_by``, where there is none (``ProcTimeDeduplicateKeepFirstRowFunction``). Rows that do not count change
nothing. So a state of one row per key is enough.

Row kinds (``per_event``): the first row of a key is ``+I``; one that replaces another ``-U`` and ``+U``; one that is
taken away ``-D``. Where Flink says nothing, as a row is replaced by an equal one, there is a pair of equal rows here.
``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes, and nothing for a row that is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.descriptions.groups.latest import Latest
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.operators.core.changes import present
from gpu_ops.operators.core.emission import JOINED, OutputRows, in_order, net_rows
from gpu_ops.operators.core.groups import Groups
from gpu_ops.operators.core.lifetimes import Lifetimes
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.state.columns import KeySet
from gpu_ops.state.keyed_table import KeyedTable


class LatestRows(KeyedOperator):
    """The rows there are, by their key.

    Args:
        join: the description.
        kernels: the backend.
    """

    join: Latest

    def __init__(self, join: Latest, kernels: Kernels) -> None:
        super().__init__(join, kernels)
        types = tuple(join.source.schema.field(column).type for column in join.by)
        self.tables = (KeyedTable(kernels, join.source, [KeySet(join.by, types, ())], findable=True),)

    def chosen(self, changes: tuple[Ingested, ...]) -> tuple[Ingested, ...]:
        """Those that are chosen over the rows of their keys that are there, or come before them."""
        join, (change,) = self.join, changes
        if not join.chooses or not change.kinds.size:
            return changes
        kernels, xp, (table,) = self.kernels, self.kernels.xp, self.tables
        frame = change.frame(kernels)
        identity = table.hash_identity(frame)
        groups = Groups(kernels, frame, table.identity, table.identity_types, identity)
        owner, slots = present(table, frame, groups.leader, identity)
        new, old = self._ranks(change, slots)
        size, total = groups.order.size, int(groups.leader.size)
        # one lower than another is chosen over it; none is there: higher than any
        best = xp.full(total, size + slots.size + 1, np.int64)
        best[owner] = old
        ranks, wide = new[groups.order], size + slots.size + 2
        lowest = kernels.cumulative_min(ranks - groups.group * wide) + groups.group * wide
        before = xp.concatenate([best[:1], lowest[:-1]])
        before[groups.starts] = best
        before = xp.minimum(before, best[groups.group])
        counts = xp.zeros(size, bool)
        counts[groups.order] = ranks <= before if join.keep == "last" else ranks < before
        return (change.pick(kernels.asnumpy(counts)),)

    def _ranks(self, change: Ingested, slots: Slots) -> tuple[Array, Array]:
        """Of the changes and of rows that are there, numbers from 0 that are in the order, or in its reverse."""
        kernels, join, (table,) = self.kernels, self.join, self.tables
        if join.order_by is None:
            return kernels.xp.zeros(change.kinds.size, np.int64), kernels.xp.zeros(slots.size, np.int64)
        column, field = change.column(join.order_by), join.source.schema.field(join.order_by)
        held = table.store.take(slots, [join.order_by], present=True)
        stored = kernels.to_arrow(held, pa.schema([field]))
        values = pa.chunked_array([*column.cast(field.type).chunks, *stored[0].chunks], field.type)
        rank = pc.rank(values, "descending" if join.keep == "last" else "ascending", tiebreaker="dense").to_numpy()
        ranks = kernels.asarray(rank.astype(np.int64))
        return ranks[: change.kinds.size], ranks[change.kinds.size :]

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> None:
        """Nothing beyond the lifetimes of the rows."""

    def rows(self, found: None, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Each row that comes, and each that goes; of a net change none equals another: the changes were told so."""
        del found
        kernels, xp, (side,) = self.kernels, self.kernels.xp, sides
        if event_kinds is None:
            return net_rows(xp, [(side.killed,)], [(as_slots(kernels, side.first_new, side.new),)])
        slots, instants, signs = side.events(kernels)
        # a change takes the old row at one instant and brings the new one at the next
        comes, goes = xp.zeros(event_kinds.size + 1, bool), xp.zeros(event_kinds.size + 1, bool)
        comes[instants[signs > 0]] = True
        goes[instants[signs < 0]] = True
        new = xp.where(goes[xp.maximum(instants - 1, 0)], np.int8(UPDATE_AFTER), np.int8(INSERT))
        old = xp.where(comes[instants + 1], np.int8(UPDATE_BEFORE), np.int8(DELETE))
        return in_order(kernels, [(OutputRows(xp.where(signs > 0, new, old), (slots,), instants), JOINED)])


make = LatestRows
