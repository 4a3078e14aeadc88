"""The relational tree of a query: scans, filters, projections, joins; and what is known of its inputs.

A relation answers for itself what the planner asks of all: its columns, which are never null, which it names. A new
kind, row by row or of groups (`gpu_ops.query.groups.relations`), needs a class, a case in `gpu_ops.query.read` and a
method in `gpu_ops.query.build`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from gpu_ops.descriptions.inputs import Input
from gpu_ops.query.by_time.marks import ByTime
from gpu_ops.query.expressions import Column, Expr

How = Literal["inner", "left", "right", "full", "semi", "anti"]


@dataclasses.dataclass(frozen=True)
class Table(Input):
    """An input of a query; case does not matter in its name, and whether a field of its schema is nullable counts.

    Attributes:
        event_times: its event-time columns: what ``withWatermark`` or ``stream(event_time=)`` named.
        grows: whether rows are never taken back although there are row kinds: an interval join's changelog.
    """

    event_times: tuple[str, ...] = ()
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


class Relation:
    """Some rows: of an input, or made of those of other relations."""

    @property
    def inputs(self) -> tuple[Relation, ...]:
        """The relations whose rows it takes."""
        raise NotImplementedError

    @property
    def columns(self) -> frozenset[Column]:
        """Its columns, whether they are shown or not."""
        raise NotImplementedError

    @property
    def shown(self) -> dict[int, Column]:
        """By the id of Catalyst's attribute, the columns that a query can name above it."""
        raise NotImplementedError

    @property
    def never_null(self) -> frozenset[Column]:
        """The columns in which there is no null, by what the inputs of the query are."""
        raise NotImplementedError

    @property
    def named(self) -> Iterable[Column]:
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
    ids: dict[int, Column]

    @property
    def inputs(self) -> tuple[()]:
        """None."""
        return ()

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Its columns."""
        return frozenset(self.ids.values())

    @property
    def shown(self) -> dict[int, Column]:
        """All of them."""
        return self.ids

    @property
    def never_null(self) -> frozenset[Column]:
        """As the input says."""
        return frozenset(column for column in self.columns if not column.nullable)

    @property
    def scans(self) -> list[Scan]:
        """It alone."""
        return [self]

    @property
    def kept(self) -> list[Column]:
        """The columns that an operator needs whether the query does or not."""
        table = self.table
        names = [*(table.unique_key or ()), *([table.sequence_by] if table.sequence_by else ())]
        return [self.own(name) for name in names]

    def own(self, label: str) -> Column:
        """The column of a name."""
        return next(c for c in self.columns if c.label == label)


@dataclasses.dataclass(frozen=True, eq=False)
class RowByRow(Relation):
    """Rows of another relation, one by one: left out, with more columns, several times. What is known of them stays.

    Attributes:
        below: that relation.
    """

    below: Relation

    @property
    def inputs(self) -> tuple[Relation]:
        """The relation below."""
        return (self.below,)

    @property
    def columns(self) -> frozenset[Column]:
        """As below."""
        return self.below.columns

    @property
    def shown(self) -> dict[int, Column]:
        """As below."""
        return self.below.shown

    @property
    def never_null(self) -> frozenset[Column]:
        """As below."""
        return self.below.never_null


def origin(relation: Relation) -> Relation:
    """What a relation has its rows from, before they are looked at one by one."""
    while isinstance(relation, RowByRow):
        relation = relation.below
    return relation


@dataclasses.dataclass(frozen=True, eq=False)
class Filter(RowByRow):
    """The rows for which all conditions are true."""

    conditions: tuple[Expr, ...]

    @property
    def named(self) -> list[Column]:
        """Those of the conditions."""
        return [column for condition in self.conditions for column in condition.columns]


@dataclasses.dataclass(frozen=True, eq=False)
class Compute(RowByRow):
    """More columns, row by row.

    Attributes:
        computed: the columns that are more than another name.
        ids: what is shown of it.
    """

    computed: dict[Column, Expr]
    ids: dict[int, Column]

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those below and the computed ones."""
        return self.below.columns | frozenset(self.computed)

    @property
    def shown(self) -> dict[int, Column]:
        """What the query shows of it."""
        return self.ids

    @property
    def named(self) -> list[Column]:
        """The computed ones, each before what it is computed from."""
        return [column for made, expr in self.computed.items() for column in (made, *expr.columns)]


@dataclasses.dataclass(frozen=True, eq=False)
class Expand(RowByRow):
    """Each row once for each of some values: sliding windows.

    Attributes:
        column: gets the values.
        value: Catalyst's ``explode`` of them.
        ids: what is shown of it.
        java: Catalyst's node.
    """

    column: Column
    value: Expr
    ids: dict[int, Column]
    java: Any

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those below and the values."""
        return self.below.columns | {self.column}

    @property
    def shown(self) -> dict[int, Column]:
        """What the query shows of it."""
        return self.ids

    @property
    def named(self) -> list[Column]:
        """The values', and what they are made of."""
        return [self.column, *self.value.columns]


@dataclasses.dataclass(frozen=True, eq=False)
class JoinOf(Relation):
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

    @property
    def inputs(self) -> tuple[Relation, Relation]:
        """Both."""
        return self.left, self.right

    @property
    def outputs(self) -> tuple[Relation, ...]:
        """Those whose columns come out: of a semi or anti join the left alone."""
        return (self.left,) if self.how in ("semi", "anti") else (self.left, self.right)

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those that come out."""
        return frozenset().union(*(relation.columns for relation in self.outputs))

    @property
    def shown(self) -> dict[int, Column]:
        """What is shown of them."""
        return {number: column for relation in self.outputs for number, column in relation.shown.items()}

    @property
    def never_null(self) -> frozenset[Column]:
        """Those of sides that no pad takes the place of."""
        left, right = self.left.never_null, self.right.never_null
        return {"inner": left | right, "right": right, "full": frozenset[Column]()}.get(self.how, left)

    @property
    def named(self) -> list[Column]:
        """Those of its condition."""
        conditions = (*self.on, *([] if self.member is None else [self.member]))
        return [column for condition in conditions for column in condition.columns]

    @property
    def scans(self) -> list[Scan]:
        """Those of the relations that come out."""
        return [scan for relation in self.outputs for scan in relation.scans]


def filtered(relation: Relation, conditions: list[Expr]) -> Relation:
    """A relation with a filter above it, if there is anything to filter by."""
    return Filter(relation, tuple(conditions)) if conditions else relation
