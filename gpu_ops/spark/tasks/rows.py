"""Filters, projections and aggregations that a task applies to Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.descriptions.projection import Projection
from gpu_ops.operators.core.projection import project
from gpu_ops.operators.groups.top import FirstOfGroup
from gpu_ops.spark.tasks.arrow import ArrowTask, together
from gpu_ops.values import typed

_MOST_BYTES: Final = 1 << 28
"""Bytes of rows that are processed together, which have to be in memory at once."""


def first_of_groups(wanted: FirstOfGroup, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the rows that may be among the first of their groups, in their order."""
    for some in together(batches, lambda batch: batch.nbytes, _MOST_BYTES):
        kept, start = wanted.among(pa.Table.from_batches(some)), 0
        for batch in some:  # nothing is copied but what is kept
            chosen = batch.filter(pa.array(kept[start : start + batch.num_rows]))
            start += batch.num_rows
            if chosen.num_rows:
                yield chosen


_MOST_ROWS: Final = 1 << 20
"""Rows that are grouped together; their groups have to be in memory at once."""


class Slices(NamedTuple):
    """Aggregates rows by window and group, in slices that overlapping windows share.

    Attributes:
        time: the time column, a timestamp of microseconds.
        size: the size of a window in microseconds, a multiple of ``slide``.
        slide: the distance from one window's start to the next one's, and the width of a slice.
        offset: the start of a window, in microseconds since the epoch.
        by: the group columns; for a bound of the window 0 (its start) or 1 (its end), for any other column None.
        calls: for each aggregate its function (count, sum of integers, min, max) and its column; None for ``count(*)``.
        schema: the schema of the rows.
        output_schema: the schema of the result: the group columns, then the aggregates.
    """

    time: str
    size: int
    slide: int
    offset: int
    by: tuple[tuple[str, int | None], ...]
    calls: tuple[tuple[str, str | None], ...]
    schema: pa.Schema
    output_schema: pa.Schema

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the groups of windows; a group comes several times if it has several slices, or very many rows."""
        for some in together(batches, lambda batch: batch.num_rows, _MOST_ROWS):
            yield from self._grouped(some)

    def _grouped(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches(batches)
        groups = {name: rows[name] for name, place in self.by if place is None}
        columns, calls = [self._starts(rows[self.time].combine_chunks()), *groups.values()], []
        names = [f"by_{number}" for number in range(len(columns))]
        aggregations: list[tuple[str | list[str], str]] = []
        for number, (function, column) in enumerate(self.calls):
            if column is None:
                aggregations.append(([], "count_all"))
                calls.append("count_all")
                continue
            columns.append(rows[column].cast(pa.int64(), safe=False) if function == "sum" else rows[column])
            names.append(f"of_{number}")
            aggregations.append((names[-1], function))
            calls.append(f"of_{number}_{function}")
        totals = pa.table(columns, names).group_by(names[: len(groups) + 1], use_threads=False).aggregate(aggregations)
        totals = totals.combine_chunks()
        known = dict(zip(groups, names[1:], strict=False))
        last = totals["by_0"]
        for number in range(self.size // self.slide):
            start = pc.subtract(last, pa.scalar(number * self.slide, pa.duration("us")))
            ends = start, pc.add(start, pa.scalar(self.size, pa.duration("us")))
            columns_of_window = [*(totals[known[name]] if place is None else ends[place] for name, place in self.by)]
            columns_of_window += [totals[name] for name in calls]
            arrays = [
                column.cast(kind) for column, kind in zip(columns_of_window, self.output_schema.types, strict=True)
            ]
            yield from pa.Table.from_arrays(arrays, schema=self.output_schema).to_batches()

    def _starts(self, times: pa.Array) -> pa.Array:
        """The starts of the slices of times; null stays null."""
        us = times.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        starts = us - np.mod(us - self.offset, self.slide)
        return pa.array(starts, mask=times.is_null().to_numpy(zero_copy_only=False)).view(times.type)


def encode_projected(
    rows: Iterable[pa.RecordBatch], projection: Projection, encoder: Encoder
) -> Iterator[pa.RecordBatch]:
    """Filters and projects batches, and encodes what is left."""
    return encoder.of(project(projection, batch, encoder.schema) for batch in rows)


class Encoder(Protocol):
    """Protocol of an encoder of a task's rows: as packed rows, files, messages or aggregates."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows that it takes."""

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of its result."""

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the encoded rows."""

    def _replace(self, *, schema: Any = ...) -> Self:
        """A copy for rows of another schema."""


class StructColumn(NamedTuple):
    """Puts rows into the struct column of one of several outputs; the columns of the others are null.

    Attributes:
        name: the output.
        schema: the schema of the rows.
        output_schema: a struct column for each output.
    """

    name: str
    schema: pa.Schema
    output_schema: pa.Schema

    def of(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows as structs."""
        for batch in rows:
            struct = pa.StructArray.from_arrays(batch.columns, fields=list(self.schema))
            columns = [
                struct if field.name == self.name else pa.nulls(batch.num_rows, field.type)
                for field in self.output_schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.output_schema)


class EncodeRows(ArrowTask):
    """Function for ``mapInArrow`` that encodes Spark's rows.

    Args:
        name: the function's name in Spark's plans.
        encoder: encodes the rows.
    """

    def __init__(self, name: str, encoder: Encoder) -> None:
        self.__name__ = name
        self._encoder = encoder

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the encoded rows of a partition."""
        yield from self._encoder.of(typed(batch.columns, self._encoder.schema) for batch in batches)
