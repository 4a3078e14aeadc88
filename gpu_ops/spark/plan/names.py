"""The names of this pack's functions in Spark's plans: by them it finds again what it has built."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable
from typing import Any, Final

_log = logging.getLogger(__name__)

MAPS: Final = {"MapInArrow", "PythonMapInArrow", "MapInPandas"}
"""What Spark calls the logical nodes that hold them."""

JOIN: Final = "gpu_join"
FILES: Final = "gpu_files"

_JOIN_NAME: Final = re.compile(JOIN + r"_([0-9a-f]{12})\b")
_FILES_NAME: Final = re.compile(FILES + r"_([0-9a-f]{12})\b")


def joins_in(text: str) -> list[str]:
    """The ids of joins in the text of a plan, the nearest first, each once."""
    return list(dict.fromkeys(_JOIN_NAME.findall(text)))


def files_in(text: str) -> list[str]:
    """The ids of streams of files, likewise."""
    return list(dict.fromkeys(_FILES_NAME.findall(text)))


def join_number(queries: Iterable[Any], run_id: str, plan_id: str, known: Container[str]) -> int | None:
    """Which join of its query a join is, from 1, counted from the sources on: the same however often it is restarted.

    Args:
        queries: the streaming queries that run.
        run_id: of one of them.
        plan_id: of the join.
        known: the plan ids of streaming joins.

    Returns:
        None where the query is over, or this version of Spark does not show its plan.
    """
    query = next((query for query in queries if str(query.runId) == run_id), None)
    if query is None:
        return None
    try:
        plan = str(query._jsq.streamingQuery().analyzedPlan().toString())
    except Exception as error:  # whatever py4j makes of another version's classes
        _log.warning("which join of its query is which cannot be told, this version of Spark shows no plan: %s", error)
        return None
    # A plan's text begins with what is furthest from the sources.
    found = [each for each in reversed(joins_in(plan)) if each in known]
    return found.index(plan_id) + 1 if plan_id in found else None
