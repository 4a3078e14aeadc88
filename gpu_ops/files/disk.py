"""Local disk as a place for state: files without a name, which a process that dies leaves nothing of.

A file is written to its end, but for numbers, which are changed where they are (`File.changeable`). What is written is
on the disk before anybody forgets what it was written from, so a full disk loses nothing.

What the system has in memory, and drops when it needs that, is looked at by memory map: numbers that change and the
arrays that a search walks through (`Disk.keep`), whose pages are asked for at once before (`File.fetch`), and rows
(`File.gather`) that are still there from when they were written. Other rows are read in their order, near ones
together, many at once, and past the system's cache. By memory map each would cost a fault of its own, a page of cache,
and under a memory limit another page that is dropped: 20,000 of 2M rows of 150 bytes took ten times the CPU, and half
as many pages more, as some were gone again before their rows were copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.arrays import Ints
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
_GAP: Final = 2 * _PAGE
"""What lies no farther apart is read together: a disk with 50,000 reads a second gives as much in the time of one."""
_MOST: Final = 64 * _PAGE
"""Bytes of one read, but for a longer row."""
_BUFFER: Final = 1024 * _PAGE
"""Bytes that are read before rows are copied out of them."""
_LARGEST: Final = 1 << 30
"""Bytes that are not read at once: the system's limit is 2 GiB."""
_DEPTH: Final = 256
"""Reads under way at once."""
_CALLS: Final = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""The numbers of io_setup, io_destroy, io_submit and io_getevents, by machine."""
_IOCB: Final = np.dtype(
    {
        "names": ["which", "flags", "file", "address", "size", "begin"],
        "formats": ["i8", "u4", "u4", "i8", "i8", "i8"],
        "offsets": [0, 12, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
"""``struct iocb``, a read that is requested: its operation is 0."""
_IO_EVENT: Final = np.dtype([("which", "i8"), ("iocb", "u8"), ("result", "i8"), ("more", "i8")])
"""``struct io_event``, a read that is done."""
_UNSUPPORTED: Final = (errno.EINVAL, errno.EOPNOTSUPP)
"""The errors of a file system that has no reads past the cache."""
_PROCESS_MADVISE: Final = 440
"""The number of process_madvise, on any machine."""
_STRETCHES: Final = 1024
"""So many at once."""
_NOWAIT: Final = 8
"""Read what the system's cache has, or nothing (``RWF_NOWAIT``)."""
_SAMPLE: Final = 32
"""So many pages, or twice as many, are looked for in the system's cache before rows are read from the disk."""
PAGES: Final = 256
"""So many, or twice as many, are looked for there before they are asked for."""
_STEP: Final = 8 << 20
"""Bytes that are written before they are waited for: no more of them are in memory twice."""


class NoRoomError(StateError):
    """The disk took no more; what was to go there stays in memory."""


def local_folders(named: str | None = None) -> tuple[Path, ...]:
    """The folders for state on this machine: where Spark has its own local files, else the temporary folder.

    Args:
        named: folders, separated by commas; None for those of Spark.
    """
    names = ("LOCAL_DIRS", "SPARK_EXECUTOR_DIRS", "SPARK_LOCAL_DIRS")  # YARN's, a standalone cluster's, anybody's
    given = named or next((os.environ[name] for name in names if os.environ.get(name)), None)
    separator = os.pathsep if named is None and given == os.environ.get("SPARK_EXECUTOR_DIRS") else ","
    folders = tuple(Path(part.strip()) for part in (given or "").split(separator) if part.strip())
    return folders or (Path(tempfile.gettempdir()),)


class Disk:
    """The local disk space of one engine.

    Args:
        folders: a new file goes to the one with the most room.
        left: gives the bytes that this engine may have, None for no limit.

    Attributes:
        used: bytes on disk now.
        written: bytes written, ever.
        pages_read: pages that `File.gather` had to read from the disk, ever.
        micro_batch: its number; rows read are kept within one.
    """

    def __init__(self, folders: Sequence[Path], left: Callable[[], int | None] = lambda: None) -> None:
        self._folders, self._left = tuple(folders), left
        self._lock = threading.Lock()
        self.used = self.written = self.pages_read = self.micro_batch = 0

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
        """Makes a new file.

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
        data, ends = file.mapped("MADV_NORMAL"), np.cumsum([array.nbytes for array in arrays])
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
        self._pages: mmap.mmap | None = None
        self._data: Bytes = np.empty(0, np.uint8)
        self._direct: int | None = None
        self._by_cache = False

    def __del__(self) -> None:
        os.close(self._number)
        if self._direct is not None:
            os.close(self._direct)
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
        self.size, self._pages, self._data = size, None, self._data[:0]

    def mapped(self, advice: str = "MADV_RANDOM") -> Bytes:
        """All of it, not to be written to.

        Args:
            advice: what the system is told of how it is read, where it can be.
        """
        if self._data.size < self.size:
            self._map(mmap.mmap(self._number, self.size, access=mmap.ACCESS_READ), advice)
        return self._data

    def changeable(self, size: int) -> Bytes:
        """All of it, behind it zeros up to ``size``, to be written to from now on.

        Raises:
            NoRoomError: there is no room.
        """
        while self.size < size:
            # Zeros that are written: what a write to a page finds no room for ends the process.
            self.append(np.zeros(min(_STEP, size - self.size), np.uint8))
        self._map(mmap.mmap(self._number, size), "MADV_RANDOM")
        return self._data

    def _map(self, pages: mmap.mmap, advice: str) -> None:
        self._pages, self._data = pages, np.frombuffer(pages, np.uint8)
        self._advise(advice)

    def _advise(self, advice: str) -> None:
        if self._pages is not None and hasattr(mmap, advice):
            self._pages.madvise(getattr(mmap, advice))

    def parts(self, size: int, step: int) -> Iterator[Bytes]:
        """The first bytes as they are now, so many at a time."""
        for first in range(0, size, step):
            part, done = np.empty(min(step, size - first), np.uint8), 0
            while done < part.size:
                got = os.preadv(self._number, [part[done:].data], first + done)
                if not got:
                    raise StateError(f"state on local disk in {self.disk.folders} is shorter than it was")
                done += got
            yield part

    def has(self, first: Ints) -> bool:
        """Tells whether the system seems to have some positions of a mapped file in memory: all of a sample."""
        pages = np.minimum(first[:: 1 + first.size // PAGES], self._data.size - 1) // _PAGE * _PAGE
        return _in_memory(self._data.ctypes.data + pages)

    def fetch(self, first: Ints) -> None:
        """Ask for the pages of some positions of what is mapped: nobody waits for one after the other then.

        The system itself reads none but the page that is touched, or around it as much as it is set to, up to 8 MiB.
        """
        if self.has(first):
            return
        pages = np.unique(np.minimum(first, self._data.size - 1) // _PAGE)
        begins = np.flatnonzero(np.diff(pages, prepend=-2) > 1)
        wanted = np.empty((begins.size, 2), np.int64)
        wanted[:, 0] = self._data.ctypes.data + pages[begins] * _PAGE
        wanted[:, 1] = np.diff(begins, append=pages.size) * _PAGE
        _ask_for(wanted)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Meanwhile all of what is mapped is looked at from its beginning to its end."""
        self._advise("MADV_SEQUENTIAL")
        try:
            yield
        finally:
            self._advise("MADV_NORMAL")

    def gather(self, first: Ints, last: Ints) -> tuple[Bytes, Ints]:
        """Stretches of the file, copied side by side.

        Args:
            first: n positions of bytes, ascending.
            last: where each stretch ends, exclusive; no later than the next begins.

        Returns:
            Their bytes, and n + 1 positions among them: where each begins, and where the last ends.

        Raises:
            StateError: the disk does not give them.
        """
        queue = _queue()
        if queue is None:
            return side_by_side(self._copied(first, last))
        begin, end = first // _PAGE * _PAGE, -(-last // _PAGE) * _PAGE
        apart = (begin[1:] > end[:-1] + _GAP) | (begin[1:] // _MOST > begin[:-1] // _MOST)
        heads = np.append(0, np.flatnonzero(apart) + 1)  # of what is read together, the first stretch
        begin, end = begin[heads], end[np.append(heads[1:], first.size) - 1]
        before = np.cumsum(end - begin) - (end - begin)
        bounds = np.flatnonzero(np.diff(before // _BUFFER, prepend=-1, append=-1))
        heads, parts = np.append(heads, first.size), list[pa.Array]()
        buffer = np.empty(0, np.uint8)
        for low, high in itertools.pairwise(bounds.tolist()):
            these, own = slice(low, high), slice(heads[low], heads[high])
            size, place = int((end - begin)[these].sum()), before[these] - before[low]
            if size > _LARGEST or self._in_cache(queue, first[own]):
                parts += self._copied(first[own], last[own])
                continue
            if buffer.size < size:
                buffer = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
            self._fill(queue, begin[these], end[these], buffer.ctypes.data + place)
            move = np.repeat(place - begin[these], np.diff(heads[low : high + 1]))
            parts.append(cut_out(buffer, first[own] + move, last[own] + move))
        _idle.append(queue)
        return side_by_side(parts)

    def _in_cache(self, queue: _Queue, first: Ints) -> bool:
        """Tells whether the system seems to have the pages of some positions in memory: all of a sample."""
        some, page = first[:: 1 + first.size // _SAMPLE] // _PAGE * _PAGE, np.empty(_PAGE, np.uint8)
        try:
            found = queue.read(self._number, some, np.full_like(some, _PAGE), page.ctypes.data, _NOWAIT)
        except OSError:  # not on this file system
            return False
        return bool((found > 0).all())

    def _copied(self, first: Ints, last: Ints) -> list[pa.Array]:
        """Stretches by memory map, at the width of the longest; where that is much more, each half by itself."""
        width, half = int((last - first).max(initial=0)), first.size // 2
        if half and width * first.size > _BUFFER:
            return self._copied(first[:half], last[:half]) + self._copied(first[half:], last[half:])
        start = np.minimum(first, self.size - width)
        windows: Any = np.ndarray((self.size - width + 1,), f"V{width}", self.mapped(), strides=(1,))
        begin = np.arange(first.size) * width + first - start
        return [cut_out(windows[start].view(np.uint8), begin, begin + last - first)]

    def _fill(self, queue: _Queue, begin: Ints, end: Ints, address: Ints) -> None:
        """Read stretches of whole pages from the disk."""
        if self._direct is None:
            self._direct = _past_the_cache(self._number)
        try:
            found = queue.read(self._direct, begin, end - begin, address)
        except OSError as error:
            found = np.array([-(error.errno or errno.EIO)])
        if bool((found < np.minimum(end, self.size) - begin).any()):
            worst = int(found.min())
            if -worst in _UNSUPPORTED and not self._by_cache:  # some file systems refuse the read, not the opening
                os.close(self._direct)
                self._direct, self._by_cache = os.dup(self._number), True
                self._fill(queue, begin, end, address)
                return
            why = os.strerror(-worst) if worst < 0 else "the file is shorter than it was"
            raise StateError(f"state on local disk in {self.disk.folders} cannot be read: {why}")
        self.disk.count(0, int((end - begin).sum()) // _PAGE)


def _in_memory(addresses: Ints) -> bool:
    """Asks ``mincore(2)`` whether all of some pages of mapped files are in memory. False where it does not say."""
    found, ask = ctypes.c_ubyte(), getattr(ctypes.CDLL(None), "mincore", None)
    if ask is None:
        return False
    page, pointer = ctypes.c_size_t(_PAGE), ctypes.byref(found)
    return all(ask(ctypes.c_void_p(one), page, pointer) == 0 and found.value & 1 for one in addresses.tolist())


def _ask_for(stretches: Ints) -> None:
    """Have the system read stretches of mapped files in the background, where it can be asked to (Linux 5.10).

    Args:
        stretches: n by 2, the address and size of each; see ``process_madvise(2)``.
    """
    if not hasattr(os, "pidfd_open"):
        return
    library, process = ctypes.CDLL(None), os.pidfd_open(os.getpid())
    library.syscall.restype = ctypes.c_long
    try:
        for first in range(0, len(stretches), _STRETCHES):
            some = stretches[first : first + _STRETCHES]
            values = _PROCESS_MADVISE, process, some.ctypes.data, len(some), mmap.MADV_WILLNEED, 0
            library.syscall(*map(ctypes.c_long, values))
    finally:
        os.close(process)


def _past_the_cache(number: int) -> int:
    """Another descriptor of a file, for reads that leave the system's cache alone where the file system has such."""
    try:
        return os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.dup(number)


def cut_out(data: Bytes, first: Ints, last: Ints, at: Ints | None = None) -> pa.Array:
    """Stretches of bytes, copied.

    Args:
        data: where they are; Arrow reserves as much as that.
        first: n positions, ascending.
        last: where each ends, exclusive; no later than the next begins.
        at: which of them, in which order; None for all.
    """
    # Every other value of this array is one; what is between two is not looked at.
    offsets = np.column_stack((first, last)).reshape(-1)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    values = pa.Array.from_buffers(pa.large_binary(), offsets.size - 1, buffers)
    return values.take(pa.array(2 * (np.arange(first.size) if at is None else at)))


def side_by_side(parts: Sequence[pa.Array]) -> tuple[Bytes, Ints]:
    """The bytes of arrays of large_binary, and where each value begins among them, and the last ends."""
    array = pa.concat_arrays(parts) if len(parts) > 1 else parts[0]
    offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.frombuffer(array.buffers()[2], np.uint8, last - first, first) if last > first else np.empty(0, np.uint8)
    return data, offsets - first


def faults() -> int:
    """Pages that this thread has waited for, ever; 0 where the system does not say."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class _Queue:
    """Many reads of a disk at once, and no thread for each: Linux's asynchronous reads, see ``io_submit(2)``.

    Raises:
        OSError: there are none here.
    """

    def __init__(self) -> None:
        numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._library, self._context = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong()
        self._library.syscall.restype = ctypes.c_long
        setup, self._destroy, self._submit, self._events = numbers
        self._call(setup, _DEPTH, ctypes.addressof(self._context))

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.syscall(self._destroy, self._context)

    def _call(self, *values: int) -> int:
        done: int = self._library.syscall(*map(ctypes.c_long, values))
        if done < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return done

    def read(self, number: int, begin: Ints, size: Ints, address: Ints | int, flags: int = 0) -> Ints:
        """Read n stretches of a file.

        Args:
            number: the file's descriptor.
            begin: where each begins.
            size: of each.
            address: where in memory each goes, or where all do.
            flags: as of ``preadv2(2)``.

        Returns:
            How many bytes of each were read, or less than 0: the negative number of an error.
        """
        requests, found = np.zeros(begin.size, _IOCB), np.zeros(begin.size, np.int64)
        for name, value in {"which": np.arange(begin.size), "flags": flags, "file": number}.items():
            requests[name] = value
        requests["address"], requests["size"], requests["begin"] = address, size, begin
        pointers = requests.ctypes.data + np.arange(begin.size) * _IOCB.itemsize
        events, sent, got = np.empty(_DEPTH, _IO_EVENT), 0, 0
        while got < begin.size:
            more = min(_DEPTH + got, begin.size) - sent
            if more:
                sent += self._call(self._submit, self._context.value, more, pointers.ctypes.data + 8 * sent)
            with contextlib.suppress(InterruptedError):
                least = min(_DEPTH // 4, sent - got)
                done = events[: self._call(self._events, self._context.value, least, _DEPTH, events.ctypes.data, 0)]
                found[done["which"]] = done["result"]
                got += done.size
        return found


_idle: Final[list[_Queue]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # they are this process's


def _queue() -> _Queue | None:
    """One that nobody uses, a new one, or None where there are none."""
    with contextlib.suppress(IndexError):
        return _idle.pop()
    with contextlib.suppress(OSError):
        return _Queue()
    return None


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
