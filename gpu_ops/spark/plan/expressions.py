"""Catalyst's expressions as trees of `gpu_ops.conditions.expressions`, where these mean the same.

So tasks filter rows and compute columns while they are Arrow's. What is made of literals alone is folded: it is the
same in every micro-batch. Types are those that Spark's analyser has given everything, casts included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from gpu_ops.conditions import Expression, nodes_of
from gpu_ops.conditions.builder import Builder, is_null, logic
from gpu_ops.conditions.expressions import (
    BOOL,
    Call,
    Column,
    Literal,
    Node,
    Op,
    TypeProblemError,
    as_decimal,
    convert,
    kind,
)
from gpu_ops.query.catalyst import arrow_type_of, id_of, items
from gpu_ops.spark.tasks.rows import ROWS

_COMPARISONS: Final = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}
_ARITHMETIC: Final = {"Add": "+", "Subtract": "-", "Multiply": "*", "Divide": "/", "Remainder": "%"}
_TYPES: Final = {
    "boolean": BOOL,
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
"""By Spark's name the types whose values mean the same to both; text in a collation has another name."""

_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_DAY: Final = 86_400_000_000
"""In microseconds."""

_MOST_VALUES: Final = 1000
"""Of an ``IN``: each costs the driver some calls."""


class OnlySparkError(Exception):
    """Something that only Spark evaluates; the message is its text."""


Known = Mapping[int, Callable[[], Node]]
"""By the ids of attributes what they are: columns, or what a projection below computes of these.

Raises:
    OnlySparkError: only Spark computes it.
"""


def column(attribute: Any) -> Node:
    """The column of rows that an attribute is."""
    return Column(ROWS, str(attribute.name()), _type(attribute) or arrow_type_of(attribute))


def expression(java: Any, known: Known, builder: Builder, text: str) -> Expression:
    """An expression over rows.

    Args:
        java: Catalyst's, analysed.
        known: the attributes that it names.
        builder: of these, too.
        text: what errors call it.

    Raises:
        OnlySparkError: it means something else here, or nothing.
    """
    root = Reader(known, builder).node(java)
    fails = builder.failing(root)
    used = dict.fromkeys(node.name for node in nodes_of(root, fails) if isinstance(node, Column))
    return Expression(text, root, {ROWS: tuple(used)}, fails)


class Reader:
    """Reads expressions; arguments as of `expression`."""

    def __init__(self, known: Known, builder: Builder) -> None:
        self._known, self._builder = known, builder

    def node(self, java: Any) -> Node:
        """The tree of one.

        Raises:
            OnlySparkError: it means something else here, or nothing.
        """
        try:
            found = self._node(java)
        except (TypeProblemError, Py4JError, PySparkException) as error:
            # Spark's own refusal of a constant, or another version of Spark has other classes
            raise OnlySparkError(str(java.sql())) from error
        if found is None:
            raise OnlySparkError(str(java.sql()))
        return found

    def _node(self, java: Any) -> Node | None:
        """The tree; None where there is none."""
        name = str(java.nodeName())
        if name == "AttributeReference":
            return self._known[id_of(java)]()
        if name in ("IsNull", "IsNotNull"):
            null = is_null(self.node(java.child()))
            return null if name == "IsNull" else logic(Op.NOT, null)
        wanted = _type(java)
        if wanted is None:
            return None
        if java.foldable() and all(str(leaf.nodeName()) == "Literal" for leaf in items(java.collectLeaves())):
            return _folded(java, wanted)
        made = self._made(name, java, wanted)
        return made if made is not None and made.type == wanted else None

    def _made(self, name: str, java: Any, wanted: pa.DataType) -> Node | None:
        builder = self._builder
        if name in ("And", "Or"):
            return logic(Op(name.lower()), self._value(java.left()), self._value(java.right()))
        if name == "Not":
            return logic(Op.NOT, self._value(java.child()))
        if name in _COMPARISONS:
            return builder.compare(_COMPARISONS[name], self._value(java.left()), self._value(java.right()))
        if name == "Between":
            value, least, most = (self._value(java.productElement(place)) for place in range(3))
            return logic(Op.AND, builder.compare(">=", value, least), builder.compare("<=", value, most))
        if name == "In":
            return self._among(self._value(java.value()), java.list())
        if name == "Like":
            return self._like(java)
        if name in _ARITHMETIC:
            return self._calculated(name, java)
        if name in ("TimestampAddInterval", "TimeAdd"):
            return self._later(java)
        if name == "UnaryMinus" and bool(java.failOnError()) == builder.ansi:
            return builder.negative(self._value(java.child()))
        if name == "If":
            return builder.case(
                [(self._value(java.predicate()), self._value(java.trueValue()))], self._value(java.falseValue())
            )
        if name == "CaseWhen":
            branches = [(self._value(x._1()), self._value(x._2())) for x in items(java.branches())]
            last = java.elseValue()
            return builder.case(branches, self._value(last.get()) if last.isDefined() else Literal(None, pa.null()))
        if name == "Coalesce":
            return builder.coalesce([self._value(x) for x in items(java.children())])
        if name == "Cast":
            return _widened(self._value(java.child()), wanted)
        return self._value(java.replacement())  # what Spark will evaluate in its place, if it is such a one

    def _value(self, java: Any) -> Node:
        """What is compared or calculated with: a type of Spark's that means the same here."""
        if _type(java) is None:
            raise OnlySparkError(str(java.sql()))
        return self.node(java)

    def _calculated(self, name: str, java: Any) -> Node | None:
        left, right = self._value(java.left()), self._value(java.right())
        if kind(left.type) not in ("integer", "float", "decimal") or kind(left.type) != kind(right.type):
            return None
        if kind(left.type) != "decimal" and str(java.evalMode()) != ("ANSI" if self._builder.ansi else "LEGACY"):
            return None
        return self._builder.arithmetic(_ARITHMETIC[name], left, right)

    def _later(self, java: Any) -> Node | None:
        """A time and an interval of less than a day: whole days depend on the zone."""
        interval = java.interval()
        if not str(interval.dataType().sql()).lower().startswith("interval") or not interval.foldable():
            return None
        moved = interval.eval(None)
        if not isinstance(moved, int) or abs(moved) >= _DAY:
            return None
        start = self._value(java.start())
        return Call(Op.ADD, (start, Literal(moved, pa.duration("us"))), start.type)

    def _among(self, value: Node, listed: Any) -> Node | None:
        if not 0 < listed.length() <= _MOST_VALUES:
            return None
        members = [self._value(x) for x in items(listed)]
        literals = [x for x in members if isinstance(x, Literal) and x.value is not None and x.type == value.type]
        if kind(value.type) == "float" or len(literals) < len(members):
            return self._builder.is_in(value, members)
        return Call(Op.IN, (value, *literals), BOOL)

    def _like(self, java: Any) -> Node | None:
        value, pattern = self._value(java.left()), self._value(java.right())
        if not isinstance(pattern, Literal) or not isinstance(pattern.value, str) or str(java.escapeChar()) != "\\":
            return None
        if re.sub(r"\\[\\%_]", "", pattern.value).count("\\"):  # Spark refuses these when it evaluates them
            return None
        return Call(Op.LIKE, (value, pattern), BOOL)


def _type(java: Any) -> pa.DataType | None:
    """The type of an expression, where its values mean the same here."""
    name = str(java.dataType().sql()).lower()
    exact = _DECIMAL.fullmatch(name)
    return pa.decimal128(*map(int, exact.groups())) if exact else _TYPES.get(name)


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
    """A cast that loses nothing, or to the nearest double of an integer."""
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
