"""What a query's names mean, as they come back from Spark's analyser."""

from __future__ import annotations

from gpu_ops.query.nodes import Calc, JoinNode, walk
from gpu_ops.query.relations import Scan
from sql.tables import planned


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
        "o__id", "o__id", "p__id", "coalesce(o__id, p__id)",
    ]  # fmt: skip


def test_text_is_near_enough_to_read_it():
    sql = """SELECT concat( o.note ,  "it's", `O`.`note`) AS c, o.amount/2, NOT o.id = 3 n, -o.id * (o.id + 1) m,
             CASE WHEN o.id = 1 OR o.id IS NULL THEN 'a' END w FROM orders o JOIN prices p ON o.id = p.id"""
    assert [text for _, text in columns(sql)] == [
        "concat(note, 'it\\'s', note)", "amount / 2", "o__id <> 3", "-o__id * (o__id + 1)",
        "CASE WHEN o__id = 1 OR o__id IS NULL THEN 'a' END",
    ]  # fmt: skip


def test_common_table_expressions_see_those_before_them():
    sql = """
        WITH a AS (SELECT id, amount FROM orders), b(k) AS (SELECT id FROM a WHERE amount > 1),
             prices AS (SELECT id AS pid FROM prices)
        SELECT k, pid FROM b JOIN prices ON k = pid"""
    plan = planned(sql)
    assert [node.table.name for node in walk(plan.root) if isinstance(node, Scan)] == ["orders", "prices"]
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
    assert str(join.description.where) == "a.a__amount < b.b__amount"


def test_names_that_need_backticks():
    plan = planned("SELECT s.left, p.note FROM stock s JOIN orders p ON s.left = p.id AND s.left < p.uid")
    (join,) = plan.joins
    assert str(join.description.where) == "s.`left` < p.uid"
    assert plan.root.select[0].text == "`left`"
