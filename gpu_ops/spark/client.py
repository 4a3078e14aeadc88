"""What runs in a Spark task: one exchange with the state server that owns the task's partition."""

from __future__ import annotations

import gc
import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops import errors
from gpu_ops.spark.exchange import Address, Exchange, ask
from gpu_ops.spark.metrics import METRICS_COLUMN, METRICS_TYPE, pack

#: order = number of the input, then partition of the source, then arrival: 6 + 24 + 33 bits.
_SIDE_SHIFT: Final = 57
_PART_SHIFT: Final = 33


#: A row's origin, from the lowest bits: the number of its input, ...
INPUT_BITS: Final = 6

#: ... the partition the shuffle sends it to, and above that the partition of its source.
PARTITION_BITS: Final = 24


class Place(NamedTuple):
    """Which micro-batch of which query, and which task of its stage.

    Attributes:
        query_id: Spark's id of the query.
        run_id: of the query's run.
        batch_id: the micro-batch.
        task: the task's number within its stage.
        attempt: Spark's id of the task attempt.
    """

    query_id: str
    run_id: str
    batch_id: int
    task: int
    attempt: int


class Task:
    """The function of ``mapInArrow``: wire batches in, the changelog with hidden metrics out.

    Args:
        name: how Spark shows it in plans.
        command: the exchange's command without query, batch and partition.
        directory: whom to ask for the server.
        wire: the schema of side, order and lanes.
        output: the changelog's schema.
        metrics: the names of what is counted, see `gpu_ops.spark.metrics.metric_names`.
        stamped: whether rows bring the `gpu_ops.spark.lanes.STAMP` to be ordered by.
        reports: whether the directory is told the latest event times afterwards.
        place: tells micro-batch and partition; by default Spark's task context does.
    """

    def __init__(
        self,
        name: str,
        command: Mapping[str, Any],
        directory: Address,
        wire: pa.Schema,
        output: pa.Schema,
        *,
        metrics: Sequence[str] = (),
        stamped: bool = False,
        reports: bool = False,
        place: Callable[[], Place] | None = None,
    ) -> None:
        self.__name__ = name
        self._command, self._directory, self._stamped = dict(command), directory, stamped
        self._wire, self._output, self._place, self._reports = wire, output, place, reports
        self._metrics = tuple(metrics)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the partition's changes, then one row with its metrics."""
        if not gc.get_freeze_count():
            # Spark's worker collects garbage after each task; what is imported stays anyway. 45 ms become 15.
            gc.freeze()
        place = self._place() if self._place is not None else task_place()
        join_id = f"{self._command['join_id']}-{place.query_id}"
        partition, batches = self._partition(place, batches)
        evaluation = uuid.uuid4().hex
        command = {
            **self._command,
            "join_id": join_id,
            "query_id": place.query_id,
            "counted": True,
            "batch_id": place.batch_id,
            "partition": partition,
        }

        def locate(failed: str | None) -> Mapping[str, Any]:
            request = {
                "op": "locate",
                "join_id": join_id,
                "state": command["state"],
                "backend": command["backend"],
                "query_id": place.query_id,
                "batch_id": place.batch_id,
                "run_id": place.run_id,
                "partition": partition,
                "attempt": place.attempt,
                "evaluation": evaluation,
                "failed": failed,
                "backlog": bool(command["options"].get("backlog", False)),
            }
            return ask(self._directory, request)

        exchange = Exchange(locate, command, self._wire)
        for rows in exchange.run(self._to_wire(batches)):
            hidden = pa.nulls(rows.num_rows, METRICS_TYPE)
            yield pa.RecordBatch.from_arrays([*rows.columns, hidden], schema=self._schema)
        if self._reports:
            self._report(join_id, place.batch_id, partition, exchange.answer["metrics"])
        yield self._metrics_row(exchange)

    def _report(self, join_id: str, batch_id: int, partition: int, metrics: Mapping[str, Any]) -> None:
        """Tells the directory what the next micro-batch's watermark follows from."""
        request = {
            "op": "report",
            "join_id": join_id,
            "batch_id": batch_id,
            "partition": partition,
            "latest": [metrics.get(f"{side}_max_time_ms") for side in ("left", "right")],
            "rows": [bool(metrics[f"{side}_rows_in"]) for side in ("left", "right")],
        }
        ask(self._directory, request)

    def _partition(self, place: Place, batches: Iterator[pa.RecordBatch]) -> tuple[int, Iterator[pa.RecordBatch]]:
        """The partition this task has, and its batches.

        Rows say it. Without rows it is the task's number modulo the partitions: a join's tasks are
        numbered in one go, so where no partition has rows each is taken once; where one has, its task
        checks that the numbers fit.

        Raises:
            DescriptionError: they do not.
        """
        partitions = int(self._command["partitions"])
        guess = place.task % partitions
        for batch in batches:
            if batch.num_rows:
                found = (int(batch.column(0)[0].as_py()) >> INPUT_BITS) & ((1 << PARTITION_BITS) - 1)
                if found != guess:
                    raise errors.DescriptionError(
                        f"task {place.task} of its stage has partition {found} of {partitions}: the "
                        "changelog is coalesced, or unioned behind other partitions. Put it first in the "
                        "union, and use repartition() instead of coalesce()"
                    )
                return guess, itertools.chain([batch], batches)
        return guess, iter(())

    @property
    def _schema(self) -> pa.Schema:
        return self._output.append(pa.field(METRICS_COLUMN, METRICS_TYPE))

    def _metrics_row(self, exchange: Exchange) -> pa.RecordBatch:
        answer = exchange.answer
        numbers = pack(self._metrics, answer["metrics"], backend=answer["backend"], retries=exchange.retries)
        # The row kind is the one column that is never null; no row kind is empty.
        columns = [pa.array([""]), *(pa.nulls(1, field.type) for field in list(self._output)[1:])]
        return pa.RecordBatch.from_arrays([*columns, pa.array([numbers], METRICS_TYPE)], schema=self._schema)

    def _to_wire(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self._stamped:
            yield from self._sorted(list(batches))
            return
        arrived = 0
        for batch in batches:
            side, part = origins(batch.column(0))
            arrival = np.arange(arrived, arrived + batch.num_rows)
            arrived += batch.num_rows
            order = (side.astype(np.int64) << _SIDE_SHIFT) + (part << _PART_SHIFT) + arrival
            yield self._wire_batch(side, order, batch)

    def _sorted(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not batches:
            return
        sides, parts = zip(*(origins(batch.column(0)) for batch in batches), strict=True)
        stamps = np.concatenate([batch.column(batch.num_columns - 1).to_numpy() for batch in batches])
        sequence = np.lexsort((stamps, np.concatenate(parts), np.concatenate(sides)))
        rank = np.empty(sequence.size, np.int64)
        rank[sequence] = np.arange(sequence.size)
        start = 0
        for side, batch in zip(sides, batches, strict=True):
            order = rank[start : start + batch.num_rows]
            start += batch.num_rows
            yield self._wire_batch(side, order, batch)

    def _wire_batch(
        self, side: npt.NDArray[np.int8], order: npt.NDArray[np.int64], batch: pa.RecordBatch
    ) -> pa.RecordBatch:
        lanes = []
        for place, field in enumerate(list(self._wire)[2:], start=1):
            column = batch.column(place)
            lanes.append(column if column.type == field.type else column.cast(field.type))
        return pa.RecordBatch.from_arrays([pa.array(side), pa.array(order), *lanes], schema=self._wire)


def origins(column: pa.Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
    """Number of the input and source partition of n rows, from their origin."""
    origin = column.to_numpy()
    return (origin & ((1 << INPUT_BITS) - 1)).astype(np.int8), origin >> (INPUT_BITS + PARTITION_BITS)


def task_place() -> Place:
    """Where this Spark task stands, from the local properties that Structured Streaming sets.

    Raises:
        NotBuiltError: it is no task of a streaming query.
    """
    from pyspark import TaskContext  # noqa: PLC0415 - so that tests of the rest need no pyspark

    context = TaskContext.get()
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    if context is None or batch is None or query is None:
        raise errors.NotBuiltError("a join runs in a streaming query; this task belongs to none")
    run = context.getLocalProperty("spark.jobGroup.id") or ""
    return Place(query, run, int(batch), context.partitionId(), context.taskAttemptId())
