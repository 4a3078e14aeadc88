"""The old query of a change, and where its state has the rows of each of its inputs, and its result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import StateError
from gpu_ops.query.nodes import JoinNode, Plan, PlanNode, walk
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.query_frames import runner_of
from gpu_ops.spark.datatypes import named_column, spark_type
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.plan.stored_query import StoredQuery, folders_of, state_of_part
from gpu_ops.spark.server.present import StoredOperator, why_no_result, why_no_rows
from gpu_ops.spark.server.recovery import stored_version
from gpu_ops.spark.sources.state import read_state
from gpu_ops.spark.tasks.state import CopyState, PresentResult
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import LATEST, MANIFEST, Manifest


@dataclasses.dataclass(frozen=True, eq=False)
class OldOperator:
    """An operator of the old query, and where its state is."""

    node: JoinNode
    description: Description
    stored: StoredOperator
    is_last: bool = True
    """Whether it comes last of those in its folder."""
    completed: bool = False
    """Whether an operator of the same folder makes retractions of one of its inputs."""

    @property
    def partitions(self) -> int:
        """The number of partitions of its state."""
        return Manifest.of(Files.at(self.stored.state)).partitions

    def rows(self, session: SparkSession) -> DataFrame:
        """The rows that its changelog comes to, with row kind ``+I``."""
        make_importable(session)
        description = self.description.with_inputs(self.description.inputs, "per_batch")
        types = st.StructType([st.StructField(x.name, spark_type(x.type)) for x in description.output_schema])
        numbers = session.range(0, self.partitions, 1, self.partitions)
        rows = numbers.mapInArrow(PresentResult(self.stored), types)
        return rows.select(*changelog_columns(self.description, "old", ""))

    def copy(self, session: SparkSession, to: StateAddress, query_id: str, version: int, *, whole: bool) -> None:
        """Copies its state into another folder, whose manifest is written last.

        Args:
            session: the session.
            to: the folder.
            query_id: Spark's id of the query that the copy is for.
            version: the number of micro-batches that it stands for there.
            whole: with all operators of its folder, if there are several in it.
        """
        make_importable(session)
        alone = bool(self.stored.name) and not whole
        stored = dataclasses.replace(self.stored, name=self.stored.name if alone else "")
        below = Files.at(stored.state)
        for name in () if alone else below.folders(LATEST):  # of inputs that are made retractions first
            latest = dataclasses.replace(stored, state=stored.state.below(LATEST).below(name))
            _copy(session, latest, to.below(LATEST).below(name), (query_id, version))
        _copy(session, stored, to, (query_id, version), self.description.to_json() if alone else None)


def _copy(
    session: SparkSession,
    stored: StoredOperator,
    to: StateAddress,
    of: tuple[str, int],
    description: str | None = None,
) -> None:
    """Copies a state folder, or one operator of it, whose description that is, unless it is there already.

    Args:
        session: the session.
        stored: the folder, and the operator.
        to: the folder to write to.
        of: the id of the query that the copy is for, and the number of its micro-batches that it stands for.
        description: of the operator; None for the whole folder.
    """
    if Manifest.read(Files.at(to)) is not None:
        return
    query_id, version = of
    found = Manifest.of(Files.at(stored.state))
    order = found.union_order if description is None else None
    manifest = Manifest(
        description or found.description, found.partitions, query_id, distribution=found.distribution, union_order=order
    )
    numbers = session.range(0, found.partitions, 1, found.partitions)
    numbers.mapInArrow(CopyState(stored, to, manifest, version), numbers.schema).collect()
    Files.at(to).create(MANIFEST, manifest.to_json().encode())


@dataclasses.dataclass(frozen=True, eq=False)
class OldInput:
    """The rows of an operator's input in the old state.

    Attributes:
        operator: the operator.
        side: the number of the input.
        node: the plan of what the input reads.
    """

    operator: OldOperator
    side: int
    node: PlanNode

    @property
    def why_not(self) -> str | None:
        """The reason why they are not all there."""
        return why_no_rows(self.operator.description, self.side)

    @property
    def input(self) -> str:
        """The name of the state's table."""
        stored, side = self.operator.stored, self.operator.description.sides[self.side]
        return f"{stored.name}.{side}" if stored.name else side

    def rows(self, session: SparkSession) -> DataFrame:
        """The rows, in the input's columns."""
        source, stored = self.operator.description.inputs[self.side], self.operator.stored
        rows = read_state(session, stored.state, input=self.input, version=stored.version)
        return rows.select(*map(named_column, source.schema.names))


class OldQuery:
    """The old query, and the state of each of its operators.

    Args:
        state: the folder.
        session: the session.

    Raises:
        StateError: there is no state, it is damaged, or its query is not known.
    """

    def __init__(self, state: StateAddress, session: SparkSession) -> None:
        self.state = state
        files = Files.at(state)
        stored = StoredQuery.read(files)
        if stored is None:
            raise StateError(
                f"state folder {state} does not say which query it is of: it is none of gpu_ops.sql(), or the query "
                "was last started with an earlier version. Start it once more with this version, and stop it"
            )
        self.stored, self.plan = stored, stored.plan(session)
        self.operators: dict[int, OldOperator] = {}
        versions = set[int]()
        for number, part in enumerate(self.plan.parts, 1):
            base = state_of_part(state, number) if self.plan.others else state
            for one in _operators_of(part, base):
                self.operators[id(one.node)] = one
                versions.add(one.stored.version)
        if not self.operators:
            raise StateError(f"state folder {state} has no state: its query has had no micro-batch")
        if len(versions) > 1:
            raise StateError(
                f"state folder {state} is in the middle of a micro-batch: its operators have done {sorted(versions)}. "
                "Start the query again, and let it come to an end"
            )
        (self.version,) = versions

    @functools.cached_property
    def readings(self) -> list[OldInput]:
        """The rows of all inputs that no operator makes."""
        return [
            OldInput(one, side, below)
            for one in self.operators.values()
            for side, below in enumerate(one.node.inputs)
            if not has_operator(below)
        ]

    def why_no_result(self) -> str | None:
        """The reason why the query's result does not follow from its state; None if it does."""
        for part in self.plan.parts:
            for node in grounds(part.root):
                if not isinstance(node, JoinNode):
                    return "a SELECT of the old UNION ALL has no operator, so no state has its rows"
                one = self.operators.get(id(node))
                why = "its inputs were static" if one is None else why_no_result(one.description)
                if why is not None:
                    return f"the old result does not follow from its state ({said(node)}: {why})"
        return None

    def check_stopped(self, session: SparkSession) -> None:
        """Refuses the state of a query that runs.

        Raises:
            StateError: which query runs.
        """
        for one in self.operators.values():
            user = Directory.of(session).state_in_use(one.stored.state)
            if user is not None:
                raise StateError(
                    f"state folder {one.stored.state} is in use by the running query {user}; stop it first"
                )

    @property
    def query_id(self) -> str:
        """Spark's id of the query."""
        first = next(iter(self.operators.values()))
        return Manifest.of(Files.at(first.stored.state)).query_id

    def result(self, session: SparkSession, plan: Plan | None = None) -> DataFrame:
        """The rows that the query's changelog comes to, with row kind ``+I``.

        Args:
            session: the session.
            plan: another query of the same operators, whose rows are wanted in the place of this one's.
        """
        frames = []
        for was, part in zip(self.plan.parts, (plan or self.plan).parts, strict=True):
            tops = zip(grounds(was.root), grounds(part.root), strict=True)
            stand_ins = {id(node): self.operators[id(old)].rows(session) for old, node in tops}
            frames.append(runner_of(part, stand_ins).result())
        first, *others = frames
        names = first.columns
        return functools.reduce(lambda a, b: a.unionAll(b.toDF(*names)), others, first)


def _operators_of(part: Plan, base: StateAddress) -> Iterator[OldOperator]:
    """The operators of a SELECT that have a state: in a folder each, or several in the one of the last of them."""
    folders = {
        id(node): folder for node, folder in folders_of(part, base) if Manifest.read(Files.at(folder)) is not None
    }
    for node in part.joins:
        if id(node) not in folders:
            continue
        folder = folders[id(node)]
        files = Files.at(folder)
        manifest = Manifest.of(files)
        manifest.check_cut(files.location)
        version, description = stored_version(files, manifest), from_json(manifest.description)
        if not isinstance(description, Dataflow):
            yield OldOperator(node, description, StoredOperator(folder, version))
            continue
        below = [one for one in walk(node) if isinstance(one, JoinNode) and id(one) not in folders]
        waiting = [*below, node]
        shapes = [_shape(one.description) for one in waiting]
        extra = {one.name for one in description.operators if _shape(one.description) not in shapes}
        for vertex in description.operators:  # others are there, too: of sources whose rows are completed
            if waiting and _shape(waiting[0].description) == _shape(vertex.description):
                place = waiting.pop(0)
                stored = StoredOperator(folder, version, vertex.name)
                yield OldOperator(
                    place,
                    vertex.description,
                    stored,
                    is_last=place is node,
                    completed=not extra.isdisjoint(vertex.sources),
                )
        if waiting:
            raise StateError(
                f"state folder {folder}: its query means other operators in this session than when it began; use the "
                "settings and the version of that session"
            )


def _shape(description: Any) -> tuple[Any, ...]:
    return type(description).__name__, [(column.name, column.type) for column in description.output]


def has_operator(node: PlanNode) -> bool:
    """True if a node is an operator, or there is one below it."""
    return any(isinstance(one, JoinNode) for one in walk(node))


def grounds(node: PlanNode) -> Iterator[PlanNode]:
    """The operators nearest to the top, and of what has none the rows of inputs, as they are filtered and projected."""
    if isinstance(node, JoinNode) or not has_operator(node):
        yield node
        return
    for below in cast("tuple[PlanNode, ...]", node.inputs):
        yield from grounds(below)


def uses(planned: Plan) -> Iterator[PlanNode]:
    """The rows of inputs that a query's operators read, or that come to its result without one."""
    for part in planned.parts:
        tops: list[PlanNode] = [part.root, *(below for node in part.joins for below in node.inputs)]
        for node in tops:
            yield from (one for one in grounds(node) if not isinstance(one, JoinNode))


def tables_of(node: PlanNode) -> set[str]:
    """The names of the tables whose rows a node is made of."""
    return {scan.table.name for scan in walk(node) if isinstance(scan, Scan)}


def said(node: PlanNode) -> str:
    """An operator, and what it reads, in words."""
    assert isinstance(node, JoinNode)
    kind = node.kind if node.kind in ("aggregate", "latest", "over", "top") else f"{node.kind} join"
    read = []
    for below in node.inputs:
        scans = [scan.alias for scan in walk(below) if isinstance(scan, Scan)]
        read.append("it" if has_operator(below) and len(node.inputs) == 1 else " and ".join(dict.fromkeys(scans)))
    joined = " and ".join(", ".join(read).rsplit(", ", 1))
    return f"{kind} {'over' if len(node.inputs) == 1 else 'of'} {joined}"
