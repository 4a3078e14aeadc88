"""The grammar of conditions: text to expression tree, with a position for every error.

This is the part of Spark's own grammar (``booleanExpression``, ``valueExpression``, ``primaryExpression`` of
SqlBaseParser.g4) that compares, calculates and combines; it binds as Spark does (``a = b IS NULL`` is
``(a = b) IS NULL``). What else Spark's has is refused, with what to do instead.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Final, NamedTuple, NoReturn

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
    Literal,
    Node,
    Op,
    TypeProblemError,
    boolean,
    is_null,
    kind,
    logic,
    type_name,
)
from gpu_ops.errors import ConditionError

Resolve = Callable[[Sequence[str]], Node]
"""Gives the column of a name's parts (input and column, or column); raises TypeProblemError when there is none."""

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


class Token(NamedTuple):
    """A token of the text."""

    kind: str
    """word, quoted, string, number, symbol or end."""
    text: str
    """As written."""
    start: int

    @property
    def shown(self) -> str:
        """As an error message names it."""
        return "the end of the text" if self.kind == "end" else repr(self.text)


def backquoted(name: str) -> str:
    """A name as SQL text, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


def read(sql: str, resolve: Resolve, build: Builder) -> Node:
    """The condition that a text is, BOOLEAN.

    Args:
        sql: the text.
        resolve: finds columns.
        build: makes the nodes.

    Raises:
        ConditionError: it is none; with the position.
    """
    parser = _Parser(sql, resolve, build)
    try:
        return parser.condition()
    except RecursionError:
        parser.fail("the condition is nested too deeply", parser.token)


class _Parser:
    def __init__(self, sql: str, resolve: Resolve, build: Builder) -> None:
        self.sql, self.resolve, self.build = sql, resolve, build
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

    def unexpected(self, wanted: str) -> NoReturn:
        token = self.token
        word = token.text.upper()
        if word in _QUERIES:
            self.fail("a sub-query is not allowed in a condition", token)
        if word in _REFUSED:
            self.fail(f"{word} is not evaluated in a join's condition: {ADVICE}", token)
        self.fail(f"expected {wanted}, found {token.shown}", token)

    @contextmanager
    def at(self, token: Token) -> Iterator[None]:
        """Where operands that do not fit are reported at this token."""
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
