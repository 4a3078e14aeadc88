"""The real cupy without a card: its own checks, dispatch and kernels, on host memory.

`emulated_cupy` is quick and says what this project believes of cupy. Here cupy itself answers: CUDA's driver and runtime
are replaced by host memory (`driver.cpp`), and the CUDA C++ that cupy generates is compiled by g++ (`kernel.h`). What
NVIDIA compiled into cupy's wheel, sorts by Thrust and reductions and scans by CUB, is replaced by numpy, so of those
only the way there is cupy's. libcudf stays emulated. `build` says what is needed; then

    PYTHONPATH=tests python -m pytest -p kernels.fake_cuda.plugin tests/kernels/test_state.py -k emulated

This shows errors and wrong answers, not speed, and is no GPU test. With ``FAKE_CUDA_NVRTC=1`` NVRTC, which needs no
card either, compiles every kernel too.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BUILT = Path(os.environ.get("FAKE_CUDA", Path(tempfile.gettempdir()) / "fake_cuda"))
"""Where `build` puts things, and the compiled kernels lie."""
DRIVER = BUILT / "libcuda.so.1"
WRAPPER = BUILT / "runtime.so"


def headers() -> str:
    """The folder of CUDA's headers, as cupy finds it."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise FileNotFoundError("no headers of CUDA's runtime: pip install nvidia-cuda-runtime")
    return str(found)
