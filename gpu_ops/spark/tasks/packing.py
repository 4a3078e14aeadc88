"""Packs many rows of a join's input into one row of Spark's before they are shuffled.

Tasks of the map stage make Arrow messages, one for each partition of the join and some thousand rows; Spark shuffles
those. Rows that Arrow reads, as those of `gpu_ops.read_files`, never turn into Spark's.
"""

from __future__ import annotations

import itertools
import json
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from gpu_ops.conditions.expressions import ColumnRef
from gpu_ops.descriptions.changelog import KIND_BYTES, kinds_as_bytes
from gpu_ops.descriptions.projection import Projection
from gpu_ops.files.file_systems import file_system_of
from gpu_ops.files.formats import FileFormat
from gpu_ops.operators.core.projection import project
from gpu_ops.operators.groups.top import FirstOfGroup
from gpu_ops.spark.tasks.arrow import ArrowTask, combined, source_partition, streaming_task
from gpu_ops.spark.tasks.read_ahead import packed_ahead
from gpu_ops.spark.tasks.rows import Slices, first_of_groups
from gpu_ops.spark.wire.arrivals import PACKED, Message
from gpu_ops.spark.wire.hashes import partition_of, routes
from gpu_ops.state.blocks import INLINE, Block, BlockFiles, Blocks

_BLOCK_BYTES: Final = 1 << 24
"""The size of a message in a file, about."""

_LEAST_SHARE: Final = 0.5
"""Of a file's bytes that are needed, so that it pays to keep the others, too."""


class CopiedFile(NamedTuple):
    """Rows that stay in a copy of their file.

    Attributes:
        block: the copy.
        columns: the names of the rows' columns in it.
    """

    block: Block
    columns: tuple[str, ...]


OrderedBatches = tuple[Iterator[pa.RecordBatch], int, str]
"""Batches of rows, and the time and source by which they are ordered among others."""

PackedPart = tuple[Iterator[pa.RecordBatch] | CopiedFile, int, str]
"""The same of rows that may stay in a file."""


class Packer(NamedTuple):
    """Partitions the rows of one input, and packs those of each partition.

    Attributes:
        input_name: the input's name, for errors.
        operator: the plan id of the operator whose input it is.
        number: the input's number.
        schema: the schema of its rows, with row kinds.
        by: the columns that rows are distributed by, and their types; without any all rows go to partition 0.
        routes: for each target the number that Spark's shuffle sends there.
        most_bytes: the size of one message, about.
        first: filters a task's rows to those that are needed; None for all.
        blocks: the folders of messages, if tasks are on one machine; else messages go with Spark's rows.
        shares: the number of targets of each partition, which all get its messages.
        row_kind: the column of row kinds, which are bytes in messages; None where they stay as they are.
        strict: whether an unknown row kind is an error.
    """

    input_name: str
    operator: str
    number: int
    schema: pa.Schema
    by: tuple[tuple[str, pa.DataType], ...]
    routes: tuple[int, ...]
    most_bytes: int
    first: FirstOfGroup | None = None
    blocks: Blocks | None = None
    shares: int = 1
    row_kind: str | None = None
    strict: bool = True

    @property
    def use(self) -> str:
        """Names the input that the rows are for: the operator's plan id, and the number of its input."""
        return f"{self.operator}.{self.number}"

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of packed rows, `PACKED`."""
        return PACKED

    @property
    def message_schema(self) -> pa.Schema:
        """The schema of the rows in messages."""
        if self.row_kind is None:
            return self.schema
        at = self.schema.get_field_index(self.row_kind)
        return self.schema.set(at, pa.field(self.row_kind, KIND_BYTES))

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields all rows of this Spark task, packed."""
        yield from self.pack([(combined(rows), source_partition(), "")])

    def pack(self, parts: Iterable[PackedPart], files: BlockFiles | None = None) -> Iterator[pa.RecordBatch]:
        """Yields rows of `PACKED` with all rows of a task.

        Every partition gets a message, perhaps without rows, so that the task which receives it knows its partition.

        Args:
            parts: for each its batches of `schema` in their order, or the file that they stay in, and the time and the
                source by which the part is ordered among others.
            files: those of this task, where it has some already.
        """
        missing = dict.fromkeys(range(self._partitions))
        files = self.files() if files is None else files
        most_bytes = self.most_bytes if files is None else _BLOCK_BYTES
        for batches, time, source in parts:
            if isinstance(batches, CopiedFile):  # there is one partition
                about = Message(0, self.number, time, source, 0, batches.block, self.operator, batches.columns)
                yield self._packed([about], [b""])
                missing.clear()
                continue
            count = 0
            for batch in batches if self.first is None else first_of_groups(self.first, batches):
                for partition, rows in self._cut(self._with_bytes(batch)):
                    step = max(1, int(rows.num_rows * most_bytes / max(rows.nbytes, 1)))
                    slices = [rows.slice(start, step) for start in range(0, rows.num_rows, step)]
                    yield self._messages([partition] * len(slices), (time, source), count, slices, files)
                    count += len(slices)
                    missing.pop(partition, None)
        if missing:
            nothing = [self._with_bytes(pa.RecordBatch.from_pylist([], self.schema))] * len(missing)
            yield self._messages(list(missing), (0, ""), 0, nothing, None)

    def files(self, ahead: Path | None = None) -> BlockFiles | None:
        """The files in which this task leaves its messages; None where they go with Spark's rows.

        Args:
            ahead: the folder of the next micro-batch, for which the messages are.
        """
        folder = self.folder() if ahead is None else ahead
        if self.blocks is None or folder is None:
            return None
        return BlockFiles(folder, self.blocks.least_bytes, ahead=ahead is not None)

    def folder(self, behind: int = 0) -> Path | None:
        """The folder of messages of this micro-batch, or of one so many behind it; None where there is none."""
        task = None if self.blocks is None else streaming_task()
        if self.blocks is None or task is None:
            return None
        return self.blocks.of(task.run_id, task.batch_id + behind)

    def _messages(
        self,
        partitions: Sequence[int],
        origin: tuple[int, str],
        count: int,
        rows: Sequence[pa.RecordBatch],
        files: BlockFiles | None,
    ) -> pa.RecordBatch:
        headers, messages = list[Message](), list[bytes]()
        for partition, part in zip(partitions, rows, strict=True):
            message = part.serialize()
            block = INLINE if files is None else files.put(partition, message, part.num_rows)
            messages.append(b"" if block.file else message.to_pybytes())
            headers.append(Message(partition, self.number, *origin, count + len(headers), block, self.operator))
        return self._packed(headers, messages)

    def _packed(self, headers: Sequence[Message], messages: Sequence[bytes]) -> pa.RecordBatch:
        """Rows of `PACKED`; each partition's tasks all get its messages."""
        targets = [header.target * self.shares + share for share in range(self.shares) for header in headers]
        about = [
            json.dumps(header._replace(target=target))
            for target, header in zip(targets, [*headers] * self.shares, strict=True)
        ]
        routes = [self.routes[target] for target in targets]
        return pa.record_batch([routes, about, [*messages] * self.shares], schema=PACKED)

    @property
    def _partitions(self) -> int:
        return len(self.routes) // self.shares

    def unshared(self) -> Packer:
        """A packer for one target of each partition."""
        return self if self.shares == 1 else self._replace(shares=1, routes=routes(self._partitions))

    def _with_bytes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with their row kinds as messages have them."""
        if self.row_kind is None:
            return batch
        return kinds_as_bytes(batch, self.row_kind, input_name=self.input_name, strict=self.strict)

    def _cut(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields the rows of each partition that has any, in their order."""
        if not batch.num_rows:
            return
        if not self.by or self._partitions == 1:
            yield 0, batch
            return
        keys = [batch[name] if batch[name].type == kind else batch[name].cast(kind) for name, kind in self.by]
        goes_to = partition_of(keys, batch.num_rows, self._partitions)
        # NumPy sorts numbers of 8 and 16 bits by counting them
        order = np.argsort(goes_to.astype(np.min_scalar_type(self._partitions)), kind="stable")
        sizes = np.bincount(goes_to, minlength=self._partitions)
        sorted_rows, start = batch.take(pa.array(order)), 0
        for partition in np.flatnonzero(sizes):
            size = int(sizes[partition])
            yield int(partition), sorted_rows.slice(start, size)
            start += size


class FileRows(NamedTuple):
    """Reads files, with a filter, a projection and an aggregation of their rows.

    Attributes:
        format: the format of the files.
        name: the input's name in errors.
        projection: the filter and projection of the rows; no other columns are read.
        schema: the schema of the projected rows.
        slices: the aggregation of each file's rows; None for none.
        per_batch: the number of files that a micro-batch takes, the oldest ones of a folder; 0 where that is not so.
    """

    format: FileFormat
    name: str
    projection: Projection
    schema: pa.Schema
    slices: Slices | None = None
    per_batch: int = 0

    def read(self, uri: str) -> Iterator[pa.RecordBatch]:
        """Yields the rows of one file.

        Raises:
            BadInputError: the file cannot be read.
        """
        yield from self.of(self.format.read(uri, self.projection.names, self.name))

    def of(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Filters, projects and aggregates rows as they stand in a file."""
        projected = (project(self.projection, batch, self.schema) for batch in rows)
        yield from projected if self.slices is None else self.slices.of(projected)

    def parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[OrderedBatches]:
        """The rows of a task's files, a part for each file."""
        return ((self.read(uri), time, uri) for uri, time in files_in_order(batches))

    @property
    def file_columns(self) -> tuple[str, ...] | None:
        """The columns of the files that the rows' are, each once; None where rows are chosen or made of them."""
        names = tuple(x.root.name for x in self.projection.columns if isinstance(x.root, ColumnRef))
        chosen = self.slices is not None or self.projection.where or self.projection.computed
        return None if chosen or not names or len(set(names)) < len(names) else names

    def copied(self, uri: str, files: BlockFiles) -> CopiedFile | None:
        """Leaves the rows of a file in a copy of it; None where they have to be read here.

        Args:
            uri: the file, as Hadoop writes it.
            files: where the copy goes.
        """
        columns = self.file_columns
        file_system, path = file_system_of(uri, self.name)
        if columns is None or not isinstance(file_system, pafs.LocalFileSystem):
            return None
        found = self.format.plain(path, uri, columns, self.name)
        if found is None or not found.rows or found.size < _LEAST_SHARE * found.of:
            return None
        block = files.copy(path)
        found = None if block is None else self.format.plain(block.file, uri, columns, self.name)
        if block is None or found is None:  # it is another one by now
            return None
        return CopiedFile(block._replace(rows=found.rows), columns)

    def for_all(self, readers: Sequence[RowReader]) -> FileRows:
        """Makes the reader of all columns that some readers of these files need, as they stand in the files."""
        needed = {name for reader in readers for name in cast("FileRows", reader).projection.names}
        whole = self.format.schema
        schema = pa.schema([field for field in whole if field.name in needed] or [whole.field(0)])
        return FileRows(self.format, self.name, Projection.all(schema), schema, per_batch=self.per_batch)


class RowReader(Protocol):
    """Protocol of a reader that turns a task's batches (files, messages) into rows."""

    def parts(self, batches: Iterator[pa.RecordBatch]) -> Iterable[OrderedBatches]:
        """Returns the rows part by part, in their order."""

    def for_all(self, readers: Sequence[RowReader]) -> RowReader:
        """Makes the reader of what several readers of one source, itself among them, are made of."""

    def of(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Makes the rows that this one reads of those that the reader for all reads."""


class Pack(ArrowTask):
    """Function for ``mapInArrow``: takes the batches of a reader, yields its rows as `PACKED`.

    Args:
        packer: packs the rows of the input.
        reader: reads the rows.
        projection: the filter and projection of the rows.

    Attributes:
        by_card: whether rows may stay in copies of their files, which the state server reads: of an input with one
            partition, read from files, whose columns these are (`FileRows.file_columns`).
    """

    __name__ = "gpu_join_pack_read"

    def __init__(self, packer: Packer, reader: RowReader, projection: Projection, *, by_card: bool = False) -> None:
        self.packer, self.reader, self._projection, self.by_card = packer, reader, projection, by_card

    def read_by_card(self, *, by_card: bool) -> Pack:
        """Makes this function with another `by_card`."""
        return Pack(self.packer, self.reader, self._projection, by_card=by_card)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the partition, packed."""
        files = self.packer.files() if self.by_card else None
        if files is None:
            yield from _read_and_packed([self], self.read_and_pack, batches)
            return
        rows = cast("FileRows", self.reader)
        parts = ((rows.copied(uri, files) or rows.read(uri), time, uri) for uri, time in files_in_order(batches))
        yield from self.packer.pack(parts, files)

    def read_and_pack(self, batches: Iterator[pa.RecordBatch], ahead: Path | None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a task, or those that the next micro-batch will take, packed; see `Packer.files`."""
        yield from self.of(self.reader.parts(batches), ahead)

    def of(self, parts: Iterable[OrderedBatches], ahead: Path | None) -> Iterator[pa.RecordBatch]:
        """Yields what the reader has read, packed."""
        projected = ((map(self._projected, rows), time, place) for rows, time, place in parts)
        yield from self.packer.pack(projected, self.packer.files(ahead))

    def _projected(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return project(self._projection, rows, self.packer.schema)

    def reads_as(self, other: Pack) -> bool:
        """True if both read one source in one way, which can then be read once for both."""
        own, its = self.reader, other.reader
        if isinstance(own, FileRows) and isinstance(its, FileRows):
            return own.format == its.format
        return pickle.dumps(own) == pickle.dumps(its)


class PackForSeveral(ArrowTask):
    """Function for ``mapInArrow``: reads a source once, and yields the rows of several inputs as `PACKED`.

    Args:
        packs: a function for each of the inputs; all of them read one source in one way.
    """

    __name__ = Pack.__name__

    def __init__(self, packs: Sequence[Pack]) -> None:
        self.packs = tuple(packs)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the partition, packed for each input."""
        yield from _read_and_packed(self.packs, self.read_and_pack, batches)

    def read_and_pack(self, batches: Iterator[pa.RecordBatch], ahead: Path | None) -> Iterator[pa.RecordBatch]:
        """Yields the same as `Pack.read_and_pack` for each input; the input that has read least goes on first."""
        readers = [pack.reader for pack in self.packs]
        parts = readers[0].for_all(readers).parts(batches)
        events = (((number, *part), batch) for number, (rows, *part) in enumerate(parts) for batch in rows)
        feeds = [_Feed(feed) for feed in itertools.tee(events, len(self.packs))]
        waiting = [
            (feed, pack.of(feed.parts(pack.reader), ahead)) for feed, pack in zip(feeds, self.packs, strict=True)
        ]
        while waiting:
            feed, packed = min(waiting, key=lambda one: one[0].read)
            made = next(packed, None)
            if made is None:
                waiting.remove((feed, packed))
            else:
                yield made


def _read_and_packed(
    packs: Sequence[Pack],
    packed: Callable[[Iterator[pa.RecordBatch], Path | None], Iterator[pa.RecordBatch]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Packs the rows of one source for several inputs, and reads its files ahead where that can be."""
    packer, reader = packs[0].packer, packs[0].reader
    now, then = packer.folder(), packer.folder(1)
    if not isinstance(reader, FileRows) or not reader.per_batch or now is None or then is None:
        yield from packed(batches, None)
        return

    def pack(files: Sequence[tuple[str, int]], ahead: Path | None) -> Iterator[pa.RecordBatch]:
        listed = zip(*files, strict=True) if files else ([], [])
        return packed(iter([pa.record_batch([*map(pa.array, listed)], names=["path", "time"])]), ahead)

    use = ",".join(pack.packer.use for pack in packs)
    yield from packed_ahead(files_in_order(batches), (now, then), use, reader.per_batch, pack)


class _Feed:
    """The rows that one of several inputs is given, and how many batches of them it has read."""

    def __init__(self, events: Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]) -> None:
        self._events, self.read = events, 0

    def parts(self, reader: RowReader) -> Iterator[OrderedBatches]:
        """The rows of the input's own reader, part by part; a part without rows does not come."""
        for (_, time, place), events in itertools.groupby(self._events, key=operator.itemgetter(0)):
            yield reader.of(self._batches(events)), time, place

    def _batches(self, events: Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        for _, batch in events:
            self.read += 1
            yield batch


class ReadFiles(ArrowTask):
    """Function for ``mapInArrow``: takes names of files, yields their rows.

    Args:
        name: the function's name in Spark's plans.
        rows: reads the files.
    """

    def __init__(self, name: str, rows: FileRows) -> None:
        self.__name__, self.rows = name, rows

    def __str__(self) -> str:
        return f"files of {self.rows.name} ({self.rows.format.name})"

    @property
    def output(self) -> pa.Schema:
        """The schema of the rows."""
        return self.rows.format.schema if self.rows.slices is None else self.rows.slices.output_schema

    def packing(self, packer: Packer, projection: Projection) -> Pack:
        """Makes the function that reads only the columns which are packed, and packs the rows."""
        if self.rows.slices is not None:
            return Pack(packer, self.rows, projection)
        rows = self.rows._replace(name=packer.input_name, projection=projection, schema=packer.schema)
        return Pack(packer, rows, Projection.all(packer.schema))

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the partition's files."""
        for rows, _, _ in self.rows.parts(batches):
            yield from rows


def files_in_order(batches: Iterator[pa.RecordBatch]) -> list[tuple[str, int]]:
    """The files that Spark lists, each once, by modification time (us), then path."""
    found = {file for batch in batches for file in zip(*(c.to_pylist() for c in batch.columns), strict=True)}
    return sorted(found, key=lambda file: (file[1], file[0]))
