"""The plan of a query: what is read, filtered, projected and joined, as plain frozen data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple

import pyarrow as pa

from gpu_ops.conditions import backquoted
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.groups import Latest, Top
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.query.expressions import Expr, TimeWindow

_PLAIN: Final = re.compile(r"[A-Za-z_]\w*")
_WORDS: Final = {
    "AND", "ANTI", "ANY", "AS", "BETWEEN", "BOTH", "BY", "CASE", "CAST", "CROSS", "CURRENT_DATE", "CURRENT_TIME",
    "CURRENT_TIMESTAMP", "CURRENT_USER", "DATE", "DISTINCT", "ELSE", "END", "ESCAPE", "EXCEPT", "EXISTS", "FALSE",
    "FILTER", "FOR", "FROM", "FULL", "GROUP", "HAVING", "IN", "INNER", "INTERSECT", "INTERVAL", "INTO", "IS", "JOIN",
    "LATERAL", "LEADING", "LEFT", "LIKE", "LIMIT", "MINUS", "NATURAL", "NOT", "NULL", "ON", "OR", "ORDER", "OUTER",
    "OVER", "REFERENCES", "RIGHT", "RLIKE", "SELECT", "SEMI", "SOME", "TABLE", "THEN", "TIMESTAMP", "TIMESTAMP_LTZ",
    "TIMESTAMP_NTZ", "TRAILING", "TRUE", "UNION", "UNIQUE", "UNKNOWN", "USER", "USING", "WHEN", "WHERE", "WINDOW",
    "WITH",
}  # fmt: skip


def quoted(name: str) -> str:
    """A name as SQL text, in backticks where it needs them."""
    if _PLAIN.fullmatch(name) and name.isascii() and name.upper() not in _WORDS:
        return name
    return backquoted(name)


class Where(NamedTuple):
    """A condition: the text of it over the columns of the node below, and Catalyst's expression."""

    text: str
    expr: Expr


class Named(NamedTuple):
    """A column of the node below, or an expression over them, and the name it gets."""

    name: str
    text: str
    expr: Expr | None
    column: str | None


@dataclasses.dataclass(frozen=True)
class Source:
    """An input as it was given.

    Attributes:
        table: its name.
        alias: what the query calls it here.
        schema: its columns.
        row_kind: its row-kind column, or None.
        changes: what it brings, in a word.
        unique_key: columns that identify a row, or None.
    """

    table: str
    alias: str
    schema: pa.Schema
    row_kind: str | None
    changes: str
    unique_key: tuple[str, ...] | None

    inputs = ()

    @property
    def insert_only(self) -> bool:
        """Whether no row is ever taken back."""
        return self.row_kind is None and self.unique_key is None


@dataclasses.dataclass(frozen=True)
class Calc:
    """Rows filtered, then projected, with their row kind.

    Attributes:
        input: the node below.
        where: all are true of the rows that stay.
        select: the columns.
        schema: of the columns; None on top, where nothing needs to know.
        row_kind: what the row-kind column is called, or None where there is none.
        known: by the id of an attribute in an expression, the column of the node below that it is.
        why: a remark, or empty.
    """

    input: Node
    where: tuple[Where, ...]
    select: tuple[Named, ...]
    schema: pa.Schema | None
    row_kind: str | None
    known: Mapping[int, str] = dataclasses.field(default_factory=dict)
    why: str = ""

    @property
    def inputs(self) -> tuple[Node]:
        """The node below."""
        return (self.input,)

    @property
    def insert_only(self) -> bool:
        """Whether no row is ever taken back."""
        return self.input.insert_only


@dataclasses.dataclass(frozen=True)
class LocalAggregate:
    """Rows of a task grouped before they are shuffled, by slices of time among others; it keeps nothing.

    Attributes:
        input: the node below; its rows are insertions.
        time: the column that windows are of.
        window: the windows; slices are as long as these slide.
        by: group columns, and for one that is made of a window which end of it: 0 for its start, 1 for its end.
        calls: columns, the functions that make them, and of what; None for ``count(*)``.
        schema: of the group columns and these.
    """

    input: Node
    time: str
    window: TimeWindow
    by: tuple[tuple[str, int | None], ...]
    calls: tuple[tuple[str, str, str | None], ...]
    schema: pa.Schema

    row_kind = None
    insert_only = True

    @property
    def inputs(self) -> tuple[Node]:
        """The node below."""
        return (self.input,)


@dataclasses.dataclass(frozen=True)
class JoinNode:
    """A join of any kind; or, of one input, an aggregate, the first rows of each group, the latest row of each key.

    Attributes:
        kind: which of them.
        description: for the engine.
        inputs: as many as it has.
        why: this operator was taken.
        remarks: more about it.
    """

    kind: Literal[
        "regular", "semi", "anti", "interval", "asof", "temporal", "lookup", "multi-way", "aggregate", "top", "latest"
    ]
    description: Join | MultiJoin | Aggregate | Top | Latest
    inputs: tuple[Node, ...]
    why: str
    remarks: tuple[str, ...] = ()

    row_kind = "row_kind"

    @property
    def insert_only(self) -> bool:
        """Whether no row is ever taken back."""
        return self.description.insert_only

    @property
    def schema(self) -> pa.Schema:
        """Its columns, the row kind left out."""
        return pa.schema([pa.field(c.name, c.type) for c in self.description.output])


Node = Source | Calc | LocalAggregate | JoinNode


@dataclasses.dataclass(frozen=True)
class Plan:
    """A planned query; the root's columns are the query's."""

    sql: str
    root: Calc

    @property
    def joins(self) -> tuple[JoinNode, ...]:
        """In the order in which they are built: those below first."""
        return tuple(node for node in walk(self.root) if isinstance(node, JoinNode))


def walk(node: Node) -> Iterator[Node]:
    """The nodes below, and this one last, each once: one may be the input of several."""
    yield from _walk(node, set())


def _walk(node: Node, seen: set[int]) -> Iterator[Node]:
    if id(node) in seen:
        return
    seen.add(id(node))
    for below in node.inputs:
        yield from _walk(below, seen)
    yield node
