"""The lookup join on any backend: each left row once, with the table as it is then."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import LookupJoin
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import BadInputError, DescriptionError
from kernels.conftest import EMULATED, only_on
from kernels.engines import CPU, alike, run

LEFT = pa.schema([("n", pa.int64()), ("k", pa.float64())])
RIGHT = pa.schema([("id", pa.int64()), ("k", pa.float64()), ("v", pa.string())])
NAN, DUCKDB = float("nan"), duckdb.connect(config={"threads": "1"})
Batch = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]


def described(
    how: Any = "left", *, keyed: bool = False, where: str | None = None, null_safe: bool = False
) -> LookupJoin:
    right = Input("r", RIGHT, unique_key=("id",) if keyed else None, row_kind="op")
    return LookupJoin(how, Input("l", LEFT), right, (Key("k", "k", null_safe),), where, suffixes=("", "_r"))


def trace(seed: int, batches: int, *, keyed: bool) -> list[Batch]:
    """Left rows, and changes of the table; retractions are mostly of rows that are there."""
    choice, there, made, number = random.Random(seed), list[tuple[Any, ...]](), list[Batch](), 0
    for _ in range(batches):
        left = []
        for _ in range(choice.randrange(5)):
            number += 1
            left.append((number, choice.choice([0.0, -0.0, 1.5, NAN, None, 9.0])))
        changes = []
        for _ in range(choice.randrange(5)):
            if there and choice.random() < 0.4:
                row = choice.choice(there)
                there.remove(row)
                changes.append(("-D", *row))
                continue
            row = (choice.randrange(6), choice.choice([0.0, -0.0, 1.5, NAN, None]), choice.choice("ab"))
            there = [x for x in there if x[0] != row[0]] if keyed else there
            there.append(row)
            changes.append(("+U", *row))
        made.append((left, changes))
    return made


def tables(batch: Batch) -> dict[str, pa.Table]:
    left, changes = batch
    schema = pa.schema([("op", pa.string()), *RIGHT])
    given = {"left": (left, LEFT), "right": (changes, schema)}
    return {
        side: pa.Table.from_arrays([pa.array([row[n] for row in rows], f.type) for n, f in enumerate(own)], schema=own)
        for side, (rows, own) in given.items()
    }


def folded(table: list[tuple[Any, ...]], changes: list[tuple[Any, ...]], *, keyed: bool) -> list[tuple[Any, ...]]:
    for kind, *row in changes:
        if keyed:
            table = [x for x in table if x[0] != row[0]]
        elif kind == "-D":
            table = list(table)
            del table[next(n for n, x in enumerate(table) if repr(x) == repr(tuple(row)))]
        if kind == "+U":
            table = [*table, tuple(row)]
    return table


@pytest.mark.one_in(4, all=2)
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize(("how", "where", "null_safe"), [
    ("left", None, False), ("inner", None, True), ("left", "r.v = 'a' AND l.n > r.id", False),
])  # fmt: skip
def test_each_row_once_with_the_table_as_it_is(
    other_backend: Backend, how: str, where: str | None, null_safe: bool, keyed: bool
) -> None:
    join = described(how, keyed=keyed, where=where, null_safe=null_safe)
    equal = "l.k IS NOT DISTINCT FROM r.k" if null_safe else "l.k = r.k"
    sql = f"SELECT l.n, l.k, r.* FROM l {how} JOIN r ON {equal} AND ({where or 'true'})"
    for seed in range(3):
        rows: list[tuple[Any, ...]] = []
        state = None
        for part in (trace(seed, 30, keyed=keyed)[:15], trace(seed, 30, keyed=keyed)[15:]):
            with other_backend.engine(join) as engine:
                if state is not None:
                    engine.restore(state)
                for batch in part:
                    rows = folded(rows, batch[1], keyed=keyed)
                    given = tables(batch)
                    engine.prepare(**given)
                    engine.discard()
                    said = engine.process(**given)
                    DUCKDB.register("l", given["left"])
                    DUCKDB.register("r", tables(([], [("", *row) for row in rows]))["right"].drop_columns(["op"]))
                    assert set(said["row_kind"].to_pylist()) <= {"+I"}
                    found = Counter(map(repr, zip(*said.drop_columns(["row_kind"]).to_pydict().values(), strict=True)))
                    assert found == Counter(map(repr, DUCKDB.sql(sql).fetchall()))
                    assert said["n"].to_pylist() == sorted(said["n"].to_pylist())
                    assert engine.snapshot()["left"].num_rows == 0
                state = engine.snapshot()


@only_on("cpu-tiny", "gpu", "gpu-tiny", *EMULATED)
def test_same_as_the_cpu(engines: Backend) -> None:
    batches = [tables(batch) for batch in trace(7, 12, keyed=False)]
    alike(run(engines, described(), batches), run(CPU, described(), batches))


def test_left_rows_are_not_kept() -> None:
    with CPU.engine(described()) as engine:
        rows = {"n": pa.array(range(10_000)), "k": pa.array([1.0] * 10_000)}
        for _ in range(5):
            assert engine.process(left=pa.table(rows)).num_rows == 10_000
        assert len(engine._operator.tables[0]) <= 10_000


def test_what_cannot_be() -> None:
    assert from_json(described("inner").to_json()) == described("inner")
    with pytest.raises(DescriptionError, match="how='full'; a lookup join is one of inner, left"):
        described("full")
    left, right = Input("l", LEFT), Input("r", RIGHT)
    with pytest.raises(DescriptionError, match="a lookup join needs on="):
        LookupJoin("left", left, right)
    with pytest.raises(
        DescriptionError, match="input 'l': the left input of a lookup join is insert-only and not kept"
    ):
        LookupJoin("left", Input("l", LEFT, unique_key=("n",)), right, (Key("k", "k"),))
    taken = LookupJoin("left", Input("l", LEFT, row_kind="op"), right, (Key("k", "k"),), suffixes=("", "_r"))
    with CPU.engine(taken) as engine, pytest.raises(BadInputError, match="input 'l', column 'op': this input"):
        engine.process(left=pa.table({"op": ["-D"], "n": [1], "k": [1.0]}))
