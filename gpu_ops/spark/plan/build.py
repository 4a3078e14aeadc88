"""The streaming plan of a join: lanes, union, repartition, mapInArrow, and observe with a filter for its metrics."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence, Set
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.description import Description
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.datatypes import spark_type
from gpu_ops.spark.exchange.task import Task
from gpu_ops.spark.metrics.metrics import METRICS_COLUMN, METRICS_TYPE, free_name, metric_names, observed
from gpu_ops.spark.plan.column_metadata import known_key, marked
from gpu_ops.spark.plan.heartbeat import heartbeats
from gpu_ops.spark.plan.names import JOIN, MAPS, joins_in
from gpu_ops.spark.plan.plugin import metrics_reported, shuffle_reorders
from gpu_ops.spark.plan.union_layout import Lane, assign_lanes, kept, single_rows
from gpu_ops.spark.servers.directory import Directory, Timed
from gpu_ops.spark.sources.files import source_of
from gpu_ops.spark.sources.packed_plan import packed_rows, read_as, reads_files
from gpu_ops.spark.sources.packing import DISTRIBUTION
from gpu_ops.spark.workers import make_importable
from gpu_ops.state.address import StateAddress
from gpu_ops.state.manifest import SPARK


class Placed(NamedTuple):
    """Where a join runs and keeps its state.

    Attributes:
        name: of its metrics.
        state: the state folder, or None.
        backend: what was asked for.
        partitions: how many.
        partitions_reason: why as many.
        derived: the inputs whose unique key follows from the join that makes them.
        backlog: whether it may begin with one.
        final_only: the inputs that are insert-only in output mode ``append`` and in no other.
    """

    name: str
    state: StateAddress | None
    backend: str
    partitions: int
    partitions_reason: str
    derived: tuple[str, ...] = ()
    backlog: bool = False
    final_only: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class JoinPlan:
    """A join as it was put into a Spark plan.

    Attributes:
        plan_id: 12 hexadecimal digits; in Spark's plans the function is called ``gpu_join_<plan_id>``.
        join: what is joined.
        placed: where it runs.
        upstream: for each input the plan id of the interval join it takes its watermark from, or None.
        heartbeat_ms: how often a micro-batch comes on an idle query, or None.
        lanes: how the columns travel.
        stamped: the inputs whose rows carry a stamp, because a shuffle may reorder them.
        application: Spark's id of the application.
        bounded: whether its inputs are static.
        read: for each input how the join itself reads its files, or None.
        distribution: by what rows are distributed, as the manifest has it.
        reported: whether tasks tell the driver their metrics, which Spark's progress then has not.
    """

    plan_id: str
    join: Description
    placed: Placed
    upstream: tuple[str | None, str | None]
    heartbeat_ms: int | None
    lanes: tuple[Lane, ...]
    stamped: tuple[int, ...]
    application: str
    bounded: bool = False
    read: tuple[str | None, ...] = ()
    distribution: str = SPARK
    reported: bool = False


_NARROW: Final = {
    "Project", "Filter", "SubqueryAlias", "CollectMetrics", "EventTimeWatermark", "Generate", "Expand",
    "Sample", "ResolvedHint", "UnresolvedHint", "View", "TypedFilter", "MapElements", "MapPartitions",
    "SerializeFromObject", "DeserializeToObject", "WithCTE",
}  # fmt: skip
"""Logical nodes whose partitions are their child's."""

ROW_BY_ROW: Final = {
    "Project", "Filter", "SubqueryAlias", "CollectMetrics", "EventTimeWatermark", "ResolvedHint", "UnresolvedHint",
    "View",
}  # fmt: skip
"""Those that give each row at most once, in the order they come."""

_ONE_FOR_ONE: Final = ROW_BY_ROW - {"Filter"}
"""Those that give each row once."""

_MISFIT: Final = -1

_plans: dict[str, JoinPlan] = {}


def plans_of(df: DataFrame) -> list[JoinPlan]:
    """The joins of this pack that a DataFrame is made of, the nearest first."""
    return plans_in(df._jdf.queryExecution().logical().toString())


def plans_in(text: str) -> list[JoinPlan]:
    """The joins of this pack in the text of a Spark plan, the nearest first."""
    # Found by the function's name, so filters and projections on top do no harm.
    return [_plans[plan_id] for plan_id in joins_in(text) if plan_id in _plans]


def build(
    join: Description,
    inputs: Sequence[DataFrame],
    placed: Placed,
    *,
    upstream: tuple[str | None, str | None] = (None, None),
    heartbeat_ms: int | None = None,
) -> DataFrame:
    """The changelog of a join as a streaming DataFrame.

    Args:
        join: the description.
        inputs: in its order; their columns are those of its inputs, and the row kinds.
        placed: where it runs; its name is unique in the query.
        upstream: see `JoinPlan`.
        heartbeat_ms: likewise.
    """
    session = inputs[0].sparkSession
    schemas = [df.schema for df in inputs]
    lanes = assign_lanes(join, schemas)
    packed = any(reads_files(df) for df in inputs)
    readings = tuple(source_of(df) for df in inputs) if packed else ()
    # what is packed has an order of its own
    reordered = shuffle_reorders(session) and not packed
    stamped = tuple(n for n in range(len(inputs)) if join.order_matters(n)) if reordered else ()
    plan = JoinPlan(
        plan_id=uuid.uuid4().hex[:12],
        join=join,
        placed=placed,
        upstream=upstream,
        heartbeat_ms=heartbeat_ms,
        lanes=tuple(lanes),
        stamped=stamped,
        application=session.sparkContext.applicationId,
        read=tuple(map(read_as, readings)),
        distribution=DISTRIBUTION if packed else SPARK,
        reported=metrics_reported(session),
    )
    directory = Directory.of(session)
    make_importable(session)
    directory.expect(plan.plan_id)
    if join.interval is not None:
        directory.register(plan.plan_id, Timed(join, placed.partitions, placed.state, upstream, plan.distribution))
    if placed.final_only:
        directory.append_only(plan.plan_id, placed.final_only)
    names = metric_names(join.sides, interval=join.interval is not None)
    if packed:
        travel = packed_rows(join, inputs, readings, lanes, placed.partitions)
    else:
        travel = single_rows(join, inputs, lanes, placed.partitions, stamped)
    hidden = None if plan.reported else free_name(METRICS_COLUMN, join.output_schema.names)
    task = Task(
        f"{JOIN}_{plan.plan_id}", _command(plan), directory.address, travel.arrivals, join.output_schema,
        metrics=names, times=join.by_event_time, hidden=hidden,
    )  # fmt: skip
    first, *others = union_order([open_tasks(df) for df in inputs])
    union = kept(travel.sides[first])
    for number in others:
        union = union.unionAll(travel.sides[number])
    if heartbeat_ms is not None:
        union = union.unionAll(heartbeats(session, heartbeat_ms, union.schema))
    output = output_type(join, schemas)
    if hidden is None:
        directory.count(plan.plan_id, placed.name, names)
        changes = travel.shuffle(union).mapInArrow(task, output)
    else:
        rows = travel.shuffle(union).mapInArrow(task, output.add(hidden, spark_type(METRICS_TYPE)))
        changes = rows.observe(placed.name, observed(names, hidden)).filter(f.isnull(hidden))
    remember(plan)
    return changes.select(*marked(join, placed.name, plan.plan_id))


def plan_name(plan_id: str) -> str:
    """The name of a join by its plan id."""
    return _plans[plan_id].placed.name


def remember(plan: JoinPlan) -> str:
    """Takes note of a plan; gives the name of its function in Spark's plans."""
    _plans[plan.plan_id] = plan
    return f"{JOIN}_{plan.plan_id}"


def made_by(df: DataFrame) -> str | None:
    """The plan id of the join whose rows, filtered or projected, a DataFrame is; None for anything else."""
    return _made_by(df, _NARROW | {"Repartition", "RepartitionByExpression"})


def all_said_by(df: DataFrame) -> str | None:
    """The name of the join of which a DataFrame has every change, each once; None where that cannot be told."""
    plan_id = _made_by(df, _ONE_FOR_ONE)
    return None if plan_id is None else plan_name(plan_id)


def derived_key(df: DataFrame) -> tuple[str, ...] | None:
    """The unique key of a changelog of this pack, where it follows from its join; None otherwise.

    Only for a changelog that was merely filtered or projected: an explode or a union repeats keys, and a
    repartition loses the order of a key's changes.
    """
    plan_id = _made_by(df, ROW_BY_ROW)
    return None if plan_id is None else known_key(df, plan_id)


def _made_by(df: DataFrame, through: Set[str]) -> str | None:
    node = df._jdf.queryExecution().analyzed()
    while node.children().length() == 1:
        name = str(node.nodeName())
        if name in MAPS:
            found = joins_in(str(node.simpleString(100)))
            return found[0] if found and found[0] in _plans else None
        own = name == "Filter" and METRICS_COLUMN in str(node.condition())
        if name not in through and not own:
            return None
        node = node.children().head()
    return None


def open_tasks(df: DataFrame) -> list[int | None]:
    """What the stage that ends in a DataFrame consists of, in the order of its tasks.

    Returns:
        For each part of a union the number of partitions of a join of this pack, or None for anything
        else, which has a number of tasks that nobody knows yet.
    """
    return _open_tasks(df._jdf.queryExecution().analyzed())


def _open_tasks(node: Any) -> list[int | None]:
    name = str(node.nodeName())
    if name == "Union":
        children = node.children()
        return [part for place in range(children.length()) for part in _open_tasks(children.apply(place))]
    if name in MAPS:
        found = joins_in(str(node.simpleString(100)))
        if found and found[0] in _plans:
            return [_plans[found[0]].placed.partitions]
    if name in _NARROW or name in MAPS:
        return _open_tasks(node.children().head())
    return [None]


def union_order(inputs: Sequence[list[int | None]]) -> list[int]:
    """The inputs' numbers in such an order that every join begins at a multiple of its partitions.

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

    order = follow(0, list(range(len(inputs))))
    if order is None:
        raise DescriptionError(
            "the joins that feed this one cannot be numbered through: give them the same partitions=, "
            "and put changelogs first in a union"
        )
    return order


def _numbered(begin: int | None, parts: Sequence[int | None]) -> int | None:
    """The number of the first task behind parts of a union that begin at one; None for nobody knows.

    `_MISFIT`: a join among them does not begin at a multiple of its partitions.
    """
    for part in parts:
        if part is not None and part > 1 and (begin is None or begin % part):
            return _MISFIT
        begin = None if part is None or begin is None else begin + part
    return begin


def _command(plan: JoinPlan) -> dict[str, Any]:
    """The exchange's command, without what only a task knows."""
    return {
        "op": "apply",
        "join_id": plan.plan_id,
        "state": plan.placed.state,
        "description": plan.join.to_json(),
        "partitions": plan.placed.partitions,
        "backend": plan.placed.backend,
        "wire": {
            "side": "__side",
            "order": "__order",
            "lanes": [[*x.columns, x.name] for x in plan.lanes],
        },
        "options": {"backlog": True} if plan.placed.backlog else {},
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
