"""Association counts over a micro-batch, and where they cross zero.

A row's count over the micro-batch is its count before it plus the running sum of the pairs that come and go, sorted by
row and instant: a segmented cumulative sum. What happens at one instant is one *moment*: for a row with count 1 whose
only match goes at instant 4 and whose next one comes at instant 7,

    moments   (row, 4)  (row, 7)
    before       1         0
    after        0         1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Instants, Positions, value_changes


@dataclasses.dataclass(frozen=True)
class Moments:
    """n instants at which something happens to a row, by row and instant: arrays of n, but for `opening`, `base`."""

    start: Positions
    """Position of the moment's first event."""
    last: Positions
    """Position of its last event."""
    rows: Array
    """Whose moment it is."""
    instants: Instants
    """When."""
    opening: Positions
    """Which of the moments are the first ones of their rows."""
    after: Array
    """The row's count after it."""
    row: Array
    """Number of its row among those that anything happens to."""
    base: Array
    """The count before the micro-batch, of each of these rows."""

    def switches(self, xp: Any, state: Array, initial: Array) -> Positions:
        """Moments at which something about the row switches.

        Args:
            xp: numpy or cupy.
            state: n flags, how it is after each moment.
            initial: how it was before, of each row.
        """
        before = xp.empty(state.size, bool)
        before[1:] = state[:-1]
        before[self.opening] = initial
        return xp.flatnonzero(state != before)


def moments(xp: Any, owned: Array, deltas: Array, base: Callable[[Positions], Array]) -> Moments:
    """Counts after each moment.

    Args:
        xp: numpy or cupy.
        owned: n events, ascending: whose count each moves and when, in one number of `gpu_ops.layouts.owned`.
        deltas: n numbers by which.
        base: gives the counts before the micro-batch, of the rows of some events.
    """
    start = xp.flatnonzero(value_changes(xp, owned))
    rows, instants = layouts.unowned(owned[start])
    opens = value_changes(xp, rows)
    opening = xp.flatnonzero(opens)
    last = xp.empty(start.size, np.int64)
    last[:-1] = start[1:] - 1
    last[-1:] = owned.size - 1
    moved = xp.cumsum(deltas)
    row_starts = start[opening]
    before = base(row_starts).astype(np.int64)
    offset = before - xp.where(row_starts > 0, moved[row_starts - 1], 0)
    row = xp.cumsum(opens) - 1
    return Moments(start, last, rows, instants, opening, moved[last] + offset[row], row, before)


def flickers(xp: Any, rows: Array, changes: Array) -> Array:
    """Mask of switches, by row and time, that undo each other within one change (an upsert takes and gives back).

    Args:
        xp: numpy or cupy.
        rows: n, whose switch it is.
        changes: n, the change that did it; negative where it does not count, whatever the other one is.
    """
    twin = (rows[1:] == rows[:-1]) & (changes[1:] == changes[:-1]) & (changes[1:] >= 0)
    mask = xp.zeros(rows.size, bool)
    mask[1:] |= twin
    mask[:-1] |= twin
    return mask
