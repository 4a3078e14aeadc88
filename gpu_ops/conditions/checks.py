"""Errors of ANSI mode: where ``spark.sql.ansi.enabled`` makes one of what is null or wraps around without it.

While a text is read, `note` keeps for a node the test of the rows in which Spark would fail at it. `failing` makes one
condition of them, which backends evaluate like any other: it knows that AND, OR, CASE and COALESCE leave operands out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from gpu_ops.conditions.expressions import ANSI, BOOL, DOUBLE, Call, Literal, Node, Op, convert, kind

_noted: ContextVar[dict[int, tuple[Node, Node]]] = ContextVar("noted")


@contextmanager
def reading(*, ansi: bool) -> Iterator[None]:
    """For as long as a text is read: whether in ANSI mode."""
    tokens = ANSI.set(ansi), _noted.set({})
    try:
        yield
    finally:
        ANSI.reset(tokens[0])
        _noted.reset(tokens[1])


def note(node: Node, fails: Callable[[], Node | None]) -> Node:
    """The node; in ANSI mode its own failure, a boolean node, is kept (None for a node that cannot fail)."""
    if ANSI.get() and isinstance(node, Call):
        test = fails()
        if test is not None:
            _noted.get()[id(node)] = node, test  # with the node, so that no other one gets its id
    return node


def calculated(node: Call) -> Node:
    """An operation on numbers, its failure noted: an integer that overflows, a division by zero."""
    return note(node, lambda: _failure(node))


def _failure(node: Call) -> Node | None:
    left, right = node.args[0], node.args[-1]
    if node.op in (Op.DIV, Op.MOD):
        if isinstance(right, Literal) and right.value:
            return None
        zero = Call(Op.EQ, (right, convert(Literal(0, right.type), right.type)), BOOL)
        return both(zero, negation(Call(Op.IS_NULL, (left,), BOOL)))
    if kind(node.type) != "integer":
        return None
    lowest = -(1 << (node.type.bit_width - 1))
    if node.op in (Op.NEG, Op.ABS):
        return Call(Op.EQ, (left, Literal(lowest, left.type)), BOOL)
    # What has wrapped around is far from what the same comes to in floating point, where nothing does.
    near = Call(node.op, (convert(left, DOUBLE), convert(right, DOUBLE)), DOUBLE)
    apart = Call(Op.ABS, (Call(Op.SUB, (convert(node, DOUBLE), near), DOUBLE),), DOUBLE)
    return Call(Op.LT, (Literal(-lowest / 2.0, DOUBLE), apart), BOOL)


def both(first: Node, second: Node) -> Node:
    """AND."""
    return Call(Op.AND, (first, second), BOOL)


def negation(node: Node) -> Node:
    """NOT."""
    return Call(Op.NOT, (node,), BOOL)


def failing(root: Node) -> Node | None:
    """Where Spark fails at this tree: a boolean node, null for no; None where it cannot."""
    noted = _noted.get()
    if not noted:
        return None
    found: dict[int, dict[int, Node]] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        args = node.args if isinstance(node, Call) else ()
        waiting = [arg for arg in args if id(arg) not in found]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        if id(node) not in found:
            tests = _evaluated(node, found) if isinstance(node, Call) else []
            if id(node) in noted:
                tests.append(noted[id(node)][1])
            found[id(node)] = {id(test): test for test in tests}
    return _any(list(found[id(root)].values()))


def _evaluated(node: Call, found: dict[int, dict[int, Node]]) -> list[Node]:
    """The failures of a node's operands, where they are evaluated at all."""
    args = node.args
    if node.op in (Op.AND, Op.OR, Op.COALESCE):
        tests: list[Node] = []
        reached: list[Node] = []
        for arg in args:
            own = _any(list(found[id(arg)].values()))
            if own is not None:
                tests.append(functools.reduce(both, [*reached, own]))
            if node.op is Op.COALESCE:
                reached.append(Call(Op.IS_NULL, (arg,), BOOL))
            else:
                reached.append(negation(Call(Op.SAME, (arg, Literal(node.op is Op.OR, BOOL)), BOOL)))
        return tests
    if node.op is not Op.CASE:
        return [test for arg in args for test in found[id(arg)].values()]
    result = _any(list(found[id(args[-1])].values()))
    for test, value in zip(args[-3::-2], args[-2::-2], strict=True):
        inside = _any(list(found[id(value)].values()))
        if inside is not None or result is not None:
            no = Literal(False, BOOL)
            result = Call(Op.CASE, (test, inside or no, result or no), BOOL)
        before = list(found[id(test)].values())
        result = _any([*before, *([result] if result is not None else [])])
    return [result] if result is not None else []


def _any(nodes: Sequence[Node]) -> Node | None:
    """OR of any number, as a flat tree."""
    if len(nodes) <= 1:
        return nodes[0] if nodes else None
    half = len(nodes) // 2
    parts = _any(nodes[:half]), _any(nodes[half:])
    return Call(Op.OR, (parts[0] or parts[1], parts[1] or parts[0]), BOOL)  # type: ignore[arg-type]
