"""`gpu_ops.engine`: DataFrames in by the inputs' names, the changelog and the table out, without Spark."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops.errors import BadInputError, DescriptionError

ORDERS = pd.DataFrame({"order_id": [1, 2, 3], "amount": [1, 2, 3]})
PRICES = pl.DataFrame({"order_id": [2, 3, 4], "price": [2.5, 3.0, 1.0], "currency": ["a", "b", "c"]})


def rows(table: Any) -> Counter[Any]:
    if isinstance(table, pd.DataFrame):
        table = pa.Table.from_pandas(table, preserve_index=False)
    elif isinstance(table, pl.DataFrame):
        table = table.to_arrow()
    return Counter(tuple(row.values()) for row in table.to_pylist())


@pytest.mark.parametrize(("output", "kind"), [("arrow", pa.Table), ("pandas", pd.DataFrame), ("polars", pl.DataFrame)])
def test_a_left_join_by_the_inputs_names(output: Any, kind: type) -> None:
    engine = gpu_ops.engine(orders=ORDERS, prices=PRICES, on="order_id", how="left", output=output)
    first = engine.process(orders=ORDERS)
    second = engine.process(prices=PRICES)
    assert isinstance(first, kind)
    assert isinstance(engine.table(), kind)
    assert rows(second) == rows(
        pa.table(
            {
                "row_kind": ["-D", "-D", "+I", "+I"],
                "order_id": [2, 3, 2, 3],
                "amount": [2, 3, 2, 3],
                "price": [None, None, 2.5, 3.0],
                "currency": [None, None, "a", "b"],
            }
        )
    )
    joined = {"order_id": [1, 2, 3], "amount": [1, 2, 3], "price": [None, 2.5, 3.0], "currency": [None, "a", "b"]}
    assert rows(engine.table()) == rows(pa.table(joined))


def test_a_changelog_input_and_a_unique_key() -> None:
    frame = pd.DataFrame({"op": ["+I"], "order_id": [1], "price": [1.5]})
    prices = gpu_ops.Input.of(frame, row_kind="op", unique_key="order_id")
    assert prices.schema.names == ["order_id", "price"]
    engine = gpu_ops.engine(orders=ORDERS, prices=prices, on="order_id")
    engine.process(orders=ORDERS, prices=frame)
    assert engine.table().to_pylist() == [{"order_id": 1, "amount": 1, "price": 1.5}]
    engine.process(prices=frame.assign(op="+U", price=2.5))
    assert engine.table()["price"].to_pylist() == [2.5]
    engine.process(prices=frame.assign(op="-D", price=2.5))
    assert engine.table().num_rows == 0


def test_the_table_is_what_a_join_of_all_rows_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows several times, in pieces so small that they are added up on the way."""
    rng = random.Random(3)
    schema = pa.schema([("k", pa.int64()), ("a", pa.int64())]), pa.schema([("k", pa.int64()), ("b", pa.int64())])
    monkeypatch.setattr("gpu_ops.output.FOLD_ROWS", 3)
    engine = gpu_ops.engine(one=schema[0], other=schema[1], on="k", how="full")
    taken: list[list[tuple[int, int]]] = [[], []]
    for _ in range(20):
        some = [[(rng.randrange(4), rng.randrange(2)) for _ in range(rng.randrange(4))] for _ in range(2)]
        for kept, more in zip(taken, some, strict=True):
            kept.extend(more)
        one, other = (
            pa.Table.from_pylist([dict(zip(s.names, row, strict=True)) for row in more], s)
            for s, more in zip(schema, some, strict=True)
        )
        engine.process(one=one, other=other)
        wanted = Counter((k, a, b) for k, a in taken[0] for key, b in taken[1] if k == key)
        for side, at in ((0, 1), (1, 2)):
            alone = [row for row in taken[side] if row[0] not in {k for k, _ in taken[1 - side]}]
            wanted.update((k, v, None) if at == 1 else (k, None, v) for k, v in alone)
        assert rows(engine.table()) == wanted


def test_a_discarded_micro_batch_is_not_in_the_table() -> None:
    engine = gpu_ops.engine(orders=ORDERS, by="order_id", aggregates={"n": "count(*)"})
    engine.process(orders=ORDERS)
    engine.prepare(orders=ORDERS)
    engine.discard()
    assert engine.table()["n"].to_pylist() == [1, 1, 1]
    engine.prepare(orders=ORDERS)
    engine.commit()
    assert engine.table()["n"].to_pylist() == [2, 2, 2]


def test_joins_by_time_and_the_end_of_input() -> None:
    at = pd.to_datetime(["2026-01-01 08:00", "2026-01-01 09:00"])
    left, right = pd.DataFrame({"k": [1, 1], "at": at}), pd.DataFrame({"k": [1], "seen": at[:1], "v": [7]})
    nearest = gpu_ops.engine(left=left, right=right, on="k", how="left", time=("at", "seen"), direction="backward")
    nearest.process(left, right)
    assert nearest.table()["v"].to_pylist() == [7, 7]
    within = gpu_ops.engine(
        left=left, right=right, on="k", how="left", time=("at", "seen"), lower="-1 minute", upper="1 minute"
    )
    within.process(left, right)
    assert within.table()["v"].to_pylist() == [7]
    within.finish()
    assert sorted(within.table()["v"].to_pylist(), key=str) == [7, None]
    assert isinstance(
        gpu_ops.engine(a=left, b=left, c=left, on="k", suffixes=("", "_b", "_c")).description, gpu_ops.MultiJoin
    )
    ends = gpu_ops.engine(left=left, right=right, on="k", emit="at_end")
    ends.process(left, right)
    assert ends.table().num_rows == 0
    assert [part.num_rows for part in ends.finish_parts()] == [2]
    assert ends.table().num_rows == 2


@pytest.mark.parametrize(
    ("declared", "given", "taken"),
    [
        (pa.float64(), pd.Series([1, 2]), [1.0, 2.0]),
        (pa.int64(), pd.Series([1.0, None]), [1, None]),
        (pa.int64(), pd.Series([1, 2], dtype="int8"), [1, 2]),
        (pa.int8(), pd.Series([1, 2]), [1, 2]),
        (pa.float64(), pd.Series([1.5], dtype="float32"), [1.5]),
        (pa.float64(), pd.Series([2**53 + 1]), None),
        (pa.int64(), pd.Series([1.5]), None),
        (pa.int8(), pd.Series([300]), None),
        (pa.uint64(), pd.Series([-1]), None),
        (pa.float32(), pd.Series([0.1]), None),
    ],
)
def test_numbers_are_taken_as_others_where_nothing_is_lost(declared: Any, given: Any, taken: Any) -> None:
    schema = pa.schema([("k", pa.int64()), ("x", declared)])
    engine = gpu_ops.engine(a=schema, b=pa.schema([("k", pa.int64())]), on="k", how="left")
    frame = pd.DataFrame({"k": np.arange(len(given)), "x": given})
    if taken is None:
        with pytest.raises(BadInputError, match=r"input 'a', column 'x': .*\(for example"):
            engine.process(a=frame)
        assert engine.state_size()["left_rows"] == 0
    else:
        engine.process(a=frame)
        assert engine.table()["x"].to_pylist() == taken


def test_what_is_no_join_is_refused_with_what_to_write() -> None:
    for message, arguments in {
        "input 'b' takes a DataFrame of pandas, polars or cuDF, an Arrow table": {"a": ORDERS, "b": [1], "on": "k"},
        r"row_kind= is said of an input: a=gpu_ops.Input.of\(rows, row_kind='op'\)": {
            "a": ORDERS,
            "b": PRICES,
            "on": "order_id",
            "row_kind": "op",
        },
        "a join has two inputs or more, by name": {"a": ORDERS, "on": "order_id"},
        "lower= is of a join by time: name its columns": {"a": ORDERS, "b": PRICES, "on": "order_id", "lower": 5},
        "an interval join has lower= and upper=": {
            "a": ORDERS,
            "b": PRICES,
            "on": "order_id",
            "time": ("amount", "order_id"),
        },
        "aggregates= is for one input": {"a": ORDERS, "b": PRICES, "aggregates": {"n": "count(*)"}},
        "an input cannot be called 'watermark'": {"watermark": ORDERS, "b": PRICES, "on": "order_id"},
        "an input cannot be called 'right'": {"right": ORDERS, "left": PRICES, "on": "order_id"},
        r"no column 'order_idd' to join on; did you mean 'order_id'\? There are": {
            "a": ORDERS,
            "b": PRICES,
            "on": "order_idd",
        },
    }.items():
        with pytest.raises(DescriptionError, match=message):
            gpu_ops.engine(**arguments)
    engine = gpu_ops.engine(orders=ORDERS, prices=PRICES, on="order_id")
    with pytest.raises(DescriptionError, match="no input 'price'; did you mean prices="):
        engine.process(price=PRICES)
    with pytest.raises(DescriptionError, match="by name, and by position"):
        engine.process(ORDERS, prices=PRICES)
    with pytest.raises(DescriptionError, match="made with fold=True"):
        gpu_ops.JoinEngine(engine.description).table()


def test_an_engine_says_what_it_is() -> None:
    engine = gpu_ops.engine(orders=ORDERS, prices=PRICES, on="order_id", how="left", backend="cpu")
    assert repr(engine).splitlines() == [
        "regular join, left: orders, prices",
        "  key         orders.order_id = prices.order_id",
        "  emit        per_batch",
        "  backend     cpu (asked for)",
        "  input       orders: insert-only; 2 columns",
        "  input       prices: insert-only; 3 columns",
    ]
    engine.process(orders=ORDERS)
    assert engine._repr_html_().count("<tr>") == 1 + 3
