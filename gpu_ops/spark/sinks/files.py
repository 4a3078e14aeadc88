"""Files of a changelog, written by the tasks that make its rows, and the log that says which of them are visible.

The log is that of Spark's own file sink, by Spark's code or in its format.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st
from pyspark.sql.streaming import StreamingQuery

from gpu_ops.errors import DescriptionError, NotBuiltError, StateError
from gpu_ops.query.catalyst import java_class
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark.plan.changes import encoded_in_tasks
from gpu_ops.spark.sinks.changes import View, query_of, started
from gpu_ops.spark.sinks.delta_tables import DeltaCommit
from gpu_ops.spark.tasks.file import FILE_COLUMN, STAGING, FileWriter, WrittenFile
from gpu_ops.spark_types import arrow_schema, spelling
from gpu_ops.state.address import KINDS, StateAddress
from gpu_ops.state.files import Files

FilesFormat: TypeAlias = Literal["parquet", "delta", "arrow"]

_OWNER: Final = "_gpu_ops.json"
"""The file in the output folder that names the query which writes it."""

_FOLDER_TYPES: Final = (
    st.ByteType, st.ShortType, st.IntegerType, st.LongType, st.StringType, st.BooleanType, st.DateType
)  # fmt: skip
_MOVES: Final = 16
"""Files that are moved at a time: on object stores a move is a copy."""

LOG: Final = "_spark_metadata"
"""The folder of the log of Spark's file sink, below the output folder."""

_COMPACT: Final = ".compact"
_INTERVAL: Final = 10
"""Every so many micro-batches an entry lists all files; this is Spark's default, which readers detect themselves."""

_KEPT_S: Final = 600
"""Seconds for which superseded entries of the log stay, as a reader may just be reading them."""

_SCHEMES: Final = {"s3": "s3a"}
"""Hadoop's name of a scheme where it differs from Arrow's."""


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
    processingTime: str | None = None,  # noqa: N803 - Spark's words
    availableNow: bool | None = None,  # noqa: N803
    once: bool | None = None,
    continuous: str | None = None,
    realTime: str | None = None,  # noqa: N803
) -> StreamingQuery:
    """Starts a query that writes a changelog into files, each change exactly once.

    The tasks that make the rows write them; Spark sees one row per file, so ``numOutputRows`` of its progress counts
    files. That holds for the changelog of a join as it is, or after a ``select`` and ``where`` that Arrow evaluates;
    other rows go through Spark first (`gpu_ops.explain` says which). All columns are written, row kinds included.

    A micro-batch becomes visible as a whole, and once, to whoever reads by the log: ``"parquet"`` and ``"arrow"`` have
    that of Spark's own file sink (``_spark_metadata``), by which Spark and `gpu_ops.read_files` read the folder,
    ``"delta"`` its own. A reader of the bare folder sees only files of committed micro-batches, the latest perhaps
    in part.

    Args:
        changes: a streaming DataFrame.
        path: a folder for this query alone: a local one, or a URI of an object store, as ``state=`` takes it
            (``s3://bucket/folder``; ``s3a://`` means the same).
        format: the format of the files. ``"parquet"``: Parquet. ``"delta"``: Parquet with a Delta log (needs the
            package ``deltalake``). ``"arrow"``: Arrow IPC.
        partition_by: columns of integers, text, booleans or dates that become folders ``name=value``.
        checkpoint: Spark's ``checkpointLocation``; by default the session's.
        name: the name of the query.
        file_bytes: the bytes of rows in memory that a file has, about, or less where a partition's micro-batch has
            less.
        compression: the compression of Parquet and Arrow, as pyarrow calls it; None for none.
        processingTime: the time between two micro-batches: ``"10 seconds"``; this and the following four are Spark's
            triggers, see ``DataStreamWriter.trigger``, of which one may be given.
        availableNow: whether the query takes the input that there is, in several micro-batches, and ends.
        once: whether the query takes the input that there is, in one micro-batch, and ends.
        continuous: the time between two checkpoints of continuous processing.
        realTime: the length of a micro-batch of Spark's real-time mode.

    Raises:
        DescriptionError: it is no streaming DataFrame, or there is no such format or column.
        NotBuiltError: the package for the format is not installed, or Arrow cannot reach the folder.

    Example:
        >>> arrive(folder + "/in", {"id": 1, "amount": 10})
        >>> orders = gpu_ops.read_files(spark, folder + "/in", "json", "id INT, amount INT")
        >>> query = gpu_ops.write_files(
        ...     orders, folder + "/out", checkpoint=folder + "/checkpoint", availableNow=True
        ... )
        >>> query.awaitTermination()
        >>> spark.read.parquet(folder + "/out").show()
        +---+------+
        | id|amount|
        +---+------+
        |  1|    10|
        +---+------+
    """
    if not data_frame(changes, "what write_files() takes").isStreaming:
        raise DescriptionError("write_files() takes a streaming DataFrame; write a static one with Spark's own writer")
    commit, writer = _opened(
        changes, path, format, partition_by=partition_by, file_bytes=file_bytes, compression=compression
    )
    files = _files(changes, writer)
    written = files.writeStream.foreachBatch(lambda batch, number: _write(commit, writer.schema, batch, number))
    triggers = {
        "processingTime": processingTime, "availableNow": availableNow, "once": once, "continuous": continuous,
        "realTime": realTime,
    }  # fmt: skip
    return started(written, checkpoint, name, {x: value for x, value in triggers.items() if value is not None})


def changelog_files(
    path: str,
    *,
    format: FilesFormat = "parquet",  # noqa: A002 - Spark's word
    partition_by: str | Sequence[str] = (),
    file_bytes: int = 256 << 20,
    compression: str | None = "snappy",
) -> View:
    """Makes a function for ``foreachBatch`` that writes the changelog itself into files, each change exactly once.

    It is `gpu_ops.write_files` for one of several outputs, see `gpu_ops.sinks.each`, and for a ``foreachBatch`` of your
    own. Rows come from Spark, and not from the tasks that make them.

    Args:
        path: see `gpu_ops.write_files`, as all others.
        format: the format of the files, ``"parquet"``, ``"delta"`` or ``"arrow"``.
        partition_by: columns that become folders.
        file_bytes: the bytes of rows in memory that a file has, about.
        compression: the compression of Parquet and Arrow.

    Raises:
        DescriptionError: there is no such format, or (from ``foreachBatch``) no such column.
        NotBuiltError: (from ``foreachBatch``) the package for the format is not installed, or Arrow cannot reach the
            folder.
        StateError: (from ``foreachBatch``) the folder belongs to another query.

    Example:
        >>> view = gpu_ops.sinks.changelog_files("/data/changes", partition_by="day")
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """
    _check_format(format)
    opened: dict[str, tuple[DeltaCommit | _LogCommit, FileWriter]] = {}
    options: dict[str, Any] = {"partition_by": partition_by, "file_bytes": file_bytes, "compression": compression}

    def write(batch: DataFrame, batch_id: int) -> None:
        query = query_of(batch)
        known = opened.pop(query) if query in opened else None
        commit, writer = known or _opened(batch, path, format, **options)
        _write(commit, writer.schema, _files(batch, writer), batch_id)
        opened.clear()
        opened[query] = commit, writer  # after an error, or for another query, it is opened again

    return write


def _check_format(name: str) -> None:
    if name not in ("parquet", "delta", "arrow"):
        raise DescriptionError(f"format={name!r}; there are 'parquet', 'delta' and 'arrow'")


def _opened(
    changes: DataFrame,
    path: str,
    format: FilesFormat,  # noqa: A002
    *,
    partition_by: str | Sequence[str],
    file_bytes: int,
    compression: str | None,
) -> tuple[DeltaCommit | _LogCommit, FileWriter]:
    """Opens the output folder, and returns what writes files and what makes them visible."""
    _check_format(format)
    columns = _partition_columns(changes, partition_by)
    spark = changes.sparkSession
    place = _place(spark, path)
    log = functools.partial(SparkLog, spark, place) if place.has_folders else functools.partial(ObjectLog, place)
    commit = DeltaCommit(place, columns) if format == "delta" else _LogCommit(log, place)
    writer = FileWriter(
        place.address,
        "arrow" if format == "arrow" else "parquet",
        arrow_schema(changes.schema, "changes"),
        columns,
        format != "delta",
        file_bytes,
        compression if format != "arrow" or compression != "snappy" else "lz4",
    )
    return commit, writer


def _files(changes: DataFrame, writer: FileWriter) -> DataFrame:
    """The files that tasks write, a row for each."""
    return encoded_in_tasks(changes, writer, "gpu_join_files", st.StructType().add(FILE_COLUMN, "string"))


def _write(commit: DeltaCommit | _LogCommit, schema: pa.Schema, batch: DataFrame, number: int) -> None:
    """Runs a micro-batch, and commits its files unless that was done before (for ``foreachBatch``)."""
    query = query_of(batch)
    done = commit.done(query, number)
    files = [WrittenFile(**json.loads(row[0])) for row in batch.collect()]
    if not done:
        commit.commit(query, number, files, schema)
    commit.tidy(number)


class _LogCommit:
    """Makes a micro-batch's files visible: moves them out of `STAGING`, then names them in Spark's log of a sink.

    The folder belongs to one query: Spark's sink would silently leave out the first micro-batches of a second one,
    whose numbers are in the log already.

    Args:
        log: opens the log, when the query runs.
        files: the output folder.
    """

    def __init__(self, log: Callable[[], SparkLog | ObjectLog], files: Files) -> None:
        self._opened, self._files = log, files
        self._log: SparkLog | ObjectLog | None = None

    def done(self, query: str, number: int) -> bool:
        """True if the files of a micro-batch are visible already.

        Raises:
            StateError: the folder belongs to another query.
        """
        if self._log is not None:
            return self._log.latest() >= number
        self._claim(query)
        self._log = self._opened()
        if self._log.latest() >= number:
            return True
        for path in self._files_of(number):  # of a commit that was cut short
            self._files.filesystem.delete_file(path)
        return False

    def _claim(self, query: str) -> None:
        """Records the query that the folder belongs to."""
        owner = self._files.read(_OWNER)
        if owner is not None:
            writer = json.loads(owner.to_pybytes())["query"]
            if writer != query:
                raise StateError(
                    f"{self._files.location} has the files of query {writer}, and this is query {query}: write into "
                    "another folder, or go on with that one's checkpoint"
                )
            return
        if self._files.sizes(LOG):
            raise StateError(
                f"{self._files.location} has the files of another of Spark's queries: write into another folder"
            )
        self._files.write(_OWNER, lambda file: file.write(json.dumps({"query": query}).encode()))

    def _files_of(self, number: int) -> list[str]:
        selector = pafs.FileSelector(self._files.root, recursive=True, allow_not_found=True)
        everything = self._files.filesystem.get_file_info(selector)
        return [x.path for x in everything if x.base_name.startswith(f"part-{number:010d}-")]

    def commit(self, query: str, number: int, files: Sequence[WrittenFile], schema: pa.Schema) -> None:
        """Makes the files of a micro-batch visible, once."""
        assert self._log is not None
        if self._files.has_folders:
            for folder in {file.path.rpartition("/")[0] for file in files}:
                self._files.filesystem.create_dir(f"{self._files.root}/{folder}".rstrip("/"))
        with ThreadPoolExecutor(_MOVES) as pool:
            list(pool.map(self._move, files))
        if not self._log.add(number, files):
            raise StateError(f"another query wrote micro-batch {number} into {self._files.location}")

    def _move(self, file: WrittenFile) -> None:
        self._files.filesystem.move(f"{self._files.root}/{file.lies}", f"{self._files.root}/{file.path}")

    def tidy(self, number: int) -> None:
        """Deletes a micro-batch's staged files that were not committed."""
        self._files.delete_folder(f"{STAGING}/{number}")


def address_of(spark: SparkSession, path: str) -> StateAddress:
    """The location that a path names; one without a scheme is in Hadoop's default file system.

    Raises:
        DescriptionError: there is no such file system.
    """
    scheme = re.match("([A-Za-z][A-Za-z0-9+.-]*):/", path)
    if scheme is None or scheme[1].lower() == "file":
        at = java_class(spark, "org.apache.hadoop.fs.Path")(path)
        path = str(at.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).makeQualified(at).toString())
    if path.startswith("file:"):
        return StateAddress.of(re.sub("^file:/*", "/", path))
    try:
        return StateAddress.of(re.sub("^s3[an]:", "s3:", path))
    except StateError as error:  # which is about a state folder
        raise DescriptionError(str(error).replace("state=", "path=").replace("A state folder", "A folder")) from None


def _place(spark: SparkSession, path: str) -> Files:
    """Opens the output folder.

    Raises:
        DescriptionError: there is no such file system.
        NotBuiltError: Arrow cannot reach the folder from here.
    """
    address = address_of(spark, path)
    try:
        return Files.at(address, shared=True)
    except StateError as error:
        why = str(error).partition(" cannot be opened: ")[2].removesuffix(f". {KINDS}").partition("\n")[0]
        raise NotBuiltError(
            f"write_files() writes by Arrow, which cannot reach {address} from here ({why}); changes.writeStream with "
            "Spark's own formats goes through Hadoop"
        ) from None


def _partition_columns(changes: DataFrame, names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the partition columns as the DataFrame spells them.

    Raises:
        DescriptionError: a column does not exist, or its values cannot name folders.
    """
    columns = []
    for name in (names,) if isinstance(names, str) else names:
        column = spelling(changes, name)
        if column is None:
            raise DescriptionError(f"partition_by names {name!r}; there are {', '.join(changes.columns)}")
        kind = changes.schema[column].dataType
        if not isinstance(kind, _FOLDER_TYPES):
            raise DescriptionError(
                f"partition_by={column!r} is {kind.simpleString()}; integers, text, booleans and dates name folders"
            )
        columns.append(column)
    if len(columns) == len(changes.columns):
        raise DescriptionError("partition_by names all columns, and none is left for the files")
    return tuple(columns)


class SparkLog:
    """The log of Spark's file sink, written by Spark's own code through Hadoop.

    Args:
        spark: the session.
        place: the output folder.
    """

    def __init__(self, spark: SparkSession, place: Files) -> None:
        self._spark = spark
        self._location = f"file:{place.root}" if place.local else place.location
        none = java_class(spark, "scala.Option").empty()
        self._log = self._class("FileStreamSinkLog")(1, spark._jsparkSession, f"{self._location}/{LOG}", none)

    def latest(self) -> int:
        """The last micro-batch in the log, -1 for none."""
        latest_id = self._log.getLatestBatchId()
        return int(latest_id.get()) if latest_id.isDefined() else -1

    def add(self, number: int, files: Sequence[WrittenFile]) -> bool:
        """Makes the files of a micro-batch visible, all at once; False where another has written that micro-batch."""
        path = java_class(self._spark, "org.apache.hadoop.fs.Path")
        conf = self._spark._jsparkSession.sessionState().newHadoopConf()
        status = self._class("SinkFileStatus")
        statuses = self._spark.sparkContext._gateway.new_array(status, len(files))
        for place, file in enumerate(files):
            at = path(f"{self._location}/{file.path}")
            statuses[place] = status.apply(at.getFileSystem(conf).getFileStatus(at))
        return bool(self._log.add(number, statuses))

    def _class(self, name: str) -> Any:
        """Returns a class of Spark's file sink, whose package differs between versions."""
        loader = java_class(self._spark, "java.lang.Thread").currentThread().getContextClassLoader()
        for package in ("streaming.sinks", "streaming"):
            whole = f"org.apache.spark.sql.execution.{package}.{name}"
            with contextlib.suppress(Py4JError):
                loader.loadClass(whole)
                return java_class(self._spark, whole)
        raise NotBuiltError(f"this version of Spark has no {name}, which write_files() needs")


class ObjectLog:
    """The log of Spark's file sink on an object store, written by Arrow: Spark's code renames, which there is a copy.

    An entry is one object, and an object exists as a whole or not at all. As in
    ``org.apache.spark.sql.execution.streaming.CompactibleFileStreamLog`` each tenth lists all files since the
    beginning.

    Args:
        place: the output folder.
    """

    def __init__(self, place: Files) -> None:
        self._place, self._log = place, place.below(LOG)
        self._last = max(self._entries().values(), default=-1)

    def _entries(self) -> dict[str, int]:
        """The names of the log's entries, with their micro-batches."""
        names = ((name, name.removesuffix(_COMPACT)) for name in self._log.sizes(""))
        return {name: int(number) for name, number in names if number.isdecimal()}

    def latest(self) -> int:
        """The last micro-batch in the log, -1 for none."""
        return self._last

    def add(self, number: int, files: Sequence[WrittenFile]) -> bool:
        """Makes the files of a micro-batch visible, all at once; False where another has written that micro-batch."""
        whole = _has_all(number)
        lines = [*(self._since(number) if whole else ()), *map(self._line, files)]
        if not self._log.create(_entry(number), "\n".join(["v1", *lines]).encode()):
            return False
        self._last = number
        if whole:
            self._forget(number - _INTERVAL)
        return True

    def _since(self, number: int) -> Iterator[str]:
        """Yields the lines of the entries before a micro-batch, from the last entry that lists all files."""
        first = max(0, number - _INTERVAL)
        for name in map(_entry, range(first, number)):
            content = self._log.read(name)
            if content is None:
                raise StateError(f"{self._log.name(name)} is gone: no one can tell any more which files are visible")
            yield from content.to_pybytes().decode().split("\n")[1:]

    def _forget(self, number: int) -> None:
        """Deletes entries before one that lists all files, except those that a reader may have just found."""
        for name, entry in self._entries().items():
            stamp = self._log.stamp(name) if entry < number else None
            if stamp is not None and stamp[1] < (time.time() - _KEPT_S) * 1e9:
                self._log.delete([name])

    def _line(self, file: WrittenFile) -> str:
        """An entry's line, ``SinkFileStatus`` as JSON."""
        scheme, _, rest = self._place.location.partition("://")
        at = f"{_SCHEMES.get(scheme, scheme)}://{rest}/{quote(file.path, safe='/=')}"
        now = int(time.time() * 1000)
        status = {"path": at, "size": file.size, "isDir": False, "modificationTime": now}
        blocks = {"blockReplication": 1, "blockSize": 32 << 20, "action": "add"}
        return json.dumps(status | blocks, separators=(",", ":"))


def _has_all(number: int) -> bool:
    """True if a micro-batch's entry lists the files of all earlier ones, too."""
    return (number + 1) % _INTERVAL == 0


def _entry(number: int) -> str:
    """The name of a micro-batch's entry."""
    return f"{number}{_COMPACT}" if _has_all(number) else f"{number}"
