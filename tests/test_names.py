"""Columns that two queries call otherwise: those of an operator that computes the same, and no others."""

from __future__ import annotations

import dataclasses

import pyarrow as pa

from gpu_ops.descriptions.aggregate import Aggregate, Measure
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.names import called_by_name, columns_of_same


def joined(item: str, where: str) -> Join:
    left = Input("o", pa.schema([("id", pa.int64()), (item, pa.string())]))
    right = Input("p", pa.schema([("p__item", pa.string()), ("sum", pa.int64())]))
    return Join("left", left, right, (Key(item, "p__item"),), where)


def test_columns_that_a_clash_calls_otherwise_are_the_same() -> None:
    was, now = joined("item", "item <> 'item' AND id > `sum`"), joined("o__item", "o__item <> 'item' AND id > sum")
    assert columns_of_same(was, now) == {
        **{name: name for name in ("row_kind", "id", "p__item", "sum")}, "item": "o__item",
    }  # fmt: skip
    assert columns_of_same(now, was) is not None
    assert columns_of_same(was, dataclasses.replace(now, emit="per_event")) is not None
    for other in (
        joined("o__item", "o__item <> 'o__item' AND id > sum"),
        joined("o__item", "p__item <> 'item' AND id > sum"),
        joined("name", "name <> 'item' AND id > sum"),
        dataclasses.replace(now, how="inner"),
    ):
        assert columns_of_same(was, other) is None
    assert called_by_name("item <> 'item' + `it em`", {"item": "o__item", "it em": "o__it em"}) == (
        "o__item <> 'item' + `o__it em`"
    )


def test_another_function_of_another_name_is_another_one() -> None:
    source = Input("o", pa.schema([("item", pa.string()), ("n", pa.int64())]))
    was, now = (Aggregate(source, ("item",), (Measure(name, name, "n"),)) for name in ("sum", "max"))
    assert columns_of_same(was, now) is None
