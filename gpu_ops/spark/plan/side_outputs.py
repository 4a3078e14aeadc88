"""Side outputs of a join: rows that come out beside its changelog, with columns of their own.

Late rows are such outputs, ``left_late`` and ``right_late``, as the metrics call them. In a changelog they share
columns with the joined rows; beside what a user's function gives, each side output has a struct column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from gpu_ops.descriptions.changelog import LATE_ROW_KIND, ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.given import data_frame
from gpu_ops.spark.plan.column_metadata import INPUTS, OWN_COLUMN, OWN_TIME

LATE_SIDES: Final = ("left_late", "right_late")
"""The side outputs of an input's late rows."""

SIDE: Final = "gpu_ops.side"
"""Of a struct column: the side output whose rows it has."""


def side(df: DataFrame, name: str) -> DataFrame:
    """The rows of a side output of a join by time, with their own columns.

    Flink: ``getSideOutput(OutputTag)``.

    Args:
        df: what the join gave, whole or a micro-batch of it in ``foreachBatch``.
        name: ``"left_late"`` or ``"right_late"`` (or an input's name and ``_late``) for late rows with ``late="tag"``,
            or one of ``side_outputs=``.

    Raises:
        DescriptionError: no output of an operator by time, or no such side output.
    """
    return _rows(df, name, "side()")


def late(df: DataFrame, side: str) -> DataFrame:
    """The late rows of an input of a join or aggregate by time with ``late="tag"``: `side` of ``left_late`` and so on.

    Args:
        df: as in `side`.
        side: ``"left"``, ``"right"``, or the input's name (of an aggregate ``"input"`` where it was given none).

    Raises:
        DescriptionError: no output of an operator by time, or no such input.
    """
    return _rows(df, f"{side}_late", "late()")


def inputs_metadata(df: DataFrame) -> dict[str, Any]:
    """Of the row-kind column: what the inputs of the join are called; empty if that is not known."""
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
    """Which rows of a changelog are one input's late ones, and that input's columns."""
    fields = [x for x in df.schema.fields if x.metadata]
    time = next((x.name for x in fields if x.metadata.get(OWN_TIME[side])), None)
    if time is None:
        raise DescriptionError(f"{who} needs the input's event time, which is not among the columns any more")
    shown = [(x.name, x.metadata[OWN_COLUMN[side]]) for x in fields if OWN_COLUMN[side] in x.metadata]
    own = [named_column(name).alias(str(its_own)) for name, its_own in shown]
    return (f.col(ROW_KIND_COLUMN) == LATE_ROW_KIND) & named_column(time).isNotNull(), own
