"""The syntax tree of a query, and its tokens."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, NamedTuple

from gpu_ops.conditions.tokens import Token, tokenize
from gpu_ops.errors import ConditionError
from gpu_ops.query.errors import SqlError

How = Literal["inner", "left", "right", "full", "semi", "anti"]


class Span(NamedTuple):
    """Tokens ``first`` up to ``stop`` of the query."""

    first: int
    stop: int


class Item(NamedTuple):
    """One entry of a SELECT list."""

    span: Span
    """The expression; of ``*`` and ``t.*`` the qualifier, which may be empty."""
    alias: str | None
    star: bool
    at: int
    """Offset in the query, as everywhere."""


@dataclasses.dataclass(frozen=True)
class TableName:
    """A name in FROM."""

    name: str
    alias: str
    columns: tuple[str, ...] | None
    at: int


@dataclasses.dataclass(frozen=True)
class SubTable:
    """A sub-query in FROM; ``columns``: new names for its columns."""

    query: Select
    alias: str | None
    columns: tuple[str, ...] | None
    at: int


@dataclasses.dataclass(frozen=True)
class JoinClause:
    """Two relations joined; a comma and CROSS JOIN are inner joins without a condition."""

    left: Relation
    right: Relation
    how: How
    on: Span | None
    using: tuple[Token, ...]
    at: int
    comma: bool = False


@dataclasses.dataclass(frozen=True)
class Select:
    """A SELECT with its WITH."""

    items: tuple[Item, ...]
    relation: Relation
    where: Span | None
    ctes: tuple[tuple[str, tuple[str, ...] | None, Select], ...]
    distinct: int | None
    """Where DISTINCT stands, which only a sub-query after IN or EXISTS may say."""
    at: int


Relation = TableName | SubTable | JoinClause


@dataclasses.dataclass(frozen=True)
class Source:
    """A query's text and tokens."""

    sql: str
    tokens: tuple[Token, ...]

    @classmethod
    def of(cls, sql: str) -> Source:
        """The tokens of a query.

        Raises:
            SqlError: a quote or comment that is not closed.
        """
        try:
            tokens = tokenize(sql)
        except ConditionError as error:
            raise SqlError(error.message, sql, error.line, error.column) from None
        return cls(sql, tuple(word for token in tokens for word in _words(token)))

    def text(self, span: Span) -> str:
        """What is written there."""
        return self.sql[self.start(span) : self.tokens[span.stop - 1].end] if span.stop > span.first else ""

    def start(self, span: Span) -> int:
        """The offset of its first token."""
        return self.tokens[span.first].start

    def word(self, at: int) -> str:
        """A token's word or symbol in upper case; empty for a quoted name, a literal and a name after a dot."""
        token = self.tokens[min(at, len(self.tokens) - 1)]
        if token.kind not in ("word", "symbol") or (at and self.tokens[at - 1].text == "." and token.kind == "word"):
            return ""
        return token.text.upper()

    def matching(self, at: int) -> int:
        """The token that closes the parenthesis at this one; the end where none does."""
        depth = 0
        for place in range(at, len(self.tokens)):
            depth += {"(": 1, ")": -1}.get(self.tokens[place].text if self.tokens[place].kind == "symbol" else "", 0)
            if depth == 0:
                return place
        return len(self.tokens) - 1


def _words(token: Token) -> list[Token]:
    """A token that sqlglot makes of two words (``GROUP BY``) as two; any other as it is."""
    parts = list(re.finditer(r"\w+", token.text))
    if token.kind != "symbol" or len(parts) < 2 or not token.text[0].isidentifier():
        return [token]
    return [Token("word", part[0], token.start + part.start(), token.start + part.end()) for part in parts]
