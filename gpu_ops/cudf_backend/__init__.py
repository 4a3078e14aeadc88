"""The backend on pylibcudf and cupy: the same answers as `cpu_fallback`, row for row, from GPU memory."""

from gpu_ops.cudf_backend.kernels import CudfKernels

__all__ = ["CudfKernels"]
