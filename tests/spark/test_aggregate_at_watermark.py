"""Windows at the watermark through Spark: beside Spark's own aggregate in output mode append, and over a changelog."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.plan.column_metadata import has_watermarks_of_parts
from spark.support import Sink, Source, drain, start

pytestmark = pytest.mark.spark

SCHEMA = "op string, k string, t timestamp, x int"
SIZE, DELAY = 10, 5


def at(second: int) -> str:
    return f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}"


def rows(number: int, choice: random.Random) -> list[dict[str, Any]]:
    """Rows of one file; those that are late are so by two files at least, which Spark takes for late as well."""
    found = []
    for _ in range(8):
        back = choice.choice([0, 0, 0, 1, 4, 45])
        second = max(0, number * 15 + choice.randrange(15) - back)
        found.append({"op": "+I", "k": choice.choice(["a", "b", None]), "t": at(second), "x": choice.randrange(9)})
    return found


def windowed(df: Any, size: str = f"{SIZE} seconds", *slide: str) -> Any:
    return df.withWatermark("t", f"{DELAY} seconds").withColumn("w", f.window("t", size, *slide))


@pytest.mark.parametrize(
    "slide", [(), pytest.param(("5 seconds",), marks=pytest.mark.thorough)], ids=["tumbling", "sliding"]
)
def test_as_spark_does_it(spark: Any, tmp_path: Path, slide: tuple[str, ...]) -> None:
    """The same rows, each once; windows are structs again."""
    choice, sinks = random.Random(len(slide)), (Sink(), Sink())
    source = Source(spark, tmp_path / "in", SCHEMA)
    df = windowed(source.df, f"{SIZE} seconds", *slide)
    own = gpu_ops.aggregate(
        df, ["k", "w"], {"n": "count(*)", "sum": "sum(x)", "most": "max(x)"}, emit="at_watermark",
        state=str(tmp_path / "state"), name="windows",
    )  # fmt: skip
    theirs = df.groupBy("k", "w").agg(f.count("*").alias("n"), f.sum("x").alias("sum"), f.max("x").alias("most"))
    assert own.columns == ["row_kind", *theirs.columns]
    assert own.schema["w"].dataType.simpleString() == theirs.schema["w"].dataType.simpleString()
    assert "kept until the watermark reaches w_end" in gpu_ops.explain(own)
    writer = theirs.select(f.lit("+I").alias("row_kind"), "*").writeStream.outputMode("append").foreachBatch(sinks[1])
    queries = [
        start(own, sinks[0], tmp_path / "own"),
        writer.option("checkpointLocation", str(tmp_path / "theirs")).start(),
    ]
    for number in range(6):
        source.add(*rows(number, choice))
        for query in queries:
            query.processAllAvailable()
    for _ in range(2):  # the first moves the watermark, the second brings it
        source.add({"op": "+I", "k": "z", "t": at(1000), "x": 0})
        for query in queries:
            query.processAllAvailable()
    dropped = late(queries[0], "windows", "input")
    for query in queries:
        query.stop()
    assert Counter(sinks[0].table) == Counter(sinks[1].table)
    assert max(Counter(sinks[0].table).values()) == 1
    assert dropped > 0


def late(query: Any, name: str, source: str) -> int:
    """How many changes were dropped."""
    progress = [dict(p)["observedMetrics"] for p in query.recentProgress]
    return sum(int(p[name]["metrics"][f"{source}_late"]) for p in progress if name in p)


@pytest.mark.thorough
@pytest.mark.parametrize("partitions", [1, 3])
def test_what_is_taken_back_in_time_does_not_count(spark: Any, tmp_path: Path, partitions: int) -> None:
    """Of a changelog, over restarts; a retraction behind the watermark is late, and the end of input gives the rest."""
    source, sink = Source(spark, tmp_path / "in", SCHEMA), Sink()

    def change(op: str, k: str, second: int, x: int) -> dict[str, Any]:
        return {"op": op, "k": k, "t": at(second), "x": x}

    source.add(change("+I", "a", 1, 5), change("+I", "a", 2, 7), change("+I", "b", 3, 1), change("+I", "c", 13, 1))
    source.add(change("-D", "a", 1, 5), change("-D", "b", 3, 1), change("+I", "a", 20, 2))
    source.add(change("-D", "a", 2, 7), change("-D", "c", 13, 1), change("+I", "c", 18, 4))
    state = str(tmp_path / "state")
    for run in range(2):
        changes = stream(windowed(source.df), row_kind="op", name="changes")
        sums = gpu_ops.aggregate(
            changes, by=["w", "k"], aggregates={"sum": "sum(x)"}, emit="at_watermark", state=state, name="sums",
            partitions=partitions,
        )  # fmt: skip
        query = drain(sums.selectExpr("row_kind", "k", "second(w.end)", "sum"), sink, tmp_path / "checkpoint")
        if run == 0:
            assert late(query, "sums", "changes") == 1
            source.add(change("+I", "a", 40, 2))
            source.add(change("+I", "a", 41, 2))
    assert Counter(sink.changes) == Counter({("+I", "a", 10, 7): 1, ("+I", "c", 20, 4): 1, ("+I", "a", 30, 2): 1})
    rest = gpu_ops.finish(spark, state=state).selectExpr("row_kind", "k", "second(w_end)", "sum").collect()
    assert [tuple(row) for row in rest] == [("+I", "a", 50, 4)]


@pytest.mark.thorough
def test_late_rows_come_out_beside_the_windows(spark: Any, tmp_path: Path) -> None:
    """With all of their columns, over a restart; the windows are those that there are without them."""
    source, plain, choice = Source(spark, tmp_path / "in", SCHEMA), Sink(), random.Random(6)
    windows: list[tuple[Any, ...]] = []
    found, wanted, latest = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]](), -DELAY

    def take(df: Any, _: int) -> None:
        df.persist()
        windows.extend(map(tuple, df.where("row_kind = '+I'").selectExpr("k", "second(w.end)", "n", "s").collect()))
        rows_of = gpu_ops.side(df, "clicks_late").selectExpr("k", "second(w.end)", "second(t)", "x", "more")
        found.update(map(tuple, rows_of.collect()))
        df.unpersist()

    for number in range(6):
        micro_batch = rows(number, choice)
        source.add(*micro_batch)
        seconds = [60 * int(row["t"][-5:-3]) + int(row["t"][-2:]) for row in micro_batch]
        for row, second in zip(micro_batch, seconds, strict=True):
            end = (second // SIZE + 1) * SIZE
            if end <= latest - DELAY:
                wanted[row["k"], end % 60, second % 60, row["x"], "m"] += 1
        latest = max(latest, *seconds)
        for late_rows in ("drop", "tag") if number in (2, 5) else ():
            df = windowed(source.df.drop("op")).withColumn("more", f.lit("m"))
            made = gpu_ops.aggregate(
                stream(df, name="clicks"), ["w", "k"], {"n": "count(x) FILTER (WHERE x > 4)", "s": "sum(x)"},
                emit="at_watermark", late=late_rows, state=str(tmp_path / late_rows), name=late_rows,
            )  # fmt: skip
            more = ["t", "x", "more"] if late_rows == "tag" else []
            assert made.columns == ["row_kind", "w", "k", "n", "s", *more]
            if late_rows == "tag":
                drain(made, take, tmp_path / "c_tag")
            else:
                drain(made.selectExpr("row_kind", "k", "second(w.end)", "n", "s"), plain, tmp_path / "c_drop")
    assert Counter(windows) == Counter(plain.table)
    assert found == wanted
    assert len(found) > 3
    assert len(windows) > 5


@pytest.mark.thorough
def test_in_sql(spark: Any, tmp_path: Path) -> None:
    """GROUP BY window(...), with HAVING above it."""
    source, sink = Source(spark, tmp_path / "in", SCHEMA), Sink()
    choice = random.Random(4)
    for number in range(4):
        source.add(*rows(number, choice))
    df = windowed(source.df)
    direct = gpu_ops.aggregate(
        df, ["w", "k"], {"n": "count(*)", "big": "count(x)"}, emit="at_watermark", state=str(tmp_path / "1"), name="d"
    )
    drain(direct.filter("n > 1").select("row_kind", "k", "w", "n"), sink, tmp_path / "c1")
    query = gpu_ops.sql(
        "SELECT k, window(t, '10 seconds') AS w, count(*) AS n FROM rows GROUP BY k, window(t, '10 seconds') "
        "HAVING count(*) > 1",
        rows=df.drop("w"), emit="at_watermark", state=str(tmp_path / "2"), name="q",
    )  # fmt: skip
    assert query.columns == ["row_kind", "k", "w", "n"]
    found = Sink()
    drain(query, found, tmp_path / "c2")
    assert Counter(found.table) == Counter(sink.table)
    assert len(found.table) > 2
    with pytest.raises(gpu_ops.SqlError, match="none of k is one: group by a window of time"):
        gpu_ops.sql("SELECT k, count(*) AS n FROM rows GROUP BY k", rows=df.drop("w"), emit="at_watermark")


def test_what_is_refused(spark: Any, tmp_path: Path) -> None:
    df, n = windowed(Source(spark, tmp_path / "in", SCHEMA).df), {"n": "count(*)"}
    for make, message in [
        (lambda: gpu_ops.aggregate(df, "k", n, emit="at_watermark"), "none of k is one: group by a window of time"),
        (lambda: gpu_ops.aggregate(df.drop("t", "w"), "k", n, emit="at_watermark"), "has no watermark"),
        (lambda: gpu_ops.aggregate(df, "w", n, heartbeat="1 second"), "heartbeat= goes with emit='at_watermark'"),
        (lambda: gpu_ops.aggregate(df, "k", n, window_end="x"), "window_end='x' goes with emit='at_watermark' only"),
    ]:
        with pytest.raises(DescriptionError, match=message):
            make()
    parts = windowed(df.drop("w")).union(windowed(Source(spark, tmp_path / "other", SCHEMA).df))
    for union in (parts, parts.where("x > 1")):
        with pytest.raises(DescriptionError, match=r"a watermark each, .* withWatermark\('t', ...\) behind"):
            gpu_ops.aggregate(union, "w", n, emit="at_watermark")
        with pytest.raises(DescriptionError, match="'left' is a union of streams with a watermark each"):
            gpu_ops.interval_join(union.drop("w"), df.drop("w"), "k", lower=0, upper=5)
    assert has_watermarks_of_parts(parts)
    assert not has_watermarks_of_parts(windowed(parts.drop("w")))
    assert not has_watermarks_of_parts(df)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        days = df.withColumn("day", f.date_trunc("day", "t"))
        ours = gpu_ops.aggregate(stream(days, event_time="t"), ["day", "k"], n, emit="at_watermark", window_end="day")
    assert [x.category.__name__ for x in found] == ["MemoryOnlyStateWarning"]
    assert ours.columns == ["row_kind", "day", "k", "n"]
