"""All tables of an aggregate's state, as one: the input's rows, the groups, best rows and different values.

Numbers beside a group lead to rows of the others: rows of the input, best rows and states by their position in a table,
different values by a number that a group has in its partition. `gpu_ops.operators.groups.aggregate.repartition` has the
stored state for another number of partitions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Ints, Slots
from gpu_ops.descriptions.inputs import Input
from gpu_ops.errors import StateError
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.core.key_table import KeyTable, ValueTable, forget_rows
from gpu_ops.operators.groups.aggregate.extremes import NO_ROW, Extreme, OwnFunction, renumbered
from gpu_ops.operators.groups.aggregate.repartition import Links, MovingRows, repartitioned
from gpu_ops.operators.groups.aggregate.sums import GROUP, GROUP_NUMBER, PART_OF_DOUBLES, with_parts
from gpu_ops.operators.operator import Cut, Parts, Targets
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.pieces import FromSnapshot, Storable
from gpu_ops.state.table import DEAD, LIVE, StateTable

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
        groups, key_columns = self._groups, len(self._groups.source.schema)
        places = {name: place for place, name in enumerate(groups.beside, start=key_columns)}
        tables = {id(table): name for name, table in self._named.items()}
        linked = {places[e.name]: tables[id(e.table)] if e.exclusive else None for e in self._extremes}
        values = [tables[id(table)] for table in self._values]
        links = Links(tables[id(groups)], key_columns, linked, places.get(GROUP_NUMBER), values)
        input_rows = MovingRows([of_part.size for of_part in targets], np.concatenate(targets))
        return repartitioned(links, parts, input_rows, to, count)

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
