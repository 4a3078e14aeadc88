"""Which rows are equal, by CUDA kernels of our own: keys are compared where they lie, and nothing is gathered.

They know columns of a fixed width without nulls, both of one type, a few of them: what most keys are. All else is
gathered and compared by `cpu_fallback.matching`, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np
import pyarrow as pa

from cpu_fallback import matching
from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Positions, Slots
from gpu_ops.cudf_backend.device import address, launch
from gpu_ops.cudf_backend.frame import Frame, lanes_of
from gpu_ops.cudf_backend.storage import decoded, storage_type
from gpu_ops.cudf_backend.store import CudfStore
from gpu_ops.kernels import Among, Columns, Kernels

Types = Sequence[pa.DataType]

MOST_SEGMENTS = 48
MOST_COLUMNS = 3
"""Of one launch: their addresses travel with it, and it takes 4 KB of arguments."""

ROWS = np.dtype(
    [
        ("segments", np.int64),
        ("rows", np.uint64),
        ("starts", np.int64, MOST_SEGMENTS),
        ("data", np.uint64, (MOST_COLUMNS, MOST_SEGMENTS)),
    ]
)
COMPARED = np.dtype([("columns", np.int64), ("widths", np.int64, MOST_COLUMNS), ("one", ROWS), ("other", ROWS)])

SOURCE = (
    f"#define MOST_SEGMENTS {MOST_SEGMENTS}\n#define MOST_COLUMNS {MOST_COLUMNS}"
    """
typedef unsigned long long u64;
typedef long long i64;

struct Rows {
  i64 segments;
  const i64* rows;  // the row that each number stands for; null where the numbers are the rows
  i64 starts[MOST_SEGMENTS];  // the first row of each segment
  const unsigned char* data[MOST_COLUMNS][MOST_SEGMENTS];
};

struct Compared {
  i64 columns;
  i64 widths[MOST_COLUMNS];  // bytes of a value; negative where it is a float
  Rows one, other;
};

__device__ i64 segment_of(const Rows& in, i64 row) {
  i64 low = 0, high = in.segments - 1;
  while (low < high) {
    i64 middle = (low + high + 1) / 2;
    if (in.starts[middle] <= row) low = middle; else high = middle - 1;
  }
  return low;
}

// NaN equals NaN.
template <typename T> __device__ bool same_float(T a, T b) { return a == b || (a != a && b != b); }

__device__ bool same_value(const unsigned char* a, const unsigned char* b, i64 width) {
  switch (width) {
    case 1: return *a == *b;
    case 2: return *(const short*)a == *(const short*)b;
    case 4: return *(const int*)a == *(const int*)b;
    case 8: return *(const i64*)a == *(const i64*)b;
    case -4: return same_float(*(const float*)a, *(const float*)b);
    case -8: return same_float(*(const double*)a, *(const double*)b);
    default: return ((const i64*)a)[0] == ((const i64*)b)[0] && ((const i64*)a)[1] == ((const i64*)b)[1];
  }
}

__device__ bool same_row(const Compared& by, i64 number, i64 another) {
  if (!by.columns) return true;
  i64 row = by.one.rows ? by.one.rows[number] : number, slot = by.other.rows ? by.other.rows[another] : another;
  i64 part = segment_of(by.one, row), piece = segment_of(by.other, slot);
  row -= by.one.starts[part];
  slot -= by.other.starts[piece];
  for (i64 column = 0; column < by.columns; ++column) {
    i64 width = by.widths[column], bytes = width < 0 ? -width : width;
    const unsigned char* a = by.one.data[column][part] + row * bytes;
    const unsigned char* b = by.other.data[column][piece] + slot * bytes;
    if (!same_value(a, b, width)) return false;
  }
  return true;
}

__device__ bool is_match(
    const Compared& by, i64 needle, i64 slot, const signed char* states, bool all, i64 least, i64 most) {
  return (all || (states[slot] >= least && states[slot] <= most)) && same_row(by, needle, slot);
}

// One thread for a pair of rows.
extern "C" __global__ void compare_rows(
    Compared by, i64 size, const i64* rows, const i64* others, const bool* where, bool everywhere, bool* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at < size) out[at] = (everywhere || where[at]) && same_row(by, rows[at], others[at]);
}

// One thread for a candidate: a needle and a slot in one number.
extern "C" __global__ void mark_matches(
    Compared by, i64 size, const i64* pairs, bool by_candidate, const signed char* states, bool all, i64 least,
    i64 most, bool* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 first = pairs[at] >> 32, second = pairs[at] & 0xFFFFFFFFu;
  out[at] = is_match(by, by_candidate ? second : first, by_candidate ? first : second, states, all, least, most);
}

// The same, where no needle has more than one match.
extern "C" __global__ void put_matches(
    Compared by, i64 size, const i64* pairs, const signed char* states, bool all, i64 least, i64 most, i64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 needle = pairs[at] >> 32, slot = pairs[at] & 0xFFFFFFFFu;
  if (is_match(by, needle, slot, states, all, least, most)) out[needle] = slot;
}

// One thread for a row: its hash, the lowest bits of which give way to its position.
extern "C" __global__ void pack_positions(const u64* hashes, i64 size, i64 bits, u64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at < size) out[at] = (hashes[at] >> bits << bits) | (u64)at;
}

// Of such numbers, sorted: positions, and whether a hash begins; or else, in the upper half, whether the row is unlike
// the one before.
extern "C" __global__ void begin_groups(
    Compared by, const u64* packed, i64 size, i64 bits, i64* order, i64* begins) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  u64 lower = ((u64)1 << bits) - 1;
  i64 row = packed[at] & lower;
  order[at] = row;
  if (!at || packed[at] >> bits != packed[at - 1] >> bits) begins[at] = 1;
  else begins[at] = same_row(by, row, packed[at - 1] & lower) ? 0 : (i64)1 << 32;
}

// Of their running sum: each one's group, and where groups begin and end.
extern "C" __global__ void number_groups(const i64* running, i64 size, i64* group, i64* bounds) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 number = (running[at] & 0xFFFFFFFFu) - 1;
  group[at] = number;
  if (!at || (running[at - 1] & 0xFFFFFFFFu) - 1 != number) bounds[number] = at;
  if (at == size - 1) bounds[number + 1] = size;
}
"""
)


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


def _compared(types: Types, columns: tuple[Columns, Columns]) -> Any | None:
    """What the kernels get of columns that they know, one element of `COMPARED`; else None."""
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
    kernels: Kernels, types: Types, one: tuple[Columns, Array], other: tuple[Columns, Array], where: Array | None = None
) -> Array:
    """As `gpu_ops.kernels.Kernels.equal_at`."""
    (first, rows), (second, slots) = one, other
    size = int(rows.size)
    by = _compared(types, (first, second)) if size else None
    if by is None:
        return matching.equal_at(kernels, types, one, other, where)
    out = cp.empty(size, bool)
    looked = out if where is None else where
    launch(SOURCE, "compare_rows", size, by, np.int64(size), rows, slots, looked, np.bool_(where is None), out)
    return out


def _states(among: Among | None, pairs: Array) -> tuple[Any, ...]:
    if among is None:  # nobody reads them
        return pairs.view(np.int8), np.bool_(True), np.int64(0), np.int64(0)
    return among.states, np.bool_(False), np.int64(among.least), np.int64(among.most)


def matches(
    kernels: Kernels,
    types: Types,
    pairs: Array,
    columns: tuple[Columns, Columns],
    among: Among | None,
    *,
    by_candidate: bool = False,
) -> tuple[Array, Slots]:
    """As `gpu_ops.kernels.Kernels.matches`: what matches is marked, then sorted."""
    size = int(pairs.size)
    by = _compared(types, columns) if size else None
    if by is None:
        return matching.matches(kernels, types, pairs, columns, among, by_candidate=by_candidate)
    mask = cp.empty(size, bool)
    shape = by, np.int64(size), pairs, np.bool_(by_candidate)
    launch(SOURCE, "mark_matches", size, *shape, *_states(among, pairs), mask)
    kept = cp.compress(mask, pairs)
    kept.sort()
    first, second = kernels.fused(layouts.unpaired)(kept)
    return (second, first) if by_candidate else (first, second)


def sole_matches(
    kernels: Kernels, types: Types, pairs: Array, columns: tuple[Columns, Columns], among: Among | None, *, size: int
) -> Slots:
    """As `gpu_ops.kernels.Kernels.sole_matches`: the host need not learn how many there are."""
    by = _compared(types, columns) if pairs.size else None
    if by is None:
        return matching.sole_matches(kernels, types, pairs, columns, among, size=size)
    found: Slots = cp.full(size, -1, np.int64)
    count = int(pairs.size)
    launch(SOURCE, "put_matches", count, by, np.int64(count), pairs, *_states(among, pairs), found)
    return found


def grouped(kernels: Kernels, types: Types, own: Columns, hashes: Hashes) -> tuple[Positions, Positions, Array, bool]:
    """As `gpu_ops.kernels.Kernels.grouped`; the host learns two numbers in one look."""
    size = int(hashes.size)
    if not size:
        return matching.grouped(kernels, types, own, hashes)
    by, bits = _compared(types, (own, own)), np.int64(size.bit_length())
    known = by is not None
    packed = cp.empty(size, np.uint64)
    launch(SOURCE, "pack_positions", size, hashes, np.int64(size), bits, packed)
    packed.sort()
    order, begins = cp.empty((2, size), np.int64)
    told = by if known else np.zeros(1, COMPARED)
    launch(SOURCE, "begin_groups", size, told, packed, np.int64(size), bits, order, begins)
    running = cp.cumsum(begins)
    total = int(running[-1])
    groups, unlike = total & 0xFFFFFFFF, total >> 32
    group, bounds = begins, cp.empty(groups + 1, np.int64)
    launch(SOURCE, "number_groups", size, running, np.int64(size), group, bounds)
    if not known and groups < size:
        rest = cp.flatnonzero(group[1:] == group[:-1]) + 1
        unlike = not matching.equal_at(kernels, types, (own, order[rest]), (own, order[rest - 1])).all()
    return order, bounds, group, not unlike
