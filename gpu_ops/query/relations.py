"""The relational tree of a query: scans, filters, projections, joins; and what is known of its inputs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import pyarrow as pa

from gpu_ops.descriptions.groups.top import Order
from gpu_ops.descriptions.inputs import Updates
from gpu_ops.query.by_time.marks import ByTime
from gpu_ops.query.expressions import Column, Expr

How = Literal["inner", "left", "right", "full", "semi", "anti"]


@dataclasses.dataclass(frozen=True)
class Table:
    """An input of a query.

    Attributes:
        name: how the query calls it; case does not matter.
        schema: its columns, the row-kind column left out; whether a field is nullable counts.
        row_kind: the column that holds the row kind, or None.
        unique_key: columns that identify a row among the live ones, or None.
        updates: whether an update's old row may be missing.
        event_times: its event-time columns: what ``withWatermark`` or ``stream(event_time=)`` named.
        sequence_by: a column that orders the changes of a micro-batch, or None.
        ttl_ms: milliseconds after its last write at which a row is forgotten, or None.
        grows: whether rows are never taken back although there are row kinds: an interval join's changelog.
    """

    name: str
    schema: pa.Schema
    row_kind: str | None = None
    unique_key: tuple[str, ...] | None = None
    updates: Updates = "upsert"
    event_times: tuple[str, ...] = ()
    sequence_by: str | None = None
    ttl_ms: int | None = None
    grows: bool = False

    @property
    def insert_only(self) -> bool:
        """Whether rows are never taken back."""
        return (self.row_kind is None or self.grows) and self.unique_key is None

    @property
    def upserts(self) -> bool:
        """Whether a row may be replaced without being taken back, so that no filter can stand below the join."""
        return self.unique_key is not None and self.updates == "upsert"

    @property
    def changes(self) -> str:
        """What it brings, in a word or two."""
        return "upserts" if self.upserts else "insert-only" if self.insert_only else "retractions"


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """An input, once for each time the query names it."""

    table: Table
    alias: str
    ids: dict[int, Column]

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Its columns."""
        return frozenset(self.ids.values())

    def own(self, label: str) -> Column:
        """The column of a name."""
        return next(c for c in self.ids.values() if c.label == label)


@dataclasses.dataclass(frozen=True, eq=False)
class Filter:
    """The rows for which all conditions are true."""

    below: Relation
    conditions: tuple[Expr, ...]

    @property
    def columns(self) -> frozenset[Column]:
        """As below."""
        return self.below.columns

    @property
    def ids(self) -> dict[int, Column]:
        """As below."""
        return self.below.ids


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """More columns, row by row.

    Attributes:
        below: the rows.
        computed: the columns that are more than another name.
        ids: what is shown of it.
    """

    below: Relation
    computed: dict[Column, Expr]
    ids: dict[int, Column]

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those below and the computed ones."""
        return self.below.columns | frozenset(self.computed)


@dataclasses.dataclass(frozen=True, eq=False)
class JoinOf:
    """Two relations joined.

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

    how: How
    left: Relation
    right: Relation
    on: tuple[Expr, ...]
    java: Any
    sql_name: str
    member: Expr | None = None
    by_time: ByTime | None = None

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those of both; of a semi or anti join the left's."""
        return self.left.columns if self.how in ("semi", "anti") else self.left.columns | self.right.columns

    @property
    def ids(self) -> dict[int, Column]:
        """What is shown of it."""
        return self.left.ids if self.how in ("semi", "anti") else {**self.left.ids, **self.right.ids}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of an aggregate function.

    Attributes:
        column: what it gives.
        function: see `gpu_ops.descriptions.groups.aggregate.Function`.
        of: the column below; None for ``count(*)``.
    """

    column: Column
    function: str
    of: Column | None


@dataclasses.dataclass(frozen=True, eq=False)
class AggregateOf:
    """One row per group.

    Attributes:
        below: the rows.
        by: what makes a group.
        calls: of aggregate functions; none for ``DISTINCT``.
        java: Catalyst's node.
        ends: those of ``by`` that are the ends of windows.
    """

    below: Relation
    by: tuple[Column, ...]
    calls: tuple[Call, ...]
    java: Any
    ends: tuple[Column, ...] = ()

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """The group's, and what the functions give."""
        return frozenset(self.by) | frozenset(call.column for call in self.calls)

    @property
    def used(self) -> frozenset[Column]:
        """The columns below that it looks at."""
        return frozenset(self.by) | frozenset(call.of for call in self.calls if call.of is not None)

    @property
    def ids(self) -> dict[int, Column]:
        """None: a `Compute` above it shows its columns."""
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class TopOf:
    """The first rows of each group.

    Attributes:
        below: the rows.
        by: what makes a group.
        order: columns, and how each orders the rows of a group.
        number: the column with a row's number in its group.
        identity: the id of that column's attribute; None where no query can name it (``LIMIT``).
        n: how many rows; None as long as that is not known.
        java: Catalyst's ``ROW_NUMBER()``, or its ``Sort``.
    """

    below: Relation
    by: tuple[Column, ...]
    order: tuple[tuple[Column, Order], ...]
    number: Column
    identity: int | None
    n: int | None
    java: Any

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those below, and the number."""
        return self.below.columns | {self.number}

    @property
    def used(self) -> frozenset[Column]:
        """The columns below that it looks at."""
        return frozenset(self.by) | frozenset(column for column, _ in self.order)

    @property
    def ids(self) -> dict[int, Column]:
        """What is shown of it."""
        return self.below.ids if self.identity is None else {**self.below.ids, self.identity: self.number}


@dataclasses.dataclass(frozen=True, eq=False)
class Expand:
    """Each row once for each of some values: sliding windows.

    Attributes:
        below: the rows.
        column: gets the values.
        value: Catalyst's ``explode`` of them.
        ids: what is shown of it.
        java: Catalyst's node.
    """

    below: Relation
    column: Column
    value: Expr
    ids: dict[int, Column]
    java: Any

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those below and the values."""
        return self.below.columns | {self.column}


Relation = Scan | Filter | Compute | JoinOf | AggregateOf | TopOf | Expand


def filtered(relation: Relation, conditions: list[Expr]) -> Relation:
    """A relation with a filter above it, if there is anything to filter by."""
    return Filter(relation, tuple(conditions)) if conditions else relation


def shown(relation: Relation) -> list[Scan]:
    """The inputs whose columns a relation has."""
    if isinstance(relation, Scan):
        return [relation]
    if isinstance(relation, Filter | Compute | AggregateOf | TopOf | Expand):
        return shown(relation.below)
    return shown(relation.left) + (shown(relation.right) if relation.how not in ("semi", "anti") else [])


def never_null(relation: Relation) -> frozenset[Column]:
    """The columns of a relation in which there is no null, by what its inputs are."""
    if isinstance(relation, Scan):
        return frozenset(c for c in relation.columns if not c.nullable)
    if isinstance(relation, Filter | Compute | Expand):
        return never_null(relation.below)
    if isinstance(relation, AggregateOf):
        counts = frozenset(call.column for call in relation.calls if not call.column.nullable)
        return counts | (never_null(relation.below) & frozenset(relation.by))
    if isinstance(relation, TopOf):
        return never_null(relation.below) | {relation.number}
    left, right = never_null(relation.left), never_null(relation.right)
    return {"inner": left | right, "right": right, "full": frozenset()}.get(relation.how, left)
