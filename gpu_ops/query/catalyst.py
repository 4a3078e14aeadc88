"""Spark's analyser and some rules of its optimizer, called on a query over stand-ins of its inputs.

The stand-ins are static relations of nulls with the inputs' columns, views of a session of their own: so no view of
the user's is touched, and what a stream may not do is no matter here. Which input a leaf of the plan stands for is in
its columns' metadata, which lives through copies (a self-join, a common table expression used twice).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.conditions import backquoted
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.query.errors import PlacedError, SqlError, without_generated_names
from gpu_ops.query.expressions import leaves
from gpu_ops.query.places import position, position_of
from gpu_ops.spark_types import arrow_type

_CATALYST: Final = "org.apache.spark.sql.catalyst"

INPUT: Final = "gpu_ops.input"
"""Key of a column's metadata: the input that it stands for."""

_PLAIN: Final = ("EliminateSubqueryAliases", "EliminateView", "BooleanSimplification")
"""Makes plain relations of views, and of NOT (NOT EXISTS ...) what it is."""
_ROWS_STAY: Final = ("Project", "Sort", "Distinct", "SubqueryAlias", "View", "Window")
"""Nodes that give a row if they are given one, and none of none."""

_PUSH: Final = ("PushDownPredicates", "EliminateOuterJoin")
_ORDER: Final = ("ReorderJoin", "PushDownPredicates", "CollapseProject")
_MOST_ROUNDS: Final = 50
_AGGREGATE: Final = f"{_CATALYST}.plans.logical.Aggregate"
_NO_VALUE: Final = "a sub-query is a value that Spark's optimizer makes no join of: join it in FROM"
_NO_GROUP: Final = (
    "GROUP BY a sub-query: group by its column in FROM, as in SELECT g, count(*) FROM (SELECT *, (SELECT ...) AS g "
    "FROM t) GROUP BY g"
)
_SEVERAL: Final = "[SCALAR_SUBQUERY_TOO_MANY_ROWS] More than one row returned by a subquery used as an expression."


def java_class(session: SparkSession, name: str) -> Any:
    """A class of the JVM by its whole name, without a look at each of the packages that it is in."""
    jvm: Any = session._jvm
    return JavaClass(name, jvm._gateway_client)


def scala_seq(session: SparkSession, items: Sequence[Any]) -> Any:
    """Java objects as a sequence of Scala."""
    java_list = java_class(session, "java.util.ArrayList")()
    for item in items:
        java_list.add(item)
    return java_class(session, "org.apache.spark.api.python.PythonUtils").toSeq(java_list)


def items(seq: Any) -> list[Any]:
    """A sequence of Scala's."""
    return [seq.apply(number) for number in range(seq.length())]


def id_of(attribute: Any) -> int:
    """By which Catalyst tells attributes apart."""
    return int(attribute.exprId().id())


def class_of(java: Any) -> str:
    """The short name of an object's class."""
    return str(java.getClass().getSimpleName())


def conjuncts(condition: Any) -> list[Any]:
    """The conditions that a condition joins by AND."""
    return leaves(condition, lambda part: (part.left(), part.right()) if class_of(part) == "And" else None)


def _contains(session: SparkSession, java: Any, pattern: str) -> bool:
    """True if a plan or an expression has a node of one of Catalyst's ``TreePattern``."""
    patterns = getattr(java_class(session, f"{_CATALYST}.trees.TreePattern$"), "MODULE$")
    return bool(java.containsPattern(getattr(patterns, pattern)()))


def _has_sub_query(session: SparkSession, java: Any) -> bool:
    return _contains(session, java, "PLAN_EXPRESSION")


def _has_one_row(plan: Any) -> bool:
    """True if a plan gives one row at most whatever its inputs are."""
    while str(plan.nodeName()) in _ROWS_STAY or str(plan.nodeName()) == "Filter":
        plan = plan.child()
    if str(plan.nodeName()) == "GlobalLimit":
        return int(plan.limitExpr().eval(None)) <= 1
    return str(plan.nodeName()) == "Aggregate" and not plan.groupingExpressions().length()


def arrow_type_of(java: Any) -> Any:
    """The Arrow type of an expression.

    Raises:
        PlacedError: there is none.
    """
    try:
        return arrow_type(st._parse_datatype_json_string(java.dataType().json()))
    except DescriptionError as error:
        without_detail = re.sub(r" \(.*\)(?=;)", "", str(error))
        raise PlacedError(without_detail, position_of(java)) from error


def frame_of(session: SparkSession, plan: Any) -> DataFrame:
    """The DataFrame of a logical plan."""
    package = "sql" if session.version.startswith("3.") else "sql.classic"
    dataset = java_class(session, f"org.apache.spark.{package}.Dataset")
    return DataFrame(dataset.ofRows(session._jsparkSession, plan), session)


def ansi_mode(session: SparkSession) -> bool:
    """True if arithmetic in a join's condition fails where Spark's does; fixed when the join is built."""
    return str(session.conf.get("spark.sql.ansi.enabled")).lower() == "true"  # Spark 4's own default is true


class Catalyst:
    """The analyser of a session."""

    def __init__(self, session: SparkSession) -> None:
        """Args: the session, whose settings and functions count."""
        self.session = session
        self._java: Any = session._jsparkSession.cloneSession()
        self._views = 0
        # what BETWEEN compares is written out in both comparisons, as in Spark 3.5
        self._java.conf().set("spark.sql.alwaysInlineCommonExpr", "true")

    def _class(self, name: str) -> Any:
        return java_class(self.session, name)

    def _expression(self, kind: str, *args: Any) -> Any:
        """A new expression of a class of Catalyst's."""
        return self._class(f"{_CATALYST}.expressions.{kind}")(*args)

    def _node(self, kind: str, *args: Any) -> Any:
        """A new node of a logical plan, likewise."""
        return self._class(f"{_CATALYST}.plans.logical.{kind}")(*args)

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Settings are those of the session that is active in the JVM's thread."""
        sessions = self._class("org.apache.spark.sql.SparkSession")
        before = sessions.getActiveSession()
        sessions.setActiveSession(self._java)
        try:
            yield
        finally:
            if before.isDefined():
                sessions.setActiveSession(before.get())
            else:
                sessions.clearActiveSession()

    def view(self, name: str, schema: st.StructType) -> None:
        """Makes an input known by a name.

        Each input has one row more than the one before it: without rows Catalyst would take those of the same types for
        one, and leave out an EXISTS as the same as another.
        """
        fields = [
            st.StructField(x.name, x.dataType, x.nullable, {**(x.metadata or {}), INPUT: name}) for x in schema.fields
        ]
        kind = self._class("org.apache.spark.sql.types.DataType").fromJson(st.StructType(fields).json())
        self._views += 1
        gateway = self.session.sparkContext._gateway
        nulls = gateway.new_array(gateway.jvm.java.lang.Object, len(fields))
        row = self._class("org.apache.spark.sql.RowFactory").create(nulls)
        rows = self._class("java.util.Collections").nCopies(self._views, row)
        self._java.createDataFrame(rows, kind).createOrReplaceTempView(backquoted(name))

    def parsed(self, sql: str) -> Any:
        """A query's plan, parsed.

        Raises:
            SqlError: a query that Spark does not take.
        """
        try:
            with self._active():
                return self._java.sessionState().sqlParser().parsePlan(sql)
        except PySparkException as error:
            raise _refused(sql, error) from error

    def parts(self, whole: Any) -> list[Any]:
        """The SELECTs of a parsed UNION ALL that nothing stands above, each with all of WITH; of any other it alone."""
        names = str(whole.nodeName()) == "UnresolvedWith"

        def selects(node: Any) -> list[Any] | None:
            return items(node.children()) if str(node.nodeName()) == "Union" and not node.byName() else None

        queries = leaves(whole.child() if names else whole, selects)
        return [whole.withNewChildren(self.seq([node])) for node in queries] if names else queries

    def analysed(self, sql: str, parsed: Any) -> Any:
        """A plan of a query, resolved and typed, and nothing run.

        Raises:
            SqlError: a query that Spark does not take.
        """
        mode = self._class("org.apache.spark.sql.execution.CommandExecutionMode").SKIP()
        try:
            with self._active():
                execution = self._java.sessionState().executePlan(parsed, mode)
                execution.assertAnalyzed()
                return execution.analyzed()
        except (PySparkException, Py4JJavaError) as error:  # the latter where Spark's analyser fails itself
            raise _refused(sql, error) from error

    def check_expression(self, text: str) -> None:
        """That a text is one expression.

        Raises:
            SqlError: it is none, or more; lines are counted from 2, as in `gpu_ops.spark.api.streams`.
        """
        try:
            with self._active():
                self._java.sessionState().sqlParser().parseExpression(text)
        except PySparkException as error:
            refused = _refused(text, error)
            raise SqlError(refused.message, f"\n{text}", refused.line + 1, refused.column) from error

    def joined(self, plan: Any) -> Any:
        """An analysed plan without views, and with joins for its sub-queries."""
        with self._active():
            # a sub-query may have got a copy of what is around it, whose columns are others
            return self._rule("DeduplicateRelations").apply(self._joined(self._inline_ctes().apply(plan)))

    def _joined(self, plan: Any) -> Any:
        """A plan with Join nodes for EXISTS and IN, in a sub-query's own plan first.

        That has no column of what is around it any more when its own sub-queries are looked at.
        """
        plan = self._without_set_operations(self._applied(plan, _PLAIN))
        if _has_sub_query(self.session, plan):
            values = _contains(self.session, plan, "SCALAR_SUBQUERY")
            plan = self._with_values(plan, self._of_one_row) if values else plan
            plan = self._applied(self._with_sub_queries(plan, self._asked), ("PullupCorrelatedPredicates",))
            if values:
                joined = functools.partial(self._with_join, {})
                plan = self._with_values(plan, joined)
                try:
                    plan = self._applied(plan, ("RewriteCorrelatedScalarSubquery",))
                except (PySparkException, Py4JJavaError) as error:  # where Spark's own optimizer fails
                    raise PlacedError(_NO_VALUE, position_of(plan)) from error
            plan = self._applied(self._with_sub_queries(plan, self._inside), ("RewritePredicateSubquery",))
        return self._applied(plan, ("ReplaceExpressions", "BooleanSimplification"))

    def _without_set_operations(self, plan: Any) -> Any:
        """A plan with joins for EXCEPT and INTERSECT, and counts of equal rows for EXCEPT ALL and INTERSECT ALL."""
        if not any(_contains(self.session, plan, pattern) for pattern in ("EXCEPT", "INTERSECT")):
            return plan
        return self._applied(self._of_distinct_rows(plan), ("RewriteExceptAll", "RewriteIntersectAll"))

    def _of_distinct_rows(self, plan: Any) -> Any:
        """A plan with joins for EXCEPT and INTERSECT (Spark's ``ReplaceExceptWithAntiJoin``).

        Times are compared as plain columns: event times as such would make a join by time.
        """
        below = items(plan.children())
        made = [self._of_distinct_rows(child) for child in below]
        if any(new is not old for new, old in zip(made, below, strict=True)):
            plan = plan.withNewChildren(self.seq(made))
        how = {"Except": "LeftAnti", "Intersect": "LeftSemi"}.get(str(plan.nodeName()))
        if how is None:
            return plan
        equalities = [
            self._expression("EqualNullSafe", self._plain_time(one), self._plain_time(other))
            for one, other in zip(items(plan.left().output()), items(plan.right().output()), strict=True)
        ]
        with self._at(plan):
            condition = self._class("scala.Option").apply(self._all(equalities))
            none = self._module(f"{_CATALYST}.plans.logical.JoinHint").NONE()
            join = self._node("Join", plan.left(), plan.right(), self._join_type(how), condition, none)
            return self._node("Distinct", join)

    def _plain_time(self, value: Any) -> Any:
        is_time = str(value.dataType().typeName()).startswith("timestamp")
        return self.as_type(value, value.dataType()) if is_time else value

    def _join_type(self, name: str) -> Any:
        return getattr(self._class(f"{_CATALYST}.plans.{name}$"), "MODULE$")

    @contextlib.contextmanager
    def _at(self, node: Any) -> Iterator[None]:
        """New nodes have the place of another one in the query's text."""
        origin = self._class(f"{_CATALYST}.trees.CurrentOrigin")
        before = origin.get()
        origin.set(node.origin())
        try:
            yield
        finally:
            origin.set(before)

    def pushed(self, plan: Any) -> Any:
        """A plan of `joined` with its filters as far down as they may be, and no pads that they turn away."""
        with self._active():
            for _ in range(_MOST_ROUNDS):
                done = self._applied(plan, _PUSH)
                if done.fastEquals(plan):
                    break
                plan = done
            return self._applied(plan, _ORDER)

    def _with_sub_queries(self, plan: Any, changed: Callable[[Any, bool], Any]) -> Any:
        """A plan with other EXISTS and IN.

        Args:
            plan: the plan.
            changed: takes one, and whether a NOT stands before it; gives what takes its place.
        """
        if not _has_sub_query(self.session, plan):
            return plan
        below = items(plan.children())
        made = [self._with_sub_queries(child, changed) for child in below]
        if any(new is not old for new, old in zip(made, below, strict=True)):
            plan = plan.withNewChildren(self.seq(made))
        if str(plan.nodeName()) != "Filter" or not _has_sub_query(self.session, plan.condition()):
            return plan
        parts = []
        for part in conjuncts(plan.condition()):
            negated = class_of(part) == "Not"
            inner = part.child() if negated else part
            if class_of(inner) in ("Exists", "InSubquery"):
                inner = changed(inner, negated)
                parts.append(self._expression("Not", inner) if negated else inner)
            else:
                parts.append(part)
        return self._node("Filter", self._all(parts), plan.child())

    # --- sub-queries as values ------------------------------------------------------------------

    def _with_values(self, plan: Any, changed: Callable[[Any], Any]) -> Any:
        """A plan with others in place of sub-queries that stand as values in SELECT, WHERE, HAVING and GROUP BY.

        Args:
            plan: the plan.
            changed: gives the expression that takes the place of one.
        """
        if not _contains(self.session, plan, "SCALAR_SUBQUERY"):
            return plan
        below = items(plan.children())
        made = [self._with_values(child, changed) for child in below]
        if any(new is not old for new, old in zip(made, below, strict=True)):
            plan = plan.withNewChildren(self.seq(made))
        if not any(_contains(self.session, x, "SCALAR_SUBQUERY") for x in items(plan.expressions())):
            return plan

        def of(expressions: Any) -> Any:
            return self.seq([self._with_other(x, changed) for x in items(expressions)])

        with self._at(plan):
            match str(plan.nodeName()):
                case "Filter":
                    return self._node("Filter", self._with_other(plan.condition(), changed), plan.child())
                case "Project":
                    return self._node("Project", of(plan.projectList()), plan.child())
                case "Aggregate":
                    more = [plan.productElement(number) for number in range(3, plan.productArity())]
                    groups, results = of(plan.groupingExpressions()), of(plan.aggregateExpressions())
                    if any(
                        class_of(x) == "If" and _contains(self.session, x, "SCALAR_SUBQUERY") for x in items(groups)
                    ):
                        raise PlacedError(_NO_GROUP, position_of(plan))
                    return self._node("Aggregate", groups, results, plan.child(), *more)
        return plan

    def _with_other(self, value: Any, changed: Callable[[Any], Any]) -> Any:
        """An expression with others in place of the sub-queries in it that stand as values."""
        if class_of(value) == "ScalarSubquery":
            return changed(value)
        if not _contains(self.session, value, "SCALAR_SUBQUERY"):
            return value
        return value.withNewChildren(self.seq([self._with_other(child, changed) for child in items(value.children())]))

    def _of_one_row(self, query: Any) -> Any:
        """A sub-query that is a value: as it is where it has one row at most, else one that fails where it has more.

        Its plan gives a struct then, the number of rows and the value of one; where that is used it is looked at.
        """
        plan = query.plan()
        if _has_one_row(plan):
            return query
        (value,) = items(plan.output())
        rows = self._expression("aggregate.Count", self.seq([self.number(1)])).toAggregateExpression()
        first = self._expression("aggregate.First", value, True).toAggregateExpression()
        struct = _alias(self.session, self.struct({"rows": rows, "value": first}), "one_row")
        more = [self._class("scala.Option").empty()] * (self._constructor(_AGGREGATE).getParameterCount() - 3)
        counted = self._node("Aggregate", self.seq(()), self.seq([struct]), plan, *more)
        query = self._with_parts(query, {0: counted, 5: self._class("scala.Option").apply(False)})
        several = self._expression("GreaterThan", self.field(query, 0), self.as_type(self.number(1), st.LongType()))
        literal = self._class(f"{_CATALYST}.expressions.Literal")
        error = self._expression("RaiseError", literal.create(_SEVERAL, self._type(st.StringType())))
        return self._expression("If", several, self.as_type(error, value.dataType()), self.field(query, 1))

    def _with_join(self, known: dict[int, Any], query: Any) -> Any:
        """A sub-query that Catalyst makes a join of, be it correlated or not; without sub-queries of its own."""
        number = int(query.exprId().id())
        if number not in known:
            parts = {0: self._joined(query.plan())}
            if not query.children().length():
                parts[3] = self.seq([self.true()])
            known[number] = self._with_parts(query, parts)
        return known[number]

    def _with_parts(self, query: Any, parts: Mapping[int, Any]) -> Any:
        """A ``ScalarSubquery`` with other fields: 0 is its plan, 3 the join's condition, 5 whether a count matters."""
        fields = [parts.get(n, query.productElement(n)) for n in range(query.productArity())]
        return self._expression("ScalarSubquery", *fields)

    def _all(self, parts: Sequence[Any]) -> Any:
        """All of some conditions."""
        return functools.reduce(functools.partial(self._expression, "And"), parts)

    def _inside(self, query: Any, negated: bool) -> Any:
        """A sub-query with Join nodes for those in it."""
        if class_of(query) == "Exists":
            return query.withNewPlan(self._joined(query.plan()))
        inner = query.query()
        return self._expression("InSubquery", query.values(), inner.withNewPlan(self._joined(inner.plan())))

    def _asked(self, query: Any, negated: bool) -> Any:
        """A sub-query that selects nothing that does not matter, and no column of what is around it."""
        if class_of(query) == "InSubquery":
            exists = self._exists(query, negated=negated)
            if exists is None:
                return query
            query = exists
        return query.withNewPlan(self._any_row(query.plan()))

    def _any_row(self, plan: Any) -> Any:
        """Rows of which there are some where a plan gives some, and none where it gives none."""
        while True:
            kind = str(plan.nodeName())
            limits = kind in ("GlobalLimit", "LocalLimit") and int(plan.limitExpr().eval(None)) > 0
            groups = kind == "Aggregate" and plan.groupingExpressions().length() > 0
            if kind not in _ROWS_STAY and not limits and not groups:
                return plan
            plan = plan.child()

    def _exists(self, member: Any, *, negated: bool) -> Any:
        """``x IN (SELECT y ...)`` as EXISTS, where y is made of the columns around it; else None.

        Catalyst would join the sub-query with all values of these columns that there are.
        """
        outer = self._module(f"{_CATALYST}.expressions.SubExprUtils")
        plan = self._rule("CollapseProject").apply(member.query().plan())
        while str(plan.nodeName()) in ("Distinct", "SubqueryAlias", "View"):
            plan = plan.child()
        values = items(member.values())
        if str(plan.nodeName()) != "Project" or any(outer.containsOuter(x) for x in values):
            return None
        selected = [x.child() if class_of(x) == "Alias" else x for x in items(plan.projectList())]
        if not any(outer.containsOuter(x) for x in selected):
            return None
        parts = [self._expression("EqualTo", self._outer(x), y) for x, y in zip(values, selected, strict=True)]
        if negated:
            parts = [self._expression("Or", part, self._expression("IsNull", part)) for part in parts]
        plan = self._node("Filter", self._all(parts), plan.child())
        return self._subquery(f"{_CATALYST}.expressions.Exists", plan, outer.getOuterReferences(plan))

    def _outer(self, value: Any) -> Any:
        """An expression as a sub-query below it writes it."""
        if class_of(value) == "AttributeReference":
            return self._expression("OuterReference", value)
        below = items(value.children())
        return value.withNewChildren(self.seq([self._outer(child) for child in below])) if below else value

    def apart(self, join: Any, left: Sequence[Any], right: Sequence[Any]) -> Any:
        """An outer join in place of another one, without a condition, below a node that no rule sees through.

        Args:
            join: the other one.
            left: conditions to filter its left by.
            right: to filter its right by.
        """
        sides = [
            functools.reduce(lambda below, condition: self._node("Filter", condition, below), conditions, side)
            for conditions, side in ((left, join.left()), (right, join.right()))
        ]
        nothing = self._class("scala.Option").empty()
        with self._at(join):
            outer_join = self._node("Join", *sides, self._join_type("LeftOuter"), nothing, join.hint())
            return self._node("ReturnAnswer", outer_join)

    def attribute(self, value: Any, name: str) -> Any:
        """A new attribute of an expression's type."""
        return _alias(self.session, value, name).toAttribute()

    def only_where(self, condition: Any, value: Any) -> Any:
        """A value where a condition is true, null elsewhere."""
        return self._expression("If", condition, value, self.nothing(value.dataType()))

    def nothing(self, kind: Any) -> Any:
        """Null, of one of Catalyst's types."""
        return self._class(f"{_CATALYST}.expressions.Literal").create(None, kind)

    def as_type(self, value: Any, kind: Any) -> Any:
        """A value as another type, Catalyst's or Spark's in Python."""
        if isinstance(kind, st.DataType):
            kind = self._type(kind)
        return self._expression("Cast", value, kind, self._class("scala.Option").empty())

    def if_none_is_null(self, values: Sequence[Any]) -> Any:
        """True where none of some values is null, null elsewhere."""
        return self.only_where(self._all([self._expression("IsNotNull", value) for value in values]), self.true())

    def joined_text(self, values: Sequence[Any]) -> Any:
        """A text for some values, another one where one of them is not equal; null where one is null."""
        text = self._type(st.StringType())
        colon = self._class(f"{_CATALYST}.expressions.Literal").create(":", text)
        texts = [self.as_type(self._told_apart(value), text) for value in values]
        parts = [part for x in texts for part in (self.as_type(self._expression("Length", x), text), colon, x)]
        return self._expression("Concat", self.seq(parts))

    def _told_apart(self, value: Any) -> Any:
        """A value whose text is another one where it is not equal."""
        kind = str(value.dataType().typeName())
        if kind.startswith("timestamp"):  # an hour that clocks have twice
            return self._expression("PreciseTimestampConversion", value, value.dataType(), self._type(st.LongType()))
        if kind in ("double", "float"):  # 0.0 for -0.0
            return self._expression("Add", value, self.as_type(self.number(0), value.dataType()))
        return self._expression("Hex", value) if kind == "binary" else value

    def never_shifts(self, zone: str) -> bool:
        """Tells whether the clocks of a time zone are never set, so that each of its days has 24 hours."""
        return bool(self._class("java.time.ZoneId").of(zone).getRules().isFixedOffset())

    def _type(self, kind: st.DataType) -> Any:
        """The type of Catalyst's for one of Python's."""
        return self._class("org.apache.spark.sql.types.DataType").fromJson(kind.json())

    def unless_null(self, value: Any, result: Any, other: Any = None) -> Any:
        """A result where a value is not null; elsewhere another one of its type, or null."""
        there = self._expression("IsNotNull", value)
        if other is None:
            return self.only_where(there, result)
        return self._expression("If", there, result, self.as_type(other, result.dataType()))

    def true(self) -> Any:
        """The constant ``true`` of Catalyst's."""
        return self._class(f"{_CATALYST}.expressions.Literal").TrueLiteral()

    def number(self, value: int) -> Any:
        """A constant of Catalyst's, an integer."""
        return self._class(f"{_CATALYST}.expressions.Literal").create(value, self._type(st.IntegerType()))

    def field(self, value: Any, number: int) -> Any:
        """A field of a struct, by its number."""
        name = self._class("scala.Option").apply(list(value.dataType().fieldNames())[number])
        return self._expression("GetStructField", value, number, name)

    def struct(self, fields: Mapping[str, Any]) -> Any:
        """A struct of values by name."""
        literal = self._class(f"{_CATALYST}.expressions.Literal")
        text = self._type(st.StringType())
        parts = [part for name, value in fields.items() for part in (literal.create(name, text), value)]
        return self._expression("CreateNamedStruct", self.seq(parts))

    def exploded(self, values: Sequence[Any]) -> Any:
        """``explode(array(...))`` of some values."""
        return self._expression("Explode", self._array(values))

    def _array(self, values: Sequence[Any]) -> Any:
        return self._expression("CreateArray", self.seq(values), False)

    def one_of(self, values: Sequence[Any], name: str) -> Any:
        """A new attribute for any of some values, whose types differ at most in where there may be a null."""
        return self.attribute(self.nothing(self._array(values).dataType().elementType()), name)

    def numbered(self, count: Any) -> Any:
        """``explode(sequence(1, count))`` of a bigint."""
        first = self.as_type(self.number(1), count.dataType())
        return self._expression("Explode", self._expression("Sequence", first, count))

    def seq(self, items: Sequence[Any]) -> Any:
        """Java objects as a sequence of Scala."""
        return scala_seq(self.session, items)

    def collation_key(self, value: Any) -> Any:
        """Bytes that compare as a string does in its collation (Spark 4)."""
        return self._expression("CollationKey", value)

    def constant(self, value: Any) -> Any:
        """The value of an expression of constants; None for null, for any other, and for one that Spark fails with."""
        plan = _project(self.session, [_alias(self.session, value, "value")], self._node("OneRowRelation"))
        try:
            with self._active():
                return self._applied(plan, ("ReplaceExpressions",)).projectList().apply(0).child().eval(None)
        except (Py4JError, PySparkException):
            return None

    def null_of_nulls(self, value: Any) -> bool:
        """True if an expression is null where all of its columns are; False where only a query could tell."""
        attributes = value.references().toSeq()
        of = self._class(f"{_CATALYST}.expressions.package$AttributeSeq")(attributes)
        try:
            bound = self._class(f"{_CATALYST}.expressions.BindReferences").bindReference(value, of, False)
            row = self._expression("GenericInternalRow", attributes.length())
            with self._active():
                return bound.eval(row) is None
        except (Py4JError, PySparkException):
            return False

    def _applied(self, plan: Any, rules: tuple[str, ...]) -> Any:
        for rule in rules:
            plan = self._rule(rule).apply(plan)
        return plan

    def _module(self, name: str) -> Any:
        return getattr(self._class(f"{name}$"), "MODULE$")

    def _subquery(self, name: str, plan: Any, attributes: Any) -> Any:
        """A sub-query of Catalyst's, whose class has other fields in each version; what is not given is empty."""
        constructor = self._constructor(name)
        arguments, number = [], self._class(f"{_CATALYST}.expressions.NamedExpression").newExprId()
        empty = {"Seq": self.seq(()), "ExprId": number, "Option": self._class("scala.Option").empty()}
        for kind in constructor.getParameterTypes():
            short = str(kind.getSimpleName())
            arguments.append(plan if short == "LogicalPlan" else attributes if short == "Seq" else empty[short])
            if short == "Seq":
                attributes = empty["Seq"]
        return self._class(name)(*arguments)

    def _constructor(self, name: str) -> Any:
        loader = self._class("java.lang.Thread").currentThread().getContextClassLoader()
        return loader.loadClass(name).getConstructors()[0]

    def _rule(self, name: str) -> Any:
        for package in ("optimizer", "analysis"):
            with contextlib.suppress(Py4JError):
                return self._module(f"{_CATALYST}.{package}.{name}")
        raise NotBuiltError(f"this version of Spark has no rule {name} in its optimizer, which sql() needs")

    def _inline_ctes(self) -> Any:
        """The rule, which takes one, two or three options by version; the first is to inline always."""
        rule = f"{_CATALYST}.optimizer.InlineCTE"
        flags = [number == 0 for number in range(self._constructor(rule).getParameterCount())]
        return self._class(rule)(*flags)


def calc(
    df: DataFrame,
    known: Mapping[int, str],
    where: Sequence[Any],
    select: Sequence[tuple[str, Any]],
    row_kind: tuple[str, str] | None,
) -> DataFrame:
    """Rows filtered, then projected, by expressions that were resolved elsewhere.

    Args:
        df: the rows.
        known: by the id of an attribute that the expressions name, the column that it is.
        where: conditions.
        select: names and expressions; the name of a column of ``df`` is one.
        row_kind: the row-kind column, and what it is called above.
    """
    session, plan = df.sparkSession, df._jdf.queryExecution().analyzed()
    attributes = {str(x.name()): x for x in items(plan.output())}
    ids = java_class(session, f"{_CATALYST}.expressions.ExprId")
    named = [_alias(session, attributes[name], name, ids.apply(number)) for number, name in known.items()]
    plan = _project(session, [*attributes.values(), *named], plan)
    for condition in where:
        plan = java_class(session, f"{_CATALYST}.plans.logical.Filter")(condition, plan)
    columns = [(name, attributes[value] if isinstance(value, str) else value) for name, value in select]
    if row_kind is not None:
        columns.insert(0, (row_kind[1], attributes[row_kind[0]]))
    return frame_of(session, _project(session, [_alias(session, value, name) for name, value in columns], plan))


def like(df: DataFrame) -> DataFrame:
    """A DataFrame of the same columns, of which the optimizer does not know that it has no rows."""
    session = df.sparkSession
    kind = java_class(session, "org.apache.spark.sql.types.DataType").fromJson(df.schema.json())
    return DataFrame(session._jsparkSession.createDataFrame(session.sparkContext._jsc.emptyRDD(), kind), session)


def check_plan(df: DataFrame) -> None:
    """Plans a DataFrame, and has its code generated; nothing is run.

    Raises:
        PySparkException, Py4JJavaError: Spark could not run it.
    """
    waiting = [df._jdf.queryExecution().executedPlan()]
    while waiting:
        node = waiting.pop()
        if class_of(node) == "WholeStageCodegenExec":
            node.doCodeGen()
        waiting += items(node.children())


def _project(session: SparkSession, columns: Sequence[Any], plan: Any) -> Any:
    return java_class(session, f"{_CATALYST}.plans.logical.Project")(scala_seq(session, columns), plan)


def _alias(session: SparkSession, value: Any, name: str, number: Any = None) -> Any:
    """An expression with a name, and an id: a new one for None."""
    expressions, nothing = f"{_CATALYST}.expressions", scala_seq(session, ())
    if number is None:
        number = java_class(session, f"{expressions}.NamedExpression").newExprId()
    return java_class(session, f"{expressions}.Alias")(
        value, name, number, nothing, java_class(session, "scala.Option").empty(), nothing
    )


def _refused(sql: str, error: PySparkException | Py4JJavaError) -> SqlError:
    """One of Spark's errors as ours."""
    origin = getattr(error, "_origin", None)
    line, column = position(origin) if origin is not None and hasattr(origin, "line") else (1, 1)
    return SqlError(f"Spark does not take this: {without_generated_names(message_of(error))}", sql, line, column)


def message_of(error: PySparkException | Py4JJavaError) -> str:
    """Spark's message, without the plan that it prints after that."""
    whole = str(error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else error)
    text = whole.strip().split(" SQLSTATE", 1)[0].split("; line", 1)[0].splitlines()[0]
    return re.sub(r"\(line \d+, pos \d+\)$", "", text).rstrip(".; ")
