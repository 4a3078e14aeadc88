"""`gpu_ops.kernels.Kernels` on cupy and pylibcudf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pylibcudf as plc

from cpu_fallback import CpuKernels
from gpu_ops.arrays import Array, Hashes, Slots
from gpu_ops.cudf_backend import compare, conditions, device, flagged, hashing, least, nearest, search
from gpu_ops.cudf_backend.dataframes import CudfFrames
from gpu_ops.cudf_backend.device import array_module, launch, require_one_stream
from gpu_ops.cudf_backend.frame import (
    Frame,
    arrays_out,
    choose,
    copied_in,
    copied_out,
    from_values,
    to_arrow_pieces,
    valid_mask,
)
from gpu_ops.cudf_backend.frame import values as numbers
from gpu_ops.cudf_backend.hashing import convert, equal_columns, hash_columns
from gpu_ops.cudf_backend.parquet import CudfFiles
from gpu_ops.cudf_backend.probe import join_sets, probe_runs
from gpu_ops.cudf_backend.storage import decoded
from gpu_ops.cudf_backend.store import CudfStore
from gpu_ops.descriptions.keys import key_type
from gpu_ops.kernels import (
    Among,
    Columns,
    DataFrames,
    FrameFiles,
    Kernels,
    Probe,
    SearchedRun,
    SoleLookup,
    TimeLimits,
)

_PIECES = 32
"""Pieces of state, at least, in a full GPU."""


class CudfKernels:
    """The backend on a GPU, by cupy and pylibcudf.

    Args:
        tiny_segments: test setting: merge and grow at the smallest sizes.
        memory_limit: bytes of GPU memory that all backends of this process may allocate together; None for most of
            what is free.
        probe: how candidates are found, see `gpu_ops.kernels.Probe`.

    Raises:
        BackendError: cupy or pylibcudf was told to use other streams than the default one.
    """

    name = "gpu"
    bucket = 2

    def __init__(self, *, tiny_segments: bool = False, memory_limit: int | None = None, probe: Probe = "auto") -> None:
        require_one_stream()
        self.probe = probe
        self.tiny_segments = tiny_segments
        self.xp: Any = array_module()
        host = CpuKernels(tiny_segments=tiny_segments)
        self.host: Kernels | None = host
        self.lookups = host.lookups  # those in both memories
        self.memory_limit: int | None = device.acquire(memory_limit)
        # Small enough that state leaves in steps, large enough that there are few pieces to look in.
        self.piece_bytes: int | None = self.memory_limit // _PIECES
        self.dataframes: DataFrames | None = CudfFrames(self)
        self.files: FrameFiles | None = CudfFiles()
        self.gives_frames = self.gives_bytes = False
        self._open = True

    def frame(self, table: pa.Table) -> Frame:
        """Columns from Arrow, each in one piece."""
        columns = dict(zip(table.column_names, copied_in(table.columns), strict=True))
        types = [decoded(kind) for kind in table.schema.types]
        return Frame(table.num_rows, columns, dict(zip(table.column_names, types, strict=True)))

    def to_arrow(self, frame: Frame, schema: pa.Schema) -> pa.Table:
        """Columns to Arrow, by position; text of more than 2 GiB in several chunks."""
        arrays = []
        copied = copied_out(list(frame.columns.values()), [frame.types[name] for name in frame.columns])
        for (name, column), stored, field in zip(frame.columns.items(), copied, schema, strict=True):
            pieces = to_arrow_pieces(column, frame.types[name], stored)
            arrays.append(pa.chunked_array([x if x.type == field.type else x.cast(field.type) for x in pieces]))
        return pa.Table.from_arrays(arrays, schema=schema)

    def asarray(self, values: npt.NDArray[Any]) -> Array:
        """A host array in GPU memory."""
        return cp.asarray(values)

    def asnumpy(self, values: Array) -> npt.NDArray[Any]:
        """A GPU array on the host; waits for the GPU."""
        host: npt.NDArray[Any] = cp.asnumpy(values)
        return host

    def on_host(self, arrays: Sequence[Array]) -> list[npt.NDArray[Any]]:
        """Several GPU arrays on the host, by one wait."""
        return arrays_out(arrays)

    def num_rows(self, frame: Frame) -> int:
        """Rows of a frame."""
        return frame.length

    def take(self, frame: Frame, rows: Array, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Rows of a frame by position; -1 gives nulls."""
        return frame.take(rows, columns, present=present)

    def combine(self, columns: Sequence[tuple[str, Frame, str]]) -> Frame:
        """A frame of columns from row-aligned frames."""
        return Frame(
            columns[0][1].length,
            {name: frame.columns[column] for name, frame, column in columns},
            {name: frame.types[column] for name, frame, column in columns},
        )

    def coalesce(self, first: Frame, first_column: str, second: Frame, second_column: str) -> Frame:
        """The first column's values, the second's where they are null."""
        a, b = first.columns[first_column], second.columns[second_column]
        kind = first.types[first_column]
        if kind != second.types[second_column]:
            kind = key_type(pa.field(first_column, kind), pa.field(second_column, second.types[second_column]))
        a, b = convert(a, first.types[first_column], kind), convert(b, second.types[second_column], kind)
        valid = valid_mask(a)
        column = a if valid is None else choose(valid, a, b, kind)
        return Frame(first.length, {first_column: column}, {first_column: kind})

    def valid(self, frame: Frame, columns: Sequence[str]) -> Array | None:
        """Mask of rows without a null in these columns, None for all."""
        mask: Array | None = None
        for name in columns:
            valid = valid_mask(frame.columns[name])
            if valid is not None:
                mask = valid if mask is None else mask & valid
        return mask

    def hash_rows(self, frame: Frame, columns: Sequence[str], types: Sequence[pa.DataType]) -> Array:
        """64-bit hashes of rows."""
        typed = [(frame.columns[c], frame.types[c], kind) for c, kind in zip(columns, types, strict=True)]
        return hash_columns(typed, frame.length)

    def equal_rows(
        self,
        left: Frame,
        left_columns: Sequence[str],
        right: Frame,
        right_columns: Sequence[str],
        types: Sequence[pa.DataType],
    ) -> Array:
        """Mask of equal rows, null equal to null."""
        equal: Array | None = None
        for a, b, kind in zip(left_columns, right_columns, types, strict=True):
            same = equal_columns(left.columns[a], left.types[a], right.columns[b], right.types[b], kind)
            equal = same if equal is None else equal & same
        return cp.ones(left.length, bool) if equal is None else equal

    equal_at = compare.equal_at
    matches = compare.matches
    sole_matches = compare.sole_matches
    grouped = compare.grouped
    neighbours = staticmethod(compare.neighbours)
    flagged = flagged.flagged
    evaluate = staticmethod(conditions.evaluate)
    entries = staticmethod(search.made_entries)
    directory = staticmethod(search.directory)
    bisect_ranges = staticmethod(nearest.bisect_ranges)
    lives = staticmethod(nearest.lives)
    last_there = staticmethod(nearest.last_there)
    least = staticmethod(least.least)

    def sole(
        self,
        runs: Sequence[SearchedRun],
        types: Sequence[pa.DataType],
        columns: tuple[Columns, Columns],
        hashes: Hashes,
        among: Among | None,
    ) -> Slots | None:
        """Finds the match of each row in runs; None for keys that our kernel does not know, and where a join pays."""
        found = nearest.sole(self.probe, runs, types, columns, hashes, among=among)
        if found is not None:
            self.lookups["index"] += len(runs) * int(found.size)
        return found

    def sole_pairs(self, lookups: Sequence[SoleLookup]) -> Array | None:
        """Finds the match of each probe row in each of some indexes; None like `sole`."""
        found = nearest.sole_pairs(self.probe, lookups)
        if found is not None:
            self.lookups["index"] += sum(sum(map(len, one.indexes)) * int(one.probe_rows.size) for one in lookups)
        return found

    def argsort(self, values: Array) -> Array:
        """Stable argsort; cupy's only one is."""
        order = cp.argsort(values)
        return order if order.dtype == np.int64 else order.astype(np.int64)

    def sort(self, values: Array) -> Array:
        """Sorts the array itself, and returns it."""
        values.sort()
        return values

    def scatter_add(self, target: Array, index: Array, values: Array) -> None:
        """Add at positions, repeated ones included."""
        values = values if values.dtype == target.dtype else values.astype(target.dtype)
        if target.dtype == np.int32 and index.size:
            launch("add_numbers", index.size, index, values, np.int64(index.size), target)
            return
        if target.dtype == np.int64:  # CUDA's atomicAdd knows no int64; the bits are the same
            target, values = target.view(np.uint64), values.view(np.uint64)
        cp.add.at(target, index, values)

    def scatter_min(self, target: Array, index: Array, values: Array) -> None:
        """Take the least at positions, repeated ones included (uint64, which CUDA's atomicMin knows)."""
        cp.minimum.at(target, index, values)

    def cumulative_min(self, values: Array) -> Array:
        """Running minimum, by libcudf: cupy has no ``minimum.accumulate``."""
        if not values.size:
            return values.copy()
        lowest = plc.reduce.scan(from_values(values), plc.aggregation.min(), plc.reduce.ScanType.INCLUSIVE)
        return numbers(lowest, np.int64)

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one kernel, which cupy compiles when it is first called."""
        return _fused(function)

    def aggregate(self, table: pa.Table, by: Sequence[str], calls: Sequence[tuple[Any, str]]) -> pa.Table:
        """Groups of rows by libcudf, and on the CPU where that would not be the same."""
        if not hashing.countable(table, by, calls):
            assert self.host is not None
            return self.host.aggregate(table, by, calls)
        first, found = hashing.aggregate(self.frame(table), by, calls)
        keys = table.select(list(by)).take(pa.array(first))
        return pa.table([*keys.columns, *found.values()], names=[*by, *found])

    def sorted_order(self, keys: pa.Table) -> pa.Array:
        """Positions of rows in ascending order by libcudf, and on the CPU where that would not be the same."""
        if not hashing.sortable(keys):
            assert self.host is not None
            return self.host.sorted_order(keys)
        return pa.array(hashing.sorted_order(self.frame(keys)))

    def store(self, schema: pa.Schema) -> CudfStore:
        """Makes an empty store."""
        return CudfStore(schema, self)

    def merge(self, buffer: Array, size: int, added: Array) -> Array:
        """Two ascending arrays as one, a new one: room that is not used yet would be GPU memory all the same."""
        return search.merged(buffer[:size], added)

    def beginning(self, buffer: Array, size: int) -> Array:
        """Gives the array itself: there is no room behind it."""
        assert buffer.size == size
        return buffer

    def search(
        self,
        runs: Sequence[SearchedRun],
        probe_rows: Array,
        times: tuple[Array, Array] | None = None,
        *,
        by_candidate: bool = False,
        at_most: int | None = None,
    ) -> Array:
        """Candidates of sorted runs, by `gpu_ops.cudf_backend.probe`."""
        return probe_runs(
            self.probe, runs, probe_rows, times, by_candidate=by_candidate, at_most=at_most,
            limit=self.memory_limit or 0, lookups=self.lookups,
        )  # fmt: skip

    def bisect(self, run: SearchedRun, probe_rows: Array, times: Array, *, after: bool) -> Array:
        """Finds the place of each probe row in a sorted run with times."""
        self.lookups["index"] += int(probe_rows.size)
        return search.bisect_run(run, probe_rows, times, after=after)

    def nearest(
        self,
        runs: Sequence[SearchedRun],
        types: Sequence[pa.DataType],
        columns: tuple[Columns, Columns],
        hashes: Hashes,
        *,
        among: Among,
        limits: TimeLimits,
        newer: Array | None = None,
    ) -> Slots | None:
        """Finds the nearest row of each probe row's key; None where there are keys that our kernel does not know."""
        self.lookups["index"] += len(runs) * int(hashes.size)
        return nearest.nearest(runs, types, columns, hashes, among=among, limits=limits, newer=newer)

    def join(self, left: Array, right: Array, *, at_most: int | None = None) -> Array:
        """Pairs of entries with the same hash, by `gpu_ops.cudf_backend.probe`."""
        return join_sets(self.probe, left, right, at_most=at_most, lookups=self.lookups)

    def close(self) -> None:
        """Give back this backend's share of the memory pool."""
        if self._open:
            self._open = False
            device.release()


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = cp.fuse(function)
    return made
