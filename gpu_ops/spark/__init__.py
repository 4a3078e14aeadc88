"""Joins on Spark: DataFrames in, a DataFrame out. Names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpu_ops.spark.api.bounded import aggregate, co_group
    from gpu_ops.spark.api.explain import explain
    from gpu_ops.spark.api.finish import finish, reopen
    from gpu_ops.spark.api.interval import NoWatermarkWarning, interval_join
    from gpu_ops.spark.api.joins import MemoryOnlyStateWarning, Stream, anti_join, join, semi_join, stream
    from gpu_ops.spark.api.multi import multi_join
    from gpu_ops.spark.api.rapids import RAPIDS_COORDINATES, RAPIDS_SPARK_VERSIONS, rapids_conf
    from gpu_ops.spark.api.session import prepare_environment, recommended_conf, session
    from gpu_ops.spark.metrics.backlog_progress import BacklogProgress
    from gpu_ops.spark.metrics.progress import JoinProgress, ProgressListener, join_progress
    from gpu_ops.spark.plan.column_metadata import late
    from gpu_ops.spark.servers.folders import LocalStateWarning
    from gpu_ops.spark.sources.files import read_files

# State servers and Python workers import modules of this package; they need no more than those.
_WHERE: Final = {
    "BacklogProgress": "metrics.backlog_progress",
    "MemoryOnlyStateWarning": "api.joins",
    "Stream": "api.joins",
    "anti_join": "api.joins",
    "join": "api.joins",
    "semi_join": "api.joins",
    "stream": "api.joins",
    "aggregate": "api.bounded",
    "co_group": "api.bounded",
    "LocalStateWarning": "servers.folders",
    "explain": "api.explain",
    "JoinProgress": "metrics.progress",
    "ProgressListener": "metrics.progress",
    "join_progress": "metrics.progress",
    "prepare_environment": "api.session",
    "recommended_conf": "api.session",
    "session": "api.session",
    "NoWatermarkWarning": "api.interval",
    "interval_join": "api.interval",
    "late": "plan.column_metadata",
    "multi_join": "api.multi",
    "finish": "api.finish",
    "read_files": "sources.files",
    "reopen": "api.finish",
    "RAPIDS_COORDINATES": "api.rapids",
    "RAPIDS_SPARK_VERSIONS": "api.rapids",
    "rapids_conf": "api.rapids",
}

__all__ = [
    "RAPIDS_COORDINATES",
    "RAPIDS_SPARK_VERSIONS",
    "BacklogProgress",
    "JoinProgress",
    "LocalStateWarning",
    "MemoryOnlyStateWarning",
    "NoWatermarkWarning",
    "ProgressListener",
    "Stream",
    "aggregate",
    "anti_join",
    "co_group",
    "explain",
    "finish",
    "interval_join",
    "join",
    "join_progress",
    "late",
    "multi_join",
    "prepare_environment",
    "rapids_conf",
    "read_files",
    "recommended_conf",
    "reopen",
    "semi_join",
    "session",
    "stream",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpu_ops.spark.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
