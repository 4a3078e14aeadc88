"""Which files of a folder are visible: the log of Spark's own file sink, by Spark's code or in its format."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol
from urllib.parse import quote

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from gpu_ops.errors import NotBuiltError, StateError
from gpu_ops.query.catalyst import java_class
from gpu_ops.spark.tasks.file import WrittenFile
from gpu_ops.state.files import Files

LOG: Final = "_spark_metadata"
"""Its folder, below the output folder."""

_COMPACT: Final = ".compact"
_INTERVAL: Final = 10
"""Each so many micro-batches an entry has all files; by Spark's default, which its readers find out by themselves."""

_KEPT_S: Final = 600
"""How long entries stay that a later one has made superfluous: a reader may be among them."""

_SCHEMES: Final = {"s3": "s3a"}
"""Of what Arrow and Hadoop call differently."""


class FileLog(Protocol):
    """Names the files of micro-batches; one that it does not name is not there."""

    def latest(self) -> int:
        """The last micro-batch that it has, -1 for none."""

    def add(self, number: int, files: Sequence[WrittenFile]) -> bool:
        """Makes the files of a micro-batch visible, all at once; False where another has written that micro-batch."""


class SparkLog:
    """The log as Spark writes it, through Hadoop.

    Args:
        spark: the session.
        place: the output folder.
    """

    def __init__(self, spark: SparkSession, place: Files) -> None:
        self._spark = spark
        self._location = f"file:{place.root}" if place.local else place.location
        none = java_class(spark, "scala.Option").empty()
        self._log = self._class("FileStreamSinkLog")(1, spark._jsparkSession, f"{self._location}/{LOG}", none)

    def latest(self) -> int:
        """See `FileLog`."""
        found = self._log.getLatestBatchId()
        return int(found.get()) if found.isDefined() else -1

    def add(self, number: int, files: Sequence[WrittenFile]) -> bool:
        """See `FileLog`."""
        path = java_class(self._spark, "org.apache.hadoop.fs.Path")
        conf = self._spark._jsparkSession.sessionState().newHadoopConf()
        status = self._class("SinkFileStatus")
        statuses = self._spark.sparkContext._gateway.new_array(status, len(files))
        for place, file in enumerate(files):
            at = path(f"{self._location}/{file.path}")
            statuses[place] = status.apply(at.getFileSystem(conf).getFileStatus(at))
        return bool(self._log.add(number, statuses))

    def _class(self, name: str) -> Any:
        """A class of Spark's file sink; it has moved between versions."""
        loader = java_class(self._spark, "java.lang.Thread").currentThread().getContextClassLoader()
        for package in ("streaming.sinks", "streaming"):
            whole = f"org.apache.spark.sql.execution.{package}.{name}"
            with contextlib.suppress(Py4JError):
                loader.loadClass(whole)
                return java_class(self._spark, whole)
        raise NotBuiltError(f"this version of Spark has no {name}, which write_files() needs")


class ObjectLog:
    """The same log on an object store, written by Arrow: Spark's code would rename, which there is a copy.

    An entry is one object, and an object is there as a whole or not at all. As in
    ``org.apache.spark.sql.execution.streaming.CompactibleFileStreamLog`` each tenth has all files since the beginning.

    Args:
        place: the output folder.
    """

    def __init__(self, place: Files) -> None:
        self._place, self._log = place, place.below(LOG)
        self._last = max(self._entries().values(), default=-1)

    def _entries(self) -> dict[str, int]:
        """Names of entries, with their micro-batches."""
        names = ((name, name.removesuffix(_COMPACT)) for name in self._log.sizes(""))
        return {name: int(number) for name, number in names if number.isdecimal()}

    def latest(self) -> int:
        """See `FileLog`."""
        return self._last

    def add(self, number: int, files: Sequence[WrittenFile]) -> bool:
        """See `FileLog`."""
        whole = _has_all(number)
        lines = [*(self._since(number) if whole else ()), *map(self._line, files)]
        if not self._log.create(_entry(number), "\n".join(["v1", *lines]).encode()):
            return False
        self._last = number
        if whole:
            self._forget(number - _INTERVAL)
        return True

    def _since(self, number: int) -> Iterator[str]:
        """What entries before have, from the last that had all."""
        first = max(0, number - _INTERVAL)
        for name in map(_entry, range(first, number)):
            content = self._log.read(name)
            if content is None:
                raise StateError(f"{self._log.name(name)} is gone: no one can tell any more which files are visible")
            yield from content.to_pybytes().decode().split("\n")[1:]

    def _forget(self, number: int) -> None:
        """Deletes entries before one that has all, but those that a reader may have just found."""
        for name, entry in self._entries().items():
            stamp = self._log.stamp(name) if entry < number else None
            if stamp is not None and stamp[1] < (time.time() - _KEPT_S) * 1e9:
                self._log.delete([name])

    def _line(self, file: WrittenFile) -> str:
        """An entry's line, ``SinkFileStatus`` as JSON."""
        scheme, _, rest = self._place.location.partition("://")
        at = f"{_SCHEMES.get(scheme, scheme)}://{rest}/{quote(file.path, safe='/=')}"
        now = int(time.time() * 1000)
        status = {"path": at, "size": file.size, "isDir": False, "modificationTime": now}
        blocks = {"blockReplication": 1, "blockSize": 32 << 20, "action": "add"}
        return json.dumps(status | blocks, separators=(",", ":"))


def _has_all(number: int) -> bool:
    """Whether a micro-batch's entry has the files of all before, too."""
    return (number + 1) % _INTERVAL == 0


def _entry(number: int) -> str:
    """What a micro-batch's entry is called."""
    return f"{number}{_COMPACT}" if _has_all(number) else f"{number}"
