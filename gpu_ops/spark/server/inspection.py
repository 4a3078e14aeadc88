"""A readable summary of a state folder, for ``gpu-join inspect``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table

from gpu_ops.descriptions.description import Description, as_written
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.display import Tables
from gpu_ops.memory import size_text
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.stored_rows import TableAtVersion, while_running
from gpu_ops.state.address import Location
from gpu_ops.state.durable import PartitionLog, Stored, stored_partitions
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class StoredPartition:
    """The content of one partition in a state folder; rows and changes are None where not counted.

    Attributes:
        partition: the partition's number.
        version: the number of durable micro-batches; the last of them may yet be repeated.
        snapshot: the version of the newest snapshot, or None.
        snapshot_bytes: the snapshot's size, with all pieces.
        rows: live rows of each table at that version: those of the snapshot with the logged changes applied.
        records: the number of micro-batches logged since the snapshot.
        record_bytes: the size of these records.
        changes: the number of changes in them, of all inputs together.
    """

    partition: int
    version: int
    snapshot: int | None
    snapshot_bytes: int
    rows: tuple[int, ...] | None
    records: int
    record_bytes: int
    changes: int | None


def describe(location: Location, console: Console, *, rows: bool = True) -> None:
    """Prints the operator, the inputs and the sizes of a state folder.

    Args:
        location: a path or URI.
        console: the console to print on.
        rows: whether to count rows, which takes reading and replaying every partition.

    Raises:
        StateError: there is no state folder, or it is damaged.
    """
    files = Files.at(location)
    manifest = Manifest.of(files)
    description = from_json(manifest.description)
    numbers = stored_partitions(manifest.content(files))
    held = [read_partition(files, manifest, partition, rows=rows) for partition in numbers]
    console.print(_inputs(description, manifest))
    console.print(_partitions(held, description, rows=rows))
    empty = manifest.partitions - len(held)
    if empty:
        console.print(f"{empty} of {manifest.partitions} partitions hold nothing yet")


def show_rows(location: Location, console: Console, name: str, *, version: int | None, limit: int) -> None:
    """Prints rows that a state folder has of one input.

    Args:
        location: a path or URI.
        console: the console to print on.
        name: the input's name.
        version: as of `TableAtVersion.of`.
        limit: the greatest number of rows.

    Raises:
        StateError: there is no state folder, it is damaged, or does not have this version.
        DescriptionError: it has no such input.
    """
    stored = TableAtVersion.of(location, name, version)
    batches, count = [], 0
    for partition in range(stored.partitions):
        for batch in stored.read(partition):
            batches.append(batch.slice(0, max(0, limit - count)))
            count += batch.num_rows
    rows = pa.Table.from_batches(batches, stored.schema)
    console.print(str(Tables({f"{stored.name}, version {stored.version}": rows})), markup=False, soft_wrap=True)
    if count > len(rows):
        console.print(f"{len(rows):,} of {count:,} rows")


def read_partition(files: Files, manifest: Manifest, partition: int, *, rows: bool) -> StoredPartition:
    """Reads one partition without writing or deleting anything, as the query may be running.

    Args:
        files: the state folder.
        manifest: the folder's manifest.
        partition: the partition's number.
        rows: whether to count rows and changes.

    Raises:
        StateError: a file is missing or damaged.
    """
    log = PartitionLog(files, manifest, partition)
    return while_running(log, lambda stored: _read(files, manifest, log, stored, partition, rows=rows))


def _read(
    files: Files, manifest: Manifest, log: PartitionLog, stored: Stored, partition: int, *, rows: bool
) -> StoredPartition:
    records, snapshots = stored.records, stored.snapshots
    snapshot = max(snapshots, default=None)
    since = sorted(batch for batch in records if batch >= (snapshot or 0))
    version = since[-1] + 1 if since else snapshot or 0
    return StoredPartition(
        partition=partition,
        version=version,
        snapshot=snapshot,
        snapshot_bytes=snapshots[snapshot] + sum(stored.pieces.values()) if snapshot is not None else 0,
        rows=stored_state(files, manifest, partition).rows_at(version) if rows else None,
        records=len(since),
        record_bytes=sum(records[batch] for batch in since),
        changes=sum(log.read_record(batch).table.num_rows for batch in since) if rows else None,
    )


def _inputs(description: Description, manifest: Manifest) -> Table:
    title = as_written(description.title, [source.name for source in description.inputs])
    table = Table(
        title=f"{title}, emit {description.emit}\nquery {manifest.query_id}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("input", "unique key", "row kind", "TTL", "columns"):
        table.add_column(heading)
    for source in description.inputs:
        table.add_row(
            source.name,
            as_written(", ".join(source.unique_key or ()), [source.name]) or "none",
            source.row_kind or "insert-only",
            "none" if source.ttl_ms is None else f"{source.ttl_ms / 1000:,.0f} s",
            ", ".join(f"{as_written(field.name, [source.name])} {field.type}" for field in source.schema),
        )
    return table


def _partitions(held: list[StoredPartition], description: Description, *, rows: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_footer=len(held) > 1)
    columns: list[list[str]] = []

    def column(heading: str, cells: list[str], total: str = "") -> None:
        table.add_column(heading, justify="right", footer=total, overflow="fold")
        columns.append(cells)

    def numbers(heading: str, values: list[int | None], show: Callable[[int], str] = "{:,}".format) -> None:
        known = [value for value in values if value is not None]
        if known:
            column(heading, [show(value) for value in known], show(sum(known)))

    column("partition", [str(h.partition) for h in held], "all")
    # What is logged are the micro-batches between the snapshot's version and this one.
    column("version", [f"{h.version:,}" for h in held])
    column("snapshot\nversion", ["none" if h.snapshot is None else f"{h.snapshot:,}" for h in held])
    numbers("snapshot\nsize", [h.snapshot_bytes for h in held], size_text)
    for number, name in enumerate(description.state_names):
        numbers(f"{name}\nrows", [None if h.rows is None else h.rows[number] for h in held])
    numbers("log\nsize", [h.record_bytes for h in held], size_text)
    numbers("log\nchanges", [h.changes for h in held])
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    return table
