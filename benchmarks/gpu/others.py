"""The whole engine on a card beyond two-way joins: three inputs in one operator, and a join at the end of its input."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import summarise
from gpu_ops.engine import JoinEngine
from gpu_ops.joins import Input, Join, normalize_on
from gpu_ops.multi import MultiJoin

SCHEMAS = [pa.schema([("k", pa.int64()), (name, pa.int64())]) for name in "abc"]


def tables(rows: int, count: int) -> list[pa.Table]:
    """Every key once in each input, in another order."""
    rng = np.random.default_rng(3)
    return [pa.table([rng.permutation(rows), rng.integers(0, 1000, rows)], schema=s) for s in SCHEMAS[:count]]


def multi_way(backend: Any, rows: int, changes: int) -> dict[str, Any]:
    """A left join of three inputs on one key, a third of each micro-batch from each."""
    join = MultiJoin.of([Input(n, s) for n, s in zip("abc", SCHEMAS, strict=True)], "k", "left")
    engine, part, batches, out = JoinEngine(join, backend), changes // 3, [], 0
    given = tables(rows, 3)
    for start in range(0, rows, part):
        before = time.perf_counter()
        out += engine.process(*(t.slice(start, part) for t in given)).num_rows
        batches.append(time.perf_counter() - before)
    size = engine.state_size()
    engine.close()
    return {
        "rows_per_input": rows,
        "changes_per_micro_batch": 3 * part,
        "changes_per_second": 3 * rows / sum(batches),
        "rows_out": out,
        "micro_batch_seconds": summarise(batches[1:] or batches),
        "state_bytes_per_row": sum(v for k, v in size.items() if k.endswith("_bytes")) / (3 * rows),
    }


def at_end(backend: Any, rows: int, changes: int) -> dict[str, Any]:
    """A left join that speaks at the end of its input."""
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
        "changes_per_second": 2 * rows / (done - begin),
        "seconds_keeping": ended - begin,
        "seconds_joining": done - ended,
        "rows_out": out,
    }
