"""The GPU backend's own CUDA kernels in numpy, for the stand-in of cupy: by name, with the kernel's arguments.

`test_cuda_source` compiles the CUDA itself as C++ and holds it against these.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

LOW = np.uint64(0xFFFFFFFF)


def memory(address: Any, dtype: Any, size: int) -> np.ndarray:
    """Numbers at an address of the card's memory, which is the host's here."""
    nbytes = size * np.dtype(dtype).itemsize
    if not nbytes:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * nbytes).from_address(int(address)), dtype)


class _Run:
    def __init__(self, told: Any) -> None:
        self.shift = np.uint64(told["shift"])
        self.directory = memory(told["directory"], np.int32, (1 << (32 - int(told["shift"]))) + 1)
        size = int(self.directory[-1])
        self.entries = memory(told["entries"], np.uint64, size)
        self.times = memory(told["times"], np.int64, size) if told["times"] else None

    def span(self, hashes: np.ndarray, earliest: np.ndarray, latest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each needle's entries begin and end."""
        stored = self.entries >> np.uint64(32)
        begin, end = (np.searchsorted(stored, hashes, side) for side in ("left", "right"))
        buckets = self.directory[hashes >> self.shift], self.directory[(hashes >> self.shift) + np.uint64(1)]
        assert ((buckets[0] <= begin) & (end <= buckets[1])).all(), "a directory that leads elsewhere"
        if self.times is not None:
            for at in np.flatnonzero(begin < end):
                times = self.times[begin[at] : end[at]]
                low, high = np.searchsorted(times, earliest[at]), np.searchsorted(times, latest[at], "right")
                begin[at], end[at] = begin[at] + low, begin[at] + max(low, high)
        return begin, end


def find(
    runs: Any,
    size: Any,
    lookups: Any,
    needles: Any,
    earliest: Any,
    latest: Any,
    only_first: Any,
    begins: Any,
    counts: Any,
) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    for number in range(int(lookups // size)):
        begin, end = _Run(runs["run"][0, number]).span(needles >> np.uint64(32), earliest, latest)
        own = slice(number * size, (number + 1) * size)
        begins[own], counts[own] = begin, np.minimum(end - begin, 1) if only_first else end - begin


def write_pairs(
    runs: Any, size: Any, lookups: Any, needles: Any, begins: Any, ends: Any, total: Any, by_candidate: Any, pairs: Any
) -> None:
    """Of `gpu_ops.cudf_backend.search`."""
    assert ends.size == lookups
    assert pairs.size == total == ends[-1]
    at = np.arange(int(total))
    lookup = np.searchsorted(ends, at, side="right")
    place = begins[lookup] + at - np.where(lookup, ends[lookup - 1], 0)
    own = (needles[lookup % size] & LOW).astype(np.int64)
    slot = np.empty(at.size, np.int64)
    for number in range(int(lookups // size)):
        mine = lookup // size == number
        slot[mine] = (_Run(runs["run"][0, number]).entries[place[mine]] & LOW).astype(np.int64)
    pairs[:] = slot << 32 | own if by_candidate else own << 32 | slot


def gather_rows(sources: Any, segments: Any, threads: Any, size: Any, rows: np.ndarray, out: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.gather`."""
    assert rows.size == size
    rows = np.maximum(rows, 0)
    starts = sources["starts"][0, : int(segments)]
    owner = np.searchsorted(starts, rows, side="right") - 1
    for column in range(int(threads // size)):
        width, offset = int(sources["widths"][0, column]), int(sources["offsets"][0, column])
        target = out[offset : offset + int(size) * width].reshape(-1, width)
        for number in range(int(segments)):
            mine = np.flatnonzero(owner == number)
            if mine.size:
                own = rows[mine] - starts[number]
                data = memory(sources["data"][0, column, number], np.uint8, (int(own.max()) + 1) * width)
                target[mine] = data.reshape(-1, width)[own]


def merge_entries(first: np.ndarray, size: Any, second: np.ndarray, total: Any, out: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.runs`."""
    assert (first.size, first.size + second.size, out.size) == (size, total, total)
    out[:] = np.sort(np.concatenate([first, second]))


def begin_prefixes(entries: np.ndarray, size: Any, shift: Any, prefixes: Any, directory: np.ndarray) -> None:
    """Of `gpu_ops.cudf_backend.runs`."""
    assert entries.size == size
    assert directory.size == prefixes + 1
    directory[:] = np.searchsorted(
        entries >> np.uint64(32 + int(shift)), np.arange(int(prefixes) + 1).astype(np.uint64)
    )


TWINS = {kernel.__name__: kernel for kernel in (find, write_pairs, gather_rows, merge_entries, begin_prefixes)}
