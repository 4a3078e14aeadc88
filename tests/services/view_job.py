"""A query that keeps a view and may kill its own driver, Python and JVM, with SIGKILL: what the kill tests run.

python -m services.view_job FOLDER MICRO_BATCH MOMENT

FOLDER has `job.json` (see `test_killed_views`). MICRO_BATCH counts this run's from 1, 0 kills none. MOMENT is seconds
after the view was called, or "written": the view has come back and Spark has not committed. After each micro-batch
the view is compared with the rows expected.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from spark.support import drain
from spark.views import Shop

from services.conftest import spark_session
from services.views import made


def killed() -> None:
    """Ends the process group: Python and the JVM that it started."""
    os.killpg(0, signal.SIGKILL)


def main(folder: Path, kill_at: int, moment: str) -> None:
    """Goes on from the checkpoint to the end."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    spark = spark_session(Path(job["jars"]), folder / "warehouse")
    if job["join"]:
        changes = Shop(spark, folder / "shop", job["how"], keyed=job["key"] is not None).changes
    else:
        reader = spark.readStream.schema("row_kind STRING, item INT, id BIGINT, quantity INT, price DOUBLE")
        changes = reader.option("maxFilesPerTrigger", 1).json(str(folder / "changes"))
    view, read = made(job["sink"], spark, folder, job["key"], job["name"])
    seen = 0

    def checked(batch: Any, batch_id: int) -> None:
        nonlocal seen
        seen += 1
        if seen == kill_at and moment != "written":
            timer = threading.Timer(float(moment), killed)
            timer.daemon = True
            timer.start()
        begun = time.perf_counter()
        view(batch, batch_id)
        with (folder / "seconds").open("a") as file:
            file.write(f"{time.perf_counter() - begun}\n")
        if seen == kill_at and moment == "written":
            killed()
        rows = sorted(map(repr, read()))
        if rows != job["expected"][batch_id]:
            raise AssertionError(f"after micro-batch {batch_id}: {rows}, expected {job['expected'][batch_id]}")
        (folder / "right").open("a").write(f"{batch_id}\n")

    drain(changes, checked, folder / "checkpoint")
    print("DONE", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
