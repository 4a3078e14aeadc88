"""What a DataFrame is made of: the join below its filters and projections, and what these take of its rows."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from pyspark.sql import DataFrame

from gpu_ops.spark.driver.queries import MAPS, JoinPlan, analyzed, children_of, plans_in
from gpu_ops.spark.plan.column_metadata import known_key

ROW_BY_ROW: Final = {
    "Project", "Filter", "SubqueryAlias", "CollectMetrics", "EventTimeWatermark", "ResolvedHint", "UnresolvedHint",
    "View",
}  # fmt: skip
"""Logical nodes that give each row at most once, in the order they come."""

_ONE_FOR_ONE: Final = ROW_BY_ROW - {"Filter"}
"""Those that give each row once."""

_SAME_PARTITIONS: Final = ROW_BY_ROW | MAPS | {
    "Generate", "Expand", "Sample", "TypedFilter", "MapElements", "MapPartitions",
    "SerializeFromObject", "DeserializeToObject", "WithCTE",
}  # fmt: skip
"""Those whose partitions are their child's."""


def made_by(df: DataFrame) -> JoinPlan | None:
    """The join whose rows, filtered or projected, a DataFrame is; None for anything else."""
    return _join_below(df, (_SAME_PARTITIONS - MAPS) | {"Repartition", "RepartitionByExpression"})


def join_written(df: DataFrame) -> str | None:
    """The name of the join of which a DataFrame has every change, each once; None where that cannot be told."""
    plan = _join_below(df, _ONE_FOR_ONE)
    return None if plan is None else plan.name


def lost_row_time(df: DataFrame) -> str | None:
    """Which join a DataFrame's rows lost their event time in, as half a sentence; None where none did.

    Flink's planner: "Rowtime attributes must not be in the input rows of a regular join".
    """
    plan = next(plans_in(analyzed(df)), None)
    if plan is None or not plan.row_times:
        return None
    return (
        f"the join '{plan.name}' below it ({plan.join.title}) does not pass on the event time of its inputs, "
        f"{', '.join(plan.row_times)}, as its rows may be of any age"
    )


def derived_key(df: DataFrame) -> tuple[str, ...] | None:
    """The unique key of a changelog of this pack, where it follows from its join; None otherwise.

    Only for a changelog that was merely filtered or projected: an explode or a union repeats keys, and a
    repartition loses the order of a key's changes.
    """
    plan = _join_below(df, ROW_BY_ROW)
    return None if plan is None else known_key(df, plan.plan_id)


def never_retracts(df: DataFrame) -> bool:
    """Whether a changelog of this pack, perhaps filtered or projected, is insert-only, as follows from its join."""
    plan = _join_below(df, ROW_BY_ROW)
    return plan is not None and plan.join.insert_only


def _join_below(df: DataFrame, through: Set[str]) -> JoinPlan | None:
    node = analyzed(df)
    while (plan := JoinPlan.of(node)) is None:
        below = children_of(node)
        if len(below) != 1 or not (str(node.nodeName()) in through or hides_metrics(node)):
            return None
        (node,) = below
    return plan


def hides_metrics(node: Any) -> bool:
    """Whether it is the filter right above a join that takes the row with the metrics out."""
    below = node.children().head()
    if str(node.nodeName()) != "Filter" or str(below.nodeName()) != "CollectMetrics":
        return False
    return JoinPlan.of(below.children().head()) is not None


def open_joins(df: DataFrame) -> list[Any]:
    """What the stage that ends in a DataFrame consists of: for each part of a union the join's node, or None."""
    return _open_joins(analyzed(df))


def _open_joins(node: Any) -> list[Any]:
    while JoinPlan.of(node) is None:
        name = str(node.nodeName())
        if name == "Union":
            return [part for child in children_of(node) for part in _open_joins(child)]
        if name not in _SAME_PARTITIONS:
            return [None]
        node = node.children().head()
    return [node]
