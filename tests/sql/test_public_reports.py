"""Queries that other systems answered wrongly, by their public reports; docs/contributing/tried.md has their numbers.

The folded result is what DuckDB makes of the folded inputs, in every micro-batch; over static tables what Spark makes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import difference, fold

import gpu_ops
from gpu_ops import Asof, AsofJoin, Input, JoinEngine, Key
from gpu_ops.query.errors import SqlError
from gpu_ops.query.relations import Table
from sql.run_plan import PlanRunner, Reference
from sql.tables import planned
from sql.test_random import TABLES as NUMBERS
from sql.test_run import history

pytestmark = [pytest.mark.one_in(3), pytest.mark.thorough]

DOUBLE, TINY, LONG, TIME = pa.float64(), pa.int8(), pa.int64(), pa.timestamp("us", "UTC")
TABLES = {
    **NUMBERS,
    "f": Table("f", pa.schema([("k", DOUBLE), ("x", LONG)]), row_kind="op"),
    "g": Table("g", pa.schema([("k", DOUBLE), ("y", LONG)]), row_kind="op"),
    "small": Table("small", pa.schema([("t", TINY)]), row_kind="op"),
}
NAN = float("nan")
FLOATS = [
    {"f": [("+I", (0.0, 1)), ("+I", (NAN, 2))], "g": [("+I", (-0.0, 1)), ("+I", (-NAN, 2)), ("+I", (None, 3))]},
    {"f": [("+I", (-0.0, 3)), ("-D", (0.0, 1))], "g": [("+I", (0.0, 4)), ("-D", (NAN, 2))]},
    {"f": [("+I", (None, 9)), ("+I", (NAN, 2))], "g": [("+I", (NAN, 7)), ("-D", (0.0, 1))]},
]
NARROW = [
    {"a": [("+I", (9999, 1, 1)), ("+I", (21, 1, 1)), ("+I", (None, 1, 1))], "small": [("+I", (21,))]},
    {"small": [("+I", (None,))]},
    {"small": [("-D", (None,))], "a": [("+I", (20, 0, 0))]},
]
REPORTS = {
    1: "SELECT c.k, c.w FROM c WHERE 1 NOT IN (SELECT a.x FROM a WHERE a.k = c.k)",
    2: "SELECT c.k, c.w FROM c WHERE c.w NOT IN (SELECT a.x FROM a WHERE a.x = c.w)",
    3: "SELECT d.k FROM d WHERE NULLIF(d.k, d.x) NOT IN (SELECT b.k FROM b)",
    4: "SELECT c.k, c.w FROM c WHERE EXISTS (SELECT 1 FROM a LEFT JOIN b ON a.k = b.k AND b.v > a.x "
        "WHERE a.k = c.k AND b.v IS NULL)",
    5: "SELECT a.k, b.v FROM a LEFT JOIN b ON a.k = b.k WHERE EXISTS (SELECT 1 FROM c WHERE c.k = a.k "
        "AND b.v <> c.w)",
    6: "SELECT k, sum(x) FILTER (WHERE x > 0) AS s, count(*) AS n FROM a GROUP BY k",
    7: "SELECT k, sum(y) AS s, min(y) AS l, max(y) AS h, avg(y) AS m, count(y) AS n FROM a GROUP BY k",
    8: "SELECT a.k, d.k AS dk FROM a FULL JOIN d ON a.k = d.k",
    9: "SELECT a.x, a.y FROM a WHERE a.x NOT IN (SELECT b.x FROM b WHERE b.v = a.y)",
    10: "WITH r AS (SELECT k, sum(x) AS total FROM a GROUP BY k) SELECT d.k, d.x, r.total FROM d JOIN r "
        "ON d.k = r.k WHERE r.total IN (SELECT max(total) FROM r)",
    11: "SELECT f.x, g.y FROM f JOIN g ON f.k = g.k",
    12: "SELECT f.k, count(*) AS n, count(DISTINCT f.k) AS d FROM f GROUP BY f.k",
    13: "SELECT f.x FROM f WHERE f.k NOT IN (SELECT g.k FROM g WHERE g.k IS NOT NULL)",
    14: "SELECT a.k, b.v FROM a LEFT JOIN b ON false WHERE b.v >= a.x",
    15: "SELECT a.k, b.v FROM a LEFT JOIN b ON true AND a.k = b.k AND false",
    16: "SELECT * FROM (SELECT a.k, b.v FROM a LEFT JOIN b ON a.k = b.k) t WHERE 1 = 2 OR 2 = 2",
    17: "SELECT l.x, r.y FROM a l LEFT JOIN a r ON l.x = r.k WHERE l.x IS NOT NULL AND r.k IS NULL",
    18: "SELECT k, x, v FROM (SELECT k, x FROM a) a FULL JOIN (SELECT k, v FROM b) b USING (k) WHERE k = "
        "1",
    19: "SELECT k, count(*) AS n FROM (SELECT k, x FROM a) a RIGHT JOIN (SELECT k, w FROM c) c USING (k) "
        "GROUP BY k",
    20: "SELECT COALESCE(l.k, r.k) AS k, COALESCE(l.one, 7) AS o, r.two FROM (SELECT k, 1 AS one FROM a "
        "WHERE k = 1) l FULL JOIN (SELECT k, 2 AS two FROM d WHERE k = 1) r ON l.k = r.k",
    21: "SELECT x, y, count(*) AS n FROM a GROUP BY x, y",
    22: "SELECT k, count(CASE WHEN n = 1 THEN 1 END) AS ones FROM (SELECT d.k, d.x, count(c.w) AS n FROM "
        "d LEFT JOIN c ON d.x = c.k GROUP BY d.k, d.x) q GROUP BY k HAVING count(CASE WHEN n = 1 THEN 1 "
        "END) <> 2",
    23: "SELECT k, avg(x + 50) AS level FROM a WHERE x IS NOT NULL GROUP BY k",
    24: "SELECT a.x, d.x AS dx FROM a FULL JOIN d ON a.x = d.x",
    25: "SELECT a.y, c.w FROM a JOIN c ON a.k = c.k",
    26: "SELECT a.k, b.x, b.v FROM a LEFT JOIN b ON a.k = b.k AND b.x IS NULL",
    27: "SELECT a.k FROM a WHERE a.k NOT IN (SELECT t FROM small)",
    28: "SELECT a.k FROM a JOIN small ON a.k = small.t",
    29: "SELECT a.k, a.x, c.w FROM a LEFT JOIN c ON c.k = a.k WHERE c.w <> 1",
    30: "SELECT a.x, q.v FROM a LEFT JOIN (SELECT v FROM b WHERE v = 1) q ON a.x < q.v",
    31: "SELECT k, max(x) AS m, min(x) AS l, count(DISTINCT y) AS d FROM a GROUP BY k",
    32: "SELECT l.k, l.x, r.y FROM a l JOIN a r ON l.k = r.k AND l.x = r.y",
    33: "SELECT a.k FROM a WHERE a.x IN (SELECT b.x FROM b WHERE b.k = a.k) AND a.y IN (SELECT b.v FROM "
        "b)",
    34: "SELECT a.k, a.x, c.w FROM a LEFT JOIN c ON a.k = c.k AND a.x = c.k",
    35: "SELECT a.k, a.x, d.x AS dx FROM a LEFT JOIN d ON a.x = d.k",
    36: "SELECT l.k, l.x FROM a l WHERE NOT EXISTS (SELECT 1 FROM a r WHERE l.k <=> r.k AND l.x <=> r.x)",
}  # fmt: skip
HISTORIES = {11: FLOATS, 12: FLOATS, 13: FLOATS, 27: NARROW, 28: NARROW}
"""Of those whose rows matter; the others have random ones."""
AT_ONCE = {
    # number: query over static tables, which Spark's own SQL answers as well
    40: "SELECT k, window(at, '1 minute').start AS s, count(*) AS n FROM old GROUP BY k, window(at, '1 minute')",
    41: "SELECT window(at, '10 minutes', '3 minutes').end AS e, count(*) AS n FROM old "
        "GROUP BY window(at, '10 minutes', '3 minutes')",
    42: "SELECT date_trunc('hour', at) AS h, count(*) AS n FROM dst GROUP BY date_trunc('hour', at)",
    43: "SELECT l.k, r.k AS rk FROM dst l JOIN dst r ON to_date(l.at) = to_date(r.at) AND l.k < r.k",
    44: "SELECT c.K, d.k AS dk, c.name, d.name AS n FROM cases c LEFT JOIN other d ON C.k = D.K",
    45: "SELECT * FROM cases FULL JOIN (SELECT k, NAME AS other FROM other) USING (k)",
    46: "SELECT `a.b`, d.k FROM cases c JOIN other d ON lower(c.`a.b`) = d.NAME",
    47: "SELECT l.x, r.y FROM money l JOIN finer r ON l.d = r.d",
    48: "SELECT l.x, r.x AS y FROM words l JOIN words r ON l.s = r.s",
}  # fmt: skip


@pytest.mark.parametrize("number", REPORTS)
def test_a_public_report(number):
    sql = REPORTS[number]
    made = planned(sql, tables=TABLES, emit="per_batch" if number % 2 else "per_event")
    with contextlib.closing(PlanRunner(made)) as runner, contextlib.closing(Reference(sql, TABLES)) as reference:
        for changes in HISTORIES.get(number) or history(number):
            runner.process(TABLES, changes)
            reference.apply(changes)
            assert not difference(reference.rows(), runner.folded), sql


def test_a_correlated_filter_below_an_outer_join_is_refused_as_spark_refuses_it():
    sql = REPORTS[4].replace("LEFT JOIN b", "LEFT JOIN (SELECT * FROM b WHERE b.v = c.w) b")
    with pytest.raises(SqlError, match=r"outer query column is not allowed.*\(line 1, column"):
        planned(sql, tables=TABLES)


def _utc(*parts: int) -> dt.datetime:
    return dt.datetime(*parts, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def tables(spark: Any) -> dict[str, Any]:
    """Times before 1970 and at the ends of summer time in New York, names and texts that are nearly the same."""
    half = [dt.timedelta(minutes=30 * i) for i in range(12)]
    ends = [_utc(2026, 3, 8, 5), _utc(2026, 11, 1, 4)]
    rows = {
        "old": ([(1, _utc(1960, 5, 22)), (1, _utc(1960, 5, 22, 0, 0, 30)), (2, _utc(1969, 12, 31, 23, 59, 59, 999999)),
                 (2, _utc(1883, 11, 18, 12, 0, 1))], "k int, at timestamp"),
        "dst": ([(n, end + step) for end in ends for n, step in enumerate(half)], "k int, at timestamp"),
        "cases": ([(1, "x", None), (2, "Y", "y"), (None, "z", "Z")], "K int, Name string, `a.b` string"),
        "other": ([(1, "x"), (2, "y"), (None, "z")], "k int, NAME string"),
        "money": ([(Decimal("1.10"), 1), (Decimal(2), 2)], "d decimal(10, 2), x int"),
        "finer": ([(Decimal("1.1000"), 7), (Decimal("2.0001"), 8)], "d decimal(20, 4), y int"),
        "words": ([("a ", 1), ("a", 2), ("\u00e9", 3), ("e\u0301", 4), ("A", 5)], "s string, x int"),
    }  # fmt: skip
    return {name: spark.createDataFrame(*made) for name, made in rows.items()}


@pytest.mark.spark
@pytest.mark.parametrize("number", AT_ONCE)
def test_a_public_report_over_static_tables(spark, tables, number):
    sql = AT_ONCE[number]
    zone = spark.conf.get("spark.sql.session.timeZone")
    named = {name: rows for name, rows in tables.items() if re.search(rf"\b{name}\b", sql)}
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        for name, rows in named.items():
            rows.createOrReplaceTempView(name)
        said = gpu_ops.sql(sql, **named).drop("row_kind").collect()
        wanted = spark.sql(sql).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
        for name in named:
            spark.catalog.dropTempView(name)
    assert wanted
    assert sorted(map(repr, map(tuple, said))) == sorted(map(repr, map(tuple, wanted)))


ASOF = {
    # number: whether null meets null, tolerance, left rows, right rows, pairs
    50: (True, None, [(1, None, 5), (2, "a", 5)], [(None, 3, 2), ("a", 6, 9)], [(1, 2), (2, None)]),
    51: (False, 4, [(101, "A", 1), (299, "B", 1), (301, "B", 3), (500, "C", 6)],
         [("A", 0, 100), ("B", 2, 300), ("C", 4, 501), ("A", 6, 102)],
         [(101, 100), (299, None), (301, 300), (500, 501)]),
}  # fmt: skip


@pytest.mark.parametrize("emit", ["per_batch", "per_event", "at_watermark", "at_end"])
@pytest.mark.parametrize("number", ASOF)
def test_a_public_report_of_asof_joins(number, emit):
    null_safe, tolerance, *rows, wanted = ASOF[number]
    schemas = (
        pa.schema([("id", pa.int64()), ("s", pa.string()), ("lt", pa.int64())]),
        pa.schema([("s2", pa.string()), ("rt", pa.int64()), ("q", pa.int64())]),
    )
    inputs = Input("l", schemas[0], event_time="lt"), Input("r", schemas[1], event_time="rt")
    key = Key("s", "s2", null_safe=null_safe)
    engine = JoinEngine(AsofJoin("left", *inputs, (key,), emit=emit, asof=Asof("backward", tolerance)), "cpu")
    tables = [
        pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in some], schema)
        for some, schema in zip(rows, schemas, strict=True)
    ]
    said = pa.concat_tables([engine.process(*tables), engine.finish()])
    folded = fold((row["row_kind"], (row["id"], row["q"])) for row in said.to_pylist())
    assert folded == Counter(wanted)
