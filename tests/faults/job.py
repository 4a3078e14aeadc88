"""A streaming left join over all files of a folder, once: what the fault tests run, kill and run again.

python -m tests.faults.job DATA WORK [delay between micro-batches, seconds]
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_ops
import gpu_ops.spark

SCHEMAS = {
    "orders": "op STRING, order_id BIGINT, customer BIGINT, amount BIGINT, note STRING",
    "prices": "op STRING, order_id BIGINT, price DOUBLE, source STRING",
}


def main(data: Path, work: Path) -> None:
    """Resume from whatever an earlier run left, and go on to the end."""
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
    sides = []
    for name, schema in SCHEMAS.items():
        df = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).csv(str(data / name))
        sides.append(gpu_ops.stream(df, name=name, row_kind="op", unique_key="order_id", updates="retract"))
    changes = gpu_ops.join(*sides, on="order_id", how="left", state=str(work / "state"), emit="per_event", partitions=2)
    query = (
        changes.writeStream.format("parquet")
        .option("checkpointLocation", str(work / "checkpoint"))
        .option("path", str(work / "sink"))
        .trigger(availableNow=True)
        .start()
    )
    (work / "started").touch()
    query.awaitTermination()
    spark.stop()
    print("DONE", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
