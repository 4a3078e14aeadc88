"""Which operator a join becomes: its keys, its bounds in time, what is left of its condition, and why.

Flink's rules: equalities between the sides are the key (``JoinInfo``); bounds on both event times make an interval
join (``StreamPhysicalIntervalJoinRule``), and no other join may compare them (``StreamPhysicalJoinRule``: "rowtime
attributes must not be in the input rows of a regular join").
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, NoReturn

import pyarrow as pa

from gpu_ops.conditions import expressions as ex
from gpu_ops.descriptions.intervals import Interval, time_type
from gpu_ops.descriptions.keys import key_type
from gpu_ops.errors import DescriptionError
from gpu_ops.query import nulls
from gpu_ops.query.bounds import Bound, FinerThanMillisecondsError, bounds
from gpu_ops.query.errors import fail
from gpu_ops.query.names import Column, Expr, TypeOf, computed
from gpu_ops.query.relations import Compute, Condition, Filter, JoinOf, Relation, Scan

Kind = Literal["regular", "semi", "anti", "interval"]

_PLAIN: Final = (
    "To compare them as plain columns, in a regular join that keeps its rows, write CAST({} AS TIMESTAMP), or give the "
    "input without its watermark"
)


@dataclasses.dataclass(frozen=True)
class KeyColumns:
    """An equality between the sides; computed operands have columns of their own."""

    left: Column
    right: Column
    null_safe: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A join as an operator.

    Attributes:
        kind: of the operator.
        keys: its equality columns.
        computed: columns to compute below it, on the left and on the right.
        residual: conditions for the operator.
        above: conditions of an inner join that the operator does not understand.
        interval: the bounds of an interval join.
        times: its event-time columns.
        null_aware: NOT IN.
        why: the reason.
    """

    kind: Kind
    keys: tuple[KeyColumns, ...]
    computed: tuple[dict[Column, Expr], dict[Column, Expr]]
    residual: tuple[Condition, ...]
    above: tuple[Condition, ...]
    interval: Interval | None
    times: tuple[Column, Column] | None
    null_aware: bool
    why: str


class Chooser:
    """Chooses for the joins of one query."""

    def __init__(self, sql: str, type_of: TypeOf, time_zone: str = "UTC", *, ansi: bool = False) -> None:
        """Args: the query's text; how the types of computed keys are found out; the session's time zone and mode."""
        self.sql, self.type_of, self.time_zone, self.ansi = sql, type_of, time_zone, ansi
        self._chosen: dict[JoinOf, Choice] = {}
        self._computed: dict[tuple[object, ...], Column] = {}

    def fail(self, message: str, at: int) -> NoReturn:
        """SqlError at an offset."""
        fail(self.sql, message, at)

    def choice(self, join: JoinOf) -> Choice:
        """The operator of a join.

        Raises:
            SqlError: there is none for it.
        """
        if join not in self._chosen:
            self._chosen[join] = self._choose(join)
        return self._chosen[join]

    # --- what is below --------------------------------------------------------------------------

    def event_times(self, relation: Relation) -> frozenset[Column]:
        """The columns of a relation that an interval join can go by."""
        if isinstance(relation, Scan):
            return frozenset(c for c in relation.columns if c.event_time)
        if isinstance(relation, Filter | Compute):
            return self.event_times(relation.below)
        choice = self.choice(relation)
        if choice.times is None:
            return frozenset()
        kept = {"inner": (0, 1), "left": (0,), "right": (1,)}.get(relation.how, ())
        return frozenset(choice.times[side] for side in kept)  # a pad's event time is null

    def taken_back(self, relation: Relation) -> str | None:
        """What in a relation takes rows back, or None if it only grows."""
        if isinstance(relation, Scan):
            return None if relation.table.insert_only else f"{relation.alias} brings {relation.table.changes}"
        if isinstance(relation, Filter | Compute):
            return self.taken_back(relation.below)
        kind = self.choice(relation).kind
        return None if kind == "interval" else f"the {kind} join below takes rows back"

    # --- choosing -------------------------------------------------------------------------------

    def _choose(self, join: JoinOf) -> Choice:
        left, right = join.left.columns, join.right.columns
        timed = [c for c in join.on if c.expr.times & left and c.expr.times & right]
        interval, times, used = self._interval(join, timed) if timed else (None, None, [])
        keys: list[KeyColumns] = []
        made: tuple[dict[Column, Expr], dict[Column, Expr]] = ({}, {})
        rest: list[Condition] = []
        members = [c for c in join.on if c.member]
        null_aware = bool(members) and not self._never_null(join, members)
        for condition in join.on:
            if condition in used or _is_true(condition):
                continue
            sides = self._sides(join, condition)
            may = not null_aware or condition.member  # besides what NOT IN compares, equality is a plain condition
            key = self._key(condition, sides, made) if sides is not None and may else None
            if key is not None:
                keys.append(key)
            elif condition.member and null_aware:
                self.fail("NOT IN compares one expression of each side: write NOT EXISTS (...)", condition.expr.at)
            else:
                rest.append(condition)
        residual: list[Condition] = []
        above: list[Condition] = []
        for condition in rest:
            understood = nulls.tree(condition, self.time_zone, ansi=self.ansi) is not None
            (residual if understood or join.how != "inner" else above).append(condition)
        kind: Kind = "interval" if interval else join.how if join.how in ("semi", "anti") else "regular"
        why = self._why(join, kind, interval, times, null_aware=null_aware)
        return Choice(kind, tuple(keys), made, tuple(residual), tuple(above), interval, times, null_aware, why)

    def _never_null(self, join: JoinOf, members: list[Condition]) -> bool:
        known = nulls.never_null(join.left) | nulls.never_null(join.right)
        return all(side.column in known for c in members for side in c.equality or ())

    def _sides(self, join: JoinOf, condition: Condition) -> tuple[Expr, Expr] | None:
        """The operands of an equality, the left side's first."""
        if condition.equality is None:
            return None
        a, b = condition.equality
        for one, other in ((a, b), (b, a)):
            left, right = frozenset(one.columns), frozenset(other.columns)
            if left <= join.left.columns and right <= join.right.columns and ((left and right) or condition.member):
                return one, other
        return None

    def _key(
        self, condition: Condition, sides: tuple[Expr, Expr], made: tuple[dict[Column, Expr], dict[Column, Expr]]
    ) -> KeyColumns | None:
        columns = [side.column or self.key_column(side) for side in sides]
        for column, side in zip(columns, sides, strict=True):
            if column.type is None:
                self.fail(
                    f"the type of {side.text()!r} is not known without Spark: CAST it to the type it has", side.at
                )
            if pa.types.is_nested(column.type):
                return None
        try:
            key_type(*(pa.field(side.text(), c.type) for side, c in zip(sides, columns, strict=True)))
        except DescriptionError as error:
            self.fail(str(error).replace("one of them first", "one of them in the query"), condition.expr.at)
        for column, side, into in zip(columns, sides, made, strict=True):
            if side.column is None:
                into[column] = side
        return KeyColumns(columns[0], columns[1], condition.null_safe)

    def key_column(self, expr: Expr) -> Column:
        """A column for an expression: the same one for the same text."""
        identity = tuple(part if isinstance(part, Column) else " ".join(part.split()) for part in expr.parts)
        if identity not in self._computed:
            owners = list(dict.fromkeys(c.owner for c in expr.columns))
            label = f"key_{len(self._computed) + 1}"
            self._computed[identity] = computed(expr, label, "_".join(owners), self.type_of, self.sql)
        return self._computed[identity]

    # --- time -----------------------------------------------------------------------------------

    def _interval(
        self, join: JoinOf, timed: list[Condition]
    ) -> tuple[Interval, tuple[Column, Column], list[Condition]]:
        """The bounds that these conditions set."""
        at = timed[0].expr.at
        left, right = self.event_times(join.left), self.event_times(join.right)
        for condition in timed:
            for column in sorted(condition.expr.times - left - right, key=str):
                self.fail(
                    f"{column} is no event time above the join below, which may take rows back or leaves it null. Join "
                    f"on both event times first. {_PLAIN.format(column)}",
                    condition.expr.at,
                )
        found: list[tuple[Condition, list[Bound]]] = []
        for condition in timed:
            try:
                found.append((condition, bounds(condition, join.left.columns, join.right.columns)))
            except FinerThanMillisecondsError:
                self.fail("the bounds of an interval join are whole milliseconds", condition.expr.at)
        pair = next(((b.left, b.right) for _, bs in found for b in bs), None)
        used = [(c, bs) for c, bs in found if bs and all((b.left, b.right) == pair for b in bs)]
        every = [b for _, bs in used for b in bs]
        lower = [b for b in every if not b.upper]
        upper = [b for b in every if b.upper]
        if pair is None or not lower or not upper:
            own = [next(c for c in timed[0].expr.times if c in side.columns) for side in (join.left, join.right)]
            names = [str(column) for column in pair or own]
            if pair is None:
                what = f"the event times {names[0]} and {names[1]} are compared, but not with a constant between them"
            else:
                what = f"{pair[1]} has no {'lower' if not lower else 'upper'} bound against {pair[0]}"
            self.fail(
                f"{what}: an interval join needs both bounds, as in "
                f"{names[1]} BETWEEN {names[0]} - INTERVAL 10 MINUTES AND {names[0]} + INTERVAL 1 HOUR. "
                f"{_PLAIN.format(names[0])}",
                (used[0][0].expr.at if used else at),
            )
        if join.how in ("semi", "anti"):
            self.fail(
                f"a {join.how} join by interval is not built: an interval join is INNER, LEFT, RIGHT or FULL. "
                f"{_PLAIN.format(pair[0])}",
                at,
            )
        for side in (join.left, join.right):
            why = self.taken_back(side)
            if why is not None:
                self.fail(f"an interval join takes inputs that only grow, and {why}. {_PLAIN.format(pair[0])}", at)
        low = max(lower, key=lambda b: (b.ms, not b.inclusive))
        high = min(upper, key=lambda b: (b.ms, b.inclusive))
        try:
            interval = Interval(low.ms, high.ms, low.inclusive, high.inclusive)
            time_type(pair[0].type, pair[1].type)
        except DescriptionError as error:
            self.fail(str(error), used[0][0].expr.at)
        return interval, pair, [c for c, _ in used]

    def _why(
        self,
        join: JoinOf,
        kind: Kind,
        interval: Interval | None,
        times: tuple[Column, Column] | None,
        *,
        null_aware: bool,
    ) -> str:
        if interval is not None and times is not None:
            return f"interval: {times[1]} is bounded on both sides of {times[0]}"
        if kind in ("semi", "anti"):
            if null_aware:
                return "null-aware anti: NOT IN, and a null may be on either side; all rows go to one partition"
            if join.spoken == "NOT IN":
                return "anti: NOT IN, and no side has nulls"
            return f"{kind}: {join.spoken}"
        both = [self.event_times(side) for side in (join.left, join.right)]
        if all(both):
            return f"regular: {join.spoken} whose condition does not compare the event times: rows are kept for ever"
        return f"regular: {join.spoken}"


def _is_true(condition: Condition) -> bool:
    if condition.columns:
        return False
    found = nulls.tree(condition)
    return found is not None and isinstance(found[0], ex.Literal) and found[0].value is True
