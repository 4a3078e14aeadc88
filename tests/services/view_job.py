"""Queries that keep a view each, or one that keeps all, and may kill their own driver, Python and JVM, with SIGKILL.

python -m services.view_job FOLDER MICRO_BATCH MOMENT

FOLDER has `job.json` (see `test_killed_views`). MICRO_BATCH counts this run's from 1, 0 kills none. MOMENT is seconds
after one of the views was called with it, or "written": all views have come back from it, and Spark has committed it
for none. After each micro-batch a view is compared with the rows expected. In a view's folder `begun` gets the
micro-batches that it is called with, in order, `right` those after which it was right, `seconds` what it took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark.support import start
from spark.views import Shop

import gpu_ops
from services.conftest import spark_session
from services.views import made


def killed() -> None:
    """Ends the process group: Python and the JVM that it started."""
    os.killpg(0, signal.SIGKILL)


class Checked:
    """A view that is compared after each micro-batch, and its driver killed in one of them.

    Args:
        folder: of this view.
        view: the function for ``foreachBatch``.
        read: gives the view's rows.
        expected: the rows after each micro-batch.
        kill_at: which micro-batch of this run, from 1.
        seconds: after its begin, or None for when all views are written.
        written: where views wait for each other.
    """

    def __init__(
        self, folder: Path, view: Callable[[Any, int], None], read: Callable[[], list[Any]], expected: list[list[str]],
        *, kill_at: int, seconds: float | None, written: threading.Barrier,
    ) -> None:  # fmt: skip
        self._folder, self._view, self._read, self._expected = folder, view, read, expected
        self._kill_at, self._seconds, self._written = kill_at, seconds, written
        self._seen = 0

    def __call__(self, batch: Any, batch_id: int) -> None:
        self._seen += 1
        self._note("begun", batch_id)
        now = self._seen == self._kill_at
        if now and self._seconds is not None:
            timer = threading.Timer(self._seconds, killed)
            timer.daemon = True
            timer.start()
        begun = time.perf_counter()
        self._view(batch, batch_id)
        self._note("seconds", time.perf_counter() - begun)
        if now and self._seconds is None:
            self._written.wait(timeout=300)
            killed()
        rows = sorted(map(repr, self._read()))
        if rows != self._expected[batch_id]:
            raise AssertionError(f"after micro-batch {batch_id}: {rows}, expected {self._expected[batch_id]}")
        self._note("right", batch_id)

    def _note(self, name: str, value: float) -> None:
        with (self._folder / name).open("a") as file:
            file.write(f"{value}\n")


def main(folder: Path, kill_at: int, moment: str) -> None:
    """Goes on from the checkpoints to the end."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    spark = spark_session(Path(job["jars"]), folder / "warehouse")
    together = job["together"]
    written = threading.Barrier(1 if together else len(job["sinks"]))
    queries, views = [], {}
    for number, sink in enumerate(job["sinks"]):
        own = folder / sink
        own.mkdir(exist_ok=True)
        if together:
            changes = None
        elif job["join"]:
            changes = Shop(
                spark, folder / "shop", job["how"], keyed=job["key"] is not None, state=own / "state"
            ).changes
        else:
            reader = spark.readStream.schema("row_kind STRING, item INT, id BIGINT, quantity INT, price DOUBLE")
            changes = reader.option("maxFilesPerTrigger", 1).json(str(folder / "changes"))
        view, read = made(sink, spark, own, job["key"], f"{job['name']}_{sink}")
        seconds = None if moment == "written" else float(moment)
        # of views of one query, which is called one after the other, one has it killed
        its = kill_at if not together or job["killer"] % len(job["sinks"]) == number else 0
        checked = Checked(own, view, read, job["expected"], kill_at=its, seconds=seconds, written=written)
        if together:
            views[sink] = checked
            continue
        queries.append(start(changes, checked, own / "checkpoint", availableNow=True))
    if together:
        shop = Shop(spark, folder / "shop", job["how"], keyed=job["key"] is not None, state=folder / "state")
        several = gpu_ops.outputs(**dict.fromkeys(job["sinks"], shop.changes))
        queries = [start(several, gpu_ops.sinks.each(**views), folder / "checkpoint", availableNow=True)]
    for query in queries:
        query.awaitTermination()
    print("DONE", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
