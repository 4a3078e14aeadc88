"""Hashes: of a row's key to its partition, and of the number by which Spark's shuffle sends the row there."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

UInt32s = npt.NDArray[np.uint32]


def partition_of(keys: list[pa.Array], rows: int, partitions: int) -> npt.NDArray[np.int32]:
    """Computes the partition of each row from its key.

    Args:
        keys: the columns of the key, each in the type it is compared in.
        rows: the number of rows.
        partitions: the number of partitions.
    """
    # here, as an executor's import of pandas takes a while
    from cpu_fallback.hashing import hash_columns  # noqa: PLC0415

    return (hash_columns(keys, rows) % np.uint64(partitions)).astype(np.int32)


def routes(partitions: int) -> tuple[int, ...]:
    """Finds for each partition the least number that Spark's HashPartitioning sends there.

    Spark takes the number's hash modulo the number of partitions.
    """
    size = 16 * partitions
    while True:
        places = int_hash(np.arange(size, dtype=np.int32)) % partitions
        distinct, least = np.unique(places, return_index=True)
        if distinct.size == partitions:
            return tuple(least.tolist())
        size *= 2


_SEED: Final = 42


def int_hash(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Spark's hash (Murmur3) of each of some 32-bit integers."""
    seeds = np.full(numbers.size, _SEED, np.uint32)
    mixed = _rotated(numbers.view(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    hashes = (_rotated(seeds ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)) ^ np.uint32(4)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    return (hashes ^ (hashes >> np.uint32(16))).view(np.int32)


def _rotated(values: UInt32s, by: int) -> UInt32s:
    return (values << np.uint32(by)) | (values >> np.uint32(32 - by))
