"""Which backend, and why: decided once per process, as a GPU that fails later does not make a process a CPU's."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from typing import Literal, get_args

from gpu_ops.errors import BackendError, DescriptionError
from gpu_ops.kernels import Kernels, Probe

Backend = Literal["auto", "cpu", "gpu"]

_log = logging.getLogger("gpu_ops")


@functools.cache
def gpu_available() -> tuple[bool, str]:
    """Whether a GPU answered when this was first asked, and the reason.

    Importing cuDF proves nothing, so cupy is asked for a device.
    """
    for module in ("cupy", "pylibcudf", "rmm"):
        if importlib.util.find_spec(module) is None:
            return False, f"{module} is not installed"
    try:
        from gpu_ops.cudf_backend.device import describe_device  # noqa: PLC0415 - needs cupy
    except OSError as error:
        return False, f"cupy has no folder for the kernels that it compiles: {error}; CUPY_CACHE_DIR names one"
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return describe_device()


def lost_gpu() -> str | None:
    """Why the GPU answers this process no more, if it has one and that is so: all it asks of CUDA fails likewise."""
    device = sys.modules.get("gpu_ops.cudf_backend.device")
    return None if device is None or not gpu_available()[0] else device.lost()


def make_kernels(
    backend: Backend = "auto", *, tiny_segments: bool = False, memory_limit: int | None = None, probe: Probe = "auto"
) -> tuple[Kernels, str]:
    """The kernels of a backend, and why it was taken.

    Args:
        backend: ``"auto"`` takes the GPU where one answers.
        tiny_segments: test setting: merge and grow at the smallest sizes.
        memory_limit: bytes of GPU memory that may be used, or None for most of what is free.
        probe: how the GPU finds candidates, see `gpu_ops.kernels.Probe`.

    Raises:
        BackendError: the GPU was asked for and none answers.
    """
    if backend not in get_args(Backend):
        raise DescriptionError(f"backend={backend!r}; it is one of {', '.join(get_args(Backend))}")
    if probe not in get_args(Probe):
        raise DescriptionError(f"probe={probe!r}; it is one of {', '.join(get_args(Probe))}")
    if backend != "cpu":
        found, why = gpu_available()
        if found:
            from gpu_ops.cudf_backend import CudfKernels  # noqa: PLC0415 - needs cuDF

            _log.info("backend gpu: %s", why)
            kernels: Kernels = CudfKernels(tiny_segments=tiny_segments, memory_limit=memory_limit, probe=probe)
            return kernels, why
        if backend == "gpu":
            raise BackendError(f"backend='gpu' was asked for, but no GPU answers: {why}")
        reason = f"no GPU answers: {why}"
    else:
        reason = "asked for"
    from cpu_fallback import CpuKernels  # noqa: PLC0415 - keeps `import gpu_ops` free of pandas

    _log.info("backend cpu: %s", reason)
    return CpuKernels(tiny_segments=tiny_segments), reason
