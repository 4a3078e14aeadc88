"""From a query's syntax tree to relations: names resolved, sub-queries of EXISTS and IN made joins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_ops.query import refused
from gpu_ops.query.errors import closest, fail
from gpu_ops.query.names import Column, Entry, Expr, Scope, TypeOf
from gpu_ops.query.names import computed as made_column
from gpu_ops.query.predicates import Predicate, SubQuery, conjuncts
from gpu_ops.query.relations import Compute, Condition, JoinOf, Relation, Scan, filtered
from gpu_ops.query.syntax import JoinClause, Select, Source, Span, SubTable, TableName
from gpu_ops.query.syntax import Relation as Clause
from gpu_ops.query.tables import Table

Ctes = Mapping[str, tuple[tuple[str, ...] | None, Select, "Ctes"]]
"""Name in lower case to column names, query, and the common table expressions it can see."""


@dataclasses.dataclass(frozen=True)
class Output:
    """A column of a query's result."""

    name: str
    value: Expr
    at: int
    source: str
    """What it is, for the error that there are two of a name."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A query with its names resolved; ``correlated``: conditions that need the query around it."""

    relation: Relation
    outputs: tuple[Output, ...]
    correlated: tuple[Condition, ...] = ()


class _Called(NamedTuple):
    """What a relation and its columns are called, and where."""

    alias: str
    columns: tuple[str, ...] | None
    at: int


class Binder:
    """Resolves the names of one query."""

    def __init__(self, source: Source, tables: Mapping[str, Table], type_of: TypeOf) -> None:
        """Args: the query; its inputs by name; how the types of computed columns are found out."""
        self.source, self.type_of = source, type_of
        self.tables = {name.lower(): table for name, table in tables.items()}
        self._before_comma: dict[str, str] = {}

    def query(self, select: Select, ctes: Ctes | None = None, outer: Scope | None = None) -> Bound:
        """A SELECT; ``outer``: the scope around a sub-query of WHERE."""
        if select.distinct is not None:
            fail(self.source.sql, refused.DISTINCT if outer is None else refused.DISTINCT_INSIDE, select.distinct)
        seen: dict[str, tuple[tuple[str, ...] | None, Select, Ctes]] = dict(ctes or {})
        for name, columns, query in select.ctes:
            seen[name.lower()] = columns, query, dict(seen)
        relation, scope = self.relation(select.relation, seen, outer)
        correlated: list[Condition] = []
        subs: list[SubQuery] = []
        own: list[Condition] = []
        for part in conjuncts(self.source, select.where) if select.where is not None else []:
            if isinstance(part, SubQuery):
                subs.append(part)
                continue
            condition = self.condition(part, scope)
            (own if condition.columns <= relation.columns else correlated).append(condition)
        relation = filtered(relation, own)
        for sub in subs:
            relation = self.sub_query(sub, relation, scope, seen)
        return Bound(relation, tuple(self.outputs(select, scope)), tuple(correlated))

    # --- FROM -----------------------------------------------------------------------------------

    def relation(self, clause: Clause, ctes: Ctes, outer: Scope | None) -> tuple[Relation, Scope]:
        """What a clause of FROM is, and which names it gives."""
        if isinstance(clause, JoinClause):
            return self.join(clause, ctes, outer)
        if isinstance(clause, SubTable):
            return self.derived(clause.query, _Called(clause.alias or "", clause.columns, clause.at), ctes, outer)
        if clause.name.lower() in ctes:
            columns, query, visible = ctes[clause.name.lower()]
            return self.derived(query, _Called(clause.alias, clause.columns or columns, clause.at), visible, outer)
        return self.scan(clause, ctes, outer)

    def scan(self, clause: TableName, ctes: Ctes, outer: Scope | None) -> tuple[Relation, Scope]:
        """An input."""
        table = self.tables.get(clause.name.lower())
        if table is None:
            there = closest(clause.name, [*(t.name for t in self.tables.values()), *ctes])
            problem = f"there is no table {clause.name!r}; there are {there}. Inputs are arguments: sql(query, name=df)"
            fail(self.source.sql, problem, clause.at)
        unique = table.unique_key or ()
        columns = tuple(
            Column(f.name, clause.alias, f.type, f.nullable and f.name not in unique, f.name in table.event_times)
            for f in table.schema
        )
        names = self.renamed([c.label for c in columns], clause.columns, clause.alias, clause.at)
        entries = [Entry(clause.alias, name, column) for name, column in zip(names, columns, strict=True)]
        hidden = {}
        if table.row_kind is not None:
            why = f"{table.row_kind!r} is the row kind of {table.name}, not data: it is the result's row_kind"
            hidden = {table.row_kind.lower(): why, f"{clause.alias}.{table.row_kind}".lower(): why}
        return Scan(table, clause.alias, columns), Scope(self.source, entries, hidden, outer)

    def derived(self, query: Select, called: _Called, ctes: Ctes, outer: Scope | None) -> tuple[Relation, Scope]:
        """A sub-query in FROM, or a common table expression."""
        alias, columns, at = called
        bound = self.query(query, ctes)
        names = self.renamed([o.name for o in bound.outputs], columns, alias or "the sub-query", at)
        computed: dict[Column, Expr] = {}
        entries = []
        for name, output in zip(names, bound.outputs, strict=True):
            column = output.value.column
            if column is None:
                column = made_column(output.value, name, alias, self.type_of, self.source.sql)
                computed[column] = output.value
            entries.append(Entry(alias, name, column))
        relation = Compute(bound.relation, computed) if computed else bound.relation
        return relation, Scope(self.source, entries, {}, outer)

    def renamed(self, names: list[str], new: tuple[str, ...] | None, alias: str, at: int) -> list[str]:
        """The names of a relation's columns, after ``AS t(a, b)``."""
        if new is not None and len(new) != len(names):
            fail(self.source.sql, f"{alias} has {len(names)} columns and {len(new)} names for them", at)
        return list(new) if new is not None else names

    def join(self, clause: JoinClause, ctes: Ctes, outer: Scope | None) -> tuple[Relation, Scope]:
        """Two relations."""
        left, left_scope = self.relation(clause.left, ctes, outer)
        around = self._before_comma
        if clause.comma:
            weak = "stands before a comma, which binds more weakly than JOIN: write CROSS JOIN instead of the comma"
            self._before_comma = around | {f"{t}.".lower(): f"{t!r} {weak}" for t in left_scope.tables}
        right, right_scope = self.relation(clause.right, ctes, outer)
        self._before_comma = around
        for alias in right_scope.tables:
            if alias.lower() in [other.lower() for other in left_scope.tables]:
                problem = f"two tables are called {alias!r} here: give one another name, JOIN ... AS other"
                fail(self.source.sql, problem, _first_at(clause.right))
        entries = [*left_scope.entries, *right_scope.entries]
        hidden = {**left_scope.hidden, **right_scope.hidden}
        early = {**hidden, **self._before_comma}
        both = Scope(self.source, entries, early, outer)
        on: list[Condition] = []
        if clause.on is not None:
            for part in conjuncts(self.source, clause.on):
                if isinstance(part, SubQuery):
                    fail(self.source.sql, refused.SUBQUERY, part.at)
                on.append(self.condition(part, both))
        common: list[Entry] = []
        for token in clause.using:
            sides = [
                Scope(self.source, s.entries, s.hidden).resolve([token.text], token.start)[1]
                for s in (left_scope, right_scope)
            ]
            on.append(_equal(*(_expr(side, token.start) for side in sides)))
            values = [_expr(side, token.start) for side in sides]
            shown = values[clause.how == "right"]
            if clause.how == "full":
                shown = _joined(["COALESCE(", values[0], ", ", values[1], ")"], token.start)
            common.append(Entry("", token.text, shown.column or shown))
        inside = left.columns | right.columns
        for condition in on:
            if not condition.columns <= inside:
                problem = "a sub-query's ON can name its own tables only: move this condition to its WHERE"
                fail(self.source.sql, problem, condition.expr.at)
        if clause.how in ("semi", "anti"):
            for entry in right_scope.entries:
                why = f"{entry.qualifier}.{entry.name} is on the right of a {clause.how} join: only the left's come out"
                hidden.setdefault(f"{entry.qualifier}.{entry.name}".lower(), why)
                hidden.setdefault(entry.name.lower(), why)
            entries = list(left_scope.entries)
        elif common:
            used = {e.name.lower() for e in common}
            rest = [e for e in entries if e.qualifier or e.name.lower() not in used]
            entries = [*common, *(dataclasses.replace(e, shown=e.shown and e.name.lower() not in used) for e in rest)]
        spoken = "CROSS JOIN" if clause.on is None and not clause.using else f"{clause.how.upper()} JOIN"
        relation = JoinOf(clause.how, left, right, tuple(on), clause.at, spoken)
        return relation, Scope(self.source, entries, hidden, outer)

    # --- SELECT and WHERE -----------------------------------------------------------------------

    def condition(self, part: Predicate, scope: Scope) -> Condition:
        """A predicate with its names resolved."""
        expr = scope.expression(part.span)
        if part.equality is None:
            return Condition(expr)
        left, right = (scope.expression(side) for side in part.equality)
        return Condition(expr, (left, right), part.null_safe)

    def outputs(self, select: Select, scope: Scope) -> list[Output]:
        """The SELECT list, ``*`` written out."""
        found: list[Output] = []
        for item in select.items:
            if not item.star:
                value = scope.expression(item.span)
                written = " ".join(self.source.text(item.span).split())
                column = value.column
                name = item.alias or (self.last_name(item.span) if column is not None else written)
                found.append(Output(name, value, item.at, str(column) if column is not None else written))
                continue
            qualifier = self.source.text(item.span).strip("`")
            entries = [e for e in scope.entries if e.shown]
            if qualifier:
                entries = [e for e in scope.entries if e.qualifier.lower() == qualifier.lower()]
                if not entries:
                    there = closest(qualifier, scope.tables)
                    fail(self.source.sql, f"there is no table {qualifier!r} here; there are {there}", item.at)
            found += [Output(e.name, _expr(e.value, item.at), item.at, f"{e.qualifier}.{e.name}") for e in entries]
        return found

    def last_name(self, span: Span) -> str:
        """The name of a column as the query writes it."""
        return self.source.tokens[span.stop - 1].text

    def sub_query(self, sub: SubQuery, relation: Relation, scope: Scope, ctes: Ctes) -> Relation:
        """EXISTS or IN as a semi or anti join."""
        bound = self.query(sub.query, ctes, scope)
        on: list[Condition] = []
        spoken = ("NOT " if sub.negated else "") + ("EXISTS" if sub.values is None else "IN")
        if sub.values is not None:
            if len(sub.values) != len(bound.outputs):
                problem = f"IN compares {len(sub.values)} values with the {len(bound.outputs)} columns of the sub-query"
                fail(self.source.sql, problem, sub.at)
            for span, output in zip(sub.values, bound.outputs, strict=True):
                if not frozenset(output.value.columns) <= bound.relation.columns:
                    problem = "a sub-query after IN selects columns of its own: move the others to its WHERE"
                    fail(self.source.sql, problem, output.at)
                on.append(_equal(scope.expression(span), output.value, member=sub.negated))
        on += bound.correlated
        for condition in on:
            if not condition.columns <= relation.columns | bound.relation.columns:
                problem = "a sub-query can name its own tables and those of the query right around it"
                fail(self.source.sql, problem, condition.expr.at)
        return JoinOf("anti" if sub.negated else "semi", relation, bound.relation, tuple(on), sub.at, spoken)


def _first_at(clause: Clause) -> int:
    return _first_at(clause.left) if isinstance(clause, JoinClause) else clause.at


def _expr(value: Expr | Column, at: int) -> Expr:
    return value if isinstance(value, Expr) else Expr.of(value, at)


def _joined(parts: Sequence[str | Expr], at: int) -> Expr:
    """Pieces of text and expressions, as one."""
    found: list[tuple[str | Column, int]] = []
    for part in parts:
        found += zip(part.parts, part.offsets, strict=True) if isinstance(part, Expr) else [(part, at)]
    times = frozenset(c for part in parts if isinstance(part, Expr) for c in part.times)
    cast = frozenset(c for part in parts if isinstance(part, Expr) for c in part.cast)
    return Expr(tuple(p for p, _ in found), tuple(o for _, o in found), cast - times)


def _equal(left: Expr, right: Expr, *, member: bool = False) -> Condition:
    """``left = right``, which the query says in another way."""
    pieces: list[str | Expr] = []
    for side in (left, right):
        pieces += [side] if side.column is not None else ["(", side, ")"]
    pieces.insert(1 if left.column is not None else 3, " = ")
    return Condition(_joined(pieces, left.at), (left, right), member=member)
