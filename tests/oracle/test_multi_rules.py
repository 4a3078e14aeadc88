"""The transcription of the multi-way operator is Flink's, and what it says folds to the SQL join."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path

import pytest
from conformance.case import Case, read_cases

from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import Change, Row, difference, fold
from oracle.multi_rules import MultiRules, clauses
from oracle.multi_traces import SHAPES, MultiShape, multi_recipe, multi_trace, random_shape
from oracle.sql import reference

CASES = [c for c in read_cases(Path(__file__).parents[1] / "conformance" / "cases") if c.kind == "multi"]


def rules_of(case: Case, *, as_flink: bool) -> MultiRules:
    join = case.join("per_event")
    assert isinstance(join, MultiJoin)
    residual = [[(tuple(atom),) for atom in step["residual"]] for step in case.data["join"]["steps"]]
    return MultiRules(join, [tuple(r) for r in residual], as_flink=as_flink)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases(case: Case) -> None:
    """Event by event; where Flink is known to be wrong, with its faults."""
    expected = case.expected
    for as_flink in (True,) if case.informative else (True, False):
        rules = rules_of(case, as_flink=as_flink)
        for number, event in enumerate(case.events):
            wrong = difference(expected.get(number, {}), Counter(rules.process(event)))
            assert not wrong, f"event {number} {event}:\n{wrong}"
        assert as_flink or not any(rules.unknown)


def test_the_informative_cases_are_told_apart() -> None:
    """Where they are right instead of alike, the rules differ from Flink, and only there."""
    for case in (c for c in CASES if c.informative):
        rules, expected, apart = rules_of(case, as_flink=False), case.expected, Counter[str]()
        for number, event in enumerate(case.events):
            apart[event[1]] += bool(difference(expected.get(number, {}), Counter(rules.process(event))))
        kinds = {"upsert": {"+U"}, "unknown_retraction": {"-D"}}[case.data["family"]]
        assert {kind for kind, times in apart.items() if times} == kinds
        assert sum(rules.unknown) >= apart["-D"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_folded_it_is_the_join(shape: MultiShape) -> None:
    """Two ways to the same table that share nothing: the recursion, and DuckDB."""
    check(shape, seed=SHAPES.index(shape), every=9)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_folded_it_is_the_join_many(number: int) -> None:
    check(random_shape(random.Random(f"rules-{number}")), seed=number, every=4, events=400)


def check(shape: MultiShape, seed: int, every: int, events: int = 150) -> None:
    trace = multi_trace(shape, multi_recipe(shape, events, seed, malformed=seed % 2 > 0))
    rules, folded = shape.rules(), Counter[Row]()
    with contextlib.closing(reference(rules.join)) as view:
        for number, event in enumerate(trace):
            said: list[Change] = rules.process(event)
            fold(said, folded)
            view.change([event])
            assert min(folded.values(), default=1) > 0, f"{shape}: event {number} {event} says {said}"
            if number % every == 0 or number == len(trace) - 1:
                wrong = difference(view.joined(), folded)
                assert not wrong, f"{shape}: after event {number} {event}:\n{wrong}"
        assert rules.unknown == [i.unknown for i in view.inputs]


def test_conditions_as_text() -> None:
    residual = ((("A.x", "<", "B.x"), ("B.x", "IS NULL", None)), (("A.y", "<>", "C.y"),))
    assert clauses(residual) == "(A.x < B.x OR B.x IS NULL) AND A.y <> C.y"
    assert clauses(()) is None
