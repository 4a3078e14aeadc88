"""Which rows are equal, by CUDA kernels of our own: keys are compared where they lie, and nothing is gathered.

They know columns of a fixed width without nulls, both of one type, a few of them: what most keys are. All else is
gathered and compared by `cpu_fallback.search`, with the same result.
"""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pyarrow as pa

from cpu_fallback import search
from gpu_ops import layouts
from gpu_ops.arrays import Array, ArrowTypes, Hashes, Positions, Slots
from gpu_ops.cudf_backend.device import LIMITS, address, launch
from gpu_ops.cudf_backend.frame import Frame, lanes_of
from gpu_ops.cudf_backend.storage import decoded, storage_type
from gpu_ops.cudf_backend.store import CudfStore
from gpu_ops.kernels import Among, Columns, Kernels, Neighbours

MOST_SEGMENTS, MOST_COLUMNS = LIMITS["MOST_SEGMENTS"], LIMITS["COMPARED_COLUMNS"]
"""Of one launch."""

ROWS = np.dtype(
    [
        ("segments", np.int64),
        ("rows", np.uint64),
        ("starts", np.int64, MOST_SEGMENTS),
        ("data", np.uint64, (MOST_COLUMNS, MOST_SEGMENTS)),
    ]
)
COMPARED = np.dtype([("columns", np.int64), ("widths", np.int64, MOST_COLUMNS), ("one", ROWS), ("other", ROWS)])


def _source(columns: Columns) -> tuple[list[pa.DataType], list[list[Any]], list[int]] | None:
    """Types of columns, and of each segment its columns and its first row; None for what the kernels do not know."""
    source = columns.source
    kinds = [decoded(source.types[name]) for name in columns.names]
    if isinstance(source, Frame):
        segments, starts = [[source.columns[name] for name in columns.names]], [0]
    else:
        assert isinstance(source, CudfStore)
        if source.cold is not None:
            return None
        segments, starts = source.columns_by_segment(columns.names)
    known = 0 < len(segments) <= MOST_SEGMENTS
    if not known or any(not column.size() or column.null_count() for segment in segments for column in segment):
        return None
    return kinds, segments, starts


def compared(types: ArrowTypes, columns: tuple[Columns, Columns]) -> Any | None:
    """Packs the columns of two sides for our kernels, one element of `COMPARED`; None for types they do not know."""
    if not types or len(types) > MOST_COLUMNS:
        return None
    made = np.zeros(1, COMPARED)
    made["columns"][0] = len(types)
    found = []
    for name, side in zip(("one", "other"), columns, strict=True):
        source = _source(side)
        if source is None:
            return None
        kinds, segments, starts = source
        found.append(kinds)
        told = made[name]
        told["segments"][0], told["starts"][0, : len(starts)] = len(starts), starts
        told["rows"][0] = 0 if side.rows is None else address(side.rows)
        for column, kind in enumerate(kinds):
            lanes = lanes_of(kind)
            if lanes is None:
                return None
            width = np.dtype(lanes[0]).itemsize * lanes[1]
            made["widths"][0, column] = -width if pa.types.is_floating(storage_type(kind)) else width
            for number, segment in enumerate(segments):
                stored = segment[column]
                told["data"][0, column, number] = stored.data().ptr + stored.offset() * width
    return made if found[0] == found[1] == [decoded(kind) for kind in types] else None


def equal_at(
    kernels: Kernels,
    types: ArrowTypes,
    one: tuple[Columns, Array],
    other: tuple[Columns, Array],
    where: Array | None = None,
) -> Array:
    """Compares rows by our kernel; see `gpu_ops.kernels.Kernels.equal_at`."""
    (first, rows), (second, slots) = one, other
    size = int(rows.size)
    by = compared(types, (first, second)) if size else None
    if by is None:
        return search.equal_at(kernels, types, one, other, where)
    out = cp.empty(size, bool)
    looked = out if where is None else where
    launch("compare_rows", size, by, np.int64(size), rows, slots, looked, np.bool_(where is None), out)
    return out


def states_of(among: Among | None, pairs: Array) -> tuple[Any, ...]:
    """Gives what kernels get of the rows that count; where all do, an array that nobody reads."""
    if among is None:
        return pairs.view(np.int8), np.bool_(True), np.int64(0), np.int64(0)
    return among.states, np.bool_(False), np.int64(among.least), np.int64(among.most)


def matches(
    kernels: Kernels,
    types: ArrowTypes,
    pairs: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    by_candidate: bool = False,
) -> tuple[Array, Slots]:
    """Marks the candidates that match, and sorts them; see `gpu_ops.kernels.Kernels.matches`."""
    size = int(pairs.size)
    by = compared(types, columns) if size else None
    if by is None:
        return search.matches(kernels, types, pairs, columns, among, by_candidate=by_candidate)
    mask = cp.empty(size, bool)
    shape = by, np.int64(size), pairs, np.bool_(by_candidate)
    launch("mark_matches", size, *shape, *states_of(among, pairs), mask)
    kept = cp.compress(mask, pairs)
    kept.sort()
    first, second = kernels.fused(layouts.unpaired)(kept)
    return (second, first) if by_candidate else (first, second)


def sole_matches(
    kernels: Kernels,
    types: ArrowTypes,
    pairs: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    size: int,
) -> Slots:
    """Writes each row's only match; see `gpu_ops.kernels.Kernels.sole_matches`. The host need not learn how many."""
    by = compared(types, columns) if pairs.size else None
    if by is None:
        return search.sole_matches(kernels, types, pairs, columns, among, size=size)
    found: Slots = cp.full(size, -1, np.int64)
    count = int(pairs.size)
    launch("put_matches", count, by, np.int64(count), pairs, *states_of(among, pairs), found)
    return found


def neighbours(types: ArrowTypes, own: Columns, hashes: Hashes, flags: Array) -> Neighbours | None:
    """Puts rows side by side; see `gpu_ops.kernels.Kernels.neighbours`. The host learns nothing."""
    size = int(hashes.size)
    by = compared(types, (own, own)) if size else None
    if by is None:
        return None
    bits, scratch = np.int64(size.bit_length()), cp.empty(2 * size + (3 * size + 7) // 8, np.int64)
    packed, order, small = scratch[:size].view(np.uint64), scratch[size : 2 * size], scratch[2 * size :].view(np.int8)
    mine, before, last = small[:size].view(bool), small[size : 2 * size], small[2 * size : 3 * size].view(bool)
    launch("pack_positions", size, hashes, np.int64(size), bits, packed)
    packed.sort()
    launch("find_neighbours", size, by, packed, np.int64(size), bits, flags, order, mine, before, last)
    return Neighbours(order, mine, before, last)


def grouped(
    kernels: Kernels, types: ArrowTypes, own: Columns, hashes: Hashes
) -> tuple[Positions, Positions, Array, Positions]:
    """Groups equal rows; see `gpu_ops.kernels.Kernels.grouped`. The host learns two numbers in one look."""
    size = int(hashes.size)
    if not size:
        return search.grouped(kernels, types, own, hashes)
    by, bits = compared(types, (own, own)), np.int64(size.bit_length())
    known = by is not None
    scratch = cp.empty(4 * size + 1, np.int64)  # of all four at once: each of its own is a call
    packed, order, begins = scratch[:size].view(np.uint64), scratch[size : 2 * size], scratch[2 * size : 3 * size]
    launch("pack_positions", size, hashes, np.int64(size), bits, packed)
    packed.sort()
    told = by if known else np.zeros(1, COMPARED)
    launch("begin_groups", size, told, packed, np.int64(size), bits, order, begins)
    running = cp.cumsum(begins)
    total = int(running[-1])
    groups, parted = total & 0xFFFFFFFF, total >> 32
    group, bounds = begins, scratch[3 * size : 3 * size + groups + 1]  # there are at most as many as rows
    launch("number_groups", size, running, np.int64(size), group, bounds)
    unlike: Positions = order[:0]
    if parted:  # where the count of them grows
        unlike = cp.searchsorted(running >> 32, cp.arange(1, parted + 1, dtype=np.int64), side="left")
    elif not known and groups < size:
        rest = cp.flatnonzero(group[1:] == group[:-1]) + 1
        same = search.equal_at(kernels, types, (own, order[rest]), (own, order[rest - 1]))
        unlike = rest[:0] if same.all() else rest[~same]
    return order, bounds, group, unlike
