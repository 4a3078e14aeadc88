"""`gpu_ops.sinks.json_messages`: the changelog's rows as messages, numbered so that a repetition can be dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import sinks, stream
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.driver.queries import analyzed
from spark.support import Row, Sink, drain, fold
from spark.views import COLUMNS, Shop

pytestmark = pytest.mark.spark


def sequence(headers: Any) -> tuple[int, ...]:
    ((name, value),) = headers
    assert name == "sequence"
    return tuple(json.loads(bytes(value)))


def test_messages_are_the_changes(spark: Any, tmp_path: Path) -> None:
    shop, kept = Shop(spark, tmp_path), Sink()
    changes = shop.changes.where("quantity IS NOT NULL").withColumn("twice", f.col("quantity") * 2)
    messages = sinks.json_messages(changes, "ID")
    assert messages.columns == ["key", "value", "headers"]
    assert str(analyzed(messages)).count("MapInArrow") == str(analyzed(shop.changes)).count("MapInArrow")
    for files in (1, 2, 3):
        shop.more()
        drain(messages, kept, tmp_path / "checkpoint")
        found: list[Row] = []
        for key, value, _ in kept.changes:
            row = json.loads(value)
            assert list(row) == ["row_kind", *COLUMNS, "twice"]
            assert (key, row.pop("twice")) == (str(row["id"]), 2 * row["quantity"])
            found.append(tuple(row.values()))
        assert fold(found) == [row for row in shop.expected(files) if row[2] is not None]
    for batch, rows in kept.batches.items():
        numbers = sorted(sequence(row[2]) for row in rows)
        assert {number[0] for number in numbers} == {batch}
        for task in {number[1] for number in numbers}:
            of_task = [number[2] for number in numbers if number[1] == task]
            assert of_task == list(range(len(of_task)))


def test_a_repeated_micro_batch_has_the_same_messages(spark: Any, tmp_path: Path) -> None:
    def source(name: str, schema: str, *rows: str) -> Any:
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.csv").write_text("\n".join(rows) + "\n")
        return stream(gpu_ops.read_files(spark, str(tmp_path / name), "csv", f"op STRING, {schema}"), row_kind="op")

    left = source("left", "k INT, v INT", *(f"{op},{n % 7},{n}" for n in range(200) for op in ("+I", "-D", "+I")))
    right = source("right", "k INT, w INT", *(f"+I,{n},{n}" for n in range(5)))
    changes = gpu_ops.join(left, right, "k", "left", state=str(tmp_path / "state"), emit="per_event")
    messages, first, again = sinks.json_messages(changes), Sink(), Sink()
    drain(messages, first, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "commits" / "0").unlink()
    drain(messages, again, tmp_path / "checkpoint")
    found = [{sequence(headers): value for value, headers in kept.changes} for kept in (first, again)]
    assert len(found[0]) == len(first.changes) > 200
    assert found[0] == found[1]


def test_of_sparks_rows(spark: Any) -> None:
    """As Spark's own to_json has them."""
    rows = spark.range(0, 500, 1, 2).selectExpr(
        "id", "IF(id % 3 = 0, NULL, concat('\"', id, '\n')) AS text", "array(id, NULL) AS ids",
        "map('a\"', id) AS named", "CAST(id AS DECIMAL(10, 2)) AS price", "struct(id, id % 2 = 0 AS even) AS part",
        "unhex('FF00') AS data", "IF(id = 5, double('NaN'), id + 0.5D) AS number",
        "date_add(DATE'2026-01-01', int(id)) AS day",
    )  # fmt: skip
    messages = sinks.json_messages(rows, ["id", "text"], headers=False)
    assert messages.columns == ["key", "value"]
    found = [tuple(map(json.loads, row)) for row in messages.collect()]
    nulls = {"ignoreNullFields": "false"}
    key, value = f.to_json(f.struct("id", "text"), nulls), f.to_json(f.struct(*rows.columns), nulls)
    assert found == [tuple(map(json.loads, row)) for row in rows.select(key, value).collect()]


def test_refusals(spark: Any) -> None:
    with pytest.raises(DescriptionError, match="key='x' is no column; there are id"):
        sinks.json_messages(spark.range(1), "x")
    with pytest.raises(DescriptionError, match="column 'took' is interval day, which has no JSON text: cast it"):
        sinks.json_messages(spark.sql("SELECT INTERVAL '1' DAY AS took"))
