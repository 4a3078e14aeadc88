"""A change of a query that is killed at any point leaves the old query or the new one, and never a mixture.

What a kill leaves are the folders as they are at that moment. So that many can be had of one process, it is stopped
with all of its children, the folders are copied, and it goes on; later the change goes on from the copy. Each seed ends
with a kill that is one, behind which tasks may still write.

`GPU_JOIN_KILLS` says how many points changes have to go on from.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spark.test_change import PAIRS, Inputs, Table, run

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.thorough]

KILLS = int(os.environ.get("GPU_JOIN_KILLS", "5"))
POINTS = min(KILLS, 20)
"""Points that a change of one history goes on from."""

CHANGES = """
import json, sys
from pathlib import Path
from gpu_ops.spark import session
sys.path.insert(0, "tests")
from spark import test_change as of
from gpu_ops.spark.change import run
run._FILES_AT_ONCE = 1
spark = session("killed", master="local[2]", config={"spark.log.level": "OFF", "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2"})
print("ready", flush=True)
for line in sys.stdin:
    folder, query = json.loads(line)
    folder = Path(folder)
    inputs = of.Inputs.__new__(of.Inputs)
    inputs.sources = {name: of.Source(spark, folder / name, schema) for name, schema in of.SCHEMAS.items()}
    of.change(inputs, query, folder / "old", folder / "new", None, partitions=2)
    print("done", flush=True)
"""


class Changer:
    """A process that changes queries, with a Spark of its own."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self.seconds = 10.0
        """What the last change took that began at its beginning, once it was planned."""

    def begin(self, folder: Path, query: str) -> float:
        """Has a query changed; returns when it has been planned, and the folder of the new one is marked."""
        if self._child is None:
            root = Path(__file__).resolve().parents[2]
            self._child = subprocess.Popen(
                [sys.executable, "-c", CHANGES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
                start_new_session=True,
            )  # fmt: skip
            self._expect("ready")
        assert self._child.stdin is not None
        print(json.dumps([str(folder), query]), file=self._child.stdin, flush=True)
        while not is_changing(folder):
            assert self._child.poll() is None
            time.sleep(0.001)
        return time.monotonic()

    def _expect(self, word: str) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == f"{word}\n"

    def wait(self) -> None:
        self._expect("done")

    def kill(self) -> None:
        if self._child is not None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.communicate()
            self._child = None

    def copy(self, folder: Path, to: Path) -> None:
        """Copies what a kill at this moment would leave of the queries' folders."""
        assert self._child is not None
        while True:
            stopped = list[int]()
            while more := [pid for pid in _family(self._child.pid) if pid not in stopped]:
                for pid in more:
                    _send(pid, signal.SIGSTOP)
                stopped += more
            try:
                if _are_stopped(stopped):
                    _copy(folder, to)
                    return
            finally:
                for pid in reversed(stopped):
                    _send(pid, signal.SIGCONT)


def _send(pid: int, sent: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sent)


def _stat(entry: Path) -> list[str]:
    """The fields behind a process's or thread's name: its state, its parent; none where it is gone."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ProcessLookupError):
        return []


def _family(pid: int) -> list[int]:
    """A process, and all that it and its children have started."""
    parents = {int(one.name): int(stat[1]) for one in Path("/proc").iterdir()
               if one.name.isdigit() and (stat := _stat(one))}  # fmt: skip
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _are_stopped(pids: Sequence[int]) -> bool:
    """Waits until no thread runs; one that waits for a process that it starts, which is stopped, never is."""
    for _ in range(50):
        threads = (one for pid in pids for one in Path("/proc").glob(f"{pid}/task/*"))
        if all(_stat(one)[:1] in (["T"], ["Z"], []) for one in threads):
            return True
        time.sleep(0.01)
    return False


def _copy(folder: Path, to: Path) -> None:
    """Puts the folders of both queries in the place of others."""
    for name in ("old", "new"):
        shutil.rmtree(to / name, ignore_errors=True)
        if (folder / name).exists():
            shutil.copytree(folder / name, to / name)


@pytest.fixture(scope="module")
def changer() -> Iterator[Changer]:
    made = Changer()
    yield made
    made.kill()


def is_changing(folder: Path) -> bool:
    return (folder / "new" / "state" / "changing.json").exists()


def check(spark: Any, folder: Path, inputs: Inputs, new: str) -> None:
    """The new query gives what it gives from scratch: to an empty sink, and when more rows have come."""
    table = Table()
    table(spark.read.parquet(str(folder / "new" / "state" / "change" / "difference" / "0")), 0)
    assert table.rows == inputs.result(new)
    with inputs.more():
        run(inputs, new, folder / "new", table, partitions=2)
        assert table.rows == inputs.result(new)


@pytest.mark.parametrize("seed", range(KILLS // POINTS))
def test_a_change_goes_on_from_any_point(spark: Any, tmp_path: Path, changer: Changer, seed: int) -> None:
    rng, names = random.Random(seed), list(PAIRS)
    old, new = PAIRS[names[seed % len(names)]]
    inputs, table, folder = Inputs(spark, tmp_path, rng), Table(), tmp_path
    for _ in range(3):
        inputs.add()
    run(inputs, old, folder / "old", table, partitions=2)
    start, points, copies = tmp_path / "start", list[Path](), 0
    _copy(folder, start)

    def change_from(point: Path, stops: int) -> None:
        nonlocal copies
        _copy(point, folder)
        if not (folder / "old" / "state" / "changed.json").exists():
            run(inputs, old, folder / "old", table, partitions=2)  # without new rows: it is as it was
            assert table.rows == inputs.result(old)
        begun = changer.begin(folder, new)
        for seconds in sorted(rng.uniform(0, changer.seconds) for _ in range(stops)):
            while is_changing(folder) and time.monotonic() < begun + seconds:
                time.sleep(0.001)
            if not is_changing(folder):
                break
            copies += 1
            points.append(tmp_path / str(copies))
            changer.copy(folder, points[-1])
        changer.wait()
        if point == start:
            changer.seconds = time.monotonic() - begun
        check(spark, folder, inputs, new)

    change_from(start, 0)
    gone_on = 0
    while gone_on < POINTS:
        if not points:  # as long as it takes: a change may end before the first of them
            change_from(start, POINTS)
            continue
        point = points.pop(rng.randrange(len(points)))
        if is_changing(point):
            change_from(point, 1)
            gone_on += 1
    _copy(start, folder)
    changer.begin(folder, new)
    time.sleep(rng.uniform(0, changer.seconds))
    changer.kill()
    if is_changing(folder):
        changer.begin(folder, new)
        changer.wait()
    check(spark, folder, inputs, new)
