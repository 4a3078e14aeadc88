"""State in two memories: row for row the same answers, wherever its parts lie (`gpu_ops.state.runs`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracle.drive import Backend
from oracle.interval_traces import IntervalShape
from oracle.multi_traces import SHAPES as MULTI
from oracle.multi_traces import MultiShape
from oracle.traces import HOWS, LAYOUTS, Shape

from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.memory import STATE_SHARE, Budget, memory_size
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, alike, run
from kernels.test_engine import INTERVAL, all_types, batches_of

pytestmark = [pytest.mark.one_in(4), pytest.mark.thorough]

ON_GPU = ("gpu", "gpu-tiny", *EMULATED)
EMITS: tuple[Emit, ...] = ("per_event", "per_batch")


def taken(engine: Any) -> tuple[int, int]:
    """Bytes of state in GPU memory and in the host's."""
    gpu, host, disk = engine.memory.bytes(engine._operator.tables)
    assert not disk
    return gpu, host


class Squeeze:
    """Gives an engine's state little room on the GPU, then half of what it takes, then plenty, and again.

    Attributes:
        cold: bytes in host memory after each step.
    """

    def __init__(self, *shares: float) -> None:
        self.shares = shares or (0.0, 0.5, 4.0, 0.2)
        self.cold: list[int] = []

    def __call__(self, engine: Any, number: int) -> None:
        engine.kernels.piece_bytes = 600
        total = sum(taken(engine))
        engine.memory.budget.gpu = 1 + int(total * self.shares[number % len(self.shares)] / STATE_SHARE)
        engine.memory.settle(engine._operator.tables)
        gpu, host = taken(engine)
        assert gpu + host == engine.memory.budget.used[0] + engine.memory.budget.used[1]
        self.cold.append(host)


def same_squeezed(engines: Backend, join: Description, batches: Batches) -> None:
    squeeze = Squeeze()
    alike(run(engines, join, batches, before=squeeze), run(CPU, join, batches))
    assert max(squeeze.cold) > 0 == min(squeeze.cold)


@only_on(*ON_GPU)
@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("how", HOWS)
def test_two_inputs(engines: Backend, how: str, emit: Emit) -> None:
    place = HOWS.index(how)
    shape = Shape(how, LAYOUTS[place % 3], LAYOUTS[(place + 1) % 3], keys="string" if place % 2 else "composite")
    join = shape.join(emit)
    same_squeezed(engines, join, batches_of(shape, join, seed=place))


@only_on(*ON_GPU)
@pytest.mark.parametrize("shape", INTERVAL[:6], ids=str)
def test_intervals(engines: Backend, shape: IntervalShape) -> None:
    join = shape.join("per_event")
    same_squeezed(engines, join, batches_of(shape, join, seed=5))


@only_on(*ON_GPU)
@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("made", [MULTI[n] for n in (5, 9)], ids=str)
def test_many_inputs(engines: Backend, made: MultiShape, emit: Emit) -> None:
    join = made.join(emit)
    same_squeezed(engines, join, batches_of(made, join, seed=5))


@only_on(*ON_GPU)
def test_every_type(engines: Backend) -> None:
    """Rows of every type go to the host and come back."""
    rng = np.random.default_rng(8)
    left, right = (all_types(side, rng, (12, 0, 5, 9, 3)) for side in "lr")
    inputs = [
        Input(name, table[0].schema.remove(len(table[0].schema) - 1), row_kind="row_kind")
        for name, table in (("L", left), ("R", right))
    ]
    join = Join("full", *inputs, keys=(Key("l_string", "r_string"),))
    same_squeezed(engines, join, [{"left": a, "right": b} for a, b in zip(left, right, strict=True)])


@only_on(*ON_GPU)
def test_a_snapshot_larger_than_the_gpu(engines: Backend) -> None:
    """State that lies in both memories is written whole, and taken over into little memory."""
    shape = Shape("full", "multiset", "unique_key")
    join = shape.join("per_event")
    batches = batches_of(shape, join, seed=2)
    half = len(batches) // 2
    first = run(engines, join, batches[:half], before=Squeeze(0.3))
    wanted = run(CPU, join, batches[:half])
    alike(first, wanted)
    squeeze = Squeeze(0.3)
    found = run(engines, join, batches[half:], first[2], before=squeeze)
    alike(found, run(CPU, join, batches[half:], wanted[2]))
    assert min(squeeze.cold) > 0


@only_on(*ON_GPU)
def test_rows_that_expire_in_the_host(engines: Backend) -> None:
    """A TTL reaches rows wherever they are, and a compaction keeps each part where it is."""
    names = [(f"{side}_k", f"{side}_v") for side in "lr"]
    schemas = [pa.schema([(k, pa.int64()), (v, pa.string())]) for k, v in names]
    inputs = [Input(side, schema, ttl_ms=50) for side, schema in zip("LR", schemas, strict=True)]
    join = Join("full", *inputs, keys=(Key("l_k", "r_k"),), emit="per_event")
    rng = np.random.default_rng(4)
    batches: list[dict[str, Any]] = []
    for number in range(14):
        rows = [int(rng.integers(0, 40)) for _ in range(2)]
        made = [
            pa.table([rng.integers(0, 9, n), pa.array([f"{number}.{i}" for i in range(n)], pa.string())], schema=schema)
            for n, schema in zip(rows, schemas, strict=True)
        ]
        batches.append({"left": made[0], "right": made[1], "clock_ms": 20 * number})
    same_squeezed(engines, join, batches)


@only_on(*ON_GPU)
def test_rows_leave_before_indexes(engines: Backend) -> None:
    """A lookup reads the indexes always, rows only where it matches."""
    shape = Shape("inner", "multiset", "multiset")
    join = shape.join("per_batch")
    with engines.engine(join) as engine:
        engine.kernels.piece_bytes = 600
        for batch in batches_of(shape, join, seed=1):
            engine.process(**batch)
        indexes = [i for t in engine._operator.tables for i in t.indexes.values()]
        rows = sum(t.store.nbytes for t in engine._operator.tables)
        gpu, _ = taken(engine)
        engine.memory.budget.gpu = int((gpu - rows // 2) / STATE_SHARE)
        engine.memory.settle(engine._operator.tables)
        assert 0 < taken(engine)[1] < rows
        assert not any(i.host_bytes for i in indexes)
        engine.memory.budget.gpu = 1
        engine.memory.settle(engine._operator.tables)
        assert all(i.host_bytes == i.nbytes > 0 for i in indexes)
        assert all(t.store.host_bytes == t.store.nbytes for t in engine._operator.tables)


@only_on(*ON_GPU)
def test_metrics_tell(engines: Backend) -> None:
    shape = Shape("left", "multiset", "multiset")
    join = shape.join("per_batch")
    first, *_, last = batches_of(shape, join, seed=1)
    with engines.engine(join) as engine:
        assert engine.prepare(**first).metrics["left_cold_bytes"] == 0
        engine.commit()
        Squeeze(0.0)(engine, 0)
        metrics = engine.prepare(**last).metrics
        assert 0 < metrics["left_cold_bytes"] < metrics["left_state_bytes"]


@only_on(*ON_GPU)
def test_too_much_for_both_memories(engines: Backend) -> None:
    """Refused, and the state is as it was, also where it lies in two memories."""
    shape = Shape("left", "multiset", "multiset")
    join = shape.join("per_batch")
    batches = batches_of(shape, join, seed=1)
    with engines.engine(join, memory_limit=Budget(gpu=1 << 28, host=1 << 30, disk=0)) as engine:
        engine.process(**batches[0])
        Squeeze(0.1)(engine, 0)
        before, total = engine.snapshot(), sum(taken(engine))
        engine.memory.budget.host = total
        with pytest.raises(StateError, match=r"host memory, memory_limit is"):  # noqa: PT012 - at one of them
            for batch in batches[2:]:
                engine.process(**batch)
                before = engine.snapshot()
        assert {k: v.to_pylist() for k, v in engine.snapshot().items()} == {k: v.to_pylist() for k, v in before.items()}
        engine.memory.budget.host = None
        engine.process(**batches[-1])


def test_one_budget_for_several_engines() -> None:
    """On the CPU, the second engine finds what the first has left; an engine that is closed gives all back."""
    shape = Shape("left", "multiset", "multiset")
    join = shape.join("per_batch")
    batch = batches_of(shape, join, seed=1)[0]
    with CPU.engine(join) as engine:
        engine.process(**batch)
        size = sum(v for k, v in engine.state_size().items() if k.endswith("_bytes"))
    budget = Budget(host=int(1.5 * size), disk=0)
    with CPU.engine(join, memory_limit=budget) as second:
        with CPU.engine(join, memory_limit=budget) as first:
            first.process(**batch)
            assert budget.used == (0, size, 0)
            with pytest.raises(StateError, match="that of the engines that share its budget"):
                second.process(**batch)
        assert budget.used.host < size
        second.process(**batch)
        assert budget.used == (0, size, 0)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("40g", 40 << 30), ("512 MiB", 512 << 20), ("1000000", 1_000_000), ("0.4", 0.4), ("1.5k", 1536), ("1.0", 1.0)],
)
def test_amounts_of_memory(text: str, amount: float) -> None:
    found = memory_size(text)
    assert (found, type(found)) == (amount, type(amount))


@pytest.mark.parametrize("text", ["", "lots", "-1", "0", "0.0", "1.5", "40 g g"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(DescriptionError, match="amount of memory"):
        memory_size(text)


def test_a_budget_is_positive() -> None:
    with pytest.raises(DescriptionError, match="0 bytes"):
        Budget(host=0)
