"""The rows that a stored operator's inputs have, and the result that follows from them, at one version of the state.

What an operator has put out so far, folded, is a function of the rows of its inputs that are still there. Where its
state has these rows whole, its present result is that of an engine that takes them in as insertions. An aggregate of
rows that are never taken back keeps groups in their place, and these have the result, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

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
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.recovery import RecoveredState
from gpu_ops.state.address import StateAddress
from gpu_ops.state.durable import PartitionLog
from gpu_ops.state.files import Files
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
    """

    state: StateAddress
    version: int
    name: str = ""

    def vertex(self, manifest: Manifest) -> Description:
        """The description of the operator."""
        description = from_json(manifest.description)
        if not self.name:
            return description
        assert isinstance(description, Dataflow)
        return next(vertex.description for vertex in description.operators if vertex.name == self.name)

    def result(self, partition: int) -> Iterator[pa.Table]:
        """Yields the present result of a partition, as insertions.

        Raises:
            StateError: the version is no longer there, or a file is damaged.
        """
        files = Files.at(self.state)
        manifest = Manifest.of(files)
        described = self.vertex(manifest)
        assert why_no_result(described) is None
        with contextlib.ExitStack() as stack:
            tables = self._tables(stack.enter_context(stored_state(files, manifest, partition).held_at(self.version)))
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

    def _tables(self, held: RecoveredState) -> dict[str, Storable]:
        """The operator's own tables in the state of its folder."""
        prefix = f"{self.name}." if self.name else ""
        return {n.removeprefix(prefix): table for n, table in held.tables.items() if n.startswith(prefix)}

    def copy(self, partition: int, to: StateAddress, manifest: Manifest, version: int) -> None:
        """Writes the state of a partition into another folder, as a snapshot.

        Args:
            partition: the partition's number.
            to: the other folder.
            manifest: the manifest that this has.
            version: the number of micro-batches that it is to stand for there.
        """
        files = Files.at(self.state)
        with stored_state(files, Manifest.of(files), partition).held_at(self.version) as held:
            log = PartitionLog(Files.at(to), manifest, partition)
            log.write_snapshot(version, whole(self._tables(held)), held.clock_ms, held.times, backlog=held.backlog)


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
