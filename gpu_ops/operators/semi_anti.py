"""Semi and anti joins by key, ``NOT IN`` included, after Flink's ``StreamingSemiAntiJoinOperator``.

Law: a left row is in a semi join's result while it lives and its association count is not zero, in an anti join's while
it lives and the count is zero (`core.visibility`).

Row kinds (``per_event``): a change of the left row itself keeps its kind. A change of the right gives
its own kind to a semi join's rows, and ``-D`` and ``+I`` to an anti join's.

``NOT IN`` over nullable columns (null-aware anti): a null on the right makes the comparison unknown for
every left row, so none is in the result while there is one; a left row whose own key is null is in
the result only while the right is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, LogicalTimes
from gpu_ops.conditions import backquoted, of_tree, parse
from gpu_ops.descriptions.changelog import DELETE, INSERT
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.changes import Lifetimes
from gpu_ops.operators.core.emission import (
    JOINED,
    OutputRows,
    in_order,
    net_rows,
    row_parts,
    with_nulls,
)
from gpu_ops.operators.core.visibility import Barrier, NetVisibility, VisibilityChanges, When
from gpu_ops.operators.keyed import TwoWayJoin
from gpu_ops.state.keyed_table import KeyedTable

_Visible = VisibilityChanges | NetVisibility
"""Each change of visibility; or rows that stop being visible, and those that become it."""


class SemiAntiJoin(TwoWayJoin):
    """See `gpu_ops.operators.keyed.TwoWayJoin`."""

    def find(self, sides: Sequence[Lifetimes], *, net: bool) -> _Visible:
        """Left rows that become visible or stop being it; association counts are moved here."""
        pairs = self.pairs(sides, net=net, needed=False)
        barriers = _barriers(self.tables[1], sides[1]) if self.description.null_aware else None
        changes: _Visible = self.visible(0, sides, pairs, When(self.description.how == "anti", barriers), net=net)
        return changes

    def rows(self, matches: _Visible, sides: Sequence[Lifetimes], event_kinds: Array | None) -> OutputRows:
        """Makes output rows of the changes of visibility that `find` gives."""
        xp = self.kernels.xp
        if isinstance(matches, tuple):
            hides, shows = matches
            return net_rows(self.kernels, row_parts(0, hides), row_parts(0, shows), present=True)
        assert event_kinds is not None
        kinds = event_kinds[matches.logical_times]
        if self.description.how == "anti":
            kinds = xp.where(matches.by_own_change, kinds, xp.where(matches.appears, np.int8(INSERT), np.int8(DELETE)))
        return in_order(
            self.kernels, [(OutputRows(kinds, with_nulls(xp, 0, matches.slots), matches.logical_times), JOINED)]
        )


def _barriers(right: KeyedTable, change: Lifetimes) -> tuple[Barrier, Barrier]:
    """Counts right rows without a key, and all right rows, over the micro-batch."""
    kernels, xp = right.kernels, right.kernels.xp
    rows, when, step = change.events(kernels)
    order = kernels.argsort(when)
    rows, when, step = rows[order], when[order], step[order]
    valid = kernels.valid(right.store.take(rows, right.strict, present=True), right.strict)
    keyless = xp.zeros(rows.size, bool) if valid is None else ~valid
    at = xp.flatnonzero(keyless)
    return (_steps(xp, right.null_keys, when[at], step[at]), _steps(xp, right.live_before, when, step))


def _steps(xp: Any, before: int, logical_times: LogicalTimes, steps: Array) -> Barrier:
    """The step function, one step per logical time."""
    after = before + xp.cumsum(steps, dtype=np.int64)
    last = xp.ones(logical_times.size, bool)
    last[:-1] = logical_times[1:] != logical_times[:-1]
    return Barrier(before, logical_times[last], after[last])


def null_aware_as_condition(description: Join) -> Join:
    """``NOT IN`` written out: no key, but a condition that is not false where it is unknown.

    It compares every pair, which a lookup by key avoids; needed only for several columns, a residual condition
    or a TTL (Flink plans it so always: ``OR(IS NULL(k), IS NULL(k0), =(k, k0))``). What is compared null-safely
    is never unknown.
    """
    left, right = description.left.name, description.right.name

    def not_false(key: Key) -> str:
        a, b = (".".join(map(backquoted, names)) for names in ((left, key.left), (right, key.right)))
        return f"({a} <=> {b})" if key.null_safe else f"({a} IS NULL OR {b} IS NULL OR {a} = {b})"

    schemas, text = (
        {source.name: source.schema for source in description.inputs},
        " AND ".join(map(not_false, description.keys)),
    )
    condition, where = parse(text, schemas, ansi=description.ansi), description.condition
    if where is not None:  # its tree: not all of what Spark has read can be read from its text again
        roots, matters = [condition.root, where.root], condition.mode_matters or where.mode_matters
        condition = of_tree(f"{text} AND ({where})", roots, schemas, ansi=description.ansi, mode_matters=matters)
    return dataclasses.replace(description, keys=(), null_aware=False, where=condition)


def make_semi_anti(described: Join, kernels: Kernels) -> SemiAntiJoin:
    """Makes the operator; ``NOT IN`` is written out as a condition where no key serves to look rows up.

    Args:
        described: the join, semi or anti.
        kernels: the backend.
    """
    # NOT IN with more than one column or a residual condition has no key to look rows up by. With a TTL every match
    # is counted, those by null too: what they hid stays hidden when they expire, and is never taken back.
    expires = any(source.ttl_ms is not None for source in described.inputs)
    rewritten = described.null_aware and (len(described.keys) > 1 or described.where is not None or expires)
    return SemiAntiJoin(null_aware_as_condition(described) if rewritten else described, kernels, (True, False))
