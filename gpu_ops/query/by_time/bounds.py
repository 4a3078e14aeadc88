"""Conditions on two event times: which of them bound an interval join.

Flink's rule (``IntervalJoinUtil.extractWindowBoundsFromPredicate``): a comparison of one side's time attribute with
the other's, plus or minus a constant; both ends bounded. A day is 24 hours, as in Flink, where clocks are changed, too.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import pyarrow as pa

from gpu_ops.query.expressions import Column, Expr, is_no_op

_DAY: Final = 86_400_000_000
_TURNED: Final = {"GreaterThan": "LessThan", "GreaterThanOrEqual": "LessThanOrEqual"}


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


def bounds(condition: Expr, left: frozenset[Column], right: frozenset[Column]) -> list[Bound]:
    """The bounds that a condition sets on two event times; arguments and errors as of `differences`."""
    return differences(condition, left, right) if condition.times == set(condition.columns) else []


def differences(condition: Expr, left: frozenset[Column], right: frozenset[Column]) -> list[Bound]:
    """The bounds that a condition sets on the difference of two columns; none if it is another one.

    Args:
        condition: over both sides, and no AND.
        left: the left side's columns.
        right: the right side's.

    Raises:
        FinerThanMillisecondsError: a bound in microseconds.
    """
    kind = _TURNED.get(condition.kind, condition.kind)
    columns = condition.columns
    if kind not in ("LessThan", "LessThanOrEqual", "EqualTo") or len(columns) != 2:
        return []
    sides = [_linear(arg) for arg in condition.args]
    if kind != condition.kind:
        sides.reverse()
    if sides[0] is None or sides[1] is None:
        return []
    (first, some), (second, others) = sides[0], sides[1]
    total = {column: first.get(column, 0) - second.get(column, 0) for column in columns}
    own = [column for column in total if column in left]
    other = [column for column in total if column in right]
    if len(own) != 1 or len(other) != 1 or {total[own[0]], total[other[0]]} != {1, -1}:
        return []
    # sum of both sides' constants: right - left + constant < 0, or the same with left - right
    constant, per_ms = some - others, 1000 if pa.types.is_timestamp(own[0].type) else 1
    if constant % per_ms:
        raise FinerThanMillisecondsError
    upper = total[other[0]] == 1
    value = -constant // per_ms if upper else constant // per_ms
    if kind == "EqualTo":
        return [Bound(own[0], other[0], which, value, inclusive=True) for which in (False, True)]
    return [Bound(own[0], other[0], upper, value, inclusive=kind == "LessThanOrEqual")]


def _linear(expr: Expr) -> tuple[dict[Column, int], int] | None:
    """An expression as a sum of columns and a constant, in microseconds or in the columns' own unit."""
    if expr.column is not None:
        return {expr.column: 1}, 0
    if not expr.columns:
        value = _constant(expr)
        return None if value is None else ({}, value)
    if expr.kind == "Cast":  # of a column it may be another value
        return None if expr.args[0].column is not None and not is_no_op(expr) else _linear(expr.args[0])
    signs = {"Add": (1, 1), "TimeAdd": (1, 1), "TimestampAddInterval": (1, 1), "Subtract": (1, -1),
             "SubtractTimestamps": (1, -1), "UnaryMinus": (-1,)}.get(expr.kind)  # fmt: skip
    if signs is None:
        return None
    found: dict[Column, int] = {}
    constant = 0
    for sign, arg in zip(signs, expr.args, strict=True):
        part = _linear(arg)
        if part is None:
            return None
        for column, count in part[0].items():
            found[column] = found.get(column, 0) + sign * count
        constant += sign * part[1]
    return found, constant


def _constant(expr: Expr) -> int | None:
    """Of an interval its microseconds, of an integer itself."""
    kind = str(expr.java.dataType().typeName())
    if not expr.java.foldable() or not (kind.startswith("interval") or kind in ("integer", "long", "short", "byte")):
        return None
    value = expr.java.eval(None)
    if kind != "interval":
        return None if value is None or "year" in kind or "month" in kind else int(value)
    return None if value.months else int(value.days) * _DAY + int(value.microseconds)
