"""The TPC-H join as a Spark streaming query that is stopped half-way and resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlparse

import gpu_ops
from gpu_ops.backends import Backend
from gpu_ops.demo.check import ROW_KIND
from gpu_ops.spark import join_progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from gpu_ops.demo.tpch import Changes
    from gpu_ops.spark.metrics.progress import JoinProgress

JOIN: Final = "orders_lineitem"
"""The join's name in ``query.lastProgress["observedMetrics"]``."""

_POLL_S: Final = 0.2


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where a query keeps what."""

    root: Path

    @property
    def changelog(self) -> Path:
        """Parquet files, written by Spark."""
        return self.root / "changelog"

    @property
    def state(self) -> Path:
        """The join's state."""
        return self.root / "state"

    @property
    def checkpoint(self) -> Path:
        """Spark's offsets and commits."""
        return self.root / "checkpoint"


def read_changes(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of the Parquet files in a folder, one for each micro-batch."""
    schema = spark.read.parquet(str(folder)).schema
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def start(
    spark: SparkSession, orders: Changes, lineitem: Changes, folders: Folders, *, backend: Backend
) -> StreamingQuery:
    """Starts, or resumes, ``orders LEFT JOIN lineitem ON o_orderkey = l_orderkey``."""
    left, right = (
        gpu_ops.stream(
            read_changes(spark, changes.folder),
            unique_key=changes.unique_key,
            row_kind=ROW_KIND,
            updates="retract",
            name=changes.table,
        )
        for changes in (orders, lineitem)
    )
    changelog = gpu_ops.join(
        left,
        right,
        on=[("o_orderkey", "l_orderkey")],
        how="left",
        state=str(folders.state),
        backend=backend,
        name=JOIN,
    )
    writer = changelog.writeStream.format("parquet").option("path", str(folders.changelog))
    writer = writer.option("checkpointLocation", str(folders.checkpoint))
    return writer.trigger(availableNow=True).start()


def follow(
    query: StreamingQuery,
    on_progress: Callable[[JoinProgress], object] = lambda _: None,
    *,
    until: int | None = None,
) -> None:
    """Waits until a query has read everything, or has done a certain micro-batch; then it is stopped.

    Args:
        query: the query; its errors are raised here.
        on_progress: called when a micro-batch is done; one may be passed over when the next is done as well.
        until: the number of that micro-batch, from 0, or None.
    """
    seen, done = -1, False
    try:
        while not done:
            done = query.awaitTermination(_POLL_S)
            progress: Any = query.lastProgress
            for entry in join_progress(progress) if progress is not None else ():
                if entry.batch_id > seen:
                    seen = entry.batch_id
                    on_progress(entry)
            done = done or (until is not None and seen >= until)
    finally:
        query.stop()


def written(spark: SparkSession, folders: Folders) -> list[str]:
    """The changelog's files: those that Spark's sink has committed, not whatever lies in the folder."""
    # inputFiles() goes by the sink's log, _spark_metadata, which names no file of a micro-batch cut short.
    uris = spark.read.parquet(str(folders.changelog)).inputFiles()
    return [unquote(urlparse(uri).path) for uri in uris]
