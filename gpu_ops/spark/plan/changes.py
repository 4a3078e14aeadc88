"""The mapInArrow node of an operator in Spark's plan, and the encodings and sources that are fused into it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple, Self, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.projection import Projection
from gpu_ops.query.catalyst import frame_of, scala_seq
from gpu_ops.query.nodes import LocalAggregate
from gpu_ops.spark import sources
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.driver.queries import (
    BY_CARD,
    MAPS,
    JoinPlan,
    analyzed,
    children_of,
    function_of,
    metadata_of,
    plans_of,
)
from gpu_ops.spark.metrics.metrics import METRICS_TYPE, metric_names, observed
from gpu_ops.spark.plan.column_metadata import observed_join
from gpu_ops.spark.plan.selection import Selection, selection, selection_of_join
from gpu_ops.spark.tasks.file import FileWriter
from gpu_ops.spark.tasks.join import (
    ChainedOperator,
    Edge,
    EncodeChanges,
    Encoded,
    OperatorChain,
    OperatorTask,
    Task,
)
from gpu_ops.spark.tasks.packing import Pack, Packer, PackForSeveral, ReadFiles
from gpu_ops.spark.tasks.rows import Encoder, EncodeRows, Slices
from gpu_ops.spark.wire.files_request import why_not_by_card
from gpu_ops.spark_types import arrow_schema, named_column, spark_type
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def observing(rows: DataFrame, plan: JoinPlan, hidden: str | None) -> DataFrame:
    """Observes the metrics in a join's rows, and filters them out; `column_metadata.hides_metrics` finds that filter.

    Args:
        rows: the rows of the join's tasks.
        plan: the plan of the join.
        hidden: the column with metrics, or None where there is none.
    """
    if hidden is None:
        return rows
    for number, one in enumerate(plan.in_task):
        names = metric_names(one.description.sides, by_time=one.description.by_time)
        rows = rows.observe(one.name, observed(names, hidden, number))
    return rows.filter(f.isnull(hidden))


def observed_once(sides: Sequence[DataFrame], above: Sequence[JoinPlan] = ()) -> list[DataFrame]:
    """The inputs of a join as one plan has them: of a join that feeds several of them one alone observes its metrics.

    Each has a function of its own make something else of that join's changes, and Spark refuses two observations of
    one name that are not of the same rows.

    Args:
        sides: the inputs.
        above: the operators of the join's own task, which are observed there.
    """
    counted = Counter([plan.plan_id for side in sides for plan in plans_of(side)] + [plan.plan_id for plan in above])
    several = {plan_id for plan_id, count in counted.items() if count > 1}
    if not several:
        return list(sides)
    seen = several & {plan.plan_id for plan in above}
    return [frame_of(side.sparkSession, _observed_once(analyzed(side), several, seen, side)) for side in sides]


def _observed_once(node: Any, several: Set[str], seen: set[str], of: DataFrame) -> Any:
    """A plan without the observations of joins' metrics that were seen before."""
    below = children_of(node)
    join = observed_join(node)
    if join is not None:
        plan = JoinPlan.of(join)
        assert plan is not None
        observes = {one.plan_id for one in plan.in_task if one.name == str(node.name())}
        if observes & seen:
            return _observed_once(below[0], several, seen, of)
        seen |= observes & several
    made = [_observed_once(child, several, seen, of) for child in below]
    if all(new is old for new, old in zip(made, below, strict=True)):
        return node
    return node.withNewChildren(scala_seq(of.sparkSession, made))


def task_of(node: Any, spark: SparkSession) -> OperatorTask | None:
    """The function that a join's node runs; None for a join whose inputs are static, or what is made of changes."""
    task = function_of(node, spark)
    return task if isinstance(task, OperatorTask) else None


def encoded(rows: DataFrame, plan: JoinPlan, function: EncodeChanges, output: st.StructType) -> DataFrame:
    """Runs operators over the rows that come to their tasks, and encodes the changes there.

    Args:
        rows: what comes to the tasks.
        plan: the plan of the operator, or of the last one.
        function: runs them and encodes the changes.
        output: the types of its result.
    """
    hidden, names = function.task.hidden, output.names
    if hidden is not None:  # the row with metrics has nothing else
        output = st.StructType([st.StructField(x.name, x.dataType) for x in output]).add(
            hidden, spark_type(METRICS_TYPE)
        )
    return observing(rows.mapInArrow(function, plan.carried_by(output)), plan, hidden).select(*map(named_column, names))


def encoded_in_tasks(changes: DataFrame, encoder: Encoder, name: str, output: st.StructType) -> DataFrame:
    """Encodes rows in the tasks that have them: in the join's own task where Arrow can, else from Spark's rows.

    Args:
        changes: the rows.
        encoder: the encoder.
        name: the function's name in Spark's plans, where it takes Spark's rows.
        output: the types of the result.
    """
    scan, spark = changes_in(changes), changes.sparkSession
    if isinstance(scan, str):
        make_importable(spark)
        return changes.mapInArrow(EncodeRows(name, encoder), output)
    source = scan.source
    assert isinstance(source, JoinChanges)
    types = scan.projection.types(source.task.output)
    schema = pa.schema([pa.field(x.name, kind) for x, kind in zip(encoder.schema, types, strict=True)])
    encoder = encoder._replace(schema=schema)
    if isinstance(encoder, FileWriter):
        beyond = why_not_by_card(schema, encoder.format, encoder.partition_by, encoder.compression)
        encoder = encoder._replace(by_card=(beyond or source.why_not_by_card(scan.projection)) is None)
    return source.encoded(encoder, scan.projection, output)


def files_by(changes: DataFrame) -> str | None:
    """Puts into words who writes the files of a changelog made on a card, by `gpu_ops.write_files` without options.

    Returns:
        None where it is made without a card, as tasks write them then.
    """
    scan = changes_in(changes)
    assert isinstance(scan, SourceScan)
    source = scan.source
    if not isinstance(source, JoinChanges) or source.pool != "gpu":
        return None
    fields = zip(changes.columns, scan.projection.types(source.task.output), strict=True)
    why = source.why_not_by_card(scan.projection) or why_not_by_card(pa.schema(list(fields)), "parquet", (), "snappy")
    if why is not None:
        return f"write_files() has Spark's tasks write: {why}"
    return "write_files() has the card write Parquet, which Spark's tasks name and commit"


class SourceScan(NamedTuple):
    """A scan of a source with a filter and projection of its rows.

    Attributes:
        source: the files or messages, or a join's changes; its text is shown by `explain()`.
        projection: the filter and projection.
    """

    source: sources.Source | JoinChanges
    projection: Projection

    def __str__(self) -> str:
        said = [str(self.source)]
        if self.projection.tested:
            said.append(f"filtered by {', '.join(self.projection.tested)}")
        if self.projection.computed:
            said.append(f"computing {', '.join(x.sql for x in self.projection.computed)}")
        return ", ".join(said)


_CHANGES_OF: Final = "changes of"


def of_changes(read: str | None) -> bool:
    """True if what an operator's plan says of how an input is read means the changes of another operator."""
    return read is not None and read.startswith(_CHANGES_OF)


@dataclasses.dataclass(frozen=True)
class JoinChanges:
    """The changelog of a join as a source that is read in the join's own tasks.

    Attributes:
        node: the join's node.
        plan: the plan of the join.
        task: the join's function.
        session: the session.
    """

    node: Any
    plan: JoinPlan
    task: OperatorTask
    session: SparkSession

    def __str__(self) -> str:
        return f"{_CHANGES_OF} '{self.plan.name}'"

    def packed(self, packer: Packer, projection: Projection) -> DataFrame:
        """The changes packed for the shuffle; see `gpu_ops.spark.plan.build`."""
        return self.encoded(packer, projection, sources.PACKED_TYPE)

    def encoded(self, encoder: Encoder, projection: Projection, output: st.StructType) -> DataFrame:
        """The changes as an encoder makes something else of them in the join's own tasks."""
        function = EncodeChanges(self.task, Encoded(self.plan.plan_id, projection, encoder))
        return encoded(frame_of(self.session, self.node.children().head()), self.plan, function, output)

    @property
    def pool(self) -> str:
        """The kind of the state servers of the operator, ``"cpu"`` or ``"gpu"``."""
        return Directory.of(self.session).servers.pool(self.plan.backend).kind

    def why_not_by_card(self, projection: Projection) -> str | None:
        """The reason why no state server can write these changes into files; None if one can.

        Args:
            projection: what is taken of them.
        """
        if self.pool != "gpu":
            return "the state servers have no card"
        if not isinstance(self.task, Task) or self.plan.outputs:
            return "the task has several operators or outputs"
        if projection.needs_host:
            return "its filter or columns are computed by Arrow"
        return None

    def union_inputs(self) -> dict[str, DataFrame]:
        """The rows that Spark brings to its task, by their use; see `union_inputs_of`."""
        nodes = union_inputs_of(self.node, self.plan)
        frames = {id(node): frame_of(self.session, node) for node in nodes.values()}
        return {use: frames[id(node)] for use, node in nodes.items()}


def union_inputs_of(node: Any, plan: JoinPlan) -> dict[str, Any]:
    """The nodes whose rows Spark brings to a task, by what they are for: below a shuffle, and a union of several.

    Args:
        node: the task's.
        plan: of its last operator.
    """
    waiting, found = [node.children().head().children().head()], list[Any]()
    while waiting:
        below = waiting.pop()
        if str(below.nodeName()) == "Union":
            waiting += reversed(children_of(below))
        else:
            found.append(below)
    return {use: found[place] for use, place in zip(plan.union_inputs, plan.brought, strict=True)}


def reads_once(states: Iterable[StateAddress | None]) -> bool:
    """False for a query that began when each input had a source of its own: its checkpoint goes on with these."""
    stored = (Manifest.read(Files.at(state)) for state in states if state is not None)
    return all(found is None or bool(found.reads_once) for found in stored)


class Brought(NamedTuple):
    """The parts of Spark's union.

    Attributes:
        rows: what it is of.
        places: for each input the place of its own rows among them.
        files_by: for each input who reads its files, see `gpu_ops.spark.driver.queries.JoinPlan`.
    """

    rows: list[DataFrame]
    places: tuple[int, ...]
    files_by: tuple[str | None, ...]

    def union(self, plan: JoinPlan) -> DataFrame:
        """Spark's union, for the task of an operator."""
        return functools.reduce(DataFrame.unionAll, observed_once(self.rows, plan.in_task))


def brought_by_spark(
    union_inputs: Mapping[str, DataFrame],
    *,
    once: bool,
    among_operators: bool = True,
    files_by: Callable[[str, Pack], str | None] = lambda *_: None,
) -> Brought:
    """Lists the parts of Spark's union; a source of several inputs of a task is read once for all of them.

    Args:
        union_inputs: the packed rows of the inputs, by their use.
        once: False where each input has a source of its own.
        among_operators: False where each operator has.
        files_by: tells who reads the files of an input that is the only one of its source.
    """
    brought, places = list[_Brought](), list[int]()
    for use, frame in union_inputs.items():
        own = _Brought.of(frame, use)
        others = [n for n, other in enumerate(brought) if among_operators or other.operator == own.operator]
        alike = (n for n in others if brought[n].is_part_of(own) or (once and brought[n].reads_as(own)))
        place = next(alike, len(brought))
        places.append(place)
        if place == len(brought):
            brought.append(own)
        else:
            brought[place].packs.extend(own.packs)
    readers = [one.read_by(files_by) for one in brought]
    rows = [one.rows(by_card=reader == BY_CARD) for one, reader in zip(brought, readers, strict=True)]
    return Brought(rows, tuple(places), tuple(readers[place] for place in places))


class _Brought(NamedTuple):
    """Packed rows of one or more inputs, and what they are made of.

    Attributes:
        operator: the plan id of the first input's operator.
        frame: the rows of that input, perhaps with those of others.
        below: the node of what is read.
        packs: a function for each of the inputs; none where these are not rows that Arrow reads.
    """

    operator: str
    frame: DataFrame
    below: Any
    packs: list[Pack]

    @classmethod
    def of(cls, frame: DataFrame, use: str) -> Self:
        """Finds how the rows of an input are read; they may be read with those of others."""
        node = analyzed(frame)
        function = function_of(node, frame.sparkSession) if str(node.nodeName()) in MAPS else None
        packs = getattr(function, "packs", (function,))
        own = [pack for pack in packs if isinstance(pack, Pack) and pack.packer.use == use]
        return cls(use.partition(".")[0], frame, node.children().head() if own else node, own)

    def is_part_of(self, other: Self) -> bool:
        """True if one task packs both, of changes."""
        return self.frame is other.frame and not other.packs

    def reads_as(self, other: Self) -> bool:
        """True if both read one source in one way."""
        return bool(self.packs and other.packs) and bool(
            self.below.equals(other.below) and self.packs[0].reads_as(other.packs[0])
        )

    def read_by(self, files_by: Callable[[str, Pack], str | None]) -> str | None:
        """Tells who reads the files, if these are files; see `brought_by_spark`."""
        found = files_by(self.packs[0].packer.use, self.packs[0]) if self.packs else None
        return SHARED if found is not None and len(self.packs) > 1 else found

    def rows(self, *, by_card: bool) -> DataFrame:
        """The rows of all inputs; ``by_card``: they may stay in files."""
        if not self.packs:
            return self.frame
        function = self.packs[0].read_by_card(by_card=by_card) if len(self.packs) == 1 else PackForSeveral(self.packs)
        return frame_of(self.frame.sparkSession, self.below).mapInArrow(function, sources.PACKED_TYPE)


SHARED: Final = "several inputs are made of them"

MOST_IN_ONE_TASK: Final = 4
"""Partitions of an operator whose changes come out of a task with others; of more, each has its own."""

MOST_BELOW: Final = 64
"""Partitions of an operator of which others read; between two of more their messages, each to each, are too many."""


def in_one_task(plan: JoinPlan, changes: JoinChanges) -> bool:
    """True if an operator, and the one that makes some changes, with all that run in its task, can run in one task."""
    return all(one.partitions <= MOST_IN_ONE_TASK for one in (plan, *changes.plan.in_task))


def packed_in_one_task(
    below: Mapping[int, tuple[JoinChanges, Projection]], packers: Sequence[Packer]
) -> DataFrame | None:
    """The packed rows of inputs that are changes of operators below; these all run in one task.

    Args:
        below: for inputs by number the changes that they are made of, and what is taken of these.
        packers: for each input the packer of its rows.

    Returns:
        None where some of the operators have one engine, or too many partitions.
    """
    if any(changes.plan.dataflow is not None for changes, _ in below.values()):
        return None
    builder, union_inputs = OperatorChainBuilder(), dict[str, DataFrame]()
    for changes, _ in below.values():
        builder.take_all(changes, union_inputs)
    if any(one.partitions > MOST_BELOW for one in builder.plans):
        return None
    ids = [changes.plan.plan_id for changes, _ in below.values()]
    states = [operator.task.command["state"] for operator in builder.operators]
    # a checkpoint of a query whose operators were stages has a source for each
    brought = brought_by_spark(union_inputs, once=reads_once(states), among_operators=False)
    plan = dataclasses.replace(builder.plan(union_inputs, brought), shares=1, outputs=tuple(ids))
    packing = (Encoded(changes.plan.plan_id, taken, packers[n]) for n, (changes, taken) in below.items())
    function = EncodeChanges(OperatorChain(builder.operators, ids), *packing)
    return encoded(brought.union(plan).repartition(1, "route"), plan, function, sources.PACKED_TYPE)


class OperatorChainBuilder:
    """Collects the operators that can run in one task; one that is there is not computed again."""

    def __init__(self) -> None:
        self._plans: dict[str, JoinPlan] = {}
        self._tasks: dict[str, Task] = {}
        self._edges: dict[str, dict[tuple[str, int], Edge]] = {}

    @classmethod
    def of(
        cls,
        plan: JoinPlan,
        task: Task,
        order: Sequence[int],
        below: Mapping[int, tuple[JoinChanges, Projection]],
        packers: Sequence[Packer],
    ) -> Self:
        """An operator, behind those below some of its inputs.

        Args:
            plan: the plan of the operator.
            task: its function.
            order: the numbers of its inputs, in the order of Spark's union.
            below: for inputs by number the changes that they are made of, and what is taken of these.
            packers: for each input the packer of its rows.
        """
        chain, sources = cls(), dict[int, str]()
        for number in (number for number in order if number in below):
            changes, projection = below[number]
            chain.take(changes)
            sources[number] = changes.plan.plan_id
            chain._edges[sources[number]][plan.plan_id, number] = Edge(projection, packers[number])
        read = tuple(map(sources.get, range(len(plan.description.inputs))))
        chain._plans[plan.plan_id], chain._tasks[plan.plan_id] = dataclasses.replace(plan, sources=read), task
        chain._edges[plan.plan_id] = {}
        return chain

    def take(self, changes: JoinChanges) -> None:
        """Takes the operators of the task that makes some changes."""
        for plan, node in zip(changes.plan.in_task, changes.task.operators, strict=True):
            order = node.task.command["union_order"]  # of its own inputs, also where one engine has others with it
            alone = dataclasses.replace(
                plan, chained=(), dataflow=None, below=(), union_inputs=(), brought=(), files_by=(), union_order=order
            )
            self._plans.setdefault(plan.plan_id, alone)
            self._tasks.setdefault(plan.plan_id, node.task)
            self._edges.setdefault(plan.plan_id, {}).update(
                ((one.packer.operator, one.packer.number), one) for one in node.edges
            )

    def take_all(self, changes: JoinChanges, union_inputs: dict[str, DataFrame]) -> None:
        """Takes the operators of the task that makes some changes, and of those below that only pack for such tasks.

        Args:
            changes: the changes.
            union_inputs: takes what Spark brings to all of them, by its use.
        """
        packing = dict[int, _Packing | None]()
        for use, frame in changes.union_inputs().items():
            if id(frame) not in packing:
                lower = packing[id(frame)] = _packing(analyzed(frame), changes.session)
                if lower is not None:
                    self.take_all(lower.changes, union_inputs)
            if packing[id(frame)] is None:
                union_inputs.setdefault(use, frame)
        self.take(changes)
        for lower in packing.values():
            for one in () if lower is None else lower.encoded:
                packer = cast("Packer", one.encoder)
                self._edges[one.operator][packer.operator, packer.number] = Edge(one.projection, packer)
                plan = self._plans[packer.operator]
                sources = list(plan.sources)
                sources[packer.number] = one.operator
                self._plans[packer.operator] = dataclasses.replace(plan, sources=tuple(sources))

    @property
    def plans(self) -> list[JoinPlan]:
        """The plans of the operators that run in the task, the last one last."""
        return list(self._plans.values())

    @property
    def operators(self) -> list[ChainedOperator]:
        """The operators that run in the task, the last one last."""
        return [ChainedOperator(task, tuple(self._edges[plan_id].values())) for plan_id, task in self._tasks.items()]

    def plan(self, union_inputs: Iterable[str], brought: Brought) -> JoinPlan:
        """The plan of the last operator, which has those of the others.

        Args:
            union_inputs: what Spark brings to the task.
            brought: the rows of these.
        """
        *chained, plan = self.plans
        return dataclasses.replace(
            plan, chained=tuple(chained), union_inputs=tuple(union_inputs), brought=brought.places,
            files_by=brought.files_by,
        )  # fmt: skip


class _Packing(NamedTuple):
    """A task whose operators have no common engine packs their changes for others above it."""

    changes: JoinChanges
    encoded: tuple[Encoded, ...]


def _packing(node: Any, session: SparkSession) -> _Packing | None:
    """Finds what a part of Spark's union packs, where operators make it."""
    while str(node.nodeName()) not in MAPS:
        below = children_of(node)
        if len(below) != 1:
            return None
        (node,) = below
    plan = JoinPlan.of(node)
    function = None if plan is None or plan.dataflow is not None else function_of(node, session)
    if plan is None or not isinstance(function, EncodeChanges):
        return None
    return _Packing(JoinChanges(node, plan, function.task, session), function.encoded)


def source_of(df: DataFrame) -> SourceScan | str:
    """The source of a DataFrame that only filters and projects it as Arrow can; for any other one the reason."""
    return _scan(selection(df, lambda node: str(node.nodeName()) in MAPS), df.sparkSession)


def why_by_spark(reading: SourceScan | str, df: DataFrame) -> str | None:
    """The reason why rows of files, messages or operators of ours become Spark's own; None where they do not."""
    if isinstance(reading, SourceScan):
        return None
    return reading if plans_of(df) or holds_sources(analyzed(df)) else None


def changes_in(df: DataFrame) -> SourceScan | str:
    """The changes that a DataFrame only filters and projects as Arrow can; for any other one the reason in words."""
    return _scan(selection_of_join(df), df.sparkSession)


def _scan(found: Selection | str, session: SparkSession) -> SourceScan | str:
    """The source at which the filters and projections of a DataFrame end."""
    if isinstance(found, str):
        return found
    plan = JoinPlan.of(found.node)
    source: sources.Source | JoinChanges | None
    if plan is None:
        source = sources.source(found.node, session)
    else:
        task = task_of(found.node, session)
        source = None if task is None else JoinChanges(found.node, plan, task, session)
    if source is None:
        return "what it is made of is no changelog of one streaming operator"
    return SourceScan(source, found.projection)


def holds_sources(node: Any) -> bool:
    """True if a plan's rows come from files or messages that Arrow reads, or from streaming joins of these."""
    below = children_of(node)
    if str(node.nodeName()) in MAPS:
        if metadata_of(below[0], sources.ARROW) is not None:
            return True
        plan = JoinPlan.of(node)
        if plan is not None and plan.bounded:
            return False
    return any(map(holds_sources, below))


def sliced(node: LocalAggregate, rows: DataFrame) -> DataFrame:
    """Aggregates rows by slices of windows; rows of files as they are read.

    Args:
        node: the aggregation.
        rows: the rows of the node below.
    """
    window, calls = node.window, tuple((function, of) for _, function, of in node.calls)
    schema = arrow_schema(rows.schema, node.time)
    slices = Slices(node.time, window.size, window.slide, window.offset, node.by, calls, schema, node.schema)
    own = {field.name: field.dataType for field in rows.schema}
    made = st.StructType([st.StructField(x.name, spark_type(x.type, own.get(x.name))) for x in node.schema])
    reading = source_of(rows)
    make_importable(rows.sparkSession)
    if isinstance(reading, SourceScan) and isinstance(reading.source, sources.Source):
        reader = reading.source.reader
        if isinstance(reader, ReadFiles):  # as they are read
            own_rows = reader.rows._replace(projection=reading.projection, schema=slices.schema, slices=slices)
            return reading.source.frame.mapInArrow(ReadFiles("gpu_slices", own_rows), made)
    return rows.mapInArrow(EncodeRows("gpu_slices", slices), made)
