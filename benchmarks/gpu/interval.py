"""Interval joins on a card: two ways to find a key's rows within a span of time, and the whole engine.

`ways`: rows of a state of 1M to 100M whose key is a needle's and whose time lies within its span, by the sorted runs of
`gpu_ops.state.time_index` and by libcudf's ``mixed_inner_join``; with even keys, and with one key hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.gpu.card import INPUTS, SECTOR, Plan, device_frame, free_bytes, lacks_memory
from benchmarks.gpu.probe import equal_pairs, mixed_join, sorted_pairs
from benchmarks.gpu.turns import take_turns
from gpu_ops.arrays import Array
from gpu_ops.backends import Backend
from gpu_ops.descriptions.by_time import IntervalJoin
from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.join_engine import JoinEngine
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.state.time_index import TimeIndex

SECOND = 1_000_000
SPAN = 1000 * SECOND
"""Over which the rows of `ways` are spread."""


def ways(kernels: Kernels, sizes: Sequence[int], needles: int, plan: Plan) -> list[dict[str, Any]]:
    """Both ways at each size of the state, with even keys and with a key that a tenth of the rows has."""
    results: list[dict[str, Any]] = []
    for size in sizes:
        for hot in (False, True):
            why = lacks_memory(100 * size, free_bytes()) or plan.clock.lacks(3 + 1.5e-7 * size)
            found = {"left_out": why} if why is not None else _at(kernels, size, needles, plan, hot=hot)
            results.append({"rows": size, "needles": needles, "hot_key": hot, **found})
    return results


def _at(kernels: Kernels, size: int, needles: int, plan: Plan, *, hot: bool) -> dict[str, Any]:
    rng = np.random.default_rng(size)
    keys = rng.integers(0, size // 10, size)
    if hot:
        keys[: size // 10] = 0
    times = kernels.asarray(rng.integers(0, SPAN, size))
    state = _hashes(kernels, keys)
    index = TimeIndex(kernels)
    index.stage(state, as_slots(kernels, 0, size), times)
    index.commit()
    half = (state >> np.uint64(32)).astype(np.uint32)
    del state
    sets = []
    for _ in range(INPUTS):
        wanted = rng.integers(0, size // 10, needles)
        if hot:
            wanted[: needles // 100] = 0
        low = rng.integers(0, SPAN, needles)
        # the hot key's rows are dense: a shorter span gives as many matches
        span = np.where((wanted == 0) & hot, max(1, SPAN // (size // 100)), SPAN // 10)
        sets.append((_hashes(kernels, wanted), kernels.asarray(low), kernels.asarray(low + span)))

    def join(needle: tuple[Array, Array, Array]) -> Any:
        hashes, low, high = needle
        upper = (hashes >> np.uint64(32)).astype(np.uint32)
        return mixed_join((upper, half), ([low, high], [times]), both=True)

    pairs = {"sorted_runs": index.probe(*sets[0]), "mixed_inner_join": sorted_pairs(kernels, join(sets[0]))}
    equal_pairs(kernels, pairs, f"{size} rows, hot key: {hot}")
    matches = int(pairs["sorted_runs"][0].size)
    del pairs
    looked_at = needles * (24 + 3 * SECTOR) + 24 * matches
    found = {
        "sorted_runs": plan.figure([partial(index.probe, *given) for given in sets], looked_at),
        "mixed_inner_join": plan.figure(
            [partial(join, given) for given in sets], 12 * size + 24 * needles + 8 * matches
        ),
    }
    print("interval", size, hot, {name: round(f["ms"].median, 3) for name, f in found.items()}, flush=True)
    return {"matches": matches, **found}


def _hashes(kernels: Kernels, keys: np.ndarray) -> Array:
    frame = device_frame({"k": kernels.asarray(keys)}, {"k": pa.int64()})
    return kernels.hash_rows(frame, ["k"], [pa.int64()])


def engine(backend: Backend, changes: int, batches: int, emit: Emit, plan: Plan) -> dict[str, Any]:
    """A full interval join, 10 s of time a micro-batch, bounds of plus and minus 10 s, watermark 10 s behind.

    Old rows go as new ones come: the state holds some 30 s, three micro-batches.

    Args:
        backend: where.
        changes: of a micro-batch.
        batches: how many, four of them to warm up.
        emit: as of `gpu_ops.descriptions.join.Join`.
        plan: how to measure.
    """
    rng = np.random.default_rng(3)
    schemas = [pa.schema([("k", pa.int64()), (f"{s}t", pa.timestamp("us")), (f"{s}v", pa.int64())]) for s in "lr"]
    sides = [Input(s, schema, event_time=f"{s}t", delay_ms=10_000) for s, schema in zip("lr", schemas, strict=True)]
    join = IntervalJoin("full", *sides, normalize_on("k"), interval=Interval(-10_000, 10_000, late="drop"), emit=emit)
    made, half, given = JoinEngine(join, backend), changes // 2, []
    for number in range(batches):
        batch = []
        for schema in schemas:
            when = pa.array(number * 10 * SECOND + rng.integers(0, 10 * SECOND, half), pa.timestamp("us"))
            batch.append(pa.table([rng.integers(0, changes, half), when, rng.integers(0, 1000, half)], schema=schema))
        given.append(tuple(batch))
    found = take_turns(made, given, 4, plan)
    size = made.state_size()
    made.close()
    return {"emit": emit, "backend": backend, "state_rows": size["left_rows"] + size["right_rows"], **found}
