"""Random words put into good queries: refused by an error of this pack, or the rows that Spark's own SQL gives."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from pyspark.errors import PySparkException

import gpu_ops
from sql.test_errors import check_words

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

TABLES: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "orders": ("id long, uid long, amount double", [(1, 7, 10.0), (2, 8, 20.0), (3, None, 5.0), (None, 7, 1.0)]),
    "prices": ("id long, price double", [(1, 3.0), (2, 9.0), (2, 0.5), (None, 2.0)]),
    "users": ("uid long, name string", [(7, "ann"), (9, "cy"), (None, "bob")]),
}
QUERIES = [
    """SELECT o.id, p.price AS cost FROM orders o LEFT JOIN prices p ON o.id = p.id AND p.price > 1
       WHERE o.uid IS NOT NULL""",
    "SELECT id, amount FROM orders JOIN prices USING (id)",
    "SELECT orders.id, price total FROM orders, prices WHERE orders.id = prices.id AND NOT amount < 3",
    "SELECT name FROM (SELECT uid, name FROM users WHERE name LIKE 'a%') q JOIN orders o ON q.uid = o.uid",
    """WITH q AS (SELECT id, amount + 1 AS more FROM orders)
       SELECT more, price FROM q FULL OUTER JOIN prices AS y ON y.id = q.id""",
    """SELECT o.id, CASE WHEN price > 1 THEN 'x' ELSE 'y' END AS c
       FROM (orders o CROSS JOIN users u) INNER JOIN prices p ON p.id = o.id AND o.uid <=> u.uid""",
    """SELECT id FROM orders o
       WHERE EXISTS (SELECT 1 FROM prices p WHERE p.id = o.id) AND uid NOT IN (SELECT uid FROM users)""",
    "SELECT o.id FROM orders o LEFT SEMI JOIN prices p ON o.id = p.id LEFT ANTI JOIN users u ON o.uid = u.uid",
]
_WORDS = r"""
    ASOF ANY GLOBAL ALL SEMI ANTI LEFT RIGHT FULL OUTER INNER CROSS NATURAL JOIN POSITIONAL PASTE ARRAY LATERAL
    ON USING AS FROM WHERE SELECT WITH NOT NULL IS AND OR FINAL SAMPLE TABLESAMPLE ONLY DISTINCT TOP LIMIT
    OFFSET FETCH ORDER GROUP BY HAVING QUALIFY WINDOW UNION EXCEPT MINUS INTERSECT PIVOT FOR SYSTEM_TIME VERSION
    TIMESTAMP DATE INTERVAL BETWEEN IN LIKE ESCAPE EXISTS CASE WHEN THEN ELSE END CAST TRUE FALSE COLLATE DESC
    ASC NULLS IGNORE RESPECT OVER FILTER APPLY STRAIGHT_JOIN HASH LOOP MERGE VALUES TABLE SET INTO RECURSIVE foo
    x1 `bar` 'str' 7 1.5 ( ) , . ; * = < <=> - -> => :: : ? @ [ ] { } || | & ! % /*c*/ /*+h*/ -- \\ # $ ~ ^
"""
WORDS = _WORDS.split()


@pytest.mark.parametrize("count", [15, pytest.param(4000, marks=pytest.mark.slow)])
def test_each_word_is_understood_or_refused(spark: Any, count: int) -> None:
    rng = random.Random(count)
    frames = {name: spark.createDataFrame(rows, schema) for name, (schema, rows) in TABLES.items()}
    for name, df in frames.items():
        df.createOrReplaceTempView(name)
    accepted = 0
    for _ in range(count):
        query = changed(rng, rng.choice(QUERIES))
        inputs = {name: df for name, df in frames.items() if re.search(rf"\b{name}\b", query)}
        refused = None
        try:
            found = gpu_ops.sql(query, **inputs)
        except gpu_ops.SqlError as error:
            refused = error
        except gpu_ops.DescriptionError as error:
            if "does not name the input" not in str(error):  # any other has a place
                raise
            continue
        if refused is not None:
            check_words(refused.message)
            assert 1 <= refused.line <= query.count("\n") + 1, query
            continue
        accepted += 1
        wanted = spark.sql(query)  # what Spark refuses is refused
        plain = [column for column in wanted.columns if column.isidentifier()]
        assert plain == [column for column in found.columns[1:] if column.isidentifier()], query
        try:
            rows = Counter(map(tuple, wanted.collect()))
        except PySparkException:
            continue  # such as a CAST of a value
        assert Counter(tuple(row)[1:] for row in found.collect()) == rows, query
    assert accepted >= count / 40


def changed(rng: random.Random, query: str) -> str:
    """A query with a word more, or another one."""
    parts = re.findall(r"\w+|'[^']*'|<=>|\s+|.", query)
    place, word = rng.randrange(len(parts)), rng.choice(WORDS)
    if rng.random() < 0.15 and not parts[place].isspace():
        parts[place] = word
    else:
        parts.insert(place, f" {word} ")
    return "".join(parts)
