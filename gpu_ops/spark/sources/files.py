"""A stream of files that Arrow reads: Spark finds the files and remembers which are done, tasks read them.

To Spark the source is a stream of paths: its own file source lists, limits and cleans up, and its checkpoint holds
what it holds for any file source. A join takes the files' rows as they are (`gpu_ops.spark.tasks.packing`); anything
else gets them as Spark's rows.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.files.formats import OPTIONS, FileFormat, FormatName
from gpu_ops.query.catalyst import frame_of
from gpu_ops.spark.datatypes import arrow_schema
from gpu_ops.spark.driver.queries import metadata_of
from gpu_ops.spark.driver.workers import make_importable
from gpu_ops.spark.failures import refuse_connect
from gpu_ops.spark.tasks.functions import applied_schema
from gpu_ops.spark.tasks.packing import FileRows, Packer, PackFiles, ReadFiles
from gpu_ops.spark.tasks.rows import Slices, Taken

SOURCE_OPTIONS: Final = (
    "maxFilesPerTrigger", "maxBytesPerTrigger", "latestFirst", "maxFileAge", "fileNameOnly", "maxCachedFiles",
    "discardCachedInputRatio", "cleanSource", "sourceArchiveDir", "pathGlobFilter", "recursiveFileLookup",
)  # fmt: skip
"""What Spark's own file source is told."""

_CONTENT: Final = "path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY"


FILES: Final = "gpu_ops.files"
"""In the metadata of a stream of paths: how the files are read. Only the function above it sees that column."""


_sliced: dict[str, FileRows] = {}
"""By the name that metadata have for it how rows of files are aggregated as they are read."""

_MOST_KNOWN: Final = 1024


@dataclasses.dataclass(frozen=True)
class Source:
    """A stream of files.

    Attributes:
        files: the stream of their paths and modification times (us).
        format: how they are read.
        location: the folder, as the user wrote it.
        sliced: how their rows are aggregated as they are read; None for not at all.
    """

    files: DataFrame
    format: FileFormat
    location: str
    sliced: FileRows | None = None

    def __str__(self) -> str:
        return f"files of {self.location} ({self.format.name})"

    @property
    def schema(self) -> pa.Schema:
        """Of the rows."""
        return self.format.schema if self.sliced is None or self.sliced.slices is None else self.sliced.slices.made

    def packed(self, packer: Packer, taken: Taken, packed_type: st.StructType) -> DataFrame:
        """The rows as they travel; see `gpu_ops.spark.plan.build`."""
        if self.sliced is not None:
            return self.files.mapInArrow(PackFiles(packer, self.sliced, taken), packed_type)
        rows = FileRows(self.format, packer.input_name, taken, packer.schema)
        return self.files.mapInArrow(PackFiles(packer, rows, Taken.all(packer.schema)), packed_type)

    def aggregated(self, slices: Slices, taken: Taken, made: st.StructType) -> DataFrame:
        """The rows aggregated by slices of time as they are read.

        Args:
            slices: how.
            taken: what of the rows.
            made: the result's types.
        """
        rows = FileRows(self.format, self.location, taken, slices.schema, slices)
        name = uuid.uuid4().hex
        while len(_sliced) >= _MOST_KNOWN:
            _sliced.pop(next(iter(_sliced)))
        _sliced[name] = rows
        path = f.col("path").alias("path", metadata={FILES: json.dumps({"sliced": name})})
        return self.files.withColumn("path", path).mapInArrow(ReadFiles("gpu_slices", rows), made)


def read_files(
    spark: SparkSession,
    path: str,
    format: FormatName,  # noqa: A002 - Spark's word
    schema: st.StructType | str,
    **options: object,
) -> DataFrame:
    """A stream of files that Arrow reads, in place of ``spark.readStream``.

    Given to a join as it is, or after a ``select`` and ``where`` that Arrow evaluates, its rows never become Spark's:
    the files' rows are distributed as Arrow batches. Within a micro-batch the changes of a join's input are in the
    order of the files' modification times, then paths, then rows, however many tasks read them.

    Args:
        spark: the session.
        path: a folder, or a pattern.
        format: ``"csv"``, ``"json"`` (one object a line), ``"parquet"``, ``"orc"``, ``"arrow"``, or ``"delta"``: the
            change feed of a Delta table, a commit is a file, and none may be gone (needs the package ``deltalake``
            and Spark 4.2); its rows have ``_change_type``, the row kind, ``_commit_version`` and
            ``_commit_timestamp`` besides.
        schema: of the rows: a schema or its DDL text.
        options: of Spark's file source (`SOURCE_OPTIONS`; with delta but ``maxFilesPerTrigger``) and of the format
            (`gpu_ops.files.formats.FileFormat`), by the names that Spark has for them.

    A partition of a join takes at most 2 GiB of a micro-batch: ``maxFilesPerTrigger`` keeps it below.

    Returns:
        A streaming DataFrame. Spark's ``numInputRows`` counts files here; a join's metrics count rows.

    Raises:
        DescriptionError: no such format or option, or a column of a type that it cannot hold.
        NotBuiltError: Spark Connect, or a Delta table and a Spark older than 4.2.
    """
    refuse_connect(spark)
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
    if "timeZone" in of_format:
        given.setdefault("timeZone", _zone(spark, format))
    read = FileFormat(
        format,
        arrow_schema(declared, path),
        tuple((name, value) for name, value in given.items() if name not in of_source),
    )
    how = {FILES: json.dumps({"format": format, "options": read.options, "location": path})}
    files = _found(spark, path, format, given).withMetadata("path", how)
    rows = FileRows(read, path, Taken.all(read.schema), read.schema)
    return files.mapInArrow(ReadFiles("gpu_files", rows), declared)


def _found(spark: SparkSession, path: str, format: str, given: Mapping[str, str]) -> DataFrame:  # noqa: A002
    """The stream of files, and of what they are ordered by."""
    if format == "delta":
        try:
            from gpu_ops.spark.sources.commits import commits  # noqa: PLC0415 - it has what older ones of Spark do not
        except ImportError:
            raise NotBuiltError(f"the feed of a Delta table needs Spark 4.2, and this is {spark.version}") from None
        return commits(spark, path, given)
    # without its content a file is not opened
    stream = spark.readStream.format("binaryFile").schema(_CONTENT)
    for name in SOURCE_OPTIONS:
        stream = stream.option(name, given[name]) if name in given else stream
    return stream.load(path).select("path", f.unix_micros("modificationTime").alias("time"))


def source(node: Any, session: SparkSession) -> Source | None:
    """The stream of files that a node of a plan reads, or None."""
    below = node.children().head()
    how = metadata_of(below, FILES)
    if how is None:
        return None
    given = json.loads(how)
    if "sliced" in given:
        rows = _sliced.get(given["sliced"])
        return None if rows is None else Source(frame_of(session, below), rows.format, rows.name, rows)
    schema = arrow_schema(st._parse_datatype_json_string(node.schema().json()), given["location"])
    read = FileFormat(given["format"], schema, tuple(map(tuple, given["options"])))
    return Source(frame_of(session, below), read, given["location"])


def _zone(spark: SparkSession, format: str) -> str:  # noqa: A002
    """The zone of times that name none: the session's; in ORC, as Spark writes it, its JVM's."""
    if format == "orc":
        assert spark._jvm is not None
        return str(spark._jvm.java.util.TimeZone.getDefault().getID())
    return str(spark.conf.get("spark.sql.session.timeZone"))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
