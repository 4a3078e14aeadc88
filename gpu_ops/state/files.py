"""Files that are whole or absent: durable, atomic writes on the file systems of ``pyarrow.fs``.

What a thread asks the file system for can be seen by others (`Activity`): no lock, as it may be stuck.

A temporary folder belongs to a process, and is removed with it, or by the next one that makes one. A folder's owner
holds a lock on a file in it. `atexit` does not run in a process that a signal ends, so whoever makes a folder removes
those beside it whose lock is free, if folder and lock are its user's own: anybody may write to where they are.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import fcntl
import functools
import io
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast

import pyarrow as pa
import pyarrow.fs as pafs

from gpu_ops.errors import StateError
from gpu_ops.state.address import KINDS, Location, StateAddress


class Activity:
    """The file operation that a thread is busy with, and since when it has made no progress."""

    def __init__(self) -> None:
        self._now: tuple[str, str | None, float] = ("nothing", None, time.monotonic())

    def begin(self, doing: str, file: str | None = None) -> None:
        """From now on this is done.

        Args:
            doing: in words, such as "joining".
            file: the file or folder that the file system is asked for.
        """
        self._now = doing, file, time.monotonic()

    def move(self) -> None:
        """Records that the operation makes progress."""
        self.begin(*self._now[:2])

    def tell(self) -> dict[str, Any]:
        """``doing``, ``file`` or None, and for how many ``seconds`` nothing has moved."""
        doing, file, since = self._now
        return {"doing": doing, "file": file, "seconds": time.monotonic() - since}

    @contextlib.contextmanager
    def during(self, doing: str, file: str | None = None) -> Iterator[None]:
        """Does something, and then goes on with what was being done."""
        before = self._now
        self.begin(doing, file)
        try:
            yield
        finally:
            self.begin(*before[:2])


_ALL: Final = ctypes.c_int64(0), ctypes.c_int64(0)
"""Of ``sync_file_range(2)``: from the beginning to the end of a file."""
_BEGIN: Final = 2
"""Of the same: begin to write, and wait for nothing."""

READING: Final = "reading rows"
"""What a server does that waits for the rows of a micro-batch."""

CURRENT_ACTIVITY: Final[contextvars.ContextVar[Activity]] = contextvars.ContextVar("activity")
"""The activity of this thread, where somebody looks at it."""


def seen_during(doing: str, file: str) -> contextlib.AbstractContextManager[None]:
    """Shows an operation on a file as the current activity of this thread (`Activity.during`)."""
    current = CURRENT_ACTIVITY.get(None)
    return contextlib.nullcontext() if current is None else current.during(doing, file)


def seen_to_move() -> None:
    """Records that this thread's current activity makes progress (`Activity.move`)."""
    current = CURRENT_ACTIVITY.get(None)
    if current is not None:
        current.move()


TEMPORARY: Final = ".tmp"
"""Ends the name of a file that is being written; such a file is never read."""

Stamp = tuple[int, int]
"""Size in bytes and modification time in nanoseconds: changes when a file is written again."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _asks(verb: str, doing: str) -> Callable[[_Method], _Method]:
    """Decorates a method that asks the file system, so that a call that is stuck can be seen from outside.

    Errors of the file system become a StateError that names the file.
    """

    def around(method: _Method) -> _Method:
        @functools.wraps(method)
        def asking(self: Files, path: str, *args: Any, **kwargs: Any) -> Any:
            with seen_during(doing, self.name(path)):
                try:
                    return method(self, path, *args, **kwargs)
                except (OSError, pa.ArrowException) as error:
                    reason = self.address.without_secrets(str(error))
                    raise StateError(f"cannot {verb} {self.name(path)}: {reason}") from None

        return cast("_Method", asking)

    return around


class Files:
    """The files under one folder.

    A local file is written under another name, synced, and renamed; HDFS renames too. Object stores
    show an object only when its upload is complete.

    Args:
        filesystem: where.
        root: the folder, as the file system writes it.
        location: the folder as the user wrote it, for errors.

    Attributes:
        has_folders: whether folders are more than beginnings of names, as on object stores.

    Local folders that are made on the way are open to their owner alone, and so are the files, unless they are shared:
    then the process's umask decides. What is there already stays as it is.
    """

    def __init__(
        self, filesystem: pafs.FileSystem, root: str, location: Location | None = None, *, shared: bool = False
    ) -> None:
        self.filesystem, self.root = filesystem, root.rstrip("/")
        self.address = StateAddress.of(location or root)
        self.local = isinstance(filesystem, pafs.LocalFileSystem)
        self._renames = filesystem.type_name == "hdfs"
        self.has_folders = filesystem.type_name not in ("s3", "gcs", "abfs")
        self._shared = shared

    @classmethod
    def at(cls, location: Location, *, shared: bool = False) -> Files:
        """The folder a user names.

        Args:
            location: a local path, or a URI: ``file://``, ``hdfs://``, ``s3://``, ``gs://`` and
                whatever else ``pyarrow.fs.FileSystem.from_uri`` knows.
            shared: whether others may read what is made there.

        Raises:
            StateError: no such file system here.
        """
        address = StateAddress.of(location)
        if address.path is not None:
            return cls(pafs.LocalFileSystem(), address.path, address, shared=shared)
        try:
            filesystem, root = pafs.FileSystem.from_uri(address.secret_uri)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = address.without_secrets(str(error))
            raise StateError(f"state='{address}' cannot be opened: {reason}. {KINDS}") from None
        return cls(filesystem, root, address, shared=shared)

    @property
    def location(self) -> str:
        """The folder as errors call it."""
        return str(self.address)

    def below(self, folder: str) -> Files:
        """The files under a folder of this one."""
        return Files(self.filesystem, f"{self.root}/{folder}", self.address.below(folder), shared=self._shared)

    def name(self, path: str) -> str:
        """A file as errors call it."""
        return f"{self.location}/{path}"

    @_asks("write", "writing")
    def write(self, path: str, produce: Callable[[IO[bytes]], object]) -> int:
        """Writes a file; it is durable when this returns, and untouched when it fails.

        Args:
            path: below the folder. An existing file is replaced.
            produce: writes the content into the binary file it is given.

        Returns:
            The size in bytes.

        Raises:
            StateError: it cannot be written.
        """
        if self.local:
            return self._write_local(path, produce)
        # Nothing is uploaded before everything is there: Arrow completes an upload even when a
        # stream is dropped half-way, and the object that was there before would be lost.
        content = io.BytesIO()
        produce(content)
        target = f"{self.root}/{path}"
        if self._renames:
            target += f".{uuid.uuid4().hex}{TEMPORARY}"
        if self.has_folders:
            self.filesystem.create_dir(os.path.dirname(target), recursive=True)
        with self.filesystem.open_output_stream(target, compression=None) as stream:
            stream.write(content.getbuffer())
        if self._renames:
            self._move_over(target, f"{self.root}/{path}")
        return content.tell()

    def create(self, path: str, content: bytes) -> bool:
        """Writes a file unless it is there already.

        On local file systems one of several concurrent callers wins and all see the winner's content.
        Elsewhere the last one wins.

        Returns:
            Whether it was written.

        Raises:
            StateError: it cannot be written.
        """
        if self.stamp(path) is not None:
            return False
        if not self.local:
            self.write(path, lambda file: file.write(content))
            return True
        temporary = f"{path}.{uuid.uuid4().hex}{TEMPORARY}"
        self.write(temporary, lambda file: file.write(content))
        return self._link(path, temporary)

    @_asks("write", "writing")
    def _link(self, path: str, temporary: str) -> bool:
        """Gives a file its name unless another has it; whether it has it now."""
        source, target = os.path.join(self.root, temporary), os.path.join(self.root, path)
        try:
            os.link(source, target)
        except FileExistsError:
            return False
        except OSError:
            # A file system without hard links: two partitions that race here replace like with like, and of two
            # joins one is refused at its next micro-batch, by what its records say.
            os.replace(source, target)
        finally:
            self.delete([temporary])
        _sync_folder(os.path.dirname(target))
        return True

    @_asks("read", "reading")
    def read(self, path: str) -> pa.Buffer | None:
        """A file's content, mapped into memory where it is local; None when there is none.

        Raises:
            StateError: it cannot be read.
        """
        target = f"{self.root}/{path}"
        try:
            if self.local:
                return pa.memory_map(target).read_buffer() if os.path.getsize(target) else pa.py_buffer(b"")
            with self.filesystem.open_input_file(target) as file:
                return file.read_buffer()
        except FileNotFoundError:
            return None

    def sizes(self, path: str) -> dict[str, int]:
        """Names of the files in a folder, with their sizes in bytes; none when there is no such folder.

        Raises:
            StateError: it cannot be listed.
        """
        return {info.base_name: info.size for info in self._listed(path) if info.type == pafs.FileType.File}

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder.

        Raises:
            StateError: it cannot be listed.
        """
        return [info.base_name for info in self._listed(path) if info.type == pafs.FileType.Directory]

    @_asks("list", "listing")
    def _listed(self, path: str) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(f"{self.root}/{path}".rstrip("/"), allow_not_found=True)
        try:
            return list(self.filesystem.get_file_info(selector))
        except FileNotFoundError:  # Arrow found none, and then that there is one: it was just being made
            return list(self.filesystem.get_file_info(selector))

    @_asks("look up", "looking up")
    def stamp(self, path: str) -> Stamp | None:
        """Size and time of a file, or None when there is none.

        Raises:
            StateError: the file system does not answer.
        """
        info = self.filesystem.get_file_info(f"{self.root}/{path}")
        return None if info.type == pafs.FileType.NotFound else (info.size, info.mtime_ns or 0)

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes files; those that are gone already are no error.

        Raises:
            StateError: one cannot be deleted.
        """
        for path in paths:
            self._delete(path)

    @_asks("delete", "deleting")
    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.root}/{path}")

    @_asks("delete", "deleting")
    def delete_folder(self, path: str) -> None:
        """Deletes a folder with all that is in it; one that is gone already is no error.

        Raises:
            StateError: it cannot be deleted.
        """
        target = f"{self.root}/{path}".rstrip("/")
        if self.filesystem.get_file_info(target).type == pafs.FileType.Directory:
            self.filesystem.delete_dir(target)

    @_asks("write", "writing")
    def link(self, path: str, sources: Mapping[str, str]) -> set[str]:
        """Gives files of this machine second names in a folder; what has one is durable when this returns.

        Args:
            path: the folder.
            sources: the files, by their names there.

        Returns:
            The names that there are: of files on one file system with the folder, if that has such names.

        Raises:
            StateError: one cannot be made durable.
        """
        folder = os.path.join(self.root, path)
        _make_folders(folder, 0o700)
        found = set()
        for name, source in sources.items():
            target = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileExistsError):
                    os.link(source, target)
                if os.path.samefile(source, target):
                    found.add(name)
        for name in found:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        if found:
            _sync_folder(folder)
        return found

    def take(self, path: str, other: Files, folder: str, names: Collection[str]) -> None:
        """Gives files of another folder second names in one of this; copies them where there are no such names.

        Args:
            path: the folder here.
            other: where they are.
            folder: the folder there.
            names: the files, which nobody writes to any more.

        Raises:
            StateError: one is missing, or cannot be read or written.
        """
        both = self.local and other.local
        linked = self.link(path, {x: os.path.join(other.root, folder, x) for x in names}) if both else set[str]()
        for name in sorted(set(names) - linked):
            content = other.read(f"{folder}/{name}")
            if content is None:
                raise StateError(f"{other.name(f'{folder}/{name}')} is missing")
            self.write(f"{path}/{name}", functools.partial(_put, content))

    @contextlib.contextmanager
    def locked(self, path: str, *, alone: bool) -> Iterator[bool]:
        """Holds a lock on a folder; gives whether it is held. It is never waited for: its holder may be stopped.

        Args:
            path: the folder.
            alone: while nobody else holds one; never on a file system that has no such locks. Otherwise beside others
                of that kind, and always on such a file system.
        """
        if not self.local:
            yield not alone
            return
        handle = None
        try:
            handle, held = self._lock(path, alone=alone)
            yield held
        finally:
            if handle is not None:
                os.close(handle)

    @_asks("lock", "locking")
    def _lock(self, path: str, *, alone: bool) -> tuple[int | None, bool]:
        """A folder that is open, if it is there, and whether it is locked."""
        folder = os.path.join(self.root, path)
        if not alone:
            _make_folders(folder, 0o700)
        elif not os.path.isdir(folder):
            return None, False
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return handle, False
        except OSError:
            return handle, not alone
        return handle, True

    def begin_to_write(self, sources: Iterable[str]) -> None:
        """Have the system begin to write files that `link` is to be given, so that it waits for less."""
        for source in sources:
            with contextlib.suppress(OSError, AttributeError), open(source, "rb") as file:  # what fails, fails there
                if os.fstat(file.fileno()).st_dev == os.stat(self.root).st_dev:
                    # no error of the disk is reported to a caller of this one, so `fsync` still reports it
                    ctypes.CDLL(None).sync_file_range(file.fileno(), *_ALL, _BEGIN)

    def _write_local(self, path: str, produce: Callable[[IO[bytes]], object]) -> int:
        target = os.path.join(self.root, path)
        folder = os.path.dirname(target)
        _make_folders(folder, 0o777 if self._shared else 0o700)
        temporary = f"{target}.{uuid.uuid4().hex}{TEMPORARY}"
        try:
            with open(temporary, "xb", opener=None if self._shared else private) as file:
                produce(file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(folder)
        return size

    def _move_over(self, source: str, target: str) -> None:
        # HDFS refuses to rename onto a file.
        if self.filesystem.get_file_info(target).type != pafs.FileType.NotFound:
            self.filesystem.delete_file(target)
        self.filesystem.move(source, target)


def _put(content: pa.Buffer, file: IO[bytes]) -> None:
    file.write(memoryview(content))


def private(path: str, flags: int) -> int:
    """Opens a file that only its owner may read or write; an ``opener`` of ``open``."""
    return os.open(path, flags, 0o600)


def _make_folders(folder: str, mode: int) -> None:
    """Creates a folder and its parents; each new entry is synced into its parent."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folders(parent, mode)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode)
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


PREFIX: Final = "gpu-join-"

_HIDDEN: Final = f".{PREFIX}"
"""Begins the name of a folder that has no owner yet."""
_LOCK: Final = ".owner"
_UNFINISHED_S: Final = 3600.0
"""How old a folder under such a name is that nobody will finish."""
_CAUTIOUS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How a name is opened that anybody may have made: a link is refused, and a pipe is not waited for."""
_locks: Final[dict[Path, tuple[int, ...]]] = {}


def temporary_folder(parent: Path | None = None) -> Path:
    """A new folder below the system's temporary one; `remove_temporary` or the end of this process removes it.

    It gets its name when its lock is held: under that name no folder is ever without an owner.

    Args:
        parent: below this folder instead, which is made where it is gone.

    Raises:
        StateError: there is no room for it, or no right to make it.
    """
    try:
        parent = parent or Path(tempfile.gettempdir())
        _make_folders(str(parent.absolute()), 0o700)
        remove_abandoned(parent)
        hidden = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=parent))
        # that of the folder is for systemd-tmpfiles, which cleans none that is locked
        locks = os.open(hidden / _LOCK, os.O_CREAT | os.O_EXCL | _CAUTIOUS, 0o600), os.open(hidden, _CAUTIOUS)
        made = parent / f"{PREFIX}{uuid.uuid4().hex[:12]}"
        try:
            fcntl.flock(locks[0], fcntl.LOCK_EX)
            with contextlib.suppress(OSError):  # a file system that has no locks on folders
                fcntl.flock(locks[1], fcntl.LOCK_EX)
            hidden.rename(made)
        except BaseException:
            _close_all(locks)
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except OSError as error:
        raise StateError(f"no temporary folder can be made{f' in {parent}' if parent else ''}: {error}") from error
    _locks[made] = locks
    atexit.register(_at_exit, made, os.getpid())
    return made


def _at_exit(made: Path, owner: int) -> None:
    if os.getpid() == owner:
        remove_temporary(made)


def remove_temporary(made: Path) -> None:
    """Removes a folder that `temporary_folder` made."""
    locks = _locks.pop(made, ())
    if locks:
        _remove_owned(made)
        _close_all(locks)


def remove_abandoned(parent: Path) -> None:
    """Removes the folders of `temporary_folder` whose processes were killed; what is not surely such a one stays."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith((PREFIX, _HIDDEN)):
                with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                    _remove_if_abandoned(parent / name)


def _remove_if_abandoned(folder: Path) -> None:
    handle = os.open(folder, _CAUTIOUS | os.O_DIRECTORY)
    try:
        about = os.fstat(handle)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            return
        if folder.name.startswith(_HIDDEN) and time.time() - about.st_mtime < _UNFINISHED_S:
            return
        if folder.name.startswith(_HIDDEN) and _LOCK not in os.listdir(handle):
            folder.rmdir()
            return
        lock = os.open(_LOCK, _CAUTIOUS, dir_fd=handle)
        try:
            owned = os.fstat(lock)
            if stat.S_ISREG(owned.st_mode) and owned.st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_owned(folder)
        finally:
            os.close(lock)
    finally:
        os.close(handle)


def _remove_owned(folder: Path) -> None:
    """Removes a folder, its lock last: whoever goes on after a process that is killed meanwhile knows it by that."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = folder / name
            if name == _LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _close_all(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)
