"""Spark's daemon of Python workers, with what tasks of this pack need imported before workers are forked.

``spark.python.daemon.module`` names it. Spark ends a worker that had no task for a minute (`PythonWorkerFactory`): in a
stream whose micro-batches are further apart each would wait for imports anew. Spark's own daemon imports nothing, as no
thread may run at a fork; none does here: OpenBLAS is told so, and of Arrow's, jemalloc's alone minds forks itself.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import Final

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


def main() -> None:
    """Imports, and serves until Spark closes standard input."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what is imported stays, and forks share it
    daemon.manager()


if __name__ == "__main__":
    main()
