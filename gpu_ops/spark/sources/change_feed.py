"""Spark's change feed of a table as an input without options: ``readStream.changes("t")`` (Spark 4.2, SPARK-55668).

A row of it has the table's columns, ``_change_type``, ``_commit_version`` (bigint or text, in whose order commits were
made) and ``_commit_timestamp``, as ``org.apache.spark.sql.connector.catalog.Changelog`` says. The rows of a micro-batch
come in any order, and where a connector rewrites files, rows that stay come as deleted and inserted in one commit. So
the changes of a row, or of a key, go through one task, which puts them in the order of their commits, and within a
commit what goes before what comes: a row that stays cancels itself. The commit's columns say nothing of the row, and a
row that goes is found by all of its columns: so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.descriptions.changelog import RETRACTIONS
from gpu_ops.errors import DescriptionError
from gpu_ops.query.catalyst import items
from gpu_ops.spark.driver.executors import make_importable
from gpu_ops.spark.driver.queries import analyzed
from gpu_ops.spark.tasks.arrow import ArrowTask
from gpu_ops.spark_types import named_column

CHANGE_TYPE: Final = "_change_type"
_VERSION: Final = "_commit_version"
_TIME: Final = "_commit_timestamp"

_RELATIONS: Final = ("StreamingRelationV2", "DataSourceV2Relation")
"""What Spark's plans read a connector's tables by."""

_UNHASHED: Final = (st.MapType, st.ArrayType, st.StructType, st.FloatType, st.DoubleType)
"""Types by which rows are not distributed: Spark hashes no maps, and what is equal to us may have two hashes."""


def is_change_feed(df: DataFrame) -> bool:
    """True if a DataFrame's rows are those of ``changes()``, with their kinds; filtered and projected perhaps.

    Raises:
        DescriptionError: it has the kinds of changes, and not the commits by which they are ordered.
    """
    if CHANGE_TYPE not in df.columns:
        return False
    relations = (x for x in items(analyzed(df).collectLeaves()) if x.getClass().getSimpleName() in _RELATIONS)
    if all(str(relation.table().getClass().getSimpleName()) != "ChangelogTable" for relation in relations):
        return False
    if _VERSION not in df.columns:
        raise DescriptionError(
            f"an input that is made of changes() has {CHANGE_TYPE} and no {_VERSION}, which orders its changes: leave "
            "the column in; or name row_kind= (then the changes are taken in the order in which they come)"
        )
    return True


def in_order_of_commits(df: DataFrame, unique_key: Sequence[str] | None, kept: str | None = None) -> DataFrame:
    """Orders the changes of each row, or key, and leaves the columns of the commit out.

    Args:
        df: the rows of ``changes()``.
        unique_key: the columns of the table's key, if it is known.
        kept: a column of the commit that is needed beside the row.
    """
    spark = df.sparkSession
    make_importable(spark)
    schema = st.StructType([x for x in df.schema.fields if x.name not in (_VERSION, _TIME) or x.name == kept])
    rows = [x for x in schema.fields if x.name not in (CHANGE_TYPE, kept)]
    by = unique_key or [x.name for x in rows if not isinstance(x.dataType, _UNHASHED)]
    tasks = spark.sparkContext.defaultParallelism if by else 1
    together = df.repartition(tasks, *map(named_column, by))
    return together.mapInArrow(_OrderCommits(schema.names), schema)


class _OrderCommits(ArrowTask):
    """Function for ``mapInArrow``: sorts a task's changes by commit, and within one those that take rows back first."""

    __name__ = "gpu_join_order_commits"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the changes of a micro-batch in order."""
        rows = list(batches)
        if not rows:
            return
        table = pa.Table.from_batches(rows)
        kinds = table[CHANGE_TYPE].cast(pa.string())
        comes = pc.invert(pc.is_in(kinds, value_set=pa.array(RETRACTIONS)))
        order = pa.table({"version": table[_VERSION], "comes": comes, "at": np.arange(len(table))})
        places = pc.sort_indices(order, sort_keys=[(name, "ascending") for name in order.column_names])
        yield from table.select(self._names).take(places).combine_chunks().to_batches()
