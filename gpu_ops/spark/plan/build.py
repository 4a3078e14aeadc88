"""The streaming plan of a join: union, repartition, mapInArrow, and observe with a filter for its metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Description
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.datatypes import spark_type
from gpu_ops.spark.metrics.metrics import METRICS_COLUMN, METRICS_TYPE, free_name, metric_names
from gpu_ops.spark.plan.changes import observed_once, observing
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.plan.heartbeat import heartbeats
from gpu_ops.spark.plan.plugin import metrics_reported, shuffle_reorders
from gpu_ops.spark.plan.recognition import JoinPlan, OpenTasks, analyzed, open_tasks
from gpu_ops.spark.plan.union_layout import UnionColumn, kept, single_rows, union_columns, wire
from gpu_ops.spark.servers.directory import Directory
from gpu_ops.spark.sources.packed_plan import packed_rows
from gpu_ops.spark.sources.packing import DISTRIBUTION
from gpu_ops.spark.sources.readings import holds_sources, source_of
from gpu_ops.spark.tasks.join import Task
from gpu_ops.spark.workers import make_importable
from gpu_ops.state.address import StateAddress
from gpu_ops.state.manifest import SPARK

_MISFIT: Final = -1


def build(plan: JoinPlan, inputs: Sequence[DataFrame], state: StateAddress | None) -> DataFrame:
    """The changelog of a join as a streaming DataFrame.

    Args:
        plan: the join, and where it runs; its name is unique in the query.
        inputs: in its order; their columns are those of its inputs, and the row kinds.
        state: the state folder, or None.
    """
    join, name = plan.join, plan.name
    session = inputs[0].sparkSession
    schemas = [df.schema for df in inputs]
    layout = union_columns(join, schemas)
    # Then rows travel packed, whatever else happens to them before: a filter more does not change where state lies.
    packed = any(holds_sources(analyzed(df)) for df in inputs)
    readings = tuple(source_of(df) for df in inputs) if packed else ()
    # what is packed has an order of its own
    reordered = shuffle_reorders(session) and not packed
    stamped = tuple(n for n in range(len(inputs)) if join.order_matters(n)) if reordered else ()
    plan = dataclasses.replace(
        plan,
        stamped=stamped,
        read=tuple(None if reading is None else str(reading) for reading in readings),
        distribution=DISTRIBUTION if packed else SPARK,
        reported=metrics_reported(session),
    )
    make_importable(session)
    names = metric_names(join.sides, by_time=join.by_time)
    travel = packed_rows(join, inputs, readings, layout, plan) if packed else single_rows(join, inputs, layout, plan)
    hidden = None if plan.reported else free_name(METRICS_COLUMN, join.output_schema.names)
    directory = Directory.of(session)
    task = Task(
        plan.function_name, _command(plan, state, layout), directory.address, travel.arrivals,
        join.output_schema, metrics=names, times=join.sides if join.by_event_time else (), hidden=hidden,
    )  # fmt: skip
    first, *others = union_order([open_tasks(df) for df in inputs])
    sides = observed_once(travel.sides)
    # what packs is a function in Python, which the optimizer leaves where it is
    union = sides[first] if packed else kept(sides[first])
    for number in others:
        union = union.unionAll(sides[number])
    if plan.heartbeat_ms is not None:
        union = union.unionAll(heartbeats(session, plan.heartbeat_ms, union.schema))
    output = output_type(join, schemas)
    if hidden is not None:
        output.add(hidden, spark_type(METRICS_TYPE))
    changes = travel.shuffle(union).mapInArrow(task, plan.carried_by(output))
    directory.expect(plan, state)
    directory.servers.begin(plan.backend, plan.partitions)
    return observing(changes, plan, hidden).select(*changelog_columns(join, name, plan.plan_id))


def union_order(inputs: Sequence[list[OpenTasks]]) -> list[int]:
    """The inputs' numbers in such an order that a join whose tasks go by number begins at a multiple of its partitions.

    What has no join comes first if it may: a source's tasks take longest, and Spark begins tasks in their order.

    Args:
        inputs: `open_tasks` of each.

    Raises:
        DescriptionError: there is none.
    """
    hopeless: set[tuple[int | None, tuple[str, ...]]] = set()

    def follow(begin: int | None, rest: list[int]) -> list[int] | None:
        state = begin, tuple(sorted(repr(inputs[n]) for n in rest))
        if state in hopeless:
            return None
        for number in rest:
            end = _numbered(begin, inputs[number])
            if end != _MISFIT:
                order = follow(end, [n for n in rest if n != number])
                if order is not None:
                    return [number, *order]
        if not rest:
            return []
        hopeless.add(state)
        return None

    order = follow(0, sorted(range(len(inputs)), key=lambda n: any(part.partitions is not None for part in inputs[n])))
    if order is None:
        raise DescriptionError(
            "Spark's tasks would not fit the partitions of the joins that feed this one: give all of them the "
            "same partitions=, and put changelogs first in a union"
        )
    return order


def _numbered(begin: int | None, parts: Sequence[OpenTasks]) -> int | None:
    """The number of the first task behind parts of a union that begin at one; None for nobody knows.

    `_MISFIT`: a join among them does not begin at a multiple of its partitions.
    """
    for part in parts:
        if part.by_number and part.partitions is not None and (begin is None or begin % part.partitions):
            return _MISFIT
        begin = None if part.partitions is None or begin is None else begin + part.partitions
    return begin


def _command(plan: JoinPlan, state: StateAddress | None, layout: Sequence[UnionColumn]) -> dict[str, Any]:
    """The exchange's command, without what only a task knows."""
    return {
        "op": "apply",
        "join_id": plan.plan_id,
        "state": state,
        "description": plan.join.to_json(),
        "partitions": plan.partitions,
        "backend": plan.backend,
        "wire": dataclasses.asdict(wire(layout)),
        "options": {"backlog": True} if plan.backlog else {},
        "distribution": plan.distribution,
    }


def output_type(join: Description, schemas: Sequence[st.StructType]) -> st.StructType:
    """The Spark schema of the changelog."""
    fields = [st.StructField(ROW_KIND_COLUMN, st.StringType(), False)]
    for column in join.output:
        # A column that two inputs show together: either's type will do if it is the common one.
        candidates = [s[n].dataType for s in schemas for n in (column.column, column.other) if n in s.names]
        of_one = column.other is None and column.column in schemas[column.side].names
        own = [schemas[column.side][column.column].dataType] if of_one else []
        fields.append(st.StructField(column.name, spark_type(column.type, *own, *candidates)))
    return st.StructType(fields)
