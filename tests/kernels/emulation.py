"""The GPU backend on stand-ins for its libraries: its own code runs, on a CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from kernels import emulated_cupy, emulated_libcudf

_BACKEND = "gpu_ops.cudf_backend"


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Within it, ``backend="gpu"`` is the GPU backend on stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in sys.modules if n == _BACKEND or n.startswith(f"{_BACKEND}.")]:
            patch.delitem(sys.modules, name)
        for name, module in {**emulated_cupy.modules(), **emulated_libcudf.modules()}.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr("gpu_ops.backends.gpu_available", lambda: (True, "emulated"))
        try:
            yield
        finally:
            for name in [n for n in sys.modules if n == _BACKEND or n.startswith(f"{_BACKEND}.")]:
                del sys.modules[name]
