"""Marks rows with the task attempt that writes them, and finds the attempts that Spark accepted.

Spark runs a task again whose executor is lost, whose answer is, or that is slow (speculation); what an attempt has
written elsewhere stays there. So each attempt marks its rows with a random number, and tells the driver the number in
an accumulator: Spark adds what an accumulator was given once for each partition of a job, that of the attempt it took.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark import Accumulator, AccumulatorParam, SparkContext
from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.spark.tasks.arrow import ArrowTask

_BITS: Final = 63


class _Union(AccumulatorParam[dict[int, int]]):  # type: ignore[misc]
    """Accumulator of the number of rows of each attempt, by its mark."""

    def zero(self, value: dict[int, int]) -> dict[int, int]:
        return {}

    def addInPlace(self, value1: dict[int, int], value2: dict[int, int]) -> dict[int, int]:  # noqa: N802
        value1.update(value2)
        return value1


class Marks:
    """The marks of one writer's jobs, which it runs one after the other."""

    def __init__(self) -> None:
        self._context: SparkContext | None = None
        self._attempts: Accumulator[dict[int, int]] | None = None

    def marked(self, df: DataFrame, column: str) -> DataFrame:
        """Adds the mark of the attempt that makes a row as its last column.

        Their next job has to compute them in its last stage, as a writer does that writes them as they come.

        Args:
            df: the rows.
            column: the name of the mark's column.
        """
        context = df.sparkSession.sparkContext
        if self._attempts is None or self._context is not context:
            # one for all jobs: Python keeps each until the driver ends
            self._context, self._attempts = context, context.accumulator({}, _Union())
        self._attempts.value = {}
        schema = st.StructType([*df.schema, st.StructField(column, st.LongType())])
        plain = df.toDF(*(f"c{n}" for n in range(len(df.columns))))  # Spark looks columns up as if names had no dots
        return plain.mapInArrow(_Marker(self._attempts, schema.names), schema)

    def counted(self) -> dict[int, int]:
        """The number of rows that each accepted attempt has marked, once the job is done."""
        return {} if self._attempts is None else dict(self._attempts.value)


class _Marker(ArrowTask):
    """Function for ``mapInArrow`` that adds the mark of this attempt to rows."""

    __name__ = "gpu_ops_marks"

    def __init__(self, attempts: Accumulator[dict[int, int]], names: list[str]) -> None:
        self._attempts, self._names = attempts, names

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mark, rows = secrets.randbits(_BITS), 0
        for batch in batches:
            rows += batch.num_rows
            marks = pa.repeat(pa.scalar(mark, pa.int64()), batch.num_rows)
            yield pa.RecordBatch.from_arrays([*batch.columns, marks], names=self._names)
        if rows:
            self._attempts.add({mark: rows})
