"""Interval joins on any backend: row for row the same changelog and the same state as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conformance.case import Case, read_cases
from oracle.drive import Backend, by_event, difference
from oracle.interval_drive import ends, timed_cuts, timed_run_all
from oracle.interval_traces import BOUNDS, IntervalShape, TimedRecipe, timed_trace

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.join import Join
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, alike, run

pytestmark = pytest.mark.one_in(4)


def batches_of(shape: IntervalShape, join: Join, seed: int, *, events: int = 200) -> Batches:
    # nanoseconds near the last that int64 holds
    start = 9_223_372_000_000 if shape.clock == "ns" else 1000
    made = ends(timed_trace(shape, TimedRecipe(events, seed, start=start)))
    return [cut.inputs for cut in timed_cuts(join, made, (40, 1, 17, 30), shuffle=seed)]


SHAPES = [
    *(IntervalShape(how, *BOUNDS[i]) for i, how in enumerate(("inner", "left", "right", "full"))),
    IntervalShape("full", keys="composite", residual=(("a_x", "<", "b_x"),)),
    IntervalShape("full", keys="string", null_safe=True, clock="us"),
    IntervalShape("left", keys="none", clock="utc"),
    IntervalShape("full", min_cleanup=12, clock="int64"),
    IntervalShape("full", late="tag", keys="mixed_width", clock="mixed", stamped=True),
    IntervalShape("right", late="drop"),
    IntervalShape("inner", late="tag", keyed=True, inclusive=(False, True), stamped=True),
    IntervalShape("full", -20, 300, min_cleanup=50_000, clock="ns", stamped=True),
]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_the_cpu(engines: Backend, shape: IntervalShape, emit: Emit) -> None:
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=SHAPES.index(shape))
    alike(run(engines, join, batches), run(CPU, join, batches))


@pytest.mark.parametrize(("distinct", "shift"), [(1, 0), (3, 0), (0, 32)], ids=["one", "three", "upper_half"])
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[4], SHAPES[7]], ids=str)
def test_collisions_of_hashes_change_nothing(
    engines: Backend, shape: IntervalShape, distinct: int, shift: int, one_hash: Any
) -> None:
    """Candidates are verified by equality, in the state and where keys of one micro-batch meet."""
    join = shape.join("per_event")
    batches = batches_of(shape, join, seed=3, events=120)
    wanted = run(engines, join, batches)
    one_hash(distinct, shift=shift)
    found = run(engines, join, batches)
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert sorted(map(str, ours.to_pylist())) == sorted(map(str, theirs.to_pylist()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_state_resumes_on_the_other_backend(engines: Backend, shape: IntervalShape) -> None:
    join = shape.join("per_event")
    batches = batches_of(shape, join, seed=11)
    half = len(batches) // 2
    whole = run(CPU, join, batches)
    for first, second in ((engines, CPU), (CPU, engines)):
        _, _, state = run(first, join, batches[:half])
        tables, _, _ = run(second, join, batches[half:], state)
        for ours, theirs in zip(tables, whole[0][half:], strict=True):
            assert sorted(map(str, ours.to_pylist())) == sorted(map(str, theirs.to_pylist()))


def golden() -> list[Case]:
    folder = Path(__file__).parents[1] / "conformance" / "cases"
    return [case for case in read_cases(folder) if case.timed]


@only_on("gpu", "gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("case", golden(), ids=lambda case: case.name)
def test_golden_cases(engines: Backend, case: Case) -> None:
    """Per event, the multiset of changes is Flink's; `conformance` asks that and more, and of the CPU too."""
    events, expected = case.timed_events, case.expected
    found = by_event(*timed_run_all(engines, case.join("per_event"), events, 40))
    for event, told in enumerate(events):
        wrong = difference(expected.get(event, {}), found.pop(event, {}))
        assert not wrong, f"event {event} {told}:\n{wrong}"
    assert not found, f"changes of events that do not exist: {found}"
