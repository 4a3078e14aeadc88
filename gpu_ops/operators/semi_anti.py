"""Semi and anti joins, after Flink's ``StreamingSemiAntiJoinOperator``; ``NOT IN`` included.

Law: a left row is in a semi join's result while it lives and its association count is not zero, in
an anti join's while it lives and the count is zero (`visibility`).

Row kinds (``per_event``): a change of the left row itself keeps its kind. A change of the right gives
its own kind to a semi join's rows, and ``-D`` and ``+I`` to an anti join's.

``NOT IN`` over nullable columns (null-aware anti): a null on the right makes the comparison unknown for
every left row, so none is in the result while there is one; a left row whose own key is null is in
the result only while the right is empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Instants
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.join import Join
from gpu_ops.kernels import as_slots
from gpu_ops.operators.core.emission import JOINED, Rows, in_order, net_rows
from gpu_ops.operators.core.lifetimes import NEVER, Lifetimes
from gpu_ops.operators.core.pairs import NetPairs, Pairs, Sides, Tables, TimedPairs
from gpu_ops.operators.core.visibility import Barrier, Changes, visible_per_batch, visible_per_event
from gpu_ops.state.keyed_table import KeyedTable


def emit(join: Join, tables: Tables, sides: Sides, pairs: Pairs, event_kinds: Array | None) -> Rows:
    """The changelog rows of one prepared micro-batch; arguments as `gpu_ops.operators.regular.emit`."""
    kernels, xp = tables[0].kernels, tables[0].kernels.xp
    barriers = _barriers(tables[1], sides[1]) if join.null_aware else None
    alone = join.how == "anti"
    if isinstance(pairs, NetPairs):
        hides, shows = visible_per_batch(tables[0], sides[0], pairs, 0, when_alone=alone, barriers=barriers)
        left = xp.concatenate([hides, shows])
        return net_rows(xp, left, xp.full(left.size, -1, np.int64), int(hides.size))
    assert isinstance(pairs, TimedPairs)
    assert event_kinds is not None
    found = visible_per_event(tables[0], sides[0], pairs, 0, when_alone=alone, barriers=barriers)
    kinds = event_kinds[found.instants]
    if join.how == "anti":
        kinds = xp.where(found.own, kinds, xp.where(found.appears, np.int8(INSERT), np.int8(DELETE)))
    return in_order(kernels, _rows(xp, found, kinds), xp.full(found.slots.size, JOINED, np.int64))


def _rows(xp: Any, found: Changes, kinds: Array) -> Rows:
    return Rows(kinds, found.slots, xp.full(found.slots.size, -1, np.int64), found.instants)


def _barriers(right: KeyedTable, change: Lifetimes) -> tuple[Barrier, Barrier]:
    """How many right rows without a key, and how many at all, there are over the micro-batch."""
    kernels, xp = right.kernels, right.kernels.xp
    new = as_slots(kernels, change.first_new, len(right) - change.first_new)
    slots, instants = [new, change.killed], [change.births, change.killed_at]
    steps = [xp.ones(new.size, np.int64), -xp.ones(change.killed.size, np.int64)]
    if change.deaths is not None:
        stillborn = xp.flatnonzero(change.deaths != NEVER)
        slots.append(new[stillborn])
        instants.append(change.deaths[stillborn])
        steps.append(-xp.ones(stillborn.size, np.int64))
    rows, when, step = (xp.concatenate(parts) for parts in (slots, instants, steps))
    order = kernels.argsort(when)
    rows, when, step = rows[order], when[order], step[order]
    valid = kernels.valid(right.store.take(rows, right.strict, present=True), right.strict)
    keyless = xp.zeros(rows.size, bool) if valid is None else ~valid
    at = xp.flatnonzero(keyless)
    return (
        _steps(xp, right.null_keys, when[at], step[at]),
        _steps(xp, right.live_before, when, step),
    )


def _steps(xp: Any, before: int, instants: Instants, steps: Array) -> Barrier:
    """The step function, one step per instant."""
    after = before + xp.cumsum(steps)
    last = xp.ones(instants.size, bool)
    last[:-1] = instants[1:] != instants[:-1]
    return Barrier(before, instants[last], after[last])
