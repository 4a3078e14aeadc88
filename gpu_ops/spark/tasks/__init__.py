"""The functions of ``mapInArrow``: what Spark tasks do with the rows of a partition."""

from __future__ import annotations

from typing import Final

NEEDED: Final = ("gpu_ops.spark.tasks.file", "gpu_ops.spark.tasks.join", "gpu_ops.spark.sources.packing")
"""What most of them import. It stands here as the daemon of workers looks it up before it may import numpy."""
