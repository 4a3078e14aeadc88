"""Conditions: every operation of `gpu_ops.conditions.expressions` on the GPU gives what it gives on the CPU, row for row.

The CPU's answers are held against Spark's elsewhere; here they are the reference.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cpu_fallback.conditions import evaluate
from gpu_ops.conditions import Condition, of_tree, parse
from gpu_ops.conditions.expressions import BOOL, ON_HOST, Call, ColumnRef, Literal, Op, column_type
from gpu_ops.errors import ConditionError, EvaluationError
from gpu_ops.kernels import Kernels
from kernels.support import everything, frame_of

pytestmark = pytest.mark.one_in(6)

_WORDS = ["", "a", "b", "ab", "a%", "a_b", "a\nb", "ä", "ÄÖ", "ß", "İ", "ΑΣ", "日本", "\\", "\U0001f600x"]


def table(side: str, rows: int, rng: np.random.Generator) -> pa.Table:
    """Columns of every type a condition can hold, special values and nulls among them."""

    def column(values: list[object], kind: pa.DataType) -> pa.Array:
        return pa.array([*values, None], kind).take(pa.array(rng.integers(0, len(values) + 1, rows)))

    def integers(bits: int) -> list[int]:
        top = (1 << (bits - 1)) - 1
        return [0, 1, -1, 2, -2, 7, -7, top, -top - 1, *rng.integers(-top, top, 20).tolist()]

    floats = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, -1.5, 3.0, -7.25, 1e30, 2147483647.0, -129.0]
    floats += [1.401298464324817e-45, -3e-42]  # subnormal as floats
    floats += rng.normal(0, 100, 10).tolist()
    cents = [
        Decimal(n) / 100
        for n in (0, 1, -1, 50, -50, 149, 150, -150, 99_999_999, *rng.integers(-(10**8), 10**8, 10).tolist())
    ]
    wide = [
        Decimal(n).scaleb(-10)
        for n in (0, 5, -5, 10**28, -(10**28), 10**27 + 1, *rng.integers(-(10**18), 10**18, 20).tolist())
    ]
    days = [0, -1, 1, 58, 59, 10_956, -719_162, 2_932_896, 19_782, *rng.integers(-100_000, 100_000, 20).tolist()]
    micros = [day * 86_400_000_000 + int(rng.integers(0, 86_400_000_000)) for day in days]
    data = {
        **{f"i{b}": column(integers(b), getattr(pa, f"int{b}")()) for b in (8, 16, 32, 64)},
        "u8": column([0, 1, 255], pa.uint8()),
        "u64": column([0, 1, (1 << 64) - 1], pa.uint64()),
        "f": column(floats, pa.float32()),
        "d": column(floats, pa.float64()),
        "b": column([True, False], pa.bool_()),
        "c": column(cents, pa.decimal128(10, 2)),
        "w": column(wide, pa.decimal128(30, 10)),
        "s": column(_WORDS, pa.string()),
        "ls": column(_WORDS, pa.large_string()),
        "dict": column(_WORDS, pa.string()).dictionary_encode(),
        "x": column([b"", b"a", b"\xff", b"\0"], pa.binary()),
        "fx": column([b"ab", b"\xff\0"], pa.binary(2)),
        "day": column(days, pa.date32()),
        "d64": column([day * 86_400_000 for day in days], pa.date64()),
        "at": column(micros, pa.timestamp("us", "Europe/Berlin")),
        "utc": column([m // 1_000_000 for m in micros], pa.timestamp("s", "UTC")),
        "ntz": column(micros, pa.timestamp("us")),
        "ns": column(
            [0, 1, -1, 999, -999, (1 << 62), *rng.integers(-(1 << 60), 1 << 60, 9).tolist()], pa.timestamp("ns")
        ),
        "list": column([[], [1]], pa.list_(pa.int32())),
        "none": pa.nulls(rows),
    }
    return pa.table({f"{side}_{name}": array for name, array in data.items()})  # fmt: skip


_COMPARED = ["i8", "i32", "i64", "f", "d", "b", "c", "w", "s", "x", "day", "at", "ntz", "ns"]
_PAIRS = [("i8", "i64"), ("u8", "i16"), ("u64", "i64"), ("i32", "d"), ("f", "d"), ("i64", "c"), ("c", "w"), ("s", "ls"), ("s", "dict"), ("x", "fx"), ("day", "d64"), ("at", "utc"), ("ntz", "ns"), ("i8", "f"), ("none", "s"), ("none", "w")]  # fmt: skip
SQL = [
    *(f"l_{c} {op} r_{c}" for c in _COMPARED for op in ("=", "<", "<=", "<=>", "<>", ">=")),
    *(f"l_{a} {op} r_{b}" for a, b in _PAIRS for op in ("=", "<", ">=", "<=>")),
    *(f"l_{c} IS NULL" for c in (*_COMPARED, "list", "none")),
    *(f"l_{c} IS NOT NULL AND r_{c} IS NULL" for c in (*_COMPARED, "list", "none")),
    *(f"COALESCE(l_{c}, r_{c}) = r_{c}" for c in _COMPARED),
    *(f"CASE WHEN l_b THEN l_{c} WHEN r_b THEN r_{c} END <=> r_{c}" for c in _COMPARED),
    *(f"CASE WHEN l_i8 = 1 THEN 'one' WHEN l_i8 = r_i8 THEN l_s ELSE r_s END {op} 'one'" for op in ("<", ">")),
    "l_b AND r_b", "l_b OR r_b", "NOT l_b", "NOT (l_b AND r_b) OR (l_s = r_s)", "l_b AND NULL", "l_b OR NULL", "l_none",
    "TRUE", "FALSE", "NULL", "1 = 1", "NULL IS NULL", "'a' < 'b'", "NOT (1 = 2 AND l_b)", "COALESCE('a', 'b') = 'a'",
    "l_i8 IN (1, 2, -7)", "l_i64 IN (1, NULL)", "l_d IN (0, 1.5, -7.25)", "l_s IN ('a', 'ä', '')", "l_c IN (0.5, 1.49)",
    "l_i8 NOT IN (1, 2)", "l_s NOT IN ('a', NULL)", "l_i8 IN (r_i8, 1)", "l_day IN (DATE '1970-01-01', DATE '9999-12-31')",
    "l_d IN (r_d, 1.5)",
    *(f"l_{a} {op} r_{a} {cmp} r_{b}" for a, b in (("i8", "i8"), ("i16", "i32"), ("i64", "i64"), ("f", "f"), ("d", "d"), ("c", "w"))
      for op in ("+", "-", "*") for cmp in ("<", "=")),
    "l_i32 / r_i8 < 1", "l_d / r_d < 1", "l_d / 0 IS NULL", "l_i64 / r_i64 = 1",
    *(f"l_{c} % r_{c} {op} 1" for c in ("i8", "i32", "i64", "f", "d") for op in ("<", "=")),
    *(f"l_{c} % 0 IS NULL" for c in ("i8", "d")), "l_i8 % -1 = 0", "l_i64 % -1 = 0", "5 % 3 = l_i8",
    *(f"-l_{c} < r_{c}" for c in ("i8", "i64", "f", "d", "c", "w")),
    "l_w - r_w < 0.5", "l_w + r_w > 0", "l_c * r_c > 1.5", "l_c * 3 = r_c", "l_i8 + l_c > r_w", "-l_i64 = l_i64",
    *(f"CAST(l_{a} AS {b}) = r_{c}" for a, b, c in (
        ("i8", "SMALLINT", "i16"), ("i16", "INT", "i32"), ("i8", "BIGINT", "i64"), ("i64", "DOUBLE", "d"), ("f", "DOUBLE", "d"), ("i8", "DOUBLE", "d"), ("none", "INT", "i32"))),
    "CAST(l_i64 AS DOUBLE) < CAST(r_i64 AS DOUBLE) / 3", "CAST(1.5 AS DOUBLE) > l_d",
    "l_ntz < TIMESTAMP_NTZ '2000-01-01 00:00:00'", "l_at < TIMESTAMP '2000-01-01 00:00:00Z'", "l_ns < TIMESTAMP_NTZ '9999-01-01 00:00:00'", "l_utc >= r_at",
    "l_i8 BETWEEN r_i8 AND 7", "l_s BETWEEN 'a' AND 'b'", "l_i8 BETWEEN -1 AND 1 OR (l_s IS NULL AND r_d > 0)",
    "COALESCE(l_none, l_s, r_s) > 'a'", "CASE WHEN l_b THEN l_none ELSE r_i8 END = 1",
]  # fmt: skip


def _both(rows: int, seed: int) -> tuple[pa.Table, pa.Table]:
    rng = np.random.default_rng(seed)
    return table("l", rows, rng), table("r", rows, rng)


_TABLES = _both(900, 5)


def _parsed(sql: str) -> Condition:
    return parse(sql, {"left": _TABLES[0].schema, "right": _TABLES[1].schema})


def _condition(sql: str) -> Condition:
    try:
        return _parsed(sql)
    except ConditionError as error:
        pytest.fail(f"not SQL of the subset: {error}")


@pytest.mark.parametrize("sql", SQL)
def test_same_as_the_cpu(kernels: Kernels, sql: str) -> None:
    condition = _condition(sql)
    if kernels.name == "cpu":
        kernels_of_themselves(kernels, condition)
        return
    _compare(kernels, condition, *_TABLES)
    _compare(kernels, condition, _TABLES[0].slice(0, 1), _TABLES[1].slice(7, 1))
    _compare(kernels, condition, _TABLES[0].slice(0, 0), _TABLES[1].slice(0, 0))


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("i8", [1, 2, -7]), ("i64", [0]), ("c", [Decimal("0.50"), Decimal("1.49")]), ("s", ["a", "ä", "", "+I"]),
        ("ls", ["a"]), ("b", [True]), ("day", [0, 1]), ("at", [0, 1]), ("s", [chr(97 + n) for n in range(12)]),
    ],
)  # fmt: skip
def test_a_value_among_constants(kernels: Kernels, name: str, members: list[Any]) -> None:
    """As filters of rows have it (`gpu_ops.spark.plan.selection`); the text of a condition becomes comparisons."""
    type_ = column_type(_TABLES[0].schema.field(f"l_{name}").type)
    root = Call(Op.IN, (ColumnRef("left", f"l_{name}", type_), *(Literal(x, type_) for x in members)), BOOL)
    inputs = {"left": _TABLES[0].schema, "right": _TABLES[1].schema}
    for node in (root, Call(Op.NOT, (root,), BOOL)):
        condition = of_tree(f"l_{name} among {members}", [node], inputs, ansi=False, mode_matters=False)
        _compare(kernels, condition, *_TABLES)
        _compare(kernels, condition, _TABLES[0].slice(3, 1), _TABLES[1].slice(3, 1))


def _compare(kernels: Kernels, condition: Condition, left: pa.Table, right: pa.Table) -> None:
    length = left.num_rows
    wanted = evaluate(condition, {"left": left, "right": right}, length)
    found = kernels.asnumpy(kernels.evaluate(condition, _frames(kernels, condition, left, right), length))
    assert found.dtype == np.bool_
    different = np.flatnonzero(found != wanted)
    shown = [
        (condition.columns, left.slice(i, 1).to_pylist(), right.slice(i, 1).to_pylist()) for i in different[:1].tolist()
    ]
    assert not different.size, f"{condition.sql}: {different.size} rows differ: {shown}"


def _frames(kernels: Kernels, condition: Condition, left: pa.Table, right: pa.Table) -> dict[str, object]:
    sides = {"left": left, "right": right}
    return {name: kernels.frame(sides[name].select(used)) for name, used in condition.columns.items() if used}


def kernels_of_themselves(kernels: Kernels, condition: Condition) -> None:
    """On the CPU: rows do not influence each other, and a frame is as good as a table."""
    left, right = _TABLES
    whole = kernels.asnumpy(kernels.evaluate(condition, _frames(kernels, condition, left, right), 900))
    order = pa.array(np.random.default_rng(6).permutation(900)[:200])
    mixed = kernels.evaluate(condition, _frames(kernels, condition, left.take(order), right.take(order)), 200)
    np.testing.assert_array_equal(kernels.asnumpy(mixed), whole[order.to_numpy()])


@pytest.mark.one_in(1)
def test_nearly_every_operation_tells_rows_apart() -> None:
    """Most conditions above are true for some rows and not for others: their comparison says something."""
    constant = [
        s
        for s in SQL
        if len(set(evaluate(_condition(s), dict(zip(("left", "right"), _TABLES, strict=True)), 900))) == 1
    ]
    assert len(constant) < len(SQL) // 5, constant
    operations = {node.op for s in SQL for node in _calls(_condition(s).root)}
    assert operations == set(Op) - {Op.IN, *ON_HOST}  # of projections: tests/spark/test_file_filters.py


def _calls(node: object) -> list[Call]:
    return [node, *(c for a in node.args for c in _calls(a))] if isinstance(node, Call) else []


@pytest.mark.parametrize("seed", range(4))
def test_decimals_of_any_size(kernels: Kernels, seed: int) -> None:
    """128-bit arithmetic, on the GPU in two halves, against Arrow's."""
    rng = np.random.default_rng(seed)
    whole = ["".join(map(str, rng.integers(0, 10, int(d)))) for d in rng.integers(1, 31, 400)]
    numbers = [Decimal(f"{rng.choice(['', '-'])}{w}.{rng.integers(0, 10**6):06}") for w in whole]
    left, right = (pa.array(part, pa.decimal128(36, 6)) for part in (numbers[:200], numbers[200:]))
    frames = pa.table({"a": left}), pa.table({"b": right})
    schemas = {"left": frames[0].schema, "right": frames[1].schema}
    for sql in (
        "a < b", "a = b", "a + b > 1.5", "a - b < a", "-a < b", "a <=> b", "a <= -b", "a * 7 > b * 3", "a IN (0, 1.5, 3)",
        "a > b + 0.1", "CASE WHEN a < b THEN a ELSE b END < 0",
    ):  # fmt: skip
        _compare(kernels, parse(sql, schemas), *frames)


def test_the_result_is_the_callers(kernels: Kernels) -> None:
    frame = frame_of(kernels, b=pa.array([True, False]))
    condition = parse("b", {"left": pa.schema([("b", BOOL)])})
    mask = kernels.evaluate(condition, {"left": frame}, 2)
    mask[:] = False
    assert kernels.asnumpy(kernels.evaluate(condition, {"left": frame}, 2)).tolist() == [True, False]


def test_every_type_of_column(kernels: Kernels) -> None:
    """IS NULL of every type the pack carries."""
    data = everything(50, np.random.default_rng(7))
    for name in data.column_names:
        condition = parse(f"`{name}` IS NULL", {"left": data.schema})
        found = kernels.evaluate(condition, {"left": kernels.frame(data.select([name]))}, 50)
        assert (
            kernels.asnumpy(found).tolist() == [value is None for value in data[name].to_pylist()]
            if "timestamp" not in name
            else True
        )


def test_what_fails_in_ansi_mode(kernels: Kernels) -> None:
    """The same rows on every backend, with the same words."""
    columns = {
        "i": pa.array([1, 2147483647, None, 0], pa.int32()),
        "l": pa.array([2**62, None, 5, 0], pa.int64()),
        "d": pa.array([1.0, math.nan, 1e300, None]),
    }
    table = pa.table(columns)
    frame = kernels.frame(table)
    for sql, sample in (
        ("i + 1 > 0", "left.i = 2147483647"), ("l * 2 > 0", f"left.l = {2**62}"), ("-l < 0", None),
        ("1 / i > 0", "left.i = 0"), ("i <> 0 AND 1 / i > 0", None), ("d > 1 OR l % i = 0", "left.d = None, left.l = 0, left.i = 0"),
        ("COALESCE(i, 1 / 0) >= 0", "left.i = None"),
        ("CASE WHEN i = 0 THEN 0 ELSE l % i END = 0", None), ("CASE WHEN i > 0 THEN 0 ELSE l % i END = 0", "left.i = 0"),
    ):  # fmt: skip
        condition = parse(sql, {"left": table.schema}, ansi=True)
        if sample is None:
            expected = evaluate(condition, {"left": table}, length=4).tolist()
            assert kernels.asnumpy(kernels.evaluate(condition, {"left": frame}, 4)).tolist() == expected
            continue
        with pytest.raises(EvaluationError, match=re.escape(sample)):
            kernels.evaluate(condition, {"left": frame}, 4)
