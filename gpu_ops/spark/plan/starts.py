"""A query is refused when it is started, not when its first rows come.

Spark has no place where a query's plan could refuse while it is started: its listeners' errors are logged, and what a
micro-batch would refuse waits for rows. So PySpark's own ``start`` and ``toTable`` are wrapped, once for all queries.
Where a query is started otherwise, its tasks refuse it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql.streaming import DataStreamWriter

from gpu_ops.errors import DescriptionError, GpuJoinError
from gpu_ops.spark.plan.column_metadata import is_changelog

_STARTING: Final = ("start", "toTable")
_guard = threading.Lock()


def check_starts(check: Callable[[Any], None]) -> None:
    """Has every query looked at when it is started; again is as good as once.

    Args:
        check: takes the query, and raises where it cannot go on; it is stopped then, and ``start`` raises that.
    """
    with _guard:
        for name in _STARTING:
            start = getattr(DataStreamWriter, name)
            if not hasattr(start, "__wrapped__"):
                setattr(DataStreamWriter, name, _checked(start, check))


def _checked(start: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(start)
    def started(writer: Any, *args: Any, **options: Any) -> Any:
        try:
            query = start(writer, *args, **options)
        except AnalysisException as error:
            if "output mode" in str(error).lower() and is_changelog(writer._df):
                raise DescriptionError(
                    "a changelog is written in outputMode('append'), the default: its row kinds say what changes. For "
                    "the table as it is now keep it up to date in foreachBatch, see gpu_ops.sinks"
                ) from error
            raise
        try:
            check(query)
        except GpuJoinError:
            query.stop()
            raise
        return query

    return started
