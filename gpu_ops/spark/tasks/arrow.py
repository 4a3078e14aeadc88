"""The base class of all functions for ``mapInArrow``, and the identity of the Spark task that runs one."""

from __future__ import annotations

import abc
import contextlib
import functools
import gc
import importlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from gpu_ops.errors import GpuJoinError, NotBuiltError

_HIDE: Final = "SPARK_HIDE_TRACEBACK"
"""The environment variable by which PySpark's worker, from Spark 4 on, hides the traceback of a failed function."""

_ACKNOWLEDGE: Final = getattr(socket, "TCP_QUICKACK", None)
"""The socket option TCP_QUICKACK, which Linux has."""


class TaskIdentity(NamedTuple):
    """The query, micro-batch and stage position of a Spark task.

    Attributes:
        query_id: Spark's id of the query.
        run_id: Spark's id of the query's run.
        batch_id: the micro-batch.
        number: the task's number within its stage.
        attempt: Spark's id of the task attempt.
    """

    query_id: str
    run_id: str
    batch_id: int
    number: int
    attempt: int


class ArrowTask(abc.ABC):
    """Base class of the functions for ``mapInArrow``.

    What Spark sends is acknowledged at once, see `acknowledge`. Errors of this package are shown without a traceback,
    as they say what to do, and the place where they were raised tells a user nothing. Other errors keep theirs.
    """

    @abc.abstractmethod
    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the results for the batches of a Spark task."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the function in Spark's Python worker."""
        freeze_imports()
        acknowledge()
        try:
            yield from self.run(batches)
        except GpuJoinError:
            os.environ[_HIDE] = "1"  # of this worker process, which ends with its first failure
            raise


@functools.cache
def freeze_imports() -> None:
    """Excludes imported modules from the worker's garbage collection after each task (15 ms instead of 45).

    Within a task collections become rare: records of messages in Avro are many objects, and none of them garbage.
    """
    gc.freeze()  # once in a process: to ask whether anything is frozen counts it all, which takes 5 ms
    gc.set_threshold(100_000)


def importing(names: Iterable[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches unchanged, after importing modules that later tasks of this worker need."""
    for name in names:
        importlib.import_module(name)
    yield from batches


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
    """This worker's TCP connections to Spark, which serve all of its tasks; empty outside of a worker."""
    from pyspark import TaskContext  # noqa: PLC0415 - so that tests of the rest need no pyspark

    open_files = Path("/proc/self/fd")
    if TaskContext.get() is None or not open_files.is_dir():
        return ()
    connections: dict[str, socket.socket] = {}
    for file in open_files.iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(file)
            if not name.startswith("socket:") or name in connections:
                continue
            connection = socket.socket(fileno=os.dup(int(file.name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[name] = connection
            else:
                connection.close()
    return tuple(connections.values())


def together(
    batches: Iterable[pa.RecordBatch], size: Callable[[pa.RecordBatch], int], most: int
) -> Iterator[list[pa.RecordBatch]]:
    """Yields lists of consecutive batches that together reach a size; the last list may be smaller.

    Args:
        batches: the batches, in their order.
        size: measures a batch.
        most: the size to reach, about.
    """
    waiting, total = list[pa.RecordBatch](), 0
    for batch in batches:
        waiting.append(batch)
        total += size(batch)
        if total >= most:
            yield waiting
            waiting, total = [], 0
    if waiting:
        yield waiting


_CUT_BYTES: Final = 1 << 21
"""Bytes of rows that are partitioned together: that makes a message per partition, and Spark's batches may be small."""


def combined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches that are large enough to be partitioned."""
    for some in together(batches, lambda batch: batch.nbytes, _CUT_BYTES):
        yield from some if len(some) == 1 else pa.Table.from_batches(some).combine_chunks().to_batches()


PARTITION: Final[ContextVar[int | None]] = ContextVar("PARTITION", default=None)
"""The number of the partition that is computed, where one Spark task has several; None where it has one."""


def source_partition() -> int:
    """The number of this Spark task within its stage, or of the partition that is computed in it."""
    from pyspark import TaskContext  # noqa: PLC0415 - so that tests of the rest need no pyspark

    context, partition = TaskContext.get(), PARTITION.get()
    if partition is not None:
        return partition
    return int(context.partitionId()) if context is not None else 0


def task_identity() -> TaskIdentity:
    """Returns the identity of this Spark task.

    Raises:
        NotBuiltError: the task belongs to no streaming query.
    """
    task = streaming_task()
    if task is None:
        raise NotBuiltError("a join runs in a streaming query; this task belongs to none")
    return task


def streaming_task() -> TaskIdentity | None:
    """The identity of this Spark task, from the local properties of Structured Streaming; None without them."""
    from pyspark import TaskContext  # noqa: PLC0415 - so that tests of the rest need no pyspark

    context = TaskContext.get()
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    if context is None or batch is None or query is None:
        return None
    run = context.getLocalProperty("spark.jobGroup.id") or ""
    return TaskIdentity(query, run, int(batch), source_partition(), context.taskAttemptId())
