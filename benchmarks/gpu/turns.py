"""Micro-batches through an engine, from Arrow to Arrow, and what of their time is not the join's own.

Plain micro-batches are timed from end to end; in turns with them watched ones (`benchmarks.gpu.watch`) wait for the
card at every crossing, so they take longer and say how long each part takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from benchmarks.common import LEAST_RUNS, summarise
from benchmarks.gpu.card import SECTOR, Plan, figure, synchronize
from benchmarks.gpu.watch import Watch, split
from gpu_ops.join_engine import JoinEngine


def wait_for(engine: JoinEngine) -> Callable[[], None]:
    """A function that waits for the engine's device; it does nothing on the CPU."""
    return synchronize if engine.backend == "gpu" else lambda: None


def take_turns(engine: JoinEngine, given: Sequence[tuple[pa.Table, ...]], warmup: int, plan: Plan) -> dict[str, Any]:
    """Warm up, then plain and watched micro-batches in turns.

    Args:
        engine: with whatever state.
        given: the changes of each input, micro-batch by micro-batch.
        warmup: how many of them are not counted.
        plan: how to measure; when its clock ends no further micro-batch begins, but `LEAST_RUNS` of either sort are
            always counted.

    Returns:
        ``changes`` of a micro-batch, ``rows_out`` of all of them, ``plain``: a figure with ``prepare_ms``,
        ``commit_ms`` and ``changes_per_second`` (all changes over all seconds, so that merges count), ``watched``: see
        `benchmarks.gpu.watch.split`.

    Raises:
        ValueError: fewer micro-batches than a rate stands on.
    """
    if len(given) - warmup < 2 * LEAST_RUNS:
        raise ValueError(
            f"{len(given)} micro-batches are no measurement: {warmup} warm up, and {LEAST_RUNS} plain and as many "
            "watched ones are counted"
        )
    wait, watch = wait_for(engine), Watch(engine, wait_for(engine))
    prepares: list[float] = []
    commits: list[float] = []
    moved: list[int] = []
    watched: list[tuple[float, dict[str, float]]] = []
    rows_out, changes = 0, sum(table.num_rows for table in given[-1])
    for number, tables in enumerate(given):
        turn = number - warmup
        if turn >= 2 * LEAST_RUNS and plan.clock.left() < 0:
            break
        wait()
        began = time.perf_counter()
        if turn < 0 or turn % 2:
            with watch.on() as parts:
                rows_out += engine.process(*tables).num_rows
                wait()
                took = time.perf_counter() - began
            if turn >= 0:
                watched.append((took, parts))
            continue
        batch = engine.prepare(*tables)
        prepared = time.perf_counter()
        engine.commit()
        wait()
        commits.append(1e3 * (time.perf_counter() - prepared))
        prepares.append(1e3 * (prepared - began))
        rows_out += batch.changelog.num_rows
        moved.append(_must_move(tables, batch.changelog))
    whole = [a + b for a, b in zip(prepares, commits, strict=True)]
    return {
        "changes": changes,
        "rows_out": rows_out,
        "plain": {
            **figure(summarise(whole), sum(moved) // len(moved), plan.bandwidth),
            "prepare_ms": summarise(prepares),
            "commit_ms": summarise(commits),
            "changes_per_second": changes * len(whole) / (sum(whole) / 1e3),
        },
        "watched": split(watched, changes),
    }


def _must_move(tables: tuple[pa.Table, ...], out: pa.Table) -> int:
    """Bytes read and written at least.

    Rows in and out once each; for each change its entries in two indexes, and six sectors: of a directory, a run and
    the keys for a lookup in the other inputs, and the same for its own row.
    """
    lookups = sum(table.num_rows for table in tables) * (6 * SECTOR + 2 * 2 * 8)
    return 2 * sum(table.nbytes for table in tables) + 2 * out.nbytes + lookups
