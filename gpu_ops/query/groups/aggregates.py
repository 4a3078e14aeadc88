"""``GROUP BY`` of a query: groups, calls of aggregate functions, and expressions over what these give.

Catalyst has all in one node: ``Aggregate(grouping expressions, result expressions, child)``, and calls stand anywhere
in the results. Here the parts come apart: what is grouped by and what is aggregated are columns below, results are
expressions above, in which each call is an attribute. Filters of ``HAVING`` are above that already.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import types as st

from gpu_ops.query.catalyst import arrow_type_of, class_of, id_of, items, text_of
from gpu_ops.query.expressions import Column, Expr
from gpu_ops.query.groups.relations import AggregateOf, Call
from gpu_ops.query.relations import Compute, Relation
from gpu_ops.query.scope import Below, Scope
from gpu_ops.spark.datatypes import arrow_type, is_window

_CALL: Final = "AggregateExpression"
_FUNCTIONS: Final = {
    "Sum": "sum", "Count": "count", "Average": "avg", "Min": "min", "Max": "max", "First": "first", "Last": "last",
}  # fmt: skip
_THERE_ARE: Final = "aggregates are sum, count, avg, min, max, first_value, last_value and count(DISTINCT ...)"


def aggregate_of(scope: Scope, node: Any, below: Relation) -> Relation:
    """An Aggregate of Catalyst's as relations.

    Args:
        scope: of the query; it knows the columns of what is below, and gets to know those of the result.
        node: Catalyst's.
        below: what it aggregates.

    Raises:
        SqlError: a function that there is none for.
    """
    return _Aggregate(scope, node, below).relation()


def distinct_of(node: Any, below: Relation) -> Relation:
    """``SELECT DISTINCT`` as relations: one row per group of all columns.

    Args:
        node: Catalyst's ``Distinct``.
        below: what may have a row several times.
    """
    return Compute(AggregateOf(below, tuple(dict.fromkeys(below.shown.values())), node, ()), {}, below.shown)


class _Aggregate:
    def __init__(self, scope: Scope, node: Any, below: Relation) -> None:
        self.scope, self.catalyst, self.node, self.below = scope, scope.catalyst, node, below
        self.inside = Below(scope)
        self.groups: list[tuple[Any, Column]] = []
        self.windows: list[tuple[Any, Column, Column]] = []
        self.calls: list[tuple[Any, Any, Call]] = []

    def relation(self) -> Relation:
        for group in items(self.node.groupingExpressions()):
            if is_window(st._parse_datatype_json_string(group.dataType().json())):
                start, end = (
                    self.inside.column(self.catalyst.field(group, number), f"window_{part}")
                    for number, part in enumerate(("start", "end"))
                )
                self.windows.append((group, start, end))
            elif not any(known.semanticEquals(group) for known, _ in self.groups):
                self.groups.append((group, self.inside.column(group, f"group_{len(self.groups) + 1}")))
        results = [(x, self._replaced(x.child() if class_of(x) == "Alias" else x)) for x in self._results()]
        of_windows = [column for _, *both in self.windows for column in both]
        by = tuple(dict.fromkeys([*of_windows, *(column for _, column in self.groups)]))
        calls, ends = tuple(call for _, _, call in self.calls), tuple(end for _, _, end in self.windows)
        relation = AggregateOf(self.inside.of(self.below), by, self.node, calls, ends)
        computed: dict[Column, Expr] = {}
        ids: dict[int, Column] = {}
        for shown, value in results:
            expr, number = self.scope.expr(value), id_of(shown)
            column = expr.column
            if column is None:
                column = Column(
                    str(shown.name()), "", functools.partial(arrow_type_of, value), nullable=bool(value.nullable())
                )
                computed[column] = expr
            self.scope.columns[number] = ids[number] = column
        return Compute(relation, computed, ids)

    def _results(self) -> Sequence[Any]:
        return items(self.node.aggregateExpressions())

    def _replaced(self, java: Any) -> Any:
        """A result with an attribute for each group and each call."""
        for group, column in self.groups:
            if java.semanticEquals(group):
                return java if class_of(java) == "AttributeReference" else self._attribute(java, column)
        for group, *both in self.windows:
            if class_of(java) == "GetStructField" and java.child().semanticEquals(group):
                return self._attribute(java, both[int(java.ordinal())])
            if java.semanticEquals(group):
                parts = [self._attribute(self.catalyst.field(group, n), column) for n, column in enumerate(both)]
                return self.catalyst.struct(dict(zip(("start", "end"), parts, strict=True)))
        if class_of(java) == _CALL:
            return self._call(java)
        below = items(java.children())
        made = [self._replaced(child) for child in below]
        if any(new is not old for new, old in zip(made, below, strict=True)):
            return java.withNewChildren(self.catalyst.seq(made))
        return java

    def _attribute(self, java: Any, column: Column) -> Any:
        attribute = self.catalyst.attribute(java, column.label)
        self.scope.columns[id_of(attribute)] = column
        return attribute

    def _call(self, java: Any) -> Any:
        """The attribute of a call; the same call is made once."""
        known = next((attribute for of, attribute, _ in self.calls if of is not None and of.semanticEquals(java)), None)
        if known is not None:
            return known
        function, name = java.aggregateFunction(), class_of(java.aggregateFunction())
        given = items(function.children())
        if name not in _FUNCTIONS:
            self.scope.fail(f"{text_of(java)} is not understood: {_THERE_ARE}", java)
        if name in ("First", "Last") and not function.ignoreNulls():
            word = name.lower()
            self.scope.fail(f"{word}_value leaves nulls out: write {word}_value(...) IGNORE NULLS", java)
        if name == "Count" and len(given) > 1:
            self.scope.fail("count takes one value", java)
        distinct = bool(java.isDistinct())
        if distinct and name not in ("Count", "Min", "Max"):
            self.scope.fail("DISTINCT goes with count only", java)
        column: Column | None = None
        if java.filter().isDefined():  # null is no value to any of the functions
            given = [self.catalyst.only_where(java.filter().get(), given[0])]
        if not (name == "Count" and class_of(given[0]) == "Literal" and not given[0].nullable()):
            column = self.inside.column(given[0], f"value_{len(self.calls) + 1}")
        elif distinct:
            self.scope.fail("count(DISTINCT ...) takes a column or an expression over some", java)
        kind = st._parse_datatype_json_string(java.dataType().json())
        word = "count_distinct" if distinct and name == "Count" else _FUNCTIONS[name]
        return self._add(java, word, column, kind)

    def _add(self, java: Any, function: str, column: Column | None, kind: st.DataType) -> Any:
        label = f"{function}_{len(self.calls) + 1}"
        made = Column(label, "", lambda: arrow_type(kind), nullable=not function.startswith("count"))
        attribute = None if java is None else self._attribute(java, made)
        self.calls.append((java, attribute, Call(made, function, column)))
        return attribute
