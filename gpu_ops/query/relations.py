"""The relational tree of a query: scans, filters, projections, joins, groups; and what is known of its inputs.

A relation answers for itself what the planner asks of all: its columns, which are never null, which it names; one of
groups also which description it is. A new kind needs a class, a case in `gpu_ops.query.read`, and, where it is neither
row by row nor of groups, a method in `gpu_ops.query.plan`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa

from gpu_ops.descriptions.aggregate import Aggregate, Function, Measure
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.groups import Latest, Order, Top
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import JoinType
from gpu_ops.descriptions.over import Over, WindowCall, WindowFrame, WindowFunction
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.query.by_time import ByTime
from gpu_ops.query.expressions import Expr, QueryColumn, TimeWindow

Called = Callable[[QueryColumn], str]
"""What a column is called in the frames below and between operators."""
Grouping = Aggregate | Latest | Over | Top


@dataclasses.dataclass(frozen=True)
class Table(Input):
    """An input of a query; case does not matter in its name, and whether a field of its schema is nullable counts.

    Attributes:
        event_times: its event-time columns: what ``withWatermark`` or ``stream(event_time=)`` named.
        grows: whether rows are never taken back although there are row kinds: an interval join's changelog.
        made_by: of a view, whose rows another query makes: the roots of that query's plan, one for each SELECT.
    """

    event_times: tuple[str, ...] = ()
    grows: bool = False
    made_by: tuple[object, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def insert_only(self) -> bool:
        """True if rows are never taken back."""
        return (self.row_kind is None or self.grows) and self.unique_key is None

    @property
    def upserts(self) -> bool:
        """True if a row may be replaced without being taken back, so that no filter can stand below the join."""
        return self.unique_key is not None and self.updates == "upsert"

    @property
    def changes(self) -> str:
        """The kind of changes that the input brings, in a word or two."""
        return "upserts" if self.upserts else "insert-only" if self.insert_only else "retractions"


@dataclasses.dataclass(frozen=True, eq=False)
class Relation:
    """A relation: the rows of an input, or rows made of those of the relations that its fields hold."""

    @functools.cached_property
    def inputs(self) -> tuple[Relation, ...]:
        """The relations whose rows it takes."""
        held = (getattr(self, field.name) for field in dataclasses.fields(self))
        each = (one for value in held for one in (value if isinstance(value, tuple) else (value,)))
        return tuple(one for one in each if isinstance(one, Relation))

    def over(self, *inputs: Relation) -> Self:
        """A copy of this relation over other inputs."""
        if all(new is old for new, old in zip(inputs, self.inputs, strict=True)):
            return self
        names = [field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), Relation)]
        return dataclasses.replace(self, **dict(zip(names, inputs, strict=True)))

    @property
    def columns(self) -> frozenset[QueryColumn]:
        """Its columns, whether they are shown or not."""
        raise NotImplementedError

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """By the id of Catalyst's attribute, the columns that a query can name above it."""
        raise NotImplementedError

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns in which there is no null, by what the inputs of the query are."""
        raise NotImplementedError

    @property
    def named(self) -> Iterable[QueryColumn]:
        """The columns that it looks at or makes, in the order in which it names them."""
        return ()

    @property
    def scans(self) -> list[Scan]:
        """The inputs whose rows its rows are made of."""
        return [scan for relation in self.inputs for scan in relation.scans]

    def walk(self) -> Iterator[Relation]:
        """This relation, and all below."""
        yield self
        for relation in self.inputs:
            yield from relation.walk()


@dataclasses.dataclass(frozen=True, eq=False)
class Scan(Relation):
    """An input, once for each time the query names it."""

    table: Table
    alias: str
    ids: dict[int, QueryColumn]

    @property
    def row_kind(self) -> str | None:
        """Its row-kind column, or None."""
        return self.table.row_kind

    @property
    def schema(self) -> pa.Schema:
        """The schema without the row kind."""
        return self.table.schema

    @property
    def insert_only(self) -> bool:
        """True if no row is ever taken back."""
        return self.table.insert_only

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The columns of the input."""
        return frozenset(self.ids.values())

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """A query can name all columns."""
        return self.ids

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns that the schema of the input says are not nullable."""
        return frozenset(column for column in self.columns if not column.nullable)

    @property
    def scans(self) -> list[Scan]:
        """An input is made of itself alone."""
        return [self]

    @property
    def kept(self) -> list[QueryColumn]:
        """The columns that an operator needs whether the query does or not."""
        table = self.table
        names = [*(table.unique_key or ()), *([table.sequence_by] if table.sequence_by else ())]
        return [self.column(name) for name in names]

    def column(self, label: str) -> QueryColumn:
        """The column of a name."""
        return next(c for c in self.columns if c.label == label)


@dataclasses.dataclass(frozen=True, eq=False)
class OfOne(Relation):
    """Rows made of those of one relation; what is known of it stays, where a kind says nothing else.

    Attributes:
        below: that relation.
    """

    below: Relation

    @property
    def columns(self) -> frozenset[QueryColumn]:
        """The columns of the relation below."""
        return self.below.columns

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """The columns that can be named of the relation below."""
        return self.below.shown

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns of the relation below that are never null."""
        return self.below.never_null


class RowByRow(OfOne):
    """Rows of another relation, one by one: left out, with more columns, several times."""


def origin(relation: Relation) -> Relation:
    """The relation below all filters, projections and expansions."""
    while isinstance(relation, RowByRow):
        relation = relation.below
    return relation


@dataclasses.dataclass(frozen=True, eq=False)
class Filter(RowByRow):
    """The rows for which all conditions are true."""

    conditions: tuple[Expr, ...]

    @property
    def named(self) -> list[QueryColumn]:
        """The columns in the conditions."""
        return [column for condition in self.conditions for column in condition.columns]


def filtered(relation: Relation, conditions: list[Expr]) -> Relation:
    """A relation with a filter above it, if there is anything to filter by."""
    return Filter(relation, tuple(conditions)) if conditions else relation


@dataclasses.dataclass(frozen=True, eq=False)
class Compute(RowByRow):
    """More columns, row by row.

    Attributes:
        computed: the columns that are more than another name.
        ids: what is shown of it.
    """

    computed: dict[QueryColumn, Expr]
    ids: dict[int, QueryColumn]

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The columns of the relation below, and the computed ones."""
        return self.below.columns | frozenset(self.computed)

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """The columns that the query selects."""
        return self.ids

    @property
    def named(self) -> list[QueryColumn]:
        """The computed ones, each before what it is computed from."""
        return [column for made, expr in self.computed.items() for column in (made, *expr.columns)]


@dataclasses.dataclass(frozen=True, eq=False)
class Expand(Compute):
    """Each row once for each of some values, sliding windows: one column is computed, Catalyst's ``explode`` of them.

    Attributes:
        java: Catalyst's node.
    """

    java: Any


@dataclasses.dataclass(frozen=True, eq=False)
class JoinOf(Relation):
    """A join of two relations.

    Attributes:
        how: the join type.
        left: of them.
        right: of them.
        on: its condition, of those that are joined by AND.
        java: Catalyst's node.
        sql_name: the join as SQL writes it.
        member: the equality of NOT IN that is null-aware; it is none of ``on``.
        by_time: what the query says of an ASOF or temporal join.
    """

    how: JoinType
    left: Relation
    right: Relation
    on: tuple[Expr, ...]
    java: Any
    sql_name: str
    member: Expr | None = None
    by_time: ByTime | None = None

    @property
    def outputs(self) -> tuple[Relation, ...]:
        """The sides whose columns come out: of a semi or anti join the left alone."""
        return (self.left,) if self.how in ("semi", "anti") else (self.left, self.right)

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The columns of the sides that come out."""
        return frozenset().union(*(relation.columns for relation in self.outputs))

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """The columns that can be named of the sides that come out."""
        return {number: column for relation in self.outputs for number, column in relation.shown.items()}

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns that are never null in sides of which a row is always there."""
        left, right = self.left.never_null, self.right.never_null
        return {"inner": left | right, "right": right, "full": frozenset[QueryColumn]()}.get(self.how, left)

    @property
    def named(self) -> list[QueryColumn]:
        """The columns in the condition."""
        conditions = (*self.on, *([] if self.member is None else [self.member]))
        return [column for condition in conditions for column in condition.columns]

    @property
    def scans(self) -> list[Scan]:
        """The inputs of the sides that come out."""
        return [scan for relation in self.outputs for scan in relation.scans]


def spine(join: JoinOf) -> tuple[Relation, list[JoinOf]]:
    """A left-deep run of joins: the relation that its lowest join begins with, and the joins, the lowest first."""
    steps: list[JoinOf] = []
    below: Relation = join
    while isinstance(below, JoinOf):
        steps.insert(0, below)
        below = below.left
    return below, steps


@dataclasses.dataclass(frozen=True, eq=False)
class UnionOf(Relation):
    """All rows of several relations.

    Attributes:
        parts: these.
        of_parts: its columns, and the column of each part that one is.
        ids: what is shown of it.
        java: Catalyst's node.
    """

    parts: tuple[Relation, ...]
    of_parts: dict[QueryColumn, tuple[QueryColumn, ...]]
    ids: dict[int, QueryColumn]
    java: Any

    def over(self, *inputs: Relation) -> Self:
        """A copy of this union over other parts."""
        same = all(new is old for new, old in zip(inputs, self.parts, strict=True))
        return self if same else dataclasses.replace(self, parts=inputs)

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The columns of the union, which are none of its parts'."""
        return frozenset(self.of_parts)

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """A query can name all columns."""
        return self.ids

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns that are never null in any part."""
        never = [part.never_null for part in self.parts]
        return frozenset(c for c, of in self.of_parts.items() if all(x in n for x, n in zip(of, never, strict=True)))

    @property
    def named(self) -> list[QueryColumn]:
        """Each column, and what it is in the parts."""
        return [column for own, of in self.of_parts.items() for column in (own, *of)]


# --- of groups ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class OfGroups(OfOne):
    """A relation that an operator makes of groups of rows, and corrects as these change.

    Attributes:
        by: what makes a group.
        java: Catalyst's node.
    """

    by: tuple[QueryColumn, ...]
    java: Any

    kind: ClassVar[Literal["aggregate", "latest", "over", "top"]]

    @property
    def used(self) -> frozenset[QueryColumn]:
        """The columns below that it looks at."""
        return frozenset(self.named) & self.below.columns

    def describe(
        self, source: Input, called: Called, emit: Emit, needed: frozenset[QueryColumn]
    ) -> tuple[Grouping, str]:
        """The description of it, and why it is that.

        Args:
            source: its input.
            called: what columns are called there, and in what it gives.
            emit: when it has output.
            needed: the columns that are needed above.

        Raises:
            DescriptionError: there is none.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class AggregateCall:
    """A call of an aggregate function.

    Attributes:
        column: what it gives.
        function: see `gpu_ops.descriptions.aggregate.Function`.
        of: the column below; None for ``count(*)``.
        second: the other column of a function of two; of ``string_agg`` the text between values.
    """

    column: QueryColumn
    function: Function
    of: QueryColumn | None
    second: QueryColumn | str | None = None

    @property
    def named(self) -> list[QueryColumn]:
        """The columns below that it looks at."""
        return [column for column in (self.of, self.second) if isinstance(column, QueryColumn)]

    def measure(self, called: Called) -> Measure:
        """The call in a description."""
        second = called(self.second) if isinstance(self.second, QueryColumn) else self.second
        return Measure(called(self.column), self.function, None if self.of is None else called(self.of), None, second)


@dataclasses.dataclass(frozen=True, eq=False)
class AggregateOf(OfGroups):
    """One row per group.

    Attributes:
        calls: of aggregate functions; none for ``DISTINCT``.
        ends: those of ``by`` that are the ends of windows.
    """

    calls: tuple[AggregateCall, ...]
    ends: tuple[QueryColumn, ...] = ()

    kind = "aggregate"

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The group's, and what the functions give."""
        return frozenset(self.by) | frozenset(call.column for call in self.calls)

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """An aggregate shows nothing: a `Compute` above it has the names."""
        return {}

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """Counts, and what is never null below."""
        counts = frozenset(call.column for call in self.calls if not call.column.nullable)
        return counts | (self.below.never_null & frozenset(self.by))

    @property
    def named(self) -> list[QueryColumn]:
        """The group columns, the aggregated ones, and the results."""
        of = [column for call in self.calls for column in call.named]
        return [*self.by, *of, *(call.column for call in self.calls)]

    def describe(
        self, source: Input, called: Called, emit: Emit, needed: frozenset[QueryColumn]
    ) -> tuple[Aggregate, str]:
        """One row per group, whether all of it is needed or not; with ``at_watermark`` as windows close."""
        end = next(map(called, self.ends), None) if emit == "at_watermark" else None
        by, calls = tuple(map(called, self.by)), tuple(call.measure(called) for call in self.calls)
        always = not by and emit != "at_end" and source.ttl_ms is None
        why = "GROUP BY" if by else "no GROUP BY: one row, in one partition"
        return Aggregate(source, by, calls, emit, end, always=always), why


@dataclasses.dataclass(frozen=True, eq=False)
class SessionsOf(AggregateOf):
    """One row per group and session.

    Attributes:
        time: the column below whose sessions they are.
        gap_ms: how many milliseconds apart two rows of a session are at most that follow one another.
        window: the columns of a session's start and end.
    """

    time: QueryColumn = dataclasses.field(kw_only=True)
    gap_ms: int = dataclasses.field(kw_only=True)
    window: tuple[QueryColumn, QueryColumn] = dataclasses.field(kw_only=True)

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The group's, those of the session, and what the functions give."""
        return super().columns | frozenset(self.window)

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns that are never null, those of the session among them."""
        return super().never_null | frozenset(self.window)

    @property
    def named(self) -> list[QueryColumn]:
        """The time as well, and the columns of the session."""
        return [self.time, *super().named, *self.window]

    def describe(
        self, source: Input, called: Called, emit: Emit, needed: frozenset[QueryColumn]
    ) -> tuple[SessionAggregate, str]:
        """One row per group and session."""
        by, calls = tuple(map(called, self.by)), tuple(call.measure(called) for call in self.calls)
        start, end = map(called, self.window)
        made = SessionAggregate(source, by, calls, emit, gap_ms=self.gap_ms, start=start, end=end)
        return made, f"sessions of {self.time}"


@dataclasses.dataclass(frozen=True, eq=False)
class LocalAggregateOf(AggregateOf):
    """One row per group, slice of time and window of the rows of a task, before they are shuffled; it keeps nothing.

    Attributes:
        window: the windows.
        time: the column that they are of.
        places: those of ``by`` that are ends of it: 0 for the start, 1 for the end.
    """

    window: TimeWindow = dataclasses.field(kw_only=True)
    time: QueryColumn = dataclasses.field(kw_only=True)
    places: Mapping[QueryColumn, int] = dataclasses.field(kw_only=True)

    @property
    def used(self) -> frozenset[QueryColumn]:
        """The columns below that it looks at."""
        return super().used | frozenset({self.time})


@dataclasses.dataclass(frozen=True, eq=False)
class LatestOf(OfGroups):
    """An input that brings upserts, each row of which is taken back as it is replaced (``ChangelogNormalize``)."""

    below: Scan

    kind = "latest"

    @property
    def named(self) -> tuple[QueryColumn, ...]:
        """The columns of the unique key."""
        return self.by

    def describe(self, source: Input, called: Called, emit: Emit, needed: frozenset[QueryColumn]) -> tuple[Latest, str]:
        """The latest row of each key."""
        why = f"{self.below.alias} brings upserts: each takes the row back that it replaces, below a filter or a union"
        return Latest(source, emit), why


@dataclasses.dataclass(frozen=True, eq=False)
class TopOf(OfGroups):
    """The first rows of each group; ``java`` is Catalyst's ``ROW_NUMBER()``, or its ``Sort``.

    Attributes:
        order: columns, and how each orders the rows of a group.
        number: the column with a row's number in its group.
        identity: the id of that column's attribute; None where no query can name it (``LIMIT``).
        n: how many rows; None as long as that is not known.
    """

    order: tuple[tuple[QueryColumn, Order], ...]
    number: QueryColumn
    identity: int | None
    n: int | None

    kind = "top"

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The columns of the relation below, and the row number."""
        return self.below.columns | {self.number}

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns below that are never null, and the row number."""
        return self.below.never_null | {self.number}

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """The columns that can be named below, and the row number where it has a name."""
        return self.below.shown if self.identity is None else {**self.below.shown, self.identity: self.number}

    @property
    def named(self) -> list[QueryColumn]:
        """The group columns, and those that order a group."""
        return [*self.by, *(column for column, _ in self.order)]

    def describe(self, source: Input, called: Called, emit: Emit, needed: frozenset[QueryColumn]) -> tuple[Top, str]:
        """The first rows, with their number where that is needed."""
        assert self.n is not None
        order = tuple(how._replace(column=called(column)) for column, how in self.order)
        number = called(self.number) if self.number in needed else None
        why = "ORDER BY ... LIMIT, in one partition" if self.identity is None else "ROW_NUMBER()"
        top = Top(source, tuple(map(called, self.by)), order, self.n, emit, number)
        return top, f"the first {self.n} by {why}"


@dataclasses.dataclass(frozen=True, eq=False)
class OverCall:
    """A call of a window function.

    Attributes:
        column: what it gives.
        function: see `gpu_ops.descriptions.over.WindowFunction`.
        of: the column below; None for ``count(*)``, and where it goes by a row's place alone.
        frame: the rows it looks at; None for all of the partition.
        number: see `gpu_ops.descriptions.over.WindowCall`.
        ignore_nulls: likewise.
        second: the other column of a function of two.
    """

    column: QueryColumn
    function: WindowFunction
    of: QueryColumn | None = None
    frame: WindowFrame | None = None
    number: int | None = None
    ignore_nulls: bool = False
    second: QueryColumn | None = None

    @property
    def named(self) -> list[QueryColumn]:
        """The columns below that it looks at."""
        return [column for column in (self.of, self.second) if column is not None]

    def described(self, called: Called) -> WindowCall:
        """The call in a description."""
        of, second = (None if column is None else called(column) for column in (self.of, self.second))
        return WindowCall(called(self.column), self.function, of, self.frame, self.number, self.ignore_nulls, second)


@dataclasses.dataclass(frozen=True, eq=False)
class OverOf(OfGroups):
    """The rows below, each with what functions give over a window; ``java`` is Catalyst's first call of them.

    Attributes:
        order: columns, and how each orders the rows of a partition.
        calls: the functions.
        ids: what is shown of these.
    """

    order: tuple[tuple[QueryColumn, Order], ...]
    calls: tuple[OverCall, ...]
    ids: dict[int, QueryColumn]

    kind = "over"

    @functools.cached_property
    def columns(self) -> frozenset[QueryColumn]:
        """The columns of the relation below, and those of the functions."""
        return self.below.columns | frozenset(call.column for call in self.calls)

    @property
    def never_null(self) -> frozenset[QueryColumn]:
        """The columns below that are never null, and counts and places."""
        return self.below.never_null | frozenset(call.column for call in self.calls if not call.column.nullable)

    @property
    def shown(self) -> dict[int, QueryColumn]:
        """The columns that can be named below, and those of the functions that have a name."""
        return {**self.below.shown, **self.ids}

    @property
    def named(self) -> list[QueryColumn]:
        """The columns of the partition and of the order, those that functions look at, and the results."""
        of = [column for call in self.calls for column in call.named]
        return [*self.by, *(column for column, _ in self.order), *of, *(call.column for call in self.calls)]

    def describe(self, source: Input, called: Called, emit: Emit, needed: frozenset[QueryColumn]) -> tuple[Over, str]:
        """All functions, whether all of them are needed or not."""
        order = tuple(how._replace(column=called(column)) for column, how in self.order)
        calls = tuple(call.described(called) for call in self.calls)
        by = tuple(map(called, self.by))
        return Over(source, by, order, calls, emit), "OVER" if by else "OVER, without PARTITION BY in one partition"
