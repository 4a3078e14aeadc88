"""Messages of a changelog, made by the tasks that make its rows."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame

from gpu_ops.errors import DescriptionError
from gpu_ops.messages.json_texts import writes
from gpu_ops.spark.datatypes import arrow_schema, spark_type
from gpu_ops.spark.given import data_frame
from gpu_ops.spark.plan.changes import made_by_tasks
from gpu_ops.spark.sinks.changes import query_of
from gpu_ops.spark.tasks.message import MessageWriter


def json_messages(changes: DataFrame, key: str | Sequence[str] = (), *, headers: bool = True) -> DataFrame:
    """A message per row for Spark's Kafka writer: a column ``value``, with ``key=`` ``key``, and ``headers``.

    A value is a JSON object of all columns, row kinds included, null where a column is. Times are in ISO 8601 with
    microseconds, instants in UTC; bytes are base64, NaN and the infinities texts. Texts are made by the tasks that make
    the rows, by Arrow, where `gpu_ops.write_files` would write files in them; else they are made of Spark's rows.

    Spark's Kafka sink is at-least-once: a repeated micro-batch sends its messages again. So each has a header
    ``sequence``, ``[micro-batch,task,number]``, which rises within a task's messages in each partition of the topic: a
    consumer that keeps the last one can drop those that are not above it. A repetition has the same ones where rows
    have an order, which `gpu_ops.read_files`, `gpu_ops.read_kafka` and ``sequence_by`` give them; and lies in the same
    partitions where messages have keys.

    Args:
        changes: a DataFrame, streaming or not.
        key: columns that make a message's key: the bare text of one column, a JSON object of several.
        headers: whether messages have it; those of a static DataFrame outside of a streaming query have none.

    Raises:
        DescriptionError: no such column, or one of a type that JSON has no text of: an interval.
    """
    writer = message_writer(data_frame(changes, "what json_messages() takes"), key, headers=headers)
    return made_by_tasks(changes, writer, "gpu_join_messages", spark_type(pa.struct(list(writer.made))))


def message_writer(changes: DataFrame, key: str | Sequence[str], *, headers: bool) -> MessageWriter:
    """What makes messages of rows; arguments and errors as in `json_messages`."""
    spelled = {name.lower(): name for name in changes.columns}
    names = (key,) if isinstance(key, str) else tuple(key)
    for name in names:
        if name.lower() not in spelled:
            raise DescriptionError(f"key={name!r} is no column; there are {', '.join(changes.columns)}")
    schema = arrow_schema(changes.schema, "changes")
    for field in schema:
        if not writes(field.type):
            kind = changes.schema[field.name].dataType.simpleString()
            raise DescriptionError(f"column {field.name!r} is {kind}, which has no JSON text: cast it")
    headers = headers and (changes.isStreaming or query_of(changes) != "none")
    return MessageWriter(schema, tuple(spelled[name.lower()] for name in names), headers)
