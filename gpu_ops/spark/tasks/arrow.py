"""What every function of ``mapInArrow`` does in Spark's Python worker, and knows of its task, besides its own work."""

from __future__ import annotations

import abc
import contextlib
import functools
import gc
import importlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from gpu_ops.errors import GpuJoinError, NotBuiltError

_HIDE: Final = "SPARK_HIDE_TRACEBACK"
"""What PySpark's worker looks at when a function has failed, from Spark 4 on."""

_ACKNOWLEDGE: Final = getattr(socket, "TCP_QUICKACK", None)
"""Of Linux."""


class TaskIdentity(NamedTuple):
    """Which micro-batch of which query, and which task of its stage.

    Attributes:
        query_id: Spark's id of the query.
        run_id: of the query's run.
        batch_id: the micro-batch.
        number: of the task within its stage.
        attempt: Spark's id of the task attempt.
    """

    query_id: str
    run_id: str
    batch_id: int
    number: int
    attempt: int


class ArrowTask(abc.ABC):
    """A function of ``mapInArrow``.

    What Spark sends is acknowledged at once, see `acknowledge`. Refusals are shown without a traceback, so on the first
    line: the errors of this pack say what to do; where they were raised tells a user nothing. Others keep theirs.
    """

    @abc.abstractmethod
    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What it makes of the batches of a Spark task."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs it."""
        freeze_imports()
        acknowledge()
        try:
            yield from self.run(batches)
        except GpuJoinError:
            os.environ[_HIDE] = "1"  # of this worker process, which ends with its first failure
            raise


@functools.cache
def freeze_imports() -> None:
    """Spark's worker collects garbage after each task; what is imported stays anyway. 45 ms become 15.

    Within a task it is seldom looked for: records of messages in Avro are many objects, and none of them garbage.
    """
    gc.freeze()  # once in a process: to ask whether anything is frozen counts it all, which takes 5 ms
    gc.set_threshold(100_000)


def importing(names: Iterable[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches as they are, and modules that later tasks of this worker need imported."""
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


def together(
    batches: Iterable[pa.RecordBatch], size: Callable[[pa.RecordBatch], int], most: int
) -> Iterator[list[pa.RecordBatch]]:
    """Batches, as many at once as reach a size; the last ones may not.

    Args:
        batches: in their order.
        size: of one, as what is looked at together is measured.
        most: the size, about.
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
"""Of the rows that are cut at once: each cut makes a message per partition, and Spark's batches may be small."""


def combined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are large enough to be cut."""
    for some in together(batches, lambda batch: batch.nbytes, _CUT_BYTES):
        yield from some if len(some) == 1 else pa.Table.from_batches(some).combine_chunks().to_batches()


def source_partition() -> int:
    """The number of this Spark task within its stage."""
    from pyspark import TaskContext  # noqa: PLC0415 - so that tests of the rest need no pyspark

    context = TaskContext.get()
    return int(context.partitionId()) if context is not None else 0


def task_identity() -> TaskIdentity:
    """Where this Spark task stands.

    Raises:
        NotBuiltError: it is no task of a streaming query.
    """
    found = streaming_task()
    if found is None:
        raise NotBuiltError("a join runs in a streaming query; this task belongs to none")
    return found


def streaming_task() -> TaskIdentity | None:
    """Where this Spark task stands, from the local properties that Structured Streaming sets; None without them."""
    from pyspark import TaskContext  # noqa: PLC0415 - so that tests of the rest need no pyspark

    context = TaskContext.get()
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    if context is None or batch is None or query is None:
        return None
    run = context.getLocalProperty("spark.jobGroup.id") or ""
    return TaskIdentity(query, run, int(batch), context.partitionId(), context.taskAttemptId())
