"""Functions of text, time and numbers in projections: random calls over extreme values, as Spark computes them.

GPU_JOIN_ROUNDS=20 GPU_JOIN_SEED=9 pytest -m "" tests/spark/test_functions_like_spark.py
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gpu_ops
from gpu_ops import stream
from gpu_ops.errors import EvaluationError
from gpu_ops.spark.api import apply
from gpu_ops.spark.plan.changes import source_of
from gpu_ops.spark.tasks.packing import FileRows
from gpu_ops.spark_types import arrow_schema
from spark.feeds import Feed, check
from spark.support import Sink, drain, settings

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SEED = int(os.environ.get("GPU_JOIN_SEED", "7"))
ROUNDS = int(os.environ.get("GPU_JOIN_ROUNDS", "1"))

SCHEMA = (
    "k LONG, s STRING, t STRING, n INT, m LONG, b BOOLEAN, x DOUBLE, y DOUBLE, d DECIMAL(9, 2), day DATE, "
    "at TIMESTAMP, ntz TIMESTAMP_NTZ"
)
TEXTS = [" ", "  a ", "ab", "aab", "%", "a_b", "\\", "é", "ßx", "Σας", "😀a😀", "\x00", "\n", "x\ty", "日本語", "'"]
DAYS = [0, -1, 1, -719_162, -719_163, -719_528, -719_529, 2_932_896, 2_932_897, -2_000_000, 19_782, 60]
MICROS = [0, -1, 1, 86_399_999_999, -62_135_596_800_000_000, 253_402_300_800_000_000, -62_200_000_000_000_000]


def calls(rng: random.Random) -> Iterator[str]:
    """A call of each function, with random arguments, over the columns of `rows`."""
    text = rng.choice(["s", "t", "concat(s, t)", "concat(s, '-', n)", "if(b, 'no', s)"])
    mark = "'" + rng.choice(TEXTS).replace("\\", "\\\\").replace("'", "\\'") + "'"
    time, stamp = rng.choice(["day", "at", "ntz"]), rng.choice(["at", "ntz"])
    place, count = rng.randint(-6, 6), rng.choice([-(1 << 31), -1, 0, 1, 3, (1 << 31) - 1])
    years = ["YEAR", "yyyy", "QUARTER", "month", "mon", "mm", "WEEK", "yy"]
    formats = ["yyyy-MM-dd", "yyyy", "HH:mm:ss", "dd.MM./HH", "yyyy-MM-dd HH:mm"]
    yield f"length({text})"
    yield f"substring({text}, {place})"
    yield f"substr({text}, {rng.choice([place, 1 - (1 << 31), (1 << 31) - 1])}, {count})"
    yield f"left({text}, {place}) || right({text}, {place})"
    yield f"{text} || {mark} || b || n || m"
    for name in ("trim", "ltrim", "rtrim"):
        yield f"{name}({text})"
    for side in ("BOTH", "LEADING", "TRAILING"):
        yield f"trim({side} {rng.choice([mark, repr('')])} FROM {text})"
    yield f"replace({text}, {mark}, 'xy')"
    yield f"replace({text}, {rng.choice([mark, repr('')])})"
    pattern = "".join(rng.choices([*"%_ab", "\\\\\\\\", "\\\\%", "é", "\n"], k=rng.randint(0, 4)))
    yield f"{text} LIKE '{pattern}'"
    yield f"{text} LIKE '%\\\\\\\\'"
    for name in ("contains", "startswith", "endswith"):
        yield f"{name}({text}, {rng.choice([mark, repr('')])})"
    for name in ("year", "quarter", "month", "weekofyear", "day", "dayofyear", "dayofweek", "weekday"):
        yield f"{name}({time})"
    yield f"extract({rng.choice(['YEAR', 'MONTH', 'DAY', 'DOW', 'WEEK', 'DOY'])} FROM {time})"
    for name in ("hour", "minute", "second"):
        yield f"{name}({stamp})"
    yield f"cast({stamp} AS date)"
    yield f"cast(day AS {rng.choice(['timestamp', 'timestamp_ntz'])})"
    yield f"day >= {stamp} OR {stamp} = DATE'2024-02-29'"
    yield f"to_date({time})"
    for one in ("day", "at", "ntz"):
        yield f"trunc({one}, '{rng.choice(years)}')"
        yield f"date_trunc('{rng.choice([*years, 'DAY', 'dd', 'Hour', 'minute', 'SECOND'])}', {one})"
    yield f"date_format({stamp}, '{rng.choice(formats)}')"
    yield "cast(day AS string)"
    yield f"cast({rng.choice(['n', 'm', 'b'])} AS string)"
    yield "nullif(n, 1)"
    yield "k / nullif(m % 3, 0)"
    yield f"greatest({', '.join(rng.sample(['n', 'k', '5', 'NULL', 'm'], 3))})"
    yield f"least({', '.join(rng.sample(['x', 'y', '0.5D', 'n'], 3))})"
    yield f"{rng.choice(['least', 'greatest'])}({text}, s, {mark})"
    yield f"{rng.choice(['least', 'greatest'])}({time}, {time})"
    yield f"abs({rng.choice(['x', 'd', 'if(n > -9, n, 0)', 'if(m > -9, m, 0)'])})"
    yield f"year(coalesce(day, DATE'20{rng.randint(10, 99)}-07-01'))"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file of extreme and random values."""
    rng, count = random.Random(5), 600
    texts = ["", None, *TEXTS]
    floats = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 0.5]

    def some(usual: Callable[[], Any], odd: Sequence[Any]) -> list[Any]:
        return [rng.choice([None, *odd]) if rng.random() < 0.4 else usual() for _ in range(count)]

    def time() -> int:
        return rng.randint(-(10**15), 4 * 10**15)

    def array(values: list[Any], *types: pa.DataType) -> pa.Array:
        made = pa.array(values, types[0])
        return made if len(types) == 1 else made.cast(types[1])

    table = pa.table({
        "k": array(list(range(count)), pa.int64()),
        "s": array(some(lambda: "".join(rng.choices(TEXTS, k=rng.randint(0, 3))), []), pa.string()),
        "t": array(some(lambda: rng.choice(texts), []), pa.string()),
        "n": array(some(lambda: rng.randint(-5, 5), [0, 1, (1 << 31) - 1, -(1 << 31)]), pa.int32()),
        "m": array(some(lambda: rng.randint(-9, 9), [1 << 62, (1 << 63) - 1, -(1 << 63)]), pa.int64()),
        "b": array(some(lambda: rng.random() < 0.5, []), pa.bool_()),
        "x": array(some(rng.random, floats), pa.float64()),
        "y": array(some(rng.random, floats), pa.float64()),
        "d": array(some(lambda: Decimal(rng.randint(-999, 999)) / 100, []), pa.decimal128(9, 2)),
        "day": array(some(lambda: rng.randint(-30_000, 60_000), DAYS), pa.int32(), pa.date32()),
        "at": array(some(time, MICROS), pa.int64(), pa.timestamp("us", "UTC")),
        "ntz": array(some(time, MICROS), pa.int64(), pa.timestamp("us")),
    })  # fmt: skip
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(table, path)
    return path


def computed(spark: Any, path: Path, texts: Sequence[str], schema: str = SCHEMA) -> pa.Table | None:
    """What tasks compute of the rows; None where it is left to Spark."""
    projected = gpu_ops.read_files(spark, str(path.parent), "parquet", schema).selectExpr("k", *texts)
    read = source_of(projected)
    if isinstance(read, str):
        return None
    types = arrow_schema(projected.schema, "rows")
    files = FileRows(read.source.reader.rows.format, "rows", read.projection, types)
    return pa.Table.from_batches(files.read(str(path)), types)


def exact(column: pa.ChunkedArray) -> list[str]:
    """Each value as text, different where values are; times may be too far away for Python's."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
    return list(map(repr, column.to_pylist()))


@pytest.mark.parametrize("ansi", ["false", "true"])
def test_as_spark_does(spark: Any, rows: Path, ansi: str) -> None:
    rng = random.Random(f"{SEED} {ansi}")
    with settings(spark, ansi=ansi, zone="UTC"):
        for _ in range(ROUNDS):
            said = list(dict.fromkeys(calls(rng)))
            named = [f"{call} AS c{n}" for n, call in enumerate(said)]
            found = computed(spark, rows, named)
            assert found is not None, [call for call in said if computed(spark, rows, [call]) is None]
            wanted = spark.read.schema(SCHEMA).parquet(str(rows)).selectExpr("k", *named).toArrow()
            for own, its, call in zip(found.columns, wanted.columns, ["k", *said], strict=True):
                assert exact(own) == exact(its), call
            assert sum(len(set(exact(column))) > 1 for column in found.columns) > len(said) // 2


def test_what_goes_by_the_clocks_of_a_zone_is_sparks(spark: Any, rows: Path) -> None:
    by_zone = ["hour(at)", "cast(at AS date)", "year(at)", "date_trunc('DAY', at)", "date_format(ntz, 'HH')"]
    others = ["hour(ntz)", "year(ntz)", "cast(ntz AS date)", "trunc(day, 'MM')", "cast(day AS string)"]
    with settings(spark, zone="Europe/Berlin"):
        assert [call for call in (*by_zone, *others) if computed(spark, rows, [call]) is None] == by_zone
    for zone in ("Etc/UTC", "GMT", "Z"):
        with settings(spark, zone=zone):
            assert computed(spark, rows, by_zone) is not None


def test_a_date_beyond_all_timestamps_is_an_error(spark: Any, tmp_path: Path) -> None:
    """Spark: `DateTimeUtils.daysToMicros`, ``long overflow``."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"k": [1], "day": pa.array([1 << 28], pa.int32()).cast(pa.date32())}), path)
    with settings(spark, zone="UTC"), pytest.raises(EvaluationError, match="a DATE 268,435,456 days from 1970-01-01"):
        computed(spark, path, ["date_trunc('DAY', day)"], "k LONG, day DATE")


@pytest.mark.parametrize(
    "call",
    [
        "length(encode(s, 'utf-8'))", "substring(s, n)", "replace(s, t, 'x')", "trim(BOTH t FROM s)", "contains(s, t)",
        "length(s COLLATE UNICODE)", "trunc(day, s)", "trunc(day, 'DAY')", "trunc(day, 'no')", "date_format(ntz, 'E')",
        "date_format(ntz, 'yyyy-M')", "cast(x AS string)", "cast(d AS string)", "cast(ntz AS string)",
        "concat(array(n), array(n))", "extract(SECOND FROM ntz)",
    ],
)  # fmt: skip
def test_what_is_left_to_spark(spark: Any, rows: Path, call: str) -> None:
    with settings(spark, zone="UTC"):
        assert computed(spark, rows, [call]) is None


NAMES = ("ann ", " Bob", "", "x,y", "éa", None)
SQL = """SELECT substring(product, 2) || '-' || replace(name, 'a', 'oo') AS tag, count(*) AS n,
    max(greatest(length(trim(name)), level)) AS most FROM orders JOIN users USING (user_id)
    WHERE NOT contains(name, ',') GROUP BY substring(product, 2) || '-' || replace(name, 'a', 'oo')"""


@pytest.mark.parametrize("partitions", [1, 2])
def test_between_two_operators(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int) -> None:
    """They share an engine, or a task; what only Spark computes keeps them apart, and `explain()` says so."""
    monkeypatch.setattr(apply, "default_partitions", lambda *_: (partitions, "so"))
    users = Feed(spark, tmp_path, "users", {"user_id": ("long", (1, 2, 3, None)), "name": ("string", NAMES)})
    columns = {"user_id": ("long", (1, 2, 3)), "product": ("string", ("pq", "qr", None)), "level": ("int", range(9))}
    orders = Feed(spark, tmp_path, "orders", columns)
    feeds = [users, orders]
    for feed in feeds:
        feed.read_by_arrow = True
        for _ in range(3):
            feed.more(20)
    inputs = {feed.name: stream(feed.df, row_kind="op") for feed in feeds}
    changes = gpu_ops.sql(SQL, state=str(tmp_path / "state"), **inputs)
    said = gpu_ops.explain(changes)
    assert f", in the same {'engine' if partitions == 1 else 'Spark task'}" in said
    assert "rows of Spark's own" not in said
    sink = Sink()
    drain(changes, sink, tmp_path / "checkpoint")
    check(sink, SQL, feeds, least=20)
    apart = gpu_ops.sql(SQL.replace("trim(name)", "reverse(name)"), state=str(tmp_path / "other"), **inputs)
    said = gpu_ops.explain(apart)
    assert ", in the same" not in said
    assert "rows of Spark's own: only Spark evaluates reverse(users.name)" in said
