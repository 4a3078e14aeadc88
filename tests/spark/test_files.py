"""Joins over `gpu_ops.read_files`: files that Arrow reads, whose rows reach the join in Arrow messages."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import slow_but

import gpu_ops
from gpu_ops import stream
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.wire.hashes import routes
from spark.feeds import Feed, sql_join
from spark.support import Sink, Source, drain, in_memory, slow_join

pytestmark = pytest.mark.spark

COLUMNS: dict[str, dict[str, Any]] = {
    "l": {"k": ("int", [1, 2, 3, 4, None]), "a": ("string", ["x", "", "ÿ"]), "id": ("long", None)},
    "r": {"k": ("long", [1, 2, 3, 5, None]), "b": ("double", [0.5, -1.5])},
}
SQL = "SELECT {columns} FROM l {how} JOIN r ON l.k = r.k"


class ArrowFeed(Feed):
    read_by_arrow = True


class ArrowSource(Source):
    read_by_arrow = True


@pytest.fixture
def feeds(spark: Any, tmp_path: Path) -> tuple[Feed, Feed]:
    return ArrowFeed(spark, tmp_path, "l", COLUMNS["l"]), ArrowFeed(spark, tmp_path, "r", COLUMNS["r"])


def write(folder: Path, name: str, at: int, *rows: dict[str, Any], end: str = "\n") -> None:
    """A file of so many seconds after 2001-09-09."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(end.join(json.dumps(row) for row in rows) + end)
    os.utime(path, (10**9 + at, 10**9 + at))


@pytest.mark.parametrize(
    ("how", "emit"),
    [
        ("full", "per_event"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("inner", "per_batch"), ("left", "per_event"), ("right", "per_batch"))
        ),
    ],
)
def test_joins_after_every_micro_batch(feeds: tuple[Feed, Feed], how: str, emit: Any, tmp_path: Path) -> None:
    left, right = feeds
    state, checkpoint, sink = str(tmp_path / "state"), tmp_path / "checkpoint", Sink()

    def changelog() -> Any:
        sides = stream(left.df, row_kind="op", name="l"), stream(right.df, row_kind="op", name="r")
        return gpu_ops.join(
            *sides, [("k", "k")], how, emit=emit, state=state, suffixes=("", "_r"), partitions=3,
        )  # fmt: skip

    sql = SQL.format(columns="l.k, a, id, r.k, b", how=how.upper())
    for _ in range(3):
        left.more(30)
        right.more(20)
        drain(changelog(), sink, checkpoint)  # described anew each time, as after a crash of the driver
        assert sink.table == sql_join(sql, feeds, len(left.files))
    for source in feeds:  # nothing new of the other
        source.more(10)
        drain(changelog(), sink, checkpoint)
        assert sink.table == sql_join(sql, feeds, len(left.files))


@pytest.mark.thorough
@pytest.mark.parametrize("how", slow_but(["semi", "anti"], "anti"))
def test_semi_and_anti_join(feeds: tuple[Feed, Feed], how: str, tmp_path: Path) -> None:
    left, right = feeds
    make = gpu_ops.semi_join if how == "semi" else gpu_ops.anti_join
    left.more(40)
    right.more(20)
    left.more(5)
    sides = stream(left.df, row_kind="op"), stream(right.df, row_kind="op")
    sink = Sink()
    drain(in_memory(make, *sides, "k"), sink, tmp_path / "checkpoint")
    assert sink.table == slow_join(how, left.table(["k", "a", "id"]), right.table(["k", "b"]), 2)


def test_changes_are_in_the_order_of_their_files(spark: Any, tmp_path: Path) -> None:
    """Of three files in one micro-batch, whatever tasks read them; Spark's reader would begin with the largest."""
    left, right = tmp_path / "l", tmp_path / "r"
    write(left, "c.json", 1, {"op": "+I", "k": 1, "a": "first"})
    write(left, "b.json", 2, {"op": "-U", "k": 1, "a": "first"}, {"op": "+U", "k": 1, "a": "second"}, end="\n" * 4000)
    write(left, "a.json", 3, {"op": "-D", "k": 1, "a": "second"}, {"op": "+I", "k": 1, "a": "third"}, end="\n" * 9000)
    write(right, "a.json", 1, {"k": 1, "b": 0.5})
    joined = in_memory(
        gpu_ops.join,
        stream(gpu_ops.read_files(spark, str(left), "json", "op string, k long, a string"), row_kind="op"),
        gpu_ops.read_files(spark, str(right), "json", "k long, b double"),
        "k",
        emit="per_event",
    )
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    assert len(sink.batches) == 1
    assert sink.table == [(1, "third", 0.5)]
    last = next(iter(sink.batches))
    assert last == 0


def test_names_of_files_are_no_patterns(spark: Any, tmp_path: Path) -> None:
    """For each name with one of these characters Spark reads all files of the micro-batch once more."""
    names = ("ab", "ac", "a*", "a?", "a[b]", "a{b,c}", "a{", "a]", "a\\b", "a%2Ab", "a^b", "[!a]b")
    folder = tmp_path / "f"
    for number, name in enumerate(names):
        write(folder, f"{name}.json", number, {"k": number, "a": name}, end="\n" * 3000)

    def read(path: Path) -> Any:
        return gpu_ops.read_files(spark, str(path), "json", "k long, a string", maxFilesPerTrigger=7)

    for name, path, expected in (("each", folder, names), ("some", folder / "a[bc].json", names[:2])):
        query = read(path).writeStream.format("memory").queryName(f"{name}_file").trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / name)).start().awaitTermination()
        found = sorted((row.k, row.a) for row in spark.table(f"{name}_file").collect())
        assert found == list(enumerate(expected))
    write(tmp_path / "r", "1.json", 1, *({"k": number, "b": 0.5} for number in range(len(names))))
    right = gpu_ops.read_files(spark, str(tmp_path / "r"), "json", "k long, b double")
    joined, sink = in_memory(gpu_ops.join, read(folder), right, "k"), Sink()
    assert gpu_ops.explain(joined).count("read by Arrow") == 2
    drain(joined, sink, tmp_path / "checkpoint")
    assert sorted(sink.table) == [(number, name, 0.5) for number, name in enumerate(names)]


def test_routes_are_where_spark_sends_them(spark: Any) -> None:
    from pyspark.sql import functions as f

    for partitions in (1, 2, 7, 40):
        numbers = routes(partitions)
        rows = spark.createDataFrame([(number,) for number in numbers], "route int").repartition(partitions, "route")
        there = {row.route: row.place for row in rows.select("route", f.spark_partition_id().alias("place")).collect()}
        assert [there[number] for number in numbers] == list(range(partitions))


@pytest.mark.thorough
def test_columns_left_out_moved_and_renamed_are_still_read_by_arrow(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "l", "1.json", 1, {"x": 9, "k": 1, "a": "u"})
    write(tmp_path / "r", "1.json", 1, {"k": 1, "b": 2.5})
    left = gpu_ops.read_files(spark, str(tmp_path / "l"), "json", "x int, k long, a string")
    right = gpu_ops.read_files(spark, str(tmp_path / "r"), "json", "k long, b double")
    moved = left.selectExpr("a AS text", "k").alias("t").withColumnRenamed("k", "id")
    joined = in_memory(gpu_ops.join, moved, right, [("id", "k")])
    assert gpu_ops.explain(joined).count("read by Arrow") == 2
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    assert sink.table == [("u", 1, 1, 2.5)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("condition", "by_arrow"),
    [("< 'z'", True), ("NOT RLIKE 'z'", False), pytest.param("|| '' NOT LIKE 'z%'", True, marks=pytest.mark.slow)],
)
def test_a_filter_leaves_the_state_where_it_is(spark: Any, tmp_path: Path, condition: str, *, by_arrow: bool) -> None:
    left, right = ArrowSource(spark, tmp_path / "l", "k long, a string"), Source(spark, tmp_path / "r", "k long, b int")
    checkpoint, sink = tmp_path / "checkpoint", Sink()

    def changelog(df: Any) -> Any:
        return gpu_ops.join(df, right.df, "k", state=str(tmp_path / "state"), partitions=2)

    for key in range(8):
        left.add({"k": key, "a": "x"})
        right.add({"k": key, "b": key})
    drain(changelog(left.df), sink, checkpoint)
    left.add({"k": 3, "a": "y"}, {"k": 4, "a": "z"})
    filtered = changelog(left.df.where(f"a {condition}"))
    assert ("read by Arrow" in gpu_ops.explain(filtered)) == by_arrow
    drain(filtered, sink, checkpoint)
    assert sink.table == sorted([(key, "x", key) for key in range(8)] + [(3, "y", 3)], key=repr)


def test_a_chain_whose_reader_changes_goes_on(spark: Any, tmp_path: Path) -> None:
    """Its sources stand in Spark's plan in the order in which they were, by which the checkpoint counts them."""
    sources = [Source(spark, tmp_path / name, f"k long, {name} string") for name in "abc"]
    for source, name in zip(sources, "abc", strict=True):
        source.add(*({"k": key, name: f"{name}{key}"} for key in range(20)))

    def changelog() -> Any:
        one, two, three = (source.df for source in sources)
        below = gpu_ops.join(one, two, "k", state=str(tmp_path / "below"), partitions=2, name="below")
        return gpu_ops.join(below, three, "k", state=str(tmp_path / "above"), partitions=2, name="above")

    sink = Sink()
    drain(changelog(), sink, tmp_path / "checkpoint")
    assert len(sink.table) == 20
    for by_arrow, rows in ((True, 21), (False, 22)):
        for source in sources[:2]:
            source.read_by_arrow = by_arrow
        sources[2].add({"k": 3, "c": "more"})
        drain(changelog(), sink, tmp_path / "checkpoint")
        assert len(sink.table) == rows


@pytest.mark.thorough
def test_filters_of_several_layers_a_watermark_and_a_column_twice(spark: Any, tmp_path: Path) -> None:
    rows = [{"k": n, "s": f"t{n % 3}", "v": n % 5} for n in range(30)]
    write(tmp_path / "l", "1.json", 1, *rows)
    write(tmp_path / "r", "1.json", 1, *({"k": n} for n in range(40)))
    left = gpu_ops.read_files(spark, str(tmp_path / "l"), "json", "k long, s string, v int")
    right = gpu_ops.read_files(spark, str(tmp_path / "r"), "json", "k long")
    twice = left.where("v > 1").selectExpr("k", "s AS text", "v", "v AS again").where("text = 't1' AND again < 4")
    joined = in_memory(gpu_ops.join, twice.drop("text"), right.where("k <> 4"), "k")
    assert "filtered by s, v" in gpu_ops.explain(joined) or "filtered by v, s" in gpu_ops.explain(joined)
    assert gpu_ops.explain(joined).count("read by Arrow") == 2
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    expected = [(r["k"], r["v"], r["v"]) for r in rows if 1 < r["v"] < 4 and r["s"] == "t1" and r["k"] != 4]
    assert sink.table == sorted(expected, key=repr)
    assert sink.table


@pytest.mark.thorough
def test_chain_multi_way_and_interval_joins(spark: Any, tmp_path: Path) -> None:
    sources = [ArrowSource(spark, tmp_path / name, f"k long, {name} string") for name in "abc"]
    for source, name in zip(sources, "abc", strict=True):
        source.add(*({"k": key, name: f"{name}{key}"} for key in range(20)))
        source.add({"k": 1, name: "again"})
    a, b, c = (source.df for source in sources)
    chain = in_memory(gpu_ops.join, in_memory(gpu_ops.join, a, b, "k", name="first"), c, "k", "left", name="second")
    many = in_memory(gpu_ops.multi_join, [stream(x, name=n) for x, n in ((a, "a"), (b, "b"), (c, "c"))], on="k")
    sinks = Sink(), Sink()
    drain(chain, sinks[0], tmp_path / "chain")
    drain(many, sinks[1], tmp_path / "many")
    tables = [source.table(["k", name], None) for source, name in zip(sources, "abc", strict=True)]
    expected = slow_join("inner", slow_join("inner", tables[0], tables[1], 2), tables[2], 2)
    assert sinks[0].table == expected
    assert len(expected) == 19 + 8
    assert sinks[1].table == expected


@pytest.mark.thorough
def test_partitions_without_rows_behind_a_source_s_tasks(spark: Any, tmp_path: Path) -> None:
    """The second join's stage has the source's tasks first, so a task's number says nothing of its partition."""
    sources = [ArrowSource(spark, tmp_path / name, f"k long, {name} string") for name in "abc"]
    a, b, c = (source.df for source in sources)
    options = {"partitions": 5, "on": "k"}
    first = gpu_ops.join(a, b, **options, name="first", state=str(tmp_path / "first"))
    chain = gpu_ops.join(first, c, **options, how="left", name="second", state=str(tmp_path / "second"))
    sink = Sink()
    for keys in ([1], [1, 2, 3]):
        first_changed = 0 if len(keys) > 1 else 2
        for source, name in list(zip(sources, "abc", strict=True))[first_changed:]:
            for key in keys:  # each a file and a task of its own
                source.add({"k": key, name: f"{name}{key}"})
        drain(chain, sink, tmp_path / "checkpoint")
        tables = [source.table(["k", name], None) for source, name in zip(sources, "abc", strict=True)]
        expected = slow_join("left", slow_join("inner", tables[0], tables[1], 2), tables[2], 2)
        assert sink.table == expected
    assert len(expected) == 4


@pytest.mark.thorough
def test_interval_join_with_times_in_csv(spark: Any, tmp_path: Path) -> None:
    for name, rows in (("l", "1,2024-01-01 00:00:05\n2,2024-01-01 00:00:50\n"), ("r", "1,2024-01-01 00:00:09\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.csv").write_text(rows)
    frames = [gpu_ops.read_files(spark, str(tmp_path / name), "csv", "k int, t timestamp") for name in "lr"]
    sides = [stream(df, event_time="t", delay="1 second") for df in frames]
    joined = in_memory(
        gpu_ops.interval_join, *sides, [("k", "k")], lower="0 seconds", upper="5 seconds", suffixes=("", "_r")
    )
    assert gpu_ops.explain(joined).count("read by Arrow") == 2
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    [(k, at, _, other)] = sink.table
    assert (k, at.second, other.second) == (1, 5, 9)


def test_a_file_that_cannot_be_read_leaves_the_state_as_it_was(spark: Any, tmp_path: Path) -> None:
    left, right = tmp_path / "l", ArrowSource(spark, tmp_path / "r", "k long, b int")
    write(left, "1.json", 1, {"k": 1, "a": 1})
    right.add({"k": 1, "b": 5}, {"k": 2, "b": 6})
    checkpoint, sink = tmp_path / "checkpoint", Sink()

    def changelog() -> Any:
        orders = gpu_ops.read_files(spark, str(left), "json", "k long, a int")
        return gpu_ops.join(stream(orders, name="orders"), right.df, "k", state=str(tmp_path / "state"))

    drain(changelog(), sink, checkpoint)
    write(left, "2.json", 2, {"k": 2, "a": "seven"})
    with pytest.raises(Exception, match=r"input 'orders', column 'a': cannot read file:.*2\.json"):
        drain(changelog(), sink, checkpoint)
    write(left, "2.json", 2, {"k": 2, "a": 7})
    drain(changelog(), sink, checkpoint)
    assert sink.table == [(1, 1, 5), (2, 7, 6)]


@pytest.mark.thorough
def test_alone_it_is_a_dataframe_like_any_other(spark: Any, tmp_path: Path) -> None:
    source = ArrowSource(spark, tmp_path / "l", "k long, a string")
    source.add({"k": 1, "a": "x"}, {"k": 2, "a": None})
    source.add({"k": 3})
    assert source.df.isStreaming
    assert source.df.schema.simpleString() == "struct<k:bigint,a:string>"
    sink = Sink()
    drain(source.df.selectExpr("k * 2", "a"), sink, tmp_path / "checkpoint")
    assert sink.changes == [(2, "x"), (4, None), (6, None)]


REFUSED = [
    ("xml", "k long", {}, "format='xml'; there are csv, json, parquet, orc, arrow"),
    ("csv", "k long, a array<int>", {}, "column 'a' is list<element: int32>; a file of format csv has none"),
    ("json", "k long", {"header": True}, "read_files() has no option 'header' for json"),
    ("csv", "k long", {"maxFilesPerTriger": 1}, "no option 'maxFilesPerTriger' for csv; there are header, sep"),
    ("csv", "k long", {"sep": "||"}, "sep='||' is one character"),
    ("csv", "k lang", {}, "schema='k lang' is no schema"),
]


@pytest.mark.parametrize(("kind", "schema", "options", "said"), REFUSED, ids=[said[:30] for *_, said in REFUSED])
def test_what_cannot_be_is_refused(spark: Any, kind: Any, schema: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(gpu_ops.DescriptionError) as caught:
        gpu_ops.read_files(spark, "somewhere", kind, schema, **options)
    assert said in str(caught.value)


def test_files_of_a_backlog_are_read_ahead(spark: Any, tmp_path: Path) -> None:
    """What a file had while the micro-batch before was computed comes out, though it was written over by then."""
    folder, size = tmp_path / "l", 100_000
    for number in range(4):
        write(folder, f"{number}.csv", number)
        (folder / f"{number}.csv").write_text(f"{number},7777777\n" * size)
        os.utime(folder / f"{number}.csv", (10**9 + number,) * 2)
    write(tmp_path / "r", "1.json", 1, *({"k": number, "b": 0.5} for number in range(4)))
    left = gpu_ops.read_files(spark, str(folder), "csv", "k long, a long", maxFilesPerTrigger=1)
    right = gpu_ops.read_files(spark, str(tmp_path / "r"), "json", "k long, b double")
    joined, found = in_memory(gpu_ops.join, left, right, "k"), list[tuple[int, int, int]]()
    blocks = Directory.of(spark).blocks
    assert blocks is not None

    def look(rows: Any, batch: int) -> None:
        found.extend((row.k, row.a, row["count"]) for row in rows.groupBy("k", "a").count().collect())
        if batch != 1:
            return
        end = time.monotonic() + 60
        while not (left_there := [one for one in Path(blocks.folder).glob("*/2/ahead-*") if one.stat().st_size]):
            assert time.monotonic() < end
            time.sleep(0.05)
        with open(left_there[0], "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        with open(folder / "2.csv", "r+b") as file:
            file.write(b"2,1111111\n")
        os.utime(folder / "2.csv", (10**9 + 2,) * 2)

    writer = joined.writeStream.foreachBatch(look).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert found == [(number, 7777777, size) for number in range(4)]


@pytest.mark.parametrize("partitions", [1, 2])
def test_micro_batches_of_a_backlog_are_prepared_ahead(spark: Any, tmp_path: Path, partitions: int) -> None:
    """While Spark ends one and plans the next, in each partition, and the result is that of all rows so far."""
    rng, files = np.random.default_rng(partitions), 5
    rows = {name: [rng.integers(0, 9, 40).tolist() for _ in range(files)] for name in "lr"}
    for name, parts in rows.items():
        for number, keys in enumerate(parts):
            write(tmp_path / name, f"{number}.json", number, *({"k": key} for key in keys))
    tables = {
        name: gpu_ops.read_files(spark, str(tmp_path / name), "json", "k long", maxFilesPerTrigger=1) for name in rows
    }
    text = "SELECT l.k, count(*) AS n FROM l JOIN r ON l.k = r.k GROUP BY l.k"
    counted = gpu_ops.sql(text, tables=tables, state=str(tmp_path / "state"), partitions=partitions)
    pool, found, held = Directory.of(spark).servers.pool("cpu"), dict[int, int](), list[dict[str, Any]]()

    def look(changes: Any, batch: int) -> None:
        for change in changes.toArrow().to_pylist():
            if change["row_kind"] in {"+I", "+U"}:
                found[change["k"]] = change["n"]
        left, right = (Counter(key for part in rows[name][: batch + 1] for key in part) for name in "lr")
        assert found == {key: count * right[key] for key, count in left.items() if right[key]}
        end = time.monotonic() + 60
        while batch + 1 < files:
            assert time.monotonic() < end
            answers = [server.address.call("metrics")["partitions"] for server in pool.running]
            held[:] = [one for its in answers for one in its if one["query_id"] == query.id]
            if [one["ahead"] for one in held] == [batch + 1] * partitions:
                break
            time.sleep(0.01)

    writer = counted.writeStream.foreachBatch(look).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    assert len(found) > 5
    assert [one["came_true"] for one in held] == [files - 2] * partitions  # seen before the last one was asked for
