"""Interval joins by Flink's rules and by SQL, in any micro-batches, on every backend."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import Counter
from collections.abc import Sequence

import pytest

from gpu_ops.descriptions.description import Emit
from oracle.drive import (
    Backend,
    Change,
    as_multiset,
    by_event,
    changes,
    difference,
    identical,
    same_after_discards,
    same_after_restarts,
)
from oracle.interval_drive import TimedCut, ends, said, timed_cuts, timed_run
from oracle.interval_rules import END, LATE, START, WATERMARK, TimedEvent
from oracle.interval_sql import sql_join
from oracle.interval_traces import BOUNDS, HOWS, IntervalShape, TimedRecipe, timed_trace

pytestmark = pytest.mark.one_in(8)

CPU = Backend("cpu")
X = (("a_x", ">", "b_x"),)
SQL = [
    *(IntervalShape(how, *bounds) for how, bounds in zip(HOWS, BOUNDS, strict=False)),
    *(IntervalShape("full", *bounds) for bounds in BOUNDS[4:]),
    *(IntervalShape(how, min_cleanup=n) for how, n in zip(HOWS, (40, 1, 7, 15), strict=True)),
    *(IntervalShape(how, -12, -3, keys="composite", residual=X) for how in HOWS),
    IntervalShape("full", 4, 15, min_cleanup=20, keys="composite", residual=X),
    IntervalShape("full", -8, 8, inclusive=(False, True), keys="string", null_safe=True, clock="us"),
    IntervalShape("left", -8, 8, inclusive=(True, False), keys="mixed_width", clock="mixed", stamped=True),
    IntervalShape("right", -6, 0, clock="int64", stamped=True),
    IntervalShape("full", -4, 9, keys="none", residual=X, clock="utc"),
]
STRICT = [
    *(IntervalShape(how, *BOUNDS[n], late="tag", stamped=True) for n, how in enumerate(HOWS)),
    *(IntervalShape("full", *bounds, late="drop") for bounds in BOUNDS[4:]),
    IntervalShape("full", -9, 3, inclusive=(False, False), late="tag", keys="composite", residual=X, clock="us"),
]
KEYED = [
    *(IntervalShape("inner", *bounds, late="tag", keyed=True) for bounds in BOUNDS),
    IntervalShape("inner", -7, 7, inclusive=(False, False), late="drop", keyed=True, residual=X, clock="us"),
    IntervalShape("inner", -8, 2, inclusive=(True, False), late="tag", keyed=True, keys="composite", stamped=True),
]
SEMI = [
    IntervalShape("semi"),
    IntervalShape("semi", -12, -3, min_cleanup=7, keys="composite", residual=X),
    IntervalShape("semi", 0, 25, late="tag", keys="none", residual=X, clock="us"),
    IntervalShape("anti", -8, 8, inclusive=(False, True), keys="string", null_safe=True),
    IntervalShape("anti", 4, 15, min_cleanup=20, residual=X, clock="mixed"),
    IntervalShape("anti", -30, 0, late="drop"),
]
"""What comes out is the left's."""
SHAPES = SQL + STRICT + KEYED + SEMI
NANOSECONDS = [
    IntervalShape("full", -400, 300, clock="ns", stamped=True),
    IntervalShape("full", 0, 0, clock="ns"),
    IntervalShape("left", -5, 9, inclusive=(False, False), min_cleanup=700, clock="ms and ns"),
    IntervalShape("full", 4, 600, late="tag", clock="ns"),
    IntervalShape("inner", -600, 2, late="drop", keyed=True, clock="ms and ns"),
]
FEW = [SQL[3], SQL[8], SQL[12], STRICT[3], KEYED[0], SEMI[1], SEMI[2], SEMI[4], SEMI[5]]
OF_THE_MACHINE = ("update_ms", "probe_ms", "emit_ms", "_bytes", "lookups_index")
EMITS: tuple[Emit, ...] = ("per_event", "per_batch")


def seed(*parts: object) -> int:
    """A number that depends on nothing but the parameters of the test."""
    return zlib.crc32("-".join(map(str, parts)).encode())


def trace(
    shape: IntervalShape, events: int = 180, *, watermarks: float | None = None, in_time: bool = False
) -> list[TimedEvent]:
    """A trace for a shape; by default with few or many watermarks."""
    number = seed(shape)
    share = (0.03, 0.15)[number % 2] if watermarks is None else watermarks
    return list(timed_trace(shape, TimedRecipe(events, number, watermarks=share, in_time=in_time)))


def check(
    shape: IntervalShape,
    events: Sequence[TimedEvent],
    split: int | Sequence[int],
    backend: Backend,
    emit: Emit,
    *,
    shuffle: int | None = None,
) -> None:
    """Every event (``per_batch``: every micro-batch) says what the transcription says, and counts late rows alike."""
    rules = shape.terms().rules()
    with backend.engine(shape.join(emit)) as engine:
        for cut in timed_cuts(engine.description, events, split, shuffle=shuffle):
            before = list(rules.late)
            want = said(rules, events[cut.start : cut.stop], cut.start)
            found, position, batch = timed_run(engine, cut)
            got = by_event(found, position)
            if emit == "per_batch":
                want, got = together(want, cut), together(got, cut)
            for event in sorted({*want, *got}):
                wrong = difference(want.get(event, {}), got.get(event, {}))
                told = events[event] if cut.start <= event < cut.stop else "of another micro-batch"
                assert not wrong, f"{shape}, events {cut.start} to {cut.stop - 1}, event {event} {told}:\n{wrong}"
            late = [batch.metrics[f"{side}_late"] for side in ("left", "right")]
            assert late == [now - n for now, n in zip(rules.late, before, strict=True)]
            if rules.clock.now != END:
                assert batch.metrics.get("output_watermark_ms") == rules.output_watermark
            places = [place for place, (kind, _) in zip(position, found, strict=True) if kind != LATE]
            if emit == "per_event":
                assert places == sorted(places), "changes are ordered by the event that caused them"


def together(groups: dict[int, Counter[Change]], cut: TimedCut) -> dict[int, Counter[Change]]:
    """The changes of all events of a micro-batch, as if of its first."""
    total: Counter[Change] = Counter()
    for group in groups.values():
        total += group
    return {cut.start: total}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_event_by_the_rules(shape: IntervalShape, backend: Backend) -> None:
    """Rows, late rows, their numbers and the watermark that goes on."""
    check(shape, ends(trace(shape)), (70, 20, 40), backend, "per_event", shuffle=3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_micro_batch_by_the_rules(shape: IntervalShape, backend: Backend) -> None:
    check(shape, ends(trace(shape)), (13, 50, 1), backend, "per_batch")


@pytest.mark.parametrize("shape", NANOSECONDS, ids=str)
@pytest.mark.parametrize(
    "start", [-9_223_372_036_700, 1_767_225_600_000, 9_223_372_036_500], ids=["1677", "2026", "2262"]
)
def test_nanoseconds_from_1677_to_2262(shape: IntervalShape, start: int, backend: Backend) -> None:
    """They fill int64: what is beyond the last of them, as the end of a row's time, is no time any more."""
    terms = shape.terms()
    events = [
        (side, kind, told)
        for side, kind, told in timed_trace(shape, TimedRecipe(150, seed(shape, start), start=start, watermarks=0.1))
        if abs((told + 1) * 10**6 if kind == WATERMARK else told[terms.times[side]] * terms.scale[side]) < (1 << 63) - 1
    ]
    assert len(events) > 60
    check(shape, ends(events), (30, 7, 40), backend, "per_event")


@pytest.mark.parametrize("split", [1, 7], ids=["split1", "split7"])
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_small_micro_batches(shape: IntervalShape, split: int, backend: Backend) -> None:
    check(shape, ends(trace(shape, 120)), split, backend, "per_event")


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_large_micro_batches(shape: IntervalShape, backend: Backend) -> None:
    """Hundreds of rows at a time, of many keys and one hot one, far out of order."""
    shape = dataclasses.replace(shape, lower=shape.lower - 30, upper=shape.upper + 50)
    recipe = TimedRecipe(1500, seed(shape), keys=60, skew=0.1, disorder=120, late=0.3, watermarks=0.01)
    check(shape, ends(timed_trace(shape, recipe)), 1_000_000, backend, "per_event")


def drawn(number: int) -> tuple[IntervalShape, TimedRecipe]:
    """A join and a trace of any kind."""
    rng = random.Random(f"any-{number}")
    mode = rng.choice(("join", "join", "join", "drop", "tag", "keyed"))
    lower, upper = rng.choice((*BOUNDS, (-60, 60), (-3, 1), (-1, 2)))
    wide = upper - lower >= 2
    how = "inner" if mode == "keyed" else rng.choice((*HOWS, "semi", "anti"))
    shape = IntervalShape(
        how,
        lower,
        upper,
        inclusive=(not wide or rng.random() < 0.7, not wide or rng.random() < 0.7),
        late=rng.choice(("drop", "tag")) if mode == "keyed" else mode,
        keyed=mode == "keyed",
        min_cleanup=rng.choice((0, 0, 1, 5, 20, 80)) if mode == "join" else 0,
        keys=rng.choice(("int", "int", "string", "composite", "mixed_width", "none")),
        null_safe=rng.random() < 0.2,
        residual=rng.choice(((), (), X, (("a_x", "<>", "b_x"),), (("a_v", "<", "b_v"),))),
        clock=rng.choice(("ms", "ms", "us", "mixed", "utc", "int64")),
        stamped=rng.random() < 0.3 and how in HOWS,
    )
    recipe = TimedRecipe(
        rng.choice((60, 150, 400)),
        rng.randrange(1 << 30),
        start=rng.choice((1000, 1000, 1000, 0, -300)),
        keys=rng.choice((1, 3, 8, 40)),
        skew=rng.choice((0.0, 0.3, 0.8)),
        null_keys=rng.choice((0.0, 0.06, 0.4)),
        disorder=rng.choice((0, 3, 15, 60)),
        late=rng.choice((0.0, 0.1, 0.4)),
        watermarks=rng.choice((0.0, 0.02, 0.1, 0.3)),
    )
    return shape, recipe


def drawn_check(number: int, backend: Backend) -> None:
    shape, recipe = drawn(number)
    events = ends(timed_trace(shape, recipe))
    sizes = ((1,), (7,), (len(events),), (3, 30, 1, 11))[number % 4]
    check(shape, events, sizes, backend, EMITS[number // 4 % 2], shuffle=number if number % 3 else None)


@pytest.mark.parametrize("number", range(24))
def test_any_join_by_the_rules(number: int, backend: Backend) -> None:
    drawn_check(number, backend)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24, 174))
def test_many_joins_by_the_rules(number: int, backend: Backend) -> None:
    drawn_check(number, backend)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("how", [*HOWS, "semi", "anti", "keyed"])
def test_the_end_is_the_sql_join(how: str, bounds: tuple[int, int], backend: Backend) -> None:
    """Of rows in any order, but none late, all changes up to the input's end are the SQL join of all rows."""
    keyed, number = how == "keyed", seed(how, bounds)
    shape = IntervalShape(
        "inner" if keyed else how,
        *bounds,
        late="drop" if keyed or number % 2 else "join",
        keyed=keyed,
        keys=("int", "string", "composite", "none")[number % 4],
        null_safe=number % 5 == 0,
        residual=X if number % 3 else (),
        clock=("ms", "us", "int64", "mixed")[number // 7 % 4],
    )
    events = trace(shape, 200, in_time=True)
    emit = EMITS[number // 2 % 2]
    with backend.engine(shape.join(emit)) as engine:
        found: list[Change] = []
        for cut in timed_cuts(engine.description, events, (40, 3, 90)):
            got, _, batch = timed_run(engine, cut)
            assert batch.metrics["left_late"] == batch.metrics["right_late"] == 0
            found += got
        found += changes(engine.finish())
        wrong = difference(sql_join(engine.description, events), Counter(row for _, row in found))
        assert not wrong, f"{shape}:\n{wrong}"
        assert {kind for kind, _ in found} <= {"+I"}
        assert engine.state_size()["left_rows"] == engine.state_size()["right_rows"] == 0
        assert engine.finish().num_rows == 0


@pytest.mark.parametrize("shape", [*STRICT, SEMI[2], SEMI[5]], ids=str)
def test_the_end_is_the_sql_join_of_what_is_not_late(shape: IntervalShape, backend: Backend) -> None:
    """Late rows left out, it makes no difference when the others came, down to the watermark itself."""
    events, rules = trace(shape, 400, watermarks=0.15), shape.terms().rules()
    punctual: list[TimedEvent] = []
    for event in events:
        late = sum(rules.late)
        rules.process(event)
        if sum(rules.late) == late:
            punctual.append(event)
    assert len(punctual) < len(events)
    with backend.engine(shape.join("per_batch")) as engine:
        found = [change for cut in timed_cuts(engine.description, events, 30) for change in timed_run(engine, cut)[0]]
        found += changes(engine.finish())
        width = len(engine.description.output) - shape.stamped
        joined = Counter(row[:width] for kind, row in found if kind != LATE)
        wrong = difference(sql_join(engine.description, punctual), joined)
        assert not wrong, f"{shape}:\n{wrong}"


@pytest.mark.parametrize(("shape", "emit"), [(s, EMITS[n % 2]) for n, s in enumerate(SHAPES)], ids=str)
def test_backends_agree_row_for_row(shape: IntervalShape, emit: Emit, other_backend: Backend) -> None:
    """The same rows in the same order as on the plain CPU, with the same state after."""
    with CPU.engine(shape.join(emit)) as one, other_backend.engine(shape.join(emit)) as other:
        for cut in timed_cuts(one.description, trace(shape), (40, 1, 13)):
            first, second = one.prepare(**cut.inputs), other.prepare(**cut.inputs)
            one.commit()
            other.commit()
            assert identical(first.changelog, second.changelog)
            assert (first.sequence == second.sequence).all()
            told = [{k: v for k, v in b.metrics.items() if not k.endswith(OF_THE_MACHINE)} for b in (first, second)]
            assert told[0] == told[1]
        for name, table in one.snapshot().items():
            assert as_multiset(table) == as_multiset(other.snapshot()[name])


@pytest.mark.parametrize("shape", [*SQL[::2], *STRICT[::3], *KEYED[::3], *SEMI[:3]], ids=str)
def test_a_restart_goes_unnoticed(shape: IntervalShape, backend: Backend) -> None:
    parts = list(timed_cuts(shape.join(), ends(trace(shape)), 25))
    same_after_restarts(backend, shape.join(), parts, timed_run, every=3)


@pytest.mark.one_in(16, all=8)
@pytest.mark.parametrize("shape", [*SQL[1::2], *STRICT[::3], *KEYED[::3], *SEMI[2:]], ids=str)
def test_a_discarded_micro_batch_leaves_nothing(shape: IntervalShape, backend: Backend) -> None:
    """Its rows are gone, and so are its watermark and what that took away."""
    parts = list(timed_cuts(shape.join(), ends(trace(shape)), 30))
    same_after_discards(backend, shape.join(), parts, timed_run, step=3)


@pytest.mark.parametrize("split", [5, 40])
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_watermarks_by_delay(shape: IntervalShape, split: int, backend: Backend) -> None:
    """Told none, an engine goes by the latest times of earlier micro-batches, less each input's delay."""
    events = [event for event in trace(shape) if event[1] == "+I"]
    delays, join = (12, 7), shape.join()
    left, right = (dataclasses.replace(s, delay_ms=d) for s, d in zip(join.inputs, delays, strict=True))
    join = dataclasses.replace(join, left=left, right=right)
    terms = shape.terms()
    rules, latest = terms.rules(), [START, START]
    with backend.engine(join) as engine:
        for cut in timed_cuts(join, events, split):
            before = rules.advance(*(t if t == START else t - d for t, d in zip(latest, delays, strict=True)))
            found, position, batch = timed_run(
                engine, dataclasses.replace(cut, inputs={**cut.inputs, "watermark": None})
            )
            got = by_event(found, position)
            wrong = difference(Counter(before), got.pop(cut.start - 1, {}))
            assert not wrong, f"{shape}, before event {cut.start}:\n{wrong}"
            want = said(rules, events[cut.start : cut.stop], cut.start)
            for event in range(cut.start, cut.stop):
                wrong = difference(want.get(event, {}), got.pop(event, {}))
                assert not wrong, f"{shape}, event {event} {events[event]}:\n{wrong}"
            assert not got
            for side, _, row in events[cut.start : cut.stop]:
                latest[side] = max(latest[side], row[terms.times[side]] * terms.scale[side] // terms.per_ms)
            assert batch.metrics.get("watermark_ms") == (None if rules.clock.now == START else rules.clock.now)


def test_a_watermark_of_one_input_says_nothing(backend: Backend) -> None:
    """Until the other's is known; and then it is the smaller one of both that counts, and it never goes back."""
    shape = IntervalShape("full", -20, 10)
    events = [(0, "+I", (1, 100, 0, "a")), (1, "+I", (2, 100, 0, "b"))]
    pads = [("+I", (1, 100, 0, "a", *[None] * 4)), ("+I", (*[None] * 4, 2, 100, 0, "b"))]
    with backend.engine(shape.join()) as engine:
        (cut,) = timed_cuts(engine.description, events, 2)
        assert timed_run(engine, cut)[0] == []
        for watermark in ((500, None), (None, 500), (500, 110), 110, (100, 500), 100):
            assert engine.process(watermark=watermark).num_rows == 0
        assert changes(engine.process(watermark=(500, 111))) == pads[:1]
        assert engine.process(watermark=120).num_rows == 0
        assert engine.process(watermark=(50, 50)).num_rows == 0
        late = timed_run(engine, dataclasses.replace(cut, inputs={**cut.inputs, "watermark": 90}))
        assert (late[2].metrics["left_late"], late[2].metrics["watermark_ms"]) == (1, 120)
        assert late[0] == pads
        assert changes(engine.process(watermark=121)) == pads[1:]


@pytest.mark.parametrize("first", [0, 1], ids=["left_first", "right_first"])
@pytest.mark.parametrize("split", [1, 3])
def test_rows_at_the_watermark_are_not_late(split: int, first: int, backend: Backend) -> None:
    """With late rows left out, two rows at the watermark itself meet, whichever comes first."""
    shape = IntervalShape("full", 0, 0, late="drop")
    rows = [(0, "+I", (1, 100, 0, "a")), (1, "+I", (1, 100, 0, "b"))]
    events: list[TimedEvent] = [(0, WATERMARK, 100), (1, WATERMARK, 100), rows[first], rows[1 - first]]
    with backend.engine(shape.join()) as engine:
        found = [timed_run(engine, cut)[:2] for cut in timed_cuts(engine.description, events, split)]
        assert [c for said_, _ in found for c in said_] == [("+I", (1, 100, 0, "a", 1, 100, 0, "b"))]
        assert [p for _, position in found for p in position] == [3]
        assert engine.finish().num_rows == 0


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("split", [1, 3])
def test_a_pair_at_the_watermark_never_comes_where_late_rows_join(how: str, split: int, backend: Backend) -> None:
    """The documented example, which is Flink's: a row whose time ends at the watermark is not kept, nor late."""
    shape = IntervalShape(how, 0, 0)
    left, right = (1, 10, 0, "a"), (1, 10, 0, "b")
    events: list[TimedEvent] = [(0, WATERMARK, 10), (1, WATERMARK, 10), (0, "+I", left), (1, "+I", right)]
    pads = [("+I", left + (None,) * 4)] * (how in ("left", "full"))
    pads += [("+I", (None,) * 4 + right)] * (how in ("right", "full"))
    with backend.engine(shape.join()) as engine:
        found = [timed_run(engine, cut) for cut in timed_cuts(engine.description, events, split)]
        assert [change for said_, _, _ in found for change in said_] == pads
        assert sum(b.metrics["left_late"] + b.metrics["right_late"] for _, _, b in found) == 0
        assert engine.state_size()["left_rows"] == engine.state_size()["right_rows"] == 0
