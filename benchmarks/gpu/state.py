"""What a state table does for each micro-batch beside the probe: append, merge, gather, add up counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import summarise
from benchmarks.gpu.card import INPUTS, SECTOR, WARMUPS, Plan, elapsed_ms, figure, free_bytes, lacks_memory
from gpu_ops.arrays import Array
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.state.index import HashIndex

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("x", pa.float64())])


def rows_and_gathers(kernels: Kernels, rows: int, batch: int, plan: Plan) -> dict[str, Any]:
    """Appends of a batch each up to that many rows, then gathers of a batch of random rows.

    Most appends copy nothing; one that merges segments copies them all. So of an append the mean counts, ``ms_mean``,
    and its bytes are those of all appends over their number.
    """
    rng, store = np.random.default_rng(1), kernels.store(SCHEMA)
    words = pa.array([f"value {i}" for i in range(1000)])
    frames = [
        kernels.frame(
            pa.table(
                [rng.integers(0, rows, batch), words.take(pa.array(rng.integers(0, 1000, batch))), rng.random(batch)],
                schema=SCHEMA,
            )
        )
        for _ in range(INPUTS)
    ]
    kernels.store(SCHEMA).append(frames[0])
    count = max(1, rows // batch)
    appends = summarise(elapsed_ms(partial(store.append, frames[n % INPUTS])) for n in range(count))
    each = store.nbytes // count
    slots = [kernels.asarray(rng.integers(0, len(store), batch)) for _ in range(INPUTS)]
    takes = [partial(store.take, where, SCHEMA.names) for where in slots]
    gathered = batch * (8 + 4 * SECTOR) + each
    return {
        "append": {
            "rows": batch,
            **figure(appends, 2 * each, plan.bandwidth),
            "ms_mean": sum(appends.values) / count,
            "bytes_per_row": store.nbytes / len(store),
        },
        "take": {"rows": batch, "of_rows": len(store), **plan.figure(takes, gathered)},
    }


def scatter_add(kernels: Kernels, rows: int, values: int, plan: Plan) -> dict[str, Any]:
    """Association counts of a million matches, at random rows."""
    rng, xp = np.random.default_rng(2), kernels.xp
    counts, ones = xp.zeros(rows, np.int32), xp.ones(values, np.int32)
    where = [kernels.asarray(rng.integers(0, rows, values)) for _ in range(INPUTS)]
    found = plan.figure([partial(kernels.scatter_add, counts, w, ones) for w in where], values * (12 + 2 * SECTOR))
    if int(counts.sum()) != values * (WARMUPS + max(1, plan.rounds)):
        raise AssertionError("scatter_add lost some")
    return {"rows": rows, "values": values, **found}


def merges(kernels: Kernels, sizes: list[tuple[int, int]], plan: Plan) -> list[dict[str, Any]]:
    """A run of entries staged and committed onto one ten times as large, which makes one of the two.

    Args:
        kernels: the backend.
        sizes: of the larger and of the smaller run.
        plan: how to measure.
    """
    rng, found = np.random.default_rng(3), []
    for large, small in sizes:
        why = lacks_memory(60 * (large + small), free_bytes()) or plan.clock.lacks(2 + 1e-7 * large)
        if why is not None:
            found.append({"large": large, "small": small, "left_out": why})
            continue
        index = HashIndex(kernels)
        index.stage(_hashes(kernels, rng, large), as_slots(kernels, 0, large))
        index.commit()
        (run,) = index.runs
        stages, commits = [], []
        for number in range(max(2, plan.rounds + 1)):
            hashes, slots = _hashes(kernels, rng, small), as_slots(kernels, large, small)
            index.runs = [run]
            staged = elapsed_ms(partial(index.stage, hashes, slots))
            merged = elapsed_ms(index.commit)
            if number:  # the first is a warm-up
                stages.append(staged)
                commits.append(merged)
        if sum(r.entries.size for r in index.runs) != large + small:
            raise AssertionError("a merge lost some")
        moved = 2 * 8 * (large + small) + 2 * int(run.directory.nbytes)
        entry = {
            "large": large,
            "small": small,
            "runs_after": len(index.runs),
            "stage": figure(summarise(stages), 4 * 8 * small, plan.bandwidth),
            "commit": figure(summarise(commits), moved, plan.bandwidth),
        }
        print("merge", large, small, round(entry["commit"]["ms"].median, 3), "ms", flush=True)
        found.append(entry)
    return found


def growth(kernels: Kernels, rows: int, batch: int) -> dict[str, Any]:
    """An index that grows by one batch after the other: what a commit costs with all merges that it brings."""
    rng, index, commits, stages = np.random.default_rng(4), HashIndex(kernels), [], []
    for start in range(0, max(rows, batch), batch):
        hashes, slots = _hashes(kernels, rng, batch), as_slots(kernels, start, batch)
        stages.append(elapsed_ms(partial(index.stage, hashes, slots)))
        commits.append(elapsed_ms(index.commit))
    return {
        "rows": start + batch,
        "batch": batch,
        "runs_after": len(index.runs),
        "stage_ms": summarise(stages),
        "commit_ms": summarise(commits),
        "commit_ms_mean": sum(commits) / len(commits),  # most merge little, some everything
    }


def _hashes(kernels: Kernels, rng: np.random.Generator, count: int) -> Array:
    low, high = (kernels.asarray(rng.integers(0, 1 << 32, 1 << 16).astype(np.uint64)) for _ in range(2))
    number = kernels.xp.arange(count, dtype=np.int64)
    spread = low[number & 0xFFFF] ^ (high[(number >> 16) & 0xFFFF] << np.uint64(16))
    return ((spread * np.uint64(0x9E3779B97F4A7C15)) ^ spread) * np.uint64(0xBF58476D1CE4E5B9)
