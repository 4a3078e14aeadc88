"""Window functions in SQL: in every micro-batch what Spark's own SQL says of the rows there are."""

from __future__ import annotations

import os

import pytest
from conftest import slow_but
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpu_ops.query.nodes import show
from sql.tables import planned
from sql.test_random import COLUMNS, RANDOM, TABLES, against_spark, histories, share_taken

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def no_ansi(spark):
    """In ANSI mode Spark's ``corr`` of values that all are the same is an error."""
    spark.conf.set("spark.sql.ansi.enabled", "false")
    yield
    spark.conf.unset("spark.sql.ansi.enabled")


ROWS = "PARTITION BY k ORDER BY x, y"
QUERIES = {
    "numbers": f"SELECT *, ROW_NUMBER() OVER ({ROWS}) AS n, NTILE(2) OVER ({ROWS}) AS b FROM a",
    "named": "SELECT k, x, y - LAG(y) OVER w AS d, SUM(y) OVER w AS s, LEAD(y, 2, -7) OVER w AS l, "
    f"MIN(y) OVER ({ROWS} ROWS 1 PRECEDING) AS m FROM a WINDOW w AS (PARTITION BY k ORDER BY x, y)",
    "over groups": "SELECT k, SUM(SUM(x)) OVER (ORDER BY k) AS s, RANK() OVER (ORDER BY COUNT(*) DESC) AS r "
    "FROM a GROUP BY k",
    "filter": "SELECT * FROM (SELECT k, x, RANK() OVER (PARTITION BY k ORDER BY x DESC) AS r FROM a) WHERE r <= 2",
    "top": "SELECT * FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY k ORDER BY x DESC, y) AS r FROM a) WHERE r <= 2",
    "several": "SELECT *, AVG(x) OVER (PARTITION BY k) AS m, COUNT(*) OVER () AS n, FIRST_VALUE(x) OVER (ORDER BY k, "
    "x, y) AS f FROM a",
    "join": "SELECT a.k, v, LAG(v, 1, a.k) OVER (PARTITION BY b.x ORDER BY a.k, v, y, a.x) AS l, round(corr(v, y) OVER "
    "(PARTITION BY b.x ORDER BY v), 6) AS c, COUNT(v) OVER (PARTITION BY b.x ORDER BY y) AS n FROM a JOIN b "
    "ON a.k = b.k",
    "nulls": f"SELECT *, NTH_VALUE(x, 2) IGNORE NULLS OVER ({ROWS} ROWS BETWEEN 1 PRECEDING AND 3 FOLLOWING) AS t, "
    f"LAST_VALUE(y) IGNORE NULLS OVER ({ROWS}) AS l, LAG(y, 1, 5) IGNORE NULLS OVER ({ROWS}) AS o FROM a",
    "below a join": "SELECT w.k, w.s, c.w FROM (SELECT k, SUM(x) OVER (PARTITION BY k ORDER BY v NULLS LAST) AS s "
    "FROM b) w JOIN c ON c.k = w.k AND c.w < w.s",
    "twice": f"WITH o AS (SELECT *, SUM(x) OVER ({ROWS} ROWS BETWEEN 2 PRECEDING AND 1 PRECEDING) AS s FROM a) "
    "SELECT p.k, p.s, q.x FROM o p JOIN o q ON p.k = q.k",
    "distinct": "SELECT DISTINCT k, MAX(x) OVER (PARTITION BY k) AS m FROM a",
    "limit": "SELECT k, MAX(x) OVER (PARTITION BY k) AS m FROM a ORDER BY k, m LIMIT 3",
    "union": "SELECT k, x, RANK() OVER (ORDER BY x) AS r FROM a UNION ALL SELECT k, x, 1 FROM b",
    "expressions": "SELECT k, COUNT(x, y) OVER (PARTITION BY k + 1) AS n, SUM(x * 2) OVER (PARTITION BY k ORDER BY -y) "
    "/ COUNT(*) OVER (PARTITION BY k) AS share FROM a",
    "sub-query": "SELECT k, x FROM a WHERE x > (SELECT max(m) FROM (SELECT SUM(w) OVER (PARTITION BY k) AS m FROM c))",
    "of a value": "SELECT b.k, (SELECT max(s) FROM (SELECT k, SUM(w) OVER (PARTITION BY k) AS s FROM c) q WHERE "
    "q.k = b.k) AS m FROM b",
}

TOTAL = {"a": ["k", "x", "y"], "b": ["k"], "c": ["k", "w"], "d": ["k", "x"]}
"""By these no two rows order alike that differ: else a row's place would be any."""
BY_PLACE = ("row_number()", "ntile(2)", "ntile(3)")
RANKS = ("rank()", "dense_rank()", "round(percent_rank(), 6)", "round(cume_dist(), 6)")
ENDS = ["UNBOUNDED PRECEDING", "2 PRECEDING", "1 PRECEDING", "CURRENT ROW", "1 FOLLOWING", "3 FOLLOWING",
        "UNBOUNDED FOLLOWING"]  # fmt: skip


@st.composite
def calls(draw: st.DrawFn, name: str, alias: str) -> str:
    """A function over a window; one that goes by places has an order in which every row has one."""
    columns = [f"{alias}.{column}" for column in COLUMNS[name]]
    one, other = (draw(st.sampled_from(columns)) for _ in range(2))
    by = draw(st.sampled_from(["", f"PARTITION BY {other} ", f"PARTITION BY {alias}.k ", f"PARTITION BY {one} + 1 "]))
    way = draw(st.sampled_from(["", "", " DESC", " NULLS LAST", " DESC NULLS FIRST"]))
    first = f"{draw(st.sampled_from([*columns, f'-{one}']))}{way}"
    total = f"ORDER BY {', '.join([first, *(f'{alias}.{column}' for column in TOTAL[name])])}"
    kind = draw(st.sampled_from(["place", "rank", "offset", "value", "value", "aggregate", "aggregate", "aggregate"]))
    if kind == "place":
        return f"{draw(st.sampled_from(BY_PLACE))} OVER ({by}{total})"
    if kind == "rank":
        call, rounded = draw(st.sampled_from(RANKS)), ""
        if call.startswith("round("):
            call, rounded = call.removeprefix("round(").removesuffix(", 6)"), "round("
        return f"{rounded}{call} OVER ({by}ORDER BY {first}){', 6)' if rounded else ''}"
    nulls = draw(st.sampled_from(["", "", " IGNORE NULLS"]))
    if kind == "offset":
        word, rows = draw(st.sampled_from(["lag", "lead"])), draw(st.sampled_from(["", ", 1", ", 2", ", -1", ", 0"]))
        nulls = "" if rows == ", 0" else nulls
        default = draw(st.sampled_from(["", ", 7", f", {other}"])) if rows else ""
        return f"{word}({one}{rows}{default}){nulls} OVER ({by}{total})"
    begin, end = sorted(draw(st.sampled_from(range(len(ENDS)))) for _ in range(2))
    begin, end = min(begin, len(ENDS) - 2), max(end, 1)
    frame = draw(st.sampled_from(["", "", f" ROWS BETWEEN {ENDS[begin]} AND {ENDS[end]}"]))
    if not frame and draw(st.booleans()):
        edges = draw(st.sampled_from([(0, 3), (3, 6), (3, 3), (0, 6)]))
        frame = f" RANGE BETWEEN {ENDS[edges[0]]} AND {ENDS[edges[1]]}"
    if kind == "value":
        word = draw(st.sampled_from(["first_value", "last_value", "nth_value", "any_value"]))
        number = f", {draw(st.integers(1, 3))}" if word == "nth_value" else ""
        return f"{word}({one}{number}){nulls} OVER ({by}{total}{frame})"
    word = draw(
        st.sampled_from(["sum", "sum", "count", "count", "avg", "min", "max", "stddev", "var_pop", "covar_samp"])
    )
    given = {"count": draw(st.sampled_from(["*", one, f"{one}, {other}"])), "covar_samp": f"{one}, {other}"}
    asked = given.get(word, draw(st.sampled_from([one, one, f"{one} + {other}", f"CAST({one} AS DECIMAL(12, 2))"])))
    order = draw(st.sampled_from(["", f"ORDER BY {first}", f"ORDER BY {first}", total]))
    frame = frame if order == total or (order and "ROWS" not in frame) else ""
    call = f"{word}({asked}) OVER ({by}{order}{frame})"
    return call if word in ("sum", "count", "min", "max") else f"round({call}, 4)"


@st.composite
def windowed(draw: st.DrawFn) -> str:
    """A SELECT with window functions, of an input, of groups or below and above other operators."""
    name = draw(st.sampled_from(["a", "a", "a", "b", "c", "d"]))
    shown = [f"p.{column}" for column in COLUMNS[name]]
    asked = [f"{draw(calls(name, 'p'))} AS w{number}" for number in range(draw(st.integers(1, 3)))]
    where = draw(st.sampled_from(["", "", f" WHERE {shown[-1]} > 0", f" WHERE {shown[-1]} IS NULL OR p.k = 1"]))
    text = f"SELECT {', '.join([*shown, *asked])} FROM {name} p{where}"
    shape = draw(st.sampled_from(["alone", "alone", "alone", "filter", "groups", "join", "over groups", "over both"]))
    groups = f"SELECT q.{COLUMNS[name][-1]} AS g, count(*) AS n, max(q.k) AS m FROM {name} q"
    grouped = f"{groups}{where.replace('p.', 'q.')} GROUP BY q.{COLUMNS[name][-1]}"
    return {
        "alone": text,
        "filter": f"SELECT * FROM ({text}) WHERE w0 > 1 OR w0 IS NULL",
        "groups": f"SELECT w0, count(*) AS n FROM ({text}) GROUP BY w0",
        "join": f"SELECT u.*, c.w AS cw FROM ({text}) u LEFT JOIN c ON c.k = u.k AND c.w < u.w0",
        "over groups": f"SELECT g, n, sum(n) OVER (ORDER BY g) AS s, lag(m) OVER (ORDER BY n, g) AS l FROM ({grouped})",
        "over both": f"SELECT k, w0, rank() OVER (PARTITION BY k ORDER BY w0 DESC) AS r, count(w0) OVER () AS n "
        f"FROM ({text})",
    }[shape]


HISTORIES = histories(("a", "a", "b", "c", "d"), 20), RANDOM[2]
WINDOWED = windowed(), *HISTORIES, RANDOM[3]


def check(spark, sql, examples):
    @given(*HISTORIES)
    @settings(max_examples=examples, phases=[Phase.generate], database=None)
    def look(history, emit):
        assert against_spark(spark, sql, history, emit, "auto")

    look()


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_but(QUERIES, "several", "join"))
def test_in_every_micro_batch_what_spark_says(spark, name):
    check(spark, QUERIES[name], 1 if name in ("several", "join") else 10)


@pytest.mark.slow
def test_many_windows_are_sparks_own(spark):
    assert share_taken(spark, WINDOWED, examples=int(os.environ.get("OVER_EXAMPLES", "400"))) > 0.98


def test_which_operators_and_how_many():
    kinds = {name: [node.kind for node in planned(sql, tables=TABLES).joins] for name, sql in QUERIES.items()}
    assert kinds["numbers"] == ["over"]
    assert kinds["top"] == ["top"]  # with a bound
    assert kinds["filter"] == ["over"]
    assert kinds["several"] == ["over", "over", "over"]  # one for each order
    assert kinds["over groups"] == ["aggregate", "over", "over"]
    assert kinds["twice"] == ["over", "regular"]  # once
    text = show(planned(QUERIES["named"], tables=TABLES))
    assert "OverAggregate(partitionBy=[k], orderBy=[x, y], select=[" in text
    assert "min(y) ROWS BETWEEN 1 PRECEDING AND CURRENT ROW" in text
    assert "-- OVER" in text
