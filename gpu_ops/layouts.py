"""Several numbers in one integer, so that sorting the integers sorts by all of them; and the limits that follow.

| what | bits, from the top | type |
|---|---|---|
| entry | upper half of a hash: 32, slot: 32 | uint64 |
| pair | one slot or position: 31, another: 32 | int64 |
| moment | slot: 31, logical time: 28, code: 3 | int64 |
| order in the output | logical time: 28, rank: 2, position: 32 | int64 |

For example the entries of slots 7 and 9, both with hash ``0xAB00000012345678``, are ``0xAB00000000000007`` and
``0xAB00000000000009``: sorted by hash, and within it by slot.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gpu_ops.arrays import Array, Hashes, LogicalTimes, Slots

SLOT_BITS: Final = 32
MAX_SLOTS: Final = (1 << 31) - 2
"""Rows of an input in one partition. A pair of slots is a signed number; libcudf counts rows in 31 bits, too."""

LOGICAL_TIME_BITS: Final = 28
MAX_CHANGES: Final = (1 << (LOGICAL_TIME_BITS - 1)) - 2
"""Changes of a micro-batch in one partition: each has two logical times."""

CODE_BITS: Final = 3
RANK_BITS: Final = 2

_LOW: Final = np.uint64((1 << SLOT_BITS) - 1)
_HIGH: Final = ~_LOW
_SHIFT: Final = np.uint64(SLOT_BITS)


def entries(hashes: Hashes, slots: Slots) -> Array:
    """Entries of n hashes (uint64) and n slots (int64)."""
    made = hashes & _HIGH
    made |= slots.view(np.uint64)
    return made


def entry_hashes(made: Array) -> Array:
    """The upper halves of the hashes of n entries, as small numbers (uint64)."""
    return made >> _SHIFT


def entry_slots(made: Array) -> Slots:
    """The slots of n entries (int64)."""
    return (made & _LOW).view(np.int64)


def renumbered(made: Array, new_slots: Slots) -> tuple[Array, Array]:
    """Entries in the new slot (int64) of each old one, without those that have none, -1; and which have one."""
    slots = new_slots[entry_slots(made)]
    there = slots >= 0
    return entries(made[there], slots[there]), there


def by_hash_and(hashes: Array, less: Array, bits: int) -> Array:
    """Numbers that sort by n hashes, then by something else of so many bits (int64, not negative)."""
    return hashes << np.uint64(bits) | less.view(np.uint64)


def pairs(first: Array, second: Array) -> Array:
    """N pairs of slots or positions (int64), sorted by the first."""
    return (first << SLOT_BITS) | second


def unpaired(made: Array) -> tuple[Array, Array]:
    """Both parts of n pairs."""
    return made >> SLOT_BITS, made & ((1 << SLOT_BITS) - 1)


def unpaired_by_side(made: Array) -> tuple[Slots, Slots]:
    """The left and the right slots of n pairs (see `gpu_ops.kernels.SoleLookup`), both -1 of no pair, -1."""
    first, second = (made >> SLOT_BITS) & ((1 << (SLOT_BITS - 1)) - 1), made & ((1 << SLOT_BITS) - 1)
    none, other = (made << SLOT_BITS) >> 63, (first ^ second) & (made >> 63)  # all bits or none of them
    return second ^ other | none, first ^ other | none


def moments(slots: Slots, logical_times: LogicalTimes, codes: Array | int) -> Array:
    """N slots, logical times and codes, sorted in this order."""
    return (((slots << LOGICAL_TIME_BITS) | logical_times) << CODE_BITS) | codes


def without_codes(made: Array) -> tuple[Array, Array]:
    """Slots and logical times of n moments, as `owned` has them; and their codes."""
    return made >> CODE_BITS, made & ((1 << CODE_BITS) - 1)


def owned(owners: Array, logical_times: LogicalTimes) -> Array:
    """N numbers of whatever is counted and n logical times, sorted in this order."""
    return (owners << LOGICAL_TIME_BITS) | logical_times


def unowned(made: Array) -> tuple[Array, LogicalTimes]:
    """Both parts of what `owned` gives."""
    return made >> LOGICAL_TIME_BITS, made & ((1 << LOGICAL_TIME_BITS) - 1)
