"""Packs many rows of a join's input into one row of Spark's before they are shuffled.

Tasks of the map stage make Arrow messages, one for each partition of the join and some thousand rows; Spark shuffles
those. Rows that Arrow reads, as those of `gpu_ops.read_files`, never turn into Spark's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from gpu_ops.descriptions.projection import Projection
from gpu_ops.files.formats import FileFormat
from gpu_ops.operators.core.projection import project
from gpu_ops.operators.groups.top import FirstOfGroup
from gpu_ops.spark.tasks.arrow import ArrowTask, combined, source_partition, streaming_task
from gpu_ops.spark.tasks.rows import Slices, first_of_groups
from gpu_ops.spark.wire.arrivals import PACKED, Message
from gpu_ops.spark.wire.hashes import partition_of, routes
from gpu_ops.state.blocks import INLINE, BlockFiles, Blocks

_BLOCK_BYTES: Final = 1 << 24
"""The size of a message in a file, about."""


OrderedBatches = tuple[Iterator[pa.RecordBatch], int, str]
"""Batches of rows, and the time and source by which they are ordered among others."""


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

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of packed rows, `PACKED`."""
        return PACKED

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields all rows of this Spark task, packed."""
        yield from self.pack([(combined(rows), source_partition(), "")])

    def pack(self, parts: Iterable[OrderedBatches]) -> Iterator[pa.RecordBatch]:
        """Yields rows of `PACKED` with all rows of a task.

        Every partition gets a message, perhaps without rows, so that the task which receives it knows its partition.

        Args:
            parts: for each its batches of `schema` in their order, and the time and the source by which the part is
                ordered among others.
        """
        missing = dict.fromkeys(range(self._partitions))
        files = self._files()
        most_bytes = self.most_bytes if files is None else _BLOCK_BYTES
        for batches, time, source in parts:
            count = 0
            for batch in batches if self.first is None else first_of_groups(self.first, batches):
                for partition, rows in self._cut(batch):
                    step = max(1, int(rows.num_rows * most_bytes / max(rows.nbytes, 1)))
                    slices = [rows.slice(start, step) for start in range(0, rows.num_rows, step)]
                    yield self._messages([partition] * len(slices), (time, source), count, slices, files)
                    count += len(slices)
                    missing.pop(partition, None)
        if missing:
            nothing = [pa.RecordBatch.from_pylist([], self.schema)] * len(missing)
            yield self._messages(list(missing), (0, ""), 0, nothing, None)

    def _files(self) -> BlockFiles | None:
        """The files in which this task leaves its messages; None where they go with Spark's rows."""
        task = None if self.blocks is None else streaming_task()
        if self.blocks is None or task is None or (folder := self.blocks.of(task.run_id, task.batch_id)) is None:
            return None
        return BlockFiles(folder, self.blocks.least_bytes)

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
        targets = [partition * self.shares + share for share in range(self.shares) for partition in partitions]
        about = [
            json.dumps(header._replace(target=target))
            for target, header in zip(targets, headers * self.shares, strict=True)
        ]
        routes = [self.routes[target] for target in targets]
        return pa.record_batch([routes, about, messages * self.shares], schema=PACKED)

    @property
    def _partitions(self) -> int:
        return len(self.routes) // self.shares

    def unshared(self) -> Packer:
        """A packer for one target of each partition."""
        return self if self.shares == 1 else self._replace(shares=1, routes=routes(self._partitions))

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
    """

    format: FileFormat
    name: str
    projection: Projection
    schema: pa.Schema
    slices: Slices | None = None

    def read(self, uri: str) -> Iterator[pa.RecordBatch]:
        """Yields the rows of one file.

        Raises:
            BadInputError: the file cannot be read.
        """
        rows = (
            project(self.projection, batch, self.schema)
            for batch in self.format.read(uri, self.projection.names, self.name)
        )
        yield from rows if self.slices is None else self.slices.of(rows)

    def parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[OrderedBatches]:
        """The rows of a task's files, a part for each file."""
        return ((self.read(uri), time, uri) for uri, time in files_in_order(batches))


class RowReader(Protocol):
    """Protocol of a reader that turns a task's batches (files, messages) into rows."""

    def parts(self, batches: Iterator[pa.RecordBatch]) -> Iterable[OrderedBatches]:
        """Returns the rows part by part, in their order."""


class Pack(ArrowTask):
    """Function for ``mapInArrow``: takes the batches of a reader, yields its rows as `PACKED`.

    Args:
        packer: packs the rows of the input.
        reader: reads the rows.
        projection: the filter and projection of the rows.
    """

    __name__ = "gpu_join_pack_read"

    def __init__(self, packer: Packer, reader: RowReader, projection: Projection) -> None:
        self._packer, self._reader, self._projection = packer, reader, projection

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the partition, packed."""
        parts = self._reader.parts(batches)
        yield from self._packer.pack((map(self._of, rows), time, place) for rows, time, place in parts)

    def _of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return project(self._projection, rows, self._packer.schema)


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
        rows = FileRows(self.rows.format, packer.input_name, projection, packer.schema)
        return Pack(packer, rows, Projection.all(packer.schema))

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the partition's files."""
        for rows, _, _ in self.rows.parts(batches):
            yield from rows


def files_in_order(batches: Iterator[pa.RecordBatch]) -> list[tuple[str, int]]:
    """The files that Spark lists, each once, by modification time (us), then path."""
    found = {file for batch in batches for file in zip(*(c.to_pylist() for c in batch.columns), strict=True)}
    return sorted(found, key=lambda file: (file[1], file[0]))
