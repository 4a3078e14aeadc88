"""State in two memories: what a GPU's budget has no room for lies in host memory, and is probed there.

The newest rows are the likeliest to be asked for, so the oldest go first; and rows before indexes, because every lookup
reads the indexes, but only a match reads rows. What lies where changes no answer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from gpu_ops.arrays import Array
from gpu_ops.kernels import Kernels

_log = logging.getLogger("gpu_ops")


class Both:
    """An array in the backend's memory, copied to the host's when first asked for there.

    Args:
        kernels: the backend.
        array: its array.
    """

    def __init__(self, kernels: Kernels, array: Array) -> None:
        self._kernels, self._array = kernels, array
        self._copy: Array = None

    def at(self, home: Kernels) -> Array:
        """The array in the memory of ``home``: the backend itself, or its ``host``."""
        if home is self._kernels:
            return self._array
        if self._copy is None:
            self._copy = self._kernels.asnumpy(self._array)
        return self._copy


class Coolable(Protocol):
    """A state table, as what can be moved to the host; where nothing can be, as here, it lies there."""

    @property
    def nbytes(self) -> int:
        """Bytes of state, in both memories."""

    @property
    def host_bytes(self) -> int:
        """Those in host memory."""

    def cool_rows(self) -> int:
        """Move the oldest rows that are in GPU memory to the host's, some at least; the bytes freed, 0 if none is."""
        return 0

    def cool_indexes(self) -> int:
        """The same of the indexes."""
        return 0

    def warm(self) -> None:
        """Move everything back."""


def make_room(tables: Sequence[Coolable], wanted: int) -> int:
    """Move state to the host, the coldest first, until so much is freed or nothing is left to move.

    Args:
        tables: of one engine.
        wanted: bytes of GPU memory.

    Returns:
        Bytes freed.
    """
    freed = 0
    ways: tuple[Callable[[Coolable], int], ...] = (lambda t: t.cool_rows(), lambda t: t.cool_indexes())
    for way in ways:
        movable = list(tables)
        while freed < wanted and movable:
            largest = max(movable, key=lambda t: t.nbytes - t.host_bytes)
            moved = way(largest)
            freed += moved
            if not moved:
                movable.remove(largest)
    return freed


@contextlib.contextmanager
def postponed(kernels: Kernels, what: str) -> Iterator[None]:
    """Leaves out for now what only makes later work cheaper, if the GPU has no memory for it.

    The work within must leave everything as it was when it fails.
    """
    try:
        yield
    except MemoryError as error:
        if kernels.host is None:
            raise
        _log.info("%s is postponed for want of GPU memory: %s", what, error)
