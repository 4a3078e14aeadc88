"""The lookup join, after Flink's ``TemporalProcessTimeJoinOperator``.

Law: a left row comes out once, in its micro-batch, with each row of its key that the table has when the micro-batch's
changes of the table are done; or, of a left join, with nulls if there is none. Nothing changes what came out. All rows
are ``+I``, in the order of the left rows, which are gone once the micro-batch is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_ops import layouts
from gpu_ops.arrays import Array, Slots
from gpu_ops.descriptions.changelog import INSERT
from gpu_ops.descriptions.join import LookupJoin
from gpu_ops.kernels import Kernels, as_slots
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.emission import (
    OutputRows,
    PairRequest,
    probe,
)
from gpu_ops.operators.keyed import KeyedOperator, side_table
from gpu_ops.state.keyed_table import KeyedTable


class LookupOperator(KeyedOperator):
    """Left rows with the rows that a table has now.

    Args:
        description: the description.
        kernels: the backend.
    """

    description: LookupJoin
    tables: tuple[KeyedTable, KeyedTable]

    def __init__(self, description: LookupJoin, kernels: Kernels) -> None:
        super().__init__(description, kernels)
        self.null_sides = (False, description.how == "left")
        self.tables = side_table(description, kernels, 0, findable=False), side_table(description, kernels, 1)

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> tuple[Slots, Slots]:
        """Left and right slots of the pairs."""
        request = PairRequest(
            self.description.condition, (self.description.left.name, self.description.right.name), self.check_output
        )
        return probe(self.tables, (sides[0], sides[1]), 0, request, dying=False)

    def rows(self, matches: tuple[Slots, Slots], sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """The pairs, and left rows without one, in the order of the left rows."""
        (left, right), xp, (side, _) = matches, self.kernels.xp, sides
        new = as_slots(self.kernels, side.first_new, side.new)
        self.tables[0].end_stillborn(new)
        if self.description.how == "left":
            alone = xp.ones(new.size, bool)
            alone[left - side.first_new] = False
            unmatched = new[xp.flatnonzero(alone)]
            left, right = (
                xp.concatenate([left, unmatched]),
                xp.concatenate([right, xp.full(unmatched.size, -1, np.int64)]),
            )
        # the number of a right row, one higher, so that there is room for none
        order = self.kernels.argsort(layouts.pairs(left, right + 1))
        left, right = left[order], right[order]
        return OutputRows(np.full(left.size, INSERT, np.int8), (left, right), xp.zeros(left.size, np.int64))


make = LookupOperator
