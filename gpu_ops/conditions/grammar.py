"""The grammar of conditions: tokens to expression tree, with a position for every error.

This is the boolean part of Spark's own grammar (``booleanExpression``, ``valueExpression``,
``primaryExpression`` of SqlBaseParser.g4) over sqlglot's tokens. sqlglot's parser is not used: it binds some
operators otherwise (``a = b IS NULL`` is ``(a = b) IS NULL`` in Spark), and keeps the positions of some nodes
only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import pyarrow as pa
from sqlglot import exp

from gpu_ops.conditions import functions, literals, lowering
from gpu_ops.conditions.expressions import (
    BIGINT,
    BOOL,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    INTERVAL,
    MONTHS,
    STRING,
    Call,
    Literal,
    Node,
    Op,
    TypeProblemError,
    kind,
    type_name,
)
from gpu_ops.conditions.tokens import Token, fail, tokenize

Resolve = Callable[[Sequence[str]], Node]
"""The column of a name's parts (input and column, or column); TypeProblemError when there is none."""


_COMPARISONS = {name: name for name in ("=", "<>", "<", "<=", ">", ">=", "<=>")} | {"==": "=", "!=": "<>"}
_BINARY = {**dict.fromkeys(_COMPARISONS, 1), "+": 2, "-": 2, "*": 3, "/": 3, "%": 3}
_NOT_OPERANDS = {
    "AND", "AS", "BETWEEN", "DISTINCT", "ELSE", "END", "ESCAPE", "EXISTS", "FROM", "IN", "IS", "LIKE", "NOT",
    "OR", "OVER", "RLIKE", "SELECT", "THEN", "WHEN", "WHERE", "WITH",
}  # fmt: skip
_TYPES = {
    "BOOLEAN": BOOL, "TINYINT": pa.int8(), "BYTE": pa.int8(), "SMALLINT": pa.int16(), "SHORT": pa.int16(),
    "INT": INT, "INTEGER": INT, "BIGINT": BIGINT, "LONG": BIGINT, "FLOAT": FLOAT, "REAL": FLOAT,
    "DOUBLE": DOUBLE, "STRING": STRING, "BINARY": pa.binary(), "DATE": DATE,
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}  # fmt: skip
_TIMES = {"DATE", "TIMESTAMP", "TIMESTAMP_LTZ", "TIMESTAMP_NTZ"}
_T = TypeVar("_T")


def read(sql: str, resolve: Resolve, zone: str) -> Node:
    """The condition that a text is, BOOLEAN.

    Args:
        sql: the text.
        resolve: finds columns.
        zone: the session's time zone.

    Raises:
        ConditionError: it is none; with the position.
    """
    parser = _Parser(sql, resolve, zone)
    try:
        return parser.condition()
    except RecursionError:
        parser.fail("the condition is nested too deeply", parser.token)


class _Parser:
    def __init__(self, sql: str, resolve: Resolve, zone: str) -> None:
        self.sql, self.resolve, self.zone = sql, resolve, zone
        self.tokens, self.at = tokenize(sql), 0

    # --- tokens ---------------------------------------------------------------------------------

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    @property
    def following(self) -> Token:
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)]

    def next(self) -> Token:
        token = self.token
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def match(self, *texts: str) -> Token | None:
        """Take the next token if it is one of these words (in upper case) or symbols."""
        token = self.token
        if token.kind in ("word", "symbol") and token.text.upper() in texts:
            return self.next()
        return None

    def expect(self, *texts: str) -> Token:
        return self.match(*texts) or self.fail(f"expected {' or '.join(texts)}, found {self.token.shown}", self.token)

    def fail(self, message: str, at: Token) -> NoReturn:
        fail(self.sql, message, at.start)

    def build(self, at: Token, builder: Callable[..., _T], *args: object, **options: object) -> _T:
        """Call a rule of `lowering`; what does not fit is reported at this token."""
        try:
            return builder(*args, **options)
        except TypeProblemError as error:
            self.fail(str(error), at)

    def read(self, at: Token, reader: Callable[..., _T], *args: object) -> _T:
        """Call a reader of `sql_literals`; what it cannot read is reported at this token."""
        try:
            return reader(*args)
        except ValueError as error:
            self.fail(str(error), at)

    # --- grammar, loosest first -----------------------------------------------------------------

    def condition(self) -> Node:
        first = self.token
        if first.kind == "end":
            self.fail("the condition is empty", first)
        root = self.expression()
        if self.token.kind != "end":
            if self.token.text.upper() in ("OVER", "FILTER"):
                self.fail("a window function is not allowed in a condition", self.token)
            self.fail(f"expected an operator or the end of the text, found {self.token.shown}", self.token)
        if kind(root.type) not in ("boolean", "null"):
            self.fail(f"the condition must be BOOLEAN, this is {type_name(root.type)}", first)
        return lowering.boolean(root, "the condition")

    def expression(self) -> Node:
        return self.chain(Op.OR, self.conjunction)

    def conjunction(self) -> Node:
        return self.chain(Op.AND, self.negation)

    def chain(self, op: Op, term: Callable[[], Node]) -> Node:
        nodes = [term()]
        while token := self.match(op.upper()):
            nodes[-1] = self.build(token, lowering.boolean, nodes[-1], op.upper())
            nodes.append(self.build(token, lowering.boolean, term(), op.upper()))
        return lowering.logic(op, *nodes) if len(nodes) > 1 else nodes[0]

    def negation(self) -> Node:
        if self.following.text != "." and (token := self.match("NOT", "!")):
            return self.build(token, lowering.logic, Op.NOT, self.negation())
        return self.predicate()

    def predicate(self) -> Node:
        node = self.value(1)
        negated = self.match("NOT")
        token = self.token
        if self.match("BETWEEN"):
            low = self.value(1)
            self.expect("AND")
            high = self.value(1)
            halves = (self.build(token, lowering.compare, op, node, end) for op, end in ((">=", low), ("<=", high)))
            node = lowering.logic(Op.AND, *halves)
        elif self.match("IN"):
            self.expect("(")
            members = self.arguments()
            if not members:
                self.fail("the list after IN is empty", token)
            node = self.build(token, lowering.is_in, node, members)
        elif self.match("LIKE"):
            pattern, escape = self.value(1), "\\"
            if self.match("ESCAPE"):
                escape = self.text("one character")
                if len(escape) != 1:
                    self.fail("ESCAPE takes one character", self.tokens[self.at - 1])
            node = self.build(token, lowering.like, node, pattern, escape)
        elif negated:
            self.fail(f"expected BETWEEN, IN or LIKE after NOT, found {token.shown}", token)
        elif self.match("IS"):
            return self.test(node, token)
        return lowering.logic(Op.NOT, node) if negated else node

    def test(self, node: Node, token: Token) -> Node:
        negated = self.match("NOT")
        if self.match("DISTINCT"):
            self.expect("FROM")
            result = self.build(token, lowering.compare, "<=>", node, self.value(1))
            negated = None if negated else token
        elif self.match("NULL"):
            result = Call(Op.IS_NULL, (node,), BOOL)
        else:
            word = self.expect("NULL", "TRUE", "FALSE", "UNKNOWN", "DISTINCT").text.upper()
            node = self.build(token, lowering.boolean, node, f"IS {word}")
            result = Call(Op.IS_NULL, (node,), BOOL)
            if word != "UNKNOWN":
                result = lowering.compare("<=>", node, Literal(word == "TRUE", BOOL))
        return lowering.logic(Op.NOT, result) if negated else result

    def value(self, level: int) -> Node:
        node = self.unary()
        while (rank := _BINARY.get(self.token.text, 0)) >= level and self.token.kind == "symbol":
            token = self.next()
            right = self.value(rank + 1)
            if token.text in _COMPARISONS:
                node = self.build(token, lowering.compare, _COMPARISONS[token.text], node, right)
            else:
                node = self.build(token, lowering.arithmetic, token.text, node, right, self.zone)
        return node

    def unary(self) -> Node:
        if self.token.text == "-" and self.following.kind == "number":
            self.next()
            return self.casts(self.number("-"))
        if token := self.match("-", "+"):
            node = self.unary()
            return self.build(token, lowering.negate if token.text == "-" else lowering.plus, node)
        return self.casts(self.primary())

    def casts(self, node: Node) -> Node:
        while token := self.match("::"):
            node = self.build(token, functions.cast, node, self.type(), safe=False)
        return node

    def primary(self) -> Node:
        token = self.token
        word = token.text.upper() if token.kind == "word" and self.following.text != "." else ""
        if token.kind == "string":
            return Literal(self.text("a string"), STRING)
        if token.kind == "number" or (token.text == "." and self.following.kind == "number"):
            return self.number("")
        if token.kind == "hex":
            digits = self.next().text[2:-1]
            return Literal(self.read(token, bytes.fromhex, digits.zfill(len(digits) + len(digits) % 2)), pa.binary())
        if self.match("("):
            if self.token.text.upper() in ("SELECT", "WITH"):
                self.fail("a sub-query is not allowed in a condition", token)
            node = self.expression()
            if self.token.text == ",":
                self.fail("a list of values is allowed after IN only", token)
            self.expect(")")
            return node
        if word in ("TRUE", "FALSE", "NULL"):
            self.next()
            return Literal(None, pa.null()) if word == "NULL" else Literal(word == "TRUE", BOOL)
        if word == "CASE":
            return self.case()
        if word in _TIMES and self.following.kind == "string":
            return self.time_literal(word)
        if word == "INTERVAL" and self._amount(self.at + 1):
            return self.interval()
        if word == "EXISTS" and self.following.text == "(":
            self.fail("a sub-query is not allowed in a condition", token)
        if token.kind == "word" and self.following.text == "(" and word not in _NOT_OPERANDS:
            return self.function()
        if token.kind in ("word", "quoted"):
            return self.column()
        return self.fail(f"expected a value, found {token.shown}", token)

    # --- operands -------------------------------------------------------------------------------

    def text(self, what: str) -> str:
        """A string literal; adjacent ones make one, without space between them the quote is doubled."""
        token = self.token
        if token.kind != "string":
            self.fail(f"expected {what} in quotes, found {token.shown}", token)
        parts: list[str] = []
        while self.token.kind == "string":
            piece = self.next()
            joined = parts and self.tokens[self.at - 2].end == piece.start and parts[-1][-1] == piece.text[0]
            parts[-1:] = [parts[-1] + piece.text] if joined else [*parts[-1:], piece.text]
        return "".join(self.read(token, literals.string, part) for part in parts)

    def number(self, sign: str) -> Node:
        token = self.next()
        text = token.text + self.next().text if token.text == "." else token.text
        return Literal(*self.read(token, literals.number, sign + text))

    def time_literal(self, word: str) -> Node:
        self.next()
        token, text = self.token, self.text("a time")
        if word == "DATE":
            return self.build(token, lowering.date_literal, text)
        zone = None if word == "TIMESTAMP_NTZ" else self.zone
        return self.build(token, lowering.timestamp_literal, text, zone)

    def _amount(self, at: int) -> bool:
        """Whether an amount of time stands at this position, such as ``'5'`` or ``- 5 MINUTES``."""
        sign, amount, unit, *_ = *self.tokens[at : at + 3], *[self.tokens[-1]] * 3
        if sign.kind in ("string", "number"):
            return True
        return sign.text in ("-", "+") and amount.kind in ("string", "number") and bool(literals.unit(unit.text))

    def interval(self) -> Node:
        start = self.next()
        pairs: list[tuple[str, str]] = []
        while self._amount(self.at):
            signed = self.match("-", "+")
            sign = signed.text if signed else ""
            bare = self.token.kind == "string" and not (sign or pairs)
            amount = self.text("a number") if self.token.kind == "string" else self.next().text
            unit = literals.unit(self.token.text) if self.token.kind == "word" else None
            if unit is None and bare:
                return _interval(*self.read(start, literals.interval_text, amount))
            if unit is None:
                self.fail(f"expected a unit of time, found {self.token.shown}", self.token)
            self.next()
            if self.match("TO"):
                last = literals.unit(self.next().text) or ""
                value, months = self.read(start, literals.interval_fields, amount, unit, last)
                return _interval(-value if sign == "-" else value, months)
            pairs.append((sign + amount, unit))
        return _interval(*self.read(start, literals.interval, pairs))

    def case(self) -> Node:
        start = self.next()
        subject = None if self.token.text.upper() == "WHEN" else self.expression()
        branches: list[tuple[Node, Node]] = []
        while when := self.match("WHEN"):
            test = self.expression()
            if subject is not None:
                test = self.build(when, lowering.compare, "=", subject, test)
            self.expect("THEN")
            branches.append((self.build(when, lowering.boolean, test, "WHEN"), self.expression()))
        if not branches:
            self.expect("WHEN")
        otherwise = self.expression() if self.match("ELSE") else Literal(None, pa.null())
        self.expect("END")
        return self.build(start, lowering.case, branches, otherwise, "CASE")

    def type(self) -> pa.DataType:
        token = self.next()
        name = token.text.upper()
        if name in ("TIMESTAMP", "TIMESTAMP_LTZ"):
            return pa.timestamp("us", self.zone)
        if name in ("DECIMAL", "DEC", "NUMERIC"):
            digits = [10, 0]
            if self.match("("):
                digits = [self.digits(), 0]
                if self.match(","):
                    digits[1] = self.digits()
                self.expect(")")
            if not 1 <= digits[0] <= 38 or digits[1] > digits[0]:
                self.fail(f"there is no DECIMAL({digits[0]},{digits[1]})", token)
            return pa.decimal128(*digits)
        if token.kind != "word" or name not in _TYPES:
            self.fail(f"expected a type such as BIGINT, DOUBLE or STRING, found {token.shown}", token)
        return _TYPES[name]

    def digits(self) -> int:
        token = self.next()
        if not token.text.isdecimal():
            self.fail(f"expected a number, found {token.shown}", token)
        return int(token.text)

    def arguments(self) -> list[Node]:
        """What stands between the parentheses, the first of them taken."""
        if self.token.text.upper() in ("SELECT", "WITH"):
            self.fail("a sub-query is not allowed in a condition", self.token)
        nodes: list[Node] = []
        while not self.match(")"):
            if nodes:
                self.expect(",")
            nodes.append(self.expression())
        return nodes

    # --- names ----------------------------------------------------------------------------------

    def column(self) -> Node:
        start = self.next()
        parts = [start]
        while self.token.text == "." and self.following.kind in ("word", "quoted"):
            self.next()
            parts.append(self.next())
        if len(parts) == 1 and start.kind == "word" and start.text.upper() in _NOT_OPERANDS:
            try:
                return self.resolve([start.text])
            except TypeProblemError:
                self.fail(f"expected a value, found {start.shown}", start)
        return self.build(start, self.resolve, [part.text for part in parts])

    def function(self) -> Node:
        token = self.next()
        name = token.text.lower()
        self.expect("(")
        if name in ("cast", "try_cast"):
            node = self.expression()
            self.expect("AS")
            type_ = self.type()
            self.expect(")")
            return self.build(token, functions.cast, node, type_, safe=name == "try_cast")
        if name not in functions.FUNCTIONS and name.upper() not in _TYPES and name != "timestamp":
            self.fail(_unknown_function(name), token)
        args = self.arguments()
        if self.token.text.upper() == "OVER":
            self.fail("a window function is not allowed in a condition", token)
        if name in functions.FUNCTIONS:
            return self.build(token, functions.function, name, args)
        if len(args) != 1:
            self.fail(f"{name.upper()} takes 1 argument, not {len(args)}", token)
        type_ = pa.timestamp("us", self.zone) if name == "timestamp" else _TYPES[name.upper()]
        return self.build(token, functions.cast, args[0], type_, safe=False)


def _interval(value: int, months: bool) -> Node:
    return Literal(value, MONTHS if months else INTERVAL)


_OTHER_AGGREGATES = {"any", "collect_list", "collect_set", "every", "row_number", "some"}


def _sql_names(base: type[exp.Expr]) -> set[str]:
    kinds = base.__subclasses__()
    names = {name.lower() for kind_ in kinds if issubclass(kind_, exp.Func) for name in kind_.sql_names()}
    return names.union(*(_sql_names(kind_) for kind_ in kinds))


def _unknown_function(name: str) -> str:
    if name in _sql_names(exp.AggFunc) | _OTHER_AGGREGATES:
        return f"the aggregate or window function {name.upper()} is not allowed in a condition"
    close = difflib.get_close_matches(name, functions.FUNCTIONS, n=3)
    rest = [known for known in functions.FUNCTIONS if known not in close]
    return f"there is no function {name!r} in a condition; there are {', '.join(close + rest)}"
