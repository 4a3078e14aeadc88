"""Catalyst's trees, as their JSON has them: of a plan's nodes and of expressions, with a way back to the JVM's own.

One call fetches a whole plan; what is asked of the JVM after that, it is asked only where it is needed. `TreeReader`
makes trees of `gpu_ops.conditions.expressions` of expressions, `JoinReader` those that operators of joins evaluate.
"""

from __future__ import annotations

import abc
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from gpu_ops.conditions import backquoted
from gpu_ops.conditions.expressions import BOOL, INT, STRING, Builder, Literal, Node, Op, is_null, logic
from gpu_ops.query.places import words_of

T = TypeVar("T")
Java = Callable[[], Any]
"""Gives the JVM's object."""


class QueryColumn:
    """A column of an input, or one that the query computes. Compared by identity.

    Attributes:
        label: its own name.
        owner: the alias of its table, or empty.
        words: gives what the query says for one that it computes without a name; None of one that has a name.
        nullable: whether a null can be in it, as far as its input is known.
        event_time: whether it is the event time of its input.
    """

    def __init__(
        self,
        label: str,
        owner: str,
        type_of: Callable[[], pa.DataType],
        *,
        words: Callable[[], str] | None = None,
        nullable: bool = True,
        event_time: bool = False,
    ) -> None:
        self.words = words
        self.label, self.owner, self.nullable, self.event_time = label, owner, nullable, event_time
        self._type_of = type_of

    @functools.cached_property
    def type(self) -> pa.DataType:
        """The Arrow type of the column."""
        return self._type_of()

    @property
    def name(self) -> str:
        """Its own name behind that of its table; the same in each run of a query."""
        return f"{self.owner}.{self.label}" if self.owner else self.label

    def __str__(self) -> str:
        """The user's word for the column."""
        if self.words is not None:
            return self.words()
        return self.label if self.owner.startswith("__auto_generated") else self.name


class Tree:
    """A node of a plan, or of an expression.

    Attributes:
        kind: the name of its class.
        fields: what else its JSON has.
        args: its children.
    """

    def __init__(self, fields: Mapping[str, Any], args: Iterable[Tree] = (), java: Java | None = None) -> None:
        """Args: its JSON; its children; what gives the JVM's object, of a root."""
        self.kind = str(fields["class"]).rsplit(".", 1)[-1]
        self.fields, self.args, self._java = fields, list(args), java
        self._above: tuple[Tree, int] | None = None
        self._known: Any = None

    def add(self, child: Tree) -> None:
        """Appends a child to the node."""
        child._above = self, len(self.args)
        self.args.append(child)

    @property
    def above(self) -> Tree | None:
        """The node that it is a child of."""
        return None if self._above is None else self._above[0]

    @property
    def java(self) -> Any:
        """The JVM's object, from the nearest node whose object is known; no recursion, as a plan may be deep."""
        path: list[Tree] = []
        node = self
        while node._known is None and node._above is not None:
            path.append(node)
            node = node._above[0]
        if node._known is None:
            assert node._java is not None
            node._known = node._java()
        for below in reversed(path):
            assert below._above is not None
            below._known = below._above[0]._known.children().apply(below._above[1])
        return self._known

    def walk(self) -> Iterator[Tree]:
        """This node and all below it, each before what is below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.args)


def tree(items: Sequence[Mapping[str, Any]], java: Java) -> Tree:
    """The tree of a list in which each node stands before its children."""
    root = Tree(items[0], java=java)
    open_: list[tuple[Tree, int]] = [(root, int(items[0]["num-children"]))]
    for item in items[1:]:
        while not open_[-1][1]:
            open_.pop()
        above, missing = open_.pop()
        open_.append((above, missing - 1))
        node = Tree(item)
        above.add(node)
        open_.append((node, int(item["num-children"])))
    return root


def leaves(root: T, parts: Callable[[T], Sequence[T] | None]) -> list[T]:
    """The operands of a tree of like nodes, in order; ``parts`` gives those of such a node, None for any other."""
    operands, waiting = list[T](), [root]
    while waiting:
        node = waiting.pop()
        below = parts(node)
        if below is None:
            operands.append(node)
        else:
            waiting += reversed(below)
    return operands


class Expr:
    """An expression whose attributes are columns.

    Attributes:
        tree: Catalyst's.
        of: the columns by the ids of attributes.
    """

    def __init__(self, node: Tree, of: Mapping[int, QueryColumn]) -> None:
        self.tree, self.of = node, of

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.tree.kind

    @property
    def java(self) -> Any:
        """The JVM's object of the expression."""
        return self.tree.java

    @functools.cached_property
    def args(self) -> tuple[Expr, ...]:
        """The operands of the expression."""
        return tuple(Expr(arg, self.of) for arg in self.tree.args)

    @functools.cached_property
    def ids(self) -> dict[int, QueryColumn]:
        """The columns in it by the ids it calls them."""
        numbers = (number_of(node) for node in self.tree.walk() if node.kind == "AttributeReference")
        return {number: self.of[number] for number in numbers}

    @property
    def columns(self) -> dict[QueryColumn, None]:
        """The columns in it, in order."""
        return dict.fromkeys(self.ids.values())

    @property
    def column(self) -> QueryColumn | None:
        """The column, if it is nothing else."""
        return self.of[number_of(self.tree)] if self.kind == "AttributeReference" else None

    @property
    def plain(self) -> Expr:
        """The expression without casts that change nothing."""
        return self.args[0].plain if self.kind == "Cast" and is_no_op(self) else self

    @functools.cached_property
    def times(self) -> frozenset[QueryColumn]:
        """The event times in it; a column that is CAST is none any more."""
        if self.column is not None:
            return frozenset({self.column} if self.column.event_time else ())
        return frozenset(
            column for arg in self.args if not (self.kind == "Cast" and arg.column) for column in arg.times
        )

    @functools.cached_property
    def window(self) -> TimeWindow | None:
        """The window over time, or the sliding ones, that it computes; None for any other."""
        if self.kind not in ("CreateNamedStruct", "Explode"):
            return None
        nodes = [node for node in self.tree.walk() if node.kind == "PreciseTimestampConversion"]
        remainders = [node for node in self.tree.walk() if node.kind == "Remainder"]
        if not nodes or not remainders:
            return None
        ends = self.tree.args[0].args[0].args[3] if self.kind == "Explode" else self.tree.args[3]
        sizes = [node.args[1] for node in ends.walk() if node.kind == "Add"]
        shifted, slide = remainders[0].args
        size, slide_us, offset = (int(node.fields["value"]) for node in (sizes[0], slide, shifted.args[1]))
        times = [Expr(node.args[0], self.of).column for node in nodes]
        return TimeWindow(next((time for time in times if time is not None), None), size, slide_us, offset)

    def conjuncts(self) -> list[Expr]:
        """The conditions that the expression joins by AND."""
        return leaves(self, lambda part: part.args if part.kind == "And" else None)

    def text(self, call: Callable[[QueryColumn], str] = str) -> str:
        """SQL text, near enough to read it; each column as ``call`` names it."""
        return _text(self, call)


class TimeWindow(NamedTuple):
    """Windows over time, as Spark's ``window(time, size, slide, offset)`` makes them.

    Attributes:
        time: the column; None for an expression.
        size: of each, in microseconds.
        slide: from one's start to the next one's, in microseconds.
        offset: a start, in microseconds since the epoch.
    """

    time: QueryColumn | None
    size: int
    slide: int
    offset: int

    def text(self, call: Callable[[QueryColumn], str]) -> str:
        """SQL text, near enough to read it."""
        times = [] if self.time is None else [call(self.time)]
        widths = dict.fromkeys((self.size, self.slide))
        return f"window({', '.join([*times, *(f'{us / 1e6:g} s' for us in widths)])})"


def number_of(node: Tree) -> int:
    """The id of an attribute, or of an alias."""
    return int(node.fields["exprId"]["id"])


def is_no_op(cast: Expr) -> bool:
    """True for a CAST to the type that its operand has: Catalyst adds such, too."""
    arg = cast.args[0]
    operand_type = arg.tree.fields.get("dataType")
    return operand_type is not None and operand_type == cast.tree.fields["dataType"]


def widens_literal(expr: Expr) -> bool:
    """True for the CAST of an integer that reads the same without it."""
    if expr.kind != "Cast" or expr.args[0].kind != "Literal":
        return False
    return str(expr.args[0].tree.fields["dataType"]) in _TYPES and expr.tree.fields["dataType"] in (*_TYPES, "double")


# --- text ------------------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_WORDS: Final = {
    "AND", "ANTI", "ANY", "AS", "BETWEEN", "BOTH", "BY", "CASE", "CAST", "CROSS", "CURRENT_DATE", "CURRENT_TIME",
    "CURRENT_TIMESTAMP", "CURRENT_USER", "DATE", "DISTINCT", "ELSE", "END", "ESCAPE", "EXCEPT", "EXISTS", "FALSE",
    "FILTER", "FOR", "FROM", "FULL", "GROUP", "HAVING", "IN", "INNER", "INTERSECT", "INTERVAL", "INTO", "IS", "JOIN",
    "LATERAL", "LEADING", "LEFT", "LIKE", "LIMIT", "MINUS", "NATURAL", "NOT", "NULL", "ON", "OR", "ORDER", "OUTER",
    "OVER", "REFERENCES", "RIGHT", "RLIKE", "SELECT", "SEMI", "SOME", "TABLE", "THEN", "TIMESTAMP", "TIMESTAMP_LTZ",
    "TIMESTAMP_NTZ", "TRAILING", "TRUE", "UNION", "UNIQUE", "UNKNOWN", "USER", "USING", "WHEN", "WHERE", "WINDOW",
    "WITH",
}  # fmt: skip


def quoted(name: str) -> str:
    """A name as SQL text, in backticks where it needs them."""
    if _NAME.fullmatch(name) and name.isascii() and name.upper() not in _WORDS:
        return name
    return backquoted(name)


_OPERATORS: Final = {
    "And": "AND", "Or": "OR", "EqualTo": "=", "EqualNullSafe": "<=>", "LessThan": "<", "LessThanOrEqual": "<=",
    "GreaterThan": ">", "GreaterThanOrEqual": ">=", "Add": "+", "Subtract": "-", "Multiply": "*", "Divide": "/",
    "Remainder": "%", "TimestampAddInterval": "+", "TimeAdd": "+", "SubtractTimestamps": "-", "DateAdd": "+",
    "BitwiseAnd": "&",
}  # fmt: skip
_TYPES: Final = {"long": "BIGINT", "integer": "INT", "short": "SMALLINT", "byte": "TINYINT"}
_LOOSE: Final = {"Not", "IsNull", "IsNotNull", "In", "Like", *_OPERATORS}


def _text(expr: Expr, call: Callable[[QueryColumn], str]) -> str:
    kind, fields = expr.kind, expr.tree.fields
    if expr.column is not None:
        return call(expr.column)
    if kind == "Literal":
        return _literal(fields)
    if kind == "Cast" and (is_no_op(expr) or widens_literal(expr)):
        return _text(expr.args[0], call)
    if kind == "Not" and expr.args[0].kind == "EqualTo":
        return " <> ".join(_operands("Add", expr.args[0], call))
    args = _operands(kind, expr, call)
    if kind in _OPERATORS:
        return f" {_OPERATORS[kind]} ".join(args)
    match kind:
        case "Not":
            return f"NOT {args[0]}"
        case "IsNull" | "IsNotNull":
            return f"{args[0]} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL"
        case "UnaryMinus":
            return f"-{args[0]}"
        case "In":
            return f"{args[0]} IN ({', '.join(args[1:])})"
        case "Cast":
            kind_ = fields["dataType"] if isinstance(fields["dataType"], str) else fields["dataType"]["type"]
            return f"CAST({args[0]} AS {_TYPES.get(kind_, str(kind_).upper())})"
        case "CaseWhen":
            pairs = " ".join(f"WHEN {a} THEN {b}" for a, b in zip(args[::2], args[1::2], strict=False))
            return f"CASE {pairs}{f' ELSE {args[-1]}' if len(args) % 2 else ''} END"
        case "Like":
            return f"{args[0]} LIKE {args[1]}"
        case "GetStructField":
            return f"{args[0]}.{fields.get('name', fields['ordinal'])}"
        case "CreateNamedStruct" | "Explode" if expr.window is not None:
            return expr.window.text(call)
        case "CreateNamedStruct" if all(name.kind == "Literal" for name in expr.args[::2]):
            named = (f"{value} AS {name[1:-1]}" for name, value in zip(args[::2], args[1::2], strict=True))
            return f"STRUCT({', '.join(named)})"
        case "RaiseError":
            return f"raise_error({', '.join(args)})"
        case "CreateArray":
            return f"ARRAY({', '.join(args)})"
        case _:
            return f"{kind.lower()}({', '.join(args)})"


def _operands(kind: str, expr: Expr, call: Callable[[QueryColumn], str]) -> list[str]:
    """The operands' text, in parentheses where an operator of this kind needs them."""
    return [f"({_text(arg, call)})" if _is_loose(kind, arg) else _text(arg, call) for arg in expr.args]


def _is_loose(kind: str, arg: Expr) -> bool:
    """True if an operand needs parentheses."""
    arg = arg.plain
    if kind not in _LOOSE or arg.kind not in _LOOSE or kind == arg.kind == "And":
        return False
    return kind not in ("And", "Or", "Not") or arg.kind in ("And", "Or")


def _literal(fields: Mapping[str, Any]) -> str:
    value, kind = fields["value"], fields["dataType"]
    if value is None:
        return "NULL"
    if kind == "string":
        return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"
    if kind in ("date", "timestamp", "timestamp_ntz"):
        return f"{str(kind).upper()} '{value}'"
    return str(value)


# --- trees of conditions --------------------------------------------------------------------------

_LOGIC: Final = {"And": Op.AND, "Or": Op.OR, "Not": Op.NOT}
_COMPARISONS: Final = {
    "EqualTo": "=", "EqualNullSafe": "<=>", "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}  # fmt: skip
TURNED: Final = {
    "GreaterThanOrEqual": "LessThanOrEqual", "GreaterThan": "LessThan", "LessThanOrEqual": "GreaterThanOrEqual",
    "LessThan": "GreaterThan", "EqualTo": "EqualTo",
}  # fmt: skip
"""Comparisons, and what they are when their operands change places."""
_ARITHMETIC: Final = {"Add": "+", "Subtract": "-", "Multiply": "*", "Divide": "/", "Remainder": "%"}
_WIDER: Final = {
    "byte": pa.int8(), "short": pa.int16(), "integer": INT, "long": pa.int64(), "double": pa.float64(),
}  # fmt: skip
STRUCTURES: Final = {
    "IsNull", "IsNotNull", "In", "Coalesce", "CaseWhen", "If", *_LOGIC, *_COMPARISONS, *_ARITHMETIC,
}  # fmt: skip
"""The kinds of what `TreeReader.structure` makes a tree of."""
_PLAIN: Final = {"boolean", "integer", "long", "short", "byte"}


class TreeReader(abc.ABC):
    """Makes trees of expressions, by a builder; what means the same wherever it is evaluated."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    @abc.abstractmethod
    def node(self, expr: Expr) -> Node:
        """The tree of an expression; raises an error of its own where there is none."""

    def value(self, expr: Expr) -> Node:
        """The tree of what is compared or calculated with."""
        return self.node(expr)

    def structure(self, expr: Expr) -> Node | None:
        """The tree of an expression by its kind, None for one of another."""
        build, kind = self.builder, expr.kind
        if kind in ("IsNull", "IsNotNull"):
            null = is_null(self.node(expr.args[0]))
            return null if kind == "IsNull" else logic(Op.NOT, null)
        if kind in _LOGIC:
            return logic(_LOGIC[kind], *map(self.value, expr.args))
        if kind in _COMPARISONS:
            return build.compare(_COMPARISONS[kind], *map(self.value, expr.args))
        if kind in _ARITHMETIC:
            return self.calculated(expr, _ARITHMETIC[kind], *map(self.value, expr.args))
        if kind == "In" and len(expr.args) > 1:
            value, *members = map(self.value, expr.args)
            return self.among(value, members)
        if kind == "Coalesce":
            return build.coalesce(list(map(self.value, expr.args)))
        if kind in ("CaseWhen", "If"):
            args = list(map(self.value, expr.args))
            last = args.pop() if len(args) % 2 else Literal(None, pa.null())
            return build.case(list(zip(args[::2], args[1::2], strict=True)), last)
        return None

    def calculated(self, expr: Expr, operator: str, left: Node, right: Node) -> Node | None:
        """The tree of an arithmetic expression."""
        return self.builder.arithmetic(operator, left, right)

    def among(self, value: Node, members: list[Node]) -> Node | None:
        """The tree of ``IN`` with a list."""
        return self.builder.is_in(value, members)


class NotOursError(Exception):
    """An expression over both inputs that only Spark evaluates.

    Args:
        expr: the expression.
        why: what is the matter with it.
    """

    def __init__(self, expr: Expr, why: str) -> None:
        super().__init__(why)
        self.expr, self.why = expr, why


class JoinReader(TreeReader):
    """Takes a condition over both inputs apart: what is one input's is a column that Spark computes below the join.

    What is left of it has columns whose types Catalyst has made equal.
    """

    def __init__(
        self, builder: Builder, one_side: Callable[[Expr], bool], column: Callable[[Expr], Node], *, plain: bool
    ) -> None:
        """Args: tells if one input has all columns of an expression; gives its column; whether to leave plain ones.

        What only names columns, compares them and joins that by AND, OR and NOT means the same to
        the engine as to Spark.
        """
        super().__init__(builder)
        self.one_side, self.column, self.plain = one_side, column, plain
        self._inside = False
        """Whether in an expression of one input that is to have no column of its own."""

    def node(self, expr: Expr) -> Node:
        """The tree of an expression over both inputs.

        Raises:
            NotOursError: only Spark evaluates it.
            TypeProblemError: likewise; all of it, then.
        """
        if not self._inside and self.one_side(expr):
            if self.plain or expr.column is not None or not expr.columns:
                self._inside = True
                try:
                    return self.node(expr)
                except NotOursError:
                    pass
                finally:
                    self._inside = False
            return self.column(expr)
        if self._inside and expr.column is not None:
            return self.column(expr)
        if expr.kind == "Literal":
            return _constant(expr)
        if expr.kind == "Cast" and (is_no_op(expr) or widens_literal(expr)):
            return self.node(expr.args[0])
        if expr.kind == "Cast" and _widens(expr):
            return self.builder.cast(self.node(expr.args[0]), _WIDER[expr.tree.fields["dataType"]])
        structure = self.structure(expr)
        if structure is None:
            raise NotOursError(expr, f"{words_of(expr.java)} takes columns of both inputs")
        return structure


def _widens(cast: Expr) -> bool:
    """True for a CAST to a type that has every number of the operand's type."""
    order = list(_WIDER)
    kind, operand_type = cast.tree.fields["dataType"], str(cast.args[0].java.dataType().typeName())
    return kind in order and operand_type in order[: order.index(kind)]


def _constant(expr: Expr) -> Literal:
    """A constant as the same one of a condition's text, an integer in the narrower of INT and BIGINT."""
    kind, value = expr.tree.fields["dataType"], expr.tree.fields["value"]
    if value is None:
        return Literal(None, pa.null())
    if kind == "boolean":
        return Literal(str(value).lower() == "true", BOOL)
    if kind in _PLAIN:
        number = int(value)
        return Literal(number, INT if -(1 << 31) <= number < 1 << 31 else pa.int64())
    if kind == "string" and not set(value) & {"'", "\\"}:
        return Literal(str(value), STRING)
    raise NotOursError(expr, f"a constant of type {kind} is no part of a condition over both inputs")
