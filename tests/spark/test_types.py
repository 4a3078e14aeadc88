"""Every type that Spark and Arrow share goes through unharmed, as a key where it may be one."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import gpu_ops
from spark.support import Sink, Source, drain, in_memory

pytestmark = pytest.mark.spark

SCHEMA = (
    "id long, b byte, s short, i int, l long, f float, d double, dec decimal(38,10), t string, bin binary, "
    "yes boolean, day date, ts timestamp, ntz timestamp_ntz, arr array<int>, "
    "m map<string,struct<x:int,y:array<string>>>, st struct<p:timestamp,q:map<int,int>>, "
    "dsi interval day to second"
)
FULL = (
    1, -128, -32768, -(2**31), 2**63 - 1, 0.1, float("nan"),
    Decimal("1234567890123456789012345678.0123456789"), "ünï", b"\x00\xff", True, dt.date(1969, 12, 31),
    dt.datetime(2026, 3, 8, 2, 30, 0, 1), dt.datetime(1, 1, 1), [1, None, 3], {"k": (7, ["a", None])},
    (dt.datetime(2020, 1, 1), {1: None}), dt.timedelta(days=-1, microseconds=1),
)  # fmt: skip
EMPTY = (2, *(None for _ in FULL[1:]))
HOLLOW = (3, *FULL[1:14], [], {}, (None, {}), dt.timedelta())
ROWS = (FULL, EMPTY, HOLLOW)
KEYS = ("b", "s", "i", "l", "f", "d", "dec", "t", "bin", "yes", "day", "ts", "ntz")


@pytest.fixture(scope="module")
def source(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = str(tmp_path_factory.mktemp("types") / "rows")
    spark.createDataFrame(ROWS, SCHEMA).coalesce(1).write.parquet(path)
    return spark.readStream.schema(SCHEMA).parquet(path)


def shown(rows: Any) -> list[str]:
    return sorted(repr(tuple(r)) for r in rows)  # repr: NaN is equal to itself


def test_payloads_on_both_sides(spark: Any, source: Any, tmp_path: Path) -> None:
    # not nullable, as an outer join's pads must be able to break
    left = source.selectExpr("id", "array(1, 2) as fixed", "named_struct('z', 1) as one")
    joined = in_memory(gpu_ops.join, left, source.where("id < 3"), on="id", how="left")
    assert [f.name for f in joined.schema] == ["row_kind", "id", "fixed", "one", *source.columns[1:]]
    for field in source.schema:
        assert joined.schema[field.name].dataType.simpleString() == field.dataType.simpleString()
    sink = Sink()
    drain(joined, sink, tmp_path / "checkpoint")
    expected = [("+I", r[0], [1, 2], (1,), *r[1:]) for r in spark.createDataFrame(ROWS[:2], SCHEMA).collect()]
    expected.append(("+I", 3, [1, 2], (1,), *(None for _ in FULL[1:])))
    got = [(*r[:3], tuple(r[3]), *r[4:]) for r in sink.changes]
    assert shown(got) == shown(expected)


def test_keys_of_every_type(source: Any, tmp_path: Path) -> None:
    # null keys do not match: two rows of the three meet themselves and each other
    met = {(1, 1), (1, 3), (3, 1), (3, 3)}
    for null_safe, pairs in ((False, met), (True, met | {(2, 2)})):
        joined = in_memory(
            gpu_ops.join,
            source.selectExpr("id as a", *KEYS),
            source.selectExpr("id as b_id", *KEYS),
            on=list(KEYS),
            null_safe=null_safe,
        )
        sink = Sink()
        drain(joined, sink, tmp_path / f"checkpoint{null_safe}")
        columns = joined.columns
        assert {(r[columns.index("a")], r[columns.index("b_id")]) for r in sink.changes} == pairs


def test_columns_called_like_ours(spark: Any, tmp_path: Path) -> None:
    """A changelog with a column ``__gpu_join_metrics``, in any case, was ambiguous to Spark."""
    left, right = (
        Source(spark, tmp_path / "l", "k int, v int"),
        Source(spark, tmp_path / "r", "k int, w int, op string"),
    )
    first = ("__GPU_join_metrics", "__gpu_join_metrics_", "__origin")
    second = ("__count", "__side", "__kind")
    sink, found = Sink(), []
    for number in range(2):
        left.add({"k": number, "v": 1}, {"k": number + 1, "v": 2})
        right.add({"k": number, "w": number, "op": "+I"})
        inputs = left.df.selectExpr("k", "v").toDF(*first[:2]).selectExpr("*", "7 as __origin"), right.df.toDF(*second)
        joined = gpu_ops.join(
            inputs[0], gpu_ops.stream(inputs[1], row_kind="__kind"), on=[(first[0], "__count")], how="left",
            state=str(tmp_path / "state"), partitions=2,
        )  # fmt: skip
        drain(joined, sink, tmp_path / "checkpoint")
        found.append(joined.columns)
    assert found[0] == ["row_kind", *first, *second[:2]]
    folded = [(number + more, 1 + more, 7) for number in range(2) for more in (0, 1)]
    padded = [(*row, *((row[0], row[0]) if row[0] < 2 else (None, None))) for row in folded]
    assert sink.table == sorted(padded, key=repr)


@pytest.mark.parametrize("type_", ["void", "array<interval month>", "struct<v:interval year>"])
def test_other_types_are_refused(source: Any, type_: str) -> None:
    df = source.selectExpr("id", f"cast(null as {type_}) as odd")
    with pytest.raises(gpu_ops.DescriptionError, match="input 'left', column 'odd'"):
        in_memory(gpu_ops.join, df, source, on="id")
