"""What only the JVM knows of a running query: its trigger, by which its micro-batches are backlog; its output mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpu_ops.errors import StateError


def takes_what_is_there(queries: Iterable[Any], run_id: str) -> bool:
    """Whether a run of a query has ``trigger(availableNow=True)``.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0 and 4.3.0).

    Args:
        queries: the streaming queries that run.
        run_id: of one of them.

    Raises:
        StateError: it is over, or this version of Spark does not tell.
    """
    query = _run(queries, run_id, "backlog=True goes by the trigger")
    try:
        trigger = str(query._jsq.streamingQuery().trigger().getClass().getName())
    except Exception as error:  # whatever py4j makes of another version's classes
        raise StateError(
            f"backlog=True goes by the query's trigger, which this version of Spark does not tell ({error}): "
            "leave backlog= out"
        ) from error
    return trigger.rpartition(".")[2].startswith("AvailableNowTrigger")


def output_mode(queries: Iterable[Any], run_id: str) -> str:
    """The output mode of a run of a query: ``append``, ``update`` or ``complete``.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0).

    Args:
        queries: the streaming queries that run.
        run_id: of one of them.

    Raises:
        StateError: it is over, or this version of Spark does not tell.
    """
    what = "a streaming aggregate without a unique key goes by the output mode"
    query = _run(queries, run_id, what)
    try:
        return str(query._jsq.streamingQuery().outputMode().toString()).lower()
    except Exception as error:  # as above
        raise StateError(
            f"{what}, which this version of Spark does not tell ({error}): say stream(..., unique_key=...)"
        ) from error


def _run(queries: Iterable[Any], run_id: str, why: str) -> Any:
    query = next((query for query in queries if str(query.runId) == run_id), None)
    if query is None:
        raise StateError(f"{why}, and the run {run_id} of the query is over")
    return query
