"""Text that is no UTF-8, types in odd forms, and sequence columns of two types: right, or an error of the pack."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import json
from decimal import Decimal
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from kernels.support import TYPES
from oracle.drive import Backend

from gpu_ops.descriptions.aggregate import Aggregate, Function
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import CoGroup, Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.times import parse_bound, parse_duration
from gpu_ops.errors import BadInputError, DescriptionError, StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.values import of_elements

TEXT = pa.string()
WRONG = [b"\xff", b"a\xc3", b"\xa9x", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80"]
"""A byte that never is one; half a character; the other half; half a surrogate pair; beyond the last; overlong."""


def text(*values: bytes | None, kind: pa.DataType = TEXT) -> pa.Array:
    """Text of any bytes, as a cast in Spark gives it."""
    return pa.array(values, pa.large_binary() if kind == pa.large_string() else pa.binary()).view(kind)


# Where text can be: a type, and values of it around the text at hand.
PLACES: dict[str, Any] = {
    "plain": lambda values: values,
    "large": lambda values: text(*values.view(pa.binary()).to_pylist(), kind=pa.large_string()),
    "list": lambda values: pa.ListArray.from_arrays(range(len(values) + 1), values),
    "struct": lambda values: pa.StructArray.from_arrays([pa.array(range(len(values))), values], ["n", "t"]),
    "map": lambda values: pa.MapArray.from_arrays(range(len(values) + 1), values, pa.array(range(len(values)))),
    "fixed list": lambda values: pa.FixedSizeListArray.from_arrays(values, 1),
}


def joined(kind: pa.DataType, **options: Any) -> Join:
    left = Input("words", pa.schema([("k", pa.string()), ("v", kind), ("n", pa.int64())]), row_kind="op", **options)
    return Join("left", left, Input("others", pa.schema([("r", pa.string())])), (Key("k", "r"),))


def words(keys: pa.Array, values: pa.Array, kinds: pa.Array | None = None) -> pa.Table:
    kinds = pa.array(["+I"] * len(keys), pa.string()) if kinds is None else kinds
    return pa.table({"k": keys, "v": values, "n": pa.array(range(len(keys)), pa.int64()), "op": kinds})


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("place", [*PLACES, "key", "row kind"])
def test_invalid_utf8_names_the_column_and_changes_nothing(place: str, wrong: bytes) -> None:
    make = PLACES.get(place, PLACES["plain"])
    good, bad = text(b"a", "ä€😀".encode(), b"b"), text(b"a", wrong, b"b")
    join = joined(make(good).type)
    column = {"key": "k", "row kind": "op"}.get(place, "v")
    kinds = text(b"+I", wrong, b"+I") if place == "row kind" else None
    # a slice, whose text does not begin where the buffer does
    batch = words(bad if place == "key" else good, make(bad if column == "v" else good), kinds).slice(1)
    engine = JoinEngine(join, "cpu")
    engine.process(words(good, make(good)))
    before = engine.snapshot()
    with pytest.raises(BadInputError) as error:
        engine.process(batch)
    shown = str(error.value)
    assert f"input 'words', column '{column}'" in shown
    assert repr(wrong.decode("utf-8", "backslashreplace")) in shown, shown
    assert engine.snapshot() == before
    assert engine.process(words(good, make(good))).num_rows == 3


@pytest.mark.parametrize("bad_rows", ["drop", "tag"])
@pytest.mark.parametrize("place", [*PLACES, "key", "row kind"])
def test_rows_of_invalid_utf8_may_go(place: str, bad_rows: Any, backend: Backend) -> None:
    """The others go on; a tagged one comes out with U+FFFD where its bytes were wrong, so anything can read it."""
    make = PLACES.get(place, PLACES["plain"])
    values = [b"a", *WRONG, None, b"z"]
    good, bad = text(*(b"g" for _ in values)), text(*values)
    kinds = text(b"+I", *WRONG, b"+I", b"+I") if place == "row kind" else None
    inside = place in PLACES
    batch = words(bad if place == "key" else good, make(bad if inside and place != "map" else good), kinds)
    if place == "map":
        batch = words(good, make(text(b"a", *WRONG, b"y", b"z")))
    join = joined(batch["v"].type, bad_rows=bad_rows)
    with backend.engine(join) as engine:
        result = engine.prepare(batch)
        engine.commit()
        assert result.metrics["left_bad_rows"] == len(WRONG)
        said = result.changelog
        said.validate(full=True)
        assert sorted(r["n"] for r in said.to_pylist() if r["row_kind"] == "+I") == [0, 7, 8]
        tagged = [r for r in said.to_pylist() if r["row_kind"] == "bad"]
        assert [r["n"] for r in tagged] == ([1, 2, 3, 4, 5, 6] if bad_rows == "tag" else [])
        assert engine.state_size()["left_rows"] == 3
        if tagged and place != "row kind":
            column = "k" if place == "key" else "v"
            marked = [w.decode("latin-1").translate(dict.fromkeys(range(128, 256), "\ufffd")) for w in WRONG]
            wanted = {"list": lambda m, n: [m], "struct": lambda m, n: {"n": n, "t": m}, "map": lambda m, n: [(m, n)]}
            shape = wanted.get(place, wanted["list"] if place == "fixed list" else lambda m, n: m)
            assert [r[column] for r in tagged] == [shape(m, n) for n, m in enumerate(marked, start=1)]


def test_invalid_utf8_in_a_dictionary_and_in_a_condition() -> None:
    left = Input("words", pa.schema([("k", pa.int64()), ("v", pa.string())]), bad_rows="drop")
    right = Input("others", pa.schema([("r", pa.int64()), ("w", pa.string())]), bad_rows="drop")
    engine = JoinEngine(Join("inner", left, right, (Key("k", "r"),), where="v <> w AND v >= ''"), "cpu")
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), text(b"\xff", b"ok"))
    said = engine.process(pa.table({"k": [1, 1, 1], "v": coded}), pa.table({"r": [1, 1], "w": text(b"\xfe", b"x")}))
    assert said["v"].to_pylist() == ["ok", "ok"]


def test_a_long_value_is_shown_in_short() -> None:
    source = Input("words", pa.schema([("k", pa.int64())]))
    engine = JoinEngine(Join("left", source, dataclasses.replace(source, name="x"), (), suffixes=("", "_x")), "cpu")
    with pytest.raises(BadInputError, match="has type string") as error:
        engine.process(pa.table({"k": ["x" * 1_000_000]}))
    assert len(str(error.value)) < 400


# What Arrow can hold a column in, and what the pack makes of it.
FORMS: dict[str, tuple[pa.Array, pa.DataType]] = {
    "category": (pa.array(["a", None, "b"]).dictionary_encode(), pa.string()),
    "category of numbers": (pa.array([5, None, 7]).dictionary_encode(), pa.int64()),
    "category with a null in it": (
        pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array(["a", None])),
        pa.string(),
    ),
    "string_view": (pa.array(["a", None, "b" * 40], pa.string_view()), pa.string()),
    "binary_view": (pa.array([b"a", None, b"b" * 40], pa.binary_view()), pa.binary()),
    "list of categories": (
        pa.ListArray.from_arrays([0, 1, 1, 3], pa.array(["x", "y", "x"]).dictionary_encode()),
        pa.list_(pa.string()),
    ),
    "struct of categories": (
        pa.StructArray.from_arrays([pa.array(["x", None, "x"]).dictionary_encode()], ["c"]),
        pa.struct([("c", pa.string())]),
    ),
    "map of categories": (
        pa.MapArray.from_arrays([0, 1, 1, 3], pa.array(list("xyz")).dictionary_encode(), pa.array(list("abc"))),
        pa.map_(pa.string(), pa.string()),
    ),
    "list of string_view": (pa.array([["a"], None, []], pa.list_(pa.string_view())), pa.list_(pa.string())),
    "category as large_string": (pa.array(["a", None, "b"], pa.large_string()).dictionary_encode(), pa.large_string()),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_column_in_another_form_is_taken_by_its_values(form: str, backend: Backend) -> None:
    """Both described with that form (a list of dictionaries ended the process) and brought in it."""
    column, plain = FORMS[form]
    for declared in (column.type, plain):
        left = Input("l", pa.schema([("k", pa.int64()), ("v", declared)]), row_kind="op")
        assert left.schema.field("v").type == plain
        nested = pa.types.is_nested(plain)
        key = Key("k", "k") if nested else Key("v", "v")
        join = Join("full", left, dataclasses.replace(left, name="r"), (key,), suffixes=("", "_r"))
        assert from_json(join.to_json()) == join
        batch = pa.table({"k": [0, 1, 2], "v": column, "op": ["+I"] * 3})
        with backend.engine(join) as engine:
            engine.process(batch.slice(0, 1), batch)
            said = engine.process(batch.slice(1))
            said.validate(full=True)
            assert said.schema.field("v").type == plain
            values = column.to_pylist()
            found = sorted((r["k"], r["v_r"]) for r in said.to_pylist() if r["row_kind"] == "+I" and r["k_r"] == r["k"])
            assert found == [(k, values[k]) for k in (1, 2) if nested or values[k] is not None]
            gone = engine.prepare(batch.set_column(2, "op", pa.array(["-D"] * 3)))
            engine.commit()
            assert gone.metrics["left_unknown_retractions"] == 0


def test_a_null_in_a_category_is_a_null_in_a_unique_key() -> None:
    column, _ = FORMS["category with a null in it"]
    left = Input("l", pa.schema([("v", column.type)]), unique_key=("v",))
    engine = JoinEngine(Join("left", left, Input("r", pa.schema([("w", pa.string())])), (Key("v", "w"),)), "cpu")
    with pytest.raises(BadInputError, match="unique key"):
        engine.process(pa.table({"v": column.slice(1, 1)}))


NOT_CARRIED: dict[str, pa.DataType] = {
    "binary(0)": pa.binary(0),
    "a list of none": pa.list_(pa.int8(), 0),
    "a struct of nothing": pa.struct([]),
    "a struct with a name twice": pa.struct([("a", pa.int8()), ("a", pa.int8())]),
    "half floats": pa.float16(),
    "decimal256": pa.decimal256(40, 2),
    "an interval": pa.month_day_nano_interval(),
    "a union": pa.dense_union([pa.field("a", pa.int8())]),
    "run-end encoded": pa.run_end_encoded(pa.int32(), pa.int8()),
    "a list view": pa.list_view(pa.int8()),
    "categories of lists": pa.dictionary(pa.int8(), pa.list_(pa.int8())),
    "an extension": pa.opaque(pa.int8(), "a", "b") if hasattr(pa, "opaque") else pa.list_view(pa.int8()),
    "within a map": pa.map_(pa.string(), pa.list_(pa.binary(0))),
}


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_a_type_that_is_not_carried_is_refused_by_column(name: str) -> None:
    with pytest.raises(DescriptionError, match=r"input 'l', column 'v': type .* is not carried"):
        Input("l", pa.schema([("k", pa.int64()), ("v", NOT_CARRIED[name])]))


def test_an_order_for_an_input_without_rows() -> None:
    """An empty list is no list of floats."""
    source = Input("l", pa.schema([("k", pa.int64())]))
    join = Join("full", source, Input("r", pa.schema([("w", pa.int64())])), (Key("k", "w"),))
    engine = JoinEngine(join, "cpu")
    assert engine.process(pa.table({"k": [1]}), None, orders=[[0], []]).num_rows == 1
    assert (
        engine.process(pa.table({"k": [2]}), pa.table({"w": pa.array([], pa.int64())}), orders=[[0], []]).num_rows == 1
    )


UTC = dt.UTC if hasattr(dt, "UTC") else dt.timezone.utc  # noqa: UP017 - Python 3.10
# Two types, and for each three values, of which the left's come 1st, 3rd and 5th, the right's 2nd, 4th and 6th.
SEQUENCES: dict[str, tuple[pa.DataType, list[Any], pa.DataType, list[Any]]] = {
    "int32 and int64": (pa.int32(), [-(2**31), 1, 2**31 - 1], pa.int64(), [-5, 2, 2**40]),
    "int64 and int8": (pa.int64(), [-(2**40), 0, 100], pa.int8(), [-5, 2, 127]),
    "s and us": (
        pa.timestamp("s"),
        [dt.datetime(2026, 1, 1, 0, 0, n) for n in range(3)],
        pa.timestamp("us"),
        [dt.datetime(2026, 1, 1, 0, 0, n, 1) for n in range(3)],
    ),
    "two zones": (
        pa.timestamp("ms", "Europe/Berlin"),
        [dt.datetime(2026, 1, 1, n, tzinfo=UTC) for n in range(3)],
        pa.timestamp("us", "America/New_York"),
        [dt.datetime(2026, 1, 1, n, 30, tzinfo=UTC) for n in range(3)],
    ),
    "decimals of two scales": (
        pa.decimal128(5, 1),
        [Decimal("0.1"), Decimal("0.2"), Decimal("9999.9")],
        pa.decimal128(20, 6),
        [Decimal("0.100001"), Decimal("0.200001"), Decimal("10000")],
    ),
    "floats": (pa.float32(), [0.5, 1.5, 2.0**40], pa.float64(), [0.5000001, 1.75, float("nan")]),
    "texts": (pa.string(), ["a", "b", "c"], pa.large_string(), ["aa", "bb", "cc"]),
}


@pytest.mark.parametrize("flip", [False, True], ids=["", "flipped"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_by_of_two_types(name: str, *, flip: bool, backend: Backend) -> None:
    """Whichever input has the wider type, the order is that of the values."""
    one, ones, other, others = SEQUENCES[name]
    order = "rl" if flip else "lr"
    inputs, tables = {}, {}
    for place, (side, kind, values) in enumerate(zip(order, (one, other), (ones, others), strict=True)):
        columns = {f"{side}k": pa.array([1, 1, 1]), f"{side}s": pa.array(values, kind)}
        columns[f"{side}at"] = pa.array([place, place + 2, place + 4])  # its place among all
        # from the last to the first: nothing but the column says the order
        tables[side] = pa.table(columns).take([2, 1, 0])
        inputs[side] = Input(side, tables[side].schema, sequence_by=f"{side}s")
    join = Join("inner", inputs["l"], inputs["r"], (Key("lk", "rk"),), emit="per_event")
    with backend.engine(join) as engine:
        result = engine.prepare(tables["l"], tables["r"])
        engine.commit()
    # a pair is said by the later of its rows
    caused = [max(row.values()) for row in result.changelog.select(["lat", "rat"]).to_pylist()]
    assert caused == sorted(caused) == result.sequence.tolist()
    assert sorted(caused) == [1, 2, 3, 3, 4, 4, 5, 5, 5]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.string(), pa.int64()),
        (pa.int64(), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("ns"), pa.timestamp("us")),
        (pa.int64(), pa.uint64()),
        (pa.int64(), pa.decimal128(38, 0)),
        (pa.decimal128(38, 38), pa.decimal128(38, 0)),
    ],
    ids=str,
)
def test_sequence_by_of_types_that_do_not_compare(one: pa.DataType, other: pa.DataType) -> None:
    left = Input("l", pa.schema([("k", pa.int64()), ("s", one)]), sequence_by="s")
    right = Input("r", pa.schema([("k", pa.int64()), ("t", other)]), sequence_by="t")
    with pytest.raises(DescriptionError, match=r"cannot compare sequence_by 's' .* with 't' .*CAST"):
        Join("inner", left, right, (Key("k", "k", using=True),))
    with pytest.raises(DescriptionError, match="cannot compare sequence_by"):
        MultiJoin.of([left, right], "k")
    with pytest.raises(DescriptionError, match="cannot compare sequence_by"):
        CoGroup(left, right, (Key("k", "k"),))


def test_a_list_has_no_order_to_go_by() -> None:
    with pytest.raises(DescriptionError, match=r"sequence_by 's' of type list.*has no order"):
        Input("l", pa.schema([("s", pa.list_(pa.int64()))]), sequence_by="s")


@pytest.mark.parametrize("bad_rows", ["fail", "drop", "tag"])
def test_a_timestamp_too_far_for_microseconds(bad_rows: Any) -> None:
    """Seconds reach further than what they are compared in."""
    left = Input("l", pa.schema([("k", pa.timestamp("s")), ("n", pa.int64())]), bad_rows=bad_rows)
    right = Input("r", pa.schema([("k", pa.timestamp("us")), ("m", pa.int64())]))
    engine = JoinEngine(Join("full", left, right, (Key("k", "k", using=True),)), "cpu")
    batch = pa.table({"k": pa.array([1, 2**62], pa.timestamp("s")), "n": [1, 2]})
    if bad_rows == "fail":
        with pytest.raises(BadInputError, match=f"input 'l', column 'k': is too far from 1970.*{2**62}"):
            engine.process(batch)
        return
    said = engine.process(batch).drop_columns(["m"]).to_pylist()
    at = dt.datetime(1970, 1, 1, 0, 0, 1)
    assert said[0] == {"row_kind": "+I", "k": at, "n": 1}
    assert said[1:] == ([{"row_kind": "bad", "k": None, "n": 2}] if bad_rows == "tag" else [])


def test_a_bad_row_shows_the_event_time_it_has() -> None:
    """An int64 of milliseconds beside another input's timestamps."""
    left = Input("l", pa.schema([("t", pa.int64()), ("n", pa.string())]), event_time="t", bad_rows="tag")
    right = Input("r", pa.schema([("u", pa.timestamp("us"))]), event_time="u")
    engine = JoinEngine(IntervalJoin("inner", left, right, (), interval=Interval(0, 0, timestamp="ts")), "cpu")
    said = engine.process(pa.table({"t": [None, 1000, 2**62], "n": text(b"a", b"\xff", b"b")}))
    assert said["row_kind"].to_pylist() == ["bad"] * 3
    assert said["t"].to_pylist() == [None, 1000, 2**62]
    assert said["ts"].to_pylist() == [None, dt.datetime(1970, 1, 1, 0, 0, 1), None]


L, R = Input("l", pa.schema([("k", pa.int64())])), Input("r", pa.schema([("w", pa.int64())]))
WRONG_ARGUMENTS: dict[str, Any] = {
    "text for a unique key": lambda: Input("l", L.schema, unique_key="k"),  # type: ignore[arg-type]
    "no schema": lambda: Input("l", None),
    "a number for a name": lambda: Input(5, L.schema),  # type: ignore[arg-type]
    "a name that is no text": lambda: Input("\ud800", L.schema),
    "text for a TTL": lambda: Input("l", L.schema, ttl_ms="7 days"),  # type: ignore[arg-type]
    "a TTL of an aeon": lambda: Input("l", L.schema, ttl_ms=10**30),
    "a TTL of none": lambda: Input("l", L.schema, ttl_ms=0),
    "pairs for keys": lambda: Join("inner", L, R, (("k", "w"),)),  # type: ignore[arg-type]
    "a key of numbers": lambda: Join("inner", L, R, (Key(1, 2),)),  # type: ignore[arg-type]
    "no input": lambda: Join("inner", L, None),  # type: ignore[arg-type]
    "a condition that is no text": lambda: Join("inner", L, R, where=5),  # type: ignore[arg-type]
    "inputs in a set": lambda: CoGroup(L, {R}, (Key("k", "w"),)),  # type: ignore[arg-type]
    "an endless duration": lambda: parse_duration("9" * 400 + " days"),
    "a truth for a duration": lambda: parse_duration(True),
    "an endless bound": lambda: parse_bound("9" * 400 + " days"),
    "no JSON": lambda: from_json("{"),
    "another JSON": lambda: from_json(json.dumps([1])),
    "no description": lambda: JoinEngine(L, "cpu"),  # type: ignore[arg-type]
    "a clock that is text": lambda: JoinEngine(Join("inner", L, R), "cpu").process(clock_ms="now"),  # type: ignore[arg-type]
    "orders that are a number": lambda: JoinEngine(Join("inner", L, R), "cpu").process(orders=5),  # type: ignore[arg-type]
}


def test_a_list_is_as_good_as_a_tuple() -> None:
    keyed = Input("l", L.schema, unique_key=["k"])  # type: ignore[arg-type]
    join = Join("inner", keyed, R, [Key("k", "w")])  # type: ignore[arg-type]
    assert join == Join("inner", Input("l", L.schema, unique_key=("k",)), R, (Key("k", "w"),))


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_a_description_error(name: str) -> None:
    with pytest.raises(DescriptionError):
        WRONG_ARGUMENTS[name]()


def test_a_snapshot_of_another_kind_is_refused_and_the_engine_stays_fresh() -> None:
    join = Join("full", L, R, (Key("k", "w"),))
    engine, other = JoinEngine(join, "cpu"), JoinEngine(join, "cpu")
    other.process(pa.table({"k": [1, 2]}), pa.table({"w": [2]}))
    state = other.snapshot()
    counts = state["left"].column_names.index("__count")
    for wrong in (
        None,
        {},
        {"left": state["left"]},
        {**state, "right": state["right"].drop_columns(["w"])},
        {**state, "right": state["right"].set_column(0, "w", pa.array(["x"]))},
        {**state, "left": state["left"].set_column(counts, "__count", pa.array([0.5, None]))},
    ):
        with pytest.raises(StateError):
            engine.restore(wrong)  # type: ignore[arg-type]
        assert engine.state_size()["left_rows"] == 0
    engine.restore(state)
    assert np.array_equal(engine.snapshot()["left"]["k"], [1, 2])
    engine.close()
    for call in (engine.process, engine.commit, engine.snapshot, engine.state_size, engine.finish):
        with pytest.raises(StateError, match="closed"):
            call()


AGGREGATED = {name: kind for name, (kind, _) in TYPES.items()}


@pytest.mark.parametrize("name", AGGREGATED)
def test_every_aggregate_of_every_type(name: str) -> None:
    """It is a result or refused when it is described; count(*) may be asked for twice."""
    kind, values = TYPES[name]
    source, refused = Input("l", pa.schema([("v", kind)])), 0
    rows = pa.table({"v": pa.array([*values, None, *values], kind)})
    by_key = () if pa.types.is_nested(kind) else ("v",)
    for function, by in itertools.product(get_args(Function), {(), by_key}):
        try:
            told = Aggregate.of(source, by, {"m": (function, "v"), "n": "count(*)", "o": "count(*)"})
        except DescriptionError:
            refused += 1
            continue
        for batch in (rows, rows.slice(0, 0)):
            engine = JoinEngine(told, "cpu")
            engine.process(batch)
            said = engine.finish()
            said.validate(full=True)
            assert sum(said["n"].to_pylist()) == sum(said["o"].to_pylist()) == batch.num_rows
    assert refused < 2 * len(get_args(Function))


def test_a_list_of_lists_of_nulls_comes_back_from_a_snapshot() -> None:
    """Arrow's cast of a sliced one to its own type ends beyond its elements."""
    kind = pa.list_(pa.large_list(pa.null()))
    source = Input("l", pa.schema([pa.field("k", pa.int64(), nullable=False), ("v", kind)]))
    join = Join("left", source, R, (Key("k", "w"),))
    engine, other = JoinEngine(join, "cpu"), JoinEngine(join, "cpu")
    values = [[[None, None], [None]], None, [[]], [[None] * 4]]
    batch = pa.table({"k": range(4), "v": pa.array(values, kind)})
    for part in (batch.slice(3), batch.slice(1, 2), batch):
        engine.process(part)
    other.restore(engine.snapshot())
    assert other.snapshot() == engine.snapshot()
    said = other.process(None, pa.table({"w": [3, 0]}))
    assert all(row["v"] == values[row["k"]] for row in said.to_pylist())
    assert said.num_rows == 6


def test_text_behind_a_null_list_is_nobodys() -> None:
    """A null list may have elements: they move no fault to another row, and are none themselves."""
    offsets, hidden = pa.array([0, 1, 2, 4], pa.int32()), text(b"a", b"\xff", b"b", b"\xfe")
    values = pa.ListArray.from_arrays(offsets, hidden, mask=pa.array([False, True, False]))
    source = Input("l", pa.schema([("k", pa.int64()), ("v", values.type)]), bad_rows="tag")
    engine = JoinEngine(Join("left", source, R, (Key("k", "w"),)), "cpu")
    said = engine.process(pa.table({"k": [0, 1, 2], "v": values}))
    rows = [(r["row_kind"], r["k"], r["v"]) for r in said.to_pylist()]
    assert rows == [("+I", 0, ["a"]), ("+I", 1, None), ("bad", 2, ["b", "\ufffd"])]


def test_a_map_with_a_key_that_is_null_is_none() -> None:
    """Arrow before 26 ends the process over a map of which it does not know that there is none."""
    kind = pa.map_(TEXT, pa.int64())
    maps = pa.array([[("a", 1), ("b", None)], None, []], kind)

    def pairs(keys: list[str | None]) -> pa.Array:
        return pa.StructArray.from_arrays([pa.array(keys), pa.array([1, 2])], fields=[kind.key_field, kind.item_field])

    assert of_elements(maps, kind, pairs(["c", "d"])).to_pylist() == [[("c", 1), ("d", 2)], None, []]
    with pytest.raises(ValueError, match="a null among the keys of a map<string, int64>"):
        of_elements(maps, kind, pairs(["c", None]))
