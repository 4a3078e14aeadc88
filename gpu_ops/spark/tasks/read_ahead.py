"""Reads the files of the next micro-batch while the state servers compute this one.

Spark reads a micro-batch, then has it computed, then reads the next one, so one of the two always waits. Where a source
takes a number of files at a time, the files of the next micro-batch are known while there is a backlog: for each file
it is the one that comes so many behind it in the folder, by modification time. A task's worker, which is idle when its
task has ended, packs that one into the folder of the next micro-batch (`gpu_ops.state.blocks`), and leaves there what
it would have given to Spark. The task that is then given this file, maybe in another worker, takes that; if it is being
made it waits. A guess that was wrong costs time and nothing else: such a file is not asked for, and the folder goes
with its micro-batch. One that changes after it was read is read anew, and so is one that could not be read.

When all that the next micro-batch will have is there, the state server is given it, too, and computes it while Spark
plans (`left_for_next`).
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from gpu_ops.errors import GpuJoinError
from gpu_ops.files.file_systems import file_system_of
from gpu_ops.spark.wire.arrivals import PACKED, Message
from gpu_ops.state.blocks import make_folder
from gpu_ops.state.files import private

ListedFile = tuple[str, int]
"""A file as Spark lists it: its URI, and its modification time (us)."""

PackFiles = Callable[[Sequence[ListedFile], Path | None], Iterator[pa.RecordBatch]]
"""Packs the rows of files; where a folder is given, messages are left in it for the micro-batch after this one."""

_MOST_MISSED: Final = 8
"""Files in a row that others were guessed for, after which an input's are no longer guessed."""

_NICE: Final = 10
"""The niceness of the thread: beside a state server's it gets a tenth of a core, and otherwise what nobody wants."""

_PAUSE: Final = 0.02
"""Seconds in which a worker tells Spark that its task has ended."""

_MOST_S: Final = 10.0
"""Seconds for which what is read ahead is waited for."""

_LATER: Final = 1.2
"""The factor by which the time grows until it is looked for again."""

_AHEAD: Final = "ahead-"

_SELDOM: Final = 50
"""A folder in which nothing new was is listed again after so many times as long as that took."""


class NextFiles:
    """Finds the files behind others in folders, as Spark's source takes them; of one worker process."""

    def __init__(self) -> None:
        self._listed: dict[str, list[tuple[int, str]]] = {}
        self._again: dict[str, float] = {}

    def behind(self, path: str, count: int) -> tuple[str, os.stat_result] | None:
        """The path of the file that comes so many behind one in its folder; None where there is none."""
        folder, name = os.path.split(path)
        own = (_milliseconds(os.stat(path)), name)
        found = self._find(folder, own, count)
        if found is None and time.monotonic() >= self._again.get(folder, 0):
            begin = time.monotonic()
            with os.scandir(folder) as entries:
                there = [(_milliseconds(e.stat()), e.name) for e in entries if e.name[0] not in "._" and e.is_file()]
            self._listed[folder] = sorted(there)
            found = self._find(folder, own, count)
            if found is None:
                end = time.monotonic()
                self._again[folder] = end + _SELDOM * (end - begin)
        return None if found is None else (found, os.stat(found))

    def _find(self, folder: str, own: tuple[int, str], count: int) -> str | None:
        listed = self._listed.get(folder, [])
        place = bisect.bisect_left(listed, own)
        if place + count >= len(listed) or listed[place] != own:
            return None
        return os.path.join(folder, listed[place + count][1])


@dataclasses.dataclass
class _Guesses:
    """Counts of the guesses of one worker process for an input: each task makes as many as it asks for files.

    Attributes:
        made: guesses for which no task has looked yet.
        missed: tasks in a row that have not found their file.
    """

    made: int = 0
    missed: int = 0

    def asked(self, *, found: bool) -> None:
        """Notes that a task has looked for a file."""
        if found:
            self.missed = 0
        elif self.made:  # while there is no backlog nobody guesses
            self.missed += 1
        self.made = max(0, self.made - 1)


_next_files = NextFiles()
_guesses: Final = collections.defaultdict[tuple[str, str], _Guesses](_Guesses)
_one_at_a_time = threading.Lock()


def packed_ahead(
    files: Sequence[ListedFile], folders: tuple[Path, Path], use: str, per_batch: int, pack: PackFiles
) -> Iterator[pa.RecordBatch]:
    """Packs the rows of a task's files, as far as they were not read ahead, and then reads ahead.

    Args:
        files: the files, in their order.
        folders: of the messages of this micro-batch, and of the next one.
        use: names the inputs that the rows are for, within the query.
        per_batch: the number of files that the source gives to a micro-batch.
        pack: does the work.

    Yields:
        Rows of `PACKED`.
    """
    now, then = folders
    left, guesses = list[ListedFile](), _guesses[str(now.parent), use]
    for file in files:
        found = _taken(now, use, file)
        guesses.asked(found=found is not None)
        if found is None:
            left.append(file)
        else:
            yield from found
    if left or not files:
        yield from pack(left, None)
    if files and guesses.missed < _MOST_MISSED:
        with contextlib.suppress(OSError):  # beside that of the next one; and it removes those of earlier ones
            make_folder(now)
        later = threading.Timer(_PAUSE, _read_ahead, (files, then, use, per_batch, pack, guesses))
        later.daemon = True
        later.start()


def _taken(folder: Path, use: str, file: ListedFile) -> list[pa.RecordBatch] | None:
    """Takes what was left for a file, None if the file has changed since; waits for the one who is at it."""
    with contextlib.suppress(OSError, KeyError, pa.ArrowException):
        about, _, batches = _whole(folder / _named(use, file))
        if about == _version(os.stat(_local(file[0]) or "")):
            return batches
    return None


def _whole(place: Path) -> tuple[list[int], ListedFile, list[pa.RecordBatch]]:
    """Reads what was left for a file: its version, the file that it comes behind, and its rows; see `_taken`.

    Raises:
        OSError, KeyError, ArrowException: it is not whole.
    """
    with open(place, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        # a file of Arrow's has an end, by which it is known to be whole
        with pa.ipc.open_file(pa.py_buffer(lock.read())) as made:
            facts = json.loads((made.schema.metadata or {})[b"file"])
            batches = [made.get_batch(at).replace_schema_metadata() for at in range(made.num_record_batches)]
    return facts["version"], tuple(facts["behind"]), batches


def left_for_next(folder: Path, came: Iterable[Message]) -> list[pa.RecordBatch] | None:
    """Takes what is read ahead of the files behind those of a micro-batch; waits for it until the next one begins.

    Args:
        folder: of the messages of the next micro-batch.
        came: the messages of this one, of files.

    Returns:
        Rows of `PACKED`; None where not all of it is there.
    """
    wanted = {(one.operator, one.input, one.source, one.time) for one in came}
    found, pause, end = dict[str, list[pa.RecordBatch]](), 0.005, time.monotonic() + _MOST_S
    present = folder.with_name(str(int(folder.name) - 1))  # which the next one removes
    while wanted and present.exists() and time.monotonic() < end:
        time.sleep(pause)
        pause *= _LATER
        with contextlib.suppress(OSError, KeyError, pa.ArrowException):
            for name in sorted(os.listdir(folder)):
                if name.startswith(_AHEAD) and name not in found:
                    _, behind, found[name] = _whole(folder / name)
                    about = (Message.of(text.as_py()) for batch in found[name] for text in batch["about"])
                    wanted -= {(one.operator, one.input, *behind) for one in about}
    return None if wanted or not found else [batch for batches in found.values() for batch in batches]


def _read_ahead(  # noqa: PLR0917 - a thread's
    files: Sequence[ListedFile], folder: Path, use: str, per_batch: int, pack: PackFiles, guesses: _Guesses
) -> None:
    """Packs the files that come next, in a thread that gives way to others."""
    with _one_at_a_time, contextlib.suppress(OSError, pa.ArrowException, GpuJoinError):
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for uri, at in files:
            path = _local(uri)
            found = None if path is None else _next_files.behind(path, per_batch)
            if path is not None and found is not None:
                name = os.path.basename(found[0])
                following = (f"{uri.removesuffix(os.path.basename(path))}{name}", 1000 * _milliseconds(found[1]))
                guesses.made += 1
                _leave(folder, use, following, {"version": _version(found[1]), "behind": (uri, at)}, pack)


def _leave(folder: Path, use: str, file: ListedFile, facts: Mapping[str, Any], pack: PackFiles) -> None:
    """Packs a file for the one who will ask for it."""
    place = folder / _named(use, file)
    if place.exists():  # a micro-batch may be computed several times
        return
    folder.mkdir(mode=0o700, exist_ok=True)  # and not its parent, which is gone if the run is over
    hidden = folder / uuid.uuid4().hex
    with open(hidden, "xb", opener=private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(place)
        made = list(pack([file], folder))
        schema = PACKED.with_metadata({b"file": json.dumps(facts).encode()})
        with pa.ipc.new_file(lock, schema) as writer:
            for batch in made:
                writer.write_batch(batch)


def _named(use: str, file: ListedFile) -> str:
    return f"{_AHEAD}{hashlib.sha256(repr((use, file)).encode()).hexdigest()}"


def _version(about: os.stat_result) -> list[int]:
    """The inode, size and time of a file, of which one changes if it is written to."""
    return [about.st_ino, about.st_size, about.st_mtime_ns]


def _milliseconds(about: os.stat_result) -> int:
    """A file's modification time as Hadoop has it."""
    return about.st_mtime_ns // 1_000_000


def _local(uri: str) -> str | None:
    """The path of a file of this machine; None for others."""
    file_system, path = file_system_of(uri, "")
    return path if isinstance(file_system, pafs.LocalFileSystem) else None
