"""The columns of a query that have been read so far, and those that an operator on groups needs below it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NoReturn

from pyspark.sql import types as st

from gpu_ops.query.catalyst import Catalyst, arrow_type_of, id_of
from gpu_ops.query.errors import SqlError
from gpu_ops.query.expressions import Expr, QueryColumn, tree
from gpu_ops.query.places import position_of, words_of
from gpu_ops.query.relations import Compute, Relation
from gpu_ops.spark_types import is_binary_collated


class Scope:
    """The columns that have been read so far, by the ids that Catalyst gives them.

    Attributes:
        sql: the query's text.
        catalyst: the analyser.
        columns: by id.
    """

    def __init__(self, sql: str, catalyst: Catalyst) -> None:
        self.sql, self.catalyst = sql, catalyst
        self.columns: dict[int, QueryColumn] = {}

    def expr(self, java: Any) -> Expr:
        """An expression of Catalyst's."""
        return Expr(tree(json.loads(java.toJSON()), lambda: java), self.columns)

    def computed(self, java: Any, label: str, owner: str = "") -> QueryColumn:
        """A column that an expression of Catalyst's makes, and that the query gives a name."""
        return QueryColumn(label, owner, functools.partial(arrow_type_of, java), nullable=bool(java.nullable()))

    def nameless(self, java: Any, label: str, said: Callable[[], str] | None = None, owner: str = "") -> QueryColumn:
        """A column that an expression makes, and that has no name in the query.

        Args:
            java: the expression.
            label: what the plan calls it.
            said: gives the query's words for it; None for those of the expression.
            owner: the alias of its table, or empty.
        """
        words = functools.partial(words_of, java) if said is None else said
        kind = functools.partial(arrow_type_of, java)
        return QueryColumn(label, owner, kind, words=words, nullable=bool(java.nullable()))

    def attribute(self, java: Any, column: QueryColumn) -> Any:
        """A new attribute of an expression's type for a column."""
        made = self.catalyst.attribute(java, column.label)
        self.columns[id_of(made)] = column
        return made

    def fail(self, message: str, node: Any) -> NoReturn:
        """SqlError where one of Catalyst's nodes comes from."""
        raise SqlError(message, self.sql, *position_of(node))


class Below:
    """Columns that an operator on groups needs of the relation below it; expressions become columns there.

    Attributes:
        computed: those columns.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.computed: dict[QueryColumn, Expr] = {}

    def column(self, java: Any, label: str, said: Callable[[], str] | None = None) -> QueryColumn:
        """The column of an expression, the same one for the same expression.

        Args:
            java: the expression.
            label: what a new column is called.
            said: gives what the query says for it, where that is not the expression's own text.
        """
        expr = self._scope.expr(java)
        if expr.column is not None:
            return expr.column
        found = next((column for column, known in self.computed.items() if known.java.semanticEquals(java)), None)
        if found is None:
            found = self._scope.nameless(java, label, said)
            self.computed[found] = expr
        return found

    def compared(self, java: Any, label: str) -> QueryColumn:
        """The column that an expression is compared by: of text in a collation its key, of any other it itself."""
        return self.column(self._scope.catalyst.collation_key(java) if collated(java) else java, label)

    def of(self, relation: Relation) -> Relation:
        """A relation with these columns."""
        return Compute(relation, self.computed, relation.shown) if self.computed else relation


def collated(java: Any) -> bool:
    """True for text in a collation in which other bytes may be equal (Spark 4)."""
    kind = st._parse_datatype_json_string(java.dataType().json())
    return isinstance(kind, st.StringType) and not is_binary_collated(kind)
