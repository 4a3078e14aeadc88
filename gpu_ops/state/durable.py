"""A state folder: per partition a log of micro-batches and snapshots that compact it.

Layout::

    manifest.json                       see `gpu_ops.state.manifest`
    p/<partition>/<batch>.arrow         the input of a micro-batch, as it came
    p/<partition>/<batch>.<name>.block  a part of it, which that file names
    p/<partition>/<version>.snapshot    the state after micro-batches 0 .. version - 1
    p/<partition>/<version>.<id>.piece  rows of a table, written by the snapshot of a version, named by later ones, too
    p/<partition>/<version>.<id>.origin a state folder of this partition, whose state is the snapshot of that version

The numbers have 20 digits. A record is an Arrow IPC stream. A piece is one of rows, and one more of the entries of each
index, past which versions read that knew none. A snapshot is one stream per table, one after the other: its rows, or,
where they are stored in pieces (`gpu_ops.state.pieces`), the numbers beside them. Each file ends with a trailer: magic,
length and CRC-32 of what is before it. (The IPC stream ends before that, so any Arrow reader opens these files.)

The schema of each stream carries facts: the file's number, and the query, join, generation and partition that it
belongs to. Whoever reads a file, or its facts alone, checks them, so a file from elsewhere is refused.

Rows that came in a file of this machine stay in it (`gpu_ops.state.blocks`): the record gives it a second name in its
folder, and has the places of its messages among its facts, with a CRC-32 of each; of a Parquet file, whose rows a card
has read, the names of its columns besides. They are durable before the record
is there that names them. One that no record names is a leftover of a repetition, and goes when the record is there or
the partition is loaded; so is a piece newer than any snapshot, of one that was not written to its end. Two servers may
both hold a partition for a while, so whoever writes what names other files holds a lock on the folder beside others,
and whoever removes leftovers holds it alone; each does without where it would have to wait.

A folder that a change of a query made may begin with the state of an operator as the old folder has it: the files of
that get second names here, below a copy of their manifest, and a snapshot without rows says of which version of that
they are the state. The next snapshot is one of rows, and what was taken goes with the files that it replaces.

Log records and pieces lie uncompressed on local disks, where LZ4 costs more time than it saves, and compressed
elsewhere; snapshots are always compressed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import struct
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.times import WatermarkMs, places
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.state.blocks import FilePart, mapped, together, without
from gpu_ops.state.files import TEMPORARY, Files, Stamp, seen_during, seen_to_move
from gpu_ops.state.manifest import MANIFEST, Manifest
from gpu_ops.state.pieces import Content, Flush, FromSnapshot, StoredTable, WrittenTable, write

_log = logging.getLogger(__name__)

_TRAILER: Final = struct.Struct("<8sQI")
_MAGIC: Final = b"GPUJOIN1"
_META: Final = b"gpu_join."
_BACKLOG: Final = "backlog"
_PIECES: Final = "pieces"
"""The fact of a table that is stored in pieces: their names and numbers of rows, and the names of the columns."""
_ENTRIES: Final = "entries"
"""The fact of a piece's index entries: their label."""
_ORIGIN: Final = "origin"
"""The fact of a snapshot that is the state of another folder: its name, and the version there."""
_CHECK: Final = "check"
"""The fact that is a checksum of the others: a reader of facts alone does not see the file's."""
_ROWS_PER_BATCH: Final = 1 << 16
_AT_ONCE: Final = 1 << 16
"""Bytes that are written to a file in one go; Arrow gives a column's buffers one by one, and padding besides."""


_WATERMARK: Final = "watermark_ms"
_OF_OPERATOR: Final = f".{_WATERMARK}"
"""What follows the name of an operator of a dataflow in the name of its watermark."""
_LATEST: Final = re.compile(r"part_(\d+)_latest_ms")
"""The name of a time that is neither the left input's nor the right one's."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Event time that a partition knows after a micro-batch, in milliseconds since the epoch.

    Attributes:
        watermark: the one in force in the micro-batch, None while there is none.
        latest: the latest event time seen so far, of each input, or of each part of the only one; None where there is
            none yet, as at the end. Of a dataflow, those of its operators by event time behind each other.
    """

    watermark: WatermarkMs = None
    latest: tuple[int | None, ...] = (None, None)

    def later(self, other: Times) -> Times:
        """The later of each: what two partitions, or two micro-batches, know together."""
        latest = (later(a, b) for a, b in itertools.zip_longest(self.latest, other.latest))
        return Times(later_watermark(self.watermark, other.watermark), tuple(latest))

    def of(self, description: Description, name: str) -> Times:
        """Picks those of one operator by event time out of a dataflow's; `NO_TIMES` where it has no such operator."""
        at = 0
        for other, one in description.timed.items():
            behind = at + len(one.watermarked)
            if other == name:
                within = self.watermark.get(name) if isinstance(self.watermark, Mapping) else self.watermark
                return Times(within, (*self.latest, *[None] * behind)[at:behind])
            at = behind
        return NO_TIMES

    @classmethod
    def together(cls, times: Mapping[str, Times]) -> Times:
        """Puts together those of a dataflow's operators by event time, by their names, in their order."""
        watermarks = {name: one.watermark for name, one in times.items() if not isinstance(one.watermark, Mapping)}
        return cls(watermarks, tuple(time for one in times.values() for time in one.latest))

    def to_facts(self) -> dict[str, str]:
        """Gives the times as metadata of a file, without those that are None."""
        own, within = (None, self.watermark) if isinstance(self.watermark, Mapping) else (self.watermark, {})
        values = dict(zip(_named(len(self.latest)), (own, *self.latest), strict=True))
        values |= {f"{name}{_OF_OPERATOR}": value for name, value in within.items()}
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_facts(cls, facts: Mapping[str, str]) -> Times:
        """The inverse of `to_facts`; other facts are left alone."""
        numbers = [int(of_part[1]) for name in facts if (of_part := _LATEST.fullmatch(name)) is not None]
        names = _named(max(numbers, default=1) + 1)
        watermark, *latest = (int(facts[name]) if name in facts else None for name in names)
        within = {name: int(value) for name, value in facts.items() if name.endswith(_OF_OPERATOR)}
        return cls(
            {name.removesuffix(_OF_OPERATOR): value for name, value in within.items()} or watermark, tuple(latest)
        )


def _named(count: int) -> list[str]:
    """The facts of a watermark and of so many latest times."""
    return [_WATERMARK, *(f"{place}_latest_ms" for place in places(count))]


def later(a: int | None, b: int | None) -> int | None:
    """The greater of two numbers, or the one that is there."""
    if a is None or b is None:
        return b if a is None else a
    return max(a, b)


def later_watermark(a: WatermarkMs, b: WatermarkMs) -> WatermarkMs:
    """The later of two watermarks, of a dataflow for each operator, or the one that is there."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return {name: later(a.get(name), b.get(name)) for name in {**a, **b}}
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return a or b
    return later(a, b)


NO_TIMES: Final = Times()


@dataclasses.dataclass(frozen=True)
class Record:
    """The input of one micro-batch of one partition.

    Attributes:
        table: the wire batches: side, sequence, union columns; without the rows of Parquet files among the parts.
        clock_ms: the time the micro-batch was applied at.
        wire: how the union columns map to the inputs' columns, JSON.
        times: what an interval join by event time knows after it.
        backlog: whether it was backlog, and all before it.
        parts: which rows lie in files, which the log may keep.
    """

    table: pa.Table
    clock_ms: int
    wire: str
    times: Times = NO_TIMES
    backlog: bool = False
    parts: tuple[FilePart, ...] = ()


class _Kind(NamedTuple):
    """A kind of file in a partition's folder, recognised by its name."""

    suffix: str
    number: str
    """The fact that is its number."""
    called: str

    def path(self, folder: str, number: int | str) -> str:
        """The file of this number, or name."""
        return f"{folder}/{number if isinstance(number, str) else f'{number:020d}'}.{self.suffix}"

    def of(self, sizes: Mapping[str, int]) -> dict[int, int]:
        """Picks the files of this kind from names with sizes, by number."""
        found = {re.fullmatch(rf"(\d{{20}})\.{self.suffix}", name): size for name, size in sizes.items()}
        return {int(name[1]): size for name, size in found.items() if name is not None}


_PARTS: Final = "parts"
_BLOCK: Final = re.compile(r"(\d{20})\.[\w-]+\.block")
"""The name of a file that a record keeps."""
_OF_PIECE: Final = re.compile(r"(\d{20})\.[0-9a-f]+\.piece")
"""The name of a piece."""

_OF_ORIGIN: Final = re.compile(r"(\d{20})\.[0-9a-f]+\.origin")
"""The name of a folder that has the state of a snapshot."""

_RECORD: Final = _Kind("arrow", "batch_id", "record of batch")
_SNAPSHOT: Final = _Kind("snapshot", "version", "snapshot of version")
_PIECE: Final = _Kind("piece", "piece", "piece")


@dataclasses.dataclass(frozen=True)
class Stored:
    """Contents of a partition's folder: sizes in bytes of records by batch, snapshots by version, pieces by name."""

    records: dict[int, int]
    snapshots: dict[int, int]
    pieces: dict[str, int] = dataclasses.field(default_factory=dict)

    def since(self, version: int, unneeded: Collection[str] = ()) -> Stored:
        """Drops the records and snapshots before a version, and some pieces: what a snapshot leaves."""
        return Stored(
            {batch: size for batch, size in self.records.items() if batch >= version},
            {at: size for at, size in self.snapshots.items() if at >= version},
            {name: size for name, size in self.pieces.items() if name not in unneeded},
        )

    def until(self, version: int) -> Stored:
        """Drops the records and snapshots after a version: what there was when it was the last one."""
        return Stored(
            {batch: size for batch, size in self.records.items() if batch < version},
            {at: size for at, size in self.snapshots.items() if at <= version},
            self.pieces,
        )

    def last(self) -> int:
        """The number of micro-batches that there are."""
        return max([0, *(batch + 1 for batch in self.records), *self.snapshots])

    def oldest(self) -> int:
        """The first version from which on all can be built: the one of a snapshot, or 0."""
        version = last = self.last()
        while version - 1 in self.records:
            version -= 1
        bases = [base for base in (0, *self.snapshots) if base >= version or base == last]
        return min(bases, default=last)


def stored_partitions(files: Files) -> list[int]:
    """The partitions a state folder holds anything of."""
    return sorted(int(name) for name in files.folders("p") if name.isdecimal())


class PartitionLog:
    """One partition's part of a state folder.

    Args:
        files: the folder.
        manifest: what it belongs to.
        partition: its number.
        folder: where its files are, if that is not where the manifest says.
    """

    def __init__(self, files: Files, manifest: Manifest, partition: int, *, folder: str | None = None) -> None:
        self._files = manifest.content(files) if folder is None else files
        self._manifest, self._partition = manifest, partition
        self._folder = folder or f"p/{partition}"
        self._record_compression = None if files.local else "lz4"
        self._blocks, self._leftovers = collections.defaultdict[int, set[str]](set), False

    @property
    def name(self) -> str:
        """The partition's folder, for errors."""
        return self._files.name(self._folder)

    def record_name(self, batch_id: int) -> str:
        """A record's file, for errors."""
        return self._files.name(_RECORD.path(self._folder, batch_id))

    def stored(self, *, clean: bool = True) -> Stored:
        """Lists the records, snapshots and pieces in the folder.

        Args:
            clean: delete leftovers of writes that a crash cut short; for the owner of the partition only,
                as they look like writes in progress.

        Raises:
            StateError: the folder cannot be listed.
        """
        names = self._files.sizes(self._folder)
        if clean:
            self._files.delete(f"{self._folder}/{name}" for name in names if name.endswith(TEMPORARY))
            gone = self.clean()
            names = {name: size for name, size in names.items() if name not in gone}
            self._blocks.clear()
            for name, batch_id in _blocks(names).items():
                self._blocks[batch_id].add(name)
        suffix, records = f".{_PIECE.suffix}", _RECORD.of(names)
        pieces = {name.removesuffix(suffix): size for name, size in names.items() if name.endswith(suffix)}
        for name, batch_id in _blocks(names).items():
            if batch_id in records:
                records[batch_id] += names[name]
        snapshots = _SNAPSHOT.of(names)
        for version, folder in self._origins():
            if version in snapshots:
                its = self._files.sizes(folder).items()
                snapshots[version] += sum(size for name, size in its if not name.endswith(suffix))
        return Stored(records, snapshots, pieces)

    # --- states of other folders -------------------------------------------------------------

    def _origins(self) -> list[tuple[int, str]]:
        """The folders that have the states of snapshots, with their versions."""
        names = self._files.folders(self._folder) if self._manifest.goes_on else ()
        found = ((_OF_ORIGIN.fullmatch(name), name) for name in names)
        return [(int(one[1]), f"{self._folder}/{one[0]}") for one, _ in found if one is not None]

    def origin(self, version: int) -> tuple[PartitionLog, int] | None:
        """The files of which the snapshot of a version is the state, and their version; None where it has rows itself.

        Raises:
            StateError: the snapshot, or the manifest of these files, is damaged or missing.
        """
        facts = self._facts(_SNAPSHOT, version) if self._manifest.goes_on else None
        if facts is None or _ORIGIN not in facts:
            return None
        with self._understood(_SNAPSHOT.path(self._folder, version)):
            name, at = json.loads(facts[_ORIGIN])
        folder = f"{self._folder}/{name}"
        return PartitionLog(self._files, Manifest.of(self._files.below(folder)), self._partition, folder=folder), at

    def go_on_from(self, version: int, other: PartitionLog, base: int, at: int) -> None:
        """Writes a snapshot that is the state of another folder; durable on return.

        Args:
            version: the snapshot's.
            other: the partition of the same number there, whose query does not run.
            base: the version of a snapshot of rows there, or 0.
            at: the version of that state, to which the records from ``base`` on lead.

        Raises:
            StateError: a file cannot be read or written.
        """
        facts = other._facts(_RECORD, at - 1) if at > base else other._facts(_SNAPSHOT, at)
        if facts is None:
            raise StateError(f"{other.name} has no state of version {at}; {_RESTORE}")
        sizes = other._files.sizes(other._folder)
        names = {name for name, batch in _blocks(sizes).items() if base <= batch < at}
        names |= {f"{batch:020d}.{_RECORD.suffix}" for batch in range(base, at)}
        if base:
            names |= {f"{base:020d}.{_SNAPSHOT.suffix}"} | {name for name in sizes if _OF_PIECE.fullmatch(name)}
        # two tasks may write the same, of which one was given up: neither may remove what the other has taken
        name = f"{version:020d}.{uuid.uuid4().hex[:16]}.{_ORIGIN}"
        folder, content = f"{self._folder}/{name}", other._manifest.to_json().encode()
        self._files.take(folder, other._files, other._folder, names)
        self._files.write(f"{folder}/{MANIFEST}", lambda file: file.write(content))
        own = {"version": str(version), "clock_ms": facts["clock_ms"], _ORIGIN: json.dumps([name, at])}
        own |= Times.from_facts(facts).to_facts() | _backlog(_BACKLOG in facts) | self._manifest.facts(self._partition)
        _write(self._files, _SNAPSHOT.path(self._folder, version), [(pa.table({}), own)], "lz4")

    # --- records -----------------------------------------------------------------------------

    def write_record(self, batch_id: int, record: Record) -> tuple[Stamp, int]:
        """Writes the record of a micro-batch, or replaces it. Durable on return.

        Returns:
            The file's stamp, and the bytes of it and of the files that it names.

        Raises:
            StateError: it cannot be written; an older record of the batch is as it was.
        """
        facts = {"batch_id": str(batch_id), "clock_ms": str(record.clock_ms), "wire": record.wire}
        facts |= record.times.to_facts() | _backlog(record.backlog) | self._manifest.facts(self._partition)
        path = _RECORD.path(self._folder, batch_id)
        try:
            with self.writing() if record.parts else contextlib.nullcontext(False) as held:
                parts, rest = self._keep(batch_id, record.parts if held else ()), record.table
                if any(part.columns for part in record.parts):
                    rest = together(rest, _unkept(record.parts, {part.sequence for part in parts}, rest.schema))
                if parts:
                    facts |= {_PARTS: json.dumps([part.to_list() for part in parts])}
                    rest = without(rest, parts)
                _write(self._files, path, [(rest, facts)], self._record_compression)
        except BaseException:
            if record.parts:
                self.try_to_clean()
            raise
        before, self._blocks[batch_id] = self._blocks[batch_id], {part.block.file for part in parts}
        if self._leftovers or before - self._blocks[batch_id]:
            self.try_to_clean()
        stamp = self._files.stamp(path)
        if stamp is None:
            raise StateError(f"{self._files.name(path)} was written and is gone")
        return stamp, stamp[0] + sum(part.block.size for part in parts)

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """While this lasts nobody removes leftovers; gives whether that is so, and a file may be named by another."""
        with self._files.locked(self._folder, alone=False) as held:
            yield held

    def try_to_clean(self) -> None:
        """Cleans the folder, and only logs an error: files that stay do no more than take room."""
        try:
            self.clean()
        except StateError as error:
            _log.warning("files that nothing names stay: %s", error)

    def clean(self) -> set[str]:
        """Deletes blocks that no record names, and pieces newer than any snapshot; none while another server writes.

        Returns:
            The names of the files that are gone.

        Raises:
            StateError: the folder cannot be listed, or one cannot be deleted.
        """
        self._leftovers = True
        with self._files.locked(self._folder, alone=True) as held:
            if not held:
                return set()
            names = self._files.sizes(self._folder)
            newest, of_batch = max(_SNAPSHOT.of(names), default=0), collections.defaultdict[int, set[str]](set)
            for name, batch_id in _blocks(names).items():
                of_batch[batch_id].add(name)
            gone = {name for name in names if (piece := _OF_PIECE.fullmatch(name)) and int(piece[1]) > newest}
            for batch_id, blocks in of_batch.items():
                gone |= blocks - self._named(batch_id, blocks)
            self._files.delete(f"{self._folder}/{name}" for name in sorted(gone))
        self._leftovers = False
        return gone

    def _named(self, batch_id: int, blocks: set[str]) -> set[str]:
        """The blocks that the record of a micro-batch names; all there are where it cannot be read."""
        try:
            facts = self._facts(_RECORD, batch_id)
            if facts is None:
                return blocks if self.record_stamp(batch_id) is not None else set()
            return {FilePart.of(part).block.file for part in json.loads(facts.get(_PARTS, "[]"))}
        except (StateError, DescriptionError, ValueError, TypeError):
            return blocks

    def begin_to_write(self, parts: Sequence[FilePart]) -> None:
        """Have the system begin to write the files of a micro-batch whose record is to come."""
        if parts and self._manifest.keeps_files and self._files.local:
            self._files.begin_to_write({part.block.file for part in parts})

    def _keep(self, batch_id: int, parts: Sequence[FilePart]) -> list[FilePart]:
        """Gives files of a micro-batch a second name in the log, durably.

        Returns:
            The parts in those that have one, and that name.
        """
        if not (parts and self._manifest.keeps_files and self._files.local):
            return []
        parts = [part for part in parts if not part.columns or self._manifest.keeps_copies]
        files = {part.block.file for part in parts}
        names = {file: f"{batch_id:020d}.{os.path.basename(file)}.block" for file in files}
        found = self._files.link(self._folder, {name: file for file, name in names.items()})
        names = {file: name for file, name in names.items() if name in found}
        kept = (part for part in parts if part.block.file in names)
        return [part._replace(block=part.block._replace(file=names[part.block.file])) for part in kept]

    def record_stamp(self, batch_id: int) -> Stamp | None:
        """The stamp of a batch's record, or None when there is none."""
        return self._files.stamp(_RECORD.path(self._folder, batch_id))

    def read_record(self, batch_id: int) -> Record:
        """The record of a micro-batch.

        Raises:
            StateError: it is missing, cut short or damaged.
        """
        path = _RECORD.path(self._folder, batch_id)
        parts = _read(self._files, path)
        facts = self._checked(_RECORD, batch_id, [facts for _, facts in parts])
        with self._understood(path):
            times, table = Times.from_facts(facts), parts[0][0]
            if _PARTS in facts:
                table = together(table, self._kept_rows(json.loads(facts[_PARTS]), table.schema))
            return Record(table, int(facts["clock_ms"]), facts["wire"], times, _BACKLOG in facts)

    def _kept_rows(self, parts: Sequence[Any], wire: pa.Schema) -> Iterator[tuple[FilePart, list[pa.RecordBatch]]]:
        """The rows that a record has in other files."""
        files = dict[str, pa.Buffer | None]()
        for part in map(FilePart.of, parts):
            path, block = f"{self._folder}/{part.block.file}", part.block
            name = self._files.name(path)
            with seen_during("reading", name):
                if path not in files:
                    files[path] = self._files.read(path)
                if (content := files[path]) is None:
                    raise StateError(f"{name} is missing; {_RESTORE}")
                message = content[block.start : block.start + block.size]
                if message.size != block.size or zlib.crc32(message) != block.crc:
                    raise StateError(f"{name} is damaged (its checksum does not fit); {_RESTORE}")
            try:
                yield part, part.rows(message, wire)
            except (pa.ArrowException, OSError) as error:
                raise StateError(f"{name} is damaged ({error}); {_RESTORE}") from error

    def record_times(self, batch_id: int) -> Times | None:
        """The times in a batch's record, or None when it is missing or cut short; only its head is read.

        Raises:
            StateError: it is damaged, or belongs elsewhere.
        """
        return self._times(_RECORD, batch_id)

    def snapshot_times(self, version: int) -> Times | None:
        """The times in the snapshot of a version; as `record_times`."""
        return self._times(_SNAPSHOT, version)

    def _times(self, kind: _Kind, number: int) -> Times | None:
        facts = self._facts(kind, number)
        with self._understood(kind.path(self._folder, number)):
            return None if facts is None else Times.from_facts(facts)

    def in_backlog(self, version: int) -> bool:
        """Tells whether all micro-batches before a version, at least one, were backlog."""
        facts = self._facts(_RECORD, version - 1) or self._facts(_SNAPSHOT, version)
        return facts is not None and _BACKLOG in facts

    def _facts(self, kind: _Kind, number: int) -> dict[str, str] | None:
        """The facts of a file; None when it is not there or not whole."""
        facts = _head(self._files, kind.path(self._folder, number))
        return None if facts is None else self._checked(kind, number, [facts])

    @contextlib.contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """Facts that are not what they should be are damage."""
        try:
            yield
        except (KeyError, ValueError) as error:
            raise StateError(f"{self._files.name(path)} is damaged ({error!r}); {_RESTORE}") from error

    def _checked(self, kind: _Kind, number: int | str, parts: list[dict[str, str]]) -> dict[str, str]:
        """The facts of a file, which is what it should be.

        Args:
            kind: of the file.
            number: of it.
            parts: the facts of each of its streams.
        """
        name = self._files.name(kind.path(self._folder, number))
        for facts in parts:
            if (_CHECK in facts or self._manifest.bound) and facts.get(_CHECK) != _checksum(facts):
                raise StateError(f"{name} is damaged (the checksum of its head does not fit); {_RESTORE}")
            self._manifest.check_facts(facts, self._partition, name)
            if facts.get(kind.number) != str(number):
                found = f"the {kind.called} {facts[kind.number]}" if kind.number in facts else "something else"
                raise StateError(f"{name} should be the {kind.called} {number} and is {found}; {_RESTORE}")
        return parts[0]

    def write_snapshot(
        self,
        version: int,
        tables: Mapping[str, pa.Table | WrittenTable],
        clock_ms: int,
        times: Times = NO_TIMES,
        *,
        backlog: bool = False,
    ) -> int:
        """Writes the state at a version. Durable on return.

        Args:
            version: the number of micro-batches it contains.
            tables: as `JoinEngine.snapshot` gives them, or what `write_pieces` gave of them.
            clock_ms: the time of the last of these micro-batches.
            times: what an interval join knew after it.
            backlog: whether all these micro-batches were backlog.

        Returns:
            Its size in bytes.

        Raises:
            StateError: it cannot be written.
        """
        own = {"version": str(version), "clock_ms": str(clock_ms)}
        rest = times.to_facts() | _backlog(backlog) | self._manifest.facts(self._partition)
        parts = []
        for name, table in tables.items():
            facts = {**own, "table": name, **rest}
            if isinstance(table, WrittenTable):
                facts[_PIECES] = json.dumps([table.pieces, table.columns])
            parts.append((table.numbers if isinstance(table, WrittenTable) else table, facts))
        return _write(self._files, _SNAPSHOT.path(self._folder, version), parts, "lz4")

    def write_nothing(self, snapshot: int, version: int, nothing: pa.Table, wire: str) -> None:
        """Writes the records of micro-batches without changes behind a snapshot, at its time.

        Args:
            snapshot: the snapshot's version.
            version: that of the state behind them.
            nothing: a table without rows, with the columns of `Record.table`.
            wire: as of `Record`.

        Raises:
            StateError: there is no such snapshot, or a record cannot be written.
        """
        for batch_id in range(snapshot, version):
            facts = self._facts(_SNAPSHOT, snapshot)
            if facts is None:
                raise StateError(f"{self._files.name(_SNAPSHOT.path(self._folder, snapshot))} is missing; {_RESTORE}")
            times = Times.from_facts(facts)
            self.write_record(batch_id, Record(nothing, int(facts["clock_ms"]), wire, times, _BACKLOG in facts))

    def write_pieces(self, version: int, name: str, flush: Flush, most: int) -> tuple[WrittenTable, dict[str, int]]:
        """Writes what is new of a table; durable on return.

        Args:
            version: as of `write_snapshot`.
            name: of the table.
            flush: what a snapshot of it is made of.
            most: bytes of a piece that others are merged into.

        Returns:
            What a snapshot has of it, and the sizes of new pieces in bytes.

        Raises:
            StateError: it cannot be written, or a piece that is merged cannot be read.
        """
        sizes: dict[str, int] = {}

        def store(content: Content) -> str:
            own, size = self.write_piece(version, name, content)
            sizes[own] = size
            return own

        return write(flush, self.read_piece, store, most), sizes

    def write_piece(self, version: int, name: str, content: Content) -> tuple[str, int]:
        """Writes a piece of a table, arguments as of `write_pieces`; returns its name, and its size in bytes."""
        # two servers may both hold a partition for a while: neither may write over what the other names
        own = f"{version:020d}.{uuid.uuid4().hex[:16]}"
        facts = {_PIECE.number: own, "table": name, **self._manifest.facts(self._partition)}
        parts = [(content.rows, facts)]
        parts += [(pa.table([x], ["entry"]), {**facts, _ENTRIES: label}) for label, x in content.entries.items()]
        return own, _write(self._files, _PIECE.path(self._folder, own), parts, self._record_compression)

    def read_piece(self, name: str) -> Content:
        """Reads the rows and the index entries of a piece.

        Raises:
            StateError: it is missing, cut short or damaged.
        """
        parts = _read(self._files, _PIECE.path(self._folder, name))
        self._checked(_PIECE, name, [facts for _, facts in parts])
        (rows, _), *more = parts
        return Content(rows, {facts[_ENTRIES]: table.column(0).to_numpy() for table, facts in more})

    def read_snapshot(self, version: int) -> tuple[dict[str, FromSnapshot], int]:
        """The state at a version, and the time of its last micro-batch.

        Raises:
            StateError: it is missing, cut short or damaged.
        """
        path = _SNAPSHOT.path(self._folder, version)
        parts = _read(self._files, path)
        self._checked(_SNAPSHOT, version, [facts for _, facts in parts])
        with self._understood(path):
            tables: dict[str, FromSnapshot] = {}
            for table, facts in parts:
                if isinstance(table, pa.Table):
                    tables[facts["table"]] = table
                    continue
                pieces, columns = json.loads(facts[_PIECES])
                named = tuple((name, rows) for name, rows in pieces)
                numbers = functools.partial(pa.ipc.open_stream, table)
                tables[facts["table"]] = StoredTable(numbers, named, tuple(columns), self.read_piece)
            return tables, int(parts[0][1]["clock_ms"])

    def prune(self, version: int, stored: Stored, unneeded: Collection[str] = ()) -> None:
        """Deletes what a snapshot of a version does not leave of what there is, and some pieces."""
        left = stored.since(version, unneeded)
        for batch_id in [batch_id for batch_id in list(self._blocks) if batch_id < version]:
            self._blocks.pop(batch_id, None)
        gone = stored.records.keys() - left.records.keys()
        self._files.delete(_RECORD.path(self._folder, b) for b in gone)
        if gone and self._manifest.keeps_files and self._files.local:
            blocks = _blocks(self._files.sizes(self._folder))
            self._files.delete(f"{self._folder}/{name}" for name, batch in blocks.items() if batch < version)
        self._files.delete(_SNAPSHOT.path(self._folder, v) for v in stored.snapshots.keys() - left.snapshots.keys())
        self._files.delete(_PIECE.path(self._folder, name) for name in stored.pieces.keys() - left.pieces.keys())
        for at, folder in self._origins():
            if at < version:
                self._files.delete_folder(folder)


def _backlog(value: bool) -> dict[str, str]:
    """Gives the backlog flag as metadata of a file; no entry for False, as in folders of earlier versions."""
    return {_BACKLOG: "1"} if value else {}


def _unkept(
    parts: Iterable[FilePart], kept: Collection[int], wire: pa.Schema
) -> Iterator[tuple[FilePart, list[pa.RecordBatch]]]:
    """The rows of Parquet files that have no name in the log, to be written into it, and none of those that have one.

    Args:
        parts: all that lies in files.
        kept: the sequences of those that have one.
        wire: the schema of rows on the wire.

    Raises:
        StateError: one cannot be read.
    """
    for part in parts:
        try:
            if part.columns:
                yield part, [] if part.sequence in kept else part.rows(mapped(part.block.file), wire)
        except (pa.ArrowException, OSError) as error:
            raise StateError(f"{part.block.file}, a copy of {part.source}, cannot be read: {error}") from error


def _blocks(names: Iterable[str]) -> dict[str, int]:
    """Picks the files of blocks that records keep from a list of names, with the batch of each."""
    found = {name: _BLOCK.fullmatch(name) for name in names}
    return {name: int(one[1]) for name, one in found.items() if one is not None}


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
        seen_to_move()
        return view.nbytes

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """The file below stays open for the trailer."""


def _write(files: Files, path: str, parts: list[tuple[pa.Table, dict[str, str]]], compression: str | None) -> int:
    options = pa.ipc.IpcWriteOptions(compression=compression)

    def produce(file: IO[bytes]) -> None:
        summed = _Summed(file)
        with pa.BufferedOutputStream(pa.PythonFile(summed, mode="w"), _AT_ONCE) as sink:
            for table, facts in parts:
                checked = {**facts, _CHECK: _checksum(facts)}
                meta = {_META + name.encode(): value.encode() for name, value in checked.items()}
                schema = table.schema.with_metadata(meta)
                with pa.ipc.new_stream(sink, schema, options=options) as writer:
                    most = None if compression is None else _ROWS_PER_BATCH  # what is mapped is best in one
                    writer.write_table(table.replace_schema_metadata(meta), max_chunksize=most)
        file.write(_TRAILER.pack(_MAGIC, summed.length, summed.crc))

    return files.write(path, produce)


def _head(files: Files, path: str) -> dict[str, str] | None:
    """The facts of a file's first stream without reading the rest; None when it is not there or not whole.

    The file's checksum is not looked at: a reader of the rows does that. The facts have their own.
    """
    try:
        with (
            seen_during("reading", files.name(path)),
            files.filesystem.open_input_file(f"{files.root}/{path}") as file,
        ):
            body = max(file.size() - _TRAILER.size, 0)
            magic, length, _ = _TRAILER.unpack(file.read_at(_TRAILER.size, body)) if body else (b"", 0, 0)
            if magic != _MAGIC or length != body:
                return None
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                return _facts(reader.schema)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise StateError(f"cannot read {files.name(path)}: {files.address.without_secrets(str(error))}") from None


def _checksum(facts: Mapping[str, str]) -> str:
    others = sorted((name, value) for name, value in facts.items() if name != _CHECK)
    return str(zlib.crc32(json.dumps(others).encode()))


def _facts(schema: pa.Schema) -> dict[str, str]:
    ours = {k.removeprefix(_META): v for k, v in (schema.metadata or {}).items() if k.startswith(_META)}
    return {k.decode(): v.decode() for k, v in ours.items()}


def _read(files: Files, path: str) -> list[tuple[Any, dict[str, str]]]:
    """The tables in a file with their facts; of numbers of rows in pieces, the bytes: they are read some at a time."""
    name = files.name(path)
    with seen_during("reading", name):  # a file that is mapped into memory is read when it is looked at
        return _parts(files.read(path), name)


def _parts(content: pa.Buffer | None, name: str) -> list[tuple[Any, dict[str, str]]]:
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
            begin = source.tell()
            with pa.ipc.open_stream(source) as reader:
                facts = _facts(reader.schema)
                if _PIECES in facts:
                    collections.deque(reader, maxlen=0)
                    parts.append((content[begin : source.tell()], facts))
                else:
                    parts.append((reader.read_all().replace_schema_metadata(None), facts))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StateError(f"{name} is damaged ({error}); {_RESTORE}") from error
    return parts


_RESTORE: Final = "restore it from a backup, or start the query afresh with a new folder and checkpoint"
