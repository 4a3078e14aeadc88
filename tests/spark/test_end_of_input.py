"""The end of input through Spark: ``emit="at_end"``, aggregates, co-groups, static inputs."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as f
from rich.console import Console

import gpu_ops
from gpu_ops import stream
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.server.inspection import describe
from spark.feeds import Feed, sql_join
from spark.support import Row, Sink, drain, in_memory, start

pytestmark = pytest.mark.spark

KEYS = (1, 2, 3, 4, 5, None)


@pytest.fixture
def feeds(spark: Any, tmp_path: Path) -> list[Feed]:
    """Orders, prices and a third input, which share ``k``."""
    made = [
        Feed(spark, tmp_path, "orders", {"id": ("long", None), "k": ("int", KEYS), "a": ("double", (1.5, 2.5))}),
        Feed(spark, tmp_path, "prices", {"k": ("long", KEYS), "b": ("string", ("x", "y", None))}),
        Feed(spark, tmp_path, "third", {"k": ("long", KEYS), "c": ("int", (1, 2))}, changing=False),
    ]
    for rows in (40, 12):
        for feed in made:
            feed.more(rows)
    return made


def inputs(feeds: list[Feed], frames: list[Any] | None = None) -> list[Any]:
    orders, prices, third = frames or [feed.df for feed in feeds]
    return [
        stream(orders, name="orders", row_kind="op", unique_key="id", updates="retract"),
        stream(prices, name="prices", row_kind="op"),
        stream(third, name="third"),
    ]


def static(spark: Any, feeds: list[Feed]) -> list[Any]:
    """All files of each feed as a static DataFrame whose partitions are in their order."""
    return [spark.createDataFrame(feed.changes, feed._schema).repartition(1) for feed in feeds]


def rows_of(df: Any) -> list[Row]:
    """A result without its row kinds, which are all insertions."""
    rows = [tuple(row) for row in df.collect()]
    if df.columns[0] == "row_kind":
        assert {row[0] for row in rows} <= {"+I"}
        rows = [row[1:] for row in rows]
    return sorted(rows, key=repr)


JOINS: dict[str, tuple[Callable[..., Any], str]] = {
    "full": (
        lambda sides, **o: gpu_ops.join(*sides[:2], on="k", how="full", where="orders.a > 2", **o),
        "SELECT coalesce(o.k, p.k) AS k, id, a, b FROM orders o FULL JOIN prices p ON o.k = p.k AND o.a > 2",
    ),
    "no key": (
        lambda sides, **o: gpu_ops.join(
            *sides[:2], how="left", where="orders.id < 3 and orders.k < prices.k", suffixes=("", "_p"), **o
        ),
        "SELECT o.*, p.* FROM orders o LEFT JOIN prices p ON o.id < 3 AND o.k < p.k",
    ),
    "semi": (
        lambda sides, **o: gpu_ops.semi_join(*sides[:2], on="k", **o),
        "SELECT * FROM orders o WHERE EXISTS (FROM prices p WHERE p.k = o.k)",
    ),
    "not in": (
        lambda sides, **o: gpu_ops.anti_join(
            sides[0], sides[1], on="k", null_aware=True, where="prices.b = 'x' and prices.k > 2", **o
        ),
        "SELECT * FROM orders o WHERE k NOT IN (SELECT k FROM prices WHERE b = 'x' AND k > 2)",
    ),
    "multi": (
        lambda sides, **o: gpu_ops.multi_join(sides, on="k", how=["left", "inner"], **o),
        "SELECT o.k, id, a, b, c FROM orders o LEFT JOIN prices p ON o.k = p.k JOIN third t ON o.k = t.k",
    ),
    "aggregate": (
        lambda sides, **o: gpu_ops.aggregate(
            sides[0], by="K", aggregates={"n": "count(*)", "total": ("sum", "A"), "least": "min(id)"}, **o
        ),
        "SELECT k, count(*), sum(a), min(id) FROM orders GROUP BY k",
    ),
    "aggregate of all": (
        lambda sides, **o: gpu_ops.aggregate(sides[1], aggregates={"n": "count(DISTINCT b)", "last": "max(k)"}, **o),
        "SELECT count(DISTINCT b), max(k) FROM prices",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "which", ["full", *(pytest.param(which, marks=pytest.mark.thorough) for which in ("multi", "aggregate"))]
)
def test_at_the_end(spark: Any, feeds: list[Feed], tmp_path: Path, which: str) -> None:
    """Nothing while the query runs, also over a restart; then the join of the folded inputs."""
    make, sql = JOINS[which]
    options = {"emit": "at_end"}
    state = str(tmp_path / "state")

    def run(more: int = 0) -> Any:
        for feed in feeds:
            if more:
                feed.more(more)
        described = make(inputs(feeds), state=state, name="kept", **options)
        sink = Sink()
        query = drain(described, sink, tmp_path / "checkpoint")
        assert not sink.changes
        return query, described

    query, described = run()
    metrics = query.lastProgress["observedMetrics"]["kept"]["metrics"]
    assert sum(n for name, n in metrics.items() if name.endswith("_state_rows")) > 10
    assert not any(n for name, n in metrics.items() if name.startswith("rows_out"))
    if which == "full":
        run(7)
    found = gpu_ops.finish(spark, state=state)
    assert found.dtypes == described.dtypes
    assert not found.isStreaming
    want = sql_join(sql, feeds, len(feeds[0].files))
    assert rows_of(found) == want
    assert rows_of(gpu_ops.finish(spark, state=state)) == want
    assert len(want) > 3
    shown = io.StringIO()
    describe(state, Console(file=shown, width=200))
    titles = {"full": "full join on k = k where", "multi": "multi-way join of", "aggregate": "aggregate of orders by k"}
    assert titles[which] in shown.getvalue()
    assert ", emit at_end" in shown.getvalue()
    if which == "full":
        with pytest.raises(gpu_ops.StateError, match=r"is finished.*gpu_ops.reopen\(\)"):
            make(inputs(feeds), state=state, **options)
        gpu_ops.reopen(state=state)
        run(5)
        assert rows_of(gpu_ops.finish(spark, state=state)) == sql_join(sql, feeds, len(feeds[0].files))


@pytest.mark.thorough
def test_static_inputs(spark: Any, feeds: list[Feed]) -> None:
    """All kinds of joins at once, without a folder or a warning about it; columns as the streaming ones."""
    frames = static(spark, feeds)
    for which, (make, sql) in JOINS.items():
        at_once = make(inputs(feeds, frames))
        if "aggregate" not in which:
            assert at_once.dtypes == in_memory(make, inputs(feeds)).dtypes
        assert not at_once.isStreaming
        assert rows_of(at_once) == sql_join(sql, feeds, 2), which


@pytest.mark.thorough
def test_the_same_as_per_batch(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    make, _ = JOINS["full"]
    sink = Sink()
    drain(in_memory(make, inputs(feeds)), sink, tmp_path / "checkpoint")
    assert sink.table == rows_of(make(inputs(feeds, static(spark, feeds))))


BASE = dt.datetime(2026, 1, 1)


@pytest.mark.thorough
def test_interval_joins(spark: Any, tmp_path: Path) -> None:
    """No row is late, whatever the watermark would have been."""
    columns = {"k": ("long", (1, 2, 3)), "t": ("string", [f"{BASE + dt.timedelta(seconds=n)}Z" for n in range(60)])}
    left = Feed(spark, tmp_path, "l", columns, changing=False)  # type: ignore[arg-type]
    right = Feed(spark, tmp_path, "r", columns, changing=False)  # type: ignore[arg-type]
    for rows in (20, 20):
        left.more(rows)
        right.more(rows)
    frames = [feed.df.selectExpr("k", "timestamp(t) t") for feed in (left, right)]
    given: dict[str, Any] = {
        "on": "k", "how": "full", "lower": "-3 seconds", "upper": "5 seconds", "suffixes": ("", "_r")
    }  # fmt: skip
    state = str(tmp_path / "state")
    sides = [frame.withWatermark("t", "1 second") for frame in frames]
    changes = gpu_ops.interval_join(*sides, emit="at_end", state=state, **given)
    sink = Sink()
    drain(changes, sink, tmp_path / "checkpoint")
    assert not sink.changes
    zoned = "CAST(t AS TIMESTAMP) AS t FROM"
    sql = f"""SELECT coalesce(l.k, r.k), l.t, r.t FROM (SELECT k, {zoned} l) l FULL JOIN (SELECT k, {zoned} r) r
        ON l.k = r.k AND r.t BETWEEN l.t - INTERVAL 3 SECOND AND l.t + INTERVAL 5 SECOND"""
    want = sql_join(sql, [left, right], 2)
    assert rows_of(gpu_ops.finish(spark, state=state)) == want
    assert len(want) > 30
    tables = [spark.createDataFrame(feed.changes, feed._schema) for feed in (left, right)]
    stills = [table.selectExpr("k", "timestamp(t) t") for table in tables]
    at_once = gpu_ops.interval_join(*stills, time=("t", "t"), **given)
    assert rows_of(at_once) == want

    def gaps(batch: pa.RecordBatch) -> pa.RecordBatch:
        gap = pc.subtract(batch["right_timestamp"].cast(pa.int64()), batch["left_timestamp"].cast(pa.int64()))
        return pa.RecordBatch.from_pydict({"gap": pc.divide(gap, 1_000_000)})

    options = {**given, "how": "inner", "time": ("t", "t"), "process": gaps, "process_schema": "gap bigint"}
    pairs = gpu_ops.interval_join(*stills, **options)
    sql = sql.replace("coalesce(l.k, r.k), l.t, r.t", "epoch(r.t - l.t)::BIGINT").replace("FULL", "INNER")
    assert rows_of(pairs) == sql_join(sql, [left, right], 2)
    for option in ({"heartbeat": 1}, {"process": gaps, "process_schema": "gap bigint", "how": "inner"}):
        with pytest.raises(gpu_ops.DescriptionError, match=r"(heartbeat|process)="):
            gpu_ops.interval_join(*sides, emit="at_end", state=state, **{**given, **option})


def made() -> Callable[[pa.Table, pa.Table], pa.Table]:
    """A function that travels by value; Spark's workers cannot import this module."""

    def summed(left: pa.Table, right: pa.Table) -> pa.Table:
        """Per key the sum of the left and the number of right rows; whole keys, sorted."""
        for side in (left, right):
            keys = side["k"].to_pylist()
            assert keys == sorted(keys)
        sums = left.group_by("k").aggregate([("a", "sum")])
        counts = right.set_column(0, "k", right["k"].cast(pa.int32())).group_by("k").aggregate([("b", "count")])
        found = sums.join(counts, "k", join_type="full outer")
        return pa.table({"key": found["k"], "n": pc.fill_null(found["b_count"], 0), "total": found["a_sum"]})

    return summed


summed = made()


GROUPED = """SELECT coalesce(l.k, r.k), total, coalesce(n, 0) FROM
    (SELECT k, sum(a) AS total FROM orders WHERE k IS NOT NULL GROUP BY k) l FULL JOIN
    (SELECT k, count(b) AS n FROM prices WHERE k IS NOT NULL GROUP BY k) r ON l.k = r.k"""
GROUPS = "key int, total double, n bigint"


def test_co_groups(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    grouped = gpu_ops.co_group(*inputs(feeds)[:2], on="k", apply=summed, schema=GROUPS, state=state)
    assert grouped.dtypes == [("key", "int"), ("total", "double"), ("n", "bigint")]
    sink = Sink()
    drain(grouped, sink, tmp_path / "checkpoint")
    assert not sink.changes
    assert "co-group: orders, prices" in gpu_ops.explain(grouped)
    want = sql_join(GROUPED, feeds, 2)
    assert rows_of(gpu_ops.finish(spark, state=state)) == want
    assert len(want) == 5
    at_once = gpu_ops.co_group(*inputs(feeds, static(spark, feeds))[:2], on="k", apply=summed, schema=GROUPS)
    assert rows_of(at_once) == want

    # in another application the function is not known
    Directory.of(spark).functions.clear()
    with pytest.raises(gpu_ops.DescriptionError, match="its function is not kept there: give it again"):
        gpu_ops.finish(spark, state=state)
    with pytest.raises(gpu_ops.DescriptionError, match="go together"):
        gpu_ops.finish(spark, state=state, apply=summed)
    again = gpu_ops.finish(
        spark, state=state, apply=lambda left, right: pa.table({"n": [left.num_rows]}), schema="n int"
    )
    assert sum(n for (n,) in rows_of(again)) == len([r for r in feeds[0].table(["k"]) if r[0] is not None])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda left, right: left.to_pylist(), r"apply= function <lambda> gives a table, not list"),
        (lambda left, right: left, r"gives the columns id, k, a; its schema says n"),
        (lambda left, right: pa.table({"n": ["x"]}), r"gives column 'n' as string; its schema says int64"),
        (lambda left, right: pa.table({"n": [1, None]}), r"gives nulls in column 'n'"),
    ],
)
def test_wrong_output_of_a_function(spark: Any, feeds: list[Feed], function: Any, message: str) -> None:
    sides = inputs(feeds, static(spark, feeds))[:2]
    grouped = gpu_ops.co_group(*sides, on="k", apply=function, schema="n bigint not null")
    with pytest.raises(Exception, match="DescriptionError") as caught:
        grouped.collect()
    assert message.strip("r") in str(caught.value)


def test_a_function_that_cannot_be(feeds: list[Feed]) -> None:
    sides = [feed.df for feed in feeds[1:]]

    def refused(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(gpu_ops.DescriptionError, match=match):
            gpu_ops.co_group(*sides, *args, **options)

    refused("apply= is a function of two Arrow tables, not int", "k", 7, "n int")
    refused("schema='nonsense !' is no schema", "k", summed, "nonsense !")
    refused("a co-group of a stream keeps it", "k", summed, "n int")
    refused("no column 'x' to join on", "x", summed, "n int", state="s")
    refused("needs the columns", None, summed, "n int", state="s")


@pytest.mark.thorough
def test_nothing_at_all(spark: Any) -> None:
    """Static inputs without rows, with and without partitions; a count of nothing is 0."""
    no_partition = spark.createDataFrame([], "op string, k int, v int")
    filtered = spark.range(5).selectExpr("'+I' op", "int(id) k", "1 v").where("k > 9")
    for empty in (stream(no_partition, row_kind="op"), stream(filtered.drop("op"))):
        assert rows_of(gpu_ops.aggregate(empty, aggregates={"n": "count(*)", "s": "sum(v)"})) == [(0, None)]
    changing, plain = stream(filtered, row_kind="op"), stream(no_partition.drop("op"), name="right")
    assert rows_of(gpu_ops.aggregate(plain, by="k", aggregates={"n": "count(*)"})) == []
    joined = gpu_ops.join(changing, plain, on="k", how="full", suffixes=("", "_r"))
    assert joined.columns == ["row_kind", "k", "v", "v_r"]
    assert rows_of(joined) == []
    some = spark.createDataFrame([(1, 2)], "k int, w int")
    assert rows_of(gpu_ops.join(some, changing, on="k", how="left")) == [(1, 2, None)]
    assert rows_of(gpu_ops.co_group(some, plain, "k", lambda left, right: left, "k int, w int")) == [(1, 2)]


@pytest.mark.thorough
def test_the_order_of_a_static_input(spark: Any) -> None:
    """Changes come in the order of the DataFrame, or of ``sequence_by``, over many partitions."""
    changes = [(n, n % 7, "-D" if n % 3 == 2 else "+I", n) for n in range(4000)]
    upserts = spark.createDataFrame(changes, "seq int, k int, op string, v int").repartition(1)
    kept = {k: (k, max(r[3] for r in changes if r[1] == k)) for k in range(7)}
    gone = {k for k in kept if kept[k][1] % 3 == 2}
    want = sorted((k, v, v) for k, v in kept.values() if k not in gone)
    assert 0 < len(gone) < 7
    other = spark.range(7).selectExpr("int(id) as k")
    spread = upserts.repartitionByRange(6, "seq").sortWithinPartitions("seq")
    shuffled = upserts.orderBy(f.expr("v % 5"), "v")
    for df, by in ((upserts, None), (spread, None), (shuffled, "seq")):
        source = stream(df, row_kind="op", unique_key="k", sequence_by=by, name="t")
        joined = gpu_ops.join(source, other, on="k", partitions=3)
        assert sorted((r["k"], r["seq"], r["v"]) for r in joined.collect()) == want
    # and through two joins, each a changelog to the next
    source = stream(upserts.drop("seq"), row_kind="op", unique_key="k", name="t")
    twice = gpu_ops.join(gpu_ops.join(source, other, on="k"), stream(other, name="o"), on="k", how="left")
    assert rows_of(twice) == sorted((k, v) for k, v, _ in want)


def test_explain(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    orders, prices, third = inputs(feeds)
    state = {"state": str(tmp_path / "state")}
    ends = gpu_ops.explain(gpu_ops.join(orders, prices, on="k", emit="at_end", **state))
    assert "  emit        at_end: nothing before the end of the input, then the result" in ends
    assert "  attributes  output only once the input has ended; sorts it itself; no backlog: with emit='at_end'" in ends
    assert "              kept as it comes until the input ends" in ends
    live = gpu_ops.explain(in_memory(gpu_ops.multi_join, [orders, third], on="k"))
    assert "  attributes  output as input comes; sorts nothing; can begin with a backlog\n" in live
    text = gpu_ops.explain(gpu_ops.join(orders, prices, on="k", backlog=True, **state))
    assert "begins with a backlog: runs with availableNow give no output" in text
    text = gpu_ops.explain(
        gpu_ops.aggregate(orders, "k", {"n": "count(DISTINCT a)", "m": "count(*)"}, emit="at_end", **state)
    )
    assert text.splitlines()[0].startswith("aggregate: orders  (metrics 'join_")
    assert "  group by    k\n  aggregates  n = count(DISTINCT a), m = count(*)\n" in text
    text = gpu_ops.explain(gpu_ops.semi_join(*inputs(feeds, static(spark, feeds))[:2], on="k"))
    assert "  state       none: the inputs are static, and joined at once in Spark's tasks" in text
    assert "  backend     cpu (in Spark's tasks, which would share a card)" in text
    assert "              read once" in text


def test_refusals(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    orders, prices, third = inputs(feeds)
    still, others, _ = inputs(feeds, static(spark, feeds))
    state = str(tmp_path / "state")

    @contextlib.contextmanager
    def refused(match: str, error: type = gpu_ops.DescriptionError) -> Iterator[None]:
        with pytest.raises(error, match=match):
            yield

    with refused("bounded input is joined at once and needs no state folder"):
        gpu_ops.join(still, others, on="k", state=state)
    with refused("backlog= has no place here"):
        gpu_ops.join(still, others, on="k", backlog=True)
    with refused("emit='at_end' of a stream keeps it until it ends"):
        gpu_ops.join(orders, prices, on="k", emit="at_end")
    with refused("an aggregate with emit='at_end' of a stream keeps it"):
        gpu_ops.aggregate(orders, aggregates={"n": "count(*)"}, emit="at_end")
    with refused("at least one of "):
        gpu_ops.aggregate(still)
    with refused("input 'orders': by names 'nope'"):
        gpu_ops.aggregate(still, by="nope", aggregates={"n": "count(*)"})
    with refused("input 'orders': total names 'nope'"):
        gpu_ops.aggregate(still, aggregates={"total": "sum(nope)"})
    with refused("'N' twice .*: rename one$|'n' twice .*: rename one$"):
        gpu_ops.aggregate(still, aggregates={"n": "count(*)", "N": "sum(a)"})
    with refused("ttl= has no place"):
        gpu_ops.join(stream(still.df, ttl="1 day"), others, on="k", suffixes=("", "_r"))
    with refused("no backlog here: with emit='at_end'"):
        gpu_ops.join(orders, prices, on="k", emit="at_end", backlog=True, state=state)
    with refused("no backlog here: the rows of input 'third' expire"):
        gpu_ops.join(orders, stream(third.df, name="third", ttl="1 day"), on="k", backlog=True)
    ends = gpu_ops.join(orders, third, on="k", emit="at_end", state=state, name="ends")
    with refused(r"'ends' has no output before its input ends: join it as it is, .* or what gpu_ops.finish\(\) gives"):
        gpu_ops.join(ends.where("true"), prices, on="k")
    with refused("apply= is for a co-group"):
        query = start(ends, Sink(), tmp_path / "checkpoint", availableNow=True)
        query.awaitTermination()
        gpu_ops.finish(spark, state=state, apply=summed, schema=GROUPS)
