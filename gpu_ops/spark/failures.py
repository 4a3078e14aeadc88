"""Why a query ended, in the one message that says it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

_STATE: Final = re.compile(r"(\s*SQLSTATE: \w+)+\s*\Z")
_QUERY: Final = re.compile(r"^\[STREAM_FAILED\] Query \[[^\]]*\] terminated with exception: ")
_AFTER: Final = re.compile(r"\n(?:\s+at |\s*SQLSTATE: |=== |\s*\n|\s*JVM stacktrace:|Caused by: |Driver stacktrace:)")
_OURS: Final = re.compile(r"\bgpu_ops(?:\.\w+)+Error: ")
_TRACEBACK: Final = "Traceback (most recent call last):"


def why(query: StreamingQuery | BaseException) -> str | None:
    """Why a query ended: the message alone, without Spark's words, its plan and traceback around it.

    ::

        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            print(gpu_ops.why(error))

    Args:
        query: a streaming query, or what one has raised.

    Returns:
        The message; None where the query runs, or ended without an error.
    """
    error = query if isinstance(query, BaseException) else query.exception()
    return None if error is None else message_in(str(error))


def message_in(text: str) -> str:
    """What matters of Spark's account of a failure.

    Args:
        text: of a ``StreamingQueryException``, or of the event that a listener is given.

    Returns:
        The last error of this pack in it; else the last line of a traceback; else the first line.
    """
    ours = list(_OURS.finditer(text))
    if ours:
        return _first_part(text[ours[-1].end() :])
    text = _QUERY.sub("", text.strip())
    if _TRACEBACK not in text:
        return _first_part(text).partition("\n")[0]
    frames = _first_part(text.rpartition(_TRACEBACK)[2])
    return next((line for line in reversed(frames.splitlines()) if line[:1].strip()), frames).strip()


def _first_part(text: str) -> str:
    """What stands before Spark's additions to a message."""
    found = _AFTER.search(text)
    return _STATE.sub("", text[: found.start()] if found is not None else text).strip()
