"""What a DataFrame takes of a node of its plan, by filters and projections that Arrow does with batches likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from gpu_ops.conditions.builder import Builder
from gpu_ops.query.catalyst import ansi_mode, id_of, items
from gpu_ops.spark.plan.expressions import Known, OnlySparkError, Reader, column, expression
from gpu_ops.spark.plan.recognition import JoinPlan, analyzed, hides_metrics
from gpu_ops.spark.tasks.taken import Taken


class Selection(NamedTuple):
    """What a DataFrame takes of the rows of a node of its logical plan."""

    node: Any
    taken: Taken


def selection(df: DataFrame, ends: Callable[[Any], bool]) -> Selection | str:
    """What a DataFrame takes of the nearest node below that ends the search; a reason where Arrow cannot do the same.

    Args:
        df: a DataFrame.
        ends: whether a node is the one.
    """
    node = top = analyzed(df)
    above = []
    while not ends(node):
        name = str(node.nodeName())
        if name == "Filter" and hides_metrics(node):
            node = node.children().head()
        elif name in ("Project", "Filter"):
            above.append(node)
        elif name != "SubqueryAlias":  # not even a watermark: Spark's operators behind the join may go by it
            return f"{name} stands above"
        node = node.children().head()
    builder = Builder(ansi=ansi_mode(df.sparkSession))
    known: Known = {id_of(x): functools.cache(functools.partial(column, x)) for x in items(node.output())}
    texts: dict[int, str] = {}
    where = []
    try:
        for one in reversed(above):
            if str(one.nodeName()) == "Filter":
                where.append(expression(one.condition(), known, builder, str(one.condition().sql())))
            else:
                reader = Reader(known, builder)
                made = {id_of(x): x.child() if str(x.nodeName()) == "Alias" else x for x in items(one.projectList())}
                known = {number: functools.cache(functools.partial(reader.node, x)) for number, x in made.items()}
                texts = {number: texts.get(id_of(x), "") if _moved(x) else str(x.sql()) for number, x in made.items()}
        columns = [expression(x, known, builder, texts.get(id_of(x), "")) for x in items(top.output())]
    except OnlySparkError as error:
        return f"only Spark evaluates {error}"
    return Selection(node, Taken(tuple(columns), tuple(where)))


def _moved(expression: Any) -> bool:
    return str(expression.nodeName()) == "AttributeReference"


def taken_of_join(df: DataFrame) -> Selection | str:
    """What a DataFrame takes of the join below it, as `selection`."""
    return selection(df, lambda node: JoinPlan.of(node) is not None)
