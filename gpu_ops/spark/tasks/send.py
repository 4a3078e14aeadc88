"""The tasks that send messages to Kafka themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final, NamedTuple

import pyarrow as pa

from gpu_ops.messages.client import Configuration, Sender
from gpu_ops.spark.tasks.message import SEQUENCE_HEADER, MessageWriter

SENT: Final = pa.schema([("sent", pa.int64())])
"""Of what becomes Spark's: how many messages a task has sent."""


class MessageSender(NamedTuple):
    """Makes messages of rows and sends them.

    Attributes:
        schema: as in `MessageWriter`, as are the next two.
        key: the columns of a message's key.
        headers: whether messages have a sequence.
        topic: where to.
        config: of a producer.
    """

    schema: pa.Schema
    key: tuple[str, ...]
    headers: bool
    topic: str
    config: Configuration

    @property
    def made(self) -> pa.Schema:
        """`SENT`."""
        return SENT

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """How many there were, once all have arrived."""
        sender, sent = Sender(self.config, self.topic), 0
        for messages in MessageWriter(self.schema, self.key, self.headers).of(rows):
            keys = messages["key"].cast(pa.binary()).to_pylist() if self.key else repeat(None)
            sender.send(keys, messages["value"].cast(pa.binary()).to_pylist(), self._headers(messages))
            sent += messages.num_rows
        sender.finish()
        yield pa.RecordBatch.from_arrays([pa.array([sent])], schema=SENT)

    def _headers(self, messages: pa.RecordBatch) -> Iterator[Any]:
        if not self.headers:
            return repeat(None)
        values = messages["headers"].flatten().field("value").to_pylist()
        return ([header] for header in zip(repeat(SEQUENCE_HEADER), values))
