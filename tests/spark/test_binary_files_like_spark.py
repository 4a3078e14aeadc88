"""Parquet and ORC as Spark reads them: any type in any other, declared as another, of any calendar, by any writer.

A declared type is read as Spark reads it, or refused: never with another value. ``SEED`` and ``ROUNDS`` in the
environment are for longer runs.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import types as st

from gpu_ops.errors import BadInputError
from gpu_ops.files.calendars import Calendar
from gpu_ops.files.columns import WrongError
from gpu_ops.files.formats import FileFormat
from gpu_ops.spark_types import arrow_schema

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

SEED = int(os.environ.get("SEED", "7"))
ROUNDS = int(os.environ.get("ROUNDS", "1"))
ZONES = (
    "America/Los_Angeles", "Asia/Shanghai", "Europe/Paris", "Africa/Monrovia", "UTC", "Asia/Kolkata", "America/Caracas",
    "Pacific/Apia", "Europe/Amsterdam", "Australia/Lord_Howe",
)  # fmt: skip
SECOND = 1_000_000
YEAR_1, YEAR_9999 = -62_135_424_000 * SECOND, 253_402_000_000 * SECOND
EDGES = [YEAR_1, YEAR_9999, -12_219_292_800 * SECOND, -2_208_988_800 * SECOND, 0, -1, -14_831_769_600 * SECOND]
LEAVES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(), "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "decimal(5,0)": pa.decimal128(5, 0),
    "decimal(9,2)": pa.decimal128(9, 2), "decimal(18,4)": pa.decimal128(18, 4), "decimal(38,10)": pa.decimal128(38, 10),
    "decimal(20,0)": pa.decimal128(20, 0), "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
}  # fmt: skip
NESTS = ("{}", "array<{}>", "map<string,{}>", "struct<a:int,X:{}>", "array<struct<X:map<int,array<{}>>>>")


@contextmanager
def conf(spark: Any, **values: str) -> Iterator[None]:
    """Settings of ``spark.sql`` for a while; a name's dots are two underscores."""
    names = {f"spark.sql.{name.replace('__', '.')}": value for name, value in values.items()}
    before = {name: spark.conf.get(name) for name in names}
    try:
        for name, value in names.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


@contextmanager
def zone_of_jvm(spark: Any, zone: str) -> Iterator[None]:
    zones = spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone(zone))
    try:
        yield
    finally:
        zones.setDefault(before)


def leaf(choice: random.Random, kind: pa.DataType, first: int, last: int, *, small: bool) -> Any:
    """A value, often an extreme one, of times from ``first`` to ``last`` in microseconds; integers for these."""
    t = pa.types
    if choice.random() < 0.15:
        return None
    if small and (t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)):
        return Decimal(choice.randrange(90)) if t.is_decimal(kind) else choice.randrange(100)
    if t.is_boolean(kind):
        return choice.random() < 0.5
    if t.is_integer(kind):
        most = 1 << (kind.bit_width - 1)
        return choice.choice([-most, most - 1, 0, 100, -100, choice.randrange(-most, most)])
    if t.is_floating(kind):
        value = choice.choice([float("nan"), float("inf"), -0.0, 1e30, choice.uniform(-1e6, 1e6)])
        return float(np.float32(value))
    if t.is_decimal(kind):
        most = 10**kind.precision - 1
        return Decimal(f"{choice.choice([most, -most, 0, choice.randrange(most)])}E-{kind.scale}")
    if t.is_string(kind):
        return choice.choice(["", "ü€\U0001f600", "1", "true", "2024-01-01", "x" * choice.randrange(40)])
    if t.is_binary(kind):
        return choice.choice([b"", b"abc", "ü".encode(), choice.randbytes(5)])
    micros = choice.choice([*(edge for edge in EDGES if first <= edge <= last), choice.randrange(first, last)])
    return micros // (86_400 * SECOND) if t.is_date(kind) else micros


def value(
    choice: random.Random, kind: pa.DataType, first: int = YEAR_1, last: int = YEAR_9999, *, small: bool = False
) -> Any:
    def inner(kind: pa.DataType) -> Any:
        return value(choice, kind, first, last, small=small)

    t = pa.types
    if not t.is_nested(kind):
        return leaf(choice, kind, first, last, small=small)
    if choice.random() < 0.1:
        return None
    if t.is_struct(kind):
        return {field.name: inner(field.type) for field in kind}
    items = range(choice.randrange(4))
    if t.is_map(kind):
        return [(f"k{n}" if t.is_string(kind.key_type) else n, inner(kind.item_type)) for n in items]
    return [inner(kind.value_type) for _ in items]


def counted(kind: pa.DataType) -> pa.DataType:
    """A type with integers for times, of which Python has fewer, and bytes for text."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_date(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) else kind


def column(choice: random.Random, ddl: str, rows: int, *ends: int, small: bool = False) -> pa.Array:
    kind = arrow_schema(st._parse_datatype_string(f"c {ddl}"), "files").field("c").type
    return pa.array([value(choice, kind, *ends, small=small) for _ in range(rows)], plain(kind)).cast(kind)


def plain(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_struct(kind):
        return pa.struct([(field.name, plain(field.type)) for field in kind])
    if t.is_map(kind):
        return pa.map_(plain(kind.key_type), plain(kind.item_type))
    return pa.list_(plain(kind.value_type)) if t.is_list(kind) else counted(kind)


def texts(table: pa.Table) -> list[str]:
    """Rows for comparison: NaN is equal to itself, zeros are not, and times may be any."""
    kinds = [plain(kind) for kind in table.schema.types]
    columns = [part.combine_chunks().cast(kind) for part, kind in zip(table.columns, kinds, strict=True)]
    return [repr(row) for row in pa.Table.from_arrays(columns, names=table.schema.names).to_pylist()]


def ours(folder: Path, name: str, ddl: str, **options: str) -> list[str] | None:
    """Rows of a folder's files; None where they are refused."""
    schema = arrow_schema(st._parse_datatype_string(ddl), "files")
    read = FileFormat(name, schema, tuple(options.items()))
    files = sorted(folder.glob("part-*"))
    try:
        batches = [batch for file in files for batch in read.read(str(file), schema.names, "files")]
    except BadInputError as error:
        return None if error.column in schema.names else [str(error)]
    return texts(pa.Table.from_batches(batches, schema))


def sparks(spark: Any, folder: Path, name: str, ddl: str, **options: str) -> list[str] | None:
    """The same by Spark's reader; None where it has an error."""
    declared = st._parse_datatype_string(ddl)
    try:
        rows = spark.read.schema(declared).options(**options).format(name).load(str(folder)).toArrow()
    except (Py4JJavaError, PySparkException):
        return None
    return texts(rows.cast(arrow_schema(declared, "files")))


def agree(spark: Any, folder: Path, name: str, ddls: Iterable[str], more: Collection[str] = ()) -> int:
    """Columns that are read as Spark reads them, each asked by its DDL, counted; others are refused.

    Args:
        spark: the session.
        folder: of the files.
        name: of the format.
        ddls: of columns; one is read once.
        more: those of them that we may read where Spark has an error.
    """
    mine = {ddl: rows for ddl in ddls if (rows := ours(folder, name, ddl, missingColumns="null")) is not None}
    sure = [ddl for ddl in mine if ddl not in more]
    if sure and sparks(spark, folder, name, ", ".join(sure)) == ours(folder, name, ", ".join(sure)):
        alone = [ddl for ddl in mine if ddl in more and (ROUNDS > 1 or hash_of(ddl) % 8 == 0)]
    else:
        alone, sure = list(mine), []
    equal = len(sure)
    for ddl in alone:
        theirs = sparks(spark, folder, name, ddl)
        assert mine[ddl] == theirs or (theirs is None and ddl in more), (folder.name, name, ddl)
        equal += mine[ddl] == theirs
    return equal


def hash_of(text: str) -> int:
    return zlib.crc32(f"{SEED}{text}".encode())


def narrower(kind: str, other: str) -> bool:
    """Whether values that Spark does not read as another type may fit it, which we look at."""
    both = all(x.startswith(("tinyint", "smallint", "int", "bigint", "decimal")) for x in (kind, other))
    return both and kind != other and not other.startswith("interval")


@pytest.mark.parametrize("extreme", [True, False])
@pytest.mark.parametrize("name", ["parquet", "orc"])
def test_types_declared_as_others(spark: Any, tmp_path: Path, name: str, *, extreme: bool) -> None:
    """Each type of Spark's, nested in some way, read as any other: as Spark reads it, or refused.

    Besides Spark we read integers and decimals as narrower ones, as long as their values fit.
    """
    for number in range(ROUNDS):
        choice = random.Random(f"{SEED} {name} {extreme} {number}")
        ends = (-2_000_000_000 * SECOND, 9_000_000_000 * SECOND) if name == "orc" else (YEAR_1, YEAR_9999)
        ends = ends if extreme else (0, 4_000_000_000 * SECOND)
        kinds, path, equal = list(LEAVES), tmp_path / str(number), 0
        nests = [choice.choice(NESTS) for _ in kinds]
        written = [f"c{i} {nest.format(kind)}" for i, (kind, nest) in enumerate(zip(kinds, nests, strict=True))]
        table = pa.table(
            {
                f"c{i}": column(choice, ddl.split(" ", 1)[1], 25, *ends, small=not extreme)
                for i, ddl in enumerate(written)
            }
        )
        spark.createDataFrame(table, ", ".join(written)).coalesce(1).write.format(name).save(str(path))
        shifts = range(len(kinds)) if ROUNDS > 1 else (0, *choice.sample(range(1, len(kinds)), 3))
        for shift in shifts:
            others = [kinds[(i + shift) % len(kinds)] for i in range(len(kinds))]
            ddls = [f"c{i} {nest.format(other)}" for i, (nest, other) in enumerate(zip(nests, others, strict=True))]
            more = [ddl for ddl, kind, other in zip(ddls, kinds, others, strict=True) if narrower(kind, other)]
            equal += agree(spark, path, name, ddls, more)
        assert equal >= len(kinds)


TIMED = ("date", "timestamp", "timestamp_ntz")


@pytest.mark.parametrize("int96", ["INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"])
def test_calendars_of_spark(spark: Any, tmp_path: Path, int96: str) -> None:
    """Spark 2 counted in the Julian calendar before 1582; Arrow was six days off in the year 1001."""
    for number in range(2 * ROUNDS):
        choice = random.Random(f"{SEED} {int96} {number}")
        modes = {
            f"parquet__{name}RebaseModeInWrite": choice.choice(["LEGACY", "CORRECTED"])
            for name in ("datetime", "int96")
        }
        modes["parquet__datetimeRebaseModeInWrite"] = ["LEGACY", "CORRECTED"][number % 2]
        kinds = {f"{kind}_{n}": nest.format(kind) for kind in TIMED for n, nest in enumerate(NESTS)}
        table = pa.table({name: column(choice, ddl, 30) for name, ddl in kinds.items()})
        path, ddl = tmp_path / f"{int96}{number}", ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        with conf(spark, session__timeZone=choice.choice(ZONES), parquet__outputTimestampType=int96, **modes):
            spark.createDataFrame(table, ddl).coalesce(1).write.parquet(str(path))
        with zone_of_jvm(spark, choice.choice(ZONES)):
            theirs = sparks(spark, path, "parquet", ddl)
        assert theirs is not None
        assert ours(path, "parquet", ddl) == theirs


def test_calendars_of_other_writers(spark: Any, tmp_path: Path) -> None:
    """A file that does not say its calendar is of the one that the options say, in the zone of the JVM."""
    kinds = {f"{kind}_{n}": nest.format(kind) for kind in TIMED for n, nest in enumerate(NESTS)}
    for number in range(3 * ROUNDS):
        choice = random.Random(f"{SEED} {number}")
        of_range = choice.choice([(YEAR_1, YEAR_9999), (-2_100_000_000 * SECOND, YEAR_9999)])
        table = pa.table({name: column(choice, ddl, 30, *of_range) for name, ddl in kinds.items()})
        path = tmp_path / str(number)
        path.mkdir()
        int96 = number % 4 == 0
        pq.write_table(table, path / "part-0", use_deprecated_int96_timestamps=int96, store_schema=number % 3 == 0)
        modes = {
            f"{name}RebaseMode": choice.choice(["LEGACY", "CORRECTED", "EXCEPTION"]) for name in ("datetime", "int96")
        }
        zone = choice.choice(ZONES)
        with zone_of_jvm(spark, zone):
            for ddl in [f"{name} {kind}" for name, kind in kinds.items()]:
                mine = ours(path, "parquet", ddl, timeZone=zone, **modes)
                assert mine == sparks(spark, path, "parquet", ddl, **modes), (number, ddl, int96, modes)


def test_rebasing_in_every_zone(spark: Any) -> None:
    rebase = spark._jvm.org.apache.spark.sql.catalyst.util.RebaseDateTime
    choice = random.Random(SEED)
    zones, refused = spark._jvm.java.time.ZoneId.getAvailableZoneIds(), 0
    days = [choice.randrange(-719_200, 10_000) for _ in range(300)]
    made = Calendar("LEGACY").days(pa.array(days, pa.int32()).cast(pa.date32()))
    assert made.cast(pa.int32()).to_pylist() == [rebase.rebaseJulianToGregorianDays(day) for day in days]
    for zone in [*choice.sample(sorted(zones), 30 * ROUNDS), "+08:00", "-03:30", "GMT-03:30", "GMT", "Z"]:
        micros = [choice.choice([choice.randrange(YEAR_1, 0), choice.choice(EDGES)]) for _ in range(20)]
        try:
            made = Calendar("LEGACY", zone).instants(pa.array(micros).cast(pa.timestamp("us")))
        except WrongError:  # a zone that is younger than Spark's table is refused
            refused += 1
            continue
        theirs = [rebase.rebaseJulianToGregorianMicros(zone, x) for x in micros]
        assert made.cast(pa.int64()).to_pylist() == theirs, zone
    assert refused < 10 * ROUNDS


def test_timestamps_of_orc_in_every_zone(spark: Any, tmp_path: Path) -> None:
    """Those of summers after 2037 were an hour off, where clocks are changed."""
    choice = random.Random(SEED)
    zones = sorted(available_timezones() & set(spark._jvm.java.time.ZoneId.getAvailableZoneIds()))
    for number, zone in enumerate(["America/New_York", "Europe/Paris", *choice.sample(zones, 4 * ROUNDS)]):
        clock, path = ZoneInfo(zone), tmp_path / str(number)
        times = [dt.datetime.fromtimestamp(choice.randrange(0, 9_000_000_000), clock) for _ in range(300)]
        once = [at for at in times if at.utcoffset() == at.replace(fold=1 - at.fold).utcoffset()]
        table = pa.table({"at": pa.array(once, pa.timestamp("us", "UTC"))})
        with zone_of_jvm(spark, zone):
            spark.createDataFrame(table, "at timestamp").coalesce(1).write.orc(str(path))
            theirs = sparks(spark, path, "orc", "at timestamp")
        assert theirs is not None
        assert ours(path, "orc", "at timestamp", timeZone=zone) == theirs, zone


def test_names_of_columns_and_fields(spark: Any, tmp_path: Path) -> None:
    """A struct's field that differed in case was null without a word, and a column was missing."""
    import pyarrow.orc as porc

    words = ("a", "A", "b", "B", "Ünicode", "üNICODE", "x.y", "i d")
    for number in range(4 * ROUNDS):
        choice = random.Random(f"{SEED} {number}")

        def struct(depth: int, taken: list[str], choice: random.Random = choice) -> pa.StructType:
            inner = [choice.choice(words) for _ in range(choice.randrange(1, 4))]
            within = struct(depth - 1, inner) if depth else pa.int32()
            kinds = [pa.int32(), within, pa.list_(within), pa.map_(pa.string(), within)]
            return pa.struct([(name, choice.choice(kinds)) for name in dict.fromkeys(taken)])

        there = struct(2, [choice.choice(words) for _ in range(4)])
        rows = pa.array([value(choice, there) or {} for _ in range(8)], there)
        table = pa.Table.from_arrays(rows.flatten(), schema=pa.schema(list(there)))

        def declared(kind: pa.DataType, choice: random.Random = choice) -> str:
            t = pa.types
            if t.is_struct(kind):
                names = [choice.choice([f.name, f.name, f.name.swapcase(), "gone"]) for f in kind]
                fields = dict(zip(names, (declared(field.type) for field in kind), strict=True))
                alone = {name.lower(): (name, ddl) for name, ddl in fields.items()}
                return f"struct<{','.join(f'`{name}`:{ddl}' for name, ddl in alone.values())}>"
            if t.is_map(kind):
                return f"map<string,{declared(kind.item_type)}>"
            return f"array<{declared(kind.value_type)}>" if t.is_list(kind) else "int"

        ddl = declared(there)[len("struct<") : -1]
        for name in ("parquet", "orc"):
            path = tmp_path / f"{name}{number}"
            path.mkdir()
            (pq if name == "parquet" else porc).write_table(table, str(path / "part-0"))
            for sensitive in ("true", "false"):
                with conf(spark, caseSensitive=sensitive):
                    theirs = sparks(spark, path, name, ddl)
                mine = ours(path, name, ddl, caseSensitive=sensitive, missingColumns="null")
                strict = ours(path, name, ddl, caseSensitive=sensitive)
                assert strict in (mine, None)
                # in an ORC file's structs Spark takes either of two fields that differ in case
                either = name == "orc" and mine is None and sensitive == "false"
                assert mine == theirs or either, (name, sensitive, ddl, str(table.schema))


@pytest.mark.slow
def test_files_of_duckdb_and_of_arrow(spark: Any, tmp_path: Path) -> None:
    """Types that Spark has not, and ways of writing those that it has: as Spark reads them, or refused."""
    import duckdb

    of_duckdb = {
        "uuid": "'00112233-4455-6677-8899-aabbccddeeff'::UUID",
        "hugeint": "170141183460469231731687303715884105727::HUGEINT",
        "utinyint": "255::UTINYINT", "usmallint": "65535::USMALLINT", "uint": "4294967295::UINTEGER",
        "ubigint": "18446744073709551615::UBIGINT", "seconds": "TIMESTAMP_S '2026-01-01 00:00:01'",
        "millis": "TIMESTAMP_MS '1500-01-01 00:00:01.5'", "nanos": "TIMESTAMP_NS '2026-01-01 00:00:00.000001001'",
        "zoned": "TIMESTAMPTZ '0001-06-01 00:00:00+00'", "local": "TIMESTAMP '9999-12-30 00:00:00'",
        "time": "TIME '01:02:03'", "interval": "INTERVAL 1 DAY", "bits": "'101'::BIT", "blob": "'abc'::BLOB",
        "json": "'{}'::JSON", "enum": "'a'::ENUM('a', 'b')", "decimal": "1.5::DECIMAL(18, 3)",
        "day": "DATE '1001-01-01'",
        "list": "[1, NULL]", "struct": "{'A': 1, 'b': [{'c': DATE '1400-01-01'}]}", "map": "MAP {'k': 1.5::FLOAT}",
        "array": "[1, 2]::INTEGER[2]", "float": "1.5::FLOAT", "boolean": "true",
    }  # fmt: skip
    nested = (
        "array<int>",
        "array<bigint>",
        "struct<a:int,B:array<struct<C:date>>>",
        "struct<b:array<struct<c:timestamp_ntz>>>",
        "map<string,double>",
    )
    read = 0
    tables = {"duckdb": tmp_path / "duckdb"}
    tables["duckdb"].mkdir()
    with duckdb.connect() as connection:
        columns = ", ".join(f'{sql} AS "{name}"' for name, sql in of_duckdb.items())
        connection.sql(f"COPY (SELECT {columns}) TO '{tables['duckdb'] / 'part-0'}' (FORMAT parquet)")
    arrow = pa.table({
        "d64": pa.array([86_400_000, None], pa.date64()), "t32": pa.array([1, None], pa.time32("ms")),
        "days": pa.array([1, None], pa.duration("us")), "half": pa.array([np.float16(1.5), None], pa.float16()),
        "large": pa.array(["x", None], pa.large_string()), "view": pa.array(["x", None], pa.string_view()),
        "coded": pa.array(["x", None]).dictionary_encode(), "fixed": pa.array([b"ab", None], pa.binary(2)),
        "fixed_list": pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), "nothing": pa.nulls(2),
        "nanos": pa.array([10**6, None], pa.timestamp("ns")),
        "tokyo": pa.array([1000, None], pa.timestamp("us", "Asia/Tokyo")),
        "seconds": pa.array([1, None], pa.timestamp("s")), "u32": pa.array([2**32 - 1, None], pa.uint32()),
        "dec256": pa.array([Decimal("1.5"), None], pa.decimal256(40, 2)),
        "dec": pa.array([Decimal("1.5"), None], pa.decimal128(5, 2)),
    })  # fmt: skip
    ways: list[dict[str, Any]] = [
        {}, {"version": "1.0"}, {"store_schema": False}, {"use_deprecated_int96_timestamps": True}, {"flavor": "spark"},
        {"coerce_timestamps": "ms"}, {"data_page_version": "2.0", "use_dictionary": False},
        {"use_compliant_nested_type": False, "store_decimal_as_integer": True},
    ]  # fmt: skip
    for number, way in enumerate(ways):
        tables[str(number)] = tmp_path / str(number)
        tables[str(number)].mkdir()
        pq.write_table(arrow, tables[str(number)] / "part-0", **way)
    for path in tables.values():
        for kind in (*LEAVES, *nested):
            ddls = [f"`{name}` {kind}" for name in pq.read_schema(path / "part-0").names]
            anything = kind.startswith(("decimal", "tinyint", "smallint", "int", "bigint"))
            more = [ddl for ddl in ddls if anything or ddl in MORE or ddl.startswith("`nothing`")]
            read += agree(spark, path, "parquet", ddls, more)
    assert read > 30


MORE = {"`nanos` timestamp", "`nanos` timestamp_ntz", "`half` float", "`half` double"}
"""What we read and Spark does not: it loses nothing."""
