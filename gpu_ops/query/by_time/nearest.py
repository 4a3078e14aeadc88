"""The comparison of an ASOF join: which columns' times, which row is the nearest, and how far away it may be."""

from __future__ import annotations

from typing import Final

from gpu_ops.descriptions.by_time import Asof
from gpu_ops.query.by_time.bounds import FinerThanMillisecondsError, differences
from gpu_ops.query.expressions import Column, Expr, is_no_op
from gpu_ops.query.relations import JoinOf

_TURNED: Final = {
    "GreaterThanOrEqual": "LessThanOrEqual", "GreaterThan": "LessThan",
    "LessThanOrEqual": "GreaterThanOrEqual", "LessThan": "GreaterThan",
}  # fmt: skip


class NoComparisonError(Exception):
    """Args: what is wrong; the condition that is, or None."""

    def __init__(self, message: str, condition: Expr | None = None) -> None:
        super().__init__(message)
        self.condition = condition


def nearest(join: JoinOf) -> tuple[Asof, tuple[Column, Column], list[Expr]]:
    """What an ASOF join goes by: its rule, the columns of left and right, and the conditions that say so.

    ``l.t >= r.t`` is the last right row up to the left row's time, ``l.t <= r.t`` the first one from then on;
    ``l.t - r.t <= INTERVAL 1 SECOND``, or that the other way round, is a tolerance.

    Raises:
        NoComparisonError: there is not just one comparison between a column of each side, or another is no tolerance.
    """
    left_columns, right_columns = join.left.columns, join.right.columns
    both = [c for c in join.on if c.columns.keys() & left_columns and c.columns.keys() & right_columns]
    compared = [c for c in both if c.kind in _TURNED]
    found = [c for c in compared if all(_column(arg) is not None for arg in c.args)]
    if not found and compared:
        raise NoComparisonError("an ASOF join compares a column of each side", compared[0])
    if not found:
        raise NoComparisonError("an ASOF join needs a comparison of times: MATCH_CONDITION (l.t >= r.t), or in ON")
    if len(found) > 1:
        raise NoComparisonError("an ASOF join has one comparison of times, >=, >, <= or <, beside equalities", found[1])
    (condition,) = found
    sides = [_column(arg) for arg in condition.args]
    kind = condition.kind
    if sides[0] in right_columns:
        sides.reverse()
        kind = _TURNED[kind]
    left, right = sides
    if left is None or right is None or left not in left_columns or right not in right_columns:
        raise NoComparisonError("an ASOF join compares a column of each side", condition)
    backward, exact = kind.startswith("Greater"), kind.endswith("OrEqual")
    others = [c for c in compared if c is not condition]
    tolerances = [_tolerance(c, join, (left, right), backward=backward) for c in others]
    asof = Asof("backward" if backward else "forward", min(tolerances, default=None), exact)
    return asof, (left, right), [condition, *others]


def _tolerance(condition: Expr, join: JoinOf, times: tuple[Column, Column], *, backward: bool) -> int:
    """How far apart the times may be, milliseconds."""
    apart = "{0} - {1}" if backward else "{1} - {0}"
    hint = f"the tolerance of this ASOF join is {apart.format(*times)} <= INTERVAL 1 SECOND, or how long it is"
    try:
        found = differences(condition, join.left.columns, join.right.columns)
    except FinerThanMillisecondsError:
        raise NoComparisonError("the tolerance of an ASOF join is whole milliseconds", condition) from None
    if len(found) != 1 or (found[0].left, found[0].right) != times or found[0].upper == backward:
        raise NoComparisonError(hint, condition)
    ms = -found[0].ms if backward else found[0].ms
    if ms < 0 or not found[0].inclusive:
        raise NoComparisonError(f"{hint}; it is inclusive, and not negative", condition)
    return ms


def _column(expr: Expr) -> Column | None:
    while expr.kind == "Cast" and is_no_op(expr):
        expr = expr.args[0]
    return expr.column
