"""What the end of input makes the partitions of a state folder say; runs in Spark tasks, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from gpu_ops.spark.command import ApplyCommand, Wire
from gpu_ops.spark.partition import PartitionState
from gpu_ops.state.manifest import Manifest

_ROWS_PER_BATCH: Final = 1 << 16


class LeftOver:
    """The function of ``mapInArrow``: numbers of partitions in, what they have to say out.

    Args:
        state: the state folder.
        manifest: its manifest.
        version: the number of micro-batches it holds.
    """

    __name__ = "gpu_join_left_over"

    def __init__(self, state: str, manifest: Manifest, version: int) -> None:
        self._state, self._manifest, self._version = state, manifest, version

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the changelog of each partition named.

        Raises:
            StateError: the folder does not hold the version.
        """
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                table = left_over(self._state, self._manifest, partition, self._version)
                yield from table.to_batches(max_chunksize=_ROWS_PER_BATCH)


def left_over(state: str, manifest: Manifest, partition: int, version: int) -> pa.Table:
    """What the end of input makes one partition of a state folder say, on the CPU.

    Args:
        state: the folder.
        manifest: its manifest.
        partition: which partition.
        version: the number of micro-batches it holds.
    """
    command = ApplyCommand(
        "finish", state, manifest.description, manifest.query_id, version, partition, manifest.partitions, "cpu",
        Wire("", "", ()), {},
    )  # fmt: skip
    return PartitionState(command).left_over(version)
