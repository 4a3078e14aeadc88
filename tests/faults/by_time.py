"""Orders and rates, the joins by time over them, and what these come to: for the fault tests of the joins by time.

No row comes more than `DELAY_S` out of order, so none is late however Spark cuts micro-batches.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb

import gpu_ops
from tests.faults import folded

DELAY_S = 10
ORDERS, RATES = "id BIGINT, currency BIGINT, t TIMESTAMP", "op STRING, currency BIGINT, u TIMESTAMP, rate BIGINT"
NEAR_S = 5

_BEFORE = "o.currency = r.currency AND o.t >= r.u"
_NEAR = f"r.currency = o.currency AND r.u BETWEEN o.t AND o.t + INTERVAL {NEAR_S} SECOND"
_EXISTS = f"EXISTS (FROM quoted r WHERE {_NEAR})"
EXPECTED = {
    "temporal": f"SELECT id, rate FROM orders o ASOF LEFT JOIN versions r ON {_BEFORE}",
    "asof_per_batch": f"SELECT id, rate FROM orders o ASOF LEFT JOIN live r ON {_BEFORE}",
    "asof_at_watermark": f"SELECT id, rate FROM orders o ASOF JOIN quoted r ON {_BEFORE}",
    "interval_semi": f"SELECT id FROM orders o WHERE {_EXISTS}",
    "interval_anti": f"SELECT id FROM orders o WHERE NOT {_EXISTS}",
    "union_groups": "SELECT currency % 5 AS c, epoch_ms(t) // 1000 * 1000 AS ms, count(*) AS count_1 FROM "
    "(SELECT currency, t FROM orders UNION ALL SELECT currency, u FROM quoted) GROUP BY ALL",
    "in_one_engine": "SELECT currency, count(*) AS n, sum(rate) AS rates FROM "
    f"(SELECT o.currency, o.t, rate FROM orders o ASOF JOIN quoted r ON {_BEFORE}) o WHERE {_EXISTS} GROUP BY currency",
}
"""What each join comes to, in DuckDB: ids of orders, and the rates that they meet; and how many come in each second.

Of operators in one engine two go by a watermark of their own, and the last one by none.
"""
_TAKE_BACK = ("asof_per_batch", "in_one_engine")


def write(folder: Path, files: int, seed: int, rows: int = 300) -> None:
    """Files of orders and rates, one of each a micro-batch.

    Rates come and, some of them, go again soon after; no two rates of a currency have the same time.
    """
    choice, taken, going = random.Random(seed), set[tuple[int, int]](), list[dict[str, Any]]()
    for number in range(files):
        orders, rates, now = [], going, number * 20_000
        going = []
        for row in range(rows):
            time = now + choice.randrange(20_000)
            orders.append(
                {
                    "id": number * rows + row,
                    "currency": choice.randrange(100),
                    "t": _time(time - choice.randrange(5000)),
                }
            )
            version = choice.randrange(80), time - choice.randrange(2000)
            if version not in taken:
                taken.add(version)
                rate = {"op": "+I", "currency": version[0], "u": _time(version[1]), "rate": choice.randrange(10**9)}
                rates.append(rate)
                if time > now + 15_000 and choice.random() < 0.5:
                    going.append(rate | {"op": "-D"})
        folded.lines(folder / "orders", number, orders)
        folded.lines(folder / "rates", number, rates)


def _time(ms: int) -> str:
    return (dt.datetime(2026, 1, 1) + dt.timedelta(milliseconds=ms)).isoformat() + "Z"


def joins(spark: Any, data: Path, state: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The joins, streaming, by the names of `EXPECTED`; all of them end with their files."""

    def read(name: str, schema: str) -> Any:
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(data / name))

    orders, rates = read("orders", ORDERS), read("rates", RATES)
    quoted = rates.where("op = '+I'").drop("op")
    delay = f"{DELAY_S} seconds"
    left = gpu_ops.stream(orders, name="orders", event_time="t", delay=delay)
    versions = gpu_ops.stream(rates, name="rates", row_kind="op", event_time="u", delay=delay)
    quotes = gpu_ops.stream(quoted, name="quotes", event_time="u", delay=delay)

    def options(name: str) -> dict[str, Any]:
        return {"on": "currency", "partitions": 2, "state": str(state / name), "name": name}

    def seconds(df: Any, time: str, delay_s: int) -> Any:
        rows = df.selectExpr("currency % 5 AS currency", f"unix_millis({time}) div 1000 * 1000 AS second")
        return gpu_ops.stream(rows, event_time="second", delay=f"{delay_s} seconds")

    united = gpu_ops.sql(
        "SELECT c, ms, count(*) AS count_1 FROM (SELECT currency AS c, second AS ms FROM o UNION ALL "
        "SELECT currency, second FROM r) GROUP BY c, ms",
        o=seconds(orders, "t", DELAY_S), r=seconds(quoted, "u", 2 * DELAY_S), emit="at_watermark", partitions=2,
        state=str(state / "union_groups"), name="union_groups",
    )  # fmt: skip
    near: dict[str, Any] = {"lower": 0, "upper": f"{NEAR_S} seconds"}
    made = {
        "temporal": gpu_ops.temporal_join(left, versions, how="left", **options("temporal")),
        "asof_per_batch": gpu_ops.asof_join(left, versions, **options("asof_per_batch")),
        "asof_at_watermark": gpu_ops.asof_join(
            left, quotes, how="inner", emit="at_watermark", **options("asof_at_watermark")
        ),
        "interval_semi": gpu_ops.interval_join(left, quotes, how="semi", **near, **options("interval_semi")),
        "interval_anti": gpu_ops.interval_join(left, quotes, how="anti", **near, **options("interval_anti")),
        "union_groups": united,
    }
    met = gpu_ops.asof_join(left, quotes, how="inner", emit="at_watermark", **options("met"))
    near_by = gpu_ops.interval_join(
        gpu_ops.stream(met.where("row_kind = '+I'"), event_time="t"), quotes, how="semi", **near, **options("near_by")
    )
    by_currency = {"by": "currency", "aggregates": {"n": "count(*)", "rates": "sum(rate)"}, "partitions": 2}
    made["in_one_engine"] = gpu_ops.aggregate(near_by, **by_currency, state=str(state / "in_one_engine"))
    assert gpu_ops.explain(made["in_one_engine"]).count("in the same engine") == 2
    return made, {}


def check(data: Path, _: Path, outputs: Mapping[str, list[str]]) -> None:
    """Each join's folded files are what DuckDB says; only ``per_batch`` takes rows back."""
    con = duckdb.connect()
    folded.read(con, data, {"orders": ORDERS, "rates": RATES})
    con.sql("CREATE VIEW quoted AS SELECT currency, u, rate FROM rates WHERE op = '+I'")
    con.sql("CREATE VIEW live AS SELECT currency, u, rate FROM rates GROUP BY ALL HAVING count(*) = 1")
    con.sql(
        "CREATE VIEW versions AS "
        "SELECT currency, u, CASE WHEN count(*) = 1 THEN max(rate) END AS rate FROM rates GROUP BY ALL"
    )
    for name, expected in EXPECTED.items():
        count, taken = folded.compare(con, name, expected, outputs[name])
        assert count > 50, f"{name}: {count} rows"
        assert (taken > 0) == (name in _TAKE_BACK), f"{name}: {taken} rows taken back"
