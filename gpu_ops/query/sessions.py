"""``session_window(time, gap)`` of a query: which time, which gap.

Catalyst makes of it a struct of the time and the time plus the gap, in a projection below, and merges these wherever
such a column is grouped by; its metadata says that it is one.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from gpu_ops.query.catalyst import class_of, items
from gpu_ops.query.expressions import Expr, QueryColumn
from gpu_ops.query.places import words_of
from gpu_ops.query.relations import Compute, Relation, RowByRow
from gpu_ops.query.scope import Below, Scope

SESSION: Final = "spark.sessionWindow"
"""Key of the metadata that Catalyst gives a column of sessions."""
_CONVERSIONS: Final = ("KnownNullable", "PreciseTimestampConversion", "Cast")
_AGAIN: Final = "these sessions are merged already, and Spark would merge them again: group by their start and end"


class Session(NamedTuple):
    """Sessions that are grouped by.

    Attributes:
        time: the column of times.
        gap_ms: how many milliseconds apart rows are at most.
        window: the columns for the start and the end of each.
    """

    time: QueryColumn
    gap_ms: int
    window: tuple[QueryColumn, QueryColumn]


def session_of(scope: Scope, inside: Below, group: Any, below: Relation, node: Any) -> Session:
    """The sessions of a column that is grouped by.

    Args:
        scope: of the query.
        inside: gets the column of times, where that is an expression.
        group: Catalyst's expression of the column.
        below: what is grouped.
        node: the node that groups.

    Raises:
        SqlError: a gap that is no number of milliseconds, or sessions of what has been merged before.
    """
    struct = _made_by(scope.expr(group), below)
    if struct is None or struct.kind != "CreateNamedStruct":
        scope.fail(_AGAIN, node)
    _, start, _, end = items(struct.java.children())
    time, later = _converted(start), _converted(end)
    if "Interval" not in class_of(later) and class_of(later) != "TimeAdd":
        scope.fail(_AGAIN, node)
    since, interval = items(later.children())
    if not since.semanticEquals(time):
        scope.fail(_AGAIN, node)
    gap_ms = _gap_ms(scope, later, interval)
    window = (
        scope.nameless(scope.catalyst.field(group, 0), "session_start", lambda: f"the start of {words_of(group)}"),
        scope.nameless(scope.catalyst.field(group, 1), "session_end", lambda: f"the end of {words_of(group)}"),
    )
    return Session(inside.column(time, "session_time"), gap_ms, window)


def _made_by(expr: Expr, below: Relation) -> Expr | None:
    """Finds the expression that computes a column, which may be called otherwise on its way; None for none."""
    while expr.column is not None or expr.kind == "Alias":
        if expr.kind == "Alias":
            expr = expr.args[0]
            continue
        while isinstance(below, RowByRow) and not (isinstance(below, Compute) and expr.column in below.computed):
            below = below.below
        if not isinstance(below, Compute) or expr.column is None:
            return None
        expr, below = below.computed[expr.column], below.below
    return expr


def _converted(java: Any) -> Any:
    """Strips conversions that leave a time as it is off an expression."""
    while class_of(java) in _CONVERSIONS and str(java.dataType().typeName()) in ("timestamp", "timestamp_ntz", "long"):
        if (
            class_of(java) == "Cast"
            and "Interval" not in class_of(java.child())
            and class_of(java.child()) != "TimeAdd"
        ):
            break  # a user's own
        java = java.child()
    return java


def _gap_ms(scope: Scope, later: Any, interval: Any) -> int:
    """The gap, of the sum of a time and it.

    Raises:
        SqlError: one of another length each time, of no whole milliseconds, or of no length.
    """
    if not interval.foldable():
        scope.fail("the gap of session_window is a constant, the same for all rows", interval)
    gap = interval.eval(None)
    if gap is None:
        scope.fail("the gap of session_window is null", interval)
    period, rest = gap.extractAsPeriod(), gap.extractAsDuration()
    months, days = int(period.toTotalMonths()), int(period.getDays())
    microseconds = int(rest.getSeconds()) * 1_000_000 + int(rest.getNano()) // 1000
    shown = str(gap.toString())
    if months:
        scope.fail(
            f"session_window: a gap of {shown} is longer in some months than in others: give it in days", interval
        )
    zone = str(later.zoneId().getId()) if str(later.dataType().typeName()) == "timestamp" else "UTC"
    if days and not scope.catalyst.never_shifts(zone):
        scope.fail(
            f"session_window: a gap of {shown} is an hour longer or shorter where clocks of {zone} are set: give it in "
            "hours",
            interval,
        )
    length = days * 86_400_000_000 + microseconds
    if length <= 0:
        scope.fail(f"session_window: a gap of {shown} is not positive, so that no row is in a session", interval)
    if length % 1000:
        scope.fail(f"session_window: a gap of {shown} is no whole number of milliseconds", interval)
    return length // 1000
