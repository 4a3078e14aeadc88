"""ASOF joins in streaming queries: restarts, upserts, changelogs, static DataFrames, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError, NotBuiltError
from spark.support import Row, Sink, Source, drain, in_memory

pytestmark = pytest.mark.spark

TRADES, QUOTES = "op string, id long, symbol string, at long", "symbol string, at long, venue string, price double"
TIMED_TRADES, TIMED_QUOTES = "id long, symbol string, at long", "symbol string, at long, price double"
TOLERANCE = 40


def nearest(trades: list[Row], quotes: list[Row], *, inner: bool) -> list[Row]:
    """Rows (symbol, id, at, venue, price): the last quote at or before a trade, the later arrival of one time."""
    found: list[Row] = []
    for number, symbol, at in trades:
        fit = [q for q in quotes if q[0] == symbol is not None and at - TOLERANCE <= q[1] <= at]
        best = max(enumerate(fit), key=lambda q: (q[1][1], q[0]), default=None)
        if best is not None or not inner:
            found.append((symbol, at, number, *((None, None) if best is None else best[1][2:])))
    return sorted(found, key=repr)


@pytest.mark.parametrize("emit", ["per_batch", pytest.param("per_event", marks=pytest.mark.thorough)])
def test_restarts_with_upserts_and_retractions(spark: Any, tmp_path: Path, emit: Any) -> None:
    """Trades that come, change and go, quotes of which each venue's last one of a time counts; three runs."""
    choice, sink, live = random.Random(8), Sink(), dict[int, Row]()
    trades, quotes = Source(spark, tmp_path / "trades", TRADES), Source(spark, tmp_path / "quotes", QUOTES)
    for run in range(3):
        for _ in range(2):
            changes = []
            for _ in range(15):
                number, symbol, op = choice.randrange(12), choice.choice(["a", "b", None]), choice.choice("IUUD")
                kind, at = ("-D" if op == "D" else f"+{op}"), choice.randrange(200)
                changes.append({"op": kind, "id": number, "symbol": symbol, "at": at})
                live.pop(number, None)
                if op != "D":
                    live[number] = number, symbol, at
            trades.add(*changes)
            quotes.add(
                *({"symbol": choice.choice("ab"), "at": choice.randrange(20) * 10, "venue": v, "price": choice.random()}
                  for v in "xyzxyz")
            )  # fmt: skip
        left = stream(trades.df, name="trades", row_kind="op", unique_key="id")
        joined = gpu_ops.asof_join(
            left, stream(quotes.df, name="quotes"), on="symbol", time="at", tolerance=TOLERANCE,
            how="inner" if emit == "per_event" else "left", emit=emit, state=str(tmp_path / "state"), name="asof",
        )  # fmt: skip
        assert joined.columns == ["row_kind", "symbol", "id", "at", "venue", "price"]
        if run == 0:
            text = gpu_ops.explain(joined)
            assert "  time        the last quotes.at at or before trades.at, at most 40 milliseconds apart" in text
            assert "input       quotes: insert-only; 4 columns" in text
        drain(joined.select("row_kind", "symbol", "at", "id", "venue", "price"), sink, tmp_path / "checkpoint")
        brought = quotes.table(["symbol", "at", "venue", "price"], None)
        ordered = [(q["symbol"], q["at"], q["venue"], q["price"]) for q in quotes.changes]
        assert sorted(ordered, key=repr) == brought
        assert sink.table == nearest(list(live.values()), ordered, inner=emit == "per_event")


@pytest.mark.thorough
def test_static_ones_and_a_changelog_of_this_pack(spark: Any, tmp_path: Path) -> None:
    trades = spark.createDataFrame([(1, "a", 10), (2, "a", 30), (3, "b", 30)], "id long, symbol string, at long")
    quotes = spark.createDataFrame(
        [("a", 8, 1.0), ("a", 12, 2.0), ("b", 31, 3.0)], "symbol string, at long, price double"
    )
    for direction, wanted in (
        ("backward", [1.0, 2.0, None]), ("forward", [2.0, None, 3.0]), ("nearest", [1.0, 2.0, 3.0])
    ):  # fmt: skip
        rows = gpu_ops.asof_join(trades, quotes, on="symbol", time=("at", "at"), direction=direction).collect()
        assert [row["price"] for row in sorted(rows, key=lambda row: row["id"])] == wanted
        assert {row["row_kind"] for row in rows} == {"+I"}
    together = gpu_ops.asof_join(trades, quotes, time="at", suffixes=("", "_q"), allow_exact_matches=False)
    assert together.columns == ["row_kind", "id", "symbol", "at", "symbol_q", "at_q", "price"]
    assert sorted(row["at_q"] for row in together.collect()) == [8, 12, 12]

    # what comes out is a changelog with a unique key, so it is an input of the next join
    source, rates = Source(spark, tmp_path / "trades", TIMED_TRADES), Source(spark, tmp_path / "quotes", TIMED_QUOTES)
    names = Source(spark, tmp_path / "names", "symbol string, name string")
    source.add({"id": 1, "symbol": "a", "at": 10})
    rates.add({"symbol": "a", "at": 8, "price": 1.0})
    names.add({"symbol": "a", "name": "Acme"})
    rates.add({"symbol": "a", "at": 9, "price": 2.0})
    priced = in_memory(gpu_ops.asof_join, source.df, rates.df, on="symbol", time="at", how="inner")
    named = in_memory(gpu_ops.join, priced, names.df, on="symbol")
    sink = Sink()
    drain(named.select("row_kind", "id", "price", "name"), sink, tmp_path / "checkpoint")
    assert sink.table == [(1, 2.0, "Acme")]
    assert len(sink.changes) == 3


def test_what_is_refused(spark: Any, tmp_path: Path) -> None:
    trades = Source(spark, tmp_path / "trades", TRADES).df
    quotes = Source(spark, tmp_path / "quotes", QUOTES).df

    def refused(problem: str, *inputs: Any, **options: Any) -> None:
        given = inputs or (trades, quotes)
        with pytest.raises((DescriptionError, NotBuiltError), match=problem):
            gpu_ops.asof_join(*given, **{"on": "symbol", "time": "at", **options})

    refused("time='processing'; input 'left'|time names 'processing'", time="processing")
    refused("is the event-time columns of left and right, or one name for both", time=("at",))
    refused("input 'left' has no watermark: say which column is its event time", time=None)
    refused("input 'left': event time 'symbol' is string; it is a timestamp", time=("symbol", "at"))
    refused("how='full'; an ASOF join is one of inner, left", how="full")
    refused("direction='up'", direction="up")
    refused("no duration: 'soon'", tolerance="soon")
    refused("input 'quotes': an ASOF join keeps every row", trades, stream(quotes, name="quotes", ttl="1 day"))
    refused("sequence_by 'price' orders right rows of one time", trades, stream(quotes, sequence_by="price"))
    with pytest.raises(TypeError, match=r"asof_join\(\) has no option where="):
        gpu_ops.asof_join(trades, quotes, on="symbol", time="at", where="true")  # type: ignore[call-arg]


@pytest.mark.thorough
def test_final_rows_at_the_watermark(spark: Any, tmp_path: Path) -> None:
    """Over restarts what comes out is final, and with what the end gives it is what polars joins at once."""
    choice, now, state, sink = random.Random(3), 0, str(tmp_path / "state"), Sink()
    sources = Source(spark, tmp_path / "trades", TIMED_TRADES), Source(spark, tmp_path / "quotes", TIMED_QUOTES)
    trades, quotes = (stream(source.df, event_time="at", delay=8) for source in sources)
    for _ in range(3):
        for _ in range(2):
            rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
            for _ in range(40):
                now += choice.choice((0, 1, 3))
                row = {"symbol": choice.choice("abc"), "at": now - choice.randrange(8)}
                rows[0].append({"id": now * 100 + len(rows[0]), **row})
                rows[1].append({"symbol": choice.choice("ab"), "at": now - choice.randrange(8), "price": now})
            for source, new in zip(sources, rows, strict=True):
                source.add(*new)
        joined = gpu_ops.asof_join(
            trades, quotes, on="symbol", direction="nearest", tolerance=6, emit="at_watermark", state=state
        )
        drain(joined.select("row_kind", "id", "symbol", "at", "price"), sink, tmp_path / "checkpoint")
    rest = gpu_ops.finish(spark, state=state).select("row_kind", "id", "symbol", "at", "price").collect()
    found = [*sink.changes, *map(tuple, rest)]
    assert {row[0] for row in found} == {"+I"}
    assert len(sink.changes) > 150
    last = {(row["symbol"], row["at"]): row["price"] for row in sources[1].changes}
    wanted = []
    for row in sources[0].changes:
        near = [(abs(at - row["at"]), at, price) for (symbol, at), price in last.items() if symbol == row["symbol"]]
        best = min(near, default=(7, 0, None))
        wanted.append((row["id"], row["symbol"], row["at"], best[2] if best[0] <= 6 else None))
    assert sorted(row[1:] for row in found) == sorted(wanted)
