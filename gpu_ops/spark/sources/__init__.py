"""Sources whose rows Arrow reads in Spark's tasks: files, Kafka messages, commits of a Delta table."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.descriptions.projection import Projection
from gpu_ops.query.catalyst import frame_of
from gpu_ops.spark.driver.queries import function_of, metadata_of
from gpu_ops.spark.tasks.messages import ReadMessages
from gpu_ops.spark.tasks.packing import Packer, ReadFiles
from gpu_ops.spark.wire.arrivals import PACKED
from gpu_ops.spark_types import spark_type

ARROW: Final = "gpu_ops.arrow"
"""Metadata key of the column of files or messages that the function above reads; only that function sees it."""

PACKED_TYPE: Final = st.StructType([st.StructField(x.name, spark_type(x.type), False) for x in PACKED])
"""The type of packed rows in Spark."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A stream of files or messages, and the function that makes rows of them.

    Attributes:
        frame: the files or messages, as the reader takes them.
        reader: the function that reads their rows.
        listed: the files or messages as Spark gives them: some files twice, whose rows
            `gpu_ops.spark.wire.arrivals.Arrivals` takes once.
    """

    frame: DataFrame
    reader: ReadFiles | ReadMessages
    listed: DataFrame

    def __str__(self) -> str:
        return str(self.reader)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows that the reader makes."""
        return self.reader.output

    def packed(self, packer: Packer, projection: Projection) -> DataFrame:
        """The rows packed for the shuffle; see `gpu_ops.spark.plan.build`."""
        return self.listed.mapInArrow(self.reader.packing(packer, projection), PACKED_TYPE)


def source(node: Any, session: SparkSession) -> Source | None:
    """Finds the source that a node of a plan reads; None if it reads none of ours."""
    below = node.children().head()
    if metadata_of(below, ARROW) is None:
        return None
    reader = function_of(node, session)
    if not isinstance(reader, ReadFiles | ReadMessages):
        return None
    frame = frame_of(session, below)
    spread = str(below.nodeName()) == "RepartitionByExpression"
    return Source(frame, reader, frame_of(session, below.children().head()) if spread else frame)
