"""Tasks that read a state folder: the present result of an operator."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from gpu_ops.spark.server.present import StoredOperator
from gpu_ops.spark.tasks.arrow import ArrowTask
from gpu_ops.spark.tasks.engine import look_in, program_paths


class PresentResult(ArrowTask):
    """Function for ``mapInArrow``: takes numbers of partitions, yields the rows that an operator's state comes to.

    Args:
        operator: the operator.
    """

    __name__ = "gpu_join_present"

    def __init__(self, operator: StoredOperator) -> None:
        self._operator, self._paths = operator, program_paths()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the result of each partition named, as insertions."""
        look_in(self._paths)
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                for rows in self._operator.result(partition):
                    yield from rows.to_batches()
