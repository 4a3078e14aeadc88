"""`gpu_ops.kernels.Kernels` on numpy, pandas and pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cpu_fallback.conditions import evaluate
from cpu_fallback.frame import Frame
from cpu_fallback.hashing import UInt64s, equal_arrays, hash_columns, valid_mask
from cpu_fallback.store import CpuStore, slot_array
from gpu_ops.arrays import Array
from gpu_ops.conditions import Condition
from gpu_ops.descriptions.keys import key_type
from gpu_ops.kernels import Kernels
from gpu_ops.values import fitted, one_array

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_LOW = np.uint64(0xFFFFFFFF)
# Larger buckets, rare but for keys of many rows, are left out of the common bisection: it would read farther off.
_CROWDED = 15
# What is too little to be worth packing, and so many ascending runs numpy merges sooner than it sorts.
_FEW = 128
_RUNS = 8
# Needles at a time: what they read of a run fits the second-level cache.
_BLOCK = 1 << 13


class CpuKernels:
    """The CPU backend.

    Args:
        tiny_segments: test setting: merge and grow at the smallest sizes.
    """

    name = "cpu"
    xp: Any = np
    bucket = 16
    spare_room = True
    host: Kernels | None = None
    memory_limit: int | None = None
    piece_bytes: int | None = None

    def __init__(self, *, tiny_segments: bool = False) -> None:
        self.tiny_segments = tiny_segments

    def frame(self, table: pa.Table) -> Frame:
        """Columns from Arrow, each in one piece."""
        columns = {n: _plain(one_array(c)) for n, c in zip(table.column_names, table.columns, strict=True)}
        return Frame(table.num_rows, columns)

    def to_arrow(self, frame: Frame, schema: pa.Schema) -> pa.Table:
        """Columns to Arrow, by position; text of more than 2 GiB in several chunks."""
        arrays = [pa.chunked_array(fitted(a, f.type)) for a, f in zip(frame.columns.values(), schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)

    def asarray(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array itself."""
        return values

    def asnumpy(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array itself."""
        return values

    def num_rows(self, frame: Frame) -> int:
        """Rows of a frame."""
        return frame.length

    def take(self, frame: Frame, rows: Array, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Rows of a frame by position; -1 gives nulls."""
        wanted = pa.array(rows) if present else slot_array(rows)
        return Frame(rows.size, {name: frame.columns[name].take(wanted) for name in columns})

    def combine(self, columns: Sequence[tuple[str, Frame, str]]) -> Frame:
        """A frame of columns from row-aligned frames."""
        return Frame(columns[0][1].length, {name: frame.columns[column] for name, frame, column in columns})

    def coalesce(self, first: Frame, first_column: str, second: Frame, second_column: str) -> Frame:
        """The first column's values, the second's where they are null."""
        a, b = first.columns[first_column], second.columns[second_column]
        if a.type != b.type:
            kind = key_type(pa.field(first_column, a.type), pa.field(second_column, b.type))
            a, b = a.cast(kind), b.cast(kind)
        return Frame(first.length, {first_column: pc.coalesce(a, b)})

    def valid(self, frame: Frame, columns: Sequence[str]) -> Mask | None:
        """Mask of rows without a null in these columns, None for all."""
        mask: Mask | None = None
        for name in columns:
            column = frame.columns[name]
            if column.null_count:
                mask = valid_mask(column) if mask is None else mask & valid_mask(column)
        return mask

    def hash_rows(self, frame: Frame, columns: Sequence[str], types: Sequence[pa.DataType]) -> Array:
        """64-bit hashes of rows."""
        cast = [_as_type(frame.columns[c], t) for c, t in zip(columns, types, strict=True)]
        return hash_columns(cast, frame.length)

    def equal_rows(
        self,
        left: Frame,
        left_columns: Sequence[str],
        right: Frame,
        right_columns: Sequence[str],
        types: Sequence[pa.DataType],
    ) -> Mask:
        """Mask of equal rows, null equal to null."""
        equal: Mask | None = None
        for a, b, kind in zip(left_columns, right_columns, types, strict=True):
            same = equal_arrays(_as_type(left.columns[a], kind), _as_type(right.columns[b], kind))
            equal = same if equal is None else equal & same
        return np.ones(left.length, bool) if equal is None else equal

    def evaluate(self, condition: Condition, frames: Mapping[str, Frame], length: int) -> Mask:
        """Mask of rows for which the condition is true."""
        batches = {name: frame.batch() for name, frame in frames.items()}
        return evaluate(condition, batches, length=length)

    def argsort(self, values: npt.NDArray[Any]) -> Array:
        """Stable argsort.

        numpy's own takes five times as long as to sort values with their positions in the lower bits, where there is
        room for both; but it merges what lies in few ascending runs, in one pass.
        """
        size = values.size
        if size < _FEW or values.dtype.kind not in "iu" or values.itemsize < 4:
            return np.argsort(values, kind="stable")
        if np.count_nonzero(values[1:] < values[:-1]) < _RUNS:
            return np.argsort(values, kind="stable")
        lowest, bits = values.min(), size.bit_length()
        if (int(values.max()) - int(lowest)).bit_length() + bits > 64:
            return np.argsort(values, kind="stable")
        packed = (values - lowest).astype(np.uint64)
        packed <<= np.uint64(bits)
        packed |= np.arange(size, dtype=np.uint64)
        packed.sort()
        packed &= np.uint64((1 << bits) - 1)
        return packed.view(np.int64)

    def scatter_add(self, target: npt.NDArray[Any], index: Array, values: Array) -> None:
        """Add at positions, repeated ones included."""
        np.add.at(target, index, values)

    def cumulative_min(self, values: Ints) -> Ints:
        """Running minimum."""
        return np.minimum.accumulate(values)

    def store(self, schema: pa.Schema) -> CpuStore:
        """An empty store."""
        return CpuStore(schema)

    def search(self, run: UInt64s, directory: Ints, shift: int, hashes: UInt64s) -> tuple[Array, Array]:
        """Candidates of a sorted run: the first entry of each hash, and those that follow it."""
        if not hashes.size or not run.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        keys = hashes << np.uint64(32)
        place = np.empty(keys.size, np.int64)
        first, second = np.empty(keys.size, np.uint64), np.empty(keys.size, np.uint64)
        # Block by block, so that the lines of the run which one step of the bisection reads are there for the next.
        for start in range(0, keys.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            at, key = place[block], keys[block]
            _first_not_less(run, directory, shift, key, at)
            # the exclusive or leaves the slot where the hash is the same
            np.bitwise_xor(run.take(at, mode="clip", out=first[block]), key, out=first[block])
            at += 1
            np.bitwise_xor(run.take(at, mode="clip", out=second[block]), key, out=second[block])
        needle = np.flatnonzero(first <= _LOW)
        slots = first[needle].view(np.int64)
        # Few hashes have more than one entry, but for keys of many rows: their ends are found by themselves.
        twin = np.flatnonzero(second <= _LOW)
        if twin.size:
            begin = place[twin]
            end = np.searchsorted(run, keys[twin] | _LOW, side="right")
            number, position = self.expand(begin, np.maximum(end - begin, 0))
            needle = np.concatenate([needle, twin[number]])
            slots = np.concatenate([slots, (run[position] & _LOW).view(np.int64)])
        return needle, slots

    def expand(self, first: Ints, count: Ints) -> tuple[Array, Array]:
        """Ranges written out."""
        before = np.cumsum(count) - count
        number = np.repeat(np.arange(count.size, dtype=np.int64), count)
        return number, np.arange(number.size, dtype=np.int64) + (first - before)[number]

    def close(self) -> None:
        """Nothing to give back."""


def _first_not_less(run: UInt64s, directory: Ints, shift: int, key: UInt64s, at: Ints) -> None:
    """Into ``at`` the position of the first entry of a run that is not less than a key; anything beyond the end."""
    bucket = (key >> np.uint64(32 + shift)).view(np.int64)
    at[:] = directory.take(bucket)
    bucket += 1
    count = directory.take(bucket) - at
    width = int(count.max())
    crowded = np.flatnonzero(count > _CROWDED) if width > _CROWDED else None
    step = 1 << min(width, _CROWDED).bit_length() >> 1
    # ``at`` is the last entry known to be less. A step out of the bucket ends at a greater entry, or, when the key
    # is greater than all entries, anywhere.
    at -= 1
    middle, less, entry = np.empty_like(at), np.empty(at.size, bool), np.empty_like(key)
    while step:
        np.add(at, step, out=middle)
        run.take(middle, mode="clip", out=entry)
        np.less(entry, key, out=less)
        np.multiply(less, step, out=middle)
        at += middle
        step >>= 1
    at += 1
    if crowded is not None:
        at[crowded] = np.searchsorted(run, key[crowded])


def _plain(column: pa.Array) -> pa.Array:
    """A column, dictionaries decoded."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # integers of different width already compare and hash alike; decimals and timestamps do not
    if column.type == kind or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column
    return column.cast(kind)
