"""Residual join conditions: typed expression trees, made of SQL text in Spark's dialect or by Spark's analyser.

The language is small: comparisons, three-valued logic, arithmetic, IS NULL, IN, BETWEEN, COALESCE, CASE WHEN, CAST to a
wider number. What else a condition needs is computed below the join, a column of its input; `gpu_ops.query` lets Spark
do that for SQL and ``where=``.

Semantics are Spark's: NaN equals NaN and is greater than any other number; -0.0 equals 0.0. With
``spark.sql.ansi.enabled=false`` a division or remainder by zero is null and integer arithmetic wraps around on
overflow, so no row can make a condition fail; in ANSI mode each of these is an `EvaluationError`. Decimal arithmetic is
exact or refused. What each operation does is in `gpu_ops.conditions.expressions.Op`; the backends' ``conditions.py``
evaluate it. Descriptions have the tree as JSON, with the user's text beside it.

The grammar of the text is the part of Spark's own (``booleanExpression``, ``valueExpression``, ``primaryExpression`` of
SqlBaseParser.g4) that compares, calculates and combines; it binds as Spark does (``a = b IS NULL`` is
``(a = b) IS NULL``). What else Spark's has is refused, with what to do instead, and each error has its position.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

import pyarrow as pa

from gpu_ops.conditions.expressions import (
    ADVICE,
    BIGINT,
    BOOL,
    DATE,
    DOUBLE,
    INT,
    STRING,
    Builder,
    Call,
    ColumnRef,
    Literal,
    Node,
    Op,
    TypeProblemError,
    boolean,
    column_type,
    failing,
    is_null,
    kind,
    logic,
    nodes_of,
    type_name,
)
from gpu_ops.errors import ConditionError, DescriptionError, EvaluationError, closest

__all__ = [
    "Condition", "Expression", "Where", "backquoted", "condition_of", "nodes_of", "of_tree", "parse",
]  # fmt: skip

_COMPARISONS: Final = {"=", "<>", "!=", "<", "<=", ">", ">=", "<=>"}
_BINARY: Final = {**dict.fromkeys(_COMPARISONS, 1), "+": 2, "-": 2, "*": 3, "/": 3, "%": 3}
_TYPES: Final = {"TINYINT": pa.int8(), "SMALLINT": pa.int16(), "INT": INT, "BIGINT": BIGINT, "DOUBLE": DOUBLE}
_REFUSED: Final = {"LIKE", "ILIKE", "RLIKE", "REGEXP", "DIV", "INTERVAL", "OVER", "||", "::", "|", "&", "^", "~"}
_QUERIES: Final = {"SELECT", "EXISTS"}
_RESERVED: Final = {
    "AND", "AS", "BETWEEN", "CASE", "ELSE", "END", "IN", "IS", "NOT", "OR", "THEN", "WHEN", *_REFUSED, *_QUERIES,
}  # fmt: skip

_TOKEN: Final = re.compile(
    r"""
      (?P<space> \s+ | --[^\n]* | /\*.*?\*/ )
    | (?P<number> (?: \d+\.?\d* | \.\d+ ) (?: [eE][+-]?\d+ )? (?!\w) )
    | (?P<string> '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" )
    | (?P<quoted> `(?:[^`]|``)*` )
    | (?P<word> \w+ )
    | (?P<open> ['"`] | /\* )
    | (?P<symbol> <=> | <> | <= | >= | != | :: | \|\| | . )
    """,
    re.VERBOSE | re.DOTALL,
)

_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")
_FORMS: Final = {
    "DATE": "'yyyy-MM-dd'",
    "TIMESTAMP": "'yyyy-MM-dd HH:mm:ssZ', with Z for UTC or an offset such as +05:30 (TIMESTAMP_NTZ has none)",
    "TIMESTAMP_NTZ": "'yyyy-MM-dd HH:mm:ss'",
}


@dataclass(frozen=True)
class Expression:
    """Something computed of rows.

    Attributes:
        sql: its text.
        root: the expression tree.
        columns: per input the columns the tree needs, in its order.
        fails: in ANSI mode, where Spark would raise an error instead: a tree of type boolean, or None for nowhere.
        checked: the fields have their types, as far as `gpu_ops.fields` is concerned.
    """

    sql: str
    root: Node
    columns: dict[str, tuple[str, ...]]
    fails: Node | None = None

    checked: ClassVar = True

    def __hash__(self) -> int:
        return hash(self.sql)

    def __str__(self) -> str:
        return self.sql

    def failure(self, sample: Mapping[str, object]) -> EvaluationError:
        """The error for rows of which ``fails`` is true; ``sample``: columns of one and their values."""
        shown = ", ".join(f"{name} = {value!r}" for name, value in sample.items()) or "any row"
        return EvaluationError(
            f"{self.sql!r} fails in ANSI mode (spark.sql.ansi.enabled): a number overflows, or a divisor "
            f"is zero, for {shown}. CAST to a wider type first, or leave such rows out by CASE WHEN"
        )


@dataclass(frozen=True)
class Condition(Expression):
    """A parsed residual condition, of type boolean; its columns are those of each input that `parse` was given.

    Attributes:
        mode_matters: whether it means something else in the other mode than the one it was parsed in.
    """

    mode_matters: bool = field(default=False, compare=False)

    __hash__ = Expression.__hash__

    @property
    def compared(self) -> dict[str, tuple[str, ...]]:
        """The `columns` of which more is asked than whether they are null."""
        used = {
            (arg.input, arg.name)
            for node in nodes_of(self.root)
            if isinstance(node, Call) and node.op is not Op.IS_NULL
            for arg in node.args
            if isinstance(arg, ColumnRef)
        }
        if isinstance(self.root, ColumnRef):
            used.add((self.root.input, self.root.name))
        return {name: tuple(c for c in columns if (name, c) in used) for name, columns in self.columns.items()}

    def to_dict(self) -> dict[str, Any]:
        """The text, and the tree: a list in which operands stand before what they are of.

        An item is a column's input and name, a constant's value and type, or an operation, the places of its operands
        and the type of what it gives.
        """
        return {"text": self.sql, "tree": tree_of(self.root)}


def tree_of(root: Node) -> list[Any]:
    """An expression tree for JSON, as `Condition.to_dict` says; equal trees give equal lists."""
    items: dict[str, list[Any]] = {}
    places: dict[int, int] = {}
    order: dict[str, int] = {}
    for node in nodes_of(root):
        if isinstance(node, ColumnRef):
            item: list[Any] = [node.input, node.name]
        elif isinstance(node, Literal):
            value = str(node.value) if isinstance(node.value, Decimal) else node.value
            item = [{"value": value, "type": str(node.type)}]
        else:
            item = [node.op, [places[id(arg)] for arg in node.args], str(node.type)]
        items.setdefault(repr(item), item)
        places[id(node)] = order.setdefault(repr(item), len(order))
    return list(items.values())


def read_tree(tree: Sequence[Any], inputs: Mapping[str, pa.Schema]) -> Node:
    """The tree that `tree_of` has written, over columns of the inputs."""
    nodes: list[Node] = []
    for item in tree:
        if len(item) == 1:
            type_ = _type_of(item[0]["type"])
            value = item[0]["value"]
            nodes.append(Literal(Decimal(value) if kind(type_) == "decimal" and value is not None else value, type_))
        elif len(item) == 2:
            name, column = item
            nodes.append(ColumnRef(name, column, column_type(inputs[name].field(column).type)))
        else:
            op, args, name = item
            nodes.append(Call(Op(op), tuple(nodes[place] for place in args), _type_of(name)))
    return nodes[-1]


Where = str | Mapping[str, Any] | Condition | None
"""A description's ``where``: text of a user; what Spark's analyser has read, or its JSON."""


def condition_of(where: Where, inputs: Mapping[str, pa.Schema], *, ansi: bool) -> Condition | None:
    """A description's residual condition.

    Args:
        where: as the description was given it.
        inputs: as of `parse`.
        ansi: likewise.

    Raises:
        ConditionError: as `parse`.
        DescriptionError: a tree that is not over these inputs.
    """
    if where is None:
        return None
    if isinstance(where, str):
        return parse(where, inputs, ansi=ansi)
    if isinstance(where, Condition):
        return of_tree(where.sql, [where.root], inputs, ansi=ansi, mode_matters=where.mode_matters)
    if not isinstance(where, Mapping) or not where.keys() >= {"text", "tree"}:
        raise DescriptionError(f"where={where!r}; it is a condition's text, such as 'left.x > right.y'")
    return of_tree(where["text"], [read_tree(where["tree"], inputs)], inputs, ansi=ansi, mode_matters=ansi)


def _type_of(text: str) -> pa.DataType:
    """The type of a constant or of what is computed, by Arrow's text of it."""
    if text.startswith("decimal128"):
        return pa.decimal128(*map(int, re.findall(r"\d+", text)[1:]))
    name, zone, _ = text.partition(", tz=")
    return pa.timestamp(name.removeprefix("timestamp["), "UTC") if zone else pa.type_for_alias(text)


def of_tree(
    sql: str, roots: Sequence[Node], inputs: Mapping[str, pa.Schema], *, ansi: bool, mode_matters: bool
) -> Condition:
    """The condition that all of some trees are true.

    Args:
        sql: its text.
        roots: of type boolean, over columns of the inputs.
        inputs: as of `parse`.
        ansi: likewise.
        mode_matters: whether another mode would have made other trees.

    Raises:
        DescriptionError: a column that is not there or is of another type, a tree of another type.
    """
    root = logic(Op.AND, *roots)
    used: dict[str, dict[str, None]] = {name: {} for name in inputs}
    for node in nodes_of(root):
        if isinstance(node, ColumnRef):
            has = node.input in used and node.name in inputs[node.input].names
            if not has or column_type(inputs[node.input].field(node.name).type) != node.type:
                raise DescriptionError(f"the condition {sql!r} needs {node.input}.{node.name} of type {node.type}")
            used[node.input][node.name] = None
    if root.type != BOOL:
        raise DescriptionError(f"the condition {sql!r} is of type {root.type}")
    fails = failing(root) if ansi else None
    columns = {name: tuple(names) for name, names in used.items()}
    return Condition(sql, root, columns, fails, mode_matters or fails is not None)


def parse(sql: str, inputs: Mapping[str, pa.Schema], *, ansi: bool = False) -> Condition:
    """Reads a condition from its text.

    Args:
        sql: a boolean expression. Columns are written ``input.column``, or ``column`` where only one
            input has it; case does not matter, backticks quote.
        inputs: input name to the schema of its columns.
        ansi: whether as with ``spark.sql.ansi.enabled``.

    Raises:
        ConditionError: with the position, for a syntax error, an unknown or ambiguous column, types that do
            not fit, or SQL outside the language.
    """
    builder = Builder(ansi=ansi)
    parser = _Parser(sql, inputs, builder)
    try:
        root = parser.condition()
    except RecursionError:
        parser.fail("the condition is nested too deeply", parser.token)
    return of_tree(sql, [root], inputs, ansi=ansi, mode_matters=builder.mode_matters)


class Token(NamedTuple):
    """A token of the text.

    Attributes:
        kind: word, quoted, string, number, symbol or end.
        text: as written.
    """

    kind: str
    text: str
    start: int

    @property
    def shown(self) -> str:
        """The token as error messages name it."""
        return "the end of the text" if self.kind == "end" else repr(self.text)


def backquoted(name: str) -> str:
    """A name as SQL text, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


class _Parser:
    def __init__(self, sql: str, inputs: Mapping[str, pa.Schema], build: Builder) -> None:
        self.sql, self.inputs, self.build = sql, inputs, build
        self.tokens, self.position = self.tokenize(), 0

    # --- tokens ---------------------------------------------------------------------------------

    def tokenize(self) -> list[Token]:
        tokens: list[Token] = []
        for match in _TOKEN.finditer(self.sql):
            found = Token(match.lastgroup or "", match[0], match.start())
            if found.kind == "open":
                self.fail("a quote or comment is opened here and not closed", found)
            if found.kind != "space":
                tokens.append(found)
        return [*tokens, Token("end", "", len(self.sql))]

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    @property
    def following(self) -> Token:
        return self.tokens[min(self.position + 1, len(self.tokens) - 1)]

    def next(self) -> Token:
        token = self.token
        self.position = min(self.position + 1, len(self.tokens) - 1)
        return token

    def match(self, *texts: str) -> Token | None:
        """Take the next token if it is one of these words (in upper case) or symbols."""
        token = self.token
        return self.next() if token.text.upper() in texts else None

    def expect(self, text: str) -> Token:
        return self.match(text) or self.unexpected(text)

    def fail(self, message: str, at: Token) -> NoReturn:
        before = self.sql[: at.start].splitlines(keepends=True) or [""]
        if before[-1].endswith(("\n", "\r")):
            before.append("")
        raise ConditionError(message, self.sql, len(before), len(before[-1]) + 1)

    def unexpected(self, expected: str) -> NoReturn:
        token = self.token
        word = token.text.upper()
        if word in _QUERIES:
            self.fail("a sub-query is not allowed in a condition", token)
        if word in _REFUSED:
            self.fail(f"{word} is not evaluated in a join's condition: {ADVICE}", token)
        self.fail(f"expected {expected}, found {token.shown}", token)

    @contextmanager
    def at(self, token: Token) -> Iterator[None]:
        """Reports operands that do not fit at this token."""
        try:
            yield
        except TypeProblemError as error:
            self.fail(str(error), token)

    # --- grammar, loosest first -----------------------------------------------------------------

    def condition(self) -> Node:
        first = self.token
        if first.kind == "end":
            self.fail("the condition is empty", first)
        root = self.expression()
        if self.token.kind != "end":
            self.unexpected("an operator or the end of the text")
        if kind(root.type) not in ("boolean", "null"):
            self.fail(f"the condition must be BOOLEAN, this is {type_name(root.type)}", first)
        return boolean(root, "the condition")

    def expression(self) -> Node:
        return self.chain(Op.OR, lambda: self.chain(Op.AND, self.negation))

    def chain(self, op: Op, term: Callable[[], Node]) -> Node:
        nodes = [term()]
        while token := self.match(op.upper()):
            following = term()
            with self.at(token):
                nodes[-1:] = [boolean(nodes[-1], op.upper()), boolean(following, op.upper())]
        return logic(op, *nodes)

    def negation(self) -> Node:
        if self.following.text == "." or not (token := self.match("NOT")):
            return self.predicate()
        node = self.negation()
        with self.at(token):
            return logic(Op.NOT, node)

    def predicate(self) -> Node:
        node = self.value(1)
        negated = self.match("NOT")
        token = self.token
        if self.match("BETWEEN"):
            low = self.value(1)
            self.expect("AND")
            high = self.value(1)
            with self.at(token):
                halves = self.build.compare(">=", node, low), self.build.compare("<=", node, high)
                node = logic(Op.AND, *halves)
        elif self.match("IN"):
            members = self.arguments()
            with self.at(token):
                node = self.build.is_in(node, members)
        elif negated:
            self.unexpected("BETWEEN or IN after NOT")
        elif self.match("IS"):
            negated = self.match("NOT")
            self.expect("NULL")
            node = is_null(node)
        return logic(Op.NOT, node) if negated else node

    def arguments(self) -> list[Node]:
        """One or more expressions in parentheses."""
        self.expect("(")
        nodes = [self.expression()]
        while self.match(","):
            nodes.append(self.expression())
        self.expect(")")
        return nodes

    def value(self, level: int) -> Node:
        node = self.unary()
        while (rank := _BINARY.get(self.token.text, 0)) >= level:
            token = self.next()
            right = self.value(rank + 1)
            with self.at(token):
                if token.text in _COMPARISONS:
                    node = self.build.compare(token.text, node, right)
                else:
                    node = self.build.arithmetic(token.text, node, right)
        return node

    def unary(self) -> Node:
        if not (token := self.match("-")):
            return self.primary()
        if self.token.kind == "number":
            return self.number("-")
        node = self.unary()
        with self.at(token):
            return self.build.negative(node)

    def primary(self) -> Node:
        token = self.token
        word = token.text.upper() if token.kind == "word" and self.following.text != "." else ""
        if token.kind == "string":
            return Literal(self.text(), STRING)
        if token.kind == "number":
            return self.number("")
        if self.match("("):
            node = self.expression()
            self.expect(")")
            return node
        if word in ("TRUE", "FALSE", "NULL"):
            self.next()
            return Literal(None, pa.null()) if word == "NULL" else Literal(word == "TRUE", BOOL)
        if word == "CASE":
            return self.case()
        if word in _FORMS and self.following.kind == "string":
            return self.time(word)
        if word == "INTERVAL" and self.following.kind in ("string", "number"):
            self.unexpected("a value")
        if token.kind == "word" and self.following.text == "(" and word not in _RESERVED:
            return self.function()
        if token.kind in ("word", "quoted"):
            return self.column()
        return self.unexpected("a value")

    # --- operands -------------------------------------------------------------------------------

    def text(self) -> str:
        token = self.next()
        if token.text[0] == '"' or "\\" in token.text:
            self.fail(f"text stands in single quotes, without backslashes. For any other, {ADVICE}", token)
        return token.text[1:-1].replace("''", "'")

    def number(self, sign: str) -> Node:
        """An INT, BIGINT or DECIMAL; DECIMAL with a point, DOUBLE with an exponent."""
        token = self.next()
        text = sign + token.text
        value = Decimal(text)
        if "e" in text.lower() and math.isfinite(float(text)):
            return Literal(float(text), DOUBLE)
        for type_ in (INT, BIGINT) if text.lstrip("-").isdecimal() else ():
            if -1 << (type_.bit_width - 1) <= value < 1 << (type_.bit_width - 1):
                return Literal(int(value), type_)
        scale = max(-int(value.as_tuple().exponent), 0)
        precision = max(len(value.as_tuple().digits), scale)
        if precision > 38 or "e" in text.lower():
            self.fail(f"{text} is out of range: a DECIMAL has at most 38 digits, a DOUBLE is below 1.8e308", token)
        return Literal(value, pa.decimal128(precision, scale))

    def time(self, word: str) -> Node:
        """DATE, TIMESTAMP or TIMESTAMP_NTZ '...'."""
        self.next()
        token, text = self.token, self.text()
        match = _TIMESTAMP.fullmatch(text if word != "DATE" else f"{text} 00:00:00")
        if not match or bool(match[1]) != (word == "TIMESTAMP"):
            self.fail(f"{word} is written {word} {_FORMS[word]}", token)
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError as error:
            self.fail(f"{text!r} is no {word}: {error}", token)
        since = moment - dt.datetime(1970, 1, 1, tzinfo=moment.tzinfo and dt.UTC)
        if word == "DATE":
            return Literal(since.days, DATE)
        return Literal(since // dt.timedelta(microseconds=1), pa.timestamp("us", "UTC" if match[1] else None))

    def case(self) -> Node:
        start = self.next()
        branches: list[tuple[Node, Node]] = []
        while when := self.match("WHEN"):
            test = self.expression()
            self.expect("THEN")
            with self.at(when):
                branches.append((boolean(test, "WHEN"), self.expression()))
        if not branches:
            self.expect("WHEN")
        otherwise = self.expression() if self.match("ELSE") else Literal(None, pa.null())
        self.expect("END")
        with self.at(start):
            return self.build.case(branches, otherwise)

    # --- names ----------------------------------------------------------------------------------

    def column(self) -> Node:
        start, first = self.position, self.next()
        names = [first.text]
        while self.token.text == "." and self.following.kind in ("word", "quoted"):
            self.next()
            names.append(self.next().text)
        try:
            return self.resolve([name[1:-1].replace("``", "`") if name[0] == "`" else name for name in names])
        except TypeProblemError as error:
            if len(names) == 1 and first.text.upper() in _RESERVED:
                self.position = start
                self.unexpected("a value")
            self.fail(str(error), first)

    def resolve(self, parts: Sequence[str]) -> Node:
        """The column of ``[column]`` or ``[input, column]``, as Spark has it: case is nothing, ambiguity an error.

        Raises:
            TypeProblemError: says what there is instead.
        """
        *inputs, column = parts
        shown = ".".join(parts)
        if len(inputs) > 1:
            raise TypeProblemError(f"{shown!r} has too many parts: write input.column (no fields of structs)")
        among = [name for name in self.inputs if not inputs or name.lower() == inputs[0].lower()]
        if not among:
            raise TypeProblemError(f"there is no input {inputs[0]!r}; there are {closest(inputs[0], self.inputs)}")
        columns = [
            (name, field) for name in among for field in self.inputs[name] if field.name.lower() == column.lower()
        ]
        if not columns:
            every = [f"{name}.{field}" for name in among for field in self.inputs[name].names]
            raise TypeProblemError(f"there is no column {shown!r}; there are {closest(column, every)}")
        if len(columns) > 1:
            names = " and ".join(f"{name}.{field.name}" for name, field in columns)
            raise TypeProblemError(f"{shown!r} is ambiguous: it can be {names}")
        ((name, field),) = columns
        return ColumnRef(name, field.name, column_type(field.type))

    def function(self) -> Node:
        token = self.next()
        name = token.text.upper()
        if name == "COALESCE":
            nodes = self.arguments()
            with self.at(token):
                return self.build.coalesce(nodes)
        if name != "CAST":
            self.fail(f"the function {name} is not evaluated in a join's condition: {ADVICE}", token)
        self.expect("(")
        node = self.expression()
        self.expect("AS")
        type_ = self.type()
        self.expect(")")
        with self.at(token):
            return self.build.cast(node, type_)

    def type(self) -> pa.DataType:
        token = self.next()
        if token.text.upper() in _TYPES:
            return _TYPES[token.text.upper()]
        names = ", ".join(_TYPES)
        return self.fail(f"CAST in a condition is to one of {names}, not {token.shown}. For others, {ADVICE}", token)
