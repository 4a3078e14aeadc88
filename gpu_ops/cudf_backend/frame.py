"""Row-aligned named columns in GPU memory, and the few things done to single columns.

A column is a ``pylibcudf.Column`` that begins at its buffers' start (offset 0): slices are copied.

Rows of fixed-width columns are gathered by one CUDA kernel: all columns at once, wherever their segments lie.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pylibcudf as plc

from gpu_ops.arrays import Array
from gpu_ops.cudf_backend import device
from gpu_ops.cudf_backend.device import LIMITS, launch
from gpu_ops.cudf_backend.storage import DECIMAL, from_storage, storage_type, to_storage
from gpu_ops.values import MOST_TEXT, narrow, one_array

MOST_SEGMENTS, MOST_COLUMNS = LIMITS["MOST_SEGMENTS"], LIMITS["GATHERED_COLUMNS"]
"""Of one launch."""
_LEAST_STAGED = 1 << 20
"""Bytes of a column that comes in by page-locked memory: others are copied in no time."""
_AT_A_TIME = 1 << 22
"""Bytes that one of several threads copies at a time."""
MOST_THREADS = min(8, (os.cpu_count() or 1) // 2)
"""That copy to page-locked memory: some more than fill the bus of a card, and half of the host's cores at most."""
_NARROW = 4
"""Bytes of an ordinary offset."""
_PLACES: dict[pa.DataType, np.dtype[Any]] = {
    **dict.fromkeys((pa.string(), pa.binary()), np.dtype(np.int32)),
    **dict.fromkeys((pa.large_string(), pa.large_binary()), np.dtype(np.int64)),
}
"""Of types of text, what their offsets are."""
_ALIGNED = 256
"""Bytes, as CUDA's own allocations."""
_MASK_BITS = 512
"""That the null mask of a column is padded to."""

SOURCES = np.dtype(
    [
        ("starts", np.int64, MOST_SEGMENTS),
        ("data", np.uint64, (MOST_COLUMNS, MOST_SEGMENTS)),
        ("widths", np.int64, MOST_COLUMNS),
        ("offsets", np.int64, MOST_COLUMNS),
    ]
)


def gather_rows(
    segments: Sequence[Sequence[Any]],
    starts: Sequence[int],
    rows: Array,
    numbers: Sequence[tuple[Any, int]],
    *,
    masked: bool,
) -> tuple[list[Array], Array | None]:
    """Values of rows, a new array for each column, and a null mask.

    Args:
        segments: of each segment its columns (``pylibcudf.Column``), not empty and at most `MOST_SEGMENTS`.
        starts: of each segment its first row.
        rows: n rows (int64); where one is -1, what is read is anything.
        numbers: of each column, what its values are as numbers, and how many a value has; one at least for a mask.
        masked: whether a mask is wanted, in which rows are null that are -1.
    """
    sources, size, end = np.zeros(1, SOURCES), int(rows.size), 0
    if not (size and numbers):
        return [cp.empty(0 if lanes == 1 else (0, lanes), dtype) for dtype, lanes in numbers], None
    numbers, others = numbers[:MOST_COLUMNS], numbers[MOST_COLUMNS:]
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
    threads, words = size * len(numbers), -(-size // _MASK_BITS) * (_MASK_BITS // 32) if masked else 0
    out = cp.empty(end + 4 * words, np.uint8)
    shape = np.int64(len(segments)), np.int64(threads), np.int64(size), rows, np.int64(words), np.int64(end)
    launch("gather_rows", threads + words, sources, *shape, out)
    values = [out[low:high].view(dtype) for (low, high), (dtype, _) in zip(spans, numbers, strict=True)]
    values = [v if lanes == 1 else v.reshape(-1, lanes) for v, (_, lanes) in zip(values, numbers, strict=True)]
    if others:
        values += gather_rows([segment[MOST_COLUMNS:] for segment in segments], starts, rows, others, masked=False)[0]
    return values, out[end:].view(np.uint32) if masked else None


DeviceColumn = Any
"""A ``pylibcudf.Column``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Columns of equal length, with the Arrow types they stand for; there may be none."""

    length: int
    columns: dict[str, DeviceColumn]
    types: dict[str, pa.DataType]

    def take(self, rows: Array, columns: Sequence[str], *, present: bool = False) -> Frame:
        """Rows by position (int64, -1 for a row of nulls; ``present`` if none is)."""
        types = {name: self.types[name] for name in columns}
        missing = 0 if present else None
        taken = gather([self.columns[name] for name in types], rows, list(types.values()), missing=missing)
        return Frame(int(rows.size), dict(zip(types, taken, strict=True)), types)


def from_arrow(array: pa.Array) -> DeviceColumn:
    """A column from host memory."""
    return plc.Column.from_arrow(to_storage(array))


def copied_in(columns: Sequence[pa.ChunkedArray]) -> list[DeviceColumn]:
    """Columns from host memory, each in one piece, by way of page-locked memory.

    From that the card copies at the speed of the bus, and beside the host: the next column is staged meanwhile. The
    memory is used again, so what was copied from it is waited for.
    """
    made: list[DeviceColumn] = []
    staged: list[pa.Array] = []
    try:
        for column in columns:
            array = _staged(column)
            staged += [] if array is None else [array]
            made.append(from_arrow(one_array(column) if array is None else array))
        return made
    finally:
        if staged:
            copied = cp.cuda.Event(disable_timing=True)
            copied.record()
            copied.synchronize()


def _staged(column: pa.ChunkedArray) -> pa.Array | None:
    """A column in page-locked memory; None for one that is left to Arrow: small, nested, of bits."""
    kind, rows, t = column.type, len(column), pa.types
    fixed = (t.is_primitive(kind) or t.is_decimal(kind) or t.is_fixed_size_binary(kind)) and not t.is_boolean(kind)
    places = _PLACES.get(kind)
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not chunks or (places is None and not fixed):
        return None
    width = kind.bit_width // 8 if places is None else places.itemsize
    offsets = [] if places is None else [_values(chunk, width, more=1).view(places) for chunk in chunks]
    letters = sum(int(own[-1] - own[0]) for own in offsets)
    first = _padded((rows + bool(offsets)) * width)
    if first + letters < _LEAST_STAGED or (letters > MOST_TEXT and width == _NARROW):
        return None
    block = device.PAGES.block(first + letters)
    if block is None:
        return None
    mask = pc.is_valid(column).combine_chunks().buffers()[1] if column.null_count else None
    buffers, at, end = [mask, block.buffer(0, first)], 0, 0
    pieces: list[_Copy] = []
    if places is None:
        target = block.writable(0, rows * width)
        for chunk in chunks:
            pieces.append((target[at : at + len(chunk) * width], _values(chunk, width), 0))
            at += len(chunk) * width
    else:
        ends, text = block.writable(0, first).view(places), block.writable(first, letters)
        ends[0] = 0
        for chunk, own in zip(chunks, offsets, strict=True):
            low, high = int(own[0]), int(own[-1])
            pieces.append((ends[at + 1 : at + 1 + len(chunk)], own[1:], end - low))
            if high > low:
                letters_of = np.frombuffer(chunk.buffers()[2], np.uint8)[low:high]
                pieces.append((text[end : end + high - low], letters_of, 0))
            at, end = at + len(chunk), end + high - low
        buffers.append(block.buffer(first, letters))
    _copy_by_threads(pieces)
    return pa.Array.from_buffers(kind, rows, buffers, column.null_count)


_Copy = tuple[npt.NDArray[Any], npt.NDArray[Any], int]
"""What is filled, with what, and what is added to each number."""


def _copy_by_threads(pieces: Sequence[_Copy]) -> None:
    """Copies arrays; large ones in parts, by several threads, as one does not fill the bus."""
    parts: list[_Copy] = []
    for to, source, more in pieces:
        step = max(1, _AT_A_TIME // to.itemsize)
        parts += [(to[at : at + step], source[at : at + step], more) for at in range(0, to.size, step)]
    if len(parts) > 1 and MOST_THREADS > 1:
        list(_threads().map(_copy, parts))
    else:
        for part in parts:
            _copy(part)


def _copy(part: _Copy) -> None:
    to, source, more = part
    if more:
        np.add(source, more, out=to)
    else:
        to[:] = source


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, "staging")


def _values(array: pa.Array, width: int, *, more: int = 0) -> npt.NDArray[np.uint8]:
    """The bytes of an array's values, which are so wide, or of so many more."""
    return np.frombuffer(array.buffers()[1], np.uint8)[array.offset * width :][: (len(array) + more) * width]


def to_arrow(column: DeviceColumn, kind: pa.DataType) -> pa.Array:
    """A column in host memory, in the Arrow type it stands for."""
    if column.size() == 0:
        return pa.array([], kind)
    return from_storage(column.to_arrow(), kind)


def to_arrow_pieces(column: DeviceColumn, kind: pa.DataType, stored: pa.Array | None = None) -> list[pa.Array]:
    """Copies a column out like `to_arrow`, text in as many arrays as 32-bit offsets need.

    ``stored``: the copy, if there is one already.
    """
    if column.size() == 0:
        return [pa.array([], kind)]
    if stored is None:
        stored = column.to_arrow()
    if not pa.types.is_large_string(stored.type):
        return [from_storage(stored, kind)]
    return [from_storage(piece, kind) for piece in narrow(stored)]


def copied_out(columns: Sequence[DeviceColumn], kinds: Sequence[pa.DataType]) -> list[pa.Array | None]:
    """Columns as they are stored, in Arrow, by one wait: copies on a stream of their own to page-locked memory.

    libcudf copies to memory that is not page-locked, through a small buffer of the driver's, a column at a time, and
    waits for every kernel that any thread has launched. These copies wait for what was launched before them. What they
    fill is the array's own memory, which is used again when nobody holds it any more.

    Args:
        columns: n columns.
        kinds: the Arrow types that they stand for.

    Returns:
        n arrays; None for a column that is left to libcudf: nested or empty ones, and what there is no memory for.
    """
    copies: list[tuple[int, int, int]] = []
    made: list[tuple[DeviceColumn, pa.DataType, list[pa.Buffer]] | None] = []
    for column, kind in zip(columns, kinds, strict=True):
        spans = _spans(column, storage_type(kind))
        block = device.PAGES.block(sum(_padded(size) for _, size in spans)) if spans else None
        if block is None:
            made.append(None)
            continue
        at, buffers = 0, []
        for address, size in spans:
            copies.append((block.address + at, address, size))
            buffers.append(block.buffer(at, size))
            at += _padded(size)
        made.append((column, storage_type(kind), buffers))
    if copies:
        _copy_out(copies)
    return [None if parts is None else _array(*parts) for parts in made]


def arrays_out(arrays: Sequence[Array]) -> list[npt.NDArray[Any]]:
    """Arrays in host memory, by one wait like `copied_out`."""
    size = sum(_padded(array.nbytes) for array in arrays)
    block = device.PAGES.block(size) if size else None
    if block is None:
        return [cp.asnumpy(array) for array in arrays]
    copies: list[tuple[int, int, int]] = []
    found, at = [], 0
    whole = [array if array.flags.c_contiguous else cp.ascontiguousarray(array) for array in arrays]
    for array in whole:
        copies.append((block.address + at, int(array.data.ptr), int(array.nbytes)))
        found.append(np.frombuffer(block.buffer(at, int(array.nbytes)), array.dtype))
        at += _padded(array.nbytes)
    _copy_out(copies)
    return found


def _copy_out(copies: Sequence[tuple[int, int, int]]) -> None:
    """Bytes to page-locked addresses, from addresses on the card, so many each; waits for them."""
    launched, done = (cp.cuda.Event(disable_timing=True) for _ in range(2))
    launched.record()
    stream = _stream()
    stream.wait_event(launched)
    try:
        for to, source, size in copies:
            if size:
                cp.cuda.runtime.memcpyAsync(to, source, size, cp.cuda.runtime.memcpyDeviceToHost, stream.ptr)
    finally:
        done.record(stream)
        done.synchronize()


@functools.cache
def _stream() -> Any:
    return cp.cuda.Stream(non_blocking=True)


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def _spans(column: DeviceColumn, stored: pa.DataType) -> list[tuple[int, int]]:
    """Addresses and bytes of a column's buffers: null mask if it has nulls, offsets if it is text, values."""
    rows = column.size()
    if not rows or column.offset() or pa.types.is_nested(stored):
        return []
    found = [(column.null_mask().ptr, -(-rows // 8))] if column.null_count() else []
    if not pa.types.is_string(stored):
        width = 1 if pa.types.is_boolean(stored) else stored.bit_width // 8
        return [*found, (column.data().ptr, rows * width)]
    offsets, text = column.child(0), column.data()
    width = 8 if offsets.type().id() == plc.TypeId.INT64 else 4
    return [*found, (offsets.data().ptr, (rows + 1) * width), (0, 0) if text is None else (text.ptr, text.size)]


def _array(column: DeviceColumn, stored: pa.DataType, buffers: list[pa.Buffer]) -> pa.Array:
    rows, missing = column.size(), column.null_count()
    mask = buffers.pop(0) if missing else None
    if pa.types.is_boolean(stored):  # a byte each
        buffers = [pa.py_buffer(np.packbits(np.frombuffer(buffers[0], np.bool_), bitorder="little"))]
    if pa.types.is_string(stored) and buffers[0].size == 8 * (rows + 1):
        stored = pa.large_string()
    return pa.Array.from_buffers(stored, rows, [mask, *buffers], missing)


def nulls(kind: pa.DataType, length: int) -> DeviceColumn:
    """A column of nulls."""
    return plc.Column.from_arrow(pa.nulls(length, storage_type(kind)))


def values(column: DeviceColumn, dtype: npt.DTypeLike, *, lanes: int = 1) -> Array:
    """The values of a fixed-width column, not copied; nulls hold whatever is there.

    Args:
        column: its buffer stays alive with the array.
        dtype: what the buffer holds.
        lanes: numbers per row: 2 for decimal128 as int64.
    """
    size, kind = column.size() * lanes, np.dtype(dtype)
    if size == 0:
        return cp.empty(0, kind)
    span = column.data()
    memory = cp.cuda.UnownedMemory(span.ptr, span.size, column)
    return cp.ndarray(size, kind, cp.cuda.MemoryPointer(memory, column.offset() * lanes * kind.itemsize))


def from_values(array: Array) -> DeviceColumn:
    """A column over an array's memory, without nulls; the column keeps the array alive."""
    whole = array if array.flags.c_contiguous else cp.ascontiguousarray(array)
    return plc.Column.from_cuda_array_interface(whole)


def from_lanes(array: Array) -> DeviceColumn:
    """A column over numbers: n, or n pairs of int64 that are the halves of decimals."""
    if array.ndim == 1:
        return from_values(array)
    return plc.Column(plc.DataType(plc.TypeId.DECIMAL128, 0), len(array), plc.gpumemoryview(array), None, 0, 0, [])


@functools.cache
def lanes_of(kind: pa.DataType) -> tuple[Any, int] | None:
    """The number type that stores a type's values, and how many numbers a row has; None for text and nested types."""
    stored = storage_type(kind)
    if stored == DECIMAL:
        return np.int64, 2
    return None if pa.types.is_string(stored) or pa.types.is_nested(stored) else (stored.to_pandas_dtype(), 1)


def valid_mask(column: DeviceColumn) -> Array | None:
    """Mask of values that are not null; None for all."""
    return values(plc.unary.is_valid(column), np.bool_) if column.null_count() else None


class GatherMap:
    """The rows that a gather reads.

    Args:
        rows: n positions (int64), -1 for a row of nulls.
        missing: how many are -1; None to look.
    """

    def __init__(self, rows: Array, missing: int | None) -> None:
        self.rows, self.missing, self._mask = rows, missing or 0, None
        if missing is None and rows.size:
            self._mask, self.missing = plc.transform.bools_to_mask(from_values(rows >= 0))

    def fixed(
        self, segments: Sequence[Sequence[DeviceColumn]], starts: Sequence[int], numbers: Sequence[tuple[Any, int]]
    ) -> list[DeviceColumn]:
        """Rows of columns of a fixed width without nulls; arguments as of `gather_rows`."""
        masked = bool(self.missing) and self._mask is None
        found, made = gather_rows(segments, starts, self.rows, numbers, masked=masked)
        mask = self._mask if made is None else plc.gpumemoryview(made)
        columns = [from_lanes(values) for values in found]
        return [column.with_mask(mask, self.missing) for column in columns] if self.missing else columns

    def gather(self, columns: Sequence[DeviceColumn]) -> list[DeviceColumn]:
        """Rows of columns of any type, which are not empty, by libcudf."""
        if not columns:
            return []
        # libcudf counts negative positions from the end; one past the end is out of bounds, and made null
        rows = cp.where(self.rows < 0, columns[0].size(), self.rows) if self.missing else self.rows
        bounds = plc.copying.OutOfBoundsPolicy
        policy = bounds.NULLIFY if self.missing else bounds.DONT_CHECK
        return list(plc.copying.gather(plc.Table(list(columns)), from_values(rows.astype(np.int32)), policy).columns())


def gather(
    columns: Sequence[DeviceColumn], rows: Array, kinds: Sequence[pa.DataType], *, missing: int | None = None
) -> list[DeviceColumn]:
    """Rows of columns by position.

    Args:
        columns: of one length.
        rows: n positions (int64), -1 for null.
        kinds: the Arrow types of the columns.
        missing: how many positions are -1; None to look.
    """
    if not columns:
        return []
    if columns[0].size() == 0:
        return [nulls(kind, int(rows.size)) for kind in kinds]
    places = GatherMap(rows, missing)
    taken: list[DeviceColumn] = [None] * len(columns)
    fixed = [at for at, column in enumerate(columns) if not column.null_count() and lanes_of(kinds[at]) is not None]
    numbers = [lanes_of(kinds[at]) or (None, 0) for at in fixed]
    for at, found in zip(fixed, places.fixed([[columns[at] for at in fixed]], [0], numbers), strict=True):
        taken[at] = found
    others = [at for at, column in enumerate(taken) if column is None]
    for at, column in zip(others, places.gather([columns[at] for at in others]), strict=True):
        taken[at] = column
    return taken


def choose(mask: Array, first: DeviceColumn, second: DeviceColumn, kind: pa.DataType) -> DeviceColumn:
    """First's value where the mask is set, else second's, of any type; columns of length 1 count for all rows."""
    both = plc.concatenate.concatenate([first, second])
    places = cp.arange(mask.size, dtype=np.int64)
    a = places if first.size() == mask.size else cp.zeros_like(places)
    b = places if second.size() == mask.size else cp.zeros_like(places)
    return gather([both], cp.where(mask, a, first.size() + b), [kind], missing=0)[0]
