"""A plan node with the filters and projections that are still to be put above it, and what its columns are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.query.choose import Chooser
from gpu_ops.query.expressions import Column, Expr
from gpu_ops.query.nodes import Calc, Named, Node, Where, quoted
from gpu_ops.query.relations import JoinOf, Relation, Scan


class Namer:
    """What columns are called below and between the joins: by their own name, or ``alias__column`` if that clashes."""

    def __init__(self, relation: Relation, outputs: Iterable[Column], chooser: Chooser) -> None:
        """Args: the query's tree; its result; the operators of its joins."""
        used: dict[Column, None] = dict.fromkeys(outputs)
        for node in relation.walk():
            used |= dict.fromkeys(node.named)
            if isinstance(node, JoinOf):
                choice = chooser.choice(node)
                used |= dict.fromkeys(choice.rule.times or ())
                for made in choice.computed:
                    used |= dict.fromkeys(made)
            elif isinstance(node, Scan):
                used |= dict.fromkeys(node.kept or ([] if node.columns & used.keys() else list(node.ids.values())[:1]))
        labels = [column.label.lower() for column in used]
        self._names: dict[Column, str] = {}
        self._taken = {ROW_KIND_COLUMN}
        for column in used:
            self._add(column, unique=labels.count(column.label.lower()) == 1)

    def _add(self, column: Column, *, unique: bool = True) -> str:
        name, number = column.label, 2
        longer = f"{column.owner}__{column.label}" if column.owner else column.label
        if not unique or name.lower() in self._taken:
            name = longer
        while name.lower() in self._taken:
            name, number = f"{longer}_{number}", number + 1
        self._taken.add(name.lower())
        self._names[column] = name
        return name

    def __call__(self, column: Column) -> str:
        """The name of a column; one that is new gets one."""
        return self._names.get(column) or self._add(column)

    def __contains__(self, column: Column) -> bool:
        return column in self._names

    def items(self) -> Iterable[tuple[Column, str]]:
        """Every column that is used, and its name."""
        return self._names.items()


def input_names(sides: Sequence[Relation]) -> list[str]:
    """What a join calls its inputs: by their aliases."""
    found: list[str] = []
    for side in sides:
        scans = [scan.alias for scan in side.scans]
        name = base = "_".join(dict.fromkeys(scans))
        number = 2
        while name.lower() in [other.lower() for other in found]:
            name, number = f"{base}_{number}", number + 1
        found.append(name)
    return found


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

    def calc(self, select: Sequence[tuple[str, Column]], schema: pa.Schema | None) -> Calc:
        """The node with everything done."""
        known: dict[int, str] = {}
        named = []
        for name, column in select:
            made = self.made.get(column)
            text = made.text(self.call) if made is not None else self.call(column)
            named.append(Named(name, text, made, self.has[column] if made is None else None))
        for expr in (*self.where, *(x.expr for x in named if x.expr is not None)):
            known |= {number: self.has[column] for number, column in expr.ids.items()}
        where = tuple(Where(expr.text(self.call), expr) for expr in self.where)
        return Calc(self.node, where, tuple(named), schema, self.row_kind, known, self.why)

    def closed(self, wanted: frozenset[Column]) -> Stage:
        """With everything done, and these columns left, or with those the input's description needs."""
        keep = set(wanted & self.columns)
        if self.scan is not None:
            keep |= set(self.scan.kept)
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
        schema = pa.schema([pa.field(names[c], c.type) for c in order])
        key = None if self.key is None else tuple(names[c] for own in self.key for c in order if self.has.get(c) == own)
        return Stage(self.calc([(names[c], c) for c in order], schema), names, self.name, self.scan, key=key)

    def without_row_kind(self) -> Stage:
        """A closed stage whose rows are all insertions."""
        node = self.node
        if not isinstance(node, Calc):
            node = self.calc([(name, column) for column, name in self.has.items()], self.schema)
        return dataclasses.replace(self, node=dataclasses.replace(node, row_kind=None))

    def _place(self, column: Column) -> tuple[int, int]:
        """The order of the node's own columns; computed ones come last."""
        own = list(self.node.schema.names) if self.node.schema is not None else []
        if column in self.has and self.has[column] in own:
            return 0, own.index(self.has[column])
        return 1, list(self.made).index(column)
