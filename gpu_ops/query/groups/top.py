"""The first rows: ``ROW_NUMBER() OVER (PARTITION BY ... ORDER BY ...)`` with a bound above it; ``ORDER BY ... LIMIT``.

For the first Catalyst has a ``Window`` node, and the bound in a filter above it, with projections between; for the
second ``GlobalLimit``, ``LocalLimit`` and ``Sort``, again with projections between. That one is a single group.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from gpu_ops.descriptions.groups.top import Order
from gpu_ops.query.catalyst import arrow_type_of, class_of, items
from gpu_ops.query.expressions import Column, Expr, tree
from gpu_ops.query.relations import Compute, Relation, TopOf

if TYPE_CHECKING:
    from gpu_ops.query.read import Reader

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


def top_of(reader: Reader, node: Any, below: Relation) -> Relation:
    """A Window of Catalyst's as relations; how many rows is not known yet.

    Args:
        reader: of the query; it knows the columns of what is below, and gets to know that of the number.
        node: Catalyst's.
        below: what it numbers.

    Raises:
        SqlError: another window function.
    """
    calls = items(node.windowExpressions())
    function = calls[0].child().windowFunction()
    if len(calls) != 1 or class_of(function) != "RowNumber":
        reader.fail(_OTHERS, function)
    columns = _Columns(reader)
    by = tuple(columns.column(x, f"group_{n}") for n, x in enumerate(items(node.partitionSpec()), 1))
    order = columns.order(node.orderSpec())
    number = Column(str(calls[0].name()), "", functools.partial(arrow_type_of, calls[0]), nullable=False)
    identity = int(calls[0].exprId().id())
    reader.columns[identity] = number
    return TopOf(columns.above(below), by, order, number, identity, None, calls[0])


def limit_of(reader: Reader, limit: Any, sort: Any, below: Relation) -> Relation:
    """``ORDER BY ... LIMIT n`` as relations: the first rows of a single group.

    Args:
        reader: of the query.
        limit: Catalyst's ``GlobalLimit``.
        sort: Catalyst's ``Sort`` below it.
        below: what is ordered.
    """
    columns = _Columns(reader)
    order = columns.order(sort.order())
    number = Column("row_number", "", pa.int32, nullable=False)
    return TopOf(columns.above(below), (), order, number, None, int(limit.limitExpr().eval(None)), sort)


class _Columns:
    """What rows are grouped and ordered by, as columns; expressions become columns below."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.made: dict[Column, Expr] = {}

    def column(self, java: Any, label: str) -> Column:
        expr = Expr(tree(json.loads(java.toJSON()), lambda: java), self.reader.columns)
        if expr.column is not None:
            return expr.column
        found = Column(label, "", functools.partial(arrow_type_of, java), nullable=bool(java.nullable()))
        self.made[found] = expr
        return found

    def order(self, terms: Any) -> tuple[tuple[Column, Order], ...]:
        found = []
        for n, term in enumerate(items(terms), 1):
            descending, first = str(term.direction().sql()) == "DESC", str(term.nullOrdering().sql()) == "NULLS FIRST"
            found.append((self.column(term.child(), f"order_{n}"), Order("", descending, first)))
        return tuple(found)

    def above(self, below: Relation) -> Relation:
        return Compute(below, self.made, below.ids) if self.made else below


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
