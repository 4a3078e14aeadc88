"""Temporal joins by Flink's rules, in any micro-batches, on every backend."""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_ops.descriptions.by_time import TemporalJoin
from oracle import flink
from oracle.drive import Backend, by_event, difference, same_after_discards, same_after_restarts
from oracle.interval_drive import ends, timed_cuts, timed_run, timed_run_all
from oracle.interval_rules import END, WATERMARK, TimedEvent
from oracle.interval_traces import IntervalShape, TimedRecipe, timed_trace
from oracle.temporal_rules import KINDS, TemporalRules, temporal_join, with_kinds

CPU = Backend("cpu")
X = (("a_x", ">", "b_x"),)
SHAPES = [
    IntervalShape("inner"),
    IntervalShape("left"),
    IntervalShape("left", -12, -3, keys="composite", residual=X),
    IntervalShape("left", 0, 25, keys="string", null_safe=True, clock="us"),
    IntervalShape("inner", 4, 15, late="drop", clock="mixed"),
    IntervalShape("left", -30, 0, late="tag", keys="mixed_width", clock="int64"),
]


def trace(shape: IntervalShape, events: int = 200, *, upserts: bool = False, **more: Any) -> list[TimedEvent]:
    """A trace whose late rows, watermarks and keys vary with the shape."""
    seed = zlib.crc32(f"{shape}-{upserts}".encode())
    recipe = TimedRecipe(events, seed, watermarks=(0.06, 0.2)[seed % 2], **more)
    kinds = ("+I",) if upserts else KINDS
    return ends(with_kinds(timed_trace(shape, recipe), seed, kinds=kinds, null_keys=not upserts))


def check(
    shape: IntervalShape, join: TemporalJoin, events: Sequence[TimedEvent], split: int | Sequence[int], backend: Backend
) -> int:
    """Every event makes come out what the transcription does, late rows are counted alike; how many came out."""
    rules, total = TemporalRules(shape.terms()), 0
    with backend.engine(join) as engine:
        for cut in timed_cuts(join, events, split, shuffle=3):
            before = list(rules.late)
            want = {
                number: changes
                for number, event in enumerate(events[cut.start : cut.stop], cut.start)
                if (changes := rules.process(event))
            }
            found, position, batch = timed_run(engine, cut)
            total += len(found)
            got = by_event(found, position)
            for event in sorted({*want, *got}):
                wrong = difference(Counter(want.get(event, ())), got.get(event, {}))
                assert not wrong, f"{shape}, events {cut.start} to {cut.stop - 1}, event {event}:\n{wrong}"
            late = [batch.metrics[f"{side}_late"] for side in ("left", "right")]
            assert late == [now - n for now, n in zip(rules.late, before, strict=True)]
            if rules.clock.now != END and None not in rules.clock.pair:
                assert batch.metrics["output_watermark_ms"] == batch.metrics["watermark_ms"] == rules.clock.now
    return total


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("split", [1, 7, 1000], ids=["split1", "split7", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_event_by_the_rules(shape: IntervalShape, split: int, backend: Backend) -> None:
    events = trace(shape, 120 if split == 1 else 240)
    assert check(shape, temporal_join(shape), events, split, backend) > 20


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_upserts_by_the_rules(shape: IntervalShape, backend: Backend) -> None:
    assert check(shape, temporal_join(shape, upserts=True), trace(shape, upserts=True), (13, 50, 1), backend) > 20


@pytest.mark.thorough
def test_a_hot_key_and_many_late_rows(backend: Backend) -> None:
    shape = IntervalShape("left", -40, 60)
    events = trace(shape, 1500, keys=40, skew=0.3, disorder=120, late=0.3)
    assert check(shape, temporal_join(shape), events, (400, 90), backend) > 300


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_any_trace(number: int, backend: Backend) -> None:
    shape = SHAPES[number % len(SHAPES)]
    recipe = TimedRecipe(
        500, number, watermarks=(0.03, 0.1, 0.3)[number % 3], late=(0.05, 0.4)[number % 2], keys=(2, 8)[number % 2]
    )
    check(shape, temporal_join(shape), ends(with_kinds(timed_trace(shape, recipe), number)), (1, 9, 60), backend)


@pytest.mark.parametrize("shape", SHAPES[1::2], ids=str)
def test_a_restart_goes_unnoticed(shape: IntervalShape, backend: Backend) -> None:
    join = temporal_join(shape)
    same_after_restarts(backend, join, list(timed_cuts(join, trace(shape), 25)), timed_run, every=3)


def test_a_discarded_micro_batch_leaves_nothing(backend: Backend) -> None:
    """Its rows are gone, and so are its watermark and what that took away."""
    join = temporal_join(SHAPES[1])
    same_after_discards(backend, join, list(timed_cuts(join, trace(SHAPES[1]), 30)), timed_run, step=3)


def test_state_is_the_versions_younger_than_the_watermark_and_one_of_each_key(backend: Backend) -> None:
    """Where each version registers its key's timer, and none is late."""
    shape = IntervalShape("inner")
    events = trace(shape, 1500, keys=9, null_keys=0.0, in_time=True)
    versions: set[tuple[object, int]] = set()
    with backend.engine(temporal_join(shape)) as engine:
        for cut in timed_cuts(engine.description, events, 60):
            _, _, batch = timed_run(engine, cut)
            new = [e for e in events[cut.start : cut.stop] if e[0] == 1 and e[1] not in (WATERMARK, "-U")]
            now = batch.metrics.get("watermark_ms", -(1 << 62))
            passed = {key for key, time in versions if time <= now}
            # those of one time stand beside each other until the watermark passes them
            younger = sum(time > now for _, time in versions)
            assert batch.metrics["right_state_rows"] <= 3 * (younger + len(passed)) + len(new)
            versions |= {(value[0], value[1]) for _, _, value in new}
        assert engine.state_size()["right_rows"] <= 9 + len(new)


def flink_case(number: int) -> tuple[IntervalShape, str, list[TimedEvent]]:
    """A join, how its right input changes, and a trace, for the live Flink."""
    rng = random.Random(f"temporal-{os.environ.get('GPU_JOIN_ORACLE_SEED', '0')}-{number}")
    keys, clock = rng.choice(("int", "string", "composite")), rng.choice(("ms", "utc"))
    shape = IntervalShape(rng.choice(("inner", "left")), -30, 0, keys=keys, clock=clock, residual=rng.choice(((), X)))
    recipe = TimedRecipe(
        int(os.environ.get("GPU_JOIN_ORACLE_EVENTS", "500")),
        rng.randrange(1 << 30),
        keys=rng.choice((2, 5, 15)),
        disorder=rng.choice((0, 5, 40)),
        late=rng.choice((0.0, 0.1, 0.4)),
        watermarks=rng.choice((0.05, 0.15, 0.3)),
    )
    kinds = rng.choice((("+I",), ("+I", "+U", "+U", "-D")))
    mode = rng.choice(("upsert", "all"))
    return shape, mode, ends(with_kinds(timed_trace(shape, recipe), number, kinds=kinds, null_keys=False))


@pytest.mark.skipif(bool(flink.missing()), reason=str(flink.missing()))
def test_flink_emits_the_same(backend: Backend, tmp_path: Path) -> None:
    """Event by event; ``GPU_JOIN_ORACLE_TEMPORAL`` says how many traces, of ``GPU_JOIN_ORACLE_EVENTS`` each."""
    cases = [flink_case(number) for number in range(int(os.environ.get("GPU_JOIN_ORACLE_TEMPORAL", "20")))]
    texts = flink.ask({f"t{n}": flink.temporal_script(s, e, m) for n, (s, m, e) in enumerate(cases)}, tmp_path)
    total = 0
    for number, (shape, mode, events) in enumerate(cases):
        answers, _ = flink.interval_answers(texts[f"t{number}"], shape)
        found, position = timed_run_all(backend, temporal_join(shape), events, ((1,), (9, 1, 40), (1000,))[number % 3])
        got = by_event(found, position)
        for event in sorted({*answers, *got}):
            wrong = difference(answers.get(event, {}), got.get(event, {}))
            assert not wrong, f"case {number}, {shape}, {mode}, event {event} {events[event]}:\n{wrong}"
        total += len(found)
    assert total > 50 * len(cases)
