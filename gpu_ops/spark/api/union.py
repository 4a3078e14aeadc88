"""UNION ALL of changelogs: a row is there as often as in all of them together, so the result has no unique key."""

from __future__ import annotations

from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.descriptions.changelog import ROW_KIND_COLUMN
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.datatypes import named_column
from gpu_ops.spark.driver.queries import plans_of
from gpu_ops.spark.failures import data_frame, message_in
from gpu_ops.spark.plan.changes import observed_once
from gpu_ops.spark.plan.column_metadata import CHANGELOG

_UNION: Final = "gpu_ops.union"
"""Of every column: in the place of what is known of the first changelog's."""


def union(*changelogs: DataFrame, name: str = "union") -> DataFrame:
    """The changelog of all rows of several changelogs, as UNION ALL has them.

    Args:
        changelogs: what joins of this pack give, perhaps filtered or projected; a DataFrame without ``row_kind`` is
            insert-only. Columns go by their position and have the first one's names.
        name: of the result, for errors of what takes it.

    Returns:
        A DataFrame; first column ``row_kind``. It has no unique key, so a view of it keeps how often a row is there.

    Raises:
        DescriptionError: fewer than two, columns that do not fit, static ones among streams, or two joins of one name.
    """
    if len(changelogs) < 2:
        raise DescriptionError("union() takes two changelogs or more")
    frames = [data_frame(df, f"changelog {number}") for number, df in enumerate(changelogs, 1)]
    if len({df.isStreaming for df in frames}) > 1:
        raise DescriptionError("union(): some of them are static and some stream, which Spark does not union")
    _check_names(frames)
    names = [column for column in frames[0].columns if column != ROW_KIND_COLUMN]
    parts = [_part(df, names, name, number) for number, df in enumerate(frames, 1)]
    first, *others = observed_once(parts)
    try:
        for other in others:
            first = first.unionAll(other)
    except AnalysisException as error:
        raise DescriptionError(f"union(): the columns do not fit: {message_in(str(error))}") from error
    return first


def _part(df: DataFrame, names: list[str], name: str, number: int) -> DataFrame:
    own = [column for column in df.columns if column != ROW_KIND_COLUMN]
    if len(own) != len(names):
        raise DescriptionError(
            f"union(): the first changelog has {len(names)} columns, number {number} {len(own)}: {', '.join(own)}"
        )
    kind = named_column(ROW_KIND_COLUMN) if ROW_KIND_COLUMN in df.columns else f.lit("+I")
    columns = [named_column(column).alias(new, metadata={_UNION: True}) for column, new in zip(own, names, strict=True)]
    return df.select(kind.alias(ROW_KIND_COLUMN, metadata={CHANGELOG: name}), *columns)


def _check_names(frames: list[DataFrame]) -> None:
    """Refuses two joins of one name: Spark's progress has the metrics of each under its name."""
    joins: dict[str, str] = {}
    for df in frames:
        for plan in plans_of(df):
            if joins.setdefault(plan.name, plan.plan_id) != plan.plan_id:
                raise DescriptionError(
                    f"union(): two joins are called {plan.name!r}, and Spark's progress has the metrics of each under "
                    "its name: give them other name= arguments, or none"
                )
