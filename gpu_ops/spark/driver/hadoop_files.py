"""Files that Hadoop reads, and Spark's own `CheckpointFileManager` writes, each of them at once or not at all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from gpu_ops.errors import NotBuiltError, StateError
from gpu_ops.query.catalyst import java_class

_STREAMING: Final = "org.apache.spark.sql.execution.streaming"
_MANAGERS: Final = (f"{_STREAMING}.checkpointing.CheckpointFileManager$", f"{_STREAMING}.CheckpointFileManager$")
"""The object that makes the writer of checkpoint files, from Spark 4.1 on and before."""


class HadoopFiles:
    """The files below a folder.

    Args:
        session: a session.
        location: the folder.
    """

    def __init__(self, session: SparkSession, location: str) -> None:
        self._session = session
        self._conf = session._jsparkSession.sessionState().newHadoopConf()
        root = self._class("org.apache.hadoop.fs.Path")(location)
        self._files = root.getFileSystem(self._conf)
        self._root = self._files.makeQualified(root)
        self.location = str(self._root.toString())

    def exists(self, name: str) -> bool:
        """True if there is a file or a folder."""
        return bool(self._files.exists(self._path(name)))

    def names(self, folder: str) -> list[str]:
        """The names of what is in a folder, without what is being written and checksums; none if it is not there."""
        return [str(x.getPath().getName()) for x in self._listed(folder)]

    def numbers(self, folder: str) -> list[int]:
        """The numbers of the files of a log, in order."""
        return sorted(int(name) for name in self.names(folder) if name.isdigit())

    def latest(self, folder: str) -> int | None:
        """The number of the newest file of a log, or None."""
        return max(self.numbers(folder), default=None)

    def text(self, name: str) -> str:
        """The text of a file."""
        with _opened(self._files, self._path(name)) as stream:
            return str(self._class("org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))

    def delete(self, folder: str) -> None:
        """Deletes a folder with all that is in it, if it is there."""
        self._files.delete(self._path(folder), True)

    def move(self, folder: str, to: str) -> None:
        """Moves a folder to another place below.

        Raises:
            StateError: it cannot be moved.
        """
        self._files.mkdirs(self._path(to).getParent())
        if not self._files.rename(self._path(folder), self._path(to)):
            raise StateError(f"{self.location}/{folder} cannot be renamed to {to}")

    def put(self, name: str, text: str) -> None:
        """Writes a file, unless it is there with this text.

        Raises:
            StateError: it is there with another text.
        """
        if not self.exists(name):
            self._write(name, lambda stream: stream.write(bytearray(text.encode())))
        elif self.text(name) != text:
            raise self._other_content(name)

    def copy(self, other: HadoopFiles, origin: str, to: str) -> None:
        """Copies a folder with all that is in it, but for what is there already; nothing if it is not there.

        Raises:
            StateError: a file of it is there with another content.
        """
        for status in other._listed(origin):
            name = str(status.getPath().getName())
            if status.isDirectory():
                self.copy(other, f"{origin}/{name}", f"{to}/{name}")
                continue
            io = self._class("org.apache.commons.io.IOUtils")
            with _opened(other._files, status.getPath()) as content:
                if not self.exists(f"{to}/{name}"):
                    self._write(f"{to}/{name}", functools.partial(io.copyLarge, content))
                    continue
                with _opened(self._files, self._path(f"{to}/{name}")) as present:
                    if not io.contentEquals(content, present):
                        raise self._other_content(f"{to}/{name}")

    def _other_content(self, name: str) -> StateError:
        return StateError(
            f"{self.location} has a file {name} of another query or change: give a checkpoint folder that is empty"
        )

    def _write(self, name: str, write: Callable[[Any], Any]) -> None:
        """Writes a file that appears whole or not at all."""
        path, manager = self._path(name), self._manager
        manager.mkdirs(path.getParent())
        stream = manager.createAtomic(path, False)
        try:
            write(stream)
        except BaseException:
            stream.cancel()
            raise
        stream.close()

    @functools.cached_property
    def _manager(self) -> Any:
        """Spark's writer of checkpoint files, which a setting names."""
        for name in _MANAGERS:
            with contextlib.suppress(Py4JError):
                managers = getattr(self._class(name), "MODULE$")
                return managers.create(self._root, self._conf)
        raise NotBuiltError("this version of Spark has no CheckpointFileManager where others have it")

    def _listed(self, folder: str) -> list[Any]:
        at = self._path(folder)
        statuses = self._files.listStatus(at) if self._files.exists(at) else []
        return [x for x in statuses if not str(x.getPath().getName()).startswith(".")]

    def _path(self, name: str) -> Any:
        return self._class("org.apache.hadoop.fs.Path")(self._root, name)

    def _class(self, name: str) -> Any:
        return java_class(self._session, name)


@contextlib.contextmanager
def _opened(files: Any, path: Any) -> Iterator[Any]:
    stream = files.open(path)
    try:
        yield stream
    finally:
        stream.close()
