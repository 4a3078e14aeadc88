"""The old queries of a change, and where their state has the rows of each input, and each result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.errors import StateError
from gpu_ops.query.nodes import JoinNode, Plan, PlanNode, made_of, walk
from gpu_ops.query.relations import Scan
from gpu_ops.spark.api.query_frames import runner_of
from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.plan.column_metadata import changelog_columns
from gpu_ops.spark.plan.stored_query import StoredQuery, folders_of
from gpu_ops.spark.plan.stored_statements import StatePlace, StoredStatement, StoredStatements, folder_at, name_below
from gpu_ops.spark.server.present import StateRows, StoredOperator, why_no_result, why_no_rows
from gpu_ops.spark.server.recovery import stored_version
from gpu_ops.spark.sources.state import read_state
from gpu_ops.spark.tasks.engine import ForEachNumber
from gpu_ops.spark_types import named_column, spark_type
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def operator_at(state: StateAddress, place: StatePlace | None, version: int) -> StoredOperator | None:
    """Finds the state of an operator by its place below a folder; None where there is none."""
    if place is None:
        return None
    address = folder_at(state, place.folder)
    manifest = Manifest.read(Files.at(address))
    return None if manifest is None else StoredOperator(address, version, place.vertex, manifest)


@dataclasses.dataclass(frozen=True, eq=False)
class OldOperator:
    """An operator of the old query, and where its state is.

    Attributes:
        node: the operator.
        own: the name of the folder that is its own where it is alone.
        stored: its state.
    """

    node: JoinNode
    own: str
    stored: StoredOperator

    @property
    def description(self) -> Description:
        """The description of the operator."""
        return self.stored.description

    def description_of(self, node: JoinNode) -> Description:
        """The description of another operator that computes the same rows, and may tell of changes otherwise."""
        inputs = zip(self.description.inputs, node.description.inputs, strict=True)
        forgets = [dataclasses.replace(own, ttl_ms=new.ttl_ms) for own, new in inputs]
        return self.description.with_inputs(forgets, node.description.emit)

    @property
    def partitions(self) -> int:
        """The number of partitions of its state."""
        return self.stored.manifest.partitions

    @property
    def taken(self) -> StateRows:
        """The rows that its changelog comes to, for tasks that write them."""
        return StateRows(self.stored, None)

    def rows(self, session: SparkSession) -> DataFrame:
        """The rows that its changelog comes to, with row kind ``+I``."""
        make_importable(session)
        described = self.description
        described = described.with_inputs(described.inputs, "per_batch")
        types = st.StructType([st.StructField(x.name, spark_type(x.type)) for x in described.output_schema])
        numbers = session.range(0, self.partitions, 1, self.partitions)
        rows = numbers.mapInArrow(ForEachNumber("gpu_join_present", self.stored.result), types)
        return rows.select(*changelog_columns(self.description, "old", ""))


@dataclasses.dataclass(frozen=True, eq=False)
class OldInput:
    """The rows of an input in the old state.

    Attributes:
        operator: the operator that keeps them.
        side: the number of the operator's input.
        node: what they are: a table, as it is filtered and projected.
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

    @property
    def taken(self) -> StateRows:
        """The rows, for tasks that write them."""
        return StateRows(self.operator.stored, self.side)

    def rows(self, session: SparkSession) -> DataFrame:
        """The rows, in the input's columns."""
        source, stored = self.operator.description.inputs[self.side], self.operator.stored
        rows = read_state(session, stored.state, input=self.input, version=stored.version)
        return rows.select(*map(named_column, source.schema.names))


@dataclasses.dataclass(frozen=True, eq=False)
class OldStatement:
    """One of the old queries.

    Attributes:
        of: its name, and whether it has a sink.
        stored: the query.
        plan: its plan, as this session makes it.
    """

    of: StoredStatement
    stored: StoredQuery
    plan: Plan


class OldStatements:
    """The old queries, and the state of each operator.

    Args:
        state: the folder.
        session: the session.

    Raises:
        StateError: there is no state, it is damaged, or its query is not known.
    """

    def __init__(self, state: StateAddress, session: SparkSession) -> None:
        self.state = state
        files, statements, views = Files.at(state), list[OldStatement](), dict[str, tuple[object, ...]]()
        found = StoredStatements.read(files)
        for one in () if found is None else found.statements:
            query = StoredQuery.read(Files.at(folder_at(state, one.folder)))
            if query is None:
                found = None
                break
            plan = query.plan(session, views)
            statements.append(OldStatement(one, query, plan))
            if one.name:
                views[one.name] = tuple(part.root for part in plan.parts)
        if found is None:
            raise StateError(
                f"state folder {state} does not say which query it is of: it is none of gpu_ops.sql(), or the query "
                "was last started with an earlier version. Start it once more with this version, and stop it"
            )
        self.stored, self.statements = found, tuple(statements)
        self.operators = {id(one.node): one for one in self._operators()}
        if not self.operators:
            raise StateError(f"state folder {state} has no state: its query has had no micro-batch")
        versions = {one.stored.version for one in self.operators.values()}
        if len(versions) > 1:
            raise StateError(
                f"state folder {state} is in the middle of a micro-batch: its operators have done {sorted(versions)}. "
                "Start the query again, and let it come to an end"
            )
        (self.version,) = versions

    def _operators(self) -> Iterator[OldOperator]:
        """The operators that have a state: in a folder each, or several in the one of the last of them."""
        folders = dict[str, tuple[StateAddress, Manifest | None, int]]()
        for one in self.statements:
            for node, own in folders_of(one.plan, folder_at(self.state, one.of.folder)):
                name = name_below(own.identity, self.state)
                place = self.stored.places.get(name or "")
                if place is None:
                    continue
                if place.folder not in folders:
                    address = folder_at(self.state, place.folder)
                    files = Files.at(address)
                    manifest = Manifest.read(files)
                    if manifest is not None:
                        manifest.check_cut(files.location)
                    version = 0 if manifest is None else stored_version(files, manifest)
                    folders[place.folder] = address, manifest, version
                address, manifest, version = folders[place.folder]
                if manifest is not None:
                    yield OldOperator(node, name or "", StoredOperator(address, version, place.vertex, manifest))

    def place_of(self, own: str) -> StoredOperator | None:
        """The state of an operator by the name of the folder that is its own; None where there is none."""
        return operator_at(self.state, self.stored.places.get(own), self.version)

    @functools.cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all queries."""
        return tuple(one.plan for one in self.statements)

    @functools.cached_property
    def tables(self) -> frozenset[str]:
        """The names of all tables that no view makes, in lower case."""
        roots = (part.root for plan in self.plans for part in plan.parts)
        return frozenset(name.lower() for root in roots for name in tables_of(root))

    @functools.cached_property
    def readings(self) -> list[OldInput]:
        """The rows of all inputs that no operator makes."""
        return [
            OldInput(one, side, below)
            for one in self.operators.values()
            for side, below in enumerate(one.node.inputs)
            if not has_operator(below)
        ]

    def named(self, name: str) -> OldStatement | None:
        """The query of a view or sink of a name, in whatever case; None where there is none."""
        return next((one for one in self.statements if one.of.name.lower() == name.lower()), None)

    def output(self, name: str, among: int) -> OldStatement | None:
        """The query of a sink of a name; the only one where there are not several, here or ``among`` others."""
        its = [one for one in self.statements if one.of.is_output]
        if len(its) == among == 1:
            return its[0]
        return next((one for one in its if one.of.name and one.of.name.lower() == name.lower()), None)

    def why_no_result(self, of: OldStatement) -> str | None:
        """The reason why a query's result does not follow from the state; None if it does."""
        for part in of.plan.parts:
            for node in grounds(part.root):
                if not isinstance(node, JoinNode):
                    return "a SELECT without an operator has no state, which would have its rows"
                one = self.operators.get(id(node))
                why = "its inputs were static" if one is None else why_no_result(one.description)
                if why is not None:
                    return f"the old result does not follow from its state ({said(node)}: {why})"
        return None

    def operators_of(self, of: OldStatement) -> list[OldOperator]:
        """The operators whose present results make up that of a query."""
        nodes = (node for part in of.plan.parts for node in grounds(part.root))
        return [self.operators[id(node)] for node in nodes if id(node) in self.operators]

    def check_stopped(self, session: SparkSession) -> None:
        """Refuses the state of a query that runs.

        Raises:
            StateError: which query runs.
        """
        for state in {one.stored.state for one in self.operators.values()}:
            user = Directory.of(session).state_in_use(state)
            if user is not None:
                raise StateError(f"state folder {state} is in use by the running query {user}; stop it first")

    @property
    def query_id(self) -> str:
        """Spark's id of the query."""
        return next(iter(self.operators.values())).stored.manifest.query_id

    def result(self, of: OldStatement, rows: Callable[[OldOperator], DataFrame]) -> DataFrame:
        """The rows that a query's changelog comes to, with row kind ``+I``; ``rows``: gives those of its operators."""

        def of_view(scan: Scan) -> DataFrame:
            view = self.named(scan.table.name)
            assert view is not None
            return as_table(self.result(view, rows), scan)

        return present_rows(of.plan, lambda node: rows(self.operators[id(node)]), of_view, {})


def as_table(rows: DataFrame, scan: Scan) -> DataFrame:
    """The rows of a view, with its columns as those call them that read it."""
    kind, *columns = rows.columns
    names = zip(columns, scan.table.schema.names, strict=True)
    return rows.select(named_column(kind), *(named_column(own).alias(name) for own, name in names))


def present_rows(
    plan: Plan,
    of_ground: Callable[[PlanNode], DataFrame],
    of_view: Callable[[Scan], DataFrame],
    streams: Mapping[str, Stream],
) -> DataFrame:
    """The result of a query as it is now, made of those of its operators.

    Args:
        plan: of the query.
        of_ground: gives the rows of one of its `grounds`.
        of_view: gives the rows of a view that is made of operators.
        streams: the tables of the query that no view makes.
    """
    frames = []
    for part in plan.parts:
        stand_ins, views = dict[int, DataFrame](), dict[str, Stream]()
        for node in _tops(part.root):
            if isinstance(node, Scan) and has_operator(node):
                stand_ins[id(node)] = of_view(node)
                views[node.table.name] = Stream(df=stand_ins[id(node)])
            else:
                stand_ins[id(node)] = of_ground(node)
        frames.append(runner_of(part, stand_ins, {**streams, **views}).result())
    first, *others = frames
    return functools.reduce(lambda a, b: a.unionAll(b.toDF(*first.columns)), others, first)


def has_operator(node: PlanNode) -> bool:
    """True if a node is an operator, or there is one below it."""
    return any(isinstance(one, JoinNode) for one in walk(node, views=True))


def grounds(node: PlanNode) -> Iterator[PlanNode]:
    """The operators nearest to the top, and of what has none the rows of inputs, as they are filtered and projected."""
    if isinstance(node, JoinNode) or not has_operator(node):
        yield node
        return
    for below in made_of(node):
        yield from grounds(below)


def _tops(node: PlanNode) -> Iterator[PlanNode]:
    """The `grounds` of a plan, in which a view stands for its own."""
    if isinstance(node, JoinNode | Scan) or not has_operator(node):
        yield node
        return
    for below in made_of(node):
        yield from _tops(below)


def reads(nodes: Iterable[PlanNode]) -> list[PlanNode]:
    """The `grounds` of nodes, each once."""
    return list({id(one): one for node in nodes for one in grounds(node)}.values())


def tables_of(node: PlanNode) -> set[str]:
    """The names of the tables, of no view, whose rows a node is made of."""
    scans = (scan for scan in walk(node, views=True) if isinstance(scan, Scan))
    return {scan.table.name for scan in scans if not scan.table.made_by}


def said(node: PlanNode) -> str:
    """An operator, and what it reads, in words."""
    assert isinstance(node, JoinNode)
    kind = node.kind if node.kind in ("aggregate", "latest", "over", "top") else f"{node.kind} join"
    read = []
    for below in node.inputs:
        scans = [scan for scan in walk(below) if isinstance(scan, Scan)]
        itself = has_operator(below) and len(node.inputs) == 1 and not any(scan.table.made_by for scan in scans)
        read.append("it" if itself else " and ".join(dict.fromkeys(scan.alias for scan in scans)))
    joined = " and ".join(", ".join(read).rsplit(", ", 1))
    return f"{kind} {'over' if len(node.inputs) == 1 else 'of'} {joined}"
