"""Several outputs of one streaming query: a DataFrame with a struct column for each.

A row of it is a row of one output. Outputs that are changes of our operators come out of one Spark task, in which each
operator runs once; what only Spark computes, and operators of many partitions, are put beside it by a union.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.apply import check_frames
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.queries import JoinPlan, plans_of
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark.plan.changes import (
    Brought,
    JoinChanges,
    OperatorChainBuilder,
    SourceScan,
    brought_by_spark,
    changes_in,
    encoded,
    in_one_task,
    observed_once,
    reads_once,
)
from gpu_ops.spark.plan.column_metadata import OUTPUT, outputs_of
from gpu_ops.spark.plan.one_engine import one_engine
from gpu_ops.spark.tasks.join import DataflowTask, EncodeChanges, Encoded, OperatorChain, OperatorTask
from gpu_ops.spark.tasks.rows import StructColumn
from gpu_ops.spark_types import ignores_case, named_column, nullable


def outputs(**changelogs: DataFrame) -> DataFrame:
    """Puts several changelogs into one streaming DataFrame, so that one query feeds several sinks.

    `gpu_ops.sinks.each` gives each of them to a view of its own, `gpu_ops.side` selects one in a ``foreachBatch`` of
    your own. What they share is computed once in a micro-batch: an operator that several of them are made of is one
    operator of the query, with one state folder. Flink: several sinks in one ``StatementSet``.

    Args:
        changelogs: streaming DataFrames under names of your choosing: changelogs of this package, perhaps filtered or
            projected, or any other streams.

    Returns:
        A streaming DataFrame with a struct column for each, null in the rows of the others.

    Raises:
        DescriptionError: no output, a name that is none, a static DataFrame, one that belongs to another application or
            has its result only at the end, two columns of one name in an output, or two operators with one name or one
            state folder.

    Example:
        >>> arrive(folder + "/in", {"row_kind": "+I", "id": 1, "customer": "ann", "amount": 10})
        >>> read = spark.readStream.schema("row_kind STRING, id INT, customer STRING, amount INT")
        >>> orders = gpu_ops.stream(read.json(folder + "/in"), row_kind="row_kind", unique_key="id")
        >>> latest = gpu_ops.latest(orders, state=folder + "/latest")
        >>> totals = gpu_ops.aggregate(latest, "customer", {"paid": ("sum", "amount")}, state=folder + "/totals")
        >>> gpu_ops.outputs(orders=latest, totals=totals).columns
        ['orders', 'totals']
    """
    if not changelogs:
        raise DescriptionError("outputs() takes the changelogs under their names: outputs(orders=..., totals=...)")
    frames = {name: data_frame(df, f"output {name!r} of outputs()") for name, df in changelogs.items()}
    _check(frames)
    scans = {name: changes_in(df) for name, df in frames.items()}
    types = {name: st.StructType([_bare(field) for field in df.schema]) for name, df in frames.items()}
    together = _Together.of(scans)
    own = {} if together is None else together.changes
    others = [name for name in frames if name not in own]
    if together is not None and not together.may_be_beside(
        [plan for name in others for plan in plans_of(frames[name])]
    ):
        together, own, others = None, {}, list(frames)
    parts = [] if together is None else [together.rows(types)]
    for name in others:
        struct = f.struct(*map(named_column, frames[name].columns))
        parts.append(
            frames[name].select(*(_column(one, kind, struct if one == name else None) for one, kind in types.items()))
        )
    rows = functools.reduce(DataFrame.unionAll, observed_once(parts))
    columns = []
    for name, df in frames.items():
        how = str(scans[name]) if name in own else _beside(scans[name])
        known = {"columns": [field.metadata or {} for field in df.schema], "made": how}
        columns.append(named_column(name).alias(name, metadata={OUTPUT: known}))
    return rows.select(*columns)


def _bare(field: st.StructField) -> st.StructField:
    return st.StructField(field.name, nullable(field.dataType))


def _column(name: str, kind: st.StructType, value: Any) -> Any:
    return (f.lit(None) if value is None else value).cast(kind).alias(name)


def _check(frames: Mapping[str, DataFrame]) -> None:
    """Refuses what cannot be outputs of one query."""
    ignoring = ignores_case(next(iter(frames.values())).sparkSession)
    known: dict[str, str] = {}
    for name, df in frames.items():
        if not name.isidentifier():
            raise DescriptionError(f"outputs(): {name!r} is no name: take letters, digits and underscores")
        other = known.setdefault(name.lower() if ignoring else name, name)
        if other != name:
            raise DescriptionError(f"outputs(): {other!r} and {name!r} are one name to Spark, which ignores case")
        if not df.isStreaming:
            raise DescriptionError(f"outputs(): {name!r} is static, and a streaming query has no rows of it: write it")
        if outputs_of(df):
            raise DescriptionError(f"outputs(): {name!r} has outputs itself: name all of them in one outputs()")
        columns = [column.lower() if ignoring else column for column in df.columns]
        twice = next((column for column in df.columns if columns.count(column.lower() if ignoring else column) > 1), "")
        if twice or not columns:
            raise DescriptionError(f"outputs(): {name!r} has " + (f"column {twice!r} twice" if twice else "no column"))
    check_frames(list(frames.values()))
    names: dict[str, JoinPlan] = {}
    folders: dict[str, JoinPlan] = {}
    for plan in (plan for df in frames.values() for plan in plans_of(df)):
        if plan.description.emit == "at_end":
            raise DescriptionError(
                f"outputs(): '{plan.name}' has no output before its input ends: gpu_ops.finish() gives its result, a "
                "static DataFrame"
            )
        if names.setdefault(plan.name, plan).plan_id != plan.plan_id:
            raise DescriptionError(f"outputs(): two operators are called {plan.name!r}; give each its own name=")
        user = plan if plan.state_identity is None else folders.setdefault(plan.state_identity, plan)
        if user.plan_id != plan.plan_id:
            raise DescriptionError(
                f"outputs(): state folder {plan.state} is that of '{user.name}' and of '{plan.name}'; give each "
                "operator its own, and make an operator once that several outputs are made of"
            )


def _beside(scan: SourceScan | str) -> str:
    return f"Spark's rows, as {scan}" if isinstance(scan, str) else f"{scan}, in stages of its own"


class _Together:
    """Outputs that come out of one task.

    Args:
        changes: for each the changes that it is made of, and what is taken of these.

    Attributes:
        changes: likewise.
    """

    def __init__(self, changes: Mapping[str, tuple[JoinChanges, Projection]]) -> None:
        self.changes, self._builder = changes, OperatorChainBuilder()
        self._sources = {source.plan.plan_id: source for source, _ in changes.values()}
        union_inputs: dict[str, DataFrame] = {}
        for source in self._sources.values():
            self._builder.take(source)
            union_inputs = {**source.union_inputs(), **union_inputs}
        if self._alone is None:
            # A query's checkpoint counts its sources in this order: that of the operators, which manifests have.
            places = {plan.plan_id: place for place, plan in enumerate(self._builder.plans)}
            ordered = sorted(union_inputs, key=lambda use: places[use.partition(".")[0]])
            union_inputs = {use: union_inputs[use] for use in ordered}
        self._union_inputs = union_inputs

    @classmethod
    def of(cls, scans: Mapping[str, SourceScan | str]) -> Self | None:
        """Finds the outputs that can come out of one task; None where none can."""
        changes = {
            name: (scan.source, scan.projection)
            for name, scan in scans.items()
            if isinstance(scan, SourceScan) and isinstance(scan.source, JoinChanges)
        }
        made = cls(changes)
        if made._alone is None and made._engine is None:
            made = cls({name: one for name, one in changes.items() if in_one_task(one[0].plan, one[0])})
        return made if made.changes else None

    @property
    def _alone(self) -> JoinChanges | None:
        """The one operator that all of them are the changes of."""
        return next(iter(self._sources.values())) if len(self._sources) == 1 else None

    def may_be_beside(self, plans: Sequence[JoinPlan]) -> bool:
        """False if one of some other operators is one of these: there it is in a task with others than here."""
        own = {plan.plan_id for plan in self._builder.plans}
        return self._alone is not None or own.isdisjoint(plan.plan_id for plan in plans)

    @functools.cached_property
    def _engine(self) -> DataflowTask | None:
        return one_engine(self._builder.plans, self._builder.operators, list(self._sources)) if self._sources else None

    @functools.cached_property
    def _brought(self) -> Brought:
        """Lists the parts of Spark's union; see `gpu_ops.spark.plan.changes.brought_by_spark`."""
        states = [operator.task.command["state"] for operator in self._builder.operators]
        return brought_by_spark(self._union_inputs, once=reads_once(states))

    def _task(self) -> tuple[OperatorTask, JoinPlan]:
        """The function of the task, and the plan of its last operator."""
        if self._alone is not None:
            return self._alone.task, self._alone.plan
        operators, engine = self._builder.operators, self._engine
        plan = self._builder.plan(self._union_inputs, self._brought)
        below = [plan_id for source in self._sources.values() for plan_id in source.plan.below]
        ids = [operator.task.plan_id for operator in operators]
        plan = dataclasses.replace(plan, below=tuple(dict.fromkeys([*reversed(ids), *below])))
        directory = Directory.of(next(iter(self._sources.values())).session)
        for one in (operator.task for operator in operators):
            has_state = engine is None or one is operators[-1].task
            directory.check_at_start(one.plan_id, one.command["state"], has_state=has_state)
        if engine is None:
            return OperatorChain(operators, self._sources), plan
        engine.command["union_order"] = order = engine.union_order(self._union_inputs)
        return engine, dataclasses.replace(plan, dataflow=engine.dataflow, union_order=order)

    def rows(self, types: Mapping[str, st.StructType]) -> DataFrame:
        """All columns of `outputs`, those of other outputs null.

        Args:
            types: of all outputs.
        """
        task, plan = self._task()
        plan = dataclasses.replace(plan, outputs=tuple(self._sources))
        schemas = {
            name: pa.schema(list(zip(types[name].names, projection.types(source.task.output), strict=True)))
            for name, (source, projection) in self.changes.items()
        }
        output = pa.schema([(name, pa.struct(list(schema))) for name, schema in schemas.items()])
        encoders = {name: StructColumn(name, schema, output) for name, schema in schemas.items()}
        parts = (Encoded(source.plan.plan_id, taken, encoders[x]) for x, (source, taken) in self.changes.items())
        function = EncodeChanges(task, *parts)
        brought = self._brought.union(plan).repartition(plan.tasks, "route")
        rows = encoded(brought, plan, function, st.StructType([st.StructField(x, types[x]) for x in self.changes]))
        if len(self.changes) == len(types):
            return rows
        columns = (_column(x, kind, named_column(x) if x in self.changes else None) for x, kind in types.items())
        return rows.select(*columns)
