"""Chains of joins with different keys: exactly once as a whole, and the unique keys that follow on the way."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import slow_but
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops import stream
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.spark.api import apply
from gpu_ops.spark.api.streams import as_input
from gpu_ops.spark.driver import queries as recognition
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.plan import build as building
from gpu_ops.spark.plan import changes as of_changes
from gpu_ops.spark.plan.column_metadata import derived_key
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.spark.wire.connection import FlightServer
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from spark.feeds import Feed, check, sql_join
from spark.support import Sink, drain, in_memory, start

pytestmark = pytest.mark.spark

KEYS = (1, 2, 3, 4, 5, None)


@pytest.fixture
def feeds(spark: Any, tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> list[Feed]:
    """Users, orders and preferences that share ``user_id``; products, and tags of them.

    ``arrow``: read by Arrow; ``spark``: by Spark, and each operator is a stage of Spark's; ``apart``: the last one has
    tasks of its own; ``shares``: likewise, and three tasks take a share of each partition's changes; ``engine``: there
    is one partition, so one engine has all operators; ``card``: likewise, and three tasks take a share of its changes.
    Else a chain is one task.
    """
    if getattr(request, "param", None) in ("spark", "apart", "shares"):
        monkeypatch.setattr(of_changes, "MOST_IN_ONE_TASK", 0)
    if getattr(request, "param", None) == "spark":
        monkeypatch.setattr(of_changes, "MOST_BELOW", 0)
    if getattr(request, "param", None) in ("shares", "card"):
        monkeypatch.setattr(apply, "_shares", lambda *_: 3)
    if getattr(request, "param", None) in ("engine", "card"):
        monkeypatch.setattr(apply, "default_partitions", lambda *_: (1, "one"))
    made = [
        Feed(spark, tmp_path, "users", {"user_id": ("long", None), "name": ("string", ("ann", "bob", None))}),
        Feed(
            spark,
            tmp_path,
            "orders",
            {"order_id": ("long", None), "user_id": ("int", KEYS), "product": ("string", ("p", "q", "r", None))},
        ),
        Feed(spark, tmp_path, "prefs", {"user_id": ("long", KEYS), "pref": ("int", (1, 2))}),
        Feed(spark, tmp_path, "products", {"product": ("string", ("p", "q", "r")), "size": ("int", range(1, 8))}),
        Feed(spark, tmp_path, "blocked", {"size": ("int", range(1, 8))}),
    ]
    for feed in made:
        feed.read_by_arrow = getattr(request, "param", "spark") in ("arrow", "apart")
    return made


SQL = """SELECT product, user_id, name, order_id, pref, size FROM users
    JOIN orders USING (user_id) LEFT JOIN prefs USING (user_id) JOIN products USING (product)
    WHERE NOT EXISTS (SELECT 1 FROM blocked WHERE blocked.size = products.size)"""


def chain(feeds: list[Feed], folder: Path, emit: Any = "per_batch") -> Any:
    """Three joins by three keys, each with its own state folder; a projection in between."""
    users, orders, prefs, products, blocked = feeds
    bought = gpu_ops.multi_join(
        [
            stream(users.df, name="users", row_kind="op", unique_key="user_id"),
            stream(orders.df, name="orders", row_kind="op", unique_key="order_id", updates="retract"),
            stream(prefs.df, name="prefs", row_kind="op"),
        ],
        on="user_id",
        how=["inner", "left"],
        emit=emit,
        state=str(folder / "bought"),
        name="bought",
    )
    known = bought.select("pref", "order_id", "product", "name", "user_id", "row_kind")
    sized = gpu_ops.join(
        known, stream(products.df, row_kind="op"), on="product", emit=emit, state=str(folder / "sized"), name="sized"
    )
    left = gpu_ops.anti_join(
        sized, stream(blocked.df, row_kind="op"), on="size", emit=emit, state=str(folder / "left"), name="left"
    )
    return left.select("row_kind", "product", "user_id", "name", "order_id", "pref", "size")


def one_engine(folder: Path) -> bool:
    """True if the last operator's folder has the state of all."""
    manifest = Manifest.read(Files.at(str(folder / "left")))
    return manifest is not None and isinstance(from_json(manifest.description), Dataflow)


def more(feeds: list[Feed], rows: int = 20) -> None:
    for feed in feeds:
        feed.more(2 if feed.name == "blocked" else rows)


@pytest.mark.parametrize(
    ("feeds", "emit"),
    slow_but(
        [
            ("spark", "per_event"),
            ("arrow", "per_batch"),
            ("arrow", "per_event"),
            ("apart", "per_batch"),
            ("shares", "per_event"),
            ("engine", "per_batch"),
            ("card", "per_event"),
        ],
        ("arrow", "per_batch"),
        ("apart", "per_batch"),
        ("card", "per_event"),
    ),
    indirect=["feeds"],
)
def test_a_chain_is_right_after_every_micro_batch_and_restart(feeds: list[Feed], tmp_path: Path, emit: Any) -> None:
    sink = Sink()
    for _ in range(2):
        more(feeds)
        more(feeds)
        query = drain(chain(feeds, tmp_path, emit), sink, tmp_path / "checkpoint")
        check(sink, SQL, feeds, least=100)
    assert {"bought", "sized", "left"} == set(query.lastProgress["observedMetrics"])
    state = [name for name in ("bought", "sized", "left") if (tmp_path / name / "p").exists()]
    assert state == (["left"] if one_engine(tmp_path) else ["bought", "sized", "left"])
    found = {join.name: join.metrics for join in gpu_ops.spark.join_progress(query.lastProgress)}
    assert found["bought"]["orders_rows_in"] == len(feeds[1].files[-1])
    assert found["bought"]["orders_state_rows"] > 20
    assert found["sized"]["left_rows_in"] == sum(n for what, n in found["bought"].items() if "rows_out" in what) > 0


@pytest.mark.parametrize("feeds", ["shares"], indirect=True)
def test_tasks_take_shares_of_a_micro_batch_that_is_computed_once(
    spark: Any, feeds: list[Feed], tmp_path: Path
) -> None:
    """Six tasks of two partitions have rows, in the order of the changes; metrics are counted once."""
    users, orders, *_ = feeds
    left = stream(orders.df, row_kind="op", unique_key="order_id", updates="retract")
    changes = gpu_ops.join(
        left, stream(users.df, row_kind="op"), on="user_id", how="left", state=str(tmp_path / "s"), name="shared"
    )
    assert "tasks       6, each with a share of the changes" in gpu_ops.explain(changes)
    orders.more(300)
    users.more(300)
    sink, tasks = Sink(), list[int]()

    def batch(df: Any, number: int) -> None:
        rows = df.withColumn("task", f.spark_partition_id()).collect()
        tasks.extend(row.task for row in rows)
        sink.batches[number] = [tuple(row)[:-1] for row in rows]

    query = drain(changes, batch, tmp_path / "checkpoint")
    assert tasks == sorted(tasks)
    assert set(tasks) == set(range(6))
    sql = "SELECT user_id, order_id, product, name FROM orders LEFT JOIN users USING (user_id)"
    assert sink.table == sql_join(sql, feeds, 1)
    (found,) = gpu_ops.spark.join_progress(query.lastProgress)
    assert found.metrics["left_rows_in"] == len(orders.changes)
    assert found.metrics["partitions"] == 2
    assert sum(int(found.metrics[f"rows_out_{kind}"]) for kind in ("insert", "delete")) == len(tasks)


@pytest.mark.thorough
@pytest.mark.parametrize("feeds", slow_but(["spark", "arrow", "shares", "card"], "card"), indirect=True)
def test_state_servers_die_under_a_chain(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    sink, pool = Sink(), Directory.of(spark).servers.pool("cpu")

    def kill(how_many: int) -> None:
        for process in pool.running[:how_many]:
            os.kill(process.pid, signal.SIGKILL)

    more(feeds)
    query = start(chain(feeds, tmp_path), sink, tmp_path / "checkpoint")
    try:
        query.processAllAvailable()
        kill(2)
        more(feeds)
        query.processAllAvailable()
        assert sink.table == sql_join(SQL, feeds, 2)
        for wait in (0.2, 0.7):
            killer = threading.Timer(wait, kill, [1])
            killer.start()
            more(feeds)
            query.processAllAvailable()
            killer.join()
    finally:
        query.stop()
    assert sink.table == sql_join(SQL, feeds, 4)
    kill(2)
    more(feeds)
    drain(chain(feeds, tmp_path), sink, tmp_path / "checkpoint")
    assert sink.table == sql_join(SQL, feeds, 5)
    assert len(sink.table) > 100


@pytest.mark.thorough
def test_a_chain_goes_on_in_stages_and_in_one_task(
    feeds: list[Feed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State folders and checkpoints are the same: how many tasks there are is no part of them."""
    sink, ways = Sink(), list[int]()
    most, below = of_changes.MOST_IN_ONE_TASK, of_changes.MOST_BELOW
    for together, lower in ((0, 0), (0, below), (most, below), (0, below), (0, 0)):
        monkeypatch.setattr(of_changes, "MOST_IN_ONE_TASK", together)
        monkeypatch.setattr(of_changes, "MOST_BELOW", lower)
        more(feeds)
        changes = chain(feeds, tmp_path)
        ways.append(gpu_ops.explain(changes).count("in the same Spark task"))
        query = drain(changes, sink, tmp_path / "checkpoint")
        found = {join.name: join.metrics for join in gpu_ops.spark.join_progress(query.lastProgress)}
        assert {name: int(metrics["partitions"]) for name, metrics in found.items()} == dict.fromkeys(
            ("bought", "sized", "left"), 2
        )
        assert found["bought"]["orders_rows_in"] >= 20 <= found["sized"]["right_rows_in"]
    check(sink, SQL, feeds, least=100)
    assert ways == [0, 1, 2, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("feeds", ["engine"], indirect=True)
def test_a_folder_of_operators_alone_goes_on_so(
    feeds: list[Feed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun before one engine had all operators; and what one engine has needs one partition."""
    sink = Sink()
    for number in range(3):
        with monkeypatch.context() as patch:
            if not number:
                patch.setattr(building, "one_engine", lambda *_: None)
            more(feeds)
            changes = chain(feeds, tmp_path)
            assert gpu_ops.explain(changes).count("in the same Spark task") == 2
            drain(changes, sink, tmp_path / "checkpoint")
    check(sink, SQL, feeds, least=100)
    fresh = tmp_path / "fresh"
    changes = chain(feeds, fresh)
    assert gpu_ops.explain(changes).count("in the same engine") == 2
    sink = Sink()
    drain(changes, sink, fresh / "checkpoint")
    check(sink, SQL, feeds, least=100)
    with pytest.raises(gpu_ops.DescriptionError, match="3 operators share this folder's one engine"):
        rescale(str(fresh / "left"), 2)
    more_keys = stream(feeds[2].df, name="more", row_kind="op")
    above = gpu_ops.semi_join(
        chain(feeds, tmp_path / "o"), more_keys, on="user_id", partitions=2, state=str(tmp_path / "o" / "above")
    )
    assert gpu_ops.explain(above).count("in the same Spark task") == 3
    folders = {str(x.state) for x in Directory.of(above.sparkSession).registry.started.values()}
    assert {str(tmp_path / "o" / name) for name in ("bought", "sized", "left", "above")} <= folders
    monkeypatch.undo()
    with pytest.raises(gpu_ops.StateError, match=r"all 3 operators of its query, in one engine.*partitions=1"):
        drain(chain(feeds, fresh), sink, fresh / "checkpoint")


def bought_by_user(feeds: list[Feed], folder: Path, partitions: int | None = None) -> Any:
    """A join, another one and an aggregate, all of which have the user among their keys."""
    users, orders, prefs, *_ = feeds
    more = {} if partitions is None else {"partitions": partitions}
    bought = gpu_ops.join(
        stream(users.df, name="users", row_kind="op", unique_key="user_id"),
        stream(orders.df, name="orders", row_kind="op", unique_key="order_id", updates="retract"),
        on="user_id", how="left", state=str(folder / "bought"), name="bought", **more,
    )  # fmt: skip
    known = bought.where("name IS NULL OR name <> 'bob'").select("row_kind", "product", "name", "user_id")
    liked = gpu_ops.join(
        known, stream(prefs.df, name="prefs", row_kind="op"), on="user_id", state=str(folder / "liked"), name="liked",
        **more,
    )  # fmt: skip
    return gpu_ops.aggregate(
        liked, by=("product", "user_id"), aggregates={"n": "count(*)", "most": "max(pref)"},
        state=str(folder / "counted"), name="counted", **more,
    )  # fmt: skip


BY_USER = """SELECT product, user_id, count(*), max(pref) FROM users LEFT JOIN orders USING (user_id)
    JOIN prefs USING (user_id) WHERE name IS NULL OR name <> 'bob' GROUP BY ALL"""


@pytest.mark.thorough
@pytest.mark.parametrize("feeds", ["arrow"], indirect=True)
def test_operators_whose_keys_agree_share_an_engine_in_each_partition(
    spark: Any, feeds: list[Feed], tmp_path: Path
) -> None:
    """Right after each micro-batch, restarts, a killed server and with more and fewer partitions; one folder."""
    sink, pool = Sink(), Directory.of(spark).servers.pool("cpu")
    for number, partitions in enumerate((None, None, 3, 1)):
        if partitions is not None:
            assert rescale(str(tmp_path / "counted"), partitions).rows != (0,) * partitions
            with pytest.raises(gpu_ops.StateError, match=f"all 3 operators of its query.*partitions={partitions}"):
                drain(bought_by_user(feeds, tmp_path), sink, tmp_path / "checkpoint")
        more(feeds)
        more(feeds)
        changes = bought_by_user(feeds, tmp_path, partitions)
        assert gpu_ops.explain(changes).count("in the same engine") == 2
        if number == 1:
            os.kill(pool.running[0].pid, signal.SIGKILL)
        query = drain(changes, sink, tmp_path / "checkpoint")
        found = {join.name: join.metrics for join in gpu_ops.spark.join_progress(query.lastProgress)}
        assert {int(one["partitions"]) for one in found.values()} == {partitions or 2}
        assert found["bought"]["right_rows_in"] == len(feeds[1].files[-1])
        assert found["bought"]["left_state_rows"] > 10 * (number + 1)
    check(sink, BY_USER, feeds, least=20)
    assert [name for name in ("bought", "liked", "counted") if (tmp_path / name).exists()] == ["counted"]


@pytest.mark.thorough
@pytest.mark.parametrize("feeds", slow_but(["spark", "arrow"], "arrow"), indirect=True)
def test_insert_only_changelogs(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    """An inner join of inputs that only grow is such an input; it is not once one of them changes."""
    _, orders, prefs, products, _ = feeds
    inner = in_memory(gpu_ops.join, orders.df.drop("op"), products.df.drop("op"), on="product", name="inner")
    totals = {"n": "count(*)", "least": "min(size)"}
    grouped = in_memory(gpu_ops.aggregate, inner.where("size > 2"), by="user_id", aggregates=totals, name="grouped")
    assert gpu_ops.explain(grouped).count("insert-only") == 3
    above = gpu_ops.explain(in_memory(gpu_ops.join, grouped, prefs.df.drop("op"), on="user_id"))
    assert above.count("row kinds in 'row_kind'") == 1
    for how, other in (("left", products.df.drop("op")), ("inner", stream(products.df, row_kind="op"))):
        changes = in_memory(gpu_ops.join, orders.df.drop("op"), other, on="product", how=how)
        counted = gpu_ops.explain(in_memory(gpu_ops.aggregate, changes, by="user_id", aggregates=totals))
        assert "row kinds in 'row_kind'" in counted
    for feed in feeds:
        feed._changing = False
    more(feeds)
    more(feeds)
    sink = Sink()
    drain(grouped, sink, tmp_path / "checkpoint")
    sql = (
        "SELECT user_id, count(*), min(size) FROM orders JOIN products USING (product) WHERE size > 2 GROUP BY user_id"
    )
    check(sink, sql, feeds)


@pytest.mark.thorough
@pytest.mark.parametrize("feeds", slow_but(["spark", "arrow"], "arrow"), indirect=True)
def test_a_changelog_that_several_joins_take(
    spark: Any, feeds: list[Feed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed once in a micro-batch, and its metrics are there once, whether or not the join above takes it."""
    orders = feeds[1]

    def folder(name: str) -> dict[str, Any]:
        return {"name": name, "state": str(tmp_path / name)}

    asked, calls = list[tuple[int, str | None]](), Counter[str]()
    locate, act = Directory.locate, FlightServer.do_action

    def located(self: Directory, request: Any) -> Any:
        answer = locate(self, request)
        if request.join_id.startswith(plan_id) and answer.location is not None:
            asked.append((request.partition, answer.context.shared_in))
        return answer

    def called(self: FlightServer, context: Any, action: Any) -> Any:
        calls[action.type] += 1
        return act(self, context, action)

    monkeypatch.setattr(Directory, "locate", located)
    monkeypatch.setattr(FlightServer, "do_action", called)
    counted = gpu_ops.aggregate(
        stream(orders.df, row_kind="op", unique_key="order_id", updates="retract"),
        by=["user_id", "product"], aggregates={"n": "count(*)"}, **folder("counted"),
    )  # fmt: skip
    plan_id = recognition.plans_of(counted)[0].plan_id
    most = gpu_ops.aggregate(counted, by="user_id", aggregates={"most": "max(n)"}, **folder("most"))
    least = gpu_ops.aggregate(counted, by="user_id", aggregates={"least": "min(n)"}, **folder("least"))
    both = gpu_ops.join(most, least, on="user_id", **folder("both"))
    last = gpu_ops.join(
        stream(counted, name="c"), stream(both, name="b"), on="user_id", where="c.n = b.most", **folder("last")
    )
    sink = Sink()
    for _ in range(2):
        more(feeds)
        query = drain(last, sink, tmp_path / "checkpoint")
    sql = """WITH c AS (SELECT user_id, product, count(*) AS n FROM orders GROUP BY user_id, product)
        SELECT user_id, product, n, most, least FROM c JOIN
        (SELECT user_id, max(n) AS most, min(n) AS least FROM c GROUP BY user_id) USING (user_id) WHERE n = most"""
    check(sink, sql, feeds)
    found = {join.name: join.metrics for join in gpu_ops.spark.join_progress(query.lastProgress)}
    assert found.keys() == {"counted", "most", "least", "both", "last"}
    assert found["counted"]["partitions"] == 2
    assert found["most"]["input_rows_in"] == found["least"]["input_rows_in"] == found["last"]["left_rows_in"]
    runs = {run for _, run in asked}
    if not of_changes.MOST_IN_ONE_TASK:
        assert len(runs) == 2, "each run of the query has its own answers"
        assert None not in runs
    if of_changes.MOST_IN_ONE_TASK:
        assert sorted(partition for partition, _ in asked) == [0, 0, 1, 1], "once in a micro-batch"
        assert calls["report"] == 2, "one call a micro-batch has what all operators and partitions report"
    else:
        assert len(asked) > 2 * 2, "Spark reuses what is shuffled alike, not all"


@pytest.mark.thorough
@pytest.mark.parametrize("feeds", ["arrow"], indirect=True)
def test_files_between_tasks_go_with_their_micro_batch(spark: Any, feeds: list[Feed], tmp_path: Path) -> None:
    more(feeds)
    more(feeds)
    sink, directory = Sink(), Directory.of(spark)
    query = start(chain(feeds, tmp_path), sink, tmp_path / "checkpoint")
    query.processAllAvailable()
    assert directory.blocks is not None
    own = Path(directory.blocks.folder, query.runId)
    assert sorted(path.name for path in own.iterdir()) == [str(query.lastProgress["batchId"])]
    query.stop()
    for join_id in [join_id for join_id in directory.registry.joins if join_id.endswith(query.id)]:
        directory._release(join_id)  # as its sweep does after a while
    assert not own.exists()
    assert sink.table == sql_join(SQL, feeds, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("feeds", ["arrow"], indirect=True)
def test_changes_go_from_join_to_join_as_arrow_has_them(feeds: list[Feed], tmp_path: Path) -> None:
    """Filtered, columns moved, renamed and computed; one that only Spark computes takes them through its rows."""
    users, orders, prefs, products, _ = feeds
    lower = in_memory(gpu_ops.join, stream(orders.df, row_kind="op"), stream(products.df, row_kind="op"),
                      on="product", name="lower")  # fmt: skip
    moved = lower.where("size > 2 AND user_id IS NOT NULL").selectExpr(
        "size + 1 - 1 AS s", "row_kind", "user_id", "size"
    )
    upper = in_memory(gpu_ops.aggregate, moved, by="user_id", name="upper",
                      aggregates={"n": "count(*)", "total": "sum(s)"})  # fmt: skip
    sides = in_memory(gpu_ops.join, upper, stream(prefs.df, row_kind="op"), on="user_id", name="sides")
    computed = sides.selectExpr("row_kind", "user_id", "shiftleft(total, 1) AS twice")
    last = in_memory(gpu_ops.join, computed, stream(users.df, row_kind="op"), on="user_id", name="last")
    text = gpu_ops.explain(last)
    assert "read by Arrow: changes of 'lower', filtered by size, user_id, computing ((" in text
    assert "read by Arrow: changes of 'upper'" in text
    assert "changes of 'sides'" not in text
    assert "kept as a multiset of rows, under each group, for ever" in text
    more(feeds)
    more(feeds)
    sink = Sink()
    query = drain(last, sink, tmp_path / "checkpoint")
    sql = """SELECT a.user_id, a.total * 2, name FROM (SELECT user_id, sum(size) AS total FROM
        orders JOIN products USING (product) WHERE size > 2 AND user_id IS NOT NULL GROUP BY user_id) AS a
        JOIN prefs USING (user_id) JOIN users USING (user_id)"""
    check(sink, sql, feeds)
    found = {join.name: join.metrics for join in gpu_ops.spark.join_progress(query.lastProgress)}
    assert found.keys() == {"lower", "upper", "sides", "last"}
    said = {
        name: sum(join[f"rows_out_{kind}"] for kind in ("insert", "update_before", "update_after", "delete"))
        for name, join in found.items()
    }
    assert 0 < found["upper"]["input_rows_in"] < said["lower"]
    assert found["sides"]["left_rows_in"] == said["upper"] > 0
    assert {join["partitions"] for join in found.values()} == {2}


@pytest.mark.thorough
def test_changelogs_side_by_side_in_one_join(feeds: list[Feed], tmp_path: Path) -> None:
    """Joins of 1, 4 and 2 partitions feed one: their tasks, numbered with the sources', begin where they should."""
    users, orders, prefs, products, blocked = feeds
    choosy = in_memory(gpu_ops.semi_join, stream(users.df, name="users", row_kind="op", unique_key="user_id"),
                       stream(prefs.df, row_kind="op"), "user_id", partitions=4, name="choosy")  # fmt: skip
    known = in_memory(gpu_ops.join, stream(orders.df, name="orders", row_kind="op"), stream(products.df, row_kind="op"),
                      "product", "left", partitions=2, name="known")  # fmt: skip
    allowed = in_memory(gpu_ops.join, stream(prefs.df, name="prefs", row_kind="op"), stream(blocked.df, row_kind="op"),
                        how="anti", where="prefs.pref + 1 = right.size", name="allowed")  # fmt: skip
    everything = in_memory(
        gpu_ops.multi_join,
        [stream(allowed, name="a"), stream(prefs.df, name="p", row_kind="op"), stream(choosy, name="c"), known],
        on="user_id",
        how=["inner", "inner", "left"],
        suffixes=["", "_2", "", ""],
        name="all",
    )
    assert "c: row kinds in 'row_kind', unique key derived: user_id (retract)" in gpu_ops.explain(everything)
    more(feeds)
    more(feeds)
    sink = Sink()
    query = drain(everything, sink, tmp_path / "checkpoint")
    sql = """SELECT a.user_id, a.pref, p.pref, c.name, k.product, k.order_id, k.size
        FROM (SELECT * FROM prefs WHERE NOT EXISTS (SELECT 1 FROM blocked WHERE size = pref + 1)) a
        JOIN prefs p ON a.user_id = p.user_id JOIN users c ON a.user_id = c.user_id
        LEFT JOIN (SELECT product, order_id, user_id, size FROM orders LEFT JOIN products USING (product)) k
        ON a.user_id = k.user_id"""
    check(sink, sql, feeds)
    joins = gpu_ops.spark.join_progress(query.lastProgress)
    assert {join.name: join.metrics["partitions"] for join in joins} == {
        "choosy": 4, "known": 2, "allowed": 1, "all": 2,
    }  # fmt: skip


def test_derived_keys(feeds: list[Feed], tmp_path: Path) -> None:
    users, orders, prefs, _, _ = feeds
    bought = gpu_ops.join(
        stream(orders.df, name="orders", row_kind="op", unique_key="order_id", updates="retract"),
        stream(users.df, name="users", row_kind="op", unique_key="user_id"),
        on="user_id",
        state=str(tmp_path / "state"),
    )
    key = ("order_id", "user_id")
    keeps = {
        "itself": bought,
        "filter": bought.where("order_id > 3 and name is null"),
        "projection": bought.select("order_id", "row_kind", "user_id").where("user_id > 1"),
        "there and back": bought.withColumnRenamed("order_id", "x").withColumnRenamed("x", "order_id"),
        "a column more": bought.selectExpr("*", "order_id + 1 as next"),
        "watermark": bought.selectExpr("*", "timestamp_millis(order_id) as t").withWatermark("t", "1 second"),
    }
    loses = {
        "drop": bought.drop("order_id"),
        "no row kind": bought.drop("row_kind"),
        "rename": bought.withColumnRenamed("order_id", "x"),
        "exchange": bought.selectExpr("row_kind", "order_id as user_id", "user_id as order_id", "name"),
        "another of that name": bought.selectExpr("row_kind", "user_id", "product as order_id"),
        "computed": bought.withColumn("order_id", bought["order_id"] % 3),
        "cast": bought.withColumn("order_id", bought["order_id"].cast("string")),
        "union": bought.unionAll(bought),
        "explode": bought.selectExpr("*", "explode(array(1, 2)) as again"),
        "repartition": bought.repartition(3),
        "distinct": bought.dropDuplicates(["name"]),
        "no changelog": orders.df,
    }
    assert {name: derived_key(df) for name, df in keeps.items()} == dict.fromkeys(keeps, key)
    assert {name: derived_key(df) for name, df in loses.items()} == dict.fromkeys(loses)

    derived = as_input(stream(bought))
    assert (derived.unique_key, derived.updates, derived.row_kind) == (key, "retract", "row_kind")
    assert as_input(stream(bought, row_kind="row_kind")).unique_key == key
    own = as_input(stream(bought, unique_key="order_id"))
    assert (own.unique_key, own.updates) == (("order_id",), "upsert")
    assert as_input(stream(bought), derive=False).unique_key is None
    assert as_input(stream(loses["drop"])).unique_key is None
    assert as_input(stream(loses["drop"])).row_kind == "row_kind"

    again = in_memory(
        gpu_ops.multi_join, [stream(bought, name="bought"), stream(prefs.df, row_kind="op")], on="user_id", how="left"
    )
    text = gpu_ops.explain(again)
    assert "bought: row kinds in 'row_kind', unique key derived: order_id, user_id (retract); 4 columns" in text
    assert text.count("key derived") == 1
    assert derived_key(again) is None  # a row for each preference
    assert derived_key(in_memory(gpu_ops.anti_join, bought, stream(prefs.df, row_kind="op"), on="user_id")) == key
    mine = in_memory(
        gpu_ops.anti_join, stream(bought, unique_key="user_id"), stream(prefs.df, row_kind="op"), "user_id"
    )
    assert "unique key user_id (upsert)" in gpu_ops.explain(mine)
    assert "key derived" not in gpu_ops.explain(mine)


@pytest.mark.thorough
def test_a_join_far_up_a_chain_is_built_with_few_more_looks_at_spark_s_plan(
    feeds: list[Feed], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    children_of = recognition.children_of

    def counted(node: Any) -> list[Any]:
        looks[-1] += 1
        return children_of(node)

    monkeypatch.setattr(recognition, "children_of", counted)
    users, orders, *_ = feeds
    changes: Any = stream(orders.df, row_kind="op")
    for number in range(5):
        looks.append(0)
        side = stream(users.df, row_kind="op")
        changes = in_memory(gpu_ops.semi_join, changes, side, on="user_id", name=f"join {number}")
    assert 0 <= looks[4] - looks[3] == looks[3] - looks[2] <= 6, "as Spark has a node for the metrics of each operator"
    assert [plan.name for plan in recognition.plans_of(changes)] == [f"join {number}" for number in (4, 3, 2, 1, 0)]
