"""What Spark's Python workers need to run functions of this pack."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from gpu_ops.spark.cluster.executors import one_machine
from gpu_ops.spark.servers.process import PACKAGE_ROOT


def make_importable(session: SparkSession) -> None:
    """Lets Python workers run this interpreter and find this pack, as far as that can be done late."""
    context = session.sparkContext
    if not one_machine(context):
        return  # another machine has its own interpreter and packages
    if not os.environ.get("PYSPARK_PYTHON") and not session.conf.get("spark.pyspark.python", None):
        context.pythonExec = sys.executable
    if "site-packages" not in PACKAGE_ROOT:
        known = [*context.environment.get("PYTHONPATH", "").split(os.pathsep)]
        if PACKAGE_ROOT not in known:
            context.environment["PYTHONPATH"] = os.pathsep.join([PACKAGE_ROOT, *filter(None, known)])
