"""How long a snapshot of the state holds a partition up: while what is new, and the numbers, are drained from the card.

It is written beside the micro-batches that follow; how long that takes is said, too. The first one has all rows, and is
not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from typing import Any

from benchmarks.common import summarise
from benchmarks.gpu.feed import Feed, description
from benchmarks.gpu.turns import wait_for
from gpu_ops.backends import Backend
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.server.recovery import RecoveredState, Snapshots
from gpu_ops.state.durable import NO_TIMES, PartitionLog, Stored
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def stall(backend: Backend, rows: int, changes: int, rounds: int) -> dict[str, Any]:
    """Micro-batches, and a snapshot after each, as a partition writes it.

    Args:
        backend: where.
        rows: of the state, both inputs together.
        changes: of a micro-batch.
        rounds: micro-batches, less one to warm up.

    Returns:
        ``micro_batch_ms``, ``drain_ms``, ``write_ms``, ``bytes`` written for the last, ``times``: draining over a
        micro-batch.
    """
    join = description("per_batch", unique=True)
    took: list[list[float]] = []
    with contextlib.closing(JoinEngine(join, backend)) as engine, tempfile.TemporaryDirectory() as folder:
        feed, wait = Feed(rows // 2, changes), wait_for(engine)
        log = PartitionLog(Files.at(folder), Manifest(join.to_json(), 1, "q"), 0)
        snapshots = Snapshots("benchmark", log, Stored({}, {}), 0, 1)
        engine.restore(feed.start())
        for number, pair in enumerate(feed.batches(min(feed.most, rounds + 1)), 1):
            wait()
            moments = [time.perf_counter()]
            engine.process(*pair)
            wait()
            moments.append(time.perf_counter())
            snapshots.stored.records[number - 1] = 1  # so that one is due
            snapshots.take(number, lambda: RecoveredState(engine.kept(), 0, NO_TIMES, backlog=False))
            moments.append(time.perf_counter())
            snapshots.finish()
            size = snapshots.metrics()["snapshot_written_bytes"]
            moments.append(time.perf_counter())
            if number > 1:
                took.append([1e3 * (b - a) for a, b in itertools.pairwise(moments)])
    batch, drain, write = (summarise(values) for values in zip(*took, strict=True))
    return {
        "rows": rows,
        "changes": changes,
        "micro_batch_ms": batch,
        "drain_ms": drain,
        "write_ms": write,
        "bytes": size,
        "times": drain.median / batch.median,
    }
