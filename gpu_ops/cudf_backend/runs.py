"""What sorted runs are made by, a CUDA kernel each: entries, merges, and directories of hash prefixes."""

from __future__ import annotations

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.device import launch

SOURCE = """
typedef unsigned long long u64;
typedef long long i64;

// How many of an ascending array's entries are less than a value (or, with `equal`, not greater).
__device__ i64 rank_of(u64 value, const u64* entries, i64 size, bool equal) {
  i64 low = 0, high = size;
  while (low < high) {
    i64 middle = low + (high - low) / 2;
    if (entries[middle] < value || (equal && entries[middle] == value)) low = middle + 1; else high = middle;
  }
  return low;
}

// One thread for an entry: the upper half of a row's hash, and its slot. Row i is `rows[i]`, or i where there are none.
extern "C" __global__ void make_entries(
    const u64* hashes, const i64* rows, bool every, i64 first, i64 size, u64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at < size) out[at] = (hashes[every ? at : rows[at]] & 0xFFFFFFFF00000000u) | (u64)(first + at);
}

// One thread for an entry: its place is its own among its kind and its rank among the others.
extern "C" __global__ void merge_entries(const u64* first, i64 size, const u64* second, i64 total, u64* out) {
  i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (at >= total) return;
  if (at < size) out[at + rank_of(first[at], second, total - size, false)] = first[at];
  else out[at - size + rank_of(second[at - size], first, size, true)] = second[at - size];
}

// One thread for a prefix, and one for the end.
extern "C" __global__ void begin_prefixes(const u64* entries, i64 size, i64 shift, i64 prefixes, int* directory) {
  i64 prefix = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (prefix > prefixes) return;
  directory[prefix] = prefix == prefixes ? size : rank_of((u64)prefix << (32 + shift), entries, size, false);
}
"""


def made_entries(hashes: Array, first: int, rows: Array | None) -> Array:
    """As `gpu_ops.kernels.Kernels.entries`."""
    size = int(hashes.size if rows is None else rows.size)
    out = cp.empty(size, np.uint64)
    if size:
        given = (
            (hashes.view(np.int64), np.bool_(True)) if rows is None else (rows, np.bool_(False))
        )  # all: none is read
        launch(SOURCE, "make_entries", size, hashes, *given, np.int64(first), np.int64(size), out)
    return out


def merged(first: Array, second: Array) -> Array:
    """One ascending array of two, of uint64: a pass over both, where a sort would be eight."""
    out = cp.empty(first.size + second.size, np.uint64)
    if out.size:
        launch(SOURCE, "merge_entries", out.size, first, np.int64(first.size), second, np.int64(out.size), out)
    return out


def directory(entries: Array, shift: int) -> Array:
    """As `gpu_ops.kernels.Kernels.directory`: a bisection for each prefix, however many entries share one."""
    prefixes = 1 << (32 - shift)
    begins = cp.empty(prefixes + 1, np.int32)
    sizes = np.int64(entries.size), np.int64(shift), np.int64(prefixes)
    launch(SOURCE, "begin_prefixes", prefixes + 1, entries, *sizes, begins)
    return begins
