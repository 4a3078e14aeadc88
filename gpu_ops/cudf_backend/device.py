"""The card: whether one answers, what cupy has to be there for, and how kernels of our own are launched.

These are CUDA C, in ``kernels.cu``, compiled by cupy when first used.

**One pool** of GPU memory per process, for libcudf and cupy alike, with a budget; and page-locked memory beside it. The
first backend of the process puts it in place and the last one gives its memory back (a state server has many: one
per join and partition). cupy allocates through RMM, so one budget counts both: small arrays by cupy's own pool on top
of it, which goes without Python and the driver, large ones by themselves. What the small ones leave unused there goes
back when anything finds no memory.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.metadata
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import rmm
import rmm.mr

from gpu_ops.arrays import Array
from gpu_ops.errors import BackendError
from gpu_ops.memory import available_memory

_LEAST = {12: 70, 13: 75}
"""Compute capability that libcudf's kernels are built for, by CUDA's version: Volta, Turing."""
_NO_MEMORY = 2
"""``cudaErrorMemoryAllocation``: of all errors that CUDA gives for a call, this one passes."""
SOURCE = Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
"""All CUDA C of the backend: cupy compiles it once, when a kernel is first launched."""
LIMITS = {name: int(number) for name, number in re.findall(r"#define (\w+) (\d+)", SOURCE)}
"""Numbers that kernels and their launches share, by name."""
_THREADS = 256
"""Of a block."""


def describe_device() -> tuple[bool, str]:
    """Tells whether a GPU answers, with its name, compute capability and memory; or why none does.

    One that has no memory left at this moment is one.
    """
    if not cp.cuda.is_available():
        return False, f"cupy {cp.__version__} finds no device: {_why_not()}"
    try:
        import pylibcudf  # noqa: F401, PLC0415 - slow, and of no use without a card
        import rmm  # noqa: F401, PLC0415

        device = cp.cuda.Device()
        found = cp.cuda.runtime.getDeviceProperties(device.id)
        free, total = cp.cuda.runtime.memGetInfo()
        int(cp.arange(1)[0])  # cupy compiles its kernels: that needs NVRTC and the headers of CUDA's runtime
    except Exception as error:
        full = isinstance(error, MemoryError) or getattr(error, "status", None) == _NO_MEMORY
        return full, f"{'it has no memory left: ' if full else ''}{type(error).__name__}: {error}"
    capability = 10 * int(found["major"]) + int(found["minor"])
    name = f"{found['name'].decode()}, compute capability {capability / 10:.1f}"
    least = _LEAST.get(cp.cuda.runtime.runtimeGetVersion() // 1000, max(_LEAST.values()))
    if capability < least:
        return False, f"{name}: libcudf needs {least / 10:.1f}"
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return True, f"{name}, {memory}, pylibcudf {_libcudf_version()}, cupy {cp.__version__}"


def lost() -> str | None:
    """Gives the error that every call gets since a kernel or the card failed; None while the card answers."""
    why = None
    for _ in range(2):  # a call may be told of another's failure, which the next one is not
        try:
            cp.cuda.runtime.memGetInfo()
        except cp.cuda.runtime.CUDARuntimeError as error:
            if error.status == _NO_MEMORY:
                return None
            why = str(error)
        else:
            return None
    return why


def _libcudf_version() -> str:
    """Finds the installed version of libcudf: pylibcudf has no ``__version__``."""
    for name in ("pylibcudf-cu13", "pylibcudf-cu12", "pylibcudf"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def total_memory() -> int:
    """Bytes of the card's memory, used or not."""
    return int(cp.cuda.runtime.memGetInfo()[1])


def _why_not() -> str:
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except Exception as error:
        return str(error) or type(error).__name__
    return "none is visible" if count == 0 else "it does not answer"


def require_one_stream() -> None:
    """Make sure that cupy and pylibcudf work on one stream.

    pylibcudf takes arrays by pointer and does not wait for the stream that fills them (``gpumemoryview``: "Need
    to synchronize on stream"). Both libraries use the legacy default stream unless told otherwise, and it orders
    the work of all host threads, so nothing has to wait. Per-thread streams would break that silently.

    Raises:
        BackendError: one of the two was told otherwise.
    """
    for variable in ("CUDF_PER_THREAD_STREAM", "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"):
        if os.environ.get(variable, "0") != "0":
            raise BackendError(f"{variable} is set; the GPU backend needs one stream for all threads: unset it")
    if cp.cuda.get_current_stream().ptr != 0:
        raise BackendError("a cupy stream is in use here; the GPU backend works on the default stream")


class _Cupy:
    """cupy, with a `bincount` that needs no more room than its result."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cp, name)

    @staticmethod
    def bincount(numbers: Any, minlength: int) -> Any:
        """Counts how often each number from 0 to ``minlength - 1`` comes (int64); no other may.

        cupy's own waits for the card three times to find the largest, and counts by CUB, which takes a counter per
        number and thread block: gigabytes for a million numbers. Where the pool refuses them it gives up, and
        before 14.2 it counts wrongly from some two million numbers on (offsets of 32 bits).
        """
        counts = cp.zeros(minlength, np.int64)
        cp.add.at(counts.view(np.uint64), numbers, 1)  # CUDA's atomicAdd knows no int64
        return counts


def array_module() -> Any:
    """Cupy as operators use it."""
    return _Cupy()


def spread(counts: Any) -> Any:
    """Positions 0, 1, ... each repeated ``counts[i]`` times (int64)."""
    ends = cp.cumsum(counts, dtype=np.int64)
    place = cp.arange(int(ends[-1]) if ends.size else 0, dtype=np.int64)
    return cp.searchsorted(ends, place, side="right")


@functools.cache
def _kernel(name: str) -> Any:
    return cp.RawKernel(SOURCE, name)


def launch(name: str, threads: int, *arguments: Any) -> None:
    """Run a kernel by at least so many threads.

    Args:
        name: of the kernel, which stands in ``kernels.cu``.
        threads: one at least.
        arguments: GPU arrays, which it gets as pointers; numpy scalars; and structured numpy arrays of one element,
            which it gets by value, 4 KB of them together.
    """
    _kernel(name)((-(-threads // _THREADS),), (_THREADS,), arguments)


def address(array: Array) -> int:
    """The place in GPU memory where an array begins: whoever passes it on keeps the array alive."""
    return int(array.data.ptr)


_log = logging.getLogger("gpu_ops")
_lock = threading.Lock()
_MEMORY_POOLS_SUPPORTED = 115
"""``cudaDevAttrMemoryPoolsSupported``."""
_PINNED, _NO_HANDLES, _ON_DEVICE = 1, 0, 1
"""``cudaMemAllocationTypePinned``, ``cudaMemHandleTypeNone``, ``cudaMemLocationTypeDevice``."""
_RELEASE_THRESHOLD = 4
"""``cudaMemPoolAttrReleaseThreshold``."""
RESERVE = 3 << 29
"""Bytes, 1.5 GiB, that stay free where nobody says a limit, or half of what is free if that is less: CUDA loads modules
when they are first used, which take no more on a larger card."""
_KEPT_SHARE = 0.7
"""Of the limit: unused memory that the pool holds beyond it goes back to the card at the next wait.

State takes 0.6 at most, so a micro-batch's memory to work in need not be mapped anew each time.
"""
SMALL = 1 << 20
"""Bytes of an array, at most, that cupy's pool has. A large one, cut up there, would be lost to libcudf."""
_MOST_LOCKED = max(1 << 30, (available_memory() or 0) // 16)
"""Bytes of page-locked memory, at most: a sixteenth of what the host has, as nothing else can use it."""
_LEAST_LOCKED = 1 << 16
"""Bytes of its smallest blocks."""


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
        limit: bytes that may be allocated at most, by all backends of the process together; None for what is free
            now but for `RESERVE`. The first one says; another wish later is logged and not followed.

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
            _Pool.limit = limit or _most(cp.cuda.runtime.memGetInfo()[0])
            _Pool.resource = _make(_Pool.limit)
            rmm.mr.set_current_device_resource(_Pool.resource)
            _Pool.device = cp.cuda.Device().id
            _Pool.small = cp.cuda.MemoryPool(_through_rmm)
            cp.cuda.set_allocator(_allocate)
        except BaseException:
            _Pool.users = 0
            raise
        return _Pool.limit


def _most(free: int) -> int:
    return max(free - RESERVE, free // 2)


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
        pool = _pool_of(_Pool.device)
        if pool is not None:
            cp.cuda.Device(_Pool.device).synchronize()
            cp.cuda.runtime.memPoolSetAttribute(pool.pool_handle(), _RELEASE_THRESHOLD, 0)
            cp.cuda.runtime.memPoolTrimTo(pool.pool_handle(), 0)
    PAGES.drop()


def allocated() -> int | None:
    """Bytes in use of what was allocated through the pool; None without one."""
    return reserved() - int(_Pool.small.free_bytes()) if _Pool.users else None


def reserved() -> int:
    """Bytes of GPU memory in use, with what small arrays have left unused: what counts for the limit."""
    return int(_Pool.resource.upstream_mr.get_allocated_bytes())


def _allocate(size: int) -> Any:
    """GPU memory for an array of cupy's."""
    return _Pool.small.malloc(size) if size <= SMALL else _through_rmm(size)


def _through_rmm(size: int) -> Any:
    """A buffer of RMM's as cupy's memory.

    RMM has a function for this, too; it makes an object for the stream each time, and asks the driver on which card
    the memory is. Here there is one stream and one card.
    """
    buffer = rmm.DeviceBuffer(size=size, mr=_Pool.resource)
    return cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(buffer.ptr, buffer.size, buffer, _Pool.device), 0)


SPARE: list[Callable[[], bool]] = []
"""Functions that give up memory which only saves time, and say whether there was any: the first to go."""


def _give_back(_size: int) -> bool:
    """Frees what small arrays have left unused and what others can spare; True if there was any, to try again."""
    spared = [give_up() for give_up in SPARE]
    if _Pool.small is None:  # the last backend is gone; what it left behind may still be there
        return any(spared)
    before = _Pool.small.total_bytes()
    _Pool.small.free_all_blocks()
    return any(spared) or bool(_Pool.small.total_bytes() < before)


def _make(limit: int) -> Any:
    # The driver's own pool takes memory as it is used, and shares the card with other processes: Spark's plugin may
    # be one. Virtual GPUs can lack it; RMM's gives nothing back before it is closed.
    pool = _pool_of(cp.cuda.Device().id)
    if pool is not None:
        cp.cuda.runtime.memPoolSetAttribute(pool.pool_handle(), _RELEASE_THRESHOLD, int(_KEPT_SHARE * limit))
    else:
        pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=256 << 20)
    return rmm.mr.FailureCallbackResourceAdaptor(rmm.mr.LimitingResourceAdaptor(pool, limit), _give_back)


@functools.cache
def _pool_of(device: int) -> Any:
    """The driver's pool on a card, which lives as long as the process; None where it has none.

    Where pools come and go with engines, driver 580 has crashed in ``cuStreamSynchronize`` after some dozens of them
    (an H100, 2026-11-26).
    """
    runtime = cp.cuda.runtime
    if not runtime.deviceGetAttribute(_MEMORY_POOLS_SUPPORTED, device):
        return None
    from cuda.bindings.runtime import cudaMemPool_t  # noqa: PLC0415 - RMM brings it

    handle = runtime.memPoolCreate(runtime.MemPoolProps(_PINNED, _NO_HANDLES, _ON_DEVICE, device))
    return rmm.mr.CudaAsyncViewMemoryResource(cudaMemPool_t(handle))


class PinnedBlock:
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

    def writable(self, start: int, size: int) -> npt.NDArray[np.uint8]:
        """A part of it to be filled, which does not keep it."""
        found: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address + start))
        return found

    def __del__(self) -> None:
        self._home.append((self._size, self._memory))  # without a lock: this may run in the middle of anything


class Pages:
    """Page-locked memory, which is used again once nobody holds it. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Any]] = {}
        self._returned: collections.deque[tuple[int, Any]] = collections.deque()
        self.total = 0

    def block(self, size: int) -> PinnedBlock | None:
        """So many bytes; None if `_MOST_LOCKED` are in use, or the host allows no more."""
        size = _rounded(size)
        with self._lock:
            self._collect()
            fits = [own for own, blocks in self._free.items() if blocks and size <= own <= size + size // 4]
            if fits:
                own = min(fits)
                return PinnedBlock(self._free[own].pop(), own, self._returned)
            self._make_room(size)
            if self.total + size > _MOST_LOCKED:
                return None
            try:
                memory = cp.cuda.PinnedMemory(size)
            except cp.cuda.runtime.CUDARuntimeError:
                return None
            self.total += size
            return PinnedBlock(memory, size, self._returned)

    def drop(self) -> None:
        """Give back what nobody holds."""
        with self._lock:
            self._collect()
            self._make_room(_MOST_LOCKED + 1)

    def _collect(self) -> None:
        while self._returned:
            size, memory = self._returned.popleft()
            self._free.setdefault(size, []).append(memory)

    def _make_room(self, size: int) -> None:
        """Gives back what nobody holds, the largest first, until there is room for so many bytes."""
        for own in sorted(self._free, reverse=True):
            while self._free[own] and self.total + size > _MOST_LOCKED:
                self._free[own].pop()
                self.total -= own


def _rounded(size: int) -> int:
    """Bytes of a block for so many: eighths of a power of two, so that it fits again and an eighth is lost at most."""
    eighth = max(_LEAST_LOCKED, 1 << max((size - 1).bit_length() - 4, 0))
    return -(-size // eighth) * eighth


PAGES = Pages()
"""Of this process."""
