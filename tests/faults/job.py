"""Streaming joins over all files of a folder, once: what the fault tests run, kill and run again.

python -m tests.faults.job regular|by_time DATA WORK
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gpu_ops
import gpu_ops.spark
from tests.faults import by_time

SCHEMAS = {
    "orders": "op STRING, order_id BIGINT, customer BIGINT, amount BIGINT, note STRING",
    "prices": "op STRING, order_id BIGINT, price DOUBLE, source STRING",
}


def regular(spark: Any, data: Path, state: Path) -> dict[str, Any]:
    """A left join, by its name."""
    sides = []
    for name, schema in SCHEMAS.items():
        df = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).csv(str(data / name))
        sides.append(gpu_ops.stream(df, name=name, row_kind="op", unique_key="order_id", updates="retract"))
    left = gpu_ops.join(*sides, on="order_id", how="left", state=str(state / "left"), emit="per_event", partitions=2)
    return {"left": left}


JOINS = {"regular": regular, "by_time": by_time.joins}


def main(kind: str, data: Path, work: Path) -> None:
    """Resume from whatever an earlier run left, and go on to the end; what is left then is in ``rest``."""
    spark = gpu_ops.spark.session(
        "fault test",
        master="local[2,4]",
        config={
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.files.maxPartitionBytes": "1g",
            "spark.sql.files.openCostInBytes": "1g",
            "spark.ui.showConsoleProgress": "false",
            "spark.gpu_ops.server.patience": "5s",
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    queries = [
        changes.writeStream.format("parquet")
        .option("checkpointLocation", str(work / "checkpoint" / name))
        .option("path", str(work / "sink" / name))
        .trigger(availableNow=True)
        .start()
        for name, changes in JOINS[kind](spark, data, work / "state").items()
    ]
    (work / "started").touch()
    for query in queries:
        query.awaitTermination()
    for state in (work / "state").iterdir():
        gpu_ops.finish(spark, state=str(state)).write.mode("overwrite").parquet(str(work / "rest" / state.name))
    spark.stop()
    print("DONE", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
