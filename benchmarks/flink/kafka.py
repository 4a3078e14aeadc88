"""Kafka JSON in and out on two cores: `read_kafka`, an inner join and Spark's Kafka sink, against Flink SQL.

Both read the same topic of two partitions by two tasks, join each message with one of 1,000 rows and send one JSON
message per row to a new topic of two partitions of the same broker. Times are from the start of the job to its end, in
a JVM that has run it `--warmup` times before; rates are messages read per second. Both have the same settings of
Kafka's client (`PRODUCER`, `CONSUMER`): by default a producer sends many small batches, which keeps the broker busy.
The messages are the same; once more ours have the header ``sequence``, by which a consumer can drop repeated ones.
Flink has its state on the heap and no checkpoints (its sink delivers at least once), ours writes its state durably and
numbers its messages. The topics that came out are compared by their number of messages and a sum over a column. Needs
the broker and jars of `make services` and a connector of Flink's (`--connector`: flink-sql-connector-kafka, from
Maven).

    GPU_JOIN_SERVICES=.services python -m benchmarks.flink.kafka --connector JAR [--messages 1000000] [--rounds 3]
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import gpu_ops
from benchmarks.common import again, arguments, interleave, ratio, record, summarise
from benchmarks.flink.run import FLINK_VERSION, run_sql
from benchmarks.kafka import BROKER, SCHEMA, sent
from gpu_ops.spark import session

PRODUCER = {"linger.ms": "50", "batch.size": "262144"}
CONSUMER = {"max.poll.records": "5000"}

ROWS = 1000
"""Of the table: each message has its row."""

FLINK = """
CREATE TABLE orders (order_id BIGINT, customer BIGINT, amount DOUBLE, note STRING, `at` TIMESTAMP_LTZ(3)) WITH (
  'connector' = 'kafka', 'topic' = '{topic}', 'properties.bootstrap.servers' = '{broker}', 'format' = 'json',
  'json.timestamp-format.standard' = 'ISO-8601', {consumer}, 'scan.startup.mode' = 'earliest-offset',
  'scan.bounded.mode' = 'latest-offset')

CREATE TABLE prices (customer BIGINT, price DOUBLE) WITH (
  'connector' = 'filesystem', 'format' = 'json', 'path' = '{prices}')

CREATE TABLE priced (order_id BIGINT, customer BIGINT, amount DOUBLE, note STRING, `at` TIMESTAMP_LTZ(3), price DOUBLE)
WITH ('connector' = 'kafka', 'topic' = '{out}', 'properties.bootstrap.servers' = '{broker}', 'format' = 'json',
  'json.timestamp-format.standard' = 'ISO-8601', {producer})

INSERT INTO priced SELECT o.*, p.price FROM orders o JOIN prices p ON o.customer = p.customer
"""


def main() -> None:
    """Run, check, print, record."""
    parser = arguments(__doc__, "vs_flink_kafka", rounds=3)
    parser.add_argument("--connector", type=Path, required=True, help="flink-sql-connector-kafka's jar")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=500_000, help="messages in one of our micro-batches")
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    jars = sorted(Path(os.environ["GPU_JOIN_SERVICES"], "jars").absolute().glob("*.jar"))
    config = {"spark.jars": ",".join(map(str, jars)), "spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
    spark = session("gpu-join kafka", master="local[2]", config=config)
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        prices = spark.range(ROWS).selectExpr("id AS customer", "id / 8.0D AS price").coalesce(1)
        prices.write.json(f"{folder}/prices")
        prices.write.parquet(f"{folder}/parquet")
        topic = sent(spark, "json", options.messages)

        ours = functools.partial(our_seconds, spark, topic, folder, options)

        def flinks() -> float:
            return flink_seconds(spark, topic, folder, options)

        for _ in range(options.warmup):
            ours()
        cases = {
            "ours": again(ours),
            "ours_with_headers": again(lambda: ours(headers=True)),
            "flink": flinks,
        }
        runs = interleave(cases, options.rounds)
    spark.stop()
    rates = {name: summarise(options.messages / seconds for seconds in found) for name, found in runs.items()}
    over = {f"{name}_over_flink": ratio(rates[name], rates["flink"]) for name in cases if name != "flink"}
    results = {"messages_per_second": rates, **over, "runs": runs}
    options.connector = options.connector.name
    record(options, "vs_flink_kafka", results, master="local[2]", flink=FLINK_VERSION)


def check(spark: SparkSession, topic: str, messages: int) -> None:
    """Checks the output of the join, then deletes the topic.

    Raises:
        SystemExit: it is not.
    """
    df = spark.read.format("kafka").option("kafka.bootstrap.servers", BROKER).option("subscribe", topic).load()
    value = f.from_json(f.col("value").cast("string"), f"{SCHEMA}, price DOUBLE")
    found = df.select(value.alias("r")).agg(f.count("*"), f.sum("r.order_id"), f.sum("r.price")).first()
    prices = sum(n % ROWS for n in range(messages)) / 8
    if tuple(found) != (messages, messages * (messages - 1) // 2, prices):
        raise SystemExit(f"wrong messages: {tuple(found)}")
    admin = AdminClient({"bootstrap.servers": BROKER})
    admin.delete_topics([topic], operation_timeout=60)[topic].result()


def our_seconds(spark: SparkSession, topic: str, folder: str, options: Any, *, headers: bool = False) -> float:
    """From the start of the query to its end."""
    out = f"out{uuid.uuid4().hex[:8]}"
    read = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(options.batch)}
    read |= {f"kafka.{name}": value for name, value in CONSUMER.items()}
    send = {f"kafka.{name}": value for name, value in PRODUCER.items()}
    orders = gpu_ops.read_kafka(spark, BROKER, topic, "json", SCHEMA, options=read)
    prices = spark.readStream.schema("customer BIGINT, price DOUBLE").parquet(f"{folder}/parquet")
    with tempfile.TemporaryDirectory(prefix="gpu-join-work-") as work:
        joined = gpu_ops.join(orders, prices, on="customer", state=f"{work}/state")
        rows = joined.select("order_id", "customer", "amount", "note", "at", "price")
        begun = time.perf_counter()
        messages = gpu_ops.sinks.json_messages(rows, headers=headers)
        writer = messages.writeStream.format("kafka").options(**send, topic=out)
        writer = writer.option("kafka.bootstrap.servers", BROKER).option("checkpointLocation", f"{work}/checkpoint")
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        seconds = time.perf_counter() - begun
    check(spark, out, options.messages)
    return seconds


def flink_seconds(spark: SparkSession, topic: str, folder: str, options: Any) -> float:
    """The last of several runs in one JVM."""
    outs = [f"out{uuid.uuid4().hex[:8]}" for _ in range(options.warmup + 1)]
    own = {"topic": topic, "broker": BROKER, "prices": f"{folder}/prices"}
    for name, settings in (("producer", PRODUCER), ("consumer", CONSUMER)):
        own[name] = ", ".join(f"'properties.{x}' = '{y}'" for x, y in settings.items())
    scripts = [FLINK.format(**own, out=out) for out in outs]
    seconds = run_sql([script.strip() for script in scripts], 2, jars=[options.connector.absolute()])[-1]["seconds"]
    check(spark, outs[-1], options.messages)
    return seconds


if __name__ == "__main__":
    main()
