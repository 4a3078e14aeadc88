"""The card: whether one answers, what cupy has to be there for, and how kernels of our own are launched.

These are C source as text, compiled by cupy when first used.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import Any

import cupy as cp
import numpy as np

from gpu_ops.arrays import Array
from gpu_ops.errors import BackendError

_LEAST = 70
"""Compute capability that libcudf's kernels are built for: Volta."""
_THREADS = 256
"""Of a block."""


def describe_device() -> tuple[bool, str]:
    """Whether a GPU answers, with its name, compute capability and memory; or why none does."""
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
        return False, f"{type(error).__name__}: {error}"
    capability = 10 * int(found["major"]) + int(found["minor"])
    name = f"{found['name'].decode()}, compute capability {capability / 10:.1f}"
    if capability < _LEAST:
        return False, f"{name}: libcudf needs {_LEAST / 10:.1f}"
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return True, f"{name}, {memory}, pylibcudf {_libcudf_version()}, cupy {cp.__version__}"


def _libcudf_version() -> str:
    """What is installed: pylibcudf has no ``__version__``."""
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
        """How often each number from 0 to ``minlength - 1`` comes (int64); no other may.

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
def _kernel(source: str, name: str) -> Any:
    return cp.RawKernel(source, name)


def launch(source: str, name: str, threads: int, *arguments: Any) -> None:
    """Run a kernel by at least so many threads.

    Args:
        source: its CUDA C, in which other kernels may stand, too.
        name: of the kernel.
        threads: one at least.
        arguments: GPU arrays, which it gets as pointers; numpy scalars; and structured numpy arrays of one element,
            which it gets by value, 4 KB of them together.
    """
    _kernel(source, name)((-(-threads // _THREADS),), (_THREADS,), arguments)


def address(array: Array) -> int:
    """Where an array begins in GPU memory: whoever passes it on keeps the array alive."""
    return int(array.data.ptr)
