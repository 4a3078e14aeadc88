"""Orders and prices that change, clicks, and a table that is read again: what the fault tests of aggregates, top-N,
lookups and tables run, and what it comes to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb

import gpu_ops
from tests.faults import folded

ORDERS = "op STRING, id BIGINT, customer BIGINT, item BIGINT, amount BIGINT, seq BIGINT"
PRICES = "op STRING, item BIGINT, price BIGINT, seq BIGINT"
CLICKS = "id BIGINT, item BIGINT"
ITEMS, TIERS = 40, 6
"""How many items there are, and how many versions of the table of their tiers."""

_GROUPS = (
    "SELECT customer, count(*) AS n, sum(amount) AS total, max(amount) AS most, count(DISTINCT item) AS items "
    "FROM live GROUP BY customer"
)
REVENUE = (
    "SELECT o.customer, sum(o.amount * p.price) AS revenue, count(*) AS n "
    "FROM {orders} o JOIN {prices} p ON o.item = p.item GROUP BY o.customer HAVING count(*) > 1"
)
EXPECTED = {
    "aggregate_per_batch": _GROUPS,
    "aggregate_per_event": _GROUPS,
    "top": "SELECT id, customer, amount FROM live "
    "QUALIFY row_number() OVER (PARTITION BY customer ORDER BY amount DESC, id) <= 3",
    "latest": "SELECT id, customer, item, amount, seq FROM live",
    "lookup": "SELECT c.id, p.price FROM clicks c JOIN came a ON a.name = 'clicks' AND a.file = c.file "
    "LEFT JOIN (FROM prices q JOIN came b ON b.name = 'prices' AND b.file = q.file) p "
    "ON p.item = c.item AND p.batch <= a.batch QUALIFY row_number() OVER (PARTITION BY c.id ORDER BY p.seq DESC) = 1",
    "refreshed": "SELECT id, tier FROM live LEFT JOIN tiers USING (item)",
    "revenue": REVENUE.format(orders="live", prices="quoted"),
}
"""What each query comes to, in DuckDB."""


def write(folder: Path, files: int, seed: int, rows: int = 200) -> None:
    """Files of orders, prices and clicks, one of each a micro-batch; and the versions of the table of tiers."""
    choice, orders, seq = random.Random(seed), dict[int, bool](), 0
    for number in range(files):
        lines: dict[str, list[dict[str, Any]]] = {"orders": [], "prices": [], "clicks": []}
        for row in range(rows):
            seq, ident = seq + 1, choice.randrange(rows * 2)
            op = choice.choice(("+U", "+U", "-D")) if orders.get(ident) else "+I"
            orders[ident] = op != "-D"
            values = {
                "customer": choice.randrange(30),
                "item": choice.randrange(ITEMS),
                "amount": choice.randrange(999),
            }
            lines["orders"].append({"op": op, "id": ident, **values, "seq": seq})
            lines["clicks"].append({"id": number * rows + row, "item": choice.randrange(ITEMS)})
            if row % 5 == 0:
                item, price = choice.randrange(ITEMS // 2), choice.randrange(1, 1000)
                lines["prices"].append({"op": "+U", "item": item, "price": price, "seq": seq})
        for name, found in lines.items():
            folded.lines(folder / name, number, found)
    for version in range(TIERS):
        (folder / "tiers").mkdir(exist_ok=True)
        duckdb.sql(
            f"SELECT item, item * 100 + {version} AS tier FROM range({ITEMS}) r(item) "
            f"WHERE item % {TIERS} <> {version} AND (item % 3 = 0 OR item % {TIERS} < {version})"
        ).write_parquet(str(folder / "tiers" / f"{version}.parquet"))


class Tiers:
    """The table of tiers: each time that it is read again it is one version on.

    Args:
        spark: the session.
        folder: of its versions.
        count: a file that grows with each reading, also over restarts.
    """

    def __init__(self, spark: Any, folder: Path, count: Path) -> None:
        self._spark, self._folder, self._count = spark, folder, count
        self.last_seen = 0

    def __call__(self) -> Any:
        with self._count.open("a") as file:
            file.write(".")
        version = min(self._count.stat().st_size, TIERS) - 1
        self.last_seen += version == TIERS - 1
        return self._spark.read.schema("item BIGINT, tier BIGINT").parquet(f"{self._folder}/{version}.parquet")


def queries(spark: Any, data: Path, state: Path) -> tuple[dict[str, Any], dict[str, Callable[[], bool]]]:
    """The changelogs, streaming, by the names of `EXPECTED`; and those that go on until something is true."""

    def read(name: str, schema: str) -> Any:
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(data / name))

    orders = gpu_ops.stream(read("orders", ORDERS), name="orders", row_kind="op", unique_key="id", sequence_by="seq")
    prices = gpu_ops.stream(read("prices", PRICES), name="prices", row_kind="op", unique_key="item", sequence_by="seq")
    tiers = Tiers(spark, data / "tiers", state / "tiers_read")
    table = gpu_ops.stream(tiers, name="tiers", unique_key="item", refresh="500 milliseconds")

    def options(name: str) -> dict[str, Any]:
        return {"partitions": 2, "state": str(state / name), "name": name}

    measures = {"n": "count(*)", "total": "sum(amount)", "most": "max(amount)", "items": "count(distinct item)"}
    made = {
        f"aggregate_{emit}": gpu_ops.aggregate(orders, "customer", measures, emit=emit, **options(f"aggregate_{emit}"))
        for emit in ("per_batch", "per_event")
    }
    made["top"] = gpu_ops.top(orders, "customer", order_by="amount DESC, id", n=3, emit="per_event", **options("top"))
    made["latest"] = gpu_ops.latest(orders, emit="per_event", **options("latest"))
    made["lookup"] = gpu_ops.lookup_join(read("clicks", CLICKS), prices, "item", how="left", **options("lookup"))
    made["refreshed"] = gpu_ops.join(orders, table, "item", how="left", **options("refreshed"))
    sql = REVENUE.format(orders="orders", prices="prices")
    made["revenue"] = gpu_ops.sql(sql, orders=orders, prices=prices, **options("revenue"))
    # a version has been taken once the table is read again; a reading that a kill cut short is repeated
    return made, {"refreshed": lambda: tiers.last_seen > 3}


def connected(data: Path) -> duckdb.DuckDBPyConnection:
    """DuckDB with the inputs, and ``live`` and ``quoted``: the orders and prices that there are at the end."""
    con = duckdb.connect()
    folded.read(con, data, {"orders": ORDERS, "prices": PRICES, "clicks": CLICKS})
    con.sql("CREATE VIEW last AS FROM orders QUALIFY seq = max(seq) OVER (PARTITION BY id)")
    con.sql("CREATE VIEW live AS FROM last WHERE op <> '-D'")
    con.sql("CREATE VIEW quoted AS FROM prices QUALIFY seq = max(seq) OVER (PARTITION BY item)")
    return con


def check(data: Path, checkpoint: Path, outputs: Mapping[str, list[str]]) -> None:
    """Each query's folded files are what DuckDB says; ``checkpoint`` has those of all queries."""
    con = connected(data)
    folded.came(con, checkpoint / "lookup")
    con.sql(f"CREATE VIEW tiers AS FROM read_parquet('{data}/tiers/{TIERS - 1}.parquet')")
    for name, expected in EXPECTED.items():
        count, taken = folded.compare(con, name, expected, outputs[name])
        assert count > 10, f"{name}: {count} rows"
        assert (taken > 0) == (name != "lookup"), f"{name}: {taken} rows taken back"
