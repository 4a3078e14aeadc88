"""The joins in the plans of Spark's queries, and the triggers and output modes of these queries.

The first column that a join's ``mapInArrow`` gives has the join in its metadata, as JSON. The columns above have
metadata of their own, so no user sees it; and it lives exactly as long as the plan, in a running query, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.errors import StateError
from gpu_ops.query.catalyst import items, java_class
from gpu_ops.spark.wire.command import parse_join
from gpu_ops.state.manifest import FORMAT, OF_CARD, Manifest

_log = logging.getLogger(__name__)

MAPS: Final = {"MapInArrow", "PythonMapInArrow", "MapInPandas"}
"""Logical nodes that run a Python function over each partition; those of this pack are among them."""

_JOIN: Final = "gpu_ops.join"

BY_CARD: Final = "the card"
"""Who reads the files of an input, where Spark's tasks do not; see `JoinPlan`."""

_MOST_KNOWN: Final = 1024
_below: dict[tuple[str, ...], _Below] = {}
"""The joins below a join, by its plan id and outputs: a cache, as each step through a plan is a call into the JVM."""


@dataclasses.dataclass(frozen=True)
class JoinPlan:
    """A join as it stands in a Spark plan, with all that the driver has to know of it.

    Attributes:
        plan_id: 12 hexadecimal digits; in Spark's plans the function is called ``gpu_join_<plan_id>``.
        description: the description of the operator.
        name: the name of its metrics.
        backend: the backend that was asked for.
        partitions: the number of partitions.
        partitions_reason: why there are as many.
        shares: the number of Spark tasks of each partition: all bring its rows, each takes a share of its changes.
        state: the state folder as it is shown, or None.
        state_identity: the same for all spellings of the folder.
        backlog: whether it may begin with one.
        derived: the inputs whose unique key follows from the join that makes them.
        final_only: the inputs that are insert-only in output mode ``append`` and in no other.
        upstream: for each input the plan id of the interval join it takes its watermark from, or None.
        heartbeat_ms: how often a micro-batch comes on an idle query, or None.
        bounded: whether its inputs are static.
        read: for each input how the join itself reads its files, or None.
        by_spark: for each input the reason why its rows are Spark's own although they might not be, or None.
        reported: whether tasks report their metrics to the driver, because Spark's progress cannot have them.
        loaded: the inputs that were static: in a micro-batch their rows come before all others.
        query: the plan of the query of `gpu_ops.sql` that ends in it, or None.
        union_order: the numbers of its inputs as they stand in Spark's union.
        reads_once: whether a source of several inputs is read once, see `gpu_ops.state.manifest.Manifest`.
        row_times: the event times of its inputs that do not come out of it as such, ``input.column`` each.
        chained: the other operators of its task, each behind those that it reads.
        dataflow: the description of all operators of its task, where one engine has them; else None.
        sources: for each input the plan id of the operator of its task that makes it, or None.
        union_inputs: what Spark's union brings to its task, in order: an operator's plan id and its input's number.
        brought: for each of them the place of its rows among those of Spark's union: several inputs may be made of one
            source, which is read once.
        files_by: for each of them who reads its Parquet files, `BY_CARD` or the reason why Spark's tasks do; None where
            it has none, or there is no card.
        below: the plan ids of all operators below it, the nearest first.
        outputs: where its task gives several outputs, the plan ids of the operators that make them; else empty.
    """

    plan_id: str
    description: Description
    name: str
    backend: str
    partitions: int
    partitions_reason: str
    state: str | None
    state_identity: str | None
    backlog: bool
    derived: tuple[str, ...]
    final_only: tuple[str, ...]
    shares: int = 1
    upstream: tuple[str | None, ...] = (None, None)
    heartbeat_ms: int | None = None
    bounded: bool = False
    read: tuple[str | None, ...] = ()
    by_spark: tuple[str | None, ...] = ()
    reported: bool = False
    loaded: tuple[int, ...] = ()
    query: str | None = None
    row_times: tuple[str, ...] = ()
    union_order: str | None = None
    reads_once: bool = False
    chained: tuple[JoinPlan, ...] = ()
    dataflow: Description | None = None
    sources: tuple[str | None, ...] = ()
    union_inputs: tuple[str, ...] = ()
    brought: tuple[int, ...] = ()
    files_by: tuple[str | None, ...] = ()
    below: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def in_task(self) -> tuple[JoinPlan, ...]:
        """All operators of its task, itself last."""
        return (*self.chained, self)

    @property
    def in_engine(self) -> Mapping[str, JoinPlan]:
        """The operators of its engine, by their names there: of one alone it is ``""``."""
        if not isinstance(self.dataflow, Dataflow):
            return {"": self}
        return {v.name: one for v, one in zip(self.dataflow.operators, self.in_task, strict=True)}

    @property
    def tasks(self) -> int:
        """The number of Spark tasks that bring its rows and take its changes."""
        return 1 if self.chained and self.dataflow is None else self.partitions * self.shares

    @property
    def read_together(self) -> Mapping[str, int]:
        """The inputs of its task whose source is read once for several, named as in ``union_inputs``; for how many."""
        counts = Counter(self.brought)
        return {use: counts[at] for use, at in zip(self.union_inputs, self.brought, strict=True) if counts[at] > 1}

    @property
    def read_by_card(self) -> bool:
        """True if a card reads files of its task."""
        return BY_CARD in self.files_by

    @property
    def function_name(self) -> str:
        """The name of the join's function in Spark's plans."""
        return f"gpu_join_{self.plan_id}"

    def manifest(self, query_id: str, number: int | None) -> Manifest:
        """The manifest that the join's state folder must have, as the join of that number in a query."""
        description = (self.dataflow or self.description).to_json()
        return Manifest(
            description, self.partitions, query_id, join_number=number, union_order=self.union_order,
            reads_once=self.reads_once or None, format=OF_CARD if self.read_by_card else FORMAT,
        )  # fmt: skip

    def carried_by(self, output: st.StructType) -> st.StructType:
        """A copy of a schema whose metadata carries this plan, for ``mapInArrow``."""
        return with_metadata(output, _JOIN, json.dumps(self._to_dict()))

    def _to_dict(self) -> dict[str, Any]:
        chained = [plan._to_dict() for plan in self.chained]
        dataflow = self.dataflow and self.dataflow.to_json()
        return {**vars(self), "description": self.description.to_json(), "chained": chained, "dataflow": dataflow}

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> JoinPlan:
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in data.items()}
        values |= {
            "description": parse_join(data["description"]),
            "chained": tuple(map(cls._from_dict, data["chained"])),
        }
        values["dataflow"] = data["dataflow"] and parse_join(data["dataflow"])
        return cls(**values)

    @classmethod
    def of(cls, node: Any) -> JoinPlan | None:
        """The operator whose changes a node of a logical plan gives, or None."""
        text = metadata_of(node, _JOIN) if str(node.nodeName()) in MAPS else None
        return None if text is None else _parsed(text)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> JoinPlan:
    """Reads an operator from the JSON in a plan; cached, as a query's plan is read again and again."""
    return JoinPlan._from_dict(json.loads(text))


def with_metadata(schema: st.StructType, key: str, text: str) -> st.StructType:
    """A copy of a schema whose first column has a text in its metadata; see `metadata_of`."""
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
    """The joins of this package that a DataFrame is made of, the nearest first, each once."""
    return list(plans_in(analyzed(df)))


def takes_rows_of_spark(df: DataFrame) -> bool:
    """True if an operator takes rows that Spark reads or computes; `explain` names those that Arrow reads instead."""
    for plan in plans_of(df):
        for side in range(len(plan.description.inputs)):
            read, made = (its[side] if side < len(its) else None for its in (plan.read, plan.sources))
            if plan.bounded or (read is None and made is None and side not in plan.loaded):
                return True
    return False


def plans_in(node: Any, shared: set[str] | None = None) -> Iterator[JoinPlan]:
    """The joins of this package in a logical plan, the nearest first, each once.

    Args:
        node: the plan's root.
        shared: takes the plan ids of those that are in it several times, as the input of several others.
    """
    waiting, seen, several = [node], set[str](), set[str]() if shared is None else shared
    while waiting:
        node = waiting.pop()
        nearest = JoinPlan.of(node)
        if nearest is None:
            waiting += reversed(children_of(node))
        elif nearest.plan_id in seen:
            several.add(nearest.plan_id)
        else:
            seen.add(nearest.plan_id)
            yield nearest
            below = _plans_below(nearest, node)
            several |= below.shared | {plan.plan_id for plan in below.plans if plan.plan_id in seen}
            new = [plan for plan in below.plans if plan.plan_id not in seen]
            seen.update(plan.plan_id for plan in new)
            yield from new


class _Below(NamedTuple):
    """The joins below one join, and the ids of those that are there several times."""

    plans: tuple[JoinPlan, ...]
    shared: frozenset[str]


def _plans_below(plan: JoinPlan, node: Any) -> _Below:
    task = (plan.plan_id, *plan.outputs)
    below = _below.get(task)
    if below is None:
        several = set[str]()
        plans = {one.plan_id: one for one in plan.chained}
        for child in children_of(node):
            for one in plans_in(child, several):
                several |= {one.plan_id} & plans.keys()
                plans.setdefault(one.plan_id, one)
        places = {plan_id: place for place, plan_id in enumerate(plan.below)}
        ordered = sorted(plans.values(), key=lambda one: places.get(one.plan_id, len(places)))
        below = _Below(tuple(ordered), frozenset(several))
        if len(_below) >= _MOST_KNOWN:
            _below.clear()
        _below[task] = below
    return below


class RunningPlan(NamedTuple):
    """A streaming join in the query that runs it.

    Attributes:
        plan: the join.
        number: which one of its query it is, from 1, counted from the sources on: the same however often it is
            restarted.
        shared: whether it is the input of several others.
    """

    plan: JoinPlan
    number: int
    shared: bool


def running_plan(queries: Iterable[Any], run_id: str, plan_id: str) -> RunningPlan | None:
    """Finds a streaming join of a query; None where the query is over, or this version of Spark does not show its plan.

    Args:
        queries: the streaming queries that run.
        run_id: the run of one of them.
        plan_id: the plan id of the join.
    """
    query = next((query for query in queries if str(query.runId) == run_id), None)
    if query is None:
        return None
    return next((running for running in numbered_plans(query) if running.plan.plan_id == plan_id), None)


def numbered_plans(query: Any) -> list[RunningPlan]:
    """The streaming joins of a query, numbered; empty where Spark shows no plan."""
    shared = set[str]()
    try:
        plans = [plan for plan in plans_in(query._jsq.streamingQuery().analyzedPlan(), shared) if not plan.bounded]
    except Exception as error:  # whatever py4j makes of another version's classes
        _log.warning("which join of its query is which cannot be told, this version of Spark shows no plan: %s", error)
        return []
    return [RunningPlan(plan, len(plans) - n, plan.plan_id in shared) for n, plan in enumerate(plans)]


def takes_what_is_there(queries: Iterable[Any], run_id: str) -> bool:
    """True if a run of a query has ``trigger(availableNow=True)``.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0 and 4.3.0).

    Args:
        queries: the streaming queries that run.
        run_id: the run of one of them.

    Raises:
        StateError: the run is over, or this version of Spark does not tell.
    """
    what, otherwise = "backlog=True goes by the query's trigger", "leave backlog= out"
    name = _asked(queries, run_id, what, otherwise, lambda query: query.trigger().getClass().getName())
    return name.rpartition(".")[2].startswith("AvailableNowTrigger")


def output_mode(queries: Iterable[Any], run_id: str) -> str:
    """The output mode of a run of a query: ``append``, ``update`` or ``complete``.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0).

    Args:
        queries: the streaming queries that run.
        run_id: the run of one of them.

    Raises:
        StateError: the run is over, or this version of Spark does not tell.
    """
    what = "a streaming aggregate without a unique key goes by the output mode"
    otherwise = "give stream(..., unique_key=...)"
    return _asked(queries, run_id, what, otherwise, lambda query: query.outputMode().toString()).lower()


def next_batch(query: Any) -> int:
    """The number of the micro-batch behind the last one that a query's checkpoint calls done.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0).

    Args:
        query: the query that was started.

    Raises:
        StateError: this version of Spark does not tell.
    """
    try:
        done = query._jsq.streamingQuery().commitLog().getLatestBatchId()
        return int(done.get()) + 1 if done.isDefined() else 0
    except Exception as error:  # whatever py4j makes of another version's classes
        raise StateError(f"this version of Spark does not tell what a checkpoint holds: {error}") from error


def _asked(queries: Iterable[Any], run_id: str, what: str, otherwise: str, ask: Callable[[Any], object]) -> str:
    query = next((query for query in queries if str(query.runId) == run_id), None)
    if query is None:
        raise StateError(f"{what}, and the run {run_id} of the query is over")
    try:
        return str(ask(query._jsq.streamingQuery()))
    except Exception as error:  # whatever py4j makes of another version's classes
        raise StateError(f"{what}, which this version of Spark does not tell ({error}): {otherwise}") from error


def function_of(node: Any, spark: SparkSession) -> Any:
    """The Python function that a node of ``mapInArrow`` runs."""
    of_bytes = java_class(spark, "scala.reflect.ClassTag").Byte()
    function, _ = CPickleSerializer().loads(bytes(node.functionExpr().func().command().toArray(of_bytes)))
    return function
