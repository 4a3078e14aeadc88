"""However the GPU finds candidates, rows and their order are the same: golden cases and random traces, each way."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from oracle.drive import Backend, by_event, difference, run_all
from oracle.interval_drive import timed_run_all
from oracle.traces import LAYOUTS, Shape

from gpu_ops import DescriptionError, JoinEngine
from gpu_ops.descriptions.description import Emit
from kernels import test_engine, test_interval, test_multi
from kernels.conftest import only_on
from kernels.engines import CPU, alike, run
from kernels.support import same

pytestmark = [pytest.mark.one_in(4), pytest.mark.thorough]

WAYS = ("hash_join", "index", "auto")
REGULAR = [Shape(how, LAYOUTS[i], LAYOUTS[(i + 2) % 3]) for i, how in enumerate(("full", "left", "anti"))]
REGULAR += [Shape("full", "multiset", "unique_key", keys="composite", residual=(("a_x", ">", "b_x"),))]
GOLDEN = {case.name: case for case in [*test_engine.golden(), *test_interval.golden()]}
FIRST = [name for name in GOLDEN if name.endswith("_1")]


@pytest.fixture
def ways(engines: Backend, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The backend with one way; ``auto`` where calls cost nothing, so that small runs too are joined."""
    import gpu_ops.cudf_backend

    assert gpu_ops.cudf_backend
    probe: Any = sys.modules["gpu_ops.cudf_backend.probe"]
    taken = set()

    def noted(name: str, call: Any) -> Any:
        def notes(*args: Any, **options: Any) -> Any:
            taken.add(name)
            return call(*args, **options)

        return notes

    kernels = sys.modules["gpu_ops.cudf_backend.kernels"]
    for module, name in (
        (probe, "join_entries"),
        (probe, "search_runs"),
        (kernels, "join_entries"),
        (kernels, "search_runs"),
    ):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    monkeypatch.setattr(probe, "CALL_SECONDS", 0.0)
    yield dataclasses.replace(engines, probe=request.param)
    allowed = {"hash_join": {"join_entries"}, "index": {"search_runs"}, "auto": {"join_entries", "search_runs"}}
    timers = {"search_runs"} if "interval" in request.node.name else set()  # the first row of a key is always searched
    assert taken
    assert taken <= allowed[request.param] | timers


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("shape", REGULAR, ids=str)
def test_regular(engines: Backend, ways: Backend, shape: Shape, emit: Emit) -> None:
    join = shape.join(emit)
    batches = test_engine.batches_of(shape, join, seed=5, events=120)
    alike(run(ways, join, batches), run(CPU, join, batches))


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
@pytest.mark.parametrize("shape", [test_interval.SHAPES[n] for n in (3, 4, 7)], ids=str)
def test_interval_join(engines: Backend, ways: Backend, shape: Any) -> None:
    join = shape.join("per_event")
    batches = test_interval.batches_of(shape, join, seed=5, events=120)
    alike(run(ways, join, batches), run(CPU, join, batches))


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
def test_multi_way_join(engines: Backend, ways: Backend) -> None:
    made = test_multi.FEW[0]
    join = made.join("per_event")
    batches = test_multi.batches_of(made, join, seed=5, events=60)
    alike(run(ways, join, batches), run(CPU, join, batches))


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
@pytest.mark.parametrize("how", ["full", "semi", "anti"])
def test_at_the_end(engines: Backend, ways: Backend, how: Any) -> None:
    """The same rows in the same order, whether all are joined at once or all are looked up."""
    shape = Shape(how, "unique_key", "multiset")
    join = shape.join("at_end")
    batches = test_engine.batches_of(shape, join, seed=5, events=120)

    def result(backend: Backend) -> Any:
        with backend.engine(join) as engine:
            for batch in batches:
                engine.process(**batch)
            return engine.finish()

    found = result(ways)
    assert found.num_rows > 5
    same(found, result(Backend("cpu-tiny")))  # which takes the same parts at once


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", ["hash_join", pytest.param("auto", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in GOLDEN]
)
def test_golden_cases(engines: Backend, ways: Backend, name: str) -> None:
    case = GOLDEN[name]
    join = case.join("per_event")
    if case.timed:
        events: Any = case.timed_events
        found = by_event(*timed_run_all(ways, join, events, 40))
    else:
        events = case.events
        found = by_event(*run_all(ways, join, events, 40))
    for event, told in enumerate(events):
        wrong = difference(case.expected.get(event, {}), found.pop(event, {}))
        assert not wrong, f"event {event} {told}:\n{wrong}"
    assert not found


def test_no_such_way() -> None:
    shape = REGULAR[0]
    with pytest.raises(DescriptionError, match="probe='sorted'; it is one of auto, hash_join, index"):
        JoinEngine(shape.join("per_batch"), "cpu", probe="sorted")  # type: ignore[arg-type]
