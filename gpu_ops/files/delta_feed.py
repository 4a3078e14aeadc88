"""What a commit of a Delta table changed: its change data, or the rows of the files that it added and removed.

The rules are those of Delta's PROTOCOL.md, "Reader Requirements for AddCDCFile", and where that is silent those of
Spark's reader, ``CDCReader``: a file that is removed and added with another deletion vector has changed by the
difference of the two. Data files are Parquet's, which `gpu_ops.files.formats` reads.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gpu_ops.arrays import Ints
from gpu_ops.errors import BadInputError
from gpu_ops.files.columns import WrongError
from gpu_ops.files.deletion_vectors import deleted_rows
from gpu_ops.files.delta_log import LOG, Action, Log
from gpu_ops.files.delta_schema import PARTITION, FileNames, declared_columns, names_of, partition_value, physical_name
from gpu_ops.files.file_systems import file_system_of

ReadParquet = Callable[[str, pa.Schema], Iterator[pa.RecordBatch]]
"""Columns of the Parquet file at a URI, in the types of a schema and the file's order; null where it lacks one."""

_CHANGE: Final = pa.field("_change_type", pa.string())
_VERSION: Final = pa.field("_commit_version", pa.int64())
_TIMESTAMP: Final = pa.field("_commit_timestamp", pa.timestamp("us", "UTC"))
_FEED: Final = {field.name: field for field in (_CHANGE, _VERSION, _TIMESTAMP)}

_TAKEN: Final = pa.array(["delete", "update_preimage"])
_NO_ROWS: Final = np.zeros(0, np.int64)
_ROWS: Final = 1 << 17
"""Rows at once of a file none of whose columns is read."""

_NOTHING_MERGED: Final = ("numTargetRowsInserted", "numTargetRowsUpdated", "numTargetRowsDeleted")
_NO_FEED: Final = (
    "change data was not recorded (delta.enableChangeDataFeed has to be set, and startingVersion after that)"
)


class CommitChanges:
    """The changes of a commit.

    Args:
        commit: a file of the table's log, as Hadoop writes it.
        declared: the columns; ``_change_type``, ``_commit_version`` and ``_commit_timestamp`` may be among them.
        zone: of partitions' times that name none and are instants.
        read_parquet: reads data files.
        input_name: for errors.

    Raises:
        ValueError: no commit, one before changes were recorded, a column that the table does not have, or a feature of
            the protocol that is not read here.
        OSError: there is no such file.
    """

    def __init__(self, commit: str, declared: pa.Schema, zone: str, read_parquet: ReadParquet, input_name: str) -> None:
        named = re.fullmatch(rf"(.*)/{LOG}/(\d+)\.json", commit, re.DOTALL)
        if named is None:
            raise ValueError(f"it is no commit of a Delta table's log, {LOG}/*.json")
        self._table, self._version = named.group(1), int(named.group(2))
        self._zone, self._read_parquet, self._input = zone, read_parquet, input_name
        self._log = Log(self._table, input_name)
        self._actions = self._log.actions(self._version)
        self._state = self._log.state(self._version)
        self._state.check()
        if not self._state.has_feed:
            raise ValueError(f"in version {self._version} {_NO_FEED}")
        self.schema = self._columns(declared)
        """The declared columns, in the types that they have in the table."""
        self.names = names_of(self._state.fields)
        """The names of the table's columns at this version, and what is within each."""

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows: first those that the commit takes, then those that it brings, in the order of log and files.

        Args:
            names: of the columns, in their order.

        Raises:
            ValueError: a file that is gone or damaged.
        """
        columns = [self.schema.field(name) for name in names]
        data = [action["cdc"] for action in self._actions if action.get("cdc")]
        if data:
            yield from self._change_data(data, columns)
            return
        if self._merged_nothing():
            return
        removed, added = (
            {x[kind]["path"]: x[kind] for x in self._actions if x.get(kind) and x[kind].get("dataChange", True)}
            for kind in ("remove", "add")
        )
        for files, others, change in ((removed, added, "delete"), (added, removed, "insert")):
            for path, file in files.items():
                absent = self._deleted(file)
                if path not in others:
                    yield from self._rows(file, columns, change, absent, inverted=True)
                    continue
                # in both: the rows that one has and the other does not
                only_here = np.setdiff1d(self._deleted(others[path]), absent, assume_unique=True)
                if len(only_here):
                    yield from self._rows(file, columns, change, only_here, inverted=False)

    def _columns(self, declared: pa.Schema) -> pa.Schema:
        feed = {x.name: _FEED[x.name.lower()].with_name(x.name) for x in declared if x.name.lower() in _FEED}
        of_table = pa.schema([field for field in declared if field.name not in feed])
        state, latest = self._state, self._log.latest_state()
        table = declared_columns(of_table, state.fields, state.partitioned_by, latest.fields)
        return pa.schema([feed[x.name] if x.name in feed else table.field(x.name) for x in declared])

    def _merged_nothing(self) -> bool:
        """Tells whether the commit is a MERGE that changed no row; it may have rewritten files all the same."""
        info: Action = next((action["commitInfo"] for action in self._actions if action.get("commitInfo")), {})
        metrics = info.get("operationMetrics") or {}
        return info.get("operation") == "MERGE" and all(metrics.get(name) == "0" for name in _NOTHING_MERGED)

    def _change_data(self, files: Sequence[Action], columns: Sequence[pa.Field]) -> Iterator[pa.RecordBatch]:
        """The rows of change data, whose files have both kinds."""
        place = next((n for n, column in enumerate(columns) if column.name.lower() == _CHANGE.name), len(columns))
        read = columns if place < len(columns) else [*columns, _CHANGE]
        brought = []
        for file in files:
            for batch in self._rows(file, read, None, _NO_ROWS, inverted=True):
                rows, taken = batch.select(range(len(columns))), pc.is_in(batch.column(place), _TAKEN)
                yield rows.filter(taken)
                brought.append(rows.filter(pc.invert(taken)))
        yield from brought

    def _deleted(self, file: Action) -> Ints:
        return deleted_rows(file.get("deletionVector"), self._table, self._bytes)

    def _rows(
        self, file: Action, columns: Sequence[pa.Field], change: str | None, at: Ints, *, inverted: bool
    ) -> Iterator[pa.RecordBatch]:
        """Rows of a data file.

        Args:
            file: the action.
            columns: which are wanted.
            change: what is done with the rows; None where the file says it.
            at: rows of the file, ascending.
            inverted: whether all others are wanted.
        """
        constants = {x.name: value for x in columns if (value := self._constant(file, x, change)) is not None}
        stored = [column for column in columns if column.name not in constants]
        schema, begin = pa.schema(columns), 0
        for count, arrays in self._stored(self._uri(file["path"]), stored):
            first, last = np.searchsorted(at, (begin, begin + count))
            mask = np.full(count, inverted)
            mask[at[first:last] - begin] = not inverted
            begin += count
            rows, some = int(mask.sum()), pa.array(mask)
            values = {name: pa.repeat(value, rows) for name, value in constants.items()}
            values |= {name: array if rows == count else array.filter(some) for name, array in arrays.items()}
            if rows:
                yield pa.RecordBatch.from_arrays([values[column.name] for column in columns], schema=schema)

    def _constant(self, file: Action, column: pa.Field, change: str | None) -> pa.Scalar | None:
        """The value of all rows of a file; None where the file has them."""
        if pa.types.is_null(column.type):
            return pa.scalar(None, column.type)
        if not column.metadata:  # one of the feed's
            of_commit = {_CHANGE.name: change, _VERSION.name: self._version}
            name = column.name.lower()
            value = self._committed_at if name == _TIMESTAMP.name else of_commit[name]
            return None if value is None else pa.scalar(value, column.type)
        if PARTITION not in column.metadata:
            return None
        values = file.get("partitionValues")
        if values is None:
            raise WrongError(
                f"version {self._version} removes {file['path']} and does not say its partition", column.name
            )
        try:
            return partition_value(values.get(physical_name(column)), column.type, self._zone)
        except WrongError as error:
            raise WrongError(f"version {self._version}: {error}", column.name, error.sample) from error

    @functools.cached_property
    def _committed_at(self) -> int:
        return 1000 * self._log.committed_at(self._version, self._actions)

    def _uri(self, path: str) -> str:
        absolute = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|/", path) is not None
        path = urllib.parse.unquote(path)
        return path if absolute else f"{self._table}/{path}"

    def _stored(self, uri: str, columns: Sequence[pa.Field]) -> Iterator[tuple[int, dict[str, pa.Array]]]:
        """Columns that a data file has, by their declared names, and how many rows these are."""
        of_table = [column for column in columns if column.metadata]
        try:
            footer = self._footer(uri) if self._state.mapping == "id" or not columns else None
            names = FileNames(footer.schema.to_arrow_schema() if footer and self._state.mapping == "id" else None)
            wanted = pa.schema([*names.schema(of_table), *([_CHANGE] if len(of_table) < len(columns) else [])])
            parts = self._read_parquet(uri, wanted) if len(wanted) else _counted((footer or self._footer(uri)).num_rows)
            for part in parts:
                yield (
                    len(part),
                    {x.name: names.renamed(part, x) if x.metadata else part.column(_CHANGE.name) for x in columns},
                )
        except FileNotFoundError as error:
            raise self._gone(uri) from error
        except BadInputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._gone(uri) from error
            column = next((x.name for x in of_table if physical_name(x) == error.column), error.column)
            sample = None if error.sample is None else str(error.sample)
            raise WrongError(f"version {self._version}: {error.problem}", column, sample) from error

    def _footer(self, uri: str) -> pq.FileMetaData:
        files, path = file_system_of(uri, self._input)
        with files.open_input_file(path) as file:
            return pq.read_metadata(file)

    def _bytes(self, uri: str, offset: int, size: int) -> bytes:
        files, path = file_system_of(uri, self._input)
        try:
            with files.open_input_file(path) as file:
                return bytes(file.read_at(size, offset))
        except FileNotFoundError as error:
            raise self._gone(uri) from error

    def _gone(self, uri: str) -> WrongError:
        return WrongError(
            f"version {self._version} of the table names {uri}, which is gone: VACUUM removes files that the table "
            "does not need any more, and change data with them. Begin anew with a later startingVersion, and raise "
            "delta.deletedFileRetentionDuration"
        )


def _counted(rows: int) -> Iterator[pa.Array]:
    """Nothing, so many times."""
    for begin in range(0, rows, _ROWS):
        yield pa.nulls(min(_ROWS, rows - begin))
