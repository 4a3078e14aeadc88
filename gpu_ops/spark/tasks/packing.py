"""Many rows in one of Spark's: what a join's inputs become before they are shuffled.

Tasks of the map stage make Arrow messages, one for each partition of the join and so many rows; Spark shuffles
those. Rows that are Arrow's from the start, as those of `gpu_ops.read_files`, never turn into Spark's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from gpu_ops.files.formats import FileFormat
from gpu_ops.spark.tasks.arrow import ArrowTask, combined, source_partition, streaming_task
from gpu_ops.spark.tasks.rows import FirstRows, Slices, Taken
from gpu_ops.spark.wire.arrivals import PACKED, Message
from gpu_ops.spark.wire.hashes import partition_of
from gpu_ops.state.blocks import INLINE, BlockFiles, Blocks

_BLOCK_BYTES: Final = 1 << 24
"""Of a message in a file."""


Part = tuple[Iterator[pa.RecordBatch], int, str]
"""Rows, and what orders them first (a time) and second (where they are from)."""


class Packer(NamedTuple):
    """How the rows of one input are cut into partitions.

    Attributes:
        input_name: for errors.
        operator: the plan id of the operator whose input it is.
        number: of the input.
        schema: of its rows, row kinds included.
        by: the columns that they are distributed by, and in which type; none: to partition 0.
        routes: for each partition the number that Spark's shuffle sends there.
        most_bytes: of one message, about.
        first: which rows of a task are needed; None for all.
        blocks: where messages are left, if tasks are on one machine; else they go with Spark's rows.
    """

    input_name: str
    operator: str
    number: int
    schema: pa.Schema
    by: tuple[tuple[str, pa.DataType], ...]
    routes: tuple[int, ...]
    most_bytes: int
    first: FirstRows | None = None
    blocks: Blocks | None = None

    @property
    def made(self) -> pa.Schema:
        """`PACKED`."""
        return PACKED

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows of this Spark task, packed."""
        yield from self.of_partition(rows, source_partition())

    def of_partition(self, rows: Iterator[pa.RecordBatch], number: int) -> Iterator[pa.RecordBatch]:
        """The rows of a task, or of a partition of an operator below, packed; its number orders them among others."""
        yield from self.pack([(combined(rows), number, "")])

    def pack(self, parts: Iterable[Part]) -> Iterator[pa.RecordBatch]:
        """Rows of `PACKED`, of all that a task has.

        Every partition gets a message, if it is one without rows: so the task that it comes to knows which it is.

        Args:
            parts: of each its batches of `schema` in the order of their rows, and what orders them first (a time) and
                second (where they are from).
        """
        missing = dict.fromkeys(range(len(self.routes)))
        files = self._files()
        most_bytes = self.most_bytes if files is None else _BLOCK_BYTES
        for batches, time, source in parts:
            count = 0
            for batch in batches if self.first is None else self.first.of(batches):
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
        """Where this task leaves its messages."""
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
        about, messages = list[str](), list[bytes]()
        for partition, part in zip(partitions, rows, strict=True):
            message = part.serialize()
            block = INLINE if files is None else files.put(partition, message, part.num_rows)
            messages.append(b"" if block.file else message.to_pybytes())
            about.append(json.dumps(Message(partition, self.number, *origin, count + len(about), block, self.operator)))
        routes = [self.routes[partition] for partition in partitions]
        return pa.record_batch([routes, about, messages], schema=PACKED)

    def _cut(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each partition that has any, in their order."""
        if not batch.num_rows:
            return
        if not self.by or len(self.routes) == 1:
            yield 0, batch
            return
        keys = [batch[name] if batch[name].type == kind else batch[name].cast(kind) for name, kind in self.by]
        goes_to = partition_of(keys, batch.num_rows, len(self.routes))
        # NumPy sorts numbers of 8 and 16 bits by counting them
        order = np.argsort(goes_to.astype(np.min_scalar_type(len(self.routes))), kind="stable")
        sizes = np.bincount(goes_to, minlength=len(self.routes))
        sorted_rows, start = batch.take(pa.array(order)), 0
        for partition in np.flatnonzero(sizes):
            size = int(sizes[partition])
            yield int(partition), sorted_rows.slice(start, size)
            start += size


class FileRows(NamedTuple):
    """What is taken of files' rows.

    Attributes:
        format: how the files are read.
        name: what errors call the input.
        taken: of the rows; no other columns are read.
        schema: of what is taken.
        slices: how each file's are aggregated then; None for not at all.
    """

    format: FileFormat
    name: str
    taken: Taken
    schema: pa.Schema
    slices: Slices | None = None

    def read(self, uri: str) -> Iterator[pa.RecordBatch]:
        """A file's.

        Raises:
            BadInputError: it cannot be read.
        """
        rows = (self.taken.of(batch, self.schema) for batch in self.format.read(uri, self.taken.names, self.name))
        yield from rows if self.slices is None else self.slices.of(rows)

    def parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Part]:
        """Those of a task's files, one after the other."""
        return ((self.read(uri), time, uri) for uri, time in files_in_order(batches))


class Reader(Protocol):
    """What makes rows of what a task is given."""

    def parts(self, batches: Iterator[pa.RecordBatch]) -> Iterable[Part]:
        """The rows part by part, in their order."""


class Pack(ArrowTask):
    """The function of ``mapInArrow``: what a reader takes in, its rows out as `PACKED`.

    Args:
        packer: of the input.
        reader: makes the rows.
        taken: what is packed of them.
    """

    __name__ = "gpu_join_pack_read"

    def __init__(self, packer: Packer, reader: Reader, taken: Taken) -> None:
        self._packer, self._reader, self._taken = packer, reader, taken

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the rows of the partition, packed."""
        parts = self._reader.parts(batches)
        yield from self._packer.pack((map(self._of, rows), time, place) for rows, time, place in parts)

    def _of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return self._taken.of(rows, self._packer.schema)


class ReadFiles(ArrowTask):
    """The function of ``mapInArrow``: files in, their rows out.

    Args:
        name: how Spark shows it in plans.
        rows: of the files.
    """

    def __init__(self, name: str, rows: FileRows) -> None:
        self.__name__, self.rows = name, rows

    def __str__(self) -> str:
        return f"files of {self.rows.name} ({self.rows.format.name})"

    @property
    def output(self) -> pa.Schema:
        """Of the rows."""
        return self.rows.format.schema if self.rows.slices is None else self.rows.slices.made

    def packing(self, packer: Packer, taken: Taken) -> Pack:
        """The same rows packed: nothing else of them is read."""
        if self.rows.slices is not None:
            return Pack(packer, self.rows, taken)
        rows = FileRows(self.rows.format, packer.input_name, taken, packer.schema)
        return Pack(packer, rows, Taken.all(packer.schema))

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the rows of the partition's files."""
        for rows, _, _ in self.rows.parts(batches):
            yield from rows


def files_in_order(batches: Iterator[pa.RecordBatch]) -> list[tuple[str, int]]:
    """Files as Spark lists them, each once, by modification time (us), then path."""
    found = {file for batch in batches for file in zip(*(c.to_pylist() for c in batch.columns), strict=True)}
    return sorted(found, key=lambda file: (file[1], file[0]))
