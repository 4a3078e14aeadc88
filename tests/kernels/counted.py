"""An operator of each family with micro-batches, of which `kernels.counting` counts the calls of the last one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.aggregate import CALLS, SALES, sales
from benchmarks.gpu.feed import SCHEMAS, Feed, description
from benchmarks.gpu.others import SCHEMAS as THREE
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.groups import Latest, Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.descriptions.multi_join import MultiJoin

Work = tuple[Any, list[tuple[pa.Table, ...]]]
"""A description and micro-batches."""
_BATCHES = 6


def _join(how: str, emit: Any, n: int, *, where: str | None = None, unique: bool = True) -> Work:
    feed, like = Feed(3 * n, n), description(emit, unique=unique)
    keys = np.arange(3 * n)
    start = [
        pa.table([keys, 2 * keys], schema=schema).append_column("op", pa.array(["+I"] * keys.size))
        for schema in SCHEMAS
    ]
    join = dataclasses.replace(like, how=how, where=where)
    assert isinstance(join, Join)
    return join, [tuple(start), *feed.batches(_BATCHES - 1)]


def _timed(name: str, unique: tuple[str, ...] | None = None) -> Input:
    schema = pa.schema([("k", pa.int64()), (f"{name}t", pa.timestamp("us")), (f"{name}v", pa.int64())])
    return Input(name, schema, event_time=f"{name}t", delay_ms=10_000, unique_key=unique)


def _by_time(join: Any, n: int, keys: int, *, versions: bool = False) -> Work:
    """Ten seconds a micro-batch; ``versions``: of each key at most one right row in each of them."""
    rng, batches = np.random.default_rng(1), []
    for number in range(_BATCHES):
        tables = []
        for side in join.inputs:
            when = pa.array(number * 10_000_000 + rng.integers(0, 10_000_000, n // 2), pa.timestamp("us"))
            once = versions and side.name == "r"
            key = rng.permutation(max(keys, n))[: n // 2] if once else rng.integers(0, keys, n // 2)
            tables.append(pa.table([key, when, rng.integers(0, 1000, n // 2)], schema=side.schema))
        batches.append(tuple(tables))
    return join, batches


def _interval(emit: Any, n: int) -> Work:
    within = Interval(-10_000, 10_000, late="drop")
    join = IntervalJoin("full", _timed("l"), _timed("r"), normalize_on("k"), interval=within, emit=emit)
    return _by_time(join, n, n)


def _asof(emit: Any, n: int) -> Work:
    join = AsofJoin("left", _timed("l"), _timed("r"), normalize_on("k"), emit=emit, asof=Asof("backward"))
    return _by_time(join, n, n // 10)


def _temporal(n: int) -> Work:
    join = TemporalJoin("left", _timed("l"), _timed("r", ("k",)), normalize_on("k"))
    return _by_time(join, n, n // 2, versions=True)


def _three(emit: Any, n: int) -> Work:
    join = MultiJoin.of(
        [Input(name, schema) for name, schema in zip("abc", THREE, strict=True)], "k", "left", emit=emit
    )
    rng, part = np.random.default_rng(1), n // 3
    rows = part * _BATCHES
    tables = [pa.table([rng.permutation(rows), rng.integers(0, 1000, rows)], schema=schema) for schema in THREE]
    return join, [tuple(table.slice(at, part) for table in tables) for at in range(0, rows, part)]


def _aggregate(emit: Any, n: int, groups: int, *, retracting: bool = True) -> Work:
    """Sales, a tenth of which the next micro-batch takes back."""
    rows = sales(_BATCHES * n, groups)
    parts = [rows.slice(at, n) for at in range(0, _BATCHES * n, n)]
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


def _top(emit: Any, n: int) -> Work:
    rows = sales(_BATCHES * n, n // 10)
    top = Top(Input("sales", SALES), ("product",), parse_order("price DESC"), 2, emit, None)
    return top, [(rows.slice(at, n),) for at in range(0, _BATCHES * n, n)]


def _latest(emit: Any, n: int) -> Work:
    feed = Feed(3 * n, n)
    return Latest(description(emit, unique=True).left, emit), [(pair[0],) for pair in feed.batches(_BATCHES - 1)]


OPERATORS: dict[str, Callable[[int], Work]] = {
    "left join, per_batch": lambda n: _join("left", "per_batch", n),
    "left join, per_event": lambda n: _join("left", "per_event", n),
    "inner join, per_batch": lambda n: _join("inner", "per_batch", n),
    "full join, per_batch": lambda n: _join("full", "per_batch", n),
    "left join, residual, per_batch": lambda n: _join("left", "per_batch", n, where="left.a < right.b + 1"),
    "left join, multisets, per_batch": lambda n: _join("left", "per_batch", n, unique=False),
    "semi join, per_batch": lambda n: _join("semi", "per_batch", n),
    "semi join, per_event": lambda n: _join("semi", "per_event", n),
    "anti join, per_batch": lambda n: _join("anti", "per_batch", n),
    "interval join, per_batch": lambda n: _interval("per_batch", n),
    "interval join, per_event": lambda n: _interval("per_event", n),
    "ASOF join, per_batch": lambda n: _asof("per_batch", n),
    "ASOF join, per_event": lambda n: _asof("per_event", n),
    "ASOF join, at_watermark": lambda n: _asof("at_watermark", n),
    "temporal join": _temporal,
    "three inputs, per_batch": lambda n: _three("per_batch", n),
    "three inputs, per_event": lambda n: _three("per_event", n),
    "aggregate of insertions, per_batch": lambda n: _aggregate("per_batch", n, 100, retracting=False),
    "aggregate, per_batch": lambda n: _aggregate("per_batch", n, 100),
    "aggregate of many groups, per_batch": lambda n: _aggregate("per_batch", n, n),
    "aggregate, per_event": lambda n: _aggregate("per_event", n, 100),
    "top 2, per_batch": lambda n: _top("per_batch", n),
    "top 2, per_event": lambda n: _top("per_event", n),
    "latest, per_batch": lambda n: _latest("per_batch", n),
}
