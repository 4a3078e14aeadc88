"""The transcription of Flink's interval joins says what Flink said, in every golden case, event by event."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from conformance.case import Case, read_cases

from oracle.drive import difference
from oracle.interval_rules import END, StrictRules, Terms

CASES = [c for c in read_cases(Path(__file__).parents[1] / "conformance" / "cases") if c.kind.startswith("interval_")]


def test_there_are_golden_cases_of_all_kinds() -> None:
    kinds = {"interval_sql": 26, "interval_datastream": 7, "interval_semi": 3, "interval_anti": 3}
    assert Counter(c.kind for c in CASES) == kinds


@pytest.mark.parametrize("epoch", [True, False], ids=["epoch", "any_time"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_golden_cases(case: Case, epoch: bool) -> None:
    """Rows, late rows, output timestamps and watermarks."""
    rules = terms(case, epoch=epoch).rules()
    expected, watermarks = case.expected, dict(case.data["expected_watermarks"])
    said = 0
    for number, event in enumerate(case.timed_events):
        before = rules.clock.now
        found = Counter(rules.process(event))
        wrong = difference(expected.get(number, {}), found)
        assert not wrong, f"event {number} {event}:\n{wrong}"
        moved = rules.clock.now != before
        assert watermarks.get(number) == (rules.output_watermark if moved else None)
        said += found.total()
    assert said == len(case.data["expected"])


def terms(case: Case, *, epoch: bool = False) -> Terms:
    """The terms of a golden case, taken from its JSON."""
    told = case.data["join"]
    names = [[n for n, _ in i["columns"]] for i in case.data["inputs"]]
    keyed = case.kind == "interval_datastream"
    sql = (-told["upper_ms"], -told["lower_ms"])
    bounds = (told["lower_ms"] + told["lower_exclusive"], told["upper_ms"] - told["upper_exclusive"]) if keyed else sql
    return Terms(
        how=told["how"],
        keys=tuple((names[0].index(a), names[1].index(b), False) for a, b in told["keys"]),
        times=(names[0].index(told["time_columns"][0]), names[1].index(told["time_columns"][1])),
        widths=(len(names[0]), len(names[1])),
        lower=bounds[0],
        upper=bounds[1],
        residual=tuple((names[0].index(a), op, names[1].index(b)) for a, op, b in told.get("residual", ())),
        min_cleanup={"5 s": 5000, "7 ms": 7}[next(iter(case.data["conf"].values()))] if case.data["conf"] else 0,
        late="tag" if keyed else "join",
        keyed=keyed,
        stamped=keyed,
        epoch=epoch,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_descriptions_have_these_terms(case: Case) -> None:
    """A golden case as a `Join` says the same as its JSON."""
    told = case.data["join"]
    residual = [(a, op, b) for a, op, b in told.get("residual", ())]
    assert Terms.of(case.join("per_event"), residual) == terms(case)


FULL = Terms("full", ((0, 0, False),), (1, 1), (2, 2), lower=-20, upper=10)


def test_a_pad_waits_for_the_sweep_of_its_key() -> None:
    """The first row sets the timer; an earlier one of the same key waits for it, one of another key does not."""
    rules = FULL.rules()
    for event in ((0, "+I", (1, 100)), (0, "+I", (1, 50)), (0, "+I", (2, 50)), (1, "W", END)):
        assert rules.process(event) == []
    assert rules.process((0, "W", 61)) == [("+I", (2, 50, None, None))]
    assert rules.process((0, "W", 110)) == []
    assert sorted(rules.process((0, "W", 111))) == [("+I", (1, 50, None, None)), ("+I", (1, 100, None, None))]
    assert rules.kept() == (0, 0)


def test_a_lookup_sweeps_what_is_over() -> None:
    rules = FULL.rules()
    for event in ((0, "+I", (1, 100)), (0, "+I", (1, 50)), (1, "W", END), (0, "W", 61)):
        assert rules.process(event) == []
    assert rules.process((1, "+I", (1, 90))) == [("+I", (1, 100, 1, 90)), ("+I", (1, 50, None, None))]


def test_strict_rules_keep_to_the_time() -> None:
    """Late rows are left out; a row at the watermark still meets one whose time ends there."""
    strict = dataclasses.replace(FULL, late="tag").rules()
    assert isinstance(strict, StrictRules)
    for event in ((0, "+I", (1, 100)), (0, "+I", (1, 50)), (1, "W", END)):
        assert strict.process(event) == []
    assert strict.process((0, "W", 60)) == []
    assert strict.process((1, "+I", (1, 59))) == [("late", (None, None, 1, 59))]
    assert strict.process((1, "+I", (1, 60))) == [("+I", (1, 50, 1, 60))]
    assert strict.process((0, "W", 61)) == []
    assert strict.kept() == (1, 1)
    assert strict.process((0, "W", 111)) == [("+I", (1, 100, None, None))]
    assert strict.kept() == (0, 0)
    assert strict.late == [0, 1]


def test_flinks_clock_starts_at_the_epoch() -> None:
    """There a row from before 1970 may be over when it comes, and a sweep forgets what it still keeps."""
    flink = dataclasses.replace(FULL, epoch=True).rules()
    assert flink.process((0, "+I", (1, -100))) == [("+I", (1, -100, None, None))]
    ours = FULL.rules()
    for rules in (flink, ours):
        for event in ((0, "+I", (1, -5)), (0, "+I", (1, 0)), (1, "W", END)):
            assert rules.process(event) == []
        assert rules.process((0, "W", 6)) == [("+I", (1, -5, None, None))]
    assert flink.process((0, "W", 11)) == []
    assert ours.process((0, "W", 11)) == [("+I", (1, 0, None, None))]
