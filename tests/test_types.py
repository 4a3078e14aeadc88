"""Every type that Arrow and Spark SQL share, as key and as payload, goes through unharmed."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import Backend

from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.join_engine import JoinEngine

BIG = Decimal("12345678901234567890123456789012345678")
UTC = dt.UTC

# Distinct values of each type, the awkward ones: extremes, what a double cannot hold, what pandas cannot.
SCALARS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, 127, 0]),
    "int16": (pa.int16(), [-(2**15), 2**15 - 1, 0]),
    "int32": (pa.int32(), [-(2**31), 2**31 - 1, 16_777_217]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1, 2**53 + 1, 2**53]),
    "float32": (pa.float32(), [1.5, -0.0, math.inf, math.nan, 2.0**-149]),
    "float64": (pa.float64(), [1.5, -0.0, -math.inf, math.nan, 5e-324, 1.7976931348623157e308]),
    "decimal": (pa.decimal128(10, 2), [Decimal("0.00"), Decimal("-99999999.99"), Decimal("0.01")]),
    "decimal38": (pa.decimal128(38, 0), [BIG, -BIG, BIG + 1]),
    "decimal38_10": (pa.decimal128(38, 10), [BIG.scaleb(-10), Decimal("0E-10"), Decimal("1.0000000001")]),
    "string": (pa.string(), ["", "a", "ä€😀", "a\x00b", "nan", "None", "x" * 5000]),
    "large_string": (pa.large_string(), ["", "a", "b"]),
    "binary": (pa.binary(), [b"", b"\x00", b"\xff\xfe", b"a"]),
    "boolean": (pa.bool_(), [True, False]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(9999, 12, 31)]),
    "timestamp": (
        pa.timestamp("us"),
        [dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), dt.datetime(9999, 12, 31)],
    ),
    "timestamp_ms": (pa.timestamp("ms"), [dt.datetime(1600, 1, 1), dt.datetime(2300, 1, 1, 0, 0, 0, 1000)]),
    "timestamp_s": (pa.timestamp("s"), [dt.datetime(1600, 1, 1), dt.datetime(9999, 1, 1)]),
    "timestamp_tz": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(2026, 10, 25, 0, 30, tzinfo=UTC)],
    ),
    "timestamp_zone": (
        pa.timestamp("us", "Europe/Berlin"),
        [dt.datetime(2026, 10, 25, 0, 30, tzinfo=UTC), dt.datetime(2026, 3, 29, 1, tzinfo=UTC)],
    ),
}
NESTED: dict[str, tuple[pa.DataType, list[Any]]] = {
    "array": (pa.list_(pa.int32()), [[], [None], [1, 2], [2**31 - 1]]),
    "array_of_string": (pa.list_(pa.string()), [[], ["", None], ["a,b"], ["a", "b"]]),
    "array_of_double": (pa.list_(pa.float64()), [[math.nan], [None], [0.5], []]),
    "map": (pa.map_(pa.string(), pa.int64()), [[], [("a", None)], [("a", 2**53 + 1), ("b", 2)]]),
    "struct": (
        pa.struct([("x", pa.int64()), ("y", pa.string())]),
        [{"x": 2**53 + 1, "y": None}, {"x": None, "y": None}, {"x": None, "y": ""}],
    ),
    "deep": (
        pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.decimal128(38, 2)))), ("d", pa.date32())])),
        [
            [],
            [None],
            [{"m": [("k", [Decimal("1.10"), None])], "d": None}],
            [{"m": None, "d": dt.date(1, 1, 1)}],
        ],
    ),
}
TYPES = {**SCALARS, **NESTED}


def shown(value: Any) -> Any:
    """A value for comparison: NaN equals NaN, and -0.0 is not 0.0."""
    return repr(value)


def table(**columns: tuple[pa.DataType, list[Any]]) -> pa.Table:
    return pa.table({name: pa.array(values, kind) for name, (kind, values) in columns.items()})


def rows(changelog: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(map(shown, row.values())) for row in changelog.to_pylist()]


def restarted(engine: Any, fresh: Any) -> Any:
    state = engine.snapshot()
    fresh.restore(state)
    for side in ("left", "right"):
        assert fresh.snapshot()[side].schema == state[side].schema
    return fresh


def payload_join(how: Any, kind: pa.DataType) -> Join:
    """Joined on k; both sides carry a payload of the type."""
    return Join(
        how,
        Input("A", pa.schema([("k", pa.int64()), ("a", kind)]), row_kind="op"),
        Input("B", pa.schema([("r", pa.int64()), ("b", kind)]), row_kind="op"),
        (Key("k", "r"),),
        emit="per_event",
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("how", ["left", "full"])
def test_as_payload(how: str, name: str, backend: Backend) -> None:
    """In pads, joined rows and retractions, over a restart; the schema stays the declared one."""
    kind, some = TYPES[name]
    values = [*some, None]
    keys = list(range(len(values)))
    join = payload_join(how, kind)
    column = [shown(v) for v in pa.array(values, kind).to_pylist()]
    with backend.engine(join) as first, backend.engine(join) as second:
        lefts = table(k=(pa.int64(), keys), a=(kind, values), op=(pa.string(), ["+I"] * len(keys)))
        rights = table(r=(pa.int64(), keys), b=(kind, values), op=(pa.string(), ["+I"] * len(keys)))
        out = first.process(left=lefts)
        assert out.schema.field("a").type == kind
        assert out.schema.field("b").type == kind
        assert rows(out) == [("'+I'", repr(k), v, "None", "None") for k, v in zip(keys, column, strict=True)]
        engine = restarted(first, second)
        out = engine.process(right=rights)
        expected = []
        for k, v in zip(keys, column, strict=True):
            expected += [("'-D'", repr(k), v, "None", "None"), ("'+I'", repr(k), v, repr(k), v)]
        assert rows(out) == expected
        # Each row is found again by value, nulls and NaN included, whatever its type.
        gone = rights.set_column(2, "op", pa.array(["-D"] * len(keys)))
        batch = engine.prepare(right=gone)
        engine.commit()
        assert batch.metrics["right_unknown_retractions"] == 0
        expected = []
        for k, v in zip(keys, column, strict=True):
            expected += [("'-D'", repr(k), v, repr(k), v), ("'+I'", repr(k), v, "None", "None")]
        assert rows(batch.changelog) == expected
        assert engine.state_size()["right_rows"] == 0


@pytest.mark.parametrize("name", TYPES)
def test_values_are_told_apart(name: str, backend: Backend) -> None:
    """A retraction takes the row that equals it in every column, and no other."""
    kind, some = TYPES[name]
    values = [*some, None]
    join = payload_join("inner", kind)
    with backend.engine(join) as engine:
        # One key for all, so that only the payload tells them apart; two copies of each.
        engine.process(
            left=table(
                k=(pa.int64(), [1] * len(values) * 2),
                a=(kind, values * 2),
                op=(pa.string(), ["+I"] * len(values) * 2),
            )
        )
        for value in values:
            batch = engine.prepare(left=table(k=(pa.int64(), [1]), a=(kind, [value]), op=(pa.string(), ["-D"])))
            engine.commit()
            assert batch.metrics["left_unknown_retractions"] == 0
        left = [shown(v) for v in engine.snapshot()["left"]["a"].to_pylist()]
        assert sorted(left) == sorted(shown(v) for v in pa.array(values, kind).to_pylist())


@pytest.mark.parametrize("null_safe", [False, True], ids=["equals", "null_safe"])
@pytest.mark.parametrize("name", SCALARS)
def test_as_key(name: str, null_safe: bool, backend: Backend) -> None:
    """Equal keys meet and no others; null meets null only where asked; NaN meets NaN; over a restart."""
    kind, some = SCALARS[name]
    values = [*some, None]
    join = Join(
        "full",
        Input("A", pa.schema([("k", kind), ("a", pa.int64())]), row_kind="op"),
        Input("B", pa.schema([("r", kind), ("b", pa.int64())]), row_kind="op"),
        (Key("k", "r", null_safe=null_safe),),
        emit="per_batch",
    )
    number = list(range(len(values)))
    plus, minus = (pa.string(), ["+I"] * len(values)), (pa.string(), ["-D"] * len(values))
    with backend.engine(join) as first, backend.engine(join) as second:
        out = first.process(left=table(k=(kind, values), a=(pa.int64(), number), op=plus))
        assert out.num_rows == len(values)
        engine = restarted(first, second)
        folded: dict[tuple[Any, ...], int] = {}
        rights = table(r=(kind, values[::-1]), b=(pa.int64(), number[::-1]), op=plus)
        for changelog in (out, engine.process(right=rights)):
            for kind_of, *row in rows(changelog):
                folded[tuple(row)] = folded.get(tuple(row), 0) + (1 if kind_of == "'+I'" else -1)
        column = [shown(v) for v in pa.array(values, kind).to_pylist()]
        expected = {}
        for n, v in zip(number, column, strict=True):
            if v == "None" and not null_safe:
                expected[v, repr(n), "None", "None"] = expected["None", "None", v, repr(n)] = 1
            else:
                expected[v, repr(n), v, repr(n)] = 1
        assert {r: c for r, c in folded.items() if c} == expected
        engine.process(left=table(k=(kind, values), a=(pa.int64(), number), op=minus))
        assert engine.state_size()["left_rows"] == 0


@pytest.mark.parametrize("name", SCALARS)
def test_as_unique_key(name: str, backend: Backend) -> None:
    """An upsert finds the row of its key, NaN and -0.0 included."""
    kind, values = SCALARS[name]
    join = Join(
        "left",
        Input("A", pa.schema([("k", kind), ("a", pa.int64())]), unique_key=("k",), row_kind="op"),
        Input("B", pa.schema([("r", kind), ("b", pa.int64())]), unique_key=("r",), row_kind="op"),
        (Key("k", "r"),),
    )
    with backend.engine(join) as engine:
        for version in range(2):
            number = [10 * version + i for i in range(len(values))]
            column = table(k=(kind, values), a=(pa.int64(), number), op=(pa.string(), ["+U"] * len(values)))
            out = engine.process(left=column)
            assert out.num_rows == len(values) * (version + 1)
        assert engine.state_size()["left_rows"] == len(values)
        assert sorted(engine.snapshot()["left"]["a"].to_pylist()) == number


# Two types, values of both, the type they are compared in, and a value that only the right type holds.
WIDTHS: dict[str, tuple[pa.DataType, pa.DataType, list[Any], pa.DataType, Any]] = {
    "int8-int64": (pa.int8(), pa.int64(), [-128, 0, 127], pa.int64(), 2**62 + 1),
    "int32-int64": (pa.int32(), pa.int64(), [-(2**31), 5], pa.int64(), 2**53 + 1),
    "int64-int16": (pa.int64(), pa.int16(), [-(2**15), 5], pa.int64(), 77),
    "float32-float64": (
        pa.float32(),
        pa.float64(),
        [0.5, math.nan, -0.0, 2.0**-149],
        pa.float64(),
        0.1,
    ),
    "decimals": (
        pa.decimal128(10, 2),
        pa.decimal128(20, 5),
        [Decimal("1.10"), Decimal("-0.01")],
        pa.decimal128(20, 5),
        Decimal("123456789012345.00001"),
    ),
    "crossing decimals": (
        pa.decimal128(10, 0),
        pa.decimal128(10, 9),
        [Decimal(1), Decimal(-3)],
        pa.decimal128(19, 9),
        Decimal("0.000000001"),
    ),
    "strings": (pa.string(), pa.large_string(), ["", "ä"], pa.string(), "only"),
    "bytes": (pa.large_binary(), pa.binary(), [b"", b"a"], pa.large_binary(), b"only"),
    "timestamps": (
        pa.timestamp("ms"),
        pa.timestamp("us"),
        [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 1, 2, 3, 4000)],
        pa.timestamp("us"),
        dt.datetime(2000, 1, 1, 0, 0, 0, 1),
    ),
    "timestamps with zone": (
        pa.timestamp("s", "UTC"),
        pa.timestamp("us", "UTC"),
        [dt.datetime(2026, 1, 1, tzinfo=UTC)],
        pa.timestamp("us", "UTC"),
        dt.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
@pytest.mark.parametrize("name", WIDTHS)
def test_keys_of_two_widths(name: str, how: Any, backend: Backend) -> None:
    """They are compared, and with ``on="k"`` come out, in the common type."""
    one, other, values, common, only = WIDTHS[name]
    join = Join(
        how,
        Input("A", pa.schema([("k", one), ("a", pa.int64())])),
        Input("B", pa.schema([("k", other), ("b", pa.int64())])),
        (Key("k", "k", using=True),),
    )
    numbers = list(range(len(values)))
    with backend.engine(join) as engine:
        out = engine.process(
            left=table(k=(one, values), a=(pa.int64(), numbers)),
            right=table(k=(other, [*values, only]), b=(pa.int64(), [*numbers, 99])),
        )
        assert out.schema.field("k").type == common
        expected = [
            ("'+I'", shown(v), repr(n), repr(n))
            for v, n in zip(pa.array(values, common).to_pylist(), numbers, strict=True)
        ]
        if how in ("right", "full"):
            expected.append(("'+I'", shown(pa.scalar(only, common).as_py()), "None", "99"))
        assert sorted(rows(out)) == sorted(expected)


def test_zero_has_no_sign_as_key_and_nan_is_not_null(backend: Backend) -> None:
    join = Join(
        "full",
        Input("A", pa.schema([("k", pa.float64()), ("a", pa.int64())])),
        Input("B", pa.schema([("r", pa.float64()), ("b", pa.int64())])),
        (Key("k", "r"),),
    )
    other_nan = -math.nan
    with backend.engine(join) as engine:
        out = engine.process(
            left=table(k=(pa.float64(), [0.0, math.nan, None]), a=(pa.int64(), [1, 2, 3])),
            right=table(r=(pa.float64(), [-0.0, other_nan, None]), b=(pa.int64(), [1, 2, 3])),
        )
    joined = sorted((r["a"], r["b"]) for r in out.to_pylist() if r["a"] and r["b"])
    assert joined == [(1, 1), (2, 2)]
    assert out.num_rows == 4
    pads = out.filter(pa.compute.is_null(out["b"]))
    assert pads["k"].null_count == 1


def test_no_integer_turns_float(backend: Backend) -> None:
    """A null beside it does not cost an int64 its last digits, in pads and in state."""
    join = payload_join("full", pa.int64())
    exact = 2**53 + 1
    with backend.engine(join) as first, backend.engine(join) as second:
        lefts = table(k=(pa.int64(), [exact, None]), a=(pa.int64(), [None, exact]), op=(pa.string(), ["+I"] * 2))
        out = first.process(left=lefts)
        assert out["k"].to_pylist() == [exact, None]
        assert out["a"].to_pylist() == [None, exact]
        assert out.schema.field("r").type == pa.int64()
        engine = restarted(first, second)
        out = engine.process(
            right=table(
                r=(pa.int64(), [exact, exact - 1]),
                b=(pa.int64(), [exact, None]),
                op=(pa.string(), ["+I"] * 2),
            )
        )
        assert sorted(rows(out)) == sorted(
            [
                ("'-D'", repr(exact), "None", "None", "None"),
                ("'+I'", repr(exact), "None", repr(exact), repr(exact)),
                ("'+I'", "None", "None", repr(exact - 1), "None"),
            ]
        )


@pytest.mark.parametrize("name", NESTED)
def test_nested_payload_beside_an_upsert(name: str, backend: Backend) -> None:
    """``per_batch`` tells whether a nested value has changed."""
    kind, values = NESTED[name]
    join = Join(
        "left",
        Input("A", pa.schema([("k", pa.int64()), ("a", kind)]), unique_key=("k",), row_kind="op"),
        Input("B", pa.schema([("r", pa.int64()), ("b", kind)]), unique_key=("r",), row_kind="op"),
        (Key("k", "r"),),
    )

    def write(value: Any) -> pa.Table:
        return table(k=(pa.int64(), [1]), a=(kind, [value]), op=(pa.string(), ["+U"]))

    with backend.engine(join) as engine:
        assert engine.process(left=write(values[0])).num_rows == 1
        for before, after in itertools.pairwise(values):
            assert engine.process(left=write(before)).num_rows == 0
            changed = engine.process(left=write(after))
            assert changed.num_rows == 2
            assert shown(changed["a"][1].as_py()) == shown(pa.scalar(after, kind).as_py())


def test_equal_rows_take_a_place_each(backend: Backend) -> None:
    """As docs/semantics.md says: what equal rows cost is their number; a retraction takes one of them."""
    source = Input("A", pa.schema([("k", pa.int64())]), row_kind="op")
    join = Join("inner", source, Input("B", pa.schema([("r", pa.int64())])), (Key("k", "r"),))

    def changes(kind: str, count: int) -> pa.Table:
        return table(k=(pa.int64(), [7] * count), op=(pa.string(), [kind] * count))

    with backend.engine(join) as engine:
        engine.process(left=changes("+I", 1))
        one = engine.state_size()
        engine.process(left=changes("+I", 1000))
        many = engine.state_size()
        assert (one["left_rows"], many["left_rows"]) == (1, 1001)
        assert many["left_bytes"] >= 1001 * 8
        engine.process(left=changes("-D", 3))
        assert engine.state_size()["left_rows"] == 998
        assert engine.process(right=table(r=(pa.int64(), [7]))).num_rows == 998


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.large_string(), pa.binary()])
def test_large_text_within_lists_and_structs(kind: pa.DataType) -> None:
    """Offsets of 64 bits at any depth: they were kept as 32 within a list, and read as something else."""
    value = b"abc" if "binary" in str(kind) else "abc"
    nested = pa.list_(pa.struct([("t", kind)]))
    left = Input("l", pa.schema([("k", pa.int64()), ("v", nested)]))
    join = Join("left", left, Input("r", pa.schema([("q", pa.int64())])), (Key("k", "q"),))
    engine = JoinEngine(join, "cpu")
    rows = [[{"t": value}, {"t": None}], None, [], [{"t": value[:1]}]]
    found = [engine.process(left=pa.table({"k": [n], "v": pa.array([row], nested)})) for n, row in enumerate(rows)]
    again = JoinEngine(join, "cpu")
    again.restore(engine.snapshot())
    found.append(again.process(right=pa.table({"q": [3]})))
    assert [row for table in found for row in table["v"].to_pylist()] == [*rows, rows[3], rows[3]]
