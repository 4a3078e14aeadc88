"""The rows that a stored operator's inputs have, and the result that follows from them, at one version of the state.

What an operator has put out so far, folded, is a function of the rows of its inputs that are still there. Where its
state has these rows whole, its present result is that of an engine that takes them in as insertions. An aggregate of
rows that are never taken back keeps groups in their place, and these have the result, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Latest, Top
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.over import Over
from gpu_ops.operator_engine import OperatorEngine
from gpu_ops.operators.dataflow import CLOCK
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.recovery import RecoveredState
from gpu_ops.state.address import StateAddress
from gpu_ops.state.durable import PartitionLog
from gpu_ops.state.files import Files
from gpu_ops.state.keyed_table import WRITTEN_COLUMN
from gpu_ops.state.manifest import Manifest
from gpu_ops.state.pieces import STATUS_COLUMN, Storable, whole
from gpu_ops.state.table import LIVE, put_behind

_AT_ONCE: Final = 1 << 18


def why_no_rows(description: Description, side: int) -> str | None:
    """The reason why an operator's state does not have the whole rows of an input; None if it has."""
    source = description.inputs[side]
    if source.ttl_ms is not None:
        return "rows with a ttl= have been forgotten"
    if description.emit == "at_end":
        return "it waits for the end of its input"
    if isinstance(description, Join | MultiJoin | Over) and not description.by_time:
        return None
    if isinstance(description, Aggregate) and not description.by_time:
        return (
            "an aggregate of rows that are never taken back keeps its groups, not the rows"
            if source.insert_only
            else None
        )
    if isinstance(description, Top):
        return "of rows that are never taken back top-N keeps the first ones alone" if source.insert_only else None
    if isinstance(description, Latest) and source.unique_key is not None and source.updates == "upsert":
        return None
    return f"{description.title} has forgotten rows, or keeps none"


def why_no_result(description: Description) -> str | None:
    """The reason why an operator's present result does not follow from its state; None if it does."""
    whole = [why for side in range(len(description.inputs)) if (why := why_no_rows(description, side)) is not None]
    groups = isinstance(description, Aggregate) and not description.by_time and description.source.ttl_ms is None
    return None if groups and description.emit != "at_end" else next(iter(whole), None)


@dataclasses.dataclass(frozen=True)
class StoredOperator:
    """One operator of a state folder, at one version.

    Attributes:
        state: the folder.
        version: the number of micro-batches that are in it.
        name: the operator's in its dataflow; empty where the folder has one operator.
        manifest: of the folder.
    """

    state: StateAddress
    version: int
    name: str
    manifest: Manifest

    @property
    def description(self) -> Description:
        """The description of the operator."""
        return vertex_of(from_json(self.manifest.description), self.name)

    def result(self, partition: int) -> Iterator[pa.Table]:
        """Yields the present result of a partition, as insertions.

        Raises:
            StateError: the version is no longer there, or a file is damaged.
        """
        described = self.description
        assert why_no_result(described) is None
        with contextlib.ExitStack() as stack:
            tables = self.tables(stack.enter_context(self.held(partition)))
            engine = OperatorEngine(described.with_inputs(described.inputs, "per_batch"), "cpu")
            stack.callback(engine.close)
            if any(why_no_rows(described, side) is not None for side in range(len(described.inputs))):
                engine.restore(whole(tables))
                yield engine.present_result()
                return
            if self.version == 0:
                return
            sides = zip(described.sides, described.inputs, strict=True)
            batches = [_insertions(tables[side], source.schema, source.row_kind) for side, source in sides]
            yield engine.process_batches(batches, [None] * len(batches))

    def held(self, partition: int) -> contextlib.AbstractContextManager[RecoveredState]:
        """Context manager with the state of a partition of the folder."""
        return stored_state(Files.at(self.state), self.manifest, partition).held_at(self.version)

    def tables(self, held: RecoveredState) -> dict[str, Storable]:
        """The operator's own tables in the state of its folder."""
        prefix = f"{self.name}." if self.name else ""
        return {n.removeprefix(prefix): table for n, table in held.tables.items() if n.startswith(prefix)}


def vertex_of(description: Description, name: str) -> Description:
    """The description of an operator of a dataflow; of one alone, which has no name there, the description itself."""
    if not name:
        return description
    assert isinstance(description, Dataflow)
    return next(vertex.description for vertex in description.operators if vertex.name == name)


@dataclasses.dataclass(frozen=True)
class AssembledState:
    """The state of an engine whose operators go on with the states of operators elsewhere.

    Attributes:
        state: its folder.
        manifest: that the folder gets once the states of all partitions are there.
        version: the number of micro-batches that it is to stand for.
        operators: by their names in the engine the operators whose states they get; one alone has an empty name.
    """

    state: StateAddress
    manifest: Manifest
    version: int
    operators: Mapping[str, StoredOperator]

    def why_not(self) -> str | None:
        """The reason why an operator cannot go on with the state that it is to get; None if all can."""
        description = from_json(self.manifest.description)
        for name, stored in self.operators.items():
            why = why_no_copy(stored.description, vertex_of(description, name))
            if why is not None:
                return why
        return None

    def write(self, partition: int) -> None:
        """Writes the state of a partition, as a snapshot."""
        description, tables = from_json(self.manifest.description), dict[str, pa.Table]()
        with contextlib.ExitStack() as stack:
            held: dict[str, RecoveredState] = {}
            for name, stored in self.operators.items():
                place = stored.state.identity
                if place not in held:
                    held[place] = stack.enter_context(stored.held(partition))
                clock_ms = held[place].clock_ms
                wanted, prefix = _schemas(vertex_of(description, name)), f"{name}." if name else ""
                for own, table in whole(stored.tables(held[place])).items():
                    fitted = _fitted(table, wanted[own], clock_ms)
                    assert fitted is not None
                    tables[f"{prefix}{own}"] = fitted
            states = list(held.values())
            clock_ms, times = max(one.clock_ms for one in states), states[0].times
            if isinstance(description, Dataflow):
                tables[CLOCK] = pa.table({CLOCK: pa.array([clock_ms], pa.int64())})
            log = PartitionLog(Files.at(self.state), self.manifest, partition)
            log.write_snapshot(self.version, tables, clock_ms, times, backlog=all(one.backlog for one in states))


def why_no_copy(was: Description, now: Description) -> str | None:
    """The reason why an operator cannot go on with the state of another one; None if it can.

    They may differ in when they emit, and after which time they forget rows: those of which it is not known when they
    came are taken as if they came last.
    """
    one, other = (json.loads(description.to_json()) for description in (was, now))
    for described in (one, other):
        del described["emit"]
        for source in described["inputs"]:
            source.pop("ttl_ms", None)
    if one != other:
        return f"{now.title} is described otherwise"
    old, new = _schemas(was), _schemas(now)
    if old.keys() != new.keys() or any(_fitted(old[x].empty_table(), new[x], 0) is None for x in old):
        return f"{now.title} keeps something else"
    return None


def _schemas(description: Description) -> dict[str, pa.Schema]:
    """The schemas of the tables that an operator keeps."""
    with contextlib.closing(OperatorEngine(description, "cpu")) as engine:
        return {name: table.schema for name, table in engine.snapshot().items()}


def _fitted(table: pa.Table, schema: pa.Schema, clock_ms: int) -> pa.Table | None:
    """A stored table with or without the times of its rows' last writes, as a schema has it; None if it has others."""
    names = table.column_names
    if names != schema.names and WRITTEN_COLUMN in names and len(names) > len(schema):
        table = table.remove_column(len(names) - 1 - names[::-1].index(WRITTEN_COLUMN))
    elif names != schema.names and WRITTEN_COLUMN in schema.names and len(names) < len(schema):
        place = len(schema) - 1 - schema.names[::-1].index(WRITTEN_COLUMN)
        written = pa.array(np.full(len(table), clock_ms, np.int64)).cast(schema.types[place])
        table = table.add_column(place, schema.field(place), written)
    return table if table.schema.equals(schema) else None


def _insertions(table: Any, schema: pa.Schema, row_kind: str | None) -> pa.Table:
    """The live rows of a state's table as insertions."""
    parts = [(table, {})] if isinstance(table, pa.Table) else table.snapshot_parts(_AT_ONCE)
    rows = pa.concat_tables([live_rows(put_behind(*part), len(schema)) for part in parts])
    rows = pa.Table.from_arrays(rows.columns[: len(schema)], schema=schema)
    return rows if row_kind is None else rows.append_column(row_kind, pa.array(["+I"] * len(rows), pa.string()))


def live_rows(table: pa.Table, own: int) -> pa.Table:
    """The rows of a stored table that are still there; the first ``own`` columns are theirs."""
    beside = table.column_names[own:]
    if STATUS_COLUMN not in beside:
        return table
    return table.filter(pa.array(table.column(own + beside.index(STATUS_COLUMN)).to_numpy() == LIVE))
