"""A two-way join of rows that are all there: one join of key hashes, no state.

What `at_end` does with a part of its input, where rows are found by keys: a sorted merge, on a GPU libcudf's hash
join. Hashes may collide, so what they pair is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Positions, Slots
from gpu_ops.descriptions.changelog import INSERT
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Columns, Frame, Kernels, Store
from gpu_ops.operators.core.changes import apply_changes, given
from gpu_ops.operators.core.emission import with_nulls
from gpu_ops.operators.core.match import fulfilling, match
from gpu_ops.output import Changelog, changelog_table, gathered
from gpu_ops.state.columns import KeySet
from gpu_ops.state.keyed_table import KeyedTable


class Present:
    """The rows of one input, as far as they are gathered from; see `gpu_ops.output.HasStore`."""

    def __init__(self, kernels: Kernels, source: Input, store: Store | FrameStore, length: int) -> None:
        self._kernels, self._source = kernels, source
        self.store: Any = store
        self.length = length

    def to_arrow(self) -> pa.Table:
        """The rows, of the input's schema."""
        slots = self._kernels.xp.arange(self.length, dtype=np.int64)
        return self._kernels.to_arrow(
            self.store.take(slots, self._source.schema.names, present=True), self._source.schema
        )


class FrameStore:
    """A frame's rows by slot."""

    def __init__(self, kernels: Kernels, frame: Frame) -> None:
        self._kernels, self._frame = kernels, frame

    def take(self, slots: Slots, columns: Sequence[str], *, present: bool = False) -> Frame:
        """As `gpu_ops.kernels.Store.take`."""
        return self._kernels.take(self._frame, cast("Positions", slots), columns, present=present)


def present_rows(kernels: Kernels, source: Input, changes: Ingested) -> Present:
    """What is left of an input's changes."""
    frame = changes.frame(kernels)
    if source.insert_only:
        return Present(kernels, source, FrameStore(kernels, frame), changes.kinds.size)
    table = KeyedTable(kernels, source, [KeySet((), (), ())], findable=True)
    (what,) = given([table], [changes], net=True)
    apply_changes(table, frame, what, None, net=True)
    return Present(kernels, source, table.store, len(table))


def merge_join(join: Join, kernels: Kernels, changes: Sequence[Ingested]) -> Changelog:
    """The join of two inputs, as insertions.

    Args:
        join: its description.
        kernels: the backend.
        changes: of both inputs, each in order.
    """
    xp = kernels.xp
    sides = [present_rows(kernels, s, c) for s, c in zip(join.inputs, changes, strict=True)]
    left, right = _pairs(join, kernels, sides)
    if join.how in ("semi", "anti"):
        matched = xp.zeros(sides[0].length, bool)
        matched[left] = True
        left = xp.flatnonzero(matched if join.how == "semi" else ~matched)
        right = xp.full(left.size, -1, np.int64)
    parts = [(left, right)]
    for side, outer in enumerate(join.outer):
        if outer:
            alone = xp.ones(sides[side].length, bool)
            alone[(left, right)[side]] = False
            slots = xp.flatnonzero(alone)
            parts.append(with_nulls(xp, side, slots))
    slots_out = [xp.concatenate(of_input) for of_input in zip(*parts, strict=True)]
    kinds = np.full(slots_out[0].size, INSERT, np.int8)
    return changelog_table(join, kernels, gathered(join, kernels, sides, slots_out), kinds)


def _pairs(join: Join, kernels: Kernels, sides: Sequence[Present]) -> tuple[Slots, Slots]:
    """Matching rows."""
    xp = kernels.xp
    keys, entries = [], []
    for side, present in enumerate(sides):
        names = join.key_columns(side)
        slots = xp.arange(present.length, dtype=np.int64)
        frame = present.store.take(slots, names, present=True)
        hashes = kernels.hash_rows(frame, names, join.key_types)
        strict = join.key_columns(side, strict=True)
        valid = kernels.valid(frame, strict) if strict else None
        if valid is not None:
            hashes, slots = hashes[valid], slots[valid]
        keys.append(frame)
        entries.append(layouts.entries(hashes, slots))
    candidates = layouts.unpaired(xp.sort(kernels.join(*entries)))

    def residual(left: Slots, right: Slots) -> Positions | None:
        rows = zip(join.inputs, sides, (left, right), strict=True)
        return fulfilling(kernels, join.condition, {s.name: (p.store, at) for s, p, at in rows}, int(left.size))

    of_left, of_right = (Columns(keys[side], join.key_columns(side)) for side in (0, 1))
    return match(kernels, candidates, join.key_types, (of_left, of_right), residual=residual)
