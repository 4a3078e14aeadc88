"""Operators on Spark: DataFrames in, a DataFrame out; the names in ``__init__.pyi`` are imported when first used.

State servers and Python workers import single modules of this package, and should not import the others.
"""

from gpu_ops.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
