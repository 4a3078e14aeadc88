"""Functions of ``mapInArrow`` that make something else of rows: of Spark's, or of changes before they are that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self

import pyarrow as pa

from gpu_ops.spark.exchange.arrivals import typed
from gpu_ops.spark.metrics.metrics import METRICS_TYPE
from gpu_ops.spark.tasks.arrow import arrow_task
from gpu_ops.spark.tasks.join import Task
from gpu_ops.spark.tasks.taken import Taken


class Maker(Protocol):
    """What is made of the rows of a task: packed ones, files, aggregates."""

    @property
    def schema(self) -> pa.Schema:
        """Of the rows that it takes."""

    @property
    def made(self) -> pa.Schema:
        """Of what it makes."""

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What it makes of them."""

    def _replace(self, *, schema: Any = ...) -> Self:
        """The same of rows of another schema."""


class OfRows:
    """Of Spark's rows.

    Args:
        name: how Spark shows it in plans.
        maker: makes it.
    """

    def __init__(self, name: str, maker: Maker) -> None:
        self.__name__ = name
        self._maker = maker

    @arrow_task
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives what is made of a partition's rows."""
        yield from self._maker.of(typed(batch, self._maker.schema) for batch in batches)


class OfChanges:
    """Of a join's changes; its metrics go with that as they do with changes.

    Args:
        task: gives the changes.
        taken: what is taken of them.
        maker: makes it.
    """

    def __init__(self, task: Task, taken: Taken, maker: Maker) -> None:
        self.__name__ = task.__name__
        self.task, self._taken, self._maker = task, taken, maker

    @arrow_task
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives what is made of a partition's changes; where its task has a row of metrics, that, too."""
        hidden, metrics, maker = self.task.hidden, list[pa.RecordBatch](), self._maker
        made = maker.of(self._changes(batches, metrics))
        if hidden is None:
            yield from made
            return
        schema = maker.made.append(pa.field(hidden, METRICS_TYPE))
        for rows in made:
            yield pa.RecordBatch.from_arrays([*rows.columns, pa.nulls(rows.num_rows, METRICS_TYPE)], schema=schema)
        for row in metrics:
            nothing = [pa.nulls(row.num_rows, kind) for kind in maker.made.types]
            yield pa.RecordBatch.from_arrays([*nothing, row.column(row.num_columns - 1)], schema=schema)

    def _changes(self, batches: Iterator[pa.RecordBatch], metrics: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The changes as they are taken; the row with metrics is put into a list."""
        for batch in self.task(batches):
            if self.task.hidden is not None and not batch.column(batch.num_columns - 1).null_count:
                metrics.append(batch)
            else:
                yield self._taken.of(batch, self._maker.schema)
