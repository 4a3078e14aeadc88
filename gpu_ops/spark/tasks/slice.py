"""Rows of a task aggregated by slices of time before they are shuffled, see `gpu_ops.query.groups.slices`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.spark.tasks.arrow import together

_MOST_ROWS: Final = 1 << 20
"""So many are grouped together: what is left of them has to be in memory at once."""


class Slices(NamedTuple):
    """How rows are aggregated.

    Attributes:
        time: the column, a timestamp of microseconds.
        size: of a window, in microseconds; a multiple of the next.
        slide: from one window's start to the next one's, and the width of a slice.
        offset: a window's start, in microseconds since the epoch.
        by: group columns, and for one that is made of a window which end of it: 0 for its start, 1 for its end.
        calls: for each aggregate its function (count, sum of integers, min, max) and its column; None for ``count(*)``.
        schema: of the rows.
        made: of the result: the group columns, then the aggregates.
    """

    time: str
    size: int
    slide: int
    offset: int
    by: tuple[tuple[str, int | None], ...]
    calls: tuple[tuple[str, str | None], ...]
    schema: pa.Schema
    made: pa.Schema

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows to groups of windows; one comes again for each of its slices, and where there are many rows."""
        for some in together(batches, lambda batch: batch.num_rows, _MOST_ROWS):
            yield from self._grouped(some)

    def _grouped(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches(batches)
        groups = {name: rows[name] for name, place in self.by if place is None}
        columns, calls = [self._starts(rows[self.time].combine_chunks()), *groups.values()], []
        names = [f"by_{number}" for number in range(len(columns))]
        given: list[tuple[str | list[str], str]] = []
        for number, (function, column) in enumerate(self.calls):
            if column is None:
                given.append(([], "count_all"))
                calls.append("count_all")
                continue
            columns.append(rows[column].cast(pa.int64(), safe=False) if function == "sum" else rows[column])
            names.append(f"of_{number}")
            given.append((names[-1], function))
            calls.append(f"of_{number}_{function}")
        found = pa.table(columns, names).group_by(names[: len(groups) + 1], use_threads=False).aggregate(given)
        found = found.combine_chunks()
        known = dict(zip(groups, names[1:], strict=False))
        last = found["by_0"]
        for number in range(self.size // self.slide):
            start = pc.subtract(last, pa.scalar(number * self.slide, pa.duration("us")))
            ends = start, pc.add(start, pa.scalar(self.size, pa.duration("us")))
            made = [*(found[known[name]] if place is None else ends[place] for name, place in self.by)]
            made += [found[name] for name in calls]
            arrays = [column.cast(kind) for column, kind in zip(made, self.made.types, strict=True)]
            yield from pa.Table.from_arrays(arrays, schema=self.made).to_batches()

    def _starts(self, times: pa.Array) -> pa.Array:
        """The starts of slices; null stays null."""
        us = times.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        starts = us - np.mod(us - self.offset, self.slide)
        return pa.array(starts, mask=times.is_null().to_numpy(zero_copy_only=False)).view(times.type)
