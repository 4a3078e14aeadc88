"""Queries that are refused: what the error says, and where; § marks the place in the query."""

from __future__ import annotations

import pickle

import pytest

from gpu_ops.conditions import nodes_of
from gpu_ops.conditions.expressions import Literal
from gpu_ops.errors import DescriptionError
from gpu_ops.query.errors import SqlError
from sql.tables import TABLES, planned

JOINED = "FROM orders o JOIN prices p ON o.id = p.id"

CLAUSES = [
    (f"SELECT o.uid {JOINED} §GROUP BY o.uid", "GROUP BY is not understood: join first; .*foreachBatch"),
    (f"SELECT o.uid {JOINED} §HAVING o.uid > 1", "HAVING is not understood"),
    (f"SELECT o.uid {JOINED}\n§ORDER BY o.uid", "ORDER BY is not understood: a changelog has its own order"),
    (f"SELECT o.uid {JOINED} §SORT BY o.uid", "SORT BY"),
    (f"SELECT o.uid {JOINED} WHERE o.uid > 3 §LIMIT 10", "LIMIT is not understood: a stream has no end"),
    (f"SELECT o.uid {JOINED} §UNION ALL SELECT uid FROM users", "UNION is not understood: call sql.. once for each"),
    (f"SELECT o.uid {JOINED} §EXCEPT SELECT uid FROM users", "EXCEPT .* NOT EXISTS"),
    (f"SELECT o.uid {JOINED} §INTERSECT SELECT uid FROM users", "INTERSECT .* LEFT SEMI JOIN"),
    ("SELECT o.uid FROM orders o §TABLESAMPLE (5 ROWS) JOIN users u ON o.uid = u.uid", "TABLESAMPLE .* sample"),
    (f"SELECT §DISTINCT o.uid {JOINED}", "SELECT DISTINCT is not understood: .* dropDuplicates"),
    ("SELECT o.id FROM orders o WHERE o.id IN (SELECT §DISTINCT id FROM prices)", "DISTINCT is not needed"),
    (f"SELECT §/*+ BROADCAST(p) */ o.uid {JOINED}", "hints are not understood"),
    ("WITH §RECURSIVE q AS (SELECT id FROM orders) SELECT * FROM q", "WITH RECURSIVE"),
    (f"SELECT * §EXCEPT (uid) {JOINED}", r"\* EXCEPT is not understood: list the columns"),
]

STATEMENTS = [
    ("§", "the query is empty"),
    ("  -- nothing\n§", "the query is empty"),
    ("§INSERT INTO x SELECT id FROM orders", "expected SELECT, found 'INSERT': .* writeStream"),
    ("§EXPLAIN SELECT 1", "expected SELECT.*explain"),
    ("§orders JOIN prices", "expected SELECT, found 'orders': sql.. takes a query"),
    ("SELECT 1§", "no FROM: it joins nothing"),
    (f"SELECT o.id {JOINED}; §SELECT 2", "several statements"),
    (f"SELECT o.id {JOINED} §)", r"expected the end of the query, found '\)'"),
    ("§SELECT id FROM orders WHERE id > 3", "the query joins nothing: filter and project one stream in Spark"),
    ("SELECT o.id FROM orders o JOIN prices p ON o.id = §'unclosed", "a quote or comment is opened here"),
    (f"SELECT (o.id + §(1 {JOINED}", "a parenthesis is opened here and not closed"),
    ("SELECT o.id FROM orders o JOIN prices p ON o.id + §= 1", "this is no expression"),
    ("SELECT o.id FROM orders o JOIN prices p ON §", "expected a condition after ON, found the end"),
    (f"SELECT o.id {JOINED} WHERE §", "expected a condition after WHERE"),
    (f"SELECT o.id {JOINED} WHERE o.id > 1 §AND", "expected a condition after AND"),
    (f"SELECT o.id o §x {JOINED}", "expected ',' or FROM, found 'x'"),
    ("SELECT o.id FROM orders o §OUTER JOIN prices p ON o.id = p.id", "expected the end of the query, found 'OUTER'"),
    ("SELECT o.id FROM (SELECT id FROM orders§", r"expected \), found the end"),
]

RELATIONS = [
    ("SELECT a.id FROM §oders a JOIN prices p ON a.id = p.id", "there is no table 'oders'; there are orders, "),
    ("SELECT a.id FROM §main.orders a JOIN prices p ON a.id = p.id", "a table of a catalog: give it as an input"),
    ("SELECT * FROM §range(10) r JOIN prices p ON r.id = p.id", r"range\(...\) is a table function"),
    ("SELECT o.id FROM orders o JOIN §LATERAL (SELECT 1) x ON true", "LATERAL is not understood: explode"),
    ("SELECT * FROM orders o JOIN §VALUES (1) v ON true", "VALUES is no table here"),
    ("SELECT * FROM orders §NATURAL JOIN prices", r"NATURAL JOIN is not understood: .* USING \(k\)"),
    ("SELECT * FROM orders o §LEFT JOIN prices p", r"LEFT JOIN has no condition: write ON ... or USING"),
    ("SELECT * FROM orders o §CROSS JOIN prices p ON o.id = p.id", "CROSS JOIN takes no condition"),
    ("SELECT * FROM orders o §RIGHT SEMI JOIN prices p ON o.id = p.id", "there is no RIGHT SEMI JOIN"),
    ("SELECT o.id FROM orders o JOIN §prices o ON o.id = o.id", "two tables are called 'o' here"),
    ("SELECT o.id FROM orders o, users u JOIN payments y ON y.uid = §o.uid", "'o' stands before a comma, .*CROSS JOIN"),
    ("SELECT o.id FROM orders o JOIN prices p USING (§price)", "there is no column 'price'; there are id, "),
    ("SELECT o.id FROM orders §FOR SYSTEM_TIME AS OF o.ts o JOIN prices p ON true", "temporal join"),
    ("WITH q AS (SELECT id FROM orders), §q AS (SELECT id FROM prices) SELECT * FROM q", "WITH names 'q' twice"),
    ("WITH q AS (SELECT id FROM §q) SELECT * FROM q JOIN orders o ON o.id = q.id", "there is no table 'q'"),
    ("SELECT * FROM §(SELECT id FROM orders) AS q(a, b) JOIN prices p ON a = p.id", "q has 1 columns and 2 names"),
]

ON = "ON l_id = r_id"
L, R = "(SELECT id AS l_id FROM orders)", "(SELECT id AS r_id FROM prices)"

SWALLOWED = [
    *(
        (f"SELECT amount, price FROM orders §{word} JOIN prices USING (id)", f"{word} JOIN is not understood; if it is")
        for word in ("ASOF", "ANY", "GLOBAL", "ALL", "POSITIONAL", "PASTE", "TEMPORAL", "ARRAY", "STRAIGHT")
    ),
    ("SELECT amount, price FROM orders §ASOF LEFT JOIN prices USING (id)", "ASOF JOIN is not understood"),
    ("SELECT amount, price FROM orders §GLOBAL INNER JOIN prices USING (id)", "GLOBAL JOIN is not understood"),
    ("SELECT amount, price FROM orders §LEFTT JOIN prices USING (id)", "'LEFTT' before JOIN is no kind of join"),
    ("SELECT amount FROM orders o JOIN prices §any JOIN users u USING (uid)", "ANY JOIN is not understood"),
    (f"SELECT l_id FROM {L} §asof JOIN {R} r {ON}", "ASOF JOIN is not understood; .* write AS asof"),
    (f"SELECT l_id FROM {L} l JOIN {R} §FINAL {ON}", "FINAL is not understood; .* write AS FINAL"),
    (f"SELECT o.id {JOINED} §ASOF JOIN users u ON o.uid = u.uid", "expected an operator before 'ASOF'"),
    (f"SELECT o.id {JOINED} §foo", "expected an operator before 'foo'"),
    (f"SELECT o.id {JOINED} WHERE o.uid > 1 §foo", "expected an operator before 'foo'"),
    (f"SELECT o.id {JOINED} AND p.price > 1 §foo", "expected an operator before 'foo'"),
    (f"SELECT o.id {JOINED} WHERE p.price > 1 AS §foo", "expected an operator before 'foo'"),
    (f"SELECT o.id §IGNORE {JOINED}", "expected an operator before 'IGNORE'"),
    (f"SELECT o.id + 1 §END more {JOINED}", "expected an operator before 'END'"),
    ("SELECT id FROM orders WHERE uid NOT DESC IN §(SELECT uid FROM users)", "a sub-query can stand"),
]

NAMES = [
    (f"SELECT §o.idd {JOINED}", "'o' has no column 'idd'; it has id, uid"),
    (f"SELECT §x.id {JOINED}", "there is no table 'x' here; there are o, p"),
    (f"SELECT §orders.id {JOINED}", "there is no table 'orders' here"),
    (f"SELECT 1 + §amuont AS x {JOINED}", "there is no column 'amuont'; there are amount, "),
    (f"SELECT §id {JOINED}", "'id' is ambiguous: it can be o.id and p.id"),
    (f"SELECT §op {JOINED}", "'op' is ambiguous|the row kind of"),
    (f"SELECT §o.op {JOINED}", "'op' is the row kind of orders, not data"),
    (f"SELECT §x.* {JOINED}", "there is no table 'x' here"),
    (f"SELECT §* {JOINED}", "two columns 'id', o.id and p.id: give one another name with AS, or JOIN ... USING"),
    (f"SELECT o.id, §p.id {JOINED}", "two columns 'id'"),
    (f"SELECT §o.id AS row_kind {JOINED}", "first column of every"),
    ("SELECT o.id FROM orders o LEFT SEMI JOIN prices p ON o.id = p.id WHERE §p.price > 1", "right of a semi join"),
    ("SELECT o.id FROM orders o JOIN (SELECT id FROM prices WHERE price > §o.amount) q ON true", "no table 'o' here"),
    (f"SELECT o.id {JOINED}\n  JOIN users u\n    ON u.uid = o.uid AND §o.missing > 1", "'o' has no column 'missing'"),
]

EXISTS = "SELECT o.id FROM orders o WHERE EXISTS (SELECT 1 FROM prices"

EXPRESSIONS = [
    (f"SELECT o.uid, §sum(p.price) AS s {JOINED}", "the aggregate SUM is not understood: join first; "),
    (f"SELECT 1 + §count(*) AS n {JOINED}", "the aggregate COUNT"),
    (f"SELECT §max_by(o.uid, p.price) AS n {JOINED}", "the aggregate MAX_BY"),
    (f"SELECT §row_number() OVER (PARTITION BY o.uid ORDER BY o.id) AS n {JOINED}", "a window function"),
    (f"SELECT §sum(p.price) OVER (PARTITION BY o.uid) AS n {JOINED}", "a window function"),
    (f"SELECT §explode(array(1, 2)) AS n {JOINED}", "EXPLODE makes many rows of one"),
    (f"SELECT o.id, §rand() AS r {JOINED}", "RAND gives another value each time, so a row could not be taken back"),
    (f"SELECT o.id, §uuid() AS r {JOINED}", "UUID gives another value"),
    (f"SELECT o.id {JOINED} WHERE p.price > 1 AND o.note = cast(§current_timestamp() AS STRING)", "another value"),
    (f"SELECT o.id {JOINED} WHERE o.id = §(SELECT max(uid) FROM users)", "a sub-query can stand in FROM, and in WHERE"),
    (f"SELECT §(SELECT 1 FROM users) AS x {JOINED}", "a sub-query can stand in FROM"),
    (f"SELECT o.id {JOINED} WHERE o.id > 1 OR EXISTS §(SELECT 1 FROM users u WHERE u.uid = o.uid)", "a sub-query can"),
    (f"SELECT o.id {JOINED} AND §EXISTS (SELECT 1 FROM users)", "a sub-query can stand in FROM, and in WHERE"),
    (f"SELECT o.id {JOINED} AND §o.id IN (SELECT uid FROM users)", "a sub-query can"),
    (f"SELECT o.id {JOINED} WHERE §(o.id, o.uid) IN (SELECT uid FROM users)", "IN compares 2 values with the 1 col"),
    (f"SELECT struct(§*) AS s {JOINED}", "stands alone in a SELECT list"),
    (f"SELECT o.id {JOINED} WHERE o.id = §:value", "parameters are not understood"),
    ("SELECT o.id FROM orders o WHERE o.id IN (SELECT §p.id + o.uid FROM prices p)", "selects columns of its own"),
    (f"{EXISTS} p JOIN users u ON §u.uid = o.uid)", "ON can name its own tables only"),
    (f"{EXISTS} p WHERE p.id = o.id AND EXISTS (SELECT 1 FROM users u WHERE §u.uid = o.uid))", "the query right"),
]  # fmt: skip

LEFT = "SELECT o.id FROM orders o LEFT JOIN prices p ON o.id = p.id AND "

JOINS = [
    ("SELECT o.id FROM orders o JOIN users u ON §o.uid = u.name", "cannot compare key 'o.uid' .int64. with 'u.name'"),
    ("SELECT o.id FROM orders o JOIN prices p ON §o.id = p.price", "CAST one of them in the query"),
    (f"{LEFT}§sqrt(o.amount) > p.price", "there is no function 'sqrt' .* an outer, semi or anti join evaluates"),
    (f"{LEFT}\n p.price > o.amount\n AND o.amount < p.price §|| 'x'", "expected an operator .* found '..'"),
    (
        "SELECT o.id FROM orders o FULL JOIN (SELECT id, price FROM prices WHERE §price > 1) p ON o.id = p.id",
        "below a full join, on an input that brings upserts",
    ),
    (
        "SELECT o.id FROM orders o LEFT JOIN users u ON §substring(o.note, 1) = u.uid",
        "the type of 'substring.*' is not known without Spark",
    ),
]

CLICKS = "SELECT c.x FROM clicks c JOIN views v ON c.uid = v.uid AND "
HOUR = "BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR"

TIMES = [
    (f"{CLICKS}§v.ts > c.ts", "v.ts has no upper bound against c.ts: .*BETWEEN c.ts - INTERVAL 10 MINUTES.*CAST"),
    (f"{CLICKS}§c.ts >= v.ts - INTERVAL 1 HOUR", "v.ts has no lower bound against c.ts"),
    (f"{CLICKS}§c.ts <> v.ts", "not with a constant between"),
    (f"{CLICKS}§c.ts BETWEEN v.ts AND v.ts + INTERVAL 1 MONTH", "not with a constant between"),
    (f"{CLICKS}§date_trunc('day', c.ts) = date_trunc('day', v.ts)", "not with a constant between"),
    (f"{CLICKS}§v.ts BETWEEN c.ts AND c.ts + INTERVAL 5 MICROSECONDS", "whole milliseconds"),
    (f"{CLICKS}§v.ts BETWEEN c.ts AND c.ts - INTERVAL 1 HOUR", "the interval is empty"),
    (f"{CLICKS.replace('views', 'edits')}§v.ts {HOUR}", "takes inputs that only grow, and v brings retractions"),
    (
        f"SELECT c.x FROM clicks c WHERE EXISTS (SELECT 1 FROM views v WHERE c.uid = v.uid AND §v.ts {HOUR})",
        "a semi join by interval is not built",
    ),
    (
        f"SELECT c.x FROM clicks c JOIN users u ON c.uid = u.uid JOIN views v ON c.uid = v.uid AND §v.ts {HOUR}",
        "c.ts is no event time above the join below",
    ),
]

TABLE = [*CLAUSES, *STATEMENTS, *RELATIONS, *SWALLOWED, *NAMES, *EXPRESSIONS, *JOINS, *TIMES]


@pytest.mark.parametrize(("query", "message"), TABLE, ids=[query[:60] for query, _ in TABLE])
def test_refused(query, message):
    before, mark, after = query.partition("§")
    assert mark
    with pytest.raises(SqlError, match=message) as error:
        planned(before + after)
    line = before.count("\n") + 1
    column = len(before) - before.rfind("\n")
    assert (error.value.line, error.value.column) == (line, column), str(error.value)
    *_, text, caret = str(error.value).split("\n")
    assert text == "  " + ((before + after).split("\n")[line - 1])
    assert caret.index("^") == column + 1


def test_a_word_before_join_that_is_a_name():
    """Any word is a name where AS says so, or where something is named with it."""
    for query in (
        "SELECT asof.id FROM orders asof JOIN prices p ON asof.id = p.id",
        "SELECT price FROM orders AS asof JOIN prices USING (id)",
        "SELECT price FROM orders `asof` JOIN prices USING (id)",
        "SELECT price FROM orders o JOIN prices p USING (id)",
        "SELECT price FROM orders JOIN prices final ON orders.id = final.id",
    ):
        assert planned(query).joins[0].description.how == "inner"


def test_the_table_is_long_enough():
    assert len({query for query, _ in TABLE}) >= 80


@pytest.mark.parametrize("how", ["LEFT ", ""])
def test_a_time_without_a_zone_is_read_in_the_sessions(how):
    sql = f"SELECT o.id FROM orders o {how}JOIN payments y ON o.uid = y.uid"
    sql += " AND (o.id = 1 OR y.at > TIMESTAMP '2024-01-31')"
    for zone, hour in (("UTC", 0), ("America/New_York", 5), ("Asia/Kolkata", -5.5)):
        join = planned(sql, time_zone=zone).joins[0].description
        literals = [node.value for node in nodes_of(join.condition.root) if isinstance(node, Literal)]
        assert 1706659200000000 + int(hour * 3_600_000_000) in literals
    with pytest.raises(DescriptionError, match="the time zone 'Mars/Base' is not known here"):
        planned(sql, time_zone="Mars/Base")


def test_options():
    for options in ({"multi_way": "yes"}, {"emit": "sometimes"}):
        with pytest.raises(DescriptionError, match="is one of"):
            planned(f"SELECT o.id {JOINED}", **options)


def test_an_error_can_be_pickled():
    with pytest.raises(SqlError) as error:
        planned("SELECT 1")
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.column) == (str(error.value), error.value.column)


def test_every_input_can_be_named_in_any_case():
    assert "orders" in TABLES
    assert planned("select O.ID from ORDERS o join Prices P on o.Id = p.iD").root.select[0].name == "ID"
