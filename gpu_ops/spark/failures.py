"""Short messages for wrong DataFrames, missing packages, and failed queries."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

from gpu_ops.errors import DescriptionError, NotBuiltError, StateError

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery
if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATE: Final = re.compile(r"(?:\s*SQLSTATE: \w+)+$", re.MULTILINE)
_QUERY: Final = re.compile(r"^\[STREAM_FAILED\] Query \[[^\]]*\] terminated with exception: ")
_AFTER: Final = re.compile(
    r"\n(?:\s+at [^\s(]+\(|\s*SQLSTATE: |=== |\s*JVM stacktrace:|Caused by: |Driver stacktrace:"
    r"|The above exception was the direct cause|During handling of the above exception)"
    r"|;\n(?=\S+[^\n]*\n *[:+]-)"  # the plan, after an AnalysisException's message
)
_OURS: Final = re.compile(r"\bgpu_ops(?:\.\w+)+Error: ")
_TRACEBACK: Final = "Traceback (most recent call last):"
_RAISED: Final = re.compile(r"^(?:  \| )?(?=[^\s|])", re.MULTILINE)
"""Matches the first line after a traceback's indented frames; in a group of exceptions a bar stands before it."""
_CALL: Final = re.compile(r"(?:py4j\.protocol\.Py4JJavaError: )?An error occurred while calling \S+\n: ")
_TASK: Final = re.compile(r"[^\n]*Job aborted due to stage failure: [^\n]*?\bexecutor \S+\): ")
_AROUND: Final = re.compile(
    r"[\w.$]+: (?:Job aborted\.?|Writing job aborted\.?|Exception thrown in \S+|Task failed while writing rows\.?"
    r"|\[(?:TASK_WRITE_FAILED|WRITING_JOB_ABORTED)\][^\n]*):?\s*"
)
"""Matches the words that Spark puts around the message of a cause."""
_CAUSE: Final = "\nCaused by: "


def why(query: StreamingQuery | BaseException) -> str | None:
    """Says in one message why a query failed, without Spark's words, its plan and traceback around it.

    Args:
        query: a streaming query, or the exception that one has raised.

    Returns:
        The message; None if the query runs, or ended without an error.

    Example:
        >>> def fail(rows, number):
        ...     raise ValueError("the table is gone")
        >>> query = spark.readStream.format("rate").load().writeStream.foreachBatch(fail)
        >>> query = query.option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
        >>> try:
        ...     query.awaitTermination()
        ... except Exception as error:
        ...     print(gpu_ops.why(error))
        ValueError: the table is gone
    """
    error = query if isinstance(query, BaseException) else query.exception()
    return None if error is None else message_in(str(error))


def message_in(text: str) -> str:
    """Finds the message of the actual cause in Spark's long text about a failure.

    Args:
        text: the text of a ``StreamingQueryException``, or of the event that a listener gets.

    Returns:
        All lines of the message: of the last error of this package in the text; else of Python's last one, or of the
        Java exception within that; else of Java's.
    """
    ours = list(_OURS.finditer(text))
    if ours:
        return _first_part(text[ours[-1].end() :])
    text = _QUERY.sub("", text.strip().partition("\n=== Streaming Query ===")[0])
    if _TRACEBACK in text:
        frames = text.rpartition(_TRACEBACK)[2].lstrip("\n")
        raised = _RAISED.search(frames)
        text = frames[raised.end() :] if raised is not None else frames
    text = _TASK.sub("", _CALL.sub("", text, count=1), count=1)
    while _AROUND.fullmatch(_first_part(text)) and _CAUSE in text:
        text = text.partition(_CAUSE)[2]
    return _first_part(text)


def _first_part(text: str) -> str:
    """The part of a message before Spark's additions."""
    additions = _AFTER.search(text)
    return _STATE.sub("", text[: additions.start()] if additions is not None else text).strip()


_TABLES: Final = {"pandas": "it", "polars": "it.to_pandas()", "pyarrow": "it.to_pandas()", "cudf": "it.to_pandas()"}
"""Packages of tables, and the expression by which ``createDataFrame`` takes theirs in all versions of Spark."""


def data_frame(given: object, which: str) -> DataFrame:
    """Checks that an argument is a DataFrame of a classic Spark session, and returns it.

    Args:
        given: the argument.
        which: its name in an error, such as "the left input".

    Raises:
        DescriptionError: it is no DataFrame.
        NotBuiltError: it is one of Spark Connect.
        StateError: its session is gone.
    """
    if not hasattr(given, "sparkSession"):
        raise DescriptionError(f"{which} is a DataFrame of Spark's or a stream(...), not {_what(given)}")
    refuse_connect(given)
    df = cast("DataFrame", given)
    refuse_gone(df.sparkSession.sparkContext)
    return df


def refuse_connect(given: object) -> None:
    """Refuses a DataFrame or session of Spark Connect, of which the plan cannot be read.

    Raises:
        NotBuiltError: it is one of Spark Connect.
    """
    if any(cls.__module__.startswith("pyspark.sql.connect") for cls in type(given).__mro__):
        raise NotBuiltError(
            "Spark Connect sessions are not built yet: a join needs the driver's own process. Use a classic session, "
            "SparkSession.builder.master(...) without .remote() and SPARK_REMOTE"
        )


def refuse_gone(context: Any) -> None:
    """Refuses a Spark application that has ended, whose objects would fail in ways of their own.

    Args:
        context: the application's SparkContext, or None where there never was one.

    Raises:
        StateError: the application has ended.
    """
    if context is None:
        raise StateError("there is no Spark session: make one first, gpu_ops.spark.session() or SparkSession.builder")
    try:
        gone = "it was stopped" if context._jsc is None or context._jsc.sc().isStopped() else None
    except Exception as error:  # whatever py4j makes of a connection that nobody answers
        gone = f"its JVM does not answer: {str(error) or repr(error)}"
    if gone is not None:
        raise StateError(
            f"the Spark session is gone ({gone}): start another one, and its queries from their checkpoints"
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


DELTA_CATALOG: Final = "spark.sql.catalog.spark_catalog"
DELTA_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    DELTA_CATALOG: "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""The settings of a Spark session that Delta needs."""

PACKAGES: Final = {
    "delta": {
        "3.5": "io.delta:delta-spark_2.12:3.3.2",
        "4.0": "io.delta:delta-spark_2.13:4.0.1",
        "4.1": "io.delta:delta-spark_4.1_2.13:4.4.0",
        "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
    },
    "kafka": {
        "3.5": "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7",
        "4.0": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.2",
        "4.1": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.2",
        "4.2": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    },
}
"""By connector and line of Spark, a Maven package that was found to exist (tests/services/test_packages.py asks)."""


def package(connector: str, spark: str) -> str | None:
    """The Maven package that a connector needs.

    Args:
        connector: the connector's name.
        spark: Spark's version.

    Returns:
        Its coordinates, or None for one that Spark brings itself, and where none is known for this Spark.
    """
    known = PACKAGES.get("kafka" if "kafka" in connector else connector, {})
    return known.get(".".join(spark.split(".")[:2]))
