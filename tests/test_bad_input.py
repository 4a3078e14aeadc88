"""Bad input is a clear error that names input, column and a sample, and changes nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key, normalize_on
from gpu_ops.descriptions.times import parse_duration
from gpu_ops.errors import (
    BackendError,
    BadInputError,
    ConditionError,
    DescriptionError,
    StateError,
)

ORDERS = pa.schema(
    [
        ("order_id", pa.int64()),
        ("amount", pa.float64()),
        ("note", pa.string()),
        ("tags", pa.list_(pa.int32())),
    ]
)
PRICES = pa.schema([("p_order", pa.int64()), pa.field("price", pa.decimal128(10, 2)), ("day", pa.date32())])


def described(**options: Any) -> Join:
    left = Input("orders", ORDERS, unique_key=("order_id",), row_kind="op")
    right = Input("prices", PRICES, row_kind="kind")
    told: dict[str, Any] = {
        "how": "left",
        "left": left,
        "right": right,
        "keys": (Key("order_id", "p_order"),),
        "emit": "per_event",
    }
    return Join(**{**told, **options})


def orders(rows: int = 2, **columns: Any) -> pa.Table:
    """A good micro-batch of the left input, with columns replaced, added, or (None) left out."""
    good: dict[str, Any] = {
        "order_id": pa.array(range(rows), pa.int64()),
        "amount": pa.array([1.5] * rows, pa.float64()),
        "note": pa.array(["n"] * rows, pa.string()),
        "tags": pa.array([[1]] * rows, pa.list_(pa.int32())),
        "op": pa.array(["+I"] * rows, pa.string()),
    }
    return pa.table({k: v for k, v in {**good, **columns}.items() if v is not None})


def prices(rows: int = 2, **columns: Any) -> pa.Table:
    good: dict[str, Any] = {
        "p_order": pa.array(range(rows), pa.int64()),
        "price": pa.array([None] * rows, pa.decimal128(10, 2)),
        "day": pa.array([0] * rows, pa.int32()).cast(pa.date32()),
        "kind": pa.array(["+I"] * rows, pa.string()),
    }
    return pa.table({k: v for k, v in {**good, **columns}.items() if v is not None})


def strings(*values: str | None) -> pa.Array:
    return pa.array(values, pa.string())


def twice(table: pa.Table, name: str) -> pa.Table:
    return table.append_column(name, table[name])


BAD: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "unknown row kind": (lambda: {"left": orders(op=strings("+I", "+X"))}, ("orders", "op", "+X")),
    "row kind in the wrong case": (lambda: {"left": orders(op=strings("+i", "+I"))}, ("orders", "op", "+i")),
    "empty row kind": (lambda: {"right": prices(kind=strings("", "+I"))}, ("prices", "kind", "''")),
    "null row kind": (lambda: {"right": prices(kind=strings("+I", None))}, ("prices", "kind", "None")),
    "row kinds as numbers": (
        lambda: {"left": orders(op=pa.array([0, 1], pa.int8()))},
        ("orders", "op", "int8"),
    ),
    "row kinds as null type": (lambda: {"left": orders(op=pa.nulls(2))}, ("orders", "op", "null")),
    "no row kind column": (lambda: {"left": orders(op=None)}, ("orders", "op", "missing")),
    "debezium update without unique key": (
        lambda: {"right": prices(kind=strings("c", "u"))},
        ("prices", "kind", "unique_key", "'u'"),
    ),
    "missing column": (lambda: {"left": orders(amount=None)}, ("orders", "amount", "missing")),
    "missing key column": (lambda: {"right": prices(p_order=None)}, ("prices", "p_order", "missing")),
    "column in the wrong case": (
        lambda: {"left": orders().rename_columns(["ORDER_ID", "amount", "note", "tags", "op"])},
        ("orders", "order_id", "missing"),
    ),
    "no columns at all": (lambda: {"left": pa.table({})}, ("orders", "order_id", "missing")),
    "extra column": (lambda: {"left": orders(extra=strings("a", "b"))}, ("orders", "extra", "not expected")),
    "another input's row": (lambda: {"right": orders()}, ("prices", "p_order", "missing")),
    "column twice": (lambda: {"left": twice(orders(), "note")}, ("orders", "note", "twice")),
    "key beyond its type": (
        lambda: {"right": prices(p_order=pa.array([1, 1 << 63], pa.uint64()))},
        ("prices", "p_order", "int64", "not in range", "9223372036854775808"),
    ),
    "key as text": (
        lambda: {"right": prices(p_order=strings("1", "2"))},
        ("prices", "p_order", "string", "int64", "'1'"),
    ),
    "integers that no double has": (
        lambda: {"left": orders(amount=pa.array([1, (1 << 53) + 1], pa.int64()))},
        ("orders", "amount", "double", "9007199254740993"),
    ),
    "bytes for text": (
        lambda: {"left": orders(note=pa.array([b"a", b"b"], pa.binary()))},
        ("orders", "note", "binary", "string", "b'a'"),
    ),
    "another decimal": (
        lambda: {"right": prices(price=pa.array([Decimal("1.5"), Decimal("1.505")], pa.decimal128(10, 3)))},
        ("prices", "price", "decimal128(10, 2)", "1.505"),
    ),
    "timestamp for date": (
        lambda: {"right": prices(day=pa.array([0, 1], pa.timestamp("us")))},
        ("prices", "day", "timestamp[us]", "date32"),
    ),
    "a list of something else": (
        lambda: {"left": orders(tags=pa.array([["x"], ["y"]], pa.list_(pa.string())))},
        ("orders", "tags", "list", "string", "int32"),
    ),
    "null unique key": (
        lambda: {"left": orders(order_id=pa.array([1, None], pa.int64()))},
        ("orders", "order_id", "unique key", "null"),
    ),
    "null unique key in a deletion": (
        lambda: {"left": orders(1, order_id=pa.array([None], pa.int64()), op=strings("-D"))},
        ("orders", "order_id", "unique key"),
    ),
    "order too short": (
        lambda: {"left": orders(), "left_order": np.array([1])},
        ("orders", "order", "1", "2"),
    ),
    "order too long": (
        lambda: {"right": prices(), "right_order": np.arange(3)},
        ("prices", "order", "3", "2"),
    ),
    "order without rows": (lambda: {"right_order": np.arange(3)}, ("prices", "order", "3", "0")),
    "order in fractions": (
        lambda: {"left": orders(), "left_order": np.array([0.5, 1.0])},
        ("orders", "order", "integer"),
    ),
    "order of two dimensions": (
        lambda: {"left": orders(), "left_order": np.array([[0], [1]])},
        ("orders", "order", "integer"),
    ),
    "rows instead of a table": (lambda: {"left": orders().to_pylist()}, ("orders", "Arrow", "list")),
    "a dictionary of columns": (lambda: {"right": {"p_order": [1]}}, ("prices", "Arrow", "dict")),
    "good left and bad right": (
        lambda: {"left": orders(3), "right": prices(kind=strings("+I", "nonsense"))},
        ("prices", "kind", "nonsense"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_micro_batch(name: str, backend: Backend) -> None:
    """Its error, the state as it was, and the next micro-batch as if nothing had been."""
    make, parts = BAD[name]
    with backend.engine(described()) as engine, backend.engine(described()) as untroubled:
        first = {"left": orders(3), "right": prices(2)}
        assert engine.process(**first).equals(untroubled.process(**first))
        before = engine.snapshot()
        with pytest.raises(BadInputError) as error:
            engine.process(**make())
        for part in parts:
            assert part in str(error.value), f"{part!r} is not in: {error.value}"
        assert error.value.input_name in ("orders", "prices")
        after = engine.snapshot()
        for side in ("left", "right"):
            assert after[side].equals(before[side])
        assert engine.state_size() == untroubled.state_size()
        then = {
            "left": orders(2, op=strings("+U", "-D")),
            "right": prices(3, kind=strings("-D", "+I", "+I")),
        }
        assert engine.process(**then).equals(untroubled.process(**then))


def test_tables_of_others(backend: Backend) -> None:
    """DataFrames of pandas and polars, and whatever gives an Arrow stream, as cuDF's does."""

    class DataFrame:
        """What cuDF's has of it: a copy to the host."""

        def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
            assert requested_schema is None
            return table.__arrow_c_stream__()

    class Without:
        def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
            raise NotImplementedError("no stream today")

    source = Input("l", pa.schema([("k", pa.int64()), ("s", pa.string())]))
    right = Input("r", pa.schema([("k", pa.int64()), ("t", pa.string())]))
    join = Join("inner", source, right, keys=normalize_on("k"), emit="per_batch")
    table = pa.table({"k": [1, 2], "s": ["a", None]})
    second = table.rename_columns(["k", "t"])
    with backend.engine(join) as engine:
        wanted = engine.process(table, second)
    assert wanted.num_rows == 2
    others = [table.to_pandas(), table.to_batches()[0], DataFrame()]
    if importlib.util.find_spec("polars"):  # not on each host with a card
        others.append(importlib.import_module("polars").from_arrow(table))
    for other in others:
        with backend.engine(join) as engine:
            assert engine.process(other, second).equals(wanted)
    with backend.engine(join) as engine:
        with pytest.raises(BadInputError, match="Without that does not become an Arrow table: no stream today"):
            engine.process(Without(), second)
        with pytest.raises(BadInputError, match="with __arrow_c_stream__, not dict"):
            engine.process(table.to_pydict(), second)


def test_good_but_unusual(backend: Backend) -> None:
    """What is no error: another column order, a repeated +I (an upsert), chunks, no rows, no input."""
    with backend.engine(described()) as engine:
        engine.process(left=orders(2).select(["op", "tags", "note", "amount", "order_id"]))
        assert engine.process(left=orders(2))["row_kind"].length() == 4
        assert engine.state_size()["left_rows"] == 2
        assert engine.process().num_rows == 0
        assert engine.process(left=orders(0), right=prices(0)).num_rows == 0
        assert engine.process(left=pa.concat_tables([orders(1), orders(0), orders(1)])).num_rows == 4
        assert engine.process(right=prices(2).to_batches()[0]).num_rows == 4


@pytest.mark.parametrize("how", ["drop", "tag"])
def test_bad_rows_may_go(how: Any, backend: Backend) -> None:
    """``bad_rows`` decides for rows; what is wrong with a whole column stays an error."""
    join = described()
    join = dataclasses.replace(
        join,
        left=dataclasses.replace(join.left, bad_rows=how),
        right=dataclasses.replace(join.right, bad_rows=how),
    )
    bad_left = orders(4, order_id=pa.array([7, None, 8, 9], pa.int64()), op=strings("+I", "+I", None, "?"))
    bad_right = prices(2, p_order=pa.array([7, 7], pa.int64()), kind=strings("?", "+I"))
    with backend.engine(join) as engine:
        batch = engine.prepare(left=bad_left, right=bad_right)
        engine.commit()
        assert batch.metrics["left_rows_in"] == 4
        assert batch.metrics["left_bad_rows"] == 3
        assert batch.metrics["right_bad_rows"] == 1
        rows = batch.changelog.to_pylist()
        joined = [(r["row_kind"], r["order_id"], r["p_order"]) for r in rows if r["row_kind"] != "bad"]
        assert joined == [("+I", 7, None), ("-D", 7, None), ("+I", 7, 7)]
        tagged = [(r["order_id"], r["p_order"]) for r in rows if r["row_kind"] == "bad"]
        assert tagged == ([(None, None), (8, None), (9, None), (None, 7)] if how == "tag" else [])
        assert engine.state_size()["left_rows"] == 1
        for wrong in (orders(op=pa.array([0, 1], pa.int8())), orders(op=None), orders(amount=None)):
            with pytest.raises(BadInputError, match="orders"):
                engine.process(left=wrong)
        kinds = pa.array(["+I", "?"], pa.string()).dictionary_encode()
        assert engine.prepare(left=orders(op=kinds)).metrics["left_bad_rows"] == 1
        engine.commit()


LEFT = Input("orders", ORDERS, unique_key=("order_id",), row_kind="op")
DESCRIPTIONS: dict[str, tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = {
    "join type": (lambda: described(how="outer"), DescriptionError, ("how='outer'", "inner", "full")),
    "emit": (lambda: described(emit="append"), DescriptionError, ("emit='append'", "per_batch")),
    "at_end with a TTL": (
        lambda: described(emit="at_end", left=dataclasses.replace(LEFT, ttl_ms=5)),
        DescriptionError,
        ("at_end", "no row is forgotten"),
    ),
    "unknown left key": (
        lambda: described(keys=(Key("id", "p_order"),)),
        DescriptionError,
        ("orders", "'id'", "order_id"),
    ),
    "unknown right key": (
        lambda: described(keys=(Key("order_id", "order_id"),)),
        DescriptionError,
        ("prices", "'order_id'", "p_order"),
    ),
    "keys of types that do not compare": (
        lambda: described(keys=(Key("order_id", "day"),)),
        DescriptionError,
        ("order_id", "int64", "day", "date32", "CAST"),
    ),
    "text against numbers": (
        lambda: described(keys=(Key("note", "p_order"),)),
        DescriptionError,
        ("note", "string", "p_order", "int64"),
    ),
    "a list as key": (
        lambda: described(keys=(Key("tags", "p_order"),)),
        DescriptionError,
        ("orders", "tags", "list", "key"),
    ),
    "a list in the unique key": (
        lambda: dataclasses.replace(LEFT, unique_key=("tags",)),
        DescriptionError,
        ("orders", "tags", "key"),
    ),
    "unknown unique key": (
        lambda: dataclasses.replace(LEFT, unique_key=("id",)),
        DescriptionError,
        ("orders", "unique_key", "'id'", "order_id"),
    ),
    "empty unique key": (
        lambda: dataclasses.replace(LEFT, unique_key=()),
        DescriptionError,
        ("orders", "unique_key"),
    ),
    "unknown sequence column": (
        lambda: dataclasses.replace(LEFT, sequence_by="lsn"),
        DescriptionError,
        ("orders", "sequence_by", "'lsn'"),
    ),
    "row kind as data": (
        lambda: dataclasses.replace(LEFT, row_kind="note"),
        DescriptionError,
        ("orders", "note"),
    ),
    "updates": (
        lambda: dataclasses.replace(LEFT, updates="append"),
        DescriptionError,
        ("orders", "updates='append'"),
    ),
    "bad_rows": (
        lambda: dataclasses.replace(LEFT, bad_rows="ignore"),
        DescriptionError,
        ("orders", "bad_rows='ignore'", "fail"),
    ),
    "no columns": (lambda: Input("x", pa.schema([])), DescriptionError, ("'x'", "no columns")),
    "a column twice": (
        lambda: Input("x", pa.schema([("a", pa.int8()), ("a", pa.int8())])),
        DescriptionError,
        ("'x'", "'a'", "twice"),
    ),
    "one name for both": (
        lambda: described(right=dataclasses.replace(LEFT, name="Orders")),
        DescriptionError,
        ("both", "orders"),
    ),
    "name clash": (
        lambda: described(right=Input("prices", pa.schema([("p_order", pa.int64()), ("note", pa.string())]))),
        DescriptionError,
        ("'note'", "suffixes"),
    ),
    "null_aware without anti": (
        lambda: described(null_aware=True),
        DescriptionError,
        ("null_aware", "anti"),
    ),
    "null_aware without keys": (
        lambda: described(how="anti", null_aware=True, keys=()),
        DescriptionError,
        ("null_aware", "columns"),
    ),
    "condition syntax": (
        lambda: described(where="orders.amount >"),
        ConditionError,
        ("line 1", "orders.amount >"),
    ),
    "condition column": (
        lambda: described(where="orders.amont > 1"),
        ConditionError,
        ("amont", "amount", "line 1", "column 1"),
    ),
    "condition input": (lambda: described(where="order.amount > 1"), ConditionError, ("line 1",)),
    "condition types": (lambda: described(where="orders.tags > 1"), ConditionError, ("tags", "line 1")),
    "condition that is no condition": (
        lambda: described(where="orders.amount + 1"),
        ConditionError,
        ("bool",),
    ),
    "condition that is no text": (
        lambda: described(where={"orders.amount": 1}),
        DescriptionError,
        ("where=", "amount"),
    ),
    "aggregate in a condition": (
        lambda: described(where="orders.amount > max(prices.price)"),
        ConditionError,
        ("max", "line 1"),
    ),
    "duration": (lambda: parse_duration("soon"), DescriptionError, ("'soon'",)),
    "negative duration": (lambda: parse_duration(-5), DescriptionError, ("-5", "positive")),
    "on=": (lambda: normalize_on([("a", "b", "c")]), DescriptionError, ("on=", "'c'")),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_bad_description(name: str) -> None:
    make, kind, parts = DESCRIPTIONS[name]
    with pytest.raises(kind) as error:
        make()
    for part in parts:
        assert part.lower() in str(error.value).lower(), f"{part!r} is not in: {error.value}"


def test_bad_backend() -> None:
    from gpu_ops.join_engine import JoinEngine

    with pytest.raises(DescriptionError, match=r"backend='tpu'.*auto, cpu, gpu"):
        JoinEngine(described(), backend="tpu")  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there() -> None:
    from gpu_ops.backends import gpu_available
    from gpu_ops.join_engine import JoinEngine

    if gpu_available()[0]:
        pytest.skip("there is one")
    with pytest.raises(BackendError, match="no GPU answers"):
        JoinEngine(described(), backend="gpu")


def test_out_of_turn(backend: Backend) -> None:
    """Prepare, commit and restore in the wrong order say so, and leave a usable engine."""
    with backend.engine(described()) as engine:
        with pytest.raises(StateError, match="prepared"):
            engine.commit()
        engine.discard()
        engine.prepare(left=orders())
        with pytest.raises(StateError, match="neither committed nor discarded"):
            engine.prepare(left=orders())
        with pytest.raises(StateError, match="prepared"):
            engine.snapshot()
        engine.commit()
        state = engine.snapshot()
        with pytest.raises(StateError, match="fresh"):
            engine.restore(state)
        assert engine.state_size()["left_rows"] == 2
    with backend.engine(described()) as engine, pytest.raises(StateError, match="__count"):
        engine.restore({**state, "left": state["left"].drop_columns(["__count"])})


def test_a_memory_limit_is_kept(backend: Backend) -> None:
    """The micro-batch that would go beyond it fails, and the state is as it was."""
    with backend.engine_within(described(), 200_000) as engine:
        engine.process(left=orders(10))
        before = engine.snapshot()
        with pytest.raises(StateError, match="memory_limit"):
            engine.process(left=orders(100_000))
        assert engine.snapshot()["left"].equals(before["left"])
        assert engine.process(right=prices(1)).num_rows == 2


def test_errors_travel() -> None:
    """A BadInputError survives pickling, as it has to between a Spark task and its driver."""
    import pickle

    error = pickle.loads(pickle.dumps(BadInputError("orders", "op", "unknown row kind", "+X")))
    assert str(error) == "input 'orders', column 'op': unknown row kind (for example '+X')"
