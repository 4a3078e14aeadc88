"""Dataflows on any backend: as on the CPU, and on a card no changelog between two operators comes to the host."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
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
from gpu_ops.descriptions.projection import ROWS, Projection, column_of
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
