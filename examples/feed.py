"""What the Spark examples share: a session, and streams that read folders of JSON files, a file per micro-batch."""

import atexit
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.spark import session

spark = session(master="local[2]", config={"spark.sql.shuffle.partitions": "2", "spark.sql.session.timeZone": "UTC"})
folder = Path(tempfile.mkdtemp(prefix="gpu-join-example-"))
atexit.register(shutil.rmtree, folder, ignore_errors=True)


def stream_of(name: str, schema: str) -> DataFrame:
    """A streaming DataFrame of the files that `arrive` writes."""
    (folder / name).mkdir()
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder / name))


def arrive(name: str, *rows: dict[str, Any]) -> None:
    """Writes one file, complete when Spark first sees it."""
    path = folder / name / f"{len(list((folder / name).iterdir()))}.json"
    hidden = path.with_name("." + path.name)
    hidden.write_text("\n".join(map(json.dumps, rows)))
    hidden.rename(path)
    time.sleep(0.01)  # Spark takes files in the order of their times


def show(rows: DataFrame, number: int | None = None) -> None:
    """Prints rows; given to `foreachBatch`, those of each micro-batch with its number."""
    if number is not None:
        print(f"micro-batch {number}")
    for row in rows.select([f.col(name).cast("string") for name in rows.columns]).collect():
        print("   ", *("null" if value is None else value for value in row))
