"""Descriptions as JSON: what state folders of earlier versions hold is read, and the same text is written."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from kernels.own_functions import Bits

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.description import Description, as_written
from gpu_ops.descriptions.groups import Latest, Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import CoGroup, Join, LookupJoin
from gpu_ops.descriptions.keys import Equality, Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import JoinStep, MultiJoin
from gpu_ops.errors import DescriptionError
from gpu_ops.fields import decoded, encoded
from gpu_ops.query.relations import Table
from gpu_ops.spark.plan.stored_query import OF_TABLE

GOLDEN: Final = Path(__file__).with_name("descriptions.json")
"""Written by the version of 26 Nov 2026, before there was one codec for all of them; never written anew."""

TIME: Final = pa.timestamp("us", "UTC")
SCHEMA: Final = pa.schema([("k", pa.int64()), ("g", pa.string()), ("x", pa.float64()), ("t", TIME)])
A, B, C = (Input(name, SCHEMA) for name in "abc")
KEYED: Final = Input("keyed", SCHEMA, ("k",), "op", "t", 60_000, "upsert", "drop")
RETRACTING: Final = Input("r", SCHEMA, ("k", "g"), "op", updates="retract", bad_rows="tag")
NULL_SAFE: Final = (Key("k", "k", null_safe=True), Key("g", "g", using=True))
EARLY: Final = Input("early", SCHEMA, event_time="t", delay_ms=5000, idle_timeout_ms=60_000)
AT: Final = Input("at", SCHEMA, event_time="t")
VERSIONS: Final = Input("versions", SCHEMA, ("k",), "op", event_time="t", delay_ms=0)
K: Final = (Key("k", "k"),)
NAMED: Final = {"suffixes": ("_l", "_r")}
UNAVAILABLE: Final = Input("u", SCHEMA.append(pa.field("lost", pa.list_(pa.string()))), ("k",), "op")

DESCRIPTIONS: Final[dict[str, Description]] = {
    "inner join": Join("inner", A, B, K, **NAMED),
    "cross join": Join("inner", A, B, **NAMED),
    "left join, all options": Join("left", KEYED, RETRACTING, NULL_SAFE, "keyed.x > r.x", "per_event", **NAMED),
    "right join at the end": Join("right", A, B, K, emit="at_end", **NAMED),
    "full join": Join("full", KEYED, B, (Key("k", "k", using=True),), **NAMED),
    "ansi that matters": Join("inner", A, B, K, "a.k + b.k > 0", ansi=True, **NAMED),
    "ansi that does not": Join("inner", A, B, K, "a.k > b.k", ansi=True, **NAMED),
    "semi join": Join("semi", A, B, K, "a.x < b.x"),
    "not in": Join("anti", A, B, K, null_aware=True),
    "interval join": IntervalJoin("inner", EARLY, AT, K, interval=Interval(-1000, 1000), **NAMED),
    "interval join, all options": IntervalJoin(
        "full",
        EARLY,
        AT,
        K,
        "early.x <> at.x",
        "per_event",
        interval=Interval(-60_000, 0, False, True, "event", "join", False, 5000, "later"),
        **NAMED,
    ),
    "keyed interval join": IntervalJoin(
        "inner", EARLY, AT, K, interval=Interval(0, 10, late="tag", keyed=True), **NAMED
    ),
    "interval join by processing time": IntervalJoin(
        "left", A, B, K, interval=Interval(0, 10, time="processing"), **NAMED
    ),
    "interval semi join": IntervalJoin("semi", EARLY, AT, K, emit="at_end", interval=Interval(0, 10)),
    "asof join": AsofJoin("left", EARLY, VERSIONS, K, asof=Asof(), **NAMED),
    "asof join, all options": AsofJoin(
        "inner", EARLY, AT, K, emit="at_watermark", asof=Asof("nearest", 500, False), **NAMED
    ),
    "temporal join": TemporalJoin("inner", EARLY, VERSIONS, K, **NAMED),
    "temporal join, all options": TemporalJoin("left", AT, VERSIONS, K, "at.x > 0", late="tag", ttl_ms=90_000, **NAMED),
    "lookup join": LookupJoin("left", A, KEYED, K, "a.x > keyed.x", **NAMED),
    "multi join": MultiJoin.of([A, B, C], "k", suffixes=["", "_b", "_c"]),
    "multi join, all options": MultiJoin(
        (A, RETRACTING, KEYED),
        (
            JoinStep("inner", (Equality(0, "k", "k"),), "a.x > r.x"),
            JoinStep("left", (Equality(0, "k", "k", using=True), Equality(1, "g", "g", True))),
        ),
        "per_event",
        ("_a", "_r", "_k"),
    ),
    "multi join turned round": MultiJoin.of(
        [A, B, C],
        [("a.k", "k"), ("b.k", "k")],
        ["right", "inner"],
        suffixes=["", "_b", "_c"],
        where=[None, "a.k + c.k > 0"],
        ansi=True,
    ),
    "co-group": CoGroup(A, KEYED_AT_END := Input("keyed", SCHEMA, ("k",), "op"), (Key("k", "k", null_safe=True),)),
    "aggregate at the end": Aggregate.of(A, ("g",), {"n": "count(*)", "total": "sum(x)", "d": "count(distinct k)"}),
    "aggregate, live": Aggregate.of(
        KEYED, ("g", "k"), {"a": "avg(x)", "low": "min(k)", "first": "first(x)"}, "per_batch"
    ),
    "aggregate of its own": Aggregate.of(A, ("g",), {"bits": Bits("k", width=8), "n": "count(x)"}, "per_event"),
    "aggregate of windows": Aggregate.of(EARLY, ("t",), {"n": "count(*)"}, "at_watermark", "t", late="tag"),
    "aggregate that is always there": Aggregate(
        A, (), Aggregate.of(A, (), {"n": "count(*)"}).measures, "per_batch", always=True
    ),
    "distinct": Aggregate(A, ("g", "k"), (), "per_batch"),
    "top": Top(KEYED_AT_END, ("g",), parse_order("x DESC, k"), 3),
    "top, all options": Top(A, (), parse_order(["x ASC NULLS LAST", "t DESC NULLS FIRST"]), 10, "per_event", "number"),
    "latest": Latest(KEYED),
    "latest by a column": Latest(Input("l", SCHEMA, ("k",)), "per_event", "t"),
    "first": Latest(Input("l", SCHEMA, ("k",)), keep="first"),
    "latest of parts": Latest(UNAVAILABLE, unavailable="lost"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_the_same_json_as_ever(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    described = DESCRIPTIONS[name]
    assert json.loads(described.to_json()) == golden
    assert described.to_json() == json.dumps(golden, sort_keys=True)
    found = from_json(json.dumps(golden))
    assert found.to_json() == described.to_json()
    if "does not" not in name:  # of which the mode is not written
        assert found == described
        assert type(found) is type(described)


def test_every_golden_description_is_tried() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(DESCRIPTIONS)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "join"}', '{"kind": "nothing"}', '{"kind": ["join"]}', "[" * 9999]
)
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(DescriptionError, match="this is no description of a join"):
        from_json(text)


def test_two_columns_called_as_row_kinds_ask_for_row_kind_first() -> None:
    left, right = (pa.schema([(key, pa.int64()), ("op", pa.string())]) for key in ("a", "b"))
    with pytest.raises(DescriptionError, match=r"is it the kind of a change.* row_kind='op' of l and r; else rename"):
        Join("inner", Input("l", left), Input("r", right), (Key("a", "b"),))
    with pytest.raises(DescriptionError, match="two columns 'op': rename one"):
        Join("inner", Input("l", left), Input("r", right.set(1, pa.field("op", pa.int64()))), (Key("a", "b"),))


def test_a_table_of_a_query_is_written_as_ever() -> None:
    """`gpu_ops.finish` compares a state folder's file with the query's tables."""
    table = Table("t", SCHEMA, ("k",), "op", "t", 60_000, "retract", "drop", "t", 5, event_times=("t",), grows=True)
    written = {name: encoded(getattr(table, name)) for name in OF_TABLE}
    assert written == {
        "name": "t", "row_kind": "op", "unique_key": ["k"], "updates": "retract", "event_times": ["t"],
        "sequence_by": "t", "ttl_ms": 60_000, "grows": True,
        "schema": base64.b64encode(SCHEMA.serialize()).decode(),
    }  # fmt: skip
    found = decoded(Table, written)
    assert {name: encoded(getattr(found, name)) for name in OF_TABLE} == written
    assert found.schema == table.schema


def test_columns_are_shown_as_a_query_writes_them() -> None:
    """`gpu_ops.sql` calls a column ``o__item`` where two tables have it; nobody wrote that."""
    for text, shown in (
        ("where=[o_p.o__item = p.p__item AND p.x > o_p.q]", "where=[o.item = p.item AND p.x > o_p.q]"),
        ("select=[o__id AS id, item AS o__item]", "select=[o.id AS id, o.item]"),
        ("select=[`user` AS p__user, `a b` AS `p__a b`]", "select=[p.`user`, p.`a b`]"),
        ("x__item, so__item, __item, o_p, 'o__'", "x__item, so__item, __item, o_p, 'o__'"),
    ):
        assert as_written(text, ["o_p", "p"]) == shown
    assert as_written("o__item", []) == "o__item"
