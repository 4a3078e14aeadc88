"""``emit="at_end"`` and backlogs: the same result as streaming, and as a SQL join of the folded inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.join_engine import JoinEngine
from oracle.drive import Backend, Change, changes, cuts, difference, fold, run
from oracle.sql import reference
from oracle.traces import HOWS, LAYOUTS, Recipe, Shape, recipe, trace

pytestmark = pytest.mark.one_in(6)

SHAPES = [
    *(Shape(how, a, b) for how in HOWS for a, b in zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True)),
    *(Shape(how, "multiset", "unique_key", keys="composite", null_safe=how != HOWS[-1]) for how in HOWS),
    *(Shape(how, "unique_key", "multiset", residual=(("a_x", ">", "b_x"),)) for how in HOWS),
    *(Shape(how, "multiset", "multiset", keys="double") for how in HOWS),
    *(Shape(how, "multiset", "multiset", keys="none", residual=(("a_x", ">", "b_x"),)) for how in HOWS[:6]),
]
SIZES = (50, 3, 17, 1, 30)


def seed(*parts: object) -> int:
    return zlib.crc32("-".join(map(str, parts)).encode())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_is_the_join_of_the_folded_inputs(shape: Shape, backend: Backend) -> None:
    events = trace(shape, recipe(shape, 200, seed(shape), live=30, malformed=True))
    view = reference(shape.join("at_end"))
    with contextlib.closing(view), backend.engine(view.join) as engine:
        for cut in cuts(engine.description, events, SIZES, shuffle=1):
            view.change(events[cut.start : cut.stop])
            batch = engine.prepare(**cut.inputs)
            assert not batch.changelog.num_rows, "nothing is said before the end"
            engine.commit()
        result = engine.finish()
        assert set(result["row_kind"].to_pylist()) <= {"+I"}
        view.fold(result)
        assert not view.differences()
        with pytest.raises(StateError, match="the input has ended"):
            engine.process()


@pytest.mark.parametrize("hows", list(itertools.product(("inner", "left"), repeat=2)), ids="-".join)
def test_a_multi_way_join_at_its_end(hows: tuple[str, str], backend: Backend) -> None:
    join = multi(hows, "at_end")
    view = reference(join)
    with contextlib.closing(view), backend.engine(join) as engine:
        for events in batches_of_three(seed(hows), 6):
            view.change(events)
            (cut,) = cuts(join, events, len(events))
            assert run(engine, cut)[0] == []
        view.fold(engine.finish())
        assert not view.differences()


def multi(hows: tuple[str, str], emit: Emit) -> MultiJoin:
    inputs = [
        Input(n, pa.schema([(f"{n}_k", pa.int64()), (f"{n}_x", pa.int64())]), row_kind="row_kind")
        for n in ("a", "b", "c")
    ]
    return MultiJoin.of(inputs, [("a_k", "b_k"), ("a_k", "c_k")], hows, where=[None, "a_x <= c_x"], emit=emit)


def batches_of_three(number: int, count: int) -> list[list[Any]]:
    """Well-formed changes of three inputs."""
    rng = np.random.default_rng(number)
    live: list[list[Any]] = [[], [], []]
    found = []
    for _ in range(count):
        events: list[Any] = []
        for _ in range(25):
            side = int(rng.integers(3))
            if live[side] and rng.random() < 0.35:
                events.append((side, "-D", live[side].pop(int(rng.integers(len(live[side]))))))
            else:
                row = (None if rng.random() < 0.1 else int(rng.integers(5)), int(rng.integers(4)))
                live[side].append(row)
                events.append((side, "+I", row))
        found.append(events)
    return found


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_an_interval_join_at_its_end_knows_no_late_row(how: Any, backend: Backend) -> None:
    schema = [pa.schema([(f"{n}_k", pa.int64()), (f"{n}_t", pa.int64())]) for n in "lr"]
    inputs = [Input(n, s, event_time=f"{n}_t", delay_ms=0) for n, s in zip("lr", schema, strict=True)]
    join = IntervalJoin(how, *inputs, (Key("l_k", "r_k"),), emit="at_end", interval=Interval(-5, 10))
    rng = np.random.default_rng(4)
    tables = [
        [pa.table({s.names[0]: rng.integers(0, 5, 40), s.names[1]: rng.integers(0, 200, 40)}, schema=s) for s in schema]
        for _ in range(4)
    ]
    with backend.engine(join) as engine:
        for left, right in tables:
            assert not engine.process(left, right).num_rows
        found = Counter(row for _, row in changes(engine.finish()))
    rows = [[tuple(r.values()) for batch in tables for r in batch[side].to_pylist()] for side in (0, 1)]
    pairs = [(a, b) for a in rows[0] for b in rows[1] if a[0] == b[0] and -5 <= b[1] - a[1] <= 10]
    want = Counter((*a, *b) for a, b in pairs)
    none = (None, None)
    if how in ("left", "full"):
        want += Counter((*a, *none) for a in rows[0] if a not in {p[0] for p in pairs})
    if how in ("right", "full"):
        want += Counter((*none, *b) for b in rows[1] if b not in {p[1] for p in pairs})
    assert not difference(want, found)


def test_what_is_kept_goes_to_disk_beyond_the_budget_and_comes_back() -> None:
    shape = Shape("full", "multiset", "multiset")
    events = trace(shape, Recipe(1000, 3, live=60))
    results = []
    for limit in (None, 16_000):  # enough for what comes out at a time
        engine = JoinEngine(shape.join("at_end"), "cpu", memory_limit=limit)
        for number, cut in enumerate(cuts(engine.description, events, 100)):
            engine.process(**cut.inputs)
            if number == 5:
                snapshot = engine.snapshot()
                if limit is not None:
                    assert engine.memory.budget.used.host <= limit
                    assert engine.memory.budget.used.disk
                engine.close()
                engine = JoinEngine(shape.join("at_end"), "cpu", memory_limit=limit)
                engine.restore(snapshot)
        results.append(Counter(changes(engine.finish())))
        engine.close()
    assert results[0] == results[1]
    assert results[0]


BACKLOGS = [
    *(Shape(how, a, b) for how in HOWS for a, b in ((LAYOUTS[0], LAYOUTS[1]), (LAYOUTS[2], LAYOUTS[0]))),
    *(Shape(how, "unique_key", "multiset", residual=(("a_x", ">", "b_x"),)) for how in HOWS),
]


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("shape", BACKLOGS, ids=str)
def test_after_a_backlog_all_is_as_without_one(shape: Shape, emit: Emit, backend: Backend) -> None:
    """What it says first folds to what was said meanwhile; then every change and the state are the same."""
    number = seed(shape, emit)
    events = trace(shape, recipe(shape, 300, number, live=30, malformed=True))
    join = shape.join(emit)
    until = (0, 60, 150)[number % 3]
    told: list[list[Change]] = [[], []]
    with backend.engine(join) as plain, backend.engine(join, backlog=True) as engine:
        for cut in cuts(join, events, SIZES):
            history = cut.start < until
            want = run(plain, cut)[0]
            if number % 2:  # a micro-batch that is tried twice
                engine.prepare(**cut.inputs, backlog=history)
                engine.discard()
            got = run(engine, cut, backlog=history)[0]
            live = bool(told[1]) or not until
            told[0] += want
            told[1] += got
            if history:
                assert not got
            elif live:
                assert Counter(want) == Counter(got)
            else:
                assert fold(told[0]) == fold(told[1])
        states = plain.snapshot(), engine.snapshot()
    for side in states[0]:
        assert Counter(map(str, states[0][side].to_pylist())) == Counter(map(str, states[1][side].to_pylist()))


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
def test_a_backlog_of_a_multi_way_join_survives_a_snapshot(emit: Emit, backend: Backend) -> None:
    join = multi(("left", "left"), emit)
    plain: Counter[Any] = Counter()
    found: Counter[Any] = Counter()
    given = batches_of_three(11, 8)
    engines = contextlib.ExitStack()
    with engines:
        a, b = engines.enter_context(backend.engine(join)), engines.enter_context(backend.engine(join, backlog=True))
        for number, events in enumerate(given):
            (cut,) = cuts(join, events, len(events))
            fold(run(a, cut)[0], plain)
            if number in (3, 6):
                state = b.snapshot()
                b = engines.enter_context(backend.engine(join, backlog=True))
                b.restore(state)
            fold(run(b, cut, backlog=number < 5)[0], found)
        assert plain == found
        assert plain


def test_a_backlog_that_only_ends_says_its_result() -> None:
    shape = Shape("left", "multiset", "multiset")
    events = trace(shape, Recipe(120, 5, live=30))
    view = reference(shape.join("per_event"))
    with contextlib.closing(view), contextlib.closing(JoinEngine(view.join, "cpu", backlog=True)) as engine:
        view.change(events)
        for cut in cuts(view.join, events, 40):
            engine.process(**cut.inputs, backlog=True)
        view.fold(engine.finish())
        assert not view.differences()
        assert view.size()


def test_where_no_backlog_can_be() -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.int64())])
    right = pa.schema([("k2", pa.int64()), ("t2", pa.int64())])
    timed = IntervalJoin(
        "inner", Input("l", schema, event_time="t"), Input("r", right, event_time="t2"), (Key("k", "k2"),),
        interval=Interval(0, 1),
    )  # fmt: skip
    with pytest.raises(DescriptionError, match="goes by its watermark"):
        JoinEngine(timed, "cpu", backlog=True)
    expiring = Join("inner", Input("l", schema, ttl_ms=5), Input("r", right), (Key("k", "k2"),))
    with pytest.raises(DescriptionError, match="input 'l' expire"):
        JoinEngine(expiring, "cpu", backlog=True)
    with pytest.raises(DescriptionError, match="backlog=True"):
        JoinEngine(Join("inner", Input("l", schema), Input("r", right), (Key("k", "k2"),)), "cpu").process(backlog=True)
    with pytest.raises(DescriptionError, match="input 'l': with emit='at_end' no row is forgotten"):
        Join("inner", Input("l", schema, ttl_ms=5), Input("r", right), (Key("k", "k2"),), emit="at_end")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
def test_five_million_rows(how: Any) -> None:
    """At its end, folded ``per_event``, and DuckDB: the same."""
    rows, rng = 2_500_000, np.random.default_rng(8)
    schemas = pa.schema([("k", pa.int64()), ("a", pa.int64())]), pa.schema([("k", pa.int64()), ("b", pa.int64())])
    tables = [pa.table([rng.integers(0, rows, rows), rng.integers(0, 100, rows)], schema=s) for s in schemas]
    found = []
    for emit in ("at_end", "per_event"):
        join = Join(
            how, Input("l", schemas[0]), Input("r", schemas[1]), (Key("k", "k"),), emit=emit, suffixes=("", "_r")
        )
        view = reference(join, large=True)
        with contextlib.closing(view), contextlib.closing(JoinEngine(join, "cpu")) as engine:
            for start in range(0, rows, 250_000):
                view.fold(engine.process(*(t.slice(start, 250_000) for t in tables)))
            view.fold(engine.finish())
            for source, table in zip(join.inputs, tables, strict=True):
                view.connection.register(source.name, table)
            view._stale = [False, False]
            assert not view.differences()
            found.append(view.size())
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.parametrize("backlog", [False, True])
def test_an_update_that_moves_a_row_to_another_key(backlog: bool, backend: Backend) -> None:
    """Of a unique key beside the join's key the old row comes under its old key; parts know no order between them."""
    left = pa.schema([pa.field("id", pa.int64(), nullable=False), ("k", pa.int64())])
    changing = left.append(pa.field("row_kind", pa.string()))
    right = pa.schema([("k", pa.int64())])
    source = Input("l", left, unique_key=("id",), row_kind="row_kind", updates="retract")
    join = Join("inner", source, Input("r", right), (Key("k", "k", using=True),), emit="per_batch")
    if not backlog:
        join = dataclasses.replace(join, emit="at_end")
    options: dict[str, Any] = {"backlog": True} if backlog else {}
    at = {row: (row * 7) % 40 for row in range(200)}
    with backend.engine(join, **options) as engine:
        engine.process(None, pa.table({"k": list(range(40))}), **options)
        lines = [{"id": row, "k": k, "row_kind": "+I"} for row, k in at.items()]
        for step in (3, 11, 5):
            for row, k in at.items():
                at[row] = (k + step) % 40
                lines += [{"id": row, "k": k, "row_kind": "-U"}, {"id": row, "k": at[row], "row_kind": "+U"}]
            engine.process(pa.Table.from_pylist(lines, schema=changing), None, **options)
            lines = []
        found = Counter(row for _, row in changes(engine.finish()))
    assert found == Counter((k, row) for row, k in at.items())


@pytest.mark.slow
def test_a_backlog_of_ten_million_rows() -> None:
    """The live phase begins with the state of a run without a backlog, and the net result is all that was said."""
    rows, rng = 5_000_000, np.random.default_rng(9)
    schemas = pa.schema([("k", pa.int64()), ("a", pa.int64())]), pa.schema([("k", pa.int64()), ("b", pa.int64())])
    tables = [pa.table([rng.integers(0, rows, rows), rng.integers(0, 100, rows)], schema=s) for s in schemas]
    join = Join("left", Input("l", schemas[0]), Input("r", schemas[1]), (Key("k", "k"),), suffixes=("", "_r"))
    states, said = [], []
    for backlog in (False, True):
        engine = JoinEngine(join, "cpu", backlog=backlog)
        net = 0
        for start in range(0, rows, 500_000):
            out = engine.process(*(t.slice(start, 500_000) for t in tables), backlog=backlog)
            comes = pc.sum(pc.equal(out["row_kind"], "+I")).as_py() or 0
            net += 2 * comes - out.num_rows
        last = engine.process(*(t.slice(0, 1000) for t in tables))
        states.append(
            {side: t.sort_by([(c, "ascending") for c in t.column_names]) for side, t in engine.snapshot().items()}
        )
        said.append((net, last.num_rows))
        engine.close()
    (net, live), (silent, first) = said
    assert silent == 0
    assert first == net + live, "the net result, then what the live micro-batch says"
    assert states[0] == states[1]
