"""Turns the packed rows that arrive in a join's task into the ordered batches that a state server takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from gpu_ops.state.blocks import INLINE, Block, FilePart, on_wire

PACKED: Final = pa.schema([("route", pa.int32()), ("about", pa.string()), ("rows", pa.binary())])
"""Schema of one Spark row that holds many rows of one input and one partition.

``route`` is the shuffle's key, ``about`` the text of a `Message`, ``rows`` an Arrow IPC message, if the rows are not in
a file. It has as few columns as possible: Spark generates code for each of them, anew in every task.
"""


class Message(NamedTuple):
    """The header of a row of `PACKED`: its target, the fields that order it among the others, and its block.

    Attributes:
        target: which of the operator's tasks it is for: those of a partition, each for another share of its changes,
            come one after another.
        input: the number of the input.
        time: a file's modification time (us), or 0.
        source: a file's path, or "".
        number: a count within the source.
        block: the place of the rows, inline or in a file.
        operator: the plan id of the operator that they are for, as one task may run several.
        columns: where the block is a copy of the source, a Parquet file, the columns that the input's are there.
    """

    target: int
    input: int
    time: int
    source: str
    number: int
    block: Block
    operator: str
    columns: tuple[str, ...] = ()

    @property
    def origin(self) -> tuple[int, int, str]:
        """The input and the source of the rows."""
        return self.input, self.time, self.source

    @classmethod
    def of(cls, text: str) -> Message:
        """Reads a header from its JSON text."""
        *first, block, operator, columns = json.loads(text)
        return cls._make((*first, Block._make(block), operator, tuple(columns)))


def by_operator(batch: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Groups messages by the operator and the target that they are for.

    Args:
        batch: of `PACKED`.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    for row, about in enumerate(map(Message.of, batch["about"].to_pylist())):
        rows.setdefault((about.operator, about.target), []).append(row)
    for (operator, target), some in rows.items():
        yield operator, target, batch if len(rows) == 1 else batch.take(pa.array(some))


class Carried(NamedTuple):
    """The schema of an input's packed rows, and the union columns that they go into."""

    schema: pa.Schema
    union_columns: tuple[str | None, ...]
    """For each union column the input's column that it carries, or None."""

    @property
    def places(self) -> tuple[int, ...]:
        """For each column of the input the number of its union column."""
        return tuple(self.union_columns.index(name) for name in self.schema.names)


class Arrivals:
    """Unpacks and orders rows of `PACKED`, which `gpu_ops.spark.tasks.packing` makes.

    Args:
        wire: the schema of side, sequence and union columns.
        inputs: the layout of each input's rows.
        first: the inputs whose rows come before those of others.
        numbers: of a dataflow, the number of each operator's input that comes from outside, by plan id and number.
    """

    def __init__(
        self,
        wire: pa.Schema,
        inputs: Sequence[Carried],
        *,
        first: Sequence[int] = (),
        numbers: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.wire, self.inputs, self.first, self.numbers = wire, tuple(inputs), frozenset(first), numbers

    def of_operators(self, plan_id: str) -> frozenset[str]:
        """The plan ids of the operators whose rows these are: of a dataflow those that take rows from outside."""
        return frozenset([plan_id] if self.numbers is None else (operator for operator, _ in self.numbers))

    def _numbered(self, message: Message) -> Message:
        if self.numbers is None:
            return message
        return message._replace(input=self.numbers[message.operator, message.input])

    def to_wire(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch | FilePart]:
        """Yields all rows in their total order, whatever order the batches come in.

        A part of them is a batch of side, sequence and union columns, or says where such rows lie in a file.
        """
        messages, read = list[tuple[Message, pa.Scalar]](), set[Message]()
        for batch in batches:
            for about, inline in zip(map(Message.of, batch["about"].to_pylist()), batch["rows"], strict=True):
                same = about._replace(block=INLINE)
                if not about.source or same not in read:  # Spark may have had a file read twice
                    messages.append((self._numbered(about), inline))
                    read.add(same)
        copied = {message.origin for message, _ in messages if message.columns}
        if copied:  # and one of the tasks that read a file may have had no room for a copy
            messages = [one for one in messages if one[0].columns or one[0].origin not in copied]
        arrived, places = 0, [carried.places for carried in self.inputs]
        messages.sort(key=lambda message: (message[0].input not in self.first, message[0][1:5]))
        for message, inline in messages:
            number, block = message.input, message.block
            if block.file:
                source = message.source if message.columns else ""
                yield FilePart(number, places[number], arrived, block, message.columns, source)
                arrived += block.rows
                continue
            rows = pa.ipc.read_record_batch(inline.as_buffer(), self.inputs[number].schema)
            if rows.num_rows:  # else it names the partition
                yield on_wire(rows, number, places[number], arrived, self.wire)
                arrived += rows.num_rows
