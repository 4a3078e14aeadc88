"""A join of a Kafka topic's messages on `local[2]`: `gpu_ops.read_kafka` beside Spark's reader with `from_json`.

Rows (JSON) or inserts in Debezium's envelopes, joined with a table's rows, into Spark's no-op sink; rates are messages
per second from a query's start to its end. Needs the broker and jars of `make services`.

GPU_JOIN_SERVICES=.services python -m benchmarks.kafka [--messages 1000000] [--batch 250000] [--rounds 3] [--warmup 1]
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import gpu_ops
from benchmarks.common import arguments, interleave, ratio, record, summarise
from gpu_ops.spark import session

BROKER = "localhost:19092"
SCHEMA = "order_id BIGINT, customer BIGINT, amount DOUBLE, note STRING, at TIMESTAMP"
PARTITIONS = 2


def main() -> None:
    """Runs the benchmark, prints and records its results."""
    parser = arguments(__doc__, "kafka", rounds=3)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=250_000, help="messages in a micro-batch")
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    jars = sorted(Path(os.environ["GPU_JOIN_SERVICES"], "jars").absolute().glob("*.jar"))
    config = {"spark.jars": ",".join(map(str, jars)), "spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
    spark = session("gpu-join kafka", master="local[2]", config=config)
    with tempfile.TemporaryDirectory(prefix="gpu-join-data-") as folder:
        prices = spark.range(1000).selectExpr("id AS customer", "id / 7.0D AS price")
        prices.coalesce(1).write.parquet(f"{folder}/prices")
        topics = {form: sent(spark, form, options.messages) for form in ("json", "debezium-json")}
        cases = {
            f"{form}_{reader}": (
                lambda form=form, reader=reader: timed(
                    spark, topics[form], form, reader, folder=folder, options=options
                )
            )
            for form in topics
            for reader in ("read_kafka", "from_json")
        }
        runs = interleave(cases, options.rounds, options.warmup)
    spark.stop()
    rates = {name: summarise(options.messages / seconds for seconds in found) for name, found in runs.items()}
    results = {
        "messages_per_second": rates,
        **{
            f"{form}_read_kafka_over_from_json": ratio(rates[f"{form}_read_kafka"], rates[f"{form}_from_json"])
            for form in topics
        },
        "runs": runs,
    }
    record(options, "kafka", results, master="local[2]")


def sent(spark: SparkSession, form: str, messages: int) -> str:
    """A topic with so many messages; its name."""
    topic = f"bench{uuid.uuid4().hex[:8]}"
    row = f.struct(
        f.col("id").alias("order_id"), (f.col("id") % 1000).alias("customer"), (f.col("id") / 7).alias("amount"),
        f.concat(f.lit("order number "), f.col("id").cast("string")).alias("note"),
        f.timestamp_seconds(f.col("id") + 1_700_000_000).alias("at"),
    )  # fmt: skip
    if form == "debezium-json":
        source = f.struct(f.lit("2.7").alias("version"), f.lit("shop").alias("db"), f.lit("orders").alias("table"))
        row = f.struct(
            f.lit(None).cast(SCHEMA_STRUCT).alias("before"), row.alias("after"), source.alias("source"),
            f.lit("c").alias("op"), f.col("id").alias("ts_ms"),
        )  # fmt: skip
    values = spark.range(messages, numPartitions=PARTITIONS).select(
        f.col("id").cast("string").alias("key"), f.to_json(row, {"ignoreNullFields": "false"}).alias("value")
    )
    values.write.format("kafka").option("kafka.bootstrap.servers", BROKER).option("topic", topic).save()
    return topic


SCHEMA_STRUCT = f"struct<{SCHEMA.lower().replace(' ', ':').replace(',:', ',')}>"


def timed(spark: SparkSession, topic: str, form: str, reader: str, *, folder: str, options: Any) -> float:
    """Seconds of a query from its start to its end."""
    read = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(options.batch)}
    if reader == "read_kafka":
        orders = gpu_ops.read_kafka(spark, BROKER, topic, form, SCHEMA, options=read)
    else:
        orders = by_from_json(spark, topic, form, read)
    kind = "row_kind" if form == "debezium-json" else None
    prices = spark.readStream.schema("customer BIGINT, price DOUBLE").parquet(f"{folder}/prices")
    with tempfile.TemporaryDirectory(prefix="gpu-join-work-") as work:
        changes = gpu_ops.join(
            gpu_ops.stream(orders, row_kind=kind), prices, on="customer", how="left", state=f"{work}/state"
        )
        writer = changes.writeStream.format("noop").option("checkpointLocation", f"{work}/checkpoint")
        begun = time.perf_counter()
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        seconds = time.perf_counter() - begun
        rows = sum(progress["numInputRows"] for progress in query.recentProgress)
    if rows < options.messages:
        raise RuntimeError(f"{rows} rows were read of {options.messages}")
    return seconds


def by_from_json(spark: SparkSession, topic: str, form: str, options: dict[str, str]) -> DataFrame:
    """Parses the messages in the way one writes without `read_kafka`, by `from_json`."""
    stream = spark.readStream.format("kafka").options(**options)
    text = stream.option("kafka.bootstrap.servers", BROKER).option("subscribe", topic).load()
    value = f.col("value").cast("string")
    if form == "json":
        return text.select(f.from_json(value, SCHEMA).alias("row")).select("row.*")
    envelope = f"before {SCHEMA_STRUCT}, after {SCHEMA_STRUCT}, op string"
    said = text.select(f.from_json(value, envelope).alias("m"))
    update = f.array(
        f.struct(f.lit("-U").alias("row_kind"), f.col("m.before").alias("row")),
        f.struct(f.lit("+U").alias("row_kind"), f.col("m.after").alias("row")),
    )
    kind = f.when(f.col("m.op") == "d", "-D").otherwise("+I")
    single = f.array(f.struct(kind.alias("row_kind"), f.coalesce("m.after", "m.before").alias("row")))
    changes = said.select(f.explode(f.when(f.col("m.op") == "u", update).otherwise(single)).alias("c"))
    return changes.select("c.row_kind", "c.row.*")


if __name__ == "__main__":
    main()
