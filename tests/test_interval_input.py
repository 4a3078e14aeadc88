"""Interval joins: what cannot be described, what cannot be joined, and that neither changes anything."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kernels.support import TYPES, everything, plain_rows

from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.times import parse_bound, show_ms
from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.join_engine import JoinEngine

US, NS = pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC")
LEFT = pa.schema([("k", pa.int64()), ("lt", US), ("a", pa.string())])
RIGHT = pa.schema([("rk", pa.int64()), ("rt", US)])


def described(interval: dict[str, Any] | None = None, left: dict[str, Any] | None = None, **options: Any) -> Join:
    told = {"schema": LEFT, "event_time": "lt", "row_kind": "op"} | (left or {})
    how = options.pop("how", "full")
    return IntervalJoin(
        how,
        Input("orders", **told),
        Input("ships", RIGHT, event_time="rt"),
        (Key("k", "rk"),),
        interval=Interval(**({"lower_ms": -5000, "upper_ms": 5000} | (interval or {}))),
        **options,
    )


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("-5 minutes", -300_000), ("4 hours", 14_400_000), ("+ 1 day", 86_400_000), ("1.5 seconds", 1500),
        ("0 seconds", 0), (-7, -7), (dt.timedelta(seconds=-2), -2000), ("10 MILLISECONDS", 10),
    ],
)  # fmt: skip
def test_bounds(text: Any, ms: int) -> None:
    assert parse_bound(text) == ms
    assert parse_bound(show_ms(ms) if ms else 0) == ms


NOT_DESCRIBED: dict[str, tuple[Callable[[], object], str]] = {
    "no unit": (lambda: parse_bound("5"), "no duration: '5'"),
    "unknown unit": (lambda: parse_bound("5 fortnights"), "no duration"),
    "half a millisecond": (lambda: parse_bound("0.5 milliseconds"), "no whole number of milliseconds"),
    "microseconds": (lambda: parse_bound(dt.timedelta(microseconds=1)), "no whole number of milliseconds"),
    "a float": (lambda: parse_bound(1.5), "no duration: 1.5"),  # type: ignore[arg-type]
    "a truth": (lambda: parse_bound(True), "no duration: True"),
    "lower above upper": (lambda: Interval(2, 1), "the interval is empty: lower is 2 ms, upper 1 ms"),
    "a point left out": (lambda: Interval(3, 3, upper_inclusive=False), "a bound is exclusive"),
    "late spelled wrong": (lambda: described({"late": "never"}), "late='never'; it is one of join, drop, tag"),
    "time spelled wrong": (lambda: described({"time": "rows"}), "time='rows'; it is one of event, processing"),
    "keyed and late rows join": (lambda: described({"keyed": True}, how="inner"), "its late rows never join"),
    "keyed left": (lambda: described({"keyed": True, "late": "drop"}, how="left"), "how='left'; a keyed interval join"),
    "NOT IN": (lambda: described(how="anti", null_aware=True), "is NOT IN, which has no bounds in time"),
    "clean-up below zero": (lambda: described({"min_cleanup_ms": -1}), "min_cleanup is not negative"),
    "clean-up of dropped rows": (lambda: described({"min_cleanup_ms": 1, "late": "drop"}), "late='join'"),
    "processing time, tagged": (lambda: described({"time": "processing", "late": "tag"}), "no row is late"),
    "processing and event time": (lambda: described({"time": "processing"}), "input 'orders': by processing time"),
    "no event time": (lambda: described(left={"event_time": None}), "input 'orders': an interval join needs its event"),
    "no such column": (lambda: described(left={"event_time": "when"}), "event_time names 'when'"),
    "event time a string": (lambda: described(left={"event_time": "a"}), "event time 'a' is string"),
    "a unique key": (lambda: described(left={"unique_key": ("k",)}), "insert-only input"),
    "a TTL": (lambda: described(left={"ttl_ms": 1}), "ttl= has no place"),
    "delay below zero": (lambda: described(left={"delay_ms": -1}), "delay is not negative"),
    "delay without a time": (lambda: Input("x", LEFT, delay_ms=1), "delay needs event_time"),
    "zoned and not": (
        lambda: described(left={"schema": LEFT.set(1, pa.field("lt", pa.timestamp("us")))}),
        "one event time has a time zone",
    ),
    "centuries of nanoseconds": (
        lambda: described({"upper_ms": 10**13}, left={"schema": LEFT.set(1, pa.field("lt", NS))}),
        "too far apart",
    ),
    "output column twice": (lambda: described({"timestamp": "a"}), "two columns 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_DESCRIBED)
def test_what_cannot_be_described(case: str) -> None:
    make, message = NOT_DESCRIBED[case]
    with pytest.raises(DescriptionError) as error:
        make()
    assert message in str(error.value)


def left_rows(*times: Any, op: str = "+I", kind: pa.DataType = US) -> pa.Table:
    return pa.table(
        {
            "k": pa.array(range(len(times)), pa.int64()),
            "lt": pa.array(times, kind),
            "a": pa.array(["x"] * len(times), pa.string()),
            "op": pa.array([op] * len(times), pa.string()),
        }
    )


NOT_JOINED: dict[str, tuple[pa.Table, tuple[str, ...]]] = {
    "null event time": (left_rows(1, None), ("orders", "lt", "null")),
    "a deletion": (left_rows(1, op="-D"), ("orders", "op", "-D", "insertions only")),
    "unknown row kind": (left_rows(1, op="?"), ("orders", "op", "?")),
    "event time of another type": (left_rows(1, kind=pa.int64()), ("orders", "lt", "int64")),
    "event time beyond all ages": (left_rows(1, (1 << 63) - 1), ("orders", "lt", str((1 << 63) - 1))),
    "no event time": (left_rows(1).drop_columns(["lt"]), ("orders", "lt", "missing")),
}


@pytest.mark.parametrize("case", NOT_JOINED)
def test_bad_input_names_the_column_and_changes_nothing(case: str) -> None:
    batch, parts = NOT_JOINED[case]
    engine = JoinEngine(described(), "cpu")
    engine.process(left_rows(1_000_000, 2_000_000), watermark=1000)
    before = engine.snapshot()
    with pytest.raises(BadInputError) as error:
        engine.process(batch, watermark=10**6)
    assert all(part in str(error.value) for part in parts), error.value
    assert engine.snapshot() == before
    engine.process(left_rows(3_000_000), watermark=1000)


@pytest.mark.parametrize("bad_rows", ["drop", "tag"])
def test_rows_without_a_time_may_be_left_out(bad_rows: str) -> None:
    engine = JoinEngine(described({"timestamp": "ts"}, left={"bad_rows": bad_rows}), "cpu")
    result = engine.prepare(left_rows(None, 1_000_000))
    engine.commit()
    assert result.metrics["left_bad_rows"] == 1
    assert result.changelog["row_kind"].to_pylist() == (["bad"] if bad_rows == "tag" else [])
    assert result.changelog["ts"].null_count == result.changelog.num_rows
    assert engine.state_size()["left_rows"] == 1


def test_event_times_in_nanoseconds_after_2006() -> None:
    """What pandas long made of any time; to the nanosecond."""
    at = np.array(["2026-11-22T08:00:00.000000001", "2026-11-22T08:00:01"], "datetime64[ns]")
    left = pa.table({"k": [1, 1], "lt": at})
    right = pa.table({"rk": [1, 1, 1], "rt": at[:1] + np.array([-2_000_000, 2_000_000, 2_000_001])})
    inputs = Input("l", left.schema, event_time="lt", delay_ms=0), Input("r", right.schema, event_time="rt", delay_ms=0)
    engine = JoinEngine(IntervalJoin("full", *inputs, (Key("k", "rk"),), interval=Interval(-2, 2)), "cpu")
    said = pa.concat_tables([engine.process(left, right), engine.finish()]).drop_columns(["row_kind", "k", "rk"])
    stamps = [tuple(row.values()) for row in said.cast(pa.schema([("lt", pa.int64()), ("rt", pa.int64())])).to_pylist()]
    first, second = at.astype(np.int64).tolist()
    near, edge, beyond = right["rt"].cast(pa.int64()).to_pylist()
    assert sorted(stamps, key=str) == sorted([(first, near), (first, edge), (second, None), (None, beyond)], key=str)


def test_an_exclusive_bound_without_a_key() -> None:
    """It leaves out what is just there, and nothing before it: a unit of the column is a microsecond."""
    at = [dt.datetime(2026, 1, 1, 0, 0, 0, us, dt.UTC) for us in (0, 4999, 5000)]
    left = pa.table({"k": [1], "lt": pa.array(at[:1], US), "a": ["x"]}, LEFT)
    right = pa.table({"rk": [1, 2, 3], "rt": pa.array(at, US)}, RIGHT)
    inputs = Input("l", LEFT, event_time="lt"), Input("r", RIGHT, event_time="rt")
    join = IntervalJoin("inner", *inputs, interval=Interval(0, 5, lower_inclusive=False, upper_inclusive=False))
    assert not join.shuffled_by
    assert JoinEngine(join, "cpu").process(left, right)["rk"].to_pylist() == [2]


def test_a_watermark_means_nothing_in_a_regular_join() -> None:
    engine = JoinEngine(Join("inner", Input("l", LEFT), Input("r", RIGHT), (Key("k", "rk"),)), "cpu")
    with pytest.raises(DescriptionError, match="joins by time only"):
        engine.process(watermark=5)
    assert engine.process().num_rows == 0


@pytest.mark.parametrize("key", [n for n, (kind, _) in TYPES.items() if not pa.types.is_nested(kind) and n != "null"])
def test_every_type_as_key_and_payload(key: str) -> None:
    """All rows of one moment: the pairs are those of equal keys, and nothing is lost of any column."""
    rng = np.random.default_rng(7)
    sides = []
    for letter in "lr":
        table = everything(25, rng)
        sides.append(table.rename_columns([f"{letter}_{n}" for n in table.column_names]))
    made = [
        t.append_column(f"{s}_at", pa.array(np.full(25, 1000), pa.int64())) for s, t in zip("lr", sides, strict=True)
    ]
    inputs = [Input(s, t.schema, event_time=f"{s}_at") for s, t in zip("lr", made, strict=True)]
    join = IntervalJoin("full", *inputs, (Key(f"l_{key}", f"r_{key}"),), interval=Interval(-1, 1))
    engine = JoinEngine(join, "cpu", tiny=True)
    said = [engine.process(left=made[0], watermark=0), engine.process(right=made[1]), engine.finish()]
    rows = pa.concat_tables(said).drop_columns(["row_kind"])
    width = made[0].num_columns
    place = made[0].column_names.index(f"l_{key}")
    left, right = (plain_rows(t) for t in made)
    wanted = [a + b for a in left for b in right if a[place] is not None and a[place] == b[place]]
    met = [{row[:width] for row in map(tuple, wanted)}, {row[width:] for row in map(tuple, wanted)}]
    wanted += [a + (None,) * len(right[0]) for a in left if a not in met[0]]
    wanted += [(None,) * width + b for b in right if b not in met[1]]
    assert sorted(map(repr, plain_rows(rows))) == sorted(map(repr, wanted))
