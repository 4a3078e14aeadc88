"""The rows appended to an Iceberg table as a stream, which ``pyiceberg`` reads: a Python data source, for Spark 4.2.

An offset is ``{"snapshot": id, "table": uuid}``: the last snapshot that was read, null before the first, and the table.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.errors import BadInputError, DescriptionError, NotBuiltError
from gpu_ops.files.columns import WrongError, names_within, part_of
from gpu_ops.files.iceberg import cast_columns, catalog_of, check_nulls, plain_schema
from gpu_ops.files.new_columns import log_new_columns
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.failures import refuse_connect
from gpu_ops.spark_types import spark_type

if TYPE_CHECKING or importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow
else:  # before Spark 4.2
    DataSource = InputPartition = object
    DataSourceStreamReader, SupportsTriggerAvailableNow = type("Reader", (), {}), type("Available", (), {})

SnapshotOffset = dict[str, Any]

_SAME_ROWS: Final = "replace"
"""The operation of a snapshot that has the rows of the one before in other files."""


def read_iceberg(
    spark: SparkSession,
    table: str,
    *,
    catalog: str | Mapping[str, str] = "default",
    max_snapshots_per_trigger: int | None = None,
) -> DataFrame:
    """Streams the rows of an Iceberg table, and then those that are appended to it; ``pyiceberg`` reads the files.

    The first micro-batch has the table's rows as they are when the query begins. Later ones have those of the snapshots
    since, whose operation is ``append``; one that has the same rows in other files (``replace``) is passed over. A
    snapshot that changes or deletes rows is an error: a stream of insertions cannot take rows back.

    Args:
        spark: the session, of Spark 4.2 or newer.
        table: the table's name in the catalog, such as ``"shop.orders"``. Its columns are those that it has now.
        catalog: as of `gpu_ops.sinks.iceberg_view`.
        max_snapshots_per_trigger: the most snapshots of a later micro-batch; None for all.

    Returns:
        A streaming DataFrame with the columns of the table.

    Raises:
        DescriptionError: there is no such table, or it has lists or maps of structs, whose nulls ``pyiceberg`` loses.
        NotBuiltError: ``pyiceberg`` is not installed, Spark is older, or it is Spark Connect.
        BadInputError: (from the query) rows were changed or deleted, or the table was rolled back or made anew.

    Example:
        >>> catalog = {"type": "rest", "uri": "http://localhost:8181"}
        >>> orders = gpu_ops.read_iceberg(spark, "shop.orders", catalog=catalog)  # doctest: +SKIP
    """
    refuse_connect(spark)
    if DataSource is object:
        raise NotBuiltError(f"read_iceberg() needs Spark 4.2, and this is {spark.version}")
    make_importable(spark)
    schema = plain_schema(_opened(table, catalog).schema().as_arrow())
    check_nulls(table, schema)
    settings = {
        "table": table,
        "catalog": catalog if isinstance(catalog, str) else dict(catalog),
        "schema": base64.b64encode(schema.serialize()).decode(),
        "most": max_snapshots_per_trigger,
    }
    spark.dataSource.register(IcebergAppends)
    return spark.readStream.format(IcebergAppends.name()).option("given", json.dumps(settings)).load()


class IcebergAppends(DataSource):  # type: ignore[misc]
    """Spark data source of the rows appended to an Iceberg table; the module says what its offsets are."""

    @classmethod
    def name(cls) -> str:
        """The name of the format in Spark."""
        return "gpu_ops_iceberg_appends"

    def schema(self) -> st.StructType:
        """The columns of the table, when the query began."""
        fields = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(json.loads(self.options["given"])["schema"])))
        return st.StructType([st.StructField(field.name, spark_type(field.type)) for field in fields])

    def streamReader(self, schema: st.StructType) -> SnapshotReader:
        """Makes the reader that plans micro-batches and reads files."""
        return SnapshotReader(**json.loads(self.options["given"]))


class SnapshotReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Plans micro-batches of a table's snapshots, in a Python process beside the driver, and reads them in tasks.

    Args:
        table: the table's name.
        catalog: the properties of its catalog.
        schema: the columns that are read, an Arrow schema as text.
        most: the most snapshots of a micro-batch; None for all.
    """

    def __init__(self, table: str, catalog: str | Mapping[str, str], schema: str, most: int | None) -> None:
        self._name, self._catalog, self._schema, self._most = table, catalog, schema, most
        self._target: int | None = None

    def initialOffset(self) -> SnapshotOffset:
        """The offset before the first snapshot, where a new query begins."""
        return {"snapshot": None, "table": str(self._table().metadata.table_uuid)}

    def latestOffset(self, start: SnapshotOffset, limit: ReadLimit) -> SnapshotOffset:
        """The offset of the last snapshot of the next micro-batch.

        Raises:
            BadInputError: the snapshot that was read last is gone, rows were changed, or the table is another one.
        """
        after = self._after(self._table(), start["snapshot"], self._target, start)
        if isinstance(limit, ReadMaxFiles):
            after = after[: limit.max_files]
        return {**start, "snapshot": after[-1].snapshot_id} if after else start

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of a micro-batch that ``maxFilesPerTrigger`` sets: snapshots."""
        return ReadAllAvailable() if self._most is None else ReadMaxFiles(self._most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Leaves snapshots that come later to the next run."""
        snapshot = self._table().current_snapshot()
        self._target = None if snapshot is None else snapshot.snapshot_id

    def partitions(self, start: SnapshotOffset, end: SnapshotOffset) -> Sequence[InputPartition]:
        """One input partition for each file of the snapshots between two offsets.

        Raises:
            BadInputError: as `latestOffset`.
        """
        table, found = self._table(), list[InputPartition]()
        if end["snapshot"] is not None:
            self._after(table, start["snapshot"], end["snapshot"], start)  # what is gone is an error
            files = _files(table, start["snapshot"], end["snapshot"])
            found = [InputPartition((start["snapshot"], end["snapshot"], path)) for path in files]
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields a file's rows."""
        from pyiceberg.expressions import AlwaysTrue  # noqa: PLC0415 - optional
        from pyiceberg.io.pyarrow import ArrowScan  # noqa: PLC0415

        start, end, path = partition.value
        table = self._table()
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self._schema)))
        names = {field.name: names_within(part_of(field)) for field in table.schema().as_arrow()}
        log_new_columns(self._name, "the Iceberg table", schema, names)
        gone = next((name for name in schema.names if name not in names), None)
        if gone is not None:
            problem = (
                f"it was dropped or renamed while the query runs; there are {', '.join(names)}. Start the query again, "
                "without it"
            )
            raise BadInputError(self._name, gone, problem)
        columns = table.schema().select(*schema.names)
        task = _files(table, start, end)[path]
        try:
            rows = ArrowScan(table.metadata, table.io, columns, AlwaysTrue()).to_table([task])
            yield from cast_columns(rows.select(schema.names), schema).to_batches()
        except WrongError as error:
            raise BadInputError(self._name, error.column, f"{path}: {error}", error.sample) from error
        except (pa.ArrowException, ValueError, NotImplementedError) as error:
            raise BadInputError(self._name, None, f"{path} cannot be read by pyiceberg: {error}") from error

    def _table(self) -> Any:
        return _opened(self._name, self._catalog)

    def _after(self, table: Any, first: int | None, last: int | None, offset: SnapshotOffset) -> list[Any]:
        """The snapshots behind one, up to another or the current one, in their order; all of them append.

        Raises:
            BadInputError: one changes or deletes rows, the first one is gone, or the table is another one.
        """
        uuid = str(table.metadata.table_uuid)
        if offset["table"] != uuid:
            raise self._lost(f"it has another id now, {uuid}, and {offset['table']} before: it was made anew")
        known = {snapshot.snapshot_id: snapshot for snapshot in table.snapshots()}
        current = table.current_snapshot()
        at = last if last is not None else current and current.snapshot_id
        if first is None:  # all of the table is read as it is then
            return [known[at]] if at is not None else []
        found = list[Any]()
        while at != first:
            if at not in known:
                raise self._lost(f"snapshot {first}, which was read last, has expired, or the table was rolled back")
            found.append(known[at])
            at = known[at].parent_snapshot_id
        found.reverse()
        for snapshot in found:
            operation = "append" if snapshot.summary is None else snapshot.summary.operation.value
            if operation not in ("append", _SAME_ROWS):
                problem = (
                    f"is read as a stream of appended rows, and snapshot {snapshot.snapshot_id} changes or deletes some"
                )
                raise BadInputError(self._name, None, problem, operation)
        return found

    def _lost(self, why: str) -> BadInputError:
        advice = "Begin anew, with another checkpointLocation and state"
        return BadInputError(self._name, None, f"the Iceberg table does not go on where it was read: {why}. {advice}")


def _opened(name: str, properties: str | Mapping[str, str]) -> Any:
    """The table as it is now.

    Raises:
        DescriptionError: there is none.
    """
    catalog = catalog_of(properties, "read_iceberg()")
    try:
        return catalog.load_table(name)
    except Exception as error:
        if type(error).__name__ not in ("NoSuchTableError", "NoSuchNamespaceError"):
            raise
        raise DescriptionError(f"there is no Iceberg table {name}: {error}") from error


def _files(table: Any, start: int | None, end: int) -> dict[str, Any]:
    """The tasks that read the files of the snapshots between two, by the files' paths, in the snapshots' order."""
    scan = (
        table.scan(snapshot_id=end)
        if start is None
        else table.incremental_append_scan(from_snapshot_id_exclusive=start, to_snapshot_id_inclusive=end)
    )
    return {task.file.file_path: task for task in scan.plan_files()}
