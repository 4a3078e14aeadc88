"""ASOF and temporal joins, which Spark's parser does not know: rewritten for it, and found again in its plan.

``ASOF [LEFT] JOIN q MATCH_CONDITION (l.t >= r.t) ON l.k = r.k`` (Snowflake), ``ASOF [LEFT] JOIN q ON l.k = r.k AND
l.t >= r.t`` (DuckDB) and ``JOIN v FOR SYSTEM_TIME AS OF l.t ON l.k = v.k`` (SQL:2011, Flink) become joins whose ``ON``
begins with a mark:

    LEFT JOIN q ON struct('gpu_ops.join 0') IS NOT NULL AND (l.t >= r.t) AND l.k = r.k
    JOIN v ON struct('gpu_ops.join 1', l.t) IS NOT NULL AND l.k = v.k

The text is read by sqlglot's tokenizer, word by word; nothing else of it is touched. In the analysed plan the mark is
found again, and a node put above the join that no rule of Catalyst sees through.

A filter above an ASOF join must stay there: below, on the right, another row would be the nearest one. So each
is put below a `ReturnAnswer`, a node of Spark's own that passes its rows through, past which nothing is pushed,
reordered or made plain.

So must a condition in ``ON`` on the right of a temporal join: it is asked of the version that was valid, and below the
join the one before would be valid in place of one that does not meet it. Hence conditions are taken out, but for those
that mean the same below the join: of an inner join those on the left; of an ASOF or lookup join, which choose among
the rows that meet their condition, those on the right. To Catalyst what is left is an outer join, which it neither
reorders nor gives other filters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn

from sqlglot import Token, TokenType

from gpu_ops.query.catalyst import Catalyst, class_of, conjuncts, id_of, items
from gpu_ops.query.errors import SqlError, place_of
from gpu_ops.sql_tokens import QUOTED, UnclosedError, tokenize

TimedJoinKind = Literal["asof", "temporal", "processing"]
"""An ASOF join; a temporal join by event time; one by processing time."""

MARK: Final = "gpu_ops.join "

_SHOWN_MARK: Final = re.compile(rf"\(struct\({re.escape(MARK)}[^()]*\) IS NOT NULL\) AND ")
"""A mark in one of Spark's messages."""

_ENDS: Final = {
    "JOIN", "LEFT", "RIGHT", "FULL", "INNER", "CROSS", "SEMI", "ANTI", "NATURAL", "WHERE", "GROUP", "ORDER", "HAVING",
    "LIMIT", "UNION", "EXCEPT", "MINUS", "INTERSECT", "WINDOW", "LATERAL", "PIVOT", ",", ";",
}  # fmt: skip
_SYSTEM_TIME: Final = ("FOR", "SYSTEM_TIME", "AS", "OF")

TextPiece = tuple[str, int, bool]
"""A piece of a rewritten text: the text, where it begins in the old one, and whether it is copied from there."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A join by time: what it is, and where in the user's text it stands."""

    kind: TimedJoinKind
    start: int

    @property
    def name(self) -> str:
        """The words for it in errors."""
        return "an ASOF join" if self.kind == "asof" else "a join FOR SYSTEM_TIME AS OF"


@dataclasses.dataclass(frozen=True)
class QueryText:
    """A query as the user wrote it and as Catalyst reads it.

    Attributes:
        written: the user's.
        sql: Catalyst's.
        marks: its joins by time, by the numbers in their marks.
        pieces: of what ``sql`` is made: text, where it begins in ``written``, and whether it is copied from there.
    """

    written: str
    sql: str
    marks: tuple[Mark, ...] = ()
    pieces: tuple[TextPiece, ...] = ()

    def error(self, error: SqlError) -> SqlError:
        """An error in ``sql`` as one in ``written``."""
        if not self.marks or error.sql != self.sql:
            return error
        message = _SHOWN_MARK.sub("", error.message)
        return SqlError(message, self.written, *self.place(error.line, error.column))

    def place(self, line: int, column: int) -> tuple[int, int]:
        """Line and column in ``written`` of what stands at a line and column of ``sql``."""
        at = sum(len(row) + 1 for row in self.sql.split("\n")[: line - 1]) + column - 1
        for text, start, copied in self.pieces:
            if at < len(text):
                return place_of(self.written, start + at * copied)
            at -= len(text)
        return place_of(self.written, len(self.written)) if self.pieces else (line, column)


def error_at(message: str, sql: str, start: int) -> SqlError:
    """An error at a position of a text, counted from 0."""
    return SqlError(message, sql, *place_of(sql, start))


def read(sql: str) -> QueryText:
    """A query, its joins by time rewritten.

    Raises:
        SqlError: one of them is not complete.
    """
    lowered = sql.lower()
    if "asof" not in lowered and "system_time" not in lowered:
        return QueryText(sql, sql)
    try:
        tokens = tokenize(sql)[:-1]
    except UnclosedError:  # a quote that is not closed: Spark says where
        return QueryText(sql, sql)
    return _TimedJoins(sql, tokens).done()


class Rewriting:
    """Collects the edits of one text, and makes them; places in the new text are those in the old one.

    Args:
        sql: the text.
        tokens: of it.
    """

    def __init__(self, sql: str, tokens: Sequence[Token]) -> None:
        self.sql, self.tokens = sql, tokens
        self.edits: list[tuple[int, int, list[TextPiece]]] = []

    def text(self, marks: Sequence[Mark] = ()) -> QueryText:
        """The text with its edits."""
        pieces, at = list[TextPiece](), 0
        for start, stop, replacement in sorted(self.edits, key=lambda edit: edit[:2]):
            pieces += [(self.sql[at:start], at, True), *replacement]
            at = stop
        pieces.append((self.sql[at:], at, True))
        return QueryText(self.sql, "".join(text for text, _, _ in pieces), tuple(marks), tuple(pieces))

    def levels(self, first: int) -> Iterator[tuple[int, int]]:
        """Numbers of tokens, and how many parentheses are open after each."""
        depth = 0
        for number in range(first, len(self.tokens)):
            depth += {"(": 1, ")": -1}.get(self.word(number), 0)
            yield number, depth

    def word(self, number: int) -> str:
        """A word or symbol in capitals; nothing where something quoted or nothing stands."""
        if not 0 <= number < len(self.tokens) or self.tokens[number].token_type in QUOTED:
            return ""
        return self.tokens[number].text.upper()

    def sees(self, number: int, *words: str) -> bool:
        """True if these words or symbols stand at a token."""
        return all(self.word(number + n) == word for n, word in enumerate(words))

    def is_name(self, number: int) -> bool:
        """True for a name, quoted or not."""
        if not 0 <= number < len(self.tokens):
            return False
        token = self.tokens[number]
        return token.token_type == TokenType.IDENTIFIER or (
            token.token_type != TokenType.STRING and token.text.isidentifier()
        )

    def end(self, number: int) -> int:
        """The position behind a token."""
        return int(self.tokens[number].end) + 1

    def replace(self, first: int, last: int, text: str) -> None:
        """Puts a text in the place of some tokens."""
        start = self.tokens[first].start
        self.edits.append((start, self.end(last), [(text, start, False)]))

    def insert(self, after: int, pieces: list[TextPiece]) -> None:
        """Puts pieces behind a token."""
        self.edits.append((self.end(after), self.end(after), pieces))

    def fail(self, message: str, number: int) -> NoReturn:
        """Raises an error at a token."""
        raise error_at(message, self.sql, self.tokens[min(number, len(self.tokens) - 1)].start)


class _TimedJoins(Rewriting):
    """Rewrites the joins by time of one text."""

    def __init__(self, sql: str, tokens: Sequence[Token]) -> None:
        super().__init__(sql, tokens)
        self.marks: list[Mark] = []

    def done(self) -> QueryText:
        for number in range(len(self.tokens)):
            if self.word(number) == "ASOF" and self.word(number - 1) not in ("AS", "."):
                self._asof(number)
            elif self.sees(number, *_SYSTEM_TIME):
                self._temporal(number)
        return self.text(self.marks)

    def _asof(self, number: int) -> None:
        at = number + 1
        how = self.word(at)
        if how in ("LEFT", "INNER", "RIGHT", "FULL"):
            at += 2 if self.word(at + 1) == "OUTER" else 1
        if self.word(at) != "JOIN":
            return  # a name
        if how in ("RIGHT", "FULL"):
            self.fail("an ASOF join is INNER or LEFT", number)
        mark = self._mark(Mark("asof", self.tokens[number].start))
        self.replace(number, number, " " * len("ASOF"))
        where = self._condition(at + 1, number)
        if self.word(where) == "ON":
            self.insert(where, [(f" {mark} AND", self.end(where), False)])
            return
        if self.word(where + 1) != "(":
            self.fail("MATCH_CONDITION takes a comparison in parentheses: MATCH_CONDITION (l.t >= r.t)", where)
        close = next((n for n, depth in self.levels(where + 1) if depth == 0), None)
        if close is None:
            self.fail("this parenthesis is not closed", where + 1)
        self.replace(where, where, f"ON {mark} AND ")
        if self.word(close + 1) == "ON":
            self.replace(close + 1, close + 1, "AND ")
        elif self.word(close + 1) == "USING":
            self.fail("write ON instead of USING, for the columns that are equal", close + 1)

    def _temporal(self, number: int) -> None:
        before = number - 1
        while self.is_name(before) and self.word(before - 1) == ".":
            before -= 2
        if not self.is_name(before) or self.word(before - 1) != "JOIN":
            self.fail("FOR SYSTEM_TIME AS OF follows the table of a JOIN, before its alias", number)
        first = last = number + len(_SYSTEM_TIME)
        if [self.word(first + n) for n in range(3)] == ["PROCTIME", "(", ")"]:
            last, kind, as_of = first + 2, "processing", list[TextPiece]()
        else:
            while self.is_name(last) and self.word(last + 1) == ".":
                last += 2
            if not self.is_name(last) or self.word(last + 1) in ("(", "+", "-"):
                self.fail("FOR SYSTEM_TIME AS OF takes the event time of a row on the left, or PROCTIME()", first)
            start, stop = self.tokens[first].start, self.end(last)
            kind, as_of = "temporal", [(", ", start, False), (self.sql[start:stop], start, True)]
        mark = self._mark(Mark(kind, self.tokens[number].start)).removesuffix(") IS NOT NULL")  # type: ignore[arg-type]
        self.replace(number, last, "")
        where = self._condition(last + 1, number)
        if self.word(where) != "ON":
            self.fail("MATCH_CONDITION belongs to an ASOF join", where)
        end = self.end(where)
        self.insert(where, [(f" {mark}", end, False), *as_of, (") IS NOT NULL AND", end, False)])

    def _condition(self, first: int, join: int) -> int:
        """The number of ``ON`` or ``MATCH_CONDITION`` of a join, which comes from a token on."""
        where = len(self.tokens)
        for number, depth in self.levels(first):
            if depth < 0 or (depth == 0 and self.word(number) in (*_ENDS, "ON", "USING", "MATCH_CONDITION")):
                where = number
                break
        if self.word(where) == "USING":
            self.fail("write ON instead of USING, for the columns that are equal", where)
        if self.word(where) not in ("ON", "MATCH_CONDITION"):
            self.fail("this join by time needs its condition: ON l.k = r.k", join)
        return where

    def _mark(self, mark: Mark) -> str:
        self.marks.append(mark)
        return f"struct('{MARK}{len(self.marks) - 1}') IS NOT NULL"


# --- in the plan ----------------------------------------------------------------------------------

APART: Final = "ReturnAnswer"
"""The node above a join by time."""


@dataclasses.dataclass(frozen=True)
class ByTime:
    """A join by time as the text has it.

    Attributes:
        number: of its mark.
        kind: of join.
        as_of: the id of the attribute that stands after ``FOR SYSTEM_TIME AS OF``; None for the other kinds.
        on: what of its condition is not below it, parts joined by AND, as Catalyst has them.
    """

    number: int
    kind: TimedJoinKind
    as_of: int | None = None
    on: tuple[Any, ...] = ()


def set_apart(catalyst: Catalyst, plan: Any, text: QueryText) -> tuple[Any, Mapping[frozenset[str], ByTime]]:
    """A plan without sub-queries, its joins by time set apart and without their marks.

    Args:
        catalyst: the analyser.
        plan: the plan.
        text: the query.

    Returns:
        The plan, and what each such join is, by the ids of its leaves' first columns.
    """
    apart = _Apart(catalyst, text)
    return (apart.plan(plan) if text.marks else plan), apart.joins


def check_all_found(text: QueryText, joins: Iterable[ByTime]) -> None:
    """That each join by time of a text is one in the plan.

    Raises:
        SqlError: a mark is not where it was put: in a sub-query of WHERE, or beside an OR.
    """
    numbers = {each.number for each in joins}
    for number, mark in enumerate(text.marks):
        if number not in numbers:
            raise error_at(
                f"{mark.name} stands in FROM, and its conditions are joined by AND: ON l.k = r.k AND l.j = r.j",
                text.written,
                mark.start,
            )


class _Apart:
    def __init__(self, catalyst: Catalyst, text: QueryText) -> None:
        self.catalyst, self.text = catalyst, text
        self.joins: dict[frozenset[str], ByTime] = {}

    def plan(self, node: Any) -> Any:
        below = items(node.children())
        children = [self.plan(child) for child in below]
        if any(new is not old for new, old in zip(children, below, strict=True)):
            node = node.withNewChildren(self.catalyst.seq(children))
        if str(node.nodeName()) != "Join" or not node.condition().isDefined():
            return node
        parts = conjuncts(node.condition().get())
        marks = {position: mark for position, part in enumerate(parts) if (mark := _mark(part)) is not None}
        if not marks:
            return node
        ((number, as_of), *_) = reversed(marks.values())
        kind, inner = self.text.marks[number].kind, str(node.joinType()) == "Inner"
        left, right, on = [], [], []
        for position, part in enumerate(parts):
            if position in marks:
                continue
            if inner and part.references().subsetOf(node.left().outputSet()):
                left.append(part)
            elif kind != "temporal" and part.references().subsetOf(node.right().outputSet()):
                right.append(part)
            else:
                on.append(part)
        self.joins[_leaves(node)] = ByTime(number, kind, as_of, tuple(on))
        return self.catalyst.apart(node, left, right)


def _mark(part: Any) -> tuple[int, int | None] | None:
    """The number in a mark, and the id of the attribute in it."""
    if class_of(part) != "IsNotNull" or class_of(part.child()) != "CreateNamedStruct":
        return None
    values = items(part.child().children())[1::2]
    text = str(values[0])
    if not text.startswith(MARK):
        return None
    return int(text.removeprefix(MARK)), id_of(values[1]) if len(values) > 1 else None


def _leaves(plan: Any) -> frozenset[str]:
    outputs: Iterable[Any] = (leaf.output() for leaf in items(plan.collectLeaves()))
    return frozenset(str(output.apply(0).exprId().id()) for output in outputs if output.length())
