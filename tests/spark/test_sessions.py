"""Sessions through Spark: after each micro-batch as Spark's batch has them, at the watermark as its own stream does."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError
from spark.support import Sink, Source, drain, in_memory, start
from spark.test_aggregate_at_watermark import at, late

pytestmark = pytest.mark.spark

SCHEMA = "op string, k string, t timestamp, x int"
QUERY = """
    SELECT k, session_window, session_window.end AS ends, count(*) AS n, sum(x) AS total, max(x) AS most
    FROM {} GROUP BY k, session_window(t, '5 seconds') HAVING count(*) > 0
"""
DISTINCT = "SELECT DISTINCT session_window(t, '5 seconds') AS w FROM {} WHERE x > 2"


def changes(choice: random.Random, live: list[dict[str, Any]], width: int) -> list[dict[str, Any]]:
    """A file of them: out of order, with ties, pauses of just the gap, times that are null, and retractions."""
    found = []
    for _ in range(14):
        if live and choice.random() < 0.35:
            found.append({**live.pop(choice.randrange(len(live))), "op": "-D"})
            continue
        when = None if choice.random() < 0.05 else at(choice.randrange(width))
        live.append({"op": "+I", "k": choice.choice(["a", "b", None]), "t": when, "x": choice.randrange(6)})
        found.append(live[-1])
    return found


@pytest.mark.slow
def test_after_each_micro_batch_as_sparks_batch(spark: Any, tmp_path: Path) -> None:
    """Sessions that grow, become one and part; with a HAVING above them, and as DISTINCT; over a restart."""
    choice, live = random.Random(3), list[dict[str, Any]]()
    source, sinks = Source(spark, tmp_path / "in", SCHEMA), (Sink(), Sink())
    queries = [QUERY.format("clicks"), DISTINCT.format("clicks")]
    there: list[list[dict[str, Any]]] = []
    for run in range(2):
        for _ in range(4):
            source.add(*changes(choice, live, 70))
            there.append(list(live))
        for number, query in enumerate(queries):
            clicks = stream(source.df, row_kind="op")
            made = gpu_ops.sql(query, clicks=clicks, state=str(tmp_path / f"state{number}"))
            if run == 0 and number == 0:
                assert "SessionAggregate(groupBy=[k], window=[session_window(t, 5 seconds)]" in gpu_ops.explain(made)
            drain(made, sinks[number], tmp_path / f"checkpoint{number}")
    for number, query in enumerate((QUERY, DISTINCT)):
        found = Counter[Any]()
        for batch, rows in enumerate(there):
            for kind, *row in sinks[number].batches[batch]:
                found[tuple(row)] += 1 if kind[0] == "+" else -1
            now = spark.createDataFrame([tuple(row.values()) for row in rows], "op string, k string, t string, x int")
            now.withColumn("t", f.col("t").cast("timestamp")).createOrReplaceTempView("now")
            assert +found == Counter(map(tuple, spark.sql(query.format("now")).collect())), batch


def rows(number: int, choice: random.Random) -> list[dict[str, Any]]:
    """Rows of one file; those that are late are so by two files at least, which Spark takes for late as well."""
    found = []
    for _ in range(8):
        second = max(0, number * 15 + choice.randrange(15) - choice.choice([0, 0, 0, 1, 4, 50]))
        found.append({"op": "+I", "k": choice.choice(["a", "b", None]), "t": at(second), "x": choice.randrange(9)})
    return found


def test_final_as_sparks_own_stream(spark: Any, tmp_path: Path) -> None:
    """Each once, from `gpu_ops.aggregate` and from SQL, late rows among them."""
    choice, sinks = random.Random(1), (Sink(), Sink(), Sink())
    source = Source(spark, tmp_path / "in", SCHEMA)
    df = source.df.withWatermark("t", "5 seconds")
    calls = {"n": "count(*)", "total": "sum(x)", "most": "max(x)"}
    own = gpu_ops.aggregate(
        df, "k", calls, session_gap="5 seconds", emit="at_watermark", state=str(tmp_path / "state"), name="sessions"
    )
    query = f"SELECT k, session_window, n, total, most FROM ({QUERY.format('clicks')})"
    sql = in_memory(gpu_ops.sql, query, clicks=df, emit="at_watermark", name="sql")
    theirs = df.groupBy("k", f.session_window("t", "5 seconds")).agg(
        f.count("*").alias("n"), f.sum("x").alias("total"), f.max("x").alias("most")
    )
    assert own.columns == ["row_kind", *theirs.columns] == sql.columns
    assert (
        own.schema["session_window"].dataType.simpleString() == theirs.schema["session_window"].dataType.simpleString()
    )
    assert "kept until the watermark reaches the end of their session" in gpu_ops.explain(own)
    writer = theirs.select(f.lit("+I").alias("row_kind"), "*").writeStream.outputMode("append").foreachBatch(sinks[2])
    queries = [
        start(own, sinks[0], tmp_path / "own"),
        start(sql, sinks[1], tmp_path / "sql"),
        writer.option("checkpointLocation", str(tmp_path / "theirs")).start(),
    ]
    for number in range(7):
        source.add(*(rows(number, choice) if number < 5 else [{"op": "+I", "k": "z", "t": at(1000), "x": 0}]))
        for query_ in queries:
            query_.processAllAvailable()
    dropped = late(queries[0], "sessions", "input")
    for query_ in queries:
        query_.stop()
    assert Counter(sinks[0].table) == Counter(sinks[1].table) == Counter(sinks[2].table)
    assert max(Counter(sinks[0].table).values()) == 1 < len(sinks[0].table)
    assert dropped > 0


@pytest.mark.thorough
def test_of_static_rows_and_what_is_refused(spark: Any) -> None:
    """As Spark's batch, of an input that has ended; gaps that are none."""
    given = [("a", at(0), 1), ("a", at(5), 2), ("a", at(11), 4), ("b", at(5), 8), ("b", None, 16)]
    clicks = spark.createDataFrame(given, "k string, t string, x int").withColumn("t", f.col("t").cast("timestamp"))
    query = "SELECT k, session_window.start AS s, sum(x) AS n FROM {} GROUP BY session_window(t, '{}'), k"
    clicks.createOrReplaceTempView("now")
    for gap in ("5 seconds", "1 minute", "5999 milliseconds", "interval 6 seconds"):
        wanted = Counter(map(tuple, spark.sql(query.format("now", gap)).collect()))
        found = gpu_ops.sql(query.format("clicks", gap), clicks=clicks).collect()
        assert Counter(tuple(row)[1:] for row in found) == wanted, gap
    known = clicks.where("t IS NOT NULL")
    (first, *_) = gpu_ops.aggregate(
        stream(known, event_time="t"), aggregates={"n": "sum(x)"}, session_gap="5 seconds"
    ).orderBy("session_window.start").collect()  # fmt: skip
    assert first.n == 11
    for gap, message in {
        "'1 month'": "a gap of 1 months is longer in some months than in others",
        "'2 days'": "a gap of 2 days is an hour longer or shorter where clocks of America/New_York are set",
        "'0 seconds'": "a gap of 0 seconds is not positive",
        "'-5 seconds'": "a gap of -5 seconds is not positive",
        "'1500 microseconds'": "no whole number of milliseconds",
        "CASE WHEN x > 1 THEN '1 minute' ELSE '2 minutes' END": "the gap of session_window is a constant",
    }.items():
        with pytest.raises(gpu_ops.SqlError, match=message):
            gpu_ops.sql(f"SELECT count(*) AS n FROM clicks GROUP BY session_window(t, {gap})", clicks=clicks)
    again = f"SELECT session_window, count(*) AS m FROM ({QUERY.format('clicks')}) GROUP BY session_window"
    with pytest.raises(gpu_ops.SqlError, match="merged already, and Spark would merge them again"):
        gpu_ops.sql(again, clicks=clicks)
    windows = clicks.withColumn("w", f.session_window("t", "5 seconds"))
    with pytest.raises(DescriptionError, match="give the gap, as session_gap='10 minutes'"):
        gpu_ops.aggregate(windows, "w", {"n": "count(*)"})
