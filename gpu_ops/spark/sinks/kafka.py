"""Kafka topics: views as upserts with tombstones or as Debezium's envelopes, and a changelog's own messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from gpu_ops.errors import DescriptionError
from gpu_ops.messages.client import configured
from gpu_ops.spark.datatypes import spark_type
from gpu_ops.spark.given import data_frame
from gpu_ops.spark.plan.changes import made_by_tasks
from gpu_ops.spark.sinks.changes import Changes, View, json, started, view
from gpu_ops.spark.sinks.messages import message_writer
from gpu_ops.spark.tasks.send import SENT, MessageSender


def write_kafka(
    changes: DataFrame,
    servers: str,
    topic: str,
    *,
    key: str | Sequence[str] = (),
    headers: bool = True,
    checkpoint: str | None = None,
    name: str | None = None,
    options: Mapping[str, str] | None = None,
    **trigger: Any,
) -> StreamingQuery:
    """Starts a query that sends a changelog to a topic: the messages of `json_messages`, by librdkafka.

    The tasks that make the rows send them, so neither rows nor messages come to the JVM; ``numOutputRows`` of Spark's
    progress counts tasks. At-least-once as Spark's Kafka sink: a micro-batch is done when all its messages have
    arrived, and a repeated one sends them again, with the same ``sequence``.

    Args:
        changes: a streaming DataFrame.
        servers: ``bootstrap.servers``.
        topic: the topic. Messages with a key go to the partition that Kafka's own client would send them to.
        key: as in `json_messages`.
        headers: likewise.
        checkpoint: Spark's ``checkpointLocation``; by default what the session has for it.
        name: of the query.
        options: properties of librdkafka, each with ``kafka.`` before it: ``kafka.linger.ms``.
        trigger: Spark's, as ``DataStreamWriter.trigger`` takes it: ``availableNow=True``,
            ``processingTime="10 seconds"``.

    Raises:
        DescriptionError: no streaming DataFrame, no such column or property, or a column that JSON has no text of.
        NotBuiltError: the package ``confluent-kafka`` is not installed.
    """
    if not data_frame(changes, "what write_kafka() takes").isStreaming:
        raise DescriptionError(
            "write_kafka() takes a streaming DataFrame; for a static one there is Spark's own writer"
        )
    config = configured(servers, options or {}, sends=True)
    sender = MessageSender(*message_writer(changes, key, headers=headers), topic, config)
    sent = made_by_tasks(changes, sender, "gpu_join_send", spark_type(pa.struct(list(SENT))))
    return started(sent.writeStream.format("noop"), checkpoint, name, trigger)


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
