"""Kafka topics: views as upserts with tombstones or as Debezium's envelopes, and a changelog's own messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from gpu_ops.errors import DescriptionError
from gpu_ops.messages.json_texts import writes
from gpu_ops.spark.datatypes import arrow_schema, spark_type
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark.plan.changes import made_by_tasks
from gpu_ops.spark.sinks.changes import Changes, View, json, query_of, view
from gpu_ops.spark.tasks.messages import MessageWriter


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
    spelled = {name.lower(): name for name in data_frame(changes, "what json_messages() takes").columns}
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
    writer = MessageWriter(schema, tuple(spelled[name.lower()] for name in names), headers)
    return made_by_tasks(changes, writer, "gpu_join_messages", spark_type(pa.struct(list(writer.made))))


def kafka_upsert(
    servers: str, topic: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """A function for ``foreachBatch`` that keeps a topic whose last message per key is the row, as JSON.

    A message's key is the JSON object of the key's columns, its value that of all columns, or none (a tombstone) where
    the row is gone. A repeated micro-batch sends the same messages again, which changes nothing.

    Args:
        servers: ``kafka.bootstrap.servers``.
        topic: the topic, compacted or not.
        key: columns that identify a row; by default those that are known of the changelog.
        options: of Spark's Kafka writer, such as ``kafka.security.protocol``.
    """

    def write(changes: Changes) -> None:
        rows = changes.rows.select(_key(changes).alias("key"), json(f.col("after")).alias("value"))
        _send(rows, servers, topic, options)

    return view(write, key, needs_key="an upsert topic needs a key")


def kafka_debezium(
    servers: str, topic: str, key: str | Sequence[str] | None = None, *, options: Mapping[str, str] | None = None
) -> View:
    """A function for ``foreachBatch`` that sends each changed row as an envelope of Debezium's, as JSON.

    ``op`` is ``c``, ``u`` or ``d``, with ``before`` and ``after``. ``source.sequence`` is the number of the micro-batch
    and that of the message among those of its key: it rises within a key, and a repeated micro-batch sends the same
    messages with the same ones, so that a consumer can drop them. Without a key updates are ``d`` and ``c``, and a
    message's key is the whole row.

    Args:
        servers: ``kafka.bootstrap.servers``.
        topic: the topic.
        key: columns that identify a row; by default those that are known of the changelog.
        options: of Spark's Kafka writer, such as ``kafka.security.protocol``.
    """

    def write(changes: Changes) -> None:
        op = f.when(f.col("before").isNull(), "c").when(f.col("after").isNull(), "d").otherwise("u")
        number = f.posexplode(f.sequence(f.lit(1), f.col("copies"))).alias("number", "copy")
        rows = changes.rows.select("before", "after", op.alias("op"), _key(changes).alias("key"), number)
        sequence = f.format_string(f'["{changes.batch_id}","%d"]', f.col("number"))
        source = f.struct(f.lit("gpu_ops").alias("connector"), sequence.alias("sequence"))
        envelope = f.struct("before", "after", "op", source.alias("source"))
        _send(rows.select("key", json(envelope).alias("value")), servers, topic, options)

    return view(write, key)


def _key(changes: Changes) -> Column:
    row = f.coalesce("after", "before")
    return json(f.struct(*(row[name].alias(name) for name in changes.key or changes.schema.names)))


def _send(rows: DataFrame, servers: str, topic: str, options: Mapping[str, str] | None) -> None:
    writer = rows.write.format("kafka").options(**(options or {}))
    writer.option("kafka.bootstrap.servers", servers).option("topic", topic).save()
