"""Memory that runs out at any moment: what was done is taken back to the last step, or the engine says that it is not.

On the GPU the micro-batch is begun again with state moved away, and says the same.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import slow_but
from oracle.drive import Backend, same_state
from oracle.interval_traces import IntervalShape
from oracle.multi_traces import SHAPES as MULTI
from oracle.traces import Shape

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Latest, Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join, LookupJoin
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.errors import StateError
from gpu_ops.state.table import StateTable
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, Result, alike, run
from kernels.support import same
from kernels.test_engine import batches_of

pytestmark = pytest.mark.thorough

ON_GPU = ("gpu", "gpu-tiny", *EMULATED)
POINTS = 30
"""Moments that are tried in the short run, of each join."""


RMM = "std::bad_alloc: out_of_memory: RMM failure"


class Failing:
    """Counts what an engine asks of its backend and its array module; one call, or all from one on, find no memory."""

    def __init__(
        self, fails: int | None = None, *, for_good: bool = False, error: type[Exception] = MemoryError, says: str = RMM
    ) -> None:
        self.fails, self.for_good, self._error, self._says = fails, for_good, error, says
        self.calls, self.active = 0, False

    def check(self) -> None:
        if self.active:
            self.calls += 1
            if self.calls == self.fails or (self.for_good and self.fails is not None and self.calls > self.fails):
                raise self._error(self._says)

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
            method = failing.wrapped(getattr(module.CudfKernels, name))
            static = isinstance(inspect.getattr_static(module.CudfKernels, name), staticmethod)
            patch.setattr(module.CudfKernels, name, staticmethod(method) if static else method)
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
            CASES[name] = join, batches_of(shape, join, 3, events=90)
        elif name == "interval":
            timed = IntervalShape("full", min_cleanup=12, clock="int64")
            join = timed.join("per_event")
            CASES[name] = join, batches_of(timed, join, 3, events=90)
        else:
            many = MULTI[9].join("per_batch")
            join = many
            CASES[name] = join, batches_of(MULTI[9], many, 3, events=120)
    return CASES[name]


@only_on(*ON_GPU)
@pytest.mark.parametrize("name", slow_but(["two", "interval", "multi"]))
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


WORDS = [
    (OverflowError, "CUDF failure at: /cudf/cpp/src/join/hash_join.cu:321: the size of the result exceeds the limit"),
    (RuntimeError, "CUDA_ERROR_OUT_OF_MEMORY: out of memory"),  # of cupy, where a kernel is loaded
    (RuntimeError, "cudaErrorMemoryAllocation: out of memory"),
    (RuntimeError, "CUDA error at: /rmm/cuda_memory_resource.hpp:61: cudaErrorMemoryAllocation out of memory"),
    (RuntimeError, "for_each: failed inside CUB: cudaErrorMemoryAllocation: out of memory"),  # of Thrust
]


@only_on(*ON_GPU)
@pytest.mark.parametrize(("error", "says"), WORDS)
def test_memory_runs_out_in_other_words(
    engines: Backend, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows or bytes than libcudf's columns have, and CUDA's own errors, where it loads a module."""
    join, batches = case("two")
    wanted = run(CPU, join, batches)
    counting = Failing()
    trial(engines, join, batches, counting, monkeypatch)
    start = counting.calls // 4  # there is some state that can be moved
    for moment in range(start + 1, counting.calls, (counting.calls - start) // 5):
        alike(trial(engines, join, batches, Failing(moment, error=error, says=says), monkeypatch), wanted)


@only_on(*ON_GPU)
@pytest.mark.parametrize(
    ("error", "says"), [(OverflowError, "int too large to convert"), (RuntimeError, "cudaErrorIllegalAddress")]
)
def test_other_errors_are_no_want_of_memory(
    engines: Backend, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, batches = case("two")
    with pytest.raises(error, match=says):
        trial(engines, join, batches, Failing(40, error=error, says=says), monkeypatch)


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
@pytest.mark.parametrize("name", slow_but(["two", "interval", "multi"], "two"))
def test_nothing_is_left_after_close(engines: Backend, name: str) -> None:
    """No allocation of an engine outlives it, also when part of its state was moved away."""
    from gpu_ops.backends import make_kernels
    from gpu_ops.cudf_backend import device

    join, batches = case(name)
    holder, _ = make_kernels("gpu")
    try:
        use_and_close(engines, join, batches)  # what is made once per process, and stays
        before = taken()
        closed = use_and_close(engines, join, batches)
        assert device.allocated() == 0
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


# --- undoing, step by step ---------------------------------------------------------------------


def described() -> dict[str, Description]:
    """Every operator, with all that it keeps."""

    def source(name: str, kind: str | None = "op", **more: Any) -> Input:
        columns = {"k": pa.int64(), "t": pa.int64(), "v": pa.int64(), "x": pa.float64()}
        return Input(name, pa.schema([(name + c, t) for c, t in columns.items()]), row_kind=kind, **more)

    def timed(name: str, kind: str | None = None) -> Input:
        return source(name, kind, event_time=f"{name}t")

    both, keys = (source("l"), source("r")), (Key("lk", "rk"),)
    plain = timed("l"), timed("r")
    many = [source("l"), source("r"), source("s", None, unique_key=("sv",))]
    calls = {"n": "count(*)", "a": "sum(lv)", "b": "sum(lx)", "c": "min(lv)", "d": "max(lx)", "e": "avg(lv)",
             "f": "count(distinct lv)", "g": "last(lv)"}  # fmt: skip
    return {
        "full": Join("full", *both, keys, where="l.lv > r.rv"),
        "left, unique keys, ttl": Join(
            "left", source("l", unique_key=("lk",), ttl_ms=3), source("r", ttl_ms=2), keys, emit="per_event"
        ),
        "semi": Join("semi", *both, keys, emit="per_event"),
        "anti": Join("anti", *both, keys, null_aware=True),
        "multi": MultiJoin.of(many, [[("l.lk", "rk")], [("r.rk", "sk")]], ["left", "left"]),
        "lookup": LookupJoin("left", source("l", None), source("r"), keys),
        "interval": IntervalJoin("full", *plain, keys, interval=Interval(-5, 5, min_cleanup_ms=3)),
        "interval semi": IntervalJoin("semi", *plain, keys, interval=Interval(-5, 5, late="drop")),
        "temporal": TemporalJoin("left", timed("l"), timed("r", "op"), keys),
        "temporal, ttl": TemporalJoin("left", timed("l"), timed("r", "op"), keys, ttl_ms=3),
        "asof": AsofJoin("left", timed("l", "op"), timed("r", "op"), keys, asof=Asof("nearest")),
        "asof per event": AsofJoin("left", timed("l", "op"), timed("r", "op"), keys, emit="per_event", asof=Asof()),
        "asof at the watermark": AsofJoin(
            "left", *plain, keys, emit="at_watermark", asof=Asof("nearest", exact=False)
        ),
        "aggregate": Aggregate.of(source("l"), ("lk",), calls, "per_batch"),
        "aggregate per event, ttl": Aggregate.of(source("l", None, ttl_ms=2), ("lk",), calls, "per_event"),
        "aggregate at the watermark": Aggregate.of(timed("l", "op"), ("lk", "lt"), calls, "at_watermark", "lt"),
        "top": Top(source("l", ttl_ms=3), ("lk",), parse_order("lv DESC"), 2, number="number"),
        "latest": Latest(source("l", None, unique_key=("lk",)), order_by="lv"),
    }  # fmt: skip


UNDONE = described()


def given_to(join: Description, count: int, rows: int, seed: int) -> list[dict[str, Any]]:
    """Micro-batches of random changes; a quarter of them take back what is there."""
    choice, live, found = random.Random(seed), [list[Any]() for _ in join.inputs], []
    for number in range(count):
        batches = []
        for side, source in enumerate(join.inputs):
            taken = []
            for _ in range(rows):
                row = (choice.randrange(4), 4 * number + choice.randrange(9), choice.randrange(6), choice.random())
                kind = "+I"
                if source.row_kind is not None and live[side] and choice.random() < 0.25:
                    kind, row = "-D", live[side].pop(choice.randrange(len(live[side])))
                else:
                    live[side].append(row)
                taken.append((kind, *row))
            columns = list(zip(*taken, strict=True))
            table = pa.table(
                [pa.array(c, f.type) for c, f in zip(columns[1:], source.schema, strict=True)], source.schema.names
            )
            batches.append(
                table if source.row_kind is None else table.append_column(source.row_kind, pa.array(columns[0]))
            )
        told: dict[str, Any] = {"clock_ms": number + 1}
        if join.by_time and join.by_event_time:
            told["watermark"] = 4 * number
        found.append({"inputs": batches, "told": told})
    return found


def prepared(engine: Any, given: dict[str, Any]) -> Any:
    return engine.prepare(*given["inputs"], **given["told"])


class Steps(Failing):
    """Counts the steps that undo something, and lets one, or all from one on, find no memory."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        discard, steps = StateTable.discard, self

        def watched(self: StateTable) -> None:
            done = self._journal
            if done is not None:
                undo = [step for step in done.undo if not hasattr(step, "counted")]
                done.undo[len(done.undo) - len(undo) :] = map(steps.step, undo)
                before, self.store.truncate = self.store.truncate, steps.wrapped(self.store.truncate)  # type: ignore[method-assign]
            try:
                discard(self)
            finally:
                if done is not None:
                    self.store.truncate = before  # type: ignore[method-assign]

        monkeypatch.setattr(StateTable, "discard", watched)

    def step(self, step: Any) -> Any:
        made = self.wrapped(step)
        made.counted = True
        return made

    @contextlib.contextmanager
    def counting(self, fails: int | None = None, *, for_good: bool = False) -> Iterator[None]:
        self.calls, self.fails, self.for_good, self.active = 0, fails, for_good, True
        try:
            yield
        finally:
            self.active = False


@only_on("cpu", "cpu-tiny")
@pytest.mark.parametrize("name", slow_but(UNDONE, "multi", "asof", "top"))
def test_an_undo_that_fails_at_any_step_goes_on_there_or_the_engine_is_refused(
    engines: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, steps, tried = UNDONE[name], Steps(), 0
    steps.install(monkeypatch)
    with engines.engine(join) as engine, engines.engine(join) as undisturbed:
        for given in given_to(join, 6, 12, 1):
            before = engine.snapshot()
            prepared(engine, given)
            with steps.counting():
                engine.discard()
            every = steps.calls
            for number in range(1, every + 1):
                prepared(engine, given)
                with steps.counting(number), pytest.raises(MemoryError):
                    engine._operator.discard()
                engine.discard()
                same_state(engine, before)
            for number in {1, every // 2, every} - {0}:
                prepared(engine, given)
                with steps.counting(number, for_good=True), contextlib.suppress(MemoryError):
                    engine.discard()
                    assert steps.calls < number, "a restored engine may have less to undo, and nothing else"
                    same_state(engine, before)
                    continue
                for refused in (lambda: prepared(engine, given), engine.commit, engine.snapshot, engine.discard):  # noqa: B023
                    with pytest.raises(StateError, match="restore it from a snapshot"):
                        refused()
                engine.restore(before)
                same_state(engine, before)
                tried += 1
            found, wanted = prepared(engine, given), prepared(undisturbed, given)
            same(found.changelog, wanted.changelog)
            engine.commit()
            undisturbed.commit()
            same_state(engine, undisturbed.snapshot())
    assert tried >= 6


@only_on("gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("name", slow_but(UNDONE, "multi", "aggregate"))
def test_an_undo_that_fails_goes_on_when_room_was_made(
    engines: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, steps, on = UNDONE[name], Steps(), 0
    steps.install(monkeypatch)
    with engines.engine(join) as engine, engines.engine(join) as undisturbed:
        for number, given in enumerate(given_to(join, 5, 8, 2)):
            before = engine.snapshot()
            prepared(engine, given)
            with steps.counting(1 + number % 3):
                try:
                    engine.discard()
                    on += steps.calls > 1 + number % 3
                except StateError as error:
                    assert "no state is left to move" in str(error)  # noqa: PT017 - either is right
                    engine.restore(before)
            same_state(engine, before)
            same(prepared(engine, given).changelog, prepared(undisturbed, given).changelog)
            engine.commit()
            undisturbed.commit()
    assert on


@only_on("cpu")
@pytest.mark.parametrize("name", slow_but(UNDONE, "full", "aggregate", "top"))
def test_memory_of_the_host_that_runs_out_while_a_micro_batch_is_prepared(
    engines: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is taken back: another try says what it would have said."""
    from cpu_fallback import CpuKernels

    join, failing, through, tried = UNDONE[name], Failing(), 0, 0
    monkeypatch.setattr(CpuKernels, "xp", Module(np, failing))
    for method in ("hash_rows", "take", "argsort", "scatter_add", "search"):
        monkeypatch.setattr(CpuKernels, method, failing.wrapped(getattr(CpuKernels, method)))
    with engines.engine(join) as engine, engines.engine(join) as undisturbed:
        for given in given_to(join, 4, 12, 3):
            before = engine.snapshot()
            failing.calls, failing.fails, failing.active = 0, None, True
            wanted = prepared(undisturbed, given)
            every, failing.active = failing.calls, False
            for moment in range(1, every + 1, max(1, every // 40)):
                tried += 1
                failing.calls, failing.fails, failing.active = 0, moment, True
                with contextlib.suppress(MemoryError):
                    prepared(engine, given)
                    # columns and hints that an earlier try made are there: it had less to do, and came through
                    assert failing.calls < moment
                    through += 1
                    engine.discard()
                failing.active = False
                same_state(engine, before)
            same(prepared(engine, given).changelog, wanted.changelog)
            engine.commit()
            undisturbed.commit()
    assert through < tried // 4


def test_an_undo_allocates_nothing_that_grows() -> None:
    """A micro-batch of 20,000 changes is taken back within a few kilobytes."""
    for name in ("full", "interval", "aggregate", "top"):
        join = UNDONE[name]
        first, second = given_to(join, 2, 300, 4)
        many = [pa.concat_tables([table] * 30) for table in second["inputs"]]
        with CPU.engine(join) as engine:
            prepared(engine, first)
            engine.commit()
            prepared(engine, {**second, "inputs": many[:1] + [t.slice(0, 300) for t in many[1:]]})
            tracemalloc.start()
            try:
                engine._operator.discard()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert most < 20_000, name
            engine.discard()
