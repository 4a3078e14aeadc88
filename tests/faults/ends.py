"""What has its result when the input has ended, and late rows: what the fault tests of these run, and what it comes to.

Orders, prices and clicks are those of `tables`; readings have a time, and a window that ends at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_ops
from tests.faults import folded, tables
from tests.kernels.own_functions import Bits

READINGS = "id BIGINT, device BIGINT, t BIGINT, w BIGINT"
WINDOW_MS, DELAY_MS = 10_000, 4_000

EXPECTED = {
    "chain": tables.EXPECTED["revenue"],
    "best": f"SELECT * FROM ({tables.EXPECTED['revenue']}) ORDER BY revenue DESC, customer LIMIT 7",
    "top": tables.EXPECTED["top"],
    "own": "SELECT customer, bit_or(amount & 255) AS bits, count(*) AS n FROM live GROUP BY customer",
    "firsts": "SELECT item, min(id) AS one, max(id) AS other FROM clicks GROUP BY item",
    "waiting": "SELECT c.id, p.price FROM clicks c LEFT JOIN quoted p USING (item)",
}
"""What each query comes to, in DuckDB; and ``late``, see `check`."""


def write(folder: Path, files: int, seed: int, rows: int = 200) -> None:
    """Those of `tables`, and files of readings, some of which come late however micro-batches are cut."""
    tables.write(folder, files, seed, rows)
    choice = random.Random(seed)
    for number in range(files):
        lines = []
        for row in range(rows):
            t = max(0, number * WINDOW_MS + choice.randrange(-3 * WINDOW_MS, WINDOW_MS))
            w = (t // WINDOW_MS + 1) * WINDOW_MS
            lines.append({"id": number * rows + row, "device": choice.randrange(5), "t": t, "w": w})
        folded.lines(folder / "readings", number, lines)


def queries(spark: Any, data: Path, state: Path) -> tuple[dict[str, Any], dict[str, Callable[[], bool]]]:
    """The changelogs, streaming, by the names of `EXPECTED`, and ``late``; none goes on until something is true."""
    for begun in state.iterdir():
        gpu_ops.reopen(state=str(begun))  # the end may have come, and the run been killed before it had written that

    def read(name: str, schema: str) -> Any:
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(data / name))

    orders = gpu_ops.stream(read("orders", tables.ORDERS), name="orders", row_kind="op", unique_key="id")
    prices = gpu_ops.stream(read("prices", tables.PRICES), name="prices", row_kind="op", unique_key="item")
    clicks = read("clicks", tables.CLICKS)
    readings = gpu_ops.stream(read("readings", READINGS), name="readings", event_time="t", delay=DELAY_MS)

    def options(name: str) -> dict[str, Any]:
        return {"partitions": 2, "state": str(state / name), "name": name}

    def at_end(name: str) -> dict[str, Any]:
        return {"emit": "at_end", **options(name)}

    sql = tables.REVENUE.format(orders="orders", prices="prices")
    best = f"{sql} ORDER BY revenue DESC, customer LIMIT 7"
    two = {"one": "first(id)", "other": "last(id)"}
    made = {
        "chain": gpu_ops.sql(sql, orders=orders, prices=prices, **at_end("chain")),
        "best": gpu_ops.sql(best, orders=orders, prices=prices, **at_end("best")),
        "top": gpu_ops.top(orders, "customer", order_by="amount DESC, id", n=3, **at_end("top")),
        "own": gpu_ops.aggregate(orders, "customer", {"bits": Bits("amount"), "n": "count(*)"}, **at_end("own")),
        "firsts": gpu_ops.aggregate(clicks, "item", two, **at_end("firsts")),
        "waiting": gpu_ops.lookup_join(
            clicks, prices, "item", how="left", wait_for_table=True, **options("waiting")
        ),
        "late": gpu_ops.aggregate(
            readings, ("w", "device"), {"n": "count(*)", "ids": "sum(id)"}, window_end="w", emit="at_watermark",
            late="tag", **options("late"),
        ),
    }  # fmt: skip
    return made, {}


def check(data: Path, checkpoint: Path, outputs: Mapping[str, list[str]]) -> None:
    """Each query's files are what DuckDB says; ``checkpoint`` has those of all queries.

    A reading is late if its window had ended by the watermark of the micro-batches before its own.
    """
    con = tables.connected(data)
    folded.came(con, checkpoint / "late")
    folded.read(con, data, {"readings": READINGS})
    con.sql(
        f"CREATE VIEW seen AS SELECT r.*, r.w <= coalesce((SELECT max(o.t) - {DELAY_MS} FROM readings o JOIN came c "
        "USING (file) WHERE c.batch < a.batch), -1) AS is_late FROM readings r JOIN came a USING (file)"
    )
    for name, expected in EXPECTED.items():
        count, taken = folded.compare(con, name, expected, outputs[name])
        assert count >= (7 if name == "best" else 10), f"{name}: {count} rows"
        assert taken == 0, f"{name}: {taken} rows taken back"
    groups = "SELECT w, device, count(*) AS n, sum(id) AS ids FROM seen WHERE NOT is_late GROUP BY w, device"
    for name, kind, wanted in (
        ("groups", "+I", groups),
        ("late", "late", "SELECT w, device, id, t FROM seen WHERE is_late"),
    ):
        path = str(checkpoint / f"{name}.parquet")
        con.sql(
            f"SELECT * REPLACE ('+I' AS row_kind) FROM read_parquet({outputs['late']}) WHERE row_kind = '{kind}'"
        ).write_parquet(path)
        count, _ = folded.compare(con, name, wanted, [path])
        assert count > 10, f"{name}: {count} rows"
