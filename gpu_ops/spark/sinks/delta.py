"""A view in a Delta table: a MERGE for each micro-batch, by Delta's jar, or by ``deltalake`` where Spark has none."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from py4j.java_gateway import is_instance_of
from pyspark import SparkContext
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from gpu_ops.conditions import backquoted
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.spark.failures import DELTA_SETTINGS, message_in, package
from gpu_ops.spark.sinks.changes import COUNT, NetChanges, View, view
from gpu_ops.spark.sinks.delta_tables import InterferenceError, ViewTable
from gpu_ops.spark.sinks.files import address_of
from gpu_ops.spark_types import arrow_rows

_TRANSACTION: Final = "spark.databricks.delta.write."

_TRIES: Final = 10
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0


def delta_view(table: str, key: str | Sequence[str] | None = None) -> View:
    """Makes a function for ``foreachBatch`` that keeps a Delta table equal to the folded changelog.

    Each micro-batch is one MERGE, whose commit stores the query's id and the number of the micro-batch
    (``txnAppId``, ``txnVersion``): one that is there already is skipped. Where another writer was faster, so that the
    MERGE does not fit any more, it is repeated, up to ten times within half a minute.

    Spark merges where the session has Delta's jar, else the package ``deltalake`` in the driver, with the same result:
    then ``table`` is a path, and the micro-batch's changed rows have to fit into the driver's memory.

    Args:
        table: a table's name, or a path (with a slash). It is created if it is not there; columns of it that the
            changelog lacks are left alone.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`: the number of times that a row is there.

    Raises:
        NotBuiltError: the session that is active has no Delta, and there is no ``deltalake``, or the table has a name;
            the message says what to install.
        DescriptionError: (from ``foreachBatch``) the table has other columns, or Delta does not take them, or it has
            something that only Delta's jar does.
        DatabaseError: (from ``foreachBatch``, without Delta's jar) the table does not take the rows.

    Example:
        >>> view = gpu_ops.sinks.delta_view("/data/live", key="id")  # doctest: +SKIP
        >>> changes.writeStream.foreachBatch(view).start()  # doctest: +SKIP
    """
    ready: set[str] = set()
    session = SparkSession.getActiveSession()
    if session is not None:
        _opened(session, table)

    def write(changes: NetChanges) -> None:
        by_deltalake = _opened(changes.rows.sparkSession, table)
        first = changes.query_id not in ready
        if first:
            columns = [x.lower() for x in changes.stored().names]
            twice = [x for x in changes.schema.names if columns.count(x.lower()) > 1]
            if twice:
                raise DescriptionError(f"columns of a Delta table differ by more than upper case: {', '.join(twice)}")
        if by_deltalake is None:
            _merge_by_spark(table, changes, first=first)
        else:
            if first:
                repeated(lambda: by_deltalake.create(changes.stored()))
            rows = arrow_rows(changes.signed())
            repeated(lambda: by_deltalake.merge(changes, rows))
        ready.add(changes.query_id)

    return view(write, key)


def _merge_by_spark(table: str, changes: NetChanges, *, first: bool) -> None:
    """Merges a micro-batch by Delta's jar; the first one of a query makes the table."""
    spark, path = changes.rows.sparkSession, "/" in table
    name = f"delta.{backquoted(table)}" if path else table
    if first:
        writer = spark.createDataFrame([], changes.stored()).write.format("delta").mode("ignore")
        try:
            repeated(lambda: writer.save(table) if path else writer.saveAsTable(table))
        except AnalysisException as error:
            raise DescriptionError(f"view {table} cannot be made: {message_in(str(error))}") from error
        changes.check(table, spark.table(name).columns)
    source = f"gpu_ops_changes_{uuid.uuid4().hex}"
    changes.signed().createOrReplaceTempView(source)
    # a session of its own: what else writes in the micro-batch's is no part of this transaction
    session: Any = spark._jsparkSession.cloneSession()
    session.conf().set(_TRANSACTION + "txnAppId", changes.query_id)
    session.conf().set(_TRANSACTION + "txnVersion", str(changes.batch_id))
    try:
        repeated(lambda: session.sql(merge(name, source, changes)))
    finally:
        spark.catalog.dropTempView(source)


def repeated(run: Callable[[], object]) -> None:
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
    """True if a commit failed because of another writer's: all such errors of Delta's jar are of one Java class."""
    if isinstance(error, InterferenceError):
        return True
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    gateway = SparkContext._gateway
    while java is not None and gateway is not None:
        if is_instance_of(gateway, java, "java.util.ConcurrentModificationException"):
            return True
        java = java.getCause()
    return False


def has_delta(spark: SparkSession) -> bool:
    """True if a session has Delta's jar, or is of a Spark that has Delta built in."""
    return bool(_delta_of(spark))


def _delta_of(spark: SparkSession) -> str:
    """The Java class by which a session reads Delta tables; empty without Delta's jar."""
    jvm: Any = spark.sparkContext._jvm
    try:
        return str(
            jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource(
                "delta", spark._jsparkSession.sessionState().conf()
            ).getName()
        )
    except Exception:  # pyspark's and py4j's, by version
        return ""


def _opened(spark: SparkSession, table: str) -> ViewTable | None:
    """The table as ``deltalake`` opens it; None where the session merges by Delta's jar.

    Raises:
        NotBuiltError: neither can be; the message says what to add.
    """
    source = _delta_of(spark)
    settings = [f"  {name}={value}" for name, value in DELTA_SETTINGS.items()]
    # whoever has Delta built in sets nothing
    if source and not source.startswith("org.apache.spark.sql.delta."):
        return None
    if source:
        if all(value in (spark.conf.get(name, None) or "") for name, value in DELTA_SETTINGS.items()):
            return None
        raise NotBuiltError("\n".join(["delta_view() merges by Delta, whose settings this session lacks:", *settings]))
    jar = package("delta", spark.version)
    lines = f"Delta's jar: none is known for Spark {spark.version}; Spark 4.2 has one"
    if jar is not None:
        lines = "\n".join(["Delta's jar, with which a session starts by", f"  spark.jars.packages={jar}", *settings])
    if "/" not in table:
        raise NotBuiltError(f"delta_view({table!r}): a table is a path here, with a slash; its name takes {lines}")
    try:
        return ViewTable(table, address_of(spark, table))
    except NotBuiltError as error:
        raise NotBuiltError(f"{error}; or {lines}") from error.__cause__


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
