"""Views in real parts, with faults within a write and between a write and Spark's commit: each time they equal
DuckDB's answer over the folded inputs.

`GPU_JOIN_KILLS` says how many faults each view has to live through.
"""

from __future__ import annotations

import json
import os
import random
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spark.support import Row
from spark.views import COLUMNS, Shop, in_rows

from gpu_ops import sinks
from gpu_ops.spark.sinks import delta, jdbc, kafka
from services.conftest import listens

pytestmark = [pytest.mark.spark, pytest.mark.services]

KILLS = int(os.environ.get("GPU_JOIN_KILLS", "4"))
BROKER = "localhost:19092"
POSTGRES = "postgresql://localhost:15432/postgres"


class KilledError(Exception):
    """A fault of the test's own."""


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


def made(sink: str, spark: Any, folder: Path, key: Any) -> tuple[Callable[[Any, int], None], Callable[[], list[Row]]]:
    """A view and what reads it."""
    name = f"v{uuid.uuid4().hex[:8]}"
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
    table = str(folder / "view") if key is None else name
    shown = f"delta.`{table}`" if key is None else table
    return sinks.delta_view(table, key), lambda: in_rows(spark.sql(f"SELECT * FROM {shown}"))


class Faults:
    """Makes a view fail at random: before it has committed, or when it has and Spark has not.

    Args:
        shop: the join.
        view: what is tested.
        read: gives its rows, which have to be right whenever the view has come back.
    """

    def __init__(self, shop: Shop, view: Callable[[Any, int], None], read: Callable[[], list[Row]]) -> None:
        self._shop, self._view, self._read, self._random = shop, view, read, random.Random(3)
        self.kills = 0
        self.within = False

    def __call__(self, batch: Any, batch_id: int) -> None:
        self.within = self.kills < KILLS and self._random.random() < 0.3
        self._view(batch, batch_id)
        assert sorted(self._read(), key=repr) == self._shop.expected(batch_id + 1), f"after batch {batch_id}"
        if self.kills < KILLS and self._random.random() < 0.4:
            self.killed()

    def killed(self) -> None:
        self.kills += 1
        raise KilledError

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Faults within a write: a transaction not committed, a MERGE not run, messages sent in part."""
        execute, merge, send = jdbc._Database.execute, delta.merge, kafka._send

        def executed(database: Any, *statements: str) -> None:
            execute(database, *statements)
            if self.within and "DELETE" in "".join(statements):
                self.killed()

        def merged(*given: Any) -> str:
            if self.within:
                self.killed()
            return merge(*given)

        def sent(rows: Any, *given: Any) -> None:
            send(rows.limit(3) if self.within else rows, *given)
            if self.within:
                self.killed()

        monkeypatch.setattr(jdbc._Database, "execute", executed)
        monkeypatch.setattr(delta, "merge", merged)
        monkeypatch.setattr(kafka, "_send", sent)


@pytest.mark.parametrize(
    "given",
    [
        ("delta", "left", "id"),
        ("delta", "full", None),
        ("postgres", "full", ["id", "item"]),
        ("postgres", "left", None),
        ("kafka_upsert", "left", "id"),
        ("kafka_debezium", "full", ["id", "item"]),
        ("kafka_debezium", "left", None),
    ],
    ids=lambda given: f"{given[0]}-{given[1]}-{'key' if given[2] else 'no key'}",
)
def test_a_view_lives_through_faults(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, str, Any]
) -> None:
    sink, how, key = given
    shop = Shop(spark, tmp_path, how, keyed=key is not None, emit="per_event" if how == "full" else "per_batch")
    view, read = made(sink, spark, tmp_path, key)
    faults = Faults(shop, view, read)
    faults.patch(monkeypatch)
    for _ in range(max(4, KILLS)):
        shop.more(10 if "kafka" in sink else 8)  # of 8 the first micro-batch without a key is empty
    while True:
        try:
            shop.run(faults)
            break
        except Exception as error:
            if "KilledError" not in str(error):
                raise
    assert faults.kills > KILLS // 2
    assert sorted(read(), key=repr) == shop.expected()
