"""Files of a changelog, written by the tasks that make its rows."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs
from py4j.protocol import Py4JError
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st
from pyspark.sql.streaming import StreamingQuery

from gpu_ops.errors import DescriptionError, NotBuiltError, StateError
from gpu_ops.files.formats import file_system_of
from gpu_ops.files.row_filter import Taken
from gpu_ops.query.catalyst import frame_of, java_class
from gpu_ops.spark.api.streams import spelling
from gpu_ops.spark.datatypes import arrow_schema, spark_type
from gpu_ops.spark.exchange.file_task import FILE_COLUMN, STAGING, FileTask, FileWriter, WrittenFile
from gpu_ops.spark.exchange.task import Task
from gpu_ops.spark.metrics.metrics import METRICS_TYPE
from gpu_ops.spark.plan.build import observing
from gpu_ops.spark.plan.recognition import JoinPlan
from gpu_ops.spark.plan.selection import taken_of_join
from gpu_ops.spark.sinks.changes import query_of
from gpu_ops.spark.workers import make_importable

FilesFormat: TypeAlias = Literal["parquet", "delta", "arrow"]

_OWNER: Final = "_gpu_ops.json"
"""In the output folder: which query writes it, and how."""

_LOG: Final = "_spark_metadata"
_FOLDER_TYPES: Final = (
    st.ByteType, st.ShortType, st.IntegerType, st.LongType, st.StringType, st.BooleanType, st.DateType
)  # fmt: skip
_MOVES: Final = 16
"""Files that are moved at a time: on object stores a move is a copy."""


def write_files(
    changes: DataFrame,
    path: str,
    *,
    format: FilesFormat = "parquet",  # noqa: A002 - Spark's word
    partition_by: str | Sequence[str] = (),
    checkpoint: str | None = None,
    name: str | None = None,
    file_bytes: int = 256 << 20,
    compression: str | None = "snappy",
    **trigger: Any,
) -> StreamingQuery:
    """Starts a query that writes a changelog into files, each change exactly once.

    The tasks that make the rows write them; Spark sees one row per file, so ``numOutputRows`` of its progress counts
    files. That holds for the changelog of a join as it is, or after a mere ``select`` of columns and a plain ``where``;
    anything else goes through Spark's rows first (`gpu_ops.explain` says which). All columns are written, row kinds
    included.

    A micro-batch becomes visible as a whole, and once, to whoever reads by the log: ``"parquet"`` and ``"arrow"`` have
    that of Spark's own file sink (``_spark_metadata``), by which Spark and `gpu_ops.read_files` read the folder,
    ``"delta"`` its own. A reader of the bare folder sees only files of committed micro-batches, the latest perhaps
    in part.

    Args:
        changes: a streaming DataFrame.
        path: a folder for this query alone.
        format: ``"parquet"``, ``"delta"`` (needs the package ``deltalake``) or ``"arrow"``.
        partition_by: columns of integers, text, booleans or dates that become folders ``name=value``.
        checkpoint: Spark's ``checkpointLocation``; by default what the session has for it.
        name: of the query.
        file_bytes: a file has about so many bytes of rows in memory, less where a partition's micro-batch has less.
        compression: of Parquet and Arrow, as pyarrow calls it; None for none.
        trigger: Spark's, as ``DataStreamWriter.trigger`` takes it: ``availableNow=True``,
            ``processingTime="10 seconds"``.

    Raises:
        DescriptionError: no streaming DataFrame, or no such format or column.
        NotBuiltError: the package for the format is not installed.
    """
    if not changes.isStreaming:
        raise DescriptionError("write_files() takes a streaming DataFrame; write a static one with Spark's own writer")
    if format not in ("parquet", "delta", "arrow"):
        raise DescriptionError(f"format={format!r}; there are 'parquet', 'delta' and 'arrow'")
    columns = _partition_columns(changes, partition_by)
    spark = changes.sparkSession
    location = _qualified(spark, path)
    commit: _Commit = _DeltaCommit(location, columns) if format == "delta" else _LogCommit(spark, location)
    writer = FileWriter(
        location,
        "arrow" if format == "arrow" else "parquet",
        arrow_schema(changes.schema, "changes"),
        columns,
        format != "delta",
        file_bytes,
        compression if format != "arrow" or compression != "snappy" else "lz4",
    )
    files = _files(changes, writer)
    started = files.writeStream.foreachBatch(lambda batch, number: _write(commit, writer.schema, batch, number))
    if checkpoint is not None:
        started = started.option("checkpointLocation", checkpoint)
    if name is not None:
        started = started.queryName(name)
    return (started.trigger(**trigger) if trigger else started).start()


def _files(changes: DataFrame, writer: FileWriter) -> DataFrame:
    """A row per file."""
    found, spark = taken_of_join(changes), changes.sparkSession
    plan = None if isinstance(found, str) else JoinPlan.of(found.node)
    if isinstance(found, str) or plan is None:
        make_importable(spark)
        every = Taken(tuple(range(len(writer.schema))))
        return changes.mapInArrow(FileTask(None, every, writer), st.StructType().add(FILE_COLUMN, "string"))
    task = _task_of(found.node, spark)
    types = [task.output.field(place).type for place in found.taken.columns]
    schema = pa.schema([pa.field(x.name, kind) for x, kind in zip(writer.schema, types, strict=True)])
    output = st.StructType().add(FILE_COLUMN, "string")
    if task.hidden is not None:
        output = output.add(task.hidden, spark_type(METRICS_TYPE))
    below = frame_of(spark, found.node.children().head())
    files = below.mapInArrow(FileTask(task, found.taken, writer._replace(schema=schema)), plan.carried_by(output))
    return observing(files, plan, task.hidden).select(FILE_COLUMN)


def _task_of(node: Any, spark: SparkSession) -> Task:
    """The function that a join's node runs."""
    of_bytes = java_class(spark, "scala.reflect.ClassTag").Byte()
    task, _ = CPickleSerializer().loads(bytes(node.functionExpr().func().command().toArray(of_bytes)))
    assert isinstance(task, Task)
    return task


def _write(commit: _Commit, schema: pa.Schema, batch: DataFrame, number: int) -> None:
    """What ``foreachBatch`` does: runs the micro-batch, and commits its files unless that was done before."""
    query = query_of(batch)
    done = commit.done(query, number)
    files = [WrittenFile(**json.loads(row[0])) for row in batch.collect()]
    if not done:
        commit.commit(query, number, files, schema)
    commit.tidy(number)


class _Commit(Protocol):
    """Makes the files of a micro-batch visible, once."""

    def done(self, query: str, number: int) -> bool:
        """Whether it is visible already.

        Raises:
            StateError: the folder belongs to another query.
        """

    def commit(self, query: str, number: int, files: Sequence[WrittenFile], schema: pa.Schema) -> None:
        """Does it."""

    def tidy(self, number: int) -> None:
        """Deletes what no reader will ever want, after a micro-batch."""


class _LogCommit:
    """Files are moved out of `STAGING`, then named in the log of Spark's own file sink.

    The folder belongs to one query: Spark's sink would silently leave out the first micro-batches of a second one,
    whose numbers are in the log already.

    Args:
        spark: the session.
        location: the output folder.
    """

    def __init__(self, spark: SparkSession, location: str) -> None:
        self._spark, self._location = spark, location
        self._files, self._root = file_system_of(location, "write_files()")
        self._log: Any = None

    def done(self, query: str, number: int) -> bool:
        """See `_Commit`."""
        if self._log is not None:
            return self._latest() >= number
        self._claim(query)
        none = java_class(self._spark, "scala.Option").empty()
        log = _sink_class(self._spark, "FileStreamSinkLog")
        self._log = log(1, self._spark._jsparkSession, f"{self._location}/{_LOG}", none)
        if self._latest() >= number:
            return True
        for path in self._files_of(number):  # of a commit that was cut short
            self._files.delete_file(path)
        return False

    def _latest(self) -> int:
        found = self._log.getLatestBatchId()
        return int(found.get()) if found.isDefined() else -1

    def _claim(self, query: str) -> None:
        """Writes down whose folder it is."""
        owner = f"{self._root}/{_OWNER}"
        if self._files.get_file_info(owner).type == pafs.FileType.File:
            with self._files.open_input_stream(owner) as stream:
                found = json.loads(stream.read())["query"]
            if found != query:
                raise StateError(
                    f"{self._location} has the files of query {found}, and this is query {query}: write into another "
                    "folder, or go on with that one's checkpoint"
                )
            return
        if self._files.get_file_info(f"{self._root}/{_LOG}").type != pafs.FileType.NotFound:
            raise StateError(f"{self._location} has the files of another of Spark's queries: write into another folder")
        self._files.create_dir(self._root)
        with self._files.open_output_stream(owner) as stream:
            stream.write(json.dumps({"query": query}).encode())

    def _files_of(self, number: int) -> list[str]:
        everything = self._files.get_file_info(pafs.FileSelector(self._root, recursive=True))
        return [x.path for x in everything if x.base_name.startswith(f"part-{number:010d}-")]

    def commit(self, query: str, number: int, files: Sequence[WrittenFile], schema: pa.Schema) -> None:
        """See `_Commit`."""
        for folder in {file.path.rpartition("/")[0] for file in files}:
            self._files.create_dir(f"{self._root}/{folder}".rstrip("/"))
        with ThreadPoolExecutor(_MOVES) as pool:
            list(pool.map(self._move, files))
        if not self._log.add(number, self._statuses(files)):
            raise StateError(f"another query wrote micro-batch {number} into {self._location}")

    def _statuses(self, files: Sequence[WrittenFile]) -> Any:
        """What the log says of files."""
        path = java_class(self._spark, "org.apache.hadoop.fs.Path")
        conf = self._spark._jsparkSession.sessionState().newHadoopConf()
        status = _sink_class(self._spark, "SinkFileStatus")
        statuses = self._spark.sparkContext._gateway.new_array(status, len(files))
        for place, file in enumerate(files):
            at = path(f"{self._location}/{file.path}")
            statuses[place] = status.apply(at.getFileSystem(conf).getFileStatus(at))
        return statuses

    def _move(self, file: WrittenFile) -> None:
        self._files.move(f"{self._root}/{file.lies}", f"{self._root}/{file.path}")

    def tidy(self, number: int) -> None:
        """See `_Commit`."""
        staged = f"{self._root}/{STAGING}/{number}"
        if self._files.get_file_info(staged).type == pafs.FileType.Directory:
            self._files.delete_dir(staged)


class _DeltaCommit:
    """Files lie where they will be, and a commit of Delta's log names them, with the query's id and the micro-batch.

    Args:
        location: the table's folder.
        partition_by: its columns of partitions.
    """

    def __init__(self, location: str, partition_by: Sequence[str]) -> None:
        try:
            import deltalake  # noqa: PLC0415 - not installed by default
        except ImportError as error:
            raise NotBuiltError("format='delta' needs the package deltalake: pip install deltalake") from error
        self._delta, self._partition_by = deltalake, list(partition_by)
        self._location = re.sub("^file:/*", "/", location)
        self._table: Any = None

    def done(self, query: str, number: int) -> bool:
        """See `_Commit`."""
        if self._table is None:
            return False
        self._table.update_incremental()
        version = self._table.transaction_version(query)
        return version is not None and version >= number

    def commit(self, query: str, number: int, files: Sequence[WrittenFile], schema: pa.Schema) -> None:
        """See `_Commit`.

        Raises:
            DescriptionError: the table has other columns.
        """
        schema = pa.schema([field.with_nullable(True) for field in schema])
        if self._table is None:
            delta = self._delta.DeltaTable
            made = delta.create(self._location, schema, mode="ignore", partition_by=self._partition_by or None)
            self._table = made
            there, wanted = self._columns(made.schema()), self._columns(self._delta.Schema.from_arrow(schema))
            if there != wanted or made.metadata().partition_columns != self._partition_by:
                raise DescriptionError(
                    f"the table {self._location} has the columns {', '.join(there)}, partitioned by "
                    f"{', '.join(made.metadata().partition_columns) or 'none'}; the changelog has {', '.join(wanted)}, "
                    f"partitioned by {', '.join(self._partition_by) or 'none'}"
                )
            if self.done(query, number):
                return
        now = int(time.time() * 1000)
        transaction = self._delta.transaction
        added = [
            transaction.AddAction(
                quote(file.path, safe="/="), file.size, file.partition, now, True, json.dumps(file.statistics)
            )
            for file in files
        ]
        mark = transaction.Transaction(query, number, now)
        self._table.create_write_transaction(
            added, "append", schema, self._partition_by or None,
            commit_properties=transaction.CommitProperties(app_transactions=[mark]),
        )  # fmt: skip

    @staticmethod
    def _columns(schema: Any) -> list[str]:
        return [f"{field.name} {field.type}" for field in schema.fields]

    def tidy(self, number: int) -> None:
        """Files that no commit names are for Delta's ``vacuum``."""


def _sink_class(spark: SparkSession, name: str) -> Any:
    """A class of Spark's file sink; it has moved between versions."""
    loader = java_class(spark, "java.lang.Thread").currentThread().getContextClassLoader()
    for package in ("streaming.sinks", "streaming"):
        whole = f"org.apache.spark.sql.execution.{package}.{name}"
        with contextlib.suppress(Py4JError):
            loader.loadClass(whole)
            return java_class(spark, whole)
    raise NotBuiltError(f"this version of Spark has no {name}, which write_files() needs")


def _qualified(spark: SparkSession, path: str) -> str:
    """A folder as Hadoop writes it, scheme and all."""
    at = java_class(spark, "org.apache.hadoop.fs.Path")(path)
    return str(at.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).makeQualified(at).toString())


def _partition_columns(changes: DataFrame, given: str | Sequence[str]) -> tuple[str, ...]:
    """The columns of partitions, in their own spelling.

    Raises:
        DescriptionError: there is no such column, or one that is no folder's name.
    """
    found = []
    for name in (given,) if isinstance(given, str) else given:
        column = spelling(changes, name)
        if column is None:
            raise DescriptionError(f"partition_by names {name!r}; there are {', '.join(changes.columns)}")
        kind = changes.schema[column].dataType
        if not isinstance(kind, _FOLDER_TYPES):
            raise DescriptionError(
                f"partition_by={column!r} is {kind.simpleString()}; integers, text, booleans and dates name folders"
            )
        found.append(column)
    if len(found) == len(changes.columns):
        raise DescriptionError("partition_by names all columns, and none is left for the files")
    return tuple(found)
