"""An aggregate's stored state cut into another number of partitions: it goes on as if nothing had happened."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import combined

from gpu_ops import operators
from gpu_ops.backends import make_kernels
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.groups import Top, parse_order
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.sessions import SessionAggregate
from gpu_ops.join_engine import JoinEngine
from kernels.own_functions import Bits
from kernels.test_aggregate import CALLS, KINDS, SCHEMA, some_events, table_of, told

TIMED = ("windows", "sessions")
OWN: dict[str, Any] = {**CALLS, "bits": Bits("id")}


def described(kind: str, what: str) -> Any:
    options: dict[str, Any] = {**KINDS[kind], **({"ttl_ms": 1000} if what in ("ttl", "top") else {})}
    if kind == "upserts":
        options["unique_key"] = ("id", "g")
    if what == "windows":
        return Aggregate.of(Input("t", SCHEMA, event_time="i", **options), ("i", "g"), OWN, "at_watermark")
    if what == "sessions":
        calls = {name: call for name, call in OWN.items() if not name.startswith(("first", "last"))}
        source = Input("t", SCHEMA, event_time="i", **options)
        return SessionAggregate.of_gap(source, ("g",), 3, calls, "at_watermark")
    if what == "top":
        return Top(Input("t", SCHEMA, **options), ("g",), parse_order("id, u"), 2)
    return Aggregate.of(Input("t", SCHEMA, **options), ("g",), OWN, "per_batch")


def to(count: int) -> Callable[[pa.Table], np.ndarray[Any, np.dtype[np.int64]]]:
    def place(table: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([zlib.crc32(repr(g).encode()) % count for g in table.column("g").to_pylist()], np.int64)

    return place


def parted(table: pa.Table, count: int) -> list[pa.Table]:
    where = to(count)(table)
    return [table.take(pa.array(np.flatnonzero(where == n))) for n in range(count)]


@pytest.mark.one_in(6, all=3)
@pytest.mark.parametrize(
    ("kind", "what", "counts"),
    combined(list(KINDS), ["groups", "ttl", "top", "windows", "sessions"], [(1, 3), (3, 2), (2, 1)]),
)
def test_goes_on_in_other_partitions(kind: str, what: str, counts: tuple[int, int]) -> None:
    """The same changes come out of all partitions together, now and later, by the TTL and at the end as well."""
    join = described(kind, what)
    batches = [table_of(kind, some_events(kind, seed, 60)) for seed in range(7)]
    for column in (["i"] if what in TIMED else []) + (["g"] if kind == "upserts" else []):  # there nothing is null
        batches = [batch.filter(batch[column].is_valid()) for batch in batches]
    engines = [JoinEngine(join, "cpu") for _ in range(counts[0])]
    whole = JoinEngine(join, "cpu")
    for number, batch in enumerate(batches):
        if number == 3:
            states = [engine.snapshot() for engine in engines]
            kernels, _ = make_kernels("cpu")
            operator = operators.make(join, kernels, lambda _: False)
            parts_of_input = [state.pop("t") for state in states]
            rows, targets = pa.concat_tables(parts_of_input), [to(counts[1])(part) for part in parts_of_input]
            made = operator.cut(states, [targets], to(counts[1]), counts[1])
            engines = [JoinEngine(join, "cpu") for _ in range(counts[1])]
            for place, (engine, tables) in enumerate(zip(engines, made, strict=True)):
                own = np.flatnonzero(np.concatenate(targets) == place)
                engine.restore({**tables, "t": rows.take(pa.array(own))})
        given: dict[str, Any] = {"clock_ms": number * 400 + 600 * (number > 5)}
        if what in TIMED:
            given["watermark"] = (1 - 2**63, -5, -5, -5, 1, 1, 2)[number]
        wanted = Counter(told(whole.process(batch, **given)))
        parts = zip(engines, parted(batch, len(engines)), strict=True)
        found = Counter(change for engine, part in parts for change in told(engine.process(part, **given)))
        assert found == wanted
    if what in TIMED:
        assert Counter(c for engine in engines for c in told(engine.finish())) == Counter(told(whole.finish()))
