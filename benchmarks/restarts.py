"""A state of 20M rows through Spark: what snapshots cost its micro-batches, and how soon it goes on after a kill.

A left join with durable state on two partitions, read as Parquet by `gpu_ops.read_files`, is given all rows, and then
small micro-batches, half of each from either input; those in which something was written to a snapshot are compared with
the others. Then state servers are killed, and how long the next micro-batch takes is what that costs. Then the whole
application is killed and started again, as often: how long it takes from its start to the end of the first micro-batch,
and of that from the start of the query, when the session is up. The result is counted at the end.

    python -m benchmarks.restarts [--rows 20000000] [--batch 100000] [--batches 200] [--kills 3]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.at_length import SCHEMAS, Memory
from benchmarks.common import arguments, ratio, record, summarise

_LOAD = 1_000_000
_WAIT_S = 600.0


def write(folder: Path, number: int, keys: npt.NDArray[np.int64]) -> int:
    """A micro-batch: a row of each key on both sides; how many rows."""
    for side in SCHEMAS:
        target = folder / side
        target.mkdir(exist_ok=True)
        text = pa.array([f"{side} {key:012d}" for key in keys.tolist()])
        column = "a" if side == "left" else "b"
        table = pa.table({"k": keys, column: keys.astype(np.int64 if side == "left" else np.float64), "t": text})
        pq.write_table(table, folder / f"{side}.new")
        os.utime(folder / f"{side}.new", (1.7e9 + number, 1.7e9 + number))  # Spark takes files by their times
        (folder / f"{side}.new").rename(target / f"{number:06d}.parquet")
    return 2 * keys.size


def serve(folder: Path) -> None:
    """The application: it says on standard output what each micro-batch took, until it is killed."""
    import gpu_ops
    from benchmarks.spark_queries import local_session
    from gpu_ops.spark import join_progress

    def say(**facts: Any) -> None:
        print(json.dumps({"at": time.time(), **facts}), flush=True)

    spark = local_session()
    say(event="session")
    inputs = [
        gpu_ops.read_files(spark, str(folder / side), "parquet", f"{schema}, t string", maxFilesPerTrigger=1)
        for side, schema in SCHEMAS.items()
    ]
    joined = gpu_ops.join(*inputs, on="k", how="left", state=str(folder / "state"), suffixes=("", "_right"))
    # every file is a micro-batch: both sides are written before the marker is
    query = (
        joined.writeStream.format("noop")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    told = -1
    while query.isActive:
        for progress in query.recentProgress:
            found = join_progress(progress)
            if progress["batchId"] > told and found:
                told = progress["batchId"]
                numbers = found[0].metrics
                came = numbers["rows_out_insert"] + numbers["rows_out_update_after"]
                gone = numbers["rows_out_delete"] + numbers["rows_out_update_before"]
                say(
                    event="batch",
                    batch=told,
                    seconds=progress["durationMs"]["triggerExecution"] / 1e3,
                    rows=sum(int(n) for name, n in numbers.items() if name.endswith("_rows_in")),
                    result=came - gone,
                    snapshot_bytes=numbers.get("snapshot_written_bytes", 0),
                    state_bytes=sum(n for name, n in numbers.items() if name.endswith("_state_bytes")),
                )
        time.sleep(0.02)
    query.awaitTermination()


class Application:
    """The application in a process of its own.

    Args:
        folder: its inputs, state and checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.started = time.time()
        command = [sys.executable, "-m", "benchmarks.restarts", "--serve", str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
        self.session = self._next("session")["at"]

    def _next(self, event: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                if found["event"] == event:
                    return found
        raise AssertionError(f"the application ended with {self._process.wait()}")

    def batches(self, rows: int) -> list[dict[str, Any]]:
        """The next micro-batches, until so many rows have come."""
        found, came = list[dict[str, Any]](), 0
        while came < rows:
            found.append(self._next("batch"))
            came += found[-1]["rows"]
        return found

    def servers(self) -> Iterator[int]:
        """The processes of its state servers."""
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if b"gpu_ops.spark.server.server" in entry.read_bytes():
                    yield int(entry.parent.name)
            except OSError:
                continue

    def kill(self) -> None:
        """SIGKILL to it, its JVM and its state servers."""
        children = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        own = [int(x.split()[0]) for x in children.splitlines() if "SparkSubmit" in x]
        for pid in [self._process.pid, *own, *self.servers()]:
            os.kill(pid, signal.SIGKILL)
        self._process.wait()


def main() -> None:
    """Run, print, record."""
    parser = arguments(__doc__, "restarts")
    parser.add_argument("--rows", type=int, default=20_000_000, help="of state, both inputs together")
    parser.add_argument("--batch", type=int, default=100_000, help="rows in a micro-batch")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-join-restarts-") as name:
        results = measured(Path(name), options)
    record(options, "restarts", results, "serve", master="local[2]")


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    number, first = 0, 0

    def more(rows: int) -> int:
        nonlocal number, first
        keys = np.arange(first, first + rows // 2)
        first, number = first + keys.size, number + 1
        return write(folder, number, np.random.default_rng(number).permutation(keys))

    given = sum(more(_LOAD) for _ in range(options.rows // _LOAD))
    application, said = Application(folder), list[dict[str, Any]]()

    def one() -> float:
        """A micro-batch's seconds, from its files to its end."""
        rows, began = more(options.batch), time.time()
        said.extend(application.batches(rows))
        return float(said[-1]["at"] - began)

    said += application.batches(given)
    with Memory() as memory:
        steady = [one() for _ in range(options.batches)]
    last = said[-options.batches :]
    written = sum(batch["snapshot_bytes"] for batch in last)
    seconds = [float(batch["seconds"]) for batch in last]
    with_snapshot = [s for s, batch in zip(seconds, last, strict=True) if batch["snapshot_bytes"]]
    without = [s for s, batch in zip(seconds, last, strict=True) if not batch["snapshot_bytes"]]
    print(f"{summarise(seconds)}, {len(with_snapshot)} with a snapshot", file=sys.stderr, flush=True)
    after_server = []
    for _ in range(options.kills):
        os.kill(next(application.servers()), signal.SIGKILL)
        after_server.append(one())
        one()
    after_start, after_query = [], []
    for _ in range(options.kills):
        application.kill()
        time.sleep(1)
        application = Application(folder)
        one()
        after_start.append(said[-1]["at"] - application.started)
        after_query.append(said[-1]["at"] - application.session)
    result = {batch["batch"]: batch["result"] for batch in said}
    application.kill()
    if sum(result.values()) != first:
        raise AssertionError(f"{sum(result.values())} rows in the result, {first} are right")
    changes = sum(
        path.stat().st_size for side in SCHEMAS for path in sorted((folder / side).iterdir())[-options.batches :]
    )
    return {
        "state_bytes": last[-1]["state_bytes"],
        "seconds_of_a_micro_batch": summarise(seconds),
        "from_files_to_end_seconds": summarise(steady),
        "with_snapshot": ratio(summarise(with_snapshot), summarise(without)) if with_snapshot else None,
        "slowest_over_median": max(seconds) / summarise(seconds).median,
        "snapshots": len(with_snapshot),
        "snapshot_bytes": written,
        "bytes_of_changes_in_parquet": changes,
        "most_memory_of_servers": max(sample["state servers"] for sample in memory.samples),
        "after_a_killed_server_seconds": summarise(after_server),
        "after_a_killed_application_seconds": summarise(after_start),
        "of_that_after_the_session_seconds": summarise(after_query),
        "batch_seconds": seconds,
    }


if __name__ == "__main__":
    main()
