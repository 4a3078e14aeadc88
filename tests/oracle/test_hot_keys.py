"""Keys of many rows: what comes out is what the rules say, and costs the rows that change, not their pairs."""

from __future__ import annotations

import dataclasses
import random
import resource
import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops import Input, Join, JoinEngine, Key
from gpu_ops.descriptions.description import Emit
from gpu_ops.operators import keyed
from oracle.drive import Backend, by_event, cuts, fold, identical, run_all, same_after_discards, same_after_restarts
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
    check(shape, number, emit, split, backend, made, restarts=number % 3 == 0, ttls=ttls)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=map(str, SHAPES))
def test_hot_keys_by_the_rules(number: int, backend: Backend, switch: str) -> None:
    del switch
    checked(SHAPES[number], number, backend, (None, None))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=map(str, SHAPES))
def test_hot_keys_that_expire_by_the_rules(number: int, backend: Backend, switch: str) -> None:
    del switch
    checked(SHAPES[number], number, backend, TTLS[number % len(TTLS)])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(600))
def test_random_hot_keys_by_the_rules(number: int, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"hot-{number}")
    monkeypatch.setattr(keyed, "_PAIRS_A_CHANGE", 0)
    monkeypatch.setattr(keyed, "_FEW_PAIRS", rng.choice((0, 0, 300, 2000)))
    checked(rng.choice(SHAPES), rng.randrange(1 << 20), backend, rng.choice([*TTLS, *[(None, None)] * 5]))


@pytest.mark.parametrize("shape", SHAPES[:: len(LAYOUTS)], ids=str)
def test_restarts_discards_and_splits_of_hot_keys(shape: Shape, backend: Backend, switch: str) -> None:
    del switch
    for emit in ("per_event", "per_batch"):
        join = shape.join(emit)
        parts = list(cuts(join, trace(shape, hot(1, events=160)), 40))
        same_after_restarts(backend, join, parts)
        same_after_discards(backend, join, parts)


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
