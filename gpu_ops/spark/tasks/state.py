"""Tasks that read a state folder: the present result of an operator, and copies of its state."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from gpu_ops.spark.server.present import StoredOperator
from gpu_ops.spark.tasks.arrow import ArrowTask
from gpu_ops.spark.tasks.engine import look_in, program_paths
from gpu_ops.state.address import StateAddress
from gpu_ops.state.manifest import Manifest


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


class CopyState(ArrowTask):
    """Function for ``mapInArrow``: takes numbers of partitions, copies what an operator has there, and yields them.

    Args:
        operator: the operator; of a dataflow as a whole where it has no name.
        to: the folder to write to.
        manifest: the manifest that this folder gets.
        version: the number of micro-batches that the copy stands for.
    """

    __name__ = "gpu_join_copy"

    def __init__(self, operator: StoredOperator, to: StateAddress, manifest: Manifest, version: int) -> None:
        self._operator, self._to, self._manifest, self._version = operator, to, manifest, version
        self._paths = program_paths()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copies each partition named."""
        look_in(self._paths)
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                self._operator.copy(partition, self._to, self._manifest, self._version)
            yield batch
