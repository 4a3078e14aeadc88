"""Which backend, and why: decided once per process, as a GPU that fails later does not make a process a CPU's."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Final, Literal, get_args

from gpu_ops.errors import BackendError, DescriptionError
from gpu_ops.kernels import Kernels, Probe
from gpu_ops.state.files import temporary_folder

Backend = Literal["auto", "cpu", "gpu"]

_log = logging.getLogger("gpu_ops")


@functools.cache
def gpu_available() -> tuple[bool, str]:
    """Tells whether a GPU answered when this was first asked, and the reason.

    Importing cuDF proves nothing, so cupy is asked for a device.
    """
    for module in ("cupy", "pylibcudf", "rmm"):
        if importlib.util.find_spec(module) is None:
            return False, f"{module} is not installed"
    for name, folder in kernel_caches().items():
        os.environ.setdefault(name, folder)
    try:
        from gpu_ops.cudf_backend.device import describe_device  # noqa: PLC0415 - needs cupy
    except OSError as error:
        return False, f"cupy has no folder for the kernels that it compiles: {error}; CUPY_CACHE_DIR names one"
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return describe_device()


_CACHES: Final = ("CUPY_CACHE_DIR", "LIBCUDF_KERNEL_CACHE_PATH", "CUDA_CACHE_PATH")
"""Where cupy, libcudf and CUDA's driver keep the kernels that they compile; by default in the home folder."""


def kernel_caches() -> dict[str, str]:
    """Variables for the folders of compiled kernels, where there is no home to keep them in.

    cupy cannot even be imported where it cannot make its folder: YARN's home is ``/home`` or ``/`` by default, and a
    user without an entry in ``/etc/passwd`` has none. A folder of the user's is used again by the next process, as
    compiling takes more than a minute; one of this process's own where that name is something else's.
    """
    home = Path(os.path.expanduser("~/.cupy/kernel_cache"))  # as cupy does it
    if home.is_absolute() and _is_writable(home):
        return {}
    found = Path(tempfile.gettempdir()) / f"gpu-join-kernels-{os.getuid()}"
    there = found.lstat() if _is_writable(found) else None
    # what others could write to would be run on the card
    own = there is not None and there.st_uid == os.getuid() and there.st_mode == stat.S_IFDIR | 0o700
    return dict.fromkeys(_CACHES, str(found if own else temporary_folder()))


def _is_writable(folder: Path) -> bool:
    """Makes a folder if it is not there; True if files can be written to it."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


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
