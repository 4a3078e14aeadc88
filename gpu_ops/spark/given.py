"""What users hand over: DataFrames and sessions of Spark's own process, or an error that says how to make one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from gpu_ops.errors import DescriptionError, NotBuiltError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TABLES: Final = {"pandas": "it", "polars": "it.to_pandas()", "pyarrow": "it.to_pandas()", "cudf": "it.to_pandas()"}
"""Packages of tables, and what ``createDataFrame`` takes of theirs in all versions of Spark."""


def data_frame(given: object, which: str) -> DataFrame:
    """A DataFrame of a classic Spark session.

    Args:
        given: what a user handed over.
        which: what it is called in an error, such as "the left input".

    Raises:
        DescriptionError: it is none.
        NotBuiltError: it is one of Spark Connect.
    """
    if not hasattr(given, "sparkSession"):
        raise DescriptionError(f"{which} is a DataFrame of Spark's or a stream(...), not {_what(given)}")
    refuse_connect(given)
    return cast("DataFrame", given)


def refuse_connect(given: object) -> None:
    """Refuses a DataFrame or session of Spark Connect, of which the plan cannot be read.

    Raises:
        NotBuiltError: it is one.
    """
    if any(cls.__module__.startswith("pyspark.sql.connect") for cls in type(given).__mro__):
        raise NotBuiltError(
            "Spark Connect sessions are not built yet: a join needs the driver's own process. Use a classic session, "
            "SparkSession.builder.master(...) without .remote() and SPARK_REMOTE"
        )


def _what(given: Any) -> str:
    kind = type(given)
    package = kind.__module__.partition(".")[0]
    if package in _TABLES:
        return (
            f"{package}'s {kind.__name__}: spark.createDataFrame({_TABLES[package]}) makes one; without Spark, "
            "gpu_ops.JoinEngine takes it as it is"
        )
    if isinstance(given, str):
        return "str: spark.readStream and gpu_ops.read_files(spark, path, format, schema) make one of files"
    return kind.__name__
