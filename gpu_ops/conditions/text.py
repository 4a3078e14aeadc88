"""The text of a residual condition, and the expression tree that it means.

The grammar is the part of Spark's own (``booleanExpression``, ``valueExpression``, ``primaryExpression`` of
SqlBaseParser.g4) that compares, calculates and combines; it binds as Spark does (``a = b IS NULL`` is
``(a = b) IS NULL``, which sqlglot's parser reads otherwise). What else Spark's has is refused, with what to do instead,
and each error has its position.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Final, NoReturn

import pyarrow as pa
from sqlglot import Token
from sqlglot import TokenType as T

from gpu_ops.conditions.expressions import (
    ADVICE,
    BIGINT,
    BOOL,
    DATE,
    DOUBLE,
    INT,
    STRING,
    Builder,
    ColumnRef,
    Literal,
    Node,
    Op,
    TypeProblemError,
    boolean,
    column_type,
    is_null,
    kind,
    logic,
    type_name,
)
from gpu_ops.errors import ConditionError, closest
from gpu_ops.sql_tokens import END, QUOTED, UnclosedError, tokenize

__all__ = ["parsed"]

_SAME: Final = {"==": "="}
_COMPARISONS: Final = {"=", "==", "<>", "!=", "<", "<=", ">", ">=", "<=>"}
_BINARY: Final = {**dict.fromkeys(_COMPARISONS, 1), "+": 2, "-": 2, "*": 3, "/": 3, "%": 3}
_TYPES: Final = {"TINYINT": pa.int8(), "SMALLINT": pa.int16(), "INT": INT, "BIGINT": BIGINT, "DOUBLE": DOUBLE}
_REFUSED: Final = {"LIKE", "ILIKE", "RLIKE", "REGEXP", "DIV", "INTERVAL", "OVER", "||", "::", "|", "&", "^", "~"}
_QUERIES: Final = {"SELECT", "EXISTS"}
_RESERVED: Final = {
    "AND", "AS", "BETWEEN", "CASE", "ELSE", "END", "IN", "IS", "NOT", "OR", "THEN", "WHEN", *_REFUSED, *_QUERIES,
}  # fmt: skip

_NUMBER: Final = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")
_FORMS: Final = {
    "DATE": "'yyyy-MM-dd'",
    "TIMESTAMP": "'yyyy-MM-dd HH:mm:ssZ', with Z for UTC or an offset such as +05:30 (TIMESTAMP_NTZ has none)",
    "TIMESTAMP_NTZ": "'yyyy-MM-dd HH:mm:ss'",
}


def parsed(sql: str, inputs: Mapping[str, pa.Schema], build: Builder) -> Node:
    """The tree of a condition, of type boolean, of its text.

    Args:
        sql: as of `gpu_ops.conditions.parse`.
        inputs: likewise.
        build: makes the nodes.

    Raises:
        ConditionError: likewise.
    """
    parser = _Parser(sql, inputs, build)
    try:
        return parser.condition()
    except RecursionError:
        parser.fail("the condition is nested too deeply", parser.token)


class _Parser:
    def __init__(self, sql: str, inputs: Mapping[str, pa.Schema], build: Builder) -> None:
        self.sql, self.inputs, self.build, self.position = sql, inputs, build, 0
        try:
            self.tokens = tokenize(sql)
        except UnclosedError as error:
            self.fail(str(error), error.start)

    # --- tokens ---------------------------------------------------------------------------------

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

    def written(self, token: Token) -> str:
        """A token as it stands in the text, quotes and all."""
        return self.sql[token.start : token.end + 1]

    def shown(self, token: Token) -> str:
        """The token as error messages name it."""
        return "the end of the text" if token.token_type == END else repr(self.written(token))

    def is_word(self, token: Token) -> bool:
        """True for a word without quotes, also one that begins with a digit."""
        return token.token_type not in (*QUOTED, T.NUMBER) and re.fullmatch(r"\w+", self.written(token)) is not None

    def is_name(self, token: Token) -> bool:
        """True for what can be the name of an input or column."""
        return token.token_type == T.IDENTIFIER or self.is_word(token)

    @property
    def sees_number(self) -> bool:
        """True if a number comes next."""
        token, following = self.token, self.following
        digits = following.token_type == T.NUMBER and following.start == token.end + 1
        return token.token_type == T.NUMBER or (token.token_type == T.DOT and digits)

    def match(self, *texts: str) -> Token | None:
        """Take the next token if it is one of these words (in upper case) or symbols."""
        return self.next() if self.written(self.token).upper() in texts else None

    def expect(self, text: str) -> Token:
        return self.match(text) or self.unexpected(text)

    def fail(self, message: str, at: Token | int) -> NoReturn:
        start = at if isinstance(at, int) else at.start
        before = self.sql[:start].splitlines(keepends=True) or [""]
        if before[-1].endswith(("\n", "\r")):
            before.append("")
        raise ConditionError(message, self.sql, len(before), len(before[-1]) + 1)

    def unexpected(self, expected: str) -> NoReturn:
        token = self.token
        word = self.written(token).upper()
        if word in _QUERIES:
            self.fail("a sub-query is not allowed in a condition", token)
        if word in _REFUSED:
            self.fail(f"{word} is not evaluated in a join's condition: {ADVICE}", token)
        self.fail(f"expected {expected}, found {self.shown(token)}", token)

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
        if first.token_type == END:
            self.fail("the condition is empty", first)
        root = self.expression()
        if self.token.token_type != END:
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
        if self.following.token_type == T.DOT or not (token := self.match("NOT")):
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
        while (rank := _BINARY.get(self.written(self.token), 0)) >= level:
            token = self.next()
            right = self.value(rank + 1)
            with self.at(token):
                if (operation := self.written(token)) in _COMPARISONS:
                    node = self.build.compare(_SAME.get(operation, operation), node, right)
                else:
                    node = self.build.arithmetic(operation, node, right)
        return node

    def unary(self) -> Node:
        if not (token := self.match("-")):
            return self.primary()
        if self.sees_number:
            return self.number("-")
        node = self.unary()
        with self.at(token):
            return self.build.negative(node)

    def primary(self) -> Node:
        token = self.token
        word = token.text.upper() if self.is_word(token) and self.following.token_type != T.DOT else ""
        if token.token_type == T.STRING:
            return Literal(self.text(), STRING)
        if self.sees_number:
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
        if word in _FORMS and self.following.token_type == T.STRING:
            return self.time(word)
        if word == "INTERVAL" and self.following.token_type in (T.STRING, T.NUMBER):
            self.unexpected("a value")
        if word and self.following.token_type == T.L_PAREN and word not in _RESERVED:
            return self.function()
        if self.is_name(token):
            return self.column()
        return self.unexpected("a value")

    # --- operands -------------------------------------------------------------------------------

    def text(self) -> str:
        token = self.next()
        if (written := self.written(token))[0] == '"' or "\\" in written:
            self.fail(f"text stands in single quotes, without backslashes. For any other, {ADVICE}", token)
        return token.text

    def number(self, sign: str) -> Node:
        """An INT, BIGINT or DECIMAL; DECIMAL with a point, DOUBLE with an exponent."""
        token = self.next()
        last = self.next() if token.token_type == T.DOT else token  # sqlglot's .5 are two tokens
        text = sign + self.sql[token.start : last.end + 1]
        if not _NUMBER.fullmatch(text):
            self.fail(f"{text} is not a number", token)
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
        while self.token.token_type == T.DOT and self.is_name(self.following):
            self.next()
            names.append(self.next().text)
        try:
            return self.resolve(names)
        except TypeProblemError as error:
            if len(names) == 1 and self.written(first).upper() in _RESERVED:
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
        if (word := self.written(token).upper()) in _TYPES:
            return _TYPES[word]
        names = ", ".join(_TYPES)
        return self.fail(
            f"CAST in a condition is to one of {names}, not {self.shown(token)}. For others, {ADVICE}", token
        )
