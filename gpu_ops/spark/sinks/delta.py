"""A view in a Delta table, by MERGE."""

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
from gpu_ops.spark.failures import message_in
from gpu_ops.spark.packages import DELTA_SETTINGS, package
from gpu_ops.spark.sinks.changes import COUNT, Changes, View, view

_TRANSACTION: Final = "spark.databricks.delta.write."

_TRIES: Final = 10
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0


def delta_view(table: str, key: str | Sequence[str] | None = None) -> View:
    """A function for ``foreachBatch`` that keeps a Delta table equal to the folded changelog.

    Each micro-batch is one MERGE, whose commit stores the query's id and the number of the micro-batch
    (``txnAppId``, ``txnVersion``): Delta skips one that is there already. Where another writer was faster, so that the
    MERGE does not fit any more, it is repeated, up to ten times within half a minute.

    Args:
        table: a table's name, or a path (with a slash). It is created if it is not there; columns of it that the
            changelog lacks are left alone.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`: how often a row is there.

    Raises:
        NotBuiltError: Delta is not installed in the session that is active; the message says what to install.
        DescriptionError: (from ``foreachBatch``) the table has other columns, or Delta takes none such.
    """
    path = "/" in table
    name = f"delta.{backquoted(table)}" if path else table
    ready: set[str] = set()
    session = SparkSession.getActiveSession()
    if session is not None:
        check_installed(session)

    def write(changes: Changes) -> None:
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
        own: Any = spark._jsparkSession.cloneSession()
        own.conf().set(_TRANSACTION + "txnAppId", changes.query_id)
        own.conf().set(_TRANSACTION + "txnVersion", str(changes.batch_id))
        try:
            _repeated(lambda: own.sql(merge(name, source, changes)))
        finally:
            spark.catalog.dropTempView(source)

    return view(write, key)


def _repeated(run: Callable[[], object]) -> None:
    """Does something until no other writer has come in between; its transaction's version makes it happen once."""
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
    """Whether another writer's commit is why one could not be made: Delta's errors are of one kind of Java's."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    gateway = SparkContext._gateway
    while java is not None and gateway is not None:
        if is_instance_of(gateway, java, "java.util.ConcurrentModificationException"):
            return True
        java = java.getCause()
    return False


def check_installed(spark: SparkSession) -> None:
    """That a session has Delta's jars and settings.

    Raises:
        NotBuiltError: it has not, and what it takes.
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


def merge(table: str, source: str, changes: Changes) -> str:
    """The MERGE of what `Changes.signed` gives, under the name ``source``."""
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
