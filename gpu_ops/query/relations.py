"""The relational tree of a query with its names resolved: scans, filters, computed columns, joins."""

from __future__ import annotations

import dataclasses

from gpu_ops.query.names import Column, Expr
from gpu_ops.query.syntax import How
from gpu_ops.query.tables import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Condition:
    """A predicate.

    Attributes:
        expr: all of it.
        equality: both operands, if it is nothing but an equality.
        null_safe: whether that is ``<=>``.
        member: whether it is what IN compares, in a null-aware anti join.
    """

    expr: Expr
    equality: tuple[Expr, Expr] | None = None
    null_safe: bool = False
    member: bool = False

    @property
    def columns(self) -> frozenset[Column]:
        """The columns in it."""
        return frozenset(self.expr.columns)


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """An input, once for each time the query names it."""

    table: Table
    alias: str
    all_columns: tuple[Column, ...]

    @property
    def columns(self) -> frozenset[Column]:
        """Its columns."""
        return frozenset(self.all_columns)

    def own(self, label: str) -> Column:
        """The column of a name."""
        return next(c for c in self.all_columns if c.label == label)


@dataclasses.dataclass(frozen=True, eq=False)
class Filter:
    """The rows for which all conditions are true."""

    below: Relation
    conditions: tuple[Condition, ...]

    @property
    def columns(self) -> frozenset[Column]:
        """As below."""
        return self.below.columns


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """More columns, row by row."""

    below: Relation
    computed: dict[Column, Expr]

    @property
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
        at: where the query says so.
        spoken: how the query says so.
    """

    how: How
    left: Relation
    right: Relation
    on: tuple[Condition, ...]
    at: int
    spoken: str = ""

    @property
    def columns(self) -> frozenset[Column]:
        """Those of both; of a semi or anti join the left's."""
        return self.left.columns if self.how in ("semi", "anti") else self.left.columns | self.right.columns


Relation = Scan | Filter | Compute | JoinOf


def upserted(relation: Relation) -> Scan | None:
    """The input whose rows are replaced without being taken back, if a relation is one; joins always take back."""
    while isinstance(relation, Filter | Compute):
        relation = relation.below
    return relation if isinstance(relation, Scan) and relation.table.upserts else None


def filtered(relation: Relation, conditions: list[Condition]) -> Relation:
    """A relation with a filter above it, if there is anything to filter by."""
    return Filter(relation, tuple(conditions)) if conditions else relation
