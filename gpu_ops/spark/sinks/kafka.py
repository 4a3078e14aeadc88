"""Views as Kafka topics: upserts with tombstones, or Debezium's envelopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from gpu_ops.spark.sinks.changes import Changes, View, json, view


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
