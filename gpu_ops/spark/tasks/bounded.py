"""The rows that the end of input emits for the partitions of a state folder; runs in Spark tasks, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Description
from gpu_ops.join_engine import JoinEngine
from gpu_ops.kernels import Probe
from gpu_ops.memory import Budget
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.tasks.arrow import arrow_task, together
from gpu_ops.spark.wire.arrivals import typed
from gpu_ops.spark.wire.command import Wire, parse_join
from gpu_ops.state.address import Location, StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest

ROWS_PER_BATCH: Final = 1 << 16

Function = Callable[[Any, pa.Table], pa.Table]
"""What makes a co-group's result of a part, see `gpu_ops.spark.tasks.functions.Grouped`."""


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


NO_INPUT: Final = 63
"""A number beyond an aggregate's one input: of a row that is only there so that a task runs."""

ROWS_AT_ONCE: Final = 1 << 17
"""Rows given to the engine in one go; Spark's batches may be much smaller."""

IN_MEMORY: Final = 1 << 30
"""Bytes of input that a task keeps in host memory; what is more goes to disk until the end."""


class BoundedTask:
    """The function of ``mapInArrow``: all rows of a partition in, the result as insertions out.

    Args:
        name: how Spark shows it in plans.
        description: as its `to_json` writes it; it emits at the end.
        wire: the mapping of the lanes.
        schema: of side, order and lanes.
        backend: ``"cpu"`` or ``"gpu"``.
        probe: how a GPU finds matching rows, see `gpu_ops.kernels.Probe`.
        function: of a co-group, else None.
    """

    def __init__(
        self,
        name: str,
        description: str,
        wire: Wire,
        schema: pa.Schema,
        *,
        backend: Backend,
        probe: Probe,
        function: Function | None = None,
    ) -> None:
        self.__name__ = name
        self._description, self._wire, self._schema = description, wire, schema
        self._backend, self._probe, self._function = backend, probe, function
        self._paths = program_paths()

    @arrow_task
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives bad rows that are to be tagged, then the result."""
        look_in(self._paths)
        join = parse_join(self._description)
        engine = JoinEngine(join, self._backend, memory_limit=Budget(host=IN_MEMORY), probe=self._probe)
        try:
            sent = (self._to_wire(batch, len(join.inputs)) for batch in batches)
            there = (batch for batch in sent if batch.num_rows)
            for some in together(there, lambda batch: batch.num_rows, ROWS_AT_ONCE):
                rows = self._wire.split(join, self._ordered(some))
                yield from engine.process(*rows.tables, orders=rows.orders).to_batches()
            for part in engine.finish_parts():
                yield from grouped(join, self._function, part)
        finally:
            engine.close()

    def _to_wire(self, batch: pa.RecordBatch, inputs: int) -> pa.RecordBatch:
        order = pa.array(np.zeros(batch.num_rows, np.int64))  # numbered when the batches are put together
        columns = [batch.column(0), order, *batch.columns[1 : len(self._schema) - 1]]  # without what ordered them
        made = typed(columns, self._schema)
        there = batch.column(0).to_numpy() < inputs
        return made if there.all() else made.filter(pa.array(there))

    def _ordered(self, batches: list[pa.RecordBatch]) -> pa.Table:
        table = pa.Table.from_batches(batches, self._schema)
        return table.set_column(1, self._schema.field(1), pa.array(np.arange(table.num_rows)))
