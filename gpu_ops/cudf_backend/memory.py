"""One pool of GPU memory per process, for libcudf and cupy alike, with a budget; and page-locked memory beside it.

The pool is made by the first backend of the process and given back by the last (a state server has many: one
per join and partition). cupy allocates through RMM, so one budget counts both: small arrays by cupy's own pool on top
of it, which goes without Python and the driver, large ones by themselves. What the small ones leave unused there goes
back when anything finds no memory.
"""

from __future__ import annotations

import collections
import logging
import threading
from typing import Any

import cupy as cp
import pyarrow as pa
import rmm
import rmm.mr

_log = logging.getLogger("gpu_ops")
_lock = threading.Lock()
_MEMORY_POOLS_SUPPORTED = 115
"""``cudaDevAttrMemoryPoolsSupported``."""
_FREE_SHARE = 0.9
"""Of the free memory, where nobody says a limit: the rest is for CUDA's own use and for other processes."""
_KEPT_SHARE = 0.7
"""Of the limit: unused memory that the pool holds beyond it goes back to the card at the next wait.

State takes 0.6 at most, so a micro-batch's memory to work in need not be mapped anew each time.
"""
_SMALL = 1 << 20
"""Bytes of an array, at most, that cupy's pool has. A large one, cut up there, would be lost to libcudf."""
_MOST_LOCKED = 1 << 30
"""Bytes of page-locked memory, at most: nothing else on the host can use it."""
_LEAST_LOCKED = 1 << 16
"""Bytes of its smallest blocks; others are powers of two, so that they fit again."""


class _Pool:
    """The process's pool, and what was there before it."""

    users = 0
    limit = 0
    resource: Any = None
    before: Any = None
    device = 0
    allocator: Any = None
    small: Any = None


def acquire(limit: int | None) -> int:
    """Set up the pool, or join it.

    Args:
        limit: bytes that may be allocated at most, by all backends of the process together; None for `_FREE_SHARE`
            of what is free now. The first one says; another wish later is logged and not followed.

    Returns:
        The limit in force.
    """
    with _lock:
        _Pool.users += 1
        if _Pool.users > 1:
            if limit not in (None, _Pool.limit):
                _log.warning("GPU memory of this process is limited to %s bytes already, not %s", _Pool.limit, limit)
            return _Pool.limit
        try:
            _Pool.before = rmm.mr.get_current_device_resource()
            _Pool.allocator = cp.cuda.get_allocator()
            _Pool.limit = limit or int(_FREE_SHARE * cp.cuda.runtime.memGetInfo()[0])
            _Pool.resource = _make(_Pool.limit)
            rmm.mr.set_current_device_resource(_Pool.resource)
            _Pool.device = cp.cuda.Device().id
            _Pool.small = cp.cuda.MemoryPool(_through_rmm)
            cp.cuda.set_allocator(_allocate)
        except BaseException:
            _Pool.users = 0
            raise
        return _Pool.limit


def release() -> None:
    """Leave the pool; the last user gives it back. Columns that still live keep their part of it alive."""
    with _lock:
        _Pool.users -= 1
        if _Pool.users:
            return
        cp.cuda.set_allocator(_Pool.allocator)
        _Pool.small.free_all_blocks()
        rmm.mr.set_current_device_resource(_Pool.before)
        _Pool.resource = _Pool.before = _Pool.allocator = _Pool.small = None
        _Pool.limit = 0
    PAGES.drop()


def allocated() -> int | None:
    """Bytes in use of what was allocated through the pool; None without one."""
    return reserved() - int(_Pool.small.free_bytes()) if _Pool.users else None


def reserved() -> int:
    """The same with what small arrays have left unused: what counts for the limit."""
    return int(_Pool.resource.upstream_mr.get_allocated_bytes())


def _allocate(size: int) -> Any:
    """GPU memory for an array of cupy's."""
    return _Pool.small.malloc(size) if size <= _SMALL else _through_rmm(size)


def _through_rmm(size: int) -> Any:
    """A buffer of RMM's as cupy's memory.

    RMM has a function for this, too; it makes an object for the stream each time, and asks the driver on which card
    the memory is. Here there is one stream and one card.
    """
    buffer = rmm.DeviceBuffer(size=size, mr=_Pool.resource)
    return cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(buffer.ptr, buffer.size, buffer, _Pool.device), 0)


def _give_back(_size: int) -> bool:
    """Whether small arrays had left memory unused that is free now: then what found none is tried again."""
    if _Pool.small is None:  # the last backend is gone; what it left behind may still be there
        return False
    before = _Pool.small.total_bytes()
    _Pool.small.free_all_blocks()
    return bool(_Pool.small.total_bytes() < before)


def _make(limit: int) -> Any:
    # The driver's own pool takes memory as it is used, and shares the card with other processes: Spark's plugin may
    # be one. Virtual GPUs can lack it; RMM's gives nothing back before it is closed.
    device = cp.cuda.Device().id
    if cp.cuda.runtime.deviceGetAttribute(_MEMORY_POOLS_SUPPORTED, device):
        pool = rmm.mr.CudaAsyncMemoryResource(release_threshold=int(_KEPT_SHARE * limit))
    else:
        pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=256 << 20)
    return rmm.mr.FailureCallbackResourceAdaptor(rmm.mr.LimitingResourceAdaptor(pool, limit), _give_back)


class Block:
    """Page-locked memory of the host's; whoever holds a part of it keeps all of it.

    Attributes:
        address: where it begins.
    """

    def __init__(self, memory: Any, size: int, home: collections.deque[tuple[int, Any]]) -> None:
        self._memory, self._size, self._home = memory, size, home
        self.address = int(memory.ptr)

    def buffer(self, start: int, size: int) -> pa.Buffer:
        """A part of it."""
        return pa.foreign_buffer(self.address + start, size, self)

    def __del__(self) -> None:
        self._home.append((self._size, self._memory))  # without a lock: this may run in the middle of anything


class Pages:
    """Page-locked memory, which is used again once nobody holds it. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Any]] = {}
        self._returned: collections.deque[tuple[int, Any]] = collections.deque()
        self.total = 0

    def block(self, size: int) -> Block | None:
        """So many bytes; None if `_MOST_LOCKED` are in use, or the host allows no more."""
        size = max(_LEAST_LOCKED, 1 << (size - 1).bit_length())
        with self._lock:
            self._collect()
            if self._free.get(size):
                return Block(self._free[size].pop(), size, self._returned)
            if self.total + size > _MOST_LOCKED:
                self._drop()
            if self.total + size > _MOST_LOCKED:
                return None
            try:
                memory = cp.cuda.PinnedMemory(size)
            except cp.cuda.runtime.CUDARuntimeError:
                return None
            self.total += size
            return Block(memory, size, self._returned)

    def drop(self) -> None:
        """Give back what nobody holds."""
        with self._lock:
            self._collect()
            self._drop()

    def _collect(self) -> None:
        while self._returned:
            size, memory = self._returned.popleft()
            self._free.setdefault(size, []).append(memory)

    def _drop(self) -> None:
        self.total -= sum(size * len(blocks) for size, blocks in self._free.items())
        self._free.clear()


PAGES = Pages()
"""Of this process."""
