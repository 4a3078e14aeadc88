"""A state folder: per partition a log of micro-batches and snapshots that compact it.

Layout::

    manifest.json                       see `gpu_ops.state.manifest`
    p/<partition>/<batch>.arrow         the input of a micro-batch, as it came
    p/<partition>/<version>.snapshot    the state after micro-batches 0 .. version - 1

Both numbers have 20 digits. A record is an Arrow IPC stream; a snapshot is one stream per input, one
after the other. Each file ends with a trailer: magic, length and CRC-32 of what is before it. (The IPC
stream ends before that, so any Arrow reader opens these files.)

Log records lie uncompressed on local disks, where LZ4 costs more time than it saves, and compressed
elsewhere; snapshots are always compressed.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import zlib
from collections.abc import Mapping
from typing import IO, Final

import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.state.files import TEMPORARY, Files, Stamp, as_sink
from gpu_ops.state.manifest import Manifest, ensure
from gpu_ops.state.times import NO_TIMES, Times

_TRAILER: Final = struct.Struct("<8sQI")
_MAGIC: Final = b"GPUJOIN1"
_RECORD: Final = re.compile(r"(\d{20})\.arrow")
_SNAPSHOT: Final = re.compile(r"(\d{20})\.snapshot")
_META: Final = b"gpu_join."
_BACKLOG: Final = "backlog"
_ROWS_PER_BATCH: Final = 1 << 16


@dataclasses.dataclass(frozen=True)
class Record:
    """The input of one micro-batch of one partition.

    Attributes:
        table: the wire batches: side, order, lanes.
        clock_ms: the time the micro-batch was applied at.
        wire: how the lanes map to the inputs' columns, JSON.
        times: what an interval join by event time knows after it.
        backlog: whether it was backlog, and all before it.
    """

    table: pa.Table
    clock_ms: int
    wire: str
    times: Times = NO_TIMES
    backlog: bool = False


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a partition's folder holds: sizes in bytes of records by batch, of snapshots by version."""

    records: dict[int, int]
    snapshots: dict[int, int]


def open_folder(location: str | Files, manifest: Manifest, *, create: bool) -> Files | None:
    """Opens a state folder.

    Args:
        location: a path or URI.
        manifest: what the folder must belong to.
        create: whether an empty folder is given the manifest; if not, it counts as no state.

    Returns:
        The files of its partitions, or None when there is nothing and ``create`` is false.

    Raises:
        StateError: the folder belongs to another query or join, or cannot be read.
    """
    files = location if isinstance(location, Files) else Files.at(location)
    found = ensure(files, manifest, create=create)
    return None if found is None else found.content(files)


def stored_partitions(files: Files) -> list[int]:
    """The partitions a state folder holds anything of."""
    return sorted(int(name) for name in files.folders("p") if name.isdecimal())


class PartitionLog:
    """One partition's part of a state folder.

    Args:
        files: the folder.
        partition: its number.
    """

    def __init__(self, files: Files, partition: int) -> None:
        self._files = files
        self._folder = f"p/{partition}"
        self._record_compression = None if files.local else "lz4"

    @property
    def name(self) -> str:
        """The partition's folder, for errors."""
        return self._files.name(self._folder)

    def record_name(self, batch_id: int) -> str:
        """A record's file, for errors."""
        return self._files.name(self._record_path(batch_id))

    def stored(self, *, clean: bool = True) -> Stored:
        """What is there.

        Args:
            clean: delete leftovers of writes that a crash cut short; for the owner of the partition only,
                as they look like writes in progress.

        Raises:
            StateError: the folder cannot be listed.
        """
        names = self._files.sizes(self._folder)
        records, snapshots = (
            {int(found[1]): size for name, size in names.items() if (found := pattern.fullmatch(name))}
            for pattern in (_RECORD, _SNAPSHOT)
        )
        if clean:
            self._files.delete(f"{self._folder}/{name}" for name in names if name.endswith(TEMPORARY))
        return Stored(records, snapshots)

    def write_record(self, batch_id: int, record: Record) -> Stamp:
        """Writes the record of a micro-batch, or replaces it. Durable on return.

        Returns:
            The file's stamp.

        Raises:
            StateError: it cannot be written; an older record of the batch is as it was.
        """
        facts = {"batch_id": str(batch_id), "clock_ms": str(record.clock_ms), "wire": record.wire}
        facts |= record.times.to_facts() | _backlog(record.backlog)
        path = self._record_path(batch_id)
        _write(self._files, path, [(record.table, facts)], self._record_compression)
        stamp = self._files.stamp(path)
        if stamp is None:
            raise StateError(f"{self._files.name(path)} was written and is gone")
        return stamp

    def record_stamp(self, batch_id: int) -> Stamp | None:
        """The stamp of a batch's record, or None when there is none."""
        return self._files.stamp(self._record_path(batch_id))

    def read_record(self, batch_id: int) -> Record:
        """The record of a micro-batch.

        Raises:
            StateError: it is missing, cut short or damaged.
        """
        path = self._record_path(batch_id)
        ((table, facts),) = _read(self._files, path)
        if facts.get("batch_id") != str(batch_id):
            raise StateError(f"{self._files.name(path)} is the record of batch {facts.get('batch_id')}")
        return Record(table, int(facts["clock_ms"]), facts["wire"], Times.from_facts(facts), _BACKLOG in facts)

    def record_times(self, batch_id: int) -> Times | None:
        """The times in a batch's record, or None when it is missing or cut short; only its head is read."""
        facts = _head(self._files, self._record_path(batch_id))
        return None if facts is None else Times.from_facts(facts)

    def snapshot_times(self, version: int) -> Times | None:
        """The times in the snapshot of a version; as `record_times`."""
        facts = _head(self._files, self._snapshot_path(version))
        return None if facts is None else Times.from_facts(facts)

    def in_backlog(self, version: int) -> bool:
        """Whether the micro-batches before a version, of which there are some, were all backlog."""
        facts = _head(self._files, self._record_path(version - 1)) or _head(self._files, self._snapshot_path(version))
        return facts is not None and _BACKLOG in facts

    def write_snapshot(
        self,
        version: int,
        tables: Mapping[str, pa.Table],
        clock_ms: int,
        times: Times = NO_TIMES,
        *,
        backlog: bool = False,
    ) -> int:
        """Writes the state at a version. Durable on return.

        Args:
            version: the number of micro-batches it contains.
            tables: as `JoinEngine.snapshot` gives them.
            clock_ms: the time of the last of these micro-batches.
            times: what an interval join knew after it.
            backlog: whether all these micro-batches were backlog.

        Returns:
            Its size in bytes.

        Raises:
            StateError: it cannot be written.
        """
        parts = [
            (
                table,
                {
                    "version": str(version),
                    "clock_ms": str(clock_ms),
                    "table": name,
                    **times.to_facts(),
                    **_backlog(backlog),
                },
            )
            for name, table in tables.items()
        ]
        return _write(self._files, self._snapshot_path(version), parts, "lz4")

    def read_snapshot(self, version: int) -> tuple[dict[str, pa.Table], int]:
        """The state at a version, and the time of its last micro-batch.

        Raises:
            StateError: it is missing, cut short or damaged.
        """
        path = self._snapshot_path(version)
        parts = _read(self._files, path)
        if any(facts.get("version") != str(version) for _, facts in parts):
            raise StateError(f"{self._files.name(path)} is not the snapshot of version {version}")
        return {facts["table"]: table for table, facts in parts}, int(parts[0][1]["clock_ms"])

    def prune(self, version: int, stored: Stored) -> Stored:
        """Deletes what a snapshot of ``version`` makes superfluous.

        Returns:
            What is left.
        """
        records = {batch: size for batch, size in stored.records.items() if batch >= version}
        snapshots = {at: size for at, size in stored.snapshots.items() if at >= version}
        self._files.delete(self._record_path(b) for b in stored.records.keys() - records.keys())
        self._files.delete(self._snapshot_path(v) for v in stored.snapshots.keys() - snapshots.keys())
        return Stored(records, snapshots)

    def _record_path(self, batch_id: int) -> str:
        return f"{self._folder}/{batch_id:020d}.arrow"

    def _snapshot_path(self, version: int) -> str:
        return f"{self._folder}/{version:020d}.snapshot"


def _backlog(value: bool) -> dict[str, str]:
    """As a fact; absent where it is none, as in folders of earlier versions."""
    return {_BACKLOG: "1"} if value else {}


class _Summed:
    """A binary file that keeps the length and CRC-32 of what is written to it."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.length = self.crc = 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        self.crc = zlib.crc32(view, self.crc)
        self.length += view.nbytes
        self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """The file below stays open for the trailer."""


def _write(files: Files, path: str, parts: list[tuple[pa.Table, dict[str, str]]], compression: str | None) -> int:
    options = pa.ipc.IpcWriteOptions(compression=compression)

    def produce(file: IO[bytes]) -> None:
        summed = _Summed(file)
        sink = as_sink(summed)
        for table, facts in parts:
            meta = {_META + name.encode(): value.encode() for name, value in facts.items()}
            schema = table.schema.with_metadata(meta)
            with pa.ipc.new_stream(sink, schema, options=options) as writer:
                writer.write_table(table.replace_schema_metadata(meta), max_chunksize=_ROWS_PER_BATCH)
        file.write(_TRAILER.pack(_MAGIC, summed.length, summed.crc))

    return files.write(path, produce)


def _head(files: Files, path: str) -> dict[str, str] | None:
    """The facts of a file's first stream without reading the rest; None when it is not there or not whole.

    Checksums are not looked at: who reads the rows does that.
    """
    try:
        with files.filesystem.open_input_file(f"{files.root}/{path}") as file:
            body = max(file.size() - _TRAILER.size, 0)
            magic, length, _ = _TRAILER.unpack(file.read_at(_TRAILER.size, body)) if body else (b"", 0, 0)
            if magic != _MAGIC or length != body:
                return None
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                return _facts(reader.schema)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        raise StateError(f"cannot read {files.name(path)}: {error}") from error


def _facts(schema: pa.Schema) -> dict[str, str]:
    ours = {k.removeprefix(_META): v for k, v in (schema.metadata or {}).items() if k.startswith(_META)}
    return {k.decode(): v.decode() for k, v in ours.items()}


def _read(files: Files, path: str) -> list[tuple[pa.Table, dict[str, str]]]:
    name = files.name(path)
    content = files.read(path)
    if content is None:
        raise StateError(f"{name} is missing; {_RESTORE}")
    body = max(content.size - _TRAILER.size, 0)
    magic, length, crc = _TRAILER.unpack(content[body:]) if body else (b"", 0, 0)
    if magic != _MAGIC or length != body:
        raise StateError(f"{name} is cut short ({content.size} bytes); {_RESTORE}")
    content = content[:body]
    if zlib.crc32(content) != crc:
        raise StateError(f"{name} is damaged (its checksum does not fit); {_RESTORE}")
    parts = []
    try:
        source = pa.BufferReader(content)
        while source.tell() < body:
            with pa.ipc.open_stream(source) as reader:
                table = reader.read_all()
            parts.append((table.replace_schema_metadata(None), _facts(table.schema)))
    except (pa.ArrowException, OSError) as error:
        raise StateError(f"{name} is damaged ({error}); {_RESTORE}") from error
    return parts


_RESTORE: Final = "restore it from a backup, or start the query afresh with a new folder and checkpoint"
