"""Several outputs of one streaming query: a DataFrame with a struct column for each.

A row of it is a row of one output. Outputs that are changes of our operators come out of one Spark task, in which each
operator runs once; what only Spark computes, and operators of many partitions, are put beside it by a union.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.errors import DescriptionError
from gpu_ops.spark.api.apply import check_frames
from gpu_ops.spark.datatypes import ignores_case, named_column, nullable
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.queries import JoinPlan, plans_of
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark.plan.changes import (
    JoinChanges,
    OperatorChainBuilder,
    SourceScan,
    changes_in,
    encoded,
    in_one_task,
    observed_once,
)
from gpu_ops.spark.plan.column_metadata import OUTPUT, outputs_of
from gpu_ops.spark.tasks.join import EncodeChanges, Encoded, OperatorChain, OperatorTask
from gpu_ops.spark.tasks.rows import StructColumn


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
    together = _in_one_task(scans)
    types = {name: st.StructType([_bare(field) for field in df.schema]) for name, df in frames.items()}
    parts = [] if not together else [_of_one_task({name: scans[name] for name in together}, types)]  # type: ignore[misc]
    others = [name for name in frames if name not in together]
    for name, df in zip(others, observed_once([frames[name] for name in others]), strict=True):
        struct = f.struct(*(named_column(column) for column in df.columns))
        parts.append(df.select(*(_column(one, kind, struct if one == name else None) for one, kind in types.items())))
    rows = functools.reduce(DataFrame.unionAll, observed_once(parts))
    columns = []
    for name, df in frames.items():
        how = str(scans[name]) if name in together else _beside(scans[name])
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


def _in_one_task(scans: Mapping[str, SourceScan | str]) -> Sequence[str]:
    """The names of the outputs that can come out of one task."""
    changes = {name: scan.source for name, scan in scans.items() if isinstance(scan, SourceScan)}
    operators = {name: source.plan for name, source in changes.items() if isinstance(source, JoinChanges)}
    if len({plan.plan_id for plan in operators.values()}) == 1:
        return list(operators)
    return [
        name for name, source in changes.items() if isinstance(source, JoinChanges) and in_one_task(source.plan, source)
    ]


def _of_one_task(scans: Mapping[str, SourceScan], types: Mapping[str, st.StructType]) -> DataFrame:
    """The outputs that come out of one task: all columns of `outputs`, those of other ones null."""
    builder, sources = OperatorChainBuilder(), dict[str, JoinChanges]()
    for scan in scans.values():
        assert isinstance(scan.source, JoinChanges)
        sources.setdefault(scan.source.plan.plan_id, scan.source)
        builder.take(scan.source)
    first = next(iter(sources.values()))
    union_inputs: dict[str, DataFrame] = {}
    for source in sources.values():
        for use, rows in source.union_inputs().items():
            union_inputs.setdefault(use, rows)
    task: OperatorTask = first.task
    plan = first.plan
    if len(sources) > 1:
        # A query's checkpoint counts its sources in this order: that of the operators, which their manifests have.
        places = {one.plan_id: place for place, one in enumerate(builder.plans)}
        ordered = sorted(union_inputs, key=lambda use: places[use.partition(".")[0]])
        union_inputs = {use: union_inputs[use] for use in ordered}
        task, plan = OperatorChain(builder.operators, sources), builder.plan(tuple(union_inputs))
        below = [plan_id for source in sources.values() for plan_id in source.plan.below]
        plan = dataclasses.replace(plan, below=tuple(dict.fromkeys([*reversed(places), *below])))
        directory = Directory.of(first.session)
        for operator in builder.operators:
            directory.check_at_start(operator.task.plan_id, operator.task.command["state"])
    plan = dataclasses.replace(plan, outputs=tuple(sources))
    schemas = {
        name: pa.schema(
            list(zip(types[name].names, scan.projection.types(sources[_made_by(scan)].task.output), strict=True))
        )
        for name, scan in scans.items()
    }
    output = pa.schema([(name, pa.struct(list(schema))) for name, schema in schemas.items()])
    function = EncodeChanges(
        task,
        *(
            Encoded(_made_by(scan), scan.projection, StructColumn(name, schemas[name], output))
            for name, scan in scans.items()
        ),
    )
    rows = functools.reduce(DataFrame.unionAll, observed_once(list(union_inputs.values()), plan.in_task))
    struct = st.StructType([st.StructField(name, types[name]) for name in scans])
    made = encoded(rows.repartition(plan.tasks, "route"), plan, function, struct)
    if len(scans) == len(types):
        return made
    return made.select(
        *(_column(name, kind, named_column(name) if name in scans else None) for name, kind in types.items())
    )


def _made_by(scan: SourceScan) -> str:
    """The plan id of the operator that makes some changes."""
    assert isinstance(scan.source, JoinChanges)
    return scan.source.plan.plan_id
