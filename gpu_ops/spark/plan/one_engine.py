"""One engine for the operators of a task: a `Dataflow` of those that read one another's changes in one partition.

Where operators have one partition each, or the keys of one are among those of another one that it reads, nothing has to
be cut between them, and a partition's state server runs them one after the other. They have one state folder, that of
the last one, one version and one log, of what comes from outside. A folder that was begun with an operator alone goes
on with an operator alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pyarrow as pa

from gpu_ops.conditions.expressions import ColumnRef
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.dataflow import Dataflow, Vertex
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.projection import ROWS, Projection
from gpu_ops.spark.driver.queries import JoinPlan
from gpu_ops.spark.tasks.join import ChainedOperator, DataflowTask, Edge
from gpu_ops.spark.wire.arrivals import Arrivals, Carried
from gpu_ops.spark.wire.command import Wire
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def _fits(plan: JoinPlan) -> bool:
    """Tells whether an operator can be one of several in an engine: not what takes, or gives, something beside rows."""
    description = plan.description
    late = getattr(description, "late", None) or getattr(description.interval, "late", None)
    return (
        not (plan.backlog or description.takes_function or late == "tag")
        and description.emit != "at_end"
        and all(source.bad_rows != "tag" and source.parts is None for source in description.inputs)
    )


def _goes_by(dataflow: Dataflow, plans: Sequence[JoinPlan]) -> bool:
    """Tells whether each operator has the watermark within a dataflow that it has alone."""
    ids = dict(zip((vertex.name for vertex in dataflow.operators), (plan.plan_id for plan in plans), strict=True))
    upstream = {plan.plan_id: [it if it in ids.values() else None for it in plan.upstream] for plan in plans}
    return all(
        (None if below is None else ids[below]) == above
        for name in dataflow.timed
        for below, above in zip(dataflow.followed(name), upstream[ids[name]], strict=False)
    )


def _between(edge: Edge, source: Input, below: Description) -> Projection | None:
    """Leaves the row kinds out of an edge's projection, as they pass beside it; None where it computes with them.

    A filter may ask for a row kind and nothing else.

    Args:
        edge: between the two.
        source: the operator's input.
        below: the other operator.
    """
    columns = dict(zip(edge.packer.schema.names, edge.projection.columns, strict=True))
    kind = None if source.row_kind is None else columns.pop(source.row_kind, None)
    if source.row_kind is not None and (kind is None or kind.root != ColumnRef(ROWS, ROW_KIND_COLUMN, pa.string())):
        return None
    if source.sequence_by is not None or (source.unique_key is not None and source.updates == "upsert"):
        return None
    taken = Projection(tuple(columns[name] for name in source.schema.names), edge.projection.where)
    of_kinds, others = taken.by_row_kind()
    if ROW_KIND_COLUMN in others.names or (source.row_kind is None and (of_kinds or not below.insert_only)):
        return None
    return taken if taken.types(below.values_schema) == list(source.schema.types) else None


def one_engine(
    plans: Sequence[JoinPlan], operators: Sequence[ChainedOperator], outputs: Sequence[str] = ()
) -> DataflowTask | None:
    """The task of operators that one engine can have; None where each has to have its own.

    Args:
        plans: of the operators.
        operators: each behind those that it reads, the last one last.
        outputs: where several come out, the plan ids of those whose changes do.
    """
    alike = len({(one.backend, one.partitions, one.shares) for one in plans}) == 1
    if not (alike and all(map(_fits, plans)) and _in_one_folder(operators)):
        return None
    descriptions = {one.plan_id: one.description for one in plans}
    edges = {(e.packer.operator, e.packer.number): (one.task.plan_id, e) for one in operators for e in one.edges}
    names = {plan_id: f"operator_{number}" for number, plan_id in enumerate(descriptions, 1)}
    inputs: dict[str, Input] = {}
    schemas: list[pa.Schema] = []
    numbers: dict[tuple[str, int], int] = {}
    first, vertices = list[int](), list[Vertex]()
    for one in operators:
        plan_id, arrivals = one.task.plan_id, one.task.arrivals
        sources, projections = list[str](), list[Projection | None]()
        for number, source in enumerate(descriptions[plan_id].inputs):
            projection = None
            if (plan_id, number) in edges:
                below, edge = edges[plan_id, number]
                name, projection = names[below], _between(edge, source, descriptions[below])
                if projection is None:
                    return None
            else:
                name = _free(source.name, {*inputs, *names.values()})
                if number in arrivals.first:
                    first.append(len(inputs))
                numbers[plan_id, number] = len(inputs)
                inputs[name] = dataclasses.replace(source, name=name)
                schemas.append(arrivals.inputs[number].schema)
            sources.append(name)
            projections.append(projection)
        vertices.append(Vertex(names[plan_id], descriptions[plan_id], tuple(sources), tuple(projections)))
    wire, union = Wire.of(schemas)
    by_input = (tuple(its[number] for its in wire.union_columns) for number in range(len(schemas)))
    carried = [Carried(schema, its) for schema, its in zip(schemas, by_input, strict=True)]
    dataflow = Dataflow(tuple(inputs.values()), tuple(vertices), tuple(names[plan_id] for plan_id in outputs))
    if (plans[-1].partitions > 1 and not dataflow.shuffled_by) or not _goes_by(dataflow, plans):
        return None
    return DataflowTask(operators, dataflow, wire, Arrivals(union, carried, first=first, numbers=numbers), outputs)


def _in_one_folder(operators: Sequence[ChainedOperator]) -> bool:
    """True if the state can be in the folder of the last operator: it is, or none is in any of their folders."""
    *others, folder = (one.task.command["state"] for one in operators)
    if any((other is None) != (folder is None) for other in others):
        return False
    if folder is None:
        return True
    stored = Manifest.read(Files.at(folder))
    if stored is not None:
        return stored.of_dataflow
    return all(Manifest.read(Files.at(other)) is None for other in others)


def _free(name: str, others: set[str]) -> str:
    """A name that no other input has, in upper or lower case: the given one, or one with a number."""
    taken = {other.lower() for other in others}
    return next(one for one in (name, *(f"{name} {n}" for n in range(2, len(taken) + 3))) if one.lower() not in taken)
