"""Which parts of a query are the same: what it has several times is one operator, as in Flink.

Flink: ``table.optimizer.reuse-sub-plan-enabled``. Rows, and the columns in them, get numbers, equal where they are
made in the same way of the same inputs (value numbering).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

from gpu_ops.query.expressions import Column, Expr, Tree, number_of
from gpu_ops.query.groups.relations import AggregateOf, LatestOf, LocalAggregateOf, OfGroups, TopOf
from gpu_ops.query.relations import Compute, Expand, Filter, JoinOf, Relation, RowByRow, Scan

_CALLS: Final = ("UDF", "ApplyFunctionExpression", "Invoke", "NewInstance")
"""Nothing tells which functions they call."""


class Same(NamedTuple):
    """A relation that a query has already.

    Attributes:
        first: that one.
        columns: by column of the relation the first one's.
    """

    first: Relation
    columns: Mapping[Column, Column]


def repeated(root: Relation) -> dict[Relation, Same]:
    """The joins, aggregates and top-Ns of a query that it has before, the largest alone; those inside are not there.

    Args:
        root: the query.
    """
    numbers = _Numbers()
    numbers.rows(root)
    first: dict[int, Relation] = {}
    found: dict[Relation, Same] = {}
    waiting = [root]
    while waiting:
        relation = waiting.pop()
        if isinstance(relation, JoinOf | OfGroups) and not isinstance(relation, LocalAggregateOf):
            number, columns = numbers.found[relation]
            other = first.setdefault(number, relation)
            named = {of: column for column, of in numbers.found[other][1].items()}
            if other is not relation and named.keys() >= set(columns.values()):  # either may compute more below
                found[relation] = Same(other, {column: named[of] for column, of in columns.items()})
                continue
        waiting += reversed(relation.inputs)
    return found


class _Numbers:
    """Numbers for relations and for columns.

    Attributes:
        found: by relation its own, and those of its columns.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._columns: dict[Column, int] = {}
        self.found: dict[Relation, tuple[int, dict[Column, int]]] = {}

    def _of(self, *made: Hashable) -> int:
        return self._known.setdefault(made, len(self._known))

    def _column(self, column: Column) -> int:
        return self._columns.setdefault(column, self._of("column", column))

    def rows(self, relation: Relation) -> int:
        """A relation's; its columns have theirs afterwards."""
        number = self._rows(relation)
        self.found[relation] = number, {c: self._column(c) for c in relation.columns}
        return number

    def _rows(self, relation: Relation) -> int:
        if isinstance(relation, Scan):
            name = relation.table.name
            self._columns |= {c: self._of("column", name, c.label) for c in relation.ids.values()}
            return self._of("scan", name)
        if isinstance(relation, RowByRow):
            below = self.rows(relation.below)
            if isinstance(relation, Filter):
                return self._of("filter", below, *sorted(self._expr(x) for x in relation.conditions))
            if isinstance(relation, Compute):
                self._compute(relation)
                return below
            if isinstance(relation, Expand):
                value = self._columns[relation.column] = self._of("each", self._expr(relation.value))
                return self._of("expand", below, value)
        if isinstance(relation, AggregateOf):
            return self._aggregate(relation)
        if isinstance(relation, LatestOf):
            return self._of("latest", self.rows(relation.below))
        if isinstance(relation, TopOf):
            below = self.rows(relation.below)
            by = (self._column(c) for c in relation.by)
            order = (self._of(self._column(c), how._replace(column="")) for c, how in relation.order)
            number = self._of("top", below, *by, "order", *order)
            self._columns[relation.number] = self._of("row number", number)
            return self._of("first", number, relation.n)
        if isinstance(relation, JoinOf) and relation.by_time is None:
            return self._join(relation)
        for side in relation.inputs:
            self.rows(side)
        return self._unlike(relation)

    def _unlike(self, relation: Relation) -> int:
        """Of one that is like no other."""
        self._columns |= {c: self._of("column", c) for c in relation.columns}
        return self._of("rows", relation)

    def _compute(self, relation: Compute) -> None:
        """Columns that may be made of one another."""
        waiting = dict(relation.computed)
        while waiting:
            ready = [c for c, expr in waiting.items() if not any(of in waiting for of in expr.columns)]
            for column in ready:
                self._columns[column] = self._expr(waiting.pop(column))

    def _aggregate(self, relation: AggregateOf) -> int:
        below, more = self.rows(relation.below), tuple[Hashable, ...]()
        if isinstance(relation, LocalAggregateOf):
            window = relation.window
            more = (self._column(relation.time), window.size, window.slide, window.offset)
            self._columns |= {c: self._of("end", *more, place) for c, place in relation.places.items()}
        by, calls = [self._column(c) for c in relation.by], list[int]()
        for call in relation.calls:
            of = None if call.of is None else self._column(call.of)
            calls.append(self._of("call", call.function, of, str(call.column.type)))
            self._columns[call.column] = calls[-1]
        return self._of(type(relation).__name__, below, *by, "calls", *calls, *more)

    def _join(self, relation: JoinOf) -> int:
        sides = []
        for place, side in enumerate(relation.inputs):
            sides.append(self.rows(side))
            self._columns |= {c: self._of("of", place, self._column(c)) for c in side.columns}
        member = None if relation.member is None else self._expr(relation.member)
        return self._of("join", relation.how, *sides, member, *sorted(self._expr(x) for x in relation.on))

    def _expr(self, expr: Expr) -> int:
        return self._tree(expr.tree, expr.of)

    def _tree(self, tree: Tree, of: Mapping[int, Column]) -> int:
        if tree.kind == "AttributeReference":
            return self._column(of[number_of(tree)])
        if tree.kind.endswith(_CALLS):
            return self._of("call of", id(tree))
        args = (self._tree(arg, of) for arg in tree.args)
        return self._of(tree.kind, *args, *sorted((name, repr(value)) for name, value in tree.fields.items()))
