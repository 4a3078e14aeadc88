"""Filters and computed columns over `gpu_ops.read_files`: Arrow's are as Spark's would be, and the rest is Spark's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import EvaluationError
from gpu_ops.spark.plan.changes import SourceScan, source_of
from gpu_ops.spark.tasks.packing import FileRows, Pack, Packer
from gpu_ops.spark_types import arrow_schema
from spark.support import settings

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

PAIR = pa.schema([("key", pa.int64()), ("number", pa.int32())])

SIFTED = {
    "n = 3": "n",
    "n <> 3": "n",
    "4 > n": "n",
    "n <= 3L AND s >= 'b'": "n, s",
    "n IN (1, 4) OR s = 'é'": "n, s",
    "n NOT IN (1, 4)": "n",
    "NOT (n = 1 AND s = 'a')": "n, s",
    "n IS NULL OR s IS NOT NULL": "n, s",
    "flag": "flag",
    "NOT flag OR n = -1": "flag, n",
    "flag = false": "flag",
    "day < DATE'2024-02-01'": "day",
    "day = '2024-03-02'": "day",
    "at >= TIMESTAMP'2024-01-02 00:00:00'": "at",
    "at < '2024-01-02' OR at > TIMESTAMP'2024-01-03 12:00:00 America/New_York'": "at",
    "ntz > TIMESTAMP_NTZ'2024-01-02 00:00:00'": "ntz",
    "small = 3": "small",
    "small < 100000": "small",
    "n BETWEEN 2 AND 4": "n",
    "k NOT BETWEEN 2 AND 50": "k",
    "small BETWEEN 2 AND 100000L": "small",
    "small IN (2, 3, 100000)": "small",
    "at IN (TIMESTAMP'2024-01-01 05:00:00', TIMESTAMP'2024-01-02 03:00:00')": "at",
    "day IN (DATE'2024-01-30', DATE'2024-02-07')": "day",
    "s IN ('a', '')": "s",
    "day NOT IN (DATE'2024-01-30', DATE'+12024-02-07')": "day",
    "day < DATE'+12024-02-07' AND day > DATE'2024-02-01'": "day",
    "day < DATE'2024-01-01' + INTERVAL '1' MONTH": "day",
    "at < timestampadd(HOUR, 30, TIMESTAMP'2024-01-01 00:00:00')": "at",
    "x = 'NaN'": "x",
    "x > 1": "x",
    "x < 'NaN' OR x <=> NULL": "x",
    "x IN (0.25, 'NaN')": "x",
    "n % 2 = 0": "n",
    "n = k": "n, k",
    "n < small OR small IS NULL": "n, small",
    "n + 1 < k - small": "n, k, small",
    "-n <= -3": "n",
    "s LIKE 'a%'": "s",
    "s NOT LIKE '_'": "s",
    "s NOT LIKE '%\\_%' AND s <> ''": "s",
    "n IN (1, NULL)": "n",
    "n = NULL OR n = 1": "n",
    "n <=> 3": "n",
    "dec > 1 AND dec < 30.5": "dec",
    "dec * 2 - dec >= 17.25": "dec",
    "flag > false": "flag",
    "coalesce(n, small, 0) = 0": "n, small",
    "CASE WHEN n > 2 THEN s = 'a' ELSE flag END": "n, s, flag",
    "if(n = 0, true, x / n > 1)": "n, x",
    "n IS NOT NULL AND (n = 0 OR 6 % n = 0)": "n",
}
"""Conditions that mean the same to Arrow, and the columns they go by."""

UNSIFTED = (
    "n IN ({})".format(", ".join(map(str, range(1001)))), "upper(s) = 'A'", "day < current_date()", "n > rand()",
    "dec / 3 > 1", "s LIKE concat(s, '%')", "s LIKE 'a|%' ESCAPE '|'", "cast(x AS int) = 1", "sqrt(x) > 1",
    "try_add(n, 1) = 2", "at + INTERVAL '1' DAY > '2024-01-02'", "at + make_interval(0, n) > '2024-01-02'",
    "at + INTERVAL '1' MONTH > '2024-02-02'",
)  # fmt: skip

COMPUTED = (
    "dec / 3", "dec * (1 - dec)", "dec + 1.5 - dec", "n + small", "k * 2", "n % 4", "x * 2 - x", "x / 4", "-dec",
    "n > 2", "CASE WHEN n = 1 OR n = 2 THEN 1 ELSE 0 END", "CASE WHEN n > 3 THEN dec END", "if(flag, s, 'no')",
    "coalesce(s, 'none')", "cast(n AS bigint)", "cast(n AS decimal(20, 3))", "cast(n AS double)", "s LIKE 'a%'", "1",
    "'x'", "s IS NULL", "n <=> small", "x = 'NaN'", "date'2024-01-01'", "cast(NULL AS int)",
    "coalesce(at, timestamp'2024-01-01 00:00:00')", "at - INTERVAL '10' SECOND", "ntz + INTERVAL '23' HOUR",
)  # fmt: skip
"""Columns made of others; all but the first are computed by Arrow."""


@pytest.fixture(scope="module")
def many_types(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A folder of Parquet files, nulls in every column but the key, and their schema."""
    folder = str(tmp_path_factory.mktemp("types") / "rows")
    rows = spark.range(64).selectExpr(
        "id k", "if(id % 7 = 0, null, cast(id % 6 as int)) n", "if(id % 5 = 0, null, cast(id % 6 as smallint)) small",
        "element_at(array('a', 'b', 'é', '', null), cast(id % 5 as int) + 1) s",
        "if(id % 3 = 0, null, id % 2 = 0) flag",
        "if(id % 4 = 0, null, date_add(date'2024-01-25', cast(id as int))) day",
        "if(id % 9 = 0, null, timestamp'2024-01-01 00:00:00' + make_interval(0, 0, 0, 0, cast(id as int))) at",
        "if(id % 9 = 1, null, timestamp_ntz'2024-01-01 00:00:00' + make_interval(0, 0, 0, 0, cast(id as int))) ntz",
        "if(id % 4 = 1, double('NaN'), id / 8) x", "cast(id as decimal(9, 2)) dec",
    )  # fmt: skip
    rows.repartition(3).write.parquet(folder)
    return folder, rows.schema.simpleString().removeprefix("struct<").removesuffix(">").replace(":", " ")


@pytest.mark.parametrize("condition", [*SIFTED, *UNSIFTED])
def test_files_are_sifted_as_spark_would(
    spark: Any, many_types: tuple[str, str], tmp_path: Path, condition: str
) -> None:
    folder, schema = many_types
    rows = gpu_ops.read_files(spark, folder, "parquet", schema)
    sifted = rows.selectExpr("*", "k AS own").where(condition).selectExpr("own AS key", "n AS number")
    read = source_of(sifted)
    assert isinstance(source_of(rows.where(rows.n.isin([]))), str)
    if condition in UNSIFTED:
        assert str(read).startswith("only Spark evaluates")
        return
    assert isinstance(read, SourceScan)
    assert ", ".join(dict.fromkeys(read.projection.tested)) == SIFTED[condition]
    taken_rows = FileRows(read.source.reader.rows.format, "rows", read.projection, PAIR)
    pack = Pack(Packer("rows", "join", 0, PAIR, (), (0,), 1 << 18), taken_rows, Projection.all(PAIR))
    files = pa.RecordBatch.from_pydict({"path": sorted(map(str, Path(folder).glob("*.parquet"))), "time": [1, 2, 3]})
    messages = [m.as_buffer() for batch in pack(iter([files])) for m in batch["rows"]]
    taken = [row for m in messages for row in pa.ipc.read_record_batch(m, PAIR).to_pylist()]
    wanted = spark.read.schema(schema).parquet(folder).where(condition).selectExpr("k AS key", "n AS number").collect()
    assert sorted(row["key"] for row in taken) == sorted(row.key for row in wanted)
    assert {row["key"]: row["number"] for row in taken} == {row.key: row.number for row in wanted}
    assert 0 < len(taken) < 64


@pytest.mark.parametrize("ansi", ["false", "true"])
def test_columns_are_computed_as_spark_would(spark: Any, many_types: tuple[str, str], ansi: str) -> None:
    folder, schema = many_types
    with settings(spark, ansi=ansi):
        rows = gpu_ops.read_files(spark, folder, "parquet", schema)
        assert isinstance(source_of(rows.selectExpr("k", COMPUTED[0])), str)
        named = [f"{text} AS c{number}" for number, text in enumerate(COMPUTED[1:])]
        computed = rows.selectExpr("*", "k AS own").where("n < 5").selectExpr("own AS k", *named).where("c3 < 100")
        read = source_of(computed)
        assert isinstance(read, SourceScan)
        assert read.projection.tested == ("n", "k")
        wanted = spark.read.schema(schema).parquet(folder).where("n < 5").selectExpr("k", *named).where("c3 < 100")
        expected = {row.k: row for row in wanted.collect()}
    taken = FileRows(read.source.reader.rows.format, "rows", read.projection, arrow_schema(computed.schema, "rows"))
    batches = [batch for path in Path(folder).glob("*.parquet") for batch in taken.read(str(path))]
    found = spark.createDataFrame(pa.Table.from_batches(batches), computed.schema).collect()
    assert {row.k: repr(row) for row in found} == {k: repr(row) for k, row in expected.items()}
    assert 20 < len(found) < 64


def test_what_overflows_is_an_error_in_ansi_mode_and_wraps_around_without(
    spark: Any, many_types: tuple[str, str]
) -> None:
    folder, schema = many_types
    path = next(Path(folder).glob("*.parquet"))
    for ansi in ("true", "false"):
        with settings(spark, ansi=ansi):
            read = source_of(gpu_ops.read_files(spark, folder, "parquet", schema).selectExpr("n * 2147483647 AS much"))
            wrapped = spark.sql("SELECT 2 * 2147483647").first()[0] if ansi == "false" else None
        assert isinstance(read, SourceScan)
        rows = FileRows(read.source.reader.rows.format, "rows", read.projection, pa.schema([("much", pa.int32())]))
        if ansi == "true":
            with pytest.raises(EvaluationError, match=r"n \* 2147483647.* fails in ANSI mode .* for n = "):
                list(rows.read(str(path)))
        else:
            assert wrapped in pa.Table.from_batches(rows.read(str(path)))["much"].to_pylist()
