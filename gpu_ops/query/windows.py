"""``OVER (PARTITION BY ... ORDER BY ...)`` and ``LIMIT``, of Catalyst's nodes as relations.

Catalyst has a ``Window`` node for the calls that share partitions and an order, one above the other where these differ,
and projections for expressions over what they give. A ``ROW_NUMBER()`` that is alone in one, with a bound in a filter
above it and projections between, asks for the first rows of each group, which needs less: that is a `TopOf`. For
``ORDER BY ... LIMIT`` Catalyst has ``GlobalLimit``, ``LocalLimit`` and ``Sort``, again with projections between. That
one is a single group.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, Final, NoReturn

import pyarrow as pa

from gpu_ops.descriptions.groups import MAX_ROWS, Order
from gpu_ops.descriptions.over import WindowFrame, WindowFunction
from gpu_ops.query.catalyst import arrow_type_of, class_of, id_of, items
from gpu_ops.query.errors import LIMIT
from gpu_ops.query.expressions import TURNED, Expr, QueryColumn
from gpu_ops.query.groups import CALL, FUNCTIONS, fails_never
from gpu_ops.query.places import words_of
from gpu_ops.query.relations import Compute, OverCall, OverOf, Relation, TopOf
from gpu_ops.query.scope import Below, Scope, collated

_NUMBERING: Final[dict[str, WindowFunction]] = {
    "RowNumber": "row_number", "Rank": "rank", "DenseRank": "dense_rank", "PercentRank": "percent_rank",
    "CumeDist": "cume_dist", "NTile": "ntile",
}  # fmt: skip
_NOT_OVER: Final = ("collect_list", "collect_set", "string_agg", "count_distinct")
_THERE_ARE: Final = (
    "window functions are ROW_NUMBER, RANK, DENSE_RANK, PERCENT_RANK, CUME_DIST, NTILE, LAG, LEAD, FIRST_VALUE, "
    "LAST_VALUE, NTH_VALUE, COUNT, SUM, AVG, MIN, MAX, STDDEV, VARIANCE, COVAR_POP, COVAR_SAMP and CORR"
)
_GENERATED: Final = re.compile(r"_we?\d+")
"""The names that Spark's analyser gives to calls inside of expressions."""


def windows_of(scope: Scope, node: Any, terms: Any, below: Relation) -> Relation:
    """A Window of Catalyst's as relations; of a lone ``ROW_NUMBER()`` how many rows are wanted is not known yet.

    Args:
        scope: of the query; it knows the columns of what is below, and gets to know those of the functions.
        node: Catalyst's.
        terms: of its order.
        below: what it looks at.

    Raises:
        SqlError: a function or a frame that there is none for.
    """
    calls, inside = items(node.windowExpressions()), Below(scope)
    by = tuple(inside.compared(x, f"group_{n}") for n, x in enumerate(items(node.partitionSpec()), 1))
    order = _order(inside, terms)
    function = calls[0].child().windowFunction()
    if len(calls) == 1 and class_of(function) == "RowNumber":
        if not order:  # Spark itself asks for one, but for LIMIT in a sub-query
            scope.fail(LIMIT, function)
        number = QueryColumn(str(calls[0].name()), "", functools.partial(arrow_type_of, calls[0]), nullable=False)
        identity = id_of(calls[0])
        scope.columns[identity] = number
        return TopOf(inside.of(below), by, calls[0], order, number, identity, None)
    windows = _Windows(scope, inside)
    for call in calls:
        windows.add(call)
    made = OverOf(inside.of(below), by, calls[0], order, tuple(windows.calls), windows.ids)
    return Compute(made, windows.computed, {**made.shown, **windows.shown}) if windows.computed else made


def without_bound(relation: Relation) -> Relation:
    """A query whose row numbers that nothing bounds are window functions like others."""
    made = relation.over(*map(without_bound, relation.inputs))
    if not isinstance(made, TopOf) or made.n is not None or made.identity is None:
        return made
    call = OverCall(made.number, "row_number")
    return OverOf(made.below, made.by, made.java, made.order, (call,), {made.identity: made.number})


class _Windows:
    """The calls of one Window.

    Attributes:
        calls: as the operator has them.
        ids: by the id of Catalyst's attribute the columns of those that give what the query asks for.
        computed: columns that are computed of what some give: with a default.
        shown: likewise by id.
    """

    def __init__(self, scope: Scope, inside: Below) -> None:
        self._scope, self._inside = scope, inside
        self.calls: list[OverCall] = []
        self.ids: dict[int, QueryColumn] = {}
        self.computed: dict[QueryColumn, Expr] = {}
        self.shown: dict[int, QueryColumn] = {}

    def add(self, alias: Any) -> None:
        """Take a call in, which Catalyst has under a name."""
        java = alias.child()
        function = java.windowFunction()
        name = class_of(function)
        if name in ("Lag", "Lead"):
            self._add_offset(alias, function, name)
            return
        if name in _NUMBERING:
            parts = self._whole(java, function.children().apply(0), "ntile") if name == "NTile" else None
            call = OverCall(self._column(alias), _NUMBERING[name], number=parts)
        elif name == "NthValue":
            value, place = items(function.children())
            number, frame = self._whole(java, place, "nth_value"), self._frame(java)
            column = self._inside.column(value, f"value_{len(self.calls) + 1}")
            call = OverCall(self._column(alias), "nth", column, frame, number, bool(function.ignoreNulls()))
        elif name == CALL:
            call = self._aggregated(alias, java, function)
        else:
            self._unknown(java)
        self._put(alias, call)

    def _put(self, alias: Any, call: OverCall) -> None:
        self.calls.append(call)
        self.ids[id_of(alias)] = self._scope.columns[id_of(alias)] = call.column

    def _unknown(self, java: Any) -> NoReturn:
        self._scope.fail(f"{words_of(java)} is not understood: {_THERE_ARE}", java)

    def _aggregated(self, alias: Any, java: Any, call: Any) -> OverCall:
        """An aggregate over the rows of a frame."""
        function, catalyst, frame = call.aggregateFunction(), self._scope.catalyst, self._frame(java)
        name, arguments = class_of(function), items(function.children())
        ours = FUNCTIONS.get(name)
        if ours is None or ours in _NOT_OVER:
            self._unknown(java)
        if name in ("Sum", "Average") and fails_never(function):
            self._scope.fail(
                f"{words_of(java)} is not understood: sum() of integers wraps around, and has no error", call
            )
        if name in ("Min", "Max") and collated(arguments[0]):
            self._scope.fail(f"{words_of(java)}: {ours} of text in a collation is not understood", call)
        if name == "Count" and len(arguments) > 1:
            arguments = [catalyst.if_none_is_null(arguments)]
        number, column, second = len(self.calls) + 1, None, None
        if not (name == "Count" and class_of(arguments[0]) == "Literal" and not arguments[0].nullable()):
            column = self._inside.column(arguments[0], f"value_{number}")
        if name in ("CovSample", "CovPopulation", "Corr"):
            second = self._inside.column(arguments[1], f"other_{number}")
        ignores = name in ("First", "Last") and bool(function.ignoreNulls())
        return OverCall(self._column(alias), ours, column, frame, None, ignores, second)  # type: ignore[arg-type]

    def _add_offset(self, alias: Any, function: Any, name: str) -> None:
        """``LAG`` and ``LEAD``; what is shown where no such row is there is computed above."""
        scope, catalyst, (value, offset, default) = self._scope, self._scope.catalyst, items(function.children())
        rows, ignores = self._whole(alias.child(), offset, name.lower()), bool(function.ignoreNulls())
        rows = rows if name == "Lag" else -rows
        number = len(self.calls) + 1
        of = self._inside.column(value, f"value_{number}")
        if class_of(default) == "Literal" and catalyst.constant(default) is None:
            self._put(alias, OverCall(self._column(alias), "lag", of, None, rows, ignores))
            return
        found = scope.nameless(alias, f"lag_{number}")
        self.calls.append(OverCall(found, "lag", of, None, rows, ignores))
        attribute = there = scope.attribute(alias, found)
        if not ignores:  # then a null may be the value of a row that is there
            always = self._inside.column(catalyst.true(), "always")
            column = scope.nameless(catalyst.nothing(catalyst.true().dataType()), f"lag_{number + 1}")
            self.calls.append(OverCall(column, "lag", always, None, rows))
            there = scope.attribute(catalyst.nothing(catalyst.true().dataType()), column)
        shown = self._column(alias)
        self.computed[shown] = scope.expr(catalyst.unless_null(there, attribute, default))
        self.shown[id_of(alias)] = scope.columns[id_of(alias)] = shown

    def _column(self, alias: Any) -> QueryColumn:
        """The column of a call, by the name that the query gives it."""
        name = str(alias.name())
        if _GENERATED.fullmatch(name):
            return self._scope.nameless(alias.child(), f"window_{len(self.calls) + 1}")
        return self._scope.computed(alias, name)

    def _whole(self, java: Any, value: Any, what: str) -> int:
        number = self._scope.catalyst.constant(value)
        if number is None:
            self._scope.fail(f"{words_of(java)}: the number of {what} is a constant", java)
        return int(number)

    def _frame(self, java: Any) -> WindowFrame | None:
        """The frame of a call; None for the whole partition."""
        frame = java.windowSpec().frameSpecification()
        unit: Any = "rows" if class_of(frame.frameType()) == "RowFrame$" else "range"
        ends = [self._end(java, unit, end) for end in (frame.lower(), frame.upper())]
        return None if ends == [None, None] else WindowFrame(unit, *ends)

    def _end(self, java: Any, unit: str, end: Any) -> int | None:
        kind = class_of(end)
        if kind.startswith("Unbounded"):
            return None
        if kind == "CurrentRow$":
            return 0
        if unit == "range":
            self._scope.fail(
                f"{words_of(java)}: a RANGE goes to CURRENT ROW or is UNBOUNDED; a number of rows is ROWS BETWEEN ...",
                java,
            )
        return self._whole(java, end, "ROWS")


def limit_of(scope: Scope, limit: Any, sort: Any, below: Relation) -> Relation:
    """``ORDER BY ... LIMIT n`` as relations: the first rows of a single group.

    Args:
        scope: of the query.
        limit: Catalyst's ``GlobalLimit``.
        sort: Catalyst's ``Sort`` below it.
        below: what is ordered.
    """
    inside = Below(scope)
    order = _order(inside, sort.order())
    number = QueryColumn("row_number", "", pa.int32, words=lambda: "a row's number", nullable=False)
    return TopOf(inside.of(below), (), sort, order, number, None, int(limit.limitExpr().eval(None)))


def _order(inside: Below, terms: Any) -> tuple[tuple[QueryColumn, Order], ...]:
    """By which columns rows are ordered, and how."""
    columns = []
    for n, term in enumerate(items(terms), 1):
        descending, first = str(term.direction().sql()) == "DESC", str(term.nullOrdering().sql()) == "NULLS FIRST"
        columns.append((inside.compared(term.child(), f"order_{n}"), Order("", descending, first)))
    return tuple(columns)


def bounded(relation: Relation, condition: Expr) -> Relation | None:
    """A relation with a bound for a row's number, if that is what a condition above it is; else None.

    Of ``n = 3`` it is 3, and the condition still has to be met; see `decides`.
    """
    bound = _bound(condition)
    if bound is None:
        return None
    column, most = bound

    def within(below: Relation) -> Relation | None:
        if isinstance(below, TopOf) and below.number is column:
            least = most if below.n is None else min(most, below.n)
            return dataclasses.replace(below, n=least) if 0 < most <= MAX_ROWS else None
        if isinstance(below, Compute):
            inside = within(below.below)
            return None if inside is None else Compute(inside, below.computed, below.ids)
        return None

    return within(relation)


def decides(condition: Expr) -> bool:
    """True if a condition that bounds a row number says no more than that."""
    bound = _bound(condition)
    return bound is not None and (condition.kind != "EqualTo" or bound[1] == 1)


def _bound(condition: Expr) -> tuple[QueryColumn, int] | None:
    """The column that a condition bounds, and by what."""
    if condition.kind not in TURNED or len(condition.args) != 2:
        return None
    kind, (one, other) = condition.kind, condition.args
    if one.kind == "Literal":
        kind, one, other = TURNED[kind], other, one
    value = other.tree.fields.get("value") if other.kind == "Literal" else None
    if one.column is None or value is None or not str(value).lstrip("-").isdigit() or kind.startswith("Greater"):
        return None
    return one.column, int(value) - (kind == "LessThan")
