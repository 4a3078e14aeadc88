"""Chosen queries over long histories: the folded result is the query over the folded inputs, in every micro-batch."""

from __future__ import annotations

import contextlib
import random

import pytest
from oracle.drive import difference

from gpu_ops.query.nodes import show
from sql.run_plan import PlanRunner, Reference
from sql.tables import planned
from sql.test_random import COLUMNS, TABLES, against_spark

pytestmark = pytest.mark.one_in(4, all=1)

QUERIES = {
    "upserts, filtered, inner": "SELECT a.x, b.v FROM a JOIN b ON a.k = b.k WHERE b.v < 2",
    "upserts, filtered, preserved": "SELECT b.k, b.v, a.x FROM b LEFT JOIN a ON a.k = b.k WHERE b.v < 2",
    "upserts, filtered, padded":
        "SELECT a.k, a.x, q.v FROM a LEFT JOIN (SELECT * FROM b WHERE v < 2) q ON a.k = q.k",
    "upserts, filtered, right": "SELECT a.x, b.v FROM a RIGHT JOIN b ON a.k = b.k WHERE b.v < 2",
    "upserts, filtered, anti": "SELECT a.x FROM a WHERE NOT EXISTS (SELECT 1 FROM b WHERE b.k = a.k AND b.v < 2)",
    "upserts, filtered, not in": "SELECT a.x, a.y FROM a WHERE a.k NOT IN (SELECT b.k FROM b WHERE b.v < 1)",
    "upserts, not by the join's key": "SELECT a.x, b.k FROM a JOIN b ON a.x = b.v AND b.x > 0",
    "upserts, computed key": "SELECT a.x, q.k, q.w FROM a JOIN (SELECT k, v + 1 AS w FROM b) q ON a.x = q.w",
    "not in, nulls on both sides": "SELECT a.k, a.x FROM a WHERE a.x NOT IN (SELECT c.w FROM c WHERE c.k = 1)",
    "not in, no nulls": "SELECT a.x FROM a WHERE a.x >= 0 AND a.x NOT IN (SELECT w FROM c WHERE w IS NOT NULL)",
    "not in, correlated": "SELECT a.k, a.x FROM a WHERE a.x NOT IN (SELECT d.x FROM d WHERE d.k = a.k)",
    "not in, by what the text of a condition cannot say": "SELECT a.k, a.x FROM a WHERE a.x NOT IN (SELECT d.x FROM d "
    "WHERE d.k = a.k AND NOT (a.k < 1 AND a.k <=> NULLIF(a.k, 1)))",
    "in, a tuple": "SELECT a.k, a.y FROM a WHERE (a.k, a.x + 1) IN (SELECT d.k, d.x FROM d)",
    "full, coalesced twice": "SELECT k, x, v, w FROM (SELECT k, x FROM a) a FULL JOIN (SELECT k, v FROM b) b USING (k) "
        "FULL JOIN (SELECT k, w FROM c WHERE w < 2) c USING (k)",
    "full, less its pads": "SELECT a.x, b.v FROM a FULL JOIN b ON a.k = b.k WHERE COALESCE(a.x, b.v) > 0",
    "null-safe": "SELECT a.k, d.k AS dk FROM a LEFT JOIN d ON a.x <=> d.x AND a.k IS NOT DISTINCT FROM d.k",
    "multi-way": "SELECT a.k, a.x, b.v, d.x AS dx FROM a LEFT JOIN b ON a.k = b.k AND b.v < a.x JOIN d ON d.k = a.k "
        "LEFT JOIN c ON c.k = b.k AND c.w > d.x WHERE a.x < 2",
    "multi-way, turned round": "SELECT a.x, d.k, d.x AS dx, b.v FROM a RIGHT JOIN d ON a.k = d.k JOIN b ON b.k = d.k",
    "multi-way, then a chain": "SELECT a.x, b.v, c.w, d.k FROM a JOIN b ON a.k = b.k JOIN c ON c.k = b.k "
        "FULL JOIN d ON d.x = c.w",
    "comma joins in another order": "SELECT a.x, b.v FROM a, b, d WHERE a.x = d.x AND d.k = b.k AND a.y <> b.v",
    "no key": "SELECT a.k, c.w FROM a LEFT JOIN c ON a.x < c.w",
    "what only Spark evaluates": "SELECT a.k, c.w FROM a JOIN c ON a.k = c.k AND sqrt(a.x + c.w) < 2 WHERE c.w < 2",
    "computed by Spark below": "SELECT a.k, c.w FROM a LEFT JOIN c ON sqrt(a.x) = sqrt(c.w) AND a.k = c.k",
    "a chain over a computed key": "SELECT t0.k, t1.x, c.w FROM d t0 JOIN d t1 ON t0.x + 1 = t1.k + 1 "
        "LEFT SEMI JOIN a ON a.x = t0.k LEFT JOIN c ON c.w = t1.x",
    "a chain over two computed keys": "SELECT t0.k, t1.x, d.x AS y, c.w FROM d t0 JOIN d t1 ON t0.x + 1 = t1.k + 1 "
        "JOIN d ON d.k * 2 = t0.k + t1.x LEFT SEMI JOIN a ON a.x = t1.k FULL JOIN c ON c.w = d.x",
    "a part of an input that may have no row": "SELECT a.k, a.x, b.v, d.x AS y FROM a LEFT JOIN b ON a.k = b.k JOIN d "
        "ON d.k = a.k AND sqrt(COALESCE(b.v, 1)) > d.x",
    "a key of an input that may have no row": "SELECT a.k, a.x, b.v, d.x AS y FROM a LEFT JOIN b "
        "ON a.k = sqrt(COALESCE(b.k, 1)) JOIN d ON d.k = sqrt(COALESCE(b.k, 1))",
    "grouped": "SELECT k, count(*) AS n, sum(x) AS s, count(DISTINCT y) AS d, max(x) - min(y) AS m FROM a GROUP BY k",
    "grouped, upserts": "SELECT x, sum(v) + count(v) AS s, avg(v) AS m FROM b GROUP BY x",
    "grouped over a join, having": "SELECT b.x, sum(a.x) AS s, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY b.x "
        "HAVING count(*) > 1 AND b.x > 0",
    "grouped by an expression": "SELECT a.x + 1 AS g, (a.x + 1) * 2 AS h, sum(d.k * 2) / count(*) AS r FROM a "
        "LEFT JOIN d ON a.k = d.k GROUP BY a.x + 1",
    "grouped, joined, grouped": "SELECT c.w, count(*) AS n, max(q.s) AS m FROM c LEFT JOIN (SELECT k, sum(x) AS s "
        "FROM a GROUP BY k HAVING sum(x) > 0) q ON q.k = c.k GROUP BY c.w",
    "grouped by nothing": "SELECT count(*) AS n, min(x) AS m FROM a HAVING count(*) > 0",
    "groups without a function": "SELECT k, x FROM a GROUP BY k, x",
    "distinct": "SELECT DISTINCT k, x FROM a",
    "distinct, upserts": "SELECT DISTINCT v, x FROM b",
    "distinct over a join, filtered": "SELECT * FROM (SELECT DISTINCT a.k, b.v FROM a JOIN b ON a.k = b.k) WHERE v > 0",
    "distinct, joined, counted": "SELECT c.w, count(*) AS n FROM c LEFT JOIN (SELECT DISTINCT k, x FROM a) q "
        "ON q.k = c.k GROUP BY c.w",
    "in, distinct": "SELECT a.k, a.x FROM a WHERE a.k IN (SELECT DISTINCT d.x FROM d)",
    "first rows": "SELECT k, x, y FROM a ORDER BY x DESC, k, y LIMIT 3",
    "first rows, upserts": "SELECT k, v, x FROM b ORDER BY v + 1 DESC NULLS FIRST, k, x LIMIT 2",
    "first rows by what is not shown": "SELECT x FROM a ORDER BY y DESC, x LIMIT 4",
    "first groups": "SELECT k, sum(x) AS s FROM a GROUP BY k HAVING count(*) > 1 ORDER BY s DESC, k LIMIT 2",
    "first rows, joined, first rows": "SELECT q.k, q.x, c.w FROM (SELECT k, x FROM a ORDER BY x, k LIMIT 5) q "
        "JOIN c ON c.k = q.k ORDER BY c.w, q.k, q.x LIMIT 3",
    "groups twice": "WITH g AS (SELECT k, x, count(*) AS n FROM a GROUP BY k, x) SELECT g.k, g.x, g.n FROM g JOIN "
        "(SELECT k, max(n) AS m FROM g GROUP BY k) h ON g.k = h.k AND g.n >= h.m",
    "groups three times": "SELECT l.k, l.s, r.t FROM (SELECT k, sum(x) AS s FROM a WHERE y > 0 GROUP BY k) l FULL JOIN "
        "(SELECT k + 1 AS k, sum(x) AS t FROM a WHERE y > 0 GROUP BY k) r ON l.k = r.k "
        "LEFT JOIN (SELECT k AS g, sum(x) AS u FROM a WHERE y > 0 GROUP BY k) q ON q.u = r.t",
    "a join twice": "WITH j AS (SELECT a.k, a.x, b.v, b.x AS z FROM a LEFT JOIN b ON a.k = b.k AND a.x <> b.v) "
        "SELECT p.v, p.n, q.m FROM (SELECT v, count(*) AS n FROM j GROUP BY v) p JOIN "
        "(SELECT x, z, max(v) AS m FROM j GROUP BY x, z) q ON p.v = q.x",
    "a join twice, over other computed columns": "SELECT p.u, p.n, q.m FROM (SELECT i.u, count(*) AS n FROM "
        "(SELECT k, x + 1 AS u FROM a) i LEFT JOIN c ON i.k = c.k GROUP BY i.u) p JOIN (SELECT i.w, count(*) AS m FROM "
        "(SELECT k, x * 2 AS w FROM a) i LEFT JOIN c ON i.k = c.k GROUP BY i.w) q ON p.u = q.w",
    "first rows twice": "WITH f AS (SELECT k, x, y FROM a ORDER BY x, k, y LIMIT 4) SELECT l.k, l.y, r.x FROM f l "
        "JOIN f r ON l.k = r.k LEFT JOIN c ON c.w = r.y",
    "exists over groups": "SELECT a.k, a.x FROM a WHERE a.k IN (SELECT d.x FROM d GROUP BY d.x HAVING count(*) > 1)",
    "exists over a join": "SELECT a.k, a.x FROM a WHERE EXISTS (SELECT 1 FROM b LEFT JOIN c ON b.k = c.k "
        "WHERE b.k = a.k AND (c.w IS NULL OR c.w < a.x))",
    "except": "SELECT k, x FROM a EXCEPT SELECT k, v FROM b",
    "except all, of rows with nulls": "SELECT k, x FROM a EXCEPT ALL SELECT k, w FROM c",
    "intersect": "SELECT k, x FROM a INTERSECT SELECT k, w FROM c",
    "intersect all, counted": "SELECT x, count(*) AS n FROM (SELECT x FROM a INTERSECT ALL SELECT w FROM c) GROUP BY x",
    "rollup": "SELECT k, x, count(*) AS n FROM a GROUP BY ROLLUP (k, x)",
    "grouping sets": "SELECT a.k, b.v, sum(a.x) AS s FROM a LEFT JOIN b ON a.k = b.k "
        "GROUP BY GROUPING SETS ((a.k), (b.v), ())",
    "variances": "SELECT k, round(stddev(x), 6) AS s, round(var_pop(y), 6) AS v, round(covar_samp(x, y), 6) AS c "
        "FROM a GROUP BY k",
    "a value": "SELECT k, x FROM a WHERE x > (SELECT avg(v) FROM b)",
    "values of a key": "SELECT k, (SELECT max(v) FROM b WHERE b.k = a.k) AS m, "
        "(SELECT count(*) FROM c WHERE c.k = a.k) AS n FROM a",
    "a value by a unique key": "SELECT x, (SELECT v FROM b WHERE b.k = a.k) AS v FROM a",
}  # fmt: skip

SUB_QUERIES = {
    "exists in exists": "SELECT a.k, a.x FROM a WHERE EXISTS (SELECT 1 FROM b WHERE b.k = a.k AND EXISTS "
        "(SELECT 1 FROM c WHERE c.k = b.x))",
    "not exists in not exists": "SELECT a.k, a.x FROM a WHERE NOT EXISTS (SELECT 1 FROM d WHERE d.k = a.k AND NOT "
        "EXISTS (SELECT 1 FROM c WHERE c.k = d.x AND c.w > 0))",
    "exists in in, three deep": "SELECT a.k, a.x FROM a WHERE a.x IN (SELECT b.k FROM b WHERE EXISTS (SELECT 1 FROM c "
        "WHERE c.k = b.x AND c.w NOT IN (SELECT d.x FROM d WHERE d.k = c.k)))",
    "the outer column in": "SELECT a.k, a.x FROM a WHERE a.k IN (SELECT a.x FROM c)",
    "the outer column not in": "SELECT a.k, a.x FROM a WHERE a.k NOT IN (SELECT a.x FROM c WHERE c.k = a.y)",
    "a value of both queries not in": "SELECT a.k, a.x FROM a WHERE a.k NOT IN (SELECT c.w + a.y FROM c)",
    "a value of both queries not in, above pads": "SELECT a.k, a.x, c.w FROM a LEFT JOIN c ON a.k = c.k "
        "WHERE a.k NOT IN (SELECT b.x + a.y FROM b)",
    "a null not in": "SELECT a.k, a.x FROM a WHERE CAST(NULL AS BIGINT) NOT IN (SELECT b.k FROM b WHERE b.k > 0)",
    "a constant not in": "SELECT a.k, a.x FROM a WHERE 1 NOT IN (SELECT c.w FROM c WHERE c.k = a.k)",
    "a constant or null not in": "SELECT a.k, a.x FROM a WHERE nullif(a.y, 1) NOT IN (SELECT d.k FROM d)",
    "exists in two tables of the same types": "SELECT a.k, a.x FROM a WHERE EXISTS (SELECT 1 FROM c WHERE c.k = a.k) "
        "AND EXISTS (SELECT 1 FROM d WHERE d.k = a.k)",
    "in one table and not in one of the same types": "SELECT a.k, a.x FROM a WHERE a.k IN (SELECT k FROM d) AND NOT "
        "EXISTS (SELECT 1 FROM c WHERE c.k = a.k)",
    "exists of the outer column": "SELECT a.k, a.x FROM a WHERE EXISTS (SELECT a.x FROM c)",
    "exists of a count": "SELECT a.k, a.x FROM a WHERE EXISTS (SELECT count(*) FROM b WHERE b.k = a.k)",
    "exists of a count of nothing": "SELECT a.k, a.x FROM a WHERE EXISTS (SELECT count(*) FROM b WHERE b.k = a.k "
        "HAVING count(*) = 0)",
    "in a count": "SELECT a.k, a.x FROM a WHERE a.x IN (SELECT count(*) FROM d WHERE d.k = a.k)",
    "not in a count": "SELECT a.k, a.x FROM a WHERE a.x NOT IN (SELECT count(*) FROM d WHERE d.k = a.k)",
    "not in the greatest of nothing": "SELECT a.k, a.x FROM a WHERE a.x NOT IN (SELECT max(d.k) FROM d WHERE d.x > 1)",
    "not in the greatest of its own": "SELECT a.k FROM a WHERE a.x NOT IN (SELECT max(d.x) FROM d WHERE d.k = a.k)",
    "in the first": "SELECT a.k, a.x FROM a WHERE a.x IN (SELECT d.k FROM d WHERE d.x = a.k ORDER BY d.k DESC LIMIT 1)",
    "exists, limited": "SELECT a.k, a.x FROM a WHERE EXISTS (SELECT 1 FROM b WHERE b.k = a.k ORDER BY b.v LIMIT 1)",
    "not not exists": "SELECT a.k, a.x FROM a WHERE NOT (NOT EXISTS (SELECT 1 FROM b WHERE b.k = a.k))",
    "not an or": "SELECT a.k, a.x FROM a WHERE NOT (a.x > 1 OR EXISTS (SELECT 1 FROM b WHERE b.k = a.k))",
    "two not in": "SELECT a.k, a.x, a.y FROM a WHERE (a.k, a.x) NOT IN (SELECT c.k, c.w FROM c)",
    "two not in, never null": "SELECT a.k, a.x FROM a WHERE a.k >= 0 AND (a.x, a.k) NOT IN (SELECT d.x, d.k FROM d)",
    "three not in, one of them outer": "SELECT a.k, a.x FROM a WHERE (a.k, a.x, a.y) NOT IN (SELECT d.k, d.x, a.x FROM "
        "d WHERE d.k = a.y)",
    "grouped by nothing": "SELECT count(*) AS n, min(x) AS m FROM a WHERE y > 1",
    "joined with a count of nothing": "SELECT a.k, q.n FROM a LEFT JOIN (SELECT count(*) AS n FROM d WHERE d.x > 1) q "
        "ON a.x = q.n",
    "first rows by one column twice": "SELECT k, x, y FROM a ORDER BY x DESC, k, x, y LIMIT 3",
    "collected values": "SELECT k, collect_list(CAST(x AS STRING)) AS l, array_agg(DISTINCT CAST(y AS STRING)) AS s, "
        "string_agg(CAST(x AS STRING), '-') WITHIN GROUP (ORDER BY CAST(x AS STRING)) AS t, "
        "approx_count_distinct(y) AS n FROM a GROUP BY k",
    "unpivoted groups": "SELECT * FROM (SELECT k, max(x) AS m, min(y) AS n FROM a GROUP BY k) "
        "UNPIVOT (v FOR w IN (m, n))",
    "first rows by two names of it": "SELECT * FROM (SELECT k, x AS g, x AS h, y FROM a) ORDER BY g, h, k, y LIMIT 3",
}  # fmt: skip


@pytest.mark.one_in(8, all=3)
@pytest.mark.spark
@pytest.mark.parametrize("what", SUB_QUERIES)
def test_a_sub_query_is_sparks_own(spark, what):
    """After every micro-batch, row by row, and with static inputs."""
    emit = "per_batch" if list(SUB_QUERIES).index(what) % 2 else "per_event"
    assert against_spark(spark, SUB_QUERIES[what], [{}, *history(3)], emit, "auto")


def history(seed, batches=6, size=14):
    """Micro-batches in which rows come, go and are replaced; half of the values are null or few."""
    rng = random.Random(seed)
    live = {name: [] for name in TABLES}
    for _ in range(batches):
        found = {name: [] for name in TABLES}
        for _ in range(size):
            name = rng.choice(sorted(TABLES))
            table, rows = TABLES[name], live[name]
            if rows and table.row_kind and rng.random() < 0.3:
                found[name].append(("-D", rows.pop(rng.randrange(len(rows)))))
                continue
            unique = table.unique_key or ()
            row = tuple(rng.choice([0, 1, 2] if c in unique else [None, 0, 1, 2]) for c in COLUMNS[name])
            places = [COLUMNS[name].index(c) for c in unique]
            same = [old for old in rows if places and all(old[p] == row[p] for p in places)]
            if same and table.updates == "retract":
                continue
            live[name] = [old for old in rows if old not in same] if same else rows
            live[name].append(row)
            found[name].append(("+U" if same else "+I", row))
        yield found


@pytest.mark.parametrize("what", QUERIES)
def test_a_query_is_its_join(what):
    sql, told = QUERIES[what], 0
    for seed, emit in ((1, "per_batch"), (2, "per_event")):
        made = planned(sql, tables=TABLES, emit=emit)
        with contextlib.closing(PlanRunner(made)) as runner, contextlib.closing(Reference(sql, TABLES)) as reference:
            for changes in history(seed):
                told += len(runner.process(TABLES, changes))
                reference.apply(changes)
                assert not difference(reference.rows(), runner.folded), sql
    assert told > 2, "a query that says nothing tests nothing"


def test_what_a_query_has_several_times_is_one_operator():
    counts = {"groups twice": 3, "groups three times": 3, "a join twice": 4, "first rows twice": 3}
    assert {name: len(planned(QUERIES[name], tables=TABLES).joins) for name in counts} == counts
    text = show(planned(QUERIES["groups twice"], tables=TABLES))
    assert text.count("Source(") == 1
    assert "+- Reused(GroupAggregate(groupBy=[a.k, a.x], select=[count_1 = count(*)]))" in text


@pytest.mark.parametrize(
    "other",
    [
        "sum(y) AS s FROM a WHERE y > 0 GROUP BY k",
        "sum(x) AS s FROM a WHERE y > 1 GROUP BY k",
        "sum(x) AS s FROM a WHERE y > 0 GROUP BY k, x",
        "sum(x + 1) AS s FROM a WHERE y > 0 GROUP BY k",
        "sum(x) AS s FROM d WHERE x > 0 GROUP BY k",
        "sum(x) AS s FROM (SELECT x AS k, k AS x, y FROM a) a WHERE y > 0 GROUP BY k",
        "sum(CAST(x AS INT)) AS s FROM a WHERE y > 0 GROUP BY k",
    ],
)
def test_what_is_nearly_the_same_is_not(other):
    sql = "SELECT l.k, r.s FROM (SELECT k, sum(x) AS s FROM a WHERE y > 0 GROUP BY k) l JOIN (SELECT k, {}) r USING (k)"
    same = "sum(x) AS total FROM a WHERE y > 0 GROUP BY k"
    assert len(planned(sql.format(same).replace("r.s", "r.total"), tables=TABLES).joins) == 2
    assert len(planned(sql.format(other), tables=TABLES).joins) == 3


def test_both_ways_to_join_many_say_the_same():
    sql = QUERIES["multi-way"]
    kinds = {way: [j.kind for j in planned(sql, tables=TABLES, multi_way=way).joins] for way in ("auto", "never")}
    assert kinds == {"auto": ["multi-way"], "never": ["regular"] * 3}
    folded = []
    for way in ("auto", "never"):
        with contextlib.closing(PlanRunner(planned(sql, tables=TABLES, multi_way=way))) as runner:
            for changes in history(7):
                runner.process(TABLES, changes)
            folded.append(runner.folded)
    assert not difference(*folded)
    assert folded[0].total()
