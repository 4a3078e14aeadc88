"""Which changelogs are insert-only: those of which nothing is taken back, whatever comes into their inputs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin
from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.groups import Order, Top
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join, LookupJoin
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import Backend

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
A, B, C = (Input(name, SCHEMA.append(pa.field(name, pa.int64()))) for name in "abc")
ON = (Key("k", "k"),)
SUFFIXES = ("_l", "_r")


def join(how: str, left: Input = A, right: Input = B, **options: Any) -> Join:
    return Join(how, left, right, ON, suffixes=SUFFIXES, **options)  # type: ignore[arg-type]


def many(*how: str) -> MultiJoin:
    inputs = [dataclasses.replace(x, schema=pa.schema([("k", pa.int64()), (x.name, pa.int64())])) for x in (A, B, C)]
    return MultiJoin.of(inputs, "k", list(how))


def kinds(described: Description, seed: int, backend: Backend) -> Iterator[str]:
    """Of the changes over micro-batches of a few random insertions."""
    rng = random.Random(seed)
    with backend.engine(described) as engine:
        for _ in range(12):
            batches = [pa.table(_rows(rng, source.schema), schema=source.schema) for source in described.inputs]
            yield from engine.process(*batches)["row_kind"].to_pylist()


def _rows(rng: random.Random, schema: pa.Schema) -> list[pa.Array]:
    size = rng.randrange(4)
    return [pa.array([rng.choice([*range(6), None]) for _ in range(size)], field.type) for field in schema]


WHERE = "a.v <= b.v"
CASES: list[tuple[Description, bool]] = [
    *((join(how, where=where), how in ("inner", "semi"))
      for how in ("inner", "semi", "left", "right", "full", "anti") for where in (None, WHERE)),
    (many("inner", "inner"), True), (many("inner", "left"), False), (many("left", "inner"), False),
    (LookupJoin("left", A, B, ON, suffixes=SUFFIXES), True),
    (AsofJoin("inner", dataclasses.replace(A, event_time="a"), dataclasses.replace(B, event_time="b"), ON,
              suffixes=SUFFIXES, asof=Asof()), False),
    (Aggregate.of(A, ("k",), {"n": "count(*)"}, "per_batch"), False), (Top(A, ("k",), (Order("v"),), 1), False),
]  # fmt: skip


@pytest.mark.one_in(8, all=4)
@pytest.mark.parametrize("emit", ["per_batch", "per_event"])
@pytest.mark.parametrize(("described", "insert_only"), CASES, ids=[case.title for case, _ in CASES])
def test_insertions_in(described: Description, insert_only: bool, backend: Backend, emit: Emit) -> None:
    if emit not in described.emits:
        pytest.skip(f"there is none {emit}")
    described = described.with_inputs(described.inputs, emit)
    assert described.insert_only == insert_only
    found = {kind for seed in range(9) for kind in kinds(described, seed, backend)}
    assert (found == {"+I"}) == insert_only


def test_inputs_that_are_not_insert_only() -> None:
    changed: list[dict[str, Any]] = [{"unique_key": ("v",)}, {"row_kind": "op"}, {"ttl_ms": 1000}, {"bad_rows": "tag"}]
    for change in changed:
        assert not join("inner", dataclasses.replace(A, **change)).insert_only
        assert not join("semi", dataclasses.replace(A, **change)).insert_only
    assert LookupJoin("inner", A, dataclasses.replace(B, row_kind="op"), ON, suffixes=SUFFIXES).insert_only
    assert not LookupJoin("inner", dataclasses.replace(A, bad_rows="tag"), B, ON, suffixes=SUFFIXES).insert_only
