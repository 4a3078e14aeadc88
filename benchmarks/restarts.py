"""A state of 20M rows through Spark: what snapshots cost its micro-batches, and how soon it goes on after a kill.

A left join with durable state on two partitions, read as Parquet by `gpu_ops.read_files`, is given all rows, and then
small micro-batches, half of each from either input; those that wrote to a snapshot are compared with the others. Then
state servers are killed: what that costs is how long the next micro-batch takes. Then the whole application is killed
and started again, as often: how long it takes from its start to the end of the first micro-batch, and of that from
when its session is up; beside it, the same of an application without state. The rows of the result are counted at
the end.

    python -m benchmarks.restarts [--rows 15000000] [--batch 20000] [--batches 200] [--kills 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.at_length import SCHEMAS, Memory
from benchmarks.common import arguments, next_event, ratio, record, summarise

_LOAD = 1_000_000
_OF = "GPU_JOIN_RESTARTS_OF"
"""An environment variable that the processes of the application have."""


def write(folder: Path, number: int, keys: npt.NDArray[np.int64]) -> int:
    """A micro-batch: a row of each key on both sides; how many bytes these are in Arrow."""
    nbytes = 0
    for side in SCHEMAS:
        (folder / side).mkdir(exist_ok=True)
        text = pa.array([f"{side} {key:012d}" for key in keys.tolist()])
        column = "a" if side == "left" else "b"
        table = pa.table({"k": keys, column: keys.astype(np.int64 if side == "left" else np.float64), "t": text})
        nbytes += table.nbytes
        pq.write_table(table, folder / f"{side}.new")
        os.utime(folder / f"{side}.new", (1.7e9 + number, 1.7e9 + number))  # Spark takes files by their times
    for side in SCHEMAS:
        (folder / f"{side}.new").rename(folder / side / f"{number:06d}.parquet")
    return nbytes


def serve(folder: Path) -> None:
    """The application: it says on standard output what each micro-batch took, until it is killed."""
    from pyspark.sql.streaming import StreamingQueryListener

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

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark calls it so
            pass

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            found = join_progress(event.progress)
            if not found:
                return
            numbers = found[0].metrics
            came = numbers["rows_out_insert"] + numbers["rows_out_update_after"]
            gone = numbers["rows_out_delete"] + numbers["rows_out_update_before"]
            say(
                event="batch",
                batch=found[0].batch_id,
                seconds=(found[0].trigger_ms or 0) / 1e3,
                rows=sum(int(n) for name, n in numbers.items() if name.endswith("_rows_in")),
                result=came - gone,
                snapshot_bytes=numbers.get("snapshot_written_bytes", 0),
                state_bytes=sum(n for name, n in numbers.items() if name.endswith("_state_bytes")),
            )

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            pass

    spark.streams.addListener(Listener())
    writer = joined.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(processingTime="0 seconds").start().awaitTermination()


class Application:
    """The application in a process of its own.

    Args:
        folder: its inputs, state and checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.started = time.time()
        command = [sys.executable, "-m", "benchmarks.restarts", "--serve", str(folder)]
        environment = os.environ | {_OF: str(os.getpid())}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment)
        self.session = next_event(self._process, "session")["at"]

    def batches(self, rows: int) -> list[dict[str, Any]]:
        """The next micro-batches, until so many rows have come."""
        found, came = list[dict[str, Any]](), 0
        while came < rows:
            found.append(next_event(self._process, "batch"))
            came += found[-1]["rows"]
        return found

    def kill(self, servers: int | None = None) -> None:
        """SIGKILL to so many of its state servers, or to all of its processes."""
        own = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if f"{_OF}={os.getpid()}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    own[int(entry.name)] = (entry / "cmdline").read_bytes()
        chosen = [pid for pid, line in own.items() if servers is None or b"gpu_ops.spark.server.server" in line]
        for pid in chosen[:servers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if servers is None:
            self._process.wait()


def main() -> None:
    """Runs the benchmark, prints and records its results."""
    parser = arguments(__doc__, "restarts")
    parser.add_argument("--rows", type=int, default=15_000_000, help="that are there before, both inputs together")
    parser.add_argument("--batch", type=int, default=20_000, help="rows in a micro-batch")
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


def first_start(folder: Path, rows: int) -> float:
    """Seconds from when the session of an application without state is up to the end of its first micro-batch."""
    folder.mkdir()
    write(folder, 0, np.arange(rows // 2))
    application = Application(folder)
    done = application.batches(rows)[-1]["at"]
    application.kill()
    return float(done - application.session)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all restarts."""
    number, first = 0, 0

    def more(rows: int) -> int:
        nonlocal number, first
        keys = np.arange(first, first + rows // 2)
        first, number = first + keys.size, number + 1
        return write(folder, number, np.random.default_rng(number).permutation(keys))

    for _ in range(options.rows // _LOAD):
        more(_LOAD)
    application, said = Application(folder), list[dict[str, Any]]()
    said += application.batches(options.rows // _LOAD * _LOAD)

    def one() -> dict[str, Any]:
        """A micro-batch, or two where Spark saw the one input's file before the other's."""
        nbytes, began = more(options.batch), time.time()
        own = application.batches(options.batch)
        said.extend(own)
        both = {name: sum(batch[name] for batch in own) for name in ("seconds", "snapshot_bytes")}
        return {**own[-1], **both, "waited": own[-1]["at"] - began, "nbytes": nbytes}

    for _ in range(options.batches // 4):  # what the load has left to be written
        one()
    with Memory() as memory:
        steady = [one() for _ in range(options.batches)]
    seconds = [batch["seconds"] for batch in steady]
    with_snapshot = [batch["seconds"] for batch in steady if batch["snapshot_bytes"]]
    without = [batch["seconds"] for batch in steady if not batch["snapshot_bytes"]]
    changes, written = (sum(batch[name] for batch in steady) for name in ("nbytes", "snapshot_bytes"))
    print(summarise(seconds), len(with_snapshot), "with a snapshot", file=sys.stderr, flush=True)
    after_server, after_start, after_session, with_nothing = [], [], [], []
    for _ in range(options.kills):
        application.kill(servers=1)
        after_server.append(one()["waited"])
        one()
    for _ in range(options.kills):
        application.kill()
        with_nothing.append(first_start(folder / f"without_state_{len(with_nothing)}", options.batch))
        application = Application(folder)
        done = one()["at"]
        after_start.append(done - application.started)
        after_session.append(done - application.session)
    result = {batch["batch"]: batch["result"] for batch in said}
    application.kill()
    if sum(result.values()) != first:
        raise AssertionError(f"{sum(result.values())} rows in the result, {first} are right")
    return {
        "state_bytes": steady[-1]["state_bytes"],
        "seconds_of_a_micro_batch": summarise(seconds),
        "with_snapshot_over_without": ratio(summarise(with_snapshot), summarise(without)) if with_snapshot else None,
        "slowest_over_median": max(seconds) / summarise(seconds).median,
        "snapshots": len(with_snapshot),
        "bytes_of_changes": changes,
        "snapshot_bytes": written,
        "log_and_snapshots_over_changes": 1 + written / changes,
        "most_memory_of_servers": max(sample["state servers"] for sample in memory.samples),
        "least_memory_of_servers": min(sample["state servers"] for sample in memory.samples),
        "waited_for_a_micro_batch_seconds": summarise(batch["waited"] for batch in steady),
        "after_a_killed_server_seconds": summarise(after_server),
        "after_a_killed_application_seconds": summarise(after_start),
        "of_that_after_the_session_seconds": summarise(after_session),
        "without_state_after_the_session_seconds": summarise(with_nothing),
        "start_over_that_without_state": ratio(summarise(after_session), summarise(with_nothing)),
        "batch_seconds": seconds,
        "batch_snapshot_bytes": [batch["snapshot_bytes"] for batch in steady],
    }


if __name__ == "__main__":
    main()
