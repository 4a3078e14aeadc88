"""A condition as what it joins by AND: plain predicates, equalities, and the sub-queries of EXISTS and IN.

Only the outermost level of Spark's ``booleanExpression`` is read here, on tokens; the text of each predicate
stays as the user wrote it, for whoever evaluates it.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from gpu_ops.query import refused
from gpu_ops.query.errors import fail
from gpu_ops.query.read import Reader
from gpu_ops.query.syntax import Select, Source, Span


@dataclasses.dataclass(frozen=True)
class Predicate:
    """A condition without sub-queries.

    Attributes:
        span: all of it.
        equality: both operands if it is nothing but ``x = y`` or ``x <=> y``.
        null_safe: whether it is the latter, or ``IS NOT DISTINCT FROM``.
    """

    span: Span
    equality: tuple[Span, Span] | None = None
    null_safe: bool = False


@dataclasses.dataclass(frozen=True)
class SubQuery:
    """``[NOT] EXISTS (SELECT ...)``, or ``values [NOT] IN (SELECT ...)``."""

    query: Select
    negated: bool
    values: tuple[Span, ...] | None
    """What is looked for, or None for EXISTS."""
    at: int


_PREDICATES: Final = {
    "AND", "OR", "NOT", "!", "IS", "IN", "BETWEEN", "LIKE", "ILIKE", "RLIKE", "REGEXP", "EXISTS",
    "=", "==", "<=>", "<>", "!=", "<", ">", "<=", ">=",
}  # fmt: skip


def conjuncts(source: Source, span: Span) -> list[Predicate | SubQuery]:
    """What a condition joins by AND, in its order.

    Raises:
        SqlError: a sub-query where none can be.
    """
    found: list[Predicate | SubQuery] = []
    for part in _split(source, _stripped(source, span)):
        inner = _stripped(source, part)
        if inner != part:
            found += conjuncts(source, inner)
        else:
            found.append(_sub_query(source, part) or _predicate(source, part))
    return found


def outermost(source: Source, span: Span) -> list[tuple[int, str]]:
    """The words and symbols outside all parentheses and CASEs, with their places."""
    found, depth, cases = [], 0, 0
    for at in range(span.first, span.stop):
        word = source.word(at)
        if word in (")", "]", "}"):
            depth -= 1
        elif word == "END" and cases:
            cases -= 1
        elif depth == 0 and cases == 0:
            found.append((at, word))
        depth += word in ("(", "[", "{")
        cases += word == "CASE"
    return found


def _stripped(source: Source, span: Span) -> Span:
    """Without parentheses around all of it; those of a tuple or a sub-query stay."""
    while (
        span.stop - span.first > 2
        and source.word(span.first) == "("
        and source.matching(span.first) == span.stop - 1
        and source.word(span.first + 1) not in ("SELECT", "WITH")
        and not any(word == "," for _, word in outermost(source, Span(span.first + 1, span.stop - 1)))
    ):
        span = Span(span.first + 1, span.stop - 1)
    return span


def _split(source: Source, span: Span) -> list[Span]:
    """At each AND that is not BETWEEN's; whole where an OR is weaker than all of them."""
    words = outermost(source, span)
    if any(word == "OR" for _, word in words):
        return [span]
    parts, first, between = [], span.first, 0
    for at, word in words:
        between += word == "BETWEEN"
        if word == "AND" and between:
            between -= 1
        elif word == "AND":
            if at == first:
                fail(source.sql, "expected a condition before AND", source.tokens[at].start)
            parts.append(Span(first, at))
            first = at + 1
    if first == span.stop:
        fail(source.sql, "expected a condition after AND", source.tokens[span.stop - 1].start)
    return [*parts, Span(first, span.stop)]


def _predicate(source: Source, span: Span) -> Predicate:
    refuse_sub_query(source, span)
    words = [(at, word) for at, word in outermost(source, span) if word in _PREDICATES or word == "DISTINCT"]
    names = [word for _, word in words]
    if names in (["="], ["=="], ["<=>"]):
        at = words[0][0]
        sides = Span(span.first, at), Span(at + 1, span.stop)
    elif names == ["IS", "NOT", "DISTINCT"] and _adjacent(words) and source.word(words[2][0] + 1) == "FROM":
        sides = Span(span.first, words[0][0]), Span(words[2][0] + 2, span.stop)
    else:
        return Predicate(span)
    if any(side.stop == side.first for side in sides):
        return Predicate(span)
    left, right = (_stripped(source, side) for side in sides)
    return Predicate(span, (left, right), names not in (["="], ["=="]))


def _adjacent(words: list[tuple[int, str]]) -> bool:
    """Whether nothing stands between some words."""
    return words[-1][0] - words[0][0] == len(words) - 1


def refuse_sub_query(source: Source, span: Span) -> None:
    """Raises SqlError at a sub-query inside an expression."""
    for at in range(span.first, span.stop - 1):
        if source.word(at) == "(" and source.word(at + 1) in ("SELECT", "WITH"):
            fail(source.sql, refused.SUBQUERY, source.tokens[at].start)


def _sub_query(source: Source, span: Span) -> SubQuery | None:
    at, negated = span.first, False
    while source.word(at) in ("NOT", "!"):
        at, negated = at + 1, not negated
    start = source.tokens[span.first].start
    if source.word(at) == "EXISTS" and source.word(at + 1) == "(":
        if source.word(at + 2) not in ("SELECT", "WITH", "(") or source.matching(at + 1) != span.stop - 1:
            return None
        return SubQuery(_query(source, Span(at + 1, span.stop)), negated, None, start)
    words = [(place, word) for place, word in outermost(source, Span(at, span.stop)) if word in _PREDICATES]
    names = [word for _, word in words]
    if names not in (["IN"], ["NOT", "IN"]) or not _adjacent(words) or words[-1][0] + 2 >= span.stop:
        return None
    place = words[-1][0]
    opened = place + 1
    while source.word(opened) == "(" and source.word(opened + 1) == "(":
        opened += 1
    if source.word(place + 1) != "(" or source.word(opened + 1) not in ("SELECT", "WITH"):
        return None
    if source.matching(place + 1) != span.stop - 1:
        return None
    values = Span(at, words[0][0])
    refuse_sub_query(source, values)
    negated = negated != (len(names) == 2)
    return SubQuery(_query(source, Span(place + 1, span.stop)), negated, _tuple(source, values), start)


def _query(source: Source, span: Span) -> Select:
    reader = Reader(source, span.first, span.stop)
    query = reader.query()
    if reader.at != span.stop:
        reader.unexpected("')'")
    return query


def _tuple(source: Source, span: Span) -> tuple[Span, ...]:
    """The expressions of ``(x, y)``, or the one there is."""
    if source.word(span.first) != "(" or source.matching(span.first) != span.stop - 1:
        return (span,)
    inner = Span(span.first + 1, span.stop - 1)
    found, first = [], inner.first
    for at, word in outermost(source, inner):
        if word == ",":
            found.append(Span(first, at))
            first = at + 1
    return (*found, Span(first, inner.stop))
