"""How many different values a group has: each value of a group is kept once, with the number of its rows.

That is Flink's ``DistinctAggregate`` over its ``MapView``. A value counts while that number is not zero, so the count
moves where it crosses zero.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gpu_ops.arrays import Array
from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.key_table import KeyTable
from gpu_ops.operators.groups.aggregate.step import Step
from gpu_ops.operators.groups.aggregate.timeline import Timeline

GROUP_NUMBER = "number"
"""Beside a group: what its values know it by, from 1; slots change."""
GROUP, _ROWS = "group", "rows"


def value_table(kernels: Kernels, kind: pa.DataType, name: str, *, forgets: bool) -> KeyTable:
    """An empty table of values.

    Args:
        kernels: the backend.
        kind: their type.
        name: for errors.
        forgets: whether groups are forgotten, and their values with them.
    """
    schema = pa.schema([(GROUP, pa.int64()), (name if name != GROUP else f"{name}_", kind)])
    return KeyTable(kernels, schema, {_ROWS: np.int64}, name, by_first=forgets)


def crossings(step: Step, table: KeyTable, column: str) -> Array:
    """By how much each event moves the number of different values: 1, -1 or 0; moves the values' own numbers.

    Args:
        step: the micro-batch.
        table: the values there are.
        column: whose values they are.
    """
    kernels, xp, rows = step.kernels, step.xp, step.rows
    deltas = xp.zeros(step.row.size, np.int64)
    there = step.there(column)
    known = xp.arange(rows.group.size, dtype=np.int64) if there is None else xp.flatnonzero(there)
    if not known.size:
        return deltas
    numbers = step.base(GROUP_NUMBER)[rows.group[known]]
    own = kernels.frame(pa.table({GROUP: pa.array(kernels.asnumpy(numbers))}))
    values = kernels.take(rows.frame, known, [column], present=True)
    name = table.source.schema.names[1]
    found = table.locate(kernels.combine([(GROUP, own, GROUP), (name, values, column)]))
    place = xp.full(rows.group.size, -1, np.int64)
    place[known] = found.number
    value = place[step.row]
    events = xp.flatnonzero(value >= 0)
    line = Timeline(kernels, found.slots, value[events], step.instants[events], net=False)
    signs = xp.ones(events.size, np.int64) if step.sign is None else step.sign[events]
    before, after = line.summed(line.moves(signs), base := table.beside[_ROWS].values[found.slots])
    left = line.final(after)
    table.put(_ROWS, found.slots, left, base)
    table.end(found.slots[left == 0])
    deltas[events[line.order]] = (after > 0).astype(np.int64) - (before > 0)
    return deltas
