"""Scripts in Flink's form, tests/jobs/scripts, with a real Kafka and a real Postgres: their text but for addresses."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from rich.console import Console
from spark.test_flink_scripts import SCRIPTS

from gpu_ops.errors import GpuJoinError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from services.conftest import listens
from services.postgres import Postgres
from services.views import BROKER, messages

pytestmark = [pytest.mark.spark, pytest.mark.services]

Message = tuple[str | None, dict[str, Any] | None]


class Script:
    """One of the scripts in a folder of its own, with topics of its own.

    Args:
        number: of its file.
        folder: for it.
        texts: what is written in place of what, addresses among it.
        into: columns of a table of Postgres that the script's last SELECT goes to, if it does not say.
    """

    def __init__(self, number: str, folder: Path, texts: Mapping[str, str], into: str = "") -> None:
        if not listens("kafka"):
            pytest.skip("no Kafka on port 19092")
        (path,) = SCRIPTS.glob(f"{number}_*.sql")
        text, self._name = path.read_text(), f"s{uuid.uuid4().hex[:8]}"
        for old, new in {**texts, "'topic' = '": f"'topic' = '{self._name}_", "broker:9092": BROKER}.items():
            text = text.replace(old, new)
        if into:
            before, _, query = text.rpartition("SELECT ")
            kept = "SET 'state' = 'state'; SET 'checkpoint' = 'checkpoint';"
            text = f"{before}{into}\n{kept}\nINSERT INTO results SELECT {query}"
        self._path = folder / "script.sql"
        self._path.write_text(text)

    def topic(self, name: str) -> str:
        return f"{self._name}_{name}"

    def put(self, name: str, rows: Sequence[Message]) -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": BROKER})
        for key, value in rows:
            sent = None if value is None else json.dumps(value).encode()
            producer.produce(self.topic(name), sent, None if key is None else key.encode())
        assert producer.flush(30) == 0

    def run(self) -> str:
        """What is printed where the script takes what there is."""
        console = Console(record=True, width=300, file=io.StringIO())
        runner.run(load(self._path), console, once=True)
        return console.export_text()


def results(postgres: Postgres, columns: str, key: str) -> str:
    return (
        f"CREATE TABLE results ({columns}, PRIMARY KEY ({key}) NOT ENFORCED) WITH ('connector' = 'jdbc', "
        f"'url' = 'jdbc:{postgres.url}', 'table-name' = 'results', 'username' = 'postgres');"
    )


def test_counts_go_from_a_topic_to_a_compacted_one(spark: Any, tmp_path: Path) -> None:
    begun = "'topic' = 'views', 'scan.startup.mode' = 'earliest-offset'"
    script = Script("26", tmp_path, {"'topic' = 'views'": begun})
    views = [(number, ("north", "south", None)[number % 3]) for number in range(20)]
    for begin in (0, 12):
        some = views[begin : begin + 12]
        script.put("views", [(None, {"person": n % 5, "page": n, "region": x, "at": None}) for n, x in some])
        script.run()
        seen = views[: begin + 12]
        last = {json.loads(key)["region"]: value for key, value in messages(spark, script.topic("by_region"))}
        assert {region: json.loads(value or "null") for region, value in last.items()} == {
            region: {
                "region": region,
                "views": sum(x == region for _, x in seen),
                "people": len({n % 5 for n, x in seen if x == region}),
            }
            for region in ("north", "south", None)
        }


def test_versions_of_a_compacted_topic_with_raw_keys(postgres: Postgres, tmp_path: Path) -> None:
    columns = "id STRING, euros DECIMAL(18, 8), total DECIMAL(10, 2), currency STRING, at TIMESTAMP"
    begun = "'topic' = 'payments', 'scan.startup.mode' = 'earliest-offset'"
    script = Script("17", tmp_path, {"'topic' = 'payments'": begun}, results(postgres, columns, "id"))

    def rate(currency: str, rate: float, at: str) -> Message:
        return currency, {"currency": currency, "rate": rate, "at": f"2026-01-01 {at}"}

    def payment(name: str, currency: str, total: float, at: str) -> Message:
        return name, {"id": name, "currency": currency, "total": total, "at": f"2026-01-01 {at}"}

    script.put("rates", [rate("USD", 0.9, "10:00:00"), rate("CHF", 1.1, "10:00:00"), rate("USD", 0.8, "10:10:00")])
    paid = [("a", "USD", 100.0, "10:05:00"), ("b", "USD", 10.5, "10:12:00"), ("c", "CHF", 1.0, "09:00:00")]
    script.put("payments", [payment(*row) for row in paid])
    script.run()
    script.put("rates", [rate("CHF", 1.2, "10:20:00"), rate("SEK", 1.0, "11:00:00")])
    script.put("payments", [payment("d", "CHF", 2.0, "10:19:59.999"), payment("e", "SEK", 1.0, "11:00:01")])
    script.run()
    script.put("rates", [rate("SEK", 2.0, "12:00:00")])
    for name in ("f", "g"):  # the watermark of the first micro-batch holds for the second
        script.put("payments", [payment(name, "SEK", 1.0, "12:00:00")])
        script.run()
    found = {row[0]: tuple(map(float, row[1:])) for row in postgres.rows("SELECT id, euros, total FROM results")}
    assert found == {"a": (90.0, 100.0), "b": (8.4, 10.5), "d": (2.2, 2.0), "e": (1.0, 1.0)}
    script.put("rates", [("SEK", None)])  # from when on is not said; Flink takes the time of the row that it deletes
    with pytest.raises(GpuJoinError, match=r"input .r., column .at.: is the event time and holds nulls"):
        script.run()


def test_a_table_of_a_database_is_looked_up(postgres: Postgres, tmp_path: Path) -> None:
    postgres.run("CREATE TABLE people (id INT PRIMARY KEY, name TEXT)")
    postgres.run("INSERT INTO people SELECT n, 'first ' || n FROM generate_series(1, 5) n")
    changed = {
        "jdbc:postgresql://db/people": f"jdbc:{postgres.url}",
        "'username' = 'me'": "'username' = 'postgres', 'refresh' = '1 second'",
        "'connector' = 'datagen', 'rows-per-second' = '5', 'fields.id.min' = '1', 'fields.id.max' = '10'": (
            "'connector' = 'kafka', 'properties.bootstrap.servers' = 'broker:9092', 'topic' = 'visits', "
            "'format' = 'json', 'scan.startup.mode' = 'earliest-offset'"
        ),
    }
    script = Script("18", tmp_path, changed, results(postgres, "id INT, at TIMESTAMP, name STRING", "id, at"))
    expected = []
    for minute in range(2):
        rows = [{"id": number, "at": f"2026-01-01 10:0{minute}:00"} for number in range(1, 11)]
        script.put("visits", [(None, row) for row in rows])
        printed = script.run()
        assert "table 'people' is read again only while a job runs on" in printed
        expected += [(str(n), f"2026-01-01 10:0{minute}:00+00", f"first {n}") for n in range(1, 6)]
        postgres.run("UPDATE people SET name = 'second ' || id")
    assert postgres.rows("SELECT id, at, name FROM results") == sorted(expected, key=repr)


def test_metadata_of_messages(postgres: Postgres, tmp_path: Path) -> None:
    columns = "at TIMESTAMP, `partition` BIGINT, `offset` BIGINT, person BIGINT, item BIGINT, what STRING"
    script = Script("25", tmp_path, {}, results(postgres, columns, "`partition`, `offset`"))
    sent = 0
    for _ in range(2):
        rows = [{"person": n, "item": n * n, "what": "buy"} for n in range(sent, sent + 10)]
        script.put("clicks", [(str(row["person"]), row) for row in rows])
        script.run()
        sent += 10
        found = [
            tuple(map(int, row)) for row in postgres.rows('SELECT person, item, "partition", "offset" FROM results')
        ]
        assert sorted(row[:2] for row in found) == [(n, n * n) for n in range(sent)]
        for partition in {row[2] for row in found}:
            assert sorted(row[3] for row in found if row[2] == partition) == list(
                range(sum(row[2] == partition for row in found))
            )
    assert postgres.rows("SELECT count(*) FROM results WHERE now() - at > interval '1 hour' OR at IS NULL") == [("0",)]
