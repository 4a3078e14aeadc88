"""Every operator on a session with NVIDIA's plugin, which only plans and explains; writes what came of it as JSON.

``test_rapids_plans.py`` runs ``python rapids_app.py FOLDER JAR``. In the mode ``explainOnly`` the plugin needs no card:
it rewrites each plan as it would, says what of it would run on the GPU, and leaves the work to Spark.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import gpu_ops
from gpu_ops import stream
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.spark import join_progress, rapids_conf, session

ORDERS = "order_id BIGINT, item STRING, at TIMESTAMP"
PRICES = "op STRING, order_id BIGINT, price DOUBLE, at TIMESTAMP"
MARK = "===== case "

JOB = """
    CREATE TABLE orders (order_id BIGINT, item STRING) WITH ('connector' = 'parquet', 'path' = 'orders');
    CREATE TABLE prices (order_id BIGINT, price DOUBLE) WITH ('connector' = 'parquet', 'path' = 'prices');
    CREATE TABLE out WITH ('connector' = 'parquet', 'path' = 'job');
    SET 'state' = 'job_state'; SET 'checkpoint' = 'job_checkpoint';
    INSERT INTO out SELECT o.order_id, p.price FROM orders o LEFT JOIN prices p ON o.order_id = p.order_id
"""


def write(folder: Path) -> None:
    """Three orders and two prices, as Parquet files."""
    at = pa.array([1_000_000, 2_000_000, 3_000_000], pa.timestamp("us", "UTC"))
    orders = {"order_id": [1, 2, 3], "item": ["book", "pen", "ink"], "at": at}
    prices = {"op": ["+I", "+I"], "order_id": [1, 2], "price": [1.5, 2.5], "at": at[:2]}
    for name, columns in (("orders", orders), ("prices", prices)):
        (folder / name).mkdir()
        pq.write_table(pa.table(columns), folder / name / "0.parquet")


def cases(spark: Any, folder: Path) -> dict[str, Callable[[str], Any]]:
    """Changelogs by name; each takes a state folder."""
    orders = spark.readStream.schema(ORDERS).parquet(str(folder / "orders"))
    prices = spark.readStream.schema(PRICES).parquet(str(folder / "prices"))
    added = prices.select("order_id", "price")
    other = added.withColumnRenamed("price", "other")
    timed = {"time": ("at", "at"), "lower": "-5 seconds", "upper": "5 seconds", "suffixes": ("", "_2")}
    left = {"on": "order_id", "how": "left"}

    def chain(state: str) -> Any:
        first = gpu_ops.join(orders, added, **left, state=f"{state}_1")
        return gpu_ops.join(stream(first, name="left"), stream(other, name="right"), **left, state=f"{state}_2")

    def by_arrow(state: str) -> Any:
        inputs = [
            gpu_ops.read_files(spark, str(folder / name), "parquet", schema)
            for name, schema in (("orders", ORDERS), ("prices", "order_id BIGINT, price DOUBLE"))
        ]
        return gpu_ops.join(*inputs, **left, state=state)

    return {
        "inserts": lambda state: gpu_ops.join(orders, added, **left, state=state),
        "per_event": lambda state: gpu_ops.join(orders, added, **left, emit="per_event", state=state),
        "changes": lambda state: gpu_ops.join(
            orders, stream(prices.drop("at"), row_kind="op"), **left, state=state
        ),
        "decimals": lambda state: gpu_ops.join(
            orders, added.withColumn("price", added.price.cast("decimal(9, 2)")), **left, state=state
        ),
        "semi": lambda state: gpu_ops.semi_join(orders, added, on="order_id", state=state),
        "multi": lambda state: gpu_ops.multi_join(
            [stream(orders, name="a"), stream(added, name="b"), stream(other, name="c")],
            on=["order_id"], how="left", state=state,
        ),
        "interval": lambda state: gpu_ops.interval_join(
            orders.withWatermark("at", "1 second"), prices.drop("op").withWatermark("at", "1 second"),
            on="order_id", **timed, state=state,
        ),
        "sql": lambda state: gpu_ops.sql(
            "SELECT o.order_id, p.price FROM o JOIN p ON o.order_id = p.order_id WHERE o.item <> 'pen'",
            o=orders, p=added, state=state,
        ),
        "chain": chain,
        "read_files": by_arrow,
    }  # fmt: skip


def run(spark: Any, folder: Path, name: str, make: Callable[[str], Any]) -> dict[str, Any]:
    """A query over all there is, into Parquet files."""
    changes = make(str(folder / f"{name}_state"))
    writer = changes.writeStream.format("parquet").option("checkpointLocation", str(folder / f"{name}_checkpoint"))
    query = writer.option("path", str(folder / name)).trigger(availableNow=True).start()
    query.awaitTermination()
    progress = query.lastProgress
    return {
        "rows": rows(spark, folder / name),
        "explained": gpu_ops.explain(changes),
        "metrics": {join.name: join.metrics for join in join_progress(progress)},
        "observed": list(progress["observedMetrics"]),
    }


def rows(spark: Any, folder: Path) -> list[list[Any]]:
    """The rows of Parquet files without their times, in some order."""
    found = spark.read.parquet(str(folder)).drop("at", "at_2")
    plain = ([float(v) if isinstance(v, Decimal) else v for v in row] for row in found.collect())
    return sorted(plain, key=repr)


def main(folder: Path, jar: str) -> None:
    """All of them, one after the other."""
    write(folder)
    config = {
        **rapids_conf(jar=jar),
        "spark.rapids.sql.mode": "explainOnly",
        "spark.rapids.sql.explain": "ALL",
        "spark.sql.session.timeZone": "UTC",
    }
    spark = session("rapids plans", master="local[2]", config=config)
    seen: dict[str, Any] = {}
    for name, make in cases(spark, folder).items():
        print(MARK + name, file=sys.stderr, flush=True)
        seen[name] = run(spark, folder, name, make)
    print(MARK + "static", file=sys.stderr, flush=True)
    static = [spark.read.parquet(str(folder / name)).drop("at") for name in ("orders", "prices")]
    found = gpu_ops.join(static[0], stream(static[1], row_kind="op"), on="order_id", how="left")
    seen["static"] = {"rows": sorted(([*row] for row in found.collect()), key=repr)}
    print(MARK + "job", file=sys.stderr, flush=True)
    (folder / "job.sql").write_text(JOB)
    console = Console(record=True, width=200, quiet=True)
    outcome = runner.run(load(folder / "job.sql"), console, once=True)
    seen["job"] = {"rows": rows(spark, folder / "job"), "in": outcome.rows_in, "out": outcome.rows_out}
    (folder / "seen.json").write_text(json.dumps(seen))
    spark.stop()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])
