"""multi_join over file sources: after every micro-batch the changelog folds to DuckDB's join of the folded inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gpu_ops
import gpu_ops.spark
from gpu_ops import stream
from gpu_ops.spark.metrics.metrics import metric_names
from gpu_ops.spark.metrics.progress import JoinProgress, ProgressListener
from spark.feeds import Feed, check
from spark.support import Sink, drain, in_memory

pytestmark = pytest.mark.spark

KEYS = (1, 2, 3, 4, 5, 6, None)


@pytest.fixture
def shop(spark: Any, tmp_path: Path) -> list[Feed]:
    """Users, orders and payments that share ``user_id``."""
    return [
        Feed(spark, tmp_path, "users", {"user_id": ("long", None), "name": ("string", ("ann", "bob", None))}),
        Feed(spark, tmp_path, "orders", {"order_id": ("long", None), "user_id": ("int", KEYS), "n": ("int", (1, 2))}),
        Feed(spark, tmp_path, "payments", {"user_id": ("long", KEYS), "paid": ("double", (0.5, 1.5))}, changing=False),
    ]


SHOP = """SELECT users.user_id, name, order_id, n, paid FROM users LEFT JOIN orders ON users.user_id = orders.user_id
    JOIN payments ON users.user_id = payments.user_id AND payments.paid < coalesce(orders.n, 1)"""


@pytest.mark.parametrize("emit", ["per_batch", pytest.param("per_event", marks=pytest.mark.slow)])
def test_three_inputs_with_restarts_and_a_repeated_micro_batch(shop: list[Feed], tmp_path: Path, emit: Any) -> None:
    users, orders, payments = shop

    def changelog() -> Any:
        return gpu_ops.multi_join(
            [
                stream(users.df, name="users", row_kind="op", unique_key="user_id"),
                stream(orders.df, name="orders", row_kind="op", unique_key="order_id", updates="retract"),
                stream(payments.df, name="payments"),
            ],
            on="USER_ID",  # Spark does not tell case apart
            how=["left", "inner"],
            where=[None, "payments.paid < coalesce(orders.n, 1)"],
            emit=emit,
            state=str(tmp_path / "state"),
            name="shop",
        )

    for feed in shop:
        feed.more(25)
        feed.more(8)
    sink, joined = Sink(), changelog()
    assert joined.columns == ["row_kind", "user_id", "name", "order_id", "n", "paid"]
    assert [x.dataType.simpleString() for x in joined.schema.fields][1:5] == ["bigint", "string", "bigint", "int"]
    query = drain(joined, sink, tmp_path / "checkpoint")
    check(sink, SHOP, shop)
    metrics = query.lastProgress["observedMetrics"]["shop"]["metrics"]
    assert list(metrics) == list(metric_names(("users", "orders", "payments")))
    assert metrics["payments_rows_in"] == metrics["payments_state_rows"] - 25 == 8
    assert metrics["users_state_bytes"] > 0
    assert metrics["partitions"] == 2

    for feed in shop:
        feed.more(10)
    drain(changelog(), sink, tmp_path / "checkpoint")  # described anew, as after a crash of the driver
    check(sink, SHOP, shop)

    said = sink.batches.pop(2)
    for file in (tmp_path / "checkpoint" / "commits").glob("*2*"):
        file.unlink()
    drain(changelog(), sink, tmp_path / "checkpoint")  # Spark has forgotten that it committed the last one
    assert sorted(sink.batches[2], key=repr) == sorted(said, key=repr)
    for feed in shop:
        feed.more(10)
    drain(joined, sink, tmp_path / "checkpoint")
    check(sink, SHOP, shop, least=40)


@pytest.mark.thorough
def test_four_inputs_in_a_chain(spark: Any, tmp_path: Path) -> None:
    feeds = [
        Feed(spark, tmp_path, "a", {"k": ("string", ("x", "y", None)), "g": ("long", (1, 2)), "v": ("int", (1, 2))}),
        Feed(spark, tmp_path, "b", {"bk": ("string", ("x", "y", "z", None)), "bg": ("int", (1, 2, None))}),
        Feed(spark, tmp_path, "c", {"ck": ("string", ("x", "y")), "cv": ("int", (0, 1, 2))}, changing=False),
        Feed(spark, tmp_path, "d", {"id": ("long", None), "k": ("string", ("x", "z")), "v": ("int", (0, 2))}),
    ]  # fmt: skip
    a, b, c, d = feeds
    joined = in_memory(
        gpu_ops.multi_join,
        [stream(a.df, row_kind="op"), stream(b.df, row_kind="op", name="b"), stream(c.df, name="c"),
         stream(d.df, row_kind="op", name="d", unique_key="id", updates="retract")],
        on=[[("INPUT_1.K", "bk"), ("g", "bg")], ("B.bk", "ck"), [("c.ck", "k")]],
        how=["inner", "left_outer", "left"],
        where=[None, "input_1.v < c.cv", None],
        suffixes=["", "", "", "_d"],
        partitions=3,
    )  # fmt: skip
    assert joined.columns == ["row_kind", "k", "g", "v", "bk", "bg", "ck", "cv", "id", "k_d", "v_d"]
    for feed in feeds:
        feed.more(12)
        feed.more(9)
        feed.more(9)
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    sql = """SELECT a.*, b.*, c.*, d.* FROM a JOIN b ON a.k = b.bk AND a.g = b.bg
        LEFT JOIN c ON b.bk = c.ck AND a.v < c.cv LEFT JOIN d ON c.ck = d.k"""
    check(sink, sql, feeds, least=40)


@pytest.mark.thorough
def test_a_right_join_first(spark: Any, tmp_path: Path) -> None:
    feeds = [
        Feed(spark, tmp_path, "a", {"K": ("int", KEYS), "av": ("int", (1, 2, 3))}),
        Feed(spark, tmp_path, "b", {"k": ("long", KEYS), "bv": ("int", (1, 2, 3))}, changing=False),
        Feed(spark, tmp_path, "c", {"cv": ("int", (1, 2, 3)), "k": ("long", KEYS)}),
    ]
    joined = in_memory(
        gpu_ops.multi_join,
        [stream(feeds[0].df, name="a", row_kind="op"), stream(feeds[1].df, name="b"),
         stream(feeds[2].df, name="c", row_kind="op")],
        on="k", how=["right", "left"], where="a.av <> c.cv", name="turned",
    )  # fmt: skip
    assert joined.columns == ["row_kind", "k", "av", "bv", "cv"]
    assert "joinTypes=[LEFT, LEFT]" in gpu_ops.explain(joined)
    for feed in feeds:
        feed.more(10)
        feed.more(10)
    sink = Sink()
    query = drain(joined, sink, tmp_path / "checkpoint")
    check(
        sink, "SELECT b.k, av, bv, cv FROM a RIGHT JOIN b ON a.k = b.k LEFT JOIN c ON b.k = c.k AND a.av <> c.cv", feeds
    )
    assert "b_rows_in" in query.lastProgress["observedMetrics"]["turned"]["metrics"]


@pytest.mark.slow
def test_the_same_stream_three_times(spark: Any, tmp_path: Path) -> None:
    feed = Feed(spark, tmp_path, "t", {"k": ("long", (1, 2, 3)), "v": ("int", (1, 2, 3))})
    sides = [stream(feed.df, name=name, row_kind="op") for name in "xyz"]
    joined = in_memory(gpu_ops.multi_join, sides, "k", where="z.v = x.v", suffixes=["_x", "_y", "_z"])
    feed.more(8)
    feed.more(4)
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    check(sink, "SELECT x.k, x.v, y.v, z.v FROM t x JOIN t y USING (k) JOIN t z ON x.k = z.k AND z.v = x.v", [feed])


def test_explain(shop: list[Feed], tmp_path: Path) -> None:
    users, orders, payments = shop
    joined = gpu_ops.multi_join(
        [
            stream(users.df, name="users", row_kind="op", unique_key="user_id", ttl="7 days"),
            stream(orders.df, name="orders", row_kind="op", unique_key="order_id", updates="retract"),
            stream(payments.df, name="payments", sequence_by="paid"),
        ],
        on="user_id",
        how=["left", "inner"],
        where=[None, "payments.paid > 1"],
        emit="per_event",
        state=str(tmp_path / "state"),
        name="shop",
    )
    plan = (
        "  plan        MultiJoin(commonJoinKey=[users.user_id], joinTypes=[LEFT, INNER], inputUniqueKeys=[(user_id), "
        "(order_id), noUniqueKey], joinConditions=[users.user_id = orders.user_id, "
        "users.user_id = payments.user_id AND (payments.paid > 1)])"
    )
    lines = gpu_ops.explain(joined.where("n > 1")).splitlines()
    assert lines[:6] == [
        "multi-way join: users, orders, payments  (metrics 'shop')",
        plan,
        "  common key  users.user_id = orders.user_id = payments.user_id",
        "  step 1      left join orders on users.user_id = orders.user_id",
        "  step 2      inner join payments on users.user_id = payments.user_id  where payments.paid > 1",
        "  emit        per_event: the changelog Flink emits, change by change",
    ]
    text = "\n".join(lines)
    for part in (
        "2 (spark.sql.shuffle.partitions)\n",
        "no intermediate state",
        "users: row kinds in 'op', unique key user_id (upsert); 2 columns",
        "rows by unique key, under each join key, 7 days after the last write",
        "orders: row kinds in 'op', unique key order_id (retract); 3 columns",
        "payments: insert-only, ordered by paid; 2 columns",
    ):
        assert part in text


def test_refusals(spark: Any, shop: list[Feed]) -> None:
    users, orders, payments = (feed.df.drop("op") for feed in shop)

    def refused(match: str, *args: Any, error: type = gpu_ops.DescriptionError, **options: Any) -> None:
        with pytest.raises(error, match=match):
            gpu_ops.multi_join(*args, **options)

    refused("two or more inputs, not 1", [users], "user_id")
    refused("a list of inputs, not DataFrame", users, "user_id")
    refused("input 2 is a DataFrame of Spark's or a stream", [users, 7], "user_id")
    refused("'input_2' has no column 'name' to join on; there are order_id", [users, orders], "name")
    refused("on= has 1 entries for 2 steps", [users, orders, payments], [("user_id", "user_id")])
    refused("can be input_1.user_id and input_2.user_id", [users, orders, payments],
            [("user_id", "user_id"), ("user_id", "user_id")])  # fmt: skip
    refused("on= names 'who'; there are input_1.user_id, ", [users, orders], [("who", "user_id")])
    refused(r"how='full': .*two at a time: gpu_ops.join\(input_1, input_2", [users, orders], "user_id", "outer")
    refused("right join is a left join the other way round", [users, orders, payments], "user_id", ["left", "right"])
    refused("share no key", [users, orders, payments], [("user_id", "user_id"), ("input_2.order_id", "user_id")])
    refused("columns on=|on= takes columns", [users, orders], [[("user_id", "user_id", "x")]])
    refused("row_kind.*no column|no column 'op'", [stream(shop[0].df, row_kind="op"), shop[1].df], "op")
    refused(
        "two columns 'v'", [users.selectExpr("user_id", "1 as v"), orders.selectExpr("user_id", "2 as v")], "user_id"
    )
    shouting = orders.selectExpr("user_id", "2 as V")
    refused("'[vV]' twice.*suffixes=", [users.selectExpr("user_id", "1 as v"), shouting], "user_id")
    refused("does not go by time, event_time=", [stream(users, event_time="user_id"), orders], "user_id")
    refused("partitions=0", [users, orders.drop("n")], "user_id", partitions=0)
    with pytest.warns(gpu_ops.MemoryOnlyStateWarning) as caught:
        gpu_ops.multi_join([users, orders], "user_id")
    assert caught[0].filename == __file__


def test_prometheus_has_a_label_for_the_input() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    listener = ProgressListener(prometheus=True, registry=registry)
    names = metric_names(("big orders", "2nd"))
    listener.add(JoinProgress("j", "q1", "q", 3, "", {name: n for n, name in enumerate(names)}))
    listener.add(JoinProgress("two", "q1", "q", 3, "", dict.fromkeys(metric_names(("left", "right")), 7)))
    own = {"join": "j", "query": "q"}
    for which in ("big orders", "2nd"):
        found = registry.get_sample_value("gpu_join_state_rows", {**own, "input": which})
        assert found == names.index(f"{which}_state_rows")
    deleted = registry.get_sample_value("gpu_join_rows_out_total", {**own, "kind": "delete"})
    assert deleted == names.index("rows_out_delete")
    assert registry.get_sample_value("gpu_join_micro_batch", own) == 3
    left = {"join": "two", "query": "q", "input": "left"}
    assert registry.get_sample_value("gpu_join_rows_in_total", left) == 7
