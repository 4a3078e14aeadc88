"""Tasks that parse messages into rows, and write rows as messages, with Arrow."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Ints
from gpu_ops.descriptions.changelog import BAD_ROW_KIND
from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import BadInputError
from gpu_ops.files.new_columns import log_new_columns
from gpu_ops.messages.json_texts import bare_texts, json_objects, json_values
from gpu_ops.messages.rows import Bad, MessageFormat, MessageRows
from gpu_ops.spark.tasks.arrow import ArrowTask, TaskIdentity, combined, source_partition, task_identity
from gpu_ops.spark.tasks.packing import OrderedBatches, Pack, Packer, RowReader
from gpu_ops.values import typed

_log = logging.getLogger(__name__)

VALUE: Final = "__value"
KEY: Final = "__key"
"""The columns of values and keys in the messages that the task takes."""

POSITION: Final = ("topic", "partition", "offset")
"""The columns of a message's position in Spark's Kafka reader."""

SEQUENCE_HEADER: Final = "sequence"
"""A message's header: ``[micro-batch,task,number]``, the numbers of a task's messages from 0 on."""

_ROWS: Final = 1 << 16


class ReadMessages(ArrowTask):
    """Function for ``mapInArrow``: takes messages, yields their rows in the order of the messages.

    Args:
        format: the format of the messages.
        location: the input's name in errors.
        output: the rows' schema: row kinds if there are any, the columns, and further columns of the messages.
        bad_rows: the treatment of a message that cannot be read: ``fail``, ``drop`` or ``tag``.
        bad: the name of the last column. With ``drop`` it is the number of messages left out, in a row of its own, or
            None if that is not counted; with ``tag`` the message's position, why it cannot be read, and its content.
    """

    __name__ = "gpu_messages"

    def __init__(
        self,
        format: MessageFormat,  # noqa: A002
        location: str,
        output: pa.Schema,
        bad_rows: str,
        bad: str | None,
    ) -> None:
        self.format, self.location, self.output = format, location, output
        self._bad_rows, self._bad = bad_rows, bad

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition's messages.

        Raises:
            BadInputError: a message cannot be read, where ``bad_rows`` is ``fail``.
        """
        for batch in batches:
            if not batch.num_rows:
                continue
            keys = batch[KEY] if self.format.key else None
            read = self.format.read(batch[VALUE], keys)
            if read.bad and self._bad_rows == "fail":
                first = read.bad[0]
                raise BadInputError(self.location, None, _where(batch, first), _sample(batch, first))
            self._look(batch[VALUE])
            yield from self._output_rows(batch, read)

    def _look(self, values: pa.Array) -> None:
        """Logs columns that messages have got; the last one of a batch stands for all of them."""
        last = next((value for value in reversed(values) if value.is_valid), None)
        if last is not None:
            names = self.format.names(last.cast(pa.binary()).as_py())
            log_new_columns(self.location, "a message", self.format.schema, names)

    def __str__(self) -> str:
        return f"messages of {self.location} ({self.format.name})"

    def parts(self, batches: Iterator[pa.RecordBatch]) -> list[OrderedBatches]:
        """The rows of a partition's messages, as one part."""
        return [(combined(self(batches)), source_partition(), "")]

    def for_all(self, readers: Sequence[RowReader]) -> ReadMessages:
        """Makes the reader for several inputs: a message is parsed as a whole."""
        del readers
        return self

    def of(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the rows as they are."""
        return iter(rows)

    def packing(self, packer: Packer, projection: Projection) -> Pack:
        """Makes the function that reads the same messages and packs their rows."""
        return Pack(packer, self, projection)

    def _output_rows(self, batch: pa.RecordBatch, found: MessageRows) -> Iterator[pa.RecordBatch]:
        columns, at = found.rows.columns, found.at
        if found.bad and self._bad_rows == "tag":
            columns, at = _with_bad(columns, at, found.bad)
        beside = self.output.names[len(columns) : None if self._bad is None else -1]
        columns = [*columns, *batch.select(beside).take(pa.array(at)).columns]
        if self._bad is not None:
            told = self._bad_rows == "tag"
            columns.append(_told(batch, at, found.bad) if told else pa.nulls(at.size, pa.int64()))
        elif found.bad:
            _log.warning("%s: %d messages left out, the first is %s", self.location, *_counted(batch, found.bad))
        yield typed(columns, self.output)
        if found.bad and self._bad is not None and self._bad_rows == "drop":
            nothing = [pa.nulls(1, kind) for kind in self.output.types[:-1]]
            yield pa.RecordBatch.from_arrays([*nothing, pa.array([len(found.bad)])], schema=self.output)


def _with_bad(rows: Sequence[pa.Array], at: Ints, bad: Sequence[Bad]) -> tuple[list[pa.Array], Ints]:
    """Inserts a row for each message that cannot be read, at its place: its row kind, all other columns null."""
    kinds, *others = rows
    kind = pa.array([BAD_ROW_KIND] * len(bad), kinds.type)
    at = np.concatenate([at, [one.at for one in bad]]).astype(np.int64)
    order = np.argsort(at, kind="stable")
    columns = [kind, *(pa.nulls(len(bad), column.type) for column in others)]
    sorted_rows = [
        pa.concat_arrays([column, more]).take(pa.array(order)) for column, more in zip(rows, columns, strict=True)
    ]
    return sorted_rows, at[order]


def _told(batch: pa.RecordBatch, at: Ints, bad: Sequence[Bad]) -> pa.Array:
    """The text of the last column: null, or the position, problem and content of a message that cannot be read."""
    words = {one.at: f"{_where(batch, one)}: {_text(batch, one)}" for one in bad}
    wrong = np.isin(at, list(words))
    told = pa.array([words[int(place)] for place in at[wrong]], pa.string())
    index = np.cumsum(wrong) - 1
    return told.take(pa.array(index, mask=~wrong))


def _counted(batch: pa.RecordBatch, bad: Sequence[Bad]) -> tuple[int, str]:
    return len(bad), _where(batch, bad[0])


def _where(batch: pa.RecordBatch, bad: Bad) -> str:
    """The position of a message, and why it cannot be read, in words."""
    known = [name for name in POSITION if name in batch.schema.names]
    place = ", ".join(f"{name} {batch[name][bad.at].as_py()}" for name in known)
    return f"a message{' at ' + place if place else ''}: {bad.problem}"


def _sample(batch: pa.RecordBatch, bad: Bad) -> str | None:
    text = _text(batch, bad)
    return text or None


def _text(batch: pa.RecordBatch, bad: Bad) -> str:
    value = batch[VALUE][bad.at]
    return value.as_buffer().to_pybytes().decode(errors="replace") if value.is_valid else ""


class JsonTexts(NamedTuple):
    """Writes each column as JSON texts, null for null.

    Attributes:
        schema: the schema of the rows.
    """

    schema: pa.Schema

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of the texts, one column for each column of the rows."""
        return pa.schema([(name, pa.string()) for name in self.schema.names])

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the texts of rows, in their order."""
        for batch in rows:
            for at in range(0, batch.num_rows, _ROWS):
                columns = batch.slice(at, _ROWS).columns
                texts = [pc.if_else(column.is_valid(), json_values(column), None) for column in columns]
                yield pa.RecordBatch.from_arrays(texts, schema=self.output_schema)


class MessageWriter(NamedTuple):
    """Writes rows as messages with JSON values.

    Attributes:
        schema: the schema of the rows.
        key: the columns of a message's key; empty for messages without a key.
        headers: whether messages have `SEQUENCE_HEADER`.
    """

    schema: pa.Schema
    key: tuple[str, ...]
    headers: bool

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of the messages, as Spark's Kafka writer takes them."""
        header = pa.struct([("key", pa.string()), ("value", pa.binary())])
        fields = [("key", pa.string(), bool(self.key)), ("value", pa.string(), True)]
        fields.append(("headers", pa.list_(pa.field("element", header)), self.headers))
        return pa.schema([(name, kind) for name, kind, there in fields if there])

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields a message for each row, in their order."""
        task, before = task_identity() if self.headers else None, 0
        for batch in rows:
            for at in range(0, batch.num_rows, _ROWS):
                part = batch.slice(at, _ROWS)
                yield pa.RecordBatch.from_arrays(
                    list(self._columns(part, task, before + at)), schema=self.output_schema
                )
            before += batch.num_rows

    def _columns(self, rows: pa.RecordBatch, task: TaskIdentity | None, before: int) -> Iterator[pa.Array]:
        names, size = self.schema.names, rows.num_rows
        keys = [rows.column(names.index(name)) for name in self.key]
        if keys:
            yield bare_texts(keys[0]) if len(keys) == 1 else json_objects(self.key, keys, size)
        yield json_objects(names, rows.columns, size)
        if task is not None:
            numbers = pa.array(np.arange(before, before + size)).cast(pa.string())
            sequence = pc.binary_join_element_wise(f"[{task.batch_id},{task.number},", numbers, "]", "")
            header = [pa.repeat(SEQUENCE_HEADER, size), sequence.cast(pa.binary())]
            one = pa.StructArray.from_arrays(header, fields=list(self.output_schema.field("headers").type.value_type))
            offsets = pa.array(np.arange(size + 1), pa.int32())
            yield pa.ListArray.from_arrays(offsets, one, type=self.output_schema.field("headers").type)
