"""A query and what is known of its inputs, to a plan of operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from pyspark.sql import SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Emit
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.query import errors
from gpu_ops.query.build import Builder
from gpu_ops.query.by_time import check_all_found, read
from gpu_ops.query.catalyst import Catalyst
from gpu_ops.query.choose import Chooser
from gpu_ops.query.errors import SqlError
from gpu_ops.query.nodes import Calc, Namer, Plan
from gpu_ops.query.read import Outputs, Reader
from gpu_ops.query.relations import JoinOf, Relation, RowByRow, Scan, Table, UnionOf, origin
from gpu_ops.query.rewrite import in_two_phases, repeated
from gpu_ops.spark.datatypes import spark_type

MultiWay = Literal["auto", "never"]
"""Whether joins that share a key become one multi-way join."""


def plan(
    sql: str,
    tables: Mapping[str, Table],
    session: SparkSession,
    *,
    schemas: Mapping[str, st.StructType] | None = None,
    emit: Emit = "per_batch",
    multi_way: MultiWay = "auto",
) -> Plan:
    """The operators of a query.

    Args:
        sql: SELECT ... FROM ... JOIN ..., in Spark's dialect.
        tables: its inputs by name.
        session: whose analyser, functions and settings count.
        schemas: by input the columns as Spark has them; by default what their Arrow types become.
        emit: of every operator; with ``"at_watermark"`` all of them are joins by time. ``"at_end"`` is the last one's,
            and those below it are ``"per_batch"``.
        multi_way: ``"never"`` makes a chain of two-way joins.

    Raises:
        SqlError: a query that streaming joins cannot do, with its line and column, and what to do instead.
        NotBuiltError: with ``"at_end"`` an operator below the last one that waits for time to pass.
    """
    for option, value, values in (("multi_way", multi_way, MultiWay), ("emit", emit, Emit)):
        if value not in get_args(values):
            raise DescriptionError(f"{option}={value!r}; it is one of {', '.join(get_args(values))}")
    text = read(sql)
    try:
        catalyst = Catalyst(session)
        for name, table in tables.items():
            if "`" in name or name.lower() in text.sql.lower():
                catalyst.view(name, (schemas or {}).get(name) or _schema(table))
        whole = catalyst.parsed(text.sql)
        found = [Reader(text, tables, catalyst).read(part) for part in catalyst.parts(whole)]
        if len(found) > 1 and any(_without_operator(relation) for relation, _ in found):
            found = [Reader(text, tables, catalyst).read(whole)]  # one query, as not each part is one
        joins = [x for relation, _ in found for x in relation.walk() if isinstance(x, JoinOf)]
        check_all_found(text, (join.by_time for join in joins if join.by_time is not None))
        roots = [
            _root(*each, Chooser(text.sql, catalyst, final=emit == "at_watermark"), emit, multi_way=multi_way == "auto")
            for each in found
        ]
    except SqlError as error:
        raise text.error(error) from error.__cause__
    except DescriptionError as error:
        place = error.place if isinstance(error, errors.PlacedError) else (1, 1)
        raise text.error(SqlError(errors.in_sql(error), text.sql, *place)) from error
    first, *others = (Plan(sql, root) for root in roots)
    if emit == "at_end":
        if others or isinstance(origin(found[0][0]), UnionOf):
            raise NotBuiltError(
                "emit='at_end' of a UNION ALL: ask for each SELECT, and union what gpu_ops.finish() gives"
            )
        _check_below_the_last(first)
    return dataclasses.replace(first, others=tuple(others))


def _check_below_the_last(made: Plan) -> None:
    """Refuses what would still hold rows, or have forgotten some, when the last operator's input ends."""
    for node in made.joins[:-1]:
        for source in node.description.inputs:
            source.refuse("with emit='at_end' no row is forgotten", "ttl_ms")
        if node.description.by_time:
            raise NotBuiltError(
                f"emit='at_end': {node.description.title} ({node.kind}) holds rows until its watermark passes them, "
                "which the end of input does not do for an operator above it. Let the query end with it, and ask "
                "another one over what gpu_ops.finish() gives"
            )


def _root(relation: Relation, outputs: Outputs, chooser: Chooser, emit: Emit, *, multi_way: bool) -> Calc:
    if _without_operator(relation):
        raise SqlError(errors.JOINS_NOTHING, chooser.sql, 1, 1)
    if emit == "per_batch":
        relation = in_two_phases(relation)
    namer = Namer(relation, [column for _, column in outputs], chooser)
    same = {} if emit == "at_watermark" else repeated(relation)
    return Builder(chooser, namer, emit=emit, multi_way=multi_way, same=same).root(relation, outputs)


def _without_operator(relation: Relation) -> bool:
    return all(isinstance(below, RowByRow | Scan | UnionOf) for below in relation.walk())


def _schema(table: Table) -> st.StructType:
    return st.StructType([st.StructField(x.name, spark_type(x.type), x.nullable) for x in table.schema])
