"""``where=`` of the DataFrame functions, read by Spark's analyser as a condition of SQL is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.conditions import Condition, backquoted
from gpu_ops.errors import ConditionError, DescriptionError
from gpu_ops.query.by_time import QueryText
from gpu_ops.query.catalyst import Catalyst, calc, position
from gpu_ops.query.choose import Chooser, condition
from gpu_ops.query.errors import SqlError
from gpu_ops.query.expressions import Column, Expr, NotOursError
from gpu_ops.query.read import Reader
from gpu_ops.query.relations import Table
from gpu_ops.spark.api.streams import Stream, as_input

HIDDEN: Final = "__where_"
"""The names of columns that are there for a condition begin so."""


def engine_condition(
    where: str | None, sides: Sequence[Stream], padded: Sequence[bool] = ()
) -> tuple[Condition | str | None, list[Stream], list[str]]:
    """A condition as Spark's analyser reads it.

    Args:
        where: a user's, over the columns of the inputs, or None.
        sides: the inputs.
        padded: of each input whether its row may be missing; of none if left out.

    Returns:
        The condition; the inputs, with columns more for what only Spark computes; the names of these columns.

    Raises:
        DescriptionError: it is no text.
        ConditionError: what Spark does not take, or what only Spark evaluates and is over several inputs.
    """
    names = [side.label for side in sides]
    if where is not None and not isinstance(where, str):
        raise DescriptionError(f"where= is SQL text, such as '{names[0]}.a > {names[-1]}.b', not {where}")
    twice = len({name.lower() for name in names}) < len(names)  # which the description refuses
    if where is None or twice:
        return where, list(sides), []
    tables = {side.label: Table(side.label, as_input(side, derive=False).schema) for side in sides}
    catalyst = Catalyst(sides[0].df.sparkSession)
    for name, side in zip(names, sides, strict=True):
        own = tables[name].schema.names
        catalyst.view(name, st.StructType([x for x in side.df.schema.fields if x.name in own]))
    first, *others = map(backquoted, names)
    tables_of = " CROSS JOIN ".join([first, *others[:-1]])
    sql = f"SELECT 1 FROM {tables_of} JOIN {others[-1]} ON\n{where}\n"  # noqa: S608 - parsed as one expression
    try:
        catalyst.check_expression(where)
        scans, conditions = Reader(QueryText(sql, sql), tables, catalyst).condition()
        chooser = Chooser(sql, catalyst)
        made: list[dict[Column, Expr]] = [{} for _ in sides]
        residual = [chooser.residual(each, scans, made, padded) for each in conditions]
    except SqlError as error:
        line, place = (error.line - 1, error.column) if error.line > 1 else (1, 1)
        raise ConditionError(error.message, where, line, place) from error
    except NotOursError as error:
        line, place = position(error.expr.java.origin())
        hint = "filter what the join gives, or compute it in the inputs first"
        raise ConditionError(f"{error}; {hint}", where, max(line - 1, 1), place) from error
    called = {column: f"{HIDDEN}{column.label}" for more in made for column in more}
    owner = {c: name for scan, more, name in zip(scans, made, names, strict=True) for c in (*scan.columns, *more)}
    wider = [
        dataclasses.replace(side, df=_wider(side.df, more, called)) if more else side
        for side, more in zip(sides, made, strict=True)
    ]
    schemas = {side.label: as_input(side, derive=False).schema for side in wider}
    read = condition(residual, lambda c: (owner[c], called.get(c, c.label)), schemas, text=where, ansi=chooser.ansi)
    return read or "true", wider, list(called.values())


def without_hidden(df: DataFrame) -> DataFrame:
    """A join's result without the columns that are there for its condition."""
    hidden = [column for column in df.columns if column.startswith(HIDDEN)]
    return df.drop(*hidden) if hidden else df


def _wider(df: DataFrame, more: dict[Column, Expr], called: dict[Column, str]) -> DataFrame:
    known = {number: column.label for expr in more.values() for number, column in expr.ids.items()}
    select = [*((c, c) for c in df.columns), *((called[column], expr.java) for column, expr in more.items())]
    return calc(df, known, [], select, None)
