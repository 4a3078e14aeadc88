"""The order of columns in which a query's tables were read when its state folder was begun.

Operators store the columns that a query needs in the order in which its tables had them. A table may give them in
another order later, as one whose columns are taken from files does.
"""

from __future__ import annotations

import dataclasses
import graphlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

from pyspark.sql import DataFrame

from gpu_ops.descriptions.kinds import from_json
from gpu_ops.query.nodes import Calc, JoinNode, Plan
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.static import is_stream
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.plan.stored_query import folders_of
from gpu_ops.spark_types import named_column
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def as_stored(planned: Plan, streams: Mapping[str, Stream], state: StateAddress) -> dict[str, Stream]:
    """The tables of a query with their columns in the order of its state folder; only those that have another one.

    Args:
        planned: the query over the tables as they are.
        streams: the tables by name.
        state: the query's state folder, which may be empty yet.
    """
    orders: dict[str, list[list[str]]] = {}
    for part in planned.parts:
        own = set(map(id, part.joins))
        folders = [(node, folder) for node, folder in folders_of(planned, state) if id(node) in own]
        for node, its_folder in [*folders, *((node, folders[-1][1]) for node, _ in folders[:-1])]:
            manifest = Manifest.read(Files.at(its_folder))
            stored = () if manifest is None else from_json(manifest.description).inputs
            for table, labels, present in _tables(node):
                for source in stored:
                    names = source.schema.names
                    if source.name == present.name and set(names) == set(present.names) and names != present.names:
                        orders.setdefault(table, []).append([labels[name] for name in names if name in labels])
    return {
        table: dataclasses.replace(streams[table], df=_reordered(streams[table].df, found))
        for table, found in orders.items()
        if is_stream(streams[table])
    }


@dataclasses.dataclass(frozen=True)
class _Present:
    """An operator's input as it is planned: its name, and its columns."""

    name: str
    names: list[str]


def _tables(node: JoinNode) -> Iterator[tuple[str, dict[str, str], _Present]]:
    """The inputs of an operator that are tables of the query: the table, and its columns by their names above."""
    for below, source in zip(node.inputs, node.description.inputs, strict=True):
        scan = below.input if isinstance(below, Calc) else below
        if not isinstance(scan, Scan):
            continue
        labels = {name: name for name in source.schema.names}
        if isinstance(below, Calc):
            labels = {x.name: x.column for x in below.select if x.column is not None}
        yield scan.table.name, labels, _Present(source.name, source.schema.names)


def _reordered(df: DataFrame, orders: Sequence[Sequence[str]]) -> DataFrame:
    """A table with some columns in given orders, at the places that these have; the others stay."""
    before = graphlib.TopologicalSorter[str]()
    for order in orders:
        for first, then in itertools.pairwise(order):
            before.add(then, first)
    try:
        sequence = iter(list(before.static_order()))
    except graphlib.CycleError:  # the folder is of no such query, and says so
        return df
    moved = {name for order in orders if len(order) > 1 for name in order}
    return df.select(*(named_column(next(sequence) if name in moved else name) for name in df.columns))
