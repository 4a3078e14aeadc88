"""Spark's hash, computed without Spark, against Spark's own."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import random
from typing import Any

import pyarrow as pa
import pytest

from gpu_ops.errors import NotBuiltError
from gpu_ops.spark.wire.hashes import spark_hash

pytestmark = pytest.mark.spark

RANDOM = random.Random(7)
SHORT = ("0", "-1.5", "99999999999999.9999")
WIDE = ("0", "-0.001", "0.128", "-0.128", "-0.129", "12345678901234567890123456789012345.678")
VALUES: dict[str, tuple[str, pa.DataType, list[Any]]] = {
    "boolean": ("boolean", pa.bool_(), [True, False]),
    "byte": ("tinyint", pa.int8(), [0, -1, 127, -128]),
    "short": ("smallint", pa.int16(), [0, -1, 32767]),
    "int": ("int", pa.int32(), [0, -1, 2**31 - 1, -(2**31), *(RANDOM.randrange(-(2**31), 2**31) for _ in range(50))]),
    "long": ("bigint", pa.int64(), [0, -1, 2**63 - 1, *(RANDOM.randrange(-(2**63), 2**63) for _ in range(50))]),
    "float": ("float", pa.float32(), [0.0, 1.5, -2.25, math.inf, math.nan]),
    "double": ("double", pa.float64(), [0.0, 1.5, -2.25, math.inf, -math.inf, math.nan, 1e300]),
    "string": ("string", pa.string(), ["", "a", "ab", "abc", "abcd", "abcde", "ÿé漢😀", "x" * 37, "longer than eight"]),
    "binary": ("binary", pa.binary(), [b"", b"\x00", b"\xff\xfe\x80", b"\x01\x02\x03\x04\xff"]),
    "date": ("date", pa.date32(), [dt.date(1970, 1, 1), dt.date(1582, 1, 1), dt.date(2026, 11, 21)]),
    "timestamp": ("timestamp", pa.timestamp("us", "UTC"), [dt.datetime(2026, 1, 2, 3, 4, 5, 678901, dt.UTC)]),
    "decimal": ("decimal(18,4)", pa.decimal128(18, 4), [decimal.Decimal(x) for x in SHORT]),
    "wide": ("decimal(38,3)", pa.decimal128(38, 3), [decimal.Decimal(x) for x in WIDE]),
}


def of_spark(spark: Any, kinds: list[str], rows: list[tuple[Any, ...]]) -> list[int]:
    schema = ", ".join(f"c{place} {kind}" for place, kind in enumerate(kinds))
    names = ", ".join(f"c{place}" for place in range(len(kinds)))
    df = spark.createDataFrame([(place, *row) for place, row in enumerate(rows)], f"place int, {schema}")
    return [row.h for row in df.selectExpr("place", f"hash({names}) AS h").orderBy("place").collect()]


@pytest.mark.parametrize("name", VALUES)
def test_every_type(spark: Any, name: str) -> None:
    kind, arrow, values = VALUES[name]
    values = [*values, None]
    expected = of_spark(spark, [kind], [(value,) for value in values])
    column = pa.array(values, arrow)
    assert spark_hash([column], len(values)).tolist() == expected
    assert spark_hash([column.slice(1)], len(values) - 1).tolist() == expected[1:]


def test_several_columns_and_nulls(spark: Any) -> None:
    names = ("string", "long", "wide", "double")
    rows = [tuple(RANDOM.choice([*VALUES[name][2], None]) for name in names) for _ in range(200)]
    columns = [pa.array([row[place] for row in rows], VALUES[name][1]) for place, name in enumerate(names)]
    assert spark_hash(columns, len(rows)).tolist() == of_spark(spark, [VALUES[name][0] for name in names], rows)


def test_one_zero_and_one_nan(spark: Any) -> None:
    del spark
    for kind in (pa.float32(), pa.float64()):
        hashes = spark_hash([pa.array([0.0, -0.0, math.nan, -math.nan], kind)], 4)
        assert hashes[0] == hashes[1]
        assert hashes[2] == hashes[3]


def test_nested_types_are_not_built() -> None:
    with pytest.raises(NotBuiltError, match="list<element: int64>"):
        spark_hash([pa.array([[1]], pa.list_(pa.field("element", pa.int64())))], 1)
