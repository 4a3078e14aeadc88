"""Which rows a join reads itself: those of files and messages, as they are, filtered, columns left out or moved."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as st

from gpu_ops.files.row_filter import Taken
from gpu_ops.spark.plan.recognition import MAPS, JoinPlan, analyzed, children_of, metadata_of
from gpu_ops.spark.plan.selection import selection
from gpu_ops.spark.sources import files, kafka
from gpu_ops.spark.sources.packing import Packer


class Source(Protocol):
    """Rows that are Arrow's from the start; as text it is what `explain()` says of it."""

    @property
    def schema(self) -> pa.Schema:
        """Of the rows."""

    def packed(self, packer: Packer, taken: Taken, packed_type: st.StructType) -> DataFrame:
        """What is taken of the rows, as they travel; see `gpu_ops.spark.sources.packed_plan`."""


class Reading(NamedTuple):
    """What is read of a source.

    Attributes:
        source: the files or messages.
        taken: of their rows, by the numbers of the columns.
    """

    source: Source
    taken: Taken

    @property
    def columns(self) -> tuple[str, ...]:
        """For each column of the DataFrame the one of the source."""
        return tuple(self.source.schema.names[number] for number in self.taken.columns)

    @property
    def tested(self) -> tuple[str, ...]:
        """Those that rows are filtered by."""
        return tuple(self.source.schema.names[number] for number in self.taken.tested)

    def __str__(self) -> str:
        by = ", ".join(dict.fromkeys(self.tested))
        return f"{self.source}, filtered by {by}" if self.taken.conditions else str(self.source)


def source_of(df: DataFrame) -> Reading | None:
    """The files or messages whose rows a DataFrame is, filtered, columns left out, moved or renamed; None otherwise."""
    if _join_first(analyzed(df)):
        return None
    found = selection(df, lambda node: str(node.nodeName()) in MAPS)
    if isinstance(found, str):
        return None
    session = df.sparkSession
    source = files.source(found.node, session) or kafka.source(found.node, session)
    return None if source is None else Reading(source, found.taken)


def _join_first(node: Any) -> bool:
    """Whether the nearest rows that are made below a node are a join's: then its columns need not be looked at."""
    while str(node.nodeName()) not in MAPS:
        below = node.children()
        if below.length() != 1:
            return False
        node = below.head()
    return JoinPlan.of(node) is not None


def holds_sources(node: Any) -> bool:
    """Whether a plan's rows come from files or messages that Arrow reads, and from no join of this pack."""
    below = children_of(node)
    if str(node.nodeName()) in MAPS:
        if any(metadata_of(below[0], key) is not None for key in (files.FILES, kafka.MESSAGES)):
            return True
        if JoinPlan.of(node) is not None:
            return False
    return any(map(holds_sources, below))
