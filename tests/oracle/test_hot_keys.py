"""Keys of many rows: what comes out is what the rules say, and costs the rows that change, not their pairs."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops import Input, Join, JoinEngine, Key
from gpu_ops.descriptions.description import Emit
from gpu_ops.errors import StateError
from gpu_ops.operators import keyed
from oracle.drive import Backend, cuts, identical, same_after_discards, same_after_restarts
from oracle.test_ttl_traces import SPLITS, TTLS, check
from oracle.traces import HOWS, LAYOUTS, Recipe, Shape, trace

OF_PAIRS = [how for how in HOWS if how != "inner"]
SHAPES = [
    *(Shape(how, left, right) for how in OF_PAIRS for left in LAYOUTS[:2] for right in LAYOUTS),
    *(Shape(how, keys="double", null_safe=True) for how in OF_PAIRS[:-1]),
    *(Shape(how, "multiset", "unique_key", keys="composite", null_safe=True) for how in OF_PAIRS[:-1]),
    *(Shape(how, "unique_key", "multiset", keys="mixed_width") for how in OF_PAIRS),
    *(Shape(how, keys="none") for how in OF_PAIRS[:-1]),
]
SWITCHES = {"at once": 0, "on the way": 1500, "never": 1 << 40}
"""When matches are counted by key: at this many candidates of a micro-batch."""
LEFT = pa.schema([("id", pa.int64()), ("k", pa.int64())])
RIGHT = pa.schema([("rk", pa.int64()), ("v", pa.int64())])


def hot(number: int, *, events: int = 260) -> Recipe:
    """Two or three keys, fifty rows and more of each on either side; few of them without a key."""
    return Recipe(events, number, live=150, fan_out=(75, 50)[number % 2], null_keys=0.01, malformed=number % 2 == 1)


@pytest.fixture(params=SWITCHES)
def switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(keyed, "_PAIRS_A_CHANGE", 0)
    monkeypatch.setattr(keyed, "_FEW_PAIRS", SWITCHES[request.param])
    return str(request.param)


def checked(shape: Shape, number: int, backend: Backend, ttls: tuple[int | None, int | None]) -> None:
    emit: Emit = ("per_event", "per_batch")[number % 2]
    split = list(SPLITS.values())[number // 2 % 4]
    made = hot(number, events=150 if split == (1,) else 260)
    check(shape, number, emit, split, backend, made=made, restarts=number % 3 == 0, ttls=ttls)


@pytest.mark.one_in(48, all=24)
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=map(str, SHAPES))
def test_hot_keys_by_the_rules(number: int, backend: Backend, switch: str) -> None:
    del switch
    checked(SHAPES[number], number, backend, (None, None))


@pytest.mark.one_in(96, all=48)
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=map(str, SHAPES))
def test_hot_keys_that_expire_by_the_rules(number: int, backend: Backend, switch: str) -> None:
    del switch
    checked(SHAPES[number], number, backend, TTLS[number % len(TTLS)])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_random_hot_keys_by_the_rules(number: int, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"hot-{number}")
    monkeypatch.setattr(keyed, "_PAIRS_A_CHANGE", 0)
    monkeypatch.setattr(keyed, "_FEW_PAIRS", rng.choice((0, 0, 300, 2000)))
    checked(rng.choice(SHAPES), rng.randrange(1 << 20), backend, rng.choice([*TTLS, *[(None, None)] * 5]))


@pytest.mark.one_in(32, all=16)
@pytest.mark.parametrize("shape", SHAPES[:: len(LAYOUTS)], ids=str)
def test_restarts_discards_and_splits_of_hot_keys(shape: Shape, backend: Backend, switch: str) -> None:
    del switch
    for emit in ("per_event", "per_batch"):
        join = shape.join(emit)
        parts = list(cuts(join, trace(shape, hot(1, events=160)), 40))
        same_after_restarts(backend, join, parts)
        same_after_discards(backend, join, parts)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("shape", SHAPES[:: len(LAYOUTS)], ids=str)
def test_rows_do_not_depend_on_how_matches_are_counted(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a restart, which forgets it, gives the last answer again to the row."""
    for emit in ("per_event", "per_batch"):
        parts = list(cuts(shape.join(emit), trace(shape, hot(2)), 50))
        found = []
        for few in (0, 1 << 40):
            monkeypatch.setattr(keyed, "_PAIRS_A_CHANGE", 0)
            monkeypatch.setattr(keyed, "_FEW_PAIRS", few)
            with Backend("cpu").engine(shape.join(emit)) as engine:
                found.append([engine.process(**part.inputs) for part in parts])
        assert all(identical(a, b) for a, b in zip(*found, strict=True))


# --- what it costs ------------------------------------------------------------------------------


def engine(how: str, emit: Emit, where: str | None = None, **options: Any) -> JoinEngine:
    null_aware = how == "null_aware_anti"
    kind: Any = "anti" if null_aware else how
    inputs = Input("l", LEFT, row_kind="row_kind"), Input("r", RIGHT, row_kind="row_kind")
    join = Join(kind, *inputs, (Key("k", "rk"),), where=where, emit=emit, null_aware=null_aware)
    return JoinEngine(join, "cpu", **options)


def rows(schema: pa.Schema, first: int, n: int, kind: str = "+I") -> pa.Table:
    """Rows of one key, told apart by a number."""
    numbers, zero = np.arange(first, first + n), np.zeros(n, np.int64)
    columns = [numbers, zero] if schema is LEFT else [zero, numbers]
    return pa.table([*map(pa.array, columns), pa.array([kind] * n)], names=[*schema.names, "row_kind"])


def cost(how: str, emit: Emit, n: int) -> tuple[float, int, int]:
    """CPU seconds, the peak of memory, and rows that come out, of n rows and n rows of one key."""
    made, inputs = engine(how, emit), (rows(LEFT, 0, n), rows(RIGHT, 0, n))
    tracemalloc.start()
    start = time.process_time()
    out = made.process(inputs[0], None).num_rows + made.process(None, inputs[1]).num_rows
    if emit == "at_end":
        out += made.finish().num_rows
    took, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    made.close()
    return took, peak, out


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_batch", "per_event", "at_end"])
@pytest.mark.parametrize("how", ["semi", "anti", "null_aware_anti"])
def test_a_hot_key_costs_its_rows(how: str, emit: Emit) -> None:
    """20,000 by 20,000 rows of one key: 400 million pairs, of which none is looked at."""
    cost(how, emit, 100)
    one, double = (min((cost(how, emit, n) for _ in range(3)), key=lambda c: c[0]) for n in (20_000, 40_000))
    assert double[2] == 2 * one[2]
    assert double[0] < 3.2 * max(one[0], 0.02), "twice as many rows, four times the time"
    assert double[1] < 2.5 * one[1]
    assert double[1] < 64 << 20


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
@pytest.mark.parametrize("how", ["semi", "anti", "null_aware_anti"])
def test_a_row_of_a_key_that_has_matches_costs_one_row(how: str, emit: Emit) -> None:
    took = {}
    for n in (20_000, 160_000):
        made = engine(how, emit)
        made.process(rows(LEFT, 0, n), None)
        made.process(None, rows(RIGHT, 0, n))
        start = time.process_time()
        for number in range(20):
            assert made.process(None, rows(RIGHT, n + number, 1)).num_rows == 0
            assert made.process(None, rows(RIGHT, number, 1, "-D")).num_rows == 0
        took[n] = time.process_time() - start
        assert made.process(rows(LEFT, n, 1), None).num_rows == (how == "semi")
    assert took[160_000] < 4 * max(took[20_000], 0.02)


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_batch", "per_event", "at_end"])
@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_pairs_of_a_hot_key_cost_what_comes_out(how: str, emit: Emit) -> None:
    cost(how, emit, 100)
    one, double = (min((cost(how, emit, n) for _ in range(2)), key=lambda c: c[0]) for n in (400, 800))
    assert double[0] / double[2] < 2 * max(one[0], 0.02) / one[2]
    assert double[1] / double[2] < 1.6 * one[1] / one[2]


@pytest.mark.one_in(12, all=6)
@pytest.mark.parametrize("emit", ["per_batch", "per_event", "at_end"])
@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
def test_pairs_that_a_condition_looks_at_are_made_in_pieces(how: str, emit: Emit) -> None:
    """9 million candidates, 3,000 matches: all at once they took half a gigabyte."""
    tracemalloc.start()
    made, n = engine(how, emit, "l.id = r.v"), 3000
    found = [made.process(rows(LEFT, 0, n), None), made.process(None, rows(RIGHT, 0, n))]
    found += [made.finish()] if emit == "at_end" else []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    last = found[-1]
    assert last.num_rows == {"inner": n, "semi": n, "left": n if emit == "at_end" else 2 * n}.get(
        how, 0 if emit == "at_end" else n
    )
    assert peak < 200 << 20


@pytest.mark.parametrize("emit", ["per_batch", "per_event", "at_end"])
@pytest.mark.parametrize("how", ["inner", "left", "full"])
def test_an_output_that_does_not_fit_is_refused_before_anything_changes(how: str, emit: Emit) -> None:
    """Not killed: it says how many rows there would be, and goes on with fewer."""
    made = engine(how, emit, memory_limit=32 << 20)
    made.process(rows(LEFT, 0, 2000), None)
    before = made.snapshot()
    refused = r"output of [\d,]+ rows or more.*memory_limit is 32.0 MiB.*smaller micro-batches"
    if emit == "at_end":
        made.process(None, rows(RIGHT, 0, 2000))
        with pytest.raises(StateError, match=refused):
            made.finish()
        return
    with pytest.raises(StateError, match=refused):
        made.process(None, rows(RIGHT, 0, 2000))
    after = made.snapshot()
    assert all(after[name].equals(before[name]) for name in before)
    assert made.process(None, rows(RIGHT, 0, 2)).num_rows == 4000 + (0 if how == "inner" else 2000)


def test_an_output_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.memory.available_memory", lambda: 100 << 20)
    made = engine("inner", "per_batch")
    made.process(rows(LEFT, 0, 2000), None)
    with pytest.raises(StateError, match=r"this machine has 100.0 MiB left"):
        made.process(None, rows(RIGHT, 0, 2000))
    assert made.process(None, rows(RIGHT, 0, 2)).num_rows == 4000
