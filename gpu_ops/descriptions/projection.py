"""A filter and projection of rows, as it stands below an operator: at a source, or between two operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from gpu_ops.conditions import Expression, nodes_of, read_tree, tree_of
from gpu_ops.conditions.expressions import ON_HOST, Call, ColumnRef, Op, failing
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN

ROWS: Final = ""
"""The name of the one input in expressions."""

_MOST_MEMBERS: Final = 16
"""Values that a GPU compares a column with one by one, for IN."""


class Projection(NamedTuple):
    """A filter and projection; `gpu_ops.operators.core.projection.project` applies it.

    Attributes:
        columns: the columns of the result: columns of the rows, or expressions over them.
        where: boolean expressions, one after the other: each is evaluated for rows for which those before are true.
    """

    columns: tuple[Expression, ...]
    where: tuple[Expression, ...] = ()

    @classmethod
    def all(cls, schema: pa.Schema) -> Projection:
        """The projection that takes all columns of a schema as they are."""
        return cls(tuple(column_of(field) for field in schema))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the rows that the filter and projection need."""
        return tuple(dict.fromkeys([*columns_in(self.columns), *self.tested]))

    @property
    def tested(self) -> tuple[str, ...]:
        """The columns of the rows that the filter needs."""
        return columns_in(self.where)

    @property
    def computed(self) -> tuple[Expression, ...]:
        """The columns of the result that are computed."""
        return tuple(column for column in self.columns if not isinstance(column.root, ColumnRef))

    @property
    def needs_host(self) -> bool:
        """True for computed columns, and for a filter that a GPU cannot evaluate, or would compare many times for."""
        nodes = nodes_of(*(x for test in self.where for x in (test.root, test.fails)))
        calls = [node for node in nodes if isinstance(node, Call)]
        beyond = any(x.op in ON_HOST or (x.op is Op.IN and len(x.args) > _MOST_MEMBERS) for x in calls)
        return beyond or bool(self.computed)

    def by_row_kind(self) -> tuple[tuple[Expression, ...], Projection]:
        """The filters that ask for a row kind and nothing else, and the projection without them."""
        own, others = list[Expression](), list[Expression]()
        for test in self.where:
            (own if columns_in([test]) == (ROW_KIND_COLUMN,) else others).append(test)
        return tuple(own), self._replace(where=tuple(others))

    def types(self, schema: pa.Schema) -> list[pa.DataType]:
        """Returns the types of the result's columns.

        Args:
            schema: the schema of the rows.
        """
        roots = [column.root for column in self.columns]
        return [schema.field(x.name).type if isinstance(x, ColumnRef) else x.type for x in roots]

    def to_dict(self) -> dict[str, Any]:
        """Gives the projection for JSON: the text and tree of each expression, and whether it fails in ANSI mode."""
        return {name: [_written(x) for x in getattr(self, name)] for name in self._fields}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], schema: pa.Schema) -> Projection:
        """From what `to_dict` gave.

        Args:
            data: the parsed JSON.
            schema: the schema of the rows.
        """
        return cls(*(tuple(_read(x, schema) for x in data[name]) for name in cls._fields))


def column_of(field: pa.Field) -> Expression:
    """A column of the rows as it is."""
    return Expression(field.name, ColumnRef(ROWS, field.name, field.type), {ROWS: (field.name,)})


def columns_in(expressions: Sequence[Expression]) -> tuple[str, ...]:
    """The columns of the rows that expressions need, each once."""
    return tuple(dict.fromkeys(name for x in expressions for name in x.columns.get(ROWS, ())))


def _written(expression: Expression) -> dict[str, Any]:
    fails = {} if expression.fails is None else {"ansi": True}
    return {"text": expression.sql, "tree": tree_of(expression.root), **fails}


def _read(data: Mapping[str, Any], schema: pa.Schema) -> Expression:
    root = read_tree(data["tree"], {ROWS: schema})
    fails = failing(root) if data.get("ansi") else None
    used = dict.fromkeys(node.name for node in nodes_of(root, fails) if isinstance(node, ColumnRef))
    return Expression(data["text"], root, {ROWS: tuple(used)}, fails)
