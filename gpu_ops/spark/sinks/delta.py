"""Delta tables: a view, by MERGE; files that are a table's rows, by commits that name those of a micro-batch."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
from py4j.java_gateway import is_instance_of
from pyspark import SparkContext
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from gpu_ops.conditions import backquoted
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.spark.failures import DELTA_SETTINGS, message_in, package
from gpu_ops.spark.sinks.changes import COUNT, NetChanges, View, view
from gpu_ops.spark.tasks.file import WrittenFile
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files

_TRANSACTION: Final = "spark.databricks.delta.write."

_TRIES: Final = 10
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0


def delta_view(table: str, key: str | Sequence[str] | None = None) -> View:
    """Makes a function for ``foreachBatch`` that keeps a Delta table equal to the folded changelog.

    Each micro-batch is one MERGE, whose commit stores the query's id and the number of the micro-batch
    (``txnAppId``, ``txnVersion``): Delta skips one that is there already. Where another writer was faster, so that the
    MERGE does not fit any more, it is repeated, up to ten times within half a minute.

    Args:
        table: a table's name, or a path (with a slash). It is created if it is not there; columns of it that the
            changelog lacks are left alone.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`: the number of times that a row is there.

    Raises:
        NotBuiltError: Delta is not installed in the session that is active; the message says what to install.
        DescriptionError: (from ``foreachBatch``) the table has other columns, or Delta does not take them.

    Example:
        >>> view = gpu_ops.sinks.delta_view("/data/live", key="id")  # doctest: +SKIP
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """
    path = "/" in table
    name = f"delta.{backquoted(table)}" if path else table
    ready: set[str] = set()
    session = SparkSession.getActiveSession()
    if session is not None:
        check_installed(session)

    def write(changes: NetChanges) -> None:
        spark = changes.rows.sparkSession
        if changes.query_id not in ready:
            check_installed(spark)
            columns = [x.lower() for x in changes.stored().names]
            twice = [x for x in changes.schema.names if columns.count(x.lower()) > 1]
            if twice:
                raise DescriptionError(f"columns of a Delta table differ by more than upper case: {', '.join(twice)}")
            writer = spark.createDataFrame([], changes.stored()).write.format("delta").mode("ignore")
            try:
                _repeated(lambda: writer.save(table) if path else writer.saveAsTable(table))
            except AnalysisException as error:
                raise DescriptionError(f"view {table} cannot be made: {message_in(str(error))}") from error
            changes.check(table, spark.table(name).columns)
            ready.add(changes.query_id)
        source = f"gpu_ops_changes_{uuid.uuid4().hex}"
        changes.signed().createOrReplaceTempView(source)
        # a session of its own: what else writes in the micro-batch's is no part of this transaction
        session: Any = spark._jsparkSession.cloneSession()
        session.conf().set(_TRANSACTION + "txnAppId", changes.query_id)
        session.conf().set(_TRANSACTION + "txnVersion", str(changes.batch_id))
        try:
            _repeated(lambda: session.sql(merge(name, source, changes)))
        finally:
            spark.catalog.dropTempView(source)

    return view(write, key)


def _repeated(run: Callable[[], object]) -> None:
    """Repeats a transaction until no other writer interferes; the version in it makes it happen once."""
    for tried in range(1, _TRIES + 1):
        try:
            run()
        except Exception as error:  # pyspark's and py4j's, by version
            if tried == _TRIES or not _came_between(error):
                raise
            time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2**tried) * random.uniform(0.5, 1.0))  # noqa: S311
        else:
            return


def _came_between(error: Exception) -> bool:
    """True if a commit failed because of another writer's: all such errors of Delta are of one Java class."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    gateway = SparkContext._gateway
    while java is not None and gateway is not None:
        if is_instance_of(gateway, java, "java.util.ConcurrentModificationException"):
            return True
        java = java.getCause()
    return False


def check_installed(spark: SparkSession) -> None:
    """Checks that a session has Delta's jars and settings.

    Raises:
        NotBuiltError: it has not; the message says what to add.
    """
    jvm: Any = spark.sparkContext._jvm
    try:
        source = jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource(
            "delta", spark._jsparkSession.sessionState().conf()
        ).getName()
    except Exception:  # pyspark's and py4j's, by version
        source = ""
    # whoever has Delta built in sets nothing
    if source and not source.startswith("org.apache.spark.sql.delta."):
        return
    unset = [name for name, value in DELTA_SETTINGS.items() if value not in (spark.conf.get(name, None) or "")]
    if source and not unset:
        return
    lines = [] if source else [f"  spark.jars.packages={package('delta', spark.version)}"]
    lines += [f"  {name}={value}" for name, value in DELTA_SETTINGS.items()]
    raise NotBuiltError("delta_view() merges by Delta, which this session has not; start it with\n" + "\n".join(lines))


def merge(table: str, source: str, changes: NetChanges) -> str:
    """Builds the MERGE of the rows of `NetChanges.signed`, which have the name ``source``."""
    names = [*map(backquoted, changes.schema.names)]
    key = [*map(backquoted, changes.key or changes.schema.names)]
    on = " AND ".join(f"t.{x} <=> s.{x}" for x in key)
    total = f"t.{COUNT} + s.{COUNT}"
    gone = f"s.{COUNT} < 0" if changes.key is not None else f"{total} = 0"
    update = [f"{x} = s.{x}" for x in names] if changes.key is not None else [f"{COUNT} = {total}"]
    stored = names if changes.key is not None else [*names, COUNT]
    return (
        f"MERGE INTO {table} t USING {source} s ON {on} "
        f"WHEN MATCHED AND {gone} THEN DELETE WHEN MATCHED THEN UPDATE SET {', '.join(update)} "
        f"WHEN NOT MATCHED{f' AND s.{COUNT} > 0' if changes.key is not None else ''} "
        f"THEN INSERT ({', '.join(stored)}) VALUES ({', '.join(f's.{x}' for x in stored)})"
    )


class DeltaCommit:
    """Makes a micro-batch's files visible by a commit in Delta's log, which names the query and the micro-batch.

    Args:
        place: the table's folder.
        partition_by: the table's partition columns.
    """

    def __init__(self, place: Files, partition_by: Sequence[str]) -> None:
        try:
            import deltalake  # noqa: PLC0415 - not installed by default
        except ImportError as error:
            raise NotBuiltError("format='delta' needs the package deltalake: pip install 'gpu-join[delta]'") from error
        self._delta, self._partition_by = deltalake, list(partition_by)
        self._location, self._storage = str(place.address), _storage_options(place.address)
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


def _storage_options(address: StateAddress) -> dict[str, str] | None:
    """The options with which ``deltalake`` opens a table: those of an S3 URI, None for a local folder.

    Raises:
        NotBuiltError: the address is neither local nor on S3.
    """
    if address.path is not None:
        return None
    parts = urlsplit(address.secret_uri)
    if parts.scheme != "s3":
        raise NotBuiltError(f"format='delta' writes to local folders and s3://, not to {address}")
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
