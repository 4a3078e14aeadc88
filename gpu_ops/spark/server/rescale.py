"""Repartitions a state folder into another number of partitions.

Each live row goes to the partition that its key's hash names now, with its association counts (which are of rows with
the same key, so they hold), and so does each change of the last micro-batch, which Spark may repeat.
The new partitions are written beside the old ones, and the manifest that names them is replaced in one go. The old ones
stay until a micro-batch of the new ones is final; then the query deletes them.

The states of upsert inputs that are made retractions first, in the join's folder, are cut after it in the same way.

The query should be stopped. Where it runs, either it or this is refused, and no row is lost or doubled:

1. The folder's content is noted, and the new partitions are written, which may take long.
2. The manifest is sealed: whoever reads it from now on applies no micro-batch.
3. The content is compared. If it has changed, the seal is taken off and all is as before.
4. The manifest of the new partitions takes the place of the old one.

A state server answers a micro-batch after its record is written and the manifest found as it was before. So a
micro-batch was either written before the seal, and is seen in step 3, or is not answered: its query fails, and goes on
from its checkpoint. An interruption between the seal and the end leaves a sealed folder; to call this again goes on
from there.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops import operators
from gpu_ops.backends import make_kernels
from gpu_ops.descriptions.changelog import RETRACTIONS, SPELLINGS, kinds_as_text
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.keys import Shuffle
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.memory import Budget, Memory
from gpu_ops.operators.dataflow import CLOCK
from gpu_ops.operators.operator import Cut
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.recovery import RecoveredState, stored_version
from gpu_ops.spark.wire.command import Wire, parse_join
from gpu_ops.spark.wire.hashes import partition_of
from gpu_ops.state.address import Location
from gpu_ops.state.durable import NO_TIMES, PartitionLog, Record, Stored, Times
from gpu_ops.state.files import Files, Stamp
from gpu_ops.state.manifest import ARROW, FORMAT, LATEST, MANIFEST, Manifest, check_open
from gpu_ops.state.pieces import (
    PIECE_BYTES,
    STATUS_COLUMN,
    WHOLE_BYTES,
    Flush,
    Piece,
    RowNumbers,
    Storable,
    WrittenTable,
    whole,
)
from gpu_ops.state.table import put_behind

_TIME: Final = "time"
_EARLIEST: Final = ("left_cleaned", "right_cleaned")
_AT_ONCE: Final = 1 << 18
"""The number of rows that are repartitioned at a time."""
_WAITING: Final = 128 << 20
"""Bytes of rows that are collected before they become pieces of at least `_LEAST` bytes."""
_LEAST: Final = 8 << 20


class Rescaled(NamedTuple):
    """The result of `rescale`.

    Attributes:
        before: the old number of partitions.
        after: the new number of partitions.
        version: the number of micro-batches that the state holds.
        rows: live rows of each new partition, all inputs together, before the last micro-batch.
    """

    before: int
    after: int
    version: int
    rows: tuple[int, ...]


def rescale(
    state: Location,
    partitions: int,
    progress: Callable[[str], object] = lambda _: None,
    *,
    budget: Budget | None = None,
) -> Rescaled:
    """Repartitions a state folder into another number of partitions; its query should be stopped.

    Beside a running query either this or the query is refused, and the query can be started again. It goes on from its
    checkpoint, and finds the new number by itself unless it says ``partitions=``. One old partition after the other
    is taken into this process's memory; of groups, all of them.

    Args:
        state: the folder.
        partitions: the new number of partitions.
        progress: called with a line of text as it goes on: the share done, and the time left.
        budget: the memory that a partition's state may take; None for all there is.

    Raises:
        StateError: there is no state folder, it is finished, its partitions hold different versions, or its query runs.
        DescriptionError: fewer than one partition, or more than one for a join that has to have one.
    """
    files = Files.at(state)
    manifest = Manifest.of(files)
    check_open(files)
    description = parse_join(manifest.description)
    if partitions < 1:
        raise DescriptionError(f"partitions={partitions}; there is at least one")
    if partitions > 1 and isinstance(description, Dataflow) and not description.shuffled_by:
        raise DescriptionError(
            f"{len(description.operators)} operators share this folder's one engine, which has one partition, as their "
            "keys are not the same. For more begin anew: partitions= of the query, a new folder and a new checkpoint"
        )
    if partitions > 1 and not description.shuffled_by:
        raise DescriptionError("this join has one partition: no equality column that rows could be distributed by")
    seen = _seen(files, manifest)
    new = dataclasses.replace(
        manifest, partitions=partitions, distribution=ARROW, generation=manifest.generation + 1,
        format=max(FORMAT, manifest.format),
        sealed=None,
    )  # fmt: skip
    take = functools.partial(_take_all, files, manifest, budget, progress)
    new.content(files).delete_folder("p")  # of an attempt that was interrupted
    try:
        rows = _write(files, manifest, new, seen, take) if seen.version else (0,) * partitions
    except StateError as error:
        if _moved(files, manifest, seen):
            raise _in_use(files) from error
        raise
    _replace(files, manifest, new, seen)
    for name in files.folders(LATEST):  # each finds its number by itself, so that an interruption here does no harm
        rescale(files.address.below(LATEST).below(name), partitions, progress, budget=budget)
    return Rescaled(manifest.partitions, partitions, seen.version, rows)


class _Seen(NamedTuple):
    """The content of a state folder: number of micro-batches, each partition's files and last record's stamp."""

    version: int
    stored: tuple[Stored, ...]
    stamps: tuple[Stamp | None, ...]


def _seen(files: Files, manifest: Manifest) -> _Seen:
    version = stored_version(files, manifest)
    logs = [PartitionLog(files, manifest, partition) for partition in range(manifest.partitions)]
    stamps = tuple(log.record_stamp(version - 1) if version else None for log in logs)
    return _Seen(version, tuple(log.stored(clean=False) for log in logs), stamps)


def _moved(files: Files, manifest: Manifest, seen: _Seen) -> bool:
    """True if the folder's content has changed."""
    try:
        return _seen(files, manifest) != seen
    except StateError:  # in the middle of a micro-batch
        return True


def _in_use(files: Files) -> StateError:
    return StateError(
        f"the query of state folder {files.location} is running: it went on while the folder was cut anew. Nothing is "
        "changed: stop the query, and run this again"
    )


def _replace(files: Files, manifest: Manifest, new: Manifest, seen: _Seen) -> None:
    """Puts the new partitions in place of the old ones, unless a micro-batch was applied to these meanwhile.

    Raises:
        StateError: one was, or the input has been ended; the folder is unchanged.
    """
    sealed = dataclasses.replace(manifest, sealed=uuid.uuid4().hex)
    _put(files, sealed)
    then = dataclasses.replace(manifest, sealed=None)
    try:
        check_open(files)
        if not _moved(files, manifest, seen):
            then = new
    finally:
        if Manifest.of(files) != sealed:
            raise StateError(f"state folder {files.location} is being cut anew by another gpu-join rescale")
        _put(files, then)
    if then is not new:
        raise _in_use(files)


def _put(files: Files, manifest: Manifest) -> None:
    files.write(MANIFEST, lambda file: file.write(manifest.to_json().encode()))


def _write(
    files: Files, manifest: Manifest, new: Manifest, seen: _Seen, take: Callable[[_CutState], object]
) -> tuple[int, ...]:
    """Writes the new partitions (the state before the last micro-batch, and its record) and returns their rows.

    A snapshot after the last micro-batch proves that Spark does not repeat it; then that version is written.

    Args:
        files: the folder.
        manifest: the old manifest.
        new: the new manifest.
        seen: the folder's content.
        take: called with the new state, to which it passes that of all old partitions.
    """
    description = parse_join(manifest.description)
    version = seen.version
    final = any(version in stored.snapshots for stored in seen.stored)
    at, numbers = version if final else version - 1, range(manifest.partitions)
    logs = [PartitionLog(files, new, partition) for partition in range(new.partitions)]
    rows = [0] * new.partitions
    if at:
        state = _CutState(description, logs, at)
        take(state)
        rows = state.write()
    if not final:
        records = [PartitionLog(files, manifest, partition).read_record(at) for partition in numbers]
        then = functools.reduce(Times.later, (record.times for record in records), NO_TIMES)
        goes = _Goes(description.shuffled_by, new.partitions)
        for log, table in zip(logs, _cut_changes(description, records, goes), strict=True):
            log.write_record(at, dataclasses.replace(records[0], table=table, times=then))
    return tuple(rows)


def _take_all(
    files: Files, manifest: Manifest, budget: Budget | None, progress: Callable[[str], object], state: _CutState
) -> None:
    """Passes the state of each old partition to the new state, one after the other."""
    began, total = time.perf_counter(), manifest.partitions
    for done in range(1, total + 1):
        with stored_state(files, manifest, done - 1, budget).held_at(state.version) as held:
            state.take(held)
        left = (time.perf_counter() - began) / done * (total - done)
        progress(f"{files.location}: cut partition {done} of {total}, about {left:.0f} s are left")


class _Goes(NamedTuple):
    """Assigns rows of an operator's inputs to the new partitions."""

    shuffled_by: tuple[Shuffle, ...]
    partitions: int

    def rows(self, table: pa.Table, number: int) -> npt.NDArray[np.int64]:
        """The new partition of each row of a table that begins with an input's columns, or with its group columns."""
        # by position, as behind the input's columns stands what may have their names
        position = table.schema.names.index
        return self.to([table.column(position(by.columns[number])) for by in self.shuffled_by], len(table))

    def to(self, columns: Sequence[pa.ChunkedArray], rows: int) -> npt.NDArray[np.int64]:
        """The new partition of each row, by the columns that its input is distributed by."""
        keys = []
        for by, column in zip(self.shuffled_by, columns, strict=True):
            values = column if column.type == by.type else column.cast(by.type)
            keys.append(pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], by.type))
        return partition_of(keys, rows, self.partitions).astype(np.int64)


class _Rows:
    """The rows of one input in one new partition, of which a piece is written whenever there are enough.

    Args:
        log: the partition's files.
        version: the version of the snapshot that they are for.
        name: the input's name.
        enough: the size of a piece in bytes.
    """

    def __init__(self, log: PartitionLog, version: int, name: str, enough: int) -> None:
        self._log, self._version, self._name, self._enough = log, version, name, enough
        self._waiting: list[tuple[pa.Table, RowNumbers]] = []
        self._nbytes, self._written = 0, list[WrittenTable]()
        self._of: Storable | None = None
        self.count = 0

    def add(self, rows: pa.Table, numbers: RowNumbers, of: Storable) -> None:
        """Adds rows of an old partition's table, in the order that they have in the new one."""
        self._waiting.append((rows, numbers))
        self._of = of
        self.count += len(rows)
        self._nbytes += rows.nbytes
        if self._nbytes >= self._enough:
            self._flush()

    def stored(self) -> pa.Table | WrittenTable:
        """The rows as a snapshot has them: a table where there are few, or the written pieces."""
        if not self._written and self._nbytes <= min(WHOLE_BYTES, self._enough):
            return put_behind(*self._together())
        if self._waiting:
            self._flush()
        numbers = pa.concat_tables([written.numbers for written in self._written])
        pieces = tuple(piece for written in self._written for piece in written.pieces)
        return self._written[0]._replace(numbers=numbers, pieces=pieces)

    def _together(self) -> tuple[pa.Table, RowNumbers]:
        names = self._waiting[0][1]
        numbers = {name: np.concatenate([by_name[name] for _, by_name in self._waiting]) for name in names}
        return pa.concat_tables([rows for rows, _ in self._waiting]), numbers

    def _flush(self) -> None:
        rows, numbers = self._together()
        self._waiting, self._nbytes = [], 0
        if len(rows):
            numbers = {STATUS_COLUMN: np.ones(len(rows), np.int8), **numbers}
            assert self._of is not None
            assert not isinstance(self._of, pa.Table)  # such a one has no rows
            flush = Flush((Piece(None, len(rows), rows.nbytes),), rows, numbers, self._of.entries_of)
            self._written.append(self._log.write_pieces(self._version, self._name, flush, PIECE_BYTES)[0])


class _CutState:
    """The state of the new partitions, filled from the old ones one after the other: that of each operator.

    Times go to all partitions.

    Args:
        description: the description.
        logs: the files of the new partitions.
        version: the version of the state.
    """

    def __init__(self, description: Description, logs: Sequence[PartitionLog], version: int) -> None:
        self._logs, self.version = logs, version
        inputs = len(logs) * len(description.state_names)
        self._waiting_bytes = min(PIECE_BYTES, max(_LEAST, _WAITING // inputs))
        if isinstance(description, Dataflow):
            self._operators = {
                f"{v.name}.": self._operator(f"{v.name}.", v.description, description.shuffles_of(v))
                for v in description.operators
            }
        else:
            self._operators = {"": self._operator("", description, description.shuffled_by)}
        self._clock_ms, self._times, self._backlog = 0, NO_TIMES, False

    def _operator(self, prefix: str, description: Description, by: tuple[Shuffle, ...]) -> _CutOperator:
        rows = {
            side: [_Rows(log, self.version, f"{prefix}{side}", self._waiting_bytes) for log in self._logs]
            for side in description.sides
        }
        return _CutOperator(description, rows, _Goes(by, len(self._logs)))

    def take(self, held: RecoveredState) -> None:
        """Adds the live rows of an old partition, and its other tables."""
        self._clock_ms = max(self._clock_ms, held.clock_ms)
        self._times, self._backlog = self._times.later(held.times), held.backlog
        for prefix, operator in self._operators.items():
            own = {name: table for name, table in held.tables.items() if name.startswith(prefix)}
            operator.take({name.removeprefix(prefix): table for name, table in own.items()})

    def write(self) -> list[int]:
        """Writes the snapshots and returns the number of rows of each.

        Raises:
            NotBuiltError: an operator has a table that cannot be repartitioned.
        """
        clock = {} if "" in self._operators else {CLOCK: pa.table({CLOCK: pa.array([self._clock_ms], pa.int64())})}
        cut = {prefix: operator.cut() for prefix, operator in self._operators.items()}
        for number, log in enumerate(self._logs):
            tables = {f"{prefix}{name}": table for prefix, by in cut.items() for name, table in by[number].items()}
            log.write_snapshot(self.version, tables | clock, self._clock_ms, self._times, backlog=self._backlog)
        return [
            sum(operator.rows(number) for operator in self._operators.values()) for number in range(len(self._logs))
        ]


class _CutOperator:
    """The state of one operator in the new partitions.

    The rows of inputs are written as they come. An operator's other tables, such as groups, are kept in memory to the
    end, as their rows may refer to each other by position.

    Args:
        description: of the operator.
        rows: for each input, by its name in metrics, what is in each of the new partitions.
        goes: assigns rows to the new partitions.
    """

    def __init__(self, description: Description, rows: Mapping[str, Sequence[_Rows]], goes: _Goes) -> None:
        self._description, self._rows, self._goes = description, rows, goes
        self._targets: dict[str, list[npt.NDArray[np.int64]]] = {side: [] for side in rows}
        self._rest: list[dict[str, pa.Table]] = []

    def rows(self, partition: int) -> int:
        """The number of live rows of a new partition, of all inputs together."""
        return sum(rows[partition].count for rows in self._rows.values())

    def take(self, held: Mapping[str, Any]) -> None:
        """Adds the live rows of an old partition, and its other tables."""
        self._rest.append(whole({name: table for name, table in held.items() if name not in self._rows}))
        for number, side in enumerate(self._rows):
            table, targets = held[side], []
            parts = [(table, {})] if isinstance(table, pa.Table) else table.snapshot_parts(_AT_ONCE)
            for rows, numbers in parts:
                targets.append(self._goes.rows(rows, number))
                for partition, waiting in enumerate(self._rows[side]):
                    chosen = np.flatnonzero(targets[-1] == partition)
                    waiting.add(rows.take(pa.array(chosen)), {name: x[chosen] for name, x in numbers.items()}, table)
            self._targets[side].append(np.concatenate(targets))

    def cut(self) -> list[dict[str, pa.Table | WrittenTable]]:
        """The tables of each new partition.

        Raises:
            NotBuiltError: there is a table that cannot be repartitioned.
        """
        stored = [{side: rows[n].stored() for side, rows in self._rows.items()} for n in range(self._goes.partitions)]
        return [rows | rest for rows, rest in zip(stored, self._cut_rest(), strict=True)]

    def _cut_rest(self) -> Cut:
        cut: Cut = [{} for _ in range(self._goes.partitions)]
        if any(tables.keys() - {_TIME} for tables in self._rest):
            kernels, _ = make_kernels("cpu")
            operator = operators.make(self._description, kernels, Memory(kernels, None))
            parts = [{name: table for name, table in tables.items() if name != _TIME} for tables in self._rest]
            targets = list(self._targets.values())
            cut = operator.cut(parts, targets, lambda table: self._goes.rows(table, 0), self._goes.partitions)
        if all(_TIME in tables for tables in self._rest):
            facts = [tables[_TIME].to_pylist()[0] for tables in self._rest]
            merged = {name: _latest(name, [fact[name] for fact in facts]) for name in facts[0]}
            for tables in cut:
                tables[_TIME] = pa.table({name: pa.array([value], pa.int64()) for name, value in merged.items()})
        return cut


def _latest(name: str, values: Sequence[int | None]) -> int | None:
    """Merges a time of several partitions: the latest one; for clean-up times the one that all have reached."""
    known = [value for value in values if value is not None]
    return (min if name in _EARLIEST else max)(known) if known else None


def _cut_changes(description: Description, records: Sequence[Record], goes: _Goes) -> list[pa.Table]:
    """The last micro-batch's changes of each new partition, renumbered as old partitions may have equal numbers.

    Raises:
        StateError: the changes of old partitions came from different queries.
    """
    if any(one.wire != records[0].wire or one.table.schema != records[0].table.schema for one in records):
        raise StateError("the partitions' last micro-batch came from different plans: run the query once more first")
    wire = Wire.from_json(records[0].wire)
    whole = pa.concat_tables([_net(description, wire, record.table) for record in records])
    side, target = whole[wire.side].to_numpy(), np.zeros(len(whole), np.int64)
    for number in range(len(description.inputs)):
        rows = np.flatnonzero(side == number)
        keys = [wire.union_column(number, by.columns[number]) for by in description.shuffled_by]
        target[rows] = goes.to([whole[key].take(pa.array(rows)) for key in keys], rows.size)
    order = np.lexsort((whole[wire.sequence].to_numpy(), _brings(description, wire, whole)))
    sequence = np.empty(order.size, np.int64)
    sequence[order] = np.arange(order.size)
    column = whole.schema.get_field_index(wire.sequence)
    whole = whole.set_column(column, whole.schema.field(column), pa.array(sequence))
    return [whole.take(pa.array(np.flatnonzero(target == partition))) for partition in range(goes.partitions)]


def _moving(description: Description) -> list[int]:
    """The inputs whose rows may move between partitions: their unique key does not contain the distribution columns.

    The order of a key's changes in different partitions is not known. But the first change in a partition tells whether
    the row was there, and the last whether it is there, which holds in one partition at most. So first and last changes
    are enough, with retractions first.
    """
    return [
        number
        for number, source in enumerate(description.inputs)
        if source.row_kind is not None
        and source.unique_key is not None
        and source.sequence_by is None
        and not {by.columns[number] for by in description.shuffled_by} <= set(source.unique_key)
    ]


def _kinds(
    description: Description, wire: Wire, changes: pa.Table, number: int
) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """The positions and row kinds of an input's changes, without rows of other kinds."""
    kind = description.inputs[number].row_kind
    rows = np.flatnonzero(changes[wire.side].to_numpy() == number)
    kinds = kinds_as_text(changes[wire.union_column(number, kind)].take(pa.array(rows)))
    known = pc.is_in(kinds, value_set=pa.array(SPELLINGS))
    return rows[known.to_numpy(zero_copy_only=False)], kinds.filter(known)


def _brings(description: Description, wire: Wire, changes: pa.Table) -> npt.NDArray[np.bool_]:
    """A mask of the changes that add a row of an input whose rows may move."""
    brings = np.zeros(len(changes), bool)
    for number in _moving(description):
        rows, kinds = _kinds(description, wire, changes, number)
        brings[rows] = ~pc.is_in(kinds, value_set=pa.array(RETRACTIONS)).to_numpy(zero_copy_only=False)
    return brings


def _net(description: Description, wire: Wire, changes: pa.Table) -> pa.Table:
    """A partition's changes without rows that come and go within it, of inputs whose rows may move."""
    brings, keep = _brings(description, wire, changes), np.ones(len(changes), bool)
    for number in _moving(description):
        rows, _ = _kinds(description, wire, changes, number)
        rows = rows[np.argsort(changes[wire.sequence].to_numpy()[rows], kind="stable")]
        unique = description.inputs[number].unique_key or ()
        names = [str(n) for n in range(len(unique))]
        columns = [changes[wire.union_column(number, column)].take(pa.array(rows)) for column in unique]
        keyed = pa.table([*columns, pa.array(np.arange(rows.size))], [*names, "at"])
        ends = keyed.group_by(names).aggregate([("at", "min"), ("at", "max")])
        first, last = rows[ends["at_min"].to_numpy()], rows[ends["at_max"].to_numpy()]
        keep[rows] = False
        keep[first[~brings[first]]] = True
        keep[last[brings[last]]] = True
    return changes if keep.all() else changes.filter(pa.array(keep))
