"""Descriptions as state folders of version 0.x have them are read as what they were written from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pytest

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.groups import Latest, Order, Top
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import CoGroup, Join, LookupJoin
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.errors import DescriptionError, StateError
from gpu_ops.state.manifest import Manifest

STORED = json.loads(Path(__file__).with_name("stored_descriptions.json").read_text())
"""By name what `Description.to_json` gave when conditions of joins were stored as text alone. Never written anew."""

UTC = pa.timestamp("us", "UTC")
ROWS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False), ("k", pa.int32()), ("g", pa.string()), ("x", pa.float64()),
        ("amount", pa.decimal128(10, 2)), ("at", UTC), ("day", pa.date32()), ("ntz", pa.timestamp("us")),
        ("n", pa.int64()), ("part of", pa.int16()),
    ]
)  # fmt: skip
TIMED = pa.schema([("id", pa.int64()), ("k", pa.int32()), ("at", UTC), ("x", pa.float64())])
ON = (Key("k", "k", using=True),)
BOTH = ("_l", "_r")
LEFT, RIGHT = Input("left", ROWS), Input("right", ROWS)
KEYED = Input("orders", ROWS, ("id",), "op", "n", 60_000, "upsert", "drop")
TAGGED = Input("prices", ROWS, ("id", "k"), "op", None, None, "retract", "tag")
FIRST, SECOND = Input("l", TIMED, event_time="at", delay_ms=5000), Input("r", TIMED, event_time="at")
IDLE = Input("l", TIMED, event_time="at", delay_ms=0, idle_timeout_ms=60_000, bad_rows="drop")
THREE = tuple(Input(name, TIMED) for name in "abc")
WITHOUT_TIME = tuple(Input(name, pa.schema([("k", pa.int32()), (f"x_{name}", pa.float64())])) for name in "abc")

CONDITIONS = {
    "compared": "left.x > right.x AND left.id <> right.id OR left.`part of` <=> right.`part of`",
    "between": "left.at BETWEEN right.at AND timestamp '2020-01-02 03:04:05.678Z' AND left.day < date '2020-02-29'",
    "in": "left.id IN (1, 2, 30000000000, right.id) OR left.g NOT IN ('it''s', 'é', NULL)",
    "case": "CASE WHEN left.x > 1.5 THEN left.amount + right.amount ELSE 0.25 END < right.amount * 2",
    "cast": "CAST(left.k AS BIGINT) % 3 = right.id AND COALESCE(left.x, 1e3) / 2 >= -right.x",
    "null": "left.g IS NULL AND NOT right.g IS NOT NULL OR left.ntz = timestamp_ntz '1969-12-31 23:59:59'",
}


def joins() -> dict[str, Description]:
    """One of each kind, and of each option that one can have."""
    found: dict[str, Description] = {
        f"where {name}": Join("left", LEFT, RIGHT, ON, where, suffixes=BOTH) for name, where in CONDITIONS.items()
    }
    found |= {f"how {how}": Join(how, LEFT, RIGHT, ON, suffixes=BOTH) for how in ("inner", "right", "full", "semi")}
    return found | {
        "ansi": Join("inner", LEFT, RIGHT, ON, "left.k + right.k > 0", suffixes=BOTH, ansi=True),
        "ansi without effect": Join("inner", LEFT, RIGHT, ON, "left.k > right.k", suffixes=BOTH, ansi=True),
        "no key": Join("inner", LEFT, RIGHT, (), "left.id < right.id", suffixes=BOTH),
        "null-aware": Join("anti", LEFT, RIGHT, (Key("id", "k"),), null_aware=True),
        "inputs": Join("inner", KEYED, TAGGED, (Key("id", "id", null_safe=True), *ON), emit="per_event", suffixes=BOTH),
        "at the end": Join("full", LEFT, RIGHT, ON, "left.x = right.x", emit="at_end", suffixes=BOTH),
        "computed": Join(
            "left", LEFT, RIGHT, ON, "left.`part of` < right.n AND (left.g = 'a' OR (right.k * 2) = 7)", suffixes=BOTH
        ),
        "interval": IntervalJoin(
            "left", FIRST, SECOND, ON, "l.x < r.x", suffixes=BOTH,
            interval=Interval(-1000, 2000, upper_inclusive=False, min_cleanup_ms=9)
        ),
        "interval of the clock": IntervalJoin(
            "inner", Input("l", TIMED), Input("r", TIMED), ON, suffixes=BOTH,
            interval=Interval(0, 0, time="processing"),
        ),
        "asof": AsofJoin("left", FIRST, SECOND, ON, suffixes=BOTH, asof=Asof("forward", 5000, exact=False)),
        "temporal": TemporalJoin("left", FIRST, SECOND, ON, "l.x < r.x", suffixes=BOTH, late="tag"),
        "lookup": LookupJoin("inner", LEFT, Input("table", TIMED, ("k",)), ON, "left.x < `table`.x", suffixes=BOTH),
        "multi": MultiJoin.of(WITHOUT_TIME, "k", ["inner", "left"], where=["a.x_a < b.x_b", "c.x_c > a.x_a + b.x_b"]),
        "multi turned": MultiJoin.of(
            THREE, [("a.k", "k"), [("b.k", "k")]], ["right", "left"], emit="per_event", suffixes=["_a", "_b", "_c"]
        ),
        "aggregate": Aggregate.of(TAGGED, ("k",), {"s": "sum(x)", "c": "count(*)", "d": "count(distinct g)"}),
        "aggregate at watermark": Aggregate.of(IDLE, ("at",), {"m": "max(x)"}, "at_watermark", late="tag"),
        "latest": Latest(KEYED),
        "top": Top(LEFT, ("k",), (Order("x", descending=True), Order("id")), 3, number="rank"),
        "co-group": CoGroup(LEFT, RIGHT, ON),
    }  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_a_stored_description_is_read(name: str) -> None:
    described = joins()[name]
    read = from_json(json.dumps(STORED[name]))
    assert read.to_json() == described.to_json()
    assert read.output_schema == described.output_schema
    assert [x and x.root for x in read.conditions] == [x and x.root for x in described.conditions]
    assert [x and x.fails for x in read.conditions] == [x and x.fails for x in described.conditions]


def test_all_are_stored() -> None:
    assert joins().keys() == STORED.keys()


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_now_is_read(name: str) -> None:
    text = joins()[name].to_json()
    read = from_json(text)
    assert read.to_json() == text
    assert [x and (x.root, x.fails, x.columns) for x in read.conditions] == [
        x and (x.root, x.fails, x.columns) for x in joins()[name].conditions
    ]


@pytest.mark.parametrize("name", [*(f"where {name}" for name in CONDITIONS), "ansi", "computed", "multi"])
def test_a_folder_whose_condition_is_text_is_taken_over(name: str) -> None:
    stored, now = (Manifest(x, 1, "q") for x in (json.dumps(STORED[name]), joins()[name].to_json()))
    now.check(stored, "here")
    stored.check(now, "here")


def test_what_a_condition_means_makes_the_folder_not_how_it_is_written() -> None:
    def manifest(where: str) -> Manifest:
        return Manifest(Join("left", LEFT, RIGHT, ON, where, suffixes=BOTH).to_json(), 1, "q")

    stored = manifest("left.x > right.x AND left.id IN (right.id)")
    manifest("`right`.x<LEFT.x and left.id = right.id").check(stored, "here")
    with pytest.raises(StateError, match=r"it had where='left.x > right.x AND .*', now 'left.x > right.x'"):
        manifest("left.x > right.x").check(stored, "here")


def test_a_condition_of_no_column_there_is_is_refused() -> None:
    join = Join("left", LEFT, RIGHT, ON, "left.x > right.x", suffixes=BOTH)
    fewer = Input("right", TIMED.remove(3))
    with pytest.raises(DescriptionError, match=r"needs right\.x of type double"):
        dataclasses.replace(join, right=fewer)
