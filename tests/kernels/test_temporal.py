"""Temporal joins on any backend: row for row the same changelog and the same state as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import slow_but
from oracle.drive import Backend
from oracle.interval_drive import ends, timed_cuts
from oracle.interval_traces import IntervalShape, TimedRecipe, timed_trace
from oracle.temporal_rules import temporal_join, with_kinds
from oracle.test_asof_at_watermark import SHAPES as AT_WATERMARK
from oracle.test_asof_at_watermark import described, trace
from oracle.test_temporal_ttl import TTL, Ticks

from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, alike, run

SHAPES = [
    IntervalShape("left", keys="composite", residual=(("a_x", ">", "b_x"),)),
    IntervalShape("inner", keys="string", null_safe=True, clock="us", late="tag"),
    IntervalShape("left", keys="mixed_width", clock="int64"),
]


def batches_of(shape: IntervalShape, *, events: int = 200) -> Batches:
    made = ends(with_kinds(timed_trace(shape, TimedRecipe(events, 9, late=0.2)), 2))
    return [cut.inputs for cut in timed_cuts(temporal_join(shape), made, (40, 1, 17, 30), shuffle=1)]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("shape", slow_but(SHAPES, SHAPES[1]), ids=str)
def test_same_as_the_cpu(engines: Backend, shape: IntervalShape) -> None:
    join, batches = temporal_join(shape), batches_of(shape)
    alike(run(engines, join, batches), run(CPU, join, batches))


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("shape", slow_but(SHAPES, SHAPES[0]), ids=str)
def test_a_ttl_forgets_the_same(engines: Backend, shape: IntervalShape) -> None:
    join, ticks = temporal_join(shape, ttl=TTL), Ticks(4)
    batches = [{**batch, "clock_ms": ticks.next()} for batch in batches_of(shape)]
    alike(run(engines, join, batches), run(CPU, join, batches))


@only_on("gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("number", slow_but([1, 2, 4, 5], 4))
def test_final_asof_joins_too(engines: Backend, number: int) -> None:
    join = described(*AT_WATERMARK[number])
    batches = [cut.inputs for cut in timed_cuts(join, trace(number, 150), (40, 1, 17), shuffle=1)]
    alike(run(engines, join, batches), run(CPU, join, batches))


@pytest.mark.parametrize(("distinct", "shift"), slow_but([(1, 0), (0, 32)], (0, 32)), ids=["one", "upper_half"])
@pytest.mark.parametrize("ttl", slow_but([None, TTL], TTL))
def test_collisions_of_hashes_change_nothing(
    engines: Backend, ttl: int | None, distinct: int, shift: int, one_hash: Any
) -> None:
    """Versions are verified by equality, and so are the keys that fire, and those that a TTL forgets."""
    join, ticks = temporal_join(SHAPES[0], ttl=ttl), Ticks(6)
    batches = [{**batch, "clock_ms": ticks.next()} for batch in batches_of(SHAPES[0], events=120)]
    wanted = run(engines, join, batches)
    one_hash(distinct, shift=shift)
    found = run(engines, join, batches)
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert sorted(map(str, ours.to_pylist())) == sorted(map(str, theirs.to_pylist()))
