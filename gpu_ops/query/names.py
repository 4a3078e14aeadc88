"""Columns and expressions: what a name in a query means, and the text of an expression with other names in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, TokenError

from gpu_ops.conditions import parse
from gpu_ops.errors import ConditionError, DescriptionError
from gpu_ops.query import refused
from gpu_ops.query.errors import closest, fail
from gpu_ops.query.predicates import refuse_sub_query
from gpu_ops.query.syntax import Source, Span


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """A column of an input, or one that the query computes below a join. Compared by identity.

    Attributes:
        label: its own name.
        owner: the alias of its table.
        type: Arrow's; None for one that no join needs to know.
        nullable: whether a null can be in it.
        event_time: whether it is the event time of its input.
    """

    label: str
    owner: str
    type: pa.DataType | None
    nullable: bool = True
    event_time: bool = False

    def __str__(self) -> str:
        return f"{self.owner}.{self.label}" if self.owner else self.label


@dataclasses.dataclass(frozen=True, eq=False)
class Expr:
    """A text with columns in it.

    Attributes:
        parts: pieces of text and columns.
        offsets: where each part stands in the query.
        cast: the columns that stand in a CAST only, and so are no event time any more.
    """

    parts: tuple[str | Column, ...]
    offsets: tuple[int, ...]
    cast: frozenset[Column] = frozenset()

    @classmethod
    def of(cls, column: Column, at: int) -> Expr:
        """Nothing but a column."""
        return cls((column,), (at,))

    @property
    def at(self) -> int:
        """Where it begins."""
        return self.offsets[0]

    @property
    def column(self) -> Column | None:
        """The column, if it is nothing else."""
        return self.parts[0] if len(self.parts) == 1 and isinstance(self.parts[0], Column) else None

    @property
    def columns(self) -> dict[Column, None]:
        """The columns in it, in order."""
        return dict.fromkeys(part for part in self.parts if isinstance(part, Column))

    @property
    def times(self) -> frozenset[Column]:
        """The event times in it."""
        return frozenset(c for c in self.columns if c.event_time and c not in self.cast)

    def text(self, name: Callable[[Column], str] = str) -> str:
        """The text, each column called as ``name`` says."""
        return "".join(name(part) if isinstance(part, Column) else part for part in self.parts)

    def offset(self, name: Callable[[Column], str], place: int) -> int:
        """Where in the query a place of `text` comes from."""
        for part, offset in zip(self.parts, self.offsets, strict=True):
            size = len(name(part) if isinstance(part, Column) else part)
            if place < size:
                return offset + (0 if isinstance(part, Column) else place)
            place -= size
        return self.offsets[-1]


class TypeOf(Protocol):
    """Tells what type an expression has, and whether it can be null."""

    def __call__(self, text: str, columns: Mapping[str, pa.DataType], /) -> tuple[pa.DataType, bool] | None:
        """None where it cannot tell; DescriptionError for an expression that cannot be."""


def computed(expr: Expr, label: str, owner: str, type_of: TypeOf, sql: str) -> Column:
    """A column for an expression.

    Raises:
        SqlError: an expression that cannot be.
    """
    calls = {c: f"c{number}" for number, c in enumerate(expr.columns)}
    types = {calls[c]: c.type for c in calls if c.type is not None}
    try:
        found = type_of(expr.text(calls.__getitem__), types)
    except DescriptionError as error:
        fail(sql, str(error), expr.at)
    return Column(label, owner, *(found or (None, True)))


def known_type(text: str, columns: Mapping[str, pa.DataType]) -> tuple[pa.DataType, bool] | None:
    """`TypeOf` without Spark: for the expressions that a residual condition can have."""
    try:
        root: Any = parse(f"({text}) IS NULL", {"_": pa.schema(list(columns.items()))}).root
    except ConditionError:
        return None
    return root.args[0].type, True


@dataclasses.dataclass(frozen=True)
class Entry:
    """A column as a query sees it.

    Attributes:
        qualifier: its table's alias; empty for the common column of USING.
        name: how the query calls it.
        value: what it is.
        shown: whether ``*`` means it.
    """

    qualifier: str
    name: str
    value: Expr | Column
    shown: bool = True


class Scope:
    """The columns that can be named at a place of the query."""

    def __init__(
        self, source: Source, entries: Iterable[Entry], hidden: Mapping[str, str], outer: Scope | None = None
    ) -> None:
        """Args: the query; its columns; names that are no columns, and why; the scope around a sub-query."""
        self.source, self.entries, self.hidden, self.outer = source, list(entries), dict(hidden), outer

    @property
    def tables(self) -> list[str]:
        """The aliases there are."""
        return list(dict.fromkeys(e.qualifier for e in self.entries if e.qualifier))

    def expression(self, span: Span) -> Expr:
        """An expression with its names resolved.

        Raises:
            SqlError: a name that is none, or something that does not belong into a streaming join.
        """
        refuse_sub_query(self.source, span)
        text, start = self.source.text(span), self.source.start(span)
        found = sorted(_names(self.source.sql, text, start), key=lambda ref: ref[0])
        parts: list[str | Column] = []
        offsets: list[int] = []
        cast: set[Column] = set()
        plain: set[Column] = set()
        done = 0
        for first, names, ends, in_cast in found:
            if first < done:
                continue  # sqlglot writes some functions' arguments twice
            used, value = self.resolve(names, start + first)
            for piece, offset in ((text[done:first], start + done), *_pieces(value, start + first)):
                if piece != "":
                    parts.append(piece)
                    offsets.append(offset)
            (cast if in_cast else plain).update(value.columns if isinstance(value, Expr) else [value])
            done = ends[used - 1]
        if text[done:]:
            parts.append(text[done:])
            offsets.append(start + done)
        return Expr(tuple(parts), tuple(offsets), frozenset(cast - plain))

    def resolve(self, names: list[str], at: int) -> tuple[int, Expr | Column]:
        """What a dotted name means, and how many of its parts say so (the rest are fields of a struct)."""
        found = self._find(names, at)
        if found is not None:
            return found
        scope = self.outer
        while scope is not None:
            outer = scope._find(names, at)
            if outer is not None:
                return outer
            scope = scope.outer
        return self._unknown(names, at)

    def _find(self, names: list[str], at: int) -> tuple[int, Expr | Column] | None:
        lowered = [name.lower() for name in names]
        if len(names) > 1 and lowered[0] in [t.lower() for t in self.tables]:
            own = [e for e in self.entries if e.qualifier.lower() == lowered[0] and e.name.lower() == lowered[1]]
            if len(own) > 1:
                self._ambiguous(".".join(names[:2]), own, at)
            if own:
                return 2, own[0].value
        named = [e for e in self.entries if e.name.lower() == lowered[0]]
        common = [e for e in named if not e.qualifier]
        named = common or named
        if len(named) > 1:
            self._ambiguous(names[0], named, at)
        return (1, named[0].value) if named else None

    def _ambiguous(self, name: str, found: list[Entry], at: int) -> None:
        could = " and ".join(dict.fromkeys(f"{e.qualifier}.{e.name}" for e in found))
        fail(self.source.sql, f"{name!r} is ambiguous: it can be {could}", at)

    def _unknown(self, names: list[str], at: int) -> tuple[int, Expr | Column]:
        shown, lowered = ".".join(names), [name.lower() for name in names]
        scopes = [self]
        while scopes[-1].outer is not None:
            scopes.append(scopes[-1].outer)
        for scope in scopes:
            why = scope.hidden.get(".".join(lowered[:2])) or (scope.hidden.get(lowered[0]) if len(names) == 1 else None)
            if why is not None:
                fail(self.source.sql, why, at)
        tables = [t for scope in scopes for t in scope.tables]
        if len(names) > 1 and lowered[0] not in [t.lower() for t in tables]:
            early = self.hidden.get(f"{lowered[0]}.")
            if early is not None:
                fail(self.source.sql, early, at)
            fail(self.source.sql, f"there is no table {names[0]!r} here; there are {closest(names[0], tables)}", at)
        if len(names) > 1:
            there = [e.name for scope in scopes for e in scope.entries if e.qualifier.lower() == lowered[0]]
            problem = f"{names[0]!r} has no column {names[1]!r}; it has {closest(names[1], there)}"
            fail(self.source.sql, problem, at)
        there = [e.name for scope in scopes for e in scope.entries]
        fail(self.source.sql, f"there is no column {shown!r}; there are {closest(shown, there)}", at)


def _pieces(value: Expr | Column, at: int) -> Iterator[tuple[str | Column, int]]:
    for part in value.parts if isinstance(value, Expr) else (value,):
        yield part, at


def _names(sql: str, text: str, start: int) -> Iterator[tuple[int, list[str], list[int], bool]]:
    """Each name of a column in an expression: where it begins, its parts, where each ends, whether in a CAST."""
    prefix = "SELECT (\n"
    try:
        tree = sqlglot.parse_one(f"{prefix}{text}\n)", read="spark")
    except (ParseError, TokenError) as error:
        first: Mapping[str, Any] = error.errors[0] if isinstance(error, ParseError) and error.errors else {}
        lines = text.splitlines(keepends=True)
        line = min(int(first.get("line") or 2) - 2, len(lines) - 1)
        inside = sum(map(len, lines[: max(line, 0)])) + max(int(first.get("col") or 1) - 1, 0)
        said = str(first.get("description") or error)
        why = "" if said.startswith("Required keyword") else f": {said.rstrip('.')}"
        fail(sql, f"this is no expression{why}", start + min(inside, len(text) - 1))
    for node in tree.walk():
        _refuse(sql, text, start, node)
        if isinstance(node, exp.Column):
            parts = [part for part in node.parts if isinstance(part, exp.Identifier)]
            starts = [int(part.meta["start"]) - len(prefix) for part in parts]
            ends = [int(part.meta["end"]) + 1 - len(prefix) for part in parts]
            yield starts[0], [part.name for part in parts], ends, node.find_ancestor(exp.Cast) is not None


def _refuse(sql: str, text: str, start: int, node: exp.Expr) -> None:
    """Raises SqlError for an aggregate, a window, or a function whose value changes."""
    why = None
    names = {node.name.lower()} if isinstance(node, exp.Anonymous) else set()
    if isinstance(node, exp.Func) and not isinstance(node, exp.Anonymous):
        names = {name.lower() for name in node.sql_names()}
    if isinstance(node, exp.Window) or names & refused.WINDOWS:
        why = refused.WINDOW
    elif isinstance(node, exp.AggFunc) or names & refused.AGGREGATES:
        why = refused.AGGREGATE
    elif names & refused.GENERATORS:
        why = refused.GENERATOR
    elif names & refused.UNSTABLE:
        why = refused.CHANGING
    if isinstance(node, exp.Alias | exp.Aliases) and not isinstance(node.parent, exp.Struct):
        # Spark takes a name behind an expression for its alias, and would lose it
        fail(sql, f"expected an operator before {node.alias or 'a name'!r}", start + _behind(text, node.alias))
    if isinstance(node, exp.Star) and node.parent is not None:
        fail(sql, "'*' stands alone in a SELECT list: name the columns", start + max(text.find("*"), 0))
    if isinstance(node, exp.Placeholder | exp.Parameter):
        marks = [place for place in map(text.find, ":?@$") if place >= 0]
        fail(sql, "parameters are not understood: put the value into the text", start + min(marks, default=0))
    if why is not None:
        place, word = _place(text, names)
        fail(sql, why.format(word.upper()), start + place)


def _behind(text: str, name: str) -> int:
    """Where a name that is an alias stands: the last one."""
    found = [token.start for token in Source.of(text).tokens if token.text.strip("'\"").lower() == name.lower()]
    return found[-1] if found else max(len(text) - 1, 0)


def _place(text: str, names: set[str]) -> tuple[int, str]:
    """Where a function stands in a text, and how it is written there."""
    tokens = Source.of(text).tokens
    for token in tokens:
        if token.kind == "word" and token.text.lower().replace("_", "") in {name.replace("_", "") for name in names}:
            return token.start, token.text
    return 0, next(iter(sorted(names)), text)
