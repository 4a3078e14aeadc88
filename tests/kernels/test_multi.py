"""Multi-way joins on any backend: row for row the same changelog and the same state as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conformance.case import Case, read_cases
from oracle.drive import Backend, by_event, cuts, difference, run_all
from oracle.multi_traces import SHAPES, MultiShape, multi_recipe, multi_trace

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.multi_join import MultiJoin
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, alike, run


def batches_of(made: MultiShape, join: MultiJoin, seed: int, *, events: int = 100) -> Batches:
    trace = multi_trace(made, multi_recipe(made, events, seed, malformed=True))
    return [(cut.batches, cut.inputs) for cut in cuts(join, trace, (40, 1, 17), shuffle=seed)]


FEW = [SHAPES[n] for n in (5, 9, 17)]
MORE = [SHAPES[n] for n in (3, 7, 12, 14, 15)]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("made", FEW + [pytest.param(made, marks=pytest.mark.slow) for made in MORE], ids=str)
def test_same_as_the_cpu(engines: Backend, made: MultiShape, emit: Emit) -> None:
    join = made.join(emit)
    batches = batches_of(made, join, seed=SHAPES.index(made))
    alike(run(engines, join, batches), run(CPU, join, batches))


@pytest.mark.parametrize(("made", "distinct"), [(SHAPES[4], 1), (SHAPES[16], 3)], ids=str)
def test_collisions_of_hashes_change_nothing(engines: Backend, made: MultiShape, distinct: int, one_hash: Any) -> None:
    """Candidates are verified by equality, and neither slots nor the order of rows depend on hashes."""
    join = made.join("per_event")
    batches = batches_of(made, join, seed=3, events=80)
    wanted = run(engines, join, batches)
    one_hash(distinct)
    alike(run(engines, join, batches), wanted)


@pytest.mark.parametrize("made", [SHAPES[9]], ids=str)
def test_state_resumes_on_the_other_backend(engines: Backend, made: MultiShape) -> None:
    join = made.join("per_event")
    batches = batches_of(made, join, seed=11)
    half = len(batches) // 2
    whole = run(CPU, join, batches)
    for first, second in ((engines, CPU), (CPU, engines)):
        _, _, state = run(first, join, batches[:half])
        tables, _, _ = run(second, join, batches[half:], state)
        for ours, theirs in zip(tables, whole[0][half:], strict=True):
            assert sorted(map(str, ours.to_pylist())) == sorted(map(str, theirs.to_pylist()))


def golden() -> list[Any]:
    """Where backends are emulated, the short run has one of them."""
    folder = Path(__file__).parents[1] / "conformance" / "cases"
    cases = [case for case in read_cases(folder) if case.kind == "multi" and not case.informative]
    short = "multi_4way_mixed_2"
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name != short else [])
        for case in sorted(cases, key=lambda case: case.name != short)
    ]


@only_on("gpu", "gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("case", golden())
def test_golden_cases(engines: Backend, case: Case) -> None:
    """Per event, the multiset of changes is Flink's; `conformance` asks that and more, and of the CPU too."""
    events, expected = case.events, case.expected
    found = by_event(*run_all(engines, case.join("per_event"), events, 40))
    for event, told in enumerate(events):
        wrong = difference(expected.get(event, {}), found.pop(event, {}))
        assert not wrong, f"event {event} {told}:\n{wrong}"
    assert not found, f"changes of events that do not exist: {found}"
