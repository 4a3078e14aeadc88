"""The relations of a query that are made of groups of rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from gpu_ops.descriptions.groups import Order
from gpu_ops.query.expressions import Column, TimeWindow
from gpu_ops.query.relations import Relation, Scan


@dataclasses.dataclass(frozen=True, eq=False)
class OfGroups(Relation):
    """What an operator makes of groups of rows, and takes back as they change.

    Attributes:
        below: the rows.
        by: what makes a group.
        java: Catalyst's node.
    """

    below: Relation
    by: tuple[Column, ...]
    java: Any

    noun: ClassVar[str]
    """What it is called."""

    @property
    def inputs(self) -> tuple[Relation]:
        """The relation below."""
        return (self.below,)

    @property
    def used(self) -> frozenset[Column]:
        """The columns below that it looks at."""
        return frozenset(self.named) & self.below.columns


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of an aggregate function.

    Attributes:
        column: what it gives.
        function: see `gpu_ops.descriptions.aggregate.Function`.
        of: the column below; None for ``count(*)``.
    """

    column: Column
    function: str
    of: Column | None


@dataclasses.dataclass(frozen=True, eq=False)
class AggregateOf(OfGroups):
    """One row per group.

    Attributes:
        calls: of aggregate functions; none for ``DISTINCT``.
        ends: those of ``by`` that are the ends of windows.
    """

    calls: tuple[Call, ...]
    ends: tuple[Column, ...] = ()

    noun = "aggregate"

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """The group's, and what the functions give."""
        return frozenset(self.by) | frozenset(call.column for call in self.calls)

    @property
    def shown(self) -> dict[int, Column]:
        """None: a `Compute` above it shows its columns."""
        return {}

    @property
    def never_null(self) -> frozenset[Column]:
        """Counts, and what is never null below."""
        counts = frozenset(call.column for call in self.calls if not call.column.nullable)
        return counts | (self.below.never_null & frozenset(self.by))

    @property
    def named(self) -> list[Column]:
        """What makes a group, what is aggregated, and what that gives."""
        of = [call.of for call in self.calls if call.of is not None]
        return [*self.by, *of, *(call.column for call in self.calls)]


@dataclasses.dataclass(frozen=True, eq=False)
class LocalAggregateOf(AggregateOf):
    """One row per group, slice of time and window of the rows of a task, before they are shuffled; it keeps nothing.

    Attributes:
        window: the windows.
        time: the column that they are of.
        places: those of ``by`` that are ends of it: 0 for the start, 1 for the end.
    """

    window: TimeWindow = dataclasses.field(kw_only=True)
    time: Column = dataclasses.field(kw_only=True)
    places: Mapping[Column, int] = dataclasses.field(kw_only=True)

    noun = "local aggregate"

    @property
    def used(self) -> frozenset[Column]:
        """The columns below that it looks at."""
        return super().used | frozenset({self.time})


@dataclasses.dataclass(frozen=True, eq=False)
class LatestOf(OfGroups):
    """An input that brings upserts, each row of which is taken back as it is replaced (``ChangelogNormalize``)."""

    below: Scan

    noun = "latest row"

    @property
    def columns(self) -> frozenset[Column]:
        """As below."""
        return self.below.columns

    @property
    def never_null(self) -> frozenset[Column]:
        """As below."""
        return self.below.never_null

    @property
    def shown(self) -> dict[int, Column]:
        """As below."""
        return self.below.shown

    @property
    def named(self) -> tuple[Column, ...]:
        """What identifies a row."""
        return self.by


@dataclasses.dataclass(frozen=True, eq=False)
class TopOf(OfGroups):
    """The first rows of each group; ``java`` is Catalyst's ``ROW_NUMBER()``, or its ``Sort``.

    Attributes:
        order: columns, and how each orders the rows of a group.
        number: the column with a row's number in its group.
        identity: the id of that column's attribute; None where no query can name it (``LIMIT``).
        n: how many rows; None as long as that is not known.
    """

    order: tuple[tuple[Column, Order], ...]
    number: Column
    identity: int | None
    n: int | None

    noun = "top-N"

    @functools.cached_property
    def columns(self) -> frozenset[Column]:
        """Those below, and the number."""
        return self.below.columns | {self.number}

    @property
    def never_null(self) -> frozenset[Column]:
        """As below, and the number."""
        return self.below.never_null | {self.number}

    @property
    def shown(self) -> dict[int, Column]:
        """As below, and the number where a query can name it."""
        return self.below.shown if self.identity is None else {**self.below.shown, self.identity: self.number}

    @property
    def named(self) -> list[Column]:
        """What makes a group, and what orders it."""
        return [*self.by, *(column for column, _ in self.order)]
