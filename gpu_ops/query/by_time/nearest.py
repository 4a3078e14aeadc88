"""The comparison of an ASOF join: which columns' times, and which row is the nearest."""

from __future__ import annotations

from typing import Final

from gpu_ops.descriptions.asof_join import Asof
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


def nearest(join: JoinOf) -> tuple[Asof, tuple[Column, Column], Expr]:
    """What an ASOF join goes by: its rule, the columns of left and right, and the condition that says so.

    ``l.t >= r.t`` is the last right row up to the left row's time, ``l.t <= r.t`` the first one from then on.

    Raises:
        NoComparisonError: there is not just one comparison between a column of each side.
    """
    left_columns, right_columns = join.left.columns, join.right.columns
    both = [c for c in join.on if c.columns.keys() & left_columns and c.columns.keys() & right_columns]
    found = [c for c in both if c.kind in _TURNED]
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
    direction, exact = ("backward" if kind.startswith("Greater") else "forward"), kind.endswith("OrEqual")
    return Asof(direction, None, exact), (left, right), condition  # type: ignore[arg-type]


def _column(expr: Expr) -> Column | None:
    while expr.kind == "Cast" and is_no_op(expr):
        expr = expr.args[0]
    return expr.column
