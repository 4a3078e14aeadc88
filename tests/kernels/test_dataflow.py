"""Dataflows on any backend: as on the CPU, and on a card no changelog between two operators comes to the host."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from oracle.dataflows import cut, dataflow, trace, with_outputs
from oracle.drive import Backend

import gpu_ops
from gpu_ops import output
from gpu_ops.conditions import Expression, parse
from gpu_ops.conditions.expressions import BOOL, Call, ColumnRef, Literal, Op
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.dataflow import Dataflow, Vertex
from gpu_ops.descriptions.groups import Order, Top
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.projection import ROWS, Projection, column_of
from gpu_ops.join_engine import JoinEngine
from gpu_ops.operators import dataflow as running
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, run


@pytest.mark.one_in(32, all=8)
@only_on("gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("seed", range(12))
def test_same_as_the_cpu(engines: Backend, seed: int, emit: str) -> None:
    rng = random.Random(seed)
    flow = dataflow(rng, emit)
    if seed % 3 == 1:
        flow = with_outputs(flow, rng)
    parts = cut(flow, trace(rng, flow.inputs, 120), rng, 60)
    batches = [(x["inputs"], {"orders": x["orders"], "clock_ms": number}) for number, x in enumerate(parts)]
    alike(run(engines, flow, batches), run(CPU, flow, batches))


def timed_operators() -> Dataflow:
    """A left join by time, of what comes out an ASOF join at the watermark, and of that sums by key."""
    time, key = pa.timestamp("ms"), (gpu_ops.Key("k", "k", using=True),)
    orders, ships, rates = (
        Input.of(pa.schema([("k", pa.int64()), (at, time), (value, pa.int64())]), name=name, event_time=at, delay_ms=0)
        for name, at, value in (("orders", "t", "o"), ("ships", "u", "s"), ("rates", "v", "r"))
    )
    shipped = gpu_ops.IntervalJoin("left", orders, ships, key, interval=gpu_ops.Interval(-2000, 2000))
    kind = Expression("row_kind = '+I'", parse("row_kind = '+I'", {ROWS: shipped.output_schema}).root, _OF_KINDS)
    only = Projection(Projection.all(shipped.values_schema).columns, (kind,))
    left = dataclasses.replace(shipped.as_input("shipped"), event_time="t", delay_ms=0)
    priced = gpu_ops.AsofJoin("left", left, rates, key, asof=gpu_ops.Asof("backward"), emit="at_watermark")
    sums = Aggregate.of(priced.as_input("priced"), ("k",), {"n": "count(*)", "most": "max(r)"}, "per_batch")
    operators = (
        Vertex("shipped", shipped, ("orders", "ships")),
        Vertex("priced", priced, ("shipped", "rates"), (only, None)),
        Vertex("sums", sums, ("priced",)),
    )
    return Dataflow((orders, ships, rates), operators)


_OF_KINDS = {ROWS: ("row_kind",)}


@pytest.mark.parametrize("seed", range(6))
def test_operators_by_event_time_go_by_the_watermarks_that_they_are_given(engines: Backend, seed: int) -> None:
    """As on the CPU, and as the operators alone under the same watermarks."""
    rng, flow, marks, batches = random.Random(seed), timed_operators(), {"shipped": 0, "priced": 0}, []
    assert from_json(flow.to_json()).to_json() == flow.to_json()
    assert flow.followed("priced") == ("shipped", None)
    for number in range(8):
        tables = []
        for source in flow.inputs:
            rows = [(rng.randrange(4), rng.randrange(3), number * 1000 + rng.randrange(-3000, 2000)) for _ in range(9)]
            k, value, at = zip(*rows, strict=True)
            tables.append(pa.table([k, at, value], schema=source.schema) if rng.random() < 0.8 else None)
        marks = {name: mark + rng.choice([0, 500, 1500]) for name, mark in marks.items()}
        watermark = {name: mark or None for name, mark in marks.items()}
        batches.append((tables, {"watermark": watermark, "clock_ms": number}))
    found = run(engines, flow, batches)
    alike(found, run(CPU, flow, batches))
    alone = {v.name: JoinEngine(v.description, "cpu") for v in flow.operators}
    for (given, options), changes in zip(batches, found[0], strict=True):
        under, clock_ms = options["watermark"], options["clock_ms"]
        shipped = alone["shipped"].process(given[0], given[1], watermark=(under["shipped"],) * 2, clock_ms=clock_ms)
        only = shipped.filter(pc.equal(shipped["row_kind"], "+I"))
        priced = alone["priced"].process(only, given[2], watermark=(under["priced"],) * 2, clock_ms=clock_ms)
        wanted = alone["sums"].process(priced, clock_ms=clock_ms)
        assert Counter(map(str, changes.to_pylist())) == Counter(map(str, wanted.to_pylist()))


def test_watermarks_of_a_dataflow_are_those_of_its_operators() -> None:
    with closing(JoinEngine(timed_operators(), "cpu")) as engine:
        for given in (5, (5, 5), {"shipped": 5}, {"shipped": 5, "priced": 5, "sums": 5}):
            with pytest.raises(gpu_ops.DescriptionError, match="a dataflow has one of each of shipped, priced"):
                engine.process(None, None, None, watermark=given)
        engine.process(None, None, None, watermark={"shipped": 5, "priced": None})


@only_on("gpu", *EMULATED)
def test_a_changelog_between_joins_stays_on_the_card(engines: Backend, monkeypatch: Any) -> None:
    read = running._read
    changelogs = []

    def noted(*args: Any) -> Any:
        changelogs.append(read(*args))
        return changelogs[-1]

    monkeypatch.setattr(running, "_read", noted)
    a, b, c = (pa.table({"k": [1, 2], name: ["x", "y"]}) for name in "abc")
    below = gpu_ops.engine(a=a, b=b, on="k", backend="cpu")
    flow = gpu_ops.engine(below=below, c=c, on="k", how="left", backend="cpu").description
    with engines.engine(flow) as engine:
        engine.process(a=a, b=b)
        assert not isinstance(changelogs[0].rows, pa.Table)
        assert engine.process(c=c).num_rows == 4


@only_on("gpu", *EMULATED)
@pytest.mark.parametrize("members", [0, 2, 40])
def test_a_filter_and_projection_between_joins_stay_on_the_card(
    engines: Backend, monkeypatch: Any, members: int
) -> None:
    """But for one with so many constants that comparing with each would take longer than the way to the host."""
    project = running._projected
    projected = []

    def noted(*args: Any) -> Any:
        projected.append(project(*args))
        return projected[-1]

    monkeypatch.setattr(running, "_projected", noted)
    a, b = (pa.table({"k": [1, 2, 3], name: ["x", "y", "z"]}) for name in "ab")
    below = gpu_ops.engine(a=a, b=b, on="k", backend="cpu").description
    renamed = pa.schema([("right_name", pa.string()), ("key", pa.int64())])
    columns = tuple(column_of(below.values_schema.field(name)) for name in ("b", "k"))
    root = parse("k >= 2", {ROWS: below.values_schema}).root
    if members:
        constants = [Literal(number, pa.int64()) for number in range(2, 2 + members)]
        root = Call(Op.IN, (ColumnRef(ROWS, "k", pa.int64()), *constants), BOOL)
    projection = Projection(columns, (Expression("of k", root, {ROWS: ("k",)}),))
    above = Aggregate.of(Input("below", renamed), ("key",), {"n": "count(*)", "most": "max(right_name)"}, "per_batch")
    vertices = (Vertex("below", below, ("a", "b")), Vertex("output", above, ("below",), (projection,)))
    with engines.engine(Dataflow(below.inputs, vertices)) as engine:
        found = engine.process(a=a, b=b)
    assert sorted(found.drop_columns(["row_kind"]).to_pylist(), key=str) == [
        {"key": 2, "n": 1, "most": "y"}, {"key": 3, "n": 1, "most": "z"},
    ]  # fmt: skip
    assert isinstance(projected[0].rows, pa.Table) == (members == 40)


def test_what_the_next_operator_leaves_out_is_not_gathered(engines: Backend, monkeypatch: Any) -> None:
    asked = list[tuple[list[str], int]]()
    gather = output.gathered

    def noted(*args: Any, **options: Any) -> Any:
        (slots, *_) = args[3]
        asked.append((sorted(options.get("names") or ["all"]), int(slots.size)))
        return gather(*args, **options)

    a = pa.table({"k": list(range(100)), "a": [f"{n}" for n in range(100)]})
    b = pa.table({"k": list(range(100)), "b": [n % 7 for n in range(100)]})
    below = gpu_ops.engine(a=a, b=b, on="k", backend="cpu")
    description = below.description
    test = parse("b > 5", {ROWS: description.values_schema})
    kept = Input("below", pa.schema([("k", pa.int64()), ("text", pa.string())]))
    columns = [column_of(description.values_schema.field(name)) for name in ("k", "a")]
    projection = Projection(tuple(columns), (Expression(test.sql, test.root, {ROWS: ("b",)}),))
    top = Top(kept, ("k",), (Order("text"),), 1)
    flow = Dataflow(
        description.inputs, (Vertex("below", description, ("a", "b")), Vertex("top", top, ("below",), (projection,)))
    )
    monkeypatch.setattr(output, "gathered", noted)
    with engines.engine(flow) as engine:
        assert engine.process(a=a, b=b).num_rows == len([n for n in range(100) if n % 7 > 5])
    # the filter's column of all rows, of those that are left what the next one asks for
    assert [size for names, size in asked if names == ["b"]] == [100]
    assert {size for names, size in asked if names != ["b"]} == {14}
