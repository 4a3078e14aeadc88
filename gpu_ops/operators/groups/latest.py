"""The latest row of each key, after Flink's ``ProcTimeDeduplicateKeepLastRowFunction``.

Law: of each key the row that the last change brought is in the result, unless that change took it away.

With ``order_by`` or ``keep="first"`` the input has insertions only, and a row counts where it is chosen over all that
came before it: with the last one kept, by an order not below theirs (``order_by``; Flink's
``RowTimeDeduplicateFunction``: of equal ones the later is kept); with the first one, by an order below theirs, or,
without ``order_by``, where there is none (``ProcTimeDeduplicateKeepFirstRowFunction``). Rows that do not count change
nothing. So a state of one row per key is enough.

With ``unavailable`` a change may say of some columns that it does not bring them: they are those of the row that it
replaces, which is in the state, or came before it in the micro-batch. What is stored are whole rows. A ``-U`` leaves
the values to the ``+U`` behind it; behind a ``-D``, and where there is no row, there is nothing to keep.

Row kinds (``per_event``): the first row of a key is ``+I``; one that replaces another ``-U`` and ``+U``; one that is
taken away ``-D``. Where Flink says nothing, as a row is replaced by an equal one, there is a pair of equal rows here.
``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes, and nothing for a row that is as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.changelog import BAD_ROW_KIND, DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE, adds
from gpu_ops.descriptions.groups import Latest
from gpu_ops.errors import BadInputError
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Flagged, Kernels, as_slots
from gpu_ops.operators.core.changes import Lifetimes, present
from gpu_ops.operators.core.emission import JOINED, OutputRows, in_order, net_rows
from gpu_ops.operators.core.order import Groups
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.output import Beside, Output
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import KeySet


class LatestRows(KeyedOperator):
    """The rows there are, by their key.

    Args:
        description: the description.
        kernels: the backend.
    """

    description: Latest

    def __init__(self, description: Latest, kernels: Kernels) -> None:
        super().__init__(description, kernels)
        self._lost: pa.Table | None = None
        keys = KeySet.of_group(description.source.schema, description.by)
        self.tables = (KeyedTable(kernels, description.source, [keys], findable=True),)

    def chosen(self, changes: tuple[Ingested, ...]) -> tuple[Ingested, ...]:
        """Keeps the changes that are chosen over the rows of their keys that are there, or come before them."""
        description, (change,) = self.description, changes
        if description.unavailable is not None and change.kinds.size:
            return (self._completed(change, description.unavailable),)
        if not description.chooses or not change.kinds.size:
            return changes
        kernels, xp = self.kernels, self.kernels.xp
        groups, owner, slots = self._by_key(change)
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
        counts[groups.order] = ranks <= before if description.keep == "last" else ranks < before
        return (change.pick(kernels.asnumpy(counts)),)

    def _by_key(self, change: Ingested) -> tuple[Groups, Array, Slots]:
        """Changes by their keys; numbers of the keys of which a row is there, and its slot."""
        (table,), frame = self.tables, change.frame(self.kernels)
        identity = table.hash_identity(frame)
        groups = Groups(self.kernels, frame, table.identity, table.identity_types, identity)
        return groups, *present(table, frame, groups.leader, identity)

    def _completed(self, change: Ingested, unavailable: str) -> Ingested:
        """Changes that have all their values.

        Raises:
            BadInputError: one that lacks a value where there is none from before, if ``bad_rows`` is ``fail``.
        """
        kernels, description, (table,) = self.kernels, self.description, self.tables
        rows, told = change.table, change.column(unavailable).combine_chunks()
        lacks = self._lacking(change, told)
        if lacks:
            groups, *found = self._by_key(change)
            owner, slots = map(kernels.asnumpy, found)
            order, group = kernels.asnumpy(groups.order), kernels.asnumpy(groups.group)
            held = table.store.take(kernels.asarray(slots), list(lacks), present=True)
            stored = kernels.to_arrow(held, pa.schema([description.source.schema.field(name) for name in lacks]))
            of_group = np.full(int(groups.leader.size), -1)
            of_group[owner] = change.kinds.size + np.arange(slots.size)
            brings, ends = adds(change.kinds)[order], change.kinds[order] == DELETE
            starts = kernels.asnumpy(groups.starts)[group]
        lost = np.zeros(change.kinds.size, bool)
        for name, lacking in lacks.items():
            wanting = lacking[order]
            # the last change before that says what the value is, or that there is no row any more
            place = np.maximum.accumulate(np.where((brings & ~wanting) | ends, np.arange(order.size), -1))
            within = place >= starts
            source = np.where(within, np.where(ends[place], -1, order[place]), of_group[group])
            index = np.arange(order.size)
            index[order[wanting]] = source[wanting]
            lost |= index < 0
            if (index < 0).any() and description.source.bad_rows == "fail":
                key = rows.select(description.by).slice(int(np.argmax(index < 0)), 1).to_pylist()[0]
                problem = "a change does not bring it, and there is no row of its key that it could be kept of: set "
                raise BadInputError(description.source.name, name, problem + "REPLICA IDENTITY FULL at the source", key)
            values = pa.chunked_array([*rows[name].chunks, *stored[name].cast(rows[name].type).chunks])
            taken = values.take(pa.array(index, mask=index < 0))
            rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), taken)
        nothing = pa.nulls(change.kinds.size, told.type)
        rows = rows.set_column(rows.schema.get_field_index(unavailable), rows.schema.field(unavailable), nothing)
        self._lost = change.table.filter(pa.array(lost)) if lost.any() else None
        whole = dataclasses.replace(change, rows=rows)
        return whole.pick(~lost) if lost.any() else whole

    def _lacking(self, change: Ingested, told: pa.ListArray) -> dict[str, npt.NDArray[np.bool_]]:
        """By column, which of the changes that bring a row do not bring its value."""
        description, names = self.description, told.flatten()
        owner = pc.list_parent_indices(told).to_numpy()
        found: dict[str, npt.NDArray[np.bool_]] = {}
        for name in pc.unique(names).to_pylist():
            if name in description.by:
                raise BadInputError(description.source.name, name, "is of the key, and a change does not bring it")
            if name in description.source.schema.names and name != description.unavailable:
                mask = np.zeros(change.kinds.size, bool)
                mask[owner[pc.equal(names, name).to_numpy(zero_copy_only=False)]] = True
                mask &= adds(change.kinds)
                found |= {name: mask} if mask.any() else {}
        return found

    def _prepare(self, changes: tuple[Ingested, ...], clock_ms: int, *, net: bool) -> Output:
        self._lost = None
        made, (change,), lost = super()._prepare(changes, clock_ms, net=net), changes, self._lost
        if lost is None:
            return made
        made.metrics[f"{self.description.sides[0]}_bad_rows"] = change.bad_rows + lost.num_rows
        if self.description.source.bad_rows == "tag":
            sequence = np.concatenate([made.sequence, np.zeros(lost.num_rows, np.int64)])
            made = dataclasses.replace(made, sequence=sequence, beside=(*made.beside, Beside(0, lost, BAD_ROW_KIND)))
        return made

    def _ranks(self, change: Ingested, slots: Slots) -> tuple[Array, Array]:
        """Ranks the changes and the rows that are there, from 0, in the order, or in its reverse."""
        kernels, description, (table,) = self.kernels, self.description, self.tables
        if description.order_by is None:
            return kernels.xp.zeros(change.kinds.size, np.int64), kernels.xp.zeros(slots.size, np.int64)
        column, field = change.column(description.order_by), description.source.schema.field(description.order_by)
        held = table.store.take(slots, [description.order_by], present=True)
        stored = kernels.to_arrow(held, pa.schema([field]))
        values = pa.chunked_array([*column.cast(field.type).chunks, *stored[0].chunks], field.type)
        rank = pc.rank(
            values, "descending" if description.keep == "last" else "ascending", tiebreaker="dense"
        ).to_numpy()
        ranks = kernels.asarray(rank.astype(np.int64))
        return ranks[: change.kinds.size], ranks[change.kinds.size :]

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> None:
        """Nothing beyond the lifetimes of the rows."""

    def rows(self, matches: None, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Each row that comes, and each that goes; of a net change none equals another: the changes were told so."""
        kernels, xp, (side,) = self.kernels, self.kernels.xp, sides
        if event_kinds is None:
            new = as_slots(kernels, side.first_new, side.new)
            return net_rows(kernels, [Flagged(None, [side.killed])], [Flagged(None, [new])], present=True)
        slots, logical_times, signs = side.events(kernels)
        # a change takes the old row at one logical time and brings the new one at the next
        comes, goes = xp.zeros(event_kinds.size + 1, bool), xp.zeros(event_kinds.size + 1, bool)
        comes[logical_times[signs > 0]] = True
        goes[logical_times[signs < 0]] = True
        new = xp.where(goes[xp.maximum(logical_times - 1, 0)], np.int8(UPDATE_AFTER), np.int8(INSERT))
        old = xp.where(comes[logical_times + 1], np.int8(UPDATE_BEFORE), np.int8(DELETE))
        return in_order(kernels, [(OutputRows(xp.where(signs > 0, new, old), (slots,), logical_times), JOINED)])


make = LatestRows
