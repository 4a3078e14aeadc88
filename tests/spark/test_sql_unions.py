"""UNION ALL in ``gpu_ops.sql``: of tables beside streams, of changelogs alone; and one stream filtered, projected.

Each is equal to Spark's batch over the rows.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

CHANGES = [("c", 1, 10), ("c", 2, 20), ("d", 2, 20), ("c", 2, 30)]
UPSERTS = [("c", 1, 10), ("c", 2, 20), ("u", 1, 15), ("d", 2, 20), ("c", 3, 30), ("u", 3, 7)]
QUERIES = {
    "of tables, beside a stream":
        "SELECT s.k, u.v FROM s JOIN (SELECT * FROM a UNION ALL SELECT * FROM b) u ON s.k = u.k",
    "of a SELECT over tables and one over streams":
        "SELECT a.k, b.v FROM a JOIN b ON a.k = b.k UNION ALL SELECT s.k, a.v FROM s JOIN a ON s.k = a.k",
    "of changelogs, tables and streams, one in another":
        "SELECT k, v FROM (SELECT k, v FROM c UNION ALL SELECT k, v FROM a) UNION ALL SELECT k, v FROM s WHERE v > 10 "
        "UNION ALL SELECT b.k, b.v FROM b",
    "of one stream of changes": "SELECT k, v + 1 AS w FROM c WHERE v > 10",
    "of one stream of insertions": "SELECT k, v FROM s WHERE v > 10",
    "of one stream whose rows are replaced": "SELECT v, k FROM r WHERE v > 10",
    "below an aggregate": "SELECT k, count(*) AS n, sum(v) AS v FROM (SELECT k, v FROM c UNION ALL SELECT k, v FROM a "
        "UNION ALL SELECT k, sum(v) FROM b GROUP BY k UNION ALL SELECT k, v FROM s) GROUP BY k",
}  # fmt: skip


@pytest.mark.parametrize(
    "what",
    slow_but(
        QUERIES,
        "below an aggregate",
        "of changelogs, tables and streams, one in another",
        "of one stream whose rows are replaced",
    ),
)
def test_as_spark_has_it(spark: Any, tmp_path: Path, what: str) -> None:
    pairs = "k int, v bigint"
    static = {
        "a": [(1, 100), (3, 300)],
        "b": [(1, 7), (5, 8)],
        "s": [(1, 10), (2, 20)],
        "c": [(1, 10), (2, 30)],
        "r": [(1, 15), (3, 7)],
    }
    given: dict[str, Any] = {}
    for name, rows in static.items():
        given[name] = spark.createDataFrame(rows, pairs)
        given[name].createOrReplaceTempView(name)
    wanted = Counter(map(tuple, spark.sql(QUERIES[what]).collect()))
    streams = [("s", pairs, static["s"]), ("c", f"op string, {pairs}", CHANGES), ("r", f"op string, {pairs}", UPSERTS)]
    for name, schema, rows in streams:
        folder = str(tmp_path / name)
        spark.createDataFrame(rows, schema).coalesce(1).write.parquet(folder)
        given[name] = spark.readStream.schema(schema).parquet(folder)
    given["c"] = stream(given["c"], row_kind="op")
    given["r"] = stream(given["r"], row_kind="op", unique_key="k")
    named = {name: df for name, df in given.items() if f" {name} " in f"{QUERIES[what]} ".replace(")", " ")}
    folded: Counter[Any] = Counter()

    def fold(rows: Any, _: int) -> None:
        for kind, *row in rows.collect():
            folded[tuple(row)] += {"+I": 1, "+U": 1, "-U": -1, "-D": -1}[kind]

    for _ in range(2):  # a table's rows come once
        changes = gpu_ops.sql(QUERIES[what], state=str(tmp_path / "state"), **named)
        query = changes.writeStream.foreachBatch(fold).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()
        assert +folded == wanted


def test_a_row_kind_that_there_is_none_of_ends_the_query(spark: Any, tmp_path: Path) -> None:
    for name, kinds in (("c", ["c", "x"]), ("s", ["c"])):
        rows = [(kind, 1) for kind in kinds]
        spark.createDataFrame(rows, "op string, k int").coalesce(1).write.parquet(str(tmp_path / name))
    c, s = (
        stream(spark.readStream.schema("op string, k int").parquet(str(tmp_path / name)), row_kind="op")
        for name in ("c", "s")
    )
    changes = gpu_ops.sql("SELECT k FROM c UNION ALL SELECT k FROM s", c=c, s=s)  # without an operator: no state
    query = changes.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match=r"input 'c', column 'op': unknown row kind.*: x"):
        query.trigger(availableNow=True).start().awaitTermination()


def test_an_interval_join_over_a_changelog_is_refused_when_it_is_built(spark: Any, tmp_path: Path) -> None:
    rows = spark.readStream.format("rate").load()
    counts = gpu_ops.aggregate(rows, by="timestamp", aggregates={"n": "count(*)"}, state=str(tmp_path / "counts"))
    with pytest.raises(gpu_ops.DescriptionError, match="is a changelog that takes rows back, and it takes insertions"):
        gpu_ops.interval_join(
            stream(counts.withColumnRenamed("timestamp", "at"), event_time="at"),
            stream(rows.withColumnRenamed("value", "n"), event_time="timestamp"),
            on="n", lower="0 seconds", upper="1 second", state=str(tmp_path / "state"),
        )  # fmt: skip
