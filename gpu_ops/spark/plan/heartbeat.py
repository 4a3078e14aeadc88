"""Micro-batches on an idle query: a source that has something new at set times and never a row.

Spark begins a micro-batch when some source has a new offset. What the rest of the plan makes of its
rows does not matter: the optimizer takes a branch without rows away, after the offsets were looked at.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as st

if TYPE_CHECKING or importlib.util.find_spec("pyspark.sql.datasource") is not None:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
else:  # before Spark 4 there are no data sources in Python
    DataSource = DataSourceStreamReader = InputPartition = object

NAME = "gpu_ops_heartbeat"


class Beats(DataSourceStreamReader):  # type: ignore[misc]
    """A stream whose offset counts the periods since 1970.

    Args:
        period_ms: milliseconds.
    """

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's interface
        """Where a new query begins."""
        return {"beat": 0}

    def latestOffset(self) -> dict[str, int]:  # noqa: N802
        """The number of the period that is running."""
        return {"beat": time.time_ns() // 1_000_000 // self._period_ms}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
        """One that is empty."""
        del start, end
        return [InputPartition(0)]

    def read(self, partition: Any) -> Any:
        """No row."""
        del partition
        return iter(())


class Heartbeat(DataSource):  # type: ignore[misc]
    """The source of `Beats`; its option ``period_ms`` is their length."""

    @classmethod
    def name(cls) -> str:
        """How it is called in Spark."""
        return NAME

    def schema(self) -> str:
        """One column, of which there is never a value."""
        return "beat bigint"

    def streamReader(self, schema: Any) -> Beats:  # noqa: N802 - Spark's interface
        """The stream."""
        del schema
        return Beats(int(self.options["period_ms"]))


def heartbeats(session: SparkSession, period_ms: int, schema: st.StructType) -> DataFrame:
    """No rows of a schema, and a micro-batch at least so often.

    Spark 3.5 has no sources in Python; its ``rate`` source takes the place, with a beat each second.

    Args:
        session: a Spark session.
        period_ms: milliseconds.
        schema: of the rows that there are none of.
    """
    if DataSource is object:
        beats = session.readStream.format("rate").option("rowsPerSecond", 1).option("numPartitions", 1).load()
    else:
        session.dataSource.register(Heartbeat)
        beats = session.readStream.format(NAME).option("period_ms", period_ms).load()
    return beats.where(f.lit(False)).select(*(f.lit(None).cast(x.dataType).alias(x.name) for x in schema.fields))
