"""Conditions in ON and filters below: each kind of join against its definition, written out in DuckDB's SQL."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections import Counter

import duckdb
import pyarrow as pa
import pytest
import sqlglot
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.drive import canonical, difference

from gpu_ops.query.relations import Table
from sql.run_plan import PlanRunner, Reference, batch
from sql.tables import LONG, TIME, planned
from sql.test_random import VALUES, terms

pytestmark = pytest.mark.thorough

FEWER = settings(max_examples=settings().max_examples // 3)
RIGHT = pa.schema([("id", LONG), ("k", LONG), ("v", LONG), ("ts", TIME)])
RIGHTS = {
    "insert-only": Table("r", RIGHT, event_times=("ts",)),
    "row kinds": Table("r", RIGHT, row_kind="op", event_times=("ts",)),
    "retractions": Table("r", RIGHT, row_kind="op", unique_key=("k",), updates="retract", event_times=("ts",)),
    "upserts": Table("r", RIGHT, row_kind="op", unique_key=("k",), event_times=("ts",)),
    "upserts by id": Table("r", RIGHT, row_kind="op", unique_key=("id",), event_times=("ts",)),
}
LEFTS = {
    "insert-only": Table("o", pa.schema([("id", LONG), ("k", LONG), ("a", LONG), ("ts", TIME)]), event_times=("ts",)),
}
LEFTS["upserts"] = Table("o", LEFTS["insert-only"].schema, row_kind="op", unique_key=("id",), event_times=("ts",))
SCOPE = {"o": ["id", "k", "a"], "r": ["id", "k", "v"]}


def at(minute):
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(minutes=minute)


@st.composite
def histories(draw, tables):
    """Micro-batches of changes that fit the tables; the times of one key's rows differ, so that one is the nearest."""
    live, used, batches = {name: [] for name in tables}, {name: set() for name in tables}, []
    for _ in range(draw(st.integers(1, 3))):
        found = {name: [] for name in tables}
        for _ in range(draw(st.integers(1, 8))):
            name = draw(st.sampled_from(sorted(tables)))
            table, rows, made = tables[name], live[name], found[name]
            if rows and table.row_kind and draw(st.integers(0, 3)) == 0:
                row = draw(st.sampled_from(rows))
                rows.remove(row)
                made.append(("-D", row))
                continue
            unique = table.unique_key or ()
            row = tuple(draw(st.integers(0, 2) if c in (*unique, "id") else VALUES) for c in table.schema.names[:-1])
            minute = draw(st.sampled_from([m for m in range(31) if (row[1], m) not in used[name]]))
            row = (*row, at(minute))
            used[name].add((row[1], minute))
            places = [table.schema.names.index(c) for c in unique]
            for old in [old for old in rows if places and all(old[p] == row[p] for p in places)]:
                rows.remove(old)
                if not table.upserts:
                    made.append(("-U", old))
            rows.append(row)
            made.append(("+U" if places else "+I", row))
        batches.append(found)
    return batches


@st.composite
def conditions(draw, sides):
    """ON: the key, and up to three more, each over one of some sides, or over both."""
    found = [draw(st.sampled_from(["o.k = r.k", "o.k = r.k", "r.k = o.k", "o.k <=> r.k"]))]
    found += [draw(terms(SCOPE, draw(st.sampled_from(sides)))) for _ in range(draw(st.integers(0, 3)))]
    if draw(st.integers(0, 9)) == 0:
        found.append(draw(st.sampled_from(["1 = 0", "CAST(NULL AS BOOLEAN)", "1 = 1"])))
    return " AND ".join(found)


def duck(sql, **tables):
    with contextlib.closing(duckdb.connect(":memory:", config={"threads": "1"})) as db:
        for name, table in tables.items():
            db.register(name, table)
        rows = db.execute(sqlglot.transpile(sql, read="spark", write="duckdb")[0]).fetchall()
    return Counter(tuple(map(canonical, row)) for row in rows)


def said(sql, tables, history):
    """What the plan gives, all micro-batches together."""
    with contextlib.closing(PlanRunner(planned(sql, tables={t.name: t for t in tables.values()}))) as runner:
        for changes in history:
            runner.process(tables, changes)
        runner.finish()
        return +runner.folded


HOWS = st.sampled_from(["", "LEFT"])
SHOWN = "o.id AS o_id, o.k AS o_k, o.a AS a, r.id AS r_id, r.k AS r_k, r.v AS v"
WHERES = st.sampled_from(["", " WHERE o.a > 0", " WHERE r.v > 0", " WHERE r.v IS NULL OR r.v <> o.a"])


def all_of(table, history, name):
    """All changes, with their number."""
    rows = [change for changes in history for change in changes[name]]
    made = batch(Table(name, table.schema, row_kind="op"), rows)
    return made.append_column("n", pa.array(range(len(rows)), LONG))


@given(st.data(), HOWS, WHERES, st.sampled_from([x for x in RIGHTS if x != "upserts by id"]), st.booleans())
@FEWER
def test_temporal(data, how, where, kind, inside):
    tables = {"o": LEFTS["insert-only"], "r": RIGHTS[kind]}
    history = data.draw(histories(tables))
    on = data.draw(conditions([None, "o", "r", "r"])).replace("<=>", "=")  # a version has its key
    # a filter on insertions leaves rows of the history out; on a changelog it is of the table that this makes
    below = data.draw(terms({"r": SCOPE["r"]}, "r")) if inside else "true"
    history_of = f"op <> '-U' AND {below if kind == 'insert-only' else 'true'}"
    versions = (
        "SELECT * FROM (SELECT *, lead(ts) OVER (PARTITION BY k ORDER BY ts, n) AS until FROM r_all r "
        f"WHERE {history_of}) r WHERE op <> '-D' AND {below}"
    )
    ours = f"{how} JOIN w FOR SYSTEM_TIME AS OF o.ts AS r ON {on}"
    sql = f"WITH w AS (SELECT * FROM r WHERE {below}) SELECT {SHOWN} FROM o {ours}{where}"
    time = "o.ts >= r.ts AND (r.until IS NULL OR o.ts < r.until)"
    want = duck(
        f"SELECT {SHOWN} FROM o {how} JOIN ({versions}) r ON {time} AND {on}{where}",
        o=all_of(tables["o"], history, "o"),
        r_all=all_of(tables["r"], history, "r"),
    )
    assert not difference(want, said(sql, tables, history)), sql


@given(st.data(), HOWS, WHERES, st.sampled_from(sorted(RIGHTS)), st.booleans())
@FEWER
def test_lookup(data, how, where, kind, inside):
    tables = {"o": LEFTS["insert-only"], "r": RIGHTS[kind]}
    history, on = data.draw(histories(tables)), data.draw(conditions([None, "o", "r"]))
    below = data.draw(terms({"r": SCOPE["r"]}, "r")) if inside else "true"
    sql = (
        f"WITH w AS (SELECT * FROM r WHERE {below}) SELECT {SHOWN} FROM o "
        f"{how} JOIN w FOR SYSTEM_TIME AS OF PROCTIME() AS r ON {on}{where}"
    )
    table, want = Reference("SELECT 1", {"r": tables["r"]}), Counter()
    for changes in history:
        table.apply({"r": changes["r"]})
        now = batch(Table("r", RIGHT), [("+I", row) for row in table.inputs["r"].rows()])
        theirs = f"SELECT {SHOWN} FROM o {how} JOIN (SELECT * FROM r WHERE {below}) r ON {on}{where}"
        want += duck(theirs, o=batch(tables["o"], changes["o"]), r=now)
    table.close()
    assert not difference(want, said(sql, tables, history)), sql


@given(st.data(), HOWS, WHERES, st.sampled_from(sorted(RIGHTS)), st.booleans())
@FEWER
def test_asof(data, how, where, kind, inside):
    tables = {"o": LEFTS[data.draw(st.sampled_from(sorted(LEFTS)))], "r": RIGHTS[kind]}
    history, on = data.draw(histories(tables)), data.draw(conditions(["o", "r"])).replace("<=>", "=")
    below = data.draw(terms({"r": SCOPE["r"]}, "r")) if inside else "true"
    sql = (
        f"SELECT {SHOWN} FROM o ASOF {how} JOIN (SELECT * FROM r WHERE {below}) r "
        f"MATCH_CONDITION (o.ts >= r.ts) ON {on}{where}"
    )
    folded = Reference("SELECT 1", tables)
    for changes in history:
        folded.apply(changes)
    live = {
        name: batch(Table(name, t.schema), [("+I", row) for row in folded.inputs[name].rows()])
        for name, t in tables.items()
    }
    folded.close()
    theirs = (
        f"WITH o AS (SELECT *, row_number() OVER () AS n FROM o_), c AS (SELECT o.n AS m, r.*, row_number() OVER "
        f"(PARTITION BY o.n ORDER BY r.ts DESC) AS place FROM o JOIN (SELECT * FROM r_ r WHERE {below}) r "
        f"ON o.ts >= r.ts AND {on}) SELECT {SHOWN} FROM o {how} JOIN c r ON o.n = r.m AND r.place = 1{where}"
    )
    assert not difference(duck(theirs, o_=live["o"], r_=live["r"]), said(sql, tables, history)), sql


@given(st.data(), st.sampled_from(["", "LEFT", "RIGHT", "FULL", "LEFT SEMI", "LEFT ANTI"]), WHERES, st.booleans())
@FEWER
def test_interval(data, how, where, inside):
    tables = {"o": LEFTS["insert-only"], "r": RIGHTS["insert-only"]}
    history, on = data.draw(histories(tables)), data.draw(conditions([None, "o", "r"]))
    below = data.draw(terms({"r": SCOPE["r"]}, "r")) if inside else "true"
    semi = "SEMI" in how or "ANTI" in how
    sql = (
        f"SELECT {SHOWN.partition(', r.')[0] if semi else SHOWN} FROM o {how} JOIN (SELECT * FROM r WHERE {below}) r "
        f"ON {on} AND r.ts BETWEEN o.ts - INTERVAL 5 MINUTES AND o.ts + INTERVAL 2 MINUTES{'' if semi else where}"
    )
    want = duck(sql, **{name: all_of(t, history, name) for name, t in tables.items()})
    assert not difference(want, said(sql, tables, history)), sql


@st.composite
def groups(draw):
    """An aggregate, a top-N, DISTINCT, or a full join over a filtered input, with columns computed between."""
    one = {"r": SCOPE["r"]}
    inner = draw(st.sampled_from(["", f" WHERE {draw(terms(one, 'r'))}"]))
    source = f"(SELECT id, k, {draw(st.sampled_from(['v', 'v + 1', 'COALESCE(v, k)']))} AS v FROM r{inner}) r"
    rows = f"{source} WHERE {draw(terms(one, 'r'))}"
    by = draw(st.sampled_from(["k", "v", "id", "k + v"]))
    return draw(
        st.sampled_from(
            [
                f"SELECT {by} AS g, count(*) AS n, sum(v) AS s, max(id) AS m FROM {rows} GROUP BY {by}",
                f"SELECT {by} AS g, count(v) AS n FROM {rows} GROUP BY {by} HAVING count(*) > 1",
                f"SELECT count(*) AS n, min(v) AS s FROM {rows} HAVING count(*) > 0",
                f"SELECT DISTINCT k, v FROM {rows}",
                (
                    f"SELECT id, k, v, n FROM (SELECT *, row_number() OVER (PARTITION BY {by} ORDER BY v DESC NULLS "
                    f"LAST, k NULLS FIRST, id) AS n FROM {rows}) WHERE n <= 2"
                ),
                f"SELECT id, k, v FROM {rows} ORDER BY v NULLS FIRST, k DESC NULLS LAST, id LIMIT 2",
                f"SELECT o.id AS o_id, q.id, q.v FROM o FULL JOIN (SELECT * FROM {rows}) q ON o.k = q.k AND o.a < q.v",
                (
                    f"SELECT a.id, b.n FROM (SELECT * FROM {rows}) a FULL JOIN (SELECT k, count(*) AS n FROM {rows} "
                    "GROUP BY k) b ON a.k = b.k"
                ),
            ]
        )
    )


@given(st.data(), groups(), st.sampled_from(["upserts", "upserts by id"]), st.sampled_from(["per_batch", "per_event"]))
@FEWER
def test_groups_and_full_joins_over_filtered_upserts(data, sql, kind, emit):
    tables = {"r": RIGHTS[kind], **({"o": LEFTS["upserts"]} if " o " in sql else {})}
    history = data.draw(histories(tables))
    made = planned(sql, tables=tables, emit=emit)
    with contextlib.closing(PlanRunner(made)) as runner, contextlib.closing(Reference(sql, tables)) as reference:
        for changes in history:
            runner.process(tables, changes)
            reference.apply(changes)
            assert not difference(reference.rows(), +runner.folded), sql
