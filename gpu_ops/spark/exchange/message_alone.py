"""What a task's errors look like to a user: the message, where Spark would put a traceback before it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

from gpu_ops.errors import GpuJoinError

Self = TypeVar("Self")

_HIDE = "SPARK_HIDE_TRACEBACK"
"""What PySpark's worker looks at when a function has failed, from Spark 4 on."""


def message_alone(
    run: Callable[[Self, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
) -> Callable[[Self, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A ``__call__`` for ``mapInArrow`` whose refusals Spark shows without a traceback, so on the first line.

    The errors of this pack say what to do; where they were raised tells a user nothing. Others keep their traceback.
    """

    @functools.wraps(run)
    def wrapped(self: Self, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        try:
            yield from run(self, batches)
        except GpuJoinError:
            os.environ[_HIDE] = "1"  # of this worker process, which ends with its first failure
            raise

    return wrapped
