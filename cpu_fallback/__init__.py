"""The backend on pandas, numpy and pyarrow: same answers, row for row, without a GPU."""

from cpu_fallback.kernels import CpuKernels

__all__ = ["CpuKernels"]
