"""An operator of each family, as engines alone run it: micro-batches that change what there is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.aggregate import CALLS, SALES, sales
from benchmarks.common import LEAST_RUNS
from benchmarks.gpu.card import Plan
from benchmarks.gpu.feed import SCHEMAS, Feed, description
from benchmarks.gpu.others import SCHEMAS as THREE
from benchmarks.gpu.turns import take_turns
from gpu_ops.backends import Backend
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.groups import Latest, Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.join_engine import JoinEngine

Work = tuple[Any, list[tuple[pa.Table, ...]]]
"""A description and micro-batches."""
WARMUP = 3


def _join(how: str, emit: Any, n: int, batches: int, *, where: str | None = None, unique: bool = True) -> Work:
    feed, like = Feed(3 * n, n), description(emit, unique=unique)
    keys = np.arange(feed.rows)
    start = [
        pa.table([keys, 2 * keys], schema=schema).append_column("op", pa.array(["+I"] * keys.size))
        for schema in SCHEMAS
    ]
    join = dataclasses.replace(like, how=how, where=where)
    assert isinstance(join, Join)
    return join, [tuple(start), *feed.batches(batches - 1)]


def _timed(name: str, unique: tuple[str, ...] | None = None) -> Input:
    schema = pa.schema([("k", pa.int64()), (f"{name}t", pa.timestamp("us")), (f"{name}v", pa.int64())])
    return Input(name, schema, event_time=f"{name}t", delay_ms=10_000, unique_key=unique)


def _by_time(join: Any, n: int, batches: int, keys: int, *, versions: bool = False) -> Work:
    """Ten seconds a micro-batch; ``versions``: of each key at most one right row in each of them."""
    rng, given = np.random.default_rng(1), []
    for number in range(batches):
        tables = []
        for side in join.inputs:
            when = pa.array(number * 10_000_000 + rng.integers(0, 10_000_000, n // 2), pa.timestamp("us"))
            once = versions and side.name == "r"
            key = rng.permutation(max(keys, n))[: n // 2] if once else rng.integers(0, keys, n // 2)
            tables.append(pa.table([key, when, rng.integers(0, 1000, n // 2)], schema=side.schema))
        given.append(tuple(tables))
    return join, given


def _interval(emit: Any, n: int, batches: int) -> Work:
    within = Interval(-10_000, 10_000, late="drop")
    join = IntervalJoin("full", _timed("l"), _timed("r"), normalize_on("k"), interval=within, emit=emit)
    return _by_time(join, n, batches, n)


def _asof(emit: Any, n: int, batches: int) -> Work:
    join = AsofJoin("left", _timed("l"), _timed("r"), normalize_on("k"), emit=emit, asof=Asof("backward"))
    return _by_time(join, n, batches, n // 10)


def _temporal(n: int, batches: int) -> Work:
    join = TemporalJoin("left", _timed("l"), _timed("r", ("k",)), normalize_on("k"))
    return _by_time(join, n, batches, n // 2, versions=True)


def _three(emit: Any, n: int, batches: int) -> Work:
    join = MultiJoin.of(
        [Input(name, schema) for name, schema in zip("abc", THREE, strict=True)], "k", "left", emit=emit
    )
    rng, part = np.random.default_rng(1), n // 3
    rows = part * batches
    tables = [pa.table([rng.permutation(rows), rng.integers(0, 1000, rows)], schema=schema) for schema in THREE]
    return join, [tuple(table.slice(at, part) for table in tables) for at in range(0, rows, part)]


def _aggregate(emit: Any, n: int, batches: int, groups: int, *, retracting: bool = True) -> Work:
    """Sales, a tenth of which the next micro-batch takes back."""
    rows = sales(batches * n, groups)
    parts = [rows.slice(at, n) for at in range(0, batches * n, n)]
    if retracting:
        gone = [rows.slice(0, 0), *(part.slice(0, n // 10) for part in parts[:-1])]
        parts = [
            pa.concat_tables([come, go]).append_column(
                "op", pa.array(["+I"] * len(come) + ["-D"] * len(go), pa.string())
            )
            for come, go in zip(parts, gone, strict=True)
        ]
    source = Input("sales", SALES, row_kind="op" if retracting else None)
    return Aggregate.of(source, ("product",), CALLS, emit), [(part.combine_chunks(),) for part in parts]


def _top(emit: Any, n: int, batches: int) -> Work:
    rows = sales(batches * n, n // 10)
    top = Top(Input("sales", SALES), ("product",), parse_order("price DESC"), 2, emit, None)
    return top, [(rows.slice(at, n),) for at in range(0, batches * n, n)]


def _latest(emit: Any, n: int, batches: int) -> Work:
    feed = Feed(3 * n, n)
    return Latest(description(emit, unique=True).left, emit), [(pair[0],) for pair in feed.batches(batches)]


OPERATORS: dict[str, Callable[[int, int], Work]] = {
    "left join, per_batch": lambda n, b: _join("left", "per_batch", n, b),
    "left join, per_event": lambda n, b: _join("left", "per_event", n, b),
    "inner join, per_batch": lambda n, b: _join("inner", "per_batch", n, b),
    "full join, per_batch": lambda n, b: _join("full", "per_batch", n, b),
    "left join, residual, per_batch": lambda n, b: _join("left", "per_batch", n, b, where="left.a < right.b + 1"),
    "left join, multisets, per_batch": lambda n, b: _join("left", "per_batch", n, b, unique=False),
    "semi join, per_batch": lambda n, b: _join("semi", "per_batch", n, b),
    "semi join, per_event": lambda n, b: _join("semi", "per_event", n, b),
    "anti join, per_batch": lambda n, b: _join("anti", "per_batch", n, b),
    "interval join, per_batch": lambda n, b: _interval("per_batch", n, b),
    "interval join, per_event": lambda n, b: _interval("per_event", n, b),
    "ASOF join, per_batch": lambda n, b: _asof("per_batch", n, b),
    "ASOF join, per_event": lambda n, b: _asof("per_event", n, b),
    "ASOF join, at_watermark": lambda n, b: _asof("at_watermark", n, b),
    "temporal join": _temporal,
    "three inputs, per_batch": lambda n, b: _three("per_batch", n, b),
    "three inputs, per_event": lambda n, b: _three("per_event", n, b),
    "aggregate of insertions, per_batch": lambda n, b: _aggregate("per_batch", n, b, 100, retracting=False),
    "aggregate, per_batch": lambda n, b: _aggregate("per_batch", n, b, 100),
    "aggregate of many groups, per_batch": lambda n, b: _aggregate("per_batch", n, b, n),
    "aggregate, per_event": lambda n, b: _aggregate("per_event", n, b, 100),
    "top 2, per_batch": lambda n, b: _top("per_batch", n, b),
    "top 2, per_event": lambda n, b: _top("per_event", n, b),
    "latest, per_batch": lambda n, b: _latest("per_batch", n, b),
}


def operator(backend: Backend, name: str, changes: int, plan: Plan) -> dict[str, Any]:
    """Micro-batches of one of `OPERATORS`; what it says is that of `benchmarks.gpu.turns.take_turns`."""
    described, given = OPERATORS[name](changes, WARMUP + 2 * LEAST_RUNS)
    with contextlib.closing(JoinEngine(described, backend)) as engine:
        return {"operator": name, "backend": backend, **take_turns(engine, given, WARMUP, plan)}
