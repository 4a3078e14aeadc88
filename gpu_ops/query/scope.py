"""What is known of a query while its plan is read, and expressions of it as columns."""

from __future__ import annotations

import functools
import json
from typing import Any, NoReturn

from gpu_ops.query.catalyst import Catalyst, arrow_type_of, position
from gpu_ops.query.errors import SqlError
from gpu_ops.query.expressions import Column, Expr, tree
from gpu_ops.query.relations import Compute, Relation


class Scope:
    """The columns that have been read so far, by the ids that Catalyst gives them.

    Attributes:
        sql: the query's text.
        catalyst: the analyser.
        columns: by id.
    """

    def __init__(self, sql: str, catalyst: Catalyst) -> None:
        self.sql, self.catalyst = sql, catalyst
        self.columns: dict[int, Column] = {}

    def expr(self, java: Any) -> Expr:
        """An expression of Catalyst's."""
        return Expr(tree(json.loads(java.toJSON()), lambda: java), self.columns)

    def fail(self, message: str, node: Any) -> NoReturn:
        """SqlError where one of Catalyst's nodes comes from."""
        raise SqlError(message, self.sql, *position(node.origin()))


class Below:
    """What an operator on groups looks at, as columns of the relation below it; expressions become columns there.

    Attributes:
        made: those columns.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.made: dict[Column, Expr] = {}

    def column(self, java: Any, label: str) -> Column:
        """The column of an expression, the same one for the same expression; a new one is called ``label``."""
        expr = self._scope.expr(java)
        if expr.column is not None:
            return expr.column
        found = next((column for column, known in self.made.items() if known.java.semanticEquals(java)), None)
        if found is None:
            found = Column(label, "", functools.partial(arrow_type_of, java), nullable=bool(java.nullable()))
            self.made[found] = expr
        return found

    def of(self, relation: Relation) -> Relation:
        """A relation with these columns."""
        return Compute(relation, self.made, relation.shown) if self.made else relation
