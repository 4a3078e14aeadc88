"""Which operator a join becomes: its keys, its bounds in time, what is left of its condition, and why.

Flink's rules: equalities between the sides are the key (``JoinInfo``); bounds on both event times make an interval
join (``StreamPhysicalIntervalJoinRule``), and no other join may compare them (``StreamPhysicalJoinRule``: "rowtime
attributes must not be in the input rows of a regular join").
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import pyarrow as pa
from pyspark.sql import types as st

from gpu_ops.conditions import Condition, of_tree
from gpu_ops.conditions import expressions as trees
from gpu_ops.descriptions.arguments import two_sided
from gpu_ops.descriptions.by_time import AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join, LookupJoin
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.times import show_ms, time_type
from gpu_ops.errors import DescriptionError
from gpu_ops.query.bounds import Bound, FinerThanMillisecondsError, NoComparisonError, differences, nearest
from gpu_ops.query.by_time import ByTime
from gpu_ops.query.catalyst import Catalyst, ansi_mode, arrow_type_of
from gpu_ops.query.errors import said_in_sql
from gpu_ops.query.expressions import Expr, JoinReader, NotOursError, QueryColumn, Tree, quoted
from gpu_ops.query.places import words_of
from gpu_ops.query.relations import Called, JoinOf, LatestOf, OfGroups, Relation, RowByRow, Scan, UnionOf
from gpu_ops.query.scope import Scope
from gpu_ops.spark_types import is_binary_collated

Computed = dict[QueryColumn, Expr]
"""Columns to compute below an operator."""
OperatorKind = Literal["regular", "semi", "anti", "interval", "asof", "temporal", "lookup"]

_PLAIN: Final = (
    "To compare them as plain columns, in a regular join that keeps its rows, write CAST({} AS TIMESTAMP), or give the "
    "input without its watermark"
)


@dataclasses.dataclass(frozen=True)
class KeyColumns:
    """An equality between the sides; computed operands have columns of their own."""

    left: QueryColumn
    right: QueryColumn
    null_safe: bool


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualCondition:
    """A condition for the operator.

    Attributes:
        expr: as the query has it.
        root: as the operator's tree.
        columns: the columns that the operator needs, with those that stand for them in the tree.
        mode_matters: as of `gpu_ops.conditions.Condition`.
    """

    expr: Expr
    root: trees.Node
    columns: Mapping[QueryColumn, trees.ColumnRef]
    mode_matters: bool


def condition(
    residual: Sequence[ResidualCondition],
    called: Callable[[QueryColumn], tuple[str, str]],
    inputs: Mapping[str, pa.Schema],
    *,
    text: str | None = None,
    ansi: bool,
) -> Condition | None:
    """The condition that several make; None of none.

    Args:
        residual: these.
        called: the input of a column, and its name there.
        inputs: as of `gpu_ops.conditions.parse`.
        text: a user's; without it that of the query.
        ansi: as of `gpu_ops.conditions.parse`.
    """
    if not residual:
        return None
    roots = [
        trees.replaced(x.root, {place: trees.ColumnRef(*called(c), place.type) for c, place in x.columns.items()})
        for x in residual
    ]
    if text is None:
        needed = {c for x in residual for c in x.columns}

        def shown(column: QueryColumn) -> str:
            return ".".join(map(quoted, called(column))) if column in needed else column.name

        texts = [x.expr.text(shown) for x in residual]
        text = " AND ".join(f"({x})" if len(texts) > 1 and " OR " in x else x for x in texts)
    return of_tree(text, roots, inputs, ansi=ansi, mode_matters=any(x.mode_matters for x in residual))


def where_of(
    residual: Sequence[ResidualCondition],
    sides: Sequence[Relation],
    computed: Sequence[Computed],
    inputs: Sequence[Input],
    called: Called,
    *,
    ansi: bool,
) -> Condition | None:
    """The condition of an operator over these sides, with what is computed below it, as these inputs."""
    each = zip(sides, computed, inputs, strict=True)
    owner = {c: source.name for side, more, source in each for c in (*side.columns, *more)}
    schemas = {source.name: source.schema for source in inputs}
    return condition(residual, lambda c: (owner[c], called(c)), schemas, ansi=ansi)


class CollationKey(Expr):
    """Bytes that compare as a string does in its collation."""

    def __init__(self, inner: Expr, java: Callable[[], Any]) -> None:
        """Args: the string; Catalyst's expression."""
        super().__init__(Tree({"class": "CollationKey"}, [inner.tree], java), inner.of)


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """The operator of a join, by what its condition says of time.

    Attributes:
        kind: of the operator.
        why: it is this one.
        description: makes its description.
        times: the event-time columns of either side that it goes by, or None.
        kept: those that are event times above it.
        used: the conditions that say so.
        emit: how it always emits, or None where that is asked for.
    """

    kind: OperatorKind
    why: str
    description: Callable[..., Join]
    times: tuple[QueryColumn, QueryColumn] | None = None
    kept: frozenset[QueryColumn] = frozenset()
    used: tuple[Expr, ...] = ()
    emit: Emit | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A join as an operator.

    Attributes:
        join: the join.
        rule: which one.
        keys: its equality columns.
        computed: columns to compute below it, on the left and on the right.
        residual: conditions for the operator.
        above: conditions of an inner join that only Spark evaluates.
    """

    join: JoinOf
    rule: Rule
    keys: tuple[KeyColumns, ...]
    computed: tuple[Computed, Computed]
    residual: tuple[ResidualCondition, ...]
    above: tuple[Expr, ...]

    @property
    def kind(self) -> OperatorKind:
        """The kind of the operator."""
        return self.rule.kind

    @property
    def shown(self) -> str:
        """Its kind, as messages have it."""
        return "ASOF" if self.kind == "asof" else self.kind

    @property
    def inputs(self) -> tuple[Relation, ...]:
        """The inputs of the operator."""
        return self.join.inputs

    @property
    def outputs(self) -> tuple[Relation, ...]:
        """The inputs whose columns come out."""
        return self.join.outputs

    @property
    def used(self) -> frozenset[QueryColumn]:
        """The columns that it looks at."""
        keys = [column for key in self.keys for column in (key.left, key.right)]
        return frozenset([*keys, *(self.rule.times or ())]) | columns_of(self.residual)

    @property
    def remarked(self) -> Sequence[ResidualCondition]:
        """The conditions of which it is worth saying that they stayed where they are."""
        return [] if self.kind == "temporal" else self.residual

    def describe(self, inputs: Sequence[Input], called: Called, emit: Emit, *, ansi: bool) -> Join:
        """The description of it.

        Args:
            inputs: its inputs.
            called: what columns are called in them.
            emit: when operators have output.
            ansi: as of `gpu_ops.conditions.parse`.

        Raises:
            DescriptionError: there is none.
        """
        rule, (left, right) = self.rule, inputs
        if emit == "at_end" and rule.emit is not None:
            raise DescriptionError(f"a {rule.kind} join goes by time: there is none with emit 'at_end'")
        if emit == "at_watermark" and rule.kind != "asof":
            emit = "per_batch"
        return two_sided(
            rule.description,
            (left, right),
            how=self.join.how,
            on=tuple(Key(called(k.left), called(k.right), k.null_safe) for k in self.keys),
            where=where_of(self.residual, self.inputs, self.computed, inputs, called, ansi=ansi),
            emit=rule.emit or emit,
            null_aware=self.join.member is not None,
            ansi=ansi,
        )


def columns_of(conditions: Iterable[Expr | ResidualCondition]) -> frozenset[QueryColumn]:
    """The columns that conditions look at."""
    return frozenset(column for condition in conditions for column in condition.columns)


class Chooser(Scope):
    """Chooses for the joins of one query."""

    def __init__(self, sql: str, catalyst: Catalyst, *, final: bool = False) -> None:
        """Args: the query's text; the analyser; whether rows are to come out that nothing changes any more."""
        super().__init__(sql, catalyst)
        self.final, self.ansi = final, ansi_mode(catalyst.session)
        self._chosen: dict[JoinOf, Choice] = {}
        self._computed: dict[tuple[bool, Expr], tuple[QueryColumn, Expr]] = {}

    def choice(self, join: JoinOf) -> Choice:
        """The operator of a join.

        Raises:
            SqlError: there is none for it.
        """
        if join not in self._chosen:
            self._chosen[join] = self._choose(join)
        return self._chosen[join]

    # --- what is below --------------------------------------------------------------------------

    def event_times(self, relation: Relation) -> frozenset[QueryColumn]:
        """The columns of a relation that an interval join can go by."""
        match relation:
            case Scan():
                return frozenset(c for c in relation.columns if c.event_time)
            case RowByRow():
                return self.event_times(relation.below)
            case JoinOf():
                return self.choice(relation).rule.kept
        return frozenset()  # of groups, and of a union

    def part_times(self, relation: Relation, column: QueryColumn) -> tuple[tuple[str, str], ...] | None:
        """The inputs whose rows a union has, and what in each is an event time of it; None where not each has one."""
        if isinstance(relation, RowByRow):
            return self.part_times(relation.below, column)
        if isinstance(relation, UnionOf):
            each = zip(relation.parts, relation.of_parts.get(column, ()), strict=False)
            found = [self.part_times(part, own) for part, own in each]
            return tuple(one for times in found for one in times or ()) if found and all(found) else None
        if isinstance(relation, Scan) and column in self.event_times(relation):
            return ((relation.table.name, column.label),)
        return None

    def taken_back(self, relation: Relation) -> str | None:
        """The part of a relation that takes rows back, in words; None if the relation only grows."""
        if isinstance(relation, Scan):
            return None if relation.table.insert_only else f"{relation.alias} brings {relation.table.changes}"
        if isinstance(relation, RowByRow | LatestOf):
            return self.taken_back(relation.below)
        if isinstance(relation, UnionOf):
            return next(filter(None, map(self.taken_back, relation.parts)), None)
        if isinstance(relation, OfGroups):
            kind = {"top": "top-N", "over": "window function"}.get(relation.kind, relation.kind)
            return f"the {kind} below takes rows back"
        assert isinstance(relation, JoinOf)
        choice = self.choice(relation)
        grows = choice.kind in ("interval", "temporal", "lookup") or (choice.kind == "asof" and self.final)
        return None if grows else f"the {choice.shown} join below takes rows back"

    def lost(self, relation: Relation, column: QueryColumn) -> str | None:
        """The place in a relation where an event time ceases to be one, in words; None if there is no such place."""
        if isinstance(relation, RowByRow):
            return self.lost(relation.below, column)
        if isinstance(relation, Scan):
            return None
        if isinstance(relation, UnionOf):
            each = list(zip(relation.parts, relation.of_parts[column], strict=True))
            plain = [own for part, own in each if self.part_times(part, own) is None]
            if len(plain) == len(each):
                return None
            why = "each part of a UNION ALL has its own watermark (give the union of the DataFrames one, withWatermark)"
            if plain:
                why = f"{plain[0]}, in a part of the UNION ALL, is none"
            return f"{column} is no event time any more: {why}"
        if isinstance(relation, OfGroups):
            if column not in self.event_times(relation.below):
                return self.lost(relation.below, column)
            return f"{column} is no event time any more: {self.taken_back(relation)}"
        assert isinstance(relation, JoinOf)
        side = relation.left if column in relation.left.columns else relation.right
        below = self.lost(side, column)
        if below is not None or column not in self.event_times(side) or column in self.event_times(relation):
            return below
        choice = self.choice(relation)
        null = choice.kind in ("interval", "temporal")
        why = "may leave it null" if null else "gives rows of any age, and may take them back"
        names = " and ".join(", ".join(x.alias for x in of.scans) for of in (relation.left, relation.right))
        return f"{column} is no event time any more: the {choice.shown} {relation.sql_name} of {names} below {why}"

    # --- choosing -------------------------------------------------------------------------------

    def _rule(self, join: JoinOf) -> Rule:
        """The operator, by what the query says of time, or by its condition."""
        if join.by_time is not None:
            match join.by_time.kind:
                case "asof":
                    return self._nearest(join)
                case "processing":
                    self._check_enriched(join, "a lookup join")
                    why = f"lookup: {join.sql_name}, each row with the table as it is in the row's micro-batch"
                    return Rule("lookup", why, LookupJoin, emit="per_batch")
                case _:
                    return self._versions(join, join.by_time)
        timed = [c for c in join.on if c.times & join.left.columns and c.times & join.right.columns]
        return self._interval(join, timed) if timed else self._regular(join)

    def _choose(self, join: JoinOf) -> Choice:
        left, right = join.left.columns, join.right.columns
        rule = self._rule(join)
        keys: list[KeyColumns] = []
        computed: tuple[Computed, Computed] = ({}, {})
        residual: list[ResidualCondition] = []
        above: list[Expr] = []
        if join.member is not None:
            key = self._key(join.member, join, computed)
            assert key is not None  # what the reader takes for a member compares an expression of each side
            keys.append(key)
        for condition in join.on:
            if condition in rule.used or (condition.kind == "Literal" and condition.tree.fields["value"] == "true"):
                continue
            key = self._key(condition, join, computed) if join.member is None else None
            if key is not None:
                keys.append(key)
                continue
            if rule.kind == "asof" and any(condition.columns.keys() <= side for side in (left, right)):
                keys.append(self._only_where(condition, join, computed))
                continue
            if rule.kind == "asof":
                self.fail(
                    "an ASOF join takes equalities between its sides and one comparison of times; filter in WHERE",
                    condition.java,
                )
            try:
                residual.append(self.residual(condition, (join.left, join.right), computed))
            except NotOursError as error:
                if join.how != "inner":
                    hint = "an outer, semi or anti join evaluates itself what is over both inputs"
                    self.fail(f"{error}; {hint}: comparisons, AND, OR, NOT, IS NULL, IN", error.expr.java)
                above.append(condition)
        return Choice(join, rule, tuple(keys), computed, tuple(residual), tuple(above))

    def _regular(self, join: JoinOf) -> Rule:
        """A join that does not go by time."""
        kind: OperatorKind = join.how if join.how in ("semi", "anti") else "regular"
        if self.final:
            self.fail(
                f"emit 'at_watermark' is for rows that nothing changes any more, and a {kind} {join.sql_name} takes "
                "rows back: bound both event times, or run this join by itself",
                join.java,
            )
        why = f"{kind}: {join.sql_name}"
        if join.member is not None:
            why = "null-aware anti: NOT IN, and a null may be on either side; all rows go to one partition"
        elif kind == "regular" and all(self.event_times(side) for side in (join.left, join.right)):
            why += " whose condition does not compare the event times: rows are kept for ever"
        return Rule(kind, why, Join)

    def _key(self, condition: Expr, join: JoinOf, computed: Sequence[Computed]) -> KeyColumns | None:
        """An equality between the sides as a key, or None."""
        if condition.kind not in ("EqualTo", "EqualNullSafe"):
            return None
        member = condition is join.member
        for one, other in (condition.args, condition.args[::-1]):
            left, right = one.columns.keys(), other.columns.keys()
            if left <= join.left.columns and right <= join.right.columns and ((left and right) or member):
                sides = self._column(one, "key"), self._column(other, "key")
                kinds = [pa.types.is_nested(column.type) for column, _ in sides]
                if any(kinds):
                    return None
                for (column, expr), into in zip(sides, computed, strict=True):
                    if expr is not None:
                        into[column] = expr
                return KeyColumns(sides[0][0], sides[1][0], condition.kind == "EqualNullSafe")
        return None

    def _only_where(self, condition: Expr, join: JoinOf, computed: Sequence[Computed]) -> KeyColumns:
        """A condition on one side as an equality with ``true`` on the other: rows it is not true of match nothing."""
        side = 0 if condition.columns.keys() <= join.left.columns else 1
        column, expr = self._column(condition, "part")
        if expr is not None:
            computed[side][column] = expr
        always = QueryColumn("always", "", pa.bool_, words=lambda: "true", nullable=False)
        computed[1 - side][always] = self.expr(self.catalyst.true())
        return KeyColumns(*((column, always) if side == 0 else (always, column)), null_safe=False)

    def residual(
        self, condition: Expr, sides: Sequence[Relation], computed: Sequence[Computed], padded: Sequence[bool] = ()
    ) -> ResidualCondition:
        """A condition for an operator.

        Args:
            condition: over the inputs of the operator.
            sides: these inputs.
            computed: takes the columns that are to be computed below, per input.
            padded: of each input whether its row may be missing where the condition is asked; of none if left out.

        Raises:
            NotOursError: only Spark evaluates it.
        """
        try:
            return self._lowered(condition, sides, computed, padded, plain=True)
        except NotOursError:  # all of it that is one input's by Spark, then
            return self._lowered(condition, sides, computed, padded, plain=False)

    def null_of_pad(self, computed: Expr) -> bool:
        """True if a computed column is null in an unmatched row, as its expression above an outer join would be."""
        return self.catalyst.null_of_nulls(computed.java)

    def _lowered(
        self,
        condition: Expr,
        sides: Sequence[Relation],
        below: Sequence[Computed],
        padded: Sequence[bool],
        *,
        plain: bool,
    ) -> ResidualCondition:
        own: list[Computed] = [{} for _ in sides]
        columns: dict[QueryColumn, trees.ColumnRef] = {}

        def owner(expr: Expr) -> int | None:
            return next((n for n, side in enumerate(sides) if expr.columns.keys() <= side.columns), None)

        def column(expr: Expr) -> trees.Node:
            found, computed = self._column(expr, "part")
            if computed is not None:
                number = owner(expr) or 0
                if padded and padded[number] and not self.null_of_pad(computed):
                    raise NotOursError(expr, f"{expr.text()!r} is something else than null where its input has no row")
                own[number][found] = computed
            return columns.setdefault(found, trees.ColumnRef("", f"{len(columns)}", trees.column_type(found.type)))

        builder = trees.Builder(ansi=self.ansi)
        try:
            reader = JoinReader(builder, lambda expr: owner(expr) is not None, column, plain=plain)
            root = trees.boolean(reader.node(condition), "the condition")
        except trees.TypeProblemError as error:
            raise NotOursError(condition, str(error)) from None
        for into, more in zip(below, own, strict=True):
            into.update(more)
        used = {node for node in trees.nodes_of(root) if isinstance(node, trees.ColumnRef)}
        needed = {c: place for c, place in columns.items() if place in used}  # not what was tried in vain
        return ResidualCondition(condition, root, needed, builder.mode_matters)

    def _column(self, expr: Expr, what: str) -> tuple[QueryColumn, Expr | None]:
        """The column of an operand, and the expression to compute it by; the same one for the same expression."""
        expr = expr.plain
        collated = self._is_text(expr) and not is_binary_collated(
            st._parse_datatype_json_string(expr.java.dataType().json())
        )
        if expr.column is not None and not collated:
            return expr.column, None
        # Another join's column for it is the same only if a join between them leaves it as it would be for a pad.
        known = (x for x in self._computed if x[0] == collated and x[1].java.semanticEquals(expr.java))
        same = next((x for x in known if self.null_of_pad(x[1])), None)
        if same is None:
            value = CollationKey(expr, functools.partial(self.catalyst.collation_key, expr.java)) if collated else expr
            owner = "_".join(dict.fromkeys(c.owner for c in expr.columns))
            label = f"{what}_{len(self._computed) + 1}"
            if what == "part":  # so that a state folder is one condition's, whose text does not say it
                label += f"_{hashlib.sha256(self._meaning(expr).encode()).hexdigest()[:8]}"
            column = QueryColumn(
                label, owner, lambda: arrow_type_of(value.java), words=functools.partial(words_of, expr.java)
            )
            same = (collated, expr)
            self._computed[same] = column, value
        return self._computed[same]

    def _meaning(self, expr: Expr) -> str:
        """A text for an expression that is the same in each run of a query."""
        times = any("time" in str(node.fields.get("dataType")) for node in expr.tree.walk())
        zoned = times or any("timeZoneId" in node.fields for node in expr.tree.walk())
        zone = self.catalyst.session.conf.get("spark.sql.session.timeZone") if zoned else ""
        return f"{expr.text(lambda c: c.label)} {zone}"

    def _is_text(self, expr: Expr) -> bool:
        if expr.column is not None:
            return bool(pa.types.is_string(expr.column.type) or pa.types.is_large_string(expr.column.type))
        return str(expr.java.dataType().typeName()).startswith("string")

    # --- time -----------------------------------------------------------------------------------

    def _interval(self, join: JoinOf, timed: list[Expr]) -> Rule:
        """A join whose conditions bound both event times."""
        left, right = self.event_times(join.left), self.event_times(join.right)
        for condition in timed:
            for column in sorted(condition.times - left - right, key=str):
                lost = self.lost(join.left if column in join.left.columns else join.right, column)
                self.fail(f"{lost}. Join on both event times first. {_PLAIN.format(column)}", condition.java)
        bounds_of: list[tuple[Expr, list[Bound]]] = []
        for condition in timed:
            try:
                plain = condition.times == set(condition.columns)  # nothing else is compared
                bounds = differences(condition, join.left.columns, join.right.columns) if plain else []
                bounds_of.append((condition, bounds))
            except FinerThanMillisecondsError:
                self.fail("the bounds of an interval join are whole milliseconds", condition.java)
        pair = next(((b.left, b.right) for _, bs in bounds_of for b in bs), None)
        used = [(c, bs) for c, bs in bounds_of if bs and all((b.left, b.right) == pair for b in bs)]
        every = [b for _, bs in used for b in bs]
        lower = [b for b in every if not b.upper]
        upper = [b for b in every if b.upper]
        if pair is None or not lower or not upper:
            times = [next(c for c in timed[0].times if c in side.columns) for side in (join.left, join.right)]
            names = [str(column) for column in pair or times]
            if pair is None:
                what = f"the event times {names[0]} and {names[1]} are compared, but not with a constant between them"
            else:
                what = f"{pair[1]} has no {'lower' if not lower else 'upper'} bound against {pair[0]}"
            self.fail(
                f"{what}: an interval join needs both bounds, as in "
                f"{names[1]} BETWEEN {names[0]} - INTERVAL 10 MINUTES AND {names[0]} + INTERVAL 1 HOUR. "
                f"{_PLAIN.format(names[0])}",
                (used[0][0] if used else timed[0]).java,
            )
        if join.member is not None:
            self.fail(f"NOT IN has no bounds in time: write NOT EXISTS. {_PLAIN.format(pair[0])}", timed[0].java)
        for side in (join.left, join.right):
            why = self.taken_back(side)
            if why is not None:
                self.fail(
                    f"an interval join takes inputs that only grow, and {why}. {_PLAIN.format(pair[0])}", timed[0].java
                )
        low = max(lower, key=lambda b: (b.ms, not b.inclusive))
        high = min(upper, key=lambda b: (b.ms, b.inclusive))
        try:
            interval = Interval(low.ms, high.ms, low.inclusive, high.inclusive)
            time_type(pair[0].type, pair[1].type)
        except DescriptionError as error:
            self.fail(said_in_sql(str(error)), used[0][0].java)
        description = functools.partial(IntervalJoin, interval=interval)
        sides = {"inner": (0, 1), "full": (), "right": (1,)}.get(join.how, (0,))  # a pad's event time is null
        kept = frozenset(pair[side] for side in sides)
        why = f"interval: {pair[1]} is bounded on both sides of {pair[0]}"
        return Rule("interval", why, description, pair, kept, tuple(c for c, _ in used))

    def _nearest(self, join: JoinOf) -> Rule:
        """The rule of an ASOF join."""
        try:
            asof, times, conditions = nearest(join)
        except NoComparisonError as error:
            self.fail(str(error), (error.condition or join).java)
        for side, time in zip((join.left, join.right) if self.final else (), times, strict=False):
            why = self.taken_back(side)
            if why is not None:
                self.fail(f"with emit 'at_watermark' an ASOF join takes inputs that only grow, and {why}", join.java)
            if time not in self.event_times(side):
                lost = self.lost(side, time) or f"{time} has none: withWatermark, or event_time of its stream"
                self.fail(f"emit 'at_watermark' goes by the watermarks of both times, and {lost}", join.java)
        which = "the last up to" if asof.direction == "backward" else "the first from"
        if not asof.exact:
            which = "the last before" if asof.direction == "backward" else "the first after"
        apart = "" if asof.tolerance_ms is None else f", at most {show_ms(asof.tolerance_ms)} apart"
        why = f"asof: {join.sql_name}, each row with {which} its {times[0]} by {times[1]}{apart}"
        bounded = asof.direction == "backward" or asof.tolerance_ms is not None
        kept = frozenset(times[:1] if self.final and bounded else ())
        return Rule("asof", why, functools.partial(AsofJoin, asof=asof), times, kept, tuple(conditions))

    def _versions(self, join: JoinOf, said: ByTime) -> Rule:
        """The rule of a temporal join."""
        left = None if said.as_of is None else join.left.shown.get(said.as_of)
        if left is None or left not in self.event_times(join.left):
            lost = None if left is None else self.lost(join.left, left)
            takes = "FOR SYSTEM_TIME AS OF takes an event time of the left input"
            how = "join by time first" if lost else "withWatermark, or event_time of its stream"
            self.fail(f"{takes}{f', and {lost}' if lost else ''} ({how})", join.java)
        rights = sorted(self.event_times(join.right), key=str)
        if len(rights) != 1:
            which = f"{len(rights)} event times ({', '.join(map(str, rights))})" if rights else "no event time"
            self.fail(
                f"the versioned table has {which}: withWatermark, or event_time of its stream, says from when on each "
                "row of it is valid",
                join.java,
            )
        self._check_enriched(join, "a temporal join")
        why = f"temporal: {join.sql_name}, each row with the version valid at its {left}, by {rights[0]}"
        return Rule("temporal", why, TemporalJoin, (left, rights[0]), frozenset([left]), emit="at_watermark")

    def _check_enriched(self, join: JoinOf, what: str) -> None:
        """Refuses a left input that takes rows back."""
        why = self.taken_back(join.left)
        if why is not None:
            self.fail(f"the left input of {what} only grows, and {why}", join.java)
