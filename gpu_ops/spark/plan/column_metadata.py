"""Facts about a changelog: those in Spark's column metadata, and those that follow from the join in its plan.

Metadata survives filters, projections and ``foreachBatch``; `gpu_ops.side` and the next join read it. In the plan a
join stands below filters and projections, which take some of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from gpu_ops.descriptions.changelog import LATE_ROW_KIND, ROW_KIND_COLUMN
from gpu_ops.descriptions.description import LATER, Description, OutputColumn
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.driver.queries import MAPS, JoinPlan, analyzed, children_of, plans_in
from gpu_ops.spark.failures import data_frame
from gpu_ops.spark_types import named_column

CHANGELOG: Final = "gpu_ops.changelog"
"""Metadata key of the row-kind column; its value is the join's name."""

DELAY: Final = "gpu_ops.watermarkDelayMs"
"""Metadata key of an event-time column: the milliseconds by which a row may be older than the latest one."""

KEY: Final = "gpu_ops.uniqueKey"
"""Metadata key of the row-kind column: the unique key of the changelog, where that is known."""

KEY_COLUMN: Final = "gpu_ops.uniqueKeyColumn"
"""Metadata key of a column of that key: the join's plan id and the column's name, to tell it from others."""

_SPARK_DELAY: Final = "spark.watermarkDelayMs"
_SOURCE: Final = "gpu_ops.watermarkOf"
INPUTS: Final = "gpu_ops.inputs"
"""Metadata key of the row-kind column: the names of the join's inputs."""

OWN_COLUMN: Final = ("gpu_ops.left", "gpu_ops.right")
"""Metadata keys, per side, of a join by time: the input's column that fills this column in a late or unmatched row."""

OWN_TIME: Final = ("gpu_ops.leftTime", "gpu_ops.rightTime")
"""Metadata keys, per side, of the event time: True if the column shows that input's event time alone."""

LATE_SIDES: Final = ("left_late", "right_late")
"""The side outputs of an input's late rows."""

SIDE: Final = "gpu_ops.side"
"""Metadata key of a struct column: the side output whose rows it has."""

OUTPUT: Final = "gpu_ops.output"
"""Metadata key of a struct column of `gpu_ops.outputs`: the metadata of its fields, and how its rows are made."""

ROW_BY_ROW: Final = {
    "Project", "Filter", "SubqueryAlias", "CollectMetrics", "EventTimeWatermark", "ResolvedHint", "UnresolvedHint",
    "View",
}  # fmt: skip
"""Logical nodes that pass each row on at most once, in order."""

_ONE_FOR_ONE: Final = ROW_BY_ROW - {"Filter"}
"""Logical nodes that pass each row on exactly once."""

_SAME_PARTITIONS: Final = ROW_BY_ROW | MAPS | {
    "Generate", "Expand", "Sample", "TypedFilter", "MapElements", "MapPartitions",
    "SerializeFromObject", "DeserializeToObject", "WithCTE",
}  # fmt: skip
"""Logical nodes whose partitions are their child's."""


class Delay(NamedTuple):
    """The watermark delay of an event-time column.

    Attributes:
        ms: the delay in milliseconds.
        plan_id: the plan id of the join by time that made the column, whose watermark is exact; or None.
    """

    ms: int
    plan_id: str | None


def delays(df: DataFrame) -> dict[str, Delay]:
    """The event-time columns of a DataFrame: from ``withWatermark``, or from a join by time."""
    found = {}
    for field in df.schema.fields:
        metadata = field.metadata or {}
        if _SPARK_DELAY in metadata:
            found[field.name] = Delay(int(metadata[_SPARK_DELAY]), None)
        elif DELAY in metadata:
            found[field.name] = Delay(int(metadata[DELAY]), metadata.get(_SOURCE))
    return found


def has_watermarks_of_parts(df: DataFrame) -> bool:
    """True for a union of streams with watermarks of their own, of which Spark takes the smallest, and none above it.

    The metadata of its columns are those of its first part.
    """
    node = analyzed(df)
    while str(node.nodeName()) not in ("EventTimeWatermark", "Union"):
        below = children_of(node)
        if len(below) != 1:
            return False
        (node,) = below
    waiting = children_of(node) if str(node.nodeName()) == "Union" else []
    while waiting:
        node = waiting.pop()
        if str(node.nodeName()) == "EventTimeWatermark":
            return True
        waiting += children_of(node)
    return False


def is_changelog(df: DataFrame) -> bool:
    """True if a DataFrame still has the row-kind column of an operator of this package."""
    return any(x.name == ROW_KIND_COLUMN and CHANGELOG in (x.metadata or {}) for x in df.schema.fields)


def known_key(df: DataFrame, plan_id: str | None = None) -> tuple[str, ...] | None:
    """The unique key of a changelog, if all of its columns are there still under their own names.

    Args:
        df: the changelog of a join, filtered or projected.
        plan_id: the plan id of that join; None for whichever join the key's columns agree on.
    """
    there = {x.name: x.metadata or {} for x in df.schema.fields}
    key = there.get(ROW_KIND_COLUMN, {}).get(KEY)
    if key and plan_id is None:
        plan_id = there.get(key[0], {}).get(KEY_COLUMN, "").removesuffix(f" {key[0]}")
    if key is None or any(there.get(name, {}).get(KEY_COLUMN) != f"{plan_id} {name}" for name in key):
        return None
    return tuple(str(name) for name in key)


def changelog_columns(description: Description, name: str, plan_id: str) -> list[Column]:
    """The changelog's columns, row kind first, with their metadata.

    Args:
        description: the description.
        name: the name of its metrics.
        plan_id: the plan id of the join.
    """
    inputs = [source.name for source in description.inputs]
    of_kind: dict[str, Any] = {CHANGELOG: name, INPUTS: inputs}
    key = description.unique_key
    if key is not None:
        of_kind[KEY] = list(key)
    columns = [f.col(ROW_KIND_COLUMN).alias(ROW_KIND_COLUMN, metadata=of_kind)]
    for column in description.output:
        metadata: dict[str, Any] = _metadata(description, column, plan_id) if description.by_time else {}
        if key is not None and column.name in key:
            metadata[KEY_COLUMN] = f"{plan_id} {column.name}"
        columns.append(
            named_column(column.name).alias(column.name, metadata=metadata) if metadata else named_column(column.name)
        )
    return columns


def _metadata(description: Description, column: OutputColumn, plan_id: str) -> dict[str, Any]:
    """The metadata of one column of the changelog of a join by time."""
    metadata: dict[str, Any] = {}
    times: list[int] = []  # the inputs whose event time it is
    for side, source in enumerate(description.inputs):
        own = description.own_column(side, column)
        if own is not None and column.side != LATER:
            metadata[OWN_COLUMN[side]] = own
        if own is not None and own == source.event_time:
            metadata[OWN_TIME[side]] = column.side != LATER
            times.append(side)
    behind = [description.inputs[side].delay_ms for side in times]
    known = [ms for ms in behind if ms is not None]
    if known and len(known) == len(behind) and description.behind_ms is not None:
        metadata |= {DELAY: max(known) + description.behind_ms, _SOURCE: plan_id}
    return metadata


def side(df: DataFrame, name: str) -> DataFrame:
    """The rows of a side output of a join by time, or of one of `gpu_ops.outputs`, with their own columns.

    Flink: ``getSideOutput(OutputTag)``.

    Args:
        df: the join's changelog or what ``outputs()`` gave, whole or a micro-batch of it in ``foreachBatch``.
        name: ``"left_late"`` or ``"right_late"`` (or an input's name and ``_late``) for late rows with ``late="tag"``,
            or one of ``side_outputs=``; or the name of an output.

    Raises:
        DescriptionError: ``df`` is no changelog of an operator by time and has no outputs, or has no such one.

    Example:
        >>> clicks = spark.createDataFrame([("a", 1_000)], "id STRING, at BIGINT")
        >>> buys = spark.createDataFrame([("a", 1_500)], "id STRING, paid BIGINT")
        >>> joined = gpu_ops.interval_join(
        ...     clicks, buys, "id", time=("at", "paid"), lower=0, upper="1 minute", late="tag"
        ... )
        >>> gpu_ops.side(joined, "left_late").columns
        ['id', 'at']
    """
    known = outputs_of(data_frame(df, "what side() takes"))
    if not known:
        return _rows(df, name, "side()")
    if name not in known:
        raise DescriptionError(f"side(): there is no output {name!r}; there are {', '.join(known)}")
    column, fields = named_column(name), df.schema[name].dataType.fieldNames()
    metadata = zip(fields, known[name]["columns"], strict=True)
    return df.where(column.isNotNull()).select(*(column[x].alias(x, metadata=its) for x, its in metadata))


def outputs_of(df: DataFrame) -> dict[str, Any]:
    """The outputs that a DataFrame has as struct columns, with what their metadata say; see `gpu_ops.outputs`."""
    return {x.name: x.metadata[OUTPUT] for x in df.schema.fields if OUTPUT in (x.metadata or {})}


def late(df: DataFrame, side: str) -> DataFrame:
    """The late rows of an input of a join or aggregate by time with ``late="tag"``: `side` of ``left_late`` and so on.

    Args:
        df: the operator's changelog, whole or a micro-batch of it in ``foreachBatch``.
        side: ``"left"``, ``"right"``, or the input's name (``"input"`` for an aggregate whose input has no name).

    Raises:
        DescriptionError: ``df`` is no changelog of an operator by time, or has no such input.

    Example:
        >>> clicks = spark.createDataFrame([("a", 1_000)], "id STRING, at BIGINT")
        >>> buys = spark.createDataFrame([("a", 1_500)], "id STRING, paid BIGINT")
        >>> joined = gpu_ops.interval_join(
        ...     clicks, buys, "id", time=("at", "paid"), lower=0, upper="1 minute", late="tag"
        ... )
        >>> gpu_ops.late(joined, "right").columns
        ['id', 'paid']
    """
    return _rows(df, f"{side}_late", "late()")


def inputs_metadata(df: DataFrame) -> dict[str, Any]:
    """The metadata of the row-kind column that names the join's inputs; empty if they are not known."""
    metadata = next((x.metadata or {} for x in df.schema.fields if x.name == ROW_KIND_COLUMN), {})
    return {INPUTS: metadata[INPUTS]} if INPUTS in metadata else {}


def late_struct(df: DataFrame, side: int, name: str) -> Column:
    """The late rows of one input of a join by time as a struct column of its changelog, null in other rows."""
    which, columns = _late_columns(df, side, "late='tag'")
    return f.when(which, f.struct(*columns)).alias(name)


def _rows(df: DataFrame, name: str, who: str) -> DataFrame:
    df = data_frame(df, f"what {who} takes")
    structs = {x.metadata[SIDE]: x for x in df.schema.fields if SIDE in (x.metadata or {})}
    inputs: Sequence[str] = inputs_metadata(df).get(INPUTS, ())
    shared = any(OWN_COLUMN[0] in (x.metadata or {}) for x in df.schema.fields)
    if not inputs or not (structs or shared):
        raise DescriptionError(
            f"{who} takes the changelog of an interval, temporal or ASOF join, or an aggregate with late='tag', with "
            f"its column {ROW_KIND_COLUMN!r}"
        )
    late = {f"{x.lower()}_late": number for number, x in enumerate(inputs)}
    late |= {x: number for number, x in enumerate(LATE_SIDES[: len(inputs)])}
    number = late.get(name.lower())
    found = structs.get(name if number is None else LATE_SIDES[number])
    if found is not None:
        rows = df.where(named_column(found.name).isNotNull())
        return rows.select(*(named_column(found.name)[x].alias(x) for x in found.dataType.fieldNames()))
    if number is None or not shared:
        known = [*structs, *(f"{x} ({inputs[n]})" for n, x in enumerate(LATE_SIDES[: len(inputs)]) if shared)]
        raise DescriptionError(f"{who}: there is no side output {name!r}; there are {', '.join(known)}")
    which, columns = _late_columns(df, number, who)
    return df.where(which).select(*columns)


def _late_columns(df: DataFrame, side: int, who: str) -> tuple[Column, list[Column]]:
    """The condition for one input's late rows in a changelog, and that input's columns."""
    fields = [x for x in df.schema.fields if x.metadata]
    time = next((x.name for x in fields if x.metadata.get(OWN_TIME[side])), None)
    if time is None:
        raise DescriptionError(f"{who} needs the input's event time, which is not among the columns any more")
    shown = [(x.name, x.metadata[OWN_COLUMN[side]]) for x in fields if OWN_COLUMN[side] in x.metadata]
    own = [named_column(name).alias(str(its_own)) for name, its_own in shown]
    return (f.col(ROW_KIND_COLUMN) == LATE_ROW_KIND) & named_column(time).isNotNull(), own


def made_by(df: DataFrame) -> JoinPlan | None:
    """The join whose filtered or projected rows a DataFrame has; None for any other DataFrame."""
    return _join_below(df, (_SAME_PARTITIONS - MAPS) | {"Repartition", "RepartitionByExpression"})


def join_written(df: DataFrame) -> str | None:
    """The name of the join whose every change a DataFrame has exactly once; None where that cannot be told."""
    plan = _join_below(df, _ONE_FOR_ONE)
    return None if plan is None else plan.name


def lost_row_time(df: DataFrame) -> str | None:
    """Half a sentence that names the join in which a DataFrame's rows lost their event time; None where none did.

    Flink's planner: "Rowtime attributes must not be in the input rows of a regular join".
    """
    plan = next(plans_in(analyzed(df)), None)
    if plan is None or not plan.row_times:
        return None
    return (
        f"the join '{plan.name}' below it ({plan.description.title}) does not pass on the event time of its inputs, "
        f"{', '.join(plan.row_times)}, as its rows may be of any age"
    )


def derived_key(df: DataFrame) -> tuple[str, ...] | None:
    """The unique key of a changelog, where it follows from the join that makes it; else None.

    Only for a changelog that was merely filtered or projected: an explode or a union repeats keys, and a
    repartition loses the order of a key's changes.
    """
    plan = _join_below(df, ROW_BY_ROW)
    return None if plan is None else known_key(df, plan.plan_id)


def never_retracts(df: DataFrame) -> bool:
    """True if a changelog, perhaps filtered or projected, is insert-only, as follows from the join that makes it."""
    plan = _join_below(df, ROW_BY_ROW)
    return plan is not None and plan.description.insert_only


def retracting(df: DataFrame) -> bool:
    """True for the changelog of an operator that retracts rows; False with a filter above it, perhaps by row kind."""
    if not df.isStreaming or not is_changelog(df):
        return False
    plan = _join_below(df, _ONE_FOR_ONE)
    return plan is not None and plan.description.emit != "at_end" and not plan.description.insert_only


def _join_below(df: DataFrame, through: Set[str]) -> JoinPlan | None:
    """The one operator whose rows a DataFrame has, as nodes of some kinds pass them on; else None."""
    node = analyzed(df)
    while (plan := JoinPlan.of(node)) is None:
        below = children_of(node)
        if len(below) != 1 or not (str(node.nodeName()) in through or hides_metrics(node)):
            return None
        (node,) = below
    return None if plan.outputs else plan


def hides_metrics(node: Any) -> bool:
    """True for the filter above a join that removes the rows with the metrics of its task's operators."""
    return str(node.nodeName()) == "Filter" and observed_join(node.children().head()) is not None


def observed_join(node: Any) -> Any:
    """The join whose metrics a node observes, or those of an operator of its task; None for any other node."""
    if str(node.nodeName()) != "CollectMetrics":
        return None
    while str(node.nodeName()) == "CollectMetrics":
        node = node.children().head()
    return None if JoinPlan.of(node) is None else node


def open_joins(df: DataFrame) -> list[Any]:
    """The join nodes in the stage that ends in a DataFrame: one for each part of a union, None for a part without."""
    return _open_joins(analyzed(df))


def _open_joins(node: Any) -> list[Any]:
    while JoinPlan.of(node) is None:
        name = str(node.nodeName())
        if name == "Union":
            return [part for child in children_of(node) for part in _open_joins(child)]
        if name not in _SAME_PARTITIONS:
            return [None]
        node = node.children().head()
    return [node]
