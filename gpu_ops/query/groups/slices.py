"""Windows of time in GROUP BY, and their aggregates in two phases: by slices in tasks of a source, then by windows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from gpu_ops.query import errors
from gpu_ops.query.catalyst import arrow_type_of, id_of, items
from gpu_ops.query.expressions import Column, Expr, TimeWindow
from gpu_ops.query.groups.relations import AggregateOf, Call, LocalAggregateOf, OfGroups
from gpu_ops.query.relations import Compute, Expand, JoinOf, Relation, RowByRow, Scan, origin
from gpu_ops.query.scope import Scope

_MERGED: Final = {"count": "sum", "sum": "sum", "min": "min", "max": "max"}
"""By an aggregate function the one that makes a window's value of those of its slices."""


def in_two_phases(relation: Relation) -> Relation:
    """A query in which windows over rows that are never taken back are aggregated in two phases, where they can be."""
    if isinstance(relation, JoinOf):
        left, right = in_two_phases(relation.left), in_two_phases(relation.right)
        same = left is relation.left and right is relation.right
        return relation if same else dataclasses.replace(relation, left=left, right=right)
    if isinstance(relation, AggregateOf):
        made = _two_phases(relation)
        if made is not None:
            return made
    if isinstance(relation, RowByRow | OfGroups):
        below = in_two_phases(relation.below)
        return relation if below is relation.below else dataclasses.replace(relation, below=below)
    return relation


def _two_phases(aggregate: AggregateOf) -> AggregateOf | None:
    """An aggregate over slices; None where it is no aggregate of windows, or cannot be one."""
    if not _only_inserts(aggregate.below) or not all(map(_mergeable, aggregate.calls)):
        return None
    computed: dict[Column, Expr] = {}
    below = aggregate.below
    while isinstance(below, Compute | Expand):
        computed |= below.computed if isinstance(below, Compute) else {below.column: below.value}
        below = below.below
    ends = {column: end for column in aggregate.by if (end := _end_of_window(column, computed)) is not None}
    windows = {end.window for end in ends.values()}
    if len(windows) != 1:
        return None
    (window,) = windows
    looked_at = [column for column in aggregate.by if column not in ends]
    if (
        window.time is None
        or window.size % window.slide
        or any(pa.types.is_nested(column.type) for column in looked_at)
    ):
        return None
    looked_at += [call.of for call in aggregate.calls if call.of is not None]
    own = {column: computed[column] for column in looked_at if column in computed}
    needed = {window.time, *(column for column in looked_at if column not in own)}
    needed.update(column for expr in own.values() for column in expr.columns)
    if not needed <= below.columns:
        return None
    calls = tuple(
        Call(Column(f"local_{call.column.label}", "", lambda call=call: call.column.type), call.function, call.of)  # type: ignore[misc]
        for call in aggregate.calls
    )
    rows = Compute(below, own, below.shown) if own else below
    places = {column: end.place for column, end in ends.items()}
    local = LocalAggregateOf(rows, aggregate.by, aggregate.java, calls, window=window, time=window.time, places=places)
    merged = (
        Call(call.column, _MERGED[call.function], first.column)
        for call, first in zip(aggregate.calls, calls, strict=True)
    )
    return dataclasses.replace(aggregate, below=local, calls=tuple(merged))


def _only_inserts(relation: Relation) -> bool:
    """Whether it is an input that may come in any order, and of which nothing is ever taken back or forgotten."""
    scan = origin(relation)
    if not isinstance(scan, Scan):
        return False
    table = scan.table
    return table.insert_only and table.row_kind is None and table.sequence_by is None and table.ttl_ms is None


def _mergeable(call: Call) -> bool:
    """Whether a window's value follows from those of its slices, to the bit."""
    if call.function == "count":
        return True
    kind = None if call.of is None else call.of.type
    if call.function == "sum":
        return bool(pa.types.is_integer(kind))
    ordered = pa.types.is_integer(kind) or pa.types.is_decimal128(kind) or pa.types.is_temporal(kind)
    return call.function in _MERGED and bool(ordered)


class _EndOfWindow(NamedTuple):
    """A window, and which of its ends: 0 for its start, 1 for its end."""

    window: TimeWindow
    place: int


def _end_of_window(column: Column, computed: Mapping[Column, Expr]) -> _EndOfWindow | None:
    """The window that a column is an end of; None for any other."""
    expr = computed.get(column)
    if expr is None or expr.kind != "GetStructField":
        return None
    whole: Expr | None = expr.args[0]
    while whole is not None and whole.column is not None:
        whole = computed.get(whole.column)
    window = None if whole is None else whole.window
    return None if window is None else _EndOfWindow(window, int(expr.tree.fields["ordinal"]))


_WINDOW: Final = "spark.timeWindow"
"""Key of the metadata that Catalyst gives a column of windows."""


def expanded(scope: Scope, node: Any, below: Relation) -> Relation:
    """An Expand of Catalyst's, of sliding windows, as a relation.

    Args:
        scope: of the query; it gets to know the column of the windows.
        node: Catalyst's.
        below: the rows.

    Raises:
        SqlError: grouping sets and the like.
    """
    output = items(node.output())
    windows = [number for number, attribute in enumerate(output) if bool(attribute.metadata().contains(_WINDOW))]
    if len(windows) != 1:
        scope.fail(errors.NODES["Expand"], node)
    ((place,), found) = windows, output[windows[0]]
    value = scope.catalyst.exploded([projection.apply(place) for projection in items(node.projections())])
    column = Column(str(found.name()), "", functools.partial(arrow_type_of, found), nullable=False)
    scope.columns[id_of(found)] = column
    shown = (id_of(attribute) for attribute in output)
    ids = {number: scope.columns[number] for number in shown}
    return Expand(below, column, scope.expr(value), ids, node)
