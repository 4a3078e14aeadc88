"""Engines over engines: one dataflow, as a user of notebooks makes it."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops.descriptions.dataflow import Dataflow, Vertex, bounded_times
from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.join_engine import JoinEngine

ORDERS = pa.table({"order": [1, 2, 3], "item": ["pen", "ink", "pen"]})
PRICES = pa.table({"item": ["pen", "ink"], "price": [2, 7]})


def totals(**options: Any) -> JoinEngine:
    joined = gpu_ops.engine(orders=ORDERS, prices=PRICES, on="item", how="left", backend="cpu")
    measures = {"n": "count(*)", "total": "sum(price)"}
    return gpu_ops.engine(joined=joined, by="item", aggregates=measures, backend="cpu", **options)


def test_an_aggregate_over_a_join() -> None:
    engine = totals()
    engine.process(orders=ORDERS)
    engine.process(prices=PRICES)
    rows = engine.table().sort_by("item").to_pylist()
    assert rows == [{"item": "ink", "n": 1, "total": 7}, {"item": "pen", "n": 2, "total": 4}]


def test_all_operators_are_taken_back_together() -> None:
    engine = totals()
    engine.process(orders=ORDERS, prices=PRICES)
    before = engine.snapshot()
    engine.prepare(orders=ORDERS, prices=PRICES)
    engine.discard()
    assert engine.snapshot() == before
    other = totals()
    other.restore(before)
    assert other.process(orders=ORDERS.slice(0, 1)) == engine.process(orders=ORDERS.slice(0, 1))


def test_a_failure_in_the_last_operator_leaves_the_first_as_it_was() -> None:
    clicks = pa.table({"k": [1], "at": pa.array([None], pa.timestamp("ms"))})
    users = pa.table({"k": [1], "name": ["x"]})
    views = gpu_ops.Input.of(pa.table({"name": ["x"], "seen": pa.array([0], pa.timestamp("ms"))}))
    both = gpu_ops.engine(clicks=clicks, users=users, on="k", backend="cpu")
    engine = gpu_ops.engine(
        both=both, views=views, on="name", time=("at", "seen"), lower="-1 hour", upper="1 hour", backend="cpu"
    )
    engine.process(users=users)
    before = engine.snapshot()
    with pytest.raises(BadInputError, match="input 'both', column 'at'"):
        engine.process(clicks=clicks)
    assert engine.snapshot() == before


def test_windows_over_an_interval_join_come_at_the_end_of_its_input() -> None:
    day = pa.timestamp("ms")
    left = gpu_ops.Input.of(pa.schema([("k", pa.int64()), ("at", day)]), delay_ms=0, event_time="at")
    right = gpu_ops.Input.of(pa.schema([("k", pa.int64()), ("paid", day)]), delay_ms=0, event_time="paid")
    joined = gpu_ops.engine(
        left=left,
        right=right,
        on="k",
        how="left",
        time=("at", "paid"),
        lower="0 seconds",
        upper="10 seconds",
        backend="cpu",
    )
    below = joined.description
    description = gpu_ops.Aggregate(below.as_input("joined"), ("at",), (), "per_batch")
    late = JoinEngine(Dataflow.over(description, {"joined": below}), "cpu", fold=True)
    late.process(pa.table({"k": [1, 2], "at": pa.array([0, 1000], day)}), None)
    assert late.table().num_rows == 0  # a row may come yet
    late.process(
        pa.table({"k": [3], "at": pa.array([60_000], day)}), pa.table({"k": [3], "paid": pa.array([60_000], day)})
    )
    late.process(None, None)  # the watermark has passed the first rows
    assert sorted(t.minute * 60 + t.second for t in late.table()["at"].to_pylist()) == [0, 1, 60]


def test_what_ends_first_comes_through_the_operators_behind_it() -> None:
    day = pa.timestamp("ms")
    one, two, three = (pa.schema([("k", pa.int64()), (name, day)]) for name in ("a", "b", "c"))
    below = gpu_ops.engine(
        x=one, y=two, on="k", how="left", time=("a", "b"), lower="0 seconds", upper="1 minute", backend="cpu"
    )
    engine = gpu_ops.engine(
        xy=below, z=three, on="k", how="left", time=("a", "c"), lower="0 seconds", upper="1 minute", backend="cpu"
    )
    assert engine.process(x=pa.table({"k": [1], "a": pa.array([0], day)}, schema=one)).num_rows == 0
    ended = engine.finish()
    assert ended.num_rows == 1
    assert ended["k"].to_pylist() == [1]


def test_operators_read_one_input_twice() -> None:
    twice = gpu_ops.engine(
        left=gpu_ops.engine(o=ORDERS, p=PRICES, on="item", backend="cpu"),
        right=gpu_ops.engine(o=ORDERS, q=PRICES.rename_columns(["item", "cost"]), on="item", backend="cpu"),
        on="order", suffixes=("", "_again"), backend="cpu",
    )  # fmt: skip
    assert [source.name for source in twice.description.inputs] == ["o", "p", "q"]
    twice.process(o=ORDERS, p=PRICES, q=PRICES.rename_columns(["item", "cost"]))
    assert twice.table().select(["order", "price", "cost"]).sort_by("order").to_pylist() == [
        {"order": order, "price": price, "cost": price} for order, price in ((1, 2), (2, 7), (3, 2))
    ]


def test_mistakes_are_refused_when_the_dataflow_is_made() -> None:
    joined = gpu_ops.engine(orders=ORDERS, prices=PRICES, on="item", backend="cpu")
    other = gpu_ops.engine(orders=PRICES, more=PRICES, on="item", suffixes=("", "_2"), backend="cpu")
    with pytest.raises(DescriptionError, match="two inputs are called 'orders' and differ"):
        gpu_ops.engine(a=joined, b=other, on="item", suffixes=("", "_b"), backend="cpu")
    joined.process(orders=ORDERS, prices=PRICES)
    with pytest.raises(DescriptionError, match="the engine 'joined' holds rows"):
        gpu_ops.engine(joined=joined, by="item", aggregates={"n": "count(*)"}, backend="cpu")
    at_end = gpu_ops.engine(orders=ORDERS, prices=PRICES, on="item", emit="at_end", backend="cpu")
    with pytest.raises(DescriptionError, match="'ended' has no output before its input ends"):
        gpu_ops.engine(ended=at_end, by="item", aggregates={"n": "count(*)"}, backend="cpu")
    description = totals().description.operators[-1].description
    with pytest.raises(DescriptionError, match="reads 'nothing'; before it are orders, prices"):
        Dataflow(totals().description.inputs, (Vertex("output", description, ("nothing",)),))


def test_mistakes_of_several_outputs_are_refused() -> None:
    flow = totals().description
    assert isinstance(flow, Dataflow)
    joined, last = (vertex.name for vertex in flow.operators)
    for outputs, words in (
        ((joined,), "'output' is read by no operator"),
        ((joined, last, last), "operators of the dataflow, each once"),
        ((last, "orders"), "operators of the dataflow, each once"),
    ):
        with pytest.raises(DescriptionError, match=words):
            dataclasses.replace(flow, outputs=outputs)
    several = dataclasses.replace(flow, outputs=(joined, last))
    assert several.unique_key is None
    assert several.lines()[-1].split() == ["outputs", "joined,", "output"]
    tagged = dataclasses.replace(flow.operators[0].description.inputs[0], bad_rows="tag")
    description = dataclasses.replace(flow.operators[0].description, left=tagged)
    with pytest.raises(DescriptionError, match="bad_rows='tag' hands rows out beside a changelog"):
        Dataflow((tagged, flow.inputs[1]), (Vertex("one", description, ("orders", "prices")),), ("one",))


def test_at_end_the_last_operator_gives_its_result() -> None:
    engine = totals(emit="at_end")
    assert engine.process(orders=ORDERS, prices=PRICES).num_rows == 0
    assert engine.finish().sort_by("item").to_pylist() == [
        {"row_kind": "+I", "item": "ink", "n": 1, "total": 7},
        {"row_kind": "+I", "item": "pen", "n": 2, "total": 4},
    ]


DAY = pa.timestamp("ms")


def timed(columns: str, time: str, name: str = "input") -> gpu_ops.Input:
    """An input of integers and one time, which may come in any order within a day."""
    schema = pa.schema([(c, DAY if c == time else pa.int64()) for c in columns])
    return gpu_ops.Input.of(schema, name=name, event_time=time, delay_ms=0)


def test_a_watermark_below_says_nothing_of_other_times() -> None:
    """What the output watermark of an operator bounds are the event times of its inputs, and of some the left one."""
    left, right = timed("kau", "a", "x"), timed("kb", "b", "y")
    key = (gpu_ops.Key("k", "k", using=True),)
    interval = gpu_ops.IntervalJoin("inner", left, right, key, interval=gpu_ops.Interval(-1000, 1000))
    assert bounded_times(interval) == {"a", "b"}
    asof = gpu_ops.AsofJoin("left", left, right, key, asof=gpu_ops.Asof("backward"), emit="at_watermark")
    assert bounded_times(asof) == {"a"}
    assert bounded_times(gpu_ops.Join("left", left, right, key)) == set()


def test_rows_without_a_time_are_the_operators_own_affair() -> None:
    left, right = timed("ka", "a", "x"), timed("kb", "b", "y")
    join = gpu_ops.AsofJoin(
        "left", left, right, (gpu_ops.Key("k", "k", using=True),), asof=gpu_ops.Asof("backward"), emit="per_event"
    )
    above = gpu_ops.Aggregate.of(join.as_input("xy"), ("k",), {"n": "count(*)"}, "per_batch")
    nothing = pa.table({"k": pa.array([1]), "a": pa.array([None], DAY)})
    with closing(JoinEngine(Dataflow.over(above, {"xy": join}), "cpu")) as engine:
        assert engine.process(nothing, None).to_pylist() == [{"row_kind": "+I", "k": 1, "n": 1}]


def test_an_operator_s_name_has_no_dot() -> None:
    description = totals().description.operators[0].description
    with pytest.raises(DescriptionError, match=r"cannot be called 'a\.b'"):
        Dataflow(description.inputs, (Vertex("a.b", description, ("orders", "prices")),))


def test_the_clock_goes_on_after_a_restore() -> None:
    orders = gpu_ops.Input.of(ORDERS, name="orders", ttl_ms=60_000)
    joined = gpu_ops.engine(orders=orders, prices=PRICES, on="item", backend="cpu")
    engine = gpu_ops.engine(joined=joined, by="item", aggregates={"n": "count(*)"}, backend="cpu")
    engine.process(orders=ORDERS, clock_ms=1_000_000)
    other = gpu_ops.engine(joined=joined, by="item", aggregates={"n": "count(*)"}, backend="cpu")
    other.restore(engine.snapshot())
    assert other._operator._clock_ms == 1_000_000
