"""What the integers of an array number, for a type checker to keep apart; and small array functions.

At run time these are plain arrays of numpy or cupy, never instances of the classes here. A slot is not a position,
though both are int64: handing ``slots`` to what takes `Positions` is an error of mypy. What arithmetic on them gives
is known to whoever did it, so it counts as any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = Any
"""A one-dimensional array of numpy or cupy: flags, counts, times, as the name has it."""
Ints = npt.NDArray[np.int64]
"""Integers on the host."""
Mask = npt.NDArray[np.bool_]
"""Flags on the host."""
ArrowTypes = Sequence[pa.DataType]
"""The types of some columns, in their order."""


class _Integers(Protocol):  # noqa: PLW1641 - arrays have no hash
    """Integers of one kind; a part of them is of this kind, too."""

    size: int
    nbytes: int
    dtype: Any

    def __len__(self) -> int: ...
    def __getitem__(self, at: Array) -> Self: ...
    def __setitem__(self, at: Any, values: Any) -> None: ...
    def copy(self) -> Self: ...
    def sort(self) -> None: ...
    def max(self) -> Any: ...
    def view(self, dtype: Any) -> Any: ...
    def __add__(self, other: Any) -> Any: ...
    def __radd__(self, other: Any) -> Any: ...
    def __sub__(self, other: Any) -> Any: ...
    def __rsub__(self, other: Any) -> Any: ...
    def __mul__(self, other: Any) -> Any: ...
    def __rmul__(self, other: Any) -> Any: ...
    def __and__(self, other: Any) -> Any: ...
    def __or__(self, other: Any) -> Any: ...
    def __lshift__(self, by: Any) -> Any: ...
    def __rshift__(self, by: Any) -> Any: ...
    def __lt__(self, other: Any) -> Any: ...
    def __le__(self, other: Any) -> Any: ...
    def __gt__(self, other: Any) -> Any: ...
    def __ge__(self, other: Any) -> Any: ...
    def __eq__(self, other: object) -> Any: ...
    def __ne__(self, other: object) -> Any: ...


class Slots(_Integers):
    """Places of rows in a `gpu_ops.kernels.Store` (int64); -1 for "no row", which gathers as nulls."""


class Positions(_Integers):
    """Places of elements in an array, or of rows in a frame (int64)."""


class LogicalTimes(_Integers):
    """Times within a micro-batch (int64), see `gpu_ops.operators.core.changes`."""


class Hashes(_Integers):
    """64-bit hashes of rows (uint64)."""


def value_changes(xp: Any, values: Array) -> Array:
    """Flags of values that differ from the one before: of ``[3, 3, 5]`` first, not, first."""
    flags = xp.ones(values.size, bool)
    xp.not_equal(values[1:], values[:-1], out=flags[1:])
    return flags


def written_out(xp: Any, first: Array, count: Array) -> tuple[Array, Array]:
    """Ranges of so many numbers each, one after the other: which range a number is of, and the numbers."""
    ends = xp.cumsum(count)
    return written_up_to(xp, first, ends, int(ends[-1]) if count.size else 0)


def written_up_to(xp: Any, first: Array, ends: Array, total: int) -> tuple[Array, Array]:
    """Gives the same as `written_out`, if it is known how many numbers there are with each range, and in all."""
    place = xp.arange(total, dtype=np.int64)
    number = xp.searchsorted(ends, place, side="right")
    before = xp.zeros(ends.size, np.int64)
    before[1:] = ends[:-1]
    return number, place + (first - before)[number]
