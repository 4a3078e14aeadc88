"""The latest row of each key, after Flink's ``ProcTimeDeduplicateKeepLastRowFunction``.

Law: of each key the row that the last change brought is in the result, unless that change took it away.

Row kinds (``per_event``): the first row of a key is ``+I``; one that replaces another ``-U`` and ``+U``; one that is
taken away ``-D``. Where Flink says nothing, as a row is replaced by an equal one, there is a pair of equal rows here.
``per_batch`` emits ``-D`` for what leaves, ``+I`` for what comes, and nothing for a row that is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_ops.arrays import Array, Positions
from gpu_ops.descriptions.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.latest import Latest
from gpu_ops.kernels import Frame, Kernels, as_slots
from gpu_ops.operators.core.emission import JOINED, OutputRows, in_order, net_rows
from gpu_ops.operators.core.lifetimes import Lifetimes
from gpu_ops.operators.keyed import KeyedOperator
from gpu_ops.operators.operator import TooMuch
from gpu_ops.state.columns import KeySet
from gpu_ops.state.keyed_table import KeyedTable


def make(described: Description, kernels: Kernels, too_much: TooMuch) -> LatestRows:
    """See `gpu_ops.operators.operator.Make`."""
    del too_much
    assert isinstance(described, Latest)
    return LatestRows(described, kernels)


class LatestRows(KeyedOperator):
    """The rows there are, by their key.

    Args:
        join: the description.
        kernels: the backend.
    """

    def __init__(self, join: Latest, kernels: Kernels) -> None:
        super().__init__(join, kernels)
        types = tuple(join.source.schema.field(column).type for column in join.key)
        self.tables = (KeyedTable(kernels, join.source, [KeySet(join.key, types, ())], findable=True),)

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> None:
        """Nothing beyond the lifetimes of the rows."""

    def rows(self, found: None, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Each row that comes, and each that goes."""
        del found
        kernels, xp, (side,) = self.kernels, self.kernels.xp, sides
        if event_kinds is None:
            return net_rows(xp, [(side.killed,)], [(as_slots(kernels, side.first_new, side.new),)])
        slots, instants, signs = side.events(kernels)
        # a change takes the old row at one instant and brings the new one at the next
        comes, goes = xp.zeros(event_kinds.size + 1, bool), xp.zeros(event_kinds.size + 1, bool)
        comes[instants[signs > 0]] = True
        goes[instants[signs < 0]] = True
        new = xp.where(goes[xp.maximum(instants - 1, 0)], np.int8(UPDATE_AFTER), np.int8(INSERT))
        old = xp.where(comes[instants + 1], np.int8(UPDATE_BEFORE), np.int8(DELETE))
        return in_order(kernels, [(OutputRows(xp.where(signs > 0, new, old), (slots,), instants), JOINED)])

    def may_cancel(self, rows: OutputRows, sides: Sequence[Lifetimes], frame: Frame) -> Positions:
        """Any: a row may be replaced by an equal one."""
        del sides, frame
        return self.kernels.xp.arange(rows.size, dtype=np.int64)
