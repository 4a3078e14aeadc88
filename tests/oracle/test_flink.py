"""Random cases, asked of the live Flink.

    GPU_JOIN_ORACLE=FOLDER pytest tests/oracle/test_flink.py

``GPU_JOIN_ORACLE_CASES`` says how many (default 21), ``GPU_JOIN_ORACLE_SEED`` which (default 0);
``GPU_JOIN_ORACLE_INTERVALS`` how many interval joins besides (default 20) and ``GPU_JOIN_ORACLE_LATE`` how many
of them with many late rows (default 20), of ``GPU_JOIN_ORACLE_EVENTS`` events each (default 500). Flink takes two
or three seconds for one.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from oracle import flink
from oracle.drive import Backend, Change, by_event, difference, run_all, same_by_event
from oracle.interval_drive import ends, timed_run_all
from oracle.interval_rules import LATE, TimedEvent
from oracle.interval_traces import IntervalShape, timed_trace
from oracle.rules import Rules
from oracle.traces import Shape

SEED = int(os.environ.get("GPU_JOIN_ORACLE_SEED", "0"))
CASES = [flink.random_case(SEED, n) for n in range(int(os.environ.get("GPU_JOIN_ORACLE_CASES", "21")))]
NAMES = [f"{SEED}-{number}-{shape}" for number, (shape, _) in enumerate(CASES)]

EVENTS = int(os.environ.get("GPU_JOIN_ORACLE_EVENTS", "500"))
LATE_ONES = int(os.environ.get("GPU_JOIN_ORACLE_LATE", "20"))
INTERVALS = [
    flink.random_interval(SEED, n, EVENTS) for n in range(int(os.environ.get("GPU_JOIN_ORACLE_INTERVALS", "20")))
] + [flink.late_interval(SEED, n, EVENTS) for n in range(LATE_ONES)]
INTERVAL_NAMES = [f"{SEED}-{number}-{shape}" for number, (shape, _) in enumerate(INTERVALS)]

needs_flink = pytest.mark.skipif(bool(flink.missing()), reason=str(flink.missing()))


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Counter[Change]]]:
    """Flink's answer to every case; one JVM for all of them."""
    scripts = {
        name: flink.script(shape, flink.case_events(shape, recipe))
        for name, (shape, recipe) in zip(NAMES, CASES, strict=True)
    }
    texts = flink.ask(scripts, tmp_path_factory.mktemp("oracle"))
    return {name: flink.answers(texts[name], shape.join()) for name, (shape, _) in zip(NAMES, CASES, strict=True)}


@needs_flink
@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_flink_says_the_same(number: int, answers: dict[str, Any], backend: Backend) -> None:
    shape, recipe = CASES[number]
    events = flink.case_events(shape, recipe)
    sizes = ((1,), (7, 1, 20), (len(events),))[number % 3]
    found = by_event(*run_all(backend, shape.join("per_event"), events, sizes))
    same_by_event(answers[NAMES[number]], found, events, f"{shape} {recipe}")


@needs_flink
@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_the_rules_are_flinks(number: int, answers: dict[str, Any]) -> None:
    """The record-by-record transcription that other tests go by."""
    shape, recipe = CASES[number]
    rules, events = Rules(shape.join(), shape.residual), flink.case_events(shape, recipe)
    found = {number: Counter(rules.process(event)) for number, event in enumerate(events)}
    same_by_event(answers[NAMES[number]], found, events, f"{shape} {recipe}")


@pytest.fixture(scope="session")
def interval_answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Flink's answer to every interval join: changes and watermarks per event; one JVM for all of them."""
    scripts = {
        f"interval{n}": flink.interval_script(INTERVALS[n][0], interval_events(n)) for n in range(len(INTERVALS))
    }
    texts = flink.ask(scripts, tmp_path_factory.mktemp("intervals"))
    return [flink.interval_answers(texts[f"interval{n}"], shape) for n, (shape, _) in enumerate(INTERVALS)]


def interval_events(number: int) -> list[TimedEvent]:
    """The trace of a case; every other one ends."""
    events = timed_trace(*INTERVALS[number])
    return ends(events) if number % 2 else list(events)


@needs_flink
@pytest.mark.parametrize("number", range(len(INTERVALS)), ids=INTERVAL_NAMES)
def test_flink_says_the_same_of_intervals(number: int, interval_answers: list[Any], backend: Backend) -> None:
    shape, _ = INTERVALS[number]
    events, (expected, _) = interval_events(number), interval_answers[number]
    sizes = ((1,), (7, 1, 20), (len(events),))[number % 3]
    found = by_event(*timed_run_all(backend, shape.join("per_event"), events, sizes))
    same_by_event(expected, found, events, str(INTERVALS[number]))


@needs_flink
@pytest.mark.parametrize("number", range(len(INTERVALS)), ids=INTERVAL_NAMES)
def test_the_interval_rules_are_flinks(number: int, interval_answers: list[Any]) -> None:
    """The transcription, watermarks included."""
    shape, _ = INTERVALS[number]
    expected, watermarks = interval_answers[number]
    rules = shape.terms().rules()
    for event, told in enumerate(interval_events(number)):
        before = rules.clock.now
        wrong = difference(expected.get(event, {}), Counter(rules.process(told)))
        assert not wrong, f"{INTERVALS[number]}, event {event} {told}:\n{wrong}"
        assert watermarks.get(event) == (rules.output_watermark if rules.clock.now != before else None)


def test_an_answer_is_read_back() -> None:
    """The parser does not take an empty answer for agreement."""
    shape = Shape("left")
    read = flink.answers("# plan x\n0 +I[1, null, a, 0.5, null, null, null, null]\n", shape.join())
    assert read == {0: Counter({("+I", (1, None, "a", 0.5, None, None, None, None)): 1})}
    with pytest.raises(AssertionError):
        flink.answers("# ERROR no such table\n", shape.join())


def test_an_interval_answer_is_read_back() -> None:
    """Rows, late rows, output times and watermarks."""
    sql, stream = IntervalShape("left"), IntervalShape(late="tag", keyed=True, clock="int64", stamped=True)
    text = "# plan x\n0 +I[1, 5, null, a0, null, null, null, null]\n3 WM -17\n"
    padded = (1, 5, None, "a0", None, None, None, None)
    assert flink.interval_answers(text, sql) == ({0: Counter({("+I", padded): 1})}, {3: -17})
    text = "2 +I[1, 5, 0;a0, 1, 7, null;b2] ts=7\n4 LATE-RIGHT[1, 2, 3;b4]\n"
    row = (1, 5, 0, "a0", 1, 7, None, "b2", 7)
    late = (None, None, None, None, 1, 2, 3, "b4", 2)
    assert flink.interval_answers(text, stream) == ({2: Counter({("+I", row): 1}), 4: Counter({(LATE, late): 1})}, {})
    with pytest.raises(AssertionError):
        flink.interval_answers("# ERROR no such table\n", sql)


def test_an_interval_join_is_asked_for_in_flinks_words() -> None:
    shape = IntervalShape("full", -20, 10, inclusive=(True, False), residual=(("a_x", ">", "b_x"),), min_cleanup=7)
    text = flink.interval_script(shape, [(0, "+I", (None, 5, 1, "a0")), (1, "W", 3)])
    on = "A.a_k = B.b_k AND B.b_t >= A.a_t - INTERVAL '0.020' SECOND AND B.b_t < A.a_t + INTERVAL '0.010' SECOND"
    assert f"FULL JOIN B ON {on} AND A.a_x > B.b_x\n" in text
    assert text.startswith("conf table.exec.interval-join.min-cleanup-interval=7 ms\n")
    assert text.endswith("\n0 +I null,5,1,a0\n1 W 3\n")
    keyed = IntervalShape("inner", -5, 9, inclusive=(False, True), late="tag", keyed=True)
    text = flink.interval_script(keyed, [(0, "+I", (4, 5, None, "a0"))])
    assert text == "intervaljoin lower=-5 upper=9 lowerExclusive=true upperExclusive=false\n0 +I 4,5,null;a0\n"
