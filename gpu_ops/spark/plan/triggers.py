"""What only the JVM knows of a running query: its trigger, by which its micro-batches are backlog; its output mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpu_ops.errors import StateError


def takes_what_is_there(queries: Iterable[Any], run_id: str) -> bool:
    """Whether a run of a query has ``trigger(availableNow=True)``.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0 and 4.3.0).

    Args:
        queries: the streaming queries that run.
        run_id: of one of them.

    Raises:
        StateError: the run is over, or this version of Spark does not tell.
    """
    what, otherwise = "backlog=True goes by the query's trigger", "leave backlog= out"
    name = _asked(queries, run_id, what, otherwise, lambda query: query.trigger().getClass().getName())
    return name.rpartition(".")[2].startswith("AvailableNowTrigger")


def output_mode(queries: Iterable[Any], run_id: str) -> str:
    """The output mode of a run of a query: ``append``, ``update`` or ``complete``.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0).

    Args:
        queries: the streaming queries that run.
        run_id: of one of them.

    Raises:
        StateError: the run is over, or this version of Spark does not tell.
    """
    what = "a streaming aggregate without a unique key goes by the output mode"
    otherwise = "give stream(..., unique_key=...)"
    return _asked(queries, run_id, what, otherwise, lambda query: query.outputMode().toString()).lower()


def next_batch(query: Any) -> int:
    """The number of the micro-batch behind the last one that a query's checkpoint calls done.

    PySpark does not say; the JVM's query does (tried on Spark 4.2.0).

    Args:
        query: that was started.

    Raises:
        StateError: this version of Spark does not tell.
    """
    try:
        done = query._jsq.streamingQuery().commitLog().getLatestBatchId()
        return int(done.get()) + 1 if done.isDefined() else 0
    except Exception as error:  # whatever py4j makes of another version's classes
        raise StateError(f"this version of Spark does not tell what a checkpoint holds: {error}") from error


def _asked(queries: Iterable[Any], run_id: str, what: str, otherwise: str, ask: Callable[[Any], object]) -> str:
    query = next((query for query in queries if str(query.runId) == run_id), None)
    if query is None:
        raise StateError(f"{what}, and the run {run_id} of the query is over")
    try:
        return str(ask(query._jsq.streamingQuery()))
    except Exception as error:  # whatever py4j makes of another version's classes
        raise StateError(f"{what}, which this version of Spark does not tell ({error}): {otherwise}") from error
