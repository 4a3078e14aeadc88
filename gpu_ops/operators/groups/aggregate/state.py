"""All tables of an aggregate's state, as one: the input's rows, the groups, best rows and different values.

For another number of partitions the stored state is cut (`cut_groups`). Groups go where their rows go. What numbers
beside a group lead to goes with it, and these numbers follow: rows of the input, best rows and states by their position
in a table, different values by a number that a group has in its partition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Ints, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.core.key_table import KeyTable, ValueTable, forget_rows
from gpu_ops.operators.groups.aggregate.extremes import NO_ROW, Extreme, OwnFunction, renumbered
from gpu_ops.operators.groups.aggregate.sums import GROUP, GROUP_NUMBER, PART_OF_DOUBLES, with_parts
from gpu_ops.operators.operator import Cut, Parts, Targets
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.pieces import FromSnapshot, Storable
from gpu_ops.state.table import DEAD, LIVE, StateTable, put_behind


class Linked(NamedTuple):
    """The links between the tables of an aggregate: numbers in one that lead to rows of another.

    Attributes:
        groups: the name of the table of groups.
        own: how many columns of it are those of the group; behind them stand numbers.
        leads: by the place of such a number, the table to whose rows it leads, counted from 1; None for the input's.
        number: the place of the number that values know a group by; None for none.
        values: the tables of values, whose first column is that number.
    """

    groups: str
    own: int
    leads: Mapping[int, str | None]
    number: int | None
    values: Sequence[str]


def cut_groups(
    linked: Linked, parts: Parts, rows: tuple[Sequence[int], Targets], to: Callable[[pa.Table], Targets], count: int
) -> Cut:
    """The tables of each new partition, those of inputs left out.

    Args:
        linked: how they hang together.
        parts: of each old partition.
        rows: how many rows of the input each old partition has, and the new partition of each.
        to: gives the new partition of each row of a table with the group's columns.
        count: how many new partitions there are.
    """
    groups = _together([part[linked.groups] for part in parts], linked.own)
    target = to(groups.select(range(linked.own)))
    origin = _origin([len(part[linked.groups]) for part in parts])
    columns = list(groups.columns)
    made: Cut = [{} for _ in range(count)]
    for place, name in linked.leads.items():
        at = columns[place].to_numpy()
        known = at > 0
        if name is None:
            sizes, where = rows[0], rows[1]
        else:
            tables = [part[name] for part in parts]
            sizes = [len(table) for table in tables]
            where = np.full(sum(sizes), -1, np.int64)
        found = np.where(known, _begins(sizes)[origin] + at - 1, -1) if origin.size else at
        if name is not None:
            where[found[known]] = target[known]
            _divide(made, name, pa.concat_tables(tables), where)
        new = _places(where) + 1
        columns[place] = pa.chunked_array(
            [pa.array(np.where(known, new[np.where(known, found, 0)], 0) if new.size else at)]
        )
    if linked.number is not None:
        old, new = columns[linked.number].to_numpy(), _places(target) + 1
        columns[linked.number] = pa.chunked_array([pa.array(new)])
        most = int(old.max(initial=0)) + 1
        group = np.full(most * len(parts), -1, np.int64)
        group[origin * most + old] = np.arange(old.size)
        for name in linked.values:
            tables = [part[name] for part in parts]
            whole = pa.concat_tables(tables)
            of = group[_origin([len(table) for table in tables]) * most + whole.column(0).to_numpy()]
            whole = whole.set_column(0, whole.field(0), pa.chunked_array([pa.array(new[of])]))
            _divide(made, name, whole, target[of])
    _divide(made, linked.groups, pa.table(columns, schema=groups.schema), target)
    return made


def _together(tables: list[pa.Table], own: int) -> pa.Table:
    """Groups of all partitions; a number that not all of them have beside groups is 0 elsewhere."""
    names = list(dict.fromkeys(name for table in tables for name in table.column_names[own:]))
    found = []
    for table in tables:
        behind = dict(zip(table.column_names[own:], table.columns[own:], strict=True))
        zeros = pa.array(np.zeros(len(table), np.int64))
        found.append(put_behind(table.select(range(own)), {name: behind.get(name, zeros) for name in names}))
    return pa.concat_tables(found)


def _divide(made: Cut, name: str, whole: pa.Table, target: Targets) -> None:
    for partition, tables in enumerate(made):
        tables[name] = whole.take(pa.array(np.flatnonzero(target == partition)))


def _begins(sizes: Sequence[int]) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[:-1]


def _origin(sizes: Sequence[int]) -> Ints:
    return np.repeat(np.arange(len(sizes)), sizes)


def _places(target: Targets) -> Ints:
    """The place of each row among those of its new partition."""
    order = np.argsort(target, kind="stable")
    sorted_, places = target[order], np.empty(order.size, np.int64)
    places[order] = np.arange(order.size) - np.searchsorted(sorted_, sorted_)
    return places


_ALL = "all"


def group_table(kernels: Kernels, source: Input, by: Sequence[str], columns: Mapping[str, npt.DTypeLike]) -> KeyTable:
    """The groups of an input's rows, with numbers beside them; one group without group columns."""
    schema = pa.schema([source.schema.field(column) for column in by] or [(_ALL, pa.int8())])
    return KeyTable(kernels, schema, columns, source.name, ttl_ms=source.ttl_ms)


def one_key(kernels: Kernels, rows: int) -> Frame:
    """The key of the one group that there is without group columns, of some rows."""
    return kernels.frame(pa.table({_ALL: pa.array(np.zeros(rows, np.int8))}))


def _among_left(rows: StateTable, best: Ints) -> Ints:
    """Numbers the rows that groups lead to anew, in a table without its dead rows, like a snapshot's."""
    status = rows.kernels.asnumpy(rows.status.values)
    return np.concatenate([[NO_ROW], np.cumsum(status != DEAD)])[best]


class GroupState:
    """The state of an aggregate, or of first rows.

    Args:
        source: the input.
        groups: the groups.
        rows: the input's rows; None where they are not kept.
        parts: further tables, by name.
        extremes: aggregates whose best rows groups lead to.

    Attributes:
        main: the input's rows where they are kept, else the groups; all other tables are attached to it.
    """

    def __init__(
        self,
        source: Input,
        groups: KeyTable,
        rows: KeyedTable | None,
        parts: Mapping[str, StateTable],
        extremes: Sequence[Extreme | OwnFunction],
    ) -> None:
        self._source, self._groups, self._rows, self._extremes = source, groups, rows, extremes
        self._values = [table for table in parts.values() if isinstance(table, KeyTable)]
        self._named = {f"{name} of {source.name}": table for name, table in {"groups": groups, **parts}.items()}
        self.main: StateTable = groups if rows is None else rows
        self.main.attached += [*([] if rows is None else [groups]), *parts.values()]
        for table in {id(extreme.table): extreme.table for extreme in extremes}.values():
            table.follow = lambda new_slots, table=table: self._follow(table, new_slots)
        for extreme in extremes:
            groups.as_stored[extreme.name] = functools.partial(_among_left, extreme.table)

    def _follow(self, table: StateTable, new_slots: Slots) -> None:
        """Moves what groups lead to in a table to its new slots, after its compaction."""
        numbers = [self._groups.beside[e.name].values for e in self._extremes if e.table is table]
        found = [renumbered(best, new_slots, self._groups.kernels.xp) for best in numbers]
        for best, new in zip(numbers, found, strict=True):  # from here on nothing is allocated
            best[:] = new

    def forget(self, slots: Slots) -> int:
        """Drops groups and all that is kept for them, before the micro-batch's changes; gives how many rows."""
        groups, gone = self._groups, 0
        kernels, xp = groups.kernels, groups.kernels.xp
        if not slots.size:
            return 0
        if self._rows is not None:
            gone = forget_rows(self._rows, groups.store.take(slots, groups.source.schema.names, present=True))
        for extreme in self._extremes:
            if extreme.exclusive:
                best = groups.beside[extreme.name].values[slots]
                extreme.table.move(best[xp.flatnonzero(best > NO_ROW)] - 1, LIVE, DEAD)
        for table in self._values:
            numbers = kernels.asnumpy(groups.beside[GROUP_NUMBER].values[slots])
            found = table.of_first(kernels.frame(pa.table({GROUP: pa.array(numbers)})))
            table.move(found, LIVE, DEAD)
        groups.move(slots, LIVE, DEAD)
        return gone

    # --- the stored form ---------------------------------------------------------------------

    def kept(self) -> dict[str, Storable]:
        """All tables, by name."""
        rows = self._source.schema.empty_table() if self._rows is None else self._rows
        return {self._source.name: rows, **self._named}

    def cut(self, parts: Parts, targets: Sequence[Targets], to: Callable[[pa.Table], Targets], count: int) -> Cut:
        """All tables but the input's, for other partitions; see `gpu_ops.operators.operator.Operator.cut`."""
        groups, own = self._groups, len(self._groups.source.schema)
        places = {name: place for place, name in enumerate(groups.beside, start=own)}
        tables = {id(table): name for name, table in self._named.items()}
        leads = {places[e.name]: tables[id(e.table)] if e.exclusive else None for e in self._extremes}
        values = [tables[id(table)] for table in self._values]
        linked = Linked(tables[id(groups)], own, leads, places.get(GROUP_NUMBER), values)
        sizes = [own.size for own in targets]
        return cut_groups(linked, parts, (sizes, np.concatenate(targets)), to, count)

    def restore(self, state: Mapping[str, FromSnapshot], settle: Callable[[], None]) -> None:
        """Fills the empty tables from a snapshot.

        Raises:
            StateError: a table is missing.
        """
        named: dict[str, StateTable] = {**self._named}
        if self._rows is not None:
            named[self._source.name] = self._rows
        missing = sorted(named.keys() - state.keys())
        if missing:
            raise StateError(f"the snapshot lacks {', '.join(missing)}")
        groups, own = next(iter(self._named)), len(self._groups.source.schema)
        stored = state[groups]
        state = {**state, groups: with_parts(stored, own) if isinstance(stored, pa.Table) else stored}
        more = state[groups].column_names[own:]
        self._groups.have(name for name in more if name.startswith(PART_OF_DOUBLES))
        for name, table in named.items():
            assert isinstance(table, KeyTable | ValueTable | KeyedTable)
            table.restore(state[name], settle)
