"""Queries that are refused: what the error says, and where; § marks the place in the query.

What is unknown, ambiguous or no SQL, Spark says itself; a clause that only we refuse is where Catalyst has it from.
"""

from __future__ import annotations

import functools
import pickle
import re
import zipfile
from pathlib import Path

import pyspark
import pytest

from gpu_ops.errors import DescriptionError
from gpu_ops.query.errors import SqlError, said_in_sql
from gpu_ops.query.relations import Table
from sql.tables import TABLES, planned

JOINED = "FROM orders o JOIN prices p ON o.id = p.id"
KEY = "'0000111122223333'"
CLICKS = "SELECT c.x FROM clicks c JOIN views v ON c.uid = v.uid AND "

CLAUSES = [
    (f"§SELECT o.uid {JOINED} HAVING o.uid > 1", r"\[MISSING_GROUP_BY\]"),
    (f"SELECT o.uid {JOINED}\n§ORDER BY o.uid", "ORDER BY is understood with LIMIT only: a changelog"),
    (f"SELECT o.uid {JOINED} §SORT BY o.uid", "SORT BY"),
    (f"SELECT o.uid {JOINED} WHERE o.uid > 3 §LIMIT 10", "which rows.* write ORDER BY before LIMIT"),
    (f"SELECT o.uid {JOINED} §ORDER BY o.uid LIMIT 3 OFFSET 2", "OFFSET is not understood"),
    (f"SELECT o.uid {JOINED} §ORDER BY o.uid LIMIT 0", "the first 0 rows: they are between 1 and"),
    ("SELECT o.uid, u.tags FROM orders o JOIN users u ON o.uid = u.uid §ORDER BY u.tags LIMIT 3", "has no order"),
    ("§SELECT tags FROM users EXCEPT SELECT tags FROM users", "tags of type array<string> cannot be a key of groups"),
    ("§SELECT tags FROM users EXCEPT ALL SELECT tags FROM users", "tags of type array<string> cannot be a key"),
    ("SELECT uid FROM users GROUP BY GROUPING SETS ((uid), (name), (§x))", r"\[UNRESOLVED_COLUMN"),
    ("SELECT o.uid FROM orders o §TABLESAMPLE (5 ROWS) JOIN users u ON o.uid = u.uid", r"\[PARSE_SYNTAX_ERROR\]"),
    ("§SELECT DISTINCT tags FROM users", "cannot be a key"),
    ("SELECT /*+ BROADCAST(p) */ o.uid FROM orders o JOIN §prices p ON o.id = p.id", "hints are not understood"),
    ("WITH RECURSIVE q AS (§SELECT id FROM orders UNION ALL SELECT id + 1 FROM q) SELECT * FROM q", "WITH RECURSIVE"),
    (f"§SELECT * EXCEPT (uid) {JOINED}", "two columns 'id': give one another name with AS, or write JOIN ... USING"),
]

STATEMENTS = [
    ("§", r"\[PARSE_EMPTY_STATEMENT\]"),
    ("  -- nothing\n§", r"\[PARSE_SYNTAX_ERROR\]"),
    ("INSERT INTO §x SELECT id FROM orders", r"\[TABLE_OR_VIEW_NOT_FOUND\]"),
    ("§EXPLAIN SELECT 1", "takes a SELECT"),
    ("§orders JOIN prices", r"\[PARSE_SYNTAX_ERROR\]"),
    ("§SELECT 1", "no FROM: it joins nothing"),
    (f"SELECT o.id {JOINED}; §SELECT 2", r"\[PARSE_SYNTAX_ERROR\]"),
    (f"SELECT o.id {JOINED} §)", r"\[PARSE_SYNTAX_ERROR\]"),
    ("SELECT o.id FROM orders o JOIN prices p ON o.id = §'unclosed", r"\[PARSE_SYNTAX_ERROR\]"),
    ("SELECT (o.id + (1 FROM §orders o JOIN prices p ON o.id = p.id", r"\[PARSE_SYNTAX_ERROR\]"),
    ("SELECT o.id FROM orders o JOIN prices p ON o.id + §= 1", r"\[PARSE_SYNTAX_ERROR\]"),
    ("SELECT o.id FROM orders o JOIN prices p ON §", r"\[PARSE_SYNTAX_ERROR\]"),
    (f"SELECT o.id {JOINED} WHERE §", r"\[PARSE_SYNTAX_ERROR\]"),
    (f"SELECT o.id {JOINED} WHERE o.id > 1 §AND", r"\[PARSE_SYNTAX_ERROR\]"),
    (f"SELECT o.id o §x {JOINED}", r"\[PARSE_SYNTAX_ERROR\]"),
    ("SELECT o.id FROM orders o §OUTER JOIN prices p ON o.id = p.id", r"\[PARSE_SYNTAX_ERROR\]"),
    ("SELECT o.id FROM (SELECT id FROM orders§", r"\[PARSE_SYNTAX_ERROR\]"),
]

RELATIONS = [
    ("SELECT a.id FROM §oders a JOIN prices p ON a.id = p.id", r"\[TABLE_OR_VIEW_NOT_FOUND\]"),
    ("SELECT a.id FROM §main.orders a JOIN prices p ON a.id = p.id", r"\[TABLE_OR_VIEW_NOT_FOUND\]"),
    ("SELECT * FROM §range(10) r JOIN prices p ON r.id = p.id", "not among the inputs"),
    ("SELECT o.id FROM orders o §JOIN LATERAL (SELECT 1) x ON true", "LATERAL is not understood: explode"),
    ("SELECT * FROM orders o JOIN §VALUES (1) v ON true", "not among the inputs"),
    ("SELECT o.id FROM orders o JOIN §VALUES (1) ON true", "this is not among the inputs"),
    ("SELECT o.id FROM orders o JOIN §range(10) ON true", "this is not among the inputs"),
    (
        "§SELECT * FROM orders o LEFT JOIN prices p",
        "two columns 'id': give one another name with AS, or write JOIN ... USING",
    ),
    (
        "§SELECT * FROM orders o CROSS JOIN prices p ON o.id = p.id",
        "two columns 'id': give one another name with AS, or write JOIN ... USING",
    ),
    ("SELECT * FROM orders o RIGHT §SEMI JOIN prices p ON o.id = p.id", r"\[PARSE_SYNTAX_ERROR\]"),
    ("SELECT o.id FROM orders o JOIN prices o ON §o.id = o.id", r"\[AMBIGUOUS_REFERENCE\]"),
    ("§SELECT o.id FROM orders o JOIN prices p USING (price)", r"\[UNRESOLVED_USING_COLUMN_FOR_JOIN\]"),
    ("§WITH q AS (SELECT id FROM orders), q AS (SELECT id FROM prices) SELECT * FROM q", r"\[DUPLICATED_CTE_NAMES\]"),
    ("WITH q AS (SELECT id FROM §q) SELECT * FROM q JOIN orders o ON o.id = q.id", r"\[TABLE_OR_VIEW_NOT_FOUND\]"),
    ("SELECT * FROM §(SELECT id FROM orders) AS q(a, b) JOIN prices p ON a = p.id", r"\[ASSIGNMENT_ARITY_MISMATCH\]"),
]

NAMES = [
    (f"SELECT §o.idd {JOINED}", r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]"),
    (f"SELECT §x.id {JOINED}", r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]"),
    (f"SELECT §orders.id {JOINED}", r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]"),
    (f"SELECT 1 + §amuont AS x {JOINED}", r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]"),
    (f"SELECT §id {JOINED}", r"\[AMBIGUOUS_REFERENCE\]"),
    (f"SELECT §op {JOINED}", "'op' is ambiguous|the row kind of"),
    (f"SELECT §o.op {JOINED}", "'op' is the row kind of orders, not data"),
    (f"SELECT §x.* {JOINED}", r"\[CANNOT_RESOLVE_STAR_EXPAND\]"),
    (f"§SELECT * {JOINED}", "two columns 'id': give one another name with AS, or write JOIN ... USING"),
    (f"SELECT §o.id, p.id {JOINED}", "two columns 'id'"),
    (f"SELECT §o.id AS row_kind {JOINED}", "first column of every"),
    (
        "SELECT o.id FROM orders o LEFT SEMI JOIN prices p ON o.id = p.id WHERE §p.price > 1",
        r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]",
    ),
    (
        "SELECT o.id FROM orders o JOIN (SELECT id FROM prices WHERE price > §o.amount) q ON true",
        r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]",
    ),
    (
        f"SELECT o.id {JOINED}\n  JOIN users u\n    ON u.uid = o.uid AND §o.missing > 1",
        r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]",
    ),
]

EXPRESSIONS = [
    (f"§SELECT o.uid, sum(p.price) AS s {JOINED}", r"\[MISSING_GROUP_BY\]"),
    (
        f"SELECT §max_by(o.uid, p.price) AS n {JOINED}",
        r"max_by\(o.uid, p.price\) is not understood: aggregates are",
    ),
    (f"SELECT §sum(DISTINCT p.price) AS n {JOINED}", "DISTINCT goes with count, collect_list, min and max only"),
    (f"SELECT §count(DISTINCT o.uid, u.tags) AS n {JOINED} JOIN users u USING (uid)", "values of type array<string>"),
    (f"SELECT §try_sum(o.uid) AS n {JOINED}", r"sum\(\) of integers wraps around, and has no error"),
    ("SELECT count(*) AS n FROM users GROUP BY §array(uid)", r"array\(uid\) of type array<bigint> cannot be a key"),
    ("SELECT count(*) AS n FROM users §GROUP BY uid, tags", r"tags of type array<string> cannot be a key of groups"),
    (f"SELECT §first_value(o.uid) AS n {JOINED}", "first_value leaves nulls out: .* IGNORE NULLS"),
    (
        f"SELECT §collect_list(o.id) OVER (PARTITION BY o.uid) AS n {JOINED}",
        r"collect_list\(o.id\) OVER \(PARTITION BY o.uid\) is not understood: window functions are ROW_NUMBER",
    ),
    (
        f"SELECT §sum(p.price) OVER (ORDER BY o.uid RANGE BETWEEN 2 PRECEDING AND CURRENT ROW) AS n {JOINED}",
        "a RANGE goes to CURRENT ROW or is UNBOUNDED; a number of rows is ROWS BETWEEN",
    ),
    (
        f"SELECT §try_sum(o.uid) OVER (ORDER BY o.id) AS n {JOINED}",
        r"sum\(\) of integers wraps around, and has no error",
    ),
    (
        f"SELECT §max(u.name COLLATE UTF8_LCASE) OVER (ORDER BY u.uid) AS n {JOINED} JOIN users u USING (uid)",
        "in a collation",
    ),
    (f"SELECT §lag(o.id, CAST(NULL AS INT)) OVER (ORDER BY o.id) AS n {JOINED}", "the number of lag is a constant"),
    (f"§SELECT explode(array(1, 2)) AS n {JOINED}", "what makes many rows of one"),
    (
        f"SELECT o.id, §rand() AS r {JOINED}",
        r"rand\(\) gives another value each time, so a row",
    ),
    (f"SELECT o.id, §uuid() AS r {JOINED}", r"uuid\(\) gives another value"),
    (
        f"SELECT o.id, hex(§aes_encrypt(o.note, {KEY})) AS x {JOINED}",
        r"aes_encrypt\(o.note, '0000111122223333'\) gives .* vector, or in mode 'ECB'",
    ),
    (f"SELECT o.id {JOINED} WHERE §aes_encrypt(o.note, {KEY}, lower('CBC')) > X'00'", "gives another value each time"),
    (f"SELECT o.id, §aes_encrypt(o.note, {KEY}, o.note) AS x {JOINED}", "gives another value each time"),
    (f"SELECT o.id, §aes_encrypt(o.note, {KEY}, 'GCM', 'DEFAULT', encode('', 'utf-8')) AS x {JOINED}", "another value"),
    (f"SELECT o.id, §aes_encrypt(o.note, {KEY}, 'GCM', 'NONE', unhex(o.note)) AS x {JOINED}", "another value"),
    (
        f"SELECT o.id {JOINED} WHERE EXISTS (SELECT 1 FROM users u WHERE o.uid < hex(§aes_encrypt(name, {KEY})))",
        "another value",
    ),
    (
        f"SELECT o.id {JOINED} WHERE o.note IN (SELECT hex(§aes_encrypt(name, {KEY})) FROM users)",
        "another value",
    ),
    (f"SELECT max(§aes_encrypt(note, {KEY})) AS x FROM orders GROUP BY uid", "another value"),
    (f"SELECT o.id, §CAST(nvl('now', 'then') AS DATE) AS x {JOINED}", "gives another value each time"),
    (f"SELECT o.id {JOINED} WHERE p.price > 1 AND o.note = cast(§current_timestamp() AS STRING)", "another value"),
    (f"SELECT o.id, §CAST('now' AS TIMESTAMP) AS x {JOINED}", "gives another value each time"),
    (f"SELECT o.id, §CAST(lower('TODAY') AS DATE) AS x {JOINED}", "gives another value each time"),
    (f"SELECT o.id, §to_date('Today') AS x {JOINED}", "gives another value each time"),
    (f"SELECT o.id, §DATE 'yesterday' AS x {JOINED}", "DATE 'yesterday' gives another value each time"),
    (f"SELECT o.id {JOINED} AND o.id = §(SELECT max(uid) FROM users)", "a sub-query can stand in FROM, as a value in"),
    (
        f"SELECT count(*) AS n {JOINED} §GROUP BY (SELECT name FROM users)",
        "GROUP BY a sub-query: group by its column in FROM",
    ),
    (f"SELECT o.id {JOINED} WHERE §o.id > 1 OR EXISTS (SELECT 1 FROM users u WHERE u.uid = o.uid)", "a sub-query can"),
    (f"SELECT o.id {JOINED} AND o.id §IN (SELECT uid FROM users)", "a sub-query can"),
    (
        f"SELECT o.id {JOINED} WHERE (o.id, o.uid) §IN (SELECT uid FROM users)",
        r"\[DATATYPE_MISMATCH\.IN_SUBQUERY_LENGTH_MISMATCH\]",
    ),
    (f"SELECT o.id {JOINED} WHERE o.id = §:value", r"\[UNBOUND_SQL_PARAMETER\]"),
    (
        "SELECT o.id FROM orders o WHERE EXISTS (SELECT 1 FROM prices p WHERE p.id = o.id AND EXISTS (SELECT 1 FROM users u WHERE u.uid = §o.uid))",  # noqa: E501
        r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\]",
    ),
]

TIMES = [
    (f"{CLICKS}§v.ts > c.ts", "v.ts has no upper bound against c.ts: .*BETWEEN c.ts - INTERVAL 10 MINUTES.*CAST"),
    (f"{CLICKS}§c.ts >= v.ts - INTERVAL 1 HOUR", "v.ts has no lower bound against c.ts"),
    (f"{CLICKS}§c.ts <> v.ts", "not with a constant between"),
    (f"{CLICKS}c.ts §BETWEEN v.ts AND v.ts + INTERVAL 1 MONTH", "v.ts has no lower bound"),
    (f"{CLICKS}§date_trunc('day', c.ts) = date_trunc('day', v.ts)", "not with a constant between"),
    (f"{CLICKS}v.ts §BETWEEN c.ts AND c.ts + INTERVAL 5 MICROSECONDS", "whole milliseconds"),
    (f"{CLICKS}v.ts §BETWEEN c.ts AND c.ts - INTERVAL 1 HOUR", "the interval is empty"),
    (
        "SELECT c.x FROM clicks c JOIN edits v ON c.uid = v.uid AND v.ts §BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR",
        "takes inputs that only grow, and v brings retractions",
    ),
    (
        "SELECT c.x FROM clicks c WHERE c.uid NOT IN (SELECT v.uid FROM views v WHERE v.ts §BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR)",  # noqa: E501
        "NOT IN has no bounds in time: write NOT EXISTS",
    ),
    (
        "SELECT c.x FROM clicks c JOIN users u ON c.uid = u.uid JOIN views v ON c.uid = v.uid AND v.ts §BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR",  # noqa: E501
        "c.ts is no event time any more: the regular INNER JOIN of c and u below gives rows of any age, and may",
    ),
    (
        "SELECT c.x FROM clicks c LEFT JOIN views v ON c.uid = v.uid AND v.ts BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR JOIN views w ON c.uid = w.uid AND w.ts §BETWEEN v.ts AND v.ts + INTERVAL 1 HOUR",  # noqa: E501
        "v.ts is no event time any more: the interval LEFT JOIN of c and v below may leave it null",
    ),
]

ASOF = "SELECT c.x FROM clicks c ASOF JOIN views v ON c.uid = v.uid AND c.ts >= v.ts AND §"
BY_TIME = [
    ("SELECT c.x FROM clicks c §ASOF JOIN views v", "this join by time needs its condition"),
    ("SELECT c.x FROM clicks c §ASOF RIGHT JOIN views v ON c.ts > v.ts", "an ASOF join is INNER or LEFT"),
    ("SELECT c.x FROM clicks c ASOF JOIN views v §USING (uid)", "write ON instead of USING"),
    ("SELECT c.x FROM clicks c ASOF JOIN views v §MATCH_CONDITION c.ts > v.ts", "in parentheses"),
    ("SELECT c.x FROM clicks c ASOF §JOIN views v ON c.uid = v.uid", "needs a comparison of times"),
    ("SELECT c.x FROM clicks c ASOF JOIN views v ON c.ts > v.ts AND §c.x < v.y", "one comparison of times"),
    ("SELECT c.x FROM clicks c ASOF JOIN views v ON §c.ts + INTERVAL 1 DAY > v.ts", "compares a column of each side"),
    (f"{ASOF}v.ts - c.ts <= INTERVAL 1 DAY", r"the tolerance of this ASOF join is c.ts - v.ts <= INTERVAL 1 SECOND"),
    (f"{ASOF}c.ts - v.ts >= INTERVAL 1 DAY", "the tolerance of this ASOF join"),
    (f"{ASOF}c.ts - v.ts < INTERVAL 1 DAY", "it is inclusive, and not negative"),
    (f"{ASOF}c.ts - v.ts <= -INTERVAL 1 DAY", "it is inclusive, and not negative"),
    (f"{ASOF}c.ts - v.ts <= INTERVAL 1 MICROSECOND", "the tolerance of an ASOF join is whole milliseconds"),
    (f"{ASOF}CAST(c.ts AS DATE) <= v.ts + INTERVAL 1 DAY", "the tolerance of this ASOF join"),
    ("SELECT c.x FROM clicks c ASOF LEFT JOIN views v ON c.ts > v.ts AND §c.x <> v.y", "filter in WHERE"),
    ("SELECT c.x FROM clicks c §ASOF JOIN views v ON c.uid = v.uid OR c.ts > v.ts", "stands in FROM"),
    ("SELECT c.x\nFROM clicks c\n  ASOF JOIN views v MATCH_CONDITION (c.ts > §v.when) ON c.uid = v.uid", "v`.`when"),
    ("SELECT c.x FROM clicks c JOIN views FOR SYSTEM_TIME AS OF §c.when AS v ON c.uid = v.uid", "c`.`when"),
    ("SELECT c.x FROM clicks c §JOIN views FOR SYSTEM_TIME AS OF v.ts AS v ON c.uid = v.uid", "of the left input"),
    (
        "SELECT c.x FROM clicks c LEFT JOIN users u ON c.uid = u.uid §JOIN views FOR SYSTEM_TIME AS OF c.ts AS v ON c.uid = v.uid",  # noqa: E501
        "and c.ts is no event time any more: the regular LEFT JOIN of c and u below gives rows of any age",
    ),
    ("SELECT c.x FROM clicks c §JOIN payments FOR SYSTEM_TIME AS OF c.ts p ON c.uid = p.uid", "has no event time"),
    ("SELECT c.uid FROM edits c §JOIN views FOR SYSTEM_TIME AS OF c.ts v ON c.uid = v.uid", "only grows"),
    ("SELECT c.x FROM clicks §FOR SYSTEM_TIME AS OF c.ts", "follows the table of a JOIN"),
    (
        "SELECT c.x FROM clicks c §JOIN views FOR SYSTEM_TIME AS OF c.ts AS v ON v.y > 1",
        "a temporal join needs ON: col",
    ),
    (
        "SELECT c.x FROM clicks c §JOIN prices FOR SYSTEM_TIME AS OF PROCTIME() AS v ON v.id > 1",
        "a lookup join needs ON:",
    ),
    (
        "SELECT c.x FROM clicks c §JOIN views FOR SYSTEM_TIME AS OF c.ts AS v ON c.uid = v.uid AND v.y > rand()",
        r'the actual expression is "\(*uid = uid',
    ),
]

MORE = [
    (
        "SELECT o.id FROM orders o LEFT JOIN users u ON o.note §LIKE u.name",
        "o.note LIKE u.name takes columns of both inputs; an outer",
    ),
    ("SELECT o.id, §EXISTS (SELECT 1 FROM users) AS x FROM orders o JOIN prices p ON o.id = p.id", "a sub-query can"),
    (
        "SELECT o.id FROM orders o WHERE o.id §IN (SELECT p.id FROM prices p WHERE p.price = o.amount LIMIT 1)",
        "write ORDER",
    ),
    ("SELECT o.id FROM orders o §ORDER BY o.id LIMIT 20000", "the first 20000 rows: they are between 1 and 10000"),
    (
        "SELECT o.id FROM orders o WHERE EXISTS (SELECT 1 FROM prices p WHERE o.uid §IN (SELECT u.uid FROM users u))",
        "a sub-query can stand in FROM",
    ),
    (
        "SELECT o.id, count(DISTINCT u.tags) AS n FROM orders o JOIN users u ON o.uid = u.uid §GROUP BY o.id",
        "of this type",
    ),
    ("§SELECT max(u.tags) AS n FROM orders o JOIN users u ON o.uid = u.uid", "there is no order"),
    (
        "SELECT q.i, o.id FROM (SELECT u.uid, §u.uid * INTERVAL 1 MONTH AS i FROM users u) q JOIN orders o USING (uid)",
        "columns of type interval year to month are not carried; CAST",
    ),
    (
        "SELECT count(*) AS n FROM clicks §GROUP BY session_window(ts, '1 month')",
        "longer in some months than in others",
    ),
    (
        "SELECT count(*) AS n FROM clicks §GROUP BY session_window(ts, '0 seconds')",
        "a gap of 0 seconds is not positive",
    ),
    (
        "SELECT session_window, count(*) AS m FROM (SELECT session_window FROM clicks GROUP BY session_window(ts, '1 hour'), x) §GROUP BY session_window",  # noqa: E501
        "merged already, and Spark would merge them again",
    ),
    (f"SELECT §now() AS t {JOINED}", r"now\(\) gives another value"),
    (f"SELECT §current_date() AS t {JOINED}", r"current_date\(\) gives another value"),
]

TAKEN = [
    "SELECT * FROM orders NATURAL JOIN prices",
    "SELECT o.id FROM orders o, users u JOIN payments y ON y.uid = o.uid",
    "SELECT struct(*) AS s FROM orders o JOIN prices p ON o.id = p.id",
    "SELECT o.id FROM orders o WHERE EXISTS (SELECT 1 FROM prices p JOIN users u ON u.uid = o.uid)",
    "SELECT o.id FROM orders o JOIN users u ON o.uid = u.name",
    "SELECT o.id FROM orders o JOIN prices p ON o.id = p.price",
    "SELECT o.id FROM orders o LEFT JOIN prices p ON o.id = p.id AND sqrt(o.amount) > p.price",
    "SELECT o.id FROM orders o LEFT JOIN prices p ON o.id = p.id AND \n p.price > o.amount\n AND o.amount < p.price || 'x'",  # noqa: E501
    "SELECT o.id FROM orders o LEFT JOIN users u ON substring(o.note, 1) = u.uid",
    "SELECT c.x FROM clicks c ASOF LEFT JOIN views v ON c.ts > v.ts AND c.x > 1",
    "SELECT c.x FROM clicks c ASOF JOIN (SELECT * FROM prices WHERE price > 1) p ON c.uid > p.id",
    "SELECT o.id FROM orders o FULL JOIN (SELECT id, price FROM prices WHERE price > 1) p ON o.id = p.id",
    "SELECT window, count(*) AS n FROM clicks GROUP BY window(ts, '1 minute')",
    "SELECT count(*) AS n FROM prices GROUP BY window(CAST(price AS TIMESTAMP), '10 seconds', '2 seconds')",
    "SELECT c.x FROM clicks c LEFT JOIN prices FOR SYSTEM_TIME AS OF PROCTIME() AS p ON c.uid = p.id AND p.price > 1",
    f"SELECT o.id, aes_encrypt(o.note, {KEY}, 'ecb') AS x {JOINED}",
    f"SELECT o.id, aes_encrypt(o.note, {KEY}, 'GCM', 'DEFAULT', encode('000000000000', 'utf-8')) AS x {JOINED}",
    f"SELECT o.id, aes_encrypt(o.note, {KEY}, 'CBC', 'DEFAULT', unhex(repeat('00', 16))) AS x {JOINED}",
    f"SELECT o.id, aes_decrypt(unhex(o.note), {KEY}) AS x {JOINED}",
]
"""What Spark takes, we take: its comma, NATURAL, casts of operands, functions of one input in ON."""

TABLE = [*CLAUSES, *STATEMENTS, *RELATIONS, *NAMES, *EXPRESSIONS, *TIMES, *BY_TIME, *MORE]


@functools.cache
def class_names():
    """Names of classes of Catalyst's that are no words of English or SQL, in small letters."""
    (jar,) = Path(pyspark.__file__).parent.glob("jars/spark-catalyst_*.jar")
    paths = [x.removesuffix(".class").rsplit("/", 1)[-1] for x in zipfile.ZipFile(jar).namelist() if "catalyst" in x]
    return {name.lower() for name in paths if re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]*)+", name)}


def check_words(message):
    """No class of Catalyst's is named, and no argument in Python; Spark's own words are Spark's."""
    if message.startswith("Spark does not take this"):
        return
    assert not re.findall(r"\b[a-z_]+=(?!=)", message)
    assert not {word.lower() for word in re.findall(r"\w+", message)} & (class_names() - {"dataframe", "timestamp"})


@pytest.mark.parametrize("query", TAKEN)
def test_taken(query):
    assert planned(query).joins


@pytest.mark.parametrize(("query", "message"), TABLE, ids=[query[:60] for query, _ in TABLE])
def test_refused(query, message):
    before, mark, after = query.partition("§")
    assert mark
    with pytest.raises(SqlError, match=message) as error:
        planned(before + after)
    line = before.count("\n") + 1
    column = len(before) - before.rfind("\n")
    assert (error.value.line, error.value.column) == (line, column), str(error.value)
    check_words(error.value.message)
    *_, text, caret = str(error.value).split("\n")
    assert text == "  " + ((before + after).split("\n")[line - 1])
    assert caret.index("^") == column + 1


WINDOWS = "GROUP BY window(ts, '1 minute')"
CARDS = "JOIN (SELECT * FROM cards WHERE uid > 1) v ON"


@pytest.mark.parametrize(
    ("query", "emit"),
    [
        (f"SELECT count(*) AS n FROM cards WHERE uid > 1 {WINDOWS}", "at_watermark"),
        (f"SELECT c.x FROM clicks c FULL {CARDS} v.ts BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR", "per_batch"),
        (f"SELECT c.x FROM clicks c ASOF {CARDS} c.ts >= v.ts", "at_watermark"),
    ],
)
def test_filtered_upserts_have_no_place_where_inputs_only_grow(query, emit):
    cards = Table("cards", TABLES["edits"].schema, row_kind="op", unique_key=("uid",), event_times=("ts",))
    with pytest.raises(SqlError, match="cards brings upserts"):
        planned(query, tables={**TABLES, "cards": cards}, emit=emit)


@pytest.mark.parametrize("group", ["window(ts, '1 hour')", "session_window(ts, '1 hour')", "ts"])
def test_final_windows_over_a_union_name_the_part_without_an_event_time(group):
    query = f"SELECT count(*) AS n\nFROM (SELECT ts FROM clicks UNION ALL SELECT at FROM payments) q GROUP BY {group}"
    with pytest.raises(SqlError, match=r"ts is no event time any more: payments.at, in a part of the UNION") as error:
        planned(query, emit="at_watermark")
    assert (error.value.line, error.value.column) == (2, 66)


def test_the_table_is_long_enough():
    assert len({query for query, _ in TABLE}) >= 80


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


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("write on='k'", "write ON 'k'"),
        ("on=[('a', 'b')] has 1 entries", "ON [('a', 'b')] has 1 entries"),
        ("on=: names", "ON: names"),
        ("join(): emit='at_end' has no place", "emit 'at_end' has no place"),
        ("the call f(x=1), a == b and spark.sql.x=3", "the call f(x=1), a == b and spark.sql.x=3"),
    ],
)
def test_a_message_of_a_description_in_the_words_of_sql(message, said):
    assert said_in_sql(message) == said
