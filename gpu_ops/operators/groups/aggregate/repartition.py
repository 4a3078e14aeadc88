"""The stored state of an aggregate for another number of partitions: groups move with their rows, links are renumbered.

A link is a number beside a group: it counts a row of another table of the same partition, from 1 on, and is 0 for none.
So a link changes with the rows' new partitions. All old partitions' rows of a table are taken one after the other; with
two groups in partition 0 and one in partition 1, whose best rows lie in a table of 2 + 3 rows:

    groups             a   b   c        rows of the table  p0 p1 | q0 q1 q2
    old partition      0   0   1
    link               2   0   3
    position of it     1   -   4        what a link counts, among all rows
    new partition      1   0   1        of the table's     -  1  | -  -  1     with their groups; p0, q0, q1 are dropped
    new link           1   0   2        of the table's     -  1  | -  -  2     their places in new partition 1

Values that are not rows of a group (different values) know it by a number that it has in its partition, instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Ints
from gpu_ops.operators.operator import Cut, Parts, Targets
from gpu_ops.state.table import put_behind

DROPPED = -1
"""The new partition of a row that no group leads to."""


class Links(NamedTuple):
    """The links from the groups of an aggregate to its other tables.

    Attributes:
        groups: the name of the table of groups.
        key_columns: how many of its columns, the first ones, are those of the group; behind them stand numbers.
        tables: by the place of a column of links, the table whose rows it counts; None for the input's.
        number: the place of the number that values know a group by; None for none.
        values: the names of the tables of values, whose first column is that number.
    """

    groups: str
    key_columns: int
    tables: Mapping[int, str | None]
    number: int | None
    values: Sequence[str]


class MovingRows:
    """The rows that all old partitions have of a table, one after the other, on their way to new partitions.

    Args:
        sizes: how many rows each old partition has.
        targets: the new partition of each row, or `DROPPED`.
    """

    def __init__(self, sizes: Sequence[int], targets: Targets) -> None:
        self.targets = targets
        self.partition = np.repeat(np.arange(len(sizes)), sizes)
        """The old partition of each row."""
        self._begins = np.cumsum([0, *sizes])

    @functools.cached_property
    def new_numbers(self) -> Ints:
        """The place of each row among those of its new partition, from 1 on."""
        order = np.argsort(self.targets, kind="stable")
        in_order, numbers = self.targets[order], np.empty(order.size, np.int64)
        numbers[order] = np.arange(order.size) - np.searchsorted(in_order, in_order) + 1
        return numbers

    def positions(self, partition: Ints, links: Ints) -> Ints:
        """The positions among all rows of those that n links, of n old partitions, count."""
        return self._begins[partition] + links - 1

    def renumbered(self, partition: Ints, links: Ints) -> Ints:
        """N links, of n old partitions, as links of the new ones."""
        linked, new = links > 0, np.zeros(links.size, np.int64)
        new[linked] = self.new_numbers[self.positions(partition[linked], links[linked])]
        return new


def repartitioned(
    links: Links, parts: Parts, input_rows: MovingRows, to: Callable[[pa.Table], Targets], count: int
) -> Cut:
    """The tables of each new partition, those of inputs left out.

    Args:
        links: how the tables hang together.
        parts: the tables of each old partition.
        input_rows: where the rows of the input go.
        to: gives the new partition of each row of a table with the group's columns.
        count: how many new partitions there are.
    """
    stored = _all_groups([part[links.groups] for part in parts], links.key_columns)
    groups = MovingRows([len(part[links.groups]) for part in parts], to(stored.select(range(links.key_columns))))
    columns: list[Any] = list(stored.columns)
    divided: dict[str, list[pa.Table]] = {}
    for place, name in links.tables.items():
        old, rows = columns[place].to_numpy(), input_rows
        if name is not None:
            tables = [part[name] for part in parts]
            rows = _with_groups(groups, old, [len(table) for table in tables])
            divided[name] = _divided(pa.concat_tables(tables), rows.targets, count)
        columns[place] = pa.array(rows.renumbered(groups.partition, old))
    if links.number is not None:
        old = columns[links.number].to_numpy()
        for name, whole, targets in _values(links, parts, groups, old):
            divided[name] = _divided(whole, targets, count)
        columns[links.number] = pa.array(groups.new_numbers)
    divided[links.groups] = _divided(pa.table(columns, schema=stored.schema), groups.targets, count)
    return [{name: tables[partition] for name, tables in divided.items()} for partition in range(count)]


def _all_groups(tables: Sequence[pa.Table], key_columns: int) -> pa.Table:
    """The groups of all partitions; a number that not all of them have beside groups is 0 elsewhere."""
    names = list(dict.fromkeys(name for table in tables for name in table.column_names[key_columns:]))
    alike = []
    for table in tables:
        numbers = dict(zip(table.column_names[key_columns:], table.columns[key_columns:], strict=True))
        zeros = pa.array(np.zeros(len(table), np.int64))
        alike.append(put_behind(table.select(range(key_columns)), {name: numbers.get(name, zeros) for name in names}))
    return pa.concat_tables(alike)


def _with_groups(groups: MovingRows, links: Ints, sizes: Sequence[int]) -> MovingRows:
    """The rows of a table of which each belongs to the one group that leads to it, and goes where that goes."""
    rows, linked = MovingRows(sizes, np.full(sum(sizes), DROPPED, np.int64)), links > 0
    rows.targets[rows.positions(groups.partition[linked], links[linked])] = groups.targets[linked]
    return rows


def _values(links: Links, parts: Parts, groups: MovingRows, numbers: Ints) -> Iterator[tuple[str, pa.Table, Targets]]:
    """The tables of values: name, all rows with the new numbers of their groups, and the new partition of each row.

    Args:
        links: how the tables hang together.
        parts: the tables of each old partition.
        groups: where the groups go.
        numbers: the number that each group has in its old partition.
    """
    width = int(numbers.max(initial=0)) + 1
    position = np.full(width * len(parts), -1, np.int64)
    position[groups.partition * width + numbers] = np.arange(numbers.size)
    for name in links.values:
        tables = [part[name] for part in parts]
        whole, partition = pa.concat_tables(tables), np.repeat(np.arange(len(parts)), [len(table) for table in tables])
        group = position[partition * width + whole.column(0).to_numpy()]
        new = pa.array(groups.new_numbers[group])
        yield name, whole.set_column(0, whole.field(0), new), groups.targets[group]


def _divided(whole: pa.Table, targets: Targets, count: int) -> list[pa.Table]:
    """The rows of each new partition, in their order."""
    return [whole.take(pa.array(np.flatnonzero(targets == partition))) for partition in range(count)]
