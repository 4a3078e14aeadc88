"""GPU memory that runs out at any moment: the micro-batch is begun again with state moved away, and says the same."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import Backend
from oracle.interval_traces import IntervalShape
from oracle.multi_traces import SHAPES as MULTI
from oracle.traces import Shape

from gpu_ops.descriptions.description import Description
from gpu_ops.errors import StateError
from kernels import test_engine, test_interval, test_multi
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, Result, alike, run
from kernels.support import same

ON_GPU = ("gpu", "gpu-tiny", *EMULATED)
POINTS = 30
"""Moments that are tried in the short run, of each join."""


class Failing:
    """Counts what an engine asks of its backend and its array module; one call, or all from one on, find no memory."""

    def __init__(self, fails: int | None = None, *, for_good: bool = False) -> None:
        self.fails, self.for_good = fails, for_good
        self.calls, self.active = 0, False

    def check(self) -> None:
        if self.active:
            self.calls += 1
            if self.calls == self.fails or (self.for_good and self.fails is not None and self.calls > self.fails):
                raise MemoryError("std::bad_alloc: out_of_memory: RMM failure")

    def wrapped(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.check()
            return function(*args, **kwargs)

        return call


class Module:
    """An array module whose functions may fail."""

    def __init__(self, module: Any, failing: Failing) -> None:
        self._module, self._failing = module, failing

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return self._failing.wrapped(found) if callable(found) and not isinstance(found, type) else found


METHODS = (
    "frame",
    "take",
    "hash_rows",
    "equal_rows",
    "evaluate",
    "argsort",
    "scatter_add",
    "search",
    "store",
)


@contextlib.contextmanager
def short_of_memory(monkeypatch: pytest.MonkeyPatch, failing: Failing) -> Iterator[None]:
    """Engines made within it are short of memory while one of them prepares or commits."""
    from gpu_ops.cudf_backend import kernels as module
    from gpu_ops.cudf_backend import store
    from gpu_ops.join_engine import JoinEngine
    from gpu_ops.memory import Memory

    with monkeypatch.context() as patch:
        honest = module.array_module
        patch.setattr(module, "array_module", lambda: Module(honest(), failing))
        for name in METHODS:
            method = getattr(module.CudfKernels, name)
            patch.setattr(module.CudfKernels, name, failing.wrapped(method))
        for name in ("append", "_gather"):
            patch.setattr(store.CudfStore, name, failing.wrapped(getattr(store.CudfStore, name)))
        for name in ("_merge", "retained"):
            patch.setattr(store.CudfStore, name, failing.wrapped(getattr(store.CudfStore, name)))
        for name in ("_prepare", "commit"):
            step = getattr(JoinEngine, name)

            def watched(self: Any, *args: Any, step: Any = step) -> Any:
                failing.active = True
                try:
                    return step(self, *args)
                finally:
                    failing.active = False

            patch.setattr(JoinEngine, name, watched)
        for owner, name in ((JoinEngine, "snapshot"), (Memory, "settle")):
            step = getattr(owner, name)

            def undisturbed(self: Any, *args: Any, step: Any = step) -> Any:
                before, failing.active = failing.active, False
                try:
                    return step(self, *args)
                finally:
                    failing.active = before

            patch.setattr(owner, name, undisturbed)
        yield


def trial(
    engines: Backend, join: Description, batches: Batches, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> Result:
    with short_of_memory(monkeypatch, failing):
        return run(engines, join, batches)


CASES: dict[str, tuple[Description, Batches]] = {}


def case(name: str) -> tuple[Description, Batches]:
    """A join with a few micro-batches."""
    if name not in CASES:
        join: Description
        if name == "two":
            shape = Shape("full", "multiset", "unique_key", residual=(("a_x", ">", "b_x"),))
            join = shape.join("per_event")
            CASES[name] = join, test_engine.batches_of(shape, join, 3, events=90)
        elif name == "interval":
            timed = IntervalShape("full", min_cleanup=12, clock="int64")
            join = timed.join("per_event")
            CASES[name] = join, test_interval.batches_of(timed, join, 3, events=90)
        else:
            many = MULTI[9].join("per_batch")
            join = many
            CASES[name] = join, test_multi.batches_of(MULTI[9], many, 3, events=60)
    return CASES[name]


@only_on(*ON_GPU)
@pytest.mark.parametrize("name", ["two", "interval", "multi"])
def test_memory_runs_out_once(engines: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    join, batches = case(name)
    wanted = run(CPU, join, batches)
    counting = Failing()
    alike(trial(engines, join, batches, counting, monkeypatch), wanted)
    assert counting.calls > 300
    for moment in range(1, counting.calls, max(1, counting.calls // POINTS)):
        failing = Failing(moment)
        try:
            alike(trial(engines, join, batches, failing, monkeypatch), wanted)
        except StateError as error:
            # before there is any state, nothing can be moved away
            if "no state is left to move" not in str(error) or moment > counting.calls // 4:
                raise
        assert failing.calls >= moment


@pytest.mark.slow
@only_on(*ON_GPU)
@pytest.mark.parametrize("name", ["two", "interval", "multi"])
def test_memory_runs_out_anywhere(engines: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as many moments, in an engine that has some state already."""
    join, batches = case(name)
    wanted = run(CPU, join, batches)
    counting = Failing()
    alike(trial(engines, join, batches, counting, monkeypatch), wanted)
    start = counting.calls // 4
    for moment in range(start + 1, counting.calls, max(1, (counting.calls - start) // (10 * POINTS))):
        alike(trial(engines, join, batches, Failing(moment), monkeypatch), wanted)


@only_on(*ON_GPU)
def test_memory_stays_short(engines: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing is left to move, the micro-batch is refused, and once there is memory again it goes on."""
    join, batches = case("two")
    wanted = run(CPU, join, batches)
    failing = Failing(0, for_good=True)
    with short_of_memory(monkeypatch, failing), engines.engine(join) as engine:
        failing.fails = None
        found = []
        for given in batches:
            assert isinstance(given, dict)
            failing.calls, failing.fails = 0, 40
            with pytest.raises(StateError, match="smaller micro-batches"):
                engine.prepare(**given)
            failing.fails = None
            found.append(engine.process(**given))
        assert found[-1].num_rows
        for ours, theirs in zip(found, wanted[0], strict=True):
            same(ours, theirs)


@only_on(*ON_GPU)
@pytest.mark.parametrize("name", ["two", "interval", "multi"])
def test_nothing_is_left_after_close(engines: Backend, name: str) -> None:
    """No allocation of an engine outlives it, also when part of its state was moved away."""
    from gpu_ops.backends import make_kernels
    from gpu_ops.cudf_backend import memory

    join, batches = case(name)
    holder, _ = make_kernels("gpu")
    try:
        use_and_close(engines, join, batches)  # what is made once per process, and stays
        before = taken()
        closed = use_and_close(engines, join, batches)
        assert memory.allocated() == 0
        after = taken()
        assert after[0] == before[0], "bytes of columns"
        assert after[1] <= before[1] + 256, "bytes of arrays"
        closed.close()  # a second time, nothing happens
    finally:
        tracemalloc.stop()
        holder.close()


def use_and_close(engines: Backend, join: Description, batches: Batches) -> Any:
    with engines.engine(join) as engine:
        for number, given in enumerate(batches[:-1]):  # the last ends the input
            inputs, named = given if isinstance(given, tuple) else ((), given)
            engine.process(*inputs, **named)
            if number == 1:
                engine.memory.budget.gpu = 1
        assert sum(engine.memory.bytes(engine._operator.tables)) > 1000
        engine.prepare(*([None] * len(join.inputs)))
    return engine


def taken() -> tuple[int, int]:
    """Bytes of Arrow's memory and of numpy's arrays: under emulation both are the card's."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    gc.collect()
    numpys = tracemalloc.DomainFilter(inclusive=True, domain=389047)
    arrays = tracemalloc.take_snapshot().filter_traces([numpys])
    return pa.total_allocated_bytes(), sum(t.size for t in arrays.traces)
