"""Files read as Spark reads them: the same rows of the usual contents, an error where Spark makes up a null."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as st

from gpu_ops.errors import BadInputError
from gpu_ops.files.formats import OPTIONS, FileFormat
from gpu_ops.spark_types import arrow_schema

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

ZONE = "America/New_York"  # the session's
LATIN = {"header": "true", "sep": ";", "quote": "'", "encoding": "ISO-8859-1"}


def compare(spark: Any, path: Path, name: str, ddl: str, **options: str) -> list[dict[str, Any]]:
    """The rows that both have, which is asserted."""
    declared = st._parse_datatype_string(ddl)
    schema = arrow_schema(declared, "files")
    zone = {"csv": ZONE, "json": ZONE, "orc": "UTC"}.get(name)  # to Spark ORC's times are the JVM's
    said = {**options, **({"timeZone": zone} if zone else {})}
    files = sorted(path.glob("part-*")) if path.is_dir() else [path]
    read = FileFormat(name, schema, tuple(said.items()))
    ours = [batch for file in files for batch in read.read(str(file), schema.names, "files")]
    theirs = spark.read.schema(declared).options(**options).format(name).load(str(path)).toArrow().cast(schema)
    rows = pa.Table.from_batches(ours, schema).to_pylist()
    assert list(map(repr, rows)) == list(map(repr, theirs.to_pylist()))
    return rows


def lines(path: Path, *rows: str, encoding: str = "utf8") -> Path:
    path.write_bytes("".join(f"{row}\n" for row in rows).encode(encoding))
    return path


def null_in_spark(spark: Any, path: Path, name: str, ddl: str) -> bool:
    """Whether Spark has a null for x; ours is an error that names it."""
    rows = spark.read.schema(ddl).format(name).load(str(path)).collect()
    with pytest.raises(BadInputError, match="'files', column 'x'"):
        compare(spark, path, name, ddl)
    return rows[0].x is None


TIMES = (
    "2024-01-02", "2024-01-02T03:04", "2024-01-02 03", "2024-01-02 03:04:05", "2024-01-02 03:04:05.1",
    "2024-01-02T03:04:05.123456", "2024-01-02 03:04:05.123456789", "2024-03-10 01:59:59", "2024-03-10 02:00:00",
    "2024-03-10 02:30:00", "2024-03-10 03:00:00", "2024-11-03 00:59:59", "2024-11-03 01:30:00", "2024-11-03 02:00:00",
    "0001-01-01 00:00:00", "9999-12-31 00:00:00", "1883-11-18 12:00:00", "1883-11-18 12:03:57", "1969-12-31 23:59:59.9",
    "2050-07-01 12:00:00", "2099-03-08 02:30:00", "2099-11-01 01:30:00", "2600-07-01 00:00:00", "9999-07-01 00:00:00.5",
)  # fmt: skip
ZONED = (
    "2024-01-02T03:04:05Z", "2024-01-02 03:04:05+02:00", "2024-01-02T03:04:05.5-0530", "2024-01-02 03:04:05+02",
    "2024-01-02T03:04:05.123456789Z", "2024-03-10 02:30:00-05:00",
)  # fmt: skip


def test_csv(spark: Any, tmp_path: Path) -> None:
    texts = ["x", "", " x ", '"a,b"', "it's", "ü€\U0001f600", "NULL", "null", "x\\y", 'a"b', "#", "'", "0"]
    rows = compare(
        spark, lines(tmp_path / "texts", *(f"{n},{t}" for n, t in enumerate(texts))), "csv", "k int, x string"
    )
    assert [row["x"] for row in rows][:4] == ["x", None, " x ", "a,b"]
    path = tmp_path / "lines"
    path.write_bytes(b"\xef\xbb\xbf\r\n1,x\r\n\r\n2,\r\n,\r\n3,z")
    assert len(compare(spark, path, "csv", "k int, x string")) == 4
    numbers = ["1,1,1,1,1,1,1,true", "-128,-32768,-2147483648,-9223372036854775808,-0.0,-0.0,-0.01,false", ",,,,,,,"]
    numbers += ["127,0,0,0,NaN,NaN,1.5,TRUE", "0,0,0,0,Inf,-Inf,12345678.90,True", "0,0,0,0,0.1,1e300,1e2,false"]
    numbers += ["0,0,0,0,1e40,.5,.5,true", "0,0,0,0,1e-50,5.,5.,true"]
    kinds = "b byte, s short, i int, l long, f float, d double, dec decimal(10,2), y boolean"
    assert len(compare(spark, lines(tmp_path / "numbers", *numbers), "csv", kinds)) == 8
    days = ["2024-01-02", "2024-02-29", "0001-01-01", "1582-10-10", "9999-12-31", ""]
    compare(spark, lines(tmp_path / "days", *(f"1,{day}" for day in days)), "csv", "k int, x date")


def test_options_of_csv(spark: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "f", "k;x;more", "1;'a;b';2", "2;ü;3", ";;", encoding="latin1")
    assert len(compare(spark, path, "csv", "k int, x string, more int", **LATIN)) == 3
    path = lines(tmp_path / "g", '1,"x', 'y"', '2,"a""b"', "NA,z", "3,NA", "4,")
    rows = compare(spark, path, "csv", "k int, x string", multiLine="true", escape='"', nullValue="NA")
    assert [row["x"] for row in rows] == ["x\ny", 'a"b', "z", None, None]
    path = lines(tmp_path / "h", '1,"a\\"b"', '2,"a\\\\b"')
    assert [row["x"] for row in compare(spark, path, "csv", "k int, x string", escape="\\")] == ['a"b', "a\\b"]


@pytest.mark.parametrize("name", ["csv", "json"])
def test_times(spark: Any, name: str, tmp_path: Path) -> None:
    line = '{{"k":1,"x":"{}"}}' if name == "json" else "1,{}"
    both = lines(tmp_path / "both", *map(line.format, (*TIMES, *ZONED)))
    assert len(compare(spark, both, name, "k int, x timestamp")) == len(TIMES) + len(ZONED)
    compare(spark, lines(tmp_path / "plain", *map(line.format, TIMES)), name, "k int, x timestamp")
    compare(spark, lines(tmp_path / "zoned", *map(line.format, ZONED)), name, "k int, x timestamp")
    compare(spark, lines(tmp_path / "local", *map(line.format, TIMES)), name, "k int, x timestamp_ntz")


def test_json(spark: Any, tmp_path: Path) -> None:
    ddl = (
        "k int, t string, b byte, l long, f float, d double, dec decimal(10,2), big decimal(38,10), y boolean, "
        "day date, arr array<int>, st struct<x:int,at:timestamp,q:array<struct<day:date,at:timestamp_ntz>>>"
    )
    path = lines(
        tmp_path / "f",
        '{"k":1,"t":"ü \\u00fc \\ud83d\\ude00 \\n\\"\\\\/","b":-128,"l":9223372036854775807,"f":0.1,"d":1e5,"dec":1.5,'
        '"big":1234567890123456789012345678.0123456789,"y":true,"day":"2024-02-29","arr":[1,null,-2]}',
        "",
        '  {"more":{"k":[{"z":1}]},"k":2,"t":"","d":NaN,"f":-Infinity,"dec":"1.55","y":false,"arr":[null,1]}  ',
        '{"k":null,"t":null,"d":-0.0,"f":16777217,"dec":1e2,"arr":[],"st":null}\r',
        "{}",
        '{"st":{"x":1,"at":"2024-03-10 02:30:00","q":[{"day":"2024-01-02","at":"2024-03-10 02:30:00"},null,{}]}}',
        '{"st":{"at":"2024-01-02T03:04:05+02:00","q":[],"z":1}}',
        '{"st":{}}',
        "   ",
    )
    assert len(compare(spark, path, "json", ddl)) == 7


@pytest.mark.parametrize(
    ("name", "kind", "text", "null"),
    [
        ("csv", "int", "q", True), ("csv", "int", "1.0", True), ("csv", "int", "2147483648", True),
        ("csv", "boolean", "yes", True), ("csv", "date", "2024-02-30", True), ("csv", "timestamp", "x", True),
        ("csv", "timestamp_ntz", "2024-01-02T03:04:05Z", True), ("csv", "decimal(10,2)", "123456789.99", True),
        ("json", "int", '"1"', True), ("json", "int", "1.0", True), ("json", "date", "1", True),
        ("json", "decimal(10,2)", "123456789.99", True), ("json", "array<int>", "1", True),
        # where Spark has a value: rounded, of a time or number that is not written in full, of any JSON as text
        ("csv", "decimal(10,2)", "1.555", False), ("csv", "date", "2024-1-2", False), ("csv", "date", "2024", False),
        ("csv", "date", "2024-01-02 03:04:05", False), ("csv", "timestamp", "2024-1-2 3:4:5", False),
        ("csv", "timestamp", "2024-01-02 03:04:05 Europe/Paris", False), ("csv", "int", "+1", False),
        ("json", "string", "5", False), ("json", "string", '{"y":1}', False), ("json", "double", '"nan"', True),
        ("json", "timestamp", "1704164645", False), ("json", "decimal(10,2)", "1.555", False),
    ],
)  # fmt: skip
def test_what_is_an_error_here(spark: Any, tmp_path: Path, name: str, kind: str, text: str, null: bool) -> None:  # noqa: PLR0917
    path = lines(tmp_path / "f", f'{{"k":1,"x":{text}}}' if name == "json" else f"1,{text}")
    assert null_in_spark(spark, path, name, f"k int, x {kind}") == null


TABLE = """select * from values
 (1, tinyint(1), smallint(-2), 9223372036854775807L, float(0.1), double('NaN'), cast(12.34 as decimal(10,2)),
  cast(1234567890123456789012345678.0123456789 as decimal(38,10)), 'üx', X'00ff', true, date'2024-01-02',
  timestamp'2024-01-02 03:04:05.123456', timestamp_ntz'2024-01-02 03:04:05.123456', array(1, null),
  map('k', timestamp'2024-01-02 03:04:05'),
  named_struct('p', timestamp'2024-11-03 05:30:00Z', 'q', array(date'2024-01-02')),
  interval '1 02:03:04.5' day to second),
 (2, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null),
 (3, tinyint(1), smallint(-2), -1L, float('-0.0'), double('-inf'), -0.01, -0.1, '', X'', false, date'1969-12-31',
  timestamp'1969-12-31 19:59:59.999999', timestamp_ntz'1700-01-02 03:04:05', array(), map(),
  named_struct('p', null, 'q', null), interval '-1' day)
 as t(id, b, s, l, f, d, c, cc, t, bin, y, day, ts, ntz, arr, m, st, dsi)"""


@pytest.mark.parametrize(
    ("name", "conf"),
    [
        ("parquet", {"spark.sql.parquet.outputTimestampType": "INT96"}),
        ("parquet", {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}),
        ("parquet", {"spark.sql.parquet.writeLegacyFormat": "true"}),
        ("orc", {}),
    ],
)
def test_what_spark_writes(spark: Any, name: str, conf: dict[str, str], tmp_path: Path) -> None:
    before = {key: spark.conf.get(key) for key in conf}
    for key, value in conf.items():
        spark.conf.set(key, value)
    try:
        df = spark.sql(TABLE).coalesce(1)
        df.write.format(name).save(str(tmp_path / "rows"))
        old = spark.sql(
            "select date'0001-01-01' day, timestamp'0001-01-01 00:00:00Z' a, timestamp'9999-12-31 00:00:00Z' z"
        )
        old.coalesce(1).write.format(name).save(str(tmp_path / "old"))
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)
    ddl = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in df.schema)
    assert len(compare(spark, tmp_path / "rows", name, ddl)) == 3
    if name == "parquet":
        compare(spark, tmp_path / "old", name, "day date, a timestamp, z timestamp")
    else:  # Arrow has ORC's times in nanoseconds, and its first days by another calendar
        for column in ("day date", "a timestamp", "z timestamp"):
            with pytest.raises(BadInputError):
                compare(spark, tmp_path / "old", name, column)


@pytest.mark.parametrize("name", ["csv", "json"])
def test_text_that_spark_writes(spark: Any, name: str, tmp_path: Path) -> None:
    columns = "id, b, s, l, t, y, day, ts, ntz, c, cc, f" + (", arr, st" if name == "json" else "")
    df = spark.sql(TABLE).selectExpr(*columns.split(", ")).where("f is null or f = float(0.1)").coalesce(1)
    df.write.format(name).save(str(tmp_path / "rows"))
    ddl = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in df.schema)
    assert len(compare(spark, tmp_path / "rows", name, ddl)) == 2


def test_paths_as_spark_lists_them(spark: Any, tmp_path: Path) -> None:
    for name in ("a b", "a%20b", "a+b", "ü", "a#b?c"):
        lines(tmp_path / f"{name}.csv", name)
    found = spark.read.format("binaryFile").load(str(tmp_path)).select("path").collect()
    read = FileFormat("csv", pa.schema([("x", pa.string())]))
    rows = [batch["x"].to_pylist() for row in found for batch in read.read(row.path, ["x"], "files")]
    assert sorted(rows) == [["a b"], ["a#b?c"], ["a%20b"], ["a+b"], ["ü"]]


PIECES = ('"', "\\", ",", ";", "'", " ", "x", "\t", "ü", "NA", "#", '""', '\\"', "C:\\new", "null", "{", "NaN", "\n")
KINDS = (
    "k int, a string, i int, b string, d double, f float, c decimal(12,3), y boolean, day date, at timestamp, l long"
)
CSV_OPTIONS: tuple[dict[str, str], ...] = (
    {}, {"quoteAll": "true"}, {"escapeQuotes": "false"}, {"quote": "'"}, {"sep": ";", "header": "true"},
    {"sep": "\t", "escape": '"'}, {"nullValue": "NA"}, {"nullValue": "NA", "quoteAll": "true"}, {"emptyValue": "E"},
    {"compression": "gzip", "quote": "'", "escape": "'"}, {"nullValue": "", "quoteAll": "true", "header": "true"},
    {"ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false", "compression": "bzip2"},
)  # fmt: skip


def drawn(choice: random.Random, rows: int, pieces: Sequence[str] = PIECES) -> list[tuple[Any, ...]]:
    def text() -> str:
        return "".join(choice.choice(pieces) for _ in range(choice.randrange(6)))

    def row(key: int) -> tuple[Any, ...]:
        floats = (float("nan"), float("inf"), -float("inf"), -0.0, 1e300, 1e-7, choice.uniform(-1e6, 1e6))
        values = (
            text(), choice.randrange(-(2**31), 2**31), text(), choice.choice(floats), choice.randrange(1 << 20) / 8,
            Decimal(choice.randrange(-(10**12), 10**12)).scaleb(-3), choice.random() < 0.5,
            dt.date(1583, 1, 1) + dt.timedelta(choice.randrange(200_000)),
            dt.datetime(1900, 1, 1) + dt.timedelta(milliseconds=choice.randrange(10**13)),
            choice.randrange(-(2**63), 2**63),
        )  # fmt: skip
        return key, *(None if choice.random() < 0.15 else value for value in values)

    return [row(key) for key in range(rows)]


def both(spark: Any, path: Path, name: str, ddl: str, **options: str) -> tuple[list[Any], list[Any]]:
    """The rows of what Spark has written, by `FileFormat` and by Spark's reader."""
    schema = arrow_schema(st._parse_datatype_string(ddl), "files")
    said = {x: value for x, value in options.items() if x in OPTIONS[name]}
    if name in ("csv", "json"):
        said["timeZone"] = ZONE
    if name == "csv":
        said.setdefault("escape", "\\")
    read = FileFormat(name, schema, tuple(said.items()))
    files = sorted(path.glob("part-*"))
    ours = [row for file in files for batch in read.read(str(file), schema.names, "files") for row in batch.to_pylist()]
    for columns in (["k"], ["b", "k"], []):
        part = [row for file in files for batch in read.read(str(file), columns, "files") for row in batch.to_pylist()]
        assert list(map(repr, part)) == [repr({x: row[x] for x in columns}) for row in ours]
    theirs = spark.read.schema(ddl).options(**options).format(name).load(str(path)).toArrow().cast(schema)
    return ours, theirs.to_pylist()


@pytest.mark.parametrize("options", CSV_OPTIONS, ids=str)
def test_random_rows_that_spark_writes_to_csv(spark: Any, tmp_path: Path, options: dict[str, str]) -> None:
    """An escape outside quotes was none of Spark's, and nulls in quotes were errors or text."""
    rows = drawn(random.Random(str(options)), 2000)
    spark.createDataFrame(rows, KINDS).coalesce(1).write.options(**options).csv(str(tmp_path / "rows"))
    ours, theirs = both(spark, tmp_path / "rows", "csv", KINDS, multiLine="true", **options)
    assert len(ours) == len(theirs) == len(rows)
    for mine, other in zip(ours, theirs, strict=True):
        if "nullValue" not in options:  # "" is a null to Spark there
            mine = {x: value or (None if value == "" else value) for x, value in mine.items()}  # noqa: PLW2901
        assert repr(mine) == repr(other)


def test_random_rows_that_spark_writes_to_json_parquet_and_orc(spark: Any, tmp_path: Path) -> None:
    """NaN and infinities as text were refused in JSON."""
    rows = drawn(random.Random(7), 2000)
    df = spark.createDataFrame(rows, KINDS).selectExpr(
        "*", "array(d, f, null) more", "named_struct('a', b, 'd', d, 'deep', array(named_struct('f', f, 'a', a))) s",
        "cast(at as timestamp_ntz) n",
    ).coalesce(1)  # fmt: skip
    ddl = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in df.schema)
    for name in ("json", "parquet", "orc"):
        for compression in ("none", "zstd" if name != "json" else "gzip"):
            path = tmp_path / f"{name}-{compression}"
            df.write.option("compression", compression).format(name).save(str(path))
            read = ddl if name != "orc" else ddl.replace("`at` timestamp, ", "").replace(", `n` timestamp_ntz", "")
            ours, theirs = both(spark, path, name, read)
            assert len(ours) == len(rows)
            assert list(map(repr, ours)) == list(map(repr, theirs))
