"""CUDA kernels of our own: C source as text, compiled by cupy when first used."""

from __future__ import annotations

import functools
from typing import Any

import cupy as cp

from gpu_ops.arrays import Array

_THREADS = 256


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
