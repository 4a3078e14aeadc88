"""Rows that lie in files: Arrow messages that a process leaves for others of its machine, and a log's record may keep.

They are mapped into memory where they are read, so nobody copies them. They are in a folder of the application, which
goes with it (`gpu_ops.state.files.temporary_folder`), and in it in one of each run of a query and micro-batch; the next
micro-batch removes them. They are on a disk, not in ``/dev/shm``: the page cache takes them twice as fast, as it has
larger pages, and what is removed within seconds is never written to the disk. Where the log is on that disk, too, a
record keeps a second name of the file (`gpu_ops.state.durable`).

Among them are copies of Parquet files, from which a state server with a card reads rows without the host: see
``docs/decisions/0017-parquet-read-by-the-card.md``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.changelog import KIND_BYTES, kinds_as_bytes
from gpu_ops.errors import DescriptionError
from gpu_ops.files.binary_files import parquet_batches
from gpu_ops.state.files import private

_log = logging.getLogger(__name__)


_RUN, _BATCH, _NAME = r"[A-Za-z0-9-]{1,200}", r"[0-9]{1,19}", r"[\w-]{1,200}"
"""What a run's folder is called, that of a micro-batch in it, and a file there."""

_SHOWN: Final = 300

LEAST_BYTES: Final = 1 << 16
"""Of a message in a file: to make one takes as long as Spark takes for that many."""

KEPT: Final = 16
"""Messages of least size that a file must hold to be kept by the log: making one more file durable takes a while."""

_AT_ONCE: Final = 1 << 30
"""Bytes that the system is asked to copy."""

_BEFORE: Final = 2
"""Columns of the wire before the union columns: side and sequence."""


_MOST_INPUTS: Final = np.iinfo(np.int8).max
"""As the side of a row is an int8."""


class Block(NamedTuple):
    """The place of an Arrow message in a file, or a Parquet file as a whole.

    Attributes:
        file: its path; empty where the message is with Spark's rows.
        start: of the message in it, in bytes.
        size: in bytes.
        rows: how many it has.
        crc: CRC-32 of the message.
    """

    file: str
    start: int
    size: int
    rows: int
    crc: int


INLINE: Final = Block("", 0, 0, 0, 0)


class Blocks(NamedTuple):
    """The files of an application on one machine.

    Attributes:
        folder: where they are; a folder of each run of a query, and in it one of each micro-batch.
        least_bytes: of a message in a file; smaller ones go with Spark's rows, or over the connection.
    """

    folder: str
    least_bytes: int

    def of(self, run_id: str, batch_id: int) -> Path | None:
        """The folder of a micro-batch; None where nobody would know when it is no longer needed."""
        known = re.fullmatch(_RUN, run_id) is not None  # a job group may have any name
        return Path(self.folder, run_id, str(batch_id)) if known else None

    def forget(self, run_id: str) -> None:
        """Removes what there is of a run that is over."""
        if run_id:
            shutil.rmtree(Path(self.folder, run_id), ignore_errors=True)


def checked(path: str, folder: str | None, *, file: bool) -> Path:
    """A path that came with a request, which is of this application: all that a server makes, reads or removes.

    Args:
        path: of a micro-batch's folder, or of a file in one.
        folder: the application's, or None where its processes share none.
        file: whether it is of a file.

    Raises:
        DescriptionError: it lies elsewhere, or a link on the way to it would lead there.
    """
    shown = repr(path if len(path) <= _SHOWN else f"{path[:_SHOWN]} ...")
    below = f"{_RUN}/{_BATCH}/{_NAME}" if file else f"{_RUN}/{_BATCH}"
    if folder is None or re.fullmatch(f"{re.escape(folder)}/{below}", path, re.ASCII) is None:
        raise DescriptionError(f"{shown} is no path below {folder or 'a folder'} that this server has of its callers")
    if os.path.realpath(path) != os.path.realpath(folder) + path.removeprefix(folder):
        raise DescriptionError(f"{shown} leads elsewhere, by a link")
    return Path(path)


class BlockFiles:
    """The files of one task of a micro-batch: one for each partition, made when something is put into it.

    Args:
        folder: of the micro-batch.
        least_bytes: of a message that is put into one.
        ahead: whether this micro-batch comes next. Its folder is there, those of earlier ones are needed still, and
            what finds no room is not needed yet: that is an OSError.
    """

    def __init__(self, folder: Path, least_bytes: int, *, ahead: bool = False) -> None:
        self._folder, self._least_bytes, self._name = folder, least_bytes, uuid.uuid4().hex
        self._ahead = ahead
        self._sizes: dict[int, int] = {}
        self._copies, self._full = 0, False

    def copy(self, source: str) -> Block | None:
        """Copies a local file that a record may keep; None where it is too small, is gone, or there is no room.

        Where the file system can, the copy shares the source's place on the disk. What becomes of the source does not
        matter to it, be it written over.
        """
        path = self._folder / f"{self._name}-copy-{self._copies}"
        self._copies += 1
        try:
            if self._full or os.path.getsize(source) < KEPT * self._least_bytes:
                return None
            make_folder(self._folder)
            with open(source, "rb") as file, open(path, "xb", buffering=0, opener=private) as copy:
                try:
                    while os.copy_file_range(file.fileno(), copy.fileno(), _AT_ONCE):
                        pass
                except OSError:  # between two file systems, or one that has no such call
                    copy.truncate(0)
                    copy.seek(0)
                    file.seek(0)
                    shutil.copyfileobj(file, copy, _AT_ONCE >> 10)
            content = mapped(str(path))
        except OSError as error:
            _log.warning(
                "rows of %s come as they are read, as it is not copied into %s: %s", source, path.parent, error
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return Block(str(path), 0, content.size, 0, zlib.crc32(content))

    def put(self, partition: int, message: pa.Buffer, rows: int) -> Block:
        """Appends a message of so many rows; `INLINE` where it is too small, or there is no room."""
        if message.size < self._least_bytes or self._full:
            return INLINE
        path = self._folder / f"{self._name}-{partition}"
        start = self._sizes.get(partition, 0)
        try:
            if not (self._sizes or self._ahead):
                make_folder(self._folder)
            with open(path, "ab", buffering=0, opener=private) as file:  # as many as there are partitions
                _write(file, message)
        except OSError as error:
            if self._ahead:
                raise
            self._full = True  # and what is half written is not looked at
            _log.warning("rows go through Spark, as they find no room in %s: %s", self._folder, error)
            return INLINE
        self._sizes[partition] = start + message.size
        return Block(str(path), start, message.size, rows, zlib.crc32(message))


def _write(file: Any, message: pa.Buffer) -> None:
    left = memoryview(message)
    while left.nbytes:
        left = left[file.write(left) :]


def make_folder(folder: Path) -> None:
    """Makes the folder of a micro-batch, and removes those of earlier ones: those of a run come one after another."""
    for one in (*reversed(folder.parents[:2]), folder):
        one.mkdir(mode=0o700, exist_ok=True)
    for other in folder.parent.iterdir():
        if other.name.isdecimal() and int(other.name) < int(folder.name):
            shutil.rmtree(other, ignore_errors=True)


def leave(folder: Path, rows: pa.Table, most_rows: int) -> str | None:
    """Leaves a table for the one who asked for it; gives the file, or None where there is no room.

    Args:
        folder: of the micro-batch.
        rows: the table.
        most_rows: of a record batch.
    """
    path = folder / uuid.uuid4().hex
    try:
        make_folder(folder)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=most_rows)
    except (OSError, pa.ArrowException) as error:
        _log.warning("an answer goes over the connection, as it finds no room in %s: %s", folder, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return str(path)


def take(path: str) -> pa.RecordBatchReader:
    """Reads the rows that `leave` has left in a file, and deletes the file."""
    content = mapped(path)
    Path(path).unlink()
    return pa.ipc.open_stream(content)


def mapped(path: str) -> pa.Buffer:
    """A file mapped into memory.

    Raises:
        OSError, ArrowException: it is none, or cannot be read.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):  # a pipe would be waited for
        raise OSError("it is no file")
    with pa.memory_map(path) as file:
        return file.read_buffer()


class Mapped:
    """Files mapped into memory, each once.

    Args:
        folder: the application's, as of `checked`.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder, self._files = folder, dict[str, pa.Buffer]()

    def message(self, block: Block) -> pa.Buffer:
        """Reads the message of a block and checks it.

        Raises:
            DescriptionError: it lies elsewhere.
            OSError, ArrowException: it is not there, or is something else.
        """
        if block.file not in self._files:
            self._files[block.file] = mapped(str(checked(block.file, self._folder, file=True)))
        content = self._files[block.file]
        if block.start + block.size > content.size:
            raise pa.ArrowInvalid(f"it ends at {content.size}, before {block.start + block.size}")
        message = content.slice(block.start, block.size)
        if zlib.crc32(message) != block.crc:
            raise pa.ArrowInvalid("its checksum does not fit")
        return message


class FilePart(NamedTuple):
    """Rows of one input, among those of a micro-batch on the wire, that lie in a file.

    Attributes:
        number: of the input.
        union_columns: for each column of the rows the number of the union column that it goes into.
        sequence: the sequence of its first row's change in the micro-batch.
        block: where the message is.
        columns: of a Parquet file, the names of these columns in it; none where the block is a message.
        source: likewise the file that the block is a copy of, for errors.
    """

    number: int
    union_columns: tuple[int, ...]
    sequence: int
    block: Block
    columns: tuple[str, ...] = ()
    source: str = ""

    @classmethod
    def of(cls, data: Sequence[Any]) -> FilePart:
        """Reads a part from JSON.

        Raises:
            DescriptionError: it is none.
        """
        try:
            number, union_columns, sequence, block, *of_file = data
            part = cls(number, tuple(union_columns), sequence, Block(*block))
            if of_file:
                columns, source = of_file
                part = part._replace(columns=tuple(columns), source=source)
            numbers = (part.number, *part.union_columns, part.sequence, *part.block[1:])
            texts = (part.block.file, part.source, *part.columns)
            fine = all(isinstance(x, str) for x in texts) and all(type(x) is int and 0 <= x < 1 << 63 for x in numbers)
            fine = fine and part.number <= _MOST_INPUTS
            fine = fine and (not part.columns or len(part.columns) == len(part.union_columns))
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise DescriptionError(f"no rows in a file: {data!r}")
        return part

    def to_list(self) -> list[Any]:
        """The part for JSON; of a message as folders of earlier formats have it."""
        return list(self) if self.columns else list(self[:4])

    @property
    def end(self) -> int:
        """The sequence after that of its last row."""
        return self.sequence + self.block.rows

    def wire_names(self, wire: pa.Schema) -> list[str]:
        """The union columns that its columns go into."""
        return [wire.names[place + _BEFORE] for place in self.union_columns]

    def schema(self, wire: pa.Schema) -> pa.Schema:
        """The names and types of its columns; row kinds are bytes in messages only.

        Raises:
            ArrowException: the wire has no such columns.
        """
        if self.union_columns and max(self.union_columns) >= len(wire) - _BEFORE:
            raise pa.ArrowInvalid(f"there is no union column {max(self.union_columns)}")
        names = self.columns or self.wire_names(wire)
        types = [wire.field(place + _BEFORE).type for place in self.union_columns]
        if self.columns:
            types = [pa.string() if kind == KIND_BYTES else kind for kind in types]
        return pa.schema(list(zip(names, types, strict=True)))

    def rows(self, message: pa.Buffer, wire: pa.Schema) -> list[pa.RecordBatch]:
        """Its rows on the wire.

        Raises:
            ArrowException, OSError: the message is no such rows.
        """
        schema, at = self.schema(wire), self.sequence
        found = parquet_batches(message, schema) if self.columns else [pa.ipc.read_record_batch(message, schema)]
        made = list[pa.RecordBatch]()
        for rows in found:
            batch = rows
            for name, of_wire in zip(schema.names, self.wire_names(wire), strict=True) if self.columns else ():
                if wire.field(of_wire).type == KIND_BYTES:
                    batch = kinds_as_bytes(batch, name, input_name=self.source, strict=False)
            made.append(on_wire(batch, self.number, self.union_columns, at, wire))
            at += batch.num_rows
        if at != self.end:
            raise pa.ArrowInvalid(f"there are {at - self.sequence} rows, not {self.block.rows}")
        return made


def on_wire(
    rows: pa.RecordBatch, number: int, union_columns: Sequence[int], sequence: int, wire: pa.Schema
) -> pa.RecordBatch:
    """Rows of an input as they travel: side, sequence and union columns.

    Args:
        rows: their columns.
        number: of the input.
        union_columns: for each column the number of its union column.
        sequence: the sequence of the first row's change.
        wire: the schema.
    """
    size = rows.num_rows
    carried = dict(zip(union_columns, rows.columns, strict=True))
    columns = [pa.array(np.full(size, number, np.int8)), pa.array(np.arange(sequence, sequence + size))]
    for place, field in enumerate(list(wire)[_BEFORE:]):
        columns.append(carried[place] if place in carried else pa.nulls(size, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=wire)


def without(table: pa.Table, parts: Iterable[FilePart]) -> pa.Table:
    """The rows of a micro-batch that do not lie in files.

    Args:
        table: all of its rows, by their sequence, but those of Parquet files.
        parts: those in files, by theirs.
    """
    pieces, at, end = [], 0, 0
    for part in parts:
        pieces.append(table.slice(at, part.sequence - end))
        at += part.sequence - end + (0 if part.columns else part.block.rows)
        end = part.end
    return pa.concat_tables([*pieces, table.slice(at)])


def together(table: pa.Table, parts: Iterable[tuple[FilePart, Sequence[pa.RecordBatch]]]) -> pa.Table:
    """The inverse of `without`: rows of a micro-batch by their sequence; those of a part without batches stay out."""
    pieces, at, arrived = [], 0, 0
    for part, rows in parts:
        between = part.sequence - arrived
        pieces += [table.slice(at, between), pa.Table.from_batches(rows, table.schema)]
        at, arrived = at + between, part.end
    return pa.concat_tables([*pieces, table.slice(at)])
