"""Aggregates for which a group leads to a row: its least, greatest, first or last one; and those of a user's function.

Beside a group stands the slot of its best row: of the input's rows where they are kept, else of a table that has best
rows only. An input that only grows needs no other row. Where rows are taken back, the other rows of a group are looked
at only when its best one goes (Flink's ``MinWithRetractAggFunction`` does so, too): all of a small group, through the
index by group, but of a large one the next ones, through an index in their order, which is made once it pays.

A row is better than another by its value (min, max), or by the input's ``sequence_by`` and then by arrival: of equal
rows the first is the one that came first, the last the one that came last. Null is no value.

Of a user's function the state of each group is a row of a table, whose slot stands beside the group. With ``per_event``
the first events of all groups are one call, then the second ones, and so on: as many calls as the busiest group has
events. A function is called on the host, whatever the backend.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Ints, Positions, Slots
from gpu_ops.descriptions.aggregate import AggregateFunction, Measure
from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.kernels import Columns, Flagged, TooMany, as_slots, distinct
from gpu_ops.operators.core.changes import NEVER
from gpu_ops.operators.core.first_rows import FirstRows, most_candidates, order_rows
from gpu_ops.operators.core.key_table import InputRows, ValueTable
from gpu_ops.operators.core.looks import Asked, Steps
from gpu_ops.operators.core.match import match
from gpu_ops.operators.core.order import NONE, least, one_zero, order_codes, order_codes_of
from gpu_ops.operators.groups.aggregate.step import AggregateStep, Running
from gpu_ops.state.index import OrderIndex
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import DEAD, DYING
from gpu_ops.values import equal_codes, one_array

_NOTHING: Final = np.uint64(np.iinfo(np.uint64).max)
NO_ROW: Final = 0
"""Beside a group stands its best row's slot plus 1, so that a new group, whose numbers are 0, has none."""


@dataclasses.dataclass(frozen=True)
class Extreme:
    """An aggregate that is the value of one row.

    Attributes:
        measure: which.
        name: of the number beside a group.
        table: where best rows lie.
        order: the column that rows are ordered by; None for arrival alone.
        exclusive: whether the table has best rows only.
    """

    measure: Measure
    name: str
    table: InputRows | ValueTable
    order: str | None
    exclusive: bool

    def moved(self, step: AggregateStep) -> Steps[Running]:
        """The aggregate at each moment; the group's best row is another then."""
        moved = _Moved(self, step)
        yield from moved.look()
        return (yield from moved.running())


def renumbered(best: Array, new_slots: Slots, xp: Any) -> Array:
    """The numbers of rows beside groups, after a compaction of the table that they lead to."""
    return xp.where(best > NO_ROW, new_slots[xp.maximum(best - 1, 0)] + 1, NO_ROW) if new_slots.size else best


class _Moved:
    """The changes that a micro-batch makes to one such aggregate.

    Candidates are old rows, those of a group by slot, then new ones, as they came.
    """

    def __init__(self, extreme: Extreme, step: AggregateStep) -> None:
        self.extreme, self.step, self.line = extreme, step, step.line

    def look(self) -> Steps[None]:
        """Finds the rows that may be the best of their groups: those that were there, and new ones."""
        extreme, step, xp, kernels = self.extreme, self.step, self.step.xp, self.step.kernels
        column = extreme.measure.column
        assert column is not None
        best = step.base(extreme.name)
        alone = yield from self._look(best)
        there = step.not_null(column)
        self.new = xp.arange(step.new, dtype=np.int64) if there is None else xp.flatnonzero(there[: step.new])
        by = column if self._by_value else extreme.order
        names = list(dict.fromkeys([column, *([] if by is None else [by])]))
        held = self._held(names)
        # of the new rows with a value
        fresh = {name: step.column(name).slice(0, step.new) for name in names}
        if there is not None:
            chosen = pa.array(kernels.asnumpy(self.new))
            fresh = {name: values.take(chosen) for name, values in fresh.items()}
        if by is None:
            codes = np.zeros(self.old.size, np.int64), np.zeros(self.new.size, np.int64)
        else:
            codes = order_codes_of(held[by], fresh[by])
        better = yield from self._better(alone, codes)
        if better is not None:
            self.new, rows = self.new[better], kernels.asnumpy(better)
            codes, chosen = (codes[0], codes[1][rows]), pa.array(rows)
            fresh = {name: values.take(chosen) for name, values in fresh.items()}
        self.codes = np.concatenate(codes)
        self.values = one_zero(_behind(held[column], fresh[column]))
        self.ordered = None if extreme.order is None else _behind(held[names[-1]], fresh[names[-1]])

    def _better(
        self, alone: Array, codes: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    ) -> Steps[Positions | None]:
        """New rows without those that are no better than a best row which stays; None for all.

        Those left out are never seen.
        """
        step = self.step
        held, own = (step.kernels.asarray(each) for each in codes)
        if not held.size or not own.size:
            return None
        group = self.line.event_group[: step.new]
        if own.size < step.new:
            group = group[self.new]
        base, function = held[self.base][group], self.extreme.measure.function
        than = {"min": operator.lt, "first": operator.lt, "max": operator.gt, "last": operator.ge}[function]
        better = than(own, base)
        better |= (~alone | (self.base < 0))[group]
        (kept,) = (yield Asked([Flagged(better, [0])])).rows
        return kept

    def _look(self, best: Array) -> Steps[Array]:
        """Find the rows that were there before and may be a best one; gives a mask of groups whose best one stays.

        Of these no other one is looked at.
        """
        step, xp = self.step, self.step.xp
        alone = xp.ones(best.size + 1, bool)  # the last one is of no group
        parts = []
        if step.kept is not None:
            killed, group = step.kept.lifetimes.killed, step.rows.group[step.new :]
            goes = best[group] == killed + 1
            alone[xp.where(goes, group, best.size)] = False
            parts = [Flagged(goes, [group]), Flagged(goes, [killed])]
        alone = alone[:-1]
        stays, *going = (yield Asked([Flagged((best > NO_ROW) & alone, [0]), *parts])).rows
        looks, gone = going or (best[:0], best[:0])
        self.old, self.old_group, self.staying = best[stays] - 1, stays, int(stays.size)
        self.base = xp.full(best.size, -1, np.int64)  # the candidate that each group had as its best
        self.base[stays] = xp.arange(stays.size, dtype=np.int64)
        if step.kept is None or not looks.size:
            return alone
        table, column = step.kept.table, self.extreme.measure.column
        assert column is not None
        frame = table.store.take(gone, table.source.schema.names, present=True)
        hashes = step.kernels.hash_rows(frame, table.keys, table.key_types)
        probe_row, found = self._rows_of(table, (looks, gone), Columns(frame, table.keys), hashes)
        valid = step.kernels.valid(table.store.take(found, [column], present=True), [column])
        if valid is not None:
            probe_row, found = (yield Asked([Flagged(valid, [probe_row]), Flagged(valid, [found])])).rows
        (was,) = (yield Asked([Flagged(found == gone[probe_row], [0])])).rows
        self.old, self.old_group = xp.concatenate([self.old, found]), xp.concatenate([stays, looks[probe_row]])
        self.base[looks[probe_row[was]]] = was + self.staying
        return alone

    def _rows_of(
        self, table: KeyedTable, going: tuple[Array, Slots], own: Columns, hashes: Hashes
    ) -> tuple[Array, Slots]:
        """The committed rows of groups whose best one goes, as far as they can be a best one: which group, and slots.

        All of small groups. Those of larger ones stand in an index in their order, once as many were looked at without
        it as it would have to be made of.

        Args:
            table: the input's rows.
            going: the groups, and their best rows.
            own: the columns of the groups.
            hashes: of these.
        """
        (looks, gone), xp = going, self.step.xp
        index, at_most = cast("OrderIndex", table.indexes[self.extreme.name]), most_candidates(table, int(looks.size))
        try:
            candidates = table.key_index.probe(hashes, staged=False, at_most=at_most)
        except TooMany:
            if index.pays(table.first_new, int(self.step.base("rows")[looks].sum())):
                by = self.extreme.measure.column if self._by_value else self.extreme.order
                ordered_by = [] if by is None else [by]
                order_rows(table, index, ordered_by, self._ranks, valued=self.extreme.measure.column)
                first = FirstRows(table, index, table.keys, table.key_types)
                # those that this micro-batch takes, and the first that stays: it may be as good as the one that goes
                found = layouts.pairs(*first.search(own, hashes, xp.ones(looks.size, np.int64)))
                best = layouts.pairs(xp.arange(looks.size, dtype=np.int64), gone)
                return layouts.unpaired(distinct(self.step.kernels, xp.concatenate([found, best])))
            candidates = table.key_index.probe(hashes, staged=False)
        first_new, status, keys = table.first_new, table.status.values, Columns(table.store, table.keys)
        return match(
            self.step.kernels,
            candidates,
            table.key_types,
            (own, keys),
            alive=lambda _, rows: (status[rows] != DEAD) & (rows < first_new),
        )

    def _ranks(self, values: pa.Table, slots: Slots) -> list[Array]:
        """The numbers that rows are sorted by, the best first: the order of the aggregate, then arrival."""
        ranks: list[Array] = [slots]
        if values.num_columns:
            ranks = [self.step.kernels.asarray(order_codes(one_array(values[0]))), slots]
        return [~rank for rank in ranks] if self._greatest else ranks

    def _held(self, names: list[str]) -> pa.Table:
        store, schema = self.extreme.table.store, self.extreme.table.source.schema
        frame = store.take(self.old, names, present=True)
        return self.step.kernels.to_arrow(frame, pa.schema([schema.field(name) for name in names]))

    def running(self) -> Steps[Running]:
        """At each moment: a number of the value, and which candidate has it."""
        step, xp, line = self.step, self.step.xp, self.line
        after = (yield from self._best_of_groups()) if line.net else self._best_of_moments()
        before = line.shifted(after, self.base)
        yield from self._keep(line.final(after))
        shown = step.kernels.asarray(self._numbers())

        def seen(candidate: Array) -> tuple[Array, Array, Array]:
            none = candidate < 0
            return xp.where(none, 0, shown[candidate]) if shown.size else candidate, none, candidate

        values = self.values

        def made(candidate: npt.NDArray[np.int64]) -> pa.Array:
            return values.take(pa.array(candidate, mask=candidate < 0))

        return Running(seen(before), seen(after), made, compared=2, first_made=2)

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

    def _best_of_groups(self) -> Steps[Array]:
        """Finds the best candidate of each group of a net change, which has one moment: two passes, no sort."""
        kernels, xp, size, first = self.step.kernels, self.step.xp, self.line.size, self.staying
        # a best one that stays is left only for a new row that is better
        best = xp.where(self.base < first, self.base, -1)
        group = xp.concatenate([self.old_group[first:], self.line.event_group[self.new]])
        codes, place = kernels.asarray(self.codes[first:]), xp.arange(first, self.codes.size, dtype=np.int64)
        if first < self.old.size:
            assert self.step.kept is not None
            dying = self.step.kept.table.status.values[self.old[first:]] == DYING
            goes = xp.concatenate([dying, xp.zeros(self.new.size, bool)])
            parts = [Flagged(None, [of_each], goes) for of_each in (group, codes, place)]
            group, codes, place = (yield Asked(parts)).rows
        keys = ((~codes if self._greatest else codes) ^ np.int64(np.iinfo(np.int64).min)).view(np.uint64)
        least_key = xp.full(size, _NOTHING, np.uint64)
        kernels.scatter_min(least_key, group, keys)
        # of equal ones the first that came, or the last
        last, equal = int(self.codes.size) - 1, keys == least_key[group]
        chosen = xp.full(size, _NOTHING, np.uint64)
        of_equal = [group, last - place if self._greatest else place]
        group, place = (yield Asked([Flagged(equal, [of_each]) for of_each in of_equal])).rows
        kernels.scatter_min(chosen, group, place.view(np.uint64))
        found = chosen.view(np.int64)
        return xp.where(chosen != _NOTHING, last - found if self._greatest else found, best)

    @property
    def _greatest(self) -> bool:
        return self.extreme.measure.function in ("max", "last")

    @property
    def _by_value(self) -> bool:
        return self.extreme.measure.function in ("min", "max")

    def _numbers(self) -> npt.NDArray[np.int64]:
        """Gives each candidate a number that is the same for equal values."""
        if self._by_value:
            return self.codes
        if pa.types.is_nested(self.values.type):
            return equal_codes(self.values)
        kinds: npt.NDArray[np.int64] = self.values.dictionary_encode().indices.to_numpy().astype(np.int64)
        return kinds

    def _spans(self) -> tuple[Positions, Positions]:
        """From which moment to which each candidate is there; of no net change."""
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
            if side.any_death:
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

    def _keep(self, last: Array) -> Steps[None]:
        """Note each group's best row."""
        step, xp, extreme = self.step, self.step.xp, self.extreme
        (changed,) = (yield Asked([Flagged(last != self.base, [0])])).rows
        last, size = last[changed], self.old.size
        known, is_new = last >= 0, last >= size
        if extreme.exclusive:
            rows = last[xp.flatnonzero(is_new)] - size
            frame = step.kernels.frame(self._rows(step.kernels.asnumpy(rows)))
            first = len(extreme.table)
            extreme.table.append(frame)
            slots = xp.zeros(last.size, np.int64)
            slots[is_new] = as_slots(step.kernels, first, int(rows.size))
            gone = self.base[changed]
            extreme.table.end(self.old[gone[xp.flatnonzero(gone >= 0)]])
        elif step.kept is None:
            slots = xp.zeros(last.size, np.int64)
        else:
            rows = xp.where(is_new, last - size, 0)
            new = self.new[rows] if self.new.size else rows
            slots = new + step.kept.lifetimes.first_new
        if size:
            slots = xp.where(is_new, slots, self.old[xp.where(is_new | ~known, 0, last)])
        step.groups.put(extreme.name, self.line.slots[changed], xp.where(known, slots + 1, NO_ROW))

    def _rows(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        schema = self.extreme.table.source.schema
        taken = pa.array(rows + int(self.old.size))
        columns = [column.take(taken) for column in (self.values, self.ordered) if column is not None][: len(schema)]
        return pa.Table.from_arrays(columns, schema=schema)


def _behind(held: pa.ChunkedArray, new: pa.Array) -> pa.Array:
    """Values one after the other."""
    return one_array(pa.chunked_array([*held.chunks, new], held.type))


def best_schema(measure: Measure, schema: pa.Schema, order: str | None) -> pa.Schema:
    """The columns of a table of best rows."""
    assert measure.column is not None
    names = [measure.column] if order in (None, measure.column) else [measure.column, order]
    return pa.schema([schema.field(name).with_nullable(True) for name in names])


@dataclasses.dataclass(frozen=True)
class OwnFunction:
    """An aggregate that a user's function makes.

    Attributes:
        measure: which.
        name: of the number beside a group.
        table: the states of groups.
        exclusive: that table has nothing else.
    """

    measure: Measure
    name: str
    table: ValueTable
    exclusive: bool = True

    @property
    def function(self) -> AggregateFunction:
        """The user's aggregate function."""
        assert self.measure.own is not None
        return self.measure.own

    def moved(self, step: AggregateStep) -> Running:
        """The aggregate at each moment."""
        line = step.line
        state = self._states(step)
        base = called(self.measure, "result", len(state), state)
        after, final = self._of_groups(step, state) if line.net else self._of_moments(step, state)
        found = called(self.measure, "result", len(after), after)
        values = one_zero(one_array(pa.chunked_array([*base.chunks, *found.chunks], base.type)))
        codes = equal_codes(values)
        values = values.take(pa.array(np.unique(codes, return_index=True)[1]))
        numbers = step.kernels.asarray(codes)
        of_base, of_after = numbers[: len(base)], numbers[len(base) :]
        if step.row.size:
            self._keep(step, final)
        before = of_base if line.net else line.shifted(of_after, of_base)
        return Running((before,), (of_after,), lambda number: values.take(pa.array(number)))

    def _states(self, step: AggregateStep) -> pa.Table:
        """The state of each group, as it was."""
        xp, schema = step.xp, self.function.state
        slots = step.base(self.name) - 1
        known = xp.flatnonzero(slots >= 0)
        held = step.kernels.to_arrow(self.table.store.take(slots[known], schema.names, present=True), schema)
        fresh = int(slots.size - known.size)
        made = pa.concat_tables([held, called(self.measure, "empty", fresh, fresh)])
        place = np.full(int(slots.size), -1, np.int64)
        there = step.kernels.asnumpy(known)
        place[there] = np.arange(there.size)
        place[place < 0] = np.arange(fresh) + there.size
        return made.take(pa.array(place))

    def _of_groups(self, step: AggregateStep, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        rows, groups, comes = self._events(step)
        final = self._applied(state, groups, rows, comes, step)
        return final, final

    def _of_moments(self, step: AggregateStep, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        """States after each moment, and those of each group in the end."""
        rows, groups, comes = self._events(step)
        asnumpy, line = step.kernels.asnumpy, step.line
        order, last = asnumpy(line.order), asnumpy(line.last)
        rows, groups, comes = rows[order], groups[order], comes[order]
        turn = np.arange(groups.size) - asnumpy(line.starts)[groups]
        by_turn = np.argsort(turn, kind="stable")
        ends = np.cumsum(np.bincount(turn)) if turn.size else np.empty(0, np.int64)
        parts, before, held = [], state, np.arange(len(state))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            now = by_turn[begin:end]  # a moment of each group that has so many
            before = before.take(pa.array(np.searchsorted(held, groups[now])))
            held = groups[now]
            before = self._applied(before, np.arange(held.size), rows[now], comes[now], step)
            parts.append(before)
        place = np.empty(by_turn.size, np.int64)
        place[by_turn] = np.arange(by_turn.size)
        after = pa.concat_tables([state.slice(0, 0), *parts]).take(pa.array(place))
        return after, after.take(pa.array(last))

    def _events(self, step: AggregateStep) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Lists each event's row, its group, and whether the row comes."""
        asnumpy = step.kernels.asnumpy
        rows = asnumpy(step.row)
        comes = np.ones(rows.size, bool) if step.sign is None else asnumpy(step.sign) > 0
        return rows, asnumpy(step.line.event_group), comes

    def _applied(
        self, state: pa.Table, groups: Ints, rows: Ints, comes: npt.NDArray[np.bool_], step: AggregateStep
    ) -> pa.Table:
        for method, mask in (("add", comes), ("retract", ~comes)):
            some = np.flatnonzero(mask)
            if some.size:
                taken = pa.array(rows[some])
                columns = [step.column(name).take(taken) for name in self.function.columns]
                values = pa.Table.from_arrays(columns, names=list(self.function.columns))
                state = called(self.measure, method, len(state), state, pa.array(groups[some]), values)
        return state

    def _keep(self, step: AggregateStep, final: pa.Table) -> None:
        """Note each group's state; of groups without rows there is none."""
        xp, kernels = step.xp, step.kernels
        rows = step.line.final(step.counted()[1])
        stays = xp.flatnonzero(rows > 0)
        old = step.base(self.name)
        self.table.end(old[xp.flatnonzero(old > NO_ROW)] - 1)
        first = len(self.table)
        self.table.append(kernels.frame(final.take(pa.array(kernels.asnumpy(stays)))))
        slots = xp.full(old.size, NO_ROW, np.int64)
        slots[stays] = as_slots(kernels, first, int(stays.size)) + 1
        step.keep(self.name, slots, old)


def called(measure: Measure, method: str, size: int, *given: Any) -> Any:
    """Calls a method of a user's function, and checks what it gives.

    Args:
        measure: the aggregate.
        method: the method's name.
        size: how many groups it is about.
        given: its arguments.

    Raises:
        DescriptionError: it failed, or gave something else than it has to.
    """
    function, what = measure.own, f"{measure}: {method}()"
    assert function is not None
    try:
        found = getattr(function, method)(*given)
    except GpuJoinError:
        raise
    except Exception as error:
        raise DescriptionError(f"{what} failed: {type(error).__name__}: {error}") from error
    wanted, kind = (pa.Array | pa.ChunkedArray, "an array") if method == "result" else (pa.Table, "a table")
    if not isinstance(found, wanted):
        raise DescriptionError(f"{what} gave {type(found).__name__}, it is {kind} of pyarrow")
    if len(found) != size:
        raise DescriptionError(f"{what} gave {len(found)} rows for {size} groups")
    try:
        if method == "result":
            chunked = found if isinstance(found, pa.ChunkedArray) else pa.chunked_array([found])
            return chunked.cast(function.result_type)
        return found.select(function.state.names).cast(function.state)
    except (pa.ArrowException, KeyError) as error:
        raise DescriptionError(f"{what} gave something else than was declared: {error}") from error
