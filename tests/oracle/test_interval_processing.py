"""Interval joins by processing time: Flink's rules with the clock for the watermark and for every row's time."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.by_time import Interval, IntervalJoin
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import DescriptionError
from oracle.drive import Backend, Change, Event, Row, changes, difference, tables
from oracle.interval_rules import Terms
from oracle.interval_traces import HOWS

pytestmark = pytest.mark.one_in(3)

BOUNDS = ((-20, 10), (-12, 0), (0, 25), (3, 15), (-9, -2), (0, 0))
WIDTH = 3


def description(how: str, bounds: tuple[int, int], emit: Emit) -> Join:
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


@pytest.mark.one_in(6, all=3)
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
