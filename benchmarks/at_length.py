"""A state of 100M rows through Spark: times of the micro-batches and memory, from nothing to the end.

Two inputs of insertions, every key once on each side in another order, are read as Parquet by
`gpu_ops.read_files` and joined by a left join with durable state, half of each micro-batch from either. The plot has
what a micro-batch took and what the processes held: state servers, Spark's JVM, Python workers and driver.

    python -m benchmarks.at_length [--rows 100000000] [--batch 1000000]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gpu_ops
from benchmarks.common import arguments, plot_path, write_results
from benchmarks.spark_queries import local_session, run

SCHEMAS = {"left": "k bigint, a bigint", "right": "k bigint, b double"}


def write(folder: Path, rows: int, batch: int) -> None:
    """The files of both inputs, one of each in a micro-batch."""
    half, rng = batch // 2, np.random.default_rng(1)
    for side in SCHEMAS:
        (folder / side).mkdir()
        keys = rng.permutation(rows // 2)
        for number, start in enumerate(range(0, keys.size, half)):
            own = keys[start : start + half]
            values = rng.integers(0, 1000, own.size) if side == "left" else rng.random(own.size)
            table = pa.table({"k": own, "a" if side == "left" else "b": values})
            path = folder / side / f"{number:05d}.parquet"
            pq.write_table(table, path)
            os.utime(path, (1.7e9 + number, 1.7e9 + number))  # Spark takes files by their times


class Memory:
    """Resident bytes of this process and all it has started, by what they are, every second."""

    def __init__(self) -> None:
        self.samples: list[Counter[str]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(1):
            self.samples.append(sum((Counter({kind: size}) for kind, size in _processes()), Counter()))


def _processes() -> Iterator[tuple[str, int]]:
    """Kind and proportional resident bytes of this process and those below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended
    below, more = {os.getpid()}, True
    while more:
        found = {pid for pid, parent in parents.items() if parent in below} - below
        below |= found
        more = bool(found)
    for pid in below:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            held = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        size = next((int(line.split()[1]) << 10 for line in held.splitlines() if line.startswith("Pss:")), 0)
        if pid == os.getpid():
            yield "driver", size
        elif "java" in command.split(" ")[0]:
            yield "JVM", size
        else:
            yield ("Python workers" if "pyspark" in command else "state servers"), size


def plot(record: dict[str, Any], target: Path) -> None:
    """Seconds of each micro-batch over the state's rows, and memory over time."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, (times, size) = plt.subplots(2, 1, figsize=(8, 5), layout="constrained")
    seconds = record["batch_seconds"]
    rows = np.arange(1, len(seconds) + 1) * record["rows"] / len(seconds) / 1e6
    times.plot(rows, seconds, ".", label="seconds of a micro-batch")
    times.set_xlabel("rows in state, millions")
    kinds = ("state servers", "JVM", "Python workers", "driver")
    samples = [[sample.get(kind, 0) / 2**30 for sample in record["memory"]] for kind in kinds]
    size.stackplot(range(len(record["memory"])), samples, labels=kinds)
    size.set_xlabel("seconds")
    size.set_ylabel("GiB")
    for axes in (times, size):
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Run, print, record, plot."""
    parser = arguments(__doc__, "at_length")
    parser.add_argument("--rows", type=int, default=100_000_000, help="of both inputs together")
    parser.add_argument("--batch", type=int, default=1_000_000, help="rows in a micro-batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-join-length-") as name:
        folder = Path(name)
        write(folder, options.rows, options.batch)
        with Memory() as memory:
            spark = local_session()
            left, right = (
                gpu_ops.read_files(spark, str(folder / side), "parquet", schema, maxFilesPerTrigger=1)
                for side, schema in SCHEMAS.items()
            )
            joined = gpu_ops.join(left, right, on="k", how="left", state=str(folder / "state"))
            done = run(joined, folder)
            spark.stop()
        stored = sum(path.stat().st_size for path in (folder / "state").rglob("*") if path.is_file())
    rows, seconds = options.rows, done["batch_seconds"]
    if done["folded_rows"] != rows // 2:
        raise AssertionError(f"{done['folded_rows']} rows in the result, {rows // 2} are right")
    quarter = len(seconds) // 4
    results = {
        "rows": rows,
        "seconds": done["seconds"],
        "rows_per_second": rows / done["seconds"],
        "state_bytes_per_row": sum(done["state_bytes"].values()) / rows,
        "stored_bytes_per_row": stored / rows,
        "last_quarter_over_second": statistics.median(seconds[-quarter:])
        / statistics.median(seconds[quarter : 2 * quarter]),
        "most_memory_bytes": max(sum(sample.values()) for sample in memory.samples),
        "batch_seconds": seconds,
        "memory": [dict(sample) for sample in memory.samples],
    }
    settings = {k: v for k, v in vars(options).items() if k != "out"} | {"master": "local[2]"}
    record = write_results(options.out, "at_length", results, settings=settings)
    plot(record["results"], plot_path(options.out))
    json.dump(
        {k: v for k, v in record["results"].items() if k not in ("batch_seconds", "memory")}, sys.stdout, indent=2
    )
    print()


if __name__ == "__main__":
    main()
