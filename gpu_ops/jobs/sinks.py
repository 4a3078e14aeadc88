"""Sinks: a changelog to a running query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.jobs.connectors import FORMATS
from gpu_ops.jobs.job import Job, Sink
from gpu_ops.jobs.sources import failed
from gpu_ops.jobs.text import Text
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.settings import metrics_reported
from gpu_ops.spark.sinks.changes import View, json_messages, kafka_debezium, kafka_upsert, started
from gpu_ops.spark.sinks.delta import delta_view
from gpu_ops.spark.sinks.files import FilesFormat, write_files
from gpu_ops.spark.sinks.jdbc import jdbc_view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

OBSERVED: Final = "gpu_join_job"
"""Under this name Spark's progress has the changes of a micro-batch by row kind, where no join reports them all."""

KINDS: Final = {"insert": "+I", "update_before": "-U", "update_after": "+U", "delete": "-D"}


def start(
    changes: DataFrame, job: Job, *, once: bool, last_join: str | None, screen: View | None = None
) -> StreamingQuery:
    """Starts a job's query. Its changes are counted, unless a join reports them all, or Spark cannot.

    Args:
        changes: the changelog, row kinds first.
        job: the job.
        once: take what there is and end.
        last_join: the join whose output is all that goes to the sink, or None.
        screen: takes it in place of the sink.

    Raises:
        JobError: the sink cannot take it.
    """
    kind = f.col(ROW_KIND_COLUMN)
    counts = [f.count(f.when(kind == k, 1)).alias(name) for name, k in KINDS.items()]
    known = last_join is not None or metrics_reported(changes.sparkSession)
    counted = changes if known else changes.observe(OBSERVED, *counts)
    try:
        rows = shaped(counted, job.sink, job.file)
        name = job.sink.table or job.name
        trigger: dict[str, Any] = {}
        if once:
            trigger["availableNow"] = True
        elif job.every_ms is not None:
            trigger["processingTime"] = f"{job.every_ms} milliseconds"
        if screen is not None:
            writer = rows.writeStream.foreachBatch(screen)
        elif job.sink.by_tasks:
            return written(rows, job.sink, checkpoint=job.checkpoint, name=name, **trigger)
        elif job.sink.is_view:
            writer = rows.writeStream.foreachBatch(view(job.sink))
        else:
            if job.sink.connector == "kafka":
                rows = messages(rows, job.sink, job.file)
            writer = rows.writeStream.format(FORMATS.get(job.sink.connector, job.sink.connector))
            writer = writer.options(**job.sink.options)
        return started(writer.outputMode("append"), job.checkpoint, name, trigger)
    except NotBuiltError as error:
        raise job.file.error(str(error), job.sink.at) from error
    except AnalysisException as error:
        raise failed(changes.sparkSession, job.file, job.sink.connector, job.sink.at, error) from error


def written(rows: DataFrame, sink: Sink, **how: Any) -> StreamingQuery:
    """Starts the query of a sink whose files the tasks write that make the rows.

    Raises:
        JobError: Arrow has no such compression.
    """
    given: dict[str, Any] = {} if sink.file_bytes is None else {"file_bytes": sink.file_bytes}
    if "compression" in sink.options:
        named = sink.options["compression"].lower()
        given["compression"] = None if named in ("none", "uncompressed") else named
    kind = cast("FilesFormat", sink.connector)
    return write_files(rows, sink.options["path"], format=kind, partition_by=sink.partition_by, **given, **how)


def view(sink: Sink) -> View:
    """What keeps the sink's table or topic."""
    options = dict(sink.options)
    if sink.connector == "delta":
        return delta_view(options["path"], sink.primary_key)
    if sink.connector == "jdbc":
        return jdbc_view(options.pop("url"), options.pop("dbtable"), sink.primary_key, options=options)
    servers, topic = options.pop("kafka.bootstrap.servers"), options.pop("topic")
    kept = kafka_upsert if sink.connector == "upsert-kafka" else kafka_debezium
    return kept(servers, topic, sink.primary_key, options=options)


def shaped(changes: DataFrame, sink: Sink, file: Text) -> DataFrame:
    """A changelog with the columns that the sink names, in their order; types are cast.

    Raises:
        JobError: it has another number of columns, or two of one name.
    """
    names = changes.columns[1:]
    if sink.columns is not None:
        named = [(name, kind) for name, kind in sink.columns if name.lower() != sink.row_kind.lower()]
        if len(named) != len(names):
            raise file.error(f"the sink has {len(named)} columns, the query {len(names)}: {', '.join(names)}", sink.at)
        types = [field.dataType.simpleString() for field in changes.schema.fields[1:]]
        columns = [
            (named_column(own) if type_ == kind.lower() else named_column(own).cast(kind)).alias(name)
            for own, type_, (name, kind) in zip(names, types, named, strict=True)
        ]
        names = [name for name, _ in named]
    else:
        columns = [named_column(name) for name in names]
    if sink.row_kind.lower() in {name.lower() for name in names}:
        raise file.error(f"the query has a column {sink.row_kind!r}, too: set 'row_kind' = 'another name'", sink.at)
    return changes.select(f.col(ROW_KIND_COLUMN).alias(sink.row_kind), *columns)


def messages(rows: DataFrame, sink: Sink, file: Text) -> DataFrame:
    """Rows as messages for Kafka; see `gpu_ops.sinks.json_messages`.

    Raises:
        JobError: no such column for the key, or one that has no JSON text.
    """
    try:
        return json_messages(rows, sink.key)
    except DescriptionError as error:
        raise file.error(str(error), sink.at) from error
