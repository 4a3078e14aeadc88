"""Joins on Spark: DataFrames in, a DataFrame out. Names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpu_ops.spark.api import MemoryOnlyStateWarning, Stream, anti_join, join, semi_join, stream
    from gpu_ops.spark.backlog_progress import BacklogProgress
    from gpu_ops.spark.bounded_api import aggregate, co_group
    from gpu_ops.spark.describe import explain
    from gpu_ops.spark.ending import finish, reopen
    from gpu_ops.spark.files import read_files
    from gpu_ops.spark.folders import LocalStateWarning
    from gpu_ops.spark.interval_api import NoWatermarkWarning, interval_join
    from gpu_ops.spark.launch import prepare_environment, recommended_conf, session
    from gpu_ops.spark.marks import late
    from gpu_ops.spark.multi_api import multi_join
    from gpu_ops.spark.progress import JoinProgress, ProgressListener, join_progress
    from gpu_ops.spark.rapids import RAPIDS_COORDINATES, RAPIDS_SPARK_VERSIONS, rapids_conf

# State servers and Python workers import modules of this package; they need no more than those.
_WHERE: Final = {
    "BacklogProgress": "backlog_progress",
    "MemoryOnlyStateWarning": "api",
    "Stream": "api",
    "anti_join": "api",
    "join": "api",
    "semi_join": "api",
    "stream": "api",
    "aggregate": "bounded_api",
    "co_group": "bounded_api",
    "LocalStateWarning": "folders",
    "explain": "describe",
    "JoinProgress": "progress",
    "ProgressListener": "progress",
    "join_progress": "progress",
    "prepare_environment": "launch",
    "recommended_conf": "launch",
    "session": "launch",
    "NoWatermarkWarning": "interval_api",
    "interval_join": "interval_api",
    "late": "marks",
    "multi_join": "multi_api",
    "finish": "ending",
    "read_files": "files",
    "reopen": "ending",
    "RAPIDS_COORDINATES": "rapids",
    "RAPIDS_SPARK_VERSIONS": "rapids",
    "rapids_conf": "rapids",
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
