"""Streaming joins for PySpark: Flink's semantics, on the GPU, with a pandas fallback.

``import gpu_ops`` needs neither Spark nor Java nor cuDF; names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gpu_ops.descriptions.aggregate import Aggregate
    from gpu_ops.descriptions.co_group import CoGroup
    from gpu_ops.descriptions.inputs import Input
    from gpu_ops.descriptions.interval_join import IntervalJoin
    from gpu_ops.descriptions.intervals import Interval
    from gpu_ops.descriptions.join import Join
    from gpu_ops.descriptions.keys import Key
    from gpu_ops.descriptions.multi_join import MultiJoin
    from gpu_ops.engine import JoinEngine, MicroBatch
    from gpu_ops.errors import (
        BackendError,
        BadInputError,
        ConditionError,
        DescriptionError,
        EvaluationError,
        GpuJoinError,
        NotBuiltError,
        StateError,
    )
    from gpu_ops.query.errors import SqlError
    from gpu_ops.query.spark import sql
    from gpu_ops.spark.api.bounded import aggregate, co_group
    from gpu_ops.spark.api.explain import explain
    from gpu_ops.spark.api.finish import finish, reopen
    from gpu_ops.spark.api.interval import NoWatermarkWarning, interval_join
    from gpu_ops.spark.api.joins import MemoryOnlyStateWarning, Stream, anti_join, join, semi_join, stream
    from gpu_ops.spark.api.multi import multi_join
    from gpu_ops.spark.metrics.backlog_progress import BacklogProgress
    from gpu_ops.spark.metrics.progress import ProgressListener
    from gpu_ops.spark.plan.column_metadata import late
    from gpu_ops.spark.sources.files import read_files

_WHERE: Final = {
    "Aggregate": "descriptions.aggregate",
    "BackendError": "errors",
    "BacklogProgress": "spark.metrics.backlog_progress",
    "BadInputError": "errors",
    "CoGroup": "descriptions.co_group",
    "ConditionError": "errors",
    "DescriptionError": "errors",
    "EvaluationError": "errors",
    "GpuJoinError": "errors",
    "Input": "descriptions.inputs",
    "Interval": "descriptions.intervals",
    "IntervalJoin": "descriptions.interval_join",
    "Join": "descriptions.join",
    "JoinEngine": "engine",
    "Key": "descriptions.keys",
    "MemoryOnlyStateWarning": "spark.api.joins",
    "MicroBatch": "engine",
    "MultiJoin": "descriptions.multi_join",
    "NoWatermarkWarning": "spark.api.interval",
    "NotBuiltError": "errors",
    "ProgressListener": "spark.metrics.progress",
    "SqlError": "query.errors",
    "StateError": "errors",
    "Stream": "spark.api.joins",
    "anti_join": "spark.api.joins",
    "aggregate": "spark.api.bounded",
    "co_group": "spark.api.bounded",
    "explain": "spark.api.explain",
    "finish": "spark.api.finish",
    "interval_join": "spark.api.interval",
    "join": "spark.api.joins",
    "late": "spark.plan.column_metadata",
    "multi_join": "spark.api.multi",
    "read_files": "spark.sources.files",
    "reopen": "spark.api.finish",
    "semi_join": "spark.api.joins",
    "sql": "query.spark",
    "stream": "spark.api.joins",
}

__all__ = [
    "Aggregate",
    "BackendError",
    "BacklogProgress",
    "BadInputError",
    "CoGroup",
    "ConditionError",
    "DescriptionError",
    "EvaluationError",
    "GpuJoinError",
    "Input",
    "Interval",
    "IntervalJoin",
    "Join",
    "JoinEngine",
    "Key",
    "MemoryOnlyStateWarning",
    "MicroBatch",
    "MultiJoin",
    "NoWatermarkWarning",
    "NotBuiltError",
    "ProgressListener",
    "SqlError",
    "StateError",
    "Stream",
    "aggregate",
    "anti_join",
    "co_group",
    "explain",
    "finish",
    "interval_join",
    "join",
    "late",
    "multi_join",
    "read_files",
    "reopen",
    "semi_join",
    "sql",
    "stream",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"gpu_ops.{_WHERE[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pyspark":
            raise
        raise ImportError(f"gpu_ops.{name} needs PySpark: pip install 'gpu-join[spark]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
