"""The tasks that fetch Kafka's messages themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import types as st

from gpu_ops.messages.client import Configuration, Range, fetched

MESSAGE: Final = st.StructType(
    [
        st.StructField("key", st.BinaryType()), st.StructField("value", st.BinaryType()),
        st.StructField("topic", st.StringType()), st.StructField("partition", st.IntegerType()),
        st.StructField("offset", st.LongType()), st.StructField("timestamp", st.TimestampType()),
    ]
)  # fmt: skip
"""What a message has, as Spark's reader of Kafka calls it."""


class Fetch(NamedTuple):
    """How ranges become messages.

    Attributes:
        config: of a consumer.
        columns: what is wanted of messages, and what it is called.
        lost: whether messages may be gone before they were read.
    """

    config: Configuration
    columns: tuple[tuple[str, str], ...]
    lost: bool

    def of(self, ranges: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The messages, in their order."""
        for batch in ranges:
            for row in batch.to_pylist():
                wanted = Range(**row)
                for messages in fetched(self.config, wanted, lost=self.lost):
                    columns = [_column(column, wanted, messages) for column, _ in self.columns]
                    yield pa.RecordBatch.from_arrays(columns, names=[shown for _, shown in self.columns])


def _column(column: str, of: Range, messages: list[Any]) -> pa.Array:
    """A column of `MESSAGE`."""
    size = len(messages)
    match column:
        case "key":
            return pa.array([*map(type(messages[0]).key, messages)], pa.binary())
        case "value":
            return pa.array([*map(type(messages[0]).value, messages)], pa.binary())
        case "topic":
            return pa.repeat(of.topic, size)
        case "partition":
            return pa.repeat(pa.scalar(of.partition, pa.int32()), size)
        case "offset":
            first, last = messages[0].offset(), messages[-1].offset()
            if last - first + 1 == size:
                return pa.array(np.arange(first, last + 1))
            return pa.array(np.fromiter((message.offset() for message in messages), np.int64, size))
        case _:
            times = np.fromiter((message.timestamp()[1] for message in messages), np.int64, size)
            return pa.array(times).cast(pa.timestamp("ms", "UTC"))
