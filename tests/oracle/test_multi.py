"""The multi-way join: every event by Flink's rules, and every micro-batch the SQL join of the folded inputs."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_ops.descriptions.description import Emit
from oracle.drive import (
    ADDS,
    Backend,
    Change,
    Event,
    Row,
    as_multiset,
    by_event,
    changes,
    cuts,
    difference,
    fold,
    identical,
    run,
    run_all,
    same_by_event,
)
from oracle.multi_traces import SHAPES, MultiShape, multi_recipe, multi_trace, random_shape, shape
from oracle.sql import reference
from oracle.test_differential import untimed

CPU = Backend("cpu")
ALL = 1_000_000_000
SPLITS = (1, 7, 50, ALL)


def trace_of(made: MultiShape, events: int = 150, *, seed: int = 0, malformed: bool = False) -> tuple[Event, ...]:
    return multi_trace(made, multi_recipe(made, events, seed, malformed=malformed))


def check_events(
    made: MultiShape, events: Sequence[Event], split: int | Sequence[int], backend: Backend, **options: Any
) -> None:
    """Per event, the multiset of changes is what the rules say; and nothing is taken before it is there."""
    rules = made.rules()
    expected = {number: Counter(rules.process(event)) for number, event in enumerate(events)}
    found, position = run_all(backend, rules.join, events, split, **options)
    same_by_event(expected, by_event(found, position), events, str(made))
    assert position == sorted(position), "changes are ordered by the event that caused them"
    check_order(made, found, position)


def check_order(made: MultiShape, found: Sequence[Change], position: Sequence[int]) -> None:
    folded: Counter[Row] = Counter()
    for change, event in zip(found, position, strict=True):
        fold([change], folded)
        assert folded[change[1]] >= 0, f"{made}: event {event} takes {change[1]}, which is not there"


def check_upserts(made: MultiShape, events: Sequence[Event], split: int | Sequence[int], backend: Backend) -> None:
    """With upserts and unknown retractions: per event, what is added and taken; and what is unknown is counted."""
    rules = made.rules()
    expected = [rules.process(e) for e in events]
    groups: dict[int, Counter[Change]] = {}
    unknown = [0] * len(rules.unknown)
    order: list[tuple[list[Change], list[int]]] = []
    with backend.engine(rules.join) as engine:
        for cut in cuts(rules.join, events, split):
            got, position, batch = run(engine, cut)
            groups |= by_event(got, position)
            order.append((got, list(position)))
            for place, name in enumerate(rules.join.sides):
                unknown[place] += batch.metrics[f"{name}_unknown_retractions"]
    for number, want in enumerate(expected):
        wrong = difference(fold(want), fold(list(groups.pop(number, Counter()).elements())))
        assert not wrong, f"{made}: event {number} {events[number]}:\n{wrong}"
    assert not groups
    assert unknown == rules.unknown
    check_order(made, [c for got, _ in order for c in got], [p for _, position in order for p in position])


def check_view(
    made: MultiShape,
    events: Sequence[Event],
    split: int | Sequence[int],
    backend: Backend,
    emit: Emit,
    *,
    large: bool = False,
    **options: Any,
) -> int:
    """After every micro-batch the fold is the SQL join; ``per_batch`` gets there in the fewest rows."""
    join, said = made.join(emit), 0
    unknown = [0] * len(join.inputs)
    before: Counter[Row] = Counter()
    with contextlib.closing(reference(join, large=large)) as view, backend.engine(join) as engine:
        for cut in cuts(join, events, split, **options):
            view.change(events[cut.start : cut.stop])
            batch = engine.prepare(*cut.batches, **cut.inputs)
            engine.commit()
            view.fold(batch.changelog)
            wrong = view.differences()
            assert not wrong, f"{made}: after events {cut.start} to {cut.stop - 1}:\n{wrong}"
            said += batch.changelog.num_rows
            if emit == "per_batch":
                both = view.both_ways()
                assert not both, f"{made}: events {cut.start} to {cut.stop - 1} add and remove {both}"
                if not large:
                    now = fold(changes(batch.changelog), before.copy())
                    least = sum(abs(now[row] - before[row]) for row in {**now, **before})
                    assert batch.changelog.num_rows == least
                    before = now
            for place, name in enumerate(join.sides):
                unknown[place] += batch.metrics[f"{name}_unknown_retractions"]
        assert unknown == [i.unknown for i in view.inputs]
        for place, name in enumerate(join.sides):
            assert engine.state_size()[f"{name}_rows"] == len(view.inputs[place].rows())
    return said


# --- the fixed shapes ------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("made", SHAPES, ids=str)
def test_every_event_by_the_rules(made: MultiShape, backend: Backend) -> None:
    """In large micro-batches, given in any order: an event sees what came before it in its own."""
    check_events(made, trace_of(made), (70, 20, 40), backend, shuffle=3)


@pytest.mark.parametrize("made", SHAPES[1::2], ids=str)
def test_upserts_and_unknown_retractions(made: MultiShape, backend: Backend) -> None:
    check_upserts(made, trace_of(made, seed=1, malformed=True), (50, 7, 1, 30), backend)


@pytest.mark.parametrize("made", SHAPES[::2], ids=str)
def test_per_batch_is_the_join(made: MultiShape, backend: Backend) -> None:
    assert check_view(made, trace_of(made, seed=2, malformed=True), (40, 3, 17), backend, "per_batch", shuffle=5) > 20


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("made", [SHAPES[9], SHAPES[17]], ids=str)
def test_splits(made: MultiShape, split: int, backend: Backend) -> None:
    """Cut anywhere, the same."""
    events = trace_of(made, 45, seed=3)
    check_events(made, events, split, backend)
    check_view(made, events, split, backend, "per_batch")


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("made", SHAPES[2::5], ids=str)
def test_backends_agree_row_for_row(made: MultiShape, emit: Emit, other_backend: Backend) -> None:
    """The same rows in the same order as on the plain CPU, with the same state after."""
    join = made.join(emit)
    events = trace_of(made, seed=4, malformed=True)
    with CPU.engine(join) as one, other_backend.engine(join) as other:
        for cut in cuts(join, events, (40, 1, 13)):
            first, second = (e.prepare(*cut.batches, **cut.inputs) for e in (one, other))
            one.commit()
            other.commit()
            assert identical(first.changelog, second.changelog)
            assert (first.sequence == second.sequence).all()
            assert untimed(first.metrics) == untimed(second.metrics)
        states = [e.snapshot() for e in (one, other)]
        assert set(states[0]) == set(join.sides)
        for name in join.sides:
            assert as_multiset(states[0][name]) == as_multiset(states[1][name])


def test_without_order_inputs_come_one_after_the_other() -> None:
    made = shape("ll")
    row = (1, "x", 1, 0.5)
    events: list[Event] = [(2, "+I", row), (1, "+I", row), (0, "+I", row)]
    (cut,) = cuts(made.join(), events, 3)
    with CPU.engine(made.join()) as engine:
        said = engine.process(*cut.batches)["row_kind"].to_pylist()
        assert said == ["+I", "-D", "+I", "-D", "+I"]
    with CPU.engine(made.join()) as engine:
        assert engine.process(*cut.batches, **cut.inputs)["row_kind"].to_pylist() == ["+I"]


def test_row_kinds_are_the_operators() -> None:
    """A joined row has the kind of the change that made it, a pad -D and +I (section 1.2 of the rules)."""
    join = shape("ll").join()
    a, b, changed = (1, "x", 1, 0.5), (1, "y", 2, 0.5), (1, "y", 3, 0.5)
    none = (None,) * 4
    told: list[tuple[Event, list[Change]]] = [
        ((0, "+I", a), [("+I", a + none + none)]),
        ((1, "+I", b), [("-D", a + none + none), ("+I", a + b + none)]),
        ((1, "-U", b), [("-U", a + b + none), ("+I", a + none + none)]),
        ((1, "+U", changed), [("-D", a + none + none), ("+U", a + changed + none)]),
        ((0, "-U", a), [("-U", a + changed + none)]),
        ((2, "+I", b), []),
        ((0, "+U", a), [("+U", a + changed + b)]),
    ]
    found, position = run_all(CPU, join, [event for event, _ in told], 2)
    assert list(zip(position, found, strict=True)) == [(n, c) for n, (_, said) in enumerate(told) for c in said]


def test_any_part_can_be_wrong() -> None:
    """The comparison is not empty: a join fed otherwise than it is described does not pass it."""
    made, other = shape("ll"), shape("li")
    events = trace_of(made)
    rules = other.rules()
    expected = {n: Counter(rules.process(e)) for n, e in enumerate(events)}
    found = by_event(*run_all(CPU, made.join(), events, 30))
    assert any(difference(expected[n], found.get(n, Counter())) for n in expected)


def test_an_input_without_row_kinds(backend: Backend) -> None:
    """Insert-only."""
    import dataclasses

    made = shape("lil", "mixed")
    join = made.join()
    events = [e for e in trace_of(made, 120) if e[1] in ADDS]
    bare = dataclasses.replace(join, inputs=tuple(dataclasses.replace(i, row_kind=None) for i in join.inputs))
    assert run_all(backend, bare, events, 30) == run_all(CPU, join, [(s, "+I", r) for s, _, r in events], 30)


# --- random ones -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", range(80))
def test_random_graphs(number: int, backend: Backend) -> None:
    rng = random.Random(f"multi-{number}")
    made = random_shape(rng)
    split: Any = rng.choice((1, 7, 50, ALL, (30, 1, 8)))
    length = 150 if split == 1 else 500
    check_events(made, trace_of(made, length, seed=number), split, backend, shuffle=number)
    events = trace_of(made, length, seed=number, malformed=True)
    check_upserts(made, events, split, backend)
    check_view(made, events, split, backend, "per_batch", shuffle=number)
    check_view(made, events, split, backend, "per_event")


LONG = [shape("l", unique="01"), shape("li", unique="100"), shape("lil", "mixed", "0123"), shape("ill", extra="g")]


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("made", LONG, ids=str)
def test_twenty_thousand_events(made: MultiShape, emit: Emit, backend: Backend) -> None:
    """With a state of many segments, that are merged."""
    import dataclasses

    told = dataclasses.replace(multi_recipe(made, 20_000, 7, malformed=True), live=1200)
    assert check_view(made, multi_trace(made, told), (1000, 500, 750), backend, emit, large=True) > 1000
