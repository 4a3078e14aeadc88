"""However the GPU finds candidates, rows and their order are the same: golden cases and random traces, each way."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conformance.case import check_events
from oracle.drive import Backend
from oracle.interval_traces import IntervalShape
from oracle.traces import LAYOUTS, Shape

from gpu_ops import DescriptionError, JoinEngine
from gpu_ops.descriptions.description import Emit
from kernels import test_engine
from kernels.conftest import only_on
from kernels.engines import CPU, alike, run
from kernels.support import same
from kernels.test_engine import INTERVAL, MULTI, batches_of

pytestmark = [pytest.mark.one_in(4), pytest.mark.thorough]

WAYS = ("hash_join", "index", "auto")
REGULAR = [Shape(how, LAYOUTS[i], LAYOUTS[(i + 2) % 3]) for i, how in enumerate(("full", "left", "anti"))]
REGULAR += [Shape("full", "multiset", "unique_key", keys="composite", residual=(("a_x", ">", "b_x"),))]
GOLDEN = {name: case for name, case in test_engine.GOLDEN.items() if case.kind != "multi"}
FIRST = [name for name in GOLDEN if name.endswith("_1")]


@pytest.fixture
def ways(engines: Backend, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The backend with one way; ``auto`` where calls cost nothing, so that small runs too are joined."""
    import gpu_ops.cudf_backend

    assert gpu_ops.cudf_backend
    probe: Any = sys.modules["gpu_ops.cudf_backend.search"]
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
    by_time = isinstance(request.node.callspec.params.get("shape"), IntervalShape) or "interval" in request.node.name
    timers = {"search_runs"} if by_time else set()  # the first row of a key is always searched
    assert taken
    assert taken <= allowed[request.param] | timers


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
@pytest.mark.parametrize(
    ("shape", "emit"),
    [
        *itertools.product(REGULAR, test_engine.EMITS),
        *((INTERVAL[n], "per_event") for n in (3, 4, 7)),
        (MULTI[0], "per_event"),
    ],
    ids=str,
)
def test_same_as_the_cpu(engines: Backend, ways: Backend, shape: Any, emit: Emit) -> None:
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=5, events=120)
    alike(run(ways, join, batches), run(CPU, join, batches))


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("ways", WAYS, indirect=True)
@pytest.mark.parametrize("how", ["full", "semi", "anti"])
def test_at_the_end(engines: Backend, ways: Backend, how: Any) -> None:
    """The same rows in the same order, whether all are joined at once or all are looked up."""
    shape = Shape(how, "unique_key", "multiset")
    join = shape.join("at_end")
    batches = batches_of(shape, join, seed=5, events=120)

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
    check_events(GOLDEN[name], ways, 40)


def test_no_such_way() -> None:
    shape = REGULAR[0]
    with pytest.raises(DescriptionError, match="probe='sorted'; it is one of auto, hash_join, index"):
        JoinEngine(shape.join("per_batch"), "cpu", probe="sorted")  # type: ignore[arg-type]
