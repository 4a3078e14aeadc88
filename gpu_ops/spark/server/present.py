"""The rows that a stored operator's inputs have, and the result that follows from them, at one version of the state.

What an operator has put out so far, folded, is a function of the rows of its inputs that are still there. Where its
state has these rows whole, its present result is that of an engine that takes them in as insertions. An aggregate of
rows that are never taken back keeps groups in their place, and these have the result, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.changelog import KIND_BYTES
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Latest, Top
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.names import columns_of_same
from gpu_ops.descriptions.over import Over
from gpu_ops.operator_engine import OperatorEngine
from gpu_ops.operators.dataflow import CLOCK
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.recovery import RecoveredState, newest_snapshot, write_snapshot
from gpu_ops.spark.wire.command import SideRows, Wire
from gpu_ops.state.address import StateAddress
from gpu_ops.state.durable import PartitionLog, Times
from gpu_ops.state.files import Files
from gpu_ops.state.keyed_table import WRITTEN_COLUMN
from gpu_ops.state.manifest import Manifest
from gpu_ops.state.pieces import STATUS_COLUMN, Storable, StoredTable, whole
from gpu_ops.state.table import LIVE, put_behind

_AT_ONCE: Final = 1 << 20
"""Rows that are read, and joined, at once."""


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
        if self.only_grows:
            yield from self._result_as_it_came(partition)
            return
        with self.held(partition) as held:
            yield from self.result_of(held)

    @property
    def only_grows(self) -> bool:
        """True if its rows are those that its folder's log has: none was taken back, forgotten or left out."""
        described = self.description
        return (
            not self.name
            and isinstance(described, Join | MultiJoin | Over)
            and not (described.by_time or described.not_kept)
            and all(x.insert_only and x.ttl_ms is None and x.bad_rows == "fail" for x in described.inputs)
        )

    def _rows_as_they_came(self, log: PartitionLog, version: int) -> Iterator[SideRows]:
        """Yields the rows of all inputs up to a version, where it `only_grows`: without tables and indexes of them."""
        described = self.description
        base = newest_snapshot(log.name, version, log, log.stored(clean=False).until(version))
        origin = log.origin(base) if base else None
        if origin is not None:
            yield from self._rows_as_they_came(*origin)
        elif base:
            tables, _ = log.read_snapshot(base)
            for side, (name, source) in enumerate(zip(described.sides, described.inputs, strict=True)):
                table = tables[name]
                in_pieces = isinstance(table, StoredTable)
                for part in (put_behind(x.rows, x.numbers) for x in table.parts()) if in_pieces else [table]:
                    rows = [x.schema.empty_table() for x in described.inputs]
                    rows[side] = _own_columns(part, source.schema)
                    yield SideRows(tuple(rows), tuple(np.arange(len(x)) for x in rows))
        for batch_id in range(base, version):
            record = log.read_record(batch_id)
            yield Wire.from_json(record.wire).split(described, record.table)

    def came(self, partition: int, side: int) -> Iterator[pa.Table]:
        """Yields the rows of an input in a partition, where it `only_grows`."""
        for rows in self._came(partition):
            table = rows.tables[side]
            assert isinstance(table, pa.Table)
            yield table.cast(self.description.inputs[side].schema)

    def _came(self, partition: int) -> Iterator[SideRows]:
        log = PartitionLog(Files.at(self.state), self.manifest, partition)
        return self._rows_as_they_came(log, self.version)

    def _result_as_it_came(self, partition: int) -> Iterator[pa.Table]:
        """Yields the present result of a partition where it `only_grows`."""
        described = self.description
        with contextlib.closing(OperatorEngine(described.with_inputs(described.inputs, "at_end"), "cpu")) as engine:
            for rows in self._came(partition):
                engine.process_batches(rows.tables, rows.sequences)
            yield from engine.finish_parts()

    def result_of(self, held: RecoveredState) -> Iterator[pa.Table]:
        """Yields the present result that follows from the state of a partition, as insertions."""
        described = self.description
        assert why_no_result(described) is None
        groups = any(why_no_rows(described, side) is not None for side in range(len(described.inputs)))
        # rows that are all there are joined at once, without tables and indexes of their own
        described = described.with_inputs(described.inputs, "per_batch" if groups else "at_end")
        with contextlib.closing(OperatorEngine(described, "cpu")) as engine:
            if groups:
                engine.restore(whole(self.tables(held)))
                yield engine.present_result()
                return
            nothing = [None] * len(described.inputs)
            for side in range(len(nothing)):
                for rows in self.rows_of(held, side, kinds=True):
                    engine.process_batches([rows if side == other else None for other in range(len(nothing))], nothing)
            yield from engine.finish_parts()

    def rows_of(self, held: RecoveredState, side: int, *, kinds: bool = False) -> Iterator[pa.Table]:
        """Yields the live rows of an input in the state of a partition, in parts.

        Args:
            held: the state.
            side: the input's number.
            kinds: whether they have the row kind of insertions, if the input has one.
        """
        source, table = self.description.inputs[side], self.tables(held)[self.description.sides[side]]
        kind = source.row_kind if kinds else None
        parts = [(table, {})] if isinstance(table, pa.Table) else table.snapshot_parts(_AT_ONCE)
        for part in parts:
            rows = _own_columns(put_behind(*part), source.schema)
            yield rows if kind is None else rows.append_column(kind, pa.repeat("+I", len(rows)))

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


class StateRows(NamedTuple):
    """The rows that an operator's state comes to, or those of one of its inputs.

    Attributes:
        operator: the operator.
        side: the number of the input; None for the operator's present result.
    """

    operator: StoredOperator
    side: int | None

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows, which have no row kind."""
        described = self.operator.description
        return described.values_schema if self.side is None else described.inputs[self.side].schema

    def of(self, partition: int, held: Callable[[], RecoveredState]) -> Iterator[pa.Table]:
        """Yields the rows of a partition, in parts.

        Args:
            partition: its number.
            held: gives its state; called only where the rows do not follow from the log as it is.
        """
        operator = self.operator
        if self.side is not None:
            yield from (
                operator.came(partition, self.side) if operator.only_grows else operator.rows_of(held(), self.side)
            )
            return
        for rows in operator.result(partition) if operator.only_grows else operator.result_of(held()):
            yield rows.select(self.schema.names)


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

    @property
    def goes_on(self) -> bool:
        """True if it is the state of one other folder just as that is: a manifest of `GOES_ON` may name its files."""
        stored = next(iter(self.operators.values()))
        was, now = (json.loads(from_json(x.description).to_json()) for x in (stored.manifest, self.manifest))
        for content in (was, now):  # when changes are told is nothing that the log or the tables say
            content.pop("emit", None)
        return (
            was == now
            and {x.state.identity for x in self.operators.values()} == {stored.state.identity}
            and all(name == x.name for name, x in self.operators.items())
            and _schemas(from_json(stored.manifest.description)) == _schemas(from_json(self.manifest.description))
        )

    def write(self, partition: int, there: Callable[[], Mapping[str, RecoveredState]] = dict) -> None:
        """Writes the state of a partition, as a snapshot.

        Args:
            partition: its number.
            there: gives states that are there already, by the identities of their folders.
        """
        log = PartitionLog(Files.at(self.state), self.manifest, partition)
        if self.manifest.goes_on:
            stored = next(iter(self.operators.values()))
            other = PartitionLog(Files.at(stored.state), stored.manifest, partition)
            base = newest_snapshot(other.name, stored.version, other, other.stored(clean=False).until(stored.version))
            if not base or other.origin(base) is None:
                log.go_on_from(self.version, other, base, stored.version)
                return
        description, tables = from_json(self.manifest.description), dict[str, Storable]()
        origins = dict[str, PartitionLog]()
        with contextlib.ExitStack() as stack:
            held = dict(there())
            for name, stored in self.operators.items():
                place = stored.state.identity
                if place not in held:
                    held[place] = stack.enter_context(stored.held(partition))
                vertex, prefix = vertex_of(description, name), f"{name}." if name else ""
                own = stored.tables(held[place])
                if _schemas(vertex) != _schemas(stored.description):
                    own = _all_fitted(own, _schemas(vertex), held[place].clock_ms)
                tables |= {f"{prefix}{table}": rows for table, rows in own.items()}
                of = PartitionLog(Files.at(stored.state), stored.manifest, partition)
                origins |= {f"{prefix}{table}": of for table in own}
            states = list(held.values())
            clock_ms, times = max(one.clock_ms for one in states), states[0].times
            if isinstance(description, Dataflow):
                times = self._times(description, held)
                tables[CLOCK] = pa.table({CLOCK: pa.array([clock_ms], pa.int64())})
            together = RecoveredState(tables, clock_ms, times, all(one.backlog for one in states))
            write_snapshot(log, self.version, together, origins)

    def _times(self, description: Dataflow, held: Mapping[str, RecoveredState]) -> Times:
        """The times of a dataflow out of those of the operators whose states it gets."""
        stored = {name: self.operators[name] for name in description.timed}
        found = {
            name: held[one.state.identity].times.of(from_json(one.manifest.description), one.name)
            for name, one in stored.items()
        }
        return Times.together(found)

    def catch_up(self, version: int) -> None:
        """Adds micro-batches without changes to snapshots of an earlier version, up to the version."""
        described = from_json(self.manifest.description)
        kinds = ([] if x.row_kind is None else [pa.field(x.row_kind, KIND_BYTES)] for x in described.inputs)
        wire, union = Wire.of([pa.schema([*x.schema, *kind]) for x, kind in zip(described.inputs, kinds, strict=True)])
        for partition in range(self.manifest.partitions):
            log = PartitionLog(Files.at(self.state), self.manifest, partition)
            log.write_nothing(version, self.version, union.empty_table(), wire.to_json())


def why_no_copy(was: Description, now: Description) -> str | None:
    """The reason why an operator cannot go on with the state of another one; None if it can.

    They may differ in when they emit, and after which time they forget rows: those of which it is not known when they
    came are taken as if they came last. And in what they call columns.
    """
    if columns_of_same(was, now) is None:
        return f"{now.title} is described otherwise"
    old, new = _schemas(was), _schemas(now)
    if old.keys() != new.keys() or any(_fitted(old[x].empty_table(), new[x], 0) is None for x in old):
        return f"{now.title} keeps something else"
    return None


def _schemas(description: Description) -> dict[str, pa.Schema]:
    """The schemas of the tables that an operator keeps."""
    with contextlib.closing(OperatorEngine(description, "cpu")) as engine:
        return {name: table.schema for name, table in engine.snapshot().items()}


def _all_fitted(own: Mapping[str, Storable], wanted: Mapping[str, pa.Schema], clock_ms: int) -> dict[str, Storable]:
    """The tables of an operator as another one has them, which can go on with them."""
    found = dict[str, Storable]()
    for name, table in whole(own).items():
        fitted = _fitted(table, wanted[name], clock_ms)
        assert fitted is not None
        found[name] = fitted
    return found


def _fitted(table: pa.Table, schema: pa.Schema, clock_ms: int) -> pa.Table | None:
    """A stored table with the names of a schema, and with the times of its rows' last writes where that has them.

    None if it has other columns.
    """
    names = table.column_names
    if WRITTEN_COLUMN in names and len(names) > len(schema):
        table = table.remove_column(len(names) - 1 - names[::-1].index(WRITTEN_COLUMN))
    elif WRITTEN_COLUMN in schema.names and len(names) < len(schema):
        place = len(schema) - 1 - schema.names[::-1].index(WRITTEN_COLUMN)
        written = pa.array(np.full(len(table), clock_ms, np.int64)).cast(schema.types[place])
        table = table.add_column(place, schema.field(place), written)
    return table.rename_columns(schema.names) if table.schema.types == schema.types else None


def _own_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The live rows of a stored table, without what stands beside them."""
    return pa.Table.from_arrays(live_rows(table, len(schema)).columns[: len(schema)], schema=schema)


def live_rows(table: pa.Table, own: int) -> pa.Table:
    """The rows of a stored table that are still there; the first ``own`` columns are theirs."""
    beside = table.column_names[own:]
    if STATUS_COLUMN not in beside:
        return table
    return table.filter(pa.array(table.column(own + beside.index(STATUS_COLUMN)).to_numpy() == LIVE))
