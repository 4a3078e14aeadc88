"""Load cupy on the fake driver, with g++ as its compiler and numpy for Thrust and CUB."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.abc
import importlib.util
import os
import re
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels.fake_cuda import BUILT, DRIVER, HERE, WRAPPER, headers

ctypes.CDLL(str(DRIVER), ctypes.RTLD_GLOBAL)


class _Wrapper(importlib.abc.MetaPathFinder):
    """Finds our build of the one module before cupy's own."""

    def find_spec(self, name: str, *_: Any) -> Any:
        own = name == "cupy_backends.cuda.api.runtime"
        return importlib.util.spec_from_file_location(name, WRAPPER) if own else None


sys.meta_path.insert(0, _Wrapper())

import cupy  # noqa: E402
from cupy._core._reduction import _get_axis  # noqa: E402
from cupy.cuda import (  # noqa: E402
    compiler,
    cub,
    thrust,
)

_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
_FOREIGN = re.compile(r'#include [<"]cupy/(complex|float16|bfloat16)\.cuh[>"]')
"""Types that this project has no arrays of, and g++ no functions for."""
_ARCH = 90
_PRELUDE = (HERE / "kernel.h").read_text()
_COMPILER = ["g++", "-O1", "-std=c++20", "-w", "-fpermissive", "-fPIC", "-shared"]
# As on a card: integers wrap, aliases are allowed. And no fused multiply-adds across cupy's calls, where NVRTC has none.
_COMPILER += ["-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off"]

_one_compiler = threading.Lock()
done: Counter[str] = Counter()
"""How many kernels were asked for, and which replaced calls."""


# --- kernels ---------------------------------------------------------------------------------


def _compile(source: str, options: Sequence[str] = (), *_: Any, **__: Any) -> Any:
    """In place of ``cupy.cuda.compiler._compile_module_with_cache``."""
    key = hashlib.sha256((_PRELUDE + source + repr(options)).encode()).hexdigest()[:24]
    library = BUILT / f"{key}.so"
    done["kernels"] += 1
    if os.environ.get("FAKE_CUDA_NVRTC") and not library.with_suffix(".nvrtc").exists():
        compiler.compile_using_nvrtc(source, tuple(options), _ARCH, cache_in_memory=True)
        library.with_suffix(".nvrtc").touch()
    with _one_compiler:
        if not library.exists():
            _by_gxx(source, library)
    module = cupy.cuda.function.Module()
    module.load(str(library).encode() + b"\0")
    return module


def _by_gxx(source: str, library: Path) -> None:
    sync = "__syncthreads" in source or "__shfl" in source
    lines = [f"#define SYNC {int(sync)}", _PRELUDE, _FOREIGN.sub("", source)]
    for name in _KERNEL.findall(source):
        lines.append(f'extern "C" void run__{name}(void** p, unsigned g, unsigned b) {{ launch({name}, p, g, b); }}')
    code, own = library.with_suffix(".cpp"), library.with_suffix(f".{os.getpid()}")
    code.write_text("\n".join(lines))
    include = Path(cupy.__file__).parent / "_core" / "include"
    command = [*_COMPILER, f"-I{include}", f"-I{headers()}", str(code), "-o", str(own)]
    subprocess.run(command, check=True)
    own.rename(library)


# --- Thrust and CUB --------------------------------------------------------------------------

_SORTED = frozenset("?bBhHiIlLqQefdFD")
_REDUCED = frozenset("bBhHiIlLqQefdFD")
_SUMMED = frozenset("lLqQefdFD")


def memory(at: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """What lies in the card's memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(at), dtype).reshape(shape)


def _sort(dtype: Any, data: int, _keys: int, shape: Sequence[int]) -> None:
    if np.dtype(dtype).char not in _SORTED:
        raise NotImplementedError(f"Sorting arrays with dtype '{dtype}' is not supported")
    memory(data, dtype, shape).sort(kind="stable")


def _argsort(dtype: Any, order: int, data: int, keys: int, shape: Sequence[int]) -> None:
    memory(order, np.int64, shape)[...] = np.argsort(memory(data, dtype, shape), kind="stable")
    _sort(dtype, data, keys, shape)


def _reduction(array: Any, op: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """In place of ``cub.cub_reduction``; None where cupy takes its own kernel, as there."""
    name = op.name.removeprefix("CUPY_CUB_").lower()
    known = _REDUCED if dtype is not None or name not in ("sum", "prod") else _SUMMED
    own = array.dtype.char in known and dtype in (None, array.dtype)
    if not array.flags.c_contiguous or _get_axis(axis, array.ndim)[1] or not own:
        return None
    assert out is None
    assert not keepdims
    assert array.size or name in ("sum", "prod"), "zero-size array to reduction operation"
    done[f"{name} of {array.dtype}"] += 1
    return cupy.asarray(np.asarray(getattr(np, name)(memory(array.data.ptr, array.dtype, array.shape))))


def _scan(array: Any, op: Any) -> Any:
    """In place of ``cub.cub_scan``."""
    if array.dtype.char not in _REDUCED:
        return None
    assert op.name == "CUPY_CUB_CUMSUM"
    assert array.flags.c_contiguous
    done[f"cumsum of {array.dtype}"] += 1
    values = memory(array.data.ptr, array.dtype, array.shape)
    values[...] = np.cumsum(values, dtype=array.dtype)
    return array


def _histogram(*_: Any) -> Any:
    raise AssertionError("CUB's histogram takes too much memory: see gpu_ops.cudf_backend.device")


compiler._compile_module_with_cache = _compile
thrust.sort, thrust.argsort = _sort, _argsort
cub.cub_reduction, cub.cub_scan, cub.cub_histogram = _reduction, _scan, _histogram
cupy._core.set_reduction_accelerators([])  # CUB by the block: its headers are nothing for g++


def modules() -> dict[str, types.ModuleType]:
    """cupy and cupyx by name."""
    return {name: sys.modules[name] for name in ("cupy", "cupyx")}
