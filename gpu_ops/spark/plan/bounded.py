"""The plan of a join over bounded input: union layout, union, repartition, mapInArrow. No servers, no state folder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from gpu_ops.descriptions.description import Description
from gpu_ops.spark.api.functions import Grouped
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.exchange.arrivals import INPUT_BITS
from gpu_ops.spark.plan.build import output_type
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.plan.recognition import JoinPlan
from gpu_ops.spark.plan.union_layout import (
    ORIGIN,
    STAMP,
    UnionColumn,
    in_union,
    shuffle,
    union_columns,
    wire,
    wire_schema,
    with_stamp,
)
from gpu_ops.spark.settings import Settings
from gpu_ops.spark.tasks.bounded import NO_INPUT, BoundedTask
from gpu_ops.spark.workers import make_importable

_CO_GROUP: Final = "gpu_ops.coGroup"
"""Metadata of the first column that a co-group gives; its value is the co-group's name."""


def build_bounded(plan: JoinPlan, inputs: Sequence[DataFrame], function: Grouped | None = None) -> DataFrame:
    """The result over static DataFrames, as insertions, in a static DataFrame.

    It runs in Spark's tasks, on the CPU unless ``backend="gpu"``: tasks that run side by side would share a card.

    Args:
        plan: the join, which emits at the end, and where it runs.
        inputs: in its order; their columns are those of its inputs, and the row kinds.
        function: of a co-group, else None.
    """
    join = plan.join
    session = inputs[0].sparkSession
    schemas = [df.schema for df in inputs]
    layout = union_columns(join, schemas)
    make_importable(session)
    ordered = join.order_matters_at_end
    sides = [in_union(df, number, layout) for number, df in enumerate(inputs)]
    if ordered:
        sides = [with_stamp(side, f.monotonically_increasing_id()) for side in sides]
    if join.result_without_rows:
        sides.append(_row_of_no_input(sides[0]))
    rows = shuffle(functools.reduce(DataFrame.unionAll, sides), join, layout, plan.partitions)
    if ordered:
        rows = rows.sortWithinPartitions(*_order(join, layout))
    task = BoundedTask(
        plan.function_name, join.to_json(), wire(layout), wire_schema(layout),
        backend="gpu" if plan.backend == "gpu" else "cpu",
        probe=Settings.of_application(session.sparkContext).gpu_probe, function=function,
    )  # fmt: skip
    output = output_type(join, schemas) if function is None else function.schema
    found = rows.mapInArrow(task, plan.carried_by(output))
    if function is not None:
        first, *others = (named_column(x.name) for x in output.fields)
        named = first.alias(output.fields[0].name, metadata={**output.fields[0].metadata, _CO_GROUP: plan.name})
        return found.select(named, *others)
    return found.select(*changelog_columns(join, plan.name, plan.plan_id))


def _row_of_no_input(like: DataFrame) -> DataFrame:
    """A row of no input: where there is no row at all Spark runs no task, and an aggregate of nothing has a row."""
    values = [f.lit(NO_INPUT if x.name == ORIGIN else None).cast(x.dataType).alias(x.name) for x in like.schema.fields]
    return like.sparkSession.range(1).select(*values)


def _order(join: Description, layout: Sequence[UnionColumn]) -> list[Column]:
    """What puts each input's rows in order: its ``sequence_by``, nulls first, then its own order."""
    by = []
    for number, source in enumerate(join.inputs):
        if source.sequence_by is not None:
            column = next(x for x in layout if x.columns[number] == source.sequence_by)
            own = f.col(ORIGIN).bitwiseAND((1 << INPUT_BITS) - 1) == number
            by.append(f.when(own, f.col(column.name)).asc_nulls_first())
    return [*by, f.col(STAMP).asc()]
