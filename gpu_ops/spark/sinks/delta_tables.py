"""Delta tables by the package ``deltalake``: the MERGE of a view, and commits of files as a table's rows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import types as st

from gpu_ops.errors import BadInputError, DatabaseError, DescriptionError, NotBuiltError, optional_module
from gpu_ops.spark.sinks.changes import COUNT, NetChanges
from gpu_ops.spark.tasks.file import WrittenFile
from gpu_ops.spark_types import is_binary_collated, nullable, spark_types_within
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.values import types_within

TYPES: Final = (
    st.ByteType, st.ShortType, st.IntegerType, st.LongType, st.FloatType, st.DoubleType, st.DecimalType, st.BooleanType,
    st.StringType, st.BinaryType, st.DateType, st.TimestampType, st.TimestampNTZType,
)  # fmt: skip
"""Types of values that Delta and Iceberg tables hold."""

_FORBIDDEN: Final = " ,;{}()\n\t="
"""Characters that no column's name has in a table without column mapping."""

_OF_SPARK: Final = {
    "delta.generationExpression": "is generated",
    "delta.identity.start": "is an identity column",
    "CURRENT_DEFAULT": "has a default",
    "__CHAR_VARCHAR_TYPE_STRING": "is CHAR or VARCHAR",
    "__COLLATIONS": "has a collation",
    "delta.columnMapping.physicalName": "has another name in the files (column mapping)",
    "delta.typeChanges": "had another type (type widening)",
}
"""By key of a column's metadata, what Delta's jar computes or checks, and ``deltalake`` does not or not as Spark."""

_CONSTRAINT: Final = "delta.constraints."
_FEATURES: Final = frozenset({"appendOnly", "changeDataFeed", "checkConstraints", "invariants", "timestampNtz"})
"""Features of tables that ``deltalake`` keeps to as Spark does; of constraints and columns each is looked at."""

_WITH_JAR: Final = "start the session with Delta's jar"


_LEGACY: Final = frozenset({b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"})
_BY_SPARK: Final = b"org.apache.spark.version"
"""What Spark writes into files whose times are in the Julian calendar, and into all files."""


class InterferenceError(DatabaseError):
    """A commit that failed because of another writer's; repeated, it may succeed."""


class ViewTable:
    """A view's table, which ``deltalake`` opens.

    Args:
        table: as its user calls it, for errors.
        address: its folder.

    Raises:
        NotBuiltError: ``deltalake`` is not installed, or cannot reach the folder.
    """

    def __init__(self, table: str, address: StateAddress) -> None:
        self._name, self._delta = table, deltalake_for(f"view {table}: without Delta's jar delta_view()")
        self._uri = address.path or str(address)
        self._storage = storage_options(address, f"view {table}: without Delta's jar delta_view() writes")
        self._files, self._read = Files.at(address), set[str]()

    def create(self, schema: st.StructType) -> None:
        """Creates the table unless it is there.

        Raises:
            DescriptionError: a column that Delta does not hold.
        """
        for field in schema:
            problem = _refusal(st.StructType([field]))
            if problem is not None:
                raise DescriptionError(f"view {self._name} cannot be made: column {field.name!r}: {problem}")
        fields = self._delta.Schema.from_json(nullable(schema).json())
        with self._errors():
            self._delta.DeltaTable.create(self._uri, fields, mode="ignore", storage_options=self._storage)

    def merge(self, changes: NetChanges, rows: pa.Table) -> None:
        """Merges a micro-batch, unless a commit of the table names it already.

        Args:
            changes: what the rows are of.
            rows: those of `NetChanges.signed`.

        Raises:
            DescriptionError: the table is gone, or has other columns or something that only Delta's jar does.
            InterferenceError: another writer was faster.
            BadInputError: an empty text in a column of partitions, where it would become null.
            DatabaseError: the table does not take the rows.
        """
        with self._errors():
            table = self._delta.DeltaTable(self._uri, storage_options=self._storage)
            done = table.transaction_version(changes.query_id)
            if done is not None and done >= changes.batch_id:
                return
            names = self._columns(changes, table)
            self._check_files(table)
            types = pa.schema(table.schema().to_arrow())
            kinds = [*(types.field(names[x]).type for x in changes.stored().names if x != COUNT), pa.int64()]
            source = pa.Table.from_arrays(
                [column.cast(kind) for column, kind in zip(rows.columns, kinds, strict=True)],
                [*(names[x] for x in changes.schema.names), COUNT],
            )
            for name in {*table.metadata().partition_columns} & {*source.column_names}:
                texts = pa.types.is_string(source[name].type) or pa.types.is_binary(source[name].type)
                if texts and pc.any(pc.equal(pc.binary_length(source[name]), 0)).as_py():
                    problem = f"view {self._name} has partitions by it, and an empty text is null in Delta's partitions"
                    raise BadInputError(changes.changelog, name, problem, "")
            mark = self._delta.transaction.Transaction(changes.query_id, changes.batch_id, int(time.time() * 1000))
            columns = [_quoted(names[x]) for x in changes.schema.names]
            key = [_quoted(names[x]) for x in changes.key or changes.schema.names]
            merger = table.merge(
                source, " AND ".join(f"(t.{x} IS NOT DISTINCT FROM s.{x})" for x in key),
                source_alias="s", target_alias="t",
                commit_properties=self._delta.transaction.CommitProperties(app_transactions=[mark]),
            )  # fmt: skip
            count, values = _quoted(COUNT), {x: f"s.{x}" for x in columns}
            if changes.key is None:
                total = f"t.{count} + s.{count}"
                merger = merger.when_matched_delete(f"{total} = 0").when_matched_update({count: total})
                merger.when_not_matched_insert({**values, count: f"s.{count}"}).execute()
                return
            merger = merger.when_matched_delete(f"s.{count} < 0").when_matched_update(values)
            merger.when_not_matched_insert(values, f"s.{count} > 0").execute()

    def _columns(self, changes: NetChanges, table: Any) -> Mapping[str, str]:
        """The columns of the changelog, as the table spells them.

        Raises:
            DescriptionError: it has other columns, or something that only Delta's jar does.
        """
        unlike = sorted({*(table.protocol().writer_features or ())} - _FEATURES)
        if unlike:
            raise DescriptionError(
                f"view {self._name}: the table has the feature {unlike[0]!r}, which is written by Delta's jar only: "
                f"{_WITH_JAR}"
            )
        schema = st.StructType.fromJson(json.loads(table.schema().to_json()))
        names = changes.check(self._name, schema.names)
        for field in schema:
            if not field.nullable and field.name not in names.values():
                raise DescriptionError(
                    f"view {self._name}: its column {field.name!r} is NOT NULL, and the changelog has no such column"
                )
            for key, problem in _OF_SPARK.items():
                if key in (field.metadata or {}):
                    raise DescriptionError(
                        f"view {self._name}: its column {field.name!r} {problem}, which deltalake does not do as "
                        f"Spark; {_WITH_JAR}"
                    )
        limit = next((x for x in table.metadata().configuration if x.startswith(_CONSTRAINT)), None)
        if limit is not None:
            raise DescriptionError(
                f"view {self._name}: the table has the constraint {limit.removeprefix(_CONSTRAINT)!r}, which deltalake "
                f"does not check as Spark; {_WITH_JAR}"
            )
        for field in changes.stored():
            expected, existing = nullable(field.dataType), nullable(schema[names[field.name]].dataType)
            if expected != existing:
                raise DescriptionError(
                    f"view {self._name}: its column {names[field.name]!r} is {existing.simpleString()}, the "
                    f"changelog's is {expected.simpleString()}: cast it"
                )
        for name in changes.key or changes.schema.names:
            kind = schema[names[name]].dataType
            if _compared_otherwise(kind):
                raise DescriptionError(
                    f"view {self._name}: rows are found by column {name!r}, which is {kind.simpleString()}, and "
                    "deltalake does not compare such values as Spark does: declare another key="
                )
        return names

    def _check_files(self, table: Any) -> None:
        """Checks that ``deltalake`` reads the times in the table's files as Spark does; each file is looked at once.

        Raises:
            DescriptionError: a file has timestamps of 12 bytes, of which years outside 1677 to 2262 would become
                others, or times in the Julian calendar.
        """
        columns = pa.struct(list(pa.schema(table.schema().to_arrow())))
        if not any(map(pa.types.is_temporal, types_within(columns))):
            return
        paths = {unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()}
        for path in paths - self._read:
            with self._files.filesystem.open_input_file(f"{self._files.root}/{path}") as file:
                footer = pq.read_metadata(file)
            marks = footer.metadata or {}
            wide = any(footer.schema.column(n).physical_type == "INT96" for n in range(footer.num_columns))
            if wide or _LEGACY & marks.keys() or marks.get(_BY_SPARK, b"3").startswith(b"2"):
                times = "timestamps of 12 bytes (INT96)" if wide else "times in the Julian calendar"
                raise DescriptionError(
                    f"view {self._name}: its file {path} has {times}, as Spark writes them, of which deltalake may "
                    f"make others: {_WITH_JAR}, or let Spark write the table anew, with "
                    "spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS"
                )
        self._read = paths

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of ``deltalake``, with the view's name."""
        kinds = self._delta.exceptions
        try:
            yield
        except kinds.TableNotFoundError as error:
            raise DescriptionError(f"view {self._name}: its table is gone: {_first_line(error)}") from error
        except kinds.DeltaProtocolError as error:
            raise DescriptionError(f"view {self._name}: {_first_line(error)} (deltalake); {_WITH_JAR}") from error
        except kinds.CommitFailedError as error:
            raise InterferenceError(f"view {self._name}: {_first_line(error)}") from error
        except kinds.DeltaError as error:
            raise DatabaseError(f"view {self._name}: {' '.join(str(error).split())}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _quoted(name: str) -> str:
    """A name as DataFusion's SQL spells it."""
    quotes = name.replace('"', '""')
    return f'"{quotes}"'


def _refusal(kind: st.DataType) -> str | None:
    """The reason why a Delta table does not hold a type; else None."""
    for part in spark_types_within(kind):
        if isinstance(part, st.StructType) and any(set(_FORBIDDEN) & set(name) for name in part.names):
            return f"names have none of the characters {_FORBIDDEN!r}"
        known = type(part) in TYPES or isinstance(part, st.StructType | st.ArrayType | st.MapType)
        if not known or not is_binary_collated(part):
            return f"Delta tables do not hold {part.simpleString()}: CAST it"
    return None


def _compared_otherwise(kind: st.DataType) -> bool:
    """True for maps, which Spark does not compare, and nested floats, whose 0.0 is -0.0 to Spark only."""
    _, *within = spark_types_within(kind)
    return isinstance(kind, st.MapType) or any(isinstance(x, st.MapType | st.FloatType | st.DoubleType) for x in within)


class DeltaCommit:
    """Makes a micro-batch's files visible by a commit in Delta's log, which names the query and the micro-batch.

    Args:
        place: the table's folder.
        partition_by: the table's partition columns.
    """

    def __init__(self, place: Files, partition_by: Sequence[str]) -> None:
        self._delta, self._partition_by = deltalake_for("format='delta'"), list(partition_by)
        self._location = str(place.address)
        self._storage = storage_options(place.address, "format='delta' writes")
        self._table: Any = None

    def done(self, query: str, number: int) -> bool:
        """True if the files of a micro-batch are visible already."""
        if self._table is None:
            return False
        self._table.update_incremental()
        version = self._table.transaction_version(query)
        return version is not None and version >= number

    def commit(self, query: str, number: int, files: Sequence[WrittenFile], schema: pa.Schema) -> None:
        """Makes the files of a micro-batch visible, once.

        Raises:
            DescriptionError: the table has other columns.
        """
        schema = pa.schema([field.with_nullable(True) for field in schema])
        if self._table is None:
            delta = self._delta.DeltaTable
            table = delta.create(
                self._location, schema, mode="ignore", partition_by=self._partition_by or None,
                storage_options=self._storage,
            )  # fmt: skip
            self._table = table
            existing, expected = self._columns(table.schema()), self._columns(self._delta.Schema.from_arrow(schema))
            if existing != expected or table.metadata().partition_columns != self._partition_by:
                raise DescriptionError(
                    f"the table {self._location} has the columns {', '.join(existing)}, partitioned by "
                    f"{', '.join(table.metadata().partition_columns) or 'none'}; the changelog has "
                    f"{', '.join(expected)}, partitioned by {', '.join(self._partition_by) or 'none'}"
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
        """Does nothing: files that no commit names are removed by Delta's ``vacuum``."""


def deltalake_for(what: str) -> Any:
    """The package ``deltalake``, which is not installed by default.

    Raises:
        NotBuiltError: it is not there; the message begins with what needs it.
    """
    return optional_module("deltalake", f"{what} needs the package deltalake: pip install 'gpu-join[delta]'")


def storage_options(address: StateAddress, what: str) -> dict[str, str] | None:
    """The options with which ``deltalake`` opens a table: those of an S3 URI, None for a local folder.

    Args:
        address: the table's.
        what: what writes, for the error.

    Raises:
        NotBuiltError: the address is neither local nor on S3.
    """
    if address.path is not None:
        return None
    parts = urlsplit(address.secret_uri)
    if parts.scheme != "s3":
        raise NotBuiltError(f"{what} to local folders and s3://, not to {address}")
    user, _, secret = parts.netloc.rpartition("@")[0].partition(":")
    options = dict(parse_qsl(parts.query))
    protocol, endpoint = options.get("scheme", "https"), options.get("endpoint_override", "")
    settings = {
        "AWS_ACCESS_KEY_ID": unquote(user),
        "AWS_SECRET_ACCESS_KEY": unquote(secret),
        "AWS_REGION": options.get("region", ""),
        "AWS_ENDPOINT_URL": endpoint if "://" in endpoint or not endpoint else f"{protocol}://{endpoint}",
    }
    if settings["AWS_ENDPOINT_URL"].startswith("http:"):
        settings["AWS_ALLOW_HTTP"] = "true"
    return {name: value for name, value in settings.items() if value}
