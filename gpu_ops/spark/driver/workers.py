"""What Spark's Python workers need to run functions of this pack."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from typing import Any, Final

from pyspark.sql import SparkSession

from gpu_ops.spark.driver.executors import one_machine
from gpu_ops.spark.driver.process import PACKAGE_ROOT
from gpu_ops.spark.tasks import NEEDED
from gpu_ops.spark.tasks.arrow import importing

_log = logging.getLogger(__name__)

DESCRIPTION: Final = "Python workers of gpu_ops start while the query is planned"
"""Of the job in Spark's UI."""

BEGINNING: Final = "gpu-join-workers"
"""The thread that begins them."""

_begun: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""The Spark contexts whose workers have been begun."""


def make_importable(session: SparkSession) -> None:
    """Lets Python workers run this interpreter and find this pack, as far as that can be done late.

    On one machine the first call begins them as well, and does not wait: Spark's daemon and each worker take half a
    second to import what they need, which otherwise the first micro-batch waits for.
    """
    context = session.sparkContext
    if not one_machine(context):
        return  # another machine has its own interpreter and packages
    if not os.environ.get("PYSPARK_PYTHON") and not session.conf.get("spark.pyspark.python", None):
        context.pythonExec = sys.executable
    if "site-packages" not in PACKAGE_ROOT:
        known = [*context.environment.get("PYTHONPATH", "").split(os.pathsep)]
        if PACKAGE_ROOT not in known:
            context.environment["PYTHONPATH"] = os.pathsep.join([PACKAGE_ROOT, *filter(None, known)])
    if context not in _begun:
        _begun.add(context)
        threading.Thread(target=_begin, args=(session,), name=BEGINNING, daemon=True).start()


def _begin(session: SparkSession) -> None:
    try:
        partitions = int(str(session.conf.get("spark.sql.shuffle.partitions")))
        tasks = min(session.sparkContext.defaultParallelism, partitions)
        rows = session.range(0, tasks, 1, tasks).mapInArrow(functools.partial(importing, NEEDED), "id BIGINT")
        session.sparkContext.setJobDescription(DESCRIPTION)
        rows.write.format("noop").mode("overwrite").save()
    except Exception as error:
        _log.debug("Python workers were not begun: %s", error)  # a query's own tasks begin them, and say what is wrong
