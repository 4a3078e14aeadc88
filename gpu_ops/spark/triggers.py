"""The trigger of a streaming query, which says whether its micro-batches are backlog."""

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
    query = next((query for query in queries if str(query.runId) == run_id), None)
    if query is None:
        raise StateError(f"backlog=True goes by the trigger, and the run {run_id} of the query is over")
    try:
        trigger = str(query._jsq.streamingQuery().trigger().getClass().getName())
    except Exception as error:  # whatever py4j makes of another version's classes
        raise StateError(
            f"backlog=True goes by the query's trigger, which this version of Spark does not tell ({error}): "
            "leave backlog= out"
        ) from error
    return trigger.rpartition(".")[2].startswith("AvailableNowTrigger")
