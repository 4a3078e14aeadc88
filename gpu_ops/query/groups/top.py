"""The first rows: ``ROW_NUMBER() OVER (PARTITION BY ... ORDER BY ...)`` with a bound above it; ``ORDER BY ... LIMIT``.

For the first Catalyst has a ``Window`` node, and the bound in a filter above it, with projections between; for the
second ``GlobalLimit``, ``LocalLimit`` and ``Sort``, again with projections between. That one is a single group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from gpu_ops.descriptions.groups import Order
from gpu_ops.query.catalyst import arrow_type_of, class_of, id_of, items
from gpu_ops.query.errors import LIMIT
from gpu_ops.query.expressions import Column, Expr
from gpu_ops.query.groups.relations import TopOf
from gpu_ops.query.relations import Compute, Relation
from gpu_ops.query.scope import Below, Scope

NO_BOUND: Final = (
    "ROW_NUMBER() has no end: ask for the first rows of each group in a WHERE around it, as in SELECT * FROM (SELECT "
    "*, ROW_NUMBER() OVER (PARTITION BY k ORDER BY t DESC) AS n FROM x) WHERE n <= 3"
)
_OTHERS: Final = (
    "window functions are not understood, but for one: SELECT * FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY k "
    "ORDER BY t DESC) AS n FROM x) WHERE n <= 3"
)
_TURNED: Final = {
    "LessThanOrEqual": "GreaterThanOrEqual", "LessThan": "GreaterThan", "GreaterThanOrEqual": "LessThanOrEqual",
    "GreaterThan": "LessThan", "EqualTo": "EqualTo",
}  # fmt: skip


def top_of(scope: Scope, node: Any, terms: Any, below: Relation) -> Relation:
    """A Window of Catalyst's as relations; how many rows is not known yet.

    Args:
        scope: of the query; it knows the columns of what is below, and gets to know that of the number.
        node: Catalyst's.
        terms: of its order.
        below: what it numbers.

    Raises:
        SqlError: another window function.
    """
    calls = items(node.windowExpressions())
    function = calls[0].child().windowFunction()
    if len(calls) != 1 or class_of(function) != "RowNumber":
        scope.fail(_OTHERS, function)
    inside = Below(scope)
    by = tuple(inside.column(x, f"group_{n}") for n, x in enumerate(items(node.partitionSpec()), 1))
    order = _order(inside, terms)
    if not order:  # Spark itself asks for one, but for LIMIT in a sub-query
        scope.fail(LIMIT, function)
    number = Column(str(calls[0].name()), "", functools.partial(arrow_type_of, calls[0]), nullable=False)
    identity = id_of(calls[0])
    scope.columns[identity] = number
    return TopOf(inside.of(below), by, calls[0], order, number, identity, None)


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
    number = Column("row_number", "", pa.int32, nullable=False)
    return TopOf(inside.of(below), (), sort, order, number, None, int(limit.limitExpr().eval(None)))


def _order(inside: Below, terms: Any) -> tuple[tuple[Column, Order], ...]:
    """By which columns rows are ordered, and how."""
    found = []
    for n, term in enumerate(items(terms), 1):
        descending, first = str(term.direction().sql()) == "DESC", str(term.nullOrdering().sql()) == "NULLS FIRST"
        found.append((inside.column(term.child(), f"order_{n}"), Order("", descending, first)))
    return tuple(found)


def bounded(relation: Relation, condition: Expr) -> Relation | None:
    """A relation with a bound for a row's number, if that is what a condition above it is; else None.

    Of ``n = 3`` it is 3, and the condition still has to be met; see `decides`.
    """
    found = _bound(condition)
    if found is None:
        return None
    column, most = found

    def within(below: Relation) -> Relation | None:
        if isinstance(below, TopOf) and below.number is column:
            least = most if below.n is None else min(most, below.n)
            return dataclasses.replace(below, n=least) if most > 0 else None
        if isinstance(below, Compute):
            inside = within(below.below)
            return None if inside is None else Compute(inside, below.computed, below.ids)
        return None

    return within(relation)


def decides(condition: Expr) -> bool:
    """Whether a condition that is a bound says no more than that."""
    found = _bound(condition)
    return found is not None and (condition.kind != "EqualTo" or found[1] == 1)


def _bound(condition: Expr) -> tuple[Column, int] | None:
    """The column that a condition bounds, and by what."""
    if condition.kind not in _TURNED or len(condition.args) != 2:
        return None
    kind, (one, other) = condition.kind, condition.args
    if one.kind == "Literal":
        kind, one, other = _TURNED[kind], other, one
    value = other.tree.fields.get("value") if other.kind == "Literal" else None
    if one.column is None or value is None or not str(value).lstrip("-").isdigit():
        return None
    most: dict[str, Callable[[int], int]] = {
        "LessThanOrEqual": lambda n: n, "LessThan": lambda n: n - 1, "EqualTo": lambda n: n
    }  # fmt: skip
    return (one.column, most[kind](int(value))) if kind in most else None
