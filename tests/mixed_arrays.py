"""What mypy must refuse: kinds of numbers that arrays hold, mixed up. It is run on this file with all others.

Nothing here runs. An ignored error that is none is an error itself (``warn_unused_ignores``, part of ``strict``).
"""

from __future__ import annotations

from gpu_ops.arrays import Hashes, LogicalTimes, Positions, Slots
from gpu_ops.kernels import Kernels, Store
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.state.index import HashIndex


def slots_and_positions(kernels: Kernels, store: Store, slots: Slots, positions: Positions) -> None:
    store.take(positions, ["k"])  # type: ignore[arg-type]
    kernels.take(store.take(slots, ["k"]), slots, ["k"])  # type: ignore[arg-type]
    store.take(slots[positions], ["k"])


def slots_and_logical_times(side: Lifetimes, slots: Slots) -> Slots:
    side.died(slots, side.births)  # type: ignore[arg-type]
    side.killed = side.killed_at  # type: ignore[assignment]
    return side.births[slots >= 0]  # type: ignore[return-value]


def slots_and_hashes(index: HashIndex, hashes: Hashes, slots: Slots) -> Slots:
    index.stage(slots, hashes)  # type: ignore[arg-type]
    return index.probe(hashes, staged=True)[0]  # type: ignore[return-value]


def logical_times_and_positions(logical_times: LogicalTimes, positions: Positions) -> bool:
    moments: LogicalTimes = positions  # type: ignore[assignment]
    return moments.size == logical_times.size
