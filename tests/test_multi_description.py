"""What a multi-way join's description says, and what it refuses: with the chain of two-way joins that does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Equality, Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import MAX_INPUTS, JoinStep, MultiJoin
from gpu_ops.errors import ConditionError, DescriptionError

USERS = Input("users", pa.schema([("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.int8()))]), ("id",))
ORDERS = Input("orders", pa.schema([("oid", pa.int64()), ("user_id", pa.int32()), ("amount", pa.float64())]), ("oid",))
PAYMENTS = Input("payments", pa.schema([("user_id", pa.int64()), ("order", pa.int64()), ("paid", pa.float64())]))
SHARED = tuple(Input(n, pa.schema([("k", pa.int64()), ("g", pa.string()), (n, pa.int32())])) for n in "abc")

ON = [("users.id", "user_id"), ("users.id", "user_id")]
THREE = (USERS, ORDERS, PAYMENTS)
SUFFIXES = ("_u", "_o", "_p")


def described(inputs: Any = THREE, on: Any = None, how: Any = ("left", "inner"), **options: Any) -> MultiJoin:
    return MultiJoin.of(inputs, ON if on is None else on, how, **{"suffixes": SUFFIXES, **options})


def named(name: str, source: Input = PAYMENTS) -> Input:
    return dataclasses.replace(source, name=name)


def column(name: str, kind: pa.DataType, also: str = "z") -> Input:
    return Input(also, pa.schema([(name, kind), (f"{also}_v", pa.int8())]))


CHAIN = "gpu_ops.join(gpu_ops.join(users, orders, on=..., how={0!r}), payments, on=..., how={1!r})"

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "one input": (lambda: described(THREE[:1], []), "takes two or more inputs, not 1"),
    "no input": (lambda: described((), []), "takes two or more inputs, not 0"),
    "too many inputs": (
        lambda: MultiJoin.of([column("k", pa.int8(), f"n{i}") for i in range(MAX_INPUTS + 1)], "k"),
        f"takes 2 to {MAX_INPUTS} inputs, not {MAX_INPUTS + 1}",
    ),
    "too few hows": (lambda: described(how=["left"]), "how= has 1 entries for 2 steps"),
    "too many hows": (lambda: described(how=["left"] * 3), "how= has 3 entries for 2 steps"),
    "too few conditions": (lambda: described(where=[None]), "where= has 1 entries for 2 steps"),
    "too few steps": (lambda: described(on=[ON[0]]), "on= has 1 entries for 2 steps"),
    "steps and inputs": (
        lambda: dataclasses.replace(described(), inputs=THREE[:2], suffixes=None),
        "2 steps for 2 inputs",
    ),
    "too few suffixes": (lambda: described(suffixes=["_a", "_b"]), "suffixes= has 2 entries for 3 inputs"),
    "no order of inputs": (lambda: dataclasses.replace(described(), shown=(0, 1, 1)), "is no order of 3 inputs"),
    "full first": (lambda: described(how=["full", "inner"]), CHAIN.format("full", "inner")),
    "full last": (lambda: described(how=["left", "full"]), CHAIN.format("inner", "full")),
    "why not full": (lambda: described(how="full"), "must remember which rows of both sides were matched"),
    "semi": (lambda: described(how=["left", "semi"]), CHAIN.format("inner", "semi")),
    "anti": (lambda: described(how=["anti", "left"]), CHAIN.format("anti", "inner")),
    "right inside": (lambda: described(how=["left", "right"]), CHAIN.format("inner", "right")),
    "why not right": (lambda: described(how=["left", "right"]), "which only the first step can be"),
    "no such how": (lambda: described(how="outer"), "how='outer'; a step of a multi-way join is inner or left"),
    "how of a step": (
        lambda: dataclasses.replace(described(), steps=(JoinStep("full", ()), JoinStep("left", ()))),  # type: ignore[arg-type]
        CHAIN.format("full", "inner"),
    ),
    "no common key": (
        lambda: described(on=[("users.id", "user_id"), ("orders.oid", "order")]),
        "share no key: a multi-way join needs a column that = leads to in every step. Join them two at a time: "
        + CHAIN.format("left", "inner"),
    ),
    "a null-safe key in common only": (
        lambda: described(on=[[Equality(0, "id", "user_id", null_safe=True)], ON[1]]),
        "the joins of users, orders, payments share no key",
    ),
    "no equality in a step": (lambda: described(on=[ON[0], []]), "share no key"),
    "ambiguous column": (
        lambda: described((*THREE, named("refunds")), [*ON, ("user_id", "user_id")], "left", suffixes=None),
        "on= names 'user_id', which can be orders.user_id and payments.user_id",
    ),
    "unknown column": (
        lambda: described(on=[("users.uid", "user_id"), ON[1]]),
        "on= names 'users.uid'; there are users.id, users.name",
    ),
    "unknown own column": (
        lambda: described(on=[("users.id", "uid"), ON[1]]),
        "on= names 'uid'; there are orders.oid, orders.user_id, orders.amount",
    ),
    "a column to the right": (lambda: described(on=[("payments.user_id", "user_id"), ON[1]]), "there are users.id"),
    "a shared column that one lacks": (
        lambda: described(on="user_id"),
        "input 'users' has no column 'user_id' to join on; there are id, name, tags",
    ),
    "a pair of another kind": (lambda: described(on=[[("a", "b", "c")], ON[1]]), "not ('a', 'b', 'c')"),
    "an input to the right": (
        lambda: described(on=[[Equality(1, "user_id", "user_id")], ON[1]]),
        "step 1 joins 'orders' on an input that is not to its left",
    ),
    "an input below zero": (
        lambda: described(on=[[Equality(-1, "id", "user_id")], ON[1]]),
        "on an input that is not to its left",
    ),
    "types": (
        lambda: described(on=[("users.name", "user_id"), ON[1]]),
        "cannot compare key 'name' (string) with 'user_id' (int32); CAST one of them first",
    ),
    "types two steps apart": (
        lambda: MultiJoin.of(
            [column("k", pa.decimal128(*p), n) for n, p in (("x", (38, 0)), ("y", (20, 0)), ("z", (38, 38)))],
            [("x.k", "k"), ("y.k", "k")],
        ),
        "CAST one of them first",
    ),
    "a list as key": (
        lambda: MultiJoin.of((USERS, dataclasses.replace(USERS, name="others")), [("tags", "tags")]),
        "input 'users': column 'tags' of type list",
    ),
    "same names": (lambda: described((USERS, ORDERS, named("orders"))), "two inputs are called 'orders'"),
    "same names but for case": (lambda: described((USERS, ORDERS, named("Users"))), "are called 'users'"),
    "a name clash": (lambda: described(suffixes=None), "two columns 'user_id': rename one, or give suffixes="),
    "suffixes that clash": (lambda: described(suffixes=["", "_x", "_x"]), "two columns 'user_id_x'"),
    "a row kind as output": (
        lambda: MultiJoin.of((column("row_kind", pa.int8(), "x"), column("k", pa.int8(), "y")), [("row_kind", "k")]),
        "two columns 'row_kind'",
    ),
    "an event time": (
        lambda: described((USERS, dataclasses.replace(ORDERS, event_time="oid"), PAYMENTS)),
        "input 'orders': a multi-way join does not go by time, event_time= has no place here",
    ),
    "no such emit": (lambda: described(emit="append"), "emit='append'; it is one of per_event, per_batch"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(DescriptionError) as error:
        make()
    assert message in str(error.value), error.value


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["payments.paid > 1", None], "payments"),
        ([None, "paid > amont"], "amont"),
        ([None, "paid >"], "paid >"),
        ("users.tags > 1", "tags"),
        ("user_id > 1", "user_id"),
        ("paid + amount", "BOOLEAN"),
    ],
)
def test_conditions_refused(where: Any, message: str) -> None:
    """A step sees its own input and those to its left."""
    with pytest.raises(ConditionError) as error:
        described(where=where)
    assert message in str(error.value)
    assert "line 1" in str(error.value)


def test_shared_columns_are_shown_once() -> None:
    join = MultiJoin.of(SHARED, ["k", "g"], ["left", "inner"])
    assert join.output_schema.names == ["row_kind", "k", "g", "a", "b", "c"]
    assert join.common_key == (("k", "k", "k"), ("g", "g", "g"))
    assert [s.columns for s in join.shuffled_by] == [("k", "k", "k"), ("g", "g", "g")]
    assert join.steps[1].on == (Equality(0, "k", "k", using=True), Equality(0, "g", "g", using=True))
    assert MultiJoin.of(SHARED, "k", suffixes=["_1", "_2", "_3"]).output_schema.names == [
        "row_kind", "k", "g_1", "a", "g_2", "b", "g_3", "c",
    ]  # fmt: skip


def test_pairs_are_resolved_to_their_inputs() -> None:
    join = described(on=[("id", "orders.user_id"), ["user_id", ("oid", "order")]])
    assert [s.on for s in join.steps] == [
        (Equality(0, "id", "user_id"),),
        (Equality(1, "user_id", "user_id", using=True), Equality(1, "oid", "order")),
    ]
    assert join.common_key == (("id", "user_id", "user_id"),)
    assert join.references == (frozenset({0}), frozenset({1}))
    assert join.output_schema.names[1:6] == ["user_id", "id", "name", "tags", "oid"]
    with_condition = dataclasses.replace(
        join, steps=(join.steps[0], dataclasses.replace(join.steps[1], where="name > '' "))
    )
    assert with_condition.references == (frozenset({0}), frozenset({0, 1}))


def test_a_condition_is_the_last_steps() -> None:
    assert [s.where and str(s.where) for s in described(where="paid < amount").steps] == [None, "paid < amount"]
    assert [s.where and str(s.where) for s in described(where=["amount > 0", None]).steps] == ["amount > 0", None]


def test_a_right_first_step_is_a_left_one() -> None:
    """The first two inputs swap places; the output shows them as they were written."""
    join = described((ORDERS, USERS, PAYMENTS), [("user_id", "id"), ("orders.user_id", "user_id")], ["right", "left"])
    assert join.sides == ("users", "orders", "payments")
    assert [s.how for s in join.steps] == ["left", "left"]
    assert join.steps[0].on == (Equality(0, "id", "user_id"),)
    assert join.steps[1].on == (Equality(1, "user_id", "user_id"),)
    assert [(c.column, c.side) for c in join.output][:4] == [("oid", 1), ("user_id", 1), ("amount", 1), ("id", 0)]
    assert join.layout(0) == "unique_key"
    # A shared column is that of the side whose rows all come out.
    shared = MultiJoin.of(SHARED, ["k", "g"], ["right", "left"])
    assert shared.sides == ("b", "a", "c")
    assert [(c.name, c.side) for c in shared.output][:3] == [("k", 0), ("g", 0), ("a", 1)]
    assert {k.input for step in shared.steps for k in step.on} == {0}


def test_suffixes_are_those_of_the_inputs_as_written() -> None:
    shared = MultiJoin.of(SHARED, "k", ["right", "left"], suffixes=["_1", "_2", "_3"])
    assert shared.output_schema.names == ["row_kind", "k", "g_1", "a", "g_2", "b", "g_3", "c"]


def test_a_step_that_is_no_columns() -> None:
    with pytest.raises(DescriptionError, match="on="):
        described(on=[7, ON[1]])


def test_keys_are_compared_in_one_type() -> None:
    """The widest of all that are equal, also where no step compares it with another."""
    join = described((USERS, dataclasses.replace(ORDERS, updates="retract"), PAYMENTS))
    assert set(join.key_types.values()) == {pa.int64()}
    assert join.key_types[1, "user_id"] == pa.int64()
    assert join.shuffled_by[0].type == pa.int64()
    kinds = (pa.int8(), pa.int32(), pa.int16())
    chain = [column("k", kind, name) for kind, name in zip(kinds, "xyz", strict=True)]
    assert set(MultiJoin.of(chain, "k").key_types.values()) == {pa.int32()}
    assert MultiJoin.of(chain, "k").output_schema.field("k").type == pa.int32()


def test_an_upsert_input_is_partitioned_by_its_own_key() -> None:
    """The old and the new row of an unique key have to meet, unless the old one always comes too."""
    assert described().shuffled_by == ()
    orders = dataclasses.replace(ORDERS, updates="retract")
    assert [s.columns for s in described((USERS, orders, PAYMENTS)).shuffled_by] == [("id", "user_id", "user_id")]
    orders = dataclasses.replace(ORDERS, unique_key=("oid", "user_id"))
    assert [s.columns for s in described((USERS, orders, PAYMENTS)).shuffled_by] == [("id", "user_id", "user_id")]


def test_state_layouts() -> None:
    """The first input has no join key of its own, as in Flink."""
    unique = [dataclasses.replace(s, unique_key=("k",)) for s in SHARED]
    assert [MultiJoin.of(unique, ["k", "g"]).layout(n) for n in range(3)] == [
        "unique_key", "join_key_contains_unique_key", "join_key_contains_unique_key",
    ]  # fmt: skip
    assert [described().layout(n) for n in range(3)] == ["unique_key", "unique_key", "multiset"]


JOINS: dict[str, Callable[[], MultiJoin]] = {
    "plain": described,
    "shared": lambda: MultiJoin.of(SHARED, ["k", "g"], emit="per_event"),
    "right": lambda: MultiJoin.of(SHARED, "k", ["right", "inner"], suffixes=SUFFIXES, where="a.g <> c.g"),
    "everything": lambda: MultiJoin(
        (USERS, dataclasses.replace(ORDERS, row_kind="op", ttl_ms=5, updates="retract", bad_rows="tag"), PAYMENTS),
        (
            JoinStep("inner", (Equality(0, "id", "user_id"),), "amount > 1"),
            JoinStep("left", (Equality(1, "user_id", "user_id"), Equality(0, "id", "order", True))),
        ),
        "per_event", SUFFIXES, (2, 0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINS)
def test_json(name: str) -> None:
    join = JOINS[name]()
    text = join.to_json()
    again = from_json(text)
    assert again == join
    assert isinstance(again, MultiJoin)
    assert again.to_json() == text
    assert again.output_schema == join.output_schema
    assert again.key_types == join.key_types


def test_json_of_a_two_way_join() -> None:
    join = Join("left", USERS, ORDERS, (Key("id", "user_id"),))
    assert from_json(join.to_json()) == join
