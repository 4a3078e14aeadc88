"""Tasks that make messages of their rows themselves: keys and values are JSON before they are Spark's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.messages.json_texts import bare_texts, json_objects
from gpu_ops.spark.tasks.arrow import TaskIdentity, task_identity

SEQUENCE_HEADER: Final = "sequence"
"""A message's header: ``[micro-batch,task,number]``, the numbers of a task's messages from 0 on."""

_ROWS: Final = 1 << 16


class MessageWriter(NamedTuple):
    """How rows become messages.

    Attributes:
        schema: of the rows.
        key: the columns that make a message's key; none for messages without.
        headers: whether messages have `SEQUENCE_HEADER`.
    """

    schema: pa.Schema
    key: tuple[str, ...]
    headers: bool

    @property
    def made(self) -> pa.Schema:
        """Of a message per row, as Spark's Kafka writer takes them."""
        header = pa.struct([("key", pa.string()), ("value", pa.binary())])
        fields = [("key", pa.string(), bool(self.key)), ("value", pa.string(), True)]
        fields.append(("headers", pa.list_(pa.field("element", header)), self.headers))
        return pa.schema([(name, kind) for name, kind, there in fields if there])

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A message per row, in their order."""
        task, before = task_identity() if self.headers else None, 0
        for batch in rows:
            for at in range(0, batch.num_rows, _ROWS):
                part = batch.slice(at, _ROWS)
                yield pa.RecordBatch.from_arrays(list(self._columns(part, task, before + at)), schema=self.made)
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
            one = pa.StructArray.from_arrays(header, fields=list(self.made.field("headers").type.value_type))
            offsets = pa.array(np.arange(size + 1), pa.int32())
            yield pa.ListArray.from_arrays(offsets, one, type=self.made.field("headers").type)
