"""Where filters go: below a join, into its condition, or above it; and what becomes of an outer join."""

from __future__ import annotations

import pyarrow as pa
import pytest

from gpu_ops.query.nodes import Calc, walk
from gpu_ops.query.relations import Scan, Table
from sql.tables import LONG, TABLES, planned

pytestmark = pytest.mark.one_in(2, all=1)


def placed(sql, **options):
    """Join type, filters below left and right, the join's condition, filters above."""
    plan = planned(sql, **options)
    (join,) = plan.joins
    below = [side.where if isinstance(side, Calc) else [] for side in join.inputs]
    return (
        join.description.how,
        *below,
        join.description.where and str(join.description.where),
        plan.root.where,
    )


def query(how, on="", where=""):
    condition = f" AND {on}" if on else ""
    filters = f" WHERE {where}" if where else ""
    return f"SELECT o.id, y.paid FROM orders o {how} JOIN payments y ON o.uid = y.uid{condition}{filters}"


LEFT, RIGHT, BOTH, NULLS = "o.amount > 1", "y.paid > 2", "o.amount > y.paid", "y.paid IS NULL"


@pytest.mark.parametrize(
    ("how", "on", "where", "expected"),
    [
        ("", LEFT, "", ("inner", ["amount > 1"], [], None, [])),
        ("", RIGHT, LEFT, ("inner", ["amount > 1"], ["paid > 2"], None, [])),
        ("", "", BOTH, ("inner", [], [], "o.amount > y.paid", [])),
        ("", "", NULLS, ("inner", [], ["paid IS NULL"], None, [])),
        # ON of a left join: what is on the right goes below, what is on the left decides on matches only
        ("LEFT", RIGHT, "", ("left", [], ["paid > 2"], None, [])),
        ("LEFT", LEFT, "", ("left", [], [], "o.amount > 1", [])),
        # WHERE: the preserved side goes below; what turns pads away makes the join inner; the rest stays above
        ("LEFT", "", LEFT, ("left", ["amount > 1"], [], None, [])),
        ("LEFT", "", RIGHT, ("inner", [], ["paid > 2"], None, [])),
        ("LEFT", "", NULLS, ("left", [], [], None, ["paid IS NULL"])),
        ("LEFT", "", BOTH, ("inner", [], [], "o.amount > y.paid", [])),
        ("LEFT", "", f"{NULLS} OR {LEFT}", ("left", [], [], None, ["paid IS NULL OR amount > 1"])),
        ("LEFT", "", "COALESCE(y.paid, 5) > 2", ("left", [], [], None, ["coalesce(paid, 5) > 2"])),
        ("LEFT", LEFT, RIGHT, ("inner", ["amount > 1"], ["paid > 2"], None, [])),
        ("RIGHT", LEFT, "", ("right", ["amount > 1"], [], None, [])),
        ("RIGHT", RIGHT, "", ("right", [], [], "y.paid > 2", [])),
        ("RIGHT", "", RIGHT, ("right", [], ["paid > 2"], None, [])),
        ("RIGHT", "", LEFT, ("inner", ["amount > 1"], [], None, [])),
        ("FULL", LEFT, "", ("full", [], [], "o.amount > 1", [])),
        ("FULL", "", LEFT, ("left", ["amount > 1"], [], None, [])),
        ("FULL", "", RIGHT, ("right", [], ["paid > 2"], None, [])),
        ("FULL", "", f"{LEFT} AND {RIGHT}", ("inner", ["amount > 1"], ["paid > 2"], None, [])),
        ("FULL", "", NULLS, ("full", [], [], None, ["paid IS NULL"])),
    ],
)
def test_filters(how, on, where, expected):
    assert placed(query(how, on, where)) == expected


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("y.paid + 1 > 2", "inner"),
        ("NOT y.paid > 2", "inner"),
        ("y.paid IS NOT NULL", "inner"),
        ("NOT y.paid IS NULL", "inner"),
        ("y.paid IN (1, 2)", "inner"),
        ("y.paid BETWEEN 1 AND 2", "inner"),
        ("(y.paid > 2 OR y.paid < 1)", "inner"),
        ("CAST(y.paid AS INT) = 2", "inner"),
        ("y.paid <=> 1", "inner"),
        ("CASE WHEN y.paid > 1 THEN true ELSE false END", "inner"),
        ("CASE WHEN y.paid > 1 THEN false ELSE true END", "left"),
        ("(y.paid > 2 OR o.amount > 1)", "left"),
        ("y.paid <=> NULL", "left"),
        ("y.paid > 2 IS NULL", "left"),
        ("round(y.paid) > 1", "inner"),
        ("nvl(y.paid, 0) = 0", "left"),
    ],
)
def test_what_turns_pads_away(where, how):
    assert placed(query("LEFT", where=where))[0] == how


def test_the_plan_says_that_an_outer_join_became_an_inner_one():
    (join,) = planned(query("LEFT", where=RIGHT)).joins
    assert join.why == "regular: LEFT JOIN, less the unmatched rows that a condition above it turns away"


# --- inputs whose rows are replaced -----------------------------------------------------------------------


def upserts(how, on="", where=""):
    return query(how, on, where).replace("payments y", "prices y").replace("y.uid", "y.id").replace("y.paid", "y.price")


@pytest.mark.parametrize(
    ("how", "on", "where", "expected"),
    [
        ("", "", RIGHT, ("inner", [], [], "y.price > 2", [])),
        ("", RIGHT, LEFT, ("inner", ["amount > 1"], [], "y.price > 2", [])),
        ("LEFT", RIGHT, "", ("left", [], [], "y.price > 2", [])),
        ("LEFT", "", RIGHT, ("inner", [], [], "y.price > 2", [])),
        ("LEFT", "", NULLS, ("left", [], [], None, ["price IS NULL"])),
        ("RIGHT", "", RIGHT, ("right", [], [], None, ["price > 2"])),
        ("FULL", "", RIGHT, ("right", [], [], None, ["price > 2"])),
        ("LEFT SEMI", RIGHT, "", ("semi", [], [], "y.price > 2", [])),
        ("LEFT ANTI", RIGHT, LEFT, ("anti", ["amount > 1"], [], "y.price > 2", [])),
    ],
)
def test_no_filter_goes_below_an_upsert_input(how, on, where, expected):
    sql = upserts(how, on, where)
    if how.startswith("LEFT ") and "JOIN" in sql:
        sql = sql.replace(", y.price FROM", " FROM")
    assert placed(sql) == expected


def test_the_plan_says_why_it_does_not():
    (join,) = planned(upserts("", RIGHT)).joins
    assert any("y brings upserts" in remark for remark in join.remarks)
    assert "y brings upserts" in planned(upserts("RIGHT", "", RIGHT)).root.why


def test_a_filtered_sub_query_over_an_upsert_input():
    sql = "SELECT o.id FROM orders o LEFT JOIN (SELECT id FROM prices WHERE price > 2) p ON o.id = p.id"
    assert placed(sql) == ("left", [], [], "prices.price > 2", [])
    sql = "SELECT p.id FROM (SELECT id FROM prices WHERE price > 2) p LEFT JOIN orders o ON o.id = p.id"
    assert placed(sql) == ("left", [], [], None, ["price > 2"])


def test_a_filter_on_what_a_sub_query_computes():
    doubled = "(SELECT uid, paid * 2 AS d FROM payments) p"
    sql = f"SELECT o.id, p.d FROM orders o LEFT JOIN {doubled} ON o.uid = p.uid AND d > 4"
    assert placed(sql) == ("left", [], ["(paid * 2) > 4"], None, [])
    over_upserts = sql.replace("payments", "prices").replace("paid", "price").replace("uid, ", "id AS uid, ")
    assert placed(over_upserts) == ("left", [], [], "(prices.price * 2) > 4", [])


# --- joins by time ----------------------------------------------------------------------------------------

BY_TIME = {
    **TABLES,
    "feed": Table("feed", TABLES["views"].schema, row_kind="op", event_times=("ts",)),
    "cards": Table("cards", TABLES["views"].schema, row_kind="op", unique_key=("uid",), event_times=("ts",)),
}
OLD = "c.x > 1"
TEMPORAL = "JOIN {} FOR SYSTEM_TIME AS OF c.ts AS v ON c.uid = v.uid"
LOOKUP = "JOIN {} FOR SYSTEM_TIME AS OF PROCTIME() AS v ON c.uid = v.uid"
NEAREST = "JOIN {} AS v MATCH_CONDITION (c.ts >= v.ts) ON c.uid = v.uid"


@pytest.mark.parametrize(
    ("join", "expected"),
    [
        # of the valid version, which the one before does not take the place of
        *((f" {TEMPORAL.format(table)} AND v.y > 2 AND {OLD}", ("inner", ["x > 1"], [], "v.y > 2", []))
          for table in ("views", "feed", "cards")),
        *((f" LEFT {TEMPORAL.format(table)} AND v.y > 2 AND {OLD}", ("left", [], [], "v.y > 2 AND c.x > 1", []))
          for table in ("views", "feed", "cards")),
        (f" LEFT {TEMPORAL.format('views')} WHERE v.y > 2", ("left", [], [], None, ["y > 2"])),
        # the rows of a table that meet it
        (f" {LOOKUP.format('feed')} AND v.y > 2 AND {OLD}", ("inner", ["x > 1"], ["y > 2"], None, [])),
        (f" LEFT {LOOKUP.format('cards')} AND v.y > 2 AND {OLD}", ("left", [], [], "c.x > 1 AND v.y > 2", [])),
        (f" {LOOKUP.format('cards')} WHERE v.y > 2", ("inner", [], [], None, ["y > 2"])),
        # the nearest of those that meet it; what only the left does not meet finds none
        (f" ASOF {NEAREST.format('views')} AND v.y > 2 AND {OLD}", ("inner", ["x > 1"], ["y > 2"], None, [])),
        (f" ASOF LEFT {NEAREST.format('views')} AND v.y > 2 AND {OLD}", ("left", [], ["y > 2"], None, [])),
        (f" ASOF LEFT {NEAREST.format('views')} WHERE v.y > 2", ("left", [], [], None, ["y > 2"])),
    ],
)  # fmt: skip
def test_a_condition_of_a_join_by_time(join, expected):
    assert placed(f"SELECT c.uid, v.y FROM clicks c{join}", tables=BY_TIME) == expected


def test_a_condition_on_the_left_of_an_asof_left_join_is_part_of_its_key():
    (join,) = planned(
        f"SELECT c.uid, v.y FROM clicks c ASOF LEFT {NEAREST.format('cards')} AND {OLD}", tables=BY_TIME
    ).joins
    assert [[e.text for e in side.select if e.column is None] for side in join.inputs] == [["x > 1"], ["true"]]
    assert len(join.description.keys) == 2


@pytest.mark.parametrize(("table", "below"), [("views", ["y > 2"]), ("feed", []), ("cards", [])])
def test_a_filter_of_versions_is_below_only_where_they_are_a_history(table, below):
    sql = f"WITH w AS (SELECT * FROM {table} WHERE y > 2) SELECT c.uid, v.y FROM clicks c LEFT {TEMPORAL.format('w')}"
    where = None if below else f"{table}.y > 2"
    assert placed(sql, tables=BY_TIME) == ("left", [], below, where, [])


def test_joins_below_a_join_by_time_are_not_reordered_with_it():
    sql = "SELECT a.uid, v.y FROM users a CROSS JOIN payments b JOIN orders o ON o.uid = a.uid ASOF "
    *_, join = planned(f"{sql}JOIN views v ON a.uid = v.uid AND o.id >= v.y", tables=BY_TIME).joins
    assert join.kind == "asof"


# --- upserts, each with the row it replaces ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "where"),
    [
        ("SELECT price, count(*) AS n FROM prices WHERE price > 2 GROUP BY price", ["price > 2"]),
        ("SELECT DISTINCT d FROM (SELECT price * 2 AS d FROM prices) WHERE d > 2", ["(price * 2) > 2"]),
        ("SELECT id FROM prices WHERE price > 2 ORDER BY price LIMIT 3", ["price > 2"]),
        ("SELECT o.note, p.id FROM orders o FULL JOIN (SELECT * FROM prices WHERE price > 2) p ON o.id = p.id",
         ["price > 2"]),
    ],
)  # fmt: skip
def test_a_filter_of_upserts_below_what_cannot_take_it(sql, where):
    first, last = planned(sql).joins
    assert first.kind == "latest"
    assert first.description.by == tuple(first.inputs[0].schema.names[:1])
    filtered = [side for side in last.inputs if isinstance(side, Calc) and side.input is first]
    assert [side.where for side in filtered] == [where]


def test_upserts_that_nothing_filters_stay_as_they_are():
    assert [j.kind for j in planned("SELECT price, count(*) AS n FROM prices GROUP BY price").joins] == ["aggregate"]


# --- columns ----------------------------------------------------------------------------------------------


def selected(sql):
    """Per input of the query: the columns that go below the joins."""
    return {
        node.input.alias: [e.name for e in node.select]
        for node in walk(planned(sql).root)
        if isinstance(node, Calc) and isinstance(node.input, Scan)
    }


def test_only_columns_that_are_needed_go_below():
    assert selected(query("LEFT")) == {"o": ["id", "o__uid"], "y": ["y__uid", "paid"]}


def test_a_unique_key_and_the_order_are_kept_although_nobody_asks():
    schema = pa.schema([("card", LONG), ("uid", LONG), ("lsn", LONG), ("limit", LONG)])
    tables = {**TABLES, "cards": Table("cards", schema, unique_key=("card",), sequence_by="lsn")}
    (join,) = planned("SELECT u.name FROM users u JOIN cards c ON c.uid = u.uid", tables=tables).joins
    assert join.description.right.schema.names == ["card", "c__uid", "lsn"]
    assert (join.description.right.unique_key, join.description.right.sequence_by) == (("card",), "lsn")


def test_between_joins_too():
    plan = planned(
        "SELECT u.name FROM users u JOIN orders o ON u.uid = o.uid AND o.note <> u.name JOIN prices p ON p.id = o.id"
    )
    _, second = plan.joins
    assert second.description.inputs[0].schema.names == ["name", "o__id"]


def test_an_input_of_which_nothing_is_needed_keeps_a_column():
    assert selected("SELECT o.id FROM orders o JOIN users u ON o.amount > 1")["u"] == ["uid"]


def test_a_row_kind_column_and_a_column_of_that_name():
    tables = {**TABLES, "ops": Table("ops", pa.schema([("uid", LONG), ("row_kind", LONG)]), row_kind="op")}
    ops = "(SELECT uid, row_kind, uid + 1 AS op FROM ops) x"
    (join,) = planned(f"SELECT x.row_kind AS kind, x.op FROM {ops} JOIN users u USING (uid)", tables=tables).joins
    left = join.inputs[0]
    assert sorted(e.name for e in left.select) == ["op", "ops__row_kind", "ops__uid"]
    assert left.row_kind == join.description.left.row_kind == "row_kind"
