"""Operators that run in Spark's tasks themselves, on the CPU: over static inputs, at the end of input, for lookups."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.join import LookupJoin
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from gpu_ops.kernels import Probe
from gpu_ops.memory import Budget
from gpu_ops.operator_engine import OperatorEngine
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.tasks.arrow import ArrowTask, together
from gpu_ops.spark.tasks.functions import as_declared
from gpu_ops.spark.wire.command import Wire, parse_join
from gpu_ops.state.address import Location, StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from gpu_ops.values import typed

_log = logging.getLogger(__name__)

ROWS_PER_BATCH: Final = 1 << 16

CoGroupFunction = Callable[[Any, pa.Table], pa.Table]
"""Computes a co-group's result from a part of its rows, see `gpu_ops.spark.tasks.functions.CoGroupTask`."""


class ForEachNumber(ArrowTask):
    """Function for ``mapInArrow``: takes numbers, as of partitions, and yields the rows that are made of each.

    Args:
        name: the function's name in Spark's plans.
        made_of: makes the rows of a number; None where it only does something.
    """

    def __init__(self, name: str, made_of: Callable[[int], Iterable[pa.Table | pa.RecordBatch] | None]) -> None:
        self.__name__, self._made_of, self._paths = name, made_of, program_paths()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of each number."""
        look_in(self._paths)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in self._made_of(number) or ():
                    yield from rows.to_batches(max_chunksize=ROWS_PER_BATCH) if isinstance(rows, pa.Table) else (rows,)


def program_paths() -> tuple[str, ...]:
    """The folders in which this process looks for modules, as a description may name a user's aggregate function."""
    return tuple(filter(None, sys.path))


def look_in(paths: Iterable[str]) -> None:
    """Adds folders to the end of this process's module search path."""
    sys.path.extend(path for path in paths if path not in sys.path)


def grouped(described: Description, function: CoGroupFunction | None, parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yields parts, or the results of a co-group's function for them; nothing for a part without rows."""
    for part in parts:
        if part.num_rows:
            yield part if function is None else function(described, part)


def left_over(state: Location, manifest: Manifest, partition: int, version: int) -> Iterator[pa.Table]:
    """Yields the rows that the end of input emits for one partition of a state folder, part by part, on the CPU.

    Args:
        state: the folder.
        manifest: the folder's manifest.
        partition: the partition's number.
        version: the number of micro-batches it holds.
    """
    yield from stored_state(Files.at(state), manifest, partition).left_over(version)


def result_left(
    state: StateAddress, manifest: Manifest, version: int, function: CoGroupFunction | None, partition: int
) -> Iterator[pa.Table]:
    """Yields what is `left_over`, or the result of a co-group's function for it; arguments as there."""
    return grouped(parse_join(manifest.description), function, left_over(state, manifest, partition, version))


NO_INPUT: Final = 63
"""The input number, beyond an aggregate's one input, of a row that exists only so that a task runs."""

ROWS_AT_ONCE: Final = 1 << 17
"""The number of rows that the engine processes at a time; Spark's batches may be much smaller."""

IN_MEMORY: Final = 1 << 30
"""Bytes of input that a task keeps in host memory; further rows go to disk until the end."""


class BoundedTask(ArrowTask):
    """Function for ``mapInArrow``: takes all rows of a partition, yields the result as insertions.

    Args:
        name: the function's name in Spark's plans.
        description: the description as JSON; it emits at the end.
        wire: the layout of the rows.
        schema: the schema of side, sequence and union columns.
        backend: ``"cpu"`` or ``"gpu"``.
        probe: the way in which a GPU finds matching rows, see `gpu_ops.kernels.Probe`.
        function: the function of a co-group, else None.
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
        function: CoGroupFunction | None = None,
    ) -> None:
        self.__name__ = name
        self._description, self._wire, self._schema = description, wire, schema
        self._backend, self._probe, self._function = backend, probe, function
        self._paths = program_paths()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields bad rows that are to be tagged, then the result."""
        look_in(self._paths)
        join = parse_join(self._description)
        engine = OperatorEngine(join, self._backend, memory_limit=Budget(host=IN_MEMORY), probe=self._probe)
        try:
            sent = (self._to_wire(batch, len(join.inputs)) for batch in batches)
            there = (batch for batch in sent if batch.num_rows)
            for some in together(there, lambda batch: batch.num_rows, ROWS_AT_ONCE):
                rows = self._wire.split(join, self._ordered(some))
                yield from engine.process_batches(rows.tables, rows.sequences).to_batches()
            for part in grouped(join, self._function, engine.finish_parts()):
                yield from part.to_batches(max_chunksize=ROWS_PER_BATCH)
        finally:
            engine.close()

    def _to_wire(self, batch: pa.RecordBatch, inputs: int) -> pa.RecordBatch:
        sequence = pa.array(np.zeros(batch.num_rows, np.int64))  # numbered when the batches are put together
        columns = [batch.column(0), sequence, *batch.columns[1 : len(self._schema) - 1]]  # without what ordered them
        made = typed(columns, self._schema)
        there = batch.column(0).to_numpy() < inputs
        return made if there.all() else made.filter(pa.array(there))

    def _ordered(self, batches: list[pa.RecordBatch]) -> pa.Table:
        table = pa.Table.from_batches(batches, self._schema)
        return table.set_column(1, self._schema.field(1), pa.array(np.arange(table.num_rows)))


# --- lookups --------------------------------------------------------------------------------------

_AT: Final = "__at"
_FIRST_WAIT_S: Final = 0.1

LookupFunction = Callable[[pa.Table], pa.Table]
"""Takes keys, and returns the rows of the table that have one of them."""


class Lookups(NamedTuple):
    """The settings of a lookup function: cache and retries.

    Attributes:
        function: the user's function.
        cache_s: seconds for which an answer is good, 0 for none beyond the micro-batch.
        cache_keys: the number of keys whose answers a worker keeps, the newest.
        retries: the number of times that a failing call is repeated.
    """

    function: LookupFunction
    cache_s: float
    cache_keys: int
    retries: int


class LookupTask(ArrowTask):
    """Function for ``mapInArrow``: takes left rows, yields the changelog of a lookup join.

    Args:
        description: the join as JSON.
        lookups: the settings of the lookup function.
        token: an id of the join, by which a worker finds its cache again.
    """

    def __init__(self, description: str, lookups: Lookups, token: str) -> None:
        self.__name__ = "gpu_lookup"
        self._description, self._lookups, self._token = description, lookups, token

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the left rows joined with the rows that the function returns for their keys."""
        described = from_json(self._description)
        assert isinstance(described, LookupJoin)
        schema = described.left.schema
        rows = [pa.RecordBatch.from_arrays(batch.columns, schema.names) for batch in batches if batch.num_rows]
        if not rows:
            return
        left = pa.Table.from_batches(rows).cast(schema)
        cache = _caches.setdefault(self._token, _Cache(described, self._lookups))
        with contextlib.closing(OperatorEngine(described, "cpu")) as engine:
            yield from engine.process_batches([left, cache.rows_of(left)], [None, None]).to_batches()


class _Cache:
    """A cache of the keys that were looked up lately, and their rows.

    Args:
        join: the description of the join.
        lookups: the settings of the lookup function.
    """

    def __init__(self, join: LookupJoin, lookups: Lookups) -> None:
        self._lookups, self._schema = lookups, join.right.schema
        self._left, self._right = list(join.key_columns(0)), list(join.key_columns(1))
        keys = pa.schema([self._schema.field(name) for name in self._right])
        self._keys = keys
        self._asked = keys.append(pa.field(_AT, pa.float64())).empty_table()
        self._found = self._schema.empty_table()

    def rows_of(self, left: pa.Table) -> pa.Table:
        """The table's rows with the keys of some left rows, perhaps among others."""
        now, names = time.monotonic(), self._right
        wanted = left.select(self._left).rename_columns(names).drop_null().cast(self._keys)
        wanted = wanted.group_by(names).aggregate([]).select(names)
        self._forget(now)
        missing = wanted.join(self._asked.select(names), names, join_type="left anti")
        if missing.num_rows:
            asked = missing.append_column(_AT, pa.array([now]).take(pa.array([0] * missing.num_rows)))
            self._found = pa.concat_tables([self._found, self._ask(missing)])
            self._asked = pa.concat_tables([self._asked, asked.select(self._asked.column_names)])
        return self._found

    def _forget(self, now: float) -> None:
        """Drops answers that are too old, and the oldest of too many."""
        fresh = self._asked.filter(pc.greater(self._asked[_AT], now - self._lookups.cache_s))
        fresh = fresh.slice(max(0, fresh.num_rows - self._lookups.cache_keys))
        if fresh.num_rows < self._asked.num_rows:
            self._asked = fresh
            self._found = self._of(self._found, fresh)

    def _ask(self, keys: pa.Table) -> pa.Table:
        function, wait = self._lookups.function, _FIRST_WAIT_S
        who = f"lookup function {getattr(function, '__name__', type(function).__name__)}"
        for attempt in range(self._lookups.retries + 1):
            try:
                made = function(keys)
                break
            except Exception as error:
                if attempt == self._lookups.retries:
                    raise
                _log.warning("%s failed, and is called again in %.1f s: %s", who, wait, error)
                time.sleep(wait)
                wait *= 2
        if not isinstance(made, pa.Table):
            raise DescriptionError(f"{who} gives a table, not {type(made).__name__}")
        found = pa.Table.from_arrays(as_declared(who, made, self._schema), schema=self._schema)
        return self._of(found, keys)  # rows of other keys may be there already, or come again

    def _of(self, rows: pa.Table, keys: pa.Table) -> pa.Table:
        """Filters rows to those with one of some keys, in their order."""
        places = rows.select(self._right).append_column(_AT, pa.array(range(rows.num_rows), pa.int64()))
        kept = places.join(keys.select(self._right), self._right, join_type="left semi")
        return rows.take(kept[_AT].combine_chunks().sort())


_caches: dict[str, _Cache] = {}
"""The caches of this worker process, by the join's token."""
