"""Checks of streaming queries when they start, called by ``DataStreamWriter.start`` and ``toTable``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql.streaming import DataStreamWriter

_STARTING: Final = ("start", "toTable")
_MARK: Final = "gpu_ops_checked"
"""Attribute of a method that calls the checks already; `functools.wraps` copies it to wrappers of that method."""

_guard = threading.Lock()

StartCheck = Callable[[Any], None]
"""Takes a query that has just been started, and raises an error of ours where it cannot go on."""

Refusal = Callable[[Any, AnalysisException], None]
"""Takes a writer that Spark does not start, and raises a better error where there is one."""

_checks: list[StartCheck] = []
_refusals: list[Refusal] = []


def check_starts(check: StartCheck, refusal: Refusal | None = None) -> None:
    """Registers a check of every query that is started; idempotent.

    Args:
        check: called with the started query; where it raises, the query is stopped and ``start`` raises that.
        refusal: called where Spark itself refuses to start a query; may raise a better error.
    """
    with _guard:
        if check not in _checks:
            _checks.append(check)
        if refusal is not None and refusal not in _refusals:
            _refusals.append(refusal)
        for name in _STARTING:
            start = getattr(DataStreamWriter, name)
            if not hasattr(start, _MARK):
                setattr(DataStreamWriter, name, _checked(start))


def _checked(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def started(writer: Any, *args: Any, **options: Any) -> Any:
        try:
            query = start(writer, *args, **options)
        except AnalysisException as error:
            for refusal in _refusals:
                refusal(writer, error)
            raise
        try:
            for check in _checks:
                check(query)
        except BaseException:
            query.stop()
            raise
        return query

    setattr(started, _MARK, True)
    return started
