"""Text of more than 2 GiB in one column: Arrow's ordinary offsets of 32 bits do not reach, in large ones it is held.

Columns come in pieces, and leave in pieces; between, a backend has them in one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

MOST_TEXT = (1 << 31) - 1
"""Bytes of text that an array with offsets of 32 bits holds."""

_WIDE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_NARROW: Final = {wide: narrow for narrow, wide in _WIDE.items()}


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece; with large offsets where others do not reach."""
    if column.num_chunks == 1:
        return column.chunk(0)
    wide = _WIDE.get(column.type)
    if wide is not None and column.nbytes > MOST_TEXT:  # Arrow does not put together what offsets cannot reach
        column = column.cast(wide)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of some types, or where there is no chunk at all
        return pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def beyond_offsets(array: pa.Array) -> bool:
    """Whether an array has large offsets, and needs them."""
    if array.type not in _NARROW or not len(array):
        return False
    offsets = _offsets(array)
    return int(offsets[-1] - offsets[0]) > MOST_TEXT


def fitted(array: pa.Array, kind: pa.DataType) -> list[pa.Array]:
    """An array in another type; in pieces, if that one's offsets do not reach."""
    if array.type == kind:
        return [array]
    if kind not in _NARROW and beyond_offsets(array):
        return [piece if piece.type == kind else piece.cast(kind) for piece in narrow(array)]
    return [array.cast(kind)]


def narrow(array: pa.Array) -> list[pa.Array]:
    """Text with large offsets in pieces with ordinary ones; nothing but offsets is copied.

    Args:
        array: large_string or large_binary, no value of which is too long itself.
    """
    valid, _, text = array.buffers()
    offsets = _offsets(array)
    pieces, begin = [], 0
    while begin < len(array):
        end = int(np.searchsorted(offsets, offsets[begin] + MOST_TEXT, side="right")) - 1
        own = offsets[begin : end + 1] - offsets[begin]
        mask = None
        if valid is not None:
            mask = pa.array(array.slice(begin, end - begin).is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
        data = pa.py_buffer(b"") if text is None else text.slice(int(offsets[begin]), int(own[-1]))
        buffers = [mask, pa.py_buffer(own.astype(np.int32)), data]
        pieces.append(pa.Array.from_buffers(_NARROW[array.type], end - begin, buffers))
        begin = end
    return pieces


def _offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    return np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
