"""The end of input, and backlogs, of queries: what `gpu_ops.finish` gives, and chains that begin silently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream
from spark.feeds import Feed, sql_join
from spark.support import Sink, Source, drain, fold, start

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

KEYS = (1, 2, 3, 4, None)
ENDS = {
    "a join, filtered and projected above": "SELECT orders.k + 1 AS next, a * 2 AS twice, coalesce(b, 'none') AS b "
    "FROM orders LEFT JOIN prices ON orders.k = prices.k WHERE b IS NULL OR a > 2",
    "groups": "SELECT k, sum(a) / count(*) AS mean FROM orders GROUP BY k HAVING count(*) > 1",
    "a union, groups": """SELECT k, count(*) AS n, max(v) AS v FROM (SELECT k, a AS v FROM orders WHERE a > 2
        UNION ALL SELECT k, count(*) FROM prices GROUP BY k UNION ALL SELECT k, 1 FROM prices) GROUP BY k""",
    "distinct": "SELECT DISTINCT k, a FROM orders",
    "a join, groups, the first of them": """SELECT b, sum(a) AS s FROM orders JOIN prices ON orders.k = prices.k
        GROUP BY b ORDER BY s DESC, b NULLS LAST LIMIT 2""",
    "groups, joined": """SELECT orders.k, a, b, n FROM orders
        LEFT JOIN (SELECT k, count(*) AS n, max(b) AS b FROM prices GROUP BY k) p ON orders.k = p.k WHERE a > 2""",
    "the first of each, joined, filtered": """SELECT n, b FROM prices JOIN (SELECT k, a, n FROM
        (SELECT k, a, row_number() OVER (PARTITION BY k ORDER BY a, id) AS n FROM orders) WHERE n <= 2) o
        ON o.k = prices.k WHERE n = 1 OR b IS NULL""",
}
CHAIN = ENDS["a join, groups, the first of them"]


def feeding(spark: Any, folder: Path, keys: Sequence[int | None]) -> list[Feed]:
    return [
        Feed(spark, folder, "orders", {"id": ("long", None), "k": ("int", keys), "a": ("double", (1.5, 2.5))}),
        Feed(spark, folder, "prices", {"k": ("int", keys), "b": ("string", ("x", "y", "z", None))}),
    ]


@pytest.fixture
def feeds(spark: Any, tmp_path: Path) -> list[Feed]:
    made = feeding(spark, tmp_path, KEYS)
    for _ in range(2):
        more(made, 25)
    return made


def more(feeds: list[Feed], rows: int) -> None:
    for feed in feeds:
        feed.more(rows)


def asked(sql: str, feeds: list[Feed], state: Path, **options: Any) -> Any:
    keys = {"orders": "id", "prices": None}
    tables = {
        feed.name: stream(feed.df, row_kind="op", unique_key=keys[feed.name], updates="retract")
        for feed in feeds
        if feed.name in sql
    }
    return gpu_ops.sql(sql, tables=tables, state=str(state), **options)


@pytest.mark.parametrize("what", slow_but(ENDS, "groups", "a join, groups, the first of them", "groups, joined"))
def test_the_end_gives_what_the_query_selects(spark: Any, feeds: list[Feed], tmp_path: Path, what: str) -> None:
    sql, state, sink = ENDS[what], tmp_path / "state", Sink()
    drain(asked(sql, feeds, state, emit="at_end"), sink, tmp_path / "checkpoint")
    more(feeds, 10)
    drain(asked(sql, feeds, state, emit="at_end"), sink, tmp_path / "checkpoint")
    assert sorted(sink.batches) == [0, 1, 2]
    assert not sink.changes
    for _ in range(2):
        found = gpu_ops.finish(spark, state=str(state))
        assert {row["row_kind"] for row in found.select("row_kind").collect()} == {"+I"}
        assert fold(map(tuple, found.collect())) == sql_join(sql, feeds, 3)
    assert len(sql_join(sql, feeds, 3)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 7])
@pytest.mark.parametrize("what", ENDS)
def test_twenty_thousand_changes(spark: Any, tmp_path: Path, what: str, files: int) -> None:
    feeds, sink = feeding(spark, tmp_path, [*range(2000), None]), Sink()
    for _ in range(files):
        more(feeds, 10_000 // files)
    drain(asked(ENDS[what], feeds, tmp_path / "state", emit="at_end"), sink, tmp_path / "checkpoint")
    assert not sink.changes
    found = gpu_ops.finish(spark, state=str(tmp_path / "state"))
    assert fold(map(tuple, found.collect())) == sql_join(ENDS[what], feeds, files)


def test_a_folder_is_one_querys(feeds: list[Feed], tmp_path: Path) -> None:
    sql = ENDS["distinct"]
    asked(sql, feeds, tmp_path / "state", emit="at_end")
    asked(sql, feeds, tmp_path / "state", emit="at_end")
    with pytest.raises(gpu_ops.StateError, match="belongs to another query"):
        asked(f"{sql} WHERE a > 2", feeds, tmp_path / "state", emit="at_end")


def test_what_cannot_wait_for_the_end(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    clicks = Source(spark, tmp_path / "clicks", "k int, at timestamp")
    tables = {name: stream(clicks.df, name=name, event_time="at", delay="1 second") for name in ("clicks", "views")}
    sql = """SELECT clicks.k, count(*) AS n FROM clicks LEFT JOIN views ON clicks.k = views.k
        AND views.at BETWEEN clicks.at AND clicks.at + INTERVAL 1 MINUTE GROUP BY clicks.k"""
    with pytest.raises(gpu_ops.NotBuiltError, match=r"\(interval\) holds rows until its watermark passes them"):
        gpu_ops.sql(sql, tables=tables, emit="at_end", state=str(tmp_path / "state"))
    expiring = {feed.name: stream(feed.df, row_kind="op", ttl="1 day") for feed in feeds}
    with pytest.raises(gpu_ops.DescriptionError, match="input 'orders': with emit 'at_end' no row is forgotten, ttl "):
        gpu_ops.sql(CHAIN, tables=expiring, emit="at_end", state=str(tmp_path / "state"))


def test_a_finished_chain_is_opened_again(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    state, sink = tmp_path / "state", Sink()
    for files in (2, 3):
        drain(asked(CHAIN, feeds, state, emit="at_end"), sink, tmp_path / "checkpoint")
        assert fold(map(tuple, gpu_ops.finish(spark, state=str(state)).collect())) == sql_join(CHAIN, feeds, files)
        more(feeds, 10)
        with pytest.raises(gpu_ops.StateError, match="finished"):
            asked(CHAIN, feeds, state, emit="at_end")
        gpu_ops.reopen(state=str(state))


def test_a_chain_begins_with_a_backlog(feeds: list[Feed], tmp_path: Path) -> None:
    state, checkpoint, sink = tmp_path / "state", tmp_path / "checkpoint", Sink()
    drain(asked(CHAIN, feeds, state, backlog=True), sink, checkpoint)
    assert sorted(sink.batches) == [0, 1]
    assert not sink.changes
    more(feeds, 10)
    query = start(asked(CHAIN, feeds, state, backlog=True), sink, checkpoint, processingTime="0 seconds")
    try:
        query.processAllAvailable()
        assert fold(sink.batches[2]) == sql_join(CHAIN, feeds, 3)
        more(feeds, 10)
        query.processAllAvailable()
    finally:
        query.stop()
    assert sink.table == sql_join(CHAIN, feeds, 4)
    more(feeds, 10)
    drain(asked(CHAIN, feeds, state, backlog=True), sink, checkpoint)  # once live it stays so
    assert sink.batches[4]
    assert sink.table == sql_join(CHAIN, feeds, 5)


def test_what_cannot_begin_with_a_backlog(feeds: list[Feed], tmp_path: Path) -> None:
    orders, prices = (stream(feed.df, row_kind="op", ttl="1 hour") for feed in feeds)
    sql = "SELECT orders.k, b FROM orders JOIN prices ON orders.k = prices.k"
    message = (
        r"no backlog here: inner join on .*\(regular\): the rows of input 'orders' expire .* These can, .*: regular"
    )
    with pytest.raises(gpu_ops.DescriptionError, match=message):
        gpu_ops.sql(sql, orders=orders, prices=prices, state=str(tmp_path / "state"), backlog=True)
