"""Rows that flags are set of, out of several arrays at once: the host waits once, for the sizes of all.

Two CUDA kernels, a thread for a row of any of the parts: one puts the flags side by side, and where their running sum
says, the other puts the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import cupy as cp
import numpy as np

from cpu_fallback import search
from gpu_ops.arrays import Array
from gpu_ops.cudf_backend.device import LIMITS, address, launch
from gpu_ops.kernels import Flagged, Kernels

MOST_PARTS, MOST_COLUMNS, MOST_NUMBERS = LIMITS["MOST_PARTS"], LIMITS["FLAGGED_COLUMNS"], LIMITS["MOST_NUMBERS"]
"""Of one launch."""
_MOST_ROWS = (1 << 31) - 1

PART = np.dtype(
    [
        ("flags", np.uint64),
        ("unless", np.uint64),
        ("places", np.uint64),
        ("end", np.int64),
        ("columns", np.uint64, MOST_COLUMNS),
        ("firsts", np.int64, MOST_COLUMNS),
        ("steps", np.int64, MOST_COLUMNS),
    ]
)
PARTS = np.dtype([("number", np.int64), ("part", PART, MOST_PARTS)])
NUMBERS = np.dtype([("number", np.int64), ("at", np.uint64, MOST_NUMBERS)])


def flagged(
    kernels: Kernels, parts: Sequence[Flagged], numbers: Sequence[Array] = (), *, chained: bool = False
) -> tuple[list[list[Array]], list[int], list[int]]:
    """Puts rows side by side, and their sizes beside them; see `gpu_ops.kernels.Kernels.flagged`."""
    lengths = [_length(part) for part in parts]
    size, columns = sum(lengths), len(parts[0].columns) if parts else 0
    if not size or size > _MOST_ROWS or not _known(parts, columns, numbers):
        return search.flagged(kernels, parts, numbers, chained=chained)
    told = np.zeros(1, PARTS)
    there = [at for at, length in enumerate(lengths) if length]
    ends = np.cumsum(lengths).tolist()
    told["number"][0] = len(there)
    for number, at in enumerate(there):
        one = told["part"][0, number]
        one["end"] = ends[at]
        for name in ("flags", "unless", "places"):
            given = getattr(parts[at], name)
            one[name] = 0 if given is None else address(given)
        for column, values in enumerate(parts[at].columns):
            if isinstance(values, int):
                one["firsts"][column], one["steps"][column] = values, 1
            elif values is None:
                one["firsts"][column] = -1
            else:
                one["columns"][column] = address(values)
    looked = np.zeros(1, NUMBERS)
    looked["number"][0] = len(numbers)
    looked["at"][0, : len(numbers)] = [address(number) for number in numbers]
    head = len(there) + len(numbers)
    # of all of it at once: each of its own is a call
    scratch = cp.empty(head + columns * size + (size + 1) // 2, np.int64)
    sizes, out, marks = scratch[:head], scratch[head : head + columns * size], scratch[head + columns * size :]
    running = marks.view(np.int32)[:size]
    every = all(part.flags is None and part.unless is None for part in parts)
    if not every:
        launch("flag_rows", size, told, np.int64(size), running)
        running = cp.cumsum(running, dtype=np.int32)
    shape = told, looked, np.int64(size), np.int64(columns), np.bool_(every)
    launch("put_flagged", max(size, len(numbers)), *shape, running, out, sizes)
    found = ends if every else [0] * len(parts)
    seen: list[int] = []
    if numbers or not every:
        known: list[int] = cp.asnumpy(sizes).tolist()
        seen = known[len(there) :]
        rows_of = dict(zip(there, known, strict=False))
        found = list(itertools.accumulate((rows_of.get(at, 0) for at in range(len(parts))), max))
    bounds = [0, *found]
    spans = [(bounds[0], bounds[-1])] if chained else list(itertools.pairwise(bounds))
    made = [[out[column * size + low : column * size + high] for column in range(columns)] for low, high in spans]
    return made, [high - low for low, high in itertools.pairwise(bounds)], seen


def _length(part: Flagged) -> int:
    given = part.flags, part.unless, *part.columns
    arrays = [one for one in given if one is not None and not isinstance(one, int)]
    return int(arrays[0].size)


def _known(parts: Sequence[Flagged], columns: int, numbers: Sequence[Array]) -> bool:
    """Tells whether our kernels take these."""
    given = (one for part in parts for one in (*part.columns, part.places))
    values = [one for one in given if one is not None and not isinstance(one, int)]
    flags = [one for part in parts for one in (part.flags, part.unless) if one is not None]
    wide = all(one.dtype.kind in "iu" and one.dtype.itemsize == 8 for one in (*values, *numbers))
    fits = len(parts) <= MOST_PARTS and columns <= MOST_COLUMNS and len(numbers) <= MOST_NUMBERS
    return wide and fits and all(one.flags.c_contiguous for one in (*values, *flags))
