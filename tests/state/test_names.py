"""Columns that are called like what a snapshot has beside its rows, or oddly: the answers are the same."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import CoGroup, Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.spark.wire.command import ApplyCommand, Wire
from gpu_ops.spark.wire.hashes import partition_of
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest
from state.support import PartitionState

PLAIN = ("lk", "lv", "lt", "op", "rk", "rv", "rt")
OURS = (
    "__count", "__count_1", "__count_2", "__written", "__kind", "__time", "__sweep", "__matched", "__status", "__side",
    "__order", "__origin", "__stamp", "__kept", "__gpu_join_metrics", "__row_kind", "__corrupt", "c0", "c1", "left",
    "right", "time", "", " ", "a.b", "`", '"', "\n", "row kind", "LK", "0", "ключ",
)  # fmt: skip
TIME = pa.timestamp("ms")
Names = tuple[str, ...]
BATCHES = 4


def inputs(names: Names, **left: Any) -> tuple[Input, Input]:
    lk, lv, lt, op, rk, rv, rt = names
    schemas = [pa.schema([(k, pa.int64()), (v, pa.string()), (t, TIME)]) for k, v, t in ((lk, lv, lt), (rk, rv, rt))]
    first = Input("a", schemas[0], **{"row_kind": op, **left})
    return first, Input("b", schemas[1])


def regular(names: Names, **options: Any) -> Join:
    return Join("full", *inputs(names, ttl_ms=5000), (Key(names[0], names[4]),), **options)


def interval(names: Names) -> Join:
    left, right = inputs(names, row_kind=None)
    left = dataclasses.replace(left, event_time=names[2], delay_ms=1)
    right = dataclasses.replace(right, event_time=names[6], delay_ms=1)
    return IntervalJoin("full", left, right, (Key(names[0], names[4]),), interval=Interval(-2000, 4000))


def multi(names: Names) -> MultiJoin:
    return MultiJoin.of(list(inputs(names)), [(names[0], names[4])], ["left"])


def backlog(names: Names) -> Join:
    return Join("full", *inputs(names), (Key(names[0], names[4]),))


KINDS: dict[str, Callable[[Names], Description]] = {
    "regular": regular,
    "per event": lambda names: regular(names, emit="per_event"),
    "interval": interval,
    "multi": multi,
    "at end": lambda names: dataclasses.replace(backlog(names), emit="at_end"),
    "backlog": backlog,
    "aggregate": lambda names: Aggregate.of(inputs(names)[0], (names[0],), {names[5]: ("max", names[1])}),
    "co-group": lambda names: CoGroup(*inputs(names), (Key(names[0], names[4]),)),
}


def wire_of(join: Description, names: Names) -> Wire:
    lk, lv, lt, op, rk, rv, rt = names
    kind = op if join.inputs[0].row_kind is not None else None
    union_columns: list[tuple[str | None, ...]] = [(lk, rk, "c0"), (lv, rv, "c1"), (lt, rt, "c2"), (kind, None, "c3")]
    if len(join.inputs) == 1:
        union_columns = [(column[0], column[-1]) for column in union_columns]
    return Wire("__side", "__order", tuple(column for column in union_columns if set(column[:-1]) != {None}))


def rows_of(join: Description) -> list[pa.Table]:
    """Micro-batches; a row that is deleted was there."""
    rng, made, live = np.random.default_rng(5), [], []
    for batch in range(BATCHES):
        lines = []
        for place in range(batch * 12, batch * 12 + 12):
            side = int(rng.integers(len(join.inputs)))
            line = {"__side": side, "__order": place, "c0": int(rng.integers(4)), "c1": f"v{place}", "c3": None}
            line["c2"] = place * 1000
            if side == 0 and join.inputs[0].row_kind is not None:
                gone = live.pop() if live and place % 3 == 0 else None
                line |= {"c3": "+I"} if gone is None else {**gone, "c3": "-D"}
                if gone is None:
                    live.append({name: line[name] for name in ("c0", "c1", "c2")})
            lines.append(line)
        kinds = {"__side": pa.int8(), "__order": pa.int64(), "c0": pa.int64(), "c1": pa.string(), "c2": TIME}
        if join.inputs[0].row_kind is not None:
            kinds["c3"] = pa.string()
        made.append(pa.Table.from_pylist(lines, schema=pa.schema(list(kinds.items()))))
    return made


def said(tables: list[pa.Table]) -> Counter[str]:
    return Counter(repr(row) for t in tables for row in zip(*(c.to_pylist() for c in t.columns), strict=True))


def answers(kind: str, names: Names, folder: Path | None) -> list[Counter[str]]:
    """What a join says to each micro-batch, and at its end; with a folder it is read anew each time, and cut anew."""
    join = KINDS[kind](names)
    wire, found, partitions = wire_of(join, names), [], 1
    options = {"snapshot_every": 1, **({"backlog": True} if kind == "backlog" else {})}
    text, where = join.to_json(), None if folder is None else str(folder)
    held = [PartitionState(ApplyCommand("j", where, text, "q", 0, 0, 1, "cpu", wire, options), clock=lambda: 0)]
    for batch, rows in enumerate(rows_of(join)):
        under: dict[str, Any] = {"clock_ms": 2000 * batch, "backlog": kind == "backlog" and batch < BATCHES - 1}
        if kind == "interval":
            under["watermark"] = 9000 * batch
        part = partition_of([rows["c0"].combine_chunks()], len(rows), partitions)
        changes = []
        for number in range(partitions):
            if folder is not None:
                command = ApplyCommand("j", where, text, "q", batch, number, partitions, "cpu", wire, options)
                held = [PartitionState(command)] if number == 0 else [*held, PartitionState(command)]
            mine = rows.filter(pa.array(part == number))
            changes.append(held[number].apply(batch, mine, wire, **under).changelog)
        found.append(said(changes))
        if folder is not None and batch == 1:
            partitions = rescale(str(folder), 2).after
    if folder is None:
        assert held[0]._engine is not None
        held[0]._engine.commit()
        return [*found, said([held[0]._engine.finish()])]
    manifest = Manifest.of(Files.at(str(folder)))
    parts = [list(stored_state(Files.at(str(folder)), manifest, n).left_over(BATCHES)) for n in range(partitions)]
    return [*found, said([table for part in parts for table in part])]


EXPECTED = {kind: answers(kind, PLAIN, None) for kind in KINDS}


def check(kind: str, names: Names, folder: Path) -> None:
    found = answers(kind, names, folder)
    assert found == EXPECTED[kind]
    assert sum(map(len, found))


@pytest.mark.one_in(4, all=2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_with_columns_called_like_ours_is_restored(kind: str, tmp_path: Path) -> None:
    """State with a column named ``__count``, ``__written`` or ``__kind`` could not be restored."""
    check(kind, PLAIN, tmp_path / "plain")
    check(kind, ("__count", "__written", "__kind", "__status", "__time", "__count_1", "__matched"), tmp_path / "one")
    check(kind, ("__kind", "__time", "__sweep", "__count", "__status", "__kept", "__written"), tmp_path / "two")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    names=st.lists(st.sampled_from(OURS) | st.text(max_size=4), min_size=7, max_size=7, unique=True),
)
def test_any_names_of_columns_answer_alike(
    kind: str, names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(kind, tuple(names), tmp_path_factory.mktemp("state"))
