"""Tasks that write their rows into files themselves, and pass one row per file to Spark."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from gpu_ops.descriptions.projection import Projection
from gpu_ops.spark.tasks.arrow import TaskIdentity, task_identity
from gpu_ops.spark.wire.files_request import ATTEMPT, NUMBER, FilesRequest
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files

FILE_COLUMN: Final = "file"
"""The column that goes to Spark: a `WrittenFile` as JSON."""

STAGING: Final = "_staging"
"""The folder of files that no commit has made visible yet; Spark ignores folders with such names."""

_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
_ROWS_PER_GROUP: Final = (1 << 16, 1 << 20)
_MOST_PARTITIONS: Final = 1 << 14
_LONGEST_TEXT: Final = 64
_SAMPLE: Final = 1 << 12


class WrittenFile(NamedTuple):
    """A file that a task has written.

    Attributes:
        path: the path below the output folder, once the file is committed.
        lies: the present path below the output folder.
        size: the size in bytes.
        partition: the value of each partition column as text, None for null.
        statistics: the statistics for Delta's log, ``{}`` elsewhere: Parquet's files have their own.
    """

    path: str
    lies: str
    size: int
    partition: dict[str, str | None]
    statistics: dict[str, Any]


class FileWriter(NamedTuple):
    """Writes the rows of a task into files.

    Attributes:
        address: the output folder.
        format: ``"parquet"`` or ``"arrow"``.
        schema: the schema of the rows, with the partition columns.
        partition_by: columns that become folders ``name=value``.
        staged: whether files lie in `STAGING` until they are committed; else they have names that are never repeated.
        file_bytes: the size of a file's rows in memory, about; in Parquet they are smaller.
        compression: the compression as pyarrow calls it, None for none.
        by_card: whether the state server is asked to write the files, which it does where its card can.
    """

    address: StateAddress
    format: str
    schema: pa.Schema
    partition_by: tuple[str, ...]
    staged: bool
    file_bytes: int
    compression: str | None
    by_card: bool = False

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of the rows that go to Spark, one per file."""
        return pa.schema([(FILE_COLUMN, pa.string())])

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Writes the rows of this Spark task, and yields one row per file."""
        yield self._rows(self.write(rows, task_identity()))

    def _rows(self, written: Iterable[WrittenFile]) -> pa.RecordBatch:
        files = [json.dumps(file._asdict()) for file in written]
        return pa.RecordBatch.from_arrays([pa.array(files, pa.string())], schema=self.output_schema)

    def request(self, projection: Projection, task: TaskIdentity) -> FilesRequest:
        """The request to a state server to write the files of a task.

        Args:
            projection: the filter and projection of its changes.
            task: the task, after which the files are named.
        """
        base, named = self._names(task, ATTEMPT)
        return FilesRequest(
            folder=self.address.secret_uri,
            path=f"{base}/{named}".lstrip("/"),
            schema=FilesRequest.encoded(self.schema),
            projection=projection.to_dict(),
            file_bytes=self.file_bytes,
            rows_per_group=_ROWS_PER_GROUP[1],
            compression=self.compression,
        )

    def placed(self, files: Iterable[Sequence[Any]]) -> pa.RecordBatch:
        """The rows, one per file, for files that a state server has written.

        Args:
            files: for each its path below the output folder and its size, see `PlacedFile`.
        """
        place = Files.at(self.address, shared=True)
        written = []
        for lies, size in files:
            base, _, name = lies.rpartition("/")
            statistics: dict[str, Any] = {}
            if not self.staged:
                with place.filesystem.open_input_file(f"{place.root}/{lies}") as file:
                    statistics = _statistics(pq.read_metadata(file))
            written.append(WrittenFile(f"{name}.{self.format}" if base else lies, lies, size, {}, statistics))
        return self._rows(written)

    def write(self, batches: Iterator[pa.RecordBatch], task: TaskIdentity) -> list[WrittenFile]:
        """Writes rows, in their order, and returns the files.

        Args:
            batches: record batches of `schema`.
            task: the task, after which the files are named.
        """
        first = next(batches, None)
        if first is None:
            return []
        base, named = self._names(task, uuid.uuid4().hex)
        place = Files.at(self.address, shared=True)
        written: list[Any] = []
        rows_per_file = max(1, self.file_bytes * first.num_rows // max(1, first.nbytes))
        kind, options = ds.IpcFileFormat(), {}
        if self.format == "parquet":
            kind, options = ds.ParquetFileFormat(), {"use_dictionary": repeating(first)}
        ds.write_dataset(
            pa.RecordBatchReader.from_batches(self.schema, itertools.chain([first], batches)),
            f"{place.root}/{base}".rstrip("/"),
            basename_template=named,
            format=kind,
            file_options=kind.make_write_options(compression=self.compression, **options),
            partitioning=ds.partitioning(pa.schema([self.schema.field(x) for x in self.partition_by]), flavor="hive"),
            filesystem=place.filesystem,
            create_dir=place.has_folders,
            use_threads=False,
            max_partitions=_MOST_PARTITIONS,
            max_rows_per_file=rows_per_file,
            min_rows_per_group=min(rows_per_file, _ROWS_PER_GROUP[0]),
            max_rows_per_group=min(rows_per_file, _ROWS_PER_GROUP[1]),
            file_visitor=written.append,
            existing_data_behavior="overwrite_or_ignore",
        )
        return [self._written(place.root, base, file) for file in written]

    def _names(self, task: TaskIdentity, attempt: str) -> tuple[str, str]:
        """The folder of a task's files below the output folder, and the name of each, with ``{i}`` for its number."""
        named = f"part-{task.batch_id:010d}-{task.number:05d}"
        if self.staged:
            return f"{STAGING}/{task.batch_id}/{attempt}", f"{named}-{NUMBER}"
        return "", f"{named}-{attempt}-{NUMBER}.{self.format}"

    def _written(self, root: str, base: str, file: Any) -> WrittenFile:
        lies = file.path[len(root) + 1 :]
        path = f"{lies[len(base) + 1 :]}.{self.format}" if base else lies
        folders = (folder.partition("=") for folder in path.split("/")[:-1])
        values = {unquote(name): None if value == _NO_VALUE else unquote(value) for name, _, value in folders}
        return WrittenFile(path, lies, file.size, values, {} if self.staged else _statistics(file.metadata))


def repeating(first: pa.RecordBatch) -> list[str] | bool:
    """The columns whose values repeat, for Parquet's dictionaries; True where that cannot be told column by column.

    A dictionary of values that do not repeat is given up when it is full, and the next group of rows begins another:
    that takes half of the time of a file.

    Args:
        first: the first rows of a file.
    """
    sample = first.slice(0, _SAMPLE)
    if sample.num_rows < _SAMPLE or any(pa.types.is_nested(kind) for kind in first.schema.types):
        return True
    return [name for name in first.schema.names if len(sample[name].unique()) <= _SAMPLE // 2]


def _statistics(metadata: Any) -> dict[str, Any]:
    """The statistics of a Parquet file for Delta's log: row count, and bounds of integers, dates and short text."""
    bounds: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for place in range(metadata.num_columns):
        groups = [metadata.row_group(n).column(place) for n in range(metadata.num_row_groups)]
        of_groups = [group.statistics for group in groups]
        name = groups[0].path_in_schema
        if name != metadata.schema.column(place).name or any(x is None or not x.has_null_count for x in of_groups):
            continue  # a part of a nested column
        bounds["nullCount"][name] = sum(x.null_count for x in of_groups)
        ends = [(x.min, x.max) for x in of_groups if x.has_min_max]
        if ends and all(_short(value) for pair in ends for value in pair):
            bounds["minValues"][name] = _shown(min(least for least, _ in ends))
            bounds["maxValues"][name] = _shown(max(most for _, most in ends))
    return {"numRecords": metadata.num_rows, **bounds}


def _short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_TEXT
    return isinstance(value, int | dt.date) and not isinstance(value, bool | dt.datetime)


def _shown(value: Any) -> Any:
    return value.isoformat() if isinstance(value, dt.date) else value
