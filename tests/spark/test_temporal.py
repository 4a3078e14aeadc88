"""Temporal joins in streaming queries: against DuckDB over all versions, over restarts; what is refused."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops import stream
from spark.support import Sink, Source, drain, in_memory

pytestmark = pytest.mark.spark

ORDERS, RATES = (
    "id long, currency string, t timestamp, amount long",
    "op string, currency string, u timestamp, rate long",
)
VALID = """
SELECT o.id, o.currency, CASE WHEN r.op <> '-D' THEN r.rate END AS rate
FROM orders o ASOF LEFT JOIN (
    SELECT * FROM rates WHERE op <> '-U' QUALIFY row_number() OVER (PARTITION BY currency, u ORDER BY n DESC) = 1
) r ON o.currency = r.currency AND o.t >= r.u
"""


def at(second: int) -> str:
    return (dt.datetime(2026, 1, 1) + dt.timedelta(seconds=second)).isoformat() + "Z"


class Feed:
    """Orders and rates no more than ten seconds out of order."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.choice, self.now, self.orders, self.rates = random.Random(4), 0, [], []  # type: ignore[var-annotated]
        self.sources = Source(spark, folder / "orders", ORDERS), Source(spark, folder / "rates", RATES)

    def more(self, rows: int = 40) -> None:
        orders, rates = [], []
        for _ in range(rows):
            self.now += self.choice.choice((0, 1, 1, 3))
            time, currency = at(self.now - self.choice.randrange(10)), self.choice.choice("abcdef")
            orders.append({"id": len(self.orders) + len(orders), "currency": currency, "t": time, "amount": 5})
            if self.choice.random() < 0.5:
                op, time = self.choice.choice(("+I", "+U", "-U", "-D")), at(self.now - self.choice.randrange(10))
                rates.append({"op": op, "currency": self.choice.choice("abcde"), "u": time, "rate": self.now})
        for source, new, all_ in zip(self.sources, (orders, rates), (self.orders, self.rates), strict=True):
            source.add(*new)
            all_.extend(new)

    def joined(self, **options: Any) -> Any:
        left, right = (source.df for source in self.sources)
        rates = stream(right, name="rates", row_kind="op", event_time="u", delay="10 seconds")
        orders = left.withWatermark("t", "10 seconds")
        return gpu_ops.temporal_join(orders, rates, on="currency", how="left", **options)

    def expected(self) -> list[tuple[Any, ...]]:
        database = duckdb.connect()
        database.register("orders", pa.Table.from_pylist(self.orders))
        database.register("rates", pa.Table.from_pylist([{**r, "n": n} for n, r in enumerate(self.rates)]))
        return sorted(database.execute(VALID).fetchall(), key=repr)


def test_each_row_meets_the_version_valid_at_its_time(spark: Any, tmp_path: Path) -> None:
    feed, state, sink = Feed(spark, tmp_path), str(tmp_path / "state"), Sink()
    for run in range(3):
        for _ in range(2):
            feed.more()
        changes = feed.joined(state=state, name="valued", partitions=2)
        query = drain(changes.select("row_kind", "id", "currency", "rate"), sink, tmp_path / "checkpoint")
        found = {row[1:] for row in sink.changes}
        assert {row[0] for row in sink.changes} == {"+I"}
        assert found <= set(feed.expected())
        metrics = query.lastProgress["observedMetrics"]["valued"]["metrics"]
        # the watermark of the last micro-batch is that of all rows before it
        assert metrics["watermark_ms"] is not None
        assert len(found) > 50 * run + 20
        assert metrics["right_state_rows"] < len(feed.rates)
    rest = gpu_ops.finish(spark, state=state).select("id", "currency", "rate")
    assert sorted([*(row[1:] for row in sink.changes), *map(tuple, rest.collect())], key=repr) == feed.expected()
    text = gpu_ops.explain(changes)
    for line in (
        "temporal join, left: left, rates  (metrics 'valued')",
        "version     the version of rates valid at left.t, by rates.u",
        "kept until the watermark reaches its time",
        "kept until the watermark passes the next version of its key",
        "at_watermark: rows that nothing changes any more",
    ):
        assert line in text
    orders, rates = (
        spark.createDataFrame([tuple(row.values()) for row in rows], schema.replace("timestamp", "string"))
        for rows, schema in ((feed.orders, ORDERS), (feed.rates, RATES))
    )
    orders, rates = (df.withColumn(c, df[c].cast("timestamp")).coalesce(1) for df, c in ((orders, "t"), (rates, "u")))
    static = gpu_ops.temporal_join(orders, stream(rates, row_kind="op"), on="currency", time=("t", "u"), how="left")
    assert sorted(map(tuple, static.select("id", "currency", "rate").collect()), key=repr) == feed.expected()


def test_refusals(spark: Any, tmp_path: Path) -> None:
    feed = Feed(spark, tmp_path)
    orders, rates = (source.df for source in feed.sources)
    left, right = orders.withWatermark("t", "1 second"), stream(rates, row_kind="op", event_time="u", delay="1 second")

    def refused(message: str, error: type[Exception] = gpu_ops.DescriptionError, **options: Any) -> None:
        given: dict[str, Any] = {"left": left, "right": right, "on": "currency", **options}
        with pytest.raises(error, match=message):
            in_memory(gpu_ops.temporal_join, given.pop("left"), given.pop("right"), given.pop("on"), **given)

    refused("how='full'; a temporal join is one of inner, left", how="full")
    refused("a temporal join needs on=: columns that identify a row of the versioned table 'right'", on=None)
    refused("'left' has no watermark: say which column", left=orders)
    refused("late='never'; it is one of join, drop, tag", late="never")
    refused("unique key's column 'rate' is not among the columns of on=, currency",
            right=stream(rates, row_kind="op", unique_key=["currency", "rate"], event_time="u"))  # fmt: skip
    refused("insert-only, unique_key= has no place here", left=stream(left, unique_key="id", event_time="t"))
    refused("ttl is at least two milliseconds, this one is 0 ms", ttl=0)
    forgetful = in_memory(gpu_ops.temporal_join, left, right, "currency", ttl="2 days")
    assert "forgotten, with the rows that wait, 2 days to 3 days after anything came for it" in gpu_ops.explain(
        forgetful
    )
    refused(
        "a temporal join has one ttl= for both inputs, its own",
        right=stream(rates, row_kind="op", event_time="u", ttl="1 day"),
    )
    refused("has no option emit=", TypeError, emit="per_event")
    refused("heartbeat=0; it is at least a millisecond", heartbeat=0)
    # a row that is taken back on the left, before any state has changed
    feed.sources[1].add({"op": "-D", "currency": "a", "u": at(1), "rate": 1})
    wrong = in_memory(gpu_ops.temporal_join, right, right, "currency", suffixes=("", "_r"))
    with pytest.raises(Exception, match=r"this input takes insertions only \(for example '-D'\)"):
        drain(wrong, Sink(), tmp_path / "checkpoint")
