"""The relational tree of a query: scans, filters, projections, joins."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from gpu_ops.query.expressions import Column, Expr
from gpu_ops.query.tables import Table

How = Literal["inner", "left", "right", "full", "semi", "anti"]


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
        spoken: how the query says so.
        member: the equality of NOT IN that is null-aware; it is none of ``on``.
    """

    how: How
    left: Relation
    right: Relation
    on: tuple[Expr, ...]
    java: Any
    spoken: str
    member: Expr | None = None

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those of both; of a semi or anti join the left's."""
        return self.left.columns if self.how in ("semi", "anti") else self.left.columns | self.right.columns

    @property
    def ids(self) -> dict[int, Column]:
        """What is shown of it."""
        return self.left.ids if self.how in ("semi", "anti") else {**self.left.ids, **self.right.ids}


Relation = Scan | Filter | Compute | JoinOf


def filtered(relation: Relation, conditions: list[Expr]) -> Relation:
    """A relation with a filter above it, if there is anything to filter by."""
    return Filter(relation, tuple(conditions)) if conditions else relation


def never_null(relation: Relation) -> frozenset[Column]:
    """The columns of a relation in which there is no null, by what its inputs are."""
    if isinstance(relation, Scan):
        return frozenset(c for c in relation.columns if not c.nullable)
    if isinstance(relation, Filter | Compute):
        return never_null(relation.below)
    left, right = never_null(relation.left), never_null(relation.right)
    return {"inner": left | right, "right": right, "full": frozenset()}.get(relation.how, left)
