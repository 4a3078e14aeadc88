"""What a query's text means: clauses, names, `*`, aliases, literal text kept as it was written."""

from __future__ import annotations

import pytest

from gpu_ops.query.errors import SqlError
from gpu_ops.query.nodes import Calc, JoinNode, Source, walk
from gpu_ops.query.predicates import Predicate, SubQuery, conjuncts
from gpu_ops.query.read import read
from sql.tables import planned


def texts(sql):
    """The conjuncts of a WHERE."""
    source, query = read(f"SELECT * FROM a, b WHERE {sql}")
    found = []
    for part in conjuncts(source, query.where):
        if isinstance(part, SubQuery):
            values = [source.text(v) for v in part.values] if part.values is not None else None
            found.append(("NOT " if part.negated else "", values))
        else:
            found.append(source.text(part.span))
    return found


@pytest.mark.parametrize(
    ("sql", "parts"),
    [
        ("x = 1 AND y = 2 and z", ["x = 1", "y = 2", "z"]),
        ("x BETWEEN 1 AND 2 AND y", ["x BETWEEN 1 AND 2", "y"]),
        ("x AND y BETWEEN 1 AND z AND w NOT BETWEEN 0 AND 1", ["x", "y BETWEEN 1 AND z", "w NOT BETWEEN 0 AND 1"]),
        ("x = 1 AND y = 2 OR z", ["x = 1 AND y = 2 OR z"]),
        ("(x = 1 AND (y = 2)) AND (z OR w)", ["x = 1", "y = 2", "z OR w"]),
        ("CASE WHEN x AND y THEN z ELSE w END AND v", ["CASE WHEN x AND y THEN z ELSE w END", "v"]),
        ("f(x AND y) AND t.`and` = t.and", ["f(x AND y)", "t.`and` = t.and"]),
        ("x = 'a AND b' -- AND\n AND y", ["x = 'a AND b'", "y"]),
        ("EXISTS (SELECT 1 FROM c)", [("", None)]),
        ("NOT (NOT EXISTS (SELECT 1 FROM c)) AND x", None),
        ("NOT EXISTS ((SELECT 1 FROM c)) AND x", [("NOT ", None), "x"]),
        ("NOT NOT EXISTS (SELECT 1 FROM c)", [("", None)]),
        ("x + 1 IN (SELECT y FROM c)", [("", ["x + 1"])]),
        ("NOT x IN (SELECT y FROM c)", [("NOT ", ["x"])]),
        ("(x, f(y, 2)) NOT IN (SELECT y, z FROM c)", [("NOT ", ["x", "f(y, 2)"])]),
        ("x IN (1, 2) AND y IN (3)", ["x IN (1, 2)", "y IN (3)"]),
    ],
)
def test_conjuncts(sql, parts):
    if parts is None:
        with pytest.raises(SqlError, match="a sub-query can stand"):
            texts(sql)
    else:
        assert texts(sql) == parts


@pytest.mark.parametrize(
    ("sql", "sides"),
    [
        ("a.x = b.y", ("a.x", "b.y", False)),
        ("a.x == (b.y + 1)", ("a.x", "b.y + 1", False)),
        ("a.x <=> b.y", ("a.x", "b.y", True)),
        ("a.x IS NOT DISTINCT FROM b.y", ("a.x", "b.y", True)),
        ("CASE WHEN a.x = 1 THEN 2 END = b.y", ("CASE WHEN a.x = 1 THEN 2 END", "b.y", False)),
        ("a.x IS DISTINCT FROM b.y", None),
        ("a.x = b.y = c.z", None),
        ("a.x = b.y IS NULL", None),  # (a.x = b.y) IS NULL in Spark
        ("NOT a.x = b.y", None),
        ("a.x <= b.y", None),
        ("a.x = b.y OR a.z", None),
        ("a.x = b.y BETWEEN 1 AND 2", None),
    ],
)
def test_equalities(sql, sides):
    source, query = read(f"SELECT * FROM a, b WHERE {sql}")
    (part,) = conjuncts(source, query.where)
    assert isinstance(part, Predicate)
    found = part.equality and (*map(source.text, part.equality), part.null_safe)
    assert found == sides


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ("a.x, a.y AS z, a.z w", [("a.x", None), ("a.y", "z"), ("a.z", "w")]),
        ("a.x + 1 `a name`, -a.y m", [("a.x + 1", "a name"), ("-a.y", "m")]),
        ("left(a.x, 2) AS left, a.left", [("left(a.x, 2)", "left"), ("a.left", None)]),
        ("CASE WHEN a.x THEN 1 ELSE 2 END c", [("CASE WHEN a.x THEN 1 ELSE 2 END", "c")]),
        ("a.x IS DISTINCT FROM a.y d, a.x IS NULL n", [("a.x IS DISTINCT FROM a.y", "d"), ("a.x IS NULL", "n")]),
        ("INTERVAL 1 DAY d, DATE '2024-01-01' e", [("INTERVAL 1 DAY", "d"), ("DATE '2024-01-01'", "e")]),
        ("CAST(a.x AS STRING) s, a.m['k'] k", [("CAST(a.x AS STRING)", "s"), ("a.m['k']", "k")]),
        ("extract(YEAR FROM a.x) y, a.x * 2 t", [("extract(YEAR FROM a.x)", "y"), ("a.x * 2", "t")]),
        ("transform(a.x, v -> v + 1) t", [("transform(a.x, v -> v + 1)", "t")]),
    ],
)
def test_select_lists(items, found):
    source, query = read(f"SELECT {items} FROM a JOIN b ON a.x = b.x")
    assert [(source.text(item.span), item.alias) for item in query.items] == found


def columns(sql):
    return [(entry.name, entry.text) for entry in planned(sql).root.select]


def test_stars_keep_the_tables_order_and_using_comes_first():
    assert [n for n, _ in columns("SELECT * FROM orders JOIN prices USING (id)")] == [
        "id", "uid", "amount", "note", "price",
    ]  # fmt: skip
    assert [n for n, _ in columns("SELECT p.*, o.note FROM orders o JOIN prices p USING (id)")] == [
        "id", "price", "note",
    ]  # fmt: skip
    # what was put in another order to avoid a cross product comes out in the query's
    sql = "SELECT u.*, p.*, o.note FROM users u, prices p, orders o WHERE o.uid = u.uid AND o.id = p.id"
    assert [n for n, _ in columns(sql)] == ["uid", "name", "tags", "id", "price", "note"]


def test_the_common_column_of_using_is_the_one_that_is_there():
    def shown(how):
        (_, text), *_ = columns(f"SELECT id FROM orders o {how} JOIN prices p USING (id)")
        return text

    assert [shown(how) for how in ("", "LEFT", "RIGHT", "FULL")] == [
        "o__id", "o__id", "p__id", "COALESCE(o__id, p__id)",
    ]  # fmt: skip


def test_text_is_kept_as_written_but_for_names():
    sql = """SELECT concat( o.note ,  "it's", `O`.`note`) AS c, o.amount/2 FROM orders o JOIN prices p
             ON o.id = p.id"""
    assert columns(sql) == [("c", 'concat( note ,  "it\'s", note)'), ("o.amount/2", "amount/2")]


def test_structs_and_lambdas_keep_their_own_names():
    sql = (
        "SELECT transform(u.tags, uid -> uid || name) AS t, u.tags[0] AS first FROM users u JOIN payments y USING (uid)"
    )
    assert columns(sql) == [("t", "transform(tags, uid -> uid || name)"), ("first", "tags[0]")]


def test_common_table_expressions_see_those_before_them():
    sql = """
        WITH a AS (SELECT id, amount FROM orders), b(k) AS (SELECT id FROM a WHERE amount > 1),
             prices AS (SELECT id AS pid FROM prices)
        SELECT k, pid FROM b JOIN prices ON k = pid"""
    plan = planned(sql)
    assert [node.table for node in walk(plan.root) if isinstance(node, Source)] == ["orders", "prices"]
    assert [entry.name for entry in plan.root.select] == ["k", "pid"]


def test_sub_queries_in_from_are_looked_through():
    plan = planned(
        "SELECT k, twice FROM (SELECT o.id AS k, o.amount * 2 AS twice FROM orders o JOIN users u USING (uid)) AS q "
        "JOIN (SELECT id FROM prices) AS p ON q.k = p.id"
    )
    kinds = [node.kind for node in walk(plan.root) if isinstance(node, JoinNode)]
    assert kinds == ["regular", "regular"]
    assert ("twice", "amount * 2") in [
        (e.name, e.text) for node in walk(plan.root) if isinstance(node, Calc) for e in node.select
    ]


def test_the_same_input_twice():
    plan = planned("SELECT a.id, b.amount FROM orders a JOIN orders b ON a.id = b.uid AND a.amount < b.amount")
    (join,) = plan.joins
    assert [side.name for side in join.description.inputs] == ["a", "b"]
    assert join.description.where == "a.a__amount < b.b__amount"


def test_names_that_need_backticks():
    plan = planned("SELECT s.left, p.price FROM stock s JOIN prices p ON s.left = p.id AND s.left < p.price")
    (join,) = plan.joins
    assert join.description.where == "s.`left` < p.price"
    assert plan.root.select[0].text == "`left`"
