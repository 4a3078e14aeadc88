"""Views in real parts, and what reads them."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spark.support import Row
from spark.views import COLUMNS, in_rows

from gpu_ops import sinks
from services.conftest import listens

BROKER = "localhost:19092"
POSTGRES = "postgresql://localhost:15432/postgres"


def messages(spark: Any, topic: str) -> list[tuple[str, str | None]]:
    """Keys and values, in order within each partition."""
    df = spark.read.format("kafka").option("kafka.bootstrap.servers", BROKER).option("subscribe", topic).load()
    rows = df.selectExpr("partition", "offset", "string(key) key", "string(value) value").collect()
    return [(row.key, row.value) for row in sorted(rows, key=lambda row: (row.partition, row.offset))]


def upserted(spark: Any, topic: str) -> list[Row]:
    """The table that an upsert topic is."""
    table = dict(messages(spark, topic))
    return [tuple(json.loads(value)[x] for x in COLUMNS) for value in table.values() if value is not None]


def captured(spark: Any, topic: str) -> list[Row]:
    """The table that envelopes make for a consumer that drops what it has had."""
    rows: Counter[Row] = Counter()
    last: dict[str, tuple[int, ...]] = {}
    for key, value in messages(spark, topic):
        envelope = json.loads(value or "")
        sequence = tuple(map(int, json.loads(envelope["source"]["sequence"])))
        if sequence <= last.get(key, (-1,)):
            continue
        last[key] = sequence
        before, after = envelope["before"], envelope["after"]
        assert envelope["op"] == ("c" if before is None else "d" if after is None else "u")
        rows.update([tuple(after[x] for x in COLUMNS)] if after else [])
        rows.subtract([tuple(before[x] for x in COLUMNS)] if before else [])
    return list(rows.elements())


def iceberg(catalog: dict[str, str], name: str) -> list[Row]:
    """The rows of an Iceberg table, each as often as its count."""
    from pyiceberg.catalog import load_catalog

    rows = load_catalog("default", **catalog).load_table(name).scan().to_arrow().to_pylist()
    return [tuple(row[x] for x in COLUMNS) for row in rows for _ in range(row.get("gpu_ops_count", 1))]


def made(
    sink: str, spark: Any, folder: Path, key: Any, name: str = ""
) -> tuple[Callable[[Any, int], None], Callable[[], list[Row]]]:
    """A view and what reads it.

    Args:
        sink: which.
        spark: the session.
        folder: for a Delta table that is a path.
        key: of the view.
        name: of a view that several processes have; Delta's names are of one process here.
    """
    by_path = key is None or bool(name)
    name = name or f"v{uuid.uuid4().hex[:8]}"
    if sink in ("kafka_upsert", "kafka_debezium"):
        if not listens("kafka"):
            pytest.skip("no Kafka on port 19092")
        if sink == "kafka_upsert":
            return sinks.kafka_upsert(BROKER, name, key), lambda: upserted(spark, name)
        return sinks.kafka_debezium(BROKER, name, key), lambda: captured(spark, name)
    if sink == "postgres":
        if not listens("postgres"):
            pytest.skip("no Postgres on port 15432")
        table = f'public."View {name}"'
        options = {"user": "postgres", "driver": "org.postgresql.Driver"}
        reader = spark.read.format("jdbc").options(url=f"jdbc:{POSTGRES}", dbtable=table, **options)
        return sinks.postgres_view(POSTGRES, table, key, options=options), lambda: in_rows(reader.load())
    if sink == "iceberg":
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        return sinks.iceberg_view(f"shop.{name}", key, catalog=catalog), lambda: iceberg(catalog, f"shop.{name}")
    table = str(folder / "view") if by_path else name
    shown = f"delta.`{table}`" if by_path else table
    return sinks.delta_view(table, key), lambda: in_rows(spark.sql(f"SELECT * FROM {shown}"))
