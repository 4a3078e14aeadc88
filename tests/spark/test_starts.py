"""Checks of queries that start: what stops a query, and what else may wrap Spark's method. Without Spark."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from gpu_ops.errors import StateError
from gpu_ops.spark.driver import starts
from gpu_ops.spark.sources import topics


class Query:
    """What of a streaming query the checks use."""

    id = "q"
    stopped = False
    _jsq: Any = None

    def stop(self) -> None:
        self.stopped = True


class Writer:
    """In place of Spark's ``DataStreamWriter``."""

    def start(self) -> Query:
        return Query()

    toTable = start  # noqa: N815


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    own = type("Own", (Writer,), {"start": Writer.start, "toTable": Writer.toTable})
    monkeypatch.setattr(starts, "DataStreamWriter", own)
    monkeypatch.setattr(starts, "_checks", [])
    return own


@pytest.mark.parametrize("error", [StateError("ours"), RuntimeError("of py4j"), KeyboardInterrupt()])
def test_whatever_a_check_raises_stops_the_query(writer: type[Writer], error: BaseException) -> None:
    looked_at: list[Query] = []

    def check(query: Query) -> None:
        looked_at.append(query)
        raise error

    starts.check_starts(check)
    with pytest.raises(type(error)):
        writer().start()
    assert [query.stopped for query in looked_at] == [True]


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_start_that_another_tool_wraps_is_checked_once(writer: type[Writer], when: str) -> None:
    def wrap() -> None:
        for name in ("start", "toTable"):
            of_spark: Any = getattr(writer, name)
            setattr(writer, name, functools.wraps(of_spark)(lambda self, of_spark=of_spark: of_spark(self)))

    looked_at: list[Query] = []
    if when == "before":
        wrap()
    starts.check_starts(looked_at.append)
    if when == "after":
        wrap()
    starts.check_starts(looked_at.append)
    assert looked_at == []
    assert [writer().start(), writer().toTable()] == looked_at


@pytest.mark.parametrize("anew", [False, True])
def test_ids_of_topics_that_cannot_be_written_are_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, writer: type[Writer], anew: bool
) -> None:
    class Stored:
        def __init__(self, running: Any) -> None: ...

        def read(self) -> topics.Ids:
            return {"t": {"before"}} if anew else {}

        def write(self, ids: topics.Ids) -> None:
            raise RuntimeError("AccessControlException: Permission denied")

    class Running:
        def streamingQuery(self) -> Running:  # noqa: N802
            return self

        def analyzedPlan(self) -> None: ...  # noqa: N802

    monkeypatch.setattr(Query, "_jsq", Running())
    monkeypatch.setattr(topics, "_Stored", Stored)
    monkeypatch.setattr(topics, "_sources", lambda plan: [{"subscribe": "t"}])
    monkeypatch.setattr(topics, "_ids", lambda *_: {"t": {"now"}})
    starts.check_starts(topics.check_topics)
    words = "topic 't' was deleted and made anew" if anew else "ids of topics t cannot be written .* Permission denied"
    with pytest.raises(StateError, match=words) as caught:
        writer().start()
    assert "rows of a first micro-batch may have been written" in str(caught.value)
