"""What a user sees: metrics, errors, explain, warnings, refusals."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
import gpu_ops.spark
from gpu_ops import stream
from gpu_ops.spark.api.apply import default_partitions
from gpu_ops.spark.api.streams import (
    ChangelogOptions,
    JoinOptions,
    KeyOptions,
    RunOptions,
    TwoSidedOptions,
    with_options,
)
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.pools import Pool
from gpu_ops.spark.driver.queries import JoinPlan, plans_of
from gpu_ops.spark.metrics.metrics import metric_names
from gpu_ops.spark.metrics.progress import observed_metrics
from gpu_ops.spark.plan.build import union_order
from gpu_ops.spark.plan.column_metadata import open_joins
from spark.support import Sink, Source, drain, in_memory, start

pytestmark = pytest.mark.spark


@pytest.fixture
def left(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "left", "op string, k long, a string")


@pytest.fixture
def right(spark: Any, tmp_path: Path) -> Source:
    return Source(spark, tmp_path / "right", "op string, k long, b double")


@pytest.mark.parametrize("reported", [False, True])
def test_metrics_in_sparks_progress_and_in_the_listener(
    spark: Any, left: Source, right: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, reported: bool
) -> None:
    monkeypatch.setattr("gpu_ops.spark.plan.build.metrics_reported", lambda session: reported)
    prometheus = pytest.importorskip("prometheus_client")
    registry, seen = prometheus.CollectorRegistry(), []
    listener = gpu_ops.ProgressListener(seen.append, prometheus=True, registry=registry)
    spark.streams.addListener(listener)
    try:
        left.add(*({"op": "+I", "k": k, "a": "x"} for k in range(10)))
        right.add({"op": "+I", "k": 1, "b": 1.0}, {"op": "-D", "k": 5, "b": 0.0})
        joined = in_memory(
            gpu_ops.join, stream(left.df, row_kind="op"), stream(right.df, row_kind="op"), on="k", how="left",
            name="watched",
        )  # fmt: skip
        assert gpu_ops.spark.metrics.metrics.METRICS_COLUMN not in joined.columns
        query = start(joined, Sink(), tmp_path / "checkpoint")
        query.processAllAvailable()
        query.stop()
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(10_000)
    finally:
        spark.streams.removeListener(listener)
    assert ("metrics     reported to the driver" in gpu_ops.explain(joined)) == reported
    observed = observed_metrics(query.lastProgress)
    assert list(observed) == ([] if reported else ["watched"])
    (entry,) = gpu_ops.spark.join_progress(query.lastProgress)
    metrics = entry.metrics if reported else observed["watched"]["metrics"]
    assert list(metrics) == list(metric_names(("left", "right")))
    assert not any("watermark" in name or "late" in name for name in metrics)
    expected = {
        "left_rows_in": 10, "right_rows_in": 2, "rows_out_insert": 10, "rows_out_delete": 0,
        "left_state_rows": 10, "right_state_rows": 1, "right_unknown_retractions": 1,
        "left_unknown_retractions": 0, "retries": 0, "partitions": 2, "gpu_partitions": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["left_state_bytes"] > 0
    assert metrics["commit_ms"] > 0
    assert [(e.name, e.batch_id, e.backend) for e in seen] == [("watched", 0, "cpu")]
    assert seen[0].metrics == metrics == listener.entries[0].metrics == entry.metrics
    assert {name: type(value) for name, value in metrics.items()} == {
        name: float if name.endswith("_ms") else int for name in metrics
    }
    labels = {"join": "watched", "query": str(query.id)}
    assert registry.get_sample_value("gpu_join_rows_in_total", {**labels, "input": "left"}) == 10
    assert registry.get_sample_value("gpu_join_micro_batch_seconds_count", labels) == 1
    assert registry.get_sample_value("gpu_join_state_rows", {**labels, "input": "left"}) is None  # it has ended


def test_a_bad_row_kind_names_input_column_and_sample(left: Source, right: Source, tmp_path: Path) -> None:
    left.add({"op": "upsert!", "k": 1, "a": "x"})
    joined = in_memory(
        gpu_ops.join, stream(left.df, row_kind="op", name="orders"), right.df, on="k", suffixes=("", "_r")
    )
    query = start(joined, Sink(), tmp_path / "checkpoint", availableNow=True)
    with pytest.raises(Exception, match="BadInputError") as caught:
        query.awaitTermination()
    message = str(caught.value)
    assert "input 'orders', column 'op': unknown row kind" in message
    assert "upsert!" in message


def test_bad_rows_may_be_dropped(left: Source, right: Source, tmp_path: Path) -> None:
    left.add({"op": "upsert!", "k": 1, "a": "x"}, {"op": "+I", "k": 1, "a": "y"})
    right.add({"k": 1, "b": 1.0})
    joined = in_memory(
        gpu_ops.join,
        stream(left.df, row_kind="op", bad_rows="drop"),
        right.df.drop("op"),
        on="k",
        name="dropping",
    )
    sink = Sink()
    query = drain(joined, sink, tmp_path / "checkpoint")
    assert sink.table == [(1, "y", 1.0)]
    assert query.lastProgress["observedMetrics"]["dropping"]["metrics"]["left_bad_rows"] == 1


def test_text_of_kafka_that_is_no_utf8_is_a_bad_row(left: Source, right: Source, tmp_path: Path) -> None:
    """``cast(value AS STRING)`` leaves bytes as they are: one such key ended the query for good."""
    left.add({"op": "+I", "k": 1, "a": "61"}, {"op": "+I", "k": 2, "a": "61FF62"}, {"op": "+I", "k": 3, "a": "C3A4"})
    right.add({"k": 1, "b": 1.0})
    words = left.df.selectExpr("op", "k as n", "cast(unhex(a) as string) as word")
    others = right.df.selectExpr("'a' as word", "b")

    def joined(bad_rows: Any) -> Any:
        source = stream(words, row_kind="op", name="words", bad_rows=bad_rows)
        return in_memory(gpu_ops.join, source, others, on="word", how="left")

    query = start(joined("fail"), Sink(), tmp_path / "failing", availableNow=True)
    with pytest.raises(Exception, match="BadInputError") as caught:
        query.awaitTermination()
    assert r"input 'words', column 'word': holds text that is not valid UTF-8 (for example 'a\\xffb')" in str(
        caught.value
    )
    sink = Sink()
    drain(joined("tag"), sink, tmp_path / "checkpoint")
    assert sorted(sink.changes, key=str) == [
        ("+I", "a", 1, 1.0),
        ("+I", "ä", 3, None),
        ("bad", "a\ufffdb", 2, None),
    ]


def test_a_restart_without_a_state_folder_is_refused(left: Source, right: Source, tmp_path: Path) -> None:
    left.add({"op": "+I", "k": 1, "a": "x"})

    def run() -> None:
        joined = in_memory(gpu_ops.join, left.df, right.df, on="k", suffixes=("", "_r"))
        drain(joined, Sink(), tmp_path / "checkpoint")

    run()
    left.add({"op": "+I", "k": 2, "a": "x"})
    with pytest.raises(Exception, match="StateError") as caught:
        run()
    assert "A restart is refused instead of answering" in str(caught.value)


def test_a_state_folder_belongs_to_one_join(left: Source, right: Source, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    left.add({"op": "+I", "k": 1, "a": "x"})
    one = gpu_ops.join(left.df, right.df, on="k", suffixes=("", "_r"), state=state)
    (tmp_path / "link").symlink_to(tmp_path)
    for spelling in (f"file:{state}", f"file:////{state}", f"{tmp_path}/x/../state", tmp_path / "link" / "state"):
        with pytest.raises(gpu_ops.StateError, match="in use by join"):
            gpu_ops.join(one, stream(right.df, name="again"), on="k", state=spelling, suffixes=("", "_2"))
    # two of them in one query: no micro-batch has begun
    other = gpu_ops.join(left.df, right.df, on="k", suffixes=("", "_r"), state=tmp_path / "link" / "state")
    with pytest.raises(gpu_ops.StateError, match="in use by another join of query"):
        drain(one.unionAll(other), Sink(), tmp_path / "checkpoint")
    assert not (tmp_path / "state").exists()
    # two queries that start before either has a row: the first goes on
    first = start(one, Sink(), tmp_path / "checkpoint_1")
    try:
        for again in (one, other):
            with pytest.raises(gpu_ops.StateError, match=f"in use by another join of query {first.id}"):
                start(again, Sink(), tmp_path / "checkpoint_2")
        first.processAllAvailable()
    finally:
        first.stop()
    # nor is the folder of a query that is over taken for one in use; it belongs to that query
    with pytest.raises(gpu_ops.StateError, match=f"belongs to query {first.id}"):
        start(other, Sink(), tmp_path / "checkpoint_3")
    drain(one, Sink(), tmp_path / "checkpoint_1")
    # and while a query runs
    state = str(tmp_path / "state2")
    running = gpu_ops.join(left.df, right.df, on="k", suffixes=("", "_r"), state=state)
    query = start(running, Sink(), tmp_path / "checkpoint2")
    try:
        query.processAllAvailable()
        with pytest.raises(gpu_ops.StateError, match="running query"):
            gpu_ops.join(left.df, right.df, on="k", suffixes=("", "_r"), state=state)
    finally:
        query.stop()


def test_joins_of_one_query_that_change_folders_are_refused(left: Source, right: Source, tmp_path: Path) -> None:
    def both(first: str, second: str) -> Any:
        states = (str(tmp_path / first), str(tmp_path / second))
        one, other = (gpu_ops.join(left.df, right.df, on="k", suffixes=("", "_r"), state=s) for s in states)
        return one.unionAll(other.where("k > 1"))

    checkpoint, sink = tmp_path / "checkpoint", Sink()
    left.add({"op": "+I", "k": 1, "a": "x"}, {"op": "+I", "k": 2, "a": "y"})
    drain(both("s1", "s2"), sink, checkpoint)
    right.add({"op": "+I", "k": 1, "b": 0.5}, {"op": "+I", "k": 2, "b": 1.5})
    with pytest.raises(Exception, match=r"belongs to join \d of query .* this is join \d.*have changed folders"):
        drain(both("s2", "s1"), sink, checkpoint)
    drain(both("s1", "s2"), sink, checkpoint)  # described anew, so the joins have other ids
    assert [row[2] for row in sink.table] == ["x", "y", "y"]


def test_explain(left: Source, right: Source, tmp_path: Path) -> None:
    joined = gpu_ops.join(
        stream(left.df, name="orders", row_kind="op", unique_key="k", ttl="7 days"),
        stream(right.df, name="prices", sequence_by="k"),
        on="K",  # Spark does not tell case apart
        how="full",
        where="orders.a > 'm'",
        emit="per_event",
        state=str(tmp_path / "state"),
        name="priced",
    )
    text = gpu_ops.explain(joined.where("k > 1").select("k"))
    assert text.splitlines()[:4] == [
        "regular join, full: orders, prices  (metrics 'priced')",
        "  key         orders.k = prices.k",
        "  where       orders.a > 'm'",
        "  emit        per_event: the changelog Flink emits, change by change",
    ]
    for part in (
        "2 (spark.sql.shuffle.partitions)",
        "backend     cpu (",
        str(tmp_path / "state"),
        "orders: row kinds in 'op', unique key k (upsert); 2 columns",
        "at most one row per join key, 7 days after the last write",
        "prices: insert-only, ordered by k; 3 columns",
    ):
        assert part in text
    chained = in_memory(gpu_ops.anti_join, joined, stream(right.df, name="more"), on="k", name="rest")
    assert [line for line in gpu_ops.explain(chained).splitlines() if "metrics" in line] == [
        "semi/anti join, anti: left, more  (metrics 'rest')",
        "regular join, full: orders, prices  (metrics 'priced')",
    ]
    with pytest.raises(gpu_ops.DescriptionError, match="no join of ours"):
        gpu_ops.explain(left.df)


def test_on_a_gpu_a_join_has_one_partition_and_a_task_for_each_core(
    spark: Any, left: Source, right: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told otherwise; the card is made up."""
    assert default_partitions(200, 16, 0, 1) == (1, "1 per GPU, 1 in sight; spark.sql.shuffle.partitions is 200")
    assert default_partitions(200, 16, 2, 2)[0] == 4
    assert default_partitions(200, 3, 1, 2)[:1] == (3,)
    assert default_partitions(3, 16, 1, 2) == (3, "spark.sql.shuffle.partitions")
    assert default_partitions(200, 16, 0, 0)[0] == 16

    def shown(**options: Any) -> str:
        joined = in_memory(gpu_ops.join, left.df.drop("op"), right.df.drop("op"), on="k", **options)
        lines = gpu_ops.explain(joined).split("partitions  ")[1].splitlines()
        return lines[0] + lines[1].replace("  tasks      ", ";") * lines[1].startswith("  tasks")

    servers = Directory.of(spark).servers
    monkeypatch.setitem(servers._pools, "gpu", Pool(servers, "gpu", 1))
    monkeypatch.setattr(Pool, "begin", lambda *_: None)  # nothing can be started on it
    monkeypatch.setattr(type(spark.sparkContext), "defaultParallelism", 8)
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "6")
    try:
        assert (
            shown()
            == "1 (1 per GPU, 1 in sight; spark.sql.shuffle.partitions is 6); 8, each with a share of the changes"
        )
        assert shown(backend="cpu") == "6 (spark.sql.shuffle.partitions)"
        assert shown(partitions=5) == "5 (asked for); 10, each with a share of the changes"
        assert shown(partitions=5, backend="cpu") == "5 (asked for)"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)


def test_memory_only_is_warned_about(left: Source, right: Source) -> None:
    with pytest.warns(gpu_ops.MemoryOnlyStateWarning, match="lives in memory only") as caught:
        gpu_ops.join(left.df, right.df, on="k", suffixes=("", "_r"))
    assert caught[0].filename == __file__


def test_refusals(spark: Any, left: Source, right: Source) -> None:
    with pytest.raises(gpu_ops.DescriptionError, match=r"names 'nope'; did you mean 'op'. There are op, k, a"):
        stream(left.df, unique_key="nope")
    with pytest.raises(gpu_ops.DescriptionError, match="row kinds are strings, column 'k' is bigint"):
        gpu_ops.join(stream(left.df, row_kind="k"), right.df, on="op")
    with pytest.raises(gpu_ops.DescriptionError, match="two columns 'op'"):
        gpu_ops.join(left.df, right.df, on="k")
    with pytest.raises(gpu_ops.DescriptionError, match=r"'A' twice|'a' twice"):
        gpu_ops.join(left.df, right.df.selectExpr("k", "b as A"), on="k")
    with pytest.raises(gpu_ops.DescriptionError, match="not int"):
        gpu_ops.join(left.df, 7, on="k")  # type: ignore[arg-type]
    with pytest.raises(gpu_ops.DescriptionError, match="partitions=0"):
        gpu_ops.join(left.df, right.df, on="k", suffixes=("", "_r"), partitions=0)
    if hasattr(spark, "conf") and spark.version >= "4":
        collated = left.df.selectExpr("k", "a collate UTF8_LCASE as a")
        with pytest.raises(gpu_ops.NotBuiltError, match="collation"):
            gpu_ops.join(collated, stream(collated, name="r"), on="a", suffixes=("", "_r"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("memory.gpuu", "1g", "no setting is called 'spark.gpu_ops.memory.gpuu'; there are spark.gpu_ops.memory.gpu,"),
        ("server.startTimeout", "soon", "spark.gpu_ops.server.startTimeout='soon'"),
        ("memory.host", "4g", "spark.gpu_ops.memory.host='4g' was set in a session whose application runs without it"),
    ],
)
def test_settings_of_a_running_session_are_refused(
    left: Source, right: Source, name: str, value: str, message: str
) -> None:
    spark = left.df.sparkSession
    static = spark.range(3).withColumnRenamed("id", "k")
    sql = "SELECT l.k FROM l JOIN r ON l.k = r.k"
    builds: list[Callable[[], Any]] = [
        lambda: gpu_ops.join(left.df, right.df.drop("op"), on="k"),
        lambda: gpu_ops.join(static, static.selectExpr("k", "k AS b"), on="k"),
        lambda: gpu_ops.multi_join([left.df, right.df.drop("op")], on="k"),
        lambda: gpu_ops.sql(sql, l=left.df, r=right.df),
    ]
    spark.conf.set(f"spark.gpu_ops.{name}", value)
    try:
        for build in builds:
            with pytest.raises(gpu_ops.DescriptionError) as caught:
                build()
            assert message in str(caught.value)
    finally:
        spark.conf.unset(f"spark.gpu_ops.{name}")
    builds[1]()


def test_a_stream_is_refused_where_it_is_declared(left: Source) -> None:
    for options, message in [
        ({"updates": "append"}, "input 'orders': updates='append'; it is one of upsert, retract"),
        ({"bad_rows": "skip"}, "bad_rows='skip'; it is one of fail, drop, tag"),
        ({"unique_key": []}, "unique_key names no column"),
        ({"unique_key": 7}, "unique_key=7; it is a column's name, or several"),
        ({"unique_key": ["k", 7]}, "unique_key names 7; there are op, k, a"),
        ({"row_kind": "k"}, "row kinds are strings, column 'k' is bigint"),
        ({"row_kind": "op", "unique_key": "op"}, "unique_key names 'op'; there are k, a"),
        ({"delay": -1}, "delay is not negative"),
        ({"idle_timeout": "-1 second"}, "idle_timeout is not negative"),
        ({"event_time": "a"}, "event time"),
        ({"ttl": "soon"}, "no duration: 'soon'"),
        ({"ttl": 1.5}, "no duration: 1.5"),
    ]:
        with pytest.raises(gpu_ops.DescriptionError) as caught:
            stream(left.df, name="orders", **options)  # type: ignore[arg-type]
        assert message in str(caught.value)
    assert stream(left.df, delay="1 second").delay_ms == 1000  # interval_join(time=) may say of which column


def test_an_option_that_is_none_names_the_nearest(left: Source, right: Source) -> None:
    bounds = {"lower": 0, "upper": 1}
    for call, wanted in (
        (lambda: gpu_ops.join(left.df, right.df, "k", stat="s"), r"join() has no option stat=; did you mean state=?"),
        (lambda: gpu_ops.semi_join(left.df, right.df, "k", suffixes=("", "_r")), "semi_join() has no option suffixes="),
        (lambda: gpu_ops.multi_join([left.df, right.df], "k", partition=2), "did you mean partitions=?"),
        (lambda: gpu_ops.interval_join(left.df, right.df, "k", backlog=True, **bounds), "no option backlog="),
        (
            lambda: gpu_ops.aggregate(left.df, "k", {"n": "count(*)"}, emits="at_end"),
            "aggregate() has no option emits=",
        ),
        (lambda: gpu_ops.co_group(left.df, right.df, "k", len, "n int", nullsafe=True), "did you mean null_safe=?"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert wanted in str(caught.value)


def test_a_join_is_found_by_what_its_plan_carries(spark: Any, left: Source, right: Source) -> None:
    """Also through a view, and in a plan that no DataFrame of ours is left of."""
    one = in_memory(gpu_ops.join, left.df.drop("op"), right.df.drop("op"), on="k", partitions=2, name="one")
    (plan,) = plans_of(one)
    assert (plan.name, plan.partitions, plan.description.how, plan.bounded) == ("one", 2, "inner", False)
    assert not any(plan.plan_id in str(field.metadata) for field in one.select("row_kind", "a").schema.fields)
    one.createOrReplaceTempView("changes_of_one")
    assert plans_of(spark.table("changes_of_one").where("a = 'gpu_join_0123456789ab'")) == [plan]
    assert plans_of(one.unionAll(one)) == [plan]
    two = in_memory(
        gpu_ops.join, one, stream(right.df.drop("op"), name="again"), on="k", suffixes=("", "_2"), name="two"
    )
    assert [found.name for found in plans_of(two)] == ["two", "one"]
    assert not plans_of(left.df)


def test_connect_is_refused() -> None:
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe", "sparkSession": None})()
    with pytest.raises(gpu_ops.NotBuiltError, match="Spark Connect"):
        stream(frame)


def test_changelogs_in_unions_keep_their_partitions(spark: Any, left: Source, right: Source, tmp_path: Path) -> None:
    left.add(*({"op": "+I", "k": k, "a": "x"} for k in range(20)))
    right.add(*({"op": "+I", "k": k, "b": 1.0} for k in range(20)))
    one = in_memory(gpu_ops.join, left.df.drop("op"), right.df.drop("op"), on="k", partitions=2, name="one")
    none = in_memory(
        gpu_ops.join,
        left.df.drop("op"),
        stream(right.df.drop("op"), name="r"),
        where="left.k = r.k",
        suffixes=("", "_r"),
    )
    assert [JoinPlan.of(node).name for node in open_joins(one.where("k > 3"))] == ["one"]  # type: ignore[union-attr]
    assert open_joins(left.df) == open_joins(one.repartition(3)) == [None]
    alone = none.select(one.columns)
    assert len(open_joins(one.unionAll(one).unionAll(alone))) == 3
    # as in the checkpoints of earlier versions
    assert union_order([left.df, one, alone, left.df.union(left.df), one.union(one)]) == [1, 4, 0, 3, 2]
    mixed = one.select("k").union(left.df.select("k"))
    assert union_order([left.df, mixed, one]) == [2, 1, 0]

    # as the right input, where the left one brings tasks of its own
    second = in_memory(gpu_ops.join, left.df.drop("op"), stream(one, name="one"), on="k", suffixes=("", "_1"))
    sink = Sink()
    drain(second, sink, tmp_path / "checkpoint")
    assert sink.table == sorted(((k, "x", "x", 1.0) for k in range(20)), key=repr)
    # and behind tasks that the user's own plan puts before it: messages name their partition
    behind = left.df.selectExpr("op as row_kind", "k", "a", "cast(null as double) as b").unionAll(one)
    sink = Sink()
    drain(behind, sink, tmp_path / "behind")
    assert sink.table == sorted(((k, "x", b) for k in range(20) for b in (None, 1.0)), key=repr)
    with pytest.raises(Exception, match="DescriptionError") as caught:
        drain(one.coalesce(1), Sink(), tmp_path / "coalesced")
    assert "repartition() instead of coalesce()" in str(caught.value)


@pytest.mark.parametrize("missing", ["pyspark", "cudf"])
def test_import_needs_no_spark(missing: str) -> None:
    code = (
        f"import sys; sys.modules['{missing}'] = sys.modules['cudf'] = None\n"
        "import gpu_ops, gpu_ops.spark\n"
        "assert not [m for m in sys.modules if m.startswith(('pyspark.', 'pandas', 'py4j'))]\n"
        "assert gpu_ops.Join and 'join' in dir(gpu_ops)\n"
        "try: gpu_ops.join\n"
        "except ImportError as e: print(e)\n"
        "else: print('there')\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("pip install 'gpu-join[spark]'" in out.stdout) == (missing == "pyspark")


def test_options_are_explained_where_python_has_docstrings_without_indentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.13 compiles them."""
    for options in (RunOptions, KeyOptions, ChangelogOptions, TwoSidedOptions):
        monkeypatch.setattr(options, "__doc__", inspect.cleandoc(options.__doc__ or ""))

    def function(**options: Any) -> Any:
        del options

    function.__doc__ = "Joins.\n\nArgs:\n    left: one.\n    options: see\n        elsewhere.\n\nReturns:\n    A.\n"
    explained = inspect.getdoc(with_options(JoinOptions)(function)) or ""
    assert explained.startswith("Joins.\n\nArgs:\n    left: one.\n    state: a folder of its own")
    assert "elsewhere" not in explained
    for name in JoinOptions.__annotations__:
        assert f"\n    {name}: " in explained
        assert f"\n    {name}: " in (inspect.getdoc(gpu_ops.join) or "")
