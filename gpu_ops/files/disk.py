"""Local disk as a place for state: files without a name, which a process that dies leaves nothing of.

A file is written to its end and read by memory map: what is looked at comes page by page, and the system keeps in
memory, and drops, what it has room for. What is written is on the disk before anybody forgets what it was written from,
so a full disk loses nothing.

Pages are read one by one where rows are gathered, and by many threads at once (`File.touch`): a disk answers one
question at a time several times more slowly than many together.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpu_ops.errors import StateError

try:
    import resource
except ImportError:  # no Unix
    resource = None  # type: ignore[assignment]

_log = logging.getLogger("gpu_ops")

Bytes = npt.NDArray[np.uint8]

LEAST: Final = 1 << 20
"""Bytes that are worth being moved to disk; what is smaller stays."""
_PAGE: Final = mmap.PAGESIZE
# In 4,000 reads at random of 1 GiB on a virtual disk 1, 8, 32 and 64 threads had 11, 20, 57 and 58 thousand a second.
_THREADS: Final = 32
_FEW: Final = 64
"""So few pages one thread reads."""
_STEP: Final = 8 << 20
"""Bytes that are written before they are waited for: no more of them are in memory twice."""


class NoRoomError(StateError):
    """The disk took no more; what was to go there stays in memory."""


def local_folders(named: str | None = None) -> tuple[Path, ...]:
    """Where state may lie on this machine: where Spark has its own local files, else the temporary folder.

    Args:
        named: folders, separated by commas; None for those of Spark.
    """
    names = ("LOCAL_DIRS", "SPARK_EXECUTOR_DIRS", "SPARK_LOCAL_DIRS")  # YARN's, a standalone cluster's, anybody's
    given = named or next((os.environ[name] for name in names if os.environ.get(name)), None)
    separator = os.pathsep if named is None and given == os.environ.get("SPARK_EXECUTOR_DIRS") else ","
    folders = tuple(Path(part.strip()) for part in (given or "").split(separator) if part.strip())
    return folders or (Path(tempfile.gettempdir()),)


class Disk:
    """What one engine has on disk.

    Args:
        folders: a new file goes to the one with the most room.
        left: gives the bytes that this engine may have, None for no limit.

    Attributes:
        used: bytes on disk now.
        written: bytes written, ever.
        pages_read: pages that threads of `File.touch` had to wait for, ever.
    """

    def __init__(self, folders: Sequence[Path], left: Callable[[], int | None] = lambda: None) -> None:
        self._folders, self._left = tuple(folders), left
        self._lock = threading.Lock()
        self.used = self.written = self.pages_read = 0

    @property
    def folders(self) -> str:
        """The folders, for people."""
        return ", ".join(map(str, self._folders))

    def count(self, used: int, pages: int = 0) -> None:
        """Note bytes that are there now, negative ones for what is gone, and pages read; files do so themselves."""
        with self._lock:
            self.used += used
            self.written += max(0, used)
            self.pages_read += pages

    def check(self, more: int) -> None:
        """Refuse more than there may be.

        Raises:
            NoRoomError: it is.
        """
        left = self._left()
        if left is not None and self.used + more > left:
            raise self.refusal(f"{self.used + more} bytes would be on disk, and {left} may be")

    def refusal(self, why: object) -> NoRoomError:
        """The error of a write that fails, for ``why``."""
        return NoRoomError(
            f"state that memory_limit leaves no room for cannot go to local disk in {self.folders}: {why}. Nothing is "
            "lost. Give another folder (spark.gpu_ops.disk.folder, Budget(folder=...)), more of it "
            "(spark.gpu_ops.disk.limit, Budget(disk=...)), or more memory (spark.gpu_ops.memory.host, memory_limit=)"
        )

    def file(self) -> File:
        """A new file.

        Raises:
            NoRoomError: none can be made.
        """
        try:
            folder = max(self._folders, key=_free)
            with tempfile.TemporaryFile(dir=folder, prefix="gpu_ops_state_") as made:
                number = os.dup(made.fileno())
        except OSError as error:
            raise self.refusal(error) from None
        _look_at(folder)
        return File(self, number)

    def keep(self, *arrays: npt.NDArray[Any]) -> tuple[File, list[npt.NDArray[Any]]]:
        """Arrays of eight-byte numbers as they are on disk, not to be written to, and the file they lie in.

        Raises:
            NoRoomError: there is no room for them.
        """
        file = self.file()
        for array in arrays:
            file.append(array)
        data, ends = file.mapped(advice="MADV_NORMAL"), np.cumsum([array.nbytes for array in arrays])
        parts = np.split(data, ends[:-1])
        return file, [part.view(array.dtype) for part, array in zip(parts, arrays, strict=True)]


class File:
    """A file without a name that grows at its end.

    Args:
        disk: whose it is.
        number: its descriptor.
    """

    def __init__(self, disk: Disk, number: int) -> None:
        self.disk, self._number = disk, number
        self.size = 0
        self._data: Bytes = np.empty(0, np.uint8)

    def __del__(self) -> None:
        os.close(self._number)
        self.disk.count(-self.size)

    def append(self, data: npt.NDArray[Any]) -> None:
        """Write at the end, all or nothing; it is on the disk then.

        Raises:
            NoRoomError: there is no room.
        """
        if not data.size:
            return
        self.disk.check(data.nbytes)
        rest = memoryview(np.ascontiguousarray(data).view(np.uint8).reshape(-1).data)
        try:
            while rest:
                part = rest[:_STEP]
                while part:
                    part = part[os.write(self._number, part) :]
                getattr(os, "fdatasync", os.fsync)(self._number)
                rest = rest[_STEP:]
        except BaseException as error:
            self.truncate(self.size)
            if isinstance(error, OSError):
                raise self.disk.refusal(error) from None
            raise
        self.size += data.nbytes
        self.disk.count(data.nbytes)

    def truncate(self, size: int) -> None:
        """Forget what is behind ``size``; nobody may look at it any more."""
        os.ftruncate(self._number, size)
        os.lseek(self._number, size, os.SEEK_SET)
        self.disk.count(size - self.size)
        self.size, self._data = size, self._data[:0]

    def mapped(self, advice: str = "MADV_RANDOM") -> Bytes:
        """All of it, not to be written to.

        Args:
            advice: what the system is told of how it is read, where it can be.
        """
        if self._data.size < self.size:
            pages = mmap.mmap(self._number, self.size, access=mmap.ACCESS_READ)
            if hasattr(mmap, advice):
                pages.madvise(getattr(mmap, advice))
            self._data = np.frombuffer(pages, np.uint8)
        return self._data

    def touch(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64] | None = None) -> None:
        """Have the system read pages that are about to be needed, many at once.

        Args:
            first: n positions of bytes, ascending.
            last: the last byte of each; None for the same page.
        """
        begin = first // _PAGE
        if last is not None:
            count = last // _PAGE - begin + 1
            if int(count.max(initial=1)) > 1:
                before = np.cumsum(count) - count
                begin = np.arange(int(count.sum())) + np.repeat(begin - before, count)
        if begin.size:
            begin = begin[np.concatenate([[True], begin[1:] != begin[:-1]])]
        if begin.size <= _FEW:
            return
        data, at = self.mapped(), begin * _PAGE
        threads = _pool()
        asked: list[Future[int]] = [threads.submit(_touched, data, part) for part in np.array_split(at, _THREADS)]
        self.disk.count(0, sum(one.result() for one in asked))


def faults() -> int:
    """Pages that this thread has waited for, ever; 0 where the system does not say."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _touched(data: Bytes, at: npt.NDArray[np.int64]) -> int:
    before = faults()
    data.take(at)
    return faults() - before


_threads: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    global _threads  # noqa: PLW0603 - threads are few, and the process's
    if _threads is None:
        _threads = ThreadPoolExecutor(_THREADS, "disk")
        os.register_at_fork(after_in_child=_forget_pool)
    return _threads


def _forget_pool() -> None:
    global _threads  # noqa: PLW0603
    _threads = None


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


_looked_at: set[Path] = set()


def _look_at(folder: Path) -> None:
    """Warns, once, where a folder is no disk."""
    if folder in _looked_at:
        return
    _looked_at.add(folder)
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
        kind = next((words[words.index("-") + 1] for words in mounts if words[2] == wanted), None)
    except (OSError, ValueError, IndexError):
        return
    if kind in ("tmpfs", "ramfs"):
        _log.warning(
            "%s is memory (%s), no disk: state that moves there frees none. Set spark.gpu_ops.disk.folder, or "
            "Budget(folder=...), to a folder on a local disk",
            folder,
            kind,
        )
