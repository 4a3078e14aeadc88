"""What a state folder holds, for people: ``gpu-join inspect``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

from gpu_ops.bounded import Aggregate, CoGroup, Description, from_json
from gpu_ops.errors import StateError
from gpu_ops.multi import MultiJoin
from gpu_ops.state.durable import PartitionLog, stored_partitions
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest

_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Held:
    """What one partition's part of a state folder holds; rows and changes are None where not counted.

    Attributes:
        partition: its number.
        version: micro-batches that are durable; the last of them may yet be repeated.
        snapshot: version of the newest snapshot, or None.
        snapshot_bytes: its size.
        rows: live rows in it, of each input.
        records: micro-batches logged since the snapshot.
        record_bytes: their size.
        changes: changes in them, both inputs together.
    """

    partition: int
    version: int
    snapshot: int | None
    snapshot_bytes: int
    rows: tuple[int, ...] | None
    records: int
    record_bytes: int
    changes: int | None


def describe(location: str, console: Console, *, rows: bool = True) -> None:
    """Prints whose state a folder holds, and how much of it.

    Args:
        location: a path or URI.
        console: where to print.
        rows: count rows, which reads every file; else names and sizes are enough.

    Raises:
        StateError: no state folder, or a damaged one.
    """
    files = Files.at(location)
    manifest = Manifest.of(files)
    join = from_json(manifest.description)
    content = manifest.content(files)
    held = [read_partition(content, join, partition, rows=rows) for partition in stored_partitions(content)]
    console.print(_inputs(join, manifest))
    console.print(_partitions(held, join, rows=rows))
    empty = manifest.partitions - len(held)
    if empty:
        console.print(f"{empty} of {manifest.partitions} partitions hold nothing yet")


def read_partition(files: Files, join: Description, partition: int, *, rows: bool) -> Held:
    """Reads one partition. Nothing is written or deleted: the query may be running.

    Args:
        files: the state folder.
        join: whose state it is.
        partition: its number.
        rows: whether to count rows and changes.

    Raises:
        StateError: a file is missing or damaged.
    """
    folder = f"p/{partition}"
    for _ in range(_ATTEMPTS - 1):
        sizes = files.sizes(folder)
        try:
            return _read(files, join, partition, sizes, rows=rows)
        except StateError:
            # A running query deletes files when it has put a snapshot in their place; then look again.
            if files.sizes(folder).keys() >= sizes.keys():
                raise
    return _read(files, join, partition, files.sizes(folder), rows=rows)


def _read(files: Files, join: Description, partition: int, sizes: dict[str, int], *, rows: bool) -> Held:
    records, snapshots = (
        {int(name.removesuffix(end)): size for name, size in sizes.items() if name.endswith(end)}
        for end in (".arrow", ".snapshot")
    )
    snapshot = max(snapshots, default=None)
    since = sorted(batch for batch in records if batch >= (snapshot or 0))
    log = PartitionLog(files, partition)
    counts: dict[str, int] = {}
    if rows and snapshot is not None:
        counts = {side: table.num_rows for side, table in log.read_snapshot(snapshot)[0].items()}
    return Held(
        partition=partition,
        version=since[-1] + 1 if since else snapshot or 0,
        snapshot=snapshot,
        snapshot_bytes=snapshots[snapshot] if snapshot is not None else 0,
        rows=tuple(counts.get(side, 0) for side in join.sides) if rows else None,
        records=len(since),
        record_bytes=sum(records[batch] for batch in since),
        changes=sum(log.read_record(batch).table.num_rows for batch in since) if rows else None,
    )


def _inputs(join: Description, manifest: Manifest) -> Table:
    shown = Table(
        title=f"{_title(join)}, emit {join.emit}\nquery {manifest.query_id}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("input", "unique key", "row kind", "TTL", "columns"):
        shown.add_column(heading)
    for source in join.inputs:
        shown.add_row(
            source.name,
            ", ".join(source.unique_key or ()) or "none",
            source.row_kind or "insert-only",
            "none" if source.ttl_ms is None else f"{source.ttl_ms / 1000:,.0f} s",
            ", ".join(f"{field.name} {field.type}" for field in source.schema),
        )
    return shown


def _title(join: Description) -> str:
    if isinstance(join, MultiJoin):
        steps = []
        for source, step in zip(join.inputs[1:], join.steps, strict=True):
            equal = [
                (f"{join.inputs[k.input].name}.{k.column}", k.null_safe, f"{source.name}.{k.own}") for k in step.on
            ]
            steps.append(f"{step.how} join {source.name} on {_condition(equal, step.where)}")
        return f"multi-way join of {join.inputs[0].name}, {', '.join(steps)}"
    if isinstance(join, Aggregate):
        return f"aggregate of {join.source.name} by {', '.join(join.by) or 'nothing'}"
    keys = [(k.left, k.null_safe, k.right) for k in join.keys]
    if isinstance(join, CoGroup):
        return f"co-group on {_condition(keys, None)}"
    return f"{join.how} join on {_condition(keys, join.where)}"


def _condition(keys: list[tuple[str, bool, str]], where: str | None) -> str:
    equal = ", ".join(f"{a} {'<=>' if null_safe else '='} {b}" for a, null_safe, b in keys)
    return (equal or "no equality column") + (f" where {where}" if where is not None else "")


def _partitions(held: list[Held], join: Description, *, rows: bool) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_footer=len(held) > 1)
    columns: list[list[str]] = []

    def column(heading: str, cells: list[str], total: str = "") -> None:
        shown.add_column(heading, justify="right", footer=total, overflow="fold")
        columns.append(cells)

    def numbers(heading: str, values: list[int | None], show: Callable[[int], str] = "{:,}".format) -> None:
        known = [value for value in values if value is not None]
        if known:
            column(heading, [show(value) for value in known], show(sum(known)))

    column("partition", [str(h.partition) for h in held], "all")
    # What is logged are the micro-batches between the snapshot's version and this one.
    column("version", [f"{h.version:,}" for h in held])
    column("snapshot\nversion", ["none" if h.snapshot is None else f"{h.snapshot:,}" for h in held])
    numbers("snapshot\nsize", [h.snapshot_bytes for h in held], readable)
    for number, source in enumerate(join.inputs):
        numbers(f"{source.name}\nrows", [None if h.rows is None else h.rows[number] for h in held])
    numbers("log\nsize", [h.record_bytes for h in held], readable)
    numbers("log\nchanges", [h.changes for h in held])
    for cells in zip(*columns, strict=True):
        shown.add_row(*cells)
    return shown


def readable(size: int) -> str:
    """Bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size} B"
