"""A view in a Delta table, by MERGE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpu_ops.conditions import backquoted
from gpu_ops.spark.sinks.changes import COUNT, Changes, View, view

_TRANSACTION: Final = "spark.databricks.delta.write."
_SOURCE: Final = "gpu_ops_changes"


def delta_view(table: str, key: str | Sequence[str] | None = None) -> View:
    """A function for ``foreachBatch`` that keeps a Delta table equal to the folded changelog.

    Each micro-batch is one MERGE, whose commit stores the query's id and the number of the micro-batch
    (``txnAppId``, ``txnVersion``): Delta skips one that is there already.

    Args:
        table: a table's name, or a path (with a slash). It is created if it is not there; columns of it that the
            changelog lacks are left alone.
        key: columns that identify a row; by default those that are known of the changelog. Without any the table gets
            a column `gpu_ops_count`: how often a row is there.
    """
    path = "/" in table
    name = f"delta.`{table}`" if path else table
    ready: set[str] = set()

    def write(changes: Changes) -> None:
        spark = changes.rows.sparkSession
        if changes.query_id not in ready:
            writer = spark.createDataFrame([], changes.stored()).write.format("delta").mode("ignore")
            if path:
                writer.save(table)
            else:
                writer.saveAsTable(table)
            changes.check(table, spark.table(name).columns)
            ready.add(changes.query_id)
        changes.signed().createOrReplaceTempView(_SOURCE)
        spark.conf.set(_TRANSACTION + "txnAppId", changes.query_id)
        spark.conf.set(_TRANSACTION + "txnVersion", str(changes.batch_id))
        try:
            spark.sql(merge(name, changes))
        finally:
            spark.conf.unset(_TRANSACTION + "txnAppId")
            spark.conf.unset(_TRANSACTION + "txnVersion")

    return view(write, key)


def merge(table: str, changes: Changes) -> str:
    """The MERGE of what `Changes.signed` gives, under the name ``gpu_ops_changes``."""
    names = [*map(backquoted, changes.schema.names)]
    key = [*map(backquoted, changes.key or changes.schema.names)]
    on = " AND ".join(f"t.{x} <=> s.{x}" for x in key)
    total = f"t.{COUNT} + s.{COUNT}"
    gone = f"s.{COUNT} < 0" if changes.key is not None else f"{total} = 0"
    update = [f"{x} = s.{x}" for x in names] if changes.key is not None else [f"{COUNT} = {total}"]
    stored = names if changes.key is not None else [*names, COUNT]
    return (
        f"MERGE INTO {table} t USING {_SOURCE} s ON {on} "
        f"WHEN MATCHED AND {gone} THEN DELETE WHEN MATCHED THEN UPDATE SET {', '.join(update)} "
        f"WHEN NOT MATCHED{f' AND s.{COUNT} > 0' if changes.key is not None else ''} "
        f"THEN INSERT ({', '.join(stored)}) VALUES ({', '.join(f's.{x}' for x in stored)})"
    )
