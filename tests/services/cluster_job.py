"""A left join over files on a cluster, for `test_clusters`: run by spark-submit, it writes its changes as Parquet.

cluster_job.py FOLDER

FOLDER has `job.json` (the master, settings, what is to happen) and the inputs, `left` and `right`; it gets `state`,
`checkpoint` and `out`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import gpu_ops
from gpu_ops.spark import session

LEFT, RIGHT = "op string, k long, id long", "op string, k long, price double"


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def executor_of(pid: int) -> int | None:
    """The executor that a process descends from."""
    while pid > 1:
        if "CoarseGrainedExecutorBackend" in command(pid):
            return pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
    return None


def servers() -> list[int]:
    """The state servers on executors of this machine."""
    every = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in every if "gpu_ops.spark.serv" in command(pid) and executor_of(pid) is not None]


def lose_an_executor_with_its_server(folder: Path) -> None:
    """Kills an executor and its state server at once, when the first micro-batch has been written."""
    while not any((folder / "checkpoint" / "commits").glob("[0-9]*")):
        time.sleep(0.05)
    server = servers()[0]
    executor = executor_of(server)
    assert executor is not None
    os.kill(executor, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    (folder / "killed.json").write_text(json.dumps([executor, server]))


class Slow:
    """What comes after a join, in its task: the first attempt of a partition lingers, and every attempt is noted."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        assert context is not None
        number = context.partitionId(), context.attemptNumber()
        batch = context.getLocalProperty("streaming.sql.batchId")
        (Path(self.folder) / f"attempt-{batch}-{number[0]}-{number[1]}").touch()
        if number == (0, 0):
            time.sleep(15)


def main(folder: Path) -> None:
    asked: dict[str, Any] = json.loads((folder / "job.json").read_text())
    spark = session("gpu-join cluster job", master=asked["master"], config=asked["settings"], log="WARN")
    inputs = [
        gpu_ops.stream(
            gpu_ops.read_files(spark, str(folder / side), "json", schema, maxFilesPerTrigger=1),
            row_kind="op",
            name=side,
        )
        for side, schema in (("left", LEFT), ("right", RIGHT))
    ]
    changes = gpu_ops.join(*inputs, on="k", how="left", state=f"file://{folder}/state", name="joined")
    if asked.get("speculated"):
        (folder / "attempts").mkdir(exist_ok=True)
        changes = changes.mapInArrow(Slow(str(folder / "attempts")), changes.schema)
    if asked.get("kill"):
        threading.Thread(target=lose_an_executor_with_its_server, args=(folder,), daemon=True).start()
    query = gpu_ops.write_files(changes, str(folder / "out"), checkpoint=str(folder / "checkpoint"), availableNow=True)
    query.awaitTermination()
    (folder / "explained.txt").write_text(gpu_ops.explain(changes) if not asked.get("speculated") else "")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
