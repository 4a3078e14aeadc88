"""kill -9 of state servers, also while they start, workers, driver and JVM, and SIGSTOP of servers, at random points:
the folded sink is as if nothing was.

A server that was stopped goes on after a while, or never. The default run does a few of these; `make soak` does 50
(`GPU_JOIN_KILLS` says how many, `GPU_JOIN_SEED` which ones).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import changes
from tests.faults import by_time, chains, ends, folded, tables

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = {
    "server": "gpu_ops.spark.server.server",
    "worker": "-m gpu_ops.spark.worker_daemon",  # the JVM's own line has it as a setting
    "driver": "tests.faults.job",
    "jvm": "org.apache.spark.deploy.SparkSubmit",
}


STOPPED = "server, stopped"
"""A server that is stopped instead of killed."""


STARTING = "server, while it starts"
"""A server is killed, and the one that takes its place before it listens."""


def everything(started: set[int]) -> dict[int, str]:
    """All processes that belong to a job, also those in sessions of their own."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                if f"GPU_JOIN_FAULT_TEST={os.getpid()}".encode() in environment.split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ProcessLookupError):
                continue
    return {pid: line for pid, line in found.items() if pid not in started}


def send_one(choice: random.Random, target: str, sent: int = signal.SIGKILL) -> int | None:
    """Sends a signal to one process of this kind; its id, or None if there is none."""
    victims = [pid for pid, line in everything({os.getpid()}).items() if PATTERNS[target] in line]
    if sent == signal.SIGSTOP:
        victims = [pid for pid in victims if listens(pid)]
    if not victims:
        return None
    victim = choice.choice(sorted(victims))
    return victim if send(victim, sent) else None


def servers() -> list[int]:
    """The state servers of a job."""
    return [pid for pid, line in everything({os.getpid()}).items() if PATTERNS["server"] in line]


def listens(pid: int) -> bool:
    """Whether a process listens: one that is stopped before is waited for as long as a start may take."""
    try:
        held = {os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return False
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in held for row in rows)


def send(pid: int, sent: int) -> bool:
    """Sends a signal; whether the process was there."""
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        return False
    return True


def run_killing(kind: str, data: Path, work: Path, kills: int, seed: int) -> dict[str, int]:
    """Run the job to its end, killing something now and then; how often what was killed."""
    choice = random.Random(seed)
    done = dict.fromkeys([STOPPED, STARTING, *PATTERNS], 0)
    going_on: dict[int, float] = {}
    environment = os.environ | {"GPU_JOIN_FAULT_TEST": str(os.getpid()), "PYTHONPATH": str(ROOT)}
    log = (work / "log.txt").open("a")
    first = [STARTING, STOPPED]  # also a run of a few kills has one of each
    targets = ["server", STARTING, STOPPED, STOPPED, "worker", "worker", "driver", "jvm"]
    deadline, before = time.monotonic() + 300 + 60 * kills, 0
    while True:
        job = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.job", kind, str(data), str(work)],
            cwd=ROOT, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        # kills before the query starts teach nothing
        started, next_kill, ended = work / "started", None, False
        started.unlink(missing_ok=True)
        known: set[int] | None = None  # the servers there were when the next one was to be killed while it starts
        while job.poll() is None:
            time.sleep(0.01 if known is not None else 0.05)
            if known is not None:
                coming = [pid for pid in servers() if pid not in known]
                if coming and choice.random() < 0.2:
                    before_it_listens = not listens(coming[0])
                    done[STARTING] += send(coming[0], signal.SIGKILL) and before_it_listens
                    known = None if before_it_listens else set(servers())
            assert time.monotonic() < deadline, (work / "log.txt").read_text()[-4000:]
            if next_kill is None and started.exists():
                next_kill = time.monotonic() + choice.random() * 6
            for pid in [pid for pid, at in going_on.items() if time.monotonic() >= at]:
                del going_on[pid]
                send(pid, signal.SIGCONT)
            due = sum(done.values()) < kills and next_kill is not None and time.monotonic() >= next_kill
            if due and (now := committed(work)) > before:  # a kill of what has not begun again teaches nothing either
                before = now
                target = first.pop() if first else choice.choice(targets)
                if target == STOPPED:
                    pid = send_one(choice, "server", signal.SIGSTOP)
                    if pid is None:
                        first.append(target)
                    elif choice.random() < 0.7:
                        going_on[pid] = time.monotonic() + choice.random() * 15
                else:
                    if target == STARTING:
                        known = set(servers())
                    pid = send_one(choice, "server" if target == STARTING else target)
                    ended = ended or (pid is not None and target in ("driver", "jvm"))
                done["server" if target == STARTING else target] += pid is not None
                next_kill = time.monotonic() + choice.random() * 5
        for pid, line in everything({os.getpid()}).items():
            if PATTERNS["server"] in line:
                send(pid, signal.SIGCONT)  # a stopped one cannot notice that its driver is gone
        going_on.clear()
        # what the killed driver or JVM left behind ends by itself; do not run into it
        until = time.monotonic() + 30
        while everything({os.getpid()}) and time.monotonic() < until:
            time.sleep(0.1)
        left = everything({os.getpid()})
        assert not any(PATTERNS["server"] in line for line in left.values()), f"state servers outlive: {left}"
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if job.returncode == 0:
            log.close()
            return done
        assert ended, f"the query failed by itself:\n{(work / 'log.txt').read_text()[-4000:]}"


def committed(work: Path) -> int:
    """Micro-batches that are done, of all queries."""
    return sum(1 for _ in work.glob("checkpoint/*/commits/[0-9]*"))


def files_of(work: Path, name: str) -> list[str]:
    """What a join has put out: the files that its sink has committed, and what was left at the end."""
    return [*committed_files(work / "sink" / name), *map(str, (work / "rest" / name).glob("*.parquet"))]


def committed_files(sink: Path) -> list[str]:
    """The data files that Spark's file sink has committed: those its metadata log lists, each once."""
    files: dict[str, None] = {}
    log = sink / "_spark_metadata"
    for entry in sorted(log.iterdir()):
        if entry.name.startswith("."):
            continue
        lines = entry.read_text().splitlines()[1:]
        files |= {json.loads(line)["path"].removeprefix("file://"): None for line in lines}
    return list(files)


def check_regular(data: Path, work: Path) -> None:
    """The folded sink equals DuckDB's left join of the folded inputs."""
    given = {}
    for name, schema in folded.ORDERS_PRICES.items():
        columns = dict(column.split() for column in schema.replace("STRING", "VARCHAR").split(", "))
        given[name] = f"read_csv('{data}/{name}/*.csv', header=false, columns={columns})"
    count, _ = folded.compare_left_join(given, files_of(work, "left"))
    assert count > 1000


def checked(kind: Any, *more: str) -> Callable[[Path, Path], None]:
    """What each query of a kind of job comes to, and what else there is."""

    def check(data: Path, work: Path) -> None:
        kind.check(data, work / "checkpoint", {name: files_of(work, name) for name in (*kind.EXPECTED, *more)})

    return check


def write_regular(data: Path, files: int, seed: int) -> None:
    changes.write(changes.generate(20_000, seed=seed), data, files=files)


JOBS = {
    "regular": (write_regular, check_regular),
    "by_time": (by_time.write, checked(by_time)),
    "tables": (tables.write, checked(tables)),
    "chains": (tables.write, checked(chains)),
    "ends": (ends.write, checked(ends, "late")),
}


def kill_test(kind: str, tmp_path: Path, kills: int, files: int, seed: int) -> Counter[str]:
    data, work = tmp_path / "data", tmp_path / "work"
    work.mkdir()
    write, check = JOBS[kind]
    write(data, files, seed)
    done = run_killing(kind, data, work, kills, seed)
    print(f"killed: {done}")
    assert done[STOPPED], "no server was stopped"
    check(data, work)
    return Counter(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kills", "files"),
    [("regular", 3, 8), ("by_time", 2, 6), ("tables", 2, 4), ("chains", 2, 4), ("ends", 2, 4)],
)
def test_a_few_kills(kind, kills, files, tmp_path):
    kill_test(kind, tmp_path, kills, files, seed=11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", JOBS)
def test_many_kills(kind, tmp_path):
    total, seed = int(os.environ.get("GPU_JOIN_KILLS", "50")), int(os.environ.get("GPU_JOIN_SEED", "100"))
    done = Counter[str]()
    for part in range(0, total, 10):
        folder = tmp_path / str(part)
        folder.mkdir()
        done.update(kill_test(kind, folder, min(10, total - part), 20, seed=seed + part))
    assert total < 40 or all(done[name] for name in (STOPPED, STARTING, *PATTERNS)), done
