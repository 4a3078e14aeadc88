"""Why a query ended, in the one message that says it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

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
"""The first line after a traceback's frames, which are indented; that of a group of exceptions has a bar before it."""
_CALL: Final = re.compile(r"(?:py4j\.protocol\.Py4JJavaError: )?An error occurred while calling \S+\n: ")
_TASK: Final = re.compile(r"[^\n]*Job aborted due to stage failure: [^\n]*?\bexecutor \S+\): ")
_AROUND: Final = re.compile(
    r"[\w.$]+: (?:Job aborted\.?|Writing job aborted\.?|Exception thrown in \S+|Task failed while writing rows\.?"
    r"|\[(?:TASK_WRITE_FAILED|WRITING_JOB_ABORTED)\][^\n]*):?\s*"
)
"""What Spark says around the message of a cause."""
_CAUSE: Final = "\nCaused by: "


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
        The last error of this pack in it; else the last one of Python's, or what Java said within that; else Java's.
        All lines of its message.
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
    """What stands before Spark's additions to a message."""
    found = _AFTER.search(text)
    return _STATE.sub("", text[: found.start()] if found is not None else text).strip()
