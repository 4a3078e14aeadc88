"""Jobs whose sinks are views in real parts."""

from __future__ import annotations

import io
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from services.conftest import listens

pytestmark = [pytest.mark.spark, pytest.mark.services]

BROKER = "'bootstrap_servers' = 'localhost:19092', 'topic' = '{name}'"
JOB = """
CREATE TABLE orders (id BIGINT, item STRING, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'json', 'path' = 'orders', 'row_kind' = 'op', 'max_files_per_trigger' = '1');
CREATE TABLE prices (item STRING, price DOUBLE) WITH ('connector' = 'json', 'path' = 'prices');
CREATE TABLE shop (id BIGINT, item STRING, price DOUBLE, PRIMARY KEY (id) NOT ENFORCED) WITH ({options});
SET state = 'state'; SET checkpoint = 'checkpoint'; SET partitions = 2;
INSERT INTO shop SELECT o.id, o.item, p.price FROM orders o LEFT JOIN prices p ON o.item = p.item;
"""


def delta(spark: Any, folder: Path, name: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in spark.read.format("delta").load(str(folder / name)).collect()]


def topic(spark: Any, folder: Path, name: str) -> list[tuple[Any, ...]]:
    options = {"kafka.bootstrap.servers": "localhost:19092", "subscribe": name}
    rows = spark.read.format("kafka").options(**options).load().selectExpr("offset", "string(key)", "string(value)")
    last = {key: json.loads(value or "null") for _, key, value in sorted(map(tuple, rows.collect()))}
    current = [value.get("after", value) for value in last.values() if value is not None]
    return [(row["id"], row["item"], row["price"]) for row in current if row]


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ("'connector' = 'delta', 'path' = '{name}'", delta),
        ("'connector' = 'upsert-kafka', " + BROKER, topic),
        ("'connector' = 'kafka', 'format' = 'debezium-json', " + BROKER, topic),
    ],
    ids=["delta", "upsert-kafka", "debezium"],
)
def test_a_job_keeps_a_view(spark: Any, tmp_path: Path, options: str, read: Any) -> None:
    if "kafka" in options and not listens("kafka"):
        pytest.skip("no Kafka on port 19092")
    name = f"v{uuid.uuid4().hex[:8]}"
    (tmp_path / "shop.sql").write_text(JOB.format(options=options.format(name=name)))
    arrivals = [
        ("orders", {"op": "+I", "id": 1, "item": "book"}, {"op": "+I", "id": 2, "item": "pen"}),
        ("prices", {"item": "book", "price": 9.5}),
        ("orders", {"op": "-D", "id": 2, "item": "pen"}, {"op": "+I", "id": 3, "item": "book"}),
    ]
    for number, (folder, *rows) in enumerate(arrivals):
        for made in ("orders", "prices"):
            (tmp_path / made).mkdir(exist_ok=True)
        (tmp_path / folder / f"{number}.json").write_text("\n".join(map(json.dumps, rows)))
        runner.run(load(tmp_path / "shop.sql"), Console(file=io.StringIO()), once=True)
    assert sorted(read(spark, tmp_path, name)) == [(1, "book", 9.5), (3, "book", 9.5)]
