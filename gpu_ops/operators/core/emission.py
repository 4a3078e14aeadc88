"""Rows on their way out: which state rows they are made of, of what kind, and in what order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, Slots
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.kernels import Frame, Kernels
from gpu_ops.operators.core.order import Groups, within

# Order within one instant: a pad's retraction comes before the rows that replace it, a pad after
# the rows it replaces.
PAD_GOES, JOINED, PAD_COMES = 0, 1, 2


@dataclasses.dataclass
class OutputRows:
    """N rows that enter or leave the result: parallel arrays.

    A left row in slot 3 that loses its pad because change 5 brings its first match, in slot 8:

        kinds     [DELETE, INSERT]
        slots    ([3,      3     ],
                  [-1,     8     ])
        instants  [11,     11    ]
    """

    kinds: Array
    """In host memory where `net_rows` made them: only the host looks at them."""
    slots: tuple[Slots, ...]
    """Of each input; -1 stands for a row of nulls."""
    instants: Instants

    @property
    def size(self) -> int:
        """How many."""
        return int(self.kinds.size)

    def pick(self, positions: Positions) -> OutputRows:
        """Some of the rows, in the order given."""
        slots = tuple(s[positions] for s in self.slots)
        return OutputRows(self.kinds[positions], slots, self.instants[positions])


def left_right(side: int, own: Any, other: Any) -> tuple[Any, Any]:
    """What belongs to one of two inputs, and what to the other: the left's first."""
    return (own, other) if side == 0 else (other, own)


def with_nulls(xp: Any, side: int, slots: Slots) -> tuple[Slots, Slots]:
    """Left and right slots of rows of one side, beside nulls of the other."""
    return left_right(side, slots, xp.full(slots.size, -1, np.int64))


def chained(kernels: Kernels, parts: Sequence[OutputRows]) -> OutputRows:
    """Several groups of rows, one after the other."""
    cat = kernels.xp.concatenate
    slots = tuple(cat(of_input) for of_input in zip(*(p.slots for p in parts), strict=True))
    return OutputRows(cat([p.kinds for p in parts]), slots, cat([p.instants for p in parts]))


def in_order(kernels: Kernels, parts: Sequence[tuple[OutputRows, int]]) -> OutputRows:
    """Groups of rows, each with a rank: by the event that caused a row, then by rank, else as they stand."""
    rows = chained(kernels, [part for part, _ in parts])
    ranks = kernels.xp.concatenate([kernels.xp.full(part.size, rank, np.int64) for part, rank in parts])
    return rows.pick(layouts.sorted_positions(kernels.xp, (rows.instants << layouts.RANK_BITS) | ranks))


def net_rows(xp: Any, leaving: Sequence[tuple[Slots, ...]], coming: Sequence[tuple[Slots, ...]]) -> OutputRows:
    """The rows of a net change, by the slots of each input; those that leave first, all at one instant."""
    slots = tuple(xp.concatenate(of_input) for of_input in zip(*leaving, *coming, strict=True))
    kinds = np.full(slots[0].size, INSERT, np.int8)
    kinds[: sum(int(slots_of_rows[0].size) for slots_of_rows in leaving)] = DELETE
    return OutputRows(kinds, slots, xp.zeros(kinds.size, np.int64))


def fold(
    kernels: Kernels, frame: Frame, removes: Array, columns: tuple[str, ...], types: tuple[pa.DataType, ...]
) -> Positions:
    """Positions of the rows that are left when equal rows added and removed cancel each other.

    Args:
        kernels: the backend.
        frame: the rows' values.
        removes: mask of rows that remove; the others add.
        columns: the columns compared.
        types: their types.
    """
    xp = kernels.xp
    hashes = kernels.hash_rows(frame, columns, types)
    groups = Groups(kernels, frame, columns, types, hashes)
    number = int(groups.leader.size)
    sign = xp.where(removes[groups.order], -1, 1)
    net = xp.zeros(number, np.int64)
    kernels.scatter_add(net, groups.group, sign)
    # of each group, the first |net| rows that point the net's way
    right_way = sign * net[groups.group] > 0
    kept = xp.flatnonzero(right_way & (within(xp, groups, right_way) < xp.abs(net)[groups.group]))
    return xp.sort(groups.order[kept])
