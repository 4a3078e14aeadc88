"""A stream of files that Arrow reads: Spark finds the files and remembers which are done, tasks read them.

To Spark the source is a stream of paths: its own file source lists, limits and cleans up, and its checkpoint holds
what it holds for any file source. A join takes the files' rows as they are (`gpu_ops.spark.tasks.packing`); anything
else gets them as Spark's rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.files.formats import OPTIONS, FileFormat, FormatName
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.failures import refuse_connect, refuse_gone
from gpu_ops.spark.sources import ARROW
from gpu_ops.spark.tasks.functions import applied_schema
from gpu_ops.spark.tasks.packing import FileRows, ReadFiles
from gpu_ops.spark_types import arrow_schema

SOURCE_OPTIONS: Final = (
    "maxFilesPerTrigger", "maxBytesPerTrigger", "latestFirst", "maxFileAge", "fileNameOnly", "maxCachedFiles",
    "discardCachedInputRatio", "cleanSource", "sourceArchiveDir", "pathGlobFilter", "recursiveFileLookup",
)  # fmt: skip
"""The options of Spark's own file source."""

_OTHER_FILES: Final = ("maxBytesPerTrigger", "latestFirst", "pathGlobFilter", "recursiveFileLookup", "fileNameOnly")
"""Of these, those by which a micro-batch takes other files than the oldest ones of one folder."""

_LEAST_SPREAD: Final = 16
"""Least number of tasks that read files, as an application may get more cores later."""

_CONTENT: Final = "path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY"


def read_files(
    spark: SparkSession,
    path: str,
    format: FormatName,  # noqa: A002 - Spark's word
    schema: st.StructType | str,
    **options: object,
) -> DataFrame:
    """Streams the rows of files that Arrow reads, in place of ``spark.readStream``.

    Given to a join as it is, or after a ``select`` and ``where`` that Arrow evaluates, its rows never become Spark's:
    the files' rows are distributed as Arrow batches. Within a micro-batch the changes of a join's input are in the
    order of the files' modification times, then paths, then rows, however many tasks read them.

    Args:
        spark: the session.
        path: a folder, or a pattern of paths.
        format: ``"csv"``, ``"json"`` (one object a line), ``"parquet"``, ``"orc"``, ``"arrow"``, or ``"delta"``: the
            change feed of a Delta table, a commit is a file, and none may be gone (needs Spark 4.2, and the package
            ``pyroaring`` for deletion vectors); its rows have ``_change_type``, the row kind, ``_commit_version`` and
            ``_commit_timestamp`` besides.
        schema: the rows' schema, or its DDL text.
        options: options of Spark's file source (`SOURCE_OPTIONS`; with delta only ``maxFilesPerTrigger``) and of the
            format (`gpu_ops.files.formats.FileFormat`), by the names that Spark has for them.

    A partition of a join takes at most 2 GiB of a micro-batch: ``maxFilesPerTrigger`` keeps it below.

    Returns:
        A streaming DataFrame. Spark's ``numInputRows`` counts files here; a join's metrics count rows.

    Raises:
        DescriptionError: no such format or option, or a column of a type that it cannot hold.
        NotBuiltError: Spark Connect, or a Delta table and a Spark older than 4.2.

    Example:
        >>> arrive(folder + "/in", {"id": 1, "amount": 10}, {"id": 2, "amount": 20})
        >>> orders = gpu_ops.read_files(spark, folder + "/in", "json", "id INT, amount INT")
        >>> view = gpu_ops.sinks.memory_view("orders")
        >>> orders.selectExpr("'+I' AS row_kind", "*").writeStream.foreachBatch(view).option(
        ...     "checkpointLocation", folder + "/checkpoint"
        ... ).trigger(availableNow=True).start().awaitTermination()
        >>> view.table.orderBy("id").show()
        +---+------+
        | id|amount|
        +---+------+
        |  1|    10|
        |  2|    20|
        +---+------+
    """
    refuse_connect(spark)
    refuse_gone(spark.sparkContext)
    make_importable(spark)
    declared = applied_schema(schema, "schema")
    given = {name: _text(value) for name, value in options.items()}
    of_format = OPTIONS.get(format, ())
    of_source = ("maxFilesPerTrigger",) if format == "delta" else SOURCE_OPTIONS
    unknown = next((name for name in given if name not in of_source and name not in of_format), None)
    if unknown is not None and format in OPTIONS:
        raise DescriptionError(
            f"read_files() has no option {unknown!r} for {format}; there are {', '.join((*of_format, *of_source))}"
        )
    most = given.get("maxFilesPerTrigger", "1")
    if format == "delta" and not (most.isdecimal() and int(most)):
        raise DescriptionError(f"maxFilesPerTrigger={most!r} is no number above 0")
    for name, value in _of_session(spark, format).items():
        if name in of_format:
            given.setdefault(name, value)
    read = FileFormat(
        format,
        arrow_schema(declared, path),
        tuple((name, value) for name, value in given.items() if name not in of_source),
    )
    return rows_of_files(spark, path, read, declared, given)


def rows_of_files(
    spark: SparkSession,
    path: str,
    read: FileFormat,
    declared: st.StructType,
    given: Mapping[str, str],
    *,
    at_once: bool = False,
) -> DataFrame:
    """Streams the rows of files that are read in some way; see `read_files`.

    Args:
        spark: the session.
        path: a folder, or a pattern of paths.
        read: reads the files.
        declared: the rows' schema.
        given: options of Spark's file source.
        at_once: whether the files that are there now are read, and no stream.
    """
    per_batch = 0 if at_once or read.name == "delta" else _files_per_batch(path, given)
    rows = FileRows(read, path, Projection.all(read.schema), read.schema, per_batch=per_batch)
    files = _listed(spark, path, read.name, given, at_once=at_once).withMetadata("path", {ARROW: path})
    if read.name != "delta" and not at_once:
        files = files.repartition(_spread(spark), "path")
    return files.mapInArrow(ReadFiles("gpu_files", rows), declared)


def _files_per_batch(path: str, given: Mapping[str, str]) -> int:
    """The number of files that a micro-batch takes, the oldest ones of one folder; 0 where that is not so."""
    most = given.get("maxFilesPerTrigger", "")
    others = re.search(r"[\[\]{}?*\\]", path) or any(given.get(name, "false") != "false" for name in _OTHER_FILES)
    return 0 if others or not most.isdecimal() else int(most)  # what is no number Spark refuses


def _spread(spark: SparkSession) -> int:
    r"""The number of tasks that read files as Spark's rows.

    For each file with one of ``[]{}?*\`` in its name Spark lists all files of the micro-batch once more. Equal paths
    have to meet in one task, so that each file is read once. A join whose rows Arrow reads needs no such shuffle: its
    messages name their file.
    """
    least = min(_LEAST_SPREAD, int(str(spark.conf.get("spark.sql.shuffle.partitions"))))
    return max(least, int(spark.sparkContext.defaultParallelism))


def _listed(
    spark: SparkSession,
    path: str,
    format: str,  # noqa: A002
    given: Mapping[str, str],
    *,
    at_once: bool,
) -> DataFrame:
    """The files' paths as Spark finds them, and the times or versions that order them; see `rows_of_files`."""
    if format == "delta":
        try:
            from gpu_ops.spark.sources.commits import commits  # noqa: PLC0415 - it has what older ones of Spark do not
        except ImportError:
            raise NotBuiltError(f"the feed of a Delta table needs Spark 4.2, and this is {spark.version}") from None
        return commits(spark, path, given)
    # without its content a file is not opened
    found = (spark.read if at_once else spark.readStream).format("binaryFile").schema(_CONTENT)
    options = {name: value for name, value in given.items() if name in SOURCE_OPTIONS}
    return found.options(**options).load(path).select("path", f.unix_micros("modificationTime").alias("time"))


def _of_session(spark: SparkSession, format: str) -> dict[str, str]:  # noqa: A002
    """The options that default to the session's settings, as in Spark's own file sources."""
    assert spark._jvm is not None
    conf, parquet = spark.conf, "spark.sql.parquet"
    # the JVM's zone is that of times without one in ORC, as Spark writes it, and of Spark 2's in Parquet
    zone = spark._jvm.java.util.TimeZone.getDefault().getID() if format in ("orc", "parquet") else None
    return {
        "timeZone": str(zone or conf.get("spark.sql.session.timeZone")),
        "caseSensitive": str(conf.get("spark.sql.caseSensitive")).lower(),
        "datetimeRebaseMode": str(conf.get(f"{parquet}.datetimeRebaseModeInRead")).upper(),
        "int96RebaseMode": str(conf.get(f"{parquet}.int96RebaseModeInRead")).upper(),
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
