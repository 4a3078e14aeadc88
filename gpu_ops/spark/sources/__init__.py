"""Streams that Arrow reads, and how their rows travel."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.query.catalyst import frame_of
from gpu_ops.spark.driver.queries import function_of, metadata_of
from gpu_ops.spark.tasks.messages import ReadMessages
from gpu_ops.spark.tasks.packing import Packer, ReadFiles
from gpu_ops.spark.tasks.rows import Taken

ARROW: Final = "gpu_ops.arrow"
"""In the metadata of files or messages: the function above them, which alone sees that column, makes their rows."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows of files or messages.

    Attributes:
        frame: the files or messages, as the function that reads them is given them.
        reader: that function.
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
        """Of the rows."""
        return self.reader.output

    def packed(self, packer: Packer, taken: Taken, packed_type: st.StructType) -> DataFrame:
        """The rows as they travel; see `gpu_ops.spark.plan.build`."""
        return self.listed.mapInArrow(self.reader.packing(packer, taken), packed_type)


def source(node: Any, session: SparkSession) -> Source | None:
    """The files or messages that a node of a plan reads, or None."""
    below = node.children().head()
    if metadata_of(below, ARROW) is None:
        return None
    reader = function_of(node, session)
    if not isinstance(reader, ReadFiles | ReadMessages):
        return None
    frame = frame_of(session, below)
    spread = str(below.nodeName()) == "RepartitionByExpression"
    return Source(frame, reader, frame_of(session, below.children().head()) if spread else frame)
