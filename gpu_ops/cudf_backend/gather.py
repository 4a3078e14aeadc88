"""Rows of fixed-width columns, gathered by one CUDA kernel: all columns at once, wherever their segments lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.device import launch

MOST_SEGMENTS = 48
MOST_COLUMNS = 6
"""Of one launch: their addresses travel with it, and it takes 4 KB of arguments."""
_ALIGNED = 256
"""Bytes, as CUDA's own allocations."""

SOURCES = np.dtype(
    [
        ("starts", np.int64, MOST_SEGMENTS),
        ("data", np.uint64, (MOST_COLUMNS, MOST_SEGMENTS)),
        ("widths", np.int64, MOST_COLUMNS),
        ("offsets", np.int64, MOST_COLUMNS),
    ]
)

SOURCE = (
    f"#define MOST_SEGMENTS {MOST_SEGMENTS}\n#define MOST_COLUMNS {MOST_COLUMNS}"
    """
typedef long long i64;

struct Sources {
  i64 starts[MOST_SEGMENTS];  // the first row of each segment
  const unsigned char* data[MOST_COLUMNS][MOST_SEGMENTS];
  i64 widths[MOST_COLUMNS];  // bytes of a value
  i64 offsets[MOST_COLUMNS];  // where a column's values begin in the output
};

// One thread for a row and a column. Of a row that is not there (-1) another one is read.
extern "C" __global__ void gather_rows(
    Sources from, i64 segments, i64 threads, i64 size, const i64* rows, unsigned char* out) {
  i64 thread = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (thread >= threads) return;
  i64 column = thread / size, at = thread % size, row = rows[at] < 0 ? 0 : rows[at];
  i64 low = 0, high = segments - 1;
  while (low < high) {
    i64 middle = (low + high + 1) / 2;
    if (from.starts[middle] <= row) low = middle; else high = middle - 1;
  }
  i64 width = from.widths[column];
  const unsigned char* source = from.data[column][low] + (row - from.starts[low]) * width;
  unsigned char* target = out + from.offsets[column] + at * width;
  switch (width) {
    case 1: *target = *source; break;
    case 2: *(short*)target = *(const short*)source; break;
    case 4: *(int*)target = *(const int*)source; break;
    case 8: *(i64*)target = *(const i64*)source; break;
    default: ((i64*)target)[0] = ((const i64*)source)[0], ((i64*)target)[1] = ((const i64*)source)[1];
  }
}
"""
)


def gather_rows(
    segments: Sequence[Sequence[Any]], starts: Sequence[int], rows: Array, numbers: Sequence[tuple[Any, int]]
) -> list[Array]:
    """Values of rows, a new array for each column.

    Args:
        segments: of each segment its columns (``pylibcudf.Column``), not empty and at most `MOST_SEGMENTS`.
        starts: of each segment its first row.
        rows: n rows (int64); where one is -1, what is read is anything.
        numbers: of each column, what its values are as numbers, and how many a value has.
    """
    found: list[Array] = []
    for first in range(0, len(numbers), MOST_COLUMNS):
        part = slice(first, first + MOST_COLUMNS)
        found += _gather([segment[part] for segment in segments], starts, rows, numbers[part])
    return found


def _gather(
    segments: Sequence[Sequence[Any]], starts: Sequence[int], rows: Array, numbers: Sequence[tuple[Any, int]]
) -> list[Array]:
    sources, size, end = np.zeros(1, SOURCES), int(rows.size), 0
    if not size:
        return [cp.empty(0 if lanes == 1 else (0, lanes), dtype) for dtype, lanes in numbers]
    sources["starts"][0, : len(starts)] = starts
    spans = []
    for column, (dtype, lanes) in enumerate(numbers):
        width = np.dtype(dtype).itemsize * lanes
        sources["widths"][0, column], sources["offsets"][0, column] = width, end
        for number, segment in enumerate(segments):
            stored = segment[column]
            sources["data"][0, column, number] = stored.data().ptr + stored.offset() * width
        spans.append((end, end + size * width))
        end = -(-spans[-1][1] // _ALIGNED) * _ALIGNED
    out = cp.empty(end, np.uint8)
    threads = size * len(numbers)
    launch(
        SOURCE, "gather_rows", threads, sources, np.int64(len(segments)), np.int64(threads), np.int64(size), rows, out
    )
    values = [out[low:high].view(dtype) for (low, high), (dtype, _) in zip(spans, numbers, strict=True)]
    return [v if lanes == 1 else v.reshape(-1, lanes) for v, (_, lanes) in zip(values, numbers, strict=True)]
