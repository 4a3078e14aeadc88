"""Engines on any backend: row for row the same changelog and the same state as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conformance.case import BUILT, Case, read_cases
from oracle.drive import Backend, by_event, cuts, difference, run_all
from oracle.traces import HOWS, LAYOUTS, Shape, recipe, trace

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join, JoinType
from gpu_ops.descriptions.keys import Key
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, Batches, alike, run
from kernels.support import TYPES, everything, plain_rows

pytestmark = pytest.mark.one_in(4)

EMITS: tuple[Emit, ...] = ("per_event", "per_batch")


def batches_of(shape: Shape, join: Join, seed: int, *, events: int = 240) -> Batches:
    made = recipe(shape, events, seed, live=30, malformed=True)
    return [cut.inputs for cut in cuts(join, trace(shape, made), (50, 1, 17, 30, 2), shuffle=seed)]


SHAPES = [
    *(Shape(how, layout, LAYOUTS[(i + 1) % 3]) for i, layout in enumerate(LAYOUTS) for how in HOWS),
    *(Shape(how, "multiset", "unique_key", keys="string") for how in HOWS),
    *(Shape(how, "unique_key", "multiset", keys="double", null_safe=how != HOWS[6]) for how in HOWS),
    *(Shape(how, "multiset", "multiset", keys="composite", residual=(("a_x", ">", "b_x"),)) for how in HOWS),
    *(Shape(how, "unique_key", "unique_key", keys="mixed_width", residual=(("a_s", "<>", "b_s"),)) for how in HOWS),
]


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_as_the_cpu(engines: Backend, shape: Shape, emit: Emit) -> None:
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=SHAPES.index(shape))
    alike(run(engines, join, batches), run(CPU, join, batches))


@pytest.mark.parametrize("distinct", [1, 3])
@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("how", HOWS)
def test_collisions_of_hashes_change_nothing(
    engines: Backend, how: str, emit: Emit, distinct: int, one_hash: Any
) -> None:
    """Candidates are verified by equality, and neither slots nor the order of rows depend on hashes."""
    shape = Shape(how, "multiset", "unique_key", keys="composite")
    join = shape.join(emit)
    batches = batches_of(shape, join, seed=3, events=120)
    wanted = run(engines, join, batches)
    one_hash(distinct)
    alike(run(engines, join, batches), wanted)


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


@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
def test_state_resumes_on_the_other_backend(engines: Backend, how: JoinType) -> None:
    shape = Shape(how, "multiset", "unique_key")
    join = shape.join("per_event")
    batches = batches_of(shape, join, seed=11)
    half = len(batches) // 2
    whole = run(CPU, join, batches)
    for first, second in ((engines, CPU), (CPU, engines)):
        _, _, state = run(first, join, batches[:half])
        tables, _, _ = run(second, join, batches[half:], state)
        for ours, theirs in zip(tables, whole[0][half:], strict=True):
            assert sorted(map(repr, plain_rows(ours))) == sorted(map(repr, plain_rows(theirs)))


def golden() -> list[Case]:
    folder = Path(__file__).parents[1] / "conformance" / "cases"
    kinds = set(BUILT) - {"multi"}
    return [case for case in read_cases(folder) if case.kind in kinds and not case.informative and not case.timed]


@only_on("gpu", "gpu-tiny", "emulated-tiny")
@pytest.mark.parametrize("case", golden(), ids=lambda case: case.name)
def test_golden_cases(engines: Backend, case: Case) -> None:
    """Per event, the multiset of changes is Flink's; `conformance` asks that and more, and of the CPU too."""
    events, expected = case.events, case.expected
    found = by_event(*run_all(engines, case.join("per_event"), events, 40))
    for event, told in enumerate(events):
        wrong = difference(expected.get(event, {}), found.pop(event, {}))
        assert not wrong, f"event {event} {told}:\n{wrong}"
    assert not found, f"changes of events that do not exist: {found}"
