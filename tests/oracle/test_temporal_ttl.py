"""State TTL of temporal joins: by Flink's rules at any clock, on every backend; asked of the live Flink, too."""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from oracle import flink
from oracle.drive import Backend, by_event, difference, same_state
from oracle.interval_drive import ends, timed_cuts, timed_run
from oracle.interval_rules import TimedEvent
from oracle.interval_traces import IntervalShape, TimedRecipe, timed_trace
from oracle.temporal_rules import TemporalRules, temporal_join, with_kinds

TTL = 1500
SHAPES = [
    IntervalShape("left"),
    IntervalShape("inner", keys="composite", residual=(("a_x", ">", "b_x"),)),
    IntervalShape("left", keys="string", null_safe=True, clock="us", late="tag"),
    IntervalShape("left", keys="mixed_width", clock="int64", late="drop"),
]


def trace(shape: IntervalShape, seed: int, events: int = 300) -> list[TimedEvent]:
    recipe = TimedRecipe(events, seed, keys=12, late=0.2, disorder=20, watermarks=(0.05, 0.2)[seed % 2])
    return ends(with_kinds(timed_trace(shape, recipe), seed))


class Ticks:
    """A clock that now and then stands still, and now and then moves by more than a TTL; or is off for a time."""

    def __init__(self, seed: int, *, jumps: bool = False) -> None:
        self.choice, self.now, self.jumps = random.Random(seed), 0, jumps

    def next(self) -> int:
        self.now += self.choice.choice((0, 0, 0, 0, 1, 500, 500, 1499, 1500, 2250, 2249, 4000))
        off = self.jumps and self.choice.random() < 0.2
        return self.now + (self.choice.choice((-3_000_000, -2000, -700, 700, 3_000_000)) if off else 0)


def check(
    shape: IntervalShape,
    events: Sequence[TimedEvent],
    split: int | Sequence[int],
    backend: Backend,
    *,
    jumps: bool = False,
) -> int:
    """Every event makes come out what the transcription does; how many changes the TTL made."""
    join = temporal_join(shape, ttl=TTL)
    rules, forever, other = TemporalRules(shape.terms(), TTL), TemporalRules(shape.terms()), 0
    ticks = Ticks(len(events), jumps=jumps)
    with backend.engine(join) as engine:
        for cut in timed_cuts(join, events, split, shuffle=3):
            now = ticks.next()
            rules.tick(now)
            want = {n: rules.process(event) for n, event in enumerate(events[cut.start : cut.stop], cut.start)}
            kept = [forever.process(event) for event in events[cut.start : cut.stop]]
            other += sum(Counter(a) != Counter(b) for a, b in zip(want.values(), kept, strict=True))
            found, position, batch = timed_run(engine, cut, clock_ms=now)
            got = by_event(found, position)
            for event in sorted({*want, *got}):
                wrong = difference(Counter(want.get(event, ())), got.get(event, {}))
                assert not wrong, f"{shape}, events {cut.start} to {cut.stop - 1}, event {event}:\n{wrong}"
            waiting = sum(len(key.left) for key in rules.keys.values())
            assert batch.metrics["left_state_rows"] == waiting
        size = engine.state_size()
        assert (size["left_rows"], size["right_rows"] > 0) == (0, any(key.right for key in rules.keys.values()))
    return other


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("split", [1, 7, (40, 3, 90)], ids=["split1", "split7", "more"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_event_by_the_rules(shape: IntervalShape, split: int | tuple[int, ...], backend: Backend) -> None:
    assert check(shape, trace(shape, 5, 120 if split == 1 else 300), split, backend) > 0


@pytest.mark.one_in(12, all=6)
@pytest.mark.parametrize("split", [1, 7, (40, 3, 90)], ids=["split1", "split7", "more"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_clock_that_jumps(shape: IntervalShape, split: int | tuple[int, ...], backend: Backend) -> None:
    check(shape, trace(shape, 6, 120 if split == 1 else 300), split, backend, jumps=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_any_trace(number: int, backend: Backend) -> None:
    check(SHAPES[number % len(SHAPES)], trace(SHAPES[number % len(SHAPES)], number, 500), (1, 9, 60), backend)


@pytest.mark.one_in(4, all=2)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_restarts_and_discarded_micro_batches_change_nothing(shape: IntervalShape, backend: Backend) -> None:
    """The clean-up times of keys are in a snapshot, and taken back with a micro-batch."""
    join, cpu = temporal_join(shape, ttl=TTL), Backend("cpu")
    parts, ticks = list(timed_cuts(join, trace(shape, 8), 25)), Ticks(3)
    with cpu.engine(join) as whole:
        current, other = backend, backend.engine(join).__enter__()
        for number, cut in enumerate(parts):
            now = ticks.next()
            before = other.snapshot()
            other.prepare(**parts[(number + 3) % len(parts)].inputs, clock_ms=now)
            other.discard()
            same_state(other, before)
            expected, got = timed_run(whole, cut, clock_ms=now), timed_run(other, cut, clock_ms=now)
            assert by_event(*got[:2]) == by_event(*expected[:2]), f"{shape}, events {cut.start} to {cut.stop - 1}"
            if number % 3 == 1:
                state = other.snapshot()
                other.close()
                current = cpu if current == backend else backend
                other = current.engine(join).__enter__()
                other.restore(state)
                same_state(other, state)
        other.close()


def test_what_cannot_be() -> None:
    with pytest.raises(DescriptionError, match="ttl is at least two milliseconds, this one is 1 ms"):
        temporal_join(SHAPES[0], ttl=1)
    join = temporal_join(SHAPES[0], ttl=TTL)
    with pytest.raises(DescriptionError, match="no row is forgotten, ttl= has no place"):
        dataclasses.replace(join, emit="at_end")
    assert from_json(join.to_json()) == join
    assert (
        "  TTL         a key is forgotten, with the rows that wait, 1500 milliseconds to 2250 milliseconds"
        in join.lines()[2]
    )


def flink_case(number: int) -> tuple[IntervalShape, list[TimedEvent], dict[int, int]]:
    """A join, a trace, and how long Flink sleeps before some events: no decision is nearer than a quarter second."""
    rng = random.Random(f"temporal-ttl-{os.environ.get('GPU_JOIN_ORACLE_SEED', '0')}-{number}")
    shape = IntervalShape(rng.choice(("inner", "left")), -30, 0, keys=rng.choice(("int", "string")), clock="ms")
    recipe = TimedRecipe(100, rng.randrange(1 << 30), keys=rng.choice((3, 8)), late=0.2, watermarks=0.2)
    events = ends(with_kinds(timed_trace(shape, recipe), number, kinds=("+I", "+U", "-D"), null_keys=False))
    return shape, events, {at: 500 * rng.choice((1, 1, 2, 3, 5)) for at in range(1, len(events)) if rng.random() < 0.15}


@pytest.mark.skipif(bool(flink.missing()), reason=str(flink.missing()))
def test_flink_emits_the_same(backend: Backend, tmp_path: Path) -> None:
    """``GPU_JOIN_ORACLE_TTL`` says how many traces (default 3), which take half a minute each: Flink sleeps."""
    cases = [flink_case(number) for number in range(int(os.environ.get("GPU_JOIN_ORACLE_TTL", "3")))]
    scripts = {f"t{n}": flink.temporal_script(s, e, "upsert", ttl=TTL, sleeps=z) for n, (s, e, z) in enumerate(cases)}
    texts, same = flink.ask(scripts, tmp_path), 0
    for number, (shape, events, sleeps) in enumerate(cases):
        lines = [at for at in range(len(events)) for _ in range(sleeps.get(at, 0) // flink.NAP + 1)]
        answers = {lines[line]: rows for line, rows in flink.interval_answers(texts[f"t{number}"], shape)[0].items()}
        join, now = temporal_join(shape, ttl=TTL), 0
        exact, rules = TemporalRules(shape.terms(), TTL, flink=True), TemporalRules(shape.terms(), TTL)
        with backend.engine(join) as engine:
            for cut in timed_cuts(join, events, 1):
                now += sleeps.get(cut.start, 0)
                exact.tick(now)
                rules.tick(now)
                told = Counter(exact.process(events[cut.start]))
                wrong = difference(answers.get(cut.start, {}), told)
                assert not wrong, f"case {number}, {shape}, the rules, event {cut.start}:\n{wrong}"
                ours = Counter(rules.process(events[cut.start]))
                found, _, _ = timed_run(engine, cut, clock_ms=now)
                assert Counter(found) == ours
                same += ours == told
    assert same >= 0.99 * sum(len(events) for _, events, _ in cases)
