"""Views in a real Postgres: names, types and values of every kind, held against the changelog folded in Python."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import random
import uuid
from collections import Counter
from typing import Any

import pytest

from gpu_ops.errors import BadInputError, DatabaseError, DescriptionError
from gpu_ops.spark.sinks import jdbc
from services.postgres import OPTIONS, Postgres, changelog, view_of

pytestmark = [pytest.mark.spark, pytest.mark.services]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.mark.parametrize(("size", "key"), [(55, "id"), (56, None), (58, "id"), (62, None), (63, "id"), (63, None)])
def test_a_table_with_a_long_name_is_not_emptied(spark: Any, postgres: Postgres, size: int, key: Any) -> None:
    """Postgres cuts names to 63 bytes: those of the tables beside it were once cut to the view's own."""
    name = "t" + "x" * (size - 1)
    count = ", gpu_ops_count BIGINT" if key is None else ""
    postgres.run(f"CREATE TABLE {name} (id BIGINT, item TEXT{count})")
    postgres.run(f"INSERT INTO {name} VALUES (7, 'kept'{', 1' if key is None else ''})")
    view = view_of(postgres, name, key)
    view(changelog(spark, "id LONG, item STRING", ("+I", 1, "a"), ("+I", 2, "b")), 0)
    view(changelog(spark, "id LONG, item STRING", ("-D", 1, "a"), ("+I", 3, "c")), 1)
    assert postgres.rows(f"SELECT id, item FROM {name}") == [("2", "b"), ("3", "c"), ("7", "kept")]
    assert all(len(x.encode()) <= 63 for x in postgres.tables())
    assert len(postgres.tables()) == 3
    if size <= 55:
        assert f"{name}_batches" in postgres.tables()


def test_a_name_longer_than_the_database_keeps_is_refused(spark: Any, postgres: Postgres) -> None:
    with pytest.raises(DescriptionError, match=r"view 'ü+' has a name of 64 bytes; the database keeps 63"):
        view_of(postgres, "ü" * 32)(changelog(spark, "id LONG", ("+I", 1)), 0)
    with pytest.raises(DescriptionError, match=r"column 'ü+' has a name of 64 bytes; the database keeps 63"):
        view_of(postgres, "t", None)(changelog(spark, f"`{'ü' * 32}` LONG", ("+I", 1)), 0)
    assert postgres.tables() == set()


@pytest.mark.parametrize("beside", ["_staged", "_batches"])
@pytest.mark.parametrize("name", ["shop", "s" * 63])
def test_what_no_view_has_made_is_left_alone(spark: Any, postgres: Postgres, beside: str, name: str) -> None:
    """It is refused before anything is made; tables of the names of before are no business of the view's."""
    first = view_of(postgres, name)
    first(changelog(spark, "id LONG", ("+I", 1)), 0)
    (helper,) = (x for x in postgres.tables() if beside in x)
    postgres.run(f"DROP TABLE {name}", f"DROP TABLE {helper}")
    postgres.run(f"CREATE TABLE {helper} (id BIGINT, gpu_ops_count BIGINT)", f"INSERT INTO {helper} VALUES (1, 1)")
    other = f"{name[:40]}_changes"
    postgres.run(f"CREATE TABLE {other} (id BIGINT, gpu_ops_count BIGINT)", f"INSERT INTO {other} VALUES (1, 1)")
    before = postgres.tables()
    with pytest.raises(DescriptionError, match=f"keeps a table {helper} beside it, and .* no view has made"):
        view_of(postgres, name)(changelog(spark, "id LONG", ("+I", 1)), 0)
    assert postgres.tables() == before
    assert postgres.rows(f"SELECT * FROM {helper}") == postgres.rows(f"SELECT * FROM {other}") == [("1", "1")]


@pytest.mark.parametrize("name", ["shop", "x" * 58])
def test_the_numbers_of_before_are_taken_over(spark: Any, postgres: Postgres, name: str) -> None:
    """Also from a table whose name Postgres has cut."""
    postgres.run(f"CREATE TABLE {name} (id BIGINT, gpu_ops_count BIGINT)", f"INSERT INTO {name} VALUES (1, 1)")
    postgres.run(f"CREATE TABLE {name}_batches (query_id VARCHAR(64), batch_id BIGINT)")
    postgres.run(f"INSERT INTO {name}_batches VALUES ('none', 4)")
    view = view_of(postgres, name, None)
    view(changelog(spark, "id LONG", ("+I", 1)), 4)
    assert postgres.rows(f"SELECT * FROM {name}") == [("1", "1")]
    view(changelog(spark, "id LONG", ("+I", 1)), 5)
    assert postgres.rows(f"SELECT * FROM {name}") == [("1", "2")]


def test_a_lock_on_the_staging_table_of_an_earlier_run_is_not_waited_for_without_end(
    spark: Any, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view is begun anew while a backup reads the staging table; once that ends it goes on."""
    view_of(postgres, "t")(changelog(spark, "id LONG", ("+I", 1)), 0)
    (schema,) = postgres.rows("SELECT current_schema()")[0]
    other = Postgres(spark, schema)
    other.run("BEGIN", "SELECT * FROM t_staged")
    monkeypatch.setattr(jdbc, "_LOCK_WAIT", 1)
    view, batch = view_of(postgres, "t"), changelog(spark, "id LONG", ("+I", 2))
    with pytest.raises(
        DatabaseError, match=r"view t: t_staged of an earlier run could not be dropped: .*locked"
    ) as told:
        view(batch, 1)
    assert told.value.state == "57014"
    assert postgres.rows("SELECT * FROM t") == [("1",)]
    other.run("ROLLBACK")
    view(batch, 1)
    assert postgres.rows("SELECT * FROM t") == [("1",), ("2",)]


def test_names_with_dots_quotes_and_upper_case(spark: Any, postgres: Postgres) -> None:
    names = ('"a.b"', '"S"', "s", '"ü ""q"" %s"', '"`"', "Upper", f'"{"ü" * 31}"', f'"{"ü" * 30}%"')
    for name in names:  # (a table called s was once taken for the staged rows, so that all of its rows went)
        view = view_of(postgres, name, "k.1")
        view(changelog(spark, '`k.1` LONG, `a"b` STRING, `%` INT', ("+I", 1, name, 1)), 0)
        view(changelog(spark, '`k.1` LONG, `a"b` STRING, `%` INT', ("+I", 2, name, 2)), 1)
    for name in names:
        assert postgres.rows(f"SELECT * FROM {name}") == [("1", name, "1"), ("2", name, "2")]
    assert len(postgres.tables()) == 3 * len(names)
    for name in ("a..b", 'a"b', '"a', "a b", ""):
        with pytest.raises(DescriptionError, match="is no name of a table"):
            view_of(postgres, name)(changelog(spark, "id LONG", ("+I", 1)), 0)


def test_columns_that_differ_by_upper_case(spark: Any, postgres: Postgres) -> None:
    """Both are right where Spark tells them apart, and where the table spells one in its own way."""
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        both = changelog(spark, "s LONG, S STRING", ("+I", 1, "a"), ("+I", 2, "b"))
        view_of(postgres, "t", "s")(both, 0)
        assert postgres.rows('SELECT s, "S" FROM t') == [("1", "a"), ("2", "b")]
        postgres.run('CREATE TABLE one ("S" TEXT)')
        with pytest.raises(DescriptionError, match="view one has no column 's'; it has S"):
            view_of(postgres, "one", "s")(both, 0)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    postgres.run('CREATE TABLE u ("ID" BIGINT, "Item" TEXT)')
    view_of(postgres, "u")(changelog(spark, "id LONG, item STRING", ("+I", 1, "a")), 0)
    view_of(postgres, "u")(changelog(spark, "id LONG, item STRING", ("-D", 1, "a"), ("+I", 2, "b")), 1)
    assert postgres.rows("SELECT * FROM u") == [("2", "b")]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("STRUCT<a: INT>", (1,)), ("MAP<STRING, INT>", {"a": 1}), ("ARRAY<STRUCT<a: INT>>", [(1,)]),
        ("INTERVAL DAY TO SECOND", None), ("ARRAY<MAP<STRING, INT>>", [{"a": 1}]),
    ],
)  # fmt: skip
def test_a_column_that_postgres_has_no_type_for_is_refused(
    spark: Any, postgres: Postgres, kind: str, value: Any
) -> None:
    with pytest.raises(DescriptionError, match=r"column 'x', which is|column 'x' is"):
        view_of(postgres, "t")(changelog(spark, f"id LONG, x {kind}", ("+I", 1, value)), 0)
    assert postgres.tables() == set()


@pytest.mark.parametrize(("kind", "value"), [("STRING", "a\0b"), ("ARRAY<STRING>", ["a", "\0"])])
def test_text_with_nul_is_refused(spark: Any, postgres: Postgres, kind: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=r"column 'x': view t keeps no text with the character NUL \(for example"):
        view_of(postgres, "t")(changelog(spark, f"id LONG, x {kind}", ("+I", 1, value)), 0)
    assert postgres.rows("SELECT * FROM t") == []


def test_values_are_cast_to_the_types_of_a_table_that_is_there(spark: Any, postgres: Postgres) -> None:
    postgres.run(
        "CREATE TYPE \"Mood\" AS ENUM ('sad', 'glad')",
        'CREATE TABLE t (id UUID PRIMARY KEY, j JSONB, m "Mood", a INET, n NUMERIC(10, 2), v VARCHAR(3), c CHAR(4), '
        "p TIMESTAMPTZ, q TIMESTAMP, s SMALLINT, b BYTEA, us UUID[], d DATE, x XML, more TEXT DEFAULT 'x')",
    )
    schema = (
        "id STRING, j STRING, m STRING, a STRING, n DOUBLE, v STRING, c STRING, p TIMESTAMP_NTZ, q TIMESTAMP, "
        "s BIGINT, b BINARY, us ARRAY<STRING>, d STRING, x STRING"
    )
    at = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)
    keys = [str(uuid.UUID(int=n)) for n in range(3)]
    first = (keys[0], '{"a": [1, null]}', "glad", "10.0.0.1", 1.25, "abc", "de", at, at, 3, b"\1\0", [keys[1], None],
             "2024-02-29", "<a/>")  # fmt: skip
    nothing = (keys[1], *[None] * 13)
    view = view_of(postgres, "t")
    view(changelog(spark, schema, ("+I", *first), ("+I", *nothing)), 0)
    shown = "SELECT id, j ->> 'a', m, a, n, v, c, s, us[1], d, more FROM t"
    assert postgres.rows(shown) == [
        (keys[0], "[1, null]", "glad", "10.0.0.1", "1.25", "abc", "de  ", "3", keys[1], "2024-02-29", "x"),
        (keys[1], *[None] * 9, "x"),
    ]
    view(changelog(spark, schema, ("-D", *first), ("-U", *nothing), ("+U", keys[1], "[]", *nothing[2:])), 1)
    assert postgres.rows("SELECT id, j FROM t") == [(keys[1], "[]")]
    with pytest.raises(BadInputError, match=r"column 'm': view t: .*invalid input value for enum \"Mood\": \"angry\""):
        view(changelog(spark, schema, ("+I", keys[0], "[]", "angry", *nothing[3:])), 2)
    with pytest.raises(BadInputError, match=r"column 'v': view t: .*value too long for type character varying\(3\)"):
        view(changelog(spark, schema, ("+I", *first[:5], "abcd", *nothing[6:])), 2)
    with pytest.raises(BadInputError, match="two keys of the changelog are one in the types of view t"):
        view(changelog(spark, schema, ("+I", keys[1].replace("-", ""), *nothing[1:])), 2)
    assert postgres.rows("SELECT id, j FROM t") == [(keys[1], "[]")]


def test_columns_that_cannot_be_cast_or_compared_are_refused(spark: Any, postgres: Postgres) -> None:
    postgres.run("CREATE TABLE i (id BIGINT, a INET)", "CREATE TABLE j (id JSON, gpu_ops_count BIGINT)")
    with pytest.raises(DescriptionError, match='column "a" is of type inet but expression is of type bigint'):
        view_of(postgres, "i")(changelog(spark, "id LONG, a LONG", ("+I", 1, 1)), 0)
    with pytest.raises(DescriptionError, match=r'found by column "id", which cannot be: .*json = json'):
        view_of(postgres, "j", None)(changelog(spark, "id STRING", ("+I", "1")), 0)
    assert postgres.tables() == {"i", "j"}


KINDS: dict[str, tuple[Any, ...]] = {
    "TINYINT": (None, -128, 127), "SMALLINT": (None, 3), "INT": (None, -1, 2**31 - 1), "BIGINT": (None, 2**63 - 1, 0),
    "DOUBLE": (None, 0.0, 1e-300, float("inf"), float("nan")), "FLOAT": (None, 0.5), "BOOLEAN": (None, True, False),
    "DECIMAL(38, 5)": (None, decimal.Decimal("-123456789012345678901234567890.12345"), decimal.Decimal("1.50000")),
    "STRING": (None, "", "null", "ü%'\\\"", "a\nb", "𝄞"), "BINARY": (None, b"", b"\0\xff"),
    "DATE": (None, dt.date(1, 1, 1), dt.date(1582, 10, 4), dt.date(2024, 2, 29), dt.date(9999, 12, 31)),
    "TIMESTAMP_NTZ": (None, dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
    "TIMESTAMP": (None, dt.datetime(1970, 1, 1, 0, 0, 0, 1), dt.datetime(2024, 5, 6, 7, 8, 9, 123456)),
    "ARRAY<INT>": (None, [], [1, None, 2]), "ARRAY<STRING>": (None, ["a,b", None, '"', "{}"], ["NULL"]),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(*map(int, os.environ.get("GPU_JOIN_POSTGRES", "4").split(":"))))
def test_random_tables_equal_the_folded_changelog(spark: Any, postgres: Postgres, seed: int) -> None:
    """Names, columns, types, keys and values at random; read back by Spark, which is not what wrote the rows."""
    choice = random.Random(seed)

    def name(most: int) -> str:
        size, made = choice.randint(1, most), ""
        while len(made.encode()) < size:
            made += choice.choice(["ü", "a", "S", "s", ".", '"', "%", " ", "€", "?", "'", "\\", "$"])
        return made if len(made.encode()) <= most else made[:-1] or "a"

    table, key = quoted(name(63)), choice.random() < 0.6
    spelled = {x.lower(): x for x in (name(20) for _ in range(choice.randint(2, 5)))}
    columns = {x: choice.choice(list(KINDS)) for x in spelled.values()}
    schema = ", ".join(f"`{x}` {kind}" for x, kind in [("id", "BIGINT"), *columns.items()])
    view = view_of(postgres, table, "id" if key else None)
    rows: Counter[str] = Counter()
    current: dict[int, tuple[Any, ...]] = {}
    for number in range(3):
        changes: list[tuple[Any, ...]] = []
        for _ in range(12):
            of = choice.randrange(6)
            row = (of, *(choice.choice(KINDS[kind]) for kind in columns.values()))
            gone = current.pop(of, None)
            if gone is not None:
                changes.append(("-D", *gone))
            if gone is None or choice.random() < 0.6:
                changes.append(("+I", *row))
                current[of] = row
            if not key and choice.random() < 0.5:  # a row that is there twice
                changes.append(("+I", *row))
                rows[repr(row)] += 1
        view(changelog(spark, schema, *changes), number)
        found: Counter[str] = Counter()
        read = (
            spark.read.format("jdbc")
            .options(**OPTIONS, url=f"jdbc:{postgres.url}", dbtable=table, preferTimestampNTZ=True)
            .load()
        )
        for row in read.select(*(f"`{x}`" for x in read.columns)).collect():
            values = [bytes(x) if isinstance(x, bytearray) else x for x in row]
            count = 1 if key else values.pop()
            found[repr(tuple(values))] += count
        assert found == rows + Counter(repr(row) for row in current.values()), f"{table} {schema}"
    assert len(postgres.tables()) == 3
