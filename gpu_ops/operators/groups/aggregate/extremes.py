"""The least and the greatest value of a group, and its first and last one.

Beside a group stands the slot of its best row: of the input's rows where they are kept, else of a table that has best
rows only. An input that only grows needs no other row. Where rows are taken back, the other rows of a group are looked
at only when its best one goes (Flink's ``MinWithRetractAggFunction`` does so, too), through the index by group.

A row is better than another by its value (min, max), or by the input's ``sequence_by`` and then by arrival: of equal
rows the first is the one that came first, the last the one that came last. Null is no value.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.descriptions.groups.aggregate import Measure
from gpu_ops.kernels import Columns, as_slots
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.operators.core.least import NONE, least
from gpu_ops.operators.core.lifetimes import NEVER
from gpu_ops.operators.core.match import match
from gpu_ops.operators.core.numbers import float_codes
from gpu_ops.operators.groups.aggregate.keys import InputRows, ValueTable
from gpu_ops.operators.groups.aggregate.step import Running, Step
from gpu_ops.state.columns import DEAD, DYING
from gpu_ops.values import one_array

_NOTHING: Final = np.uint64(np.iinfo(np.uint64).max)

NO_ROW: Final = 0
"""Beside a group stands its best row's slot plus 1, so that a new group, whose numbers are 0, has none."""


@dataclasses.dataclass(frozen=True)
class Extreme:
    """An aggregate that is the value of one row.

    Attributes:
        measure: which.
        number: of the aggregate, for names.
        table: where best rows lie.
        order: the column that rows are ordered by; None for arrival alone.
        own: whether the table has best rows only.
    """

    measure: Measure
    number: int
    table: InputRows | ValueTable
    order: str | None
    own: bool

    @property
    def name(self) -> str:
        """Of the number beside a group."""
        return f"best_{self.number}"

    def moved(self, step: Step) -> Running:
        """The aggregate at each moment; the group's best row is another then."""
        return _Moved(self, step).running()

    def renumbered(self, groups: KeyTable, new_slots: Slots) -> Array:
        """The numbers beside all groups, after a compaction of the best rows' table."""
        return renumbered(groups.beside[self.name].values, new_slots, groups.kernels.xp)


def renumbered(best: Array, new_slots: Slots, xp: Any) -> Array:
    """The numbers of rows beside groups, after a compaction of the table that they lead to."""
    return xp.where(best > NO_ROW, new_slots[xp.maximum(best - 1, 0)] + 1, NO_ROW) if new_slots.size else best


class _Moved:
    """What a micro-batch does to one such aggregate.

    Candidates are old rows, those of a group by slot, then new ones, as they came.
    """

    def __init__(self, extreme: Extreme, step: Step) -> None:
        self.extreme, self.step, self.line = extreme, step, step.line
        xp, kernels, column = step.xp, step.kernels, extreme.measure.column
        assert column is not None
        best = step.base(extreme.name)
        alone = self._look(best)
        there = step.there(column)
        new = xp.arange(step.new, dtype=np.int64)
        self.new = new if there is None else new[there[: step.new]]
        by = column if self._by_value else extreme.order
        names = list(dict.fromkeys([column, *([] if by is None else [by])]))
        held = self._held(names)
        chosen = pa.array(kernels.asnumpy(self.new))
        if by is None:
            self.codes = np.zeros(self.old.size + self.new.size, np.int64)
        else:
            self.codes = order_codes(_behind(held[by], step.column(by).take(chosen)))
        chosen = self._better(alone, chosen)
        self.values = one_zero(_behind(held[column], step.column(column).take(chosen)))
        self.ordered = None if extreme.order is None else _behind(held[names[-1]], step.column(names[-1]).take(chosen))

    def _better(self, alone: Array, chosen: pa.Array) -> pa.Array:
        """New rows without those that are no better than a best row which stays; these are never seen."""
        step, xp, old = self.step, self.step.xp, int(self.old.size)
        if not old or not self.new.size:
            return chosen
        codes = step.kernels.asarray(self.codes)
        group = self.line.event_group[self.new]
        base, own = codes[xp.maximum(self.base, 0)][group], codes[old:]
        function = self.extreme.measure.function
        better = {"min": own < base, "first": own < base, "max": own > base, "last": own >= base}[function]
        better |= ~alone[group] | (self.base[group] < 0)
        kept = xp.flatnonzero(better)
        self.new = self.new[kept]
        rows = step.kernels.asnumpy(kept)
        self.codes = np.concatenate([self.codes[:old], self.codes[old:][rows]])
        return chosen.take(pa.array(rows))

    def _look(self, best: Array) -> Array:
        """Find the rows that were there before and may be a best one; gives a mask of groups whose best one stays.

        Of these no other one is looked at.
        """
        step, xp = self.step, self.step.xp
        some, alone = xp.flatnonzero(best > NO_ROW), xp.ones(best.size, bool)
        slots = best[some] - 1
        self.old, self.old_group = slots, some
        self.base = xp.full(best.size, -1, np.int64)  # the candidate that each group had as its best
        self.base[some] = xp.arange(some.size, dtype=np.int64)
        if step.kept is None or not step.kept.lifetimes.killed.size:
            return alone
        table = step.kept.table
        goes = table.status.values[slots] == DYING
        looks = some[goes]
        if not looks.size:
            return alone
        alone[looks] = False
        column = self.extreme.measure.column
        assert column is not None
        frame = table.store.take(slots[goes], table.source.schema.names, present=True)
        hashes = step.kernels.hash_rows(frame, table.keys, table.key_types)
        first_new, status = table.first_new, table.status.values
        needle, found = match(
            step.kernels,
            table.key_index.probe(hashes, staged=False),
            table.key_types,
            (Columns(frame, table.keys), Columns(table.store, table.keys)),
            alive=lambda _, rows: (status[rows] != DEAD) & (rows < first_new),
        )
        valid = step.kernels.valid(table.store.take(found, [column], present=True), [column])
        if valid is not None:
            kept = xp.flatnonzero(valid)
            needle, found = needle[kept], found[kept]
        stays, was = xp.flatnonzero(~goes), xp.flatnonzero(found == slots[goes][needle])
        self.old, self.old_group = xp.concatenate([slots[stays], found]), xp.concatenate([some[stays], looks[needle]])
        self.base[some[stays]] = xp.arange(stays.size, dtype=np.int64)
        self.base[looks[needle[was]]] = was + int(stays.size)
        return alone

    def _held(self, names: list[str]) -> pa.Table:
        store, schema = self.extreme.table.store, self.extreme.table.source.schema
        frame = store.take(self.old, names, present=True)
        return self.step.kernels.to_arrow(frame, pa.schema([schema.field(name) for name in names]))

    def running(self) -> Running:
        """At each moment: a number of the value, and which candidate has it."""
        step, xp, line = self.step, self.step.xp, self.line
        after = self._best_of_groups() if line.net else self._best_of_moments()
        before = line.shifted(after, self.base)
        self._keep(line.final(after))
        shown = step.kernels.asarray(self._numbers())

        def seen(candidate: Array) -> tuple[Array, Array, Array]:
            number = xp.where(candidate < 0, 0, shown[xp.maximum(candidate, 0)]) if shown.size else candidate
            return number, candidate < 0, candidate

        values = self.values

        def made(_: Any, __: Any, candidate: npt.NDArray[np.int64]) -> pa.Array:
            return values.take(pa.array(candidate, mask=candidate < 0))

        return Running(seen(before), seen(after), made, compared=2)

    def _best_of_moments(self) -> Array:
        """The candidate that is the best one at each moment, -1 for none."""
        kernels, xp, size = self.step.kernels, self.step.xp, self.line.size
        order = np.argsort(self.codes, kind="stable")
        if self._greatest:
            order = np.ascontiguousarray(order[::-1])
        if not order.size:
            return xp.full(size, -1, np.int64)
        ranks = np.empty(order.size, np.int64)
        ranks[order] = np.arange(order.size)
        begins, ends = self._spans()
        found = least(kernels, begins, ends, kernels.asarray(ranks), size=size)[:, 0]
        chosen, none = kernels.asarray(order), found == NONE
        return xp.where(none, -1, chosen[xp.where(none, 0, found)])

    def _best_of_groups(self) -> Array:
        """The same of a net change, where each group has one moment: two passes, and nothing is sorted."""
        kernels, xp, size = self.step.kernels, self.step.xp, self.line.size
        begins, ends = self._spans()
        there = xp.flatnonzero(begins < ends)
        codes = kernels.asarray(self.codes)[there]
        keys = ((~codes if self._greatest else codes) ^ np.int64(np.iinfo(np.int64).min)).view(np.uint64)
        group = begins[there]  # a group's moment has its number
        least_key = xp.full(size, _NOTHING, np.uint64)
        kernels.scatter_min(least_key, group, keys)
        equal = xp.flatnonzero(keys == least_key[group])
        # of equal ones the first that came, or the last
        last = int(self.codes.size) - 1
        place = there[equal]
        found = xp.full(size, _NOTHING, np.uint64)
        kernels.scatter_min(found, group[equal], (last - place if self._greatest else place).view(np.uint64))
        none = found == _NOTHING
        best = xp.where(none, np.uint64(0), found).view(np.int64)
        return xp.where(none, -1, last - best if self._greatest else best)

    @property
    def _greatest(self) -> bool:
        return self.extreme.measure.function in ("max", "last")

    @property
    def _by_value(self) -> bool:
        return self.extreme.measure.function in ("min", "max")

    def _numbers(self) -> npt.NDArray[np.int64]:
        """Of each candidate a number that says what its value is."""
        if self._by_value:
            return self.codes
        if pa.types.is_nested(self.values.type):
            return np.arange(len(self.values))
        kinds: npt.NDArray[np.int64] = self.values.dictionary_encode().indices.to_numpy().astype(np.int64)
        return kinds

    def _spans(self) -> tuple[Positions, Positions]:
        """From which moment to which each candidate is there."""
        step, xp, line = self.step, self.step.xp, self.line
        begins_of, ends_of = line.starts, line.last + 1
        begins, ends = begins_of[self.old_group], ends_of[self.old_group]
        # of the new ones the first events are their births, in their order
        births = line.moment[self.new]
        group = line.event_group[self.new]
        new_ends = ends_of[group]
        kept = step.kept
        if kept is not None:
            side = kept.lifetimes
            if line.net:
                dying = kept.table.status.values[self.old] == DYING
                ends = xp.where(dying, begins, ends)
            elif side.any_death:
                died = side.died(xp, self.old)
                ends = self._until(ends, self.old_group, died)
                if side.deaths is not None:
                    new_ends = self._until(new_ends, group, side.deaths[self.new])
        return xp.concatenate([begins, births]), xp.concatenate([ends, new_ends])

    def _until(self, ends: Positions, group: Array, died: Array) -> Positions:
        """The ends of those that die: the moments of their deaths."""
        xp, line = self.step.xp, self.line
        dying = xp.flatnonzero(died < NEVER)
        if dying.size:
            ends = ends.copy()
            ends[dying] = line.moment_at(group[dying], died[dying])
        return ends

    def _keep(self, last: Array) -> None:
        """Note each group's best row."""
        step, xp, extreme = self.step, self.step.xp, self.extreme
        known, size = last >= 0, self.old.size
        is_new = last >= size
        if extreme.own:
            rows = last[xp.flatnonzero(is_new)] - size
            frame = step.kernels.frame(self._rows(step.kernels.asnumpy(rows)))
            first = len(extreme.table)
            extreme.table.append(frame)
            slots = xp.zeros(last.size, np.int64)
            slots[is_new] = as_slots(step.kernels, first, int(rows.size))
            gone = self.base[xp.flatnonzero(is_new & (self.base >= 0))]
            extreme.table.end(self.old[gone])
        elif step.kept is None:
            slots = xp.zeros(last.size, np.int64)
        else:
            rows = xp.where(is_new, last - size, 0)
            new = self.new[rows] if self.new.size else rows
            slots = new + step.kept.lifetimes.first_new
        if size:
            slots = xp.where(is_new, slots, self.old[xp.where(is_new | ~known, 0, last)])
        step.keep(extreme.name, xp.where(known, slots + 1, NO_ROW))

    def _rows(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        schema = self.extreme.table.source.schema
        taken = pa.array(rows + int(self.old.size))
        columns = [column.take(taken) for column in (self.values, self.ordered) if column is not None][: len(schema)]
        return pa.Table.from_arrays(columns, schema=schema)


def _behind(held: pa.ChunkedArray, new: pa.Array) -> pa.Array:
    """Values one after the other."""
    return one_array(pa.chunked_array([*held.chunks, new], held.type))


def order_codes(column: pa.Array) -> npt.NDArray[np.int64]:
    """Numbers that are in the order of values: null is the least, NaN the greatest, zero one value."""
    t, kind = pa.types, column.type
    if len(column) and not column.null_count:
        if t.is_floating(kind):
            return float_codes(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
        if t.is_timestamp(kind) or t.is_duration(kind) or t.is_date64(kind) or t.is_time64(kind):
            return column.cast(pa.int64()).to_numpy()
        if (t.is_integer(kind) and kind != pa.uint64()) or t.is_boolean(kind):
            return column.to_numpy(zero_copy_only=False).astype(np.int64)
    if not len(column) or t.is_null(kind):
        return np.zeros(len(column), np.int64)
    if t.is_duration(kind):
        column = column.cast(pa.int64())
    if t.is_floating(kind):
        column = one_zero(column)
        nan = pc.fill_null(pc.is_nan(column), False)
        codes = _dense(pc.if_else(nan, pa.scalar(None, kind), column))
        return np.where(nan.to_numpy(zero_copy_only=False), np.int64(len(column) + 1), codes)
    return _dense(column)


def _dense(column: pa.Array) -> npt.NDArray[np.int64]:
    ranks = pc.rank(column, "ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    return np.where(column.is_valid().to_numpy(zero_copy_only=False), ranks, 0)


def best_schema(measure: Measure, schema: pa.Schema, order: str | None) -> pa.Schema:
    """The columns of a table of best rows."""
    assert measure.column is not None
    names = [measure.column] if order in (None, measure.column) else [measure.column, order]
    return pa.schema([schema.field(name).with_nullable(True) for name in names])


def one_zero(column: pa.Array) -> pa.Array:
    """A column in which zero is one value."""
    if not pa.types.is_floating(column.type):
        return column
    zero = pa.scalar(0.0, column.type)
    return pc.if_else(pc.equal(column, zero), zero, column)
