"""By which hash of its key a row goes to a partition: Spark's, or that of rows that Arrow reads."""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops.errors import NotBuiltError
from gpu_ops.state.manifest import ARROW

UInt32s = npt.NDArray[np.uint32]

_SEED: Final = 42
_LONG_DIGITS: Final = 18
"""Digits of a decimal that Spark keeps in a long."""


def spark_hash(columns: Sequence[pa.Array], rows: int) -> npt.NDArray[np.int32]:
    """One hash per row.

    Args:
        columns: of primitive types, text or bytes; timestamps in microseconds.
        rows: how many.

    Raises:
        NotBuiltError: a column of a nested type.
    """
    hashes = np.full(rows, _SEED, np.uint32)
    for column in columns:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        hashes = np.where(valid, _hashed(column, hashes), hashes)
    return hashes.view(np.int32)


def int_hash(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The hash of single whole numbers of 32 bits."""
    return _ints(numbers.view(np.uint32), np.full(numbers.size, _SEED, np.uint32)).view(np.int32)


def _hashed(column: pa.Array, seeds: UInt32s) -> UInt32s:
    kind, t = column.type, pa.types
    if t.is_boolean(kind):
        return _ints(column.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint32), seeds)
    if t.is_decimal(kind):
        unscaled = _unscaled(column)
        if kind.precision > _LONG_DIGITS:
            return _bytes([_big_endian(value) for value in unscaled], seeds)
        return _longs(np.array(unscaled, np.int64).view(np.uint64), seeds)
    if t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind):
        return _bytes(column.cast(pa.large_binary()), seeds)
    if t.is_floating(kind):
        # one zero, one NaN: Spark's plan sees to that before the hash
        values = column.fill_null(0).to_numpy(zero_copy_only=False) + kind.to_pandas_dtype()(0)
        values = np.where(np.isnan(values), kind.to_pandas_dtype()("nan"), values)
        return _ints(values.view(np.uint32), seeds) if kind.bit_width == 32 else _longs(values.view(np.uint64), seeds)
    if t.is_integer(kind) or t.is_temporal(kind):
        whole = pa.int64() if kind.bit_width == 64 else pa.int32()
        values = column.cast(whole) if t.is_integer(kind) else column.view(whole)
        numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
        return _longs(numbers.view(np.uint64), seeds) if whole == pa.int64() else _ints(numbers.view(np.uint32), seeds)
    raise NotBuiltError(f"Spark's hash of a key of type {kind} is not built")


def _ints(values: UInt32s, seeds: UInt32s) -> UInt32s:
    return _final(_mixed(seeds, values), 4)


def _longs(values: npt.NDArray[np.uint64], seeds: UInt32s) -> UInt32s:
    low, high = values.astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)
    return _final(_mixed(_mixed(seeds, low), high), 8)


def _bytes(column: Any, seeds: UInt32s) -> UInt32s:
    """Whole words of four bytes, then each byte that is left over as a number of its own, with its sign."""
    values = pa.array(column, pa.large_binary())
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    starts, sizes = offsets[:-1], offsets[1:] - offsets[:-1]
    held = values.buffers()[2]
    data = np.concatenate([np.frombuffer(held, np.uint8) if held is not None else [], np.zeros(4)]).astype(np.uint8)
    hashes, words = seeds.copy(), sizes // 4
    for word in range(int(words.max(initial=0))):
        rows = np.flatnonzero(words > word)
        at = starts[rows] + 4 * word
        parts = [data[at + place].astype(np.uint32) << np.uint32(8 * place) for place in range(4)]
        hashes[rows] = _mixed(hashes[rows], parts[0] | parts[1] | parts[2] | parts[3])
    for place in range(3):
        rows = np.flatnonzero(sizes % 4 > place)
        left_over = data[starts[rows] + 4 * words[rows] + place].view(np.int8).astype(np.int32)
        hashes[rows] = _mixed(hashes[rows], left_over.view(np.uint32))
    return _final(hashes, sizes.astype(np.uint32))


def _unscaled(column: pa.Array) -> list[int]:
    # keys of decimals: exact whole numbers of up to 38 digits, which numpy has not
    exact = decimal.Context(prec=80)
    scale = column.type.scale
    return [0 if value is None else int(value.scaleb(scale, exact)) for value in column.to_pylist()]


def _big_endian(value: int) -> bytes:
    """As few bytes as hold it, as Java's ``BigInteger.toByteArray`` gives them."""
    return value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "big", signed=True)


def _mixed(hashes: UInt32s, values: UInt32s) -> UInt32s:
    mixed = _rotated(values * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(hashes ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _final(hashes: UInt32s, length: Any) -> UInt32s:
    hashes = hashes ^ np.uint32(length) if isinstance(length, int) else hashes ^ length
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    return hashes ^ (hashes >> np.uint32(16))


def _rotated(values: UInt32s, by: int) -> UInt32s:
    return (values << np.uint32(by)) | (values >> np.uint32(32 - by))


DISTRIBUTION: Final = ARROW
"""How rows are distributed here, as manifests have it; elsewhere it is Spark's HashPartitioning."""


def partition_of(keys: list[pa.Array], rows: int, partitions: int) -> npt.NDArray[np.int32]:
    """The partition of each row, by its key.

    Args:
        keys: the columns of the key, each in the type it is compared in.
        rows: how many.
        partitions: how many.
    """
    # here, as an executor's import of pandas takes a while
    from cpu_fallback.hashing import hash_columns  # noqa: PLC0415

    return (hash_columns(keys, rows) % np.uint64(partitions)).astype(np.int32)


def routes(partitions: int) -> tuple[int, ...]:
    """For each partition the least number that Spark's HashPartitioning sends there.

    That is its hash modulo the partitions.
    """
    size = 16 * partitions
    while True:
        places = int_hash(np.arange(size, dtype=np.int32)) % partitions
        found, least = np.unique(places, return_index=True)
        if found.size == partitions:
            return tuple(least.tolist())
        size *= 2
