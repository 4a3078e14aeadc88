"""What every function of ``mapInArrow`` does in Spark's Python worker, besides its own work."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa

from gpu_ops.errors import GpuJoinError

Self = TypeVar("Self")

_HIDE: Final = "SPARK_HIDE_TRACEBACK"
"""What PySpark's worker looks at when a function has failed, from Spark 4 on."""

_ACKNOWLEDGE: Final = getattr(socket, "TCP_QUICKACK", None)
"""Of Linux."""


def arrow_task(
    run: Callable[[Self, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
) -> Callable[[Self, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A ``__call__`` for ``mapInArrow``.

    What Spark sends is acknowledged at once, see `acknowledge`. Refusals are shown without a traceback, so on the first
    line: the errors of this pack say what to do; where they were raised tells a user nothing. Others keep theirs.
    """

    @functools.wraps(run)
    def wrapped(self: Self, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        freeze_imports()
        acknowledge()
        try:
            yield from run(self, batches)
        except GpuJoinError:
            os.environ[_HIDE] = "1"  # of this worker process, which ends with its first failure
            raise

    return wrapped


@functools.cache
def freeze_imports() -> None:
    """Spark's worker collects garbage after each task; what is imported stays anyway. 45 ms become 15."""
    gc.freeze()  # once in a process: to ask whether anything is frozen counts it all, which takes 5 ms


def acknowledge() -> None:
    """Has the system acknowledge at once what Spark has sent to this worker so far.

    Spark's side of the socket has Nagle's algorithm on: a batch of few rows is held back until the function's code,
    sent before, is acknowledged, and Linux puts that off by 40 ms. So a task of 15 ms took 55.
    """
    if _ACKNOWLEDGE is None:
        return
    for connection in _of_spark():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, _ACKNOWLEDGE, 1)  # holds until something is sent


@functools.cache
def _of_spark() -> tuple[socket.socket, ...]:
    """This worker's connection to Spark, which serves all of its tasks; none if it is no TCP, or in no worker."""
    from pyspark import TaskContext  # noqa: PLC0415 - so that tests of the rest need no pyspark

    open_files = Path("/proc/self/fd")
    if TaskContext.get() is None or not open_files.is_dir():
        return ()
    found: dict[str, socket.socket] = {}
    for file in open_files.iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(file)
            if not name.startswith("socket:") or name in found:
                continue
            connection = socket.socket(fileno=os.dup(int(file.name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found[name] = connection
            else:
                connection.close()
    return tuple(found.values())
