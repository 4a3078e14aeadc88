"""State TTL of two-way joins by the rules, in any micro-batches, on every backend."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.join import Join
from oracle.drive import ADDS, Backend, Event, Row, by_event, canonical, cuts, difference, fold, run, same_state
from oracle.rules import Residual, Rules
from oracle.traces import HOWS, LAYOUTS, Recipe, Shape, recipe, trace

TTLS = ((900, 400), (250, None), (None, 300), (150, 700), (400, 400))
"""Of left and right, ms; a micro-batch of seven events comes every 60 ms on average."""
SPLITS = {"split1": (1,), "split7": (7,), "all": (1_000_000,), "mixed": (20, 1, 7, 33)}
EVERY = [Shape(how, left, right) for how in HOWS for left in LAYOUTS for right in LAYOUTS]
CPU = Backend("cpu")
JUMPS = (-3_000_000, -200, -90, -1, 1, 90, 200, 3_000_000)
"""Milliseconds that a clock is off, in one micro-batch or in several one after the other."""


def with_ttl(join: Join, ttls: Sequence[int | None]) -> Join:
    left, right = (dataclasses.replace(i, ttl_ms=t) for i, t in zip(join.inputs, ttls, strict=True))
    return dataclasses.replace(join, left=left, right=right)


class Net(Rules):
    """The operator by micro-batches: what comes and goes again within one writes none of the other input's rows."""

    def net(self, events: Sequence[Event], now: int) -> list[Any]:
        """What the net change of a micro-batch, deaths before births, makes the operator say."""
        self.expire(now)
        comes: list[Event] = []
        goes: list[Event] = []
        touched = []
        for side in (0, 1):
            unique = self.join.inputs[side].unique_key is not None
            after: dict[Row, list[Row]] = {}
            for _, kind, values in (e for e in events if e[0] == side):
                row = tuple(canonical(v) for v in values)
                identity = tuple(row[i] for i in self._identity[side])
                entry = self.state[side].get(identity)
                rows = after.setdefault(identity, [entry.row] * len(entry.counts) if entry else [])
                if kind in ADDS:
                    rows[:] = [row] if unique else [*rows, row]
                elif rows:
                    rows.pop()
                else:
                    self.unknown[side] += 1
                    continue
                touched.append((side, identity))
            for identity, rows in after.items():
                entry = self.state[side].get(identity)
                before = Counter([entry.row] * len(entry.counts) if entry else [])
                goes += [(side, "-D", row) for row in (before - Counter(rows)).elements()]
                comes += [(side, "+I", row) for row in (Counter(rows) - before).elements()]
        found = [change for event in (*goes, *comes) for change in self.process(event, now)]
        for side, identity in touched:
            if identity in self.state[side]:
                self.state[side][identity].written = now
        return found


def check(
    shape: Shape,
    number: int,
    emit: Emit,
    split: Sequence[int],
    backend: Backend,
    *,
    made: Recipe,
    restarts: bool,
    ttls: Sequence[int | None],
    jumps: bool = False,
) -> int:
    """Every event (``per_batch``: every micro-batch) says what the rules say; as many rows are kept; what expired."""
    join = with_ttl(shape.join(emit), ttls)
    rules = Net(join, shape.residual)
    given = trace(shape, made)
    rng = random.Random(number)
    clock, expired = 0, [0, 0]
    output: Counter[Row] = Counter()
    engine = backend.engine(join).__enter__()
    for cut in cuts(join, given, split, shuffle=number):
        clock += rng.choice((0, 1, 8, 9, 25)) * max(1, min(cut.stop - cut.start, 33)) * 8 // 7
        now = clock + (rng.choice(JUMPS) if jumps and rng.random() < 0.2 else 0)
        batch = given[cut.start : cut.stop]
        if rng.random() < 0.1:  # what is taken back has refreshed nothing, and nothing has expired of it
            engine.prepare(**cut.inputs, clock_ms=now)
            engine.discard()
        if emit == "per_batch":
            want = fold(rules.net(batch, now))
            found, _, told = run(engine, cut, clock_ms=now)
            wrong = difference(want, fold(found))
            assert not wrong, f"{shape} {number}, events {cut.start} to {cut.stop - 1} at {now}:\n{wrong}"
            assert len(found) == sum(map(abs, want.values())), "nothing comes and goes within a micro-batch"
        else:
            expected = {n: Counter(rules.process(event, now)) for n, event in enumerate(batch, cut.start)}
            found, position, told = run(engine, cut, clock_ms=now)
            got = by_event(found, position)
            for event, said in expected.items():
                wrong = difference(said, got.pop(event, {}))
                assert not wrong, f"{shape} {number}, event {event} {given[event]} at {now}:\n{wrong}"
            assert not got
        fold(found, output)
        assert all(n > 0 for n in output.values()), f"{shape} {number}, to {cut.stop - 1}: taken back, but never said"
        for side, name in enumerate(("left", "right")):
            expired[side] += told.metrics[f"{name}_expired"]
            assert told.metrics[f"{name}_state_rows"] == len(rules.table(side)), f"{shape} {number} at {now}"
        if restarts and rng.random() < 0.3:
            state = engine.snapshot()
            engine.close()
            engine = backend.engine(join).__enter__()
            engine.restore(state)
            same_state(engine, state)
    engine.close()
    assert expired == rules.expired
    return sum(expired)


def drawn(number: int) -> Shape:
    rng = random.Random(f"ttl-{number}")
    residual: Sequence[tuple[Residual, ...]] = ((), (("a_x", ">", "b_x"),), (("a_d", "<=", "b_d"),))
    how = rng.choice(HOWS)
    null_aware = how == "null_aware_anti"
    return Shape(
        how,
        rng.choice(LAYOUTS),
        rng.choice(LAYOUTS),
        "int" if null_aware else rng.choice(("int", "string", "double", "composite", "mixed_width")),
        null_safe=how not in ("semi", "anti", "null_aware_anti") and rng.random() < 0.25,
        residual=rng.choice(residual),
    )


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("number", range(len(EVERY)), ids=[str(s) for s in EVERY])
def test_ttl_by_the_rules(number: int, backend: Backend) -> None:
    emit: Emit = ("per_event", "per_batch")[number % 2]
    split = list(SPLITS.values())[number // 2 % 4]
    events = 40 if split == (1,) else 120
    check_number(EVERY[number], number, emit, split, backend, events=events)


def check_number(shape: Shape, number: int, emit: Emit, split: Sequence[int], backend: Backend, *, events: int) -> int:
    made = recipe(shape, events, number, live=16, malformed=number % 2 == 1)
    restarts, ttls = number % 3 == 0, TTLS[number % len(TTLS)]
    return check(shape, number, emit, split, backend, made=made, restarts=restarts, ttls=ttls)


@pytest.mark.one_in(40, all=16)
@pytest.mark.parametrize("number", range(len(EVERY)), ids=[str(s) for s in EVERY])
def test_ttl_under_a_clock_that_jumps(number: int, backend: Backend) -> None:
    """A row's time is the clock that its micro-batch was given: no jump widens what is kept after it."""
    emit: Emit = ("per_event", "per_batch")[number % 2]
    split = ((1,), (7,), (20, 1, 7, 33))[number // 2 % 3]
    made = recipe(EVERY[number], 40 if split == (1,) else 120, number, live=16, malformed=False)
    ttls = TTLS[number % len(TTLS)]
    check(EVERY[number], number, emit, split, backend, made=made, restarts=number % 2 == 0, ttls=ttls, jumps=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(150))
def test_ttl_of_random_joins(number: int, backend: Backend) -> None:
    emit: Emit = ("per_event", "per_batch")[number % 2]
    split = list(SPLITS.values())[number // 2 % 4]
    expired = check_number(drawn(number), number, emit, split, backend, events=400)
    assert expired or split == SPLITS["all"]
