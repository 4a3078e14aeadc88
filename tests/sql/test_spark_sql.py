"""Queries on Spark, over small files: the folded result is the query over the folded inputs, in DuckDB."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from oracle.drive import canonical, difference
from spark.support import Sink, Source, drain, in_memory

import gpu_ops
from gpu_ops import stream
from gpu_ops.query.catalyst import items, java_class, scala_seq
from gpu_ops.query.expressions import Expr, Tree
from gpu_ops.query.plan import plan
from gpu_ops.query.relations import Table
from gpu_ops.spark.api.finish import check_runs
from sql.run_plan import Reference

pytestmark = pytest.mark.spark

TABLES = {
    "orders": Table(
        "orders", pa.schema([("id", pa.int64()), ("uid", pa.int64()), ("amount", pa.float64())]), row_kind="op"
    ),
    "prices": Table(
        "prices", pa.schema([("id", pa.int64()), ("price", pa.float64())]), row_kind="op", unique_key=("id",)
    ),
    "users": Table("users", pa.schema([("uid", pa.int64()), ("name", pa.string())])),
    "payments": Table("payments", pa.schema([("uid", pa.int64()), ("paid", pa.int64())])),
}
CHANGES = {
    "orders": [
        [("+I", (1, 7, 10.0)), ("+I", (2, 8, 20.0)), ("+I", (3, None, 5.0))],
        [("-D", (2, 8, 20.0)), ("+I", (2, 9, 40.0)), ("+I", (None, 7, 1.0)), ("+I", (1, 8, 2.0))],
    ],
    "prices": [[("+I", (1, 3.0)), ("+I", (2, 9.0))], [("+U", (1, 12.0)), ("-D", (2, 9.0)), ("+I", (3, 1.0))]],
    "users": [[("+I", (7, "ann")), ("+I", (8, "bob"))], [("+I", (9, "cy")), ("+I", (None, "nobody"))]],
    "payments": [[("+I", (7, 100))], [("+I", (7, 50)), ("+I", (9, 70))]],
}
DDL = {pa.int64(): "long", pa.float64(): "double", pa.string(): "string"}
QUERIES = {
    "left": "SELECT o.id, p.price FROM orders o LEFT JOIN prices p ON o.id = p.id",
    "inner, and an upsert input with a filter": """
        SELECT o.id, o.amount * p.price AS total, concat('#', CAST(o.id AS STRING)) AS tag
        FROM orders o, prices p WHERE o.id = p.id AND p.price < 10 AND o.amount > 4""",
    "full, coalesced": "SELECT id, amount, price FROM orders FULL JOIN prices USING (id)",
    "right, computed key": "SELECT o.amount, u.name FROM orders o RIGHT JOIN users u ON o.uid + 1 = u.uid",
    "semi and anti": """
        SELECT id, uid FROM orders o WHERE EXISTS (SELECT 1 FROM prices p WHERE p.id = o.id AND p.price > o.amount / 9)
        AND o.uid NOT IN (SELECT uid FROM payments WHERE paid > 90)""",
    "not in": """
        SELECT id, uid FROM orders WHERE uid NOT IN (SELECT uid FROM users WHERE name NOT IN ('cy', 'nobody'))""",
    "groups of a filtered upsert input": """
        SELECT g, count(*) AS n, max(d) AS m FROM (SELECT id % 2 AS g, price * 2 AS d FROM prices WHERE price > 2)
        WHERE d < 30 GROUP BY g""",
    "multi-way": """
        SELECT u.name, o.id, y.paid FROM users u LEFT JOIN orders o ON u.uid = o.uid AND o.amount >= 5
        JOIN payments y ON y.uid = u.uid AND (y.paid > 60 OR o.id = 1)""",
    "chain": """
        WITH rich AS (SELECT uid, name, upper(name) AS big FROM users WHERE name <> 'bob')
        SELECT r.big, o.id, p.price FROM rich r JOIN orders o ON o.uid = r.uid LEFT JOIN prices p ON p.id = o.id""",
    "copies of rows": "SELECT id FROM orders EXCEPT ALL SELECT id FROM prices",
    "values": """
        SELECT o.id, (SELECT price FROM prices p WHERE p.id = o.id) AS price FROM orders o
        WHERE o.amount > (SELECT min(y.paid) / 50 FROM payments y)""",
    "rows of both": "SELECT uid FROM orders INTERSECT SELECT uid FROM users",
    "grouping sets of copies": """
        SELECT uid, grouping(uid) AS whole, count(*) AS n, round(stddev_samp(amount), 6) AS s,
        array_join(sort_array(collect_list(CAST(id AS STRING))), ',') AS ids, approx_count_distinct(id) AS d
        FROM (SELECT * FROM orders INTERSECT ALL SELECT * FROM orders) GROUP BY ROLLUP (uid)""",
}

SHORT = ("inner, and an upsert input with a filter", "semi and anti", "chain")
"""Those that `make test` runs."""


def sources(spark: Any, folder: Path, names: list[str]) -> dict[str, Source]:
    """The inputs a query names, as folders of files."""
    found = {}
    for name in names:
        table = TABLES[name]
        columns = [f"{x.name} {DDL[x.type]}" for x in table.schema]
        found[name] = Source(spark, folder / name, ", ".join([*columns, *(["op string"] if table.row_kind else [])]))
        for rows in CHANGES[name]:
            found[name].add(*({"op": kind, **dict(zip(table.schema.names, row, strict=True))} for kind, row in rows))
    return found


def inputs(found: dict[str, Source]) -> dict[str, Any]:
    """The inputs as `gpu_ops.sql` takes them."""
    return {
        name: stream(source.df, row_kind=TABLES[name].row_kind, unique_key=TABLES[name].unique_key)
        for name, source in found.items()
    }


@pytest.mark.parametrize(
    "what", [what if what in SHORT else pytest.param(what, marks=pytest.mark.thorough) for what in QUERIES]
)
def test_a_query(spark: Any, tmp_path: Path, what: str) -> None:
    sql = QUERIES[what]
    names = [name for name in TABLES if f" {name}" in sql]
    changes = gpu_ops.sql(sql, state=str(tmp_path / "state"), name="query", **inputs(sources(spark, tmp_path, names)))
    assert changes.columns[0] == "row_kind"
    sink = Sink()
    drain(changes, sink, tmp_path / "checkpoint")
    with contextlib.closing(Reference(sql, {name: TABLES[name] for name in names})) as reference:
        for name in names:
            for rows in CHANGES[name]:
                reference.apply({name: rows})
        expected = reference.rows()
    found = Counter(tuple(map(canonical, row)) for row in sink.table)
    assert not difference(expected, found)
    assert expected, "a query that says nothing tests nothing"


CLICKS = "k long, ts timestamp, x long"
BOUNDS = "v.ts BETWEEN c.ts - INTERVAL 5 MINUTES AND c.ts + INTERVAL '1' HOUR"


def at(hour: int, minute: int) -> str:
    return f"2024-03-10T{hour:02}:{minute:02}:00Z"


@pytest.mark.thorough
def test_an_interval_join_and_a_join_of_what_it_gives(spark: Any, tmp_path: Path) -> None:
    clicks, views = (Source(spark, tmp_path / name, CLICKS) for name in ("clicks", "views"))
    names = Source(spark, tmp_path / "names", "k long, name string")
    clicks.add({"k": 1, "ts": at(5, 0), "x": 1}, {"k": 2, "ts": at(5, 10), "x": 2})
    views.add({"k": 1, "ts": at(4, 55), "x": 3}, {"k": 1, "ts": at(4, 54), "x": 4}, {"k": 1, "ts": at(6, 0), "x": 0})
    clicks.add({"k": 3, "ts": at(9, 0), "x": 5})
    views.add({"k": 3, "ts": at(9, 30), "x": 6})
    names.add({"k": 1, "name": "one"}, {"k": 2, "name": "two"}, {"k": 3, "name": "three"})
    changes = gpu_ops.sql(
        f"SELECT n.name, c.x, v.x AS y FROM clicks c LEFT JOIN views v ON c.k = v.k AND {BOUNDS} AND v.x > c.x "
        "JOIN names n ON n.k = c.k",
        clicks=clicks.df.withWatermark("ts", "1 minute"),
        views=stream(views.df, event_time="ts", delay="1 minute"),
        names=names.df,
        state=str(tmp_path / "state"),
    )
    sink = Sink()
    drain(changes, sink, tmp_path / "checkpoint")
    pad = [("two", 2, None)] if ("two", 2, None) in sink.table else []  # when the watermark comes by, it is out
    assert sink.table == sorted([("one", 1, 3), ("three", 5, 6), *pad], key=repr)
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["2", "query.json", "statements.json"]
    said = gpu_ops.explain(changes)
    assert said.count("in the same engine") == 1
    assert said.startswith("Calc(select=[")
    assert "IntervalJoin(joinType=[LeftOuterJoin], windowBounds=[-5 minutes <= v.ts - c.ts <= 1 hour]" in said
    assert "interval join, left: c, v" in said


@pytest.mark.thorough
def test_an_asof_join_over_a_restart(spark: Any, tmp_path: Path) -> None:
    """A quote that comes late replaces the one before; a filter above sees what is nearest."""
    trades, quotes = (Source(spark, tmp_path / name, CLICKS) for name in ("trades", "quotes"))
    sql = """
        SELECT t.x, q.x AS quote FROM trades t
        ASOF LEFT JOIN quotes q MATCH_CONDITION (t.ts >= q.ts) ON t.k = q.k WHERE NOT q.x <=> 99"""
    sink, state = Sink(), str(tmp_path / "state")

    def run() -> str:
        changes = gpu_ops.sql(sql, trades=trades.df, quotes=quotes.df, state=state)
        drain(changes, sink, tmp_path / "checkpoint")
        return gpu_ops.explain(changes)

    trades.add({"k": 1, "ts": at(5, 0), "x": 1}, {"k": 1, "ts": at(5, 10), "x": 2}, {"k": 2, "ts": at(5, 0), "x": 3})
    quotes.add({"k": 1, "ts": at(4, 59), "x": 10}, {"k": 2, "ts": at(5, 1), "x": 20}, {"k": 1, "ts": at(6, 0), "x": 12})
    said = run()
    assert "AsofJoin(joinType=[LeftOuterJoin], matchCondition=[t.ts >= q.ts], where=[t.k = q.k])" in said
    assert "ASOF join, left: t, q" in said
    assert sink.table == [(1, 10), (2, 10), (3, None)]
    quotes.add({"k": 1, "ts": at(5, 5), "x": 11}, {"k": 2, "ts": at(4, 0), "x": 99})
    run()
    assert sink.table == [(1, 10), (2, 11)]


@pytest.mark.thorough
def test_final_rows_of_an_asof_join_within_a_tolerance(spark: Any, tmp_path: Path) -> None:
    """Once and for good, when the watermark is there; what comes late in time still counts."""
    trades, quotes = (Source(spark, tmp_path / name, CLICKS) for name in ("trades", "quotes"))
    sql = """
        SELECT t.x, q.x AS quote FROM trades t
        ASOF LEFT JOIN quotes q ON t.k = q.k AND q.ts BETWEEN t.ts - INTERVAL 10 MINUTES AND t.ts"""
    sink, state = Sink(), str(tmp_path / "state")

    def run() -> str:
        left, right = (source.df.withWatermark("ts", "1 minute") for source in (trades, quotes))
        changes = gpu_ops.sql(sql, trades=left, quotes=right, state=state, emit="at_watermark")
        drain(changes, sink, tmp_path / "checkpoint")
        return gpu_ops.explain(changes)

    trades.add({"k": 1, "ts": at(5, 0), "x": 1}, {"k": 1, "ts": at(5, 20), "x": 2}, {"k": 2, "ts": at(5, 0), "x": 3})
    quotes.add({"k": 1, "ts": at(4, 49), "x": 9}, {"k": 2, "ts": at(5, 1), "x": 20}, {"k": 1, "ts": at(5, 9), "x": 12})
    said = run()
    assert "matchCondition=[t.ts >= q.ts], tolerance=[10 minutes], where=[t.k = q.k])" in said
    assert "at_watermark: rows that nothing changes any more" in said
    quotes.add({"k": 1, "ts": at(5, 10), "x": 11}, {"k": 3, "ts": at(9, 0), "x": 0})
    trades.add({"k": 3, "ts": at(9, 0), "x": 4})
    run()
    trades.add({"k": 3, "ts": at(9, 30), "x": 5})
    run()
    assert [row[0] for row in sink.changes] == ["+I"] * 3
    assert sink.table == [(1, None), (2, 11), (3, None)]


@pytest.mark.thorough
def test_a_temporal_join_over_a_restart(spark: Any, tmp_path: Path) -> None:
    """Each row with the version valid at its time, once, when the watermark is there."""
    orders, rates = (Source(spark, tmp_path / name, CLICKS) for name in ("orders", "rates"))
    sql = """
        SELECT o.x, r.x AS rate FROM orders o
        LEFT JOIN rates FOR SYSTEM_TIME AS OF o.ts AS r ON o.k = r.k WHERE o.x < 9"""
    sink, state = Sink(), str(tmp_path / "state")

    def run() -> str:
        left, right = (source.df.withWatermark("ts", "1 minute") for source in (orders, rates))
        changes = gpu_ops.sql(sql, orders=left, rates=right, state=state)
        drain(changes, sink, tmp_path / "checkpoint")
        return gpu_ops.explain(changes)

    orders.add({"k": 1, "ts": at(5, 0), "x": 1}, {"k": 1, "ts": at(5, 10), "x": 2}, {"k": 2, "ts": at(5, 0), "x": 3})
    rates.add({"k": 1, "ts": at(4, 59), "x": 10}, {"k": 2, "ts": at(5, 1), "x": 20}, {"k": 1, "ts": at(5, 5), "x": 11})
    said = run()
    assert "TemporalJoin(joinType=[LeftOuterJoin], asOf=[o.ts], versionsBy=[r.ts]" in said
    assert "temporal join, left: o, r" in said
    orders.add({"k": 3, "ts": at(9, 0), "x": 4})
    rates.add({"k": 3, "ts": at(9, 0), "x": 0})
    run()
    orders.add({"k": 3, "ts": at(9, 30), "x": 5})
    run()
    assert sink.table == [(1, 10), (2, 11), (3, None)]


@pytest.mark.thorough
def test_not_in_an_aggregate_of_a_stream_without_rows(spark: Any, tmp_path: Path) -> None:
    """The aggregate is null as long as there is no row, so nothing is known to be other than it; over a restart."""
    orders, prices = (Source(spark, tmp_path / name, "op string, id long, x long") for name in ("orders", "prices"))
    sql = "SELECT o.id FROM orders o WHERE o.x NOT IN (SELECT max(p.x) FROM prices p WHERE p.id > 0)"
    sink = Sink()

    def rows(*given: tuple[str, str, int, int]) -> list[Any]:
        for name, kind, number, x in given:
            (orders if name == "orders" else prices).add({"op": kind, "id": number, "x": x})
        found = gpu_ops.sql(
            sql, orders=stream(orders.df, row_kind="op"), prices=stream(prices.df, row_kind="op"),
            state=str(tmp_path / "state"),
        )  # fmt: skip
        drain(found, sink, tmp_path / "checkpoint")
        return sink.table

    assert rows(("orders", "+I", 1, 5), ("orders", "+I", 2, 7)) == []
    assert rows(("prices", "+I", 0, 5)) == []
    assert rows(("prices", "+I", 1, 5)) == [(2,)]
    assert rows(("prices", "-D", 1, 5), ("orders", "+I", 3, 9)) == []


@pytest.mark.thorough
def test_a_sub_query_in_a_sub_query(spark: Any, tmp_path: Path) -> None:
    sql = """SELECT u.name FROM users u WHERE NOT EXISTS (SELECT 1 FROM orders o WHERE o.uid = u.uid
        AND NOT EXISTS (SELECT 1 FROM prices p WHERE p.id = o.id AND p.price > 2))"""
    names = ["users", "orders", "prices"]
    changes = gpu_ops.sql(sql, state=str(tmp_path / "state"), **inputs(sources(spark, tmp_path, names)))
    sink = Sink()
    drain(changes, sink, tmp_path / "checkpoint")
    with contextlib.closing(Reference(sql, {name: TABLES[name] for name in names})) as reference:
        for name in names:
            for rows in CHANGES[name]:
                reference.apply({name: rows})
        expected = reference.rows()
    assert not difference(expected, Counter(tuple(map(canonical, row)) for row in sink.table))
    assert expected


@pytest.mark.thorough
def test_what_spark_cannot_run_is_refused_with_its_place(spark: Any) -> None:
    """Its planner and its code generator see each part before sql() gives anything; nothing dies in a micro-batch."""
    planned = plan("SELECT o.id,\n  o.uid + 1 AS n FROM orders o JOIN users u ON o.uid = u.uid", TABLES, spark)
    names = planned.root.input.schema.names
    rows = spark.createDataFrame([], ", ".join(["row_kind string", *(f"{name} long" for name in names)]))
    calc = planned.root
    check_runs(calc, rows, planned.sql)
    (part,) = (x for x in calc.select if x.expr is not None)
    outer = java_class(spark, "org.apache.spark.sql.catalyst.expressions.OuterReference")
    left, right = items(part.expr.java.children())
    origin = java_class(spark, "org.apache.spark.sql.catalyst.trees.CurrentOrigin")
    before = origin.get()
    origin.set(part.expr.java.origin())
    broken = part.expr.java.withNewChildren(scala_seq(spark, [outer(left), right]))
    origin.set(before)
    expr = Expr(Tree(part.expr.tree.fields, part.expr.tree.args, lambda: broken), part.expr.of)
    made = dict.fromkeys(calc.computed, expr)
    with pytest.raises(gpu_ops.SqlError, match=r"cannot run it \[INTERNAL_ERROR\] \(line 2, column 3\)"):
        check_runs(dataclasses.replace(calc, computed=made), rows, planned.sql)


@pytest.mark.thorough
def test_a_query_over_a_query(spark: Any, tmp_path: Path) -> None:
    found = sources(spark, tmp_path, ["orders", "prices", "users"])
    given = inputs(found)
    first = in_memory(
        gpu_ops.sql, QUERIES["left"].replace("o.id,", "o.id, o.uid,"), orders=given["orders"], prices=given["prices"]
    )
    second = in_memory(
        gpu_ops.sql, "SELECT name, price FROM rows JOIN users USING (uid)", rows=first, users=given["users"]
    )
    sink = Sink()
    drain(second, sink, tmp_path / "checkpoint")
    sql = "SELECT name, price FROM orders o LEFT JOIN prices p ON o.id = p.id JOIN users USING (uid)"
    with contextlib.closing(Reference(sql, {n: TABLES[n] for n in found})) as reference:
        for name in found:
            for rows in CHANGES[name]:
                reference.apply({name: rows})
        assert not difference(reference.rows(), Counter(sink.table))
    assert gpu_ops.explain(second).count("Source(table=[") == 4


@pytest.mark.thorough
def test_what_only_spark_knows(spark: Any, tmp_path: Path) -> None:
    given = inputs(sources(spark, tmp_path, ["orders", "users"]))
    with pytest.raises(gpu_ops.SqlError, match=r"Spark does not take this.*\(line 1, column 8\)") as error:
        in_memory(gpu_ops.sql, "SELECT nonsense(o.id) AS x FROM orders o JOIN users u ON o.uid = u.uid", **given)
    assert error.value.sql.startswith("SELECT nonsense")
    with pytest.raises(gpu_ops.SqlError, match=r"line 1, column 56"):
        in_memory(gpu_ops.sql, "SELECT o.id AS x FROM orders o JOIN users u ON o.uid = nonsense(u.uid)", **given)
    cast = in_memory(gpu_ops.sql, "SELECT o.id AS x FROM orders o JOIN users u ON o.uid = u.name", **given)
    assert "CAST(name AS BIGINT) AS key_1" in gpu_ops.explain(cast)
    joined = in_memory(
        gpu_ops.sql, "SELECT o.id FROM orders o JOIN users u ON substring(u.name, 1, 1) = hex(o.id)", **given
    )
    assert "key_1" in gpu_ops.explain(joined)


@pytest.mark.thorough
def test_inputs_that_cannot_be(spark: Any, tmp_path: Path) -> None:
    given = inputs(sources(spark, tmp_path, ["orders", "users"]))
    orders, users = given["orders"], given["users"]
    sql = "SELECT o.id FROM orders o JOIN users u ON o.uid = u.uid"
    for message, arguments in [
        ("needs the tables", {}),
        ("`users` cannot be found.*; the inputs are orders", {"orders": orders}),
        ("does not name the input 'more'", {**given, "more": users}),
        ("two inputs are called 'ORDERS'", {**given, "ORDERS": orders}),
        ("input 'users' is a DataFrame of Spark's or a stream", {**given, "users": 3}),
        ("multi_way 'no'", {**given, "multi_way": "no"}),
        ("emit 'at_end' of a stream keeps it until it ends", {**given, "emit": "at_end"}),
        ("bad_rows 'tag'", {**given, "orders": stream(orders.df, row_kind="op", bad_rows="tag")}),
    ]:
        with pytest.raises(gpu_ops.GpuJoinError, match=message):
            gpu_ops.sql(sql, **arguments)
    with pytest.raises(gpu_ops.DescriptionError, match="takes the text of a query"):
        gpu_ops.sql(3, **given)
    with pytest.warns(gpu_ops.MemoryOnlyStateWarning) as warned:
        gpu_ops.sql(sql, tables={"Orders": orders}, users=users)
    assert len(warned) == 1


@pytest.mark.thorough
def test_names_that_only_the_session_knows(spark: Any, tmp_path: Path) -> None:
    """A view or table of the session is no input: the error is about its name, where the query has it."""
    orders = inputs(sources(spark, tmp_path, ["orders"]))["orders"]
    seven = spark.range(7).selectExpr("id AS uid", "rand() AS r")
    seven.createOrReplaceTempView("only_here")
    seven.createOrReplaceGlobalTempView("everywhere")
    spark.sql("CREATE OR REPLACE TEMP VIEW of_view AS SELECT * FROM only_here ORDER BY r LIMIT 3")
    seven.write.option("path", str(tmp_path / "kept")).mode("overwrite").saveAsTable("kept")
    try:
        for name in (
            "only_here",
            "`Only_here`",
            "global_temp.everywhere",
            "of_view",
            "kept",
            "default.kept",
            "nowhere",
        ):
            for query in (
                "SELECT o.id FROM orders o JOIN\n  § u ON o.uid = u.uid",
                "SELECT id FROM orders WHERE uid NOT IN (\nSELECT uid FROM § WHERE uid > 3)",
                "WITH w AS (SELECT *\nFROM §) SELECT o.id FROM orders o JOIN w USING (uid)",
            ):
                with pytest.raises(gpu_ops.SqlError) as error:
                    gpu_ops.sql(query.replace("§", name), orders=orders)
                column = query.splitlines()[1].index("§") + 1
                assert re.search(rf"{name.replace('.', '`?.`?')}`? .*inputs(, which)? are orders", str(error.value))
                assert (error.value.line, error.value.column) == (2, column)
    finally:
        spark.sql("DROP TABLE kept")
        spark.catalog.dropGlobalTempView("everywhere")
        for view in ("only_here", "of_view"):
            spark.catalog.dropTempView(view)


@pytest.mark.thorough
def test_static_inputs(spark: Any, recwarn: pytest.WarningsRecorder) -> None:
    """A query over static DataFrames, one join or several, gives what Spark's own gives, as insertions, unwarned."""
    orders = spark.createDataFrame([(1, 7, 10.0), (2, 8, 20.0), (3, None, 5.0)], "id long, uid long, amount double")
    users = spark.createDataFrame([(7, "ann"), (9, "cy")], "uid long, name string")
    prices = spark.createDataFrame([(1, 3.0), (1, 4.0)], "id long, price double")
    given = {"orders": orders, "users": users, "prices": prices}
    query = """SELECT o.id, u.name, p.price + 1 AS more FROM orders o LEFT JOIN users u ON o.uid = u.uid
        LEFT JOIN prices p ON p.id = o.id WHERE o.amount > 5"""
    found = gpu_ops.sql(query, **given)
    assert not found.isStreaming
    rows = [tuple(row) for row in found.collect()]
    wanted = [
        ("+I", *row)
        for row in spark.sql(
            query.replace("orders o", "{orders} o").replace("users u", "{users} u").replace("prices p", "{prices} p"),
            **given,
        ).collect()
    ]
    assert Counter(rows) == Counter(wanted)
    assert not [w for w in recwarn if issubclass(w.category, gpu_ops.MemoryOnlyStateWarning)]


@pytest.mark.thorough
def test_static_tables_filtered_in_on_and_below(spark: Any) -> None:
    def when(minute: int) -> dt.datetime:
        return dt.datetime(2026, 1, 1, 8, minute)

    orders = spark.createDataFrame([(1, 1, when(1)), (2, 1, when(6))], "id int, k int, ts timestamp")
    changes = [("+I", 1, when(0), 20), ("+U", 1, when(5), 5), ("+I", 2, when(0), 30)]
    rates = spark.createDataFrame(changes, "op string, k int, ts timestamp, v int").coalesce(1)
    o = stream(orders, event_time="ts")
    r = stream(rates, event_time="ts", row_kind="op", unique_key="k")
    cases = {
        "LEFT JOIN r FOR SYSTEM_TIME AS OF o.ts ON o.k = r.k AND r.v > 10": [(1, 20), (2, None)],
        "JOIN r FOR SYSTEM_TIME AS OF o.ts ON o.k = r.k AND r.v > 10": [(1, 20)],
        "LEFT JOIN r FOR SYSTEM_TIME AS OF PROCTIME() ON o.k = r.k AND r.v > 10": [(1, None), (2, None)],
        "ASOF LEFT JOIN r ON o.k = r.k AND o.ts >= r.ts AND o.id = 2": [(1, None), (2, 5)],
        "FULL JOIN (SELECT * FROM r WHERE v > 10) r ON o.k = r.k": [(1, None), (2, None), (None, 30)],
    }
    found = {}
    for number, joined in enumerate(cases):
        rows = gpu_ops.sql(f"SELECT {number} AS n, o.id, r.v FROM o {joined}", o=o, r=r)
        found[joined] = sorted((tuple(row)[2:] for row in rows.collect()), key=repr)
    assert found == {joined: sorted(rows, key=repr) for joined, rows in cases.items()}
    grouped = gpu_ops.sql("SELECT v > 10 AS high, count(*) AS n FROM r WHERE v <> 30 GROUP BY v > 10", r=r)
    assert [tuple(row) for row in grouped.collect()] == [("+I", False, 1)]
