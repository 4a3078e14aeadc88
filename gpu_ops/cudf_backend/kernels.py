"""`gpu_ops.kernels.Kernels` on cupy and pylibcudf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pylibcudf as plc

from cpu_fallback import CpuKernels
from gpu_ops.arrays import Array
from gpu_ops.conditions import Condition
from gpu_ops.cudf_backend import memory
from gpu_ops.cudf_backend.conditions import evaluate
from gpu_ops.cudf_backend.device import array_module, ranges, require_one_stream
from gpu_ops.cudf_backend.frame import Frame, choose, from_arrow, from_values, to_arrow_pieces, valid_mask
from gpu_ops.cudf_backend.frame import values as numbers
from gpu_ops.cudf_backend.hashing import convert, equal_columns, hash_columns
from gpu_ops.cudf_backend.storage import decoded
from gpu_ops.cudf_backend.store import CudfStore
from gpu_ops.descriptions.keys import key_type
from gpu_ops.kernels import Kernels
from gpu_ops.values import one_array

JOIN_FROM = math.inf
"""From so many needles per entry of a run on, `CudfKernels.search` goes by libcudf's hash join instead of by jumps.

By the bytes they move: a jump reads about 64 bytes per needle (a sector of the directory, one of the run; less when
needles are dense, as they come in hash order). The join converts and reads every entry of the run, some 16 bytes,
builds and probes a hash table of the needles, and its pairs have to be sorted. So it might win from a quarter of a
needle per entry on, if at all, and only in the smallest runs. Not measured on a card yet: ``benchmarks/gpu``, part
``probe``, will tell.
"""
_PIECES = 32
"""Pieces of state, at least, in a full GPU."""


class CudfKernels:
    """The GPU backend.

    Args:
        tiny_segments: test setting: merge and grow at the smallest sizes.
        memory_limit: bytes of GPU memory that all backends of this process may allocate together; None for most of
            what is free.

    Raises:
        BackendError: cupy or pylibcudf was told to use other streams than the default one.
    """

    name = "gpu"
    bucket = 2
    spare_room = False

    def __init__(self, *, tiny_segments: bool = False, memory_limit: int | None = None) -> None:
        require_one_stream()
        self.tiny_segments = tiny_segments
        self.xp: Any = array_module()
        self.host: Kernels | None = CpuKernels(tiny_segments=tiny_segments)
        self.memory_limit: int | None = memory.acquire(memory_limit)
        # Small enough that state leaves in steps, large enough that there are few pieces to look in.
        self.piece_bytes: int | None = self.memory_limit // _PIECES
        self._open = True

    def frame(self, table: pa.Table) -> Frame:
        """Columns from Arrow, each in one piece."""
        columns = {n: from_arrow(one_array(c)) for n, c in zip(table.column_names, table.columns, strict=True)}
        types = [decoded(kind) for kind in table.schema.types]
        return Frame(table.num_rows, columns, dict(zip(table.column_names, types, strict=True)))

    def to_arrow(self, frame: Frame, schema: pa.Schema) -> pa.Table:
        """Columns to Arrow, by position; text of more than 2 GiB in several chunks."""
        arrays = []
        for (name, column), field in zip(frame.columns.items(), schema, strict=True):
            pieces = to_arrow_pieces(column, frame.types[name])
            arrays.append(pa.chunked_array([x if x.type == field.type else x.cast(field.type) for x in pieces]))
        return pa.Table.from_arrays(arrays, schema=schema)

    def asarray(self, values: npt.NDArray[Any]) -> Array:
        """A host array in GPU memory."""
        return cp.asarray(values)

    def asnumpy(self, values: Array) -> npt.NDArray[Any]:
        """A GPU array on the host; waits for the GPU."""
        host: npt.NDArray[Any] = cp.asnumpy(values)
        return host

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

    def evaluate(self, condition: Condition, frames: Mapping[str, Frame], length: int) -> Array:
        """Mask of rows for which the condition is true."""
        return evaluate(condition, frames, length)

    def argsort(self, values: Array) -> Array:
        """Stable argsort; cupy's only one is."""
        order = cp.argsort(values)
        return order if order.dtype == np.int64 else order.astype(np.int64)

    def scatter_add(self, target: Array, index: Array, values: Array) -> None:
        """Add at positions, repeated ones included."""
        values = values if values.dtype == target.dtype else values.astype(target.dtype)
        if target.dtype == np.int64:  # CUDA's atomicAdd knows no int64; the bits are the same
            target, values = target.view(np.uint64), values.view(np.uint64)
        cp.add.at(target, index, values)

    def cumulative_min(self, values: Array) -> Array:
        """Running minimum, by libcudf: cupy has no ``minimum.accumulate``."""
        if not values.size:
            return values.copy()
        lowest = plc.reduce.scan(from_values(values), plc.aggregation.min(), plc.reduce.ScanType.INCLUSIVE)
        return numbers(lowest, np.int64)

    def store(self, schema: pa.Schema) -> CudfStore:
        """An empty store."""
        return CudfStore(schema, self)

    def search(self, run: Array, directory: Array, shift: int, hashes: Array) -> tuple[Array, Array]:
        """Candidates of a sorted run, by needle, then by slot; see `JOIN_FROM`."""
        if hashes.size >= JOIN_FROM * run.size:
            return search_by_join(run, hashes)
        return search_by_directory(run, directory, shift, hashes)

    def expand(self, first: Array, count: Array) -> tuple[Array, Array]:
        """Ranges written out."""
        return ranges(first + count, count)

    def close(self) -> None:
        """Give back this backend's share of the memory pool."""
        if self._open:
            self._open = False
            memory.release()


def search_by_directory(run: Array, directory: Array, shift: int, hashes: Array) -> tuple[Array, Array]:
    """Each needle's bucket of the run, filtered by the whole hash; arguments as `gpu_ops.kernels.Kernels.search`."""
    bucket = (hashes >> np.uint64(shift)).view(np.int64)
    last = directory[1:][bucket]
    needle, place = ranges(last, last - directory[bucket])
    entry = run[place]
    found = cp.flatnonzero((entry >> np.uint64(32)) == hashes[needle])
    return needle[found], (entry[found] & np.uint64(0xFFFFFFFF)).view(np.int64)


def search_by_join(run: Array, hashes: Array) -> tuple[Array, Array]:
    """The same by a hash join of needles and run, built on the smaller side, in any order, then sorted."""
    empty = cp.empty(0, np.int64)
    if not run.size or not hashes.size:
        return empty, empty
    keys = (hashes.astype(np.uint32), (run >> np.uint64(32)).astype(np.uint32))
    left, right = (plc.Table([from_values(key)]) for key in keys)
    needles, places = plc.join.inner_join(left, right, plc.types.NullEquality.UNEQUAL)
    if not needles.size():
        return empty, empty
    needle = numbers(needles, np.int32).astype(np.int64)
    slot = (run[numbers(places, np.int32)] & np.uint64(0xFFFFFFFF)).view(np.int64)
    pairs = cp.sort((needle << 32) | slot)
    return pairs >> 32, pairs & 0xFFFFFFFF
