"""The join of one part of two inputs at their end, without any state.

Where rows are found by keys, their hashes are merged in sorted order, on a GPU by libcudf's hash join. Hashes may
collide, so what they pair is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Positions, Slots
from gpu_ops.descriptions.changelog import INSERT
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.ingest import Ingested
from gpu_ops.kernels import Columns, Frame, Kernels, Store, TooMany
from gpu_ops.operators.core.changes import apply_changes, on_device
from gpu_ops.operators.core.emission import with_nulls
from gpu_ops.operators.core.match import fulfilling, in_pieces, match
from gpu_ops.operators.core.order import Groups
from gpu_ops.operators.operator import Room
from gpu_ops.output import (
    Changelog,
    changelog_table,
    gathered,
)
from gpu_ops.state.keyed_table import KeyedTable
from gpu_ops.state.table import KeySet


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

    def take(self, slots: Slots, columns: Sequence[str], *, present: bool = False, nulls: int | None = None) -> Frame:
        """Gathers rows like `gpu_ops.kernels.Store.take`."""
        return self._kernels.take(self._frame, cast("Positions", slots), columns, present=present or nulls == 0)


def present_rows(kernels: Kernels, source: Input, changes: Ingested) -> Present:
    """Folds an input's changes to the rows that are left."""
    frame = changes.frame(kernels)
    if source.insert_only:
        return Present(kernels, source, FrameStore(kernels, frame), changes.kinds.size)
    table = KeyedTable(kernels, source, [KeySet((), (), ())], findable=True)
    (what,) = on_device([table], [changes], net=True)
    apply_changes(table, frame, what, None, net=True)
    return Present(kernels, source, table.store, len(table))


def merge_join(description: Join, kernels: Kernels, changes: Sequence[Ingested], room: Room) -> Changelog:
    """The join of two inputs, as insertions.

    Args:
        description: its description.
        kernels: the backend.
        changes: of both inputs, each in order.
        room: that memory has for them.

    Raises:
        StateError: there is none for so many.
    """
    xp = kernels.xp
    sides = [present_rows(kernels, s, c) for s, c in zip(description.inputs, changes, strict=True)]
    one_sided, rows = description.how in ("semi", "anti"), 0
    row_bytes = 32 + sum(c.table.nbytes / max(1, c.table.num_rows) for c in changes)
    matched = [xp.zeros(side.length, bool) for side in sides]
    parts: list[tuple[Slots, Slots]] = []
    for left, right in _pairs(description, kernels, sides):
        matched[0][left] = True
        matched[1][right] = True
        if not one_sided:
            parts.append((left, right))
            rows += int(left.size)
            room.check_output(rows, row_bytes)
    shown = (description.how == "anti", False) if one_sided else description.outer
    if description.how == "semi":
        parts.append(with_nulls(xp, 0, xp.flatnonzero(matched[0])))
    parts += [with_nulls(xp, side, xp.flatnonzero(~matched[side])) for side in (0, 1) if shown[side]]
    slots_out = [xp.concatenate([xp.empty(0, np.int64), *of_input]) for of_input in zip(*parts, strict=True)]
    kinds = np.full(slots_out[0].size, INSERT, np.int8)
    return changelog_table(description, kernels, gathered(description, kernels, sides, slots_out), kinds)


def _pairs(description: Join, kernels: Kernels, sides: Sequence[Present]) -> Iterator[tuple[Slots, Slots]]:
    """Matching rows, piece by piece; of a semi or anti join without a residual condition all left ones, at least."""
    xp = kernels.xp
    keys, hashes, able = [], [], []
    for side, present in enumerate(sides):
        names = description.key_columns(side)
        slots = xp.arange(present.length, dtype=np.int64)
        frame = present.store.take(slots, names, present=True)
        strict = description.key_columns(side, strict=True)
        valid = kernels.valid(frame, strict) if strict else None
        keys.append(frame)
        hashes.append(kernels.hash_rows(frame, names, description.key_types))
        able.append(slots if valid is None else slots[valid])
    left, right = (layouts.entries(hashes[side][able[side]], able[side]) for side in (0, 1))

    def residual(left: Slots, right: Slots) -> Positions | None:
        rows = zip(description.inputs, sides, (left, right), strict=True)
        return fulfilling(kernels, description.condition, {s.name: (p.store, at) for s, p, at in rows}, int(left.size))

    of_left, of_right = (Columns(keys[side], description.key_columns(side)) for side in (0, 1))
    # where memory has room for so many rows at once, it has for as many pairs
    most_pairs = 0 if kernels.host is None else int(left.size + right.size)
    pieces: Iterable[Array] = in_pieces(
        kernels, left, lambda some, most: kernels.join(some, right, at_most=most), most_pairs
    )
    if description.how in ("semi", "anti") and description.condition is None:
        try:
            pieces = [kernels.join(left, right, at_most=int(left.size + right.size))]
        except TooMany:  # of each key one row is enough
            names = description.key_columns(1)
            own = Groups(kernels, keys[1], names, description.key_types, hashes[1])
            first = xp.zeros(sides[1].length, bool)
            first[own.leader] = True
            able[1] = able[1][first[able[1]]]
            right = layouts.entries(hashes[1][able[1]], able[1])
    for candidates in pieces:
        pairs = layouts.unpaired(kernels.sort(candidates))
        yield match(kernels, pairs, description.key_types, (of_left, of_right), residual=residual)
