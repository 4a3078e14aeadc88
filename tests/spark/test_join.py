"""Joins over file sources, against joins computed the slow way; restarts, chains, self-joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import stream
from spark.feeds import Feed, check
from spark.support import Sink, Source, drain, in_memory, slow_join, start

pytestmark = pytest.mark.spark

LEFT = "op string, k long, a string"
RIGHT = "op string, k long, b double"


def fill_left(left: Source) -> None:
    left.add({"op": "+I", "k": 1, "a": "x"}, {"op": "+I", "k": 2, "a": "y"}, {"op": "+I", "k": None, "a": "z"})
    left.add({"op": "+I", "k": 1, "a": "x"}, {"op": "-D", "k": 2, "a": "y"}, {"op": "+I", "k": 3, "a": "w"})


def fill_right(right: Source) -> None:
    right.add({"op": "+I", "k": 1, "b": 1.5}, {"op": "+I", "k": None, "b": 0.0})
    right.add({"op": "-D", "k": 1, "b": 1.5}, {"op": "+I", "k": 3, "b": 2.5}, {"op": "+I", "k": 3, "b": 3.5})


@pytest.fixture
def left(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "left", LEFT)


@pytest.fixture
def right(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "right", RIGHT)


def test_left_join_with_retractions_and_restarts(left: Source, right: Source, tmp_path: Path) -> None:
    def changelog() -> Any:
        return gpu_ops.join(
            stream(left.df, row_kind="op"),
            stream(right.df, row_kind="op"),
            on="k",
            how="left",
            emit="per_event",
            state=str(tmp_path / "state"),
        )

    fill_left(left)
    fill_right(right)
    sink, joined = Sink(), changelog()
    assert joined.columns == ["row_kind", "k", "a", "b"]
    assert joined.isStreaming
    drain(joined, sink, tmp_path / "checkpoint")
    expected = slow_join("left", left.table(["k", "a"]), right.table(["k", "b"]), 2)
    assert sink.table == expected
    assert ("-D", 1, "x", None) in sink.changes or ("-D", 1, "x", 1.5) in sink.changes

    before = dict(sink.batches)
    right.add({"op": "-D", "k": 3, "b": 2.5}, {"op": "-D", "k": 3, "b": 3.5}, {"op": "+I", "k": 1, "b": 9.0})
    drain(changelog(), sink, tmp_path / "checkpoint")  # described anew, as after a crash of the driver
    assert set(sink.batches) > set(before)
    assert sink.table == slow_join("left", left.table(["k", "a"]), right.table(["k", "b"]), 2)

    left.add({"op": "-D", "k": 1, "a": "x"})
    drain(joined, sink, tmp_path / "checkpoint")  # the same DataFrame started once more
    assert sink.table == slow_join("left", left.table(["k", "a"]), right.table(["k", "b"]), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("how", slow_but(["semi", "anti"], "semi"))
def test_semi_and_anti_join(how: str, left: Source, right: Source, tmp_path: Path) -> None:
    fill_left(left)
    fill_right(right)
    make = gpu_ops.semi_join if how == "semi" else gpu_ops.anti_join
    joined = in_memory(make, stream(left.df, row_kind="op"), stream(right.df, row_kind="op"), "k")
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    assert sink.table == slow_join(how, left.table(["k", "a"]), right.table(["k", "b"]), 2)


@pytest.mark.thorough
def test_chain_of_joins_understands_its_own_changelog(spark: Any, left: Source, right: Source, tmp_path: Path) -> None:
    names = Source(spark, tmp_path / "names", "a string, n string")
    fill_left(left)
    fill_right(right)
    names.add({"a": "x", "n": "ex"}, {"a": "w", "n": "double-u"})
    names.add({"a": "y", "n": "why"})
    first = gpu_ops.join(
        stream(left.df, row_kind="op"), stream(right.df, row_kind="op"), on="k", how="left",
        state=str(tmp_path / "state1"), name="first",
    )  # fmt: skip
    # a projection in between keeps the changelog one
    second = gpu_ops.join(
        first.select("row_kind", "a", "k", "b"), names.df, on="a", how="left",
        state=str(tmp_path / "state2"), name="second",
    )  # fmt: skip
    sink = Sink()
    query = drain(second, sink, tmp_path / "checkpoint")
    one = slow_join("left", left.table(["k", "a"]), right.table(["k", "b"]), 2)
    two = slow_join("left", [(a, k, b) for k, a, b in one], names.table(["a", "n"], None), 2)
    assert sink.table == two
    progress = [p for p in query.recentProgress if p["observedMetrics"]]
    assert progress
    assert all(set(p["observedMetrics"]) == {"first", "second"} for p in progress)


@pytest.mark.thorough
def test_self_join_of_a_stream_and_of_a_changelog(spark: Any, tmp_path: Path) -> None:
    source = Source(spark, tmp_path / "people", "id long, boss long")
    source.add({"id": 1, "boss": None}, {"id": 2, "boss": 1})
    source.add({"id": 3, "boss": 1}, {"id": 4, "boss": 2})
    people = source.df
    joined = in_memory(
        gpu_ops.join, stream(people, name="worker"), stream(people, name="chief"),
        on=[("boss", "id")], how="left", suffixes=("", "_of_boss"), name="staff",
    )  # fmt: skip
    assert joined.columns == ["row_kind", "id", "boss", "id_of_boss", "boss_of_boss"]
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint1")
    rows = source.table(["id", "boss"], None)
    expected = [(i, b, *next((r for r in rows if r[0] == b), (None, None))) for i, b in rows]
    assert sink.table == sorted(expected, key=repr)

    # one join read twice is computed twice: the second run of a micro-batch repeats the first
    counted = in_memory(
        gpu_ops.join, stream(joined, name="one"), stream(joined, name="other"), on="id",
        suffixes=("_1", "_2"), name="twice",
    )  # fmt: skip
    sink = Sink()
    drain(counted, sink, tmp_path / "checkpoint2")
    assert [row[0] for row in sink.table] == [1, 2, 3, 4]


@pytest.mark.thorough
def test_keys_of_different_types_and_special_floats_meet(spark: Any, tmp_path: Path) -> None:
    left = Source(spark, tmp_path / "left", "k int, f float, d decimal(9,1), a string")
    right = Source(spark, tmp_path / "right", "k long, f double, d decimal(20,3), b string")
    left.add(*({"k": k, "f": -0.0, "d": 1.5, "a": f"a{k}"} for k in range(-8, 8)))
    right.add(*({"k": k, "f": 0.0, "d": 1.5, "b": f"b{k}"} for k in range(-8, 8)))
    a = left.df.selectExpr("k", "if(k % 2 = 0, float('nan'), f) as f", "d", "a")
    b = right.df.selectExpr("k", "if(k % 2 = 0, double('nan'), f) as f", "d", "b")
    for number, on in enumerate((["k", "d"], ["f", ("k", "k")], ["d", "f", ("k", "k")])):
        joined = in_memory(gpu_ops.join, a, b, on=on, suffixes=("", "_r"), partitions=4)
        sink = Sink()
        drain(joined, sink, tmp_path / f"checkpoint{number}")
        place = joined.columns.index("a")
        assert sorted(row[place] for row in sink.changes) == sorted(f"a{k}" for k in range(-8, 8)), on


@pytest.mark.thorough
def test_without_a_key_there_is_one_partition(left: Source, right: Source, tmp_path: Path) -> None:
    fill_left(left)
    fill_right(right)
    joined = in_memory(
        gpu_ops.join, stream(left.df, row_kind="op"), stream(right.df, row_kind="op"), how="inner",
        where="left.k < right.k", suffixes=("_l", "_r"),
    )  # fmt: skip
    assert "1 (one partition: no equality column" in gpu_ops.explain(joined)
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    pairs = [
        a + b
        for a in left.table(["k", "a"])
        for b in right.table(["k", "b"])
        if a[0] is not None and b[0] is not None and a[0] < b[0]
    ]
    assert sink.table == sorted(pairs, key=repr)


def test_micro_batches_without_rows_for_a_join_are_not_skipped(
    spark: Any, left: Source, right: Source, tmp_path: Path
) -> None:
    # Spark's optimizer removes what it takes for empty; a join must see every micro-batch all the same.
    names = Source(spark, tmp_path / "names", "a string, n string")
    first = gpu_ops.join(
        stream(left.df, row_kind="op"), stream(right.df, row_kind="op"), on="k", state=str(tmp_path / "state1")
    )
    second = gpu_ops.join(first, names.df, on="a", how="left", state=str(tmp_path / "state2"))
    sink = Sink()
    left.add({"op": "+I", "k": 1, "a": "x"})  # the first join has nothing to say: an empty shuffle
    query = start(second, sink, tmp_path / "checkpoint")
    try:
        query.processAllAvailable()
        names.add({"a": "x", "n": "ex"})  # neither source of the first join has anything new
        query.processAllAvailable()
        right.add({"op": "+I", "k": 1, "b": 1.5})
        query.processAllAvailable()
        left.add({"op": "-D", "k": 1, "a": "x"})
        query.processAllAvailable()
    finally:
        query.stop()
    changes = [("+I", "x", 1, 1.5, "ex"), ("-D", "x", 1, 1.5, "ex")]
    assert [sink.batches[n] for n in sorted(sink.batches)] == [[], [], changes[:1], changes[1:]]


@pytest.mark.thorough
def test_order_within_a_source_partition_is_kept(spark: Any, tmp_path: Path) -> None:
    # A unique key whose row changes often within one micro-batch: only the last value may stay.
    left = Source(spark, tmp_path / "left", "k long, v long")
    right = Source(spark, tmp_path / "right", "k long, w long")
    left.add(*({"k": n % 7, "v": n} for n in range(3000)))
    right.add(*({"k": k, "w": k} for k in range(7)))
    joined = in_memory(gpu_ops.join, stream(left.df, unique_key="k"), right.df, on="k", partitions=3)
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    last = {n % 7: n for n in range(3000)}
    assert sink.table == sorted(((k, v, k) for k, v in last.items()), key=repr)


@pytest.mark.slow
def test_two_queries_over_one_changelog_in_memory(left: Source, right: Source, tmp_path: Path) -> None:
    fill_left(left)
    fill_right(right)
    joined = in_memory(gpu_ops.join, stream(left.df, row_kind="op"), stream(right.df, row_kind="op"), on="k")
    sinks = Sink(), Sink()
    queries = [start(joined, s, tmp_path / f"checkpoint{n}", availableNow=True) for n, s in enumerate(sinks)]
    for query in queries:
        query.awaitTermination()
    assert sinks[0].table == sinks[1].table == slow_join("inner", left.table(["k", "a"]), right.table(["k", "b"]), 2)


def counted(sales: Feed) -> Any:
    return sales.df.groupBy("k").agg(f.count("*").alias("n"), f.sum("v").alias("total"))


@pytest.mark.thorough
@pytest.mark.parametrize("mode", slow_but(["update", "complete"], "update"))
def test_a_streaming_aggregate_is_joined_by_its_unique_key(spark: Any, tmp_path: Path, mode: str) -> None:
    """The row of a group comes again and again, and replaces the one before it; above it a filter sees both."""
    sales = Feed(spark, tmp_path, "sales", {"k": ("int", (1, 2, 3, 4)), "v": ("int", range(5))}, changing=False)
    names = Feed(spark, tmp_path, "names", {"k": ("int", (1, 2, 3, 4, 5)), "name": ("string", ("ann", "bob"))})
    for _ in range(3):
        sales.more(3)
        names.more(3)
    totals = counted(sales).select("total", f.col("k").alias("g"), "n").where("g <> 4")
    query = "SELECT m.name, m.k, t.n, t.total FROM names m LEFT JOIN totals t ON m.k = t.g WHERE t.n < 5 OR t.n IS NULL"
    changes = in_memory(
        gpu_ops.sql, query, names=stream(names.df, row_kind="op"), totals=stream(totals, unique_key="g")
    )
    sink = Sink()
    writer = changes.writeStream.foreachBatch(sink).outputMode(mode).trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    grouped = "(SELECT k AS g, count(*)::BIGINT AS n, sum(v)::BIGINT AS total FROM sales WHERE k <> 4 GROUP BY k)"
    check(sink, query.replace("totals t", f"{grouped} t"), [names, sales])


def test_a_streaming_aggregate_that_would_be_taken_for_insertions_is_refused(spark: Any, tmp_path: Path) -> None:
    schema = "op string, k int, g int, v int, ts timestamp"
    sales, other = (Source(spark, tmp_path / name, schema).df for name in ("sales", "other"))
    totals = sales.groupBy("k", (f.col("g") + 1).alias("h")).agg(f.sum("v").alias("total"))
    one = sales.groupBy("k").count()
    changelog = in_memory(gpu_ops.join, stream(other, row_kind="op"), stream(sales, row_kind="op"), "k",
                          suffixes=("", "_r"))  # fmt: skip
    sales.createOrReplaceTempView("sales_of_groups")
    distinct = spark.sql("SELECT DISTINCT k, g FROM sales_of_groups")

    def updated(key: Any, rows: Any, state: Any) -> Any:
        yield from rows

    grouped = sales.select("k", "v").groupBy("k")
    again, once = (
        grouped.applyInPandasWithState(updated, "k int, v int", "x int", mode, "NoTimeout")
        for mode in ("update", "append")
    )
    for side, message in [
        (totals, r"input 'left' is a streaming aggregate, which .* stream\(..., unique_key=\['k', 'h'\]\).*'update'"),
        (sales.groupBy().count().withColumn("k", f.lit(1)), "is a streaming aggregate"),
        (stream(totals, unique_key="k"), r"unique_key=k is not what it groups by: \['k', 'h'\]"),
        (stream(totals, unique_key=["k", "h", "total"]), "is not what it groups by"),
        (stream(totals.withColumn("h", f.col("h") % 2), unique_key=["k", "h"]), "is not what it groups by"),
        (stream(one.where("count > 3"), unique_key="k"), "filters a streaming aggregate"),
        (stream(one.selectExpr("*", "explode(array(1, 2)) as x"), unique_key="k"), "Generate stands above"),
        (stream(one.unionAll(one), unique_key="k"), "Union stands above"),
        (stream(sales.rollup("k").count(), unique_key="k"), "is not what it groups by"),
        (again, "made by a function with state in output mode 'update'"),
        (distinct, r"unique_key=\['k', 'g'\]"),
        (stream(distinct, unique_key="k"), "is not what it groups by"),
        (stream(changelog.groupBy("k").count(), unique_key="k"), "aggregates the changelog of '.* without its row"),
    ]:  # fmt: skip
        with pytest.raises(gpu_ops.DescriptionError, match=message):
            gpu_ops.join(side, stream(other, name="r"), "k", suffixes=("", "_r"), state=str(tmp_path / "state"))
    for build in (
        lambda: gpu_ops.multi_join([other, one], "k"),
        lambda: gpu_ops.sql("SELECT o.k, x.count FROM other o JOIN x ON x.k = o.k", other=other, x=one),
        lambda: gpu_ops.interval_join(other, one, "k", lower=0, upper=1, time="processing", suffixes=("", "_r")),
        lambda: gpu_ops.aggregate(one, by="k", aggregates={"n": "count(*)"}, state=str(tmp_path / "state")),
    ):
        with pytest.raises(gpu_ops.DescriptionError, match="is a streaming aggregate"):
            build()
    signed = changelog.groupBy("k").agg(f.expr("sum(IF(row_kind IN ('+I', '+U'), 1, -1))").alias("n"))
    for side in (
        stream(totals.select("h", "k", f.col("total").alias("t")).where("k > 1").repartition(3), unique_key=["h", "k"]),
        stream(distinct.selectExpr("k", "g as x"), unique_key=["x", "k"]),
        stream(signed, unique_key="k"),
        stream(again, unique_key="k"),
        once,
        sales.dropDuplicates(["k"]),
    ):
        in_memory(gpu_ops.join, side, stream(other, name="r"), "k", suffixes=("", "_r"))


@pytest.mark.thorough
def test_a_streaming_aggregate_that_is_final_needs_output_mode_append(spark: Any, tmp_path: Path) -> None:
    sales = Source(spark, tmp_path / "sales", "k int, ts timestamp")
    names = Source(spark, tmp_path / "names", "k int, name string")
    names.add({"k": 1, "name": "one"})
    for second in (1, 2, 11, 31):
        sales.add({"k": 1, "ts": f"2024-01-01T00:00:{second:02}Z"})
    windows = sales.df.withWatermark("ts", "1 second").groupBy(f.window("ts", "10 seconds"), "k").count()
    counts = windows.selectExpr("k", "unix_timestamp(window.start) % 60 AS start", "count AS n").where("n > 1")
    changes = in_memory(gpu_ops.join, stream(counts, name="counts"), names.df, "k")
    sink = Sink()
    drain(changes, sink, tmp_path / "append")
    assert sink.table == [(1, 0, 2, "one")]
    writer = changes.writeStream.foreachBatch(Sink()).outputMode("update").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "update")).start()
    with pytest.raises(Exception, match="input 'counts' is a streaming aggregate, which in output mode 'update'"):
        query.awaitTermination()
