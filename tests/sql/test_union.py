"""UNION in a query: the parts that it has at the top, what each is planned as, and what is refused."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest

from gpu_ops.errors import NotBuiltError
from gpu_ops.query.errors import SqlError
from gpu_ops.query.nodes import Calc, show, walk
from gpu_ops.query.relations import Scan, Table
from sql.tables import TABLES, TIME, planned

JOINED = "FROM orders o JOIN prices p ON o.id = p.id"

ASOF = "SELECT c.x FROM clicks c ASOF JOIN views v ON c.uid = v.uid AND c.ts >= v.ts"


def test_each_part_at_the_top_is_a_query_of_its_own():
    first = "SELECT o.id, p.price FROM c JOIN orders o USING (id) JOIN prices p USING (id)"
    second = f"SELECT o.id, 1 {JOINED}"
    made = planned(f"WITH c AS (SELECT id FROM orders UNION SELECT id FROM prices)\n{first}\n UNION ALL {second}")
    (alone,) = planned(second).joins
    assert [join.description for join in made.parts[1].joins] == [alone.description]
    assert len(made.joins) == sum(len(part.joins) for part in made.parts)
    three = planned(f"({second} UNION ALL {second}) UNION ALL {second}")
    assert len(three.parts) == 3
    assert [part.joins[0].description for part in three.parts] == [alone.description] * 3


def test_below_an_operator_it_is_one_of_its_inputs():
    both = "(SELECT id FROM orders UNION ALL SELECT uid FROM users)"
    made = planned(f"SELECT u.id, p.price FROM {both} u JOIN prices p USING (id)")
    (join,) = made.joins
    assert [side.name for side in join.description.inputs] == ["orders_users", "p"]
    assert join.description.inputs[0].row_kind == "row_kind"
    assert join.description.inputs[0].unique_key is None
    inserts = planned(
        "SELECT k, count(*) AS n FROM (SELECT uid AS k FROM users UNION ALL SELECT uid FROM payments) GROUP BY k"
    )
    assert inserts.joins[0].description.inputs[0].row_kind is None
    assert "Union(all=[true])" in show(made)


def test_of_changelogs_alone_it_is_a_query():
    made = planned("SELECT id FROM orders UNION ALL SELECT uid FROM users WHERE uid > 1")
    assert show(made).splitlines()[:2] == ["Calc(select=[orders.id AS id])", "+- Union(all=[true])"]
    assert not made.joins


def test_filters_and_columns_go_below_it_and_upserts_are_taken_back_there():
    sql = """SELECT k, count(*) AS n FROM (SELECT id AS k, price AS v, 1 AS w FROM prices UNION ALL
             SELECT uid, amount, 2 FROM orders) WHERE v > 2 GROUP BY k"""
    made = planned(sql)
    assert [join.kind for join in made.joins] == ["latest", "aggregate"]
    below = [node for node in walk(made.root) if isinstance(node, Calc) and node.where]
    assert [node.where for node in below] == [["price > 2"], ["amount > 2"]]
    assert [[x.name for x in node.select] for node in below] == [["k"], ["k"]]


def test_types_of_the_parts_are_made_one():
    both = f"(SELECT o.id AS x {JOINED} UNION ALL SELECT paid FROM payments)"
    made = planned(f"SELECT x, count(*) AS n FROM {both} GROUP BY x")
    assert [str(kind) for kind in made.joins[-1].description.inputs[0].schema.types] == ["double"]
    both = "(SELECT uid, tags AS v FROM users UNION ALL SELECT uid, CAST(NULL AS ARRAY<STRING>) FROM payments)"
    (join,) = planned(f"SELECT b.uid, b.v FROM {both} b JOIN orders o ON o.uid = b.uid").joins
    assert "list<" in str(join.description.inputs[0].schema.types)
    assert "ARRAY" in show(
        planned(f"SELECT o.id, CAST(b.v AS ARRAY<BINARY>) AS v FROM {both} b JOIN orders o USING (uid)")
    )


@pytest.mark.parametrize(
    ("sql", "message", "place"),
    [
        (f"SELECT o.id {JOINED} UNION ALL SELECT p.nme {JOINED}", "nme", (1, 73)),
        (f"SELECT o.id {JOINED} UNION ALL SELECT 1, 2 FROM users", "NUM_COLUMNS_MISMATCH", (1, 1)),
        (f"SELECT o.id {JOINED} UNION ALL {ASOF} OR c.x = 1", "an ASOF join stands in FROM", (1, 91)),
    ],
)  # fmt: skip
def test_what_is_refused(sql, message, place):
    with pytest.raises(SqlError, match=message) as raised:
        planned(sql)
    assert (raised.value.line, raised.value.column) == place


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("orders", {"ttl_ms": 1000}, "ttl"),
        ("orders", {"sequence_by": "id"}, "sequence_by"),
        ("prices", {"ttl_ms": 1000}, "ttl"),
        ("users", {"bad_rows": "drop"}, "bad_rows"),
    ],
)
def test_what_the_rows_of_a_union_would_lose_is_refused(name, option, said):
    column = "uid" if name == "users" else "id"
    both = f"(SELECT {column} AS k FROM {name} UNION ALL SELECT uid FROM payments)"
    sql = f"SELECT k, count(*) AS n FROM {both} GROUP BY k"
    with pytest.raises(SqlError, match=f"input '{name}' has {said}, which the rows of a UNION ALL do not keep"):
        planned(sql, tables={**TABLES, name: dataclasses.replace(TABLES[name], **option)})


def test_an_ordered_input_of_upserts_is_put_in_order_below_it():
    prices = dataclasses.replace(TABLES["prices"], sequence_by="price")
    sql = "SELECT k, count(*) AS n FROM (SELECT id AS k FROM prices UNION ALL SELECT uid FROM users) GROUP BY k"
    latest, _ = planned(sql, tables={**TABLES, "prices": prices}).joins
    assert latest.description.inputs[0].sequence_by == "price"


def test_joins_by_time_take_no_union_for_a_side_with_a_watermark():
    clicks = "(SELECT uid, ts, x FROM clicks UNION ALL SELECT uid, ts, y FROM views)"
    regular = planned(f"SELECT c.x FROM {clicks} c JOIN views v ON c.uid = v.uid AND v.ts > c.ts - INTERVAL 1 HOUR")
    assert [join.kind for join in regular.joins] == ["regular"]
    with pytest.raises(SqlError, match="each part of a UNION ALL has its own watermark"):
        planned(f"SELECT c.x FROM {clicks} c JOIN views FOR SYSTEM_TIME AS OF c.ts AS v ON c.uid = v.uid")


def test_final_windows_go_by_the_parts_of_a_union():
    sql = """SELECT window.end AS e, count(*) AS n FROM (SELECT ts, x FROM clicks UNION ALL SELECT t, v FROM (
             SELECT ts AS t, y AS v FROM views UNION ALL SELECT ts, 1 FROM edits)) WHERE x > 1
             GROUP BY window(ts, '1 minute')"""
    (windows,) = planned(sql, emit="at_watermark").joins
    assert windows.parts is not None
    assert windows.parts.times == (("clicks", "ts"), ("views", "ts"), ("edits", "ts"))
    (source,) = windows.description.inputs
    assert source.event_time == "clicks__ts"
    assert windows.parts.column in source.schema.names
    assert windows.parts.column not in [column.name for column in windows.description.output]
    text = show(planned(sql, emit="at_watermark"))
    assert [f"{number} AS {windows.parts.column}" in text for number in range(4)] == [True, True, True, False]
    assert planned(sql).joins[0].parts is None
    grows = planned(sql.replace("UNION ALL SELECT ts, 1 FROM edits", ""), emit="at_watermark").joins[0]
    assert grows.description.inputs[0].row_kind is None


def test_of_several_times_in_a_union_windows_say_which():
    wide = pa.schema([("t", TIME), ("u", TIME)])
    tables = {name: Table(name, wide, event_times=("t", "u")) for name in "ab"}
    above = "SELECT count(*) AS n FROM (SELECT * FROM a UNION ALL SELECT * FROM b) GROUP BY window(u, '1 minute')"
    (windows,) = planned(above, tables=tables, emit="at_watermark").joins
    assert windows.description.inputs[0].event_time == "a__u"
    each = "SELECT t, u, window(u, '1 minute') AS w FROM"
    below = f"SELECT count(*) AS n FROM ({each} a UNION ALL {each} b) GROUP BY w"
    with pytest.raises(SqlError, match="at_watermark' needs its event time"):
        planned(below, tables=tables, emit="at_watermark")


@pytest.mark.parametrize("whole", [f"SELECT o.id {JOINED} UNION ALL SELECT o.id {JOINED}",
                                   f"SELECT * FROM (SELECT o.id {JOINED} UNION ALL SELECT o.id {JOINED})"])  # fmt: skip
def test_its_result_does_not_wait_for_the_end(whole):
    with pytest.raises(NotBuiltError, match="emit 'at_end' of a UNION ALL"):
        planned(whole, emit="at_end")


def test_one_input_in_both_parts_is_read_twice():
    both = "(SELECT id AS k FROM orders UNION ALL SELECT uid FROM orders)"
    made = planned(f"SELECT k, count(*) AS n FROM {both} GROUP BY k")
    assert [node.table.name for node in walk(made.root) if isinstance(node, Scan)] == ["orders", "orders"]
