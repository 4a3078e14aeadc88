"""Which rows are equal, in general: keys are gathered and compared, for types of any kind.

Written on arrays of either backend; the GPU's comes here for what its kernels do not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.kernels import Among, Columns, Frame, Kernels

Types = Sequence[pa.DataType]


def equal_at(
    kernels: Kernels, types: Types, one: tuple[Columns, Array], other: tuple[Columns, Array], where: Array | None = None
) -> Array:
    """See `gpu_ops.kernels.Kernels.equal_at`."""
    (first, rows), (second, slots), xp = one, other, kernels.xp
    if where is not None:
        at, equal = xp.flatnonzero(where), xp.zeros(where.size, bool)
        if at.size:
            equal[at] = equal_at(kernels, types, (first, rows[at]), (second, slots[at]))
        return equal
    return kernels.equal_rows(_taken(first, rows), first.names, _taken(second, slots), second.names, types)


def _taken(columns: Columns, rows: Array) -> Frame:
    wanted = rows if columns.rows is None else columns.rows[rows]
    return columns.source.take(wanted, columns.names, present=True)


def matches(
    kernels: Kernels,
    types: Types,
    pairs: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    by_candidate: bool = False,
) -> tuple[Array, Slots]:
    """See `gpu_ops.kernels.Kernels.matches`."""
    # One key per pair, sorted as a value: cheaper than an argsort and two gathers.
    pairs.sort()
    needle, slots = layouts.unpaired(pairs)
    if by_candidate:
        needle, slots = slots, needle
    mask = None
    if among is not None:
        states = among.states[slots]
        one = among.least == among.most
        mask = states == among.least if one else (states >= among.least) & (states <= among.most)
    if types and needle.size:
        same = equal_at(kernels, types, (columns[0], needle), (columns[1], slots))
        mask = same if mask is None else mask & same
    kept = None if mask is None else kernels.xp.flatnonzero(mask)
    return (needle, slots) if kept is None or kept.size == needle.size else (needle[kept], slots[kept])


def sole_matches(
    kernels: Kernels, types: Types, pairs: Array, columns: tuple[Columns, Columns], among: Among | None, *, size: int
) -> Slots:
    """See `gpu_ops.kernels.Kernels.sole_matches`."""
    needle, slots = matches(kernels, types, pairs, columns, among)
    found: Slots = kernels.xp.full(size, -1, np.int64)
    found[needle] = slots
    return found


def grouped(kernels: Kernels, types: Types, own: Columns, hashes: Hashes) -> tuple[Positions, Positions, Array, bool]:
    """See `gpu_ops.kernels.Kernels.grouped`."""
    xp, size = kernels.xp, int(hashes.size)
    # Positions in the lower bits: one sort of values, and few hashes are alike in what is left of them.
    bits = np.uint64(size.bit_length())
    lower = (np.uint64(1) << bits) - np.uint64(1)
    packed = hashes & ~lower
    packed |= xp.arange(size, dtype=np.uint64)
    packed.sort()
    order = (packed & lower).view(np.int64)
    packed >>= bits
    begins = xp.ones(size + 1, bool)
    xp.not_equal(packed[1:], packed[:-1], out=begins[1:-1])
    bounds, first = xp.flatnonzero(begins), begins[:-1]
    group = xp.cumsum(first) - 1
    rest = xp.flatnonzero(~first) if bounds.size <= size else first[:0]
    if 2 * int(rest.size) <= size:
        alike = not rest.size or bool(equal_at(kernels, types, (own, order[rest]), (own, order[rest - 1])).all())
        return order, bounds, group, alike
    # most rows have an equal one before them: each is gathered once
    sorted_ = _taken(own, order)
    same = kernels.equal_rows(sorted_.slice(1, size - 1), own.names, sorted_.slice(0, size - 1), own.names, types)
    return order, bounds, group, bool((same | first[1:]).all())
