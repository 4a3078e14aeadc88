"""``GROUP BY`` and windows of time, of Catalyst's nodes as relations.

Catalyst has groups, calls of aggregate functions and expressions over what these give in one node:
``Aggregate(grouping expressions, result expressions, child)``, and calls stand anywhere in the results. Here the parts
come apart: what is grouped by and what is aggregated are columns below, results are expressions above, in which each
call is an attribute. Filters of ``HAVING`` are above that already.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as st

from gpu_ops.descriptions.aggregate import TWO_COLUMNS, Function
from gpu_ops.query.catalyst import arrow_type_of, class_of, id_of, items
from gpu_ops.query.expressions import Expr, QueryColumn
from gpu_ops.query.places import words_of
from gpu_ops.query.relations import AggregateCall, AggregateOf, Compute, Expand, Relation, SessionsOf
from gpu_ops.query.scope import Below, Scope, collated
from gpu_ops.query.sessions import SESSION, Session, session_of
from gpu_ops.spark_types import is_window

# --- GROUP BY ---------------------------------------------------------------------------------------

CALL: Final = "AggregateExpression"
FUNCTIONS: Final[dict[str, Function]] = {
    "Sum": "sum", "Count": "count", "Average": "avg", "Min": "min", "Max": "max", "First": "first", "Last": "last",
    "StddevSamp": "stddev_samp", "StddevPop": "stddev_pop", "VarianceSamp": "var_samp", "VariancePop": "var_pop",
    "CovSample": "covar_samp", "CovPopulation": "covar_pop", "Corr": "corr", "CollectList": "collect_list",
    "CollectSet": "collect_set", "ListAgg": "string_agg", "HyperLogLogPlusPlus": "count_distinct",
}  # fmt: skip
_DISTINCT: Final[dict[str, Function]] = {
    "Count": "count_distinct", "Min": "min", "Max": "max", "CollectList": "collect_set", "CollectSet": "collect_set",
}  # fmt: skip
"""What DISTINCT makes of a function."""
_ORDERED: Final = ("Min", "Max", "CollectList", "CollectSet")
_AS_TEXT: Final = (
    st.StringType, st.BinaryType, st.BooleanType, st.IntegralType, st.DecimalType, st.FractionalType, st.DateType,
    st.TimestampType, st.TimestampNTZType,
)  # fmt: skip
"""The types whose values `Catalyst.joined_text` tells apart."""
_THERE_ARE: Final = (
    "aggregates are sum, count, avg, min, max, first_value, last_value, count(DISTINCT ...), approx_count_distinct, "
    "stddev, variance, covar_pop, covar_samp, corr, collect_list, collect_set and string_agg"
)


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


def distinct_of(scope: Scope, node: Any, below: Relation, columns: Sequence[Any] | None = None) -> Relation:
    """``SELECT DISTINCT`` as relations: one row per group of all columns.

    Args:
        scope: of the query.
        node: Catalyst's ``Distinct``.
        below: what may have a row several times.
        columns: the attributes of it that are compared; by default all that the node gives.

    Raises:
        SqlError: a column that is not compared.
    """
    inside, computed, calls = Below(scope), dict[QueryColumn, Expr](), list[AggregateCall]()
    by, shown = dict[QueryColumn, None](), dict(below.shown)
    session: Session | None = None
    for attribute in items(node.output()) if columns is None else columns:
        _check_group(scope, attribute, node)
        number = id_of(attribute)
        if _is_window(attribute):
            if _says(attribute, SESSION):
                session = session_of(scope, inside, attribute, below, node)
            ends = _ends(scope, inside, attribute) if session is None else session.window
            by |= {} if session is not None else dict.fromkeys(ends)
            shown[number] = column = scope.computed(attribute, str(attribute.name()))
            computed[column] = scope.expr(_window(scope, attribute, ends))
            continue
        by[inside.compared(attribute, f"group_{len(by) + 1}")] = None
        if collated(attribute):
            call, value = _text_of_group(scope, inside, attribute, f"text_{len(calls) + 1}")
            calls.append(call)
            shown[number] = column = scope.computed(attribute, str(attribute.name()))
            computed[column] = scope.expr(value)
    scope.columns = {**scope.columns, **shown}  # what is below goes on meaning its own
    groups = AggregateOf(inside.of(below), tuple(by), node, tuple(calls))
    return Compute(_with_session(groups, session), computed, shown)


def _with_session(groups: AggregateOf, session: Session | None) -> AggregateOf:
    """Groups, or groups and sessions."""
    if session is None:
        return groups
    own = {field.name: getattr(groups, field.name) for field in dataclasses.fields(groups) if field.name != "ends"}
    return SessionsOf(**own, **session._asdict())


def _ends(scope: Scope, inside: Below, window: Any) -> tuple[QueryColumn, QueryColumn]:
    """The columns of a window's start and end."""
    start, end = (scope.catalyst.field(window, number) for number in range(2))
    return (
        inside.column(start, "window_start", lambda: f"the start of {words_of(window)}"),
        inside.column(end, "window_end", lambda: f"the end of {words_of(window)}"),
    )


def _window(scope: Scope, window: Any, ends: Sequence[QueryColumn]) -> Any:
    """A window of attributes for the columns of its start and end."""
    parts = [scope.attribute(scope.catalyst.field(window, number), column) for number, column in enumerate(ends)]
    struct = scope.catalyst.struct(dict(zip(("start", "end"), parts, strict=True)))
    return scope.catalyst.unless_null(parts[0], struct) if bool(window.nullable()) else struct


def _text_of_group(scope: Scope, inside: Below, group: Any, label: str) -> tuple[AggregateCall, Any]:
    """The text that is shown of a group whose texts are equal in their collation: the least by its bytes.

    Returns:
        The call that gives it, and the expression over that.
    """
    text = scope.catalyst.as_type(group, st.StringType())
    attribute = scope.catalyst.attribute(text, label)
    column = scope.columns[id_of(attribute)] = scope.nameless(text, label)
    return AggregateCall(column, "min", inside.column(text, f"{label}_of")), scope.catalyst.as_type(
        attribute, group.dataType()
    )


_NAMED: Final = ("AttributeReference", "Alias")


def fails_never(function: Any) -> bool:
    """True for a sum or an average that is null where integers overflow: that of TRY_SUM, TRY_AVG."""
    whole = str(function.dataType().typeName()) == "long"
    return whole and str(function.prettyName()).startswith("try_")


_WINDOW: Final = "spark.timeWindow"
"""Key of the metadata that Catalyst gives a column of windows."""


def _says(group: Any, key: str) -> bool:
    """True if the metadata of a group column has a key."""
    return class_of(group) in _NAMED and bool(group.metadata().contains(key))


def _check_group(scope: Scope, group: Any, node: Any) -> None:
    """Refuses a group column that is more than its values, or whose values are not compared."""
    if not _is_window(group) and pa.types.is_nested(arrow_type_of(group)):
        named = class_of(group) in _NAMED
        what, kind = str(group.name()) if named else words_of(group), str(group.dataType().simpleString())
        scope.fail(f"{what} of type {kind} cannot be a key of groups", node if named else group)


def _is_window(group: Any) -> bool:
    """True if a group column is a window of time, or as good as one: a start and an end, and never null."""
    plain = not bool(group.nullable()) or _says(group, _WINDOW)
    return plain and is_window(st._parse_datatype_json_string(group.dataType().json()))


class _Aggregate:
    def __init__(self, scope: Scope, node: Any, below: Relation) -> None:
        self.scope, self.catalyst, self.node, self.below = scope, scope.catalyst, node, below
        self.inside = Below(scope)
        self.groups: list[tuple[Any, QueryColumn]] = []
        self.texts: list[tuple[Any, AggregateCall, Any]] = []
        self.windows: list[tuple[Any, QueryColumn, QueryColumn]] = []
        self.calls: list[tuple[Any, Any, AggregateCall]] = []
        self.session: Session | None = None

    def relation(self) -> Relation:
        for group in items(self.node.groupingExpressions()):
            _check_group(self.scope, group, self.node)
            if _says(group, SESSION):
                self.session = session_of(self.scope, self.inside, group, self.below, self.node)
                self.windows.append((group, *self.session.window))
            elif _is_window(group):
                self.windows.append((group, *_ends(self.scope, self.inside, group)))
            elif not any(known.semanticEquals(group) for known, _ in self.groups):
                self.groups.append((group, self.inside.compared(group, f"group_{len(self.groups) + 1}")))
        results = [
            (x, self._replaced(x.child() if class_of(x) == "Alias" else x))
            for x in items(self.node.aggregateExpressions())
        ]
        own = () if self.session is None else self.session.window
        of_windows = [column for _, *both in self.windows for column in both if column not in own]
        by = tuple(dict.fromkeys([*of_windows, *(column for _, column in self.groups)]))
        calls = tuple(call for _, *_, call in self.calls) + tuple(call for _, call, _ in self.texts)
        ends = tuple(end for _, _, end in self.windows)
        groups = AggregateOf(self.inside.of(self.below), by, self.node, calls, ends)
        relation = _with_session(groups, self.session)
        computed: dict[QueryColumn, Expr] = {}
        ids: dict[int, QueryColumn] = {}
        for shown, value in results:
            expr, number = self.scope.expr(value), id_of(shown)
            column = expr.column
            if column is None:
                column = self.scope.computed(value, str(shown.name()))
                computed[column] = expr
            ids[number] = column
        # a column of windows has one id below and above, and what is below goes on meaning its own
        self.scope.columns = {**self.scope.columns, **ids}
        return Compute(relation, computed, ids)

    def _replaced(self, java: Any) -> Any:
        """A result with an attribute for each group and each call."""
        for group, column in self.groups:
            if java.semanticEquals(group):
                if collated(group):
                    return self._text(group)
                return java if class_of(java) == "AttributeReference" else self.scope.attribute(java, column)
        for group, *both in self.windows:
            if class_of(java) == "GetStructField" and java.child().semanticEquals(group):
                return self.scope.attribute(java, both[int(java.ordinal())])
            if java.semanticEquals(group):
                return _window(self.scope, group, both)
        if class_of(java) == CALL:
            return self._call(java)
        below = items(java.children())
        children = [self._replaced(child) for child in below]
        if any(new is not old for new, old in zip(children, below, strict=True)):
            return java.withNewChildren(self.catalyst.seq(children))
        return java

    def _text(self, group: Any) -> Any:
        """The expression that is shown of a group of text in a collation."""
        shown = next((value for of, _, value in self.texts if of.semanticEquals(group)), None)
        if shown is None:
            call, shown = _text_of_group(self.scope, self.inside, group, f"text_{len(self.texts) + 1}")
            self.texts.append((group, call, shown))
        return shown

    def _all_of(self, call: Any, values: Sequence[Any], *, distinct: bool) -> Any:
        """One value for several, null where one of them is; for DISTINCT one that differs where one of them does."""
        if not distinct:
            return self.catalyst.if_none_is_null(values)
        kinds = [st._parse_datatype_json_string(value.dataType().json()) for value in values]
        unknown = next((kind for kind in kinds if not isinstance(kind, _AS_TEXT)), None)
        if unknown is not None:
            self.scope.fail(f"{words_of(call)}: values of type {unknown.simpleString()} are not told apart here", call)
        return self.catalyst.joined_text(
            [self.catalyst.collation_key(value) if collated(value) else value for value in values]
        )

    def _call(self, java: Any) -> Any:
        """The attribute of a call; the same call is made once."""
        known = next((attribute for of, attribute, _ in self.calls if of.semanticEquals(java)), None)
        if known is not None:
            return known
        function, name = java.aggregateFunction(), class_of(java.aggregateFunction())
        arguments = items(function.children())
        if name not in FUNCTIONS:
            self.scope.fail(f"{words_of(java)} is not understood: {_THERE_ARE}", java)
        if name in ("First", "Last") and not function.ignoreNulls():
            word = name.lower()
            self.scope.fail(f"{word}_value leaves nulls out: write {word}_value(...) IGNORE NULLS", java)
        distinct = bool(java.isDistinct())
        if name == "Count" and len(arguments) > 1:
            arguments = [self._all_of(java, arguments, distinct=distinct)]
        if name in (*_ORDERED, "ListAgg") and collated(arguments[0]):
            self.scope.fail(f"{words_of(java)}: {FUNCTIONS[name]} of text in a collation is not understood", java)
        if name in ("Sum", "Average") and fails_never(function):
            self.scope.fail(
                f"{words_of(java)} is not understood: sum() of integers wraps around, and has no error", java
            )
        if distinct and name not in _DISTINCT:
            self.scope.fail("DISTINCT goes with count, collect_list, min and max only", java)
        between = self._between(java, function) if name == "ListAgg" else None
        column: QueryColumn | None = None
        if java.filter().isDefined():  # null is no value to any of the functions
            arguments = [self.catalyst.only_where(java.filter().get(), arguments[0]), *arguments[1:]]
        if not (name == "Count" and class_of(arguments[0]) == "Literal" and not arguments[0].nullable()):
            compared = distinct or name == "HyperLogLogPlusPlus"
            add = self.inside.compared if compared else self.inside.column
            column = add(arguments[0], f"value_{len(self.calls) + 1}")
        elif distinct:
            self.scope.fail("count(DISTINCT ...) takes a column or an expression over some", java)
        call: Function = _DISTINCT[name] if distinct else FUNCTIONS[name]
        second: QueryColumn | str | None = between
        if call in TWO_COLUMNS:
            second = self.inside.column(arguments[1], f"other_{len(self.calls) + 1}")
        label = f"{call}_{len(self.calls) + 1}"
        kind, words = functools.partial(arrow_type_of, java), functools.partial(words_of, java)
        result = QueryColumn(label, "", kind, words=words, nullable=not call.startswith("count"))
        attribute = self.scope.attribute(java, result)
        self.calls.append((java, attribute, AggregateCall(result, call, column, second)))
        return attribute

    def _between(self, java: Any, function: Any) -> str | None:
        """The text that ``string_agg`` puts between values."""
        for term in items(function.orderExpressions()):
            ascends = str(term.direction().sql()) == "ASC"
            if not ascends or not term.child().semanticEquals(function.child()):
                self.scope.fail(f"{words_of(java)}: string_agg has its values in ascending order, and no other", java)
        if str(function.child().dataType().typeName()) == "binary":
            self.scope.fail(f"{words_of(java)}: string_agg takes text", java)
        text = self.catalyst.constant(function.delimiter())
        return None if text is None else str(text) or None


def expanded(scope: Scope, node: Any, below: Relation) -> Relation:
    """An Expand of Catalyst's, of sliding windows, grouping sets or UNPIVOT, as relations: several rows for each one.

    Args:
        scope: of the query; it gets to know the columns that differ in these rows.
        node: Catalyst's.
        below: the rows.
    """
    output, rows = items(node.output()), [items(projection) for projection in items(node.projections())]
    stays = [
        all(class_of(row[place]) == "AttributeReference" and id_of(row[place]) == id_of(found) for row in rows)
        for place, found in enumerate(output)
    ]
    ids = {id_of(found): scope.columns[id_of(found)] for found, same in zip(output, stays, strict=True) if same}
    differ = [place for place, same in enumerate(stays) if not same]
    if len(differ) == 1 and bool(output[differ[0]].metadata().contains(_WINDOW)):
        found, value = output[differ[0]], scope.catalyst.exploded([row[differ[0]] for row in rows])
        column = QueryColumn(str(found.name()), "", functools.partial(arrow_type_of, found), nullable=False)
        ids[id_of(found)] = scope.columns[id_of(found)] = column
        return Expand(below, {column: scope.expr(value)}, ids, node)
    structs = [scope.catalyst.struct({f"_{n}": row[place] for n, place in enumerate(differ, 1)}) for row in rows]
    each = scope.catalyst.one_of(structs, "expanded")
    # what is below goes on meaning its own
    column = scope.nameless(each, "expanded", lambda: "a row of the grouping sets")
    several = Expand(below, {column: scope.expr(scope.catalyst.exploded(structs))}, below.shown, node)
    scope.columns = {**scope.columns, id_of(each): column}
    computed: dict[QueryColumn, Expr] = {}
    for number, place in enumerate(differ):
        found, value = output[place], scope.catalyst.field(each, number)
        column = scope.computed(found, str(found.name()))
        computed[column], ids[id_of(found)] = scope.expr(value), column
    scope.columns = {**scope.columns, **ids}
    return Compute(several, computed, ids)


def repeated_rows(scope: Scope, node: Any, below: Relation) -> Relation:
    """Rows as often as a column says, of EXCEPT ALL and INTERSECT ALL: Catalyst's ``Generate(ReplicateRows)``.

    Copies of a row are told apart by a number, so that of a count that changes only as many of them come or go.

    Args:
        scope: of the query.
        node: Catalyst's.
        below: the rows, each once, with the numbers.
    """
    count, *values = items(node.generator().children())
    number = scope.catalyst.attribute(count, "copy")
    column = QueryColumn("copy", "", pa.int64, words=lambda: "the number of equal rows", nullable=False)
    output = items(node.generatorOutput())
    shown = {id_of(own): scope.columns[id_of(value)] for own, value in zip(output, values, strict=True)}
    copies = {column: scope.expr(scope.catalyst.numbered(count))}
    several = Expand(below, copies, {**shown, id_of(number): column}, node)
    scope.columns = {**scope.columns, **several.ids}
    return distinct_of(scope, node, several, [*output, number])
