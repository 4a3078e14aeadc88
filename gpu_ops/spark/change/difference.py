"""What a sink gets when its query is changed: the difference between two results, in one micro-batch."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.spark.sinks.changes import COUNT, View, net
from gpu_ops.spark_types import named_column


def write_to_sink(write: View, difference: DataFrame, query_id: str, number: int) -> None:
    """Gives a sink rows as a micro-batch of a query."""
    context, name = difference.sparkSession.sparkContext, "sql.streaming.queryId"
    before = context.getLocalProperty(name)
    context.setLocalProperty(name, query_id)
    try:
        write(difference, number)
    finally:
        context.setLocalProperty(name, before)


def net_changes(schema: st.StructType, new: DataFrame, old: DataFrame | None) -> DataFrame:
    """The difference between two results as a changelog, what goes first.

    Args:
        schema: of the changelog.
        new: a changelog, or a result with row kind ``+I``.
        old: a result; columns that it lacks are null. None for no rows.
    """
    rows = new.select(*(named_column(x.name).cast(x.dataType).alias(x.name) for x in schema))
    if old is not None:
        there = {name.lower(): name for name in old.columns}
        kept = [f.lit("-D").alias(ROW_KIND_COLUMN)]
        for field in schema.fields[1:]:
            name = there.get(field.name.lower())
            value = f.lit(None) if name is None else named_column(name)
            kept.append(value.cast(field.dataType).alias(field.name))
        rows = rows.unionAll(old.select(*kept))
    counted = net(rows, exact=True)
    names = [x for x in counted.columns if x != COUNT]
    kind = f.when(f.col(COUNT) < 0, "-D").otherwise("+I").alias(ROW_KIND_COLUMN)
    copies = f.explode(f.sequence(f.lit(1), f.abs(f.col(COUNT)))).alias(COUNT)
    changes = counted.select(kind, *map(named_column, names), copies).drop(COUNT)
    return changes.sortWithinPartitions(f.desc(ROW_KIND_COLUMN))


def as_changelog(rows: DataFrame, schema: st.StructType) -> DataFrame:
    """Rows with what is known of a changelog's columns; those without a row kind are insertions."""
    there = {x.name: named_column(x.name) for x in rows.schema}
    there.setdefault(ROW_KIND_COLUMN, f.lit("+I"))
    return rows.select(*(there[x.name].alias(x.name, metadata=x.metadata) for x in schema))
