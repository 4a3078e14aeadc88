"""Random cases, asked of the live Flink.

    GPU_JOIN_ORACLE=FOLDER pytest tests/oracle/test_flink.py

``GPU_JOIN_ORACLE_CASES`` says how many (default 21), ``GPU_JOIN_ORACLE_SEED`` which (default 0).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from oracle import flink
from oracle.drive import Backend, Change, by_event, difference, run_all
from oracle.rules import Rules
from oracle.traces import Recipe, Shape

SEED = int(os.environ.get("GPU_JOIN_ORACLE_SEED", "0"))
CASES = [flink.random_case(SEED, n) for n in range(int(os.environ.get("GPU_JOIN_ORACLE_CASES", "21")))]
NAMES = [f"{SEED}-{number}-{shape}" for number, (shape, _) in enumerate(CASES)]

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
    compare(answers[NAMES[number]], found, shape, recipe)


@needs_flink
@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_the_rules_are_flinks(number: int, answers: dict[str, Any]) -> None:
    """The record-by-record transcription that other tests go by."""
    shape, recipe = CASES[number]
    rules = Rules(shape.join(), shape.residual)
    found = {}
    for event, change in enumerate(flink.case_events(shape, recipe)):
        said = Counter(rules.process(change))
        if said:
            found[event] = said
    compare(answers[NAMES[number]], found, shape, recipe)


def compare(expected: dict[int, Any], found: dict[int, Any], shape: Shape, recipe: Recipe) -> None:
    events = flink.case_events(shape, recipe)
    for event, change in enumerate(events):
        wrong = difference(expected.get(event, {}), found.get(event, {}))
        assert not wrong, f"{shape} {recipe}, event {event} {change}:\n{wrong}"
    assert set(found) <= set(range(len(events)))


def test_an_answer_is_read_back() -> None:
    """The parser does not take an empty answer for agreement."""
    shape = Shape("left")
    read = flink.answers("# plan x\n0 +I[1, null, a, 0.5, null, null, null, null]\n", shape.join())
    assert read == {0: Counter({("+I", (1, None, "a", 0.5, None, None, None, None)): 1})}
    with pytest.raises(AssertionError):
        flink.answers("# ERROR no such table\n", shape.join())
