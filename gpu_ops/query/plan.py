"""A query and what is known of its inputs, to a plan of operators. Needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NoReturn, get_args

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Emit
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.query.bind import Binder, Output
from gpu_ops.query.build import Builder
from gpu_ops.query.choose import Chooser
from gpu_ops.query.errors import SqlError, fail
from gpu_ops.query.names import TypeOf, known_type
from gpu_ops.query.naming import Namer
from gpu_ops.query.nodes import Plan
from gpu_ops.query.pushdown import push
from gpu_ops.query.read import read
from gpu_ops.query.relations import Compute, Filter, JoinOf, Relation
from gpu_ops.query.tables import Table

MultiWay = Literal["auto", "never"]
"""Whether joins that share a key become one multi-way join."""


def plan(
    sql: str,
    tables: Mapping[str, Table],
    *,
    emit: Emit = "per_batch",
    multi_way: MultiWay = "auto",
    type_of: TypeOf = known_type,
    time_zone: str = "UTC",
    ansi: bool = False,
) -> Plan:
    """The operators of a query.

    Args:
        sql: SELECT ... FROM ... JOIN ..., in Spark's dialect.
        tables: its inputs by name.
        emit: of every join.
        multi_way: ``"never"`` makes a chain of two-way joins.
        type_of: how the types of computed columns are found out; by default as far as residual conditions
            know them.
        time_zone: the session's.
        ansi: whether the session has ``spark.sql.ansi.enabled``.

    Raises:
        SqlError: a query that streaming joins cannot do, with its line and column, and what to do instead.
    """
    for option, value, values in (("multi_way", multi_way, MultiWay), ("emit", emit, Emit)):
        if value not in get_args(values):
            raise DescriptionError(f"{option}={value!r}; it is one of {', '.join(get_args(values))}")
    source, query = read(sql)
    bound = Binder(source, tables, type_of).query(query)

    def stop(message: str, at: int) -> NoReturn:
        fail(sql, message, at)

    if emit == "at_end":
        raise NotBuiltError(
            "emit='at_end' is not built for sql(): what finish() gives are the columns of a join, not of a query"
        )
    if bound.correlated:
        stop("this condition names no column of the query's own tables", bound.correlated[0].expr.at)
    relation, above = push(bound.relation, (), stop)
    relation = Filter(relation, tuple(above)) if above else relation
    if not _joins(relation):
        stop("the query joins nothing: filter and project one stream in Spark, df.where(...).select(...)", query.at)
    outputs = _checked(bound.outputs, sql)
    chooser = Chooser(sql, type_of, time_zone, ansi=ansi)
    builder = Builder(sql, chooser, Namer(relation, outputs, chooser), emit=emit, multi_way=multi_way == "auto")
    return Plan(sql, builder.root(relation, outputs))


def _joins(relation: Relation) -> bool:
    while isinstance(relation, Filter | Compute):
        relation = relation.below
    return isinstance(relation, JoinOf)


def _checked(outputs: tuple[Output, ...], sql: str) -> tuple[Output, ...]:
    """The result's columns, each with a name of its own."""
    seen: dict[str, Output] = {}
    for output in outputs:
        name = output.name.lower()
        if name == ROW_KIND_COLUMN:
            fail(sql, f"{ROW_KIND_COLUMN!r} is the first column of every result: give this one another name", output.at)
        if name in seen:
            fail(
                sql,
                f"the result would have two columns {output.name!r}, {seen[name].source} and {output.source}: give one "
                "another name with AS, or JOIN ... USING where they are the key",
                output.at,
            )
        seen[name] = output
    return outputs


__all__ = ["MultiWay", "Plan", "SqlError", "Table", "plan"]
