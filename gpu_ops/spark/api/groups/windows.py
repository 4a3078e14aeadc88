"""Windows of time as groups: a column of Spark's ``window()`` is two times to the engine, its start and its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from gpu_ops.spark.api.streams import Stream
from gpu_ops.spark.datatypes import is_window, named_column
from gpu_ops.spark.metrics.metrics import free_name
from gpu_ops.spark.plan.column_metadata import OWN_COLUMN


class Window(NamedTuple):
    """A column with windows, and the columns that are their starts and ends."""

    name: str
    start: str
    end: str


def flattened(source: Stream, by: Sequence[str]) -> tuple[Stream, tuple[str, ...], tuple[Window, ...]]:
    """An input whose windows among its group columns are two columns each.

    Returns:
        The input, the group columns, and the windows.
    """
    df = source.df
    names = [name for name in by if is_window(df.schema[name].dataType)]
    if not names:
        return source, tuple(by), ()
    windows: dict[str, Window] = {}
    for name in names:
        taken = [*df.columns, *(part for window in windows.values() for part in window)]
        start = free_name(f"{name}_start", taken)
        windows[name] = Window(name, start, free_name(f"{name}_end", [*taken, start]))
    columns = []
    for name in df.columns:
        window = windows.get(name)
        if window is None:
            columns.append(named_column(name))
        else:
            parts = (("start", window.start), ("end", window.end))
            columns += [named_column(name).getField(part).alias(alias) for part, alias in parts]
    groups = [part for name in by for part in (windows[name][1:] if name in windows else (name,))]
    return dataclasses.replace(source, df=df.select(columns)), tuple(groups), tuple(windows.values())


def rebuilt(changes: DataFrame, windows: Sequence[Window]) -> DataFrame:
    """A result with windows as single columns again."""
    if not windows:
        return changes
    starts, ends = {window.start: window for window in windows}, {window.end for window in windows}
    columns = []
    for name in changes.columns:
        window = starts.get(name)
        if window is not None:
            parts = named_column(window.start).alias("start"), named_column(window.end).alias("end")
            shown = OWN_COLUMN[0] in (changes.schema[window.start].metadata or {})
            columns.append(f.struct(*parts).alias(window.name, metadata={OWN_COLUMN[0]: window.name} if shown else {}))
        elif name not in ends:
            columns.append(named_column(name))
    return changes.select(columns)
