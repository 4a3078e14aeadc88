"""A plan node with the filters and projections that are still to be put above it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.query.names import Column, Expr
from gpu_ops.query.nodes import Calc, Named, Node, Where, quoted
from gpu_ops.query.relations import Scan


class Namer(Protocol):
    """What columns are called; it contains those that are used."""

    def __call__(self, column: Column, /) -> str:
        """The name of a column."""

    def __contains__(self, column: Column, /) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Stage:
    """A node, and what is to be done with its rows.

    Attributes:
        node: what there is.
        has: its columns, and what it calls them.
        name: what they are called from here on.
        scan: the input that it is, or None.
        where: conditions for its rows.
        made: columns to compute.
        key: of a join, the columns that identify a row, by name; kept when there is an input description to fill.
        why: a remark on the conditions.
    """

    node: Node
    has: Mapping[Column, str]
    name: Namer
    scan: Scan | None
    where: Sequence[Expr] = ()
    made: Mapping[Column, Expr] = dataclasses.field(default_factory=dict)
    key: tuple[str, ...] | None = None
    why: str = ""

    @property
    def columns(self) -> frozenset[Column]:
        """All there are."""
        return frozenset(self.has) | frozenset(self.made)

    @property
    def row_kind(self) -> str | None:
        """What the row-kind column is called above this stage."""
        own = self.node.row_kind
        if own is None:
            return None
        clash = any(self.name(c).lower() == own.lower() for c in self.columns if c in self.name)
        return ROW_KIND_COLUMN if clash else own

    @property
    def schema(self) -> pa.Schema:
        """Of the node."""
        assert self.node.schema is not None
        return self.node.schema

    def call(self, column: Column) -> str:
        """A column as the text of an expression writes it."""
        return quoted(self.has[column])

    def calc(self, select: Sequence[tuple[str, Expr, int]], schema: pa.Schema | None) -> Calc:
        """The node with everything done."""
        return Calc(
            input=self.node,
            where=tuple(Where(expr.text(self.call), expr.at) for expr in self.where),
            select=tuple(Named(name, self.text(expr), at) for name, expr, at in select),
            schema=schema,
            row_kind=self.row_kind,
            why=self.why,
        )

    def text(self, expr: Expr) -> str:
        """An expression over the node's columns; one that is computed is written out."""
        if expr.column is not None and expr.column in self.made:
            return self.made[expr.column].text(self.call)
        return expr.text(lambda c: f"({self.made[c].text(self.call)})" if c in self.made else self.call(c))

    def closed(self, wanted: frozenset[Column]) -> Stage:
        """With everything done, and these columns left, or with those the input's description needs."""
        keep = set(wanted & self.columns)
        if self.scan is not None:
            table = self.scan.table
            for label in (*(table.unique_key or ()), *([table.sequence_by] if table.sequence_by else ())):
                keep.add(self.scan.own(label))
        keep |= {c for c, name in self.has.items() if name in (self.key or ())}
        if not keep:
            keep.add(next((c for c in self.columns if c in self.name), next(iter(self.has))))
        order = [c for c in (*self.has, *self.made) if c in keep]
        order.sort(key=self._place)
        names = {c: self.name(c) for c in order}
        own = list(self.node.schema.names) if self.node.schema is not None else []
        same = own == list(names.values()) and self.row_kind == self.node.row_kind
        if same and not self.where and not self.made:
            return dataclasses.replace(self, has=names)
        schema = pa.schema([pa.field(names[c], c.type if c.type is not None else pa.null()) for c in order])
        select = [(names[c], Expr.of(c, -1), self._at(c)) for c in order]
        return Stage(self.calc(select, schema), names, self.name, self.scan, key=self.key)

    def _place(self, column: Column) -> tuple[int, int]:
        """The order of the node's own columns; computed ones come last."""
        own = list(self.node.schema.names) if self.node.schema is not None else []
        if column in self.has and self.has[column] in own:
            return 0, own.index(self.has[column])
        return 1, list(self.made).index(column)

    def _at(self, column: Column) -> int:
        return self.made[column].at if column in self.made else -1
