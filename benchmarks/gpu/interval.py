"""Interval joins on a card: two ways to find a key's rows within a span of time, and the whole engine.

`ways`: rows of a state of 1M to 100M whose key is a needle's and whose time lies within its span, by the sorted runs of
`gpu_ops.state.time_index` and by libcudf's ``mixed_inner_join``; with even keys, and with one key hot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import Summary, summarise
from gpu_ops.engine import JoinEngine
from gpu_ops.intervals import Interval
from gpu_ops.joins import Input, Join, normalize_on
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.state.time_index import TimeIndex

SECOND = 1_000_000
Timer = Callable[[Callable[[], object], int], Summary]


def mixed_join(kernels: Kernels, state: tuple[Any, Any], needles: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Needles and places by ``mixed_inner_join``, in order.

    Args:
        kernels: the GPU backend.
        state: half hashes (uint32) and times (int64) of the rows.
        needles: half hashes, earliest and latest times.
    """
    import pylibcudf as plc
    from pylibcudf.expressions import ASTOperator, ColumnReference, Operation, TableReference

    from gpu_ops.cudf_backend.frame import from_values, values

    time_ = ColumnReference(0, TableReference.RIGHT)
    early = Operation(ASTOperator.GREATER_EQUAL, time_, ColumnReference(0, TableReference.LEFT))
    late = Operation(ASTOperator.LESS_EQUAL, time_, ColumnReference(1, TableReference.LEFT))
    needle, place = plc.join.mixed_inner_join(
        plc.Table([from_values(needles[0])]),
        plc.Table([from_values(state[0])]),
        plc.Table([from_values(needles[1]), from_values(needles[2])]),
        plc.Table([from_values(state[1])]),
        Operation(ASTOperator.LOGICAL_AND, early, late),
        plc.types.NullEquality.UNEQUAL,
    )
    xp = kernels.xp
    if not needle.size():
        return xp.empty(0, np.int64), xp.empty(0, np.int64)
    packed = xp.sort((values(needle, np.int32).astype(np.int64) << 32) | values(place, np.int32).astype(np.int64))
    return packed >> 32, packed & 0xFFFFFFFF


def ways(kernels: Kernels, rows: list[int], needles: int, rounds: int, timer: Timer) -> list[dict[str, Any]]:
    """Both ways at each size of the state, with even keys and with a key that a tenth of the rows has."""
    results = []
    for size in rows:
        for hot in (False, True):
            rng = np.random.default_rng(size)
            keys = rng.integers(0, size // 10, size)
            if hot:
                keys[rng.random(size) < 0.1] = 0
            wanted = rng.integers(0, size // 10, needles)
            if hot:
                wanted[: needles // 100] = 0
            times = kernels.asarray(rng.integers(0, 1000 * SECOND, size))
            # the hot key's rows are dense: a shorter span gives as many matches
            low = rng.integers(0, 1000 * SECOND, needles)
            span = np.where((wanted == 0) & hot, max(1, 1000 * SECOND // (size // 100)), 100 * SECOND)
            low, high = kernels.asarray(low), kernels.asarray(low + span)
            hashes = [kernels.hash_rows(kernels.frame(pa.table({"k": k})), ["k"], [pa.int64()]) for k in (keys, wanted)]
            index = TimeIndex(kernels)
            index.stage(hashes[0], as_slots(kernels, 0, size), times)
            index.commit()
            half = [(h >> np.uint64(32)).astype(np.uint32) for h in hashes]

            def runs(index: TimeIndex = index, h: Any = hashes[1], a: Any = low, b: Any = high) -> tuple[Any, Any]:
                return index.probe(h, a, b)

            def join(s: Any = (half[0], times), n: Any = (half[1], low, high)) -> tuple[Any, Any]:
                return mixed_join(kernels, s, n)

            ours, theirs = runs(), join()
            if not all(bool(kernels.xp.array_equal(a, b)) for a, b in zip(ours, theirs, strict=True)):
                raise AssertionError(f"the two ways differ: {size} rows, hot key: {hot}")
            found = {
                "rows": size,
                "needles": needles,
                "hot_key": hot,
                "matches": int(ours[0].size),
                "sorted_runs_ms": timer(runs, rounds),
                "mixed_inner_join_ms": timer(join, rounds),
            }
            print({k: round(v.median, 3) if isinstance(v, Summary) else v for k, v in found.items()}, flush=True)
            results.append(found)
    return results


def engine(backend: Any, rows: int, changes: int) -> dict[str, Any]:
    """A full interval join, 10 s of time a micro-batch, bounds of plus and minus 10 s, watermark 10 s behind."""
    rng = np.random.default_rng(3)
    schemas = [pa.schema([("k", pa.int64()), (f"{s}t", pa.timestamp("us")), (f"{s}v", pa.int64())]) for s in "lr"]
    sides = [Input(s, schema, event_time=f"{s}t", delay_ms=10_000) for s, schema in zip("lr", schemas, strict=True)]
    join = Join("full", *sides, normalize_on("k"), interval=Interval(-10_000, 10_000, late="drop"))
    made, half, seconds, out = JoinEngine(join, backend), changes // 2, [], 0
    for number in range(max(2, rows // half)):
        batch = []
        for schema in schemas:
            when = number * 10 * SECOND + rng.integers(0, 10 * SECOND, half)
            columns = [rng.integers(0, changes, half), pa.array(when, pa.timestamp("us")), rng.integers(0, 1000, half)]
            batch.append(pa.table(columns, schema=schema))
        before = time.perf_counter()
        out += made.process(*batch).num_rows
        seconds.append(time.perf_counter() - before)
    made.close()
    return {
        "changes_per_micro_batch": 2 * half,
        "changes_per_second": 2 * half * (len(seconds) - 1) / sum(seconds[1:]),
        "rows_out": out,
        "micro_batch_seconds": summarise(seconds[1:]),
    }
