"""The tables of a job: its sources as streaming DataFrames, and a changelog as a running query into its sink."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st
from pyspark.sql.streaming import StreamingQuery

from gpu_ops.conditions import backquoted
from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.descriptions.inputs import Input
from gpu_ops.files.delta_log import Log
from gpu_ops.files.formats import OPTIONS, FormatName
from gpu_ops.jobs import datagen
from gpu_ops.jobs.flink_query import translated
from gpu_ops.jobs.job import METADATA, Job, JobSource, Sink
from gpu_ops.jobs.settings import FORMATS
from gpu_ops.jobs.sql_tables import DerivedColumn
from gpu_ops.jobs.sql_text import Text
from gpu_ops.query.errors import CHANGING, SqlError
from gpu_ops.query.read import changes_each_time
from gpu_ops.spark.api.groups import latest
from gpu_ops.spark.api.streams import Stream, stream
from gpu_ops.spark.database import told_of_driver
from gpu_ops.spark.failures import message_in, package
from gpu_ops.spark.metrics.metrics import free_name
from gpu_ops.spark.settings import metrics_reported
from gpu_ops.spark.sinks.changes import View, json_messages, kafka_debezium, kafka_upsert, started
from gpu_ops.spark.sinks.delta import delta_view, has_delta
from gpu_ops.spark.sinks.each import each
from gpu_ops.spark.sinks.files import FilesFormat, address_of, changelog_files, write_files
from gpu_ops.spark.sinks.iceberg import iceberg_view
from gpu_ops.spark.sinks.jdbc import jdbc_view
from gpu_ops.spark.sources.files import read_files
from gpu_ops.spark.sources.iceberg import read_iceberg
from gpu_ops.spark.sources.jdbc import read_table
from gpu_ops.spark.sources.kafka import MessageSource
from gpu_ops.spark_types import named_column, nullable

_FILES: Final = ("parquet", "json", "csv")
_INFERENCE: Final = ("mergeSchema", "inferSchema", "samplingRatio")
"""Options that say how Spark finds the columns of files."""
_CHANGE, _VERSION, _TIME = "_change_type", "_commit_version", "_commit_timestamp"
_KIND: Final = "__row_kind"
"""Of Debezium's messages: one may be two changes, so ``op`` itself is none."""
_UNAVAILABLE: Final = "__unavailable"
_WITHOUT_JAR: Final = (
    "; without it a change feed can be read (not 'scan' = 'once', and without 'starting_timestamp'), and a table be "
    "written as a view (PRIMARY KEY) or by 'writer' = 'arrow'"
)
"""What jobs do with Delta tables by themselves and ``deltalake``."""


def open_source(
    spark: SparkSession, source: JobSource, file: Text, *, every_ms: int | None = None, once: bool = False
) -> Stream:
    """A source as an input of a query.

    Args:
        spark: a session.
        source: what to read.
        file: the job's text, for errors.
        every_ms: how often a micro-batch begins; generated rows come at their rate.
        once: whether the job takes what there is and ends.

    Raises:
        JobError: it cannot be read; names what is missing.
    """
    read = functools.partial(_table, spark, source)
    with errors_of_spark(spark, file, source.connector, source.at), file.errors_at(source.at):
        if source.scan == "once":
            df = read()
        elif source.generated is not None:
            counted = datagen.numbers(spark, source.generated, every_ms=every_ms or 1000, once=once)
            df = datagen.rows(counted, source.generated)
        elif source.connector == "delta":
            source, df = _delta(spark, source, file)
        elif source.connector == "kafka":
            source, df = decode(_with_metadata(_load(spark, source), source), source)
        elif source.connector == "iceberg":
            limit = source.options.get("maxSnapshotsPerTrigger")
            most = None if limit is None else int(limit)
            table, catalog = source.options["table"], _catalog(source.options)
            df = read_iceberg(spark, table, catalog=catalog, max_snapshots_per_trigger=most)
            if source.columns is not None:
                df = df.select(*(named_column(name).cast(kind).alias(name) for name, kind in source.columns))
        elif source.connector in _FILES:
            df = _read_files(spark, source, file)
        else:
            df = _load(spark, source)
        df = _with_derived(df, source, file)
    # Spark's own watermark would come between Arrow's reader and the join, and knows no idle input
    by_arrow = source.reader == "arrow" or source.connector == "kafka"
    ours = source.idle_timeout_ms is not None or by_arrow or source.scan == "once"
    if source.event_time is not None and not ours:
        df = df.withWatermark(source.event_time, f"{source.delay_ms} milliseconds")
        source = dataclasses.replace(source, event_time=None, delay_ms=None)
    names = [x.name for x in dataclasses.fields(Input) if x.name not in ("schema", "parts")]
    said = {name.removesuffix("_ms"): getattr(source, name) for name in names}
    again = functools.partial(_again, spark, source, file)
    return stream(df if source.refresh_ms is None else again, refresh=source.refresh_ms, **said)


def kept(side: Stream, source: JobSource, **options: Any) -> Stream:
    """A source whose changes may lack values, as one whose rows are whole.

    Args:
        side: it, as `open_source` gives it.
        source: likewise.
        options: of `gpu_ops.latest`.
    """
    if source.unavailable != "keep":
        return side
    timeless = dataclasses.replace(side, event_time=None, delay_ms=None, idle_timeout_ms=None)
    rows = latest(timeless, unavailable=_unavailable(source), **options)
    return dataclasses.replace(side, df=rows, row_kind=ROW_KIND_COLUMN, updates="retract", sequence_by=None)


def _unavailable(source: JobSource) -> str:
    """The column with the names of those that a change does not bring."""
    return free_name(_UNAVAILABLE, st.StructType.fromDDL(schema_text(source)).names)


@contextlib.contextmanager
def errors_of_spark(spark: SparkSession, file: Text, connector: str, at: int) -> Iterator[None]:
    """Errors of Spark's, with their position in the job; where a jar is missing, which one."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        problem = message_in(str(error)).partition("\n")[0].partition(" SQLSTATE")[0].rstrip(".;")
        if "find" in problem and "data source" in problem and ("kafka" in connector or connector == "delta"):
            needed = package(connector, spark.version)
            problem = (
                f"Spark has no {connector} here; it comes with --packages {needed} (or SET 'spark.packages' = "
                f"'{needed}') when the session starts"
                if needed is not None
                else f"Spark has no {connector} here, and no package of it is known for Spark {spark.version}"
            )
            if connector == "delta":
                problem += _WITHOUT_JAR
        if connector == "jdbc":
            problem = told_of_driver(problem)
        raise file.error(problem, at) from error


def schema_text(source: JobSource) -> str:
    """The declared columns, and the one of row kinds, as Spark's schema text."""
    columns = list(source.columns or ())
    if source.row_kind is not None and source.row_kind.lower() not in {name.lower() for name, _ in columns}:
        columns.append((source.row_kind, "STRING"))
    return ", ".join(f"{backquoted(name)} {kind}" for name, kind in columns)


def _table(spark: SparkSession, source: JobSource) -> DataFrame:
    """The rows that a source has now, of one that is read once."""
    if source.generated is not None:
        assert source.generated.number_of_rows is not None
        return datagen.rows(spark.range(source.generated.number_of_rows).toDF("value"), source.generated)
    reader = spark.read.format(source.connector).options(**source.options)
    if source.columns is not None and source.connector in _FILES:
        return reader.schema(schema_text(source)).load()
    columns = None
    if source.columns is not None:
        columns = [*source.columns, *([(source.row_kind, "STRING")] if source.row_kind is not None else [])]
    if source.connector == "jdbc":
        return read_table(spark, source.options, columns)
    if columns is None:
        return reader.load()
    return reader.load().select(*(named_column(name).cast(kind).alias(name) for name, kind in columns))


def _again(spark: SparkSession, source: JobSource, file: Text) -> DataFrame:
    return _with_derived(_table(spark, source), source, file)


_METADATA: Final = "__metadata_"
"""What the columns are called that a message has beside its value, until the rows have theirs."""


def _metadata(source: JobSource) -> dict[str, DerivedColumn]:
    """The columns of a message beside its value, by what they are called on the way."""
    of_messages = [column for column in source.derived if column.metadata is not None]
    return {f"{_METADATA}{number}": column for number, column in enumerate(of_messages)}


def _with_metadata(messages: DataFrame, source: JobSource) -> DataFrame:
    """Messages, with what a source declares of them, and their keys as objects."""
    columns = {
        name: f.expr(METADATA[column.metadata.text.lower()]).cast(column.kind)
        for name, column in _metadata(source).items()
        if column.metadata is not None
    }
    if source.key_format == "raw" and source.unique_key is not None:
        key = f.struct(f.col("key").cast("string").alias(source.unique_key[0]))
        columns["key"] = f.when(f.col("key").isNotNull(), f.to_json(key).cast("binary"))
    return messages.withColumns(columns) if columns else messages


def _with_derived(df: DataFrame, source: JobSource, file: Text) -> DataFrame:
    """Rows with their computed columns and metadata, at the declared places.

    Raises:
        JobError: a column whose value changes by itself, or that Spark cannot compute.
    """
    if not source.derived:
        return df
    on_the_way = {id(column): name for name, column in _metadata(source).items()}
    named = {name.lower() for name, _ in source.columns or ()}
    ours = [name for name in df.columns if not name.startswith(_METADATA)]
    of_data = [name for name in ours if source.columns is None or name.lower() in named]
    columns = [named_column(name) for name in ours if name not in of_data]
    for place in range(len(of_data) + 1):
        for column in source.derived:
            if min(column.place, len(of_data)) != place:
                continue
            if column.expression is None:
                columns.append(named_column(on_the_way[id(column)]).alias(column.name.text))
                continue
            with file.errors_at(column.expression.at):
                try:
                    text = translated(column.expression.text).sql
                except SqlError as error:
                    raise file.error(error.message, column.expression.at) from error
                computed = f.expr(text).alias(column.name.text)
                try:
                    plan = df.select(computed)._jdf.queryExecution().analyzed()
                except PySparkException as error:
                    problem = message_in(str(error)).partition("\n")[0].partition(" SQLSTATE")[0]
                    raise file.error(problem, column.expression.at) from error
                if changes_each_time(plan):
                    raise file.error(CHANGING.format(column.expression.text), column.expression.at)
            columns.append(computed)
        if place < len(of_data):
            columns.append(named_column(of_data[place]))
    return df.select(*columns)


def _load(spark: SparkSession, source: JobSource) -> DataFrame:
    options = dict(source.options)
    if any(column.metadata is not None and column.metadata.text.lower() == "headers" for column in source.derived):
        options["includeHeaders"] = "true"
    return spark.readStream.format(source.connector).options(**options).load()


def _read_files(spark: SparkSession, source: JobSource, file: Text) -> DataFrame:
    schema: st.StructType | str = schema_text(source)
    named = [name.lower() for name, _ in source.columns or ()]
    if source.columns is None:
        # a stream wants its columns beforehand: those of the files that are there
        try:
            schema = spark.read.format(source.connector).options(**source.options).load().schema
        except AnalysisException as error:
            if "UNABLE_TO_INFER_SCHEMA" not in str(error):
                raise
            schema = st.StructType()
        if not schema.fields:
            raise file.error("there are no files yet to take the columns from: name them", source.at)
    elif source.connector == "csv" and source.row_kind is not None and source.row_kind.lower() not in named:
        raise file.error(
            f"CSV goes by position: name {source.row_kind!r} among the columns, where it stands", source.at
        )
    if source.reader == "arrow":
        options = {name: value for name, value in source.options.items() if name != "path"}
        if source.columns is None:  # those of some files, which others may lack, as Spark's reader has it
            options = {name: value for name, value in options.items() if name not in _INFERENCE}
            if "missingColumns" in OPTIONS[source.connector]:
                options.setdefault("missingColumns", "null")
        return read_files(spark, source.options["path"], cast("FormatName", source.connector), schema, **options)
    return spark.readStream.format(source.connector).options(**source.options).schema(schema).load()


def _delta(spark: SparkSession, source: JobSource, file: Text) -> tuple[JobSource, DataFrame]:
    """A Delta table's change feed, or the rows appended to it."""
    options = {"readChangeFeed": "true", **source.options}
    feed = options["readChangeFeed"] == "true"
    keyed = source.unique_key is not None
    if feed and not keyed and "maxFilesPerTrigger" not in options:
        # Without a key nothing can order the changes of a micro-batch: then it is one commit, which is never cut.
        options["maxFilesPerTrigger"] = "1"
    source = dataclasses.replace(source, options=options)
    if feed:
        source = dataclasses.replace(
            source,
            row_kind=source.row_kind or _CHANGE,
            # the changes of several commits come in any order
            sequence_by=source.sequence_by or (_VERSION if keyed else None),
        )
    by_spark = source.reader != "arrow" and has_delta(spark)
    df = _load(spark, source) if by_spark else _feed_of_files(spark, source, file)
    own = [source.row_kind] if source.row_kind is not None else []
    if source.columns is None:
        kept = [name for name in df.columns if name not in (_CHANGE, _VERSION, _TIME)]
        chosen = [named_column(name) for name in kept]
    else:
        chosen = [named_column(name).cast(kind).alias(name) for name, kind in source.columns]
        kept = [name for name, _ in source.columns]
    own += [source.sequence_by] if source.sequence_by is not None else []
    return source, df.select(*chosen, *(named_column(name) for name in own if name not in kept))


def _feed_of_files(spark: SparkSession, source: JobSource, file: Text) -> DataFrame:
    """A Delta table's change feed as `read_files` has it: for a Spark without Delta's jar, and where it is asked for.

    Raises:
        JobError: there is no such table.
    """
    options = {name: value for name, value in source.options.items() if name not in ("path", "readChangeFeed")}
    if source.options["readChangeFeed"] != "true" or set(options) - {"startingVersion", "maxFilesPerTrigger"}:
        if source.reader == "arrow":
            raise file.error("'reader' = 'arrow' reads a table's change feed, from a version on", source.at)
        return _load(spark, source)  # which says what is missing
    path = source.options["path"]
    try:
        fields = Log(address_of(spark, path).secret_uri, source.name).latest_state().fields
    except (OSError, ValueError) as error:
        raise file.error(f"there is no Delta table at {path}: {error}", source.at) from error
    schema = st.StructType.fromJson({"type": "struct", "fields": fields})
    for name, kind in ((_CHANGE, st.StringType()), (_VERSION, st.LongType()), (_TIME, st.TimestampType())):
        schema = schema.add(name, kind)
    plain = st.StructType([st.StructField(field.name, nullable(field.dataType)) for field in schema])
    return read_files(spark, path, "delta", plain, **options)


def decode(df: DataFrame, source: JobSource) -> tuple[JobSource, DataFrame]:
    """The rows of a topic's messages.

    Args:
        df: messages; their ``value`` is binary or text. One without a value, a tombstone, is no change.
        source: its columns, its format, and what to do with a message that cannot be read: ``bad_rows``.

    Returns:
        The source, with the column of row kinds, and the rows.
    """
    schema = schema_text(source)
    encoded = {}
    for text in source.encoded:
        column, _, encoding = text.partition("=")
        encoded[column.strip()] = encoding.strip()
    kind = free_name(_KIND, st.StructType.fromDDL(schema).names)
    messages = MessageSource(
        source.name, source.format, schema, row_kind=kind, encoded=encoded, bad_rows=source.bad_rows,
        schema_registry=source.schema_registry, unavailable_value=source.unavailable_value,
        unavailable=_unavailable(source) if source.unavailable == "keep" else None, include=list(_metadata(source)),
        key=source.unique_key if source.by_key else None,
    )  # fmt: skip
    rows = messages.rows(df)
    if source.row_kind is None and source.event_time is None and not source.unique_key:
        source = dataclasses.replace(
            source, bad_rows="fail"
        )  # those that cannot be read are left out, and others are fine
    return source if kind not in rows.columns else dataclasses.replace(source, row_kind=kind), rows


OBSERVED: Final = "gpu_join_job"
"""Under this name Spark's progress has the changes of a micro-batch by row kind, where no join reports them all."""

KINDS: Final = {"insert": "+I", "update_before": "-U", "update_after": "+U", "delete": "-D"}


def start(
    changes: DataFrame, job: Job, *, once: bool, last_join: str | None, screens: Mapping[str, View] | None = None
) -> StreamingQuery:
    """Starts a job's query. Its changes are counted, unless a join reports them all, or Spark cannot.

    Args:
        changes: the changelog, row kinds first; of several sinks the outputs of `gpu_ops.outputs`.
        job: the job.
        once: take what there is and end.
        last_join: the join whose output is all that goes to the sink, or None.
        screens: take them in place of the sinks, by these sinks' names.

    Raises:
        JobError: a sink cannot take it.
    """
    sink, several = job.sink, len(job.inserts) > 1
    kind = (
        f.coalesce(*(f.col(name)[one.row_kind] for name, one in zip(output_names(job), job.sinks, strict=True)))
        if several
        else f.col(ROW_KIND_COLUMN)
    )
    counts = [f.count(f.when(kind == k, 1)).alias(name) for name, k in KINDS.items()]
    known = last_join is not None or metrics_reported(changes.sparkSession)
    counted = changes if known else changes.observe(OBSERVED, *counts)
    trigger: dict[str, Any] = {}
    if once:
        trigger["availableNow"] = True
    elif job.every_ms is not None:
        trigger["processingTime"] = f"{job.every_ms} milliseconds"
    if several:
        views = {}
        for name, one in zip(output_names(job), job.inserts, strict=True):
            assert one.sink is not None
            with errors_of_spark(changes.sparkSession, job.file, one.sink.connector, one.sink.at):
                views[name] = beside_others(one.sink, job.file) if screens is None else screens[one.name]
        writer = counted.writeStream.foreachBatch(each(**views))
        return started(writer.outputMode("append"), job.checkpoint, job.name, trigger)
    screen = None if screens is None else screens[job.inserts[0].name]
    with errors_of_spark(changes.sparkSession, job.file, sink.connector, sink.at), job.file.errors_at(sink.at):
        rows = shaped(counted, sink, job.file)
        name = sink.table or job.name
        if screen is None and sink.by_tasks:
            return written(rows, sink, checkpoint=job.checkpoint, name=name, **trigger)
        if screen is not None or sink.is_view:
            writer = rows.writeStream.foreachBatch(screen or view(sink))
        else:
            rows = json_messages(rows, sink.key) if sink.connector == "kafka" else rows
            writer = rows.writeStream.format(FORMATS.get(sink.connector, sink.connector)).options(**sink.options)
            writer = writer.partitionBy(*sink.partition_by) if sink.partition_by else writer
        return started(writer.outputMode("append"), job.checkpoint, name, trigger)


def output_names(job: Job) -> list[str]:
    """The names of a job's outputs: those of its sinks, or what can stand for one."""
    return [one.name if one.name.isidentifier() else f"output_{number}" for number, one in enumerate(job.inserts, 1)]


def beside_others(sink: Sink, file: Text) -> View:
    """Makes the function that brings the changelog of one of several queries into its sink.

    Raises:
        JobError: a sink that Spark can give one query only.
    """
    if sink.is_view:
        with file.errors_at(sink.at):
            return view(sink)
    if sink.by_tasks or sink.connector == "parquet":
        return changelog_files(sink.options["path"], **_of_files(sink))
    if sink.connector == "kafka":
        return functools.partial(_to_kafka, sink=sink)
    if sink.connector == "console":
        return functools.partial(_to_console, sink=sink)
    if sink.connector == "blackhole":
        return lambda rows, _: rows.write.format("noop").mode("overwrite").save()
    also = "parquet and arrow" if sink.connector in ("json", "csv") else "blackhole with --show"
    raise file.error(
        f"Spark's {sink.connector} sink has a query of its own, and this job has several INSERTs: take {also}, or "
        "write a file with this one alone",
        sink.at,
    )


def _to_kafka(rows: DataFrame, _: int, *, sink: Sink) -> None:
    json_messages(rows, sink.key).write.format("kafka").options(**sink.options).save()


def _to_console(rows: DataFrame, number: int, *, sink: Sink) -> None:
    print(f"micro-batch {number}")  # noqa: T201 - as Spark's console does
    rows.show(int(sink.options.get("numRows", 20)), truncate=sink.options.get("truncate", "true") == "true")


def _of_files(sink: Sink) -> dict[str, Any]:
    """The options of files that the tasks write which make the rows."""
    given: dict[str, Any] = {} if sink.file_bytes is None else {"file_bytes": sink.file_bytes}
    if "compression" in sink.options:
        named = sink.options["compression"].lower()
        given["compression"] = None if named in ("none", "uncompressed") else named
    return {**given, "format": cast("FilesFormat", sink.connector), "partition_by": sink.partition_by}


def written(rows: DataFrame, sink: Sink, **how: Any) -> StreamingQuery:
    """Starts the query of a sink whose files the tasks write that make the rows.

    Raises:
        JobError: Arrow has no such compression.
    """
    return write_files(rows, sink.options["path"], **_of_files(sink), **how)


def view(sink: Sink) -> View:
    """The function that keeps the sink's table or topic up to date."""
    options = dict(sink.options)
    if sink.connector == "delta":
        return delta_view(options["path"], sink.primary_key)
    if sink.connector == "iceberg":
        return iceberg_view(options["table"], sink.primary_key, catalog=_catalog(options))
    if sink.connector == "jdbc":
        return jdbc_view(options.pop("url"), options.pop("dbtable"), sink.primary_key, options=options)
    servers, topic = options.pop("kafka.bootstrap.servers"), options.pop("topic")
    kept = kafka_upsert if sink.connector == "upsert-kafka" else kafka_debezium
    return kept(servers, topic, sink.primary_key, options=options)


def _catalog(options: Mapping[str, str]) -> str | dict[str, str]:
    """The catalog of an Iceberg table: its properties, or its name."""
    own = {name.removeprefix("catalog."): value for name, value in options.items() if name.startswith("catalog.")}
    return own or options.get("catalog", "default")


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
