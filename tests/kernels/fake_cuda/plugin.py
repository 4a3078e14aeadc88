"""Pytest plugin: emulated backends get the real cupy on host memory; libcudf stays emulated."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np

from kernels import emulated_cupy, emulated_libcudf
from kernels.fake_cuda import device

cupy = device.cupy
_stand_ins = emulated_cupy.modules


def plain(value: Any) -> Any:
    """A contiguous device array as a host array over the same memory, which it keeps."""
    if not isinstance(value, cupy.ndarray):
        return value
    assert value.flags.c_contiguous, "a column over a strided array"
    if not value.nbytes:
        return np.empty(value.shape, value.dtype)
    raw = (ctypes.c_char * value.nbytes).from_address(value.data.ptr)
    raw.owner = value
    return np.frombuffer(raw, value.dtype).reshape(value.shape)


def modules() -> dict[str, types.ModuleType]:
    """In place of `emulated_cupy.modules`: all but RMM is cupy itself."""
    return {**_stand_ins(), **device.modules()}


emulated_cupy.modules = modules
emulated_libcudf.ndarray, emulated_libcudf.plain = cupy.ndarray, plain


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"cupy {cupy.__version__} on host memory: {dict(device.done)}")
