"""A view in memory, for notebooks and tests."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from gpu_ops.conditions import backquoted
from gpu_ops.errors import StateError
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.given import refuse_connect
from gpu_ops.spark.sinks.changes import COUNT, net, query_of


class MemoryView:
    """See `memory_view`."""

    def __init__(self, name: str) -> None:
        self.name, self._quoted = name, backquoted(name)
        self._spark = SparkSession.active()
        refuse_connect(self._spark)
        self._rows: DataFrame | None = None
        self._last = ("", -1)
        """The query and its last micro-batch."""

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """What Spark calls for each micro-batch."""
        query, last = self._last
        if query_of(batch) != query:
            query, last, self._rows = query_of(batch), -1, None
        if batch_id <= last:
            batch.write.format("noop").mode("append").save()  # a micro-batch has to be read
            return
        if batch_id > 0 and last < 0:
            raise StateError(
                f"the view {self.name!r} in memory would begin at micro-batch {batch_id}, without what came before: "
                "begin the query anew (checkpoint and state), or keep the view in a table"
            )
        rows = net(batch)
        names = [x for x in rows.columns if x != COUNT]
        if self._rows is not None:
            both = self._rows.unionByName(rows)
            rows = both.groupBy(*map(named_column, names)).agg(f.sum(COUNT).alias(COUNT)).where(f.col(COUNT) != 0)
        self._rows = rows.localCheckpoint()
        copies = f.explode(f.sequence(f.lit(1), f.col(COUNT))).alias(COUNT)
        self._rows.select(*map(named_column, names), copies).drop(COUNT).createOrReplaceGlobalTempView(self._quoted)
        # a micro-batch has a session of its own, whose temporary views no other sees
        self._spark.sql(f"CREATE OR REPLACE TEMP VIEW {self._quoted} AS SELECT * FROM global_temp.{self._quoted}")
        self._last = (query, batch_id)

    @property
    def table(self) -> DataFrame:
        """The current rows."""
        return self._spark.table(f"global_temp.{self._quoted}")


def memory_view(name: str) -> MemoryView:
    """A function for ``foreachBatch`` that keeps the folded changelog as the temporary view ``name``.

    The view is one of the session that is active now, and lives as long as the application. A row that is there
    several times is shown so often; no key is needed.

    Raises:
        StateError: (from ``foreachBatch``) the query has run before, so that its beginning is missing.
    """
    return MemoryView(name)
