"""Values at the ends of their types, into Postgres by a view and out by `scan once`, and by Postgres's own text."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as st
from rich.console import Console

from gpu_ops.errors import BadInputError, DatabaseError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.spark.database import Connection
from gpu_ops.spark.sinks.postgres import Cast, staged_type, types
from gpu_ops.spark.sources.jdbc import read_table
from services.postgres import OPTIONS, Postgres, changelog, view_of

pytestmark = [pytest.mark.spark, pytest.mark.services]

DAYS = ("0001-01-01", "0099-12-31", "1001-02-28", "1582-10-04", "1582-10-10", "1582-10-15", "1900-02-28", "9999-12-31")
TIMES = tuple(f"{day} {time}" for day in DAYS for time in ("00:00:00", "12:34:56.000001", "23:59:59.999999"))
NINES = "99999999999999999999.999999999999999999"
VALUES: dict[str, tuple[str, ...]] = {
    "TINYINT": ("-128", "127"), "SMALLINT": ("-32768", "32767"), "INT": ("-2147483648", "2147483647"),
    "BIGINT": ("-9223372036854775808", "9223372036854775807", "0"), "BOOLEAN": ("true", "false"),
    "DOUBLE": ("NaN", "Infinity", "-Infinity", "4.9E-324", "1.7976931348623157E308", "0.1", "0.0", "1e22"),
    "FLOAT": ("NaN", "Infinity", "-Infinity", "1.4E-45", "3.4028235E38", "0.1"),
    "DECIMAL(38, 18)": (NINES, f"-{NINES}", "0.000000000000000001", "1.25"),
    "DECIMAL(38, 0)": ("9" * 38, "-1"), "DECIMAL(5, 5)": ("0.00001", "-0.99999"),
    "STRING": ("", "null", "ü%\\\"", "a  ", "𝄞"), "BINARY": ("", "\\x00", "abc"),
    "DATE": (*DAYS, "10000-01-01"), "TIMESTAMP_NTZ": TIMES, "TIMESTAMP": TIMES,
}  # fmt: skip
"""Text of values, by Spark's type; each may be null, too."""

KEPT = {"TIMESTAMP": ("TIMESTAMPTZ", "TIMESTAMP"), "TIMESTAMP_NTZ": ("TIMESTAMP",), "TINYINT": ("INT",),
        "BIGINT": ("BIGINT", "NUMERIC"), "DOUBLE": ("FLOAT8", "NUMERIC"), "FLOAT": ("REAL", "NUMERIC")}  # fmt: skip
"""Types of a table that was there before."""

ZONES = ("Asia/Shanghai", "America/New_York", "UTC", "+05:30", "Europe/Amsterdam")


def literal(choice: random.Random, kind: str) -> str:
    """A value as Spark's SQL spells it."""
    if kind.startswith("ARRAY"):
        within = kind[6:-1]
        items = ", ".join(literal(choice, within) for _ in range(choice.randrange(4)))
        return "CAST(NULL AS " + kind + ")" if choice.random() < 0.2 else f"CAST(array({items}) AS {kind})"
    if choice.random() < 0.15:
        return f"CAST(NULL AS {kind})"
    text = choice.choice(VALUES[kind])
    if kind in {"STRING", "BINARY"}:
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"CAST('{escaped}' AS {kind})"
    return f"CAST('{text}' AS {kind})"


SEEDS = sorted({*range(*map(int, os.environ.get("GPU_JOIN_POSTGRES", "4").split(":"))), 5, 11, 13})
"""The last three have arrays of bytes, the year before 1 in UTC, and arrays of instants of 1582: each was wrong."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_values_are_the_same_out_and_in(spark: Any, postgres: Postgres, seed: int) -> None:
    """Through micro-batches that are repeated; NaN and the infinities are equal to themselves."""
    choice = random.Random(seed)
    zone = choice.choice(ZONES)
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        kinds = [choice.choice(list(VALUES)) for _ in range(6)] + [f"ARRAY<{choice.choice(list(VALUES))}>"]
        kinds[-1] = kinds[-1].replace("TINYINT", "INT")
        columns = {f"c{n}": kind for n, kind in enumerate(kinds)}
        keyed = choice.random() < 0.6
        if choice.random() < 0.5:
            own = {x: choice.choice(KEPT[kind]) for x, kind in columns.items() if kind in KEPT}
            if len(own) < len(columns):
                view_of(postgres, "t", "id" if keyed else None)(
                    spark.createDataFrame(
                        [], ", ".join(["row_kind STRING", "id BIGINT", *(f"{x} {kind}" for x, kind in columns.items())])
                    ),
                    0,
                )
                for x, kind in own.items():
                    if not (kind == "NUMERIC" and columns[x] == "FLOAT"):
                        postgres.run(f"ALTER TABLE t ALTER {x} TYPE {kind}")
        current: dict[int, list[str]] = {}
        view = view_of(postgres, "t", "id" if keyed else None)
        for number in (1, 2, 3):
            changes = []
            for of in choice.sample(range(30), 14):
                gone = current.pop(of, None)
                if gone is not None:
                    changes.append(["'-D'", str(of), *gone])
                if gone is None or choice.random() < 0.7:
                    current[of] = [literal(choice, kind) for kind in kinds]
                    changes.append(["'+I'", str(of), *current[of]])
            names = ["row_kind", "id", *columns]
            batch = _frame(spark, names, changes)
            for _ in range(choice.choice((1, 2))):
                view(batch, number)
            folded = _frame(spark, names[1:], [[str(x), *row] for x, row in current.items()])
            declared = [("id", "BIGINT"), *columns.items()]
            options = {**OPTIONS, "url": f"jdbc:{postgres.url}", "dbtable": "t"}
            read = read_table(spark, options, declared)
            found, expected = _shown(read), _shown(folded)
            assert found == expected, f"{zone} {columns} {set(found) ^ set(expected)}"
            for x, kind in columns.items():
                if kind in ("DATE", "TIMESTAMP_NTZ", "STRING", "BIGINT", "DECIMAL(38, 18)"):
                    text = [
                        (str(a), b)
                        for a, b in folded.selectExpr("id", f"trim(LEADING '+' FROM CAST({x} AS STRING))").collect()
                    ]
                    assert postgres.rows(f"SELECT id, {x}::text FROM t") == sorted(text, key=repr), (zone, x, kind)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def _frame(spark: Any, names: list[str], rows: list[list[str]]) -> Any:
    named = [", ".join(f"{value} AS {name}" for name, value in zip(names, row, strict=True)) for row in rows]
    return spark.sql(" UNION ALL ".join(f"SELECT {row}" for row in named))


def _shown(df: Any) -> list[str]:
    kinds = dict(df.dtypes)
    values = [f"hex({x})" if kinds[x] == "binary" else f"CAST({x} AS STRING)" for x in df.columns]
    return sorted(map(repr, df.selectExpr(*values).collect()))


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Shanghai"])
def test_instants_are_exact_by_the_old_time_parser_too(spark: Any, postgres: Postgres, zone: str) -> None:
    """Clocks that skip an hour and have one twice, the first and last years; in arrays and from other types."""
    settings = {"spark.sql.session.timeZone": zone, "spark.sql.legacy.timeParserPolicy": "LEGACY"}
    before = {x: spark.conf.get(x) for x in settings}
    postgres.run("CREATE TABLE t (id BIGINT, x TIMESTAMPTZ, l TIMESTAMPTZ[], n TIMESTAMPTZ, d TIMESTAMPTZ)")
    micros = [
        1710037800123456, 1730609999999999, 1730613599999999, -1, 0, -62135568000000000, 253402300799999999,
        9223371331200000000, None,
    ]  # fmt: skip
    instants = ", ".join(f"({n}, CAST({x} AS BIGINT))".replace("None", "NULL") for n, x in enumerate(micros))
    values = "id, timestamp_micros(m) AS x, array(timestamp_micros(m), NULL) AS l"
    days = "TIMESTAMP_NTZ'2024-07-01 12:00:00.000001' AS n, DATE'0001-01-02' AS d"
    try:
        for x, setting in settings.items():
            spark.conf.set(x, setting)
        batch = spark.sql(f"SELECT '+I' AS row_kind, {values}, {days} FROM VALUES {instants} AS v (id, m)")
        view_of(postgres, "t")(batch, 0)
        times = "TIMESTAMP_NTZ'2024-07-01 12:00:00.000001'", "DATE'0001-01-02'"
        micro = "CAST(unix_micros(CAST({} AS TIMESTAMP)) AS STRING)"
        other = spark.sql(f"SELECT {', '.join(map(micro.format, times))}").first()
    finally:
        for x, setting in before.items():
            spark.conf.set(x, setting)
    micro = "(extract(epoch FROM {}) * 1000000)::bigint::text"
    shown = ", ".join(map(micro.format, ("x", "l[1]", "n", "d")))
    texts = [None if x is None else str(x) for x in micros]
    expected = [(str(n), text, text, *other) for n, text in enumerate(texts)]
    assert postgres.rows(f"SELECT id, {shown} FROM t") == sorted(expected, key=repr)


REFUSED = [
    ("DOUBLE", "1.25", "NUMERIC(10, 1)"), ("DOUBLE", "1.25", "INTEGER"), ("DECIMAL(10, 2)", "1.25", "NUMERIC(10, 1)"),
    ("DECIMAL(10, 2)", "1.25", "INTEGER"), ("DECIMAL(12, 2)", "123456789.5", "NUMERIC(5, 2)"),
    ("BIGINT", "70000", "SMALLINT"),
    ("BIGINT", "9007199254740993", "FLOAT8"), ("DOUBLE", "0.1", "REAL"), ("DOUBLE", "NaN", "INTEGER"),
    ("STRING", "abc  ", "VARCHAR(3)"), ("STRING", "abcd", "CHAR(3)"), ("STRING", "1.25", "NUMERIC(10, 1)"),
    ("STRING", "2024-05-06 07:08:09", "DATE"), ("STRING", "n" * 70, "NAME"), ("STRING", "10:00:00.5", "TIME(0)"),
    ("TIMESTAMP_NTZ", "2024-05-06 07:08:09", "DATE"), ("TIMESTAMP", "2024-05-06 07:08:09.5+08:05:43", "TIMESTAMPTZ(0)"),
    ("TIMESTAMP_NTZ", "2024-05-06 07:08:09.123456", "TIMESTAMP(3)"), ("STRING", "x", "UUID"),
    ("STRING", "2024-01-01 00:00:00+02", "TIMESTAMP"), ("STRING", "2024-01-01T00:00:00Z", "TIMESTAMP"),
    ("STRING", "2024-01-01 00:00:00 Asia/Tokyo", "TIMESTAMP"), ("STRING", "2024-01-01 00:00 PST", "TIMESTAMP(3)"),
    ("STRING", "2024-01-01 00:00:00.1234567", "TIMESTAMP"), ("STRING", "2024-01-01 00:00:00.0000001Z", "TIMESTAMPTZ"),
    ("STRING", "2024-01-01 00:00:00+02", "DATE"), ("STRING", "2024-01-01 00:00:00.0000001", "DATE"),
    ("STRING", "10:00:00+02", "TIME"), ("STRING", "2024-01-01 10:00:00", "TIME"),
    ("STRING", "10:00:00.0000001", "TIME"),
    ("STRING", "10:00:00.0000001+02", "TIMETZ"), ("STRING", "now", "TIMESTAMP"), ("STRING", "today", "DATE"),
    ("STRING", "2024-01-01 00:00:00+02", "zoneless"), ("STRING", '{"2024-01-01 00:00:00+02"}', "TIMESTAMP[]"),
    ("ARRAY<STRING>", '{NULL,"2024-01-01 00:00:00 UTC"}', "TIMESTAMP[]"),
    ("ARRAY<STRING>", '{"2024-05-06 07:08:09"}', "DATE[]"), ("STRING", "{", "JSONB"),
    ("STRING", "abcd", "three"), ("BIGINT", "-1", "counted"), ("ARRAY<DOUBLE>", "{1.25}", "INTEGER[]"),
]  # fmt: skip
TAKEN = [
    ("DOUBLE", "1.5", "NUMERIC(10, 1)", "1.5"), ("DOUBLE", "0.30000000000000004", "NUMERIC", "0.30000000000000004"),
    ("DECIMAL(10, 2)", "3.00", "INTEGER", "3"), ("BIGINT", "5", "NUMERIC(3, 1)", "5.0"),
    ("STRING", "ab", "CHAR(3)", "ab "),
    ("STRING", "1.50", "NUMERIC(10, 1)", "1.5"), ("STRING", "ABCDEFAB-0000-0000-0000-000000000000", "UUID",
     "abcdefab-0000-0000-0000-000000000000"), ("TIMESTAMP_NTZ", "2024-05-06 00:00:00", "DATE", "2024-05-06"),
    ("STRING", "abc", "three", "abc"), ("DATE", "1582-10-10", "TEXT", "1582-10-10"), ("BIGINT", "7", "VARCHAR(3)", "7"),
    ("TIMESTAMP", "1900-01-01 00:00:00", "TIMESTAMP", "1900-01-01 00:00:00"), ("STRING", "{ }", "JSON", "{ }"),
    ("STRING", "2024-01-01T10:00:00.12345600", "TIMESTAMP", "2024-01-01 10:00:00.123456"),
    ("STRING", "2024-01-01", "TIMESTAMP", "2024-01-01 00:00:00"), ("STRING", "-infinity", "TIMESTAMP", "-infinity"),
    ("STRING", "2024-01-01 10:00", "zoneless", "2024-01-01 10:00:00"), ("STRING", " 2024-1-02 ", "DATE", "2024-01-02"),
    ("STRING", "10:00:00.500", "TIME", "10:00:00.5"), ("STRING", "10:00:00+02", "TIMETZ", "10:00:00+02"),
    ("STRING", "2024-01-01 10:00:00.5+02:00", "TIMESTAMPTZ", "2024-01-01 08:00:00.5+00"),
    ("ARRAY<STRING>", '{NULL,"2024-01-01 00:00:00"}', "TIMESTAMP[]", '{NULL,"2024-01-01 00:00:00"}'),
    ("TIMESTAMP", "1900-01-01 00:00:00+08:05:43", "TIMESTAMPTZ", "1899-12-31 15:54:17+00"),
]  # fmt: skip


def test_a_value_that_the_type_cannot_hold_is_noticed(spark: Any, postgres: Postgres) -> None:
    """What is the same value in the type of the view's column is taken; else there is a sample, or the cast fails."""
    postgres.run(
        "CREATE DOMAIN three AS VARCHAR(3)",
        "CREATE DOMAIN counted AS BIGINT CHECK (VALUE >= 0)",
        "CREATE DOMAIN zoneless AS TIMESTAMP",
    )
    database = Connection(spark, f"jdbc:{postgres.url}", OPTIONS, "view t")
    database.execute("SET TIME ZONE 'UTC'")
    for n, (kind, text, kept, *shown) in enumerate([*REFUSED, *TAKEN]):
        (field,) = st.StructType.fromDDL(f"x {kind}")
        staged = st.StructType([st.StructField("x", staged_type(field.dataType))])
        database.create(f"s{n}", spark._jsparkSession.parseDataType(staged.json()))
        database.execute(f"CREATE TABLE t{n} (x {kept})", f"INSERT INTO s{n} VALUES ('{text}')")
        of = types(database, f"s{n}")["x"].whole
        cast = Cast("x", "x", field.dataType, of, types(database, f"t{n}")["x"])
        if shown:
            assert not cast.needed or database.rows(f"SELECT {cast.sample} FROM s{n}") == [("None",)], (
                kind,
                text,
                kept,
            )
            database.execute(f"INSERT INTO t{n} SELECT {cast.value} FROM s{n}")
            assert database.rows(f"SELECT x FROM t{n}") == [(shown[0],)], (kind, text, kept)
            continue
        state = "22"
        try:
            sample = database.rows(f"SELECT {cast.sample} FROM s{n}")
        except DatabaseError as error:
            sample, state = [], error.state
        assert sample != [("None",)], (kind, text, kept)
        assert state[:2] in {"22", "23"}, (kind, text, kept, state)
    database.close()


def test_a_value_that_the_view_does_not_hold_is_an_error(spark: Any, postgres: Postgres) -> None:
    """It names the column and the value, and nothing is written."""
    postgres.run("CREATE TABLE t (id BIGINT, n NUMERIC(10, 1), d DATE, s TEXT)")
    view = view_of(postgres, "t")
    values = {"n": "1.5D", "d": "DATE'2024-05-06'", "s": "'a'"}
    for number, (column, value, message) in enumerate([
        ("n", "1.25D", r"is of type numeric\(10,1\), which would make another value of it \(for example '1.25'\)"),
        ("d", "CAST('-0044-03-15' AS DATE)", r"keeps no day before the year 1 \(for example '-0044-03-15'\)"),
        ("s", "concat('a', char(0))", "keeps no text with the character NUL"),
    ]):  # fmt: skip
        row = {**values, column: value}
        chosen = ", ".join(f"{x} AS {name}" for name, x in row.items())
        batch = spark.sql(f"SELECT '+I' AS row_kind, CAST(1 AS BIGINT) AS id, {chosen}")
        with pytest.raises(BadInputError, match=rf"column '{column}': view t.*{message}"):
            view(batch, number)
    assert postgres.rows("SELECT * FROM t") == []


@pytest.mark.parametrize("key", ["item", None])
def test_texts_that_are_equal_to_the_view(spark: Any, postgres: Postgres, key: Any) -> None:
    """By the column's collation, or its type: two such keys are an error, two such rows one with their count."""
    count = "" if key else ", gpu_ops_count BIGINT"
    postgres.run(
        "CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
        f"CREATE TABLE t (item TEXT COLLATE folding, n CHAR(4){count})",
    )
    batch = changelog(spark, "item STRING, n STRING", ("+I", "a", "x"), ("+I", "A", "x "))
    if key:
        with pytest.raises(BadInputError, match="two keys of the changelog are one in the types of view t"):
            view_of(postgres, "t", key)(batch, 0)
        return
    view = view_of(postgres, "t", key)
    view(batch, 0)
    assert postgres.rows("SELECT gpu_ops_count FROM t") == [("2",)]
    view(changelog(spark, "item STRING, n STRING", ("-D", "A", "x "), ("-D", "a", "x")), 1)
    assert postgres.rows("SELECT * FROM t") == []


JOB = """
CREATE TABLE rows (op STRING, id BIGINT) WITH ('connector' = 'json', 'path' = '{folder}/rows', 'row_kind' = 'op');
CREATE TABLE t (id BIGINT, {column}) WITH ('connector' = 'jdbc', 'url' = 'jdbc:{url}', 'table' = 't',
  'user' = 'postgres',
  'driver' = 'org.postgresql.Driver', 'scan' = 'once');
CREATE TABLE sink WITH ('connector' = 'json', 'path' = '{folder}/out');
SET state = '{folder}/state'; SET checkpoint = '{folder}/checkpoint'; SET partitions = 2;
INSERT INTO sink SELECT r.id, t.x FROM rows r JOIN t ON r.id = t.id;
"""


@pytest.mark.parametrize(
    "case",
    [
        ("DATE", "-infinity", "x DATE", "table t, column x: -infinity is no DATE"),
        ("TIMESTAMP", "infinity", "x TIMESTAMP", "table t, column x: infinity is no TIMESTAMP_NTZ"),
        ("TIMESTAMPTZ", "-infinity", "x TIMESTAMP", "table t, column x: -infinity is no TIMESTAMP_LTZ"),
        ("DATE", "0044-03-15 BC", "x DATE", "table t, column x: 0044-03-15 BC is no DATE"),
        ("NUMERIC", "1e30", "x DECIMAL(38, 18)", r"table t, column x: 10{30} is no DECIMAL\(38,18\)"),
        ("NUMERIC", "1e-19", "x DECIMAL(38, 18)", r"table t, column x: 0\.0{18}1 is no DECIMAL\(38,18\)"),
        ("NUMERIC(5, 2)", "NaN", "x DECIMAL(5, 2)", r"table t, column x: NaN is no DECIMAL\(5,2\)"),
        ("NUMERIC", "1e30", "x DOUBLE", ""),
    ],
)
def test_scan_once_refuses_what_spark_has_no_value_of(
    spark: Any, postgres: Postgres, tmp_path: Path, case: Any
) -> None:
    kept, value, column, message = case
    postgres.run(f"CREATE TABLE t (id BIGINT, x {kept})", f"INSERT INTO t VALUES (1, '{value}'), (2, NULL)")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "1.json").write_text('{"op": "+I", "id": 1}')
    (tmp_path / "job.sql").write_text(JOB.format(folder=tmp_path, url=postgres.url, column=column))
    if not message:
        runner.run(load(tmp_path / "job.sql"), Console(file=io.StringIO()), once=True)
        assert spark.read.json(str(tmp_path / "out")).selectExpr("x = 1e30").collect() == [(True,)]
        return
    with pytest.raises(Exception, match=message):
        runner.run(load(tmp_path / "job.sql"), Console(file=io.StringIO()), once=True)


WHOLE = [
    ("NUMERIC", "1.5", "BIGINT", "1.5 is no BIGINT"), ("NUMERIC", "0.000000000000000000001", "INT", "1 is no INT"),
    ("NUMERIC(20, 2)", "3000000000.00", "INT", "3000000000 is no INT"), ("NUMERIC", "NaN", "BIGINT", "is no BIGINT"),
    ("NUMERIC", "1e38", "BIGINT", "is no BIGINT"), ("NUMERIC", "128", "TINYINT", "128 is no TINYINT"),
    ("NUMERIC[]", "{2,1.5}", "ARRAY<BIGINT>", "1.5 is no BIGINT"), ("NUMERIC", "1", "BOOLEAN", "no BOOLEAN is made"),
    ("NUMERIC[]", "{1}", "ARRAY<BOOLEAN>", "no BOOLEAN is made"), ("NUMERIC", "1", "TIMESTAMP", "no TIMESTAMP is"),
    ("NUMERIC(5, 2)", "-7.00", "SMALLINT", -7), ("NUMERIC", "9223372036854775807.000", "BIGINT", 2**63 - 1),
    ("NUMERIC(5, 2)[]", "{1.00,NULL,-2}", "ARRAY<BIGINT>", [1, None, -2]), ("NUMERIC", "1.5", "DOUBLE", 1.5),
    ("NUMERIC[]", "{1.50}", "ARRAY<VARCHAR(9)>", ["1.50"]),
]  # fmt: skip


def test_a_decimal_with_a_fraction_is_no_whole_number(spark: Any, postgres: Postgres) -> None:
    """Nor one that is too large for it, and none is a boolean or a time."""
    for n, (kept, text, kind, expected) in enumerate(WHOLE):
        postgres.run(f"CREATE TABLE w{n} (x {kept})", f"INSERT INTO w{n} VALUES ('{text}'), (NULL)")
        options = {**OPTIONS, "url": f"jdbc:{postgres.url}", "dbtable": f"w{n}"}
        if not isinstance(expected, str):
            assert [x for (x,) in read_table(spark, options, [("x", kind)]).collect()] == [expected, None]
            continue
        with pytest.raises(Exception, match=rf"table w{n}, column x: .*{expected}"):
            read_table(spark, options, [("x", kind)]).collect()
