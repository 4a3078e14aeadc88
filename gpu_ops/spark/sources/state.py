"""The rows of a state folder as a DataFrame: `read_state`, and the Spark data source ``gpu_join_state``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.failures import refuse_connect
from gpu_ops.spark.server.stored_rows import TableAtVersion
from gpu_ops.spark.tasks.engine import ForEachNumber
from gpu_ops.spark_types import spark_type
from gpu_ops.state.address import Location

if TYPE_CHECKING or importlib.util.find_spec("pyspark.sql.datasource") is not None:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
else:  # before Spark 4 there are no data sources in Python
    DataSource = DataSourceReader = InputPartition = object


def read_state(
    spark: SparkSession,
    state: Location,
    *,
    input: str | None = None,  # noqa: A002 - ours
    version: int | None = None,
) -> DataFrame:
    """Reads the rows that a state folder has of one input; its query may run meanwhile.

    Beside the input's columns there are, as far as they are kept:

    - ``_matches`` (bigint): how many rows of the other input match, in joins that keep count of it (Flink's
      ``OuterJoinRecordStateView``); ``_matches_1`` and so on for the steps of a multi-way join;
    - ``_matched`` (boolean): whether any did, in interval joins;
    - ``_written`` (timestamp): when the row was last written, where it has a TTL;
    - ``_row_kind``: with ``emit="at_end"``, which keeps all changes;
    - always ``_partition`` (int) and ``_version`` (bigint).

    Where the input has a column of such a name, ours begins with one underscore more. Other tables of a state, such as
    an aggregate's groups, are read as they are stored.

    On Spark 4 ``spark.read.format("gpu_join_state").option("input", ...).load(state)`` is the same, after
    `gpu_ops.spark.register_state_source`.

    Args:
        spark: the session.
        state: the folder: a path or a URI.
        input: the input's name, as ``gpu-join inspect`` shows it; None where the state has one table.
        version: the number of micro-batches that have been applied, one whose records the folder still has; None for
            the last one that all partitions have. A query may yet repeat its last micro-batch.

    Raises:
        StateError: there is no state folder, it is damaged, or it does not have this version.
        DescriptionError: the state has no such table, or several and none was named.
        NotBuiltError: Spark Connect.

    Example:
        >>> arrive(folder + "/in", {"id": 1, "item": "x"}, {"id": 2, "item": "y"})
        >>> orders = spark.readStream.schema("id INT, item STRING").json(folder + "/in")
        >>> latest = gpu_ops.latest(orders, "id", state=folder + "/state")
        >>> latest.writeStream.format("noop").option("checkpointLocation", folder + "/checkpoint").trigger(
        ...     availableNow=True
        ... ).start().awaitTermination()
        >>> gpu_ops.read_state(spark, folder + "/state").select("id", "item", "_version").orderBy("id").show()
        +---+----+--------+
        | id|item|_version|
        +---+----+--------+
        |  1|   x|       1|
        |  2|   y|       1|
        +---+----+--------+
    """
    refuse_connect(spark)
    make_importable(spark)
    table = TableAtVersion.of(state, input, version)
    parts = spark.range(0, table.partitions, 1, table.partitions)
    return parts.mapInArrow(ForEachNumber("gpu_join_state", table.read), _spark_schema(table))


def register_state_source(spark: SparkSession) -> None:
    """Makes ``spark.read.format("gpu_join_state")`` known to a session; `gpu_ops.read_state` does without.

    Spark then looks for data sources in all Python packages there are, which takes it seconds, once in a session.

    Args:
        spark: the session.

    Raises:
        NotBuiltError: Spark Connect, or Spark 3.5, which has no data sources in Python.

    Example:
        >>> gpu_ops.spark.register_state_source(spark)
    """
    refuse_connect(spark)
    if DataSource is object:
        raise NotBuiltError(f"a data source in Python needs Spark 4, and this is {spark.version}: gpu_ops.read_state()")
    make_importable(spark)
    spark.dataSource.register(StateSource)


def _spark_schema(table: TableAtVersion) -> st.StructType:
    return st.StructType([st.StructField(field.name, spark_type(field.type)) for field in table.schema])


class StateSource(DataSource):  # type: ignore[misc]
    """The Spark data source ``gpu_join_state``; see `read_state`. Options: ``input`` and ``version``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format in Spark."""
        return "gpu_join_state"

    def _table(self) -> TableAtVersion:
        options = dict(self.options)
        state, version = options.pop("path", None), options.pop("version", None)
        name = options.pop("input", None)
        if options:
            raise DescriptionError(f"gpu_join_state has no option {next(iter(options))!r}; there are input and version")
        if state is None:
            raise DescriptionError("gpu_join_state reads a state folder: load(state)")
        if version is not None and not version.isdecimal():
            raise DescriptionError(f"version={version!r} is no number of micro-batches")
        return TableAtVersion.of(state, name, None if version is None else int(version))

    def schema(self) -> st.StructType:
        """The columns of the input, and what stands beside its rows."""
        return _spark_schema(self._table())

    def reader(self, schema: st.StructType) -> _StateReader:
        """Makes the reader of one version."""
        del schema
        return _StateReader(self._table())


class _StateReader(DataSourceReader):  # type: ignore[misc]
    """Reads one version of a table, each partition in a task of its own."""

    def __init__(self, table: TableAtVersion) -> None:
        self._table = table

    def partitions(self) -> Sequence[Any]:
        """The partitions of the state folder."""
        return [InputPartition(number) for number in range(self._table.partitions)]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition."""
        return self._table.read(partition.value)
