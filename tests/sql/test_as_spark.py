"""A query means what it means to Spark: zones, casts, functions, collations; nothing of the session's is touched."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from random import Random
from typing import Any

import pytest
from pyspark.sql import functions as f

import gpu_ops
from sql.tables import planned

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

HOURS = [dt.datetime(2024, 3, 10, hour, 30, tzinfo=dt.UTC) for hour in range(3, 9)]
QUERIES = {
    "a literal in the session's zone":
        "SELECT a.k, b.w FROM a LEFT JOIN b ON a.k = b.k AND (a.v = 0 OR b.at >= TIMESTAMP '2024-03-10 01:00:00')",
    "hours that clocks skip": "SELECT a.k, b.w FROM a FULL JOIN b ON a.k = b.k AND b.at + INTERVAL 1 DAY > a.at",
    "dates": "SELECT a.k, b.w FROM a LEFT JOIN b ON a.day = b.at AND a.k <> b.k",
    "text and numbers": "SELECT a.k, b.name FROM a LEFT JOIN b ON a.k = b.number AND a.v < length(b.name)",
    "like": "SELECT a.k, b.name FROM a LEFT JOIN b ON a.k = b.k AND b.name LIKE 'A\\\\_%' AND a.v IS NOT NULL",
    "case over both": "SELECT a.k, b.w FROM a LEFT JOIN b ON a.k = b.k AND CASE WHEN a.v > b.w THEN true "
        "WHEN b.w IS NULL THEN upper(b.name) = 'X' END",
    "in over both": "SELECT a.k, a.v FROM a LEFT ANTI JOIN b ON a.v IN (b.w, 7, NULL) OR a.k = b.k + 1",
    "above": "SELECT upper(concat(b.name, date_format(a.at, 'HH:mm'))) AS t FROM a JOIN b ON a.k % 2 = b.k % 2 "
        "WHERE concat(b.name, a.k) > 'B'",
}  # fmt: skip


@pytest.fixture(scope="module")
def tables(spark: Any) -> dict[str, Any]:
    a = [(n % 4, n, HOURS[n % 6], dt.date(2024, 3, 9 + n % 3)) for n in range(8)] + [(None, None, None, None)]
    b = [(n % 3, n, HOURS[n % 5], f"{'Aa_'[n % 3]}_{n}", str(n % 4)) for n in range(7)] + [(1, None, None, None, "x")]
    return {
        "a": spark.createDataFrame(a, "k int, v bigint, at timestamp, day date"),
        "b": spark.createDataFrame(b, "k bigint, w int, at timestamp, name string, number string").where(
            "number <> 'x'"
        ),
    }


@pytest.mark.parametrize("what", QUERIES)
def test_the_same_rows_as_spark(spark: Any, tables: dict[str, Any], what: str) -> None:
    query = QUERIES[what]
    wanted = spark.sql(query.replace(" a ", " {a} a ", 1).replace("JOIN b ", "JOIN {b} b "), **tables)
    rows = Counter(tuple(row)[1:] for row in gpu_ops.sql(query, **tables).collect())
    assert rows == Counter(map(tuple, wanted.collect()))
    assert rows


def test_where_means_what_it_means_to_spark(spark: Any, tables: dict[str, Any]) -> None:
    where = "left.at > TIMESTAMP '2024-03-10 00:00:00' AND substring(right.name, 1, 1) = 'A' OR left.v = right.w"
    found = gpu_ops.join(tables["a"], tables["b"], "k", "left", where=where, suffixes=("", "_b"))
    assert not [column for column in found.columns if column.startswith("__")]
    left, right = tables["a"].alias("left"), tables["b"].alias("right")
    wanted = left.join(right, f.expr(f"left.k = right.k AND ({where})"), "left").select("left.*", "w", "name")
    rows = found.select(*tables["a"].columns, "w", "name").collect()
    assert Counter(map(tuple, rows)) == Counter(map(tuple, wanted.collect()))


@pytest.mark.parametrize(
    ("where", "line", "column", "message"),
    [
        ("left.k <\n  rihgt.w", 2, 3, "rihgt"),
        ("left.k <", 1, 9, "Syntax error"),
        ("left.k = 1) OR (left.k = 2", 1, 11, "Syntax error"),
        ("left.day + right.w > left.day", 1, 1, "takes columns of both inputs"),
        ("EXISTS (SELECT 1)", 1, 1, "sub-queries"),
        ("left.v > rand()", 1, 1, "expects a deterministic expression"),
    ],
)
def test_where_that_cannot_be(tables: dict[str, Any], where: str, line: int, column: int, message: str) -> None:
    with pytest.raises(gpu_ops.ConditionError, match=message) as error:
        gpu_ops.join(tables["a"], tables["b"], "k", "left", where=where, suffixes=("", "_b"))
    assert (error.value.sql, error.value.line, error.value.column) == (where, line, column)


def test_strings_of_a_collation_are_joined_by_it(spark: Any) -> None:
    if spark.version.startswith("3."):
        pytest.skip("no collations before Spark 4")
    a = spark.createDataFrame([("Ann", 1), ("bob", 2)], "name string, k int")
    b = spark.createDataFrame([("ANN", 3), ("Cy", 4)], "name string, w int")
    a, b = (df.withColumn("name", f.expr("name COLLATE UTF8_LCASE")) for df in (a, b))
    found = gpu_ops.sql("SELECT a.k, b.w FROM a LEFT JOIN b ON a.name = b.name", a=a, b=b).collect()
    assert sorted(map(tuple, found)) == [("+I", 1, 3), ("+I", 2, None)]


GROUPS = {
    "count of several": "SELECT k, count(s, d) AS n, count(s, d) FILTER (WHERE d > 0) AS o, count(k, k) AS m FROM t "
        "GROUP BY k",
    "count of different tuples": "SELECT count(DISTINCT s, d) AS n, count(DISTINCT k, c) AS m, count(DISTINCT ts, k) AS"
        " o, count(DISTINCT d, y) AS p, count(DISTINCT s, c) AS q FROM t",
    "different by a collation": "SELECT k, count(DISTINCT c) AS n, count(DISTINCT c, d) AS m FROM t GROUP BY k",
    "groups of a collation": "SELECT lower(c) AS c, collation(c) AS l, k, sum(k) AS n FROM t GROUP BY c, k HAVING c <> "
        "'CY'",
    "groups of an expression": "SELECT lower(concat(c, 'X')) AS c, count(*) AS n FROM t GROUP BY concat(c, 'X')",
    "DISTINCT by a collation": "SELECT lower(c) AS c, k FROM (SELECT DISTINCT c, k FROM t)",
    "UNION by a collation": "SELECT lower(c) AS c, k FROM (SELECT c, k FROM t UNION SELECT c, k + 1 FROM t)",
    "LIMIT by a collation": "SELECT lower(c) AS c, k, d FROM t ORDER BY c DESC, d, k, s LIMIT 3",
    "first of each by a collation": "SELECT lower(c) AS c, n, k FROM (SELECT c, k, row_number() OVER (PARTITION BY c "
        "ORDER BY ts, k) AS n FROM t) WHERE n = 1",
    "windows whole": "SELECT w, count(*) AS n FROM (SELECT window(ts, '1 minute') AS w FROM t) GROUP BY w",
    "windows that an outer join leaves out": "SELECT w, count(*) AS n FROM t LEFT JOIN (SELECT k, window(ts, '1 minute'"
        ") AS w FROM t WHERE k = 1) u ON t.k = u.k GROUP BY w",
    "windows, different ones": "SELECT DISTINCT window(ts, '1 minute') AS w FROM t",
    "try_sum of doubles": "SELECT try_sum(d) AS n, try_avg(k) AS m, regr_count(d, k) AS o FROM t WHERE k < 3",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_as_spark_has_them(spark: Any, seed: int) -> None:
    if spark.version.startswith("3."):
        pytest.skip("no collations before Spark 4")
    random = Random(seed)
    start = dt.datetime(2024, 11, 3, 5, 30, tzinfo=dt.UTC)  # an hour that New York has twice
    drawn = [
        (
            random.choice([1, 2, 3, None]),
            random.choice(["Ann", "ANN", "ann", "bob", "Bob", "Cy", "", "1:a", None]),
            random.choice([0.0, -0.0, 1.5, float("nan"), None]),
            random.choice([start, start + dt.timedelta(hours=1), start + dt.timedelta(minutes=2), None]),
            random.choice([b"a", b"", b"b", None]),
        )
        for _ in range(40)
    ]
    gone = random.sample(range(40), 15)
    schema = "k int, s string, d double, ts timestamp, y binary"
    changes = [("+I", *row) for row in drawn] + [("-D", *drawn[place]) for place in gone]
    frames = [
        spark.createDataFrame(rows, columns).withColumn("c", f.expr("s COLLATE UTF8_LCASE"))
        for rows, columns in (
            ([row for place, row in enumerate(drawn) if place not in gone], schema),
            (changes, f"op string, {schema}"),
        )
    ]
    whole, t = frames[0], gpu_ops.stream(frames[1].coalesce(1), row_kind="op")
    whole.createOrReplaceTempView("t")
    for what, query in GROUPS.items():
        wanted = Counter(repr(tuple(row)) for row in spark.sql(query).collect())
        assert Counter(repr(tuple(row)[1:]) for row in gpu_ops.sql(query, t=t).collect()) == wanted, what


def test_views_of_the_session_are_neither_read_nor_changed(spark: Any) -> None:
    spark.range(3).createOrReplaceTempView("orders")
    spark.range(3).createOrReplaceTempView("elsewhere")
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        assert planned("SELECT o.note FROM orders o JOIN users u ON o.uid = u.uid").joins
        assert spark.table("orders").columns == ["id"]
        with pytest.raises(gpu_ops.SqlError, match="not among the inputs"):
            planned("SELECT o.note FROM orders o JOIN elsewhere e ON o.uid = e.id")
        for statement in ("DROP VIEW orders", "SET spark.sql.session.timeZone=UTC", "CREATE TEMP VIEW x AS SELECT 1"):
            with pytest.raises(gpu_ops.SqlError):
                planned(statement)
        assert spark.table("orders").count() == 3
        assert spark.conf.get("spark.sql.session.timeZone") == zone
        assert not spark.catalog.tableExists("x")
    finally:
        spark.catalog.dropTempView("orders")
        spark.catalog.dropTempView("elsewhere")


def test_a_function_of_the_session(spark: Any) -> None:
    spark.udf.register("twice", lambda x: None if x is None else x * 2, "bigint")
    plan = planned(
        "SELECT twice(o.id) AS t FROM orders o LEFT JOIN users u ON twice(o.uid) = u.uid AND twice(u.uid) > 3"
    )
    (join,) = plan.joins
    assert join.description.how == "left"
    assert [key.left for key in join.description.keys] == ["key_1"]


def test_a_long_condition() -> None:
    many = " AND ".join(f"(o.id <> {n} OR u.uid <> {n})" for n in range(300))
    (join,) = planned(f"SELECT o.note FROM orders o LEFT JOIN users u ON o.uid = u.uid AND {many}").joins
    assert str(join.description.where).count(" OR ") == 300
