"""The rows of a state folder at one version, read partition by partition; nothing is written, and its query may run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.changelog import SHORT_STRINGS
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.operator_engine import OperatorEngine
from gpu_ops.operators.dataflow import CLOCK
from gpu_ops.operators.kept_input import KIND_COLUMN
from gpu_ops.operators.operator import TimedOperator
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.present import live_rows
from gpu_ops.spark.server.recovery import RecoveredState, stored_of
from gpu_ops.state.address import Location
from gpu_ops.state.durable import PartitionLog, Stored
from gpu_ops.state.files import Files
from gpu_ops.state.interval_table import MATCHED_COLUMN
from gpu_ops.state.keyed_table import COUNT_COLUMN, WRITTEN_COLUMN
from gpu_ops.state.manifest import Manifest
from gpu_ops.state.table import put_behind

PARTITION: Final = "_partition"
VERSION: Final = "_version"
_AT_ONCE: Final = 1 << 16
_ATTEMPTS: Final = 3

T = TypeVar("T")
"""What is read of a partition."""

_STEM: Final = re.compile(r"(__[a-z]+)(_\d+)?")
"""The name of a number beside a row, and the step of a multi-way join that it is of."""

_SHOWN: Final[Mapping[str, tuple[str, pa.DataType]]] = {
    COUNT_COLUMN: ("_matches", pa.int64()),
    MATCHED_COLUMN: ("_matched", pa.bool_()),
    WRITTEN_COLUMN: ("_written", pa.timestamp("us", "UTC")),
    KIND_COLUMN: ("_row_kind", pa.string()),
}
"""The numbers beside a row that mean something outside, and what they are there."""


def while_running(log: PartitionLog, read: Callable[[Stored], T]) -> T:
    """Reads a partition whose query may run, and delete files when it has put a snapshot in their place.

    Args:
        log: the partition's files.
        read: reads some of them; called again, with the new list, where some were deleted meanwhile.

    Raises:
        StateError: a file is missing or damaged.
    """
    for _ in range(_ATTEMPTS - 1):
        stored = log.stored(clean=False)
        try:
            return read(stored)
        except (StateError, OSError):
            left = log.stored(clean=False)
            if left.records.keys() >= stored.records.keys() and left.snapshots.keys() >= stored.snapshots.keys():
                raise
    return read(log.stored(clean=False))


@dataclasses.dataclass(frozen=True)
class TableAtVersion:
    """One table of a state folder at one version.

    Attributes:
        state: the folder.
        name: the table's, as ``gpu-join inspect`` shows it: the input's, with its operator's and a dot where one engine
            has several operators.
        version: the number of micro-batches that are in it.
        partitions: of the folder.
        rows: the schema of its rows, and of the numbers beside them.
        own: how many of these columns are the rows'.
    """

    state: Location
    name: str
    version: int
    partitions: int
    rows: pa.Schema
    own: int

    @classmethod
    def of(cls, state: Location, name: str | None, version: int | None) -> TableAtVersion:
        """Finds a table of a state folder.

        Args:
            state: the folder.
            name: the table's name, or that of its input alone where one operator has it; None where there is one table.
            version: a version that is still there; None for the last one that all partitions have.

        Raises:
            StateError: there is no state folder, it is damaged, or the version is not there.
            DescriptionError: there is no such table, or several.
        """
        files = Files.at(state)
        manifest = Manifest.of(files)
        description = from_json(manifest.description)
        tables = _tables(description)
        chosen = _table_called(tables, name)
        partitions = stored_of(files, manifest)
        versions = [stored.last() for stored in partitions]
        last, oldest = min(versions), max(stored.oldest() for stored in partitions)
        if version is None:
            version = last
        if oldest > last:
            raise StateError(f"the partitions of state folder {files.location} have no version in common: {versions}")
        if not oldest <= version <= last:
            raise StateError(
                f"state folder {files.location} has no version {version}: it keeps those from {oldest} to {last}"
            )
        return cls(files.address, chosen, version, manifest.partitions, *tables[chosen][:2])

    @functools.cached_property
    def _beside(self) -> dict[int, pa.Field]:
        """The numbers beside rows that are shown, by position, as they are shown."""
        names, shown = self.rows.names, {}
        for position in range(self.own, len(names)):
            stem = _STEM.fullmatch(names[position])
            known = stem and _SHOWN.get(stem[1])
            if stem and known:
                name, kind = known
                shown[position] = pa.field(_free(f"{name}{stem[2] or ''}", names[: self.own]), kind)
        return shown

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns of what is read: the input's, the numbers beside its rows, partition and version."""
        names = self.rows.names[: self.own]
        fields = [self.rows.field(position).with_nullable(True) for position in range(self.own)]
        meta = [pa.field(_free(PARTITION, names), pa.int32()), pa.field(_free(VERSION, names), pa.int64())]
        return pa.schema([*fields, *self._beside.values(), *meta])

    def read(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of one partition.

        Raises:
            StateError: the version is no longer there, or a file is damaged.
        """
        if self.version == 0:
            return
        with contextlib.ExitStack() as stack:
            table = self._held(partition, stack).tables[self.name]
            parts = [(table, {})] if isinstance(table, pa.Table) else table.snapshot_parts(_AT_ONCE)
            for rows, numbers in parts:
                yield from self._shown(put_behind(rows, numbers), partition).to_batches()

    def _held(self, partition: int, stack: contextlib.ExitStack) -> RecoveredState:
        """The state of one partition, which the stack gives back."""
        files = Files.at(self.state)
        manifest = Manifest.of(files)

        def held(_: Stored) -> RecoveredState:
            return stack.enter_context(stored_state(files, manifest, partition).held_at(self.version))

        return while_running(PartitionLog(files, manifest, partition), held)

    def _shown(self, table: pa.Table, partition: int) -> pa.Table:
        """Stored rows as they are read outside."""
        table = live_rows(table, self.own)
        columns = [table.column(position) for position in range(self.own)]
        columns += [_as_shown(table.column(position), field.type) for position, field in self._beside.items()]
        size = len(table)
        columns += [pa.array(np.full(size, partition, np.int32)), pa.array(np.full(size, self.version, np.int64))]
        kinds = zip(columns, self.schema, strict=True)
        return pa.Table.from_arrays([c if c.type == f.type else c.cast(f.type) for c, f in kinds], schema=self.schema)


class _Described(NamedTuple):
    """A table of a state.

    Attributes:
        schema: of what is stored.
        own: how many of its columns are the rows'; the others stand beside them.
        names: what it may be called.
    """

    schema: pa.Schema
    own: int
    names: tuple[str, ...]


def _tables(description: Description) -> dict[str, _Described]:
    """The tables of a state by name."""
    engine = OperatorEngine(description, "cpu")
    try:
        stored = {name: table.schema for name, table in engine.snapshot().items()}
    finally:
        engine.close()
    inputs = dict(zip(description.state_names, _state_inputs(description), strict=True))
    tables = {}
    for name, schema in stored.items():
        if name.rpartition(".")[2] in (CLOCK, TimedOperator.stored_clock):
            continue
        source = inputs.get(name)
        if source is None:
            tables[name] = _Described(schema, len(schema) - (schema.names[-1] == WRITTEN_COLUMN), (name,))
        else:
            tables[name] = _Described(schema, len(source.schema), (name, name.partition(".")[2], source.name))
    return tables


def _state_inputs(description: Description) -> list[Input]:
    """The inputs whose rows the tables of `Description.state_names` have."""
    if isinstance(description, Dataflow):
        return [source for vertex in description.operators for source in vertex.description.inputs]
    return list(description.inputs)


def _table_called(tables: Mapping[str, _Described], name: str | None) -> str:
    """The table of this name, or of an input of this name in whichever operator has it.

    Raises:
        DescriptionError: there is none, or several.
    """
    if name is not None and name in tables:
        return name
    chosen = [table for table, described in tables.items() if name is None or name in described.names]
    if len(chosen) == 1:
        return chosen[0]
    shown = [
        repr(table) if table.rpartition(".")[2] == x.names[-1] or len(x.names) == 1 else f"{table!r} ({x.names[-1]})"
        for table, x in tables.items()
    ]
    asked = "input= names one of them" if name is None else f"input={name!r} names {'several' if chosen else 'none'}"
    raise DescriptionError(f"the state has the tables {', '.join(shown)}: {asked}")


def _as_shown(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A number beside rows in the type in which it is shown."""
    if pa.types.is_string(kind):
        return pa.array(SHORT_STRINGS).take(column.combine_chunks())
    numbers = column.cast(pa.int64())
    return numbers.cast(pa.timestamp("ms", "UTC")).cast(kind) if pa.types.is_timestamp(kind) else numbers.cast(kind)


def _free(name: str, names: Sequence[str]) -> str:
    """A name that no column of the input has, in upper or lower case: with more underscores where one has."""
    taken = {other.lower() for other in names}
    while name.lower() in taken:
        name = f"_{name}"
    return name
