"""A join by a foreign key of upserts, on two cores in two partitions and in one.

Orders with the key `id` come again with another item, prices with the key `item` come again with another price, and
are joined by `item`: the planner makes retractions of the orders first, by `id`, and then distributes both by `item`.
Rates are upserts per second from the start of the first micro-batch to the end of the last, in a JVM that has run each
case before. Two partitions can be twice as fast as one only where one leaves a core alone: `cores_busy` says how many
each keeps busy, as the machine counts them. The folded result is compared with what the data says.

    python -m benchmarks.upserts [--rows 12000000] [--batch 2000000] [--rounds 3]
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import gpu_ops
from benchmarks.common import arguments, busy_seconds, interleave, ratio, record, summarise
from benchmarks.spark_queries import fresh, local_session

SCHEMAS = {"orders": "id bigint, item bigint, quantity bigint", "prices": "item bigint, price double"}
PRICES = 0.1
"""Their share of the upserts."""


FILES = 2
"""Of each input in a micro-batch: a file is one task's, so that both cores read."""


def write(folder: Path, rows: int, batch: int) -> int:
    """`FILES` files of each input per micro-batch; how many orders there are at the end, with a price or without."""
    rng, files = np.random.default_rng(5), max(1, rows // batch)
    ids, items = rows // 2, rows // 12
    orders = set()
    for name in SCHEMAS:
        (folder / name).mkdir()
    for number in range(files):
        size = {"prices": int(batch * PRICES), "orders": batch - int(batch * PRICES)}
        own = rng.integers(0, ids, size["orders"])
        orders.update(np.unique(own).tolist())
        tables = {
            "orders": {"id": own, "item": rng.integers(0, items, own.size), "quantity": rng.integers(1, 9, own.size)},
            "prices": {"item": rng.integers(0, items, size["prices"]), "price": rng.random(size["prices"])},
        }
        for name, columns in tables.items():
            table = pa.table(columns)
            step = -(-len(table) // FILES)
            for part in range(FILES):
                path = folder / name / f"{number:04d}_{part}.parquet"
                pq.write_table(table.slice(part * step, step), path)
                os.utime(path, (1.7e9 + number, 1.7e9 + number))
    return len(orders)


def joined(spark: SparkSession, data: Path, work: Path, partitions: int) -> DataFrame:
    """The left join, with durable state."""
    orders, prices = (
        gpu_ops.stream(
            gpu_ops.read_files(spark, str(data / name), "parquet", schema, maxFilesPerTrigger=FILES),
            unique_key=key, name=name,
        )
        for (name, schema), key in zip(SCHEMAS.items(), ("id", "item"), strict=True)
    )  # fmt: skip
    return gpu_ops.join(orders, prices, on="item", how="left", state=str(work / "state"), partitions=partitions)


def main() -> None:
    """Run, check, print, record."""
    parser = arguments(__doc__, "upserts", rounds=3)
    parser.add_argument("--rows", type=int, default=12_000_000, help="upserts, both inputs together")
    parser.add_argument("--batch", type=int, default=2_000_000, help="upserts in a micro-batch")
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        data = Path(folder)
        expected = write(data, options.rows, options.batch)
        spark = local_session()

        def once(partitions: int) -> dict[str, Any]:
            before = busy_seconds(), time.perf_counter()
            done = fresh(lambda work: joined(spark, data, work, partitions))
            done["cores_busy"] = (busy_seconds() - before[0]) / (time.perf_counter() - before[1])
            if done["folded_rows"] != expected:
                raise SystemExit(f"wrong result: {done['folded_rows']} rows, {expected} expected")
            return done

        cases = {"two_partitions": lambda: once(2), "one_partition": lambda: once(1)}
        runs = interleave(cases, options.rounds, warmup=options.warmup)
        spark.stop()
    rates = {name: summarise(options.rows / run["seconds"] for run in found) for name, found in runs.items()}
    results = {
        "upserts_per_second": rates,
        "two_over_one": ratio(rates["two_partitions"], rates["one_partition"]),
        "cores_busy": {name: summarise(run["cores_busy"] for run in found) for name, found in runs.items()},
        "runs": runs,
    }
    record(options, "upserts", results, master="local[2]")


if __name__ == "__main__":
    main()
