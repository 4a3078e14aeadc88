"""Conditions on two event times: which of them bound an interval join.

Flink's rule (``IntervalJoinUtil.extractWindowBoundsFromPredicate``): a comparison of one side's time attribute with
the other's, plus or minus a constant; both ends bounded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa

from gpu_ops.conditions import expressions as ex
from gpu_ops.conditions import parse
from gpu_ops.conditions.expressions import Op
from gpu_ops.errors import ConditionError
from gpu_ops.query.names import Column
from gpu_ops.query.relations import Condition


@dataclasses.dataclass(frozen=True)
class Bound:
    """``right - left <= ms`` (upper) or ``right - left >= ms`` (lower)."""

    left: Column
    right: Column
    upper: bool
    ms: int
    inclusive: bool


class FinerThanMillisecondsError(Exception):
    """A bound that is no whole number of milliseconds."""


def bounds(condition: Condition, left: frozenset[Column], right: frozenset[Column]) -> list[Bound]:
    """The bounds that a condition sets; none if it is another one.

    Args:
        condition: over both sides.
        left: the left side's columns.
        right: the right side's.

    Raises:
        FinerThanMillisecondsError: a bound in microseconds.
    """
    columns = list(condition.expr.columns)
    if len(columns) != 2 or condition.expr.times != set(columns):
        return []
    names = {c: f"c{number}" for number, c in enumerate(columns)}
    # Without zones, so that a day is 24 hours, as in Flink, and not what it is where clocks are changed.
    types = {c: pa.timestamp("us") if pa.types.is_timestamp(c.type) else c.type for c in columns}
    if any(kind is None for kind in types.values()):
        return []
    schema = pa.schema([pa.field(name, types[c]) for c, name in names.items()])
    try:
        root: Any = parse(condition.expr.text(names.__getitem__), {"_": schema}).root
    except ConditionError:
        return []
    named = {name: c for c, name in names.items()}
    per_ms = 1000 if pa.types.is_timestamp(types[columns[0]]) else 1
    found: list[Bound] = []
    for comparison in _comparisons(root):
        made = _bound(comparison, named, left, right, per_ms)
        if made is None:
            return []
        found += made
    return found


def _comparisons(node: Any) -> list[Any]:
    """The terms of AND, which BETWEEN is made of."""
    if isinstance(node, ex.Call) and node.op is Op.AND:
        return [part for arg in node.args for part in _comparisons(arg)]
    return [node]


def _bound(
    node: Any, named: dict[str, Column], left: frozenset[Column], right: frozenset[Column], per_ms: int
) -> list[Bound] | None:
    if not isinstance(node, ex.Call) or node.op not in (Op.LT, Op.LE, Op.EQ):
        return None
    sides = [_linear(arg) for arg in node.args]
    if sides[0] is None or sides[1] is None:
        return None
    (first, some), (second, others) = sides  # type: ignore[misc]
    total = {name: first.get(name, 0) - second.get(name, 0) for name in (*first, *second)}
    time = {name: count for name, count in total.items() if count}
    own = [name for name in time if named[name] in left]
    other = [name for name in time if named[name] in right]
    if len(time) != 2 or len(own) != 1 or len(other) != 1 or {time[own[0]], time[other[0]]} != {1, -1}:
        return None
    # sum of both sides' constants: right - left + constant < 0, or the same with left - right
    constant = some - others
    if constant % per_ms:
        raise FinerThanMillisecondsError
    ms, columns = constant // per_ms, (named[own[0]], named[other[0]])
    inclusive = node.op is not Op.LT
    upper = time[other[0]] == 1
    value = -ms if upper else ms
    if node.op is Op.EQ:
        return [Bound(*columns, which, value, inclusive=True) for which in (False, True)]
    return [Bound(*columns, upper, value, inclusive)]


def _linear(node: Any) -> tuple[dict[str, int], int] | None:
    """A tree as a sum of columns and a constant."""
    if isinstance(node, ex.Column):
        return {node.name: 1}, 0
    if isinstance(node, ex.Literal):
        return ({}, node.value) if isinstance(node.value, int) and not isinstance(node.value, bool) else None
    if node.op not in (Op.ADD, Op.SUB, Op.NEG):
        return None
    args = [_linear(arg) for arg in node.args]
    if any(arg is None for arg in args):
        return None
    found: dict[str, int] = {}
    constant = 0
    signs = (-1,) if node.op is Op.NEG else (1, 1 if node.op is Op.ADD else -1)
    for sign, arg in zip(signs, args, strict=True):
        assert arg is not None
        for name, count in arg[0].items():
            found[name] = found.get(name, 0) + sign * count
        constant += sign * arg[1]
    return found, constant
