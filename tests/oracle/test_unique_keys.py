"""The unique key derived for a join's changelog: one row per key at every moment, whichever partition speaks first."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

import pyarrow as pa
import pytest

from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.inputs import Input, Updates
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import ADDS, Backend, Event, canonical, changes, cuts
from oracle.multi_traces import SHAPES, MultiShape, multi_recipe, multi_trace, random_shape
from oracle.traces import LAYOUTS, Shape, recipe, trace

CPU = Backend("cpu")


def with_updates(join: Description, updates: Updates) -> Description:
    inputs = tuple(dataclasses.replace(source, updates=updates) for source in join.inputs)
    if isinstance(join, MultiJoin):
        return dataclasses.replace(join, inputs=inputs)
    return dataclasses.replace(join, left=inputs[0], right=inputs[1])


def _spread(values: Sequence[object]) -> int:
    """Equal values give equal numbers, in every run."""
    numbers = [hash(v) if isinstance(v, int | float | Decimal) else v for v in values]
    return zlib.crc32(repr(numbers).encode())


def check(join: Description, events: Sequence[Event], partitions: int) -> int:
    """Runs a join in partitions that speak last to first; how many rows of its changelog were looked at."""
    key = join.unique_key
    assert key is not None
    names = [c.name for c in join.output]
    places = [names.index(name) for name in key]
    columns = [[s.columns[n] for s in join.shuffled_by] for n in range(len(join.inputs))]
    where = [[source.schema.names.index(c) for c in own] for source, own in zip(join.inputs, columns, strict=True)]
    parts: list[list[Event]] = []
    alive: Counter[tuple[object, ...]] = Counter()
    seen = 0
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(CPU.engine(join)) for _ in range(partitions)]
        for start in range(0, len(events), 25):
            parts = [[] for _ in engines]
            for event in events[start : start + 25]:
                by = tuple(canonical(event[2][place]) for place in where[event[0]])
                parts[_spread(by) % partitions if by else 0].append(event)
            for engine, part in zip(reversed(engines), reversed(parts), strict=True):
                for cut in cuts(join, part, max(1, len(part))):
                    for kind, row in changes(engine.process(*cut.batches, **cut.inputs)):
                        value = tuple(row[place] for place in places)
                        assert None not in value, f"{key} of {row}"
                        alive[value] += 1 if kind in ADDS else -1
                        assert 0 <= alive[value] <= 1, f"{kind} {row}: {alive[value]} rows of {key} {value}"
                        seen += 1
    return seen


def two_way_shapes() -> list[Shape]:
    rng = random.Random(5)
    made = [
        Shape(how, left, right, keys, null_safe=rng.random() < 0.2)
        for how in ("inner", "left", "right", "semi", "anti")
        for left in LAYOUTS
        for right in LAYOUTS
        for keys in ("int", "composite", "double", "mixed_width")
    ]
    return [shape for shape in made if shape.join().unique_key is not None]


def test_enough_shapes_have_a_key() -> None:
    found = Counter((shape.how, shape.left, shape.right) for shape in two_way_shapes())
    assert len(found) >= 20
    assert {how for how, _, _ in found} == {"inner", "left", "right", "semi", "anti"}


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("updates", ["upsert", "retract"])
def test_two_inputs(emit: Emit, updates: Updates) -> None:
    """Half of the shapes in turn: each has both ways to emit, and both kinds of updates."""
    seen, turn = 0, (emit == "per_event") == (updates == "upsert")
    for number, shape in list(enumerate(two_way_shapes()))[turn::2]:
        join = with_updates(shape.join(emit), updates)
        if join.unique_key is not None:
            events = trace(shape, recipe(shape, 150, number, live=12, malformed=False))
            seen += check(join, events, 1 + number % 3)
    assert seen > 900


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_event", "per_batch"])
@pytest.mark.parametrize("updates", ["upsert", "retract"])
def test_many_inputs(emit: Emit, updates: Updates) -> None:
    rng, seen, with_key = random.Random(f"{emit} {updates}"), 0, 0
    shapes: list[MultiShape] = [*SHAPES, *(random_shape(rng) for _ in range(60))]
    for number, shape in enumerate(shapes):
        join = with_updates(shape.join(emit), updates)
        if join.unique_key is not None:
            with_key += 1
            events = multi_trace(shape, multi_recipe(shape, 120, number))
            seen += check(join, events, 1 + number % 3)
    assert with_key >= 8
    assert seen > 300


# --- by name -----------------------------------------------------------------------------------

ORDERS = pa.schema([("id", pa.int64()), ("customer", pa.int64()), ("product", pa.int64())])
CUSTOMERS = pa.schema([("customer", pa.int64()), ("name", pa.string())])


def star(
    how: str, *, orders: tuple[str, ...] | None, customers: tuple[str, ...] | None, ttl: int | None = None
) -> Join:
    left = Input("orders", ORDERS, unique_key=orders, updates="retract")
    right = Input("customers", CUSTOMERS, unique_key=customers, updates="retract", ttl_ms=ttl)
    return Join(how, left, right, (Key("customer", "customer", using=True),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "orders", "customers", "expected"),
    [
        ("inner", ("id",), ("customer",), ("id", "customer")),
        ("inner", ("customer",), ("name",), ("name", "customer")),  # at most one order per customer
        ("inner", ("id",), ("name",), ("id", "name", "customer")),
        ("inner", ("id",), None, None),
        ("inner", None, ("customer",), None),
        ("left", ("id", "customer"), ("customer",), ("id", "customer")),
        ("left", ("id",), ("customer",), None),  # an order's customer may be null
        ("left", ("id", "customer"), ("name",), None),  # names may be pads
        ("right", ("customer",), ("customer", "name"), ("customer", "name")),
        ("full", ("customer",), ("customer",), None),
        ("semi", ("id",), None, ("id", "customer")),
        ("semi", None, ("customer",), None),
        ("anti", ("id",), None, None),
        ("anti", ("id", "customer"), None, ("id", "customer")),
    ],
)
def test_which_key(
    how: str, orders: tuple[str, ...] | None, customers: tuple[str, ...] | None, expected: tuple[str, ...] | None
) -> None:
    assert star(how, orders=orders, customers=customers).unique_key == expected
    assert star(how, orders=orders, customers=customers, ttl=1000).unique_key is None


def test_which_key_of_many() -> None:
    users = Input("users", pa.schema([("user_id", pa.int64()), ("n", pa.string())]), unique_key=("user_id",))
    orders = Input("orders", pa.schema([("order_id", pa.int64()), ("user_id", pa.int64())]), unique_key=("order_id",))
    prefs = Input("prefs", pa.schema([("user_id", pa.int64()), ("p", pa.string())]), unique_key=("user_id",))
    retract = [dataclasses.replace(source, updates="retract") for source in (users, orders, prefs)]

    def key(order: tuple[int, ...], how: list[str]) -> tuple[str, ...] | None:
        return MultiJoin.of([retract[n] for n in order], "user_id", how).unique_key

    assert key((0, 2), ["left"]) == ("user_id",)
    assert key((0, 1, 2), ["inner", "left"]) == ("order_id", "user_id")
    assert key((0, 1, 2), ["left", "left"]) is None
    assert key((0, 2, 1), ["left", "inner"]) == ("order_id", "user_id")
    assert key((1, 0, 2), ["left", "left"]) is None  # an order's user may be null
    assert key((1, 0, 2), ["inner", "left"]) == ("order_id", "user_id")
