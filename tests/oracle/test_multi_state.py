"""The multi-way join's state: TTL by the rules, restarts, retries, limits, and keys with very many rows."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.keys import Equality
from gpu_ops.descriptions.multi_join import JoinStep, MultiJoin
from gpu_ops.errors import StateError
from gpu_ops.join_engine import JoinEngine
from oracle.drive import (
    Backend,
    Change,
    Cut,
    Event,
    Row,
    by_event,
    cuts,
    difference,
    fold,
    run,
    same_after_discards,
    same_after_restarts,
)
from oracle.multi_rules import MultiRules
from oracle.multi_traces import SHAPES, MultiShape, multi_recipe, multi_trace, random_shape, shape

CPU = Backend("cpu")
TTLS = (900, 400, None, 250, 700)
"""Per input, by turns; a micro-batch comes every 60 ms on average."""
SIZES = (20, 1, 7, 33)


def with_ttl(join: MultiJoin, ttls: Sequence[int | None]) -> MultiJoin:
    inputs = [dataclasses.replace(i, ttl_ms=t) for i, t in zip(join.inputs, ttls, strict=False)]
    return dataclasses.replace(join, inputs=tuple(inputs))


# --- TTL -------------------------------------------------------------------------------------


def check_ttl(made: MultiShape, seed: int, emit: Emit, backend: Backend, *, events: int, malformed: bool) -> None:
    """What the rules say at the micro-batch's time: per event, or in sum."""
    join = with_ttl(made.join(emit), TTLS[seed % 3 :] + TTLS)
    rules = MultiRules(join, [s.residual for s in made.steps])
    trace = multi_trace(made, multi_recipe(made, events, seed, malformed=malformed))
    rng = random.Random(seed)
    now, expired, unknown = 0, [0] * len(join.inputs), [0] * len(join.inputs)
    with backend.engine(join) as engine:
        for cut in cuts(join, trace, SIZES, shuffle=seed):
            now += rng.choice((0, 20, 60, 60, 160))
            expected = {n: rules.process(trace[n], now) for n in range(cut.start, cut.stop)}
            found, position, batch = run(engine, cut, clock_ms=now)
            if emit == "per_batch":
                want, got = fold([c for said in expected.values() for c in said]), fold(found)
                assert got == want, f"{made}: events {cut.start} to {cut.stop - 1}:\n{difference(want, got)}"
                assert len(found) == sum(map(abs, want.values())), "nothing comes and goes within a micro-batch"
            else:
                compare_events(made, trace, expected, by_event(found, position), exact=not malformed)
            for place, name in enumerate(join.sides):
                expired[place] += batch.metrics[f"{name}_expired"]
                unknown[place] += batch.metrics[f"{name}_unknown_retractions"]
                assert batch.metrics[f"{name}_state_rows"] == len(rules.table(place))
    assert expired == rules.expired
    assert unknown == rules.unknown
    assert sum(expired) > 2
    assert not any(n for n, source in zip(expired, join.inputs, strict=True) if source.ttl_ms is None)


def compare_events(
    made: MultiShape, trace: Sequence[Event], expected: dict[int, list[Change]], found: Any, *, exact: bool
) -> None:
    for number, want in expected.items():
        got = found.get(number, Counter())
        wrong = difference(Counter(want), got) if exact else difference(fold(want), fold(list(got.elements())))
        assert not wrong, f"{made}: event {number} {trace[number]}:\n{wrong}"


@pytest.mark.parametrize("number", range(0, len(SHAPES), 5))
def test_ttl_by_the_rules(number: int, backend: Backend) -> None:
    check_ttl(SHAPES[number], number, "per_event", backend, events=260, malformed=False)


@pytest.mark.parametrize("number", range(2, len(SHAPES), 5))
def test_ttl_per_batch(number: int, backend: Backend) -> None:
    check_ttl(SHAPES[number], number, "per_batch", backend, events=260, malformed=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_ttl_of_random_graphs(number: int, backend: Backend) -> None:
    made = random_shape(random.Random(f"ttl-{number}"))
    for emit, malformed in (("per_event", False), ("per_event", True), ("per_batch", True)):
        check_ttl(made, number, emit, backend, events=500, malformed=malformed)  # type: ignore[arg-type]


def row(*values: Any) -> Row:
    """Of an input of `shape` without a unique key: key and x."""
    return (values[0], "g", values[1], 0.5)


def at(engine: Any, now: int, *events: Event) -> list[Change]:
    (cut,) = cuts(engine.description, events, len(events)) if events else (Cut(0, 0, {}),)
    return run(engine, cut, clock_ms=now)[0]


NONE: Row = (None,) * 4


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_expiry_says_nothing_and_pads_nothing(emit: Emit, backend: Backend) -> None:
    """An expired row is absent; the next match takes back a pad that was never given, as in Flink."""
    a, b, c, other = row(1, 1), row(1, 2), row(1, 3), row(1, 4)
    with backend.engine(with_ttl(shape("ll").join(emit), (None, 100, 1000))) as engine:
        assert at(engine, 0, (0, "+I", a), (1, "+I", b), (2, "+I", c))[-1] == ("+I", a + b + c)
        assert at(engine, 100) == []
        assert at(engine, 150, (1, "+I", other)) == [("-D", a + NONE + c), ("+I", a + other + c)]
        assert at(engine, 200, (1, "-D", b)) == [], "what has expired is not there"
        assert at(engine, 210, (1, "-D", other)) == [("-D", a + other + c), ("+I", a + NONE + c)]
        assert at(engine, 999, (1, "+I", b)) == [("-D", a + NONE + c), ("+I", a + b + c)]
        assert at(engine, 1000, (1, "-D", b)) == [("-D", a + b + NONE), ("+I", a + NONE + NONE)]


def test_only_its_own_writes_refresh_a_row(backend: Backend) -> None:
    """No counts are written to a row, so a match refreshes nothing: not what the two-way operators do."""
    a, b = row(1, 1), row(1, 2)
    with backend.engine(with_ttl(shape("l").join(), (100, 100))) as engine:
        at(engine, 0, (0, "+I", a))
        assert at(engine, 60, (1, "+I", b)) == [("-D", a + NONE), ("+I", a + b)]
        assert at(engine, 100, (1, "+I", b)) == [], "a was last written at 0"
        assert at(engine, 159, (0, "+I", a)) == [("+I", a + b)] * 2, "a further copy refreshes all copies"
        assert at(engine, 199, (1, "-D", b)) == [("-D", a + b)], "and so does one copy less"
        assert at(engine, 258, (0, "+U", a)) == [("+U", a + b)]


def test_a_restart_keeps_the_times(backend: Backend) -> None:
    a, b = row(1, 1), row(1, 2)
    join = with_ttl(shape("l").join(), (100, 50))
    with backend.engine(join) as engine:
        at(engine, 0, (0, "+I", a), (1, "+I", b))
        at(engine, 40, (1, "+I", b))
        state = engine.snapshot()
    with backend.engine(join) as engine:
        engine.restore(state)
        assert at(engine, 89, (0, "+I", row(1, 5))) == [("+I", row(1, 5) + b)] * 2
        assert at(engine, 90, (0, "+I", row(1, 6))) == [("+I", row(1, 6) + NONE)]
        pads, joined = ([(kind, row(1, own) + other) for own in (5, 6)] for kind, other in (("-D", NONE), ("+I", b)))
        assert at(engine, 100, (1, "+I", b)) == pads + joined


def test_a_discarded_micro_batch_expires_nothing(backend: Backend) -> None:
    with backend.engine(with_ttl(shape("ll").join(), (100, 100, 100))) as engine:
        at(engine, 0, (0, "+I", row(1, 1)), (1, "+I", row(1, 2)))
        before = engine.snapshot()
        assert engine.prepare(clock_ms=500).metrics["A_expired"] == 1
        engine.discard()
        assert all(table.equals(before[name]) for name, table in engine.snapshot().items())
        assert engine.state_size()["A_rows"] == 1


# --- restarts and retries --------------------------------------------------------------------

FEW = [SHAPES[n] for n in (5, 17)]


def parts_of(made: MultiShape, emit: Emit, size: int) -> tuple[MultiJoin, list[Cut]]:
    join = made.join(emit)
    trace = multi_trace(made, multi_recipe(made, 120, 5, malformed=True))
    return join, list(cuts(join, trace, size))


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("made", FEW, ids=str)
def test_a_restart_goes_unnoticed(made: MultiShape, emit: Emit, backend: Backend) -> None:
    same_after_restarts(backend, *parts_of(made, emit, 25))


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("made", FEW, ids=str)
def test_a_discarded_micro_batch_leaves_nothing(made: MultiShape, emit: Emit, backend: Backend) -> None:
    same_after_discards(backend, *parts_of(made, emit, 30))


def test_a_snapshot_that_lacks_a_column() -> None:
    with CPU.engine(shape("ll").join()) as engine:
        at(engine, 0, (0, "+I", row(1, 1)))
        state = engine.snapshot()
    with CPU.engine(shape("ll").join()) as engine, pytest.raises(StateError, match=r"'A'.*a_x"):
        engine.restore({**state, "A": state["A"].drop_columns(["a_x"])})


@pytest.mark.parametrize("place", range(3))
def test_a_memory_limit_is_kept(place: int, backend: Backend) -> None:
    """The micro-batch that would go beyond it fails, and the state is as it was."""
    few: list[Event] = [(p, "+I", row(n, n)) for n in range(10) for p in range(3)]
    many: list[Event] = [(place, "+I", row(n, n)) for n in range(30_000)]
    join = shape("ll").join()
    with backend.engine_within(join, 500_000) as engine, backend.engine(join) as untroubled:
        assert at(engine, 0, *few) == at(untroubled, 0, *few)
        before = engine.snapshot()
        with pytest.raises(StateError, match="memory_limit"):
            at(engine, 0, *many)
        for name, table in engine.snapshot().items():
            assert table.equals(before[name])
        then: list[Event] = [(1, "-D", row(3, 3)), (2, "+I", row(4, 5))]
        assert at(engine, 0, *then) == at(untroubled, 0, *then)


# --- a key with very many rows ---------------------------------------------------------------


def rows_of(letter: str, count: int, keys: int, per_group: int) -> pa.Table:
    """So many rows in so many keys; so many of a key have the same ``g``."""
    number = range(count)
    return pa.table(
        {
            f"{letter}_k": pa.array([n % keys for n in number], pa.int64()),
            f"{letter}_g": pa.array([n // keys // per_group for n in number], pa.int64()),
            f"{letter}_x": pa.array(number, pa.int64()),
        }
    )


def hot_join(how: Any) -> MultiJoin:
    """A and B on key and group, C on key and group of A; nothing on the hot key alone."""
    inputs = [Input(n.upper(), rows_of(n, 0, 1, 1).schema, row_kind="op") for n in "abc"]
    steps = [JoinStep(how, (Equality(0, "a_k", f"{p}_k"), Equality(0, "a_g", f"{p}_g"))) for p in "bc"]
    return MultiJoin(tuple(inputs), tuple(steps), "per_event")


def loaded(how: Any, count: int, keys: int, backend: Backend) -> Any:
    """An engine with so many rows in A and in B; ten of each match one row of C."""
    engine = JoinEngine(hot_join(how), "gpu" if backend.gpu else "cpu", tiny=backend.name.endswith("-tiny"))
    kinds = pa.array(["+I"] * count, pa.string())
    a, b = (rows_of(letter, count, keys, 10).append_column("op", kinds) for letter in "ab")
    engine.process(None, b, None)
    engine.process(a, None, None)
    return engine


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["inner", "left"])
def test_a_hot_key_costs_what_matches(how: str, backend: Backend) -> None:
    """All rows of two inputs have one key, and ten of each match a change: that many are looked at, no more."""
    count = 2_000 if backend.name.endswith("-tiny") else 100_000
    few_per_key = count // 1000
    took = {}
    for keys in (few_per_key, 1):
        engine = loaded(how, count, keys, backend)
        for place, said in ((2, 200 if how == "left" else 100), (0, 10), (1, 11)):
            schema = engine.description.inputs[place].schema.append(pa.field("op", pa.string()))
            change = pa.Table.from_pylist([dict(zip(schema.names, (0, 7, -1, "+I"), strict=True))], schema)
            tables = [change if p == place else None for p in range(3)]
            engine.prepare(*tables)
            engine.discard()
            started = time.perf_counter()
            batch = engine.prepare(*tables)
            took[keys, place] = time.perf_counter() - started
            engine.commit()
            assert batch.changelog.num_rows == said
            assert batch.metrics["candidates"] <= 4 * said, f"{keys} keys, input {place}"
        engine.close()
    for place in range(3):
        assert took[1, place] < 10 * took[few_per_key, place] + 0.05
