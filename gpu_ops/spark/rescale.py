"""A state folder cut into another number of partitions.

Each live row goes to the partition that its key's hash names now, with what stands beside it (association counts are
of rows with the same key, so they hold), and so does each change of the last micro-batch, which Spark may repeat.
The new partitions are written beside the old ones; the manifest that names them is replaced in one go, and only then
are the old ones deleted. So whatever interrupts it leaves one or the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.bounded import Description
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.spark.command import Wire, parse_join
from gpu_ops.spark.murmur import spark_hash
from gpu_ops.spark.packing import partition_of
from gpu_ops.spark.partition import Held, stored_state
from gpu_ops.spark.recovery import stored_version
from gpu_ops.state.address import Location
from gpu_ops.state.durable import PartitionLog, Record
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FORMAT, MANIFEST, SPARK, Manifest, check_open
from gpu_ops.state.times import NO_TIMES, Times

_TIME: Final = "time"
_EARLIEST: Final = ("left_cleaned", "right_cleaned")


class Rescaled(NamedTuple):
    """What was done.

    Attributes:
        before: how many partitions there were.
        after: how many there are.
        version: micro-batches that the state holds.
        rows: live rows of each new partition, all inputs together, before the last micro-batch.
    """

    before: int
    after: int
    version: int
    rows: tuple[int, ...]


def rescale(state: Location, partitions: int) -> Rescaled:
    """Cuts a state folder into another number of partitions; its query must be stopped.

    The query goes on from its checkpoint, and finds the new number by itself unless it says ``partitions=``. All of the
    state goes through this process's memory.

    Args:
        state: the folder.
        partitions: how many.

    Raises:
        StateError: no state folder, a finished one, or one whose partitions hold different versions.
        DescriptionError: fewer than one partition, or a join that has to have one.
        NotBuiltError: keys of a type whose hash is not built here.
    """
    files = Files.at(state)
    manifest = Manifest.of(files)
    check_open(files)
    join = parse_join(manifest.description)
    if partitions < 1:
        raise DescriptionError(f"partitions={partitions}; there is at least one")
    if partitions > 1 and not join.shuffled_by:
        raise DescriptionError("this join has one partition: no equality column that rows could be distributed by")
    version = stored_version(files, manifest)
    new = dataclasses.replace(manifest, partitions=partitions, generation=manifest.generation + 1, format=FORMAT)
    new.content(files).delete_folder("p")  # of an attempt that was interrupted
    rows = _write(files, manifest, new, version) if version else (0,) * partitions
    files.write(MANIFEST, lambda file: file.write(new.to_json().encode()))
    files.delete_folder(f"g{manifest.generation}" if manifest.generation else "p")
    return Rescaled(manifest.partitions, partitions, version, rows)


def _write(files: Files, manifest: Manifest, new: Manifest, version: int) -> tuple[int, ...]:
    """Writes the new partitions: the state before the last micro-batch, and its record; gives their rows."""
    join = parse_join(manifest.description)
    last, goes = version - 1, _Goes(join, new.distribution, new.partitions)
    numbers = range(manifest.partitions)
    held = [stored_state(files, manifest, partition).held_at(last) for partition in numbers]
    records = [PartitionLog(files, manifest, partition).read_record(last) for partition in numbers]
    tables, changes = _cut_state(join, held, goes), _cut_changes(join, records, goes)
    known = functools.reduce(Times.later, (part.times for part in held), NO_TIMES)
    then = functools.reduce(Times.later, (record.times for record in records), NO_TIMES)
    for partition in range(new.partitions):
        log = PartitionLog(files, new, partition)
        if last:
            clock_ms = max(part.clock_ms for part in held)
            log.write_snapshot(last, tables[partition], clock_ms, known, backlog=held[0].backlog)
        log.write_record(last, dataclasses.replace(records[0], table=changes[partition], times=then))
    return tuple(sum(len(part[side]) for side in join.sides) if last else 0 for part in tables)


class _Goes(NamedTuple):
    """Which of the new partitions a row goes to."""

    join: Description
    distribution: str
    partitions: int

    def to(self, columns: Sequence[pa.ChunkedArray], rows: int) -> npt.NDArray[np.int64]:
        """The partition of each row, by the columns that its input is distributed by."""
        keys = []
        for by, column in zip(self.join.shuffled_by, columns, strict=True):
            values = column if column.type == by.type else column.cast(by.type)
            keys.append(pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], by.type))
        if self.distribution == SPARK:
            return spark_hash(keys, rows).astype(np.int64) % self.partitions
        return partition_of(keys, rows, self.partitions).astype(np.int64)


def _cut_state(join: Description, held: Sequence[Held], goes: _Goes) -> list[dict[str, pa.Table]]:
    """The live rows of each new partition, by input; what an interval join knows of time goes to all."""
    made: list[dict[str, pa.Table]] = [{} for _ in range(goes.partitions)]
    for number, side in enumerate(join.sides):
        whole = pa.concat_tables([part.tables[side] for part in held])
        # by place, as behind the input's columns stands what may have their names
        place = join.inputs[number].schema.get_field_index
        target = goes.to([whole.column(place(by.columns[number])) for by in join.shuffled_by], len(whole))
        for partition, tables in enumerate(made):
            tables[side] = whole.take(pa.array(np.flatnonzero(target == partition)))
    if _TIME not in join.sides and all(_TIME in part.tables for part in held):
        facts = [part.tables[_TIME].to_pylist()[0] for part in held]
        told = {name: _together(name, [fact[name] for fact in facts]) for name in facts[0]}
        for tables in made:
            tables[_TIME] = pa.table({name: pa.array([value], pa.int64()) for name, value in told.items()})
    return made


def _together(name: str, values: Sequence[int | None]) -> int | None:
    """A time that several partitions know as one: the latest, but of what is cleaned up what all have cleaned up."""
    there = [value for value in values if value is not None]
    return (min if name in _EARLIEST else max)(there) if there else None


def _cut_changes(join: Description, records: Sequence[Record], goes: _Goes) -> list[pa.Table]:
    """The last micro-batch's changes of each new partition, numbered anew: old partitions may have equal numbers.

    Raises:
        StateError: old partitions got theirs from different queries.
    """
    if any(record.wire != records[0].wire for record in records):
        raise StateError("the partitions' last micro-batch came from different plans: run the query once more first")
    wire = Wire.from_json(records[0].wire)
    whole = pa.concat_tables([record.table for record in records])
    side, target = whole[wire.side].to_numpy(), np.zeros(len(whole), np.int64)
    for number in range(len(join.inputs)):
        rows = np.flatnonzero(side == number)
        lanes = [next(x[-1] for x in wire.lanes if x[number] == by.columns[number]) for by in join.shuffled_by]
        target[rows] = goes.to([whole[str(lane)].take(pa.array(rows)) for lane in lanes], rows.size)
    sequence = np.argsort(whole[wire.order].to_numpy(), kind="stable")
    rank = np.empty(sequence.size, np.int64)
    rank[sequence] = np.arange(sequence.size)
    place = whole.schema.get_field_index(wire.order)
    whole = whole.set_column(place, whole.schema.field(place), pa.array(rank))
    return [whole.take(pa.array(np.flatnonzero(target == partition))) for partition in range(goes.partitions)]
