"""A join of Kafka's topics into a topic, all by librdkafka: what its fault test runs, and what it comes to.

The sink is at-least-once. A message that comes again has the header ``sequence`` of its first time, and says the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import gpu_ops
from benchmarks import changes
from tests.faults import folded
from tests.messages.broker import PARTITIONS, Broker

OUT = "joined"
_ROWS = 20_000

_brokers: dict[Path, Broker] = {}
"""By folder of data the stand-in for a broker, which lives in the test's process."""


def write(data: Path, files: int, seed: int) -> None:
    """Changes as messages, those of an order in one partition; a micro-batch takes a share of them."""
    broker = _brokers[data] = Broker()
    data.mkdir()
    (data / "job.json").write_text(json.dumps({"servers": broker.servers, "most": _ROWS // files}))
    for name, table in changes.generate(_ROWS, seed=seed).inputs.items():
        pq.write_table(table, data / f"{name}.parquet")
        broker.send(name, *((row["order_id"] % PARTITIONS, json.dumps(row)) for row in table.to_pylist()))


def query(spark: Any, data: Path, work: Path) -> Any:
    """Starts the join, which goes on from its checkpoint and ends with the messages that are there."""
    job = json.loads((data / "job.json").read_text())
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(job["most"])}
    sides = []
    for name, schema in folded.ORDERS_PRICES.items():
        rows = gpu_ops.read_kafka(
            spark, job["servers"], name, "json", schema, name=name, options=options, client="librdkafka"
        )
        sides.append(gpu_ops.stream(rows, name=name, row_kind="op", unique_key="order_id", updates="retract"))
    joined = gpu_ops.join(*sides, on="order_id", how="left", state=str(work / "state" / OUT), partitions=2)
    checkpoint = str(work / "checkpoint" / OUT)
    return gpu_ops.write_kafka(
        joined, job["servers"], OUT, key="order_id", checkpoint=checkpoint, name=OUT, availableNow=True
    )


def check(data: Path, work: Path) -> None:
    """The messages, each once, come to DuckDB's left join; in their order each takes back a row that is there."""
    found: dict[bytes, bytes] = {}
    sent = 0
    for messages in _brokers.pop(data).received(OUT):
        for message in messages:
            ((_, sequence),) = message.headers()
            value, sent = message.value(), sent + 1
            assert found.setdefault(sequence, value) == value, f"{sequence!r} came again as {value!r}"
    print(f"{sent - len(found)} of {len(found)} messages came again")
    rows = [json.loads(value) for value in found.values()]
    there: set[int] = set()
    for row in rows:
        order = row["order_id"]
        assert (row["row_kind"] == "+I") == (order not in there), f"{row} where there is {order in there}"
        there ^= {order}
    pq.write_table(pa.Table.from_pylist(rows), work / "out.parquet")
    given = {name: f"read_parquet('{data}/{name}.parquet')" for name in folded.ORDERS_PRICES}
    count, taken = folded.compare_left_join(given, [str(work / "out.parquet")])
    assert min(count, taken) > 1000
