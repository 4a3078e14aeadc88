"""What conditions of a join say of event times: bounds of an interval join, the comparison of an ASOF join."""

from __future__ import annotations

import dataclasses
from typing import Final

import pyarrow as pa

from gpu_ops.descriptions.by_time import Asof
from gpu_ops.query.expressions import TURNED, Expr, QueryColumn, is_no_op
from gpu_ops.query.relations import JoinOf

_DAY: Final = 86_400_000_000


@dataclasses.dataclass(frozen=True)
class Bound:
    """``right - left <= ms`` (upper) or ``right - left >= ms`` (lower)."""

    left: QueryColumn
    right: QueryColumn
    upper: bool
    ms: int
    inclusive: bool


class FinerThanMillisecondsError(Exception):
    """A bound that is no whole number of milliseconds."""


def differences(condition: Expr, left: frozenset[QueryColumn], right: frozenset[QueryColumn]) -> list[Bound]:
    """The bounds that a condition sets on the difference of two columns; none if it is another one.

    Args:
        condition: over both sides, and no AND.
        left: the left side's columns.
        right: the right side's.

    Raises:
        FinerThanMillisecondsError: a bound in microseconds.
    """
    columns, greater = condition.columns, condition.kind.startswith("Greater")
    if condition.kind not in TURNED or len(columns) != 2:
        return []
    one, other_side = (_linear(arg) for arg in (condition.args[::-1] if greater else condition.args))
    if one is None or other_side is None:
        return []
    (first, some), (second, others) = one, other_side
    total = {column: first.get(column, 0) - second.get(column, 0) for column in columns}
    lefts = [column for column in total if column in left]
    other = [column for column in total if column in right]
    if len(lefts) != 1 or len(other) != 1 or {total[lefts[0]], total[other[0]]} != {1, -1}:
        return []
    # sum of both sides' constants: right - left + constant < 0, or the same with left - right
    constant, per_ms = some - others, 1000 if pa.types.is_timestamp(lefts[0].type) else 1
    if constant % per_ms:
        raise FinerThanMillisecondsError
    upper = total[other[0]] == 1
    value = -constant // per_ms if upper else constant // per_ms
    if condition.kind == "EqualTo":
        return [Bound(lefts[0], other[0], which, value, inclusive=True) for which in (False, True)]
    return [Bound(lefts[0], other[0], upper, value, inclusive=condition.kind.endswith("OrEqual"))]


def _linear(expr: Expr) -> tuple[dict[QueryColumn, int], int] | None:
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
    counts: dict[QueryColumn, int] = {}
    constant = 0
    for sign, arg in zip(signs, expr.args, strict=True):
        part = _linear(arg)
        if part is None:
            return None
        for column, count in part[0].items():
            counts[column] = counts.get(column, 0) + sign * count
        constant += sign * part[1]
    return counts, constant


def _constant(expr: Expr) -> int | None:
    """The value of a constant: an interval in microseconds, or an integer."""
    kind = str(expr.java.dataType().typeName())
    if not expr.java.foldable() or not (kind.startswith("interval") or kind in ("integer", "long", "short", "byte")):
        return None
    value = expr.java.eval(None)
    if kind != "interval":
        return None if value is None or "year" in kind or "month" in kind else int(value)
    return None if value.months else int(value.days) * _DAY + int(value.microseconds)


class NoComparisonError(Exception):
    """Args: what is wrong; the condition that is, or None."""

    def __init__(self, message: str, condition: Expr | None = None) -> None:
        super().__init__(message)
        self.condition = condition


def nearest(join: JoinOf) -> tuple[Asof, tuple[QueryColumn, QueryColumn], list[Expr]]:
    """Reads the condition of an ASOF join: its rule, the times of both sides, and the parts that say so.

    ``l.t >= r.t`` is the last right row up to the left row's time, ``l.t <= r.t`` the first one from then on;
    ``l.t - r.t <= INTERVAL 1 SECOND``, or that the other way round, is a tolerance.

    Raises:
        NoComparisonError: there is not just one comparison between a column of each side, or another is no tolerance.
    """
    left_columns, right_columns = join.left.columns, join.right.columns
    both = [c for c in join.on if c.columns.keys() & left_columns and c.columns.keys() & right_columns]
    compared = [c for c in both if c.kind in TURNED and c.kind != "EqualTo"]
    plain = [c for c in compared if all(arg.plain.column is not None for arg in c.args)]
    if not plain and compared:
        raise NoComparisonError("an ASOF join compares a column of each side", compared[0])
    if not plain:
        raise NoComparisonError("an ASOF join needs a comparison of times: MATCH_CONDITION (l.t >= r.t), or in ON")
    if len(plain) > 1:
        raise NoComparisonError("an ASOF join has one comparison of times, >=, >, <= or <, beside equalities", plain[1])
    (condition,) = plain
    left, right = (arg.plain.column for arg in condition.args)
    kind = condition.kind
    if left in right_columns:
        left, right, kind = right, left, TURNED[kind]
    assert left is not None  # as it is compared with a column of the other side
    assert right is not None
    backward, exact = kind.startswith("Greater"), kind.endswith("OrEqual")
    others = [c for c in compared if c is not condition]
    tolerances = [_tolerance(c, join, (left, right), backward=backward) for c in others]
    asof = Asof("backward" if backward else "forward", min(tolerances, default=None), exact)
    return asof, (left, right), [condition, *others]


def _tolerance(condition: Expr, join: JoinOf, times: tuple[QueryColumn, QueryColumn], *, backward: bool) -> int:
    """The greatest distance of the two times, in milliseconds."""
    apart = "{0} - {1}" if backward else "{1} - {0}"
    hint = f"the tolerance of this ASOF join is {apart.format(*times)} <= INTERVAL 1 SECOND, or how long it is"
    try:
        bounds = differences(condition, join.left.columns, join.right.columns)
    except FinerThanMillisecondsError:
        raise NoComparisonError("the tolerance of an ASOF join is whole milliseconds", condition) from None
    if len(bounds) != 1 or (bounds[0].left, bounds[0].right) != times or bounds[0].upper == backward:
        raise NoComparisonError(hint, condition)
    ms = -bounds[0].ms if backward else bounds[0].ms
    if ms < 0 or not bounds[0].inclusive:
        raise NoComparisonError(f"{hint}; it is inclusive, and not negative", condition)
    return ms
