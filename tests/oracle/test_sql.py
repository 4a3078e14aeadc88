"""The folded changelog is a from-scratch SQL join of the folded inputs, after every micro-batch."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_ops.descriptions.description import Emit
from oracle.drive import Backend, cuts
from oracle.sql import reference
from oracle.traces import HOWS, LAYOUTS, Recipe, Shape, recipe, trace

pytestmark = pytest.mark.one_in(8)

EMITS: tuple[Emit, ...] = ("per_event", "per_batch")


def check(
    shape: Shape,
    made: Recipe,
    split: int | Sequence[int],
    backend: Backend,
    emit: Emit,
    *,
    shuffle: int | None = None,
    large: bool = False,
) -> dict[str, Any]:
    """Run a trace and compare after every micro-batch; what it came to."""
    events = trace(shape, made)
    seen: dict[str, Any] = {"rows": 0, "largest": 0, "unknown": [0, 0]}
    view = reference(shape.join(emit), large=large)
    with contextlib.closing(view), backend.engine(view.join) as engine:
        for cut in cuts(engine.description, events, split, shuffle=shuffle):
            view.change(events[cut.start : cut.stop])
            batch = engine.prepare(**cut.inputs)
            engine.commit()
            view.fold(batch.changelog)
            wrong = view.differences()
            assert not wrong, f"{shape}: after events {cut.start} to {cut.stop - 1}:\n{wrong}"
            if emit == "per_batch":
                both = view.both_ways()
                assert not both, f"{shape}: events {cut.start} to {cut.stop - 1} add and remove {both}"
            seen["rows"] += batch.changelog.num_rows
            seen["largest"] = max(seen["largest"], view.size())
            for side, name in enumerate(("left", "right")):
                seen["unknown"][side] += batch.metrics[f"{name}_unknown_retractions"]
    assert seen["unknown"] == [i.unknown for i in view.inputs]
    return seen


def seed(*parts: object) -> int:
    """A number that depends on nothing but the parameters of the test."""
    return zlib.crc32("-".join(map(str, parts)).encode())


def by_turns(backend: Backend, number: int) -> Emit:
    """One of the emits, another one with tiny segments; the long runs have all combinations."""
    return EMITS[(number + backend.name.endswith("-tiny")) % 2]


BIG = [Shape(how, layout, layout) for how in HOWS for layout in LAYOUTS]


@pytest.mark.one_in(32, all=16)
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_twenty_thousand_events(shape: Shape, backend: Backend) -> None:
    """Every join type and state layout, malformed input included."""
    big(shape, backend, by_turns(backend, BIG.index(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_twenty_thousand_events_both_emits(shape: Shape, emit: Emit, backend: Backend) -> None:
    big(shape, backend, emit)


def big(shape: Shape, backend: Backend, emit: Emit) -> None:
    made = recipe(shape, 20_000, seed=7, live=1500, malformed=True)
    seen = check(shape, made, (1000, 500, 750), backend, emit, large=True)
    assert min(seen["unknown"]) > 100
    assert seen["largest"] > (10 if shape.how == "null_aware_anti" else 300)
    assert seen["rows"] > 1_000


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
@pytest.mark.parametrize("how", HOWS)
def test_layouts(how: str, layouts: tuple[Any, Any], backend: Backend) -> None:
    """All pairs of state layouts, in micro-batches of one to fifty events, given in any order."""
    shape = Shape(how, *layouts)
    number = seed(how, layouts)
    made = recipe(shape, 160, number, live=25, malformed=number % 3 > 0)
    check(shape, made, (50, 1, 17, 30, 2), backend, by_turns(backend, number), shuffle=number)


RESIDUAL = (("a_x", ">", "b_x"),)
VARIANTS = [
    *(Shape(how, "multiset", "unique_key", keys="string") for how in HOWS),
    *(Shape(how, "unique_key", "multiset", keys="double") for how in HOWS),
    *(Shape(how, LAYOUTS[2], LAYOUTS[2], keys="double") for how in HOWS),
    *(Shape(how, "multiset", "multiset", keys="double", null_safe=True) for how in HOWS[:6]),
    *(Shape(how, LAYOUTS[2], "multiset", keys="composite") for how in HOWS),
    *(Shape(how, "multiset", "unique_key", keys="composite", null_safe=True) for how in HOWS[:6]),
    *(Shape(how, "unique_key", LAYOUTS[2], keys="mixed_width") for how in HOWS),
    *(Shape(how, "multiset", "multiset", residual=RESIDUAL) for how in HOWS),
    *(Shape(how, "unique_key", "unique_key", residual=(("a_d", "<=", "b_d"),)) for how in HOWS),
    *(Shape(how, LAYOUTS[2], "unique_key", residual=(("a_s", "<>", "b_s"), *RESIDUAL)) for how in HOWS),
    *(Shape(how, "multiset", "unique_key", keys="none") for how in HOWS[:6]),
    *(Shape(how, "unique_key", "multiset", keys="none", residual=RESIDUAL) for how in HOWS[:6]),
]


@pytest.mark.parametrize("shape", VARIANTS, ids=str)
def test_keys_and_conditions(shape: Shape, backend: Backend) -> None:
    """Strings, NaN and -0.0, composite, null-safe and no keys; residual conditions."""
    number = seed(shape)
    made = recipe(shape, 160, number, live=25, malformed=number % 2 > 0)
    check(shape, made, (50, 3, 17, 1, 30), backend, by_turns(backend, number), shuffle=number)


@pytest.mark.parametrize("layouts", [("multiset", "multiset"), ("unique_key", LAYOUTS[2])], ids="-".join)
@pytest.mark.parametrize("how", HOWS)
def test_one_event_at_a_time(how: str, layouts: tuple[Any, Any], backend: Backend) -> None:
    shape = Shape(how, *layouts)
    made = recipe(shape, 60, seed(how), live=10, malformed=True)
    check(shape, made, 1, backend, by_turns(backend, seed(how, layouts)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("shape", [*BIG, *VARIANTS], ids=str)
def test_many_seeds(shape: Shape, number: int, backend: Backend) -> None:
    made = recipe(shape, 1500, 1000 + number, live=30, malformed=number % 2 > 0)
    sizes = ((1, 2, 3), (7,), (400, 30), (1500,))[number % 4]
    check(shape, made, sizes, backend, EMITS[number // 2 % 2], shuffle=number)
