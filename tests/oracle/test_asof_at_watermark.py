"""ASOF joins whose output is final, against the law in plain Python, in any micro-batches, on every backend."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.descriptions.by_time import Asof, AsofJoin
from gpu_ops.errors import DescriptionError
from oracle.drive import Backend, Change, Row, by_event, difference, identical, same_state
from oracle.interval_drive import ends, timed_cuts, timed_run
from oracle.interval_rules import END, START, WATERMARK, Clock, Terms, TimedEvent
from oracle.interval_traces import IntervalShape, TimedRecipe, timed_trace

CPU = Backend("cpu")
Shape = tuple[Asof, IntervalShape]
SHAPES: list[Shape] = [
    (Asof(), IntervalShape("left")),
    (Asof("backward", 9, exact=False), IntervalShape("inner", keys="composite")),
    (Asof("forward"), IntervalShape("left", keys="string", null_safe=True)),
    (Asof("forward", 6), IntervalShape("left", clock="us")),
    (Asof("forward", 4, exact=False), IntervalShape("inner", keys="none", clock="mixed")),
    (Asof("nearest"), IntervalShape("left")),
    (Asof("nearest", 7), IntervalShape("inner", keys="mixed_width", clock="int64")),
    (Asof("nearest", 5, exact=False), IntervalShape("left", keys="none")),
    (Asof("nearest", exact=False), IntervalShape("left")),
    (Asof("backward", exact=False), IntervalShape("left", clock="ns")),
]
NAMES = [f"{asof.direction}-{asof.tolerance_ms}-{asof.exact}-{shape.how}-{shape.keys}" for asof, shape in SHAPES]


def described(asof: Asof, shape: IntervalShape) -> AsofJoin:
    """The ASOF join of an interval join's inputs."""
    join = dataclasses.replace(shape, how="inner").join("per_event")
    return AsofJoin(shape.how, join.left, join.right, join.keys, emit="at_watermark", asof=asof)  # type: ignore[arg-type]


class Law:
    """The join, row by row.

    Args:
        asof: direction, tolerance, exactness.
        terms: of an interval join of the same inputs.
        how: inner or left.
    """

    def __init__(self, asof: Asof, terms: Terms, how: str) -> None:
        self.asof, self.terms, self.how = asof, terms, how
        self.clock, self.waiting, self.right = Clock(), list[Row](), list[Row]()
        tolerance = asof.tolerance_ms
        self.tolerance = 1 << 62 if tolerance is None else tolerance * terms.per_ms

    def process(self, event: TimedEvent) -> list[Change]:
        """What this event makes come out."""
        side, kind, value = event
        if kind != WATERMARK:
            (self.waiting, self.right)[side].append(value)
            return []
        if not self.clock.update(side, value):
            return []
        now, found, still = self.clock.now * self.terms.per_ms, list[Change](), list[Row]()
        for row in self.waiting:
            best, final = self._best(row, now)
            if not final:
                still.append(row)
            elif best is not None or self.how == "left":
                found.append(("+I", (*row, *(best or (None,) * self.terms.widths[1]))))
        self.waiting = still
        self._forget(now)
        return found

    def _time(self, side: int, row: Row) -> int:
        return int(row[self.terms.times[side]]) * self.terms.scale[side]

    def _key(self, side: int, row: Row) -> Row | None:
        """A row's key; None for one that nothing equals."""
        values = tuple(row[key[side]] for key in self.terms.keys)
        able = all(v is not None or key[2] for v, key in zip(values, self.terms.keys, strict=True))
        return values if able else None

    def _best(self, row: Row, now: int) -> tuple[Row | None, bool]:
        time, key = self._time(0, row), self._key(0, row)
        if time > now or key is None:
            return None, time <= now
        passed = [r for r in self.right if self._key(1, r) == key and self._time(1, r) <= now]
        least = 0 if self.asof.exact else 1
        before = [r for r in passed if least <= time - self._time(1, r) <= self.tolerance]
        after = [r for r in passed if least <= self._time(1, r) - time <= self.tolerance]
        # of one time the last to come
        last = max(before, key=lambda r: (self._time(1, r), self.right.index(r)), default=None)
        first = min(after, key=lambda r: (self._time(1, r), -self.right.index(r)), default=None)
        if self.asof.direction == "backward":
            return last, True
        limit = time + self.tolerance
        if self.asof.direction == "nearest" and last is not None:
            limit = min(limit, 2 * time - self._time(1, last) - 1)
        if first is not None and self._time(1, first) <= limit:
            return first, True
        return (last if self.asof.direction == "nearest" else None), limit <= now

    def _forget(self, now: int) -> None:
        if self.asof.direction == "forward":
            self.right = [r for r in self.right if self._time(1, r) >= now]
            return
        # of each key the last up to the watermark; where equal times do not match also the last before it, as a left
        # row of just that time may still come, and the last before each row that waits
        passed = [(self._time(1, r), at) for at, r in enumerate(self.right) if self._time(1, r) <= now]
        kept = set()
        for key in {self._key(1, self.right[at]) for _, at in passed}:
            own = [(time, at) for time, at in passed if self._key(1, self.right[at]) == key]
            kept.add(max(own))
            if not self.asof.exact:
                waiting = [self._time(0, row) for row in self.waiting if self._key(0, row) == key]
                waiting = [time for time in waiting if time <= now and self.asof.direction == "nearest"]
                for limit in (now, *waiting):
                    kept.add(max((place for place in own if place[0] < limit), default=(START, -1)))
        self.right = [r for at, r in enumerate(self.right) if (self._time(1, r), at) in kept or self._time(1, r) > now]


def trace(number: int, events: int = 200, **more: Any) -> list[TimedEvent]:
    """Rows no two of which are equal, so that each is known by its values."""
    seed = zlib.crc32(f"asof-{number}".encode())
    made = ends(timed_trace(SHAPES[number % len(SHAPES)][1], TimedRecipe(events, seed, watermarks=0.12, **more)))
    seen: set[Any] = set()
    return [e for e in made if e[1] == WATERMARK or not (e in seen or seen.add(e))]


def check(number: int, events: Sequence[TimedEvent], split: int | Sequence[int], backend: Backend) -> int:
    """As `check_shape`, of one of the shapes."""
    return check_shape(*SHAPES[number % len(SHAPES)], events, split, backend)


def check_shape(
    asof: Asof, shape: IntervalShape, events: Sequence[TimedEvent], split: int | Sequence[int], backend: Backend
) -> int:
    """Every watermark makes come out what the law says; how many rows came out."""
    join, total = described(asof, shape), 0
    terms = dataclasses.replace(shape, how="inner").terms()
    law = Law(asof, terms, shape.how)
    with backend.engine(join) as engine:
        for cut in timed_cuts(join, events, split, shuffle=3):
            found, position, batch = timed_run(engine, cut)
            got, total = by_event(found, position), total + len(found)
            for event in range(cut.start, cut.stop):
                wrong = difference(Counter(law.process(events[event])), got.pop(event, Counter()))
                assert not wrong, f"{asof}, {shape}, event {event} {events[event]}:\n{wrong}"
            assert not got
            able = [row for row in law.right if law._key(1, row) is not None]
            assert batch.metrics["right_state_rows"] == len(able)
            assert batch.metrics["left_state_rows"] == len(law.waiting)
            if law.clock.now != END and None not in law.clock.pair:
                held = asof.tolerance_ms if asof.direction != "backward" else 0
                assert batch.metrics.get("output_watermark_ms") == (None if held is None else law.clock.now - held)
    return total


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("split", [1, 7, 1000], ids=["split1", "split7", "all"])
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=NAMES)
def test_rows_come_out_when_they_are_final(number: int, split: int, backend: Backend) -> None:
    assert check(number, trace(number, 120 if split == 1 else 240), split, backend) >= 5


@pytest.mark.one_in(8, all=2)
@pytest.mark.parametrize("number", [0, 3, 5, 8])
def test_a_hot_key_and_many_late_rows(number: int, backend: Backend) -> None:
    assert check(number, trace(number, 700, keys=30, skew=0.4, disorder=90, late=0.3), (200, 70), backend) > 200


@pytest.mark.slow
@pytest.mark.parametrize("number", range(160))
def test_any_trace(number: int, backend: Backend) -> None:
    late, keys = (0.05, 0.4)[number % 2], (2, 8)[number // 2 % 2]
    check(number, trace(number, 300, late=late, keys=keys), (1, 9, 60), backend)


@pytest.mark.parametrize("number", [0, 2, 5, 8, 9])
def test_a_restart_goes_unnoticed(number: int, backend: Backend) -> None:
    """A snapshot restored into a fresh engine goes on with the same rows, and forgets the same; so does a retry."""
    join, events = described(*SHAPES[number]), trace(number)
    with CPU.engine(join) as whole:
        current = backend
        other = backend.engine(join).__enter__()
        for at, cut in enumerate(timed_cuts(join, events, 25)):
            before = other.snapshot()
            other.prepare(**cut.inputs)
            other.discard()
            same_state(other, before)
            expected, got = timed_run(whole, cut), timed_run(other, cut)
            assert identical(expected[2].changelog, got[2].changelog)
            sizes = [{k: v for k, v in b.metrics.items() if k.endswith("state_rows")} for b in (expected[2], got[2])]
            assert sizes[0] == sizes[1]
            if at % 3 == 1:
                state = other.snapshot()
                other.close()
                current = CPU if current == backend else backend
                other = current.engine(join).__enter__()
                other.restore(state)
        other.close()


def test_of_one_time_the_greatest_sequence_counts(backend: Backend) -> None:
    join = described(Asof(), IntervalShape("left"))
    join = dataclasses.replace(join, right=dataclasses.replace(join.right, sequence_by="b_x"))
    events: list[TimedEvent] = [(1, "+I", (1, 10, x, f"b{x}")) for x in (2, 9, 4)]
    events += [(0, "+I", (1, 12, 0, "a")), (1, WATERMARK, 11), (0, WATERMARK, 11), (1, "+I", (1, 10, 7, "late"))]
    with backend.engine(join) as engine:
        found = [change for cut in timed_cuts(join, ends(events), 100) for change in timed_run(engine, cut)[0]]
    assert [row[-1] for _, row in found] == ["b9"]


@pytest.mark.parametrize(
    ("times", "marks", "exact", "met"),
    [
        (([10], [6, 10]), [5, 11, 30], False, 6),
        (([10], [6, 10, 30]), [5, 11, 40], False, 6),
        (([10], [6, 10]), [10, 30], False, 6),
        (([-1000], [-1001, -900]), [-1005, -800], True, -1001),
        (([-(1 << 62)], [-(1 << 62) - 1, 1 << 62]), [-(1 << 62) - 5, (1 << 62) + 1], True, -(1 << 62) - 1),
        (([0], [-(1 << 63) + 2, (1 << 63) - 2]), [-(1 << 63) + 1, 5, (1 << 63) - 1], True, -(1 << 63) + 2),
    ],
)
def test_the_nearest_row_before_is_kept_while_a_left_row_waits_whatever_the_times(
    times: tuple[list[int], ...], marks: list[int], exact: bool, met: int, backend: Backend
) -> None:
    """Also where the next one stands at the left row's time, and equal times do not match; and before 1970."""
    join = described(Asof("nearest", None, exact), IntervalShape("left", clock="int64"))
    with backend.engine(join) as engine:
        found = []
        for number, mark in enumerate(marks):
            given = []
            for source, own in zip(join.inputs, times, strict=True):
                columns = [[1] * len(own), own, [0] * len(own), [""] * len(own)]
                arrays = [pa.array(values, field.type) for values, field in zip(columns, source.schema, strict=True)]
                given.append(pa.table(arrays, source.schema.names).slice(0, len(own) if number == 0 else 0))
            found += engine.process(*given, watermark=mark)["b_t"].to_pylist()
        assert found == [met]


def test_what_cannot_be() -> None:
    join = described(Asof(), IntervalShape("left"))
    with pytest.raises(DescriptionError, match="with emit='at_watermark' inputs are insert-only"):
        dataclasses.replace(join, right=dataclasses.replace(join.right, unique_key=("b_k",)))
