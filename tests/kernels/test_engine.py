"""Engines of regular, interval and multi-way joins on any backend: row for row the same changelog and the same state as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conformance.case import BUILT, check_events, read_cases
from oracle.drive import Backend, cuts
from oracle.interval_drive import ends, timed_cuts
from oracle.interval_traces import BOUNDS, IntervalShape, TimedRecipe, timed_trace
from oracle.multi_traces import SHAPES as MULTI_SHAPES
from oracle.multi_traces import MultiShape, multi_recipe, multi_trace
from oracle.traces import HOWS, LAYOUTS, Shape, recipe, trace

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, alike, run
from kernels.support import TYPES, everything, plain_rows

pytestmark = pytest.mark.one_in(8)

EMITS: tuple[Emit, ...] = ("per_event", "per_batch")


def batches_of(shape: Shape | IntervalShape | MultiShape, join: Any, seed: int, *, events: int = 200) -> Batches:
    """Micro-batches of a random trace for a join of any kind."""
    if isinstance(shape, MultiShape):
        changes = multi_trace(shape, multi_recipe(shape, events // 2, seed, malformed=True))
        return [(cut.batches, cut.inputs) for cut in cuts(join, changes, (40, 1, 17), shuffle=seed)]
    if isinstance(shape, IntervalShape):
        start = 9_223_372_000_000 if shape.clock == "ns" else 1000  # near the last nanosecond that int64 holds
        made = ends(timed_trace(shape, TimedRecipe(events, seed, start=start)))
        return [cut.inputs for cut in timed_cuts(join, made, (40, 1, 17, 30), shuffle=seed)]
    changes = trace(shape, recipe(shape, events, seed, live=30, malformed=True))
    return [cut.inputs for cut in cuts(join, changes, (50, 1, 17, 30, 2), shuffle=seed)]


REGULAR = [
    *(Shape(how, layout, LAYOUTS[(i + 1) % 3]) for i, layout in enumerate(LAYOUTS) for how in HOWS),
    *(Shape(how, "multiset", "unique_key", keys="string") for how in HOWS),
    *(Shape(how, "unique_key", "multiset", keys="double", null_safe=how != HOWS[6]) for how in HOWS),
    *(Shape(how, "multiset", "multiset", keys="composite", residual=(("a_x", ">", "b_x"),)) for how in HOWS),
    *(Shape(how, "unique_key", "unique_key", keys="mixed_width", residual=(("a_s", "<>", "b_s"),)) for how in HOWS),
]
INTERVAL = [
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
MULTI = [MULTI_SHAPES[n] for n in (5, 9, 17, 3, 7, 12, 14, 15)]
SHAPES = [*REGULAR, *INTERVAL, *MULTI]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_the_cpu(engines: Backend, shape: Any, emit: Emit) -> None:
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=SHAPES.index(shape))
    alike(run(engines, join, batches), run(CPU, join, batches))


COLLIDING = [
    *(
        (Shape(how, "multiset", "unique_key", keys="composite"), emit, distinct, 0)
        for how in HOWS for emit in EMITS for distinct in (1, 3)
    ),
    *((INTERVAL[n], EMITS[0], *hashes) for n in (3, 4, 7) for hashes in ((1, 0), (3, 0), (0, 32))),
    (MULTI_SHAPES[4], EMITS[0], 1, 0), (MULTI_SHAPES[16], EMITS[0], 3, 0),
]  # fmt: skip
"""Joins, and how many distinct hashes there are: of both halves, or (shifted) of the upper one."""


@pytest.mark.parametrize(("shape", "emit", "distinct", "shift"), COLLIDING, ids=str)
def test_collisions_of_hashes_change_nothing(
    engines: Backend, shape: Any, emit: Emit, distinct: int, shift: int, one_hash: Any
) -> None:
    """Candidates are verified by equality, in the state and within a micro-batch; but for joins by time the order stays."""
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=3, events=120)
    wanted = run(engines, join, batches)
    one_hash(distinct, shift=shift)
    found = run(engines, join, batches)
    if isinstance(shape, IntervalShape):
        same_rows(found[0], wanted[0])
    else:
        alike(found, wanted)


def same_rows(found: Sequence[pa.Table], wanted: Sequence[pa.Table]) -> None:
    """Whatever their order."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert sorted(map(repr, plain_rows(ours))) == sorted(map(repr, plain_rows(theirs)))


def all_types(side: str, rng: np.random.Generator, sizes: Sequence[int]) -> list[pa.Table]:
    """Micro-batches of a multiset input with a column of every type: rows that come, and some of them that go."""
    tables, live = [], everything(0, rng)
    names = [f"{side}_{name}" for name in live.column_names]
    for size in sizes:
        come = everything(size, rng)
        gone = live.take(pa.array(rng.permutation(live.num_rows)[: size // 2]))
        live = pa.concat_tables([live, come]).combine_chunks()
        kinds = pa.array(["+I"] * come.num_rows + ["-D"] * gone.num_rows, pa.string())
        table = pa.concat_tables([come, gone]).rename_columns(names).append_column("row_kind", kinds)
        tables.append(table.combine_chunks())
    return tables


KEYS = [name for name, (kind, _) in TYPES.items() if not pa.types.is_nested(kind) and name != "null"]


@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("key", KEYS)
def test_every_type_as_key_and_payload(engines: Backend, key: str, emit: Emit) -> None:
    """A full join on a column of each type; retractions find their rows by the values of all columns."""
    rng = np.random.default_rng(KEYS.index(key))
    left, right = (all_types(side, rng, (12, 0, 5, 9)) for side in "lr")
    inputs = [
        Input(name, table[0].schema.remove(len(table[0].schema) - 1), row_kind="row_kind")
        for name, table in (("L", left), ("R", right))
    ]
    join = Join(
        "full", *inputs, keys=(Key(f"l_{key}", f"r_{key}"), Key("l_boolean", "r_boolean", null_safe=True)), emit=emit
    )
    batches = [{"left": a, "right": b} for a, b in zip(left, right, strict=True)]
    found = run(engines, join, batches)
    assert sum(t.num_rows for t in found[0]) > 40
    if engines.name != "cpu":
        alike(found, run(CPU, join, batches))


@pytest.mark.parametrize(
    "shape", [*(Shape(how, "multiset", "unique_key") for how in HOWS[:6]), *INTERVAL, MULTI[1]], ids=str
)
def test_state_resumes_on_the_other_backend(engines: Backend, shape: Any) -> None:
    join = shape.join("per_event")
    batches = batches_of(shape, join, seed=11)
    half = len(batches) // 2
    whole, _, _ = run(CPU, join, batches)
    for first, second in ((engines, CPU), (CPU, engines)):
        _, _, state = run(first, join, batches[:half])
        same_rows(run(second, join, batches[half:], state)[0], whole[half:])


GOLDEN = {
    case.name: case
    for case in read_cases(Path(__file__).parents[1] / "conformance" / "cases")
    if case.kind in BUILT and not case.informative
}


@pytest.mark.one_in(8)
@only_on("gpu", "gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.endswith("_long") else name for name in GOLDEN]
)
def test_golden_cases(engines: Backend, name: str) -> None:
    """`conformance` asks that and more, and of the CPU too."""
    check_events(GOLDEN[name], engines, 40)
