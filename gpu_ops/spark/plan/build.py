"""Builds the Spark plan of an operator: union, repartition, mapInArrow, and observe with a filter for its metrics.

**The union layout**: the columns of all inputs travel in one stream of rows. A union column carries a column of one
input in that input's rows and of another in the other's, so the union needs no padding. Keys share a column first: then
the shuffle hashes a plain column.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import KIND_BYTES, ROW_KIND_COLUMN
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.keys import Shuffle
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from gpu_ops.operators.groups.top import FirstOfGroup
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.driver.queries import JoinPlan, plans_of
from gpu_ops.spark.driver.starts import check_starts
from gpu_ops.spark.metrics.metrics import METRICS_COLUMN, METRICS_TYPE, free_name, metric_names
from gpu_ops.spark.plan.changes import (
    JoinChanges,
    OperatorChainBuilder,
    SourceScan,
    brought_by_spark,
    holds_sources,
    in_one_task,
    observing,
    packed_in_one_task,
    reads_once,
    source_of,
    why_by_spark,
)
from gpu_ops.spark.plan.column_metadata import changelog_columns, is_changelog, open_joins
from gpu_ops.spark.plan.one_engine import one_engine
from gpu_ops.spark.plan.read_by_card import read_by_card
from gpu_ops.spark.settings import Settings, metrics_reported
from gpu_ops.spark.sources import PACKED_TYPE
from gpu_ops.spark.tasks.engine import NO_INPUT, BoundedTask
from gpu_ops.spark.tasks.functions import CoGroupTask
from gpu_ops.spark.tasks.join import HEARTBEAT, OperatorChain, Task
from gpu_ops.spark.tasks.packing import Packer
from gpu_ops.spark.tasks.rows import EncodeRows
from gpu_ops.spark.wire.arrivals import Arrivals, Carried
from gpu_ops.spark.wire.command import Wire
from gpu_ops.spark.wire.hashes import routes
from gpu_ops.spark_types import arrow_schema, arrow_type, is_binary_collated, named_column, nullable, spark_type
from gpu_ops.state.address import StateAddress
from gpu_ops.state.blocks import Blocks
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest

if TYPE_CHECKING or importlib.util.find_spec("pyspark.sql.datasource") is not None:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
else:  # before Spark 4 there are no data sources in Python
    DataSource = DataSourceStreamReader = InputPartition = object

_SEQUENCE: Final = "__sequence"
"""The column of a number that rises with a static input's rows."""

_CO_GROUP: Final = "gpu_ops.coGroup"
"""Metadata key of the first column of a co-group's result; its value is the co-group's name."""

NAME = "gpu_ops_heartbeat"
INPUT: Final = "__input"
"""The column of the number of a row's input."""

MESSAGE_BYTES: Final = 1 << 18
"""The size of the packed rows in one row of Spark's, about."""


def build(plan: JoinPlan, inputs: Sequence[DataFrame], state: StateAddress | None) -> DataFrame:
    """Builds the changelog of an operator as a streaming DataFrame.

    Args:
        plan: the operator, backend and partitions; its name is unique in the query.
        inputs: the inputs, in the operator's order; their columns are those of its description, and the row kinds.
        state: the state folder, or None.
    """
    description, name = plan.description, plan.name
    session = inputs[0].sparkSession
    schemas = [df.schema for df in inputs]
    layout = union_columns(description, schemas)
    scans, order = tuple(map(source_of, inputs)), _order_in_folder(state, inputs) or union_order(inputs)
    readings = tuple(scan if isinstance(scan, SourceScan) else None for scan in scans)
    plan = dataclasses.replace(
        plan,
        union_order=",".join(map(str, order)),
        reads_once=reads_once([state]),
        read=tuple(None if reading is None else str(reading) for reading in readings),
        by_spark=tuple(map(why_by_spark, scans, inputs)),
        reported=metrics_reported(session),
        below=tuple(dict.fromkeys(below.plan_id for number in order for below in plans_of(inputs[number]))),
    )
    make_importable(session)
    names = metric_names(description.sides, by_time=description.by_time)
    directory = Directory.of(session)
    changes_below = {
        number: (reading.source, reading.projection)
        for number, reading in enumerate(readings)
        if reading is not None and isinstance(reading.source, JoinChanges)
    }
    below = changes_below
    packers, arrivals = packers_of(description, inputs, readings, layout, plan, blocks=directory.blocks)
    hidden = None if plan.reported else free_name(METRICS_COLUMN, description.output_schema.names)
    task = Task(
        plan.function_name, _command(plan, state, layout), directory.address, arrivals,
        description.output_schema, metrics=names, times=description.sides if description.by_event_time else (),
        hidden=hidden, blocks=directory.blocks, shares=plan.shares,
    )  # fmt: skip
    chain, union_inputs = OperatorChainBuilder.of(plan, task, order, below, packers), dict[str, DataFrame]()
    fused = one_engine(chain.plans, chain.operators) if below else None
    if fused is None:  # the task cuts what lies between two operators
        below = {number: some for number, some in below.items() if in_one_task(plan, some[0])}
        chain = OperatorChainBuilder.of(plan, task, order, below, packers)
        if below:  # and there is one
            task.shares, packers = 1, [packer.unshared() for packer in packers]
    from_other_tasks = {n: changes_below[n] for n in order if n in changes_below and n not in below}
    packed_in_one = None
    if from_other_tasks and directory.blocks is not None and _adjoin(order, list(from_other_tasks)):
        packed_in_one = packed_in_one_task(from_other_tasks, packers)  # a checkpoint counts sources so
    for number in order:
        if number in below:
            for use, frame in below[number][0].union_inputs().items():
                union_inputs.setdefault(use, frame)
        elif packed_in_one is not None and number in from_other_tasks:
            union_inputs[f"{plan.plan_id}.{number}"] = packed_in_one
        else:
            union_inputs[f"{plan.plan_id}.{number}"] = _packed(inputs[number], readings[number], packers[number])
    if plan.heartbeat_ms is not None:
        like = next(iter(union_inputs.values()))
        union_inputs[plan.plan_id + HEARTBEAT] = heartbeats(session, plan.heartbeat_ms, like.schema)
    function = fused or (OperatorChain(chain.operators) if below else task)
    plans = {one.plan_id: one for one in chain.plans}
    folders = {one.task.plan_id: state if fused else one.task.command["state"] for one in chain.operators}
    reads = read_by_card(directory, plans, folders)
    brought = brought_by_spark(union_inputs, once=plan.reads_once, files_by=reads)
    plan = dataclasses.replace(chain.plan(union_inputs, brought), shares=task.shares)
    (task if fused is None else fused).command["keeps_copies"] = plan.read_by_card
    if fused is not None:
        fused.command["union_order"] = fused.union_order(union_inputs)
        plan = dataclasses.replace(plan, dataflow=fused.dataflow, union_order=fused.command["union_order"])
    output = output_type(description, schemas)
    if hidden is not None:
        output.add(hidden, spark_type(METRICS_TYPE))
    changes = brought.union(plan).repartition(plan.tasks, "route").mapInArrow(function, plan.carried_by(output))
    for one in (operator.task for operator in chain.operators):
        directory.check_at_start(one.plan_id, one.command["state"], has_state=fused is None or one is task)
    check_starts(Directory.check_started, _without_output_modes)
    directory.servers.begin(plan.backend, plan.partitions)
    return observing(changes, plan, hidden).select(*changelog_columns(description, name, plan.plan_id))


def _adjoin(order: list[int], some: list[int]) -> bool:
    """True if some inputs stand one behind the other in the order of all."""
    first = order.index(some[0])
    return order[first : first + len(some)] == some


def _order_in_folder(state: StateAddress | None, inputs: Sequence[DataFrame]) -> list[int]:
    """The inputs as they were ordered when the state folder's query began, if it has one; else none.

    `union_order` goes by partitions, and `gpu_ops.rescale` may have changed their number.
    """
    stored = None if state is None else Manifest.read(Files.at(state))
    if stored is None or stored.union_order is None:
        return []
    order, description = list(map(int, stored.union_order.split(","))), from_json(stored.description)
    if isinstance(description, Dataflow):
        order = description.order_of_last(order)
    return order if sorted(order) == list(range(len(inputs))) else []


def union_order(inputs: Sequence[DataFrame]) -> list[int]:
    """Orders the inputs for the union: sources first, as their tasks take longest and Spark starts tasks in order.

    A query's checkpoint counts its sources in this order, so it stays as it was when rows that Spark reads went through
    another shuffle: there changelogs came first, those of more partitions before others.
    """

    def place(number: int) -> tuple[int, int]:
        nodes = open_joins(inputs[number])
        joins = [(node, plan) for node in nodes if node is not None and (plan := JoinPlan.of(node)) is not None]
        first = [x.partitions for node, x in joins if x.partitions > 1 and not x.bounded and not holds_sources(node)]
        if first:
            return (1 if None in nodes else 0), -first[0]
        return (3 if joins else 2), 0

    return sorted(range(len(inputs)), key=place)


def _command(plan: JoinPlan, state: StateAddress | None, layout: Sequence[UnionColumn]) -> dict[str, Any]:
    """The exchange's command, without the fields that only a task knows."""
    return {
        "op": "apply",
        "join_id": plan.plan_id,
        "state": state,
        "description": plan.description.to_json(),
        "partitions": plan.partitions,
        "union_order": plan.union_order,
        "reads_once": plan.reads_once,
        "backend": plan.backend,
        "wire": wire(layout).to_dict(),
        "options": {"backlog": True} if plan.backlog else {},
    }


def output_type(description: Description, schemas: Sequence[st.StructType]) -> st.StructType:
    """The Spark schema of an operator's changelog."""
    fields = [st.StructField(ROW_KIND_COLUMN, st.StringType(), False)]
    for column in description.output:
        # A column that two inputs show together: either's type will do if it is the common one.
        candidates = [s[n].dataType for s in schemas for n in (column.column, column.other) if n in s.names]
        of_one = column.other is None and column.column in schemas[column.side].names
        own = [schemas[column.side][column.column].dataType] if of_one else []
        fields.append(st.StructField(column.name, spark_type(column.type, *own, *candidates)))
    return st.StructType(fields)


def build_bounded(plan: JoinPlan, inputs: Sequence[DataFrame], function: CoGroupTask | None = None) -> DataFrame:
    """Builds the result of an operator over static DataFrames, as insertions in a static DataFrame.

    The operator runs in Spark's tasks, on the CPU unless ``backend="gpu"``: tasks side by side would share a card.

    Args:
        plan: the operator, which emits at the end, backend and partitions.
        inputs: the inputs, in the operator's order; their columns are those of its description, and the row kinds.
        function: the function of a co-group, else None.
    """
    description = plan.description
    session = inputs[0].sparkSession
    schemas = [df.schema for df in inputs]
    layout = union_columns(description, schemas)
    make_importable(session)
    ordered = description.order_matters_at_end
    sides = [in_union(df, number, layout) for number, df in enumerate(inputs)]
    if ordered:
        sides = [side.withColumn(_SEQUENCE, f.monotonically_increasing_id()) for side in sides]
    if description.result_without_rows:
        sides.append(_row_of_no_input(sides[0]))
    rows = shuffle(functools.reduce(DataFrame.unionAll, sides), description, layout, plan.partitions)
    if ordered:
        rows = rows.sortWithinPartitions(*_sequence_columns(description, layout))
    task = BoundedTask(
        plan.function_name, description.to_json(), wire(layout), wire_schema(layout, pa.string()),
        backend="gpu" if plan.backend == "gpu" else "cpu",
        probe=Settings.of_application(session.sparkContext).gpu_probe, function=function,
    )  # fmt: skip
    output = output_type(description, schemas) if function is None else function.schema
    found = rows.mapInArrow(task, plan.carried_by(output))
    if function is not None:
        first, *others = (named_column(x.name) for x in output.fields)
        named = first.alias(output.fields[0].name, metadata={**output.fields[0].metadata, _CO_GROUP: plan.name})
        return found.select(named, *others)
    return found.select(*changelog_columns(description, plan.name, plan.plan_id))


def _row_of_no_input(like: DataFrame) -> DataFrame:
    """A row of no input, so that Spark runs a task: an aggregate of no rows has a result row."""
    values = [f.lit(NO_INPUT if x.name == INPUT else None).cast(x.dataType).alias(x.name) for x in like.schema.fields]
    return like.sparkSession.range(1).select(*values)


def _sequence_columns(description: Description, layout: Sequence[UnionColumn]) -> list[Column]:
    """The sort columns that order each input's rows: its ``sequence_by``, nulls first, then its own order."""
    by = []
    for number, source in enumerate(description.inputs):
        if source.sequence_by is not None:
            column = next(x for x in layout if x.columns[number] == source.sequence_by)
            by.append(f.when(f.col(INPUT) == number, f.col(column.name)).asc_nulls_first())
    return [*by, f.col(_SEQUENCE).asc()]


class Beats(DataSourceStreamReader):  # type: ignore[misc]
    """A stream without rows whose offset counts periods since 1970, so that each period has a micro-batch.

    Args:
        period_ms: the length of a period in milliseconds.
    """

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's interface
        """The offset at which a new query begins."""
        return {"beat": 0}

    def latestOffset(self) -> dict[str, int]:  # noqa: N802
        """The number of the current period."""
        return {"beat": time.time_ns() // 1_000_000 // self._period_ms}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
        """One partition, which is empty."""
        del start, end
        return [InputPartition(0)]

    def read(self, partition: Any) -> Any:
        """Returns an iterator without rows."""
        del partition
        return iter(())


class Heartbeat(DataSource):  # type: ignore[misc]
    """The Spark data source of `Beats`; its option ``period_ms`` is the length of a period."""

    @classmethod
    def name(cls) -> str:
        """The name of the format in Spark."""
        return NAME

    def schema(self) -> str:
        """The schema of one column, which never has a value."""
        return "beat bigint"

    def streamReader(self, schema: Any) -> Beats:  # noqa: N802 - Spark's interface
        """Makes the stream of beats."""
        del schema
        return Beats(int(self.options["period_ms"]))


def heartbeats(session: SparkSession, period_ms: int, schema: st.StructType) -> DataFrame:
    """Makes a stream without rows that causes a micro-batch in each period.

    Spark 3.5 has no Python data sources; there its ``rate`` source beats each second.

    Args:
        session: a Spark session.
        period_ms: the length of a period in milliseconds.
        schema: the schema of the stream.
    """
    if DataSource is object:
        beats = session.readStream.format("rate").option("rowsPerSecond", 1).option("numPartitions", 1).load()
    else:
        session.dataSource.register(Heartbeat)
        beats = session.readStream.format(NAME).option("period_ms", period_ms).load()
    return beats.where(f.lit(False)).select(*(f.lit(None).cast(x.dataType).alias(x.name) for x in schema.fields))


def _without_output_modes(writer: Any, error: AnalysisException) -> None:
    """Replaces Spark's error about an output mode that a changelog does not have by one that names an alternative.

    Raises:
        DescriptionError: the error is about an output mode, and the DataFrame is a changelog.
    """
    if "output mode" in str(error).lower() and is_changelog(writer._df):
        raise DescriptionError(
            "a changelog is written in outputMode('append'), the default: its row kinds say what changes. For "
            "the table as it is now keep it up to date in foreachBatch, see gpu_ops.sinks"
        ) from error


class UnionColumn(NamedTuple):
    """A physical column of the union, and the column of each input that it carries, or None."""

    columns: tuple[str | None, ...]
    name: str
    type: st.DataType
    of_kinds: bool
    """Whether it carries row kinds, and nothing else."""


def union_columns(description: Description, schemas: Sequence[st.StructType]) -> list[UnionColumn]:
    """Lays out the union columns, row kinds included; those that carry a column of several inputs come first.

    Args:
        description: the description; its keys share a column where their types are equal.
        schemas: the schemas of the DataFrames.
    """
    types = [
        {x.name: (nullable(x.dataType), x.name == source.row_kind) for x in schema.fields}
        for schema, source in zip(schemas, description.inputs, strict=True)
    ]
    # of each column of the union those of the inputs, its type and whether it has row kinds
    made: list[tuple[dict[int, str], tuple[st.DataType, bool]]] = []
    taken: list[set[str]] = [set() for _ in types]

    def share(columns: Sequence[str | None]) -> None:
        """Puts columns of equal types into one union column, as far as they have none yet."""
        free = {n: c for n, c in enumerate(columns) if c is not None and c not in taken[n]}
        while free:
            kind = next(types[n][c] for n, c in free.items())
            alike = {n: c for n, c in free.items() if types[n][c] == kind}
            free = {n: c for n, c in free.items() if n not in alike}
            if len(alike) > 1:
                made.append((alike, kind))
                for n, column in alike.items():
                    taken[n].add(column)

    for columns in description.equal_columns:
        share(columns)
    share([source.row_kind for source in description.inputs])
    for number, own in enumerate(types):
        for column, kind in own.items():
            if column in taken[number]:
                continue
            free = next((x for x, its in made if its == kind and number not in x), None)
            if free is None:
                made.append(({number: column}, kind))
            else:
                free[number] = column
    made.sort(key=lambda column: len(column[0]) == 1)
    return [
        UnionColumn(tuple(carried.get(n) for n in range(len(types))), f"c{number}", *kind)
        for number, (carried, kind) in enumerate(made)
    ]


def wire(layout: Sequence[UnionColumn]) -> Wire:
    """The layout of the rows on the wire."""
    return Wire("__side", "__order", tuple((*x.columns, x.name) for x in layout))


def wire_schema(layout: Sequence[UnionColumn], of_kinds: pa.DataType) -> pa.Schema:
    """The schema of the rows on the wire: side, sequence, union columns; those of row kinds have the given type."""
    fixed = [pa.field("__side", pa.int8()), pa.field("__order", pa.int64())]
    return pa.schema([*fixed, *(pa.field(x.name, of_kinds if x.of_kinds else arrow_type(x.type)) for x in layout)])


def in_union(df: DataFrame, number: int, layout: Sequence[UnionColumn]) -> DataFrame:
    """The rows of one input in the columns of the union, with the number of the input."""
    columns = [f.lit(number).cast("tinyint").alias(INPUT)]
    for column in layout:
        own = column.columns[number]
        value = f.lit(None).cast(column.type) if own is None else named_column(own)
        columns.append(value.alias(column.name))
    return df.select(*columns)


def shuffle(rows: DataFrame, description: Description, layout: Sequence[UnionColumn], partitions: int) -> DataFrame:
    """Partitions rows of `in_union` by Spark's own hash; used where no state is stored by partition."""
    return rows.repartition(partitions, *(_distributed(value, layout) for value in description.shuffled_by))


def _distributed(by: Shuffle, layout: Sequence[UnionColumn]) -> Column:
    """The Spark expression by which rows are partitioned.

    Keys that are equal in the join are equal here: values of all inputs in the type they are compared in, with one zero
    and one NaN.
    """
    own = [next(x for x in layout if x.columns[n] == column) for n, column in enumerate(by.columns)]
    kind = spark_type(by.type, *(x.type for x in own))
    different = list(dict.fromkeys(x.name for x in own))
    value: Column | None = None
    for name in reversed(different):
        numbers = [n for n, x in enumerate(own) if x.name == name]
        plain = arrow_type(own[numbers[0]].type) == by.type
        column = f.col(name) if plain else f.col(name).cast(kind)
        value = column if value is None else f.when(f.col(INPUT).isin(*numbers), column).otherwise(value)
    assert value is not None
    if isinstance(kind, (st.FloatType, st.DoubleType)):
        nan = f.lit(float("nan")).cast(kind)
        value = f.when(f.isnan(value), nan).when(value == 0, f.lit(0.0).cast(kind)).otherwise(value)
    return value


def collated_key(description: Description, schemas: Sequence[st.StructType]) -> str | None:
    """The name of a compared column whose collation makes different bytes equal, or None."""
    return next(
        (name for n, name in description.compared_columns if not is_binary_collated(schemas[n][name].dataType)), None
    )


def packers_of(
    description: Description,
    inputs: Sequence[DataFrame],
    readings: Sequence[SourceScan | None],
    layout: Sequence[UnionColumn],
    plan: JoinPlan,
    *,
    blocks: Blocks | None,
) -> tuple[list[Packer], Arrivals]:
    """Makes the packers of all inputs, and the `Arrivals` that unpack their rows in the operator's task.

    A Python function packs them: so the optimizer does not remove it and, where the sources have nothing new, the
    shuffle and the join behind it, whose partitions would miss a micro-batch.

    Args:
        description: the description.
        inputs: the inputs, in its order.
        readings: for each input what `gpu_ops.spark.plan.changes.source_of` finds, if it finds a source.
        layout: the union columns.
        plan: the plan of the operator.
        blocks: the folders in which tasks leave their messages, if all are on one machine.
    """
    schemas = [arrow_schema(df.schema, source.name) for df, source in zip(inputs, description.inputs, strict=True)]
    roads, packers = routes(plan.partitions * plan.shares), []
    for number, reading in enumerate(readings):
        by = tuple((by.columns[number], by.type) for by in description.shuffled_by)
        # of changes, which have been checked: of other rows a bad one has to be found
        first = (
            FirstOfGroup.for_operator(description)
            if reading is not None and isinstance(reading.source, JoinChanges)
            else None
        )
        source, schema = description.inputs[number], schemas[number]
        made = Packer(source.name, plan.plan_id, number, schema, by, roads, MESSAGE_BYTES, first, blocks, plan.shares)
        packers.append(made._replace(row_kind=source.row_kind, strict=source.bad_rows == "fail"))
    carried = [Carried(packer.message_schema, tuple(x.columns[packer.number] for x in layout)) for packer in packers]
    return packers, Arrivals(wire_schema(layout, KIND_BYTES), carried, first=plan.loaded)


def _packed(df: DataFrame, reading: SourceScan | None, packer: Packer) -> DataFrame:
    if reading is None:
        return df.mapInArrow(EncodeRows("gpu_join_pack", packer), PACKED_TYPE)
    return reading.source.packed(packer, reading.projection)
