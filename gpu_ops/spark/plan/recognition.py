"""What a join is, carried by Spark's plan itself, and how it is found there again.

The first column that a join's ``mapInArrow`` gives has it in its metadata, as JSON. The columns above have metadata of
their own, so no user sees it; and it lives exactly as long as the plan, in a running query, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterable, Iterator, Set
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.query.catalyst import items
from gpu_ops.spark.exchange.command import parse_join
from gpu_ops.spark.plan.column_metadata import known_key
from gpu_ops.state.manifest import SPARK

_log = logging.getLogger(__name__)

MAPS: Final = {"MapInArrow", "PythonMapInArrow", "MapInPandas"}
"""Logical nodes that run a Python function over each partition; those of this pack are among them."""

_JOIN: Final = "gpu_ops.join"

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

_MOST_KNOWN: Final = 1024
_below: dict[str, tuple[JoinPlan, ...]] = {}
"""By plan id of a join those that feed it."""

_several_times: set[str] = set()
"""Plan ids of joins that are in some plan several times."""


@dataclasses.dataclass(frozen=True)
class JoinPlan:
    """A join as it was put into a Spark plan.

    Attributes:
        plan_id: 12 hexadecimal digits; in Spark's plans the function is called ``gpu_join_<plan_id>``.
        join: what is joined.
        name: of its metrics.
        backend: what was asked for.
        partitions: how many.
        partitions_reason: why as many.
        state: the state folder as it is shown, or None.
        state_identity: the same for all spellings of the folder.
        backlog: whether it may begin with one.
        derived: the inputs whose unique key follows from the join that makes them.
        final_only: the inputs that are insert-only in output mode ``append`` and in no other.
        upstream: for each input the plan id of the interval join it takes its watermark from, or None.
        heartbeat_ms: how often a micro-batch comes on an idle query, or None.
        stamped: the inputs whose rows carry a stamp, because a shuffle may reorder them.
        bounded: whether its inputs are static.
        read: for each input how the join itself reads its files, or None.
        distribution: by what rows are distributed, as the manifest has it.
        reported: whether tasks report their metrics to the driver, because Spark's progress cannot have them.
        loaded: the inputs that were static: in a micro-batch their rows come before all others.
        query: the plan of the query of `gpu_ops.sql` that ends in it, or None.
        row_times: the event times of its inputs that do not come out of it as such, ``input.column`` each.
    """

    plan_id: str
    join: Description
    name: str
    backend: str
    partitions: int
    partitions_reason: str
    state: str | None
    state_identity: str | None
    backlog: bool
    derived: tuple[str, ...]
    final_only: tuple[str, ...]
    upstream: tuple[str | None, ...] = (None, None)
    heartbeat_ms: int | None = None
    stamped: tuple[int, ...] = ()
    bounded: bool = False
    read: tuple[str | None, ...] = ()
    distribution: str = ""
    reported: bool = False
    loaded: tuple[int, ...] = ()
    query: str | None = None
    row_times: tuple[str, ...] = ()

    @property
    def function_name(self) -> str:
        """How Spark shows its function in plans."""
        return f"gpu_join_{self.plan_id}"

    def carried_by(self, output: st.StructType) -> st.StructType:
        """A schema for ``mapInArrow`` that carries this plan."""
        text = json.dumps({**vars(self), "join": self.join.to_json()})
        return with_metadata(output, _JOIN, text)

    @classmethod
    def of(cls, node: Any) -> JoinPlan | None:
        """The join that a node of a logical plan is, or None."""
        text = metadata_of(node, _JOIN) if str(node.nodeName()) in MAPS else None
        return None if text is None else _parsed(text)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> JoinPlan:
    """A join as a plan carries it; one query asks for the same ones again and again."""
    data: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()}
    data["join"] = parse_join(data["join"])
    return JoinPlan(**data)


def with_metadata(schema: st.StructType, key: str, text: str) -> st.StructType:
    """A schema whose first column has a text in its metadata; see `metadata_of`."""
    first, *others = schema.fields
    metadata = {**(first.metadata or {}), key: text}
    return st.StructType([st.StructField(first.name, first.dataType, first.nullable, metadata), *others])


def metadata_of(node: Any, key: str) -> str | None:
    """The text that the first column of a logical node has under a key of its metadata, or None."""
    output = node.output()
    if not output.length() or not (metadata := output.head().metadata()).contains(key):
        return None
    return str(metadata.getString(key))


def children_of(node: Any) -> list[Any]:
    """The nodes below a node of a plan."""
    return items(node.children())


def analyzed(df: DataFrame) -> Any:
    """The logical plan of a DataFrame."""
    return df._jdf.queryExecution().analyzed()


def plans_of(df: DataFrame) -> list[JoinPlan]:
    """The joins of this pack that a DataFrame is made of, the nearest first, each once."""
    return list(plans_in(analyzed(df)))


def plans_in(node: Any) -> Iterator[JoinPlan]:
    """The joins of this pack in a logical plan, the nearest first, each once."""
    waiting, seen = [node], set[str]()
    while waiting:
        node = waiting.pop()
        nearest = JoinPlan.of(node)
        if nearest is None:
            waiting += reversed(children_of(node))
        elif nearest.plan_id in seen:
            _several_times.add(nearest.plan_id)
        else:
            seen.add(nearest.plan_id)
            yield nearest
            below = _plans_below(nearest, node)
            _several_times.update(plan.plan_id for plan in below if plan.plan_id in seen)
            below = tuple(plan for plan in below if plan.plan_id not in seen)
            seen.update(plan.plan_id for plan in below)
            yield from below


def several_times(plan_id: str) -> bool:
    """Whether a plan that was looked at has a join several times, as the input of several others."""
    return plan_id in _several_times


def _plans_below(plan: JoinPlan, node: Any) -> tuple[JoinPlan, ...]:
    """The joins that feed one, which are always the same: each step in Spark's plan is a call into the JVM."""
    found = _below.get(plan.plan_id)
    if found is None:
        found = tuple(joined for child in children_of(node) for joined in plans_in(child))
        if len(_below) >= _MOST_KNOWN:
            _below.clear()
        _below[plan.plan_id] = found
    return found


def running_plan(queries: Iterable[Any], run_id: str, plan_id: str) -> tuple[JoinPlan, int] | None:
    """A streaming join in the query that runs it.

    Args:
        queries: the streaming queries that run.
        run_id: of one of them.
        plan_id: of the join.

    Returns:
        The join, and which one of its query it is, from 1, counted from the sources on: the same however often it is
        restarted. None where the query is over, or this version of Spark does not show its plan.
    """
    query = next((query for query in queries if str(query.runId) == run_id), None)
    if query is None:
        return None
    return next((found for found in numbered_plans(query) if found[0].plan_id == plan_id), None)


def numbered_plans(query: Any) -> list[tuple[JoinPlan, int]]:
    """The streaming joins of a query, each with its number as `running_plan` has it; none where Spark shows no plan."""
    try:
        plans = [plan for plan in plans_in(query._jsq.streamingQuery().analyzedPlan()) if not plan.bounded]
    except Exception as error:  # whatever py4j makes of another version's classes
        _log.warning("which join of its query is which cannot be told, this version of Spark shows no plan: %s", error)
        return []
    return [(plan, len(plans) - n) for n, plan in enumerate(plans)]


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


class OpenTasks(NamedTuple):
    """The tasks of one part of a union.

    Attributes:
        partitions: of a join of this pack; None for anything else, as nobody knows yet how many it has.
        by_number: whether a task may have nothing but its number to know its partition by.
    """

    partitions: int | None = None
    by_number: bool = False


def open_tasks(df: DataFrame) -> list[OpenTasks]:
    """What the stage that ends in a DataFrame consists of, in the order of its tasks."""
    return _open_tasks(analyzed(df))


def _open_tasks(node: Any) -> list[OpenTasks]:
    while True:
        name = str(node.nodeName())
        if name == "Union":
            return [part for child in children_of(node) for part in _open_tasks(child)]
        plan = JoinPlan.of(node)
        if plan is not None or name not in _SAME_PARTITIONS:
            if plan is None:
                return [OpenTasks()]
            return [OpenTasks(plan.partitions, by_number=plan.partitions > 1 and plan.distribution == SPARK)]
        node = node.children().head()
