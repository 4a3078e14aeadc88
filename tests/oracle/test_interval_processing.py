"""Interval joins by processing time: Flink's rules with the clock for the watermark and for every row's time."""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import DescriptionError
from oracle.drive import Backend, Change, Event, Row, changes, difference, tables
from oracle.interval_rules import Terms
from oracle.interval_traces import HOWS

pytestmark = pytest.mark.one_in(6)

BOUNDS = ((-20, 10), (-12, 0), (0, 25), (3, 15), (-9, -2), (0, 0))
WIDTH = 3


def description(how: str, bounds: tuple[int, int], emit: Emit) -> IntervalJoin:
    sides = []
    for name, p in (("A", "a"), ("B", "b")):
        columns = [(f"{p}_k", pa.int64()), (f"{p}_x", pa.int64()), (f"{p}_v", pa.string())]
        sides.append(Input(name, pa.schema(columns)))
    return IntervalJoin(
        how=how,  # type: ignore[arg-type]
        left=sides[0],
        right=sides[1],
        keys=(Key("a_k", "b_k"),),
        where="A.a_x >= B.b_x",
        emit=emit,
        interval=Interval(*bounds, time="processing"),
    )


def batches(seed: int) -> Iterator[tuple[int, list[Event]]]:
    """Clock readings that at times stand still, and the rows that come then."""
    rng, clock = random.Random(seed), 1000
    for number in range(60):
        clock += rng.choice((0, 1, 1, 3, 8, 30))
        rows: list[Event] = []
        for place in range(rng.choice((0, 1, 2, 6))):
            side, key = rng.randrange(2), rng.choice((None, 1, 1, 2, 3))
            rows.append((side, "+I", (key, rng.randrange(4), f"{'ab'[side]}{number}.{place}")))
        yield clock, rows


@pytest.mark.one_in(12, all=6)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_every_event_by_the_rules(how: str, bounds: tuple[int, int], emit: Emit, backend: Backend) -> None:
    join = description(how, bounds, emit)
    # the same rows with the clock behind them
    rules = Terms(
        how, ((0, 0, False),), (WIDTH, WIDTH), (WIDTH + 1, WIDTH + 1), *bounds, residual=((1, ">=", 1),)
    ).rules()
    said = 0
    with backend.engine(join) as engine:
        for clock, events in batches(HOWS.index(how)):
            want = [(-1, c) for c in rules.advance(clock, clock)]
            for place, (side, kind, row) in enumerate(events):
                want += [(place, c) for c in rules.process((side, kind, (*row, clock)))]
            (left, left_order), (right, right_order) = tables(join, events)
            batch = engine.prepare(left, right, left_order=left_order, right_order=right_order, clock_ms=clock)
            engine.commit()
            found = list(zip(np.asarray(batch.sequence).tolist(), changes(batch.changelog), strict=True))
            wrong = difference(Counter((e, timeless(c)) for e, c in want), Counter(found))
            assert not wrong, f"at {clock}, {events}:\n{wrong}"
            said += len(found)
    assert said or (how, bounds) == ("inner", (0, 0))


class RowByRow:
    """A join by processing time, where each row's time is the clock that came with it, wherever that goes.

    A row is there while another one of the present clock could still match it; one that no later clock can match meets
    only what came before it.
    """

    def __init__(self, how: str, bounds: tuple[int, int]) -> None:
        self.how, (self.lower, self.upper) = how, bounds
        self.keep = self.upper, -self.lower
        self.rows: list[list[list]] = [[], []]  # type: ignore[type-arg]  # row, time, whether it has met a match

    def advance(self, clock: int) -> list[Change]:
        said = []
        for side in (0, 1):
            over = [entry for entry in self.rows[side] if entry[1] + self.keep[side] < clock]
            self.rows[side] = [entry for entry in self.rows[side] if entry[1] + self.keep[side] >= clock]
            said += [self._alone(side, entry[0]) for entry in over if not entry[2] and self._pads(side)]
        return said

    def process(self, side: int, row: Row, clock: int) -> list[Change]:
        said, own = [], [row, clock, False]
        for other in list(self.rows[1 - side]):
            (left, lt, _), (right, rt, _) = (own, other) if side == 0 else (other, own)
            if left[0] is None or left[0] != right[0] or left[1] < right[1]:
                continue
            if not self.lower <= rt - lt <= self.upper:
                continue
            first = own if side == 0 else other
            if self.how not in ("semi", "anti"):
                said.append(("+I", (*left, *right)))
            elif self.how == "semi" and not first[2]:
                said.append(("+I", left))
            if self.how in ("semi", "anti") and side == 1:
                self.rows[0].remove(other)
            own[2] = other[2] = True
        if self.keep[side] > 0 and not (side == 0 and own[2] and self.how in ("semi", "anti")):
            self.rows[side].append(own)
        elif not own[2] and self.keep[side] <= 0 and self._pads(side):
            said.append(self._alone(side, row))
        return said

    def _pads(self, side: int) -> bool:
        return self.how in (("left", "full", "anti"), ("right", "full"))[side]

    def _alone(self, side: int, row: Row) -> Change:
        nothing = (None,) * WIDTH
        return "+I", row if self.how == "anti" else (*row, *nothing) if side == 0 else (*nothing, *row)


def jumping(seed: int, split: int) -> Iterator[tuple[int, list[Event]]]:
    """`batches` under a clock that is ahead or behind now and then, in parts of so many rows, all at the same clock."""
    rng, off, offset = random.Random(f"jumps-{seed}"), 0, 0
    for clock, events in batches(seed):
        if not off and rng.random() < 0.15:
            off, offset = rng.choice((1, 1, 4)), rng.choice((-900, -25, -4, 6, 40, 1_000_000))
        now, off = clock + (offset if off else 0), max(0, off - 1)
        for start in range(0, max(1, len(events)), split):
            yield now, events[start : start + split]


@pytest.mark.one_in(72, all=18)
@pytest.mark.parametrize("split", [1, 2, 100])
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_a_clock_that_jumps_widens_nothing(
    how: str, bounds: tuple[int, int], emit: Emit, split: int, backend: Backend
) -> None:
    check_jumps(description(how, bounds, emit), split, backend, BOUNDS.index(bounds))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("GPU_JOIN_CLOCKS", "400"))))
def test_any_clock(number: int, backend: Backend) -> None:
    rng = random.Random(f"clock-{number}")
    join = description(rng.choice(HOWS), rng.choice(BOUNDS), rng.choice(("per_event", "per_batch")))
    check_jumps(join, rng.choice((1, 2, 3, 100)), backend, number)


def check_jumps(join: IntervalJoin, split: int, backend: Backend, seed: int) -> None:
    """Each micro-batch says what the rules do; at times it is discarded first, or goes on from a snapshot."""
    how, bounds, rng = join.how, (join.interval.lower_ms, join.interval.upper_ms), random.Random(seed)
    rules = RowByRow(how, bounds)
    engine = backend.engine(join).__enter__()
    for clock, events in jumping(seed, split):
        want = rules.advance(clock)
        for side, _, row in events:
            want += rules.process(side, row, clock)
        (left, left_order), (right, right_order) = tables(join, events)
        if rng.random() < 0.1:
            engine.prepare(left, right, clock_ms=rng.choice((1, clock, clock + 10_000_000)))
            engine.discard()
        found = engine.process(left, right, left_order=left_order, right_order=right_order, clock_ms=clock)
        wrong = difference(Counter(want), Counter(changes(found)))
        assert not wrong, f"{how} {bounds} {join.emit}, seed {seed}, at {clock}, {events}:\n{wrong}"
        sizes = engine.state_size()
        assert [sizes["left_rows"], sizes["right_rows"]] == [len(rows) for rows in rules.rows]
        if rng.random() < 0.1:
            state = engine.snapshot()
            engine.close()
            engine = backend.engine(join).__enter__()
            engine.restore(state)
    engine.close()


def timeless(change: Change) -> Change:
    """A change without the clock readings."""
    kind, row = change
    own: Row = row[:WIDTH] + row[WIDTH + 1 : -1]
    return kind, own


def test_the_clock_is_all_there_is() -> None:
    """The rules have no event time to go by, so neither may the description."""
    join = description("full", (0, 1), "per_event")
    with pytest.raises(DescriptionError, match="event_time= has no place here"):
        dataclasses.replace(join, left=dataclasses.replace(join.left, event_time="a_x"))
