"""What is done to a query's relations before operators are chosen.

Filters that cannot stand below a join are lifted; windows over inserts are aggregated in two phases; what the query has
several times is found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from gpu_ops.descriptions.aggregate import Function
from gpu_ops.query import relations
from gpu_ops.query.expressions import Expr, QueryColumn, TimeWindow, Tree, number_of
from gpu_ops.query.scope import Scope

# --- inputs whose rows are replaced -----------------------------------------------------------------


def lifted(relation: relations.Relation, *, versions: bool = False) -> tuple[relations.Relation, list[Expr]]:
    """A relation without filters on an input whose rows are replaced by their unique key alone.

    The row before, which passed the filter, would stay. So the filter becomes part of the join's condition, or
    stands above the join; where neither can be, the row before is taken back first, below the filter.

    Args:
        relation: the relation.
        versions: whether it is the versions of a temporal join. A row that is not let through ends what was valid,
            which only the join knows: so no changelog is filtered there.

    Returns:
        The relation, and the conditions that have to be met above it, or in the join above it.
    """
    if isinstance(relation, relations.Filter):
        below, over = lifted(relation.below, versions=versions)
        if upserted(below) or (versions and _changes(below)):
            return below, [*over, *relation.conditions]
        return relations.filtered(below, [*over, *relation.conditions]), []
    if isinstance(relation, relations.Expand | relations.OfGroups):
        below, over = lifted(relation.below)
        taken_back = over or (isinstance(relation, relations.Expand) and upserted(below))
        return relation.over(normalized(relation.below, relation.java) if taken_back else below), []
    if isinstance(relation, relations.Compute):
        below, over = lifted(relation.below, versions=versions)
        return relation.over(below), over
    if isinstance(relation, relations.UnionOf):
        parts = [(part, *lifted(part)) for part in relation.parts]  # upserts of one say nothing of the rows of others
        made = (normalized(part, relation.java) if over or upserted(below) else below for part, below, over in parts)
        return relation.over(*made), []
    if not isinstance(relation, relations.JoinOf):
        return relation, []
    temporal = relation.by_time is not None and relation.by_time.kind == "temporal"
    left, left_over = lifted(relation.left)
    right, right_over = lifted(relation.right, versions=temporal)
    if relation.how == "full":
        left = normalized(relation.left, relation.java) if left_over else left
        right = normalized(relation.right, relation.java) if right_over else right
        return relation.over(left, right), []
    on, above = [*relation.on, *left_over, *right_over], list[Expr]()
    if relation.how in ("left", "semi", "anti") or relation.by_time is not None:
        on, above = [*relation.on, *right_over], left_over
    elif relation.how == "right":
        on, above = [*relation.on, *left_over], right_over
    return relations.filtered(dataclasses.replace(relation, left=left, right=right, on=tuple(on)), above), []


def upserted(relation: relations.Relation) -> bool:
    """True for an input whose rows are replaced without being taken back; joins always take back."""
    while isinstance(relation, relations.Filter | relations.Compute):
        relation = relation.below
    return isinstance(relation, relations.Scan) and relation.table.upserts


def _changes(relation: relations.Relation) -> bool:
    """True for an input whose rows may be taken back or replaced."""
    scan = relations.origin(relation)
    return isinstance(scan, relations.Scan) and not scan.table.insert_only


def normalized(relation: relations.Relation, java: Any) -> relations.Relation:
    """A filtered input that brings upserts, with the old row of each below its filters."""
    if isinstance(relation, relations.RowByRow):
        return relation.over(normalized(relation.below, java))
    assert isinstance(relation, relations.Scan)
    return relations.LatestOf(relation, tuple(relation.column(key) for key in relation.table.unique_key or ()), java)


# --- unions of streams with a watermark each ------------------------------------------------------------


def with_numbers(
    scope: Scope, relation: relations.Relation, numbers: Iterator[int]
) -> tuple[relations.Relation, QueryColumn]:
    """A union, filtered and projected, with a further column: the number of the part that a row is of.

    Args:
        scope: of the query.
        relation: the union.
        numbers: gives each part its number; one that is a union has none, but its parts.

    Returns:
        The union, and the column.
    """
    column = QueryColumn("part_of_union", "", pa.int32, nullable=False)
    if isinstance(relation, relations.RowByRow):
        below, column = with_numbers(scope, relation.below, numbers)
        return relation.over(below), column
    if isinstance(relation, relations.UnionOf):
        parts, columns = zip(*(with_numbers(scope, part, numbers) for part in relation.parts), strict=True)
        return dataclasses.replace(relation, parts=parts, of_parts={**relation.of_parts, column: columns}), column
    number = scope.expr(scope.catalyst.number(next(numbers)))
    return relations.Compute(relation, {column: number}, relation.shown), column


# --- windows in two phases ------------------------------------------------------------------------

_MERGED: Final[dict[str, Function]] = {"count": "sum", "sum": "sum", "min": "min", "max": "max"}
"""By an aggregate function the one that makes a window's value of those of its slices."""


def in_two_phases(relation: relations.Relation) -> relations.Relation:
    """A query in which windows over rows that are never taken back are aggregated in two phases, where they can be."""
    sessions = isinstance(relation, relations.SessionsOf)
    merged = _two_phases(relation) if isinstance(relation, relations.AggregateOf) and not sessions else None
    return merged or relation.over(*map(in_two_phases, relation.inputs))


def _two_phases(aggregate: relations.AggregateOf) -> relations.AggregateOf | None:
    """An aggregate over slices; None where it is no aggregate of windows, or cannot be one."""
    if not _only_inserts(aggregate.below) or not all(map(_mergeable, aggregate.calls)):
        return None
    computed: dict[QueryColumn, Expr] = {}
    below = aggregate.below
    while isinstance(below, relations.Compute):
        computed |= below.computed
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
    looked_at_computed = {column: computed[column] for column in looked_at if column in computed}
    needed = {window.time, *(column for column in looked_at if column not in looked_at_computed)}
    needed.update(column for expr in looked_at_computed.values() for column in expr.columns)
    if not needed <= below.columns:
        return None
    calls = tuple(map(_of_slices, aggregate.calls))
    rows = relations.Compute(below, looked_at_computed, below.shown) if looked_at_computed else below
    places = {column: end.place for column, end in ends.items()}
    local = relations.LocalAggregateOf(
        rows, aggregate.by, aggregate.java, calls, window=window, time=window.time, places=places
    )
    merged = (
        relations.AggregateCall(call.column, _MERGED[call.function], first.column)
        for call, first in zip(aggregate.calls, calls, strict=True)
    )
    return dataclasses.replace(aggregate, below=local, calls=tuple(merged))


def with_ends(relation: relations.Relation) -> relations.Relation:
    """A query whose aggregates know the ends of windows among their group columns that are made below them."""
    relation = relation.over(*map(with_ends, relation.inputs))
    if not isinstance(relation, relations.AggregateOf) or relation.ends:
        return relation
    computed: dict[QueryColumn, Expr] = {}
    below = relation.below
    while isinstance(below, relations.RowByRow):
        computed |= below.computed if isinstance(below, relations.Compute) else {}
        below = below.below
    ends = [(column, end) for column in relation.by if (end := _end_of_window(column, computed)) is not None]
    closing = tuple(column for column, end in ends if end.place == 1 and end.window.time is not None)
    return dataclasses.replace(relation, ends=closing) if closing else relation


def _of_slices(call: relations.AggregateCall) -> relations.AggregateCall:
    """A call of an aggregate function over the rows of a slice."""
    words = functools.partial(str, call.column)
    column = QueryColumn(f"local_{call.column.label}", "", lambda: call.column.type, words=words)
    return dataclasses.replace(call, column=column)


def _only_inserts(relation: relations.Relation) -> bool:
    """True for an input that may come in any order, and of which nothing is ever taken back or forgotten."""
    scan = relations.origin(relation)
    if not isinstance(scan, relations.Scan):
        return False
    table = scan.table
    return table.insert_only and table.row_kind is None and table.sequence_by is None and table.ttl_ms is None


def _mergeable(call: relations.AggregateCall) -> bool:
    """True if a window's value follows from those of its slices, to the bit."""
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


def _end_of_window(column: QueryColumn, computed: Mapping[QueryColumn, Expr]) -> _EndOfWindow | None:
    """The window that a column is an end of; None for any other."""
    expr = computed.get(column)
    if expr is None or expr.kind != "GetStructField":
        return None
    whole: Expr | None = expr.args[0]
    while whole is not None and whole.column is not None:
        whole = computed.get(whole.column)
    window = None if whole is None else whole.window
    return None if window is None else _EndOfWindow(window, int(expr.tree.fields["ordinal"]))


# --- what is there several times -------------------------------------------------------------------
# Flink: ``table.optimizer.reuse-sub-plan-enabled``. Rows, and the columns in them, get numbers, equal where they are
# made in the same way of the same inputs (value numbering).

_CALLS: Final = ("UDF", "ApplyFunctionExpression", "Invoke", "NewInstance")
"""Nothing tells which functions they call."""


class Same(NamedTuple):
    """A relation that a query has already.

    Attributes:
        first: that one.
        columns: by column of the relation the first one's.
    """

    first: relations.Relation
    columns: Mapping[QueryColumn, QueryColumn]


def repeated(root: relations.Relation) -> dict[relations.Relation, Same]:
    """The joins, aggregates and top-Ns of a query that it has before, the largest alone; those inside are not there.

    Args:
        root: the query.
    """
    numbers = _ValueNumbers()
    numbers.rows(root)
    first: dict[int, relations.Relation] = {}
    repeats: dict[relations.Relation, Same] = {}
    waiting = [root]
    while waiting:
        relation = waiting.pop()
        if isinstance(relation, relations.JoinOf | relations.OfGroups) and not isinstance(
            relation, relations.LocalAggregateOf
        ):
            number, columns = numbers.of_relations[relation]
            other = first.setdefault(number, relation)
            named = {of: column for column, of in numbers.of_relations[other][1].items()}
            if other is not relation and named.keys() >= set(columns.values()):  # either may compute more below
                repeats[relation] = Same(other, {column: named[of] for column, of in columns.items()})
                continue
        waiting += reversed(relation.inputs)
    return repeats


class _ValueNumbers:
    """Numbers for relations and for columns.

    Attributes:
        of_relations: by relation its own, and those of its columns.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._columns: dict[QueryColumn, int] = {}
        self.of_relations: dict[relations.Relation, tuple[int, dict[QueryColumn, int]]] = {}

    def _of(self, *made: Hashable) -> int:
        return self._known.setdefault(made, len(self._known))

    def _column(self, column: QueryColumn) -> int:
        return self._columns.setdefault(column, self._of("column", column))

    def rows(self, relation: relations.Relation) -> int:
        """A relation's; its columns have theirs afterwards."""
        number = self._rows(relation)
        self.of_relations[relation] = number, {c: self._column(c) for c in relation.columns}
        return number

    def _rows(self, relation: relations.Relation) -> int:
        if isinstance(relation, relations.Scan):
            name = relation.table.name
            self._columns |= {c: self._of("column", name, c.label) for c in relation.ids.values()}
            return self._of("scan", name)
        if isinstance(relation, relations.RowByRow):
            below = self.rows(relation.below)
            if isinstance(relation, relations.Filter):
                return self._of("filter", below, *sorted(self._expr(x) for x in relation.conditions))
            if isinstance(relation, relations.Expand):
                ((column, value),) = relation.computed.items()
                self._columns[column] = self._of("each", self._expr(value))
                return self._of("expand", below, self._columns[column])
            if isinstance(relation, relations.Compute):
                self._compute(relation)
                return below
        if isinstance(relation, relations.AggregateOf):
            return self._aggregate(relation)
        if isinstance(relation, relations.LatestOf):
            return self._of("latest", self.rows(relation.below))
        if isinstance(relation, relations.TopOf):
            below = self.rows(relation.below)
            by = (self._column(c) for c in relation.by)
            order = (self._of(self._column(c), how._replace(column="")) for c, how in relation.order)
            number = self._of("top", below, *by, "order", *order)
            self._columns[relation.number] = self._of("row number", number)
            return self._of("first", number, relation.n)
        if isinstance(relation, relations.OverOf):
            return self._over(relation)
        if isinstance(relation, relations.JoinOf) and relation.by_time is None:
            return self._join(relation)
        if isinstance(relation, relations.UnionOf):
            number = self._of("union", *map(self.rows, relation.parts))
            self._columns |= {c: self._of("in union", *map(self._column, of)) for c, of in relation.of_parts.items()}
            return number
        for side in relation.inputs:
            self.rows(side)
        return self._unlike(relation)

    def _unlike(self, relation: relations.Relation) -> int:
        """A number for a relation that is like no other."""
        self._columns |= {c: self._of("column", c) for c in relation.columns}
        return self._of("rows", relation)

    def _compute(self, relation: relations.Compute) -> None:
        """Columns that may be made of one another."""
        waiting = dict(relation.computed)
        while waiting:
            ready = [c for c, expr in waiting.items() if not any(of in waiting for of in expr.columns)]
            for column in ready:
                self._columns[column] = self._expr(waiting.pop(column))

    def _aggregate(self, relation: relations.AggregateOf) -> int:
        below, more = self.rows(relation.below), tuple[Hashable, ...]()
        if isinstance(relation, relations.LocalAggregateOf):
            window = relation.window
            more = (self._column(relation.time), window.size, window.slide, window.offset)
            self._columns |= {c: self._of("end", *more, place) for c, place in relation.places.items()}
        if isinstance(relation, relations.SessionsOf):
            more = (self._column(relation.time), relation.gap_ms)
        by, calls = [self._column(c) for c in relation.by], list[int]()
        for call in relation.calls:
            of = [*map(self._column, call.named), call.second if isinstance(call.second, str) else None]
            calls.append(self._of("call", call.function, *of, str(call.column.type)))
            self._columns[call.column] = calls[-1]
        number = self._of(type(relation).__name__, below, *by, "calls", *calls, *more)
        if isinstance(relation, relations.SessionsOf):
            self._columns |= {c: self._of("end", number, place) for place, c in enumerate(relation.window)}
        return number

    def _over(self, relation: relations.OverOf) -> int:
        below = self.rows(relation.below)
        order = (self._of(self._column(c), how._replace(column="")) for c, how in relation.order)
        number = self._of("over", below, *map(self._column, relation.by), "order", *order)
        calls = []
        for call in relation.calls:
            of = *map(self._column, call.named), call.frame, call.number, call.ignore_nulls
            calls.append(self._of("call", number, call.function, *of, str(call.column.type)))
            self._columns[call.column] = calls[-1]
        return self._of("windows", number, *calls)

    def _join(self, relation: relations.JoinOf) -> int:
        sides = []
        for place, side in enumerate(relation.inputs):
            sides.append(self.rows(side))
            self._columns |= {c: self._of("of", place, self._column(c)) for c in side.columns}
        member = None if relation.member is None else self._expr(relation.member)
        return self._of("join", relation.how, *sides, member, *sorted(self._expr(x) for x in relation.on))

    def _expr(self, expr: Expr) -> int:
        return self._tree(expr.tree, expr.of)

    def _tree(self, tree: Tree, of: Mapping[int, QueryColumn]) -> int:
        if tree.kind == "AttributeReference":
            return self._column(of[number_of(tree)])
        if tree.kind.endswith(_CALLS):
            return self._of("call of", id(tree))
        args = (self._tree(arg, of) for arg in tree.args)
        return self._of(tree.kind, *args, *sorted((name, repr(value)) for name, value in tree.fields.items()))
