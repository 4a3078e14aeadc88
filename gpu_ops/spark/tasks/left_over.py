"""The rows that the end of input emits for the partitions of a state folder; runs in Spark tasks, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from gpu_ops.descriptions.description import Description
from gpu_ops.spark.exchange.command import parse_join
from gpu_ops.spark.servers.partition import stored_state
from gpu_ops.spark.tasks.arrow import arrow_task
from gpu_ops.state.address import Location, StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest

ROWS_PER_BATCH: Final = 1 << 16

Function = Callable[[Any, pa.Table], pa.Table]
"""What makes a co-group's result of a part, see `gpu_ops.spark.api.functions.Grouped`."""


class LeftOver:
    """The function of ``mapInArrow``: numbers of partitions in, the rows they emit at the end of input out.

    Args:
        state: the state folder.
        manifest: its manifest.
        version: the number of micro-batches it holds.
        function: of a co-group, else None.
    """

    __name__ = "gpu_join_left_over"

    def __init__(self, state: StateAddress, manifest: Manifest, version: int, function: Function | None = None) -> None:
        self._state, self._manifest, self._version, self._function = state, manifest, version, function
        self._paths = program_paths()

    @arrow_task
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the changelog of each partition named, or what a co-group's function makes of it.

        Raises:
            StateError: the folder does not hold the version.
        """
        look_in(self._paths)
        described = parse_join(self._manifest.description)
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                for part in left_over(self._state, self._manifest, partition, self._version):
                    yield from grouped(described, self._function, part)


def program_paths() -> tuple[str, ...]:
    """Where this process looks for modules: a description may name an aggregate function that is beside the program."""
    return tuple(filter(None, sys.path))


def look_in(paths: Iterable[str]) -> None:
    """Looks for modules there, too, after all else."""
    sys.path.extend(path for path in paths if path not in sys.path)


def grouped(described: Description, function: Function | None, part: pa.Table) -> Iterator[pa.RecordBatch]:
    """A part, or what a co-group's function makes of it; of one without rows nothing."""
    if part.num_rows:
        made = part if function is None else function(described, part)
        yield from made.to_batches(max_chunksize=ROWS_PER_BATCH)


def left_over(state: Location, manifest: Manifest, partition: int, version: int) -> Iterator[pa.Table]:
    """The rows that the end of input emits for one partition of a state folder, part by part, on the CPU.

    Args:
        state: the folder.
        manifest: its manifest.
        partition: which partition.
        version: the number of micro-batches it holds.
    """
    yield from stored_state(Files.at(state), manifest, partition).left_over(version)
