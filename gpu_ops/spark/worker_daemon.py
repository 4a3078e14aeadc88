"""Spark's daemon of Python workers, which imports the modules of our tasks before it forks workers.

``spark.python.daemon.module`` names it. Spark ends a worker that had no task for a minute (`PythonWorkerFactory`): in a
stream whose micro-batches are further apart each would wait for imports anew. Spark's own daemon imports nothing, as no
thread may run at a fork; none does here: OpenBLAS is told so, and of Arrow's, jemalloc's alone minds forks itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
from typing import Final

import pyarrow as pa
from pyspark import daemon

from gpu_ops.spark.tasks import NEEDED

_IMPORTED: Final = (
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pandas",
    "pyarrow.flight",
    "cpu_fallback.conditions",
    "cpu_fallback.hashing",
    *NEEDED,
    "gpu_ops.spark.tasks.messages",
)


_MALLOC: Final = {-3: 32 << 20, -1: 128 << 20, -2: 16 << 20}
"""Values by option of ``mallopt(3)``: bytes from which memory is mapped, up to which it is kept, and taken at once."""


def keep_memory() -> None:
    """Has glibc keep the memory that a task frees, Arrow's too, as the system would clear its pages anew."""
    pa.set_memory_pool(pa.system_memory_pool())
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        for option, size in _MALLOC.items():
            library.mallopt(option, size)


def main() -> None:
    """Imports the modules, and serves until Spark closes standard input."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    keep_memory()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what is imported stays, and forks share it
    daemon.manager()


if __name__ == "__main__":
    main()
