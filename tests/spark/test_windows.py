"""Window functions through Spark: upserts, a join below, over restarts and rescaling; and in a job."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gpu_ops
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.spark.server.rescale import rescale
from spark.support import Sink, drain, fold
from spark.test_top import Shop

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

ONE = (
    "SELECT id, item, amount, sum(amount) OVER w AS so_far, lag(amount) OVER w AS before, "
    "count(*) OVER (PARTITION BY item) AS n FROM orders WINDOW w AS (PARTITION BY item ORDER BY amount DESC, id)"
)
JOINED = (
    "SELECT o.id, i.region, rank() OVER (PARTITION BY i.region ORDER BY o.amount) AS place, "
    "o.amount - first_value(o.amount) OVER (PARTITION BY i.region ORDER BY o.amount, o.id ROWS 2 PRECEDING) AS more "
    "FROM orders o JOIN items i ON o.item = i.item"
)


def by_spark(spark: Any, shop: Shop, sql: str) -> list[Any]:
    orders, items = ([tuple(row) for row in kept.values()] for kept in shop.kept)
    spark.createDataFrame(orders, "id long, item string, amount long").createOrReplaceTempView("orders")
    spark.createDataFrame(items, "item string, region string").createOrReplaceTempView("items")
    return sorted((tuple(row) for row in spark.sql(sql).collect()), key=repr)


@pytest.mark.parametrize(
    ("sql", "emit"),
    [
        (ONE, "per_event"),
        *(pytest.param(s, e, marks=pytest.mark.slow) for s, e in ((ONE, "per_batch"), (JOINED, "per_event"))),
    ],
)
def test_of_changing_rows_over_restarts(spark: Any, tmp_path: Path, sql: str, emit: Any) -> None:
    shop, state, sink = Shop(spark, tmp_path), str(tmp_path / "state"), Sink()
    for turn in range(4):
        shop.more()
        given = dict(zip(("orders", "items"), shop.inputs(), strict=True))
        named = {name: one for name, one in given.items() if f" {name} " in f"{sql} "}
        changes = gpu_ops.sql(sql, state=state, emit=emit, **named, **({"partitions": 2} if not turn else {}))
        drain(changes, sink, tmp_path / "checkpoint")
        assert sink.table == by_spark(spark, shop, sql)
        if turn == 1:
            for manifest in Path(state).rglob("manifest.json"):
                rescale(str(manifest.parent), 3)


JOB = """
CREATE TABLE orders (op STRING, id BIGINT, item STRING, amount BIGINT, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'json', 'path' = 'orders', 'row_kind' = 'op');
CREATE TABLE changes WITH ('connector' = 'json', 'path' = 'changes');
SET 'state' = 'state';
SET 'checkpoint' = 'checkpoint';
INSERT INTO changes
SELECT id, item, SUM(amount) OVER w AS so_far, LEAD(id) OVER w AS next FROM orders
WINDOW w AS (PARTITION BY item ORDER BY amount, id);
"""


def test_in_a_job(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "job.sql").write_text(JOB)
    turns = [
        (
            [("+I", 1, "pen", 5), ("+I", 2, "pen", 3), ("+I", 3, "cup", 7)],
            [(1, "pen", 8, None), (2, "pen", 3, 1), (3, "cup", 7, None)],
        ),
        ([("-D", 2, "pen", 3), ("+U", 3, "pen", 1)], [(1, "pen", 6, None), (3, "pen", 1, 1)]),
    ]
    for number, (rows, wanted) in enumerate(turns):
        lines = [json.dumps(dict(zip(("op", "id", "item", "amount"), row, strict=True))) for row in rows]
        (tmp_path / "orders" / f"{number}.json").write_text("\n".join(lines))
        runner.run(load(tmp_path / "job.sql"), Console(file=io.StringIO()), once=True)
        schema = "row_kind STRING, id BIGINT, item STRING, so_far BIGINT, next BIGINT"
        told = [tuple(row) for row in spark.read.schema(schema).json(str(tmp_path / "changes")).collect()]
        assert fold(sorted(told, key=lambda row: row[0] == "-D")) == sorted(wanted, key=repr)
