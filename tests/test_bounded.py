"""Aggregates and co-groups: against DuckDB, in parts and whole, with retractions; and what is refused."""

from __future__ import annotations

import decimal
import math
from collections import Counter
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from oracle.drive import Backend, changes

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.description import Description, OperatorAttributes
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import CoGroup, Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.errors import DescriptionError
from gpu_ops.join_engine import JoinEngine

SCHEMA = pa.schema(
    [
        ("g", pa.string()),
        ("f", pa.float64()),
        ("i", pa.int32()),
        ("d", pa.decimal128(12, 2)),
        ("t", pa.timestamp("us")),
        ("b", pa.bool_()),
    ]
)


def some_rows(rng: np.random.Generator, count: int) -> pa.Table:
    def column(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array([values[n] for n in rng.integers(0, len(values), count)], kind)

    return pa.table(
        [
            column(["a", "b", "", None], pa.string()),
            column([0.0, -0.0, math.nan, 1.5, -2.5, None], pa.float64()),
            column([1, 2, 3, 2**31 - 1, None], pa.int32()),
            column([decimal.Decimal("1.10"), decimal.Decimal("-7.25"), None], pa.decimal128(12, 2)),
            column([1, 2_000_000, None], pa.timestamp("us")),
            column([True, False, None], pa.bool_()),
        ],
        schema=SCHEMA,
    )


CALLS = {
    "rows": "count(*)", "n": "count(i)", "sum_i": "sum(i)", "avg_i": "avg(i)", "min_i": "min(i)", "max_i": "max(i)",
    "sum_d": "sum(d)", "min_d": "min(d)", "max_t": "max(t)", "max_b": "max(b)", "different": "count(DISTINCT f)",
    "min_f": "min(f)", "max_f": "max(f)", "min_g": "min(g)", "sum_f": "sum(f)",
}  # fmt: skip


@pytest.mark.parametrize("by", [("g",), ("f",), ("g", "i"), ("b", "t"), ()], ids="-".join)
def test_aggregates(by: tuple[str, ...], backend: Backend) -> None:
    """As DuckDB has them; zero is one value, and what was retracted is gone."""
    calls = {name: call for name, call in CALLS.items() if name != "min_g" or "g" not in by}
    described = Aggregate.of(Input("t", SCHEMA, row_kind="row_kind"), by, calls)
    rng = np.random.default_rng(len(by))
    live: list[pa.Table] = []
    with backend.engine(described) as engine:
        for _ in range(4):
            rows = some_rows(rng, 150)
            engine.process(rows.append_column("row_kind", pa.array(["+I"] * 150)))
            gone = rows.slice(0, 40)
            engine.process(gone.append_column("row_kind", pa.array(["-D"] * 40)))
            live.append(rows.slice(40))
        found = engine.finish()
    table = pa.concat_tables(live)
    zero = pa.scalar(0.0)
    table = table.set_column(1, "f", pc.if_else(pc.equal(table["f"], zero), zero, table["f"]))
    duckdb.register("__t", table)
    listed = ", ".join([*by, *(f"{call} AS {name}" for name, call in calls.items())])
    want = duckdb.sql(f"SELECT {listed} FROM __t {'GROUP BY ALL' if by else ''}").to_arrow_table()
    want = want.cast(pa.schema(list(described.output_schema)[1:]))
    assert found.schema == described.output_schema
    assert found.num_rows == (want.num_rows if by else 1)
    assert Counter(map(_shown, found.drop_columns(["row_kind"]).to_pylist())) == Counter(map(_shown, want.to_pylist()))


def _shown(row: dict[str, Any]) -> str:
    return str({k: round(float(v), 6) if isinstance(v, (int, float)) else v for k, v in row.items()})


def test_an_aggregate_without_groups_has_one_row_of_nothing() -> None:
    described = Aggregate.of(Input("t", SCHEMA), (), {"n": "count(*)", "s": ("sum", "i")})
    engine = JoinEngine(described, "cpu")
    assert changes(engine.finish()) == [("+I", (0, None))]
    grouped = JoinEngine(Aggregate.of(Input("t", SCHEMA), ("g",), {"n": "count(*)"}), "cpu")
    assert changes(grouped.finish()) == []


def test_an_upsert_counts_once() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("x", pa.int64())])
    described = Aggregate.of(Input("t", schema, unique_key=("id",)), ("id",), {"s": "sum(x)"})
    engine = JoinEngine(described, "cpu")
    for value in (1, 5, 3):
        engine.process(pa.table({"id": [7], "x": [value]}, schema=schema))
    assert changes(engine.finish()) == [("+I", (7, 3))]


@pytest.mark.parametrize("null_safe", [False, True])
def test_a_co_group_has_whole_keys_in_order(null_safe: bool, backend: Backend) -> None:
    right = pa.schema([("key", pa.int64()), ("y", pa.int64())])
    left = pa.schema([("key", pa.int32()), ("x", pa.int64())])
    described = CoGroup(
        Input("l", left, row_kind="row_kind"), Input("r", right), (Key("key", "key", null_safe=null_safe),)
    )
    rng = np.random.default_rng(2)
    given: tuple[list[tuple[Any, int]], list[tuple[Any, int]]] = ([], [])
    with backend.engine(described) as engine:
        for turn in range(5):
            keys = [[None if rng.random() < 0.1 else int(k) for k in rng.integers(0, 12, 30)] for _ in (0, 1)]
            values = [list(range(30 * turn, 30 * turn + 30)) for _ in (0, 1)]
            tables = [
                pa.table([pa.array(k, s.field(0).type), v], schema=s)
                for k, v, s in zip(keys, values, (left, right), strict=True)
            ]
            plain = tables[0].append_column("row_kind", pa.array(["+I"] * 30))
            engine.process(plain, tables[1])
            engine.process(tables[0].slice(0, 10).append_column("row_kind", pa.array(["-D"] * 10)), None)
            given[0].extend(zip(keys[0][10:], values[0][10:], strict=True))
            given[1].extend(zip(keys[1], values[1], strict=True))
        parts = [described.split(part) for part in engine.finish_parts()]
    seen: set[Any] = set()
    found: tuple[list[Any], list[Any]] = ([], [])
    for pair in parts:
        here: set[Any] = set()
        for side, table in enumerate(pair):
            assert table.schema == (left, right)[side]
            rows = [tuple(r.values()) for r in table.to_pylist()]
            known = [k for k, _ in rows if k is not None]
            assert known == sorted(known)
            for key in set(known):  # equal keys stay in the order they came
                order = [v for k, v in rows if k == key]
                assert order == sorted(order)
            here |= {k for k, _ in rows}
            found[side].extend(rows)
        assert not here & seen
        seen |= here
    for side in (0, 1):
        assert Counter(found[side]) == Counter(r for r in given[side] if null_safe or r[0] is not None)


T = Input("t", SCHEMA)


@pytest.mark.parametrize(
    ("by", "calls", "says"),
    [
        (("nope",), {"n": "count(*)"}, "by names 'nope'"),
        ((), {}, "at least one of "),
        (("g",), {"n": "count(nope)"}, "n names 'nope'"),
        (("g",), {"n": "median(i)"}, "no aggregate 'median'"),
        (("g",), {"n": "sum(*)"}, "only count takes"),
        (("g",), {"n": "sum(g)"}, "cannot be added up"),
        (("g",), {"n": "sum(i) filter (where i > 0)"}, "FILTER is a matter of"),
        (("g",), {"n": "sum(distinct i)"}, "DISTINCT goes with count"),
        (("g",), {"n": "i + 1"}, "is no aggregate"),
        (("g",), {"g": "count(*)"}, "two columns 'g'"),
        (("g",), {"row_kind": "count(*)"}, "two columns 'row_kind'"),
        (("g",), {"n": "sum(t)"}, "cannot be added up"),
    ],
)
def test_aggregates_that_cannot_be(by: tuple[str, ...], calls: dict[str, str], says: str) -> None:
    with pytest.raises(DescriptionError, match=says.replace("(", r"\(").replace("*", r"\*")):
        Aggregate.of(T, by, calls)


def test_co_groups_that_cannot_be() -> None:
    with pytest.raises(DescriptionError, match="needs the columns"):
        CoGroup(Input("l", SCHEMA), Input("r", SCHEMA), ())
    with pytest.raises(DescriptionError, match="cannot compare key"):
        CoGroup(Input("l", SCHEMA), Input("r", SCHEMA), (Key("g", "i"),))


def test_descriptions_travel_as_json() -> None:
    aggregate = Aggregate.of(T, ("g",), CALLS | {"min_g": "count(g)"})
    group = CoGroup(Input("l", SCHEMA), Input("r", SCHEMA), (Key("g", "g", null_safe=True), Key("i", "i")))
    join = Join("left", Input("l", SCHEMA), Input("r", SCHEMA), (Key("g", "g"),), emit="at_end", suffixes=("", "_r"))
    for described in (aggregate, group, join):
        assert from_json(described.to_json()) == described


def test_operator_attributes() -> None:
    """Flink's two, and whether a backlog can come first."""
    left, right = Input("l", pa.schema([("k", pa.int64())])), Input("r", pa.schema([("k2", pa.int64())]))
    key = (Key("k", "k2"),)

    def of(join: Description) -> tuple[bool, bool, bool]:
        found = join.attributes
        return (
            found.output_only_after_end_of_stream,
            found.internal_sorter_supported,
            found.switches_from_backlog,
        )

    assert of(Join("left", left, right, key)) == (False, False, True)
    assert of(Join("left", left, right, key, emit="at_end")) == (True, True, False)
    assert of(MultiJoin.of([left, right], [("k", "k2")], emit="at_end")) == (True, False, False)
    assert of(MultiJoin.of([left, right], [("k", "k2")])) == (False, False, True)
    assert of(CoGroup(left, right, key)) == (True, True, False)
    assert of(Aggregate.of(left, ("k",), {"n": "count(*)"})) == (True, False, False)


def test_operator_attributes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(DescriptionError, match="sorts its input itself only if"):
        OperatorAttributes(internal_sorter_supported=True)
    with pytest.raises(DescriptionError, match="does not go on live"):
        OperatorAttributes(output_only_after_end_of_stream=True, switches_from_backlog=True)
