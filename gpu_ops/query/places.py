"""Where in a query's text the nodes of Catalyst's plans and expressions come from, and what the query says there."""

from __future__ import annotations

import re
from typing import Any, Final

from gpu_ops.query.errors import without_generated_names


def _children(java: Any) -> list[Any]:
    below = java.children()
    return [below.apply(number) for number in range(below.length())]


def position(origin: Any) -> tuple[int, int]:
    """Line and column, both from 1, of a node's origin, or of one of Spark's errors; the query's begin for none."""
    line, start = origin.line(), origin.startPosition()
    return (int(line.get()) if line.isDefined() else 1, int(start.get()) + 1 if start.isDefined() else 1)


def position_of(java: Any) -> tuple[int, int]:
    """Line and column of a node, or of the first part of it that has a place; the query's beginning for none."""
    waiting = [java]
    while waiting:
        node = waiting.pop(0)
        if node.origin().line().isDefined():
            return position(node.origin())
        waiting += _children(node)
    return 1, 1


_OPERATOR: Final = re.compile(r"(?:NOT\s+)?(?:LIKE|ILIKE|RLIKE|REGEXP|IN|IS|BETWEEN)\b|::", re.IGNORECASE)
"""What Spark's parser has as the beginning of an expression that begins with the operand before it."""


def text_of(java: Any) -> str:
    """The piece of the query that an expression comes from, or "this"."""
    span = _span(java)
    if span is None:
        return "this"
    text, start, stop = span
    operand = _span(_children(java)[0]) if _OPERATOR.match(text, start) and _children(java) else None
    if operand is not None and operand[1] < start:
        start = operand[1]
    return " ".join(text[start:stop].split())


def _span(java: Any) -> tuple[str, int, int] | None:
    """The text that an expression comes from, and from where to where in it."""
    origin = java.origin()
    text, start, stop = origin.sqlText(), origin.startIndex(), origin.stopIndex()
    if not (text.isDefined() and start.isDefined() and stop.isDefined()):
        return None
    return str(text.get()), int(start.get()), int(stop.get()) + 1


def words_of(java: Any) -> str:
    """The piece of the query for an expression or for its only operand; Spark's own text where there is none."""
    text = text_of(java)
    while text == "this":
        if str(java.getClass().getSimpleName()) in ("AttributeReference", "Alias"):
            return str(java.name())
        below = _children(java)
        if len(below) != 1:
            return without_generated_names(str(java.sql()))
        java = below[0]
        text = text_of(java)
    return text
