"""Filters and projections of columns above a node of one of Spark's plans, where Arrow does the same with batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from gpu_ops.files.row_filter import Condition, Taken
from gpu_ops.spark.plan.predicates import conditions_of
from gpu_ops.spark.plan.recognition import JoinPlan, analyzed, hides_metrics


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
    node = analyzed(df)
    wanted = _identities(node.output())
    tested: list[int] = []
    conditions: list[Condition] = []
    while not ends(node):
        name = str(node.nodeName())
        if name == "Project":
            made = _projected(node.projectList())
            if any(column not in made for column in (*wanted, *tested)):
                return "a column is computed"
            wanted = [made[column] for column in wanted]
            tested = [made[column] for column in tested]
        elif name == "Filter" and not hides_metrics(node):
            condition = conditions_of(node.condition(), tested)
            if condition is None:
                return f"only Spark evaluates {node.condition().sql()}"
            conditions.append(condition)
        elif name == "Filter":
            node = node.children().head()
        elif name != "SubqueryAlias":  # not even a watermark: Spark's operators behind the join may go by it
            return f"{name} stands above"
        node = node.children().head()
    there = {column: place for place, column in enumerate(_identities(node.output()))}
    places = [tuple(there[column] for column in columns) for columns in (wanted, tested)]
    return Selection(node, Taken(places[0], places[1], tuple(reversed(conditions))))


def taken_of_join(df: DataFrame) -> Selection | str:
    """What a DataFrame takes of the join below it, as `selection`."""
    return selection(df, lambda node: JoinPlan.of(node) is not None)


def _identities(attributes: Any) -> list[int]:
    return [int(attributes.apply(place).exprId().id()) for place in range(attributes.length())]


def _projected(expressions: Any) -> dict[int, int]:
    """By which column of its child a projection has each of its columns; computed ones are left out."""
    made = {}
    for place in range(expressions.length()):
        expression = expressions.apply(place)
        own, name = int(expression.exprId().id()), str(expression.nodeName())
        if name == "Alias":
            expression = expression.child()
            name = str(expression.nodeName())
        if name == "AttributeReference":
            made[own] = int(expression.exprId().id())
    return made
