"""Where in a query's text the nodes of Catalyst's plans and expressions come from, and what the query says there."""

from __future__ import annotations

from typing import Any

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


def text_of(java: Any) -> str:
    """What the query says where an expression comes from."""
    origin = java.origin()
    text, start, stop = origin.sqlText(), origin.startIndex(), origin.stopIndex()
    if not (text.isDefined() and start.isDefined() and stop.isDefined()):
        return "this"
    return " ".join(str(text.get())[int(start.get()) : int(stop.get()) + 1].split())


def words_of(java: Any) -> str:
    """What the query says for an expression, or for what that is made of; Spark's text where it says nothing."""
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
