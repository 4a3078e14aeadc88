"""Translates Spark filters and projections to Arrow expressions, where both give the same result.

Catalyst's expressions become trees of `gpu_ops.conditions.expressions`, where these mean the same. So tasks filter rows
and compute columns of Arrow batches. Expressions over literals are folded, as they are the same in every micro-batch.
Types are those that Spark's analyser has assigned, casts included.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.conditions import Expression, nodes_of
from gpu_ops.conditions.expressions import (
    BOOL,
    STRING,
    Builder,
    Call,
    ColumnRef,
    Literal,
    Node,
    Op,
    TypeProblemError,
    as_decimal,
    convert,
    failing,
    is_null,
    kind,
    logic,
)
from gpu_ops.descriptions.projection import ROWS, Projection
from gpu_ops.query.catalyst import ansi_mode, arrow_type_of, id_of, items
from gpu_ops.query.expressions import STRUCTURES, Expr, TreeReader
from gpu_ops.spark.driver.queries import JoinPlan, analyzed
from gpu_ops.spark.plan.column_metadata import hides_metrics, observed_join
from gpu_ops.spark_types import arrow_type

_ALIKE: Final = (
    st.BooleanType, st.ByteType, st.ShortType, st.IntegerType, st.LongType, st.FloatType, st.DoubleType,
    st.StringType, st.BinaryType, st.DateType, st.TimestampType, st.TimestampNTZType,
)  # fmt: skip
_TYPES: Final = {kind().simpleString(): arrow_type(kind()) for kind in _ALIKE}
"""The types whose values mean the same to Spark and Arrow, by Spark's name; text in a collation has another name."""

_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_DAY: Final = 86_400_000_000
"""A day in microseconds."""

_NTZ: Final = pa.timestamp("us")

_TRIMS: Final = {"StringTrim": "BOTH", "StringTrimLeft": "LEADING", "StringTrimRight": "TRAILING"}
_TEXTS: Final = {
    "Concat", "Length", "Substring", "StringReplace", "Contains", "StartsWith", "EndsWith", *_TRIMS,
}  # fmt: skip
"""Functions of text, by the names of their classes in Spark."""

_PARTS: Final = {
    "Year": "YEAR", "Quarter": "QUARTER", "Month": "MONTH", "WeekOfYear": "WEEK", "DayOfMonth": "DAY",
    "DayOfYear": "DAYOFYEAR", "DayOfWeek": "DAYOFWEEK", "WeekDay": "WEEKDAY", "Hour": "HOUR", "Minute": "MINUTE",
    "Second": "SECOND",
}  # fmt: skip
_TIMES: Final = {"TruncDate", "TruncTimestamp", "DateFormatClass", *_PARTS}
"""Functions of dates and timestamps."""
_ZONED: Final = {"Hour", "Minute", "Second", "TruncTimestamp", "DateFormatClass"}
"""Those that go by the session's zone."""

_STARTS_OF_DATES: Final = ("YEAR", "QUARTER", "MONTH", "WEEK")
_STARTS: Final = {
    **{unit: unit for unit in (*_STARTS_OF_DATES, "DAY", "HOUR", "MINUTE", "SECOND")},
    "YYYY": "YEAR", "YY": "YEAR", "MON": "MONTH", "MM": "MONTH", "DD": "DAY",
}  # fmt: skip
"""What ``trunc`` and ``date_trunc`` go to the start of, by their words; `DateTimeUtils.parseTruncLevel`."""

_FORMAT: Final = re.compile(r"(yyyy|MM|dd|HH|mm|ss|[-/:. ])+")

_MOST_VALUES: Final = 1000
"""The most values of an ``IN``, as each costs the driver some calls."""


class OnlySparkError(Exception):
    """Raised for an expression that only Spark evaluates; the message is its text."""


Known = Mapping[int, Callable[[], Node]]
"""The expression of each attribute, by its id: a column, or an expression that a projection below computes.

Raises:
    OnlySparkError: only Spark computes it.
"""


def _column(attribute: Any) -> Node:
    """The column of the rows that an attribute stands for."""
    return ColumnRef(ROWS, str(attribute.name()), _type(attribute) or arrow_type_of(attribute))


def _expression(java: Any, known: Known, builder: Builder, text: str) -> Expression:
    """Translates one of Catalyst's expressions to an expression over Arrow rows.

    Args:
        java: the analysed Catalyst expression.
        known: the attributes that it names.
        builder: the builder of expressions, which those of ``known`` share.
        text: the expression's text, for errors.

    Raises:
        OnlySparkError: it has another meaning here, or none.
    """
    root = _RowReader(known, builder).of(java)
    fails = failing(root) if builder.ansi else None
    used = dict.fromkeys(node.name for node in nodes_of(root, fails) if isinstance(node, ColumnRef))
    return Expression(text, root, {ROWS: tuple(used)}, fails)


class _Analysed(Expr):
    """A Catalyst expression whose properties are read from the JVM."""

    def __init__(self, java: Any) -> None:
        """Wraps an analysed Catalyst expression.

        Args:
            java: the expression.
        """
        self._java = java

    @functools.cached_property
    def kind(self) -> str:
        """The name of the expression's class."""
        return str(self._java.nodeName())

    @property
    def java(self) -> Any:
        """The expression in the JVM."""
        return self._java

    @functools.cached_property
    def args(self) -> tuple[Expr, ...]:
        """The operands of the expression."""
        return tuple(map(_Analysed, items(self._java.children())))


class _RowReader(TreeReader):
    """Translates Catalyst expressions over rows; its arguments are those of `_expression`."""

    def __init__(self, known: Known, builder: Builder) -> None:
        super().__init__(builder)
        self._known, self._common = known, dict[str, Node]()

    def of(self, java: Any) -> Node:
        """Translates an expression of the JVM's."""
        return self.node(_Analysed(java))

    def node(self, expr: Expr) -> Node:
        """Translates an expression, or refuses it.

        Raises:
            OnlySparkError: it has another meaning here, or none.
        """
        try:
            found = self._node(expr)
        except (TypeProblemError, Py4JError, PySparkException) as error:
            # Spark's own refusal of a constant, or another version of Spark has other classes
            raise OnlySparkError(str(expr.java.sql())) from error
        if found is None:
            raise OnlySparkError(str(expr.java.sql()))
        return found

    def _node(self, expr: Expr) -> Node | None:
        """Translates an expression; None where that is impossible."""
        java = expr.java
        if expr.kind == "AttributeReference":
            return self._known[id_of(java)]()
        if expr.kind in ("IsNull", "IsNotNull"):
            return self.structure(expr)
        wanted = _type(java)
        if wanted is None or (expr.kind == "In" and java.list().length() > _MOST_VALUES):
            return None
        if java.foldable() and all(str(leaf.nodeName()) == "Literal" for leaf in items(java.collectLeaves())):
            return _folded(java, wanted)
        made = self._translated(expr, wanted)
        return made if made is not None and made.type == wanted else None

    def _translated(self, expr: Expr, wanted: pa.DataType) -> Node | None:
        java, builder = expr.java, self.builder
        match expr.kind:
            case "Between":
                value, least, most = (self.value(_Analysed(java.productElement(place))) for place in range(3))
                return logic(Op.AND, builder.compare(">=", value, least), builder.compare("<=", value, most))
            case "Like":
                return self._like(expr)
            case "TimestampAddInterval" | "TimeAdd":
                return self._later(java)
            case "UnaryMinus" if bool(java.failOnError()) == builder.ansi:
                return builder.negative(self.value(expr.args[0]))
            case "Cast":
                return self._cast(expr, wanted)
            case "Greatest" | "Least":
                return functools.reduce(functools.partial(self._further, expr.kind), map(self.value, expr.args))
            case "Abs" if bool(java.failOnError()) == builder.ansi:
                return self._absolute(self.value(expr.args[0]))
            case "With":  # of what stands in it several times, as the operand of nullif() does
                for one in items(java.defs()):
                    self._common[str(one.id())] = self.value(_Analysed(one.child()))
                return self.value(_Analysed(java.child()))
            case "CommonExpressionRef":
                return self._common[str(java.id())]
        if expr.kind in _TEXTS:
            return self._of_text(expr, wanted)
        if expr.kind in _TIMES:
            return self._of_time(expr, wanted)
        if expr.kind in STRUCTURES:
            return self.structure(expr)
        return self.value(_Analysed(java.replacement()))  # what Spark will evaluate in its place, if it is such a one

    def value(self, expr: Expr) -> Node:
        """Translates an operand, whose type must mean the same here."""
        if _type(expr.java) is None:
            raise OnlySparkError(str(expr.java.sql()))
        return self.node(expr)

    def calculated(self, expr: Expr, operator: str, left: Node, right: Node) -> Node | None:
        """Translates arithmetic of two numbers of one kind."""
        if kind(left.type) not in ("integer", "float", "decimal") or kind(left.type) != kind(right.type):
            return None
        if kind(left.type) != "decimal" and str(expr.java.evalMode()) != ("ANSI" if self.builder.ansi else "LEGACY"):
            return None
        return self.builder.arithmetic(operator, left, right)

    def _later(self, java: Any) -> Node | None:
        """Translates the sum of a time and an interval of less than a day; whole days depend on the zone."""
        interval = java.interval()
        if not str(interval.dataType().sql()).lower().startswith("interval") or not interval.foldable():
            return None
        moved = interval.eval(None)
        if not isinstance(moved, int) or abs(moved) >= _DAY:
            return None
        start = self.value(_Analysed(java.start()))
        return Call(Op.ADD, (start, Literal(moved, pa.duration("us"))), start.type)

    def among(self, value: Node, members: list[Node]) -> Node | None:
        """Translates IN with a list, which is looked up in one go where that is possible."""
        literals = [x for x in members if isinstance(x, Literal) and x.value is not None and x.type == value.type]
        if kind(value.type) == "float" or len(literals) < len(members):
            return self.builder.is_in(value, members)
        return Call(Op.IN, (value, *literals), BOOL)

    def _cast(self, expr: Expr, wanted: pa.DataType) -> Node | None:
        """Translates a cast that loses nothing, or only what Spark does."""
        node = self.value(expr.args[0])
        own, new = kind(node.type), kind(wanted)
        if new == "string" and own in ("integer", "boolean"):
            return Call(Op.TEXT, (node,), wanted)
        if new == "string" and own == "date":
            return Call(Op.FORMAT, (node, _text("yyyy-MM-dd")), wanted)
        both = {own, new}
        if both == {"date", "timestamp_ntz"} or (both == {"date", "timestamp"} and _in_utc(expr.java)):
            return Call(Op.TRUNC, (node, _text("DAY")), wanted)
        return _widened(node, wanted)

    def _further(self, which: str, found: Node, node: Node) -> Node:
        """The greater, or lesser, of two values; the first one of two alike, a null is none."""
        builder = self.builder
        beyond = builder.compare("<", *((found, node) if which == "Greatest" else (node, found)))
        taken = logic(Op.AND, logic(Op.NOT, is_null(node)), logic(Op.OR, is_null(found), beyond))
        return builder.case([(taken, node)], found)

    def _absolute(self, node: Node) -> Node:
        if kind(node.type) != "float":
            zero = convert(Literal(0, pa.int8()), node.type)
            return self.builder.case([(self.builder.compare("<", node, zero), self.builder.negative(node))], node)
        zero = Literal(0.0, node.type)
        below = self.builder.compare("<=", node, zero)  # of -0.0, too
        return Call(Op.CASE, (below, Call(Op.SUB, (zero, node), node.type), node), node.type)

    def _of_text(self, expr: Expr, wanted: pa.DataType) -> Node | None:
        """Translates a function of text, whose other arguments are constants but for those of ``concat``."""
        name, (value, *args) = expr.kind, map(self.value, expr.args)
        if name == "Concat":
            return Call(Op.CONCAT, (value, *args), wanted) if wanted == STRING else None
        constants = [arg.value for arg in args if isinstance(arg, Literal) and arg.value is not None]
        if value.type != STRING or len(constants) < len(args):
            return None
        match name, constants:
            case "Length", []:
                return Call(Op.LENGTH, (value,), wanted)
            case "Substring", [_, _]:
                return Call(Op.SUBSTRING, (value, *args), wanted)
            case (("StringTrim" | "StringTrimLeft" | "StringTrimRight"), _):
                return Call(Op.TRIM, (value, args[0] if args else _text(" "), _text(_TRIMS[name])), wanted)
            case "StringReplace", [sought, _]:
                return Call(Op.REPLACE, (value, *args), wanted) if sought else value
            case (("Contains" | "StartsWith" | "EndsWith"), [str(sought)]):
                before, behind = ("" if name == "StartsWith" else "%"), ("" if name == "EndsWith" else "%")
                pattern = before + re.sub(r"([\\%_])", r"\\\1", sought) + behind
                return Call(Op.LIKE, (value, _text(pattern)), BOOL)
        return None

    def _of_time(self, expr: Expr, wanted: pa.DataType) -> Node | None:
        """Translates a part of a date or timestamp, the start of a year and so on, or a format."""
        name, utc = expr.kind, expr.kind not in _ZONED or _in_utc(expr.java)
        if name in _PARTS:
            node = self.value(expr.args[0])
            return Call(Op.PART, (node, _text(_PARTS[name])), wanted) if utc or node.type == _NTZ else None
        of, how = reversed(expr.args) if name == "TruncTimestamp" else expr.args
        if name in _ZONED and of.kind == "Cast" and _type(of.args[0].java) == _NTZ:
            of = of.args[0]  # in UTC it is the same
        node, word = self.value(of), self.value(how)
        if not utc or not isinstance(word, Literal) or not isinstance(word.value, str):
            return None
        if name == "DateFormatClass":
            formatter = expr.java.formatterOption().get().getClass().getSimpleName()
            known = _FORMAT.fullmatch(word.value) and "Legacy" not in str(formatter)
            return Call(Op.FORMAT, (node, word), wanted) if known else None
        unit = _STARTS.get(word.value.upper())
        if unit is None or (name == "TruncDate" and unit not in _STARTS_OF_DATES):
            return None
        return Call(Op.TRUNC, (node, _text(unit)), wanted)

    def _like(self, expr: Expr) -> Node | None:
        value, pattern = map(self.value, expr.args)
        if not isinstance(pattern, Literal) or not isinstance(pattern.value, str):
            return None
        # Spark refuses other escapes when it evaluates them
        if str(expr.java.escapeChar()) != "\\" or re.sub(r"\\[\\%_]", "", pattern.value).count("\\"):
            return None
        return Call(Op.LIKE, (value, pattern), BOOL)


def _type(java: Any) -> pa.DataType | None:
    """The Arrow type of an expression, where its values mean the same here; else None."""
    name = str(java.dataType().sql()).lower()
    exact = _DECIMAL.fullmatch(name)
    return pa.decimal128(*map(int, exact.groups())) if exact else _TYPES.get(name)


def _text(value: str) -> Literal:
    return Literal(value, STRING)


def _in_utc(java: Any) -> bool:
    """True for an expression whose zone is UTC by whatever name."""
    return str(java.zoneId().normalized().toString()) == "Z"


def _folded(java: Any, wanted: pa.DataType) -> Literal | None:
    value = java.eval(None)
    if value is None:
        return Literal(None, wanted)
    match kind(wanted):
        case "string":
            value = str(value.toString())
        case "decimal":
            value = Decimal(value.toJavaBigDecimal())
        case "binary":
            return None
    return Literal(value, wanted)


def _widened(node: Node, wanted: pa.DataType) -> Node | None:
    """Translates a cast that loses nothing, or goes from an integer to the nearest double; else None."""
    own, new = kind(node.type), kind(wanted)
    if node.type == wanted:
        return node
    if own == new == "integer":
        fits = node.type.bit_width <= wanted.bit_width
    elif new == "decimal" and own in ("integer", "decimal"):
        exact = as_decimal(node)
        fits = wanted.precision - wanted.scale >= exact.precision - exact.scale and wanted.scale >= exact.scale
    else:
        fits = new == "float" and (own == "integer" or (own == "float" and wanted == pa.float64()))
    return convert(node, wanted) if fits else None


class Selection(NamedTuple):
    """The filter and projection between a DataFrame and a node of its logical plan."""

    node: Any
    projection: Projection


def selection(df: DataFrame, ends: Callable[[Any], bool]) -> Selection | str:
    """Translates all filters and projections down to a node; a reason in words where Arrow cannot do the same.

    Args:
        df: a DataFrame.
        ends: returns True for the node that ends the search.
    """
    node = top = analyzed(df)
    above = []
    while not ends(node):
        name = str(node.nodeName())
        if hides_metrics(node):
            node = observed_join(node.children().head())
            continue
        if name in ("Project", "Filter"):
            above.append(node)
        elif name != "SubqueryAlias":  # not even a watermark: Spark's operators behind the join may go by it
            return f"{name} stands between"
        node = node.children().head()
    builder = Builder(ansi=ansi_mode(df.sparkSession))
    known: Known = {id_of(x): functools.cache(functools.partial(_column, x)) for x in items(node.output())}
    texts: dict[int, str] = {}
    where = []
    try:
        for one in reversed(above):
            if str(one.nodeName()) == "Filter":
                where.append(_expression(one.condition(), known, builder, str(one.condition().sql())))
            else:
                reader = _RowReader(known, builder)
                made = {id_of(x): x.child() if str(x.nodeName()) == "Alias" else x for x in items(one.projectList())}
                known = {number: functools.cache(functools.partial(reader.of, x)) for number, x in made.items()}
                texts = {number: texts.get(id_of(x), "") if _moved(x) else str(x.sql()) for number, x in made.items()}
        columns = [_expression(x, known, builder, texts.get(id_of(x), "")) for x in items(top.output())]
    except OnlySparkError as error:
        return f"only Spark evaluates {error}"
    return Selection(node, Projection(tuple(columns), tuple(where)))


def _moved(expression: Any) -> bool:
    return str(expression.nodeName()) == "AttributeReference"


def selection_of_join(df: DataFrame) -> Selection | str:
    """Translates all filters and projections of a DataFrame down to the join below it; see `selection`."""
    return selection(df, lambda node: JoinPlan.of(node) is not None)
