"""Functions for ``mapInArrow``, which Spark's tasks run over the rows of a partition."""

from __future__ import annotations

import os
from typing import Final

# Flight's buffers need not lie as Acero wants them (groups, joins, the writer of files): it copies those that do not,
# and without this says so each time. It looks at its first use, so this stands where every task of ours comes by.
os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "reallocate")

NEEDED: Final = ("gpu_ops.spark.tasks.file", "gpu_ops.spark.tasks.join", "gpu_ops.spark.tasks.packing")
"""The modules that most tasks import; listed here, as the worker daemon reads the list before it may import numpy."""
