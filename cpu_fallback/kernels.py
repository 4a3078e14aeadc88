"""`gpu_ops.kernels.Kernels` on numpy, pandas and pyarrow."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cpu_fallback import search
from cpu_fallback.conditions import evaluate
from cpu_fallback.hashing import UInt64s, equal_arrays, expand, hash_rows, valid_mask
from cpu_fallback.store import CpuStore, Frame, Growable
from gpu_ops import layouts
from gpu_ops.arrays import Array, Hashes, Ints, Mask, Positions, Slots
from gpu_ops.conditions import Expression
from gpu_ops.descriptions.keys import key_type
from gpu_ops.kernels import (
    LOOKUPS,
    Columns,
    DataFrames,
    FrameFiles,
    Kernels,
    Neighbours,
    SearchedRun,
    SoleLookup,
    TooMany,
    as_slots,
)
from gpu_ops.values import fitted, one_array

# What is too little to be sorted by digits, and so many ascending runs numpy merges sooner than it sorts.
_FEW = 1 << 11
_RUNS = 8
# From so many on, what follows the highest 16 bits is more than a merge of short runs should sort.
_MANY = 1 << 18
# Entries at a time: what is made of them stays in the second-level cache.
_BLOCK = 1 << 16
# The system clears the pages of each array that is larger than any that glibc has freed, up to this many bytes. State
# servers say so in their environment.
_KEPT = (32 << 20) - (1 << 16)


class CpuKernels:
    """The backend of host memory, by numpy and pyarrow.

    Args:
        tiny_segments: test setting: merge and grow at the smallest sizes.
    """

    name = "cpu"
    xp: Any = np
    bucket = 16
    host: Kernels | None = None
    memory_limit: int | None = None
    piece_bytes: int | None = None
    dataframes: DataFrames | None = None
    files: FrameFiles | None = None
    gives_frames = False
    gives_bytes = False

    def __init__(self, *, tiny_segments: bool = False) -> None:
        self.tiny_segments = tiny_segments
        self.lookups = dict.fromkeys(LOOKUPS, 0)
        np.empty(_KEPT, np.uint8)  # and freed: a fifth of the time of micro-batches of 100,000 rows

    def frame(self, table: pa.Table) -> Frame:
        """Columns from Arrow, each in one piece."""
        columns = {n: _plain(one_array(c)) for n, c in zip(table.column_names, table.columns, strict=True)}
        return Frame(table.num_rows, columns)

    def to_arrow(self, frame: Frame, schema: pa.Schema) -> pa.Table:
        """Columns to Arrow, by position; text of more than 2 GiB in several chunks."""
        arrays = [pa.chunked_array(fitted(a, f.type)) for a, f in zip(frame.columns.values(), schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)

    def asarray(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Gives the array itself."""
        return values

    def asnumpy(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Gives the array itself."""
        return values

    def on_host(self, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Gives the arrays themselves."""
        return list(arrays)

    def num_rows(self, frame: Frame) -> int:
        """Rows of a frame."""
        return frame.length

    def take(self, frame: Frame, rows: Array, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Rows of a frame by position; -1 gives nulls."""
        return frame.take(rows, columns, present=present)

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
        return hash_rows(cast, frame.length)

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

    equal_at = search.equal_at
    matches = search.matches
    sole_matches = search.sole_matches
    grouped = search.grouped
    flagged = search.flagged
    bisect_ranges = search.bisect_ranges
    lives = search.lives
    last_there = search.last_there

    def sole_pairs(self, lookups: Sequence[SoleLookup]) -> Array | None:
        """Leaves it to `search` and `matches`."""
        return None

    def neighbours(self, types: Sequence[pa.DataType], own: Columns, hashes: Hashes, flags: Array) -> Neighbours | None:
        """Leaves it to `grouped`: a host knows sizes."""
        return None

    def evaluate(self, condition: Expression, frames: Mapping[str, Frame], length: int) -> Mask:
        """Mask of rows for which the condition is true."""
        batches = {name: frame.batch() for name, frame in frames.items()}
        return evaluate(condition, batches, length=length)

    def argsort(self, values: npt.NDArray[Any]) -> Array:
        """Sorts stably, and gives the order.

        numpy sorts numbers of 16 bits by their digits, in linear time: of wider ones it is asked for 16 bits at a
        time, the lowest first. But what lies in few ascending runs it merges, in one pass.
        """
        if values.size < _FEW or values.dtype.kind not in "iu" or values.itemsize < 4:
            return np.argsort(values, kind="stable")
        if np.count_nonzero(values[1:] < values[:-1]) < _RUNS:
            return np.argsort(values, kind="stable")
        lowest, highest = values.min(), values.max()
        above = values.astype(np.uint64)
        above -= lowest.astype(np.uint64)
        return _order_by_digits(above, range(0, max((int(highest) - int(lowest)).bit_length(), 1), 16))

    def sort(self, values: npt.NDArray[Any]) -> Array:
        """Sorts int64 or uint64: by their highest 16 bits as `argsort` does, then by a merge, as little is left to do.

        On processors where numpy's own sort is faster, that one does it.
        """
        if values.size < _FEW:
            values.sort()
            return values
        if np.count_nonzero(values[1:] < values[:-1]) < _RUNS:
            values.sort(kind="stable")
            return values
        return _sorted_by_digits(values) if _digits_are_faster() else np.sort(values)

    def scatter_add(self, target: npt.NDArray[Any], index: Array, values: Array) -> None:
        """Add at positions, repeated ones included."""
        np.add.at(target, index, values)

    def scatter_min(self, target: Array, index: Array, values: Array) -> None:
        """Take the least at positions, repeated ones included."""
        np.minimum.at(target, index, values)

    def cumulative_min(self, values: Ints) -> Ints:
        """Computes the running minimum."""
        return np.minimum.accumulate(values)

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Gives the function itself."""
        return function

    def entries(
        self, hashes: Hashes, first: int, rows: Positions | None = None, given: tuple[Positions, Slots] | None = None
    ) -> Array:
        """Entries of an index, in slots from ``first`` on; in front of them those whose slots are given."""
        own = hashes if rows is None else hashes[rows]
        made = layouts.entries(own, as_slots(self, first, own.size))
        return made if given is None else np.concatenate([layouts.entries(hashes[given[0]], given[1]), made])

    def aggregate(self, table: pa.Table, by: Sequence[str], calls: Sequence[tuple[Any, str]]) -> pa.Table:
        """Groups of rows, by Arrow."""
        return pa.TableGroupBy(table, list(by), use_threads=False).aggregate(list(calls))

    def sorted_order(self, keys: pa.Table) -> pa.Array:
        """Positions of rows in ascending order, by Arrow."""
        first = keys.column(0)
        if keys.num_columns == 1 and pa.types.is_integer(first.type) and not first.null_count:
            # numpy sorts integers several times as fast as Arrow, but equal ones stay in order only by its slow way
            values = first.to_numpy()
            order = np.argsort(values)
            found = values[order]
            if not bool((found[1:] == found[:-1]).any()):
                return pa.array(order)
        return pc.sort_indices(keys, sort_keys=[(c, "ascending") for c in keys.column_names])

    def store(self, schema: pa.Schema) -> CpuStore:
        """Makes an empty store."""
        return CpuStore(schema, tiny=self.tiny_segments)

    def directory(
        self, entries: UInt64s, shift: int, others: npt.NDArray[np.int32] | None = None
    ) -> npt.NDArray[np.int32]:
        """Finds the first of ascending entries with each hash prefix, and at the end their number."""
        begins = np.zeros((1 << (32 - shift)) + 1, np.int32)
        for at in range(0, entries.size, _BLOCK):
            prefixes = (entries[at : at + _BLOCK] >> np.uint64(32 + shift)).view(np.int64)
            first = int(prefixes[0])
            counts = np.bincount(prefixes - first)
            begins[first + 1 : first + 1 + counts.size] += counts
        np.cumsum(begins, dtype=np.int32, out=begins)
        if others is not None:
            begins += others
        return begins

    def merge(self, buffer: UInt64s | Growable, size: int, added: UInt64s) -> Growable:
        """Two ascending arrays as one, where the first one lies, which grows without a copy once it is large."""
        merged = buffer if isinstance(buffer, Growable) else Growable(np.uint64)
        if merged is not buffer:
            merged.reserve(2 * (size + added.size))
            merged.extend(self.beginning(buffer, size))
        merged.length = size
        merged.extend(added)
        merged.data[: merged.length].sort(kind="stable")  # a linear pass over two ascending arrays (timsort)
        return merged

    def beginning(self, buffer: UInt64s | Growable, size: int) -> UInt64s:
        """The first entries in what is an array, or what `merge` gave."""
        return (buffer.data if isinstance(buffer, Growable) else buffer)[:size]

    def search(
        self,
        runs: Sequence[SearchedRun],
        probe_rows: UInt64s,
        times: tuple[Ints, Ints] | None = None,
        *,
        by_candidate: bool = False,
        at_most: int | None = None,
    ) -> Ints:
        """Candidates of sorted runs: pairs of slots."""
        hashes, own = layouts.entry_hashes(probe_rows), layouts.entry_slots(probe_rows)
        pairs = [np.empty(0, np.int64)]
        self.lookups["index"] += len(runs) * probe_rows.size
        for run in runs:
            if times is None:
                probe_row, slots = search.by_hash(run, hashes, at_most)
            else:
                probe_row, slots = search.by_time(run, hashes, *times)
            at_most = None if at_most is None else at_most - probe_row.size
            pairs.append(layouts.pairs(slots, own[probe_row]) if by_candidate else layouts.pairs(own[probe_row], slots))
        return pairs[1] if len(pairs) == 2 else np.concatenate(pairs)

    def bisect(self, run: SearchedRun, probe_rows: UInt64s, times: Ints, *, after: bool) -> Ints:
        """Finds the place of each probe row in a sorted run with times."""
        self.lookups["index"] += probe_rows.size
        return search.bisect(run, layouts.entry_hashes(probe_rows), times, after=after)

    def nearest(self, *_: Any, **__: Any) -> None:
        """No way of its own: step by step, the probe rows that are left get few at once."""

    def sole(self, *_: Any, **__: Any) -> None:
        """No way of its own: candidates, then their matches."""

    def least(self, *_: Any, **__: Any) -> None:
        """No way of its own: level by level."""

    def join(self, left: UInt64s, right: UInt64s, *, at_most: int | None = None) -> Array:
        """Pairs of entries with the same hash, by a sorted merge."""
        self.lookups["index"] += left.size
        left, right = self.sort(left.copy()), self.sort(right.copy())
        probe_rows: UInt64s = layouts.entry_hashes(left)
        stored: UInt64s = layouts.entry_hashes(right)
        first = np.searchsorted(stored, probe_rows, side="left")
        count = np.searchsorted(stored, probe_rows, side="right") - first
        if at_most is not None and int(count.sum()) > at_most:
            raise TooMany
        number, place = expand(first, count)
        return layouts.pairs(layouts.entry_slots(left)[number], layouts.entry_slots(right)[place])

    def close(self) -> None:
        """Nothing to give back."""


def _order_by_digits(values: UInt64s, shifts: Iterable[int]) -> Array:
    """The stable order of numbers by 16 of their bits at each shift; the last shift counts most."""
    order = None
    for shift in shifts:
        digits = (values >> np.uint64(shift)).astype(np.uint16)
        order = np.argsort(digits, kind="stable") if order is None else order[np.argsort(digits[order], kind="stable")]
    return order


def _sorted_by_digits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    lowest, highest = int(values.min()), int(values.max())
    above = (values - values.dtype.type(lowest)).view(np.uint64)
    top = max((highest - lowest).bit_length() - 16, 0)
    shifts = (top - 16, top) if values.size >= _MANY and top >= 16 else (top,)
    found: npt.NDArray[Any] = values[_order_by_digits(above, shifts)]
    if top:
        found.sort(kind="stable")
    return found


@functools.cache
def _digits_are_faster() -> bool:
    """Tells whether numpy sorts 64 bits more slowly than this here: four times, on some processors with AVX-512."""
    values = np.arange(1 << 15, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def least(sort: Callable[[npt.NDArray[Any]], object]) -> float:
        took = []
        for _ in range(3):
            begin = time.perf_counter()
            sort(values)
            took.append(time.perf_counter() - begin)
        return min(took)

    return least(_sorted_by_digits) < least(np.sort)


def _plain(column: pa.Array) -> pa.Array:
    """A column, dictionaries decoded."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # integers of different width already compare and hash alike; decimals and timestamps do not
    if column.type == kind or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column
    return column.cast(kind)
