"""How a micro-batch's rows arrive in the task of a join, and become what a state server takes."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa


def typed(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """A batch of columns in the types of a schema."""
    columns = [c if c.type == kind else c.cast(kind) for c, kind in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


PACKED: Final = pa.schema(
    [
        ("route", pa.int32()),
        ("partition", pa.int32()),
        ("input", pa.int32()),
        ("time", pa.int64()),
        ("source", pa.string()),
        ("number", pa.int64()),
        ("rows", pa.binary()),
        ("file", pa.string()),
        ("start", pa.int64()),
        ("size", pa.int64()),
    ]
)
"""Many rows of one input and one partition, in one row of Spark's.

``route`` is what the shuffle goes by, ``rows`` an Arrow IPC message, if it is not where ``file``, ``start`` and
``size`` say (`gpu_ops.spark.wire.arrivals.Block`); ``input``, ``time``, ``source`` and ``number`` order it among the
others: a file's modification time (us), its path, and a count within it, or a source partition and a count.
"""


class Carried(NamedTuple):
    """What the packed rows of an input look like, and which lanes they go into."""

    schema: pa.Schema
    lanes: tuple[str | None, ...]
    """For each lane the input's column that it carries, or None."""


class Arrivals:
    """What becomes of `PACKED`, which `gpu_ops.spark.tasks.packing` makes.

    Args:
        wire: the schema of side, order and lanes.
        inputs: what each input's rows look like.
        first: the inputs whose rows come before those of others.
    """

    def __init__(self, wire: pa.Schema, inputs: Sequence[Carried], *, first: Sequence[int] = ()) -> None:
        self.wire, self._inputs, self._first = wire, tuple(inputs), frozenset(first)

    def to_wire(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Side, order and lanes of all rows, in their order, which is total, whatever order the batches come in."""
        messages: list[tuple[pa.Scalar, Block]] = []
        keys: list[tuple[int, int, str, int]] = []
        for batch in batches:
            keys += zip(*(batch.column(number).to_pylist() for number in (2, 3, 4, 5)), strict=True)
            blocks = zip(*(batch.column(number).to_pylist() for number in (7, 8, 9)), strict=True)
            messages += zip(batch.column(6), map(Block._make, blocks), strict=True)
        arrived, mapped = 0, Mapped()
        for message in sorted(range(len(keys)), key=lambda at: (keys[at][0] not in self._first, keys[at])):
            number = keys[message][0]
            carried = self._inputs[number]
            inline, block = messages[message]
            found = mapped.message(block) if block.file else inline.as_buffer()
            rows = pa.ipc.read_record_batch(found, carried.schema)
            if not rows.num_rows:
                continue  # it names the partition
            order = pa.array(np.arange(arrived, arrived + rows.num_rows))
            side = pa.array(np.full(rows.num_rows, number, np.int8))
            arrived += rows.num_rows
            lanes = [
                pa.nulls(rows.num_rows, field.type) if name is None else rows[name]
                for name, field in zip(carried.lanes, list(self.wire)[2:], strict=True)
            ]
            yield pa.RecordBatch.from_arrays([side, order, *lanes], schema=self.wire)


LEAST_BYTES: Final = 1 << 16
"""Of a message in a file: to make one takes as long as Spark takes for that many."""


class Block(NamedTuple):
    """Where an Arrow message is.

    Attributes:
        file: its path; empty where the message is with Spark's rows.
        start: of the message in it, in bytes.
        size: in bytes.
    """

    file: str
    start: int
    size: int


INLINE: Final = Block("", 0, 0)


class Blocks(NamedTuple):
    """The files of an application on one machine.

    Attributes:
        folder: where they are; a folder of each run of a query, and in it one of each micro-batch.
        least_bytes: of a message in a file; smaller ones go with Spark's rows.
    """

    folder: str
    least_bytes: int

    def written(self, run_id: str, batch_id: int) -> contextlib.AbstractContextManager[BlockFile]:
        """The file of one task of a micro-batch, made when something is put into it."""
        return contextlib.closing(BlockFile(Path(self.folder, run_id, str(batch_id)), self.least_bytes))

    def forget(self, run_id: str) -> None:
        """Removes what there is of a run that is over."""
        if run_id:
            shutil.rmtree(Path(self.folder, run_id), ignore_errors=True)


class BlockFile:
    """A file of Arrow messages.

    Args:
        folder: of its micro-batch.
        least_bytes: of a message that is put into it.
    """

    def __init__(self, folder: Path, least_bytes: int) -> None:
        self._folder, self._least_bytes, self._path = folder, least_bytes, ""
        self._sink: pa.NativeFile | None = None
        self._at = 0

    def put(self, message: pa.Buffer) -> Block:
        """Appends a message; `INLINE` where it is too small."""
        if message.size < self._least_bytes:
            return INLINE
        if self._sink is None:
            for folder in (*reversed(self._folder.parents[:2]), self._folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            for other in self._folder.parent.iterdir():  # micro-batches of a run come one after another
                if int(other.name) < int(self._folder.name):
                    shutil.rmtree(other, ignore_errors=True)
            self._path = str(self._folder / uuid.uuid4().hex)
            self._sink = pa.OSFile(self._path, "wb")
        self._sink.write(message)
        start, self._at = self._at, self._at + message.size
        return Block(self._path, start, message.size)

    def close(self) -> None:
        """Nothing more is put into it."""
        if self._sink is not None:
            self._sink.close()


def local_blocks(context: Any) -> Blocks:
    """Of an application in local mode: in the folder that Spark has for its Python side and removes at its end.

    Args:
        context: the SparkContext.
    """
    return Blocks(str(Path(context._temp_dir, "blocks")), LEAST_BYTES)


class Mapped:
    """Files mapped into memory, each once."""

    def __init__(self) -> None:
        self._files: dict[str, pa.Buffer] = {}

    def message(self, block: Block) -> pa.Buffer:
        """What was put there."""
        if block.file not in self._files:
            with pa.memory_map(block.file) as file:
                self._files[block.file] = file.read_buffer()
        return self._files[block.file].slice(block.start, block.size)
