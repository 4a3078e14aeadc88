"""How a micro-batch's rows arrive in the task of a join, and become what a state server takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from gpu_ops.state.blocks import Block, Part, on_wire


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
        ("count", pa.int64()),
        ("crc", pa.int64()),
    ]
)
"""Many rows of one input and one partition, in one row of Spark's.

``route`` is what the shuffle goes by, ``rows`` an Arrow IPC message, if it is not where the columns from ``file`` on
say (`gpu_ops.state.blocks.Block`); ``input``, ``time``, ``source`` and ``number`` order it among the others: a file's
modification time (us), its path, and a count within it, or a source partition and a count.
"""


class Carried(NamedTuple):
    """What the packed rows of an input look like, and which lanes they go into."""

    schema: pa.Schema
    lanes: tuple[str | None, ...]
    """For each lane the input's column that it carries, or None."""

    @property
    def places(self) -> tuple[int, ...]:
        """For each column the number of its lane."""
        return tuple(self.lanes.index(name) for name in self.schema.names)


class Arrivals:
    """What becomes of `PACKED`, which `gpu_ops.spark.tasks.packing` makes.

    Args:
        wire: the schema of side, order and lanes.
        inputs: what each input's rows look like.
        first: the inputs whose rows come before those of others.
    """

    def __init__(self, wire: pa.Schema, inputs: Sequence[Carried], *, first: Sequence[int] = ()) -> None:
        self.wire, self._inputs, self._first = wire, tuple(inputs), frozenset(first)

    def to_wire(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch | Part]:
        """All rows in their order, which is total, whatever order the batches come in.

        Side, order and lanes, or where they lie in a file.
        """
        messages: list[tuple[pa.Scalar, Block]] = []
        keys: list[tuple[int, int, str, int]] = []
        for batch in batches:
            keys += zip(*(batch.column(number).to_pylist() for number in (2, 3, 4, 5)), strict=True)
            blocks = zip(*(column.to_pylist() for column in batch.columns[7:]), strict=True)
            messages += zip(batch.column(6), map(Block._make, blocks), strict=True)
        arrived, lanes = 0, [carried.places for carried in self._inputs]
        for message in sorted(range(len(keys)), key=lambda at: (keys[at][0] not in self._first, keys[at])):
            number = keys[message][0]
            inline, block = messages[message]
            if block.file:
                yield Part(number, lanes[number], arrived, block)
                arrived += block.rows
                continue
            rows = pa.ipc.read_record_batch(inline.as_buffer(), self._inputs[number].schema)
            if rows.num_rows:  # else it names the partition
                yield on_wire(rows, number, lanes[number], arrived, self.wire)
                arrived += rows.num_rows
