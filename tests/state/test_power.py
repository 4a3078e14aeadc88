"""Power losses, processes that die and full disks at random moments: every micro-batch's answer is as if nothing was.

A disk is simulated below the state folder. After a power loss a file that was synced has its content, another has some
of it or none. Of each name in a folder there is what it was when the folder was synced last, or what it is now, so that
renames and deletions are undone, or some of them are.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow_but

from gpu_ops.errors import StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server import recovery
from gpu_ops.state.files import Files
from state.test_rescale import CASES, Partitions, counted

pytestmark = pytest.mark.thorough


class PowerLossError(BaseException):
    """Nothing is done any more."""


class Disk:
    """What is durable below a folder, and when the next fault comes.

    Args:
        folder: the folder.
        rng: what is left to chance.
    """

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.folder, self._rng = folder, rng
        self._contents: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}
        self._left: int | None = None
        self._error: Callable[[], BaseException] = PowerLossError
        self.faults = 0

    def fail_after(self, calls: int | None, error: Callable[[], BaseException] = PowerLossError) -> None:
        """The next fault comes after so many calls; None for none."""
        self._left, self._error = calls, error

    def call(self, *, needs_room: bool = True) -> None:
        """A call that changes the disk is about to be made."""
        if self._left is None or not (needs_room or self._error is PowerLossError):
            return
        self._left -= 1
        if self._left < 0:
            self.faults += 1
            if not isinstance(error := self._error(), PowerLossError):
                self._left = None  # there is room again
            raise error

    def sync(self, handle: int) -> None:
        """A file's content, or a folder's names, are durable."""
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._contents[path.stat().st_ino] = path.read_bytes()

    def restart(self) -> None:
        """The power is back."""
        found: dict[Path, bytes] = {}

        def walk(folder: Path) -> None:
            now = {entry.name: entry.inode() for entry in os.scandir(folder)}
            then = self._names.get(folder, {})
            for name in sorted(now.keys() | then.keys()):
                inode = (now if self._rng.random() < 0.5 else then).get(name)
                path = folder / name
                if inode is None:
                    continue
                if path.is_dir():
                    walk(path)
                elif inode in self._contents:
                    found[path] = self._contents[inode]
                else:
                    there = path.read_bytes() if path.exists() else b""
                    found[path] = there[: int(self._rng.integers(0, len(there) + 1))]

        walk(self.folder)
        shutil.rmtree(self.folder)
        self._contents, self._names = {}, {}
        self.folder.mkdir()
        for path, content in found.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._contents[path.stat().st_ino] = content
        for folder in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            self._names[folder] = {entry.name: entry.inode() for entry in os.scandir(folder)}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk(tmp_path / "state", np.random.default_rng(0))
    sync, replace, link, delete = os.fsync, os.replace, os.link, Files._delete

    def synced(handle: int) -> None:
        found.call()
        sync(handle)
        found.sync(handle)

    def before(function: Callable[..., Any], *, needs_room: bool = True) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            found.call(needs_room=needs_room)
            return function(*args)

        return called

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", before(replace))
    monkeypatch.setattr(os, "link", before(link))
    monkeypatch.setattr(Files, "_delete", before(delete, needs_room=False))
    return found


def full() -> BaseException:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("beside", slow_but([False, True], True))
@pytest.mark.parametrize(("name", "seed"), slow_but(itertools.product(CASES, range(12)), ("full", 0), ("multi", 8)))
def test_faults_change_no_answer(
    name: str, seed: int, beside: bool, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where snapshots are written beside the micro-batches."""
    if beside:
        monkeypatch.setattr(recovery, "_WRITTEN_AT_ONCE", 0)
    case, rng = CASES[name], np.random.default_rng(seed)
    disk._rng = rng
    engine = JoinEngine(case.join, "cpu")
    disk.folder.mkdir()
    partitions = Partitions(case, disk.folder, 1, tiny=True)
    for batch, table in enumerate(case.batches):
        rows, under = case.wire.split(case.join, table), case.under(batch)
        if under.get("watermark", 0) is None:
            under = {"watermark": (None, None)}
        expected = engine.process(*rows.tables, orders=rows.sequences, clock_ms=case.clocks[batch], **under)
        again = True
        while again:  # Spark repeats a micro-batch until it has an answer, and may ask again when it had one
            power = rng.random() < 0.7
            disk.fail_after(int(rng.integers(0, 10)), PowerLossError if power else full)
            try:
                found = partitions.apply(batch)
            except PowerLossError:
                lose_power(disk, partitions)
            except StateError as error:
                if "No space left" not in str(error):
                    raise
            else:
                assert counted(found) == counted([expected]), batch
                again = rng.random() < 0.2
                if again and rng.random() < 0.5:
                    lose_power(disk, partitions)
    lose_power(disk, partitions)
    assert disk.faults


def lose_power(disk: Disk, partitions: Partitions) -> None:
    """The power is lost, and comes back; what is under way beside the micro-batches ends as well."""
    disk.fail_after(0)
    with contextlib.suppress(PowerLossError):
        partitions.servers[0].close()
    disk.restart()
    disk.fail_after(None)
    partitions.open()
