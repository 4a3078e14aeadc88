"""One pool of GPU memory per process, for libcudf and cupy alike, with a budget.

The pool is made by the first backend of the process and given back by the last (a state server has many: one
per join and partition). cupy allocates through RMM, so one budget counts both: small arrays by cupy's own pool on top
of it, which goes without Python and the driver, large ones by themselves. What the small ones leave unused there goes
back when anything finds no memory.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import cupy as cp
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


def allocated() -> int | None:
    """Bytes allocated through the pool, unused ones of small arrays included; None without one."""
    return int(_Pool.resource.upstream_mr.get_allocated_bytes()) if _Pool.users else None


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
