"""Tasks that read state folders: the present result of an operator, and states made of those of operators elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from gpu_ops.spark.server.present import AssembledState, StoredOperator
from gpu_ops.spark.tasks.arrow import ArrowTask
from gpu_ops.spark.tasks.engine import look_in, program_paths

_AT_ONCE: Final = 1 << 16
"""Rows that go to Spark in one batch."""


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
                    yield from rows.to_batches(_AT_ONCE)


class AssembleState(ArrowTask):
    """Function for ``mapInArrow``: takes numbers of partitions, writes the state of each, and yields them.

    Args:
        state: the state.
    """

    __name__ = "gpu_join_assemble"

    def __init__(self, state: AssembledState) -> None:
        self._state, self._paths = state, program_paths()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Writes each partition named."""
        look_in(self._paths)
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                self._state.write(partition)
            yield batch
