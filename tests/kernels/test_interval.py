"""Interval joins on any backend: row for row the same changelog and the same state as on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conformance.case import Case, read_cases
from oracle.drive import Backend, by_event, difference
from oracle.interval_drive import ends, timed_cuts, timed_run_all
from oracle.interval_traces import BOUNDS, IntervalShape, TimedRecipe, timed_trace

from cpu_fallback import CpuKernels
from gpu_ops.joins import Emit, Join
from kernels.conftest import EMULATED, only_on
from kernels.support import same

CPU = Backend("cpu")
Batches = Sequence[Mapping[str, Any]]
Result = tuple[list[pa.Table], list[np.ndarray], dict[str, pa.Table]]


def run(backend: Backend, join: Join, batches: Batches, start: dict[str, pa.Table] | None = None) -> Result:
    """Changelogs, their sequences and the state after; every other micro-batch is first discarded once."""
    tables, sequences = [], []
    with backend.engine(join) as engine:
        if start is not None:
            engine.restore(start)
        for number, inputs in enumerate(batches):
            if number % 2:
                engine.prepare(**inputs)
                engine.discard()
            batch = engine.prepare(**inputs)
            engine.commit()
            tables.append(batch.changelog)
            sequences.append(batch.sequence)
        return tables, sequences, engine.snapshot()


def alike(found: Result, wanted: Result) -> None:
    for number, (ours, theirs) in enumerate(zip(found[0], wanted[0], strict=True)):
        try:
            same(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"micro-batch {number}: {error}") from None
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("left", "right", "time"):
        same(found[2][name], wanted[2][name])


def batches_of(shape: IntervalShape, join: Join, seed: int, *, events: int = 200) -> Batches:
    made = ends(timed_trace(shape, TimedRecipe(events, seed)))
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
]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_the_cpu(engines: Backend, shape: IntervalShape, emit: Emit) -> None:
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=SHAPES.index(shape))
    alike(run(engines, join, batches), run(CPU, join, batches))


@pytest.fixture
def one_hash(monkeypatch: pytest.MonkeyPatch, engines: Backend) -> Iterator[Any]:
    """Make all hashes of the backend equal, or all but a few; of both halves, or of the upper one."""

    def force(distinct: int, *, shift: int) -> None:
        backend: Any = sys.modules["gpu_ops.cudf_backend"].CudfKernels if engines.gpu else CpuKernels
        honest = backend.hash_rows

        def hash_rows(self: Any, *args: Any) -> Any:
            hashes = honest(self, *args)
            return hashes % np.uint64(distinct) if not shift else (hashes << np.uint64(shift)) >> np.uint64(shift)

        monkeypatch.setattr(backend, "hash_rows", hash_rows)

    if engines.gpu:
        import gpu_ops.cudf_backend  # noqa: F401

    return force


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
    events = case.timed_events
    found = by_event(*timed_run_all(engines, case.join("per_event"), events, 40))
    for event, told in enumerate(events):
        wrong = difference(case.expected.get(event, {}), found.pop(event, {}))
        assert not wrong, f"event {event} {told}:\n{wrong}"
    assert not found, f"changes of events that do not exist: {found}"
