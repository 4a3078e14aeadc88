"""The backend of gpu-join on pandas, numpy and pyarrow: same answers, row for row, without a GPU.

A package of its own beside `gpu_ops`, which comes with it: nothing else of the pack imports pandas.
Users need no name of it.
"""

from cpu_fallback.kernels import CpuKernels

__all__ = ["CpuKernels"]
