"""What may not make a difference: backends, tiny segments, splits, orders, encodings, restarts."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.join import Join
from oracle.drive import (
    Backend,
    Change,
    Event,
    Row,
    as_multiset,
    by_event,
    cuts,
    difference,
    fold,
    gpu_status,
    identical,
    run,
    run_all,
    same_after_discards,
    same_after_restarts,
)
from oracle.rules import Rules
from oracle.traces import HOWS, LAYOUTS, Recipe, Shape, recipe, trace

pytestmark = pytest.mark.one_in(8)

CPU = Backend("cpu")
SHAPES = [
    *(Shape(how, layout, layout) for how in HOWS for layout in LAYOUTS),
    *(Shape(how, "multiset", "unique_key") for how in HOWS),
    *(Shape(how, "unique_key", "multiset", residual=(("a_x", ">", "b_x"),)) for how in HOWS),
    *(Shape(how, LAYOUTS[2], "multiset", keys="double") for how in HOWS),
    *(Shape(how, "multiset", LAYOUTS[2], keys="composite") for how in HOWS),
    *(Shape(how, "multiset", "multiset", keys="double", null_safe=True) for how in HOWS[:6]),
    *(Shape(how, "multiset", "unique_key", keys="none", residual=(("a_d", "<", "b_d"),)) for how in HOWS[:6]),
]
FEW = [s for s in SHAPES if s.left == "multiset"]


def made(shape: Shape, events: int = 150, *, malformed: bool = False, live: int = 20) -> Recipe:
    return recipe(shape, events, zlib.crc32(str(shape).encode()), live=live, malformed=malformed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_event_by_the_rules(shape: Shape, backend: Backend) -> None:
    """``per_event`` is the record-by-record changelog, row kinds included, in large micro-batches."""
    events = trace(shape, made(shape))
    rules = Rules(shape.join(), shape.residual)
    expected = [rules.process(e) for e in events]
    changes, position = run_all(backend, rules.join, events, (70, 20, 40), shuffle=3)
    found = by_event(changes, position)
    for number, want in enumerate(expected):
        wrong = difference(Counter(want), found.get(number, Counter()))
        assert not wrong, f"event {number} {events[number]}:\n{wrong}"
    assert position == sorted(position), "changes are ordered by the event that caused them"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_upserts_and_unknown_retractions_by_the_rules(shape: Shape, backend: Backend) -> None:
    """The same with malformed input; of an upsert only what it adds and takes is laid down."""
    events = trace(shape, made(shape, malformed=True))
    rules = Rules(shape.join(), shape.residual)
    expected = [rules.process(e) for e in events]
    changes, position = run_all(backend, rules.join, events, (70, 20, 40))
    found = by_event(changes, position)
    upserts = shape.left != "multiset" or shape.right != "multiset"
    for number, want in enumerate(expected):
        got = list(found.get(number, Counter()).elements())
        wrong = difference(_net(want), _net(got)) if upserts else difference(Counter(want), Counter(got))
        assert not wrong, f"event {number} {events[number]}:\n{wrong}"


def _net(changes: list[Change]) -> Counter[Row]:
    return fold(changes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_taken_before_it_is_there(shape: Shape) -> None:
    """Within an event too: pads go before the rows that replace them, and come after those that leave."""
    join = shape.join()
    events = trace(shape, made(shape, malformed=True))
    changes, position = run_all(CPU, join, events, 150)
    folded: Counter[Row] = Counter()
    for change, event in zip(changes, position, strict=True):
        fold([change], folded)
        assert folded[change[1]] >= 0, f"event {event} takes {change[1]}, which is not there"
    if join.how in ("semi", "anti"):
        return
    width = len(join.left.schema)
    for event in set(position):
        own = [c for c, e in zip(changes, position, strict=True) if e == event]
        for side, outer in enumerate(join.outer):
            if outer:
                _check_pads(own, side, width, event)


def _check_pads(own: list[Change], side: int, width: int, event: int) -> None:
    """For rows of an outer side: not padded and joined at the same time."""
    shown: dict[Row, list[tuple[int, str, bool]]] = {}
    for place, (kind, row) in enumerate(own):
        mine, other = (row[:width], row[width:]) if side == 0 else (row[width:], row[:width])
        shown.setdefault(mine, []).append((place, kind, all(v is None for v in other)))
    for mine, steps in shown.items():
        last_pad_gone = max((p for p, k, pad in steps if pad and k in ("-D", "-U")), default=-1)
        first_joined = min((p for p, k, pad in steps if not pad and k in ("+I", "+U")), default=1 << 60)
        first_pad = min((p for p, k, pad in steps if pad and k in ("+I", "+U")), default=1 << 60)
        last_left = max((p for p, k, pad in steps if not pad and k in ("-D", "-U")), default=-1)
        if all(v is None for v in mine):
            continue  # cannot be told from the other side's pads
        assert last_pad_gone < first_joined, f"event {event}: {mine} is joined before its pad goes"
        assert last_left < first_pad, f"event {event}: {mine} is padded before its last match goes"


@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backends_agree_row_for_row(shape: Shape, emit: Emit, other_backend: Backend) -> None:
    """The same rows in the same order as on the plain CPU, with the same state after."""
    events = trace(shape, made(shape, malformed=True))
    with CPU.engine(shape.join(emit)) as one, other_backend.engine(shape.join(emit)) as other:
        for cut in cuts(one.description, events, (40, 1, 13)):
            first, second = one.prepare(**cut.inputs), other.prepare(**cut.inputs)
            one.commit()
            other.commit()
            assert identical(first.changelog, second.changelog), _first_difference(first, second)
            assert (first.sequence == second.sequence).all()
            assert untimed(first.metrics) == untimed(second.metrics)
        states = [e.snapshot() for e in (one, other)]
        for side in ("left", "right"):
            assert as_multiset(states[0][side]) == as_multiset(states[1][side])


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    """What depends neither on the machine nor on where rows that have gone are dropped from segments."""
    own = ("_ms", "_bytes", "candidates", "pages_read"), "lookups_"
    return {k: value for k, value in metrics.items() if not k.endswith(own[0]) and not k.startswith(own[1])}


def _first_difference(first: Any, second: Any) -> str:
    a, b = first.changelog.to_pylist(), second.changelog.to_pylist()
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if str(x) != str(y)), min(len(a), len(b)))
    return f"{len(a)} and {len(b)} rows; from row {place}: {a[place : place + 3]} and {b[place : place + 3]}"


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_splits_and_emits_fold_to_the_same(shape: Shape, backend: Backend) -> None:
    """Every split, per event: the same multiset for each event; and ``per_batch`` folds to the same."""
    events = trace(shape, made(shape, 60, malformed=True))
    expected = by_event(*run_all(CPU, shape.join("per_event"), events, len(events)))
    for split in (1, (13, 5, 1)):
        assert by_event(*run_all(backend, shape.join("per_event"), events, split)) == expected
    table = fold([c for group in expected.values() for c in group.elements()])
    for split in (7, len(events)):
        assert fold(run_all(backend, shape.join("per_batch"), events, split)[0]) == table


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_order_arrays_tell_the_order(shape: Shape) -> None:
    """Rows shuffled within a micro-batch, with the order beside them, give the same rows."""
    events = trace(shape, made(shape, malformed=True))
    for emit in ("per_event", "per_batch"):
        plain = run_all(CPU, shape.join(emit), events, 60)
        mixed = run_all(CPU, shape.join(emit), events, 60, shuffle=11)
        assert plain[1] == mixed[1]
        assert by_event(*plain) == by_event(*mixed)


def test_without_order_left_comes_first() -> None:
    shape = Shape("left")
    row = (1, 1, "a", 1.0)
    events: list[Event] = [(1, "+I", row), (0, "+I", row)]
    (cut,) = cuts(shape.join(), events, 2)
    with CPU.engine(shape.join()) as engine:
        changelog = engine.process(left=cut.inputs["left"], right=cut.inputs["right"])
        assert changelog["row_kind"].to_pylist() == ["+I", "-D", "+I"]
    with CPU.engine(shape.join()) as engine:
        assert engine.process(**cut.inputs)["row_kind"].to_pylist() == ["+I"]


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_a_restart_goes_unnoticed(shape: Shape, backend: Backend) -> None:
    parts = list(cuts(shape.join(), trace(shape, made(shape, malformed=True)), 25))
    same_after_restarts(backend, shape.join(), parts)


@pytest.mark.parametrize("shape", FEW[:8], ids=str)
def test_a_discarded_micro_batch_leaves_nothing(shape: Shape, backend: Backend) -> None:
    parts = list(cuts(shape.join(), trace(shape, made(shape, malformed=True)), 30))
    same_after_discards(backend, shape.join(), parts)


@pytest.mark.parametrize("updates", ["upsert", "retract"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_updates_make_no_difference_to_whole_changelogs(layout: Any, updates: Any, backend: Backend) -> None:
    """Where the old row always comes too, it does not matter that it might not."""
    shape = Shape("full", layout, layout)
    events = trace(shape, made(shape))
    join = shape.join()
    told = dataclasses.replace(
        join,
        left=dataclasses.replace(join.left, updates=updates),
        right=dataclasses.replace(join.right, updates=updates),
    )
    assert by_event(*run_all(backend, told, events, 40)) == by_event(*run_all(CPU, join, events, 40))


ENCODINGS = {
    "delta": {"+I": "insert", "-U": "update_preimage", "+U": "update_postimage", "-D": "delete"},
    "debezium": {"+I": "c", "-U": "d", "+U": "u", "-D": "d"},
    "debezium-read": {"+I": "r", "-U": "d", "+U": "u", "-D": "d"},
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_row_kinds_of_others(encoding: str, type_: pa.DataType, backend: Backend) -> None:
    """Delta's and Debezium's row kinds fold to the same as Flink's."""
    shape = Shape("left", "unique_key", "unique_key")
    events = trace(shape, made(shape))
    join = shape.join()
    expected = fold(run_all(CPU, join, events, 40)[0])
    code = ENCODINGS[encoding]
    folded: Counter[Row] = Counter()
    with backend.engine(join) as engine:
        for cut in cuts(join, events, 40):
            inputs = dict(cut.inputs)
            for side in ("left", "right"):
                if side in inputs:
                    at = inputs[side].column_names.index("row_kind")
                    kinds = pa.array([code[k] for k in inputs[side]["row_kind"].to_pylist()], pa.string())
                    inputs[side] = inputs[side].set_column(at, "row_kind", pc.cast(kinds, type_))
            fold(run(engine, dataclasses.replace(cut, inputs=inputs))[0], folded)
    assert folded == expected


def test_an_insert_only_input_needs_no_row_kinds(backend: Backend) -> None:
    shape = Shape("full")
    events = [e for e in trace(shape, made(shape, 200)) if e[1] == "+I"]
    join = shape.join()
    bare: Join = dataclasses.replace(
        join,
        left=dataclasses.replace(join.left, row_kind=None),
        right=dataclasses.replace(join.right, row_kind=None),
    )
    assert run_all(backend, bare, events, 30) == run_all(CPU, join, events, 30)


def test_the_gpu_is_tested_where_there_is_one() -> None:
    """Says in the report whether this run had a card."""
    there, why = gpu_status()
    assert isinstance(why, str)
    assert why
    if not there:
        pytest.skip(f"no GPU: {why}")
