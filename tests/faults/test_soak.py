"""A query that runs for half an hour, its servers killed now and then: memory, folders and open files stay as they are.

Upserts of bounded keys, so that the state is as large at the end as after the beginning: with rows in files between
Spark and servers, a log that keeps these, snapshots in pieces, and state beyond memory on disk. `GPU_JOIN_SOAK_MINUTES`
says how long (30), `GPU_JOIN_SOAK_OUT` where the samples are written.

    python -m pytest tests/faults/test_soak.py -m slow -s
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
KEYS, ROWS, KEPT = 300_000, 25_000, 30
LOGGED_S = 600
"""So long Spark keeps the files of its sources' logs: one of each source for each micro-batch."""
SCHEMAS = {"left": "k bigint, a bigint, at bigint, t string", "right": "k bigint, b bigint, at bigint"}
KINDS = {"gpu_ops.spark.server.server": "servers", "java": "JVM", "daemon": "workers"}
"""By a word of the command line; the JVM's has the workers' as a setting."""
RECENT = "micro-batches of late"


def write(folder: Path, number: int) -> None:
    """A micro-batch: rows of the next keys on both sides, then of random ones; files that were read long ago go."""
    rng = np.random.default_rng(number)
    first = number * ROWS
    keys = np.arange(first, first + ROWS) if first < KEYS else rng.choice(KEYS, ROWS, replace=False)
    at, values = np.full(keys.size, number), rng.integers(0, 1000, keys.size)
    tables = {
        "left": {"k": keys, "a": values, "at": at, "t": [f"order {key:09d} of {number:09d}" for key in keys.tolist()]},
        "right": {"k": rng.permutation(keys), "b": values, "at": at},
    }
    for side, columns in tables.items():
        (folder / side).mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), folder / f"{side}.new")
        os.utime(folder / f"{side}.new", (1.7e9 + number, 1.7e9 + number))
        (folder / f"{side}.new").rename(folder / side / f"{number:06d}.parquet")
        (folder / side / f"{number - KEPT:06d}.parquet").unlink(missing_ok=True)


def serve(folder: Path) -> None:
    """The application; it says on standard output when it has taken what there is, as often as it is asked."""
    from pyspark.errors import StreamingQueryException

    import gpu_ops
    import gpu_ops.spark

    config = {
        "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g", "spark.ui.enabled": "false",
        "spark.local.dir": str(folder / "local"), "spark.gpu_ops.memory.host": "16m",
        "spark.sql.streaming.minBatchesToRetain": "10", "spark.sql.streaming.numRecentProgressUpdates": "10",
        **gpu_ops.spark.recommended_conf(arrow_rows=True),
    }  # fmt: skip
    spark = gpu_ops.spark.session("soak", master="local[2]", config=config)
    sides = [
        gpu_ops.stream(
            gpu_ops.read_files(spark, str(folder / side), "parquet", schema, maxFilesPerTrigger=1),
            name=side, unique_key="k", sequence_by="at",
        )
        for side, schema in SCHEMAS.items()
    ]  # fmt: skip
    joined = gpu_ops.join(*sides, on="k", how="left", state=str(folder / "state"), suffixes=("", "_r"))
    writer = joined.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(processingTime="0 seconds").start()
    print(json.dumps({"started": True}), flush=True)
    for line in sys.stdin:
        try:
            query.processAllAvailable()
        except StreamingQueryException as error:
            sys.exit(gpu_ops.why(error))
        print(json.dumps({"done": int(line)}), flush=True)
    query.stop()
    spark.stop()


def processes(mark: str) -> dict[int, str]:
    """The processes of the application by kind."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                names = [kind for word, kind in KINDS.items() if word in line]
                found[int(entry.name)] = names[0] if names else "driver"
    return found


def size_of(folder: Path) -> tuple[int, int]:
    """Bytes on disk and files below a folder."""
    size = count = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size, count = size + os.lstat(os.path.join(path, name)).st_blocks * 512, count + 1
    return size, count


def sample(folder: Path, mark: str, done: list[float]) -> dict[str, int]:
    """What there is now: memory (PSS, bytes), open files, threads, folders, micro-batches of late (when each was)."""
    found = {RECENT: sum(at > done[-1] - LOGGED_S for at in done)}
    for pid, kind in processes(mark).items():
        with contextlib.suppress(OSError):
            held = Path(f"/proc/{pid}/smaps_rollup").read_text().split()
            numbers = {
                "memory": int(held[held.index("Pss:") + 1]) << 10,
                "files": len(os.listdir(f"/proc/{pid}/fd")),
                "threads": len(os.listdir(f"/proc/{pid}/task")),
            }
            for name, number in numbers.items():
                found[f"{name} of {kind}"] = found.get(f"{name} of {kind}", 0) + number
    for name in ("state", "local", "temporary", "checkpoint"):
        found[f"bytes of {name}"], found[f"files in {name}"] = size_of(folder / name)
    found["bytes of checkpoint"] -= size_of(folder / "checkpoint" / "sources")[0]  # Spark logs all files ever read
    return found


def growth(samples: list[dict[str, int]], name: str) -> tuple[float, float]:
    """A number in the second quarter and in the last: of a folder, which snapshots empty, the most, else the median."""
    values = [x.get(name, 0) for x in samples]
    quarter = len(values) // 4
    of = max if name.startswith(("bytes", "files in")) else statistics.median
    return float(of(values[quarter : 2 * quarter])), float(of(values[-quarter:]))


def check(samples: list[dict[str, int]]) -> list[str]:
    """What has grown: memory by more than a fifth and 30 MiB, folders by a fifth and 4 MiB, others by 10.

    The checkpoint has more files the faster micro-batches come, so that it is held against their number.
    """
    grown, table = [], []
    for name in sorted(set().union(*samples)):
        before, after = growth(samples, name)
        room = 30 << 20 if name.startswith("memory") else 4 << 20 if name.startswith("bytes") else 10
        if name in ("files in checkpoint", RECENT):
            room = 10**9
        if after > 1.2 * before + room:
            grown.append(f"{name}: {before:,.0f}, then {after:,.0f}")
        table.append(f"{name:24} {before:15,.0f} {after:15,.0f}")
    print("\n".join(table))
    # Spark looks which files of its logs are old at every tenth; of ten it keeps what it was to do and has done
    most = max(x["files in checkpoint"] - len(SCHEMAS) * (x[RECENT] + 10) for x in samples)
    return [*grown, f"files in checkpoint: {most} beside those of its sources"] if most > 40 else grown


def compare(folder: Path) -> None:
    """The state has a row of each key, on both sides."""
    from gpu_ops.spark.server.inspection import read_partition
    from gpu_ops.state.files import Files
    from gpu_ops.state.manifest import Manifest

    files = Files.at(str(folder / "state"))
    held = [read_partition(files, Manifest.of(files), partition, rows=True) for partition in range(2)]
    assert [sum(x.rows[side] for x in held if x.rows is not None) for side in (0, 1)] == [KEYS, KEYS]


def test_memory_folders_and_open_files_stay_as_they_are(tmp_path: Path) -> None:
    minutes = float(os.environ.get("GPU_JOIN_SOAK_MINUTES", "30"))
    choice, samples, mark = random.Random(5), list[dict[str, int]](), f"GPU_JOIN_SOAK={os.getpid()}"
    for name in ("temporary", "local"):
        (tmp_path / name).mkdir()
    environment = os.environ | {
        "GPU_JOIN_SOAK": str(os.getpid()), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary"),
    }  # fmt: skip
    write(tmp_path, 0)
    number, kills, done = 0, 0, list[float]()
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "tests.faults.test_soak", str(tmp_path)]
        application = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert application.stdin is not None
        assert application.stdout is not None
        told: Any = application.stdout.readline()
        assert json.loads(told or "{}").get("started"), (tmp_path / "log").read_text()[-3000:]
        loaded, begun = KEYS // ROWS + 4, time.monotonic()
        while number < loaded or time.monotonic() < begun + 60 * minutes:
            number += 1
            write(tmp_path, number)
            application.stdin.write(f"{number}\n")
            application.stdin.flush()
            if number % 12 == 6:
                servers = [pid for pid, kind in processes(mark).items() if kind == "servers"]
                os.kill(choice.choice(sorted(servers)), signal.SIGKILL)
                kills += 1
            told = application.stdout.readline()
            assert told, (tmp_path / "log").read_text()[-3000:]
            done.append(time.monotonic())
            if number <= loaded:
                begun = time.monotonic()
            elif number % 3 == 0:  # none is starting
                samples.append(sample(tmp_path, mark, done))
        application.stdin.close()
        with application.stdout:
            assert application.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    print(f"{number} micro-batches, {kills} servers killed, {len(samples)} samples")
    out = os.environ.get("GPU_JOIN_SOAK_OUT")
    if out is not None:
        Path(out).write_text(json.dumps(samples))
    assert not check(samples)
    assert list((tmp_path / "temporary").glob("gpu-join-*")) == []
    assert list((tmp_path / "local").glob("gpu-join-*")) == []
    compare(tmp_path)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
