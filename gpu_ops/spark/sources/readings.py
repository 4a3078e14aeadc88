"""Which rows a join takes from where Arrow makes them, as they are, filtered, columns left out or moved.

Those of files and messages, and the changes of a join of such: so they never become Spark's rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as st

from gpu_ops.spark.plan.changes import in_place_of, task_of
from gpu_ops.spark.plan.recognition import MAPS, JoinPlan, children_of, metadata_of
from gpu_ops.spark.plan.selection import selection
from gpu_ops.spark.sources import files, kafka
from gpu_ops.spark.sources.packing import Packer
from gpu_ops.spark.tasks.join import Task
from gpu_ops.spark.tasks.made_of import OfChanges
from gpu_ops.spark.tasks.taken import Taken
from gpu_ops.state.manifest import ARROW


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
        taken: of their rows.
    """

    source: Source
    taken: Taken

    def __str__(self) -> str:
        said = [str(self.source)]
        if self.taken.tested:
            said.append(f"filtered by {', '.join(self.taken.tested)}")
        if self.taken.computed:
            said.append(f"computing {', '.join(x.sql for x in self.taken.computed)}")
        return ", ".join(said)


@dataclasses.dataclass(frozen=True)
class Changes:
    """A join's changes, where its tasks make them.

    Attributes:
        node: the join's.
        plan: the join.
        task: its function.
        session: the session.
    """

    node: Any
    plan: JoinPlan
    task: Task
    session: SparkSession

    def __str__(self) -> str:
        return f"changes of '{self.plan.name}'"

    @property
    def schema(self) -> pa.Schema:
        """Of the changes."""
        return self.task.output

    def packed(self, packer: Packer, taken: Taken, packed_type: st.StructType) -> DataFrame:
        """The changes as they travel; see `gpu_ops.spark.sources.packed_plan`."""
        return in_place_of(self.node, self.plan, OfChanges(self.task, taken, packer), packed_type, self.session)


def source_of(df: DataFrame) -> Reading | None:
    """The source of a DataFrame's rows, if these are filtered, columns left out, moved or renamed; None otherwise."""
    found = selection(df, lambda node: str(node.nodeName()) in MAPS)
    if isinstance(found, str):
        return None
    session, plan = df.sparkSession, JoinPlan.of(found.node)
    source: Source | None
    if plan is None:
        source = files.source(found.node, session) or kafka.source(found.node, session)
    else:
        task = task_of(found.node, session) if plan.distribution == ARROW else None
        source = None if task is None else Changes(found.node, plan, task, session)
    return None if source is None else Reading(source, found.taken)


def holds_sources(node: Any) -> bool:
    """Whether a plan's rows come from files or messages that Arrow reads, or from joins of these."""
    below = children_of(node)
    if str(node.nodeName()) in MAPS:
        if any(metadata_of(below[0], key) is not None for key in (files.FILES, kafka.MESSAGES)):
            return True
        plan = JoinPlan.of(node)
        if plan is not None:
            return plan.distribution == ARROW
    return any(map(holds_sources, below))
