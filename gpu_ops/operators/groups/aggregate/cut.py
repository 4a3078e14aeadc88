"""An aggregate's stored state as that of another number of partitions.

Groups go where their rows go. What numbers beside a group lead to goes with it, and these numbers follow: rows of the
input, best rows and states by their position in a table, different values by a number that a group has in its
partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.operators.operator import Cut, Parts, Targets
from gpu_ops.state.columns import put_behind

Ints = npt.NDArray[np.int64]


class Linked(NamedTuple):
    """How the tables of an aggregate hang together.

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
