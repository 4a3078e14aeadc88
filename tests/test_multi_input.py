"""Bad input of a multi-way join names its input, the column and a sample, and changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.errors import BadInputError, DescriptionError, StateError

USERS = Input("users", pa.schema([("id", pa.int64()), ("name", pa.string())]), ("id",), "op")
ORDERS = Input("orders", pa.schema([("oid", pa.int64()), ("user", pa.int64()), ("paid", pa.float64())]), ("oid",), "op")
VISITS = Input("visits", pa.schema([("visitor", pa.int64()), ("page", pa.string())]), None, "kind")
INPUTS = (USERS, ORDERS, VISITS)
GOOD: tuple[dict[str, Any], ...] = (
    {"id": [1, 2], "name": ["a", None], "op": ["+I", "+I"]},
    {"oid": [7, 8], "user": [1, None], "paid": [0.5, None], "op": ["+I", "+I"]},
    {"visitor": [1, 2], "page": ["p", "q"], "kind": ["+I", "+I"]},
)


def described(**options: Any) -> MultiJoin:
    inputs = [dataclasses.replace(i, **options) for i in INPUTS]
    return MultiJoin.of(inputs, [("id", "user"), ("users.id", "visitor")], "left", emit="per_event")


def rows(place: int, **columns: Any) -> pa.Table:
    """A good micro-batch of two rows of one input, with columns replaced, added, or (None) left out."""
    source = INPUTS[place]
    kinds = {f.name: f.type for f in source.schema} | {source.row_kind: pa.string()}
    told = {name: value for name, value in {**GOOD[place], **columns}.items() if value is not None}
    return pa.table({n: v if isinstance(v, pa.Array) else pa.array(v, kinds.get(n)) for n, v in told.items()})


def alone(place: int, **columns: Any) -> list[Any]:
    return [rows(p, **columns) if p == place else None for p in range(3)]


BAD: dict[str, tuple[Callable[[], tuple[list[Any], dict[str, Any]]], tuple[str, ...]]] = {
    "unknown row kind": (lambda: (alone(1, op=["+I", "+X"]), {}), ("orders", "op", "+X")),
    "null row kind": (lambda: (alone(2, kind=["+I", None]), {}), ("visits", "kind", "None")),
    "row kinds as numbers": (lambda: (alone(1, op=pa.array([0, 1])), {}), ("orders", "op", "int64")),
    "another input's row kind": (lambda: (alone(2, kind=None, op=["+I", "+I"]), {}), ("visits", "kind", "missing")),
    "null unique key": (lambda: (alone(1, oid=[7, None]), {}), ("orders", "oid", "unique key", "null")),
    "null unique key in a deletion": (lambda: (alone(1, oid=[None, 7], op=["-D", "-D"]), {}), ("orders", "oid")),
    "missing column": (lambda: (alone(1, user=None), {}), ("orders", "user", "missing", "oid")),
    "missing payload": (lambda: (alone(2, page=None), {}), ("visits", "page", "missing")),
    "extra column": (lambda: (alone(1, extra=[1, 2]), {}), ("orders", "extra", "not expected")),
    "wrong type": (
        lambda: (alone(1, user=pa.array(["1", "2"])), {}),
        ("orders", "user", "string", "int64", "'1'"),
    ),
    "wrong type of the last": (lambda: (alone(2, visitor=pa.array(["a", "b"])), {}), ("visits", "visitor", "string")),
    "parts of numbers": (lambda: (alone(2, visitor=pa.array([0.5, 1.5])), {}), ("visits", "visitor", "truncated")),
    "another input's rows": (lambda: ([None, rows(2), None], {}), ("orders", "oid", "missing")),
    "no table": (lambda: ([None, {"oid": [1]}, None], {}), ("orders", "Arrow", "dict")),
    "good ones and one bad": (
        lambda: ([rows(0, op=["-D", "-D"]), rows(1), rows(2, kind=["?", "+I"])], {}),
        ("visits", "kind", "?"),
    ),
    "order too short": (
        lambda: ([rows(0), rows(1), None], {"orders": [np.arange(2), np.arange(1), np.arange(0)]}),
        ("orders", "order", "1", "2"),
    ),
    "order without rows": (
        lambda: ([rows(0), None, None], {"orders": [[0, 1], [2], np.arange(0)]}),
        ("orders", "order", "1", "0"),
    ),
    "order in fractions": (
        lambda: ([None, None, rows(2)], {"orders": [np.arange(0), np.arange(0), [0.5, 1.5]]}),
        ("visits", "order", "integer"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_micro_batch(name: str, backend: Backend) -> None:
    """Its error, the state as it was, and the next micro-batch as if nothing had been."""
    make, parts = BAD[name]
    first, then = [rows(p) for p in range(3)], [None, rows(1, op=["+U", "-D"]), rows(2, kind=["-D", "+I"])]
    with backend.engine(described()) as engine, backend.engine(described()) as untroubled:
        assert engine.process(*first).equals(untroubled.process(*first))
        before = engine.snapshot()
        tables, options = make()
        with pytest.raises(BadInputError) as error:
            engine.process(*tables, **options)
        for part in parts:
            assert part in str(error.value), f"{part!r} is not in: {error.value}"
        assert error.value.input_name == parts[0]
        for side, table in engine.snapshot().items():
            assert table.equals(before[side])
        assert engine.state_size() == untroubled.state_size()
        assert engine.process(*then).equals(untroubled.process(*then))


def test_arguments_that_do_not_fit() -> None:
    """The number of inputs and of orders; left= and right= are another join's."""
    with Backend("cpu").engine(described()) as engine:
        for tables, options, message in (
            ([rows(0), rows(1)], {}, "the join has 3 inputs, 2 were given"),
            ([rows(0), rows(1), None, None], {}, "the join has 3 inputs, 4 were given"),
            ([rows(0), None, None], {"orders": [[0, 1]]}, "orders= has 1 entries for 3 inputs"),
            ([], {"left": rows(0)}, "left= and right= are for a join of two inputs"),
            ([None] * 3, {"watermark": 5}, "in joins by time only"),
        ):
            with pytest.raises(DescriptionError) as error:
                engine.process(*tables, **options)
            assert message in str(error.value)
        assert engine.process().num_rows == 0
        assert engine.process(*(rows(p) for p in range(3))).num_rows > 0


def test_good_but_unusual(backend: Backend) -> None:
    """No error: no input, no rows, chunks, another column order, a record batch, a repeated +I (an upsert)."""
    with backend.engine(described()) as engine:
        assert engine.process(None, None, None).num_rows == 0
        assert engine.process(*(rows(p).slice(0, 0) for p in range(3))).num_rows == 0
        assert engine.process(pa.concat_tables([rows(0).slice(0, 1), rows(0).slice(1, 1)]), None, None).num_rows == 2
        assert engine.process(None, rows(1).select(["op", "paid", "oid", "user"]), None).num_rows == 2
        assert engine.process(None, rows(1).to_batches()[0], None)["row_kind"].to_pylist() == ["-U", "+U"]
        assert engine.state_size()["orders_rows"] == 2
        assert engine.process(None, None, rows(2)).num_rows == 4


def test_out_of_turn(backend: Backend) -> None:
    with backend.engine(described()) as engine:
        with pytest.raises(StateError, match="prepared"):
            engine.commit()
        engine.prepare(rows(0), None, None)
        with pytest.raises(StateError, match="neither committed nor discarded"):
            engine.prepare(rows(0), None, None)
        engine.commit()
        with pytest.raises(StateError, match="fresh"):
            engine.restore(engine.snapshot())


@pytest.mark.parametrize("how", ["drop", "tag"])
def test_bad_rows_may_go(how: Any, backend: Backend) -> None:
    """Tagged rows come out after the changelog, padded."""
    with backend.engine(described(bad_rows=how)) as engine:
        batch = engine.prepare(rows(0, id=[1, None]), rows(1, op=["+I", "?"]), rows(2, kind=["?", "+I"]))
        engine.commit()
        assert [batch.metrics[f"{i.name}_bad_rows"] for i in INPUTS] == [1, 1, 1]
        assert [batch.metrics[f"{i.name}_rows_in"] for i in INPUTS] == [2, 2, 2]
        told = [tuple(row.values()) for row in batch.changelog.to_pylist()]
        bad = [
            ("bad", None, None, None, None, None, None, None),
            ("bad", None, None, 8, None, None, None, None),
            ("bad", None, None, None, None, None, 1, "p"),
        ]
        assert [row for row in told if row[0] == "bad"] == (bad if how == "tag" else [])
        assert len(batch.sequence) == len(told)
        assert engine.state_size()["users_rows"] == 1


def test_changes_are_ordered_by_a_column(backend: Backend) -> None:
    """``sequence_by`` of one input orders its own changes; of all, all of them."""
    late_first = rows(2, visitor=[1, 1], page=["q", "p"], kind=["-D", "+I"])
    join = described()
    by_page = (*join.inputs[:2], dataclasses.replace(VISITS, sequence_by="page"))
    with backend.engine(dataclasses.replace(join, inputs=by_page)) as engine:
        engine.process(rows(0), None, None)
        batch = engine.prepare(None, None, late_first)
        assert batch.metrics["visits_unknown_retractions"] == 1
        assert [r["row_kind"] for r in batch.changelog.to_pylist()] == ["-D", "+I"]
        engine.discard()
    schema = pa.schema([("k", pa.int64()), ("at", pa.int64())])
    inputs = [Input(n, schema, row_kind="op", sequence_by="at") for n in "abc"]
    join = MultiJoin.of(inputs, "k", "left", suffixes=["_a", "_b", "_c"], emit="per_event")
    with backend.engine(join) as engine:
        tables = [pa.table({"k": [1], "at": [at], "op": ["+I"]}) for at in (20, 30, 10)]
        said = engine.process(*tables).to_pylist()
        assert [(r["row_kind"], r["at_b"]) for r in said] == [("+I", None), ("-D", None), ("+I", 30)]
        assert {r["at_c"] for r in said} == {10}
