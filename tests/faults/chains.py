"""Queries of several operators: in engines by partition, one task, one engine, or a task and those of the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_ops
from tests.faults import folded, tables

_BY_ITEM = (
    "SELECT c.item, count(*) AS n, sum(p.price) AS price, max(c.id) AS latest "
    "FROM clicks c LEFT JOIN {prices} p ON c.item = p.item WHERE c.id % 5 > 1 GROUP BY c.item"
)
_BY_REVENUE = (
    "SELECT n, count(*) AS customers, sum(revenue) AS revenue FROM (SELECT o.customer, count(*) AS n, sum(o.amount * "
    "p.price) AS revenue FROM {orders} o JOIN {prices} p ON o.item = p.item GROUP BY o.customer) GROUP BY n"
)
TEXTS = {"engines": _BY_ITEM, "task": _BY_REVENUE, "engine": _BY_REVENUE, "tasks": _BY_REVENUE}
EXPECTED = {name: text.format(orders="live", prices="quoted") for name, text in TEXTS.items()}
"""What each query comes to, in DuckDB."""

_WHERE = {
    "engines": ("in the same engine", 2, 1),
    "task": ("in the same Spark task", 2, 3),
    "engine": ("in the same engine", 1, 3),
    "tasks": ("in the same Spark task", 5, 2),  # below the last one, which has a task for each partition
}
"""Where each query's operators are, in how many partitions, and how many operators read another one."""


def queries(spark: Any, data: Path, state: Path) -> tuple[dict[str, Any], dict[str, Callable[[], bool]]]:
    """The changelogs, streaming, by the names of `EXPECTED`."""

    def read(name: str, schema: str) -> Any:
        return gpu_ops.read_files(spark, str(data / name), "json", schema, maxFilesPerTrigger=1)

    orders = gpu_ops.stream(read("orders", tables.ORDERS), name="orders", row_kind="op", unique_key="id")
    prices = gpu_ops.stream(read("prices", tables.PRICES), name="prices", row_kind="op", unique_key="item")
    clicks, made = read("clicks", tables.CLICKS), {}
    for name, text in TEXTS.items():
        said, partitions, edges = _WHERE[name]
        sql = text.format(orders="orders", prices="prices")
        options = {"partitions": partitions, "state": str(state / name), "name": name}
        inputs = {"prices": prices} | ({"clicks": clicks} if "clicks" in sql else {"orders": orders})
        made[name] = gpu_ops.sql(sql, tables=inputs, emit="per_event", **options)
        assert gpu_ops.explain(made[name]).count(said) == edges, gpu_ops.explain(made[name])
    return made, {}


def check(data: Path, checkpoint: Path, outputs: Mapping[str, list[str]]) -> None:
    """Each query's folded files are what DuckDB says."""
    del checkpoint
    con = tables.connected(data)
    for name, expected in EXPECTED.items():
        count, taken = folded.compare(con, name, expected, outputs[name])
        assert count > 2, f"{name}: {count} rows"
        assert taken > 0, f"{name}: nothing was taken back"
