"""Filters over `gpu_ops.read_files`: what Arrow applies takes the rows that Spark would, and the rest is Spark's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gpu_ops
from gpu_ops.files.row_filter import Taken
from gpu_ops.spark.sources.packing import FileRows, Packer, PackFiles
from gpu_ops.spark.sources.readings import source_of

pytestmark = pytest.mark.spark

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
}
"""Conditions that mean the same to Arrow, and the columns they go by."""

UNSIFTED = (
    "x = 'NaN'", "x > 1", "n % 2 = 0", "n = k", "s LIKE 'a%'", "n IN (1, NULL)", "n = NULL", "n <=> 3",
    "n IN ({})".format(", ".join(map(str, range(1001)))),
    "upper(s) = 'A'", "dec > 1", "day < current_date()", "n > rand()",
)  # fmt: skip


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
    assert source_of(rows.where(rows.n.isin([]))) is None
    if condition in UNSIFTED:
        assert read is None
        return
    assert read is not None
    assert ", ".join(dict.fromkeys(read.tested)) == SIFTED[condition]
    taken_rows = FileRows.of(read.source.format, "rows", read.taken, PAIR)
    pack = PackFiles(Packer("rows", 0, PAIR, (), (0,), 1 << 18), taken_rows, Taken((0, 1)))
    files = pa.RecordBatch.from_pydict({"path": sorted(map(str, Path(folder).glob("*.parquet"))), "time": [1, 2, 3]})
    messages = [m.as_buffer() for batch in pack(iter([files])) for m in batch["rows"]]
    taken = [row for m in messages for row in pa.ipc.read_record_batch(m, PAIR).to_pylist()]
    wanted = spark.read.schema(schema).parquet(folder).where(condition).selectExpr("k AS key", "n AS number").collect()
    assert sorted(row["key"] for row in taken) == sorted(row.key for row in wanted)
    assert {row["key"]: row["number"] for row in taken} == {row.key: row.number for row in wanted}
    assert 0 < len(taken) < 64
