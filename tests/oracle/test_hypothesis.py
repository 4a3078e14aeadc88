"""Any sequence of changes is a valid trace; hypothesis looks for the shortest that goes wrong."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from oracle.drive import Backend, Event, Row, by_event, cuts, difference, fold, run, run_all
from oracle.rules import Rules
from oracle.sql import reference
from oracle.traces import HOWS, LAYOUTS, Shape

RESIDUALS = ((), (), (("a_x", ">", "b_x"),), (("a_d", "<=", "b_d"),))
KINDS = ("+I", "+I", "-D", "-U", "+U")


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any join over any layouts."""
    how = draw(st.sampled_from(HOWS))
    plain = how == "null_aware_anti"
    keys: Any = draw(st.sampled_from(("int", "double", "composite") + (() if plain else ("none",))))
    layouts = LAYOUTS[:2] if keys == "none" else LAYOUTS
    return Shape(
        how,
        left=draw(st.sampled_from(layouts)),
        right=draw(st.sampled_from(layouts)),
        keys=keys,
        null_safe=keys != "none" and draw(st.booleans()),
        residual=draw(st.sampled_from(RESIDUALS)),
    )


def values(name: str, *, unique: bool) -> st.SearchStrategy[Any]:
    """Few values for each column, so that rows meet and repeat."""
    some: dict[str, st.SearchStrategy[Any]] = {
        "id": st.integers(0, 2),
        "g": st.sampled_from(("x", "y")),
        "x": st.integers(0, 1),
        "s": st.just("s"),
        "d": st.sampled_from((0.0, -0.0, math.nan)),
    }
    found = some[name] if name != "k" else st.integers(0, 1)
    return found if unique else st.none() | found


@st.composite
def traces(draw: st.DrawFn) -> tuple[Shape, list[Event], list[int]]:
    """A join, changes for it, and micro-batch sizes."""
    shape = draw(shapes())
    sides = []
    for source in shape.join().inputs:
        unique = source.unique_key or ()
        columns = []
        for name in source.schema.names:
            found = values(name[2:], unique=name in unique)
            if name[2:] == "k" and shape.keys == "double":
                found = st.sampled_from((0.0, -0.0, math.nan, 1.0)) | (st.nothing() if name in unique else st.none())
            columns.append(found)
        sides.append(st.tuples(st.sampled_from(KINDS), st.tuples(*columns)))
    change = st.one_of(
        sides[0].map(lambda c: (0, c[0], c[1])),
        sides[1].map(lambda c: (1, c[0], c[1])),
    )
    events = draw(st.lists(change, max_size=24))
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    return shape, events, sizes


NOT_IN_KEYS = [None, 1, 2]


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("safe", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("where", [None, "l.i >= r.i"])
def test_a_null_aware_anti_join_of_several_keys_heeds_null_safe(
    safe: tuple[bool, bool], emit: Any, where: str | None, backend: Backend
) -> None:
    """``=`` with a null is unknown, ``<=>`` never is; a row is out while any comparison of it is not false."""
    schema = pa.schema([("i", pa.int64()), ("a`b", pa.int64()), ("c", pa.int64())])
    inputs = [Input(name, schema, row_kind="op") for name in "lr"]
    keys = (Key("a`b", "a`b", safe[0]), Key("c", "c", safe[1]))
    join = Join("anti", *inputs, keys, where=where, emit=emit, null_aware=True)
    rows = [(n, *pair) for n, pair in enumerate(itertools.product(NOT_IN_KEYS, repeat=2))]
    folded: Counter[Row] = Counter()

    def not_false(left: Row, right: Row) -> bool:
        if where is not None and left[0] < right[0]:
            return False
        pairs = zip(left[1:], right[1:], safe, strict=True)
        return all(x == y if is_safe else x is None or y is None or x == y for x, y, is_safe in pairs)

    def change(side: int, kind: str, *given: Row) -> None:
        columns = [pa.array([row[n] for row in given], pa.int64()) for n in range(3)]
        batch = pa.table([pa.array([kind] * len(given)), *columns], names=["op", *schema.names])
        said = engine.process(**{("left", "right")[side]: batch})
        fold([(k, tuple(row)) for k, *row in zip(*(c.to_pylist() for c in said.columns), strict=True)], folded)

    with backend.engine(join) as engine:
        change(0, "+I", *rows)
        for right in rows:
            change(1, "+I", right)
            assert folded == Counter(left for left in rows if not not_false(left, right))
            change(1, "-D", right)
            assert folded == Counter(rows)


@given(made=traces())
def test_per_event_by_the_rules(made: tuple[Shape, list[Event], list[int]], backend: Backend) -> None:
    """Each event says what Flink's operator says; of an upsert, what it adds and takes."""
    shape, events, sizes = made
    rules = Rules(shape.join(), shape.residual)
    expected = [rules.process(e) for e in events]
    event(f"{shape.how}")
    found = by_event(*run_all(backend, rules.join, events, sizes))
    exact = shape.layouts == ("multiset", "multiset")
    for number, want in enumerate(expected):
        got = list(found.get(number, Counter()).elements())
        wrong = difference(Counter(want), Counter(got)) if exact else difference(fold(want), fold(got))
        assert not wrong, f"{shape}, event {number} {events[number]}:\n{wrong}"


@given(made=traces())
def test_per_batch_is_the_join(made: tuple[Shape, list[Event], list[int]], backend: Backend) -> None:
    """After each micro-batch the fold is the SQL join, in the fewest rows that get there."""
    shape, events, sizes = made
    view = reference(shape.join("per_batch"))
    table: Counter[Row] = Counter()
    with backend.engine(view.join) as engine:
        for cut in cuts(view.join, events, sizes):
            view.change(events[cut.start : cut.stop])
            before = table.copy()
            changes, _, batch = run(engine, cut)
            fold(changes, table)
            view.fold(batch.changelog)
            note(f"{shape} {events[cut.start : cut.stop]} -> {changes}")
            assert not view.differences()
            least = sum(abs(table[row] - before[row]) for row in {**table, **before})
            assert len(changes) == least, f"{len(changes)} rows where {least} do"
    view.close()


@given(made=traces())
def test_the_state_is_the_folded_input(made: tuple[Shape, list[Event], list[int]], backend: Backend) -> None:
    """A snapshot holds the live rows, with the association counts that the rules give."""
    shape, events, sizes = made
    join = shape.join()
    rules = Rules(join, shape.residual)
    for change in events:
        rules.process(change)
    with backend.engine(join) as engine:
        unknown = [0, 0]
        for cut in cuts(join, events, sizes):
            _, _, batch = run(engine, cut)
            for side, name in enumerate(("left", "right")):
                unknown[side] += batch.metrics[f"{name}_unknown_retractions"]
        assert unknown == rules.unknown
        snapshot = engine.snapshot()
        sizes_ = engine.state_size()
    for side, name in enumerate(("left", "right")):
        live = rules.state[side].values()
        assert sizes_[f"{name}_rows"] == snapshot[name].num_rows == sum(len(e.counts) for e in live)
        counted = join.outer[side] or (side == 0 and join.how in ("semi", "anti"))
        assert ("__count" in snapshot[name].column_names) == counted
        if counted and not join.null_aware:
            own = Counter(snapshot[name]["__count"].to_pylist())
            assert own == Counter(n for e in live for n in e.counts)


def test_any_part_can_be_wrong() -> None:
    """The property is not empty: a join described otherwise than it is fed does not pass it."""
    shape = Shape("left")
    row: Row = (1, 1, "s", 0.0)
    events: list[Event] = [(0, "+I", row), (1, "+I", row)]
    rules = Rules(dataclasses.replace(shape.join(), how="inner"))
    expected = {n: Counter(rules.process(e)) for n, e in enumerate(events)}
    found = by_event(*run_all(Backend("cpu"), shape.join(), events, 2))
    assert difference(expected[1], found[1])
