"""Streaming joins over all files of a folder, once: what the fault tests run, kill and run again.

python -m tests.faults.job regular|by_time|tables|chains|ends DATA WORK
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_ops
import gpu_ops.spark
from gpu_ops.state import blocks
from tests.faults import by_time, chains, ends, folded, tables

Made = tuple[dict[str, Any], dict[str, Callable[[], bool]]]
"""Changelogs by their names; and those that do not end with their files, but when something is true."""


def regular(spark: Any, data: Path, state: Path) -> Made:
    """A left join.

    A driver that is killed between its note of a source's files and that of the micro-batch has the next one take more
    files, of which Spark's own reader reads the largest first: what they change has to be in order.
    """
    sides = []
    for name, schema in folded.ORDERS_PRICES.items():
        df = gpu_ops.read_files(spark, str(data / name), "csv", schema, maxFilesPerTrigger=1)
        sides.append(gpu_ops.stream(df, name=name, row_kind="op", unique_key="order_id", updates="retract"))
    left = gpu_ops.join(*sides, on="order_id", how="left", state=str(state / "left"), emit="per_event", partitions=2)
    return {"left": left}, {}


MADE = {
    "regular": regular, "by_time": by_time.joins, "tables": tables.queries, "chains": chains.queries,
    "ends": ends.queries,
}  # fmt: skip


def main(kind: str, data: Path, work: Path) -> None:
    """Resume from whatever an earlier run left, and go on to the end; what is left then is in ``rest``."""
    tasks = os.environ.get("GPU_JOIN_TASKS")
    if tasks is not None:  # which take shares of small answers, too
        blocks.LEAST_BYTES = 700
    spark = gpu_ops.spark.session(
        "fault test",
        master="local[2,4]",
        config={
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.files.maxPartitionBytes": "1g",
            "spark.sql.files.openCostInBytes": "1g",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.streaming.noDataProgressEventInterval": "500",
            "spark.gpu_ops.server.patience": "5s",
            **({} if tasks is None else {"spark.gpu_ops.tasks": tasks}),
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    (work / "state").mkdir(exist_ok=True)
    made, until = MADE[kind](spark, data, work / "state")
    queries = {
        name: changes.writeStream.format("parquet")
        .option("checkpointLocation", str(work / "checkpoint" / name))
        .option("path", str(work / "sink" / name))
        .trigger(**{"processingTime": "0 seconds"} if name in until else {"availableNow": True})
        .start()
        for name, changes in made.items()
    }
    (work / "started").touch()
    for name, query in queries.items():
        if name in until:
            while not until[name]() and query.isActive:
                time.sleep(0.1)
            query.processAllAvailable()
            query.stop()
        query.awaitTermination()
    for state in (
        (work / "state").iterdir() if kind not in ("tables", "chains") else ()
    ):  # none of those waits for the end
        gpu_ops.finish(spark, state=str(state)).write.mode("overwrite").parquet(str(work / "rest" / state.name))
    spark.stop()
    print("DONE", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
