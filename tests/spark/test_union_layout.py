"""Union columns of two and more inputs; no Spark session."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import types as st

from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.spark.plan.build import union_columns
from gpu_ops.spark_types import arrow_schema

TYPES = {"int": st.IntegerType(), "long": st.LongType(), "double": st.DoubleType(), "string": st.StringType()}


def schemas(*texts: str) -> list[st.StructType]:
    """Of texts such as ``k long, a string``."""
    fields = [[column.split() for column in text.split(", ")] for text in texts]
    return [st.StructType([st.StructField(name, TYPES[kind]) for name, kind in own]) for own in fields]


def inputs(frames: list[st.StructType], kinds: str) -> list[Input]:
    """The inputs ``a``, ``b``, ...; those whose letter is in ``kinds`` have row kinds in ``op``."""
    return [
        Input(name, arrow_schema(df, name, without="op" if name in kinds else None),
              row_kind="op" if name in kinds else None)
        for name, df in zip("abcdef", frames, strict=False)
    ]  # fmt: skip


def layout(join: Description, frames: list[st.StructType]) -> list[tuple[str | None, ...]]:
    made = union_columns(join, frames)
    assert [column.name for column in made] == [f"c{n}" for n in range(len(made))]
    for number, frame in enumerate(frames):
        carried = [column.columns[number] for column in made if column.columns[number] is not None]
        assert sorted(map(str, carried)) == sorted(frame.names)
        for column in made:
            own = column.columns[number]
            assert own is None or frame[own].dataType == column.type
    return [column.columns for column in made]


def test_two_inputs_share_keys_then_row_kinds_then_types() -> None:
    frames = schemas("op string, k long, a string, n int", "x double, k long, op string, b string, c string")
    left, right = inputs(frames, "ab")
    join = Join("inner", left, right, (Key("k", "k"),), suffixes=("", "_r"))
    assert layout(join, frames) == [("k", "k"), ("op", "op"), ("a", "b"), ("n", None), (None, "x"), (None, "c")]


def test_keys_of_different_types_have_columns_of_their_own() -> None:
    frames = schemas("k int, a long", "k long, b int")
    left, right = inputs(frames, "")
    join = Join("inner", left, right, (Key("k", "k"),), suffixes=("", "_r"))
    assert layout(join, frames) == [("k", "b"), ("a", "k")]


def test_three_inputs() -> None:
    frames = schemas("op string, k long, a string", "k long, b string, x int", "op string, k long, c string, d string")
    join = MultiJoin.of(inputs(frames, "ac"), "k")
    # row kinds are bytes: nothing else travels with them, also where an input has none
    assert layout(join, frames) == [("k", "k", "k"), ("op", None, "op"), ("a", "b", "c"), (None, "x", None),
                                   (None, None, "d")]  # fmt: skip


def test_a_key_of_two_types_among_four() -> None:
    frames = schemas("k int", "j long, v int", "k int", "j long")
    join = MultiJoin.of(inputs(frames, ""), [("a.k", "j"), ("a.k", "k"), ("b.j", "j")], suffixes=["", "", "_c", "_d"])
    assert layout(join, frames) == [("k", "v", "k", None), (None, "j", None, "j")]


def test_sixty_four_inputs() -> None:
    frames = schemas(*(f"k long, v{n} long, w{n} string" for n in range(64)))
    sources = [Input(f"i{n}", arrow_schema(df, f"i{n}")) for n, df in enumerate(frames)]
    assert layout(MultiJoin.of(sources, "k"), frames) == [
        ("k",) * 64, tuple(f"v{n}" for n in range(64)), tuple(f"w{n}" for n in range(64)),
    ]  # fmt: skip
