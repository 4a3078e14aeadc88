"""Which operator a query's joins become, and what the plan says of it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.times import show_ms
from gpu_ops.query.errors import SqlError
from gpu_ops.query.nodes import show
from gpu_ops.query.relations import Table
from sql.tables import LONG, STRING, TABLES, planned


def one(sql, **options):
    (join,) = planned(sql, **options).joins
    return join


def kinds(sql, **options):
    return [join.kind for join in planned(sql, **options).joins]


# --- keys -------------------------------------------------------------------------------------------------


def test_equalities_are_keys_and_the_rest_is_residual():
    join = one(
        "SELECT o.id FROM orders o LEFT JOIN prices p ON o.id = p.id AND o.amount <=> p.price AND o.amount < p.price"
    )
    assert join.description.keys == (Key("o__id", "p__id"), Key("amount", "price", null_safe=True))
    assert str(join.description.where) == "o.amount < p.price"
    assert (join.kind, join.description.how) == ("regular", "left")


@pytest.mark.parametrize("condition", ["o.id = p.id", "p.id = o.id", "(o.id) == p.id", "(p.id = o.id AND TRUE)"])
@pytest.mark.parametrize("form", [", prices p WHERE", "CROSS JOIN prices p WHERE", "JOIN prices p ON"])
def test_inner_joins_as_people_write_them(form, condition):
    join = one(f"SELECT o.id FROM orders o {form} {condition}")
    assert join.description.keys == (Key("o__id", "p__id"),)
    assert join.description.where is None


def test_an_expression_is_a_key_of_its_own_column():
    join = one("SELECT o.note FROM orders o JOIN payments y ON o.uid + 1 = y.uid AND o.id = -y.uid")
    assert [(k.left, k.right) for k in join.description.keys] == [("key_1", "y__uid"), ("id", "key_2")]
    left, right = join.inputs
    assert ("key_1", "uid + 1") in [(e.name, e.text) for e in left.select]
    assert ("key_2", "-uid") in [(e.name, e.text) for e in right.select]


def test_an_equality_that_does_not_part_the_sides_is_no_key():
    join = one("SELECT o.note FROM orders o JOIN payments y ON o.uid + y.uid = 3 AND o.uid = y.uid")
    assert len(join.description.keys) == 1
    assert str(join.description.where) == "(o.o__uid + y.y__uid) = 3"


def test_no_key_at_all():
    join = one("SELECT o.note FROM orders o JOIN prices p ON o.amount > p.price")
    assert join.description.keys == ()
    assert "no equality: every pair of rows is a candidate, in one partition" in join.remarks


def test_comma_joins_are_put_in_an_order_that_has_keys():
    plan = planned(
        "SELECT u.name, o.id, p.price FROM users u, prices p, orders o WHERE u.uid = o.uid AND o.id = p.id",
        multi_way="never",
    )
    assert [[i.name for i in join.description.inputs] for join in plan.joins] == [["u", "o"], ["u_o", "p"]]
    assert all(join.description.keys for join in plan.joins)


@pytest.mark.parametrize(("how", "found"), [("LEFT OUTER", "left"), ("RIGHT", "right"), ("FULL OUTER", "full"),
                                            ("LEFT SEMI", "semi"), ("ANTI", "anti"), ("", "inner")])  # fmt: skip
def test_join_types(how, found):
    assert one(f"SELECT o.id FROM orders o {how} JOIN prices p ON o.id = p.id").description.how == found


# --- semi and anti ----------------------------------------------------------------------------------------


def test_exists_is_a_semi_join_by_all_that_correlates():
    join = one(
        "SELECT o.id FROM orders o WHERE EXISTS (SELECT 1 FROM users u WHERE u.uid = o.uid AND u.name <> o.note "
        "AND u.name LIKE 'a%') AND o.amount > 1"
    )
    assert (join.kind, join.description.how) == ("semi", "semi")
    assert str(join.description.where) == "u.name <> o.note"
    assert [side.where for side in join.inputs] == [["amount > 1"], ["name LIKE 'a%'"]]
    assert join.why == "semi: SEMI JOIN"


def test_exists_without_correlation_is_a_join_without_a_key():
    for negated, kind in (("", "semi"), ("NOT ", "anti")):
        sql = f"SELECT o.id FROM orders o JOIN users u ON o.uid = u.uid WHERE {negated}EXISTS (SELECT 1 FROM orders x)"
        (join,) = (join for join in planned(sql).joins if join.kind == kind)
        assert (join.description.keys, join.description.where) == ((), None)


def test_what_an_input_that_may_have_no_row_computes_is_null_then():
    sql = """SELECT u.name FROM users u LEFT JOIN orders o ON o.uid = u.uid
        JOIN payments y ON y.uid = u.uid AND {} < y.paid"""
    assert kinds(sql.format("sqrt(o.amount)")) == ["multi-way"]
    assert kinds(sql.format("sqrt(coalesce(o.amount, 1))")) == ["regular", "regular"]
    assert kinds(sql.format("coalesce(o.amount, 1)")) == ["multi-way"]  # which the join evaluates, for a pad, too


def test_not_exists_and_in():
    anti = "SELECT id FROM orders o WHERE NOT EXISTS (SELECT * FROM prices p WHERE p.id = o.id)"
    assert (one(anti).description.how, one(anti).description.null_aware) == ("anti", False)
    join = one("SELECT id FROM orders WHERE id IN (SELECT id FROM prices)")
    assert (join.description.how, join.description.keys) == ("semi", (Key("orders__id", "prices__id"),))
    pair = one("SELECT id FROM orders WHERE (id, uid + 1) IN (SELECT id, id * 2 FROM prices)")
    assert [k.left for k in pair.description.keys] == ["orders__id", "key_1"]


def test_not_in_is_null_aware_unless_no_side_has_nulls():
    loose = one("SELECT id FROM orders WHERE id NOT IN (SELECT uid FROM payments)")
    assert loose.description.null_aware
    assert loose.description.shuffled_by == ()
    assert "null" in loose.why
    # a unique key has no nulls, and what a filter below the join turns away is not there
    for strict in (
        "SELECT sku FROM stock WHERE sku NOT IN (SELECT sku FROM stock)",
        "SELECT id FROM orders WHERE id > 0 AND id NOT IN (SELECT uid FROM payments WHERE uid IS NOT NULL)",
    ):
        assert not one(strict).description.null_aware, strict
    # one side only does not do
    assert one("SELECT id FROM orders WHERE id > 0 AND id NOT IN (SELECT uid FROM payments)").description.null_aware


def test_what_a_correlated_not_in_correlates_by_is_not_null_aware():
    sql = "SELECT id FROM orders o WHERE id NOT IN (SELECT uid FROM payments y WHERE y.paid = o.amount AND paid > 1)"
    join = one(sql)
    assert join.description.keys == (Key("id", "uid"),)
    assert str(join.description.where) == "y.paid = o.amount"
    assert join.inputs[1].where == ["paid > 1"]


def test_a_constant_that_is_not_in():
    join = one("SELECT id FROM orders WHERE 3 NOT IN (SELECT uid FROM payments)")
    assert (join.kind, join.description.keys) == ("anti", ())
    assert join.inputs[1].where == ["3 = uid OR (3 = uid) IS NULL"]


# --- interval ---------------------------------------------------------------------------------------------

MINUTE = 60_000


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ("v.ts BETWEEN c.ts - INTERVAL 5 MINUTES AND c.ts + INTERVAL '1' HOUR", (-5, 60, True, True)),
        ("c.ts BETWEEN v.ts - INTERVAL '60' MINUTE AND v.ts + INTERVAL '5 minutes'", (-5, 60, True, True)),
        ("v.ts > c.ts AND v.ts <= c.ts + INTERVAL 10 MINUTES", (0, 10, False, True)),
        ("c.ts < v.ts AND c.ts + INTERVAL 10 MINUTES > v.ts", (0, 10, False, False)),
        ("v.ts - INTERVAL 1 MINUTE >= c.ts AND v.ts - c.ts < INTERVAL 1 DAY", (1, 1440, True, False)),
        ("v.ts = c.ts", (0, 0, True, True)),
        ("v.ts = c.ts + INTERVAL 2 MINUTES", (2, 2, True, True)),
        # of several bounds the narrowest
        ("v.ts >= c.ts AND v.ts > c.ts AND v.ts < c.ts + INTERVAL 3 MINUTES AND v.ts <= c.ts + INTERVAL 1 HOUR",
         (0, 3, False, False)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["", "LEFT", "FULL"])
def test_bounds_make_an_interval_join(condition, bounds, how):
    join = one(f"SELECT c.x, y FROM clicks c {how} JOIN views v ON c.uid = v.uid AND {condition} AND c.x < v.y")
    interval = join.description.interval
    assert join.kind == "interval"
    assert (interval.lower_ms / MINUTE, interval.upper_ms / MINUTE) == bounds[:2]
    assert (interval.lower_inclusive, interval.upper_inclusive) == bounds[2:]
    assert [side.event_time for side in join.description.inputs] == ["c__ts", "v__ts"]
    assert str(join.description.where) == "c.x < v.y"


WITHIN = "c.uid = v.uid AND v.ts BETWEEN c.ts AND c.ts + INTERVAL 4 HOURS"


@pytest.mark.parametrize(
    ("rest", "how"),
    [
        (f"WHERE x > 1 AND EXISTS (SELECT 1 FROM views v WHERE {WITHIN} AND c.x < v.y)", "semi"),
        (f"WHERE x > 1 AND NOT EXISTS (SELECT 1 FROM views v WHERE {WITHIN} AND x < y)", "anti"),
        (f"LEFT SEMI JOIN views v ON {WITHIN} AND x < y WHERE x > 1", "semi"),
        (f"LEFT ANTI JOIN views v ON {WITHIN} AND x < y WHERE x > 1", "anti"),
    ],
)
def test_exists_with_bounds_makes_an_interval_join(rest, how):
    join = one(f"SELECT x, ts FROM clicks c {rest}")
    interval = join.description.interval
    assert (join.kind, join.description.how) == ("interval", how)
    assert (interval.lower_ms, interval.upper_ms / MINUTE) == (0, 240)
    assert [side.event_time for side in join.description.inputs] == ["c__ts", "v__ts"]
    assert [side.where for side in join.inputs] == [["x > 1"], []]
    assert str(join.description.where) == "c.x < v.y"
    assert [c.name for c in join.description.output if "ts" in c.name] == ["c__ts"]


def test_an_interval_join_above_a_semi_or_anti_one():
    """What comes out of these has its event time."""
    sql = f"""
        SELECT c.x FROM clicks c LEFT ANTI JOIN views v ON {WITHIN}
        JOIN clicks m ON m.uid = c.uid AND m.ts BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR"""
    assert kinds(sql) == ["interval", "interval"]


def test_bounds_in_where_and_in_milliseconds():
    join = one("SELECT a.uid FROM ms a, ms b WHERE a.uid = b.uid AND b.t BETWEEN a.t - 250 AND a.t + 4000")
    assert (join.description.interval.lower_ms, join.description.interval.upper_ms) == (-250, 4000)


def test_event_times_that_are_not_compared_make_a_regular_join():
    join = one(
        "SELECT c.ts, v.ts AS other FROM clicks c JOIN views v ON c.uid = v.uid AND c.ts > TIMESTAMP '2024-01-01'"
    )
    assert join.kind == "regular"
    assert "rows are kept for ever" in join.why
    assert [side.event_time for side in join.description.inputs] == [None, None]


@pytest.mark.parametrize("cast", ["CAST(c.ts AS TIMESTAMP)", "c.ts::timestamp", "CAST(c.ts AS DATE)"])
def test_a_cast_makes_a_plain_column_of_an_event_time(cast):
    join = one(f"SELECT c.x FROM clicks c JOIN views v ON c.uid = v.uid AND {cast} <= v.ts")
    assert join.kind == "regular"
    sql = (
        "SELECT x FROM (SELECT uid, x, CAST(ts AS TIMESTAMP) AS t FROM clicks) c JOIN views v USING (uid) WHERE t < ts"
    )
    assert one(sql).kind == "regular"


def test_interval_joins_in_a_row_and_a_regular_one_above():
    sql = """
        SELECT c.x, v.y, m.uid AS again, u.name FROM clicks c
        JOIN views v ON c.uid = v.uid AND v.ts BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR
        JOIN clicks m ON m.uid = v.uid AND m.ts BETWEEN v.ts AND v.ts + INTERVAL 1 HOUR
        JOIN users u ON u.uid = c.uid"""
    first, second, third = planned(sql).joins
    assert [first.kind, second.kind, third.kind] == ["interval", "interval", "regular"]
    assert [side.event_time for side in second.description.inputs] == ["v__ts", "m__ts"]


# --- ASOF -------------------------------------------------------------------------------------------------

ASOF = "SELECT c.x, v.y FROM clicks c ASOF {} views v {}"


@pytest.mark.parametrize(
    ("how", "rest", "asof"),
    [
        ("JOIN", "MATCH_CONDITION (c.ts >= v.ts) ON c.uid = v.uid", ("inner", "backward", True)),
        ("LEFT JOIN", "ON c.uid = v.uid AND c.ts >= v.ts", ("left", "backward", True)),
        ("left outer join", "on v.ts<c.ts and v.uid=c.uid", ("left", "backward", False)),
        ("INNER JOIN", "MATCH_CONDITION(c.ts <= v.ts)ON(v.uid <=> c.uid)", ("inner", "forward", True)),
        ("LEFT JOIN", "MATCH_CONDITION ((v.ts) > c.ts)\nON c.uid = v.uid", ("left", "forward", False)),
    ],
)
def test_an_asof_join(how, rest, asof):
    join = one(ASOF.format(how, rest))
    description = join.description
    assert join.kind == "asof"
    assert (description.how, description.asof.direction, description.asof.exact) == asof
    assert [side.event_time for side in description.inputs] == ["c__ts", "v__ts"]
    assert [(k.left, k.right) for k in description.keys] == [("c__uid", "v__uid")]
    assert description.where is None


def test_filters_of_an_asof_join_stay_where_they_are():
    """Of what is nearest, not of what may be; and the pads of a left one are not turned away with it."""
    rest = "MATCH_CONDITION (c.ts >= v.ts) ON c.uid = v.uid AND v.y > 0 WHERE v.y > 3 AND c.x > 2"
    plan = planned(ASOF.format("LEFT JOIN", rest))
    (join,) = plan.joins
    assert join.description.how == "left"
    assert [side.where for side in join.inputs] == [[], ["y > 0"]]
    assert plan.root.where == ["y > 3", "x > 2"]


def test_an_asof_join_among_others():
    """Of a sub-query, over changelogs; above it an interval join has no event time to go by."""
    sql = """
        SELECT u.name, e.uid, q.ts FROM users u JOIN edits e ON u.uid = e.uid
        ASOF LEFT JOIN (SELECT uid, ts, y + 1 AS z FROM views WHERE y > 1) q ON q.uid = u.uid AND e.ts >= q.ts
        JOIN payments p ON p.uid = u.uid"""
    assert kinds(sql) == ["regular", "asof", "regular"]
    sql = "SELECT p.paid, v.y FROM payments p ASOF JOIN views v MATCH_CONDITION (p.at > v.ts)"
    assert one(sql).description.keys == ()


def test_explain_of_an_asof_join():
    lines = show(planned(ASOF.format("LEFT JOIN", "ON c.uid = v.uid AND c.ts > v.ts"))).splitlines()
    assert lines[1] == ("+- AsofJoin(joinType=[LeftOuterJoin], matchCondition=[c.ts > v.ts], where=[c.uid = v.uid])")
    assert lines[2] == "   :  -- asof: LEFT JOIN, each row with the last before its c.ts by v.ts"


@pytest.mark.parametrize(
    ("match", "ms", "direction"),
    [
        ("c.ts >= v.ts AND c.ts - v.ts <= INTERVAL 1 SECOND", 1000, "backward"),
        ("v.ts BETWEEN c.ts - INTERVAL '1' HOUR AND c.ts", 3_600_000, "backward"),
        ("c.ts <= v.ts AND v.ts - INTERVAL 2 MINUTES <= c.ts", 120_000, "forward"),
        ("c.ts < v.ts AND INTERVAL '1 00:00:00' DAY TO SECOND >= v.ts - c.ts", 86_400_000, "forward"),
        ("c.ts > v.ts AND c.ts <= v.ts + INTERVAL 2 SECOND AND c.ts - v.ts <= INTERVAL 1 SECOND", 1000, "backward"),
    ],
)
def test_the_tolerance_of_an_asof_join(match, ms, direction):
    for rest in (f"MATCH_CONDITION ({match}) ON c.uid = v.uid", f"ON {match} AND c.uid = v.uid"):
        plan = planned(ASOF.format("JOIN", rest))
        asof = plan.joins[0].description.asof
        assert (asof.tolerance_ms, asof.direction) == (ms, direction)
        assert f", tolerance=[{show_ms(ms)}], where=[" in show(plan)
        assert " apart" in plan.joins[0].why


def test_the_tolerance_of_integers():
    join = one(ASOF.format("JOIN", "MATCH_CONDITION (c.x >= v.y AND c.x - v.y <= 250) ON c.uid = v.uid"))
    assert join.description.asof.tolerance_ms == 250


def test_rows_that_are_final():
    """Of joins by time; what comes out of an ASOF join then has an event time, of the left."""
    sql = """
        SELECT c.x, v.y, m.x AS z FROM clicks c
        ASOF LEFT JOIN views v MATCH_CONDITION (c.ts {} v.ts{}) ON c.uid = v.uid
        JOIN clicks m ON m.uid = c.uid AND m.ts BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR"""
    for sign, more in ((">=", ""), ("<=", " AND v.ts - c.ts <= INTERVAL 1 SECOND")):
        asof, interval = planned(sql.format(sign, more), emit="at_watermark").joins
        assert (asof.description.emit, interval.description.emit) == ("at_watermark", "per_batch")
        assert [side.event_time for side in interval.description.inputs] == ["c__ts", "m__ts"]
    for emit, message in (("at_watermark", "the ASOF LEFT JOIN"), ("per_batch", "the ASOF LEFT JOIN")):
        with pytest.raises(SqlError, match=f"c.ts is no event time any more: {message} of c and v below gives rows of"):
            planned(sql.format("<=", ""), emit=emit)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT c.x FROM clicks c LEFT JOIN users u ON c.uid = u.uid", "a regular LEFT JOIN takes rows back"),
        ("SELECT c.x FROM clicks c WHERE c.uid IN (SELECT uid FROM users)", "a semi .* takes rows back"),
        (ASOF.format("JOIN", "ON c.uid = v.uid AND c.ts > v.ts").replace("views", "edits").replace(", v.y", ""),
         "an ASOF join takes inputs that only grow, and v brings retractions"),
        ("SELECT c.x FROM clicks c ASOF JOIN payments p ON c.uid = p.uid AND c.ts > p.at",
         "goes by the watermarks of both times, and p.at has none: withWatermark"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_final(query, message):
    with pytest.raises(SqlError, match=message):
        planned(query, emit="at_watermark")


# --- temporal ---------------------------------------------------------------------------------------------


def test_a_temporal_join_and_an_interval_join_of_what_it_gives():
    sql = """
        SELECT c.x, r.y, m.uid AS again FROM clicks c
        LEFT JOIN views FOR SYSTEM_TIME AS OF c.ts AS r ON c.uid = r.uid AND r.y > c.x
        JOIN clicks m ON m.uid = c.uid AND m.ts BETWEEN c.ts AND c.ts + INTERVAL 1 HOUR WHERE r.y > 3"""
    plan = planned(sql)
    temporal, interval = plan.joins
    assert (temporal.kind, interval.kind) == ("temporal", "interval")
    assert (temporal.description.how, temporal.description.emit) == ("left", "at_watermark")
    assert [side.event_time for side in temporal.description.inputs] == ["c__ts", "r__ts"]
    assert [side.event_time for side in interval.description.inputs] == ["c__ts", "m__ts"]
    assert str(temporal.description.where) == "r.y > c.x"
    assert [side.where for side in temporal.inputs] == [[], []]
    assert "TemporalJoin(joinType=[LeftOuterJoin], asOf=[c.ts], versionsBy=[r.ts]" in show(plan)


# --- multi-way --------------------------------------------------------------------------------------------

USERS = "FROM users u LEFT JOIN orders o ON o.uid = u.uid"
PAID = "JOIN payments y ON y.uid = u.uid"


def test_joins_that_share_a_key_are_one():
    join = one(
        f"SELECT u.name, o.id, y.paid {USERS} AND o.amount > 1 JOIN payments y ON y.uid = u.uid AND y.paid < o.amount"
    )
    assert join.kind == "multi-way"
    assert [step.how for step in join.description.steps] == ["left", "inner"]
    assert str(join.description.steps[1].where) == "y.paid < o.amount"
    assert join.description.common_key == (("u__uid", "o__uid", "y__uid"),)
    assert join.why == "multi-way: all 2 joins share u.uid = o.uid = y.uid"


def test_multi_way_never():
    sql = f"SELECT u.name, o.id, y.paid {USERS} JOIN payments y ON y.uid = u.uid"
    assert kinds(sql, multi_way="never") == ["regular", "regular"]
    assert "multi_way='never'" in planned(sql, multi_way="never").joins[-1].why


def test_a_chain_of_equalities_is_a_common_key_too():
    sql = f"SELECT u.name {USERS} JOIN payments y ON y.uid = o.uid"
    assert one(sql).description.common_key == (("u__uid", "o__uid", "y__uid"),)


def test_the_longest_run_is_taken_and_the_rest_is_chained():
    sql = f"""SELECT u.name, p.price, c.x {USERS} JOIN payments y ON y.uid = u.uid
              LEFT JOIN prices p ON p.id = o.id LEFT JOIN clicks c ON c.uid = u.uid"""
    plan = planned(sql)
    assert [join.kind for join in plan.joins] == ["multi-way", "regular", "regular"]
    assert len(plan.joins[0].description.inputs) == 3
    assert plan.joins[0].why == "multi-way: 2 of 4 joins share u.uid = o.uid = y.uid"
    plan = planned(f"SELECT p.price FROM prices p JOIN orders o ON p.id = o.id JOIN users u ON u.uid = o.uid {PAID}")
    assert [join.kind for join in plan.joins] == ["regular", "multi-way"]
    assert [side.name for side in plan.joins[1].description.inputs] == ["p_o", "u", "y"]


def test_a_right_join_at_the_start_is_turned_round():
    join = one("SELECT u.name FROM orders o RIGHT JOIN users u ON o.uid = u.uid JOIN payments y ON y.uid = u.uid")
    assert [side.name for side in join.description.inputs] == ["u", "o", "y"]
    assert [step.how for step in join.description.steps] == ["left", "inner"]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("FULL JOIN payments y ON y.uid = u.uid", "a full join is no part"),
        ("RIGHT JOIN payments y ON y.uid = u.uid", "a right join is no part"),
        ("JOIN payments y ON y.paid < o.amount", "no equality"),
        ("JOIN payments y ON y.paid = o.amount", "share no key"),
        ("JOIN payments y ON y.uid = u.uid + o.id", "is made of several inputs"),
    ],
)
def test_what_is_no_part_of_a_multi_way_join(step, why):
    plan = planned(f"SELECT u.name, o.id, y.paid {USERS} {step}")
    assert [join.kind for join in plan.joins] == ["regular", "regular"]
    assert why in plan.joins[-1].why


def test_an_upsert_without_the_common_key_in_its_unique_key_stays_apart():
    tables = {**TABLES, "cards": Table("cards", pa.schema([("card", LONG), ("uid", LONG)]), unique_key=("card",))}
    sql = f"SELECT u.name, c.card {USERS} JOIN cards c ON c.uid = u.uid"
    found = planned(sql, tables=tables)
    assert [join.kind for join in found.joins] == ["regular", "regular"]
    assert "unique key does not have the common key in it" in found.joins[-1].why


def test_a_derived_unique_key_is_kept_for_the_next_join():
    sql = "SELECT s.left, u.name FROM stock s JOIN users u ON s.sku = u.name JOIN orders o ON o.note = u.name"
    tables = {**TABLES, "users": Table("users", pa.schema([("name", STRING)]), row_kind="op", unique_key=("name",))}
    _, second = planned(sql, tables=tables, multi_way="never").joins
    assert second.description.inputs[0].unique_key == ("sku",)
    assert second.description.inputs[0].updates == "retract"


def test_states_with_a_ttl_derive_none():
    tables = {**TABLES, "stock": Table("stock", TABLES["stock"].schema, ("sku",), "op", updates="retract", ttl_ms=1000)}
    sql = "SELECT s.left FROM stock s JOIN users u ON s.sku = u.name JOIN orders o ON o.note = u.name"
    first, second = planned(sql, tables=tables, multi_way="never").joins
    assert first.description.inputs[0].ttl_ms == 1000
    assert second.description.inputs[0].unique_key is None


# --- the text ---------------------------------------------------------------------------------------------


def test_explain():
    sql = f"SELECT u.name, p.price {USERS} AND o.amount > 1 {PAID} LEFT JOIN prices p ON p.id = o.id"
    assert show(planned(sql)) == EXPLAINED.strip("\n")


EXPLAINED = """
Calc(select=[name, price])
+- Join(joinType=[LeftOuterJoin], where=[o.id = p.id], leftInputSpec=[NoUniqueKey], rightInputSpec=[JoinKeyContainsUniqueKey])
   :  -- regular: LEFT JOIN; the joins of u, o, y, p share no key
   :- Exchange(distribution=[hash[o.id]])
   :  +- Calc(select=[name, o.id])
   :     +- MultiJoin(commonJoinKey=[u.uid], joinTypes=[LEFT, INNER], inputUniqueKeys=[noUniqueKey, noUniqueKey, noUniqueKey], joinConditions=[u.uid = o.uid, u.uid = y.uid])
   :        :  -- multi-way: 2 of 3 joins share u.uid = o.uid = y.uid
   :        :- Exchange(distribution=[hash[u.uid]])
   :        :  +- Calc(select=[u.uid, name])
   :        :     +- Source(table=[users], alias=[u], changes=[insert-only])
   :        :- Exchange(distribution=[hash[o.uid]])
   :        :  +- Calc(select=[o.id, o.uid], where=[amount > 1])
   :        :     +- Source(table=[orders], alias=[o], changes=[retractions])
   :        +- Exchange(distribution=[hash[y.uid]])
   :           +- Calc(select=[y.uid])
   :              +- Source(table=[payments], alias=[y], changes=[insert-only])
   +- Exchange(distribution=[hash[p.id]])
      +- Calc(select=[p.id, price])
         +- Source(table=[prices], alias=[p], changes=[upserts], uniqueKey=[id])
"""  # noqa: E501


def test_explain_of_upserts_that_become_retractions():
    lines = show(planned("SELECT p.id, y.uid FROM prices p LEFT JOIN payments y ON y.paid = p.price")).splitlines()
    assert lines[3:7] == [
        "   :- Exchange(distribution=[hash[price]])",
        "   :  +- ChangelogNormalize(key=[id])",
        "   :     +- Exchange(distribution=[hash[id]])",
        "   :        +- Source(table=[prices], alias=[p], changes=[upserts], uniqueKey=[id])",
    ]


def test_explain_of_an_interval_join():
    sql = (
        "SELECT c.x FROM clicks c LEFT JOIN views v ON c.uid = v.uid AND v.ts > c.ts AND v.ts <= c.ts + INTERVAL 1 HOUR"
    )
    lines = show(planned(sql)).splitlines()
    where = "where=[c.uid = v.uid]"
    assert lines[1] == (f"+- IntervalJoin(joinType=[LeftOuterJoin], windowBounds=[0 < v.ts - c.ts <= 1 hour], {where})")
    assert lines[2] == "   :  -- interval: v.ts is bounded on both sides of c.ts"
