"""One join as one, two or eight partitions on one card: a thread each in one process, as in a state server.

The rows and the changes are the same in all, so what more partitions cost is what their engines cost each other: calls
of the libraries from one interpreter, and work of the card that does not overlap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from benchmarks.common import LEAST_RUNS, summarise
from benchmarks.gpu.card import Plan
from benchmarks.gpu.feed import Feed, description
from benchmarks.gpu.steady import Case
from benchmarks.gpu.turns import wait_for
from gpu_ops.backends import Backend
from gpu_ops.join_engine import JoinEngine


def partitions(backend: Backend, count: int, case: Case, plan: Plan) -> dict[str, Any]:
    """Micro-batches, each done when all its partitions are.

    Args:
        backend: where.
        count: of partitions, which share the case's rows and changes.
        case: what runs.
        plan: how to measure; when its clock ends no further micro-batch begins, but `LEAST_RUNS` are counted.

    Raises:
        ValueError: the rows are too few for the micro-batches that a rate stands on.

    Returns:
        The case with ``partitions``, ``ms`` of a micro-batch, ``changes_per_second`` Arrow to Arrow.
    """
    feeds = [Feed(case.rows // 2 // count, case.changes // count, case.mix, seed=seed) for seed in range(count)]
    join = description(case.emit, unique=case.unique, insert_only=case.mix == "inserts")
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(contextlib.closing(JoinEngine(join, backend))) for _ in feeds]
        for engine, feed in zip(engines, feeds, strict=True):
            engine.restore(feed.start())
        most = min(case.warmup + case.batches, *(feed.most for feed in feeds))
        if most < case.warmup + LEAST_RUNS:
            raise ValueError(
                f"{most} micro-batches are no measurement: {case.warmup} warm up, {LEAST_RUNS} are counted"
            )
        given = list(zip(*(feed.batches(most) for feed in feeds), strict=True))
        pool, wait = stack.enter_context(ThreadPoolExecutor(count)), wait_for(engines[0])

        def process(engine: JoinEngine, pair: tuple[pa.Table, pa.Table]) -> int:
            rows: int = engine.process(*pair).num_rows
            return rows

        took, rows_out = [], 0
        for number, pairs in enumerate(given):
            if len(took) >= LEAST_RUNS and plan.clock.left() < 0:
                break
            wait()
            began = time.perf_counter()
            rows_out += sum(pool.map(process, engines, pairs))
            wait()
            if number >= case.warmup:
                took.append(1e3 * (time.perf_counter() - began))
    changes = sum(table.num_rows for pair in given[-1] for table in pair)
    return {
        **dataclasses.asdict(case),
        "partitions": count,
        "backend": backend,
        "rows_out": rows_out,
        "ms": summarise(took),
        "changes_per_second": changes * len(took) / (sum(took) / 1e3),
    }
