"""Those queries of `benchmarks.large_state_peers` that run on Spark have the rows that DuckDB has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.large_state import orders, payments
from benchmarks.large_state_peers import expected, joined, save

pytestmark = [pytest.mark.spark, pytest.mark.thorough]


@pytest.mark.parametrize(
    "name", ["ours", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spark_left", "spark_inner"))]
)
def test_same_rows(spark: Any, tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    zone = "spark.sql.session.timeZone"
    request.addfinalizer(functools.partial(spark.conf.set, zone, spark.conf.get(zone)))
    spark.conf.set(zone, "UTC")  # as there: payments are given the times of their orders
    save(tmp_path / "orders", "all", 0, orders(np.arange(1000)))
    for number in range(2):
        save(tmp_path / "payments", "all", number, payments(np.arange(number, 1000, 7), number))
    writer = joined(name, spark, tmp_path).writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    said = [p["observedMetrics"]["out"] for p in query.recentProgress if "out" in p["observedMetrics"]]
    found = tuple(sum(one[column] or 0 for one in said) for column in ("rows", "sum"))
    assert found == expected(tmp_path, "left" if name == "ours" else "inner")
