"""Which backend, and why."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal, get_args

from gpu_ops.errors import BackendError, DescriptionError
from gpu_ops.kernels import Kernels, Probe

Backend = Literal["auto", "cpu", "gpu"]

_log = logging.getLogger("gpu_ops")


def gpu_available() -> tuple[bool, str]:
    """Whether a GPU answers, and the reason. Importing cuDF proves nothing, so cupy is asked for a device."""
    for module in ("cupy", "pylibcudf", "rmm"):
        if importlib.util.find_spec(module) is None:
            return False, f"{module} is not installed"
    from gpu_ops.cudf_backend.device import describe_device  # noqa: PLC0415 - needs cupy

    return describe_device()


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
