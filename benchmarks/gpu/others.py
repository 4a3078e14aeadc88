"""The whole engine beyond joins of two inputs: three inputs in one operator, and a join at the end of its input."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.gpu.card import Plan
from benchmarks.gpu.turns import take_turns
from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.join_engine import JoinEngine

SCHEMAS = [pa.schema([("k", pa.int64()), (name, pa.int64())]) for name in "abc"]
WARMUP = 2


def tables(rows: int, count: int) -> list[pa.Table]:
    """Every key once in each input, in another order."""
    rng = np.random.default_rng(3)
    return [pa.table([rng.permutation(rows), rng.integers(0, 1000, rows)], schema=s) for s in SCHEMAS[:count]]


def multi_way(backend: Backend, rows: int, changes: int, emit: Emit, plan: Plan) -> dict[str, Any]:
    """A left join of three inputs on one key that grows from nothing, a third of each micro-batch from each.

    Args:
        backend: where.
        rows: of each input in the end.
        changes: of a micro-batch, all inputs together.
        emit: as of `gpu_ops.descriptions.multi_join.MultiJoin`.
        plan: how to measure.
    """
    join = MultiJoin.of([Input(n, s) for n, s in zip("abc", SCHEMAS, strict=True)], "k", "left", emit=emit)
    engine, part = JoinEngine(join, backend), changes // 3
    inputs = tables(rows, 3)
    given = [tuple(t.slice(start, part) for t in inputs) for start in range(0, rows - part + 1, part)]
    found = take_turns(engine, given, WARMUP, plan)
    size = engine.state_size()
    engine.close()
    held = sum(v for k, v in size.items() if k.endswith("_rows"))
    return {
        "rows_per_input": rows,
        "emit": emit,
        "backend": backend,
        "state_bytes_per_row": sum(v for k, v in size.items() if k.endswith("_bytes")) / held,
        **found,
    }


def at_end(backend: Backend, rows: int, changes: int) -> dict[str, Any]:
    """A left join that speaks at the end of its input; seconds are wall clock."""
    join = Join(
        "left", *(Input(n, s) for n, s in zip("ab", SCHEMAS[:2], strict=True)), normalize_on("k"), emit="at_end"
    )
    engine, half = JoinEngine(join, backend), changes // 2
    left, right = tables(rows, 2)
    begin = time.perf_counter()
    for start in range(0, rows, half):
        engine.process(left.slice(start, half), right.slice(start, half))
    ended = time.perf_counter()
    out = sum(part.num_rows for part in engine.finish_parts())
    done = time.perf_counter()
    engine.close()
    return {
        "rows_per_input": rows,
        "backend": backend,
        "changes_per_second": 2 * rows / (done - begin),
        "seconds_keeping": ended - begin,
        "seconds_joining": done - ended,
        "rows_out": out,
    }
